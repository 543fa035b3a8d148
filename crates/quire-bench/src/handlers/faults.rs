//! The program that faults: threads that touch every page of an area once, in random order.
//!
//! Owns the ways in which it can serve itself, which the engine has none of: loops of its own around
//! userfaultfds, with any number of threads, descriptors, and messages a read. Where Quire
//! or the kernel serves it, it is an ordinary program. The clock starts when all threads are there.

use std::fs::{self, File};
use std::hint::black_box;
use std::os::fd::AsRawFd as _;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use linux_raw_sys::general::{UFFD_FEATURE_SIGBUS, UFFDIO_REGISTER_MODE_MISSING};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, OpenOptions};
use quire::sys::thread::{never_preempt, pin_to_nth_cpu};
use quire::sys::uffd::Uffd;

use super::super::service::shuffled;
use super::super::sys::{self, Mapping};
use super::{FaultFigures, PAGE_BYTES};

/// Messages that a loop's buffer has room for.
const BATCH_MAX: usize = 64;
/// What threads may take to start.
const SETTLE_MAX: Duration = Duration::from_secs(10);

#[derive(Args, Debug)]
pub(crate) struct FaultsArgs {
    #[arg(long)]
    threads: usize,

    /// Pages that all threads together touch
    #[arg(long)]
    pages: usize,

    /// Microseconds that a thread computes between two faults
    #[arg(long, default_value_t = 0)]
    think_us: u64,

    #[arg(long, value_enum, default_value = "others")]
    by: By,

    /// Threads that must be there to serve the process for Quire
    #[arg(long)]
    expect_handlers: Option<usize>,

    /// Of a loop: its threads
    #[arg(long, default_value_t = 1)]
    handlers: usize,

    /// Of a loop: its userfaultfds, each with its share of the area and of the threads
    #[arg(long, default_value_t = 1)]
    descriptors: usize,

    /// Of a loop: messages that a read may bring
    #[arg(long, default_value_t = 1)]
    batch: usize,

    #[arg(long, value_enum, default_value = "each")]
    place: LoopCpus,

    /// Microseconds that a loop computes for a fault, beside copying the page
    #[arg(long, default_value_t = 0)]
    work_us: u64,
}

/// What serves the faults.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum By {
    /// What manages this process: Quire, or the kernel
    Others,
    /// Loops around userfaultfds
    Loop,
    /// The thread that faults, in a signal's handler
    Signal,
    /// The handlers of a library's address space
    Objects,
    /// The library, in the thread that faults
    ObjectsInline,
}

/// On which CPUs a loop's threads run.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LoopCpus {
    /// Those of a descriptor each on one, in turn
    Each,
    /// As each, and so do the threads that fault
    EachPinned,
    /// Wherever the kernel likes
    Any,
    /// Those of a descriptor on the one where its share's faults are taken
    Same,
    /// Those of a descriptor on another one
    Other,
}

impl LoopCpus {
    /// Whether threads that fault run on a CPU of their own.
    fn pins_faulting(self) -> bool {
        matches!(self, LoopCpus::EachPinned | LoopCpus::Same | LoopCpus::Other)
    }

    /// The CPU of a loop's thread, the `nth` of those of its descriptor.
    fn cpu(self, descriptor: usize, nth: usize) -> Option<usize> {
        match self {
            LoopCpus::Each | LoopCpus::EachPinned => Some(nth),
            LoopCpus::Any => None,
            LoopCpus::Same => Some(descriptor),
            LoopCpus::Other => Some(descriptor + 1),
        }
    }
}

/// Runs the program and prints its figures.
pub(crate) fn main(args: &FaultsArgs) -> Result<u8> {
    ensure!(
        args.threads > 0 && args.pages >= args.threads,
        "there is one thread at least, and a page for each"
    );
    let bytes = args.pages / args.threads * args.threads * PAGE_BYTES;
    let mut area = Mapping::new(bytes)?;
    area.one_page_a_fault()?;
    let figures = match args.by {
        By::Others => touch(args, area.words())?,
        By::Loop | By::Signal => {
            serve(args, area.words())?;
            touch(args, area.words())?
        }
        By::Objects | By::ObjectsInline => {
            let is_inline = args.by == By::ObjectsInline;
            let delivery = if is_inline { Delivery::Inline } else { Delivery::Handlers };
            let space = AddressSpace::builder()
                .memory(2 * bytes + (16 << 20))
                .delivery(delivery)
                .build()?;
            let object = OpenOptions::new().memory(&space, bytes as u64)?;
            let options = MapOptions::new().fault_around(FaultAround::Off);
            touch(args, &mut sys::map_object_mut(&options, &object)?)?
        }
    };
    figures.print();
    Ok(0)
}

