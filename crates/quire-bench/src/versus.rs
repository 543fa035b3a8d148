//! `quire bench run`: three contestants in turn, on programs that fit and programs that do not.
//!
//! A program's want is what it holds bare. It is then run in a half and a quarter of that, counted
//! in two ways, because the contestants keep what they compressed at different places:
//!
//! store inside: the limit holds the compressed store as well. Quire always counts so. For the
//! kernel the cgroup's limit is lowered until limit and zram's mem_used_max together fit.
//!
//! store outside: the limit is for what is not compressed, as the kernel counts. For Quire the
//! budget is raised until what is left of it beside the compressed pool is the limit.
//!
//! A build is a tree of processes. What it wants is the most that all of them have at a time, as
//! `quire run` counts it where everything fits. It is run in half of that, with what `quire run`
//! leaves beside the budget for what is not managed; the kernel's limit and its store together are
//! as much as the cgroup of Quire's run held.
//!
//! Both searches are in [`super::fit`]. The kernel's limit includes the program's page tables and
//! the pages of its code that were not loaded before; these few MiB are not evened out.

use anyhow::{Result, bail};

use super::contestant::{Contestant, KernelSwap, Outcome, Stage, Workload};
use super::fit::{self, Store};
use super::output;
use super::programs::{self, Randomness};
use super::tree::Tree;
use super::{Part, RunBench, sys};
use crate::samples::Samples;
use quire_cli::cgroup::allowance_bytes;
use quire_cli::print::say;
use quire_cli::size::{Human, machine_memory_bytes};
use serde_json::Value;

/// Swap that is made; it takes memory only as it is used, and 16 bytes a page beside.
const ZRAM_BYTES: u64 = 4 << 30;

/// Jobs of a build at a time.
const BUILD_JOBS: usize = 2;
/// What a build may have where it is to fit.
const ROOMY_BYTES: u64 = 1 << 30;

/// One line-up: a program, a limit, and what became of every contestant.
struct VersusCell {
    program: String,
    threads: usize,
    /// What the threads are called.
    unit: &'static str,
    wanted_bytes: u64,
    limit_bytes: u64,
    /// How the store is counted; nothing where the program fits.
    store: Option<Store>,
    contestants: Vec<VersusEntry>,
}

/// A contestant of a line-up.
struct VersusEntry {
    contestant: Contestant,
    /// How its limit was found.
    note: String,
    /// Wall time of the whole run first, then the program's phases.
    phases: Vec<(String, Samples)>,
    failure: Option<String>,
    /// Runs that the kernel's OOM killer ended, and that were repeated.
    oom_kills: u32,
}

/// Runs the bench.
pub(crate) fn main(options: &RunBench) -> Result<u8> {
    sys::notice_signals();
    if options.threads.contains(&0) {
        bail!("a program runs with one thread at least");
    }
    let stage = Stage::new(options.common.quire.as_deref(), KernelSwap::create(ZRAM_BYTES))?;
    if let Err(error) = &stage.kernel {
        say(&format!("without the kernel's swap: {error:#}"));
    }
    let bench =
        VersusSuite { stage, rounds: options.common.rounds(2, 5), is_json: options.common.json };
    if !bench.is_json {
        output::print_heading(bench.rounds, output::MEDIANS);
        if let Ok(kernel) = &bench.stage.kernel {
            println!("{:>24}: lz4, memory cgroup {}", "zram", kernel.limit.version());
        }
    }
    let mut cells = Vec::new();
    if options.only.contains(&Part::Fits) {
        bench.fits(options, &mut cells)?;
    }
    if options.only.contains(&Part::Memory) {
        bench.memory(options, &mut cells)?;
    }
    if options.only.contains(&Part::Real) {
        bench.real(options, &mut cells)?;
    }
    if options.only.contains(&Part::Build) {
        bench.build(options, &mut cells)?;
    }
    if bench.is_json {
        output::print_json("run", [("cells", cells.iter().map(VersusCell::json).collect())]);
    }
    // A contestant that failed is in the figures; that quire failed is the bench's end as well.
    let is_failed = cells.iter().flat_map(|cell| &cell.contestants).any(|entry| {
        entry.failure.is_some() && matches!(entry.contestant, Contestant::Quire { .. })
    });
    Ok(u8::from(is_failed))
}

