//! Dirty pages on their way to the store.
//!
//! A run of dirty pages is locked, made to fault at the next write in every mapping, copied into a
//! buffer, marked WRITEBACK and unlocked; only then the buffer is written. So a write that comes
//! meanwhile makes its page dirty anew and never reaches the buffer: no page is torn. The barrier is
//! asked between the protection and the copy: its yes is for the very bytes that are written. A page
//! is under way once at a time. A write that fails makes its pages dirty again and is kept in the
//! object, to be told once to each flusher; it is tried again every 100 ms.
//!
//! A page is writable in a mapping only while it is DIRTY: the very call that maps it maps it
//! write-protected, so no write is missed. What is pinned for write ([`super::pin`]) may change while
//! it is copied, and stays writable and DIRTY: only a flush writes it.

use core::sync::atomic::Ordering;

use super::reclaim::block_range;
use super::requests::{IoBuffer, Work};
use super::rmap::Wait;
use super::{Objects, VmObject};
use crate::control::Event;
use crate::fault::Outcome;
use crate::mmu::object::ObjectMmu;
use crate::page::{Block, Condition, Flags, Kill, State};
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum};

/// Pages that become dirty from one look at whether there are too many to the next.
pub(super) const DIRTY_BATCH: usize = 8;

/// Why a flush did not make everything durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlushError {
    /// A page could not be written, now or since the last flush; it is still dirty.
    Write {
        offset: u64,
        errno: Errno,
    },
    Sync(Errno),
    /// The barrier holds pages back.
    HeldBack {
        /// The first such byte.
        offset: u64,
    },
}

impl<M: ObjectMmu> Objects<M> {
    /// More dirty pages than this, and workers write: while there is room for as many clean ones, nobody needs
    /// these to be clean. What is free is there for each member.
    fn dirty_background(&self) -> usize {
        let free = self.space.available() / self.space.budget().members();
        self.dirty_background_min().max(free)
    }

    fn dirty_background_min(&self) -> usize {
        self.space.budget().limit() / 10
    }

    /// Dirty pages that write-back can do something about.
    fn unpinned_dirty_pages(&self) -> usize {
        self.dirty_pages().saturating_sub(self.pins.writable())
    }

    /// Whether a thread that wants to write another page waits. Never before workers write.
    pub(super) fn is_too_dirty(&self) -> bool {
        let beyond = (self.space.budget().limit() / 8).max(1);
        let is_more_than = |pages| self.unpinned_dirty_pages() >= pages + beyond;
        // What is available takes a look at all members.
        is_more_than(self.dirty_background_min()) && is_more_than(self.dirty_background())
    }

    /// The same of this object. Never where nothing is written back.
    pub(super) fn must_clean_first(&self, object: &VmObject) -> bool {
        !object.is_memory && self.is_too_dirty()
    }

    /// Counts a page that has become dirty among those of all objects.
    pub(super) fn count_dirty(&self) {
        let before = self.dirty.fetch_add(1, Ordering::Relaxed);
        let dirty = before.saturating_sub(self.pins.writable()) + 1;
        let is_due = dirty > self.dirty_background_min() && dirty.is_multiple_of(DIRTY_BATCH);
        // It is called once: while there is too much it looks again by itself.
        let told = &self.is_excess_told;
        if is_due
            && !told.load(Ordering::Relaxed)
            && self.has_excess_dirty()
            && !told.swap(true, Ordering::Relaxed)
        {
            self.space.budget().call_for_memory();
        }
    }

    /// Leaves a fault unanswered until less is dirty.
    pub(super) fn wait_for_cleaning(&self, page: PageNum) -> Outcome {
        self.space.budget().count(Event::FaultParked, 1);
        self.unclean.push(page);
        self.check_writers_later();
        self.space.budget().call_for_memory();
        // It may have become less before the page was in the list.
        self.after_cleaning();
        Outcome::Parked
    }

