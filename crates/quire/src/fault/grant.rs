//! Memory for a folio, taken before it is filled: frames of the pool, and leave to take more.

use super::way::Transfer;
use crate::budget::Purpose;
use crate::mmu::{FrameId, FrameRun, Mmu};
use crate::space::VmSpace;

const RUNS: usize = 8;
/// Frames that are given back together, where copies are to be made in their stead: each call
/// interrupts all CPUs that run the program.
const RELEASE_BATCH: usize = 32;

/// What a fault may use. What is not used must be given back by [`VmSpace::return_grant`].
#[must_use]
pub struct Grant {
    runs: [FrameRun; RUNS],
    count: usize,
    pub frames: usize,
    /// Pages charged, to be had from the kernel.
    pub charged: usize,
}

impl Grant {
    pub fn pages(&self) -> usize {
        self.frames + self.charged
    }

    pub fn next_run(&mut self, most: usize) -> Option<FrameRun> {
        let last = self.count.checked_sub(1)?;
        let (run, rest) = self.runs[last].split(self.runs[last].len.min(most));
        if rest.len == 0 {
            self.count -= 1;
        } else {
            self.runs[last] = rest;
        }
        self.frames -= run.len;
        Some(run)
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Takes memory for up to `pages` pages. `way` says whether frames are wanted to move, or
    /// leave to copy; the other is given where it must.
    pub(crate) fn grant(&self, pages: usize, way: Transfer) -> Grant {
        let mut grant = Grant {
            runs: [FrameRun { start: FrameId(0), len: 0 }; RUNS],
            count: 0,
            frames: 0,
            charged: 0,
        };
        let pages = pages.min(self.available());
        if way == Transfer::Copy {
            self.grant_charge(&mut grant, pages);
        }
        while grant.pages() < pages && grant.count < RUNS {
            let missing = pages - grant.pages();
            let wanted = if way == Transfer::Copy { missing.max(RELEASE_BATCH) } else { missing };
            let Some(run) = self.frames.take(wanted) else { break };
            if way == Transfer::Copy {
                // The frames' charge pays for the copies: these, and the next ones.
                self.mmu.frames_release(run);
                self.frames.consume(run);
                let used = run.len.min(missing);
                grant.charged += used;
                self.budget.uncharge(run.len - used);
            } else {
                grant.runs[grant.count] = run;
                grant.count += 1;
                grant.frames += run.len;
            }
        }
        if way == Transfer::Move {
            self.grant_charge(&mut grant, pages);
        }
        grant
    }

    fn grant_charge(&self, grant: &mut Grant, pages: usize) {
        let mut missing = pages.saturating_sub(grant.pages());
        while missing > 0 && !self.budget.try_charge(missing, Purpose::Fault) {
            missing /= 2;
        }
        grant.charged += missing;
    }

    pub(crate) fn return_grant(&self, mut grant: Grant) {
        while let Some(run) = grant.next_run(usize::MAX) {
            self.frames.put(run);
        }
        self.budget.uncharge(grant.charged);
    }

    /// Pages that a fault could have at once. Free frames are part of the reserve as well: else
    /// faults would take every frame that reclaim frees, while what it stored grows, until there
    /// is no page left to store anything in.
    pub(crate) fn available(&self) -> usize {
        // The members are summed up once only, for that costs.
        let own = self.frames.free() + self.budget.slack();
        let uncharged = self.budget.uncharged();
        let beyond_reserve = (own + uncharged).saturating_sub(self.budget.reserve());
        if self.budget.yields() { beyond_reserve.min(own) } else { beyond_reserve }
    }
}
