//! What comes along with a fault on swap in a miniature, as the engine decides it (`fault/neighbours.rs` and
//! `fault/order.rs`): the block around the page of which samples had enough asked for, or what a stream goes over.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use quire::control::along::{
    ALONE_ONE_IN, LONG_ORDER, NEIGHBOURS_ORDER, SAMPLES, STREAMS, WEIGHT, WORTH_OF_8,
    stream_order_max,
};

/// A sample is looked at for so many faults of all of a program.
const SEEN_AFTER: f64 = (SAMPLES * ALONE_ONE_IN as usize) as f64;

/// A fault after which it is seen which neighbours are touched. The engine sees it only of what was served alone; here
/// each fault stands for many, and shows it.
#[derive(Clone, Copy)]
struct Sample {
    first: usize,
    /// Neighbours that were in swap then, and those that were touched since.
    swapped: u32,
    touched: u32,
    is_alone: bool,
}

impl Sample {
    /// Of the neighbours within a block of this order, the share that was touched.
    fn share(self, order: u32) -> Option<f64> {
        let others = block(self.first, order) & self.swapped;
        let touched = others & self.touched;
        (others != 0).then(|| f64::from(touched.count_ones()) / f64::from(others.count_ones()))
    }
}

/// A stream's last folio within a region.
#[derive(Clone, Copy)]
struct Stream {
    start: usize,
    end: usize,
    order: u32,
    /// Faults of other streams that there had been then.
    begun: u32,
}

/// What is known of the use of neighbours, and where streams are expected to go on.
#[derive(Default)]
pub(super) struct Along {
    /// Blocks of which a sample was taken, by region and number there.
    samples: BTreeMap<(usize, usize), Sample>,
    ages: VecDeque<(usize, usize)>,
    shares: [f64; NEIGHBOURS_ORDER as usize],
    faults: u32,
    streams: BTreeMap<usize, Stream>,
    begun: u32,
}

impl Along {
    /// The order of the block that a fault on this page brings; within a region that is sampled, where so many pages
    /// of the program are for each, and the budget has room for so many.
    pub(super) fn order(
        &mut self,
        region: usize,
        at: usize,
        swapped: u32,
        limit_pages: f64,
        scale: f64,
    ) -> u32 {
        let order_max = stream_order_max(limit_pages as usize);
        let stream = self.stream_order(region, at, scale).unwrap_or_else(|| {
            self.begun += 1;
            0
        });
        let order = self.neighbours_order(region, at, swapped, stream, scale).min(order_max);
        let within = order.min(u32::BITS.ilog2());
        let start = at >> within << within;
        let stream = Stream { start, end: start + (1 << within), order, begun: self.begun };
        self.streams.insert(region, stream);
        within
    }

    /// A region's number is for another.
    pub(super) fn forget(&mut self, region: usize) {
        self.streams.remove(&region);
        for block in 0..u32::BITS as usize >> NEIGHBOURS_ORDER {
            self.samples.remove(&(region, block));
        }
    }

    /// The order with which a stream goes on at this page, where one does.
    fn stream_order(&self, region: usize, at: usize, scale: f64) -> Option<u32> {
        let stream = self.streams.get(&region)?;
        // The longer it was, the longer it is remembered.
        let others = f64::from(self.begun - stream.begun) * scale;
        if others >= STREAMS as f64 * f64::from(1 + stream.order) {
            return None;
        }
        let is_dense = self.is_worth_it(NEIGHBOURS_ORDER);
        let reach = if is_dense || stream.order >= LONG_ORDER { 2 << stream.order } else { 1 };
        let goes_up = (stream.end..stream.end + reach).contains(&at);
        let goes_down = at < stream.start && at + reach >= stream.start;
        let growth = if is_dense { 2 } else { 1 };
        (goes_up || goes_down).then_some(stream.order + growth)
    }

