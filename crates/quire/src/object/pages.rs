//! An object's pages in the table of pages ([`crate::page::table`]).
//!
//! Owns which block of the table has the words of which 512 pages of an object. A block is taken
//! and charged when the first of them is used, and given back when the object ends; a page whose
//! block was never taken is `None`. Locks are those of any page, by its number there. A run of
//! locked pages is named by its pages of the object, and each lock is taken over where it is given
//! back ([`Objects::adopt`]): a range of guards is as large as a page of memory, for which a
//! signal's stack has no room.

use core::sync::atomic::Ordering;

use super::{Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Block, Interrupted, Kill, LockedPage, Snapshot, State, Stored};
use crate::space::VmSpace;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PageNum, PageRange};

pub(super) type Locked<'a, M> = LockedPage<'a, VmSpace<M>>;

/// Whether a page is not in the cache, and can be read into it.
pub(super) const fn is_absent(word: Snapshot) -> bool {
    matches!(word.state(), State::None) || word.state().is_swapped()
}

impl VmObject {
    /// The first page of the table's block that has a page's word.
    fn words_of(&self, page: ObjectPage) -> Option<PageNum> {
        // SeqCst: who shortens the object has noted its new length before, and whoever takes a
        // block looks at the length afterwards. Acquire would do for the number itself.
        let number = self.blocks[page.block()].load(Ordering::SeqCst);
        Some(PageNum(u64::from(number.checked_sub(1)?) << BLOCK_ORDER))
    }

    /// Whether a page's block has words; all its pages are `None` else.
    pub(super) fn has_words(&self, page: ObjectPage) -> bool {
        self.words_of(page).is_some()
    }

    /// A page's number, if its block has words.
    pub(super) fn find_number(&self, page: ObjectPage) -> Option<PageNum> {
        Some(self.words_of(page)?.add(page.index() % BLOCK_PAGES))
    }

    /// A page's number; its block has words.
    pub(super) fn number(&self, page: ObjectPage) -> PageNum {
        self.find_number(page).expect("the words of this page are in use")
    }

    /// The parts of `pages` whose blocks have words, cut at blocks.
    pub(super) fn used_parts(&self, pages: ObjectRange) -> impl Iterator<Item = ObjectRange> {
        pages.by_block().filter(|part| self.has_words(part.start))
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Takes and charges the words of a page's block before they are used; `false` where there is no
    /// memory.
    pub(super) fn use_words(&self, object: &VmObject, page: ObjectPage) -> bool {
        if object.has_words(page) {
            return true;
        }
        let Some(taken) = self.space.take_object_block(!object.is_memory) else { return false };
        let number = taken.start.block() as u32 + 1;
        let block = &object.blocks[page.block()];
        // SeqCst: see `words_of`.
        let is_first = block.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
        if is_first.is_err() {
            self.space.put_object_block(taken);
        }
        true
    }

    /// Gives back the words of an object that nobody uses any more, and all that it has in swap.
    pub(super) fn release_words(&self, object: &VmObject) {
        for number in object.blocks.iter() {
            // Acquire: what other users did comes before.
            if let Some(block) = number.load(Ordering::Acquire).checked_sub(1) {
                let start = PageNum(u64::from(block) << BLOCK_ORDER);
                self.space.release_object_block(PageRange::new(start, BLOCK_PAGES));
            }
        }
    }

    pub fn snapshot(&self, object: &VmObject, page: ObjectPage) -> Snapshot {
        let none = Stored::Nothing.content();
        object.find_number(page).map_or(none, |number| self.space.snapshot(number))
    }

    /// Locks a page whose block has words, sleeping where it must.
    pub(super) fn lock(&self, object: &VmObject, page: ObjectPage) -> Locked<'_, M> {
        self.space.lock_page(object.number(page))
    }

    /// The same, until `kill` ends it.
    pub(super) fn lock_killable(
        &self,
        object: &VmObject,
        page: ObjectPage,
        kill: Kill<'_>,
    ) -> Result<Locked<'_, M>, Interrupted> {
        self.space.lock_page_killable(object.number(page), kill)
    }

    /// Locks a page if it is free, and as it should be; one whose block has no words is not free.
    pub(super) fn try_lock_if(
        &self,
        object: &VmObject,
        page: ObjectPage,
        is_wanted: impl FnMut(Snapshot) -> bool,
    ) -> Option<Locked<'_, M>> {
        self.space.try_lock_if(object.find_number(page)?, is_wanted)
    }

    /// Does the same, and leaves it locked; `false`: it is not locked by this.
    pub(super) fn try_lock_and_leave(
        &self,
        object: &VmObject,
        page: ObjectPage,
        is_wanted: impl FnMut(Snapshot) -> bool,
    ) -> bool {
        self.try_lock_if(object, page, is_wanted).map(Locked::leave_locked).is_some()
    }

    /// Takes over the lock of a page that was left locked.
    pub(super) fn adopt(&self, object: &VmObject, page: ObjectPage) -> Locked<'_, M> {
        self.space.adopt_page(object.number(page))
    }

    /// Unlocks pages that were left locked, unchanged.
    pub(super) fn unlock_pages(&self, object: &VmObject, pages: ObjectRange) {
        pages.pages().for_each(|page| self.adopt(object, page).unlock());
    }

    /// What is known of the 512 pages around a page; `None` where they have no words.
    pub(super) fn find_block(&self, object: &VmObject, page: ObjectPage) -> Option<&Block> {
        Some(self.space.block(object.find_number(page)?))
    }

    pub(super) fn block(&self, object: &VmObject, page: ObjectPage) -> &Block {
        self.space.block(object.number(page))
    }

    pub(super) fn count_cached(&self, object: &VmObject, page: ObjectPage, pages: usize) {
        // Relaxed, here and below: they tell reclaim and write-back where to look.
        self.block(object, page).mapped.fetch_add(pages as u32, Ordering::Relaxed);
        object.cached.fetch_add(pages, Ordering::Relaxed);
        self.cached.fetch_add(pages, Ordering::Relaxed);
    }

    /// The same for pages that have left it.
    pub(super) fn count_uncached(&self, object: &VmObject, page: ObjectPage, pages: usize) {
        self.block(object, page).mapped.fetch_sub(pages as u32, Ordering::Relaxed);
        object.cached.fetch_sub(pages, Ordering::Relaxed);
        self.cached.fetch_sub(pages, Ordering::Relaxed);
    }

    pub(super) fn count_dirtied(&self, object: &VmObject, page: ObjectPage) {
        self.block(object, page).dirty.fetch_add(1, Ordering::Relaxed);
        object.dirty.fetch_add(1, Ordering::Relaxed);
    }

    /// The same for one that is dirty no more.
    pub(super) fn count_cleaned(&self, object: &VmObject, page: ObjectPage) {
        self.block(object, page).dirty.fetch_sub(1, Ordering::Relaxed);
        object.dirty.fetch_sub(1, Ordering::Relaxed);
    }
}
