//! Pinned ranges of mappings: they stay, whatever else needs memory, and the kernel may hold them.

#[path = "common/objects.rs"]
mod common;

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, drop_pages, load, press, random, space, space_by,
    survive_sigbus, wait_until,
};
use quire::library::{
    AddressSpace, Delivery, Error, MapOptions, Object, OpenOptions, PinnedMut, RemapOptions,
};
use quire_test_stores::VecStore;
use rustix::io::Errno;
use rustix::pipe::{IoSliceRaw, SpliceFlags, vmsplice};

/// The least that an address space does with.
const SMALLEST: usize = 1 << 20;

/// A writable object over bytes in memory.
fn probe(space: &AddressSpace, bytes: &[u8]) -> (Arc<Probe>, Object) {
    let store = Probe::new(bytes.to_vec());
    let object = Object::with_store(space, Arc::clone(&store), None).unwrap();
    (store, object)
}

/// The pinned bytes, for a system call that writes them.
#[allow(clippy::mut_from_ref, reason = "the pin is what keeps the bytes, not where they are")]
fn target<'a>(pin: &'a PinnedMut<'_>) -> &'a mut [u8] {
    // SAFETY: pinned, so mapped and writable; each test has one such slice at a time.
    unsafe { std::slice::from_raw_parts_mut(pin.as_mut_ptr(), pin.len()) }
}

#[test]
fn what_is_pinned_stays_mapped_while_everything_else_is_reclaimed_and_goes_afterwards() {
    let Some(space) = space(SMALLEST) else { return };
    let bytes = random(64 * PAGE, 1);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), Some(0)).unwrap();
    // SAFETY: nothing writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    // Bytes that are no pages: the pages are pinned whole.
    let pin = map.pin(3 * PAGE + 100..19 * PAGE + 1).unwrap();
    assert_eq!((pin.range(), pin.len()), (3 * PAGE + 100..19 * PAGE + 1, 16 * PAGE - 99));
    assert_eq!(space.pinned(), (17 * PAGE, SMALLEST / 2));
    for _ in 0..3 {
        press(&space);
        assert_eq!(object.cached().0, 17 * PAGE, "all else has gone");
        assert_eq!(map.mapped_pages(), 17, "second chances are not for what is pinned");
        assert_eq!(object.drop_cached(0..u64::MAX) + map.dont_need(0..map.len()), 0);
    }
    let faults = space.counter("pgfault");
    assert!(map[3 * PAGE..20 * PAGE] == bytes[3 * PAGE..20 * PAGE]);
    assert_eq!(space.counter("pgfault"), faults, "no access has faulted");
    drop(pin);
    assert_eq!(space.pinned().0, 0);
    drop_pages(&object, 0..u64::MAX, 17);
    assert_eq!(map.mapped_pages(), 0);
}

#[test]
fn overlapping_pins_nest() {
    let Some(space) = space(SMALLEST) else { return };
    let (_, object) = probe(&space, &random(16 * PAGE, 2));
    // SAFETY: nothing else uses the store.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let first = map.pin(0..8 * PAGE).unwrap();
    let second = map.pin_write(4 * PAGE..12 * PAGE).unwrap();
    let third = map.pin_write(4 * PAGE..5 * PAGE).unwrap();
    assert_eq!(space.pinned().0, 12 * PAGE, "a page counts once");
    drop(first);
    press(&space);
    assert_eq!((space.pinned().0, object.cached().0), (8 * PAGE, 8 * PAGE));
    drop(second);
    map.flush().unwrap();
    assert_eq!(object.cached().1, PAGE, "the third one is for write as well");
    press(&space);
    assert_eq!((space.pinned().0, object.cached().0), (PAGE, PAGE));
    drop(third);
    map.flush().unwrap();
    press(&space);
    assert_eq!((space.pinned().0, object.cached()), (0, (0, 0)));
}

