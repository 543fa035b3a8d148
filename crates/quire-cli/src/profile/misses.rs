//! Faults that a budget brings, and what they cost.

use std::ops::{AddAssign, Mul};

use quire::units::PAGE_SIZE;

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
    /// How long unpacking took of each of these pages.
    pub unpack: f64,
}

impl Costs {
    /// The same of pages whose unpacking takes so many nanoseconds.
    fn with_unpack(self, unpack: f64) -> Costs {
        let of = |ns: [f64; 2]| ns.map(|ns| (ns + unpack - self.unpack).max(ns / 4.0));
        Costs { pool: of(self.pool), file: of(self.file), unpack, ..self }
    }
}

/// How pages pack.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Packs {
    tried: f64,
    bytes: f64,
    unpack_ns: f64,
}

impl Packs {
    pub(super) fn note(&mut self, bytes: u64, unpack_ns: u64) {
        self.tried += 1.0;
        self.bytes += bytes as f64;
        self.unpack_ns += unpack_ns as f64;
    }

    /// Forgets some of it, where so many pages were tried: what is in limbo now packs otherwise than what was.
    pub(super) fn fade(&mut self, tried_max: f64) {
        if self.tried > tried_max {
            let part = tried_max / self.tried;
            self.tried *= part;
            self.bytes *= part;
            self.unpack_ns *= part;
        }
    }

    /// A packed page's length, as a part of a page. It has a head, slabs have gaps, and some pages in memory keep their
    /// copies; with a tenth for all that, what is expected of sort, CPython and g++ is nearest to what comes.
    pub(super) fn part(&self) -> f64 {
        match self.tried {
            0.0 => 1.0 / 3.0,
            tried => (self.bytes / tried / PAGE_SIZE as f64 * 1.1).clamp(0.01, 1.0),
        }
    }

    pub(super) fn unpack_ns(&self) -> f64 {
        self.unpack_ns / self.tried.max(1.0)
    }

    /// What faults cost on pages that pack so, where they cost that on others.
    pub(super) fn costs(&self, others: Costs) -> Costs {
        if self.tried == 0.0 { others } else { others.with_unpack(self.unpack_ns()) }
    }
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

    /// Adds faults, and pages that came along, from the file or from the pool.
    pub(super) fn add_at(&mut self, is_file: bool, [faults, along]: [f64; 2]) {
        let pages = if is_file { &mut self.file } else { &mut self.pool };
        pages[0] += faults;
        pages[1] += along;
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
