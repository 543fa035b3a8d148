//! Large frames: 2 MiB of shared memory that go from block to block without being given back.
//!
//! Fresh memory is dear: to give a page back to the kernel and to get another one costs several
//! times what it takes to fill it. So what is read a whole block at a time lives in a large frame,
//! and when reclaim takes the block whole, the frame keeps its memory and the next block is read
//! over what it held. All large frames of a space lie in one home, of which the engine has a view:
//! a store reads straight into it.
//!
//! A block of an object lives at home, or in a large frame; [`Block::frame`] says which.
//!
//! | frame | memory | charged |
//! |---|---|---|
//! | empty | none | nothing |
//! | a block's | that of the block's cached pages | as they are cached |
//! | recycled | all of it, with bytes that count for nothing | all of it |
//!
//! A block changes its frame only while all of its page words are locked, so that the lock of any
//! page pins where it lives. What the windows still show of a frame that a block has left is seen
//! to by [`super::show`].
//!
//! Locks: the pool's mutex, a leaf.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix_futex_sync::Mutex;

use super::numbers::Numbers;
use super::requests::by_block;
use super::rmap::Wait;
use super::{Block, Object, Objects};
use crate::budget::Purpose;
use crate::control::Event;
use crate::mmu::object::{Home, ObjectMmu};
use crate::page::{Condition, State};
use crate::scratch::Scratch;
use crate::space::vma::Vma;
use crate::sys::{Errno, monotonic_ns};
use crate::units::{
    BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum,
};

/// Most recycled frames that wait for a block.
const RECYCLED_MAX: usize = 16;
/// As many pages as streams find ready, where memory is short.
const AHEAD_PAGES: usize = 2 * BLOCK_PAGES;
/// How long they wait, while memory is short, until it is given to others.
const IDLE_NS: u64 = 100_000_000;

/// A large frame, counted from 1; 0 is none: at home.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LargeFrame(pub u32);

impl LargeFrame {
    pub const NONE: LargeFrame = LargeFrame(0);

    /// Its pages in the home of all of them.
    pub fn pages(self) -> ObjectRange {
        let first = (self.0 as u64 - 1) * BLOCK_PAGES as u64;
        ObjectRange::new(ObjectPage(first), BLOCK_PAGES)
    }
}

/// Set beside the frame's number while it holds memory that the block has not filled yet.
const UNFILLED: u32 = 1 << 31;

impl Block {
    /// Where the block lives. Pinned by the lock of any of its pages.
    pub(super) fn frame(&self) -> LargeFrame {
        // Relaxed: page locks order it.
        LargeFrame(self.frame.load(Ordering::Relaxed) & !UNFILLED)
    }

    fn set_frame(&self, frame: LargeFrame) {
        self.frame.store(frame.0, Ordering::Relaxed);
    }
}

/// The large frames of a space.
pub(super) struct LargeFrames {
    home: Home,
    /// None where the MMU has none: then there are no large frames.
    view: Option<NonNull<u8>>,
    count: usize,
    numbers: Numbers,
    recycled: Mutex<Recycled>,
    /// How many are in there; read without the lock as a hint.
    waiting: AtomicUsize,
    /// Whether a stream goes on that could use more of them.
    is_wanted: AtomicBool,
    /// When the last of them found a block, in nanoseconds.
    taken_at: AtomicU64,
}

#[derive(Default)]
struct Recycled {
    frames: [u32; RECYCLED_MAX],
    len: usize,
}

// SAFETY: the view is shared memory whose bytes page locks give to one thread at a time.
unsafe impl Send for LargeFrames {}
// SAFETY: as above.
unsafe impl Sync for LargeFrames {}

impl LargeFrames {
    /// `count` empty ones, or none at all where the MMU does without.
    pub fn new<M: ObjectMmu>(mmu: &M, count: usize) -> Result<LargeFrames, Errno> {
        let home = mmu.home_open()?;
        let pages = count * BLOCK_PAGES;
        let viewed = mmu.home_resize(home, pages).and_then(|()| mmu.home_view(home, pages));
        let numbers = Numbers::new(count.max(1)).inspect_err(|_| mmu.home_close(home))?;
        Ok(LargeFrames {
            home,
            count: if viewed.is_ok() { count } else { 0 },
            view: viewed.ok(),
            numbers,
            recycled: Mutex::new(Recycled::default()),
            waiting: AtomicUsize::new(0),
            is_wanted: AtomicBool::new(false),
            taken_at: AtomicU64::new(0),
        })
    }

