//! `quire bench objects`: reads of a file that is four times as large as the memory for it.
//!
//! Three parts. *Cached*: the file is in the kernel's cache, Quire reads it from there through a
//! quarter of its size, and mmap(2), which has no bound, maps what is there. *In order* and *at
//! random*: the file is cold; Quire reads past the kernel's cache, mmap is bounded to as much by a
//! memory cgroup. In order with what the device reads ahead at a small and a large setting; at
//! random with as many reads in flight, and as many threads.
//!
//! What cannot be had (a cgroup, the device's setting, direct I/O) is said on stderr and left out.

mod kernel;
mod read_ahead;

use std::time::Instant;

use anyhow::{Result, ensure};
use quire::library::{
    AddressSpace, Delivery, MapOptions, Object, OpenOptions, Pattern as MappingPattern,
};
use quire::store::Direct;

use self::kernel::{Advice, Kernel, Reading};
pub(crate) use self::kernel::{MmapArgs, main as read_by_mmap};
use self::read_ahead::{ReadAheadSetting, settings};
use super::data::{self, Data, PAGE_BYTES, Pattern};
use super::output;
use super::{ObjectsBench, sys};
use crate::samples::Samples;
use quire_cli::print::say;
use quire_cli::size::{Human, machine_memory_bytes};
use serde_json::Value;

/// Reads in flight, and threads, where there is more than one.
const DEPTH: usize = 4;

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ObjectsPart {
    /// In order, from the kernel's cache
    Cached,
    /// In order, from the disk
    InOrder,
    /// Pages at random, from the disk
    Random,
}

/// One way of reading: what it is called, and what reads and says how many seconds it took.
struct ObjectsWay<'a> {
    name: String,
    is_mmap: bool,
    read: Box<dyn Fn() -> Result<f64> + 'a>,
    seconds: Samples,
}

/// Ways that take turns.
struct ObjectsRow<'a> {
    name: &'static str,
    title: String,
    /// What is read each time: MiB, or pages.
    amount: f64,
    unit: &'static str,
    ways: Vec<ObjectsWay<'a>>,
}

/// What every way reads.
struct ObjectsSuite {
    data: Data,
    memory: usize,
    /// Pages to be read at random.
    order: Vec<u32>,
    kernel: Result<Kernel>,
}

/// Runs the bench.
pub(crate) fn main(options: &ObjectsBench) -> Result<u8> {
    sys::notice_signals();
    let common = &options.common;
    let rounds = common.rounds(2, 5);
    let full = options.size.bytes_of(machine_memory_bytes()) as usize;
    let bytes = if common.quick { full.min(64 << 20) } else { full };
    let directory = options.directory.clone().unwrap_or_else(data::disk_directory);
    let data = Data::new(&directory, bytes)?;
    let memory = data.bytes / 4;
    let mut order = data.shuffled();
    order.truncate(options.reads.unwrap_or(if common.quick { 512 } else { 8192 }) as usize);
    let bench = ObjectsSuite { data, memory, order, kernel: Kernel::new(memory as u64) };
    let mut left_out = Vec::new();
    let mut rows = bench.rows(options, &mut left_out)?;
    for row in &mut rows {
        row.measure(rounds)?;
    }
    if common.json {
        output::print_json(
            "objects",
            [
                ("bytes", Value::from(bench.data.bytes)),
                ("memory_bytes", Value::from(memory)),
                ("kept_pages_max", Value::from(bench.data.kept_pages_max())),
                ("left_out", left_out.clone().into()),
                ("parts", rows.iter().map(ObjectsRow::json).collect()),
            ],
        );
        return Ok(0);
    }
    output::print_heading(rounds, output::MEDIANS);
    println!(
        "{:>24}: {}, through {}",
        "file",
        Human(bench.data.bytes as u64),
        Human(memory as u64)
    );
    if let Ok(kernel) = &bench.kernel {
        println!("{:>24}: {}", "memory cgroup", kernel.version());
    }
    rows.iter().for_each(ObjectsRow::print);
    Ok(0)
}

fn leave_out(left_out: &mut Vec<String>, what: String) {
    say(&format!("LEFT OUT: {what}"));
    left_out.push(what);
}

