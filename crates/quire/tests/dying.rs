//! Unmaps that drop their pages outside of the space's lock, on the real MMU, and what other
//! threads do meanwhile.
//! A failpoint stops the unmap once its pages are gone, before its VMA is.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::Tree;
use common::real::Engine;
use quire::failpoint::{self, Failpoint};
use quire::mmu::Prot;
use quire::space::Advice;
use quire::sys::Errno;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

const PAGES: usize = 64;

/// After this time a thread counts as waiting.
const LONG: Duration = Duration::from_millis(100);
/// After this time the test gives up: something is wrong.
const END: Duration = Duration::from_secs(20);

/// What the failpoint does, and whose turn it is: the process has it once.
struct Stop {
    is_closed: Arc<AtomicBool>,
    /// Unmaps that have come by.
    came: Arc<AtomicUsize>,
    _turn: MutexGuard<'static, ()>,
}

impl Stop {
    fn new() -> Stop {
        static ONE: Mutex<()> = Mutex::new(());
        let turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (is_closed, came) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
        let (closed, count) = (is_closed.clone(), came.clone());
        let stop = move |_: PageNum| {
            count.fetch_add(1, Ordering::SeqCst);
            while closed.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        failpoint::set(Failpoint::Dropped, Some(Box::new(stop)));
        Stop { is_closed, came, _turn: turn }
    }

    fn wait_for(&self, unmaps: usize) {
        wait_until(|| self.came.load(Ordering::SeqCst) >= unmaps);
    }

    fn open(&self) {
        self.is_closed.store(false, Ordering::SeqCst);
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.open();
        failpoint::set(Failpoint::Dropped, None);
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + END;
    while !is_so() {
        assert!(Instant::now() < end, "it never comes");
        std::thread::yield_now();
    }
}

/// What a thread does, with its result.
fn begin<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, result) = channel();
    std::thread::spawn(move || sender.send(act()));
    result
}

fn must_wait<T: std::fmt::Debug>(result: &Receiver<T>) {
    assert_eq!(result.recv_timeout(LONG).unwrap_err(), RecvTimeoutError::Timeout);
}

/// A range that is dying.
struct Rig {
    engine: &'static Engine,
    range: PageRange,
    memory: usize,
    stop: Stop,
    unmapper: JoinHandle<Result<(), Errno>>,
}

impl Rig {
    fn new() -> Option<Rig> {
        let engine = Engine::start(Tree::default(), 8 * BLOCK_PAGES)?;
        // As under `quire run`: rights stay.
        engine.space.keep_rights(BLOCK_PAGES);
        let (range, memory) = map_and_fill(engine, PAGES);
        let stop = Stop::new();
        let unmapper = std::thread::spawn(move || unmap(engine, range));
        stop.wait_for(1);
        Some(Rig { engine, range, memory, stop, unmapper })
    }

    fn part(&self) -> PageRange {
        PageRange::new(self.range.start.add(10), 5)
    }

    /// Ends the unmap.
    fn end(self) {
        self.stop.open();
        assert_eq!(self.unmapper.join().unwrap(), Ok(()));
    }

    /// After the end; and that nothing is left behind it.
    fn end_and_check(self) {
        let (engine, range) = (self.engine, self.range);
        self.end();
        assert!(!engine.space.is_mapped(&engine.space.lock(), range));
        assert_eq!(engine.space.budget().member().managed_pages.load(Ordering::SeqCst), 0);
        engine.settle(range);
        wait_until(|| engine.space.budget().member().wanted_pages.load(Ordering::SeqCst) == 0);
    }
}

fn map_and_fill(engine: &Engine, pages: usize) -> (PageRange, usize) {
    let (range, memory) = engine.map(pages);
    for page in 0..pages {
        // SAFETY: mapped just now.
        unsafe { memory.add(page * PAGE_SIZE).write_volatile(page as u8 + 1) };
    }
    engine.settle(range);
    (range, memory as usize)
}

