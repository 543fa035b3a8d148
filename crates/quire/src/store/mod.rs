//! Stores: where an object's bytes rest.
//!
//! A store reads and writes whole ranges of bytes, and says what went wrong. The page cache decides
//! which pages are read or written and when, and sees to it that no two requests that overlap are in
//! flight at once where one of them writes: a store orders nothing but a [`Store::sync`] behind the
//! writes that returned before it.
//!
//! Every method may block and allocate, so no handler calls one, but for
//! [`Store::try_read_in_place`], which files have. The locks here are leaves: none is held while
//! another is taken, and none while bytes are read, written or unpacked.

#![deny(unsafe_code)]

mod deadline;
mod error;
pub mod file;
pub(crate) mod workers;
pub mod zstd;

use std::sync::Arc;

pub use self::deadline::DeadlineStore;
pub use self::error::{Cause, Operation, StoreError};
pub use self::file::{Direct, FileOptions, FileStore};
pub use self::zstd::{PackOptions, Packed, ZstdStore, pack};

/// Bytes that outlive the memory they are mapped to.
pub trait Store: Send + Sync {
    /// The name in messages: the path.
    fn name(&self) -> &str;

    /// The length in bytes, as it is now.
    ///
    /// # Errors
    /// What the kernel says.
    fn len(&self) -> Result<u64, StoreError>;

    /// Whether the store has no bytes, as it is now.
    ///
    /// # Errors
    /// As [`Store::len`].
    fn is_empty(&self) -> Result<bool, StoreError> {
        Ok(self.len()? == 0)
    }

    /// Whether every write is refused.
    fn is_read_only(&self) -> bool;

    /// Fills `into` from `offset` on. Meant for whole pages at page boundaries, which is what can
    /// go by direct I/O; anything else is read as well. Bytes past the end are zeros.
    ///
    /// # Errors
    /// [`Cause::Shrunk`] where whole pages that the store had are gone; `into` is then as if the
    /// missing bytes were zeros. After any other error `into` holds anything.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError>;

    /// Whether [`Store::try_read_in_place`] is worth a call; `false` unless a store says otherwise.
    /// A store that says `true` must keep what that method demands. A wrapper around another store,
    /// or a store that allocates or locks, cannot.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// Fills `into` from `offset` on, as [`Store::read`] does, in a signal handler that may wait
    /// for the device: it takes no lock, allocates nothing, and calls nothing that does. Returns
    /// `false` at the end of the store and after any error; `into` then holds anything, and another
    /// thread calls [`Store::read`], which says what went wrong.
    fn try_read_in_place(&self, _offset: u64, _into: &mut [u8]) -> bool {
        false
    }

    /// Writes `from` at `offset`; a store that ended before ends behind it afterwards. The last
    /// page of a store comes with its true length: nothing is written past `from`.
    ///
    /// # Errors
    /// [`Cause::ReadOnly`], as always where a store does not write; or what the kernel says. Any part of
    /// it may have been written then.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        let bytes = from.len() as u64;
        Err(StoreError::new(Operation::Write, self.name(), offset, bytes, Cause::ReadOnly))
    }

    /// Shortens the store, or extends it by zeros.
    ///
    /// # Errors
    /// [`Cause::ReadOnly`], as always where a store does not write; or what the kernel says.
    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        Err(StoreError::new(Operation::SetLen, self.name(), bytes, 0, Cause::ReadOnly))
    }

    /// Makes durable every write and `set_len` that returned before this call.
    ///
    /// # Errors
    /// What the kernel says. What was written since the last sync may then be lost, and a later
    /// sync that succeeds says nothing about it: write it again first.
    fn sync(&self) -> Result<(), StoreError>;
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        (**self).len()
    }

    fn is_read_only(&self) -> bool {
        (**self).is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        (**self).read(offset, into)
    }

    fn reads_in_place(&self) -> bool {
        (**self).reads_in_place()
    }

    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        (**self).try_read_in_place(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        (**self).write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        (**self).set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        (**self).sync()
    }
}
