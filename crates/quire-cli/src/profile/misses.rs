//! Faults that a budget brings, and what they cost.

use std::ops::{AddAssign, Mul};

/// What faults cost, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Costs {
    /// A fault on a page in limbo.
    pub limbo: f64,
    /// A fault on a page in the pool, and each page that comes along, with what it takes to pack others in their
    /// place.
    pub pool: [f64; 2],
    /// The same of the swap file.
    pub file: [f64; 2],
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct Misses {
    /// Faults on pages in limbo.
    pub limbo: f64,
    /// Faults on pages in the pool, and pages that came along.
    pub pool: [f64; 2],
    pub file: [f64; 2],
}

impl Misses {
    /// Pages that came back from swap.
    pub(super) fn swapped_in(&self) -> f64 {
        self.pool.iter().chain(&self.file).sum()
    }

    /// Adds faults, and pages that came along, from the pool and from the file.
    pub(super) fn add(&mut self, pool: [f64; 2], file: [f64; 2]) {
        *self += Misses { limbo: 0.0, pool, file };
    }

    pub(super) fn seconds(&self, costs: &Costs) -> f64 {
        let of = |pages: [f64; 2], ns: [f64; 2]| pages[0] * ns[0] + pages[1] * ns[1];
        (self.limbo * costs.limbo + of(self.pool, costs.pool) + of(self.file, costs.file)) / 1e9
    }
}

impl AddAssign for Misses {
    fn add_assign(&mut self, other: Misses) {
        self.limbo += other.limbo;
        for at in 0..2 {
            self.pool[at] += other.pool[at];
            self.file[at] += other.file[at];
        }
    }
}

impl Mul<f64> for Misses {
    type Output = Misses;

    fn mul(self, factor: f64) -> Misses {
        let both = |pages: [f64; 2]| pages.map(|pages| pages * factor);
        Misses { limbo: self.limbo * factor, pool: both(self.pool), file: both(self.file) }
    }
}
