//! What lies where in the swap file.
//!
//! A segment begins with 64 bytes of its own ([`put_segment_header`]); then blobs follow each other,
//! each at a multiple of 64 bytes: header, bytes, padding. Zeros end the blobs of a segment. No
//! blob crosses a segment's end, and none is longer than 4112 bytes, so two pages of the file
//! from the one on in which it begins always hold it whole.

use core::num::NonZeroU32;

use super::super::blob::{Blob, BlobHeader, HEADER_BYTES, Packing};
use super::super::compress::{Corrupt, PageBytes};
use crate::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use crate::units::{PAGE_SIZE, PageNum};

/// What a location counts.
pub(super) const GRANULE_BYTES: usize = 64;
const SEGMENT_GRANULES: u32 = (SEGMENT_BYTES / GRANULE_BYTES) as u32;
pub(super) const BLOBS_MAX: usize = SEGMENT_GRANULES as usize - 1;
const SEGMENT_MAGIC: u32 = 0x5153_4547;
/// Bytes that hold any blob, from the start of the page of the file in which it begins.
const READ_BYTES: usize = 2 * PAGE_SIZE;

const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_GRANULES as u64 == 1 << 32);
const _: () = assert!(PAGE_SIZE - GRANULE_BYTES + HEADER_BYTES + PAGE_SIZE <= READ_BYTES);

/// Where a blob lies: segment and offset, in units of 64 bytes. Never 0, because no blob lies
/// where a segment has its own header.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Location(NonZeroU32);

impl Location {
    /// The first place of the first segment.
    pub const FIRST: Location = Location(NonZeroU32::MIN);

    /// The location with this number, as a page's word keeps it.
    pub const fn new(number: u32) -> Option<Location> {
        match NonZeroU32::new(number) {
            Some(number) if number.get() % SEGMENT_GRANULES != 0 => Some(Location(number)),
            _ => None,
        }
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }

    pub fn segment(self) -> Segment {
        Segment(self.0.get() / SEGMENT_GRANULES)
    }

    fn offset_bytes(self) -> usize {
        (self.0.get() % SEGMENT_GRANULES) as usize * GRANULE_BYTES
    }

    /// What to read to have this blob whole.
    pub fn plan(self) -> ReadPlan {
        let offset = self.offset_bytes() / PAGE_SIZE * PAGE_SIZE;
        ReadPlan {
            offset: self.segment().offset() + offset as u64,
            length: READ_BYTES.min(SEGMENT_BYTES - offset),
        }
    }
}

/// A read from the swap file: whole pages, within one segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadPlan {
    pub offset: u64,
    pub length: usize,
}

impl ReadPlan {
    /// The same read, longer, so that it has another blob of the same segment too. `None` where
    /// that lies elsewhere, or too far away for `bytes_max`.
    pub fn with(self, location: Location, bytes_max: usize) -> Option<ReadPlan> {
        let other = location.plan();
        let offset = self.offset.min(other.offset);
        let end = (self.offset + self.length as u64).max(other.offset + other.length as u64);
        let is_same_segment =
            self.offset / SEGMENT_BYTES as u64 == u64::from(location.segment().number());
        let length = (end - offset) as usize;
        (is_same_segment && length <= bytes_max).then_some(ReadPlan { offset, length })
    }

    /// Unpacks the page whose blob lies at `location` from the `bytes` that this read gave.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] where the bytes are not what `owner` once stored; `out` then holds garbage.
    pub fn unpack(
        self,
        bytes: &[u8],
        location: Location,
        owner: PageNum,
        out: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        self.blob(bytes, location).ok_or(Corrupt)?.unpack(owner, out)
    }

    /// Whether the page whose blob lies at `location` did not pack.
    pub fn is_raw(self, bytes: &[u8], location: Location) -> bool {
        self.blob(bytes, location).is_some_and(|blob| blob.kind == Packing::Raw)
    }

    fn blob(self, bytes: &[u8], location: Location) -> Option<Blob<'_>> {
        let at = location.segment().offset() + location.offset_bytes() as u64;
        let start = at.checked_sub(self.offset)?;
        blob_at(bytes, start as usize).map(|(blob, _)| blob)
    }
}

