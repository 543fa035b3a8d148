//! Reads of objects by the thread that serves the fault, where the store allows it.

#[path = "common/objects.rs"]
mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    Dir, PAGE, Watchdog, drop_pages, load, random, space_by, store, survive_sigbus, wait_until,
};
use quire::library::{AddressSpace, Builder, Delivery, MapOptions, Mapping, Object, Pattern};
use quire::store::{Cause, Operation, Store, StoreError};
use quire_test_stores::{DelayStore, VecStore};
use rustix::io::Errno;

/// Long enough for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(60);

/// Which thread has read what.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Read {
    is_in_place: bool,
    page: u64,
    thread: String,
}

/// A store in memory that lets itself be read in place, and says by which thread it was.
struct InPlaceStore {
    inner: DelayStore<VecStore>,
    reads: Mutex<Vec<Read>>,
    /// Whether reads in place are possible at all.
    allows: AtomicBool,
    /// No read brings anything.
    fails: AtomicBool,
}

fn thread_name() -> String {
    std::thread::current().name().unwrap_or("").to_string()
}

impl InPlaceStore {
    fn new(bytes: Vec<u8>) -> Arc<InPlaceStore> {
        Arc::new(InPlaceStore {
            inner: DelayStore::new(VecStore::new(bytes)),
            reads: Mutex::new(Vec::new()),
            allows: AtomicBool::new(true),
            fails: AtomicBool::new(false),
        })
    }

    fn note(&self, is_in_place: bool, offset: u64) {
        let read = Read { is_in_place, page: offset / PAGE as u64, thread: thread_name() };
        self.reads.lock().unwrap().push(read);
    }

    fn take_reads(&self) -> Vec<Read> {
        std::mem::take(&mut *self.reads.lock().unwrap())
    }

    fn has_failed(&self) -> bool {
        self.fails.load(Ordering::SeqCst)
    }
}

impl Store for InPlaceStore {
    fn name(&self) -> &str {
        "a store that is read in place"
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.inner.len()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.note(false, offset);
        if self.has_failed() {
            let bytes = into.len() as u64;
            return Err(StoreError::new(
                Operation::Read,
                self.name(),
                offset,
                bytes,
                Cause::Os(Errno::IO),
            ));
        }
        self.inner.read(offset, into)
    }

    fn reads_in_place(&self) -> bool {
        self.allows.load(Ordering::SeqCst)
    }

    // Not as a signal handler should: but what is interrupted here holds nothing of this.
    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        self.note(true, offset);
        // As a call of libc's does where it fails, be it for a moment.
        // SAFETY: the thread's own.
        unsafe { *libc::__errno_location() = libc::EINTR };
        !self.has_failed() && self.inner.read(offset, into).is_ok()
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.inner.write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.inner.set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.inner.sync()
    }
}

fn builder(delivery: Delivery) -> Builder {
    AddressSpace::builder().memory(4 << 20).delivery(delivery).handlers(2)
}

/// Maps the object for accesses to single pages.
fn map_random(object: &Object) -> Mapping {
    // SAFETY: accessed by single bytes only.
    unsafe { MapOptions::new().pattern(Pattern::Random).map(object) }.unwrap()
}

#[test]
fn a_page_is_read_by_the_thread_that_faults_and_serves_itself() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let me = thread_name();
    for (delivery, thread) in [(Delivery::Inline, &*me), (Delivery::Handlers, "quire-store")] {
        let Some(space) = space_by(&builder(delivery)) else { return };
        let bytes = random(32 * PAGE, 1);
        let inner = InPlaceStore::new(bytes.clone());
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        let map = map_random(&object);
        assert_eq!(load(map.as_ptr(), 7 * PAGE + 3), Some(bytes[7 * PAGE + 3]));
        let is_in_place = delivery == Delivery::Inline;
        let read = Read { is_in_place, page: 7, thread: thread.to_string() };
        assert_eq!(inner.take_reads(), [read]);
        for page in (0..32).rev() {
            assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE]));
        }
        assert!(inner.take_reads().iter().all(|read| read.is_in_place == is_in_place));
        assert_eq!(space.counter("pgpgin"), 32);
        assert_eq!(space.counter("pgmajfault"), 32);
    }
}

#[test]
fn a_thread_that_reads_for_itself_keeps_its_errno() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space_by(&builder(Delivery::Inline)) else { return };
    let bytes = random(PAGE, 7);
    let inner = InPlaceStore::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let map = map_random(&object);
    // SAFETY: the thread's own; nothing comes in between but the access.
    let (read, errno) = unsafe {
        *libc::__errno_location() = libc::ENOTTY;
        (load(map.as_ptr(), 5), *libc::__errno_location())
    };
    assert_eq!((read, errno), (Some(bytes[5]), libc::ENOTTY));
    assert!(inner.take_reads().iter().all(|read| read.is_in_place));
}

#[test]
fn a_page_that_is_to_be_written_is_read_in_place_and_reaches_the_store() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space_by(&builder(Delivery::Inline)) else { return };
    let mut bytes = random(8 * PAGE, 2);
    let inner = InPlaceStore::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    // SAFETY: accessed by single bytes only.
    let map = unsafe { MapOptions::new().pattern(Pattern::Random).map_mut(&object) }.unwrap();
    assert!(store(map.as_ptr(), 3 * PAGE + 9, 0x77));
    assert!(inner.take_reads().iter().all(|read| read.is_in_place && read.page == 3));
    object.sync().unwrap();
    bytes[3 * PAGE + 9] = 0x77;
    let mut stored = vec![0; bytes.len()];
    inner.inner.read(0, &mut stored).unwrap();
    assert!(stored == bytes);
}

