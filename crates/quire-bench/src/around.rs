//! `quire bench fault-around`: reads through mappings of a file, by what is mapped around a fault.
//!
//! A file is mapped anew for every measurement, by each thread for itself, and read in one of
//! three ways: every word in order; a word of each page in random order; a word of one page per
//! 2 MiB. First with all of it in the object's cache (and in the kernel's), which leaves only minor
//! faults; then, in order and at random, through a quarter of its size.

use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions};
use quire::store::Direct;

use super::data::{self, BLOCK_BYTES, Data, Pattern};
use super::output;
use super::{AroundBench, sys};
use crate::samples::Samples;
use quire_cli::size::machine_memory_bytes;
use serde_json::Value;

/// What is mapped around a fault, and which thread serves it.
#[derive(Clone)]
struct AroundSetting {
    name: String,
    around: FaultAround,
    delivery: Delivery,
}

impl AroundSetting {
    /// Every choice of `around`, by handlers and then inline.
    fn all(around: &[Around]) -> Vec<AroundSetting> {
        let deliveries = [(Delivery::Handlers, ""), (Delivery::Inline, ", inline")];
        let with = |(delivery, suffix): (Delivery, &str)| {
            let setting = |around: &Around| AroundSetting {
                name: format!("{}{suffix}", around.name()),
                around: around.0,
                delivery,
            };
            around.iter().map(setting).collect::<Vec<_>>()
        };
        deliveries.into_iter().flat_map(with).collect()
    }
}

/// How much is mapped around a fault, as it is typed: `off`, `auto`, or an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Around(FaultAround);

impl Around {
    pub(crate) fn parse(text: &str) -> Result<Around> {
        Ok(Around(match (text, text.parse()) {
            ("off", _) => FaultAround::Off,
            ("auto", _) => FaultAround::Auto,
            (_, Ok(order @ 0..=9)) => FaultAround::Order(order),
            _ => bail!("neither off nor auto nor an order from 0 to 9"),
        }))
    }

    fn name(self) -> String {
        match self.0 {
            FaultAround::Off => "off".into(),
            FaultAround::Auto => "auto".into(),
            FaultAround::Order(order) => order.to_string(),
        }
    }
}

/// One way of mapping, one way of reading, one number of threads.
#[derive(Default)]
struct AroundCell {
    seconds: Samples,
    faults: Samples,
}

/// Runs the bench.
pub(crate) fn main(options: &AroundBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let full = options.size.bytes_of(machine_memory_bytes()) as usize;
    let bytes = if common.quick { full.min(16 << 20) } else { full };
    let rounds = common.rounds(2, 5);
    let data = Data::new(&options.directory.clone().unwrap_or_else(std::env::temp_dir), bytes)?;
    let order = data.shuffled();
    let settings = AroundSetting::all(&options.around);
    let cached = cached(&data, &order, &settings, rounds, &options.threads)?;
    let cold = cold(&data, &order, rounds)?;
    if common.json {
        let rows = cached.iter().chain(&cold).map(AroundRow::json).collect();
        output::print_json("fault-around", [("bytes", Value::from(data.bytes)), ("rows", rows)]);
        return Ok(0);
    }
    output::print_heading(rounds, output::MEDIANS);
    println!("{:>24}: {} MiB\n", "file", data.bytes >> 20);
    print("everything is cached", &cached);
    print("through a quarter of its size", &cold);
    Ok(0)
}

/// A way of reading and a number of threads, by ways of mapping; the first is mmap(2)'s.
struct AroundRow {
    pattern: &'static str,
    threads: usize,
    cells: Vec<(String, AroundCell)>,
}

/// The file as an object that is cached as a whole.
fn filled(data: &Data, delivery: Delivery) -> Result<Object> {
    let memory = data.bytes + data.bytes / 4 + (64 << 20);
    let space = AddressSpace::builder().memory(memory).delivery(delivery).build()?;
    let object = space.open(data.path())?;
    let mut buffer = vec![0; BLOCK_BYTES];
    for block in 0..data.bytes / BLOCK_BYTES {
        object.read_at((block * BLOCK_BYTES) as u64, &mut buffer)?;
    }
    Ok(object)
}

