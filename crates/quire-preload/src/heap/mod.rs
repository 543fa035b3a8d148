//! malloc, free and their kin.
//!
//! Three sources of blocks, told apart by address:
//! - mimalloc on arena memory ([`heap.c`](../heap/heap.c)), the usual one;
//! - large blocks ([`large`]), mapped one by one;
//! - the next library ([`crate::next`]): in an unmanaged process everything, in a managed one only
//!   pointers that were not made here (ld.so's first ones, or another allocator's).
//!
//! Owns the C functions' rules: sizes, alignments, errno, as glibc has them.

pub mod gate;
mod large;

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use quire::process::{self, Process};
use rustix::io::Errno;

use crate::sys::PAGE;
use crate::{next, set_errno, start};

/// What glibc aligns every block to; mimalloc gives 8 for blocks of up to 8 bytes.
const ALIGNMENT_MIN: usize = 16;
/// The largest alignment that mimalloc can give inside its pages.
const ALIGNMENT_MAX: usize = 64 << 10;

/// `struct heap_calls` of heap.c.
#[repr(C)]
struct HeapCalls {
    map: extern "C" fn(usize, c_int, *mut *mut c_void) -> c_int,
    unmap: extern "C" fn(usize, usize) -> c_int,
    protect: extern "C" fn(usize, usize, c_int) -> c_int,
    advise: extern "C" fn(usize, usize, c_int) -> c_int,
    gate_register: extern "C" fn() -> *mut AtomicU32,
    gate_release: extern "C" fn(*mut AtomicU32),
    gate_wait: extern "C" fn(*mut AtomicU32),
}

unsafe extern "C" {
    fn quire_heap_start(calls: *const HeapCalls);
    fn quire_heap_malloc(size: usize) -> *mut c_void;
    fn quire_heap_calloc(count: usize, size: usize) -> *mut c_void;
    fn quire_heap_realloc(pointer: *mut c_void, size: usize) -> *mut c_void;
    fn quire_heap_memalign(size: usize, alignment: usize) -> *mut c_void;
    fn quire_heap_usable_size(pointer: *mut c_void) -> usize;
    fn quire_heap_collect();
    fn quire_heap_free(pointer: *mut c_void);
}

/// Bytes that mimalloc has mapped, for mallinfo.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Makes the heap ready, before any other function of this module; the process has just joined.
pub fn start(process: &'static Process) {
    if !large::start(&process.arena()) {
        // The kernel refuses a few MiB of address space.
        std::process::abort();
    }
    gate::start();
    let calls = HeapCalls {
        map: heap_map,
        unmap: heap_unmap,
        protect: heap_protect,
        advise: heap_advise,
        gate_register: gate::register,
        gate_release: gate::release,
        gate_wait: gate::wait,
    };
    // SAFETY: called once, by the starter; the functions are what heap.c says they are.
    unsafe { quire_heap_start(&raw const calls) };
}

/// One of mimalloc's memory calls, made by the engine. Returns the errno.
fn engine(call: impl FnOnce(&'static Process) -> Result<(), Errno>) -> c_int {
    let result = process::current().ok_or(Errno::NOMEM).and_then(call);
    result.map_or_else(Errno::raw_os_error, |()| 0)
}

extern "C" fn heap_map(bytes: usize, prot: c_int, out: *mut *mut c_void) -> c_int {
    engine(|process| {
        let addr = process.mmap(0, bytes, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)?;
        MAPPED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        // SAFETY: heap.c passes a pointer to a variable of its own.
        unsafe { out.write(addr as *mut c_void) };
        Ok(())
    })
}

extern "C" fn heap_unmap(addr: usize, bytes: usize) -> c_int {
    engine(|process| {
        process.munmap(addr, bytes)?;
        MAPPED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    })
}

extern "C" fn heap_protect(addr: usize, bytes: usize, prot: c_int) -> c_int {
    engine(|process| process.mprotect(addr, bytes, prot))
}

extern "C" fn heap_advise(addr: usize, bytes: usize, advice: c_int) -> c_int {
    engine(|process| process.madvise(addr, bytes, advice))
}

/// Null, and errno.
fn refused(errno: Errno) -> *mut c_void {
    set_errno(errno);
    null_mut()
}

/// Sets errno where there was no memory.
#[inline]
fn checked(pointer: *mut c_void) -> *mut c_void {
    if pointer.is_null() { refused(Errno::NOMEM) } else { pointer }
}

#[cold]
fn large_alloc(size: usize, alignment: usize) -> *mut c_void {
    let addr = start::process().and_then(|process| large::alloc(process, size, alignment));
    checked(addr.unwrap_or(0) as *mut c_void)
}

/// `man 3 malloc`.
///
/// # Safety
///
/// Of this and all functions below: as the C standard and the manual have it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    if !start::is_managed() {
        // SAFETY: passed on as it came.
        return unsafe { next::malloc(size) };
    }
    if size >= large::LARGE_MIN {
        return large_alloc(size, ALIGNMENT_MIN);
    }
    // SAFETY: the heap has started, for the process is managed.
    checked(unsafe { quire_heap_malloc(size.max(ALIGNMENT_MIN)) })
}

