//! An object as the application has it: a handle, its store, and cached access without a mapping.

#![deny(unsafe_code)]

use core::fmt;
use core::ops::Range;
use std::boxed::Box;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::adapter::Adapter;
use super::{AddressSpace, Engine, Entered, Error, OpenOptions, Patience};
use crate::object::{BackingStore, FlushError, IoBuffer, Keeper, ObjectId, ReadError};
use crate::scratch::Scratch;
use crate::store::workers::lock;
use crate::store::{Cause, Operation, Store, StoreError};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

/// How far beyond its length an object can grow by default.
const GROWTH_BYTES: u64 = 64 << 30;

/// What all handles of an object share.
struct Inner {
    space: AddressSpace,
    id: ObjectId,
    adapter: &'static Adapter,
    name: String,
    is_read_only: bool,
    /// Held by a change of the length.
    resize: Mutex<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let objects = self.space.objects();
        let object = objects.object(self.id);
        // No handle and no mapping is left, but workers may have requests under way, and would close
        // the object later. What was written is to be in the store when the last handle is gone.
        let all = ObjectRange::new(ObjectPage(0), object.pages());
        let _ = self.space.engine.with_buffers(|_, buffer| {
            let mut told = objects.errors_seen(object);
            // A caller that wants to know of errors has flushed before.
            let _ = objects.flush(object, all, false, &mut told, buffer);
        });
        objects.put(self.id);
    }
}

/// An object: a file, or the bytes of any other store. Clones are the same object, but handles of
/// their own: each reports a failed write once.
pub struct Object {
    inner: Arc<Inner>,
    /// Write errors that flushes through this handle have reported.
    told: Mutex<u32>,
}

impl Clone for Object {
    fn clone(&self) -> Object {
        Object { inner: Arc::clone(&self.inner), told: Mutex::new(*lock(&self.told)) }
    }
}

impl Object {
    /// Makes an object of any store. It may grow to `len_max` bytes.
    ///
    /// # Errors
    /// [`Error::Store`] where the store does not tell its length; [`Error::NoMemory`].
    pub fn with_store(
        space: &AddressSpace,
        store: impl Store + 'static,
        len_max: Option<u64>,
    ) -> Result<Object, Error> {
        let mut options = OpenOptions::new();
        options.len_max = len_max;
        options.open_store(space, store)
    }

