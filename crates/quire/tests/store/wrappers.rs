//! The stores that tests use keep their promises.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use quire::store::{Cause, Operation, Store};
use quire_test_stores::{
    CrashOptions, CrashStore, DelayStore, FailStore, Failure, NeverStore, Sectors, VecStore,
};
use rustix::io::Errno;

use super::{PAGE, pattern};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_held_operation_goes_on_when_it_is_let_go_and_not_before() {
    let inner = Arc::new(VecStore::new(vec![7; PAGE]));
    let store = DelayStore::new(Arc::clone(&inner));
    store.hold(Operation::Read);
    store.write(0, &[8]).unwrap();
    thread::scope(|scope| {
        let read = || {
            let mut byte = [0];
            store.read(0, &mut byte).unwrap();
            byte[0]
        };
        let (one, other) = (scope.spawn(read), scope.spawn(read));
        assert!(store.wait_for(2, LONG));
        assert_eq!(inner.reads(), 0);
        store.release(1);
        while inner.reads() == 0 {
            thread::yield_now();
        }
        assert!(store.wait_for(1, LONG));
        assert_eq!((inner.reads(), store.waiting()), (1, 1));
        store.release_all();
        assert_eq!((one.join().unwrap(), other.join().unwrap()), (8, 8));
    });
    store.set_delay(Duration::from_millis(30));
    let start = Instant::now();
    store.sync().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[test]
fn a_store_that_never_answers_does_so_when_it_is_cancelled() {
    let inner = Arc::new(VecStore::new(vec![7; PAGE]));
    let store = NeverStore::new(Arc::clone(&inner));
    assert_eq!(store.len().unwrap(), PAGE as u64);
    thread::scope(|scope| {
        let read = scope.spawn(|| store.read(0, &mut [0; 16]));
        let write = scope.spawn(|| store.write(0, &[1; 16]));
        let sync = scope.spawn(|| store.sync());
        let set_len = scope.spawn(|| store.set_len(0));
        assert!(store.wait_for(4, LONG));
        assert!(!store.wait_for(5, Duration::from_millis(20)));
        store.cancel();
        for waiter in [read, write, sync, set_len] {
            let error = waiter.join().unwrap().unwrap_err();
            assert_eq!((error.cause(), error.errno()), (&Cause::Cancelled, Errno::CANCELED));
        }
    });
    assert!(store.read(0, &mut [0; 16]).is_err());
    assert_eq!((inner.bytes(), inner.reads(), inner.syncs()), (vec![7; PAGE], 0, 0));
}

#[test]
fn the_nth_operation_fails_once_or_for_ever_before_or_after_a_part_of_it() {
    let inner = Arc::new(VecStore::new(pattern(1, 2 * PAGE)));
    let store = FailStore::new(Arc::clone(&inner));
    store.fail(Failure::nth(Operation::Read, 2, Errno::IO).after_bytes(512));
    store.fail(Failure::nth(Operation::Write, 1, Errno::NOSPC).after_bytes(512));
    store.fail(Failure::nth(Operation::Sync, 2, Errno::DQUOT).for_ever());
    store.fail(Failure::nth(Operation::SetLen, 1, Errno::FBIG));
    let mut bytes = [0; PAGE];
    store.read(0, &mut bytes).unwrap();
    bytes.fill(0);
    let error = store.read(0, &mut bytes).unwrap_err();
    assert_eq!((error.errno(), error.operation()), (Errno::IO, Operation::Read));
    assert!(bytes[..512] == pattern(1, PAGE)[..512] && bytes[512..].iter().all(|byte| *byte == 0));
    store.read(0, &mut bytes).unwrap();
    assert_eq!(store.write(0, &[1; PAGE]).unwrap_err().errno(), Errno::NOSPC);
    let mut torn = pattern(1, 2 * PAGE);
    torn[..512].fill(1);
    assert!(inner.bytes() == torn);
    store.write(0, &[1; PAGE]).unwrap();
    let syncs: Vec<_> = (0..4).map(|_| store.sync().map_err(|error| error.errno())).collect();
    assert_eq!(syncs, [Ok(()), Err(Errno::DQUOT), Err(Errno::DQUOT), Err(Errno::DQUOT)]);
    assert_eq!((inner.syncs(), store.count(Operation::Sync)), (1, 4));
    assert_eq!(store.set_len(0).unwrap_err().errno(), Errno::FBIG);
    store.mend();
    store.sync().unwrap();
    store.set_len(0).unwrap();
}

#[test]
fn a_crash_leaves_every_subset_of_what_was_not_synced_and_all_that_was() {
    let store = CrashStore::new(vec![0; 3]);
    store.write(0, b"a").unwrap();
    store.sync().unwrap();
    store.write(1, b"b").unwrap();
    store.write(2, b"c").unwrap();
    store.set_len(2).unwrap();
    assert_eq!((store.bytes(), store.syncs()), (b"ab".to_vec(), 1));
    let images: BTreeSet<_> = store
        .images(CrashOptions::default())
        .map(|image| (image.syncs, String::from_utf8(image.bytes).unwrap().replace('\0', "-")))
        .collect();
    let expected = [
        (0, "---"),
        (0, "a--"),
        (1, "a--"),
        (1, "ab-"),
        (1, "a-c"),
        (1, "abc"),
        (1, "a-"),
        (1, "ab"),
    ];
    assert_eq!(images, expected.map(|(syncs, text)| (syncs, text.to_owned())).into());
}

#[test]
fn a_torn_write_is_there_sector_by_sector() {
    let store = CrashStore::new(vec![0; 2048]);
    // Sectors are the device's, wherever the write begins.
    store.write(256, &[1; 1024]).unwrap();
    let options = CrashOptions { sectors: Sectors::Torn, ..CrashOptions::default() };
    let images: BTreeSet<_> = store.images(options).map(|image| image.bytes).collect();
    assert_eq!(images.len(), 8);
    for image in images {
        for sector in [256..512, 512..1024, 1024..1280] {
            assert!(image[sector.clone()].iter().all(|byte| *byte == image[sector.start]));
        }
        assert!(image[..256].iter().chain(&image[1280..]).all(|byte| *byte == 0));
    }
}

#[test]
fn where_subsets_are_too_many_all_prefixes_and_the_same_samples_are_tried() {
    let store = CrashStore::new(Vec::new());
    for number in 0..100 {
        store.write(number, &[number as u8 + 1]).unwrap();
    }
    let images = |seed| {
        let options = CrashOptions { images_max: 50, seed, ..CrashOptions::default() };
        store.images(options).map(|image| image.done).collect::<Vec<_>>()
    };
    let first = images(7);
    assert_eq!(first.len(), 101 + 50);
    for (length, done) in first[..101].iter().enumerate() {
        assert!(done.iter().enumerate().all(|(number, done)| *done == (number < length)));
    }
    assert_eq!(first, images(7));
    assert_ne!(first[101..], images(8)[101..]);
}

#[test]
fn memory_that_is_read_only_refuses_writes_and_absurd_ones_fail() {
    let store = VecStore::read_only(vec![1; 10]);
    assert_eq!(store.write(0, &[2]).unwrap_err().cause(), &Cause::ReadOnly);
    assert_eq!(store.set_len(0).unwrap_err().cause(), &Cause::ReadOnly);
    assert_eq!(store.bytes(), [1; 10]);
    let store = VecStore::new(Vec::new());
    assert_eq!(store.write(u64::MAX, &[2]).unwrap_err().errno(), Errno::FBIG);
    store.read(u64::MAX, &mut [0; 4]).unwrap();
}
