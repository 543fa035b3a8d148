//! What is not managed takes of the same budget, and managed memory gives way to it.
//!
//! A program's code, stacks, page tables and shared memory are not managed, and `--memory` is for them too. The
//! supervisor counts them and writes to [`Control::unmanaged_pages`] how many they are; what members may hold,
//! [`Budget::tree_limit`], is the rest. Where members hold more than that there is an *excess*, which the
//! background threads give back to the kernel.
//!
//! No count is as fast as a thread that touches memory. What can be known before is *announced*: a mapping of
//! shared memory takes its part of the budget at once, and whoever maps it waits until members have given way.
//!
//! [`Control::unmanaged_pages`]: crate::control::Control::unmanaged_pages

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::{Budget, Purpose};
use crate::sys::futex::{self, Reach};
use crate::sys::monotonic_ns;

/// How long a mapping of shared memory waits where no room is made any more.
const PATIENCE_NS: u64 = 200_000_000;
/// A supervisor that has not counted for so long does not any more.
const COUNTED_WITHIN_MS: u64 = 5000;
/// How long it waits in all: for so long a slow disk takes what leaves, if it is some gigabytes.
const PATIENCE_MAX_NS: u64 = 120_000_000_000;

impl Budget {
    /// Pages that members hold, or may, beyond what the budget has for them.
    pub fn excess(&self) -> usize {
        self.control().excess()
    }

    /// Charges pages for reclaim though what is not managed has taken them meanwhile: to give way, what is packed
    /// needs a place first. More than the budget is never charged.
    pub fn overdraw(&self, pages: usize) -> bool {
        let most = self.control().budget_pages.load(Relaxed) as usize;
        self.excess() > 0 && self.charge_up_to(most, pages, 0, Purpose::Reclaim)
    }

    /// Pages of shared memory may be touched from now on: has managed memory give way to them, and waits as
    /// long as it does.
    pub fn announce(&self, pages: usize) {
        let control = self.control();
        // What could never be in memory as a whole is a sparse mapping.
        let is_sparse = pages as u64 > control.budget_pages.load(Relaxed);
        if pages == 0 || is_sparse || control.is_managed_only.load(Relaxed) != 0 {
            return;
        }
        if monotonic_ns() / 1_000_000 > control.counted_ms.load(Relaxed) + COUNTED_WITHIN_MS {
            // The supervisor was killed: nobody would see whether it comes.
            control.announced_pages.store(0, Relaxed);
            return;
        }
        control.announced_pages.fetch_add(pages as u64, Relaxed);
        let began = monotonic_ns();
        let (mut least, mut since) = (usize::MAX, began);
        loop {
            let (excess, now) = (self.excess(), monotonic_ns());
            if excess < least {
                (least, since) = (excess, now);
            }
            if excess == 0 || now - since > PATIENCE_NS || now - began > PATIENCE_MAX_NS {
                return;
            }
            control.call_all();
            futex::wait(&AtomicU32::new(0), 0, Reach::Process, Some(1));
        }
    }
}
