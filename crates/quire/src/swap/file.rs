//! The swap file: a log of segments that the processes of a tree share.
//!
//! Owns this member's side of it: which segments it holds live blobs in, how many, and in what
//! order segments are taken and let go. What lies where in a segment is [`layout`]'s; filling and
//! writing one is [`Writer`]'s; the transfers are [`super::io`]'s.
//!
//! # A segment's life
//!
//! Free (`Control::segment_refs` is 0) -> open (a [`Writer`] took it: refs 1, the bit in this
//! member's map set, nothing live) -> written (the write succeeded: its blobs are live) -> let go
//! when its last live blob is freed. It is not written again before every member that holds live data
//! in it, after forks, has let go of it, so a location names the same bytes for as long as any page's
//! word has it.
//!
//! A segment is taken by refs first, bit second, and let go by bit first, refs second. A member
//! that dies in between leaves a segment that no member uses, never one that is used twice: the
//! supervisor drops one ref for each bit in a dead member's map, and a thread that still runs there none
//! for a bit that it finds gone.
//!
//! # Locks
//!
//! None: counts are atomics. A location in a page's word is loaded, freed or replaced under that
//! page's lock, as in the pool; a segment that is read for more than one page's sake is
//! [pinned](SwapSegments::pin) first.

#![deny(unsafe_code)]

#[cfg(test)]
mod far_tests;
mod layout;
#[cfg(test)]
#[allow(unsafe_code, reason = "a control page and a file, made for a test")]
mod tests;
mod writer;

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

pub use self::layout::{Location, ReadPlan, Segment, segment_blobs};
pub use self::writer::{SegmentPurpose, Writer, Written};
use super::FarTier;
use crate::control::{Control, MEMBERS_MAX, SEGMENTS_MAX};
use crate::steps::{Step, reach};
use crate::sys::Errno;
use crate::sys::memory::Table;

/// Segments that only the cleaner may take: without them a full file could never be cleaned.
const SEGMENTS_RESERVED: u32 = 1;
/// Most segments that are cleaned into one.
const VICTIMS_MAX: usize = 8;
/// How much of a segment the live blobs of those may fill, in thousandths: by number, and blobs
/// differ in length, so some room is left for that.
const CLEAN_SHARE_MAX: u32 = 900;
/// A search for a free segment starts again at the file's beginning after so many: low segments
/// that other members let go are found again, and the file stays short.
const TAKES_PER_SWEEP: u32 = 64;

/// Every segment that may be taken is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapFull;

pub struct SwapSegments {
    control: &'static Control,
    far: Option<FarTier>,
    /// See [`FarTier::wait_for_room`].
    room_missed: AtomicU32,
    /// This member's slot: changes at fork only, when no other thread is here (Relaxed).
    slot: AtomicU32,
    /// Per segment [`SegmentCount`], this member's alone.
    counts: Table<AtomicU32>,
    /// Segments held. A statistic (Relaxed).
    held: AtomicU32,
    /// Where the next search begins, and the searches so far. Hints (Relaxed).
    next_free: AtomicU32,
    takes: AtomicU32,
}

/// What a member knows of a segment: live blobs and pins (low half), blobs written (high half).
#[derive(Clone, Copy)]
struct SegmentCount(u32);

impl SegmentCount {
    const WRITTEN_SHIFT: u32 = 16;
    const LIVE: u32 = (1 << Self::WRITTEN_SHIFT) - 1;

    fn new(written: usize) -> SegmentCount {
        let written = written as u32 & Self::LIVE;
        SegmentCount(written << Self::WRITTEN_SHIFT | written)
    }

    fn live(self) -> u32 {
        self.0 & Self::LIVE
    }

    fn written(self) -> u32 {
        self.0 >> Self::WRITTEN_SHIFT
    }
}

impl SwapSegments {
    /// This member's side, for the slot that the supervisor gave it.
    pub fn new(control: &'static Control, slot: u32) -> Result<SwapSegments, Errno> {
        if slot as usize >= MEMBERS_MAX {
            return Err(Errno::INVAL);
        }
        Ok(SwapSegments {
            control,
            far: FarTier::of(control),
            room_missed: AtomicU32::new(0),
            slot: AtomicU32::new(slot),
            counts: Table::new(SEGMENTS_MAX)?,
            held: AtomicU32::new(0),
            next_free: AtomicU32::new(0),
            takes: AtomicU32::new(0),
        })
    }

