//! Memory objects on the real MMU: their pages read as zeros at first, and later as what was written,
//! wherever the bytes have been meanwhile.

#[path = "common/objects.rs"]
mod objects;

use std::sync::atomic::Ordering;

use objects::{Dir, PAGE, Watchdog, load, random, space, space_by, store, wait_until, word};
use quire::library::{AddressSpace, Delivery, MapOptions, MappingMut, Object, OpenOptions};
use quire_simulated::Generator;

const MIB: usize = 1 << 20;

fn map_mut(object: &Object) -> MappingMut {
    // SAFETY: the tests share bytes between mappings by volatile and atomic accesses only.
    unsafe { MapOptions::new().map_mut(object) }.unwrap()
}

/// A page that compresses to about half, and that says which one it is.
fn half_random(page: usize, round: u64) -> Vec<u8> {
    let mut bytes = random(PAGE, page as u64 * 31 + round);
    bytes[PAGE / 2..].fill(page as u8);
    bytes
}

/// All that a space holds once nothing is open in it any more.
fn assert_empty(space: &AddressSpace) {
    // The background thread may have a segment in hand, or a slab that it compacts.
    wait_until(|| space.packed_pages() == 0 && space.swap_usage().1 == 0);
    // The pool keeps an empty slab of a size that was much used.
    wait_until(|| space.held().0 == space.swap_usage().0);
    let (pool, _) = space.swap_usage();
    assert!(pool <= 64 * PAGE * 4, "{pool} bytes of empty slabs");
}

#[test]
fn what_was_never_written_is_zeros_and_is_not_read() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 * MIB) else { return };
    let object = space.create_memory(64 * MIB as u64).unwrap();
    assert_eq!(object.len(), 64 * MIB as u64);
    let map = map_mut(&object);
    assert!(map.iter().step_by(PAGE / 2).all(|&byte| byte == 0));
    let mut bytes = vec![1; 3 * PAGE];
    assert_eq!(object.read_at(17, &mut bytes).unwrap(), bytes.len());
    assert!(bytes.iter().all(|&byte| byte == 0));
    assert_eq!(space.counter("pgpgin") + space.counter("pswpin"), 0, "nothing is read");
    assert_eq!(space.counter("zswpout"), 0, "zeros that were never written are not packed");
    let (_, most) = space.held();
    assert!(most <= 4 * MIB, "{most} bytes were held");
    drop((map, object));
    assert_empty(&space);
}

/// Each thread has words of its own in every page, and a plain array that says what they are.
fn write_at_random(space: &AddressSpace, object: &Object, threads: usize, rounds: usize) {
    let pages = object.len() as usize / PAGE;
    let map = map_mut(object);
    let start = map.as_ptr() as usize;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut generator = Generator::new(thread as u64 + 7);
                let mut oracle = vec![0u64; pages];
                for round in 0..rounds {
                    let page = generator.below(pages);
                    let at = page * PAGE + (thread + page % 16 * threads) * 8;
                    let word = word(start as *const u8, at);
                    let found = word.load(Ordering::Relaxed);
                    assert_eq!(found, oracle[page], "page {page}, thread {thread}, {round}");
                    if generator.one_in(2) {
                        oracle[page] = generator.next_u64();
                        word.store(oracle[page], Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (_, most) = space.held();
    assert!(most <= space.memory(), "{most} bytes were held");
}

#[test]
fn random_writes_of_several_threads_are_there_with_an_eighth_of_the_memory() {
    let _watchdog = Watchdog::new(240);
    let Some(space) = space(4 * MIB) else { return };
    let object = space.create_memory(32 * MIB as u64).unwrap();
    write_at_random(&space, &object, 4, 20_000);
    assert!(space.counter("zswpout") > 1000, "most of it went through the pool");
    assert!(space.counter("zswpin") > 1000, "and came back");
    assert_eq!(space.counter("pgpgout"), 0, "there is no store");
    drop(object);
    assert_empty(&space);
}

#[test]
fn several_mappings_show_what_was_written_after_it_was_evicted() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 * MIB) else { return };
    let object = space.create_memory(8 * MIB as u64).unwrap();
    let (mut first, second) = (map_mut(&object), map_mut(&object));
    let pages = first.len() / PAGE;
    for round in 1..4u8 {
        for page in 0..pages {
            first[page * PAGE + 9] = round ^ page as u8;
        }
        for page in 0..pages {
            // SAFETY: a read of memory that another mapping shows.
            let seen = unsafe { second.as_ptr().add(page * PAGE + 9).read_volatile() };
            assert_eq!(seen, round ^ page as u8, "page {page} in round {round}");
        }
    }
    assert!(space.counter("pswpin") > pages as u64);
    drop((first, second, object));
    assert_empty(&space);
}

#[test]
fn what_was_cut_off_is_zeros_when_the_object_grows_again() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 * MIB) else { return };
    let len = 8 * MIB as u64;
    let object = space.create_memory(len).unwrap();
    let mut map = map_mut(&object);
    for round in 0..3 {
        map.fill(0xa5);
        // In the middle of a page that is in swap by now, and of one that is cached.
        let cut = if round == 1 { len - 77 } else { MIB as u64 + 1000 };
        object.set_len(cut).unwrap();
        let page_end = (cut as usize).next_multiple_of(PAGE);
        assert!(page_end >= len as usize || load(map.as_ptr(), page_end).is_none(), "the end");
        object.set_len(len).unwrap();
        let cut = cut as usize;
        assert!(map[..cut].iter().all(|&byte| byte == 0xa5), "what is left is as it was");
        assert!(map[cut..].iter().all(|&byte| byte == 0), "what is new is zeros");
    }
    object.set_len(0).unwrap();
    assert_eq!(object.cached(), (0, 0));
    // What is cut off has nothing in swap, once compaction is over.
    wait_until(|| space.packed_pages() == 0);
    drop((map, object));
    assert_empty(&space);
}

