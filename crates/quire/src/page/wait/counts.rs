//! How often an unlock had to look into a queue, and how often not.
//!
//! What happens under a queue's lock is counted there, exactly. An unlock without waiters writes
//! nothing shared but its page's word; it is counted in a shard chosen by the thread, by a load and
//! a store. So threads that share a shard, and count in the same nanoseconds, lose counts; a
//! thread alone in its shard loses none. No decision hangs on these.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::sys::thread::thread_pointer;

const SHARDS: usize = 64;

/// What a wait table has done so far, or what happened under one queue's lock.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Unlocks that looked into no queue: calls avoided. May be a few short where threads share a
    /// shard; the others are exact.
    pub avoided: u64,
    /// Unlocks that looked into their word's queue.
    pub looks: u64,
    /// Times that a thread or a callback was queued.
    pub waits: u64,
    /// Threads woken: a system call each.
    pub wakes: u64,
    pub callbacks: u64,
    /// Times that the lock was free for a waiter, and another thread took it.
    pub steals: u64,
    /// Times that it was handed over.
    pub handoffs: u64,
    /// Wakes that a cancelled waiter passed on.
    pub passed_on: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Counts) {
        self.looks += other.looks;
        self.waits += other.waits;
        self.wakes += other.wakes;
        self.callbacks += other.callbacks;
        self.steals += other.steals;
        self.handoffs += other.handoffs;
        self.passed_on += other.passed_on;
    }
}

#[repr(align(64))]
struct AvoidedShard(AtomicU64);

/// Unlocks that looked into no queue.
pub(super) struct Avoided([AvoidedShard; SHARDS]);

impl Avoided {
    pub const fn new() -> Avoided {
        Avoided([const { AvoidedShard(AtomicU64::new(0)) }; SHARDS])
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
