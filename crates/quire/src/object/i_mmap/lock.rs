//! The reader-writer lock of a reverse map: one word of four bytes, no larger than a futex mutex.
//!
//! Owns who may be in and in which order those get in that wait. Leaves to [`Parking`] how a thread
//! sleeps, to `word.rs` what becomes of the word, and to its user what the lock guards. Nothing is
//! allocated, nothing is thread-local.
//!
//! # Who gets in
//!
//! A newcomer takes the lock if it is free for it, even past writers in line (it *steals*), and
//! counts that. At [`STEALS_MAX`] the lock is barred: newcomers stand in line, and whoever leaves
//! hands it over.
//!
//! - *Leaves the last reader*, the first writer in line is called; if the lock is barred, it is
//!   inside when it wakes.
//! - *Leaves a writer*, all readers in line are let in at once, before they wake. None there: as
//!   above. That the readers passed a writer counts as a steal.
//!
//! So nobody is kept out. A reader in line waits for the writer inside; or, come while the lock was
//! barred, for the readers inside and one writer. The first writer in line sees at most
//! `STEALS_MAX` turns of others (a turn is a newcomer, or all waiting readers together) and one
//! more of the waiting readers; writers in line go in order. There is room in line for
//! [`WRITERS_IN_LINE_MAX`] writers and [`READERS_IN_LINE_MAX`] readers: who finds it full, or
//! [`READERS_MAX`] readers inside, gives up the CPU and comes again as a newcomer.
//!
//! # Why no wake-up is lost
//!
//! A thread in line is counted in the word, by the same compare-and-swap that found the lock
//! taken. It sleeps only while the word is one in which it has not its turn, which the kernel
//! compares. Every change that gives a turn changes the word and wakes afterwards. Whoever is let
//! in reads so in the word (a reader: PHASE flipped; a writer: the ticket moved past its own), so a
//! wake that comes for no reason, or a second time, does no harm.
//!
//! Generic over its atomic and its parking, so that loom can check the very code.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};

pub use super::word::{
    Class, READERS_IN_LINE_MAX, READERS_MAX, STEALS_MAX, Snapshot, WRITERS_IN_LINE_MAX,
};
use super::word::{ReaderInLine, WriterInLine};

const _: () = assert!(size_of::<RwSem>() == 4);
const _: () = assert!(size_of::<RwSem>() <= size_of::<rustix_futex_sync::Mutex<()>>());

/// The atomic under the lock: a real one, or loom's.
pub trait LockWord {
    /// A load.
    fn load(&self, order: Ordering) -> u32;
    /// A weak compare-and-swap.
    ///
    /// # Errors
    /// The value found where it was another.
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
pub trait Parking<A> {
    /// Looks at the word before a thread sleeps.
    const SPINS: u32;
    /// Sleeps as one of `class` while `word` is `expected`; may return for no reason.
    fn wait(&self, word: &A, expected: u32, class: Class);
    /// Wakes all of `class` that sleep on `word`.
    fn wake(&self, word: &A, class: Class);
    /// Between two looks.
    fn relax(&self);
    /// Lets other threads run.
    fn yield_now(&self);
}

/// Parking by futex, for words of one process.
pub struct Futex;

impl Parking<AtomicU32> for Futex {
    // As many as the futex mutex makes.
    const SPINS: u32 = 100;

    fn wait(&self, word: &AtomicU32, expected: u32, class: Class) {
        futex::wait_bitset(word, expected, class.bit(), Reach::Process);
    }

    fn wake(&self, word: &AtomicU32, class: Class) {
        futex::wake_bitset(word, class.bit(), Reach::Process);
    }

    fn relax(&self) {
        core::hint::spin_loop();
    }

    fn yield_now(&self) {
        rustix::thread::sched_yield();
    }
}

/// What became of a thread that came to the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arrival<T> {
    /// It is inside.
    Entered,
    /// It is in line.
    Queued(T),
    /// There is no room in line.
    Full,
}

/// The lock.
#[repr(transparent)]
pub struct RwSem<A = AtomicU32>(pub A);

impl RwSem {
    /// A free lock.
    #[must_use]
    pub const fn new() -> RwSem {
        RwSem(AtomicU32::new(0))
    }

