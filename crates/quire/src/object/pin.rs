//! Pins: pages of a shared mapping that stay in memory, and mapped there, until they are unpinned.
//!
//! What is pinned can be handed to the kernel to hold: the source of direct I/O, a pipe's page, a
//! buffer of io_uring. Nothing of it is dropped, unmapped, migrated or cut off. Half of the budget may be
//! pinned at most.
//!
//! # Pinned for write
//!
//! The kernel writes such a page when it likes, through an entry of the page table or past all of
//! them, and reports nothing. So the page is DIRTY from the first such pin to the last, and is never
//! write-protected meanwhile. A flush copies it as it is at that moment, and cannot prove it clean;
//! the background leaves it alone. It does not count against the limits of dirty pages: no
//! write-back could lower it, and what is pinned has a bound of its own.
//!
//! # Pages whose memory fails
//!
//! Such a page loses MLOCKED and PINNED, and keeps its count until it is let go: until then it
//! can neither be given up ([`Objects::unpoison`]) nor cut off, and what is cached has the flags
//! that its count stands for.
//!
//! # Cuts
//!
//! A cut through a pinned page is refused, even if the page's memory has failed: the page's count is asked,
//! not its flags. A cut says so first and then takes each page's lock; a pin looks for a cut under that
//! lock. So either the cut finds the pin, or the pin waits for the cut's end, and finds the new one.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::ReadError;
use super::pages::Locked;
use super::requests::IoBuffer;
use super::window::{Mapped, View};
use super::{ObjectId, Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Protection, Refusal};
use crate::page::{Flags, Kill, State};
use crate::scratch::Scratch;
use crate::space::vma::{Kind, Vma};
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::units::{ObjectPage, PageNum, PageRange};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum PinFor {
    Reading = 1,
    /// They may be written at any time.
    Writing = 1 | 1 << 16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinError {
    /// More would be pinned than may be.
    TooMuch,
    /// The page at this byte lies behind the object's end.
    BehindEnd(u64),
    /// A page is pinned as often as can be counted.
    TooOften,
    Read(ReadError),
    /// The kernel does not map it.
    Refused(Errno),
}

impl From<ReadError> for PinError {
    fn from(error: ReadError) -> PinError {
        PinError::Read(error)
    }
}

/// How often a page is pinned: all pins in the lower half, those for write in the upper. Changed
/// under the page's lock alone.
pub(super) struct Count<'a>(pub &'a AtomicU32);

impl Count<'_> {
    // Relaxed, all of it: the page's lock orders them.

    pub fn all(&self) -> u32 {
        self.0.load(Ordering::Relaxed) & 0xffff
    }

    pub fn writes(&self) -> u32 {
        self.0.load(Ordering::Relaxed) >> 16
    }

    pub fn add(&self, what: PinFor) {
        debug_assert!(self.all() < 0xffff, "looked at before");
        self.0.fetch_add(what as u32, Ordering::Relaxed);
    }

    pub fn sub(&self, what: PinFor) {
        debug_assert!(self.all() > 0, "let go more often than pinned");
        self.0.fetch_sub(what as u32, Ordering::Relaxed);
    }
}

pub(super) struct Pins {
    /// Pages that are pinned, however often.
    pages: AtomicUsize,
    /// Of those the ones of stores that are pinned for write.
    writable: AtomicUsize,
    /// The counts of private mappings' pages.
    pub privates: Table<AtomicU32>,
    /// Pages of private mappings that are pinned.
    pub private_pages: AtomicUsize,
}

impl Pins {
    pub fn new(arena_pages: usize) -> Result<Pins, Errno> {
        Ok(Pins {
            pages: AtomicUsize::new(0),
            writable: AtomicUsize::new(0),
            privates: Table::new(arena_pages)?,
            private_pages: AtomicUsize::new(0),
        })
    }

