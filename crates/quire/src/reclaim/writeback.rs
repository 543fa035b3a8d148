//! From the compressed pool to the swap file, a segment at a time.
//!
//! A hand of its own goes over the page words and gathers packed pages in order of address, so
//! that what lies together in memory lies together in the file. Pages in limbo that do not pack come
//! to the same segments as reclaim finds them ([`super::store`]). While a segment is being written
//! its pages stay where they are and are not locked; a page that changes meanwhile loses its
//! WRITEBACK flag, and its place in the file is given up, as is that of a page that is locked
//! afterwards: its holder may be waiting for memory, which only this thread frees.
//!
//! The background thread alone writes, and may sleep here.

use core::sync::atomic::Ordering;

use crate::control::{Event, SEGMENT_BYTES};
use crate::failpoint::{self, Failpoint};
use crate::mmu::{FrameId, FrameRun, Mmu};
use crate::page::{Flags, LockedPage, PageLocks, PageWord, Snapshot, State, Stored};
use crate::scratch::{READ_PAGES, Scratch};
use crate::space::VmSpace;
use crate::swap::Writing;
use crate::swap::blob::{Blob, Packing};
use crate::swap::compress::Strength;
use crate::swap::file::{SegmentPurpose, SwapSegments, segment_blobs};
use crate::swap::io::Job;
use crate::swap::zpool::Handle;
use crate::sys::memory::Table;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// Packed pages that one round of compaction moves at most.
const COMPACT_MOVES_MAX: usize = 4096;

/// Where a blob of a segment in the making comes from: what the page's word says, and still must say once
/// it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SegmentTag {
    /// From the pool.
    Pool(Handle),
    /// From the file itself, which is being cleaned.
    File(u32),
    /// From a frame in limbo.
    Limbo(FrameId),
}

/// What a segment that was written has done.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct SegmentWritten {
    /// Pages that are there now.
    pub moved: usize,
    /// Frames that became free.
    pub frames: usize,
}

impl SegmentTag {
    const FROM_FILE: u64 = 1 << 32;
    const FROM_LIMBO: u64 = 1 << 33;

    /// As the writer keeps it.
    pub fn get(self) -> u64 {
        match self {
            SegmentTag::Pool(handle) => u64::from(handle.get()),
            SegmentTag::File(location) => u64::from(location) | Self::FROM_FILE,
            SegmentTag::Limbo(frame) => u64::from(frame.0) | Self::FROM_LIMBO,
        }
    }

    fn of(tag: u64) -> Option<SegmentTag> {
        let number = tag as u32;
        if tag & Self::FROM_LIMBO != 0 {
            return Some(SegmentTag::Limbo(FrameId(number)));
        }
        if tag & Self::FROM_FILE != 0 {
            return Some(SegmentTag::File(number));
        }
        Handle::new(number).map(SegmentTag::Pool)
    }

    /// Whether the page's word still says so, and no write came between.
    fn holds<L: PageLocks>(self, page: &LockedPage<'_, L>) -> bool {
        match self {
            SegmentTag::Pool(handle) => {
                page.in_swap() == Some(Stored::Pool(handle.get())) && page.has(Flags::WRITEBACK)
            }
            SegmentTag::File(location) => names_location(page.content(), location),
            SegmentTag::Limbo(frame) => {
                let is_there = page.state() == State::Limbo && page.content().payload() == frame.0;
                is_there && page.has(Flags::WRITEBACK) && !page.has(Flags::LAZYFREE)
            }
        }
    }
}

/// Whether a page's bytes are (also) at this place in the swap file.
fn names_location(word: Snapshot, location: u32) -> bool {
    word.stored() == Some(Stored::File(location))
}

impl<M: Mmu> VmSpace<M> {
    /// Writes one segment of packed pages; returns how many pages it moved, or packed anew.
    pub(crate) fn write_back(&self, scratch: &mut Scratch) -> usize {
        let Some((file, mut writing)) = self.swap.writing() else { return 0 };
        let writing = &mut *writing;
        if !self.open_segment(file, writing) {
            return 0;
        }
        let repacked = self.gather(writing, scratch);
        let moved = repacked + self.write_segment(file, writing).moved;
        // What is left empty would count as the pool's, and more be written for it.
        self.swap.zpool.trim(&self.budget);
        moved
    }

    /// Has a segment open to be filled, making room in a file that is full.
    pub(super) fn open_segment(&self, file: &SwapSegments, writing: &mut Writing) -> bool {
        writing.writer.open(file, SegmentPurpose::Reclaim).is_ok()
            || self.clean(file, writing)
            || self.give_up_locations() > 0
                && writing.writer.open(file, SegmentPurpose::Reclaim).is_ok()
    }

