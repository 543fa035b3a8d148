//! Why a call failed: an errno, and a message for the thread that made the call.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt;

use engine::library::Error;
use rustix::io::Errno;

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// An argument is wrong: which one, and what to give.
    Argument(&'static str),
    /// A name that is not known.
    Unknown(&'static str),
    /// The handle was inherited by a fork.
    Inherited,
    /// A range of the mapping is pinned.
    Pinned,
    /// The kernel refused what the C library needs for itself.
    Os(&'static str, Errno),
    /// An error of the engine's.
    Engine(Error),
}

impl Failure {
    fn errno(&self) -> Errno {
        match self {
            Failure::Argument(_) => Errno::INVAL,
            Failure::Unknown(_) => Errno::NOENT,
            Failure::Inherited => Errno::CHILD,
            Failure::Pinned => Errno::BUSY,
            Failure::Os(_, errno) => *errno,
            Failure::Engine(error) => error.errno(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Argument(what) | Failure::Unknown(what) => f.write_str(what),
            Failure::Inherited => f.write_str(
                "the handle belongs to the process that this one was forked from; open an address \
                 space of this process's own",
            ),
            Failure::Pinned => {
                f.write_str("a range of the mapping is pinned; let it go with quire_unpin first")
            }
            Failure::Os(doing, errno) => write!(f, "cannot {doing}: {errno}"),
            // The engine's message names the Rust library's remedy.
            Failure::Engine(Error::ReadOnly { path }) => {
                write!(f, "{path} was opened read-only; open it with QUIRE_WRITE")
            }
            Failure::Engine(Error::TooLong { path, len }) => write!(
                f,
                "{path} cannot grow to {len} bytes; open it for writing, with a larger len_max"
            ),
            Failure::Engine(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(error)
    }
}

thread_local! {
    static MESSAGE: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// The message of the last call of this thread that failed: what was tried, on which file and at which
/// offset, why it failed and what to do. An empty string where none has failed. It stays until the
/// thread's next call that fails, or the thread's end.
#[unsafe(no_mangle)]
pub extern "C" fn quire_last_error() -> *const c_char {
    let message = MESSAGE.try_with(|place| match place.try_borrow().as_deref() {
        Ok(Some(message)) => message.as_ptr(),
        _ => c"".as_ptr(),
    });
    // The thread ends, and its thread-locals are gone.
    message.unwrap_or(c"".as_ptr())
}

/// Keeps the message and sets errno.
fn fail(failure: &Failure) {
    let mut text = failure.to_string().into_bytes();
    // A path has no NUL, but the name of a store may.
    text.retain(|&byte| byte != 0);
    let message = CString::new(text).ok();
    let _ = MESSAGE.try_with(|place| {
        if let Ok(mut place) = place.try_borrow_mut() {
            *place = message;
        }
    });
    // Last: the calls above may have set it too.
    // SAFETY: glibc's place for this thread's errno.
    unsafe { *libc::__errno_location() = failure.errno().raw_os_error() };
}

/// 0, or -1 with errno.
pub fn status(result: Result<(), Failure>) -> c_int {
    result.map_or_else(|failure| failed(&failure, -1), |()| 0)
}

/// A number, or -1 with errno.
pub fn number(result: Result<u64, Failure>) -> i64 {
    let result = result.and_then(|number| {
        i64::try_from(number).map_err(|_| Failure::Os("return the number", Errno::OVERFLOW))
    });
    result.unwrap_or_else(|failure| failed(&failure, -1))
}

/// A handle or an address, or NULL with errno.
pub fn pointer<T>(result: Result<*mut T, Failure>) -> *mut T {
    result.unwrap_or_else(|failure| failed(&failure, std::ptr::null_mut()))
}

fn failed<T>(failure: &Failure, answer: T) -> T {
    fail(failure);
    answer
}