    pub fn home(&self) -> Home {
        self.home
    }

    fn take_empty(&self) -> Option<LargeFrame> {
        self.view?;
        self.numbers.take().map(|number| LargeFrame(number + 1))
    }

    fn give_back(&self, frame: LargeFrame) {
        self.numbers.give_back(frame.0 - 1);
    }

    fn take_recycled(&self) -> Option<LargeFrame> {
        let mut recycled = self.recycled.lock();
        recycled.len = recycled.len.checked_sub(1)?;
        self.waiting.store(recycled.len, Ordering::Relaxed);
        Some(LargeFrame(recycled.frames[recycled.len]))
    }

    /// Keeps a frame with its memory, where there are not too many already.
    fn recycle(&self, frame: LargeFrame, max: usize) -> bool {
        let mut recycled = self.recycled.lock();
        let at = recycled.len;
        if at >= max.min(RECYCLED_MAX) {
            return false;
        }
        recycled.frames[at] = frame.0;
        recycled.len += 1;
        self.waiting.store(recycled.len, Ordering::Relaxed);
        true
    }

    /// Whether recycled frames have waited for long.
    fn are_idle(&self) -> bool {
        self.recycled_pages() > 0
            && monotonic_ns() - self.taken_at.load(Ordering::Relaxed) > IDLE_NS
    }

    /// Pages that a block could be read into without a charge.
    pub fn recycled_pages(&self) -> usize {
        self.waiting.load(Ordering::Relaxed) * BLOCK_PAGES
    }

    /// The bytes of a frame.
    ///
    /// # Safety
    /// The caller holds the locks of all pages of the block that lives there.
    #[allow(clippy::mut_from_ref, reason = "the page locks are the exclusive borrow")]
    unsafe fn bytes(&self, frame: LargeFrame) -> Option<&mut [u8]> {
        let offset = (frame.0 as usize - 1) * (BLOCK_PAGES << PAGE_SHIFT);
        // SAFETY: inside of the view, which lives as long as self; the caller's promise.
        let start = unsafe { self.view?.add(offset) };
        // SAFETY: as above.
        Some(unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), BLOCK_PAGES << PAGE_SHIFT) })
    }
}

/// What became of blocks that were to change where they live.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Migrated {
    /// Pages that live elsewhere now.
    pub success: usize,
    /// Pages that stayed, because they could not be had or there was no memory.
    pub failed: usize,
}

