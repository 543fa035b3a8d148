//! Errors of stores, each with what to do about it.

use core::fmt;
use core::time::Duration;
use std::boxed::Box;
use std::error::Error;
use std::string::String;
use std::sync::Arc;

use rustix::io::Errno;

/// What a store was asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// Opening it.
    Open,
    /// Asking for its length.
    Len,
    /// A read.
    Read,
    /// A write.
    Write,
    /// A change of its length.
    SetLen,
    /// Making durable what was written.
    Sync,
    /// Packing it into an archive.
    Pack,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Open => "cannot open",
            Operation::Len => "cannot tell the length of",
            Operation::Read => "cannot read",
            Operation::Write => "cannot write",
            Operation::SetLen => "cannot change the length of",
            Operation::Sync => "cannot sync",
            Operation::Pack => "cannot pack",
        })
    }
}

/// Why an operation failed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The kernel returned this error.
    Os(Errno),
    /// The store is read-only.
    ReadOnly,
    /// Another program made the store shorter: whole pages that it had are gone. The buffer holds
    /// the bytes that are left, and zeros.
    Shrunk {
        /// The length now, in bytes.
        len: u64,
    },
    /// The bytes in the store are not what they must be. The text says what was found.
    Corrupt(String),
    /// The store cannot be used this way. The text says why, and what to do.
    Unsupported(String),
    /// A server refused or failed. The text says how, and what to do.
    Server {
        /// What comes nearest to it.
        errno: Errno,
        /// How it failed, and what to do.
        why: String,
    },
    /// The server has another object under that name than the one that was opened, or none. The text
    /// says what was found.
    Replaced(String),
    /// The operation was given up before it was done.
    Cancelled,
    /// The store did not answer in time. It may still do so.
    Silent {
        /// The deadline. The call may have failed sooner, where the store owed answers already.
        after: Duration,
    },
    /// The store panicked instead of an answer: a defect of the store.
    Unanswered,
}

/// A failed operation on a store. A clone is cheap: the error is kept where it happened, and told
/// to every later caller that asks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreError(Arc<Details>);

#[derive(PartialEq, Eq, Debug)]
struct Details {
    operation: Operation,
    store: Box<str>,
    offset: u64,
    bytes: u64,
    cause: Cause,
}

impl StoreError {
    /// An error of `operation` on the store called `store`; `offset` and `bytes` say where.
    #[must_use]
    pub fn new(
        operation: Operation,
        store: &str,
        offset: u64,
        bytes: u64,
        cause: Cause,
    ) -> StoreError {
        StoreError(Arc::new(Details { operation, store: store.into(), offset, bytes, cause }))
    }

    /// What the store was asked to do.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The store's name.
    #[must_use]
    pub fn store(&self) -> &str {
        &self.0.store
    }

    /// The place, in bytes from the store's start; for [`Operation::SetLen`], the new length.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.0.offset
    }

    /// The bytes asked for; 0 where the operation is about the whole store.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Why the operation failed.
    #[must_use]
    pub fn cause(&self) -> &Cause {
        &self.0.cause
    }

    /// The error as an errno, for callers that know nothing else.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self.0.cause {
            Cause::Os(errno) => errno,
            Cause::ReadOnly => Errno::ROFS,
            // An access to a mapped page behind the end is a SIGBUS; a call gets this.
            Cause::Shrunk { .. } => Errno::NXIO,
            // The kernel, too, reports a wrong checksum so.
            Cause::Corrupt(_) => Errno::BADMSG,
            Cause::Unsupported(_) => Errno::OPNOTSUPP,
            Cause::Server { errno, .. } => errno,
            Cause::Replaced(_) => Errno::STALE,
            Cause::Cancelled => Errno::CANCELED,
            Cause::Silent { .. } => Errno::TIMEDOUT,
            Cause::Unanswered => Errno::IO,
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Details { operation, store, offset, bytes, cause } = &*self.0;
        write!(f, "{operation} {store}")?;
        match operation {
            Operation::Read | Operation::Write => write!(f, " ({bytes} bytes at {offset})")?,
            Operation::SetLen => write!(f, " to {offset} bytes")?,
            _ if *offset != 0 || *bytes != 0 => write!(f, " (at {offset})")?,
            _ => {}
        }
        write!(f, ": {cause}")
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Os(errno) => match advice(*errno) {
                Some(advice) => write!(f, "{errno}; {advice}"),
                None => write!(f, "{errno}"),
            },
            Cause::ReadOnly => f.write_str("it is read-only; open it for writing"),
            Cause::Shrunk { len } => write!(
                f,
                "another program made it shorter, {len} bytes are left; open it anew, and let no \
                 other program truncate it meanwhile"
            ),
            Cause::Corrupt(found) => {
                write!(f, "{found}; the file is damaged, take it from a backup or make it anew")
            }
            Cause::Unsupported(why) | Cause::Server { why, .. } => f.write_str(why),
            Cause::Replaced(found) => write!(f, "{found}; open it anew"),
            Cause::Cancelled => f.write_str("it was cancelled; ask again"),
            Cause::Silent { after } => {
                write!(f, "the store did not answer within {after:?}; {ANSWERS_LATER}")
            }
            Cause::Unanswered => f.write_str("the store panicked; correct its code"),
        }
    }
}

const ANSWERS_LATER: &str = "ask again once it does, or give it a longer deadline (store_deadline)";

/// What to do about an errno, where that is not obvious.
fn advice(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::NOSPC => Some("free some space and write again"),
        Errno::DQUOT => Some("the quota is used up, free some space and write again"),
        Errno::FBIG => Some("raise the limit of file sizes (ulimit -f), or keep it smaller"),
        Errno::IO => Some("the device failed, look at the kernel's log"),
        Errno::ACCESS | Errno::PERM => Some("check the rights to the file"),
        Errno::NOENT => Some("check the path, or ask for the file to be created"),
        Errno::TIMEDOUT => Some(ANSWERS_LATER),
        Errno::MFILE | Errno::NFILE => Some("raise the limit of open files (ulimit -n)"),
        Errno::NOMEM => Some(
            "raise the limit of addresses (ulimit -v) or of maps (vm.max_map_count), or free memory",
        ),
        Errno::AGAIN => {
            Some("try again; where no thread can be started, raise the limit of them (ulimit -u)")
        }
        _ => None,
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0.cause {
            Cause::Os(errno) => Some(errno),
            _ => None,
        }
    }
}
