//! From limbo to swap: what becomes of evicted pages' bytes.
//!
//! What packs well goes to the compressed pool. What does not is written to the swap file from the frame
//! in which it lies, by the background thread, and is in limbo until it has been written: a fault that
//! comes first has it back, and in the pool it would take as much memory as it gives.

use core::sync::atomic::Ordering::Relaxed;

use super::Reclaimer;
use super::writeback::SegmentTag;
use crate::budget::Purpose;
use crate::control::Event;
use crate::frames::QueueEnd;
use crate::mmu::{FrameId, FrameRun, Mmu};
use crate::page::{Flags, LockedPage, State, Stored};
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::steps::{Step, reach};
use crate::swap::Writing;
use crate::swap::blob::{Blob, Packing};
use crate::swap::compress::{Compressed, PageBytes, Strength, page_hash};
use crate::swap::file::SwapSegments;
use crate::swap::zpool::Payer;
use crate::sys::monotonic_ns;
use crate::units::PageNum;

/// Freed frames are handed over at the latest after so many: faults may wait for them.
const HANDOVER: usize = 32;

/// What becomes of pages in limbo that do not pack.
pub(crate) enum Unpackable<'a> {
    /// They are written to the swap file.
    Written(&'a SwapSegments, &'a mut Writing),
    /// They stay where they are, for the background thread, which writes them.
    Left,
    /// They go to the pool as they are, because limbo has to become empty now.
    Pooled,
}

/// Free frames that stay, when the pool's slabs take the charges of others.
const FRAMES_KEPT: usize = 8;

/// Pays for slabs that are packed into: where nothing is left of the budget, with free frames, which packing makes
/// more of than it takes.
struct SlabPayer<'a, M: Mmu>(&'a VmSpace<M>);

impl<M: Mmu> Payer for SlabPayer<'_, M> {
    fn try_charge(&self, pages: usize) -> bool {
        let SlabPayer(space) = self;
        space.budget.try_charge(pages, Purpose::Reclaim)
            || space.take_charges_of_frames(pages, FRAMES_KEPT)
            || space.budget.overdraw(pages)
    }

    fn uncharge(&self, pages: usize) {
        self.0.budget.uncharge(pages);
    }
}

/// Why a page's bytes could not be stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unstored {
    /// They do not shrink, and there is no swap file to take them.
    Incompressible,
    /// There is no memory for a slab just now.
    NoRoom,
}

impl<M: Mmu> VmSpace<M> {
    /// Empties limbo from its old end until `target` frames are free; returns how many are.
    pub(crate) fn shrink_limbo(
        &self,
        target: usize,
        who: Reclaimer,
        scratch: &mut Scratch,
    ) -> usize {
        if who == Reclaimer::Kswapd
            && let Some((file, mut writing)) = self.swap.writing()
        {
            let written = &mut Unpackable::Written(file, &mut writing);
            return self.shrink_limbo_to(target, written, scratch);
        }
        self.shrink_limbo_to(target, &mut Unpackable::Left, scratch)
    }

    /// The same for a thread that has to see all of it go.
    pub(crate) fn clear_limbo(&self, scratch: &mut Scratch) -> usize {
        self.shrink_limbo_to(usize::MAX, &mut Unpackable::Pooled, scratch)
    }

    fn shrink_limbo_to(
        &self,
        target: usize,
        unpackable: &mut Unpackable<'_>,
        scratch: &mut Scratch,
    ) -> usize {
        let mut freed = self.shrink_queued(target, unpackable, scratch);
        // What cannot go keeps the queue from ever running dry: the window that is being filled
        // must get its turn all the same.
        if freed == 0 && target > 0 && self.frames.close_window() {
            freed = self.shrink_queued(target, unpackable, scratch);
        }
        if let Unpackable::Written(file, writing) = unpackable
            && freed < target
        {
            freed += self.write_segment(file, writing).frames;
        }
        freed
    }

    fn shrink_queued(
        &self,
        target: usize,
        unpackable: &mut Unpackable<'_>,
        scratch: &mut Scratch,
    ) -> usize {
        let mut freed = 0;
        // Windows that keep something are queued again: look at each once, and at the window that
        // is being filled where the queue runs dry.
        for _ in 0..self.frames.queued_windows().max(1) {
            if freed >= target {
                break;
            }
            let Some(window) = self.frames.oldest_window() else { break };
            let start = monotonic_ns();
            freed += self.shrink_window_of_limbo(window, target - freed, unpackable, scratch);
            self.budget.count(Event::CompressNs, (monotonic_ns() - start) as usize);
            let end = if freed >= target { QueueEnd::Oldest } else { QueueEnd::Youngest };
            self.frames.return_window(window, end);
        }
        freed
    }

    fn shrink_window_of_limbo(
        &self,
        window: u32,
        target: usize,
        unpackable: &mut Unpackable<'_>,
        scratch: &mut Scratch,
    ) -> usize {
        let mut freed = 0;
        let mut pending = FrameRun { start: FrameId(0), len: 0 };
        for frame in self.frames.limbo_frames(window) {
            let is_stored = self.store_limbo_page(frame, unpackable, scratch);
            if let Unpackable::Written(file, writing) = unpackable
                && writing.writer.is_full()
            {
                freed += self.write_segment(file, writing).frames;
            }
            if !is_stored {
                continue;
            }
            freed += 1;
            if pending.len > 0 && pending.start.add(pending.len) == frame && pending.len < HANDOVER
            {
                pending.len += 1;
            } else {
                self.frames.put(pending);
                pending = FrameRun { start: frame, len: 1 };
            }
            if freed >= target {
                break;
            }
        }
        self.frames.put(pending);
        self.answer_starved();
        freed
    }

