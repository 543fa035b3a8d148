//! What the arena is registered for: missing pages, and write protection once something needs it.
//!
//! When a process ends or executes, and its engine's threads end first, the kernel walks every page
//! that is registered for write protection to lift it: at 64 MiB that takes longer than the exec. Most
//! processes never protect a page: they have no page that was swapped, nor one that a fork shares and
//! that must go (docs/decisions/0025).
//!
//! The change is one call over the whole arena, which is right only while all of it is the engine's: so
//! it is made before anything foreign is mapped there, if not earlier. What a program has mapped there
//! by bare system calls is left out where the kernel does not report its faults: files.
//!
//! Locks: `turn` is a leaf; the kernel's lock of the address space is taken below it.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicBool, Ordering};

use linux_raw_sys::general::{UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP};

use super::Userfaultfd;
use crate::sys::Errno;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::{PAGE_SHIFT, PageNum, PageRange};

/// Whether write protection is asked for.
#[derive(Default)]
pub(super) struct Modes {
    is_protectable: AtomicBool,
    turn: Mutex<rank::Modes, ()>,
}

impl Modes {
    /// For an arena of which nothing is registered yet.
    pub fn set_protectable(&self, is_protectable: bool) {
        self.is_protectable.store(is_protectable, Ordering::Relaxed);
    }

    pub fn is_protectable(&self) -> bool {
        // Acquire pairs with the release in `protect`: the kernel knows.
        self.is_protectable.load(Ordering::Acquire)
    }

    pub fn bits(&self) -> u32 {
        if self.is_protectable() {
            UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP
        } else {
            UFFDIO_REGISTER_MODE_MISSING
        }
    }
}

impl Userfaultfd {
    /// Asks for the faults of a stretch of the arena.
    pub fn register(&self, pages: PageRange) -> Result<(), Errno> {
        let len = pages.len() << PAGE_SHIFT;
        self.faults.register(self.address(pages.start), len, self.modes.bits())
    }

    /// As [`Self::register`], once the program has run: all of it that can be.
    pub(crate) fn register_rest(&self, pages: PageRange) -> Result<(), Errno> {
        self.register_rest_for(pages, self.modes.bits())
    }

    fn register_rest_for(&self, pages: PageRange, modes: u32) -> Result<(), Errno> {
        match self.faults.register(self.address(pages.start), pages.len() << PAGE_SHIFT, modes) {
            Err(Errno::INVAL | Errno::BUSY | Errno::PERM) if pages.len() > 1 => {
                let middle = pages.start.add(pages.len() / 2);
                self.register_rest_for(PageRange { end: middle, ..pages }, modes)?;
                self.register_rest_for(PageRange { start: middle, ..pages }, modes)
            }
            // A file, what another userfaultfd has, shared memory that is only read, or nothing.
            Err(Errno::INVAL | Errno::BUSY | Errno::PERM) => Ok(()),
            result => result,
        }
    }

    /// In a fork's child, before anything is registered. None of its pages is write-protected, even
    /// where its parent's are; so it begins anew, unless something foreign lies in the arena.
    pub(crate) fn begin_modes_in_child(&self, has_foreign: bool) {
        self.modes.set_protectable(has_foreign);
    }

    /// Whether pages of the arena can be write-protected.
    pub fn is_protectable(&self) -> bool {
        self.modes.is_protectable()
    }

    /// Makes it possible to write-protect pages; on a thread with the engine's descriptors.
    pub(super) fn make_protectable(&self) -> Result<(), Errno> {
        if self.modes.is_protectable() {
            return Ok(());
        }
        let _turn = self.modes.turn.lock();
        // Another may have had its turn, and something foreign lies there by now.
        if self.modes.is_protectable() {
            return Ok(());
        }
        let arena = PageRange::new(PageNum(0), self.arena_pages());
        self.register_rest_for(arena, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP)?;
        self.modes.is_protectable.store(true, Ordering::Release);
        Ok(())
    }
}