    pub(super) fn make(
        space: &AddressSpace,
        store: Box<dyn Store>,
        len_max: Option<u64>,
        keeper: Keeper,
    ) -> Result<Object, Error> {
        let (name, is_read_only) = (store.name().to_string(), store.is_read_only());
        let len = store.len()?;
        let adapter: &'static Adapter = Box::leak(Box::new(Adapter {
            store,
            last_read: Mutex::new(None),
            last_write: Mutex::new(None),
            resize: Mutex::new(None),
            barrier: RwLock::new(None),
        }));
        let len_max = len_max.unwrap_or(len.saturating_add(GROWTH_BYTES)).max(len);
        let objects = space.objects();
        let id = objects.open(adapter, len, len_max, keeper).map_err(|errno| {
            adapter.release();
            match errno {
                Errno::FBIG => Error::TooLong { path: name.clone(), len: len_max },
                errno => Error::NoMemory { doing: "make an object", errno },
            }
        })?;
        let resize = Mutex::new(());
        let inner = Inner { space: space.clone(), id, adapter, name, is_read_only, resize };
        Ok(Object { inner: Arc::new(inner), told: Mutex::new(0) })
    }

    /// The object's name in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.engine().len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it can only be read.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.inner.is_read_only
    }

    /// Bytes of its pages in memory, and of its dirty pages.
    #[must_use]
    pub fn cached(&self) -> (usize, usize) {
        let engine = self.engine();
        (engine.cached_pages() * PAGE_SIZE, engine.dirty_pages() * PAGE_SIZE)
    }

    /// The address space.
    #[must_use]
    pub fn space(&self) -> &AddressSpace {
        &self.inner.space
    }

    /// Changes the length; mappings stay, and an access behind the end is a SIGBUS. A pinned page of a
    /// mapping ([`super::Mapping::pin`]) cannot be cut off or into, but for one of a private copy.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::TooLong`], [`Error::Pinned`], [`Error::Store`].
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.interruptibly("change the length", move |object| {
            object.change_length(bytes, || object.objects().set_len(object.engine(), bytes))
        })?
    }

    /// Follows a change of the store's length that was made elsewhere; returns the length.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Store`]; [`Error::Pinned`], after which the object is as long as
    /// before until this is called again.
    pub fn refresh_len(&self) -> Result<u64, Error> {
        self.interruptibly("follow the length", |object| {
            let bytes = object.inner.adapter.store.len()?;
            let follow = || object.objects().follow_len(object.engine(), bytes);
            object.change_length(bytes, follow)?;
            Ok(bytes)
        })?
    }

    /// Makes a change of length. An error of the store belongs to this change and to no older one: a
    /// second change waits, and the error of the one before is forgotten first.
    fn change_length(
        &self,
        bytes: u64,
        change: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Error> {
        let _resize = lock(&self.inner.resize);
        let said = &self.inner.adapter.resize;
        *lock(said) = None;
        let result = change();
        result.map_err(|errno| match lock(said).take() {
            Some(error) => Error::Store(error),
            None if errno == Errno::FBIG => {
                Error::TooLong { path: self.name().to_string(), len: bytes }
            }
            None if errno == Errno::BUSY => {
                Error::Pinned { path: self.name().to_string(), len: bytes }
            }
            None => Error::NoMemory { doing: "change the length of an object", errno },
        })
    }

    /// Writes everything dirty to the store and makes it durable. A memory object has nothing durable:
    /// all flushes do nothing there.
    ///
    /// # Errors
    /// As for [`Self::flush_range`].
    pub fn sync(&self) -> Result<(), Error> {
        self.flush_pages(ObjectRange::new(ObjectPage(0), self.engine().pages()), true)
    }

    /// Writes what is dirty in a range of bytes to the store and makes it durable.
    ///
    /// # Errors
    /// [`Error::Store`]: a page could not be written, and is still dirty (each handle reports each
    /// failure once, even where it happened in the background before the call), or the store could not
    /// be synced. After the latter, what was written since the last good sync is dirty again, and the
    /// next flush writes it anew; where a part of it is not in memory any more every later sync of the
    /// object fails: open it anew, and write again what may be lost. [`Error::HeldBack`]: all is
    /// written but what the barrier holds back.
    pub fn flush_range(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.flush_pages(pages_of(bytes), true)
    }

    /// Writes what is dirty in a range of bytes to the store, without making it durable.
    ///
    /// # Errors
    /// As for [`Self::flush_range`].
    pub fn write_range(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.flush_pages(pages_of(bytes), false)
    }

    fn flush_pages(&self, pages: ObjectRange, is_durable: bool) -> Result<(), Error> {
        let told = *lock(&self.told);
        let (result, told) = self.interruptibly("flush", move |object| {
            let mut told = told;
            (object.flush_to(pages, is_durable, &mut told), told)
        })?;
        // A call that was interrupted has reported nothing.
        let mut kept = lock(&self.told);
        *kept = (*kept).max(told);
        result
    }

    fn flush_to(&self, pages: ObjectRange, is_durable: bool, told: &mut u32) -> Result<(), Error> {
        let result = self.inner.space.engine.with_buffers(|_, buffer| {
            self.objects().flush(self.engine(), pages, is_durable, told, buffer)
        })?;
        result.map_err(|error| match error {
            FlushError::HeldBack { offset } => {
                Error::HeldBack { path: self.name().to_string(), offset }
            }
            FlushError::Write { offset, errno } => {
                self.store_error(Operation::Write, offset, errno)
            }
            FlushError::Sync(errno) => self.store_error(Operation::Sync, 0, errno),
        })
    }

    /// The store's own error of an operation, where that is the last of its kind that failed; another
    /// may have failed since, and then only the errno is known.
    fn store_error(&self, operation: Operation, offset: u64, errno: Errno) -> Error {
        let adapter = self.inner.adapter;
        let place = match operation {
            Operation::Read => &adapter.last_read,
            _ => &adapter.last_write,
        };
        let is_it = |error: &StoreError| {
            let end = error.offset().saturating_add(error.bytes().max(1));
            // A failed sync is a failed write to later flushes.
            let is_there = match (error.operation(), operation) {
                (Operation::Sync, Operation::Sync | Operation::Write) => true,
                (one, other) => one == other && (error.offset()..end).contains(&offset),
            };
            is_there && error.errno() == errno
        };
        let last = lock(place).clone();
        if let Some(error) = last.clone().filter(is_it) {
            return Error::Store(error);
        }
        // What a server says is not about one place, nor what a store cannot do.
        let is_of_all = |cause: &Cause| {
            matches!(cause, Cause::Server { .. } | Cause::Replaced(_) | Cause::Unsupported(_))
        };
        let of_all = last.filter(|last| last.errno() == errno && is_of_all(last.cause()));
        if let Some(last) = of_all {
            let (bytes, cause) = (PAGE_SIZE as u64, last.cause().clone());
            return StoreError::new(operation, self.name(), offset, bytes, cause).into();
        }
        if errno == Errno::HWPOISON {
            return Error::Poisoned { path: self.name().to_string(), offset };
        }
        if errno == Errno::NOMEM {
            // As a rule it is the kernel's, about the cache.
            return Error::NoMemory { doing: "cache an object's page", errno };
        }
        let (bytes, cause) = (PAGE_SIZE as u64, Cause::Os(errno));
        Error::Store(StoreError::new(operation, self.name(), offset, bytes, cause))
    }

    /// Sets the write barrier: no thread writes a page to the store unless the barrier returns `true`
    /// for the page's bytes. A page that it holds back stays dirty, and the barrier is called for it
    /// again. It is called with pages locked: it must not touch a mapping of this address space.
    pub fn set_barrier(&self, barrier: impl Fn(u64, usize) -> bool + Send + Sync + 'static) {
        let mut place = self.inner.adapter.barrier.write().unwrap_or_else(PoisonError::into_inner);
        *place = Some(Box::new(barrier));
    }

    /// Reads bytes through the cache, with an error instead of a SIGBUS; returns how many there
    /// were before the end.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, Error> {
        self.read(|objects, scratch, buffer| {
            objects.read_at(self.engine(), offset, into, scratch, buffer)
        })
    }

    /// Does a read that lends buffers, as a caller's call.
    pub(super) fn read<T>(
        &self,
        read: impl FnOnce(&Engine, &mut Scratch, &mut IoBuffer) -> Result<T, ReadError>,
    ) -> Result<T, Error> {
        let result = self.inner.space.engine.with_buffers(|scratch, buffer| {
            let objects = self.objects();
            read(&objects, scratch, buffer)
        })?;
        result.map_err(|error| self.read_error(error))
    }

    /// Reads at many places with as many reads in flight as there are store workers. Each request
    /// gets its own result.
    ///
    /// # Errors
    /// [`Error::NoMemory`] where it cannot be begun.
    pub fn read_at_many(
        &self,
        requests: &mut [(u64, &mut [u8])],
    ) -> Result<std::vec::Vec<Result<usize, Error>>, Error> {
        let pages = |offset: u64, len: usize| pages_of(offset..offset.saturating_add(len as u64));
        let prefetch = |(offset, into): &(u64, &mut [u8])| {
            self.objects().prefetch(self.inner.id, pages(*offset, into.len()));
        };
        // Reads begin ahead as far as the queue and the memory have room, each of the others when its
        // turn comes.
        let depth = 64;
        requests.iter().take(depth).for_each(prefetch);
        let mut results = std::vec::Vec::with_capacity(requests.len());
        for at in 0..requests.len() {
            requests.get(at + depth).into_iter().for_each(prefetch);
            let (offset, into) = &mut requests[at];
            results.push(self.read_at(*offset, into));
        }
        Ok(results)
    }

    /// Begins to read a range of bytes into the cache; returns how many bytes are under way.
    pub fn prefetch(&self, bytes: Range<u64>) -> usize {
        self.objects().prefetch(self.inner.id, pages_of(bytes)) * PAGE_SIZE
    }

    /// Moves cached pages to new memory, taken by the calling thread: of its NUMA node, and contiguous
    /// as far as the kernel has that. Mappings stay; the next access to each page is a fault. Returns
    /// how many bytes have new memory, and how many were left where they are: pages that are pinned,
    /// poisoned or in use just then.
    ///
    /// # Errors
    /// [`Error::NoMemory`] where it cannot be begun.
    pub fn migrate(&self) -> Result<(usize, usize), Error> {
        let moved = self.interruptibly("migrate", |object| {
            object.inner.space.engine.with_buffers(|scratch, buffer| {
                object.objects().migrate(object.engine(), scratch, buffer)
            })
        })??;
        Ok((moved.success * PAGE_SIZE, moved.failed * PAGE_SIZE))
    }

    /// Drops a range of bytes from the cache, but for dirty and pinned pages; returns how many bytes
    /// were dropped.
    pub fn drop_cached(&self, bytes: Range<u64>) -> usize {
        self.objects().drop_cached(self.engine(), pages_of(bytes)) * PAGE_SIZE
    }

    /// Treats the page at a byte as one whose memory has failed: its bytes are gone from the cache,
    /// an access to it is a SIGBUS in every mapping, and `read_at` is [`Error::Poisoned`], until
    /// [`Self::unpoison`] is called, or the object is cut before the page. What was written to it and
    /// not yet to the store is lost, and flushes report that. A pinned page goes as well, and stays
    /// poisoned until it is unpinned. Returns `false` where there is no such page.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; nothing has changed then.
    pub fn poison(&self, offset: u64) -> Result<bool, Error> {
        let page = ObjectPage(offset / PAGE_SIZE as u64);
        let result = self.objects().memory_failure(self.engine(), page);
        result.map_err(|errno| Error::NoMemory { doing: "give a bad page up", errno })
    }

    /// Ends the poisoning of a range's pages: from now on they have what the store has, which may be
    /// older than what was lost. Returns how many bytes. Pinned pages must be unpinned first.
    pub fn unpoison(&self, bytes: Range<u64>) -> usize {
        self.objects().unpoison(self.engine(), pages_of(bytes)) * PAGE_SIZE
    }

    /// The last read of the object that failed, whichever thread it was for: a SIGBUS does not tell.
    #[must_use]
    pub fn last_read_error(&self) -> Option<Error> {
        self.objects().last_read_error(self.engine()).map(|error| self.read_error(error))
    }

    pub(super) fn read_error(&self, error: ReadError) -> Error {
        if Patience::has_ended(error.errno) {
            return self.interrupted("read");
        }
        self.store_error(Operation::Read, error.offset, error.errno)
    }

    pub(super) fn bad_range(&self, offset: u64, len: u64) -> Error {
        Error::BadRange { path: self.name().to_string(), offset, len, object_len: self.len() }
    }

    pub(super) fn check_writable(&self) -> Result<(), Error> {
        if self.is_read_only() {
            return Err(Error::ReadOnly { path: self.name().to_string() });
        }
        Ok(())
    }

    pub(super) fn id(&self) -> ObjectId {
        self.inner.id
    }

    pub(super) fn objects(&self) -> Entered {
        self.inner.space.objects()
    }

    pub(super) fn engine(&self) -> &crate::object::VmObject {
        self.inner.space.engine.objects.object(self.inner.id)
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object").field("name", &self.name()).field("len", &self.len()).finish()
    }
}

/// The pages that hold a range of bytes.
fn pages_of(bytes: Range<u64>) -> ObjectRange {
    let size = PAGE_SIZE as u64;
    ObjectRange {
        start: ObjectPage(bytes.start / size),
        end: ObjectPage(bytes.end.max(bytes.start).div_ceil(size)),
    }
}
