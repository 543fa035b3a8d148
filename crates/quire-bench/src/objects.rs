//! `quire bench objects`: reads of a file that is four times as large as the memory for it.
//!
//! Three parts. *Cached*: the file is in the kernel's cache, Quire reads it from there through a
//! quarter of its size, and mmap(2), which has no bound, maps what is there. *In order* and *at
//! random*: the file is cold; Quire reads past the kernel's cache, mmap is bounded to as much by a
//! memory cgroup. In order with what the device reads ahead at a small and a large setting; at
//! random with as many reads in flight, and as many threads.
//!
//! What cannot be had (a cgroup, the device's setting, direct I/O) is left out, and the report says why.

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
use super::harness::report::Report;
use super::harness::suite::{
    Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::{ObjectsBench, sys};
use quire_cli::size::{Human, machine_memory_bytes};

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

/// What a cell is measured by.
#[derive(Clone)]
enum Plan {
    /// In order from the kernel's cache; nothing is mmap's.
    Cached(Option<Delivery>),
    MmapInOrder {
        advice: Advice,
        setting: ReadAheadSetting,
    },
    InOrder(Delivery),
    MmapAtRandom {
        threads: usize,
    },
    AtRandom {
        delivery: Delivery,
        threads: usize,
    },
    Many,
}

/// What every way reads.
struct ObjectsSuite<'a> {
    options: &'a ObjectsBench,
    data: Data,
    memory: usize,
    /// Pages to be read at random.
    order: Vec<u32>,
    kernel: Result<Kernel>,
    /// What the device is told to read ahead, for mmap.
    settings: Vec<ReadAheadSetting>,
    is_direct: bool,
    left_out: Vec<String>,
}

/// Runs the bench.
pub(crate) fn report(options: &ObjectsBench) -> Result<Report> {
    let common = &options.common;
    let chosen = options.size.map(|size| size.bytes_of(machine_memory_bytes()) as usize);
    let bytes = chosen.unwrap_or(common.size(64 << 20, 512 << 20, 4 << 30));
    let directory = options.directory.clone().unwrap_or_else(data::disk_directory);
    let data = Data::new(&directory, bytes)?;
    let memory = data.bytes / 4;
    let mut order = data.shuffled();
    order.truncate(options.reads.unwrap_or(common.size(512, 8192, 65536)) as usize);
    let kernel = Kernel::new(memory as u64);
    let (settings, left_out) = (Vec::new(), Vec::new());
    let mut suite =
        ObjectsSuite { options, data, memory, order, kernel, settings, is_direct: false, left_out };
    if options.only.iter().any(|&part| part != ObjectsPart::Cached) {
        suite.find_what_there_is()?;
    }
    measure(&mut suite, common)
}

impl Suite for ObjectsSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let mut facts = vec![(
            "file",
            format!("{}, through {}", Human(self.data.bytes as u64), Human(self.memory as u64)),
        )];
        if let Ok(kernel) = &self.kernel {
            facts.push(("memory cgroup", kernel.version().to_string()));
        }
        Head {
            name: "objects",
            question: "How fast is a file read that is four times as large as the memory for it?",
            facts,
            rounds: self.options.common.rounds(2, 5),
            left_out: self.left_out.clone(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let has = |part| self.options.only.contains(&part);
        let mut sheets = Vec::new();
        if has(ObjectsPart::Cached) {
            let mut sheet = Sheet::new("in order, from the kernel's cache", Shape::Cells);
            sheet.add("", "mmap, not bounded", Plan::Cached(None));
            for (name, delivery) in DELIVERIES {
                sheet.add("", name, Plan::Cached(Some(delivery)));
            }
            sheets.push(sheet);
        }
        if has(ObjectsPart::InOrder) {
            let mut sheet = Sheet::new("in order, from the disk", Shape::Cells);
            for setting in &self.settings {
                for (suffix, advice) in
                    [("", Advice::None), (", MADV_SEQUENTIAL", Advice::Sequential)]
                {
                    let column = format!("mmap, read-ahead {}{suffix}", setting.name());
                    sheet.add("", column, Plan::MmapInOrder { advice, setting: setting.clone() });
                }
            }
            if self.is_direct {
                for (name, delivery) in DELIVERIES {
                    sheet.add("", format!("{name}, direct"), Plan::InOrder(delivery));
                }
            }
            sheets.push(sheet);
        }
        if has(ObjectsPart::Random) {
            sheets.extend([1, DEPTH].map(|threads| self.random(threads)));
        }
        for sheet in &mut sheets {
            sheet.base = sheet.cells.first().map(|cell| cell.column.clone());
        }
        sheets
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let pages = self.order.len() as f64;
        let (amount, unit, seconds) = match plan {
            Plan::Cached(delivery) => {
                self.data.warm()?;
                let seconds = match delivery {
                    None => self.read_unbounded()?,
                    Some(delivery) => self.read_in_order(Direct::Off, *delivery)?,
                };
                (self.mib(), "MiB/s", seconds)
            }
            Plan::MmapInOrder { advice, setting } => {
                self.data.make_cold()?;
                let _changed = setting.apply()?;
                let reading = Reading { advice: *advice, threads: 1, reads: None };
                (self.mib(), "MiB/s", self.read_by_kernel(reading)?)
            }
            Plan::InOrder(delivery) => {
                self.data.make_cold()?;
                (self.mib(), "MiB/s", self.read_in_order(Direct::On, *delivery)?)
            }
            Plan::MmapAtRandom { threads } => {
                self.data.make_cold()?;
                let (advice, reads) = (Advice::Random, Some(self.order.len()));
                let reading = Reading { advice, threads: *threads, reads };
                (pages, "pages/s", self.read_by_kernel(reading)?)
            }
            Plan::AtRandom { delivery, threads } => {
                self.data.make_cold()?;
                (pages, "pages/s", self.read_at_random(*delivery, *threads)?)
            }
            Plan::Many => {
                self.data.make_cold()?;
                (pages, "pages/s", self.read_many()?)
            }
        };
        Ok(figures([("seconds", seconds), (unit, amount / seconds)]))
    }

    fn is_ours(&self, column: &str) -> bool {
        !column.starts_with("mmap")
    }

    fn words(&self, _: &Results<'_>) -> Vec<String> {
        vec![format!(
            "When the file was to be cold, the kernel kept at most {} of its {} pages cached.",
            self.data.kept_pages_max(),
            self.data.bytes / PAGE_BYTES
        )]
    }
}

