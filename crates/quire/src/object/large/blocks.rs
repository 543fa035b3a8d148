//! How blocks come to live in large frames, and leave them; and how frames wait for the next one.
//!
//! Locks: all page words of the block that changes where it lives, but where another is named.

use core::sync::atomic::Ordering;

use super::{FRESH, LargeFrame, RECYCLED_MAX, UNFILLED};
use crate::budget::Purpose;
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::object::rmap::Wait;
use crate::object::{Object, Objects};
use crate::page::{Condition, State};
use crate::sys::monotonic_ns;
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange};

/// As many pages as streams find ready, where memory is short.
const AHEAD_PAGES: usize = 2 * BLOCK_PAGES;

impl<M: ObjectMmu> Objects<M> {
    /// Charges a locked run that is not cached. A whole block is given a large frame, a recycled
    /// one if there is one: that is charged already.
    pub(in crate::object) fn try_charge_run(&self, object: &Object, pages: ObjectRange) -> bool {
        let is_block = self.large.are_used()
            && !object.is_memory()
            && pages.len() == BLOCK_PAGES
            && pages.start.index().is_multiple_of(BLOCK_PAGES)
            && pages.end.offset() <= object.len()
            && pages.end.0 <= object.cut.load(Ordering::SeqCst);
        let block = object.block(pages.start);
        if is_block && let Some(frame) = self.large.take_recycled() {
            // Relaxed: it tells the background thread that they are wanted.
            self.large.taken_at.store(monotonic_ns(), Ordering::Relaxed);
            self.space.budget().count(Event::Pgreuse, BLOCK_PAGES);
            let before = block.frame();
            block.frame.store(frame.0 | UNFILLED, Ordering::Relaxed);
            if before != LargeFrame::NONE {
                self.large.give_back(before);
            }
            return true;
        }
        if !self.space.budget().try_charge(pages.len(), Purpose::Fault) {
            return false;
        }
        if is_block {
            // One that it has still is as empty: nothing of the block is cached.
            let kept = Some(block.frame()).filter(|&frame| frame != LargeFrame::NONE);
            if let Some(frame) = kept.or_else(|| self.large.take_empty()) {
                block.frame.store(frame.0 | FRESH, Ordering::Relaxed);
            }
        }
        true
    }

    /// Whether a whole block could be read at once.
    pub(in crate::object) fn has_room_for_block(&self) -> bool {
        !self.large.are_used()
            || self.large.recycled_pages() > 0
            || self.space.chargeable_now() >= BLOCK_PAGES
    }

    /// Gives the charge of a locked run back that was not read after all.
    pub(in crate::object) fn uncharge_run(&self, object: &Object, pages: ObjectRange) {
        let block = object.block(pages.start);
        // Relaxed: all pages are locked.
        if block.frame.load(Ordering::Relaxed) & UNFILLED != 0 {
            let frame = block.frame();
            block.set_frame(LargeFrame::NONE);
            self.keep_or_empty(frame);
            return;
        }
        if pages.len() == BLOCK_PAGES {
            self.leave_frame(object, pages.start, false);
        }
        self.space.budget().uncharge(pages.len());
    }

    /// The bytes of a locked block's recycled frame, for a store to read into; or of a fresh one,
    /// which gets its memory in one call: page by page, as a buffer is written there or the view is
    /// touched for the first time, it costs half as much again.
    #[allow(clippy::mut_from_ref, reason = "the page locks are the exclusive borrow")]
    pub(in crate::object) fn unfilled(
        &self,
        object: &Object,
        pages: ObjectRange,
    ) -> Option<&mut [u8]> {
        let block = object.block(pages.start);
        let state = block.frame.load(Ordering::Relaxed) & (UNFILLED | FRESH);
        debug_assert!(state & UNFILLED == 0 || pages.len() <= BLOCK_PAGES);
        if state == 0 || pages.len() < BLOCK_PAGES {
            return None;
        }
        // SAFETY: all pages of the block are locked, and none is mapped.
        let bytes = unsafe { self.large.bytes(block.frame()) }?;
        // Without memory behind it a store that touches the view would be ended by a SIGBUS.
        let is_there = state == UNFILLED || self.space.mmu().view_populate(bytes).is_ok();
        is_there.then_some(bytes)
    }

    /// A recycled or fresh frame is the block's own from now on, page for page.
    pub(in crate::object) fn end_unfilled(&self, object: &Object, page: ObjectPage) {
        object.block(page).frame.fetch_and(!(UNFILLED | FRESH), Ordering::Relaxed);
    }

    /// Most recycled frames that are kept: an eighth of the memory.
    fn recycled_max(&self) -> usize {
        (self.space.budget().limit() / BLOCK_PAGES / 8).clamp(2, RECYCLED_MAX)
    }

    /// A frame that is full of memory, all of it charged, waits for another block, or is emptied.
    fn keep_or_empty(&self, frame: LargeFrame) {
        if !self.large.recycle(frame, self.recycled_max()) {
            self.empty(frame);
        }
    }

