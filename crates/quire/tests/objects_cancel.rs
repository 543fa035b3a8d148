//! Calls that end their wait by a deadline or a token, over stores that do not answer.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{PAGE, Probe, Watchdog, random, space, wait_until};
use quire::library::{AddressSpace, CancelToken, Error, MapOptions, Object, Patience, Pattern};
use quire::store::{Operation, Store};
use quire_test_stores::{DelayStore, NeverStore, VecStore};
use rustix::io::Errno;

type Call<'a> = &'a dyn Fn() -> Result<(), Error>;
type Delayed = Arc<DelayStore<Arc<Probe>>>;

/// An object whose store waits where it is told to.
fn delayed(space: &AddressSpace, bytes: &[u8]) -> (Delayed, Arc<Probe>, Object) {
    let probe = Probe::new(bytes.to_vec());
    let store = Arc::new(DelayStore::new(Arc::clone(&probe)));
    let object = Object::with_store(space, Arc::clone(&store), Some(1 << 20)).unwrap();
    (store, probe, object)
}

fn soon() -> Patience {
    Patience::new().timeout(Duration::from_millis(30))
}

/// Whether a call was interrupted; what it says names the object.
fn is_interrupted<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    let error = result.unwrap_err();
    assert_eq!(error.errno(), Errno::INTR, "{error}");
    assert!(error.to_string().starts_with("a probe: cannot wait longer to "), "{error}");
    matches!(error, Error::Interrupted { .. })
}

#[test]
fn every_call_that_may_wait_ends_at_its_deadline_and_when_it_is_cancelled() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(64 * PAGE, 1);
    let (store, _, object) = delayed(&space, &bytes);
    // Nothing is read around a page.
    let alone = MapOptions::new().pattern(Pattern::Random);
    // SAFETY: nothing else uses the store.
    let (mut map, copy) =
        unsafe { (alone.clone().map_mut(&object).unwrap(), alone.map_copy(&object).unwrap()) };
    map[0] = 1;
    for operation in [Operation::Read, Operation::Write, Operation::SetLen, Operation::Sync] {
        store.hold(operation);
    }
    // Each where nothing is cached, and where no other call has begun.
    let calls: [(&str, Call<'_>); 9] = [
        ("read_at", &|| object.read_at(17 * PAGE as u64, &mut [0; 10]).map(drop)),
        ("try_read", &|| map.try_read(20 * PAGE, &mut [0; 10]).map(drop)),
        ("populate", &|| map.populate(24 * PAGE..25 * PAGE)),
        ("pin", &|| map.pin(28 * PAGE..30 * PAGE).map(drop)),
        ("populate a copy", &|| copy.populate(32 * PAGE..33 * PAGE)),
        ("pin a copy", &|| copy.pin_write(36 * PAGE..37 * PAGE).map(drop)),
        ("flush", &|| map.flush_range(0..PAGE)),
        ("sync", &|| object.sync()),
        ("set_len", &|| object.set_len(60 * PAGE as u64)),
    ];
    for (name, call) in calls {
        let begun = Instant::now();
        assert!(is_interrupted(soon().during(call)), "{name}");
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_millis(29), "{name} has waited {waited:?}");
        let token = CancelToken::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                token.cancel();
            });
            // A deadline that does not come, and one that would.
            let patience = Patience::new().token(&token).timeout(Duration::from_secs(3600));
            assert!(is_interrupted(patience.during(call)), "{name}");
        });
        assert!(token.is_cancelled());
        assert!(is_interrupted(Patience::new().token(&token).during(call)), "{name}, at once");
    }
    assert_eq!(space.pinned().0, 0, "nothing stays pinned");
    let token = CancelToken::new();
    token.cancel();
    Patience::new().token(&token).during(|| {
        // What need not wait is done all the same.
        assert_eq!(object.read_at(0, &mut [0; 4]).unwrap(), 4);
        assert_eq!(object.prefetch(17 * PAGE as u64..18 * PAGE as u64), 0, "it is under way");
        let mut parts = [[0u8; 8]; 3];
        let [first, second, third] = &mut parts;
        let mut requests: [(u64, &mut [u8]); 3] =
            [(40 * PAGE as u64, first), (0, second), (44 * PAGE as u64, third)];
        let results = object.read_at_many(&mut requests).unwrap();
        let kinds = results.iter().map(|result| result.is_ok());
        assert_eq!(kinds.collect::<Vec<_>>(), [false, true, false]);
    });
    store.release_all();
    assert_eq!(object.read_at(17 * PAGE as u64, &mut [0; 10]).unwrap(), 10, "patient again");
    assert!(copy[36 * PAGE..37 * PAGE] == bytes[36 * PAGE..37 * PAGE]);
}

