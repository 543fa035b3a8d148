//! One program, the ways it ran, and what was measured: kept round by round, printed, as JSON.
//!
//! Owns the three ways, the counters that are shown with them, and the order of the runs: every
//! round runs each way once. A way that fails keeps what it had, says why, and runs no more.

use anyhow::Result;

use super::super::contestant::{Contestant, Outcome, Stage, Workload};
use super::super::output;
use super::super::sys;
use crate::samples::Samples;
use serde_json::Value;

/// Counters of `quire run --stats`, and what the kernel's `perf stat` calls them.
const COUNTERS: [(&str, &str); 8] = [
    ("pgfault", "faults"),
    ("speculative_pgfault", "spf"),
    ("spf_vma_changed", "spf_vma_changed"),
    ("spf_vma_noanon", "spf_vma_noanon"),
    ("spf_vma_notsup", "spf_vma_notsup"),
    ("spf_vma_access", "spf_vma_access"),
    ("spf_pmd_changed", "spf_pmd_changed"),
    ("fault_classic", "classic"),
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

    fn contestant(self, budget_bytes: u64) -> Contestant {
        let options = match self {
            Way::Bare => return Contestant::Bare,
            Way::Speculative => Vec::new(),
            Way::Classic => vec!["--no-speculative-faults".into()],
        };
        Contestant::Quire { budget_bytes, options }
    }
}

/// A figure of a table of others', measured before and after.
pub(super) struct Published {
    pub figure: &'static str,
    pub title: &'static str,
    pub base: f64,
    pub speculative: f64,
}

/// How figures are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Style {
    Medians,
    /// The mean, and the deviation in brackets.
    Means,
}

/// What is measured.
pub(super) struct Plan {
    pub part: &'static str,
    pub title: String,
    pub threads: usize,
    pub budget_bytes: u64,
    /// Where Quire sees less than that, it is not Quire that serves the program's faults.
    pub managed_bytes_min: u64,
    pub workload: Workload,
    pub rounds: u32,
    pub style: Style,
    /// Whatever else there is to know of it, for JSON.
    pub facts: Vec<(&'static str, f64)>,
    pub published: Vec<Published>,
}

/// What a way came to.
struct Entry {
    way: Way,
    figures: Vec<(String, Samples)>,
    counters: [Samples; COUNTERS.len()],
    /// Most content that Quire saw, in any round.
    managed_bytes: f64,
    failure: Option<String>,
}

/// A plan, carried out.
pub(super) struct Cell {
    plan: Plan,
    entries: [Entry; 3],
}

impl Plan {
    /// Runs the rounds; what a run came to is told by `figures`.
    pub(super) fn measure(
        self,
        stage: &Stage,
        before: impl Fn() -> Result<()>,
        figures: impl Fn(&Outcome) -> Vec<(String, f64)>,
    ) -> Result<Cell> {
        let mut entries = Way::ALL.map(Entry::new);
        let mut expected = None;
        for _ in 0..self.rounds {
            for entry in entries.iter_mut().filter(|entry| entry.failure.is_none()) {
                before()?;
                match stage.run(&self.workload, &entry.way.contestant(self.budget_bytes)) {
                    Ok(outcome) => {
                        let is_other = *expected.get_or_insert(outcome.digest) != outcome.digest;
                        if self.workload.is_deterministic && is_other {
                            entry.failure = Some("printed something else than bare".into());
                        }
                        entry.add(&outcome, figures(&outcome));
                    }
                    Err(error) if sys::is_interrupted() => return Err(error),
                    Err(error) => entry.failure = Some(format!("{error:#}")),
                }
            }
        }
        Ok(Cell { plan: self, entries })
    }
}

impl Entry {
    fn new(way: Way) -> Entry {
        let counters = std::array::from_fn(|_| Samples::default());
        Entry { way, figures: Vec::new(), counters, managed_bytes: 0.0, failure: None }
    }

    fn add(&mut self, outcome: &Outcome, figures: Vec<(String, f64)>) {
        for (name, value) in figures {
            match self.figures.iter_mut().find(|(known, _)| *known == name) {
                Some((_, samples)) => samples.push(value),
                None => self.figures.push((name, [value].into_iter().collect())),
            }
        }
        for ((name, _), samples) in COUNTERS.iter().zip(&mut self.counters) {
            samples.push(outcome.stat(name));
        }
        self.managed_bytes = self.managed_bytes.max(outcome.stat("wanted_bytes_max"));
    }

