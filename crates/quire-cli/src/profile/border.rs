//! The border between frames and pool in a miniature, which moves as reclaim's does (`reclaim/border.rs` of the engine).

use std::cmp::Ordering;

use quire::control::Gains;

use super::misses::Costs;

/// What the pool has of a budget at first, at least, and at most, where there is a swap file behind it.
const SHARE_AT_FIRST: f64 = 0.25;
const SHARE_MIN: f64 = 1.0 / 128.0;
const SHARE_MAX: f64 = 0.75;
/// What is missed after less than such a part of the budget has left counts when the pool's share is moved.
pub(super) const NEAR_PART: f64 = 1.0 / 16.0;
/// By how much at a time, where a sixteenth of the budget has left.
const STEP_PART: f64 = 1.0 / 64.0;

/// The pool's share, and what says where it should be.
pub(super) struct Border {
    share: f64,
    /// Pages that were missed soon after they had left, and what a little more of frames would have saved.
    near: f64,
    frames_gain: f64,
    /// What a little more of the pool would have saved, and what its oldest quarter has.
    pool_gain: f64,
    pool_worth: f64,
    /// What a page has taken that came back.
    page_ns: f64,
    /// Pages that had left when the border was looked at last.
    looked_at: u64,
}

impl Default for Border {
    fn default() -> Border {
        Border {
            share: SHARE_AT_FIRST,
            near: 0.0,
            frames_gain: 0.0,
            pool_gain: 0.0,
            pool_worth: 0.0,
            page_ns: 0.0,
            looked_at: 0,
        }
    }
}

impl Border {
    /// What the pool may have, as a part of the budget.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    /// A page comes back from the pool, soon after it left or not, and one of the pool's oldest quarter or not.
    pub(super) fn note_hit(&mut self, is_near: bool, is_old: bool, costs: &Costs) {
        self.page_ns = self.page_ns.max(costs.pool[0]);
        if is_near {
            self.near += 1.0;
            self.frames_gain += costs.pool[0];
        }
        if is_old {
            self.pool_worth += costs.file[0] - costs.pool[0];
        }
    }

    /// A page comes back from the file, soon after it was written or not.
    pub(super) fn note_read(&mut self, is_near: bool, costs: &Costs) {
        self.page_ns = costs.file[0];
        if is_near {
            self.pool_gain += costs.file[0] - costs.pool[0];
        }
    }

    /// Moves the border, where enough pages have left since the last time; so many have in all, the pool has so many,
    /// there is room for `limit`, and each stands for `scale`.
    pub(super) fn settle(&mut self, evicted: u64, in_pool: usize, limit: f64, scale: f64) {
        let left = (evicted - self.looked_at) as f64;
        if left < (limit * NEAR_PART).max(1.0) {
            return;
        }
        self.looked_at = evicted;
        let quarter = (in_pool as f64 / 4.0).max(1.0);
        let all = |sampled: f64| (sampled * scale) as u64;
        let gains = Gains {
            left: all(left),
            near: all(self.near),
            frames_ns: all(self.frames_gain),
            pool_ns: all(self.pool_gain),
            worth_ns: all(self.pool_worth * limit * NEAR_PART / quarter),
            page_ns: self.page_ns as u64,
        };
        let step = left / limit * STEP_PART * 16.0;
        match gains.pool_goes() {
            Ordering::Greater => self.share = (self.share + step).min(SHARE_MAX),
            Ordering::Less => self.share = (self.share - step).max(SHARE_MIN),
            Ordering::Equal => {}
        }
        // What was counted before counts half.
        for gain in
            [&mut self.near, &mut self.frames_gain, &mut self.pool_gain, &mut self.pool_worth]
        {
            *gain /= 2.0;
        }
    }
}
