//! Finds the limits with which two ways of keeping compressed pages have the same memory.
//!
//! With W bytes wanted, of which L are resident, and a store that keeps the rest at a ratio r, the
//! store takes S = r (W - L). One run at a first limit tells r; the limit that follows from it is
//! tried, and mended by what its own run shows, a few times. The limits that are reported are
//! those of the last run, with the store that this run had.

use anyhow::{Result, bail};

use super::contestant::{Contestant, Outcome, Stage, Workload};
use super::sys;
use quire_cli::size::Human;

/// How often a limit is tried.
const TRIES: u32 = 6;
/// A limit is near enough within this share of it.
const NEAR: f64 = 0.03;
/// What a store of ordinary data takes, where it is not known.
const RATIO_GUESSED: f64 = 0.4;
/// Below this, no program runs.
const RESIDENT_MIN_BYTES: f64 = 8.0 * 1048576.0;

/// How a limit counts what is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Store {
    Inside,
    Outside,
}

impl Store {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Store::Inside => "inside",
            Store::Outside => "outside",
        }
    }
}

/// A contestant with its limit, and how that came about.
pub(crate) struct Found {
    pub contestant: Contestant,
    pub note: String,
    /// Why it cannot take part.
    pub failure: Option<String>,
}

impl Found {
    /// The contestant, unless it cannot take part.
    pub(crate) fn usable(&self) -> Result<&Contestant> {
        match &self.failure {
            Some(failure) => bail!("{failure}"),
            None => Ok(&self.contestant),
        }
    }
}

fn quire_with(budget_bytes: f64) -> Contestant {
    Contestant::Quire { budget_bytes: budget_bytes as u64, options: Vec::new() }
}

fn kernel_with(limit_bytes: f64) -> Contestant {
    Contestant::Kernel { limit_bytes: limit_bytes as u64 }
}

fn human(bytes: f64) -> Human {
    Human(bytes as u64)
}

/// An interrupted run ends the search; any other failure is a contestant's own.
fn attempt(
    stage: &Stage,
    workload: &Workload,
    contestant: &Contestant,
) -> Result<Result<Outcome, String>> {
    match stage.run(workload, contestant) {
        Ok(outcome) => Ok(Ok(outcome)),
        Err(error) if sys::is_interrupted() => Err(error),
        Err(error) => Ok(Err(format!("{error:#}"))),
    }
}

/// The kernel's limit; nothing where there is no kernel swap.
pub(crate) fn kernel(
    stage: &Stage,
    workload: &Workload,
    wanted: &Outcome,
    limit_bytes: u64,
    store: Store,
) -> Result<Option<Found>> {
    if stage.kernel.is_err() {
        return Ok(None);
    }
    let (wanted, all) = (wanted.peak_bytes as f64, limit_bytes as f64);
    let first = match attempt(stage, workload, &kernel_with(all))? {
        Ok(outcome) => outcome.store_bytes as f64,
        Err(failure) => return Ok(Some(failed(kernel_with(all), failure))),
    };
    if store == Store::Outside {
        let note = format!("limit {}, and a store of {} beside it", human(all), human(first));
        return Ok(Some(Found { contestant: kernel_with(all), note, failure: None }));
    }
    let ratio = first / (wanted - all);
    let limit = (all - ratio * wanted) / (1.0 - ratio);
    Ok(Some(kernel_search(stage, workload, all, limit, ratio)?.unwrap_or_else(|| {
        failed(
            kernel_with(all),
            format!(
                "does not fit: compressed {:.2} to 1, all of it takes {}",
                1.0 / ratio,
                human(ratio * wanted)
            ),
        )
    })))
}

