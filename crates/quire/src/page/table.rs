//! The table of pages: every page's word by its number, and what waits for one.
//!
//! The arena's pages come first, by their place in it. Behind them lie blocks of 512 that objects take
//! for their pages, and give back as a whole. A page's number is what its packed bytes name as their
//! owner. A word stays a page's word for as long as the table lives. Leaves charging to
//! [`crate::space`].
//!
//! Lock: the mutex of the free blocks, a leaf.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use linux_raw_sys::general::MADV_DONTNEED;

use super::wait::{Callback, Waiter};
use super::{Condition, PageWord, Parked, Parking, Snapshot, WaitTable};
use crate::sys::Errno;
use crate::sys::memory::{self, Table};
use crate::sys::mutex::Mutex;
use crate::sys::rank::{self, Rank};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

/// Faults that can wait for words that do not name their page.
const PARKED_MAX: usize = 512;

/// What is known of 512 pages together.
pub struct Block {
    /// Pages that are mapped; of an object, cached.
    pub mapped: AtomicU32,
    /// Pages of an object that are dirty.
    pub dirty: AtomicU32,
    /// Whether any page of it was ever touched; its page words are charged from then on.
    pub is_used: AtomicU32,
    /// Whether its pages are of an object with a store, and so are never in swap.
    has_store: AtomicU32,
    /// Of a free one beyond the arena: the next, plus one. Guarded by the mutex of the free blocks.
    next_free: AtomicU32,
}

memory::zeroed!(Block { mapped, dirty, is_used, has_store, next_free });

/// The free blocks beyond the arena: those that were used before, and those that never were.
struct FreeBlocks {
    /// Top of the stack that the links make, plus one; 0 is none.
    top: u32,
    /// How many were ever used: the lowest.
    fresh: u32,
}

pub struct Pages {
    words: Table<PageWord>,
    /// When each page left memory, by a clock of reclaim's; of a page in memory, when sampling looks at it. A hint.
    stamps: Table<AtomicU32>,
    blocks: Table<Block>,
    arena_pages: usize,
    /// One past the highest block of the arena that was ever used.
    arena_blocks: AtomicUsize,
    free: Mutex<rank::PageBlocks, FreeBlocks>,
    /// Blocks beyond the arena that were ever used.
    taken_blocks: AtomicUsize,
    pub waits: WaitTable,
    parked: Table<Waiter>,
}

// A block's words are one page of memory, which goes back to the kernel with them.
const _: () = assert!(BLOCK_PAGES * size_of::<PageWord>() == PAGE_SIZE);

impl Pages {
    /// A table for so many pages of arena, and so many beyond it (multiples of 512).
    pub fn new(arena_pages: usize, pages_beyond: usize) -> Result<Pages, Errno> {
        debug_assert!(arena_pages.is_multiple_of(BLOCK_PAGES), "the arena is whole blocks");
        let pages = arena_pages + pages_beyond;
        Ok(Pages {
            words: Table::new(pages)?,
            stamps: Table::new(pages)?,
            blocks: Table::new(pages >> BLOCK_ORDER)?,
            arena_pages,
            arena_blocks: AtomicUsize::new(0),
            free: Mutex::new(FreeBlocks { top: 0, fresh: 0 }),
            taken_blocks: AtomicUsize::new(0),
            waits: WaitTable::new()?,
            parked: Table::new(PARKED_MAX)?,
        })
    }

    #[inline]
    pub fn arena(&self) -> PageRange {
        PageRange::new(PageNum(0), self.arena_pages)
    }

    #[inline]
    pub fn word(&self, page: PageNum) -> &PageWord {
        &self.words[page.index()]
    }

    /// The same, if there is such a page.
    pub fn get(&self, page: PageNum) -> Option<&PageWord> {
        self.words.get(page.index())
    }

    /// When the page left memory last, or, while it is there, what sampling knows of it.
    pub fn stamp(&self, page: PageNum) -> &AtomicU32 {
        &self.stamps[page.index()]
    }

    #[inline]
    pub fn block(&self, page: PageNum) -> &Block {
        &self.blocks[page.block()]
    }

    pub fn block_range(&self, block: usize) -> PageRange {
        PageRange::new(PageNum((block << BLOCK_ORDER) as u64), BLOCK_PAGES)
    }

    pub fn note_used(&self, page: PageNum) {
        // Relaxed: tells those that go over the arena how far. What they find is under page locks.
        self.arena_blocks.fetch_max(page.block() + 1, Ordering::Relaxed);
    }

    /// Blocks of the arena, up to the highest that was ever used.
    pub fn used_arena(&self) -> &[Block] {
        &self.blocks[..self.arena_blocks.load(Ordering::Relaxed)]
    }

