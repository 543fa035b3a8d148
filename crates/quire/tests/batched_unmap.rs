//! Batched unmapping: each test tells the story of a way in which it has gone wrong elsewhere.

mod common;

use common::{Machine, Tree};
use std::sync::atomic::Ordering;

use quire::control::Event;
use quire::failpoint::Failpoint;
use quire::mmu::{Inspect, Mmu as _, Prot};
use quire::page::{Flags, State};
use quire::reclaim::Evicted;
use quire::space::Advice;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::Trap;

fn pages(start: u64, count: usize) -> PageRange {
    PageRange::new(PageNum(start), count)
}

/// A machine with a range of `count` written pages from `start` on.
fn machine_with(start: u64, count: usize) -> (Machine, PageRange) {
    let machine = Machine::new(Tree::default());
    let range = machine.map(start, count);
    machine.fill_all(range);
    machine.unmapped();
    (machine, range)
}

#[test]
fn a_whole_folio_goes_in_one_call() {
    let (machine, range) = machine_with(512, BLOCK_PAGES);
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (BLOCK_PAGES, 0));
    assert_eq!(machine.unmapped(), (1, BLOCK_PAGES as u64));
    machine.space.check();
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn without_batches_every_page_is_a_call() {
    let machine = Machine::new(Tree { is_batched: false, ..Tree::default() });
    let range = machine.map(0, 48);
    machine.fill_all(range);
    machine.unmapped();
    machine.evict(range);
    assert_eq!(machine.unmapped(), (48, 48));
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn folios_of_one_page_are_advised_out_page_by_page() {
    let machine = Machine::new(Tree { folio_order: 0, ..Tree::default() });
    let range = machine.map(0, 32);
    machine.fill_all(range);
    assert_eq!(machine.counted(Event::Pgfault), 32, "no page comes along");
    machine.unmapped();
    machine.advise(range, Advice::PageOut);
    assert_eq!(machine.unmapped(), (32, 32));
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn folios_of_16_pages_are_advised_out_16_at_a_time() {
    let machine = Machine::new(Tree { folio_order: 4, ..Tree::default() });
    let range = machine.map(0, 64);
    machine.fill_all(range);
    machine.unmapped();
    machine.advise(range, Advice::PageOut);
    assert_eq!(machine.unmapped(), (4, 64));
    machine.expect_all(range);
}

/// A restore after a failure made a mixed batch all writable, and two processes wrote one page.
#[test]
fn a_page_that_is_not_exclusive_stays_alone_and_keeps_what_it_had() {
    let (machine, range) = machine_with(0, 32);
    let shared = PageNum(13);
    machine.mmu().share(shared);
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (31, 1));
    assert_eq!(machine.counted(Event::UnmapRefused), 1);
    assert_eq!(machine.unmapped(), (2, 31), "before it, and behind it");
    for page in range.pages() {
        let expected = if page == shared { State::Mapped } else { State::Limbo };
        assert_eq!(machine.state(page), expected);
    }
    let mapping = machine.mmu().mapping(shared);
    assert!(mapping.is_present && !mapping.is_write_protected);
    assert_eq!(mapping.prot, Some(Prot::READ_WRITE));
    machine.space.check();
    machine.expect_all(range);
}

/// After a fork: what the child has too goes by copy, and nothing is made only to be moved.
#[test]
fn what_another_process_has_since_a_fork_goes_by_copy_and_the_rest_by_move() {
    let (machine, range) = machine_with(0, 64);
    machine.fork();
    let shared = pages(9, 30);
    shared.pages().for_each(|page| machine.mmu().share(page));
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (34, 30, 0));
    for page in range.pages() {
        let expected = if shared.contains(page) { State::Pool } else { State::Limbo };
        assert_eq!(machine.state(page), expected, "{page:?}");
    }
    machine.space.check();
    machine.expect_all(range);
    // What came back is shared with no process, and clean.
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (34, 30, 0));
    machine.space.check();
    machine.expect_all(range);
}

