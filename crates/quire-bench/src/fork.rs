//! `quire bench fork`: what it takes to start a small program and to see it end, from a parent that
//! holds much or little.
//!
//! A *spawn* is a child in its parent's memory that executes at once (posix_spawn, as most programs
//! start others); a *fork* copies the parent first, as shells and servers do. Under quire the parent,
//! a fork's child and the program that is executed are each managed: the last two join the run, the
//! child with all that its parent has. Times are from before the call until the end has been waited
//! for, the median of many.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use quire_cli::size::{Human, machine_memory_bytes};

use super::contestant::{Contestant, Stage};
use super::harness::report::Report;
use super::harness::suite::{Figures, Head, Results, Shape, Sheet, Suite, measure};
use super::work::Random;
use super::{ForkBench, programs};
use crate::samples::Samples;

/// What is executed.
const PROGRAM: &str = "/bin/true";
/// What quire has beside three times what the parent holds.
const BESIDE_BYTES: u64 = 64 << 20;
/// The ways to start a program, by the names of their figures.
const WAYS: [&str; 2] = ["spawn", "fork"];

#[derive(Args, Debug)]
pub(crate) struct ForksArgs {
    /// Bytes that the parent holds
    #[arg(long)]
    bytes: usize,

    /// Programs that are started, each way
    #[arg(long)]
    processes: usize,
}

/// The program: holds memory, and starts others.
pub(crate) fn forks(args: &ForksArgs) -> Result<u8> {
    let mut random = Random::new(1);
    let held: Vec<u64> = (0..args.bytes / 8).map(|_| random.below(1 << 20) as u64).collect();
    for way in WAYS {
        let times: Result<Samples> = (0..args.processes)
            .map(|_| {
                let started = Instant::now();
                let status = start(way).with_context(|| format!("cannot {way} {PROGRAM}"))?;
                ensure!(status.success(), "{PROGRAM} ended with {status}");
                Ok(started.elapsed().as_secs_f64() * 1e3)
            })
            .collect();
        println!("{{\"figure\": \"{way}\", \"value\": {:.4}}}", times?.median());
    }
    // Held until here.
    println!("{}", held.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)));
    Ok(0)
}

fn start(way: &str) -> std::io::Result<ExitStatus> {
    let mut command = Command::new(PROGRAM);
    if way == "fork" {
        // What is to be done between fork and exec, though it changes nothing, makes std fork.
        command.uid(rustix::process::getuid().as_raw());
    }
    command.status()
}

struct ForkSuite<'a> {
    options: &'a ForkBench,
    stage: Stage,
    processes: usize,
}

/// Runs the bench.
pub(crate) fn report(options: &ForkBench) -> Result<Report> {
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let processes = if common.quick { 5 } else { options.processes };
    measure(&mut ForkSuite { options, stage, processes }, common)
}

impl Suite for ForkSuite<'_> {
    /// What the parent holds, and whether Quire runs it.
    type Plan = (u64, bool);

    fn head(&self) -> Head {
        Head {
            name: "fork",
            question: "What does it take to start a program, from a parent that holds much or little?",
            facts: vec![("program", format!("{PROGRAM}, {} times each way", self.processes))],
            rounds: self.options.common.rounds(2, 5),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let title = "milliseconds to start a program and see it end";
        let mut sheet = Sheet::new(title, Shape::Figures).base("bare");
        for size in &self.options.size {
            let bytes = size.bytes_of(machine_memory_bytes());
            for (column, is_managed) in [("bare", false), ("quire", true)] {
                sheet.add(Human(bytes).to_string(), column, (bytes, is_managed));
            }
        }
        vec![sheet]
    }

    fn take(&mut self, &(bytes, is_managed): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        let line = format!("forks --bytes {bytes} --processes {}", self.processes);
        let workload = programs::built_in(&self.stage.own, "forks", &line);
        let contestant = match is_managed {
            true => {
                Contestant::Quire { budget_bytes: 3 * bytes + BESIDE_BYTES, options: Vec::new() }
            }
            false => Contestant::Bare,
        };
        let outcome = self.stage.run(&workload, &contestant)?;
        WAYS.iter().map(|way| Ok(((*way).to_owned(), outcome.figure(way)?))).collect()
    }
}
