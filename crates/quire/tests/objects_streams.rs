//! What is read ahead of which stream, by the counts of a store: streams up and down, page by page and
//! by a stride, several at once, and accesses that are no stream.

#[path = "common/objects.rs"]
mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{PAGE, Watchdog, load, space, store, wait_until};
use quire::library::{AddressSpace, MapOptions, Mapping, Object, Pattern};
use quire::store::{Operation, Store, StoreError};
use quire_simulated::Generator;
use quire_test_stores::{DelayStore, VecStore};

/// Notes what is read of it.
struct Reads {
    inner: VecStore,
    calls: Mutex<usize>,
    pages: Mutex<BTreeMap<usize, usize>>,
}

impl Reads {
    /// Pages that were read, each as often as it was.
    fn pages(&self) -> Vec<usize> {
        let pages = self.pages.lock().unwrap();
        pages.iter().flat_map(|(&page, &times)| std::iter::repeat_n(page, times)).collect()
    }

    fn has(&self, page: usize) -> bool {
        self.pages.lock().unwrap().contains_key(&page)
    }
}

impl Store for Reads {
    fn name(&self) -> &str {
        "a store that counts"
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.inner.len()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.inner.read(offset, into)?;
        *self.calls.lock().unwrap() += 1;
        let first = offset as usize / PAGE;
        let mut pages = self.pages.lock().unwrap();
        (first..first + into.len() / PAGE).for_each(|page| *pages.entry(page).or_default() += 1);
        Ok(())
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

/// An object of so many pages, each with its number's low byte in it, and a mapping.
fn object(space: &AddressSpace, pages: usize) -> (Arc<Reads>, Mapping) {
    let mut bytes = vec![0; pages * PAGE];
    (0..pages).for_each(|page| bytes[page * PAGE] = page as u8);
    let reads = Arc::new(Reads {
        inner: VecStore::new(bytes),
        calls: Mutex::new(0),
        pages: Mutex::new(BTreeMap::new()),
    });
    let object = Object::with_store(space, Arc::clone(&reads), Some(0)).unwrap();
    // SAFETY: read by single bytes only.
    let map = unsafe { MapOptions::new().map(&object) }.unwrap();
    (reads, map)
}

fn touch(map: &Mapping, page: usize) {
    assert_eq!(load(map.as_ptr(), page * PAGE), Some(page as u8), "page {page}");
}

#[test]
fn scans_in_either_direction_are_read_once_in_large_pieces_and_ahead() {
    let _watchdog = Watchdog::new(60);
    for is_down in [false, true] {
        let Some(space) = space(64 << 20) else { return };
        let count = 4096;
        let (reads, map) = object(&space, count);
        let page = |step: usize| if is_down { count - 1 - step } else { step };
        (0..count / 2).for_each(|step| touch(&map, page(step)));
        // Before any call asks.
        wait_until(|| reads.has(page(count / 2)));
        (count / 2..count).for_each(|step| touch(&map, page(step)));
        assert_eq!(reads.pages(), Vec::from_iter(0..count), "each page once, down: {is_down}");
        let calls = *reads.calls.lock().unwrap();
        assert!(calls <= count / 64, "{calls} reads, down: {is_down}");
        // A fault that has to wait for the store itself is the exception.
        let majors = space.counter("pgmajfault");
        assert!(majors <= 16, "{majors} major faults, down: {is_down}");
    }
}

#[test]
fn of_a_stride_the_pages_that_it_will_touch_are_read_ahead_and_no_others() {
    let _watchdog = Watchdog::new(60);
    for (stride, is_down) in [(3, false), (16, false), (3, true), (16, true)] {
        let Some(space) = space(24 << 20) else { return };
        let steps = 300;
        let (reads, map) = object(&space, 8000);
        let page = |step: usize| if is_down { 7999 - step * stride } else { 5 + step * stride };
        (0..8).for_each(|step| touch(&map, page(step)));
        wait_until(|| reads.has(page(8)) && reads.has(page(9)));
        (8..steps).for_each(|step| touch(&map, page(step)));
        let what = format!("stride {stride}, down: {is_down}");
        // What is ahead of the last fault is read in no order.
        wait_until(|| {
            let read = reads.pages();
            let mut expected = Vec::from_iter((0..read.len()).map(page));
            expected.sort_unstable();
            read == expected
        });
        let read = reads.pages();
        // The window grew, and was used: what is ahead of the last fault is all that is more.
        assert!(read.len() <= steps + 32, "{} pages, {what}", read.len());
        let majors = space.counter("pgmajfault");
        assert!(majors <= 8, "{majors} major faults, {what}");
    }
}

#[test]
fn streams_in_turn_are_each_read_ahead() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(64 << 20) else { return };
    let (reads, map) = object(&space, 20_000);
    // Two by a stride, one of them down; a scan.
    let streams =
        [|step: usize| step * 3, |step: usize| 9000 - step * 16, |step: usize| 10_000 + step];
    for step in 0..250 {
        streams.iter().for_each(|page| touch(&map, page(step)));
    }
    for page in streams {
        wait_until(|| reads.has(page(250)) && reads.has(page(251)));
    }
    let read = reads.pages();
    let of_strides = read.iter().filter(|&&page| page < 10_000).count();
    assert!(of_strides <= 2 * (250 + 32), "{of_strides} pages");
    let strays = read.iter().filter(|&&page| page < 1500 && page % 3 != 0).count();
    assert_eq!(strays, 0, "pages between the strides");
    let majors = space.counter("pgmajfault");
    assert!(majors <= 24, "{majors} major faults");
}

#[test]
fn a_stride_that_ends_is_read_no_further() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(64 << 20) else { return };
    let (reads, map) = object(&space, 20_000);
    (0..20).for_each(|step| touch(&map, step * 7));
    let read_of_it = || reads.pages().iter().filter(|&&page| page < 5000).count();
    wait_until(|| read_of_it() == 20 + 32);
    // Elsewhere, and no stream.
    for page in [9000, 9001 + 512, 12_007, 17_111, 6001] {
        touch(&map, page);
    }
    assert_eq!(read_of_it(), 20 + 32);
    assert_eq!(reads.pages().len(), 20 + 32 + 5);
}

