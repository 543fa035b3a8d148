//! The page word: all that is known of a page, in one atomic word, and the page lock's bits.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | `LOCKED`: one thread may change the word and what it stands for |
//! | 1 | `WAITERS`: threads or callbacks wait in the word's queue ([`super::wait`]) |
//! | 2 | `PARKED`: faults were left unanswered until the lock is free |
//! | 3..6 | [`State`]: where the bytes are |
//! | 7..30 | [`Flags`] |
//! | 31 | `HANDOFF`: the lock is promised to the oldest waiter; no other thread may take it |
//! | 32.. | payload: frame, pool handle, place in the swap file, or fill pattern |
//!
//! # The lock
//!
//! Lock is one compare-and-swap, unlock is one subtraction that returns the old value; only where
//! that had `WAITERS` or `PARKED` is there more to do. Sleeping and waking are
//! [`WaitTable`](super::WaitTable)'s.
//!
//! State, flags and payload are changed under the lock only; `PARKED` by any thread, while the lock
//! is taken or promised; `WAITERS` and `HANDOFF` under the lock of the word's queue only. `HANDOFF`
//! comes with `WAITERS` and while `LOCKED`, so the unlock that follows goes to the queue:
//!
//! | `LOCKED` | `HANDOFF` | meaning |
//! |---|---|---|
//! | 0 | 0 | free |
//! | 1 | 0 | taken; free for any thread once it is given back |
//! | 1 | 1 | taken; it is handed over next |
//! | 0 | 1 | given back, and the thread that gave it is on its way to the queue |

use core::sync::atomic::{AtomicU64, Ordering};

use super::Condition;
use crate::sys::rank::{self, Rank};

pub(super) const LOCKED: u64 = 1;
const WAITERS: u64 = 1 << 1;
const PARKED: u64 = 1 << 2;
const HANDOFF: u64 = 1 << 31;
pub(super) const STATE_SHIFT: u32 = 3;
pub(super) const STATE_MASK: u64 = 0xf << STATE_SHIFT;
const PAYLOAD_SHIFT: u32 = 32;
const CONTENT: u64 = !(LOCKED | WAITERS | PARKED | HANDOFF);

/// Where a page's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// Never touched, or dropped: reads as zeros, owns nothing.
    None = 0,
    /// Mapped in the program. The payload of a clean page says where it is stored
    /// ([`Snapshot::stored`]).
    Mapped = 1,
    /// In the frame pool with its content; the payload is the frame.
    Limbo = 2,
    /// Every 32-bit word of the page is the payload.
    Same = 3,
    /// In the compressed pool; the payload is the handle.
    Pool = 4,
    /// In the swap file; the payload is the location.
    File = 5,
    /// Its content was lost to an error.
    Poisoned = 6,
    /// A page of an object: in its object's cache. The payload of a clean page of an object without
    /// a store says where it is stored, as of a mapped one; that of an object with a store is the
    /// number of a sync ([`crate::object`]).
    Cached = 7,
}

impl State {
    const fn from_bits(bits: u64) -> State {
        match bits {
            1 => State::Mapped,
            2 => State::Limbo,
            3 => State::Same,
            4 => State::Pool,
            5 => State::File,
            6 => State::Poisoned,
            7 => State::Cached,
            _ => State::None,
        }
    }

    /// Whether the page is in swap, and not in memory.
    pub const fn is_swapped(self) -> bool {
        matches!(self, State::Same | State::Pool | State::File)
    }
}

/// Flags of a page, changed under its lock.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub(super) u64);

