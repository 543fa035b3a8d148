//! An object as the application has it: a handle, its store, and cached access without a mapping.

use core::fmt;
use core::ops::Range;
use std::boxed::Box;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::adapter::Adapter;
use super::{AddressSpace, Entered, Error, OpenOptions, Patience};
use crate::object::{BackingStore, FlushError, ObjectId, ReadError};
use crate::store::workers::lock;
use crate::store::{Cause, Operation, Store, StoreError};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

/// How far an object can grow, unless said otherwise: 64 GiB beyond its length.
const GROWTH_BYTES: u64 = 64 << 30;

/// Who keeps an object's bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keeper {
    Store,
    Engine,
}

struct Inner {
    space: AddressSpace,
    id: ObjectId,
    adapter: &'static Adapter,
    name: String,
    is_read_only: bool,
    /// Who changes the length holds it.
    resize: Mutex<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let objects = self.space.objects();
        let object = objects.object(self.id);
        // No handle and no mapping is left, but workers may have something under way, and would
        // close the object later. What was written is in the store when the last handle is gone.
        let all = ObjectRange::new(ObjectPage(0), object.pages());
        let _ = self.space.engine.with_buffers(|_, buffer| {
            let mut told = objects.errors_seen(object);
            // Whoever wants to know of errors has flushed before.
            let _ = objects.flush(object, all, false, &mut told, buffer);
        });
        objects.put(self.id);
    }
}

/// An object: a file, or anything else that a store has. Clones are the same object, but handles of
/// their own: each is told a failed write once.
pub struct Object {
    inner: Arc<Inner>,
    /// Write errors that flushes through this handle have told.
    told: Mutex<u32>,
}

impl Clone for Object {
    fn clone(&self) -> Object {
        Object { inner: Arc::clone(&self.inner), told: Mutex::new(*lock(&self.told)) }
    }
}

impl Object {
    /// Makes an object of a store of one's own. It may grow to `len_max` bytes.
    ///
    /// # Errors
    /// [`Error::Store`] where its length cannot be had; [`Error::NoMemory`].
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
        let made = match keeper {
            Keeper::Store => objects.open(adapter, len, len_max),
            Keeper::Engine => objects.open_memory(adapter, len, len_max),
        };
        let id = made.map_err(|errno| {
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

    /// What messages call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Bytes.
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

    /// Bytes of its pages in memory, and of those that wait to be written to its store.
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

    /// Changes the length; mappings stay, and an access behind the end is a SIGBUS. Not through a
    /// page of a mapping that is pinned ([`super::Mapping::pin`]), but for private copies.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::TooLong`], [`Error::Pinned`], [`Error::Store`].
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        if self.is_read_only() {
            return Err(Error::ReadOnly { path: self.name().to_string() });
        }
        self.interruptibly("change the length", move |object| {
            object.change_length(bytes, || object.objects().set_len(object.engine(), bytes))
        })?
    }

    /// Follows a change of the store's length that somebody else made; returns it.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Store`]; [`Error::Pinned`], and the object is as long as before
    /// until this is called again.
    pub fn refresh_len(&self) -> Result<u64, Error> {
        self.interruptibly("follow the length", |object| {
            let bytes = object.inner.adapter.store.len()?;
            let follow = || object.objects().follow_len(object.engine(), bytes);
            object.change_length(bytes, follow)?;
            Ok(bytes)
        })?
    }

    /// Makes a change of length. What the store says of it is this one's and no older one's: another
    /// waits, and what the one before has left is forgotten first.
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

    /// Writes everything dirty to the store and makes it durable. An object without a store has
    /// nothing durable: this and the like of it do nothing there.
    ///
    /// # Errors
    /// As for [`Self::flush_range`].
    pub fn sync(&self) -> Result<(), Error> {
        self.flush_pages(ObjectRange::new(ObjectPage(0), self.engine().pages()), true)
    }

    /// Writes what is dirty in a range of bytes to the store and makes it durable.
    ///
    /// # Errors
    /// [`Error::Store`]: a page could not be written, and is still dirty (each failure is told
    /// once to each handle, even where it happened in the background before the call), or the
    /// store could not be synced. After the latter, what was written since the last good sync is
    /// dirty again, and the next flush writes it anew; where a part of it is not in memory any more
    /// every later sync of the object fails: open it anew, and write what may be lost again.
    /// [`Error::HeldBack`]: all but what the barrier holds back is
    /// written.
    pub fn flush_range(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.flush_pages(pages_of(bytes), true)
    }

    /// The same, without making it durable.
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
        // Not where it was interrupted: nobody was told anything.
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

    /// What the store said of an operation, if that is the last of its kind that failed; another
    /// may have failed since, and then only the errno is known.
    fn store_error(&self, operation: Operation, offset: u64, errno: Errno) -> Error {
        let adapter = self.inner.adapter;
        let place = match operation {
            Operation::Read => &adapter.last_read,
            _ => &adapter.last_write,
        };
        let is_it = |error: &StoreError| {
            let end = error.offset().saturating_add(error.bytes().max(1));
            // A sync that failed is told as a failed write to those who come later.
            let is_there = match (error.operation(), operation) {
                (Operation::Sync, Operation::Sync | Operation::Write) => true,
                (one, other) => one == other && (error.offset()..end).contains(&offset),
            };
            is_there && error.errno() == errno
        };
        if let Some(error) = lock(place).clone().filter(is_it) {
            return Error::Store(error);
        }
        if errno == Errno::HWPOISON {
            return Error::Poisoned { path: self.name().to_string(), offset };
        }
        if errno == Errno::NOMEM {
            // The kernel's word about the cache, as a rule.
            return Error::NoMemory { doing: "cache an object's page", errno };
        }
        let (bytes, cause) = (PAGE_SIZE as u64, Cause::Os(errno));
        Error::Store(StoreError::new(operation, self.name(), offset, bytes, cause))
    }

    /// Sets the write barrier: no page is written to the store, by whomever, unless it says yes
    /// for its bytes. A page that it holds back stays dirty, and is asked about again. It is
    /// called with pages locked: it must not touch a mapping of this address space.
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
        let result = self.inner.space.engine.with_buffers(|scratch, buffer| {
            self.objects().read_at(self.engine(), offset, into, scratch, buffer)
        })?;
        result.map_err(|error| self.read_error(error))
    }

