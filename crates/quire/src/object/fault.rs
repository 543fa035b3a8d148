//! The way of a fault on an object.
//!
//! A fault takes its window's lock and looks at the VMA once more; all the rest happens under that lock
//! and does not block. A read tries [`Objects::map_pages`] first: what can be had at once around the
//! fault is mapped with it. What is left is `fault`'s: the page is not cached, is to be written, or is
//! locked.

use super::pages::{Locked, is_absent};
use super::read_in_place::InPlace;
use super::swapin::AtOnce;
use super::window::Mapped;
use super::{Object, ObjectId, Objects};
use crate::control::{Event, FaultKind, Tracepoint};
use crate::failpoint::{self, Failpoint};
use crate::fault::Outcome;
use crate::fault::order::Guess;
use crate::fault::speculative::{Doubt, Way};
use crate::mmu::Access;
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Done, Protection, Refusal};
use crate::page::{Flags, State};
use crate::reclaim::Room;
use crate::scratch::Scratch;
use crate::space::vma::{Kind, Vma};
use crate::sys::clock::Moment;
use crate::sys::thread::ThreadId;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PageNum, PageRange};

/// A fault, as it is seen under its window's lock.
#[derive(Clone, Copy)]
pub(super) struct Fault<'a> {
    pub id: ObjectId,
    pub object: &'a Object,
    /// The page of the object.
    pub at: ObjectPage,
    /// The page of the arena.
    pub page: PageNum,
    pub access: Access,
    pub vma: &'a Vma,
    pub way: Way,
    pub guess: Guess,
}

/// How a look at a fault under its window's lock ended.
pub(super) enum Look {
    Ended(Outcome),
    /// It is not what it was prepared for; only of a speculative fault.
    InDoubt(Doubt),
    /// So many pages are needed.
    NeedsMemory(usize),
    /// Too much is dirty.
    NeedsCleaning,
    /// It is read by the thread that serves the fault.
    Reads(InPlace),
}

impl<M: ObjectMmu> Objects<M> {
    /// Serves a fault on `page`, whatever is mapped there, of a thread that is not known: it never
    /// waits for a change of the layout.
    pub fn handle_fault(&self, page: PageNum, access: Access, scratch: &mut Scratch) -> Outcome {
        self.handle_fault_of(ThreadId::UNKNOWN, page, access, Moment::now(), scratch)
    }

    /// Serves a fault of `thread` on `page` that came at `since`, whatever is mapped there.
    pub fn handle_fault_of(
        &self,
        thread: ThreadId,
        page: PageNum,
        access: Access,
        since: Moment,
        scratch: &mut Scratch,
    ) -> Outcome {
        self.space.budget().count(Event::Pgfault, 1);
        let mut kind = FaultKind::Object;
        let outcome = self.space.serve(thread, page, |found, way| {
            let of = found.map(|vma| vma.attributes.kind);
            if of != Some(Kind::Object) {
                kind = self.space.kind_of_fault(page, access);
            }
            match (found, of) {
                (Some(vma), Some(Kind::Object)) => {
                    self.try_object_fault(page, access, &vma, way, &mut kind, Some(&mut *scratch))
                }
                (Some(vma), Some(Kind::Private)) => {
                    self.try_private_fault(page, access, &vma, way, scratch)
                }
                (Some(vma), Some(Kind::Anonymous)) => {
                    self.space.try_fault(page, access, &vma, way, self, scratch)
                }
                _ => self.space.try_unmanaged_fault(page, found, way),
            }
        });
        self.space.note_fault(kind, outcome, since);
        outcome
    }

    /// Serves a fault of the calling thread on a page of an object; `None` where no object is
    /// mapped. Takes no lock for longer than a mapping call, or a read in place, and allocates
    /// nothing: a signal handler may do this, on the little stack that it has.
    pub fn object_fault(&self, page: PageNum, access: Access, since: Moment) -> Option<Outcome> {
        let mut kind = FaultKind::Object;
        let outcome = self.serve_caller(page, Kind::Object, |vma, way| {
            self.try_object_fault(page, access, vma, way, &mut kind, None)
        })?;
        self.space.note_fault(kind, outcome, since);
        Some(outcome)
    }