struct VersusSuite {
    stage: Stage,
    rounds: u32,
    is_json: bool,
}

impl VersusSuite {
    /// Programs within their budget: what quire costs where it brings nothing.
    fn fits(&self, options: &RunBench, cells: &mut Vec<VersusCell>) -> Result<()> {
        let own = &self.stage.own;
        let (scale, bytes) = if options.common.quick { (1, 32 << 20) } else { (4, 256 << 20) };
        let mut workloads = vec![(1, programs::sort_numbers(own, bytes, 2))];
        match programs::python() {
            Ok(python) => {
                workloads.push((1, programs::json_text(&python, scale * 4)));
                workloads.push((1, programs::dicts(&python, scale * 40_000)));
            }
            Err(error) => say(&format!("without CPython: {error:#}")),
        }
        for &threads in &options.threads {
            workloads.push((threads, programs::malloc(own, threads, scale * 2)));
            workloads.push((threads, programs::memory(own, bytes, threads, Randomness::Half)));
        }
        for (threads, workload) in workloads {
            let wanted = self.stage.run(&workload, &Contestant::Bare)?;
            let budget_bytes = wanted.peak_bytes * 2;
            let contestants = vec![
                VersusEntry::new(Contestant::Bare, String::new()),
                VersusEntry::new(
                    Contestant::Quire { budget_bytes, options: Vec::new() },
                    format!("budget {}", Human(budget_bytes)),
                ),
            ];
            let cell = VersusCell {
                program: workload.name.clone(),
                threads,
                unit: "thread",
                wanted_bytes: wanted.peak_bytes,
                limit_bytes: budget_bytes,
                store: None,
                contestants,
            };
            cells.push(self.measure(&workload, &wanted, cell)?);
        }
        Ok(())
    }

    /// Scans and random access.
    fn memory(&self, options: &RunBench, cells: &mut Vec<VersusCell>) -> Result<()> {
        let full = options.size.bytes_of(machine_memory_bytes());
        let bytes = if options.common.quick { full / 4 } else { full };
        for &threads in &options.threads {
            for share in [2, 4] {
                // An eighth compresses to where a quarter of the memory can hold all of it; half
                // does so nowhere, with the store inside.
                for (store, data) in
                    [(Store::Inside, Randomness::Eighth), (Store::Outside, Randomness::Half)]
                {
                    let workload = programs::memory(&self.stage.own, bytes, threads, data);
                    self.limited(&workload, threads, share, store, cells)?;
                }
            }
        }
        Ok(())
    }

    /// CPython and GNU sort.
    fn real(&self, options: &RunBench, cells: &mut Vec<VersusCell>) -> Result<()> {
        let is_quick = options.common.quick;
        let mut workloads = Vec::new();
        match programs::python() {
            Ok(python) => {
                workloads
                    .push((1, programs::dicts(&python, if is_quick { 60_000 } else { 150_000 })));
            }
            Err(error) => say(&format!("without CPython: {error:#}")),
        }
        let text = self.stage.folder().join("text");
        programs::write_text(&text, if is_quick { 32 << 20 } else { 200 << 20 })?;
        for &threads in &options.threads {
            workloads.push((threads, programs::sort_text(&text, threads)));
        }
        for (threads, workload) in workloads {
            for share in [2, 4] {
                for store in [Store::Inside, Store::Outside] {
                    self.limited(&workload, threads, share, store, cells)?;
                }
            }
        }
        Ok(())
    }

