//! Dirty pages on their way to the store.
//!
//! A run of dirty pages is locked, made to fault at the next write in every mapping, copied into a
//! buffer, marked WRITEBACK and unlocked; only then the buffer is written. So a write that comes
//! meanwhile makes its page dirty anew and never reaches the buffer: no page is torn. The barrier is
//! asked between the protection and the copy: its yes is for the very bytes that are written. A page is
//! under way once at a time. A write that fails makes its pages dirty again and is kept in the
//! object, to be told once to whoever flushes.
//!
//! What is pinned for write ([`super::pin`]) may change while it is copied, and stays writable and
//! DIRTY: only a flush writes it.
//!
//! A page is writable in a mapping only while it is DIRTY: the very call that maps it maps it write-protected, so
//! no write is missed. More than a tenth of the budget dirty, and workers write in order of place; more than a
//! quarter, what is under way included, and writers wait. A write that failed is tried again every 100 ms.
//!
//! Locks: page locks (the first of a run slept for by flushes, all others tried), `i_mmap` shared.

use core::sync::atomic::Ordering;

use super::requests::{IoBuffer, Request};
use super::rmap::Wait;
use super::{Object, ObjectId, Objects};
use crate::control::Event;
use crate::fault::Outcome;
use crate::mmu::object::ObjectMmu;
use crate::page::{Condition, Flags, Snapshot, State};
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum};

/// Why a flush did not make everything durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlushError {
    /// A page could not be written, now or since the last flush; it is still dirty.
    Write {
        /// Byte of the object.
        offset: u64,
        /// Why.
        errno: Errno,
    },
    /// The store could not be synced.
    Sync(Errno),
    /// The barrier holds pages back.
    HeldBack {
        /// The first such byte.
        offset: u64,
    },
}

impl<M: ObjectMmu> Objects<M> {
    /// More dirty pages than this, and workers write.
    fn dirty_background(&self) -> usize {
        self.space.budget().limit() / 10
    }

    /// More, and who wants to write another page waits.
    fn dirty_limit(&self) -> usize {
        self.space.budget().limit() / 4
    }

    /// Dirty pages that write-back can do something about.
    fn unpinned_dirty_pages(&self) -> usize {
        self.dirty_pages().saturating_sub(self.pins.writable())
    }

    pub(super) fn is_too_dirty(&self) -> bool {
        self.unpinned_dirty_pages() >= self.dirty_limit().max(1)
    }

    /// Whether who wants to write a page of this object waits until less is dirty. Never where
    /// nothing is written back.
    pub(super) fn must_clean_first(&self, object: &Object) -> bool {
        !object.is_memory() && self.is_too_dirty()
    }

