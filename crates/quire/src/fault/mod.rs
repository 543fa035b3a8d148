//! The way of a fault, from the address to the mapping.
//!
//! [`AddressSpace::handle_fault`] finds the VMA without a lock, takes the page's lock, checks the
//! VMA once more, and serves the page from where its word says that its bytes are. A fault never
//! sleeps here: where it would have to wait, it is *parked*, which is to say left unanswered, with
//! a sign that makes whoever it waits for answer it: the page's PARKED bit, or the list of the
//! starved. The thread that faulted then faults again.
//!
//! Locks: page locks, in any order, because all but the first are only tried.

pub mod grant;
pub mod order;
pub mod starved;
mod swapin;
pub mod way;

use self::order::Guess;
use self::way::Way;
use crate::control::Event;
use crate::mmu::{FrameRun, Mmu, Protection, Refusal};
use crate::page::{Flags, Snapshot, State};
use crate::scratch::{STAGING_PAGES, Scratch};
use crate::space::AddressSpace;
use crate::space::vma::{Kind, Vma};
use crate::swap::compress::{Corrupt, PageBytes, fill_same};
use crate::swap::zpool::Handle;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

/// What the program tried to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read a missing page.
    Read,
    /// Write a missing page.
    Write,
    /// Write a page that is write-protected.
    WriteProtected,
}

/// What became of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The page is mapped.
    Served,
    /// It was already.
    Spurious,
    /// It waits; somebody will answer it.
    Parked,
    /// Nothing is managed there: the access is tried again, and is a SIGSEGV.
    NoVma,
    /// The content is lost: the access is a SIGBUS.
    Poisoned,
}

/// Pages of one block whose locks a fault holds.
struct Window {
    range: PageRange,
    before: [Snapshot; BLOCK_PAGES],
    asked: PageNum,
    access: Access,
    is_movable: bool,
    protection: Protection,
    is_mlocked: bool,
}

impl Window {
    fn before(&self, page: PageNum) -> Snapshot {
        self.before[page.index() % BLOCK_PAGES]
    }
}

/// Why a run of pages was not filled to its end.
enum Stop {
    /// It was.
    No,
    /// The next page's content is lost.
    Corrupt,
    /// The kernel refused the next page.
    Refused(Refusal),
}

impl<M: Mmu> AddressSpace<M> {
    /// Serves a fault on `page`.
    pub fn handle_fault(&self, page: PageNum, access: Access, scratch: &mut Scratch) -> Outcome {
        self.budget.count(Event::Pgfault, 1);
        loop {
            let vma = match self.find_vma(page) {
                Some(vma) if vma.attributes.kind == Kind::Anonymous => vma,
                _ => {
                    self.mmu.wake(PageRange::new(page, 1));
                    return Outcome::NoVma;
                }
            };
            let seen = self.snapshot(page);
            let guess = self.guess(page, seen, &vma);
            // What is in memory already needs none. To reclaim for it could evict the very page,
            // again and again where threads do so to each other.
            let needs_room = matches!(seen.state(), State::None | State::Same | State::Pool);
            let has_room = !needs_room
                || !self.is_making_room_for_fork() && self.make_room(1 << guess.order, scratch);
            if !has_room || !self.use_block(page) {
                return self.starve(page);
            }
            self.mmu.step();
            let Some(old) = self.word(page).lock_or_park() else {
                self.budget.count(Event::FaultParked, 1);
                return Outcome::Parked;
            };
            if !self.vmas.is_current(&vma) {
                self.unlock_page(page);
                continue;
            }
            // A write that is to be noticed is noticed here: mapped protected, it would fault again.
            let is_noticed = access != Access::Read && old.state() != State::Mapped;
            let old = if is_noticed { old.without(Flags::WRITE_PROTECTED) } else { old };
            let served = match old.state() {
                State::Mapped => return self.fault_on_mapped(page, old, access),
                State::Poisoned => return self.fault_on_poisoned(page),
                State::File => return self.fault_from_file(page, old),
                State::Limbo => self.fault_from_limbo(page, old, &vma, guess, access),
                State::None | State::Same | State::Pool => {
                    self.fault_from_memory(page, old, &vma, guess, access, scratch)
                }
            };
            if served {
                return Outcome::Served;
            }
        }
    }

    /// Leaves a fault to the background thread.
    fn starve(&self, page: PageNum) -> Outcome {
        self.budget.count(Event::FaultParked, 1);
        let is_listed = self.starved.push(page);
        self.budget.call_for_memory();
        if !is_listed || self.can_answer_starved() {
            // No room in the list, or memory came before the page was in it.
            self.mmu.relax();
            self.mmu.wake(PageRange::new(page, 1));
        }
        Outcome::Parked
    }