/// No protected page is made our own: the kernel would send that fault to the thread that asks for it.
#[test]
fn a_tracked_page_that_another_process_has_goes_by_copy_and_is_still_tracked() {
    let (machine, range) = machine_with(0, 8);
    machine.fork();
    let shared = pages(2, 3);
    shared.pages().for_each(|page| machine.mmu().share(page));
    machine.space.track_writes(&mut machine.space.lock(), range).unwrap();
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (5, 3, 0));
    machine.expect_all(range);
    assert!(range.pages().all(|page| !machine.space.is_written(page)));
    machine.space.check();
}

#[test]
fn a_pinned_page_stays_after_a_fork_too() {
    let (machine, range) = machine_with(0, 16);
    machine.fork();
    machine.mmu().share(PageNum(7));
    let pin = machine.mmu().pin(PageNum(8)).unwrap();
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (14, 1, 1));
    assert_eq!(machine.state(PageNum(8)), State::Mapped);
    machine.mmu().unpin(pin);
    machine.space.check();
    machine.expect_all(range);
}

#[test]
fn a_pinned_page_in_the_middle_keeps_its_place_and_what_the_kernel_writes_there() {
    let (machine, range) = machine_with(0, 16);
    let middle = PageNum(8);
    let pin = machine.mmu().pin(middle).unwrap();
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (15, 1));
    // SAFETY: the kernel's side of a pinned page; no other thread runs.
    unsafe { (*machine.mmu().pinned_bytes(&pin))[100] = 0x77 };
    assert_eq!(machine.content(middle).unwrap()[100], 0x77);
    machine.mmu().unpin(pin);
    assert_eq!(machine.evict(range).unmapped, 1);
    assert_eq!(machine.content(middle).unwrap()[100], 0x77);
    machine.space.check();
}

#[test]
fn the_first_page_and_the_last_may_be_the_refused_ones() {
    let (machine, range) = machine_with(0, 16);
    let pins = [0, 15].map(|page| machine.mmu().pin(PageNum(page)).unwrap());
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (14, 2));
    machine.space.check();
    pins.into_iter().for_each(|pin| machine.mmu().unpin(pin));
    machine.expect_all(range);
}

/// The engine is not told, and finds nothing at their places in the pool.
#[test]
fn pages_that_the_program_drops_by_a_bare_call_are_gone_from_the_books_with_their_neighbours() {
    let (machine, range) = machine_with(0, 16);
    machine.mmu().unmap(pages(3, 2));
    machine.mmu().unmap(pages(15, 1));
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.freed, evicted.refused), (13, 3, 0));
    machine.space.check();
    for page in range.pages() {
        if [3, 4, 15].contains(&page.0) {
            assert_eq!(machine.content(page).unwrap(), [0; PAGE_SIZE], "{page:?}");
        } else {
            machine.expect(page, page.0 + 1);
        }
    }
    machine.space.check();
}

#[test]
fn pages_of_a_pinned_range_that_became_read_only_stay_until_they_can_move() {
    let (machine, range) = machine_with(0, 16);
    let pin = machine.mmu().pin(PageNum(5)).unwrap();
    machine.protect(range, Prot::READ);
    assert!(machine.word(PageNum(5)).has(Flags::PINNED));
    machine.evict(range);
    // SAFETY: the kernel's side of a pinned page; no other thread runs.
    unsafe { (*machine.mmu().pinned_bytes(&pin))[7] = 0x99 };
    assert_eq!(machine.content(PageNum(5)).unwrap()[7], 0x99, "what the kernel wrote is lost");
    machine.mmu().unpin(pin);
    machine.space.check();
}

/// While it was locked in memory nothing tried to move it, so nothing knew that the kernel held it.
#[test]
fn a_pinned_page_that_was_mlocked_when_its_range_became_read_only_stays_until_it_can_move() {
    let (machine, range) = machine_with(0, 16);
    let (page, all) = (PageNum(5), pages(0, 16));
    machine.space.mlock(&mut machine.space.lock(), all).unwrap();
    let pin = machine.mmu().pin(page).unwrap();
    machine.protect(range, Prot::READ);
    machine.space.munlock(&mut machine.space.lock(), all).unwrap();
    machine.evict(range);
    // SAFETY: the kernel's side of a pinned page; no other thread runs.
    unsafe { (*machine.mmu().pinned_bytes(&pin))[7] = 0x99 };
    assert_eq!(machine.content(page).unwrap()[7], 0x99, "what the kernel wrote is lost");
    machine.mmu().unpin(pin);
    // They go again once a move can tell.
    machine.protect(range, Prot::READ_WRITE);
    assert_eq!(machine.evict(range).unmapped, 16);
    machine.space.check();
}

