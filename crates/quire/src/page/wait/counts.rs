//! How often who unlocks had to call, and how often not.
//!
//! What happens under a queue's lock is counted there, exactly. An unlock that calls nobody writes
//! nothing shared but its page's word; it is counted in a shard chosen by the thread, by a load and
//! a store. So threads that share a shard, and count in the same nanoseconds, lose counts; a
//! thread alone in its shard loses none. No decision hangs on these.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::sys::thread::thread_pointer;

const SHARDS: usize = 64;

/// What happened under one queue's lock.
#[derive(Clone, Copy)]
pub(super) struct Tally {
    pub looks: u64,
    pub waits: u64,
    pub wakes: u64,
    pub callbacks: u64,
    pub steals: u64,
    pub handoffs: u64,
    pub passed_on: u64,
}

impl Tally {
    pub const ZERO: Tally =
        Tally { looks: 0, waits: 0, wakes: 0, callbacks: 0, steals: 0, handoffs: 0, passed_on: 0 };
}

/// What a wait table has done so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Unlocks that looked for nobody: calls avoided. May be a few short where threads share a
    /// shard; the others are exact.
    pub avoided: u64,
    /// Unlocks that looked into their word's queue.
    pub looks: u64,
    /// Times that a thread or a callback was queued.
    pub waits: u64,
    /// Threads woken: a system call each.
    pub wakes: u64,
    /// Callbacks called.
    pub callbacks: u64,
    /// Times that the lock was free for one who waited, and somebody else took it.
    pub steals: u64,
    /// Times that it was handed over.
    pub handoffs: u64,
    /// Wakes that a cancelled waiter passed on.
    pub passed_on: u64,
}

impl Counts {
    pub(super) fn add(&mut self, tally: &Tally) {
        self.looks += tally.looks;
        self.waits += tally.waits;
        self.wakes += tally.wakes;
        self.callbacks += tally.callbacks;
        self.steals += tally.steals;
        self.handoffs += tally.handoffs;
        self.passed_on += tally.passed_on;
    }
}

#[repr(align(64))]
struct Shard(AtomicU64);

/// Unlocks that called nobody.
pub(super) struct Avoided([Shard; SHARDS]);

impl Avoided {
    pub const fn new() -> Avoided {
        Avoided([const { Shard(AtomicU64::new(0)) }; SHARDS])
    }

    #[inline]
    pub fn count(&self) {
        // Thread control blocks lie at the ends of mappings: their low bits say nothing, and the
        // product's high bits mix all others.
        let mixed = thread_pointer().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let shard = &self.0[mixed >> (usize::BITS - SHARDS.ilog2())].0;
        // Relaxed: a count; see the module.
        shard.store(shard.load(Relaxed) + 1, Relaxed);
    }

    pub fn sum(&self) -> u64 {
        self.0.iter().map(|shard| shard.0.load(Relaxed)).sum()
    }
}
