//! An object's length changes.
//!
//! Shorter: the store first, for it may refuse, and then nothing has happened: what was dirty behind
//! the new end is dirty still. Meanwhile (the *cut*) nothing is written back there, for such a write
//! would make the store longer again: what was under way before is waited for, and flushes wait for
//! the cut's end. Then the length, so that no fault maps what is to go; the pages, each under its
//! lock, which also waits for reads under way; the memfd, from when on an access is a SIGBUS.
//! Longer: the store, the memfd, the length.

use core::sync::atomic::Ordering;

use super::pages::Locked;
use super::rmap::Wait;
use super::{Objects, VmObject};
use crate::budget::Purpose;
use crate::mmu::object::ObjectMmu;
use crate::page::{Condition, Flags, Interrupted, Kill, State};
use crate::reclaim::Room;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

impl<M: ObjectMmu> Objects<M> {
    /// Changes an object's length, in its store as well.
    ///
    /// # Errors
    /// `FBIG` beyond what the object was opened for, `BUSY` where a page that would go, or be cut
    /// into, is pinned, or the store's. The object is as it was then, with every byte written to it.
    pub fn set_len(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        check_length(object, bytes)?;
        let before = object.len();
        if bytes < before {
            return self.cut(object, bytes, || object.store.set_len(bytes));
        }
        object.store.set_len(bytes)?;
        self.zero_behind(object, before)?;
        self.lengthen(object, bytes)
    }

    /// Follows a length that another has given the store.
    ///
    /// # Errors
    /// `FBIG`, `BUSY` as for [`Self::set_len`], `NOMEM` where there is no memory for the word of the
    /// last page, the store's, and the kernel's: an object that was to become longer, or has pinned
    /// pages, is as it was then.
    pub fn follow_len(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        check_length(object, bytes)?;
        if bytes < object.len() {
            self.cut(object, bytes, || Ok(()))
        } else {
            self.lengthen_over(object, bytes)
        }
    }

    fn cut(
        &self,
        object: &VmObject,
        bytes: u64,
        cut_store: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let begun = self.begin_cut(object, bytes);
        let result = begun.and_then(|()| cut_store()).and_then(|()| self.shorten(object, bytes));
        object.cut.store(u64::MAX, Ordering::SeqCst);
        // Release: see `wait_for_cut`.
        object.cuts.fetch_add(1, Ordering::Release);
        futex::wake(&object.cuts, u32::MAX, Reach::Process);
        result
    }

    /// Makes the object longer by what its store has already. The last page as it was has zeros
    /// behind the old end, if it is cached, and the store has bytes there.
    ///
    /// Bytes and length change under that page's lock: or it could be read once more with zeros
    /// there, or be written back with them, as soon as the length lets them pass.
    fn lengthen_over(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let before = object.len();
        let tail = (before % PAGE_SIZE as u64) as usize;
        if tail == 0 || bytes == before {
            return self.lengthen(object, bytes);
        }
        let page = ObjectPage(before / PAGE_SIZE as u64);
        let has_words = self.use_words(object, page)
            || (self.space.make_room(self, Room::Charge, 1, None) && self.use_words(object, page));
        if !has_words {
            return Err(Errno::NOMEM);
        }
        let locked = self.lock_settled(object, page);
        let mut result = Ok(());
        if locked.state() == State::Cached {
            let mut content = [0u8; PAGE_SIZE];
            let (mmu, offset) = (self.space.mmu(), page.offset() + tail as u64);
            result = object.store.read(page.offset(), &mut content);
            result = result.and_then(|()| mmu.memfd_write(object.memfd, offset, &content[tail..]));
        }
        let grown = result.and_then(|()| self.grow(object, bytes));
        locked.unlock();
        grown.map(|grown| self.follow_change(object, grown))
    }

    fn lengthen(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let grown = self.grow(object, bytes)?;
        self.follow_change(object, grown);
        Ok(())
    }

    /// Makes the memfd and the object longer; returns the pages that have come.
    fn grow(&self, object: &VmObject, bytes: u64) -> Result<ObjectRange, Errno> {
        let pages = bytes.div_ceil(PAGE_SIZE as u64) as usize;
        self.space.mmu().memfd_resize(object.memfd, pages)?;
        let before = object.pages();
        // A thread that sees the length sees the memfd. SeqCst for `follow_change`.
        object.length.store(bytes, Ordering::SeqCst);
        Ok(ObjectRange { start: ObjectPage(before as u64), end: object.range().end })
    }

    /// Has nothing written back any more of what a store of so many bytes loses, and waits for
    /// what is under way. The page that is cut into is among it: its tail would be lost. `BUSY` where
    /// a page of it is pinned.
    fn begin_cut(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let first = ObjectPage(bytes / PAGE_SIZE as u64);
        object.cuts.fetch_add(1, Ordering::Relaxed);
        // SeqCst: before the page locks below; write-back looks at it with the pages locked.
        object.cut.store(first.0, Ordering::SeqCst);
        let lost = ObjectRange { start: first, end: object.range().end.max(first) };
        for at in object.used_parts(lost).flat_map(ObjectRange::pages) {
            let locked = self.lock_settled(object, at);
            // Not by its flags, which a page whose memory has failed does not have.
            let is_pinned = object.is_pinned(at);
            locked.unlock();
            if is_pinned {
                return Err(Errno::BUSY);
            }
        }
        Ok(())
    }

