//! Reads of what is not cached: the faulting page with its neighbours, and what a stream will want
//! next.
//!
//! Streams are the object's (`crate::fault::order`): a fault where one goes on makes its next folio
//! four times as large, and from [`AHEAD_ORDER`] on the [`AHEAD_FOLIOS`] behind it, or before it
//! where the stream goes down, are read as well, by other workers. Of streams that leave pages out
//! ([`super::strides`]) just the pages they will touch are read. What is read is locked until it is
//! there.

use super::fault::{Fault, Look};
use super::pages::{Locked, is_absent};
use super::read_in_place::{IN_PLACE_ORDER, InPlace};
use super::requests::Asker;
use super::strides::{Lookup, Touch, WINDOW_MAX};
use super::window::View;
use super::{Objects, VmObject};
use crate::budget::Purpose;
use crate::control::Event;
use crate::control::along::stream_order_max;
use crate::fault::Outcome;
use crate::fault::order::{Guess, Through};
use crate::mmu::object::ObjectMmu;
use crate::page::{Snapshot, State};
use crate::space::vma::{Pattern, Vma};
use crate::units::{ObjectPage, ObjectRange, PageNum, PageRange};

/// From this order on a stream is read ahead of.
const AHEAD_ORDER: u32 = 4;
/// So many folios ahead. With one the store would have nothing to do from the end of a read until
/// the stream comes to what was read; and it is the slower of the two, or read-ahead is no matter. With two a pass over
/// a file takes a third longer through 8 MiB, and a fourteenth through 128 MiB; with six hardly less than with four.
const AHEAD_FOLIOS: usize = 4;
/// So many pages at a folio's beginning may be cached still since the last time: those that a fault asked for stay
/// longer than what was read with them.
const KEPT_MAX: usize = 4;
/// What is read at least for a fault where there is room for all of the object: 128 KiB.
const AROUND_ORDER: u32 = 5;

impl<M: ObjectMmu> Objects<M> {
    /// Sends the read of a page that is not cached, and of those that read-ahead adds, or says that
    /// it is to be done in place. It stays locked until the read is done.
    pub(super) fn begin_read(&self, view: &View<'_>, fault: Fault, locked: Locked<'_, M>) -> Look {
        let Fault { at, page, access, way, guess } = fault;
        let (object, vma) = (view.object, view.vma);
        locked.leave_locked();
        let is_strided = self.is_strided(object, at, vma);
        let folio = if is_strided { guess } else { self.widen(object, guess, vma) };
        let pages = self.lock_around(object, at, folio.order, is_absent);
        let Some(pages) = self.charge_locked(object, at, pages) else {
            return Look::NeedsMemory(pages.len());
        };
        let around =
            if is_strided { PageRange::new(page, 1) } else { self.around(view, page, folio) };
        let asker = Asker { page, vma: *vma, around, access };
        let is_in_place = pages.len() <= 1 << IN_PLACE_ORDER && self.may_read_in_place(object);
        if is_in_place {
            self.get(object.id);
        } else if !self.request_read(object, pages, Some(asker)) {
            return Look::Ended(self.wait_for_queue(page));
        }
        self.space.budget().count(Event::Pgmajfault, 1);
        if !is_in_place {
            // A worker answers it.
            self.space.count_finished(way);
        }
        // A stride's faults would take all places of the streams that are none.
        if !is_strided {
            self.advance(object, guess, pages);
        }
        self.read_ahead(object, guess, pages);
        self.read_stride_ahead(object, at, vma, guess, Lookup::Miss);
        if is_in_place {
            return Look::Reads(InPlace { pages, asker });
        }
        Look::Ended(Outcome::Parked)
    }

    /// Charges a run of locked pages, or the part of it from `at` on that there is memory for, and
    /// unlocks the rest. `None`: there is none, and all are unlocked.
    pub(super) fn charge_locked(
        &self,
        object: &VmObject,
        at: ObjectPage,
        mut pages: ObjectRange,
    ) -> Option<ObjectRange> {
        self.space.call_if_low();
        loop {
            if self.space.budget().try_charge(pages.len(), Purpose::Fault) {
                return Some(pages);
            }
            if pages.len() == 1 {
                self.unlock_pages(object, pages);
                return None;
            }
            let kept = ObjectRange::new(at, pages.len() / 2).intersect(pages);
            self.unlock_pages(object, ObjectRange { start: pages.start, end: kept.start });
            self.unlock_pages(object, ObjectRange { start: kept.end, end: pages.end });
            pages = kept;
        }
    }

    /// Locks the neighbours of a page that was left locked that are as they should be, inside the
    /// aligned 2^order pages; returns the run.
    pub(super) fn lock_around(
        &self,
        object: &VmObject,
        at: ObjectPage,
        order: u32,
        is_wanted: impl Fn(Snapshot) -> bool,
    ) -> ObjectRange {
        let folio = ObjectRange::new(at.align_down(order), 1 << order).intersect(object.range());
        let joins = |page| self.try_lock_and_leave(object, page, &is_wanted);
        ObjectRange::new(at, 1).grow(folio, joins)
    }

    /// Locks a page that is not cached, and leaves it locked.
    pub(super) fn lock_absent(&self, object: &VmObject, page: ObjectPage) -> bool {
        self.use_words(object, page) && self.try_lock_and_leave(object, page, is_absent)
    }

    pub(super) fn guess_for(&self, object: &VmObject, at: ObjectPage, pattern: Pattern) -> Guess {
        let order_max = stream_order_max(self.space.budget().limit());
        object.streams.guess(PageNum(at.0), Through::Object, pattern, order_max, |_| false)
    }

