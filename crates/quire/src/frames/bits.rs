//! A bit for each place of a window.

use super::WORDS;
use crate::units::BLOCK_PAGES;

pub fn set(bits: &mut [u64; WORDS], at: usize, len: usize) {
    (at..at + len).for_each(|bit| bits[bit / 64] |= 1 << (bit % 64));
}

pub fn clear(bits: &mut [u64; WORDS], at: usize, len: usize) {
    (at..at + len).for_each(|bit| bits[bit / 64] &= !(1 << (bit % 64)));
}

pub fn is_set(bits: &[u64; WORDS], at: usize) -> bool {
    bits[at / 64] >> (at % 64) & 1 != 0
}

/// The first run of up to `most` set bits that is the longest, or long enough.
pub fn longest_run(bits: &[u64; WORDS], most: usize) -> (usize, usize) {
    let mut best = (0, 0);
    let mut at = 0;
    while at < BLOCK_PAGES {
        if bits[at / 64] >> (at % 64) == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        if !is_set(bits, at) {
            at += 1;
            continue;
        }
        let start = at;
        while at < BLOCK_PAGES && at - start < most && is_set(bits, at) {
            at += 1;
        }
        if at - start > best.1 {
            best = (start, at - start);
            if best.1 == most {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_is_found_across_words() {
        let mut bits = [0; WORDS];
        set(&mut bits, 3, 5);
        set(&mut bits, 60, 70);
        assert_eq!(longest_run(&bits, 512), (60, 70));
        assert_eq!(longest_run(&bits, 4), (3, 4));
    }
}
