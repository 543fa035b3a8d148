//! Mappings that get other rights, or another length; the names are memmap2's.

use core::fmt;

use super::Error;
use super::mapping::{Mapping, MappingMut, Raw, Sharing};
use crate::mmu::Prot;
use crate::space::remap::Placement;
use crate::sys::Errno;
use crate::units::PAGE_SIZE;

/// How a mapping may get another length.
#[derive(Clone, Copy, Debug, Default)]
pub struct RemapOptions {
    may_move: bool,
}

impl RemapOptions {
    /// The mapping keeps its address.
    #[must_use]
    pub fn new() -> RemapOptions {
        RemapOptions::default()
    }

    /// Whether the mapping may move to another address where there is no room behind it.
    #[must_use]
    pub fn may_move(mut self, may_move: bool) -> RemapOptions {
        self.may_move = may_move;
        self
    }
}

/// A mapping that could not be changed.
pub struct Unchanged<M> {
    /// The mapping, as it was.
    pub mapping: M,
    /// Why it could not be changed.
    pub error: Error,
}

impl<M> From<Unchanged<M>> for Error {
    fn from(unchanged: Unchanged<M>) -> Error {
        unchanged.error
    }
}

impl<M> fmt::Debug for Unchanged<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<M> fmt::Display for Unchanged<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<M> std::error::Error for Unchanged<M> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl Raw {
    pub(super) fn protect(&self, prot: Prot) -> Result<(), Error> {
        let changed = self.object.objects().protect(self.range, prot);
        changed.map_err(|errno| Error::NoMemory { doing: "change the rights of a mapping", errno })
    }

    pub(super) fn remap(&mut self, len: usize, options: RemapOptions) -> Result<(), Error> {
        let bad = || self.object.bad_range(self.offset, len as u64);
        let end = self.offset.checked_add(len as u64).ok_or_else(bad)?;
        // A mapping may keep what it has, even where the object has become shorter since.
        let is_behind = end > self.object.len() && len > self.len && !self.is_beyond_end;
        if len == 0 || is_behind {
            return Err(bad());
        }
        let pages = self.lead().checked_add(len).ok_or_else(bad)?.div_ceil(PAGE_SIZE);
        let placement = if options.may_move { Placement::Anywhere } else { Placement::InPlace };
        let objects = self.object.objects();
        let range = objects.remap(self.range, pages, placement).map_err(|errno| match errno {
            Errno::INVAL => bad(),
            errno => Error::NoMemory { doing: "change the length of a mapping", errno },
        })?;
        self.start = objects.space.mmu().address(range.start) + self.lead();
        self.range = range;
        self.len = len;
        Ok(())
    }
}

impl Mapping {
    /// Makes the mapping writable. A private copy stays one: what is written is seen in it alone.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::NoMemory`]; the mapping is in the error, as it was.
    ///
    /// # Safety
    /// As for [`MapOptions::map_mut`](super::MapOptions::map_mut): what is written must not be read
    /// elsewhere meanwhile, for instance by another mapping of the object.
    #[allow(clippy::result_large_err, reason = "the mapping comes back in it")]
    pub unsafe fn make_mut(self) -> Result<MappingMut, Unchanged<Mapping>> {
        let may_write = match self.raw.sharing {
            Sharing::Shared => self.raw.object.check_writable(),
            Sharing::Private => Ok(()),
        };
        match may_write.and_then(|()| self.raw.protect(Prot::READ_WRITE)) {
            Ok(()) => Ok(MappingMut { raw: self.raw }),
            Err(error) => Err(Unchanged { mapping: self, error }),
        }
    }
}
