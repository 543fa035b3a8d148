//! Memory objects' pages that go: into swap, as those of anonymous memory, by the thread that reclaims.
//!
//! Never sleeps: page locks are held by reclaim already.

use super::pages::Locked;
use super::{Objects, VmObject};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Stored};
use crate::reclaim::Unstored;
use crate::scratch::Scratch;
use crate::sys::monotonic_ns;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

impl<M: ObjectMmu> Objects<M> {
    /// Puts locked, cached pages, which are mapped nowhere, into swap, drops them from the cache
    /// and unlocks them; returns how many went. What cannot go stays cached.
    pub(super) fn store_run(
        &self,
        object: &VmObject,
        run: ObjectRange,
        scratch: &mut Scratch,
    ) -> usize {
        let start = monotonic_ns();
        let mut stored = ObjectRange { start: run.start, end: run.start };
        let mut gone = 0;
        for at in run.pages() {
            let mut page = self.adopt(object, at);
            if self.store_page(object, at, &mut page, scratch) {
                page.leave_locked();
                stored.end = at.add(1);
                continue;
            }
            page.unlock();
            gone += self.drop_stored(object, stored);
            stored = ObjectRange { start: at.add(1), end: at.add(1) };
        }
        gone += self.drop_stored(object, stored);
        self.space.budget().count(Event::CompressNs, (monotonic_ns() - start) as usize);
        gone
    }

    /// Puts one page into swap. It is cached still, and CLEAN. Never inlined, for the page on its
    /// stack.
    #[inline(never)]
    fn store_page(
        &self,
        object: &VmObject,
        at: ObjectPage,
        page: &mut Locked<'_, M>,
        scratch: &mut Scratch,
    ) -> bool {
        let mut bytes = [0u8; PAGE_SIZE];
        if self.space.mmu().memfd_read(object.memfd, at.offset(), &mut bytes).is_err() {
            // Behind the memfd's end: its truncation is under way, which drops the page.
            return false;
        }
        match self.space.store_page(page.page(), &bytes, scratch) {
            Ok(stored) => {
                if matches!(stored, Stored::Pool(_)) {
                    self.space.swap().keep_copies(1);
                }
                page.keep_stored(stored);
                true
            }
            // It stays as it is until it is written again: no need to try again.
            Err(Unstored::Incompressible) => {
                page.set_flags_locked(Flags::INCOMPRESSIBLE);
                false
            }
            Err(Unstored::NoRoom) => false,
        }
    }

    /// Drops locked pages that were put into swap from the cache, and unlocks them.
    fn drop_stored(&self, object: &VmObject, run: ObjectRange) -> usize {
        if run.is_empty() {
            return 0;
        }
        if !self.try_to_punch(object, run) {
            // Cached still, and as they are in swap.
            self.unlock_pages(object, run);
            return 0;
        }
        for page in run.pages() {
            let page = self.adopt(object, page);
            if page.has(Flags::IN_POOL) {
                self.space.swap().forget_copies(1);
            }
            page.uncache();
        }
        run.len()
    }
}
