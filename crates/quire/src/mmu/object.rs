//! What mapping objects takes beyond [`Mmu`]: shared memory that several ranges show at once.

use core::ptr::NonNull;

use super::{Done, Mmu, Prot, Protection};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange, PageRange};

/// Shared memory in which an object's page cache lives: a memfd, page for page at the object's own
/// offsets, with a hole where nothing is cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Home {
    /// Its number: a descriptor, or whatever the MMU knows it by.
    pub number: i32,
}

/// Maps pages of homes.
///
/// Locks: none, as for [`Mmu`]. The caller holds the page locks of all pages of the home that are
/// named, and the window's lock of all pages of the arena, but for [`Self::map_object`], for which
/// it holds the space's lock.
pub trait ObjectMmu: Mmu {
    /// Makes an empty home.
    ///
    /// # Errors
    /// The kernel's.
    fn home_open(&self) -> Result<Home, Errno>;

    /// Gives a home back; nothing maps it any more.
    fn home_close(&self, home: Home);

    /// Makes a home `pages` long: an access behind its end is a SIGBUS.
    ///
    /// # Errors
    /// The kernel's.
    fn home_resize(&self, home: Home, pages: usize) -> Result<(), Errno>;

    /// Puts bytes into the cache, inside of the home's length: whole pages, or into one that is
    /// there.
    ///
    /// # Errors
    /// The kernel's: `NOMEM`, `NOSPC`.
    fn home_write(&self, home: Home, offset: u64, bytes: &[u8]) -> Result<(), Errno>;

    /// Reads bytes of cached pages.
    ///
    /// # Errors
    /// The kernel's.
    fn home_read(&self, home: Home, offset: u64, into: &mut [u8]) -> Result<(), Errno>;

    /// Drops pages from the cache, wherever they are mapped.
    ///
    /// # Errors
    /// The kernel's.
    fn home_punch(&self, home: Home, pages: ObjectRange) -> Result<(), Errno>;

    /// Shows a home from page `first` on at `pages`, with nothing mapped yet.
    ///
    /// # Errors
    /// The kernel's.
    fn map_object(
        &self,
        pages: PageRange,
        home: Home,
        first: ObjectPage,
        prot: Prot,
    ) -> Result<(), Errno>;

    /// Maps `pages` of a home for the engine itself, readable and writable, until it is closed.
    ///
    /// # Errors
    /// The kernel's; `NOSYS` where there is no such thing, nor [`Self::show`] and what follows it.
    fn home_view(&self, _home: Home, _pages: usize) -> Result<NonNull<u8>, Errno> {
        Err(Errno::NOSYS)
    }

    /// Gives a part of a view its memory, all of it: from then on it may be touched.
    ///
    /// # Errors
    /// The kernel's, mostly `NOMEM`; a part may have it then.
    fn view_populate(&self, _bytes: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// Ends a view.
    fn home_unview(&self, _view: NonNull<u8>, _pages: usize) {}

    /// Shows `home` from page `first` on at `pages`, in place of what they show, where nothing is
    /// mapped, and so that no access goes by us meanwhile. Waits for [`Self::serve_shows`]. Where
    /// [`Self::show_apart`] was before this needs none of the kernel's mappings more.
    ///
    /// # Errors
    /// The kernel's; all is as it was then.
    fn show(
        &self,
        _pages: PageRange,
        _home: Home,
        _first: ObjectPage,
        _prot: Prot,
    ) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// The same for one block, which may need mappings more.
    ///
    /// # Errors
    /// As for [`Self::show`]; `NOMEM` where there are no more.
    fn show_apart(
        &self,
        _pages: PageRange,
        _home: Home,
        _first: ObjectPage,
        _prot: Prot,
    ) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// The same for pages that are all cached and may not be written: they are mapped at once, and
    /// accesses are not reported until [`Self::conceal`].
    ///
    /// # Errors
    /// As for [`Self::show_apart`].
    fn show_whole(
        &self,
        _pages: PageRange,
        _home: Home,
        _first: ObjectPage,
        _prot: Prot,
    ) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// Unmaps what was shown whole; accesses are reported again.
    ///
    /// # Errors
    /// `NOMEM`; all is as it was then.
    fn conceal(&self, _pages: PageRange) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// Whether the thread that faults serves itself, so that it must be told of an error: the mark
    /// of a page that cannot be read would send it here again.
    fn is_inline(&self) -> bool {
        false
    }

    /// Maps what is cached for `pages`, and answers the faults that wait for them. Stops at the
    /// first page that is mapped already ([`super::Refusal::Exists`]) or not cached.
    fn map_cached(&self, pages: PageRange, protection: Protection) -> Done;
}