    /// A build, where it fits and in half of what all of its processes want.
    fn build(&self, options: &RunBench, cells: &mut Vec<VersusCell>) -> Result<()> {
        let tree = match Tree::of_zstd(self.stage.folder(), options.common.quick) {
            Ok(tree) => tree,
            Err(error) => {
                say(&format!("without a build: {error:#}"));
                return Ok(());
            }
        };
        let workload = tree.rebuild(BUILD_JOBS);
        // The first build reads compiler and headers from the disk: it is not counted.
        let mut wanted = self.stage.run(&workload, &Contestant::Bare)?;
        let roomy = Contestant::Quire { budget_bytes: ROOMY_BYTES, options: Vec::new() };
        wanted.peak_bytes = self.stage.run(&workload, &roomy)?.stat("wanted_bytes_max") as u64;
        let cell = |limit_bytes, store, contestants| VersusCell {
            program: workload.name.clone(),
            threads: BUILD_JOBS,
            unit: "job",
            wanted_bytes: wanted.peak_bytes,
            limit_bytes,
            store,
            contestants,
        };
        let bare = || VersusEntry::new(Contestant::Bare, String::new());
        let fits = vec![bare(), VersusEntry::new(roomy, format!("budget {}", Human(ROOMY_BYTES)))];
        cells.push(self.measure(&workload, &wanted, cell(ROOMY_BYTES, None, fits))?);
        let budget_bytes = wanted.peak_bytes / 2;
        let quire = Contestant::Quire { budget_bytes, options: Vec::new() };
        let mut half = vec![bare()];
        let all_bytes = match self.stage.run(&workload, &quire) {
            Ok(outcome) => outcome.stat("cgroup_bytes_max") as u64,
            Err(error) if sys::is_interrupted() => return Err(error),
            // Said again by its own rounds.
            Err(_) => 0,
        };
        let all_bytes =
            if all_bytes == 0 { budget_bytes + allowance_bytes(1, 0) } else { all_bytes };
        let note = format!("budget {}; its cgroup held {}", Human(budget_bytes), Human(all_bytes));
        half.push(VersusEntry::new(quire, note));
        if let Some(found) = fit::kernel_for_tree(&self.stage, &workload, all_bytes)? {
            half.push(VersusEntry {
                failure: found.failure,
                ..VersusEntry::new(found.contestant, found.note)
            });
        }
        cells.push(self.measure(
            &workload,
            &wanted,
            cell(budget_bytes, Some(Store::Inside), half),
        )?);
        Ok(())
    }

    /// One program in one `share`-th of what it wants.
    fn limited(
        &self,
        workload: &Workload,
        threads: usize,
        share: u64,
        store: Store,
        cells: &mut Vec<VersusCell>,
    ) -> Result<()> {
        let wanted = self.stage.run(workload, &Contestant::Bare)?;
        let limit_bytes = wanted.peak_bytes / share;
        let mut contestants = vec![VersusEntry::new(Contestant::Bare, String::new())];
        for found in [
            fit::quire(&self.stage, workload, &wanted, limit_bytes, store)?,
            fit::kernel(&self.stage, workload, &wanted, limit_bytes, store)?,
        ]
        .into_iter()
        .flatten()
        {
            let mut entry = VersusEntry::new(found.contestant, found.note);
            entry.failure = found.failure;
            contestants.push(entry);
        }
        let cell = VersusCell {
            program: workload.name.clone(),
            threads,
            unit: "thread",
            wanted_bytes: wanted.peak_bytes,
            limit_bytes,
            store: Some(store),
            contestants,
        };
        cells.push(self.measure(workload, &wanted, cell)?);
        Ok(())
    }

    /// The rounds, in turn.
    fn measure(
        &self,
        workload: &Workload,
        wanted: &Outcome,
        mut cell: VersusCell,
    ) -> Result<VersusCell> {
        for _ in 0..self.rounds {
            for entry in &mut cell.contestants {
                if entry.failure.is_some() {
                    continue;
                }
                match self.stage.run(workload, &entry.contestant) {
                    Ok(outcome) => {
                        if workload.is_deterministic && outcome.digest != wanted.digest {
                            entry.failure = Some("printed something else than bare".into());
                        }
                        entry.add(&outcome);
                    }
                    Err(error) if sys::is_interrupted() => return Err(error),
                    Err(error) => entry.failure = Some(format!("{error:#}")),
                }
            }
        }
        if !self.is_json {
            cell.print();
        }
        Ok(cell)
    }
}

impl VersusEntry {
    fn new(contestant: Contestant, note: String) -> VersusEntry {
        VersusEntry { contestant, note, phases: Vec::new(), failure: None, oom_kills: 0 }
    }

    fn add(&mut self, outcome: &Outcome) {
        self.oom_kills += outcome.oom_kills;
        let total = ("total".to_owned(), outcome.seconds);
        for (name, seconds) in std::iter::once(&total).chain(&outcome.phases) {
            let index = self.phases.iter().position(|(known, _)| known == name);
            let index = index.unwrap_or_else(|| {
                self.phases.push((name.clone(), Samples::default()));
                self.phases.len() - 1
            });
            self.phases[index].1.push(*seconds);
        }
    }

