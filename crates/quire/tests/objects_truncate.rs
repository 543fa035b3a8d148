//! Objects that become shorter and longer under their mappings.

#[path = "common/objects.rs"]
mod common;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Dir, PAGE, Probe, Watchdog, drop_pages, load, press, random, space, space_by, store, wait_until,
};
use quire::library::{AddressSpace, FaultAround, MapOptions, Object, OpenOptions, Pattern};
use quire::store::{Operation, Store};
use quire_test_stores::{DelayStore, FailStore, Failure, VecStore};
use rustix::io::Errno;

/// Long enough for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(60);

#[test]
fn behind_the_end_is_a_sigbus_and_zeros_once_it_has_grown_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(10 * PAGE + 100, 1);
    let inner = Arc::new(VecStore::new(bytes.clone()));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let options = MapOptions::new().len(20 * PAGE as u64).beyond_end(true);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { options.map_mut(&object) }.unwrap();
    let at = map.as_ptr();
    for page in 0..=10 {
        assert_eq!(load(at, page * PAGE), Some(bytes[page * PAGE]));
        assert!(store(at, page * PAGE + 1, 0xab));
    }
    assert_eq!(load(at, 10 * PAGE + 100), Some(0), "the last page's tail");
    assert_eq!(load(at, 11 * PAGE), None);
    let short = 5 * PAGE + 10;
    object.set_len(short as u64).unwrap();
    assert_eq!(load(at, 4 * PAGE + 1), Some(0xab));
    assert_eq!(load(at, 5 * PAGE + 9), Some(bytes[5 * PAGE + 9]));
    assert_eq!(load(at, 5 * PAGE + 10), Some(0));
    assert_eq!(load(at, 6 * PAGE - 1), Some(0));
    for page in 6..20 {
        assert_eq!(load(at, page * PAGE), None, "page {page}");
        assert!(!store(at, page * PAGE, 1), "page {page}");
    }
    // Behind the end, but in the last page: it is not the object's, and is not seen later.
    assert!(store(at, 5 * PAGE + 20, 0xcd));
    object.set_len(8 * PAGE as u64).unwrap();
    for byte in short..8 * PAGE {
        assert_eq!(load(at, byte), Some(0), "byte {byte}");
    }
    assert_eq!(load(at, 8 * PAGE), None);
    assert!(store(at, 7 * PAGE + 7, 0xef));
    object.sync().unwrap();
    let mut expected = bytes[..short].to_vec();
    expected.resize(8 * PAGE, 0);
    (0..6).for_each(|page| expected[page * PAGE + 1] = 0xab);
    expected[7 * PAGE + 7] = 0xef;
    assert!(inner.bytes() == expected);
}

#[test]
fn a_truncation_waits_for_the_read_that_it_overtakes() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(10 * PAGE, 2);
    let inner = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().pattern(Pattern::Random).map(&object) }.unwrap();
    inner.hold(Operation::Read);
    let at = map.as_ptr() as usize;
    let is_cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| load(at as *const u8, 9 * PAGE));
        assert!(inner.wait_for(1, Duration::from_secs(10)));
        scope.spawn(|| {
            object.set_len(4 * PAGE as u64).unwrap();
            is_cut.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(A_WHILE);
        assert!(!is_cut.load(Ordering::SeqCst), "its page is being read");
        inner.release_all();
        // The access comes before the cut, or after it.
        let seen = reader.join().unwrap();
        assert!([None, Some(bytes[9 * PAGE])].contains(&seen), "{seen:?}");
    });
    assert_eq!(load(at as *const u8, 9 * PAGE), None);
    assert_eq!(inner.len().unwrap(), 4 * PAGE as u64);
    object.set_len(10 * PAGE as u64).unwrap();
    assert_eq!(load(at as *const u8, 9 * PAGE), Some(0));
}

