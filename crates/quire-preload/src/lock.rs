//! mlock and its kin.
//!
//! A lock on managed memory is the engine's to keep: VM_LOCKED on a mapping of the arena would make
//! the kernel fault in all of it, and would make UFFDIO_MOVE refuse it. So no lock of the kernel's
//! may reach the arena.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

use crate::map::{kernel3, over_range, to_c};
use crate::start;
use crate::sys::{self, PAGE};

/// `addr` rounded down to its page, and `len` with what that adds.
fn from_page(addr: *const c_void, len: usize) -> (usize, usize) {
    let addr = addr as usize;
    (addr & !(PAGE - 1), len.saturating_add(addr & (PAGE - 1)))
}

/// `man 2 mlock`.
///
/// # Safety
///
/// Of this and all functions below: as the manual has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(addr: *const c_void, len: usize) -> c_int {
    let (addr, len) = from_page(addr, len);
    to_c(over_range(
        addr,
        len,
        |process, addr, len| process.mlock(addr, len),
        kernel3(libc::SYS_mlock, 0),
    ))
}

/// `man 2 mlock2`. MLOCK_ONFAULT on managed memory locks at once: more than was asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(addr: *const c_void, len: usize, flags: libc::c_uint) -> c_int {
    const MLOCK_ONFAULT: libc::c_uint = 1;
    if flags & !MLOCK_ONFAULT != 0 {
        return to_c(Err(Errno::INVAL));
    }
    let (addr, len) = from_page(addr, len);
    to_c(over_range(
        addr,
        len,
        |process, addr, len| process.mlock(addr, len),
        kernel3(libc::SYS_mlock2, flags as usize),
    ))
}

/// `man 2 munlock`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(addr: *const c_void, len: usize) -> c_int {
    let (addr, len) = from_page(addr, len);
    to_c(over_range(
        addr,
        len,
        |process, addr, len| process.munlock(addr, len),
        kernel3(libc::SYS_munlock, 0),
    ))
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
        let result = unsafe { sys::call(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) };
        return to_c(result.map(|_| ()));
    };
    to_c(process.mlockall(flags))
}

/// `man 2 munlockall`. The kernel is told too: single mappings of its own may be locked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    // SAFETY: the program's own call; nothing of the arena is locked in the kernel.
    let by_kernel = unsafe { sys::call(libc::SYS_munlockall, [0; 6]).map(|_| ()) };
    let by_engine = start::process().map_or(Ok(()), |process| process.munlockall());
    to_c(by_kernel.and(by_engine))
}
