//! Where a segment is, in one word: in the swap file, on a server, on its way.
//!
//! Every step is one change of the word. The supervisor alone moves bytes between file and server, and has
//! [`Place::MOVING`] set while it changes the file: until then nobody takes the segment for new data. A reader reads
//! without a lock, and looks at the word once more: where a move has begun meanwhile, what it read is nothing.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use super::{AtomicWord, SEGMENT_BYTES};

/// Parts of a segment that are fetched one by one.
pub const CHUNKS: usize = 8;
/// Bytes of one.
pub const CHUNK_BYTES: usize = SEGMENT_BYTES / CHUNKS;

/// What a word says of a segment, at one moment.
///
/// From the lowest bit: the chunks that the file has, the chunks that readers want, flags; and above the 32nd how
/// often the segment was taken, or moved away.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Place(u64);

impl Place {
    const WANTED_SHIFT: u32 = 8;
    const ALL: u64 = (1 << CHUNKS) - 1;
    /// The file may have blocks of it: it counts in [`Far::local`](super::Far::local).
    pub const LOCAL: u64 = 1 << 16;
    /// Its data were written whole.
    pub const WRITTEN: u64 = 1 << 17;
    /// The server has it.
    pub const FAR: u64 = 1 << 18;
    /// The supervisor is changing what the file has of it.
    pub const MOVING: u64 = 1 << 19;
    /// Some of what was wanted was not to be had: what is neither here nor wanted any more.
    pub const FAILED: u64 = 1 << 20;
    /// It was read since the supervisor looked last.
    pub const USED: u64 = 1 << 21;
    const TURN: u64 = 1 << 32;

    pub fn has(self, flags: u64) -> bool {
        self.0 & flags == flags
    }

    /// Chunks that the file has, a bit each.
    pub fn here(self) -> u8 {
        self.0 as u8
    }

    /// Chunks that readers wait for.
    pub fn wanted(self) -> u8 {
        (self.0 >> Self::WANTED_SHIFT) as u8
    }

    pub fn with(self, flags: u64) -> Place {
        Place(self.0 | flags)
    }

    pub fn without(self, flags: u64) -> Place {
        Place(self.0 & !flags)
    }

    /// With more chunks in the file, for which nobody waits any more.
    pub fn with_here(self, chunks: u8) -> Place {
        Place((self.0 | u64::from(chunks)) & !(u64::from(chunks) << Self::WANTED_SHIFT))
    }

    fn with_wanted(self, chunks: u8) -> Place {
        Place(self.0 | u64::from(chunks) << Self::WANTED_SHIFT)
    }

    /// Chunks that were wanted are not to be had; nobody waits for them any more.
    pub fn failed(self, chunks: u8) -> Place {
        Place(self.0 & !(u64::from(chunks) << Self::WANTED_SHIFT) | Self::FAILED)
    }

    /// With nothing in the file, and in its next turn.
    fn emptied(self) -> Place {
        Place((self.0 & !Self::ALL).wrapping_add(Self::TURN))
    }

    /// Free, and taken for new data.
    fn taken(self) -> Place {
        Place(self.emptied().0 & !(Self::TURN - 1) | Self::LOCAL)
    }

    /// Whether both are of one turn: what was read in between is of one life and one move.
    pub fn is_same_turn(self, other: Place) -> bool {
        self.0 >> 32 == other.0 >> 32
    }
}

/// The word of a segment.
#[repr(transparent)]
pub struct PlaceWord<W = AtomicU64>(pub W);

impl<W: AtomicWord> PlaceWord<W> {
    pub fn load(&self) -> Place {
        // Acquire pairs with the release of every change: what a word says of the file is so.
        Place(self.0.load(Acquire))
    }

    /// Changes a word that is as it was seen.
    pub fn change(&self, from: Place, to: Place) -> bool {
        self.0.compare_exchange(from.0, to.0, AcqRel).is_ok()
    }

    /// Changes a word as `to` says, which may be asked again; `None` from it leaves the word. Returns what was before.
    pub fn update(&self, mut to: impl FnMut(Place) -> Option<Place>) -> Option<Place> {
        loop {
            let before = self.load();
            if self.change(before, to(before)?) {
                return Some(before);
            }
        }
    }

    /// A reader wants chunks: `false` where they have come meanwhile.
    pub(super) fn want(&self, chunks: u8) -> bool {
        let wanted = |place: Place| {
            let missing = chunks & !place.here();
            (missing != 0).then(|| place.with_wanted(missing).without(Place::FAILED))
        };
        self.update(wanted).is_some()
    }

    /// The same of what will be wanted, as it seems: only what the server has. What is read ahead may have been let go,
    /// and the segment be another's by now.
    pub(super) fn want_ahead(&self, chunks: u8) -> bool {
        let wanted = |place: Place| {
            let missing = chunks & !place.here() & !place.wanted();
            let wanted = place.with_wanted(missing).without(Place::FAILED);
            (missing != 0 && place.has(Place::FAR)).then_some(wanted)
        };
        self.update(wanted).is_some()
    }

    /// A reader has what it wants, as it seems: the segment stays a while.
    pub fn note_used(&self, seen: Place) {
        if !seen.has(Place::USED) {
            self.change(seen, seen.with(Place::USED));
        }
    }

    /// Whether chunks that were read since the word was `seen` are what the segment had.
    pub fn is_still(&self, chunks: u8, seen: Place) -> bool {
        // Pairs with the fence in `begin_moving_out`: who reads what a move has left sees the move.
        W::fence(Acquire);
        let place = self.load();
        place.is_same_turn(seen) && chunks & !place.here() == 0
    }

    /// A free segment is taken for new data: `false` where the supervisor is at it, or the word is not as it was seen.
    pub fn take(&self, seen: Place) -> bool {
        !seen.has(Place::MOVING) && self.change(seen, seen.taken())
    }

    /// What a segment was taken for is written whole.
    pub fn note_written(&self) {
        self.update(|place| Some(place.with(Place::ALL | Place::WRITTEN)));
    }

    /// The supervisor has a copy of what the segment had when its word was `seen`: `false` where that is over.
    pub fn note_copied(&self, seen: Place) -> bool {
        self.update(|now| now.is_same_turn(seen).then(|| now.with(Place::FAR))).is_some()
    }

    /// The supervisor begins to let go of what the file has.
    pub fn begin_moving_out(&self, seen: Place) -> bool {
        let has_begun = self.change(seen, seen.emptied().with(Place::MOVING));
        // Pairs with the fence in `is_still`.
        W::fence(Release);
        has_begun
    }

    /// It has let go; where nobody has data there, of the copy too.
    pub fn end_moving_out(&self, is_live: bool, has_let_go: bool) {
        let gone = if has_let_go { Place::MOVING | Place::LOCAL } else { Place::MOVING };
        let gone = if is_live { gone } else { gone | Place::WRITTEN | Place::FAR };
        self.update(|now| Some(now.without(gone)));
    }

    /// The supervisor begins to write what comes back. Returns the word before; `None` where what was wanted is over.
    pub fn begin_moving_in(&self, seen: Place) -> Option<Place> {
        let begin = |now: Place| {
            (now.is_same_turn(seen) && !now.has(Place::MOVING))
                .then(|| now.with(Place::MOVING | Place::LOCAL))
        };
        self.update(begin)
    }

    /// Chunks have come. Who asked has a turn to read them before they go again.
    pub fn end_moving_in(&self, chunks: u8) {
        self.update(|now| Some(now.with_here(chunks).with(Place::USED).without(Place::MOVING)));
    }
}
