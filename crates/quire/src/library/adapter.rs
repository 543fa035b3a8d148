//! A store as the engine calls it.
//!
//! Owns what the store said last when it failed, whole, for whoever asks; the engine gets an errno.
//! Leaves waiting no longer than a deadline to [`super::patience`].
//!
//! Locks: a mutex for each kind of error, leaves; the barrier's, shared while it is asked.

use core::time::Duration;
use std::boxed::Box;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use super::patience::Patient;
use crate::object::BackingStore;
use crate::store::{Operation, Store, StoreError};
use crate::sys::{Errno, monotonic_ns};

/// Says whether bytes `offset..offset + len` may be written to the store now.
pub(super) type Barrier = dyn Fn(u64, usize) -> bool + Send + Sync;

/// A mutex's lock, whatever became of who held it before.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store as the engine calls it: errors are kept whole for whoever asks, and go on as an errno.
pub(super) struct Adapter {
    pub calls: Calls,
    pub last_read: Mutex<Option<StoreError>>,
    pub last_write: Mutex<Option<StoreError>>,
    /// Of the change of length under way: nobody else's, for they are made one at a time.
    pub resize: Mutex<Option<StoreError>>,
    pub barrier: RwLock<Option<Box<Barrier>>>,
}

/// How a store is called.
pub(super) enum Calls {
    /// By whoever needs it, who waits as long as it takes.
    Plain(Box<dyn Store>),
    /// With a deadline.
    Patient(Patient),
}

impl Calls {
    pub fn len(&self) -> Result<u64, StoreError> {
        match self {
            Calls::Plain(store) => store.len(),
            Calls::Patient(store) => store.ask_plain(Operation::Len, 0),
        }
    }

    fn read(&self, offset: u64, into: &mut [u8], since: Instant) -> Result<(), StoreError> {
        match self {
            Calls::Plain(store) => store.read(offset, into),
            Calls::Patient(store) => store.read(offset, into, since),
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        match self {
            Calls::Plain(store) => store.write(offset, from),
            Calls::Patient(store) => store.write(offset, from),
        }
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        match self {
            Calls::Plain(store) => store.set_len(bytes),
            Calls::Patient(store) => store.ask_plain(Operation::SetLen, bytes).map(drop),
        }
    }

    fn sync(&self) -> Result<(), StoreError> {
        match self {
            Calls::Plain(store) => store.sync(),
            Calls::Patient(store) => store.ask_plain(Operation::Sync, 0).map(drop),
        }
    }
}

fn keep(place: &Mutex<Option<StoreError>>, result: Result<(), StoreError>) -> Result<(), Errno> {
    result.map_err(|error| {
        let errno = error.errno();
        *lock(place) = Some(error);
        errno
    })
}

impl BackingStore for Adapter {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        keep(&self.last_read, self.calls.read(offset, into, Instant::now()))
    }

    fn read_since(&self, offset: u64, into: &mut [u8], since_ns: u64) -> Result<(), Errno> {
        let waited = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
        let since = Instant::now().checked_sub(waited).unwrap_or_else(Instant::now);
        keep(&self.last_read, self.calls.read(offset, into, since))
    }

    fn reads_in_place(&self) -> bool {
        match &self.calls {
            Calls::Plain(store) => store.reads_in_place(),
            // Somebody else reads, whom one can go away from.
            Calls::Patient(_) => false,
        }
    }

    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        match &self.calls {
            Calls::Plain(store) => store.try_read_in_place(offset, into),
            Calls::Patient(_) => false,
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        keep(&self.last_write, self.calls.write(offset, from))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        keep(&self.resize, self.calls.set_len(bytes))
    }

    fn sync(&self) -> Result<(), Errno> {
        keep(&self.last_write, self.calls.sync())
    }

    fn release(&self) {
        // SAFETY: made by `leak` in `Object::with_store`; the engine calls this once, last.
        drop(unsafe { Box::from_raw(core::ptr::from_ref(self).cast_mut()) });
    }

    fn may_write(&self, offset: u64, bytes: usize) -> bool {
        let barrier = self.barrier.read().unwrap_or_else(PoisonError::into_inner);
        barrier.as_ref().is_none_or(|may| may(offset, bytes))
    }
}
