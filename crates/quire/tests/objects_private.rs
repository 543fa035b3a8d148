//! Private mappings of objects on the real MMU: copies that are written without the object. Every test
//! runs twice: here with handlers, and without as a part of `objects_private_inline`.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Dir, PAGE, Probe, Watchdog, drop_pages, load, press, random, space_by, store, survive_sigbus,
    wait_until,
};
use quire::library::{
    AddressSpace, Builder, Delivery, Error, FaultAround, MapOptions, Object, OpenOptions,
};
use quire::store::Operation;
use quire_simulated::Generator;
use quire_test_stores::{DelayStore, VecStore};

/// Which threads serve the faults of this run.
fn delivery() -> Delivery {
    match env!("CARGO_CRATE_NAME") {
        "objects_private" => Delivery::Handlers,
        "objects_private_inline" => Delivery::Inline,
        other => panic!("{other} has not said how its faults are served"),
    }
}

/// An address space with so much memory.
fn of_memory(bytes: usize) -> Builder {
    survive_sigbus();
    AddressSpace::builder().memory(bytes).delivery(delivery())
}

/// The same, made; `None` where it cannot be.
fn space(memory: usize) -> Option<AddressSpace> {
    space_by(&of_memory(memory))
}

/// Bytes that pack well: each page has its own, and few.
fn packable(len: usize, seed: u64) -> Vec<u8> {
    let mut generator = Generator::new(seed);
    let mut bytes = vec![0u8; len];
    for page in bytes.chunks_mut(PAGE) {
        for byte in page.iter_mut().take(16) {
            *byte = generator.next_u64() as u8;
        }
    }
    bytes
}

fn object_of(space: &AddressSpace, bytes: &[u8]) -> Object {
    Object::with_store(space, VecStore::new(bytes.to_vec()), None).unwrap()
}

#[test]
fn a_copy_reads_as_the_file_through_an_eighth_of_its_size() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(16 << 20, 1);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    // SAFETY: nothing writes the file.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    assert!(map[..] == bytes[..], "in order");
    let mut generator = Generator::new(7);
    for _ in 0..4000 {
        let at = generator.below(bytes.len());
        assert_eq!(map[at], bytes[at], "byte {at}");
    }
    drop(map);
    // SAFETY: as above.
    let map = unsafe { MapOptions::new().map_copy_read_only(&object) }.unwrap();
    assert!(map[..] == bytes[..], "to be read only");
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
    assert_eq!(space.counter("pswpout"), 0, "what was only read is dropped, and not stored");
}

#[test]
fn what_is_written_is_kept_and_seen_by_no_other() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(4 << 20) else { return };
    let dir = Dir::new();
    let bytes = packable(3 << 20, 2);
    let path = dir.file("data", &bytes);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    // SAFETY: nothing else uses the file.
    let (shared, mut copy, mut other) = unsafe {
        let options = MapOptions::new();
        (
            options.map_mut(&object).unwrap(),
            options.map_copy(&object).unwrap(),
            options.map_copy(&object).unwrap(),
        )
    };
    let (mut copied, mut others) = (bytes.clone(), bytes.clone());
    let mut generator = Generator::new(3);
    for round in 0..2000 {
        let at = generator.below(bytes.len());
        let value = generator.next_u64() as u8;
        let (map, oracle) =
            if round % 2 == 0 { (&mut copy, &mut copied) } else { (&mut other, &mut others) };
        assert_eq!(map[at], oracle[at], "byte {at} in round {round}");
        map[at] = value;
        oracle[at] = value;
    }
    assert!(copy[..] == copied[..] && other[..] == others[..], "the copies differ by now");
    assert!(shared[..] == bytes[..], "a mapping of the object itself");
    let mut read = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut read).unwrap(), bytes.len());
    assert!(read == bytes, "the object");
    assert_eq!(object.cached().1, 0, "nothing of the object is dirty");
    shared.flush().unwrap();
    object.sync().unwrap();
    drop((shared, copy, other));
    drop(object);
    assert!(std::fs::read(&path).unwrap() == bytes, "the file");
}

