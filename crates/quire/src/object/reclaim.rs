//! Which cached pages go.
//!
//! A clock hand goes over the blocks of all objects. A page that a fault asked for since the hand
//! last came is unmapped, and stays in its memfd: the next access shows that it is in use, for the
//! price of a minor fault. Any other clean page is dropped. Dirty pages are sent to the store.
//!
//! Locks: the registry's mutex, which keeps objects from going, for one block at a time; page
//! locks and `i_mmap`, tried.

use core::sync::atomic::Ordering;

use super::rmap::Wait;
use super::{Object, Objects};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, State};
use crate::reclaim::{Balance, Reclaimer};
use crate::scratch::Scratch;
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange};

/// Pages that a fault reclaims by itself at a time.
const DIRECT_MAX: usize = 128;

/// Pages of memory objects that are packed at a time, all of them locked.
const STORE_MAX: usize = 64;

/// What a pass over pages found.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Shrunk {
    /// Pages whose memory is free.
    pub freed: usize,
    /// Pages that got a second chance.
    pub unmapped: usize,
    /// Pages that must be written first.
    pub dirty: usize,
}

/// What is to become of a locked page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stay,
    Unmap,
    Drop,
    /// A memory object's dirty page: it is put into swap, and dropped.
    Store,
}

impl<M: ObjectMmu> Objects<M> {
    /// Makes sure that a fault finds a page, and as a rule the `wanted` ones, reclaiming where it
    /// must. `false`: there is none.
    pub(super) fn make_room(&self, wanted: usize, mut scratch: Option<&mut Scratch>) -> bool {
        let wanted = wanted.clamp(1, DIRECT_MAX);
        self.space.budget().count(Event::Allocstall, 1);
        for _ in 0..4 {
            // Free frames are anonymous memory's; their charge is wanted here.
            let missing = wanted.saturating_sub(self.space.chargeable_now());
            if missing > 0 {
                let keep = self.space.frames().free().saturating_sub(missing);
                self.space.release_free_frames(keep);
            }
            if self.space.chargeable_now() >= wanted {
                return true;
            }
            let shrunk = self.shrink(wanted.max(32), Reclaimer::Direct, scratch.as_deref_mut());
            let is_spent = shrunk.freed == 0 && self.space.has_evictable();
            if let Some(scratch) = scratch.as_deref_mut().filter(|_| is_spent) {
                self.reclaim_anonymous(wanted.max(32), scratch);
            }
            if self.space.chargeable_now() > 0 && shrunk.freed > 0 {
                return true;
            }
        }
        self.space.budget().call_for_memory();
        self.space.chargeable_now() > 0
    }

    /// Never inlined: it takes much of a stack, and who has no scratch has little.
    #[inline(never)]
    fn reclaim_anonymous(&self, target: usize, scratch: &mut Scratch) {
        self.space.reclaim(target, Reclaimer::Direct, scratch);
    }

    /// One step of the background thread, over both kinds of memory.
    pub fn balance(&self, scratch: &mut Scratch) -> Balance {
        self.balance_dirty();
        self.answer_unparked();
        let mut freed = 0;
        if self.space.is_below_high() {
            // Each kind gives in proportion to what it has.
            let cached = self.cached_pages();
            let held = self.space.budget().held();
            let share = BLOCK_PAGES / 2 * cached / held.max(1);
            if share > 0 {
                let shrunk = self.shrink(share.max(32), Reclaimer::Kswapd, Some(scratch));
                freed += shrunk.freed + shrunk.unmapped;
                if shrunk.freed == 0 && shrunk.dirty > 0 {
                    self.send_write_back(shrunk.dirty.max(BLOCK_PAGES));
                }
            }
            if cached > 0 && !self.space.has_evictable() {
                self.space.answer_starved();
                return if freed > 0 { Balance::Progress } else { Balance::Stuck };
            }
        }
        match self.space.balance(scratch) {
            Balance::Stuck if freed > 0 => Balance::Progress,
            other => other,
        }
    }

    /// Frees about `target` pages of objects, going round at most twice. Without a scratch nothing
    /// can be packed: memory objects keep their dirty pages.
    pub(super) fn shrink(
        &self,
        target: usize,
        who: Reclaimer,
        mut scratch: Option<&mut Scratch>,
    ) -> Shrunk {
        let mut all = Shrunk::default();
        let mut rounds = 0;
        while all.freed < target && rounds < 3 {
            let mut hands = self.registry.lock();
            let slots = self.slots_used.load(Ordering::Relaxed);
            let (slot, from) = hands.reclaim;
            if slot >= slots {
                hands.reclaim = (0, 0);
                rounds += 1;
                continue;
            }
            let next = self.peek(slot).and_then(|object| {
                let blocks = object.pages_max().div_ceil(BLOCK_PAGES);
                let block = (from..blocks)
                    .find(|&block| object.blocks[block].cached.load(Ordering::Relaxed) > 0)?;
                Some((object, block))
            });
            let Some((object, block)) = next else {
                hands.reclaim = (slot + 1, 0);
                continue;
            };
            hands.reclaim = (slot, block + 1);
            // The registry stays locked: the object must not go meanwhile.
            let start = ObjectPage((block * BLOCK_PAGES) as u64);
            let pages = ObjectRange::new(start, BLOCK_PAGES);
            let shrunk = self.shrink_block(object, pages, who, scratch.as_deref_mut());
            all.freed += shrunk.freed;
            all.unmapped += shrunk.unmapped;
            all.dirty += shrunk.dirty;
        }
        all
    }

