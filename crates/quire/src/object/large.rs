//! Large frames: 2 MiB of shared memory that go from block to block without being given back.
//!
//! Fresh memory is dear: to give a page back to the kernel and to get another one costs several
//! times what it takes to fill it. So what is read a whole block at a time lives in a large frame,
//! and when reclaim takes the block whole, the frame keeps its memory and the next block is read
//! over what it held. All large frames of a space lie in one home, of which the engine has a view:
//! a store reads straight into it, also where the frame is new.
//!
//! A block of an object lives at home, or in a large frame; [`Block::frame`] says which.
//!
//! Who recycles memory must know that nobody looks at it any more, and of pages that the kernel
//! holds for somebody (in a pipe, under direct I/O) nobody can know: what is there then sees other
//! bytes. The application is told so, and can do without large frames.
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

mod blocks;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix_futex_sync::Mutex;

use super::numbers::Numbers;
use super::rmap::Wait;
use super::window::Mapped;
use super::{Block, Object, Objects};
use crate::mmu::object::{Home, ObjectMmu};
use crate::space::vma::Vma;
use crate::sys::{Errno, monotonic_ns};
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum};

/// Most recycled frames that wait for a block.
const RECYCLED_MAX: usize = 16;
/// How long they wait, while memory is short, until it is given to others.
const IDLE_NS: u64 = 100_000_000;
/// How long no window more shows one when the kernel had no mapping for it.
const REFUSED_NS: u64 = 1_000_000_000;

/// Most windows that show large frames, unless said otherwise. Each may cost the kernel two
/// mappings more, of which a process has 65530 as a rule.
const SHOWN_MAX: usize = 1 << 14;

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
/// Set beside the frame's number from its charge until it is filled, where it has no memory yet.
const FRESH: u32 = 1 << 30;

impl Block {
    /// Where the block lives. Pinned by the lock of any of its pages.
    pub(super) fn frame(&self) -> LargeFrame {
        // Relaxed: page locks order it.
        LargeFrame(self.frame.load(Ordering::Relaxed) & !(UNFILLED | FRESH))
    }

    pub(super) fn set_frame(&self, frame: LargeFrame) {
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
    /// Windows that show one, be it of long ago.
    shown: AtomicUsize,
    shown_max: AtomicUsize,
    /// When the kernel had no mapping for one, in nanoseconds; 0 is never.
    refused_at: AtomicU64,
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
        let numbers = Numbers::new(count.max(1)).inspect_err(|_| mmu.home_close(home))?;
        let pages = count * BLOCK_PAGES;
        // Last: nothing fails any more that would have to end the view.
        let viewed = mmu.home_resize(home, pages).and_then(|()| mmu.home_view(home, pages));
        Ok(LargeFrames {
            home,
            count: if viewed.is_ok() { count } else { 0 },
            view: viewed.ok(),
            numbers,
            recycled: Mutex::new(Recycled::default()),
            waiting: AtomicUsize::new(0),
            is_wanted: AtomicBool::new(false),
            taken_at: AtomicU64::new(0),
            shown: AtomicUsize::new(0),
            shown_max: AtomicUsize::new(SHOWN_MAX),
            refused_at: AtomicU64::new(0),
        })
    }

