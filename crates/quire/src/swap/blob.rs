//! A packed page as it lies in the pool and in the swap file: header, then bytes.
//!
//! The header names the page that owns the bytes and has the checksum of its content, so that
//! a blob that is not the page's own, or not what was stored, is noticed before the program sees a byte
//! of it.

#![deny(unsafe_code)]

use super::compress::{Corrupt, PageBytes, decompress, page_hash};
use crate::units::{PAGE_SIZE, PageNum};

/// How the bytes of a blob make a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Packing {
    Lz4 = 1,
    Raw = 2,
    Zstd = 3,
}

pub const HEADER_BYTES: usize = 16;

/// What stands in front of a blob, in two words.
///
/// First word: owner (48 bits), length (14 bits), kind (2 bits), from the highest bit down; zero
/// where there is no blob. Second word: checksum of the page's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlobHeader {
    /// The page that the content belongs to.
    pub owner: PageNum,
    /// Bytes behind the header.
    pub length: usize,
    /// How they make a page.
    pub kind: Packing,
    /// [`page_hash`] of the page.
    pub hash: u64,
}

impl BlobHeader {
    const KIND_BITS: u32 = 2;
    const OWNER_SHIFT: u32 = 16;

    pub(super) fn to_words(self) -> [u64; 2] {
        debug_assert!(self.owner.0 < 1 << 48 && self.length <= PAGE_SIZE);
        let length = (self.length as u64) << Self::KIND_BITS;
        [self.owner.0 << Self::OWNER_SHIFT | length | self.kind as u64, self.hash]
    }

    /// The header that two words hold, unless they hold none.
    pub(super) fn from_words(words: [u64; 2]) -> Option<BlobHeader> {
        let kind = match words[0] & 3 {
            1 => Packing::Lz4,
            2 => Packing::Raw,
            3 => Packing::Zstd,
            _ => return None,
        };
        let length = (words[0] >> Self::KIND_BITS & 0x3fff) as usize;
        let fits = match kind {
            Packing::Lz4 | Packing::Zstd => (1..=PAGE_SIZE).contains(&length),
            Packing::Raw => length == PAGE_SIZE,
        };
        let owner = PageNum(words[0] >> Self::OWNER_SHIFT);
        fits.then_some(BlobHeader { owner, length, kind, hash: words[1] })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Blob<'a> {
    /// The page that the content belongs to.
    pub owner: PageNum,
    /// How the bytes make a page.
    pub kind: Packing,
    /// [`page_hash`] of the page.
    pub hash: u64,
    pub bytes: &'a [u8],
}

impl Blob<'_> {
    pub(super) fn header(&self) -> BlobHeader {
        let Blob { owner, kind, hash, bytes } = *self;
        BlobHeader { owner, kind, hash, length: bytes.len() }
    }

    /// Writes the page that `owner` stored.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] where the blob is another page's or damaged. What `out` then holds is garbage
    /// and must not reach the program.
    pub fn unpack(&self, owner: PageNum, out: &mut PageBytes) -> Result<(), Corrupt> {
        if self.owner != owner {
            return Err(Corrupt);
        }
        match self.kind {
            Packing::Raw => *out = *<&PageBytes>::try_from(self.bytes).map_err(|_| Corrupt)?,
            packed => decompress(packed, self.bytes, out)?,
        }
        if page_hash(out) == self.hash { Ok(()) } else { Err(Corrupt) }
    }
}