    /// Waits a moment for the background thread to free something. For readers, which may sleep.
    fn wait_for_room(&self) {
        // Counts as starved, so that hunger without end is noticed; the answer goes nowhere.
        let _ = self.starved.push(PageNum(0));
        self.budget.call_for_memory();
        self.mmu.relax();
    }

    fn fault_on_mapped(&self, page: PageNum, old: Snapshot, access: Access) -> Outcome {
        let one = PageRange::new(page, 1);
        if access == Access::WriteProtected {
            let _ = self.mmu.write_protect(one, Protection::Writable);
            let written = Flags::DIRTY.or(Flags::ACCESSED);
            self.unlock_page_with(page, old.without(Flags::WRITE_PROTECTED).with(written));
            return Outcome::Served;
        }
        // Another fault may have mapped it since this one was sent; or the program has dropped
        // the page behind our back, by a bare system call, and then zeros are right.
        // SAFETY: `zeros` is a block of pages, unmanaged.
        let copied =
            unsafe { self.mmu.copy_in(one, self.zeros.as_ptr().cast(), Protection::Writable) };
        self.unlock_page(page);
        if copied.pages == 0 {
            self.mmu.wake(one);
        }
        Outcome::Spurious
    }

    fn fault_on_poisoned(&self, page: PageNum) -> Outcome {
        let _ = self.mmu.poison(page);
        self.unlock_page(page);
        self.mmu.wake(PageRange::new(page, 1));
        Outcome::Poisoned
    }

    fn fault_from_file(&self, page: PageNum, old: Snapshot) -> Outcome {
        self.budget.count(Event::Pgmajfault, 1);
        // The lock stays taken until the read is done; who reads it answers this fault.
        self.word(page).park_under_lock();
        if !self.swap.request_read(page, old.payload()) {
            self.unlock_page(page);
        }
        Outcome::Parked
    }

    /// Serves a page whose bytes are in memory, and those around it. `page` is locked; no page is
    /// afterwards.
    fn fault_from_memory(
        &self,
        page: PageNum,
        old: Snapshot,
        vma: &Vma,
        guess: Guess,
        access: Access,
        scratch: &mut Scratch,
    ) -> bool {
        let is_fresh = old.state() == State::None;
        let joins = |other: Snapshot| match other.state() {
            State::None => is_fresh,
            State::Same | State::Pool => !is_fresh,
            _ => false,
        };
        let pages_max = (self.available() / 2).max(1);
        let mut window = self.open_window(page, old, vma, access, guess, pages_max, joins);
        let pages = window.range.len();
        let can_move = window.is_movable && window.protection == Protection::Writable;
        let way = if can_move { self.costs.choose(pages) } else { Way::Copy };
        let start = self.mmu.cycles();
        let mut grant = self.grant(pages, way);
        if grant.pages() == 0 {
            self.unlock_range(window.range);
            self.return_grant(grant);
            return false;
        }
        self.shrink_window(&mut window, grant.pages());
        let mut at = window.range.start;
        while at < window.range.end {
            let rest = PageRange { start: at, end: window.range.end };
            let (mapped, stop) = match grant.next_run(rest.len()) {
                Some(run) => self.fill_by_move(rest, run, &window, scratch),
                None => {
                    let (mapped, stop) = self.fill_by_copy(rest, grant.charged, &window, scratch);
                    grant.charged -= mapped;
                    (mapped, stop)
                }
            };
            at = at.add(mapped);
            match stop {
                Stop::No => {}
                Stop::Corrupt => {
                    self.poison_locked(at, window.before(at));
                    at = at.add(1);
                }
                Stop::Refused(Refusal::Exists) => {
                    // The kernel mapped something there by itself: the program's now.
                    self.budget.charge_anyway(1);
                    self.finish_mapped(at, &window);
                    self.mmu.wake(PageRange::new(at, 1));
                    at = at.add(1);
                }
                Stop::Refused(Refusal::Unmapped) if window.range.len() > 1 => {
                    // The kernel's mapping ends inside the folio (two of them need not have been
                    // joined where we see one VMA): the page asked for must come through alone.
                    self.unlock_range(PageRange { start: at, end: window.range.end });
                    self.return_grant(grant);
                    let done = PageRange { start: window.range.start, end: at };
                    return done.contains(page) || self.fault_alone(page, vma, access, scratch);
                }
                Stop::Refused(_) => {
                    // The mapping changes under us; whoever changes it waits for these locks.
                    self.unlock_range(PageRange { start: at, end: window.range.end });
                    self.mmu.wake(PageRange::new(page, 1));
                    break;
                }
            }
        }
        let used = if grant.charged + grant.frames == 0 { Some(way) } else { None };
        self.return_grant(grant);
        if let Some(way) = used {
            self.costs.record(way, pages, self.mmu.cycles().wrapping_sub(start));
        }
        self.streams.advance(guess, window.range);
        self.check_low();
        true
    }

