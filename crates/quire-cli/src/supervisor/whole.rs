//! The budget is for the whole of a run: what is in memory beside managed memory is counted here, and takes its
//! part of the budget.
//!
//! Owns [`Control::unmanaged_pages`], and takes back what members have announced
//! ([`Control::announced_pages`]) once it has come, or has not come for a while. What is counted: the usage of
//! the run's cgroup, or where it has none of its processes one by one, and the supervisor's own, less what
//! members hold. The page cache of files is not: the kernel drops it when it wants memory.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use quire::control::{Control, MANAGED_PAGES_MIN};
use quire::units::PAGE_SIZE;

use crate::cgroup;
use crate::procfs;

/// How often it is counted, and, where it hardly changes, looked at closely; and the least time from one count to the
/// next in times of the count itself.
pub(super) const PERIOD: Duration = Duration::from_millis(20);
const CLOSE_PERIOD: Duration = Duration::from_millis(200);
const PERIOD_PER_COUNT: u32 = 20;
/// What a cgroup's usage may change by before it is looked at closely.
const HARDLY_BYTES: u64 = 1 << 20;
/// How long memory that is announced may take to come.
const COMES_WITHIN: Duration = Duration::from_secs(1);
/// How often, at most, it is looked at what processes share, which takes the kernel a walk over their page
/// tables; and the least time from one look to the next in times of the look itself.
const SHARED_PERIOD: Duration = Duration::from_secs(1);
const PERIOD_PER_LOOK: u32 = 100;
/// Who has most shared memory is looked up again when there is so much more of it.
const NAME_STEP_BYTES: u64 = 8 << 20;

/// Memory, in bytes: all of it, and what of it is of two kinds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct InMemory {
    pub bytes: u64,
    /// Shared memory, and files in memory.
    pub shared_bytes: u64,
    /// Page tables, and the kernel's other structures.
    pub kernel_bytes: u64,
}

/// Where usage is read.
enum Meter {
    Cgroup(cgroup::Meter),
    Processes(ByProcess),
}

/// What is in memory beside managed memory.
pub(crate) struct Whole {
    meter: Meter,
    next: Instant,
    /// A cgroup's usage when it was last looked at closely, and when that is due again.
    seen: u64,
    next_close: Instant,
    /// When it last grew, more was announced, or members gave way.
    moved: Instant,
    /// Pages that members held too much then.
    excess: usize,
    last: InMemory,
    announced: u64,
    /// As it was when there was most.
    pub(super) most: InMemory,
    /// The process that had most shared memory: its name, its id, and how much.
    pub(super) most_shared_by: Option<(String, u32, u64)>,
    is_told: bool,
}

impl Whole {
    /// Counts by that cgroup, or where there is none by the processes.
    pub(crate) fn new(cgroup: Option<cgroup::Meter>) -> Whole {
        let now = Instant::now();
        Whole {
            meter: cgroup.map_or(Meter::Processes(ByProcess::new()), Meter::Cgroup),
            next: now,
            seen: 0,
            next_close: now,
            moved: now,
            excess: 0,
            last: InMemory::default(),
            announced: 0,
            most: InMemory::default(),
            most_shared_by: None,
            is_told: false,
        }
    }

    /// Counts anew where that is due. `processes` are all that are known of the run. Returns, the first time,
    /// what there is when no more than [`MANAGED_PAGES_MIN`] are left of the budget.
    pub(super) fn look(
        &mut self,
        control: &Control,
        processes: impl FnOnce() -> BTreeSet<u32>,
    ) -> Option<InMemory> {
        let now = Instant::now();
        if now < self.next {
            return None;
        }
        self.next = now + PERIOD;
        control.note_counted();
        if let Meter::Cgroup(meter) = &self.meter {
            let seen = meter.seen()?;
            let is_quiet = seen.abs_diff(self.seen) < HARDLY_BYTES && control.excess() == 0;
            let none_announced = control.announced_pages.load(Relaxed) == 0;
            if is_quiet && none_announced && now < self.next_close {
                return None;
            }
            (self.seen, self.next_close) = (seen, now + CLOSE_PERIOD);
        }
        let usage = match &mut self.meter {
            Meter::Cgroup(meter) => meter.usage()?,
            Meter::Processes(meter) => meter.usage(&processes()),
        };
        let usage = more(usage, procfs::in_memory(std::process::id()).unwrap_or_default());
        let unmanaged = less_what_is_held(usage, control, matches!(self.meter, Meter::Cgroup(_)));
        self.take_in(control, unmanaged, now);
        self.name_who_shares(control, unmanaged);
        self.next = now + PERIOD.max(now.elapsed() * PERIOD_PER_COUNT);
        self.tell_if_little_is_left(control, unmanaged)
    }

