//! `quire bench rmap --simulate`: jobs on shared files, whose pages are write-protected or unmapped in all mappings,
//! on machines with a CPU for each worker.

use anyhow::Result;

use super::super::RmapBench;
use super::super::contestant::Stage;
use super::super::harness::report::{Report, number};
use super::super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::super::rmap::{EXCLUSIVE, SHARED, published};
use super::costs::Costs;
use super::run;

const TITLE: &str = "parts of files written and flushed, files given new memory";
/// Jobs of all workers together.
const JOBS: usize = 2048;

struct WalksSuite<'a> {
    options: &'a RmapBench,
    stage: Stage,
    costs: Costs,
}

/// Runs the bench.
pub(crate) fn report(options: &RmapBench) -> Result<Report> {
    let stage = Stage::without_kernel(options.common.quire.as_deref())?;
    let costs = options.simulation.find_costs(&options.common, &stage)?;
    measure(&mut WalksSuite { options, stage, costs }, &options.common)
}

impl WalksSuite<'_> {
    fn workers(&self) -> Vec<usize> {
        match (&self.options.workers[..], self.options.common.quick) {
            ([], true) => vec![1, 16],
            ([], false) => vec![1, 4, 16, 32, 60],
            (workers, _) => workers.to_vec(),
        }
    }
}

impl Suite for WalksSuite<'_> {
    /// Workers, and whether walks exclude each other.
    type Plan = (usize, bool);

    fn head(&self) -> Head {
        Head {
            name: "rmap, simulated",
            question: "What do walks of the reverse map gain that share its lock, on machines that are not here?",
            facts: vec![
                ("CPUs", self.options.simulation.cpus_in_words()),
                ("costs", self.costs.in_words()),
                ("files", "4 of 256 KiB, each mapped as often as there are workers, which serve their own faults".into()),
            ],
            rounds: 1,
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let mut sheet = Sheet::new(TITLE, Shape::Cells).base(EXCLUSIVE).plot(Along::Rows);
        for workers in self.workers() {
            for (column, are_exclusive) in [(SHARED, false), (EXCLUSIVE, true)] {
                sheet.add(plural(workers, "worker"), column, (workers, are_exclusive));
            }
        }
        vec![sheet]
    }

    fn take(&mut self, &(workers, are_exclusive): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        let all = self.options.common.size(JOBS / 4, JOBS, 2 * JOBS);
        let jobs = (all / workers).max(4);
        let cpus = self.options.simulation.cpus(workers);
        let exclusive = if are_exclusive { "--exclusive" } else { "" };
        let words = format!("walks --threads {workers} --cpus {cpus} --jobs {jobs} {exclusive}");
        let costs = &self.costs;
        let found = run(&self.stage, costs, &words, costs.inline_ns, costs.touch_ns)?;
        Ok(figures([("jobs a second", (workers * jobs) as f64 / found.seconds)]))
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |workers: usize| {
            let row = plural(workers, "worker");
            let ratio = results.over(TITLE, &row, [SHARED, EXCLUSIVE], "jobs a second");
            let theirs = match workers {
                60 => {
                    "; the authors' alltests 1.58 to 1.62 on 60 cores, their disk mix 0.96 to 1.40"
                }
                _ => "",
            };
            let times = (!ratio.is_empty()).then(|| number(ratio.median()))?;
            Some(format!("{row}: {times} times the jobs of exclusive walks{theirs}."))
        };
        self.workers().into_iter().filter_map(sentence).collect()
    }
}
