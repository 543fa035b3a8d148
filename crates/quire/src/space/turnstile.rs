//! The word of the space's lock: faults inside, and whether they are locked out.
//!
//! Generic over its atomic and its futex, so that a model checker runs this very code
//! (`tests/space_loom.rs`).

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};

/// Faults are locked out, or the thread that does that waits for those inside.
const LOCKED: u32 = 1 << 31;
/// A fault wants an answer when it is open again.
const SIGNED: u32 = 1 << 30;
/// Faults inside.
const INSIDE: u32 = SIGNED - 1;

/// The atomic that a turnstile is made of, and how a thread sleeps on it.
pub trait TurnstileWord {
    fn load(&self, order: Ordering) -> u32;
    /// May fail for no reason.
    fn exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32>;
    fn set(&self, bits: u32, order: Ordering) -> u32;
    fn subtract(&self, order: Ordering) -> u32;
    fn swap(&self, new: u32, order: Ordering) -> u32;
    fn sleep(&self, expected: u32);
    fn wake(&self);
}

impl TurnstileWord for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    fn exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32> {
        self.compare_exchange_weak(old, new, order, Ordering::Relaxed)
    }

    fn set(&self, bits: u32, order: Ordering) -> u32 {
        self.fetch_or(bits, order)
    }

    fn subtract(&self, order: Ordering) -> u32 {
        self.fetch_sub(1, order)
    }

    fn swap(&self, new: u32, order: Ordering) -> u32 {
        AtomicU32::swap(self, new, order)
    }

    fn sleep(&self, expected: u32) {
        futex::wait(self, expected, Reach::Process, None);
    }

    fn wake(&self) {
        futex::wake(self, u32::MAX, Reach::Process);
    }
}

/// Lets any number in, or one that is alone.
#[derive(Default)]
pub struct Turnstile<W = AtomicU32>(W);

impl<W: TurnstileWord> Turnstile<W> {
    pub const fn new(word: W) -> Turnstile<W> {
        Turnstile(word)
    }

    /// Locks it, and waits until no fault is inside. One thread at a time.
    pub fn lock(&self) {
        // Acquire, here and below, pairs with the release of the fault that leaves last.
        let mut seen = self.0.set(LOCKED, Ordering::Acquire) | LOCKED;
        while seen & INSIDE != 0 {
            self.0.sleep(seen);
            seen = self.0.load(Ordering::Acquire);
        }
    }

    /// Opens it again; whether a fault wants an answer.
    #[must_use]
    pub fn unlock(&self) -> bool {
        // Release publishes what was changed to the fault that goes in; Acquire pairs with `try_sign`.
        let old = self.0.swap(0, Ordering::AcqRel);
        debug_assert_eq!(old & INSIDE, 0, "a fault is inside beside the thread that is alone");
        old & SIGNED != 0
    }

    #[must_use]
    pub fn try_enter(&self) -> bool {
        // Acquire pairs with the release of the last `unlock`.
        self.try_change(|seen| seen & LOCKED == 0, |seen| seen + 1, Ordering::Acquire)
    }

    pub fn leave(&self) {
        let old = self.0.subtract(Ordering::Release);
        if old & LOCKED != 0 && old & INSIDE == 1 {
            self.0.wake();
        }
    }

    /// Asks for an answer when it is opened; `false` where it is open by now.
    #[must_use]
    pub fn try_sign(&self) -> bool {
        // Release publishes which fault the answer is for.
        self.try_change(|seen| seen & LOCKED != 0, |seen| seen | SIGNED, Ordering::Release)
    }

    fn try_change(
        &self,
        may: impl Fn(u32) -> bool,
        next: impl Fn(u32) -> u32,
        order: Ordering,
    ) -> bool {
        // Relaxed: a guess, which the exchange verifies.
        let mut seen = self.0.load(Ordering::Relaxed);
        while may(seen) {
            match self.0.exchange(seen, next(seen), order) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// In a fork's child, whose one thread has it locked.
    pub fn reset_locked(&self) {
        // Relaxed: no other thread runs.
        let _ = self.0.swap(LOCKED, Ordering::Relaxed);
    }
}
