//! Compression of single pages, without an allocator.
//!
//! Two strengths: LZ4, which takes a few microseconds each way, and Zstandard, which takes two to four
//! times as long and packs what LZ4 cannot, such as text without repetitions. [`Compressor`] is one
//! thread's memory for both. Pages that are one 32-bit pattern keep no data at all; pages that would not
//! shrink below [`PACKED_MAX`] are left as they are. Where the bytes go is the compressed pool's and the
//! swap file's business. No locks: a compressor belongs to one thread at a time.

#![deny(unsafe_code)]

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use xxhash_rust::xxh3::xxh3_64;

use super::blob::Packing;
use crate::sys::zstd::{self, Packer, PackerMemory};
use crate::units::PAGE_SIZE;

pub type PageBytes = [u8; PAGE_SIZE];

/// Longest packed page worth keeping: a page that does not save a quarter goes out as it is, because
/// every later fault would pay for unpacking it.
pub const PACKED_MAX: usize = PAGE_SIZE / 4 * 3;
/// What LZ4 leaves longer than this is tried by Zstandard.
const LZ4_GOOD: usize = PAGE_SIZE / 2;
/// How much shorter than LZ4's a Zstandard block must be: to unpack it takes longer.
const ZSTD_GAIN: usize = PAGE_SIZE / 8;

/// What LZ4 may need for a page that grows.
const OUTPUT_BYTES: usize = get_maximum_output_size(PAGE_SIZE);

/// Bytes that are not what was once stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt;

/// How hard a page is packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub enum Strength {
    /// LZ4; Zstandard, as long as that pays, for what LZ4 leaves large, and for what stayed in the pool.
    #[default]
    Auto = 0,
    Lz4 = 1,
    Zstd = 2,
}