/// All of the file in the object's cache.
fn cached(
    data: &Data,
    order: &[u32],
    settings: &[AroundSetting],
    rounds: u32,
    threads: &[usize],
) -> Result<Vec<AroundRow>> {
    let by_handlers = filled(data, Delivery::Handlers)?;
    let inline = filled(data, Delivery::Inline)?;
    let mut rows = Vec::new();
    for pattern in Pattern::ALL {
        let expected = data.expected(pattern, order);
        for &threads in threads {
            let names = settings.iter().map(|setting| setting.name.clone());
            let names = std::iter::once("mmap".into()).chain(names);
            let cells = names.map(|name| (name, AroundCell::default())).collect();
            let mut row = AroundRow { pattern: pattern.name(), threads, cells };
            for _ in 0..rounds {
                let by_kernel = |_: usize| {
                    let mapping = sys::FileMapping::new(data.path(), data.bytes)?;
                    data::check(pattern.read(mapping.words(), order), expected)
                };
                row.cells[0].1.time(threads, sys::minor_faults, by_kernel)?;
                for (setting, (_, cell)) in settings.iter().zip(&mut row.cells[1..]) {
                    let is_inline = setting.delivery == Delivery::Inline;
                    let object = if is_inline { &inline } else { &by_handlers };
                    let faults = || object.space().counter("pgfault");
                    let around = setting.around;
                    let by_quire = |_| read_through(object, around, pattern, order, expected);
                    cell.time(threads, faults, by_quire)?;
                }
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

/// A quarter of the file's size, cold at each round: buffered and direct, in order and at random.
fn cold(data: &Data, order: &[u32], rounds: u32) -> Result<Vec<AroundRow>> {
    let some = &order[..order.len().min(8192)];
    let ways = [
        ("buffered", Direct::Off, Delivery::Handlers),
        ("buffered, inline", Direct::Off, Delivery::Inline),
        ("direct", Direct::On, Delivery::Handlers),
        ("direct, inline", Direct::On, Delivery::Inline),
    ];
    let mut rows = Vec::new();
    for pattern in [Pattern::InOrder, Pattern::Random] {
        let expected = data.expected(pattern, some);
        let cells = ways.map(|(name, ..)| (name.to_owned(), AroundCell::default())).into();
        let mut row = AroundRow { pattern: pattern.name(), threads: 1, cells };
        for _ in 0..rounds {
            for (at, (_, direct, delivery)) in ways.into_iter().enumerate() {
                let builder = AddressSpace::builder().memory(data.bytes / 4);
                let space = builder.delivery(delivery).build()?;
                let Ok(object) = OpenOptions::new().direct(direct).open(&space, data.path()) else {
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
    data::check(pattern.read(sys::words_of(&mapping), order), expected)
}

impl AroundCell {
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

fn print(title: &str, rows: &[AroundRow]) {
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

impl AroundRow {
    fn json(&self) -> Value {
        let cells = self.cells.iter().map(|(name, cell)| {
            Value::from_iter([
                ("way", Value::from(name.as_str())),
                ("faults", Value::from(&cell.faults)),
                ("seconds", Value::from(&cell.seconds)),
            ])
        });
        Value::from_iter([
            ("pattern", Value::from(self.pattern)),
            ("threads", Value::from(self.threads)),
            ("ways", cells.collect()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_around_is_read_as_it_is_written() {
        for text in ["off", "auto", "0", "4", "9"] {
            assert_eq!(Around::parse(text).unwrap().name(), text);
        }
        for text in ["10", "-1", "on", ""] {
            assert!(Around::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_choice_is_served_both_ways() {
        let around = ["off", "4", "auto"].map(|text| Around::parse(text).unwrap());
        let settings = AroundSetting::all(&around);
        let names: Vec<_> = settings.iter().map(|setting| setting.name.as_str()).collect();
        assert_eq!(names, ["off", "4", "auto", "off, inline", "4, inline", "auto, inline"]);
        let is_inline = |setting: &&AroundSetting| setting.delivery == Delivery::Inline;
        assert_eq!(settings.iter().filter(is_inline).count(), 3);
    }
}
