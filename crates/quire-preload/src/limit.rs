//! setrlimit and its kin: the kernel makes the calls, then the engine reads the limits again.

use core::ffi::{c_int, c_uint};

use crate::map::to_c;
use crate::{start, sys};

/// prlimit(2) by the kernel. Where it sets another process's limits the engine reads its own in vain.
fn prlimit_by_kernel(
    pid: libc::pid_t,
    resource: c_uint,
    new: *const libc::rlimit,
    old: *mut libc::rlimit,
) -> c_int {
    let args = [pid as usize, resource as usize, new as usize, old as usize];
    // SAFETY: the program's own call.
    let result = unsafe { sys::call(libc::SYS_prlimit64, args) };
    if let (false, Some(process)) = (new.is_null(), start::process()) {
        process.limits_changed();
    }
    to_c(result.map(drop))
}

/// `man 2 setrlimit`.
///
/// # Safety
///
/// Of this and all functions below: as the manual has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit(resource: c_uint, new: *const libc::rlimit) -> c_int {
    prlimit_by_kernel(0, resource, new, core::ptr::null_mut())
}

/// `man 2 setrlimit`, as programs built for large files call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit64(resource: c_uint, new: *const libc::rlimit) -> c_int {
    prlimit_by_kernel(0, resource, new, core::ptr::null_mut())
}

/// `man 2 prlimit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit(
    pid: libc::pid_t,
    resource: c_uint,
    new: *const libc::rlimit,
    old: *mut libc::rlimit,
) -> c_int {
    prlimit_by_kernel(pid, resource, new, old)
}

/// `man 2 prlimit`, as programs built for large files call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit64(
    pid: libc::pid_t,
    resource: c_uint,
    new: *const libc::rlimit,
    old: *mut libc::rlimit,
) -> c_int {
    prlimit_by_kernel(pid, resource, new, old)
}
