//! What objects need of the address space: words for their pages, and what their mappings need.

use super::vma::Attributes;
use super::{Layout, VmSpace};
use crate::budget::Purpose;
use crate::mmu::Mmu;
use crate::page::{LockedPage, Pages};
use crate::sys::{Errno, memory};
use crate::units::{BLOCK_PAGES, ObjectPage, PageNum, PageRange};

/// Fewest pages of objects that words are reserved for: 4 GiB.
const PAGES_BEYOND_MIN: usize = 1 << 20;

impl<M: Mmu> VmSpace<M> {
    /// Makes room for the words of so many pages of objects, of a space that was not used yet; of
    /// fewer where address space is short.
    pub(crate) fn reserve_beyond(&mut self, pages: usize) -> Result<(), Errno> {
        // Of a limit, which is meant for the program, the words take about a sixteenth.
        let most = memory::address_limit().map_or(pages, |bytes| (bytes >> 7) as usize);
        let mut beyond = pages.min(most.next_power_of_two()).max(PAGES_BEYOND_MIN);
        loop {
            match Pages::new(self.arena().len(), beyond) {
                Ok(pages) => {
                    self.pages = pages;
                    return Ok(());
                }
                Err(error) if beyond == PAGES_BEYOND_MIN => return Err(error),
                Err(_) => beyond = (beyond / 16).max(PAGES_BEYOND_MIN),
            }
        }
    }

    /// Takes a block of words for pages of an object, all of them `None`, and charges it. `None`:
    /// there is no memory for it, or no number.
    pub(crate) fn take_object_block(&self, has_store: bool) -> Option<PageRange> {
        if !self.budget.try_charge(1, Purpose::Tables) {
            return None;
        }
        let block = self.pages.take_block(has_store);
        if block.is_none() {
            self.budget.uncharge(1);
        }
        block
    }

    /// Gives a block back whose words were never used.
    pub(crate) fn put_object_block(&self, pages: PageRange) {
        self.pages.put_block(pages);
        self.budget.uncharge(1);
    }

    /// Gives a block back with all that its pages have in swap. No object has it any more:
    /// nothing knows of its words but write-back, compaction and the cleaner. Sleeps for their locks.
    pub(crate) fn release_object_block(&self, pages: PageRange) {
        for page in pages.pages() {
            self.mmu.step();
            let content = self.pages.lock_to_clear(page, self);
            let mut page = LockedPage::adopt(self, page, content);
            self.release_stored(page.content());
            page.drop_content_locked();
            page.leave_locked();
        }
        self.pages.clear_block(pages);
        self.put_object_block(pages);
    }

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
        let start = self.find_room(layout, None, lead + pages)?;
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

    /// Takes `range` out of the VMAs, none of which reaches over its ends: that needs no room.
    pub(crate) fn remove_whole_vmas(&self, layout: &mut Layout<'_>, range: PageRange) {
        let removed = self.vmas.remove(range, &layout.locked);
        debug_assert!(removed.is_ok(), "a whole VMA goes without a split");
    }

    /// See [`VmaIndex::change_attributes`](super::VmaIndex). The kernel's rights are the caller's to change.
    pub(crate) fn change_vmas(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        change: impl Fn(Attributes) -> Attributes,
    ) -> Result<(), Errno> {
        self.vmas.change_attributes(range, &layout.locked, change)
    }

    /// A block's worth of zeros, to copy from.
    pub(crate) fn zeros(&self) -> &[u8] {
        // SAFETY: the table is never written, so that its bytes are as plain as they are atomic.
        unsafe { core::slice::from_raw_parts(self.zeros.as_ptr().cast(), self.zeros.len()) }
    }

    /// A page that no VMA has: no fault was asked for there.
    pub const NO_PAGE: PageNum = PageNum(u64::MAX);
}
