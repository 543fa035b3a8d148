//! Objects on the real MMU: files mapped under a bound on memory.

#[path = "common/objects.rs"]
mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Dir, PAGE, Stop, Watchdog, random, space, space_by};
use quire::library::{
    AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions, Pattern,
};
use quire::store::Direct;
use quire_simulated::Generator;
use quire_test_stores::VecStore;

#[test]
fn a_file_reads_the_same_through_an_eighth_of_its_size() {
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(16 << 20, 1);
    let path = dir.file("data", &bytes);
    for direct in [Direct::Off, Direct::On] {
        let Ok(object) = OpenOptions::new().direct(direct).open(&space, &path) else { continue };
        // SAFETY: nothing writes the file.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        assert!(map[..] == bytes[..], "in order");
        let mut generator = Generator::new(7);
        for _ in 0..2000 {
            let at = generator.below(bytes.len());
            assert_eq!(map[at], bytes[at], "byte {at}");
        }
    }
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}

/// A read is timed by the thread that ends it, over all of it; what is cached by the thread that serves
/// it.
#[test]
fn faults_on_objects_are_timed_with_the_read_and_without() {
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let Some(space) = space_by(&AddressSpace::builder().memory(8 << 20).delivery(delivery))
        else {
            return;
        };
        let dir = Dir::new();
        let path = dir.file("data", &random(1 << 20, 5));
        let object = space.open(&path).unwrap();
        let timed = |kind: &str| {
            let times = space.fault_times();
            let (_, buckets) = times.iter().find(|(name, _)| *name == kind).unwrap();
            buckets.iter().sum::<u64>()
        };
        // SAFETY: nothing writes the file.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        assert_eq!((timed("object_read"), timed("object")), (0, 0));
        std::hint::black_box(map[100 * PAGE]);
        // The time is noted after the answer.
        let wait_for = |kind: &str| {
            let deadline = Instant::now() + Duration::from_secs(10);
            while timed(kind) == 0 {
                assert!(Instant::now() < deadline, "{:?}", space.fault_times());
                std::thread::yield_now();
            }
        };
        wait_for("object_read");
        // Another mapping of what is cached by now.
        // SAFETY: as above.
        let other = unsafe { MapOptions::new().map(&object) }.unwrap();
        std::hint::black_box(other[100 * PAGE]);
        wait_for("object");
        assert_eq!(timed("limbo") + timed("file"), 0, "there is no anonymous memory");
    }
}

#[test]
fn what_is_written_reaches_the_file_by_a_flush_and_by_the_end() {
    let Some(space) = space(2 << 20) else { return };
    let dir = Dir::new();
    let mut bytes = random(8 << 20, 2);
    let path = dir.file("data", &bytes);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    {
        // SAFETY: nothing else uses the file.
        let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let mut generator = Generator::new(3);
        for round in 0..3 {
            for _ in 0..3000 {
                let at = generator.below(bytes.len());
                let value = generator.next_u64() as u8;
                assert_eq!(map[at], bytes[at], "round {round} byte {at}");
                map[at] = value;
                bytes[at] = value;
            }
            map.flush().unwrap();
            assert_eq!(object.cached().1, 0, "nothing is dirty after a flush");
            assert!(std::fs::read(&path).unwrap() == bytes, "round {round}");
        }
        map[5 * PAGE] ^= 1;
        bytes[5 * PAGE] ^= 1;
    }
    drop(object);
    assert!(std::fs::read(&path).unwrap() == bytes, "the last write");
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}

#[test]
fn without_fault_around_a_fault_makes_exactly_one_page_present() {
    let Some(space) = space(8 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(4 << 20, 4);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    let mut all = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut all).unwrap(), all.len());
    assert!(all == bytes);
    for (setting, expected) in [
        (FaultAround::Off, 1),
        (FaultAround::Order(1), 2),
        (FaultAround::Order(4), 16),
        (FaultAround::Order(9), 512),
    ] {
        let options = MapOptions::new().fault_around(setting);
        // SAFETY: nothing writes the file.
        let map = unsafe { options.map(&object) }.unwrap();
        assert_eq!(map.mapped_pages(), 0);
        let before = space.counter("pgfault");
        assert_eq!(map[100 * PAGE + 5], bytes[100 * PAGE + 5]);
        assert_eq!(map.mapped_pages(), expected, "{setting:?}");
        assert_eq!(space.counter("pgfault") - before, 1);
    }
}

