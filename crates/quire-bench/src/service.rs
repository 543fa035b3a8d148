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

use super::contestant::{Contestant, Outcome, Stage};
use super::output;
use super::work::{Random, WorkArgs, bytes_of, say};
use super::{FaultBench, programs, sys};
use crate::samples::Samples;
use serde_json::Value;

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

/// One number of threads, three ways.
struct FaultRow {
    threads: usize,
    /// Bare, loop, quire: microseconds a fault, as each thread sees it.
    times: [Samples; 3],
    /// Bare, quire: most resident memory.
    peaks: [Samples; 2],
}

/// Runs the bench.
pub(crate) fn main(options: &FaultBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let bytes: u64 = if common.quick { 64 << 20 } else { 512 << 20 };
    let rounds = common.rounds(3, 5);
    let mut rows = Vec::new();
    for &threads in &options.threads {
        rows.push(measure(&stage, bytes, rounds, threads)?);
    }
    if common.json {
        let rows = rows.iter().map(FaultRow::json).collect();
        output::print_json("fault", [("bytes", Value::from(bytes)), ("rows", rows)]);
        return Ok(0);
    }
    output::print_heading(rounds, output::MEDIANS);
    println!("{:>24}: {} MiB, a page a fault\n", "memory", bytes >> 20);
    println!(
        "  {:12}{:>10}{:>10}{:>10}{:>26}{:>22}",
        "us a fault", "bare", "loop", "quire", "quire / loop", "memory beyond bare's"
    );
    for row in &rows {
        let [bare, of_loop, quire] = &row.times;
        println!(
            "  {:12}{:>10.2}{:>10.2}{:>10.2}{:>26}{:>21.2}%",
            if row.threads == 1 { "1 thread".into() } else { format!("{} threads", row.threads) },
            bare.median(),
            of_loop.median(),
            quire.median(),
            output::ratio(&quire.over(of_loop)),
            (row.peaks[1].over(&row.peaks[0]).median() - 1.0) * 100.0,
        );
    }
    Ok(0)
}

fn measure(stage: &Stage, bytes: u64, rounds: u32, threads: usize) -> Result<FaultRow> {
    let workload = |is_loop: bool| {
        let own_loop = if is_loop { "--own-loop" } else { "" };
        let line = format!("work touch --size {bytes} --threads {threads} {own_loop}");
        programs::built_in(&stage.own, "touch", &line)
    };
    let quire = Contestant::Quire {
        budget_bytes: bytes * 2 + (64 << 20),
        options: vec!["--folio-order=0".into()],
    };
    let ways = [(false, &Contestant::Bare), (true, &Contestant::Bare), (false, &quire)];
    let mut row = FaultRow { threads, times: Default::default(), peaks: Default::default() };
    let faults_of_a_thread = bytes as f64 / PAGE_BYTES as f64 / threads as f64;
    for _ in 0..rounds {
        for (way, (is_loop, contestant)) in ways.iter().enumerate() {
            let outcome: Outcome = stage.run(&workload(*is_loop), contestant)?;
            let seconds = outcome.phases.first().context("the program times itself")?.1;
            row.times[way].push(seconds * 1e6 / faults_of_a_thread);
            match way {
                0 => row.peaks[0].push(outcome.peak_bytes as f64),
                2 => row.peaks[1].push(outcome.peak_bytes as f64),
                _ => {}
            }
        }
    }
    Ok(row)
}

impl FaultRow {
    fn json(&self) -> Value {
        let [bare, of_loop, quire] = &self.times;
        Value::from_iter([
            ("threads", Value::from(self.threads)),
            ("bare_us", Value::from(bare)),
            ("loop_us", Value::from(of_loop)),
            ("quire_us", Value::from(quire)),
            ("quire_over_loop", Value::from(&quire.over(of_loop))),
            ("peak_bytes_over_bare", Value::from(&self.peaks[1].over(&self.peaks[0]))),
        ])
    }
}