    fn figure(&self, name: &str) -> Samples {
        let found = self.figures.iter().find(|(known, _)| known == name);
        found.map(|(_, samples)| samples.clone()).unwrap_or_default()
    }
}

impl Cell {
    /// Whether Quire failed.
    pub(super) fn is_failed(&self) -> bool {
        self.entries.iter().any(|entry| entry.way != Way::Bare && entry.failure.is_some())
    }

    fn entry(&self, way: Way) -> &Entry {
        &self.entries[way as usize]
    }

    /// The names of all figures.
    fn names(&self) -> Vec<&str> {
        let fullest = self.entries.iter().max_by_key(|entry| entry.figures.len());
        let figures = fullest.iter().flat_map(|entry| &entry.figures);
        figures.map(|(name, _)| name.as_str()).collect()
    }

    fn speculative_over(&self, other: Way, name: &str) -> Samples {
        self.entry(Way::Speculative).figure(name).over(&self.entry(other).figure(name))
    }

    /// Whether Quire served the program's faults; nothing where it did not run.
    fn is_managed(&self) -> Option<bool> {
        let speculative = self.entry(Way::Speculative);
        let has_run = !speculative.figures.is_empty();
        has_run.then_some(speculative.managed_bytes >= self.plan.managed_bytes_min as f64)
    }

    pub(super) fn print(&self) {
        println!("\n{}", self.plan.title);
        if self.is_managed() == Some(false) {
            println!("  NOT MANAGED by quire: the kernel serves these faults in all three columns");
        }
        for entry in &self.entries {
            if let Some(failure) = &entry.failure {
                println!("  {}: FAILED: {failure}", entry.way.name());
            }
        }
        print!("  {:22}", "");
        Way::ALL.iter().for_each(|way| print!("{:>20}", way.name()));
        println!("{:>26}{:>26}", "speculative / classic", "speculative / bare");
        for name in self.names() {
            print!("  {name:22}");
            for entry in &self.entries {
                print!("{:>20}", self.written(&entry.figure(name)));
            }
            let ratio = |other| output::ratio(&self.speculative_over(other, name));
            println!("{:>26}{:>26}", ratio(Way::Classic), ratio(Way::Bare));
        }
        for Published { title, base, speculative, .. } in &self.plan.published {
            let ratio = format!("{:.2}x", speculative / base);
            println!(
                "  {title:22}{:>20}{speculative:>20.2}{base:>20.2}{ratio:>26}{:>26}",
                "-", "-"
            );
        }
        self.print_counters();
    }

    /// A row for each beside means, as the published tables have them; a line for each way else.
    fn print_counters(&self) {
        if self.is_managed() != Some(true) {
            return;
        }
        let ways = [Way::Speculative, Way::Classic].map(|way| self.entry(way));
        let count = |entry: &Entry, index: usize| match &entry.counters[index] {
            none if none.is_empty() => "-".to_owned(),
            samples => format!("{:.0}", samples.median()),
        };
        if self.plan.style == Style::Means {
            for (index, (_, title)) in COUNTERS.iter().enumerate() {
                let counts = ways.map(|entry| count(entry, index));
                println!("  {title:22}{:>20}{:>20}{:>20}", "-", counts[0], counts[1]);
            }
            return;
        }
        for entry in ways {
            let counters = COUNTERS.iter().enumerate();
            let counts: Vec<String> = counters
                .map(|(index, (_, title))| format!("{} {title}", count(entry, index)))
                .collect();
            println!("  {}: {}", entry.way.name(), counts.join(", "));
        }
    }

    fn written(&self, samples: &Samples) -> String {
        let number = |value: f64| {
            if value.abs() < 1000.0 { format!("{value:.2}") } else { format!("{value:.0}") }
        };
        match self.plan.style {
            _ if samples.is_empty() => "-".into(),
            Style::Medians => number(samples.median()),
            Style::Means => {
                format!("{} ({})", number(samples.mean()), number(samples.deviation()))
            }
        }
    }

