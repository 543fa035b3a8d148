//! Memory objects' pages that go: into swap, as those of anonymous memory, by whoever reclaims.
//!
//! Never sleeps: page locks are held by reclaim already, places are tried.

use core::sync::atomic::Ordering;

use super::shmem::KEPT;
use super::{Object, Objects};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::reclaim::Unstored;
use crate::scratch::Scratch;
use crate::sys::monotonic_ns;
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE};

impl<M: ObjectMmu> Objects<M> {
    /// Puts locked, cached pages, which are mapped nowhere, into swap, drops them from the cache
    /// and unlocks them; returns how many went. What cannot go stays cached.
    pub(super) fn store_run(
        &self,
        object: &Object,
        run: ObjectRange,
        scratch: &mut Scratch,
    ) -> usize {
        let start = monotonic_ns();
        let mut stored = ObjectRange { start: run.start, end: run.start };
        let mut gone = 0;
        for page in run.pages() {
            if self.store_page(object, page, scratch) {
                stored.end = page.add(1);
                continue;
            }
            gone += self.drop_stored(object, stored);
            self.space.unlock_word(object.word(page));
            stored = ObjectRange { start: page.add(1), end: page.add(1) };
        }
        gone += self.drop_stored(object, stored);
        self.space.budget().count(Event::CompressNs, (monotonic_ns() - start) as usize);
        gone
    }

    /// Puts one page into its place. It is cached still, and not DIRTY any more. Never inlined, for
    /// the page on its stack.
    #[inline(never)]
    fn store_page(&self, object: &Object, page: ObjectPage, scratch: &mut Scratch) -> bool {
        let mut bytes = [0u8; PAGE_SIZE];
        let word = object.word(page);
        let old = word.load();
        let Some(place) = self.use_place(object, page) else { return false };
        if self.space.mmu().memfd_read(object.memfd, page.offset(), &mut bytes).is_err() {
            // Behind the memfd's end: its truncation is under way, which drops the page.
            self.space.unlock_word(place.word);
            return false;
        }
        self.forget_copy(old);
        self.space.free_place(place.old);
        let (after, result) = match self.space.store_page(place.owner, &bytes, scratch) {
            Ok(stored) => (stored.content(), old.without(KEPT.or(Flags::DIRTY)).with(Flags::CLEAN)),
            // It stays as it is until it is written again: no need to try again.
            Err(Unstored::Incompressible) => {
                (Snapshot::new(State::None, 0), old.without(KEPT).with(Flags::INCOMPRESSIBLE))
            }
            Err(Unstored::NoRoom) => (Snapshot::new(State::None, 0), old.without(KEPT)),
        };
        self.space.unlock_word_with(place.word, after);
        word.set(result);
        result.has(Flags::CLEAN)
    }

    /// Locked pages are dropped from the cache, as they came into it.
    pub(super) fn note_dropped(&self, object: &Object, run: ObjectRange) {
        if !object.is_memory() {
            return;
        }
        let (budget, swap) = (self.space.budget(), self.space.swap());
        for page in run.pages() {
            let old = object.word(page).load();
            self.forget_copy(old);
            if old.has(Flags::CLEAN) && !old.has(Flags::DIRTY) {
                budget.count(Event::Pswpout, 1);
                budget.count(Event::PswpoutClean, 1);
                swap.note_clean(1);
            }
        }
    }

    /// Drops locked pages that are in their places from the cache, and unlocks them.
    fn drop_stored(&self, object: &Object, run: ObjectRange) -> usize {
        if run.is_empty() {
            return 0;
        }
        let is_dropped = self.space.mmu().memfd_punch(object.memfd, run).is_ok();
        if is_dropped {
            object.count_uncached(run.start, run.len());
            // Relaxed, as in `count_uncached`.
            self.cached.fetch_sub(run.len(), Ordering::Relaxed);
            self.space.budget().uncharge(run.len());
        }
        for page in run.pages() {
            let word = object.word(page);
            if is_dropped {
                self.space.unlock_word_with(word, Object::GONE);
            } else {
                // Cached still, and as its place is.
                self.space.unlock_word(word);
            }
        }
        if is_dropped { run.len() } else { 0 }
    }
}