    /// Notes what a window shows from now on; its lock is held.
    pub fn set_shown(&self, window: &mut Mapped, frame: LargeFrame) {
        let before = LargeFrame(core::mem::replace(&mut window.shown, frame.0));
        // Relaxed: how many there are, about; which is known under their locks.
        match (before == LargeFrame::NONE, frame == LargeFrame::NONE) {
            (true, false) => self.shown.fetch_add(1, Ordering::Relaxed),
            (false, true) => self.shown.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
    }

    /// Whether one more window may show a frame.
    pub fn may_show_more(&self) -> bool {
        // Relaxed: a bound that may be passed by as many as look at once.
        self.shown.load(Ordering::Relaxed) < self.shown_max.load(Ordering::Relaxed)
            && !self.are_refused()
    }

    /// Whether windows should show their homes again as soon as they can.
    fn are_many_shown(&self) -> bool {
        self.shown.load(Ordering::Relaxed) >= self.shown_max.load(Ordering::Relaxed) / 2
            || self.are_refused()
    }

    /// The kernel has no mapping more: no more windows for a while, in which the application may
    /// give some back.
    pub fn show_no_more(&self) {
        // Relaxed: a time to compare with.
        self.refused_at.store(monotonic_ns().max(1), Ordering::Relaxed);
    }

    /// Whether the kernel had no mapping more a moment ago.
    fn are_refused(&self) -> bool {
        // Relaxed: as above.
        let refused_at = self.refused_at.load(Ordering::Relaxed);
        refused_at != 0 && monotonic_ns().saturating_sub(refused_at) < REFUSED_NS
    }

    pub fn home(&self) -> Home {
        self.home
    }

    /// Whether blocks may live in them.
    fn are_used(&self) -> bool {
        // Relaxed: a choice that may be changed at any time.
        self.view.is_some() && self.shown_max.load(Ordering::Relaxed) > 0 && !self.are_refused()
    }

    pub fn take_empty(&self) -> Option<LargeFrame> {
        if !self.are_used() {
            return None;
        }
        self.numbers.take().map(|number| LargeFrame(number + 1))
    }

    pub fn give_back(&self, frame: LargeFrame) {
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

    /// Whether recycled frames have waited for long. One may be taken, with a later time, just
    /// after the clock was read.
    fn are_idle(&self) -> bool {
        self.recycled_pages() > 0
            && monotonic_ns().saturating_sub(self.taken_at.load(Ordering::Relaxed)) > IDLE_NS
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
    pub unsafe fn bytes(&self, frame: LargeFrame) -> Option<&mut [u8]> {
        let offset = (frame.0 as usize - 1) * (BLOCK_PAGES << PAGE_SHIFT);
        // SAFETY: inside of the view, which lives as long as self; the caller's promise.
        let start = unsafe { self.view?.add(offset) };
        // SAFETY: as above.
        Some(unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), BLOCK_PAGES << PAGE_SHIFT) })
    }
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

    /// How many windows may show large frames, each of which may cost two of the kernel's mappings.
    /// With 0 there are no large frames.
    pub fn set_large_windows_max(&self, windows: usize) {
        self.large.shown_max.store(windows, Ordering::Relaxed);
    }

    /// Windows that show large frames just now.
    pub fn large_windows(&self) -> usize {
        self.large.shown.load(Ordering::Relaxed)
    }

    /// A locked, unmapped block is about to leave its frame: where many windows show one, its own
    /// show its home again.
    pub(super) fn retire_windows(&self, object: &Object, pages: ObjectRange, wait: Wait) {
        if self.large.are_many_shown() {
            self.for_each_mapping(object, pages, wait, |mapping, window, part| {
                // Where it is refused it is one that shows a frame of long ago.
                let _ = self.show_home(object, mapping.prot, mapping.pages_at(part), window, part);
            });
        }
    }

    /// Whether the block that a page of the arena shows lives in a large frame just now.
    pub(super) fn is_in_large_frame(&self, object: &Object, vma: &Vma, page: PageNum) -> bool {
        let at = vma.attributes.backing.object_page(page);
        object.block(at).frame() != LargeFrame::NONE
    }

    /// Where a page lives that is locked.
    pub(super) fn lives_at(&self, object: &Object, page: ObjectPage) -> (Home, ObjectPage) {
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
        let (home, at) = self.byte_lives_at(object, offset);
        self.space.mmu().home_write(home, at, bytes)
    }

    /// Reads bytes of one locked page, or of a run of them within a block.
    pub(super) fn cache_read(
        &self,
        object: &Object,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Errno> {
        let (home, at) = self.byte_lives_at(object, offset);
        self.space.mmu().home_read(home, at, into)
    }

    /// Reads a run of locked pages, which may lie in several blocks.
    pub(super) fn cache_read_run(
        &self,
        object: &Object,
        pages: ObjectRange,
        mut into: &mut [u8],
    ) -> Result<(), Errno> {
        for part in pages.by_block() {
            let (bytes, rest) = into.split_at_mut(part.len() << PAGE_SHIFT);
            self.cache_read(object, part.start.offset(), bytes)?;
            into = rest;
        }
        Ok(())
    }

    /// Drops locked pages of one block from where they live, wherever they are mapped.
    pub(super) fn cache_punch(&self, object: &Object, pages: ObjectRange) -> Result<(), Errno> {
        let (home, at) = self.lives_at(object, pages.start);
        self.space.mmu().home_punch(home, ObjectRange::new(at, pages.len()))
    }

    fn byte_lives_at(&self, object: &Object, offset: u64) -> (Home, u64) {
        let page = ObjectPage(offset >> PAGE_SHIFT);
        let (home, at) = self.lives_at(object, page);
        (home, at.offset() + offset % PAGE_SIZE as u64)
    }
}
