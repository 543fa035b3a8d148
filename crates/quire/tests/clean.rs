//! Pages that were read and not written since: they keep what they have in store, and go without
//! a move and without being stored again.

mod common;

use std::sync::atomic::Ordering;

use common::real::Engine;
use common::{Machine, Tree, noise};
use quire::control::Event;
use quire::fault::Outcome;
use quire::mmu::Access;
use quire::page::{Flags, State};
use quire::scratch::Scratch;
use quire::space::Advice;
use quire::space::remap::Placement;
use quire::units::{PAGE_SIZE, PageNum, PageRange};

const PAGES: usize = 64;

fn is_clean(machine: &Machine, page: PageNum) -> bool {
    machine.word(page).has(Flags::CLEAN)
}

/// Pages that were stored and read again.
fn read_again(tree: Tree) -> (Machine, PageRange) {
    let machine = Machine::new(tree);
    let range = machine.map(0, PAGES);
    machine.fill_all(range);
    // One of a single pattern, whose word keeps the pattern.
    // SAFETY: the test has one thread.
    unsafe { *machine.mmu().try_access(range.start, true).unwrap().unwrap() = [7; PAGE_SIZE] };
    machine.advise(range, Advice::PageOut);
    for page in range.pages() {
        machine.content(page).unwrap();
    }
    (machine, range)
}

fn expect_all(machine: &Machine, range: PageRange) {
    assert_eq!(machine.content(range.start).unwrap(), [7; PAGE_SIZE]);
    machine.expect_all(PageRange { start: range.start.add(1), ..range });
}

#[test]
fn pages_that_were_only_read_go_without_a_move_and_without_packing() {
    let (machine, range) = read_again(Tree::default());
    assert!(range.pages().all(|page| is_clean(&machine, page)));
    machine.space.check();
    let packed = machine.counted(Event::Zswpout);
    machine.unmapped();
    let evicted = machine.evict(range);
    assert_eq!((evicted.freed, evicted.unmapped), (PAGES, 0));
    assert_eq!(machine.unmapped(), (1, PAGES as u64), "one call for one run");
    assert_eq!(machine.counted(Event::Zswpout), packed);
    assert_eq!(machine.state(range.start), State::Same);
    assert_eq!(machine.state(range.start.add(1)), State::Pool);
    machine.space.check();
    expect_all(&machine, range);
}

#[test]
fn a_page_that_cannot_be_protected_is_mapped_and_keeps_nothing_in_store() {
    let machine = Machine::new(Tree::default());
    let range = machine.map(0, PAGES);
    machine.fill_all(range);
    machine.advise(range, Advice::PageOut);
    machine.mmu().refuse_protection();
    machine.expect_all(range);
    assert!(range.pages().all(|page| machine.word(page).stored().is_none()));
    machine.space.check();
}

#[test]
fn without_batches_every_clean_page_is_a_call() {
    let (machine, range) = read_again(Tree { is_batched: false, ..Tree::default() });
    machine.unmapped();
    machine.evict(range);
    assert_eq!(machine.unmapped(), (PAGES as u64, PAGES as u64));
    expect_all(&machine, range);
}

#[test]
fn a_write_ends_it_and_nothing_is_lost() {
    let (machine, range) = read_again(Tree::default());
    for page in [range.start, range.start.add(9), range.start.add(40)] {
        machine.fill(page, 1 << 40);
        assert!(!is_clean(&machine, page));
        assert_eq!(machine.word(page).stored(), None);
    }
    machine.space.check();
    machine.advise(range, Advice::PageOut);
    for page in [range.start, range.start.add(9), range.start.add(40)] {
        machine.expect(page, 1 << 40);
        machine.fill(page, page.0 + 1);
    }
    machine.expect_all(range);
    machine.space.check();
}

/// What is not shared any more has to be packed once more for this process alone: a family of processes
/// would soon have nothing in common.
#[test]
fn a_fault_beside_packed_pages_that_a_fork_shares_leaves_them_shared() {
    const FOLIO: usize = 16;
    for access in [Access::Read, Access::Write] {
        let (machine, range) = read_again(Tree { folio_order: 4, ..Tree::default() });
        machine.evict(range);
        machine.fork();
        let written = || range.pages().skip(3).step_by(FOLIO);
        written().for_each(|page| machine.fill(page, page.0 + 1));
        machine.advise(range, Advice::PageOut);
        let mut scratch = Scratch::new().unwrap();
        for page in written() {
            assert_eq!(machine.space.handle_fault(page, access, &mut scratch), Outcome::Served);
        }
        // The first page's word has all that there is of it.
        let mut shared = range.pages().skip(1).filter(|page| page.0 as usize % FOLIO != 3);
        assert!(shared.all(|page| machine.word(page).stored().is_some()), "after {access:?}");
        expect_all(&machine, range);
    }
}

