//! Objects whose stores fail, or may not be written yet.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{
    PAGE, Probe, Watchdog, drop_pages, load, press, random, space, space_by, store, survive_sigbus,
    word,
};
use quire::library::{AddressSpace, Delivery, Error, MapOptions, Object, Pattern};
use quire::store::{Operation, Store};
use quire_test_stores::{FailStore, Failure, VecStore};
use rustix::io::Errno;

#[test]
fn a_page_that_cannot_be_read_is_a_sigbus_alone_and_heals() {
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        one_page_cannot_be_read(delivery);
    }
}

fn one_page_cannot_be_read(delivery: Delivery) {
    let _watchdog = Watchdog::new(60);
    let builder = AddressSpace::builder().memory(4 << 20).delivery(delivery);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(64 * PAGE, 1);
    let probe = Probe::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let at = map.as_ptr();
    probe.set_bad(20, true);
    // In order, so that streams read ahead over the bad page; twice, as it stays bad.
    for _ in 0..2 {
        for page in 0..64 {
            let expected = (page != 20).then_some(bytes[page * PAGE + 3]);
            assert_eq!(load(at, page * PAGE + 3), expected, "page {page}");
        }
    }
    assert!(!store(at, 20 * PAGE, 1));
    let mut byte = [0];
    let error = object.read_at(20 * PAGE as u64, &mut byte).unwrap_err();
    assert_eq!(error.errno(), Errno::IO);
    assert!(matches!(error, Error::Store(_)), "{error:?}");
    assert_eq!(map.try_read(20 * PAGE, &mut byte).unwrap_err().errno(), Errno::IO);
    assert_eq!(map.populate(0..64 * PAGE).unwrap_err().errno(), Errno::IO);
    assert_eq!(load(at, 20 * PAGE), None, "it is as bad as before");
    probe.set_bad(20, false);
    assert_eq!(object.read_at(20 * PAGE as u64, &mut byte).unwrap(), 1);
    assert_eq!(byte[0], bytes[20 * PAGE]);
    map.populate(0..64 * PAGE).unwrap();
    for page in 0..64 {
        assert_eq!(load(at, page * PAGE), Some(bytes[page * PAGE]), "page {page}");
    }
    // Its faults are served as before: it is noticed when it is written, and dropped.
    assert!(store(at, 20 * PAGE, 0x5a));
    object.sync().unwrap();
    assert_eq!(probe.inner.bytes()[20 * PAGE], 0x5a);
    drop_pages(&object, 20 * PAGE as u64..21 * PAGE as u64, 1);
    assert_eq!(load(at, 20 * PAGE), Some(0x5a));
}

#[test]
fn a_page_that_was_mapped_before_it_became_bad_is_a_sigbus_and_no_hang() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(8 * PAGE, 2);
    let probe = Probe::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    let options = MapOptions::new().pattern(Pattern::Random);
    // SAFETY: accessed by single bytes only.
    let (map, other) = unsafe { (options.map(&object).unwrap(), options.map(&object).unwrap()) };
    assert_eq!(load(map.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]));
    drop_pages(&object, 0..8 * PAGE as u64, 1);
    probe.set_bad(3, true);
    assert_eq!(load(map.as_ptr(), 3 * PAGE), None);
    assert_eq!(load(other.as_ptr(), 3 * PAGE), None);
    probe.set_bad(3, false);
    map.populate(3 * PAGE..4 * PAGE).unwrap();
    assert_eq!(load(map.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]));
    assert_eq!(load(other.as_ptr(), 3 * PAGE), None, "each mapping is healed by itself");
    other.populate(0..8 * PAGE).unwrap();
    assert_eq!(load(other.as_ptr(), 3 * PAGE), Some(bytes[3 * PAGE]));
}

