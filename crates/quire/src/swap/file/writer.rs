//! Filling a segment and writing it.
//!
//! Owns one segment's buffer and the list of what is in it. Belongs to one thread at a time (the
//! engine keeps it behind its own lock), which may sleep in [`Writer::write_out`].

use super::super::blob::Blob;
use super::super::io::{Job, Ring};
use super::layout::{BLOBS_MAX, GRANULE_BYTES, blob_bytes, put_blob, put_segment_header};
use super::{Location, Segment, SwapFull, SwapSegments};
use crate::control::SEGMENT_BYTES;
use crate::steps::{Step, reach};
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::units::{PAGE_SIZE, PageNum};

const OWNER_WORDS: usize = 512;

/// What a segment is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentPurpose {
    /// Pages go out.
    Reclaim,
    /// Live blobs of a sparse segment are gathered: may use the last segment.
    Clean,
}

/// A blob that a write made durable: the page's word may change to `location` now, if it still
/// says what it said when the blob was added; if not, the location is to be
/// [freed](SwapSegments::free).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    pub owner: PageNum,
    /// What the caller gave with the blob: where it was until now.
    pub tag: u64,
    pub location: Location,
}

/// One segment in the making.
pub struct Writer {
    /// The segment's bytes, page-aligned for direct I/O.
    buffer: Table<u8>,
    /// Owner, tag and location of each blob in it.
    entries: Table<[u64; 3]>,
    /// A bit for each owner among them; owners may share one.
    owners: Table<u64>,
    /// The segment taken, with what is in it so far.
    open: Option<Open>,
}

#[derive(Clone, Copy)]
struct Open {
    segment: Segment,
    blobs: usize,
    used: usize,
}

impl Writer {
    pub fn new() -> Result<Writer, Errno> {
        Ok(Writer {
            buffer: Table::new(SEGMENT_BYTES)?,
            entries: Table::new(BLOBS_MAX)?,
            owners: Table::new(OWNER_WORDS)?,
            open: None,
        })
    }

    /// Takes a segment to fill, unless one is open.
    ///
    /// # Errors
    ///
    /// [`SwapFull`] where none is to be had.
    pub fn open(&mut self, file: &SwapSegments, purpose: SegmentPurpose) -> Result<(), SwapFull> {
        if self.open.is_none() {
            let segment = file.take_segment(purpose)?;
            self.owners.fill(0);
            self.open = Some(Open { segment, blobs: 0, used: GRANULE_BYTES });
        }
        Ok(())
    }

    /// Adds a blob to the open segment, which [has](Self::has) none of its page. `tag` comes back in [`Written`]. `false` where no segment is
    /// open, or it has no room for the blob.
    #[must_use]
    pub fn add(&mut self, blob: &Blob<'_>, tag: u64) -> bool {
        let Some(Open { segment, blobs, used }) = self.open else {
            return false;
        };
        let end = used + blob_bytes(blob.bytes.len());
        let Some(location) = segment.location(used).filter(|_| end <= SEGMENT_BYTES) else {
            return false;
        };
        debug_assert!(!self.has(blob.owner), "{:?} is there already", blob.owner);
        let (word, bit) = owner_bit(blob.owner);
        self.owners[word] |= bit;
        put_blob(&mut self.buffer[used..end], blob);
        self.entries[blobs] = [blob.owner.0, tag, u64::from(location.get())];
        self.open = Some(Open { segment, blobs: blobs + 1, used: end });
        true
    }

    /// Whether the open segment has bytes of this page. Others are for the next segment: the page may
    /// have come back, been written, and left again for the very place that the tag names, and its older
    /// bytes must not be taken for these.
    pub fn has(&self, owner: PageNum) -> bool {
        let (word, bit) = owner_bit(owner);
        let may_be_there = !self.is_empty() && self.owners[word] & bit != 0;
        may_be_there && self.entries[..self.len()].iter().any(|entry| entry[0] == owner.0)
    }

    #[cfg(test)]
    pub(super) fn segment(&self) -> Option<Segment> {
        self.open.map(|open| open.segment)
    }

    pub fn len(&self) -> usize {
        self.open.map_or(0, |open| open.blobs)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a blob of any length might no longer fit.
    pub fn is_full(&self) -> bool {
        const LONGEST: usize = blob_bytes(PAGE_SIZE);
        self.open.is_some_and(|open| open.used + LONGEST > SEGMENT_BYTES)
    }

    /// Writes the open segment, all of it, and closes it. All blobs that are listed count as live
    /// from now on: each location must end in a page's word or be freed.
    ///
    /// # Errors
    ///
    /// What the write says. The segment is then given back and nothing is listed; the blobs are
    /// where they were.
    pub fn write_out<'a>(
        &'a mut self,
        file: &SwapSegments,
        ring: &mut Ring,
    ) -> Result<impl Iterator<Item = Written> + use<'a>, Errno> {
        let mut blobs = 0;
        if let Some(open) = self.open.take() {
            blobs = open.blobs;
            self.finish(open, file, ring)?;
        }
        Ok(self.entries[..blobs].iter().filter_map(|&[owner, tag, location]| {
            let location = Location::new(location as u32)?;
            Some(Written { owner: PageNum(owner), tag, location })
        }))
    }

    /// Gives the open segment back unwritten; the blobs are where they were.
    pub fn cancel(&mut self, file: &SwapSegments) {
        if let Some(open) = self.open.take() {
            file.let_go(open.segment);
        }
    }

    fn finish(&mut self, open: Open, file: &SwapSegments, ring: &mut Ring) -> Result<(), Errno> {
        let Open { segment, blobs, used } = open;
        if blobs == 0 {
            file.let_go(segment);
            return Ok(());
        }
        let bytes = &mut *self.buffer;
        put_segment_header(bytes, segment, blobs as u32, used as u32);
        // Nothing of an earlier life may look like a blob.
        bytes[used..].fill(0);
        if let Some(cipher) = ring.cipher() {
            cipher.begin(segment);
            cipher.apply(segment.offset(), bytes);
        }
        let mut jobs = [Job::write(segment.offset(), bytes)];
        ring.run(&mut jobs);
        reach(Step::SegmentWritten);
        match jobs[0].result {
            Ok(()) => file.publish(segment, blobs),
            Err(_) => file.let_go(segment),
        }
        jobs[0].result
    }
}

fn owner_bit(owner: PageNum) -> (usize, u64) {
    (owner.index() / 64 % OWNER_WORDS, 1 << (owner.0 % 64))
}
