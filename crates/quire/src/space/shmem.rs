//! Page words beyond the arena: under them lies in swap what is no page of the arena.
//!
//! A packed page names its owner by number, and write-back, compaction and the swap file's cleaner
//! go from there to the owner's word. Numbers from the arena's end on are words of this table. It
//! owns them by the block of 512, which is taken as a whole and given back as a whole, and leaves
//! to whoever took a block what its words stand for. Such a word is `None`, `Same`, `Pool` or
//! `File`, never mapped: its lock guards the place in swap, and nothing else.
//!
//! Locks: the free list's mutex, a leaf. A word of this table is locked for as long as a place is
//! read, changed or moved, by nobody who waits for anything but the swap file meanwhile.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use linux_raw_sys::general::MADV_DONTNEED;
use rustix_futex_sync::Mutex;

use super::AddressSpace;
use crate::budget::Purpose;
use crate::mmu::Mmu;
use crate::page::{LockedPage, PageWord, Snapshot};
use crate::sys::Errno;
use crate::sys::memory::{self, Table};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

/// The free blocks: those that were used before, and those that never were.
struct Free {
    /// Top of the stack that the links make, plus one; 0 is none.
    top: u32,
    /// The first block that was never used.
    fresh: u32,
}

/// The words, and which of their blocks are free.
pub(crate) struct ShmemWords {
    words: Table<PageWord>,
    /// By block: the next free one, plus one. Guarded by `free`.
    links: Table<AtomicU32>,
    free: Mutex<Free>,
    /// One past the highest block that was ever used.
    used_max: AtomicUsize,
}

/// 512 words of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ShmemBlock(pub u32);

// A block's words are one page of memory, which goes back to the kernel with them.
const _: () = assert!(BLOCK_PAGES * size_of::<PageWord>() == PAGE_SIZE);

impl ShmemWords {
    pub fn new(pages: usize) -> Result<ShmemWords, Errno> {
        Ok(ShmemWords {
            words: Table::new(pages)?,
            links: Table::new(pages >> BLOCK_ORDER)?,
            free: Mutex::new(Free { top: 0, fresh: 0 }),
            used_max: AtomicUsize::new(0),
        })
    }

    /// One past the highest block that was ever used.
    pub fn blocks_used_max(&self) -> usize {
        // Relaxed: tells write-back where to look.
        self.used_max.load(Ordering::Relaxed)
    }

    fn pop(&self) -> Option<ShmemBlock> {
        let mut free = self.free.lock();
        if let Some(block) = free.top.checked_sub(1) {
            // Relaxed, as in `push`: under the mutex.
            free.top = self.links[block as usize].load(Ordering::Relaxed);
            return Some(ShmemBlock(block));
        }
        if free.fresh as usize >= self.links.len() {
            return None;
        }
        free.fresh += 1;
        self.used_max.store(free.fresh as usize, Ordering::Relaxed);
        Some(ShmemBlock(free.fresh - 1))
    }

    fn push(&self, block: ShmemBlock) {
        let mut free = self.free.lock();
        self.links[block.0 as usize].store(free.top, Ordering::Relaxed);
        free.top = block.0 + 1;
    }

    pub fn word(&self, index: usize) -> &PageWord {
        &self.words[index]
    }

    fn block(&self, block: ShmemBlock) -> &[PageWord] {
        &self.words[(block.0 as usize) << BLOCK_ORDER..][..BLOCK_PAGES]
    }
}

impl<M: Mmu> AddressSpace<M> {
    /// Makes room for the words of so many pages beyond the arena.
    ///
    /// # Errors
    /// `NOMEM`.
    pub(crate) fn reserve_shmem(&mut self, pages: usize) -> Result<(), Errno> {
        self.shmem = ShmemWords::new(pages)?;
        Ok(())
    }

    /// Takes a block of words, all of them `None`, and charges it. `None`: there is no memory.
    pub(crate) fn take_shmem_block(&self) -> Option<ShmemBlock> {
        if !self.budget.try_charge(1, Purpose::Tables) {
            return None;
        }
        let block = self.shmem.pop();
        if block.is_none() {
            self.budget.uncharge(1);
        }
        block
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
        // All are locked, so nobody has one: who tries a lock finds it taken, or the zeros that
        // are an unlocked word. Nobody sleeps for one, for only a block's taker does that.
        let start = NonNull::from(self.shmem.block(block)).cast::<u8>().as_ptr() as usize;
        // SAFETY: one page of this table (asserted above, and the table is aligned to 2 MiB), whose
        // words are atomics, and for which zero is valid.
        let is_given_back = unsafe { memory::advise(start, PAGE_SIZE, MADV_DONTNEED) }.is_ok();
        if !is_given_back {
            pages.pages().for_each(|page| self.adopt_page(page).unlock());
        }
        self.shmem.push(block);
        self.budget.uncharge(1);
    }

    /// The numbers of a block's words.
    pub(crate) fn shmem_pages(&self, block: ShmemBlock) -> PageRange {
        let start = self.words.len() + ((block.0 as usize) << BLOCK_ORDER);
        PageRange::new(PageNum(start as u64), BLOCK_PAGES)
    }

    /// The word of the page that a packed page names as its owner. `None`: there is no such page.
    pub(crate) fn owner_word(&self, owner: PageNum) -> Option<&PageWord> {
        let is_page = owner.index() < self.words.len() + self.shmem.words.len();
        is_page.then(|| self.word(owner))
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
