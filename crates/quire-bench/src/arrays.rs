//! `quire bench arrays`: numpy on arrays of files, by the package `quire`, by numpy.memmap in a memory cgroup of the same
//! size, and in plain memory where that suffices.
//!
//! The file is dropped from the kernel's page cache before each, and so is read from the disk the first time. The
//! cgroup has room for what the interpreter takes beside the limit, as Quire's limit is for the array alone.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use quire_cli::size::Human;

use super::ArraysBench;
use super::contestant::{Contestant, Stage, Workload};
use super::harness::report::{Report, spread};
use super::harness::suite::{Along, Figures, Head, Results, Shape, Sheet, Suite, measure};
use super::memory_limit::MemoryLimit;
use super::programs;

const PROGRAM: &str = include_str!("programs/arrays.py");
const THINGS: [(&str, &str); 5] = [
    ("sum", "sum"),
    ("a matrix by a vector", "dot"),
    ("sort", "sort"),
    ("items at random", "fancy"),
    ("rows at random", "rows"),
];
const MEMMAP: &str = "numpy.memmap";
const PLAIN: &str = "plain memory";
const QUIRE: &str = "quire";
const AHEAD: &str = "quire, prefetched";
/// Says how many KiB of memory the interpreter has of its own, once it has what is needed.
const INTERPRETER: &str = "import numpy, quire
print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('RssAnon')])";
/// What numpy takes beside that, for results and indices.
const RESULTS_BYTES: u64 = 4 << 20;

/// What a cell is measured by.
struct Plan {
    way: &'static str,
    what: &'static str,
    bytes: u64,
}

struct ArraysSuite<'a> {
    options: &'a ArraysBench,
    stage: Stage,
    python: PathBuf,
    cgroup: MemoryLimit,
    cgroup_bytes: u64,
    limit: u64,
}

/// Runs the bench.
pub(crate) fn report(options: &ArraysBench) -> Result<Report> {
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let limit = common.size(32 << 20, 128 << 20, 512 << 20);
    let python = match &options.python {
        Some(python) => python.clone(),
        None => programs::python()?,
    };
    let interpreter = Command::new(&python).args(["-c", INTERPRETER]).output();
    let said = interpreter.map(|output| output.stdout).unwrap_or_default();
    let interpreter_kib: u64 =
        String::from_utf8_lossy(&said).trim().parse().ok().with_context(|| {
            let python = python.display();
            format!("{python} cannot import numpy and quire; pip install both, or name another by --python")
        })?;
    let cgroup_bytes = limit + (interpreter_kib << 10) + RESULTS_BYTES;
    let cgroup = MemoryLimit::create()?;
    cgroup.set(cgroup_bytes)?;
    measure(&mut ArraysSuite { options, stage, python, cgroup, cgroup_bytes, limit }, common)
}

fn title(factor: &str) -> String {
    format!("an array of {factor} the limit, seconds")
}

impl Suite for ArraysSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "arrays",
            question: "What do numpy's functions take on an array of a file, by who maps it?",
            facts: vec![
                ("limit", Human(self.limit).to_string()),
                ("cgroup of numpy.memmap", Human(self.cgroup_bytes).to_string()),
                ("memory cgroup", self.cgroup.version().to_owned()),
            ],
            rounds: self.options.common.rounds(1, 3),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let sizes =
            [("half", self.limit / 2), ("once", self.limit), ("four times", self.limit * 4)];
        let sheet = |(factor, bytes): (&str, u64)| {
            let mut sheet =
                Sheet::new(title(factor), Shape::Figures).base(MEMMAP).plot(Along::Rows);
            for (row, what) in THINGS {
                sheet.add(row, MEMMAP, Plan { way: "memmap", what, bytes });
                sheet.add(row, QUIRE, Plan { way: "quire", what, bytes });
                if what == "rows" {
                    sheet.add(row, AHEAD, Plan { way: "quire-prefetch", what, bytes });
                }
                if bytes <= self.limit {
                    sheet.add(row, PLAIN, Plan { way: "numpy", what, bytes });
                }
            }
            sheet
        };
        sizes.into_iter().map(sheet).collect()
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let file = self.stage.folder().join(format!("{}.f8", plan.bytes));
        let mut argv: Vec<OsString> = Vec::new();
        if plan.way == "memmap" {
            let enter = self.cgroup.command();
            argv.push(enter.get_program().into());
            argv.extend(enter.get_args().map(OsString::from));
        }
        argv.extend([self.python.clone().into(), "-c".into(), PROGRAM.into(), plan.way.into()]);
        argv.extend([plan.what.into(), file.into()]);
        argv.extend([plan.bytes, self.limit].map(|bytes| bytes.to_string().into()));
        let workload = Workload { name: "arrays".into(), argv, is_deterministic: false };
        Ok(self.stage.run(&workload, &Contestant::Bare)?.phases)
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |(row, what): &(&str, &str)| {
            let over = |factor: &str, column: &str, figure: &str| {
                spread(&results.over(&title(factor), row, [column, MEMMAP], figure), "x")
            };
            let figure = if *what == "sort" { "first" } else { "later" };
            let mut said = format!(
                "{row}: of what numpy.memmap takes, {} of half the limit, {} of four times as much",
                over("half", QUIRE, figure),
                over("four times", QUIRE, figure)
            );
            if *what == "rows" {
                said += &format!(", {} of that prefetched", over("four times", AHEAD, figure));
            }
            said + "."
        };
        THINGS.iter().map(sentence).collect()
    }
}
