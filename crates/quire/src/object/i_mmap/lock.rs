//! The reader-writer lock of a reverse map: one word of four bytes, no larger than a futex mutex.
//!
//! Here are the order in which threads get in, and their sleep; `word.rs` has what becomes of the
//! word. Nothing is allocated, nothing is thread-local.
//!
//! # The order
//!
//! A newcomer takes the lock if it is free for it, even past writers in line (it *steals*), and
//! counts that. At [`STEALS_MAX`] the lock is barred: newcomers stand in line, and the thread that
//! leaves hands the lock over.
//!
//! - When the last reader leaves, the first writer in line is called; if the lock is barred, that
//!   writer is inside when it wakes.
//! - When a writer leaves, all readers in line are let in at once, before they wake. That they
//!   passed a writer counts as a steal. Where there are none, it is as for the last reader.
//!
//! So no thread is kept out. A reader in line waits for the writer inside; if it came while the lock
//! was barred, for the readers inside and one writer. The first writer in line sees at most
//! `STEALS_MAX` turns of others (a turn is a newcomer, or all waiting readers together) and one
//! more of the waiting readers; writers in line go in order. There is room in line for
//! [`WRITERS_IN_LINE_MAX`] writers and [`READERS_IN_LINE_MAX`] readers: a thread that finds it full,
//! or [`READERS_MAX`] readers inside, gives up the CPU and comes again as a newcomer.
//!
//! # Why no wake-up is lost
//!
//! A thread in line is counted in the word, by the same compare-and-swap that found the lock
//! taken. It sleeps only while the word is one in which it has not its turn, which the kernel
//! compares. Every change that gives a turn changes the word and wakes afterwards. A thread that is
//! let in reads so in the word (a reader: PHASE flipped; a writer: the ticket moved past its own), so
//! a wake that comes for no reason, or a second time, does no harm.
//!
//! Generic over its atomic and its waits, so that loom can check the very code.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};

use super::word::InLine;
pub use super::word::{
    Class, LockState, READERS_IN_LINE_MAX, READERS_MAX, STEALS_MAX, Side, WRITERS_IN_LINE_MAX,
};

const _: () = assert!(size_of::<RwSem>() == 4);
const _: () = assert!(size_of::<RwSem>() <= size_of::<rustix_futex_sync::Mutex<()>>());

/// The atomic under the lock: a real one, or loom's.
pub trait LockWord {
    fn load(&self, order: Ordering) -> u32;
    /// A weak compare-and-swap; the value found is the error where it was another.
    fn compare_exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32>;
}

impl LockWord for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }
    #[inline]
    fn compare_exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32> {
        AtomicU32::compare_exchange_weak(self, old, new, order, Ordering::Relaxed)
    }
}

/// How a thread waits until a word changes: a futex, or loom's model of one.
pub trait WaitOps<A> {
    /// Looks at the word before a thread sleeps.
    const SPINS: u32;
    /// Sleeps as one of `class` while `word` is `expected`; may return for no reason.
    fn wait(&self, word: &A, expected: u32, class: Class);
    /// Wakes all of `class` that sleep on `word`.
    fn wake(&self, word: &A, class: Class);
    fn yield_now(&self);
}

/// Waits by futex, for words of one process.
pub struct Futex;

impl WaitOps<AtomicU32> for Futex {
    // As many as the futex mutex makes.
    const SPINS: u32 = 100;

    fn wait(&self, word: &AtomicU32, expected: u32, class: Class) {
        futex::wait_bitset(word, expected, class.0, Reach::Process);
    }

    fn wake(&self, word: &AtomicU32, class: Class) {
        futex::wake_bitset(word, class.0, Reach::Process);
    }

    fn yield_now(&self) {
        rustix::thread::sched_yield();
    }
}

/// What became of a thread that came to the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arrival {
    Entered,
    Queued(InLine),
    /// There is no room in line.
    Full,
}