    /// Counts a page, whose count is to be raised, here and in `alike`, unless it is
    /// pinned already; an error where it cannot be pinned.
    pub fn take(
        &self,
        count: &Count<'_>,
        most: usize,
        alike: &AtomicUsize,
    ) -> Result<(), PinError> {
        match count.all() {
            0xffff => return Err(PinError::TooOften),
            0 => {}
            _ => return Ok(()),
        }
        // Relaxed: a bound, which orders nothing.
        let more = |pages: usize| (pages < most).then_some(pages + 1);
        let taken = self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map_err(|_| PinError::TooMuch)?;
        alike.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub fn give_back(&self, pages: usize) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Pages that are DIRTY as long as they are pinned.
    pub fn writable(&self) -> usize {
        // Relaxed: it goes with the number of dirty pages, which is as approximate.
        self.writable.load(Ordering::Relaxed)
    }
}

impl VmObject {
    fn pins(&self, page: ObjectPage) -> Count<'_> {
        Count(&self.pins[page.index()])
    }

    /// Whether a locked page is pinned, be its memory bad or not.
    pub(super) fn is_pinned(&self, page: ObjectPage) -> bool {
        self.pins(page).all() > 0
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Most pages that may be pinned at once: half of the budget, as of what is locked in memory.
    pub fn pins_max(&self) -> usize {
        self.space.budget().limit() / 2
    }

    pub fn pinned_pages(&self) -> usize {
        self.pins.pages.load(Ordering::Relaxed)
    }

    /// Pins a range of one shared mapping that the caller keeps: its pages are read, mapped, and
    /// stay so until [`Self::unpin`]; what is pinned for write can be written without a fault. After an
    /// error nothing is pinned by this call.
    pub fn pin(
        &self,
        range: PageRange,
        what: PinFor,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), PinError> {
        if range.len() > self.pins_max() {
            return Err(PinError::TooMuch);
        }
        let mut done = range.start;
        let result = range
            .by_block()
            .try_for_each(|part| self.pin_part(part, what, &mut done, scratch, buffer));
        if result.is_err() {
            self.unpin(PageRange { start: range.start, end: done }, what);
        }
        result
    }

    /// Pins a part of one window, page by page, and maps it then; `done` is where the pinned ones
    /// end.
    fn pin_part(
        &self,
        part: PageRange,
        what: PinFor,
        done: &mut PageNum,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), PinError> {
        let vma =
            self.vma_of_kind(part.start, Kind::Object).ok_or(PinError::Refused(Errno::FAULT))?;
        let backing = vma.attributes.backing;
        let object = self.object(ObjectId(backing.object));
        for page in part.pages() {
            self.pin_page(object, backing.object_page(page), what, scratch, buffer)?;
            *done = page.add(1);
        }
        self.populate_cached(part);
        if what == PinFor::Writing {
            let window = self.windows.lock(part.start);
            let mut view = View { object, vma: &vma, window };
            let mut rest = part;
            while !rest.is_empty() {
                // What is in the way is mapped by itself below.
                let none = PageRange::new(rest.start, 0);
                let end = self.make_writable(&mut view, none, rest).end;
                rest.start = end.add(1).min(rest.end);
            }
        }
        let kill = buffer.kill();
        part.pages().try_for_each(|page| self.map_pinned(object, &vma, page, what, kill))
    }

    fn pin_page(
        &self,
        object: &VmObject,
        at: ObjectPage,
        what: PinFor,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), PinError> {
        let (kill, offset) = (buffer.kill(), at.offset());
        loop {
            if at.index() >= object.pages() {
                return Err(PinError::BehindEnd(offset));
            }
            self.fetch(object, at, scratch, buffer).map_err(ReadError::at(offset))?;
            let locked = self.lock_killable(object, at, kill);
            let mut locked = locked.map_err(ReadError::at(offset))?;
            // SeqCst: a thread that cuts takes this lock after it has said so.
            let is_cut = at.0 >= object.cut.load(Ordering::SeqCst);
            if locked.state() == State::Cached && !is_cut && at.index() < object.pages() {
                return self.pin_locked(object, at, &mut locked, what);
            }
            locked.unlock();
            if is_cut {
                self.wait_for_cut(object, kill).map_err(ReadError::at(offset))?;
            }
        }
    }

    fn pin_locked(
        &self,
        object: &VmObject,
        at: ObjectPage,
        locked: &mut Locked<'_, M>,
        what: PinFor,
    ) -> Result<(), PinError> {
        let count = object.pins(at);
        self.pins.take(&count, self.pins_max(), &object.pinned)?;
        locked.set_flags_locked(Flags::MLOCKED);
        if what == PinFor::Writing {
            if count.writes() == 0 && !object.is_memory {
                // Before it counts as dirty: or the limits would be passed for a moment.
                self.pins.writable.fetch_add(1, Ordering::Relaxed);
                object.pinned_writable.fetch_add(1, Ordering::Relaxed);
            }
            // Before it can be written.
            self.mark_dirty(object, at, locked);
            locked.set_flags_locked(Flags::PINNED);
        }
        count.add(what);
        Ok(())
    }

    /// Lets pages go that [`Self::pin`] has pinned.
    pub fn unpin(&self, range: PageRange, what: PinFor) {
        for part in range.by_block() {
            let Some((backing, object)) = self.backing_at(part.start, Kind::Object) else {
                continue;
            };
            for at in part.pages().map(|page| backing.object_page(page)) {
                self.unpin_page(object, at, what);
            }
        }
        if what == PinFor::Writing && self.has_excess_dirty() {
            // They count as dirty from now on.
            self.space.budget().call_for_memory();
        }
    }

    fn unpin_page(&self, object: &VmObject, at: ObjectPage, what: PinFor) {
        let locked = self.lock(object, at);
        let count = object.pins(at);
        count.sub(what);
        let mut gone = Flags::EMPTY;
        if what == PinFor::Writing && count.writes() == 0 {
            gone = gone.or(Flags::PINNED);
            if !object.is_memory {
                self.pins.writable.fetch_sub(1, Ordering::Relaxed);
                object.pinned_writable.fetch_sub(1, Ordering::Relaxed);
            }
        }
        if count.all() == 0 {
            gone = gone.or(Flags::MLOCKED);
            self.pins.give_back(1);
            object.pinned.fetch_sub(1, Ordering::Relaxed);
        }
        locked.clear_flags(gone);
    }

    /// An object goes, with pins that were never let go.
    pub(super) fn forget_pins(&self, object: &VmObject) {
        self.pins.give_back(object.pinned.load(Ordering::Relaxed));
        let writable = object.pinned_writable.load(Ordering::Relaxed);
        self.pins.writable.fetch_sub(writable, Ordering::Relaxed);
    }

    /// Maps a pinned page that is not mapped yet as it is to be. The kernel refuses for a moment while
    /// mappings of the process are moved: it is asked again then, until `kill` ends it.
    fn map_pinned(
        &self,
        object: &VmObject,
        vma: &Vma,
        page: PageNum,
        what: PinFor,
        kill: Kill<'_>,
    ) -> Result<(), PinError> {
        let is_writing = what == PinFor::Writing;
        let is_done =
            |window: &Mapped| window.is_present(page) && (window.is_writable(page) || !is_writing);
        let protection = if is_writing { Protection::Writable } else { Protection::WriteProtected };
        let at = vma.attributes.backing.object_page(page);
        while !is_done(&self.windows.lock(page)) {
            let locked = self.lock(object, at);
            // Its memory may have failed since.
            let is_cached = locked.state() == State::Cached;
            let refusal = {
                let mut window = self.windows.lock(page);
                let may_map = is_cached && !is_done(&window);
                may_map.then(|| self.map_locked(page, protection, &mut window).refusal).flatten()
            };
            locked.unlock();
            if !is_cached || !matches!(refusal, None | Some(Refusal::Exists | Refusal::Busy)) {
                return Err(PinError::Refused(Errno::NOMEM));
            }
            if kill.is_due() {
                return Err(ReadError { offset: at.offset(), errno: Errno::INTR }.into());
            }
            self.space.mmu().relax();
        }
        Ok(())
    }
}

#[cfg(feature = "simulated")]
impl VmObject {
    /// Says where what a page's word says of its pins is wrong (O6). For tests.
    pub(super) fn check_pins(&self, page: ObjectPage, word: crate::page::Snapshot) {
        let count = self.pins(page);
        if word.state() != State::Poisoned {
            let is_pinned = word.has(Flags::MLOCKED);
            assert_eq!(count.all() > 0, is_pinned, "{page:?} has {} pins: {word:?}", count.all());
            let is_writable = word.has(Flags::PINNED);
            assert_eq!(count.writes() > 0, is_writable, "{page:?} is pinned for write: {word:?}");
        }
        let is_dirty = word.has(Flags::DIRTY) || !word.has(Flags::PINNED);
        assert!(is_dirty, "{page:?} is pinned for write, and not dirty: {word:?}");
    }
}
