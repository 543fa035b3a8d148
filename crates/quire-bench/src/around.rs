//! `quire bench fault-around`: reads through mappings of a file, by what is mapped around a fault.
//!
//! A file is mapped anew for every measurement, by each thread for itself, and read in one of
//! three ways: every word in order; a word of each page in random order; a word of one page per
//! 2 MiB. First with all of it in the object's cache (and in the kernel's), which leaves only minor
//! faults; then, in order and at random, through a quarter of its size.

use std::thread;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions};
use quire::store::Direct;
use quire_cli::size::{Human, machine_memory_bytes};

use super::data::{self, BLOCK_BYTES, Data, Pattern};
use super::harness::report::{Part, Report, spread};
use super::harness::suite::{
    Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure, plural,
};
use super::{AroundBench, sys};

/// Which thread serves a fault.
pub(crate) const DELIVERIES: [(Delivery, &str); 2] =
    [(Delivery::Handlers, "by handlers"), (Delivery::Inline, "inline")];

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

    pub(crate) fn setting(self) -> FaultAround {
        self.0
    }

    pub(crate) fn name(self) -> String {
        match self.0 {
            FaultAround::Off => "off".into(),
            FaultAround::Auto => "auto".into(),
            FaultAround::Order(order) => order.to_string(),
        }
    }
}

/// One way of mapping, one way of reading, one number of threads.
enum Plan {
    /// By mmap(2), from the kernel's cache.
    Kernel { pattern: Pattern, threads: usize },
    /// All of it in the object's cache.
    Cached { pattern: Pattern, threads: usize, around: FaultAround, delivery: Delivery },
    /// A quarter of the file's size, cold.
    Cold { pattern: Pattern, direct: Direct, delivery: Delivery },
}

struct AroundSuite<'a> {
    options: &'a AroundBench,
    data: Data,
    order: Vec<u32>,
    /// The file as an object that is cached as a whole, by handlers and inline.
    cached: [Object; 2],
}

/// Runs the bench.
pub(crate) fn report(options: &AroundBench) -> Result<Report> {
    let common = &options.common;
    let chosen = options.size.map(|size| size.bytes_of(machine_memory_bytes()) as usize);
    let bytes = chosen.unwrap_or(common.size(16 << 20, 256 << 20, 1 << 30));
    let data = Data::new(&options.directory.clone().unwrap_or_else(std::env::temp_dir), bytes)?;
    let order = data.shuffled();
    let cached = [filled(&data, Delivery::Handlers)?, filled(&data, Delivery::Inline)?];
    measure(&mut AroundSuite { options, data, order, cached }, common)
}

impl AroundSuite<'_> {
    fn threads(&self) -> Vec<usize> {
        match &self.options.threads[..] {
            [] => vec![1, 2, 4, 8],
            threads => threads.to_vec(),
        }
    }
}

/// The file as an object that is cached as a whole.
pub(crate) fn filled(data: &Data, delivery: Delivery) -> Result<Object> {
    let memory = data.bytes + data.bytes / 4 + (64 << 20);
    let space = AddressSpace::builder().memory(memory).delivery(delivery).build()?;
    let object = space.open(data.path())?;
    let mut buffer = vec![0; BLOCK_BYTES];
    for block in 0..data.bytes / BLOCK_BYTES {
        object.read_at((block * BLOCK_BYTES) as u64, &mut buffer)?;
    }
    Ok(object)
}

fn cached_title(pattern: Pattern, by: &str) -> String {
    format!("{}, everything cached, {by}", pattern.name())
}

