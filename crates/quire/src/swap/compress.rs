//! Compression of single pages, without an allocator.
//!
//! Owns the LZ4 hash table and the output buffer of one thread ([`Compressor`]). Pages that are
//! one 32-bit pattern keep no data at all; pages that would not shrink below [`LZ4_MAX`] are left
//! as they are. Where the bytes go is the compressed pool's and the swap file's business.
//! No locks: a compressor belongs to one thread at a time.

#![deny(unsafe_code)]

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::units::PAGE_SIZE;

pub type PageBytes = [u8; PAGE_SIZE];

/// Longest block worth keeping: a page that does not save a quarter goes out as it is, because
/// every later fault would pay for unpacking it.
pub const LZ4_MAX: usize = PAGE_SIZE / 4 * 3;

/// What LZ4 may need for a page that grows.
const OUTPUT_BYTES: usize = get_maximum_output_size(PAGE_SIZE);

/// Bytes that are not what was once stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compressed<'a> {
    /// The whole page is this 32-bit pattern (in memory order of this machine).
    Same(u32),
    /// An LZ4 block of at most [`LZ4_MAX`] bytes.
    Lz4(&'a [u8]),
    /// It does not shrink enough: keep the page itself.
    Raw,
}

/// One thread's hash table and output buffer.
pub struct Compressor {
    table: CompressTable,
    output: [u8; OUTPUT_BYTES],
}

impl Default for Compressor {
    fn default() -> Compressor {
        Compressor { table: CompressTable::default(), output: [0; OUTPUT_BYTES] }
    }
}

impl Compressor {
    /// Packs a page. The page must not change meanwhile.
    pub fn compress(&mut self, page: &PageBytes) -> Compressed<'_> {
        if let Some(pattern) = same_filled(page) {
            return Compressed::Same(pattern);
        }
        match compress_into_with_table(page, &mut self.output, &mut self.table) {
            Ok(length) if length <= LZ4_MAX => Compressed::Lz4(&self.output[..length]),
            // An error would mean that the buffer is too small, which its constant excludes.
            Ok(_) | Err(_) => Compressed::Raw,
        }
    }
}

/// Unpacks an LZ4 block that must be exactly a page.
///
/// # Errors
///
/// [`Corrupt`] where it is not; `out` then holds garbage. A damaged block can also decode to a
/// page of wrong bytes, so callers compare [`page_hash`] as well.
pub fn decompress(block: &[u8], out: &mut PageBytes) -> Result<(), Corrupt> {
    match decompress_into(block, out) {
        Ok(PAGE_SIZE) => Ok(()),
        Ok(_) | Err(_) => Err(Corrupt),
    }
}

/// The checksum that is kept with every stored page.
pub fn page_hash(page: &PageBytes) -> u64 {
    xxh3_64(page)
}

/// Fills a page with a pattern that [`Compressed::Same`] reported.
pub fn fill_same(pattern: u32, out: &mut PageBytes) {
    for word in out.as_chunks_mut::<4>().0 {
        *word = pattern.to_ne_bytes();
    }
}

/// The pattern of a page that consists of one.
pub fn same_filled(page: &PageBytes) -> Option<u32> {
    let (words, _) = page.as_chunks::<8>();
    let low = u32::from_ne_bytes([page[0], page[1], page[2], page[3]]);
    let pattern = u64::from(low) << 32 | u64::from(low);
    let differs = |word: &[u8; 8]| u64::from_ne_bytes(*word) ^ pattern;
    // Most pages that are not same-filled show it at their ends or in the middle.
    if differs(&words[0]) | differs(&words[words.len() / 2]) | differs(&words[words.len() - 1]) != 0
    {
        return None;
    }
    // 256 bytes a step: wide enough for vector instructions, and it still ends early.
    let (strides, _) = words.as_chunks::<32>();
    strides
        .iter()
        .all(|stride| stride.iter().fold(0, |seen, word| seen | differs(word)) == 0)
        .then_some(low)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    fn noise(seed: u64) -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        let mut state = seed | 1;
        for word in page.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_ne_bytes();
        }
        page
    }

    /// A page whose first `random` bytes are noise and whose rest repeats.
    fn mixed(seed: u64, random: usize) -> PageBytes {
        let mut page = noise(seed);
        for (at, byte) in page.iter_mut().enumerate().skip(random) {
            *byte = (at % 23) as u8;
        }
        page
    }

    #[test]
    fn a_page_of_one_pattern_keeps_no_data() {
        let mut compressor = Compressor::default();
        let mut page = [0; PAGE_SIZE];
        assert_eq!(compressor.compress(&page), Compressed::Same(0));
        fill_same(0xdead_beef, &mut page);
        assert_eq!(compressor.compress(&page), Compressed::Same(0xdead_beef));
    }

    #[test]
    fn one_different_byte_anywhere_is_seen() {
        for at in 0..PAGE_SIZE {
            let mut page = [0x55; PAGE_SIZE];
            page[at] ^= 0x10;
            assert_eq!(same_filled(&page), None, "byte {at}");
        }
        // Two halves of a 64-bit word that differ are no 32-bit pattern.
        let mut page = [0; PAGE_SIZE];
        for word in page.as_chunks_mut::<8>().0 {
            *word = 0x1111_1111_2222_2222_u64.to_ne_bytes();
        }
        assert_eq!(same_filled(&page), None);
    }

    #[test]
    fn what_was_packed_comes_back_and_what_does_not_shrink_stays_raw() {
        let mut compressor = Compressor::default();
        let mut out = [0; PAGE_SIZE];
        let (mut lz4, mut raw) = (0, 0);
        for random in (0..=PAGE_SIZE).step_by(61) {
            let page = mixed(random as u64, random);
            match compressor.compress(&page) {
                Compressed::Lz4(block) => {
                    assert!(block.len() <= LZ4_MAX);
                    assert_eq!(decompress(block, &mut out), Ok(()));
                    assert_eq!(out, page);
                    lz4 += 1;
                }
                Compressed::Raw => raw += 1,
                Compressed::Same(_) => panic!("the page has no pattern"),
            }
        }
        assert!(lz4 > 30 && raw > 5, "{lz4} packed, {raw} raw");
    }

    #[test]
    fn a_table_that_was_used_before_changes_nothing() {
        let mut used = Compressor::default();
        used.compress(&noise(1));
        used.compress(&mixed(9, 100));
        let page = mixed(2, 700);
        let again = match used.compress(&page) {
            Compressed::Lz4(block) => block.to_vec(),
            other => panic!("{other:?}"),
        };
        assert_eq!(Compressor::default().compress(&page), Compressed::Lz4(&again));
    }

    #[test]
    fn damaged_blocks_are_refused_or_fail_the_hash_and_never_panic() {
        let mut compressor = Compressor::default();
        let page = mixed(3, 900);
        let block: Vec<u8> = match compressor.compress(&page) {
            Compressed::Lz4(block) => block.to_vec(),
            other => panic!("{other:?}"),
        };
        let mut out = [0; PAGE_SIZE];
        for at in 0..block.len() {
            for bit in 0..8 {
                let mut damaged = block.clone();
                damaged[at] ^= 1 << bit;
                if decompress(&damaged, &mut out).is_ok() && out != page {
                    assert_ne!(page_hash(&out), page_hash(&page));
                }
            }
        }
        for length in 0..block.len() {
            assert_eq!(decompress(&block[..length], &mut out), Err(Corrupt));
        }
        for seed in 0..2000 {
            let garbage = noise(seed);
            let _ = decompress(&garbage[..1 + seed as usize % 300], &mut out);
        }
    }
}
