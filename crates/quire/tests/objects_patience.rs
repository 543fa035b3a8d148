//! Objects whose stores do not answer, or refuse for ever: waiting calls get an error, nothing is lost
//! or invented, and all goes on once they do.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{PAGE, Probe, Watchdog, load, random, space_by, store, survive_sigbus, wait_until};
use quire::library::{
    AddressSpace, Builder, Delivery, Error, MapOptions, Object, OpenOptions, Pattern,
};
use quire::store::{Cause, Operation, Store};
use quire_test_stores::{DelayStore, NeverStore, VecStore};
use rustix::io::Errno;

const DEADLINE: Duration = Duration::from_millis(150);
/// Long enough for a machine that is busy; a store that never answers takes longer.
const AGES: Duration = Duration::from_secs(30);

fn patient(delivery: Delivery) -> Builder {
    survive_sigbus();
    AddressSpace::builder().memory(4 << 20).delivery(delivery).store_deadline(DEADLINE)
}

fn assert_silent(error: &Error, path: &str, offset: u64) {
    let Error::Store(store) = error else { panic!("{error:?}") };
    assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
    assert!(matches!(store.cause(), Cause::Silent { after } if *after == DEADLINE), "{error:?}");
    assert_eq!((store.store(), store.offset()), (path, offset));
    assert!(error.to_string().contains("longer deadline"), "{error}");
}

#[test]
fn a_read_from_a_store_that_never_answers_is_told_so() {
    let _watchdog = Watchdog::new(120);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let Some(space) = space_by(&patient(delivery)) else { return };
        let never = Arc::new(NeverStore::new(VecStore::new(vec![1; 64 * PAGE])));
        let object = Object::with_store(&space, Arc::clone(&never), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let name = never.name();
        let mut byte = [0];
        assert!(object.last_read_error().is_none());
        assert_silent(&object.read_at(5 * PAGE as u64 + 9, &mut byte).unwrap_err(), name, 5 * 4096);
        assert_silent(&object.last_read_error().unwrap(), name, 5 * 4096);
        assert_silent(&map.try_read(8 * PAGE, &mut byte).unwrap_err(), name, 8 * 4096);
        assert_silent(&map.populate(16 * PAGE..17 * PAGE).unwrap_err(), name, 16 * 4096);
        assert_eq!(load(map.as_ptr(), 30 * PAGE), None, "a SIGBUS");
        assert!(!store(map.as_ptr(), 40 * PAGE, 1), "a SIGBUS");
        assert_silent(&object.last_read_error().unwrap(), name, 40 * 4096);
        assert_eq!(byte[0], 0);
        never.cancel();
    }
}

#[test]
fn all_that_wait_for_a_silent_store_are_told_at_the_same_deadline() {
    let _watchdog = Watchdog::new(120);
    // Long beside what it takes a busy machine to start the threads.
    let deadline = Duration::from_secs(1);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let Some(space) = space_by(&patient(delivery).store_deadline(deadline)) else { return };
        let never = Arc::new(NeverStore::new(VecStore::new(vec![1; 4096 * PAGE])));
        let object = Object::with_store(&space, Arc::clone(&never), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        let at = map.as_ptr() as usize;
        let begun = Instant::now();
        std::thread::scope(|scope| {
            // Many times as many as there are workers, some of them for one page.
            for thread in 0..96 {
                let page = thread / 2 * 37;
                scope.spawn(move || assert_eq!(load(at as *const u8, page * PAGE), None));
            }
        });
        // Four at a time it would be twelve times the deadline.
        assert!(begun.elapsed() < 8 * deadline, "{:?}", begun.elapsed());
        never.cancel();
    }
}