impl ObjectsSuite {
    fn rows(
        &self,
        options: &ObjectsBench,
        left_out: &mut Vec<String>,
    ) -> Result<Vec<ObjectsRow<'_>>> {
        let mut rows = Vec::new();
        if options.only.contains(&ObjectsPart::Cached) {
            rows.push(self.cached());
        }
        let is_cold = options.only.iter().any(|&part| part != ObjectsPart::Cached);
        if let Err(error) = &self.kernel
            && is_cold
        {
            leave_out(left_out, format!("mmap in a memory cgroup: {error:#}"));
        }
        let is_direct = is_cold && self.has_direct(left_out);
        if options.only.contains(&ObjectsPart::InOrder) {
            let title = "in order, from the disk".into();
            let mut row = ObjectsRow::new("in-order", title, self.mib(), "MiB");
            if self.kernel.is_ok() {
                let wanted = options.read_ahead.iter();
                let wanted = wanted.map(|size| size.bytes_of(machine_memory_bytes()));
                let path = self.data.path();
                let settings = settings(path, wanted, &mut |what| leave_out(left_out, what))?;
                settings.iter().for_each(|setting| self.add_mmap_in_order(&mut row, setting));
            }
            if is_direct {
                self.add_quire_in_order(&mut row);
            }
            rows.push(row);
        }
        if options.only.contains(&ObjectsPart::Random) {
            rows.extend([1, DEPTH].map(|threads| self.random(threads, is_direct)));
        }
        Ok(rows)
    }

    fn has_direct(&self, left_out: &mut Vec<String>) -> bool {
        let opened = self.open(Direct::On, Delivery::Handlers, 1);
        if let Err(error) = &opened {
            leave_out(left_out, format!("Quire past the kernel's cache: {error:#}"));
        }
        opened.is_ok()
    }

    fn mib(&self) -> f64 {
        self.data.bytes as f64 / f64::from(1 << 20)
    }

    /// An address space of its own, and the file in it.
    fn open(&self, direct: Direct, delivery: Delivery, workers: usize) -> Result<Object> {
        let builder = AddressSpace::builder().memory(self.memory).delivery(delivery);
        let space = builder.workers(workers).build()?;
        Ok(OpenOptions::new().direct(direct).open(&space, self.data.path())?)
    }

    fn expected(&self, pattern: Pattern) -> u64 {
        self.data.expected(pattern, &self.order)
    }

    fn cached(&self) -> ObjectsRow<'_> {
        let title = "in order, the file in the kernel's cache".into();
        let mut row = ObjectsRow::new("cached", title, self.mib(), "MiB");
        row.add("mmap, not bounded", true, || {
            self.data.warm()?;
            timed(|| {
                let mapping = sys::FileMapping::new(self.data.path(), self.data.bytes)?;
                let sum = Pattern::InOrder.read(mapping.words(), &[]);
                data::check(sum, self.expected(Pattern::InOrder))
            })
        });
        for (name, delivery) in DELIVERIES {
            row.add(name, false, move || {
                self.data.warm()?;
                self.read_in_order(Direct::Off, delivery)
            });
        }
        row
    }

    fn read_in_order(&self, direct: Direct, delivery: Delivery) -> Result<f64> {
        let object = self.open(direct, delivery, DEPTH)?;
        timed(|| {
            let mapping = sys::map_object(&MapOptions::new(), &object)?;
            let sum = Pattern::InOrder.read(sys::words_of(&mapping), &[]);
            data::check(sum, self.expected(Pattern::InOrder))
        })
    }

    fn add_mmap_in_order<'a>(&'a self, row: &mut ObjectsRow<'a>, setting: &ReadAheadSetting) {
        for (suffix, advice) in [("", Advice::None), (", MADV_SEQUENTIAL", Advice::Sequential)] {
            let setting = setting.clone();
            row.add(&format!("mmap, read-ahead {}{suffix}", setting.name()), true, move || {
                self.data.make_cold()?;
                let _changed = setting.apply()?;
                self.read_by_kernel(Reading { advice, threads: 1, reads: None })
            });
        }
    }

    fn read_by_kernel(&self, reading: Reading) -> Result<f64> {
        let kernel = self.kernel.as_ref().expect("only then there is such a way");
        let pattern = if reading.reads.is_some() { Pattern::Random } else { Pattern::InOrder };
        kernel.read(&self.data, reading, self.expected(pattern))
    }

    fn add_quire_in_order<'a>(&'a self, row: &mut ObjectsRow<'a>) {
        for (name, delivery) in DELIVERIES {
            row.add(&format!("{name}, direct"), false, move || {
                self.data.make_cold()?;
                self.read_in_order(Direct::On, delivery)
            });
        }
    }

    /// Pages at random, by so many threads.
    fn random(&self, threads: usize, is_direct: bool) -> ObjectsRow<'_> {
        let (name, of) =
            if threads == 1 { ("random", "1 thread") } else { ("random-4", "4 threads") };
        let title = format!("pages at random, from the disk, {of}");
        let mut row = ObjectsRow::new(name, title, self.order.len() as f64, "pages");
        if self.kernel.is_ok() {
            row.add("mmap, MADV_RANDOM", true, move || {
                self.data.make_cold()?;
                let reads = Some(self.order.len());
                self.read_by_kernel(Reading { advice: Advice::Random, threads, reads })
            });
        }
        if !is_direct {
            return row;
        }
        for (name, delivery) in DELIVERIES {
            row.add(&format!("{name}, direct"), false, move || {
                self.data.make_cold()?;
                self.read_at_random(delivery, threads)
            });
        }
        if threads == 1 {
            row.add(&format!("read_at_many, {DEPTH} in flight, direct"), false, || {
                self.data.make_cold()?;
                self.read_many()
            });
        }
        row
    }

    /// Through a mapping: a read in flight for each thread.
    fn read_at_random(&self, delivery: Delivery, threads: usize) -> Result<f64> {
        let object = self.open(Direct::On, delivery, threads)?;
        timed(|| {
            let options = MapOptions::new().pattern(MappingPattern::Random);
            let mapping = sys::map_object(&options, &object)?;
            let words = sys::words_of(&mapping);
            let read = |part: &[u32]| Ok(Pattern::Random.read(words, part));
            let sum = in_threads(&self.order, threads, read)?;
            data::check(sum, self.expected(Pattern::Random))
        })
    }

    /// By one call, with a read in flight for each store worker.
    fn read_many(&self) -> Result<f64> {
        let object = self.open(Direct::On, Delivery::Handlers, DEPTH)?;
        let mut pages = vec![[0u8; PAGE_BYTES]; self.order.len()];
        let mut requests: Vec<(u64, &mut [u8])> = (self.order.iter().zip(&mut pages))
            .map(|(&page, bytes)| (u64::from(page) * PAGE_BYTES as u64, &mut bytes[..]))
            .collect();
        let seconds = timed(|| {
            for result in object.read_at_many(&mut requests)? {
                ensure!(result? == PAGE_BYTES, "a read ended early");
            }
            Ok(())
        })?;
        let first = |page: &[u8; PAGE_BYTES]| {
            u64::from_ne_bytes(*page.first_chunk().expect("a page is longer"))
        };
        let sum = pages.iter().map(first).fold(0, u64::wrapping_add);
        data::check(sum, self.expected(Pattern::Random))?;
        Ok(seconds)
    }
}

