//! `quire bench handlers`: how many threads should serve faults, where, and from how many
//! descriptors.
//!
//! Threads touch every page of an area once, in random order, a page a fault. The *engine* part runs
//! that under `quire run` with one to twelve handlers, each on a CPU of its own or all on any. The
//! *objects* part has the library serve it, by its handlers and in the thread that faults. The *raw*
//! part leaves the engine out: a loop reads messages and copies a page for each, with what the engine
//! has no setting for, which is several descriptors, several messages a read, and threads on the
//! faulting CPU or on another. What a fault takes beside the copy is a setting there, for what helps
//! empty handlers need not help busy ones.
//!
//! All ways take turns, and a ratio to the first of a part is one between runs of one turn. CPU time
//! and switches are printed beside wall time: other work on the machine disturbs them less.

mod faults;

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Result, ensure};
use quire::process::HANDLERS_AUTO_MAX;

pub(crate) use self::faults::{FaultsArgs, compute, main as faults};
use super::contestant::{Contestant, Stage};
use super::harness::report::Report;
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::{HandlersBench, programs, sys};

const PAGE_BYTES: usize = 4096;
/// Beside what the program touches: its heap, page words.
const BESIDE_BYTES: u64 = 64 << 20;

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HandlersPart {
    /// Under `quire run`, by number of handlers
    Engine,
    /// Objects, by handlers and in the thread that faults
    Objects,
    /// Loops without the engine
    Raw,
}

impl HandlersPart {
    const fn name(self) -> &'static str {
        match self {
            HandlersPart::Engine => "engine",
            HandlersPart::Objects => "objects",
            HandlersPart::Raw => "raw",
        }
    }
}

/// What a run of the program came to.
#[derive(Debug)]
pub(crate) struct FaultFigures {
    us_a_fault: f64,
    p99_us: f64,
    cpu_us_a_fault: f64,
    switches_a_fault: f64,
}

/// A way to serve faults.
#[derive(Clone)]
struct HandlersWay {
    part: HandlersPart,
    name: String,
    /// Options of `quire run`; none where the program serves itself.
    quire: Option<String>,
    /// Options of the program.
    program: String,
    /// Handlers that the process must have; `None` where the engine counts the CPUs by itself, as it does
    /// not look at a cgroup's share of them and the bench does.
    handlers: Option<usize>,
}

struct HandlersSuite<'a> {
    options: &'a HandlersBench,
    stage: Stage,
    pages: usize,
}

/// Runs the bench.
pub(crate) fn report(options: &HandlersBench) -> Result<Report> {
    ensure!(!options.threads.contains(&0), "one thread at least faults");
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let pages = if common.quick { options.pages.min(1024) } else { options.pages };
    measure(&mut HandlersSuite { options, stage, pages }, common)
}

impl Suite for HandlersSuite<'_> {
    /// The way, and the threads that fault.
    type Plan = (HandlersWay, usize);

    fn head(&self) -> Head {
        let options = self.options;
        Head {
            name: "handlers",
            question: "How many threads should serve faults, where, and from how many descriptors?",
            facts: vec![
                ("faults", self.pages.to_string()),
                ("between two faults of a thread", format!("{} us", options.think_us)),
                ("a raw handler computes for", format!("{} us", options.work_us)),
            ],
            rounds: options.common.rounds(2, 5),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let ways = ways(cpus, self.options.work_us);
        let sheet = |part: &HandlersPart| {
            let ways = || ways.iter().filter(|way| way.part == *part);
            let mut sheet = Sheet::new(part.name(), Shape::Cells).plot(Along::Rows);
            sheet.base = ways().next().map(|way| way.name.clone());
            for &threads in &self.options.threads {
                for way in ways() {
                    sheet.add(plural(threads, "thread"), &way.name, (way.clone(), threads));
                }
            }
            sheet
        };
        self.options.only.iter().map(sheet).collect()
    }

    fn take(&mut self, (way, threads): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        let expected = way.handlers.map(|handlers| format!("--expect-handlers {handlers}"));
        let line = format!(
            "faults --threads {threads} --pages {} --think-us {} {} {}",
            self.pages.max(*threads),
            self.options.think_us,
            way.program,
            expected.unwrap_or_default()
        );
        let workload = programs::built_in(&self.stage.own, way.name.clone(), &line);
        let budget_bytes = 2 * (self.pages * PAGE_BYTES) as u64 + BESIDE_BYTES;
        let contestant = match &way.quire {
            None => Contestant::Bare,
            Some(options) => {
                let words = options.split_whitespace().chain(["--folio-order=0"]);
                Contestant::Quire { budget_bytes, options: words.map(OsString::from).collect() }
            }
        };
        let outcome = self.stage.run(&workload, &contestant)?;
        let value = |name| outcome.figure(name);
        Ok(figures([
            ("us a fault", value("us_a_fault")?),
            ("CPU us", value("cpu_us_a_fault")?),
            ("switches", value("switches_a_fault")?),
            ("p99 us", value("p99_us")?),
        ]))
    }
}

