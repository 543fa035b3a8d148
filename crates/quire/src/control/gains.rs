//! Where the border between frames and the compressed pool goes, as reclaim moves it and as `quire profile` plays
//! that.

use core::cmp::Ordering;

/// The pool shrinks only where more than one in so many of the pages that left are missed soon. Where half as
/// many are not, frames are enough and it grows: it holds more pages in as much memory.
const FEW: u64 = 16;

/// What was counted since the border was looked at last: pages, and nanoseconds that a sixteenth of the budget more
/// would have saved on either side of it.
#[derive(Clone, Copy, Debug)]
pub struct Gains {
    /// Pages that left memory.
    pub left: u64,
    /// Pages that were missed soon after they had left.
    pub near: u64,
    pub frames_ns: u64,
    pub pool_ns: u64,
    /// Nanoseconds that the same part of the budget has saved as the pool's oldest pages.
    pub worth_ns: u64,
    /// What a page takes that comes back; 0 where none has yet.
    pub page_ns: u64,
}

impl Gains {
    /// Whether the pool is to have more of the budget, or less.
    pub fn pool_goes(&self) -> Ordering {
        let few = self.left / FEW;
        let few_ns = few * self.page_ns;
        // Where no page has come back yet nothing is known.
        let is_far = few_ns > 0 && self.near < few / 2;
        // By a quarter.
        let clearly = |ns: u64| ns / 4 * 5;
        if is_far || self.pool_ns > clearly(self.frames_ns.max(few_ns)) {
            Ordering::Greater
        } else if self.near > few && self.frames_ns > clearly(self.worth_ns) {
            Ordering::Less
        } else {
            Ordering::Equal
        }
    }
}
