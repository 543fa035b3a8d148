//! Private copies of an object in another address space of the process: the copies are the host's
//! memory, and what they are copies of the owner's.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, drop_pages, load, press, random, space_by, store,
    survive_sigbus, word,
};
use quire::library::{
    AddressSpace, Delivery, Error, FaultAround, MapOptions, MappingCopy, Object, OpenOptions,
    RemapOptions,
};
use quire::mmu::simulated::Generator;
use quire::store::Operation;
use quire::store::test::{DelayStore, VecStore};

const BOTH: [Delivery; 2] = [Delivery::Handlers, Delivery::Inline];

/// An owner and a host, by how each has its faults delivered, with so much memory.
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

fn copy_in(space: &AddressSpace, object: &Object) -> MappingCopy {
    // SAFETY: looked at and written by single accesses only.
    unsafe { MapOptions::new().in_space(space).map_copy(object) }.unwrap()
}

fn object_of(space: &AddressSpace, bytes: &[u8]) -> Object {
    Object::with_store(space, VecStore::new(bytes.to_vec()), None).unwrap()
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

/// A place that threads share: all access is atomic, or of bytes that are one thread's.
#[derive(Clone, Copy)]
struct Start(*const u8);

// SAFETY: only a place; see above.
unsafe impl Send for Start {}

#[test]
fn a_copy_away_reads_as_the_file_through_an_eighth_of_its_size_in_both() {
    let _watchdog = Watchdog::new(120);
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let dir = Dir::new();
        let bytes = random(8 << 20, 1);
        let object = owner.open(dir.file("data", &bytes)).unwrap();
        let copy = copy_in(&host, &object);
        assert!(copy[..] == bytes[..], "in order");
        let mut generator = Generator::new(7);
        for _ in 0..2000 {
            let at = generator.below(bytes.len());
            assert_eq!(copy[at], bytes[at], "byte {at}");
        }
        assert!(owner.held().1 <= owner.memory() && host.held().1 <= host.memory());
        assert_eq!(host.counter("pswpout"), 0, "what was only read is dropped, and not stored");
        assert!(host.counter("pgfault") > 0 && owner.counter("pgfault") == 0);
        assert!(owner.counter("pgpgin") > 0 && host.counter("pgpgin") == 0);
    }
}

#[test]
fn what_is_written_away_is_kept_there_and_seen_by_nobody_else() {
    let _watchdog = Watchdog::new(120);
    for (owner, host) in pairs(1 << 20, 4 << 20) {
        let dir = Dir::new();
        let bytes = packable(3 << 20, 2);
        let path = dir.file("data", &bytes);
        let object = OpenOptions::new().write(true).open(&owner, &path).unwrap();
        // SAFETY: nobody else uses the file.
        let shared = unsafe { MapOptions::new().in_space(&host).map_mut(&object) }.unwrap();
        let mut copies =
            [copy_in(&host, &object), copy_in(&host, &object), copy_in(&owner, &object)];
        let mut oracles = [bytes.clone(), bytes.clone(), bytes.clone()];
        let mut generator = Generator::new(3);
        for round in 0..3000 {
            let at = generator.below(bytes.len());
            let (map, oracle) = (&mut copies[round % 3], &mut oracles[round % 3]);
            assert_eq!(map[at], oracle[at], "byte {at} in round {round}");
            let value = generator.next_u64() as u8;
            (map[at], oracle[at]) = (value, value);
        }
        for (copy, oracle) in copies.iter().zip(&oracles) {
            assert!(copy[..] == oracle[..], "the copies differ by now");
        }
        assert!(shared[..] == bytes[..], "a mapping of the object itself");
        assert_eq!(object.cached().1, 0, "nothing of the object is dirty");
        object.sync().unwrap();
        assert!(owner.held().1 <= owner.memory() && host.held().1 <= host.memory());
        drop((shared, copies, object));
        assert!(std::fs::read(&path).unwrap() == bytes, "the file");
        press(&host);
        assert!(host.held().0 < 64 * PAGE, "{} bytes are left", host.held().0);
    }
}

