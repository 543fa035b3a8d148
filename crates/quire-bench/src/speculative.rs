//! `quire bench speculative`: what it brings that faults do without the space's lock, and what it
//! costs where it brings nothing.
//!
//! Four parts, each run bare, under quire, and under quire with every fault going the classic way.
//! *ebizzy*: threads that map, touch and unmap all the time. *scaler*: the page-fault programs of
//! will-it-scale, by number of threads; what Quire does not manage of them is measured too, and
//! said to be so. *contention*: threads that fault while one more changes the layout a good part
//! of the time, with what a fault takes at the median and beyond: it unmaps, which drops pages outside of
//! the space's lock, or takes rights away, which moves pages under it. *kernbench*: the build of a
//! tree, most of whose processes have one thread and never speculate.
//!
//! Budgets hold all that a program wants: nothing is reclaimed, and a difference is one of faults.

mod ebizzy;
mod kernbench;
mod load;
mod ways;

use std::collections::HashMap;

use anyhow::{Result, ensure};
use quire_cli::size::{Human, machine_memory_bytes};

pub(crate) use self::ebizzy::{EbizzyArgs, main as ebizzy};
use self::load::Load;
pub(crate) use self::load::{Change, LoadArgs, main as load};
use self::ways::{MANAGED, Way, counters};
use super::contestant::{Contestant, Outcome, Stage, Workload};
use super::harness::report::{Part, Report, spread};
use super::harness::suite::{Along, Figures, Head, Results, Shape, Sheet, Suite, measure, plural};
use super::tree::Tree;
use super::{SpeculativeBench, programs};

/// With this variable in the environment every fault of a run goes the classic way.
const KNOB: &str = "QUIRE_NO_SPECULATIVE_FAULTS";
/// The size and the number of ebizzy's chunks, as it is run here.
const CHUNK_BYTES: u64 = 512 << 10;
const CHUNKS: u64 = 10;
/// What a job of a build needs at most: the compiler proper, roughly.
const JOB_BYTES: u64 = 512 << 20;
/// Where Quire sees less than that, it is not Quire that serves the program's faults.
const MANAGED_MIN_MIB: f64 = 0.5;
/// Beside what a program asks for: its heap, page words, and what is mapped ahead.
const BESIDE_BYTES: u64 = 64 << 20;

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SpeculativePart {
    /// Threads that map, touch and unmap
    Ebizzy,
    /// will-it-scale's page-fault programs
    Scaler,
    /// Faults beside a thread that unmaps, or protects, large areas
    Contention,
    /// The build of a tree
    Kernbench,
}

/// A line that the bench reads from its programs.
fn print_figure(name: &str, value: f64) {
    println!("{{\"figure\": \"{name}\", \"value\": {value:.3}}}");
}

/// What a cell is measured by.
struct Plan {
    way: Way,
    workload: Workload,
    budget_bytes: u64,
    /// It is a build: cleaned before each run, with the figures of one.
    is_build: bool,
}

/// What the options come to.
struct SpeculativeSuite<'a> {
    options: &'a SpeculativeBench,
    stage: Stage,
    /// What is built; nothing where nothing is to be.
    tree: Option<Tree>,
    /// The first build reads compiler, headers and sources from the disk: it is not counted.
    is_warm: bool,
    left_out: Vec<String>,
    /// What a deterministic program printed first, by name.
    printed: HashMap<String, u64>,
}