impl Strength {
    /// The strength with this number, as the control page has it.
    #[must_use]
    pub fn from_number(number: u32) -> Strength {
        match number {
            1 => Strength::Lz4,
            2 => Strength::Zstd,
            _ => Strength::Auto,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compressed<'a> {
    /// The whole page is this 32-bit pattern (in memory order of this machine).
    Same(u32),
    /// At most [`PACKED_MAX`] bytes, packed so.
    Packed(Packing, &'a [u8]),
    /// It does not shrink enough: keep the page itself.
    Raw,
}

/// One thread's hash table, output buffers and context.
pub struct Compressor {
    table: CompressTable,
    output: [u8; OUTPUT_BYTES],
    zstd_output: [u8; PACKED_MAX],
    memory: Option<&'static mut PackerMemory>,
    zstd: Option<Packer>,
}

impl Default for Compressor {
    /// One that knows LZ4 alone.
    fn default() -> Compressor {
        Compressor {
            table: CompressTable::default(),
            output: [0; OUTPUT_BYTES],
            zstd_output: [0; PACKED_MAX],
            memory: None,
            zstd: None,
        }
    }
}

impl Compressor {
    /// One that knows both, the context of Zstandard in `memory`.
    pub fn with_zstd(memory: &'static mut PackerMemory) -> Compressor {
        Compressor { memory: Some(memory), ..Compressor::default() }
    }

    /// Packs a page. The page must not change meanwhile.
    pub fn compress(&mut self, page: &PageBytes, strength: Strength) -> Compressed<'_> {
        if let Some(pattern) = same_filled(page) {
            return Compressed::Same(pattern);
        }
        let lz4 = match strength {
            Strength::Zstd => None,
            Strength::Auto | Strength::Lz4 => self.pack_by_lz4(page),
        };
        let limit = match lz4 {
            Some(length) if length > LZ4_GOOD => length - ZSTD_GAIN,
            Some(_) => 0,
            None => PACKED_MAX,
        };
        // What LZ4 has made shorter has repetitions, which is promise enough.
        let is_worth_it = strength != Strength::Lz4 && limit > 0;
        if is_worth_it
            && (lz4.is_some() || is_promising(page))
            && let Some(length) = self.pack_by_zstd(page, limit)
        {
            return Compressed::Packed(Packing::Zstd, &self.zstd_output[..length]);
        }
        match lz4 {
            Some(length) => Compressed::Packed(Packing::Lz4, &self.output[..length]),
            None => Compressed::Raw,
        }
    }

    /// Packs a page by Zstandard that LZ4 has packed to `length` bytes; `None` where that gains
    /// little.
    pub fn repack(&mut self, page: &PageBytes, length: usize) -> Option<&[u8]> {
        let length = self.pack_by_zstd(page, length - length / 4)?;
        Some(&self.zstd_output[..length])
    }

    fn pack_by_lz4(&mut self, page: &PageBytes) -> Option<usize> {
        // An error would mean that the buffer is too small, which its constant excludes.
        let length = compress_into_with_table(page, &mut self.output, &mut self.table).ok()?;
        (length <= PACKED_MAX).then_some(length)
    }

    fn pack_by_zstd(&mut self, page: &PageBytes, limit: usize) -> Option<usize> {
        if let Some(memory) = self.memory.take() {
            self.zstd = Packer::new(memory);
        }
        self.zstd.as_mut()?.pack(page, &mut self.zstd_output[..limit])
    }
}

/// Whether the frequencies of bytes leave something to gain for a page without repetitions. They are
/// taken from a quarter of it: to pack noise in vain takes more than 10 us.
fn is_promising(page: &PageBytes) -> bool {
    const SAMPLED: usize = PAGE_SIZE / 4;
    let mut counts = [0u16; 256];
    // Two neighbours of each eight bytes: of numbers the high bytes and the low.
    let (groups, _) = page.as_chunks::<8>();
    for (at, group) in groups.iter().enumerate() {
        let first = at % 4 * 2;
        counts[group[first] as usize] += 1;
        counts[group[first + 1] as usize] += 1;
    }
    // How many pairs are equal says how many bits a byte needs at least: 2^6.5 values that are
    // alike in frequency give so many, and packed to less than three quarters none of them could be.
    let equal: usize = counts.iter().map(|&count| usize::from(count) * usize::from(count)).sum();
    equal > SAMPLED * SAMPLED / 90
}

/// Unpacks a block that must be exactly a page.
///
/// # Errors
///
/// [`Corrupt`] where it is not; `out` then holds garbage. A damaged block can also decode to a
/// page of wrong bytes, so callers compare [`page_hash`] as well.
pub fn decompress(packing: Packing, block: &[u8], out: &mut PageBytes) -> Result<(), Corrupt> {
    let length = match packing {
        Packing::Lz4 => decompress_into(block, out).ok(),
        Packing::Zstd => zstd::unpack(block, out),
        Packing::Raw => None,
    };
    if length == Some(PAGE_SIZE) { Ok(()) } else { Err(Corrupt) }
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

    use std::boxed::Box;
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
        assert_eq!(compressor.compress(&page, Strength::Auto), Compressed::Same(0));
        fill_same(0xdead_beef, &mut page);
        assert_eq!(compressor.compress(&page, Strength::Auto), Compressed::Same(0xdead_beef));
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

    /// Words of letters, without repetitions: LZ4 gains nothing there.
    fn text(seed: u64) -> PageBytes {
        let mut page = noise(seed);
        for byte in &mut page {
            *byte = b'a' + *byte % 27;
        }
        page
    }

    fn both() -> Compressor {
        Compressor::with_zstd(Box::leak(Box::new([0; zstd::PACKER_WORDS])))
    }

    #[test]
    fn what_was_packed_comes_back_and_what_does_not_shrink_stays_raw() {
        for strength in [Strength::Auto, Strength::Lz4, Strength::Zstd] {
            let mut compressor = both();
            let mut out = [0; PAGE_SIZE];
            let mut raw = 0;
            let mut packed = Vec::new();
            for random in (0..=PAGE_SIZE).step_by(61) {
                let page = mixed(random as u64, random);
                match compressor.compress(&page, strength) {
                    Compressed::Packed(packing, block) => {
                        assert!(block.len() <= PACKED_MAX);
                        assert_eq!(decompress(packing, block, &mut out), Ok(()));
                        assert_eq!(out, page);
                        packed.push(packing);
                    }
                    Compressed::Raw => raw += 1,
                    Compressed::Same(_) => panic!("the page has no pattern"),
                }
            }
            assert!(packed.len() > 30 && raw > 5, "{} packed, {raw} raw", packed.len());
            let by_zstd = packed.iter().filter(|&&packing| packing == Packing::Zstd).count();
            match strength {
                Strength::Lz4 => assert_eq!(by_zstd, 0),
                Strength::Zstd => assert_eq!(by_zstd, packed.len()),
                Strength::Auto => assert!(by_zstd < packed.len() / 2),
            }
        }
    }

    #[test]
    fn text_without_repetitions_is_packed_by_zstandard_alone() {
        let (page, mut out) = (text(5), [0; PAGE_SIZE]);
        let mut compressor = both();
        assert_eq!(compressor.compress(&page, Strength::Lz4), Compressed::Raw);
        let Compressed::Packed(Packing::Zstd, block) = compressor.compress(&page, Strength::Auto)
        else {
            panic!("it is promising");
        };
        assert!(block.len() < PAGE_SIZE / 8 * 5, "{}", block.len());
        assert_eq!(decompress(Packing::Zstd, block, &mut out), Ok(()));
        assert_eq!(out, page);
        assert_eq!(Compressor::default().compress(&page, Strength::Auto), Compressed::Raw);
    }

    #[test]
    fn noise_promises_nothing_and_text_and_numbers_do() {
        for seed in 0..100 {
            assert!(!is_promising(&noise(seed)) && is_promising(&text(seed)));
        }
        let mut numbers = noise(7);
        for word in numbers.as_chunks_mut::<8>().0 {
            word[3..].fill(0);
        }
        assert!(is_promising(&numbers));
    }

    #[test]
    fn a_page_is_repacked_only_where_a_quarter_is_gained() {
        let (page, mut out) = (text(6), [0; PAGE_SIZE]);
        let mut compressor = both();
        let block = compressor.repack(&page, PAGE_SIZE).expect("it gains").to_vec();
        assert_eq!(decompress(Packing::Zstd, &block, &mut out), Ok(()));
        assert_eq!(out, page);
        assert_eq!(compressor.repack(&page, block.len()), None);
    }

    #[test]
    fn what_was_packed_before_changes_nothing() {
        for strength in [Strength::Lz4, Strength::Zstd] {
            let (mut used, page) = (both(), mixed(2, 700));
            used.compress(&noise(1), strength);
            used.compress(&mixed(9, 100), strength);
            let Compressed::Packed(packing, again) = used.compress(&page, strength) else {
                panic!("it packs");
            };
            let afresh = Compressed::Packed(packing, again);
            assert_eq!(both().compress(&page, strength), afresh);
        }
    }

    #[test]
    fn damaged_blocks_are_refused_or_fail_the_hash_and_never_panic() {
        for strength in [Strength::Lz4, Strength::Zstd] {
            let (mut compressor, page) = (both(), mixed(3, 900));
            let Compressed::Packed(packing, block) = compressor.compress(&page, strength) else {
                panic!("it packs");
            };
            let block = block.to_vec();
            let mut out = [0; PAGE_SIZE];
            for at in 0..block.len() {
                for bit in 0..8 {
                    let mut damaged = block.clone();
                    damaged[at] ^= 1 << bit;
                    if decompress(packing, &damaged, &mut out).is_ok() && out != page {
                        assert_ne!(page_hash(&out), page_hash(&page));
                    }
                }
            }
            for length in 0..block.len() {
                assert_eq!(decompress(packing, &block[..length], &mut out), Err(Corrupt));
            }
            for seed in 0..2000 {
                let garbage = noise(seed);
                let _ = decompress(packing, &garbage[..1 + seed as usize % 300], &mut out);
            }
        }
    }

    #[test]
    fn more_threads_unpack_than_there_are_contexts() {
        let page = text(8);
        let mut compressor = both();
        let Compressed::Packed(packing, block) = compressor.compress(&page, Strength::Zstd) else {
            panic!("it packs");
        };
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let mut out = [0; PAGE_SIZE];
                    for _ in 0..200 {
                        assert_eq!(decompress(packing, block, &mut out), Ok(()));
                        assert_eq!(out, page);
                    }
                });
            }
        });
    }
}
