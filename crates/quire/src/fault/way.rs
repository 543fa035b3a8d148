//! Move or copy: which is cheaper is measured, not assumed.
//!
//! To move a frame takes a mapping away from the pool, and that costs an interrupt on every other
//! CPU that runs a thread of this process; to copy takes nothing away but needs new memory from
//! the kernel. The cheaper way is taken, and now and then the other one, to learn whether things have
//! changed.

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

/// Running means of what filling a folio costs, in cycles, by way and size.
pub(crate) struct Costs {
    means: [[Mean; CLASSES]; 2],
    turn: AtomicU32,
}

impl Costs {
    /// Nothing measured yet: moving looks cheaper.
    #[must_use]
    pub const fn new() -> Costs {
        Costs { means: [const { [const { Mean::new() }; CLASSES] }; 2], turn: AtomicU32::new(0) }
    }

    fn mean(&self, way: Transfer, pages: usize) -> &Mean {
        &self.means[way as usize][(pages.ilog2() as usize).min(CLASSES - 1)]
    }

    pub fn choose(&self, pages: usize) -> Transfer {
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
}
