//! Reads what members tell of the pages that they touch, and sees to it that it costs the program little: where it costs
//! more, fewer groups are sampled; where much is touched between two looks, they come sooner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use quire::control::sampling::{SAMPLES, Sample, Told, is_sampled};
use quire::control::{Control, Event};
use quire::units::PAGE_SIZE;

use super::curve::Profiled;
use super::misses::Costs;
use super::world::World;
use crate::procfs;
use crate::runs::counts::{Counts, Scope};
use crate::supervisor::Moment;

/// From one look to the next at most, and from one time to the next at which it is seen what sampling costs.
const PERIOD_MS: u32 = 10;
const COST_PERIOD: Duration = Duration::from_millis(100);
/// One group in so many is sampled at first, and at least, as powers of two.
const SHIFT_FIRST: u32 = 5;
const SHIFT_MAX: u32 = 24;
/// What sampling may cost, as a part of the time that passes.
const COST_MAX: f64 = 0.2;
/// Below this part of that more is sampled.
const CHEAP: f64 = 0.3;
/// What of the time that unmapping takes the program loses, as the background thread does it.
const UNMAP_PART: f64 = 0.5;
/// Sampled pages below which no fewer are sampled, and above which fewer are in any case.
const SAMPLED_MIN: usize = 2560;
const SAMPLED_MAX: usize = 1 << 14;
/// Parts of the sampled pages that are touched between two looks: above, looks come sooner; below, they come later.
const MUCH: f64 = 1.0 / 8.0;
const VERY_LITTLE: f64 = 1.0 / 32.0;
/// Budgets that are looked at: so many for each doubling, from this on, down to this part of the need; of those below
/// another part of it every second.
const PER_DOUBLING: f64 = 12.0;
const EACH_OF_NEED_MIN: f64 = 0.7;
const BUDGET_FIRST: f64 = (16 << 20) as f64;
const OF_NEED_MIN: f64 = 0.22;
/// Records that are read at a time.
const READ_MAX: u64 = 2048;
/// A record may be written this long after its place was taken.
const LATE_RECORDS: u64 = 64;

/// Reads what members tell.
pub(super) struct Reader {
    world: World,
    position: u64,
    lost: u64,
    shift: u32,
    period_ms: u32,
    /// Below this looks cost too much.
    period_min_ms: u32,
    /// Memory of this process, beyond what it had when it began.
    own_pages: u64,
    own_pages_first: u64,
    /// The members, and how many page tables each has because it is sampled.
    members: BTreeMap<u32, u64>,
    next_budget: u32,
    need_pages: u64,
    /// Looks since it was seen last what sampling costs, and the counters then.
    looks: u32,
    cost_at: Instant,
    counts: Counts,
    /// What it has cost in all.
    cost_ns: f64,
}

impl Reader {
    pub(super) fn new(costs: Costs, has_file: bool) -> Reader {
        Reader {
            world: World::new(costs, has_file),
            position: 0,
            lost: 0,
            shift: SHIFT_FIRST,
            period_ms: PERIOD_MS,
            period_min_ms: 1,
            own_pages: 0,
            own_pages_first: own_pages(),
            members: BTreeMap::new(),
            next_budget: 0,
            need_pages: 0,
            looks: 0,
            cost_at: Instant::now(),
            counts: Counts::default(),
            cost_ns: 0.0,
        }
    }

    pub(super) fn look(&mut self, control: &Control, moment: Moment) {
        if !control.sampling.is_on() && moment == Moment::Period {
            control.sampling.start(self.shift, self.period_ms);
            control.call_all();
            self.cost_at = Instant::now();
        }
        let pids: BTreeSet<u32> =
            control.inhabited().map(|(_, member)| member.pid.load(Relaxed)).collect();
        for &pid in &pids {
            self.members.entry(pid).or_default();
        }
        self.note_sizes(control);
        self.read(control, moment);
        self.forget_ended(&pids);
        if moment == Moment::End {
            // What lives on is not to be slower for it.
            control.sampling.stop();
            self.note_cost(control);
        } else if self.cost_at.elapsed() >= COST_PERIOD {
            self.steer(control);
        }
    }

    fn note_sizes(&mut self, control: &Control) {
        let wanted = control.wanted();
        // What is there for sampling alone does not count.
        let tables = self.members.values().sum::<u64>() + self.own_pages;
        let unmanaged = control.unmanaged_pages.load(Relaxed).saturating_sub(tables);
        self.need_pages = self.need_pages.max(wanted + unmanaged);
        self.world.note_unmanaged(unmanaged);
        self.world.note_one_in(self.shift);
        // Those that are about to be too small begin, and those that are far too small end.
        let need_bytes = (self.need_pages * PAGE_SIZE as u64) as f64;
        let budget = |number| BUDGET_FIRST * 2f64.powf(f64::from(number) / PER_DOUBLING);
        while budget(self.next_budget) < need_bytes * 1.1 {
            self.world.begin(budget(self.next_budget) as u64);
            self.next_budget += 1;
        }
        self.world.retain(|bytes| {
            let part = bytes as f64 / need_bytes;
            let number = (bytes as f64 / BUDGET_FIRST).log2() * PER_DOUBLING;
            part > OF_NEED_MIN && (part > EACH_OF_NEED_MIN || number.round() % 2.0 == 0.0)
        });
    }

