//! Pages that come back from the swap file: the readers' side of a fault.

use super::Access;
use super::order::{Guess, Through};
use super::window::{FaultWindow, FillSource};
use crate::control::{Event, FaultKind};
use crate::mmu::Mmu;
use crate::page::{LockedPage, Snapshot, State};
use crate::reclaim::{NoCaches, Room};
use crate::scratch::{READ_PAGES, READING_PAGES, Scratch};
use crate::space::VmSpace;
use crate::space::vma::{Pattern, Vma};
use crate::swap::file::{Location, ReadPlan};
use crate::swap::io::{Job, Ring};
use crate::swap::{FarTier, SwapRead};
use crate::sys::Errno;
use crate::sys::monotonic_ns;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// What a stream reads for one fault at most: the page, and what around it is in the file too.
const READ_ORDER: u32 = READ_PAGES.ilog2();
const READ_BYTES: usize = READ_PAGES * PAGE_SIZE;
/// From this order on what lies ahead of a stream is asked of a server, in pages so many times as far as it reads.
const AHEAD_ORDER: u32 = 4;
const AHEAD_TIMES: u64 = 16;
/// Reads that are under way together.
const GROUP: usize = READING_PAGES / READ_PAGES;

/// A read for a window, all of whose pages are locked.
struct PlannedRead<'a, M: Mmu> {
    window: FaultWindow<'a, M>,
    plan: ReadPlan,
    guess: Guess,
    /// Whether a write asked for it.
    is_write: bool,
}

impl<M: Mmu> VmSpace<M> {
    /// Reads pages that handlers left locked, maps them, and answers their faults. May sleep. While
    /// pages are locked no object's cache is asked for memory: the registry comes before them.
    pub fn complete_reads(&self, requests: &[SwapRead], ring: &mut Ring, scratch: &mut Scratch) {
        for group in requests.chunks(GROUP) {
            self.complete_group(group, ring, scratch);
            // Last of all: from now on a fork may copy this process.
            self.swap.read_completed(group.len());
        }
    }