    fn empty(&self, frame: LargeFrame) {
        // Where it fails the memory stays, charged to nobody, until the frame is used again.
        let _ = self.space.mmu().home_punch(self.large.home, frame.pages());
        self.large.give_back(frame);
        self.space.budget().uncharge(BLOCK_PAGES);
    }

    /// Gives recycled frames back to the kernel until at least so many pages are free to charge.
    pub(in crate::object) fn release_recycled(&self, wanted: usize) {
        while self.space.chargeable_now() < wanted {
            let Some(frame) = self.large.take_recycled() else { return };
            self.empty(frame);
        }
    }

    /// Gives recycled frames back that nobody takes: other memory could use theirs.
    pub(in crate::object) fn release_idle(&self) {
        while self.large.are_idle() {
            let Some(frame) = self.large.take_recycled() else { return };
            self.empty(frame);
        }
    }

    /// Has the background thread see to it that a stream finds recycled memory.
    pub(in crate::object) fn call_for_recycled(&self) {
        if self.large.recycled_pages() >= AHEAD_PAGES {
            return;
        }
        // Relaxed: the call orders it.
        if !self.large.is_wanted.swap(true, Ordering::Relaxed) {
            self.space.budget().call_for_memory();
        }
    }

    /// Pages that must be recycled for the streams that asked.
    pub(in crate::object) fn wanted_recycled(&self) -> usize {
        if !self.large.is_wanted.swap(false, Ordering::Relaxed) {
            return 0;
        }
        AHEAD_PAGES.saturating_sub(self.large.recycled_pages())
    }

    /// Gives all recycled frames back: nothing is cached that they could be for.
    pub(in crate::object) fn release_all_recycled(&self) {
        while let Some(frame) = self.large.take_recycled() {
            self.empty(frame);
        }
    }

    /// Whether little is left for faults on objects: blocks can be read into recycled memory.
    pub fn is_low(&self) -> bool {
        self.space.available() + self.large.recycled_pages() < self.space.low_watermark()
    }

    /// Where little is left, has the background thread reclaim.
    pub(in crate::object) fn call_if_low(&self) {
        if self.is_low() && !self.space.is_kswapd_awake() {
            self.space.budget().call_for_memory();
        }
    }

    /// A block of locked words none of which is cached any more leaves its frame, whose memory is
    /// there and charged if `is_full`, and otherwise gone.
    pub(in crate::object) fn leave_frame(&self, object: &Object, page: ObjectPage, is_full: bool) {
        let block = object.block(page);
        let frame = block.frame();
        if frame == LargeFrame::NONE {
            return;
        }
        block.set_frame(LargeFrame::NONE);
        if is_full {
            self.keep_or_empty(frame);
        } else {
            self.large.give_back(frame);
        }
    }

    /// Locks all words of a block; where it may not wait and one is locked, none of them, and that
    /// one is returned. It sleeps with none of them locked: who holds the one that it waits for may
    /// be a read behind write-back of another, which waits for that one's lock.
    pub(in crate::object) fn lock_block(
        &self,
        object: &Object,
        pages: ObjectRange,
        wait: Wait,
    ) -> Result<(), ObjectPage> {
        while let Err(busy) = self.try_lock_block(object, pages) {
            if wait == Wait::No {
                return Err(busy);
            }
            self.space.wait_on_word(object.word(busy), Condition::UNLOCKED);
        }
        Ok(())
    }

    fn try_lock_block(&self, object: &Object, pages: ObjectRange) -> Result<(), ObjectPage> {
        for page in pages.pages() {
            if object.word(page).try_lock().is_none() {
                self.unlock_words(object, ObjectRange { start: pages.start, end: page });
                return Err(page);
            }
        }
        Ok(())
    }

    /// A block nothing of which is cached gives its frame's number back, if that is to be had at
    /// once.
    pub(in crate::object) fn try_leave_frame(&self, object: &Object, pages: ObjectRange) {
        let block = object.block(pages.start);
        let is_idle =
            block.frame() != LargeFrame::NONE && block.cached.load(Ordering::Relaxed) == 0;
        if !is_idle || self.lock_block(object, pages, Wait::No).is_err() {
            return;
        }
        if pages.pages().all(|page| object.word(page).load().state() == State::None) {
            self.retire_windows(object, pages, Wait::No);
            self.leave_frame(object, pages.start, false);
        }
        self.unlock_words(object, pages);
    }

    /// An object goes: its frames with it. Returns how many of its cached pages stay charged,
    /// because their memory waits for another block. Nobody uses the object.
    pub(in crate::object) fn leave_all_frames(&self, object: &Object) -> usize {
        let mut kept = 0;
        for (index, block) in object.blocks.iter().enumerate() {
            let is_used = block.is_used.load(Ordering::Relaxed) != 0;
            if !is_used || block.frame() == LargeFrame::NONE {
                continue;
            }
            let first = ObjectPage((index * BLOCK_PAGES) as u64);
            let is_full = block.cached.load(Ordering::Relaxed) as usize == BLOCK_PAGES;
            if is_full {
                kept += BLOCK_PAGES;
            } else {
                let _ = self.space.mmu().home_punch(self.large.home, block.frame().pages());
            }
            self.leave_frame(object, first, is_full);
        }
        kept
    }
}
