//! What mappings of objects need of the address space.

use super::vma::{Attributes, Backing, Pattern, Vma};
use super::{AddressSpace, Layout};
use crate::mmu::{Mmu, Prot};
use crate::sys::Errno;
use crate::units::{BLOCK_PAGES, ObjectPage, PageNum, PageRange};

impl<M: Mmu> AddressSpace<M> {
    /// Finds room for pages of an object from `first` on: so that blocks of the object lie in
    /// blocks of the arena, where there is one whole.
    pub(crate) fn find_room_like(
        &self,
        layout: &Layout<'_>,
        pages: usize,
        first: ObjectPage,
    ) -> Result<PageRange, Errno> {
        let lead = first.index() % BLOCK_PAGES;
        let lead = if lead + pages >= BLOCK_PAGES { lead } else { 0 };
        let align = if lead + pages >= BLOCK_PAGES { BLOCK_PAGES as u64 } else { 1 };
        let limit = self.arena().len() as u64;
        let start = self
            .vmas
            .find_gap(pages + lead, align, None, limit, &layout.locked)
            .ok_or(Errno::NOMEM)?;
        Ok(PageRange::new(start.add(lead), pages))
    }

    pub(crate) fn insert_vma(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        attributes: Attributes,
    ) -> Result<(), Errno> {
        self.vmas.insert(range, attributes, &layout.locked)?;
        self.forget_open(range, &layout.locked);
        Ok(())
    }

    /// Takes a whole VMA away.
    pub(crate) fn remove_vma(&self, layout: &mut Layout<'_>, range: PageRange) {
        let removed = self.vmas.remove(range, &layout.locked);
        debug_assert!(removed.is_ok(), "a whole VMA goes without a split");
    }

    /// The same for a part of one, which may have to be split.
    ///
    /// # Errors
    /// `NOMEM` where the table is full; nothing has changed then.
    pub(crate) fn cut_vma(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        self.vmas.remove(range, &layout.locked)
    }

    /// Notes other rights of VMAs, which the caller gives them.
    pub(crate) fn set_prot(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        let change = |old| Attributes { prot, ..old };
        self.vmas.change_attributes(range, &layout.locked, change)
    }

    pub(crate) fn set_backing(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        backing: Backing,
    ) -> Result<(), Errno> {
        let change = |old| Attributes { backing, ..old };
        self.vmas.change_attributes(range, &layout.locked, change)
    }

    pub(crate) fn set_pattern(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        pattern: Pattern,
    ) -> Result<(), Errno> {
        let change = |old| Attributes { pattern, ..old };
        self.vmas.change_attributes(range, &layout.locked, change)
    }

    /// Whether a VMA is as it was when it was copied; see [`super::vma::VmaIndex::is_current`].
    pub(crate) fn is_current(&self, vma: &Vma) -> bool {
        self.vmas.is_current(vma)
    }

    /// Pages that a fault could charge at once.
    pub(crate) fn chargeable_now(&self) -> usize {
        self.budget.chargeable().saturating_sub(self.budget.reserve()).max(self.budget.slack())
    }

    /// A block's worth of zeros, to copy from.
    pub(crate) fn zeros(&self) -> &[u8] {
        // SAFETY: the table is never written, so that its bytes are as plain as they are atomic.
        unsafe { core::slice::from_raw_parts(self.zeros.as_ptr().cast(), self.zeros.len()) }
    }

    /// A page that no VMA has: no fault was asked for there.
    pub const NO_PAGE: PageNum = PageNum(u64::MAX);
}