    /// Reads many places with as many reads in flight as there are store workers. Each request
    /// gets its own result.
    ///
    /// # Errors
    /// [`Error::NoMemory`] where it cannot be begun.
    pub fn read_at_many(
        &self,
        requests: &mut [(u64, &mut [u8])],
    ) -> Result<std::vec::Vec<Result<usize, Error>>, Error> {
        let pages = |offset: u64, len: usize| pages_of(offset..offset.saturating_add(len as u64));
        // Sent ahead as far as the queue and the memory have room; the rest is when its turn
        // comes.
        let depth = 64;
        for (offset, into) in requests.iter().take(depth) {
            self.objects().prefetch(self.inner.id, pages(*offset, into.len()));
        }
        let mut results = std::vec::Vec::with_capacity(requests.len());
        for at in 0..requests.len() {
            if let Some((offset, into)) = requests.get(at + depth) {
                self.objects().prefetch(self.inner.id, pages(*offset, into.len()));
            }
            let (offset, into) = &mut requests[at];
            results.push(self.read_at(*offset, into));
        }
        Ok(results)
    }

    /// Begins to read a range of bytes into the cache; returns how many are under way.
    pub fn prefetch(&self, bytes: Range<u64>) -> usize {
        self.objects().prefetch(self.inner.id, pages_of(bytes)) * PAGE_SIZE
    }

    /// Gives what is cached new memory, taken by the calling thread: of its NUMA node, and as far as
    /// the kernel has it in one piece. Mappings stay; the next access to each page is a fault. Returns
    /// how many bytes have new memory, and how many were left where they are: what is pinned, poisoned
    /// or in use just then.
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

    /// Drops a range of bytes from the cache, but for what is dirty or pinned; returns how many.
    pub fn drop_cached(&self, bytes: Range<u64>) -> usize {
        self.objects().drop_cached(self.engine(), pages_of(bytes)) * PAGE_SIZE
    }

    /// Treats the page at a byte as one whose memory has failed: its bytes are gone from the cache,
    /// an access to it is a SIGBUS in every mapping, and `read_at` is [`Error::Poisoned`], until
    /// [`Self::unpoison`] gives it up, or the object is cut before it. What was written to it and
    /// not yet to the store is lost; flushes are told so. A pinned page goes as well, and stays bad
    /// until it is let go.
    /// `false` where there is no such page.
    ///
    /// # Errors
    /// [`Error::NoMemory`], and nothing has changed.
    pub fn poison(&self, offset: u64) -> Result<bool, Error> {
        let page = ObjectPage(offset / PAGE_SIZE as u64);
        let result = self.objects().memory_failure(self.engine(), page);
        result.map_err(|errno| Error::NoMemory { doing: "give a bad page up", errno })
    }

    /// Gives the poisoned pages of a range up: from now on they have what the store has, which may
    /// be older than what was lost. Returns how many bytes. Pinned ones must be let go of first.
    pub fn unpoison(&self, bytes: Range<u64>) -> usize {
        self.objects().unpoison(self.engine(), pages_of(bytes)) * PAGE_SIZE
    }

    /// The last read that failed, whoever it was for: what a SIGBUS does not say.
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

    pub(super) fn id(&self) -> ObjectId {
        self.inner.id
    }

    pub(super) fn objects(&self) -> Entered {
        self.inner.space.objects()
    }

    pub(super) fn engine(&self) -> &crate::object::Object {
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
