//! In the fault or in the background: where reclaim is cheaper is measured, not assumed.
//!
//! The background thread works while the program runs. But every mapping that it takes away
//! interrupts each CPU that runs a thread of the program, and a fault that moves a frame in
//! interrupts the background thread: tens of microseconds on a virtual machine, several times what
//! packing a page takes. A handler that reclaims while the only thread of its program waits for it
//! interrupts nobody. So the cost of a page is kept as a running mean for both, the background
//! has the preference because it works beside the program, and now and then the other is tried.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::mean::Mean;

/// The background is worth its parallel work up to so many times the cost.
const BACKGROUND_WORTH: u32 = 2;
/// Of so many turns for the background...
const BACKGROUND_ROUND: u32 = 64;
/// ...so many are taken in the fault all the same.
const FAULT_PROBES: u32 = 4;
/// One turn of so many in the fault is left to the background; its turns are longer.
const FAULT_ROUND: u32 = 512;

/// Running means of what reclaiming a page costs, in cycles.
#[derive(Default)]
pub struct Places {
    in_background: Mean,
    in_fault: Mean,
    turn: AtomicU32,
}

/// Where a page is reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the background thread.
    Background,
    /// By a handler, before it serves its fault.
    Fault,
}

impl Places {
    fn mean(&self, place: Place) -> &Mean {
        match place {
            Place::Background => &self.in_background,
            Place::Fault => &self.in_fault,
        }
    }

    /// The place for the next turn of reclaim.
    pub fn choose(&self) -> Place {
        let in_background = self.in_background.get();
        let in_fault = self.in_fault.get();
        let turn = self.turn.fetch_add(1, Relaxed);
        let prefers_fault = in_fault != 0 && in_background / BACKGROUND_WORTH > in_fault;
        let is_fault = if prefers_fault {
            !turn.is_multiple_of(FAULT_ROUND)
        } else {
            turn % BACKGROUND_ROUND < FAULT_PROBES
        };
        if is_fault { Place::Fault } else { Place::Background }
    }

    /// Notes what reclaiming `pages` pages cost.
    pub fn record(&self, place: Place, pages: usize, cycles: u64) {
        if pages > 0 {
            self.mean(place).record(cycles / pages as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns_in_fault(places: &Places, turns: u32) -> usize {
        (0..turns).filter(|_| places.choose() == Place::Fault).count()
    }

    #[test]
    fn the_background_works_until_it_costs_more_than_it_is_worth() {
        let places = Places::default();
        assert_eq!(turns_in_fault(&places, 640), 40);
        for _ in 0..50 {
            places.record(Place::Background, 256, 256 * 15_000);
            places.record(Place::Fault, 64, 64 * 10_000);
        }
        assert_eq!(turns_in_fault(&places, 640), 40);
        for _ in 0..50 {
            places.record(Place::Background, 256, 256 * 60_000);
        }
        assert_eq!(turns_in_fault(&places, 5120), 5110);
        for _ in 0..50 {
            places.record(Place::Fault, 64, 64 * 50_000);
        }
        assert_eq!(turns_in_fault(&places, 640), 40);
    }
}
