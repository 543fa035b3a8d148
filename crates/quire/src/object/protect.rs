//! protect: a mapping gets other rights.
//!
//! The VMA first, so that what is mapped from now on is mapped by its new rights; a fault that has
//! seen the old ones holds its window's lock, which is taken afterwards. What a window shows whole is
//! concealed there: the kernel reports nothing of it, and a write would go by us. Then the rights
//! themselves. Nothing has to be unmapped, and O2 is not touched: what a window has as writable is
//! DIRTY, whatever the rights, and is protected by the next write-back as ever.
//!
//! Locks: the space's; `i_mmap` exclusive; windows', one at a time.

use super::{Object, ObjectId, Objects};
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::Layout;
use crate::space::vma::{Backing, Kind};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// Gives a whole mapping, as [`Self::map`] and its like returned it, other rights.
    ///
    /// # Errors
    /// `NOMEM`, and nothing has changed.
    pub fn protect(&self, range: PageRange, prot: Prot) -> Result<(), Errno> {
        let space = &self.space;
        let mut layout = space.lock();
        let vma = space.next_vma(&layout, range.start).ok_or(Errno::NOMEM)?;
        let before = vma.attributes.prot;
        if before == prot {
            return Ok(());
        }
        if vma.attributes.kind == Kind::Private {
            return space.protect(&mut layout, range, prot);
        }
        let backing = vma.attributes.backing;
        let changed = self.set_rights(&mut layout, range, backing, prot);
        if changed.is_err() {
            // Where it is refused as well the rights are those of the VMA all the same, or fewer.
            let _ = self.set_rights(&mut layout, range, backing, before);
        }
        changed
    }

    fn set_rights(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        backing: Backing,
        prot: Prot,
    ) -> Result<(), Errno> {
        let object = self.object(ObjectId(backing.object));
        self.space.set_prot(layout, range, prot)?;
        self.change_mapping(object, range, backing, |mapping| mapping.prot = prot);
        for part in range.by_block() {
            if !self.conceal(&mut self.windows.lock(part.start), part.start) {
                return Err(Errno::NOMEM);
            }
        }
        let done = self.space.mmu().protect(range, prot);
        if done.refusal.is_some() { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// Changes what the reverse map has of the mapping at `range`.
    pub(super) fn change_mapping(
        &self,
        object: &Object,
        range: PageRange,
        backing: Backing,
        change: impl FnOnce(&mut super::i_mmap::Mapping),
    ) {
        let mut tree = object.i_mmap.i_mmap_lock_write(&self.i_mmaps);
        let pages = ObjectRange::new(backing.object_page(range.start), range.len());
        let found = tree.overlapping(pages).find(|(_, other)| other.id == backing.mapping);
        let changed = found.and_then(|(node, mut mapping)| {
            change(&mut mapping);
            tree.change(node, mapping)
        });
        debug_assert!(changed.is_some(), "every mapping is in its object's tree");
    }
}
