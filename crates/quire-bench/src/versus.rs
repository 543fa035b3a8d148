//! `quire bench run`: three contestants in turn, on programs that fit and programs that do not.
//!
//! A program's want is what it holds bare. It is then run in a half and a quarter of that, counted
//! in two ways, because the contestants keep what they compressed at different places:
//!
//! store inside: the limit holds the compressed store as well. Quire always counts so. For the
//! kernel the cgroup's limit is lowered until limit and zram's mem_used_max together fit.
//!
//! store outside: the limit is for what is not compressed, as the kernel counts. For Quire the
//! budget is raised until what is left of it beside the compressed pool is the limit.
//!
//! A build is a tree of processes. What it wants is the most that all of them have at a time, as
//! `quire run` counts it where everything fits. It is run in half of that, with what `quire run`
//! leaves beside the budget for what is not managed; the kernel's limit and its store together are
//! as much as the cgroup of Quire's run held.
//!
//! Both searches are in [`super::fit`]. The kernel's limit includes the program's page tables and
//! the pages of its code that were not loaded before; these few MiB are not evened out.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail, ensure};
use quire_cli::cgroup::allowance_bytes;
use quire_cli::size::{Human, machine_memory_bytes};

use super::contestant::{Contestant, KernelSwap, Outcome, Stage, Workload};
use super::fit::{self, Found, Store};
use super::harness::report::{self, Report};
use super::harness::suite::{Figures, Head, Results, Shape, Sheet, Suite, measure, plural};
use super::programs::{self, Randomness};
use super::tree::Tree;
use super::{Part, RunBench, sys};

/// Swap that is made; it takes memory only as it is used, and 16 bytes a page beside.
const ZRAM_BYTES: u64 = 4 << 30;

/// Jobs of a build at a time.
const BUILD_JOBS: usize = 2;
/// What a build may have where it is to fit.
const ROOMY_BYTES: u64 = 1 << 30;
/// The orders of folios that a build runs with.
const ORDERS: [u32; 6] = [0, 1, 3, 4, 7, 9];
/// Small programs that a shell starts, one after the other.
const SHORT_PROCESSES: usize = 400;

/// How much a program may have.
#[derive(Clone, Copy)]
enum Limit {
    /// Twice of what it wants.
    Fits,
    /// A part of what it wants, with the store counted in one of two ways.
    Share(u64, Store),
    /// All of a tree of processes fits.
    TreeFits,
    /// Half of what a tree wants.
    TreeHalf,
    /// All of it fits, in folios of this order.
    Folios(u32),
}

/// Who runs it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Bare,
    Quire,
    Kernel,
}

/// What a cell is measured by.
#[derive(Clone)]
struct Plan {
    row: String,
    workload: Workload,
    limit: Limit,
    who: Who,
}

/// What is found before a row is measured.
struct Known {
    /// Of what the program prints.
    digest: u64,
    quire: Found,
    /// Nothing where there is no kernel swap.
    kernel: Option<Found>,
}

struct VersusSuite<'a> {
    options: &'a RunBench,
    stage: Stage,
    /// CPython; nothing where it is not there.
    python: Option<std::path::PathBuf>,
    tree: Option<Tree>,
    left_out: Vec<String>,
    /// By the row.
    known: HashMap<String, Known>,
}

/// Runs the bench.
pub(crate) fn report(options: &RunBench) -> Result<Report> {
    let has_threads = !options.threads.is_empty() && !options.threads.contains(&0);
    ensure!(has_threads, "a program runs with one thread at least");
    let common = &options.common;
    let stage = Stage::new(common.quire.as_deref(), KernelSwap::create(ZRAM_BYTES))?;
    let mut left_out = Vec::new();
    if let Err(error) = &stage.kernel {
        left_out.push(format!("the kernel's swap: {error:#}"));
    }
    let mut or_left_out = |what, error: anyhow::Error| left_out.push(format!("{what}: {error:#}"));
    let has = |part| options.only.contains(&part);
    let python = match has(Part::Fits) || has(Part::Real) {
        true => programs::python().map_err(|error| or_left_out("CPython", error)).ok(),
        false => None,
    };
    let tree = match has(Part::Build) || has(Part::Orders) {
        true => {
            let tree = Tree::of_zstd(stage.folder(), common.quick);
            tree.map_err(|error| or_left_out("a build", error)).ok()
        }
        false => None,
    };
    let known = HashMap::new();
    let mut suite = VersusSuite { options, stage, python, tree, left_out, known };
    suite.write_text()?;
    measure(&mut suite, common)
}

