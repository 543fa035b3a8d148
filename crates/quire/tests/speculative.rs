//! Speculative faults on the real MMU: each reason to give one up, and what must not happen between
//! the last check and the mapping call. A failpoint lets the test step in.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::Tree;
use common::real::Engine;
use quire::control::Event;
use quire::failpoint::{self, Failpoint};
use quire::fault::Outcome;
use quire::mmu::Access;
use quire::mmu::Prot;
use quire::reclaim::Reclaimer;
use quire::scratch::Scratch;
use quire::space::Advice;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

const DOUBTS: [Event; 5] = [
    Event::SpfVmaChanged,
    Event::SpfVmaNoanon,
    Event::SpfVmaNotsup,
    Event::SpfVmaAccess,
    Event::SpfPmdChanged,
];

const ENDED: [Event; 2] = [Event::SpeculativePgfault, Event::FaultClassic];

/// A test's turn with the failpoints, which the process has once.
struct Turn(#[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Turn {
    fn take() -> Turn {
        static ONE: Mutex<()> = Mutex::new(());
        Turn(ONE.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has `act` done the first time that a fault on `page` arrives.
    fn once(&self, place: Failpoint, page: PageNum, act: impl Fn() + Send + Sync + 'static) {
        let is_done = AtomicBool::new(false);
        failpoint::set(
            place,
            Some(Box::new(move |at| {
                if at == page && !is_done.swap(true, Ordering::SeqCst) {
                    act();
                }
            })),
        );
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for place in [Failpoint::Arrived, Failpoint::Prepared, Failpoint::Checked] {
            failpoint::set(place, None);
        }
    }
}

/// An engine with a mapping whose pages hold their number, counted from 1.
struct Rig {
    engine: &'static Engine,
    range: PageRange,
    memory: usize,
    before: Vec<u64>,
}

impl Rig {
    fn new(pages: usize) -> Option<Rig> {
        let tree = Tree { folio_order: 0, ..Tree::default() };
        let engine = Engine::start(tree, 8 * BLOCK_PAGES)?;
        let (range, memory) = engine.map(pages);
        let mut rig = Rig { engine, range, memory: memory as usize, before: Vec::new() };
        for page in 0..pages {
            // SAFETY: mapped above.
            unsafe { rig.at(page).write_volatile(page as u8 + 1) };
        }
        engine.settle(range);
        // A fault is answered a moment before it is counted.
        let ended = || ENDED.map(|event| engine.space.budget().counted(event)).iter().sum::<u64>();
        while ended() < pages as u64 {
            std::thread::yield_now();
        }
        rig.count();
        Some(rig)
    }

    fn at(&self, page: usize) -> *mut u8 {
        (self.memory + page * PAGE_SIZE) as *mut u8
    }

    fn page(&self, page: usize) -> PageNum {
        self.range.start.add(page)
    }

    fn one(&self, page: usize) -> PageRange {
        PageRange::new(self.page(page), 1)
    }

    /// Reads a byte of a page, on a thread that the handlers know as another than the test's.
    fn read(&self, page: usize) -> u8 {
        let at = self.at(page) as usize;
        // SAFETY: callers read what is mapped.
        std::thread::spawn(move || unsafe { (at as *const u8).read_volatile() }).join().unwrap()
    }

    /// Unmaps a page for reclaim: it is in limbo then.
    fn evict(&self, page: usize) {
        self.engine.settle(self.range);
        let mut scratch = Scratch::new().unwrap();
        let evicted =
            self.engine.space.evict_range(self.one(page), Reclaimer::Advice, &mut scratch);
        assert_eq!(evicted.unmapped, 1);
    }

    fn counted(&self, event: Event) -> u64 {
        self.engine.space.budget().counted(event) - self.before[event as usize]
    }

    /// Counts from here on.
    fn count(&mut self) {
        let budget = self.engine.space.budget();
        self.before = Event::ALL.iter().map(|&event| budget.counted(event)).collect();
    }

    /// Checks what is counted of faults that ended in either way, and of each doubt.
    fn must_have(&self, ended: [u64; 2], doubts: [u64; 5]) {
        let end = Instant::now() + Duration::from_secs(10);
        while self.ways() != (ended, doubts) && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(self.ways(), (ended, doubts));
    }

    fn ways(&self) -> ([u64; 2], [u64; 5]) {
        (ENDED.map(|event| self.counted(event)), DOUBTS.map(|event| self.counted(event)))
    }
}

#[test]
fn an_undisturbed_fault_takes_no_lock_of_the_space() {
    let _turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.evict(3);
    // The layout is being changed for as long as this is held.
    let layout = rig.engine.space.lock();
    assert_eq!(rig.read(3), 4);
    drop(layout);
    rig.must_have([1, 0], [0; 5]);
}

#[test]
fn a_vma_that_changes_under_a_fault_sends_it_the_classic_way() {
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.evict(3);
    let (engine, last) = (rig.engine, rig.one(7));
    turn.once(Failpoint::Prepared, rig.page(3), move || {
        engine.space.unmap(&mut engine.space.lock(), last).unwrap();
    });
    assert_eq!(rig.read(3), 4);
    rig.must_have([0, 1], [1, 0, 0, 0, 0]);
}

#[test]
fn a_block_that_is_not_paid_for_yet_sends_its_first_fault_the_classic_way() {
    let _turn = Turn::take();
    let Some(mut rig) = Rig::new(1) else { return };
    let (range, memory) = rig.engine.map(2 * BLOCK_PAGES);
    rig.count();
    for page in [0, 1, 2, BLOCK_PAGES, BLOCK_PAGES + 1] {
        // SAFETY: mapped above.
        unsafe { memory.add(page * PAGE_SIZE).write_volatile(1) };
    }
    rig.engine.settle(range);
    rig.must_have([3, 2], [0, 2, 0, 0, 0]);
}

#[test]
fn what_is_not_ours_sends_a_fault_the_classic_way() {
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.evict(3);
    let (engine, one, at) = (rig.engine, rig.one(3), rig.at(3) as usize);
    turn.once(Failpoint::Arrived, rig.page(3), move || {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let mut layout = engine.space.lock();
        engine.space.map_foreign(&mut layout, one).unwrap();
        let (prot, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: over a page of the test's own.
        unsafe {
            mmap_anonymous(at as *mut _, PAGE_SIZE, prot, flags).unwrap();
            (at as *mut u8).write_volatile(99);
        }
    });
    assert_eq!(rig.read(3), 99, "the foreign page, once the fault is answered");
    rig.must_have([0, 0], [0, 0, 1, 0, 0]);
}

/// Rights are lost and gained again while a fault is on its way: it waits for the end of that, and
/// the access is allowed then, as if it had come later.
#[test]
fn rights_that_are_not_there_send_a_fault_the_classic_way_where_it_waits_for_the_change() {
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.evict(3);
    let (engine, range, at) = (rig.engine, rig.range, rig.at(3) as usize);
    let seen = engine.space.budget().counted(Event::SpfVmaAccess);
    let (locked, has_locked) = std::sync::mpsc::channel();
    let changer = std::thread::spawn(move || {
        has_locked.recv().unwrap();
        let mut layout = engine.space.lock();
        engine.space.protect(&mut layout, range, Prot::READ).unwrap();
        CHANGED.store(true, Ordering::SeqCst);
        let counted = |event| engine.space.budget().counted(event);
        let end = Instant::now() + Duration::from_secs(20);
        while counted(Event::SpfVmaAccess) == seen {
            assert!(Instant::now() < end, "the fault took no notice");
            std::thread::yield_now();
        }
        // The fault is deferred for as long as this lasts.
        std::thread::sleep(Duration::from_millis(20));
        engine.space.protect(&mut layout, range, Prot::READ_WRITE).unwrap();
    });
    static CHANGED: AtomicBool = AtomicBool::new(false);
    turn.once(Failpoint::Arrived, rig.page(3), move || {
        locked.send(()).unwrap();
        while !CHANGED.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    });
    // SAFETY: mapped; writable again before the fault is answered.
    std::thread::spawn(move || unsafe { (at as *mut u8).write_volatile(77) }).join().unwrap();
    changer.join().unwrap();
    assert_eq!(rig.read(3), 77);
    let (_, doubts) = rig.ways();
    assert_eq!((doubts[3], doubts[1] + doubts[2]), (1, 0));
}

#[test]
fn a_page_that_loses_its_bytes_under_a_fault_sends_it_the_classic_way() {
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.evict(3);
    let (engine, one) = (rig.engine, rig.one(3));
    // In limbo it needs no memory; dropped, it does.
    turn.once(Failpoint::Prepared, rig.page(3), move || {
        engine.space.advise(&mut engine.space.lock(), one, Advice::DontNeed).unwrap();
    });
    assert_eq!(rig.read(3), 0);
    rig.must_have([0, 1], [0, 0, 0, 0, 1]);
}

/// The seed's own race: the address is unmapped and mapped again after the last check, so that the
/// old page would land in the new mapping.
#[test]
fn what_is_unmapped_between_the_last_check_and_the_mapping_call_is_never_seen_in_a_new_mapping() {
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    for round in 0..20u64 {
        // SAFETY: mapped by the rig, and again below.
        unsafe { rig.at(3).write_volatile(55) };
        rig.evict(3);
        let (engine, one) = (rig.engine, rig.one(3));
        let (sender, remapper) = std::sync::mpsc::channel();
        let sender = Mutex::new(sender);
        turn.once(Failpoint::Checked, rig.page(3), move || {
            // The lock of the page is held here: the unmapping waits for it.
            let thread = std::thread::spawn(move || {
                let mut layout = engine.space.lock();
                engine.space.unmap(&mut layout, one).unwrap();
                engine.space.map_fixed(&mut layout, one, Prot::READ_WRITE).unwrap();
            });
            std::thread::sleep(Duration::from_millis(round % 4));
            sender.lock().unwrap().send(thread).unwrap();
        });
        let at = rig.at(3) as usize;
        let reader = std::thread::spawn(move || {
            // SAFETY: where nothing is mapped for a moment, the access would be a SIGSEGV: the
            // handler's answer comes after the mapping call, and this thread may be later still.
            let mut byte = 0u8;
            let read = read_own_memory(at, &mut byte);
            read.then_some(byte)
        });
        remapper.recv().unwrap().join().unwrap();
        let seen = reader.join().unwrap();
        assert!(matches!(seen, None | Some(0 | 55)), "{seen:?}");
        assert_eq!(rig.read(3), 0, "the new mapping is fresh");
        turn.once(Failpoint::Checked, PageNum(u64::MAX), || {});
    }
}

/// Reads a byte of this process; `false` where nothing is mapped.
fn read_own_memory(at: usize, into: &mut u8) -> bool {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    // SAFETY: the kernel reads the byte, and says EFAULT where it cannot.
    let byte = unsafe { std::slice::from_raw_parts(at as *const u8, 1) };
    rustix::io::write(&writer, byte).is_ok()
        && rustix::io::read(&reader, std::slice::from_mut(into)).is_ok()
}

#[test]
fn with_the_knob_off_faults_wait_for_the_layout_and_all_else_is_equal() {
    let _turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    let knob = &rig.engine.space.budget().control().no_speculation;
    knob.store(1, Ordering::Relaxed);
    rig.evict(3);
    let layout = rig.engine.space.lock();
    let at = rig.at(3) as usize;
    let (sender, served) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        // SAFETY: mapped.
        sender.send(unsafe { (at as *const u8).read_volatile() }).unwrap();
    });
    assert!(
        served.recv_timeout(Duration::from_millis(100)).is_err(),
        "the layout is being changed"
    );
    drop(layout);
    assert_eq!(served.recv_timeout(Duration::from_secs(20)).unwrap(), 4);
    reader.join().unwrap();
    rig.must_have([0, 1], [0; 5]);
    knob.store(0, Ordering::Relaxed);
    rig.evict(3);
    assert_eq!(rig.read(3), 4);
    rig.must_have([1, 1], [0; 5]);
}

/// The thread's stack may lie there.
#[test]
fn a_thread_that_changes_the_layout_never_waits_for_itself() {
    let _turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.engine.space.budget().control().no_speculation.store(1, Ordering::Relaxed);
    rig.evict(3);
    let layout = rig.engine.space.lock();
    // SAFETY: mapped.
    assert_eq!(unsafe { rig.at(3).read_volatile() }, 4);
    drop(layout);
    rig.must_have([0, 1], [0; 5]);
}

/// The thread does not ask for its number then: the faults that come with one are its own all the same.
#[test]
fn the_only_thread_never_waits_for_itself() {
    static IS_ALONE: AtomicU8 = AtomicU8::new(1);
    let _turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.engine.space.watch_single_threaded(&IS_ALONE);
    rig.evict(3);
    let layout = rig.engine.space.lock();
    let thread = ThreadId(rustix::thread::gettid().as_raw_nonzero().get() as u32);
    let mut scratch = Scratch::new().unwrap();
    let outcome = rig.engine.space.handle_fault_of(
        thread,
        rig.page(3),
        Access::Read,
        Moment::now(),
        &mut scratch,
    );
    assert_eq!(outcome, Outcome::Served, "it waits for the lock that it has");
    drop(layout);
    assert_eq!(rig.read(3), 4);
}

#[test]
fn one_thread_goes_the_classic_way_at_once_and_the_second_may_come_in_the_middle_of_a_fault() {
    static IS_ALONE: AtomicU8 = AtomicU8::new(1);
    let turn = Turn::take();
    let Some(rig) = Rig::new(8) else { return };
    rig.engine.space.watch_single_threaded(&IS_ALONE);
    for page in [1, 2, 3] {
        rig.evict(page);
        assert_eq!(rig.read(page), page as u8 + 1);
    }
    rig.must_have([0, 3], [0; 5]);
    rig.evict(4);
    turn.once(Failpoint::Prepared, rig.page(4), || IS_ALONE.store(0, Ordering::SeqCst));
    assert_eq!(rig.read(4), 5);
    rig.evict(5);
    assert_eq!(rig.read(5), 6);
    rig.must_have([1, 4], [0; 5]);
}