#[derive(Default)]
#[repr(transparent)]
pub struct RwSem<A = AtomicU32>(pub A);

impl<A: LockWord> RwSem<A> {
    /// The word as it is now; may be old by the time it is looked at.
    #[inline]
    pub fn load(&self) -> LockState {
        // Acquire pairs with the release of the thread that left, or let the reader of this word in: all
        // later changes are read-modify-writes, and carry that release on.
        LockState(self.0.load(Ordering::Acquire))
    }

    /// The one loop: changes the word to what `step` makes of it, until that is nothing.
    #[inline]
    fn update(
        &self,
        order: Ordering,
        mut step: impl FnMut(LockState) -> Option<LockState>,
    ) -> Option<(LockState, LockState)> {
        // Relaxed: only a guess; the compare-and-swap says whether it was right.
        let mut old = LockState(self.0.load(Ordering::Relaxed));
        while let Some(new) = step(old) {
            match self.0.compare_exchange(old.0, new.0, order) {
                Ok(_) => return Some((old, new)),
                Err(found) => old = LockState(found),
            }
        }
        None
    }

    /// Goes in if that is possible at once.
    #[inline]
    pub fn try_lock(&self, side: Side) -> bool {
        // Acquire pairs with the release of the writer, or of all, that left.
        self.update(Ordering::Acquire, |old| old.enter(side)).is_some()
    }

    /// Goes in; spins and sleeps while it cannot.
    #[inline]
    pub fn lock<P: WaitOps<A>>(&self, side: Side, ops: &P) {
        if !self.try_lock(side) {
            self.lock_slow(side, ops);
        }
    }

    #[inline]
    pub fn unlock<P: WaitOps<A>>(&self, side: Side, ops: &P) {
        if let Some(class) = self.leave(side) {
            ops.wake(&self.0, class);
        }
    }

    #[cold]
    fn lock_slow<P: WaitOps<A>>(&self, side: Side, ops: &P) {
        if spin::<A, P>(|| self.try_lock(side)) {
            return;
        }
        let place = loop {
            match self.arrive(side) {
                Arrival::Entered => return,
                Arrival::Queued(place) => break place,
                Arrival::Full => ops.yield_now(),
            }
        };
        while !spin::<A, P>(|| self.take_turn(place)) {
            let now = self.load();
            if !now.is_admitted(place) && now.take_turn(place).is_none() {
                ops.wait(&self.0, now.0, place.class());
            }
        }
    }

    /// A thread comes: it goes in, or stands in line.
    fn arrive(&self, side: Side) -> Arrival {
        // Acquire for a thread that goes in, as in `try_lock`.
        let step = |old: LockState| old.enter(side).or_else(|| old.queue(side));
        match self.update(Ordering::Acquire, step) {
            None => Arrival::Full,
            Some((old, new)) if new.in_line(side) == old.in_line(side) => Arrival::Entered,
            Some((_, new)) => Arrival::Queued(new.last(side)),
        }
    }

    /// Whether a thread in line was let in, or went in just now.
    fn take_turn(&self, place: InLine) -> bool {
        // `load` acquires for one that was let in, the compare-and-swap for one that goes in by itself.
        self.load().is_admitted(place)
            || self.update(Ordering::Acquire, |old| old.take_turn(place)).is_some()
    }

    /// Leaves; returns which class must be woken.
    #[inline]
    fn leave(&self, side: Side) -> Option<Class> {
        let mut wake = None;
        // Release publishes what was done inside to the thread that comes next, called or handed in.
        self.update(Ordering::Release, |old| {
            let (new, class) = old.leave(side);
            wake = class;
            Some(new)
        });
        wake
    }
}

/// Looks a bounded number of times whether it is done.
fn spin<A, P: WaitOps<A>>(mut is_done: impl FnMut() -> bool) -> bool {
    for _ in 0..P::SPINS {
        if is_done() {
            return true;
        }
        core::hint::spin_loop();
    }
    is_done()
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
