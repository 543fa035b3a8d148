//! `--simulate`: the engine itself on a simulated machine, with virtual CPUs and a virtual clock.
//!
//! The program `quire-simulated` runs it, in a process of its own: its engine has hooks that the one that is
//! measured must not have. What the kernel does costs what is measured on this machine ([`costs`]).

pub(crate) mod around;
mod costs;
pub(crate) mod pageout;
pub(crate) mod rmap;
pub(crate) mod speculative;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use quire_cli::print::say;

use self::costs::Costs;
pub(crate) use self::costs::{CalibrateBench, calibrate};
use super::contestant::{Contestant, Stage};
use super::data;
use super::harness::Options;
use super::harness::report::spread;
use super::harness::suite::Results;
use super::programs;
use crate::samples::Samples;

/// The program that simulates, which lies beside the bench.
const PROGRAM: &str = "quire-simulated";
/// An engine's step, from one lock or word to the next. What the engine really takes is in what is measured
/// as a fault's way.
const STEP_NS: u64 = 50;

/// The table that says how far the model is from this machine, and its columns.
const MODEL: &str = "the model beside this machine";
const REAL: &str = "real";
const SIMULATED: &str = "simulated";

#[derive(Args, Debug)]
pub(crate) struct Simulation {
    /// By the engine itself on a simulated machine of any size; what is measured there is a part of the suite
    #[arg(long)]
    pub simulate: bool,

    /// CPUs of the simulated machine [default: one for each thread]
    #[arg(long, value_name = "N", requires = "simulate", value_parser = clap::value_parser!(u32).range(1..))]
    cpus: Option<u32>,

    /// What things cost there, as `quire bench calibrate` prints it [default: as measured now]
    #[arg(long, value_name = "FILE", requires = "simulate")]
    costs: Option<PathBuf>,
}

/// Where handlers run, for reports of simulations that have them.
const HANDLERS: (&str, &str) = ("handlers", "on the first CPUs, as many as `quire run` has");

impl Simulation {
    /// CPUs where so many threads run.
    fn cpus(&self, threads: usize) -> usize {
        self.cpus.map_or(threads, |cpus| cpus as usize)
    }

    fn cpus_in_words(&self) -> String {
        self.cpus.map_or("one for each thread".into(), |cpus| cpus.to_string())
    }

    /// What things cost: as a file says, or as they are now. A run that goes on does so with the costs that it
    /// began with, which are kept beside its results.
    fn find_costs(&self, common: &Options, stage: &Stage) -> Result<Costs> {
        if let Some(file) = &self.costs {
            return Costs::read(file);
        }
        let kept = common.resume.as_ref().map(|results| data::with_suffix(results, ".costs"));
        if let Some(kept) = kept.as_ref().filter(|kept| kept.exists()) {
            return Costs::read(kept);
        }
        say("measuring what the kernel's part costs here");
        let costs = Costs::measure(stage)?;
        if let Some(kept) = kept {
            let written = fs::write(&kept, serde_json::to_string(&costs)?);
            written.with_context(|| format!("{}", kept.display()))?;
        }
        Ok(costs)
    }
}

/// What a simulation came to.
struct Simulated {
    seconds: f64,
    faults: f64,
    speculative: f64,
    handling_seconds: f64,
    unmap_seconds: f64,
    unmap_calls: f64,
}

/// Runs a simulation: its words, and what a fault's way and a page cost in it.
fn run(
    stage: &Stage,
    costs: &Costs,
    words: &str,
    fault_ns: u64,
    touch_ns: u64,
) -> Result<Simulated> {
    let Costs { call_ns, page_ns, .. } = costs;
    let line = format!(
        "{words} --call-ns {call_ns} --page-ns {page_ns} --fault-ns {fault_ns} --step-ns {STEP_NS} \
         --touch-ns {touch_ns}"
    );
    let program = stage.own.with_file_name(PROGRAM);
    let workload = programs::built_in(&program, PROGRAM, &line);
    let outcome = stage.run(&workload, &Contestant::Bare).with_context(|| {
        format!("{} simulates; `make install-bench` installs it", program.display())
    })?;
    let figure = |name| outcome.figure(name);
    Ok(Simulated {
        seconds: figure("seconds")?,
        faults: figure("faults")?,
        speculative: figure("speculative")?,
        handling_seconds: figure("handling_seconds")?,
        unmap_seconds: figure("unmap_seconds")?,
        unmap_calls: figure("unmap_calls")?,
    })
}

/// How far the model is from this machine, by a figure of that table.
fn model_in_words(results: Results<'_>, figure: &str) -> Option<String> {
    let rows = results.0.iter().filter(|record| record.turn.row == MODEL);
    let errors = rows
        .filter(|record| record.turn.column == SIMULATED)
        .map(|record| results.over(MODEL, &record.turn.part, [SIMULATED, REAL], figure).median());
    let errors: Samples = errors.collect();
    (!errors.is_empty()).then(|| {
        let spread = spread(&errors, "x");
        format!("Beside this machine the model takes {spread} of the time that is measured.")
    })
}
