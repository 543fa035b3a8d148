//! The cost of counting an event, noting a time, and leaving a trace, in nanoseconds:
//! `cargo bench -p quire --bench counting`. Run it on an idle machine.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/raw_thread.rs"]
mod raw_thread;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use common::{Tree, control};
use quire::control::{Event, FaultKind, Trace, Tracepoint};
use quire::sys::clock::Moment;
use raw_thread::Raw;

const TRACE: Trace = Trace {
    time_ns: 0,
    tracepoint: Tracepoint::SpfVmaChanged,
    thread: 1,
    address: 1 << 40,
    vma_start: 1 << 40,
    vma_end: 1 << 41,
};

/// Least of many short runs, in nanoseconds: what else the machine does drops out.
fn least_ns(act: impl Fn(u64)) -> f64 {
    const TIMES: u64 = 20_000;
    let start = Instant::now();
    let mut least = f64::MAX;
    while start.elapsed().as_millis() < 500 {
        let start = Instant::now();
        (0..TIMES).for_each(&act);
        least = least.min(start.elapsed().as_nanos() as f64 / TIMES as f64);
    }
    least
}

/// What it takes two threads that do it at once, each for itself: of many short runs that begin
/// together the median, as the least is of two that missed each other.
fn median_ns_of_two(act: impl Fn(u64) + Sync) -> f64 {
    const TIMES: u64 = 20_000;
    const RUNS: usize = 501;
    let ready = AtomicU32::new(0);
    let runs = || {
        let run = |at: usize| {
            // Spins: a thread that slept here would only go on when the other has finished.
            ready.fetch_add(1, Ordering::SeqCst);
            while ready.load(Ordering::SeqCst) < 2 * (at as u32 + 1) {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            (0..TIMES).for_each(&act);
            start.elapsed().as_nanos() as f64 / TIMES as f64
        };
        let mut all: Vec<f64> = (0..RUNS).map(run).collect();
        all.sort_by(f64::total_cmp);
        all[RUNS / 2]
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(runs);
        f64::midpoint(runs(), other.join().unwrap())
    })
}

fn main() {
    // SAFETY: never unmapped.
    let tree = unsafe { control(Tree::default()).as_ref() };
    let member = &tree.members[0];
    let shared = [const { AtomicU64::new(0) }; 8];
    let add = |at: u64| {
        shared[at as usize % 4].fetch_add(1, Ordering::Relaxed);
    };
    let count = |_: u64| member.count(Event::Pgfault, 1);
    let note = |at: u64| member.count_fault_time(FaultKind::Fresh, at);
    println!(
        "one array of atomics: {:.1} ns, two threads {:.1}",
        least_ns(add),
        median_ns_of_two(add)
    );
    println!("any thread: {:.1} ns, two threads {:.1}", least_ns(count), median_ns_of_two(count));
    println!("a time, any thread: {:.1} ns", least_ns(note));
    let of_engine = |numbers: &[usize]| {
        let raws: Vec<_> = numbers.iter().map(|_| Raw::new(member, 10_000_000)).collect();
        raws.iter().zip(numbers).for_each(|(raw, &number)| raw.start(number));
        raws.iter().map(|raw| raw.join() as f64 / raw.times as f64).fold(f64::MAX, f64::min)
    };
    let least = |numbers: &[usize]| (0..8).map(|_| of_engine(numbers)).fold(f64::MAX, f64::min);
    println!("engine's thread: {:.1} ns, two threads {:.1}", least(&[0]), least(&[0, 1]));
    let clock = least_ns(|_| {
        std::hint::black_box(Moment::now().elapsed_ns());
    });
    println!("both ends of a time: {clock:.1} ns");
    let kernel = least_ns(|_| {
        std::hint::black_box(quire::sys::monotonic_ns());
    });
    println!("the kernel's clock, once: {kernel:.1} ns");
    let ring = &tree.traces[0];
    println!("a trace: {:.1} ns", least_ns(|at| ring.push(&Trace { time_ns: at, ..TRACE })));
}
