//! Model checking: the trace ring's own code on loom's atomics, with one record, so that every two
//! writers are at the same place.
//!
//! Two threads are checked without a bound, three with at most [`PREEMPTIONS`] preemptions a run.

mod loom_page;

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use quire::control::AtomicWord;
use quire::control::{Trace, TraceRing, Tracepoint};

use self::loom_page::{LoomWord, Unfenced, must_fail};

/// Preemptions of a run with three threads.
const PREEMPTIONS: usize = 2;

type Ring<W> = Arc<TraceRing<W, 1>>;

fn ring() -> Ring<LoomWord> {
    Arc::new(TraceRing::of(|| LoomWord(AtomicU64::new(0))))
}

fn check(threads: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = (threads > 2).then_some(PREEMPTIONS);
    builder.check(test);
}

/// A trace every part of which tells the number.
fn trace(number: u64) -> Trace {
    Trace {
        time_ns: number,
        tracepoint: Tracepoint::ALL[number as usize],
        thread: number as u32,
        address: number,
        vma_start: number,
        vma_end: number,
    }
}

fn expect_whole<W: AtomicWord>(ring: &Ring<W>, position: u64) -> Option<u64> {
    let found = ring.read(position)?;
    assert_eq!(found, trace(found.time_ns), "torn");
    Some(found.time_ns)
}

/// The second trace is written over the first while that is read.
fn one_is_read_while_it_is_written_over<W: AtomicWord + Send + Sync + 'static>(ring: Ring<W>) {
    ring.push(&trace(1));
    let writer = ring.clone();
    let thread = thread::spawn(move || writer.push(&trace(2)));
    assert_ne!(expect_whole(&ring, 0), Some(2), "the trace of another position");
    assert_ne!(expect_whole(&ring, 1), Some(1), "the trace of another position");
    thread.join().unwrap();
    assert_eq!(expect_whole(&ring, 0), None, "it was written over");
    assert_eq!(expect_whole(&ring, 1), Some(2));
}

#[test]
fn a_trace_is_whole_or_not_there_while_it_is_written_over() {
    check(2, || one_is_read_while_it_is_written_over(ring()));
}

#[test]
fn the_model_finds_a_ring_without_fences() {
    must_fail("the_model_finds_a_ring_without_fences", "torn", || {
        check(2, || {
            let word = || Unfenced(LoomWord(AtomicU64::new(0)));
            one_is_read_while_it_is_written_over(Arc::new(TraceRing::of(word)));
        });
    });
}

#[test]
fn two_writers_at_one_record_leave_the_trace_of_one() {
    check(3, || {
        let ring = ring();
        let writers = [1, 2].map(|number| {
            let ring = ring.clone();
            thread::spawn(move || ring.push(&trace(number)))
        });
        let seen = expect_whole(&ring, 0);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert_eq!(ring.head(), 2);
        let left = [0, 1].map(|position| expect_whole(&ring, position));
        assert!(left.iter().flatten().count() == 1, "both were lost, or both are there: {left:?}");
        if let ([Some(first), _], Some(seen)) = (left, seen) {
            assert_eq!(first, seen);
        }
    });
}

#[test]
fn a_slots_next_member_never_shows_what_the_last_one_left() {
    check(2, || {
        let ring = ring();
        ring.push(&trace(1));
        ring.clear();
        let writer = ring.clone();
        let thread = thread::spawn(move || writer.push(&trace(2)));
        assert_eq!(expect_whole(&ring, 0), None);
        thread.join().unwrap();
        assert_eq!([0, 1].map(|position| expect_whole(&ring, position)), [None, Some(2)]);
    });
}
