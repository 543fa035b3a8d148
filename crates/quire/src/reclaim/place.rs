//! In the fault or in the background: where reclaim is cheaper is measured, not assumed.
//!
//! Each turn of reclaim is timed from its beginning to the next one's, with all that the program does in
//! between. The place that lets the program go on faster is preferred, and now and then the other is
//! tried. docs/decisions/0013 says why.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::mean::Mean;

/// Where the background is preferred, two turns of so many are taken in the fault all the same.
const BACKGROUND_ROUND: u32 = 16;
/// Where the fault is preferred, one turn of so many is left to the background; its turns are longer.
const FAULT_ROUND: u32 = 256;

/// Running means of the time from turn to turn of reclaim, for a page that is freed, in cycles.
/// What else the program does in that time is the same in both.
#[derive(Default)]
pub struct Places {
    in_background: Mean,
    in_fault: Mean,
    turn: AtomicU32,
    /// Whether the turn that goes on is in a fault, since when, and pages freed in it.
    is_in_fault: AtomicBool,
    since: AtomicU64,
    freed: AtomicU32,
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
    /// Begins the next turn of reclaim, at `now` cycles, and says where.
    pub fn begin_turn(&self, now: u64) -> Place {
        // Handlers that begin a turn at once spoil a measurement, and nothing else.
        let freed = self.freed.swap(0, Relaxed);
        let cycles = now.wrapping_sub(self.since.swap(now, Relaxed));
        let place = self.choose();
        let is_fault = self.is_in_fault.swap(place == Place::Fault, Relaxed);
        if freed > 0 {
            // A turn in the background is long, and rare where it is not preferred.
            let (mean, weight) =
                if is_fault { (&self.in_fault, 1) } else { (&self.in_background, 4) };
            mean.record_usual(weight, cycles / u64::from(freed));
        }
        place
    }

    fn choose(&self) -> Place {
        let in_fault = self.in_fault.get();
        let turn = self.turn.fetch_add(1, Relaxed);
        let is_fault = if in_fault != 0 && in_fault < self.in_background.get() {
            !turn.is_multiple_of(FAULT_ROUND)
        } else {
            turn % BACKGROUND_ROUND < 2
        };
        if is_fault { Place::Fault } else { Place::Background }
    }

    /// Notes that pages were freed.
    pub fn record(&self, pages: usize) {
        self.freed.fetch_add(pages as u32, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program whose pages take so many cycles each, by the place where they are reclaimed:
    /// the share of pages that are reclaimed in faults, while `pages` are.
    fn run(places: &Places, clock: &mut u64, pages: u32, in_background: u64, in_fault: u64) -> f64 {
        let (mut done, mut by_faults) = (0, 0);
        while done < pages {
            let (freed, cost) = match places.begin_turn(*clock) {
                Place::Background => (700, in_background),
                Place::Fault => (64, in_fault),
            };
            places.record(freed);
            *clock += freed as u64 * cost;
            done += freed as u32;
            by_faults += if freed == 64 { 64 } else { 0 };
        }
        f64::from(by_faults) / f64::from(done)
    }

    #[test]
    fn reclaim_goes_where_the_program_is_faster() {
        let places = Places::default();
        let mut clock = 1 << 40;
        let warm = 60_000;
        for (in_background, in_fault, is_fault) in [
            (10_000, 20_000, false),
            (60_000, 40_000, true),
            (20_000, 30_000, false),
            (90_000, 20_000, true),
        ] {
            run(&places, &mut clock, warm, in_background, in_fault);
            let share = run(&places, &mut clock, 200_000, in_background, in_fault);
            assert_eq!(share > 0.5, is_fault, "{in_background} against {in_fault}: {share}");
            assert!((0.005..0.99).contains(&share), "both are tried: {share}");
        }
    }

    #[test]
    fn a_pause_of_the_program_changes_nothing() {
        let places = Places::default();
        let mut clock = 1 << 40;
        run(&places, &mut clock, 100_000, 10_000, 20_000);
        for _ in 0..20 {
            clock += 10_000_000_000;
            let share = run(&places, &mut clock, 50_000, 10_000, 20_000);
            assert!(share < 0.2, "{share}");
        }
    }
}
