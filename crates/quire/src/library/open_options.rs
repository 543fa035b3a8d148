//! How an object is opened: of a file, or of no file at all.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::boxed::Box;
use std::path::Path;

use super::object::Keeper;
use super::{AddressSpace, Error, Object};
use crate::store::{DeadlineStore, Direct, FileOptions, FileStore, Store, StoreError, ZstdStore};
use crate::units::PAGE_SIZE;

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
    /// Read-only; direct or buffered as it is better.
    #[must_use]
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// For writing as well.
    #[must_use]
    pub fn write(mut self, write: bool) -> OpenOptions {
        self.write = write;
        self
    }

    /// Makes the file, where there is none.
    #[must_use]
    pub fn create(mut self, create: bool) -> OpenOptions {
        self.create = create;
        self
    }

    /// Whether reads and writes pass the kernel's own page cache by.
    #[must_use]
    pub fn direct(mut self, direct: Direct) -> OpenOptions {
        self.direct = direct;
        self
    }

    /// How long the object may become, in bytes: 64 GiB more than it has, unless said otherwise.
    #[must_use]
    pub fn len_max(mut self, bytes: u64) -> OpenOptions {
        self.len_max = Some(bytes);
        self
    }

    /// Takes a file as it is even where its name ends in `.zst`; otherwise such a file, opened
    /// read-only, is the file that was packed into it.
    #[must_use]
    pub fn plain(mut self, is_plain: bool) -> OpenOptions {
        self.is_plain = is_plain;
        self
    }

    /// How long a call of the store is waited for; see
    /// [`Builder::store_deadline`](super::Builder::store_deadline), which it goes before.
    #[must_use]
    pub fn store_deadline(mut self, deadline: Duration) -> OpenOptions {
        self.store_deadline = Some(deadline);
        self
    }

    /// Makes an object of a store of one's own, with the deadline and the greatest length of these
    /// options.
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
        let is_archive = path.extension().is_some_and(|extension| extension == "zst");
        if is_archive && !self.is_plain && !self.write {
            let options = self.clone().len_max(0);
            return options.open_store(space, ZstdStore::open(path)?);
        }
        let options = match (self.write, self.create) {
            (false, _) => FileOptions::read_only(),
            (true, false) => FileOptions::read_write(),
            (true, true) => FileOptions::read_write().create(),
        };
        let options = options.direct(self.direct);
        let store = FileStore::open(path, options)?;
        if self.write {
            return self.open_store(space, store);
        }
        self.clone().len_max(0).open_store(space, store)
    }

    /// Makes an object of `len` zeros that no file is behind. Its pages count against the memory of
    /// the address space as any object's; what has to go is compressed, and what is compressed goes
    /// to the swap file ([`Builder::swap`](super::Builder::swap)) where there is one. It can always
    /// be written, and ends, with its bytes, with its last handle and mapping. Of the options only
    /// [`Self::len_max`] has a meaning here.
    ///
    /// # Errors
    /// [`Error::NoMemory`], [`Error::TooLong`].
    pub fn memory(&self, space: &AddressSpace, len: u64) -> Result<Object, Error> {
        let store = Box::new(Memory { len: AtomicU64::new(len) });
        Object::make(space, store, self.len_max, Keeper::Engine)
    }
}

/// What stands for the store of an object that has none: the engine keeps its bytes.
struct Memory {
    len: AtomicU64,
}

impl Store for Memory {
    fn name(&self) -> &str {
        "a memory object"
    }

    fn len(&self) -> Result<u64, StoreError> {
        // Relaxed, as below: a number, which nothing else goes with.
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

    fn best_read_bytes(&self) -> usize {
        PAGE_SIZE
    }
}
