//! Where pages rest that left memory: what packs in the pool, what does not in the file at once; of the
//! pool's, those go on to the file that left longest ago, after they were packed harder.

mod common;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use common::{Machine, Tree, noise};
use quire::control::{Event, Obituary};
use quire::failpoint::Failpoint;
use quire::mmu::Mmu as _;
use quire::page::{Flags, State};
use quire::reclaim::{Balance, NoCaches};
use quire::scratch::Scratch;
use quire::space::Advice;
use quire::swap::compress::Strength;
use quire::swap::zpool::Handle;
use quire::units::{PAGE_SIZE, PageNum, PageRange};
use quire_simulated::Trap;

const BUDGET: usize = 512;

fn machine() -> Machine {
    Machine::new(Tree { budget_pages: BUDGET, segments: 256, ..Tree::default() })
}

fn fill_with_noise(machine: &Machine, range: PageRange) {
    range.pages().for_each(|page| machine.fill_with_noise(page));
}

fn expect_noise(machine: &Machine, range: PageRange) {
    for page in range.pages() {
        assert!(machine.content(page).unwrap() == noise(page), "{page:?} has other bytes");
    }
}

fn balance(machine: &Machine) -> Balance {
    machine.space.balance(&NoCaches, &mut machine.scratch.lock().unwrap())
}

#[test]
fn little_is_kept_free_until_a_window_finds_too_little() {
    const PAGES: usize = 4096;
    let machine = Machine::new(Tree { budget_pages: PAGES, segments: 1024, ..Tree::default() });
    let range = machine.map(0, 2 * PAGES);
    fill_with_noise(&machine, range);
    // Pages one by one, far from each other: how many are in memory at best.
    let most_in_memory = || {
        let mut most = 0;
        for number in 0..PAGES as u64 {
            let page = PageNum(number * 3079 % (2 * PAGES as u64));
            machine.content(page).unwrap();
            // What the stream before has left in memory takes a while to go.
            if number > PAGES as u64 / 2 {
                let is_in = |state: &&State| matches!(state, State::Mapped | State::Limbo);
                most = most.max(machine.states(range).iter().filter(is_in).count());
            }
        }
        most
    };
    let settle = || while balance(&machine) == Balance::Progress {};
    let boosted = most_in_memory();
    (0..100).for_each(|_| settle());
    let usual = most_in_memory();
    assert!(usual >= boosted + PAGES / 64, "{usual} in memory, {boosted} after a stream");
    // Another stream.
    expect_noise(&machine, range);
    let boosted = most_in_memory();
    assert!(usual >= boosted + PAGES / 64, "{usual} in memory, {boosted} after a stream");
}

/// Letters without repetitions, which LZ4 does not pack and Zstandard does.
fn text(page: PageNum) -> [u8; PAGE_SIZE] {
    noise(page).map(|byte| b'a' + byte % 27)
}

/// A page that packs to about a half.
fn half(page: PageNum) -> [u8; PAGE_SIZE] {
    let mut bytes = noise(page);
    bytes[PAGE_SIZE / 2 - 100..].fill(7);
    bytes
}

#[test]
fn what_does_not_pack_takes_nothing_of_the_budget_once_it_has_left() {
    let machine = machine();
    let range = machine.map(0, 4 * BUDGET);
    fill_with_noise(&machine, range);
    let mut in_memory = 0;
    for part in range.pages().step_by(32) {
        expect_noise(&machine, PageRange::new(part, 32));
        let states = machine.states(range);
        in_memory = in_memory.max(states.iter().filter(|state| **state != State::File).count());
    }
    assert_eq!(machine.counted(Event::Zswpout), 0, "the pool was asked for none of it");
    assert_eq!(machine.space.swap().zpool.pages(), 0);
    // All but the tables, the reserve and what is free up to the high watermark; at its best, because
    // unchanged pages of a block, here most of the budget, go in one call.
    assert!(in_memory * 100 >= BUDGET * 80, "{in_memory} of {BUDGET} pages have content");
    machine.space.check();
}

