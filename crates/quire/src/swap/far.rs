//! A member's side of a swap tier on a server: what the swap file does not have is asked of the supervisor.
//!
//! Owns no state: all of it is in the control page ([`Far`]). Only threads that may sleep wait here.

#![deny(unsafe_code)]

use core::ops::Range;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::file::ReadPlan;
use crate::control::place::{CHUNK_BYTES, Place};
use crate::control::{Control, Far, SEGMENT_BYTES};
use crate::sys::futex::{self, Reach};
use crate::sys::{Errno, monotonic_ns};

/// How long a sleep lasts before the supervisor's pulse is felt.
const PULSE_MS: u64 = 500;
/// So many without a beat, and it is dead: 30 seconds.
const PULSES_MISSED_MAX: u32 = 60;
/// How long a writer waits for room in the file at a time.
const ROOM_MS: u64 = 100;
/// Which part of the file a stream may have read ahead, and how many segments at most: 2 MiB, as what others want comes
/// behind them.
const AHEAD_SHARE: u32 = 4;
const AHEAD_MAX: u32 = 8;

#[derive(Clone, Copy)]
pub struct FarTier {
    far: &'static Far,
    /// Whether a read waits for what the file does not have.
    waits: bool,
}

/// A part of a segment, as a transfer names it.
#[derive(Clone, Copy)]
struct Part {
    segment: u32,
    chunks: u8,
}

impl Part {
    fn of(offset: u64, length: usize) -> Part {
        let segment = (offset / SEGMENT_BYTES as u64) as u32;
        let start = (offset % SEGMENT_BYTES as u64) as usize;
        let Range { start, end } = start / CHUNK_BYTES..(start + length).div_ceil(CHUNK_BYTES);
        Part { segment, chunks: ((1u32 << end) - (1 << start)) as u8 }
    }
}

impl FarTier {
    /// That of a run, if it has one.
    pub fn of(control: &'static Control) -> Option<FarTier> {
        control.far.is_on().then_some(FarTier { far: &control.far, waits: true })
    }

    /// The same for a thread that must not sleep: what the file does not have fails with `EAGAIN`.
    pub(super) fn at_hand_only(self) -> FarTier {
        FarTier { waits: false, ..self }
    }

    /// Whether the file has all of a part, at this moment.
    pub(super) fn is_here(self, offset: u64, length: usize) -> bool {
        let Part { segment, chunks } = Part::of(offset, length);
        chunks & !self.far.place(segment).load().here() == 0
    }

    /// Whether the file has all of a part, at this moment. What it does not have is on its way from now on.
    pub(super) fn bring(self, offset: u64, length: usize) -> bool {
        let Part { segment, chunks } = Part::of(offset, length);
        let place = self.far.place(segment).load();
        let missing = chunks & !place.here();
        if missing & !place.wanted() != 0 {
            self.far.want(segment, missing);
        }
        missing == 0
    }

    /// Has on its way what a stream will want, in this order, as far as a part of the file holds it.
    pub fn bring_ahead(self, plans: impl Iterator<Item = ReadPlan>) {
        let most = (self.far.local_max.load(Relaxed) / AHEAD_SHARE).clamp(1, AHEAD_MAX);
        let mut parts = plans.map(|plan| Part::of(plan.offset, plan.length)).peekable();
        for _ in 0..most {
            let Some(mut part) = parts.next() else { return };
            while let Some(more) = parts.next_if(|next| next.segment == part.segment) {
                part.chunks |= more.chunks;
            }
            self.far.want_ahead(part.segment, part.chunks);
        }
    }