    /// Fills the open segment with packed pages, runs of those first that have been away for long; returns
    /// how many were packed anew instead.
    fn gather(&self, writing: &mut Writing, scratch: &mut Scratch) -> usize {
        let mut repacked = 0;
        for wants_old in [true, false] {
            repacked += self.gather_round(writing, scratch, wants_old);
            if writing.writer.is_full() || repacked > 0 {
                break;
            }
        }
        repacked
    }

    /// Takes runs of packed pages until the segment is full or the hand has gone round. A run goes as a
    /// whole: what is read together must lie together.
    fn gather_round(&self, writing: &mut Writing, scratch: &mut Scratch, wants_old: bool) -> usize {
        let mut repacked = 0;
        let blocks = self.pages.swap_blocks();
        let start = self.clock.lock().write_back;
        let mut next = start;
        'round: for step in 0..blocks {
            let block = (start + step) % blocks;
            let Some(range) = self.pages.swap_block(block) else { continue };
            let runs = (range.start.0..range.end.0).step_by(READ_PAGES);
            let runs = runs.map(|start| PageRange::new(PageNum(start), READ_PAGES));
            for run in runs.filter(|&run| !wants_old || self.is_old(run)) {
                let is_packed = |page: &PageNum| self.snapshot(*page).state() == State::Pool;
                let pages = || run.pages().filter(is_packed);
                let repacks = |page: &PageNum| wants_old && self.repack(*page, scratch);
                let anew = pages().filter(repacks).count();
                repacked += anew;
                if anew > 0 {
                    continue;
                }
                for page in pages() {
                    self.gather_page(page, writing);
                    if writing.writer.is_full() {
                        // The rest of this block is for the next segment.
                        next = block;
                        break 'round;
                    }
                }
            }
        }
        self.clock.lock().write_back = next;
        repacked
    }

    /// Whether most packed pages of a run have left memory long ago.
    fn is_old(&self, run: PageRange) -> bool {
        let (packed, old) = self.count_packed(run);
        old > packed / 2
    }

    fn gather_page(&self, page: PageNum, writing: &mut Writing) {
        let Some(page) = self.try_lock_owner(page) else { return };
        if writing.writer.has(page.page()) {
            return;
        }
        let Some((handle, blob)) = self.blob_of(&page) else { return };
        // It may have the flag from an earlier write, which then says nothing.
        if writing.writer.add(&blob, SegmentTag::Pool(handle).get()) {
            page.set_flags(Flags::WRITEBACK);
        }
    }

    /// The packed bytes of a locked page, as long as it is locked.
    fn blob_of<'a>(&'a self, page: &'a LockedPage<'_, Self>) -> Option<(Handle, Blob<'a>)> {
        let Some(Stored::Pool(handle)) = page.in_swap() else { return None };
        let handle = Handle::new(handle)?;
        // SAFETY: the page is locked for as long as the blob is borrowed.
        let blob = unsafe { self.swap.zpool.blob(handle) };
        Some((handle, blob.ok()?))
    }

    /// Packs a page by Zstandard that LZ4 has packed and that has stayed, where that gains and a read of the
    /// file is dear. Never inlined, for the page on its stack.
    #[inline(never)]
    fn repack(&self, page: PageNum, scratch: &mut Scratch) -> bool {
        if self.strength() != Strength::Auto || !self.border.is_file_slow() {
            return false;
        }
        let Some(page) = self.try_lock_owner(page) else { return false };
        let Some((handle, blob)) =
            self.blob_of(&page).filter(|(_, blob)| blob.kind == Packing::Lz4)
        else {
            return false;
        };
        let mut bytes = [0; PAGE_SIZE];
        if blob.unpack(page.page(), &mut bytes).is_err() {
            return false;
        }
        let Some(packed) = scratch.compressor().repack(&bytes, blob.bytes.len()) else {
            return false;
        };
        let (owner, hash) = (page.page(), blob.hash);
        let Ok(new) = self.swap.zpool.store(owner, Packing::Zstd, packed, hash, &self.budget)
        else {
            return false;
        };
        self.free_stored(Stored::Pool(handle.get()));
        page.rename(new.get());
        self.budget.count(Event::ZswpRepacked, 1);
        true
    }

    /// Writes the open segment and lets its pages' words name it.
    pub(super) fn write_segment(
        &self,
        file: &SwapSegments,
        writing: &mut Writing,
    ) -> SegmentWritten {
        let mut done = SegmentWritten::default();
        if writing.writer.is_empty() {
            writing.writer.cancel(file);
            return done;
        }
        let Some((writer, ring)) = writing.parts() else { return done };
        let Ok(written) = writer.write_out(file, ring) else {
            // The pages are where they were; the next round marks them afresh. Room on the disk
            // that only pages in memory have is room to write to.
            self.give_up_locations();
            return done;
        };
        for entry in written {
            let tag = SegmentTag::of(entry.tag);
            failpoint::hit(Failpoint::Written, entry.owner);
            self.mmu.step();
            let page = self.try_lock_owner(entry.owner);
            let found = page.zip(tag).filter(|(page, tag)| tag.holds(page));
            let Some((page, tag)) = found else {
                // It is locked, or has changed meanwhile.
                file.free(entry.location.segment(), 1);
                continue;
            };
            done.moved += 1;
            match tag {
                SegmentTag::Pool(handle) => {
                    self.free_stored(Stored::Pool(handle.get()));
                    self.note_written_back(page.page());
                    page.store(Stored::File(entry.location.get()));
                    self.budget.count(Event::Zswpwb, 1);
                }
                SegmentTag::File(location) => {
                    page.rename(entry.location.get());
                    self.free_stored(Stored::File(location));
                }
                SegmentTag::Limbo(frame) => {
                    let one = FrameRun { start: frame, len: 1 };
                    self.frames.leave_limbo(one);
                    page.store(Stored::File(entry.location.get()));
                    self.frames.put(one);
                    self.budget.count(Event::Pswpout, 1);
                    done.frames += 1;
                }
            }
        }
        if done.frames > 0 {
            self.answer_starved();
        }
        done
    }

    /// Has pages in memory give up their places in the file, which is full; returns how many did.
    fn give_up_locations(&self) -> usize {
        let mut given_up = 0;
        let has_location = |seen: Snapshot| {
            matches!(seen.state(), State::Mapped | State::Cached) && seen.has(Flags::IN_FILE)
        };
        let blocks = (0..self.pages.swap_blocks()).filter_map(|block| self.pages.swap_block(block));
        // Relaxed: a block whose first page is coming may be missed.
        let in_memory =
            |range: &PageRange| self.block(range.start).mapped.load(Ordering::Relaxed) != 0;
        for page in blocks.filter(in_memory).flat_map(PageRange::pages) {
            let Some(mut page) = self.try_lock_if(page, has_location) else { continue };
            if page.state() == State::Cached {
                // It is dirty from now on, and as protected as it was.
                self.dirty_cached(&mut page);
            } else {
                self.lift_clean_of(page).unlock();
            }
            given_up += 1;
        }
        given_up
    }

    /// Gathers what is left in the emptiest segments into a new one, so that the file's freed
    /// room can be used again. Leaves the new segment open, for more pages to go in.
    fn clean(&self, file: &SwapSegments, writing: &mut Writing) -> bool {
        let victims = file.victims();
        let mut is_open = victims.iter().any(Option::is_some)
            && writing.writer.open(file, SegmentPurpose::Clean).is_ok();
        let Ok(mut bytes) = Table::<u8>::new(SEGMENT_BYTES) else {
            victims.into_iter().flatten().for_each(|segment| file.unpin(segment));
            return false;
        };
        for segment in victims.into_iter().flatten() {
            if is_open && let Some((_, ring)) = writing.parts() {
                let mut jobs = [Job::read(segment.plan().offset, &mut bytes)];
                ring.run(&mut jobs);
                let is_read = jobs[0].result.is_ok();
                if is_read {
                    for (location, blob) in segment_blobs(&bytes, segment) {
                        let Some(seen) = self.pages.get(blob.owner).map(PageWord::load) else {
                            continue;
                        };
                        let is_live = names_location(seen, location.get());
                        let tag = SegmentTag::File(location.get()).get();
                        if is_live && !writing.writer.add(&blob, tag) {
                            is_open = false;
                            break;
                        }
                    }
                }
            }
            file.unpin(segment);
        }
        !writing.writer.is_empty() || is_open
    }

    /// Brings packed pages together so that sparse slabs can be given back; returns pages freed.
    pub fn compact(&self) -> usize {
        self.swap.zpool.compact(
            COMPACT_MOVES_MAX,
            |owner, old, new| {
                failpoint::hit(Failpoint::Relocating, owner);
                self.mmu.step();
                let Some(page) = self.try_lock_owner(owner) else { return false };
                let names_it = page.content().stored() == Some(Stored::Pool(old.get()));
                if names_it {
                    page.rename(new.get());
                }
                names_it
            },
            &self.budget,
        )
    }
}