impl Flags {
    pub const EMPTY: Flags = Flags(0);
    /// A fault asked for this very page since reclaim last looked.
    pub const ACCESSED: Flags = Flags(1 << 7);
    /// Locked in memory: never evicted.
    pub const MLOCKED: Flags = Flags(1 << 8);
    /// On its way to the swap file; a change of the page meanwhile clears it.
    pub const WRITEBACK: Flags = Flags(1 << 9);
    /// MADV_FREE: may be dropped without writing (only ever set on pages in limbo).
    pub const LAZYFREE: Flags = Flags(1 << 10);
    /// A write must fault first.
    pub const WRITE_PROTECTED: Flags = Flags(1 << 11);
    /// The payload of a page in memory is the pool handle of its bytes. Only with CLEAN.
    pub const IN_POOL: Flags = Flags(1 << 12);
    /// The payload of a page in memory is where its bytes are in the swap file. Only with CLEAN.
    pub const IN_FILE: Flags = Flags(1 << 16);
    /// A page in memory has not been written since it was stored, and is write-protected so that
    /// the first write is noticed. Without IN_POOL, IN_FILE and IN_OBJECT the payload is its
    /// pattern.
    pub const CLEAN: Flags = Flags(1 << 17);
    /// The kernel held the page when its range lost the right to write: moving is refused there,
    /// and copying could lose what the kernel still writes. A page of an object may be written at
    /// any time, unnoticed ([`crate::object`], pins).
    pub const PINNED: Flags = Flags(1 << 13);
    /// Could not be compressed: it is left in memory, or to the swap file.
    pub const INCOMPRESSIBLE: Flags = Flags(1 << 14);
    /// A mapped page is as its object has it, of which it is a private copy: it keeps nothing in
    /// store, and has no content of its own once it goes. Only with CLEAN.
    pub const IN_OBJECT: Flags = Flags(1 << 19);
    /// A page of an object that could not be read, the last time it was asked for: its state says
    /// where it still is. Of a poisoned page of a private mapping: it has lost nothing, and can be
    /// asked for again.
    pub const ERROR: Flags = Flags(1 << 18);
    /// Written since it was last write-protected.
    pub const DIRTY: Flags = Flags(1 << 15);

    #[must_use]
    pub const fn or(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    #[must_use]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// One loaded value of a page word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Snapshot(pub(super) u64);

impl Snapshot {
    /// A content with `state` and `payload` and no flag.
    pub const fn new(state: State, payload: u32) -> Snapshot {
        Snapshot((state as u64) << STATE_SHIFT | (payload as u64) << PAYLOAD_SHIFT)
    }

    #[inline]
    pub const fn state(self) -> State {
        State::from_bits((self.0 & STATE_MASK) >> STATE_SHIFT)
    }

    #[inline]
    pub const fn flags(self) -> Flags {
        Flags((self.0 & CONTENT & !STATE_MASK) as u32 as u64)
    }

    #[inline]
    pub const fn payload(self) -> u32 {
        (self.0 >> PAYLOAD_SHIFT) as u32
    }

    #[inline]
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Whether the lock can be had: it is neither held nor promised.
    #[inline]
    pub const fn is_free(self) -> bool {
        self.0 & (LOCKED | HANDOFF) == 0
    }

    /// Whether there may be waiters in the word's queue.
    #[inline]
    pub const fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    #[inline]
    pub const fn has_parked(self) -> bool {
        self.0 & PARKED != 0
    }

    #[inline]
    pub const fn has_handoff(self) -> bool {
        self.0 & HANDOFF != 0
    }

    /// Whether all of `flags` are set.
    #[inline]
    pub const fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 == flags.0
    }

    #[must_use]
    pub const fn with(self, flags: Flags) -> Snapshot {
        Snapshot(self.0 | flags.0)
    }

    #[must_use]
    pub const fn without(self, flags: Flags) -> Snapshot {
        Snapshot(self.0 & !flags.0)
    }

    #[must_use]
    pub const fn with_payload(self, payload: u32) -> Snapshot {
        let rest = self.0 & !((u32::MAX as u64) << PAYLOAD_SHIFT);
        Snapshot(rest | (payload as u64) << PAYLOAD_SHIFT)
    }

    /// Those of `flags` that are set here, set on `other`.
    #[must_use]
    pub const fn keep(self, flags: Flags, other: Snapshot) -> Snapshot {
        Snapshot(other.0 | self.0 & flags.0)
    }
}

/// The bits of the lock and of the flags.
#[rustfmt::skip]
const NAMES: [(u32, &str); 17] = [
    (0, "locked"), (1, "waiters"), (2, "parked"), (31, "handoff"), (7, "accessed"), (8, "mlocked"),
    (9, "writeback"), (10, "lazyfree"), (11, "write_protected"), (12, "in_pool"), (13, "pinned"),
    (14, "incompressible"), (15, "dirty"), (16, "in_file"), (17, "clean"), (18, "error"),
    (19, "in_object"),
];

impl core::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}({:#x})", self.state(), self.payload())?;
        let set = NAMES.iter().filter(|(bit, _)| self.0 >> bit & 1 != 0);
        set.into_iter().try_for_each(|(_, name)| write!(f, " {name}"))
    }
}