#[test]
fn a_store_that_never_answers_keeps_no_caller() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let store = Arc::new(NeverStore::new(Probe::new(vec![7; 8 * PAGE])));
    let object = Object::with_store(&space, Arc::clone(&store), None).unwrap();
    for _ in 0..3 {
        assert!(is_interrupted(soon().during(|| object.read_at(0, &mut [0; 1]))));
    }
    assert!(is_interrupted(soon().during(|| object.set_len(PAGE as u64))));
    assert!(store.wait_for(1, Duration::from_secs(10)), "the one read; the cut waits behind it");
    store.cancel();
    // What it says then is said to the next call that asks; the calls that have left are not in the
    // way.
    assert!(matches!(object.read_at(0, &mut [0; 1]), Err(Error::Store(_))));
}

#[test]
fn what_an_interrupted_read_has_begun_is_in_the_cache_once_the_store_has_answered() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(64 * PAGE, 2);
    let (store, probe, object) = delayed(&space, &bytes);
    store.hold(Operation::Read);
    let mut into = [0; 100];
    assert!(is_interrupted(soon().during(|| object.read_at(5000, &mut into))));
    assert_eq!(into, [0; 100], "nothing writes to what the caller has back");
    assert!(is_interrupted(soon().during(|| object.read_at(5000, &mut into))));
    store.release_all();
    wait_until(|| object.cached().0 > 0);
    let reads = probe.inner.reads();
    assert_eq!(reads, 1, "a call that comes back waits for the read that is under way");
    assert_eq!(object.read_at(5000, &mut into).unwrap(), 100);
    assert!(into == bytes[5000..5100]);
    assert_eq!(probe.inner.reads(), reads);
}

#[test]
fn a_read_that_fails_is_told_to_a_waiter_with_a_deadline() {
    let Some(space) = space(2 << 20) else { return };
    let (_, probe, object) = delayed(&space, &random(64 * PAGE, 3));
    let patience = Patience::new().timeout(Duration::from_secs(3600));
    for round in 0..3 {
        probe.set_bad(9, true);
        let read = patience.during(|| object.read_at(9 * PAGE as u64, &mut [0; 9]));
        assert!(
            matches!(&read, Err(Error::Store(error)) if error.errno() == Errno::IO),
            "{read:?}"
        );
        probe.set_bad(9, false);
        let read = patience.during(|| object.read_at(9 * PAGE as u64, &mut [0; 9]));
        assert_eq!(read.unwrap(), 9, "round {round}");
        common::drop_pages(&object, 9 * PAGE as u64..10 * PAGE as u64, 1);
    }
}

#[test]
fn an_interrupted_flush_goes_on_and_its_error_is_told_by_the_next() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let (store, probe, object) = delayed(&space, &vec![0; 8 * PAGE]);
    // SAFETY: nothing else uses the store.
    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    map[PAGE] = 1;
    store.hold(Operation::Write);
    assert!(is_interrupted(soon().during(|| map.flush())));
    store.release_all();
    wait_until(|| probe.inner.bytes()[PAGE] == 1 && object.cached().1 == 0);
    map[PAGE] = 2;
    store.hold(Operation::Write);
    probe.fail_writes(Some(Errno::NOSPC));
    assert!(is_interrupted(soon().during(|| object.sync())));
    store.release_all();
    wait_until(|| object.cached().1 == PAGE && store.waiting() == 0);
    probe.fail_writes(None);
    let error = object.sync().unwrap_err();
    assert!(matches!(&error, Error::Store(error) if error.errno() == Errno::NOSPC), "{error}");
    object.sync().unwrap();
    assert_eq!((probe.inner.bytes()[PAGE], object.cached().1), (2, 0), "told once");
}

#[test]
fn an_interrupted_change_of_length_is_made_once_the_store_lets_it() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let (store, probe, object) = delayed(&space, &random(8 * PAGE, 4));
    store.hold(Operation::SetLen);
    assert!(is_interrupted(soon().during(|| object.set_len(3 * PAGE as u64))));
    assert_eq!(object.len(), 8 * PAGE as u64);
    // Another one waits behind it, and can leave as well: a pin, too, waits for the cut's end.
    assert!(is_interrupted(soon().during(|| object.set_len(5 * PAGE as u64))));
    // SAFETY: nothing writes the store.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    assert!(is_interrupted(soon().during(|| map.pin(6 * PAGE..7 * PAGE).map(drop))));
    drop(map.pin(0..2 * PAGE).unwrap());
    store.release_all();
    wait_until(|| object.len() == 5 * PAGE as u64);
    assert_eq!(probe.inner.bytes().len(), 5 * PAGE, "first the one, and then the other");
}