#[test]
fn writes_stay_under_an_eighth_of_what_they_need() {
    let _watchdog = Watchdog::new(200);
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let bytes = packable(16 << 20, 4);
    let path = dir.file("data", &bytes);
    let object = space.open(&path).unwrap();
    let mut oracle = bytes.clone();
    // SAFETY: nothing writes the file.
    let mut map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    let mut generator = Generator::new(5);
    for _ in 0..20_000 {
        let at = generator.below(bytes.len());
        if generator.below(3) == 0 {
            assert_eq!(map[at], oracle[at], "byte {at}");
        }
        let value = generator.next_u64() as u8;
        map[at] = value;
        oracle[at] = value;
    }
    assert!(map[..] == oracle[..], "all pages");
    let mut read = vec![0; bytes.len()];
    assert_eq!(map.try_read(0, &mut read).unwrap(), bytes.len());
    assert!(read == oracle, "read without a fault");
    assert!(space.counter("pswpout") > 0, "not all of it fits");
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
    drop(map);
    assert!(std::fs::read(&path).unwrap() == bytes, "the file");
}

/// Bytes that do not pack, all of them written: they need eight times the memory there is.
#[test]
fn what_does_not_pack_goes_to_the_swap_file() {
    let _watchdog = Watchdog::new(200);
    let dir = Dir::new();
    let builder = of_memory(2 << 20).swap(&dir.0, 64 << 20);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(16 << 20, 16);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    let mut oracle = bytes.clone();
    // SAFETY: nothing writes the file.
    let mut map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    for at in (0..bytes.len()).step_by(PAGE) {
        map[at + 7] ^= 0xff;
        oracle[at + 7] ^= 0xff;
    }
    let mut generator = Generator::new(17);
    for _ in 0..3000 {
        let at = generator.below(bytes.len());
        assert_eq!(map[at], oracle[at], "byte {at}");
        map[at] = at as u8;
        oracle[at] = at as u8;
    }
    assert!(map[..] == oracle[..], "all pages");
    let mut read = vec![0; 1 << 20];
    assert_eq!(map.try_read(5 << 20, &mut read).unwrap(), read.len());
    assert!(read == oracle[5 << 20..6 << 20], "read without a fault");
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
    let written = space.counter("pswpout") - space.counter("pswpout_clean");
    let is_past_the_pool = written > 2000 && space.counter("zswpout") == 0;
    assert!(is_past_the_pool, "{:?}", space.counters());
}

#[test]
fn a_swap_file_that_cannot_be_made_is_an_error() {
    let refused = AddressSpace::builder().swap("/proc/self", 1 << 20).build();
    let is_told = matches!(refused, Err(Error::NoSwapFile { .. } | Error::NoUserfaultfd { .. }));
    assert!(is_told, "{refused:?}");
}

#[test]
fn behind_the_end_is_a_sigbus_until_the_object_has_grown() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(10 * PAGE + 100, 6);
    let object = object_of(&space, &bytes);
    let options = MapOptions::new().len(20 * PAGE as u64).beyond_end(true);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { options.map_copy(&object) }.unwrap();
    let at = map.as_ptr();
    assert_eq!(load(at, 10 * PAGE + 99), Some(bytes[10 * PAGE + 99]));
    assert_eq!(load(at, 10 * PAGE + 100), Some(0), "the last page's tail");
    for page in 11..20 {
        assert_eq!(load(at, page * PAGE), None, "page {page}");
        assert!(!store(at, page * PAGE, 1), "page {page}");
    }
    assert!(store(at, 8 * PAGE, 77));
    assert_eq!(load(at, 7 * PAGE), Some(bytes[7 * PAGE]));
    object.set_len(5 * PAGE as u64).unwrap();
    assert_eq!(load(at, 4 * PAGE), Some(bytes[4 * PAGE]));
    assert_eq!(load(at, 6 * PAGE), None, "never touched");
    assert_eq!(load(at, 7 * PAGE), None, "only read");
    assert_eq!(load(at, 8 * PAGE), Some(77), "written");
    object.set_len(15 * PAGE as u64).unwrap();
    for page in [5, 7, 10, 11, 14] {
        assert_eq!(load(at, page * PAGE), Some(0), "page {page}");
    }
    assert_eq!(load(at, 8 * PAGE), Some(77));
    assert_eq!(load(at, 15 * PAGE), None);
    drop(map);
    drop(object);
    assert!(space.held().0 <= space.memory());
}