/// The atomic under a word, and under what a waiter sleeps on: a real one, or loom's.
pub trait Word {
    fn new(value: u64) -> Self;
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// A weak compare-and-swap; the value found is the error where it was another.
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64>;
    /// Subtracts, wrapping; returns the old value.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
}

impl Word for AtomicU64 {
    fn new(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }
    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }
    #[inline]
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        AtomicU64::compare_exchange_weak(self, old, new, order, Ordering::Relaxed)
    }
    #[inline]
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_sub(self, value, order)
    }
}

#[repr(transparent)]
pub struct PageWord<A = AtomicU64>(pub A);

// SAFETY: zero is an unlocked page that was never touched.
unsafe impl crate::sys::memory::Zeroed for PageWord<AtomicU64> {}

/// What any thread may do.
impl<A: Word> PageWord<A> {
    /// The word as it is now; it may be another by the time it is looked at.
    #[inline]
    pub fn load(&self) -> Snapshot {
        // Acquire pairs with the release of the unlock that published the content.
        Snapshot(self.0.load(Ordering::Acquire))
    }

    #[inline]
    pub fn try_lock(&self) -> Option<Snapshot> {
        // Acquire pairs with the last owner's release in unlock.
        let take = |old| Snapshot(old).is_free().then_some(old | LOCKED);
        let taken = self.update(Ordering::Acquire, take).ok();
        taken.inspect(|_| rank::taken(Rank::Page, 1)).map(|old| Snapshot(old | LOCKED))
    }

    /// Takes the lock, or leaves the sign that a fault is parked here: the unlocker answers it.
    /// `None` is parked.
    #[inline]
    pub fn lock_or_park(&self) -> Option<Snapshot> {
        // The sign needs no order: it is read by the unlocker's read-modify-write of this same
        // word, or, where the lock is promised, by that of the thread that keeps or drops the promise.
        self.lock_or_sign(PARKED)
    }
}

/// What the owner of the lock may do.
impl<A: Word> PageWord<A> {
    /// Marks a fault as parked on a page whose lock the caller holds, so that the unlock answers
    /// it.
    pub fn park_under_lock(&self) {
        // Relaxed: read by the unlocker's read-modify-write of this same word.
        let _ = self.update(Ordering::Relaxed, |old| Some(old | PARKED));
    }

    /// Changes the content, keeping the lock.
    pub fn set(&self, content: Snapshot) {
        // Relaxed: the unlock publishes it.
        let _ = self.update(Ordering::Relaxed, |old| {
            debug_assert!(old & LOCKED != 0);
            Some(content.0 & CONTENT | old & !CONTENT)
        });
    }

    /// Gives the lock back, the content unchanged. Returns the word from before, whose `WAITERS`
    /// and `PARKED` are for the caller to see to.
    #[inline]
    pub(super) fn release(&self) -> Snapshot {
        // Release publishes what was done under the lock.
        let old = self.0.fetch_sub(LOCKED, Ordering::Release);
        rank::released(Rank::Page, 1);
        debug_assert!(old & LOCKED != 0);
        Snapshot(old)
    }

    /// The same with a new content. Takes the sign of parked faults along, which are for the
    /// caller to answer.
    #[inline]
    pub(super) fn release_with(&self, content: Snapshot) -> Snapshot {
        let release = |old| {
            debug_assert!(old & LOCKED != 0);
            Some(content.0 & CONTENT | old & (WAITERS | HANDOFF))
        };
        // Release as above.
        let (Ok(old) | Err(old)) = self.update(Ordering::Release, release);
        rank::released(Rank::Page, 1);
        Snapshot(old)
    }

    /// Takes the sign of parked faults, after [`Self::release`] has seen it; whether it was still
    /// there.
    pub(super) fn take_parked(&self) -> bool {
        // Relaxed: cleared before any fault is answered; one that parks later sets it anew. Where it is
        // gone, the thread that took it answers.
        self.update(Ordering::Relaxed, |old| (old & PARKED != 0).then_some(old & !PARKED)).is_ok()
    }
}

/// What needs the lock of the word's queue. All of it is relaxed but for taking the lock: the
/// queue's lock orders the threads that do it, and an unlock sees it by its read-modify-write.
impl<A: Word> PageWord<A> {
    /// Takes the lock, or leaves the sign that a thread waits for it. `None` is waiting.
    pub(super) fn lock_or_wait(&self) -> Option<Snapshot> {
        self.lock_or_sign(WAITERS)
    }