/// The kernel's limit for a tree of processes, of which it counts more than is managed: what they
/// want of it is not known. Nothing where there is no kernel swap.
pub(crate) fn kernel_for_tree(
    stage: &Stage,
    workload: &Workload,
    bytes: u64,
) -> Result<Option<Found>> {
    if stage.kernel.is_err() {
        return Ok(None);
    }
    let all = bytes as f64;
    let first = match attempt(stage, workload, &kernel_with(all))? {
        Ok(outcome) => outcome.store_bytes as f64,
        Err(failure) => return Ok(Some(failed(kernel_with(all), failure))),
    };
    if first <= NEAR * all {
        let note = format!("limit {}, with a store of {}", human(all), human(first));
        return Ok(Some(Found { contestant: kernel_with(all), note, failure: None }));
    }
    let limit = all - first / (1.0 - RATIO_GUESSED);
    let found = kernel_search(stage, workload, all, limit, RATIO_GUESSED)?;
    Ok(Some(found.unwrap_or_else(|| {
        failed(kernel_with(all), format!("does not fit, with its store, into {}", human(all)))
    })))
}

/// Comes near to where limit and store together take `all`, from a first guess; `ratio` is what a
/// byte more in the store takes.
fn kernel_search(
    stage: &Stage,
    workload: &Workload,
    all: f64,
    mut limit: f64,
    ratio: f64,
) -> Result<Option<Found>> {
    let mut best: Option<(f64, f64)> = None;
    for _ in 0..TRIES {
        if ratio >= 1.0 || limit < RESIDENT_MIN_BYTES {
            break;
        }
        let Ok(outcome) = attempt(stage, workload, &kernel_with(limit))? else {
            break;
        };
        let stored = outcome.store_bytes as f64;
        let room = all - limit - stored;
        if room >= 0.0 && best.is_none_or(|(known, _)| known < limit) {
            best = Some((limit, stored));
        }
        if (0.0..=NEAR * all).contains(&room) {
            break;
        }
        // A little below the aim: what overshoots does not count.
        limit += (room - NEAR / 3.0 * all) / (1.0 - ratio);
    }
    Ok(best.map(|(limit, stored)| Found {
        contestant: kernel_with(limit),
        note: format!(
            "limit {} found by search: with a store of {} that is {}",
            human(limit),
            human(stored),
            human(limit + stored)
        ),
        failure: None,
    }))
}

/// Quire's budget.
pub(crate) fn quire(
    stage: &Stage,
    workload: &Workload,
    wanted: &Outcome,
    limit_bytes: u64,
    store: Store,
) -> Result<Option<Found>> {
    let (wanted, beside) = (wanted.peak_bytes as f64, limit_bytes as f64);
    if store == Store::Inside {
        return Ok(Some(Found {
            contestant: quire_with(beside),
            note: format!("budget {}, pool and tables inside", human(beside)),
            failure: None,
        }));
    }
    // Everything fits into this, so that the first run tells how data and pool relate.
    let mut budget = f64::midpoint(wanted, beside);
    let mut found = None;
    for turn in 0..TRIES {
        let outcome = match attempt(stage, workload, &quire_with(budget))? {
            Ok(outcome) => outcome,
            Err(failure) => return Ok(Some(failed(quire_with(budget), failure))),
        };
        let pool = outcome.stat("pool_bytes_max");
        found = Some((budget, pool));
        let left = budget - pool;
        if (left - beside).abs() <= NEAR * beside {
            break;
        }
        let ratio = pool / (wanted - left);
        // The first run extrapolates; later ones are near enough for the pool as it is.
        budget = match turn {
            0 if ratio > 0.0 && ratio < 1.0 => beside + ratio * (wanted - beside),
            _ => beside + pool,
        };
    }
    let Some((budget, pool)) = found else {
        return Ok(None);
    };
    // The next run may pack a little worse, and there is no swap behind the pool.
    let budget = budget * (1.0 + NEAR);
    Ok(Some(Found {
        contestant: quire_with(budget),
        note: format!(
            "budget {} found by search: without a pool of {} that is {}",
            human(budget),
            human(pool),
            human(budget - pool)
        ),
        failure: None,
    }))
}

fn failed(contestant: Contestant, failure: String) -> Found {
    Found { contestant, note: String::new(), failure: Some(failure) }
}