#[test]
fn what_a_store_says_too_late_is_neither_lost_nor_invented() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space_by(&patient(Delivery::Handlers)) else { return };
    let bytes = random(8 * PAGE, 1);
    let memory = Arc::new(VecStore::new(bytes.clone()));
    let inner = Arc::new(DelayStore::new(Arc::clone(&memory)));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().pattern(Pattern::Random).map_mut(&object) }.unwrap();
    assert_eq!(load(map.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]));
    inner.hold(Operation::Read);
    assert_eq!(load(map.as_ptr(), PAGE), None);
    assert_eq!(load(map.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]), "what is cached is there");
    assert!(store(map.as_ptr(), 3 * PAGE, 77), "and can be written");
    inner.release_all();
    // Its helper may take a moment to say that the late call has returned.
    wait_until(|| inner.waiting() == 0 && map.populate(0..8 * PAGE).is_ok());
    for page in [0, 1, 2, 4, 5, 6, 7] {
        assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE]), "page {page}");
    }
    object.sync().unwrap();
    assert_eq!(memory.bytes()[3 * PAGE], 77);
    drop((map, object));
    wait_until(|| space.held().0 == 0);
}

#[test]
fn a_write_that_comes_too_late_never_comes_after_a_newer_one() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space_by(&patient(Delivery::Handlers)) else { return };
    let memory = Arc::new(VecStore::new(vec![0; 8 * PAGE]));
    let inner = Arc::new(DelayStore::new(Arc::clone(&memory)));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 2 * PAGE, 1));
    inner.hold(Operation::Write);
    assert_silent(&object.sync().unwrap_err(), inner.name(), 2 * 4096);
    assert_eq!(object.cached().1, PAGE, "it is still dirty");
    assert!(store(map.as_ptr(), 2 * PAGE, 2));
    assert_eq!(object.sync().unwrap_err().errno(), Errno::TIMEDOUT);
    assert_eq!(object.set_len(PAGE as u64).unwrap_err().errno(), Errno::TIMEDOUT);
    assert_eq!(inner.waiting(), 1, "the newer bytes wait for the older");
    inner.release_all();
    wait_until(|| inner.waiting() == 0);
    // What was told in the background since the last flush is told now.
    wait_until(|| object.sync().is_ok());
    assert_eq!(memory.bytes()[2 * PAGE], 2);
    assert_eq!((object.cached().1, object.len()), (0, 8 * PAGE as u64));
}

#[test]
fn a_sync_that_does_not_return_has_failed() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space_by(&patient(Delivery::Handlers)) else { return };
    let memory = Arc::new(VecStore::new(vec![0; 8 * PAGE]));
    let inner = Arc::new(DelayStore::new(Arc::clone(&memory)));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 2 * PAGE, 1));
    inner.hold(Operation::Sync);
    assert_silent(&object.sync().unwrap_err(), inner.name(), 0);
    assert_eq!(object.cached().1, PAGE, "it will be written again");
    assert_eq!(object.sync().unwrap_err().errno(), Errno::TIMEDOUT, "one sync at a time");
    assert_eq!(inner.waiting(), 1);
    inner.release_all();
    wait_until(|| inner.waiting() == 0);
    wait_until(|| object.sync().is_ok());
    assert_eq!(object.cached().1, 0);
}

#[test]
fn all_can_be_closed_while_a_store_owes_an_answer_and_the_store_outlives_it() {
    let _watchdog = Watchdog::new(120);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let Some(space) = space_by(&patient(delivery)) else { return };
        let never = Arc::new(NeverStore::new(VecStore::new(vec![1; 64 * PAGE])));
        let begun = Instant::now();
        {
            let object = Object::with_store(&space, Arc::clone(&never), None).unwrap();
            // SAFETY: accessed by single bytes only.
            let map = unsafe { MapOptions::new().map(&object) }.unwrap();
            assert_eq!(load(map.as_ptr(), 0), None);
            object.prefetch(8 * PAGE as u64..16 * PAGE as u64);
        }
        drop(space);
        assert!(begun.elapsed() < AGES);
        assert!(never.wait_for(1, AGES), "its call is under way");
        assert!(Arc::strong_count(&never) > 1, "whose store must not go");
        never.cancel();
        wait_until(|| Arc::strong_count(&never) == 1);
    }
}