#[test]
fn a_file_that_another_program_wrote_is_what_several_mappings_show() {
    let Some(space) = space(4 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(3 << 20, 5);
    let path = dir.file("data", &bytes);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    // SAFETY: nothing else uses the file; the slices are read between writes only.
    let (mut first, second) = unsafe {
        let second = MapOptions::new().offset(PAGE as u64).map(&object).unwrap();
        (MapOptions::new().map_mut(&object).unwrap(), second)
    };
    assert!(second[..] == bytes[PAGE..]);
    for page in 1..300 {
        first[page * PAGE] = page as u8;
        // SAFETY: a read of memory that another mapping shows.
        let seen = unsafe { second.as_ptr().add((page - 1) * PAGE).read_volatile() };
        assert_eq!(seen, page as u8);
    }
    first.flush().unwrap();
    first[PAGE] = 99;
    let mut file = [0u8; 1];
    File::open(&path).unwrap().read_exact_at(&mut file, PAGE as u64).unwrap();
    assert_eq!(file[0], 1, "written again, but not flushed");
    first.flush_range(PAGE..PAGE + 1).unwrap();
    File::open(&path).unwrap().read_exact_at(&mut file, PAGE as u64).unwrap();
    assert_eq!(file[0], 99);
}

/// Windows of 2 MiB, and less than that left: the fault takes what there is.
#[test]
fn a_scan_in_large_windows_goes_on_where_less_is_left_than_a_window() {
    let Some(space) = space(48 << 20) else { return };
    let dir = Dir::new();
    let path = dir.file("data", b"");
    let len = 160u64 << 20;
    File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    let object = space.open(&path).unwrap();
    // SAFETY: nothing writes the file.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(map.iter().step_by(PAGE).all(|&byte| byte == 0));
    let (_, most) = space.held();
    assert!(most <= 48 << 20, "{most} bytes were held");
    assert!(space.counter("pgfault") < len / PAGE as u64 / 16, "windows are large");
}

#[test]
fn threads_that_serve_themselves_read_and_write_the_same() {
    let builder = AddressSpace::builder().memory(2 << 20).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else { return };
    assert!(!space.serves_system_calls());
    let dir = Dir::new();
    let mut bytes = random(8 << 20, 6);
    let path = dir.file("data", &bytes);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    // SAFETY: nothing else uses the file.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(map[..] == bytes[..], "in order");
    let part = bytes.len() / 4;
    std::thread::scope(|scope| {
        let threads = map.chunks_exact_mut(part).zip(bytes.chunks_exact_mut(part));
        for (seed, (map, bytes)) in threads.enumerate() {
            scope.spawn(move || {
                let mut generator = Generator::new(seed as u64);
                for _ in 0..4000 {
                    let at = generator.below(part);
                    assert_eq!(map[at], bytes[at], "byte {at} of part {seed}");
                    if generator.one_in(2) {
                        map[at] = generator.next_u64() as u8;
                        bytes[at] = map[at];
                    }
                }
            });
        }
    });
    // A system call is not served, and says so.
    let pipe = rustix::pipe::pipe().unwrap();
    object.drop_cached(0..4096);
    map.flush().unwrap();
    // With so little memory what was there may just have gone.
    let dropped = (0..bytes.len() / PAGE).find(|page| {
        map.populate(page * PAGE..page * PAGE + 8).unwrap();
        object.drop_cached(page_bytes(*page)) > 0
    });
    let start = dropped.expect("a clean page is in memory") * PAGE;
    let write = rustix::io::write(&pipe.1, &map[start..start + 8]);
    assert_eq!(write, Err(rustix::io::Errno::FAULT));
    map.populate(start..start + 8).unwrap();
    assert_eq!(rustix::io::write(&pipe.1, &map[start..start + 8]), Ok(8));
    map.flush().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    let (_, most) = space.held();
    assert!(most <= 2 << 20, "{most} bytes were held");
}

fn page_bytes(page: usize) -> std::ops::Range<u64> {
    (page * PAGE) as u64..((page + 1) * PAGE) as u64
}

/// The end of a file and a page that cannot be read go on to the handler that was there, or end the
/// process as they would have without us.
#[test]
fn what_is_not_ours_goes_on_to_the_handler_that_had_sigbus_before() {
    const INSIDE: &str = "QUIRE_INLINE_INSIDE";
    if std::env::var_os(INSIDE).is_none() {
        for (how, signal) in [("kept", 0), ("none", 7)] {
            let test = "what_is_not_ours_goes_on_to_the_handler_that_had_sigbus_before";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args([test, "--exact", "--nocapture"])
                .env(INSIDE, how)
                .output()
                .unwrap();
            let ended = std::os::unix::process::ExitStatusExt::signal(&output.status);
            let text = String::from_utf8_lossy(&output.stdout);
            if text.contains("NOT TESTED") {
                return;
            }
            assert_eq!(ended.unwrap_or(0), signal, "{how}: {output:?}");
            assert_eq!(text.contains("the old handler"), how == "kept", "{how}: {text}");
        }
        return;
    }
    extern "C" fn old(_: i32) {
        let text = b"the old handler\n";
        // SAFETY: both are what a signal handler may call.
        unsafe {
            libc::write(1, text.as_ptr().cast(), text.len());
            libc::_exit(0);
        }
    }
    if std::env::var_os(INSIDE).is_some_and(|how| how == "kept") {
        // SAFETY: the handler ends the process, by what a test may use.
        unsafe { libc::signal(libc::SIGBUS, old as *const () as usize) };
    }
    let builder = AddressSpace::builder().memory(2 << 20).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else {
        println!("NOT TESTED");
        return;
    };
    let dir = Dir::new();
    let path = dir.file("data", &random(2 * PAGE, 8));
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    // SAFETY: read by the byte below.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    object.set_len(PAGE as u64).unwrap();
    // SAFETY: inside of the mapping; behind the object's end.
    unsafe { map.as_ptr().add(PAGE).read_volatile() };
    println!("no signal came");
}

#[test]
fn every_unlock_looks_for_waiters_as_long_as_it_is_told_to() {
    let Some(space) = space(8 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(1 << 20, 9);
    let object = space.open(dir.file("data", &bytes)).unwrap();
    let read = || {
        let before = space.wait_counts();
        let mut found = vec![0; bytes.len()];
        object.read_at(0, &mut found).unwrap();
        assert!(found == bytes);
        let after = space.wait_counts();
        (after.avoided - before.avoided, after.looks - before.looks)
    };
    // From then on all is cached, and no thread waits for another. A worker may still be about to count
    // the last unlock of what it read.
    read();
    let pages = (bytes.len() / PAGE) as u64;
    for always_look in [false, true, false] {
        space.set_unlocks_always_look(always_look);
        let (avoided, looks) = read();
        let (all, few) = if always_look { (looks, avoided) } else { (avoided, looks) };
        assert!(all >= pages && few <= 1, "{always_look}: {avoided} avoided, {looks} looked");
    }
}

/// Advice and rights change the table of VMAs while others fault, and a lookup may find nothing.
#[test]
fn faults_go_on_while_advice_and_rights_change() {
    let _watchdog = Watchdog::new(120);
    let bytes = random(600 * PAGE, 10);
    for delivery in [Delivery::Inline, Delivery::Handlers] {
        let builder = AddressSpace::builder().memory(1 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let object =
            Object::with_store(&space, Arc::new(VecStore::new(bytes.clone())), None).unwrap();
        // SAFETY: nothing writes it.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (map, bytes, is_over) = (&map, &bytes, &is_over);
            let _stop = Stop(is_over);
            for thread in 0..2 {
                scope.spawn(move || {
                    let mut generator = Generator::new(thread);
                    while !is_over.load(Ordering::SeqCst) {
                        let at = generator.below(bytes.len());
                        assert_eq!(map[at], bytes[at], "byte {at}");
                    }
                });
            }
            let mut generator = Generator::new(9);
            let until = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < until {
                let (first, pages) = (generator.below(600), 1 + generator.below(100));
                let pattern = [Pattern::Random, Pattern::Normal][generator.below(2)];
                map.advise(pattern, first * PAGE..(first + pages) * PAGE).unwrap();
            }
        });
    }
}
