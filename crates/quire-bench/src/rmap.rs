//! `quire bench rmap`: what the reverse map's lock costs, and what sharing it gains.
//!
//! First each lock alone: taken and given back by one thread alone. Then walks: an
//! object of which 64 mappings show the same page, threads that walk all of them again and again,
//! and one more thread that removes a mapping and adds it again 100 times a second. Once walks
//! share the lock, once each keeps all others out, as under a mutex. Last, jobs on real objects
//! ([`jobs`]).

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quire::object::i_mmap::lock::{Futex, RwSem, Side};
use quire::object::i_mmap::{IMmap, IMmaps, ObjectMapping};
use quire::units::{ObjectPage, ObjectRange, PageNum};

use super::RmapBench;
use super::harness::report::{Part, Report, spread};
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::jobs::{Jobs, Mix};
use crate::samples::Samples;

/// The lock that the others are compared with: what a reverse map under a mutex would have.
const MUTEX: &str = "futex mutex";
/// The ways of walking.
pub(crate) const SHARED: &str = "shared";
pub(crate) const EXCLUSIVE: &str = "exclusive";
const MAPPINGS: usize = 64;
const MAPPING_PAGES: usize = 256;
const CHANGES_PER_SECOND: u32 = 100;
/// The page that the walkers look for.
const PAGE: ObjectRange = ObjectRange { start: ObjectPage(100), end: ObjectPage(101) };

/// Turns that a round is the middle of.
const TURNS: usize = 15;

/// Takes a lock and gives it back, so many times.
type Pairs = fn(u32) -> Duration;

/// The locks by name.
fn locks() -> [(&'static str, Pairs); 6] {
    [
        ("i_mmap, write", |pairs| {
            let lock = black_box(<RwSem>::default());
            time(pairs, || {
                lock.lock(Side::Writer, &Futex);
                lock.unlock(Side::Writer, &Futex);
            })
        }),
        ("i_mmap, read", |pairs| {
            let lock = black_box(<RwSem>::default());
            time(pairs, || {
                lock.lock(Side::Reader, &Futex);
                lock.unlock(Side::Reader, &Futex);
            })
        }),
        (MUTEX, |pairs| {
            let lock = black_box(rustix_futex_sync::Mutex::new(()));
            time(pairs, || drop(black_box(lock.lock())))
        }),
        ("std Mutex", |pairs| {
            let lock = black_box(Mutex::new(()));
            time(pairs, || drop(black_box(lock.lock())))
        }),
        ("std RwLock, write", |pairs| {
            let lock = black_box(RwLock::new(()));
            time(pairs, || drop(black_box(lock.write())))
        }),
        ("std RwLock, read", |pairs| {
            let lock = black_box(RwLock::new(()));
            time(pairs, || drop(black_box(lock.read())))
        }),
    ]
}

fn time(pairs: u32, pair: impl Fn()) -> Duration {
    let started = Instant::now();
    for _ in 0..pairs {
        pair();
    }
    started.elapsed()
}

/// An object that is mapped many times over.
struct Shared {
    maps: IMmaps,
    object: IMmap,
}

impl Shared {
    fn new() -> Result<Shared> {
        let maps = IMmaps::new().context("no memory for the reverse map")?;
        let shared = Shared { maps, object: IMmap::default() };
        let mut guard = shared.object.i_mmap_lock_write(&shared.maps);
        for id in 0..MAPPINGS {
            guard.insert(mapping(id))?;
        }
        drop(guard);
        Ok(shared)
    }

    /// Walks until it is over; returns how often.
    fn walk(&self, is_over: &AtomicBool) -> u64 {
        let (mut walks, mut visits) = (0, [0u32; MAPPINGS]);
        while !is_over.load(Ordering::Relaxed) {
            let guard = self.object.i_mmap_lock_read(&self.maps);
            for (_, mapping) in guard.overlapping(PAGE) {
                let arena = mapping.arena_range(PAGE);
                visits[mapping.id as usize] += black_box(arena).len() as u32;
            }
            drop(guard);
            walks += 1;
        }
        black_box(visits);
        walks
    }

    /// Removes and adds one mapping after the other until it is over.
    fn change(&self, is_over: &AtomicBool) -> Result<()> {
        while !is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_secs(1) / CHANGES_PER_SECOND);
            let mut guard = self.object.i_mmap_lock_write(&self.maps);
            let first = guard.overlapping(PAGE).next();
            let (of, mapping) = first.context("all mappings are gone")?;
            guard.remove(of).context("it is there")?;
            guard.insert(mapping)?;
        }
        Ok(())
    }

    /// How often a second `threads` threads walk, together.
    fn measure(&self, threads: usize, length: Duration) -> Result<f64> {
        let (is_over, walks) = (AtomicBool::new(false), AtomicU64::new(0));
        let started = Instant::now();
        let changed = thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| walks.fetch_add(self.walk(&is_over), Ordering::Relaxed));
            }
            let changer = scope.spawn(|| self.change(&is_over));
            thread::sleep(length);
            is_over.store(true, Ordering::Relaxed);
            changer.join().expect("a thread that panics aborts")
        });
        changed?;
        Ok(walks.into_inner() as f64 / started.elapsed().as_secs_f64())
    }
}

fn mapping(id: usize) -> ObjectMapping {
    ObjectMapping {
        pages: ObjectRange::new(ObjectPage(0), MAPPING_PAGES),
        arena_start: PageNum((id * MAPPING_PAGES) as u64),
        id: id as u32,
    }
}