#[test]
fn a_truncation_waits_for_the_write_that_would_make_the_store_longer_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    // Cut inside of the page that is under way, and before it.
    for cut in [3 * PAGE + 50, 2 * PAGE] {
        let memory = Arc::new(VecStore::new(random(4 * PAGE, 3)));
        let inner = Arc::new(DelayStore::new(Arc::clone(&memory)));
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        assert!(store(map.as_ptr(), 4 * PAGE - 1, 7));
        inner.hold(Operation::Write);
        std::thread::scope(|scope| {
            scope.spawn(|| object.sync().unwrap());
            assert!(inner.wait_for(1, Duration::from_secs(10)));
            scope.spawn(|| object.set_len(cut as u64).unwrap());
            std::thread::sleep(A_WHILE);
            assert_eq!(memory.bytes().len(), 4 * PAGE, "the write would come after the cut");
            inner.release_all();
        });
        object.sync().unwrap();
        assert_eq!(memory.bytes().len(), cut);
    }
}

#[test]
fn dirty_pages_behind_the_end_are_forgotten_and_never_written() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let memory = Arc::new(VecStore::new(vec![1; 16 * PAGE]));
    let object = Object::with_store(&space, Arc::clone(&memory), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    (0..16).for_each(|page| assert!(store(map.as_ptr(), page * PAGE, 9)));
    object.set_len(2 * PAGE as u64).unwrap();
    assert!(object.cached().1 <= 2 * PAGE);
    object.sync().unwrap();
    assert_eq!(object.cached().1, 0);
    let mut expected = vec![1; 2 * PAGE];
    (expected[0], expected[PAGE]) = (9, 9);
    assert!(memory.bytes() == expected);
    object.set_len(16 * PAGE as u64).unwrap();
    (2..16).for_each(|page| assert_eq!(load(map.as_ptr(), page * PAGE), Some(0)));
}

#[test]
fn pages_mapped_around_a_fault_are_found_in_every_mapping() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(64 * PAGE, 4);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    let options = MapOptions::new().fault_around(FaultAround::Order(9));
    // SAFETY: accessed by single bytes only.
    let maps: Vec<_> = (0..4).map(|_| unsafe { options.map(&object) }.unwrap()).collect();
    let fill = || {
        let mut all = vec![0; object.len() as usize];
        object.read_at(0, &mut all).unwrap();
        for map in &maps {
            assert_eq!(load(map.as_ptr(), 0), Some(bytes[0]));
            wait_until(|| {
                load(map.as_ptr(), 0);
                map.populate_cached(0..all.len());
                map.mapped_pages() == all.len() / PAGE
            });
        }
    };
    let all_have = |pages: usize| maps.iter().all(|map| map.mapped_pages() == pages);
    fill();
    drop_pages(&object, 8 * PAGE as u64..24 * PAGE as u64, 16);
    assert!(all_have(48), "after the drop");
    fill();
    object.set_len(10 * PAGE as u64).unwrap();
    assert!(all_have(10), "after the truncation");
    press(&space);
    wait_until(|| {
        press(&space);
        all_have(0) && object.cached().0 == 0
    });
    for map in &maps {
        (0..10)
            .for_each(|page| assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE])));
        assert_eq!(load(map.as_ptr(), 10 * PAGE), None);
    }
}

#[test]
fn what_another_program_appends_is_seen_in_the_page_that_was_the_last() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let dir = Dir::new();
    let bytes = random(3 * PAGE + 500, 5);
    let path = dir.file("log", &bytes[..2 * PAGE + 100]);
    let object = OpenOptions::new().write(true).open(&space, &path).unwrap();
    let options = MapOptions::new().len(4 * PAGE as u64).beyond_end(true);
    // SAFETY: accessed by single bytes only.
    let map = unsafe { options.map_mut(&object) }.unwrap();
    assert_eq!(load(map.as_ptr(), 2 * PAGE + 100), Some(0));
    assert!(store(map.as_ptr(), 2 * PAGE, 77));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&bytes[2 * PAGE + 100..], 2 * PAGE as u64 + 100).unwrap();
    assert_eq!(object.refresh_len().unwrap(), bytes.len() as u64);
    for (at, &byte) in bytes.iter().enumerate().skip(2 * PAGE + 100) {
        assert_eq!(load(map.as_ptr(), at), Some(byte), "byte {at}");
    }
    object.sync().unwrap();
    let mut expected = bytes;
    expected[2 * PAGE] = 77;
    assert!(std::fs::read(&path).unwrap() == expected);
}