#[test]
fn any_offset_and_length_can_be_copied() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = packable(3 << 20, 8);
    let object = object_of(&space, &bytes);
    for (offset, len) in
        [(0, 1), (PAGE, 2 * PAGE), (5 * PAGE + 123, 700 * PAGE + 5), ((3 << 20) - 9, 9)]
    {
        let mut oracle = bytes[offset..offset + len].to_vec();
        let options = MapOptions::new().offset(offset as u64).len(len as u64);
        // SAFETY: nothing writes the object.
        let mut map = unsafe { options.map_copy(&object) }.unwrap();
        for at in (0..len).step_by(3 * PAGE + 1) {
            map[at] ^= 0x5a;
            oracle[at] ^= 0x5a;
        }
        assert!(map[..] == oracle[..], "{len} bytes at {offset}");
    }
}

#[test]
fn an_unmapped_copy_gives_all_its_memory_back() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = packable(6 << 20, 9);
    let object = object_of(&space, &bytes);
    let mut left = Vec::new();
    for round in 0..4 {
        // SAFETY: nothing writes the object.
        let mut map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
        for at in (0..bytes.len()).step_by(PAGE) {
            map[at] = map[at].wrapping_add(round);
        }
        // So that no compiler leaves the writes out.
        std::hint::black_box(&mut map[0]);
        assert!(space.held().0 > 2 << 20, "{:?}", space.counters());
        drop(map);
        // Takes the frames that are not in use, and the object's cache.
        press(&space);
        object.drop_cached(0..bytes.len() as u64);
        left.push(space.held().0);
    }
    // Page words of both, and frames that nothing needed; of each copy there were 1536 pages.
    assert!(left.iter().all(|&bytes| bytes < 64 * PAGE), "{left:?} bytes were left");
}

#[test]
fn a_page_that_cannot_be_read_is_a_sigbus_until_it_is_populated() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(64 * PAGE, 10);
    let probe = Probe::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    probe.set_bad(9, true);
    assert_eq!(load(map.as_ptr(), 9 * PAGE), None);
    assert!(!store(map.as_ptr(), 9 * PAGE, 1));
    assert_eq!(load(map.as_ptr(), 8 * PAGE), Some(bytes[8 * PAGE]));
    assert!(matches!(map.populate(0..map.len()), Err(Error::Store(_))));
    let mut read = vec![0; map.len()];
    assert!(matches!(map.try_read(0, &mut read), Err(Error::Store(_))));
    probe.set_bad(9, false);
    assert_eq!(load(map.as_ptr(), 9 * PAGE), None, "until it is asked for");
    assert_eq!(map.try_read(0, &mut read).unwrap(), map.len());
    assert!(read == bytes);
    map.populate(0..map.len()).unwrap();
    assert_eq!(map.mapped_pages(), 64);
    assert!(map[..] == bytes[..]);
    // Dropped by the program itself, and bad again.
    probe.set_bad(9, true);
    drop_pages(&object, 9 * PAGE as u64..10 * PAGE as u64, 1);
    let at = map.as_ptr().wrapping_add(9 * PAGE).cast_mut();
    // SAFETY: a whole page of the mapping, which nothing else uses.
    assert_eq!(unsafe { libc::madvise(at.cast(), PAGE, libc::MADV_DONTNEED) }, 0);
    assert_eq!(load(map.as_ptr(), 9 * PAGE), None);
}