    /// The blocks of the arena that have mapped pages, as their pages.
    pub fn mapped_blocks(&self) -> impl Iterator<Item = PageRange> {
        let blocks = self.used_arena().iter().enumerate();
        // Relaxed: a block whose first page is being mapped may be missed.
        let mapped = blocks.filter(|(_, block)| block.mapped.load(Ordering::Relaxed) != 0);
        mapped.map(|(number, _)| self.block_range(number))
    }

    /// Blocks whose pages may be in swap, up to the highest of the arena and of objects that was
    /// ever used; see [`Self::swap_block`].
    pub fn swap_blocks(&self) -> usize {
        // Relaxed: tells write-back where to look.
        self.used_arena().len() + self.taken_blocks.load(Ordering::Relaxed)
    }

    /// The pages of such a block. `None` where it is not used, or its pages are never in swap.
    pub fn swap_block(&self, index: usize) -> Option<PageRange> {
        // Where the arena's become more meanwhile it is another block, which does not matter.
        let arena = self.used_arena().len();
        let beyond = index.checked_sub(arena);
        let block = beyond.map_or(index, |beyond| (self.arena_pages >> BLOCK_ORDER) + beyond);
        // Relaxed, as above.
        let known = self.blocks.get(block)?;
        let is_used = known.is_used.load(Ordering::Relaxed) != 0;
        let may_be_in_swap = known.has_store.load(Ordering::Relaxed) == 0;
        (is_used && may_be_in_swap).then(|| self.block_range(block))
    }

    /// Takes a block for pages of an object, whose words are zero. `None`: there is none left.
    pub fn take_block(&self, has_store: bool) -> Option<PageRange> {
        let number = {
            let mut free = self.free.lock();
            if let Some(number) = free.top.checked_sub(1) {
                // Relaxed, as in `put_block`: under the mutex.
                free.top = self.blocks[number as usize].next_free.load(Ordering::Relaxed);
                number
            } else {
                let number = (self.arena_pages >> BLOCK_ORDER) + free.fresh as usize;
                if number >= self.blocks.len() {
                    return None;
                }
                free.fresh += 1;
                self.taken_blocks.store(free.fresh as usize, Ordering::Relaxed);
                number as u32
            }
        };
        let block = &self.blocks[number as usize];
        // Relaxed: no object has it yet, and a thread that goes over all blocks may miss it.
        block.has_store.store(u32::from(has_store), Ordering::Relaxed);
        block.is_used.store(1, Ordering::Relaxed);
        Some(self.block_range(number as usize))
    }

    pub fn has_free_block(&self) -> bool {
        let free = self.free.lock();
        let beyond = self.blocks.len() - (self.arena_pages >> BLOCK_ORDER);
        free.top != 0 || (free.fresh as usize) < beyond
    }

    /// Locks a page whose block is going to be cleared, with no waiter left. The thread that unlocked it
    /// before may not have come to its queue yet, and would find nothing of the waiters there: their sign
    /// goes with the word.
    pub fn lock_to_clear(&self, page: PageNum, parking: &impl Parking<AtomicU64>) -> Snapshot {
        let word = self.word(page);
        loop {
            let content = self.waits.lock(word, parking);
            if !word.load().has_waiters() {
                return content;
            }
            let parked = self.waits.unlock(word, parking);
            debug_assert_eq!(parked, Parked::No, "a fault is parked on an object's {page:?}");
        }
    }

    /// Makes the words of a block beyond the arena ones that were never used. The caller has locked
    /// all of them by [`Self::lock_to_clear`], they are `None`, and no waiter can come.
    pub fn clear_block(&self, pages: PageRange) {
        let words = &self.words[pages.start.index()..pages.end.index()];
        debug_assert!(
            words.iter().all(|word| !word.load().has_parked() && self.waits.is_left(word)),
            "a page of {pages:?} has waiters, and its object has ended"
        );
        // All are locked, so no other thread has one: it finds the lock taken, or the zeros that are an
        // unlocked word.
        let start = NonNull::from(words).cast::<u8>().as_ptr() as usize;
        // SAFETY: one page of this table (asserted above, and the table is aligned to a page), whose
        // words are atomics, and for which zero is valid.
        let is_cleared = unsafe { memory::advise(start, PAGE_SIZE, MADV_DONTNEED) }.is_ok();
        if is_cleared {
            // The locks went with the words.
            rank::released(Rank::Page, words.len());
        } else {
            words.iter().for_each(|word| self.waits.clear_for_free(word));
        }
    }