#[test]
fn what_was_read_and_not_written_goes_again_without_a_write() {
    let machine = machine();
    let range = machine.map(0, 3 * BUDGET);
    fill_with_noise(&machine, range);
    expect_noise(&machine, range);
    let written = machine.counted(Event::Pswpout) - machine.counted(Event::PswpoutClean);
    // In an order in which no stream is seen.
    for step in 0..6 * BUDGET as u64 {
        let page = PageNum(step * 797 % (3 * BUDGET as u64));
        assert!(machine.content(page).unwrap() == noise(page));
    }
    let now = machine.counted(Event::Pswpout) - machine.counted(Event::PswpoutClean);
    assert!(machine.counted(Event::PswpoutClean) > BUDGET as u64);
    // One page in a while is not kept, to see whether that has become better.
    assert!(now - written < BUDGET as u64 * 2, "{} pages were written again", now - written);
    machine.space.check();
}

#[test]
fn a_page_that_is_written_while_its_segment_fills_keeps_what_was_written() {
    let machine = machine();
    let range = machine.map(0, 3 * BUDGET);
    // So few do not pack that a segment is open for long.
    let is_noise = |page: PageNum| page.0.is_multiple_of(32);
    for round in 0..4 {
        for page in range.pages() {
            if is_noise(page) {
                machine.fill_with_noise(page);
            } else {
                machine.fill(page, page.0 + round);
            }
        }
        for page in range.pages().filter(|&page| is_noise(page)) {
            if machine.state(page) == State::Limbo && machine.word(page).has(Flags::WRITEBACK) {
                machine.fill(page, page.0 + 1000 + round);
            }
        }
        for page in range.pages() {
            let content = machine.content(page).unwrap();
            let is_right = if is_noise(page) {
                content == noise(page) || content == common::pattern(page.0 + 1000 + round)
            } else {
                content == common::pattern(page.0 + round)
            };
            assert!(is_right, "{page:?} has other bytes");
        }
        machine.space.check();
    }
}

#[test]
fn where_the_file_fails_pages_that_do_not_pack_stay_in_memory() {
    // One segment is the cleaner's, so nothing can be written at all.
    let machine = Machine::new(Tree { budget_pages: BUDGET, segments: 1, ..Tree::default() });
    let range = machine.map(0, BUDGET / 2);
    fill_with_noise(&machine, range);
    machine.evict(range);
    (0..4).for_each(|_| _ = balance(&machine));
    expect_noise(&machine, range);
    machine.space.check();
}

#[test]
fn text_is_packed_by_zstandard_and_comes_back() {
    let machine = machine();
    machine.space.budget().control().compress.store(Strength::Zstd as u32, Relaxed);
    let range = machine.map(0, 2 * BUDGET);
    for page in range.pages() {
        machine.fill_bytes(page, &text(page));
    }
    for page in range.pages() {
        assert!(machine.content(page).unwrap() == text(page), "{page:?} has other bytes");
    }
    let (pages, bytes) =
        (machine.counted(Event::ZswpoutZstd), machine.counted(Event::ZswpoutZstdBytes));
    assert!(pages > BUDGET as u64 && bytes < pages * PAGE_SIZE as u64 * 2 / 3);
    assert_eq!(pages, machine.counted(Event::Zswpout), "LZ4 has none");
    machine.space.check();
}

