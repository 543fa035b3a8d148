//! A store as the engine calls it: the engine gets an errno; the whole error is kept here, for callers
//! that ask for it.
//!
//! Locks: a mutex for each kind of error, leaves; the barrier's, shared while the barrier is called.

use std::boxed::Box;
use std::sync::{Mutex, PoisonError, RwLock};

use crate::object::BackingStore;
use crate::store::workers::lock;
use crate::store::{Store, StoreError};
use crate::sys::Errno;

/// Says whether bytes `offset..offset + len` may be written to the store now.
pub(super) type Barrier = dyn Fn(u64, usize) -> bool + Send + Sync;

pub(super) struct Adapter {
    pub store: Box<dyn Store>,
    pub last_read: Mutex<Option<StoreError>>,
    pub last_write: Mutex<Option<StoreError>>,
    /// The error of the change of length under way; such changes are made one at a time.
    pub resize: Mutex<Option<StoreError>>,
    pub barrier: RwLock<Option<Box<Barrier>>>,
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
        keep(&self.last_read, self.store.read(offset, into))
    }

    fn reads_in_place(&self) -> bool {
        self.store.reads_in_place()
    }

    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        self.store.try_read_in_place(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        keep(&self.last_write, self.store.write(offset, from))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        keep(&self.resize, self.store.set_len(bytes))
    }

    fn sync(&self) -> Result<(), Errno> {
        keep(&self.last_write, self.store.sync())
    }

    fn release(&self) {
        // SAFETY: made by `leak` in `Object::make`; the engine calls this once, last.
        drop(unsafe { Box::from_raw(core::ptr::from_ref(self).cast_mut()) });
    }

    fn may_write(&self, offset: u64, bytes: usize) -> bool {
        let barrier = self.barrier.read().unwrap_or_else(PoisonError::into_inner);
        barrier.as_ref().is_none_or(|may| may(offset, bytes))
    }
}
