//! A page: its word of state, the lock in that word, what it can become under the lock, and the
//! threads and faults that wait for it.

pub mod condition;
pub mod locked;
pub mod parking;
pub mod table;
pub mod transitions;
pub mod wait;
pub mod word;

pub use condition::Condition;
pub use locked::{LockedPage, LockedRange, PageLocks};
pub use parking::{Futexes, Interrupted, Kill, KillToken, Parking};
pub use table::{Block, Pages};
pub use transitions::Stored;
pub use wait::{Parked, WaitTable};
pub use word::{Flags, PageWord, Snapshot, State};
