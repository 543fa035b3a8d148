//! Cached bytes without a mapping: reads with an error instead of a SIGBUS, pages fetched ahead.

use core::sync::atomic::{AtomicU64, Ordering};

use super::pages::is_absent;
use super::requests::IoBuffer;
use super::{Object, ObjectId, Objects};
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Interrupted, Kill, State};
use crate::reclaim::Room;
use crate::scratch::Scratch;
use crate::space::AddressSpace;
use crate::space::vma::{Kind, Pattern, Vma};
use crate::sys::{Errno, monotonic_ns};
use crate::units::{
    BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SIZE, PageNum, PageRange,
};

/// How long a killable thread that finds the queue of requests full sleeps before it tries again.
const QUEUE_FULL_NS: u64 = 1_000_000;

/// Why bytes could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadError {
    /// The byte at which it failed.
    pub offset: u64,
    /// Why.
    pub errno: Errno,
}

impl<M: ObjectMmu> Objects<M> {
    /// Reads bytes through the cache; returns how many there were before the end.
    ///
    /// # Errors
    /// Where a page cannot be read, or, as `INTR`, the buffer's kill has ended the wait for it; what
    /// comes before it has been.
    pub fn read_at(
        &self,
        object: &Object,
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
            let error = |errno| ReadError { offset: at, errno };
            self.fetch(object, page, scratch, buffer).map_err(error)?;
            let locked = self.lock_killable(object, page, buffer.kill());
            let locked = locked.map_err(|Interrupted| error(Errno::INTR))?;
            if locked.state() == State::Cached {
                let part = &mut into[done..done + want];
                let result = self.space.mmu().memfd_read(object.memfd, at, part);
                locked.set_flags(Flags::ACCESSED);
                result.map_err(error)?;
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
        object: &Object,
        page: ObjectPage,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), Errno> {
        let kill = buffer.kill();
        let interrupted = |Interrupted| Errno::INTR;
        let mut is_asked = false;
        loop {
            if !self.use_words(object, page) {
                if !self.space.pages.has_free_block() {
                    return Err(Errno::NOMEM);
                }
                if !self.space.make_room(self, Room::Charge, 1, Some(scratch)) {
                    self.space.wait_for_room_killable(kill).map_err(interrupted)?;
                }
                continue;
            }
            let locked = self.lock_killable(object, page, kill).map_err(interrupted)?;
            if locked.state() == State::Cached || page.index() >= object.pages() {
                return Ok(());
            }
            if locked.state() == State::Poisoned {
                return Err(Errno::HWPOISON);
            }
            if is_asked && locked.has(Flags::ERROR) {
                return Err(self.read_errno_of(object, page));
            }
            locked.leave_locked();
            let limit = self.space.budget().limit();
            let order_max = (limit / 32).max(1).ilog2().min(BLOCK_ORDER);
            let guess = object.streams.guess(PageNum(page.0), false, Pattern::Normal, order_max);
            let pages = self.lock_around(object, page, guess.order, is_absent);
            let Some(pages) = self.charge_locked(object, page, pages) else {
                if !self.space.make_room(self, Room::Charge, pages.len(), Some(scratch)) {
                    self.space.wait_for_room_killable(kill).map_err(interrupted)?;
                }
                continue;
            };
            self.advance(object, guess, pages);
            if kill.is_never() {
                return self.fill_locked(object, pages, Some(page), buffer);
            }
            is_asked = self.request_read(object.id(), pages, None);
            if !is_asked {
                self.wait_for_queue_killable(kill).map_err(interrupted)?;
            }
        }
    }

    /// Lets some time pass: only faults are told of room in the queue.
    fn wait_for_queue_killable(&self, kill: Kill<'_>) -> Result<(), Interrupted> {
        let deadline_ns = Some(monotonic_ns().saturating_add(QUEUE_FULL_NS));
        self.space.mmu().sleep_on(&AtomicU64::new(0), 0, Kill { deadline_ns, ..kill });
        if kill.is_due() { Err(Interrupted) } else { Ok(()) }
    }

    /// Why a page could not be read that another has tried to read.
    fn read_errno_of(&self, object: &Object, page: ObjectPage) -> Errno {
        match self.last_read_error(object) {
            Some(error) if error.offset == page.offset() => error.errno,
            _ => Errno::IO,
        }
    }

    /// Sends reads for what is not cached of `pages`, without waiting; returns how many pages are
    /// under way then.
    pub fn prefetch(&self, id: ObjectId, pages: ObjectRange) -> usize {
        let object = self.object(id);
        let pages = pages.intersect(object.range());
        let mut sent = 0;
        let mut at = pages.start;
        while at < pages.end {
            let block_end = ObjectPage((at.0 | (BLOCK_PAGES as u64 - 1)) + 1).min(pages.end);
            let mut run = ObjectRange { start: at, end: at };
            while run.end < block_end && self.lock_absent(object, run.end) {
                run.end = run.end.add(1);
            }
            if run.is_empty() {
                at = at.add(1);
                continue;
            }
            at = run.end;
            if !self.send_read_ahead(id, object, run) {
                break;
            }
            sent += run.len();
        }
        sent
    }

    /// Maps what is cached of a range of the arena, without waiting; returns how many pages of it
    /// are mapped then.
    pub fn populate_cached(&self, range: PageRange) -> usize {
        let part_of = |part: PageRange| {
            let Some(vma) = self.vma_of_kind(part.start, Kind::Object) else { return 0 };
            let mut window = self.windows.lock(part.start);
            let object = self.object(ObjectId(vma.attributes.backing.object));
            self.map_pages(object, &vma, &mut window, part, AddressSpace::<M>::NO_PAGE);
            part.pages().filter(|&page| window.is_present(page)).count()
        };
        range.by_block().map(part_of).sum()
    }

    /// The VMA of a kind at a page of a mapping that the caller keeps. Advice may have split the
    /// mapping: what all its pages have in common is in any of its VMAs. Waits for whoever changes the
    /// layout: while advice splits a VMA, a lookup without the lock may find none.
    pub(super) fn vma_of_kind(&self, page: PageNum, kind: Kind) -> Option<Vma> {
        let vma = self.space.next_vma(&self.space.lock(), page)?;
        (vma.range.contains(page) && vma.attributes.kind == kind).then_some(vma)
    }

    /// Whether an object, or a private copy of one, is mapped at a page. Waits for whoever changes the
    /// layout.
    pub fn is_mapping_at(&self, page: PageNum) -> bool {
        let vma = self.space.next_vma(&self.space.lock(), page);
        let has_object = |kind| matches!(kind, Kind::Object | Kind::Private);
        vma.is_some_and(|vma| vma.range.contains(page) && has_object(vma.attributes.kind))
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
            let Some(vma) = self.vma_of_kind(part.start, Kind::Object) else { continue };
            let backing = vma.attributes.backing;
            let object = self.object(ObjectId(backing.object));
            for at in part.pages() {
                let page = backing.object_page(at);
                if page.index() >= object.pages() {
                    break;
                }
                let error = |errno| ReadError { offset: page.offset(), errno };
                let fetched = self.fetch(object, page, scratch, buffer).map_err(error);
                if fetched.is_err() {
                    self.populate_cached(part);
                    return fetched;
                }
            }
            self.populate_cached(part);
        }
        Ok(())
    }

    /// The last read that failed: where, and why.
    pub fn last_read_error(&self, object: &Object) -> Option<ReadError> {
        let errno = object.read_error.load(Ordering::Acquire);
        let offset = ObjectPage(object.read_error_page.load(Ordering::Relaxed)).offset();
        (errno != 0).then(|| ReadError { offset, errno: Errno::from_raw_os_error(errno) })
    }
}