#[test]
fn the_pages_that_left_longest_ago_go_to_the_file_first() {
    let machine = machine();
    let (cold, hot) = (machine.map(4096, 2 * BUDGET), machine.map(0, BUDGET / 2 * 3));
    for page in cold.pages().chain(hot.pages()) {
        machine.fill_bytes(page, &half(page));
    }
    for page in (0..6).flat_map(|_| hot.pages()) {
        assert!(machine.content(page).unwrap() == half(page), "{page:?} has other bytes");
    }
    let in_file = |range: PageRange| {
        machine.states(range).iter().filter(|state| **state == State::File).count()
    };
    let packed = |range: PageRange| {
        machine.states(range).iter().filter(|state| **state == State::Pool).count()
    };
    assert!(in_file(cold) > 0, "the pool has its share");
    // On a busy machine packing may seem so dear that the pool is given up.
    let is_given_up = packed(cold) + packed(hot) == 0;
    assert!(
        is_given_up || in_file(hot) * packed(cold) < in_file(cold) * packed(hot),
        "cold: {} in the file, {} packed; hot: {}, {}",
        in_file(cold),
        packed(cold),
        in_file(hot),
        packed(hot)
    );
    for page in cold.pages() {
        assert!(machine.content(page).unwrap() == half(page), "{page:?} has other bytes");
    }
    machine.space.check();
}

#[test]
fn a_page_that_is_asked_for_again_is_counted_by_how_much_left_meanwhile() {
    for (pages, nearest) in [(2 * BUDGET, Event::RefaultHalf), (8 * BUDGET, Event::RefaultTwice)] {
        let machine = machine();
        let range = machine.map(0, pages);
        for page in (0..3).flat_map(|_| range.pages()) {
            machine.fill_with_noise(page);
        }
        let count = machine.counted(Event::WorkingsetRefaultAnon);
        assert!(count > 100, "{count} pages were asked for again");
        let distances = Event::REFAULTS.map(|event| machine.counted(event));
        assert_eq!(distances.iter().sum::<u64>(), count, "each is counted once: {distances:?}");
        // In a loop all of it leaves before a page's turn comes again, but for what the budget holds.
        let nearer = Event::REFAULTS.iter().position(|&event| event == nearest).unwrap();
        let near: u64 = distances[..nearer].iter().sum();
        assert!(near * 10 < count, "{distances:?} in a loop over {pages} pages");
        let near_ns = machine.counted(Event::Refault16thNs);
        assert_eq!(near_ns > 0, distances[0] > 0, "{near_ns} ns of {distances:?}");
    }
}

#[test]
fn a_written_page_is_tried_again() {
    let machine = machine();
    let range = machine.map(0, BUDGET / 4);
    fill_with_noise(&machine, range);
    machine.evict(range);
    balance(&machine);
    machine.fill_all(range);
    machine.evict(range);
    assert!(range.pages().all(|page| !machine.word(page).has(Flags::INCOMPRESSIBLE)));
    machine.expect_all(range);
}

/// Reads a page, or writes to it, while the machine's own scratch may be in use.
fn touch(machine: &Machine, page: PageNum, content: Option<&[u8; PAGE_SIZE]>) {
    let mut scratch = Scratch::new().unwrap();
    loop {
        match machine.mmu().try_access(page, content.is_some()).unwrap() {
            Ok(bytes) => {
                // SAFETY: mapped just now; no other thread runs.
                content.into_iter().for_each(|content| unsafe { *bytes = *content });
                return;
            }
            Err(access) => _ = machine.space.handle_fault(page, access, &mut scratch),
        }
    }
}

/// What a page has after it was changed.
fn changed(page: PageNum) -> [u8; PAGE_SIZE] {
    half(PageNum(page.0 + (1 << 20)))
}

