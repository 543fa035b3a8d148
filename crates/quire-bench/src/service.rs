//! `quire bench fault`: what it takes to serve a fault, against the shortest program that could.
//!
//! The program writes to every page of fresh memory once, in random order, each thread on a CPU of
//! its own. It runs bare, under quire with folios of one page in a budget that all of it fits, and
//! with a userfaultfd of its own that a loop serves: read a message, UFFDIO_COPY a page of zeros.
//! The loop's threads sit as quire's do: a handler on each CPU, under SCHED_BATCH.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd as _;
use std::thread;

use anyhow::{Context as _, Result};
use linux_raw_sys::general::UFFDIO_REGISTER_MODE_MISSING;
use quire::process::HANDLERS_AUTO_MAX;
use quire::sys::thread::{never_preempt, pin_to_nth_cpu};
use quire::sys::uffd::Uffd;

use quire_cli::size::Human;

use super::contestant::{Contestant, Stage};
use super::harness::report::{Report, spread};
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::work::{Random, WorkArgs, bytes_of, say};
use super::{FaultBench, programs, sys};

const PAGE_BYTES: usize = 4096;

/// The program: touches each page once, in random order.
pub(crate) fn touch(args: &WorkArgs) -> Result<u64> {
    let mut mapping = sys::Mapping::new(bytes_of(args))?;
    let words = mapping.words();
    if args.own_loop {
        serve(words.as_ptr().addr(), size_of_val(words))?;
    }
    let pages = words.len() / (PAGE_BYTES / 8);
    let slice_pages = pages / args.threads;
    let started = std::time::Instant::now();
    thread::scope(|scope| {
        for (index, slice) in words.chunks_exact_mut(slice_pages * PAGE_BYTES / 8).enumerate() {
            scope.spawn(move || {
                pin_to_nth_cpu(index);
                for page in shuffled(slice_pages, index as u64 + 1) {
                    *black_box(&mut slice[page as usize * (PAGE_BYTES / 8)]) = 1;
                }
            });
        }
    });
    say("touch", started);
    Ok(0)
}

/// The numbers of pages, in random order.
pub(crate) fn shuffled(pages: usize, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..pages as u32).collect();
    let mut random = Random::new(seed);
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    order
}

/// Serves the faults of a range, in threads that end with the process.
fn serve(start: usize, bytes: usize) -> Result<()> {
    let uffd: &'static Uffd = Box::leak(Box::new(Uffd::closed()));
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
    uffd.open(device.as_ref().map(|device| device.as_raw_fd()), 0)
        .context("cannot open a userfaultfd; `quire doctor` says why")?;
    uffd.register(start, bytes, UFFDIO_REGISTER_MODE_MISSING)?;
    let zeros: &'static [u8] = Box::leak(vec![0u8; PAGE_BYTES].into_boxed_slice());
    for index in 0..thread::available_parallelism()?.get().min(HANDLERS_AUTO_MAX) {
        thread::spawn(move || {
            pin_to_nth_cpu(index);
            never_preempt();
            while let Ok(message) = uffd.read() {
                let address = sys::fault_address(&message) & !(PAGE_BYTES - 1);
                uffd.copy(address, zeros.as_ptr().addr(), PAGE_BYTES, false);
            }
        });
    }
    Ok(())
}

/// The table, and its columns.
const TITLE: &str = "a fault";
const BARE: &str = "bare";
const LOOP: &str = "loop";
const QUIRE: &str = "quire";

/// What a cell is measured by.
struct Plan {
    threads: usize,
    has_own_loop: bool,
    contestant: Contestant,
}

struct FaultSuite<'a> {
    options: &'a FaultBench,
    stage: Stage,
    bytes: u64,
}

/// Runs the bench.
pub(crate) fn report(options: &FaultBench) -> Result<Report> {
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let bytes = common.size(64 << 20, 512 << 20, 1 << 30);
    measure(&mut FaultSuite { options, stage, bytes }, common)
}

impl Suite for FaultSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "fault",
            question: "What does it take to serve a fault, beside the shortest loop that could?",
            facts: vec![("memory", format!("{}, a page a fault", Human(self.bytes)))],
            rounds: self.options.common.rounds(3, 5),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheet = Sheet::new(TITLE, Shape::Cells).base(LOOP).plot(Along::Rows);
        let quire = Contestant::Quire {
            budget_bytes: self.bytes * 2 + (64 << 20),
            options: vec!["--folio-order=0".into()],
        };
        for &threads in &self.options.threads {
            for (column, has_own_loop, contestant) in [
                (BARE, false, &Contestant::Bare),
                (LOOP, true, &Contestant::Bare),
                (QUIRE, false, &quire),
            ] {
                let plan = Plan { threads, has_own_loop, contestant: contestant.clone() };
                sheet.add(plural(threads, "thread"), column, plan);
            }
        }
        vec![sheet]
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let own_loop = if plan.has_own_loop { "--own-loop" } else { "" };
        let line =
            format!("work touch --size {} --threads {} {own_loop}", self.bytes, plan.threads);
        let workload = programs::built_in(&self.stage.own, "touch", &line);
        let outcome = self.stage.run(&workload, &plan.contestant)?;
        let seconds = outcome.phases.first().context("the program times itself")?.1;
        let faults_of_a_thread = self.bytes as f64 / PAGE_BYTES as f64 / plan.threads as f64;
        Ok(figures([
            ("us", seconds * 1e6 / faults_of_a_thread),
            ("resident MiB", outcome.peak_bytes as f64 / f64::from(1 << 20)),
        ]))
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |threads: &usize| {
            let row = plural(*threads, "thread");
            let over = |other, figure| results.over(TITLE, &row, [QUIRE, other], figure);
            let beyond = (over(BARE, "resident MiB").median() - 1.0) * 100.0;
            format!(
                "{row}: a fault takes {} of what the loop takes; resident memory is {beyond:.2} % more than bare.",
                spread(&over(LOOP, "us"), "x")
            )
        };
        self.options.threads.iter().map(sentence).collect()
    }
}
