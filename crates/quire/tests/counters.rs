//! Counters, times and traces: counting in shards loses nothing, a member's slot keeps nothing for the
//! next member, and each fault is timed under its own kind.

mod common;
#[path = "common/raw_thread.rs"]
mod raw_thread;

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use common::{Machine, Tree, control};
use quire::budget::Budget;
use quire::control::shard::ENGINE_SHARDS;
use quire::control::{
    CONTROL_BYTES, Control, Event, FAULT_BUCKETS, FaultKind, TRACES, Trace, TraceRing, Tracepoint,
};
use quire::mmu::Access;
use quire::mmu::Mmu;
use quire::page::State;
use quire::sys::thread::ThreadId;
use quire::units::{PAGE_SIZE, PageNum, PageRange};
use raw_thread::Raw;

fn tree() -> &'static Control {
    // SAFETY: never unmapped.
    unsafe { control(Tree::default()).as_ref() }
}

#[test]
fn what_threads_count_at_the_same_time_adds_up() {
    const TIMES: u64 = 300_000;
    let member = &tree().members[0];
    let engine = [0, 1, 7].map(|number| (number, Raw::new(member, TIMES)));
    for (number, raw) in &engine {
        raw.start(*number);
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..TIMES {
                    member.count(Event::Pswpin, 1);
                }
                member.count_fault_time(FaultKind::Limbo, 1500);
            });
        }
    });
    engine.iter().for_each(|(_, raw)| assert_ne!(raw.join(), 0));
    assert_eq!(member.counted(Event::Pswpin), 7 * TIMES);
    let times = member.fault_times(FaultKind::Limbo);
    assert_eq!((times[10], times.iter().sum::<u64>()), (7, 7));
    assert_eq!(member.counted(Event::Pswpout), 0);
}

/// Its plain additions are right only where no other thread adds.
#[test]
fn a_thread_of_the_engine_has_a_shard_that_no_other_writes() {
    let member = &tree().members[0];
    let raw = Raw::new(member, 10);
    raw.start(3);
    raw.join();
    assert_eq!(member.shards_used.0.load(Ordering::Relaxed), 1 << 3);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| member.count(Event::Pswpin, 1));
        }
    });
    let used = member.shards_used.0.load(Ordering::Relaxed);
    assert_eq!(used & ((1 << ENGINE_SHARDS) - 1), 1 << 3, "another thread's is an engine's");
    let of =
        |shard: usize| member.shards[shard].events[Event::Pswpin as usize].load(Ordering::Relaxed);
    assert_eq!(of(3), 10);
    assert_eq!((ENGINE_SHARDS..member.shards.len()).map(of).sum::<u64>(), 8);
}

#[test]
fn a_slot_that_is_given_away_again_has_nothing_of_its_last_member() {
    let control = tree();
    control.take_slot(70, 100);
    control.take_slot(71, 200);
    for slot in [70, 71] {
        control.members[slot].count(Event::Pgfault, 5);
        control.members[slot].count_fault_time(FaultKind::File, 80_000);
        control.traces[slot].push(&trace(slot as u64));
    }
    let last = control.traces[70].head() - 1;
    assert_eq!(control.traces[70].read(last), Some(trace(70)));
    control.free_slot(70);
    control.take_slot(70, 300);
    let (again, other) = (&control.members[70], &control.members[71]);
    assert_eq!(again.counted(Event::Pgfault), 0);
    assert_eq!(again.fault_times(FaultKind::File), [0; FAULT_BUCKETS]);
    assert_eq!(control.traces[70].read(last), None, "another program's trace");
    control.traces[70].push(&trace(1));
    assert_eq!(control.traces[70].read(control.traces[70].head() - 1), Some(trace(1)));
    assert_eq!(control.traces[70].read(last), None);
    assert_eq!(other.counted(Event::Pgfault), 5);
    assert_eq!(other.fault_times(FaultKind::File).iter().sum::<u64>(), 1);
    assert_eq!(control.traces[71].read(0), Some(trace(71)));
}

#[test]
fn members_are_those_that_have_a_slot() {
    let control = tree();
    let slots = || control.present().map(|(slot, _)| slot).collect::<Vec<_>>();
    assert_eq!(slots(), [0], "the test itself");
    for slot in [63, 64, 255] {
        control.take_slot(slot, 7);
    }
    assert_eq!(slots(), [0, 63, 64, 255]);
    control.members[64].count(Event::Pswpout, 9);
    control.members[255].count(Event::Zswpwb, 4);
    // SAFETY: the control page is never unmapped.
    let budget = unsafe { Budget::new(std::ptr::from_ref(control).cast_mut(), 0) };
    assert_eq!((budget.members(), budget.swap_progress()), (4, 13));
    control.free_slot(64);
    assert_eq!(slots(), [0, 63, 255]);
    assert_eq!((budget.members(), budget.swap_progress()), (3, 4));
}