#[test]
fn a_copy_away_follows_the_object_until_it_is_written_itself() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(4 << 20, 4 << 20) {
        let object = object_of(&owner, &vec![1; 64 * PAGE]);
        // SAFETY: written by single stores.
        let shared = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let options = MapOptions::new().in_space(&host).fault_around(FaultAround::Off);
        // SAFETY: as above.
        let mut copy = unsafe { options.map_copy(&object) }.unwrap();
        for page in 0..64 {
            assert!(store(shared.as_ptr(), page * PAGE, 2));
        }
        for page in 0..32 {
            assert_eq!(load(copy.as_ptr(), page * PAGE), Some(2), "page {page}, first touched now");
            assert!(store(copy.as_ptr(), page * PAGE + 1, 9));
        }
        for page in 0..64 {
            assert!(store(shared.as_ptr(), page * PAGE, 3));
        }
        for page in 0..64 {
            let expected = if page < 32 { (Some(2), Some(9)) } else { (Some(3), Some(1)) };
            let seen = (load(copy.as_ptr(), page * PAGE), load(copy.as_ptr(), page * PAGE + 1));
            assert_eq!(seen, expected, "page {page}");
        }
        assert_eq!(load(shared.as_ptr(), 1), Some(1), "the other way nothing is seen");
        // What was only read goes without a trace, and comes again as it is then.
        copy.dont_need(32 * PAGE..64 * PAGE);
        press(&host);
        assert!(store(shared.as_ptr(), 40 * PAGE, 4));
        assert_eq!(load(copy.as_ptr(), 40 * PAGE), Some(4));
        assert_eq!(load(copy.as_ptr(), 5 * PAGE + 1), Some(9), "what was written stays");
        // Given up, by the library and by the program itself.
        copy.discard(0..8 * PAGE);
        let at = copy.as_mut_ptr().wrapping_add(8 * PAGE);
        // SAFETY: whole pages of the mapping, which nobody else uses.
        assert_eq!(unsafe { libc::madvise(at.cast(), 8 * PAGE, libc::MADV_DONTNEED) }, 0);
        object.sync().unwrap();
        drop_pages(&object, 4 * PAGE as u64..12 * PAGE as u64, 8);
        for page in 0..16 {
            assert_eq!(load(copy.as_ptr(), page * PAGE), Some(3), "page {page} is the object's");
            assert_eq!(load(copy.as_ptr(), page * PAGE + 1), Some(1), "page {page}");
        }
        assert_eq!(load(copy.as_ptr(), 16 * PAGE + 1), Some(9), "not given up");
    }
}

#[test]
fn behind_a_new_end_a_copy_away_is_a_sigbus_but_for_what_was_written() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(4 << 20, 4 << 20) {
        let bytes = random(10 * PAGE + 100, 6);
        let object = object_of(&owner, &bytes);
        let options = MapOptions::new().in_space(&host).len(20 * PAGE as u64).beyond_end(true);
        // SAFETY: accessed by single bytes only.
        let map = unsafe { options.map_copy(&object) }.unwrap();
        let other = copy_in(&owner, &object);
        let at = map.as_ptr();
        assert_eq!(load(at, 10 * PAGE + 100), Some(0), "the last page's tail");
        for page in 11..20 {
            assert!(load(at, page * PAGE).is_none() && !store(at, page * PAGE, 1), "page {page}");
        }
        assert!(store(at, 8 * PAGE, 77));
        for copy in [at, other.as_ptr()] {
            assert_eq!(load(copy, 7 * PAGE), Some(bytes[7 * PAGE]));
        }
        object.set_len(5 * PAGE as u64).unwrap();
        assert_eq!(load(at, 4 * PAGE), Some(bytes[4 * PAGE]));
        assert_eq!(load(at, 6 * PAGE), None, "never touched");
        for copy in [at, other.as_ptr()] {
            assert_eq!(load(copy, 7 * PAGE), None, "only read");
        }
        assert_eq!(load(at, 8 * PAGE), Some(77), "written");
        object.set_len(15 * PAGE as u64).unwrap();
        for page in [5, 7, 10, 11, 14] {
            assert_eq!(load(at, page * PAGE), Some(0), "page {page}");
        }
        assert_eq!((load(at, 8 * PAGE), load(at, 15 * PAGE)), (Some(77), None));
    }
}

#[test]
fn faults_away_that_race_with_the_length_see_bytes_zeros_or_a_sigbus() {
    let _watchdog = Watchdog::new(100);
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let object = object_of(&owner, &vec![0x77; 256 * PAGE]);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let (host, object, is_over) = (&host, &object, &is_over);
                scope.spawn(move || {
                    let mut generator = Generator::new(seed);
                    while !is_over.load(Ordering::Relaxed) {
                        let options = MapOptions::new().len(256 * PAGE as u64).beyond_end(true);
                        // SAFETY: accessed by single bytes only.
                        let map = unsafe { options.in_space(host).map_copy(object) }.unwrap();
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
                                let is_right = matches!(seen, Some(0x77 | 0) | None);
                                assert!(is_right, "page {page}: {seen:?}");
                                assert!(seen.is_some() || page >= 16, "page {page}");
                            }
                        }
                    }
                });
            }
            let _stop = Stop(&is_over);
            let mut generator = Generator::new(99);
            for _ in 0..150 {
                let pages = 16 + generator.below(241);
                object.set_len((pages * PAGE) as u64).unwrap();
            }
        });
    }
}

