//! The reader-writer lock of a reverse map: one word of four bytes, no larger than a futex mutex.
//!
//! Owns who may be in and in which order those get in that wait. Leaves to [`Parking`] how a thread
//! sleeps, and to its user what the lock guards. Nothing is allocated, nothing is thread-local.
//!
//! | bits | meaning |
//! |---|---|
//! | 0..8 | readers inside |
//! | 8 | `WRITER`: a writer is inside |
//! | 9 | `PHASE`: flips when the waiting readers are let in |
//! | 10..17 | readers in line |
//! | 17..23 | writers in line |
//! | 23..29 | the ticket of the first writer in line |
//! | 29..32 | steals: how often somebody passed the first writer in line |
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

/// How often the first writer in line can be passed before the lock is barred.
pub const STEALS_MAX: u32 = STEALS.max();
/// Most readers inside.
pub const READERS_MAX: u32 = READERS.max();
/// Most readers that wait in line.
pub const READERS_IN_LINE_MAX: u32 = READERS_IN_LINE.max();
/// Most writers that wait in line.
pub const WRITERS_IN_LINE_MAX: u32 = WRITERS_IN_LINE.max();

const READERS: Field = Field { shift: 0, bits: 8 };
const WRITER: Field = Field { shift: 8, bits: 1 };
const PHASE: Field = Field { shift: 9, bits: 1 };
const READERS_IN_LINE: Field = Field { shift: 10, bits: 7 };
const WRITERS_IN_LINE: Field = Field { shift: 17, bits: 6 };
const TICKET: Field = Field { shift: 23, bits: 6 };
const STEALS: Field = Field { shift: 29, bits: 3 };

// All readers in line are let in at once.
const _: () = assert!(READERS_IN_LINE.max() <= READERS.max());
// The tickets in line, and the one just served, are all different.
const _: () = assert!(WRITERS_IN_LINE.max() <= TICKET.max());
const _: () = assert!(STEALS.shift + STEALS.bits == u32::BITS);
const _: () = assert!(size_of::<RwSem>() == 4);
const _: () = assert!(size_of::<RwSem>() <= size_of::<rustix_futex_sync::Mutex<()>>());

/// Some bits of the word.
#[derive(Clone, Copy)]
struct Field {
    shift: u32,
    bits: u32,
}

impl Field {
    const fn max(self) -> u32 {
        (1 << self.bits) - 1
    }
}

/// One loaded value of the word, and what may become of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Snapshot(u32);

impl Snapshot {
    const fn get(self, field: Field) -> u32 {
        self.0 >> field.shift & field.max()
    }

    const fn set(self, field: Field, value: u32) -> Snapshot {
        debug_assert!(value <= field.max());
        Snapshot(self.0 & !(field.max() << field.shift) | value << field.shift)
    }

    /// Readers inside.
    #[must_use]
    pub const fn readers(self) -> u32 {
        self.get(READERS)
    }

    /// Whether a writer is inside.
    #[must_use]
    pub const fn has_writer(self) -> bool {
        self.get(WRITER) != 0
    }

    /// Readers in line.
    #[must_use]
    pub const fn readers_in_line(self) -> u32 {
        self.get(READERS_IN_LINE)
    }

    /// Writers in line.
    #[must_use]
    pub const fn writers_in_line(self) -> u32 {
        self.get(WRITERS_IN_LINE)
    }

    const fn is_free(self) -> bool {
        self.get(READERS) == 0 && self.get(WRITER) == 0
    }

    const fn is_barred(self) -> bool {
        self.get(STEALS) == STEALS_MAX
    }

    /// With a newcomer counted who passes the writers in line, if he may.
    const fn passed(self) -> Option<Snapshot> {
        if self.get(WRITERS_IN_LINE) == 0 {
            return Some(self);
        }
        if self.is_barred() { None } else { Some(self.set(STEALS, self.get(STEALS) + 1)) }
    }

    /// A reader comes and goes straight in.
    const fn enter_reader(self) -> Option<Snapshot> {
        if self.get(WRITER) != 0 || self.get(READERS) == READERS.max() {
            return None;
        }
        match self.passed() {
            Some(passed) => Some(passed.set(READERS, self.get(READERS) + 1)),
            None => None,
        }
    }

    /// A writer comes and goes straight in.
    const fn enter_writer(self) -> Option<Snapshot> {
        if !self.is_free() {
            return None;
        }
        match self.passed() {
            Some(passed) => Some(passed.set(WRITER, 1)),
            None => None,
        }
    }

    const fn queue_reader(self) -> Option<Snapshot> {
        // Readers inside at their most bar nobody else: who cannot get in for that is not in line.
        let is_kept_out = self.get(WRITER) != 0 || self.is_barred();
        let in_line = self.get(READERS_IN_LINE);
        if !is_kept_out || in_line == READERS_IN_LINE.max() {
            return None;
        }
        Some(self.set(READERS_IN_LINE, in_line + 1))
    }

    const fn queue_writer(self) -> Option<Snapshot> {
        let in_line = self.get(WRITERS_IN_LINE);
        if in_line == WRITERS_IN_LINE.max() {
            return None;
        }
        Some(self.set(WRITERS_IN_LINE, in_line + 1))
    }

    /// The ticket of the last writer in line.
    const fn last_ticket(self) -> Ticket {
        Ticket((self.get(TICKET) + self.get(WRITERS_IN_LINE) - 1) & TICKET.max())
    }

    /// Whether the reader in line was let in. Until it leaves again the phase flips no second time:
    /// that takes a writer to leave, and none gets in before.
    const fn is_admitted(self, place: ReaderInLine) -> bool {
        self.get(PHASE) != place.0
    }