/// Runs the bench.
pub(crate) fn report(options: &SpeculativeBench) -> Result<Report> {
    ensure!(
        std::env::var_os(KNOB).is_none(),
        "{KNOB} is set, so that all runs would go the classic way; unset it"
    );
    ensure!(!options.threads.contains(&0), "a program runs with one thread at least");
    ensure!(options.seconds > 0.0, "a program runs for more than no time");
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let mut left_out = Vec::new();
    let tree = match (&options.tree, options.only.contains(&SpeculativePart::Kernbench)) {
        (_, false) => None,
        (Some(path), _) => Some(Tree::at(path)?),
        (None, _) => match Tree::of_zstd(stage.folder(), common.quick) {
            Ok(tree) => Some(tree),
            Err(error) => {
                left_out.push(format!("kernbench: {error:#}"));
                None
            }
        },
    };
    let (is_warm, printed) = (false, HashMap::new());
    measure(&mut SpeculativeSuite { options, stage, tree, is_warm, left_out, printed }, common)
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The budget for a program that wants so much: it is never short.
const fn budget_for(wanted_bytes: u64) -> u64 {
    2 * wanted_bytes + BESIDE_BYTES
}

/// Adds a row in which a program runs each way.
fn add(sheet: &mut Sheet<Plan>, row: &str, workload: &Workload, wanted_bytes: u64, is_build: bool) {
    let budget_bytes = budget_for(wanted_bytes);
    for way in Way::ALL {
        let plan = Plan { way, workload: workload.clone(), budget_bytes, is_build };
        sheet.add(row, way.name(), plan);
    }
}

fn sheet(title: impl Into<String>) -> Sheet<Plan> {
    Sheet::new(title, Shape::Figures).base(Way::Classic.name())
}

impl SpeculativeSuite<'_> {
    fn is_quick(&self) -> bool {
        self.options.common.quick
    }

    fn threads(&self) -> &[usize] {
        let all = &self.options.threads;
        if self.is_quick() { &all[..all.len().min(2)] } else { all }
    }

    fn seconds(&self) -> f64 {
        let seconds = self.options.seconds;
        if self.is_quick() { seconds.min(0.2) } else { seconds }
    }

    fn ebizzy(&self) -> Sheet<Plan> {
        let mut sheet = sheet("ebizzy: more records are better");
        sheet.has_means = true;
        sheet.rounds = self.options.runs;
        let mut numbers = vec![cpus()];
        if !self.is_quick() && cpus() != 16 {
            numbers.push(16);
        }
        for threads in numbers {
            let line = format!("ebizzy -mTt {threads} -S {}", self.seconds());
            let name = format!("ebizzy -mTt {threads}");
            let wanted_bytes = (threads as u64 + CHUNKS) * CHUNK_BYTES;
            let workload = programs::built_in(&self.stage.own, name.clone(), &line);
            add(&mut sheet, &name, &workload, wanted_bytes, false);
        }
        sheet
    }

    /// So much for each of the threads that a file and a copy of it fit the machine with ease.
    fn area_bytes(&self, threads: usize) -> u64 {
        let machine = machine_memory_bytes();
        let wanted = self.options.area.bytes_of(machine);
        let most = machine / 8 / threads as u64;
        let area = if self.is_quick() { wanted.min(8 << 20) } else { wanted }.min(most);
        (area & !0xf_ffff).max(1 << 20)
    }

    /// Adds a row for a program that faults, with so many bytes mapped beside the areas.
    fn load(
        &self,
        sheet: &mut Sheet<Plan>,
        what: Load,
        threads: usize,
        words: &str,
        beside_bytes: u64,
    ) {
        let area_bytes = self.area_bytes(threads);
        let line = format!("load {} --threads={threads} --area={area_bytes} {words}", what.name());
        let workload = programs::built_in(&self.stage.own, what.name(), &line);
        let wanted_bytes = threads as u64 * area_bytes + beside_bytes;
        add(sheet, &plural(threads, "thread"), &workload, wanted_bytes, false);
    }

    fn scaler(&self) -> Vec<Sheet<Plan>> {
        let all = [Load::Anonymous, Load::PrivateFile, Load::SharedFile, Load::Malloc];
        let sheets = all.map(|what| {
            let mut sheet = sheet(format!("page faults: {}", what.name())).plot(Along::Rows);
            for &threads in self.threads() {
                let words = format!("--seconds={}", self.seconds());
                self.load(&mut sheet, what, threads, &words, 0);
            }
            sheet
        });
        sheets.into()
    }

    fn contention(&self) -> Vec<Sheet<Plan>> {
        let most = if self.is_quick() { 1 } else { usize::MAX };
        let mapped = self.options.mapped.iter().take(most);
        let beside = &self.options.beside;
        let changed = mapped.flat_map(|&mapped| beside.iter().map(move |&how| Some((mapped, how))));
        let mut sheets = Vec::new();
        for change in std::iter::once(None).chain(changed) {
            let mut mapped_bytes =
                change.map_or(0, |(mapped, _)| mapped.bytes_of(machine_memory_bytes()));
            if self.is_quick() {
                mapped_bytes = mapped_bytes.min(16 << 20);
            }
            let beside = change.map_or("no thread maps".to_owned(), |(_, how)| {
                format!("one more {} {}", how.does(), Human(mapped_bytes))
            });
            let words = change.map_or(String::new(), |(_, how)| {
                format!("--mapped={mapped_bytes} --beside={}", how.name())
            });
            let mut sheet = sheet(format!("faults, while {beside}")).plot(Along::Rows);
            for &threads in self.threads().iter().filter(|&&threads| threads <= 8) {
                self.load(&mut sheet, Load::Contention, threads, &words, mapped_bytes);
            }
            sheets.push(sheet);
        }
        sheets
    }

    fn kernbench(&self, tree: &Tree) -> Sheet<Plan> {
        let mut sheet = sheet(format!("kernbench: {}", tree.name));
        sheet.has_means = true;
        sheet.rounds = Some(self.options.builds.unwrap_or(self.options.common.size(1, 5, 5)));
        for (load, jobs) in kernbench::loads(cpus()) {
            let row = format!("Average {load} -j {jobs}");
            add(&mut sheet, &row, &tree.workload(jobs), JOB_BYTES * jobs as u64, true);
        }
        sheet
    }

    /// Removes what the last build made; before the first one, builds once.
    fn prepare_build(&mut self) -> Result<()> {
        let Some(tree) = &self.tree else { return Ok(()) };
        if !self.is_warm {
            tree.clean()?;
            self.stage.run(&tree.workload(cpus()), &Contestant::Bare)?;
            self.is_warm = true;
        }
        tree.clean()
    }
}

