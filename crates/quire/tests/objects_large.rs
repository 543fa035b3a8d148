//! Objects whose blocks live in large frames, which go from block to block.

#[path = "common/objects.rs"]
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{Dir, PAGE, Probe, Stop, Watchdog, load, random, space_by, store, wait_until};
use quire::library::{
    AddressSpace, Delivery, FaultAround, MapOptions, Mapping, Object, OpenOptions,
};
use quire::mmu::simulated::Generator;
use quire::store::test::VecStore;

const BLOCK: usize = 512 * PAGE;
/// The least in which streams grow to whole blocks.
const MEMORY: usize = 64 << 20;

fn recycling() -> Option<AddressSpace> {
    space_by(&AddressSpace::builder().memory(MEMORY).recycle(true))
}

fn open(space: &AddressSpace, bytes: &[u8]) -> Object {
    Object::with_store(space, Arc::new(VecStore::new(bytes.to_vec())), None).unwrap()
}

#[test]
fn what_is_scanned_in_order_is_read_over_what_was_scanned_before() {
    let _watchdog = Watchdog::new(120);
    let bytes = random(50 * BLOCK + 5 * PAGE + 7, 1);
    let dir = Dir::new();
    let path = dir.file("data", &bytes);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).recycle(true).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let object = OpenOptions::new().open(&space, &path).unwrap();
        {
            // SAFETY: nobody writes the file.
            let map = unsafe { MapOptions::new().map(&object) }.unwrap();
            for round in 0..3 {
                assert!(map[..] == bytes[..], "round {round}");
            }
        }
        let reused = space.counter("pgreuse") as usize * PAGE;
        assert!(reused > bytes.len(), "{reused} bytes of three rounds");
        let (_, most) = space.held();
        assert!(most <= MEMORY, "{most} bytes were held");
        drop(object);
        wait_until(|| space.held().0 == 0);
    }
}

#[test]
fn what_a_scan_left_behind_is_read_at_random_and_by_others() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(50 * BLOCK, 2);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    // SAFETY: as above.
    let other = unsafe { MapOptions::new().fault_around(FaultAround::Off).map(&object) }.unwrap();
    let mut generator = Generator::new(3);
    for round in 0..3 {
        assert!(map[..] == bytes[..], "round {round}");
        for _ in 0..4000 {
            let at = generator.below(bytes.len());
            assert_eq!(map[at], bytes[at], "round {round}, byte {at}");
            assert_eq!(other[at], bytes[at], "round {round}, byte {at}");
        }
    }
}

#[test]
fn a_page_is_mapped_alone_where_nothing_may_be_mapped_around_it() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(8 * BLOCK, 3);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    // SAFETY: as above.
    let alone = unsafe { MapOptions::new().fault_around(FaultAround::Off).map(&object) }.unwrap();
    for (count, block) in (0..8).rev().enumerate() {
        assert_eq!(alone[block * BLOCK + 3 * PAGE], bytes[block * BLOCK + 3 * PAGE]);
        assert_eq!(alone.mapped_pages(), count + 1);
    }
}

/// A thread that serves itself does so on the little stack that it has for signals.
#[test]
fn a_mapping_that_cuts_blocks_shows_them_too() {
    let _watchdog = Watchdog::new(120);
    let bytes = random(12 * BLOCK, 4);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).recycle(true).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let object = open(&space, &bytes);
        // SAFETY: nobody writes the store.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        assert!(map[..] == bytes[..]);
        for (first, pages) in [(511, 2), (100, 300), (1000, 30), (700, 3000)] {
            let (offset, len) = ((first * PAGE) as u64, (pages * PAGE) as u64);
            // SAFETY: as above.
            let part = unsafe { MapOptions::new().offset(offset).len(len).map(&object) }.unwrap();
            assert!(part[..] == bytes[first * PAGE..(first + pages) * PAGE], "from {first}");
        }
        assert!(map[..] == bytes[..]);
    }
}

#[test]
fn what_is_written_in_large_frames_reaches_the_store() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let mut bytes = random(48 * BLOCK, 5);
    let inner = Arc::new(VecStore::new(bytes.clone()));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: used by this thread alone.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // SAFETY: as above; read while nothing is borrowed for writing.
    let view = unsafe { MapOptions::new().map(&object) }.unwrap();
    let mut generator = Generator::new(6);
    for round in 0..3 {
        assert!(view[..] == bytes[..], "round {round}");
        for _ in 0..2000 {
            let at = generator.below(bytes.len());
            bytes[at] = bytes[at].wrapping_add(1);
            map[at] = bytes[at];
        }
        assert!(map[..] == bytes[..], "round {round}");
    }
    object.sync().unwrap();
    assert!(inner.bytes() == bytes);
}