#[test]
fn a_short_read_is_read_again_page_by_page() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(32 * PAGE, 3);
    let inner = Arc::new(FailStore::new(VecStore::new(bytes.clone())));
    inner.fail(Failure::nth(Operation::Read, 1, Errno::IO).after_bytes(100));
    inner.fail(Failure::nth(Operation::Read, 4, Errno::IO).after_bytes(PAGE));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let mut all = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut all).unwrap(), all.len());
    assert!(all == bytes);
    inner.fail(Failure::nth(Operation::Read, 1, Errno::IO).for_ever());
    drop_pages(&object, 0..bytes.len() as u64, 32);
    assert_eq!(object.read_at(5, &mut all).unwrap_err().errno(), Errno::IO);
    let held = space.held().0;
    for _ in 0..50 {
        object.read_at(PAGE as u64 * 9, &mut all[..1]).unwrap_err();
    }
    assert_eq!(space.held().0, held, "what could not be read is not charged");
}

#[test]
fn a_store_that_gives_neither_the_page_nor_those_around_it_is_asked_twice() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(64 * PAGE, 4);
    let inner = Arc::new(FailStore::new(VecStore::new(bytes.clone())));
    inner.fail(Failure::nth(Operation::Read, 1, Errno::IO).for_ever());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert_eq!(load(map.as_ptr(), 40 * PAGE), None);
    assert_eq!(inner.count(Operation::Read), 2);
    common::wait_until(|| object.cached().0 == 0);
    let held = space.held().0;
    assert_eq!(load(map.as_ptr(), 41 * PAGE), None);
    common::wait_until(|| space.held().0 == held);
    inner.mend();
    map.populate(0..64 * PAGE).unwrap();
    (0..64).for_each(|page| assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE])));
}

#[test]
fn a_write_that_fails_is_told_once_to_each_handle_and_made_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let probe = Probe::new(vec![0; 8 * PAGE]);
    let first = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    let second = first.clone();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&first) }.unwrap();
    assert!(store(map.as_ptr(), 2 * PAGE, 5));
    probe.fail_writes(Some(Errno::NOSPC));
    assert_eq!(first.sync().unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(first.cached().1, PAGE, "it is still dirty");
    probe.fail_writes(None);
    assert_eq!(second.sync().unwrap_err().errno(), Errno::NOSPC, "told to the other as well");
    assert_eq!(first.cached().1, 0, "which has written it nevertheless");
    assert_eq!(probe.inner.bytes()[2 * PAGE], 5);
    second.sync().unwrap();
    first.sync().unwrap();
    assert_eq!(map.flush().unwrap_err().errno(), Errno::NOSPC, "a mapping is a handle of its own");
    map.flush().unwrap();
}

#[test]
fn dirty_pages_are_written_once_there_is_no_room_for_as_many_clean_ones() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(1 << 20) else { return };
    let probe = Probe::new(vec![0; 400 * PAGE]);
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // Many times over, as a sort does.
    for round in 0..20 {
        (0..64).for_each(|page| assert!(store(map.as_ptr(), page * PAGE, round)));
    }
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(space.counter("pgpgout"), 0, "a quarter is dirty, and most of the rest is free");
    assert_eq!(object.cached().1, 64 * PAGE);
    (64..400).for_each(|page| assert!(store(map.as_ptr(), page * PAGE, 20), "page {page}"));
    common::wait_until(|| space.counter("pgpgout") > 0);
    (0..64).for_each(|page| assert_eq!(load(map.as_ptr(), page * PAGE), Some(19), "page {page}"));
}

