//! Objects that are read whole blocks at a time, and brought into new memory.

#[path = "common/objects.rs"]
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, load, random, space_by, store, survive_sigbus, wait_until,
    word,
};
use quire::library::{
    AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions, Pattern,
};
use quire_simulated::Generator;
use quire_test_stores::VecStore;

const BLOCK: usize = 512 * PAGE;
/// The least in which streams grow to whole blocks.
const MEMORY: usize = 64 << 20;

fn large() -> Option<AddressSpace> {
    space_by(&AddressSpace::builder().memory(MEMORY))
}

fn open(space: &AddressSpace, bytes: &[u8]) -> Object {
    Object::with_store(space, Arc::new(VecStore::new(bytes.to_vec())), None).unwrap()
}

#[test]
fn what_is_scanned_in_order_round_after_round_is_what_the_file_has() {
    let _watchdog = Watchdog::new(120);
    let bytes = random(50 * BLOCK + 5 * PAGE + 7, 1);
    let dir = Dir::new();
    let path = dir.file("data", &bytes);
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let object = OpenOptions::new().open(&space, &path).unwrap();
        {
            // SAFETY: nothing writes the file.
            let map = unsafe { MapOptions::new().map(&object) }.unwrap();
            for round in 0..3 {
                assert!(map[..] == bytes[..], "round {round}");
            }
        }
        let (_, most) = space.held();
        assert!(most <= MEMORY, "{most} bytes were held");
        drop(object);
        wait_until(|| space.held().0 == 0);
    }
}

#[test]
fn what_a_scan_left_behind_is_read_at_random_and_by_others() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let bytes = random(50 * BLOCK, 2);
    let object = open(&space, &bytes);
    // SAFETY: nothing writes the store.
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
    let Some(space) = large() else { return };
    let bytes = random(8 * BLOCK, 3);
    let object = open(&space, &bytes);
    // SAFETY: nothing writes the store.
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
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let object = open(&space, &bytes);
        // SAFETY: nothing writes the store.
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
fn what_is_written_among_scans_reaches_the_store() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
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
fn behind_an_end_that_cuts_a_block_is_a_sigbus() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
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
fn what_is_cached_gets_new_memory_with_its_bytes_and_flags() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let mut bytes = random(6 * BLOCK + PAGE, 8);
    let inner = Arc::new(VecStore::new(bytes.clone()));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    assert_eq!(object.migrate().unwrap(), (0, 0), "nothing is cached");
    // Nothing around what is written becomes dirty with it.
    let options = MapOptions::new().fault_around(FaultAround::Off).pattern(Pattern::Random);
    // SAFETY: used by this thread alone.
    let mut map = unsafe { options.map_mut(&object) }.unwrap();
    map.populate(0..3 * BLOCK).unwrap();
    for at in [BLOCK, 2 * BLOCK + 9 * PAGE] {
        bytes[at] = !bytes[at];
        map[at] = bytes[at];
    }
    let (cached, dirty) = object.cached();
    assert!(cached >= 3 * BLOCK && dirty == 2 * PAGE, "{cached} bytes, {dirty} of them dirty");
    let pin = map.pin(BLOCK + 5 * PAGE..BLOCK + 7 * PAGE).unwrap();
    assert!(object.poison(40 * PAGE as u64).unwrap());
    let left = 3 * PAGE;
    // What is pinned, and what is bad; a page may be held a moment longer than its fault takes.
    let mut all = (0, 0);
    loop {
        let moved = object.migrate().unwrap();
        all = (all.0 + moved.0, all.1 + moved.1);
        if moved == (cached - left, left) {
            break;
        }
    }
    assert_eq!(space.counter("pgmigrate_success") as usize * PAGE, all.0);
    assert_eq!(space.counter("pgmigrate_fail") as usize * PAGE, all.1);
    assert_eq!(object.cached(), (cached - PAGE, dirty));
    drop(pin);
    assert_eq!(object.unpoison(0..BLOCK as u64), PAGE);
    assert!(map[..] == bytes[..]);
    map.flush().unwrap();
    assert!(inner.bytes() == bytes, "what was dirty is dirty still");
    wait_until(|| object.migrate().unwrap() == (object.cached().0, 0));
    assert!(map[..] == bytes[..]);
}