#[test]
fn more_than_half_of_the_memory_is_not_pinned_and_then_nothing_is() {
    let Some(space) = space(SMALLEST) else { return };
    let bytes = random(256 * PAGE, 3);
    let (store, object) = probe(&space, &bytes);
    // SAFETY: nothing else uses the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    let error = map.pin(0..129 * PAGE).unwrap_err();
    assert!(matches!(error, Error::TooMuchPinned { most, .. } if most == SMALLEST / 2), "{error}");
    let half = map.pin(0..100 * PAGE).unwrap();
    let error = map.pin(90 * PAGE..140 * PAGE).unwrap_err();
    assert!(matches!(error, Error::TooMuchPinned { .. }), "{error}");
    assert_eq!(space.pinned().0, 100 * PAGE, "of the second one nothing is left");
    press(&space);
    assert_eq!(object.cached().0, 100 * PAGE);
    drop(half);
    assert_eq!(space.pinned().0, 0);
    press(&space);
    // The same where a page of it cannot be read, and then where it can.
    store.set_bad(20, true);
    let error = map.pin(0..32 * PAGE).unwrap_err();
    assert!(matches!(error, Error::Store(_)), "{error}");
    assert_eq!(space.pinned().0, 0);
    store.set_bad(20, false);
    let _pin = map.pin(0..32 * PAGE).unwrap();
    assert!(map[..32 * PAGE] == bytes[..32 * PAGE]);
    let error = map.pin(0..256 * PAGE + 1).unwrap_err();
    assert!(matches!(error, Error::BadRange { .. }), "{error}");
}

#[test]
fn a_system_call_can_write_what_is_pinned_for_write_where_threads_serve_themselves() {
    // Before the address space takes SIGBUS over.
    survive_sigbus();
    let builder = AddressSpace::builder().memory(SMALLEST).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else { return };
    let dir = Dir::new();
    let source = random(32 * PAGE, 4);
    let file = File::open(dir.file("source", &source)).unwrap();
    let mut expected = random(64 * PAGE, 5);
    let path = dir.file("target", &expected);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    // SAFETY: nothing else uses the file.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // SAFETY: inside of the mapping, of which no slice is in use.
    let unpinned = unsafe { std::slice::from_raw_parts_mut(map.as_ptr().cast_mut(), 32 * PAGE) };
    map.populate(0..32 * PAGE).unwrap();
    assert_eq!(
        rustix::io::pread(&file, &mut *unpinned, 0),
        Err(Errno::FAULT),
        "mapped, but protected"
    );
    let pin = map.pin_write(0..32 * PAGE).unwrap();
    for round in 0..20 {
        press(&space);
        // What write-back does to a page that is not pinned is what makes it fail above.
        map.flush().unwrap();
        assert_eq!(object.cached().1, 32 * PAGE, "dirty, for all that is known");
        let at = round % 8 * PAGE;
        let done = rustix::io::pread(&file, &mut target(&pin)[at..], (round % 5 * PAGE) as u64);
        let done = done.unwrap();
        let from = round % 5 * PAGE;
        assert_eq!(done, 32 * PAGE - at.max(from), "round {round}");
        expected[at..at + done].copy_from_slice(&source[from..from + done]);
        assert!(map[..32 * PAGE] == expected[..32 * PAGE], "round {round}");
    }
    map.flush().unwrap();
    assert!(std::fs::read(&path).unwrap() == expected, "a flush writes what is pinned");
    drop(pin);
    map.flush().unwrap();
    assert_eq!(object.cached().1, 0, "it can be clean now");
    assert_eq!(
        rustix::io::pread(&file, &mut *unpinned, 0),
        Err(Errno::FAULT),
        "and is protected again"
    );
}

#[test]
fn a_write_to_what_is_pinned_is_not_lost_between_two_flushes() {
    let Some(space) = space(SMALLEST) else { return };
    let (store, object) = probe(&space, &vec![0; 8 * PAGE]);
    // SAFETY: nothing else uses the store.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let pin = map.pin_write(0..8 * PAGE).unwrap();
    let faults = space.counter("pgfault");
    for round in 1..=50u8 {
        target(&pin).fill(round);
        map.flush().unwrap();
        assert!(store.inner.bytes().iter().all(|&byte| byte == round), "round {round}");
    }
    target(&pin).fill(99);
    assert_eq!(space.counter("pgfault"), faults, "no write is noticed, none need be");
    drop(pin);
    map.flush().unwrap();
    assert!(store.inner.bytes().iter().all(|&byte| byte == 99), "written after the last flush");
    // A write that fails leaves it dirty, as any page, and is told once.
    let pin = map.pin_write(0..PAGE).unwrap();
    target(&pin).fill(7);
    store.fail_writes(Some(Errno::IO));
    map.flush().unwrap_err();
    store.fail_writes(None);
    map.flush().unwrap();
    assert_eq!(object.cached().1, PAGE);
    assert_eq!(store.inner.bytes()[0], 7);
}

