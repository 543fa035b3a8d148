//! The ways in which a program runs, and the counters that are shown with them.

use super::super::contestant::{Contestant, Outcome};

/// How much of the program Quire saw.
pub(super) const MANAGED: &str = "managed MiB";
/// Counters of `quire run --stats`, and what the kernel's `perf stat` calls them. The last five say why a
/// fault went the classic way; they are shown where they are not 0.
const COUNTERS: [(&str, &str); 8] = [
    ("pgfault", "faults"),
    ("speculative_pgfault", "spf"),
    ("fault_classic", "classic"),
    ("spf_vma_changed", "spf_vma_changed"),
    ("spf_vma_noanon", "spf_vma_noanon"),
    ("spf_vma_notsup", "spf_vma_notsup"),
    ("spf_vma_access", "spf_vma_access"),
    ("spf_pmd_changed", "spf_pmd_changed"),
];

/// How a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// The kernel serves its faults.
    Bare,
    /// Quire does, without the space's lock where that goes.
    Speculative,
    /// Quire does, under the space's lock.
    Classic,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Bare, Way::Speculative, Way::Classic];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Way::Bare => "bare",
            Way::Speculative => "speculative",
            Way::Classic => "classic",
        }
    }

    pub(super) fn contestant(self, budget_bytes: u64) -> Contestant {
        let options = match self {
            Way::Bare => return Contestant::Bare,
            Way::Speculative => Vec::new(),
            Way::Classic => vec!["--no-speculative-faults".into()],
        };
        Contestant::Quire { budget_bytes, options }
    }
}

/// What Quire counted in a run.
pub(super) fn counters(outcome: &Outcome) -> Vec<(String, f64)> {
    let managed = (MANAGED, outcome.stat("wanted_bytes_max") / f64::from(1 << 20));
    let counts = COUNTERS.iter().map(|(name, title)| (*title, outcome.stat(name)));
    let is_shown = |(title, count): &(&str, f64)| !title.starts_with("spf_") || *count > 0.0;
    let figures = std::iter::once(managed).chain(counts.filter(is_shown));
    figures.map(|(title, value)| (title.to_owned(), value)).collect()
}
