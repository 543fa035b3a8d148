//! A page: its word of state, the lock in that word, and those who wait for either.
//!
//! # The life of a page
//!
//! ```text
//! None        -- first touch ---------------------------->  Mapped
//! Mapped      -- evict, by one move of a run ------------>  Limbo
//! Mapped      -- evict, by copy (no right to write,
//!                or another process has it) ------------->  Same, Pool
//! Mapped      -- evict, known to be clean: dropped ------>  Same, Pool, File, None
//! Limbo       -- fault: moved back ---------------------->  Mapped
//! Limbo       -- store ---------------------------------->  Same, Pool
//! Limbo       -- store, after MADV_FREE ----------------->  None
//! Same, Pool  -- fault: unpacked ------------------------>  Mapped
//! Pool        -- write-back ----------------------------->  File
//! File        -- fault: read, unpacked ------------------>  Mapped
//! Same, Pool, File  -- MADV_FREE ------------------------>  None
//! any         -- unmap, MADV_DONTNEED ------------------->  None
//! any         -- its bytes prove wrong ------------------>  Poisoned
//! ```
//!
//! A page of an object is `None` (not cached), `Cached`, or `Poisoned`.

pub mod condition;
pub mod parking;
pub mod wait;
pub mod word;

pub use condition::Condition;
pub use parking::{CancelToken, Futexes, Interrupted, Kill, Parking};
pub use wait::{Parked, WaitTable};
pub use word::{Flags, PageWord, Snapshot, State};