#[test]
fn what_is_pinned_for_write_does_not_stop_other_writers() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(SMALLEST) else { return };
    let (_, object) = probe(&space, &vec![0; 120 * PAGE]);
    let (other_store, other) = probe(&space, &vec![0; 256 * PAGE]);
    // SAFETY: nothing else uses the stores.
    let (map, mut other_map) = unsafe {
        (MapOptions::new().map_mut(&object).unwrap(), MapOptions::new().map_mut(&other).unwrap())
    };
    // Almost twice as much as may be dirty.
    let pin = map.pin_write(0..120 * PAGE).unwrap();
    target(&pin).fill(5);
    for page in 0..256 {
        other_map[page * PAGE] = page as u8;
    }
    other_map.flush().unwrap();
    let written = other_store.inner.bytes();
    assert!((0..256).all(|page| written[page * PAGE] == page as u8));
    drop(pin);
    for page in 0..256 {
        other_map[page * PAGE] = !(page as u8);
    }
    map.flush().unwrap();
    assert_eq!(object.cached().1, 0);
}

#[test]
fn a_cut_through_a_pinned_page_is_refused_and_one_behind_it_is_not() {
    let Some(space) = space(SMALLEST) else { return };
    let bytes = random(40 * PAGE, 6);
    let (store, object) = probe(&space, &bytes);
    // SAFETY: accesses behind the end are made by `load` only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let pin = map.pin_write(8 * PAGE..16 * PAGE).unwrap();
    for len in [0, 10 * PAGE + 5, 15 * PAGE, 16 * PAGE - 1] {
        let error = object.set_len(len as u64).unwrap_err();
        assert!(matches!(error, Error::Pinned { len: said, .. } if said == len as u64), "{error}");
        assert_eq!((object.len(), store.inner.bytes().len()), (40 * PAGE as u64, 40 * PAGE));
    }
    // A cut of the store from outside is followed as soon as it can be.
    object.set_len(16 * PAGE as u64).unwrap();
    assert_eq!(load(map.as_ptr(), 16 * PAGE), None);
    quire::store::Store::set_len(&store.inner, 9 * PAGE as u64).unwrap();
    assert!(matches!(object.refresh_len(), Err(Error::Pinned { .. })));
    assert_eq!(object.len(), 16 * PAGE as u64);
    assert!(map[8 * PAGE..16 * PAGE] == bytes[8 * PAGE..16 * PAGE]);
    assert!(matches!(map.pin(15 * PAGE..17 * PAGE), Err(Error::BadRange { .. })), "behind the end");
    assert_eq!(space.pinned().0, 8 * PAGE);
    drop(pin);
    assert_eq!(object.refresh_len().unwrap(), 9 * PAGE as u64);
    assert_eq!(load(map.as_ptr(), 9 * PAGE), None);
    // Longer is no harm.
    let _pin = map.pin(8 * PAGE..9 * PAGE).unwrap();
    object.set_len(20 * PAGE as u64).unwrap();
    assert_eq!(load(map.as_ptr(), 19 * PAGE), Some(0));
}

