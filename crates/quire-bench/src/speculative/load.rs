//! Programs that fault: the page-fault programs of will-it-scale, and threads that fault beside one
//! that unmaps or protects.
//!
//! Owns the programs and what they print. Each thread of the first has an area of its own, which it
//! maps, writes a word of each page of, and unmaps, again and again for a fixed time: private and
//! anonymous, a private copy of a file, a file shared, or a block of malloc's. The second has a
//! fixed number of pages for each thread that faults, and goes on until the last was touched once;
//! these threads change no layout themselves.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use super::super::service::shuffled;
use super::super::sys::{Mapping, MemoryFile};
use super::print_figure;
use quire_cli::size::{Size, machine_memory_bytes};

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;

#[derive(Args, Debug)]
pub(crate) struct LoadArgs {
    #[arg(value_enum)]
    what: Load,

    /// The area of each thread that faults
    #[arg(long)]
    area: Size,

    #[arg(long)]
    threads: usize,

    /// How long the page-fault programs run
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,

    /// What one more thread maps, and changes meanwhile
    #[arg(long)]
    mapped: Option<Size>,

    /// How it does
    #[arg(long, value_enum, default_value_t = Change::Unmap)]
    beside: Change,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// It maps, fills and unmaps: the pages are dropped outside of the space's lock
    Unmap,
    /// It fills, takes the right to write away, and gives it back: the pages are moved under the lock
    Protect,
}

impl Change {
    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// What the thread does to its area.
    pub(crate) const fn does(self) -> &'static str {
        match self {
            Change::Unmap => "maps, fills and unmaps",
            Change::Protect => "fills and protects",
        }
    }
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Load {
    /// Private and anonymous
    #[value(name = "page_fault1")]
    Anonymous,
    /// A private copy of a file
    #[value(name = "page_fault2")]
    PrivateFile,
    /// A file shared
    #[value(name = "page_fault3")]
    SharedFile,
    /// A block of malloc's
    #[value(name = "malloc1")]
    Malloc,
    /// Faults beside a thread that unmaps or protects
    #[value(name = "contention")]
    Contention,
}

impl Load {
    /// The name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs a program.
pub(crate) fn main(args: &LoadArgs) -> Result<u8> {
    let bytes = |size: Size| size.bytes_of(machine_memory_bytes()) as usize;
    let pages = bytes(args.area) / PAGE_BYTES;
    ensure!(pages > 0 && args.threads > 0, "there is one page and one thread at least");
    if args.what == Load::Contention {
        let mapped_pages = args.mapped.map_or(0, bytes) / PAGE_BYTES;
        contend(args.threads, pages, mapped_pages, args.beside)?.print();
        return Ok(0);
    }
    let rate = scale(args.what, args.threads, pages, Duration::from_secs_f64(args.seconds))?;
    print_figure("pages_per_second", rate);
    Ok(0)
}

/// Pages that all threads together write a second.
fn scale(what: Load, threads: usize, pages: usize, time: Duration) -> Result<f64> {
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let started = Instant::now();
        let write = |_| scope.spawn(move || write_areas(what, pages, is_over));
        let threads: Vec<_> = (0..threads).map(write).collect();
        thread::sleep(time);
        // Relaxed: nothing is handed over with the flag.
        is_over.store(true, Ordering::Relaxed);
        let seconds = started.elapsed().as_secs_f64();
        let mut written = 0;
        for thread in threads {
            written += thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(written as f64 / seconds)
    })
}

/// Maps, writes and unmaps until it is over; returns the pages written, one at least.
fn write_areas(what: Load, pages: usize, is_over: &AtomicBool) -> Result<u64> {
    let bytes = pages * PAGE_BYTES;
    let file = MemoryFile::in_memory(bytes)?;
    let mut written = 0;
    loop {
        written += match what {
            Load::PrivateFile | Load::SharedFile => {
                let mut area = Mapping::of_file(&file, bytes, what == Load::SharedFile)?;
                write_pages(area.words(), is_over, |word| *word = 1)
            }
            Load::Malloc => {
                let mut area: Vec<u64> = Vec::with_capacity(pages * PAGE_WORDS);
                write_pages(area.spare_capacity_mut(), is_over, |word| _ = word.write(1))
            }
            Load::Anonymous | Load::Contention => {
                write_pages(Mapping::new(bytes)?.words(), is_over, |word| *word = 1)
            }
        };
        if is_over.load(Ordering::Relaxed) {
            return Ok(written);
        }
    }
}

/// Writes a word of each page, until it is over; returns the pages written, one at least.
fn write_pages<T>(words: &mut [T], is_over: &AtomicBool, write: impl Fn(&mut T)) -> u64 {
    let mut written = 0;
    for word in words.iter_mut().step_by(PAGE_WORDS) {
        write(black_box(word));
        written += 1;
        if is_over.load(Ordering::Relaxed) {
            break;
        }
    }
    written
}

/// What became of faults beside a thread that changes the layout.
struct LayoutChanges {
    /// The first touches of all faulting threads together.
    faults_per_second: f64,
    /// What each of them took, in order.
    times_ns: Vec<u32>,
    /// Of the thread that changes the layout, where there is one.
    areas_per_second: Option<f64>,
}