impl Suite for AroundSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        Head {
            name: "fault-around",
            question: "How many faults and how much time does it save to map what is cached around a fault?",
            facts: vec![("file", Human(self.data.bytes as u64).to_string())],
            rounds: self.options.common.rounds(2, 5),
            left_out: Vec::new(),
            published: published(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let (threads, around) = (self.threads(), &self.options.around);
        let mut sheets = Vec::new();
        for (delivery, by) in DELIVERIES {
            for pattern in Pattern::ALL {
                let base = around.first().map_or_else(|| "mmap".into(), |around| around.name());
                let title = cached_title(pattern, by);
                let mut sheet = Sheet::new(title, Shape::Cells).base(base).plot(Along::Columns);
                for threads in threads.clone() {
                    let row = plural(threads, "thread");
                    sheet.add(&row, "mmap", Plan::Kernel { pattern, threads });
                    for setting in around {
                        let around = setting.0;
                        let plan = Plan::Cached { pattern, threads, around, delivery };
                        sheet.add(&row, setting.name(), plan);
                    }
                }
                sheets.push(sheet);
            }
        }
        let mut cold = Sheet::new("through a quarter of its size, cold", Shape::Cells)
            .base("buffered, by handlers");
        for pattern in [Pattern::InOrder, Pattern::Random] {
            for (direct, how) in [(Direct::Off, "buffered"), (Direct::On, "direct")] {
                for (delivery, by) in DELIVERIES {
                    let plan = Plan::Cold { pattern, direct, delivery };
                    cold.add(pattern.name(), format!("{how}, {by}"), plan);
                }
            }
        }
        sheets.push(cold);
        sheets
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        match *plan {
            Plan::Kernel { pattern, threads } => {
                let expected = self.data.expected(pattern, &self.order);
                time(threads, sys::minor_faults, || {
                    let mapping = sys::FileMapping::new(self.data.path(), self.data.bytes)?;
                    data::check(pattern.read(mapping.words(), &self.order), expected)
                })
            }
            Plan::Cached { pattern, threads, around, delivery } => {
                let expected = self.data.expected(pattern, &self.order);
                let object = &self.cached[usize::from(delivery == Delivery::Inline)];
                let faults = || object.space().counter("pgfault");
                time(threads, faults, || {
                    read_through(object, around, pattern, &self.order, expected)
                })
            }
            Plan::Cold { pattern, direct, delivery } => {
                let some = &self.order[..self.order.len().min(8192)];
                let expected = self.data.expected(pattern, some);
                let space = AddressSpace::builder()
                    .memory(self.data.bytes / 4)
                    .delivery(delivery)
                    .build()?;
                let object = OpenOptions::new().direct(direct).open(&space, self.data.path())?;
                let faults = || space.counter("pgfault");
                time(1, faults, || {
                    read_through(&object, FaultAround::Auto, pattern, some, expected)
                })
            }
        }
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let mut words = Vec::new();
        for (_, by) in DELIVERIES {
            for (pattern, threads, faults, seconds) in PUBLISHED_RATIOS {
                let (title, row) = (cached_title(pattern, by), plural(threads, "thread"));
                let over = |figure| results.over(&title, &row, ["4", "off"], figure);
                let (of_faults, of_seconds) = (over("faults"), over("seconds"));
                if of_faults.is_empty() {
                    continue;
                }
                let holds = match (of_seconds.median() < 0.95, seconds < 0.95) {
                    (true, true) => "that it saves time holds here",
                    (false, true) => "that it saves time does not hold here",
                    (true, false) => "here it saves time",
                    (false, false) => "it saves no time in either",
                };
                words.push(format!(
                    "{}, {row}, {by}: order 4 has {} of the faults of off and takes {} of its time; in the \
                     authors' table {faults:.3} and {seconds:.2}; {holds}.",
                    pattern.name(),
                    spread(&of_faults, ""),
                    spread(&of_seconds, ""),
                ));
            }
        }
        words
    }
}

pub(crate) fn read_through(
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

/// Has every thread do the work once; the time and the faults of all.
pub(crate) fn time(
    threads: usize,
    faults: impl Fn() -> u64,
    work: impl Fn() -> Result<()> + Sync,
) -> Result<Figures> {
    let before = faults();
    let started = Instant::now();
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        all.into_iter().try_for_each(|one| one.join().expect("the work does not panic"))
    })?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(!sys::is_interrupted(), "interrupted");
    Ok(figures([("seconds", seconds), ("faults", (faults() - before) as f64)]))
}

/// Of the authors' order 4 over their baseline: faults, and seconds.
const PUBLISHED_RATIOS: [(Pattern, usize, f64, f64); 6] = [
    (Pattern::InOrder, 1, 262_251.0 / 4_195_437.0, 5.488 / 7.250),
    (Pattern::InOrder, 8, 2_366_999.0 / 33_557_540.0, 6.394 / 16.649),
    (Pattern::Random, 1, 17_299.0 / 262_636.0, 15.179 / 15.352),
    (Pattern::Random, 8, 154_501.0 / 2_098_948.0, 14.289 / 15.040),
    (Pattern::Sparse, 1, 8_260.0 / 8_372.0, 0.0637 / 0.0399),
    (Pattern::Sparse, 8, 65_620.0 / 65_731.0, 0.1919 / 0.1242),
];

