//! Move or copy: which is cheaper is measured, not assumed.
//!
//! To move a frame takes a mapping away from the pool, and that costs an interrupt on every other
//! CPU that runs a thread of this process; to copy takes nothing away but needs new memory from
//! the kernel. The cheaper way is taken, and now and then the other one, to learn whether things have
//! changed. Small folios are copied where most are small.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::mean::Mean;
use crate::units::BLOCK_ORDER;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// By moving frames of the pool.
    Move,
    /// By copying into new memory.
    Copy,
}

const CLASSES: usize = BLOCK_ORDER as usize + 1;
/// One fault in so many takes the way that looks dearer.
const PROBE_EVERY: u32 = 128;
/// Folios that are smaller than this are copied where most are. Their time here leaves out what a move's
/// interrupt takes from the thread on the other CPU, a good part of what a small one costs. Where most are
/// larger, what is measured decides: those move, and would miss the frames that copies give back.
const SMALL_PAGES: usize = 4;

/// Running means of what filling a folio costs, in cycles, by way and size.
pub(crate) struct Costs {
    means: [[Mean; CLASSES]; 2],
    /// Sixteenths of the pages of a folio.
    sixteenths: Mean,
    turn: AtomicU32,
}

impl Costs {
    /// Nothing measured yet: moving looks cheaper.
    #[must_use]
    pub const fn new() -> Costs {
        let means = [const { [const { Mean::new() }; CLASSES] }; 2];
        Costs { means, sixteenths: Mean::new(), turn: AtomicU32::new(0) }
    }

    fn mean(&self, way: Transfer, pages: usize) -> &Mean {
        &self.means[way as usize][(pages.ilog2() as usize).min(CLASSES - 1)]
    }

    pub fn choose(&self, pages: usize) -> Transfer {
        self.sixteenths.record(16 * pages as u64);
        if pages.max(self.sixteenths.get() as usize / 16) < SMALL_PAGES {
            return Transfer::Copy;
        }
        let by_move = self.mean(Transfer::Move, pages).get();
        let by_copy = self.mean(Transfer::Copy, pages).get();
        let is_probe = self.turn.fetch_add(1, Relaxed) % PROBE_EVERY == PROBE_EVERY - 1;
        if (by_move <= by_copy) != is_probe { Transfer::Move } else { Transfer::Copy }
    }

    pub fn record(&self, way: Transfer, pages: usize, cycles: u64) {
        if pages > 0 {
            self.mean(way, pages).record(cycles);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_is_taken_and_a_change_is_noticed() {
        let costs = Costs::new();
        for _ in 0..50 {
            costs.record(Transfer::Move, 16, 1000);
            costs.record(Transfer::Copy, 16, 5000);
        }
        assert_eq!(costs.choose(16), Transfer::Move);
        let probes = (0..256).filter(|_| costs.choose(16) == Transfer::Copy).count();
        assert_eq!(probes, 2);
        for _ in 0..50 {
            costs.record(Transfer::Move, 16, 50_000);
        }
        assert_eq!(costs.choose(16), Transfer::Copy);
    }

    #[test]
    fn a_small_folio_is_copied_where_most_are_small() {
        let costs = Costs::new();
        costs.record(Transfer::Move, 1, 1000);
        costs.record(Transfer::Copy, 1, 5000);
        assert!((0..50).all(|_| costs.choose(1) == Transfer::Copy));
        (0..50).for_each(|_| _ = costs.choose(16));
        assert_eq!(costs.choose(1), Transfer::Move);
    }
}