    pub(super) fn count_dirty(&self, pages: usize) {
        let before = self.dirty.fetch_add(pages, Ordering::Relaxed);
        let before = before.saturating_sub(self.pins.writable());
        let background = self.dirty_background();
        // At the very step after which `has_excess_dirty` says so: who is called looks once.
        if before <= background && before + pages > background {
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

    /// Sends write-back where there is too much to be written; returns whether there is.
    pub(super) fn balance_dirty(&self) -> bool {
        self.look_after_writers();
        self.after_cleaning();
        let dirty = self.unpinned_dirty_pages();
        let excess = dirty.saturating_sub(self.dirty_background() / 2);
        if dirty <= self.dirty_background() {
            return false;
        }
        self.send_write_back(excess);
        true
    }

    /// Sends write-back of about so many pages, in order of place, going round.
    pub(super) fn send_write_back(&self, pages: usize) {
        let mut sent = 0;
        while sent < pages {
            let Some((id, block, dirty)) = self.next_dirty() else { return };
            let pages = ObjectRange::new(ObjectPage((block * BLOCK_PAGES) as u64), BLOCK_PAGES);
            let is_sent = self.request(id, Request::WriteBack { object: id, pages });
            // Not under the registry's lock: this may be the last use.
            self.put(id);
            if !is_sent {
                return;
            }
            sent += dirty;
        }
    }

    /// The next block that has dirty pages, and how many, from where the hand is; `None` once it
    /// has come to the last object's end. The caller has a use of the object then.
    fn next_dirty(&self) -> Option<(ObjectId, usize, usize)> {
        let mut hands = self.registry.lock();
        let slots = self.slots_used.load(Ordering::Relaxed);
        // What the hand has passed comes last.
        for _ in 0..=slots {
            let (slot, from) = hands.write_back;
            if slot >= slots {
                hands.write_back = (0, 0);
                return None;
            }
            if let Some(object) = self.peek(slot) {
                let blocks = object.pages().div_ceil(BLOCK_PAGES);
                let dirty_of =
                    |block: usize| object.blocks[block].dirty.load(Ordering::Relaxed) as usize;
                let block = (from..blocks).find(|&block| dirty_of(block) > 0);
                // An object on its way out is written by its last user.
                if let Some(block) = block.filter(|_| Objects::<M>::try_get(object)) {
                    hands.write_back = (slot, block + 1);
                    return Some((ObjectId(slot as u32), block, dirty_of(block)));
                }
            }
            hands.write_back = (slot + 1, 0);
        }
        None
    }

    /// Writes back what is dirty of `pages`, as it can be had without waiting for page locks.
    pub(super) fn write_back_range(
        &self,
        object: &Object,
        pages: ObjectRange,
        buffer: &mut IoBuffer,
    ) {
        self.write_back_runs(object, pages, Wait::No, buffer);
    }

    /// Writes back what is dirty of `pages`; returns the first page that the barrier holds back.
    fn write_back_runs(
        &self,
        object: &Object,
        pages: ObjectRange,
        wait: Wait,
        buffer: &mut IoBuffer,
    ) -> Option<ObjectPage> {
        let mut held_back = None;
        let mut at = pages.start;
        let end = pages.intersect(object.range()).end;
        while at < end {
            if object.block(at).dirty.load(Ordering::Relaxed) == 0 && wait == Wait::No {
                at = ObjectPage((at.0 | (BLOCK_PAGES as u64 - 1)) + 1);
                continue;
            }
            // Within a block: long writes are as aligned as reads are.
            let block_end = ObjectPage((at.0 | (BLOCK_PAGES as u64 - 1)) + 1);
            let within = ObjectRange { start: at, end: end.min(block_end) };
            let run = self.lock_dirty_run(object, within, wait);
            if run.is_empty() {
                at = at.add(1);
                continue;
            }
            at = run.end;
            let Some(run) = self.keep_before_cut(object, run) else {
                if wait == Wait::Yes {
                    // Whether it must be written is known once the store has said yes or no.
                    self.wait_for_cut(object);
                    at = run.start;
                }
                continue;
            };
            at = run.end;
            let is_pinned = object.word(run.start).load().has(Flags::PINNED);
            if !is_pinned && !self.try_to_protect(object, run, wait) {
                self.unlock_words(object, run);
                continue;
            }
            // Asked once nobody can write the pages any more: what is written after a yes is not
            // in what goes to the store. Of what is pinned for write nobody can promise that.
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
                    self.space.unlock_word(object.word(page));
                }
            }
        }
        held_back
    }

    /// Locks the first page of `within` and those behind it, as long as they are dirty, not under
    /// way, and alike pinned for write or not; what is pinned so only for those who may wait.
    fn lock_dirty_run(&self, object: &Object, within: ObjectRange, wait: Wait) -> ObjectRange {
        let first = within.start;
        let mut run = ObjectRange { start: first, end: first };
        while run.end < within.end && run.len() < BLOCK_PAGES {
            let word = object.word(run.end);
            let seen = word.load();
            let is_worth_it =
                seen.is_locked() || seen.has(Flags::DIRTY) || seen.has(Flags::WRITEBACK);
            if !is_worth_it {
                break;
            }
            let may_sleep = wait == Wait::Yes && run.is_empty();
            if may_sleep {
                // What is under way was copied before: what was written since must follow it.
                self.space.wait_on_word(word, Condition::clear(Flags::WRITEBACK));
            }
            let old = if may_sleep { Some(self.space.lock_word(word)) } else { word.try_lock() };
            let Some(old) = old else { break };
            if old.state() != State::Cached || !old.has(Flags::DIRTY) || old.has(Flags::WRITEBACK) {
                self.space.unlock_word(word);
                if may_sleep && old.has(Flags::WRITEBACK) {
                    continue;
                }
                break;
            }
            let is_pinned = old.has(Flags::PINNED);
            let is_alike =
                run.is_empty() || object.word(first).load().has(Flags::PINNED) == is_pinned;
            if !is_alike || (is_pinned && wait == Wait::No) {
                self.space.unlock_word(word);
                break;
            }
            run.end = run.end.add(1);
        }
        run
    }

    /// Unlocks what the store may lose just now of a run of locked pages; `None` is all of it.
    fn keep_before_cut(&self, object: &Object, run: ObjectRange) -> Option<ObjectRange> {
        // SeqCst: under the page locks; who cuts takes each of them after it has said so.
        let cut = ObjectPage(object.cut.load(Ordering::SeqCst)).max(run.start).min(run.end);
        self.unlock_words(object, ObjectRange { start: cut, end: run.end });
        (cut > run.start).then_some(ObjectRange { start: run.start, end: cut })
    }