/// Reclaim looks at a page before it has its lock.
#[test]
fn a_page_that_is_mlocked_or_pinned_just_before_reclaim_locks_it_stays() {
    let (machine, range) = machine_with(0, 2);
    machine.protect(range, Prot::READ);
    for (name, flag) in [("mlocked", Flags::MLOCKED), ("pinned", Flags::PINNED)] {
        range.pages().for_each(|page| machine.expect(page, page.0 + 1));
        let set = |page| machine.space.lock_page(page).set_flags(flag);
        let evicted = common::passing(Failpoint::Evicting, set, || machine.evict(range));
        assert_eq!(evicted, Evicted::default(), "{name}");
        range.pages().for_each(|page| machine.space.lock_page(page).clear_flags(flag));
        assert_eq!(machine.evict(range).freed, 2, "{name}");
    }
    machine.space.check();
}

/// Batches are uniform in write protection, and the bit survives the way out and back.
#[test]
fn a_mixed_run_splits_where_write_protection_changes_and_each_page_gets_its_bit_back() {
    let (machine, range) = machine_with(0, 32);
    let tracked = pages(8, 8);
    machine.space.track_writes(&mut machine.space.lock(), tracked).unwrap();
    let evicted = machine.evict(range);
    assert_eq!(evicted.unmapped, 32);
    assert_eq!(machine.unmapped(), (3, 32));
    machine.space.check();
    for page in range.pages() {
        assert_eq!(machine.is_protected(page), tracked.contains(page), "{page:?} out");
        // A read brings it in; the bit is there before any thread can write.
        machine.expect(page, page.0 + 1);
        let mapping = machine.mmu().mapping(page);
        assert_eq!(mapping.is_write_protected, tracked.contains(page), "{page:?} in");
        assert_eq!(machine.space.is_written(page), !tracked.contains(page));
    }
    machine.fill(PageNum(9), 1);
    assert!(machine.space.is_written(PageNum(9)), "the write was not noticed");
    assert!(!machine.space.is_written(PageNum(10)));
    machine.space.check();
}

#[test]
fn write_protected_pages_batch_too_and_keep_the_bit_through_swap() {
    let (machine, range) = machine_with(0, 64);
    machine.space.track_writes(&mut machine.space.lock(), range).unwrap();
    machine.advise(range, Advice::PageOut);
    assert_eq!(machine.unmapped(), (1, 64));
    assert!(machine.states(range).iter().all(|state| *state == State::Pool));
    for page in range.pages() {
        machine.expect(page, page.0 + 1);
        assert!(machine.mmu().mapping(page).is_write_protected);
        assert!(!machine.space.is_written(page));
    }
    machine.space.check();
}

/// The length of the last round was used in the next: each run is one of the same walk.
#[test]
fn a_short_run_after_a_long_one_takes_no_page_that_is_not_its_own() {
    let (machine, range) = machine_with(0, 64);
    let tracked = pages(40, 3);
    machine.space.track_writes(&mut machine.space.lock(), tracked).unwrap();
    machine.unmapped();
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, machine.unmapped()), (64, (3, 64)), "40, 3 and 21 pages");
    machine.space.check();
    machine.expect_all(range);
    for page in range.pages() {
        let is_protected = machine.mmu().mapping(page).is_write_protected;
        assert_eq!(is_protected, tracked.contains(page), "{page:?}");
    }
}

