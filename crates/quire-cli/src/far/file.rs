//! What is on this machine of the segments: the swap file, or one in memory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use aligned_vec::{AVec, ConstAlign};
use quire::control::SEGMENT_BYTES;
use quire::control::place::CHUNK_BYTES;
use rustix::fs::{FallocateFlags, fallocate};

/// Bytes that direct I/O takes.
pub(super) type Aligned = AVec<u8, ConstAlign<4096>>;

pub(super) fn aligned(length: usize) -> Aligned {
    Aligned::from_iter(4096, std::iter::repeat_n(0, length))
}

pub(crate) struct SegmentFile {
    file: File,
    /// Its pages are in memory: a write does not wait for a disk.
    is_in_memory: bool,
}

impl SegmentFile {
    pub(super) fn new(file: OwnedFd, is_in_memory: bool) -> SegmentFile {
        SegmentFile { file: file.into(), is_in_memory }
    }

    /// A descriptor for members.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// Makes it as large as it may become; it takes no more room by that.
    pub(super) fn set_segments(&self, segments: u32) -> io::Result<()> {
        self.file.set_len(offset_of(segments, 0))
    }

    pub(super) fn read(&self, segment: u32) -> io::Result<Aligned> {
        let mut bytes = aligned(SEGMENT_BYTES);
        self.file.read_exact_at(&mut bytes, offset_of(segment, 0))?;
        Ok(bytes)
    }

    /// Writes `chunks`, of which `bytes` have all from the `first` on; other tasks go on meanwhile.
    pub(super) async fn write(
        self: &Arc<Self>,
        segment: u32,
        chunks: u8,
        first: usize,
        bytes: Arc<Aligned>,
    ) -> io::Result<()> {
        let this = Arc::clone(self);
        let write = move || {
            let count = bytes.len() / CHUNK_BYTES;
            if chunks.count_ones() as usize == count {
                return this.file.write_all_at(&bytes, offset_of(segment, first));
            }
            let mut wanted = (first..)
                .zip(bytes.chunks(CHUNK_BYTES))
                .filter(|(chunk, _)| chunks >> chunk & 1 != 0);
            wanted.try_for_each(|(chunk, bytes)| {
                this.file.write_all_at(bytes, offset_of(segment, chunk))
            })
        };
        // A thread more would take longer than the write itself.
        if self.is_in_memory { write() } else { tokio::task::spawn_blocking(write).await? }
    }

    /// Gives back what it has of a segment.
    pub(super) fn punch(&self, segment: u32) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, offset_of(segment, 0), SEGMENT_BYTES as u64)?)
    }
}

fn offset_of(segment: u32, chunk: usize) -> u64 {
    u64::from(segment) * SEGMENT_BYTES as u64 + (chunk * CHUNK_BYTES) as u64
}
