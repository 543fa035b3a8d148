//! `quire bench swap`: what it costs to page out, by folio size and by batch.
//!
//! The program maps memory, fills it, and times madvise(MADV_PAGEOUT) of all of it, which in quire
//! unmaps and compresses, and in the kernel writes to zram. What quire spends on unmapping and on
//! compressing is taken from its own counters.

use std::ffi::OsString;

use anyhow::Result;

use super::contestant::{Contestant, KernelSwap, Outcome, Stage};
use super::kernel_swap::HugePages;
use super::output;
use super::{SwapBench, programs, sys};
use crate::samples::Samples;
use quire_cli::print::say;
use serde_json::Value;

const ZRAM_BYTES: u64 = 2 << 30;

/// A way to page out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PageoutWay {
    Quire { order: u32, is_batched: bool },
    Kernel { is_64k: bool },
}

impl PageoutWay {
    const ALL: [PageoutWay; 6] = [
        PageoutWay::Quire { order: 4, is_batched: true },
        PageoutWay::Quire { order: 4, is_batched: false },
        PageoutWay::Quire { order: 0, is_batched: true },
        PageoutWay::Quire { order: 0, is_batched: false },
        PageoutWay::Kernel { is_64k: true },
        PageoutWay::Kernel { is_64k: false },
    ];

    fn name(self) -> String {
        match self {
            PageoutWay::Quire { order, is_batched } => {
                let how = if is_batched { "batched" } else { "page by page" };
                format!("quire, {} KiB folios, {how}", 4 << order)
            }
            PageoutWay::Kernel { is_64k } => {
                format!("zram, {} KiB folios", if is_64k { 64 } else { 4 })
            }
        }
    }

    fn contestant(self, bytes: u64) -> Contestant {
        match self {
            PageoutWay::Quire { order, is_batched } => {
                let mut options: Vec<OsString> = vec![format!("--folio-order={order}").into()];
                if !is_batched {
                    options.push("--no-batch-unmap".into());
                }
                // Nothing is evicted before the program asks for it.
                Contestant::Quire { budget_bytes: bytes * 2 + (64 << 20), options }
            }
            PageoutWay::Kernel { .. } => Contestant::Kernel { limit_bytes: u64::MAX },
        }
    }
}

/// What is paged out, and in what company.
#[derive(Clone, Copy)]
struct PageoutSetting {
    is_zero_filled: bool,
    spins: bool,
}

impl PageoutSetting {
    fn name(self) -> String {
        let data =
            if self.is_zero_filled { "zero-filled" } else { "a quarter of each page random" };
        let company = if self.spins { "another thread running" } else { "alone" };
        format!("{data}, {company}")
    }
}

/// What was measured of one way in one setting.
struct PageoutFigures {
    way: PageoutWay,
    /// madvise(MADV_PAGEOUT), nanoseconds.
    pageout_ns: Samples,
    /// Reading all of it again.
    pagein_ns: Samples,
    /// Of quire's counters: unmap_ns, compress_ns, unmap_calls, unmap_pages.
    counters: [Samples; COUNTERS.len()],
    failure: Option<String>,
}

const COUNTERS: [&str; 4] = ["unmap_ns", "compress_ns", "unmap_calls", "unmap_pages"];

/// Runs the bench.
pub(crate) fn main(options: &SwapBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let stage = Stage::new(common.quire.as_deref(), KernelSwap::create(ZRAM_BYTES))?;
    if let Err(error) = &stage.kernel {
        say(&format!("without the kernel's swap: {error:#}"));
    }
    let bytes = if common.quick { 32 << 20 } else { 256 << 20 };
    let rounds = common.rounds(3, 10);
    if !common.json {
        output::print_heading(rounds, "mean +- standard deviation");
        println!("{:>24}: {} MiB", "memory", bytes >> 20);
    }
    let mut is_failed = false;
    let mut settings = Vec::new();
    for is_zero_filled in [true, false] {
        for spins in [false, true] {
            let setting = PageoutSetting { is_zero_filled, spins };
            let figures = measure(&stage, setting, bytes, rounds)?;
            is_failed |= figures.iter().any(|figures| figures.failure.is_some());
            if !common.json {
                print(setting, &figures);
            }
            settings.push(json(setting, &figures));
        }
    }
    if common.json {
        output::print_json(
            "swap",
            [("bytes", Value::from(bytes)), ("settings", settings.into_iter().collect())],
        );
    }
    Ok(u8::from(is_failed))
}

