//! The page word: all that is known of a page, in one atomic word, and the page lock.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | `LOCKED`: one thread may change the word and what it stands for |
//! | 1 | `WAITERS`: threads sleep on the word's low half (futex) |
//! | 2 | `PARKED`: faults were left unanswered until the lock is free |
//! | 3..6 | [`State`]: where the bytes are |
//! | 7.. | [`Flags`] |
//! | 32.. | payload: frame, pool handle, place in the swap file, or fill pattern |
//!
//! # The lock
//!
//! Lock is one compare-and-swap, unlock is one subtraction that returns the old value; only where
//! that had `WAITERS` or `PARKED` is a call made. Who waits sets its bit *while the word is
//! locked* and, to sleep, hands the kernel the value with both bits in it. The unlocker clears the
//! bits first and wakes afterwards. So a waiter either finds the lock free, or its bit is seen by
//! an unlock that comes later: no sleep needs a timeout.
//!
//! State, flags and payload are changed under the lock only; `WAITERS` and `PARKED` by anybody.
//! The lock is generic over its atomic and its parking, so that loom can check the very code.

use core::sync::atomic::{AtomicU64, Ordering};

const LOCKED: u64 = 1;
const WAITERS: u64 = 1 << 1;
const PARKED: u64 = 1 << 2;
const STATE_SHIFT: u32 = 3;
const STATE_MASK: u64 = 0xf << STATE_SHIFT;
const PAYLOAD_SHIFT: u32 = 32;
const CONTENT: u64 = !(LOCKED | WAITERS | PARKED);

/// Where a page's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// Never touched, or dropped: reads as zeros, owns nothing.
    None = 0,
    /// Mapped in the program. The payload names a stored copy of its bytes, where
    /// [`Snapshot::kept`] says so.
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
            _ => State::None,
        }
    }
}

/// Flags of a page, changed under its lock.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(u64);

impl Flags {
    /// No flag.
    pub const EMPTY: Flags = Flags(0);
    /// A fault asked for this very page since reclaim last looked.
    pub const ACCESSED: Flags = Flags(1 << 7);
    /// Locked in memory: never evicted.
    pub const MLOCKED: Flags = Flags(1 << 8);
    /// On its way to the swap file; cleared by whoever changes the page meanwhile.
    pub const WRITEBACK: Flags = Flags(1 << 9);
    /// MADV_FREE: may be dropped without writing (only ever set on pages in limbo).
    pub const LAZYFREE: Flags = Flags(1 << 10);
    /// A write must fault first.
    pub const WRITE_PROTECTED: Flags = Flags(1 << 11);
    /// The payload of a mapped page is a pool handle with its last known bytes.
    pub const COPY: Flags = Flags(1 << 12);
    /// The payload of a mapped page is where its bytes are in the swap file. Only with CLEAN.
    pub const IN_FILE: Flags = Flags(1 << 16);
    /// A mapped page has not been written since it was stored, and is write-protected so that the
    /// first write is noticed. Without COPY and IN_FILE the payload is its pattern.
    pub const CLEAN: Flags = Flags(1 << 17);
    /// The kernel held the page when its range lost the right to write: moving is refused there,
    /// and copying could lose what the kernel still writes.
    pub const PINNED: Flags = Flags(1 << 13);
    /// Could not be compressed, and there is no swap file to take it.
    pub const INCOMPRESSIBLE: Flags = Flags(1 << 14);
    /// Written since it was last write-protected.
    pub const DIRTY: Flags = Flags(1 << 15);

