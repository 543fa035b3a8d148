//! What a waiter waits for on a page's word: the lock to be free, flags to come or go, a state.

use super::word::{LOCKED, STATE_MASK, STATE_SHIFT};
use super::{Flags, Snapshot, State};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Condition {
    mask: u64,
    value: u64,
}

impl Condition {
    pub const UNLOCKED: Condition = Condition { mask: LOCKED, value: 0 };

    pub const fn set(flags: Flags) -> Condition {
        Condition { mask: flags.0, value: flags.0 }
    }

    /// None of `flags` is set: the end of writeback, for one.
    pub const fn clear(flags: Flags) -> Condition {
        Condition { mask: flags.0, value: 0 }
    }

    pub const fn state(state: State) -> Condition {
        Condition { mask: STATE_MASK, value: (state as u64) << STATE_SHIFT }
    }

    #[inline]
    pub const fn holds(self, now: Snapshot) -> bool {
        now.0 & self.mask == self.value
    }

    /// Whether it is about the lock, which may be taken again at any moment.
    #[inline]
    pub const fn is_of_lock(self) -> bool {
        self.mask & LOCKED != 0
    }
}