/// All ways in turn, `rounds` times.
fn measure(
    stage: &Stage,
    setting: PageoutSetting,
    bytes: u64,
    rounds: u32,
) -> Result<Vec<PageoutFigures>> {
    let workload = programs::pageout(&stage.own, bytes, setting.is_zero_filled, setting.spins);
    let has_kernel = stage.kernel.is_ok();
    let ways = PageoutWay::ALL
        .into_iter()
        .filter(|way| has_kernel || !matches!(way, PageoutWay::Kernel { .. }));
    let mut all: Vec<PageoutFigures> = ways.map(PageoutFigures::new).collect();
    for _ in 0..rounds {
        for figures in all.iter_mut().filter(|figures| figures.failure.is_none()) {
            // Only for as long as the kernel's turn takes: the sizes hold for the whole machine.
            let huge_pages = match figures.way {
                PageoutWay::Kernel { .. } => Some(HugePages::remember()?),
                PageoutWay::Quire { .. } => None,
            };
            if let Some(huge_pages) = &huge_pages {
                huge_pages.only_64k(figures.way == PageoutWay::Kernel { is_64k: true })?;
            }
            match stage.run(&workload, &figures.way.contestant(bytes)) {
                Ok(outcome) => figures.add(&outcome),
                Err(error) if sys::is_interrupted() => return Err(error),
                Err(error) => figures.failure = Some(format!("{error:#}")),
            }
        }
    }
    Ok(all)
}

impl PageoutFigures {
    fn new(way: PageoutWay) -> PageoutFigures {
        PageoutFigures {
            way,
            pageout_ns: Samples::default(),
            pagein_ns: Samples::default(),
            counters: Default::default(),
            failure: None,
        }
    }

    fn add(&mut self, outcome: &Outcome) {
        for (name, seconds) in &outcome.phases {
            match name.as_str() {
                "pageout" => self.pageout_ns.push(seconds * 1e9),
                _ => self.pagein_ns.push(seconds * 1e9),
            }
        }
        for (name, samples) in COUNTERS.iter().zip(&mut self.counters) {
            if let Some(value) = outcome.stats.get(*name) {
                samples.push(*value);
            }
        }
    }
}

/// `12.34 +- 0.56`, in milliseconds.
fn milliseconds(ns: &Samples) -> String {
    if ns.is_empty() {
        return "-".into();
    }
    format!("{:.2} +- {:.2}", ns.mean() * 1e-6, ns.deviation() * 1e-6)
}

fn print(setting: PageoutSetting, all: &[PageoutFigures]) {
    println!("\n{}", setting.name());
    println!(
        "  {:34}{:>18}{:>18}{:>18}{:>18}{:>12}",
        "milliseconds", "pageout", "of it unmapping", "of it compressing", "page in", "pages/call"
    );
    for figures in all {
        let [unmap_ns, compress_ns, calls, pages] = &figures.counters;
        let per_call = match calls.is_empty() {
            true => "-".into(),
            false => format!("{:.1}", pages.over(calls).median()),
        };
        println!(
            "  {:34}{:>18}{:>18}{:>18}{:>18}{per_call:>12}",
            figures.way.name(),
            milliseconds(&figures.pageout_ns),
            milliseconds(unmap_ns),
            milliseconds(compress_ns),
            milliseconds(&figures.pagein_ns),
        );
        if let Some(failure) = &figures.failure {
            println!("      FAILED: {failure}");
        }
    }
    for (this, other) in [(1, 0), (3, 2)] {
        let (this, other) = (&all[this], &all[other]);
        let unmapping = this.counters[0].over(&other.counters[0]);
        let whole = this.pageout_ns.over(&other.pageout_ns);
        println!(
            "  {} / {}: unmapping {}, all {}",
            this.way.name(),
            other.way.name(),
            output::ratio(&unmapping),
            output::ratio(&whole)
        );
    }
}

fn json(setting: PageoutSetting, all: &[PageoutFigures]) -> Value {
    let ways = all.iter().map(|figures| {
        let mut members = vec![
            ("way", Value::from(figures.way.name())),
            ("failure", figures.failure.as_deref().into()),
            ("pageout_ns", Value::from(&figures.pageout_ns)),
            ("pagein_ns", Value::from(&figures.pagein_ns)),
        ];
        let counters = COUNTERS.iter().zip(&figures.counters);
        members.extend(
            counters
                .filter(|(_, samples)| !samples.is_empty())
                .map(|(name, samples)| (*name, Value::from(samples))),
        );
        Value::from_iter(members)
    });
    Value::from_iter([("setting", Value::from(setting.name())), ("ways", ways.collect())])
}