    /// Moves one page from limbo to swap; its frame is taken then, for the caller to hand over.
    fn store_limbo_page(
        &self,
        frame: FrameId,
        unpackable: &mut Unpackable<'_>,
        scratch: &mut Scratch,
    ) -> bool {
        let page = self.frames.owner_of(frame);
        self.mmu.step();
        let Some(page) = self.try_lock_page(page) else { return false };
        let is_it = page.state() == State::Limbo && page.content().payload() == frame.0;
        if !is_it {
            return false;
        }
        let one = FrameRun { start: frame, len: 1 };
        if page.has(Flags::LAZYFREE) {
            self.frames.leave_limbo(one);
            self.budget.count(Event::Pglazyfreed, 1);
            self.budget.add_wanted(-1);
            page.drop_content();
            return true;
        }
        // SAFETY: a frame in limbo belongs to its owner, which is locked.
        let bytes = unsafe { &*self.mmu.frame(frame) };
        let stored = if !page.has(Flags::INCOMPRESSIBLE) {
            self.pack_page(page.page(), bytes, scratch)
        } else if matches!(unpackable, Unpackable::Pooled) {
            self.pool_raw(page.page(), bytes)
        } else {
            Err(Unstored::Incompressible)
        };
        match stored {
            Ok(stored) => {
                self.frames.leave_limbo(one);
                page.store(stored);
                return true;
            }
            Err(Unstored::Incompressible) => self.leave_unpacked(page, bytes, unpackable),
            Err(Unstored::NoRoom) => {}
        }
        false
    }

    /// A locked page in limbo does not pack: it is written, or stays as it is. That it does not pack is known
    /// until a fault takes it back.
    fn leave_unpacked(
        &self,
        page: LockedPage<'_, Self>,
        bytes: &PageBytes,
        unpackable: &mut Unpackable<'_>,
    ) {
        let mut flags = Flags::INCOMPRESSIBLE;
        if let Unpackable::Written(file, writing) = unpackable {
            let blob =
                Blob { owner: page.page(), kind: Packing::Raw, hash: page_hash(bytes), bytes };
            let tag = SegmentTag::Limbo(FrameId(page.content().payload()));
            if !writing.writer.has(page.page())
                && self.open_segment(file, writing)
                && writing.writer.add(&blob, tag.get())
            {
                flags = flags.or(Flags::WRITEBACK);
                self.note_evicted(page.page());
            }
        }
        page.set_flags(flags);
    }

    /// Puts a locked page's bytes into swap; returns where they are then, or why
    /// they could not be stored.
    pub(crate) fn store_page(
        &self,
        page: PageNum,
        bytes: &PageBytes,
        scratch: &mut Scratch,
    ) -> Result<Stored, Unstored> {
        match self.pack_page(page, bytes, scratch) {
            Err(Unstored::Incompressible) => self.pool_raw(page, bytes),
            stored => stored,
        }
    }

    /// The same where the page packs.
    fn pack_page(
        &self,
        page: PageNum,
        bytes: &PageBytes,
        scratch: &mut Scratch,
    ) -> Result<Stored, Unstored> {
        let is_too_dear = || self.swap.has_file() && !self.border.tries_zstd();
        let strength = match self.strength() {
            Strength::Auto if is_too_dear() => Strength::Lz4,
            strength => strength,
        };
        let start = monotonic_ns();
        match scratch.compressor().compress(bytes, strength) {
            Compressed::Same(pattern) => {
                self.budget.count(Event::Pswpout, 1);
                self.budget.count(Event::SwpoutZero, 1);
                self.note_evicted(page);
                Ok(Stored::Same(pattern))
            }
            Compressed::Packed(kind, packed) => {
                self.border.note_packed(kind, packed.len(), monotonic_ns() - start);
                self.pool(page, kind, packed, page_hash(bytes))
            }
            Compressed::Raw => Err(Unstored::Incompressible),
        }
    }

    /// How hard pages are packed.
    pub(super) fn strength(&self) -> Strength {
        Strength::from_number(self.budget.control().compress.load(Relaxed))
    }

    /// Puts a page into the pool that does not pack, for the swap file; without one it is better left
    /// where it is.
    fn pool_raw(&self, page: PageNum, bytes: &PageBytes) -> Result<Stored, Unstored> {
        if !self.swap.has_file() {
            return Err(Unstored::Incompressible);
        }
        self.pool(page, Packing::Raw, bytes, page_hash(bytes))
    }

    fn pool(
        &self,
        page: PageNum,
        kind: Packing,
        packed: &[u8],
        hash: u64,
    ) -> Result<Stored, Unstored> {
        let store = || self.swap.zpool.store(page, kind, packed, hash, &SlabPayer(self));
        let mut stored = store();
        if stored.is_err() && self.swap.zpool.trim(&self.budget) > 0 {
            stored = store();
        }
        let handle = stored.map_err(|_| Unstored::NoRoom)?;
        reach(Step::Packed);
        self.budget.count(Event::Pswpout, 1);
        self.budget.count(Event::Zswpout, 1);
        self.budget.count(Event::ZswpoutBytes, packed.len());
        self.note_evicted(page);
        if kind == Packing::Zstd {
            self.budget.count(Event::ZswpoutZstd, 1);
            self.budget.count(Event::ZswpoutZstdBytes, packed.len());
        }
        Ok(Stored::Pool(handle.get()))
    }
}
