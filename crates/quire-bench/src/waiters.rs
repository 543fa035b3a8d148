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
use quire::page::{Futexes, PageWord, Parked, WaitTable};
use quire::sys::thread::pin_to_nth_cpu;
use quire_cli::size::{Human, machine_memory_bytes};

use self::objects::{FilePlace, Job};
use self::prices::{Price, Prices};
use super::WaitersBench;
use super::data::disk_directory;
use super::harness::report::{Part, Report, spread};
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};

/// The ways of locking.
const MUTEX: &str = "std::sync::Mutex";
const SIGN: &str = "page lock";
const LOOKS: &str = "page lock, always looks";
/// The tables that others look into.
const FREE: &str = "locked and unlocked by a thread alone";
const CONTENDED: &str = "locked and unlocked by several threads";

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitersPart {
    /// The lock alone
    Locks,
    /// What is done with objects
    Objects,
}

/// What a cell is measured by; of a lock, whether each unlock looks, or none for the mutex.
enum Plan {
    Free(Option<bool>),
    Contended { threads: usize, always_looks: Option<bool> },
    Price(Price),
    Object { job: Job, always_look: bool },
}

struct WaitersSuite<'a> {
    options: &'a WaitersBench,
    place: Option<FilePlace>,
}

/// Runs the bench.
pub(crate) fn report(options: &WaitersBench) -> Result<Report> {
    let common = &options.common;
    let mut suite = WaitersSuite { options, place: None };
    if options.only.contains(&WaitersPart::Objects) {
        let directory = options.directory.clone().unwrap_or_else(disk_directory);
        let chosen = options.size.map(|size| size.bytes_of(machine_memory_bytes()) as usize);
        let bytes = chosen.unwrap_or(common.size(16 << 20, 128 << 20, 1 << 30));
        suite.place = Some(FilePlace::new(directory, bytes)?);
    }
    measure(&mut suite, common)
}

impl Suite for WaitersSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let size = self.place.as_ref().map(|place| Human(place.bytes() as u64).to_string());
        Head {
            name: "waiters",
            question: "What does a page lock cost, and what does it save that its word says whether a thread waits?",
            facts: size.map(|size| ("file", size)).into_iter().collect(),
            rounds: self.options.common.rounds(3, 11),
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let ways = [(MUTEX, None), (SIGN, Some(false)), (LOOKS, Some(true))];
        let mut sheets = Vec::new();
        if self.options.only.contains(&WaitersPart::Locks) {
            let mut free = Sheet::new(FREE, Shape::Cells).base(MUTEX);
            ways.iter().for_each(|(way, looks)| free.add("free", *way, Plan::Free(*looks)));
            let mut contended = Sheet::new(CONTENDED, Shape::Cells).base(MUTEX).plot(Along::Rows);
            contended.note = Some("Avoided, looks and wakes: of 1000 unlocks.".into());
            for &threads in &self.options.threads {
                for (way, always_looks) in ways {
                    let plan = Plan::Contended { threads, always_looks };
                    contended.add(plural(threads, "thread"), way, plan);
                }
            }
            sheets.extend([free, contended]);
        }
        let mut prices = Sheet::new(prices::TITLE, Shape::Cells).base(Price::Free.name());
        for price in Price::ALL {
            prices.add("an unlock", price.name(), Plan::Price(price));
        }
        sheets.push(prices);
        if let Some(place) = &self.place {
            sheets.extend(objects::sheets(place.bytes()));
        }
        sheets
    }

    fn take(&mut self, plan: &Plan, so_far: &Results<'_>) -> Result<Figures> {
        let common = &self.options.common;
        let times = common.size(100_000, 1_000_000, 1_000_000);
        Ok(match *plan {
            Plan::Free(always_looks) => figures([("ns", free_ns(10 * times, always_looks))]),
            Plan::Contended { threads, always_looks } => contended(threads, times, always_looks),
            Plan::Price(price) => figures([("ns", price.measure(times))]),
            Plan::Object { job, always_look } => {
                let place = self.place.as_ref().expect("only then there are such cells");
                objects::measure(job, place, always_look, &Prices::of(*so_far))?
            }
        })
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let free = results.over(FREE, "free", [SIGN, MUTEX], "ns");
        let mut words = Vec::new();
        if !free.is_empty() {
            words
                .push(format!("A free page lock costs {} what a mutex costs.", spread(&free, "x")));
        }
        words.extend(objects::words(*results));
        words
    }
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