    /// What a fault reads, by what its stream would: where all that is not cached yet of the object has room, more of
    /// it is wanted soon, and nothing that is cached goes for it. Threads that read in place do so still.
    pub(super) fn widen(&self, object: &VmObject, mut guess: Guess, vma: &Vma) -> Guess {
        let is_alone = object.is_memory || vma.attributes.pattern == Pattern::Random;
        let absent = object.pages().saturating_sub(object.cached_pages());
        if !is_alone && absent <= self.space.room_ahead() {
            let order = if self.may_read_in_place(object) { IN_PLACE_ORDER } else { AROUND_ORDER };
            guess.order = guess.order.max(order);
        }
        guess
    }

    pub(super) fn advance(&self, object: &VmObject, guess: Guess, pages: ObjectRange) {
        let pages = PageRange { start: PageNum(pages.start.0), end: PageNum(pages.end.0) };
        object.streams.advance(guess, pages);
    }

    /// A read fault was served from the cache: its stream goes on, and what comes next is read.
    pub(super) fn go_on_with_stream(
        &self,
        view: &View<'_>,
        guess: Guess,
        page: PageNum,
        around: PageRange,
    ) {
        let (object, at, backing) =
            (view.object, view.object_page(page), view.vma.attributes.backing);
        // Where nothing is mapped around it nothing was cached: the stream will be there.
        let pages = ObjectRange::new(at, 1).grow(backing.object_range(around), |at| {
            view.window.is_present(PageNum(at.0.wrapping_sub(backing.delta)))
        });
        if !self.is_strided(object, at, view.vma) {
            self.advance(object, guess, pages);
        }
        self.read_ahead(object, guess, pages);
        self.read_stride_ahead(object, at, view.vma, guess, Lookup::Hit);
    }

    /// Sends the reads of what a stream will want next to the pages that it has, where that is not
    /// cached yet and there is memory to spare.
    pub(super) fn read_ahead(&self, object: &VmObject, guess: Guess, mut has: ObjectRange) {
        if guess.order < AHEAD_ORDER {
            return;
        }
        for _ in 0..AHEAD_FOLIOS {
            let next = next_folio(object, guess, has);
            let Some(next) = next.filter(|next| !next.is_empty()) else { return };
            let run = self.lock_absent_from(object, guess, next);
            // None where it was sent before, as a rule.
            if !run.is_empty() && !self.send_read_ahead(object, run) {
                return;
            }
            has = next;
        }
    }

    /// Locks what is absent of a folio, as far as that goes from where a stream comes to it first;
    /// nothing where there is no memory to spare.
    fn lock_absent_from(&self, object: &VmObject, guess: Guess, folio: ObjectRange) -> ObjectRange {
        let at = |step: usize| match guess.is_down {
            true => ObjectPage(folio.end.0 - 1 - step as u64),
            false => folio.start.add(step),
        };
        let is_cached = |page: &ObjectPage| self.snapshot(object, *page).state() == State::Cached;
        let can_be_read = |page: &ObjectPage| {
            let seen = self.snapshot(object, *page);
            !seen.is_locked() && is_absent(seen)
        };
        let first = (0..folio.len().min(KEPT_MAX + 1)).map(at).find(|page| !is_cached(page));
        let has_room = self.space.has_room_ahead(folio.len());
        let Some(first) = first.filter(|page| can_be_read(page) && has_room) else {
            return ObjectRange::new(folio.start, 0);
        };
        let none = ObjectRange::new(if guess.is_down { first.add(1) } else { first }, 0);
        none.grow(folio, |page| self.lock_absent(object, page))
    }

    /// Sends the reads of what a strided stream will want next, if a fault is one's.
    fn read_stride_ahead(
        &self,
        object: &VmObject,
        at: ObjectPage,
        vma: &Vma,
        guess: Guess,
        lookup: Lookup,
    ) {
        if guess.order > 0 || vma.attributes.pattern == Pattern::Random {
            return;
        }
        let touch = Touch { page: at, mapping: vma.attributes.backing.mapping };
        let window_max = (self.space.budget().limit() as u32 / 64).min(WINDOW_MAX);
        let Some(ahead) = object.strides.note(touch, lookup, window_max) else { return };
        for page in ahead.pages() {
            let is_there = object.range().contains(page);
            if !is_there || !self.space.has_room_ahead(1) {
                return;
            }
            if self.lock_absent(object, page) {
                let _ = self.send_read_ahead(object, ObjectRange::new(page, 1));
            }
        }
    }

    /// Whether a fault is where a strided stream is expected. Nothing is mapped around it: the
    /// faults on what was read for it say how much of that is used.
    pub(super) fn is_strided(&self, object: &VmObject, at: ObjectPage, vma: &Vma) -> bool {
        let touch = Touch { page: at, mapping: vma.attributes.backing.mapping };
        object.strides.expects(touch)
    }

    /// Charges and sends the read of locked pages that nothing waits for; `false` where that cannot
    /// be, and they are unlocked.
    pub(super) fn send_read_ahead(&self, object: &VmObject, run: ObjectRange) -> bool {
        if !self.space.budget().try_charge(run.len(), Purpose::Fault) {
            self.unlock_pages(object, run);
            return false;
        }
        self.request_read(object, run, None)
    }
}

/// The folio that comes next in a stream that has some pages.
fn next_folio(object: &VmObject, guess: Guess, has: ObjectRange) -> Option<ObjectRange> {
    let next = has.next(1 << guess.order, guess.is_down).intersect(object.range());
    let mut parts = next.by_block();
    if guess.is_down { parts.last() } else { parts.next() }
}