    fn neighbours_order(
        &mut self,
        region: usize,
        at: usize,
        swapped: u32,
        stream: u32,
        scale: f64,
    ) -> u32 {
        if stream >= NEIGHBOURS_ORDER {
            return stream;
        }
        self.faults += 1;
        let key = (region, at >> NEIGHBOURS_ORDER);
        let was_alone = self.samples.get(&key).is_some_and(|sample| sample.is_alone);
        let is_alone = was_alone || self.faults.is_multiple_of(ALONE_ONE_IN);
        if let Entry::Vacant(place) = self.samples.entry(key) {
            let swapped = swapped & !(1 << at);
            place.insert(Sample { first: at, swapped, touched: 0, is_alone });
            self.ages.push_back(key);
            while self.ages.len() as f64 > (SEEN_AFTER / scale).max(1.0) {
                self.settle_oldest();
            }
        }
        if is_alone {
            return 0;
        }
        (stream + 1..=NEIGHBOURS_ORDER)
            .rev()
            .find(|&order| self.is_worth_it(order))
            .unwrap_or(stream)
    }

    /// Pages of a region are touched.
    pub(super) fn note_touched(&mut self, region: usize, pages: u32) {
        for (_, sample) in self.samples.range_mut((region, 0)..=(region, usize::MAX)) {
            sample.touched |= pages;
        }
    }

    fn is_worth_it(&self, order: u32) -> bool {
        self.shares[order as usize - 1] >= f64::from(WORTH_OF_8) / 8.0
    }

    /// Takes what a sample has shown into the shares.
    fn settle_oldest(&mut self) {
        let Some(sample) = self.ages.pop_front().and_then(|key| self.samples.remove(&key)) else {
            return;
        };
        for (share, order) in self.shares.iter_mut().zip(1..) {
            if let Some(shown) = sample.share(order) {
                *share += (shown - *share) / f64::from(WEIGHT);
            }
        }
    }
}

/// The pages of the block of this order that a page is in.
fn block(at: usize, order: u32) -> u32 {
    (((1u64 << (1 << order)) - 1) << (at >> order << order)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = u32::BITS as usize;

    /// Touches pages of a hundred regions, all in swap at first, in the order that `pages` gives; returns the faults of
    /// the second half, where one region in `scale` is sampled.
    fn faults(pages: &[usize], scale: f64) -> usize {
        let (mut along, mut faults) = (Along::default(), 0);
        for region in 0..100 {
            let mut swapped = u32::MAX;
            for &at in pages {
                if swapped >> at & 1 != 0 {
                    faults += usize::from(region >= 50);
                    let order = along.order(region, at, swapped, 1e6, scale);
                    swapped &= !block(at, order);
                }
                along.note_touched(region, 1 << at);
            }
        }
        faults
    }

    #[test]
    fn what_is_touched_as_one_soon_comes_as_one() {
        for scale in [16.0, 64.0] {
            let all = Vec::from_iter(0..PAGES);
            let dense = faults(&all, scale);
            assert!((50..600).contains(&dense), "{dense} faults for 50 regions");
            let shuffled = Vec::from_iter((0..PAGES).map(|at| at * 13 % PAGES));
            let blocks = faults(&shuffled, scale);
            assert!((50..600).contains(&blocks), "{blocks} faults for 200 blocks");
            let far = faults(&[3, 12, 20, 31], scale);
            assert_eq!(far, 200, "each alone");
        }
    }

    #[test]
    fn a_stream_goes_on_where_it_left_off_unless_others_came_between() {
        let next = |others: usize, at: usize| {
            let mut along = Along::default();
            along.order(0, 7, u32::MAX, 1e6, 1.0);
            along.order(0, 8, u32::MAX, 1e6, 1.0);
            (1..=others).for_each(|region| _ = along.order(region, 0, 1, 1e6, 1.0));
            along.stream_order(0, at, 1.0)
        };
        assert_eq!([next(0, 10), next(0, 7), next(0, 20)], [Some(2), Some(2), None]);
        assert_eq!([next(20, 10), next(60, 10)], [Some(2), None], "a longer one stays longer");
    }
}
