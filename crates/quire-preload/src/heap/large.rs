//! Large blocks: each a mapping of its own.
//!
//! mimalloc would take them from its arenas as well, but there a block can only grow by a copy. Where
//! memory is less than the block needs, a copy reads all of it back from swap and holds it twice. As a
//! mapping it grows in place, or moves by its page table, and freed memory goes back at once. The
//! limit is glibc's largest mmap threshold (32 MiB): below it a program may expect a freed block to be
//! reused without new faults.
//!
//! Owns a table with a word for every 2 MiB of the arena: the length of the large block that starts
//! there. A large block starts at a multiple of 2 MiB (which lets whole page tables be moved at a
//! time), so one look tells what a pointer is; hardly any block of mimalloc's starts there.
//!
//! Locks: none. The thread that allocates a block writes its entry after it was mapped; the thread that
//! frees it clears the entry *before* it is unmapped, for from then on the address can be another
//! thread's.

use core::ops::Range;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use quire::process::Process;

use crate::sys::{self, PAGE};

/// The smallest size that is mapped by itself.
pub const LARGE_MIN: usize = 32 << 20;
/// The size from which on a block that *grows* by realloc is mapped by itself: a block that has grown
/// mostly grows again, and does so without a copy from then on.
pub const GROWING_MIN: usize = 4 << 20;
/// What the start of a large block is a multiple of.
const UNIT: usize = 2 << 20;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// The table; null until started.
static TABLE: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
/// The arena's first address rounded down to a unit, and the number of entries.
static TABLE_BASE: AtomicUsize = AtomicUsize::new(0);
static TABLE_ENTRIES: AtomicUsize = AtomicUsize::new(0);
/// Large blocks, and their bytes, for mallinfo.
static BLOCKS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// `struct stay` of heap.c.
#[derive(Clone, Copy)]
#[repr(C)]
struct Stay {
    slot: *mut AtomicU32,
    was_inside: u32,
}

unsafe extern "C" {
    safe fn quire_heap_gate_enter() -> Stay;
    safe fn quire_heap_gate_leave(stay: Stay);
}

/// The calling thread is inside the heap while this lives: no fork sees a block half mapped.
struct Inside(Stay);

impl Inside {
    fn enter() -> Inside {
        Inside(quire_heap_gate_enter())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        quire_heap_gate_leave(self.0);
    }
}

/// Makes the table for an arena; false where there is no room for it.
pub fn start(arena: &Range<usize>) -> bool {
    let base = arena.start & !(UNIT - 1);
    let entries = (arena.end - base).div_ceil(UNIT);
    let Some(table) = sys::map_unmanaged(entries * size_of::<AtomicU64>()) else {
        return false;
    };
    // Relaxed: the process's start publishes all of it.
    TABLE_BASE.store(base, Ordering::Relaxed);
    TABLE_ENTRIES.store(entries, Ordering::Relaxed);
    TABLE.store(table as *mut AtomicU64, Ordering::Relaxed);
    true
}

/// The entry for blocks that start at `addr`, an address of the arena and a multiple of a unit.
fn entry(addr: usize) -> &'static AtomicU64 {
    let index = (addr - TABLE_BASE.load(Ordering::Relaxed)) / UNIT;
    assert!(index < TABLE_ENTRIES.load(Ordering::Relaxed));
    // SAFETY: the table has an entry for every unit of the arena, zeroed at first, never unmapped.
    unsafe { &*TABLE.load(Ordering::Relaxed).add(index) }
}

/// The bytes of the large block at `addr`, an address of the arena; None for any other block.
#[inline]
pub fn bytes_of(addr: usize) -> Option<usize> {
    if !addr.is_multiple_of(UNIT) {
        return None;
    }
    // Relaxed: a thread that may name the block got its address from the one that made the entry.
    match entry(addr).load(Ordering::Relaxed) {
        0 => None,
        bytes => Some(bytes as usize),
    }
}

