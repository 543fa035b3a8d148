//! From the compressed pool to the swap file, a segment at a time.
//!
//! A hand of its own goes over the page words and gathers packed pages in order of address, so
//! that what lies together in memory lies together in the file. While a segment is being written
//! its pages stay where they are and are not locked; a page that changes meanwhile loses its
//! WRITEBACK flag, and its place in the file is given up, as is that of a page that is locked
//! afterwards: who holds it may be waiting for memory, which only this thread frees.
//!
//! The background thread alone writes, and may sleep here.

use core::sync::atomic::Ordering;

use crate::control::Event;
use crate::control::SEGMENT_BYTES;
use crate::mmu::Mmu;
use crate::page::{Flags, PageWord, Snapshot, State};
use crate::space::AddressSpace;
use crate::space::shmem::ShmemBlock;
use crate::swap::file::{Purpose, SwapFile, segment_blobs};
use crate::swap::io::Job;
use crate::swap::tiers::Writing;
use crate::swap::zpool::Handle;
use crate::sys::memory::{self, Access};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PageNum, PageRange};

/// Packed pages that one round of compaction moves at most.
const COMPACT_MOVES_MAX: usize = 4096;

/// Tags of blobs that come from the file itself have this bit; others are pool handles.
const FROM_FILE: u64 = 1 << 32;

/// What stays of a mapped page's flags when its copy in store has another name.
const MAPPED_FLAGS: Flags = Flags::WRITE_PROTECTED
    .or(Flags::ACCESSED)
    .or(Flags::MLOCKED)
    .or(Flags::PINNED)
    .or(Flags::COPY)
    .or(Flags::IN_FILE)
    .or(Flags::CLEAN)
    .or(Flags::DIRTY);

/// Whether a page's bytes are (also) at this place in the swap file.
fn names_location(word: Snapshot, location: u32) -> bool {
    let stored = if word.state() == State::Mapped { word.kept() } else { Some(word) };
    stored.is_some_and(|stored| stored.state() == State::File && stored.payload() == location)
}

