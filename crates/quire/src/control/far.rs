//! A swap tier on a server, as members and the supervisor share it.
//!
//! With `--far` the swap file holds only a part of its segments: the supervisor copies those that have lain there
//! for long to a server, and lets go of what the file has of them by punching a hole. A segment lies at the same
//! place of the file whenever it is there, so a page's word knows nothing of all this. A reader that misses
//! something asks the supervisor, which writes it back to its place.
//!
//! One word says all of a segment ([`PlaceWord`]). What is taken is counted before the word says so: a member that is
//! killed in between makes the file smaller by a segment, never larger.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

use super::place::{Place, PlaceWord};
use super::{SEGMENT_WORDS, SEGMENTS_MAX, numbers_of};
use crate::sys::futex::{self, Reach};

#[repr(C)]
pub struct Far {
    /// 1 where there is such a tier.
    pub is_on: AtomicU32,
    /// Most segments that the file may hold, some of them kept for what is fetched.
    pub local_max: AtomicU32,
    pub local_kept: AtomicU32,
    /// Segments of which the file may have blocks.
    pub local: AtomicU32,
    /// Segments from here on were never taken.
    pub end: AtomicU32,
    /// Changes with every request: the supervisor sleeps on it.
    pub calls: AtomicU32,
    /// Changes when the file has room again: writers sleep on it.
    pub room: AtomicU32,
    /// Changes when something has come, or will not: readers sleep on it.
    pub arrivals: AtomicU32,
    /// Changes as long as the supervisor lives: several times a second.
    pub beats: AtomicU32,
    /// 1 where a member has found that it does not. Each beat makes it 0.
    pub is_dead: AtomicU32,
    /// Segments that the server has. Statistics, as what follows (Relaxed).
    pub segments: AtomicU32,
    pub segments_max: AtomicU32,
    /// Chunks that came from there, and segments that went.
    pub fetched: AtomicU64,
    pub copied: AtomicU64,
    /// Segments that the supervisor should look at, a bit each: readers want something of them, or they are written.
    posted: [AtomicU64; SEGMENT_WORDS],
    /// The words of it that may have bits.
    posted_words: [AtomicU64; SEGMENT_WORDS / 64],
    places: [PlaceWord; SEGMENTS_MAX],
}

impl Far {
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed) != 0
    }

    pub fn place(&self, segment: u32) -> &PlaceWord {
        &self.places[segment as usize]
    }

    /// Takes a free segment's place for new data: `false` where the supervisor is at it, or where it would be one
    /// more than the file may hold. The caller has a ref to the segment, which nobody else has.
    pub fn take(&self, segment: u32) -> bool {
        loop {
            let before = self.place(segment).load();
            let is_new = !before.has(Place::LOCAL);
            if before.has(Place::MOVING) || is_new && !self.count_local(self.most_written()) {
                return false;
            }
            if self.place(segment).take(before) {
                if self.end.load(Relaxed) <= segment {
                    self.end.fetch_max(segment + 1, Relaxed);
                }
                return true;
            }
            if is_new {
                self.local.fetch_sub(1, Relaxed);
            }
        }
    }

    /// Segments below this may be taken: where the file is full, only those that it has something of.
    pub fn takable(&self, max: u32) -> u32 {
        if self.is_full() { max.min(self.end.load(Relaxed)) } else { max }
    }

    /// Whether the file has as much as it may: what is written next waits for the server to take some of it.
    pub fn is_full(&self) -> bool {
        self.is_on() && self.local.load(Relaxed) >= self.most_written()
    }

    /// Whether [`Self::take`] may go well, as it looks.
    pub fn may_take(&self, segment: u32) -> bool {
        let place = self.place(segment).load();
        !place.has(Place::MOVING)
            && (place.has(Place::LOCAL) || self.local.load(Relaxed) < self.most_written())
    }

    /// Segments that the file may hold of what is written there, so that some can be fetched.
    fn most_written(&self) -> u32 {
        self.local_max.load(Relaxed).saturating_sub(self.local_kept.load(Relaxed))
    }

    /// Counts a segment more in the file, if that does not make more than `most`.
    pub fn count_local(&self, most: u32) -> bool {
        // Relaxed: a count.
        self.local.fetch_update(Relaxed, Relaxed, |local| (local < most).then(|| local + 1)).is_ok()
    }

    /// A segment that was taken is written whole: the supervisor may copy it.
    pub fn note_written(&self, segment: u32) {
        self.place(segment).note_written();
        self.post(segment);
    }

    /// A reader wants chunks that the file does not have. Where they have come meanwhile, nothing is asked.
    pub fn want(&self, segment: u32, chunks: u8) {
        if self.place(segment).want(chunks) {
            self.post(segment);
        }
    }

    /// A reader will want chunks, as it seems.
    pub fn want_ahead(&self, segment: u32, chunks: u8) {
        if self.place(segment).want_ahead(chunks) {
            self.post(segment);
        }
    }

    /// Has the supervisor look at a segment.
    fn post(&self, segment: u32) {
        let word = segment as usize / 64;
        // Release pairs with the acquire in `take_posted`: the inner one is there when the outer one says so.
        self.posted[word].fetch_or(1 << (segment % 64), Release);
        self.posted_words[word / 64].fetch_or(1 << (word % 64), Release);
        self.call();
    }

    /// The supervisor lives.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Relaxed);
        self.is_dead.store(0, Relaxed);
    }

    /// Wakes the supervisor.
    pub fn call(&self) {
        self.calls.fetch_add(1, Release);
        futex::wake(&self.calls, 1, Reach::Tree);
    }

    /// For the supervisor: the segments that it should look at.
    pub fn take_posted(&self, mut each: impl FnMut(u32)) {
        for (at, words) in self.posted_words.iter().enumerate() {
            if words.load(Relaxed) == 0 {
                continue;
            }
            for word in numbers_of(at, words.swap(0, Acquire)) {
                numbers_of(word, self.posted[word].swap(0, Acquire))
                    .for_each(|segment| each(segment as u32));
            }
        }
    }

    /// Wakes readers, who look at the words that they wait for.
    pub fn wake_readers(&self) {
        self.arrivals.fetch_add(1, Release);
        futex::wake(&self.arrivals, u32::MAX, Reach::Tree);
    }
}
