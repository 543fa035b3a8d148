//! `quire bench waiters`: what a page lock costs, free and contended, with the sign in its word that
//! says whether a thread waits, and without it.
//!
//! Free: one thread locks and unlocks a page, and a `std::sync::Mutex` beside it, in turns.
//! Contended: threads lock one page, change it and unlock it, as fast as they can. "Always looks"
//! is the table without the sign: every unlock looks for waiters, as it must where a word has no
//! room for one. Then the same in what is done with objects ([`objects`]), and what an unlock costs by
//! itself ([`prices`]), from which the share of unlocks in that is reckoned.

mod objects;
mod prices;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use anyhow::Result;
use quire::page::wait::Counts;
use quire::page::{Futexes, PageWord, Parked, WaitTable};
use quire::sys::thread::pin_to_nth_cpu;

use self::prices::Prices;
use super::data::disk_directory;
use super::output;
use super::{WaitersBench, sys};
use crate::samples::Samples;
use quire_cli::size::machine_memory_bytes;
use serde_json::Value;

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitersPart {
    /// The lock alone
    Locks,
    /// What is done with objects
    Objects,
}

/// One thread alone: nanoseconds for lock and unlock.
#[derive(Default)]
struct Free {
    mutex_ns: Samples,
    page_ns: Samples,
    always_looks_ns: Samples,
}

/// Some threads on one page, with the sign or without.
#[derive(Default)]
struct ContendedLock {
    /// For each lock and unlock, of all threads together.
    ns: Samples,
    /// Unlocks that made no call and did not look, of a thousand.
    avoided: Samples,
    /// Unlocks that looked for waiters, of a thousand.
    looks: Samples,
    /// Threads woken, of a thousand unlocks.
    wakes: Samples,
}

struct Row {
    threads: usize,
    mutex_ns: Samples,
    /// With the sign; every unlock looks.
    pages: [ContendedLock; 2],
}

/// Runs the bench.
pub(crate) fn main(options: &WaitersBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let rounds = common.rounds(3, 11);
    let (locks, prices, objects) = measure(options, rounds)?;
    if common.json {
        let mut members = Vec::new();
        if let Some((free, rows)) = &locks {
            members.push(("free", free.json()));
            members.push(("contended", rows.iter().map(Row::json).collect()));
        }
        members.push(("prices", prices.json()));
        members.push(("objects", objects::json(&objects)));
        output::print_json("waiters", members);
        return Ok(0);
    }
    output::print_heading(rounds, "medians, with the least and the most");
    println!();
    if let Some((free, rows)) = &locks {
        free.print();
        rows.iter().for_each(Row::print);
    }
    prices.print();
    if !objects.is_empty() {
        objects::print(&objects);
    }
    Ok(0)
}

type Locks = (Free, Vec<Row>);

fn measure(
    options: &WaitersBench,
    rounds: u32,
) -> Result<(Option<Locks>, Prices, Vec<objects::WaitersObjectRow>)> {
    let is_quick = options.common.quick;
    let (free_times, contended_times) =
        if is_quick { (1_000_000, 100_000) } else { (10_000_000, 1_000_000) };
    let has_locks = options.only.contains(&WaitersPart::Locks);
    let (mut free, mut prices) = (Free::default(), Prices::default());
    let mut rows: Vec<Row> = options.threads.iter().map(|&threads| Row::new(threads)).collect();
    for _ in 0..rounds {
        prices.measure(contended_times);
        if has_locks {
            free.measure(free_times);
            rows.iter_mut().for_each(|row| row.measure(contended_times));
        }
        anyhow::ensure!(!sys::is_interrupted(), "interrupted");
    }
    let mut objects = Vec::new();
    if options.only.contains(&WaitersPart::Objects) {
        let directory = options.directory.clone().unwrap_or_else(disk_directory);
        let full = options.size.bytes_of(machine_memory_bytes()) as usize;
        let bytes = if is_quick { full.min(16 << 20) } else { full };
        objects = objects::measure(directory, bytes, rounds, &prices)?;
    }
    Ok((has_locks.then_some((free, rows)), prices, objects))
}

fn table(always_looks: bool) -> WaitTable {
    let table = WaitTable::new().expect("a few pages for a table");
    table.set_always_looks(always_looks);
    table
}

