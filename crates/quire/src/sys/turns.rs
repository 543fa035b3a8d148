//! Turns: how the threads of a simulation sleep and wake, instead of asking the kernel.
//!
//! A simulation runs its threads, the *actors*, one at a time. Each registers here what chooses the
//! next one. Each function says whether the calling thread is an actor; where it is none, the
//! function has done nothing. Actors have no timers: one that sleeps with a deadline looks again now
//! and then. They have a clock of their own, so what waits for a time to pass, or measures a cost,
//! does the same for the same seed.

#![deny(unsafe_code)]

use core::cell::RefCell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use super::rank::Rank;

/// Chooses which actor runs.
pub trait Turns {
    /// A place where another actor may run.
    fn step(&self);
    /// Lets others run. The caller looks again at what it waits for.
    fn relax(&self);
    /// Returns after the mutex at `address` was [unlocked](Self::unblock_mutex).
    fn block_on_mutex(&self, address: usize);
    /// The mutex at `address` was unlocked.
    fn unblock_mutex(&self, address: usize);
    /// Returns after a call of [`Self::unblock_futex`] that means one of `classes`.
    fn block_on_futex(&self, address: usize, classes: u32);
    /// Wakes up to `count` actors that sleep on the word at `address` as one of `classes`.
    fn unblock_futex(&self, address: usize, count: u32, classes: u32);
    /// What time it is for the calling actor.
    fn now_ns(&self) -> u64;
}

std::thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn Turns>>> = const { RefCell::new(None) };
}

/// Actors of this process. While there is none no thread-local is touched: an engine that serves a
/// program has threads to which libc gave none.
static ACTORS: AtomicUsize = AtomicUsize::new(0);

/// Makes the calling thread an actor.
pub fn start(turns: Arc<dyn Turns>) {
    CURRENT.set(Some(turns));
    ACTORS.fetch_add(1, Relaxed);
}

/// Ends the calling actor. Returns the outermost lock that it still holds, where that is recorded.
pub fn end() -> Option<Rank> {
    CURRENT.set(None);
    ACTORS.fetch_sub(1, Relaxed);
    #[cfg(debug_assertions)]
    return super::rank::forget();
    #[cfg(not(debug_assertions))]
    None
}

fn current() -> Option<Arc<dyn Turns>> {
    // Relaxed: an actor has counted itself.
    if ACTORS.load(Relaxed) == 0 { None } else { CURRENT.with_borrow(Clone::clone) }
}

/// Takes the mutex at `address` by `try_lock`. Where it `steps`, others may run before.
pub(super) fn lock(address: usize, steps: bool, try_lock: impl Fn() -> bool) -> bool {
    let Some(turns) = current() else { return false };
    if steps {
        turns.step();
    }
    while !try_lock() {
        turns.block_on_mutex(address);
        if std::thread::panicking() {
            // The simulation has failed: the others unlock as they unwind, without turns.
            std::thread::yield_now();
        }
    }
    true
}

/// The mutex at `address` was unlocked. Where it `steps`, others may run now.
pub(super) fn unlocked(address: usize, steps: bool) {
    if let Some(turns) = current() {
        turns.unblock_mutex(address);
        if steps {
            turns.step();
        }
    }
}

/// The time of the simulation, for its actors.
pub(super) fn now_ns() -> Option<u64> {
    current().map(|turns| turns.now_ns())
}

pub(super) fn futex_wait(word: &AtomicU32, expected: u32, classes: u32, has_timeout: bool) -> bool {
    let Some(turns) = current() else { return false };
    // Relaxed: the actor that runs sees what all others did.
    if word.load(Relaxed) == expected {
        if has_timeout {
            turns.relax();
        } else {
            turns.block_on_futex(word.as_ptr().addr(), classes);
        }
    }
    true
}

pub(super) fn look_again() -> bool {
    current().is_some_and(|turns| {
        turns.relax();
        true
    })
}

pub(super) fn futex_wake(address: usize, count: u32, classes: u32) -> bool {
    current().is_some_and(|turns| {
        turns.unblock_futex(address, count, classes);
        true
    })
}