/// The read of one page is held in the store: the threads that want it wait, and others do not.
#[test]
fn a_slow_read_holds_up_only_those_that_want_it() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(64 * PAGE, 11);
    let slow = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
    let object = Object::with_store(&space, Arc::clone(&slow), None).unwrap();
    // SAFETY: nothing writes the object.
    let map =
        unsafe { MapOptions::new().fault_around(FaultAround::Off).map_copy(&object) }.unwrap();
    assert_eq!(map[0], bytes[0]);
    slow.hold(Operation::Read);
    std::thread::scope(|scope| {
        let wanting: Vec<_> = (0..3).map(|_| scope.spawn(|| map[40 * PAGE])).collect();
        assert!(slow.wait_for(1, Duration::from_secs(10)));
        assert_eq!(map[1], bytes[1]);
        assert!(wanting.iter().all(|thread| !thread.is_finished()));
        slow.release_all();
        for thread in wanting {
            assert_eq!(thread.join().unwrap(), bytes[40 * PAGE]);
        }
    });
}

#[test]
fn what_is_discarded_is_the_objects_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = packable(100 * PAGE, 12);
    let object = object_of(&space, &bytes);
    // SAFETY: nothing writes the object.
    let mut map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    map.fill(0xee);
    map.dont_need(0..50 * PAGE);
    assert!(map.iter().all(|&byte| byte == 0xee), "what was written stays");
    // The first page and the last are not whole.
    map.discard(10 * PAGE + 1..90 * PAGE - 1);
    assert!(map[..11 * PAGE].iter().all(|&byte| byte == 0xee));
    assert!(map[11 * PAGE..89 * PAGE] == bytes[11 * PAGE..89 * PAGE]);
    assert!(map[89 * PAGE..].iter().all(|&byte| byte == 0xee));
    map.discard(0..map.len());
    assert!(map[..] == bytes[..]);
}

/// Drops the first pages of a mapping by a bare system call: the engine is not told. They are in memory, for
/// what it has swapped out stays as it is.
fn drop_bare(map: *mut u8, pages: usize) {
    // SAFETY: whole pages of a mapping, which nothing else uses.
    assert_eq!(unsafe { libc::madvise(map.cast(), pages * PAGE, libc::MADV_DONTNEED) }, 0);
}

/// Has a mapping of 30 pages, of which the first 20 are the object's and written, from its start on.
fn with_written(test: impl FnOnce(&AddressSpace, &Object, &[u8], *mut u8)) {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = packable(20 * PAGE, 18);
    let object = object_of(&space, &bytes);
    let options = MapOptions::new().len(30 * PAGE as u64).beyond_end(true);
    // SAFETY: accessed by single bytes only.
    let mut map = unsafe { options.map_copy(&object) }.unwrap();
    let at = map.as_mut_ptr();
    for page in 0..20 {
        assert!(store(at, page * PAGE, 0xdd));
    }
    test(&space, &object, &bytes, at);
}

#[test]
fn what_the_program_drops_by_itself_is_the_objects_again() {
    with_written(|space, object, bytes, at| {
        object.drop_cached(0..10 * PAGE as u64);
        drop_bare(at, 16);
        for page in 0..16 {
            if page % 2 == 0 {
                assert_eq!(load(at, page * PAGE), Some(bytes[page * PAGE]), "page {page}");
            }
            assert!(store(at, page * PAGE + 1, page as u8));
        }
        press(space);
        for page in 0..16 {
            assert_eq!(load(at, page * PAGE), Some(bytes[page * PAGE]), "page {page}");
            assert_eq!(load(at, page * PAGE + 1), Some(page as u8));
        }
        assert_eq!(load(at, 17 * PAGE), Some(0xdd), "not dropped");
    });
}

#[test]
fn what_the_program_drops_by_itself_can_be_reclaimed() {
    with_written(|space, _, bytes, at| {
        drop_bare(at, 16);
        press(space);
        for page in 0..16 {
            assert_eq!(load(at, page * PAGE), Some(bytes[page * PAGE]), "page {page}");
        }
        assert_eq!(load(at, 17 * PAGE), Some(0xdd), "not dropped");
    });
}

#[test]
fn what_the_program_drops_by_itself_is_read_from_the_object_without_a_fault() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = packable(20 * PAGE, 19);
    let object = object_of(&space, &bytes);
    // SAFETY: nothing writes the object.
    let mut map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    map.fill(0xdd);
    drop_bare(map.as_mut_ptr(), 16);
    let mut read = vec![0; bytes.len()];
    assert_eq!(map.try_read(0, &mut read).unwrap(), bytes.len());
    assert!(read[..16 * PAGE] == bytes[..16 * PAGE], "dropped");
    assert!(read[16 * PAGE..].iter().all(|&byte| byte == 0xdd), "not dropped");
}

