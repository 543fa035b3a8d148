//! What mapping objects takes beyond [`Mmu`]: shared memory that several ranges show at once.

#![deny(unsafe_code)]

use super::{Done, Mmu, Prot, Protection};
use crate::sys::Errno;
#[cfg(feature = "simulated")]
use crate::units::PageNum;
use crate::units::{ObjectPage, ObjectRange, PageRange};

/// Shared memory in which an object's page cache lives: a memfd, page for page at the object's own
/// offsets, with a hole where nothing is cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memfd {
    /// A descriptor, or what else the MMU knows it by.
    pub number: i32,
    pub alias: Alias,
}

/// Where an MMU may map all of a memfd for itself, to fill it: bytes from an address on. No thread
/// touches them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Alias {
    pub start: usize,
    pub len: usize,
}

/// Maps pages of memfds.
///
/// Locks: none, as for [`Mmu`]. The caller holds the page locks of all pages of the memfd that are
/// named, and the window's lock of all pages of the arena, but for [`Self::map_object`], for which
/// it holds the space's lock.
///
/// # Errors
/// Of all calls: the kernel's.
pub trait ObjectMmu: Mmu {
    /// Opens a memfd that will be `pages_max` long at most.
    fn memfd_open(&self, pages_max: usize) -> Result<Memfd, Errno>;

    /// Gives a memfd back; nothing maps it any more.
    fn memfd_close(&self, memfd: Memfd);

    /// Makes a memfd `pages` long: an access behind its end is a SIGBUS.
    fn memfd_resize(&self, memfd: Memfd, pages: usize) -> Result<(), Errno>;

    /// Puts bytes into the cache, inside of the memfd's length: whole pages, or into one that is
    /// there.
    fn memfd_write(&self, memfd: Memfd, offset: u64, bytes: &[u8]) -> Result<(), Errno>;

    /// The same for whole pages that are not there, as a rule: many at once take less by this.
    fn memfd_fill(&self, memfd: Memfd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.memfd_write(memfd, offset, bytes)
    }

    /// Reads bytes of cached pages.
    fn memfd_read(&self, memfd: Memfd, offset: u64, into: &mut [u8]) -> Result<(), Errno>;

    /// Drops pages from the cache, wherever they are mapped.
    fn memfd_punch(&self, memfd: Memfd, pages: ObjectRange) -> Result<(), Errno>;

    /// Shows a memfd from page `first` on at `pages`, with nothing mapped yet.
    fn map_object(
        &self,
        pages: PageRange,
        memfd: Memfd,
        first: ObjectPage,
        prot: Prot,
    ) -> Result<(), Errno>;

    /// Whether the thread that faults serves itself, so that it must be told of an error: the mark
    /// of a page that cannot be read would send it here again.
    fn is_inline(&self) -> bool {
        false
    }

    /// Maps what is cached for `pages`, and answers the faults that wait for them. Stops at the
    /// first page that is mapped already ([`super::Refusal::Exists`]) or not cached.
    fn map_cached(&self, pages: PageRange, protection: Protection) -> Done;
}

/// A page of a memfd that a page of the arena shows.
#[cfg(feature = "simulated")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shown {
    pub memfd: Memfd,
    pub page: ObjectPage,
}

/// An MMU of objects that tests can look into.
#[cfg(feature = "simulated")]
pub trait InspectObjects: ObjectMmu + super::Inspect {
    /// What of an object a page of the arena shows.
    fn shown_at(&self, page: PageNum) -> Option<Shown>;
    fn is_in_memfd(&self, memfd: Memfd, page: ObjectPage) -> bool;
    fn memfd_pages(&self) -> usize;
}
