//! First content: pages of private mappings that have none of their own yet.
//!
//! A page of such a VMA without content reads as a page of an object, which this level does not
//! know: [`crate::object`] finds the bytes, and has them mapped here. What was only read stays
//! CLEAN and IN_OBJECT: mapped write-protected, dropped without a trace when it goes. From the
//! first write on it is a page like any other.
//!
//! Locks: as for any fault, the page asked for first, its neighbours tried.

use super::order::Guess;
use super::window::{FaultWindow, FillSource, First};
use super::{Access, Outcome, Staging};
use crate::mmu::Mmu;
use crate::page::{Flags, LockedPage, LockedRange, Snapshot, State};
use crate::space::VmSpace;
use crate::space::vma::Vma;
use crate::swap::compress::PageBytes;
use crate::units::{PageNum, PageRange};

/// A fault on a page without content, which is locked.
#[derive(Clone, Copy)]
pub(crate) struct Unfilled<'a> {
    pub page: PageNum,
    pub old: Snapshot,
    pub access: Access,
    pub vma: &'a Vma,
    pub guess: Guess,
}

impl<M: Mmu> VmSpace<M> {
    /// Locks the neighbours of a locked page without content that have none either, that no thread
    /// holds, and that `has_bytes` takes: inside of `bounds`, and `pages_max` pages at most.
    pub(crate) fn lock_unfilled_around(
        &self,
        page: PageNum,
        bounds: PageRange,
        pages_max: usize,
        mut has_bytes: impl FnMut(PageNum) -> bool,
    ) -> PageRange {
        let pages_max = pages_max.min(self.window_pages_max(pages_max));
        let mut pages = LockedRange::of(self.adopt_page(page));
        pages.grow(bounds, pages_max, |page| {
            self.try_lock_if(page, is_plain_unfilled).filter(|_| has_bytes(page))
        });
        pages.leave_locked()
    }

    /// Maps locked pages without content to the bytes that they begin with, and unlocks them.
    /// `false`: there is no memory for any; all are unlocked, and the fault is not answered.
    pub(crate) fn fill_first(
        &self,
        fault: Unfilled<'_>,
        range: PageRange,
        bytes: &[PageBytes],
        staging: &mut Staging,
    ) -> bool {
        let Unfilled { page, access, vma, guess, .. } = fault;
        let mut window = FaultWindow::over(LockedRange::adopt(self, range), page, access);
        window.is_movable = vma.attributes.prot.is_movable();
        window.is_mlocked = vma.attributes.is_mlocked;
        // Pages that a stream of writes is about to reach may as well be written; they would fault
        // a second time.
        if access == Access::Read && !window.is_mlocked {
            window.is_clean = true;
        }
        let first = First { start: range.start, bytes };
        self.fill_window(&mut window, FillSource::First(first), guess, staging)
    }

    /// A fault on a private page that its word has as mapped: mapped since the fault was sent, as a
    /// rule. Where the program has dropped it by a bare system call its object has the bytes now,
    /// and `Unfilled` says so.
    pub(super) fn fault_on_mapped_private(&self, page: LockedPage<'_, Self>) -> Outcome {
        let one = PageRange::new(page.page(), 1);
        let is_there = self.is_there(page.page());
        page.unlock();
        if !is_there {
            return Outcome::Unfilled;
        }
        self.mmu.wake(one);
        Outcome::Spurious
    }

    /// Whether a locked page of a private mapping has to be filled: it has no content, or the
    /// program has dropped it by itself.
    pub(crate) fn is_unfilled(&self, page: PageNum, old: Snapshot) -> bool {
        match old.state() {
            State::None => true,
            State::Mapped => !self.is_there(page),
            _ => false,
        }
    }

    /// Whether a locked page is in memory, as far as the kernel can tell: what it has swapped out
    /// by itself need not be.
    fn is_there(&self, page: PageNum) -> bool {
        let mut is_there = [false];
        self.mmu.look(PageRange::new(page, 1), &mut is_there);
        is_there[0]
    }

    /// Maps a locked page that the program has dropped by itself, and unlocks it. Where it
    /// is there after all it stays as it is: the kernel says so.
    pub(crate) fn refill(&self, page: PageNum, old: Snapshot, bytes: &PageBytes) {
        let page = LockedPage::adopt(self, page, old);
        // SAFETY: a page of bytes that are not managed.
        unsafe { self.replace_mapped(page, bytes.as_ptr()) };
    }

    /// Makes an access to a locked page a SIGBUS that has no content, or that the program has
    /// dropped by itself, and unlocks it.
    pub(crate) fn poison_unfilled(&self, page: PageNum, old: Snapshot) {
        let poisoned = self.mmu.poison(page).pages == 1;
        let one = PageRange::new(page, 1);
        if old.state() == State::Mapped {
            if !poisoned {
                // It is there after all.
                self.unlock_page(page);
                self.mmu.wake(one);
                return;
            }
            self.release_stored(old);
            self.count_unmapped(page, 1);
            self.budget.uncharge(1);
        } else {
            self.budget.add_wanted(1);
        }
        LockedPage::adopt(self, page, old).refuse();
        self.mmu.wake(one);
    }

    /// Takes the mark away that an access to a page of a private mapping could not be served.
    pub(crate) fn drop_refused(&self, page: PageNum) {
        let seen = self.snapshot(page);
        if seen.state() == State::Poisoned && seen.has(Flags::ERROR) {
            self.drop_unwritten(PageRange::new(page, 1));
        }
    }

    /// Drops what a private mapping has of its object and not of its own: pages that were only
    /// read, and marks of pages that could not be had.
    pub(crate) fn drop_unwritten(&self, range: PageRange) {
        for page in self.used_parts(range).flat_map(PageRange::pages) {
            let locked = self.lock_page(page);
            // What is pinned is as much the mapping's own as what was written.
            let is_read = locked.has(Flags::IN_OBJECT) && !locked.has(Flags::MLOCKED);
            let is_refused = locked.state() == State::Poisoned && locked.has(Flags::ERROR);
            if !is_read && !is_refused {
                continue;
            }
            self.release_backing(locked.content());
            self.mmu.unmap(PageRange::new(page, 1));
            if is_read {
                self.count_unmapped(page, 1);
                self.budget.uncharge(1);
            }
            locked.drop_content();
        }
    }
}

/// Whether a page without content has nothing about it that a neighbour's fault would have to
/// look at.
fn is_plain_unfilled(seen: Snapshot) -> bool {
    seen.state() == State::None && !seen.has(Flags::WRITE_PROTECTED)
}