    /// Waits, until `kill` ends it, while the store is being asked to become shorter. The caller holds
    /// no page lock.
    pub(super) fn wait_for_cut(
        &self,
        object: &VmObject,
        kill: Kill<'_>,
    ) -> Result<(), Interrupted> {
        loop {
            // Acquire pairs with the release in `cut`: a thread that goes on sees no cut.
            let cuts = object.cuts.load(Ordering::Acquire);
            if cuts.is_multiple_of(2) {
                return Ok(());
            }
            if kill.is_due() {
                return Err(Interrupted);
            }
            kill.sleep_on_futex(&object.cuts, cuts);
        }
    }

    fn shorten(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let old = object.range();
        // SeqCst: before the page locks below; a fault takes one and looks at the length then.
        object.length.store(bytes, Ordering::SeqCst);
        let gone = ObjectRange { start: object.range().end, end: old.end };
        for at in object.used_parts(gone).flat_map(ObjectRange::pages) {
            self.drop_page(object, at);
        }
        self.follow_change(object, gone);
        self.space.mmu().memfd_resize(object.memfd, object.pages())?;
        self.zero_behind(object, bytes)
    }

    /// Drops a page behind the end, dirty or not, and whatever is under way for it.
    fn drop_page(&self, object: &VmObject, at: ObjectPage) {
        let page = self.lock_settled(object, at);
        if page.state() == State::Cached {
            let one = ObjectRange::new(at, 1);
            self.try_to_unmap(object, one, Wait::Yes);
            if !self.try_to_punch(object, one) {
                return;
            }
            if page.has(Flags::DIRTY) && !object.is_memory {
                self.count_cleaned(object, at);
                self.dirty.fetch_sub(1, Ordering::Relaxed);
            }
        }
        // Nor does an error outlive its page; the memfd's end takes the marks away.
        self.space.release_stored(page.content());
        page.drop_content();
    }

    /// Locks a page that is not under way to the store: such a write would come after the store
    /// was cut, and make it longer again. What is written back later finds the new length.
    pub(super) fn lock_settled(&self, object: &VmObject, at: ObjectPage) -> Locked<'_, M> {
        loop {
            let page = self.lock(object, at);
            // Of a memory object it is under way to swap, which goes by what the page is then.
            if object.is_memory || !page.has(Flags::WRITEBACK) {
                return page;
            }
            let number = page.page();
            page.unlock();
            self.space.wait_on_page(number, Condition::clear(Flags::WRITEBACK));
        }
    }

    /// Zeroes the tail of a memory object's page, wherever its bytes are. It is DIRTY then: what is in
    /// swap has other bytes.
    fn zero_tail_of_memory(
        &self,
        object: &VmObject,
        at: ObjectPage,
        tail: usize,
    ) -> Result<(), Errno> {
        let one = ObjectRange::new(at, 1);
        while object.has_words(at) {
            let mut page = self.lock(object, at);
            match page.state() {
                State::Cached => {
                    let result = self.zero_cached(object, at, tail);
                    self.mark_dirty(object, at, &mut page);
                    return result;
                }
                State::None => return Ok(()),
                State::Poisoned if !page.has(Flags::CLEAN) => return Ok(()),
                // What it has in swap is good, and is to have other bytes.
                State::Poisoned => {
                    self.unpoison_locked(object, at, page);
                    continue;
                }
                _ => {}
            }
            if self.space.budget().try_charge(1, Purpose::Fault) {
                page.leave_locked();
                let mut bytes = [0u8; PAGE_SIZE];
                let filled = self.fill_run(object, one, &mut bytes);
                if filled.is_err() {
                    self.space.budget().uncharge(1);
                    self.unlock_pages(object, one);
                    return filled;
                }
                // Cached now, if it is not taken away again before it is locked.
                continue;
            }
            page.unlock();
            if !self.space.make_room(self, Room::Charge, 1, None) {
                self.space.wait_for_room();
            }
        }
        Ok(())
    }

    fn zero_cached(&self, object: &VmObject, at: ObjectPage, tail: usize) -> Result<(), Errno> {
        let zeros = &[0u8; PAGE_SIZE][tail..];
        self.space.mmu().memfd_write(object.memfd, at.offset() + tail as u64, zeros)
    }

    /// What lies behind byte `bytes` in its page reads as zeros from now on.
    fn zero_behind(&self, object: &VmObject, bytes: u64) -> Result<(), Errno> {
        let tail = (bytes % PAGE_SIZE as u64) as usize;
        if tail == 0 {
            return Ok(());
        }
        let page = ObjectPage(bytes / PAGE_SIZE as u64);
        if object.is_memory {
            return self.zero_tail_of_memory(object, page, tail);
        }
        if !object.has_words(page) {
            // A thread that reads it from now on sees the length.
            return Ok(());
        }
        let locked = self.lock_settled(object, page);
        let is_cached = locked.state() == State::Cached;
        if is_cached { self.zero_cached(object, page, tail) } else { Ok(()) }
    }
}

fn check_length(object: &VmObject, bytes: u64) -> Result<(), Errno> {
    let fits = bytes.div_ceil(PAGE_SIZE as u64) <= object.pages_max as u64;
    fits.then_some(()).ok_or(Errno::FBIG)
}