#[test]
fn a_write_among_clean_pages_that_a_fork_shares_ends_the_sharing_of_its_own_page_alone() {
    let (machine, range) = read_again(Tree { folio_order: 4, ..Tree::default() });
    machine.evict(range);
    machine.fork();
    expect_all(&machine, range);
    let packed = PageRange { start: range.start.add(1), ..range };
    assert!(packed.pages().all(|page| is_clean(&machine, page)));
    let is_written = |page: &PageNum| page.0 % 16 == 3;
    packed.pages().filter(is_written).for_each(|page| machine.fill(page, page.0 + 1));
    for page in packed.pages() {
        assert_eq!(machine.word(page).stored().is_some(), !is_written(&page), "{page:?}");
    }
}

#[test]
fn a_clean_page_that_goes_while_its_writer_waits_comes_back_writable() {
    let (machine, range) = read_again(Tree::default());
    let page = range.start.add(9);
    let mut scratch = Scratch::new().unwrap();
    // The fault was sent while the page was there.
    machine.evict(range);
    let outcome = machine.space.handle_fault(page, Access::WriteProtected, &mut scratch);
    assert_eq!(outcome, Outcome::Served);
    assert!(!is_clean(&machine, page), "the same fault would come again");
    machine.expect_all(PageRange::new(page, 1));
    machine.space.check();
}

#[test]
fn a_stream_of_writes_takes_few_faults() {
    let (machine, range) = read_again(Tree::default());
    let faults = machine.counted(Event::Pgfault);
    range.pages().for_each(|page| machine.fill(page, page.0 + 77));
    let faults = machine.counted(Event::Pgfault) - faults;
    assert!(faults < 10, "{faults} faults for {PAGES} pages");
    machine.space.check();
    machine.advise(range, Advice::PageOut);
    range.pages().for_each(|page| machine.expect(page, page.0 + 77));
}

#[test]
fn a_thread_that_writes_what_it_reads_is_soon_left_alone() {
    let (machine, range) = read_again(Tree { folio_order: 0, ..Tree::default() });
    let mut noticed = 0;
    for round in 0..40 {
        machine.advise(range, Advice::PageOut);
        for page in range.pages() {
            machine.content(page).unwrap();
            noticed += usize::from(round > 4 && is_clean(&machine, page));
            machine.fill(page, page.0 + 1);
        }
    }
    assert!(noticed < 40 * PAGES / 8, "{noticed} faults for nothing");
    machine.space.check();
}

#[test]
fn scattered_clean_pages_among_others_go_in_their_own_way() {
    let (machine, range) = read_again(Tree { folio_order: 0, ..Tree::default() });
    for page in range.pages().step_by(3) {
        machine.fill(page, page.0 + 1);
    }
    let dirty = range.pages().step_by(3).count();
    machine.unmapped();
    // Not by folios of that order.
    let control = machine.space.budget().control();
    control.folio_order.store(Tree::default().folio_order, Ordering::Relaxed);
    let evicted = machine.evict(range);
    assert_eq!((evicted.freed, evicted.unmapped), (PAGES - dirty, dirty));
    let runs_of_clean_pages = 21;
    let calls = (runs_of_clean_pages + 1, PAGES as u64);
    assert_eq!(machine.unmapped(), calls, "all others go by one move over the holes");
    machine.space.check();
    machine.expect_all(range);
}

#[test]
fn tracked_writes_are_still_told() {
    let (machine, range) = read_again(Tree::default());
    machine.space.track_writes(&mut machine.space.lock(), range).unwrap();
    machine.fill(range.start.add(3), 1);
    machine.advise(range, Advice::PageOut);
    for page in range.pages() {
        machine.content(page).unwrap();
        assert_eq!(machine.space.is_written(page), page == range.start.add(3), "{page:?}");
    }
    machine.space.check();
}

#[test]
fn a_clean_page_can_be_moved_freed_and_unmapped() {
    let (machine, range) = read_again(Tree::default());
    let target = PageNum(1024);
    {
        let mut layout = machine.space.lock();
        let old = PageRange::new(range.start, PAGES / 2);
        machine.space.remap(&mut layout, old, PAGES / 2, Placement::At(target)).unwrap();
    }
    machine.space.check();
    assert_eq!(machine.content(target).unwrap(), [7; PAGE_SIZE]);
    (1..PAGES as u64 / 2).for_each(|at| machine.expect(PageNum(target.0 + at), at + 1));
    // What was moved can be written unnoticed: what it kept must not come back.
    machine.fill(target.add(5), 99);
    machine.advise(PageRange::new(target, PAGES / 2), Advice::PageOut);
    machine.expect(target.add(5), 99);
    let rest = PageRange { start: range.start.add(PAGES / 2), end: range.end };
    machine.advise(PageRange::new(rest.start, 8), Advice::Free);
    machine.space.check();
    machine.advise(PageRange::new(rest.start, 16), Advice::DontNeed);
    machine.space.check();
    machine.space.unmap(&mut machine.space.lock(), rest).unwrap();
    machine.space.check();
}