#[test]
fn an_object_can_have_a_deadline_of_its_own() {
    let _watchdog = Watchdog::new(120);
    let builder = AddressSpace::builder().memory(4 << 20);
    let Some(space) = space_by(&builder) else { return };
    let never = Arc::new(NeverStore::new(VecStore::new(vec![1; 64 * PAGE])));
    let options = OpenOptions::new().store_deadline(DEADLINE);
    let object = options.open_store(&space, Arc::clone(&never)).unwrap();
    assert_eq!(object.read_at(0, &mut [0]).unwrap_err().errno(), Errno::TIMEDOUT);
    never.cancel();
    // A file, through buffers on their way.
    let dir = common::Dir::new();
    let bytes = random(600 * PAGE + 77, 3);
    let path = dir.file("data", &bytes);
    let object = options.clone().write(true).open(&space, &path).unwrap();
    let mut all = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut all).unwrap(), bytes.len());
    assert!(all == bytes);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 600 * PAGE + 76, !bytes[600 * PAGE + 76]));
    object.sync().unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[600 * PAGE + 76], !bytes[600 * PAGE + 76]);
}

#[test]
fn a_store_that_refuses_for_ever_stops_writers_by_a_sigbus_and_all_goes_on_when_it_is_well() {
    let _watchdog = Watchdog::new(120);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let probe = Probe::new(vec![0; 200 * PAGE]);
        let refuses = Arc::clone(&probe);
        writers_are_stopped(
            delivery,
            &probe,
            |_| {},
            move |does| {
                refuses.fail_writes(does.then_some(Errno::NOSPC));
            },
        );
    }
}

#[test]
fn a_barrier_that_never_says_yes_stops_writers_by_a_sigbus_and_all_goes_on_when_it_does() {
    let _watchdog = Watchdog::new(120);
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let probe = Probe::new(vec![0; 200 * PAGE]);
        let refuses = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&refuses);
        let set = |object: &Object| {
            object.set_barrier(move |_, _| !seen.load(Ordering::SeqCst));
        };
        writers_are_stopped(delivery, &probe, set, move |does| {
            refuses.store(does, Ordering::SeqCst);
        });
    }
}

/// A memory object whose pages take room, and pack to nothing less.
fn full(space: &AddressSpace) -> Object {
    let object = space.create_memory(80 * PAGE as u64).unwrap();
    // SAFETY: nobody else knows it.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    map.copy_from_slice(&random(80 * PAGE, 3));
    object
}

#[test]
fn a_writer_that_had_room_meanwhile_waits_anew() {
    let _watchdog = Watchdog::new(120);
    survive_sigbus();
    let deadline = Duration::from_secs(1);
    let builder = AddressSpace::builder().memory(1 << 20).writer_deadline(deadline);
    let Some(space) = space_by(&builder) else { return };
    let probe = Probe::new(vec![0; 256 * PAGE]);
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    object.set_barrier(|_, _| false);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let (at, is_enough) = (map.as_ptr() as usize, AtomicBool::new(false));
    let taken = full(&space);
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let pages = (0..256).take_while(|_| !is_enough.load(Ordering::SeqCst));
            pages.map(|page| assert!(store(at as *const u8, page * PAGE, 1))).count()
        });
        wait_until(|| space.counter("fault_parked") > 0);
        std::thread::sleep(DEADLINE);
        is_enough.store(true, Ordering::SeqCst);
        drop(taken);
        writer.join().unwrap()
    });
    std::thread::sleep(deadline * 3 / 2);
    let _taken = full(&space);
    let start = Instant::now();
    let refused = (written..256).find(|&page| !store(at as *const u8, page * PAGE, 1));
    assert!(refused.is_some(), "after {written} pages all were taken");
    assert!(start.elapsed() >= deadline, "refused after {:?}", start.elapsed());
}