/// Nanoseconds for lock and unlock, by one thread.
fn free_ns(times: u32, always_looks: Option<bool>) -> f64 {
    let Some(always_looks) = always_looks else {
        let mutex = Mutex::new(());
        return time_each(times, || drop(black_box(&mutex).lock().unwrap()));
    };
    let (table, word) = (table(always_looks), PageWord(AtomicU64::new(0)));
    time_each(times, || {
        table.lock(black_box(&word), &Futexes);
        let parked = table.unlock(black_box(&word), &Futexes);
        debug_assert_eq!(parked, Parked::No);
    })
}

/// Nanoseconds for each lock and unlock of all threads together, and what of 1000 unlocks did.
fn contended(threads: usize, times: u32, always_looks: Option<bool>) -> Figures {
    let guarded = Guarded::default();
    let Some(always_looks) = always_looks else {
        let mutex = Mutex::new(());
        let ns = time_threads(threads, times, || {
            let _owned = mutex.lock().unwrap();
            guarded.change();
        });
        guarded.check(threads, times);
        return figures([("ns", ns)]);
    };
    let (table, word) = (table(always_looks), PageWord(AtomicU64::new(0)));
    let ns = time_threads(threads, times, || {
        table.lock(&word, &Futexes);
        guarded.change();
        let parked = table.unlock(&word, &Futexes);
        debug_assert_eq!(parked, Parked::No);
    });
    guarded.check(threads, times);
    let counts = table.counts();
    let of_thousand = |count: u64| count as f64 * 1000.0 / f64::from(times);
    figures([
        ("ns", ns),
        ("avoided", of_thousand(counts.avoided)),
        ("looks", of_thousand(counts.looks)),
        ("wakes", of_thousand(counts.wakes)),
    ])
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

/// Linux 3.15-rc3 with the patches; a part of the tables.
fn published() -> Vec<Part> {
    vec![
        Part::published(
            "dd, async: the longest of several runs, seconds",
            &[
                &["file system", "before", "with the flag", "gain"],
                &["ext3", "11.59", "11.00", "5.09 %"],
                &["ext4", "13.34", "13.43", "-0.67 %"],
                &["tmpfs", "0.49", "0.48", "2.04 %"],
                &["btrfs", "12.78", "13.82", "-8.14 %"],
                &["xfs", "2.09", "2.11", "-0.96 %"],
            ],
        ),
        Part::published(
            "A file of ten times the memory read, a dd per CPU, seconds",
            &[
                &["file system", "read", "before", "with the flag", "gain"],
                &["ext3", "once", "3.63", "3.63", "0.00 %"],
                &["ext3", "twice", "6.08", "6.07", "0.16 %"],
                &["ext4", "once", "3.73", "3.54", "5.09 %"],
                &["ext4", "twice", "6.24", "6.01", "3.69 %"],
                &["btrfs", "once", "5.01", "4.93", "1.60 %"],
                &["btrfs", "twice", "7.58", "7.63", "-0.66 %"],
                &["xfs", "once", "3.70", "3.64", "1.62 %"],
                &["xfs", "twice", "6.24", "5.86", "6.09 %"],
            ],
        ),
        Part::published(
            "A range mapped and touched (xfs)",
            &[
                &["size", "before", "with the flag", "gain"],
                &["107 MB", "567", "542", "4.41 %"],
                &["322 MB", "1918", "1522", "20.65 %"],
                &["536 MB", "2566", "2506", "2.34 %"],
                &["1073 MB", "4923", "4815", "2.19 %"],
                &["1610 MB", "6454", "6137", "4.91 %"],
                &["2147 MB", "8617", "8205", "4.78 %"],
            ],
        ),
    ]
}
