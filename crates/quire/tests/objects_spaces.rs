//! One object mapped in several address spaces of the process.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, drop_all, drop_pages, load, press, random, space_by, store,
    survive_sigbus, word,
};
use quire::library::{
    AddressSpace, Delivery, Error, MapOptions, Mapping, MappingMut, Object, OpenOptions,
};
use quire::mmu::simulated::Generator;
use quire::store::test::VecStore;

const BOTH: [Delivery; 2] = [Delivery::Handlers, Delivery::Inline];

/// An owner and a host, by how each has its faults delivered.
fn pairs(memory: usize) -> impl Iterator<Item = (AddressSpace, AddressSpace)> {
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    let space = move |delivery| {
        space_by(&AddressSpace::builder().memory(memory).handlers(2).delivery(delivery))
    };
    let deliveries = BOTH.into_iter().flat_map(|owner| BOTH.map(|host| (owner, host)));
    deliveries.filter_map(move |(owner, host)| Some((space(owner)?, space(host)?)))
}

fn map_in(space: &AddressSpace, object: &Object) -> Mapping {
    // SAFETY: looked at by single loads only.
    unsafe { MapOptions::new().in_space(space).map(object) }.unwrap()
}

fn map_mut_in(space: &AddressSpace, object: &Object) -> MappingMut {
    // SAFETY: as above, and written by single stores.
    unsafe { MapOptions::new().in_space(space).map_mut(object) }.unwrap()
}

fn object_of(space: &AddressSpace, bytes: Vec<u8>) -> (Object, Arc<Probe>) {
    let probe = Probe::new(bytes);
    (Object::with_store(space, Arc::clone(&probe), Some(0)).unwrap(), probe)
}

#[test]
fn what_is_written_in_one_space_is_seen_in_the_other_and_reaches_the_file() {
    let _watchdog = Watchdog::new(120);
    const PAGES: usize = 1024;
    for (owner, host) in pairs(16 << 20) {
        let dir = Dir::new();
        let mut bytes = random(PAGES * PAGE, 1);
        let path = dir.file("data", &bytes);
        let object = OpenOptions::new().write(true).open(&owner, &path).unwrap();
        let (home, away) = (map_mut_in(&owner, &object), map_mut_in(&host, &object));
        let starts = [home.as_ptr(), away.as_ptr()];
        let mut generator = Generator::new(2);
        for round in 0..2000 {
            let at = generator.below(bytes.len());
            let (writer, reader) = (starts[round % 2], starts[1 - round % 2]);
            assert_eq!(load(reader, at), Some(bytes[at]), "byte {at} before");
            bytes[at] ^= 0x55;
            assert!(store(writer, at, bytes[at]));
            assert_eq!(load(reader, at), Some(bytes[at]), "byte {at} after");
        }
        away.flush().unwrap();
        assert_eq!(object.cached().1, 0, "nothing is dirty after a flush");
        assert!(std::fs::read(&path).unwrap() == bytes);
        assert!(host.held().0 < 64 * PAGE, "the host pays for none of it");
        assert!(host.counter("pgmajfault") == 0 && owner.counter("pgmajfault") > 0);
    }
}

#[test]
fn what_its_owner_evicts_faults_in_again_from_both() {
    let _watchdog = Watchdog::new(120);
    const PAGES: usize = 2048;
    for (owner, host) in pairs(1 << 20) {
        let bytes = random(PAGES * PAGE, 3);
        let (object, _) = object_of(&owner, bytes.clone());
        let before = host.held().0;
        let (home, away) = (map_in(&owner, &object), map_mut_in(&host, &object));
        for round in 0..2 {
            for at in (0..bytes.len()).step_by(PAGE / 2) {
                assert_eq!(load(home.as_ptr(), at), Some(bytes[at]), "{round}: {at} at home");
                assert_eq!(load(away.as_ptr(), at), Some(bytes[at]), "{round}: {at} away");
            }
        }
        assert!(owner.held().1 <= owner.memory());
        assert!(home.mapped_pages() < PAGES && away.mapped_pages() < PAGES);
        assert_eq!(host.held().0, before, "the host pays for none of it");
        // All of it gone, and not only what was in the way.
        press(&owner);
        assert!(away.mapped_pages() + home.mapped_pages() <= object.cached().0 / PAGE * 2);
        away.populate(0..64 * PAGE).unwrap();
        assert!(away.populate_cached(0..64 * PAGE) > 32);
        object.sync().unwrap();
        drop_all(&object);
        assert_eq!((home.mapped_pages(), away.mapped_pages()), (0, 0), "nothing stays mapped");
    }
}

