//! Pages that come back from the swap file: the readers' side of a fault.

use crate::control::{Event, Obituary};
use crate::mmu::{Mmu, Protection};
use crate::page::{Flags, Snapshot, State};
use crate::scratch::{STAGING_PAGES, Scratch};
use crate::space::AddressSpace;
use crate::space::vma::Pattern;
use crate::swap::Request;
use crate::swap::compress::PageBytes;
use crate::swap::file::{Location, ReadPlan, blobs_in, parse};
use crate::swap::io::{Job, Ring};
use crate::sys::Errno;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

use super::way::Way;

/// What a stream reads for one fault at most: the page and what was written with it.
const READ_AHEAD_ORDER: u32 = 4;
const READ_AHEAD_PAGES: usize = 1 << READ_AHEAD_ORDER;
/// Reads that are under way together.
const GROUP: usize = STAGING_PAGES / READ_AHEAD_PAGES;

impl<M: Mmu> AddressSpace<M> {
    /// Reads pages that handlers left locked, maps them, and answers their faults. May sleep.
    pub fn complete_reads(&self, requests: &[Request], ring: &mut Ring, scratch: &mut Scratch) {
        for group in requests.chunks(GROUP) {
            self.complete_group(group, ring, scratch);
            // Last of all: from now on a fork may copy this process.
            self.swap.read_completed(group.len());
        }
    }

    fn complete_group(&self, group: &[Request], ring: &mut Ring, scratch: &mut Scratch) {
        let Some(file) = self.swap.file() else { return };
        let guesses: [_; GROUP] = core::array::from_fn(|at| {
            let page = group.get(at).map_or(PageNum(0), |request| request.page);
            self.streams.guess(page, false, Pattern::Normal, READ_AHEAD_ORDER)
        });
        let plans: [ReadPlan; GROUP] = core::array::from_fn(|at| {
            let location = group.get(at).map_or(Location::FIRST, |request| request.location);
            location.plan().ahead(PAGE_SIZE << guesses[at].order)
        });
        let mut results = [Err(Errno::IO); GROUP];
        {
            let buffers = scratch.staging.chunks_exact_mut(READ_AHEAD_PAGES);
            let mut jobs = plans.iter().zip(buffers).map(|(plan, buffer)| {
                Job::read(plan.offset, &mut buffer.as_flattened_mut()[..plan.length])
            });
            let mut jobs: [Job<'_>; GROUP] =
                core::array::from_fn(|_| jobs.next().expect("staging has a buffer for each"));
            ring.run(&mut jobs[..group.len()]);
            for (result, job) in results.iter_mut().zip(&jobs) {
                *result = job.result;
            }
        }
        for (at, request) in group.iter().enumerate() {
            self.make_room(1 << guesses[at].order, scratch);
            let pages = &scratch.staging[at * READ_AHEAD_PAGES..][..READ_AHEAD_PAGES];
            let bytes = &pages.as_flattened()[..plans[at].length];
            // What was read along stays what its locations name as long as the segment is pinned.
            let is_pinned = file.pin(request.location.segment());
            self.complete_read(request, results[at].is_ok().then_some(bytes));
            let last = if results[at].is_ok() && is_pinned {
                self.take_along(request.location, bytes)
            } else {
                request.page
            };
            if is_pinned {
                file.unpin(request.location.segment());
            }
            let filled = PageRange { start: request.page, end: last.max(request.page).add(1) };
            self.streams.advance(guesses[at], filled);
        }
    }

    fn complete_read(&self, request: &Request, bytes: Option<&[u8]>) {
        let page = request.page;
        let before = self.snapshot(page);
        let mut content: PageBytes = [0; PAGE_SIZE];
        let is_right =
            bytes.is_some_and(|bytes| parse(bytes, request.location, page, &mut content).is_ok());
        if !is_right {
            // The supervisor says so: this page's content is lost, all else lives on.
            let address = request.location.get();
            self.budget.leave_obituary(Obituary::SwapReadFailed, u64::from(address));
            self.poison_locked(page, before);
            return;
        }
        // A frame will come: reclaim does not need this page's lock. The wait is bounded by the
        // background thread, which ends the process where there is none.
        while !self.map_read(page, before, &content) {
            self.wait_for_room();
        }
    }

    /// Maps a locked page with `content` and unlocks it; `false` where there is no memory.
    fn map_read(&self, page: PageNum, before: Snapshot, content: &PageBytes) -> bool {
        let mut grant = self.grant(1, Way::Copy);
        if grant.pages() == 0 {
            self.return_grant(grant);
            return false;
        }
        let protection = if before.has(Flags::WRITE_PROTECTED) {
            Protection::WriteProtected
        } else {
            Protection::Writable
        };
        // SAFETY: `content` is a page of our stack.
        let done =
            unsafe { self.mmu.copy_in(PageRange::new(page, 1), content.as_ptr(), protection) };
        if done.pages == 1 {
            grant.charged -= 1;
            let after = Snapshot::new(State::Mapped, 0).with(Flags::ACCESSED);
            let after = before.keep(Flags::WRITE_PROTECTED, after);
            self.swap.free_location(before.payload());
            self.budget.count(Event::Pswpin, 1);
            self.budget.count(Event::MapCopy, 1);
            self.count_mapped(page, 1);
            self.unlock_page_with(page, after);
        } else {
            // The layout changes under us: whoever changes it waits for this lock, and the
            // fault is tried again.
            self.unlock_page(page);
            self.mmu.wake(PageRange::new(page, 1));
        }
        self.return_grant(grant);
        true
    }

    /// Maps the pages that were read along and are still in the file, while memory lasts.
    /// Returns the last of them.
    fn take_along(&self, location: Location, bytes: &[u8]) -> PageNum {
        let mut last = PageNum(0);
        for (place, blob) in blobs_in(bytes, location).skip(1) {
            let page = blob.owner;
            if self.available() == 0 || page.index() >= self.words.len() {
                return last;
            }
            let Some(before) = self.word(page).try_lock() else { continue };
            let is_it = before.state() == State::File && before.payload() == place.get();
            let mut content: PageBytes = [0; PAGE_SIZE];
            if !is_it || blob.unpack(page, &mut content).is_err() {
                self.unlock_page(page);
                continue;
            }
            if !self.map_read(page, before, &content) {
                self.unlock_page(page);
                return last;
            }
            last = page;
        }
        last
    }
}