/// More noise than fits, so that most of it is in the file.
fn machine_with_noise(segments: u32) -> (Machine, PageRange) {
    let machine = Machine::new(Tree { budget_pages: 512, segments, ..Tree::default() });
    let range = machine.map(0, 1024);
    range.pages().for_each(|page| machine.fill_with_noise(page));
    (machine, range)
}

#[test]
fn what_is_read_from_the_file_keeps_its_place_there() {
    let (machine, range) = machine_with_noise(64);
    let read_all = || {
        for page in range.pages() {
            assert_eq!(machine.content(page).unwrap(), noise(page), "{page:?}");
        }
    };
    // After the first round all of it is in the file, but for what stays in memory.
    read_all();
    read_all();
    let written = machine.counted(Event::Zswpwb);
    read_all();
    read_all();
    let more = machine.counted(Event::Zswpwb) - written;
    assert!(more < 200, "{more} of {} pages were written again", 2 * range.len());
    machine.space.check();
    // The first write gives the place up.
    for page in range.pages().take(64) {
        machine.content(page).unwrap();
    }
    let page = range.pages().find(|&page| machine.word(page).has(Flags::IN_FILE)).unwrap();
    machine.fill(page, 5);
    assert_eq!(machine.word(page).stored(), None);
    machine.advise(range, Advice::PageOut);
    machine.expect(page, 5);
    machine.space.check();
}

#[test]
fn a_full_file_gets_back_the_places_of_pages_in_memory() {
    // 1024 pages of noise are 17 segments; a budget of 512 keeps some of them in memory.
    let (machine, range) = machine_with_noise(64);
    let control = machine.space.budget().control();
    // The first pages are in the file by now.
    for page in range.pages().take(128) {
        assert_eq!(machine.content(page).unwrap(), noise(page), "{page:?}");
    }
    let kept = range.pages().filter(|&page| machine.word(page).has(Flags::IN_FILE)).count();
    assert!(kept > 64, "{kept} pages keep their places");
    // From now on there is no segment left.
    let used = control.segments_used.load(Ordering::Relaxed);
    control.segments_max.store(used, Ordering::Relaxed);
    for round in 0..4 {
        for page in range.pages() {
            assert_eq!(machine.content(page).unwrap(), noise(page), "{page:?} in round {round}");
        }
    }
    assert_eq!(machine.counted(Event::Pgpoison), 0);
    machine.space.check();
}

#[test]
fn what_a_bare_call_dropped_reads_as_zeros() {
    let Some(engine) = Engine::start(Tree::default(), 4096) else { return };
    let (range, start) = engine.map(PAGES);
    // SAFETY: mapped for us, as large.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, PAGES * PAGE_SIZE) };
    bytes.chunks_exact_mut(PAGE_SIZE).enumerate().for_each(|(at, page)| {
        page.iter_mut().zip(0..).for_each(|(byte, n)| *byte = (n % 100 + at) as u8);
    });
    engine.settle(range);
    engine.space.advise(&mut engine.space.lock(), range, Advice::PageOut).unwrap();
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert!(sum > 0);
    engine.settle(range);
    // Where faults take long, as on busy CPUs, not all of them keep their copies.
    let is_clean = |at| engine.space.snapshot(range.start.add(at)).has(Flags::CLEAN);
    let first = (0..=PAGES - 8).find(|&first| (first..first + 8).all(is_clean));
    let dropped = first.map(|first| first..first + 8).expect("eight clean pages side by side");
    // SAFETY: the range is ours.
    unsafe {
        let address = start.add(PAGE_SIZE * dropped.start).cast();
        rustix::mm::madvise(address, PAGE_SIZE * 8, rustix::mm::Advice::LinuxDontNeed).unwrap();
    }
    engine.space.advise(&mut engine.space.lock(), range, Advice::PageOut).unwrap();
    for (at, page) in range.pages().enumerate() {
        let has_content = engine.space.snapshot(page).state() != State::None;
        assert_eq!(has_content, !dropped.contains(&at), "page {at}");
    }
    for (at, page) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
        let is_dropped = dropped.contains(&at);
        let wanted = |n: usize| if is_dropped { 0 } else { (n % 100 + at) as u8 };
        assert!(page.iter().enumerate().all(|(n, &byte)| byte == wanted(n)), "page {at}");
    }
}
