//! `quire bench fault-around`: reads through mappings of a file, by what is mapped around a fault.
//!
//! A file is mapped anew for every measurement, by each thread for itself, and read in one of
//! three ways: every word in order; a word of each page in random order; a word of one page per
//! 2 MiB. First with all of it in the object's cache (and in the kernel's), which leaves only minor
//! faults; then, in order and at random, through a quarter of its size.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions};
use quire::store::Direct;

use super::figures::Samples;
use super::machine::Machine;
use super::output::{self, Json};
use super::work::Random;
use super::{AroundBench, sys};
use crate::size::machine_memory_bytes;

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
const BLOCK_BYTES: usize = 2 << 20;

/// What is mapped around a fault, and who serves it: the orders that the kernel's authors measured,
/// and what follows the access.
const SETTINGS: [(&str, FaultAround, Delivery); 10] = [
    ("off", FaultAround::Off, Delivery::Handlers),
    ("1", FaultAround::Order(1), Delivery::Handlers),
    ("3", FaultAround::Order(3), Delivery::Handlers),
    ("4", FaultAround::Order(4), Delivery::Handlers),
    ("5", FaultAround::Order(5), Delivery::Handlers),
    ("7", FaultAround::Order(7), Delivery::Handlers),
    ("9", FaultAround::Order(9), Delivery::Handlers),
    ("auto", FaultAround::Auto, Delivery::Handlers),
    ("off, inline", FaultAround::Off, Delivery::Inline),
    ("auto, inline", FaultAround::Auto, Delivery::Inline),
];

/// How a mapping is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pattern {
    InOrder,
    Random,
    Sparse,
}

impl Pattern {
    const ALL: [Pattern; 3] = [Pattern::InOrder, Pattern::Random, Pattern::Sparse];

    const fn name(self) -> &'static str {
        match self {
            Pattern::InOrder => "in order",
            Pattern::Random => "at random",
            Pattern::Sparse => "one page per 2 MiB",
        }
    }

    fn read(self, words: &[u64], order: &[u32]) -> u64 {
        match self {
            Pattern::InOrder => words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)),
            Pattern::Random => order
                .iter()
                .fold(0, |sum: u64, &page| sum.wrapping_add(words[page as usize * PAGE_WORDS])),
            Pattern::Sparse => {
                let step = BLOCK_BYTES / 8;
                words.iter().step_by(step).fold(0, |sum: u64, word| sum.wrapping_add(*word))
            }
        }
    }
}

/// One way of mapping, one way of reading, one number of threads.
#[derive(Default)]
struct Cell {
    seconds: Samples,
    faults: Samples,
}

/// A file of words that is removed when this is dropped.
struct Data {
    path: PathBuf,
    bytes: usize,
}

