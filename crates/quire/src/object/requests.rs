//! What blocks is done by store workers: reads into the cache, and write-back.
//!
//! A fault that finds nothing in the cache locks the pages, sends a request, and is left
//! unanswered; the worker that has read them maps what the fault asked for and answers it. The
//! queue has a fixed size and is never waited for.
//!
//! Locks: the queue's mutex, a leaf; workers take page locks, `i_mmap` and windows like anybody.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use rustix_futex_sync::Mutex;

use super::window::Mapped;
use super::{Object, ObjectId, Objects};
use crate::control::Event;
use crate::fault::Access;
use crate::mmu::Protection;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::space::vma::Vma;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::sys::memory;
use crate::units::{
    BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange,
};

const REQUESTS_MAX: usize = 256;

/// A worker's buffer: pages on their way between a store and a home.
pub struct IoBuffer {
    bytes: NonNull<u8>,
}

// SAFETY: plain memory of its own.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    /// Bytes of a buffer: the largest single read or write.
    pub const BYTES: usize = BLOCK_PAGES * PAGE_SIZE;

    /// Maps one.
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new() -> Result<IoBuffer, Errno> {
        Ok(IoBuffer { bytes: memory::reserve(Self::BYTES, memory::Access::ReadWrite)? })
    }

    /// Its first `pages` pages.
    pub(super) fn pages(&mut self, pages: usize) -> &mut [u8] {
        assert!(pages <= BLOCK_PAGES);
        // SAFETY: our own mapping, borrowed with self.
        unsafe { core::slice::from_raw_parts_mut(self.bytes.as_ptr(), pages << PAGE_SHIFT) }
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and borrowed by nobody.
        unsafe { memory::release(self.bytes, Self::BYTES) };
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

/// What a worker is to do.
#[derive(Clone, Copy)]
pub(super) enum Request {
    /// Read pages, which are locked for it.
    Read { object: ObjectId, pages: ObjectRange, asker: Option<Asker> },
    /// Write back what is dirty among the pages of a block.
    WriteBack { object: ObjectId, pages: ObjectRange },
}

struct Ring {
    requests: [Option<Request>; REQUESTS_MAX],
    head: usize,
    len: usize,
}

/// The queue.
pub(super) struct Requests {
    ring: Mutex<Ring>,
    /// Counts requests; what idle workers sleep on.
    calls: AtomicU32,
    is_stopping: AtomicU32,
}

impl Requests {
    pub const fn new() -> Requests {
        Requests {
            ring: Mutex::new(Ring { requests: [None; REQUESTS_MAX], head: 0, len: 0 }),
            calls: AtomicU32::new(0),
            is_stopping: AtomicU32::new(0),
        }
    }

    /// Adds a request; `false` where the queue is full.
    pub fn push(&self, request: Request) -> bool {
        {
            let mut ring = self.ring.lock();
            if ring.len == REQUESTS_MAX {
                return false;
            }
            let at = (ring.head + ring.len) % REQUESTS_MAX;
            ring.requests[at] = Some(request);
            ring.len += 1;
        }
        // Release: who sees the count sees the request.
        self.calls.fetch_add(1, Ordering::Release);
        futex::wake(&self.calls, 1, Reach::Process);
        true
    }

    fn pop(&self) -> Option<Request> {
        let mut ring = self.ring.lock();
        if ring.len == 0 {
            return None;
        }
        let at = ring.head;
        ring.head = (at + 1) % REQUESTS_MAX;
        ring.len -= 1;
        ring.requests[at].take()
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// A store worker's life: serves requests until [`Self::stop_workers`].
    pub fn serve_requests(&self, buffer: &mut IoBuffer) {
        loop {
            // Acquire: before the look at the queue, so that no request is missed.
            let seen = self.requests.calls.load(Ordering::Acquire);
            while let Some(request) = self.requests.pop() {
                match request {
                    Request::Read { object, pages, asker } => {
                        self.complete_read(object, pages, asker, buffer);
                        self.put(object);
                    }
                    Request::WriteBack { object, pages } => {
                        self.write_back_range(self.object(object), pages, buffer);
                        self.put(object);
                    }
                }
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
    pub(super) fn request(&self, id: ObjectId, request: Request) -> bool {
        self.get(id);
        let is_sent = self.requests.push(request);
        if !is_sent {
            self.put(id);
        }
        is_sent
    }

    /// Reads locked pages into the cache, unlocks them, and answers the fault that waits.
    fn complete_read(
        &self,
        id: ObjectId,
        pages: ObjectRange,
        asker: Option<Asker>,
        buffer: &mut IoBuffer,
    ) {
        let object = self.object(id);
        let asked = asker.map(|asker| asker.vma.attributes.backing.object_page(asker.page));
        let is_bad = self.fill_locked(object, pages, asked, buffer).is_err();
        let Some(asker) = asker else { return };
        let mut window = self.windows.lock(asker.page);
        if self.space.is_current(&asker.vma) {
            if is_bad {
                self.poison(asker.page, &window);
            } else {
                self.map_for(object, &asker, &mut window);
            }
        }
        if !window.is_present(asker.page) {
            self.space.mmu().wake(PageRange::new(asker.page, 1));
        }
    }

    /// Maps what a fault asked for and what is around it. Where it cannot the fault is tried again.
    fn map_for(&self, object: &Object, asker: &Asker, window: &mut Mapped) {
        if asker.access != Access::Read && !self.is_too_dirty() {
            let at = asker.vma.attributes.backing.object_page(asker.page);
            if self.lock_mappable(object, at, window.is_present(asker.page)) {
                let old = object.word(at).load();
                self.map_for_write(object, &asker.vma, asker.page, old, window);
            }
        }
        self.map_pages(object, &asker.vma, window, asker.around, asker.page);
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
    /// several fails each is read by itself, so that only bad pages are lost.
    ///
    /// # Errors
    /// Why the `asked` page, or any where none was asked for, could not be read; it is noted in
    /// the object.
    pub(super) fn fill_locked(
        &self,
        object: &Object,
        pages: ObjectRange,
        asked: Option<ObjectPage>,
        buffer: &mut IoBuffer,
    ) -> Result<(), Errno> {
        self.space.budget().count(Event::Pgpgin, pages.len());
        let direct = self.unfilled(object, pages);
        self.end_unfilled(object, pages.start);
        let is_direct = direct.is_some();
        let bytes = direct.unwrap_or_else(|| buffer.pages(pages.len()));
        if self.fill_run(object, pages, bytes, is_direct).is_ok() {
            return Ok(());
        }
        let bytes = buffer.pages(1);
        let mut result = Ok(());
        for page in pages.pages() {
            let one = ObjectRange::new(page, 1);
            if let Err(error) = self.fill_run(object, one, bytes, false) {
                object.note_read_error(page, error);
                // A recycled frame has memory there already.
                let _ = self.cache_punch(object, one);
                self.space.budget().uncharge(1);
                let bad = Object::GONE.with(Flags::ERROR);
                self.space.unlock_word_with(object.word(page), bad);
                if asked.is_none_or(|asked| asked == page) {
                    result = Err(error);
                }
            }
        }
        // Perhaps none could be read.
        self.try_leave_frame(object, object.block_of(pages.start));
        result
    }

    /// Reads a run; all of it is cached and unlocked then, or nothing has changed.
    /// With `is_direct`, `bytes` are where they live.
    fn fill_run(
        &self,
        object: &Object,
        pages: ObjectRange,
        bytes: &mut [u8],
        is_direct: bool,
    ) -> Result<(), Errno> {
        object.store.read(pages.start.offset(), bytes)?;
        // The object may have become shorter: what lies behind its end must not enter the home,
        // which would grow. Who shortens it waits for these locks before it shortens the home.
        let kept = pages.intersect(object.range());
        zero_tail(object, pages, bytes);
        if !kept.is_empty() {
            let filled = &bytes[..kept.len() << PAGE_SHIFT];
            if !is_direct && let Err(error) = self.cache_write(object, kept.start.offset(), filled)
            {
                let _ = self.cache_punch(object, kept);
                return Err(error);
            }
            for at in by_block(kept) {
                object.count_cached(at.start, at.len());
            }
            self.cached.fetch_add(kept.len(), Ordering::Relaxed);
        }
        // The last first: who waits for the first finds all of them.
        for page in pages.pages().rev() {
            let is_kept = kept.contains(page);
            let state = if is_kept { State::Cached } else { State::None };
            if !is_kept {
                let _ = self.cache_punch(object, ObjectRange::new(page, 1));
                self.space.budget().uncharge(1);
            }
            self.space.unlock_word_with(object.word(page), Snapshot::new(state, 0));
        }
        Ok(())
    }
}

impl Object {
    pub(super) fn note_read_error(&self, page: ObjectPage, error: Errno) {
        self.read_error_page.store(page.0, Ordering::Relaxed);
        // Release publishes which.
        self.read_error.store(error.raw_os_error(), Ordering::Release);
    }
}

/// What lies behind the object's end in its last page reads as zeros.
fn zero_tail(object: &Object, pages: ObjectRange, bytes: &mut [u8]) {
    let end = object.len().saturating_sub(pages.start.offset()) as usize;
    if let Some(tail) = bytes.get_mut(end..) {
        tail.fill(0);
    }
}

/// A run of pages, cut where blocks of 512 end.
pub(super) fn by_block(pages: ObjectRange) -> impl Iterator<Item = ObjectRange> {
    let as_pages = PageRange { start: PageNum(pages.start.0), end: PageNum(pages.end.0) };
    as_pages
        .by_block()
        .map(|part| ObjectRange { start: ObjectPage(part.start.0), end: ObjectPage(part.end.0) })
}
