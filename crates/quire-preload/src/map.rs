//! mmap, munmap, mremap, mprotect, madvise, mincore and their kin.
//!
//! Owns the decision which mappings are managed, and cuts ranges at the arena's edges: what lies in
//! the arena goes to the engine, what lies outside to the kernel. Keeps no state.
//!
//! Private anonymous memory is managed. These are left to the kernel:
//! - shared mappings and files: others than the program use them;
//! - executable memory: UFFDIO_MOVE wants both ends alike, and the frame pool is not executable;
//! - MAP_STACK and MAP_GROWSDOWN: the kernel writes to a dying thread's stack (clear_child_tid, the
//!   robust list), and such a fault is delivered to no handler;
//! - MAP_HUGETLB: those pages cannot be moved;
//! - MAP_32BIT, and hints below 4 GiB, which say that the program has room for 32 bits only;
//! - addresses outside the arena that the program insists on.
//!
//! libc's own mappings (stacks, stdio, the loader's) do not arrive here: it calls the kernel through
//! internal names.

use core::ffi::{c_int, c_void};

use quire::process::Process;
use rustix::io::Errno;

use crate::sys::{self, PAGE};
use crate::{set_errno, shared, start};

/// The arguments of an mmap.
#[derive(Clone, Copy)]
struct Request {
    addr: usize,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
}

/// Addresses below are for programs that keep pointers in 32 bits.
const LOW_END: usize = 1 << 32;
/// One past the last address a program can have (without five-level page tables).
const TASK_SIZE: usize = (1 << 47) - PAGE;

impl Request {
    /// Whether the memory is of the kind that Quire manages, wherever it is to be.
    fn is_manageable(&self) -> bool {
        const MAP_TYPE: c_int = 0xf;
        const REFUSED: c_int =
            libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_STACK | libc::MAP_32BIT;
        self.flags & MAP_TYPE == libc::MAP_PRIVATE
            && self.flags & libc::MAP_ANONYMOUS != 0
            && self.flags & REFUSED == 0
            && self.prot & libc::PROT_EXEC == 0
    }

    /// The same request for a part of its range.
    fn part(&self, addr: usize, len: usize) -> Request {
        let offset = self.offset.wrapping_add((addr - self.addr) as i64);
        Request { addr, len, offset, ..*self }
    }

    /// Has the kernel make the program's call as it is.
    fn by_kernel(&self) -> Result<usize, Errno> {
        let args = [
            self.addr,
            self.len,
            self.prot as usize,
            self.flags as usize,
            self.fd as usize,
            self.offset as usize,
        ];
        // SAFETY: the program's own call. Where it is MAP_FIXED it lies outside the arena.
        unsafe { sys::call(libc::SYS_mmap, args) }
    }
}

/// A range cut at the arena's edges.
struct Cut {
    /// (address, length, whether in the arena), in order; a length may be 0.
    pieces: [(usize, usize, bool); 3],
}

/// `len` bytes from `addr` on, in whole pages, cut at the arena's edges. None where the range wraps
/// around.
fn cut(process: &Process, addr: usize, len: usize) -> Option<Cut> {
    let end = addr.checked_add(len)?.checked_next_multiple_of(PAGE)?;
    let arena = process.arena();
    let start_inside = arena.start.clamp(addr, end);
    let end_inside = arena.end.clamp(addr, end);
    let pieces = [
        (addr, start_inside - addr, false),
        (start_inside, end_inside - start_inside, true),
        (end_inside, end - end_inside, false),
    ];
    Some(Cut { pieces })
}

impl Cut {
    /// Whether no part lies in the arena.
    fn is_outside(&self) -> bool {
        self.pieces[1].1 == 0
    }

    /// Whether all of it lies in the arena.
    fn is_inside(&self) -> bool {
        self.pieces[0].1 == 0 && self.pieces[2].1 == 0 && !self.is_outside()
    }

    /// Makes the call for every piece, and returns the first error: the kernel's own calls over
    /// several mappings go on as well, or stop anywhere.
    fn each(
        &self,
        mut call: impl FnMut(usize, usize, bool) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut result = Ok(());
        for (addr, len, is_inside) in self.pieces {
            if len > 0 {
                result = result.and(call(addr, len, is_inside));
            }
        }
        result
    }
}

