//! The lock's word: which threads are inside and in line, and what becomes of that at each step.
//!
//! Every step is a function of one loaded value. `lock.rs` makes it happen in the atomic word, and
//! has the rules by which threads get in.
//!
//! | bits | meaning |
//! |---|---|
//! | 0..8 | readers inside |
//! | 8 | `WRITER`: a writer is inside |
//! | 9 | `PHASE`: flips when the waiting readers are let in |
//! | 10..17 | readers in line |
//! | 17..23 | writers in line |
//! | 23..29 | the ticket of the first writer in line |
//! | 29..32 | steals: how often the first writer in line was passed |

/// How often the first writer in line can be passed before the lock is barred.
pub const STEALS_MAX: u32 = STEALS.max();
/// Most readers inside.
pub const READERS_MAX: u32 = READERS.max();
pub const READERS_IN_LINE_MAX: u32 = READERS_IN_LINE.max();
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

/// What is zero while no thread waits in line: then a step is one sum, which is most of what the
/// lock costs where no thread disturbs another.
const LINE: u32 = READERS_IN_LINE.mask() | WRITERS_IN_LINE.mask() | STEALS.mask();

/// How a thread is inside: beside others of its side, or alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Reader,
    Writer,
}

impl Side {
    const fn inside(self) -> Field {
        match self {
            Side::Reader => READERS,
            Side::Writer => WRITER,
        }
    }

