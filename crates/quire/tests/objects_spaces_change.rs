//! Mappings in another address space than their object's get other rights, and other lengths.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, load, press, random, space_by, store, survive_sigbus,
    wait_until,
};
use quire::library::{
    AddressSpace, Delivery, Error, MapOptions, Mapping, MappingMut, Object, Pattern, RemapOptions,
};
use quire::mmu::simulated::Generator;

const BLOCK: usize = 512 * PAGE;
const BOTH: [Delivery; 2] = [Delivery::Handlers, Delivery::Inline];

/// An owner and a host, by how each has its faults delivered.
fn pairs(owner: usize, host: usize) -> impl Iterator<Item = (AddressSpace, AddressSpace)> {
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    let space = |memory, delivery| {
        space_by(&AddressSpace::builder().memory(memory).handlers(2).delivery(delivery))
    };
    let deliveries = BOTH.into_iter().flat_map(|owner| BOTH.map(|host| (owner, host)));
    deliveries.filter_map(move |(by_owner, by_host)| {
        Some((space(owner, by_owner)?, space(host, by_host)?))
    })
}

fn probe(space: &AddressSpace, bytes: &[u8]) -> (Arc<Probe>, Object) {
    let store = Probe::new(bytes.to_vec());
    let object = Object::with_store(space, Arc::clone(&store), Some(0)).unwrap();
    (store, object)
}

fn map_mut_in(space: &AddressSpace, object: &Object) -> MappingMut {
    // SAFETY: each byte is written by one thread, and read by it alone or by single loads.
    unsafe { MapOptions::new().in_space(space).map_mut(object) }.unwrap()
}

fn make_mut(map: Mapping) -> MappingMut {
    // SAFETY: as above.
    unsafe { map.make_mut() }.unwrap()
}

/// Whether the kernel lets a system call write to a byte of a mapping, without changing it.
fn is_writable(start: *const u8, at: usize) -> bool {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let byte = [load(start, at).expect("inside of the object")];
    rustix::io::write(&write, &byte).unwrap();
    // SAFETY: a byte of the mapping, to which its own value is written.
    let into = unsafe { std::slice::from_raw_parts_mut(start.cast_mut().add(at), 1) };
    rustix::io::read(&read, into).is_ok()
}

#[test]
fn rights_away_change_and_what_was_written_reaches_the_store() {
    let _watchdog = Watchdog::new(120);
    for (owner, host) in pairs(2 << 20, 1 << 20) {
        let mut expected = random(3 * BLOCK, 1);
        let (kept, object) = probe(&owner, &expected);
        let home = map_mut_in(&owner, &object);
        let mut map = map_mut_in(&host, &object);
        let start = map.as_ptr();
        let mut generator = Generator::new(1);
        for round in 0..4 {
            for _ in 0..100 {
                let at = generator.below(expected.len());
                expected[at] = generator.next_u64() as u8;
                map[at] = expected[at];
            }
            let at = generator.below(expected.len());
            let read_only = map.make_read_only().unwrap();
            assert_eq!(read_only.as_ptr(), start);
            assert!(read_only[..] == expected[..], "round {round}");
            assert!(!is_writable(start, at) && !is_writable(start, 40 * PAGE));
            // The rights of the other mapping are its own.
            assert!(store(home.as_ptr(), at, expected[at]));
            object.sync().unwrap();
            assert!(kept.inner.bytes() == expected);
            if round == 2 {
                press(&owner);
            }
            map = make_mut(read_only);
            assert_eq!(object.cached().1, 0);
            map[at] = expected[at];
            // A system call's fault is served where that may be, and the page is mapped here anyway.
            assert!(is_writable(start, at), "round {round}");
            assert!(object.cached().1 > 0, "a write after the flush is noticed");
        }
        map.flush().unwrap();
        assert!(kept.inner.bytes() == expected && home[..] == expected[..]);
        let dir = Dir::new();
        let object = owner.open(dir.file("data", &expected)).unwrap();
        // SAFETY: nobody writes it.
        let map = unsafe { MapOptions::new().in_space(&host).map(&object) }.unwrap();
        // SAFETY: refused.
        let unchanged = unsafe { map.make_mut() }.unwrap_err();
        assert!(matches!(unchanged.error, Error::ReadOnly { .. }));
        assert!(unchanged.mapping[..] == expected[..]);
    }
}

#[test]
fn a_mapping_away_shrinks_and_grows_in_its_place() {
    let _watchdog = Watchdog::new(120);
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let mut expected = random(3 * BLOCK, 4);
        let (store, object) = probe(&owner, &expected);
        let mut map = map_mut_in(&host, &object);
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
                press(&owner);
            }
            if generator.one_in(4) {
                map.advise(Pattern::Random, len / 2..len).unwrap();
            }
        }
        for len in [0, expected.len() + 1, usize::MAX] {
            let error = map.remap(len, RemapOptions::new().may_move(true)).unwrap_err();
            assert!(matches!(error, Error::BadRange { .. }), "{len}: {error}");
        }
        object.sync().unwrap();
        assert!(store.inner.bytes() == expected, "what was written to an end that went as well");
        assert!(owner.held().1 <= owner.memory() && host.held().0 < 64 * PAGE);
        object.drop_cached(0..expected.len() as u64);
        wait_until(|| object.drop_cached(0..u64::MAX) == 0 && object.cached().0 == 0);
        assert_eq!(map.mapped_pages(), 0, "the reverse map has all of it");
    }
}

