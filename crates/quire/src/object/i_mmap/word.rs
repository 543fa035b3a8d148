//! The lock's word: who is inside, who waits in line, and what becomes of that at each step.
//!
//! Owns the bits; every step is a function of one loaded value and calls nobody. Leaves to
//! `lock.rs` to make it happen in the atomic word, and says there who gets in.
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
pub(super) const PHASE: Field = Field { shift: 9, bits: 1 };
const READERS_IN_LINE: Field = Field { shift: 10, bits: 7 };
const WRITERS_IN_LINE: Field = Field { shift: 17, bits: 6 };
pub(super) const TICKET: Field = Field { shift: 23, bits: 6 };
const STEALS: Field = Field { shift: 29, bits: 3 };

// All readers in line are let in at once.
const _: () = assert!(READERS_IN_LINE.max() <= READERS.max());
// The tickets in line, and the one just served, are all different.
const _: () = assert!(WRITERS_IN_LINE.max() <= TICKET.max());
const _: () = assert!(STEALS.shift + STEALS.bits == u32::BITS);

/// Some bits of the word.
#[derive(Clone, Copy)]
pub(super) struct Field {
    shift: u32,
    bits: u32,
}

impl Field {
    const fn max(self) -> u32 {
        (1 << self.bits) - 1
    }

    const fn mask(self) -> u32 {
        self.max() << self.shift
    }
}

/// What is zero while nobody waits in line: then a step is one sum, which is most of what the lock
/// costs where nobody disturbs it.
const LINE: u32 = READERS_IN_LINE.mask() | WRITERS_IN_LINE.mask() | STEALS.mask();

/// One loaded value of the word, and what may become of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Snapshot(pub(super) u32);

impl Snapshot {
    pub(super) const fn get(self, field: Field) -> u32 {
        self.0 >> field.shift & field.max()
    }

    pub(super) const fn set(self, field: Field, value: u32) -> Snapshot {
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
        self.0 & (READERS.mask() | WRITER.mask()) == 0
    }

    #[inline]
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
    #[inline]
    pub(super) const fn enter_reader(self) -> Option<Snapshot> {
        if self.get(WRITER) != 0 || self.get(READERS) == READERS.max() {
            return None;
        }
        if self.0 & LINE == 0 {
            return Some(Snapshot(self.0 + 1));
        }
        match self.passed() {
            Some(passed) => Some(passed.set(READERS, self.get(READERS) + 1)),
            None => None,
        }
    }

    /// A writer comes and goes straight in.
    #[inline]
    pub(super) const fn enter_writer(self) -> Option<Snapshot> {
        if !self.is_free() {
            return None;
        }
        if self.0 & LINE == 0 {
            return Some(Snapshot(self.0 | WRITER.mask()));
        }
        match self.passed() {
            Some(passed) => Some(passed.set(WRITER, 1)),
            None => None,
        }
    }

    pub(super) const fn queue_reader(self) -> Option<Snapshot> {
        // Readers inside at their most bar nobody else: who cannot get in for that is not in line.
        let is_kept_out = self.get(WRITER) != 0 || self.is_barred();
        let in_line = self.get(READERS_IN_LINE);
        if !is_kept_out || in_line == READERS_IN_LINE.max() {
            return None;
        }
        Some(self.set(READERS_IN_LINE, in_line + 1))
    }

    pub(super) const fn queue_writer(self) -> Option<Snapshot> {
        let in_line = self.get(WRITERS_IN_LINE);
        if in_line == WRITERS_IN_LINE.max() {
            return None;
        }
        Some(self.set(WRITERS_IN_LINE, in_line + 1))
    }

    /// The place of a reader that came just now.
    pub(super) const fn last_reader(self) -> ReaderInLine {
        ReaderInLine(self.get(PHASE))
    }

    /// The place of the last writer in line.
    pub(super) const fn last_writer(self) -> WriterInLine {
        WriterInLine((self.get(TICKET) + self.get(WRITERS_IN_LINE) - 1) & TICKET.max())
    }

    /// The place of the first writer in line.
    pub(super) const fn first_writer(self) -> Option<WriterInLine> {
        if self.get(WRITERS_IN_LINE) == 0 { None } else { Some(WriterInLine(self.get(TICKET))) }
    }

    /// Whether the reader in line was let in. Until it leaves again the phase flips no second time:
    /// that takes a writer to leave, and none gets in before.
    pub(super) const fn is_admitted(self, place: ReaderInLine) -> bool {
        self.get(PHASE) != place.0
    }

    /// Whether the writer in line was let in. The ticket moves on no further until it leaves.
    pub(super) const fn is_served(self, place: WriterInLine) -> bool {
        self.get(TICKET) == (place.0 + 1) & TICKET.max()
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

    /// The writer in line goes in by itself, if it is the first and the lock is free.
    pub(super) const fn take_turn(self, place: WriterInLine) -> Option<Snapshot> {
        if self.is_free() && self.get(TICKET) == place.0 { Some(self.admit_writer()) } else { None }
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
    const fn leave(self) -> (Snapshot, Option<Class>) {
        match self.first_writer() {
            None => (self, None),
            Some(first) if self.is_barred() => (self.admit_writer(), Some(first.class())),
            Some(first) => (self, Some(first.class())),
        }
    }

    /// A reader leaves; also who must be woken then.
    #[inline]
    pub(super) const fn leave_reader(self) -> (Snapshot, Option<Class>) {
        debug_assert!(self.get(READERS) > 0);
        if self.0 & LINE == 0 {
            return (Snapshot(self.0 - 1), None);
        }
        let left = self.set(READERS, self.get(READERS) - 1);
        if left.get(READERS) == 0 { left.leave() } else { (left, None) }
    }

    /// The writer leaves; also who must be woken then.
    #[inline]
    pub(super) const fn leave_writer(self) -> (Snapshot, Option<Class>) {
        debug_assert!(self.has_writer());
        if self.0 & LINE == 0 {
            return (Snapshot(self.0 & !WRITER.mask()), None);
        }
        let left = self.set(WRITER, 0);
        if left.get(READERS_IN_LINE) > 0 {
            (left.admit_readers(), Some(Class::READERS))
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

/// A reader's place in line: the phase in which it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReaderInLine(u32);

/// A writer's place in line: its ticket, modulo the field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WriterInLine(u32);

impl WriterInLine {
    pub(super) const fn class(self) -> Class {
        // Two writers of one class are 31 places apart: the second is woken once too often.
        Class(1 << (self.0 % 31))
    }
}