    /// Writes down what is not managed now, and has members give way where that is more than before.
    fn take_in(&mut self, control: &Control, unmanaged: InMemory, now: Instant) {
        let page = PAGE_SIZE as u64;
        if unmanaged.bytes > self.most.bytes {
            self.most = unmanaged;
        }
        // First what has come, so that it counts at any time, twice for a moment.
        control.unmanaged_pages.store(unmanaged.bytes / page, Relaxed);
        let announced = control.announced_pages.load(Relaxed);
        let grown = (unmanaged.bytes / page).saturating_sub(self.last.bytes / page);
        let excess = control.excess();
        if grown > 0 || announced > self.announced || excess < self.excess {
            self.moved = now;
        }
        self.excess = excess;
        let is_over = now - self.moved >= COMES_WITHIN;
        let taken = if is_over { announced } else { grown.min(announced) };
        // Members add to it meanwhile, or take it all back where they thought us dead.
        let less = |pages: u64| Some(pages.saturating_sub(taken));
        let _ = control.announced_pages.fetch_update(Relaxed, Relaxed, less);
        self.announced = announced - taken;
        self.last = unmanaged;
        if excess > 0 {
            control.call_all();
        }
    }

    fn name_who_shares(&mut self, control: &Control, unmanaged: InMemory) {
        let known = self.most_shared_by.as_ref().map_or(0, |(_, _, bytes)| *bytes);
        if unmanaged.shared_bytes < known + NAME_STEP_BYTES {
            return;
        }
        let members = control.inhabited().map(|(_, member)| {
            let pid = member.pid.load(Relaxed);
            (procfs::shared_bytes(pid, member), pid)
        });
        if let Some((bytes, pid)) = members.max() {
            let name = procfs::name(pid).unwrap_or_default();
            // What no process has mapped is named by none, and is not looked up again at once.
            self.most_shared_by = Some((name, pid, bytes.max(unmanaged.shared_bytes / 2)));
        }
    }

    fn tell_if_little_is_left(
        &mut self,
        control: &Control,
        unmanaged: InMemory,
    ) -> Option<InMemory> {
        let budget_pages = control.budget_pages.load(Relaxed);
        let left = budget_pages.saturating_sub(unmanaged.bytes / PAGE_SIZE as u64);
        let is_new = left < MANAGED_PAGES_MIN && !self.is_told;
        self.is_told |= is_new;
        is_new.then_some(unmanaged)
    }
}

/// What is left of a usage without what members hold: pages of their own, and of the pool, which is shared
/// memory to the kernel. A run inside is in the cgroup's usage, and has its reservation for it.
fn less_what_is_held(usage: InMemory, control: &Control, has_reservations: bool) -> InMemory {
    let bytes = |pages: u64| pages * PAGE_SIZE as u64;
    let reserved = control.present().filter(|(_, member)| member.is_a_reservation());
    let reserved: u64 =
        reserved.map(|(slot, _)| u64::from(control.seats[slot].account.get().held)).sum();
    let held = control.held() - if has_reservations { 0 } else { reserved };
    let pool = control.inhabited().map(|(_, member)| member.pool_pages.load(Relaxed)).sum::<u64>()
        + control.common_pages.load(Relaxed);
    let all = usage.bytes.saturating_sub(bytes(held));
    let shared_bytes = usage.shared_bytes.saturating_sub(bytes(pool)).min(all);
    let kernel_bytes = usage.kernel_bytes.min(all - shared_bytes);
    InMemory { bytes: all, shared_bytes, kernel_bytes }
}

/// Counts processes one by one, by what `/proc` says of each.
struct ByProcess {
    /// What was counted more than once when that was last looked at, because processes share it.
    counted_twice: InMemory,
    next: Instant,
}

impl ByProcess {
    fn new() -> ByProcess {
        ByProcess { counted_twice: InMemory::default(), next: Instant::now() }
    }

    fn usage(&mut self, processes: &BTreeSet<u32>) -> InMemory {
        let began = Instant::now();
        let looks_closely = began >= self.next && processes.len() > 1;
        let (mut all, mut once) = (InMemory::default(), InMemory::default());
        for &pid in processes {
            let Some(one) = procfs::in_memory(pid) else { continue };
            let closely = if looks_closely { procfs::proportional(pid) } else { None };
            (all, once) = (more(all, one), more(once, closely.unwrap_or(one)));
        }
        if looks_closely {
            self.counted_twice = less(all, once);
            self.next = Instant::now() + SHARED_PERIOD.max(began.elapsed() * PERIOD_PER_LOOK);
        } else if processes.len() < 2 {
            self.counted_twice = InMemory::default();
        }
        less(all, self.counted_twice)
    }
}

fn more(all: InMemory, part: InMemory) -> InMemory {
    InMemory {
        bytes: all.bytes + part.bytes,
        shared_bytes: all.shared_bytes + part.shared_bytes,
        kernel_bytes: all.kernel_bytes + part.kernel_bytes,
    }
}

