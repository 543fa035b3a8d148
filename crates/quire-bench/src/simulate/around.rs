//! `quire bench fault-around --simulate`: so many whole page tables of the file for each thread, each of which
//! costs the same; what is counted is scaled to the file. A table beside says how far the model is from this
//! machine, where both can be measured.

use anyhow::Result;
use quire::library::{Delivery, FaultAround};
use quire_cli::size::{Human, machine_memory_bytes};

use super::super::AroundBench;
use super::super::around::{DELIVERIES, published};
use super::super::contestant::Stage;
use super::super::data::{BLOCK_BYTES, PAGE_BYTES, Pattern};
use super::super::harness::report::{Part, Report, number};
use super::super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::costs::{Costs, REAL_BYTES, Real};
use super::{HANDLERS, MODEL, REAL, SIMULATED, Simulated, model_in_words, run};

/// Threads that are measured for real, and what is mapped around.
const REAL_THREADS: [usize; 3] = [1, 2, 8];
const REAL_AROUND: [(&str, FaultAround); 3] =
    [("off", FaultAround::Off), ("4", FaultAround::Order(4)), ("9", FaultAround::Order(9))];
/// Pages that are read in a cell, of all threads together.
const PAGES: usize = 32 << 10;
const QUICK_PAGES: usize = 4 << 10;
const TABLE_PAGES: usize = BLOCK_BYTES / PAGE_BYTES;
/// The authors read at random a file of this part of the other's size.
const RANDOM_PART: u64 = 16;

/// One run of the simulation.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    pub pattern: Pattern,
    pub threads: usize,
    pub cpus: usize,
    pub around: FaultAround,
    pub delivery: Delivery,
}

impl Cell {
    /// Runs so many page tables of it.
    pub(super) fn run(self, stage: &Stage, costs: &Costs, tables: usize) -> Result<Simulated> {
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
        let words = format!(
            "around --threads {} --cpus {} --tables {tables} --pattern {pattern} {order} {}",
            self.threads,
            self.cpus,
            if is_inline { "--inline" } else { "" },
        );
        run(stage, costs, &words, fault_ns, touch_ns)
    }
}

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
    let costs = options.simulation.find_costs(&options.common, &stage)?;
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
        Head {
            name: "fault-around, simulated",
            question: "How many faults and how much time does it save to map what is cached around a fault, on machines that are not here?",
            facts: vec![
                ("CPUs", self.options.simulation.cpus_in_words()),
                (HANDLERS.0, HANDLERS.1.into()),
                ("costs", self.costs.in_words()),
                (
                    "of each file",
                    format!(
                        "page tables that hold {} pages of all threads together, one for each thread at least; \
                         scaled to all of it",
                        self.options.common.size(QUICK_PAGES, PAGES, 4 * PAGES)
                    ),
                ),
                (
                    "threads",
                    "begin together, and meet at the same pages more often than over a whole file: several have \
                     more faults than there"
                        .into(),
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
                    let cpus = self.options.simulation.cpus(threads);
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
        model.rounds = Some(self.options.common.size(1, 3, 3));
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
                let found = cell.run(&self.stage, &self.costs, tables)?;
                Ok(figures([
                    ("seconds", found.seconds * scale),
                    ("faults", (found.faults * scale).round()),
                    ("seconds of handlers", found.handling_seconds * scale),
                ]))
            }
            Plan::Real(cell) => Ok(figures([("seconds", self.real.seconds(cell)?)])),
            Plan::Simulated(cell) => {
                let tables = REAL_BYTES / BLOCK_BYTES;
                Ok(figures([("seconds", cell.run(&self.stage, &self.costs, tables)?.seconds)]))
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
        words.extend(model_in_words(*results, "seconds"));
        words
    }
}

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