impl LayoutChanges {
    fn print(&self) {
        print_figure("faults_per_second", self.faults_per_second);
        for (name, share) in
            [("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999), ("max_us", 1.0)]
        {
            print_figure(name, f64::from(at_share(&self.times_ns, share)) / 1e3);
        }
        if let Some(areas_per_second) = self.areas_per_second {
            print_figure("areas_per_second", areas_per_second);
        }
    }
}

/// The time that `share` of all are not above.
fn at_share(sorted: &[u32], share: f64) -> u32 {
    let above = (sorted.len() as f64 * share).ceil() as usize;
    sorted[above.clamp(1, sorted.len()) - 1]
}

/// Threads that touch each page of an area once, in random order, a page a fault, while one more
/// changes the layout, whose faults may be as large as they like.
fn contend(
    threads: usize,
    pages: usize,
    mapped_pages: usize,
    change: Change,
) -> Result<LayoutChanges> {
    // All is mapped, and what the times go into is there, before the first touch.
    let mut areas = Vec::new();
    for index in 0..threads {
        let mut area = Mapping::new(pages * PAGE_BYTES)?;
        area.one_page_a_fault()?;
        areas.push((area, shuffled(pages, index as u64 + 1), vec![1u32; pages]));
    }
    let (start, is_over) = (&Barrier::new(threads + 1), &AtomicBool::new(false));
    let rates = thread::scope(|scope| -> Result<(f64, Option<f64>)> {
        let touching: Vec<_> = areas
            .iter_mut()
            .map(|(area, order, times)| {
                let words = area.words();
                scope.spawn(move || {
                    start.wait();
                    touch_in_order(words, order, times)
                })
            })
            .collect();
        let changing = (mapped_pages > 0)
            .then(|| scope.spawn(move || change_layout(change, mapped_pages, is_over)));
        start.wait();
        let seconds: Vec<_> = touching.into_iter().map(thread::ScopedJoinHandle::join).collect();
        // Relaxed: nothing is handed over with the flag.
        is_over.store(true, Ordering::Relaxed);
        let areas_per_second = match changing.map(thread::ScopedJoinHandle::join) {
            Some(changed) => Some(changed.map_err(|_| anyhow::anyhow!("a thread panicked"))??),
            None => None,
        };
        let mut faults_per_second = 0.0;
        for seconds in seconds {
            let seconds = seconds.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
            faults_per_second += pages as f64 / seconds;
        }
        Ok((faults_per_second, areas_per_second))
    })?;
    let mut times_ns: Vec<u32> = areas.into_iter().flat_map(|(_, _, times)| times).collect();
    times_ns.sort_unstable();
    let (faults_per_second, areas_per_second) = rates;
    Ok(LayoutChanges { faults_per_second, times_ns, areas_per_second })
}

/// Touches each page once and notes what it took; returns the seconds of all.
fn touch_in_order(words: &mut [u64], order: &[u32], times_ns: &mut [u32]) -> f64 {
    let started = Instant::now();
    let mut before = started;
    for (&page, time_ns) in order.iter().zip(times_ns) {
        *black_box(&mut words[page as usize * PAGE_WORDS]) = 1;
        let after = Instant::now();
        *time_ns = u32::try_from((after - before).as_nanos()).unwrap_or(u32::MAX);
        before = after;
    }
    before.duration_since(started).as_secs_f64()
}

/// Fills and changes until it is over; returns areas a second.
fn change_layout(change: Change, pages: usize, is_over: &AtomicBool) -> Result<f64> {
    let started = Instant::now();
    let mut written = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut area = Mapping::new(pages * PAGE_BYTES)?;
        written += write_pages(area.words(), is_over, |word| *word = 1);
        while change == Change::Protect && !is_over.load(Ordering::Relaxed) {
            area.protect_for_a_moment()?;
            written += write_pages(area.words(), is_over, |word| *word = 1);
        }
    }
    Ok(written as f64 / pages as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_fault_program_writes_pages() {
        for what in Load::value_variants() {
            let rate = scale(*what, 2, 8, Duration::from_millis(5)).unwrap();
            assert!(rate > 0.0, "{what:?}");
        }
    }

    #[test]
    fn a_contended_run_has_a_time_for_every_touch() {
        for change in Change::value_variants() {
            let contended = contend(2, 64, 16, *change).unwrap();
            assert_eq!(contended.times_ns.len(), 2 * 64);
            assert!(contended.times_ns.is_sorted() && contended.faults_per_second > 0.0);
        }
        assert_eq!(contend(1, 16, 0, Change::Unmap).unwrap().areas_per_second, None);
    }

    #[test]
    fn a_share_is_of_those_that_are_not_above() {
        let times: Vec<u32> = (1..=200).collect();
        assert_eq!(at_share(&times, 0.5), 100);
        assert_eq!(at_share(&times, 0.99), 198);
        assert_eq!(at_share(&times, 1.0), 200);
        assert_eq!(at_share(&[7], 0.5), 7);
    }
}
