//! Blocks go to live elsewhere: together into a large frame, or home again.
//!
//! All page words of the block are locked and it is mapped nowhere while its pages are copied, one at
//! a time, each from where it was given back. All of them go, or none.
//!
//! Locks: the block's page words; then `i_mmap` shared and the windows', by the walk that unmaps.

use core::sync::atomic::Ordering;

use super::large::LargeFrame;
use super::rmap::Wait;
use super::{Object, Objects};
use crate::budget::Purpose;
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, State};
use crate::scratch::Scratch;
use crate::sys::Errno;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE};

/// What became of blocks that were to change where they live.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Migrated {
    /// Pages that live elsewhere now.
    pub success: usize,
    /// Pages that stayed, because they could not be had or there was no memory.
    pub failed: usize,
}

impl<M: ObjectMmu> Objects<M> {
    /// Brings blocks that are cached whole together, each into 2 MiB of memory of its own, whose
    /// memory is recycled when it goes.
    pub fn migrate(&self, object: &Object, scratch: &mut Scratch) -> Migrated {
        let mut all = Migrated::default();
        let whole = object.len() as usize >> PAGE_SHIFT >> BLOCK_ORDER;
        for index in 0..whole {
            let pages = ObjectRange::new(ObjectPage((index * BLOCK_PAGES) as u64), BLOCK_PAGES);
            let block = object.block(pages.start);
            let is_whole = block.cached.load(Ordering::Relaxed) as usize == BLOCK_PAGES;
            if !is_whole || object.is_memory() || block.frame() != LargeFrame::NONE {
                continue;
            }
            let Some(frame) = self.large.take_empty() else { break };
            let moved = self
                .migrate_block(object, pages, frame, Wait::Yes, Some(scratch))
                .unwrap_or_default();
            if moved.success == 0 {
                self.large.give_back(frame);
            }
            all.success += moved.success;
            all.failed += moved.failed;
        }
        all
    }

    /// Brings what is cached of a block to `to`, where it lives from then on. Where it may not
    /// wait and a page is locked, that page is the error.
    pub(super) fn migrate_block(
        &self,
        object: &Object,
        pages: ObjectRange,
        to: LargeFrame,
        wait: Wait,
        mut scratch: Option<&mut Scratch>,
    ) -> Result<Migrated, ObjectPage> {
        let budget = self.space.budget();
        // For the one page that is in both places; before the locks: who makes room takes others.
        let mut charge =
            || self.make_room(1, scratch.as_deref_mut()) && budget.try_charge(1, Purpose::Fault);
        if !(0..8).any(|_| charge()) {
            let failed = object.block(pages.start).cached.load(Ordering::Relaxed) as usize;
            budget.count(Event::PgmigrateFail, failed);
            return Ok(Migrated { success: 0, failed });
        }
        let locked = self.lock_block(object, pages, wait);
        let mut moved = Migrated::default();
        if locked.is_ok() {
            let from = object.block(pages.start).frame();
            // Under the locks: who cuts it shortens the object first, and looks where it lives
            // under one of them afterwards. What was reclaimed meanwhile needs no frame, and would
            // keep the number of one that the caller takes for free.
            let is_cut = pages.end.offset() > object.len();
            let is_gone = object.block(pages.start).cached.load(Ordering::Relaxed) == 0;
            let can_move = to == LargeFrame::NONE || !(is_cut || is_gone);
            let is_pinned = |page| object.word(page).load().has(Flags::MLOCKED);
            if from != to && pages.pages().any(is_pinned) {
                moved.failed = object.block(pages.start).cached.load(Ordering::Relaxed) as usize;
            } else if from != to && can_move {
                self.try_to_unmap(object, pages, Wait::Yes);
                moved = self.move_block(object, pages, to);
                if moved.failed == 0 && from != LargeFrame::NONE {
                    self.large.give_back(from);
                }
            }
            self.unlock_words(object, pages);
        }
        budget.uncharge(1);
        budget.count(Event::PgmigrateSuccess, moved.success);
        budget.count(Event::PgmigrateFail, moved.failed);
        locked.map(|()| moved)
    }

    /// Moves the cached ones of locked, unmapped pages; all of them, or nothing has changed.
    fn move_block(&self, object: &Object, pages: ObjectRange, to: LargeFrame) -> Migrated {
        let block = object.block(pages.start);
        let from = block.frame();
        let is_cached = |page: &ObjectPage| object.word(*page).load().state() == State::Cached;
        let cached = || pages.pages().filter(is_cached);
        let count = cached().count();
        let is_stuck = |page: &ObjectPage| self.move_page(object, *page, from, to).is_err();
        let Some(stuck) = cached().find(is_stuck) else {
            block.set_frame(to);
            return Migrated { success: count, failed: 0 };
        };
        for page in cached().take_while(|&page| page < stuck) {
            // Its memory was given back a moment ago: sooner or later there is some again.
            while self.move_page(object, page, to, from).is_err() {
                self.space.mmu().relax();
            }
        }
        block.set_frame(from);
        Migrated { success: 0, failed: count }
    }

    /// Moves one page between two places of its locked, unmapped block. Through the view, not a
    /// buffer: a thread that serves itself has little stack.
    fn move_page(
        &self,
        object: &Object,
        page: ObjectPage,
        from: LargeFrame,
        to: LargeFrame,
    ) -> Result<(), Errno> {
        let viewed = if to == LargeFrame::NONE { from } else { to };
        // SAFETY: the caller has locked all pages of the block, whose frames both are.
        let bytes = unsafe { self.large.bytes(viewed) }.ok_or(Errno::INVAL)?;
        let within = (page.index() % BLOCK_PAGES) << PAGE_SHIFT;
        let bytes = &mut bytes[within..within + PAGE_SIZE];
        let block = object.block(page);
        block.set_frame(from);
        if to == LargeFrame::NONE {
            self.space.mmu().home_write(object.home, page.offset(), bytes)?;
        } else {
            self.cache_read(object, page.offset(), bytes)?;
        }
        // Where it is refused the page takes its memory twice until its frame goes.
        let _ = self.cache_punch(object, ObjectRange::new(page, 1));
        Ok(())
    }
}
