//! Stores for tests: Quire's own, and those of its users.
//!
//! Wrappers take any store; an `Arc` of a store is one, so that a test can keep the inner one at
//! hand. Each has one mutex, a leaf, never held while the inner store works.

#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod crash;
mod delay;
mod fail;
mod vec;

pub use self::crash::{CrashImage, CrashImages, CrashOptions, CrashStore, Sectors};
pub use self::delay::{DelayStore, NeverStore};
pub use self::fail::{FailStore, Failure};
pub use self::vec::VecStore;

/// Also after a thread that held it has panicked: every change under these mutexes is whole before
/// anything that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