/// Both spaces have as little memory as one can have, and the copy is eight times as large.
#[test]
fn threads_that_write_a_copy_away_lose_nothing_under_pressure_in_both() {
    let _watchdog = Watchdog::new(300);
    const THREADS: usize = 4;
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let bytes = packable(8 << 20, 14);
        let inner = Arc::new(VecStore::new(bytes.clone()));
        let object = Object::with_store(&owner, Arc::clone(&inner), Some(0)).unwrap();
        let copy = copy_in(&host, &object);
        let start = Start(copy.as_ptr());
        // SAFETY: read by single loads, and written by nobody.
        let shared = unsafe { MapOptions::new().map(&object) }.unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stop = Stop(&is_over);
            let writers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let bytes = &bytes;
                    scope.spawn(move || {
                        let Start(start) = { start };
                        let own = |at: usize| at * THREADS + thread;
                        let mut oracle: Vec<u8> =
                            bytes.iter().skip(thread).step_by(THREADS).copied().collect();
                        let mut generator = Generator::new(thread as u64 + 20);
                        for _ in 0..4000 {
                            let at = generator.below(oracle.len());
                            let value = generator.next_u64() as u8;
                            assert_eq!(load(start, own(at)), Some(oracle[at]), "of {thread}");
                            assert!(store(start, own(at), value));
                            oracle[at] = value;
                        }
                        for (at, &value) in oracle.iter().enumerate().step_by(97) {
                            assert_eq!(load(start, own(at)), Some(value), "of {thread}");
                        }
                    })
                })
                .collect();
            // The object is read at home meanwhile, advice splits VMAs, and pages go.
            let (reader, is_over) = (&shared, &is_over);
            scope.spawn(|| {
                let mut generator = Generator::new(5);
                while !is_over.load(Ordering::Relaxed) {
                    let at = generator.below(bytes.len());
                    assert_eq!(load(reader.as_ptr(), at), Some(bytes[at]), "byte {at} at home");
                }
            });
            let mut round = 0;
            while writers.iter().any(|writer| !writer.is_finished()) {
                let from = round % 7 * (bytes.len() / 8);
                let pattern = [quire::library::Pattern::Random, quire::library::Pattern::Normal];
                copy.advise(pattern[round % 2], from..from + bytes.len() / 8).unwrap();
                copy.dont_need(from..from + bytes.len() / 16);
                std::thread::sleep(Duration::from_millis(2));
                round += 1;
            }
        });
        assert!(owner.held().1 <= owner.memory() && host.held().1 <= host.memory());
        assert!(host.counter("pswpout") > 0 && owner.counter("pswpout") == 0);
        assert!(inner.bytes() == bytes, "nothing of it leaks to the store");
    }
}

#[test]
fn a_memory_object_and_its_copy_away_go_to_the_swap_of_each() {
    let _watchdog = Watchdog::new(200);
    survive_sigbus();
    let dir = Dir::new();
    let space = |delivery| {
        let builder = AddressSpace::builder().memory(1 << 20).handlers(2).delivery(delivery);
        space_by(&builder.swap(&dir.0, 64 << 20))
    };
    for (by_owner, by_host) in [(BOTH[0], BOTH[1]), (BOTH[1], BOTH[0]), (BOTH[1], BOTH[1])] {
        let (Some(owner), Some(host)) = (space(by_owner), space(by_host)) else { return };
        let len = 3 << 20;
        let object = owner.create_memory(len as u64).unwrap();
        let mut bytes = random(len, 31);
        // SAFETY: what is written is read by this thread alone.
        let mut shared = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        shared.copy_from_slice(&bytes);
        let mut copy = copy_in(&host, &object);
        // From its first write on a page of the copy is as it is; until then it follows the object.
        let mut copied = bytes.clone();
        for at in (0..len).step_by(PAGE) {
            (copy[at], copied[at]) = (!bytes[at], !bytes[at]);
        }
        let mut generator = Generator::new(33);
        for round in 0..1500 {
            let at = generator.below(len);
            let value = generator.next_u64() as u8;
            if round % 2 == 0 {
                (shared[at], bytes[at]) = (value, value);
            } else {
                (copy[at], copied[at]) = (value, value);
            }
            let at = generator.below(len);
            assert_eq!(shared[at], bytes[at], "byte {at} of the object in round {round}");
            assert_eq!(copy[at], copied[at], "byte {at} of the copy in round {round}");
        }
        assert!(shared[..] == bytes[..] && copy[..] == copied[..], "all bytes");
        let read_back = [owner.counter("pswpin"), host.counter("pswpin")];
        assert!(read_back.iter().all(|&pages| pages > 0), "{read_back:?} read from the swap files");
        assert!(owner.held().1 <= owner.memory() && host.held().1 <= host.memory());
    }
}