/// Makes a call over a program's range, by pieces: `ours` for that in the arena, `kernels` for those
/// outside. A range that has no piece in the arena goes to the kernel as it came, in one call, so that
/// its errors are the kernel's.
pub fn over_range(
    addr: usize,
    len: usize,
    mut ours: impl FnMut(&'static Process, usize, usize) -> Result<(), Errno>,
    mut kernels: impl FnMut(usize, usize) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let process = start::process();
    let cut = process.and_then(|process| Some((process, cut(process, addr, len)?)));
    match cut {
        Some((process, cut)) if !cut.is_outside() => {
            cut.each(
                |addr, len, is_inside| {
                    if is_inside { ours(process, addr, len) } else { kernels(addr, len) }
                },
            )
        }
        _ => kernels(addr, len),
    }
}

/// The call `number` with an address, a length and one more argument, by the kernel.
pub fn kernel3(number: libc::c_long, third: usize) -> impl Fn(usize, usize) -> Result<(), Errno> {
    // SAFETY: the program's own call on a range outside the arena.
    move |addr, len| unsafe { sys::call(number, [addr, len, third]).map(drop) }
}

/// 0, or -1 and errno.
pub fn to_c(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// An address, or MAP_FAILED and errno.
fn to_address(result: Result<usize, Errno>) -> *mut c_void {
    match result {
        Ok(addr) => addr as *mut c_void,
        Err(errno) => {
            set_errno(errno);
            libc::MAP_FAILED
        }
    }
}

fn map(request: Request) -> Result<usize, Errno> {
    let Some(process) = start::process() else {
        return request.by_kernel();
    };
    if request.len == 0 || request.offset % PAGE as i64 != 0 {
        return request.by_kernel(); // EINVAL
    }
    shared::announce_map(process, request.len, request.flags, request.fd, request.offset);
    if request.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
        return map_at(process, request);
    }
    let is_low = request.addr != 0 && request.addr < LOW_END;
    if !request.is_manageable() || is_low {
        return request.by_kernel();
    }
    match map_anywhere(process, request) {
        // A reservation larger than what is left of the arena (some runtimes take terabytes) is no
        // memory yet: it is unmanaged rather than refused.
        Err(Errno::NOMEM)
            if request.prot == libc::PROT_NONE || request.flags & libc::MAP_NORESERVE != 0 =>
        {
            request.by_kernel()
        }
        result => result,
    }
}

/// Managed memory at an address of the engine's choice.
fn map_anywhere(process: &'static Process, request: Request) -> Result<usize, Errno> {
    let addr = process.mmap(request.addr, request.len, request.prot, request.flags)?;
    if request.flags & libc::MAP_LOCKED != 0 {
        // mmap(2): the mapping stands also where its pages cannot be locked.
        let _ = process.mlock(addr, request.len, 0);
    }
    Ok(addr)
}

/// MAP_FIXED and MAP_FIXED_NOREPLACE.
fn map_at(process: &'static Process, request: Request) -> Result<usize, Errno> {
    // SAFETY: asks about a descriptor that may be none.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    if request.flags & libc::MAP_ANONYMOUS == 0 && !is_open(request.fd) {
        return Err(Errno::BADF);
    }
    if request.len > TASK_SIZE || request.addr > TASK_SIZE - request.len {
        return Err(Errno::NOMEM);
    }
    if !request.addr.is_multiple_of(PAGE) {
        return Err(Errno::INVAL);
    }
    let cut = cut(process, request.addr, request.len).ok_or(Errno::NOMEM)?;
    if cut.is_outside() {
        return request.by_kernel();
    }
    if request.flags & libc::MAP_FIXED_NOREPLACE != 0 && !cut.is_inside() {
        // To the kernel all of the arena is mapped.
        return Err(Errno::EXIST);
    }
    cut.each(|addr, len, is_inside| {
        let part = request.part(addr, len);
        if !is_inside {
            part.by_kernel()?;
        } else if part.is_manageable() {
            process.mmap_fixed(addr, len, part.prot, part.flags)?;
            if part.flags & libc::MAP_LOCKED != 0 {
                // As in `map_anywhere`.
                let _ = process.mlock(addr, len, 0);
            }
        } else {
            process.mmap_foreign(addr, len, part.prot, part.flags, part.fd, part.offset)?;
        }
        Ok(())
    })?;
    Ok(request.addr)
}

/// `man 2 mmap`.
///
/// # Safety
///
/// Of this and all functions below: as the manual has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    to_address(map(Request { addr: addr as usize, len, prot, flags, fd, offset }))
}

/// mmap with a 64-bit offset, which is what offsets are here anyway.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// `man 2 munmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    let addr = addr as usize;
    if !addr.is_multiple_of(PAGE) || len == 0 || len > TASK_SIZE || addr > TASK_SIZE - len {
        return to_c(Err(Errno::INVAL));
    }
    to_c(over_range(
        addr,
        len,
        |process, addr, len| process.munmap(addr, len),
        kernel3(libc::SYS_munmap, 0),
    ))
}

fn protect(addr: usize, len: usize, prot: c_int) -> Result<(), Errno> {
    const GROWS: c_int = libc::PROT_GROWSDOWN | libc::PROT_GROWSUP;
    if !addr.is_multiple_of(PAGE) || prot & GROWS == GROWS {
        return Err(Errno::INVAL);
    }
    if len == 0 {
        return Ok(());
    }
    over_range(
        addr,
        len,
        |process, addr, len| process.mprotect(addr, len, prot),
        kernel3(libc::SYS_mprotect, prot as usize),
    )
}

