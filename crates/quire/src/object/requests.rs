//! What blocks is done by store workers: reads into the cache, and write-back.
//!
//! The queue has a fixed size, and no thread sleeps for room in it: a fault that finds it full is
//! answered when half of it is free. A fault on a busy page for which there is no record to park it
//! is answered by the background thread every few milliseconds: nothing tells when the page is free.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::rmap::Wait;
use super::window::{Mapped, View};
use super::{ObjectId, Objects, VmObject};
use crate::control::{Event, FaultKind};
use crate::fault::Outcome;
use crate::fault::fault_list::{Answer, FaultList};
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Access, Protection};
use crate::page::{Flags, Kill};
use crate::space::vma::{Kind, Vma};
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::sys::memory::Table;
use crate::sys::monotonic_ns;
use crate::sys::mutex::Mutex;
use crate::sys::rank::{self, Rank};
use crate::units::{
    BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange,
};

const REQUESTS_MAX: usize = 256;
/// So many requests are left, and faults that found the queue full try again.
const REQUESTS_FEW: usize = REQUESTS_MAX / 2;
/// How often at most the faults on busy pages try again.
const UNPARKED_NS: u64 = 20_000_000;

/// The buffer of a worker, or of a caller: pages on their way between a store and a memfd, and what
/// ends the waits of the thread that works with it.
pub struct IoBuffer {
    bytes: Table<u8>,
    kill: Kill<'static>,
}

impl IoBuffer {
    /// Bytes of a buffer: the largest single read or write.
    pub const BYTES: usize = BLOCK_PAGES * PAGE_SIZE;

    pub fn new() -> Result<IoBuffer, Errno> {
        Ok(IoBuffer { bytes: Table::new(Self::BYTES)?, kill: Kill::NEVER })
    }

    /// Has `kill` end the waits of threads that read with this buffer. They leave reads to store
    /// workers then.
    pub fn set_kill(&mut self, kill: Kill<'static>) {
        self.kill = kill;
    }

    pub(super) const fn kill(&self) -> Kill<'static> {
        self.kill
    }

    pub(super) fn pages(&mut self, pages: usize) -> &mut [u8] {
        &mut self.bytes[..pages << PAGE_SHIFT]
    }
}

/// The fault that waits for a read.
#[derive(Clone, Copy)]
pub(super) struct Asker {
    pub page: PageNum,
    pub vma: Vma,
    /// How much is mapped around it.
    pub around: PageRange,
    pub access: Access,
}

/// What a worker is to do for an object, which it has a use of for that.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// Read pages, which are locked for it.
    Read { pages: ObjectRange, asker: Option<Asker> },
    /// Write back what is dirty among the pages of a block.
    WriteBack(ObjectRange),
    /// Nothing but to end the use: it may be the last.
    Put,
}

#[derive(Clone, Copy)]
struct Request {
    object: ObjectId,
    work: Work,
    sent_ns: u64,
}

impl Request {
    /// Page locks that go with it, from the thread that asks to the one that works.
    const fn locked_pages(&self) -> usize {
        match self.work {
            Work::Read { pages, .. } => pages.len(),
            Work::WriteBack(_) | Work::Put => 0,
        }
    }
}

struct RequestRing {
    requests: [Option<Request>; REQUESTS_MAX],
    head: usize,
    len: usize,
}

pub(super) struct Requests {
    ring: Mutex<rank::Requests, RequestRing>,
    /// Counts requests; what idle workers sleep on.
    calls: AtomicU32,
    is_stopping: AtomicU32,
    /// Faults that found the queue full.
    crowded: FaultList,
    /// Faults that found their page busy, and no record to be parked by.
    unparked: FaultList,
    /// When those were answered last.
    unparked_ns: AtomicU64,
}

impl Requests {
    pub const fn new() -> Requests {
        Requests {
            ring: Mutex::new(RequestRing { requests: [None; REQUESTS_MAX], head: 0, len: 0 }),
            calls: AtomicU32::new(0),
            is_stopping: AtomicU32::new(0),
            crowded: FaultList::new(),
            unparked: FaultList::new(),
            unparked_ns: AtomicU64::new(0),
        }
    }

