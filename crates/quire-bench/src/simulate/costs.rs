//! What things cost on this machine, measured by the library on a file that is cached.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use quire::library::{Delivery, FaultAround};
use serde::{Deserialize, Serialize};

use super::super::around::{DELIVERIES, filled, read_through, time};
use super::super::contestant::Stage;
use super::super::data::{BLOCK_BYTES, Data, PAGE_BYTES, Pattern};
use super::super::sys;
use super::around::Cell;
use super::pageout;
use crate::samples::Samples;

/// The file that is measured for real.
pub(super) const REAL_BYTES: usize = 16 << 20;
/// Rounds of a calibration.
const CALIBRATION_ROUNDS: usize = 9;
/// What a call costs that finds nothing to do; the rest of a call is in a fault's way.
const CALL_NS: u64 = 500;

#[derive(Args, Debug)]
pub(crate) struct CalibrateBench {
    /// The quire binary [default: the one that runs the bench, or the one beside it]
    #[arg(long, value_name = "FILE", env = quire_cli::PROGRAM_VARIABLE, hide = true)]
    quire: Option<PathBuf>,
}

/// What things cost, in nanoseconds.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Costs {
    /// A call of the kernel that maps pages, and each page of it.
    pub call_ns: u64,
    pub page_ns: u64,
    /// A fault's way to a handler and back, and what the engine does for it.
    pub fault_ns: u64,
    /// The same where the thread serves itself.
    pub inline_ns: u64,
    /// What the program does with a page: all of its words, or one.
    pub read_ns: u64,
    pub touch_ns: u64,
    /// A call that unmaps pages, as they are paged out, and each page of it.
    pub unmap_call_ns: u64,
    pub unmap_page_ns: u64,
}

/// Prints what things cost here.
pub(crate) fn calibrate(options: &CalibrateBench) -> Result<u8> {
    sys::notice_signals();
    let stage = Stage::without_kernel(options.quire.as_deref())?;
    println!("{}", serde_json::to_string(&Costs::measure(&stage)?)?);
    Ok(0)
}

/// A file that is cached as a whole, read for real.
pub(super) struct Real {
    data: Data,
    order: Vec<u32>,
    objects: [quire::library::Object; 2],
}

impl Real {
    pub(super) fn new() -> Result<Real> {
        let data = Data::new(&std::env::temp_dir(), REAL_BYTES)?;
        let objects = [filled(&data, Delivery::Handlers)?, filled(&data, Delivery::Inline)?];
        Ok(Real { order: data.shuffled(), data, objects })
    }

    pub(super) fn seconds(&self, cell: &Cell) -> Result<f64> {
        let expected = self.data.expected(cell.pattern, &self.order);
        let object = &self.objects[usize::from(cell.delivery == Delivery::Inline)];
        let read = || read_through(object, cell.around, cell.pattern, &self.order, expected);
        let figures = time(cell.threads, || 0, read)?;
        Ok(figures[0].1)
    }

    /// Nanoseconds a page that the program itself takes, where all is mapped already.
    fn page_ns(&self, pattern: Pattern) -> Result<f64> {
        let mapping = sys::FileMapping::new(self.data.path(), self.data.bytes)?;
        let read = || pattern.read(mapping.words(), &self.order);
        std::hint::black_box(read());
        let begun = std::time::Instant::now();
        std::hint::black_box(read());
        Ok(begun.elapsed().as_secs_f64() * 1e9 / (REAL_BYTES / PAGE_BYTES) as f64)
    }
}

impl Costs {
    /// What a report says of them.
    pub(super) fn in_words(&self) -> String {
        let Costs { call_ns, page_ns, fault_ns, inline_ns, read_ns, touch_ns, .. } = self;
        let Costs { unmap_call_ns, unmap_page_ns, .. } = self;
        format!(
            "a call {call_ns} ns, a page of it {page_ns}, a fault's way {fault_ns}, inline {inline_ns}, a page \
             read {read_ns}, touched {touch_ns}; a call that unmaps {unmap_call_ns}, a page of it {unmap_page_ns}"
        )
    }

    /// Those of a file.
    pub(super) fn read(path: &Path) -> Result<Costs> {
        let read = || Ok::<_, anyhow::Error>(serde_json::from_str(&fs::read_to_string(path)?)?);
        read().with_context(|| {
            format!("{} has no costs; see `quire bench calibrate`", path.display())
        })
    }

    /// Fits the model to one thread that reads in order: what a page of a call costs is the slope between two
    /// sizes of the window, a fault's way what is left where a fault maps one page.
    pub(super) fn measure(stage: &Stage) -> Result<Costs> {
        let real = Real::new()?;
        let pages = (REAL_BYTES / PAGE_BYTES) as f64;
        let cell = |around, delivery| Cell {
            pattern: Pattern::InOrder,
            threads: 1,
            cpus: 1,
            around,
            delivery,
        };
        let a_page =
            |cell: Cell| Ok::<_, anyhow::Error>(median(&|| real.seconds(&cell))? * 1e9 / pages);
        let read_ns = median(&|| real.page_ns(Pattern::InOrder))?;
        let touch_ns = median(&|| real.page_ns(Pattern::Random))?;
        let by_handlers = |around| a_page(cell(around, Delivery::Handlers));
        // A page's share of a window of 2^9 is nearly all that of itself.
        let wide = by_handlers(FaultAround::Order(9))?;
        let page_ns = (wide - read_ns).max(1.0) as u64;
        let mut costs = Costs {
            call_ns: CALL_NS,
            page_ns,
            fault_ns: 0,
            inline_ns: 0,
            read_ns: read_ns as u64,
            touch_ns: touch_ns as u64,
            unmap_call_ns: 0,
            unmap_page_ns: 0,
        };
        (costs.unmap_call_ns, costs.unmap_page_ns) = pageout::measure_unmap(stage)?;
        for (delivery, _) in DELIVERIES {
            let alone = cell(FaultAround::Off, delivery);
            let tables = REAL_BYTES / BLOCK_BYTES;
            let without = alone.run(stage, &costs, tables)?.seconds * 1e9 / pages;
            let left = (a_page(alone)? - without).max(0.0) as u64;
            match delivery {
                Delivery::Handlers => costs.fault_ns = left,
                Delivery::Inline => costs.inline_ns = left,
            }
        }
        Ok(costs)
    }
}

/// The median of a calibration's rounds.
pub(super) fn median(measure: &dyn Fn() -> Result<f64>) -> Result<f64> {
    let rounds = (0..CALIBRATION_ROUNDS).map(|_| measure());
    Ok(rounds.collect::<Result<Samples>>()?.median())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_read_as_they_are_printed() {
        let file = crate::data::Remove(crate::data::unused_path(&std::env::temp_dir()));
        let costs = Costs {
            call_ns: 1,
            page_ns: 2,
            fault_ns: 3,
            inline_ns: 4,
            read_ns: 5,
            touch_ns: 6,
            unmap_call_ns: 7,
            unmap_page_ns: 8,
        };
        fs::write(&file.0, serde_json::to_string(&costs).unwrap()).unwrap();
        assert_eq!(Costs::read(&file.0).unwrap(), costs);
        fs::write(&file.0, "{}").unwrap();
        assert!(format!("{:#}", Costs::read(&file.0).unwrap_err()).contains("has no costs"));
    }
}
