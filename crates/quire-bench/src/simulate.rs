//! `quire bench fault-around --simulate`: the engine itself on a simulated machine, with virtual CPUs and a
//! virtual clock.
//!
//! The program `quire-simulated` runs a part of a cell: so many whole page tables of the file for each
//! thread, each of which costs the same; what it counts is scaled to the file. What the kernel does costs
//! what is measured on this machine ([`Costs`]); a table beside says how far the model is from this
//! machine, where both can be measured.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use quire::library::{Delivery, FaultAround};
use quire_cli::print::say;
use quire_cli::size::{Human, machine_memory_bytes};
use serde::{Deserialize, Serialize};

use super::around::{DELIVERIES, filled, published, read_through, time};
use super::contestant::{Contestant, Stage};
use super::data::{BLOCK_BYTES, Data, PAGE_BYTES, Pattern};
use super::harness::report::{Part, Report, number, spread};
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::{AroundBench, programs, sys};
use crate::samples::Samples;

/// The program that simulates, which lies beside the bench.
const PROGRAM: &str = "quire-simulated";
/// The file that is measured for real.
const REAL_BYTES: usize = 16 << 20;
/// Threads that are measured for real, and what is mapped around.
const REAL_THREADS: [usize; 3] = [1, 2, 8];
const REAL_AROUND: [(&str, FaultAround); 3] =
    [("off", FaultAround::Off), ("4", FaultAround::Order(4)), ("9", FaultAround::Order(9))];
/// Rounds of a calibration.
const CALIBRATION_ROUNDS: usize = 9;
/// Pages that are read in a cell, of all threads together.
const PAGES: usize = 32 << 10;
const QUICK_PAGES: usize = 4 << 10;
const TABLE_PAGES: usize = BLOCK_BYTES / PAGE_BYTES;
/// The authors read at random a file of this part of the other's size.
const RANDOM_PART: u64 = 16;
/// An engine's step, from one lock or word to the next. What the engine really takes is in what is measured
/// as a fault's way.
const STEP_NS: u64 = 50;

#[derive(Args, Debug)]
pub(crate) struct CalibrateBench {
    /// The quire binary [default: the one that runs the bench, or the one beside it]
    #[arg(long, value_name = "FILE", env = quire_cli::PROGRAM_VARIABLE, hide = true)]
    quire: Option<PathBuf>,
}

/// What things cost, in nanoseconds.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
struct Costs {
    /// A call of the kernel that maps pages, and each page of it.
    call_ns: u64,
    page_ns: u64,
    /// A fault's way to a handler and back, and what the engine does for it.
    fault_ns: u64,
    /// The same where the thread serves itself.
    inline_ns: u64,
    /// What the program does with a page: all of its words, or one.
    read_ns: u64,
    touch_ns: u64,
}

/// Prints what things cost here.
pub(crate) fn calibrate(options: &CalibrateBench) -> Result<u8> {
    sys::notice_signals();
    let stage = Stage::without_kernel(options.quire.as_deref())?;
    println!("{}", serde_json::to_string(&Costs::measure(&stage)?)?);
    Ok(0)
}

/// One run of the simulation.
#[derive(Clone, Copy)]
struct Cell {
    pattern: Pattern,
    threads: usize,
    cpus: usize,
    around: FaultAround,
    delivery: Delivery,
}

impl Cell {
    /// Runs so many page tables of it: seconds, faults, seconds of handlers.
    fn run(self, stage: &Stage, costs: &Costs, tables: usize) -> Result<[f64; 3]> {
        let pattern = match self.pattern {
            Pattern::InOrder => "in-order",
            Pattern::Random => "random",
            Pattern::Sparse => "sparse",
        };
        let is_inline = self.delivery == Delivery::Inline;
        let fault_ns = if is_inline { costs.inline_ns } else { costs.fault_ns };
        let touch_ns =
            if self.pattern == Pattern::InOrder { costs.read_ns } else { costs.touch_ns };
        let order = match self.around {
            FaultAround::Order(order) => format!("--order {order}"),
            _ => String::new(),
        };
        let line = format!(
            "--threads {} --cpus {} --tables {tables} --pattern {pattern} {order} {} --call-ns {} \
             --page-ns {} --fault-ns {fault_ns} --step-ns {STEP_NS} --touch-ns {touch_ns}",
            self.threads,
            self.cpus,
            if is_inline { "--inline" } else { "" },
            costs.call_ns,
            costs.page_ns,
        );
        let program = stage.own.with_file_name(PROGRAM);
        let workload = programs::built_in(&program, PROGRAM, &line);
        let outcome = stage.run(&workload, &Contestant::Bare).with_context(|| {
            format!("{} simulates; `make install-bench` installs it", program.display())
        })?;
        let names = ["seconds", "faults", "handling_seconds"];
        let [seconds, faults, handling] = names.map(|name| outcome.figure(name));
        Ok([seconds?, faults?, handling?])
    }
}