#[test]
fn a_page_that_cannot_be_read_is_a_sigbus_in_a_copy_away_until_it_is_populated() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(4 << 20, 4 << 20) {
        let bytes = random(64 * PAGE, 10);
        let probe = Probe::new(bytes.clone());
        let object = Object::with_store(&owner, Arc::clone(&probe), None).unwrap();
        let map = copy_in(&host, &object);
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
        // Bad memory of the object's is the copy's affair only where it has none of its own.
        assert!(store(map.as_ptr(), 3 * PAGE, 1));
        press(&host);
        assert!(
            object.poison(3 * PAGE as u64).unwrap() && object.poison(40 * PAGE as u64).unwrap()
        );
        map.dont_need(40 * PAGE..41 * PAGE);
        assert_eq!(load(map.as_ptr(), 3 * PAGE), Some(1));
        assert_eq!(load(map.as_ptr(), 40 * PAGE), None);
        assert_eq!(object.unpoison(0..bytes.len() as u64), 2 * PAGE);
        assert_eq!(load(map.as_ptr(), 40 * PAGE), Some(bytes[40 * PAGE]));
    }
}

/// The read of one page is held in the store: the threads that want it wait, and others do not.
#[test]
fn a_slow_read_of_the_owner_s_holds_up_only_those_who_want_it() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(4 << 20, 4 << 20) {
        let bytes = random(600 * PAGE, 11);
        let slow = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
        let object = Object::with_store(&owner, Arc::clone(&slow), None).unwrap();
        let options = MapOptions::new().in_space(&host);
        let options = options.fault_around(FaultAround::Off);
        // SAFETY: nobody writes the object.
        let map = unsafe { options.map_copy(&object) }.unwrap();
        assert_eq!(map[0], bytes[0]);
        slow.hold(Operation::Read);
        std::thread::scope(|scope| {
            let wanting: Vec<_> = (0..3).map(|_| scope.spawn(|| map[540 * PAGE])).collect();
            assert!(slow.wait_for(1, Duration::from_secs(10)));
            assert_eq!(map[1], bytes[1]);
            assert!(wanting.iter().all(|thread| !thread.is_finished()));
            slow.release_all();
            for thread in wanting {
                assert_eq!(thread.join().unwrap(), bytes[540 * PAGE]);
            }
        });
    }
}

#[test]
fn a_copy_alone_keeps_object_owner_and_host() {
    let _watchdog = Watchdog::new(60);
    for (owner, host) in pairs(1 << 20, 1 << 20) {
        let bytes = packable(600 * PAGE, 9);
        let object = object_of(&owner, &bytes);
        let mut copy = copy_in(&host, &object);
        let (other, at_home) = (copy_in(&host, &object), copy_in(&owner, &object));
        drop((object, owner, host));
        assert!(copy[..] == bytes[..]);
        copy[5] ^= 1;
        drop(other);
        assert!(at_home[..] == bytes[..]);
        drop(at_home);
        assert!(copy[5] == bytes[5] ^ 1 && copy[6..] == bytes[6..]);
    }
}

