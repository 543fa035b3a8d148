//! Where each frame of an archive lies, packed and unpacked.
//!
//! The index is made from the seek table where there is one, else from the headers of the frames and
//! of their blocks, which takes one small read a block (at most 128 KiB unpacked) and no unpacking.
//!
//! A wrong size would shift all that lies behind it, and neither a seek table nor a frame's header
//! has a checksum. So each is compared with the other, or, where there is no other, with the size of
//! the unpacked frame. Where all frames but the last are equally large, as `pack` makes them, the
//! first and the last are enough: a size that is wrong between them differs from the rest. Frames
//! without content are no part of that row, and each is checked.
//!
//! ```text
//! frame: 0xFD2FB528 | descriptor | [window] | [dictionary] | [content size] | blocks | [checksum]
//! block: 3 bytes: bit 0 last one, bits 1-2 kind, the rest its size
//! ```

use std::format;
use std::vec;
use std::vec::Vec;

use super::super::workers::{cpus, on_threads};
use super::seek_table::{self, SKIPPABLE_MAGIC, number};
use super::{Archive, FRAME_BYTES_MAX, Flaw, unpack};

const MAGIC: u32 = 0xFD2F_B528;
/// The lowest four bits of a skippable frame's magic number are free.
const SKIPPABLE_MASK: u32 = !0xf;
/// The longest header of a frame: magic, descriptor, window, dictionary, content size.
const HEADER_BYTES_MAX: usize = 4 + 1 + 1 + 4 + 8;
const CHECKSUM_BYTES: u64 = 4;
/// How much of the archive is read at once for its headers.
const READ_BYTES: usize = 64 << 10;

/// A frame with content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Frame {
    /// Where its content begins in the unpacked file.
    pub at: u64,
    /// Its unpacked size.
    pub bytes: usize,
    /// Where it begins in the archive.
    pub packed_at: u64,
    /// Its size there.
    pub packed_bytes: usize,
    /// What the seek table says its content's checksum is.
    pub checksum: Option<u32>,
}

/// The frames with content, in order.
pub(super) struct Index {
    pub frames: Vec<Frame>,
}

impl Index {
    pub fn read(archive: &Archive) -> Result<Index, Flaw> {
        let (mut frames, source) = match seek_table::read(archive)? {
            Some(frames) => (frames, SizeSource::SeekTable),
            None => {
                let walk = HeaderWalk { archive, chunk: Vec::new(), chunk_at: 0 };
                (walk.frames()?, SizeSource::Headers)
            }
        };
        for frame in &frames {
            if frame.bytes.max(frame.packed_bytes) > FRAME_BYTES_MAX {
                let what = format!(
                    "a frame of {} MiB is too large to be unpacked for every page of it; unpack \
                     the file and pack it with `quire pack`",
                    frame.bytes.max(frame.packed_bytes) >> 20
                );
                return Err(Flaw::Unsupported(frame.packed_at, what));
            }
        }
        check_sizes(archive, &frames, source)?;
        // Other tools keep metadata in frames without content.
        frames.retain(|frame| frame.bytes != 0);
        Ok(Index { frames })
    }

    /// The length of the unpacked file.
    pub fn bytes(&self) -> u64 {
        self.frames.last().map_or(0, |last| last.at + last.bytes as u64)
    }

    /// The frame that holds the byte at `at`, and its number. None behind the end.
    pub fn find(&self, at: u64) -> Option<(usize, &Frame)> {
        let number = self.frames.partition_point(|frame| frame.at <= at).checked_sub(1)?;
        let frame = &self.frames[number];
        (at - frame.at < frame.bytes as u64).then_some((number, frame))
    }
}

/// A frame's own header.
struct FrameHeader {
    /// The header's size.
    bytes: usize,
    content_bytes: Option<u64>,
    has_checksum: bool,
}

impl FrameHeader {
    /// Parses the header of the frame at `packed_at`, whose magic number was checked.
    fn parse(packed_at: u64, header: &[u8]) -> Result<FrameHeader, Flaw> {
        let short = || Flaw::corrupt(packed_at, "the archive ends inside a frame's header");
        let descriptor = *header.get(4).ok_or_else(short)?;
        if descriptor & 0x08 != 0 {
            return Err(Flaw::corrupt(packed_at, "a frame has unknown flags"));
        }
        let is_single = descriptor & 0x20 != 0;
        let dictionary_bytes = [0, 1, 2, 4][usize::from(descriptor & 3)];
        let size_bytes = match descriptor >> 6 {
            0 => usize::from(is_single),
            log2 => 1 << log2,
        };
        let size_at = 5 + usize::from(!is_single) + dictionary_bytes;
        let bytes = size_at + size_bytes;
        let mut wide = [0; 8];
        wide[..size_bytes].copy_from_slice(header.get(size_at..bytes).ok_or_else(short)?);
        // A size of two bytes counts from 256 on, because one byte holds what is less.
        let content_bytes = u64::from_le_bytes(wide) + if size_bytes == 2 { 256 } else { 0 };
        Ok(FrameHeader {
            bytes,
            content_bytes: (size_bytes != 0).then_some(content_bytes),
            has_checksum: descriptor & 0x04 != 0,
        })
    }
}

/// Where the sizes of frames come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SizeSource {
    SeekTable,
    Headers,
}