    const fn line(self) -> Field {
        match self {
            Side::Reader => READERS_IN_LINE,
            Side::Writer => WRITERS_IN_LINE,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InLine {
    /// The phase in which the reader came.
    Reader(u32),
    /// The writer's ticket, modulo the field.
    Writer(u32),
}

impl InLine {
    pub(super) const fn class(self) -> Class {
        match self {
            InLine::Reader(_) => Class::READERS,
            // Two writers of one class are 31 places apart: the second is woken once too often.
            InLine::Writer(ticket) => Class(1 << (ticket % 31)),
        }
    }
}

/// One loaded value of the word, and what may become of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LockState(pub(super) u32);

impl LockState {
    pub(super) const fn get(self, field: Field) -> u32 {
        self.0 >> field.shift & field.max()
    }

    pub(super) const fn set(self, field: Field, value: u32) -> LockState {
        debug_assert!(value <= field.max());
        LockState(self.0 & !field.mask() | value << field.shift)
    }

    pub const fn readers(self) -> u32 {
        self.get(READERS)
    }

    pub const fn has_writer(self) -> bool {
        self.get(WRITER) != 0
    }

    pub const fn in_line(self, side: Side) -> u32 {
        self.get(side.line())
    }

    const fn is_free(self) -> bool {
        self.0 & (READERS.mask() | WRITER.mask()) == 0
    }

    #[inline]
    const fn is_barred(self) -> bool {
        self.get(STEALS) == STEALS_MAX
    }

    /// With a newcomer counted that passes the writers in line, if it may.
    #[cold]
    fn passed(self) -> Option<LockState> {
        if self.in_line(Side::Writer) == 0 {
            return Some(self);
        }
        (!self.is_barred()).then(|| self.set(STEALS, self.get(STEALS) + 1))
    }

    /// A newcomer goes straight in.
    #[inline]
    pub(super) fn enter(self, side: Side) -> Option<LockState> {
        let is_open = match side {
            Side::Reader => !self.has_writer() && self.readers() < READERS_MAX,
            Side::Writer => self.is_free(),
        };
        if !is_open {
            return None;
        }
        let entered = LockState(self.0 + (1 << side.inside().shift));
        if self.0 & LINE == 0 { Some(entered) } else { entered.passed() }
    }

    /// A newcomer stands in line.
    pub(super) fn queue(self, side: Side) -> Option<LockState> {
        // A reader that finds only the most readers inside does not stand in line: nothing would
        // let it in.
        let is_kept_out = side == Side::Writer || self.has_writer() || self.is_barred();
        let in_line = self.in_line(side);
        let has_room = in_line < side.line().max();
        (is_kept_out && has_room).then(|| self.set(side.line(), in_line + 1))
    }

    pub(super) const fn last(self, side: Side) -> InLine {
        match side {
            Side::Reader => InLine::Reader(self.get(PHASE)),
            Side::Writer => {
                let ticket = self.get(TICKET) + self.in_line(side) - 1;
                InLine::Writer(ticket & TICKET.max())
            }
        }
    }

    pub(super) fn first_writer(self) -> Option<InLine> {
        (self.in_line(Side::Writer) > 0).then(|| InLine::Writer(self.get(TICKET)))
    }

    /// Whether a thread in line was let in. Until a reader leaves again the phase flips no second
    /// time: that takes a writer to leave, and none gets in before. Until a writer leaves the ticket
    /// moves on no further.
    pub(super) const fn is_admitted(self, place: InLine) -> bool {
        match place {
            InLine::Reader(phase) => self.get(PHASE) != phase,
            InLine::Writer(ticket) => self.get(TICKET) == (ticket + 1) & TICKET.max(),
        }
    }

    /// The first writer in line goes in. The steals stay for readers in line, which are next then.
    const fn admit_writer(self) -> LockState {
        let served = self
            .set(WRITER, 1)
            .set(WRITERS_IN_LINE, self.get(WRITERS_IN_LINE) - 1)
            .set(TICKET, (self.get(TICKET) + 1) & TICKET.max());
        if self.get(READERS_IN_LINE) == 0 { served.set(STEALS, 0) } else { served }
    }

    /// A writer in line goes in by itself, if it is the first and the lock is free.
    pub(super) fn take_turn(self, place: InLine) -> Option<LockState> {
        let is_its_turn = self.is_free() && place == InLine::Writer(self.get(TICKET));
        is_its_turn.then(|| self.admit_writer())
    }

    /// All readers in line go in.
    fn admit_readers(self) -> LockState {
        let admitted = self
            .set(READERS, self.get(READERS_IN_LINE))
            .set(READERS_IN_LINE, 0)
            .set(PHASE, self.get(PHASE) ^ 1);
        if self.in_line(Side::Writer) == 0 {
            return admitted.set(STEALS, 0);
        }
        // A lock that is barred stays so: the writer is next.
        admitted.passed().unwrap_or(admitted)
    }

    /// A thread leaves; also which class must be woken then.
    #[inline]
    pub(super) fn leave(self, side: Side) -> (LockState, Option<Class>) {
        debug_assert!(self.get(side.inside()) > 0);
        let left = LockState(self.0 - (1 << side.inside().shift));
        if self.0 & LINE == 0 { (left, None) } else { left.let_in(side) }
    }

    /// A thread of `side` has left; lets in what is next in line.
    #[cold]
    fn let_in(self, side: Side) -> (LockState, Option<Class>) {
        if !self.is_free() {
            return (self, None);
        }
        if side == Side::Writer && self.in_line(Side::Reader) > 0 {
            return (self.admit_readers(), Some(Class::READERS));
        }
        let first = self.first_writer();
        let is_handed_over = first.is_some() && self.is_barred();
        (if is_handed_over { self.admit_writer() } else { self }, first.map(InLine::class))
    }
}

impl core::fmt::Debug for LockState {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (readers, writer) = (self.readers(), self.get(WRITER));
        let (phase, ticket, steals) = (self.get(PHASE), self.get(TICKET), self.get(STEALS));
        let [waiting_readers, waiting_writers] =
            [Side::Reader, Side::Writer].map(|side| self.in_line(side));
        write!(f, "inside: {readers} readers, {writer} writers; in line: ")?;
        write!(f, "{waiting_readers} readers, {waiting_writers} writers; ")?;
        write!(f, "phase {phase}, ticket {ticket}, {steals} steals")
    }
}

/// Which threads a wake reaches: one bit for the readers, the other 31 for writers by their tickets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class(pub u32);

impl Class {
    pub const READERS: Class = Class(1 << 31);
}
