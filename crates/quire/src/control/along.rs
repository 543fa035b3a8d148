//! What comes along with a fault: the numbers by which the engine decides it (`fault/neighbours.rs`,
//! `fault/order.rs`), and `quire profile` in its miniatures.

use crate::units::BLOCK_ORDER;

/// The largest block that is not a stream's: eight pages.
pub const NEIGHBOURS_ORDER: u32 = 3;
/// Of eight neighbours so many are asked for where a block is worth it.
pub const WORTH_OF_8: u32 = 5;
/// One fault in so many is served alone, to see which of its neighbours are asked for; so many are looked at, each until
/// another takes its place, and make such a part of what is known.
pub const ALONE_ONE_IN: u32 = 16;
pub const SAMPLES: usize = 64;
pub const WEIGHT: u32 = 16;

/// Streams that are remembered.
pub const STREAMS: usize = 16;
/// From here on a stream over anonymous memory goes on even where pages are passed over. Before, that is
/// more often chance.
pub const LONG_ORDER: u32 = 6;

/// The order of a stream's largest folio: at most a thirty-second of the budget of so many pages, for several streams
/// live side by side.
pub fn stream_order_max(limit: usize) -> u32 {
    (limit / 32).max(1).ilog2().min(BLOCK_ORDER)
}
