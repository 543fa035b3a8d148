//! From the compressed pool to the swap file, a segment at a time.
//!
//! A hand of its own goes over the page words and gathers packed pages in order of address, so
//! that what lies together in memory lies together in the file. While a segment is being written
//! its pages stay where they are and are not locked; a page that changes meanwhile loses its
//! WRITEBACK flag, and its place in the file is given up, as is that of a page that is locked
//! afterwards: its holder may be waiting for memory, which only this thread frees.
//!
//! The background thread alone writes, and may sleep here.

use core::sync::atomic::Ordering;

use crate::control::{Event, SEGMENT_BYTES};
use crate::mmu::Mmu;
use crate::page::{Flags, PageWord, Snapshot, State, Stored};
use crate::space::VmSpace;
use crate::swap::Writing;
use crate::swap::file::{SegmentPurpose, SwapSegments, segment_blobs};
use crate::swap::io::Job;
use crate::swap::zpool::Handle;
use crate::sys::memory::Table;
use crate::units::{PageNum, PageRange};

/// Packed pages that one round of compaction moves at most.
const COMPACT_MOVES_MAX: usize = 4096;

/// Tags of blobs that come from the file itself have this bit; others are pool handles.
const FROM_FILE: u64 = 1 << 32;

/// Whether a page's bytes are (also) at this place in the swap file.
fn names_location(word: Snapshot, location: u32) -> bool {
    word.stored() == Some(Stored::File(location))
}

impl<M: Mmu> VmSpace<M> {
    /// Writes one segment of packed pages; returns how many pages it moved.
    pub(crate) fn write_back(&self) -> usize {
        let Some((file, mut writing)) = self.swap.writing() else { return 0 };
        let writing = &mut *writing;
        if writing.writer.open(file, SegmentPurpose::Reclaim).is_err() && !self.clean(file, writing)
        {
            let is_open = self.give_up_locations() > 0
                && writing.writer.open(file, SegmentPurpose::Reclaim).is_ok();
            if !is_open {
                return 0;
            }
        }
        self.gather(writing);
        let moved = self.write_segment(file, writing);
        // What is left empty would count as the pool's, and more be written for it.
        self.swap.zpool.trim(&self.budget);
        moved
    }

    fn gather(&self, writing: &mut Writing) {
        let blocks = self.pages.swap_blocks();
        let start = self.clock.lock().write_back;
        for step in 0..blocks {
            let block = (start + step) % blocks;
            let Some(range) = self.pages.swap_block(block) else { continue };
            for page in range.pages() {
                if self.snapshot(page).state() == State::Pool {
                    self.gather_page(page, writing);
                }
                if writing.writer.is_full() {
                    // The rest of this block is for the next segment.
                    self.clock.lock().write_back = block;
                    return;
                }
            }
        }
        self.clock.lock().write_back = start;
    }

    fn gather_page(&self, page: PageNum, writing: &mut Writing) {
        let Some(page) = self.try_lock_owner(page) else { return };
        let Some(Stored::Pool(handle)) = page.in_swap() else { return };
        let Some(handle) = Handle::new(handle) else { return };
        // SAFETY: the page is locked for as long as the blob is used.
        let blob = unsafe { self.swap.zpool.blob(handle) };
        // It may have the flag from an earlier write, which then says nothing.
        if blob.is_ok_and(|blob| writing.writer.add(&blob, u64::from(handle.get()))) {
            page.set_flags(Flags::WRITEBACK);
        }
    }

    /// Writes the open segment and lets its pages' words name it.
    fn write_segment(&self, file: &SwapSegments, writing: &mut Writing) -> usize {
        if writing.writer.is_empty() {
            writing.writer.cancel(file);
            return 0;
        }
        let Some((writer, ring)) = writing.parts() else { return 0 };
        let Ok(written) = writer.write_out(file, ring) else {
            // The pages are where they were; the next round marks them afresh. Room on the disk
            // that only pages in memory have is room to write to.
            self.give_up_locations();
            return 0;
        };
        let mut moved = 0;
        for entry in written {
            let is_from_file = entry.tag & FROM_FILE != 0;
            let number = entry.tag as u32;
            match self.try_lock_owner(entry.owner) {
                Some(page) if is_from_file && names_location(page.content(), number) => {
                    page.rename(entry.location.get());
                    self.swap.free_location(number);
                }
                Some(page)
                    if !is_from_file
                        && page.in_swap() == Some(Stored::Pool(number))
                        && page.has(Flags::WRITEBACK) =>
                {
                    self.free_stored(Stored::Pool(number));
                    page.store(Stored::File(entry.location.get()));
                    self.budget.count(Event::Zswpwb, 1);
                }
                // It is locked, or has changed meanwhile.
                _ => {
                    file.free(entry.location);
                    continue;
                }
            }
            moved += 1;
        }
        moved
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
                        let tag = FROM_FILE | u64::from(location.get());
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
    pub(crate) fn compact(&self) -> usize {
        self.swap.zpool.compact(
            COMPACT_MOVES_MAX,
            |owner, old, new| {
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
