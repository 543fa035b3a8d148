//! An object's length changes.
//!
//! Shorter: the length first, so that no fault maps what is to go; then the pages, each under its
//! lock, which also waits for reads under way; then the home, from when on an access is a SIGBUS;
//! the store last. Longer: the store, the home, the length.

use core::sync::atomic::Ordering;

use super::large::LargeFrame;
use super::requests::by_block;
use super::rmap::Wait;
use super::{Object, Objects};
use crate::mmu::object::ObjectMmu;
use crate::page::{Condition, Flags, Snapshot, State};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE};

impl<M: ObjectMmu> Objects<M> {
    /// Changes an object's length, in its store as well.
    ///
    /// # Errors
    /// `FBIG` beyond what the object was opened for, or the store's. The object has its old length
    /// then, but what was cut from its cache has to be read again.
    pub fn set_len(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        if bytes.div_ceil(PAGE_SIZE as u64) > object.pages_max() as u64 {
            return Err(Errno::FBIG);
        }
        let before = object.len();
        if bytes < before {
            self.shorten(object, bytes)?;
            if let Err(error) = object.store.set_len(bytes) {
                self.lengthen(object, before)?;
                return Err(error);
            }
            return Ok(());
        }
        object.store.set_len(bytes)?;
        self.zero_behind(object, before)?;
        self.lengthen(object, bytes)
    }

    /// Follows a length that the store was given by somebody else.
    ///
    /// # Errors
    /// `FBIG`, and the kernel's.
    pub fn follow_len(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        if bytes.div_ceil(PAGE_SIZE as u64) > object.pages_max() as u64 {
            return Err(Errno::FBIG);
        }
        if bytes < object.len() {
            self.shorten(object, bytes)
        } else {
            let before = object.len();
            self.lengthen(object, bytes)?;
            self.read_behind(object, before)
        }
    }

    /// The last page as it was may have been cached, with zeros behind byte `before`, where the
    /// store has bytes now.
    fn read_behind(&self, object: &Object, before: u64) -> Result<(), Errno> {
        let tail = (before % PAGE_SIZE as u64) as usize;
        if tail == 0 || object.len() == before {
            return Ok(());
        }
        let page = ObjectPage(before / PAGE_SIZE as u64);
        let word = object.word(page);
        let old = self.space.lock_word(word);
        let mut result = Ok(());
        if old.state() == State::Cached {
            let mut bytes = [0u8; PAGE_SIZE];
            result = object.store.read(page.offset(), &mut bytes).and_then(|()| {
                self.cache_write(object, page.offset() + tail as u64, &bytes[tail..])
            });
        }
        self.space.unlock_word(word);
        result
    }

    fn lengthen(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let pages = bytes.div_ceil(PAGE_SIZE as u64) as usize;
        self.space.mmu().home_resize(object.home, pages)?;
        // Release: who sees the length sees the home.
        object.length.store(bytes, Ordering::Release);
        Ok(())
    }

    fn shorten(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let old = object.range();
        // SeqCst: before the page locks below; a fault takes one and looks at the length then.
        let before = object.length.swap(bytes, Ordering::SeqCst);
        let gone = ObjectRange { start: object.range().end, end: old.end };
        if let Err(error) = self.bring_cut_block_home(object) {
            object.length.store(before, Ordering::SeqCst);
            return Err(error);
        }
        let mut at = gone.start;
        while at < gone.end {
            if object.block(at).is_used.load(Ordering::SeqCst) == 0 {
                at = ObjectPage((at.0 | 511) + 1);
                continue;
            }
            self.drop_page(object, at);
            at = at.add(1);
        }
        self.leave_frames_behind(object, gone);
        self.space.mmu().home_resize(object.home, object.pages())?;
        self.zero_behind(object, bytes)
    }

    /// The block that the end cuts lives at home: only there an access behind the end is a SIGBUS.
    fn bring_cut_block_home(&self, object: &Object) -> Result<(), Errno> {
        let last = ObjectPage(object.len() >> PAGE_SHIFT);
        if last.index() >= object.pages_max() {
            return Ok(());
        }
        let pages = object.block_of(last);
        // A read that is under way may still give it a large frame, but no later one: it holds all
        // of the block's locks, this one among them.
        let word = object.word(pages.start);
        self.space.lock_word(word);
        let is_home = object.block(last).frame() == LargeFrame::NONE;
        self.space.unlock_word(word);
        if is_home {
            return Ok(());
        }
        let moved = self.migrate_block(object, pages, LargeFrame::NONE, Wait::Yes, None);
        match moved {
            Ok(moved) if moved.failed == 0 => Ok(()),
            _ => Err(Errno::NOMEM),
        }
    }

    /// Blocks behind the end, all of whose pages have gone, leave their large frames.
    fn leave_frames_behind(&self, object: &Object, gone: ObjectRange) {
        for pages in by_block(gone).map(|part| object.block_of(part.start)) {
            let is_behind = gone.intersect(pages).start == pages.start;
            if is_behind && object.block(pages.start).frame() != LargeFrame::NONE {
                let _ = self.lock_block(object, pages, Wait::Yes);
                self.retire_windows(object, pages, Wait::Yes);
                self.leave_frame(object, pages.start, false);
                self.unlock_words(object, pages);
            }
        }
    }

    /// Drops a page behind the end, dirty or not, and whatever is under way for it.
    fn drop_page(&self, object: &Object, page: ObjectPage) {
        let word = object.word(page);
        let old = self.lock_settled(object, page);
        let one = ObjectRange::new(page, 1);
        if old.state() == State::Cached {
            self.try_to_unmap(object, one, Wait::Yes);
            if self.cache_punch(object, one).is_ok() {
                if old.has(Flags::DIRTY) {
                    object.count_cleaned(page);
                    self.dirty.fetch_sub(1, Ordering::Relaxed);
                }
                self.uncharge_dropped(object, one);
                self.space.unlock_word_with(word, Object::GONE);
                return;
            }
        }
        self.space.unlock_word(word);
    }

    /// Locks a page that is not under way to the store: such a write would come after the store
    /// was cut, and make it longer again. What is written back later finds the new length.
    fn lock_settled(&self, object: &Object, page: ObjectPage) -> Snapshot {
        let word = object.word(page);
        loop {
            let old = self.space.lock_word(word);
            if !old.has(Flags::WRITEBACK) {
                return old;
            }
            self.space.unlock_word(word);
            self.space.wait_on_word(word, Condition::clear(Flags::WRITEBACK));
        }
    }

    /// What lies behind byte `bytes` in its page reads as zeros from now on.
    fn zero_behind(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let tail = (bytes % PAGE_SIZE as u64) as usize;
        if tail == 0 {
            return Ok(());
        }
        let page = ObjectPage(bytes / PAGE_SIZE as u64);
        let word = object.word(page);
        let old = self.lock_settled(object, page);
        let result = if old.state() == State::Cached {
            let zeros = [0u8; PAGE_SIZE];
            self.cache_write(object, page.offset() + tail as u64, &zeros[tail..])
        } else {
            Ok(())
        };
        self.space.unlock_word(word);
        result
    }
}