#[test]
fn a_thread_that_writes_more_than_the_store_takes_waits_until_it_does() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(1 << 20) else { return };
    let probe = Probe::new(vec![0; 200 * PAGE]);
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    probe.fail_writes(Some(Errno::NOSPC));
    let (at, written) = (map.as_ptr() as usize, AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for page in 0..200 {
                assert!(store(at as *const u8, page * PAGE, 6));
                written.fetch_add(1, Ordering::SeqCst);
            }
        });
        // As much as there is room for clean pages, and an eighth of the budget.
        common::wait_until(|| space.counter("fault_parked") > 0);
        std::thread::sleep(Duration::from_millis(60));
        let dirty = written.load(Ordering::SeqCst);
        assert!((57..150).contains(&dirty), "{dirty} pages are dirty");
        // Nothing is lost meanwhile; what is under way counts as dirty again when it has failed.
        common::wait_until(|| object.cached().1 == dirty * PAGE);
        probe.fail_writes(None);
    });
    assert_eq!(object.sync().unwrap_err().errno(), Errno::NOSPC, "it was so in the background");
    object.sync().unwrap();
    let bytes = probe.inner.bytes();
    (0..200).for_each(|page| assert_eq!(bytes[page * PAGE], 6, "page {page}"));
    drop((map, object));
    common::wait_until(|| space.held().0 == 0);
}

#[test]
fn a_sync_that_fails_is_told_to_every_handle() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let inner = Arc::new(FailStore::new(VecStore::new(vec![0; 8 * PAGE])));
    inner.fail(Failure::nth(Operation::Sync, 1, Errno::IO));
    let first = Object::with_store(&space, inner, None).unwrap();
    let second = first.clone();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&first) }.unwrap();
    assert!(store(map.as_ptr(), 0, 5));
    assert_eq!(first.sync().unwrap_err().errno(), Errno::IO);
    assert_eq!(second.sync().unwrap_err().errno(), Errno::IO, "its bytes may be lost as well");
    first.sync().unwrap();
    second.sync().unwrap();
}

#[test]
fn what_a_failed_sync_may_have_lost_is_written_again_before_the_next_one_succeeds() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let memory = Arc::new(VecStore::new(vec![0; 8 * PAGE]));
    let inner = Arc::new(FailStore::new(Arc::clone(&memory)));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().pattern(Pattern::Random).map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), PAGE, 1));
    object.sync().unwrap();
    // Written without a sync, by two flushes; the sync that would cover them fails.
    (2..5).for_each(|page| assert!(store(map.as_ptr(), page * PAGE, 5)));
    object.write_range(2 * PAGE as u64..3 * PAGE as u64).unwrap();
    object.write_range(0..8 * PAGE as u64).unwrap();
    assert_eq!(object.cached().1, 0);
    inner.fail(Failure::nth(Operation::Sync, 2, Errno::IO));
    assert_eq!(object.sync().unwrap_err().errno(), Errno::IO);
    assert_eq!(object.cached().1, 3 * PAGE, "what was synced before is not in doubt");
    // The device lost them, as it said.
    memory.write(2 * PAGE as u64, &[0; 3 * PAGE]).unwrap();
    object.sync().unwrap();
    assert_eq!(object.cached().1, 0);
    let bytes = memory.bytes();
    (2..5).for_each(|page| assert_eq!(bytes[page * PAGE], 5, "page {page}"));
}

#[test]
fn a_failed_sync_is_never_forgotten_where_what_it_covered_cannot_be_written_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let inner = Arc::new(FailStore::new(VecStore::new(vec![0; 8 * PAGE])));
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let written_and_dropped = || {
        assert!(store(map.as_ptr(), 3 * PAGE, 5));
        object.write_range(0..8 * PAGE as u64).unwrap();
        drop_pages(&object, 3 * PAGE as u64..4 * PAGE as u64, 1);
    };
    written_and_dropped();
    object.sync().unwrap();
    // That one is durable: what fails next is not about it.
    inner.fail(Failure::nth(Operation::Sync, 2, Errno::IO));
    object.sync().unwrap_err();
    object.sync().unwrap();
    written_and_dropped();
    inner.fail(Failure::nth(Operation::Sync, 4, Errno::IO));
    for handle in [object.clone(), object.clone(), object.clone()] {
        assert_eq!(handle.sync().unwrap_err().errno(), Errno::IO);
        assert_eq!(handle.sync().unwrap_err().errno(), Errno::IO, "for ever");
    }
    assert_eq!(inner.count(Operation::Sync), 4, "no sync can make it true");
}