fn less(all: InMemory, part: InMemory) -> InMemory {
    InMemory {
        bytes: all.bytes.saturating_sub(part.bytes),
        shared_bytes: all.shared_bytes.saturating_sub(part.shared_bytes),
        kernel_bytes: all.kernel_bytes.saturating_sub(part.kernel_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    const MIB: u64 = 1 << 20;
    const PAGES: u64 = MIB / PAGE_SIZE as u64;

    fn in_memory(mib: u64) -> InMemory {
        InMemory { bytes: mib * MIB, ..InMemory::default() }
    }

    /// What members may hold, in MiB, with what is kept ahead.
    fn limit_mib(control: &Control) -> u64 {
        (control.managed_limit() as u64 + 100 * PAGES / 64) / PAGES
    }

    fn control() -> ControlMap {
        let control = ControlMap::create().unwrap();
        control.budget_pages.store(100 * PAGES, Relaxed);
        control.take_slot(0, std::process::id());
        control
    }

    #[test]
    fn what_is_not_managed_is_taken_from_what_members_may_hold() {
        let control = control();
        let mut whole = Whole::new(None);
        whole.take_in(&control, in_memory(30), Instant::now());
        assert_eq!(limit_mib(&control), 70);
        whole.take_in(&control, in_memory(98), Instant::now());
        assert_eq!(control.managed_limit() as u64, MANAGED_PAGES_MIN, "they keep the least");
        whole.take_in(&control, in_memory(10), Instant::now());
        assert_eq!((limit_mib(&control), whole.most), (90, in_memory(98)));
    }

    #[test]
    fn what_is_announced_counts_until_it_has_come_or_does_not_come() {
        let control = control();
        let mut whole = Whole::new(None);
        let start = Instant::now();
        whole.take_in(&control, in_memory(10), start);
        control.announced_pages.fetch_add(40 * PAGES, Relaxed);
        assert_eq!(limit_mib(&control), 50);
        whole.take_in(&control, in_memory(25), start + PERIOD);
        assert_eq!(limit_mib(&control), 50, "15 of 40 have come");
        whole.take_in(&control, in_memory(25), start + COMES_WITHIN);
        assert_eq!(limit_mib(&control), 50, "the others still may");
        whole.take_in(&control, in_memory(25), start + PERIOD + COMES_WITHIN);
        assert_eq!(limit_mib(&control), 75, "they do not");
        // Not as long as members give way: nobody could touch it yet.
        let account = &control.seats[0].account;
        account.put_in(60 * PAGES as usize);
        control.announced_pages.fetch_add(30 * PAGES, Relaxed);
        whole.take_in(&control, in_memory(25), start + 4 * COMES_WITHIN);
        account.take_out(PAGES as usize);
        whole.take_in(&control, in_memory(25), start + 6 * COMES_WITHIN);
        assert_eq!(control.announced_pages.load(Relaxed), 30 * PAGES);
        whole.take_in(&control, in_memory(25), start + 7 * COMES_WITHIN);
        assert_eq!(control.announced_pages.load(Relaxed), 0, "they give no more");
    }

    #[test]
    fn what_members_hold_is_not_counted_and_the_pool_is_no_shared_memory() {
        let control = control();
        control.seats[0].account.put_in(20 * PAGES as usize);
        control.members[0].pool_pages.store(5 * PAGES, Relaxed);
        control.reserve_slot(1, 7, 10 * PAGES);
        let usage = InMemory { bytes: 50 * MIB, shared_bytes: 12 * MIB, kernel_bytes: 4 * MIB };
        let rest = InMemory { bytes: 20 * MIB, shared_bytes: 7 * MIB, kernel_bytes: 4 * MIB };
        assert_eq!(less_what_is_held(usage, &control, true), rest);
        let rest = InMemory { bytes: 30 * MIB, ..rest };
        assert_eq!(less_what_is_held(usage, &control, false), rest);
        assert_eq!(less_what_is_held(in_memory(1), &control, true), InMemory::default());
    }

    #[test]
    fn little_left_is_told_once() {
        let control = control();
        let mut whole = Whole::new(None);
        assert_eq!(whole.tell_if_little_is_left(&control, in_memory(92)), None);
        assert_eq!(whole.tell_if_little_is_left(&control, in_memory(93)), Some(in_memory(93)));
        assert_eq!(whole.tell_if_little_is_left(&control, in_memory(99)), None);
    }

    #[test]
    fn processes_are_counted_one_by_one_and_what_they_share_once() {
        let mut children: Vec<_> = (0..2)
            .map(|_| std::process::Command::new("sleep").arg("60").spawn().unwrap())
            .collect();
        let pids: BTreeSet<u32> = children.iter().map(std::process::Child::id).collect();
        let mut meter = ByProcess::new();
        let first = meter.usage(&pids);
        assert!(first.bytes > 0 && first.kernel_bytes > 0, "{first:?}");
        // A little of two processes of the same program is the same: no page of it is anonymous.
        assert!(meter.counted_twice.bytes <= first.bytes / 2, "{:?}", meter.counted_twice);
        children.iter_mut().for_each(|child| {
            child.kill().unwrap();
            child.wait().unwrap();
        });
        assert_eq!(meter.usage(&pids), InMemory::default(), "they have ended");
    }
}