    /// In a fork's child, before any other thread runs there: the counts are inherited as they
    /// are; the supervisor has copied the parent's map to the new slot and raised the refs. The
    /// child's copy of every [`Writer`] must be given up ([`Writer::cancel`]) after this: the
    /// segment it was filling is the parent's to write.
    pub fn after_fork_in_child(&self, slot: u32) {
        debug_assert!((slot as usize) < MEMBERS_MAX);
        self.slot.store(slot, Relaxed);
    }

    /// Segments in which this member holds live blobs, and those that its writers have open.
    pub fn segments_held(&self) -> u32 {
        self.held.load(Relaxed)
    }

    /// Whether a writer could open a segment now, as far as the count says.
    pub fn has_room(&self) -> bool {
        let used = self.control.segments_used.load(Relaxed);
        used.saturating_add(SEGMENTS_RESERVED) < self.segments_max() && !self.control.far.is_full()
    }

    /// Whether pages that are in memory may keep their places in the file.
    pub fn has_ample_room(&self) -> bool {
        let used = self.control.segments_used.load(Relaxed);
        used < self.segments_max() / 4 * 3
    }

    /// Drops blobs that pages' words named, or that were written for pages that have moved on.
    /// The caller holds those pages' locks, and no word has their locations any more.
    pub fn free(&self, segment: Segment, blobs: u32) {
        self.drop_some(segment, blobs);
    }

    /// Keeps a segment from being let go, so that what was read from it stays what its locations
    /// name: a page's word that has one of them while the pin holds means these very bytes.
    /// `false` where nothing in it is live. Every pin needs its [`SwapSegments::unpin`].
    #[must_use]
    pub fn pin(&self, segment: Segment) -> bool {
        let Some(count) = self.counts.get(segment.index()) else {
            return false;
        };
        // Acquire pairs with the release in `publish`: the segment is written.
        count
            .fetch_update(Acquire, Relaxed, |count| {
                (SegmentCount(count).live() != 0).then(|| count + 1)
            })
            .is_ok()
    }

    pub fn unpin(&self, segment: Segment) {
        self.drop_some(segment, 1);
    }

    /// The segments that are best cleaned: those with the smallest shares of live blobs, as many
    /// as fit into one segment together, and none that another process shares (letting go of it
    /// would free nothing). Empty where every segment is nearly full of live blobs.
    ///
    /// Each is pinned. The caller reads it ([`Segment::plan`]), has a writer that was opened to
    /// [clean](SegmentPurpose::Clean) take the blobs that are still some page's ([`segment_blobs`]), and
    /// unpins it. What room is left in the writer is for pages that go out.
    pub fn victims(&self) -> [Option<Segment>; VICTIMS_MAX] {
        let mut found: [Option<(u32, Segment)>; VICTIMS_MAX] = [None; VICTIMS_MAX];
        for segment in self.held_segments() {
            let count = SegmentCount(self.counts[segment.index()].load(Relaxed));
            let is_shared = self.control.segment_refs[segment.index()].load(Relaxed) > 1;
            let plan = segment.plan();
            let is_far = self.far.is_some_and(|far| !far.is_here(plan.offset, plan.length));
            // Nothing live: open, or about to be let go. What is on a server would be long in coming.
            if count.live() == 0 || is_shared || is_far {
                continue;
            }
            let mut next = Some((count.live() * 1000 / count.written().max(1), segment));
            for place in &mut found {
                if place.is_none_or(|kept| next.is_some_and(|new| new.0 < kept.0)) {
                    core::mem::swap(place, &mut next);
                }
            }
        }
        let mut room = CLEAN_SHARE_MAX;
        found.map(|found| {
            let (share, segment) = found?;
            room = room.checked_sub(share)?;
            self.pin(segment).then_some(segment)
        })
    }

    /// Segments whose bit is set in our map.
    fn held_segments(&self) -> impl Iterator<Item = Segment> {
        let words = (self.segments_max() as usize).div_ceil(64);
        self.map()[..words].iter().enumerate().flat_map(|(index, word)| {
            let mut bits = word.load(Relaxed);
            core::iter::from_fn(move || {
                let bit = bits.trailing_zeros();
                // The lowest bit set goes; 0 stays 0.
                bits &= bits.wrapping_sub(1);
                (bit < 64).then_some(bit)
            })
            .filter_map(move |bit| Segment::new(index as u32 * 64 + bit))
        })
    }

