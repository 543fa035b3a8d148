//! Cached bytes without a mapping: reads with an error instead of a SIGBUS, pages fetched ahead.

use core::sync::atomic::{AtomicU64, Ordering};

use super::pages::is_absent;
use super::requests::IoBuffer;
use super::window::View;
use super::{ObjectId, Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Interrupted, Kill, State};
use crate::reclaim::Room;
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::space::vma::{Backing, Kind, Pattern, Vma};
use crate::sys::{Errno, monotonic_ns};
use crate::units::{ObjectPage, ObjectRange, PAGE_SIZE, PageNum, PageRange};

/// How long a killable thread that finds the queue of requests full sleeps before it tries again.
const QUEUE_FULL_NS: u64 = 1_000_000;

impl From<Interrupted> for Errno {
    fn from(_: Interrupted) -> Errno {
        Errno::INTR
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadError {
    /// The byte at which it failed.
    pub offset: u64,
    pub errno: Errno,
}

impl ReadError {
    pub(super) fn at<E: Into<Errno>>(offset: u64) -> impl Fn(E) -> ReadError {
        move |error| ReadError { offset, errno: error.into() }
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Reads bytes through the cache; returns how many there were before the end.
    ///
    /// # Errors
    /// Where a page cannot be read, or, as `INTR`, the buffer's kill has ended the wait for it; what
    /// comes before it has been.
    pub fn read_at(
        &self,
        object: &VmObject,
        offset: u64,
        into: &mut [u8],
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<usize, ReadError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let Some(left) = object.len().checked_sub(at).filter(|&left| left > 0) else { break };
            let page = ObjectPage(at / PAGE_SIZE as u64);
            let within = (at % PAGE_SIZE as u64) as usize;
            let want = (into.len() - done).min(PAGE_SIZE - within).min(left as usize);
            self.fetch(object, page, scratch, buffer).map_err(ReadError::at(at))?;
            let locked = self.lock_killable(object, page, buffer.kill());
            let locked = locked.map_err(ReadError::at(at))?;
            if locked.state() == State::Cached {
                let part = &mut into[done..done + want];
                let result = self.space.mmu().memfd_read(object.memfd, at, part);
                locked.set_flags(Flags::ACCESSED);
                result.map_err(ReadError::at(at))?;
                done += want;
            }
        }
        Ok(done)
    }

    /// Has a page in the cache, and what comes with it where a stream goes on; waits for it. Where
    /// the wait may end early a store worker reads: a thread cannot leave a call of a store, and what
    /// is read is not lost when the caller leaves.
    ///
    /// # Errors
    /// Why it cannot be read; `INTR` where the buffer's kill has ended the wait; `NOMEM` where the
    /// space has no words left for pages of objects.
    pub(super) fn fetch(
        &self,
        object: &VmObject,
        page: ObjectPage,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), Errno> {
        let kill = buffer.kill();
        let mut is_asked = false;
        loop {
            if !self.use_words(object, page) {
                if !self.space.pages.has_free_block() {
                    return Err(Errno::NOMEM);
                }
                self.wait_for_memory(1, scratch, kill)?;
                continue;
            }
            let locked = self.lock_killable(object, page, kill)?;
            if locked.state() == State::Cached || page.index() >= object.pages() {
                return Ok(());
            }
            if locked.state() == State::Poisoned {
                return Err(Errno::HWPOISON);
            }
            if is_asked && locked.has(Flags::ERROR) {
                let error = self.last_read_error(object);
                let error = error.filter(|error| error.offset == page.offset());
                return Err(error.map_or(Errno::IO, |error| error.errno));
            }
            locked.leave_locked();
            let guess = self.guess_for(object, page, Pattern::Normal);
            let pages = self.lock_around(object, page, guess.order, is_absent);
            let Some(pages) = self.charge_locked(object, page, pages) else {
                self.wait_for_memory(pages.len(), scratch, kill)?;
                continue;
            };
            self.advance(object, guess, pages);
            if kill.is_never() {
                return self.fill_locked(object, pages, Some(page), buffer);
            }
            is_asked = self.request_read(object, pages, None);
            if !is_asked {
                self.wait_for_queue_killable(kill)?;
            }
        }
    }

    /// Lets some time pass: only faults are told of room in the queue.
    fn wait_for_queue_killable(&self, kill: Kill<'_>) -> Result<(), Interrupted> {
        let deadline_ns = Some(monotonic_ns().saturating_add(QUEUE_FULL_NS));
        self.space.mmu().sleep_on(&AtomicU64::new(0), 0, Kill { deadline_ns, ..kill });
        if kill.is_due() { Err(Interrupted) } else { Ok(()) }
    }

    /// Frees so many pages, or waits until some are free.
    fn wait_for_memory(
        &self,
        pages: usize,
        scratch: &mut Scratch,
        kill: Kill<'_>,
    ) -> Result<(), Interrupted> {
        if self.space.make_room(self, Room::Charge, pages, Some(scratch)) {
            return Ok(());
        }
        self.space.wait_for_room_killable(kill)
    }

    /// Sends reads for what is not cached of `pages`, without waiting; returns how many pages are
    /// under way then.
    pub fn prefetch(&self, id: ObjectId, pages: ObjectRange) -> usize {
        let object = self.object(id);
        let pages = pages.intersect(object.range());
        let mut sent = 0;
        for block in pages.by_block() {
            let mut rest = block.pages();
            while let Some(start) = rest.find(|&page| self.lock_absent(object, page)) {
                let more = rest.clone().take_while(|&page| self.lock_absent(object, page)).count();
                let run = ObjectRange::new(start, 1 + more);
                if !self.send_read_ahead(object, run) {
                    return sent;
                }
                sent += run.len();
                // The page behind the run could not be locked.
                rest = ObjectRange { start: run.end, end: block.end }.pages();
            }
        }
        sent
    }

    /// Maps what is cached of a range of the arena, without waiting; returns how many pages of it
    /// are mapped then.
    pub fn populate_cached(&self, range: PageRange) -> usize {
        let part_of = |part: PageRange| {
            let Some(vma) = self.vma_of_kind(part.start, Kind::Object) else { return 0 };
            let window = self.windows.lock(part.start);
            let object = self.object(ObjectId(vma.attributes.backing.object));
            let mut view = View { object, vma: &vma, window };
            self.map_pages(&mut view, part, VmSpace::<M>::NO_PAGE);
            part.pages().filter(|&page| view.window.is_present(page)).count()
        };
        range.by_block().map(part_of).sum()
    }

    /// The VMA of a kind at a page of a mapping that the caller keeps. Advice may have split the
    /// mapping: what all its pages have in common is in any of its VMAs. Waits for changes of the
    /// layout: while advice splits a VMA, a lookup without the lock may find none.
    pub(super) fn vma_of_kind(&self, page: PageNum, kind: Kind) -> Option<Vma> {
        self.vma_at(page).filter(|vma| vma.attributes.kind == kind)
    }

    /// Which object such a mapping shows, and where.
    pub(super) fn backing_at(&self, page: PageNum, kind: Kind) -> Option<(Backing, &VmObject)> {
        let backing = self.vma_of_kind(page, kind)?.attributes.backing;
        Some((backing, self.object(ObjectId(backing.object))))
    }

    fn vma_at(&self, page: PageNum) -> Option<Vma> {
        let vma = self.space.next_vma(&self.space.lock(), page)?;
        vma.range.contains(page).then_some(vma)
    }

    /// Whether an object, or a private copy of one, is mapped at a page. Waits for changes of the
    /// layout.
    pub fn is_mapping_at(&self, page: PageNum) -> bool {
        let kind = self.vma_at(page).map(|vma| vma.attributes.kind);
        matches!(kind, Some(Kind::Object | Kind::Private))
    }

    /// Has all of a range of one mapping mapped; waits for reads. To map a page takes the mark away
    /// that made accesses fail while it could not be read.
    ///
    /// # Errors
    /// Where a page cannot be read; what comes before it is mapped.
    pub fn populate(
        &self,
        range: PageRange,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), ReadError> {
        for part in range.by_block() {
            if self.populate_cached(part) == part.len() {
                continue;
            }
            let Some((backing, object)) = self.backing_at(part.start, Kind::Object) else {
                continue;
            };
            let mut shown = part.pages().map(|page| backing.object_page(page));
            let fetched = shown.try_for_each(|page| {
                if page.index() >= object.pages() {
                    return Ok(());
                }
                let fetched = self.fetch(object, page, scratch, buffer);
                fetched.map_err(ReadError::at(page.offset()))
            });
            self.populate_cached(part);
            fetched?;
        }
        Ok(())
    }

    pub fn last_read_error(&self, object: &VmObject) -> Option<ReadError> {
        let errno = object.read_error.load(Ordering::Acquire);
        let offset = ObjectPage(object.read_error_page.load(Ordering::Relaxed)).offset();
        (errno != 0).then(|| ReadError { offset, errno: Errno::from_raw_os_error(errno) })
    }
}