#[test]
fn a_memory_object_is_unpacked_for_both() {
    let _watchdog = Watchdog::new(120);
    const PAGES: usize = 1024;
    for (owner, host) in pairs(1 << 20) {
        let object = owner.create_memory((PAGES * PAGE) as u64).unwrap();
        let maps = [map_mut_in(&owner, &object), map_mut_in(&host, &object)];
        let mut generator = Generator::new(4);
        let mut mine = vec![0u64; PAGES];
        for round in 0..4 * PAGES {
            let page = generator.below(PAGES);
            let old = word(maps[round % 2].as_ptr(), page * PAGE + 64);
            assert_eq!(old.fetch_add(1, Ordering::SeqCst), mine[page], "page {page}");
            mine[page] += 1;
        }
        assert!(owner.swap_usage().0 > 0, "some of it is packed");
        assert!(host.held().0 < 64 * PAGE && host.swap_usage() == (0, 0));
    }
}

#[test]
fn behind_a_new_end_an_access_is_a_sigbus_in_both() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(8 << 20) {
        let bytes = random(700 * PAGE, 5);
        let (object, _) = object_of(&owner, bytes.clone());
        let (home, away) = (map_in(&owner, &object), map_in(&host, &object));
        for at in (0..bytes.len()).step_by(PAGE) {
            assert_eq!(load(away.as_ptr(), at), Some(bytes[at]));
        }
        object.set_len(600 * PAGE as u64 - 100).unwrap();
        for map in [&home, &away] {
            assert_eq!(load(map.as_ptr(), 600 * PAGE), None);
            assert_eq!(load(map.as_ptr(), 699 * PAGE), None);
            assert_eq!(load(map.as_ptr(), 600 * PAGE - 1), Some(0), "cut to zeros");
            assert_eq!(load(map.as_ptr(), 0), Some(bytes[0]));
        }
        object.set_len(700 * PAGE as u64).unwrap();
        for map in [&home, &away] {
            assert_eq!(load(map.as_ptr(), 600 * PAGE), Some(0), "what comes back is zeros");
        }
    }
}

