//! The pages that are touched: a number in the first word, a count in the second, and data that
//! compresses as well as is asked for.

use clap::ValueEnum;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

pub(crate) const PAGE_WORDS: usize = 512;
/// Words before the data.
const HEAD_WORDS: usize = 2;
/// What words are made of: 31 signs, the blank twice, so that a byte has just below 5 bits.
const SIGNS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz0123  ";

/// What pages are filled with, by how it compresses.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Data {
    /// Random: 1 to 1
    #[value(name = "1.0")]
    Random,
    /// Random words: 1.6 to 1 by zstd, which counts signs; not at all by lz4, which finds repetitions
    #[value(name = "1.6")]
    Words,
    /// A quarter random, the rest the same: 4 to 1
    #[value(name = "4.0")]
    Quarter,
}

/// Fills pages in order.
pub(crate) struct Filler {
    data: Data,
    random: Xoshiro256PlusPlus,
}

impl Filler {
    pub(crate) fn new(data: Data) -> Filler {
        Filler { data, random: Xoshiro256PlusPlus::seed_from_u64(1) }
    }

    pub(crate) fn fill(&mut self, number: usize, page: &mut [u64]) {
        let (head, data) = page.split_at_mut(HEAD_WORDS);
        head.copy_from_slice(&[number as u64, 0]);
        let random_words = match self.data {
            Data::Random | Data::Words => data.len(),
            Data::Quarter => PAGE_WORDS / 4 - HEAD_WORDS,
        };
        let (random, same) = data.split_at_mut(random_words);
        for word in random {
            *word = match self.data {
                Data::Words => self.signs(),
                Data::Random | Data::Quarter => self.random.random(),
            };
        }
        same.fill(u64::from_ne_bytes(*b"        "));
    }

    /// Eight signs.
    fn signs(&mut self) -> u64 {
        let bits: u64 = self.random.random();
        let sign = |index: usize| SIGNS[(bits >> (5 * index)) as usize % SIGNS.len()];
        u64::from_ne_bytes(std::array::from_fn(sign))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often the compressed bytes of 64 pages, each by itself, go into the pages.
    fn ratio(data: Data, compress: impl Fn(&[u8]) -> usize) -> f64 {
        let mut filler = Filler::new(data);
        let mut compressed = 0;
        for number in 0..64 {
            let mut page = [0; PAGE_WORDS];
            filler.fill(number, &mut page);
            assert_eq!((page[0], page[1]), (number as u64, 0));
            let bytes: Vec<u8> = page.iter().flat_map(|word| word.to_ne_bytes()).collect();
            compressed += compress(&bytes).min(bytes.len());
        }
        (64 * PAGE_WORDS * 8) as f64 / compressed as f64
    }

    fn by_zstd(page: &[u8]) -> usize {
        let mut out = [0; 8192];
        zstd_safe::compress(&mut out[..], page, 1).unwrap()
    }

    fn by_lz4(page: &[u8]) -> usize {
        let mut out = [0; 8192];
        lz4_flex::block::compress_into(page, &mut out).unwrap()
    }

    #[test]
    fn pages_compress_as_their_name_says() {
        for (data, zstd, lz4) in
            [(Data::Random, 1.0, 1.0), (Data::Words, 1.6, 1.0), (Data::Quarter, 4.0, 4.0)]
        {
            let found = (ratio(data, by_zstd), ratio(data, by_lz4));
            assert!((found.0 / zstd - 1.0).abs() < 0.06, "{data:?}: zstd {}", found.0);
            assert!((found.1 / lz4 - 1.0).abs() < 0.06, "{data:?}: lz4 {}", found.1);
        }
    }
}