/// What a cell is measured by.
enum Plan {
    Lock(Pairs),
    Walks { threads: usize, are_exclusive: bool },
    Jobs { mix: Mix, workers: usize, are_exclusive: bool },
}

struct RmapSuite<'a> {
    options: &'a RmapBench,
    shared: Shared,
    jobs: Jobs,
}

/// Runs the bench.
pub(crate) fn report(options: &RmapBench) -> Result<Report> {
    let mut suite = RmapSuite { options, shared: Shared::new()?, jobs: Jobs::new()? };
    measure(&mut suite, &options.common)
}

impl RmapSuite<'_> {
    fn workers(&self) -> Vec<usize> {
        let workers = &self.options.workers;
        if workers.is_empty() { vec![1, 2, 4, 8] } else { workers.clone() }
    }
}

fn jobs_title(mix: Mix) -> String {
    format!("jobs a minute, {}", mix.name())
}

impl Suite for RmapSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "rmap",
            question: "What does the reverse map's lock cost, and what do walks gain that share it?",
            facts: vec![
                ("mappings of the object that is walked", MAPPINGS.to_string()),
                ("changes of its mappings a second", CHANGES_PER_SECOND.to_string()),
            ],
            rounds: self.options.common.rounds(3, 9),
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheets = Vec::new();
        let mut sheet = Sheet::new("a lock taken and given back", Shape::Cells).base(MUTEX);
        for (name, pairs) in locks() {
            sheet.add("by a thread alone", name, Plan::Lock(pairs));
        }
        sheets.push(sheet);
        let ways = [(SHARED, false), (EXCLUSIVE, true)];
        let mut sheet =
            Sheet::new("walks a second", Shape::Cells).base(EXCLUSIVE).plot(Along::Rows);
        for &threads in &self.options.threads {
            for (way, are_exclusive) in ways {
                sheet.add(plural(threads, "thread"), way, Plan::Walks { threads, are_exclusive });
            }
        }
        sheets.push(sheet);
        for mix in Mix::ALL {
            let mut sheet =
                Sheet::new(jobs_title(mix), Shape::Cells).base(EXCLUSIVE).plot(Along::Rows);
            for workers in self.workers() {
                for (way, are_exclusive) in ways {
                    let plan = Plan::Jobs { mix, workers, are_exclusive };
                    sheet.add(plural(workers, "worker"), way, plan);
                }
            }
            sheets.push(sheet);
        }
        sheets
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let common = &self.options.common;
        let length = Duration::from_millis(common.size(100, 1000, 3000));
        match *plan {
            Plan::Lock(lock) => {
                let pairs = common.size(20_000, 200_000, 200_000);
                let turn = |_| lock(pairs).as_secs_f64() * 1e9 / f64::from(pairs);
                Ok(figures([("ns", (0..TURNS).map(turn).collect::<Samples>().median())]))
            }
            Plan::Walks { threads, are_exclusive } => {
                self.shared.maps.set_walks_exclusive(are_exclusive);
                Ok(figures([("walks", self.shared.measure(threads, length)?)]))
            }
            Plan::Jobs { mix, workers, are_exclusive } => {
                Ok(figures([("jobs", self.jobs.measure(mix, workers, are_exclusive, length)?)]))
            }
        }
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let mut words = Vec::new();
        for mix in Mix::ALL {
            for workers in self.workers() {
                let (title, row) = (jobs_title(mix), plural(workers, "worker"));
                let ratio = results.over(&title, &row, [SHARED, EXCLUSIVE], "jobs");
                if ratio.is_empty() {
                    continue;
                }
                let holds = match (ratio.min(), ratio.max()) {
                    (_, ..1.0) => "sharing loses",
                    (1.0.., _) => "sharing gains",
                    _ => "no difference beyond the spread",
                };
                words.push(format!(
                    "{}, {row}: {holds}, {} of the jobs a minute.",
                    mix.name(),
                    spread(&ratio, "x")
                ));
            }
        }
        if !words.is_empty() {
            words.push(
                "The authors' alltests gain 58 to 62 %, their disk mix from 4 % less to 40 % more, \
                 with 100 to 2000 users on 60 cores."
                    .into(),
            );
        }
        words
    }
}

/// 60 cores, 4 sockets, 130 GiB; Linux 3.18-rc1; aim7, jobs a minute; a part of the tables.
pub(crate) fn published() -> Vec<Part> {
    let head = ["users", "mutex", "rwsem", "gain"];
    vec![
        Part::published(
            "aim7 alltests",
            &[
                &head,
                &["100", "17918.72", "28417.97", "58.59 %"],
                &["500", "16593.17", "26433.72", "59.30 %"],
                &["1000", "16369.00", "26195.76", "60.03 %"],
                &["1500", "16168.06", "25850.58", "59.89 %"],
                &["2000", "16007.26", "25513.07", "59.38 %"],
            ],
        ),
        Part::published(
            "aim7 disk",
            &[
                &head,
                &["100", "7582.14", "7257.48", "-4.28 %"],
                &["500", "6353.42", "6846.71", "7.76 %"],
                &["1000", "6242.53", "6855.11", "9.81 %"],
                &["1500", "6139.81", "6761.09", "10.12 %"],
                &["1600", "4807.12", "6725.33", "39.90 %"],
                &["2000", "4668.36", "5834.93", "24.99 %"],
            ],
        ),
    ]
}
