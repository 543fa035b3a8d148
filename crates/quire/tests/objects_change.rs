//! Mappings that get other rights, or another length, while they are used.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, load, press, random, space, space_by, survive_sigbus,
};
use quire::library::{
    AddressSpace, Delivery, Error, MapOptions, Mapping, MappingMut, Object, OpenOptions, Pattern,
    RemapOptions,
};
use quire_simulated::Generator;
use quire_test_stores::VecStore;
use rustix::io::Errno;

const BLOCK: usize = 512 * PAGE;

fn probe(space: &AddressSpace, bytes: &[u8]) -> (Arc<Probe>, Object) {
    let store = Probe::new(bytes.to_vec());
    let object = Object::with_store(space, Arc::clone(&store), Some(64 << 20)).unwrap();
    (store, object)
}

fn map_mut(object: &Object) -> MappingMut {
    // SAFETY: each test uses the bytes by one slice at a time.
    unsafe { MapOptions::new().map_mut(object) }.unwrap()
}

fn make_mut(map: Mapping) -> MappingMut {
    // SAFETY: as above.
    unsafe { map.make_mut() }.unwrap()
}

/// Whether the kernel lets a system call write to a byte of a mapping, without changing it.
fn is_writable(start: *const u8, at: usize) -> bool {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let byte = [load(start, at).expect("inside of the object")];
    assert_eq!(rustix::io::write(&write, &byte), Ok(1));
    // SAFETY: one byte of a mapping, which gets the value that it has.
    let into = unsafe { std::slice::from_raw_parts_mut(start.add(at).cast_mut(), 1) };
    match rustix::io::read(&read, into) {
        Ok(1) => true,
        Err(Errno::FAULT) => false,
        other => panic!("{other:?}"),
    }
}