/// `man 3 calloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    if !start::is_managed() {
        // SAFETY: passed on as it came.
        return unsafe { next::calloc(count, size) };
    }
    let Some(bytes) = count.checked_mul(size) else {
        return refused(Errno::NOMEM);
    };
    if bytes >= large::LARGE_MIN {
        // Fresh from the engine: zero.
        return large_alloc(bytes, ALIGNMENT_MIN);
    }
    // SAFETY: the heap has started.
    checked(unsafe { quire_heap_calloc(1, bytes.max(ALIGNMENT_MIN)) })
}

/// `man 3 free`. Leaves errno alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if start::is_in_arena(pointer as usize) {
        // SAFETY: the caller's promise; the pointer is the arena's.
        unsafe { free_managed(pointer) }
    } else {
        // SAFETY: the caller's promise; the pointer is null or another allocator's.
        unsafe { next::free(pointer) }
    }
}

#[inline]
unsafe fn free_managed(pointer: *mut c_void) {
    if let Some(bytes) = large::bytes_of(pointer as usize) {
        if let Some(process) = process::current() {
            large::free(process, pointer as usize, bytes);
        }
        return;
    }
    // SAFETY: a block of the arena that is not a large one is mimalloc's.
    unsafe { quire_heap_free(pointer) }
}

/// `man 3 realloc`; size 0 frees, as in glibc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    if pointer.is_null() {
        // SAFETY: realloc(NULL, size) is malloc(size).
        return unsafe { malloc(size) };
    }
    if !start::is_in_arena(pointer as usize) {
        // SAFETY: another allocator's block stays with it.
        return unsafe { next::realloc(pointer, size) };
    }
    if size == 0 {
        // SAFETY: the caller's promise.
        unsafe { free_managed(pointer) };
        return null_mut();
    }
    if let Some(bytes) = large::bytes_of(pointer as usize) {
        return realloc_large(pointer, bytes, size);
    }
    // SAFETY: mimalloc's block; the caller's promise.
    let old_size = unsafe { quire_heap_usable_size(pointer) };
    if size >= large::LARGE_MIN || (size > old_size && size >= large::GROWING_MIN) {
        // SAFETY: as above; the block moves over whole.
        return unsafe { move_to(large_alloc(size, ALIGNMENT_MIN), pointer, old_size.min(size)) };
    }
    // SAFETY: as above.
    checked(unsafe { quire_heap_realloc(pointer, size.max(ALIGNMENT_MIN)) })
}

#[cold]
fn realloc_large(pointer: *mut c_void, bytes: usize, size: usize) -> *mut c_void {
    if size >= large::GROWING_MIN {
        let process = process::current();
        let addr = process.and_then(|it| large::resize(it, pointer as usize, bytes, size));
        return checked(addr.unwrap_or(0) as *mut c_void);
    }
    // The new block may be the larger one: a small block with a large alignment is a "large" one too.
    // SAFETY: both blocks have as many bytes; the old one is the caller's.
    unsafe { move_to(malloc(size), pointer, bytes.min(size)) }
}

/// Copies `bytes` of a block of the arena to the block `to`, frees the old one, returns the new
/// one; null (with the old one left alone) where that is null.
unsafe fn move_to(to: *mut c_void, from: *mut c_void, bytes: usize) -> *mut c_void {
    if !to.is_null() {
        // SAFETY: the caller says that both have as many bytes; one is new, so they are apart.
        unsafe {
            core::ptr::copy_nonoverlapping::<u8>(from.cast(), to.cast(), bytes);
            free_managed(from);
        }
    }
    to
}

/// `man 3 reallocarray`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    pointer: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: the caller's promise.
        Some(bytes) => unsafe { next::program_realloc(pointer, bytes) },
        None => refused(Errno::NOMEM),
    }
}

