//! Private mappings: copies of an object's pages, written without the object.
//!
//! A private mapping is anonymous memory whose first content comes from an object
//! ([`crate::fault::private`]). A fault on a page without content copies the object's bytes out of its
//! cache, with those neighbours that are cached too; what is not cached is read by a store worker first,
//! which then does the same. The copy is made when the page is first touched, and again when one that was
//! never written comes back after it went; so a later change of the object shows in pages that are not in
//! memory, and in no other.
//!
//! A fault uses the object only under the lock of its page in the arena, having seen its VMA unchanged
//! under that lock; an unmap changes the VMA first and takes the page locks afterwards. The mapping
//! itself is a user of the object until then.
//!
//! Locks: the page's in the arena first, then those of the object's pages, which are only tried.
//! No window: nothing here shows the memfd.

use super::pages::{Locked, is_absent};
use super::requests::{Asker, IoBuffer};
use super::{ObjectId, Objects, VmObject};
use crate::control::{Event, Tracepoint};
use crate::fault::private::Unfilled;
use crate::fault::speculative::{Doubt, Way};
use crate::fault::{Outcome, Staging};
use crate::mmu::Access;
use crate::mmu::object::ObjectMmu;
use crate::page::{LockedPage, State};
use crate::reclaim::Room;
use crate::scratch::{READ_PAGES, STAGING_PAGES, Scratch};
use crate::space::vma::{Kind, Vma};
use crate::swap::compress::PageBytes;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, PageNum, PageRange};

/// How often a worker tries to lock a page before it leaves the copy to a handler.
const LOCK_TRIES: u32 = 8;
/// Pages that a fault wants to see free: one for the object's cache, one for the copy, and some for
/// faults that come in between.
const FAULT_PAGES: usize = 8;

/// How a look at a fault on a private page ended.
enum PrivateLook {
    Ended(Outcome),
    /// The page has content by now.
    Filled,
    /// A page is needed: for the copy, or for the object's cache.
    Needs(Room),
}

struct CopyBuffers<'a> {
    bytes: &'a mut [PageBytes; READ_PAGES],
    staging: &'a mut Staging,
}