/// Writers, reclaim and a thread that changes the length, all at once: nothing is left of what was cut
/// off, and no account is wrong afterwards.
#[test]
fn nothing_is_left_in_swap_of_an_object_that_is_cut_while_it_is_written() {
    let _watchdog = Watchdog::new(120);
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(2 * MIB).swap(&dir.0, 32 * MIB as u64);
    let Some(space) = space_by(&builder) else { return };
    let len = 8 * MIB as u64;
    let object = space.create_memory(len).unwrap();
    let map = map_mut(&object);
    let start = map.as_ptr() as usize;
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || {
                let mut generator = Generator::new(thread);
                for _ in 0..20_000 {
                    let at = generator.below(len as usize);
                    // A SIGBUS, where it is behind the end just now.
                    store(start as *const u8, at, generator.next_u64() as u8);
                }
            });
        }
        let mut generator = Generator::new(99);
        for _ in 0..60 {
            object.set_len(generator.below(len as usize) as u64).unwrap();
            object.set_len(len).unwrap();
        }
    });
    assert!(space.counter("pswpout") > 0);
    object.set_len(PAGE as u64 / 2).unwrap();
    object.set_len(len).unwrap();
    assert!(map[PAGE / 2..].iter().all(|&byte| byte == 0), "what is new is zeros");
    object.set_len(0).unwrap();
    assert_eq!(object.cached(), (0, 0));
    wait_until(|| space.packed_pages() == 0);
    drop((map, object));
    assert_empty(&space);
}

#[test]
fn an_object_grows_under_its_mapping_up_to_what_it_was_made_for() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 * MIB) else { return };
    let object = OpenOptions::new().len_max(4 * MIB as u64).memory(&space, 10).unwrap();
    // SAFETY: used by this thread alone.
    let map = unsafe { MapOptions::new().len(4 * MIB as u64).beyond_end(true).map_mut(&object) };
    let map = map.unwrap();
    assert_eq!(load(map.as_ptr(), 5), Some(0));
    assert_eq!(load(map.as_ptr(), MIB), None, "behind the end");
    object.set_len(4 * MIB as u64).unwrap();
    assert!(store(map.as_ptr(), MIB, 3));
    assert_eq!(load(map.as_ptr(), MIB), Some(3));
    assert_eq!(object.refresh_len().unwrap(), 4 * MIB as u64);
    let error = object.set_len(5 * MIB as u64).unwrap_err();
    assert!(matches!(error, quire::library::Error::TooLong { .. }), "{error}");
}

