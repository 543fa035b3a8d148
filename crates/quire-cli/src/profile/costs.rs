//! What faults cost on this machine: short runs of a program that touches memory, in budgets that are too small.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use quire::control::{Control, Event};
use quire::units::PAGE_SIZE;

use super::model::Costs;
use super::touch::Order;
use crate::cli::{Arguments, Command, RunOptions};
use crate::run;
use crate::runs::counts::{Counts, Scope};
use crate::supervisor::{Looker, Moment};

const PAGES: usize = (48 << 20) / PAGE_SIZE;
/// Pages that pack to about a third, and some that do not.
const PACKING_BYTES: usize = 1200;
const NOT_PACKING_BYTES: usize = 4080;

/// One of the short runs.
struct Trial {
    memory: &'static str,
    random_bytes: usize,
    order: Order,
    count: usize,
    has_file: bool,
    is_sampled: bool,
}

/// Measures them.
pub(super) fn measure(options: &RunOptions) -> Result<Costs> {
    let trial = |order, count| Trial {
        memory: "34M",
        random_bytes: PACKING_BYTES,
        order,
        count,
        has_file: false,
        is_sampled: false,
    };
    let ample = Trial { memory: "256M", ..trial(Order::Random, 400_000) };
    let (bare_ns, _) = run_trial(options, &ample)?;
    let (ns, counts) = run_trial(options, &Trial { is_sampled: true, ..ample })?;
    let limbo = (ns - bare_ns).max(0.0) / counts.of(Event::PgactivateLimbo).max(1) as f64;
    let swapped_in = |trial: &Trial, packed_ns: f64| -> Result<f64> {
        let (ns, counts) = run_trial(options, trial)?;
        let packed = counts.of(Event::Zswpin) + counts.of(Event::SwpinZero);
        let pages = if trial.has_file { counts.of(Event::Pswpin) - packed } else { packed };
        let others = if trial.has_file { packed as f64 * packed_ns } else { 0.0 };
        Ok((ns - others).max(ns / 10.0) / pages.max(1) as f64)
    };
    let orders = [(Order::Random, 20_000), (Order::Sequential, 2 * PAGES)];
    let mut costs = Costs { limbo, pool: [0.0; 2], file: [0.0; 2] };
    for (at, (order, count)) in orders.into_iter().enumerate() {
        costs.pool[at] = swapped_in(&trial(order, count), 0.0)?;
        costs.file[at] = costs.pool[at];
        if options.swap_file.is_some() {
            let trial = Trial {
                memory: "16M",
                random_bytes: NOT_PACKING_BYTES,
                has_file: true,
                ..trial(order, count / 4)
            };
            costs.file[at] = swapped_in(&trial, costs.pool[at])?;
        }
    }
    Ok(costs)
}

/// How long touching took, in nanoseconds, and what was counted.
fn run_trial(options: &RunOptions, trial: &Trial) -> Result<(f64, Counts)> {
    let report = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let program = std::env::current_exe().context("cannot find the program quire")?;
    let mut words = vec!["quire".into(), "run".into(), "--quiet".into(), "--managed-only".into()];
    words.extend(["--memory".into(), trial.memory.into()]);
    if options.no_cgroup {
        words.push("--no-cgroup".into());
    }
    if let Some(folder) = options.swap_file.as_ref().filter(|_| trial.has_file) {
        words.extend(["--swap-file".into(), folder.clone().into_os_string()]);
    }
    words.extend(["--".into(), program.into_os_string(), "touch".into(), report.path().into()]);
    words.extend([PAGES.to_string().into(), trial.random_bytes.to_string().into()]);
    words.extend([trial.order.name().into(), trial.count.to_string().into()]);
    let Command::Run(run_options) = Arguments::try_parse_from(words)?.command else {
        bail!("the command is no run");
    };
    let mut counts = Counts::default();
    let mut look = |control: &Control, _: Moment| {
        if trial.is_sampled && !control.sampling.is_on() {
            control.sampling.start(4, 1, false);
            control.call_all();
        }
        counts = Counts::read(control, Scope::Run).unwrap_or_default();
    };
    let mut looker = Looker::new(Some(Duration::from_millis(1)), &mut look);
    let ended = run::run_watched(&run_options, Some(&mut looker))?;
    if ended.exit_status != 0 {
        bail!("the run that measures what faults cost ended with {}", ended.exit_status);
    }
    let text = fs::read_to_string(report.path()).context("cannot read how long it took")?;
    let ns = text.trim().parse().context("cannot read how long it took")?;
    Ok((ns, counts))
}
