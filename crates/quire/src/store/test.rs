//! Stores for tests: Quire's own, and those of its users.
//!
//! | store | what it is for |
//! |---|---|
//! | [`VecStore`] | bytes in memory, and counts of what was asked of them |
//! | [`DelayStore`] | holds operations until they are released, or each for a time |
//! | [`NeverStore`] | never answers, until it is cancelled |
//! | [`FailStore`] | fails the n-th operation of a kind, before or after a part of it is done |
//! | [`CrashStore`] | enumerates what a crash could have left |
//!
//! Wrappers take any store; an `Arc` of a store is one, so that a test can keep the inner one at
//! hand. Each has one mutex, a leaf, never held while the inner store works.

mod crash;
mod delay;
mod fail;
mod vec;

pub use self::crash::{CrashImage, CrashImages, CrashOptions, CrashStore, Sectors};
pub use self::delay::{DelayStore, NeverStore};
pub use self::fail::{FailStore, Failure};
pub use self::vec::VecStore;
