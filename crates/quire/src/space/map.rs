//! map: ranges come to the program.

use core::sync::atomic::Ordering;

use super::vma::{Attributes, Kind};
use super::{Layout, VmSpace};
use crate::mmu::{Mmu, Prot};
use crate::sys::Errno;
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

impl<M: Mmu> VmSpace<M> {
    /// Maps `pages` pages of zeros with rights `prot` where there is room, at `hint` if it is
    /// free.
    ///
    /// # Errors
    /// `NOMEM` where the arena or the VMA table is full, or the kernel refuses.
    pub fn map(
        &self,
        layout: &mut Layout<'_>,
        hint: Option<PageNum>,
        pages: usize,
        prot: Prot,
    ) -> Result<PageNum, Errno> {
        let start = self.find_room(layout, hint, pages)?;
        self.install(layout, PageRange::new(start, pages), prot)?;
        Ok(start)
    }

    pub(super) fn find_room(
        &self,
        layout: &Layout<'_>,
        hint: Option<PageNum>,
        pages: usize,
    ) -> Result<PageNum, Errno> {
        // Large ranges start at a block: their folios can be whole.
        let align = if pages >= BLOCK_PAGES { BLOCK_PAGES as u64 } else { 1 };
        let limit = self.arena().len() as u64;
        self.vmas.find_gap(pages, align, hint, limit, &layout.locked).ok_or(Errno::NOMEM)
    }

    /// Maps `range` anew, whatever was there.
    pub fn map_fixed(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        self.unmap(layout, range)?;
        self.install(layout, range, prot)
    }

    pub(super) fn install(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        let locks_future = self.locks_future.load(Ordering::Relaxed);
        let is_mlocked = locks_future && self.can_mlock(layout, range);
        let attributes = Attributes { is_mlocked, ..Attributes::anonymous(prot) };
        self.install_with(layout, range, attributes)
    }

    /// The same for a VMA of whatever attributes.
    pub(crate) fn install_with(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        attributes: Attributes,
    ) -> Result<(), Errno> {
        let prot = attributes.prot;
        // Rights first: what is found by a fault must be allowed.
        self.give_rights(layout, range, prot)?;
        if let Err(error) = self.vmas.insert(range, attributes, &layout.locked) {
            self.leave_rights(layout, range, prot == Prot::READ_WRITE);
            return Err(error);
        }
        self.budget.add_managed(range.len() as isize);
        Ok(())
    }

    /// Makes room for a mapping that is not ours: what was there is gone, and the range is known
    /// as foreign until it is unmapped. The caller maps it while it holds the space's lock.
    pub fn map_foreign(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        self.mmu.expect_foreign()?;
        self.unmap(layout, range)?;
        let attributes = Attributes { kind: Kind::Foreign, ..Attributes::anonymous(Prot::NONE) };
        self.insert_vma(layout, range, attributes)
    }
}
