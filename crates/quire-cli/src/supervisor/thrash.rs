//! Whether the run thrashes: does little but wait for pages that had to leave memory; and the budget with
//! which it would not.
//!
//! The budget is told by refault distances: how much left memory between a page and the fault that asked for
//! it again is how much more memory would have held it.

use std::time::{Duration, Instant};

use quire::control::{Control, Event};
use quire::units::PAGE_SIZE;

use crate::runs::counts::{Counts, Scope};

/// The run is looked at so often, and told of when it has waited for most of two such times in a row.
const PERIOD: Duration = Duration::from_secs(10);
const TURNS: u32 = 2;
/// Most of a time. A fault's time is counted from where a handler takes it up: until then, and until the
/// thread runs again, it waits as well, which is a third of the whole where CPUs are slow to wake.
const MOST: f64 = 0.5;
/// Pages that may leave until nine in ten of those that waited are wanted again, in sixteenths of the
/// budget: the upper ends of [`Event::REFAULTS`], of which the last has none.
const SIXTEENTHS: [u64; Event::REFAULTS.len() - 1] = [1, 2, 4, 8, 16, 32, 64];

/// What waiting for memory has cost until some moment.
#[derive(Clone, Copy, Default)]
struct Spent {
    counts: Counts,
    cpu_seconds: f64,
}

#[derive(Default)]
pub(super) struct Thrash {
    seen: Option<(Instant, Spent)>,
    /// Times in a row that were spent waiting; more than enough once that was told.
    turns: u32,
}

impl Thrash {
    /// The budget in bytes with which the run would be at ease, the first time that it is not.
    pub(super) fn look(
        &mut self,
        control: &Control,
        cpu_seconds: impl FnOnce() -> f64,
    ) -> Option<u64> {
        let elapsed = self.seen.as_ref().map(|(then, _)| then.elapsed());
        if self.turns > TURNS || elapsed.is_some_and(|elapsed| elapsed < PERIOD) {
            return None;
        }
        let counts = Counts::read(control, Scope::Run)?;
        let now = Spent { counts, cpu_seconds: cpu_seconds() };
        let (_, before) = self.seen.replace((Instant::now(), now))?;
        let spent = Spent {
            counts: now.counts.since(&before.counts),
            cpu_seconds: now.cpu_seconds - before.cpu_seconds,
        };
        self.turns = if spent.is_waiting(elapsed?.as_secs_f64()) { self.turns + 1 } else { 0 };
        if self.turns < TURNS {
            return None;
        }
        let managed = control.managed_limit() as u64;
        let budget = control.budget_pages.load(std::sync::atomic::Ordering::Relaxed);
        // It is never told again.
        self.turns = TURNS + 1;
        // What is not managed stays what it is.
        let pages = spent.pages_at_ease(managed, control.wanted()) + (budget - managed.min(budget));
        Some(pages * PAGE_SIZE as u64)
    }
}

impl Spent {
    /// Whether threads waited for pages that had left memory for most of this time, and most of what all
    /// of the program's threads worked.
    fn is_waiting(&self, seconds: f64) -> bool {
        self.counts.waited_seconds() > MOST * seconds.max(self.cpu_seconds)
    }

    /// With how many pages nine in ten of the pages that were wanted again would have been in memory: at
    /// most all that the run wants, for distances count a page anew each time that it leaves.
    fn pages_at_ease(&self, budget_pages: u64, wanted_pages: u64) -> u64 {
        let enough = self.counts.of(Event::WorkingsetRefaultAnon) * 9 / 10;
        let mut held = 0;
        let reach = SIXTEENTHS.iter().zip(Event::REFAULTS).find(|&(_, event)| {
            held += self.counts.of(event);
            held >= enough
        });
        let more = reach.map_or(u64::MAX, |(sixteenths, _)| budget_pages * sixteenths / 16);
        budget_pages.saturating_add(more).min(wanted_pages.max(budget_pages))
    }
}

#[cfg(test)]
mod tests {
    use quire::control::FaultKind;

    use super::*;
    use crate::sys::control::ControlMap;

    /// Faults of about 1.5 ms each.
    fn spent(faults: u64, distances: &[(Event, u64)], cpu_seconds: f64) -> Spent {
        let mut counts = Counts::of_events(distances);
        counts.set_fault_times(FaultKind::File, 20, faults);
        Spent { counts, cpu_seconds }
    }

    #[test]
    fn waiting_is_held_against_the_time_and_against_work() {
        assert!(spent(6000, &[], 2.0).is_waiting(10.0));
        assert!(!spent(3000, &[], 2.0).is_waiting(10.0), "it does other things");
        assert!(!spent(6000, &[], 20.0).is_waiting(10.0), "others work meanwhile");
    }

    #[test]
    fn nine_in_ten_pages_would_have_been_there() {
        let all = Event::WorkingsetRefaultAnon;
        let near = [(all, 100), (Event::Refault16th, 60), (Event::RefaultQuarter, 30)];
        assert_eq!(spent(0, &near, 0.0).pages_at_ease(1600, 10_000), 2000);
        assert_eq!(spent(0, &near, 0.0).pages_at_ease(1600, 1700), 1700, "it wants no more");
        let far = [(all, 100), (Event::RefaultOnce, 80), (Event::RefaultFar, 20)];
        assert_eq!(spent(0, &far, 0.0).pages_at_ease(1600, 10_000), 10_000);
    }

    #[test]
    fn it_is_told_once_and_not_at_once() {
        let map = ControlMap::create().unwrap();
        let control: &Control = &map;
        control.budget_pages.store(1600, std::sync::atomic::Ordering::Relaxed);
        control.take_slot(0, 100);
        control.tally.note_joined(0);
        let mut thrash = Thrash::default();
        let mut look = || {
            // As if the time had passed in faults.
            if let Some((then, _)) = &mut thrash.seen {
                *then -= PERIOD;
            }
            (0..9000).for_each(|_| control.members[0].count_fault_time(FaultKind::File, 1 << 20));
            thrash.look(control, || 0.0)
        };
        assert_eq!([look(), look()], [None; 2]);
        assert_eq!(look(), Some(1600 * PAGE_SIZE as u64));
        assert_eq!(look(), None);
    }
}