#[test]
fn a_memory_object_gets_new_memory_too() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let bytes = random(2 * BLOCK, 18);
    let object = space.create_memory(2 * BLOCK as u64).unwrap();
    // SAFETY: used by this thread alone.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    map.copy_from_slice(&bytes);
    wait_until(|| object.migrate().unwrap() == (2 * BLOCK, 0));
    assert!(map[..] == bytes[..]);
}

/// Words that only grow, written and read while their memory changes all the time.
#[test]
fn no_write_is_lost_while_memory_is_changed_under_readers_and_writers() {
    const WRITERS: usize = 3;
    const PAGES: usize = 600;
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let _watchdog = Watchdog::new(120);
        let builder = AddressSpace::builder().memory(16 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let inner = Arc::new(VecStore::new(vec![0; PAGES * PAGE]));
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        // SAFETY: accessed by atomic words alone.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let start = map.as_ptr() as usize;
        let is_over = AtomicBool::new(false);
        let mine: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let is_over = &is_over;
            let _stop = Stop(is_over);
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    scope.spawn(move || {
                        let mut generator = Generator::new(writer as u64);
                        let mut words = vec![0; PAGES];
                        while !is_over.load(Ordering::SeqCst) {
                            let page = generator.below(PAGES);
                            let place = word(start as *const u8, page * PAGE + writer * 8);
                            assert_eq!(place.load(Ordering::SeqCst), words[page], "page {page}");
                            words[page] += 1;
                            place.store(words[page], Ordering::SeqCst);
                        }
                        words
                    })
                })
                .collect();
            let until = Instant::now() + Duration::from_secs(2);
            while Instant::now() < until {
                object.migrate().unwrap();
            }
            is_over.store(true, Ordering::SeqCst);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        assert!(space.counter("pgmigrate_success") > PAGES as u64);
        object.sync().unwrap();
        let bytes = inner.bytes();
        for (writer, words) in mine.iter().enumerate() {
            for (page, expected) in words.iter().enumerate() {
                let at = page * PAGE + writer * 8;
                let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                assert_eq!(found, *expected, "writer {writer}, page {page}");
            }
        }
    }
}

#[test]
fn a_bad_page_in_a_block_is_bad_alone() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let bytes = random(48 * BLOCK, 9);
    let inner = Probe::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: nothing writes the store.
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
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).delivery(delivery);
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
            while Instant::now() < until {
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
fn what_the_program_has_locked_is_reclaimed_and_read_again() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let bytes = random(50 * BLOCK, 11);
    let object = open(&space, &bytes);
    // SAFETY: nothing writes the store.
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
}

#[test]
fn populate_maps_what_is_cached_wherever_it_is_mapped() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = large() else { return };
    let bytes = random(8 * BLOCK, 12);
    let object = open(&space, &bytes);
    // SAFETY: nothing writes the store.
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

#[test]
fn a_block_is_cut_while_it_gets_new_memory() {
    const ROUNDS: usize = 600;
    let _watchdog = Watchdog::new(60);
    let Some(space) = large() else { return };
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
            map.populate(0..BLOCK).unwrap();
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

#[test]
fn a_page_in_a_pipe_keeps_its_bytes_when_it_is_reclaimed() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space_by(&AddressSpace::builder().memory(MEMORY)) else {
        return;
    };
    let bytes = random(50 * BLOCK, 17);
    let object = open(&space, &bytes);
    // SAFETY: nothing writes the store.
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
}

#[test]
fn a_block_that_cannot_be_read_whole_holds_no_more_than_could_be_read() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = large() else { return };
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
