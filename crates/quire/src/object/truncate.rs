//! An object's length changes.
//!
//! Shorter: the length first, so that no fault maps what is to go; then the pages, each under its
//! lock, which also waits for reads under way; then the home, from when on an access is a SIGBUS;
//! the store last. Longer: the store, the home, the length.

use core::sync::atomic::Ordering;

use super::rmap::Wait;
use super::{Object, Objects};
use crate::mmu::object::ObjectMmu;
use crate::page::{Condition, Flags, Snapshot, State};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

impl<M: ObjectMmu> Objects<M> {
    /// Changes an object's length, in its store as well.
    ///
    /// # Errors
    /// `FBIG` beyond what the object was opened for, or the store's. The object has its old length
    /// then, but what was cut from its cache has to be read again; where the store refuses that as
    /// well, the object stays as short as it was to become.
    pub fn set_len(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        if bytes.div_ceil(PAGE_SIZE as u64) > object.pages_max() as u64 {
            return Err(Errno::FBIG);
        }
        let before = object.len();
        if bytes < before {
            self.shorten(object, bytes)?;
            if let Err(error) = object.store.set_len(bytes) {
                self.lengthen_over(object, before)?;
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
    /// `FBIG`, the store's, and the kernel's: an object that was to become longer is as it was then.
    pub fn follow_len(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let _resize = object.resize.lock();
        if bytes.div_ceil(PAGE_SIZE as u64) > object.pages_max() as u64 {
            return Err(Errno::FBIG);
        }
        if bytes < object.len() {
            self.shorten(object, bytes)
        } else {
            self.lengthen_over(object, bytes)
        }
    }

    /// Makes the object longer by what its store has already. The last page as it was has zeros
    /// behind the old end, if it is cached, and the store has bytes there.
    ///
    /// Bytes and length change under that page's lock: or it could be read once more with zeros
    /// there, or be written back with them, as soon as the length lets them pass.
    fn lengthen_over(&self, object: &Object, bytes: u64) -> Result<(), Errno> {
        let before = object.len();
        let tail = (before % PAGE_SIZE as u64) as usize;
        if tail == 0 || bytes == before {
            return self.lengthen(object, bytes);
        }
        let page = ObjectPage(before / PAGE_SIZE as u64);
        let old = self.lock_settled(object, page);
        let mut result = Ok(());
        if old.state() == State::Cached {
            let mut content = [0u8; PAGE_SIZE];
            let home = self.space.mmu();
            result = object.store.read(page.offset(), &mut content).and_then(|()| {
                home.home_write(object.home, page.offset() + tail as u64, &content[tail..])
            });
        }
        let result = result.and_then(|()| self.lengthen(object, bytes));
        self.space.unlock_word(object.word(page));
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
        object.length.store(bytes, Ordering::SeqCst);
        let gone = ObjectRange { start: object.range().end, end: old.end };
        let mut at = gone.start;
        while at < gone.end {
            if object.block(at).is_used.load(Ordering::SeqCst) == 0 {
                at = ObjectPage((at.0 | 511) + 1);
                continue;
            }
            self.drop_page(object, at);
            at = at.add(1);
        }
        self.space.mmu().home_resize(object.home, object.pages())?;
        self.zero_behind(object, bytes)
    }

    /// Drops a page behind the end, dirty or not, and whatever is under way for it.
    fn drop_page(&self, object: &Object, page: ObjectPage) {
        let word = object.word(page);
        let old = self.lock_settled(object, page);
        let one = ObjectRange::new(page, 1);
        if old.state() == State::Cached {
            self.try_to_unmap(object, one, Wait::Yes);
            if self.space.mmu().home_punch(object.home, one).is_ok() {
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
            let offset = page.offset() + tail as u64;
            self.space.mmu().home_write(object.home, offset, &zeros[tail..])
        } else {
            Ok(())
        };
        self.space.unlock_word(word);
        result
    }
}
