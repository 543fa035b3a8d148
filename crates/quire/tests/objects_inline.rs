//! Inline delivery by itself: how much of its thread's stack a fault takes, and what a fork's child
//! has.

#[path = "common/objects.rs"]
mod common;

use core::arch::asm;

use common::{Dir, PAGE, Watchdog, load, random, space_by, store, survive_sigbus};
use quire::library::{AddressSpace, Delivery, MapOptions, Object};
use quire_simulated::Generator;
use quire_test_stores::VecStore;

/// Bytes below the stack pointer that are looked at.
const PAINTED: usize = 128 << 10;
/// What a compiler, and the painting itself, may use below the stack pointer.
const NEAR: usize = 1 << 10;
/// What a fault may take: 8 KiB, and the registers, of which the largest processors have 11 KiB.
const STACK_MAX: usize = (8 + 11) << 10;
const PAINT: u8 = 0xa5;

/// Bytes of the stack that were written while `access` was made.
#[inline(never)]
fn stack_of(access: impl FnOnce()) -> usize {
    let top: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) top) };
    let low = top - PAINTED;
    // SAFETY: the thread's stack is larger, and nothing is there yet.
    unsafe {
        asm!("rep stosb", inout("rdi") low => _, inout("rcx") PAINTED - NEAR => _, in("al") PAINT);
    }
    access();
    // SAFETY: painted above.
    let is_painted = |at: &usize| unsafe { (*at as *const u8).read_volatile() == PAINT };
    PAINTED - (low..top).take_while(is_painted).count()
}

/// All ways of a fault on a copy: first reads and writes, pages that are written again, unpacked,
/// and read from the swap file, with memory short throughout.
#[test]
fn a_fault_takes_little_of_its_threads_stack() {
    let _watchdog = Watchdog::new(100);
    survive_sigbus();
    let dir = Dir::new();
    let builder = AddressSpace::builder().memory(2 << 20).swap(&dir.0, 64 << 20);
    let Some(space) = space_by(&builder.delivery(Delivery::Inline)) else { return };
    let mut bytes = random(8 << 20, 1);
    // Every other page packs well.
    for page in bytes.chunks_mut(PAGE).step_by(2) {
        page[64..].fill(0);
    }
    let object = Object::with_store(&space, VecStore::new(bytes), None).unwrap();
    // SAFETY: nothing writes the object.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    // SAFETY: nobody else reads what is written.
    let shared = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let measure = |start: usize| {
        let start = start as *const u8;
        let mut generator = Generator::new(3);
        let mut most = 0;
        for round in 0..3000 {
            let at = generator.below(map.len());
            most = most.max(stack_of(|| {
                if round % 2 == 0 {
                    assert!(load(start, at).is_some());
                } else {
                    assert!(store(start, at, round as u8));
                }
            }));
        }
        most
    };
    // Several at once: what each needs is made while it faults.
    let on_threads = |start: *const u8| {
        let start = start as usize;
        std::thread::scope(|scope| {
            let spawn = || {
                let thread = std::thread::Builder::new().stack_size(512 << 10);
                thread.spawn_scoped(scope, || measure(start)).unwrap()
            };
            let threads = [spawn(), spawn(), spawn()];
            threads.map(|thread| thread.join().unwrap()).into_iter().max().unwrap()
        })
    };
    // The background thread may be quick enough that no fault has to reclaim.
    let is_short = || space.counter("pswpin") > 0 && space.counter("pgscan_direct") > 0;
    let (mut of_copy, mut of_object) = (0, 0);
    for _ in 0..50 {
        of_copy = of_copy.max(on_threads(map.as_ptr()));
        of_object = of_object.max(on_threads(shared.as_ptr()));
        if is_short() {
            break;
        }
    }
    assert!(is_short(), "faults reclaim: {:?}", space.counters());
    println!("bytes of the stack, with the kernel's: {of_copy} for a copy, {of_object} else");
    assert!(of_copy <= STACK_MAX && of_object <= STACK_MAX, "{of_copy} and {of_object} bytes");
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

/// What a child of a fork does, which has one thread: opens its own, as a rule at the addresses of
/// its parent's, and reads through both kinds of mapping.
fn live_as_a_child(bytes: &[u8]) -> bool {
    let builder = AddressSpace::builder().memory(2 << 20).delivery(Delivery::Inline);
    let Ok(space) = builder.build() else { return false };
    let Ok(object) = Object::with_store(&space, VecStore::new(bytes.to_vec()), None) else {
        return false;
    };
    let options = MapOptions::new();
    // SAFETY: nothing writes the object.
    let made = unsafe { (options.map(&object), options.map_copy(&object)) };
    let (Ok(shared), Ok(mut copy)) = made else { return false };
    copy[5] ^= 0xff;
    shared[..] == *bytes && copy[6..] == bytes[6..] && copy[5] == !bytes[5]
}

#[test]
fn a_forks_child_serves_its_own_faults_in_an_address_space_of_its_own() {
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let builder = AddressSpace::builder().memory(2 << 20).delivery(Delivery::Inline);
    let Some(space) = space_by(&builder) else { return };
    let bytes = random(4 << 20, 9);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    // SAFETY: nothing writes the object.
    let map = unsafe { MapOptions::new().map_copy(&object) }.unwrap();
    assert!(map[..] == bytes[..]);
    // SAFETY: the child makes threads and memory of its own and uses nothing of the parent's that a
    // thread could have held: libc sees to its allocator.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        let is_well = live_as_a_child(&bytes);
        // SAFETY: ends the child without the test's own clean-up.
        unsafe { _exit(i32::from(!is_well)) };
    }
    let mut status = -1;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's status");
    assert!(map[..] == bytes[..], "the parent's goes on");
}