/// A file that is cached as a whole, read for real.
struct Real {
    data: Data,
    order: Vec<u32>,
    objects: [quire::library::Object; 2],
}

impl Real {
    fn new() -> Result<Real> {
        let data = Data::new(&std::env::temp_dir(), REAL_BYTES)?;
        let objects = [filled(&data, Delivery::Handlers)?, filled(&data, Delivery::Inline)?];
        Ok(Real { order: data.shuffled(), data, objects })
    }

    fn seconds(&self, cell: &Cell) -> Result<f64> {
        let expected = self.data.expected(cell.pattern, &self.order);
        let object = &self.objects[usize::from(cell.delivery == Delivery::Inline)];
        let read = || read_through(object, cell.around, cell.pattern, &self.order, expected);
        let figures = time(cell.threads, || 0, read)?;
        Ok(figures[0].1)
    }

    /// Nanoseconds a page that the program itself takes, where all is mapped already.
    fn page_ns(&self, pattern: Pattern) -> Result<f64> {
        let mapping = sys::FileMapping::new(self.data.path(), self.data.bytes)?;
        let read = || pattern.read(mapping.words(), &self.order);
        std::hint::black_box(read());
        let begun = std::time::Instant::now();
        std::hint::black_box(read());
        Ok(begun.elapsed().as_secs_f64() * 1e9 / (REAL_BYTES / PAGE_BYTES) as f64)
    }
}

impl Costs {
    fn read(path: &Path) -> Result<Costs> {
        let read = || Ok::<_, anyhow::Error>(serde_json::from_str(&fs::read_to_string(path)?)?);
        read().with_context(|| {
            format!("{} has no costs; see `quire bench calibrate`", path.display())
        })
    }

    /// Fits the model to one thread that reads in order: what a page of a call costs is the slope between two
    /// sizes of the window, a fault's way what is left where a fault maps one page.
    fn measure(stage: &Stage) -> Result<Costs> {
        let real = Real::new()?;
        let pages = (REAL_BYTES / PAGE_BYTES) as f64;
        let cell = |around, delivery| Cell {
            pattern: Pattern::InOrder,
            threads: 1,
            cpus: 1,
            around,
            delivery,
        };
        let median = |measure: &dyn Fn() -> Result<f64>| {
            let rounds = (0..CALIBRATION_ROUNDS).map(|_| measure());
            Ok::<_, anyhow::Error>(rounds.collect::<Result<Samples>>()?.median())
        };
        let a_page =
            |cell: Cell| Ok::<_, anyhow::Error>(median(&|| real.seconds(&cell))? * 1e9 / pages);
        let read_ns = median(&|| real.page_ns(Pattern::InOrder))?;
        let touch_ns = median(&|| real.page_ns(Pattern::Random))?;
        let by_handlers = |around| a_page(cell(around, Delivery::Handlers));
        // A page's share of a window of 2^9 is nearly all that of itself.
        let wide = by_handlers(FaultAround::Order(9))?;
        let page_ns = (wide - read_ns).max(1.0) as u64;
        let mut costs = Costs {
            call_ns: CALL_NS,
            page_ns,
            fault_ns: 0,
            inline_ns: 0,
            read_ns: read_ns as u64,
            touch_ns: touch_ns as u64,
        };
        for (delivery, _) in DELIVERIES {
            let alone = cell(FaultAround::Off, delivery);
            let tables = REAL_BYTES / BLOCK_BYTES;
            let without = alone.run(stage, &costs, tables)?[0] * 1e9 / pages;
            let left = (a_page(alone)? - without).max(0.0) as u64;
            match delivery {
                Delivery::Handlers => costs.fault_ns = left,
                Delivery::Inline => costs.inline_ns = left,
            }
        }
        Ok(costs)
    }
}

