//! The engine on the real MMU, with real threads, for all that the simulator cannot show.

mod common;

use std::sync::atomic::Ordering;

use common::Tree;
use common::real::Engine;
use quire::control::{Event, FaultKind};
use quire::mmu::{Mmu as _, Prot};
use quire::page::State;
use quire::reclaim::Reclaimer;
use quire::scratch::Scratch;
use quire::space::Advice;
use quire::space::remap::Placement;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageRange};
use quire_simulated::Generator;

/// Writes and reads a word of a page.
fn word(memory: *mut u8, page: usize, at: usize) -> *mut u64 {
    // SAFETY: callers stay inside of what they mapped.
    unsafe { memory.add(page * PAGE_SIZE + at % (PAGE_SIZE / 8) * 8).cast() }
}

#[test]
fn a_whole_folio_leaves_the_program_in_one_call() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(BLOCK_PAGES);
    for page in 0..range.len() {
        // SAFETY: mapped above.
        unsafe { word(memory, page, page).write_volatile(page as u64 + 1) };
    }
    engine.settle(range);
    let budget = engine.space.budget();
    let before = [Event::UnmapCalls, Event::UnmapPages].map(|event| budget.counted(event));
    let mut scratch = Scratch::new().unwrap();
    let evicted = engine.space.evict_range(range, Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.unmapped, evicted.refused), (BLOCK_PAGES, 0));
    assert_eq!(budget.counted(Event::UnmapCalls) - before[0], 1);
    assert_eq!(budget.counted(Event::UnmapPages) - before[1], BLOCK_PAGES as u64);
    let faults = budget.counted(Event::Pgfault);
    for page in 0..range.len() {
        // SAFETY: mapped above.
        assert_eq!(unsafe { word(memory, page, page).read_volatile() }, page as u64 + 1);
    }
    assert!(budget.counted(Event::Pgfault) - faults < 40, "limbo comes back in large folios");
}

#[test]
fn faults_are_timed_and_say_whose_they_were() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(BLOCK_PAGES);
    let member = engine.space.budget().member();
    // SAFETY: mapped above.
    unsafe { word(memory, 0, 0).write_volatile(1) };
    let other = memory.addr() + PAGE_SIZE * (range.len() / 2);
    let thread = std::thread::spawn(move || {
        // SAFETY: as above.
        unsafe { std::ptr::with_exposed_provenance_mut::<u64>(other).write_volatile(1) };
        quire::sys::thread::thread_id()
    });
    let thread = thread.join().unwrap();
    assert_eq!(engine.last_thread.load(Ordering::SeqCst), thread, "it was another thread's fault");
    // The time is noted after the answer.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let timed = || member.fault_times(FaultKind::Fresh);
    while timed().iter().sum::<u64>() < 2 {
        assert!(std::time::Instant::now() < deadline, "{:?}", timed());
        std::thread::yield_now();
    }
    let times = timed();
    assert_eq!(times[..7].iter().sum::<u64>(), 0, "no fault is served in 128 ns");
}

/// Moving a page that another process has as well would take it away from both.
#[test]
fn pages_that_a_child_shares_stay_until_they_are_made_our_own() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(32);
    for page in 0..range.len() {
        // SAFETY: mapped above.
        unsafe { word(memory, page, 0).write_volatile(page as u64 + 1) };
    }
    let shared = PageRange::new(range.start.add(8), 4);
    let mmu = &engine.space.mmu().0;
    mmu.set_inherited(shared, true).unwrap();
    let number = linux_raw_sys::general::__NR_fork;
    // SAFETY: the child makes no other call than exit, so that it needs nothing of ours.
    let pid = unsafe { quire::sys::call::syscall(number, [0; 6]) }.unwrap();
    if pid == 0 {
        // SAFETY: ends this process.
        let _ =
            unsafe { quire::sys::call::syscall(linux_raw_sys::general::__NR_exit_group, [0; 6]) };
    }
    let pid = rustix::process::Pid::from_raw(pid as i32);
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
    mmu.set_inherited(shared, false).unwrap();
    engine.settle(range);
    let mut scratch = Scratch::new().unwrap();
    let evicted = engine.space.evict_range(range, Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.unmapped, evicted.refused), (28, 4));
    for page in range.pages() {
        let expected = if shared.contains(page) { State::Mapped } else { State::Limbo };
        assert_eq!(engine.space.snapshot(page).state(), expected);
    }
    for page in 0..range.len() {
        // SAFETY: mapped above; written, the pages are our own again.
        unsafe {
            assert_eq!(word(memory, page, 0).read_volatile(), page as u64 + 1);
            word(memory, page, 1).write_volatile(1);
        }
    }
    engine.settle(range);
    let evicted = engine.space.evict_range(range, Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.unmapped, evicted.refused), (32, 0));
}