/// Gives the large frames' home back; nothing uses them any more.
impl<M: ObjectMmu> Drop for Objects<M> {
    fn drop(&mut self) {
        if let Some(view) = self.large.view {
            self.space.mmu().home_unview(view, self.large.count * BLOCK_PAGES);
        }
        self.space.mmu().home_close(self.large.home);
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// The home of all large frames: what a test move may be made with.
    pub fn large_home(&self) -> Home {
        self.large.home
    }

    /// Whether the block that a page of the arena shows lives in a large frame just now.
    pub(super) fn is_in_large_frame(&self, object: &Object, vma: &Vma, page: PageNum) -> bool {
        let at = vma.attributes.backing.object_page(page);
        object.block(at).frame() != LargeFrame::NONE
    }

    /// Where a page lives that is locked.
    pub(super) fn place(&self, object: &Object, page: ObjectPage) -> (Home, ObjectPage) {
        match object.block(page).frame() {
            LargeFrame::NONE => (object.home, page),
            frame => (self.large.home, frame.pages().start.add(page.index() % BLOCK_PAGES)),
        }
    }

    /// Writes bytes of one locked page, or of a run of them within a block.
    pub(super) fn cache_write(
        &self,
        object: &Object,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let (home, at) = self.byte_place(object, offset);
        self.space.mmu().home_write(home, at, bytes)
    }

    /// Reads bytes of one locked page, or of a run of them within a block.
    pub(super) fn cache_read(
        &self,
        object: &Object,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Errno> {
        let (home, at) = self.byte_place(object, offset);
        self.space.mmu().home_read(home, at, into)
    }

    /// Reads a run of locked pages, which may lie in several blocks.
    pub(super) fn cache_read_run(
        &self,
        object: &Object,
        pages: ObjectRange,
        mut into: &mut [u8],
    ) -> Result<(), Errno> {
        for part in by_block(pages) {
            let (bytes, rest) = into.split_at_mut(part.len() << PAGE_SHIFT);
            self.cache_read(object, part.start.offset(), bytes)?;
            into = rest;
        }
        Ok(())
    }

    /// Drops locked pages of one block from where they live, wherever they are mapped.
    pub(super) fn cache_punch(&self, object: &Object, pages: ObjectRange) -> Result<(), Errno> {
        let (home, at) = self.place(object, pages.start);
        self.space.mmu().home_punch(home, ObjectRange::new(at, pages.len()))
    }

    fn byte_place(&self, object: &Object, offset: u64) -> (Home, u64) {
        let page = ObjectPage(offset >> PAGE_SHIFT);
        let (home, at) = self.place(object, page);
        (home, at.offset() + offset % PAGE_SIZE as u64)
    }

    /// Charges a locked run that is not cached. A whole block is given a large frame, a recycled
    /// one if there is one: that is charged already.
    pub(super) fn try_charge_run(&self, object: &Object, pages: ObjectRange) -> bool {
        let is_block = pages.len() == BLOCK_PAGES
            && pages.start.index().is_multiple_of(BLOCK_PAGES)
            && pages.end.offset() <= object.len()
            && pages.end.0 <= object.cut.load(Ordering::SeqCst);
        let block = object.block(pages.start);
        if is_block && let Some(frame) = self.large.take_recycled() {
            // Relaxed: it tells the background thread that they are wanted.
            self.large.taken_at.store(monotonic_ns(), Ordering::Relaxed);
            self.space.budget().count(Event::Pgreuse, BLOCK_PAGES);
            let before = block.frame();
            block.frame.store(frame.0 | UNFILLED, Ordering::Relaxed);
            if before != LargeFrame::NONE {
                self.large.give_back(before);
            }
            return true;
        }
        if !self.space.budget().try_charge(pages.len(), Purpose::Fault) {
            return false;
        }
        if is_block
            && block.frame() == LargeFrame::NONE
            && let Some(frame) = self.large.take_empty()
        {
            block.set_frame(frame);
        }
        true
    }

    /// Whether a whole block could be read at once.
    pub(super) fn has_room_for_block(&self) -> bool {
        self.large.view.is_none()
            || self.large.recycled_pages() > 0
            || self.space.chargeable_now() >= BLOCK_PAGES
    }

    /// Gives the charge of a locked run back that was not read after all.
    pub(super) fn uncharge_run(&self, object: &Object, pages: ObjectRange) {
        let block = object.block(pages.start);
        // Relaxed: all pages are locked.
        if block.frame.load(Ordering::Relaxed) & UNFILLED != 0 {
            let frame = block.frame();
            block.set_frame(LargeFrame::NONE);
            self.keep_or_empty(frame);
        } else {
            self.space.budget().uncharge(pages.len());
        }
    }

    /// The bytes of a locked block's recycled frame, for a store to read into.
    #[allow(clippy::mut_from_ref, reason = "the page locks are the exclusive borrow")]
    pub(super) fn unfilled(&self, object: &Object, pages: ObjectRange) -> Option<&mut [u8]> {
        let block = object.block(pages.start);
        let is_unfilled = block.frame.load(Ordering::Relaxed) & UNFILLED != 0;
        debug_assert!(!is_unfilled || pages.len() <= BLOCK_PAGES);
        if !is_unfilled || pages.len() < BLOCK_PAGES {
            return None;
        }
        // SAFETY: all pages of the block are locked, and none is mapped.
        unsafe { self.large.bytes(block.frame()) }
    }

    /// A recycled frame is the block's own from now on, page for page.
    pub(super) fn end_unfilled(&self, object: &Object, page: ObjectPage) {
        object.block(page).frame.fetch_and(!UNFILLED, Ordering::Relaxed);
    }

    /// Most recycled frames that are kept: an eighth of the memory.
    fn recycled_max(&self) -> usize {
        (self.space.budget().limit() / BLOCK_PAGES / 8).clamp(2, RECYCLED_MAX)
    }

    /// A frame that is full of memory, all of it charged, waits for another block, or is emptied.
    fn keep_or_empty(&self, frame: LargeFrame) {
        if !self.large.recycle(frame, self.recycled_max()) {
            self.empty(frame);
        }
    }

    fn empty(&self, frame: LargeFrame) {
        // Where it fails the memory stays, charged to nobody, until the frame is used again.
        let _ = self.space.mmu().home_punch(self.large.home, frame.pages());
        self.large.give_back(frame);
        self.space.budget().uncharge(BLOCK_PAGES);
    }

    /// Gives recycled frames back to the kernel until at least so many pages are free to charge.
    pub(super) fn release_recycled(&self, wanted: usize) {
        while self.space.chargeable_now() < wanted {
            let Some(frame) = self.large.take_recycled() else { return };
            self.empty(frame);
        }
    }

    /// Gives recycled frames back that nobody takes: other memory could use theirs.
    pub(super) fn release_idle(&self) {
        while self.large.are_idle() {
            let Some(frame) = self.large.take_recycled() else { return };
            self.empty(frame);
        }
    }

    /// Has the background thread see to it that a stream finds recycled memory.
    pub(super) fn call_for_recycled(&self) {
        if self.large.recycled_pages() >= AHEAD_PAGES {
            return;
        }
        // Relaxed: the call orders it.
        if !self.large.is_wanted.swap(true, Ordering::Relaxed) {
            self.space.budget().call_for_memory();
        }
    }

    /// Pages that must be recycled for the streams that asked.
    pub(super) fn wanted_recycled(&self) -> usize {
        if !self.large.is_wanted.swap(false, Ordering::Relaxed) {
            return 0;
        }
        AHEAD_PAGES.saturating_sub(self.large.recycled_pages())
    }

    /// Gives all recycled frames back: nothing is cached that they could be for.
    pub(super) fn release_all_recycled(&self) {
        while let Some(frame) = self.large.take_recycled() {
            self.empty(frame);
        }
    }

    /// Whether little is left for faults on objects: blocks can be read into recycled memory.
    pub fn is_low(&self) -> bool {
        self.space.available() + self.large.recycled_pages() < self.space.low_watermark()
    }

    /// Where little is left, has the background thread reclaim.
    pub(super) fn call_if_low(&self) {
        if self.is_low() && !self.space.is_kswapd_awake() {
            self.space.budget().call_for_memory();
        }
    }

    /// A block of locked words none of which is cached any more leaves its frame, whose memory is
    /// there and charged if `is_full`, and otherwise gone.
    pub(super) fn leave_frame(&self, object: &Object, page: ObjectPage, is_full: bool) {
        let block = object.block(page);
        let frame = block.frame();
        if frame == LargeFrame::NONE {
            return;
        }
        block.set_frame(LargeFrame::NONE);
        if is_full {
            self.keep_or_empty(frame);
        } else {
            self.large.give_back(frame);
        }
    }

    /// Locks all words of a block; where it may not wait and one is locked, none of them, and that
    /// one is returned.
    ///
    /// It waits with none of them locked: a page that is to be read is locked until a worker has
    /// come to it, and all workers may be at the end of a write, waiting for others of these locks.
    pub(super) fn lock_block(
        &self,
        object: &Object,
        pages: ObjectRange,
        wait: Wait,
    ) -> Result<(), ObjectPage> {
        loop {
            let busy = pages.pages().find(|&page| object.word(page).try_lock().is_none());
            let Some(busy) = busy else { return Ok(()) };
            self.unlock_words(object, ObjectRange { start: pages.start, end: busy });
            if wait == Wait::No {
                return Err(busy);
            }
            self.space.wait_on_word(object.word(busy), Condition::UNLOCKED);
        }
    }

    /// A block nothing of which is cached gives its frame's number back, if that is to be had at
    /// once.
    pub(super) fn try_leave_frame(&self, object: &Object, pages: ObjectRange) {
        let block = object.block(pages.start);
        let is_idle =
            block.frame() != LargeFrame::NONE && block.cached.load(Ordering::Relaxed) == 0;
        if !is_idle || self.lock_block(object, pages, Wait::No).is_err() {
            return;
        }
        if pages.pages().all(|page| object.word(page).load().state() == State::None) {
            self.leave_frame(object, pages.start, false);
        }
        self.unlock_words(object, pages);
    }

    /// An object goes: its frames with it. Returns how many of its cached pages stay charged,
    /// because their memory waits for another block. Nobody uses the object.
    pub(super) fn leave_all_frames(&self, object: &Object) -> usize {
        let mut kept = 0;
        for (index, block) in object.blocks.iter().enumerate() {
            let is_used = block.is_used.load(Ordering::Relaxed) != 0;
            if !is_used || block.frame() == LargeFrame::NONE {
                continue;
            }
            let first = ObjectPage((index * BLOCK_PAGES) as u64);
            let is_full = block.cached.load(Ordering::Relaxed) as usize == BLOCK_PAGES;
            if is_full {
                kept += BLOCK_PAGES;
            } else {
                let _ = self.space.mmu().home_punch(self.large.home, block.frame().pages());
            }
            self.leave_frame(object, first, is_full);
        }
        kept
    }

    /// Brings blocks that are cached whole together, each into 2 MiB of memory of its own, whose
    /// memory is recycled when it goes.
    pub fn migrate(&self, object: &Object, scratch: &mut Scratch) -> Migrated {
        let mut all = Migrated::default();
        let whole = object.len() as usize >> PAGE_SHIFT >> BLOCK_ORDER;
        for index in 0..whole {
            let pages = ObjectRange::new(ObjectPage((index * BLOCK_PAGES) as u64), BLOCK_PAGES);
            let block = object.block(pages.start);
            let is_whole = block.cached.load(Ordering::Relaxed) as usize == BLOCK_PAGES;
            if !is_whole || block.frame() != LargeFrame::NONE {
                continue;
            }
            let Some(frame) = self.large.take_empty() else { break };
            let moved = self
                .migrate_block(object, pages, frame, Wait::Yes, Some(scratch))
                .unwrap_or_default();
            if moved.success == 0 {
                self.large.give_back(frame);
            }
            all.success += moved.success;
            all.failed += moved.failed;
        }
        all
    }

    /// Brings what is cached of a block to `to`, where it lives from then on. Where it may not
    /// wait and a page is locked, that page is the error.
    pub(super) fn migrate_block(
        &self,
        object: &Object,
        pages: ObjectRange,
        to: LargeFrame,
        wait: Wait,
        mut scratch: Option<&mut Scratch>,
    ) -> Result<Migrated, ObjectPage> {
        let budget = self.space.budget();
        // For the one page that is in both places; before the locks: who makes room takes others.
        let mut charge =
            || self.make_room(1, scratch.as_deref_mut()) && budget.try_charge(1, Purpose::Fault);
        if !(0..8).any(|_| charge()) {
            let failed = object.block(pages.start).cached.load(Ordering::Relaxed) as usize;
            budget.count(Event::PgmigrateFail, failed);
            return Ok(Migrated { success: 0, failed });
        }
        let locked = self.lock_block(object, pages, wait);
        let mut moved = Migrated::default();
        if locked.is_ok() {
            let from = object.block(pages.start).frame();
            if from != to {
                self.try_to_unmap(object, pages, Wait::Yes);
                moved = self.move_block(object, pages, to);
                if moved.failed == 0 && from != LargeFrame::NONE {
                    self.large.give_back(from);
                }
            }
            self.unlock_words(object, pages);
        }
        budget.uncharge(1);
        budget.count(Event::PgmigrateSuccess, moved.success);
        budget.count(Event::PgmigrateFail, moved.failed);
        locked.map(|()| moved)
    }

    /// Moves the cached ones of locked, unmapped pages; all of them, or nothing has changed.
    fn move_block(&self, object: &Object, pages: ObjectRange, to: LargeFrame) -> Migrated {
        let block = object.block(pages.start);
        let from = block.frame();
        let is_cached = |page: &ObjectPage| object.word(*page).load().state() == State::Cached;
        let cached = || pages.pages().filter(is_cached);
        let count = cached().count();
        let is_stuck = |page: &ObjectPage| self.move_page(object, *page, from, to).is_err();
        let Some(stuck) = cached().find(is_stuck) else {
            block.set_frame(to);
            return Migrated { success: count, failed: 0 };
        };
        for page in cached().take_while(|&page| page < stuck) {
            // Its memory was given back a moment ago: sooner or later there is some again.
            while self.move_page(object, page, to, from).is_err() {
                self.space.mmu().relax();
            }
        }
        block.set_frame(from);
        Migrated { success: 0, failed: count }
    }

    /// Moves one page between two places of its locked, unmapped block.
    fn move_page(
        &self,
        object: &Object,
        page: ObjectPage,
        from: LargeFrame,
        to: LargeFrame,
    ) -> Result<(), Errno> {
        let block = object.block(page);
        let mut bytes = [0u8; PAGE_SIZE];
        block.set_frame(from);
        self.cache_read(object, page.offset(), &mut bytes)?;
        block.set_frame(to);
        self.cache_write(object, page.offset(), &bytes)?;
        block.set_frame(from);
        // Where it is refused the page takes its memory twice until its frame goes.
        let _ = self.cache_punch(object, ObjectRange::new(page, 1));
        Ok(())
    }
}
