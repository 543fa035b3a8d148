//! The objects' invariants, as code. For tests, on an MMU that can be looked into, while no thread
//! is in it; the letters are those of ARCHITECTURE.md.

use core::sync::atomic::{AtomicU32, Ordering};

use super::{ObjectId, Objects, VmObject};
use crate::mmu::object::InspectObjects;
use crate::page::{Flags, Snapshot, State};
use crate::units::{ObjectPage, ObjectRange, PageNum};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Held {
    cached: usize,
    dirty: usize,
    /// Pages of page words.
    words: usize,
}

impl<M: InspectObjects> Objects<M> {
    /// Checks all objects, and the space that they are mapped in; panics where something is wrong.
    pub fn check(&self) {
        let mut all = Held::default();
        for slot in 0..self.slots_used.load(Ordering::Relaxed) {
            let Some(object) = self.peek(slot) else { continue };
            self.check_object(ObjectId(slot as u32), object, &mut all);
        }
        assert_eq!(self.cached_pages(), all.cached, "cached pages of all objects");
        assert_eq!(self.dirty_pages(), all.dirty, "dirty pages of all objects");
        assert_eq!(self.space.mmu().memfd_pages(), all.cached, "pages of all memfds");
        // O4: what is cached is charged.
        self.space.check_beside(all.cached + all.words);
        for page in self.space.arena().pages() {
            self.check_mapping(page);
        }
    }

    fn check_object(&self, id: ObjectId, object: &VmObject, all: &mut Held) {
        let (mut cached_of_all, mut dirty_of_all) = (0, 0);
        for pages in ObjectRange::new(ObjectPage(0), object.pages_max).by_block() {
            let first = pages.start;
            let (mut cached, mut dirty) = (0, 0);
            for word in pages.pages().map(|page| self.check_page(id, object, page)) {
                cached += usize::from(word.state() == State::Cached);
                dirty += usize::from(word.has(Flags::DIRTY));
            }
            let block = self.find_block(object, first);
            let load = |count: &AtomicU32| count.load(Ordering::Relaxed) as usize;
            let [in_memory, dirtied, is_used] =
                block.map_or([0; 3], |of| [&of.mapped, &of.dirty, &of.is_used].map(load));
            assert_eq!(in_memory, cached, "cached from {first:?} of {id:?}");
            assert_eq!(dirtied, dirty, "dirty from {first:?} of {id:?}");
            assert_eq!(is_used != 0, block.is_some(), "the words of {first:?} of {id:?}");
            cached_of_all += cached;
            dirty_of_all += dirty;
            all.words += usize::from(block.is_some());
        }
        all.cached += cached_of_all;
        all.dirty += dirty_of_all;
        assert_eq!(object.cached_pages(), cached_of_all, "cached pages of {id:?}");
        assert_eq!(object.dirty_pages(), dirty_of_all, "dirty pages of {id:?}");
        assert_eq!(object.writeback.load(Ordering::Relaxed), 0, "pages of {id:?} under way");
    }

    fn check_page(&self, id: ObjectId, object: &VmObject, page: ObjectPage) -> Snapshot {
        let word = self.snapshot(object, page);
        let is_settled = !word.is_locked() && !word.has(Flags::WRITEBACK);
        assert!(is_settled, "{page:?} of {id:?} is under way: {word:?}");
        let is_cached = word.state() == State::Cached;
        let is_there = self.space.mmu().is_in_memfd(object.memfd, page);
        assert_eq!(is_cached, is_there, "{page:?} of {id:?} is {word:?}");
        // O3.
        let is_inside = page.index() < object.pages();
        assert!(!is_cached || is_inside, "{page:?} of {id:?} is {word:?}, behind the end");
        assert!(is_cached || !word.has(Flags::DIRTY), "{page:?} of {id:?} is {word:?}");
        // O6.
        object.check_pins(page, word);
        word
    }

    /// O1 and O2, of a page of the arena.
    fn check_mapping(&self, page: PageNum) {
        let mmu = self.space.mmu();
        let window = self.windows.lock(page);
        let (is_present, is_writable) = (window.is_present(page), window.is_writable(page));
        drop(window);
        let Some(shown) = mmu.shown_at(page) else {
            assert!(!is_present, "{page:?} shows no object, but its window has it");
            return;
        };
        let mut slots = 0..self.slots_used.load(Ordering::Relaxed);
        let object = slots.find_map(|slot| self.peek(slot).filter(|it| it.memfd == shown.memfd));
        let object = object.expect("what is mapped is in use");
        if shown.page.index() >= object.pages_max {
            assert!(!is_present, "{page:?} lies behind all ends, but its window has it");
            return;
        }
        let word = self.snapshot(object, shown.page);
        // O1. What the window has the kernel may have unmapped by itself.
        let is_cached = word.state() == State::Cached;
        assert!(is_cached || !is_present, "{page:?} is in its window, but {shown:?} is {word:?}");
        let mapping = mmu.mapping(page);
        assert!(is_present || !mapping.is_present, "{page:?} is mapped, but its window has it not");
        // O2.
        let is_mapped_writable = mapping.is_present && !mapping.is_write_protected;
        let is_dirty = word.has(Flags::DIRTY);
        assert!(
            is_dirty || !(is_writable || is_mapped_writable),
            "{page:?} can be written, but {shown:?} is {word:?}"
        );
        assert!(is_writable || !is_mapped_writable, "{page:?} can be written unknown");
    }
}