#[test]
fn compaction_leaves_a_page_alone_that_has_changed_since_its_bytes_were_copied() {
    let machine = machine();
    let range = machine.map(0, BUDGET / 2);
    range.pages().for_each(|page| machine.fill_bytes(page, &half(page)));
    machine.advise(range, Advice::PageOut);
    assert!(range.pages().all(|page| machine.state(page) == State::Pool));
    // Slabs with holes, so that there is something to move.
    for page in range.pages().filter(|page| page.0 % 8 < 4) {
        machine.advise(PageRange::new(page, 1), Advice::DontNeed);
    }
    let expected = RefCell::new(HashMap::new());
    let expect = |page: PageNum, bytes| _ = expected.borrow_mut().insert(page, bytes);
    let change = |page: PageNum| match page.0 % 8 {
        4 => touch(&machine, page, None),
        5 => {
            touch(&machine, page, Some(&changed(page)));
            expect(page, changed(page));
        }
        6 => {
            machine.advise(PageRange::new(page, 1), Advice::DontNeed);
            expect(page, [0; PAGE_SIZE]);
        }
        _ => expect(page, half(page)),
    };
    let places = || range.pages().map(|page| machine.word(page).payload()).collect::<Vec<_>>();
    let before = places();
    common::passing(Failpoint::Relocating, change, || machine.space.compact());
    let after = places();
    let expected = expected.borrow();
    for rest in 5..8 {
        assert!(expected.keys().any(|page| page.0 % 8 == rest), "none of {rest} was to be moved");
    }
    let is_moved = |page: &PageNum| before[page.index()] != after[page.index()];
    assert!(expected.keys().filter(|page| page.0 % 8 == 7).all(is_moved), "others are moved");
    machine.space.check();
    for page in range.pages() {
        let never_moved = if page.0 % 8 < 4 { [0; PAGE_SIZE] } else { half(page) };
        let expected = expected.get(&page).unwrap_or(&never_moved);
        assert!(machine.content(page).unwrap() == *expected, "{page:?} has other bytes");
    }
}

#[test]
fn what_is_packed_anew_where_it_was_is_not_what_a_segment_has_of_it() {
    let machine = machine();
    let range = machine.map(0, 4 * BUDGET);
    // The pages that were packed anew, and whether at the place that they had before.
    let again = RefCell::new(HashMap::new());
    let change = |page: PageNum| {
        let before = machine.word(page);
        if before.state() != State::Pool || again.borrow().len() >= 64 {
            return;
        }
        touch(&machine, page, Some(&changed(page)));
        // By a thread that does not write segments, as this one does.
        let (space, page_out) = (&machine.space, (PageRange::new(page, 1), Advice::PageOut));
        let out = || space.advise(&mut space.lock(), page_out.0, page_out.1);
        thread::scope(|scope| scope.spawn(out).join()).unwrap().unwrap();
        again.borrow_mut().insert(page, machine.word(page).payload() == before.payload());
    };
    common::passing(Failpoint::Written, change, || {
        range.pages().for_each(|page| machine.fill_bytes(page, &half(page)));
        (0..16).for_each(|_| _ = balance(&machine));
    });
    let again = again.borrow();
    assert!(again.values().any(|is_same| *is_same), "of {} none lies where it was", again.len());
    for page in range.pages() {
        let expected = if again.contains_key(&page) { changed(page) } else { half(page) };
        assert!(machine.content(page).unwrap() == expected, "{page:?} has other bytes");
    }
    machine.space.check();
}

#[test]
fn a_packed_page_that_was_damaged_in_memory_is_lost_and_named() {
    let machine = machine();
    let range = machine.map(0, 8);
    range.pages().for_each(|page| machine.fill_bytes(page, &half(page)));
    machine.advise(range, Advice::PageOut);
    let damaged = PageNum(3);
    let handle = Handle::new(machine.word(damaged).payload()).unwrap();
    // SAFETY: one thread, and the page stays where it is.
    let blob = unsafe { machine.space.swap().zpool.blob(handle) }.unwrap();
    let byte = blob.bytes.as_ptr().cast_mut();
    // SAFETY: the pool's memory is writable, and nothing reads it now.
    unsafe { *byte.add(200) ^= 1 };
    assert_eq!(machine.content(damaged), Err(Trap::Bus));
    for page in range.pages().filter(|&page| page != damaged) {
        assert!(machine.content(page).unwrap() == half(page), "{page:?} has other bytes");
    }
    let member = machine.space.budget().member();
    assert_eq!(member.obituary.load(Relaxed), Obituary::PoolCorrupt as u32);
    let address = machine.mmu().address_of(damaged) as u64;
    assert_eq!(member.obituary_detail.load(Relaxed), address);
    assert_eq!(machine.counted(Event::Pgpoison), 1);
}
