//! Windows: what is mapped of objects, 2 MiB of the arena at a time.
//!
//! A window stands for one kernel page table. Its lock is held from the last look at the VMA until
//! the call that maps has returned, so that nothing lands in a mapping that was made in between;
//! a change of the layout bumps the VMA's count first and takes this lock afterwards.

use super::VmObject;
use crate::fault::LOCK_TURNS;
use crate::mmu::Protection;
use crate::space::vma::Vma;
use crate::sys::Errno;
use crate::sys::memory::{Table, zeroed};
use crate::sys::mutex::{Mutex, MutexGuard};
use crate::sys::rank;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, PageNum, PageRange};

const WORDS: usize = BLOCK_PAGES / 64;

/// What is mapped in 2 MiB of the arena.
#[derive(Default)]
pub struct Mapped {
    present: [u64; WORDS],
    /// Of those, the ones that can be written without a fault.
    writable: [u64; WORDS],
    /// Faults since the window was last empty: where many come, more is mapped around each.
    pub faults: u32,
}

fn bit(page: PageNum) -> (usize, u64) {
    let at = page.index() % BLOCK_PAGES;
    (at / 64, 1 << (at % 64))
}

impl Mapped {
    pub fn is_present(&self, page: PageNum) -> bool {
        let (word, bit) = bit(page);
        self.present[word] & bit != 0
    }

    pub fn is_writable(&self, page: PageNum) -> bool {
        let (word, bit) = bit(page);
        self.writable[word] & bit != 0
    }

    pub fn protection(&self, page: PageNum) -> Protection {
        if self.is_writable(page) { Protection::Writable } else { Protection::WriteProtected }
    }

    /// Notes that a page is mapped.
    pub fn set(&mut self, page: PageNum, protection: Protection) {
        let (word, bit) = bit(page);
        self.present[word] |= bit;
        if protection == Protection::Writable {
            self.writable[word] |= bit;
        }
    }

    /// Notes that pages fault at the next write.
    pub fn protect(&mut self, pages: PageRange) {
        for page in pages.pages() {
            let (word, bit) = bit(page);
            self.writable[word] &= !bit;
        }
    }

    /// Notes that pages are mapped no more.
    pub fn clear(&mut self, pages: PageRange) {
        self.protect(pages);
        for page in pages.pages() {
            let (word, bit) = bit(page);
            self.present[word] &= !bit;
        }
        if self.present == [0; WORDS] {
            self.faults = 0;
        }
    }

    /// The smallest range that holds all of `pages` for which `is` holds.
    fn hull(pages: PageRange, is: impl Fn(PageNum) -> bool) -> Option<PageRange> {
        let first = pages.pages().find(|&page| is(page))?;
        let last = pages.pages().rev().find(|&page| is(page))?;
        Some(PageRange { start: first, end: last.add(1) })
    }

    /// The smallest range that holds all mapped ones of `pages`, which lie in this window.
    pub fn present_of(&self, pages: PageRange) -> Option<PageRange> {
        Mapped::hull(pages, |page| self.is_present(page))
    }

    /// The same for those that can be written.
    pub fn writable_of(&self, pages: PageRange) -> Option<PageRange> {
        Mapped::hull(pages, |page| self.is_writable(page))
    }
}

/// A mapping of an object in one of its windows, whose lock is held.
pub struct View<'a> {
    pub object: &'a VmObject,
    pub vma: &'a Vma,
    pub window: MutexGuard<'a, rank::Window, Mapped>,
}

impl View<'_> {
    /// The object's page that is mapped at a page of the arena.
    pub fn object_page(&self, page: PageNum) -> ObjectPage {
        self.vma.attributes.backing.object_page(page)
    }

    /// What of the VMA lies in the window, which holds `page`.
    pub fn bounds(&self, page: PageNum) -> PageRange {
        let block = PageRange::new(page.align_down(BLOCK_ORDER), BLOCK_PAGES);
        self.vma.range.intersect(block)
    }
}

#[repr(align(64))]
struct WindowLock {
    lock: Mutex<rank::Window, Mapped>,
}

zeroed!(Mapped { present, writable, faults });
zeroed!(WindowLock { lock });

pub struct Windows {
    windows: Table<WindowLock>,
}

impl Windows {
    pub fn new(count: usize) -> Result<Windows, Errno> {
        Ok(Windows { windows: Table::new(count)? })
    }

    pub fn lock(&self, page: PageNum) -> MutexGuard<'_, rank::Window, Mapped> {
        self.windows[page.block()].lock.lock()
    }

    /// The same for a fault, which tries for a while as long as it may go on.
    ///
    /// # Errors
    /// Why it may not.
    pub fn lock_in_turns<E>(
        &self,
        page: PageNum,
        may_go_on: impl Fn() -> Result<(), E>,
    ) -> Result<MutexGuard<'_, rank::Window, Mapped>, E> {
        let lock = &self.windows[page.block()].lock;
        for _ in 0..LOCK_TURNS {
            if let Some(window) = lock.try_lock() {
                return Ok(window);
            }
            may_go_on()?;
            core::hint::spin_loop();
        }
        Ok(lock.lock())
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    #[test]
    fn a_window_of_zeros_is_unlocked_and_empty() {
        let windows = Windows::new(4).unwrap();
        let mut window = windows.lock(PageNum(600));
        let block = PageRange::new(PageNum(512), BLOCK_PAGES);
        assert_eq!(window.present_of(block), None);
        window.set(PageNum(600), Protection::WriteProtected);
        window.set(PageNum(610), Protection::Writable);
        assert_eq!(window.present_of(block), Some(PageRange::new(PageNum(600), 11)));
        assert_eq!(window.writable_of(block), Some(PageRange::new(PageNum(610), 1)));
        window.faults = 3;
        window.protect(block);
        assert!(window.is_present(PageNum(610)) && !window.is_writable(PageNum(610)));
        window.clear(block);
        assert_eq!((window.present_of(block), window.faults), (None, 0));
    }

    #[test]
    fn a_fault_that_may_not_go_on_does_not_wait_for_a_window() {
        let windows = Windows::new(1).unwrap();
        let held = windows.lock(PageNum(0));
        let turns = Cell::new(0);
        let third_is_last = || {
            turns.set(turns.get() + 1);
            if turns.get() < 3 { Ok(()) } else { Err("the layout has changed") }
        };
        let refused = windows.lock_in_turns(PageNum(1), third_is_last).err();
        assert_eq!((refused, turns.get()), (Some("the layout has changed"), 3));
        drop(held);
        assert!(windows.lock_in_turns(PageNum(1), || Err(())).is_ok(), "nothing is asked");
    }
}