/// `man 2 mprotect`, PROT_EXEC included: a range that is made executable (a just-in-time compiler's)
/// becomes foreign to the engine, and is managed again after it was unmapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    to_c(protect(addr as usize, len, prot))
}

/// `man 2 pkey_mprotect`. A key on managed memory is refused, with the error of a key that does not
/// exist: it would keep the engine out, and UFFDIO_MOVE wants both ends alike.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    pkey: c_int,
) -> c_int {
    if pkey == -1 {
        return to_c(protect(addr as usize, len, prot));
    }
    let by_kernel = |addr, len| {
        let args = [addr, len, prot as usize, pkey as usize];
        // SAFETY: the program's own call, outside the arena.
        unsafe { sys::call(libc::SYS_pkey_mprotect, args).map(drop) }
    };
    to_c(over_range(addr as usize, len, |_, _, _| Err(Errno::INVAL), by_kernel))
}

fn advise(addr: usize, len: usize, advice: c_int) -> Result<(), Errno> {
    if !addr.is_multiple_of(PAGE) {
        return Err(Errno::INVAL);
    }
    over_range(
        addr,
        len,
        |process, addr, len| process.madvise(addr, len, advice),
        kernel3(libc::SYS_madvise, advice as usize),
    )
}

/// `man 2 madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    to_c(advise(addr as usize, len, advice))
}

/// `man 2 msync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msync(addr: *mut c_void, len: usize, flags: c_int) -> c_int {
    const ALL: c_int = libc::MS_ASYNC | libc::MS_INVALIDATE | libc::MS_SYNC;
    const BOTH: c_int = libc::MS_ASYNC | libc::MS_SYNC;
    if flags & !ALL != 0 || flags & BOTH == BOTH || !(addr as usize).is_multiple_of(PAGE) {
        return to_c(Err(Errno::INVAL));
    }
    to_c(over_range(
        addr as usize,
        len,
        |process, addr, len| process.msync(addr, len, flags),
        kernel3(libc::SYS_msync, flags as usize),
    ))
}

/// `man 3 posix_madvise`: returns the error; errno stays. Its DONTNEED may not lose data, so it does
/// nothing, as in glibc; the other values are madvise's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    advise(addr as usize, len, advice).map_or_else(Errno::raw_os_error, |()| 0)
}

/// `man 2 mincore`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mincore(addr: *mut c_void, len: usize, vec: *mut u8) -> c_int {
    let first = addr as usize;
    if !first.is_multiple_of(PAGE) {
        return to_c(Err(Errno::INVAL));
    }
    let vec_at = |addr: usize| vec.wrapping_add((addr - first) / PAGE);
    to_c(over_range(
        first,
        len,
        // SAFETY: the caller's vector has a byte for every page of the whole range.
        |process, addr, len| unsafe { process.mincore(addr, len, vec_at(addr)) },
        |addr, len| kernel3(libc::SYS_mincore, vec_at(addr) as usize)(addr, len),
    ))
}

fn remap(
    old: usize,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: usize,
) -> Result<usize, Errno> {
    let by_kernel = || {
        let args = [old, old_len, new_len, flags as usize, new];
        // SAFETY: the program's own call; its ranges lie outside the arena, or were made foreign.
        unsafe { sys::call(libc::SYS_mremap, args) }
    };
    let Some(process) = start::process() else {
        return by_kernel();
    };
    // The kernel checks these before it looks at any mapping.
    const FLAGS: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let has_to_move = flags & libc::MREMAP_FIXED != 0;
    let is_contrary = has_to_move && flags & libc::MREMAP_MAYMOVE == 0;
    if !old.is_multiple_of(PAGE) || new_len == 0 || flags & !FLAGS != 0 || is_contrary {
        return Err(Errno::INVAL);
    }
    let from = cut(process, old, old_len.max(1)).ok_or(Errno::FAULT)?;
    let to = if has_to_move { Some(cut(process, new, new_len).ok_or(Errno::INVAL)?) } else { None };
    if from.is_outside() {
        if let Some(to) = to.filter(|to| !to.is_outside()) {
            if !to.is_inside() || !new.is_multiple_of(PAGE) {
                return Err(Errno::INVAL);
            }
            // A foreign mapping comes into the arena: the engine makes room, as for a file.
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            process.mmap_foreign(new, new_len, libc::PROT_NONE, flags, -1, 0)?;
        }
        return by_kernel();
    }
    if !from.is_inside() {
        // The kernel's answer where the range is not one mapping.
        return Err(Errno::FAULT);
    }
    if to.is_some_and(|to| !to.is_inside()) {
        // Managed pages cannot live outside the arena, and a copy would not be a move.
        return Err(Errno::NOMEM);
    }
    process.mremap(old, old_len, new_len, flags, new)
}

/// `man 2 mremap`. Its fifth argument is optional in C, and passed as any fifth argument.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    to_address(remap(old as usize, old_len, new_len, flags, new as usize))
}