    /// Serves one page by itself, after a folio around it was refused. `false`: look again.
    fn fault_alone(&self, page: PageNum, vma: &Vma, access: Access, scratch: &mut Scratch) -> bool {
        let Some(old) = self.word(page).try_lock() else { return false };
        let is_in_memory = matches!(old.state(), State::None | State::Same | State::Pool);
        if !is_in_memory || !self.vmas.is_current(vma) {
            self.unlock_page(page);
            return false;
        }
        let guess = self.streams.single();
        self.fault_from_memory(page, old, vma, guess, access, scratch)
    }

    pub(crate) fn guess(&self, page: PageNum, old: Snapshot, vma: &Vma) -> Guess {
        let fixed = self.budget.control().folio_order.load(core::sync::atomic::Ordering::Relaxed);
        let is_fresh = old.state() == State::None;
        // A stream's folios are at most a thirty-second of the budget: several streams live side
        // by side.
        let order_max = (self.budget.limit() / 32).max(1).ilog2();
        let mut guess = self.streams.guess(page, is_fresh, vma.attributes.pattern, order_max);
        if fixed >= 0 {
            guess.order = (fixed as u32).min(BLOCK_ORDER);
        }
        guess
    }

    /// Locks what can be filled together with `page`: neighbours within the aligned folio, the
    /// VMA and the block, of the same kind, that nobody holds.
    #[allow(clippy::too_many_arguments, reason = "one fault's whole description")]
    fn open_window(
        &self,
        page: PageNum,
        old: Snapshot,
        vma: &Vma,
        access: Access,
        guess: Guess,
        pages_max: usize,
        joins: impl Fn(Snapshot) -> bool,
    ) -> Window {
        let folio = PageRange::new(page.align_down(guess.order), 1 << guess.order);
        let bounds = folio.intersect(vma.range);
        let mut window = Window {
            range: PageRange::new(page, 1),
            before: [Snapshot::new(State::None, 0); BLOCK_PAGES],
            asked: page,
            access,
            is_movable: vma.attributes.prot.is_movable(),
            protection: if old.has(Flags::WRITE_PROTECTED) {
                Protection::WriteProtected
            } else {
                Protection::Writable
            },
            is_mlocked: vma.attributes.is_mlocked,
        };
        window.before[page.index() % BLOCK_PAGES] = old;
        let mut try_join = |page: PageNum| {
            let word = self.word(page);
            let seen = word.load();
            if seen.is_locked() || !joins(seen) {
                return false;
            }
            let Some(now) = word.try_lock() else { return false };
            let is_alike = now.has(Flags::WRITE_PROTECTED) == old.has(Flags::WRITE_PROTECTED);
            if !joins(now) || !is_alike {
                self.unlock_page(page);
                return false;
            }
            window.before[page.index() % BLOCK_PAGES] = now;
            true
        };
        let mut range = PageRange::new(page, 1);
        while range.end < bounds.end && range.len() < pages_max && try_join(range.end) {
            range.end = range.end.add(1);
        }
        while range.start > bounds.start
            && range.len() < pages_max
            && try_join(PageNum(range.start.0 - 1))
        {
            range.start.0 -= 1;
        }
        window.range = range;
        window
    }

    /// Cuts a window to `pages` pages that still hold the one asked for.
    fn shrink_window(&self, window: &mut Window, pages: usize) {
        let whole = window.range;
        if pages >= whole.len() {
            return;
        }
        let start = PageNum(window.asked.0.min(whole.end.0 - pages as u64));
        window.range = PageRange::new(start, pages);
        self.unlock_range(PageRange { start: whole.start, end: window.range.start });
        self.unlock_range(PageRange { start: window.range.end, end: whole.end });
    }

    pub(crate) fn unlock_range(&self, range: PageRange) {
        for page in range.pages() {
            self.unlock_page(page);
        }
    }

    /// Writes the content of a page that is in memory into `into`.
    ///
    /// # Safety
    /// The caller holds the page's lock.
    pub(crate) unsafe fn load_content(
        &self,
        page: PageNum,
        before: Snapshot,
        into: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        match before.state() {
            State::Same => fill_same(before.payload(), into),
            State::Pool => {
                let handle = Handle::new(before.payload()).ok_or(Corrupt)?;
                // SAFETY: the caller's promise.
                unsafe { self.swap.zpool.load(handle, page, into) }?;
            }
            _ => into.fill(0),
        }
        Ok(())
    }