#[test]
fn random_accesses_read_what_they_touch() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(64 << 20) else { return };
    let (reads, map) = object(&space, 60_000);
    let mut generator = Generator::new(11);
    let mut touched = std::collections::BTreeSet::new();
    for _ in 0..600 {
        let page = generator.below(60_000);
        touch(&map, page);
        touched.insert(page);
    }
    let read = reads.pages();
    // Two that are neighbours by chance may look like a scan's beginning.
    assert!(read.len() <= touched.len() + 8, "{} pages for {}", read.len(), touched.len());
}

#[test]
fn around_a_random_access_is_read_what_has_room_with_all_of_the_object() {
    let _watchdog = Watchdog::new(60);
    let Some(space) = space(64 << 20) else { return };
    let (reads, map) = object(&space, 2000);
    for page in [1000, 77, 1999, 500] {
        touch(&map, page);
    }
    let around = |page: usize| page / 32 * 32..(page / 32 * 32 + 32).min(2000);
    let expected = [77, 500, 1000, 1999].into_iter().flat_map(around);
    assert_eq!(reads.pages(), Vec::from_iter(expected));
    map.advise(Pattern::Random, 0..2000 * PAGE).unwrap();
    touch(&map, 1500);
    assert_eq!(reads.pages().len(), 3 * 32 + 16 + 1);
}

#[test]
fn two_folios_of_a_stream_are_under_way_while_it_waits() {
    let _watchdog = Watchdog::new(60);
    const PAGES: usize = 8192;
    const FOLIO: usize = 512;
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / PAGE) as u8).collect();
    for (is_down, is_again) in [(false, false), (true, false), (false, true), (true, true)] {
        // Of several handlers one that the kernel keeps from running may note a folio late.
        let one = AddressSpace::builder().memory(64 << 20).handlers(1);
        let Some(space) = common::space_by(&one) else { return };
        let inner = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map(&object) }.unwrap();
        let start = map.as_ptr() as usize;
        let page = move |step: usize| if is_down { PAGES - 1 - step } else { step };
        let check = move |step: usize| {
            let page = page(step);
            assert_eq!(load(start as *const u8, page * PAGE), Some(page as u8), "page {page}");
        };
        if is_again {
            // What a fault asked for the last time is cached still.
            for at in (PAGES / 2..PAGES).step_by(FOLIO).map(|step| (page(step) * PAGE) as u64) {
                object.prefetch(at..at + PAGE as u64);
            }
            wait_until(|| object.cached().0 == PAGES / 2 / FOLIO * PAGE);
        }
        (0..PAGES / 2).for_each(check);
        inner.hold(Operation::Read);
        std::thread::scope(|scope| {
            let rest = scope.spawn(move || (PAGES / 2..PAGES).for_each(check));
            // What it waits for, and what comes behind that.
            let are_two = inner.wait_for(2, Duration::from_secs(10));
            inner.release_all();
            rest.join().unwrap();
            assert!(are_two, "down: {is_down}, again: {is_again}");
        });
    }
}

#[test]
fn a_stream_of_writes_over_what_is_mapped_takes_pages_along_in_either_direction() {
    let _watchdog = Watchdog::new(60);
    let count = 2048;
    for is_down in [false, true] {
        let Some(space) = space(64 << 20) else { return };
        let memory = Arc::new(VecStore::new(vec![0; count * PAGE]));
        let object = Object::with_store(&space, Arc::clone(&memory), None).unwrap();
        // SAFETY: accessed by single bytes only.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        map.populate(0..count * PAGE).unwrap();
        let faults = space.counter("pgfault");
        // All but the ends: nothing beyond a mapping's end is touched by what is taken along.
        for step in 100..count {
            let page = if is_down { count - 1 - step } else { step };
            assert!(store(map.as_ptr(), page * PAGE, page as u8 | 1), "page {page}");
        }
        let faults = space.counter("pgfault") - faults;
        assert!(faults < 30, "{faults} faults for {} pages, down: {is_down}", count - 100);
        object.sync().unwrap();
        let bytes = memory.bytes();
        for page in 0..count {
            let is_written = if is_down { page < count - 100 } else { page >= 100 };
            let wanted = if is_written { page as u8 | 1 } else { 0 };
            assert_eq!(bytes[page * PAGE], wanted, "page {page}, down: {is_down}");
        }
        assert_eq!(object.cached().1, 0, "what was taken along is clean as well");
        assert!(store(map.as_ptr(), 50 * PAGE, 3));
        assert!(object.cached().1 >= PAGE, "and faults at the next write");
    }
}
