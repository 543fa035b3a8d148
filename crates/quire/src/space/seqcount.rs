//! A sequence count: odd while what it counts is being changed, another number afterwards.
//!
//! Readers write nothing. Generic over its atomic, so that a model checker runs this very code
//! (`tests/space_loom.rs`).

use core::sync::atomic::{AtomicU32, Ordering, fence};

/// The atomic that a count is made of.
pub trait SeqWord {
    fn load(&self, order: Ordering) -> u32;
    fn bump(&self, order: Ordering);
    fn fence(order: Ordering);
}

impl SeqWord for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    #[inline]
    fn bump(&self, order: Ordering) {
        self.fetch_add(1, order);
    }

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// The count. Zeroed memory is a valid one.
#[derive(Default)]
#[repr(transparent)]
pub struct SeqCount<W = AtomicU32>(W);

impl<W: SeqWord> SeqCount<W> {
    pub const fn new(word: W) -> SeqCount<W> {
        SeqCount(word)
    }

    /// The count before a look; `None` in the middle of a change.
    #[inline]
    pub fn begin(&self) -> Option<u32> {
        // Acquire pairs with the release of the second bump in `change`: what it made is seen.
        let seen = self.0.load(Ordering::Acquire);
        seen.is_multiple_of(2).then_some(seen)
    }

    /// Whether what was read since [`Self::begin`] belongs together.
    #[inline]
    pub fn ends(&self, seen: u32) -> bool {
        // Keeps the reads before the second look.
        W::fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == seen
    }

    /// Whether nothing has begun to change since; under a lock that changers take after they have
    /// begun, a yes holds as long as the lock.
    #[inline]
    pub fn is_still(&self, seen: u32) -> bool {
        // SeqCst pairs with the bumps in `change`, and with a block's `is_used` (Dekker): a changer
        // that skips a block because nothing was ever touched there is seen here.
        self.0.load(Ordering::SeqCst) == seen
    }

    /// Changes what is counted; one thread at a time.
    pub fn change<R>(&self, act: impl FnOnce() -> R) -> R {
        self.0.bump(Ordering::SeqCst);
        // Keeps the writes behind the first bump.
        W::fence(Ordering::Release);
        let done = act();
        // Release, within SeqCst, publishes them to `begin`.
        self.0.bump(Ordering::SeqCst);
        done
    }
}