#[test]
fn what_the_program_drops_by_itself_is_gone_behind_an_end_that_came_meanwhile() {
    with_written(|_, object, bytes, at| {
        object.set_len(2 * PAGE as u64).unwrap();
        drop_bare(at, 16);
        assert_eq!(load(at, PAGE), Some(bytes[PAGE]));
        assert_eq!(load(at, 5 * PAGE), None);
        object.set_len(10 * PAGE as u64).unwrap();
        assert_eq!(load(at, 5 * PAGE), Some(0));
    });
}

#[test]
fn faults_that_race_with_the_length_see_bytes_zeros_or_a_sigbus() {
    let _watchdog = Watchdog::new(100);
    let Some(space) = space(2 << 20) else { return };
    let bytes = vec![0x77; 256 * PAGE];
    let object = object_of(&space, &bytes);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (space, object, is_over) = (&space, &object, &is_over);
            scope.spawn(move || {
                let mut generator = Generator::new(seed);
                while !is_over.load(Ordering::Relaxed) {
                    let options = MapOptions::new().len(256 * PAGE as u64).beyond_end(true);
                    // SAFETY: accessed by single bytes only.
                    let map = unsafe { options.map_copy(object) }.unwrap();
                    let mut written = std::collections::BTreeSet::new();
                    for _ in 0..200 {
                        let page = generator.below(256);
                        if generator.below(4) == 0 && store(map.as_ptr(), page * PAGE, 5) {
                            written.insert(page);
                        }
                        let seen = load(map.as_ptr(), page * PAGE);
                        if written.contains(&page) {
                            assert_eq!(seen, Some(5), "page {page} was written");
                        } else {
                            assert!(matches!(seen, Some(0x77 | 0) | None), "page {page}: {seen:?}");
                            assert!(seen.is_some() || page >= 16, "page {page}");
                        }
                    }
                    assert!(space.held().0 <= space.memory());
                }
            });
        }
        let mut generator = Generator::new(99);
        for _ in 0..300 {
            let pages = 16 + generator.below(241);
            object.set_len((pages * PAGE) as u64).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn without_fault_around_a_fault_copies_exactly_one_page() {
    let Some(space) = space(8 << 20) else { return };
    let bytes = random(2 << 20, 13);
    let object = object_of(&space, &bytes);
    let mut all = vec![0; bytes.len()];
    object.read_at(0, &mut all).unwrap();
    for (setting, expected) in
        [(FaultAround::Off, 1), (FaultAround::Order(3), 8), (FaultAround::Order(6), 64)]
    {
        // SAFETY: nothing writes the object.
        let map = unsafe { MapOptions::new().fault_around(setting).map_copy(&object) }.unwrap();
        assert_eq!(map[100 * PAGE + 5], bytes[100 * PAGE + 5]);
        assert_eq!(map.mapped_pages(), expected, "{setting:?}");
        map.populate_cached(0..256 * PAGE);
        assert!(map.mapped_pages() >= 256);
    }
}

#[test]
fn threads_that_write_their_own_bytes_lose_none_under_pressure() {
    let _watchdog = Watchdog::new(200);
    const THREADS: usize = 4;
    let Some(space) = space(1 << 20) else { return };
    let bytes = packable(8 << 20, 14);
    let object = object_of(&space, &bytes);
    // SAFETY: each byte is one thread's.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    let start = map.as_ptr() as usize;
    let len = bytes.len();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let bytes = &bytes;
            scope.spawn(move || {
                let mut oracle: Vec<u8> =
                    bytes.iter().skip(thread).step_by(THREADS).copied().collect();
                let mut generator = Generator::new(thread as u64 + 20);
                for _ in 0..10_000 {
                    let own = generator.below(len / THREADS);
                    let at = (start + own * THREADS + thread) as *mut u8;
                    let value = generator.next_u64() as u8;
                    // SAFETY: a byte of the mapping that only this thread uses.
                    let seen = unsafe { core::ptr::replace(at, value) };
                    assert_eq!(seen, oracle[own], "byte {own} of thread {thread}");
                    oracle[own] = value;
                }
                for (own, &value) in oracle.iter().enumerate().step_by(97) {
                    // SAFETY: as above.
                    let seen = unsafe { *((start + own * THREADS + thread) as *const u8) };
                    assert_eq!(seen, value, "byte {own} of thread {thread}");
                }
            });
        }
        // Advice splits VMAs meanwhile, and pages go that were only read.
        for round in 0..200 {
            let from = round % 7 * (len / 8);
            let pattern = if round % 2 == 0 {
                quire::library::Pattern::Random
            } else {
                quire::library::Pattern::Normal
            };
            map.advise(pattern, from..from + len / 8).unwrap();
            map.dont_need(from..from + len / 16);
        }
    });
}