#[test]
fn a_page_whose_memory_failed_is_an_error_everywhere_until_it_is_given_up() {
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        a_page_is_poisoned(delivery);
    }
}

fn a_page_is_poisoned(delivery: Delivery) {
    let _watchdog = Watchdog::new(60);
    let builder = AddressSpace::builder().memory(4 << 20).delivery(delivery);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(64 * PAGE, 6);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = || unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let (first, second) = (map(), map());
    // One mapping has it, written; the other has not.
    first.populate(0..64 * PAGE).unwrap();
    assert!(store(first.as_ptr(), 9 * PAGE, 1));
    assert!(object.poison(9 * PAGE as u64 + 5).unwrap());
    assert!(object.poison(9 * PAGE as u64).unwrap(), "twice is once");
    assert!(!object.poison(64 * PAGE as u64).unwrap());
    assert_eq!(object.cached().0, 63 * PAGE);
    let third = map();
    let mut byte = [0];
    for map in [&first, &second, &third] {
        // What is around it is mapped, it is not; a neighbour's fault does not heal it.
        for page in 0..64 {
            let expected = (page != 9).then_some(bytes[page * PAGE]);
            assert_eq!(load(map.as_ptr(), page * PAGE), expected, "page {page}");
        }
        assert!(!store(map.as_ptr(), 9 * PAGE, 1));
        map.populate_cached(0..64 * PAGE);
        assert_eq!(load(map.as_ptr(), 9 * PAGE), None);
        let error = map.try_read(9 * PAGE + 7, &mut byte).unwrap_err();
        assert!(matches!(error, Error::Poisoned { offset, .. } if offset / 4096 == 9), "{error:?}");
        assert_eq!(map.populate(0..64 * PAGE).unwrap_err().errno(), Errno::HWPOISON);
    }
    assert_eq!(object.sync().unwrap_err().errno(), Errno::HWPOISON, "what was written is lost");
    object.sync().unwrap();
    assert_eq!(object.drop_cached(9 * PAGE as u64..10 * PAGE as u64), 0, "not by a mere drop");
    assert_eq!(object.prefetch(9 * PAGE as u64..10 * PAGE as u64), 0);
    assert_eq!(object.unpoison(0..64 * PAGE as u64), PAGE);
    for map in [&first, &second, &third] {
        assert_eq!(load(map.as_ptr(), 9 * PAGE), Some(bytes[9 * PAGE]), "as the store has it");
    }
    assert!(store(second.as_ptr(), 9 * PAGE, 2));
    assert_eq!(load(first.as_ptr(), 9 * PAGE), Some(2));
    // A cut takes it away as well.
    object.sync().unwrap();
    assert!(object.poison(20 * PAGE as u64).unwrap());
    object.set_len(20 * PAGE as u64).unwrap();
    object.set_len(64 * PAGE as u64).unwrap();
    for map in [&first, &second, &third] {
        assert_eq!(load(map.as_ptr(), 20 * PAGE), Some(0));
    }
    drop((first, second, third, object));
    common::wait_until(|| space.held().0 == 0);
}

