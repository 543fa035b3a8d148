//! How many pages of a budget are kept free: the numbers by which reclaim goes, and `quire profile` in its miniatures.

/// How far the watermarks are boosted at most. A step of it goes whenever the background thread finds enough.
pub const BOOST_MAX: usize = 64;

/// Pages kept for reclaim itself, which needs memory to free memory; faults leave them alone, free frames included.
pub fn reserve(limit: usize) -> usize {
    (limit / 64).clamp(32, 1024)
}

/// Free pages below which the background thread works, and up to which it does.
pub fn watermarks(limit: usize, boost: usize) -> [usize; 2] {
    let high = (limit / 64 + limit / 64 * 3 * boost / BOOST_MAX).max(64);
    [(high / 2).max(32), high]
}