    /// Waits until the file has all of a part: it can be read, and [is so](Self::is_still) if that goes well.
    ///
    /// # Errors
    /// `EIO` where it is not to be had: the supervisor says so, or is dead. `EAGAIN` where it would have to be waited
    /// for, and the thread must not.
    pub(super) fn wait_for(self, offset: u64, length: usize) -> Result<Place, Errno> {
        let Part { segment, chunks } = Part::of(offset, length);
        let mut pulse = Pulse::new(self.far);
        let (mut has_asked, mut asked_ns) = (false, monotonic_ns());
        loop {
            // Acquire: the word is looked at after this, so that what comes later ends the sleep.
            let arrivals = self.far.arrivals.load(Acquire);
            let place = self.far.place(segment).load();
            let missing = chunks & !place.here();
            if missing == 0 {
                self.far.place(segment).note_used(place);
                return Ok(place);
            }
            let is_asked = missing & !place.wanted() == 0;
            if !is_asked && has_asked && place.has(Place::FAILED) {
                return Err(Errno::IO);
            }
            has_asked = true;
            // Who asked before may have died on its way, so that it is asked again now and then.
            let now = monotonic_ns();
            if !is_asked || now - asked_ns >= PULSE_MS * 1_000_000 {
                self.far.want(segment, missing);
                asked_ns = now;
                continue;
            }
            if !self.waits {
                return Err(Errno::AGAIN);
            }
            pulse.sleep(&self.far.arrivals, arrivals).map_err(|_| Errno::IO)?;
        }
    }

    /// Whether what was read of a part meanwhile is what the segment had when its place was `seen`.
    pub(super) fn is_still(self, offset: u64, length: usize, seen: Place) -> bool {
        let Part { segment, chunks } = Part::of(offset, length);
        self.far.place(segment).is_still(chunks, seen)
    }

    /// Takes a free segment's place for new data: `false` where it is moving, or would be one more than the file may
    /// hold.
    pub(super) fn take(self, segment: u32) -> bool {
        self.far.take(segment)
    }

    /// Waits a little for room in the file, which the supervisor makes. `missed` keeps what the counter of room was
    /// when a wait was for nothing: until that changes none is worth its time.
    pub(super) fn wait_for_room(self, missed: &AtomicU32) {
        let room = self.far.room.load(Acquire);
        self.far.call();
        if missed.load(Relaxed) == room.wrapping_add(1) {
            return;
        }
        futex::wait(&self.far.room, room, Reach::Tree, Some(ROOM_MS));
        if self.far.room.load(Acquire) == room {
            missed.store(room.wrapping_add(1), Relaxed);
        }
    }

    /// Segments below this may be taken.
    pub(super) fn takable(self, max: u32) -> u32 {
        self.far.takable(max)
    }

    /// Whether [`Self::take`] may go well.
    pub(super) fn may_take(self, segment: u32) -> bool {
        self.far.may_take(segment)
    }

    /// A segment is written.
    pub(super) fn note_written(self, segment: u32) {
        self.far.note_written(segment);
    }
}

/// Feels whether the supervisor lives. It is dead where a reader has slept often without a beat: by the reader's
/// own sleeps, not by a clock, so that a run that was stopped as a whole goes on.
struct Pulse {
    far: &'static Far,
    beats: u32,
    missed: u32,
}

impl Pulse {
    fn new(far: &'static Far) -> Pulse {
        Pulse { far, beats: far.beats.load(Relaxed), missed: 0 }
    }

    /// Sleeps until a word changes, for a while.
    ///
    /// # Errors
    /// The supervisor is dead.
    fn sleep(&mut self, word: &AtomicU32, seen: u32) -> Result<(), Dead> {
        if self.far.is_dead.load(Relaxed) != 0 {
            return Err(Dead);
        }
        let began = monotonic_ns();
        futex::wait(word, seen, Reach::Tree, Some(PULSE_MS));
        let beats = self.far.beats.load(Relaxed);
        if beats != self.beats {
            (self.beats, self.missed) = (beats, 0);
        } else if monotonic_ns() - began >= PULSE_MS * 1_000_000 {
            self.missed += 1;
        }
        if self.missed >= PULSES_MISSED_MAX {
            self.far.is_dead.store(1, Relaxed);
        }
        Ok(())
    }
}

struct Dead;