fn unmap(engine: &Engine, range: PageRange) -> Result<(), Errno> {
    engine.space.unmap_and_unlock(engine.space.lock_over(&[range]), range)
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
fn a_map_over_a_dying_range_waits_and_gets_fresh_pages() {
    let Some(rig) = Rig::new() else { return };
    let (engine, part) = (rig.engine, rig.part());
    let at = rig.memory + 10 * PAGE_SIZE;
    let mapped = begin(move || {
        let mut layout = engine.space.lock_over(&[part]);
        engine.space.map_fixed(&mut layout, part, Prot::READ_WRITE).unwrap();
        drop(layout);
        // SAFETY: mapped just now.
        unsafe {
            let before = (at as *const u8).read_volatile();
            (at as *mut u8).write_volatile(77);
            before
        }
    });
    must_wait(&mapped);
    rig.end();
    assert_eq!(mapped.recv_timeout(END), Ok(0));
    // SAFETY: mapped by the other thread.
    assert_eq!(unsafe { (at as *const u8).read_volatile() }, 77, "the unmap took what came later");
    assert_eq!(engine.space.budget().member().managed_pages.load(Ordering::SeqCst), 5);
}

#[test]
fn a_protect_of_a_part_of_a_dying_range_waits_and_finds_nothing() {
    let Some(rig) = Rig::new() else { return };
    let (engine, part) = (rig.engine, rig.part());
    let protected = begin(move || {
        let mut layout = engine.space.lock_over(&[part]);
        engine.space.protect(&mut layout, part, Prot::READ)
    });
    must_wait(&protected);
    rig.end_and_check();
    assert_eq!(protected.recv_timeout(END), Ok(Err(Errno::NOMEM)));
}

#[test]
fn an_unmap_of_a_part_of_a_dying_range_waits_and_has_nothing_to_do() {
    let Some(rig) = Rig::new() else { return };
    let (engine, part) = (rig.engine, rig.part());
    let unmapped = begin(move || unmap(engine, part));
    must_wait(&unmapped);
    rig.end_and_check();
    assert_eq!(unmapped.recv_timeout(END), Ok(Ok(())));
}

/// A fork needs the lock with nothing dying anywhere.
#[test]
fn a_call_on_the_whole_space_waits_for_all_unmaps_and_no_other_begins_meanwhile() {
    let Some(rig) = Rig::new() else { return };
    let engine = rig.engine;
    let (other, _) = map_and_fill(engine, PAGES);
    let locked = begin(move || {
        let arena = engine.space.arena();
        let layout = engine.space.lock_over(&[arena]);
        engine.space.is_mapped(&layout, other)
    });
    must_wait(&locked);
    // It is done under the lock, which no thread holds.
    assert_eq!(begin(move || unmap(engine, other)).recv_timeout(END), Ok(Ok(())));
    assert_eq!(rig.stop.came.load(Ordering::SeqCst), 1);
    rig.end_and_check();
    assert_eq!(locked.recv_timeout(END), Ok(false));
}

#[test]
fn a_touch_of_a_dying_range_waits_and_is_refused() {
    let Some(rig) = Rig::new() else { return };
    let at = rig.memory + 3 * PAGE_SIZE;
    for is_classic in [0, 1] {
        rig.engine.space.budget().control().no_speculation.store(is_classic, Ordering::SeqCst);
        let read = begin(move || read_own_memory(at, &mut 0));
        must_wait(&read);
        if is_classic == 1 {
            rig.end_and_check();
            assert_eq!(read.recv_timeout(END), Ok(false));
            return;
        }
    }
}

/// More than are remembered by their pages.
#[test]
fn however_many_touch_a_dying_range_all_are_refused() {
    let Some(rig) = Rig::new() else { return };
    let readers: Vec<_> = (0..100)
        .map(|at| rig.memory + at % PAGES * PAGE_SIZE + at)
        .map(|at| begin(move || read_own_memory(at, &mut 0)))
        .collect();
    must_wait(&readers[99]);
    rig.end_and_check();
    readers.iter().for_each(|read| assert_eq!(read.recv_timeout(END), Ok(false)));
}

#[test]
fn beside_a_dying_range_maps_faults_and_unmaps_go_on() {
    let Some(rig) = Rig::new() else { return };
    let (engine, dying) = (rig.engine, rig.range);
    for is_classic in [0, 1] {
        engine.space.budget().control().no_speculation.store(is_classic, Ordering::SeqCst);
        let done = begin(move || {
            let hint = dying.start.add(4);
            let start = {
                let mut layout = engine.space.lock();
                engine.space.map(&mut layout, Some(hint), 8, Prot::READ_WRITE).unwrap()
            };
            let range = PageRange::new(start, 8);
            let at = engine.space.mmu().0.address(start) as *mut u8;
            for page in 0..8 {
                // SAFETY: mapped just now.
                unsafe { at.add(page * PAGE_SIZE).write_volatile(1) };
            }
            let mut layout = engine.space.lock_over(&[range]);
            engine.space.protect(&mut layout, range, Prot::READ).unwrap();
            engine.space.advise(&mut layout, range, Advice::DontNeed).unwrap();
            engine.space.unmap_and_unlock(layout, range).unwrap();
            range.intersect(dying).is_empty()
        });
        assert_eq!(done.recv_timeout(END), Ok(true), "it waits, or lies in what is dying");
    }
    rig.end_and_check();
}

#[test]
fn a_range_with_holes_and_other_rights_dies_as_one() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    engine.space.keep_rights(BLOCK_PAGES);
    let (range, memory) = map_and_fill(engine, PAGES);
    unmap(engine, PageRange::new(range.start.add(20), 4)).unwrap();
    let read_only = PageRange::new(range.start.add(40), 4);
    engine.space.protect(&mut engine.space.lock(), read_only, Prot::READ).unwrap();
    let stop = Stop::new();
    let middle = PageRange { start: range.start.add(2), end: range.end };
    let unmapper = std::thread::spawn(move || unmap(engine, middle));
    stop.wait_for(1);
    let hole = range.start.add(21);
    let start = {
        let mut layout = engine.space.lock();
        engine.space.map(&mut layout, Some(hole), 1, Prot::READ_WRITE).unwrap()
    };
    assert!(!middle.contains(start), "another mapping is in the hole");
    assert_eq!(engine.space.budget().member().managed_pages.load(Ordering::SeqCst), 61);
    stop.open();
    assert_eq!(unmapper.join().unwrap(), Ok(()));
    assert_eq!(engine.space.budget().member().managed_pages.load(Ordering::SeqCst), 3);
    // SAFETY: the first two pages are mapped still.
    assert_eq!(unsafe { (memory as *const u8).add(PAGE_SIZE).read_volatile() }, 2);
    for page in [2, 21, 40, PAGES - 1] {
        assert!(!read_own_memory(memory + page * PAGE_SIZE, &mut 0), "page {page}");
    }
}