    /// Gives back a block beyond the arena, whose words were never used, or are cleared.
    pub fn put_block(&self, pages: PageRange) {
        let block = self.block(pages.start);
        for count in [&block.mapped, &block.dirty, &block.is_used] {
            // Relaxed: the mutex publishes them to the thread that takes the block next.
            count.store(0, Ordering::Relaxed);
        }
        let mut free = self.free.lock();
        block.next_free.store(free.top, Ordering::Relaxed);
        free.top = pages.start.block() as u32 + 1;
    }

    /// Has the unlock of a page answer the fault at `answer`. `false` where the page is not locked
    /// any more, or too many faults wait already.
    pub fn park(&self, page: PageNum, answer: PageNum) -> bool {
        let word = self.word(page);
        let Some(record) = self.parked.iter().find(|record| record.claim()) else { return false };
        let callback = Callback::answer(answer);
        // SAFETY: claimed, so it is ours and in no queue; the records lie in memory of their own,
        // which is there as long as the table of waiters is.
        let is_parked =
            unsafe { self.waits.queue_callback(word, record, Condition::UNLOCKED, callback) };
        if !is_parked {
            record.unclaim();
        }
        is_parked
    }

    /// In a fork's child, before any other thread runs there: there are no waiters.
    pub fn after_fork_in_child(&self) {
        self.waits.after_fork_in_child();
        // Only those that are in use: a write to the others would take memory of the child's own.
        self.parked.iter().filter(|record| record.is_in_use()).for_each(Waiter::unclaim);
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::page::Kill;

    #[test]
    fn a_block_that_was_given_back_is_taken_again_as_if_it_was_never_used() {
        let pages = Pages::new(BLOCK_PAGES, 3 * BLOCK_PAGES).unwrap();
        let taken: Vec<_> = (0..3).map(|_| pages.take_block(false).unwrap()).collect();
        assert!(pages.take_block(false).is_none() && !pages.has_free_block());
        assert!(taken.iter().all(|range| range.start.index() >= pages.arena().len()));
        let block = pages.block(taken[1].start);
        block.mapped.store(1, Ordering::Relaxed);
        for word in taken[1].pages().map(|page| pages.word(page)) {
            word.try_lock().unwrap();
        }
        pages.clear_block(taken[1]);
        pages.put_block(taken[1]);
        assert_eq!(pages.take_block(true), Some(taken[1]));
        assert_eq!(block.mapped.load(Ordering::Relaxed), 0);
        let is_unused = |page| {
            let word: Snapshot = pages.word(page).load();
            word == Snapshot::new(crate::page::State::None, 0)
        };
        assert!(taken[1].pages().all(is_unused));
    }

    /// The faults that were answered.
    #[derive(Default)]
    struct Answered(Mutex<rank::FaultList, Vec<PageNum>>);

    impl Parking<AtomicU64> for Answered {
        fn wait(&self, _: &AtomicU64, _: u32, _: Kill<'_>) {
            panic!("no thread has the lock");
        }
        fn wake(&self, _: *const AtomicU64) {}
        fn answer(&self, page: PageNum) {
            self.0.lock().push(page);
        }
    }

    /// The thread that unlocks is between the unlock and the queue, and will find the words zero.
    #[test]
    fn a_fault_that_waits_for_a_page_is_answered_before_the_page_is_cleared() {
        let pages = Pages::new(BLOCK_PAGES, BLOCK_PAGES).unwrap();
        let (answered, block) = (Answered::default(), pages.take_block(false).unwrap());
        let fault = PageNum(5);
        pages.word(block.start).try_lock().unwrap();
        assert!(pages.park(block.start, fault));
        assert!(pages.word(block.start).release().has_waiters());
        for page in block.pages() {
            let _ = pages.lock_to_clear(page, &answered);
        }
        pages.clear_block(block);
        assert_eq!(*answered.0.lock(), [fault]);
        assert!(!pages.word(block.start).load().has_waiters());
    }

    #[test]
    fn write_back_goes_over_the_used_blocks_whose_pages_may_be_in_swap() {
        let pages = Pages::new(2 * BLOCK_PAGES, 2 * BLOCK_PAGES).unwrap();
        let found = || (0..pages.swap_blocks()).filter_map(|at| pages.swap_block(at));
        assert_eq!(found().count(), 0);
        let last = PageNum(BLOCK_PAGES as u64);
        pages.block(last).is_used.store(1, Ordering::Relaxed);
        pages.note_used(last);
        let with_store = pages.take_block(true).unwrap();
        let without = pages.take_block(false).unwrap();
        let arena = PageRange::new(last, BLOCK_PAGES);
        assert_eq!(found().collect::<Vec<_>>(), [arena, without]);
        pages.put_block(without);
        assert_eq!(found().collect::<Vec<_>>(), [arena], "{with_store:?} is never in swap");
    }
}
