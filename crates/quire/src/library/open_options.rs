//! Opening an object: of a file, of any store, or of memory alone.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::boxed::Box;
use std::path::Path;

use super::{AddressSpace, Error, Object};
use crate::object::Keeper;
use crate::store::zstd::CACHE_BYTES;
use crate::store::{
    Cause, DeadlineStore, Direct, FileOptions, FileStore, Operation, Store, StoreError, ZstdStore,
};

/// How a file is opened as an object.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    write: bool,
    create: bool,
    direct: Direct,
    pub(super) len_max: Option<u64>,
    is_plain: bool,
    store_deadline: Option<Duration>,
}

impl OpenOptions {
    /// Opens read-only, with direct or buffered I/O, whichever is better.
    #[must_use]
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// Opens for writing as well.
    #[must_use]
    pub fn write(mut self, write: bool) -> OpenOptions {
        self.write = write;
        self
    }

    /// Makes the file where there is none.
    #[must_use]
    pub fn create(mut self, create: bool) -> OpenOptions {
        self.create = create;
        self
    }

    /// Whether reads and writes bypass the kernel's own page cache.
    #[must_use]
    pub fn direct(mut self, direct: Direct) -> OpenOptions {
        self.direct = direct;
        self
    }

    /// How long the object may become, in bytes: by default 64 GiB more than it is.
    #[must_use]
    pub fn len_max(mut self, bytes: u64) -> OpenOptions {
        self.len_max = Some(bytes);
        self
    }

    /// Opens a file as it is even where its name ends in `.zst`; otherwise such a file, opened
    /// read-only, appears as the file that was packed into it.
    #[must_use]
    pub fn plain(mut self, is_plain: bool) -> OpenOptions {
        self.is_plain = is_plain;
        self
    }

    /// How long a call of the store is waited for; it overrides
    /// [`Builder::store_deadline`](super::Builder::store_deadline).
    #[must_use]
    pub fn store_deadline(mut self, deadline: Duration) -> OpenOptions {
        self.store_deadline = Some(deadline);
        self
    }

    /// Makes an object of any store, with the deadline and the greatest length of these options.
    ///
    /// # Errors
    /// As for [`Object::with_store`].
    pub fn open_store(
        &self,
        space: &AddressSpace,
        store: impl Store + 'static,
    ) -> Result<Object, Error> {
        let store: Box<dyn Store> = match self.store_deadline.or(space.engine.store_deadline) {
            Some(deadline) => Box::new(DeadlineStore::new(store, deadline)),
            None => Box::new(store),
        };
        Object::make(space, store, self.len_max, Keeper::Store)
    }

    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Store`] where it cannot be opened; [`Error::NoMemory`].
    pub fn open(&self, space: &AddressSpace, path: impl AsRef<Path>) -> Result<Object, Error> {
        let path = path.as_ref();
        if self.write {
            let options = FileOptions::read_write().direct(self.direct);
            let options = if self.create { options.create() } else { options };
            return self.open_store(space, FileStore::open(path, options)?);
        }
        // An archive's frames begin anywhere, so direct I/O would not do for them.
        let direct = if self.is_archive(path) { Direct::Off } else { self.direct };
        self.open_read_only(space, FileStore::open(path, FileOptions::read_only().direct(direct))?)
    }

    /// Makes an object of a store that can only be read, as [`Self::open`] does of a file: where the
    /// store's name ends in `.zst` it appears as the file that was packed into it, unless these options
    /// are [plain](Self::plain).
    ///
    /// # Errors
    /// [`Error::Store`] where these options ask for writing, or where it is no good archive;
    /// [`Error::NoMemory`].
    pub fn open_read_only(
        &self,
        space: &AddressSpace,
        store: impl Store + 'static,
    ) -> Result<Object, Error> {
        if self.write {
            let why = "it can only be read; open it without writing, or copy it to a file";
            let cause = Cause::Unsupported(why.into());
            return Err(StoreError::new(Operation::Open, store.name(), 0, 0, cause).into());
        }
        let fixed = self.clone().len_max(0);
        if self.is_archive(Path::new(store.name())) {
            return fixed.open_store(space, ZstdStore::over(store, CACHE_BYTES)?);
        }
        fixed.open_store(space, store)
    }

    fn is_archive(&self, path: &Path) -> bool {
        !self.is_plain && path.extension().is_some_and(|extension| extension == "zst")
    }

    /// Makes an object of `len` zeros without a file. Its pages count against the memory of the
    /// address space as any object's do; pages that are reclaimed are compressed, and go to the swap
    /// file ([`Builder::swap`](super::Builder::swap)) where there is one. The object can always be
    /// written. It ends, with its bytes, with its last handle and mapping. Of the options only
    /// [`Self::len_max`] has a meaning here.
    ///
    /// # Errors
    /// [`Error::NoMemory`], [`Error::TooLong`].
    pub fn memory(&self, space: &AddressSpace, len: u64) -> Result<Object, Error> {
        let store = Box::new(NoStore { len: AtomicU64::new(len) });
        Object::make(space, store, self.len_max, Keeper::Engine)
    }
}

/// Stands for the store of a memory object, whose bytes the engine keeps.
struct NoStore {
    len: AtomicU64,
}

impl Store for NoStore {
    fn name(&self) -> &str {
        "a memory object"
    }

    fn len(&self) -> Result<u64, StoreError> {
        // Relaxed, as below: the number orders nothing else.
        Ok(self.len.load(Ordering::Relaxed))
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _offset: u64, _from: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.len.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
