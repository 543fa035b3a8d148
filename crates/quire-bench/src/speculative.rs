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

mod cell;
mod ebizzy;
mod kernbench;
mod load;

use anyhow::{Result, ensure};

use self::cell::{Cell, Plan, Published, Style};
pub(crate) use self::ebizzy::{EbizzyArgs, main as ebizzy};
use self::load::Load;
pub(crate) use self::load::{Change, LoadArgs, main as load};
use super::contestant::{Contestant, Outcome, Stage};
use super::output;
use super::tree::Tree;
use super::{SpeculativeBench, programs, sys};
use quire_cli::print::say;
use quire_cli::size::{Human, machine_memory_bytes};

/// With this variable in the environment every fault of a run goes the classic way.
const KNOB: &str = "QUIRE_NO_SPECULATIVE_FAULTS";
/// The size and the number of ebizzy's chunks, as it is run here.
const CHUNK_BYTES: u64 = 512 << 10;
const CHUNKS: u64 = 10;
/// What a job of a build needs at most: the compiler proper, roughly.
const JOB_BYTES: u64 = 512 << 20;
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

/// What the options come to.
struct SpeculativeSuite<'a> {
    options: &'a SpeculativeBench,
    stage: Stage,
    threads: Vec<usize>,
    seconds: f64,
    rounds: u32,
    left_out: Vec<String>,
    cells: Vec<Cell>,
}