#[test]
fn there_is_nothing_to_flush_and_writers_do_not_wait_for_it() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(8 * MIB) else { return };
    let object = space.create_memory(6 * MIB as u64).unwrap();
    let mut map = map_mut(&object);
    // More than the quarter of the memory that may be dirty of files.
    map.fill(7);
    map.flush().unwrap();
    object.sync().unwrap();
    object.flush_range(0..u64::MAX).unwrap();
    assert_eq!(object.cached().1, 0, "nothing waits to be written");
    assert_eq!(space.counter("pgpgout"), 0);
    assert!(map.iter().all(|&byte| byte == 7));
}

/// Twice as much as fits, none of which can be compressed.
#[test]
fn what_cannot_be_compressed_goes_to_the_swap_file_and_comes_back() {
    let _watchdog = Watchdog::new(240);
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(4 * MIB).swap(&dir.0, 64 * MIB as u64);
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(16 * MIB as u64).unwrap();
    let mut map = map_mut(&object);
    let pages = map.len() / PAGE;
    for round in 0..2 {
        for (page, bytes) in map.chunks_exact_mut(PAGE).enumerate() {
            bytes.copy_from_slice(&random(PAGE, page as u64 + round));
        }
        let mut generator = Generator::new(round);
        for _ in 0..1000 {
            let page = generator.below(pages);
            let expected = random(PAGE, page as u64 + round);
            assert!(map[page * PAGE..][..PAGE] == expected, "page {page} in round {round}");
        }
    }
    assert!(space.counter("zswpwb") > 1000, "most of it went to the file");
    let mut bytes = vec![0; PAGE * 3];
    assert_eq!(object.read_at(PAGE as u64, &mut bytes).unwrap(), bytes.len());
    assert!(bytes[..PAGE] == random(PAGE, 2), "a read without a mapping");
    assert!(space.swap_usage().1 > 0);
    let (_, most) = space.held();
    assert!(most <= 4 * MIB, "{most} bytes were held");
    drop((map, object));
    assert_empty(&space);
}

#[test]
fn random_writes_are_there_by_way_of_the_swap_file_whose_segments_are_cleaned() {
    let _watchdog = Watchdog::new(240);
    let dir = Dir::new();
    // Not much more than the object: segments have to be gathered to be written again.
    let builder = AddressSpace::builder().memory(2 * MIB).swap(&dir.0, 14 * MIB as u64);
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(8 * MIB as u64).unwrap();
    {
        let mut map = map_mut(&object);
        for (page, bytes) in map.chunks_exact_mut(PAGE).enumerate() {
            // The words that the threads use stay zero.
            bytes[PAGE / 4..].copy_from_slice(&random(PAGE / 4 * 3, page as u64));
        }
    }
    write_at_random(&space, &object, 2, 10_000);
    assert!(space.counter("zswpwb") > 1000, "it went to the file");
    drop(object);
    assert_empty(&space);
}

#[test]
fn a_page_that_was_only_read_goes_again_without_being_packed_again() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(4 * MIB) else { return };
    let object = space.create_memory(6 * MIB as u64).unwrap();
    let mut map = map_mut(&object);
    for (page, bytes) in map.chunks_exact_mut(PAGE).enumerate() {
        bytes.copy_from_slice(&half_random(page, 0));
    }
    for _ in 0..4 {
        for (page, bytes) in map.chunks_exact(PAGE).enumerate() {
            assert!(bytes == half_random(page, 0), "page {page}");
        }
    }
    assert!(space.counter("pswpout_clean") > 100, "{:?}", space.counters());
    // And what is written after it was kept clean is not what was kept.
    for page in (0..map.len() / PAGE).rev() {
        map[page * PAGE + 1] ^= 0xff;
    }
    for (page, bytes) in map.chunks_exact(PAGE).enumerate() {
        let mut expected = half_random(page, 0);
        expected[1] ^= 0xff;
        assert!(bytes == expected, "page {page}");
    }
    drop((map, object));
    assert_empty(&space);
}

#[test]
fn threads_that_serve_themselves_have_their_pages_swapped_as_well() {
    let _watchdog = Watchdog::new(240);
    let builder = AddressSpace::builder().memory(2 * MIB).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(8 * MIB as u64).unwrap();
    write_at_random(&space, &object, 2, 4_000);
    assert!(space.counter("pswpin") > 500);
    drop(object);
    assert_empty(&space);
}