    /// Serves a fault of the calling thread by `attempt`, which is given the page's VMA; `None` where
    /// that is of another kind, or there is none.
    pub(super) fn serve_caller(
        &self,
        page: PageNum,
        kind: Kind,
        mut attempt: impl FnMut(&Vma, Way) -> Result<Outcome, Doubt>,
    ) -> Option<Outcome> {
        let (mut is_first, mut is_other) = (true, false);
        let outcome = self.space.serve(ThreadId::CALLER, page, |found, way| {
            let found = found.filter(|vma| vma.attributes.kind == kind);
            is_other = is_first && found.is_none();
            is_first = false;
            let Some(vma) = found else {
                if !is_other {
                    // It was unmapped meanwhile: the access is tried again.
                    self.space.mmu().wake(PageRange::new(page, 1));
                }
                return Ok(Outcome::NoVma);
            };
            attempt(&vma, way)
        });
        if is_other {
            return None;
        }
        self.space.budget().count(Event::Pgfault, 1);
        Some(outcome)
    }

    /// Serves a fault on a page of an object's mapping, whose VMA was found just now, as far as the
    /// layout is sure to be what it is seen to be; says in `kind` if it read for it.
    fn try_object_fault(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        kind: &mut FaultKind,
        mut scratch: Option<&mut Scratch>,
    ) -> Result<Outcome, Doubt> {
        way.check_access(vma, access)?;
        loop {
            failpoint::hit(Failpoint::Prepared, page);
            let look = {
                let mut window = self.windows.lock(page);
                if way != Way::Classic && !self.space.vmas.is_current(vma) {
                    return Err(Doubt::of(vma, Tracepoint::SpfVmaChanged));
                }
                failpoint::hit(Failpoint::Checked, page);
                self.fault_in_window(page, access, vma, way, &mut window)
            };
            match look {
                Look::Ended(outcome) => return Ok(outcome),
                Look::InDoubt(doubt) => return Err(doubt),
                Look::NeedsMemory(pages) => {
                    if !self.space.make_room(self, Room::Charge, pages, scratch.as_deref_mut()) {
                        return Ok(self.space.starve(page));
                    }
                }
                Look::NeedsCleaning => return Ok(self.wait_for_cleaning(page)),
                Look::Reads(read) => {
                    *kind = FaultKind::ObjectRead;
                    return Ok(self.read_in_place(&read));
                }
            }
        }
    }

    /// Answers a fault that needs nothing, or that the kernel will refuse when it is tried again.
    fn answer(&self, page: PageNum, outcome: Outcome) -> Look {
        self.space.mmu().wake(PageRange::new(page, 1));
        Look::Ended(outcome)
    }

    /// Ends a fault that was to be mapped: the call that maps has answered it, unless it was refused.
    fn answer_unless(&self, is_mapped: bool, page: PageNum) -> Look {
        if is_mapped { Look::Ended(Outcome::Served) } else { self.answer(page, Outcome::Spurious) }
    }