#[test]
fn a_swap_file_that_waits_for_a_server_is_progress_as_long_as_it_does() {
    let control = tree();
    // SAFETY: the control page is never unmapped.
    let budget = unsafe { Budget::new(std::ptr::from_ref(control).cast_mut(), 0) };
    assert_eq!(budget.swap_progress(), budget.swap_progress());
    control.far.is_on.store(1, Ordering::Relaxed);
    control.far.local.store(8, Ordering::Relaxed);
    let before = budget.swap_progress();
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert_ne!(budget.swap_progress(), before);
    control.far.local_max.store(9, Ordering::Relaxed);
    assert_eq!(budget.swap_progress(), 0);
}

/// Faults of each kind that were timed since the last question.
struct Timed<'a>(&'a Machine, [u64; FaultKind::ALL.len()]);

impl Timed<'_> {
    fn since(&mut self) -> Vec<(FaultKind, u64)> {
        let member = self.0.space.budget().member();
        let now = FaultKind::ALL.map(|kind| member.fault_times(kind).iter().sum::<u64>());
        let before = std::mem::replace(&mut self.1, now);
        let new = FaultKind::ALL.into_iter().zip(now.into_iter().zip(before));
        new.map(|(kind, (now, before))| (kind, now - before)).filter(|&(_, new)| new > 0).collect()
    }
}

#[test]
fn a_fault_is_timed_as_what_it_had_to_do() {
    let machine = Machine::new(Tree { folio_order: 0, segments: 64, ..Tree::default() });
    let mut timed = Timed(&machine, [0; FaultKind::ALL.len()]);
    let range = machine.map(0, 8);
    machine.fill_all(range);
    assert_eq!(timed.since(), [(FaultKind::Fresh, 8)]);
    machine.evict(range);
    assert_eq!(machine.states(range), [State::Limbo; 8]);
    machine.expect_all(range);
    assert_eq!(timed.since(), [(FaultKind::Limbo, 8)]);
    machine.advise(range, quire::space::Advice::PageOut);
    assert_eq!(machine.states(range), [State::Pool; 8]);
    machine.expect_all(range);
    assert_eq!(timed.since(), [(FaultKind::Memory, 8)]);
    // They came back clean, and so write-protected.
    machine.fill_all(range);
    assert_eq!(timed.since(), [(FaultKind::Protected, 8)]);
    let served =
        machine.space.handle_fault(range.start, Access::Read, &mut machine.scratch.lock().unwrap());
    assert_eq!(served, quire::fault::Outcome::Spurious);
    assert_eq!(timed.since(), [(FaultKind::Spurious, 1)]);
    machine.space.check();
}

/// Whether the handler reads by itself, or leaves it to a reader.
#[test]
fn a_fault_that_reads_the_swap_file_is_timed_over_the_read() {
    for turns in [0, 1] {
        let budget_pages = 512;
        let machine =
            Machine::new(Tree { budget_pages, folio_order: 0, segments: 64, ..Tree::default() });
        machine.space.swap().set_turns(turns);
        let range = machine.map(0, 1024);
        range.pages().for_each(|page| machine.fill_with_noise(page));
        let in_file = |page: &PageNum| machine.state(*page) == State::File;
        let page = range.pages().find(in_file).expect("some are in the file");
        let mut timed = Timed(&machine, [0; FaultKind::ALL.len()]);
        timed.since();
        assert_eq!(machine.content(page).unwrap(), common::noise(page));
        assert_eq!(timed.since(), [(FaultKind::File, 1)], "with {turns} turns");
    }
}

#[test]
fn a_tracepoint_is_counted_and_leaves_a_trace_with_the_programs_addresses() {
    let machine = Machine::new(Tree::default());
    let (mmu, budget) = (machine.mmu(), machine.space.budget());
    let vma = PageRange::new(PageNum(16), 32);
    let ring = &budget.control().traces[0];
    for (at, tracepoint) in Tracepoint::ALL.into_iter().enumerate() {
        let before_ns = quire::sys::monotonic_ns();
        machine.space.trace(tracepoint, PageNum(20), vma, ThreadId(4711 + at as u32));
        assert_eq!(ring.head(), at as u64 + 1);
        let trace = ring.read(at as u64).unwrap();
        assert!((before_ns..=quire::sys::monotonic_ns()).contains(&trace.time_ns));
        let expected = Trace {
            time_ns: trace.time_ns,
            tracepoint,
            thread: 4711 + at as u32,
            address: mmu.address_of(PageNum(20)) as u64,
            vma_start: mmu.address_of(PageNum(16)) as u64,
            vma_end: mmu.address_of(PageNum(48)) as u64,
        };
        assert_eq!(trace, expected);
        assert_eq!(expected.vma_end - expected.vma_start, 32 * PAGE_SIZE as u64);
        assert_eq!(budget.counted(tracepoint.event()), 1);
        assert_eq!(Event::by_name(tracepoint.name()), Some(tracepoint.event()));
    }
    let nowhere = PageRange::new(PageNum(20), 0);
    machine.space.trace(Tracepoint::SpfVmaChanged, PageNum(20), nowhere, ThreadId::UNKNOWN);
    let trace = ring.read(Tracepoint::ALL.len() as u64).unwrap();
    assert_eq!((trace.vma_start, trace.vma_end, trace.thread), (0, 0, 0));
    assert_eq!(budget.counted(Event::SpfVmaChanged), 2);
}