/// The waiter that goes away may be the one that the end of the page's read has woken.
#[test]
fn a_waiter_that_is_interrupted_takes_no_others_turn() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(64 * PAGE, 5);
    let (store, _, object) = delayed(&space, &bytes);
    for round in 0..40u64 {
        store.hold(Operation::Read);
        let token = CancelToken::new();
        let read = |patience: Patience| {
            let mut into = [0; 8];
            let read = patience.during(|| object.read_at(round * PAGE as u64, &mut into));
            read.map(|_| into)
        };
        std::thread::scope(|scope| {
            let patient: Vec<_> = (0..3).map(|_| scope.spawn(|| read(Patience::new()))).collect();
            let others: Vec<_> =
                (0..3).map(|_| scope.spawn(|| read(Patience::new().token(&token)))).collect();
            std::thread::sleep(Duration::from_micros(500 * (round % 4)));
            scope.spawn(|| token.cancel());
            store.release_all();
            let expected = &bytes[round as usize * PAGE..][..8];
            for thread in patient {
                assert_eq!(thread.join().unwrap().unwrap(), expected, "round {round}");
            }
            for thread in others {
                match thread.join().unwrap() {
                    Ok(into) => assert_eq!(into, expected, "round {round}"),
                    Err(error) => assert!(matches!(error, Error::Interrupted { .. }), "{error}"),
                }
            }
        });
        object.drop_cached(0..u64::MAX);
    }
}

#[test]
fn the_inner_patience_counts_and_the_outer_one_comes_back_by_a_panic_as_well() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(2 << 20) else { return };
    let (store, _, object) = delayed(&space, &vec![0; 8 * PAGE]);
    store.hold(Operation::Sync);
    let token = CancelToken::new();
    token.cancel();
    Patience::new().token(&token).during(|| {
        let begun = Instant::now();
        assert!(is_interrupted(soon().during(|| object.sync())));
        assert!(begun.elapsed() >= Duration::from_millis(29), "the inner one");
        let panicked = std::panic::catch_unwind(|| soon().during(|| panic!("for the test")));
        panicked.unwrap_err();
        assert!(is_interrupted(object.sync()), "the outer one again");
    });
    let deadline = Instant::now() + Duration::from_millis(20);
    assert!(is_interrupted(Patience::new().deadline(deadline).during(|| object.sync())));
    // Another thread has its own.
    store.release_all();
    let sync = || std::thread::scope(|scope| scope.spawn(|| object.sync()).join().unwrap());
    Patience::new().token(&token).during(sync).unwrap();
}

/// Lets all go in the end, so that an object's own end waits for nothing where a test has failed.
struct LetGo<'a, S: Store>(&'a DelayStore<S>);

impl<S: Store> Drop for LetGo<'_, S> {
    fn drop(&mut self) {
        self.0.release_all();
    }
}

fn prefetch_one(object: &Object, page: usize) -> usize {
    object.prefetch((page * PAGE) as u64..((page + 1) * PAGE) as u64)
}

/// Many more reads than the queue of requests holds, all of which are left.
#[test]
fn a_full_queue_of_reads_keeps_no_caller() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(8 << 20) else { return };
    let store = Arc::new(DelayStore::new(VecStore::new(random(600 * PAGE, 6))));
    let object = Object::with_store(&space, Arc::clone(&store), Some(0)).unwrap();
    let _let_go = LetGo(&store);
    store.hold(Operation::Read);
    let token = CancelToken::new();
    token.cancel();
    let patience = Patience::new().token(&token);
    let mut generator = quire_simulated::Generator::new(6);
    for _ in 0..1200 {
        let at = (generator.below(600) * PAGE) as u64;
        let read = patience.during(|| object.read_at(at, &mut [0; 1]));
        assert!(matches!(read, Err(Error::Interrupted { .. })), "{read:?}");
    }
    // Each worker still takes one from the queue; then none does.
    let is_full = || (0..600).all(|page| prefetch_one(&object, page) == 0);
    wait_until(is_full);
    // A thread that may wait a little tries again now and then.
    let mut all = vec![0; 600 * PAGE];
    let read = soon().during(|| object.read_at(0, &mut all));
    assert!(matches!(read, Err(Error::Interrupted { .. })), "{read:?}");
    store.release_all();
    assert_eq!(object.read_at(0, &mut all).unwrap(), all.len());
    assert!(all == random(600 * PAGE, 6));
}