#[test]
fn behind_an_end_that_cuts_a_large_frame_is_a_sigbus() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(12 * BLOCK, 7);
    let object = open(&space, &bytes);
    // SAFETY: accessed by single bytes, or not changed meanwhile.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // SAFETY: as above.
    let view = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(view[..] == bytes[..]);
    let at = view.as_ptr();
    let end = 7 * BLOCK + 100 * PAGE + 9;
    object.set_len(end as u64).unwrap();
    for block in 0..12 {
        for page in [0, 99, 100, 101, 511] {
            let byte = block * BLOCK + page * PAGE;
            let expected = match byte.next_multiple_of(PAGE) {
                _ if byte < end => Some(bytes[byte]),
                _ => None,
            };
            assert_eq!(load(at, byte), expected, "block {block}, page {page}");
            assert_eq!(load(map.as_ptr(), byte), expected, "block {block}, page {page}");
        }
    }
    assert_eq!(load(at, end), Some(0));
    assert!(!store(map.as_ptr(), 8 * BLOCK, 1));
    object.set_len((10 * BLOCK) as u64).unwrap();
    assert!(view[..end] == bytes[..end]);
    assert!(view[end..10 * BLOCK].iter().all(|&byte| byte == 0));
    assert_eq!(load(at, 10 * BLOCK), None);
}

#[test]
fn a_block_that_came_in_pieces_is_brought_together_and_home_again() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(6 * BLOCK + PAGE, 8);
    let object = open(&space, &bytes);
    // SAFETY: used by this thread alone.
    let mut map =
        unsafe { MapOptions::new().fault_around(FaultAround::Off).map_mut(&object) }.unwrap();
    // In an order in which nothing is read ahead.
    (0..6 * 512).for_each(|page| {
        let at = page * 7 % (6 * 512) * PAGE;
        assert_eq!(map[at], bytes[at]);
    });
    map[3 * BLOCK] = !bytes[3 * BLOCK];
    assert_eq!(object.migrate().unwrap(), (6 * BLOCK, 0));
    assert_eq!(space.counter("pgmigrate_success"), 6 * 512);
    assert_eq!(object.migrate().unwrap(), (0, 0), "all are together");
    map[3 * BLOCK] = !map[3 * BLOCK];
    assert!(map[..] == bytes[..]);
    // What cannot be shown so brings its block home.
    // SAFETY: as above.
    let part = unsafe { MapOptions::new().offset(BLOCK as u64 - 4096).len(8192).map(&object) };
    assert!(part.unwrap()[..] == bytes[BLOCK - PAGE..BLOCK + PAGE]);
    assert_eq!(space.counter("pgmigrate_success"), 8 * 512);
    assert_eq!(space.counter("pgmigrate_fail"), 0);
    assert!(map[..] == bytes[..]);
}

#[test]
fn a_bad_page_in_a_block_is_bad_alone() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(48 * BLOCK, 9);
    let inner = Probe::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    let bad = 20 * BLOCK + 77 * PAGE;
    inner.set_bad((bad / PAGE) as u64, true);
    for page in 0..48 * 512 {
        let at = page * PAGE;
        let expected = (at != bad).then_some(bytes[at]);
        assert_eq!(load(map.as_ptr(), at), expected, "page {page}");
    }
}

