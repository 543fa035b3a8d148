//! What a run, or one of its members, has at one moment. What happened so far is [`super::counts`].

use std::sync::atomic::Ordering::Relaxed;

use quire::control::{Control, Member, SEGMENT_BYTES};
use quire::units::PAGE_SIZE;

use super::counts::Scope;

const SEGMENT_PAGES: u64 = (SEGMENT_BYTES / PAGE_SIZE) as u64;

/// Sizes in pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Gauges {
    pub processes: u64,
    pub held: u64,
    pub held_max: u64,
    pub wanted: u64,
    pub wanted_max: u64,
    pub managed: u64,
    pub pool: u64,
    pub swap_file: u64,
    /// On a server, of a run that swaps to one.
    pub far: u64,
    /// What is in memory beside, of a run whose budget is for that too.
    pub unmanaged: u64,
}

impl Gauges {
    /// Of a run, or of its member; nothing where that has left.
    pub(crate) fn read(control: &Control, scope: Scope) -> Gauges {
        let mut sum = Gauges::default();
        for (slot, member) in control.inhabited() {
            if scope == Scope::Run || scope == Scope::Member(member.pid.load(Relaxed)) {
                sum.add(&Gauges::of_member(control, slot, member));
            }
        }
        if scope == Scope::Run {
            // Slots that are kept for runs inside hold pages too, and members share pages.
            sum.held = control.held();
            sum.held_max = control.held_pages_max.load(Relaxed);
            sum.wanted = control.wanted();
            sum.wanted_max = control.wanted_max();
            sum.pool += control.common_pages.load(Relaxed);
            sum.unmanaged = control.unmanaged_pages.load(Relaxed);
            sum.swap_file = u64::from(control.segments_in_file()) * SEGMENT_PAGES;
            sum.far = u64::from(control.far.segments.load(Relaxed)) * SEGMENT_PAGES;
        }
        sum
    }

    pub(crate) fn of_member(control: &Control, slot: usize, member: &Member) -> Gauges {
        Gauges {
            processes: 1,
            held: control.seats[slot].account.get().held.into(),
            held_max: member.held_pages_max.load(Relaxed),
            wanted: member.wanted_pages.load(Relaxed),
            wanted_max: member.wanted_pages_max.load(Relaxed),
            managed: member.managed_pages.load(Relaxed),
            pool: member.pool_pages.load(Relaxed),
            swap_file: control.segments_of(slot) * SEGMENT_PAGES,
            far: 0,
            unmanaged: 0,
        }
    }

    pub(crate) fn add(&mut self, other: &Gauges) {
        self.processes += other.processes;
        self.held += other.held;
        self.held_max += other.held_max;
        self.wanted += other.wanted;
        self.wanted_max += other.wanted_max;
        self.managed += other.managed;
        self.pool += other.pool;
        self.swap_file += other.swap_file;
        self.far += other.far;
        self.unmanaged += other.unmanaged;
    }
}