    /// What the background thread does for objects before it looks for memory: faults that wait are
    /// answered, and write-back is sent where there is too much to be written.
    pub fn balance_dirty(&self) {
        self.look_after_writers();
        self.after_cleaning();
        self.answer_unparked();
        if self.has_excess_dirty() {
            let kept = self.dirty_background() - self.dirty_background_min() / 2;
            self.send_write_back(self.unpinned_dirty_pages().saturating_sub(kept));
        } else {
            // Who has seen it as it was calls at the next batch.
            self.is_excess_told.store(false, Ordering::Relaxed);
        }
    }

    /// Sends write-back of about so many pages, in order of place, going round.
    pub(super) fn send_write_back(&self, pages: usize) {
        let mut sent = 0;
        while sent < pages {
            let Some((object, block, dirty)) = self.next_dirty() else { return };
            let is_sent = self.request(object, Work::WriteBack(block_range(block)));
            // Not under the registry's lock: this may be the last use.
            self.put(object.id);
            if !is_sent {
                return;
            }
            sent += dirty;
        }
    }

    /// The next block that has dirty pages, and how many, from where the hand is; `None` once it
    /// has come to the last object's end. The caller has a use of the object then.
    fn next_dirty(&self) -> Option<(&VmObject, usize, usize)> {
        let mut hands = self.registry.lock();
        let dirty = |block: &Block| block.dirty.load(Ordering::Relaxed);
        loop {
            let next = self.next_block(&mut hands.write_back, VmObject::pages, dirty)?;
            // An object on its way out is written by its last user.
            if Objects::<M>::try_get(next.0) {
                return Some(next);
            }
        }
    }

    /// Writes back what is dirty of `pages`, waiting for page locks or not; returns the first page
    /// that the barrier holds back.
    pub(super) fn write_back_runs(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        wait: Wait,
        buffer: &mut IoBuffer,
    ) -> Option<ObjectPage> {
        let parts = object.used_parts(pages.intersect(object.range()));
        parts.fold(None, |held_back, part| {
            // Within a block: long writes are as aligned as reads are.
            let is_clean = self.block(object, part.start).dirty.load(Ordering::Relaxed) == 0;
            if is_clean && wait == Wait::No {
                return held_back;
            }
            held_back.or(self.write_back_part(object, part, wait, buffer))
        })
    }

    /// Does so with what is dirty of a part of a block.
    fn write_back_part(
        &self,
        object: &VmObject,
        part: ObjectRange,
        wait: Wait,
        buffer: &mut IoBuffer,
    ) -> Option<ObjectPage> {
        let mut held_back = None;
        let mut at = part.start;
        while at < part.end {
            let within = ObjectRange { start: at, end: part.end };
            let run = self.lock_dirty_run(object, within, wait);
            if run.is_empty() {
                at = at.add(1);
                continue;
            }
            at = run.end;
            let Some(run) = self.keep_before_cut(object, run) else {
                if wait == Wait::Yes {
                    // Whether it must be written is known once the store has said yes or no.
                    let _ = self.wait_for_cut(object, Kill::NEVER);
                    at = run.start;
                }
                continue;
            };
            at = run.end;
            let is_pinned = self.snapshot(object, run.start).has(Flags::PINNED);
            if !is_pinned && !self.try_to_protect(object, run, wait) {
                self.unlock_pages(object, run);
                continue;
            }
            // Asked once no thread can write the pages any more: what is written after a yes is
            // not in what goes to the store. For what is pinned for write that does not hold.
            let bytes = run.len() << PAGE_SHIFT;
            if object.store.may_write(run.start.offset(), bytes) {
                self.write_back_locked(object, run, buffer);
                continue;
            }
            // Perhaps a part may.
            for page in run.pages() {
                if object.store.may_write(page.offset(), PAGE_SIZE) {
                    self.write_back_locked(object, ObjectRange::new(page, 1), buffer);
                } else {
                    held_back = held_back.or(Some(page));
                    object.stall.note_write(false);
                    self.adopt(object, page).unlock();
                }
            }
        }
        held_back
    }

