//! Speculative faults on objects, by both deliveries: a change under one sends it the classic way,
//! and an unmap after the last check waits for the mapping call.

#[path = "common/objects.rs"]
mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use common::{PAGE, random, space_by, survive_sigbus, survive_sigsegv, wait_until};
use quire::failpoint::{self, Failpoint};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, Object, Pattern};
use quire_test_stores::VecStore;

const DOUBTS: [&str; 5] =
    ["spf_vma_changed", "spf_vma_noanon", "spf_vma_notsup", "spf_vma_access", "spf_pmd_changed"];

fn counted<const N: usize>(space: &AddressSpace, names: [&str; N]) -> [u64; N] {
    names.map(|name| space.counter(name))
}

/// The process has each failpoint once.
static TURN: Mutex<()> = Mutex::new(());

/// Has `act` done for the first fault that passes `place` while it is armed.
fn once(place: Failpoint, is_armed: &'static AtomicBool, act: impl Fn() + Send + Sync + 'static) {
    failpoint::set(
        place,
        Some(Box::new(move |_| {
            if is_armed.swap(false, Ordering::SeqCst) {
                act();
            }
        })),
    );
}

fn with_each_delivery(test: impl Fn(&AddressSpace, Delivery)) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(8 << 20).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        test(&space, delivery);
        for place in [Failpoint::Arrived, Failpoint::Prepared, Failpoint::Checked] {
            failpoint::set(place, None);
        }
    }
}

#[test]
fn a_vma_that_changes_under_a_fault_sends_it_the_classic_way() {
    with_each_delivery(|space, _| {
        static IS_ARMED: AtomicBool = AtomicBool::new(false);
        let bytes = random(32 * PAGE, 5);
        let object =
            Object::with_store(space, Arc::new(VecStore::new(bytes.clone())), None).unwrap();
        let options = MapOptions::new().fault_around(FaultAround::Off);
        // SAFETY: the store is the test's own.
        let map = Arc::new(unsafe { options.map(&object) }.unwrap());
        assert_eq!(map[0], bytes[0]);
        assert_eq!(counted(space, DOUBTS), [0, 1, 0, 0, 0], "the block's words are charged");
        let before = space.counter("fault_classic");
        let other = map.clone();
        once(Failpoint::Prepared, &IS_ARMED, move || {
            // Splits its VMA.
            other.advise(Pattern::Random, 16 * PAGE..17 * PAGE).unwrap();
        });
        IS_ARMED.store(true, Ordering::SeqCst);
        assert_eq!(map[8 * PAGE], bytes[8 * PAGE]);
        assert!(!IS_ARMED.load(Ordering::SeqCst), "no fault came by");
        failpoint::set(Failpoint::Prepared, None);
        assert_eq!(map[9 * PAGE], bytes[9 * PAGE]);
        assert_eq!(counted(space, DOUBTS), [1, 1, 0, 0, 0]);
        assert!(space.counter("fault_classic") > before);
        // A handler counts a fault once it has answered it.
        wait_until(|| space.counter("speculative_pgfault") > 0);
    });
}

/// A write whose mapping becomes read-only before the fault finds it: it waits for that change's end, and
/// is refused then as if it had come later.
#[test]
fn rights_that_go_under_a_fault_send_it_the_classic_way() {
    with_each_delivery(|space, _| {
        static IS_ARMED: AtomicBool = AtomicBool::new(false);
        survive_sigsegv();
        let bytes = random(8 * PAGE, 6);
        let store = Arc::new(VecStore::new(bytes.clone()));
        let object = Object::with_store(space, store, None).unwrap();
        // SAFETY: the store is the test's own.
        let map =
            unsafe { MapOptions::new().fault_around(FaultAround::Off).map_mut(&object) }.unwrap();
        assert_eq!(map[0], bytes[0]);
        let start = map.as_ptr();
        let (writable, read_only) = (Mutex::new(Some(map)), Arc::new(Mutex::new(None)));
        let changed = read_only.clone();
        once(Failpoint::Arrived, &IS_ARMED, move || {
            let map = writable.lock().unwrap().take().unwrap();
            *changed.lock().unwrap() = Some(map.make_read_only().ok().unwrap());
        });
        IS_ARMED.store(true, Ordering::SeqCst);
        assert!(!common::store(start, 3 * PAGE, !bytes[3 * PAGE]), "it may not write any more");
        assert_eq!(counted(space, DOUBTS), [0, 1, 0, 1, 0]);
        assert_eq!(read_only.lock().unwrap().as_ref().unwrap()[..], bytes[..]);
    });
}

/// Only a fault that shares the space's lock can be certain that nothing is mapped. Delivered inline such an
/// address is no object's, and the signal the program's own.
#[test]
fn what_is_unmapped_under_a_fault_sends_it_the_classic_way() {
    with_each_delivery(|space, delivery| {
        static IS_ARMED: AtomicBool = AtomicBool::new(false);
        survive_sigsegv();
        let object =
            Object::with_store(space, Arc::new(VecStore::new(vec![7; 8 * PAGE])), None).unwrap();
        // SAFETY: the store is the test's own.
        let map = unsafe { MapOptions::new().fault_around(FaultAround::Off).map(&object) }.unwrap();
        assert_eq!(map[0], 7);
        let (start, map) = (map.as_ptr(), Mutex::new(Some(map)));
        once(Failpoint::Arrived, &IS_ARMED, move || drop(map.lock().unwrap().take()));
        IS_ARMED.store(true, Ordering::SeqCst);
        assert_eq!(common::load(start, 3 * PAGE), None, "nothing is mapped there");
        let doubts = u64::from(delivery == Delivery::Handlers);
        assert_eq!(counted(space, DOUBTS), [0, 1, doubts, 0, 0]);
    });
}

/// The mapping goes between the last check and the mapping call, and another comes in its place:
/// it never shows the old one's page.
#[test]
fn what_is_unmapped_after_the_last_check_is_never_seen_in_a_new_mapping() {
    with_each_delivery(|space, _| {
        static IS_ARMED: AtomicBool = AtomicBool::new(false);
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        let make = |value| {
            let store = Arc::new(VecStore::new(vec![value; 4 * PAGE]));
            Object::with_store(space, store, None).unwrap()
        };
        let (old, new) = (make(1), make(2));
        survive_sigsegv();
        for _ in 0..20 {
            // SAFETY: the stores are the test's own.
            let map = unsafe { MapOptions::new().map(&old) }.unwrap();
            let start = map.as_ptr() as usize;
            let map = Mutex::new(Some(map));
            once(Failpoint::Checked, &IS_ARMED, move || {
                let map = map.lock().unwrap().take();
                // The window's lock is held here: the unmapping waits for it.
                SEEN.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || drop(map));
                std::thread::sleep(std::time::Duration::from_millis(2));
            });
            IS_ARMED.store(true, Ordering::SeqCst);
            // What the access finds is the old byte, or nothing any more.
            let found = common::load(start as *const u8, PAGE);
            assert!(matches!(found, None | Some(1 | 2)), "{found:?}");
            // SAFETY: as above.
            let next = unsafe { MapOptions::new().map(&new) }.unwrap();
            assert!(next.iter().all(|&byte| byte == 2), "a page of the old mapping");
        }
        assert!(SEEN.load(Ordering::SeqCst) >= 20);
    });
}