/// The batch's length came from the folio and ran past the VMA's end.
#[test]
fn a_batch_ends_where_its_vma_ends_in_the_middle_of_a_folio() {
    let (machine, _) = machine_with(0, 10);
    machine.map(10, 6);
    machine.protect(pages(10, 6), Prot::READ);
    for page in pages(10, 6).pages() {
        assert!(machine.content(page).unwrap().iter().all(|byte| *byte == 0));
    }
    machine.unmapped();
    let evicted = machine.evict(pages(0, 16));
    // The read-only part cannot be moved: it goes by copy, and not with the others.
    assert_eq!((evicted.unmapped, evicted.freed), (10, 6));
    assert!(machine.states(pages(0, 10)).iter().all(|state| *state == State::Limbo));
    assert!(machine.states(pages(10, 6)).iter().all(|state| *state == State::Same));
    machine.space.check();
    machine.expect_all(pages(0, 10));
    // Two neighbours with the same rights are one VMA, and go together.
    machine.protect(pages(10, 6), Prot::READ_WRITE);
    machine.fill_all(pages(10, 6));
    machine.unmapped();
    machine.evict(pages(0, 16));
    assert_eq!(machine.unmapped(), (1, 16));
}

/// A frame's books are those of its window: a run that went on into the next one was an index out of bounds.
#[test]
fn what_is_dropped_from_limbo_may_lie_in_two_windows_of_frames() {
    let (machine, range) = machine_with(256, 2 * BLOCK_PAGES);
    for at in (256..).step_by(256).take(4) {
        machine.evict(pages(at, 256));
    }
    let frame = |page| machine.word(PageNum(page)).payload();
    assert_eq!((frame(767), frame(768)), (511, 512), "neighbours in two windows");
    machine.advise(range, Advice::DontNeed);
    assert_eq!(machine.space.frames().limbo(), 0);
    machine.space.check();
}

