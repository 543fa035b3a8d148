//! Filling a segment and writing it.
//!
//! Owns one segment's buffer and the list of what is in it. Belongs to one thread at a time (the
//! engine keeps it behind its own lock), which may sleep in [`Writer::write_out`].

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use super::super::blob::Blob;
use super::super::io::{Job, Ring};
use super::super::sparse::{Sparse, Zeroed};
use super::layout::{BLOBS_MAX, GRANULE_BYTES, SegmentHeader, blob_bytes, put_blob};
use super::{Location, Segment, SwapFile, SwapFull};
use crate::control::SEGMENT_BYTES;
use crate::units::{PAGE_SIZE, PageNum};

/// What a segment is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Pages go out.
    Reclaim,
    /// Live blobs of a sparse segment are gathered: may use the last segment.
    Clean,
}

/// A blob that a write made durable: the page's word may change to `location` now, if it still
/// says what it said when the blob was added; if not, the location is to be
/// [freed](SwapFile::free).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// The page.
    pub owner: PageNum,
    /// What the caller gave with the blob: where it was until now.
    pub tag: u64,
    /// Where it is.
    pub location: Location,
}

/// A line of the list: owner, tag, location.
struct Entry([AtomicU64; 3]);

// SAFETY: atomics only.
unsafe impl Zeroed for Entry {}

/// One segment in the making.
pub struct Writer {
    /// The segment's bytes, page-aligned for direct I/O.
    buffer: Sparse<AtomicU64>,
    entries: Sparse<Entry>,
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
    /// A writer with nothing open.
    ///
    /// # Errors
    ///
    /// What mmap says.
    pub fn new() -> Result<Writer, Errno> {
        Ok(Writer {
            buffer: Sparse::new(SEGMENT_BYTES / size_of::<AtomicU64>())?,
            entries: Sparse::new(BLOBS_MAX)?,
            open: None,
        })
    }

    /// Takes a segment to fill, unless one is open.
    ///
    /// # Errors
    ///
    /// [`SwapFull`] where none is to be had.
    pub fn open(&mut self, file: &SwapFile, purpose: Purpose) -> Result<(), SwapFull> {
        if self.open.is_none() {
            let segment = file.take_segment(purpose)?;
            self.open = Some(Open { segment, blobs: 0, used: GRANULE_BYTES });
        }
        Ok(())
    }

    /// Adds a blob to the open segment. `tag` comes back in [`Written`]. False if none is open,
    /// or it has no room for this one.
    #[must_use]
    pub fn add(&mut self, blob: &Blob<'_>, tag: u64) -> bool {
        let Some(Open { segment, blobs, used }) = self.open else {
            return false;
        };
        let end = used + blob_bytes(blob.bytes.len());
        let Some(location) = segment.location(used).filter(|_| end <= SEGMENT_BYTES) else {
            return false;
        };
        put_blob(&mut self.bytes()[used..end], blob);
        let entry = &self.entries[blobs].0;
        for (word, value) in entry.iter().zip([blob.owner.0, tag, u64::from(location.get())]) {
            // Relaxed: the list is this thread's.
            word.store(value, Relaxed);
        }
        self.open = Some(Open { segment, blobs: blobs + 1, used: end });
        true
    }

    /// The open segment.
    #[cfg(test)]
    pub(super) fn segment(&self) -> Option<Segment> {
        self.open.map(|open| open.segment)
    }

    /// Blobs in the open segment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.map_or(0, |open| open.blobs)
    }

    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a blob of any length might no longer fit.
    #[must_use]
    pub fn is_full(&self) -> bool {
        const LONGEST: usize = blob_bytes(PAGE_SIZE);
        self.open.is_some_and(|open| open.used + LONGEST > SEGMENT_BYTES)
    }

    /// Writes the open segment, all of it, and closes it. All that is listed counts as live from
    /// now on: each must end in a page's word or be freed.
    ///
    /// # Errors
    ///
    /// What the write says. The segment is then given back and nothing is listed; the blobs are
    /// where they were.
    pub fn write_out<'a>(
        &'a mut self,
        file: &SwapFile,
        ring: &mut Ring,
    ) -> Result<impl Iterator<Item = Written> + use<'a>, Errno> {
        let mut blobs = 0;
        if let Some(open) = self.open.take() {
            blobs = open.blobs;
            self.finish(open, file, ring)?;
        }
        Ok(self.entries[..blobs].iter().filter_map(Entry::get))
    }

    /// Gives the open segment back unwritten; the blobs are where they were.
    pub fn cancel(&mut self, file: &SwapFile) {
        if let Some(open) = self.open.take() {
            file.let_go(open.segment);
        }
    }

    fn finish(&mut self, open: Open, file: &SwapFile, ring: &mut Ring) -> Result<(), Errno> {
        let Open { segment, blobs, used } = open;
        if blobs == 0 {
            file.let_go(segment);
            return Ok(());
        }
        let bytes = self.bytes();
        SegmentHeader { blobs: blobs as u32, used: used as u32 }.write(bytes, segment);
        // Nothing of an earlier life may look like a blob.
        bytes[used..].fill(0);
        let mut jobs = [Job::write(segment.offset(), bytes)];
        ring.run(&mut jobs);
        match jobs[0].result {
            Ok(()) => file.publish(segment, blobs),
            Err(_) => file.let_go(segment),
        }
        jobs[0].result
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has SEGMENT_BYTES (`new`), and `self` is borrowed exclusively, so
        // nothing else refers to it.
        unsafe { core::slice::from_raw_parts_mut(self.buffer.as_ptr(), SEGMENT_BYTES) }
    }
}

impl Entry {
    fn get(&self) -> Option<Written> {
        let [owner, tag, location] = &self.0;
        // Relaxed: the list is this thread's.
        let read = |word: &AtomicU64| word.load(Relaxed);
        let location = Location::new(read(location) as u32)?;
        Some(Written { owner: PageNum(read(owner)), tag: read(tag), location })
    }
}
