//! An application that has used up the kernel's mappings (`vm.max_map_count`) goes on with objects.
//! It is one test, since it concerns the whole process, and all that it needs is made before.

#[path = "common/objects.rs"]
mod common;

use std::ptr::null_mut;

use common::{PAGE, Watchdog, load, random, space_by, store, survive_sigbus};
use quire::library::{AddressSpace, Delivery, MapOptions, Object};
use quire_simulated::Generator;
use quire_test_stores::VecStore;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

const BLOCK: usize = 2 << 20;
const MEMORY: usize = 64 << 20;

/// All mappings that the kernel gives.
struct Exhausted {
    start: *mut core::ffi::c_void,
    bytes: usize,
    more: Vec<*mut core::ffi::c_void>,
}

impl Exhausted {
    /// Splits one mapping page by page until that is refused, and maps pages until that is.
    fn new(more: Vec<*mut core::ffi::c_void>) -> Exhausted {
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let bytes = most.trim().parse::<usize>().unwrap() * 2 * PAGE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let map = |bytes, prot| {
            // SAFETY: a new mapping.
            unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, prot, flags) }
        };
        let start = map(bytes, ProtFlags::empty()).unwrap();
        let mut all = Exhausted { start, bytes, more };
        let is_split = |at: usize| {
            // SAFETY: a page of the mapping, which nothing else uses.
            unsafe { rustix::mm::mprotect(start.byte_add(at), PAGE, MprotectFlags::READ) }.is_ok()
        };
        assert!(!(0..bytes).step_by(2 * PAGE).all(is_split), "it never ends");
        // With other rights than what lies beside it, so that it is a mapping of its own.
        let mut prots = [ProtFlags::READ, ProtFlags::WRITE].into_iter().cycle();
        while all.more.len() < all.more.capacity()
            && let Ok(place) = map(PAGE, prots.next().unwrap())
        {
            all.more.push(place);
        }
        assert!(map(PAGE, ProtFlags::EXEC).is_err(), "there are more");
        all
    }
}

impl Drop for Exhausted {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe {
            let _ = rustix::mm::munmap(self.start, self.bytes);
            for &place in &self.more {
                let _ = rustix::mm::munmap(place, PAGE);
            }
        }
    }
}

/// What went wrong first, told where there is memory to tell it.
#[derive(PartialEq, Eq, Debug)]
enum Wrong {
    Nothing,
    Refused { at: usize },
    Bytes { at: usize },
}

fn read_all(start: *const u8, bytes: &[u8]) -> Wrong {
    for at in (0..bytes.len()).step_by(PAGE) {
        match load(start, at) {
            None => return Wrong::Refused { at },
            Some(byte) if byte != bytes[at] => return Wrong::Bytes { at },
            Some(_) => {}
        }
    }
    Wrong::Nothing
}

/// Writes to blocks that lie between others.
fn write_some(written: *const u8, bytes: &mut [u8]) -> Wrong {
    for at in [4, 2, 5].map(|block| block * BLOCK + PAGE) {
        bytes[at] ^= 0xff;
        if !store(written, at, bytes[at]) {
            return Wrong::Refused { at };
        }
    }
    Wrong::Nothing
}

/// Everything that an application does with the mappings that it has.
fn go_on(read: *const u8, written: *const u8, bytes: &mut [u8]) -> Wrong {
    let mut generator = Generator::new(5);
    for round in 0..4 {
        let wrong = read_all(read, bytes);
        if wrong != Wrong::Nothing {
            return wrong;
        }
        for _ in 0..2000 {
            let at = generator.below(bytes.len() / PAGE) * PAGE;
            let value = generator.next_u64() as u8;
            if !store(written, at, value) {
                return Wrong::Refused { at };
            }
            bytes[at] = value;
            let at = generator.below(bytes.len() / PAGE) * PAGE;
            match load(if round % 2 == 0 { read } else { written }, at) {
                None => return Wrong::Refused { at },
                Some(byte) if byte != bytes[at] => return Wrong::Bytes { at },
                Some(_) => {}
            }
        }
    }
    read_all(written, bytes)
}

#[test]
fn without_a_mapping_more_accesses_go_on_and_address_spaces_end() {
    let _watchdog = Watchdog::new(200);
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(MEMORY).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let mut bytes = random(60 * BLOCK, 1);
        let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
        let options = MapOptions::new();
        // SAFETY: what is written is read one byte at a time, on this thread.
        let maps = unsafe { (options.map(&object).unwrap(), options.map_mut(&object).unwrap()) };
        let (read, written) = (maps.0.as_ptr(), maps.1.as_ptr());
        // What was read first lies in order, and the kernel would make one mapping of it.
        assert_eq!(read_all(read, &bytes[..8 * BLOCK]), Wrong::Nothing);
        let exhausted = Exhausted::new(Vec::with_capacity(1 << 10));
        let wrong = write_some(written, &mut bytes);
        drop(exhausted);
        assert_eq!(wrong, Wrong::Nothing, "{delivery:?}");
        assert_eq!(read_all(read, &bytes), Wrong::Nothing);
        assert_eq!(read_all(written, &bytes), Wrong::Nothing);
        assert_eq!(read_all(read, &bytes), Wrong::Nothing);
        // From now on there is a buffer for flushes.
        maps.1.flush().unwrap();
        let exhausted = Exhausted::new(Vec::with_capacity(1 << 10));
        let wrong = go_on(read, written, &mut bytes);
        let flushed = maps.1.flush();
        let dropped = object.drop_cached(0..bytes.len() as u64);
        let again = read_all(read, &bytes);
        drop(maps);
        // What lay there is gone, and can be mapped as something else.
        drop(exhausted);
        assert_eq!((wrong, again), (Wrong::Nothing, Wrong::Nothing), "{delivery:?}");
        flushed.unwrap();
        assert!(dropped > 0);
        // SAFETY: nothing writes the object.
        let mut copy = unsafe { options.map_copy(&object) }.unwrap();
        copy[PAGE] ^= 0xff;
        assert!(copy[..PAGE] == bytes[..PAGE] && copy[PAGE] == !bytes[PAGE]);
        let mut kept = [0];
        object.read_at(PAGE as u64, &mut kept).unwrap();
        assert_eq!(kept[0], bytes[PAGE], "the object does not see it");
        drop((copy, object));
        let exhausted = Exhausted::new(Vec::with_capacity(1 << 10));
        drop(space);
        drop(exhausted);
    }
}