#[test]
fn nothing_behind_the_end_of_the_mapping_is_touched() {
    let (machine, range) = machine_with(0, 10);
    machine.evict(pages(0, 512));
    assert!(machine.states(pages(10, 502)).iter().all(|state| *state == State::None));
    assert_eq!(machine.content(PageNum(10)), Err(Trap::Segv));
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn holes_inside_a_run_do_not_split_it() {
    let machine = Machine::new(Tree { folio_order: 0, ..Tree::default() });
    let range = machine.map(0, 64);
    for page in range.pages().filter(|page| page.0 % 4 != 1) {
        machine.fill(page, page.0 + 1);
    }
    machine.unmapped();
    // With a fixed order advice evicts folio by folio.
    machine.space.budget().control().folio_order.store(-1, Ordering::Relaxed);
    let evicted = machine.evict(range);
    assert_eq!(evicted.unmapped, 48);
    assert_eq!(machine.unmapped(), (1, 48));
    assert_eq!(machine.state(PageNum(1)), State::None);
    machine.space.check();
    assert!(machine.content(PageNum(1)).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn a_page_that_was_used_since_the_hand_passed_stays_and_its_neighbours_go() {
    let machine = Machine::new(Tree { folio_order: 4, ..Tree::default() });
    let range = machine.map(0, 32);
    // The second write of each folio finds it mapped: only its first page was asked for.
    machine.fill_all(range);
    machine.unmapped();
    let mut scratch = machine.scratch.lock().unwrap();
    let evicted = machine.space.evict_range(range, quire::reclaim::Reclaimer::Kswapd, &mut scratch);
    drop(scratch);
    assert_eq!(evicted.unmapped, 30);
    assert_eq!(machine.unmapped(), (2, 30));
    assert_eq!(machine.state(PageNum(0)), State::Mapped);
    assert_eq!(machine.state(PageNum(16)), State::Mapped);
    machine.space.check();
    machine.expect_all(range);
}

#[test]
fn lazily_freed_folios_are_dropped_without_writing() {
    let (machine, range) = machine_with(0, 32);
    machine.advise(range, Advice::Free);
    assert_eq!(machine.unmapped(), (1, 32));
    machine.advise(range, Advice::PageOut);
    assert_eq!(machine.counted(Event::Pglazyfreed), 32);
    assert_eq!(machine.counted(Event::Pswpout), 0, "nothing is packed or written");
    assert!(machine.states(range).iter().all(|state| *state == State::None));
    for page in range.pages() {
        assert!(machine.content(page).unwrap().iter().all(|byte| *byte == 0));
    }
    machine.space.check();
}

#[test]
fn a_lazily_freed_page_that_is_touched_again_keeps_its_bytes_for_good() {
    let machine = Machine::new(Tree { folio_order: 0, ..Tree::default() });
    let range = machine.map(0, 32);
    machine.fill_all(range);
    machine.advise(range, Advice::Free);
    machine.expect(PageNum(3), 4);
    machine.fill(PageNum(20), 99);
    machine.advise(range, Advice::PageOut);
    assert_eq!(machine.counted(Event::Pglazyfreed), 30);
    machine.expect(PageNum(3), 4);
    machine.expect(PageNum(20), 99);
    for page in range.pages().filter(|page| !matches!(page.0, 3 | 20)) {
        assert!(machine.content(page).unwrap().iter().all(|byte| *byte == 0), "{page:?}");
    }
    machine.space.check();
}

#[test]
fn freeing_lazily_what_is_in_swap_drops_it_at_once() {
    let (machine, range) = machine_with(0, 32);
    machine.advise(range, Advice::PageOut);
    assert!(machine.states(range).iter().all(|state| *state == State::Pool));
    machine.advise(range, Advice::Free);
    assert!(machine.states(range).iter().all(|state| *state == State::None));
    assert_eq!(machine.space.swap().zpool.pages(), 0);
    machine.space.check();
}

#[test]
fn locked_pages_stay_when_their_folio_goes() {
    let (machine, range) = machine_with(0, 32);
    machine.space.mlock(&mut machine.space.lock(), pages(12, 4)).unwrap();
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (28, 0));
    assert!(machine.states(pages(12, 4)).iter().all(|state| *state == State::Mapped));
    machine.space.munlock(&mut machine.space.lock(), pages(12, 4)).unwrap();
    assert_eq!(machine.evict(range).unmapped, 4);
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn a_lost_page_stays_lost_when_its_folio_goes() {
    let machine = Machine::new(Tree::default());
    let (range, lost) = (machine.map(0, 16), PageNum(5));
    let _ = machine.mmu().poison(lost);
    machine.space.lock_page(lost).poison();
    machine.space.budget().add_wanted(1);
    machine.fill_all(pages(0, 5));
    machine.fill_all(pages(6, 10));
    let evicted = machine.evict(range);
    assert_eq!((evicted.unmapped, evicted.refused), (15, 0));
    for _ in 0..2 {
        assert_eq!(machine.state(lost), State::Poisoned);
        assert_eq!(machine.content(lost), Err(Trap::Bus));
    }
    machine.expect_all(pages(0, 5));
    machine.expect_all(pages(6, 10));
    machine.advise(range, Advice::DontNeed);
    assert_eq!(machine.content(lost), Ok([0; PAGE_SIZE]), "what was lost is given up");
    machine.space.check();
}

#[test]
fn pages_without_any_rights_go_by_copy_and_come_back_when_rights_do() {
    let (machine, range) = machine_with(0, 32);
    machine.protect(range, Prot::NONE);
    assert_eq!(machine.content(PageNum(0)), Err(Trap::Segv));
    machine.advise(range, Advice::PageOut);
    assert!(machine.states(range).iter().all(|state| *state == State::Pool));
    machine.space.check();
    machine.protect(range, Prot::READ);
    machine.expect_all(range);
    machine.advise(range, Advice::PageOut);
    machine.protect(range, Prot::READ_WRITE);
    machine.expect_all(range);
    machine.space.check();
}

#[test]
fn pages_go_through_the_swap_file_and_back() {
    let machine = Machine::new(Tree { budget_pages: 512, segments: 64, ..Tree::default() });
    let range = machine.map(0, 2048);
    machine.fill_all(range);
    machine.expect_all(range);
    machine.space.check();
    machine.space.unmap(&mut machine.space.lock(), range).unwrap();
    machine.space.check();
    assert!(machine.states(range).iter().all(|state| *state == State::None));
}
