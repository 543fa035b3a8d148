//! The reverse map: what is done to locked pages in every mapping of their object.

use super::window::Mapped;
use super::{Objects, VmObject};
use crate::mmu::Protection;
use crate::mmu::object::ObjectMmu;
use crate::units::{ObjectRange, PageRange};

/// Whether locks may be slept for, or are only tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    Yes,
    No,
}

impl<M: ObjectMmu> Objects<M> {
    /// Unmaps locked pages everywhere; `false` where the lock was not to be had.
    pub(super) fn try_to_unmap(&self, object: &VmObject, pages: ObjectRange, wait: Wait) -> bool {
        self.for_each_mapping(object, pages, wait, |window, part| self.unmap_present(window, part))
    }

    /// Unmaps what a window has of a part of it: locked pages, or such that no VMA has any more.
    pub(super) fn unmap_present(&self, window: &mut Mapped, part: PageRange) {
        if let Some(present) = window.present_of(part) {
            // Before it is forgotten: what can be written must be known to be so. What lies between
            // is not mapped, or goes as well.
            self.space.mmu().unmap(present);
            window.clear(present);
        }
    }

    /// Forgets where locked, clean pages are mapped: their memfd drops them, and the kernel unmaps
    /// them then. `false` where the lock was not to be had.
    pub(super) fn try_to_forget(&self, object: &VmObject, pages: ObjectRange, wait: Wait) -> bool {
        self.for_each_mapping(object, pages, wait, |window, part| {
            debug_assert!(window.writable_of(part).is_none(), "a clean page is writable nowhere");
            if let Some(present) = window.present_of(part) {
                window.clear(present);
            }
        })
    }

    /// Makes the next write to locked pages fault, in every mapping; `false` where the lock was not
    /// to be had.
    pub(super) fn try_to_protect(&self, object: &VmObject, pages: ObjectRange, wait: Wait) -> bool {
        self.for_each_mapping(object, pages, wait, |window, part| {
            if let Some(writable) = window.writable_of(part) {
                let done = self.space.mmu().write_protect(writable, Protection::WriteProtected);
                window.protect(writable);
                if done.pages != writable.len() {
                    // No memory for the tables: what is not mapped cannot be written either.
                    self.space.mmu().unmap(writable);
                    window.clear(writable);
                }
            }
        })
    }

    /// Calls `visit` for each part of the arena, within one window, that shows some of `pages`;
    /// the window is locked.
    pub(super) fn for_each_mapping(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        wait: Wait,
        mut visit: impl FnMut(&mut Mapped, PageRange),
    ) -> bool {
        let tree = match wait {
            Wait::Yes => object.i_mmap.i_mmap_lock_read(&self.i_mmaps),
            Wait::No => match object.i_mmap.i_mmap_trylock_read(&self.i_mmaps) {
                Some(tree) => tree,
                None => return false,
            },
        };
        for (_, mapping) in tree.overlapping(pages) {
            for part in mapping.arena_range(pages).by_block() {
                visit(&mut self.windows.lock(part.start), part);
            }
        }
        true
    }
}
