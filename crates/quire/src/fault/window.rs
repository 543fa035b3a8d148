//! A fault's window: the page asked for and the neighbours that are filled with it.
//!
//! All pages of a window are locked; filling it maps them and unlocks them. Their bytes come from
//! where each page's word says: zeros, a pattern, the compressed pool, or what was read from the
//! swap file for this window.

use super::order::Guess;
use super::way::Way;
use super::{Access, Staging};
use crate::control::{Event, Obituary};
use crate::mmu::{FrameRun, Mmu, Protection, Refusal};
use crate::page::{Flags, Snapshot, State};
use crate::scratch::STAGING_PAGES;
use crate::space::AddressSpace;
use crate::space::vma::Vma;
use crate::swap::compress::{Corrupt, PageBytes};
use crate::swap::file::{Location, ReadPlan};
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

/// Pages of one block whose locks a fault holds.
pub(super) struct Window<'a> {
    pub range: PageRange,
    pub before: [Snapshot; BLOCK_PAGES],
    pub asked: PageNum,
    pub access: Access,
    /// Nobody has asked for it yet, not even for `asked`.
    pub is_ahead: bool,
    pub is_movable: bool,
    pub protection: Protection,
    pub is_mlocked: bool,
    /// Its pages stay as they are stored until they are written: they are mapped write-protected,
    /// and keep what they have in store.
    pub is_clean: bool,
    /// What was read from the swap file, for the pages that are there.
    pub read: Option<(ReadPlan, &'a [u8])>,
    /// The first content of its pages, where that is not zeros.
    pub first: Option<First<'a>>,
}

/// The bytes of neighbouring pages that have none of their own yet.
#[derive(Clone, Copy)]
pub(super) struct First<'a> {
    pub start: PageNum,
    pub bytes: &'a [PageBytes],
}

impl<'a> First<'a> {
    /// The bytes from `page` on.
    fn from(&self, page: PageNum) -> &'a [PageBytes] {
        &self.bytes[(page.0 - self.start.0) as usize..]
    }
}

