//! Eviction without a move: bytes go to swap straight away, and the pages are dropped.
//!
//! For pages that the kernel does not move: those that may not be written, and those that another
//! process has as well, since a fork. To make the latter our own first would be a copy that is made
//! only to be moved, and memory for it while memory is short; so they are read where they are
//! (docs/decisions/0024). Where the other process is gone a page is ours again for the asking, and moves.
//!
//! Pages are write-protected before they are read: a write of the program's then finds the page
//! locked, waits, and is made where the page comes back to. What the other process writes it writes to
//! a copy of its own.

use core::sync::atomic::Ordering;

use super::evict::{Evicted, Runs, UnmapBatch};
use crate::control::Event;
use crate::mmu::{Mmu, Protection, Sharer};
use crate::page::{Flags, LockedPage, Stored};
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

/// Pages that are stored before the first of them is dropped: for so many the reserve has memory.
const CHUNK: usize = 16;

/// Which processes have pages that do not move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sharers {
    /// Another process has these pages as well.
    Others(PageRange),
    /// No other process has these pages (any more).
    Own(PageRange),
    /// There was no fork: the page is pinned.
    Unknown,
}

impl<M: Mmu> VmSpace<M> {
    /// Which processes have the first page of `rest`, which the kernel does not move, and those behind it that are
    /// alike; up to the batch's next hole.
    pub(super) fn sharing(&self, rest: PageRange, batch: &UnmapBatch) -> Sharers {
        if !self.has_forked.load(Ordering::Relaxed) {
            return Sharers::Unknown;
        }
        let mut sharers = [Sharer::Missing; BLOCK_PAGES];
        let sharers = &mut sharers[..rest.len()];
        if !self.mmu.look_at_sharers(rest, sharers) {
            return Sharers::Own(PageRange::new(rest.start, 1));
        }
        let first = sharers[0];
        let is_alike =
            |(page, sharer): (PageNum, &Sharer)| *sharer == first && batch.before(page).is_some();
        let alike = rest.pages().zip(&*sharers).take_while(|&each| is_alike(each)).count();
        let run = PageRange::new(rest.start, alike);
        match first {
            _ if run.is_empty() => Sharers::Unknown,
            Sharer::Others => Sharers::Others(run),
            Sharer::None => Sharers::Own(run),
            // The program dropped it by a bare system call, or the kernel has swapped it out.
            Sharer::Missing => Sharers::Unknown,
        }
    }

    /// Makes pages our own again that a fork once shared. Not where they are write-protected: the kernel
    /// would send the fault to us, and we hold them. Not in direct reclaim, which a handler may do.
    pub(super) fn make_own(&self, run: PageRange, batch: &UnmapBatch) -> bool {
        let is_protected =
            |page| batch.before(page).is_some_and(|before| before.has(Flags::WRITE_PROTECTED));
        !run.pages().any(is_protected) && self.mmu.make_exclusive(run).refusal.is_none()
    }

    /// Copies the locked victims of `range` to swap, drops them, and unlocks all of it.
    pub(super) fn evict_by_copy(
        &self,
        range: PageRange,
        batch: &UnmapBatch,
        scratch: &mut Scratch,
    ) -> Evicted {
        let mut evicted = Evicted::default();
        let mut at = range.start;
        while at < range.end {
            let chunk = PageRange::new(at, CHUNK).intersect(range);
            evicted.add(self.evict_chunk_by_copy(chunk, batch, scratch));
            at = chunk.end;
        }
        evicted
    }

    fn evict_chunk_by_copy(
        &self,
        chunk: PageRange,
        batch: &UnmapBatch,
        scratch: &mut Scratch,
    ) -> Evicted {
        let mut evicted = Evicted::default();
        // Holes have no protection to get.
        let is_protected =
            self.mmu.write_protect(chunk, Protection::WriteProtected).refusal.is_none();
        let mut copied: [Option<(LockedPage<'_, Self>, Stored)>; CHUNK] = [const { None }; CHUNK];
        let mut runs = Runs::default();
        for (page, copied) in chunk.pages().zip(&mut copied) {
            let Some(mut victim) = batch.victim(self, page) else {
                self.unlock_page(page);
                continue;
            };
            let stored = if is_protected { self.copy_out(&mut victim, scratch) } else { None };
            match stored {
                Some(stored) => {
                    *copied = Some((victim, stored));
                    runs.push(page);
                }
                None => {
                    let Some(victim) = self.drop_if_missing(victim) else {
                        evicted.freed += 1;
                        continue;
                    };
                    if !victim.has(Flags::WRITE_PROTECTED) {
                        let one = PageRange::new(page, 1);
                        let _ = self.mmu.write_protect(one, Protection::Writable);
                    }
                    evicted.refused += 1;
                }
            }
        }
        let freed = copied.iter().flatten().count();
        if freed > 0 {
            let calls = self.mmu.unmap_all(runs.as_slice());
            self.budget.count(Event::UnmapCalls, calls);
            self.budget.count(Event::UnmapPages, freed);
            self.count_unmapped(chunk.start, freed);
            self.budget.uncharge(freed);
            evicted.freed += freed;
        }
        copied.into_iter().flatten().for_each(|(page, stored)| page.store(stored));
        evicted
    }

    /// Puts a write-protected page's bytes into swap; says where. `None`: it stays mapped.
    fn copy_out(&self, page: &mut LockedPage<'_, Self>, scratch: &mut Scratch) -> Option<Stored> {
        debug_assert!(!page.has(Flags::CLEAN), "a clean page is dropped, not copied");
        let mut bytes = [0u8; PAGE_SIZE];
        if !self.mmu.read(page.page(), &mut bytes) {
            return None;
        }
        self.store_page(page.page(), &bytes, scratch).ok()
    }
}