    pub(super) fn json(&self) -> Value {
        let plan = &self.plan;
        let figures = self.names().into_iter().map(|name| {
            let ways = self.entries.iter();
            let ways = ways.map(|entry| (entry.way.name(), entry.figure(name)));
            let ratios = [
                ("speculative_over_classic", self.speculative_over(Way::Classic, name)),
                ("speculative_over_bare", self.speculative_over(Way::Bare, name)),
            ];
            let members = ways.chain(ratios).filter(|(_, samples)| !samples.is_empty());
            let members = members.map(|(key, samples)| (key, Value::from(&samples)));
            (name, Value::from_iter(members))
        });
        let counters = [Way::Speculative, Way::Classic].map(|way| {
            let entry = self.entry(way);
            let counters = COUNTERS.iter().zip(&entry.counters);
            let counters = counters.filter(|(_, samples)| !samples.is_empty());
            let members = counters.map(|((name, _), count)| (*name, Value::from(count)));
            (way.name(), Value::from_iter(members))
        });
        let failures = self
            .entries
            .iter()
            .filter_map(|entry| Some((entry.way.name(), entry.failure.as_deref()?)));
        let published = plan.published.iter().map(|published| {
            Value::from_iter([
                ("figure", Value::from(published.figure)),
                ("machine", Value::from(published.title)),
                ("base", Value::from(published.base)),
                ("speculative", Value::from(published.speculative)),
                ("speculative_over_base", Value::from(published.speculative / published.base)),
            ])
        });
        let facts = plan.facts.iter().map(|(name, value)| (*name, *value));
        Value::from_iter([
            ("part", Value::from(plan.part)),
            ("program", Value::from(plan.workload.name.as_str())),
            ("threads", Value::from(plan.threads)),
            ("budget_bytes", Value::from(plan.budget_bytes)),
            ("facts", Value::from_iter(facts)),
            ("is_managed", self.is_managed().map(u8::from).into()),
            ("figures", Value::from_iter(figures)),
            ("counters", Value::from_iter(counters)),
            ("published", published.collect()),
            ("failures", Value::from_iter(failures)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(speculative: f64, managed_bytes_min: u64) -> Cell {
        let workload = Workload { name: "p".into(), argv: Vec::new(), is_deterministic: false };
        let plan = Plan {
            part: "ebizzy",
            title: String::new(),
            threads: 2,
            budget_bytes: 2,
            managed_bytes_min,
            workload,
            rounds: 1,
            style: Style::Means,
            facts: Vec::new(),
            published: Vec::new(),
        };
        let mut entries = Way::ALL.map(Entry::new);
        for (entry, value) in entries.iter_mut().zip([8.0, speculative, 2.0]) {
            entry.figures.push(("rate".into(), [value].into_iter().collect()));
            entry.managed_bytes = if entry.way == Way::Bare { 0.0 } else { 100.0 };
        }
        Cell { plan, entries }
    }

    #[test]
    fn each_way_is_found_where_it_was_put() {
        let cell = cell(4.0, 100);
        for way in Way::ALL {
            assert_eq!(cell.entry(way).way, way);
        }
        assert_eq!(cell.speculative_over(Way::Classic, "rate").median(), 2.0);
        assert_eq!(cell.speculative_over(Way::Bare, "rate").median(), 0.5);
    }

    #[test]
    fn what_quire_saw_little_of_is_not_managed() {
        assert_eq!(cell(4.0, 100).is_managed(), Some(true));
        assert_eq!(cell(4.0, 101).is_managed(), Some(false));
        let mut never_ran = cell(4.0, 100);
        never_ran.entries[Way::Speculative as usize].figures.clear();
        assert_eq!(never_ran.is_managed(), None);
    }

    #[test]
    fn only_a_failure_of_quires_is_the_benchs() {
        let mut cell = cell(4.0, 100);
        cell.entries[Way::Bare as usize].failure = Some("no".into());
        assert!(!cell.is_failed());
        cell.entries[Way::Classic as usize].failure = Some("no".into());
        assert!(cell.is_failed());
        assert!(cell.json().to_string().contains(r#""failures":{"bare":"no","classic":"no"}"#));
    }

    #[test]
    fn a_mean_is_written_with_its_deviation() {
        let cell = cell(4.0, 100);
        assert_eq!(cell.written(&[1.0, 3.0].into_iter().collect()), "2.00 (1.41)");
        assert_eq!(cell.written(&[1999.6].into_iter().collect()), "2000 (0.00)");
    }
}