/// Scans in order, reads at random, and one that cuts the end and makes it longer again: what is
/// read is what was there first, zeros behind a cut, or a SIGBUS.
#[test]
fn scans_and_random_reads_go_on_while_the_end_moves() {
    const BLOCKS: usize = 44;
    const KEPT: usize = 38;
    let _watchdog = Watchdog::new(240);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).recycle(true).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let bytes = random(BLOCKS * BLOCK, 10);
        let object = open(&space, &bytes);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (bytes, object, is_over) = (&bytes, &object, &is_over);
            let _stop = Stop(is_over);
            for reader in 0..4u64 {
                // All of it, before it is cut.
                // SAFETY: accessed by single bytes only.
                let map = unsafe { MapOptions::new().map(object) }.unwrap();
                scope.spawn(move || {
                    let mut generator = Generator::new(reader);
                    let mut page = (reader as usize * 11) << 9;
                    while !is_over.load(Ordering::SeqCst) {
                        page = match reader {
                            // Some blocks come in pieces.
                            0 => (generator.below(8) + KEPT - 4) * 512 + generator.below(512),
                            _ => (page + 1) % (BLOCKS * 512),
                        };
                        let at = page * PAGE + generator.below(PAGE);
                        let seen = load(map.as_ptr(), at);
                        let is_right = seen == Some(bytes[at])
                            || (at >= KEPT * BLOCK && seen.is_none_or(|byte| byte == 0));
                        assert!(is_right, "reader {reader}, page {page}: {seen:?}");
                    }
                });
            }
            let mut generator = Generator::new(20);
            let until = Instant::now() + Duration::from_secs(4);
            while Instant::now() < until || space.counter("pgreuse") == 0 {
                let end = KEPT * BLOCK + generator.below((BLOCKS - KEPT) * BLOCK);
                object.set_len(end as u64).unwrap();
                std::thread::sleep(Duration::from_millis(2));
                object.set_len((BLOCKS * BLOCK) as u64).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (_, most) = space.held();
        assert!(most <= MEMORY, "{most} bytes were held");
        drop(object);
        wait_until(|| space.held().0 == 0);
    }
}

#[test]
fn what_the_program_has_locked_is_not_another_blocks() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(50 * BLOCK, 11);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    let locked = 49 * BLOCK + 70 * PAGE..49 * BLOCK + 78 * PAGE;
    // SAFETY: inside of the mapping; it changes no byte.
    unsafe { rustix::mm::mlock(map.as_ptr().add(locked.start).cast_mut().cast(), locked.len()) }
        .unwrap();
    for round in 0..3 {
        assert!(map[..49 * BLOCK] == bytes[..49 * BLOCK], "round {round}");
        assert!(map[locked.clone()] == bytes[locked.clone()], "round {round}");
    }
    assert!(space.counter("pgreuse") > 0);
}

#[test]
fn populate_maps_what_lives_in_a_large_frame_wherever_it_is_mapped() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(8 * BLOCK, 12);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    assert_eq!(object.migrate().unwrap().1, 0);
    for (first, pages) in [(511, 2), (100, 300), (1000, 600)] {
        let options = MapOptions::new().offset((first * PAGE) as u64).len((pages * PAGE) as u64);
        // SAFETY: as above.
        let part = unsafe { options.populate(true).map(&object) }.unwrap();
        assert_eq!(part.mapped_pages(), pages, "from {first}");
        assert!(part[..] == bytes[first * PAGE..(first + pages) * PAGE], "from {first}");
    }
}

/// As one does who knows that he comes by once.
#[test]
fn what_is_dropped_block_by_block_leaves_its_frames_to_others() {
    const BLOCKS: usize = 120;
    const LAST: usize = 40;
    let _watchdog = Watchdog::new(120);
    let Some(space) = recycling() else { return };
    let bytes = random(BLOCKS * BLOCK, 13);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    for block in 0..BLOCKS - LAST {
        let part = block * BLOCK..(block + 1) * BLOCK;
        map.will_need(part.clone());
        assert!(map[part.clone()] == bytes[part.clone()], "block {block}");
        let mut dropped = 0;
        while dropped < BLOCK {
            dropped += map.dont_need(part.clone());
        }
    }
    let before = space.counter("pgreuse");
    let rest = (BLOCKS - LAST) * BLOCK..BLOCKS * BLOCK;
    for round in 0..3 {
        assert!(map[rest.clone()] == bytes[rest.clone()], "round {round}");
    }
    assert!(space.counter("pgreuse") > before);
}

#[test]
fn a_block_that_is_cut_while_it_is_brought_together_ends_at_home() {
    const ROUNDS: usize = 600;
    let _watchdog = Watchdog::new(60);
    let Some(space) = recycling() else { return };
    let bytes = random(BLOCK, 14);
    let object = open(&space, &bytes);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    let (begin, end) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                begin.wait();
                object.migrate().unwrap();
                end.wait();
            }
        });
        let mut generator = Generator::new(15);
        for round in 0..ROUNDS {
            // In pieces, so that it is at home.
            for half in [0..BLOCK / 2, BLOCK / 2..BLOCK] {
                map.populate(half).unwrap();
            }
            begin.wait();
            for _ in 0..generator.below(4000) {
                std::hint::spin_loop();
            }
            object.set_len((300 * PAGE) as u64).unwrap();
            end.wait();
            assert_eq!(load(map.as_ptr(), 299 * PAGE), Some(bytes[299 * PAGE]), "round {round}");
            assert_eq!(load(map.as_ptr(), 300 * PAGE), None, "round {round}");
            object.set_len(BLOCK as u64).unwrap();
            map.dont_need(0..BLOCK);
        }
    });
}