/// Maps `bytes` at a multiple of `alignment`; None where there is no room.
fn map_aligned(
    process: &'static Process,
    bytes: usize,
    alignment: usize,
    prot: i32,
) -> Option<usize> {
    let addr = process.mmap(0, bytes, prot, PRIVATE).ok()?;
    if addr.is_multiple_of(alignment) {
        return Some(addr);
    }
    process.munmap(addr, bytes).ok()?;
    let room = bytes.checked_add(alignment)?;
    let start = process.mmap(0, room, prot, PRIVATE).ok()?;
    let addr = start.next_multiple_of(alignment);
    // Trimming cannot fail halfway: the engine's munmap of its own whole pages only fails where
    // its tables are full, and then what is left over stays mapped, untouched and harmless.
    if addr > start {
        let _ = process.munmap(start, addr - start);
    }
    if start + room > addr + bytes {
        let _ = process.munmap(addr + bytes, start + room - addr - bytes);
    }
    Some(addr)
}

/// The whole pages that `size` bytes take; None where no block can have so many.
fn whole_pages(size: usize) -> Option<usize> {
    (size <= isize::MAX as usize - PAGE).then(|| size.max(1).next_multiple_of(PAGE))
}

/// A zeroed block of at least `size` bytes at a multiple of `alignment` (a power of two); None where
/// there is no memory for it.
pub fn alloc(process: &'static Process, size: usize, alignment: usize) -> Option<usize> {
    let bytes = whole_pages(size)?;
    let _inside = Inside::enter();
    let addr = map_aligned(process, bytes, alignment.max(UNIT), READ_WRITE)?;
    entry(addr).store(bytes as u64, Ordering::Relaxed);
    BLOCKS.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes, Ordering::Relaxed);
    Some(addr)
}

/// Gives back the large block of `bytes` at `addr`.
pub fn free(process: &'static Process, addr: usize, bytes: usize) {
    let _inside = Inside::enter();
    entry(addr).store(0, Ordering::Relaxed);
    BLOCKS.fetch_sub(1, Ordering::Relaxed);
    BYTES.fetch_sub(bytes, Ordering::Relaxed);
    // free has no way to fail; the engine refuses only where its tables are full, and then the
    // address space is lost.
    let _ = process.munmap(addr, bytes);
}

/// Makes the block of `old_bytes` at `addr` one of `size` bytes, with its content, and returns
/// where it then is. None where there is no memory for it; the block is as it was then.
pub fn resize(
    process: &'static Process,
    addr: usize,
    old_bytes: usize,
    size: usize,
) -> Option<usize> {
    let bytes = whole_pages(size)?;
    let _inside = Inside::enter();
    let there = if bytes <= old_bytes {
        if bytes < old_bytes {
            process.munmap(addr + bytes, old_bytes - bytes).ok()?;
        }
        addr
    } else if process.mremap(addr, old_bytes, bytes, 0, 0).is_ok() {
        addr
    } else {
        grow_elsewhere(process, addr, old_bytes, bytes)?
    };
    entry(there).store(bytes as u64, Ordering::Relaxed);
    BYTES.fetch_add(bytes.wrapping_sub(old_bytes), Ordering::Relaxed);
    Some(there)
}

/// Moves the block of `old_bytes` at `addr` to where `bytes` are free. Its old entry is cleared; the
/// caller writes the new one.
fn grow_elsewhere(
    process: &'static Process,
    addr: usize,
    old_bytes: usize,
    bytes: usize,
) -> Option<usize> {
    let target = map_aligned(process, bytes, UNIT, libc::PROT_NONE)?;
    entry(addr).store(0, Ordering::Relaxed);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    if process.mremap(addr, old_bytes, bytes, flags, target).is_ok() {
        return Some(target);
    }
    // The program has cut the block up by mprotect or madvise, and only a single mapping can be
    // moved. So it is copied.
    let replaced = process.mmap_fixed(target, bytes, READ_WRITE, PRIVATE | libc::MAP_FIXED);
    if replaced.is_err() {
        entry(addr).store(old_bytes as u64, Ordering::Relaxed);
        let _ = process.munmap(target, bytes);
        return None;
    }
    // SAFETY: the block of the caller's, and one just mapped that is larger; they are apart. The
    // program may not give to realloc what it has made unreadable.
    unsafe { core::ptr::copy_nonoverlapping(addr as *const u8, target as *mut u8, old_bytes) };
    let _ = process.munmap(addr, old_bytes);
    Some(target)
}

/// The number of large blocks, and their bytes.
pub fn totals() -> (usize, usize) {
    (BLOCKS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed))
}