    fn phase(&self, name: &str) -> Samples {
        let found = self.phases.iter().find(|(known, _)| known == name);
        found.map(|(_, samples)| samples.clone()).unwrap_or_default()
    }
}

impl VersusCell {
    fn entry(&self, name: &str) -> Option<&VersusEntry> {
        self.contestants.iter().find(|entry| entry.contestant.name() == name)
    }

    /// Quire's time over the other's, round by round.
    fn ratio(&self, other: &str, phase: &str) -> Samples {
        match (self.entry("quire"), self.entry(other)) {
            (Some(quire), Some(other)) => quire.phase(phase).over(&other.phase(phase)),
            _ => Samples::default(),
        }
    }

    fn print(&self) {
        let plural = if self.threads == 1 { "" } else { "s" };
        let threads = format!("{} {}{plural}", self.threads, self.unit);
        print!("\n{}, {threads}: wants {}", self.program, Human(self.wanted_bytes));
        match self.store {
            None => println!(", may have {}", Human(self.limit_bytes)),
            Some(Store::Inside) => {
                println!(", may have {}; compressed store inside that", Human(self.limit_bytes));
            }
            Some(Store::Outside) => println!(
                ", may have {}; compressed store outside that (the kernel's way)",
                Human(self.limit_bytes)
            ),
        }
        for entry in &self.contestants {
            if !entry.note.is_empty() {
                println!("  {:>5}: {}", entry.contestant.name(), entry.note);
            }
            if entry.oom_kills > 0 {
                let name = entry.contestant.name();
                println!(
                    "  {name:>5}: killed by the OOM killer {} times, and repeated",
                    entry.oom_kills
                );
            }
            if let Some(failure) = &entry.failure {
                println!("  {:>5}: FAILED: {failure}", entry.contestant.name());
            }
        }
        let columns = ["bare", "quire", "zram"].map(|name| self.entry(name));
        println!(
            "  {:14}{:>10}{:>10}{:>10}{:>26}{:>26}",
            "seconds", "bare", "quire", "zram", "quire / zram", "quire / bare"
        );
        let Some(bare) = columns[0] else { return };
        for (phase, _) in &bare.phases {
            print!("  {phase:14}");
            for entry in columns {
                match entry.map(|entry| entry.phase(phase)) {
                    Some(samples) if !samples.is_empty() => print!("{:>10.3}", samples.median()),
                    _ => print!("{:>10}", "-"),
                }
            }
            let ratios = ["zram", "bare"].map(|other| output::ratio(&self.ratio(other, phase)));
            println!("{:>26}{:>26}", ratios[0], ratios[1]);
        }
    }

    fn json(&self) -> Value {
        let contestants = self.contestants.iter().map(|entry| {
            let phases = entry.phases.iter();
            let phases = phases.map(|(name, samples)| (name.clone(), Value::from(samples)));
            Value::from_iter([
                ("name", Value::from(entry.contestant.name())),
                ("note", Value::from(entry.note.as_str())),
                ("oom_kills", Value::from(entry.oom_kills)),
                ("failure", entry.failure.as_deref().into()),
                ("seconds", Value::from_iter(phases)),
            ])
        });
        let ratios = |other: &str| {
            let phases = self.contestants[0].phases.iter();
            let ratios = phases.map(|(name, _)| (name.clone(), self.ratio(other, name)));
            let ratios = ratios.filter(|(_, samples)| !samples.is_empty());
            Value::Object(ratios.map(|(name, samples)| (name, Value::from(&samples))).collect())
        };
        Value::from_iter([
            ("program", Value::from(self.program.as_str())),
            ("threads", Value::from(self.threads)),
            ("wanted_bytes", Value::from(self.wanted_bytes)),
            ("limit_bytes", Value::from(self.limit_bytes)),
            ("store", self.store.map(|store| store.name()).into()),
            ("contestants", contestants.collect()),
            ("quire_over_zram", ratios("zram")),
            ("quire_over_bare", ratios("bare")),
        ])
    }
}