/// Whether nothing is mapped at a byte. The program cannot look without being ended; the kernel can.
fn is_gone(start: *const u8, at: usize) -> bool {
    let (_read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: never looked at by the program itself.
    let byte = unsafe { std::slice::from_raw_parts(start.add(at), 1) };
    rustix::io::write(&write, byte) == Err(Errno::FAULT)
}

#[test]
fn what_is_made_read_only_cannot_be_written_until_it_is_made_writable_again() {
    let Some(space) = space(2 << 20) else { return };
    if !space.serves_system_calls() {
        eprintln!("NOT TESTED: faults of system calls are not served here");
        return;
    }
    let mut expected = random(64 * PAGE, 1);
    let (store, object) = probe(&space, &expected);
    let mut map = map_mut(&object);
    let start = map.as_ptr();
    for round in 0..4u8 {
        let at = usize::from(round) * PAGE;
        map[at] = round;
        map[20 * PAGE] = round;
        (expected[at], expected[20 * PAGE]) = (round, round);
        let dirty = object.cached().1;
        assert!(dirty > 0);
        let read_only = map.make_read_only().unwrap();
        assert_eq!(read_only.as_ptr(), start, "in its place");
        // A worker may still be opening the pages around the last write.
        assert!(object.cached().1 >= dirty, "and what is dirty is dirty still");
        assert!(read_only[..] == expected[..]);
        assert!(!is_writable(start, at) && !is_writable(start, 40 * PAGE));
        if round % 2 == 0 {
            object.sync().unwrap();
            assert!(store.inner.bytes() == expected);
            assert_eq!(object.cached().1, 0);
        }
        if round == 2 {
            press(&space);
        }
        map = make_mut(read_only);
        assert!(is_writable(start, at));
        assert!(object.cached().1 > 0, "a write after the flush is noticed");
    }
    map.flush().unwrap();
    assert!(store.inner.bytes() == expected);
}

#[test]
fn a_write_is_noticed_where_all_of_a_block_was_mapped_to_be_read() {
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(64 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let mut expected = random(2 * BLOCK, 2);
        let (store, object) = probe(&space, &expected);
        // SAFETY: as in `map_mut`.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        assert!(map[..] == expected[..]);
        object.migrate().unwrap();
        map.populate(0..map.len()).unwrap();
        let faults = space.counter("pgfault");
        assert!(map[..] == expected[..]);
        assert_eq!(space.counter("pgfault"), faults, "all of it is mapped");
        let mut map = make_mut(map);
        for page in [0, 511, 512, 700] {
            map[page * PAGE] ^= 1;
            expected[page * PAGE] ^= 1;
        }
        assert!(object.cached().1 >= 4 * PAGE, "{} bytes are dirty", object.cached().1);
        map.flush().unwrap();
        assert!(store.inner.bytes() == expected);
        press(&space);
        assert!(map[..] == expected[..]);
    }
}

#[test]
fn what_cannot_be_changed_is_given_back_as_it_was() {
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(16 * PAGE, 3);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    // SAFETY: nothing writes the file.
    let mut map = unsafe { MapOptions::new().map(&object) }.unwrap();
    // SAFETY: refused.
    let unchanged = unsafe { map.make_mut() }.unwrap_err();
    assert!(matches!(unchanged.error, Error::ReadOnly { .. }));
    map = unchanged.mapping;
    assert!(map[..] == bytes[..]);
    for len in [0, 16 * PAGE + 1, usize::MAX] {
        let error = map.remap(len, RemapOptions::new().may_move(true)).unwrap_err();
        assert!(matches!(error, Error::BadRange { .. }), "{len}: {error}");
    }
    assert!(map[..] == bytes[..]);
    // A copy of the same can be written, by whichever way it comes.
    // SAFETY: a mapping of its own.
    let copy = unsafe { MapOptions::new().map_copy_read_only(&object) }.unwrap();
    let mut copy = make_mut(copy);
    copy.fill(9);
    copy.flush().unwrap();
    assert!(copy.iter().all(|&byte| byte == 9) && map[..] == bytes[..]);
}

#[test]
fn a_mapping_shrinks_and_grows_in_its_place() {
    let Some(space) = space(2 << 20) else { return };
    let mut expected = random(3 * BLOCK, 4);
    let (store, object) = probe(&space, &expected);
    let mut map = map_mut(&object);
    let start = map.as_ptr();
    let mut generator = Generator::new(4);
    for round in 0..60 {
        let len = 1 + generator.below(expected.len());
        map.remap(len, RemapOptions::new()).unwrap();
        assert_eq!((map.as_ptr(), map.len()), (start, len), "round {round}");
        assert!(map.mapped_pages() <= len.div_ceil(PAGE));
        for _ in 0..40 {
            let at = generator.below(len);
            assert_eq!(map[at], expected[at], "byte {at} of round {round}");
            let at = generator.below(len);
            expected[at] = generator.next_u64() as u8;
            map[at] = expected[at];
        }
        if generator.one_in(4) {
            press(&space);
        }
        if generator.one_in(4) {
            let half = len / 2;
            map.advise(Pattern::Random, half..len).unwrap();
        }
    }
    object.sync().unwrap();
    assert!(store.inner.bytes() == expected, "what was written to an end that went as well");
    drop(map);
    let _again = map_mut(&object);
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}

#[test]
fn a_mapping_without_room_behind_it_moves_where_it_may() {
    let Some(space) = space(2 << 20) else { return };
    let expected = random(64 * PAGE, 5);
    let (_, object) = probe(&space, &expected);
    let options = MapOptions::new().offset(PAGE as u64 + 7).len(6 * PAGE as u64);
    // SAFETY: nothing writes the store.
    let (mut map, behind) =
        unsafe { (options.map(&object).unwrap(), MapOptions::new().map(&object).unwrap()) };
    assert!(map[..] == expected[PAGE + 7..][..6 * PAGE] && behind[..] == expected[..]);
    let start = map.as_ptr();
    map.advise(Pattern::Random, 0..2 * PAGE).unwrap();
    let error = map.remap(40 * PAGE, RemapOptions::new()).unwrap_err();
    assert!(matches!(error, Error::NoMemory { .. }), "{error}");
    assert_eq!((map.as_ptr(), map.len()), (start, 6 * PAGE));
    map.remap(40 * PAGE, RemapOptions::new().may_move(true)).unwrap();
    assert_ne!(map.as_ptr(), start);
    assert!(map[..] == expected[PAGE + 7..][..40 * PAGE]);
    assert!(is_gone(start, 0), "nothing is left where it was");
    // What it had there is free again.
    // SAFETY: as above.
    let there = unsafe { options.map(&object) }.unwrap();
    assert_eq!(there.as_ptr(), start);
    press(&space);
    assert!(map[..] == expected[PAGE + 7..][..40 * PAGE] && behind[..] == expected[..]);
}

#[test]
fn a_mapping_follows_its_object_to_a_new_length() {
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let path = dir.file("log", &[1; 100]);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    let mut map = map_mut(&object);
    for len in [5000usize, 5001, 3 * BLOCK + 9] {
        let error = map.remap(len, RemapOptions::new().may_move(true)).unwrap_err();
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
        object.set_len(len as u64).unwrap();
        map.remap(len, RemapOptions::new().may_move(true)).unwrap();
        map[len - 1] = 7;
    }
    map.flush().unwrap();
    let written = std::fs::read(&path).unwrap();
    assert_eq!(written.len(), 3 * BLOCK + 9);
    assert_eq!((written[99], written[4999], written[5000]), (1, 7, 7));
    object.set_len(50).unwrap();
    map.remap(50, RemapOptions::new()).unwrap();
    assert!(map.iter().all(|&byte| byte == 1));
}

#[test]
fn a_mapping_is_cut_within_a_block_that_others_show_whole() {
    let builder = AddressSpace::builder().memory(64 << 20);
    let Some(space) = space_by(&builder) else { return };
    let mut expected = random(4 * BLOCK, 6);
    let (store, object) = probe(&space, &expected);
    // SAFETY: as in `map_mut`.
    let mut map = unsafe { MapOptions::new().map(&object) }.unwrap();
    // SAFETY: as in `map_mut`.
    let other = unsafe { MapOptions::new().map(&object) }.unwrap();
    for pages in [2 * 512 + 100, 512, 700, 3 * 512 + 1, 4 * 512] {
        assert!(other[..] == expected[..]);
        object.migrate().unwrap();
        other.populate(0..other.len()).unwrap();
        map.remap(4 * BLOCK, RemapOptions::new().may_move(true)).unwrap();
        assert!(map[..] == expected[..], "before {pages}");
        map.remap(pages * PAGE, RemapOptions::new()).unwrap();
        assert!(map[..] == expected[..pages * PAGE], "{pages}");
        press(&space);
        assert!(map[..] == expected[..pages * PAGE], "{pages} again");
    }
    drop(other);
    let mut map = make_mut(map);
    map.remap(3 * BLOCK + PAGE, RemapOptions::new()).unwrap();
    map[3 * BLOCK] ^= 1;
    expected[3 * BLOCK] ^= 1;
    map.flush().unwrap();
    assert!(store.inner.bytes() == expected);
}

#[test]
fn a_private_copy_keeps_what_was_written_by_whatever_name_and_place_it_has() {
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(64 * PAGE, 7);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), Some(0)).unwrap();
    let options = MapOptions::new().offset(4 * PAGE as u64).len(8 * PAGE as u64);
    // SAFETY: nothing writes the store.
    let (mut map, _behind) =
        unsafe { (options.map_copy(&object).unwrap(), options.map_copy(&object).unwrap()) };
    let mut expected = bytes[4 * PAGE..].to_vec();
    assert!(map[..] == expected[..8 * PAGE]);
    let write = |map: &mut [u8], expected: &mut [u8], at: usize, value: u8| {
        (map[at], expected[at]) = (value, value);
    };
    write(&mut map, &mut expected, 10, 1);
    write(&mut map, &mut expected, 5 * PAGE, 2);
    map.advise(Pattern::Random, 2 * PAGE..3 * PAGE).unwrap();
    assert!(map.remap(30 * PAGE, RemapOptions::new()).is_err());
    let start = map.as_ptr();
    map.remap(30 * PAGE, RemapOptions::new().may_move(true)).unwrap();
    assert_ne!(map.as_ptr(), start);
    assert!(map[..] == expected[..30 * PAGE], "what was written, and what was not");
    write(&mut map, &mut expected, 29 * PAGE, 3);
    press(&space);
    map.dont_need(0..map.len());
    let map = map.make_read_only().unwrap();
    assert!(map[..] == expected[..30 * PAGE], "packed, and read from the object anew");
    assert!(!space.serves_system_calls() || !is_writable(map.as_ptr(), 0));
    let mut map = make_mut(map);
    write(&mut map, &mut expected, 12 * PAGE, 4);
    map.remap(13 * PAGE, RemapOptions::new()).unwrap();
    assert!(map[..] == expected[..13 * PAGE]);
    expected[13 * PAGE..].copy_from_slice(&bytes[17 * PAGE..]);
    map.remap(60 * PAGE, RemapOptions::new()).unwrap();
    assert!(map[..] == expected[..60 * PAGE], "the end was given up, and is the object's again");
}