    /// The same, for a waiter that lost the lock to a stealer too often: the next unlock hands it over.
    pub(super) fn lock_or_be_handed(&self) -> Option<Snapshot> {
        // Where the lock is not taken it is promised, and the sign is there already.
        self.lock_or_sign(WAITERS | HANDOFF)
    }

    /// Leaves the sign that there is a waiter, unless what it waits for is so already.
    pub(super) fn wait_unless(&self, condition: Condition) -> bool {
        let mark = |old| (!condition.holds(Snapshot(old))).then_some(old | WAITERS);
        // Acquire as in load.
        self.update(Ordering::Acquire, mark).is_ok()
    }

    /// Hands over a lock that was given back with a promise. `is_promised_on` where the next one
    /// has lost the lock too often as well.
    pub(super) fn hand_over(&self, is_promised_on: bool) {
        let promise = if is_promised_on { HANDOFF } else { 0 };
        // Acquire pairs with the release of the unlock, for the new owner, which acquires this
        // thread's store to its state.
        let _ = self.update(Ordering::Acquire, |old| {
            debug_assert!(old & (LOCKED | HANDOFF) == HANDOFF);
            Some(old & !HANDOFF | LOCKED | promise)
        });
    }

    /// Takes back a promise that no waiter is left for, of a lock that was given back;
    /// whether faults were parked on it meanwhile, which are for the caller to answer.
    pub(super) fn drop_promise(&self) -> bool {
        let (Ok(old) | Err(old)) = self.update(Ordering::Relaxed, |old| {
            debug_assert!(old & (LOCKED | HANDOFF) == HANDOFF);
            Some(old & !(HANDOFF | PARKED))
        });
        old & PARKED != 0
    }

    /// Promises the lock to the oldest waiter, if it is taken.
    pub(super) fn promise(&self) {
        let promise = |old| (old & LOCKED != 0).then_some(old | HANDOFF | WAITERS);
        let _ = self.update(Ordering::Relaxed, promise);
    }

    /// Takes a promise back while the lock is taken. Where it has been given back already,
    /// the thread that gave it is on its way to the queue, and does what is right there.
    pub(super) fn unpromise(&self) {
        let taken_back = |old| (old & LOCKED != 0 && old & HANDOFF != 0).then_some(old & !HANDOFF);
        let _ = self.update(Ordering::Relaxed, taken_back);
    }

    /// Takes back the sign of waiters, and a promise with it; but see [`Self::unpromise`].
    pub(super) fn clear_waiters(&self) {
        let _ = self.update(Ordering::Relaxed, |old| {
            let is_under_way = old & (LOCKED | HANDOFF) == HANDOFF;
            (old & WAITERS != 0 && !is_under_way).then_some(old & !(WAITERS | HANDOFF))
        });
    }

    /// Makes the word one that was never used.
    pub(super) fn reset(&self) {
        rank::released(Rank::Page, 1);
        let _ = self.update(Ordering::Relaxed, |old| {
            debug_assert!(old & PARKED == 0, "a freed page has faults parked on it");
            Some(0)
        });
    }
}

impl<A: Word> PageWord<A> {
    #[inline]
    fn lock_or_sign(&self, signs: u64) -> Option<Snapshot> {
        let take = |old| {
            let is_free = Snapshot(old).is_free();
            Some(if is_free { old | LOCKED } else { old | signs })
        };
        // Acquire as in try_lock.
        let (Ok(old) | Err(old)) = self.update(Ordering::Acquire, take);
        let is_taken = Snapshot(old).is_free();
        rank::taken(Rank::Page, usize::from(is_taken));
        is_taken.then_some(Snapshot(old | LOCKED))
    }

    /// Changes the word to what `next` makes of it; `Err` where that is nothing. The old value
    /// either way.
    #[inline]
    fn update(
        &self,
        order: Ordering,
        mut next: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        // Relaxed: a guess, which the compare-and-swap verifies. What is decided not to change on
        // a value that has passed would have been decided so a moment earlier.
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            let new = next(old).ok_or(old)?;
            match self.0.compare_exchange(old, new, order) {
                Ok(_) => return Ok(old),
                Err(found) => old = found,
            }
        }
    }
}

#[cfg(test)]
#[path = "word_tests.rs"]
mod tests;
