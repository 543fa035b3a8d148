//! Clean pages: mapped, write-protected, and known to be as they are in store.
//!
//! What a read brings in becomes clean (`fault/window.rs`); the first write ends it
//! (`fault/mod.rs`), and reclaim drops clean pages without a move (`reclaim/evict.rs`). Here is what
//! else ends it: the kernel lifts the protection where it moves a page and where it copies a table
//! for a fork, and it takes the fault of a protected page itself where it is to make it our own
//! again, which the thread that asked for that would then have to serve. So the protection is
//! lifted, and the word changed, before any of these.

use core::sync::atomic::Ordering;

use super::AddressSpace;
use crate::mmu::{Mmu, Protection};
use crate::page::{Flags, Snapshot, State};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PageNum, PageRange};

impl<M: Mmu> AddressSpace<M> {
    /// Lets go of what a locked, mapped page keeps in store.
    pub(crate) fn release_kept(&self, before: Snapshot) {
        let Some(kept) = before.kept() else { return };
        match kept.state() {
            State::Pool => {
                self.swap.forget_copy();
                // SAFETY: the page is locked, and its word is about to forget the handle.
                unsafe { self.swap.free_blob(kept.payload(), &self.budget) };
            }
            State::File => self.swap.free_location(kept.payload()),
            _ => {}
        }
    }

    /// The word of a locked, clean page that may be written from now on: it gives up what it has
    /// in store.
    pub(crate) fn unclean(&self, before: Snapshot) -> Snapshot {
        self.release_kept(before);
        before.without_kept()
    }

    /// Ends it for locked pages, and makes them writable but for those whose writes are tracked.
    pub(crate) fn lift_clean(&self, range: PageRange) {
        let is_liftable = |page: &PageNum| {
            let word = self.snapshot(*page);
            word.has(Flags::CLEAN) && !word.has(Flags::WRITE_PROTECTED)
        };
        let mut at = range.start;
        while at < range.end {
            let rest = PageRange { start: at, end: range.end };
            let run = PageRange::new(at, rest.pages().take_while(is_liftable).count());
            if !run.is_empty() {
                let _ = self.mmu.write_protect(run, Protection::Writable);
            }
            // The one behind the run is tracked, or not clean.
            for page in run.pages().chain((run.end < range.end).then_some(run.end)) {
                let before = self.snapshot(page);
                if before.has(Flags::CLEAN) {
                    self.word(page).set(self.unclean(before));
                }
            }
            at = run.end.add(1);
        }
    }

    /// Locks the clean pages next to `page`, which is locked, as far as `bounds`.
    pub(crate) fn lock_clean_around(&self, page: PageNum, bounds: PageRange) -> PageRange {
        let is_clean = |seen: Snapshot| {
            seen.state() == State::Mapped
                && seen.has(Flags::CLEAN)
                && !seen.has(Flags::WRITE_PROTECTED)
        };
        let try_join = |page: PageNum| {
            let word = self.word(page);
            let seen = word.load();
            if seen.is_locked() || !is_clean(seen) {
                return false;
            }
            let Some(now) = word.try_lock() else { return false };
            if !is_clean(now) {
                self.unlock_page(page);
            }
            is_clean(now)
        };
        let mut range = PageRange::new(page, 1);
        while range.end < bounds.end && try_join(range.end) {
            range.end = range.end.add(1);
        }
        while range.start > bounds.start && try_join(PageNum(range.start.0 - 1)) {
            range.start.0 -= 1;
        }
        range
    }

    /// In a fork's child: its pages are not write-protected, so nothing tells a write.
    pub(super) fn forget_clean(&self) {
        for block in 0..self.blocks_used_max.load(Ordering::Relaxed) {
            if self.blocks[block].mapped.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let range = PageRange::new(PageNum((block << BLOCK_ORDER) as u64), BLOCK_PAGES);
            for page in range.pages().filter(|&page| self.snapshot(page).has(Flags::CLEAN)) {
                let before = self.lock_page(page);
                let after = self.unclean(before);
                self.unlock_page_with(page, after);
            }
        }
    }
}
