//! Mapping an object.

use super::mapping::{Raw, Sharing};
use super::{Error, Mapping, MappingCopy, MappingMut, Object};
use crate::mmu::Prot;
use crate::object::{FaultAround, MapRequest};
use crate::space::vma::Pattern;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

/// How an object is mapped; the names are memmap2's.
#[derive(Clone, Debug, Default)]
pub struct MapOptions {
    offset: u64,
    len: Option<u64>,
    pattern: Pattern,
    fault_around: FaultAround,
    populate: bool,
    is_beyond_end: bool,
}

impl MapOptions {
    /// Maps all of the object.
    #[must_use]
    pub fn new() -> MapOptions {
        MapOptions::default()
    }

    /// The first byte, which need not be a page's.
    #[must_use]
    pub fn offset(mut self, bytes: u64) -> MapOptions {
        self.offset = bytes;
        self
    }

    /// How many bytes; by default all to the object's end.
    #[must_use]
    pub fn len(mut self, bytes: u64) -> MapOptions {
        self.len = Some(bytes);
        self
    }

    /// How it will be used.
    #[must_use]
    pub fn pattern(mut self, pattern: Pattern) -> MapOptions {
        self.pattern = pattern;
        self
    }

    /// How many cached pages are mapped around a read fault.
    #[must_use]
    pub fn fault_around(mut self, fault_around: FaultAround) -> MapOptions {
        self.fault_around = fault_around;
        self
    }

    /// Has all of it read and mapped before the call returns, as far as memory allows.
    #[must_use]
    pub fn populate(mut self, populate: bool) -> MapOptions {
        self.populate = populate;
        self
    }

    /// Allows a mapping to reach behind the object's end, up to the length that the object may
    /// reach: an access there is a SIGBUS until the object has grown.
    #[must_use]
    pub fn beyond_end(mut self, is_beyond_end: bool) -> MapOptions {
        self.is_beyond_end = is_beyond_end;
        self
    }

    /// Maps an object to be read.
    ///
    /// # Errors
    /// [`Error::BadRange`], [`Error::NoMemory`]; with populate, [`Error::Store`].
    ///
    /// # Safety
    /// The bytes are a slice: as long as it is used, the object must not be written or shortened, in
    /// this program or in another. An access whose bytes cannot be read is a SIGBUS.
    pub unsafe fn map(&self, object: &Object) -> Result<Mapping, Error> {
        Ok(Mapping { raw: self.map_raw(object, Prot::READ, Sharing::Shared)? })
    }

    /// Maps an object to be read and written; writes reach the store some time later, or by a flush.
    ///
    /// # Errors
    /// As for [`Self::map`]; [`Error::ReadOnly`].
    ///
    /// # Safety
    /// As for [`Self::map`], and what is written must not be read elsewhere meanwhile.
    pub unsafe fn map_mut(&self, object: &Object) -> Result<MappingMut, Error> {
        object.check_writable()?;
        Ok(MappingMut { raw: self.map_raw(object, Prot::READ_WRITE, Sharing::Shared)? })
    }

    /// Maps a copy of an object to be read and written: what is written is seen in this mapping
    /// alone, and never reaches the store. A page is copied when it is first touched; a page that was
    /// only read may be copied again, from the object as it is then. What is written stays until
    /// the mapping goes, packed where memory is short ([`super::Builder::swap`] has room for what
    /// does not fit in).
    ///
    /// # Errors
    /// As for [`Self::map`].
    ///
    /// # Safety
    /// As for [`Self::map`]: a change of the object may show or not, and where the object is shortened
    /// an access to what was not written is a SIGBUS.
    pub unsafe fn map_copy(&self, object: &Object) -> Result<MappingCopy, Error> {
        Ok(MappingCopy { raw: self.map_raw(object, Prot::READ_WRITE, Sharing::Private)? })
    }

    /// Maps such a copy to be read only. The pages are the mapping's own: a later change of the object
    /// shows in those that were not read yet, or have gone since.
    ///
    /// # Errors
    /// As for [`Self::map_copy`].
    ///
    /// # Safety
    /// As for [`Self::map_copy`].
    pub unsafe fn map_copy_read_only(&self, object: &Object) -> Result<Mapping, Error> {
        Ok(Mapping { raw: self.map_raw(object, Prot::READ, Sharing::Private)? })
    }

    fn map_raw(&self, object: &Object, prot: Prot, sharing: Sharing) -> Result<Raw, Error> {
        let object_len = object.len();
        let len = self.len.unwrap_or_else(|| object_len.saturating_sub(self.offset));
        let bad = || object.bad_range(self.offset, len);
        let end = self.offset.checked_add(len).ok_or_else(bad)?;
        if len == 0 || (end > object_len && !self.is_beyond_end) {
            return Err(bad());
        }
        let size = PAGE_SIZE as u64;
        let first = ObjectPage(self.offset / size);
        let pages = ObjectRange { start: first, end: ObjectPage(end.div_ceil(size)) };
        let request =
            MapRequest { pages, prot, pattern: self.pattern, fault_around: self.fault_around };
        let objects = object.objects();
        let made = match sharing {
            Sharing::Private => objects.map_private(object.id(), request),
            Sharing::Shared => objects.map(object.id(), request),
        };
        let range = made.map_err(|errno| match errno {
            crate::sys::Errno::INVAL => bad(),
            errno => Error::NoMemory { doing: "map an object", errno },
        })?;
        let raw = Raw {
            object: object.clone(),
            range,
            start: objects.space.mmu().address(range.start) + (self.offset % size) as usize,
            offset: self.offset,
            len: len as usize,
            sharing,
            is_beyond_end: self.is_beyond_end,
        };
        drop(objects);
        if self.populate {
            raw.populate(0..raw.len)?;
        }
        Ok(raw)
    }
}