/// The kernel holds pages of a pipe and of direct I/O, and the engine does not see that.
#[test]
fn pages_that_the_kernel_holds_keep_their_bytes_while_memory_is_reclaimed() {
    let _watchdog = Watchdog::new(240);
    let builder = AddressSpace::builder().memory(64 << 20);
    let Some(space) = space_by(&builder) else { return };
    let dir = Dir::new();
    let bytes = random(98 << 20, 7);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    // SAFETY: nothing writes the file.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    let out = dir.0.join("out");
    let direct = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(&out)
        .inspect_err(|error| eprintln!("NOT TESTED with direct I/O: {error}"))
        .ok();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&is_done);
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                assert!(
                    map.iter().step_by(PAGE).zip(bytes.iter().step_by(PAGE)).all(|(a, b)| a == b)
                );
            }
        });
        for round in 0..24usize {
            let at = (round * 337 + 3) % 1560 * 16 * PAGE;
            let range = at..at + 16 * PAGE;
            let pin = map.pin(range.clone()).unwrap();
            // SAFETY: pinned until the pipe is read.
            let slice = IoSliceRaw::from_slice(unsafe {
                std::slice::from_raw_parts(pin.as_ptr(), pin.len())
            });
            let (read, write) = rustix::pipe::pipe().unwrap();
            // SAFETY: not a gift; the bytes do not change.
            let put = unsafe { vmsplice(&write, &[slice], SpliceFlags::empty()) }.unwrap();
            assert!(put >= PAGE, "{put} bytes went into the pipe");
            let before = space.counter("pgpgin");
            if let Some(direct) = &direct {
                direct.write_all_at(&map[range.clone()], at as u64).unwrap();
            }
            // As much is read as the whole memory holds.
            while space.counter("pgpgin") < before + (16 << 10) {
                std::thread::yield_now();
            }
            let mut seen = vec![0; put];
            File::from(read).read_exact(&mut seen).unwrap();
            assert!(seen == bytes[at..at + put], "round {round}");
            if direct.is_some() {
                let mut written = vec![0; 16 * PAGE];
                File::open(&out).unwrap().read_exact_at(&mut written, at as u64).unwrap();
                assert!(written == bytes[range], "round {round}");
            }
        }
    });
}

#[test]
fn a_pinned_page_whose_memory_fails_stays_bad_until_it_is_let_go() {
    survive_sigbus();
    let Some(space) = space(SMALLEST) else { return };
    let bytes = random(16 * PAGE, 21);
    let (_, object) = probe(&space, &bytes);
    // SAFETY: looked at by single loads only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let all = 0..16 * PAGE as u64;
    for has_new_pin in [false, true] {
        let pin = map.pin(4 * PAGE..6 * PAGE).unwrap();
        assert!(object.poison(4 * PAGE as u64).unwrap());
        assert_eq!(object.unpoison(all.clone()), 0, "its holder has the page that is gone");
        assert_eq!(load(map.as_ptr(), 4 * PAGE), None);
        let error = object.set_len(4 * PAGE as u64).unwrap_err();
        assert!(matches!(error, Error::Pinned { .. }), "{error}");
        assert!(map.pin(4 * PAGE..5 * PAGE).is_err());
        assert_eq!(space.pinned().0, 2 * PAGE);
        drop(pin);
        assert_eq!(space.pinned().0, 0);
        assert_eq!(object.unpoison(all.clone()), PAGE);
        assert_eq!(load(map.as_ptr(), 4 * PAGE), Some(bytes[4 * PAGE]));
        // As good as any other again: it stays while it is pinned, and goes afterwards.
        let pin = has_new_pin.then(|| map.pin(4 * PAGE..5 * PAGE).unwrap());
        press(&space);
        assert_eq!(object.cached().0, if has_new_pin { PAGE } else { 0 });
        drop(pin);
    }
}

#[test]
fn a_pinned_page_keeps_its_memory_while_its_neighbours_get_new() {
    let _watchdog = Watchdog::new(60);
    let builder = AddressSpace::builder().memory(24 << 20);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(4 << 20, 8);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), Some(0)).unwrap();
    // SAFETY: nothing writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    let page = 600;
    let pin = map.pin(page * PAGE..(page + 1) * PAGE).unwrap();
    // A page may be held a moment longer than its fault takes.
    wait_until(|| object.migrate().unwrap() == ((4 << 20) - PAGE, PAGE));
    assert_eq!(
        map.mapped_pages(),
        1,
        "what is pinned is mapped, and nothing else until it is touched"
    );
    assert!(map[..] == bytes[..]);
    press(&space);
    assert_eq!(object.cached().0, PAGE, "its neighbours go one by one");
    assert!(map[..] == bytes[..]);
    drop(pin);
    assert!(map[..] == bytes[..]);
    // It moves with them again.
    wait_until(|| object.migrate().unwrap() == (4 << 20, 0));
}