/// Adds a row in which all run a program.
fn add(sheet: &mut Sheet<Plan>, row: String, workload: &Workload, limit: Limit, has_kernel: bool) {
    for (column, who) in [("bare", Who::Bare), ("quire", Who::Quire), ("zram", Who::Kernel)] {
        if who != Who::Kernel || has_kernel {
            let (name, workload) = (row.clone(), workload.clone());
            sheet.add(row.clone(), column, Plan { row: name, workload, limit, who });
        }
    }
}

fn sheet(title: &str) -> Sheet<Plan> {
    Sheet::new(title, Shape::Figures).base("quire")
}

impl VersusSuite<'_> {
    fn is_quick(&self) -> bool {
        self.options.common.quick
    }

    /// A quick run has the first number of threads, and one part of what a program wants.
    fn threads(&self) -> &[usize] {
        let all = &self.options.threads;
        if self.is_quick() { &all[..1] } else { all }
    }

    fn has(&self, part: Part) -> bool {
        self.options.only.contains(&part)
    }

    fn text(&self) -> std::path::PathBuf {
        self.stage.folder().join("text")
    }

    /// What GNU sort sorts.
    fn write_text(&self) -> Result<()> {
        match self.has(Part::Real) {
            true => programs::write_text(
                &self.text(),
                if self.is_quick() { 32 << 20 } else { 200 << 20 },
            ),
            false => Ok(()),
        }
    }

    /// Programs within their budget: what quire costs where it brings nothing.
    fn fits(&self) -> Sheet<Plan> {
        let own = &self.stage.own;
        let (scale, bytes) = if self.is_quick() { (1, 32 << 20) } else { (4, 256 << 20) };
        let mut workloads = vec![(1, programs::sort_numbers(own, bytes, 2))];
        if let Some(python) = &self.python {
            workloads.push((1, programs::json_text(python, scale * 4)));
            workloads.push((1, programs::dicts(python, scale * 40_000)));
        }
        for &threads in self.threads() {
            workloads.push((threads, programs::malloc(own, threads, scale * 2)));
            workloads.push((threads, programs::memory(own, bytes, threads, Randomness::Half)));
        }
        let mut sheet = sheet("programs that fit");
        for (threads, workload) in workloads {
            let row = format!("{}, {}", workload.name, plural(threads, "thread"));
            add(&mut sheet, row, &workload, Limit::Fits, false);
        }
        sheet
    }

    /// Adds a program in a half and a quarter of what it wants.
    fn add_limited(
        &self,
        sheet: &mut Sheet<Plan>,
        threads: usize,
        workload: &Workload,
        stores: &[Store],
    ) {
        let shares: &[u64] = if self.is_quick() { &[2] } else { &[2, 4] };
        for &share in shares {
            for &store in stores {
                let name = store.name();
                let threads = plural(threads, "thread");
                let row = format!("{}, {threads}, 1/{share}, store {name}", workload.name);
                let has_kernel = self.stage.kernel.is_ok();
                add(sheet, row, workload, Limit::Share(share, store), has_kernel);
            }
        }
    }

    /// Scans and random access.
    fn memory(&self) -> Sheet<Plan> {
        let full = self.options.size.bytes_of(machine_memory_bytes());
        let bytes = if self.is_quick() { full / 4 } else { full };
        let mut sheet = sheet("scans and random access to more than fits");
        for &threads in self.threads() {
            // An eighth compresses to where a quarter of the memory can hold all of it; half does so
            // nowhere, with the store inside.
            for (store, data) in
                [(Store::Inside, Randomness::Eighth), (Store::Outside, Randomness::Half)]
            {
                let workload = programs::memory(&self.stage.own, bytes, threads, data);
                self.add_limited(&mut sheet, threads, &workload, &[store]);
            }
        }
        sheet
    }

    /// CPython and GNU sort.
    fn real(&self) -> Sheet<Plan> {
        let stores: &[Store] =
            if self.is_quick() { &[Store::Outside] } else { &[Store::Inside, Store::Outside] };
        let mut sheet = sheet("CPython and GNU sort with less than they want");
        if let Some(python) = &self.python {
            let dicts = programs::dicts(python, if self.is_quick() { 60_000 } else { 150_000 });
            self.add_limited(&mut sheet, 1, &dicts, stores);
        }
        for &threads in self.threads() {
            let sort = programs::sort_text(&self.text(), threads);
            self.add_limited(&mut sheet, threads, &sort, stores);
        }
        sheet
    }

    /// A build, where it fits and in half of what all of its processes want.
    fn build(&self, tree: &Tree) -> Sheet<Plan> {
        let workload = tree.rebuild(BUILD_JOBS);
        let mut sheet = sheet("a build");
        for (how, limit) in [("all of it fits", Limit::TreeFits), ("1/2", Limit::TreeHalf)] {
            let row = format!("{}, {}, {how}", workload.name, plural(BUILD_JOBS, "job"));
            let has_kernel = matches!(limit, Limit::TreeHalf) && self.stage.kernel.is_ok();
            add(&mut sheet, row, &workload, limit, has_kernel);
        }
        sheet
    }

    /// Many processes, all of which fit, by the order of folios.
    fn orders(&self, tree: &Tree) -> Sheet<Plan> {
        let count = if self.is_quick() { SHORT_PROCESSES / 8 } else { SHORT_PROCESSES };
        let short = Workload {
            name: format!("{count} short processes"),
            argv: [
                "sh".into(),
                "-c".into(),
                format!("for i in $(seq {count}); do /bin/true; done").into(),
            ]
            .into(),
            is_deterministic: true,
        };
        let again = Workload { name: "make where all is made".into(), ..tree.workload(BUILD_JOBS) };
        let mut sheet = Sheet::new("by the order of folios", Shape::Cells).base("bare");
        for workload in [tree.rebuild(BUILD_JOBS), again, short] {
            let mut add = |column: String, limit, who| {
                let row = workload.name.clone();
                let plan = Plan { row, workload: workload.clone(), limit, who };
                sheet.add(workload.name.clone(), column, plan);
            };
            add("bare".into(), Limit::TreeFits, Who::Bare);
            add("auto".into(), Limit::TreeFits, Who::Quire);
            for order in ORDERS {
                add(order.to_string(), Limit::Folios(order), Who::Quire);
            }
        }
        sheet.note = Some("Of anonymous memory: files are not managed by quire run.".into());
        sheet
    }

    /// What a row's program prints, and with which limits it runs.
    fn find(&self, plan: &Plan) -> Result<Known> {
        let (stage, workload) = (&self.stage, &plan.workload);
        let wanted = stage.run(workload, &Contestant::Bare)?;
        let with_budget = |budget_bytes, note: String| Found {
            contestant: Contestant::Quire { budget_bytes, options: Vec::new() },
            note,
            failure: None,
        };
        let digest = wanted.digest;
        Ok(match plan.limit {
            Limit::Fits => {
                let quire = with_budget(wanted.peak_bytes * 2, String::new());
                Known { digest, quire, kernel: None }
            }
            Limit::Share(share, store) => {
                let limit = wanted.peak_bytes / share;
                let quire = fit::quire(stage, workload, &wanted, limit, store)?;
                let quire = quire.context("no budget was found")?;
                let kernel = fit::kernel(stage, workload, &wanted, limit, store)?;
                Known { digest, quire, kernel }
            }
            Limit::TreeFits | Limit::Folios(_) => {
                Known { digest, quire: with_budget(ROOMY_BYTES, String::new()), kernel: None }
            }
            Limit::TreeHalf => {
                let roomy = with_budget(ROOMY_BYTES, String::new());
                let wanted = stage.run(workload, &roomy.contestant)?.stat("wanted_bytes_max");
                let budget_bytes = wanted as u64 / 2;
                let mut quire = with_budget(budget_bytes, String::new());
                let held_bytes = match stage.run(workload, &quire.contestant) {
                    Ok(outcome) => outcome.stat("cgroup_bytes_max") as u64,
                    Err(error) if sys::is_interrupted() => return Err(error),
                    // Said again by its own rounds.
                    Err(_) => 0,
                };
                let all_bytes = match held_bytes {
                    0 => budget_bytes + allowance_bytes(1, 0),
                    held_bytes => held_bytes,
                };
                quire.note = format!("its cgroup held {}", Human(all_bytes));
                let kernel = fit::kernel_for_tree(stage, workload, all_bytes)?;
                Known { digest, quire, kernel }
            }
        })
    }

    /// What a run took; its memory is what it held bare, Quire's budget, or the kernel's limit and its store.
    fn figures(outcome: &Outcome, contestant: &Contestant) -> Figures {
        let bytes = match contestant {
            Contestant::Bare => outcome.peak_bytes,
            Contestant::Quire { budget_bytes, .. } => *budget_bytes,
            Contestant::Kernel { limit_bytes } => limit_bytes + outcome.store_bytes,
        };
        let mut figures = vec![("seconds".to_owned(), outcome.seconds)];
        figures.extend(outcome.phases.iter().cloned());
        figures.push(("memory MiB".into(), bytes as f64 / f64::from(1 << 20)));
        if matches!(contestant, Contestant::Quire { .. }) {
            figures.push(("faults".into(), outcome.stat("pgfault")));
        }
        if outcome.oom_kills > 0 {
            figures.push(("killed, and repeated".into(), f64::from(outcome.oom_kills)));
        }
        figures
    }
}