    /// Locks the first page of `within` and those behind it, as long as they are dirty, not under
    /// way, and alike pinned for write or not; what is pinned so only for a caller that may wait.
    fn lock_dirty_run(&self, object: &VmObject, within: ObjectRange, wait: Wait) -> ObjectRange {
        let first = within.start;
        let mut run = ObjectRange { start: first, end: first };
        while run.end < within.end && run.len() < BLOCK_PAGES {
            let number = object.number(run.end);
            let seen = self.space.snapshot(number);
            let is_worth_it =
                seen.is_locked() || seen.has(Flags::DIRTY) || seen.has(Flags::WRITEBACK);
            if !is_worth_it {
                break;
            }
            let may_sleep = wait == Wait::Yes && run.is_empty();
            if may_sleep {
                // What is under way was copied before: what was written since must follow it.
                self.space.wait_on_page(number, Condition::clear(Flags::WRITEBACK));
            }
            let locked = if may_sleep {
                Some(self.space.lock_page(number))
            } else {
                self.space.try_lock_page(number)
            };
            let Some(locked) = locked else { break };
            let is_under_way = locked.has(Flags::WRITEBACK);
            if locked.state() != State::Cached || !locked.has(Flags::DIRTY) || is_under_way {
                if may_sleep && is_under_way {
                    continue;
                }
                break;
            }
            let is_pinned = locked.has(Flags::PINNED);
            let is_alike =
                run.is_empty() || self.snapshot(object, first).has(Flags::PINNED) == is_pinned;
            if !is_alike || (is_pinned && wait == Wait::No) {
                break;
            }
            locked.leave_locked();
            run.end = run.end.add(1);
        }
        run
    }

    /// Unlocks what the store may lose just now of a run of locked pages; `None` is all of it.
    fn keep_before_cut(&self, object: &VmObject, run: ObjectRange) -> Option<ObjectRange> {
        // SeqCst: under the page locks; a truncation takes each of them after it has set the cut.
        let cut = ObjectPage(object.cut.load(Ordering::SeqCst)).max(run.start).min(run.end);
        self.unlock_pages(object, ObjectRange { start: cut, end: run.end });
        (cut > run.start).then_some(ObjectRange { start: run.start, end: cut })
    }

    /// Writes a run of locked, protected, dirty pages back, and unlocks them. An error of the store
    /// is noted in the object.
    fn write_back_locked(&self, object: &VmObject, run: ObjectRange, buffer: &mut IoBuffer) {
        let length = object.len().saturating_sub(run.start.offset());
        let bytes = (run.len() << PAGE_SHIFT).min(length as usize);
        let copy = &mut buffer.pages(run.len())[..bytes];
        let (mmu, offset) = (self.space.mmu(), run.start.offset());
        if bytes == 0 || mmu.memfd_read(object.memfd, offset, copy).is_err() {
            // Behind the object's end, or the memfd's: its truncation is under way, which drops the pages.
            self.unlock_pages(object, run);
            return;
        }
        object.writeback.fetch_add(run.len() as u32, Ordering::SeqCst);
        for page in run.pages() {
            let mut locked = self.adopt(object, page);
            if locked.has(Flags::PINNED) {
                // Written again at once, for all that is known: dirty once more.
                self.count_dirty();
            } else {
                self.count_cleaned(object, page);
                locked.clear_flags_locked(Flags::DIRTY);
            }
            locked.set_flags(Flags::WRITEBACK);
        }
        self.space.budget().count(Event::Pgpgout, run.len());
        let result = object.store.write(offset, copy);
        if let Err(error) = result {
            object.note_write_error(run.start, error);
        }
        object.stall.note_write(result.is_ok());
        let clean = |&page: &ObjectPage| !self.end_page_writeback(object, page, result.is_ok());
        let ended = run.pages().filter(clean).count();
        // Until here: or writers that wait for less to be dirty would go on with every write that
        // fails.
        self.dirty.fetch_sub(ended, Ordering::Relaxed);
        object.writeback.fetch_sub(run.len() as u32, Ordering::SeqCst);
        futex::wake(&object.writeback, u32::MAX, Reach::Process);
        self.after_cleaning();
    }

