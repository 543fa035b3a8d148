//! What members counted that have left: the supervisor writes it, and every tool that looks at the tree
//! reads it.
//!
//! A member's counters are cleared with its slot. What they were is added here first, so that the sum
//! over the tally and the members never falls behind. There are two copies of the totals: the new ones are
//! written to the one that nobody reads, and a single store makes them count and the member's own
//! counters not. So a reader finds every member counted once wherever the supervisor stands, even
//! if it was killed there.
//!
//! No locks: a sequence count with a single writer, the supervisor.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::{Event, FAULT_BUCKETS, FaultKind, Member};

/// The counters of members that have left.
#[repr(C, align(64))]
pub struct Tally {
    /// Two for each member that has left. Odd while the last of them is counted here and still has its slot.
    sequence: AtomicU32,
    /// That slot.
    leaving: AtomicU32,
    /// Slots that were ever used are below this: the others have no memory yet, and a look would take
    /// some.
    slots: AtomicU32,
    /// Members that ever joined.
    joined: AtomicU64,
    totals: [Totals; 2],
}

/// What all members counted that have left.
#[repr(C)]
pub struct Totals {
    events: [AtomicU64; Event::ALL.len()],
    fault_times: [[AtomicU64; FAULT_BUCKETS]; FaultKind::ALL.len()],
}

// Relaxed, here and below: statistics, each true by itself; what has to be seen together is between
// two steps of the sequence count.
impl Tally {
    /// A member has joined in `slot`. Only the supervisor calls this.
    pub fn note_joined(&self, slot: usize) {
        self.note_slot(slot);
        self.joined.fetch_add(1, Ordering::Relaxed);
    }

    /// `slot` is in use. Only the supervisor calls this.
    pub fn note_slot(&self, slot: usize) {
        self.slots.fetch_max(slot as u32 + 1, Ordering::Relaxed);
    }

    /// Takes in the counters of the member in `slot`, which has left, and has `clear` clear the slot. Only
    /// the supervisor calls this.
    pub fn take_in(&self, slot: usize, member: &Member, clear: impl FnOnce()) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        // Pairs with the second fence in `read`: whoever still reads the totals that are written now, which
        // counted before the last member left, and saw any of what follows, sees that the count went on.
        fence(Ordering::Release);
        self.totals(sequence.wrapping_add(1)).store_sum(self.totals(sequence), member);
        self.leaving.store(slot as u32, Ordering::Relaxed);
        // Release: pairs with the first load in `read`; a reader of the count sees the totals and the slot.
        self.sequence.store(sequence.wrapping_add(1), Ordering::Release);
        // As above: whoever saw the slot cleared sees that its member has been counted.
        fence(Ordering::Release);
        clear();
        // Release: a reader of this count sees the slot cleared.
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Reads the totals and the members while no member leaves. `look` is given the slot whose member is
    /// in the totals already, if there is one; it may be called more than once, and the last call
    /// counts.
    pub fn read<T>(&self, mut look: impl FnMut(&Totals, Option<usize>) -> T) -> T {
        loop {
            // A Relaxed load and a fence, not an Acquire load: readers may map the page read-only,
            // where only Relaxed loads are promised to work. Pairs with `take_in`'s stores.
            let before = self.sequence.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            let is_leaving = !before.is_multiple_of(2);
            let leaving = is_leaving.then(|| self.leaving.load(Ordering::Relaxed) as usize);
            let seen = look(self.totals(before), leaving);
            // Pairs with the fences in `take_in`.
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == before {
                return seen;
            }
        }
    }

    /// The totals that count at this step of the sequence.
    fn totals(&self, sequence: u32) -> &Totals {
        &self.totals[sequence.div_ceil(2) as usize % 2]
    }

    pub fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed) as usize
    }

    pub fn joined(&self) -> u64 {
        self.joined.load(Ordering::Relaxed)
    }
}

impl Totals {
    fn store_sum(&self, totals: &Totals, member: &Member) {
        for event in Event::ALL {
            let sum = totals.counted(event).wrapping_add(member.counted(event));
            self.events[event as usize].store(sum, Ordering::Relaxed);
        }
        for kind in FaultKind::ALL {
            let both = totals.fault_times(kind).into_iter().zip(member.fault_times(kind));
            for (sum, (total, count)) in self.fault_times[kind as usize].iter().zip(both) {
                sum.store(total.wrapping_add(count), Ordering::Relaxed);
            }
        }
    }

    /// How often members that have left counted `event`.
    pub fn counted(&self, event: Event) -> u64 {
        self.events[event as usize].load(Ordering::Relaxed)
    }

    /// Service times of faults of members that have left, as [`Member::fault_times`] has them.
    pub fn fault_times(&self, kind: FaultKind) -> [u64; FAULT_BUCKETS] {
        self.fault_times[kind as usize].each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}