impl Suite for VersusSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let kernel = self.stage.kernel.as_ref().ok();
        let zram = kernel.map(|kernel| format!("lz4, memory cgroup {}", kernel.limit.version()));
        let size = self.options.size.bytes_of(machine_memory_bytes());
        Head {
            name: "run",
            question: "What does a program take under Quire, where it fits and with less than it wants, beside the kernel's swap on zram?",
            facts: std::iter::once(("the memory program wants", Human(size).to_string()))
                .chain(zram.map(|zram| ("zram", zram)))
                .collect(),
            rounds: self.options.common.rounds(1, 5),
            left_out: self.left_out.clone(),
            published: if self.has(Part::Orders) { published() } else { Vec::new() },
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let of_part = |part: &Part| match part {
            Part::Fits => Some(self.fits()),
            Part::Memory => Some(self.memory()),
            Part::Real => Some(self.real()),
            Part::Build => self.tree.as_ref().map(|tree| self.build(tree)),
            Part::Orders => self.tree.as_ref().map(|tree| self.orders(tree)),
        };
        self.options.only.iter().filter_map(of_part).collect()
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        if !self.known.contains_key(&plan.row) {
            let known = self.find(plan)?;
            self.known.insert(plan.row.clone(), known);
        }
        let known = &self.known[&plan.row];
        let of_order;
        let contestant = match (plan.who, plan.limit) {
            (Who::Bare, _) => &Contestant::Bare,
            (Who::Quire, Limit::Folios(order)) => {
                let options = vec![format!("--folio-order={order}").into()];
                of_order = Contestant::Quire { budget_bytes: ROOMY_BYTES, options };
                &of_order
            }
            (Who::Quire, _) => known.quire.usable()?,
            (Who::Kernel, _) => {
                known.kernel.as_ref().context("there is no kernel swap")?.usable()?
            }
        };
        let outcome = self.stage.run(&plan.workload, contestant)?;
        if plan.workload.is_deterministic && outcome.digest != known.digest {
            bail!("it printed something else than bare");
        }
        Ok(VersusSuite::figures(&outcome, contestant))
    }

    // That the kernel's contestant fails is a figure too.
    fn is_ours(&self, column: &str) -> bool {
        column == "quire"
    }

    fn words(&self, _: &Results<'_>) -> Vec<String> {
        let mut words = Vec::new();
        for (row, known) in &self.known {
            for (name, found) in [("quire", Some(&known.quire)), ("zram", known.kernel.as_ref())] {
                if let Some(found) = found.filter(|found| !found.note.is_empty()) {
                    words.push(format!("{row}: {name}: {}.", found.note));
                }
            }
        }
        words.sort();
        words
    }
}

