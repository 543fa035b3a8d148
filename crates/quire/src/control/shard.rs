//! A member's counters, in parts, so that threads that count do not take each other's cache lines.
//!
//! The first [`ENGINE_SHARDS`] belong to the engine's own threads, one each, by the number that
//! stands behind the thread pointer ([`thread::engine_number`]). Such a shard has one writer, whose
//! plain load and store lose nothing: numbers are unique among the threads of a member's process,
//! and a member's slot is given to another process only after the connection has closed, which all
//! engine threads have open until they end.
//!
//! All other threads (the program's, and libc's threads of the library, which must not look for a
//! thread-local inside of a signal handler) share the second half, by the CPU that they run on. A thread
//! may be moved to another CPU in between, so these threads add by a locked instruction, on a cache line
//! that as a rule no other CPU uses. Where the processor does not tell its number, the thread pointer
//! stands for it.
//!
//! No locks.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::histogram::bucket_of;
use super::{Event, FAULT_BUCKETS, FaultKind, Member};
use crate::sys::thread;

/// Parts of a member's counters.
pub const SHARDS: usize = 32;
/// Of them, those that have one writer each.
pub const ENGINE_SHARDS: usize = SHARDS / 2;

const _: () = assert!(SHARDS.is_power_of_two() && SHARDS <= u32::BITS as usize);

/// A part of a member's counters, on cache lines of its own.
#[repr(C, align(64))]
pub struct Shard {
    /// One counter for every [`Event`].
    pub events: [AtomicU64; Event::ALL.len()],
    pub fault_times: [[AtomicU64; FAULT_BUCKETS]; FaultKind::ALL.len()],
}

/// Which shards were ever written, a bit each: the others are holes of the memfd, and stay so. On a
/// line of its own, which is read at every count and hardly ever written.
#[repr(C, align(64))]
pub struct ShardsUsed(pub AtomicU32);

/// Which threads add to a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writers {
    /// The calling thread alone.
    One,
    /// Other threads as well.
    Several,
}

/// The calling thread's shard.
#[inline]
fn own_shard() -> (usize, Writers) {
    if let Some(number) = thread::engine_number() {
        return (number % ENGINE_SHARDS, Writers::One);
    }
    let number = match thread::cpu() {
        Some(cpu) => cpu as usize,
        // Stacks of threads are far apart; what is left of the product's high bits is not.
        None => thread::thread_pointer().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48,
    };
    (ENGINE_SHARDS + number % ENGINE_SHARDS, Writers::Several)
}

impl Writers {
    #[inline]
    fn add(self, counter: &AtomicU64, count: u64) {
        // Relaxed: counters order nothing.
        match self {
            Writers::One => {
                counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
            }
            Writers::Several => {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        }
    }
}

impl Member {
    #[inline]
    pub fn count(&self, event: Event, times: u64) {
        let (shard, writers) = self.own_shard();
        writers.add(&shard.events[event as usize], times);
    }

    #[inline]
    pub fn count_fault_time(&self, kind: FaultKind, ns: u64) {
        let (shard, writers) = self.own_shard();
        writers.add(&shard.fault_times[kind as usize][bucket_of(ns)], 1);
    }

    #[inline]
    fn own_shard(&self) -> (&Shard, Writers) {
        let (number, writers) = own_shard();
        // Relaxed: a sum that does not see the bit is a sum from before the count.
        if self.shards_used.0.load(Ordering::Relaxed) & 1 << number == 0 {
            self.use_shard(number);
        }
        (&self.shards[number], writers)
    }

    #[cold]
    fn use_shard(&self, number: usize) {
        self.shards_used.0.fetch_or(1 << number, Ordering::Relaxed);
    }

    /// The shards that have anything in them.
    pub(super) fn used_shards(&self) -> impl Iterator<Item = &Shard> {
        let used = self.shards_used.0.load(Ordering::Relaxed);
        let is_used = move |&(number, _): &(usize, &Shard)| used & 1 << number != 0;
        self.shards.iter().enumerate().filter(is_used).map(|(_, shard)| shard)
    }

    /// Sets all counters to zero.
    pub(super) fn clear_shards(&self) {
        for shard in self.used_shards() {
            let counters = shard.events.iter().chain(shard.fault_times.as_flattened());
            counters.for_each(|counter| counter.store(0, Ordering::Relaxed));
        }
        self.shards_used.0.store(0, Ordering::Relaxed);
    }
}