/// A trace every part of which tells the number.
fn trace(number: u64) -> Trace {
    Trace {
        time_ns: number,
        tracepoint: Tracepoint::ALL[number as usize % Tracepoint::ALL.len()],
        thread: number as u32 ^ 0x5555,
        address: number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        vma_start: !number,
        vma_end: number.rotate_left(17) ^ 0xff,
    }
}

#[test]
fn a_ring_keeps_the_last_traces_and_says_nothing_of_older_ones() {
    let ring = &tree().traces[0];
    assert_eq!((ring.head(), ring.read(0)), (0, None));
    let all = TRACES as u64 + 10;
    (0..all).for_each(|number| ring.push(&trace(number)));
    assert_eq!(ring.head(), all);
    for number in 0..all {
        assert_eq!(ring.read(number), (number >= 10).then(|| trace(number)));
    }
    assert_eq!(ring.read(all), None, "not written yet");
    assert_eq!(ring.read(u64::MAX / 4), None);
}

#[test]
fn another_process_reads_traces_in_a_mapping_that_it_may_not_write() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let memfd = rustix::fs::memfd_create(c"quire-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, CONTROL_BYTES as u64).unwrap();
    let map = |prot| {
        // SAFETY: new mappings, which are never unmapped; zero is valid for all of a control page.
        unsafe {
            let nowhere = std::ptr::null_mut();
            let place = mmap(nowhere, CONTROL_BYTES, prot, MapFlags::SHARED, memfd.as_fd(), 0);
            &*place.unwrap().cast::<Control>()
        }
    };
    let writer = map(ProtFlags::READ | ProtFlags::WRITE);
    let reader = map(ProtFlags::READ);
    writer.take_slot(5, 1);
    for number in 0..2000 {
        writer.traces[5].push(&trace(number));
        assert_eq!(reader.traces[5].head(), number + 1);
        assert_eq!(reader.traces[5].read(number), Some(trace(number)));
    }
    writer.members[5].count(Event::Fork, 3);
    assert_eq!(reader.members[5].counted(Event::Fork), 3);
    assert_eq!(reader.present().map(|(slot, _)| slot).collect::<Vec<_>>(), [5]);
    let stat = rustix::fs::fstat(&memfd).unwrap();
    assert!(stat.st_blocks < 1024, "a member's counters cost {} KiB", stat.st_blocks / 2);
}

/// A ring so small that writers lap each other all the time.
#[test]
fn no_reader_takes_a_trace_that_was_written_by_two() {
    const WRITERS: u64 = 3;
    const TIMES: u64 = 200_000;
    let ring: TraceRing<AtomicU64, 4> = TraceRing::of(|| AtomicU64::new(0));
    let (start, running) = (Barrier::new(WRITERS as usize + 2), AtomicU32::new(WRITERS as u32));
    let read = std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (ring, start, running) = (&ring, &start, &running);
            scope.spawn(move || {
                start.wait();
                (0..TIMES).for_each(|at| ring.push(&trace(at * WRITERS + writer)));
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let reader = || {
            let mut read = 0u64;
            start.wait();
            while running.load(Ordering::Relaxed) > 0 {
                let head = ring.head();
                for position in head.saturating_sub(5)..head + 1 {
                    if let Some(found) = ring.read(position) {
                        assert_eq!(found, trace(found.time_ns), "torn");
                        read += 1;
                    }
                }
            }
            read
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        readers.map(|reader| reader.join().unwrap()).into_iter().sum::<u64>()
    });
    assert!(read > 1000, "only {read} were read at all");
    assert_eq!(ring.head(), WRITERS * TIMES, "a position was drawn twice");
    for position in ring.head() - 4..ring.head() {
        let found = ring.read(position);
        assert!(found.is_none_or(|found| found == trace(found.time_ns)));
    }
}
