//! Reads of what is not cached: the faulting page with its neighbours, and what a stream will want
//! next.
//!
//! Streams are the object's (`crate::fault::order`): a fault where one goes on makes its next folio
//! four times as large, and from [`AHEAD_ORDER`] on the folio behind it is read as well, by another
//! worker, before anybody asks. What is read is locked until it is there.

use super::fault::{Fault, Look};
use super::requests::{Asker, Request, by_block};
use super::window::Mapped;
use super::{Object, ObjectId, Objects};
use crate::control::Event;
use crate::fault::Outcome;
use crate::fault::order::Guess;
use crate::mmu::object::ObjectMmu;
use crate::page::State;
use crate::space::vma::Vma;
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PageNum, PageRange};

/// From this order on a stream is read ahead of.
const AHEAD_ORDER: u32 = 4;

impl<M: ObjectMmu> Objects<M> {
    /// Sends the read of a page that is not cached, and of those that read-ahead adds. Its word is
    /// locked, and stays so until the read is done.
    pub(super) fn begin_read(&self, fault: Fault<'_>, window: &Mapped) -> Look {
        let Fault { id, object, at, page, access, vma, guess, settles } = fault;
        let pages = self.lock_absent_around(object, at, guess.order);
        let is_block = pages.len() == BLOCK_PAGES;
        if is_block && !settles && !self.has_room_for_block() {
            // Read in pieces it would live at home, in fresh memory.
            self.unlock_words(object, pages);
            return Look::NeedsMemory(BLOCK_PAGES);
        }
        let Some(pages) = self.charge_locked(object, at, pages) else {
            return Look::NeedsMemory(pages.len());
        };
        self.space.budget().count(Event::Pgmajfault, 1);
        let around = self.around(object, vma, page, guess, window);
        let asker = Some(Asker { page, vma: *vma, around, access });
        if !self.request(id, Request::Read { object: id, pages, asker }) {
            self.uncharge_run(object, pages);
            self.unlock_words(object, pages);
            self.space.mmu().relax();
            return self.answer(page, Outcome::Parked);
        }
        self.advance(object, guess, pages);
        self.read_ahead(id, object, guess, pages.end);
        Look::Ended(Outcome::Parked)
    }

    /// Charges a run of locked pages, or the part of it from `at` on that there is memory for, and
    /// unlocks the rest. `None`: there is none, and all are unlocked.
    pub(super) fn charge_locked(
        &self,
        object: &Object,
        at: ObjectPage,
        mut pages: ObjectRange,
    ) -> Option<ObjectRange> {
        self.call_if_low();
        loop {
            if self.try_charge_run(object, pages) {
                return Some(pages);
            }
            if pages.len() == 1 {
                self.unlock_words(object, pages);
                return None;
            }
            let kept = ObjectRange::new(at, pages.len() / 2).intersect(pages);
            self.unlock_words(object, ObjectRange { start: pages.start, end: kept.start });
            self.unlock_words(object, ObjectRange { start: kept.end, end: pages.end });
            pages = kept;
        }
    }

    /// Locks the neighbours of a locked page that are not cached either, inside the aligned 2^order
    /// pages; returns the run.
    pub(super) fn lock_absent_around(
        &self,
        object: &Object,
        at: ObjectPage,
        order: u32,
    ) -> ObjectRange {
        let start = ObjectPage(at.0 >> order << order);
        let folio = ObjectRange::new(start, 1 << order).intersect(object.range());
        let mut run = ObjectRange::new(at, 1);
        while run.end < folio.end && self.lock_absent(object, run.end) {
            run.end = run.end.add(1);
        }
        while run.start > folio.start {
            let before = ObjectPage(run.start.0 - 1);
            if !self.lock_absent(object, before) {
                break;
            }
            run.start = before;
        }
        run
    }

    pub(super) fn lock_absent(&self, object: &Object, page: ObjectPage) -> bool {
        if !self.use_words(object, page) {
            return false;
        }
        let word = object.word(page);
        match word.try_lock() {
            Some(old) if old.state() == State::None => true,
            Some(_) => {
                self.space.unlock_word(word);
                false
            }
            None => false,
        }
    }

    pub(super) fn guess_for(&self, object: &Object, at: ObjectPage, vma: &Vma) -> Guess {
        let pattern = vma.attributes.pattern;
        // As for anonymous memory: several streams live side by side.
        let order_max = (self.space.budget().limit() / 32).max(1).ilog2();
        object.streams.guess(PageNum(at.0), false, pattern, order_max)
    }

    pub(super) fn advance(&self, object: &Object, guess: Guess, pages: ObjectRange) {
        let pages = PageRange { start: PageNum(pages.start.0), end: PageNum(pages.end.0) };
        object.streams.advance(guess, pages);
    }

    /// A read fault was served from the cache: its stream goes on, and what comes next is read.
    pub(super) fn go_on_with_stream(
        &self,
        id: ObjectId,
        object: &Object,
        guess: Guess,
        vma: &Vma,
        around: PageRange,
    ) {
        let backing = vma.attributes.backing;
        let pages = ObjectRange {
            start: backing.object_page(around.start),
            end: backing.object_page(around.end),
        };
        self.advance(object, guess, pages);
        self.read_ahead(id, object, guess, pages.end);
    }

    /// Whether so many pages may be read before anybody asks for them.
    fn has_room_ahead(&self, pages: usize) -> bool {
        let is_block = pages == BLOCK_PAGES;
        if is_block && self.large.recycled_pages() > 0 {
            self.call_for_recycled();
            return true;
        }
        let has_room = self.space.available() >= pages + self.space.low_watermark();
        if is_block && !has_room {
            self.call_for_recycled();
        }
        has_room
    }

    /// Sends the read of what a stream will want next, where it is not cached yet and there is
    /// memory to spare.
    fn read_ahead(&self, id: ObjectId, object: &Object, guess: Guess, from: ObjectPage) {
        if guess.order < AHEAD_ORDER {
            return;
        }
        let next = ObjectRange::new(from, 1 << guess.order).intersect(object.range());
        let Some(next) = by_block(next).next() else { return };
        if next.is_empty() || !self.has_room_ahead(next.len()) {
            return;
        }
        let mut run = ObjectRange { start: next.start, end: next.start };
        while run.end < next.end && self.lock_absent(object, run.end) {
            run.end = run.end.add(1);
        }
        if run.is_empty() {
            return;
        }
        let is_sent = self.try_charge_run(object, run) && {
            let is_sent = self.request(id, Request::Read { object: id, pages: run, asker: None });
            if !is_sent {
                self.uncharge_run(object, run);
            }
            is_sent
        };
        if !is_sent {
            self.unlock_words(object, run);
        }
    }
}
