//! What a test program calls, in a build with the feature `failpoints`, to arm a step,
//! and to see whether the tree's accounts are the sum of its members'.

use core::ffi::{c_char, c_uint};

use quire::{process, steps};

/// The name of the step of this number; null behind the last.
#[unsafe(no_mangle)]
pub extern "C" fn quire_failpoint_name(step: c_uint) -> *const c_char {
    steps::NAMES.get(step as usize).map_or(core::ptr::null(), |name| name.as_ptr())
}

/// See [`steps::arm`].
#[unsafe(no_mangle)]
pub extern "C" fn quire_failpoint_arm(step: c_uint, victims: c_uint) {
    steps::arm(step, victims);
}

/// Writes [`process::Process::account_gaps`].
///
/// # Safety
///
/// `gaps` has room for five.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_account_gaps(gaps: *mut i64) {
    let now = process::current().map_or([0; 5], process::Process::account_gaps);
    // SAFETY: the caller's promise.
    unsafe { gaps.cast::<[i64; 5]>().write_unaligned(now) };
}