impl<'a> CopyBuffers<'a> {
    fn of_handler(scratch: &'a mut Scratch) -> CopyBuffers<'a> {
        // Reads of the swap file use it otherwise, and no fault reads the file while it copies.
        let (bytes, _) = scratch.reading.split_first_chunk_mut().expect("it is larger");
        CopyBuffers { bytes, staging: scratch.staging }
    }

    fn of_worker(buffer: &'a mut IoBuffer) -> CopyBuffers<'a> {
        let (pages, _) = buffer.pages(READ_PAGES + STAGING_PAGES).as_chunks_mut();
        let (bytes, rest) = pages.split_first_chunk_mut().expect("as many as asked for");
        let (staging, _) = rest.split_first_chunk_mut().expect("as many as asked for");
        CopyBuffers { bytes, staging }
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Serves a fault of the calling thread on a page of a private mapping; `None` where there is
    /// none.
    pub fn private_fault(
        &self,
        page: PageNum,
        access: Access,
        scratch: &mut Scratch,
    ) -> Option<Outcome> {
        self.serve_caller(page, Kind::Private, |vma, way| {
            self.try_private_fault(page, access, vma, way, scratch)
        })
    }

    /// Serves a fault on a page of a private mapping, whose VMA was found just now, as far as the
    /// layout is sure to be what it is seen to be.
    pub(super) fn try_private_fault(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        scratch: &mut Scratch,
    ) -> Result<Outcome, Doubt> {
        way.check_access(vma, access)?;
        loop {
            if self.space.snapshot(page).state() != State::None {
                match self.space.try_fault(page, access, vma, way, self, scratch)? {
                    Outcome::Unfilled => {}
                    outcome => return Ok(outcome),
                }
            }
            self.space.make_room(self, Room::Frame, FAULT_PAGES, Some(scratch));
            match self.look_private(page, access, vma, way, scratch)? {
                PrivateLook::Ended(outcome) => return Ok(outcome),
                PrivateLook::Needs(room) => {
                    if !self.space.make_room(self, room, 1, Some(scratch)) {
                        return Ok(self.space.starve(page));
                    }
                }
                PrivateLook::Filled => {}
            }
        }
    }

    fn look_private(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        scratch: &mut Scratch,
    ) -> Result<PrivateLook, Doubt> {
        if self.space.available() == 0 || !self.space.use_block(page) {
            return Ok(PrivateLook::Needs(Room::Frame));
        }
        self.space.mmu().step();
        let Some(old) = self.space.word(page).lock_or_park() else {
            self.space.budget().count(Event::FaultParked, 1);
            return Ok(PrivateLook::Ended(Outcome::Parked));
        };
        let locked = LockedPage::adopt(&self.space, page, old);
        if way != Way::Classic && !self.space.vmas.is_current(vma) {
            return Err(Doubt::of(vma, Tracepoint::SpfVmaChanged));
        }
        if !self.space.is_unfilled(page, old) {
            return Ok(PrivateLook::Filled);
        }
        let object = self.object(ObjectId(vma.attributes.backing.object));
        let at = vma.attributes.backing.object_page(page);
        if at.index() >= object.pages() {
            return Ok(self.refuse(locked));
        }
        if !self.use_words(object, at) {
            if self.space.pages.has_free_block() {
                return Ok(PrivateLook::Needs(Room::Charge));
            }
            // No memory helps: the tables have no words left for it.
            return Ok(self.refuse(locked));
        }
        let number = object.number(at);
        let Some(cached) = self.space.try_lock_page(number) else {
            self.space.budget().count(Event::FaultParked, 1);
            let is_parked = self.space.park_fault_on(number, page);
            locked.unlock();
            if !is_parked {
                self.space.answer(page);
            }
            return Ok(PrivateLook::Ended(Outcome::Parked));
        };
        if cached.state() == State::Poisoned {
            // What the store has is not what was there.
            cached.unlock();
            return Ok(self.refuse(locked));
        }
        let is_cached = cached.state() == State::Cached;
        cached.leave_locked();
        if !is_cached {
            return Ok(self.begin_private_read(object, locked, access, vma, way));
        }
        locked.leave_locked();
        let mut guess = self.space.guess(page, old, vma);
        let chosen = self.mappings.order_around(vma.attributes.backing.mapping);
        guess.order = chosen.unwrap_or(guess.order);
        let around = PageRange::new(page.align_down(guess.order), 1 << guess.order);
        let fault = Unfilled { page, old, access, vma, guess };
        let buffers = CopyBuffers::of_handler(scratch);
        let is_served = self.copy_around(object, fault, around, buffers);
        let served = PrivateLook::Ended(Outcome::Served);
        Ok(if is_served { served } else { PrivateLook::Needs(Room::Frame) })
    }

    /// Makes an access to a locked page of the arena a SIGBUS.
    fn refuse(&self, locked: Locked<'_, M>) -> PrivateLook {
        let old = locked.content();
        self.space.poison_unfilled(locked.leave_locked(), old);
        PrivateLook::Ended(Outcome::Poisoned)
    }

    /// Has an object's page read that is not cached and left locked, and what read-ahead adds. The
    /// fault on `locked`, in the arena, is answered by the thread that reads.
    fn begin_private_read(
        &self,
        object: &VmObject,
        locked: Locked<'_, M>,
        access: Access,
        vma: &Vma,
        way: Way,
    ) -> PrivateLook {
        let page = locked.page();
        let at = vma.attributes.backing.object_page(page);
        let guess = self.guess_for(object, at, vma.attributes.pattern);
        let folio = self.widen(object, guess, vma);
        let pages = self.lock_around(object, at, folio.order, is_absent);
        let Some(pages) = self.charge_locked(object, at, pages) else {
            return PrivateLook::Needs(Room::Charge);
        };
        self.space.budget().count(Event::Pgmajfault, 1);
        let chosen = self.mappings.order_around(vma.attributes.backing.mapping);
        let order = chosen.unwrap_or(guess.order);
        let around = PageRange::new(page.align_down(order), 1 << order);
        if !self.request_read(object, pages, Some(Asker { page, vma: *vma, around, access })) {
            locked.unlock();
            return PrivateLook::Ended(self.wait_for_queue(page));
        }
        self.space.count_finished(way);
        // Under the page's lock still: it keeps the object.
        self.advance(object, guess, pages);
        self.read_ahead(object, guess, pages);
        locked.unlock();
        PrivateLook::Ended(Outcome::Parked)
    }

    /// A worker has read what the fault of a private page asked for: copies and answers.
    pub(super) fn complete_private(&self, asker: &Asker, is_bad: bool, buffer: &mut IoBuffer) {
        let (space, page, vma) = (&self.space, asker.page, &asker.vma);
        let backing = vma.attributes.backing;
        let at = backing.object_page(page);
        let object = self.object(ObjectId(backing.object));
        // The handler that sent the request may hold the page yet, for a moment. Any other thread
        // that holds it may wait for memory that only a worker can free: no sleep.
        let try_lock = |_| {
            let locked = space.try_lock_page(page);
            if locked.is_none() {
                space.mmu().relax();
            }
            locked
        };
        let Some(locked) = (0..LOCK_TRIES).find_map(try_lock) else {
            return space.answer(page);
        };
        let old = locked.content();
        let is_asked = space.vmas.is_current(vma) && space.is_unfilled(page, old);
        if is_asked && is_bad {
            self.refuse(locked);
            return;
        }
        if !is_asked || !self.lock_cached(object, at) {
            locked.unlock();
            return space.answer(page);
        }
        locked.leave_locked();
        let guess = space.guess(page, old, vma);
        let fault = Unfilled { page, old, access: asker.access, vma, guess };
        if !self.copy_around(object, fault, asker.around, CopyBuffers::of_worker(buffer)) {
            space.answer(page);
        }
    }

    /// Copies a locked, cached page of an object, with those around it that are cached and not
    /// mapped, into the arena, where the page is locked as well. All are unlocked afterwards.
    /// `false`: there was no memory, and the fault is not answered.
    fn copy_around(
        &self,
        object: &VmObject,
        fault: Unfilled<'_>,
        around: PageRange,
        buffers: CopyBuffers<'_>,
    ) -> bool {
        let Unfilled { page, old, vma, .. } = fault;
        let backing = vma.attributes.backing;
        let is_dropped = old.state() == State::Mapped;
        let block = PageRange::new(page.align_down(BLOCK_ORDER), BLOCK_PAGES);
        let bounds = around.intersect(vma.range).intersect(block);
        let pages_max = if is_dropped { 1 } else { READ_PAGES };
        let range = self.space.lock_unfilled_around(page, bounds, pages_max, |page| {
            let at = backing.object_page(page);
            at.index() < object.pages() && self.lock_cached(object, at)
        });
        let pages = backing.object_range(range);
        let bytes = &mut buffers.bytes[..range.len()];
        let read = self.space.mmu().memfd_read(
            object.memfd,
            pages.start.offset(),
            bytes.as_flattened_mut(),
        );
        self.unlock_pages(object, pages);
        if read.is_err() {
            // The kernel is out of memory of its own: the fault is tried again.
            self.space.unlock_range(range);
            self.space.mmu().relax();
            self.space.answer(page);
            return true;
        }
        if is_dropped {
            self.space.refill(page, old, &bytes[0]);
            return true;
        }
        self.space.fill_first(fault, range, bytes, buffers.staging)
    }

    /// Locks a page of an object if it is cached and not locked; leaves it locked.
    fn lock_cached(&self, object: &VmObject, at: ObjectPage) -> bool {
        self.try_lock_and_leave(object, at, |word| word.state() == State::Cached)
    }
}
