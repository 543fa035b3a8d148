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

use anyhow::{Context as _, Result, ensure};
use quire::object::i_mmap::lock::{Futex, RwSem, Side};
use quire::object::i_mmap::{IMmap, IMmaps, ObjectMapping};
use quire::units::{ObjectPage, ObjectRange, PageNum};

use super::output;
use super::sys;
use super::{RmapBench, jobs};
use crate::samples::Samples;
use serde_json::Value;

const MAPPINGS: usize = 64;
const MAPPING_PAGES: usize = 256;
const CHANGES_PER_SECOND: u32 = 100;
/// The page that the walkers look for.
const PAGE: ObjectRange = ObjectRange { start: ObjectPage(100), end: ObjectPage(101) };

/// Turns that a round is made of: short ones, so that the locks are alike disturbed by others.
const TURNS: usize = 15;

/// Takes a lock and gives it back, so many times.
type Pairs = fn(u32) -> Duration;

/// A lock, and what a pair of taking it and giving it back costs.
struct Cost {
    name: &'static str,
    pairs: Pairs,
    pair_ns: Samples,
}

fn costs() -> Vec<Cost> {
    let ways: [(&str, Pairs); 6] = [
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
        ("futex mutex", |pairs| {
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
    ];
    let cost = |(name, pairs)| Cost { name, pairs, pair_ns: Samples::default() };
    ways.into_iter().map(cost).collect()
}

/// A round: the middle of several turns of each lock, which alternate.
fn measure_costs(costs: &mut [Cost], pairs: u32) {
    let mut turns = vec![Samples::default(); costs.len()];
    for _ in 0..TURNS {
        for (cost, turns) in costs.iter().zip(&mut turns) {
            turns.push((cost.pairs)(pairs).as_secs_f64() * 1e9 / f64::from(pairs));
        }
    }
    for (cost, turns) in costs.iter_mut().zip(turns) {
        cost.pair_ns.push(turns.median());
    }
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

/// One number of threads, both ways.
struct RmapRow {
    threads: usize,
    shared: Samples,
    exclusive: Samples,
}

/// Runs the bench.
pub(crate) fn main(options: &RmapBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let rounds = common.rounds(3, 9);
    let pairs = if common.quick { 20_000 } else { 200_000 };
    let length = Duration::from_millis(if common.quick { 100 } else { 1000 });
    let mut costs = costs();
    let shared = Shared::new()?;
    let row =
        |&threads| RmapRow { threads, shared: Samples::default(), exclusive: Samples::default() };
    let mut rows: Vec<RmapRow> = options.threads.iter().map(row).collect();
    for _ in 0..rounds {
        measure_costs(&mut costs, pairs);
        for row in &mut rows {
            for (are_exclusive, samples) in [(false, &mut row.shared), (true, &mut row.exclusive)] {
                shared.maps.set_walks_exclusive(are_exclusive);
                samples.push(shared.measure(row.threads, length)?);
                ensure!(!sys::is_interrupted(), "interrupted");
            }
        }
    }
    let jobs = jobs::measure(&options.workers, rounds, length)?;
    if common.json {
        print_json(&costs, &rows, &jobs);
    } else {
        output::print_heading(rounds, output::MEDIANS);
        println!();
        print_costs(&costs);
        print_rows(&rows);
        jobs::print(&jobs);
    }
    Ok(0)
}

/// The lock that the others are compared with: what a reverse map under a mutex would have.
fn of_mutex(costs: &[Cost]) -> &Samples {
    let mutex = costs.iter().find(|cost| cost.name == "futex mutex");
    &mutex.expect("it is among them").pair_ns
}

fn print_json(costs: &[Cost], rows: &[RmapRow], jobs: &[jobs::JobRow]) {
    let locks = costs.iter().map(|cost| {
        Value::from_iter([
            ("lock", Value::from(cost.name)),
            ("pair_ns", Value::from(&cost.pair_ns)),
            ("over_futex_mutex", Value::from(&cost.pair_ns.over(of_mutex(costs)))),
        ])
    });
    let walks = rows.iter().map(|row| {
        Value::from_iter([
            ("threads", Value::from(row.threads)),
            ("shared_per_second", Value::from(&row.shared)),
            ("exclusive_per_second", Value::from(&row.exclusive)),
            ("shared_over_exclusive", Value::from(&row.shared.over(&row.exclusive))),
        ])
    });
    output::print_json(
        "rmap",
        [
            ("locks", locks.collect()),
            ("mappings", Value::from(MAPPINGS)),
            ("changes_per_second", Value::from(CHANGES_PER_SECOND)),
            ("walks", walks.collect()),
            ("jobs", jobs::json(jobs)),
        ],
    );
}

fn print_costs(costs: &[Cost]) {
    println!("  {:20}{:>10}{:>28}", "taken and given back", "ns", "over the futex mutex");
    for cost in costs {
        let ratio = output::ratio(&cost.pair_ns.over(of_mutex(costs)));
        println!("  {:20}{:>10.2}{ratio:>28}", cost.name, cost.pair_ns.median());
    }
    println!();
}

fn print_rows(rows: &[RmapRow]) {
    println!("  walks of {MAPPINGS} mappings a second, {CHANGES_PER_SECOND} changes a second");
    println!("  {:20}{:>12}{:>12}{:>28}", "", "shared", "exclusive", "shared / exclusive");
    for row in rows {
        println!(
            "  {:20}{:>12.0}{:>12.0}{:>28}",
            if row.threads == 1 { "1 thread".into() } else { format!("{} threads", row.threads) },
            row.shared.median(),
            row.exclusive.median(),
            output::ratio(&row.shared.over(&row.exclusive)),
        );
    }
}