impl ObjectsSuite<'_> {
    /// Looks for what reading from the disk needs.
    fn find_what_there_is(&mut self) -> Result<()> {
        match &self.kernel {
            Err(error) => self.left_out.push(format!("mmap in a memory cgroup: {error:#}")),
            Ok(_) if self.options.only.contains(&ObjectsPart::InOrder) => {
                let wanted = self.options.read_ahead.iter();
                let wanted = wanted.map(|size| size.bytes_of(machine_memory_bytes()));
                let left_out = &mut self.left_out;
                self.settings =
                    settings(self.data.path(), wanted, &mut |what| left_out.push(what))?;
            }
            Ok(_) => {}
        }
        match self.open(Direct::On, Delivery::Handlers, 1) {
            Ok(_) => self.is_direct = true,
            Err(error) => self.left_out.push(format!("Quire past the kernel's cache: {error:#}")),
        }
        Ok(())
    }

    /// Pages at random, by so many threads.
    fn random(&self, threads: usize) -> Sheet<Plan> {
        let title = format!("pages at random, from the disk, {}", plural(threads, "thread"));
        let mut sheet = Sheet::new(title, Shape::Cells);
        if self.kernel.is_ok() {
            sheet.add("", "mmap, MADV_RANDOM", Plan::MmapAtRandom { threads });
        }
        if self.is_direct {
            for (name, delivery) in DELIVERIES {
                sheet.add("", format!("{name}, direct"), Plan::AtRandom { delivery, threads });
            }
            if threads == 1 {
                sheet.add("", format!("read_at_many, {DEPTH} in flight, direct"), Plan::Many);
            }
        }
        sheet
    }

    fn read_unbounded(&self) -> Result<f64> {
        timed(|| {
            let mapping = sys::FileMapping::new(self.data.path(), self.data.bytes)?;
            let sum = Pattern::InOrder.read(mapping.words(), &[]);
            data::check(sum, self.expected(Pattern::InOrder))
        })
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

    fn read_in_order(&self, direct: Direct, delivery: Delivery) -> Result<f64> {
        let object = self.open(direct, delivery, DEPTH)?;
        timed(|| {
            let mapping = sys::map_object(&MapOptions::new(), &object)?;
            let sum = Pattern::InOrder.read(sys::words_of(&mapping), &[]);
            data::check(sum, self.expected(Pattern::InOrder))
        })
    }

    fn read_by_kernel(&self, reading: Reading) -> Result<f64> {
        let kernel = self.kernel.as_ref().expect("only then there is such a way");
        let pattern = if reading.reads.is_some() { Pattern::Random } else { Pattern::InOrder };
        kernel.read(&self.data, reading, self.expected(pattern))
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

#[cfg(test)]
mod tests {
    use super::*;

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
