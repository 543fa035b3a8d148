//! The shrinker of the objects' caches.
//!
//! A clock hand goes over the blocks of all objects. A page that gets its second chance
//! ([`crate::reclaim`]) is unmapped. Any other clean page is dropped. Where only dirty ones are
//! found they are sent to the store.

use core::sync::atomic::Ordering;

use super::rmap::Wait;
use super::{Hand, Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Block, Flags, Snapshot, State};
use crate::reclaim::{Reclaimer, Shrinker};
use crate::scratch::Scratch;
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange};

/// Pages of memory objects that are packed at a time, all of them locked.
const STORE_MAX: usize = 64;

#[derive(Clone, Copy, Default, Debug)]
struct Shrunk {
    freed: usize,
    /// Pages that must be written first.
    dirty: usize,
}

/// What is to become of a page that does not stay as it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CacheFate {
    Unmap,
    Drop,
    /// A memory object's dirty page: it is put into swap, and dropped.
    Store,
}

impl<M: ObjectMmu> Shrinker for Objects<M> {
    fn count(&self) -> usize {
        self.cached_pages()
    }

    /// Frees about `target` pages of objects, going round at most twice. Without a scratch nothing
    /// can be packed: memory objects keep their dirty pages.
    fn scan(&self, target: usize, who: Reclaimer, mut scratch: Option<&mut Scratch>) -> usize {
        let mut all = Shrunk::default();
        let mut rounds = 0;
        while all.freed < target && rounds < 3 {
            let mut hands = self.registry.lock();
            let cached = |block: &Block| block.mapped.load(Ordering::Relaxed);
            let next = self.next_block(&mut hands.reclaim, |object| object.pages_max, cached);
            let Some((object, block, _)) = next else {
                rounds += 1;
                continue;
            };
            // The registry stays locked: the object must not go meanwhile.
            let shrunk = self.shrink_block(object, block_range(block), who, scratch.as_deref_mut());
            all.freed += shrunk.freed;
            all.dirty += shrunk.dirty;
        }
        if who == Reclaimer::Kswapd && all.freed == 0 && all.dirty > 0 {
            self.send_write_back(all.dirty.max(BLOCK_PAGES));
        }
        all.freed
    }
}

/// Whether a page is cached, and neither pinned nor under way to the store.
const fn is_idle(word: Snapshot) -> bool {
    matches!(word.state(), State::Cached)
        && !word.has(Flags::WRITEBACK)
        && !word.has(Flags::MLOCKED)
}

pub(super) fn block_range(block: usize) -> ObjectRange {
    ObjectRange::new(ObjectPage((block * BLOCK_PAGES) as u64), BLOCK_PAGES)
}

impl<M: ObjectMmu> Objects<M> {
    /// The next block, from where `hand` is, of the first `pages` pages of any object, of which
    /// `count` is not 0, and that count; `None`, with the hand at the start again, once it has come
    /// to the last object's end. The registry is locked.
    pub(super) fn next_block(
        &self,
        hand: &mut Hand,
        pages: impl Fn(&VmObject) -> usize,
        count: impl Fn(&Block) -> u32,
    ) -> Option<(&VmObject, usize, usize)> {
        while hand.slot < self.slots_used.load(Ordering::Relaxed) {
            if let Some(object) = self.peek(hand.slot) {
                for at in hand.block..pages(object).div_ceil(BLOCK_PAGES) {
                    let counted = self.find_block(object, block_range(at).start).map_or(0, &count);
                    if counted > 0 {
                        hand.block = at + 1;
                        return Some((object, at, counted as usize));
                    }
                }
            }
            *hand = Hand { slot: hand.slot + 1, block: 0 };
        }
        *hand = Hand::default();
        None
    }