/// What a call costs that finds nothing to do; the rest of a call is in a fault's way.
const CALL_NS: u64 = 500;

enum Plan {
    /// A part of a large file.
    Large(Cell, u64),
    Real(Cell),
    Simulated(Cell),
}

struct SimulatedSuite<'a> {
    options: &'a AroundBench,
    stage: Stage,
    costs: Costs,
    real: Real,
}

/// Runs the bench.
pub(crate) fn report(options: &AroundBench) -> Result<Report> {
    let stage = Stage::without_kernel(options.common.quire.as_deref())?;
    let costs = match &options.costs {
        Some(path) => Costs::read(path)?,
        None => {
            say("measuring what the kernel's part costs here");
            Costs::measure(&stage)?
        }
    };
    measure(&mut SimulatedSuite { options, stage, costs, real: Real::new()? }, &options.common)
}

/// The authors' file for a pattern, their table, and the title of ours.
fn title(pattern: Pattern, bytes: u64, by: &str) -> String {
    format!("{} {}, {by}", Human(bytes), pattern.name())
}

impl SimulatedSuite<'_> {
    fn threads(&self) -> Vec<usize> {
        match (&self.options.threads[..], self.options.common.quick) {
            ([], true) => vec![1, 8],
            ([], false) => vec![1, 8, 32, 60, 120],
            (threads, _) => threads.to_vec(),
        }
    }

    fn bytes(&self, pattern: Pattern) -> u64 {
        let bytes =
            self.options.size.map_or(16 << 30, |size| size.bytes_of(machine_memory_bytes()));
        let part = if pattern == Pattern::Random { RANDOM_PART } else { 1 };
        (bytes / part).next_multiple_of(BLOCK_BYTES as u64)
    }

    /// Page tables that each of so many threads reads.
    fn tables(&self, threads: usize, bytes: u64) -> usize {
        let pages = self.options.common.size(QUICK_PAGES, PAGES, 4 * PAGES);
        let all = (bytes / BLOCK_BYTES as u64) as usize;
        (pages / (TABLE_PAGES * threads)).clamp(1, all)
    }
}