/// Touches all pages by all threads.
fn touch<T: From<u8> + Send>(args: &FaultsArgs, area: &mut [T]) -> Result<FaultFigures> {
    let page_len = PAGE_BYTES / size_of::<T>();
    let pages = area.len() / page_len / args.threads;
    let (ready, go) = (&Barrier::new(args.threads + 1), &Barrier::new(args.threads + 1));
    thread::scope(|scope| {
        let spawn = |(index, slice): (usize, _)| {
            scope.spawn(move || {
                if args.place.pins_faulting() {
                    pin_to_nth_cpu(index);
                }
                // What the times go into is there before the first touch.
                let (order, mut times_ns) = (shuffled(pages, index as u64 + 1), vec![1; pages]);
                ready.wait();
                go.wait();
                let started = Instant::now();
                touch_in_order(slice, page_len, &order, args.think_us, &mut times_ns);
                (started, Instant::now(), times_ns)
            })
        };
        let threads: Vec<_> =
            area.chunks_exact_mut(pages * page_len).enumerate().map(spawn).collect();
        ready.wait();
        let awaited = args.expect_handlers.map_or(Ok(()), wait_for_handlers);
        let before = sys::used();
        go.wait();
        let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let after = sys::used();
        awaited?;
        let ended: Result<Vec<_>, _> = ended.into_iter().collect();
        let ended = ended.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        let first = ended.iter().map(|(started, ..)| started).min().context("no thread")?;
        let last = ended.iter().map(|(_, over, _)| over).max().context("no thread")?;
        let wall = last.duration_since(*first);
        let times_ns = ended.into_iter().flat_map(|(.., times_ns)| times_ns).collect();
        Ok(FaultFigures::new(wall, &before, &after, times_ns))
    })
}

fn touch_in_order<T: From<u8>>(
    slice: &mut [T],
    page_len: usize,
    order: &[u32],
    think_us: u64,
    times_ns: &mut [u32],
) {
    for (&page, time_ns) in order.iter().zip(times_ns) {
        let before = Instant::now();
        *black_box(&mut slice[page as usize * page_len]) = T::from(1);
        *time_ns = u32::try_from(before.elapsed().as_nanos()).unwrap_or(u32::MAX);
        compute(think_us);
    }
}

/// Computes for so long, and never sleeps.
pub(crate) fn compute(time_us: u64) {
    if time_us > 0 {
        let started = Instant::now();
        while started.elapsed() < Duration::from_micros(time_us) {
            std::hint::spin_loop();
        }
    }
}

