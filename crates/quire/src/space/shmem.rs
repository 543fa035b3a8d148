//! Blocks of page words beyond the arena: under them lies in swap what is no page of the arena.
//!
//! A packed page names its owner by number, and write-back, compaction and the swap file's cleaner
//! go from there to the owner's word. Numbers from the arena's end on are those of
//! [`Pages`](crate::page::Pages)' blocks. Such a word is `None`, `Same`, `Pool` or `File`, never
//! mapped: its lock guards the place in swap, and nothing else. It is locked for as long as a place
//! is read, changed or moved, by nobody who waits for anything but the swap file meanwhile.

use super::AddressSpace;
use crate::budget::Purpose;
use crate::mmu::Mmu;
use crate::page::{LockedPage, PageWord, Pages, Snapshot};
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

/// 512 words beyond the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ShmemBlock(pub u32);

impl<M: Mmu> AddressSpace<M> {
    /// Makes room for the words of so many pages beyond the arena, of a space that was not used yet.
    ///
    /// # Errors
    /// `NOMEM`.
    pub(crate) fn reserve_shmem(&mut self, pages: usize) -> Result<(), Errno> {
        self.pages = Pages::new(self.arena().len(), pages)?;
        Ok(())
    }

    /// Takes a block of words, all of them `None`, and charges it. `None`: there is no memory.
    pub(crate) fn take_shmem_block(&self) -> Option<ShmemBlock> {
        if !self.budget.try_charge(1, Purpose::Tables) {
            return None;
        }
        let block = self.pages.take_block();
        if block.is_none() {
            self.budget.uncharge(1);
        }
        block.map(ShmemBlock)
    }

    /// Gives a block back with all that its words have in swap. Nobody but write-back, compaction
    /// and the cleaner knows of its words any more. Sleeps for their locks.
    pub(crate) fn release_shmem_block(&self, block: ShmemBlock) {
        let pages = self.shmem_pages(block);
        for page in pages.pages() {
            let mut page = self.lock_page(page);
            self.free_place(page.content());
            page.drop_content_locked();
            page.leave_locked();
        }
        if !self.pages.clear_block(block.0) {
            pages.pages().for_each(|page| self.adopt_page(page).unlock());
        }
        self.pages.put_block(block.0);
        self.budget.uncharge(1);
    }

    /// The numbers of a block's words.
    pub(crate) fn shmem_pages(&self, block: ShmemBlock) -> PageRange {
        self.pages.range_beyond(block.0)
    }

    /// The word of the page that a packed page names as its owner. `None`: there is no such page.
    pub(crate) fn owner_word(&self, owner: PageNum) -> Option<&PageWord> {
        self.pages.get(owner)
    }

    /// Locks the page that a packed page names as its owner, if it is a page and free.
    pub(crate) fn try_lock_owner(&self, owner: PageNum) -> Option<LockedPage<'_, Self>> {
        let content = self.owner_word(owner)?.try_lock()?;
        Some(LockedPage::adopt(self, owner, content))
    }

    /// Lets go of what a locked word beyond the arena has in swap. The word is the caller's to
    /// change.
    pub(crate) fn free_place(&self, old: Snapshot) {
        old.stored().into_iter().for_each(|stored| self.free_stored(stored));
    }
}
