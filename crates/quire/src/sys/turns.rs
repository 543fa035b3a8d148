//! Sleeping and waking of actors: what `sys` does for the threads of a simulation instead of asking
//! the kernel.
//!
//! A mutex that is held across calls of the MMU and a futex are waited for with the baton given
//! away. Each function says whether the calling thread is an actor at all; if not it has done
//! nothing. There is no timer among actors: who sleeps with a deadline looks again now and then. But
//! there is a clock, which goes by steps and looks: what waits for a time to pass, or measures what
//! something costs, does the same for the same seed.

use core::sync::atomic::{AtomicU32, Ordering};

use super::baton::{Wait, current};

/// Takes the mutex at `address`, with others coming in before if it `steps`, by `try_lock`, waiting where it must.
pub fn lock(address: usize, steps: bool, try_lock: impl Fn() -> bool) -> bool {
    let Some(baton) = current() else { return false };
    if steps {
        baton.step();
    }
    while !try_lock() {
        baton.block(Wait::Lock(address));
        if std::thread::panicking() {
            // The simulation has failed: the others let go as they unwind, without turns.
            std::thread::yield_now();
        }
    }
    true
}

/// The mutex at `address` was unlocked.
pub fn unlocked(address: usize, steps: bool) {
    if let Some(baton) = current() {
        baton.unblock(Wait::Lock(address));
        if steps {
            baton.step();
        }
    }
}

/// The time of the simulation, for its actors.
pub fn now_ns() -> Option<u64> {
    current().map(|baton| baton.now_ns())
}

/// Sleeps while `word` is `expected`, as one of `classes`.
pub fn futex_wait(word: &AtomicU32, expected: u32, classes: u32, has_timeout: bool) -> bool {
    let Some(baton) = current() else { return false };
    // Relaxed: whoever has the baton sees what all others did.
    if word.load(Ordering::Relaxed) == expected {
        if has_timeout {
            baton.relax();
        } else {
            baton.block(Wait::Futex(word.as_ptr().addr(), classes));
        }
    }
    true
}

/// Lets others run, and has the caller look again at what it waits for.
pub fn look_again() -> bool {
    let Some(baton) = current() else { return false };
    baton.relax();
    true
}

/// Wakes up to `count` actors that sleep on the word at `address` as one of `classes`.
pub fn futex_wake(address: usize, count: u32, classes: u32) -> bool {
    let Some(baton) = current() else { return false };
    baton.unblock_futex(address, count, classes);
    true
}
