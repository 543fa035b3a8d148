//! A fault on a memory object's page that is not cached, where nothing has to be waited for.
//!
//! What was never written is zeros, and what is packed in memory is unpacked, by the handler
//! itself, with the neighbours that are alike and that the fault's stream will want. What is in the
//! swap file is read by a store worker, like the page of a file.
//!
//! Never blocks: under the window's lock, page locks and places' are only tried.

use core::sync::atomic::Ordering;

use super::shmem::{NotLoaded, Sleep};
use super::window::Mapped;
use super::{Object, Objects};
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::space::vma::Vma;
use crate::units::{
    BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange,
};

/// Packed pages that a fault unpacks at most, as a power of two: as of anonymous memory.
const UNPACK_ORDER_MAX: u32 = 6;

/// What became of a page that was to be filled at once.
pub(super) enum AtOnce {
    /// It and, as a rule, its neighbours in the range are cached. It is locked, they are not.
    Cached(ObjectRange),
    /// It takes somebody who may sleep. It is locked.
    NotHere,
    /// So many pages are needed. Nothing is locked.
    NeedsMemory(usize),
}

/// What a page that is not cached takes to be filled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Zeros,
    Packed,
    InFile,
}

impl Content {
    fn of(place: Snapshot) -> Content {
        match place.state() {
            State::None => Content::Zeros,
            State::File => Content::InFile,
            _ => Content::Packed,
        }
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Fills a locked page of a memory object that is not cached, and its like among the aligned
    /// 2^order pages around it.
    pub(super) fn fill_at_once(&self, object: &Object, at: ObjectPage, order: u32) -> AtOnce {
        let content = Content::of(self.place(object, at));
        // A thread that serves itself does so on a signal's stack, which has no room for a page.
        let is_cramped = content == Content::Packed && self.space.mmu().is_inline();
        if content == Content::InFile || is_cramped {
            return AtOnce::NotHere;
        }
        let order_max = if content == Content::Packed { UNPACK_ORDER_MAX } else { BLOCK_ORDER };
        let pages = self.lock_alike_around(object, at, order.min(order_max), content);
        let Some(charged) = self.charge_locked(object, at, pages) else {
            return AtOnce::NeedsMemory(pages.len());
        };
        // Under their locks: what lies behind the end must not enter the memfd.
        let kept = charged.intersect(object.range());
        let filled = match content {
            Content::Zeros => self.fill_zeros(object, kept),
            _ => self.unpack(object, at, kept),
        };
        self.space.budget().uncharge(charged.len() - filled);
        for page in charged.pages().filter(|&page| page != at) {
            self.space.unlock_word(object.word(page));
        }
        match object.word(at).load().state() {
            State::Cached => AtOnce::Cached(charged),
            _ => AtOnce::NotHere,
        }
    }

    /// Locks the neighbours of a locked page that are not cached either and are filled the same
    /// way, inside the aligned 2^order pages; returns the run.
    fn lock_alike_around(
        &self,
        object: &Object,
        at: ObjectPage,
        order: u32,
        content: Content,
    ) -> ObjectRange {
        let start = ObjectPage(at.0 >> order << order);
        let folio = ObjectRange::new(start, 1 << order).intersect(object.range());
        let try_join = |page: ObjectPage| {
            let is_alike = || Content::of(self.place(object, page)) == content;
            if !is_alike() || !self.lock_absent(object, page) {
                return false;
            }
            // Looked at again: until it was locked it may have come and gone.
            let is_still_alike = is_alike();
            if !is_still_alike {
                self.space.unlock_word(object.word(page));
            }
            is_still_alike
        };
        let mut run = ObjectRange::new(at, 1);
        while run.end < folio.end && try_join(run.end) {
            run.end = run.end.add(1);
        }
        while run.start > folio.start && try_join(ObjectPage(run.start.0 - 1)) {
            run.start = ObjectPage(run.start.0 - 1);
        }
        run
    }

    /// Zeros for locked, charged pages; returns how many are cached.
    fn fill_zeros(&self, object: &Object, pages: ObjectRange) -> usize {
        let zeros = self.space.zeros();
        let bytes = &zeros[..(pages.len() << PAGE_SHIFT).min(zeros.len())];
        if pages.is_empty()
            || self.space.mmu().memfd_write(object.memfd, pages.start.offset(), bytes).is_err()
        {
            return 0;
        }
        pages.pages().for_each(|page| self.enter_cache(object, page, Flags::EMPTY));
        pages.len()
    }

    /// Unpacks locked, charged pages as far as nobody is in the way; returns how many are cached.
    /// Never inlined: a page on the stack is too much for who gets past without it, in a signal.
    #[inline(never)]
    fn unpack(&self, object: &Object, at: ObjectPage, pages: ObjectRange) -> usize {
        let mut bytes = [0u8; PAGE_SIZE];
        let mut filled = 0;
        for page in pages.pages() {
            match self.load_place(object, page, Sleep::No, &mut bytes) {
                Ok(()) => {}
                // One that is lost is a worker's to say so, when it is asked for.
                Err(NotLoaded::Busy | NotLoaded::Bad(_)) if page == at => break,
                Err(_) => continue,
            }
            let end = object.len().saturating_sub(page.offset()).min(PAGE_SIZE as u64) as usize;
            bytes[end..].fill(0);
            if self.space.mmu().memfd_write(object.memfd, page.offset(), &bytes).is_err() {
                break;
            }
            let kept = self.settle_place(object, page, Sleep::No);
            self.enter_cache(object, page, kept);
            filled += 1;
        }
        filled
    }

    /// Maps what was filled around a fault.
    pub(super) fn map_filled(
        &self,
        object: &Object,
        vma: &Vma,
        window: &mut Mapped,
        filled: ObjectRange,
        asked: PageNum,
    ) {
        let at = vma.attributes.backing.object_page(asked);
        let block = PageRange::new(asked.align_down(BLOCK_ORDER), BLOCK_PAGES);
        let shown = vma.range.intersect(block);
        let before = (at.0 - filled.start.0).min(asked.0 - shown.start.0);
        let behind = (filled.end.0 - at.0).min(shown.end.0 - asked.0);
        let start = PageNum(asked.0 - before);
        let around = PageRange::new(start, (before + behind) as usize);
        self.map_pages(object, vma, window, around, asked);
    }

    /// A locked page's bytes are in the memfd: its word says so from now on.
    fn enter_cache(&self, object: &Object, page: ObjectPage, flags: Flags) {
        object.word(page).set(Snapshot::new(State::Cached, 0).with(flags));
        object.count_cached(page, 1);
        // Relaxed, as in `count_cached`.
        self.cached.fetch_add(1, Ordering::Relaxed);
    }
}