#[test]
fn what_is_read_ahead_and_mapped_around_is_what_was_written() {
    let _watchdog = Watchdog::new(120);
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(8 * MIB).swap(&dir.0, 128 * MIB as u64);
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(24 * MIB as u64).unwrap();
    let pages = object.len() as usize / PAGE;
    let mut map = map_mut(&object);
    for (page, bytes) in map.chunks_exact_mut(PAGE).enumerate() {
        bytes.copy_from_slice(&half_random(page, 5));
    }
    let faults = space.counter("pgfault");
    for (page, bytes) in map.chunks_exact(PAGE).enumerate() {
        assert!(bytes == half_random(page, 5), "page {page}");
    }
    let faults = space.counter("pgfault") - faults;
    assert!(faults < pages as u64 / 4, "{faults} faults for {pages} pages in order");
    drop((map, object));
    assert_empty(&space);
}

/// With more than fits that cannot be compressed, and no swap file or a full one, the process runs
/// out of memory, as with anonymous memory: it says so, and is killed. A byte is never lost.
#[test]
fn where_nothing_has_room_any_more_the_process_is_out_of_memory() {
    const INSIDE: &str = "QUIRE_MEMORY_INSIDE";
    let Some(swap_mib) = std::env::var(INSIDE).ok() else {
        let test = "where_nothing_has_room_any_more_the_process_is_out_of_memory";
        let begin = |swap_mib: &str| {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args([test, "--exact", "--nocapture"])
                .env(INSIDE, swap_mib)
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        };
        let children = [("0", "there is no swap file"), ("2", "the swap file is full")];
        for (child, why) in children.map(|(swap_mib, why)| (begin(swap_mib), why)) {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            if text.contains("NOT TESTED") {
                return;
            }
            let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
            assert_eq!(signal, Some(9), "{output:?}");
            assert!(text.contains("quire: out of memory") && text.contains(why), "{text}");
        }
        return;
    };
    let _watchdog = Watchdog::new(120);
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(2 * MIB);
    let builder = match swap_mib.parse::<u64>().unwrap() {
        0 => builder,
        mib => builder.swap(&dir.0, mib << 20),
    };
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(8 * MIB as u64).unwrap();
    let mut map = map_mut(&object);
    for (page, bytes) in map.chunks_exact_mut(PAGE).enumerate() {
        bytes.copy_from_slice(&random(PAGE, page as u64));
        if page % 16 == 0 {
            let before = page / 2;
            // SAFETY: a byte of the mapping.
            let seen = unsafe { bytes.as_ptr().sub((page - before) * PAGE).read_volatile() };
            assert_eq!(seen, random(1, before as u64)[0], "page {before}");
        }
    }
    panic!("all of it has found room");
}

#[test]
fn what_a_page_has_in_swap_outlives_its_memory() {
    let _watchdog = Watchdog::new(60);
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(4 * MIB).swap(&dir.0, 64 * MIB as u64);
    let Some(space) = space_by(&builder) else { return };
    let object = space.create_memory(16 * MIB as u64).unwrap();
    let mut map = map_mut(&object);
    let pages = object.len() as usize / PAGE;
    for page in 0..pages {
        map[page * PAGE..][..PAGE].copy_from_slice(&half_random(page, 0));
    }
    let at = |page: usize| (page * PAGE) as u64;
    let is_as_written = |page: usize, bytes: usize| {
        let found = &map[page * PAGE..][..bytes];
        let is_lost = found.iter().all(|&byte| byte == 0);
        assert!(is_lost || *found == half_random(page, 0)[..bytes], "page {page}");
        !is_lost
    };
    for page in (0..pages).step_by(3) {
        assert!(object.poison(at(page)).unwrap());
        assert_eq!(load(map.as_ptr(), page * PAGE), None);
    }
    // While more is packed, compacted, and dropped.
    assert!((0..pages).filter(|page| page % 3 != 0).all(|page| is_as_written(page, PAGE)));
    // A cut into one of them.
    assert!(object.poison(at(30)).unwrap());
    object.set_len(at(30) + 100).unwrap();
    object.set_len(at(pages)).unwrap();
    object.unpoison(0..at(pages));
    let kept = (0..30).filter(|&page| is_as_written(page, PAGE)).count();
    assert!(kept > 20, "{kept} pages are left");
    is_as_written(30, 100);
    assert!(map[30 * PAGE + 100..].iter().all(|&byte| byte == 0));
    drop((map, object));
    assert_empty(&space);
}