#[test]
fn a_store_that_refuses_to_become_shorter_costs_no_byte() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let memory = Arc::new(VecStore::new(vec![1; 16 * PAGE]));
    let inner = Arc::new(FailStore::new(Arc::clone(&memory)));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    (0..16).for_each(|page| assert!(store(map.as_ptr(), page * PAGE + 100, 9)));
    inner.fail(Failure::nth(Operation::SetLen, 1, Errno::IO).for_ever());
    // Cut at a page's start and inside of one.
    for cut in [2 * PAGE, 5 * PAGE + 50] {
        assert_eq!(object.set_len(cut as u64).unwrap_err().errno(), Errno::IO);
        assert_eq!(object.len(), 16 * PAGE as u64);
        assert_eq!(object.cached().1, 16 * PAGE, "all is as dirty as before");
        (0..16).for_each(|page| assert_eq!(load(map.as_ptr(), page * PAGE + 100), Some(9)));
    }
    object.sync().unwrap();
    let mut expected = vec![1; 16 * PAGE];
    (0..16).for_each(|page| expected[page * PAGE + 100] = 9);
    assert!(memory.bytes() == expected);
    inner.mend();
    object.set_len(PAGE as u64).unwrap();
    assert_eq!((memory.bytes().len(), object.cached().1), (PAGE, 0));
}

#[test]
fn a_flush_waits_for_the_store_to_say_whether_it_becomes_shorter() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let memory = Arc::new(VecStore::new(vec![1; 8 * PAGE]));
    let inner = Arc::new(FailStore::new(DelayStore::new(Arc::clone(&memory))));
    let delayed = Arc::new(DelayStore::new(Arc::clone(&inner)));
    inner.fail(Failure::nth(Operation::SetLen, 1, Errno::IO));
    let object = Object::with_store(&space, Arc::clone(&delayed), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 7 * PAGE, 9));
    delayed.hold(Operation::SetLen);
    let is_flushed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| object.set_len(2 * PAGE as u64).unwrap_err());
        assert!(delayed.wait_for(1, Duration::from_secs(10)));
        scope.spawn(|| {
            object.sync().unwrap();
            is_flushed.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(A_WHILE);
        assert!(!is_flushed.load(Ordering::SeqCst), "the page may be cut, or must be written");
        delayed.release_all();
    });
    assert_eq!(memory.bytes()[7 * PAGE], 9);
    assert_eq!(object.cached().1, 0);
}

/// The one worker waits for its store, behind it waits a read. The cut of the end waits for that read,
/// and must not keep what the worker needs to come to it.
#[test]
fn a_cut_that_waits_for_a_read_lets_write_back_end() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space_by(&AddressSpace::builder().memory(1 << 20).workers(1)) else {
        return;
    };
    let inner = Probe::new(vec![0; 600 * PAGE]);
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let [has_begun, may_end] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    inner.on_write({
        let (has_begun, may_end) = (Arc::clone(&has_begun), Arc::clone(&may_end));
        move |_, _| {
            has_begun.store(true, Ordering::SeqCst);
            wait_until(|| may_end.load(Ordering::SeqCst));
        }
    });
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().fault_around(FaultAround::Off).map_mut(&object) }.unwrap();
    let start = map.as_ptr() as usize;
    (0..120).for_each(|page| assert_eq!(load(start as *const u8, page * PAGE), Some(0)));
    // More than is free: the worker writes.
    (0..120).for_each(|page| assert!(store(start as *const u8, page * PAGE, 1)));
    wait_until(|| has_begun.load(Ordering::SeqCst));
    std::thread::scope(|scope| {
        let reads = space.counter("pgmajfault");
        scope.spawn(move || assert_eq!(load(start as *const u8, 200 * PAGE), Some(0)));
        wait_until(|| space.counter("pgmajfault") > reads);
        scope.spawn(|| object.set_len(300 * PAGE as u64).unwrap());
        wait_until(|| object.len() == 300 * PAGE as u64);
        std::thread::sleep(Duration::from_millis(50));
        may_end.store(true, Ordering::SeqCst);
    });
    assert_eq!(load(start as *const u8, 300 * PAGE), None);
}