    /// Goes over the cached pages of one block, in runs that share a fate.
    fn shrink_block(
        &self,
        object: &Object,
        pages: ObjectRange,
        who: Reclaimer,
        mut scratch: Option<&mut Scratch>,
    ) -> Shrunk {
        let mut shrunk = Shrunk::default();
        let end = pages.end.0.min(object.pages_max() as u64);
        let mut run = ObjectRange { start: pages.start, end: pages.start };
        let mut fate = Fate::Stay;
        for page in (pages.start.0..end).map(ObjectPage) {
            let next = self.lock_victim(object, page, scratch.is_some(), &mut shrunk);
            if next != fate || (fate == Fate::Store && run.len() >= STORE_MAX) {
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

    /// Says what is to become of a page, and keeps its lock if it is not to stay.
    fn lock_victim(
        &self,
        object: &Object,
        page: ObjectPage,
        can_store: bool,
        shrunk: &mut Shrunk,
    ) -> Fate {
        let word = object.word(page);
        if word.load().state() != State::Cached {
            return Fate::Stay;
        }
        let Some(old) = word.try_lock() else { return Fate::Stay };
        let fate =
            if old.state() != State::Cached || old.has(Flags::WRITEBACK) || old.has(Flags::MLOCKED)
            {
                Fate::Stay
            } else if object.is_memory() && old.has(Flags::DIRTY) {
                match old.has(Flags::ACCESSED) {
                    _ if old.has(Flags::INCOMPRESSIBLE) || !can_store => Fate::Stay,
                    true => Fate::Unmap,
                    false => Fate::Store,
                }
            } else if old.has(Flags::DIRTY) {
                shrunk.dirty += 1;
                Fate::Stay
            } else if old.has(Flags::ACCESSED) {
                Fate::Unmap
            } else {
                Fate::Drop
            };
        if fate == Fate::Stay {
            self.space.unlock_word(word);
        }
        fate
    }

    fn end_run(
        &self,
        object: &Object,
        run: ObjectRange,
        fate: Fate,
        scratch: Option<&mut Scratch>,
        shrunk: &mut Shrunk,
    ) {
        if run.is_empty() || fate == Fate::Stay {
            return;
        }
        let is_done = match fate {
            Fate::Unmap | Fate::Store => self.try_to_unmap(object, run, Wait::No),
            _ => self.drop_locked(object, run, Wait::No),
        };
        match (fate, scratch) {
            _ if !is_done => self.unlock_words(object, run),
            (Fate::Store, Some(scratch)) => shrunk.freed += self.store_run(object, run, scratch),
            (Fate::Store, None) => self.unlock_words(object, run),
            (Fate::Unmap, _) => {
                shrunk.unmapped += run.len();
                for page in run.pages() {
                    let word = object.word(page);
                    let old = word.load();
                    self.space.unlock_word_with(word, old.without(Flags::ACCESSED));
                }
            }
            _ => {
                shrunk.freed += run.len();
                for page in run.pages() {
                    self.space.unlock_word_with(object.word(page), Object::GONE);
                }
            }
        }
    }

    /// Drops what is cached of `pages`, but for what is dirty, pinned or busy; returns how many.
    pub fn drop_cached(&self, object: &Object, pages: ObjectRange) -> usize {
        let pages = pages.intersect(object.range()).pages();
        pages.filter(|&page| self.drop_cached_page(object, page)).count()
    }

    fn drop_cached_page(&self, object: &Object, page: ObjectPage) -> bool {
        let word = object.word(page);
        let Some(old) = word.try_lock() else { return false };
        let can_go = old.state() == State::Cached
            && !old.has(Flags::DIRTY)
            && !old.has(Flags::WRITEBACK)
            && !old.has(Flags::MLOCKED)
            && self.drop_locked(object, ObjectRange::new(page, 1), Wait::Yes);
        self.space.unlock_word_with(word, if can_go { Object::GONE } else { old });
        can_go
    }

    /// Drops locked, cached, clean pages from every mapping and from the cache. Their words are
    /// the caller's to change.
    pub(super) fn drop_locked(&self, object: &Object, run: ObjectRange, wait: Wait) -> bool {
        if !self.try_to_forget(object, run, wait) {
            return false;
        }
        if self.space.mmu().memfd_punch(object.memfd, run).is_err() {
            // Still there; what is mapped will be found to be so.
            return false;
        }
        for page in run.pages() {
            object.synced.note_dropped(object.word(page).load());
        }
        self.uncharge_dropped(object, run);
        true
    }

    pub(super) fn uncharge_dropped(&self, object: &Object, run: ObjectRange) {
        self.note_dropped(object, run);
        object.count_uncached(run.start, run.len());
        self.cached.fetch_sub(run.len(), Ordering::Relaxed);
        self.space.budget().uncharge(run.len());
    }

    /// The object of a slot, while the registry is locked.
    pub(super) fn peek(&self, slot: usize) -> Option<&Object> {
        let object = self.slots[slot].0.load(Ordering::Acquire);
        // SAFETY: only discarded under the registry's lock.
        unsafe { object.as_ref() }
    }
}