impl Window<'_> {
    /// Of `page` alone, which is to be copied in.
    pub fn of_one(page: PageNum, old: Snapshot, access: Access) -> Self {
        let mut window = Window {
            range: PageRange::new(page, 1),
            before: [Snapshot::new(State::None, 0); BLOCK_PAGES],
            asked: page,
            access,
            is_ahead: false,
            is_movable: false,
            protection: if old.has(Flags::WRITE_PROTECTED) {
                Protection::WriteProtected
            } else {
                Protection::Writable
            },
            is_mlocked: false,
            is_clean: false,
            read: None,
            first: None,
        };
        window.before[page.index() % BLOCK_PAGES] = old;
        window
    }

    /// What a page's word said when it was locked.
    pub fn before(&self, page: PageNum) -> Snapshot {
        self.before[page.index() % BLOCK_PAGES]
    }

    /// Has its pages keep what they have in store.
    pub fn keep_clean(&mut self) {
        self.is_clean = true;
        self.protection = Protection::WriteProtected;
    }

    /// Whether its frames may be moved in.
    pub fn can_move(&self) -> bool {
        self.is_movable && self.protection == Protection::Writable
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
    /// Locks what can be filled together with `page`: neighbours within the aligned folio, the
    /// VMA and the block, that `joins` accepts and nobody holds.
    #[allow(clippy::too_many_arguments, reason = "one fault's whole description")]
    pub(super) fn open_window<'a>(
        &self,
        page: PageNum,
        old: Snapshot,
        vma: &Vma,
        access: Access,
        guess: Guess,
        pages_max: usize,
        mut joins: impl FnMut(Snapshot) -> bool,
    ) -> Window<'a> {
        let folio = PageRange::new(page.align_down(guess.order), 1 << guess.order);
        let bounds = folio.intersect(vma.range);
        let mut window = Window::of_one(page, old, access);
        window.is_movable = vma.attributes.prot.is_movable();
        window.is_mlocked = vma.attributes.is_mlocked;
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

    /// Fills what else of the folio `joins`, beside a window that pages in memory cut short: a
    /// stream comes by there as well. The window itself is filled afterwards, so that its thread
    /// goes on when all of it is there.
    #[allow(clippy::too_many_arguments, reason = "one fault's whole description")]
    pub(super) fn fill_around(
        &self,
        window: &Window<'_>,
        vma: &Vma,
        guess: Guess,
        mut pages_left: usize,
        joins: impl Fn(Snapshot) -> bool,
        staging: &mut Staging,
    ) {
        let asked = window.asked;
        let folio = PageRange::new(asked.align_down(guess.order), 1 << guess.order);
        let bounds = folio.intersect(vma.range);
        let mut at = bounds.start;
        while at < bounds.end && pages_left > 0 {
            if window.range.contains(at) {
                at = window.range.end;
                continue;
            }
            let seen = self.word(at).load();
            let locked = (!seen.is_locked() && joins(seen)).then(|| self.word(at).try_lock());
            let Some(old) = locked.flatten() else {
                at = at.add(1);
                continue;
            };
            if !joins(old) {
                self.unlock_page(at);
                at = at.add(1);
                continue;
            }
            let mut run = self.open_window(at, old, vma, Access::Read, guess, pages_left, &joins);
            run.is_ahead = true;
            if window.is_clean && self.may_keep_clean(&run) {
                run.keep_clean();
            }
            at = run.range.end;
            // The layout may have changed since the page asked for was locked.
            if !self.vmas.is_current(vma) || !self.fill_window(&mut run, guess, staging) {
                self.unlock_range(run.range);
                return;
            }
            pages_left = pages_left.saturating_sub(run.range.len());
        }
    }

    /// Whether a window that is about to be filled should [keep](Window::keep_clean) what its
    /// pages have in store.
    pub(super) fn may_keep_clean(&self, window: &Window<'_>) -> bool {
        window.access == Access::Read && !window.is_mlocked && {
            let is_packed = |&page: &PageNum| window.before(page).state() == State::Pool;
            self.swap.may_keep_clean(window.range.pages().filter(is_packed).count())
        }
    }

    /// Cuts a window to `pages` pages that still hold the one asked for.
    pub(super) fn shrink_window(&self, window: &mut Window<'_>, pages: usize) {
        let whole = window.range;
        if pages >= whole.len() {
            return;
        }
        let start = PageNum(window.asked.0.min(whole.end.0 - pages as u64));
        window.range = PageRange::new(start, pages);
        self.unlock_range(PageRange { start: whole.start, end: window.range.start });
        self.unlock_range(PageRange { start: window.range.end, end: whole.end });
    }

    /// Maps and unlocks a window's pages. `false`: there is no memory for any; all are locked
    /// still.
    pub(super) fn fill_window(
        &self,
        window: &mut Window<'_>,
        guess: Guess,
        staging: &mut Staging,
    ) -> bool {
        let pages = window.range.len();
        let way = if window.can_move() { self.costs.choose(pages) } else { Way::Copy };
        let start = self.mmu.cycles();
        let mut grant = self.grant(pages, way);
        if grant.pages() == 0 {
            self.return_grant(grant);
            return false;
        }
        self.shrink_window(window, grant.pages());
        let mut at = window.range.start;
        while at < window.range.end {
            let rest = PageRange { start: at, end: window.range.end };
            let (mapped, stop) = match grant.next_run(rest.len()) {
                Some(run) => self.fill_by_move(rest, run, window),
                None => {
                    let (mapped, stop) = self.fill_by_copy(rest, grant.charged, window, staging);
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
                    // It is neither as stored nor protected.
                    self.budget.charge_anyway(1);
                    self.finish_mapped(at, window, false);
                    self.mmu.wake(PageRange::new(at, 1));
                    at = at.add(1);
                }
                Stop::Refused(Refusal::Unmapped) if window.range.len() > 1 => {
                    // The kernel's mapping ends inside the folio (two of them need not have been
                    // joined where we see one VMA): the page asked for must come through alone.
                    self.return_grant(grant);
                    let rest = PageRange { start: at, end: window.range.end };
                    if !rest.contains(window.asked) {
                        self.unlock_range(rest);
                        return true;
                    }
                    window.range = rest;
                    self.shrink_window(window, 1);
                    return self.fill_window(window, guess, staging);
                }
                Stop::Refused(_) => {
                    // The mapping changes under us; whoever changes it waits for these locks.
                    self.unlock_range(PageRange { start: at, end: window.range.end });
                    self.mmu.wake(PageRange::new(window.asked, 1));
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
        true
    }

    /// Fills frames and moves them in.
    fn fill_by_move(&self, rest: PageRange, run: FrameRun, window: &Window<'_>) -> (usize, Stop) {
        let mut ready = 0;
        let mut stop = Stop::No;
        for (page, at) in rest.pages().zip(0..run.len) {
            // SAFETY: the frame is taken, so nobody else looks at it; the page is locked.
            let result = unsafe {
                let into = &mut *self.mmu.frame(run.start.add(at));
                self.load(page, window, into)
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
        window: &Window<'_>,
        staging: &mut Staging,
    ) -> (usize, Stop) {
        let is_fresh = window.before(window.asked).state() == State::None;
        let limit = if is_fresh { BLOCK_PAGES } else { STAGING_PAGES };
        let count = rest.len().min(charged).min(limit);
        let mut ready = 0;
        let mut stop = Stop::No;
        let source = if is_fresh {
            ready = count;
            match window.first {
                Some(first) => first.from(rest.start)[..count].as_ptr().cast(),
                None => self.zeros.as_ptr().cast(),
            }
        } else {
            for (page, into) in rest.pages().zip(staging.iter_mut()).take(count) {
                // SAFETY: the page is locked.
                if unsafe { self.load(page, window, into) }.is_err() {
                    stop = Stop::Corrupt;
                    break;
                }
                ready += 1;
            }
            staging.as_ptr().cast()
        };
        let mut mapped = 0;
        if ready > 0 {
            // SAFETY: `ready` pages are at `source`: staging, zeros, or the window's first content,
            // none of it managed.
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

    /// Writes the content of one of a window's pages into `into`.
    ///
    /// # Safety
    /// The page is locked, as those of a window are.
    unsafe fn load(
        &self,
        page: PageNum,
        window: &Window<'_>,
        into: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        let before = window.before(page);
        if let (State::None, Some(first)) = (before.state(), window.first) {
            into.copy_from_slice(&first.from(page)[0]);
            return Ok(());
        }
        if before.state() != State::File {
            // SAFETY: the caller's promise.
            return unsafe { self.load_content(page, before, into) };
        }
        let location = Location::new(before.payload()).ok_or(Corrupt)?;
        let (plan, bytes) = window.read.ok_or(Corrupt)?;
        plan.unpack(bytes, location, page, into)
    }

    fn finish_range(&self, range: PageRange, window: &Window<'_>) {
        for page in range.pages() {
            self.finish_mapped(page, window, window.is_clean);
        }
    }

    /// A locked page has been mapped: its word says so, and what it had in swap is let go.
    fn finish_mapped(&self, page: PageNum, window: &Window<'_>, is_clean: bool) {
        let before = window.before(page);
        let mut after = Snapshot::new(State::Mapped, 0);
        match before.state() {
            State::None => self.budget.add_wanted(1),
            State::Same => {
                self.budget.count(Event::Pswpin, 1);
                self.budget.count(Event::SwpinZero, 1);
            }
            State::Pool => {
                self.budget.count(Event::Pswpin, 1);
                self.budget.count(Event::Zswpin, 1);
            }
            State::File => self.budget.count(Event::Pswpin, 1),
            _ => {}
        }
        match before.state() {
            State::None | State::Same | State::File if is_clean => {
                after = Snapshot::mapped_clean(before)
            }
            State::Pool if is_clean => {
                self.swap.keep_copy();
                after = Snapshot::mapped_clean(before);
            }
            // SAFETY: the page is locked, and its word is about to forget the handle.
            State::Pool => unsafe { self.swap.free_blob(before.payload(), &self.budget) },
            State::File => self.swap.free_location(before.payload()),
            _ => {}
        }
        self.settle_mapped(page, before.keep(Flags::WRITE_PROTECTED, after), window);
    }

    /// The end for a page that has been mapped: its word is `after`, and what its window says.
    pub(super) fn settle_mapped(&self, page: PageNum, mut after: Snapshot, window: &Window<'_>) {
        if page == window.asked && !window.is_ahead {
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
            State::File => {
                // The supervisor says so: this page's content is lost, all else lives on.
                let place = u64::from(before.payload());
                self.budget.leave_obituary(Obituary::SwapReadFailed, place);
                self.swap.free_location(before.payload());
            }
            _ => {}
        }
        let _ = self.mmu.poison(page);
        self.unlock_page_with(page, Snapshot::new(State::Poisoned, 0));
        self.mmu.wake(PageRange::new(page, 1));
    }
}
