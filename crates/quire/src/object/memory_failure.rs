//! A page whose memory has gone bad.
//!
//! Its bytes are gone, and an access to it is an error in every mapping, so that no program takes older
//! bytes for them: what the store has may be older than what was in memory. This ends where the
//! application says that older bytes are good enough ([`Objects::unpoison`]), or the object is cut before
//! the page.
//!
//! The page's word is `Poisoned`; the page is not cached, not dirty, and mapped nowhere. What a memory
//! object's page has in swap it keeps, as a clean page does. Each mapping has a mark there, from which an
//! access is a SIGBUS; a mapping that comes later gets its own at the first fault.

use core::sync::atomic::Ordering;

use super::pages::Locked;
use super::rmap::Wait;
use super::{Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, State};
use crate::sys::Errno;
use crate::units::{ObjectPage, ObjectRange};

impl<M: ObjectMmu> Objects<M> {
    /// Gives the memory of a page up, and makes every access to it an error. What was written to it
    /// and not yet to the store is lost, which flushes are told. `false` for a page that the object
    /// does not have, or where there is no memory to note it. After an error of the kernel, which does
    /// not take the memory back, nothing has changed.
    pub fn memory_failure(&self, object: &VmObject, page: ObjectPage) -> Result<bool, Errno> {
        if page.index() >= object.pages() || !self.use_words(object, page) {
            return Ok(false);
        }
        // It waits for a read under way, whose bytes would come after it.
        let locked = self.lock(object, page);
        // Behind the end since then, under the lock that truncation takes.
        if page.index() >= object.pages() || locked.state() == State::Poisoned {
            return Ok(page.index() < object.pages());
        }
        let one = ObjectRange::new(page, 1);
        if locked.state() == State::Cached {
            self.try_to_unmap(object, one, Wait::Yes);
            self.space.mmu().memfd_punch(object.memfd, one)?;
            if !object.is_memory {
                if locked.has(Flags::DIRTY) {
                    self.count_cleaned(object, page);
                    self.dirty.fetch_sub(1, Ordering::Relaxed);
                    object.note_write_error(page, Errno::HWPOISON);
                }
                // Nor can it be written again, should the next sync fail.
                object.synced.note_dropped(locked.content());
            }
            self.count_uncached(object, page, 1);
            self.space.budget().uncharge(1);
        } else if locked.state() == State::Pool {
            // From now on its packed copy counts as kept beside a page.
            self.space.swap().keep_copies(1);
        }
        self.for_each_mapping(object, one, Wait::Yes, |window, part| {
            part.pages().for_each(|page| self.poison(page, window));
        });
        // What is under way to the store was copied before, and ends as such.
        locked.fail();
        Ok(true)
    }

    /// Gives poisoned pages up: what the store has is read at the next access. Returns how many.
    /// Those that are pinned stay as they are: the pin promised the page that is gone.
    pub fn unpoison(&self, object: &VmObject, pages: ObjectRange) -> usize {
        let mut count = 0;
        for page in pages.intersect(object.range()).pages() {
            if self.snapshot(object, page).state() != State::Poisoned {
                continue;
            }
            let locked = self.lock_settled(object, page);
            if locked.state() == State::Poisoned && !object.is_pinned(page) {
                self.unpoison_locked(object, page, locked);
                count += 1;
            }
        }
        if count > 0 {
            // Private mappings have marks of their own.
            self.follow_change(object, pages);
        }
        count
    }

    /// Gives a locked, poisoned page up, and unlocks it.
    pub(super) fn unpoison_locked(
        &self,
        object: &VmObject,
        page: ObjectPage,
        locked: Locked<'_, M>,
    ) {
        // The marks of all mappings.
        self.for_each_mapping(object, ObjectRange::new(page, 1), Wait::Yes, |window, part| {
            debug_assert!(window.present_of(part).is_none(), "a poisoned page is mapped nowhere");
            self.space.mmu().unmap(part);
        });
        if locked.has(Flags::IN_POOL) {
            self.space.swap().forget_copies(1);
        }
        locked.uncache();
    }
}