#[test]
fn what_is_pinned_away_stays_mapped_there_and_the_kernel_can_read_and_write_it() {
    let _watchdog = Watchdog::new(120);
    const PAGES: usize = 600;
    let dir = Dir::new();
    let source = random(8 * PAGE, 31);
    let file = std::fs::File::open(dir.file("source", &source)).unwrap();
    for (owner, host) in pairs(8 << 20) {
        let mut bytes = random(PAGES * PAGE, 32);
        let (object, probe) = object_of(&owner, bytes.clone());
        let (home, away) = (map_mut_in(&owner, &object), map_mut_in(&host, &object));
        // Over the end of a window, and protected before by a flush.
        let range = 508 * PAGE..516 * PAGE;
        assert!(store(away.as_ptr(), range.start, bytes[range.start]));
        object.sync().unwrap();
        let reading = away.pin(500 * PAGE..510 * PAGE).unwrap();
        let pin = away.pin_write(range.clone()).unwrap();
        assert_eq!((owner.pinned().0, host.pinned().0), (16 * PAGE, 0), "the owner keeps them");
        for round in 0..4 {
            press(&owner);
            object.sync().unwrap();
            assert_eq!(object.cached(), (16 * PAGE, 8 * PAGE), "round {round}");
            assert_eq!(away.mapped_pages(), 16, "round {round}");
            let at = range.start + round * PAGE;
            // SAFETY: pinned for write, of which no slice is in use.
            let into = unsafe { std::slice::from_raw_parts_mut(pin.as_mut_ptr(), pin.len()) };
            let done = rustix::io::pread(&file, &mut into[round * PAGE..], 0).unwrap();
            assert_eq!(done, (8 - round) * PAGE, "what is not mapped would be EFAULT");
            bytes[at..at + done].copy_from_slice(&source[..done]);
            // SAFETY: pinned, and nobody writes it just now.
            let pinned = unsafe { std::slice::from_raw_parts(reading.as_ptr(), reading.len()) };
            assert!(*pinned == bytes[500 * PAGE..510 * PAGE], "round {round}");
            assert_eq!(load(home.as_ptr(), at), Some(bytes[at]), "both see it");
        }
        let faults = owner.counter("pgfault") + host.counter("pgfault");
        for at in range.clone().step_by(PAGE) {
            bytes[at] ^= 1;
            assert!(store(away.as_ptr(), at, bytes[at]));
        }
        assert_eq!(owner.counter("pgfault") + host.counter("pgfault"), faults);
        let error = object.set_len(509 * PAGE as u64).unwrap_err();
        assert!(matches!(error, Error::Pinned { .. }), "{error}");
        drop(pin);
        assert_eq!(owner.pinned().0, 10 * PAGE);
        object.sync().unwrap();
        assert_eq!(object.cached().1, 0);
        assert!(probe.inner.bytes() == bytes);
        // Protected again: a write is noticed.
        assert!(store(away.as_ptr(), range.start, 7));
        assert!(object.cached().1 >= PAGE);
        drop(reading);
        object.sync().unwrap();
        press(&owner);
        assert_eq!((owner.pinned().0, away.mapped_pages()), (0, 0));
        drop(home);
    }
}

#[test]
fn what_either_writes_after_a_flush_goes_with_the_next() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(8 << 20) {
        let (object, probe) = object_of(&owner, vec![0; 64 * PAGE]);
        let maps = [map_mut_in(&owner, &object), map_mut_in(&host, &object)];
        for round in 1..=20u8 {
            let at = usize::from(round) * PAGE + 7;
            for (place, map) in maps.iter().enumerate() {
                assert!(store(map.as_ptr(), at + place, round));
                object.sync().unwrap();
                assert_eq!(object.cached().1, 0);
                assert_eq!(probe.inner.bytes()[at + place], round, "{round} of {place}");
                // Protected in every mapping: a write that is not noticed would stay behind.
                assert!(store(map.as_ptr(), at + place, round + 100));
                assert!(object.cached().1 >= PAGE, "the write is noticed");
                object.sync().unwrap();
                assert_eq!(probe.inner.bytes()[at + place], round + 100, "{round} of {place}");
            }
        }
    }
}

#[test]
fn a_page_whose_memory_fails_is_a_sigbus_in_both_until_it_is_given_up() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(8 << 20) {
        let bytes = random(16 * PAGE, 6);
        let (object, _) = object_of(&owner, bytes.clone());
        let maps = [map_in(&owner, &object), map_in(&host, &object)];
        for map in &maps {
            assert_eq!(load(map.as_ptr(), 5 * PAGE), Some(bytes[5 * PAGE]));
        }
        assert!(object.poison(5 * PAGE as u64).unwrap());
        for map in &maps {
            assert_eq!(load(map.as_ptr(), 5 * PAGE), None);
            assert_eq!(load(map.as_ptr(), 6 * PAGE), Some(bytes[6 * PAGE]));
        }
        assert_eq!(object.unpoison(0..bytes.len() as u64), PAGE);
        for map in &maps {
            assert_eq!(load(map.as_ptr(), 5 * PAGE), Some(bytes[5 * PAGE]));
        }
    }
}

#[test]
fn a_page_that_cannot_be_read_is_a_sigbus_away_too_and_heals() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(8 << 20) {
        let bytes = random(16 * PAGE, 8);
        let (object, probe) = object_of(&owner, bytes.clone());
        probe.set_bad(3, true);
        let away = map_in(&host, &object);
        assert_eq!(load(away.as_ptr(), 3 * PAGE), None);
        assert_eq!(load(away.as_ptr(), 4 * PAGE), Some(bytes[4 * PAGE]));
        assert!(matches!(object.last_read_error(), Some(Error::Store(_))));
        assert!(matches!(away.populate(0..away.len()), Err(Error::Store(_))));
        probe.set_bad(3, false);
        away.populate(0..away.len()).unwrap();
        assert_eq!(load(away.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]));
        assert_eq!(away.mapped_pages(), 16);
    }
}