#[test]
fn a_mapping_away_without_room_behind_it_moves_within_its_host() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    for delivery in BOTH {
        let space = |delivery| {
            space_by(&AddressSpace::builder().memory(64 << 20).recycle(true).delivery(delivery))
        };
        let (Some(owner), Some(host)) = (space(BOTH[0]), space(delivery)) else { return };
        let expected = random(2 * BLOCK, 5);
        let (_, object) = probe(&owner, &expected);
        let options = MapOptions::new().in_space(&host).offset(PAGE as u64 + 7);
        let options = options.len(6 * PAGE as u64);
        // SAFETY: nobody writes the store.
        let (mut map, next) =
            unsafe { (options.map(&object).unwrap(), options.map(&object).unwrap()) };
        // SAFETY: as above.
        let behind = unsafe { MapOptions::new().in_space(&host).map(&object) }.unwrap();
        assert!(map[..] == expected[PAGE + 7..][..6 * PAGE] && behind[..] == expected[..]);
        let start = map.as_ptr();
        map.advise(Pattern::Random, 0..2 * PAGE).unwrap();
        let error = map.remap(40 * PAGE, RemapOptions::new()).unwrap_err();
        assert!(matches!(error, Error::NoMemory { .. }), "{error}");
        assert_eq!((map.as_ptr(), map.len()), (start, 6 * PAGE));
        let long = BLOCK + 40 * PAGE;
        map.remap(long, RemapOptions::new().may_move(true)).unwrap();
        assert_ne!(map.as_ptr(), start);
        assert!(map[..] == expected[PAGE + 7..][..long]);
        press(&owner);
        assert!(map[..] == expected[PAGE + 7..][..long] && behind[..] == expected[..]);
        // As long as any of it is away it lives at home; a move has counted as one mapping.
        assert_eq!(object.migrate().unwrap(), (0, 0));
        drop((behind, next));
        assert_eq!(object.migrate().unwrap(), (0, 0));
        drop(map);
        // SAFETY: as above.
        let home = unsafe { MapOptions::new().map(&object) }.unwrap();
        assert!(home[..] == expected[..]);
        assert!(object.migrate().unwrap().0 > 0, "nothing of it is away");
        assert!(home[..] == expected[..]);
    }
}

#[test]
fn a_copy_away_keeps_what_was_written_by_whatever_name_and_place_it_has() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(1 << 20, 4 << 20) {
        let bytes = random(64 * PAGE, 7);
        let (store, object) = probe(&owner, &bytes);
        let options = MapOptions::new().in_space(&host).offset(4 * PAGE as u64);
        let options = options.len(8 * PAGE as u64);
        // SAFETY: nobody writes the store.
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
        press(&host);
        map.dont_need(0..map.len());
        let map = map.make_read_only().unwrap();
        assert!(map[..] == expected[..30 * PAGE], "packed, and read from the object anew");
        assert!(!host.serves_system_calls() || !is_writable(map.as_ptr(), 0));
        let mut map = make_mut(map);
        write(&mut map, &mut expected, 12 * PAGE, 4);
        map.remap(13 * PAGE, RemapOptions::new()).unwrap();
        assert!(map[..] == expected[..13 * PAGE]);
        expected[13 * PAGE..].copy_from_slice(&bytes[17 * PAGE..]);
        map.remap(60 * PAGE, RemapOptions::new()).unwrap();
        assert!(
            map[..] == expected[..60 * PAGE],
            "the end was given up, and is the object's again"
        );
        // Its object's end is found where it is now.
        drop(owner);
        object.set_len(20 * PAGE as u64).unwrap();
        assert_eq!(load(map.as_ptr(), 20 * PAGE), None);
        assert_eq!(load(map.as_ptr(), 12 * PAGE), Some(4));
        assert_eq!(object.cached().1, 0);
        assert!(store.inner.bytes() == bytes[..20 * PAGE]);
    }
}

/// Rights and length of one mapping change all the time, while others are read and written in both
/// spaces, everything is written back, and little memory is left.
#[test]
fn changes_of_one_mapping_away_disturb_no_other() {
    let _watchdog = Watchdog::new(240);
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let bytes = random(2 * BLOCK, 8);
        let (store, object) = probe(&owner, &bytes);
        // SAFETY: the halves are used by one thread each; else by single loads.
        let mut first = unsafe { MapOptions::new().in_space(&host).map(&object) }.unwrap();
        let others = [map_mut_in(&host, &object), map_mut_in(&owner, &object)];
        let is_over = AtomicBool::new(false);
        let mut expected = bytes.clone();
        std::thread::scope(|scope| {
            let _stop = Stop(&is_over);
            for reader in &others {
                let (upper, is_over) = (&bytes[BLOCK..], &is_over);
                scope.spawn(move || {
                    let mut generator = Generator::new(9);
                    while !is_over.load(Ordering::Relaxed) {
                        let at = generator.below(BLOCK);
                        assert_eq!(load(reader.as_ptr(), BLOCK + at), Some(upper[at]), "byte {at}");
                    }
                });
            }
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    press(&owner);
                    object.sync().unwrap();
                }
            });
            let mut generator = Generator::new(10);
            for round in 0..100 {
                let pages = 1 + generator.below(2 * 512);
                first.remap(pages * PAGE, RemapOptions::new().may_move(true)).unwrap();
                let mut writable = make_mut(first);
                let lower = pages.min(512) * PAGE;
                for _ in 0..20 {
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
        assert!(others.iter().all(|other| other[..] == expected[..]));
    }
}
