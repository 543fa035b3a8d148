//! A fault's window: the page asked for and the neighbours that are filled with it.
//!
//! All pages of a window are locked; filling it maps them and unlocks them. Their bytes come from
//! where each page's word says: zeros, a pattern, the compressed pool, or what was read from the
//! swap file for this window.

use super::order::Guess;
use super::way::Transfer;
use super::{Access, Staging};
use crate::control::{Event, Obituary};
use crate::mmu::{FrameRun, Mmu, Protection, Refusal};
use crate::page::{Flags, LockedPage, LockedRange, Snapshot, State, Stored};
use crate::scratch::STAGING_PAGES;
use crate::space::VmSpace;
use crate::space::release::Releases;
use crate::space::vma::Vma;
use crate::swap::compress::{Corrupt, PageBytes};
use crate::swap::file::{Location, ReadPlan};
use crate::swap::zpool::Handle;
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

/// Locked pages of one block that a fault fills.
pub(super) struct FaultWindow<'a, M: Mmu> {
    pub pages: LockedRange<'a, VmSpace<M>>,
    pub asked: PageNum,
    pub access: Access,
    /// No fault has asked for it yet, not even for `asked`.
    pub is_ahead: bool,
    pub is_movable: bool,
    /// The writes to its pages are to be noticed. Not for a write, which is noticed here: mapped
    /// protected, it would fault again.
    pub is_tracked: bool,
    pub is_mlocked: bool,
    /// Its pages stay as they are stored until they are written: they are mapped write-protected,
    /// and keep what they have in store.
    pub is_clean: bool,
    /// Its pages are packed, and another process has them there as well.
    pub is_shared: bool,
}

/// Where a window's bytes are.
#[derive(Clone, Copy)]
pub(super) enum FillSource<'a> {
    /// In memory, where each page's word says.
    Stored,
    /// The same, and for pages that are in the swap file in what was read from there.
    Read(ReadPlan, &'a [u8]),
    /// The first content of pages that have none of their own.
    First(First<'a>),
}

/// How a page was mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Settled {
    /// It keeps nothing in store.
    Mapped,
    /// Write-protected, and it keeps what it has in store.
    Clean,
}

/// The bytes of neighbouring pages that have none of their own yet.
#[derive(Clone, Copy)]
pub(super) struct First<'a> {
    pub start: PageNum,
    pub bytes: &'a [PageBytes],
}

impl<'a> First<'a> {
    fn from(&self, page: PageNum) -> &'a [PageBytes] {
        &self.bytes[(page.0 - self.start.0) as usize..]
    }
}

impl<'a, M: Mmu> FaultWindow<'a, M> {
    /// Of one page, which is to be copied in.
    pub fn of_one(page: LockedPage<'a, VmSpace<M>>, access: Access) -> Self {
        let asked = page.page();
        FaultWindow::over(LockedRange::of(page), asked, access)
    }

    /// Of pages that are to be copied in, all of them tracked or not as `asked` is.
    pub fn over(pages: LockedRange<'a, VmSpace<M>>, asked: PageNum, access: Access) -> Self {
        FaultWindow {
            asked,
            access,
            is_ahead: false,
            is_movable: false,
            is_tracked: access == Access::Read && pages.content(asked).has(Flags::WRITE_PROTECTED),
            is_mlocked: false,
            is_clean: false,
            is_shared: false,
            pages,
        }
    }

    /// The pages that are still to be filled.
    pub fn range(&self) -> PageRange {
        self.pages.range()
    }

    /// What a page's word said when it was locked.
    pub fn before(&self, page: PageNum) -> Snapshot {
        self.pages.content(page)
    }

    pub fn protection(&self) -> Protection {
        if self.is_tracked || self.is_clean {
            Protection::WriteProtected
        } else {
            Protection::Writable
        }
    }

    pub fn can_move(&self) -> bool {
        self.is_movable && self.protection() == Protection::Writable
    }

    fn settled(&self) -> Settled {
        if self.is_clean { Settled::Clean } else { Settled::Mapped }
    }

    /// Cuts it to `pages` pages that still hold the one asked for.
    pub fn shrink(&mut self, pages: usize) {
        let whole = self.range();
        if pages < whole.len() {
            let start = PageNum(self.asked.0.min(whole.end.0 - pages as u64));
            self.pages.cut_to(PageRange::new(start, pages));
        }
    }
}

/// Why a run of pages was not filled to its end.
enum Stop {
    /// The next page's content is lost.
    Corrupt,
    Refused(Refusal),
}