#[test]
fn each_side_stays_as_long_as_a_mapping_needs_it() {
    let _watchdog = Watchdog::new(60);
    let bytes = random(300 * PAGE, 9);
    let check = |map: &Mapping| {
        for at in (0..bytes.len()).step_by(PAGE) {
            assert_eq!(load(map.as_ptr(), at), Some(bytes[at]), "byte {at}");
        }
    };
    for (owner, host) in pairs(1 << 20) {
        let (object, _) = object_of(&owner, bytes.clone());
        let (home, away) = (map_in(&owner, &object), map_in(&host, &object));
        // The mapping alone keeps object, owner and host.
        drop((home, object, owner, host));
        check(&away);
        drop(away);
    }
    for (owner, host) in pairs(1 << 20) {
        let (object, _) = object_of(&owner, bytes.clone());
        let (home, away) = (map_in(&owner, &object), map_in(&host, &object));
        check(&away);
        drop((away, host));
        // The host is gone altogether; another one may have its place.
        check(&home);
        let Some(other) = space_by(&AddressSpace::builder().memory(1 << 20)) else { return };
        let again = map_in(&other, &object);
        check(&again);
        drop(object);
        drop(home);
        drop(owner);
        check(&again);
    }
}

#[test]
fn two_spaces_have_objects_of_each_other_at_once() {
    let _watchdog = Watchdog::new(60);
    for (first, second) in pairs(1 << 20) {
        let bytes = [random(512 * PAGE, 10), random(512 * PAGE, 11)];
        let objects =
            [object_of(&first, bytes[0].clone()).0, object_of(&second, bytes[1].clone()).0];
        let maps = [map_in(&second, &objects[0]), map_in(&first, &objects[1])];
        for at in (0..bytes[0].len()).step_by(PAGE) {
            assert_eq!(load(maps[0].as_ptr(), at), Some(bytes[0][at]));
            assert_eq!(load(maps[1].as_ptr(), at), Some(bytes[1][at]));
        }
        assert!(first.held().1 <= 1 << 20 && second.held().1 <= 1 << 20);
    }
}

#[test]
fn what_lies_in_large_frames_comes_home_where_it_is_mapped_away() {
    let _watchdog = Watchdog::new(120);
    survive_sigbus();
    let builder = AddressSpace::builder().memory(128 << 20).recycle(true);
    // So much that streams are read a block at a time.
    let (Some(owner), Some(host)) = (space_by(&builder), space_by(&builder)) else { return };
    const PAGES: usize = 8 * 512;
    let bytes = random(PAGES * PAGE, 12);
    let (object, _) = object_of(&owner, bytes.clone());
    let home = map_in(&owner, &object);
    let check = |map: &Mapping| {
        for at in (0..bytes.len()).step_by(PAGE) {
            assert_eq!(load(map.as_ptr(), at), Some(bytes[at]), "byte {at}");
        }
    };
    check(&home);
    // Those that came in pieces.
    object.migrate().unwrap();
    let before = owner.counter("pgmigrate_success");
    let away = map_in(&host, &object);
    check(&away);
    assert!(owner.counter("pgmigrate_success") > before, "blocks came home");
    assert_eq!(away.mapped_pages(), PAGES);
    check(&home);
    assert_eq!(object.migrate().unwrap(), (0, 0), "and stay there");
    // Read again a block at a time, they have no frames to come home from.
    drop_pages(&object, 0..object.len(), PAGES);
    let before = owner.counter("pgmigrate_success");
    check(&away);
    check(&home);
    assert_eq!(owner.counter("pgmigrate_success"), before, "what is read lives at home");
    drop(away);
    assert!(object.migrate().unwrap().0 > 0, "until it is mapped at home only");
    check(&home);
}