/// The kernel's mappings that begin within a mapping.
fn kernel_mappings(map: &Mapping) -> usize {
    let start = map.as_ptr() as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let begins = maps.lines().map(|line| line.split('-').next().unwrap());
    let begins = begins.map(|begin| usize::from_str_radix(begin, 16).unwrap());
    begins.filter(|begin| (start..start + map.len()).contains(begin)).count()
}

#[test]
fn scans_of_what_is_long_cost_the_kernel_few_mappings() {
    let _watchdog = Watchdog::new(120);
    let bytes = random(100 * BLOCK, 16);
    // What is in memory at once is about 30 windows, twice.
    for (windows, reuses) in [(160, true), (6, false), (0, false)] {
        let builder = AddressSpace::builder().memory(MEMORY).recycle(true).large_windows(windows);
        let Some(space) = space_by(&builder) else { return };
        let object = open(&space, &bytes);
        // SAFETY: nobody writes the store.
        let maps = [(); 2].map(|()| unsafe { MapOptions::new().map(&object) }.unwrap());
        for round in 0..3 {
            for map in &maps {
                assert!(map[..] == bytes[..], "{windows} windows, round {round}");
            }
        }
        let costs: usize = maps.iter().map(kernel_mappings).sum();
        assert!(costs <= 2 * windows + 8, "{costs} mappings for {windows} windows");
        let reused = space.counter("pgreuse") as usize * PAGE;
        assert_eq!(reused > 3 * bytes.len(), reuses, "{reused} bytes, {windows} windows");
        assert_eq!(space.counter("pgmigrate_fail"), 0);
        assert_eq!(space.counter("pgmigrate_success") > 0, windows == 6, "{windows} windows");
    }
}

#[test]
fn without_large_frames_a_page_in_a_pipe_keeps_its_bytes() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space_by(&AddressSpace::builder().memory(MEMORY)) else {
        return;
    };
    let bytes = random(50 * BLOCK, 17);
    let object = open(&space, &bytes);
    // SAFETY: nobody writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    for block in [20, 30, 40] {
        let at = block * BLOCK + 70 * PAGE;
        map.populate(at..at + PAGE).unwrap();
        let mut ends = [0; 2];
        let page = libc::iovec { iov_base: map[at..].as_ptr().cast_mut().cast(), iov_len: PAGE };
        // SAFETY: two descriptors are written, and a page of the mapping is read.
        let spliced = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            libc::vmsplice(ends[1], &raw const page, 1, 0)
        };
        assert_eq!(spliced, PAGE as isize);
        for _ in 0..3 {
            assert!(map[..] == bytes[..]);
        }
        let mut found = [0u8; PAGE];
        // SAFETY: it has room for as much; the descriptors are closed once.
        let read = unsafe {
            let read = libc::read(ends[0], found.as_mut_ptr().cast(), PAGE);
            ends.into_iter().for_each(|end| assert_eq!(libc::close(end), 0));
            read
        };
        assert_eq!(read, PAGE as isize);
        assert!(found[..] == bytes[at..at + PAGE], "block {block}");
    }
    assert_eq!(space.counter("pgreuse"), 0);
}

#[test]
fn a_block_that_cannot_be_read_whole_keeps_no_more_of_its_fresh_frame_than_could_be_read() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = recycling() else { return };
    let bytes = random(8 * BLOCK, 31);
    let probe = Probe::new(bytes.clone());
    probe.set_bad(3000, true);
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    let pages = bytes.len() / PAGE;
    for page in 0..pages {
        let expected = (page != 3000).then_some(bytes[page * PAGE + 9]);
        assert_eq!(load(map.as_ptr(), page * PAGE + 9), expected, "page {page}");
    }
    let cached = object.cached().0;
    assert_eq!(cached, bytes.len() - PAGE);
    // Beside what is cached there are the words, by the block.
    let held = space.held().0;
    assert!((cached..=cached + 16 * PAGE).contains(&held), "{held} of {cached}");
    probe.set_bad(3000, false);
    map.populate(0..bytes.len()).unwrap();
    assert_eq!(load(map.as_ptr(), 3000 * PAGE + 9), Some(bytes[3000 * PAGE + 9]));
}