    fn read(&mut self, control: &Control, moment: Moment) {
        let sampling = &control.sampling;
        let head = sampling.head();
        let too_late = head.saturating_sub(self.position).saturating_sub(SAMPLES as u64);
        self.lost += too_late;
        self.position += too_late;
        // The supervisor has other things to do as well.
        let most = if moment == Moment::End { SAMPLES as u64 } else { READ_MAX };
        let end = head.min(self.position + most);
        while self.position < end {
            let Some(sample) = sampling.read(self.position) else {
                if head - self.position < LATE_RECORDS {
                    break;
                }
                self.lost += 1;
                self.position += 1;
                continue;
            };
            self.position += 1;
            self.hear(&sample);
        }
    }

    fn hear(&mut self, sample: &Sample) {
        let &Sample { pid, look, .. } = sample;
        if !self.members.contains_key(&pid) {
            return;
        }
        match sample.told {
            Told::Groups(groups) => {
                let seen = groups.into_iter().flatten();
                let shift = self.shift;
                seen.filter(|seen| is_sampled(pid, seen.group, shift))
                    .for_each(|seen| self.world.see(pid, look, seen));
            }
            Told::Packed { bytes, unpack_ns } => self.world.note_packed(bytes, unpack_ns),
            Told::End { windows, wanted } => {
                self.looks += 1;
                self.world.end_look(pid, look, wanted);
                if sample.is_census() {
                    self.world.end_census(pid, look);
                }
                if let Some(known) = self.members.get_mut(&pid) {
                    *known = windows;
                }
            }
        }
    }

    /// What belonged to processes that have ended is gone.
    fn forget_ended(&mut self, pids: &BTreeSet<u32>) {
        if !self.members.keys().eq(pids) {
            self.world.end(|pid| !pids.contains(&pid));
            self.members.retain(|pid, _| pids.contains(pid));
        }
    }

    /// Adds up what sampling has cost since the last time; returns it as a part of what it may cost.
    fn note_cost(&mut self, control: &Control) -> f64 {
        let counts = Counts::read(control, Scope::Run).unwrap_or_default();
        let since = counts.since(&self.counts);
        let [faults, unmap_ns] =
            [Event::PgactivateLimbo, Event::UnmapNs].map(|event| since.of(event) as f64);
        let cost_ns = faults * self.world.costs().limbo + unmap_ns * UNMAP_PART;
        self.cost_ns += cost_ns;
        let dearness = cost_ns / self.cost_at.elapsed().as_nanos() as f64 / COST_MAX;
        (self.cost_at, self.counts) = (Instant::now(), counts);
        dearness
    }

    /// Has members sample less where it costs much, and more often where much is touched.
    fn steer(&mut self, control: &Control) {
        let dearness = self.note_cost(control);
        self.own_pages = own_pages().saturating_sub(self.own_pages_first);
        let touched = self.world.take_touched();
        let looks = std::mem::take(&mut self.looks);
        let present = self.world.present();
        let part = touched as f64 / f64::from(looks.max(1)) / present.max(1) as f64;
        let sampling = &control.sampling;
        if part > MUCH && self.period_ms > self.period_min_ms {
            self.period_ms /= 2;
        } else if part < VERY_LITTLE && self.period_ms < PERIOD_MS {
            self.period_ms = (2 * self.period_ms).min(PERIOD_MS);
        }
        if present > SAMPLED_MAX || dearness > 1.0 && present > SAMPLED_MIN {
            let most = present.max(SAMPLED_MIN) / SAMPLED_MIN;
            let halvings = (dearness.log2() as u32).min(most.ilog2()).clamp(1, 4);
            self.shift = (self.shift + halvings).min(SHIFT_MAX);
            let shift = self.shift;
            self.world.forget(|pid, group| !is_sampled(pid, group, shift));
        } else if dearness > 1.0 && self.period_ms < PERIOD_MS {
            self.period_min_ms = (2 * self.period_ms).min(PERIOD_MS);
            self.period_ms = self.period_min_ms;
        } else if dearness < CHEAP && 4 * present < SAMPLED_MAX && self.shift > 0 {
            self.shift -= 1;
        }
        sampling.start(self.shift, self.period_ms);
    }

    pub(super) fn end(mut self, wall_seconds: f64, command: String) -> Profiled {
        self.world.end(|_| true);
        let sampling_seconds = self.cost_ns / 1e9;
        let need_bytes = self.need_pages * PAGE_SIZE as u64;
        let mut results: Vec<_> = self.world.results().collect();
        results.retain(|played| played.budget_bytes < need_bytes);
        Profiled {
            command,
            wall_seconds,
            seconds: (wall_seconds - sampling_seconds).max(wall_seconds / 2.0),
            need_bytes,
            packed: self.world.packed(),
            one_in: 1 << self.shift,
            lost: self.lost,
            costs: self.world.costs(),
            results,
        }
    }
}

fn own_pages() -> u64 {
    let own = procfs::in_memory(std::process::id()).unwrap_or_default();
    own.bytes / PAGE_SIZE as u64
}