    fn complete_group(&self, group: &[SwapRead], ring: &mut Ring, scratch: &mut Scratch) {
        let mut reads: [Option<PlannedRead<'_, M>>; GROUP] = core::array::from_fn(|at| {
            let request = group.get(at)?;
            Some(self.plan_read(self.adopt_page(request.page), *request))
        });
        let plans: [ReadPlan; GROUP] = core::array::from_fn(|at| {
            reads[at].as_ref().map_or(Location::FIRST.plan(), |read| read.plan)
        });
        let results = self.read_plans(&plans[..group.len()], ring, scratch);
        for (at, read) in reads.iter_mut().flatten().enumerate() {
            self.make_room(&NoCaches, Room::Frame, read.window.range().len(), Some(scratch));
            let buffer = match results[at] {
                Ok(()) => Some(at),
                Err(_) => self.read_alone(read, ring, scratch).then_some(0),
            };
            // A frame will come: reclaim does not need this page's lock. The wait is bounded by
            // the background thread, which ends the process where there is none.
            while !self.map_read(read, buffer, scratch) {
                self.wait_for_room();
            }
            if buffer.is_some() {
                let passed_ns = monotonic_ns().saturating_sub(group[at].sent_ns);
                self.note_time(FaultKind::File, passed_ns);
            }
        }
        scratch.note_read(longest(&plans[..group.len()]));
    }

    /// Reads and maps a page on the handler's own thread: two threads fewer to wake, and each
    /// wake-up is a good part of what a read takes.
    ///
    /// Where no other handler is left for other faults it is read only if it is waited for awake: then this one
    /// serves them beside.
    ///
    /// # Errors
    /// The page, where that is not so, where the handler waits for a read already, or where memory is short: it
    /// is for the readers, which may wait.
    pub(super) fn read_at_once<'a>(
        &'a self,
        page: LockedPage<'a, Self>,
        request: SwapRead,
        scratch: &mut Scratch,
    ) -> Result<(), LockedPage<'a, Self>> {
        // A program's thread that brings a page in has no descriptor of the file.
        if !self.mmu.is_reachable() || scratch.reading.is_empty() {
            return Err(page);
        }
        let turn = self.swap.take_turn();
        let may_serve = scratch.beside.and(scratch.reader.as_ref()).is_some_and(Ring::waits_awake);
        // What a server has may be long in coming: the readers wait for it.
        if turn.is_none() && !may_serve || !self.swap.bring(request.location.plan()) {
            return Err(page);
        }
        let (mut own, mut plain) = (scratch.reader.take(), None);
        // A thread without one of its own lends its scratch to other spaces too: nothing may stay there.
        let ring = own
            .as_mut()
            .unwrap_or_else(|| plain.insert(self.swap.new_plain_reader().at_hand_only()));
        let mut read = self.plan_read(page, request);
        if !self.swap.bring(read.plan) {
            read.window.shrink(1);
            read.plan = request.location.plan();
        }
        let is_read = match self.read_plans(&[read.plan], ring, scratch)[0] {
            Ok(()) => true,
            // It was moved away meanwhile.
            Err(Errno::AGAIN) => {
                scratch.reader = own;
                read.window.shrink(1);
                return Err(read.window.pages.take_first().expect("the page asked for"));
            }
            Err(_) => self.read_alone(&mut read, ring, scratch),
        };
        scratch.reader = own;
        self.make_room(&NoCaches, Room::Frame, read.window.range().len(), Some(scratch));
        let is_mapped = self.map_read(&mut read, is_read.then_some(0), scratch);
        scratch.note_read(longest(&[read.plan]));
        if is_mapped {
            return Ok(());
        }
        Err(read.window.pages.take_first().expect("the page asked for"))
    }

    /// Locks those neighbours of a page that can be read with it, or are in memory already.
    fn plan_read<'a>(
        &'a self,
        locked: LockedPage<'a, Self>,
        request: SwapRead,
    ) -> PlannedRead<'a, M> {
        let (page, old) = (locked.page(), locked.content());
        let SwapRead { location, is_write, .. } = request;
        let mut plan = location.plan();
        let found = self.find_vma(page).filter(|vma| vma.attributes.kind.is_anonymous());
        let Some(vma) = found else {
            // It is being unmapped, by a thread that waits for this lock.
            let guess = self.streams.guess(page, Through::Swapped, Pattern::Normal, 0, |_| false);
            let window = FaultWindow::of_one(locked, Access::Read);
            return PlannedRead { window, plan, guess, is_write };
        };
        let mut guess = self.guess(page, old, &vma);
        guess.order = guess.order.min(READ_ORDER);
        let joins = |other: Snapshot| match other.state() {
            State::Same | State::Pool => true,
            State::File => {
                let location = Location::new(other.payload());
                let longer = location.and_then(|location| plan.with(location, READ_BYTES));
                plan = longer.unwrap_or(plan);
                longer.is_some()
            }
            _ => false,
        };
        let pages_max = self.window_pages_max(1 << guess.order);
        let mut window = self.open_window(locked, &vma, Access::Read, guess, pages_max, joins);
        if !self.vmas.is_current(&vma) {
            // Its rights may be others by now: by copying, and without its neighbours.
            window.shrink(1);
            (window.is_movable, window.is_mlocked) = (false, false);
            plan = location.plan();
        }
        // What is read together keeps its place. A page by itself keeps it only where it does not pack
        // ([`Self::map_read`]): in the pool it would be had for less than a read.
        if guess.order > 0 && self.may_keep_clean(&window) {
            window.is_clean = true;
        }
        let is_stream = guess.order >= AHEAD_ORDER && self.fixed_order().is_none();
        if is_stream && let Some(far) = self.swap.far() {
            // What is waited for first.
            self.swap.bring(plan);
            self.bring_ahead(far, window.range(), &vma, guess);
        }
        PlannedRead { window, plan, guess, is_write }
    }

    /// Has what a stream will want behind these pages, or before them, on its way from a server.
    fn bring_ahead(&self, far: FarTier, has: PageRange, vma: &Vma, guess: Guess) {
        let next = |count| match guess.is_down {
            false => Some(PageNum(has.end.0 + count)),
            true => has.start.0.checked_sub(1 + count).map(PageNum),
        };
        let pages = (0..AHEAD_TIMES << guess.order).map_while(next);
        let pages = pages.take_while(|&page| vma.range.contains(page));
        // Without their locks: what has moved meanwhile is fetched in vain.
        let swapped = pages.filter_map(|page| {
            let seen = self.snapshot(page);
            Location::new(seen.payload()).filter(|_| seen.state() == State::File)
        });
        far.bring_ahead(swapped.map(Location::plan));
    }

    /// After a read that failed: the page asked for by itself, for the others may be to blame. Into the first buffer,
    /// which nobody needs any more.
    fn read_alone(
        &self,
        read: &mut PlannedRead<'_, M>,
        ring: &mut Ring,
        scratch: &mut Scratch,
    ) -> bool {
        read.window.shrink(1);
        let location = Location::new(read.window.before(read.window.asked).payload());
        read.plan = location.map_or(read.plan, Location::plan);
        self.read_plans(&[read.plan], ring, scratch)[0].is_ok()
    }

    /// Maps what was read into buffer `at`; where nothing was, the page is lost. `false`: there is
    /// no memory, and the page asked for is locked still, alone.
    fn map_read(
        &self,
        read: &mut PlannedRead<'_, M>,
        at: Option<usize>,
        scratch: &mut Scratch,
    ) -> bool {
        let PlannedRead { window, plan, guess, is_write } = read;
        let Some(at) = at else {
            window.pages.take_first().into_iter().for_each(|page| self.poison_locked(page));
            return true;
        };
        let pages = &scratch.reading[at * READ_PAGES..][..READ_PAGES];
        let bytes = &pages.as_flattened()[..plan.length];
        if window.range().len() == 1 && !window.is_clean && !*is_write {
            let location = Location::new(window.before(window.asked).payload());
            let is_raw = location.is_some_and(|location| plan.is_raw(bytes, location));
            window.is_clean = is_raw && self.may_keep_clean(window);
        }
        let source = FillSource::Read(*plan, bytes);
        let is_filled = self.fill_window(window, source, *guess, scratch.staging);
        if !is_filled {
            window.shrink(1);
        }
        is_filled
    }

    /// Reads what each of so many faults waits for.
    fn read_plans(
        &self,
        plans: &[ReadPlan],
        ring: &mut Ring,
        scratch: &mut Scratch,
    ) -> [Result<(), Errno>; GROUP] {
        let mut results = [Err(Errno::IO); GROUP];
        let reading = core::mem::take(&mut scratch.reading);
        let mut buffers = reading.chunks_exact_mut(READ_PAGES);
        let mut jobs: [Job<'_>; GROUP] = core::array::from_fn(|at| {
            let buffer = buffers.next().expect("a buffer for each").as_flattened_mut();
            let plan = plans.get(at).copied().unwrap_or(Location::FIRST.plan());
            Job::read(plan.offset, &mut buffer[..plan.length])
        });
        let start = monotonic_ns();
        let jobs = &mut jobs[..plans.len()];
        match scratch.beside {
            Some(beside) => ring.run_beside(jobs, Some(&mut || beside(scratch))),
            None => ring.run(jobs),
        }
        let ns = (monotonic_ns() - start) as usize;
        self.budget.count(Event::SwapReadNs, ns * plans.len());
        for (result, job) in results.iter_mut().zip(jobs) {
            *result = job.result;
        }
        scratch.reading = reading;
        results
    }
}

/// Pages that the longest of these reads takes.
fn longest(plans: &[ReadPlan]) -> usize {
    plans.iter().map(|plan| plan.length.div_ceil(PAGE_SIZE)).max().unwrap_or(0)
}