#[test]
fn an_object_s_own_space_is_no_other() {
    for (owner, _) in pairs(1 << 20) {
        let (object, _) = object_of(&owner, vec![7; PAGE]);
        let own = map_in(&owner, &object);
        // SAFETY: nobody writes it.
        let copy = unsafe { MapOptions::new().in_space(&owner).map_copy(&object) }.unwrap();
        assert_eq!((load(own.as_ptr(), 0), load(copy.as_ptr(), 0)), (Some(7), Some(7)));
    }
}

/// A mapping that threads share: all access is atomic.
#[derive(Clone, Copy)]
struct Start(*const u8);

// SAFETY: only a place; see `word`.
unsafe impl Send for Start {}

#[test]
fn no_write_of_threads_in_two_spaces_is_lost_through_an_eighth_of_the_memory() {
    const PAGES: usize = 2048;
    const WRITERS: usize = 4;
    let _watchdog = Watchdog::new(200);
    for (owner, host) in pairs(1 << 20) {
        let inner = Arc::new(VecStore::new(vec![0; PAGES * PAGE]));
        let object = Object::with_store(&owner, Arc::clone(&inner), Some(0)).unwrap();
        let maps = [map_mut_in(&owner, &object), map_mut_in(&host, &object)];
        let is_over = AtomicBool::new(false);
        let until = Instant::now() + Duration::from_secs(2);
        // Each writer has a word of its own in every page, which it reads through either mapping.
        let written: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2 * WRITERS)
                .map(|writer| {
                    let starts = [0, 1].map(|place| Start(maps[(writer + place) % 2].as_ptr()));
                    scope.spawn(move || {
                        let [Start(own), Start(other)] = { starts };
                        let mut generator = Generator::new(writer as u64 + 1);
                        let mut mine = vec![0u64; PAGES];
                        while Instant::now() < until {
                            let few = generator.below(4) > 0;
                            for _ in 0..32 {
                                let page = generator.below(if few { 64 } else { PAGES });
                                let at = page * PAGE + writer * 8;
                                let old = word(own, at).fetch_add(1, Ordering::SeqCst);
                                assert_eq!(old, mine[page], "{writer}, page {page}");
                                mine[page] += 1;
                                if generator.below(4) == 0 {
                                    let seen = word(other, at).load(Ordering::SeqCst);
                                    assert_eq!(seen, mine[page], "{writer}, page {page}, across");
                                }
                            }
                        }
                        mine
                    })
                })
                .collect();
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    object.sync().unwrap();
                }
            });
            let _stop = Stop(&is_over);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        object.sync().unwrap();
        let bytes = inner.bytes();
        for (writer, mine) in written.iter().enumerate() {
            for (page, count) in mine.iter().enumerate() {
                let at = page * PAGE + writer * 8;
                let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                assert_eq!(found, *count, "{writer}, page {page}");
            }
        }
        assert!(owner.held().1 <= owner.memory());
        assert!(host.held().0 < 64 * PAGE, "{} bytes in the host", host.held().0);
        while object.cached().0 > 0 {
            object.drop_cached(0..object.len());
        }
        assert_eq!(maps.each_ref().map(MappingMut::mapped_pages), [0, 0], "nothing stays mapped");
    }
}