    fn fault_in_window(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        window: &mut Mapped,
    ) -> Look {
        let id = ObjectId(vma.attributes.backing.object);
        let object = self.object(id);
        let at = vma.attributes.backing.object_page(page);
        if at.index() >= object.pages() {
            // Behind the end: a SIGBUS, once the memfd is as short as the object.
            self.space.mmu().relax();
            return self.answer(page, Outcome::NoVma);
        }
        if way == Way::Speculative && !object.has_words(at) {
            return Look::InDoubt(Doubt::of(vma, Tracepoint::SpfVmaNoanon));
        }
        if !self.use_words(object, at) {
            if self.space.pages.has_free_block() {
                return Look::NeedsMemory(1);
            }
            // No memory helps: the tables have no words left for it.
            self.poison(page, window);
            return self.answer(page, Outcome::Poisoned);
        }
        window.faults = window.faults.saturating_add(1);
        let is_present = window.is_present(page);
        if is_present && (access == Access::Read || window.is_writable(page)) {
            return self.map_again(page, window);
        }
        let guess = self.guess_for(object, at, vma.attributes.pattern);
        if access == Access::Read {
            let around = if guess.order == 0 && self.is_strided(object, at, vma) {
                PageRange::new(page, 1)
            } else {
                self.around(object, vma, page, guess, window)
            };
            self.map_pages(object, vma, window, around, page);
            if window.is_present(page) {
                self.go_on_with_stream(id, object, guess, vma, page, around, window);
                return Look::Ended(Outcome::Served);
            }
        }
        self.fault(Fault { id, object, at, page, access, vma, way, guess }, window)
    }

    /// A fault on a page that is mapped. As a rule another has mapped it meanwhile; but the kernel
    /// unmaps a page by itself when it swaps, and does not map it again.
    fn map_again(&self, page: PageNum, window: &Mapped) -> Look {
        let is_writable = window.is_writable(page);
        let protection =
            if is_writable { Protection::Writable } else { Protection::WriteProtected };
        // Without the page's lock: a thread that drops it clears the window first, whose lock is held.
        let _ = self.space.mmu().map_cached(PageRange::new(page, 1), protection);
        self.answer(page, Outcome::Spurious)
    }

    /// Serves the faulting page itself.
    fn fault(&self, fault: Fault<'_>, window: &mut Mapped) -> Look {
        let Fault { object, at, page, access, vma, guess, .. } = fault;
        let number = object.number(at);
        let Some(mut locked) = self.space.try_lock_page(number) else {
            if self.space.park_fault_on(number, page) {
                self.space.budget().count(Event::FaultParked, 1);
                return Look::Ended(Outcome::Parked);
            }
            if self.space.snapshot(number).is_locked() {
                return Look::Ended(self.wait_unparked(page));
            }
            return self.answer(page, Outcome::Parked);
        };
        if object.is_memory() && is_absent(locked.content()) && !locked.has(Flags::ERROR) {
            match self.fill_at_once(object, at, locked, guess.order) {
                AtOnce::Cached(pages, filled) if access == Access::Read => {
                    self.advance(object, guess, pages);
                    filled.unlock();
                    self.map_filled(object, vma, window, pages, page);
                    return self.answer_unless(window.is_present(page), page);
                }
                AtOnce::Cached(pages, filled) => {
                    locked = filled;
                    // All but the page itself, whose lock is held: what lies ahead of a stream of
                    // writes is made writable below.
                    self.map_filled(object, vma, window, pages, page);
                }
                AtOnce::NotHere(absent) => locked = absent,
                AtOnce::NeedsMemory(pages) => return Look::NeedsMemory(pages),
            }
        }
        match locked.state() {
            State::Cached if access == Access::Read => {
                let done = self.map_locked(page, Protection::WriteProtected, window);
                locked.set_flags(Flags::ACCESSED);
                self.answer_unless(done.pages == 1, page)
            }
            State::Cached => {
                if !locked.has(Flags::DIRTY) && self.must_clean_first(object) {
                    // What is pinned stays mapped: its writer waits on.
                    let is_refused = !locked.has(Flags::MLOCKED)
                        && self.is_stalled(object)
                        && self.refuse_writer(page, vma, window);
                    locked.unlock();
                    if is_refused {
                        return self.answer(page, Outcome::Poisoned);
                    }
                    return Look::NeedsCleaning;
                }
                let is_mapped = self.map_for_write(object, vma, page, locked, window);
                let mut end = page.add(1);
                if is_mapped && guess.order > 0 {
                    // A stream of writes comes by.
                    let block = PageRange::new(page.align_down(BLOCK_ORDER), BLOCK_PAGES);
                    let ahead = PageRange::new(end, (1 << guess.order) - 1);
                    let ahead = ahead.intersect(vma.range).intersect(block);
                    end = self.make_writable(object, vma, window, ahead);
                }
                let pages = ObjectRange { start: at, end: vma.attributes.backing.object_page(end) };
                self.advance(object, guess, pages);
                self.answer_unless(is_mapped, page)
            }
            State::Poisoned => {
                // A mapping that came later, or whose mark was taken away with something else.
                self.poison(page, window);
                locked.unlock();
                self.answer(page, Outcome::Poisoned)
            }
            _ if locked.has(Flags::ERROR) && self.space.mmu().is_inline() => {
                locked.unlock();
                Look::Ended(Outcome::Poisoned)
            }
            _ => self.begin_read(fault, locked, window),
        }
    }