    /// Goes over the cached pages of one block, in runs that share a fate.
    fn shrink_block(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        who: Reclaimer,
        mut scratch: Option<&mut Scratch>,
    ) -> Shrunk {
        let mut shrunk = Shrunk::default();
        let end = pages.end.0.min(object.pages_max as u64);
        let mut run = ObjectRange { start: pages.start, end: pages.start };
        let mut fate = None;
        for page in (pages.start.0..end).map(ObjectPage) {
            let next = self.lock_victim(object, page, who, scratch.is_some(), &mut shrunk);
            if next != fate || (fate == Some(CacheFate::Store) && run.len() >= STORE_MAX) {
                self.end_run(object, run, fate, scratch.as_deref_mut(), &mut shrunk);
                run.start = page;
                fate = next;
            }
            run.end = page.add(1);
        }
        self.end_run(object, run, fate, scratch, &mut shrunk);
        let budget = self.space.budget();
        budget.count(who.scan(), pages.len());
        budget.count(who.steal(), shrunk.freed);
        shrunk
    }

    /// Says what is to become of a page, and keeps its lock; `None`: it stays, and is not locked.
    fn lock_victim(
        &self,
        object: &VmObject,
        page: ObjectPage,
        who: Reclaimer,
        can_store: bool,
        shrunk: &mut Shrunk,
    ) -> Option<CacheFate> {
        let locked = self.try_lock_if(object, page, is_idle)?;
        let is_dirty = locked.has(Flags::DIRTY);
        if is_dirty && !object.is_memory {
            shrunk.dirty += 1;
            return None;
        }
        if is_dirty && (locked.has(Flags::INCOMPRESSIBLE) || !can_store) {
            return None;
        }
        let fate = match who.spares(locked.content()) {
            true => CacheFate::Unmap,
            false if is_dirty => CacheFate::Store,
            false => CacheFate::Drop,
        };
        locked.leave_locked();
        Some(fate)
    }

    /// Has a run of locked pages of one block meet its fate, and unlocks it.
    fn end_run(
        &self,
        object: &VmObject,
        run: ObjectRange,
        fate: Option<CacheFate>,
        scratch: Option<&mut Scratch>,
        shrunk: &mut Shrunk,
    ) {
        match (fate, scratch) {
            (None, _) => {}
            (Some(CacheFate::Drop), _) => shrunk.freed += self.drop_locked(object, run, Wait::No),
            _ if !self.try_to_unmap(object, run, Wait::No) => self.unlock_pages(object, run),
            (Some(CacheFate::Store), Some(scratch)) => {
                shrunk.freed += self.store_run(object, run, scratch);
            }
            _ => run.pages().for_each(|page| self.adopt(object, page).clear_flags(Flags::ACCESSED)),
        }
    }

    /// Drops what is cached of `pages`, but for what is dirty, pinned or busy; returns how many.
    pub fn drop_cached(&self, object: &VmObject, pages: ObjectRange) -> usize {
        let drop_page = |page| {
            let can_go = |word: Snapshot| is_idle(word) && !word.has(Flags::DIRTY);
            match self.try_lock_and_leave(object, page, can_go) {
                true => self.drop_locked(object, ObjectRange::new(page, 1), Wait::Yes),
                false => 0,
            }
        };
        pages.intersect(object.range()).pages().map(drop_page).sum()
    }

    /// Drops locked, cached, clean pages of one block from every mapping and from the cache, and
    /// unlocks them; returns how many are dropped: all or none.
    fn drop_locked(&self, object: &VmObject, run: ObjectRange, wait: Wait) -> usize {
        if !self.try_to_forget(object, run, wait) || !self.try_to_punch(object, run) {
            self.unlock_pages(object, run);
            return 0;
        }
        for page in run.pages() {
            let page = self.adopt(object, page);
            if object.is_memory {
                self.note_uncached(page.content());
            } else {
                object.synced.note_dropped(page.content());
            }
            page.uncache();
        }
        run.len()
    }

    /// Takes locked pages of one block, which are mapped nowhere, out of the memfd and the account;
    /// `false` where they are there still.
    pub(super) fn try_to_punch(&self, object: &VmObject, run: ObjectRange) -> bool {
        let is_gone = self.space.mmu().memfd_punch(object.memfd, run).is_ok();
        if is_gone {
            self.count_uncached(object, run.start, run.len());
            self.space.budget().uncharge(run.len());
        }
        is_gone
    }

    /// The object of a slot, while the registry is locked.
    pub(super) fn peek(&self, slot: usize) -> Option<&VmObject> {
        let object = self.slots[slot].load(Ordering::Acquire);
        // SAFETY: only discarded under the registry's lock.
        unsafe { object.as_ref() }
    }
}
