//! Faults that never wait for the layout, and the classic way for those in doubt.
//!
//! A *speculative* fault takes no lock of the space's and writes nothing that others share: it finds
//! its VMA, copies it with its sequence count, prepares, and looks at the count once more under the
//! lock of what it maps (its page's, or its window's), which it holds until the mapping call has
//! returned. A change of the layout bumps the count first, and takes those locks afterwards: so
//! either the fault sees the change, or the change finds what the fault mapped.
//!
//! In any doubt the fault gives back what it took, says why ([`Doubt`]), and goes the *classic* way:
//! from the start, under the space's lock, which it shares with other faults and no change.
//!
//! A program with one thread goes the classic way at once, for it has no thread to wait for. Its
//! second thread may come at any time, for both ways are right with any number of threads.
//!
//! # Reasons for doubt
//!
//! | tracepoint | what was seen |
//! |---|---|
//! | `spf_vma_changed` | the VMA's count has moved |
//! | `spf_vma_noanon` | this is the first fault of a block, whose page words are not charged yet |
//! | `spf_vma_notsup` | there is no VMA, a foreign one, or a dying one |
//! | `spf_vma_access` | the VMA does not allow the access that the kernel let through: rights are changing |
//! | `spf_pmd_changed` | the page needs memory by now, for which no room was made |
//!
//! `--no-speculative-faults` sends every fault the classic way, at run time.
//!
//! Locks: none; [`VmSpace::serve`] shares the space's lock by trying.

use core::sync::atomic::Ordering;

use super::{Access, Outcome};
use crate::control::{Event, Tracepoint};
use crate::failpoint::{self, Failpoint};
use crate::mmu::Mmu;
use crate::space::VmSpace;
use crate::space::layout_lock::Admission;
use crate::space::vma::{Vma, VmaIndex};
#[cfg(debug_assertions)]
use crate::sys::rank::{self, Rank};
use crate::sys::thread::ThreadId;
use crate::units::{PageNum, PageRange};

/// How a fault knows that the layout is what it has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// It looks again, and gives up in doubt.
    Speculative,
    /// It shares the space's lock.
    Classic,
    /// It looks again, and tries again: the thread that changes the layout may wait for it.
    Exempt,
}

/// Why a fault was given up, with the VMA that it had found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Doubt {
    pub why: Tracepoint,
    pub range: PageRange,
}

impl Doubt {
    pub const fn of(vma: &Vma, why: Tracepoint) -> Doubt {
        Doubt { why, range: vma.range }
    }
}

impl Way {
    /// Whether the VMA is what it was: a classic fault's cannot have changed.
    pub fn check_current(self, vmas: &VmaIndex, vma: &Vma) -> Result<(), Doubt> {
        let is_current = self == Way::Classic || vmas.is_current(vma);
        if is_current { Ok(()) } else { Err(Doubt::of(vma, Tracepoint::SpfVmaChanged)) }
    }

    /// A speculative fault that the VMA does not allow is in doubt: the kernel let it come, so rights
    /// are changing just now.
    pub fn check_access(self, vma: &Vma, access: Access) -> Result<(), Doubt> {
        let prot = vma.attributes.prot;
        let is_allowed = match access {
            Access::Read => prot.is_readable(),
            Access::Write | Access::WriteProtected => prot.is_writable(),
        };
        if self == Way::Speculative && !is_allowed {
            return Err(Doubt::of(vma, Tracepoint::SpfVmaAccess));
        }
        Ok(())
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Whether faults try without the space's lock first.
    fn speculates(&self) -> bool {
        // Relaxed: both ways are right at any time.
        self.budget.control().no_speculation.load(Ordering::Relaxed) == 0
            && !self.is_single_threaded()
    }

    /// Serves a fault of `thread` on `page` by `attempt`, which is given the VMA that was found;
    /// without the space's lock as far as that goes.
    pub(crate) fn serve(
        &self,
        thread: ThreadId,
        page: PageNum,
        mut attempt: impl FnMut(Option<Vma>, Way) -> Result<Outcome, Doubt>,
    ) -> Outcome {
        // While the background thread sleeps enough is free, and nothing is taken.
        if self.is_kswapd_awake() {
            self.asked.note(page);
        }
        let mut attempt = |way| {
            failpoint::hit(Failpoint::Arrived, page);
            attempt(self.find_vma(page), way)
        };
        if self.speculates() {
            let before = PageLocksHeld::now();
            match attempt(Way::Speculative) {
                Ok(outcome) => return self.ended(outcome, Way::Speculative),
                Err(Doubt { why, range }) => {
                    before.check_given_back();
                    self.trace(why, page, range, self.known(thread));
                    self.mmu.step();
                }
            }
        }
        loop {
            let (way, shared) = match self.share_layout(page, thread) {
                Admission::Shared(shared) => (Way::Classic, Some(shared)),
                Admission::Exempt => (Way::Exempt, None),
                Admission::Deferred => {
                    self.budget.count(Event::FaultParked, 1);
                    return Outcome::Parked;
                }
                Admission::Again => continue,
            };
            let served = attempt(way);
            drop(shared);
            match served {
                Ok(outcome) => return self.ended(outcome, way),
                // What the page holds has changed, or, of an exempt fault, the layout.
                Err(_) => self.mmu.step(),
            }
        }
    }

    /// What became of a fault, counted where nothing more is to be done for it.
    fn ended(&self, outcome: Outcome, way: Way) -> Outcome {
        if matches!(outcome, Outcome::Served | Outcome::Spurious) {
            self.count_finished(way);
        }
        outcome
    }

    /// Counts a fault that is finished, or is only waiting for bytes now.
    pub(crate) fn count_finished(&self, way: Way) {
        let event = match way {
            Way::Speculative => Event::SpeculativePgfault,
            Way::Classic | Way::Exempt => Event::FaultClassic,
        };
        self.budget.count(event, 1);
    }
}

/// What the calling thread holds: debug builds check that a fault that is given up keeps nothing.
struct PageLocksHeld {
    #[cfg(debug_assertions)]
    page_locks: usize,
}

impl PageLocksHeld {
    #[inline]
    fn now() -> PageLocksHeld {
        PageLocksHeld {
            #[cfg(debug_assertions)]
            page_locks: rank::held(Rank::Page),
        }
    }

    #[inline]
    fn check_given_back(&self) {
        #[cfg(debug_assertions)]
        assert_eq!(
            self.page_locks,
            rank::held(Rank::Page),
            "a fault that was given up keeps page locks"
        );
    }
}