/// Waits until exactly so many threads serve faults for Quire. A thread has its name once it runs.
fn wait_for_handlers(expected: usize) -> Result<()> {
    let started = Instant::now();
    loop {
        let found = threads_named("quire-fault");
        if found == expected {
            return Ok(());
        }
        ensure!(
            started.elapsed() < SETTLE_MAX,
            "the process has {found} handlers, and not {expected}"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of this process by their name.
fn threads_named(name: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}

/// Serves the faults of an area, in threads that end with the process, or where they are taken.
fn serve(args: &FaultsArgs, area: &mut [u64]) -> Result<()> {
    ensure!(
        args.descriptors > 0 && args.handlers >= args.descriptors,
        "every descriptor has a thread at least"
    );
    ensure!((1..=BATCH_MAX).contains(&args.batch), "a read brings 1 to {BATCH_MAX} messages");
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
    let features = if args.by == By::Signal { UFFD_FEATURE_SIGBUS } else { 0 };
    let mut uffds: Vec<&'static Uffd> = Vec::new();
    for _ in 0..args.descriptors {
        let uffd = Box::leak(Box::new(Uffd::closed()));
        uffd.open(device.as_ref().map(|device| device.as_raw_fd()), features)
            .context("cannot open a userfaultfd; `quire doctor` says why")?;
        uffds.push(uffd);
    }
    for (number, stripe) in stripes(args, area).into_iter().enumerate() {
        let (start, len) = (stripe.as_ptr().addr(), size_of_val(stripe));
        uffds[number % uffds.len()].register(start, len, UFFDIO_REGISTER_MODE_MISSING)?;
    }
    if args.by == By::Signal {
        return Ok(sys::serve_by_signal(uffds[0], args.work_us)?);
    }
    let (place, batch, work_us) = (args.place, args.batch, args.work_us);
    for number in 0..args.handlers {
        let (descriptor, nth) = (number % uffds.len(), number / uffds.len());
        let uffd = uffds[descriptor];
        thread::spawn(move || {
            if let Some(cpu) = place.cpu(descriptor, nth) {
                pin_to_nth_cpu(cpu);
            }
            never_preempt();
            serve_one(uffd, batch, work_us)
        });
    }
    Ok(())
}

/// The shares of the descriptors: as many as there are threads that fault, each thread's pages in one,
/// but at least one for each descriptor where any thread may run anywhere.
fn stripes<'a>(args: &FaultsArgs, area: &'a [u64]) -> Vec<&'a [u64]> {
    let page_len = PAGE_BYTES / size_of::<u64>();
    let pages = area.len() / page_len;
    let is_by_thread = matches!(args.place, LoopCpus::Same | LoopCpus::Other);
    let least = if is_by_thread { 1 } else { args.descriptors };
    let count = args.threads.max(least).min(pages);
    let mut rest = area;
    let cut = |number| {
        let share = pages * (number + 1) / count - pages * number / count;
        let (stripe, after) = rest.split_at(share * page_len);
        rest = after;
        stripe
    };
    (0..count).map(cut).collect()
}

/// A loop's thread: reads messages and copies a page of zeros for each.
fn serve_one(uffd: &Uffd, batch: usize, work_us: u64) {
    let mut messages = sys::no_messages::<BATCH_MAX>();
    while let Ok(count) = sys::read_faults(uffd, &mut messages[..batch]) {
        for message in &messages[..count] {
            compute(work_us);
            let address = sys::fault_address(message) & !(PAGE_BYTES - 1);
            let copied = uffd.copy(address, sys::ZEROS.as_ptr().addr(), PAGE_BYTES, false);
            if copied.error.is_some() {
                // It is there already: its thread waits for nothing.
                uffd.wake(address, PAGE_BYTES);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: FaultsArgs,
    }

    fn args(line: &str) -> FaultsArgs {
        Line::parse_from(["faults"].into_iter().chain(line.split(' '))).args
    }

    #[test]
    fn every_page_is_touched_once_and_timed() {
        let args = args("--threads 3 --pages 24");
        let mut area = vec![0u64; 24 * PAGE_BYTES / 8];
        let figures = touch(&args, &mut area).unwrap();
        let touched = area.chunks(PAGE_BYTES / 8).filter(|page| page[0] == 1);
        assert_eq!((touched.count(), area.iter().sum::<u64>()), (24, 24));
        assert!(figures.us_a_fault > 0.0 && figures.p99_us > 0.0, "{figures:?}");
    }

    #[test]
    fn threads_are_counted_by_the_name_that_they_have() {
        let (named, over) = (&Barrier::new(3), &Barrier::new(3));
        thread::scope(|scope| {
            for _ in 0..2 {
                let builder = thread::Builder::new().name("counted-here".into());
                let wait = || {
                    named.wait();
                    over.wait();
                };
                builder.spawn_scoped(scope, wait).unwrap();
            }
            named.wait();
            let found = threads_named("counted-here");
            over.wait();
            assert_eq!((found, threads_named("counted-nowhere")), (2, 0));
        });
    }

    #[test]
    fn stripes_cover_the_area_and_are_the_threads_own_where_there_are_enough() {
        let area = vec![0u64; 24 * PAGE_BYTES / 8];
        for (line, lens) in [
            ("--threads 1 --pages 24", vec![24]),
            ("--threads 1 --pages 24 --descriptors 4", vec![6; 4]),
            ("--threads 5 --pages 24 --descriptors 2", vec![4, 5, 5, 5, 5]),
            ("--threads 1 --pages 24 --descriptors 2 --place same", vec![24]),
        ] {
            let stripes = stripes(&args(line), &area);
            let found: Vec<_> = stripes.iter().map(|s| s.len() * 8 / PAGE_BYTES).collect();
            assert_eq!(found, lens, "{line}");
            assert_eq!(stripes.concat().len(), area.len(), "{line}");
        }
    }

    #[test]
    fn a_loop_serves_whatever_its_threads_descriptors_and_batches() {
        for line in [
            "--handlers 1",
            "--handlers 3 --place any",
            "--handlers 4 --descriptors 2 --place same",
            "--handlers 2 --descriptors 2 --place other",
            "--handlers 2 --batch 16 --work-us 1",
        ] {
            let args = args(&format!("--threads 3 --pages 96 --by loop {line}"));
            let mut area = Mapping::new(96 * PAGE_BYTES).unwrap();
            area.one_page_a_fault().unwrap();
            serve(&args, area.words()).unwrap();
            touch(&args, area.words()).unwrap();
            assert_eq!(area.words().iter().sum::<u64>(), 96, "{line}");
            // Its handlers still wait for faults of it: they end with the process.
        }
    }
}