    /// Adds a request; `false` where the queue is full.
    fn push(&self, object: ObjectId, work: Work) -> bool {
        let request = Request { object, work, sent_ns: monotonic_ns() };
        {
            let mut ring = self.ring.lock();
            if ring.len == REQUESTS_MAX {
                return false;
            }
            let at = (ring.head + ring.len) % REQUESTS_MAX;
            ring.requests[at] = Some(request);
            ring.len += 1;
        }
        rank::released(Rank::Page, request.locked_pages());
        // Release pairs with the acquire in `serve_requests`: with the count the request is seen.
        self.calls.fetch_add(1, Ordering::Release);
        futex::wake(&self.calls, 1, Reach::Process);
        true
    }

    fn len(&self) -> usize {
        self.ring.lock().len
    }

    fn pop(&self) -> Option<Request> {
        let mut ring = self.ring.lock();
        let head = ring.head;
        // There is none where the queue is empty.
        let request = ring.requests[head].take()?;
        ring.head = (head + 1) % REQUESTS_MAX;
        ring.len -= 1;
        rank::taken(Rank::Page, request.locked_pages());
        Some(request)
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// A store worker's life: serves requests until [`Self::stop_workers`].
    pub fn serve_requests(&self, buffer: &mut IoBuffer) {
        loop {
            // Acquire: before the look at the queue, so that no request is missed.
            let seen = self.requests.calls.load(Ordering::Acquire);
            while let Some(Request { object, work, sent_ns }) = self.requests.pop() {
                if self.requests.len() <= REQUESTS_FEW {
                    self.answer_crowded();
                }
                match work {
                    Work::Read { pages, asker } => {
                        self.complete_read(object, pages, asker, sent_ns, buffer);
                    }
                    Work::WriteBack(pages) => {
                        self.write_back_runs(self.object(object), pages, Wait::No, buffer);
                    }
                    Work::Put => {}
                }
                self.put(object);
            }
            if self.requests.is_stopping.load(Ordering::Acquire) != 0 {
                return;
            }
            futex::wait(&self.requests.calls, seen, Reach::Process, None);
        }
    }

    /// Has workers return once the queue is empty.
    pub fn stop_workers(&self) {
        self.requests.is_stopping.store(1, Ordering::Release);
        self.requests.calls.fetch_add(1, Ordering::Release);
        futex::wake(&self.requests.calls, u32::MAX, Reach::Process);
    }

    /// Sends a request that keeps its object in use until it is done; `false` where the queue is
    /// full.
    pub(super) fn request(&self, object: &VmObject, work: Work) -> bool {
        let id = object.id;
        self.get(id);
        let is_sent = self.requests.push(id, work);
        if !is_sent {
            self.put(id);
        }
        is_sent
    }

    /// Sends the read of locked, charged pages; `false` where the queue is full: they are not charged
    /// and not locked any more then.
    pub(super) fn request_read(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        asker: Option<Asker>,
    ) -> bool {
        let is_sent = self.request(object, Work::Read { pages, asker });
        if !is_sent {
            self.space.budget().uncharge(pages.len());
            self.unlock_pages(object, pages);
        }
        is_sent
    }

    /// Ends a use that a handler has. Where it is the last a worker ends it: what is dirty is
    /// written then, and the store may do anything at its end.
    pub(super) fn put_in_handler(&self, id: ObjectId) {
        if !self.put_if_not_last(id) && !self.requests.push(id, Work::Put) {
            self.put(id);
        }
    }

    /// Leaves a fault unanswered that found the queue full.
    pub(super) fn wait_for_queue(&self, page: PageNum) -> Outcome {
        self.space.budget().count(Event::FaultParked, 1);
        self.requests.crowded.push(page);
        // It may have become half empty before the page was in the list. The list's and the
        // queue's locks order the two: a worker that takes a request later finds the page.
        if self.requests.len() <= REQUESTS_FEW {
            self.answer_crowded();
        }
        Outcome::Parked
    }

    fn answer_crowded(&self) {
        self.requests.crowded.answer_all(|answer| self.space.wake_for(answer));
    }

    /// Leaves a fault unanswered whose page is busy, and which cannot be parked on it.
    pub(super) fn wait_unparked(&self, page: PageNum) -> Outcome {
        self.space.budget().count(Event::FaultParked, 1);
        self.requests.unparked.push(page);
        self.space.budget().call_for_memory();
        Outcome::Parked
    }

    /// Has the faults try again whose pages were busy, but not all the time.
    pub(super) fn answer_unparked(&self) {
        // Relaxed: one thread does this.
        let now = monotonic_ns();
        let is_too_soon =
            now.saturating_sub(self.requests.unparked_ns.load(Ordering::Relaxed)) < UNPARKED_NS;
        if is_too_soon || !self.has_unparked() {
            return;
        }
        self.requests.unparked_ns.store(now, Ordering::Relaxed);
        let mut hull: Option<PageRange> = None;
        self.requests.unparked.answer_all(|answer| {
            match answer {
                // There an answer wakes the threads that wait for any page near by: one for all,
                // below.
                Answer::Page(page) if self.space.mmu().is_inline() => {
                    let one = PageRange::new(page, 1);
                    hull = Some(hull.map_or(one, |hull| PageRange {
                        start: hull.start.min(one.start),
                        end: hull.end.max(one.end),
                    }));
                }
                _ => self.space.wake_for(answer),
            }
        });
        if let Some(hull) = hull {
            self.space.mmu().wake(hull);
        }
    }

    /// Whether faults wait for busy pages that they could not be parked on.
    pub fn has_unparked(&self) -> bool {
        !self.requests.unparked.is_empty()
    }

    /// Reads locked pages into the cache, unlocks them, and answers the fault that waits.
    fn complete_read(
        &self,
        id: ObjectId,
        pages: ObjectRange,
        asker: Option<Asker>,
        sent_ns: u64,
        buffer: &mut IoBuffer,
    ) {
        let object = self.object(id);
        let asked = asker.map(|asker| asker.vma.attributes.backing.object_page(asker.page));
        let is_bad = self.fill_locked(object, pages, asked, buffer).is_err();
        let Some(asker) = asker else { return };
        if asker.vma.attributes.kind == Kind::Private {
            self.complete_private(&asker, is_bad, buffer);
        } else {
            self.answer_asker(object, &asker, is_bad);
        }
        if !is_bad {
            let passed_ns = monotonic_ns().saturating_sub(sent_ns);
            self.space.budget().count_fault_time(FaultKind::ObjectRead, passed_ns);
        }
    }

    /// What a fault asked for has been read, or cannot be: maps it and answers the fault. Returns
    /// whether it is mapped.
    pub(super) fn answer_asker(&self, object: &VmObject, asker: &Asker, is_bad: bool) -> bool {
        let Asker { page, ref vma, around, access } = *asker;
        let mut view = View { object, vma, window: self.windows.lock(page) };
        if self.space.vmas.is_current(vma) {
            let at = view.object_page(page);
            if is_bad {
                // If that is still so: the page may have been cut off, and must not be marked for when
                // it is there again. Where it is locked the fault is tried again.
                let bad = self.try_lock_if(object, at, |word| word.has(Flags::ERROR));
                if bad.is_some() && at.index() < object.pages() {
                    self.poison(page, &view.window);
                }
            } else {
                if access != Access::Read
                    && !self.must_clean_first(object)
                    && !view.window.is_present(page)
                    && let Some(locked) = self.lock_mappable(object, at)
                {
                    self.map_for_write(&mut view, page, locked);
                }
                self.map_pages(&mut view, around, page);
            }
        }
        let is_mapped = view.window.is_present(page);
        if !is_mapped {
            self.space.mmu().wake(PageRange::new(page, 1));
        }
        is_mapped
    }

    /// Makes an access to a page that cannot be read a SIGBUS, until it is mapped.
    pub(super) fn poison(&self, page: PageNum, window: &Mapped) {
        if window.is_present(page) {
            return;
        }
        let one = PageRange::new(page, 1);
        if self.space.mmu().poison(page).pages == 0 {
            // What was mapped protected has left a mark behind, which goes with the protection.
            let _ = self.space.mmu().write_protect(one, Protection::Writable);
            let _ = self.space.mmu().poison(page);
        }
    }

    /// Reads locked pages, which are charged, into the cache and unlocks them. Where the read of
    /// several fails each is read by itself, so that only bad pages are lost; but if the one that was asked for fails
    /// as well no other is tried: the store may be away, and each takes as long as that one.
    ///
    /// # Errors
    /// Why the `asked` page, or any where none was asked for, could not be read; it is noted in
    /// the object.
    pub(super) fn fill_locked(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        asked: Option<ObjectPage>,
        buffer: &mut IoBuffer,
    ) -> Result<(), Errno> {
        if !object.is_memory {
            self.space.budget().count(Event::Pgpgin, pages.len());
        }
        if self.fill_run(object, pages, buffer.pages(pages.len())).is_ok() {
            return Ok(());
        }
        let bytes = buffer.pages(1);
        let mut result = Ok(());
        let others = pages.pages().filter(|&page| asked != Some(page));
        for page in asked.into_iter().filter(|&page| pages.contains(page)).chain(others) {
            let one = ObjectRange::new(page, 1);
            if asked.is_some() && result.is_err() {
                self.space.budget().uncharge(1);
                self.unlock_pages(object, one);
                continue;
            }
            if let Err(error) = self.fill_run(object, one, bytes) {
                object.read_error_page.store(page.0, Ordering::Relaxed);
                // Release publishes which.
                object.read_error.store(error.raw_os_error(), Ordering::Release);
                self.space.budget().uncharge(1);
                let locked = self.adopt(object, page);
                if asked.is_none_or(|asked| asked == page) {
                    locked.set_flags(Flags::ERROR);
                    result = Err(error);
                } else {
                    locked.clear_flags(Flags::ERROR);
                }
            }
        }
        result
    }

    /// Reads a run; all of it is cached and unlocked then, or nothing has changed.
    pub(super) fn fill_run(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        bytes: &mut [u8],
    ) -> Result<(), Errno> {
        if object.is_memory {
            self.load_locked_pages(object, pages, bytes)?;
        } else {
            object.store.read(pages.start.offset(), bytes)?;
        }
        self.enter_run(object, pages, bytes)
    }

    /// Puts what was read of a run into the cache, and unlocks it; or nothing has changed.
    pub(super) fn enter_run(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        bytes: &mut [u8],
    ) -> Result<(), Errno> {
        // The object may have become shorter: what lies behind its end must not enter the memfd,
        // which would grow. A truncation waits for these locks before it shortens the memfd.
        let kept = pages.intersect(object.range());
        zero_tail(object, pages, bytes);
        if !kept.is_empty() {
            let filled = &bytes[..kept.len() << PAGE_SHIFT];
            let mmu = self.space.mmu();
            if let Err(error) = mmu.memfd_fill(object.memfd, kept.start.offset(), filled) {
                let _ = mmu.memfd_punch(object.memfd, kept);
                return Err(error);
            }
            self.count_cached(object, kept.start, kept.len());
        }
        // The last first: a thread that waits for the first finds all of them.
        for page in pages.pages().rev() {
            let mut locked = self.adopt(object, page);
            if !kept.contains(page) {
                self.space.budget().uncharge(1);
                locked.clear_flags(Flags::ERROR);
                continue;
            }
            if object.is_memory {
                self.enter_from_swap(&mut locked);
            } else {
                locked.cache();
            }
            locked.unlock();
        }
        Ok(())
    }
}

/// What lies behind the object's end in its last page reads as zeros.
pub(super) fn zero_tail(object: &VmObject, pages: ObjectRange, bytes: &mut [u8]) {
    let end = object.len().saturating_sub(pages.start.offset()) as usize;
    if let Some(tail) = bytes.get_mut(end..) {
        tail.fill(0);
    }
}