#[test]
fn a_few_pages_are_dropped_under_the_lock() {
    let tree = Tree { folio_order: 0, ..Tree::default() };
    let Some(engine) = Engine::start(tree, 8 * BLOCK_PAGES) else { return };
    let stop = Stop::new();
    stop.open();
    for (used, came) in [(8, 0), (9, 1)] {
        let (range, _) = engine.map(PAGES);
        let at = engine.space.mmu().0.address(range.start) as *mut u8;
        for page in 0..used {
            // SAFETY: mapped just now.
            unsafe { at.add(page * 7 * PAGE_SIZE).write_volatile(1) };
        }
        engine.settle(range);
        unmap(engine, range).unwrap();
        assert_eq!(stop.came.load(Ordering::SeqCst), came, "{used} pages");
    }
}

#[test]
fn to_unmap_nothing_in_the_middle_of_a_mapping_changes_nothing() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = map_and_fill(engine, PAGES);
    let nothing = PageRange::new(range.start.add(10), 0);
    assert_eq!(unmap(engine, nothing), Ok(()));
    assert_eq!(engine.space.unmap(&mut engine.space.lock(), nothing), Ok(()));
    // SAFETY: mapped.
    assert_eq!(unsafe { (memory as *const u8).add(10 * PAGE_SIZE).read_volatile() }, 11);
}