    /// Makes a locked, cached page dirty and writable, and unlocks it.
    pub(super) fn map_for_write(
        &self,
        object: &Object,
        vma: &Vma,
        page: PageNum,
        mut locked: Locked<'_, M>,
        window: &mut Mapped,
    ) -> bool {
        let at = vma.attributes.backing.object_page(page);
        // Dirty before it can be written: no write is ever missed.
        self.mark_dirty(object, at, &mut locked);
        let done = self.map_locked(page, Protection::Writable, window);
        locked.set_flags(Flags::ACCESSED);
        done.pages == 1
    }

    /// Makes a locked, cached page dirty.
    pub(super) fn mark_dirty(&self, object: &Object, at: ObjectPage, locked: &mut Locked<'_, M>) {
        if object.is_memory() {
            self.space.dirty_cached(locked);
        } else if !locked.has(Flags::DIRTY) {
            locked.dirty();
            self.count_dirtied(object, at);
            self.count_dirty();
        }
    }

    /// Makes the first of some pages of a window dirty and writable, in one call, as far as they are
    /// mapped and protected, and nothing else is in the way. Returns where that ends.
    pub(super) fn make_writable(
        &self,
        object: &Object,
        vma: &Vma,
        window: &mut Mapped,
        pages: PageRange,
    ) -> PageNum {
        let backing = vma.attributes.backing;
        let mut run = PageRange { start: pages.start, end: pages.start };
        for page in pages.pages() {
            let at = backing.object_page(page);
            if !window.is_present(page) || window.is_writable(page) {
                break;
            }
            let Some(mut locked) = self.lock_mappable(object, at, false) else { break };
            if !locked.has(Flags::DIRTY) && self.must_clean_first(object) {
                break;
            }
            self.mark_dirty(object, at, &mut locked);
            locked.leave_locked();
            run.end = page.add(1);
        }
        if !run.is_empty() {
            // Where it is refused the pages stay protected, and are dirty for nothing.
            let done = self.space.mmu().write_protect(run, Protection::Writable);
            if done.refusal.is_none() {
                run.pages().for_each(|page| window.set(page, true));
            }
            let shown = ObjectRange::new(backing.object_page(run.start), run.len());
            self.unlock_pages(object, shown);
        }
        run.end
    }

    /// Maps a locked, cached page, or lifts its protection, and answers its faults.
    pub(super) fn map_locked(
        &self,
        page: PageNum,
        protection: Protection,
        window: &mut Mapped,
    ) -> Done {
        let one = PageRange::new(page, 1);
        let is_writable = protection == Protection::Writable;
        let mut done = self.space.mmu().map_cached(one, protection);
        if done.refusal == Some(Refusal::Exists) && is_writable {
            // Mapped already, but protected.
            done = self.space.mmu().write_protect(one, Protection::Writable);
        }
        let is_there = done.pages == 1 || done.refusal == Some(Refusal::Exists);
        if is_there {
            window.set(page, is_writable);
        }
        done
    }
}