/// All ways, of each part the default first.
fn ways(cpus: usize, work_us: u64) -> Vec<HandlersWay> {
    let auto = cpus.min(HANDLERS_AUTO_MAX);
    let engine = |name: &str, options: &str, handlers: Option<usize>| HandlersWay {
        part: HandlersPart::Engine,
        name: name.into(),
        quire: Some(options.into()),
        program: String::new(),
        handlers,
    };
    let objects = |name: &str, by: &str, handlers: usize| HandlersWay {
        part: HandlersPart::Objects,
        name: name.into(),
        quire: None,
        program: format!("--by {by}"),
        handlers: Some(handlers),
    };
    let raw = |name: &str, options: String| HandlersWay {
        part: HandlersPart::Raw,
        name: name.into(),
        quire: None,
        program: format!("--work-us {work_us} {options}"),
        handlers: None,
    };
    let looped = |name: &str, handlers: usize, options: &str| {
        raw(name, format!("--by loop --handlers {handlers} {options}"))
    };
    vec![
        engine("default: one a CPU, 4 at most", "", None),
        engine("1 handler", "--handlers 1", Some(1)),
        engine("2 handlers", "--handlers 2", Some(2)),
        engine("4 handlers", "--handlers 4", Some(4)),
        engine("8 handlers", "--handlers 8", Some(8)),
        engine("12 handlers", "--handlers 12", Some(12)),
        engine("as many on any CPU", "--no-pinned-handlers", None),
        engine("1 on any CPU", "--no-pinned-handlers --handlers 1", Some(1)),
        engine("4 on any CPU", "--no-pinned-handlers --handlers 4", Some(4)),
        objects("default: one a CPU, 4 at most", "objects", auto),
        objects("inline", "objects-inline", 0),
        looped("default: one a CPU, 4 at most", auto, ""),
        looped("1 handler", 1, ""),
        looped("8 handlers", 8, ""),
        looped("16 handlers", 16, ""),
        looped("1 on any CPU", 1, "--place any"),
        looped("as many on any CPU", auto, "--place any"),
        looped("2 descriptors, all CPUs each", 2 * auto, "--descriptors 2"),
        looped("4 descriptors, all CPUs each", 4 * auto, "--descriptors 4"),
        looped("2 descriptors, any CPU", 2, "--descriptors 2 --place any"),
        looped("4 descriptors, any CPU", 4, "--descriptors 4 --place any"),
        looped("4 messages a read", auto, "--batch 4"),
        looped("16 messages a read", auto, "--batch 16"),
        looped("64 messages a read", auto, "--batch 64"),
        looped("program pinned too", auto, "--place each-pinned"),
        looped("a descriptor a CPU, the same", cpus, &format!("--descriptors {cpus} --place same")),
        looped("a descriptor a CPU, another", cpus, &format!("--descriptors {cpus} --place other")),
        raw("inline", "--by signal".into()),
    ]
}

impl FaultFigures {
    fn new(
        wall: Duration,
        before: &sys::Used,
        after: &sys::Used,
        mut times_ns: Vec<u32>,
    ) -> FaultFigures {
        let faults = times_ns.len() as f64;
        let cpu_seconds = |used: &sys::Used| used.user_seconds + used.system_seconds;
        let switches =
            |used: &sys::Used| (used.voluntary_switches + used.involuntary_switches) as f64;
        times_ns.sort_unstable();
        let p99 = times_ns.get(times_ns.len() * 99 / 100).copied().unwrap_or(0);
        FaultFigures {
            us_a_fault: wall.as_secs_f64() * 1e6 / faults,
            p99_us: f64::from(p99) / 1e3,
            cpu_us_a_fault: (cpu_seconds(after) - cpu_seconds(before)) * 1e6 / faults,
            switches_a_fault: (switches(after) - switches(before)) / faults,
        }
    }

    fn named(&self) -> [(&'static str, f64); 4] {
        [
            ("us_a_fault", self.us_a_fault),
            ("p99_us", self.p99_us),
            ("cpu_us_a_fault", self.cpu_us_a_fault),
            ("switches_a_fault", self.switches_a_fault),
        ]
    }

    fn print(&self) {
        for (name, value) in self.named() {
            println!("{{\"figure\": \"{name}\", \"value\": {value:.4}}}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_one_fault_and_survive_being_printed() {
        let used = |seconds, switches| sys::Used {
            user_seconds: seconds,
            voluntary_switches: switches,
            ..sys::Used::default()
        };
        let times_ns = (1..=200).rev().map(|us| us * 1000).collect();
        let (before, after) = (used(1.0, 10), used(1.001, 410));
        let figures = FaultFigures::new(Duration::from_millis(2), &before, &after, times_ns);
        let expected = [10.0, 199.0, 5.0, 2.0];
        for ((name, value), expected) in figures.named().into_iter().zip(expected) {
            assert!((value - expected).abs() < 1e-6, "{name}: {value}, not {expected}");
        }
    }

    #[test]
    fn of_each_part_the_default_comes_first() {
        let ways = ways(2, 0);
        for part in [HandlersPart::Engine, HandlersPart::Objects, HandlersPart::Raw] {
            let first = ways.iter().find(|way| way.part == part).unwrap();
            assert!(first.name.starts_with("default"), "{}", first.name);
        }
    }
}