    /// Fills frames and moves them in.
    fn fill_by_move(
        &self,
        rest: PageRange,
        run: FrameRun,
        window: &Window,
        _: &mut Scratch,
    ) -> (usize, Stop) {
        let mut ready = 0;
        let mut stop = Stop::No;
        for (page, at) in rest.pages().zip(0..run.len) {
            // SAFETY: the frame is taken, so nobody else looks at it; the page is locked.
            let result = unsafe {
                let into = &mut *self.mmu.frame(run.start.add(at));
                self.load_content(page, window.before(page), into)
            };
            if result.is_err() {
                stop = Stop::Corrupt;
                break;
            }
            ready += 1;
        }
        let mut mapped = 0;
        if ready > 0 {
            let done = self.mmu.move_in(PageRange::new(rest.start, ready), run.start);
            mapped = done.pages;
            if let Some(refusal) = done.refusal {
                stop = Stop::Refused(refusal);
            }
            self.budget.count(Event::MapMove, mapped);
        }
        let (gone, left) = run.split(mapped);
        self.frames.consume(gone);
        self.frames.put(left);
        self.finish_range(PageRange::new(rest.start, mapped), window);
        (mapped, stop)
    }

    /// Fills staging pages and copies them in.
    fn fill_by_copy(
        &self,
        rest: PageRange,
        charged: usize,
        window: &Window,
        scratch: &mut Scratch,
    ) -> (usize, Stop) {
        let is_fresh = window.before(window.asked).state() == State::None;
        let limit = if is_fresh { BLOCK_PAGES } else { STAGING_PAGES };
        let count = rest.len().min(charged).min(limit);
        let mut ready = 0;
        let mut stop = Stop::No;
        let source = if is_fresh {
            ready = count;
            self.zeros.as_ptr().cast()
        } else {
            for (page, into) in rest.pages().zip(scratch.staging.iter_mut()).take(count) {
                // SAFETY: the page is locked.
                if unsafe { self.load_content(page, window.before(page), into) }.is_err() {
                    stop = Stop::Corrupt;
                    break;
                }
                ready += 1;
            }
            scratch.staging.as_ptr().cast()
        };
        let mut mapped = 0;
        if ready > 0 {
            // SAFETY: `ready` pages are at `source`: staging, or zeros, neither managed.
            let done = unsafe {
                self.mmu.copy_in(PageRange::new(rest.start, ready), source, window.protection)
            };
            mapped = done.pages;
            if let Some(refusal) = done.refusal {
                stop = Stop::Refused(refusal);
            }
            self.budget.count(Event::MapCopy, mapped);
        } else if count == 0 {
            stop = Stop::Refused(Refusal::NoMemory);
        }
        self.finish_range(PageRange::new(rest.start, mapped), window);
        (mapped, stop)
    }

    fn finish_range(&self, range: PageRange, window: &Window) {
        for page in range.pages() {
            self.finish_mapped(page, window);
        }
    }

    /// A locked page has been mapped: its word says so, and what it had in swap is let go.
    fn finish_mapped(&self, page: PageNum, window: &Window) {
        let before = window.before(page);
        let mut after = before.keep(Flags::WRITE_PROTECTED, Snapshot::new(State::Mapped, 0));
        match before.state() {
            State::None => self.budget.add_wanted(1),
            State::Same => {
                self.budget.count(Event::Pswpin, 1);
                self.budget.count(Event::SwpinZero, 1);
            }
            State::Pool => {
                self.budget.count(Event::Pswpin, 1);
                self.budget.count(Event::Zswpin, 1);
                let is_written = page == window.asked && window.access == Access::Write;
                if !is_written && self.swap.may_keep_copy() {
                    after = Snapshot::new(State::Mapped, before.payload()).with(Flags::COPY);
                    after = before.keep(Flags::WRITE_PROTECTED, after);
                } else {
                    // SAFETY: the page is locked, and its word is about to forget the handle.
                    unsafe { self.swap.free_blob(before.payload(), &self.budget) };
                }
            }
            _ => {}
        }
        if page == window.asked {
            after = after.with(Flags::ACCESSED);
        }
        if window.is_mlocked {
            after = after.with(Flags::MLOCKED);
        }
        self.count_mapped(page, 1);
        self.unlock_page_with(page, after);
    }