/// 120 threads, 4 sockets, 128 GiB; Linux 3.14 with the patches; a part of the table.
pub(crate) fn published() -> Vec<Part> {
    let head = ["", "figure", "baseline", "1", "3", "4", "5", "7", "9"];
    vec![
        Part::published(
            "16 GiB read in order",
            &[
                &head,
                &[
                    "1 thread",
                    "faults",
                    "4,195,437",
                    "2,098,275",
                    "525,068",
                    "262,251",
                    "131,170",
                    "32,856",
                    "8,282",
                ],
                &["", "seconds", "7.25", "6.46", "5.49", "5.49", "5.71", "5.90", "5.11"],
                &[
                    "8 threads",
                    "faults",
                    "33,557,540",
                    "16,892,728",
                    "4,515,848",
                    "2,366,999",
                    "1,423,382",
                    "442,732",
                    "142,339",
                ],
                &["", "seconds", "16.6", "9.31", "6.61", "6.39", "6.67", "6.75", "6.37"],
                &[
                    "32 threads",
                    "faults",
                    "134,228,222",
                    "67,526,810",
                    "17,725,386",
                    "9,716,537",
                    "4,763,731",
                    "1,668,921",
                    "537,200",
                ],
                &["", "seconds", "49.2", "29.7", "12.9", "10.2", "11.8", "9.59", "9.93"],
                &[
                    "60 threads",
                    "faults",
                    "251,687,988",
                    "126,146,952",
                    "32,919,406",
                    "18,208,804",
                    "10,458,947",
                    "2,733,907",
                    "928,217",
                ],
                &["", "seconds", "86.3", "49.6", "22.3", "17.6", "16.5", "16.3", "16.3"],
                &[
                    "120 threads",
                    "faults",
                    "503,352,863",
                    "252,939,677",
                    "67,039,168",
                    "35,191,827",
                    "19,170,091",
                    "4,688,357",
                    "1,471,862",
                ],
                &["", "seconds", "124.6", "79.8", "39.5", "32.2", "30.0", "28.7", "28.0"],
            ],
        ),
        Part::published(
            "1 GiB read at random",
            &[
                &head,
                &[
                    "1 thread", "faults", "262,636", "132,743", "34,369", "17,299", "8,527",
                    "3,451", "1,222",
                ],
                &["", "seconds", "15.4", "16.6", "16.6", "15.2", "16.6", "16.6", "15.4"],
                &[
                    "8 threads",
                    "faults",
                    "2,098,948",
                    "1,061,871",
                    "273,690",
                    "154,501",
                    "87,110",
                    "25,663",
                    "7,384",
                ],
                &["", "seconds", "15.0", "15.1", "14.5", "14.3", "14.4", "14.3", "14.4"],
                &[
                    "120 threads",
                    "faults",
                    "31,471,111",
                    "15,816,616",
                    "3,959,209",
                    "1,978,685",
                    "1,008,299",
                    "264,635",
                    "96,010",
                ],
                &["", "seconds", "41.8", "40.5", "36.1", "35.3", "35.8", "36.6", "34.3"],
            ],
        ),
        Part::published(
            "One page of each page table of 16 GiB",
            &[
                &head,
                &[
                    "1 thread", "faults", "8,372", "8,324", "8,270", "8,260", "8,249", "8,239",
                    "8,237",
                ],
                &[
                    "", "seconds", "0.0399", "0.0454", "0.0518", "0.0637", "0.0791", "0.177",
                    "0.541",
                ],
                &[
                    "8 threads",
                    "faults",
                    "65,731",
                    "65,681",
                    "65,628",
                    "65,620",
                    "65,608",
                    "65,599",
                    "65,596",
                ],
                &["", "seconds", "0.124", "0.489", "0.157", "0.192", "0.243", "0.544", "1.68"],
            ],
        ),
    ]
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
}