#[test]
fn a_pinned_private_copy_keeps_its_bytes_and_can_be_written_by_system_calls() {
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let source = random(16 * PAGE, 9);
    let mut file = File::open(dir.file("source", &source)).unwrap();
    let bytes = random(32 * PAGE, 10);
    let (store, object) = probe(&space, &bytes);
    // SAFETY: the object is made shorter, but not before what is read here.
    let (map, untouched) = unsafe {
        (MapOptions::new().map_copy(&object).unwrap(), MapOptions::new().map_copy(&object).unwrap())
    };
    let read = map.pin(16 * PAGE..24 * PAGE).unwrap();
    let written = map.pin_write(0..16 * PAGE).unwrap();
    assert_eq!(space.pinned().0, 24 * PAGE);
    file.read_exact(target(&written)).unwrap();
    press(&space);
    map.dont_need(0..map.len());
    assert_eq!(map.mapped_pages(), 24, "what is pinned is mapped, all else has gone");
    object.set_len(PAGE as u64).unwrap();
    assert_eq!(map.mapped_pages(), 24, "a copy keeps what is pinned of it");
    assert!(map[..16 * PAGE] == source[..]);
    assert!(map[16 * PAGE..24 * PAGE] == bytes[16 * PAGE..24 * PAGE]);
    let error = untouched.pin(0..2 * PAGE).unwrap_err();
    assert!(matches!(error, Error::BadRange { .. }), "behind the end: {error:?}");
    drop((read, written));
    assert_eq!(space.pinned().0, 0);
    press(&space);
    assert!(map[..16 * PAGE] == source[..], "written, so it is packed and comes back");
    assert!(store.inner.bytes()[..] == bytes[..PAGE], "the store has seen nothing of it");
}

#[test]
fn pins_of_a_private_copy_that_are_never_let_go_move_with_it_and_end_with_it() {
    let Some(space) = space(SMALLEST) else { return };
    let bytes = random(16 * PAGE, 22);
    let (_, object) = probe(&space, &bytes);
    let remap = RemapOptions::new().may_move(true);
    for round in 0..3 {
        // SAFETY: nothing else uses the store.
        let map = |len| unsafe { MapOptions::new().len(len as u64).map_copy(&object) }.unwrap();
        let mut copy = map(8 * PAGE);
        let _behind = map(PAGE);
        std::mem::forget(copy.pin_write(2 * PAGE..6 * PAGE).unwrap());
        assert_eq!(space.pinned().0, 4 * PAGE);
        copy.remap(4 * PAGE, remap).unwrap();
        assert_eq!(space.pinned().0, 2 * PAGE, "round {round}: two of them have gone");
        let before = copy.as_ptr();
        copy.remap(16 * PAGE, remap).unwrap();
        assert_ne!(copy.as_ptr(), before, "it had to move");
        assert_eq!(space.pinned().0, 2 * PAGE);
        press(&space);
        assert!(copy.mapped_pages() >= 2);
        let pin = copy.pin(3 * PAGE..4 * PAGE).unwrap();
        assert_eq!(space.pinned().0, 2 * PAGE, "a page counts once");
        drop(pin);
        assert!(copy[..] == bytes[..]);
        drop(copy);
        assert_eq!(space.pinned().0, 0, "round {round}");
    }
}

#[test]
fn a_pinned_memory_object_stays_in_memory() {
    let Some(space) = space(SMALLEST) else { return };
    let object = space.create_memory(64 * PAGE as u64).unwrap();
    // SAFETY: nothing else uses it.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    map.fill(3);
    {
        let pin = map.pin_write(0..32 * PAGE).unwrap();
        target(&pin).fill(4);
        press(&space);
        assert!(object.cached().0 >= 32 * PAGE);
        let faults = space.counter("pgfault");
        assert!(map[..32 * PAGE].iter().all(|&byte| byte == 4));
        assert_eq!(space.counter("pgfault"), faults);
    }
    press(&space);
    assert!(object.cached().0 < 32 * PAGE, "it is packed like any other");
    assert!(map[..32 * PAGE].iter().all(|&byte| byte == 4));
    assert!(map[32 * PAGE..].iter().all(|&byte| byte == 3));
}