    /// In a fork's child, before any other thread runs there: nobody is inside or in line.
    pub fn after_fork_in_child(&self) {
        // Relaxed: there is no other thread.
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Default for RwSem {
    fn default() -> RwSem {
        RwSem::new()
    }
}

impl<A: LockWord> RwSem<A> {
    /// The word as it is now; may be old by the time it is looked at.
    #[inline]
    pub fn load(&self) -> Snapshot {
        // Acquire pairs with the release of whoever left, or let the reader of this word in: all
        // later changes are read-modify-writes, and carry that release on.
        Snapshot(self.0.load(Ordering::Acquire))
    }

    /// The one loop: changes the word to what `step` makes of it, until that is nothing.
    #[inline]
    fn update(
        &self,
        order: Ordering,
        mut step: impl FnMut(Snapshot) -> Option<Snapshot>,
    ) -> Option<(Snapshot, Snapshot)> {
        // Relaxed: only a guess; the compare-and-swap says whether it was right.
        let mut old = Snapshot(self.0.load(Ordering::Relaxed));
        while let Some(new) = step(old) {
            match self.0.compare_exchange(old.0, new.0, order) {
                Ok(_) => return Some((old, new)),
                Err(found) => old = Snapshot(found),
            }
        }
        None
    }

    /// Goes in as a reader if that is possible at once.
    #[inline]
    pub fn try_lock_read(&self) -> bool {
        // Acquire pairs with the release of the last writer to leave.
        self.update(Ordering::Acquire, Snapshot::enter_reader).is_some()
    }

    /// Goes in as the writer if that is possible at once.
    #[inline]
    pub fn try_lock_write(&self) -> bool {
        // Acquire pairs with the release of all that left.
        self.update(Ordering::Acquire, Snapshot::enter_writer).is_some()
    }

    /// Goes in as a reader, beside other readers; spins and sleeps while it cannot.
    #[inline]
    pub fn lock_read<P: Parking<A>>(&self, parking: &P) {
        if !self.try_lock_read() {
            self.lock_read_slow(parking);
        }
    }

    /// Goes in alone; spins and sleeps while it cannot.
    #[inline]
    pub fn lock_write<P: Parking<A>>(&self, parking: &P) {
        if !self.try_lock_write() {
            self.lock_write_slow(parking);
        }
    }

    /// A reader leaves.
    #[inline]
    pub fn unlock_read<P: Parking<A>>(&self, parking: &P) {
        let class = self.leave_reader();
        self.wake(parking, class);
    }

    /// The writer leaves.
    #[inline]
    pub fn unlock_write<P: Parking<A>>(&self, parking: &P) {
        let class = self.leave_writer();
        self.wake(parking, class);
    }

    #[cold]
    fn lock_read_slow<P: Parking<A>>(&self, parking: &P) {
        if spin(parking, || self.try_lock_read()) {
            return;
        }
        let place = loop {
            match self.arrive_reader() {
                Arrival::Entered => return,
                Arrival::Queued(place) => break place,
                Arrival::Full => parking.yield_now(),
            }
        };
        while !spin(parking, || self.is_reader_admitted(place)) {
            let now = self.load();
            if !now.is_admitted(place) {
                parking.wait(&self.0, now.0, Class::READERS);
            }
        }
    }

    #[cold]
    fn lock_write_slow<P: Parking<A>>(&self, parking: &P) {
        if spin(parking, || self.try_lock_write()) {
            return;
        }
        let place = loop {
            match self.arrive_writer() {
                Arrival::Entered => return,
                Arrival::Queued(place) => break place,
                Arrival::Full => parking.yield_now(),
            }
        };
        while !spin(parking, || self.take_writer_turn(place)) {
            let now = self.load();
            if !now.is_served(place) && now.take_turn(place).is_none() {
                parking.wait(&self.0, now.0, place.class());
            }
        }
    }

    /// A reader comes: it goes in, or stands in line.
    fn arrive_reader(&self) -> Arrival<ReaderInLine> {
        // Acquire for who goes in, as in `try_lock_read`.
        let step = |old: Snapshot| old.enter_reader().or_else(|| old.queue_reader());
        match self.update(Ordering::Acquire, step) {
            None => Arrival::Full,
            Some((old, new)) if new.readers() > old.readers() => Arrival::Entered,
            Some((_, new)) => Arrival::Queued(new.last_reader()),
        }
    }

    /// A writer comes: it goes in, or stands in line.
    fn arrive_writer(&self) -> Arrival<WriterInLine> {
        // Acquire for who goes in, as in `try_lock_write`.
        let step = |old: Snapshot| old.enter_writer().or_else(|| old.queue_writer());
        match self.update(Ordering::Acquire, step) {
            None => Arrival::Full,
            Some((old, new)) if new.writers_in_line() == old.writers_in_line() => Arrival::Entered,
            Some((_, new)) => Arrival::Queued(new.last_writer()),
        }
    }

    /// Whether a reader in line was let in.
    fn is_reader_admitted(&self, place: ReaderInLine) -> bool {
        self.load().is_admitted(place)
    }

    /// Whether a writer in line was let in, or went in just now.
    fn take_writer_turn(&self, place: WriterInLine) -> bool {
        // `load` acquires for who was let in; the compare-and-swap does for who goes in by itself.
        self.load().is_served(place)
            || self.update(Ordering::Acquire, |old| old.take_turn(place)).is_some()
    }

    fn leave_reader(&self) -> Option<Class> {
        self.leave(Snapshot::leave_reader)
    }

    fn leave_writer(&self) -> Option<Class> {
        self.leave(Snapshot::leave_writer)
    }

    /// Leaves as `step` says; returns who must be woken.
    #[inline]
    fn leave(&self, step: impl Fn(Snapshot) -> (Snapshot, Option<Class>)) -> Option<Class> {
        let mut wake = None;
        // Release publishes what was done inside to whoever comes next, called or handed in.
        self.update(Ordering::Release, |old| {
            let (new, class) = step(old);
            wake = class;
            Some(new)
        });
        wake
    }

    #[inline]
    fn wake<P: Parking<A>>(&self, parking: &P, class: Option<Class>) {
        if let Some(class) = class {
            parking.wake(&self.0, class);
        }
    }
}

/// Looks a bounded number of times whether it is done.
fn spin<A, P: Parking<A>>(parking: &P, mut is_done: impl FnMut() -> bool) -> bool {
    for _ in 0..P::SPINS {
        if is_done() {
            return true;
        }
        parking.relax();
    }
    is_done()
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
