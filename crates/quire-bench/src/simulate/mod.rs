//! `--simulate`: the engine itself on a simulated machine, with virtual CPUs and a virtual clock.
//!
//! The program `quire-simulated` runs it, in a process of its own: its engine has hooks that the one that is
//! measured must not have. What the kernel does costs what is measured on this machine ([`costs`]).

pub(crate) mod around;
mod costs;
pub(crate) mod speculative;

use anyhow::{Context as _, Result};

use self::costs::Costs;
pub(crate) use self::costs::{CalibrateBench, calibrate};
use super::contestant::{Contestant, Stage};
use super::programs;

/// The program that simulates, which lies beside the bench.
const PROGRAM: &str = "quire-simulated";
/// An engine's step, from one lock or word to the next. What the engine really takes is in what is measured
/// as a fault's way.
const STEP_NS: u64 = 50;

/// What a simulation came to.
struct Simulated {
    seconds: f64,
    faults: f64,
    speculative: f64,
    handling_seconds: f64,
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
    })
}
