//! The seek table: a skippable frame at an archive's end that tells where the other frames lie.
//!
//! ```text
//! 0x184D2A5E | size | { packed bytes, bytes, [checksum] } per frame | frames | flags | 0x8F92EAB1
//!      4     |  4   |        4          4        4                  |   4    |   1   |     4
//! ```
//! All numbers are little-endian. Bit 7 of the flags says whether there are checksums (the low
//! half of XXH64 of the unpacked bytes); bits 6 to 2 must be 0, bits 1 and 0 mean nothing.

use std::vec;
use std::vec::Vec;

use super::index::Frame;
use super::{Archive, Flaw};

pub(super) const SKIPPABLE_MAGIC: u32 = 0x184D_2A5E;
const FOOTER_MAGIC: u32 = 0x8F92_EAB1;
const FOOTER_BYTES: usize = 9;
const HEADER_BYTES: usize = 8;
const HAS_CHECKSUMS: u8 = 0x80;
const RESERVED: u8 = 0x7c;
/// The most frames that the format allows.
pub(super) const FRAMES_MAX: usize = 0x800_0000;

/// The table's entry for one frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TableEntry {
    pub packed_bytes: u32,
    pub bytes: u32,
    pub checksum: Option<u32>,
}

/// Reads an archive's seek table; `None` where it has none.
pub(super) fn read(archive: &Archive) -> Result<Option<Vec<Frame>>, Flaw> {
    let mut footer = [0; FOOTER_BYTES];
    let Some(footer_at) = archive.bytes.checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
    archive.read_at(footer_at, &mut footer)?;
    if number(&footer[5..]) != FOOTER_MAGIC {
        return Ok(None);
    }
    let count = number(&footer) as usize;
    let flags = footer[4];
    if flags & RESERVED != 0 {
        return Err(Flaw::corrupt(footer_at, "the seek table has unknown flags"));
    }
    let entry_bytes = if flags & HAS_CHECKSUMS != 0 { 12 } else { 8 };
    let content = count as u64 * entry_bytes as u64 + FOOTER_BYTES as u64;
    let table = content + HEADER_BYTES as u64;
    let Some(table_at) = archive.bytes.checked_sub(table).filter(|_| count <= FRAMES_MAX) else {
        return Err(Flaw::corrupt(footer_at, "the seek table is larger than the archive"));
    };
    let mut header = [0; HEADER_BYTES];
    archive.read_at(table_at, &mut header)?;
    if number(&header) != SKIPPABLE_MAGIC || u64::from(number(&header[4..])) != content {
        return Err(Flaw::corrupt(table_at, "the seek table does not begin where it should"));
    }
    let mut entries = vec![0; count * entry_bytes];
    let entries_at = table_at + HEADER_BYTES as u64;
    archive.read_at(entries_at, &mut entries)?;
    let entries = entries.chunks_exact(entry_bytes).map(|entry| TableEntry {
        packed_bytes: number(entry),
        bytes: number(&entry[4..]),
        checksum: (entry_bytes == 12).then(|| number(&entry[8..])),
    });
    place(entries, table_at).map(Some)
}

/// Places the frames one behind the other. Together they must fill all that lies before the table.
fn place(entries: impl Iterator<Item = TableEntry>, table_at: u64) -> Result<Vec<Frame>, Flaw> {
    let mut frames = Vec::new();
    let (mut packed_at, mut at) = (0, 0);
    for entry in entries {
        let packed_bytes = u64::from(entry.packed_bytes);
        if packed_bytes > table_at - packed_at {
            return Err(Flaw::corrupt(
                packed_at,
                "a frame of the seek table ends behind the others",
            ));
        }
        frames.push(Frame {
            at,
            bytes: entry.bytes as usize,
            packed_at,
            packed_bytes: entry.packed_bytes as usize,
            checksum: entry.checksum,
        });
        packed_at += packed_bytes;
        at += u64::from(entry.bytes);
    }
    if packed_at != table_at {
        return Err(Flaw::corrupt(packed_at, "the seek table does not cover the archive"));
    }
    Ok(frames)
}

/// The table as `pack` writes it: without checksums, for the frames have them.
pub(super) fn to_bytes(entries: &[TableEntry]) -> Vec<u8> {
    let mut content = Vec::new();
    for entry in entries {
        content.extend(entry.packed_bytes.to_le_bytes());
        content.extend(entry.bytes.to_le_bytes());
    }
    content.extend((entries.len() as u32).to_le_bytes());
    content.push(0);
    content.extend(FOOTER_MAGIC.to_le_bytes());
    let mut table = Vec::from(SKIPPABLE_MAGIC.to_le_bytes());
    table.extend((content.len() as u32).to_le_bytes());
    table.extend(content);
    table
}

/// The checksum of a frame's unpacked bytes.
pub(super) fn checksum(bytes: &[u8]) -> u32 {
    xxhash_rust::xxh64::xxh64(bytes, 0) as u32
}

/// The little-endian number that `bytes` begins with.
pub(super) fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
