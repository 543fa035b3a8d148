//! Builds of a tree by make, measured as kernbench does: half as many jobs as there are CPUs, and
//! as many.
//!
//! Owns the rows of figures. The tree may be a configured kernel's (`--tree`); by default it is zstd
//! (`tree.rs`).

use super::super::contestant::Outcome;

/// The six rows.
pub(super) fn figures(outcome: &Outcome) -> Vec<(String, f64)> {
    let used = &outcome.used;
    let busy_seconds = used.user_seconds + used.system_seconds;
    let rows = [
        ("Elapsed Time", outcome.seconds),
        ("User Time", used.user_seconds),
        ("System Time", used.system_seconds),
        ("Percent CPU", busy_seconds * 100.0 / outcome.seconds),
        ("Context Switches", used.involuntary_switches as f64),
        ("Sleeps", used.voluntary_switches as f64),
    ];
    rows.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Half as many jobs as CPUs, and as many.
pub(super) fn loads(cpus: usize) -> Vec<(&'static str, usize)> {
    vec![("Half load", (cpus / 2).max(1)), ("Optimal load", cpus.max(1))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_load_of_one_cpu_is_one_job() {
        assert_eq!(loads(16), [("Half load", 8), ("Optimal load", 16)]);
        assert_eq!(loads(1), [("Half load", 1), ("Optimal load", 1)]);
    }
}