/// Pins come and go in several threads, over pages that all of them want, while others write back,
/// drop, cut and press.
#[test]
fn pins_of_many_threads_hold_whatever_else_happens() {
    let _watchdog = Watchdog::new(240);
    let Some(space) = space(2 << 20) else { return };
    let (_, object) = probe(&space, &vec![0; 128 * PAGE]);
    // SAFETY: each thread writes words of its own.
    let map = unsafe { MapOptions::new().len(96 * PAGE as u64).map_mut(&object) }.unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&is_done);
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                press(&space);
                let _ = object.set_len(97 * PAGE as u64);
                object.drop_cached(0..u64::MAX);
                map.flush().unwrap();
                object.set_len(128 * PAGE as u64).unwrap();
            }
        });
        let threads: Vec<_> = (0..3usize)
            .map(|thread| {
                let (map, object) = (&map, &object);
                scope.spawn(move || {
                    let mut generator = quire_simulated::Generator::new(thread as u64);
                    let mut kept = [0u32; 96];
                    for round in 0..400 {
                        let first = generator.below(90);
                        let pages = 1 + generator.below(6);
                        let pin = map.pin_write(first * PAGE..(first + pages) * PAGE).unwrap();
                        let pinned = page_bytes(first, pages);
                        assert_eq!(object.drop_cached(pinned), 0, "round {round}");
                        for page in 0..pages {
                            let at = page * PAGE + thread * 4;
                            // SAFETY: inside of the pinned range; all threads' accesses are atomic.
                            let word = unsafe {
                                AtomicU32::from_ptr(pin.as_mut_ptr().add(at).cast::<u32>())
                            };
                            let seen = word.load(Ordering::Relaxed);
                            assert_eq!(
                                seen,
                                kept[first + page],
                                "page {} of {round}",
                                first + page
                            );
                            kept[first + page] = generator.next_u64() as u32;
                            word.store(kept[first + page], Ordering::Relaxed);
                        }
                    }
                    kept
                })
            })
            .collect();
        let kept: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (thread, kept) in kept.iter().enumerate() {
            for (page, &value) in kept.iter().enumerate() {
                let at = page * PAGE + thread * 4;
                assert_eq!(map[at..at + 4], value.to_ne_bytes(), "page {page} of thread {thread}");
            }
        }
    });
    assert_eq!(space.pinned().0, 0);
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}

fn page_bytes(first: usize, pages: usize) -> std::ops::Range<u64> {
    (first * PAGE) as u64..((first + pages) * PAGE) as u64
}

/// What a socket takes by copying is as fine; and so is a pin of what is partly mapped already.
#[test]
fn a_gathered_write_reads_what_is_pinned_where_threads_serve_themselves() {
    // Before the address space takes SIGBUS over.
    survive_sigbus();
    let builder = AddressSpace::builder().memory(SMALLEST).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(64 * PAGE, 11);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), Some(0)).unwrap();
    // SAFETY: nothing writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    let dir = Dir::new();
    let path = dir.file("out", b"");
    let mut file = File::options().append(true).open(&path).unwrap();
    press(&space);
    let unpinned = file.write(&map[..PAGE]);
    assert_eq!(unpinned.unwrap_err().raw_os_error(), Some(Errno::FAULT.raw_os_error()));
    assert_eq!(map[5 * PAGE], bytes[5 * PAGE]);
    let (first, second) = (map.pin(0..8 * PAGE).unwrap(), map.pin(40 * PAGE..64 * PAGE).unwrap());
    press(&space);
    let parts = [IoSlice::new(&map[first.range()]), IoSlice::new(&map[second.range()])];
    assert_eq!(file.write_vectored(&parts).unwrap(), 32 * PAGE);
    let written = std::fs::read(&path).unwrap();
    assert!(written[..8 * PAGE] == bytes[..8 * PAGE] && written[8 * PAGE..] == bytes[40 * PAGE..]);
}
