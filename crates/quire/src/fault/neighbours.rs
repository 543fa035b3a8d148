//! How many neighbours of a page come from swap with it, where no stream that has gone on for long does.
//!
//! One fault in sixteen is a sample: it is served alone, and which of its neighbours that are in swap as
//! well are asked for is noted, until another sample takes its place about a thousand faults later. All
//! other faults bring the largest block around their page of which samples had enough asked for.
//!
//! No locks: a sample that two faults change at once may miss a page.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::control::along::{
    ALONE_ONE_IN, NEIGHBOURS_ORDER as ORDER_MAX, SAMPLES, WEIGHT, WORTH_OF_8,
};
use crate::units::{PageNum, PageRange};

/// All neighbours asked for, and the share from which on a block is worth it.
const WHOLE: u32 = 1 << 16;
const WORTH: u32 = WHOLE / 8 * WORTH_OF_8;

/// Spreads numbers; the low bits are as good as any.
fn mix(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}

/// A block, its page that was asked for first, those neighbours that were in swap then, and those pages
/// that were asked for since. 0 is none.
#[derive(Clone, Copy)]
struct Sample(u64);

impl Sample {
    fn new(page: PageNum, swapped: u8) -> Sample {
        let at = page.0 % (1 << ORDER_MAX);
        let others = u64::from(swapped) & !(1 << at);
        Sample((page.0 >> ORDER_MAX) << 24 | at << 16 | others << 8 | 1 << at)
    }

    fn is_of(self, page: PageNum) -> bool {
        self.0 != 0 && self.0 >> 24 == page.0 >> ORDER_MAX
    }

    fn with(self, page: PageNum) -> Sample {
        Sample(self.0 | 1 << (page.0 % (1 << ORDER_MAX)))
    }

    /// Of the neighbours within a block of this order, the share that was asked for.
    fn share(self, order: u32) -> Option<u32> {
        let first = (self.0 >> 16) as u8 % (1 << ORDER_MAX);
        let block = ((1u16 << (1 << order)) - 1) << (first >> order << order);
        let others = (self.0 >> 8) as u8 & block as u8;
        let asked = others & self.0 as u8;
        (WHOLE * asked.count_ones()).checked_div(others.count_ones())
    }
}

pub(crate) struct Neighbours {
    samples: [AtomicU64; SAMPLES],
    faults: AtomicU32,
    /// The share that was asked for of the neighbours within 2, 4 and 8 pages.
    shares: [AtomicU32; ORDER_MAX as usize],
}

impl Default for Neighbours {
    fn default() -> Neighbours {
        Neighbours {
            samples: [const { AtomicU64::new(0) }; SAMPLES],
            faults: AtomicU32::new(0),
            shares: [const { AtomicU32::new(0) }; ORDER_MAX as usize],
        }
    }
}

impl Neighbours {
    /// The order of the block that a fault on `page` should bring, where a stream would bring one of order
    /// `stream`.
    pub fn order(&self, page: PageNum, stream: u32, is_swapped: impl Fn(PageNum) -> bool) -> u32 {
        if stream >= ORDER_MAX {
            return stream;
        }
        let block = page.align_down(ORDER_MAX);
        let slot = &self.samples[mix(block.0) as usize % SAMPLES];
        let sample = Sample(slot.load(Relaxed));
        if sample.is_of(page) {
            slot.store(sample.with(page).0, Relaxed);
            return 0;
        }
        // By chance: what comes in turns would always be looked at from the same side.
        let turn = u64::from(self.faults.fetch_add(1, Relaxed));
        if mix(turn ^ page.0 << 32).is_multiple_of(ALONE_ONE_IN.into()) {
            self.settle(sample);
            let pages = PageRange::new(block, 1 << ORDER_MAX).pages().zip(0..);
            let swapped = pages.fold(0, |set, (page, at)| set | u8::from(is_swapped(page)) << at);
            slot.store(Sample::new(page, swapped).0, Relaxed);
            return 0;
        }
        let is_worth_it = |&order: &u32| self.share(order) >= WORTH;
        (stream + 1..=ORDER_MAX).rev().find(is_worth_it).unwrap_or(stream)
    }

    /// Of so many pages that are brought along in a block, as many as are used by the samples. A stream's
    /// are not sampled.
    pub fn used(&self, pages: usize, order: u32) -> Option<usize> {
        (1..=ORDER_MAX)
            .contains(&order)
            .then(|| pages * self.share(order) as usize / WHOLE as usize)
    }

    /// Whether the largest block is worth it.
    pub fn are_used(&self) -> bool {
        self.share(ORDER_MAX) >= WORTH
    }

    fn share(&self, order: u32) -> u32 {
        self.shares[order as usize - 1].load(Relaxed)
    }

    /// Takes what a sample has shown into the shares.
    fn settle(&self, sample: Sample) {
        for (share, order) in self.shares.iter().zip(1..) {
            if let Some(shown) = sample.share(order) {
                let known = share.load(Relaxed);
                share.store(known - known / WEIGHT + shown / WEIGHT, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults on pages in this order, each read with its block; returns how many were needed.
    fn touch(neighbours: &Neighbours, pages: impl Iterator<Item = u64>) -> usize {
        let mut there = std::collections::BTreeSet::new();
        let mut faults = 0;
        for page in pages.map(PageNum) {
            if there.contains(&page) {
                continue;
            }
            faults += 1;
            let order = neighbours.order(page, 0, |page| !there.contains(&page));
            there.extend(PageRange::new(page.align_down(order), 1 << order).pages());
        }
        faults
    }

    fn shuffled(count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(move |at| at * 40_503 % count)
    }

    #[test]
    fn a_block_that_is_used_as_one_is_soon_read_as_one() {
        let neighbours = Neighbours::default();
        let faults =
            touch(&neighbours, shuffled(16_384).flat_map(|block| block * 8..block * 8 + 8));
        assert!(faults < 16_384 * 3, "{faults} faults for 16384 blocks");
        assert!(faults > 16_384, "some were left alone");
        assert!(neighbours.are_used());
        // Pairs of pages far from each other.
        let neighbours = Neighbours::default();
        let faults = touch(&neighbours, shuffled(16_384).flat_map(|at| [at * 8, at * 8 + 1]));
        assert!((17_000..22_000).contains(&faults), "{faults} faults for 16384 pairs");
        let order =
            (0..100).map(|at| neighbours.order(PageNum(1 << 30 | at << 6), 0, |_| true)).max();
        assert_eq!(order, Some(1), "more than the pair is not worth it");
        assert!(!neighbours.are_used());
    }

    #[test]
    fn random_access_reads_single_pages() {
        let neighbours = Neighbours::default();
        touch(&neighbours, shuffled(1 << 20));
        let orders = (0..100).map(|at| neighbours.order(PageNum(1 << 30 | at << 6), 0, |_| true));
        assert_eq!(orders.max(), Some(0));
    }

    #[test]
    fn only_what_could_have_been_read_counts() {
        let alone = Sample::new(PageNum(9), 0b0000_0010);
        assert_eq!([1, 2, 3].map(|order| alone.share(order)), [None; 3]);
        let sample = Sample::new(PageNum(9), 0b1000_0111).with(PageNum(8)).with(PageNum(15));
        assert!(sample.is_of(PageNum(12)) && !sample.is_of(PageNum(16)));
        let shares = [WHOLE, WHOLE / 2, WHOLE * 2 / 3].map(Some);
        assert_eq!([1, 2, 3].map(|order| sample.share(order)), shares);
    }
}