/// Runs the bench.
pub(crate) fn main(options: &SpeculativeBench) -> Result<u8> {
    sys::notice_signals();
    ensure!(
        std::env::var_os(KNOB).is_none(),
        "{KNOB} is set, so that all runs would go the classic way; unset it"
    );
    ensure!(!options.threads.contains(&0), "a program runs with one thread at least");
    ensure!(options.seconds > 0.0, "a program runs for more than no time");
    let common = &options.common;
    let mut threads = options.threads.clone();
    if common.quick {
        threads.truncate(2);
    }
    let mut bench = SpeculativeSuite {
        options,
        stage: Stage::without_kernel(common.quire.as_deref())?,
        threads,
        seconds: if common.quick { options.seconds.min(0.2) } else { options.seconds },
        rounds: common.rounds(1, 3),
        left_out: Vec::new(),
        cells: Vec::new(),
    };
    if !common.json {
        output::print_heading(bench.rounds, "ratios with the least and the most");
    }
    for part in &options.only {
        match part {
            SpeculativePart::Ebizzy => bench.ebizzy()?,
            SpeculativePart::Scaler => bench.scaler()?,
            SpeculativePart::Contention => bench.contention()?,
            SpeculativePart::Kernbench => bench.kernbench()?,
        }
    }
    if common.json {
        output::print_json(
            "speculative",
            [
                ("left_out", bench.left_out.clone().into()),
                ("cells", bench.cells.iter().map(Cell::json).collect()),
            ],
        );
    }
    Ok(u8::from(bench.cells.iter().any(Cell::is_failed)))
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The budget for a program that wants so much: it is never short.
const fn budget_for(wanted_bytes: u64) -> u64 {
    2 * wanted_bytes + BESIDE_BYTES
}

impl SpeculativeSuite<'_> {
    fn add(&mut self, cell: Cell) {
        if !self.options.common.json {
            cell.print();
        }
        self.cells.push(cell);
    }

    fn leave_out(&mut self, what: String) {
        say(&format!("LEFT OUT: {what}"));
        self.left_out.push(what);
    }

    fn ebizzy(&mut self) -> Result<()> {
        let mut numbers = vec![cpus()];
        if !self.options.common.quick && cpus() != 16 {
            numbers.push(16);
        }
        for threads in numbers {
            let line = format!("ebizzy -mTt {threads} -S {}", self.seconds);
            let name = format!("ebizzy -mTt {threads}");
            let wanted_bytes = (threads as u64 + CHUNKS) * CHUNK_BYTES;
            let plan = Plan {
                part: "ebizzy",
                title: format!("{name}: more records are better; the mean of all runs (deviation)"),
                threads,
                budget_bytes: budget_for(wanted_bytes),
                managed_bytes_min: CHUNKS * CHUNK_BYTES,
                workload: programs::built_in(&self.stage.own, name, &line),
                rounds: self.options.runs.unwrap_or(self.rounds),
                style: Style::Means,
                facts: Vec::new(),
                published: published(),
            };
            let cell = plan.measure(&self.stage, || Ok(()), counted)?;
            self.add(cell);
        }
        Ok(())
    }

    /// So much for each of the threads that a file and a copy of it fit the machine with ease.
    fn area_bytes(&self, threads: usize) -> u64 {
        let machine = machine_memory_bytes();
        let wanted = self.options.area.bytes_of(machine);
        let most = machine / 8 / threads as u64;
        let area = if self.options.common.quick { wanted.min(8 << 20) } else { wanted }.min(most);
        (area & !0xf_ffff).max(1 << 20)
    }

    fn scaler(&mut self) -> Result<()> {
        for what in [Load::Anonymous, Load::PrivateFile, Load::SharedFile, Load::Malloc] {
            for threads in self.threads.clone() {
                let area_bytes = self.area_bytes(threads);
                let title = format!("{}, areas of {}", what.name(), Human(area_bytes));
                let words = format!("--seconds={}", self.seconds);
                let facts = vec![("area_bytes", area_bytes as f64)];
                self.load("scaler", what, title, threads, words, facts)?;
            }
        }
        Ok(())
    }

    fn contention(&mut self) -> Result<()> {
        let most = if self.options.common.quick { 1 } else { usize::MAX };
        let mapped = self.options.mapped.iter().take(most);
        let beside: Vec<_> = self.options.beside.clone();
        let changed = mapped.flat_map(|&mapped| beside.iter().map(move |&how| Some((mapped, how))));
        for change in std::iter::once(None).chain(changed) {
            let mut mapped_bytes =
                change.map_or(0, |(mapped, _)| mapped.bytes_of(machine_memory_bytes()));
            if self.options.common.quick {
                mapped_bytes = mapped_bytes.min(16 << 20);
            }
            for threads in self.threads.clone().into_iter().filter(|&threads| threads <= 8) {
                let beside = change.map_or("no thread maps".to_owned(), |(_, how)| {
                    format!("one more {} {}", how.does(), Human(mapped_bytes))
                });
                let title = format!("faults, while {beside}");
                let words = change.map_or(String::new(), |(_, how)| {
                    format!("--mapped={mapped_bytes} --beside={}", how.name())
                });
                let facts = vec![("mapped_bytes", mapped_bytes as f64)];
                self.load("contention", Load::Contention, title, threads, words, facts)?;
            }
        }
        Ok(())
    }

    /// Measures a program that faults; `facts` has the bytes that are mapped beside the areas.
    fn load(
        &mut self,
        part: &'static str,
        what: Load,
        title: String,
        threads: usize,
        words: String,
        facts: Vec<(&'static str, f64)>,
    ) -> Result<()> {
        let area_bytes = self.area_bytes(threads);
        let line = format!("load {} --threads={threads} --area={area_bytes} {words}", what.name());
        let plural = if threads == 1 { "" } else { "s" };
        let beside_bytes: f64 = facts.iter().map(|(_, bytes)| bytes).sum();
        let wanted_bytes = threads as u64 * area_bytes + beside_bytes as u64;
        let plan = Plan {
            part,
            title: format!("{title}, {threads} thread{plural}"),
            threads,
            budget_bytes: budget_for(wanted_bytes),
            // Threads that take turns on a CPU have one area between them at a time.
            managed_bytes_min: area_bytes / 2,
            workload: programs::built_in(&self.stage.own, what.name(), &line),
            rounds: self.rounds,
            style: Style::Medians,
            facts,
            published: Vec::new(),
        };
        let cell = plan.measure(&self.stage, || Ok(()), counted)?;
        self.add(cell);
        Ok(())
    }

    fn kernbench(&mut self) -> Result<()> {
        let tree = match &self.options.tree {
            Some(path) => Tree::at(path)?,
            None => match Tree::of_zstd(self.stage.folder(), self.options.common.quick) {
                Ok(tree) => tree,
                Err(error) => {
                    self.leave_out(format!("kernbench: {error:#}"));
                    return Ok(());
                }
            },
        };
        // The first build reads compiler, headers and sources from the disk: it is not counted.
        let warmed_up = tree
            .clean()
            .and_then(|()| self.stage.run(&tree.workload(cpus()), &Contestant::Bare).map(drop));
        if sys::is_interrupted() {
            return warmed_up;
        }
        if let Err(error) = warmed_up {
            self.leave_out(format!("kernbench: {error:#}"));
            return Ok(());
        }
        for (load, jobs) in kernbench::loads(cpus()) {
            let plan = Plan {
                part: "kernbench",
                title: format!("Average {load} -j {jobs} (std deviation): {}", tree.name),
                threads: jobs,
                budget_bytes: budget_for(JOB_BYTES * jobs as u64),
                managed_bytes_min: 1,
                workload: tree.workload(jobs),
                rounds: self.options.builds,
                style: Style::Means,
                facts: Vec::new(),
                published: Vec::new(),
            };
            let cell = plan.measure(&self.stage, || tree.clean(), kernbench::figures)?;
            self.add(cell);
        }
        Ok(())
    }
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

/// What the kernel's own speculative faults were measured to bring, by `ebizzy -mTt`.
fn published() -> Vec<Published> {
    let row = |title, base, speculative| Published {
        figure: "records_per_second",
        title,
        base,
        speculative,
    };
    vec![row("Linux 4.17, 16 CPUs", 742.57, 1490.24), row("Linux 4.17, 80 CPUs", 13105.4, 24174.23)]
}