#[test]
fn hosts_come_and_go_while_their_guest_is_written_at_home() {
    const PAGES: usize = 1024;
    let _watchdog = Watchdog::new(200);
    survive_sigbus();
    let Some(owner) = space_by(&AddressSpace::builder().memory(1 << 20)) else { return };
    let (object, _) = object_of(&owner, vec![0; PAGES * PAGE]);
    let home = map_mut_in(&owner, &object);
    let start = Start(home.as_ptr());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (is_over, object) = (&is_over, &object);
        scope.spawn(move || {
            let Start(start) = { start };
            let mut generator = Generator::new(1);
            let mut mine = vec![0u64; PAGES];
            while !is_over.load(Ordering::SeqCst) {
                let page = generator.below(PAGES);
                let old = word(start, page * PAGE).fetch_add(1, Ordering::SeqCst);
                assert_eq!(old, mine[page], "page {page}");
                mine[page] += 1;
            }
        });
        let _stop = Stop(is_over);
        let until = Instant::now() + Duration::from_secs(4);
        let mut rounds = 0;
        while Instant::now() < until {
            let builder = AddressSpace::builder().memory(1 << 20).handlers(2);
            let host = space_by(&builder.delivery(BOTH[rounds % 2])).unwrap();
            let away = map_mut_in(&host, object);
            std::thread::scope(|scope| {
                for reader in 1..4 {
                    let start = Start(away.as_ptr());
                    scope.spawn(move || {
                        let Start(start) = { start };
                        let mut generator = Generator::new(rounds as u64 * 4 + reader as u64);
                        for _ in 0..200 {
                            let at = generator.below(PAGES) * PAGE + reader * 8;
                            word(start, at).fetch_add(1, Ordering::SeqCst);
                        }
                    });
                }
            });
            rounds += 1;
        }
        assert!(rounds > 4, "{rounds} rounds");
    });
    assert!(owner.held().1 <= owner.memory());
}

#[test]
fn owners_come_and_go_while_their_host_writes_what_is_its_own() {
    const PAGES: usize = 1024;
    let _watchdog = Watchdog::new(200);
    survive_sigbus();
    for delivery in BOTH {
        let space = |delivery| {
            space_by(&AddressSpace::builder().memory(1 << 20).handlers(2).delivery(delivery))
        };
        let Some(host) = space(delivery) else { return };
        let (own, _) = object_of(&host, vec![0; PAGES * PAGE]);
        let home = map_mut_in(&host, &own);
        let start = Start(home.as_ptr());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let is_over = &is_over;
            scope.spawn(move || {
                let Start(start) = { start };
                let mut generator = Generator::new(1);
                let mut mine = vec![0u64; PAGES];
                while !is_over.load(Ordering::SeqCst) {
                    let page = generator.below(PAGES);
                    let old = word(start, page * PAGE).fetch_add(1, Ordering::SeqCst);
                    assert_eq!(old, mine[page], "page {page}");
                    mine[page] += 1;
                }
            });
            let _stop = Stop(is_over);
            let until = Instant::now() + Duration::from_secs(2);
            for round in 0.. {
                if Instant::now() >= until {
                    assert!(round > 2, "{round} rounds");
                    break;
                }
                let owner = space(BOTH[round % 2]).unwrap();
                let (object, _) = object_of(&owner, vec![round as u8; PAGES * PAGE]);
                let away = map_in(&host, &object);
                drop((object, owner));
                std::thread::scope(|scope| {
                    for reader in 0..3 {
                        let start = Start(away.as_ptr());
                        scope.spawn(move || {
                            let Start(start) = { start };
                            let mut generator = Generator::new(round as u64 * 4 + reader);
                            for _ in 0..200 {
                                let at = generator.below(PAGES * PAGE);
                                assert_eq!(load(start, at), Some(round as u8), "byte {at}");
                            }
                        });
                    }
                });
            }
        });
    }
}

/// More than a list of waiting faults has room for: then all are answered, and the hosts' with
/// them.
#[test]
fn writers_away_that_are_too_many_to_be_listed_go_on_once_the_store_does() {
    const WRITERS: usize = 200;
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(1 << 20) {
        let (object, probe) = object_of(&owner, vec![0; WRITERS * PAGE]);
        let is_open = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&is_open);
        probe.on_write(move |_, _| {
            while !gate.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let away = map_mut_in(&host, &object);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let start = Start(away.as_ptr());
                scope.spawn(move || {
                    let Start(start) = { start };
                    word(start, writer * PAGE).store(writer as u64 + 1, Ordering::SeqCst);
                });
            }
            // By now those that can wait do.
            let parked = || owner.counter("fault_parked");
            let until = Instant::now() + Duration::from_secs(20);
            while parked() < 100 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50));
            is_open.store(true, Ordering::SeqCst);
        });
        object.sync().unwrap();
        let bytes = probe.inner.bytes();
        for writer in 0..WRITERS {
            assert_eq!(bytes[writer * PAGE], (writer + 1) as u8, "{writer}");
        }
    }
}
