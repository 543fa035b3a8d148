//! Clean pages: mapped, write-protected, and known to be as they are in store.
//!
//! What a read brings in becomes clean (`fault/window.rs`); the first write ends it
//! (`fault/mod.rs`), and reclaim drops clean pages without a move (`reclaim/evict.rs`). Here is what
//! else ends it: the kernel lifts the protection where it moves a page and where it copies a table
//! for a fork, and it takes the fault of a protected page itself where it is to make it our own
//! again, which the thread that asked for that would then have to serve. So the protection is
//! lifted, and the word changed, before any of these.
//!
//! How many pages are kept clean follows how often they are written after all ([`crate::swap::Swap`]). A page
//! that is read alone from the swap file does not keep its place there, and a swap file that is full gets back
//! the places of pages that are in memory.

use super::VmSpace;
use super::release::Releases;
use crate::mmu::{Mmu, Protection};
use crate::page::{Flags, LockedPage, LockedRange, Snapshot, State, Stored};
use crate::units::{BLOCK_PAGES, PageRange};

impl<M: Mmu> VmSpace<M> {
    /// Lets go of what a locked page has in store, and not in memory.
    pub(crate) fn free_stored(&self, stored: Stored) {
        let mut releases = Releases::NONE;
        self.add_stored(&mut releases, stored);
        self.release(releases);
    }

    /// Lets go of all that a locked page has in store, beside memory or not.
    pub(crate) fn release_stored(&self, before: Snapshot) {
        if before.has(Flags::IN_POOL) {
            self.swap.forget_copies(1);
        }
        before.stored().into_iter().for_each(|stored| self.free_stored(stored));
    }

    /// Ends cleanness of locked pages, and makes them writable but for those whose writes are tracked.
    pub(crate) fn lift_clean(&self, pages: &mut LockedRange<'_, Self>) {
        let is_liftable =
            |word: Snapshot| word.has(Flags::CLEAN) && !word.has(Flags::WRITE_PROTECTED);
        let range = pages.range();
        let mut at = range.start;
        while at < range.end {
            let rest = PageRange { start: at, end: range.end };
            let liftable = rest.pages().take_while(|&page| is_liftable(pages.content(page)));
            let run = PageRange::new(at, liftable.count());
            if !run.is_empty() {
                let _ = self.mmu.write_protect(run, Protection::Writable);
            }
            // The one behind the run is tracked, or not clean.
            for page in run.pages().chain((run.end < range.end).then_some(run.end)) {
                let before = pages.content(page);
                if before.has(Flags::CLEAN) {
                    self.release_stored(before);
                    pages.end_clean_locked(page);
                }
            }
            at = run.end.add(1);
        }
    }

    /// The same for one page.
    pub(crate) fn lift_clean_of<'a>(&'a self, page: LockedPage<'a, Self>) -> LockedPage<'a, Self> {
        if !page.has(Flags::CLEAN) {
            return page;
        }
        let mut one = LockedRange::of(page);
        self.lift_clean(&mut one);
        one.take_first().expect("one page")
    }

    /// Lets go of what a locked, cached page of an object keeps in swap. It is DIRTY then.
    pub(crate) fn dirty_cached(&self, page: &mut LockedPage<'_, Self>) {
        self.release_stored(page.content());
        page.dirty();
    }

    /// Adds the clean pages next to a locked page, as far as `bounds`. Not those that another process has packed
    /// as well: each of them is shared until it is written itself.
    pub(crate) fn lock_clean_around<'a>(
        &'a self,
        pages: &mut LockedRange<'a, Self>,
        bounds: PageRange,
    ) {
        let is_clean = |seen: Snapshot| {
            seen.state() == State::Mapped
                && seen.has(Flags::CLEAN)
                && !seen.has(Flags::WRITE_PROTECTED)
                && !self.is_shared(seen)
        };
        pages.grow(bounds, BLOCK_PAGES, |page| self.try_lock_if(page, is_clean));
    }

    /// In a fork's child: its pages are not write-protected, so nothing tells a write. What is packed
    /// leaves memory, and so stays shared with the parent; to read it from the file again would take
    /// too long, so what is there stays in memory instead. Nor is any page of its locked in memory.
    pub(super) fn forget_clean_and_locked(&self) {
        for range in self.pages.mapped_blocks() {
            self.drop_packed(range);
            for page in range.pages() {
                let seen = self.snapshot(page);
                if seen.has(Flags::MLOCKED) {
                    self.lock_page(page).clear_flags(Flags::MLOCKED);
                }
                if seen.has(Flags::CLEAN) {
                    let page = self.lock_page(page);
                    self.release_stored(page.content());
                    page.end_clean();
                }
            }
        }
    }
}