    /// Whether the writer with `ticket` was let in.
    const fn is_served(self, ticket: Ticket) -> bool {
        self.get(TICKET) == (ticket.0 + 1) & TICKET.max()
    }

    /// The first writer in line goes in. The steals stay for readers in line, who are next then.
    const fn admit_writer(self) -> Snapshot {
        let in_line = self.get(WRITERS_IN_LINE) - 1;
        let served = self
            .set(WRITER, 1)
            .set(WRITERS_IN_LINE, in_line)
            .set(TICKET, (self.get(TICKET) + 1) & TICKET.max());
        if self.get(READERS_IN_LINE) == 0 { served.set(STEALS, 0) } else { served }
    }

    /// The writer with `ticket` goes in by itself, if it is the first and the lock is free.
    const fn take_turn(self, ticket: Ticket) -> Option<Snapshot> {
        if self.is_free() && self.get(TICKET) == ticket.0 {
            Some(self.admit_writer())
        } else {
            None
        }
    }

    /// All readers in line go in.
    const fn admit_readers(self) -> Snapshot {
        let admitted = self
            .set(READERS, self.get(READERS_IN_LINE))
            .set(READERS_IN_LINE, 0)
            .set(PHASE, self.get(PHASE) ^ 1);
        match admitted.passed() {
            _ if self.get(WRITERS_IN_LINE) == 0 => admitted.set(STEALS, 0),
            Some(passed) => passed,
            // Barred it stays: the writer is next.
            None => admitted,
        }
    }

    /// Nobody is inside any more: called or handed in is the first writer in line.
    const fn leave(self) -> (Snapshot, Wake) {
        if self.get(WRITERS_IN_LINE) == 0 {
            return (self, Wake::Nobody);
        }
        let wake = Wake::Sleepers(Ticket(self.get(TICKET)).class());
        (if self.is_barred() { self.admit_writer() } else { self }, wake)
    }

    const fn leave_reader(self) -> (Snapshot, Wake) {
        debug_assert!(self.get(READERS) > 0);
        let left = self.set(READERS, self.get(READERS) - 1);
        if left.get(READERS) == 0 { left.leave() } else { (left, Wake::Nobody) }
    }

    const fn leave_writer(self) -> (Snapshot, Wake) {
        debug_assert!(self.has_writer());
        let left = self.set(WRITER, 0);
        if left.get(READERS_IN_LINE) > 0 {
            (left.admit_readers(), Wake::Sleepers(Class::READERS))
        } else {
            left.leave()
        }
    }
}

impl core::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (readers, writer) = (self.readers(), self.get(WRITER));
        write!(f, "inside: {readers} readers, {writer} writers; in line: ")?;
        write!(f, "{} readers, {} writers; ", self.readers_in_line(), self.writers_in_line())?;
        write!(f, "phase {}, ticket {}, ", self.get(PHASE), self.get(TICKET))?;
        write!(f, "{} steals", self.get(STEALS))
    }
}

/// A writer's place in line, modulo the field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ticket(u32);

impl Ticket {
    const fn class(self) -> Class {
        // Two writers of one class are 31 places apart: the second is woken once too often.
        Class(1 << (self.0 % 31))
    }
}

/// Whom a wake reaches: one bit for the readers, the other 31 for writers by their tickets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class(u32);

impl Class {
    /// All readers in line.
    pub const READERS: Class = Class(1 << 31);

    /// The class as one bit of a word.
    #[must_use]
    pub const fn bit(self) -> u32 {
        self.0
    }
}

/// Who is to be woken by whoever left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "those who wait must be woken"]
enum Wake {
    Nobody,
    Sleepers(Class),
}

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

/// A reader's place in line: the phase in which it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ReaderInLine(u32);

/// A writer's place in line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WriterInLine(Ticket);

impl WriterInLine {
    const fn class(self) -> Class {
        self.0.class()
    }
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
            if !now.is_served(place.0) && now.take_turn(place.0).is_none() {
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
            Some((_, new)) => Arrival::Queued(ReaderInLine(new.get(PHASE))),
        }
    }

    /// A writer comes: it goes in, or stands in line.
    fn arrive_writer(&self) -> Arrival<WriterInLine> {
        // Acquire for who goes in, as in `try_lock_write`.
        let step = |old: Snapshot| old.enter_writer().or_else(|| old.queue_writer());
        match self.update(Ordering::Acquire, step) {
            None => Arrival::Full,
            Some((old, new)) if new.writers_in_line() == old.writers_in_line() => Arrival::Entered,
            Some((_, new)) => Arrival::Queued(WriterInLine(new.last_ticket())),
        }
    }

    /// Whether a reader in line was let in.
    fn is_reader_admitted(&self, place: ReaderInLine) -> bool {
        self.load().is_admitted(place)
    }

    /// Whether a writer in line was let in, or went in just now.
    fn take_writer_turn(&self, place: WriterInLine) -> bool {
        // `load` acquires for who was let in; the compare-and-swap does for who goes in by itself.
        self.load().is_served(place.0)
            || self.update(Ordering::Acquire, |old| old.take_turn(place.0)).is_some()
    }

    fn leave_reader(&self) -> Option<Class> {
        self.leave(Snapshot::leave_reader)
    }

    fn leave_writer(&self) -> Option<Class> {
        self.leave(Snapshot::leave_writer)
    }

    /// Leaves as `step` says; returns who must be woken.
    #[inline]
    fn leave(&self, step: impl Fn(Snapshot) -> (Snapshot, Wake)) -> Option<Class> {
        let mut wake = Wake::Nobody;
        // Release publishes what was done inside to whoever comes next, called or handed in.
        self.update(Ordering::Release, |old| {
            let (new, whom) = step(old);
            wake = whom;
            Some(new)
        });
        match wake {
            Wake::Nobody => None,
            Wake::Sleepers(class) => Some(class),
        }
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
