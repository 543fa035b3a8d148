//! What members counted that have left: the supervisor writes it, and every tool that looks at the tree
//! reads it.
//!
//! A member's counters are cleared with its slot. What they were is added here first, so that the sum
//! over the tally and the members never falls behind. A reader between the two steps would count a member
//! twice, or not at all: so it reads by [`Tally::read`].
//!
//! No locks: a sequence count with a single writer, the supervisor.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::{Event, FAULT_BUCKETS, FaultKind, Member};

/// How often [`Tally::read`] begins again before it takes what it gets, for a supervisor that was
/// killed between the two steps never ends them. It waits some tenths of a second, in case the
/// supervisor has only lost its CPU.
const TRIES_MAX: u32 = 4_000_000;

/// The counters of members that have left.
#[repr(C, align(64))]
pub struct Tally {
    /// Odd while a member's counters are on their way here.
    sequence: AtomicU32,
    /// Slots that were ever used are below this: the others have no memory yet, and a look would take
    /// some.
    slots: AtomicU32,
    /// Members that ever joined.
    joined: AtomicU64,
    events: [AtomicU64; Event::ALL.len()],
    fault_times: [[AtomicU64; FAULT_BUCKETS]; FaultKind::ALL.len()],
}

// Relaxed, here and below: statistics, each true by itself; what has to be seen together is between
// the two steps of the sequence count.
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

    /// Takes in the counters of a member that has left, and has `clear` clear its slot. Only the
    /// supervisor calls this.
    pub fn take_in(&self, member: &Member, clear: impl FnOnce(&Member)) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        // Pairs with the fence in `read`: a reader that saw any of what follows sees the odd count.
        fence(Ordering::Release);
        for event in Event::ALL {
            self.events[event as usize].fetch_add(member.counted(event), Ordering::Relaxed);
        }
        for kind in FaultKind::ALL {
            let times = member.fault_times(kind);
            for (total, count) in self.fault_times[kind as usize].iter().zip(times) {
                total.fetch_add(count, Ordering::Relaxed);
            }
        }
        clear(member);
        // Pairs with the first load in `read`: a reader of the even count sees all of the above.
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Reads the tally and the members while no member leaves. `look` may be called more than
    /// once; the last call counts.
    pub fn read<T>(&self, mut look: impl FnMut(&Tally) -> T) -> T {
        for _ in 1..TRIES_MAX {
            // A Relaxed load and a fence, not an Acquire load: readers may map the page read-only,
            // where only Relaxed loads are promised to work. Pairs with `take_in`'s last store.
            let before = self.sequence.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            if !before.is_multiple_of(2) {
                core::hint::spin_loop();
                continue;
            }
            let seen = look(self);
            // Pairs with the fence in `take_in`.
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == before {
                return seen;
            }
        }
        look(self)
    }

    pub fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed) as usize
    }

    pub fn joined(&self) -> u64 {
        self.joined.load(Ordering::Relaxed)
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
