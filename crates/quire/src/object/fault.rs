//! The way of a fault on an object.
//!
//! All happens under the window's lock and does not block, but for what a [`Look`] asks for.

use super::pages::{Locked, is_absent};
use super::read_in_place::InPlace;
use super::swapin::AtOnce;
use super::window::{Mapped, View};
use super::writeback::DIRTY_BATCH;
use super::{ObjectId, Objects, VmObject};
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
use crate::units::{ObjectPage, PageNum, PageRange};

/// A fault, as it is seen under its window's lock.
#[derive(Clone, Copy)]
pub(super) struct Fault {
    pub at: ObjectPage,
    pub page: PageNum,
    pub access: Access,
    pub way: Way,
    pub guess: Guess,
}

/// How a look at a fault under its window's lock ended.
pub(super) enum Look {
    Ended(Outcome),
    /// So many pages are needed.
    NeedsMemory(usize),
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
                let may_go_on = || way.check_current(&self.space.vmas, vma);
                let window = self.windows.lock_in_turns(page, may_go_on)?;
                may_go_on()?;
                failpoint::hit(Failpoint::Checked, page);
                let object = self.object(ObjectId(vma.attributes.backing.object));
                self.fault_in_window(&mut View { object, vma, window }, page, access, way)?
            };
            match look {
                Look::Ended(outcome) => return Ok(outcome),
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

    /// # Errors
    /// A speculative fault is not what it was prepared for.
    fn fault_in_window(
        &self,
        view: &mut View<'_>,
        page: PageNum,
        access: Access,
        way: Way,
    ) -> Result<Look, Doubt> {
        let (object, at) = (view.object, view.object_page(page));
        if at.index() >= object.pages() {
            // Behind the end: a SIGBUS, once the memfd is as short as the object.
            self.space.mmu().relax();
            return Ok(self.answer(page, Outcome::NoVma));
        }
        if way == Way::Speculative && !object.has_words(at) {
            return Err(Doubt::of(view.vma, Tracepoint::SpfVmaNoanon));
        }
        if !self.use_words(object, at) {
            if self.space.pages.has_free_block() {
                return Ok(Look::NeedsMemory(1));
            }
            // No memory helps: the tables have no words left for it.
            self.poison(page, &view.window);
            return Ok(self.answer(page, Outcome::Poisoned));
        }
        let window = &mut view.window;
        window.faults = window.faults.saturating_add(1);
        if window.is_present(page) && (access == Access::Read || window.is_writable(page)) {
            // As a rule another fault has mapped it meanwhile; but the kernel unmaps a page by itself
            // when it swaps, and does not map it again. The page's lock is not needed: a thread that
            // drops the page clears the window first, whose lock is held.
            let _ = self.space.mmu().map_cached(PageRange::new(page, 1), window.protection(page));
            return Ok(self.answer(page, Outcome::Spurious));
        }
        let guess = self.guess_for(object, at, view.vma.attributes.pattern);
        if access == Access::Read {
            let around = if guess.order == 0 && self.is_strided(object, at, view.vma) {
                PageRange::new(page, 1)
            } else {
                self.around(view, page, guess)
            };
            self.map_pages(view, around, page);
            if view.window.is_present(page) {
                self.go_on_with_stream(view, guess, page, around);
                return Ok(Look::Ended(Outcome::Served));
            }
        }
        Ok(self.fault(view, Fault { at, page, access, way, guess }))
    }

    /// Serves the faulting page itself.
    fn fault(&self, view: &mut View<'_>, fault: Fault) -> Look {
        let Fault { at, page, access, guess, .. } = fault;
        let object = view.object;
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
        if object.is_memory && is_absent(locked.content()) && !locked.has(Flags::ERROR) {
            match self.fill_at_once(object, at, locked, guess.order) {
                AtOnce::Cached(pages, filled) if access == Access::Read => {
                    self.advance(object, guess, pages);
                    filled.unlock();
                    self.map_filled(view, pages, page);
                    return self.answer_unless(view.window.is_present(page), page);
                }
                AtOnce::Cached(pages, filled) => {
                    locked = filled;
                    // All but the page itself, whose lock is held: what lies ahead of a stream of
                    // writes is made writable below.
                    self.map_filled(view, pages, page);
                }
                AtOnce::NotHere(absent) => locked = absent,
                AtOnce::NeedsMemory(pages) => return Look::NeedsMemory(pages),
            }
        }
        match locked.state() {
            State::Cached if access == Access::Read => {
                let done = self.map_locked(page, Protection::WriteProtected, &mut view.window);
                locked.set_flags(Flags::ACCESSED);
                self.answer_unless(done.pages == 1, page)
            }
            State::Cached => {
                if !locked.has(Flags::DIRTY) && self.must_clean_first(object) {
                    // What is pinned stays mapped: its writer waits on.
                    let is_refused = !locked.has(Flags::MLOCKED)
                        && self.is_stalled(object)
                        && self.refuse_writer(view, page);
                    locked.unlock();
                    if is_refused {
                        return self.answer(page, Outcome::Poisoned);
                    }
                    return Look::NeedsCleaning;
                }
                let is_mapped = self.map_for_write(view, page, locked);
                let mut written = PageRange::new(page, 1);
                if is_mapped && guess.order > 0 {
                    // A stream of writes comes by.
                    let next = written.next((1 << guess.order) - 1, guess.is_down);
                    // Empty, where the two meet.
                    let none = next.intersect(written);
                    let more = self.make_writable(view, none, next.intersect(view.bounds(page)));
                    written.start = written.start.min(more.start);
                    written.end = written.end.max(more.end);
                }
                self.advance(object, guess, view.vma.attributes.backing.object_range(written));
                self.answer_unless(is_mapped, page)
            }
            State::Poisoned => {
                // A mapping that came later, or whose mark was taken away with something else.
                self.poison(page, &view.window);
                locked.unlock();
                self.answer(page, Outcome::Poisoned)
            }
            _ if locked.has(Flags::ERROR) && self.space.mmu().is_inline() => {
                locked.unlock();
                Look::Ended(Outcome::Poisoned)
            }
            _ => self.begin_read(view, fault, locked),
        }
    }

    /// Makes a locked, cached page dirty and writable, and unlocks it.
    pub(super) fn map_for_write(
        &self,
        view: &mut View<'_>,
        page: PageNum,
        mut locked: Locked<'_, M>,
    ) -> bool {
        // Dirty before it can be written: no write is ever missed.
        self.mark_dirty(view.object, view.object_page(page), &mut locked);
        let done = self.map_locked(page, Protection::Writable, &mut view.window);
        locked.set_flags(Flags::ACCESSED);
        done.pages == 1
    }

    pub(super) fn mark_dirty(&self, object: &VmObject, at: ObjectPage, locked: &mut Locked<'_, M>) {
        if object.is_memory {
            self.space.dirty_cached(locked);
        } else if !locked.has(Flags::DIRTY) {
            locked.dirty();
            self.count_dirtied(object, at);
            self.count_dirty();
        }
    }

    /// Makes the pages of a window that join an empty run within others dirty and writable in one call, as far as they
    /// are mapped and protected, and nothing else is in the way. Returns which.
    pub(super) fn make_writable(
        &self,
        view: &mut View<'_>,
        none: PageRange,
        within: PageRange,
    ) -> PageRange {
        let (object, mut count) = (view.object, 0);
        let run = none.grow(within, |page| {
            let must_look = count % DIRTY_BATCH == 0;
            count += 1;
            if !view.window.is_present(page)
                || view.window.is_writable(page)
                || must_look && self.must_clean_first(object)
            {
                return false;
            }
            let at = view.object_page(page);
            let Some(mut locked) = self.lock_mappable(object, at) else { return false };
            self.mark_dirty(object, at, &mut locked);
            locked.leave_locked();
            true
        });
        if !run.is_empty() {
            // Where it is refused the pages stay protected, and are dirty for nothing.
            let done = self.space.mmu().write_protect(run, Protection::Writable);
            if done.refusal.is_none() {
                run.pages().for_each(|page| view.window.set(page, Protection::Writable));
            }
            self.unlock_pages(object, view.vma.attributes.backing.object_range(run));
        }
        run
    }

    /// Maps a locked, cached page, or lifts its protection, and answers its faults.
    pub(super) fn map_locked(
        &self,
        page: PageNum,
        protection: Protection,
        window: &mut Mapped,
    ) -> Done {
        let one = PageRange::new(page, 1);
        let mut done = self.space.mmu().map_cached(one, protection);
        if done.refusal == Some(Refusal::Exists) && protection == Protection::Writable {
            // Mapped already, but protected.
            done = self.space.mmu().write_protect(one, protection);
        }
        if done.pages == 1 || done.refusal == Some(Refusal::Exists) {
            window.set(page, protection);
        }
        done
    }
}
