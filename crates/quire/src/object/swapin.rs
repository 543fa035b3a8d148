//! A fault on a memory object's page that is not cached, where nothing has to be waited for.
//!
//! What was never written is zeros, and what is packed in memory is unpacked, by the handler
//! itself, with the neighbours that are alike and that the fault's stream will want. What is in the
//! swap file is read by a store worker, like the page of a file.

use super::pages::Locked;
use super::requests::zero_tail;
use super::window::View;
use super::{Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Snapshot, State};
use crate::units::{
    BLOCK_ORDER, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange,
};

/// Packed pages that a fault unpacks at most, as a power of two: as of anonymous memory.
const UNPACK_ORDER_MAX: u32 = 6;

/// What became of a page that was to be filled at once.
pub(super) enum AtOnce<'a, M: ObjectMmu> {
    /// It and, as a rule, its neighbours in the range are cached. They are not locked.
    Cached(ObjectRange, Locked<'a, M>),
    /// It takes a thread that may sleep.
    NotHere(Locked<'a, M>),
    /// So many pages are needed. Nothing is locked.
    NeedsMemory(usize),
}

impl<M: ObjectMmu> Objects<M> {
    /// Fills a locked page of a memory object that is not cached, and its like among the aligned
    /// 2^order pages around it.
    pub(super) fn fill_at_once<'a>(
        &'a self,
        object: &VmObject,
        at: ObjectPage,
        page: Locked<'a, M>,
        order: u32,
    ) -> AtOnce<'a, M> {
        // A thread that serves itself does so on a signal's stack, which has no room for a page.
        let is_cramped = self.space.mmu().is_inline();
        let is_packed = |word: Snapshot| matches!(word.state(), State::Same | State::Pool);
        let is_zeros = |word: Snapshot| word.state() == State::None;
        let zeros = is_zeros(page.content());
        if !zeros && (is_cramped || !is_packed(page.content())) {
            return AtOnce::NotHere(page);
        }
        page.leave_locked();
        let pages = if zeros {
            self.lock_around(object, at, order.min(BLOCK_ORDER), is_zeros)
        } else {
            self.lock_around(object, at, order.min(UNPACK_ORDER_MAX), is_packed)
        };
        let Some(charged) = self.charge_locked(object, at, pages) else {
            return AtOnce::NeedsMemory(pages.len());
        };
        // Under their locks: what lies behind the end must not enter the memfd.
        let kept = charged.intersect(object.range());
        let filled =
            if zeros { self.fill_zeros(object, kept) } else { self.unpack(object, at, kept) };
        self.space.budget().uncharge(charged.len() - filled);
        for page in charged.pages().filter(|&page| page != at) {
            self.adopt(object, page).unlock();
        }
        let page = self.adopt(object, at);
        match page.state() {
            State::Cached => AtOnce::Cached(charged, page),
            _ => AtOnce::NotHere(page),
        }
    }

    /// Zeros for locked, charged pages; returns how many are cached.
    fn fill_zeros(&self, object: &VmObject, pages: ObjectRange) -> usize {
        let zeros = self.space.zeros();
        let bytes = &zeros[..(pages.len() << PAGE_SHIFT).min(zeros.len())];
        if pages.is_empty()
            || self.space.mmu().memfd_fill(object.memfd, pages.start.offset(), bytes).is_err()
        {
            return 0;
        }
        for page in pages.pages() {
            let mut page = self.adopt(object, page);
            page.cache();
            page.leave_locked();
        }
        self.count_cached(object, pages.start, pages.len());
        pages.len()
    }

    /// Unpacks locked, charged pages as far as it can; returns how many are cached. Never inlined:
    /// a page on the stack is too much for the signal handlers that get past without it.
    #[inline(never)]
    fn unpack(&self, object: &VmObject, at: ObjectPage, pages: ObjectRange) -> usize {
        let mut bytes = [0u8; PAGE_SIZE];
        let mut filled = 0;
        for number in pages.pages() {
            let mut page = self.adopt(object, number);
            // One that is lost is a worker's to say so, when it is asked for.
            let is_loaded = self.load_packed(&page, &mut bytes);
            zero_tail(object, ObjectRange::new(number, 1), &mut bytes);
            let is_filled = is_loaded
                && self.space.mmu().memfd_write(object.memfd, number.offset(), &bytes).is_ok();
            if is_filled {
                self.enter_from_swap(&mut page);
                self.count_cached(object, number, 1);
                filled += 1;
            }
            page.leave_locked();
            if is_loaded != is_filled || (!is_filled && number == at) {
                break;
            }
        }
        filled
    }

    /// Maps what was filled around a fault.
    pub(super) fn map_filled(&self, view: &mut View<'_>, filled: ObjectRange, asked: PageNum) {
        let at = view.object_page(asked);
        let start = PageNum(asked.0.saturating_sub(at.0 - filled.start.0));
        let end = PageNum(asked.0 + (filled.end.0 - at.0));
        let around = PageRange { start, end }.intersect(view.bounds(asked));
        self.map_pages(view, around, asked);
    }
}
