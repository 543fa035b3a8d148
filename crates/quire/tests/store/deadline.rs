//! A store with a deadline, by itself: `objects_patience` has objects over one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use quire::store::{Cause, DeadlineStore, Operation, Store, StoreError};
use quire_test_stores::{DelayStore, FailStore, Failure, VecStore};
use rustix::io::Errno;

use super::{PAGE, pattern};

const DEADLINE: Duration = Duration::from_millis(500);

fn is_silent<T: std::fmt::Debug>(result: Result<T, StoreError>) -> bool {
    matches!(result.unwrap_err().cause(), Cause::Silent { after } if *after == DEADLINE)
}

#[test]
fn what_is_late_keeps_away_what_it_could_meet_and_nothing_else() {
    let memory = Arc::new(VecStore::new(pattern(1, 4 * PAGE)));
    let inner = Arc::new(DelayStore::new(Arc::clone(&memory)));
    let store = DeadlineStore::new(Arc::clone(&inner), DEADLINE);
    let mut bytes = vec![0; 4 * PAGE];
    store.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(1, 4 * PAGE));
    inner.hold(Operation::Write);
    let begun = Instant::now();
    assert!(is_silent(store.write(0, &[1; PAGE])));
    assert!(begun.elapsed() >= DEADLINE);
    assert!(is_silent(store.write(PAGE as u64 - 1, &[2; 2])));
    assert!(is_silent(store.read(0, &mut bytes)));
    assert!(is_silent(store.set_len(0)));
    assert_eq!(inner.waiting(), 1, "those were not begun");
    store.read(PAGE as u64, &mut bytes[PAGE..]).unwrap();
    inner.hold(Operation::Read);
    assert!(is_silent(store.read(2 * PAGE as u64, &mut bytes[..2 * PAGE])));
    let begun = Instant::now();
    assert!(is_silent(store.read(3 * PAGE as u64, &mut bytes[..PAGE])));
    assert!(begun.elapsed() < DEADLINE, "many wait for one read");
    inner.release_all();
    while store.write(0, &[3; PAGE]).is_err() {}
    assert_eq!(memory.bytes()[..PAGE], [3; PAGE]);
    store.sync().unwrap();
    assert_eq!(store.len().unwrap(), 4 * PAGE as u64);
}

#[test]
fn the_error_of_a_late_sync_is_told_by_the_next_one() {
    let inner = Arc::new(FailStore::new(VecStore::new(vec![0; PAGE])));
    inner.fail(Failure::nth(Operation::Sync, 1, Errno::IO));
    let held = Arc::new(DelayStore::new(Arc::clone(&inner)));
    held.hold(Operation::Sync);
    let store = DeadlineStore::new(Arc::clone(&held), DEADLINE);
    assert!(is_silent(store.sync()));
    assert!(is_silent(store.sync()), "one at a time");
    held.release_all();
    let told = loop {
        match store.sync().unwrap_err() {
            error if error.errno() == Errno::TIMEDOUT => {}
            error => break error,
        }
    };
    assert_eq!((told.errno(), inner.count(Operation::Sync)), (Errno::IO, 1));
    store.sync().unwrap();
    drop(store);
    assert_eq!(Arc::strong_count(&held), 1, "nothing is late: the inner store goes at once");
}