/// Compares the sizes of frames with a second source, for as many as are needed.
fn check_sizes(archive: &Archive, frames: &[Frame], source: SizeSource) -> Result<(), Flaw> {
    let (mut some, others): (Vec<&Frame>, Vec<&Frame>) =
        frames.iter().partition(|frame| frame.bytes != 0);
    if let [first, between @ .., last] = &some[..]
        && between.iter().all(|frame| frame.bytes == first.bytes)
    {
        some = vec![*first, *last];
    }
    let mut checked: Vec<(&Frame, Result<(), Flaw>)> =
        some.into_iter().chain(others).map(|frame| (frame, Ok(()))).collect();
    // Unpacking is worth threads, reading headers is not.
    let threads = if source == SizeSource::Headers { cpus() } else { 1 };
    on_threads(threads, &mut checked, |(frame, result)| {
        *result = check_size(archive, frame, source)
    });
    checked.into_iter().try_for_each(|(_, result)| result)
}

fn check_size(archive: &Archive, frame: &Frame, source: SizeSource) -> Result<(), Flaw> {
    if source == SizeSource::Headers {
        return unpack(archive, frame).map(drop);
    }
    let mut header = [0; HEADER_BYTES_MAX];
    let header = &mut header[..HEADER_BYTES_MAX.min(frame.packed_bytes)];
    archive.read_at(frame.packed_at, header)?;
    if header.len() >= 4 && frame.bytes == 0 && is_skippable(number(header)) {
        return Ok(());
    }
    if header.len() < 4 || number(header) != MAGIC {
        return Err(Flaw::corrupt(frame.packed_at, "this is no zstd frame"));
    }
    match FrameHeader::parse(frame.packed_at, header)?.content_bytes {
        Some(bytes) if bytes == frame.bytes as u64 => Ok(()),
        Some(bytes) => {
            let what = format!("a frame has {bytes} bytes in it, the table says {}", frame.bytes);
            Err(Flaw::corrupt(frame.packed_at, what))
        }
        None => unpack(archive, frame).map(drop),
    }
}

fn is_skippable(magic: u32) -> bool {
    magic & SKIPPABLE_MASK == SKIPPABLE_MAGIC & SKIPPABLE_MASK
}

/// Goes through an archive by its headers.
struct HeaderWalk<'a> {
    archive: &'a Archive,
    chunk: Vec<u8>,
    chunk_at: u64,
}

impl HeaderWalk<'_> {
    fn frames(mut self) -> Result<Vec<Frame>, Flaw> {
        let mut frames = Vec::new();
        let (mut packed_at, mut at) = (0_u64, 0_u64);
        while packed_at < self.archive.bytes {
            let magic = number(self.bytes(packed_at, 4)?);
            if is_skippable(magic) {
                let size = u64::from(number(self.bytes(packed_at + 4, 4)?));
                packed_at = self.advance(packed_at, 8 + size)?;
                continue;
            }
            if magic != MAGIC {
                return Err(Flaw::corrupt(packed_at, "this is no zstd frame"));
            }
            let (bytes, end) = self.frame(packed_at)?;
            frames.push(Frame {
                at,
                // `Index::read` refuses a frame that is too large.
                bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
                packed_at,
                packed_bytes: (end - packed_at) as usize,
                checksum: None,
            });
            at = at
                .checked_add(bytes)
                .ok_or_else(|| Flaw::corrupt(packed_at, "the frames are longer than any file"))?;
            packed_at = end;
        }
        Ok(frames)
    }

    /// The frame's unpacked size, and where it ends.
    fn frame(&mut self, packed_at: u64) -> Result<(u64, u64), Flaw> {
        let available = (self.archive.bytes - packed_at).min(HEADER_BYTES_MAX as u64) as usize;
        let header = FrameHeader::parse(packed_at, self.bytes(packed_at, available)?)?;
        let Some(bytes) = header.content_bytes else {
            let what = "a frame does not say how large its content is; unpack the file and pack \
                        it with `quire pack`";
            return Err(Flaw::Unsupported(packed_at, what.into()));
        };
        let mut at = packed_at + header.bytes as u64;
        loop {
            let header = self.bytes(at, 3)?;
            let block = u32::from_le_bytes([header[0], header[1], header[2], 0]);
            let bytes = match block >> 1 & 3 {
                // One byte, repeated as often as its size says.
                1 => 1,
                3 => return Err(Flaw::corrupt(at, "a block is of an unknown kind")),
                _ => u64::from(block >> 3),
            };
            at = self.advance(at, 3 + bytes)?;
            if block & 1 != 0 {
                break;
            }
        }
        let end = self.advance(at, if header.has_checksum { CHECKSUM_BYTES } else { 0 })?;
        Ok((bytes, end))
    }

    /// The place `bytes` bytes further on, which is no further than the archive's end.
    fn advance(&self, at: u64, bytes: u64) -> Result<u64, Flaw> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.archive.bytes => Ok(end),
            _ => Err(Flaw::corrupt(at, "the archive ends inside a frame")),
        }
    }

    /// Some bytes of the archive, at most [`READ_BYTES`].
    fn bytes(&mut self, at: u64, count: usize) -> Result<&[u8], Flaw> {
        self.advance(at, count as u64)?;
        let is_inside =
            at >= self.chunk_at && at + count as u64 <= self.chunk_at + self.chunk.len() as u64;
        if !is_inside {
            // Little where it is far from the last read: blocks may be large.
            let is_near = at < self.chunk_at + 2 * READ_BYTES as u64;
            let bytes = if is_near { READ_BYTES } else { 4096 };
            let mut chunk = vec![0; bytes.min((self.archive.bytes - at) as usize)];
            self.archive.read_at(at, &mut chunk)?;
            (self.chunk, self.chunk_at) = (chunk, at);
        }
        Ok(&self.chunk[(at - self.chunk_at) as usize..][..count])
    }
}