impl<M: Mmu> VmSpace<M> {
    /// Locks what can be filled together with `page`: neighbours within the aligned folio, the
    /// VMA and the block, that `joins` accepts and no thread holds. Packed pages that another process
    /// has as well are filled without others, for those are to keep what they have in store.
    pub(super) fn open_window<'a>(
        &'a self,
        page: LockedPage<'a, Self>,
        vma: &Vma,
        access: Access,
        guess: Guess,
        pages_max: usize,
        mut joins: impl FnMut(Snapshot) -> bool,
    ) -> FaultWindow<'a, M> {
        let folio = guess.folio(page.page(), vma);
        let mut window = FaultWindow::of_one(page, access);
        window.is_movable = vma.attributes.prot.is_movable();
        window.is_mlocked = vma.attributes.is_mlocked;
        let is_tracked = window.is_tracked;
        window.is_shared = self.is_shared(window.before(window.asked));
        let is_shared = window.is_shared;
        window.pages.grow(folio, pages_max, |page| {
            let is_alike = |now: &LockedPage<'_, Self>| {
                now.has(Flags::WRITE_PROTECTED) == is_tracked
                    && self.is_shared(now.content()) == is_shared
            };
            self.try_lock_if(page, &mut joins).filter(is_alike)
        });
        window
    }

    /// Fills what else of the folio `joins`, beside a window that pages in memory cut short: a
    /// stream comes by there as well. The window itself is filled afterwards, so that its thread
    /// goes on when all of it is there.
    #[allow(clippy::too_many_arguments, reason = "one fault's whole description")]
    pub(super) fn fill_around(
        &self,
        window: &FaultWindow<'_, M>,
        vma: &Vma,
        guess: Guess,
        mut pages_left: usize,
        joins: impl Fn(Snapshot) -> bool,
        staging: &mut Staging,
    ) {
        let bounds = guess.folio(window.asked, vma);
        let mut at = bounds.start;
        while at < bounds.end && pages_left > 0 {
            if window.range().contains(at) {
                at = window.range().end;
                continue;
            }
            let Some(page) = self.try_lock_if(at, &joins) else {
                at = at.add(1);
                continue;
            };
            let mut run = self.open_window(page, vma, Access::Read, guess, pages_left, &joins);
            run.is_ahead = true;
            let may_be_clean = window.is_clean || run.is_shared;
            run.is_clean = may_be_clean && self.may_keep_clean(&run);
            let pages = run.range().len();
            at = run.range().end;
            // The layout may have changed since the page asked for was locked.
            if !self.vmas.is_current(vma)
                || !self.fill_window(&mut run, FillSource::Stored, guess, staging)
            {
                return;
            }
            pages_left = pages_left.saturating_sub(pages);
        }
    }

    /// Whether a window that is about to be filled should keep what its pages have in store.
    pub(super) fn may_keep_clean(&self, window: &FaultWindow<'_, M>) -> bool {
        if window.access != Access::Read || window.is_mlocked {
            return false;
        }
        // Shared ones take their memory whether they are kept or not; and what is not kept has to be
        // packed once more, for this process alone.
        if window.is_shared {
            return true;
        }
        let is_packed = |&page: &PageNum| window.before(page).state() == State::Pool;
        let packed = window.range().pages().filter(is_packed).count();
        (packed == 0 || self.border.is_copy_worth_it())
            && self.swap.may_keep_clean(packed, self.budget.limit())
    }

    /// Whether a page is in the pool, beside memory or not, and another process has it there as well.
    pub(crate) fn is_shared(&self, before: Snapshot) -> bool {
        let Some(Stored::Pool(blob)) = before.stored() else { return false };
        Handle::new(blob).is_some_and(|blob| self.swap.zpool.is_shared(blob))
    }

    /// Maps and unlocks a window's pages. `false`: there is no memory for any; all are locked
    /// still.
    pub(super) fn fill_window(
        &self,
        window: &mut FaultWindow<'_, M>,
        source: FillSource<'_>,
        guess: Guess,
        staging: &mut Staging,
    ) -> bool {
        let pages = window.range().len();
        let way = if window.can_move() { self.costs.choose(pages) } else { Transfer::Copy };
        let start = self.mmu.cycles();
        let mut grant = self.grant(pages, way);
        if grant.pages() == 0 {
            self.return_grant(grant);
            return false;
        }
        window.shrink(grant.pages());
        let whole = window.range();
        let before = window.before(window.asked);
        let is_swapped = before.state().is_swapped();
        while !window.range().is_empty() {
            let rest = window.range();
            let stop = match grant.next_run(rest.len()) {
                Some(run) => self.fill_by_move(run, window, source),
                None => self.fill_by_copy(&mut grant.charged, window, source, staging),
            };
            match stop {
                None => {}
                Some(Stop::Corrupt) => {
                    window.pages.take_first().into_iter().for_each(|page| self.poison_locked(page));
                }
                Some(Stop::Refused(Refusal::Exists)) => {
                    // The kernel mapped something there by itself: the program's now.
                    // It is neither as stored nor protected.
                    let at = window.range().start;
                    self.budget.charge_anyway(1);
                    self.finish_mapped(1, window, Settled::Mapped);
                    self.mmu.wake(PageRange::new(at, 1));
                }
                Some(Stop::Refused(Refusal::Unmapped)) if whole.len() > 1 => {
                    // The kernel's mapping ends inside the folio (two of them need not have been
                    // joined where we see one VMA): the page asked for must come through alone.
                    self.return_grant(grant);
                    if !window.range().contains(window.asked) {
                        window.pages.cut_to(PageRange::default());
                        return true;
                    }
                    window.shrink(1);
                    return self.fill_window(window, source, guess, staging);
                }
                Some(Stop::Refused(Refusal::NoMemory)) if window.is_clean => {
                    // The kernel has no memory to begin write protection with; without it a write
                    // would not be seen, so they keep nothing in store.
                    window.is_clean = false;
                }
                Some(Stop::Refused(_)) => {
                    // The mapping is changing; the thread that changes it waits for these locks.
                    window.pages.cut_to(PageRange::default());
                    self.mmu.wake(PageRange::new(window.asked, 1));
                }
            }
        }
        let is_used_up = grant.pages() == 0;
        self.return_grant(grant);
        if is_used_up {
            self.costs.record(way, pages, self.mmu.cycles().wrapping_sub(start));
        }
        self.streams.advance(guess, whole);
        if let Some(stored) = before.stored().filter(|_| !window.is_ahead) {
            self.border.note_window(stored, whole.len());
        }
        if is_swapped && self.fixed_order().is_none() {
            self.count_neighbours(whole.len() - usize::from(!window.is_ahead), guess.order);
        }
        true
    }

    /// Counts pages that came in along with another, and an estimate of those that will be used.
    fn count_neighbours(&self, pages: usize, order: u32) {
        if let Some(used) = self.neighbours.used(pages, order) {
            self.budget.count(Event::SwapRa, pages);
            self.budget.count(Event::SwapRaHit, used);
        }
    }

    fn fill_by_move(
        &self,
        run: FrameRun,
        window: &mut FaultWindow<'_, M>,
        source: FillSource<'_>,
    ) -> Option<Stop> {
        let rest = window.range();
        let mut ready = 0;
        let mut stop = None;
        for (page, at) in rest.pages().zip(0..run.len) {
            // SAFETY: the frame is taken, so no other thread looks at it; the page is locked.
            let result = unsafe {
                let into = &mut *self.mmu.frame(run.start.add(at));
                self.load(page, window.before(page), source, into)
            };
            if result.is_err() {
                stop = Some(Stop::Corrupt);
                break;
            }
            ready += 1;
        }
        let mut mapped = 0;
        if ready > 0 {
            let done = self.mmu.move_in(PageRange::new(rest.start, ready), run.start);
            mapped = done.pages;
            stop = done.refusal.map(Stop::Refused).or(stop);
            self.budget.count(Event::MapMove, mapped);
        }
        let (gone, left) = run.split(mapped);
        self.frames.consume(gone);
        self.frames.put(left);
        self.finish_mapped(mapped, window, window.settled());
        stop
    }

    fn fill_by_copy(
        &self,
        charged: &mut usize,
        window: &mut FaultWindow<'_, M>,
        source: FillSource<'_>,
        staging: &mut Staging,
    ) -> Option<Stop> {
        let rest = window.range();
        let is_fresh = window.before(window.asked).state() == State::None;
        let limit = if is_fresh { BLOCK_PAGES } else { STAGING_PAGES };
        let count = rest.len().min(*charged).min(limit);
        let mut ready = 0;
        let mut stop = None;
        let bytes = if is_fresh {
            ready = count;
            match source {
                FillSource::First(first) => first.from(rest.start)[..count].as_ptr().cast(),
                _ => self.zeros.as_ptr().cast(),
            }
        } else {
            for (page, into) in rest.pages().zip(staging.iter_mut()).take(count) {
                // SAFETY: the page is locked.
                if unsafe { self.load(page, window.before(page), source, into) }.is_err() {
                    stop = Some(Stop::Corrupt);
                    break;
                }
                ready += 1;
            }
            staging.as_ptr().cast()
        };
        let mut mapped = 0;
        if ready > 0 {
            // SAFETY: `ready` pages are at `bytes`: staging, zeros, or the window's first content,
            // none of it managed.
            let done = unsafe {
                self.mmu.copy_in(PageRange::new(rest.start, ready), bytes, window.protection())
            };
            mapped = done.pages;
            stop = done.refusal.map(Stop::Refused).or(stop);
            self.budget.count(Event::MapCopy, mapped);
            *charged -= mapped;
        } else if count == 0 {
            stop = Some(Stop::Refused(Refusal::NoMemory));
        }
        self.finish_mapped(mapped, window, window.settled());
        stop
    }

    /// Writes the content of one of a window's pages into `into`.
    ///
    /// # Safety
    /// The page is locked, as those of a window are.
    unsafe fn load(
        &self,
        page: PageNum,
        before: Snapshot,
        source: FillSource<'_>,
        into: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        match (before.state(), source) {
            (State::None, FillSource::First(first)) => into.copy_from_slice(&first.from(page)[0]),
            (State::File, FillSource::Read(plan, bytes)) => {
                let location = Location::new(before.payload()).ok_or(Corrupt)?;
                plan.unpack(bytes, location, page, into)?;
            }
            (State::File, _) => return Err(Corrupt),
            // SAFETY: the caller's promise.
            _ => unsafe { self.load_content(page, before, into) }?,
        }
        Ok(())
    }

    /// So many pages at the beginning of a window have been mapped: what they had in swap is let go or kept, and
    /// their words say so.
    fn finish_mapped(&self, pages: usize, window: &mut FaultWindow<'_, M>, settled: Settled) {
        let first = window.range().start;
        let (mut fresh, mut swapped, mut zeros, mut packed) = (0, 0, 0, 0);
        let mut releases = Releases::NONE;
        for page in PageRange::new(first, pages).pages() {
            let before = window.before(page);
            match before.state() {
                State::None => fresh += 1,
                State::Same => zeros += 1,
                State::Pool => packed += 1,
                _ => {}
            }
            swapped += usize::from(before.state().is_swapped());
            let Some(stored) = before.stored() else { continue };
            if page == window.asked && !window.is_ahead {
                self.note_refault(page, stored);
            }
            if settled == Settled::Mapped {
                self.add_stored(&mut releases, stored);
            }
        }
        self.release(releases);
        if settled == Settled::Clean {
            self.swap.keep_copies(packed);
        }
        self.budget.add_wanted(fresh as isize);
        let events = [(Event::Pswpin, swapped), (Event::SwpinZero, zeros), (Event::Zswpin, packed)];
        events.into_iter().filter(|&(_, count)| count > 0).for_each(|(event, count)| {
            self.budget.count(event, count);
        });
        self.settle_mapped(pages, window, settled);
    }

    /// The end for so many pages at the beginning of a window, which have been mapped.
    pub(super) fn settle_mapped(
        &self,
        pages: usize,
        window: &mut FaultWindow<'_, M>,
        settled: Settled,
    ) {
        let flag = |flag, is_set| if is_set { flag } else { Flags::EMPTY };
        let for_all = flag(Flags::MLOCKED, window.is_mlocked)
            .or(flag(Flags::WRITE_PROTECTED, window.is_tracked));
        self.count_mapped(window.range().start, pages);
        for _ in 0..pages {
            let Some(page) = window.pages.take_first() else { return };
            let is_asked = page.page() == window.asked && !window.is_ahead;
            let flags = for_all.or(flag(Flags::ACCESSED, is_asked));
            match settled {
                Settled::Mapped => page.map(flags),
                Settled::Clean => page.map_clean(flags),
            }
        }
    }

    pub(crate) fn poison_locked(&self, locked: LockedPage<'_, Self>) {
        let page = locked.page();
        self.budget.count(Event::Pgpoison, 1);
        if let Some(stored) = locked.in_swap() {
            // The supervisor says so: this page's content is lost, all else lives on.
            match stored {
                Stored::File(location) => {
                    self.budget.leave_obituary(Obituary::SwapReadFailed, u64::from(location));
                }
                Stored::Pool(_) => {
                    self.budget
                        .leave_obituary(Obituary::PoolCorrupt, self.mmu.address_of(page) as u64);
                }
                _ => {}
            }
            self.free_stored(stored);
        }
        let _ = self.mmu.poison(page);
        locked.poison();
        self.mmu.wake(PageRange::new(page, 1));
    }
}