/// Nanoseconds for each time of `act`.
fn time_each(times: u32, mut act: impl FnMut()) -> f64 {
    let started = Instant::now();
    for _ in 0..times {
        act();
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(times)
}

impl Free {
    fn measure(&mut self, times: u32) {
        let mutex = Mutex::new(());
        self.mutex_ns.push(time_each(times, || drop(black_box(&mutex).lock().unwrap())));
        for always_looks in [false, true] {
            let (table, word) = (table(always_looks), PageWord(AtomicU64::new(0)));
            let ns = time_each(times, || {
                table.lock(black_box(&word), &Futexes);
                let parked = table.unlock(black_box(&word), &Futexes);
                debug_assert_eq!(parked, Parked::No);
            });
            if always_looks { &mut self.always_looks_ns } else { &mut self.page_ns }.push(ns);
        }
    }

    fn print(&self) {
        println!("  {:28}{:>24}{:>26}", "free: lock and unlock", "ns", "std::sync::Mutex is");
        for (name, ns) in [
            ("std::sync::Mutex", &self.mutex_ns),
            ("page lock", &self.page_ns),
            ("page lock, always looks", &self.always_looks_ns),
        ] {
            let ratio = output::ratio(&self.mutex_ns.over(ns));
            println!("  {name:28}{:>24}{ratio:>26}", spread(ns));
        }
    }

    fn json(&self) -> Value {
        Value::from_iter([
            ("mutex_ns", Value::from(&self.mutex_ns)),
            ("page_ns", Value::from(&self.page_ns)),
            ("page_always_looks_ns", Value::from(&self.always_looks_ns)),
            ("page_over_mutex", Value::from(&self.page_ns.over(&self.mutex_ns))),
            ("always_looks_over_page", Value::from(&self.always_looks_ns.over(&self.page_ns))),
        ])
    }
}

impl ContendedLock {
    fn push(&mut self, ns: f64, unlocks: f64, counts: &Counts) {
        self.ns.push(ns);
        let of_thousand = |count: u64| count as f64 * 1000.0 / unlocks;
        self.avoided.push(of_thousand(counts.avoided));
        self.looks.push(of_thousand(counts.looks));
        self.wakes.push(of_thousand(counts.wakes));
    }

    fn json(&self) -> Value {
        Value::from_iter([
            ("ns", Value::from(&self.ns)),
            ("avoided_per_mille", Value::from(&self.avoided)),
            ("looks_per_mille", Value::from(&self.looks)),
            ("wakes_per_mille", Value::from(&self.wakes)),
        ])
    }
}

/// Runs `act` in `threads` threads at once, spread over the CPUs, `times` in all; nanoseconds for
/// each.
fn time_threads(threads: usize, times: u32, act: impl Fn() + Sync) -> f64 {
    let each = times / threads as u32;
    let barrier = Barrier::new(threads);
    let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let begin = |index| {
            let (act, barrier) = (&act, &barrier);
            scope.spawn(move || {
                pin_to_nth_cpu(index);
                barrier.wait();
                // By each thread for itself: another may be kept from its CPU while they work.
                let started = Instant::now();
                for _ in 0..each {
                    act();
                }
                (started, Instant::now())
            })
        };
        let all: Vec<_> = (0..threads).map(begin).collect();
        all.into_iter().map(|one| one.join().expect("the work does not panic")).collect()
    });
    let first = spans.iter().map(|(started, _)| *started).min();
    let last = spans.iter().map(|(_, ended)| *ended).max();
    let seconds = first.zip(last).map_or(0.0, |(first, last)| (last - first).as_secs_f64());
    seconds * 1e9 / (f64::from(each) * threads as f64)
}

/// What the locks guard here: a count that two owners at once would lose some of.
#[derive(Default)]
struct Guarded(AtomicU64);

impl Guarded {
    fn change(&self) {
        // Relaxed: the lock orders them; that is what is measured.
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn check(&self, threads: usize, times: u32) {
        let expected = u64::from(times / threads as u32) * threads as u64;
        assert_eq!(self.0.load(Ordering::Relaxed), expected, "two owned the lock at once");
    }
}

impl Row {
    fn new(threads: usize) -> Row {
        Row { threads, mutex_ns: Samples::default(), pages: Default::default() }
    }

    fn measure(&mut self, times: u32) {
        let (mutex, guarded) = (Mutex::new(()), Guarded::default());
        self.mutex_ns.push(time_threads(self.threads, times, || {
            let _owned = mutex.lock().unwrap();
            guarded.change();
        }));
        guarded.check(self.threads, times);
        for (always_looks, page) in [false, true].into_iter().zip(&mut self.pages) {
            let (table, word) = (table(always_looks), PageWord(AtomicU64::new(0)));
            let guarded = Guarded::default();
            let ns = time_threads(self.threads, times, || {
                table.lock(&word, &Futexes);
                guarded.change();
                let parked = table.unlock(&word, &Futexes);
                debug_assert_eq!(parked, Parked::No);
            });
            guarded.check(self.threads, times);
            page.push(ns, f64::from(times), &table.counts());
        }
    }

    fn print(&self) {
        println!(
            "\n  {:28}{:>24}{:>12}{:>12}{:>12}",
            format!("{} threads; of 1000 unlocks", self.threads),
            "ns",
            "avoided",
            "looks",
            "wakes"
        );
        println!("  {:28}{:>24}", "std::sync::Mutex", spread(&self.mutex_ns));
        for (name, page) in ["page lock", "page lock, always looks"].iter().zip(&self.pages) {
            println!(
                "  {name:28}{:>24}{:>12.1}{:>12.1}{:>12.2}",
                spread(&page.ns),
                page.avoided.median(),
                page.looks.median(),
                page.wakes.median(),
            );
        }
    }

    fn json(&self) -> Value {
        let [page, always_looks] = &self.pages;
        Value::from_iter([
            ("threads", Value::from(self.threads)),
            ("mutex_ns", Value::from(&self.mutex_ns)),
            ("page", page.json()),
            ("page_always_looks", always_looks.json()),
            ("always_looks_over_page", Value::from(&always_looks.ns.over(&page.ns))),
        ])
    }
}

/// `12.3 (11.9..14.0)`
fn spread(samples: &Samples) -> String {
    format!("{:.1} ({:.1}..{:.1})", samples.median(), samples.min(), samples.max())
}