#[test]
fn an_error_of_a_length_names_that_length_and_no_older_error() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let inner = Arc::new(FailStore::new(VecStore::new(vec![0; 8 * PAGE])));
    let object = Object::with_store(&space, Arc::clone(&inner), Some(16 * PAGE as u64)).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // Errors with the very errno that is told of a length which the object cannot have.
    inner.fail(Failure::nth(Operation::Write, 1, Errno::FBIG));
    inner.fail(Failure::nth(Operation::SetLen, 1, Errno::FBIG));
    let said = |error: Error| match error {
        Error::Store(error) => (error.operation(), error.offset()),
        other => panic!("{other:?}"),
    };
    assert!(store(map.as_ptr(), 3 * PAGE, 1));
    let error = object.sync().unwrap_err();
    assert_eq!(said(error).0, Operation::Write);
    let is_too_long = |result: Result<(), Error>| match result {
        Err(Error::TooLong { len, .. }) => assert_eq!(len, 17 * PAGE as u64),
        other => panic!("{other:?}"),
    };
    is_too_long(object.set_len(17 * PAGE as u64));
    let error = object.set_len(9 * PAGE as u64).unwrap_err();
    assert_eq!(said(error), (Operation::SetLen, 9 * PAGE as u64));
    is_too_long(object.set_len(17 * PAGE as u64));
    object.set_len(9 * PAGE as u64).unwrap();
}

#[test]
fn ranges_are_cut_to_what_there_is() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(3 * PAGE + 7, 4);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    let len = bytes.len();
    let bad = |options: MapOptions| {
        // SAFETY: never accessed.
        let result = unsafe { options.map(&object) };
        assert!(matches!(result, Err(Error::BadRange { .. })), "{options:?}");
    };
    bad(MapOptions::new().len(0));
    bad(MapOptions::new().offset(len as u64));
    bad(MapOptions::new().len(len as u64 + 1));
    bad(MapOptions::new().offset(u64::MAX).len(2));
    bad(MapOptions::new().len(1 << 60).beyond_end(true));
    let options = MapOptions::new().offset(PAGE as u64 + 5).len(PAGE as u64);
    // SAFETY: nothing writes it while the slice is used.
    let map = unsafe { options.map_mut(&object) }.unwrap();
    assert!(map[..] == bytes[PAGE + 5..2 * PAGE + 5]);
    let mut into = [0; 10];
    assert_eq!(map.try_read(PAGE - 3, &mut into).unwrap(), 3);
    assert_eq!(map.try_read(usize::MAX, &mut into).unwrap(), 0);
    assert_eq!(object.read_at(len as u64 - 2, &mut into).unwrap(), 2);
    assert_eq!(object.read_at(u64::MAX, &mut into).unwrap(), 0);
    let (start, end) = (7, 3);
    for range in [0..0, 0..usize::MAX, usize::MAX..usize::MAX, start..end] {
        map.flush_range(range.clone()).unwrap();
        map.populate(range.clone()).unwrap();
        map.will_need(range.clone());
        map.dont_need(range.clone());
        map.populate_cached(range);
    }
    object.flush_range(0..u64::MAX).unwrap();
    object.flush_range(u64::MAX..u64::MAX).unwrap();
    object.prefetch(0..u64::MAX);
    let mut places = [(u64::MAX, &mut into[..])];
    assert_eq!(*object.read_at_many(&mut places).unwrap()[0].as_ref().unwrap(), 0);
    // Advice on a part of it changes nothing else.
    map.advise(Pattern::Random, 1..2).unwrap();
    map.populate(0..PAGE).unwrap();
    assert_eq!(map.mapped_pages(), 2);
    let read_only = Object::with_store(&space, VecStore::read_only(bytes), None).unwrap();
    // SAFETY: never accessed.
    let refused = unsafe { MapOptions::new().map_mut(&read_only) };
    assert!(matches!(refused, Err(Error::ReadOnly { .. })));
    assert!(matches!(read_only.set_len(1), Err(Error::ReadOnly { .. })));
}

#[test]
fn a_page_that_the_kernel_unmapped_by_itself_is_mapped_again() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(4 << 20) else { return };
    let bytes = random(8 * PAGE, 5);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    map.populate(0..8 * PAGE).unwrap();
    assert!(store(map.as_ptr(), PAGE, 9));
    // SAFETY: a shared mapping: its pages stay where they are.
    unsafe {
        let start = map.as_ptr().cast_mut().cast();
        rustix::mm::madvise(start, 8 * PAGE, rustix::mm::Advice::LinuxDontNeed).unwrap();
    }
    assert_eq!(load(map.as_ptr(), 0), Some(bytes[0]));
    assert_eq!(load(map.as_ptr(), PAGE), Some(9));
    assert!(store(map.as_ptr(), PAGE + 1, 8));
    assert!(store(map.as_ptr(), 1, 8));
    // A stream of writes takes the pages ahead of it along.
    assert!(object.cached().1 >= 2 * PAGE);
}