impl<M: Mmu> AddressSpace<M> {
    /// Writes one segment of packed pages; returns how many pages it moved.
    pub(crate) fn write_back(&self) -> usize {
        let Some((file, mut writing)) = self.swap.writing() else { return 0 };
        let writing = &mut *writing;
        if writing.writer.open(file, Purpose::Reclaim).is_err() && !self.clean(file, writing) {
            let is_open =
                self.give_up_locations() > 0 && writing.writer.open(file, Purpose::Reclaim).is_ok();
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

    /// Fills the open segment with packed pages.
    fn gather(&self, writing: &mut Writing) {
        // The arena's blocks first, and then those beyond it. Where the arena's become more
        // meanwhile the hand is somewhere else, which does not matter.
        let arena_blocks = self.blocks_used_max.load(Ordering::Relaxed);
        let blocks = arena_blocks + self.shmem.blocks_used_max();
        let start = self.clock.lock().write_back;
        for step in 0..blocks {
            let block = (start + step) % blocks;
            let range = match block.checked_sub(arena_blocks) {
                Some(beyond) => self.shmem_pages(ShmemBlock(beyond as u32)),
                None if self.blocks[block].is_used.load(Ordering::Relaxed) == 0 => continue,
                None => PageRange::new(PageNum((block << BLOCK_ORDER) as u64), BLOCK_PAGES),
            };
            for page in range.pages() {
                let Some(word) = self.owner_word(page) else { break };
                if word.load().state() == State::Pool {
                    self.gather_page(page, word, writing);
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

    fn gather_page(&self, page: PageNum, word: &PageWord, writing: &mut Writing) {
        let Some(before) = word.try_lock() else { return };
        let handle = Handle::new(before.payload());
        let mut after = before;
        // It may have the flag from an earlier write, which then says nothing.
        if let (State::Pool, Some(handle)) = (before.state(), handle) {
            // SAFETY: the page is locked for as long as the blob is used.
            let blob = unsafe { self.swap.zpool.blob(handle) };
            if blob.is_ok_and(|blob| writing.writer.add(&blob, u64::from(handle.get()))) {
                after = before.with(Flags::WRITEBACK);
            }
        }
        self.unlock_owner_with(page, after);
    }

    /// Writes the open segment and lets its pages' words name it.
    fn write_segment(&self, file: &SwapFile, writing: &mut Writing) -> usize {
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
            let page = entry.owner;
            let Some(before) = self.owner_word(page).and_then(PageWord::try_lock) else {
                file.free(entry.location);
                continue;
            };
            let old = Snapshot::new(State::File, entry.location.get());
            if entry.tag & FROM_FILE != 0 {
                let was = entry.tag as u32;
                if names_location(before, was) {
                    let after = if before.state() == State::File {
                        before.keep(Flags::WRITE_PROTECTED, old)
                    } else {
                        before.keep(MAPPED_FLAGS, Snapshot::new(State::Mapped, old.payload()))
                    };
                    self.unlock_owner_with(page, after);
                    self.swap.free_location(was);
                    moved += 1;
                } else {
                    self.unlock_owner(page);
                    file.free(entry.location);
                }
                continue;
            }
            let is_unchanged = before.state() == State::Pool
                && before.has(Flags::WRITEBACK)
                && u64::from(before.payload()) == entry.tag;
            if !is_unchanged {
                self.unlock_owner(page);
                file.free(entry.location);
                continue;
            }
            // SAFETY: the page is locked, and its word is about to forget the handle.
            unsafe { self.swap.free_blob(before.payload(), &self.budget) };
            self.unlock_owner_with(page, before.keep(Flags::WRITE_PROTECTED, old));
            self.budget.count(Event::Zswpwb, 1);
            moved += 1;
        }
        moved
    }

    /// Has pages in memory give up their places in the file, which is full; returns how many did.
    fn give_up_locations(&self) -> usize {
        let mut given_up = 0;
        for block in 0..self.blocks_used_max.load(Ordering::Relaxed) {
            if self.blocks[block].mapped.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let range = PageRange::new(PageNum((block << BLOCK_ORDER) as u64), BLOCK_PAGES);
            for page in range.pages().filter(|&page| self.snapshot(page).has(Flags::IN_FILE)) {
                let Some(before) = self.word(page).try_lock() else { continue };
                if before.has(Flags::IN_FILE) {
                    self.lift_clean(PageRange::new(page, 1));
                    given_up += 1;
                }
                self.unlock_page(page);
            }
        }
        given_up
    }

    /// Gathers what is left in the emptiest segments into a new one, so that the file's freed
    /// room can be used again. Leaves the new segment open, for more pages to go in.
    fn clean(&self, file: &SwapFile, writing: &mut Writing) -> bool {
        let victims = file.victims();
        let mut is_open = victims.iter().any(Option::is_some)
            && writing.writer.open(file, Purpose::Clean).is_ok();
        let Ok(buffer) = memory::reserve(SEGMENT_BYTES, Access::ReadWrite) else {
            victims.into_iter().flatten().for_each(|segment| file.unpin(segment));
            return false;
        };
        // SAFETY: fresh, zeroed, ours until released below.
        let bytes = unsafe { core::slice::from_raw_parts_mut(buffer.as_ptr(), SEGMENT_BYTES) };
        for segment in victims.into_iter().flatten() {
            if is_open {
                let mut jobs = [Job::read(segment.plan().offset, bytes)];
                let Some((_, ring)) = writing.parts() else { break };
                ring.run(&mut jobs);
                let is_read = jobs[0].result.is_ok();
                if is_read {
                    for (location, blob) in segment_blobs(bytes, segment) {
                        let Some(seen) = self.owner_word(blob.owner).map(PageWord::load) else {
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
        let is_ready = !writing.writer.is_empty() || is_open;
        // SAFETY: reserved above; nothing refers to it any more.
        unsafe { memory::release(buffer, SEGMENT_BYTES) };
        is_ready
    }

    /// Brings packed pages together so that sparse slabs can be given back; returns pages freed.
    pub(crate) fn compact(&self) -> usize {
        self.swap.zpool.compact(
            COMPACT_MOVES_MAX,
            |owner, old, new| {
                let word = self.owner_word(owner);
                let Some(before) = word.and_then(PageWord::try_lock) else { return false };
                let names_it = before.state() == State::Pool && before.payload() == old.get();
                let has_copy = before.state() == State::Mapped
                    && before.has(Flags::COPY)
                    && before.payload() == old.get();
                if !names_it && !has_copy {
                    self.unlock_owner(owner);
                    return false;
                }
                let after = Snapshot::new(before.state(), new.get());
                self.unlock_owner_with(owner, before.keep(MAPPED_FLAGS, after));
                true
            },
            &self.budget,
        )
    }
}