#[test]
fn a_store_that_says_no_and_one_with_a_deadline_are_read_by_workers() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    for delivery in [Delivery::Inline, Delivery::Handlers] {
        for deadline in [None, Some(Duration::from_secs(30))] {
            let builder = builder(delivery);
            let builder = match deadline {
                Some(deadline) => builder.store_deadline(deadline),
                None => builder,
            };
            let Some(space) = space_by(&builder) else { return };
            let bytes = random(8 * PAGE, 3);
            let inner = InPlaceStore::new(bytes.clone());
            inner.allows.store(deadline.is_some(), Ordering::SeqCst);
            let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
            let map = map_random(&object);
            for page in (0..8).rev() {
                assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE]));
            }
            let reads = inner.take_reads();
            assert_eq!(reads.len(), 8);
            assert!(reads.iter().all(|read| !read.is_in_place), "{reads:?}");
        }
    }
}

#[test]
fn what_fails_in_place_is_read_again_by_a_worker_whose_error_is_told() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space_by(&builder(Delivery::Inline)) else { return };
    let bytes = random(8 * PAGE, 4);
    let inner = InPlaceStore::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let map = map_random(&object);
    let held = space.held().0;
    inner.fails.store(true, Ordering::SeqCst);
    assert_eq!(load(map.as_ptr(), 5 * PAGE), None);
    let reads = inner.take_reads();
    assert!(reads[0].is_in_place && !reads[1].is_in_place, "{reads:?}");
    assert_eq!(reads[1].thread, "quire-store");
    assert_eq!(object.last_read_error().unwrap().errno(), Errno::IO);
    // The page's word stays charged, by the block.
    assert!(space.held().0 <= held + PAGE, "what could not be read is not charged");
    inner.fails.store(false, Ordering::SeqCst);
    map.populate(0..8 * PAGE).unwrap();
    for page in 0..8 {
        assert_eq!(load(map.as_ptr(), page * PAGE), Some(bytes[page * PAGE]));
    }
}

#[test]
fn the_last_page_of_a_file_ends_in_zeros_whatever_thread_reads_it() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let dir = Dir::new();
    let bytes = random(5 * PAGE + 100, 5);
    let path = dir.file("odd", &bytes);
    for delivery in [Delivery::Inline, Delivery::Handlers] {
        let Some(space) = space_by(&builder(delivery)) else { return };
        let object = space.open(&path).unwrap();
        let map = map_random(&object);
        for page in (0..6).rev() {
            assert_eq!(load(map.as_ptr(), page * PAGE + 99), Some(bytes[page * PAGE + 99]));
        }
        assert_eq!(load(map.as_ptr(), 5 * PAGE + 100), Some(0));
        drop_pages(&object, 0..5 * PAGE as u64, 5);
        // Shorter than it was, of which the object was not told: a page that is gone is a SIGBUS.
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert_eq!(load(map.as_ptr(), 2 * PAGE), None);
        std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
    }
}

#[test]
fn a_truncation_waits_for_the_read_in_place_that_it_overtakes() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space_by(&builder(Delivery::Inline)) else { return };
    let bytes = random(10 * PAGE, 6);
    let inner = InPlaceStore::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let map = map_random(&object);
    inner.inner.hold(Operation::Read);
    let at = map.as_ptr() as usize;
    let is_cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| load(at as *const u8, 9 * PAGE));
        assert!(inner.inner.wait_for(1, Duration::from_secs(10)));
        scope.spawn(|| {
            object.set_len(4 * PAGE as u64).unwrap();
            is_cut.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(A_WHILE);
        assert!(!is_cut.load(Ordering::SeqCst), "its page is being read");
        inner.inner.release_all();
        // The access comes before the cut, or after it.
        let seen = reader.join().unwrap();
        assert!([None, Some(bytes[9 * PAGE])].contains(&seen), "{seen:?}");
    });
    assert!(inner.take_reads()[0].is_in_place);
    assert_eq!(load(at as *const u8, 9 * PAGE), None);
    object.set_len(10 * PAGE as u64).unwrap();
    assert_eq!(load(at as *const u8, 9 * PAGE), Some(0));
}

#[test]
fn two_that_want_the_same_page_read_it_once() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space_by(&builder(Delivery::Inline)) else { return };
    let bytes = random(8 * PAGE, 7);
    let inner = InPlaceStore::new(bytes.clone());
    let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
    let map = map_random(&object);
    let at = map.as_ptr() as usize;
    inner.inner.hold(Operation::Read);
    std::thread::scope(|scope| {
        let readers = [0, 1, 2]
            .map(|byte| scope.spawn(move || (load(at as *const u8, 2 * PAGE + byte), byte)));
        assert!(inner.inner.wait_for(1, Duration::from_secs(10)));
        wait_until(|| space.counter("fault_parked") >= 2);
        inner.inner.release_all();
        for reader in readers {
            let (seen, byte) = reader.join().unwrap();
            assert_eq!(seen, Some(bytes[2 * PAGE + byte]));
        }
    });
    assert_eq!(inner.take_reads().len(), 1);
}