impl Data {
    fn new(directory: &Path, bytes: usize) -> Result<Data> {
        let path = directory.join(format!("quire-bench-{}", std::process::id()));
        let data = Data { path, bytes };
        let file = File::create(&data.path)
            .with_context(|| format!("cannot write {}", data.path.display()))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let mut random = Random::new(1);
        for _ in 0..bytes / 8 {
            file.write_all(&random.next().to_ne_bytes())?;
        }
        file.into_inner()?.sync_all()?;
        Ok(data)
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Runs the bench.
pub fn main(options: &AroundBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let bytes = if common.quick {
        32 << 20
    } else {
        options.size.bytes_of(machine_memory_bytes()) as usize
    };
    let bytes = bytes.next_multiple_of(BLOCK_BYTES);
    let rounds = common.rounds.unwrap_or(if common.quick { 2 } else { 5 });
    let data = Data::new(&options.directory.clone().unwrap_or_else(std::env::temp_dir), bytes)?;
    let mut random = Random::new(2);
    let mut order: Vec<u32> = (0..(bytes / PAGE_BYTES) as u32).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    let cached = cached(&data, &order, rounds, &options.threads)?;
    let cold = cold(&data, &order, rounds)?;
    let machine = Machine::read();
    if common.json {
        let rows = cached.iter().chain(&cold).map(Row::json).collect();
        println!(
            "{}",
            Json::object([
                ("bench", Json::text("fault-around")),
                ("machine", Json::machine(&machine)),
                ("bytes", Json::Number(bytes as f64)),
                ("rows", rows),
            ])
        );
        return Ok(0);
    }
    output::print_machine(&machine);
    println!("{:>24}: {rounds}; medians, and of ratios the least and the most", "rounds");
    println!("{:>24}: {} MiB\n", "file", bytes >> 20);
    print("everything is cached", &cached);
    print("through a quarter of its size", &cold);
    Ok(0)
}

/// A way of reading and a number of threads, by ways of mapping; the first is mmap(2)'s.
struct Row {
    pattern: &'static str,
    threads: usize,
    cells: Vec<(&'static str, Cell)>,
}

/// The file as an object that is cached as a whole.
fn filled(data: &Data, delivery: Delivery) -> Result<Object> {
    let memory = data.bytes + data.bytes / 4 + (64 << 20);
    let space = AddressSpace::builder().memory(memory).delivery(delivery).build()?;
    let object = space.open(&data.path)?;
    let mut buffer = vec![0; BLOCK_BYTES];
    for block in 0..data.bytes / BLOCK_BYTES {
        object.read_at((block * BLOCK_BYTES) as u64, &mut buffer)?;
    }
    Ok(object)
}

/// All of the file in the object's cache.
fn cached(data: &Data, order: &[u32], rounds: u32, threads: &[usize]) -> Result<Vec<Row>> {
    let by_handlers = filled(data, Delivery::Handlers)?;
    let inline = filled(data, Delivery::Inline)?;
    let kernel = sys::FileMapping::new(&data.path, data.bytes)?;
    let expected = Pattern::ALL.map(|pattern| pattern.read(kernel.words(), order));
    let mut rows = Vec::new();
    for (pattern, expected) in Pattern::ALL.into_iter().zip(expected) {
        for &threads in threads {
            let names = std::iter::once("mmap").chain(SETTINGS.map(|(name, ..)| name));
            let cells = names.map(|name| (name, Cell::default())).collect();
            let mut row = Row { pattern: pattern.name(), threads, cells };
            for _ in 0..rounds {
                let by_kernel = |_: usize| {
                    let mapping = sys::FileMapping::new(&data.path, data.bytes)?;
                    check(pattern.read(mapping.words(), order), expected)
                };
                row.cells[0].1.time(threads, sys::minor_faults, by_kernel)?;
                for (at, (_, setting, delivery)) in SETTINGS.into_iter().enumerate() {
                    let is_inline = delivery == Delivery::Inline;
                    let object = if is_inline { &inline } else { &by_handlers };
                    let faults = || object.space().counter("pgfault");
                    let by_quire = |_| read_through(object, setting, pattern, order, expected);
                    row.cells[at + 1].1.time(threads, faults, by_quire)?;
                }
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

/// A quarter of the file's size, cold at each round: buffered and direct, in order and at random.
fn cold(data: &Data, order: &[u32], rounds: u32) -> Result<Vec<Row>> {
    let kernel = sys::FileMapping::new(&data.path, data.bytes)?;
    let some = &order[..order.len().min(8192)];
    let ways = [
        ("buffered", Direct::Off, Delivery::Handlers),
        ("buffered, inline", Direct::Off, Delivery::Inline),
        ("direct", Direct::On, Delivery::Handlers),
        ("direct, inline", Direct::On, Delivery::Inline),
    ];
    let mut rows = Vec::new();
    for pattern in [Pattern::InOrder, Pattern::Random] {
        let expected = pattern.read(kernel.words(), some);
        let cells = ways.map(|(name, ..)| (name, Cell::default())).into_iter().collect();
        let mut row = Row { pattern: pattern.name(), threads: 1, cells };
        for _ in 0..rounds {
            for (at, (_, direct, delivery)) in ways.into_iter().enumerate() {
                let builder = AddressSpace::builder().memory(data.bytes / 4);
                let space = builder.delivery(delivery).build()?;
                let Ok(object) = OpenOptions::new().direct(direct).open(&space, &data.path) else {
                    continue;
                };
                let faults = || space.counter("pgfault");
                let auto = FaultAround::Auto;
                let read = |_| read_through(&object, auto, pattern, some, expected);
                row.cells[at].1.time(1, faults, read)?;
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

fn read_through(
    object: &Object,
    setting: FaultAround,
    pattern: Pattern,
    order: &[u32],
    expected: u64,
) -> Result<()> {
    let options = MapOptions::new().fault_around(setting);
    let mapping = sys::map_object(&options, object)?;
    check(pattern.read(sys::words_of(&mapping), order), expected)
}

fn check(found: u64, expected: u64) -> Result<()> {
    anyhow::ensure!(black_box(found) == expected, "wrong bytes were read");
    Ok(())
}

impl Cell {
    /// Has every thread do the work once, and notes the time and the faults of all.
    fn time(
        &mut self,
        threads: usize,
        faults: impl Fn() -> u64,
        work: impl Fn(usize) -> Result<()> + Sync,
    ) -> Result<()> {
        anyhow::ensure!(!sys::is_interrupted(), "interrupted");
        let before = faults();
        let started = Instant::now();
        thread::scope(|scope| {
            let work = &work;
            let all: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            all.into_iter().try_for_each(|one| one.join().expect("the work does not panic"))
        })?;
        self.seconds.push(started.elapsed().as_secs_f64());
        self.faults.push((faults() - before) as f64);
        Ok(())
    }
}

fn print(title: &str, rows: &[Row]) {
    println!("{title}");
    for row in rows {
        let threads = if row.threads == 1 { "thread" } else { "threads" };
        println!("  {}, {} {threads}", row.pattern, row.threads);
        println!("    {:18}{:>12}{:>12}{:>26}", "", "faults", "seconds", "time / the first's");
        for (name, cell) in row.cells.iter().filter(|(_, cell)| !cell.seconds.is_empty()) {
            println!(
                "    {:18}{:>12}{:>12.4}{:>26}",
                name,
                cell.faults.median(),
                cell.seconds.median(),
                output::ratio(&cell.seconds.over(&row.cells[0].1.seconds)),
            );
        }
    }
    println!();
}

impl Row {
    fn json(&self) -> Json {
        let cells = self.cells.iter().map(|(name, cell)| {
            Json::object([
                ("way", Json::text(*name)),
                ("faults", Json::samples(&cell.faults)),
                ("seconds", Json::samples(&cell.seconds)),
            ])
        });
        Json::object([
            ("pattern", Json::text(self.pattern)),
            ("threads", Json::Number(self.threads as f64)),
            ("ways", cells.collect()),
        ])
    }
}