#[test]
fn a_copy_outlives_its_objects_handle() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(40 * PAGE, 15);
    let object = object_of(&space, &bytes);
    // SAFETY: nothing writes the object.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    drop(object);
    assert!(map[..] == bytes[..]);
    drop(map);
    wait_until(|| space.held().0 <= space.memory());
}

/// The simulator has found that a copy read the store again, whose bytes are older.
#[test]
fn a_bad_page_is_an_error_in_copies_until_it_is_given_up() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(8 * PAGE, 21);
    let object = object_of(&space, &bytes);
    let options = MapOptions::new();
    // SAFETY: what is written is read by this thread alone.
    let (shared, copy) =
        unsafe { (options.map_mut(&object).unwrap(), options.map_copy(&object).unwrap()) };
    let (newer, at) = (!bytes[3 * PAGE], 3 * PAGE);
    assert!(store(shared.as_ptr(), at, newer));
    assert!(object.poison(at as u64).unwrap());
    assert_eq!(load(copy.as_ptr(), at), None, "the store's byte is not what was there");
    assert_eq!(load(shared.as_ptr(), at), None, "nor is the page well again by the copy's fault");
    assert_eq!(load(copy.as_ptr(), at + PAGE), Some(bytes[at + PAGE]));
    assert_eq!(object.unpoison(0..bytes.len() as u64), PAGE);
    assert_eq!(load(copy.as_ptr(), at), Some(bytes[at]), "given up");
    assert_eq!(load(shared.as_ptr(), at), Some(bytes[at]));
}

/// Both kinds of memory that go to swap, one made from the other, through a fifth of what they need.
#[test]
fn a_memory_object_and_its_copy_are_swapped_side_by_side() {
    let _watchdog = Watchdog::new(200);
    let dir = Dir::new();
    let Some(space) = space_by(&of_memory(2 << 20).swap(&dir.0, 64 << 20)) else { return };
    let len = 5 << 20;
    let object = space.create_memory(len as u64).unwrap();
    let mut bytes = random(len, 31);
    let options = MapOptions::new();
    // SAFETY: what is written is read by this thread alone.
    let mut shared = unsafe { options.map_mut(&object) }.unwrap();
    shared.copy_from_slice(&bytes);
    // SAFETY: as above.
    let mut copy = unsafe { options.map_copy(&object) }.unwrap();
    // From its first write on a page of the copy is as it is; until then it follows the object.
    let mut copied = bytes.clone();
    for at in (0..len).step_by(PAGE) {
        copy[at] = !bytes[at];
        copied[at] = !bytes[at];
    }
    let mut generator = Generator::new(33);
    for round in 0..2000 {
        let at = generator.below(len);
        let value = generator.next_u64() as u8;
        if round % 2 == 0 {
            shared[at] = value;
            bytes[at] = value;
        } else {
            copy[at] = value;
            copied[at] = value;
        }
        let at = generator.below(len);
        assert_eq!(shared[at], bytes[at], "byte {at} of the object in round {round}");
        assert_eq!(copy[at], copied[at], "byte {at} of the copy in round {round}");
    }
    assert!(shared[..] == bytes[..] && copy[..] == copied[..], "all bytes");
    assert!(space.counter("pswpin") > 0, "nothing was read from the swap file");
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}