    fn take_segment(&self, purpose: SegmentPurpose) -> Result<Segment, SwapFull> {
        let reserved = match purpose {
            SegmentPurpose::Reclaim => SEGMENTS_RESERVED,
            SegmentPurpose::Clean => 0,
        };
        let max = self.segments_max();
        let used = &self.control.segments_used;
        // Relaxed: a count; the segment itself is settled by its refs below.
        used.fetch_update(Relaxed, Relaxed, |used| {
            (used.saturating_add(reserved) < max).then(|| used + 1)
        })
        .map_err(|_| SwapFull)?;
        let is_new_sweep = self.takes.fetch_add(1, Relaxed).is_multiple_of(TAKES_PER_SWEEP);
        let next_free = if is_new_sweep { 0 } else { self.next_free.load(Relaxed) };
        let find = || {
            let end = self.far.map_or(max, |far| far.takable(max));
            let first = next_free.min(end);
            (first..end).chain(0..first).find(|index| self.take_place(*index))
        };
        let free = find().or_else(|| {
            self.far?.wait_for_room(&self.room_missed);
            find()
        });
        let Some(segment) = free.and_then(Segment::new) else {
            // The count still has a segment that is let go just now.
            used.fetch_sub(1, Relaxed);
            return Err(SwapFull);
        };
        self.next_free.store(segment.number() + 1, Relaxed);
        let (word, bit) = segment.bit();
        // Release: the supervisor, which may see the bit, sees the ref then.
        self.map()[word].fetch_or(bit, Release);
        self.held.fetch_add(1, Relaxed);
        reach(Step::SegmentTaken);
        Ok(segment)
    }

    /// Takes a ref to a segment that nobody has, and its place in the file.
    fn take_place(&self, number: u32) -> bool {
        let refs = &self.control.segment_refs[number as usize];
        if refs.load(Relaxed) != 0 || self.far.is_some_and(|far| !far.may_take(number)) {
            return false;
        }
        // Acquire pairs with the release in `let_go`: the last reader is done with it.
        if refs.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            return false;
        }
        let is_taken = self.far.is_none_or(|far| far.take(number));
        if !is_taken {
            refs.fetch_sub(1, Release);
        }
        is_taken
    }

    /// A segment is written: its blobs live.
    fn publish(&self, segment: Segment, blobs: usize) {
        debug_assert!(blobs != 0);
        if let Some(far) = self.far {
            far.note_written(segment.number());
        }
        // Release pairs with the acquire in `pin`.
        self.counts[segment.index()].store(SegmentCount::new(blobs).0, Release);
        reach(Step::SegmentLive);
    }

    /// So many live blobs, or pins, less.
    fn drop_some(&self, segment: Segment, some: u32) {
        let Some(count) = self.counts.get(segment.index()) else {
            return;
        };
        // AcqRel: the last one sees that all others are done with the segment.
        let before = count.fetch_update(AcqRel, Relaxed, |count| {
            (SegmentCount(count).live() >= some).then(|| count - some)
        });
        debug_assert!(before.is_ok(), "{segment:?} has less than {some} live");
        if before.is_ok_and(|count| SegmentCount(count).live() == some) {
            self.let_go(segment);
        }
    }

    /// This member does not need a segment any more.
    fn let_go(&self, segment: Segment) {
        let (word, bit) = segment.bit();
        self.held.fetch_sub(1, Relaxed);
        // Release, and the bit first: the module's text says what a crash leaves.
        if self.map()[word].fetch_and(!bit, Release) & bit == 0 {
            // This process is dying, and the supervisor has seen it: the side that finds the bit drops the ref.
            return;
        }
        // AcqRel pairs with `take_segment`, here and in other members.
        let refs = self.control.segment_refs[segment.index()].fetch_sub(1, AcqRel);
        debug_assert!(refs != 0, "{segment:?} had no refs");
        if refs == 1 {
            // After the refs: a member that finds room in the count finds a segment without refs.
            self.control.segments_used.fetch_sub(1, Release);
            self.next_free.fetch_min(segment.number(), Relaxed);
        }
    }

    fn map(&self) -> &[AtomicU64] {
        &self.control.segment_maps[self.slot.load(Relaxed) as usize]
    }

    fn segments_max(&self) -> u32 {
        self.control.segments_max.load(Relaxed).min(SEGMENTS_MAX as u32)
    }
}
