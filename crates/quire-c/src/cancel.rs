//! How long the calls of a thread wait.

use std::ffi::c_int;
use std::time::Duration;

use engine::library::{CancelToken, Patience};

use crate::failure::{Failure, pointer, status};
use crate::handle::{Handle, close, get, hand_out};

/// Ends calls that wait, from any thread.
pub struct Cancel {
    token: CancelToken,
}

impl Handle for Cancel {
    const IS_NULL: &'static str = "the token is NULL; give what quire_cancel_new returned";
}

/// Makes a token, for quire_set_patience. Returns NULL on error.
#[unsafe(no_mangle)]
pub extern "C" fn quire_cancel_new() -> *mut Cancel {
    pointer(hand_out(Cancel { token: CancelToken::new() }))
}

/// Ends all calls that wait with this token, now and later: they fail with EINTR.
///
/// # Safety
/// `cancel` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_cancel(cancel: *const Cancel) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { get(cancel) }.map(|cancel| cancel.token.cancel()))
}

/// Ends the handle. Calls that have the token still wait.
///
/// # Safety
/// `cancel` is NULL or a handle that is not closed and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_cancel_free(cancel: *mut Cancel) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { close(cancel) })
}

/// Sets how long the calls that this thread makes from now on wait: until the token is cancelled, or
/// `timeout_ms` milliseconds from now (not from a call's beginning) have passed. NULL is no token, -1
/// no timeout; with both, as at first, they wait as long as it takes. A call that stops waiting fails
/// with EINTR, and what it has begun goes on: a read leaves its pages in the cache, a flush or a change
/// of length is made, nothing stays pinned.
///
/// What needs no wait is done all the same. quire_close and quire_unmap wait as long as it takes, and
/// so do accesses to a mapping.
///
/// # Safety
/// `cancel` is NULL or a handle that is not closed; it may be freed afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_set_patience(cancel: *const Cancel, timeout_ms: i64) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { set_patience(cancel, timeout_ms) })
}

/// # Safety
/// As for [`quire_set_patience`].
unsafe fn set_patience(cancel: *const Cancel, timeout_ms: i64) -> Result<(), Failure> {
    let mut patience = Patience::new();
    if !cancel.is_null() {
        // SAFETY: the caller's promise.
        patience = patience.token(unsafe { &get(cancel)?.token });
    }
    match u64::try_from(timeout_ms) {
        Ok(timeout_ms) => patience = patience.timeout(Duration::from_millis(timeout_ms)),
        Err(_) if timeout_ms == -1 => {}
        Err(_) => return Err(Failure::Argument("timeout_ms is negative; give -1 for none")),
    }
    Patience::replace(Some(patience));
    Ok(())
}