const DELIVERIES: [(&str, Delivery); 2] =
    [("quire, inline", Delivery::Inline), ("quire, handlers", Delivery::Handlers)];

/// Splits the pages among threads, and adds up what each returns.
fn in_threads(
    order: &[u32],
    threads: usize,
    read: impl Fn(&[u32]) -> Result<u64> + Sync,
) -> Result<u64> {
    if threads == 1 {
        return read(order);
    }
    std::thread::scope(|scope| {
        let parts = order.chunks(order.len().div_ceil(threads).max(1));
        let read = &read;
        let all: Vec<_> = parts.map(|part| scope.spawn(move || read(part))).collect();
        let mut sums = all.into_iter().map(|one| one.join().expect("a read does not panic"));
        sums.try_fold(0, |sum: u64, one| Ok(sum.wrapping_add(one?)))
    })
}

fn timed(read: impl FnOnce() -> Result<()>) -> Result<f64> {
    ensure!(!sys::is_interrupted(), "interrupted");
    let started = Instant::now();
    read()?;
    Ok(started.elapsed().as_secs_f64())
}

impl<'a> ObjectsRow<'a> {
    fn new(name: &'static str, title: String, amount: f64, unit: &'static str) -> ObjectsRow<'a> {
        ObjectsRow { name, title, amount, unit, ways: Vec::new() }
    }

    fn add(&mut self, name: &str, is_mmap: bool, read: impl Fn() -> Result<f64> + 'a) {
        let read = Box::new(read);
        self.ways.push(ObjectsWay {
            name: name.to_owned(),
            is_mmap,
            read,
            seconds: Samples::default(),
        });
    }

    fn measure(&mut self, rounds: u32) -> Result<()> {
        for _ in 0..rounds {
            for way in &mut self.ways {
                way.seconds.push((way.read)()?);
            }
        }
        Ok(())
    }

    /// The first of mmap's ways, and the fastest.
    fn of_mmap(&self) -> [Samples; 2] {
        let ways = || self.ways.iter().filter(|way| way.is_mmap).map(|way| &way.seconds);
        let fastest = ways().min_by(|one, other| one.median().total_cmp(&other.median()));
        [ways().next(), fastest].map(|seconds| seconds.cloned().unwrap_or_default())
    }

    fn print(&self) {
        println!("\n{}", self.title);
        let per_second = format!("{}/s", self.unit);
        println!(
            "  {:44}{:>10}{:>12}{:>26}{:>26}",
            "", "seconds", per_second, "time / first mmap's", "time / fastest mmap's"
        );
        let of_mmap = self.of_mmap();
        for way in &self.ways {
            let [first, fastest] =
                of_mmap.each_ref().map(|mmap| output::ratio(&way.seconds.over(mmap)));
            println!(
                "  {:44}{:>10.4}{:>12.0}{first:>26}{fastest:>26}",
                way.name,
                way.seconds.median(),
                self.amount / way.seconds.median(),
            );
        }
    }

    fn json(&self) -> Value {
        let of_mmap = self.of_mmap();
        let ratio = |seconds: &Samples, mmap: &Samples| match mmap.is_empty() {
            true => Value::Null,
            false => Value::from(&seconds.over(mmap)),
        };
        let ways = self.ways.iter().map(|way| {
            Value::from_iter([
                ("way", Value::from(way.name.as_str())),
                ("seconds", Value::from(&way.seconds)),
                ("over_first_mmap", ratio(&way.seconds, &of_mmap[0])),
                ("over_fastest_mmap", ratio(&way.seconds, &of_mmap[1])),
            ])
        });
        Value::from_iter([
            ("part", Value::from(self.name)),
            ("amount", Value::from(self.amount)),
            ("unit", Value::from(self.unit)),
            ("ways", ways.collect()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ways: &[(&str, bool, [f64; 2])]) -> ObjectsRow<'static> {
        let mut row = ObjectsRow::new("some", "some".into(), 1.0, "pages");
        for &(name, is_mmap, seconds) in ways {
            let times = std::cell::Cell::new(0);
            row.add(name, is_mmap, move || Ok(seconds[times.replace(times.get() + 1)]));
        }
        row.measure(2).unwrap();
        row
    }

    #[test]
    fn ratios_are_to_the_first_and_the_fastest_of_mmap() {
        let row = row(&[
            ("quire", false, [1.0, 1.0]),
            ("slow mmap", true, [4.0, 4.0]),
            ("fast mmap", true, [2.0, 2.5]),
        ]);
        let [first, fastest] = row.of_mmap();
        assert_eq!((first.values(), fastest.values()), (&[4.0, 4.0][..], &[2.0, 2.5][..]));
    }

    #[test]
    fn without_mmap_there_are_no_ratios() {
        let row = row(&[("quire", false, [1.0, 2.0])]);
        assert!(row.of_mmap().iter().all(Samples::is_empty));
        assert!(row.json().to_string().contains("\"over_first_mmap\":null"));
    }

    #[test]
    fn each_page_is_read_by_one_thread() {
        let order: Vec<u32> = (0..10).collect();
        for threads in [1, 3, 4, 16] {
            let sum = in_threads(&order, threads, |part| {
                Ok(part.iter().map(|&page| 1 << (4 * page)).sum())
            });
            assert_eq!(sum.unwrap(), 0x11_1111_1111);
        }
    }
}