/// 4 sockets, 120 threads, make -j60; files by what is mapped around a fault.
fn published() -> Vec<report::Part> {
    let head = ["", "figure", "baseline", "1", "3", "4", "5", "7", "9"];
    let rows: [&[&str]; 7] = [
        &head,
        &[
            "Linux, a build",
            "faults",
            "283,301,572",
            "247,151,987",
            "212,215,789",
            "204,772,882",
            "199,568,944",
            "194,703,779",
            "193,381,485",
        ],
        &["", "seconds", "151.2", "153.9", "151.4", "150.9", "150.9", "151.2", "151.5"],
        &[
            "Linux, built again",
            "faults",
            "5,396,854",
            "4,148,444",
            "2,855,286",
            "2,577,282",
            "2,361,957",
            "2,169,573",
            "2,112,643",
        ],
        &["", "seconds", "27.4", "27.6", "27.0", "26.9", "26.7", "27.0", "26.8"],
        &[
            "git's tests",
            "faults",
            "129,591,823",
            "99,200,751",
            "66,106,718",
            "57,606,410",
            "51,510,808",
            "45,776,813",
            "44,085,515",
        ],
        &["", "seconds", "66.1", "64.8", "64.4", "65.3", "66.0", "66.8", "67.2"],
    ];
    let title = "Fault-around by FAULT_AROUND_ORDER: of files, not of anonymous memory";
    vec![report::Part::published(title, &rows)]
}
