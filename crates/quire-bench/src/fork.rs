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

use super::contestant::{Contestant, Stage};
use super::output;
use super::work::Random;
use super::{ForkBench, programs, sys};
use crate::samples::Samples;
use quire_cli::size::{Human, machine_memory_bytes};
use serde_json::Value;

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

/// A size of the parent and a way, measured.
struct ForkRow {
    bytes: u64,
    way: &'static str,
    bare: Samples,
    quire: Samples,
}

/// Runs the bench.
pub(crate) fn main(options: &ForkBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let rounds = common.rounds(2, 5);
    let processes = if common.quick { 5 } else { options.processes };
    let mut rows = Vec::new();
    for size in &options.size {
        rows.extend(measure(&stage, size.bytes_of(machine_memory_bytes()), processes, rounds)?);
    }
    if common.json {
        output::print_json(
            "fork",
            [
                ("processes", Value::from(processes)),
                ("rows", rows.iter().map(ForkRow::json).collect()),
            ],
        );
        return Ok(0);
    }
    output::print_heading(rounds, output::MEDIANS);
    println!("{:>24}: {PROGRAM}, {processes} times each\n", "program");
    println!(
        "  {:>10}  {:8}{:>10}{:>10}{:>26}{:>12}",
        "parent", "ms each", "bare", "quire", "quire / bare", "beyond"
    );
    for row in &rows {
        println!(
            "  {:>10}  {:8}{:>10.2}{:>10.2}{:>26}{:>12.2}",
            Human(row.bytes).to_string(),
            row.way,
            row.bare.median(),
            row.quire.median(),
            output::ratio(&row.quire.over(&row.bare)),
            row.quire.median() - row.bare.median(),
        );
    }
    Ok(0)
}

fn measure(stage: &Stage, bytes: u64, processes: usize, rounds: u32) -> Result<Vec<ForkRow>> {
    let mut rows: Vec<ForkRow> = WAYS
        .map(|way| ForkRow { bytes, way, bare: Samples::default(), quire: Samples::default() })
        .into();
    let line = format!("forks --bytes {bytes} --processes {processes}");
    let workload = programs::built_in(&stage.own, "forks", &line);
    let budget_bytes = 3 * bytes + BESIDE_BYTES;
    for _ in 0..rounds {
        let bare = stage.run(&workload, &Contestant::Bare)?;
        let quire =
            stage.run(&workload, &Contestant::Quire { budget_bytes, options: Vec::new() })?;
        for row in &mut rows {
            row.bare.push(bare.figure(row.way)?);
            row.quire.push(quire.figure(row.way)?);
        }
    }
    Ok(rows)
}

impl ForkRow {
    fn json(&self) -> Value {
        Value::from_iter([
            ("bytes", Value::from(self.bytes)),
            ("way", Value::from(self.way)),
            ("bare_ms", Value::from(&self.bare)),
            ("quire_ms", Value::from(&self.quire)),
            ("quire_over_bare", Value::from(&self.quire.over(&self.bare))),
        ])
    }
}
