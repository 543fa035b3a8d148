//! The counters of a run, or of one of its members, at one moment.

use std::sync::atomic::Ordering::Relaxed;

use quire::control::{Control, Event, FAULT_BUCKETS, FaultKind, Member, Totals};

/// The processes that are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scope {
    /// All members of the run, those that have left too.
    Run,
    Member(u32),
}

/// Every counter, and the service times of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    events: [u64; Event::ALL.len()],
    fault_times: [[u64; FAULT_BUCKETS]; FaultKind::ALL.len()],
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            events: [0; Event::ALL.len()],
            fault_times: [[0; FAULT_BUCKETS]; FaultKind::ALL.len()],
        }
    }
}

impl Counts {
    /// What a run counted since it began, or a member since it joined; `None` where that member
    /// has left.
    pub(crate) fn read(control: &Control, scope: Scope) -> Option<Counts> {
        control.tally.read(|totals, leaving| match scope {
            Scope::Run => {
                let mut counts = Counts::of_totals(totals);
                let members = control.present().filter(|&(slot, _)| leaving != Some(slot));
                members.for_each(|(_, member)| counts.add(&Counts::of_member(member)));
                Some(counts)
            }
            Scope::Member(pid) => slot_of(control, pid)
                .filter(|&slot| leaving != Some(slot))
                .map(|slot| Counts::of_member(&control.members[slot])),
        })
    }

    fn of_member(member: &Member) -> Counts {
        Counts {
            events: Event::ALL.map(|event| member.counted(event)),
            fault_times: FaultKind::ALL.map(|kind| member.fault_times(kind)),
        }
    }

    fn of_totals(totals: &Totals) -> Counts {
        Counts {
            events: Event::ALL.map(|event| totals.counted(event)),
            fault_times: FaultKind::ALL.map(|kind| totals.fault_times(kind)),
        }
    }

    pub(crate) fn add(&mut self, other: &Counts) {
        self.combine(other, u64::saturating_add);
    }

    pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a Counts>) -> Counts {
        let mut sum = Counts::default();
        all.for_each(|counts| sum.add(counts));
        sum
    }

    #[must_use]
    pub(crate) fn since(&self, earlier: &Counts) -> Counts {
        let mut counts = *self;
        counts.combine(earlier, u64::saturating_sub);
        counts
    }

    /// Whether anything was counted less often than `earlier` has it.
    pub(crate) fn is_behind(&self, earlier: &Counts) -> bool {
        earlier.since(self) != Counts::default()
    }

    fn combine(&mut self, other: &Counts, both: impl Fn(u64, u64) -> u64) {
        let times = self.fault_times.as_flattened_mut().iter_mut();
        let counts = self.events.iter_mut().chain(times);
        for (count, other) in
            counts.zip(other.events.iter().chain(other.fault_times.as_flattened()))
        {
            *count = both(*count, *other);
        }
    }

    pub(crate) fn of(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    /// Service times, by [`Member::fault_times`]' buckets.
    pub(crate) fn fault_times(&self, kind: FaultKind) -> &[u64; FAULT_BUCKETS] {
        &self.fault_times[kind as usize]
    }

    /// How long faults of a kind took in all, about: each is taken for one in the middle of its bucket.
    pub(crate) fn fault_seconds(&self, kind: FaultKind) -> f64 {
        let buckets = self.fault_times(kind).iter().zip(0..);
        buckets.map(|(&count, bucket)| 1.5e-9 * 2f64.powi(bucket) * count as f64).sum()
    }

    /// What all threads together waited for pages that had left memory.
    pub(crate) fn waited_seconds(&self) -> f64 {
        [FaultKind::Memory, FaultKind::File].map(|kind| self.fault_seconds(kind)).iter().sum()
    }

    #[cfg(test)]
    pub(crate) fn of_events(events: &[(Event, u64)]) -> Counts {
        let mut counts = Counts::default();
        for &(event, count) in events {
            counts.events[event as usize] = count;
        }
        counts
    }

    #[cfg(test)]
    pub(crate) fn set_fault_times(&mut self, kind: FaultKind, bucket: usize, count: u64) {
        self.fault_times[kind as usize][bucket] = count;
    }
}

/// The slot of the member with this process id.
pub(crate) fn slot_of(control: &Control, pid: u32) -> Option<usize> {
    control.inhabited().find(|(_, member)| member.pid.load(Relaxed) == pid).map(|(slot, _)| slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    #[test]
    fn a_tree_is_the_sum_of_its_members_and_of_those_that_have_left() {
        let control = ControlMap::create().unwrap();
        for (slot, pid) in [(0, 100), (1, 200)] {
            control.take_slot(slot, pid);
            control.members[slot].count(Event::Pgfault, u64::from(pid));
            control.tally.note_joined(slot);
        }
        for _ in 0..4 {
            control.members[0].count_fault_time(FaultKind::File, 1 << 10);
        }
        let counts = |scope| Counts::read(&control, scope);
        let tree = counts(Scope::Run).unwrap();
        assert_eq!(tree.of(Event::Pgfault), 300);
        assert_eq!(tree.fault_times(FaultKind::File)[10], 4);
        assert_eq!(counts(Scope::Member(200)).unwrap().of(Event::Pgfault), 200);
        assert_eq!(counts(Scope::Member(300)), None);
        let is_counted_once = || {
            assert_eq!(
                counts(Scope::Run),
                Some(tree),
                "nothing is lost, and nothing counted twice"
            );
            assert_eq!(counts(Scope::Member(100)), None, "it has left");
        };
        control.tally.take_in(0, &control.members[0], || {
            is_counted_once();
            control.free_slot(0);
            is_counted_once();
        });
        is_counted_once();
        assert_eq!(control.tally.joined(), 2);
    }

    #[test]
    fn a_member_that_leaves_meanwhile_is_counted_once() {
        let map = ControlMap::create().unwrap();
        let control: &Control = &map;
        control.tally.note_joined(0);
        let member = &control.members[0];
        std::thread::scope(|scope| {
            let leaving = scope.spawn(|| {
                for _ in 0..20_000 {
                    control.tally.take_in(0, member, || control.free_slot(0));
                    control.take_slot(0, 1);
                    member.count(Event::Pgfault, 1);
                }
            });
            let mut last = 0;
            let mut is_over = false;
            while !is_over {
                // Once more after the end, however late this thread comes to it.
                is_over = leaving.is_finished();
                let now = Counts::read(control, Scope::Run).unwrap().of(Event::Pgfault);
                assert!(now >= last, "{now} after {last}");
                last = now;
            }
            assert_eq!(last, 20_000);
        });
    }

    #[test]
    fn differences_do_not_wrap() {
        let earlier = Counts::of_events(&[(Event::Pgfault, 5), (Event::Pswpin, 3)]);
        let later = Counts::of_events(&[(Event::Pgfault, 9), (Event::Pswpin, 1)]);
        let since = later.since(&earlier);
        assert_eq!((since.of(Event::Pgfault), since.of(Event::Pswpin)), (4, 0));
        assert!(later.is_behind(&earlier));
        assert!(!later.is_behind(&later) && !later.is_behind(&Counts::default()));
    }
}