/// Rights and length of one mapping change all the time, while another is read and written,
/// everything is written back, and little memory is left.
#[test]
fn changes_of_one_mapping_disturb_no_other() {
    let _watchdog = Watchdog::new(240);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(2 * BLOCK, 8);
    let (store, object) = probe(&space, &bytes);
    // SAFETY: the halves are used by one thread each; read through the other by atomics alone.
    let (mut first, second) =
        unsafe { (MapOptions::new().map(&object).unwrap(), map_mut(&object)) };
    let is_done = AtomicBool::new(false);
    let mut expected = bytes.clone();
    std::thread::scope(|scope| {
        let _stop = Stop(&is_done);
        let reader = &second;
        let upper = &bytes[BLOCK..];
        scope.spawn(|| {
            let mut generator = Generator::new(9);
            while !is_done.load(Ordering::Relaxed) {
                let at = generator.below(BLOCK);
                assert_eq!(load(reader.as_ptr(), BLOCK + at), Some(upper[at]), "byte {at}");
            }
        });
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                press(&space);
                object.sync().unwrap();
                object.migrate().unwrap();
            }
        });
        let mut generator = Generator::new(10);
        for round in 0..150 {
            let pages = 1 + generator.below(2 * 512);
            first.remap(pages * PAGE, RemapOptions::new().may_move(true)).unwrap();
            let mut writable = make_mut(first);
            let lower = pages.min(512) * PAGE;
            for _ in 0..30 {
                let at = generator.below(lower);
                assert_eq!(writable[at], expected[at], "byte {at} of round {round}");
                expected[at] = generator.next_u64() as u8;
                writable[at] = expected[at];
            }
            first = writable.make_read_only().unwrap();
            let at = generator.below(pages * PAGE);
            assert_eq!(first[at], expected[at], "byte {at} of round {round}");
        }
    });
    object.sync().unwrap();
    assert!(store.inner.bytes() == expected);
    assert!(second[..] == expected[..]);
}

#[test]
fn what_a_mapping_gives_up_is_gone_for_system_calls_as_well() {
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(16 * PAGE, 11);
    let (_, object) = probe(&space, &bytes);
    let mut map = map_mut(&object);
    map.fill(5);
    let start = map.as_ptr();
    map.remap(8 * PAGE, RemapOptions::new()).unwrap();
    assert!(is_gone(start, 8 * PAGE) && !is_gone(start, 7 * PAGE));
    assert!(map.iter().all(|&byte| byte == 5));
}