/// `man 3 memalign`: an alignment that is no power of two is rounded up, as in glibc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    if !start::is_managed() {
        // SAFETY: passed on as it came.
        return unsafe { next::memalign(alignment, size) };
    }
    let Some(alignment) = alignment.max(ALIGNMENT_MIN).checked_next_power_of_two() else {
        return refused(Errno::INVAL);
    };
    if size >= large::LARGE_MIN || alignment > ALIGNMENT_MAX {
        return large_alloc(size, alignment);
    }
    // SAFETY: the heap has started; a power of two.
    checked(unsafe { quire_heap_memalign(size.max(ALIGNMENT_MIN), alignment) })
}

/// `man 3 aligned_alloc`. glibc up to 2.37 treats it as memalign, later ones refuse an alignment
/// that is no power of two; a program that works with either works with the first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { memalign(alignment, size) }
}

/// `man 3 posix_memalign`: returns the error; errno stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    alignment: usize,
    size: usize,
) -> c_int {
    if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let _kept = crate::ErrnoKept::new();
    // SAFETY: the caller's promise; `out` is written on success only.
    unsafe {
        let pointer = memalign(alignment, size);
        if pointer.is_null() {
            return libc::ENOMEM;
        }
        out.write(pointer);
    }
    0
}

/// `man 3 valloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { memalign(PAGE, size) }
}

/// `man 3 pvalloc`: whole pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    match size.checked_next_multiple_of(PAGE) {
        // SAFETY: the caller's promise.
        Some(bytes) => unsafe { memalign(PAGE, bytes) },
        None => refused(Errno::NOMEM),
    }
}

/// `man 3 malloc_usable_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    if !start::is_in_arena(pointer as usize) {
        // SAFETY: null or another allocator's block.
        return unsafe { next::usable_size(pointer) };
    }
    // SAFETY: a block of the arena that is not a large one is mimalloc's.
    large::bytes_of(pointer as usize).unwrap_or_else(|| unsafe { quire_heap_usable_size(pointer) })
}

/// `man 3 cfree`: gone from glibc's headers, still called by old binaries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cfree(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { free(pointer) }
}

/// C23's free with the size that was asked for, which is not needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(pointer: *mut c_void, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { next::program_free(pointer) }
}

/// C23's free with alignment and size, which are not needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(pointer: *mut c_void, _alignment: usize, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { next::program_free(pointer) }
}

/// `man 3 malloc_trim`: gives back what mimalloc keeps for reuse.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(pad: usize) -> c_int {
    if !start::is_managed() {
        return next::trim(pad);
    }
    let _kept = crate::ErrnoKept::new();
    // SAFETY: the heap has started.
    unsafe { quire_heap_collect() };
    1
}

/// `man 3 mallopt`: the settings are those of glibc's allocator, which is not in use here. They have
/// no effect, which is not reported as an error, since programs give up then.
#[unsafe(no_mangle)]
pub extern "C" fn mallopt(parameter: c_int, value: c_int) -> c_int {
    if start::is_managed() { 1 } else { next::mallopt(parameter, value) }
}

/// `man 3 mallinfo2`: what is mapped (`arena`, of which `uordblks` counts all as in use, for
/// mimalloc does not count blocks), and the large blocks (`hblks`, `hblkhd`).
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> libc::mallinfo2 {
    // SAFETY: integers only.
    let mut info: libc::mallinfo2 = unsafe { core::mem::zeroed() };
    if !start::is_managed() {
        return next::mallinfo2().unwrap_or(info);
    }
    let (blocks, bytes) = large::totals();
    info.arena = MAPPED_BYTES.load(Ordering::Relaxed);
    info.uordblks = info.arena;
    info.hblks = blocks;
    info.hblkhd = bytes;
    info
}

/// `man 3 mallinfo`: as mallinfo2, in ints that do not overflow but stop at the largest.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo() -> libc::mallinfo {
    // SAFETY: integers only.
    let mut info: libc::mallinfo = unsafe { core::mem::zeroed() };
    if !start::is_managed() {
        return next::mallinfo().unwrap_or(info);
    }
    let whole = mallinfo2();
    let int = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
    info.arena = int(whole.arena);
    info.uordblks = int(whole.uordblks);
    info.hblks = int(whole.hblks);
    info.hblkhd = int(whole.hblkhd);
    info
}
