//! A page: its word of state, the lock in that word, and those who wait for either.

pub mod condition;
pub mod parking;
pub mod wait;
pub mod word;

pub use condition::Condition;
pub use parking::{CancelToken, Futexes, Interrupted, Kill, Parking};
pub use wait::{Parked, WaitTable};
pub use word::{Flags, PageWord, Snapshot, State};