    const NAMES: [(Flags, &'static str); 11] = [
        (Flags::ACCESSED, "accessed"),
        (Flags::MLOCKED, "mlocked"),
        (Flags::WRITEBACK, "writeback"),
        (Flags::LAZYFREE, "lazyfree"),
        (Flags::WRITE_PROTECTED, "write_protected"),
        (Flags::COPY, "copy"),
        (Flags::PINNED, "pinned"),
        (Flags::INCOMPRESSIBLE, "incompressible"),
        (Flags::DIRTY, "dirty"),
        (Flags::IN_FILE, "in_file"),
        (Flags::CLEAN, "clean"),
    ];

    /// The flags in either.
    #[must_use]
    pub const fn or(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One loaded value of a page word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Snapshot(u64);

impl Snapshot {
    /// A content with `state` and `payload` and no flag.
    #[must_use]
    pub const fn new(state: State, payload: u32) -> Snapshot {
        Snapshot((state as u64) << STATE_SHIFT | (payload as u64) << PAYLOAD_SHIFT)
    }

    /// What a mapped page has in store beside its mapping, as the word that it would have if it
    /// were not mapped.
    #[must_use]
    pub const fn kept(self) -> Option<Snapshot> {
        let state = match self.state() {
            State::Mapped if self.has(Flags::COPY) => State::Pool,
            State::Mapped if self.has(Flags::IN_FILE) => State::File,
            State::Mapped if self.has(Flags::CLEAN) => State::Same,
            _ => return None,
        };
        Some(Snapshot::new(state, self.payload()))
    }

    /// The word of a mapped page that keeps nothing in store any more.
    #[must_use]
    pub const fn without_kept(self) -> Snapshot {
        let content = self.0 & !((u32::MAX as u64) << PAYLOAD_SHIFT);
        Snapshot(content).without(Flags::COPY.or(Flags::IN_FILE).or(Flags::CLEAN))
    }

    /// The word of a mapped page that is as it was stored, and keeps what it has there: `stored`
    /// is its word from before.
    #[must_use]
    pub const fn mapped_clean(stored: Snapshot) -> Snapshot {
        let flags = match stored.state() {
            State::Pool => Flags::COPY.or(Flags::CLEAN),
            State::File => Flags::IN_FILE.or(Flags::CLEAN),
            _ => Flags::CLEAN,
        };
        Snapshot::new(State::Mapped, stored.payload()).with(flags)
    }

    /// Where the bytes are.
    #[inline]
    #[must_use]
    pub const fn state(self) -> State {
        State::from_bits((self.0 & STATE_MASK) >> STATE_SHIFT)
    }

    /// What goes with the state.
    #[inline]
    #[must_use]
    pub const fn payload(self) -> u32 {
        (self.0 >> PAYLOAD_SHIFT) as u32
    }

    /// Whether somebody holds the page lock.
    #[inline]
    #[must_use]
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Whether all of `flags` are set.
    #[inline]
    #[must_use]
    pub const fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// The same content with `flags` set.
    #[must_use]
    pub const fn with(self, flags: Flags) -> Snapshot {
        Snapshot(self.0 | flags.0)
    }

    /// The same content with `flags` cleared.
    #[must_use]
    pub const fn without(self, flags: Flags) -> Snapshot {
        Snapshot(self.0 & !flags.0)
    }

    /// Those of `flags` that are set here, set on `other`.
    #[must_use]
    pub const fn keep(self, flags: Flags, other: Snapshot) -> Snapshot {
        Snapshot(other.0 | self.0 & flags.0)
    }
}

impl core::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}({:#x})", self.state(), self.payload())?;
        for (bit, name) in [(LOCKED, "locked"), (WAITERS, "waiters"), (PARKED, "parked")] {
            if self.0 & bit != 0 {
                write!(f, " {name}")?;
            }
        }
        for (flag, name) in Flags::NAMES {
            if self.has(flag) {
                write!(f, " {name}")?;
            }
        }
        Ok(())
    }
}

/// Who was waiting when a page was unlocked. Must be handed to the parking, after the unlock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "those who wait must be woken"]
pub struct Waiters(u64);

impl Waiters {
    /// Whether threads slept on the word.
    #[must_use]
    pub const fn has_sleepers(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// Whether faults were left unanswered.
    #[must_use]
    pub const fn has_parked(self) -> bool {
        self.0 & PARKED != 0
    }
}

/// The atomic under the word: a real one, or loom's.
pub trait Word {
    /// A load.
    fn load(&self, order: Ordering) -> u64;
    /// A weak compare-and-swap.
    ///
    /// # Errors
    /// The value found where it was another.
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64>;
    /// Adds, wrapping; returns the old value.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    /// Ands; returns the old value.
    fn fetch_and(&self, value: u64, order: Ordering) -> u64;
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }
    #[inline]
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        AtomicU64::compare_exchange_weak(self, old, new, order, Ordering::Relaxed)
    }
    #[inline]
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_sub(self, value, order)
    }
    #[inline]
    fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_and(self, value, order)
    }
}

/// How a thread sleeps until a word changes: a futex, or loom's model of one.
pub trait Parking<A> {
    /// Sleeps while the low half of `word` is `expected`; may return for no reason.
    fn wait(&self, word: &A, expected: u32);
    /// Wakes all that sleep on `word`.
    fn wake_all(&self, word: &A);
}

/// A page's word.
#[repr(transparent)]
pub struct PageWord<A = AtomicU64>(pub A);

// SAFETY: zero is an unlocked page that was never touched.
unsafe impl crate::sys::memory::Zeroed for PageWord<AtomicU64> {}