    /// The content of a locked page is lost.
    pub(crate) fn poison_locked(&self, page: PageNum, before: Snapshot) {
        self.budget.count(Event::Pgpoison, 1);
        match before.state() {
            // SAFETY: the page is locked, and its word is about to forget the handle.
            State::Pool => unsafe { self.swap.free_blob(before.payload(), &self.budget) },
            State::File => self.swap.free_location(before.payload()),
            _ => {}
        }
        let _ = self.mmu.poison(page);
        self.unlock_page_with(page, Snapshot::new(State::Poisoned, 0));
        self.mmu.wake(PageRange::new(page, 1));
    }

    /// Serves a page that is still in the pool with its content, and its neighbours there.
    /// `page` is locked; no page is afterwards.
    pub(crate) fn fault_from_limbo(
        &self,
        page: PageNum,
        old: Snapshot,
        vma: &Vma,
        guess: Guess,
        access: Access,
    ) -> bool {
        let first = old.payload();
        let joins = |other: Snapshot| other.state() == State::Limbo;
        let mut window = self.open_window(page, old, vma, access, guess, BLOCK_PAGES, joins);
        self.cut_to_neighbouring_frames(&mut window, first);
        let range = window.range;
        let frame = crate::mmu::FrameId(window.before(range.start).payload());
        let can_move = window.is_movable && window.protection == Protection::Writable;
        let mapped = if can_move {
            let done = self.mmu.move_in(range, frame);
            let run = FrameRun { start: frame, len: done.pages };
            self.frames.leave_limbo(run);
            self.frames.consume(run);
            self.budget.count(Event::MapMove, done.pages);
            done.pages
        } else {
            self.copy_from_limbo(&window)
        };
        for page in PageRange::new(range.start, mapped).pages() {
            self.finish_from_limbo(page, &window);
        }
        self.unlock_range(PageRange { start: range.start.add(mapped), end: range.end });
        if !PageRange::new(range.start, mapped).contains(page) {
            self.mmu.wake(PageRange::new(page, 1));
        }
        self.streams.advance(guess, range);
        self.budget.count(Event::PgactivateLimbo, 1);
        true
    }

    /// Leaves in the window only pages whose frames follow each other as the pages do.
    fn cut_to_neighbouring_frames(&self, window: &mut Window, first: u32) {
        let fits = |page: PageNum| {
            let want = i64::from(first) + (page.0 as i64 - window.asked.0 as i64);
            let frame = window.before(page).payload();
            i64::from(frame) == want && frame >> BLOCK_ORDER == first >> BLOCK_ORDER
        };
        let whole = window.range;
        let mut kept = PageRange::new(window.asked, 1);
        while kept.end < whole.end && fits(kept.end) {
            kept.end = kept.end.add(1);
        }
        while kept.start > whole.start && fits(PageNum(kept.start.0 - 1)) {
            kept.start.0 -= 1;
        }
        self.unlock_range(PageRange { start: whole.start, end: kept.start });
        self.unlock_range(PageRange { start: kept.end, end: whole.end });
        window.range = kept;
    }

    /// Copies pages out of limbo to where moving is refused; each frame pays for its copy.
    fn copy_from_limbo(&self, window: &Window) -> usize {
        let mut mapped = 0;
        for page in window.range.pages() {
            let frame = crate::mmu::FrameId(window.before(page).payload());
            let one = PageRange::new(page, 1);
            // SAFETY: the frame holds the page's content and is ours while the page is locked.
            let done =
                unsafe { self.mmu.copy_in(one, self.mmu.frame(frame).cast(), window.protection) };
            if done.pages == 0 {
                break;
            }
            let run = FrameRun { start: frame, len: 1 };
            self.frames.leave_limbo(run);
            self.mmu.frames_release(run);
            self.frames.consume(run);
            self.budget.count(Event::MapCopy, 1);
            mapped += 1;
        }
        mapped
    }

    fn finish_from_limbo(&self, page: PageNum, window: &Window) {
        let before = window.before(page);
        let copy = self.frames.copy_of(crate::mmu::FrameId(before.payload()));
        let mut after = if copy == 0 {
            Snapshot::new(State::Mapped, 0)
        } else {
            Snapshot::new(State::Mapped, copy).with(Flags::COPY)
        };
        after = before.keep(Flags::WRITE_PROTECTED, after);
        if page == window.asked {
            after = after.with(Flags::ACCESSED);
        }
        if window.is_mlocked {
            after = after.with(Flags::MLOCKED);
        }
        self.count_mapped(page, 1);
        self.unlock_page_with(page, after);
    }
}

/// Bytes of the block of zeros that fresh pages are copied from.
pub(crate) const ZEROS_BYTES: usize = BLOCK_PAGES * PAGE_SIZE;
