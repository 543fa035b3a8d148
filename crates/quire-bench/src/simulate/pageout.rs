//! `quire bench swap --simulate`: pages of large folios unmapped in one call and page by page, by the folios'
//! size. What unmapping costs is fitted to folios of 64 KiB on this machine; a table beside says how far the model
//! is from the other sizes here.

use anyhow::Result;
use quire_cli::size::Human;

use super::super::SwapBench;
use super::super::contestant::{Outcome, Stage};
use super::super::data::{BLOCK_BYTES, PAGE_BYTES};
use super::super::harness::Options;
use super::super::harness::report::{Report, number};
use super::super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure,
};
use super::super::pageout::{PageoutWay, published};
use super::super::programs;
use super::costs::{Costs, median};
use super::{MODEL, REAL, SIMULATED, model_in_words, run};

/// What is paged out, and what is paged out for real.
const BYTES: u64 = 16 << 30;
const REAL_BYTES: u64 = 32 << 20;
/// The orders of folios.
const ORDERS: [u32; 6] = [0, 1, 2, 4, 6, 9];
/// The one that the model is fitted to.
const FITTED_ORDER: u32 = 4;

const BATCHED: &str = "batched";
const SINGLE: &str = "page by page";

/// Folios, and how they are unmapped.
#[derive(Clone, Copy)]
struct Folios {
    order: u32,
    is_batched: bool,
}

enum Plan {
    Large(Folios),
    Real(Folios),
    Simulated(Folios),
}

struct PageoutSuite<'a> {
    common: &'a Options,
    stage: Stage,
    costs: Costs,
}

/// Runs the bench.
pub(crate) fn report(options: &SwapBench) -> Result<Report> {
    let stage = Stage::without_kernel(options.common.quire.as_deref())?;
    let costs = options.simulation.find_costs(&options.common, &stage)?;
    measure(&mut PageoutSuite { common: &options.common, stage, costs }, &options.common)
}

/// Nanoseconds of a call that unmaps, and of each page of it: the line through one page and all of a folio's.
pub(super) fn measure_unmap(stage: &Stage) -> Result<(u64, u64)> {
    let order = FITTED_ORDER;
    let a_page = |is_batched| median(&|| real_ns(stage, Folios { order, is_batched }));
    let (batched, single) = (a_page(true)?, a_page(false)?);
    let call = (single - batched) / (1.0 - 1.0 / f64::from(1 << order));
    Ok((call.max(0.0) as u64, (single - call).max(1.0) as u64))
}

/// Nanoseconds that a page is unmapped in, for real.
fn real_ns(stage: &Stage, Folios { order, is_batched }: Folios) -> Result<f64> {
    let way = PageoutWay::Quire { order, is_batched };
    let workload = programs::pageout(&stage.own, REAL_BYTES, true, false);
    let outcome: Outcome = stage.run(&workload, &way.contestant(REAL_BYTES))?;
    Ok(outcome.stat("unmap_ns") / outcome.stat("unmap_pages").max(1.0))
}

fn rows() -> impl Iterator<Item = (String, &'static str, Folios)> {
    let ways = [(BATCHED, true), (SINGLE, false)];
    ORDERS.into_iter().flat_map(move |order| {
        let row = format!("{} KiB folios", 4u32 << order);
        ways.map(|(column, is_batched)| (row.clone(), column, Folios { order, is_batched }))
    })
}

fn title() -> String {
    format!("{} unmapped", Human(BYTES))
}

impl PageoutSuite<'_> {
    /// Page tables that are simulated.
    fn tables(&self) -> usize {
        self.common.size(2, 16, 16)
    }

    /// Nanoseconds a page, and pages of a call.
    fn simulated(&self, Folios { order, is_batched }: Folios) -> Result<(f64, f64)> {
        let costs = Costs {
            call_ns: self.costs.unmap_call_ns,
            page_ns: self.costs.unmap_page_ns,
            ..self.costs
        };
        let single = if is_batched { "" } else { "--no-batch-unmap" };
        let tables = self.tables();
        let words =
            format!("pageout --threads 1 --cpus 2 --tables {tables} --order {order} {single}");
        let found = run(&self.stage, &costs, &words, costs.fault_ns, costs.touch_ns)?;
        let pages = (tables * BLOCK_BYTES / PAGE_BYTES) as f64;
        Ok((found.unmap_seconds * 1e9 / pages, pages / found.unmap_calls))
    }
}

impl Suite for PageoutSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "swap, simulated",
            question: "What does it save to unmap the pages of a large folio in one call, by the folio's size?",
            facts: vec![
                ("costs", self.costs.in_words()),
                (
                    "what is simulated",
                    format!(
                        "the unmapping alone, of {}, scaled; other threads' CPUs are not told of it, as they are in \
                         life",
                        Human((self.tables() * BLOCK_BYTES) as u64)
                    ),
                ),
            ],
            rounds: 1,
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheet = Sheet::new(title(), Shape::Cells).base(SINGLE).plot(Along::Rows);
        let mut model = Sheet::new(MODEL, Shape::Cells).base(REAL);
        for (row, column, folios) in rows() {
            sheet.add(&row, column, Plan::Large(folios));
            let row = format!("{row}, {column}");
            model.add(&row, REAL, Plan::Real(folios));
            model.add(&row, SIMULATED, Plan::Simulated(folios));
        }
        model.rounds = Some(self.common.size(1, 3, 3));
        model.note = Some(format!("{} of zeros, a thread alone.", Human(REAL_BYTES)));
        vec![sheet, model]
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        Ok(match *plan {
            Plan::Large(folios) => {
                let (ns, pages_a_call) = self.simulated(folios)?;
                let pages = (BYTES / PAGE_BYTES as u64) as f64;
                figures([("seconds", ns * 1e-9 * pages), ("calls", (pages / pages_a_call).round())])
            }
            Plan::Real(folios) => figures([("ns a page", real_ns(&self.stage, folios)?)]),
            Plan::Simulated(folios) => figures([("ns a page", self.simulated(folios)?.0)]),
        })
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let mut words: Vec<String> = rows()
            .filter(|(_, column, _)| *column == BATCHED)
            .filter_map(|(row, ..)| {
                let ratio = results.over(&title(), &row, [BATCHED, SINGLE], "seconds");
                let part = (!ratio.is_empty()).then(|| number(ratio.median()))?;
                Some(format!("{row}: in batches unmapping takes {part} of the time."))
            })
            .collect();
        words.push(
            "The authors' 64 KiB: all of MADV_PAGEOUT takes 0.47 of the time on arm64, 0.94 on x86.".into(),
        );
        words.extend(model_in_words(*results, "ns a page"));
        words
    }
}
