//! `quire bench speculative --simulate`: threads that map, touch and unmap records, as ebizzy's do, on machines
//! with a CPU for each of them.

use anyhow::Result;

use super::super::SpeculativeBench;
use super::super::contestant::Stage;
use super::super::harness::report::{Report, number};
use super::super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::super::speculative::published;
use super::costs::Costs;
use super::{HANDLERS, run};

/// The table, and its columns.
const TITLE: &str = "records of 512 KiB mapped, touched and unmapped";
const SPECULATIVE: &str = "speculative";
const CLASSIC: &str = "classic";

struct ChurnSuite<'a> {
    options: &'a SpeculativeBench,
    stage: Stage,
    costs: Costs,
}

/// Runs the bench.
pub(crate) fn report(options: &SpeculativeBench) -> Result<Report> {
    let stage = Stage::without_kernel(options.common.quire.as_deref())?;
    let costs = options.simulation.find_costs(&options.common, &stage)?;
    measure(&mut ChurnSuite { options, stage, costs }, &options.common)
}

impl Suite for ChurnSuite<'_> {
    /// Threads, and whether they speculate.
    type Plan = (usize, bool);

    fn head(&self) -> Head {
        Head {
            name: "speculative, simulated",
            question: "What does it bring that faults do without the space's lock, on machines that are not here?",
            facts: vec![
                ("CPUs", self.options.simulation.cpus_in_words()),
                (HANDLERS.0, HANDLERS.1.into()),
                ("costs", self.costs.in_words()),
            ],
            rounds: 1,
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let mut sheet = Sheet::new(TITLE, Shape::Cells).base(CLASSIC).plot(Along::Rows);
        for &threads in &self.options.threads {
            for (column, speculates) in [(SPECULATIVE, true), (CLASSIC, false)] {
                sheet.add(plural(threads, "thread"), column, (threads, speculates));
            }
        }
        vec![sheet]
    }

    fn take(&mut self, &(threads, speculates): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        let records = self.options.common.size(2, 8, 32);
        let cpus = self.options.simulation.cpus(threads);
        let classic = if speculates { "" } else { "--classic" };
        let words =
            format!("churn --threads {threads} --cpus {cpus} --records {records} {classic}");
        let costs = &self.costs;
        let found = run(&self.stage, costs, &words, costs.fault_ns, costs.touch_ns)?;
        Ok(figures([
            ("records a second", (threads * records) as f64 / found.seconds),
            ("% speculative", 100.0 * found.speculative / found.faults),
            (
                "% of CPUs in handlers",
                100.0 * found.handling_seconds / (found.seconds * cpus as f64),
            ),
        ]))
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |threads: &usize| {
            let row = plural(*threads, "thread");
            let ratio = results.over(TITLE, &row, [SPECULATIVE, CLASSIC], "records a second");
            let theirs = match threads {
                16 => "; the authors' 16 CPUs do 2.01 times as many",
                _ => "",
            };
            let times = (!ratio.is_empty()).then(|| number(ratio.median()))?;
            Some(format!("{row}: {times} times the records of classic faults{theirs}."))
        };
        self.options.threads.iter().filter_map(sentence).collect()
    }
}