/// A child that has a range as well, and makes no call that needs anything of ours: it looks at it and
/// writes to it until it is told to end.
struct Sharer {
    pid: rustix::process::Pid,
    /// 1: to end, with 0 where every word was right.
    order: &'static std::sync::atomic::AtomicU32,
}

impl Sharer {
    /// Forks while page `n` of the range says `n + 1` in its first word; in the child each other word
    /// is the child's own.
    fn new(engine: &'static Engine, range: PageRange, memory: *mut u8) -> Sharer {
        let flags = rustix::mm::MapFlags::SHARED;
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping, never undone.
        let order: &std::sync::atomic::AtomicU32 = unsafe {
            let page = rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_SIZE, prot, flags);
            &*page.unwrap().cast()
        };
        let mut layout = engine.space.lock();
        let charged = engine.space.prepare_fork(&mut layout).unwrap();
        // What the child holds is not charged here.
        engine.space.budget().uncharge(charged);
        let mmu = &engine.space.mmu().0;
        mmu.open_pagemap();
        mmu.set_inherited(range, true).unwrap();
        let number = linux_raw_sys::general::__NR_fork;
        // SAFETY: the child calls nothing but `live`, which makes no call that needs ours.
        let pid = unsafe { quire::sys::call::syscall(number, [0; 6]) }.unwrap();
        if pid == 0 {
            Self::live(order, range, memory);
        }
        mmu.set_inherited(range, false).unwrap();
        Sharer { pid: rustix::process::Pid::from_raw(pid as i32).unwrap(), order }
    }

    fn live(order: &std::sync::atomic::AtomicU32, range: PageRange, memory: *mut u8) -> ! {
        let mut wrong = false;
        for round in 1.. {
            let is_last = order.load(Ordering::SeqCst) == 1;
            for page in 0..range.len() {
                // SAFETY: mapped by the caller, with a page everywhere.
                unsafe {
                    wrong |= word(memory, page, 0).read_volatile() != page as u64 + 1;
                    // Every other page stays shared.
                    let own = word(memory, page, 1);
                    wrong |= own.read_volatile() != if page % 2 == 0 { round - 1 } else { 0 };
                    if page % 2 == 0 {
                        own.write_volatile(round);
                    }
                }
            }
            if is_last || wrong {
                break;
            }
        }
        let number = linux_raw_sys::general::__NR_exit_group;
        loop {
            // SAFETY: ends this process.
            let _ =
                unsafe { quire::sys::call::syscall(number, [usize::from(wrong), 0, 0, 0, 0, 0]) };
        }
    }

    fn end(self) {
        self.order.store(1, Ordering::SeqCst);
        let options = rustix::process::WaitOptions::empty();
        let (_, status) = rustix::process::waitpid(Some(self.pid), options).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0), "the child saw another's bytes: {status:?}");
    }
}

