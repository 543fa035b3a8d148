//! Errors of the library, each with what to do about it.

#![deny(unsafe_code)]

use core::fmt;
use std::error::Error as StdError;
use std::string::String;

use crate::store::{Cause, StoreError};
use crate::sys::Errno;

/// An error of the library: `path` is the object's name, `errno` what the kernel said.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// No userfaultfd can be opened.
    NoUserfaultfd { errno: Errno },
    /// The kernel has no memory, address space, threads or descriptors left.
    NoMemory {
        /// What they were needed for.
        doing: &'static str,
        errno: Errno,
    },
    /// No swap file can be made in the folder.
    NoSwapFile { folder: String, errno: Errno },
    /// An address space cannot work with so little memory.
    TooLittleMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes needed at least.
        least: usize,
    },
    /// An address space has no use for so much memory.
    TooMuchMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that it can have.
        most: usize,
    },
    /// The range is empty, or reaches over the object's end.
    BadRange {
        path: String,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The object's length in bytes.
        object_len: u64,
    },
    /// The object is read-only.
    ReadOnly { path: String },
    /// The object would become longer than it was opened for.
    TooLong {
        path: String,
        /// Bytes wanted.
        len: u64,
    },
    /// The store failed: a read, a write, a change of length, a sync.
    Store(StoreError),
    /// The write barrier holds pages back; they are still dirty. Flush again once it allows them.
    HeldBack {
        path: String,
        /// The first such byte.
        offset: u64,
    },
    /// More would be pinned than may be at once: half of the memory.
    TooMuchPinned {
        path: String,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that may be pinned of all objects.
        most: usize,
    },
    /// Pinned pages would be cut off, wholly or in part; nothing has changed. Unpin them first.
    Pinned {
        path: String,
        /// The length asked for.
        len: u64,
    },
    /// The caller's patience ([`super::Patience`]) ended before the call did. What the call has begun
    /// goes on.
    Interrupted {
        path: String,
        /// What the call does.
        doing: &'static str,
    },
    /// The memory of a page has failed; its bytes are lost.
    Poisoned {
        path: String,
        /// A byte of the page.
        offset: u64,
    },
}

impl Error {
    /// The errno that a C caller gets.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Error::NoUserfaultfd { errno }
            | Error::NoMemory { errno, .. }
            | Error::NoSwapFile { errno, .. } => *errno,
            Error::TooLittleMemory { .. }
            | Error::TooMuchMemory { .. }
            | Error::BadRange { .. } => Errno::INVAL,
            Error::ReadOnly { .. } => Errno::ACCESS,
            Error::TooLong { .. } => Errno::FBIG,
            Error::Store(error) => error.errno(),
            Error::HeldBack { .. } => Errno::AGAIN,
            Error::TooMuchPinned { .. } => Errno::NOMEM,
            Error::Pinned { .. } => Errno::BUSY,
            Error::Interrupted { .. } => Errno::INTR,
            Error::Poisoned { .. } => Errno::HWPOISON,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoUserfaultfd { errno } => write!(
                f,
                "cannot open a userfaultfd: {errno}; `quire doctor` says what this machine needs"
            ),
            Error::NoMemory { doing, errno } => {
                write!(f, "cannot {doing}: {}", Cause::Os(*errno))
            }
            Error::NoSwapFile { folder, errno } => write!(
                f,
                "cannot make a swap file in {folder}: {errno}; give it a folder that can be \
                 written, and 256 KiB at least"
            ),
            Error::TooLittleMemory { bytes, least } => {
                write!(f, "{bytes} bytes of memory are too few; ask for {least} at least")
            }
            Error::TooMuchMemory { bytes, most } => {
                write!(f, "{bytes} bytes of memory are too many; ask for {most} at most")
            }
            Error::BadRange { path, offset, len, object_len } => write!(
                f,
                "{path}: {len} bytes at {offset} are not a range of its {object_len} bytes; map a \
                 range that is, or make it longer first"
            ),
            Error::ReadOnly { path } => {
                write!(f, "{path} was opened read-only; open it with OpenOptions::write")
            }
            Error::TooLong { path, len } => write!(
                f,
                "{path} cannot grow to {len} bytes; open it with a larger OpenOptions::len_max"
            ),
            Error::Store(error) => error.fmt(f),
            Error::HeldBack { path, offset } => write!(
                f,
                "{path}: the write barrier holds back the page at {offset}; flush again once the \
                 barrier allows it"
            ),
            Error::TooMuchPinned { path, bytes, most } => write!(
                f,
                "{path}: cannot pin {bytes} bytes more; at most {most} of all objects can be pinned \
                 at once, half of the memory: unpin others, or give the address space more"
            ),
            Error::Pinned { path, len } => write!(
                f,
                "{path}: cannot be cut to {len} bytes while pages behind that are pinned; unpin \
                 them first"
            ),
            Error::Interrupted { path, doing } => write!(
                f,
                "{path}: cannot wait longer to {doing}: the call was cancelled, or its time is up; \
                 what it has begun goes on, so try again if it still matters"
            ),
            Error::Poisoned { path, offset } => write!(
                f,
                "{path}: the memory of the page at {offset} has failed, and its bytes are lost; \
                 Object::unpoison takes what the store has"
            ),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::NoUserfaultfd { errno }
            | Error::NoMemory { errno, .. }
            | Error::NoSwapFile { errno, .. } => Some(errno),
            Error::Store(error) => error.source(),
            _ => None,
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        Error::Store(error)
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> std::io::Error {
        std::io::Error::other(error)
    }
}