#[test]
fn nothing_is_written_by_any_way_before_the_barrier_allows_it() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(1 << 20) else { return };
    let probe = Probe::new(vec![0; 128 * PAGE]);
    let may = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&may);
    probe.on_write(move |offset, _| assert!(seen.load(Ordering::SeqCst), "written: {offset}"));
    let open = || {
        let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
        let (may, asked) = (Arc::clone(&may), Arc::clone(&asked));
        object.set_barrier(move |_, _| {
            asked.fetch_add(1, Ordering::SeqCst);
            may.load(Ordering::SeqCst)
        });
        object
    };
    let object = open();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    // More than what has write-back begin, less than what stops writers.
    (0..120).for_each(|page| assert!(store(map.as_ptr(), page * PAGE + 1, page as u8 + 1)));
    assert!(matches!(object.sync(), Err(Error::HeldBack { offset: 0, .. })));
    let before = asked.load(Ordering::SeqCst);
    map.dont_need(0..120 * PAGE);
    press(&space);
    common::wait_until(|| asked.load(Ordering::SeqCst) > before);
    object.set_len(119 * PAGE as u64 + 9).unwrap();
    object.set_len(128 * PAGE as u64).unwrap();
    assert_eq!((probe.inner.writes(), object.cached().1), (0, 120 * PAGE));
    may.store(true, Ordering::SeqCst);
    object.sync().unwrap();
    let bytes = probe.inner.bytes();
    (0..120).for_each(|page| assert_eq!(bytes[page * PAGE + 1], page as u8 + 1));
    may.store(false, Ordering::SeqCst);
    assert!(store(map.as_ptr(), 0, 99));
    drop((map, object));
    assert_eq!(probe.inner.bytes()[0], 0, "closed before the barrier let it go: lost");
    let object = open();
    // SAFETY: as above.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 0, 99));
    may.store(true, Ordering::SeqCst);
    drop((map, object));
    assert_eq!(probe.inner.bytes()[0], 99, "and here after it");
}

#[test]
fn what_is_written_after_the_barrier_said_yes_is_not_in_the_write_that_it_allowed() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(1 << 20) else { return };
    let probe = Probe::new(vec![0; 4 * PAGE]);
    let object = Object::with_store(&space, Arc::clone(&probe), None).unwrap();
    // SAFETY: accessed atomically only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    word(map.as_ptr(), 0).store(1, Ordering::SeqCst);
    let (is_asked, is_done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (asked, done) = (Arc::clone(&is_asked), Arc::clone(&is_done));
    object.set_barrier(move |_, _| {
        // Yes; and before anything comes of it the page is written once more.
        asked.store(true, Ordering::SeqCst);
        for _ in 0..100 {
            if !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        true
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            common::wait_until(|| is_asked.load(Ordering::SeqCst));
            word(map.as_ptr(), 0).store(2, Ordering::SeqCst);
            is_done.store(true, Ordering::SeqCst);
        });
        object.write_range(0..8).unwrap();
        assert_eq!(probe.inner.bytes()[0], 1, "the second write was not asked about");
    });
    object.sync().unwrap();
    assert_eq!(probe.inner.bytes()[0], 2);
}

#[test]
fn memory_that_no_address_space_can_have_is_refused() {
    let refused = |bytes| AddressSpace::builder().memory(bytes).build().map(drop).unwrap_err();
    assert!(matches!(refused(1000), Error::TooLittleMemory { .. }));
    assert!(matches!(refused(usize::MAX), Error::TooMuchMemory { .. }));
}