#[test]
fn what_a_living_child_shares_goes_by_copy_and_moves_again_when_the_child_is_gone() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(64);
    for page in 0..range.len() {
        // SAFETY: mapped above.
        unsafe { word(memory, page, 0).write_volatile(page as u64 + 1) };
    }
    engine.settle(range);
    let child = Sharer::new(engine, range, memory);
    let mut scratch = Scratch::new().unwrap();
    let half = |first: usize| PageRange::new(range.start.add(first), 32);
    let evicted = engine.space.evict_range(half(0), Reclaimer::Advice, &mut scratch);
    // What it has written to is its own copy by now, and ours is shared with no process.
    assert_eq!((evicted.unmapped + evicted.freed, evicted.refused), (32, 0));
    assert!(evicted.freed >= 16, "{evicted:?}");
    child.end();
    // To make them our own may fault: a handler leaves that to the background thread.
    for _ in 0..2 {
        let evicted = engine.space.evict_range(half(32), Reclaimer::Direct, &mut scratch);
        assert_eq!((evicted.unmapped, evicted.freed), (0, 0));
    }
    let calls = engine.space.budget().counted(Event::UnmapCalls);
    let evicted = engine.space.evict_range(half(32), Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (32, 0, 0));
    let calls = engine.space.budget().counted(Event::UnmapCalls) - calls;
    assert_eq!(calls, 2, "made our own together, and moved together");
    for page in 0..range.len() {
        // SAFETY: mapped above.
        assert_eq!(unsafe { word(memory, page, 0).read_volatile() }, page as u64 + 1);
    }
}

/// A call that the engine does not see: it learns of it where it moves or reads the page, or the page is touched.
#[test]
fn what_the_program_drops_by_a_bare_call_is_zeros_wherever_its_page_was_to_go() {
    const PAGES: usize = 64;
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let space = &engine.space;
    let mut scratch = Scratch::new().unwrap();
    let filled = || {
        let (range, memory) = engine.map(PAGES);
        for page in 0..PAGES {
            // SAFETY: mapped above.
            unsafe { word(memory, page, 0).write_volatile(page as u64 + 1) };
        }
        engine.settle(range);
        (range, memory)
    };
    let drop_some = |memory: *mut u8| {
        for page in (0..PAGES).step_by(3) {
            // SAFETY: a page of what is mapped.
            let dropped = unsafe {
                libc::madvise(memory.add(page * PAGE_SIZE).cast(), PAGE_SIZE, libc::MADV_DONTNEED)
            };
            assert_eq!(dropped, 0);
        }
    };
    let check_with = |memory: *mut u8, has_dropped: bool| {
        for page in 0..PAGES {
            let is_dropped = has_dropped && page % 3 == 0;
            let expected = if is_dropped { 0 } else { page as u64 + 1 };
            // SAFETY: mapped above.
            assert_eq!(unsafe { word(memory, page, 0).read_volatile() }, expected, "page {page}");
        }
    };
    let check = |memory: *mut u8| check_with(memory, true);
    let dropped = PAGES.div_ceil(3);

    let (range, memory) = filled();
    drop_some(memory);
    let held = space.budget().held();
    let evicted = space.evict_range(range, Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (PAGES - dropped, dropped, 0));
    assert_eq!(held - space.budget().held(), dropped, "its memory is not held any more");
    check(memory);
    // All the way to swap, where what is in limbo is read.
    drop_some(memory);
    space.advise(&mut space.lock(), range, Advice::PageOut).unwrap();
    check(memory);

    // What may not be written is read where it is, by the thread that has its lock.
    let (range, memory) = filled();
    space.protect(&mut space.lock(), range, Prot::READ).unwrap();
    check_with(memory, false);
    engine.settle(range);
    drop_some(memory);
    let evicted = space.evict_range(range, Reclaimer::Advice, &mut scratch);
    assert_eq!((evicted.freed, evicted.refused), (PAGES, 0));
    check(memory);

    // And it is not moved to another address.
    let (range, memory) = filled();
    drop_some(memory);
    let (target, there) = engine.map(PAGES);
    space.remap(&mut space.lock(), range, PAGES, Placement::At(target.start)).unwrap();
    check(there);
}