    /// The write of a page is done; says whether the page is dirty by it, as it was before.
    fn end_page_writeback(&self, object: &VmObject, page: ObjectPage, is_written: bool) -> bool {
        let mut locked = self.lock(object, page);
        let is_cached = locked.state() == State::Cached;
        if is_written && is_cached {
            locked.note_written(object.synced.number_of_write());
        }
        let is_dirty_again = !is_written && is_cached && !locked.has(Flags::DIRTY);
        if is_dirty_again {
            locked.set_flags_locked(Flags::DIRTY);
            self.count_dirtied(object, page);
        }
        locked.clear_flags(Flags::WRITEBACK);
        is_dirty_again
    }

    /// Whether so much is dirty that it should be written, though no writer waits. What the store
    /// refuses, or the barrier holds back, stays so: it must be tried again from time to time.
    pub(super) fn has_excess_dirty(&self) -> bool {
        let dirty = self.unpinned_dirty_pages();
        dirty > self.dirty_background_min() && dirty > self.dirty_background()
    }

    /// Whether the background thread is to look again by itself: until it has seen that there is not too much, or to
    /// have refused pages accessed again.
    pub fn must_look_again(&self) -> bool {
        self.is_excess_told.load(Ordering::Relaxed) || self.has_excess_dirty() || self.has_refused()
    }

    /// Whether faults wait until less is dirty.
    pub fn has_unclean(&self) -> bool {
        !self.unclean.is_empty()
    }

    pub(super) fn after_cleaning(&self) {
        if self.is_too_dirty() {
            return;
        }
        self.answer_unclean();
        if self.has_refused() {
            self.space.budget().call_for_memory();
        }
    }

    pub(super) fn answer_unclean(&self) {
        self.unclean.answer_all(|answer| self.space.wake_for(answer));
    }

    /// Writes everything dirty of `pages` to the store; with `sync`, durably. What was written to
    /// the mappings before the call is on its way or in the store when it returns, or it is an
    /// error.
    ///
    /// # Errors
    /// The first of: a write that failed since this flusher (`seen` counts what it was told) was
    /// last told; pages that the barrier holds back; a sync that failed, after which what was
    /// written since the last good one is dirty again.
    pub fn flush(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        is_durable: bool,
        seen: &mut u32,
        buffer: &mut IoBuffer,
    ) -> Result<(), FlushError> {
        if object.is_memory {
            return Ok(());
        }
        let mut held_back = None;
        // Whatever was written before the call has words.
        for part in object.used_parts(pages.intersect(object.range())) {
            held_back = held_back.or(self.write_back_runs(object, part, Wait::Yes, buffer));
            // What others have under way.
            for page in part.pages() {
                let written = Condition::clear(Flags::WRITEBACK);
                self.space.wait_on_page(object.number(page), written);
            }
        }
        self.tell_write_error(object, seen)?;
        if let Some(page) = held_back {
            return Err(FlushError::HeldBack { offset: page.offset() });
        }
        if is_durable {
            self.sync_store(object, pages.start, seen)?;
        }
        Ok(())
    }

    /// The last write error, where it was not told yet to the flusher that has been told `seen`.
    pub(super) fn tell_write_error(
        &self,
        object: &VmObject,
        seen: &mut u32,
    ) -> Result<(), FlushError> {
        let errors = object.write_errors.load(Ordering::Acquire);
        if errors != core::mem::replace(seen, errors) {
            let errno = object.write_error.load(Ordering::Relaxed);
            let page = object.write_error_page.load(Ordering::Relaxed);
            let errno = Errno::from_raw_os_error(errno);
            return Err(FlushError::Write { offset: ObjectPage(page).offset(), errno });
        }
        Ok(())
    }

    /// What a new flusher has been told: everything before it.
    pub fn errors_seen(&self, object: &VmObject) -> u32 {
        object.write_errors.load(Ordering::Acquire)
    }
}

impl VmObject {
    pub(super) fn note_write_error(&self, page: ObjectPage, error: Errno) {
        self.write_error_page.store(page.0, Ordering::Relaxed);
        self.write_error.store(error.raw_os_error(), Ordering::Relaxed);
        // Release publishes which.
        self.write_errors.fetch_add(1, Ordering::Release);
    }
}
