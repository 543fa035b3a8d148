//! `quire bench swap`: what it costs to page out, by folio size and by batch.
//!
//! The program maps memory, fills it, and times madvise(MADV_PAGEOUT) of all of it, which in quire
//! unmaps and compresses, and in the kernel writes to zram. What quire spends on unmapping and on
//! compressing is taken from its own counters.

use std::ffi::OsString;

use anyhow::Result;
use quire_cli::size::Human;

use super::contestant::{Contestant, KernelSwap, Stage};
use super::harness::report::{Part, Report, spread};
use super::harness::suite::{Figures, Head, Results, Shape, Sheet, Suite, measure};
use super::kernel_swap::HugePages;
use super::{SwapBench, programs};

const ZRAM_BYTES: u64 = 2 << 30;

/// A way to page out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageoutWay {
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

    pub(crate) fn contestant(self, bytes: u64) -> Contestant {
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

/// Times of quire's counters, and what they are called here.
const COUNTERS: [(&str, &str); 2] =
    [("unmap_ns", "unmapping, ms"), ("compress_ns", "compressing, ms")];
const PAGEOUT: &str = "pageout, ms";

struct SwapSuite<'a> {
    options: &'a SwapBench,
    stage: Stage,
    bytes: u64,
}

/// Runs the bench.
pub(crate) fn report(options: &SwapBench) -> Result<Report> {
    let common = &options.common;
    let stage = Stage::new(common.quire.as_deref(), KernelSwap::create(ZRAM_BYTES))?;
    let bytes = common.size(32 << 20, 256 << 20, 256 << 20);
    measure(&mut SwapSuite { options, stage, bytes }, common)
}

impl Suite for SwapSuite<'_> {
    type Plan = (PageoutSetting, PageoutWay);

    fn head(&self) -> Head {
        let no_kernel = self.stage.kernel.as_ref().err();
        Head {
            name: "swap",
            question: "What does it save to unmap the pages of a large folio in one call, when memory is paged out?",
            facts: vec![("memory", Human(self.bytes).to_string())],
            rounds: self.options.common.rounds(3, 10),
            left_out: no_kernel.map(|error| format!("zram: {error:#}")).into_iter().collect(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let mut sheets = Vec::new();
        for is_zero_filled in [true, false] {
            for spins in [false, true] {
                let setting = PageoutSetting { is_zero_filled, spins };
                let base = PageoutWay::ALL[1].name();
                let mut sheet = Sheet::new(setting.name(), Shape::Cells).base(base);
                sheet.has_means = true;
                for way in PageoutWay::ALL {
                    if self.stage.kernel.is_ok() || !matches!(way, PageoutWay::Kernel { .. }) {
                        sheet.add("", way.name(), (setting, way));
                    }
                }
                sheets.push(sheet);
            }
        }
        sheets
    }

    fn take(&mut self, (setting, way): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        // Only for as long as the kernel's turn takes: the sizes hold for the whole machine.
        let _huge_pages = match way {
            PageoutWay::Kernel { is_64k } => {
                let huge_pages = HugePages::remember()?;
                huge_pages.only_64k(*is_64k)?;
                Some(huge_pages)
            }
            PageoutWay::Quire { .. } => None,
        };
        let workload =
            programs::pageout(&self.stage.own, self.bytes, setting.is_zero_filled, setting.spins);
        let outcome = self.stage.run(&workload, &way.contestant(self.bytes))?;
        let mut figures = Figures::new();
        for (name, seconds) in &outcome.phases {
            let name = if name == "pageout" { PAGEOUT } else { "page in, ms" };
            figures.push((name.into(), seconds * 1e3));
        }
        if matches!(way, PageoutWay::Quire { .. }) {
            for (counter, name) in COUNTERS {
                figures.push((name.into(), outcome.stat(counter) * 1e-6));
            }
            let (pages, calls) = (outcome.stat("unmap_pages"), outcome.stat("unmap_calls"));
            figures.push(("pages a call".into(), pages / calls.max(1.0)));
        }
        Ok(figures)
    }

    fn is_ours(&self, column: &str) -> bool {
        column.starts_with("quire")
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let mut words = Vec::new();
        for sheet in self.sheets() {
            for [batched, single] in [[0, 1], [2, 3]] {
                let ways = [batched, single].map(|way: usize| PageoutWay::ALL[way].name());
                let [batched, single] = ways.each_ref().map(String::as_str);
                let over = |figure| results.over(&sheet.title, "", [batched, single], figure);
                words.push(format!(
                    "{}: {batched} over {single}: unmapping {}, all {}.",
                    sheet.title,
                    spread(&over(COUNTERS[0].1), "x"),
                    spread(&over(PAGEOUT), "x")
                ));
            }
        }
        words
    }
}

/// 256 MiB in folios of 64 KiB, zeros, madvise(MADV_PAGEOUT) by one thread.
pub(crate) fn published() -> Vec<Part> {
    vec![Part::published(
        "MADV_PAGEOUT of 256 MiB in folios of 64 KiB",
        &[
            &["machine", "before", "batched", "batched over before"],
            &["Linux VM on an Apple M3 (arm64)", "37.4 ms (12 %)", "17.4 ms (11 %)", "0.47x"],
            &["x86, bare metal", "55.0 ms (1.5 %)", "51.9 ms (3 %)", "0.94x"],
        ],
    )]
}