/// They are dropped after their lock holder has looked if they are there.
#[test]
fn who_touches_pages_with_their_locks_is_answered_where_the_program_has_just_dropped_some() {
    let Some(engine) = Engine::start(Tree::default(), 8 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(8);
    for page in 0..range.len() {
        // SAFETY: mapped above.
        unsafe { word(memory, page, 0).write_volatile(page as u64 + 1) };
    }
    engine.settle(range);
    let locked: Vec<_> = range.pages().map(|page| engine.space.lock_page(page)).collect();
    // SAFETY: what is mapped, all of it but the first and the last page.
    let dropped =
        unsafe { libc::madvise(memory.add(PAGE_SIZE).cast(), 6 * PAGE_SIZE, libc::MADV_DONTNEED) };
    assert_eq!(dropped, 0);
    let mmu = engine.space.mmu();
    let mut bytes = [9; PAGE_SIZE];
    assert!(!mmu.read(range.start.add(1), &mut bytes), "nothing is there, and nobody waits");
    assert!(mmu.read(range.start, &mut bytes) && bytes[0] == 1);
    assert_eq!(mmu.make_exclusive(range).refusal, None);
    assert!(mmu.read(range.start.add(1), &mut bytes) && bytes == [0; PAGE_SIZE]);
    locked.into_iter().for_each(|page| page.unlock());
    for page in 0..range.len() {
        let expected = [1, 0, 0, 0, 0, 0, 0, 8][page];
        // SAFETY: mapped above.
        assert_eq!(unsafe { word(memory, page, 0).read_volatile() }, expected, "page {page}");
    }
}

/// Threads that each own a part of every page, with four times as much memory as there is budget,
/// while a thread changes rights and gives advice.
#[test]
fn threads_find_their_own_words_while_pages_come_and_go() {
    const THREADS: usize = 3;
    const PAGES: usize = 8192;
    let tree = Tree { budget_pages: 2048, segments: 256, ..Tree::default() };
    let Some(engine) = Engine::start(tree, 64 * BLOCK_PAGES) else { return };
    let (range, memory) = engine.map(PAGES);
    let address = memory as usize;
    // Half of each page does not pack, so that the swap file is needed.
    let mut generator = Generator::new(1);
    for (page, at) in (0..PAGES).flat_map(|page| (256..512).map(move |at| (page, at))) {
        // SAFETY: mapped above.
        unsafe { word(memory, page, at).write_volatile(generator.next_u64()) };
    }
    let end = std::time::Instant::now() + std::time::Duration::from_secs(4);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let memory = address as *mut u8;
                let mut generator = Generator::new(thread as u64);
                let mut oracle = vec![0u64; PAGES];
                let mut at = 0;
                while std::time::Instant::now() < end {
                    // A scan, or anywhere.
                    let page =
                        if generator.one_in(3) { generator.below(PAGES) } else { at % PAGES };
                    at += 1;
                    let place = word(memory, page, thread * 80 + page % 50);
                    // SAFETY: mapped above, and this thread's own word.
                    unsafe {
                        assert_eq!(place.read_volatile(), oracle[page], "page {page}");
                        if generator.one_in(2) {
                            oracle[page] = generator.next_u64();
                            place.write_volatile(oracle[page]);
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            let mut generator = Generator::new(99);
            while std::time::Instant::now() < end {
                let start = generator.below(PAGES - 600);
                let part = PageRange::new(range.start.add(start), 1 + generator.below(600));
                let advices = [Advice::Cold, Advice::PageOut, Advice::WillNeed];
                let advice = advices[generator.below(advices.len())];
                let mut layout = engine.space.lock();
                engine.space.advise(&mut layout, part, advice).unwrap();
                let tracked = PageRange::new(part.start, part.len().min(40));
                engine.space.track_writes(&mut layout, tracked).unwrap();
            }
        });
    });
    let control = engine.space.budget().control();
    let most = control.held_pages_max.load(Ordering::Relaxed);
    assert!(most <= tree.budget_pages as u64, "{most} pages were held");
    // A range that loses its rights and gets them back has what it had.
    let mut layout = engine.space.lock();
    engine.space.protect(&mut layout, range, Prot::NONE).unwrap();
    engine.space.advise(&mut layout, range, Advice::PageOut).unwrap();
    engine.space.protect(&mut layout, range, Prot::READ_WRITE).unwrap();
    drop(layout);
    let counted = |event| engine.space.budget().counted(event);
    println!(
        "{} faults, {} unmapped in {} calls, {} written, {} read from the file",
        counted(Event::Pgfault),
        counted(Event::UnmapPages),
        counted(Event::UnmapCalls),
        counted(Event::Zswpwb),
        counted(Event::Pgmajfault),
    );
}