impl Suite for SpeculativeSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "speculative",
            question: "What does it bring that faults do without the space's lock, and what does it cost where it brings nothing?",
            facts: vec![
                ("seconds of each run", self.seconds().to_string()),
                (
                    "memory of each thread that faults",
                    Human(self.options.area.bytes_of(machine_memory_bytes())).to_string(),
                ),
            ],
            rounds: self.options.common.rounds(1, 3),
            left_out: self.left_out.clone(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let of_part = |part: &SpeculativePart| match part {
            SpeculativePart::Ebizzy => vec![self.ebizzy()],
            SpeculativePart::Scaler => self.scaler(),
            SpeculativePart::Contention => self.contention(),
            SpeculativePart::Kernbench => {
                self.tree.iter().map(|tree| self.kernbench(tree)).collect()
            }
        };
        self.options.only.iter().flat_map(of_part).collect()
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        if plan.is_build {
            self.prepare_build()?;
        }
        let workload = &plan.workload;
        let outcome = self.stage.run(workload, &plan.way.contestant(plan.budget_bytes))?;
        if workload.is_deterministic {
            let first = *self.printed.entry(workload.name.clone()).or_insert(outcome.digest);
            ensure!(outcome.digest == first, "it printed something else than before");
        }
        let mut figures =
            if plan.is_build { kernbench::figures(&outcome) } else { counted(&outcome) };
        if plan.way != Way::Bare {
            figures.extend(counters(&outcome));
        }
        Ok(figures)
    }

    fn is_ours(&self, column: &str) -> bool {
        column != Way::Bare.name()
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let mut words = Vec::new();
        for sheet in self.sheets() {
            for row in sheet.rows() {
                words.extend(sentence(&sheet.title, row, *results));
            }
        }
        words
    }
}

/// What speculation brings in a row.
fn sentence(sheet: &str, row: &str, results: Results<'_>) -> Option<String> {
    let speculative = Way::Speculative.name();
    let managed = results.samples(sheet, row, speculative, MANAGED);
    let figures = results.names(sheet, row, speculative);
    let figure = figures.first()?;
    if managed.median() < MANAGED_MIN_MIB {
        return Some(format!(
            "{sheet}, {row}: not managed; the kernel serves these faults in all columns."
        ));
    }
    let over = |other: Way| results.over(sheet, row, [speculative, other.name()], figure);
    let (classic, bare) = (over(Way::Classic), over(Way::Bare));
    Some(format!(
        "{sheet}, {row}: {figure} is {} of that of classic faults, {} of that bare.",
        spread(&classic, "x"),
        spread(&bare, "x")
    ))
}

/// What a program counted, and the time of CPUs that it took, the serving of its faults included.
fn counted(outcome: &Outcome) -> Vec<(String, f64)> {
    let used = [
        ("user_seconds", outcome.used.user_seconds),
        ("system_seconds", outcome.used.system_seconds),
    ];
    let used = used.map(|(name, seconds)| (name.to_owned(), seconds));
    outcome.figures.iter().cloned().chain(used).collect()
}

/// What the kernel's own speculative faults were measured to bring.
pub(crate) fn published() -> Vec<Part> {
    vec![
        Part::published(
            "ebizzy -mTt, Linux 4.17, records a second",
            &[
                &["", "base", "speculative", "gain"],
                &["16 CPUs", "742.57", "1490.24", "2.01x"],
                &["80 CPUs", "13105.4", "24174.23", "1.84x"],
            ],
        ),
        Part::published(
            "kernbench, Linux 4.15, 16 CPUs, 5 builds (deviation)",
            &[
                &["", "", "base", "speculative", "difference"],
                &[
                    "Average Half load -j 8",
                    "Elapsed Time",
                    "1448.65 (5.72)",
                    "1455.84 (4.85)",
                    "0.50 %",
                ],
                &["", "User Time", "10135.4 (30.4)", "10148.8 (31.1)", "0.13 %"],
                &["", "System Time", "900.47 (2.81)", "923.28 (7.53)", "2.53 %"],
                &["", "Percent CPU", "761.4 (1.14)", "760.2 (0.45)", "-0.16 %"],
                &["", "Context Switches", "85380 (3419.52)", "84748 (1904.44)", "-0.74 %"],
                &["", "Sleeps", "105064 (1240.96)", "105074 (337.61)", "0.01 %"],
                &[
                    "Average Optimal load -j 16",
                    "Elapsed Time",
                    "920.528 (10.12)",
                    "927.404 (8.92)",
                    "0.75 %",
                ],
            ],
        ),
    ]
}