    /// Writes a run of locked, protected, dirty pages back, and unlocks them. An error of the store
    /// is noted in the object.
    fn write_back_locked(&self, object: &Object, run: ObjectRange, buffer: &mut IoBuffer) {
        let length = object.len().saturating_sub(run.start.offset());
        if length == 0 {
            // Behind the end: its truncation is under way, which drops the pages.
            self.unlock_words(object, run);
            return;
        }
        let bytes = (run.len() << PAGE_SHIFT).min(length as usize);
        let copy = &mut buffer.pages(run.len())[..bytes];
        if self.space.mmu().memfd_read(object.memfd, run.start.offset(), copy).is_err() {
            // Behind the memfd's end: its truncation is under way, which drops the pages.
            self.unlock_words(object, run);
            return;
        }
        object.writeback.fetch_add(run.len() as u32, Ordering::SeqCst);
        for page in run.pages() {
            let word = object.word(page);
            let mut after = word.load().with(Flags::WRITEBACK);
            if after.has(Flags::PINNED) {
                // Written again at once, for all that is known: dirty once more.
                self.count_dirty(1);
            } else {
                object.count_cleaned(page);
                after = after.without(Flags::DIRTY);
            }
            self.space.unlock_word_with(word, after);
        }
        self.space.budget().count(Event::Pgpgout, run.len());
        let result = object.store.write(run.start.offset(), copy);
        if let Err(error) = result {
            object.note_write_error(run.start, error);
        }
        object.stall.note_write(result.is_ok());
        let clean = |&page: &ObjectPage| !self.end_page_writeback(object, page, result.is_ok());
        let ended = run.pages().filter(clean).count();
        // Until here: or those who wait for less to be dirty would go on with every write that
        // fails.
        self.dirty.fetch_sub(ended, Ordering::Relaxed);
        object.writeback.fetch_sub(run.len() as u32, Ordering::SeqCst);
        futex::wake(&object.writeback, u32::MAX, Reach::Process);
        self.after_cleaning();
    }

    /// The write of a page is done; says whether the page is dirty by it, as it was before.
    fn end_page_writeback(&self, object: &Object, page: ObjectPage, is_written: bool) -> bool {
        let word = object.word(page);
        let old = self.space.lock_word(word);
        let mut after = old.without(Flags::WRITEBACK);
        if is_written && old.state() == State::Cached {
            after = object.synced.note_written(after);
        }
        let is_dirty_again = !is_written && old.state() == State::Cached && !old.has(Flags::DIRTY);
        if is_dirty_again {
            after = after.with(Flags::DIRTY);
            object.count_dirty(page);
        }
        self.space.unlock_word_with(word, after);
        is_dirty_again
    }

    /// Writes what is dirty of an object whose last user is the caller, as far as it can.
    pub(super) fn write_back_last(&self, object: &Object) {
        let Ok(mut buffer) = IoBuffer::new() else { return };
        self.write_back_runs(object, object.range(), Wait::Yes, &mut buffer);
    }

    /// Whether so much is dirty that it should be written, but nobody waits for it. What the store
    /// refuses, or the barrier holds back, stays so: it must be tried again from time to time.
    pub fn has_excess_dirty(&self) -> bool {
        self.unpinned_dirty_pages() > self.dirty_background()
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
        object: &Object,
        pages: ObjectRange,
        is_durable: bool,
        seen: &mut u32,
        buffer: &mut IoBuffer,
    ) -> Result<(), FlushError> {
        if object.is_memory() {
            return Ok(());
        }
        let mut held_back = None;
        for part in pages.intersect(object.range()).by_block() {
            // Relaxed: whatever was written before the call was noted there before.
            if object.block(part.start).is_used.load(Ordering::Relaxed) == 0 {
                continue;
            }
            held_back = held_back.or(self.write_back_runs(object, part, Wait::Yes, buffer));
            // What others have under way.
            for page in part.pages() {
                self.space.wait_on_word(object.word(page), Condition::clear(Flags::WRITEBACK));
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
        object: &Object,
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
    pub fn errors_seen(&self, object: &Object) -> u32 {
        object.write_errors.load(Ordering::Acquire)
    }
}

impl Object {
    pub(super) fn note_write_error(&self, page: ObjectPage, error: Errno) {
        self.write_error_page.store(page.0, Ordering::Relaxed);
        self.write_error.store(error.raw_os_error(), Ordering::Relaxed);
        // Release publishes which.
        self.write_errors.fetch_add(1, Ordering::Release);
    }

    /// The word of a page whose bytes are gone.
    pub(super) const GONE: Snapshot = Snapshot::new(State::None, 0);
}
