//! How a waiter sleeps, and what ends its sleep early.
//!
//! Owns the token and the deadline of a wait that can be cancelled, and the interface by which the
//! wait table sleeps, wakes and answers: [`Parking`]. In the engine that is the space, over its
//! MMU; for words without a space [`Futexes`]; loom has its own.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::word::Word;
use crate::sys::futex::{self, Reach};
use crate::sys::monotonic_ns;
use crate::units::PageNum;

/// Ends waits early: those that were given this token, whichever threads they are of.
#[repr(transparent)]
pub struct KillToken<A = AtomicU64>(pub A);

/// The value of a token that was not cancelled; what sleepers see of it.
const LIVE: u32 = 0;

impl<A: Word> Default for KillToken<A> {
    fn default() -> KillToken<A> {
        KillToken(A::new(u64::from(LIVE)))
    }
}

impl<A: Word> KillToken<A> {
    /// Ends all waits with this token, now and later.
    pub fn cancel(&self, parking: &impl Parking<A>) {
        // Release publishes what was done before to the threads that return [`Interrupted`].
        self.0.store(1, Ordering::Release);
        parking.wake(&raw const self.0);
    }

    pub fn is_cancelled(&self) -> bool {
        // Acquire pairs with cancel's release.
        self.0.load(Ordering::Acquire) as u32 != LIVE
    }
}

/// What ends a wait early.
pub struct Kill<'a, A = AtomicU64> {
    /// A token that another thread may cancel.
    pub token: Option<&'a KillToken<A>>,
    /// A moment of [`monotonic_ns`].
    pub deadline_ns: Option<u64>,
}

impl<A> Clone for Kill<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kill<'_, A> {}

impl<'a, A: Word> Kill<'a, A> {
    pub const NEVER: Self = Kill { token: None, deadline_ns: None };

    pub const fn is_never(&self) -> bool {
        self.token.is_none() && self.deadline_ns.is_none()
    }

    /// The moment `deadline_ns` of [`monotonic_ns`].
    pub const fn at(deadline_ns: u64) -> Self {
        Kill { token: None, deadline_ns: Some(deadline_ns) }
    }

    pub const fn by(token: &'a KillToken<A>) -> Kill<'a, A> {
        Kill { token: Some(token), deadline_ns: None }
    }

    pub fn is_due(&self) -> bool {
        self.token.is_some_and(KillToken::is_cancelled)
            || self.deadline_ns.is_some_and(|deadline_ns| monotonic_ns() >= deadline_ns)
    }
}

impl Kill<'_> {
    /// Sleeps while `word`, which is no page's, is `expected` and nothing of this has come; may
    /// return for no reason.
    pub fn sleep_on_futex(self, word: &AtomicU32, expected: u32) {
        match self.token {
            Some(token) => {
                let words = [(word, expected), (low_half(&token.0), LIVE)];
                futex::wait_either(words, Reach::Process, self.deadline_ns);
            }
            None => futex::wait_until(word, expected, Reach::Process, self.deadline_ns),
        }
    }
}

/// A wait was cancelled, or its deadline passed, before what it waited for came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupted;

/// How a thread sleeps until a word changes, and how parked faults are answered.
pub trait Parking<A> {
    /// Sleeps while the low half of `word` is `expected`, the token is not cancelled and the
    /// deadline has not come; may return for no reason.
    fn wait(&self, word: &A, expected: u32, kill: Kill<'_, A>);

    /// Wakes all that sleep on `word`, which may not exist any more: a mere address.
    fn wake(&self, word: *const A);

    /// Answers the faults of a page: they are tried again.
    fn answer(&self, page: PageNum);
}

/// The kernel's futexes, for words that belong to no space.
#[derive(Clone, Copy, Default, Debug)]
pub struct Futexes;

impl Parking<AtomicU64> for Futexes {
    fn wait(&self, word: &AtomicU64, expected: u32, kill: Kill<'_>) {
        kill.sleep_on_futex(low_half(word), expected);
    }

    fn wake(&self, word: *const AtomicU64) {
        futex::wake(word.cast::<AtomicU32>(), u32::MAX, Reach::Process);
    }

    fn answer(&self, page: PageNum) {
        panic!("a fault of {page:?} is parked on a word that belongs to no space");
    }
}

fn low_half(word: &AtomicU64) -> &AtomicU32 {
    // SAFETY: the low half of a little-endian word is its first four bytes, atomic as well; the
    // kernel only compares it.
    unsafe { &*word.as_ptr().cast::<AtomicU32>() }
}
