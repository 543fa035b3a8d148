//! Dying VMAs: what is being unmapped while its pages are dropped outside of the space's lock.
//!
//! To drop pages takes long, and needs their locks alone. So an unmap that has some to drop puts one
//! VMA of [`Kind::Dying`] over its range, gives the space's lock back, drops them, and takes the lock
//! again to take that VMA away. Unmaps of several threads, and the faults of others, go on beside it.
//!
//! Owns what comes to such a range: it waits. Leaves the pages to `unmap`, and the kernel's rights
//! to `rights`, which are as they were until the end.
//!
//! | | before | dying | after |
//! |---|---|---|---|
//! | VMA | the program's | of no rights, and no neighbour's like | none |
//! | a fault | served | unanswered until the end | outside of all VMAs |
//! | a call that names the range | goes on | waits ([`VmSpace::lock_over`]) | goes on |
//! | a search for room, reclaim, a read of the swap file | | passes it by | |
//!
//! A call that names no range, but finds VMAs by itself, waits for all that are dying; so does a fork,
//! whose child would inherit a VMA without the thread that ends it. As long as a thread waits, no other
//! VMA begins to die: a wait for all of them would never end where threads unmap all the time.
//!
//! MADV_DONTNEED, and what is unmapped to be mapped anew in the same call, drop their pages under the
//! lock: the VMA stays in use, or the lock is needed again at once.
//!
//! Between giving the lock back and taking it again a thread must not come here a second time, as a
//! signal's handler would that unmaps, or forks: it would wait for itself. It is the same for the lock,
//! and the callers have the same remedy: signals are blocked from before the lock until after the end
//! (`process/call.rs`).
//!
//! Locks: all but the list of faults, a leaf, is the space's lock's; under it Relaxed is enough. A thread that has
//! it needs no page of a dying range, so the thread that unmaps that range may take its page locks meanwhile.

use core::sync::atomic::{AtomicU32, Ordering};

use super::vma::{Attributes, Backing, Kind};
use super::{Layout, VmSpace};
use crate::control::Event;
use crate::failpoint::{self, Failpoint};
use crate::fault::Outcome;
use crate::fault::fault_list::FaultList;
use crate::mmu::{Mmu, Prot};
use crate::page::State;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::units::{PageNum, PageRange};

/// Up to so many pages are dropped under the space's lock: to take it once more would cost as much.
const DROPPED_AT_ONCE_MAX: usize = 8;
/// As many pages are looked at to find out.
const LOOKED_AT_MAX: usize = 512;

/// What is dying, and what waits for it.
pub(super) struct Dying {
    count: AtomicU32,
    /// How many there have been: a name for each, by which no two are alike, and none are joined.
    names: AtomicU32,
    /// Counts those that have ended; the futex of the threads that wait.
    ended: AtomicU32,
    waiting: AtomicU32,
    faults: FaultList,
}

impl Dying {
    pub const fn new() -> Dying {
        Dying {
            count: AtomicU32::new(0),
            names: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            faults: FaultList::new(),
        }
    }

    /// In a fork's child, before any other thread runs there: nothing is dying, for the fork has waited
    /// for that, and the threads that waited are in the parent.
    pub fn after_fork_in_child(&self) {
        debug_assert_eq!(self.count.load(Ordering::Relaxed), 0, "no thread ends it in the child");
        self.waiting.store(0, Ordering::Relaxed);
        self.faults.after_fork_in_child();
    }

    fn begin(&self, _: &Layout<'_>) -> Attributes {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mapping = self.names.fetch_add(1, Ordering::Relaxed);
        let backing = Backing { mapping, ..Backing::default() };
        Attributes { kind: Kind::Dying, backing, ..Attributes::anonymous(Prot::NONE) }
    }

    /// Whether a thread is to be woken.
    fn end(&self, _: &Layout<'_>) -> bool {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Takes the space's lock, to change the layout of ranges, none of which is dying then.
    pub fn lock_over(&self, ranges: &[PageRange]) -> Layout<'_> {
        let mut layout = self.lock();
        if !self.is_any_dying(&layout, ranges) {
            return layout;
        }
        let dying = &self.dying;
        dying.waiting.fetch_add(1, Ordering::Relaxed);
        while self.is_any_dying(&layout, ranges) {
            let seen = dying.ended.load(Ordering::Relaxed);
            drop(layout);
            // No timeout: the thread that ends one counts it under the lock, and finds us in `waiting`.
            futex::wait(&dying.ended, seen, Reach::Process, None);
            layout = self.lock();
        }
        dying.waiting.fetch_sub(1, Ordering::Relaxed);
        layout
    }

    fn is_any_dying(&self, layout: &Layout<'_>, ranges: &[PageRange]) -> bool {
        let is_dying = |range: &PageRange| {
            self.vmas_in(layout, *range).any(|vma| vma.attributes.kind == Kind::Dying)
        };
        self.dying.count.load(Ordering::Relaxed) > 0 && ranges.iter().any(is_dying)
    }

    /// Does what [`Self::unmap`] does, and gives the space's lock back; early, where there is much to
    /// drop. For a range that was locked by [`Self::lock_over`].
    ///
    /// # Errors
    /// As for [`Self::unmap`].
    pub fn unmap_and_unlock<'a>(
        &'a self,
        mut layout: Layout<'a>,
        range: PageRange,
    ) -> Result<(), Errno> {
        let found = self.look_over(&layout, range)?;
        if found.is_nothing() {
            return Ok(());
        }
        if found.has_foreign || !self.is_better_dropped_unlocked(range) {
            return self.unmap(&mut layout, range);
        }
        self.vmas.replace(range, self.dying.begin(&layout), &layout.locked).inspect_err(|_| {
            self.dying.end(&layout);
        })?;
        drop(layout);
        // Faults that are on their way find the VMA changed, and then this one.
        self.drop_pages(range);
        failpoint::hit(Failpoint::Dropped, range.start);
        layout = self.lock();
        self.remove_whole_vmas(&mut layout, range);
        self.settle_unmapped(&layout, range, found);
        let has_waiters = self.dying.end(&layout);
        drop(layout);
        self.dying.faults.answer_all(|answer| self.answer_listed(answer));
        if has_waiters {
            futex::wake(&self.dying.ended, u32::MAX, Reach::Process);
        }
        Ok(())
    }

    /// Whether it is worth a second lock to drop the pages of a range beside others, and no thread waits
    /// for the end of such unmaps.
    fn is_better_dropped_unlocked(&self, range: PageRange) -> bool {
        if self.is_single_threaded() || self.dying.waiting.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let mut used = 0;
        let pages = self.used_parts(range).flat_map(PageRange::pages).enumerate();
        for (looked_at, page) in pages {
            used += usize::from(self.snapshot(page).state() != State::None);
            if used > DROPPED_AT_ONCE_MAX || looked_at == LOOKED_AT_MAX {
                return true;
            }
        }
        false
    }

    /// A fault on a page that is dying: nothing may be mapped there any more, and the kernel's rights
    /// are there still. It is answered at the end, and comes again where no VMA is.
    pub(crate) fn fault_on_dying(&self, page: PageNum) -> Outcome {
        // The end may come in between.
        self.mmu.step();
        self.dying.faults.push(page);
        // The end takes the VMA away, and the list afterwards. A fault that comes to the list later
        // finds no VMA, by the list's mutex.
        if self.find_vma(page).is_some_and(|vma| vma.attributes.kind == Kind::Dying) {
            self.budget.count(Event::FaultParked, 1);
            return Outcome::Parked;
        }
        self.answer(page);
        Outcome::NoVma
    }
}