#[test]
fn owners_come_and_go_while_their_copies_are_written_and_a_host_s_own_object_with_them() {
    const PAGES: usize = 512;
    let _watchdog = Watchdog::new(200);
    survive_sigbus();
    for delivery in BOTH {
        let space = |delivery| {
            space_by(&AddressSpace::builder().memory(1 << 20).handlers(2).delivery(delivery))
        };
        let Some(host) = space(delivery) else { return };
        let own = object_of(&host, &vec![0; PAGES * PAGE]);
        // SAFETY: all accesses are atomic.
        let home = unsafe { MapOptions::new().map_mut(&own) }.unwrap();
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
            let mut rounds = 0;
            while Instant::now() < until {
                let owner = space(BOTH[rounds % 2]).unwrap();
                let object = object_of(&owner, &vec![rounds as u8; PAGES * PAGE]);
                let copy = copy_in(&host, &object);
                // Its length changes while its last users read it.
                std::thread::scope(|scope| {
                    for user in 0..3 {
                        let start = Start(copy.as_ptr());
                        scope.spawn(move || {
                            let Start(start) = { start };
                            let mut generator = Generator::new(rounds as u64 * 4 + user);
                            let own = 64 + user as usize;
                            for _ in 0..150 {
                                let page = generator.below(PAGES / 2) * PAGE;
                                assert_eq!(load(start, page), Some(rounds as u8));
                                assert!(store(start, page + own, 0xee));
                                assert_eq!(load(start, page + own), Some(0xee));
                            }
                        });
                    }
                    for pages in (PAGES / 2..PAGES).rev().step_by(64) {
                        object.set_len((pages * PAGE) as u64).unwrap();
                    }
                    drop((object, owner));
                });
                rounds += 1;
            }
            assert!(rounds > 2, "{rounds} rounds");
        });
    }
}

#[test]
fn what_is_pinned_of_a_copy_away_is_the_host_s_memory() {
    let _watchdog = Watchdog::new(120);
    let dir = Dir::new();
    let source = random(8 * PAGE, 41);
    let file = std::fs::File::open(dir.file("source", &source)).unwrap();
    for (owner, host) in pairs(1 << 20, 4 << 20) {
        let bytes = packable(200 * PAGE, 42);
        let object = object_of(&owner, &bytes);
        let mut copy = copy_in(&host, &object);
        let pin = copy.pin_write(100 * PAGE..108 * PAGE).unwrap();
        assert_eq!((owner.pinned().0, host.pinned().0), (0, 8 * PAGE));
        for _ in 0..3 {
            press(&host);
            press(&owner);
            // SAFETY: pinned for write, of which no slice is in use.
            let into = unsafe { std::slice::from_raw_parts_mut(pin.as_mut_ptr(), pin.len()) };
            let done = rustix::io::pread(&file, into, 0).unwrap();
            assert_eq!(done, 8 * PAGE, "what is not mapped would be EFAULT");
        }
        object.set_len(50 * PAGE as u64).unwrap();
        assert_eq!(load(copy.as_ptr(), 99 * PAGE), None);
        assert_eq!(load(copy.as_ptr(), 107 * PAGE + 9), Some(source[7 * PAGE + 9]));
        drop(pin);
        assert_eq!(host.pinned().0, 0);
        object.set_len(200 * PAGE as u64).unwrap();
        // More than a quarter of it is the owner's, and less than a half the host's.
        drop(copy.pin(0..180 * PAGE).unwrap());
        let most = host.pinned().1;
        copy.remap(150 * PAGE, RemapOptions::new()).unwrap();
        assert!(copy.mapped_pages() > 0 && most == 2 << 20);
    }
}

#[test]
fn copies_of_each_other_s_objects_live_in_two_spaces_at_once() {
    let _watchdog = Watchdog::new(60);
    for (first, second) in pairs(1 << 20, 1 << 20) {
        let bytes = [packable(512 * PAGE, 10), packable(512 * PAGE, 11)];
        let objects = [object_of(&first, &bytes[0]), object_of(&second, &bytes[1])];
        let mut copies = [copy_in(&second, &objects[0]), copy_in(&first, &objects[1])];
        std::thread::scope(|scope| {
            for (copy, bytes) in copies.iter_mut().zip(&bytes) {
                scope.spawn(move || {
                    let mut oracle = bytes.clone();
                    let mut generator = Generator::new(12);
                    for _ in 0..3000 {
                        let at = generator.below(oracle.len());
                        assert_eq!(copy[at], oracle[at], "byte {at}");
                        let value = generator.next_u64() as u8;
                        (copy[at], oracle[at]) = (value, value);
                    }
                    assert!(copy[..] == oracle[..]);
                });
            }
            // Each follows the other's length meanwhile; what comes back is longer than both maps.
            for pages in [600, 520, 700, 512] {
                let set = |object: &Object| object.set_len(pages * PAGE as u64).unwrap();
                objects.iter().for_each(set);
            }
        });
        assert!(first.held().1 <= 1 << 20 && second.held().1 <= 1 << 20);
    }
}
