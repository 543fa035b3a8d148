//! A page of the arena: its word of state, and the lock in that word.

pub mod word;

pub use word::{Flags, PageWord, Parking, Snapshot, State, Waiters};
