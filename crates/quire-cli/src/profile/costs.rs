//! What faults cost on this machine: short runs of a program that touches memory, in budgets that are too small.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use quire::control::sampling::Told;
use quire::control::{Control, Event};
use quire::units::PAGE_SIZE;

use super::misses::{Costs, Packs};
use super::touch::Order;
use crate::cli::RunOptions;
use crate::run;
use crate::runs::counts::{Counts, Scope};
use crate::size::Size;
use crate::supervisor::{Looker, Moment};

const PAGES: usize = (48 << 20) / PAGE_SIZE;
/// Pages that pack to about a third, and some that do not.
const PACKING_BYTES: usize = 1200;
const NOT_PACKING_BYTES: usize = 4080;

/// A fault takes so long at least, whatever chance makes of the difference of two runs.
const LIMBO_NS_MIN: f64 = 1000.0;

/// One of the short runs.
struct Trial {
    memory_bytes: u64,
    random_bytes: usize,
    order: Order,
    count: usize,
    has_file: bool,
    is_sampled: bool,
}

/// Measures them.
pub(super) fn measure(options: &RunOptions) -> Result<Costs> {
    let trial = |order, count| Trial {
        memory_bytes: 34 << 20,
        random_bytes: PACKING_BYTES,
        order,
        count,
        has_file: false,
        is_sampled: false,
    };
    let ample = Trial { memory_bytes: 256 << 20, ..trial(Order::Random, 400_000) };
    let Tried { ns: bare_ns, .. } = run_trial(options, &ample)?;
    let Tried { ns, counts, packs } = run_trial(options, &Trial { is_sampled: true, ..ample })?;
    let limbo = (ns - bare_ns) / counts.of(Event::PgactivateLimbo).max(1) as f64;
    let swapped_in = |trial: &Trial, packed_ns: f64| -> Result<f64> {
        let Tried { ns, counts, .. } = run_trial(options, trial)?;
        let packed = counts.of(Event::Zswpin) + counts.of(Event::SwpinZero);
        let pages = if trial.has_file { counts.of(Event::Pswpin) - packed } else { packed };
        let others = if trial.has_file { packed as f64 * packed_ns } else { 0.0 };
        Ok((ns - others).max(ns / 10.0) / pages.max(1) as f64)
    };
    let orders = [(Order::Random, 20_000), (Order::Sequential, 2 * PAGES)];
    let limbo = limbo.max(LIMBO_NS_MIN);
    let mut costs = Costs { limbo, pool: [0.0; 2], file: [0.0; 2], unpack: packs.unpack_ns() };
    for (at, (order, count)) in orders.into_iter().enumerate() {
        costs.pool[at] = swapped_in(&trial(order, count), 0.0)?;
        costs.file[at] = costs.pool[at];
        if options.swap_file.is_some() {
            let trial = Trial {
                memory_bytes: 16 << 20,
                random_bytes: NOT_PACKING_BYTES,
                has_file: true,
                ..trial(order, count / 4)
            };
            costs.file[at] = swapped_in(&trial, costs.pool[at])?;
        }
    }
    Ok(costs)
}

/// What came of a trial.
struct Tried {
    /// How long touching took.
    ns: f64,
    counts: Counts,
    packs: Packs,
}

fn run_trial(options: &RunOptions, trial: &Trial) -> Result<Tried> {
    let report = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let program = std::env::current_exe().context("cannot find the program quire")?;
    let sizes = [PAGES, trial.random_bytes].map(|size| size.to_string().into());
    let [pages, random_bytes] = sizes;
    let run_options = RunOptions {
        memory: Some(Size::Bytes(trial.memory_bytes)),
        memory_per_process: None,
        managed_only: true,
        swap_file: options.swap_file.clone().filter(|_| trial.has_file),
        swap_max: None,
        swap_encrypt: options.swap_encrypt && trial.has_file,
        stats: None,
        quiet: true,
        progress: false,
        program: vec![
            program.into_os_string(),
            "touch".into(),
            report.path().into(),
            pages,
            random_bytes,
            trial.order.name().into(),
            trial.count.to_string().into(),
        ],
        ..options.clone()
    };
    let (mut counts, mut packs, mut position) = (Counts::default(), Packs::default(), 0);
    let mut look = |control: &Control, _: Moment| {
        if trial.is_sampled && !control.sampling.is_on() {
            control.sampling.start(4, 1);
            control.call_all();
        }
        counts = Counts::read(control, Scope::Run).unwrap_or_default();
        let head = control.sampling.head();
        for sample in (position..head).filter_map(|position| control.sampling.read(position)) {
            if let Told::Packed { bytes, unpack_ns } = sample.told {
                packs.note(bytes, unpack_ns);
            }
        }
        position = head;
    };
    let mut looker = Looker::new(Some(Duration::from_millis(1)), &mut look);
    let ended = run::run_watched(&run_options, Some(&mut looker))?;
    if ended.exit_status != 0 {
        bail!("the run that measures what faults cost ended with {}", ended.exit_status);
    }
    let text = fs::read_to_string(report.path()).context("cannot read how long it took")?;
    let ns = text.trim().parse().context("cannot read how long it took")?;
    Ok(Tried { ns, counts, packs })
}
