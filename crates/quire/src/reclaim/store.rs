//! From limbo to swap: what becomes of evicted pages' bytes.

use crate::control::Event;
use crate::frames::QueueEnd;
use crate::mmu::{FrameId, FrameRun, Mmu};
use crate::page::{Flags, State, Stored};
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::swap::blob;
use crate::swap::compress::{Compressed, PageBytes, page_hash};
use crate::sys::monotonic_ns;
use crate::units::{PAGE_SIZE, PageNum};

/// Freed frames are handed over at the latest after so many: faults may wait for them.
const HANDOVER: usize = 32;

/// Why a page's bytes could not be stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unstored {
    /// They do not shrink, and there is no swap file to take them.
    Incompressible,
    /// There is no memory for a slab just now.
    NoRoom,
}

impl<M: Mmu> VmSpace<M> {
    /// Empties limbo from its old end until `target` frames are free; returns how many are.
    pub(crate) fn shrink_limbo(&self, target: usize, scratch: &mut Scratch) -> usize {
        let freed = self.shrink_queued(target, scratch);
        // What cannot go keeps the queue from ever running dry: the window that is being filled
        // must get its turn all the same.
        if freed == 0 && target > 0 && self.frames.close_window() {
            return self.shrink_queued(target, scratch);
        }
        freed
    }

    fn shrink_queued(&self, target: usize, scratch: &mut Scratch) -> usize {
        let mut freed = 0;
        // Windows that keep something are queued again: look at each once, and at the window that
        // is being filled where the queue runs dry.
        for _ in 0..self.frames.queued_windows().max(1) {
            if freed >= target {
                break;
            }
            let Some(window) = self.frames.oldest_window() else { break };
            let start = monotonic_ns();
            freed += self.shrink_window_of_limbo(window, target - freed, scratch);
            self.budget.count(Event::CompressNs, (monotonic_ns() - start) as usize);
            let end = if freed >= target { QueueEnd::Oldest } else { QueueEnd::Youngest };
            self.frames.return_window(window, end);
        }
        freed
    }

    fn shrink_window_of_limbo(&self, window: u32, target: usize, scratch: &mut Scratch) -> usize {
        let mut freed = 0;
        let mut pending = FrameRun { start: FrameId(0), len: 0 };
        for frame in self.frames.limbo_frames(window) {
            if !self.store_limbo_page(frame, scratch) {
                continue;
            }
            freed += 1;
            if pending.len > 0 && pending.start.add(pending.len) == frame && pending.len < HANDOVER
            {
                pending.len += 1;
            } else {
                self.frames.put(pending);
                pending = FrameRun { start: frame, len: 1 };
            }
            if freed >= target {
                break;
            }
        }
        self.frames.put(pending);
        self.answer_starved();
        freed
    }

    /// Moves one page from limbo to swap; its frame is taken then, for the caller to hand over.
    fn store_limbo_page(&self, frame: FrameId, scratch: &mut Scratch) -> bool {
        let page = self.frames.owner_of(frame);
        self.mmu.step();
        let Some(page) = self.try_lock_page(page) else { return false };
        let is_it = page.state() == State::Limbo && page.content().payload() == frame.0;
        let is_hopeless = page.has(Flags::INCOMPRESSIBLE) && !page.has(Flags::LAZYFREE);
        if !is_it || is_hopeless {
            return false;
        }
        let one = FrameRun { start: frame, len: 1 };
        if page.has(Flags::LAZYFREE) {
            self.frames.leave_limbo(one);
            self.budget.count(Event::Pglazyfreed, 1);
            self.budget.add_wanted(-1);
            page.drop_content();
            return true;
        }
        // SAFETY: a frame in limbo belongs to its owner, which is locked.
        let bytes = unsafe { &*self.mmu.frame(frame) };
        match self.store_page(page.page(), bytes, scratch) {
            Ok(stored) => {
                self.frames.leave_limbo(one);
                page.store(stored);
                true
            }
            // It stays as it is until a fault takes it back: no need to try again.
            Err(Unstored::Incompressible) => {
                page.set_flags(Flags::INCOMPRESSIBLE);
                false
            }
            Err(Unstored::NoRoom) => false,
        }
    }

    /// Puts a locked page's bytes into swap; returns where they are then, or why
    /// they could not be stored.
    pub(crate) fn store_page(
        &self,
        page: PageNum,
        bytes: &PageBytes,
        scratch: &mut Scratch,
    ) -> Result<Stored, Unstored> {
        let (kind, packed): (blob::Packing, &[u8]) = match scratch.compressor().compress(bytes) {
            Compressed::Same(pattern) => {
                self.budget.count(Event::Pswpout, 1);
                self.budget.count(Event::SwpoutZero, 1);
                return Ok(Stored::Same(pattern));
            }
            Compressed::Lz4(packed) => (blob::Packing::Lz4, packed),
            // Without a swap file a page that does not shrink is better left where it is.
            Compressed::Raw if !self.swap.has_file() => return Err(Unstored::Incompressible),
            Compressed::Raw => (blob::Packing::Raw, bytes),
        };
        let hash = page_hash(bytes);
        let mut stored = self.swap.zpool.store(page, kind, packed, hash, &self.budget);
        // A few free frames that are given back are a slab of the pool's.
        let may_find_room = || {
            self.swap.zpool.trim(&self.budget) > 0
                || self.release_free_frames(self.frames.free().saturating_sub(8)) > 0
        };
        if stored.is_err() && may_find_room() {
            stored = self.swap.zpool.store(page, kind, packed, hash, &self.budget);
        }
        let handle = stored.map_err(|_| Unstored::NoRoom)?;
        self.budget.count(Event::Pswpout, 1);
        self.budget.count(Event::Zswpout, 1);
        self.budget.count(Event::ZswpoutBytes, packed.len().min(PAGE_SIZE));
        Ok(Stored::Pool(handle.get()))
    }
}