fn writers_are_stopped(
    delivery: Delivery,
    probe: &Arc<Probe>,
    prepare: impl FnOnce(&Object),
    refuse: impl Fn(bool),
) {
    survive_sigbus();
    let builder = AddressSpace::builder().memory(1 << 20).delivery(delivery);
    let Some(space) = space_by(&builder.writer_deadline(DEADLINE)) else { return };
    let object = Object::with_store(&space, Arc::clone(probe), None).unwrap();
    prepare(&object);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    refuse(true);
    let taken = Vec::from_iter((0..180).map(|page| store(map.as_ptr(), page * PAGE, 6)));
    let dirty = taken.iter().take_while(|&&is_taken| is_taken).count();
    assert!((57..180).contains(&dirty), "{dirty} pages: as many as there is room for clean ones");
    assert!(taken[dirty..].iter().all(|&is_taken| !is_taken), "{taken:?}");
    assert!(object.sync().is_err());
    // What was taken is there, and can be written again; nothing of what was refused is.
    for page in 0..dirty {
        assert_eq!(load(map.as_ptr(), page * PAGE), Some(6), "page {page}");
        assert!(store(map.as_ptr(), page * PAGE + 1, 7), "page {page}");
    }
    let mut byte = [1];
    object.read_at((dirty * PAGE) as u64, &mut byte).unwrap();
    assert_eq!(byte[0], 0);
    refuse(false);
    for page in dirty..200 {
        wait_until(|| store(map.as_ptr(), page * PAGE, 8));
    }
    // What was refused in the background is told first.
    wait_until(|| object.sync().is_ok());
    let bytes = probe.inner.bytes();
    (0..dirty).for_each(|page| assert_eq!(bytes[page * PAGE..][..2], [6, 7], "page {page}"));
    (dirty..200).for_each(|page| assert_eq!(bytes[page * PAGE..][..2], [8, 0], "page {page}"));
}

#[test]
fn faults_that_find_the_queue_of_requests_full_wait_without_a_turn() {
    let _watchdog = Watchdog::new(120);
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(16 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let bytes = random(2000 * PAGE, 5);
        let inner = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        inner.hold(Operation::Read);
        let is_sent = |page: u64| object.prefetch(page * 4096..page * 4096 + 1) > 0;
        let sent = (0..600).take_while(|&page| is_sent(2 * page)).count();
        assert!((256..600).contains(&sent), "{sent}");
        // What workers take just now makes room once more.
        wait_until(|| inner.waiting() == 4);
        let more = (0..8).take_while(|&page| is_sent(1200 + 2 * page)).count();
        assert!(more < 8, "it is full");
        let before = space.counter("pgfault");
        let (at, mut turns) = (map.as_ptr() as usize, 0);
        std::thread::scope(|scope| {
            for page in 1900..1910 {
                let expected = bytes[page * PAGE];
                scope.spawn(move || {
                    assert_eq!(load(at as *const u8, page * PAGE), Some(expected));
                });
            }
            wait_until(|| space.counter("pgfault") - before >= 10);
            std::thread::sleep(Duration::from_millis(200));
            turns = space.counter("pgfault") - before;
            inner.release_all();
        });
        assert!(turns <= 20, "{turns} turns of 10 faults");
    }
}

#[test]
fn many_faults_on_one_busy_page_do_not_spin() {
    let _watchdog = Watchdog::new(120);
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(4 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let inner = Arc::new(DelayStore::new(VecStore::new(vec![9; 8 * PAGE])));
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        let map = || {
            // SAFETY: accessed by single bytes only.
            unsafe { MapOptions::new().map(&object) }.unwrap()
        };
        // The kernel tells one fault of a page at a time: so each has a mapping of its own.
        let maps = Vec::from_iter((0..100).map(|_| map()));
        inner.hold(Operation::Read);
        let (before, mut turns) = (space.counter("pgfault"), 0);
        std::thread::scope(|scope| {
            for map in &maps {
                scope.spawn(|| assert_eq!(load(map.as_ptr(), PAGE), Some(9)));
            }
            wait_until(|| space.counter("pgfault") - before >= 100);
            let begun = space.counter("pgfault");
            std::thread::sleep(Duration::from_millis(200));
            // Calls for which there is no record try again at times.
            turns = space.counter("pgfault") - begun;
            inner.release_all();
        });
        // An answer is one for a whole neighbourhood where faults are served inline.
        assert!(turns <= 100 * 30, "{turns} turns of 100 faults in 200 ms");
    }
}