impl Suite for SimulatedSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let Costs { call_ns, page_ns, fault_ns, inline_ns, read_ns, touch_ns } = self.costs;
        let cpus = self.options.cpus.map_or("one for each thread".into(), |cpus| cpus.to_string());
        Head {
            name: "fault-around, simulated",
            question: "How many faults and how much time does it save to map what is cached around a fault, on machines that are not here?",
            facts: vec![
                (
                    "CPUs",
                    format!(
                        "{cpus}; handlers are on the first of them, as many as `quire run` has"
                    ),
                ),
                (
                    "costs",
                    format!(
                        "a call {call_ns} ns, a page of it {page_ns}, a fault's way {fault_ns}, inline {inline_ns}, a \
                         page read {read_ns}, touched {touch_ns}"
                    ),
                ),
                (
                    "of each file",
                    format!(
                        "page tables that hold {} pages of all threads together, one for each thread at least; \
                         scaled to all of it",
                        self.options.common.size(QUICK_PAGES, PAGES, 4 * PAGES)
                    ),
                ),
            ],
            rounds: 1,
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheets = Vec::new();
        for pattern in Pattern::ALL {
            let bytes = self.bytes(pattern);
            for (delivery, by) in DELIVERIES {
                let mut sheet = Sheet::new(title(pattern, bytes, by), Shape::Cells)
                    .base("off")
                    .plot(Along::Columns);
                for threads in self.threads() {
                    let cpus = self.options.cpus.map_or(threads, |cpus| cpus as usize);
                    let choices = self.options.around.iter();
                    for choice in choices.filter(|choice| choice.setting() != FaultAround::Auto) {
                        let cell =
                            Cell { pattern, threads, cpus, around: choice.setting(), delivery };
                        sheet.add(
                            plural(threads, "thread"),
                            choice.name(),
                            Plan::Large(cell, bytes),
                        );
                    }
                }
                sheets.push(sheet);
            }
        }
        let mut model = Sheet::new(MODEL, Shape::Cells).base(REAL);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        for (delivery, by) in DELIVERIES {
            for threads in REAL_THREADS {
                for (name, around) in REAL_AROUND {
                    let cell = Cell { pattern: Pattern::InOrder, threads, cpus, around, delivery };
                    let row = format!("{name}, {}, {by}", plural(threads, "thread"));
                    model.add(&row, REAL, Plan::Real(cell));
                    model.add(&row, SIMULATED, Plan::Simulated(cell));
                }
            }
        }
        model.rounds = Some(3);
        model.note =
            Some(format!("{} in order, on {}.", Human(REAL_BYTES as u64), plural(cpus, "CPU")));
        sheets.push(model);
        sheets
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        match plan {
            Plan::Large(cell, bytes) => {
                let tables = self.tables(cell.threads, *bytes);
                let scale = *bytes as f64 / (tables * BLOCK_BYTES) as f64;
                let [seconds, faults, handling] =
                    cell.run(&self.stage, &self.costs, tables)?.map(|figure| figure * scale);
                Ok(figures([
                    ("seconds", seconds),
                    ("faults", faults.round()),
                    ("seconds of handlers", handling),
                ]))
            }
            Plan::Real(cell) => Ok(figures([("seconds", self.real.seconds(cell)?)])),
            Plan::Simulated(cell) => {
                let tables = REAL_BYTES / BLOCK_BYTES;
                Ok(figures([("seconds", cell.run(&self.stage, &self.costs, tables)?[0])]))
            }
        }
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let published = published();
        let mut words = Vec::new();
        for (pattern, part) in Pattern::ALL.into_iter().zip(&published) {
            for (_, by) in DELIVERIES {
                for threads in self.threads() {
                    let title = title(pattern, self.bytes(pattern), by);
                    words.extend(sentence(part, &title, &plural(threads, "thread"), *results));
                }
            }
        }
        let rows = results.0.iter().filter(|record| record.turn.row == MODEL);
        let errors = rows.filter(|record| record.turn.column == SIMULATED).map(|record| {
            results.over(MODEL, &record.turn.part, [SIMULATED, REAL], "seconds").median()
        });
        let errors: Samples = errors.collect();
        if !errors.is_empty() {
            words.push(format!(
                "Beside this machine the model takes {} of the time that is measured.",
                spread(&errors, "x")
            ));
        }
        words
    }
}

/// The table that says how far the model is from this machine, and its columns.
const MODEL: &str = "the model beside this machine";
const REAL: &str = "real";
const SIMULATED: &str = "simulated";

/// A row beside the authors': their baseline is what is off here.
fn sentence(part: &Part, title: &str, row: &str, results: Results<'_>) -> Option<String> {
    let theirs = |figure, column| part.table.number([row, figure], column);
    let ours = |figure, column: &str| {
        let samples = results.samples(title, row, column, figure);
        (!samples.is_empty()).then(|| samples.median())
    };
    let mut counts = Vec::new();
    for (own, column) in [("off", "baseline"), ("4", "4"), ("9", "9")] {
        let (faults, published) = (ours("faults", own)?, theirs("faults", column)?);
        counts.push(format!("{} ({:+.1} %)", number(faults), (faults / published - 1.0) * 100.0));
    }
    let ratio = ours("seconds", "4")? / ours("seconds", "off")?;
    let published = theirs("seconds", "4")? / theirs("seconds", "baseline")?;
    Some(format!(
        "{title}, {row}: faults by off, 4 and 9: {}, beside the authors'; order 4 takes {ratio:.2} of the time of off, \
         theirs {published:.2}.",
        counts.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_read_as_they_are_printed() {
        let file = crate::data::Remove(crate::data::unused_path(&std::env::temp_dir()));
        let costs =
            Costs { call_ns: 1, page_ns: 2, fault_ns: 3, inline_ns: 4, read_ns: 5, touch_ns: 6 };
        fs::write(&file.0, serde_json::to_string(&costs).unwrap()).unwrap();
        assert_eq!(Costs::read(&file.0).unwrap(), costs);
        fs::write(&file.0, "{}").unwrap();
        assert!(format!("{:#}", Costs::read(&file.0).unwrap_err()).contains("has no costs"));
    }
}
