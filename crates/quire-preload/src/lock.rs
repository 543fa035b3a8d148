//! mlock and its kin.
//!
//! The engine keeps locks on managed memory. No lock of the kernel's may reach the arena: VM_LOCKED on
//! a mapping of it would make the kernel fault in all of it, and UFFDIO_MOVE refuse it.

use core::ffi::{c_int, c_long, c_uint, c_void};

use quire::process::Process;
use rustix::io::Errno;

use crate::map::{kernel3, over_range, to_c};
use crate::start;
use crate::sys::{self, PAGE};

/// Locks or unlocks the pages that the range touches: those in the arena by `of_engine`, all others by
/// the call `number`.
fn over_pages(
    addr: *const c_void,
    len: usize,
    of_engine: impl Fn(&'static Process, usize, usize) -> Result<(), Errno>,
    number: c_long,
    flags: c_uint,
) -> c_int {
    let in_page = addr as usize & (PAGE - 1);
    to_c(over_range(
        addr as usize - in_page,
        // As the kernel has it: what is too long may come round to little.
        len.wrapping_add(in_page),
        of_engine,
        kernel3(number, flags as usize),
    ))
}

/// `man 2 mlock`.
///
/// # Safety
///
/// Of this and all functions below: as the manual has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(addr: *const c_void, len: usize) -> c_int {
    let lock = |process: &'static Process, addr, len| process.mlock(addr, len, 0);
    over_pages(addr, len, lock, libc::SYS_mlock, 0)
}

/// `man 2 mlock2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(addr: *const c_void, len: usize, flags: c_uint) -> c_int {
    const MLOCK_ONFAULT: c_uint = 1;
    if flags & !MLOCK_ONFAULT != 0 {
        return to_c(Err(Errno::INVAL));
    }
    let lock = |process: &'static Process, addr, len| process.mlock(addr, len, flags);
    over_pages(addr, len, lock, libc::SYS_mlock2, flags)
}

/// `man 2 munlock`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(addr: *const c_void, len: usize) -> c_int {
    over_pages(addr, len, Process::munlock, libc::SYS_munlock, 0)
}

/// `man 2 mlockall`. In a managed process nothing of it reaches the kernel: it would lock the arena
/// and the engine's sparse tables, now or (MCL_FUTURE) as they are opened. Managed memory is locked
/// by the engine; code, stacks and files are left to the kernel's reclaim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    const ALL: c_int = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    if flags & !ALL != 0 || flags & (libc::MCL_CURRENT | libc::MCL_FUTURE) == 0 {
        return to_c(Err(Errno::INVAL));
    }
    let Some(process) = start::process() else {
        // SAFETY: the program's own call.
        let result = unsafe { sys::call(libc::SYS_mlockall, [flags as usize]) };
        return to_c(result.map(drop));
    };
    to_c(process.mlockall(flags))
}

/// `man 2 munlockall`, by the kernel too: single mappings outside of the arena may be locked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    // SAFETY: the program's own call; nothing of the arena is locked in the kernel.
    let by_kernel = unsafe { sys::call(libc::SYS_munlockall, []).map(drop) };
    start::process().into_iter().for_each(Process::munlockall);
    to_c(by_kernel)
}