impl<A: Word> PageWord<A> {
    /// The word as it is now; may be old by the time it is looked at.
    #[inline]
    pub fn load(&self) -> Snapshot {
        // Acquire pairs with the release of the unlock that published the content.
        Snapshot(self.0.load(Ordering::Acquire))
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Snapshot> {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            if old & LOCKED != 0 {
                return None;
            }
            // Acquire pairs with the last owner's release in unlock.
            match self.0.compare_exchange(old, old | LOCKED, Ordering::Acquire) {
                Ok(_) => return Some(Snapshot(old | LOCKED)),
                Err(found) => old = found,
            }
        }
    }

    /// Takes the lock, or leaves the sign that a fault is parked here: the unlocker answers it.
    /// `None` is parked.
    #[inline]
    pub fn lock_or_park(&self) -> Option<Snapshot> {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            let new = if old & LOCKED == 0 { old | LOCKED } else { old | PARKED };
            // Acquire as in try_lock. The sign needs no order: it is read by the unlocker's
            // read-modify-write of this same word.
            match self.0.compare_exchange(old, new, Ordering::Acquire) {
                Ok(_) if old & LOCKED == 0 => return Some(Snapshot(new)),
                Ok(_) => return None,
                Err(found) => old = found,
            }
        }
    }

    /// Takes the lock, sleeping while another has it.
    pub fn lock(&self, parking: &impl Parking<A>) -> Snapshot {
        loop {
            let mut old = self.0.load(Ordering::Relaxed);
            while old & LOCKED == 0 {
                match self.0.compare_exchange(old, old | LOCKED, Ordering::Acquire) {
                    Ok(_) => return Snapshot(old | LOCKED),
                    Err(found) => old = found,
                }
            }
            let waiting = old | WAITERS;
            if old != waiting && self.0.compare_exchange(old, waiting, Ordering::Relaxed).is_err() {
                continue;
            }
            parking.wait(&self.0, waiting as u32);
        }
    }

    /// Marks a fault as parked on a page whose lock the caller holds, so that the unlock answers
    /// it.
    pub fn park_under_lock(&self) {
        let mut old = self.0.load(Ordering::Relaxed);
        while let Err(found) = self.0.compare_exchange(old, old | PARKED, Ordering::Relaxed) {
            old = found;
        }
    }

    /// Gives the lock back, the content unchanged.
    #[inline]
    pub fn unlock(&self) -> Waiters {
        // Release publishes what was done under the lock.
        let old = self.0.fetch_sub(LOCKED, Ordering::Release);
        debug_assert!(old & LOCKED != 0);
        if old & (WAITERS | PARKED) == 0 {
            return Waiters(0);
        }
        // Cleared before anybody is woken: who comes later sets its bit anew.
        Waiters(self.0.fetch_and(!(WAITERS | PARKED), Ordering::Relaxed))
    }

    /// Gives the lock back with a new content.
    #[inline]
    pub fn unlock_with(&self, content: Snapshot) -> Waiters {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            debug_assert!(old & LOCKED != 0);
            match self.0.compare_exchange(old, content.0 & CONTENT, Ordering::Release) {
                Ok(_) => return Waiters(old & (WAITERS | PARKED)),
                Err(found) => old = found,
            }
        }
    }

    /// Changes the content, keeping the lock.
    pub fn set(&self, content: Snapshot) {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            debug_assert!(old & LOCKED != 0);
            let new = content.0 & CONTENT | old & !CONTENT;
            // Relaxed: the unlock publishes it.
            match self.0.compare_exchange(old, new, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => old = found,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_of_a_word_names_its_flags() {
        let word = PageWord(AtomicU64::new(0));
        let snapshot = word.try_lock().unwrap();
        word.set(Snapshot::new(State::Pool, 7).with(Flags::ACCESSED));
        assert!(word.lock_or_park().is_none());
        assert_eq!(snapshot.state(), State::None);
        let text = std::format!("{:?}", word.load());
        assert_eq!(text, "Pool(0x7) locked parked accessed");
        let waiters = word.unlock();
        assert!(waiters.has_parked() && !waiters.has_sleepers());
        assert!(!word.load().is_locked());
    }

    #[test]
    fn a_freed_word_carries_no_waiters() {
        let word = PageWord(AtomicU64::new(0));
        word.try_lock().unwrap();
        word.park_under_lock();
        let waiters = word.unlock_with(Snapshot::new(State::None, 0));
        assert!(waiters.has_parked());
        assert_eq!(word.0.into_inner(), 0);
    }
}