/// A segment of the file, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Segment(u32);

impl Segment {
    pub fn new(number: u32) -> Option<Segment> {
        ((number as usize) < SEGMENTS_MAX).then_some(Segment(number))
    }

    pub fn number(self) -> u32 {
        self.0
    }

    /// Where it begins in the file.
    pub fn offset(self) -> u64 {
        u64::from(self.0) * SEGMENT_BYTES as u64
    }

    /// What to read to have it whole.
    pub fn plan(self) -> ReadPlan {
        ReadPlan { offset: self.offset(), length: SEGMENT_BYTES }
    }

    pub(super) fn location(self, offset_bytes: usize) -> Option<Location> {
        let granule = (offset_bytes / GRANULE_BYTES) as u32;
        (granule < SEGMENT_GRANULES)
            .then(|| Location::new(self.0 * SEGMENT_GRANULES + granule))
            .flatten()
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    /// Word and bit in a member's segment map.
    pub(super) fn bit(self) -> (usize, u64) {
        (self.index() / 64, 1 << (self.0 % 64))
    }
}

/// All blobs of a segment that was read whole; none if it is not the segment that was written.
/// Their bytes are not checked, and they may be long dead: the location in the owner's word says
/// which is not.
pub fn segment_blobs(
    buffer: &[u8],
    segment: Segment,
) -> impl Iterator<Item = (Location, Blob<'_>)> {
    let used = used_bytes(buffer, segment).unwrap_or(0);
    let buffer = buffer.get(..used).unwrap_or(&[]);
    let mut at = GRANULE_BYTES;
    core::iter::from_fn(move || {
        let (blob, next) = blob_at(buffer, at)?;
        let location = segment.location(at)?;
        at = next;
        Some((location, blob))
    })
}

/// The blob at an offset, and where the next one would be.
fn blob_at(buffer: &[u8], at: usize) -> Option<(Blob<'_>, usize)> {
    let (words, rest) = buffer.get(at..)?.split_first_chunk::<HEADER_BYTES>()?;
    let [low, high] = words.as_chunks::<8>().0 else {
        return None;
    };
    let header = BlobHeader::from_words([u64::from_ne_bytes(*low), u64::from_ne_bytes(*high)])?;
    let BlobHeader { owner, kind, hash, length } = header;
    let blob = Blob { owner, kind, hash, bytes: rest.get(..length)? };
    Some((blob, at + blob_bytes(length)))
}

/// Room that a blob of so many packed bytes takes.
pub(super) const fn blob_bytes(length: usize) -> usize {
    (HEADER_BYTES + length).next_multiple_of(GRANULE_BYTES)
}

/// Writes a blob into room of [`blob_bytes`].
pub(super) fn put_blob(room: &mut [u8], blob: &Blob<'_>) {
    let [low, high] = blob.header().to_words();
    let (header, rest) = room.split_at_mut(HEADER_BYTES);
    header[..8].copy_from_slice(&low.to_ne_bytes());
    header[8..].copy_from_slice(&high.to_ne_bytes());
    let (bytes, padding) = rest.split_at_mut(blob.bytes.len());
    bytes.copy_from_slice(blob.bytes);
    padding.fill(0);
}

/// Writes the header of a segment: its number, its blobs, and the bytes that they and the header take.
pub(super) fn put_segment_header(buffer: &mut [u8], segment: Segment, blobs: u32, used: u32) {
    let words = [SEGMENT_MAGIC, segment.number(), blobs, used];
    for (place, word) in buffer.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *place = word.to_ne_bytes();
    }
}

/// The bytes that the header says are used, if it is the header of `segment`.
fn used_bytes(buffer: &[u8], segment: Segment) -> Option<usize> {
    let [magic, number, _, used] =
        buffer.as_chunks::<4>().0.first_chunk::<4>()?.map(u32::from_ne_bytes);
    (magic == SEGMENT_MAGIC && number == segment.number()).then_some(used as usize)
}
