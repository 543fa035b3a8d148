//! Batched unmapping: whole runs of pages leave the program in one call each.
//!
//! A batch is a run of locked pages in one VMA and one block, all of them victims or holes, alike
//! in write protection. It is unmapped by one move to the frame pool; the kernel refuses the first
//! page that is not exclusively ours (shared since a fork, or pinned), everything before it has
//! moved, and the rest is a batch of its own. After a batch went whole nothing looks at its pages
//! again. Pages that may not be written, and those that another process has since a fork, do not
//! move: they are copied to swap and dropped ([`super::copy`]).

use core::sync::atomic::Ordering;

use super::Reclaimer;
use super::copy::Sharing;
use crate::control::Event;
use crate::mmu::{FrameRun, Holes, Mmu, Refusal};
use crate::page::{Flags, LockedPage, LockedRange, PageLocks, Snapshot, State, Stored};
use crate::scratch::Scratch;
use crate::space::AddressSpace;
use crate::space::vma::Vma;
use crate::sys::monotonic_ns;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PageNum, PageRange};

/// What an eviction did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Pages that went to limbo.
    pub unmapped: usize,
    /// Pages whose memory is free already.
    pub freed: usize,
    /// Pages that could not go.
    pub refused: usize,
}

impl Evicted {
    pub(super) fn add(&mut self, other: Evicted) {
        self.unmapped += other.unmapped;
        self.freed += other.freed;
        self.refused += other.refused;
    }
}

/// A run of pages that are left locked: victims, and holes between them.
pub(super) struct Batch {
    range: PageRange,
    /// The victims' words, by offset in the block; `None` is a hole.
    before: [Option<Snapshot>; BLOCK_PAGES],
    victims: usize,
    last_victim: PageNum,
    is_protected: bool,
}

impl Batch {
    fn new(start: PageNum) -> Batch {
        Batch {
            range: PageRange { start, end: start },
            before: [None; BLOCK_PAGES],
            victims: 0,
            last_victim: start,
            is_protected: false,
        }
    }

    fn restart(&mut self, start: PageNum) {
        self.range = PageRange { start, end: start };
        self.victims = 0;
    }

    pub(super) fn before(&self, page: PageNum) -> Option<Snapshot> {
        self.before[page.index() % BLOCK_PAGES]
    }

    fn push_victim<L: PageLocks>(&mut self, page: LockedPage<'_, L>) {
        self.before[page.page().index() % BLOCK_PAGES] = Some(page.content());
        self.victims += 1;
        self.last_victim = page.leave_locked();
        self.range.end = self.last_victim.add(1);
    }

    fn push_hole<L: PageLocks>(&mut self, page: LockedPage<'_, L>) {
        let page = page.leave_locked();
        self.before[page.index() % BLOCK_PAGES] = None;
        self.range.end = page.add(1);
    }

    /// Has a victim back.
    pub(super) fn victim<'a, L: PageLocks>(
        &self,
        locks: &'a L,
        page: PageNum,
    ) -> Option<LockedPage<'a, L>> {
        self.before(page).map(|before| LockedPage::adopt(locks, page, before))
    }
}

/// Runs of pages in a block.
pub(super) struct Runs {
    runs: [PageRange; BLOCK_PAGES / 2],
    count: usize,
}

impl Default for Runs {
    fn default() -> Runs {
        let none = PageRange { start: PageNum(0), end: PageNum(0) };
        Runs { runs: [none; BLOCK_PAGES / 2], count: 0 }
    }
}

impl Runs {
    /// Adds a page that lies above all others.
    pub(super) fn push(&mut self, page: PageNum) {
        match self.runs[..self.count].last_mut() {
            Some(last) if last.end == page => last.end = page.add(1),
            _ => {
                self.runs[self.count] = PageRange::new(page, 1);
                self.count += 1;
            }
        }
    }

    pub(super) fn as_slice(&self) -> &[PageRange] {
        &self.runs[..self.count]
    }
}

/// Flags that a batch's pages get.
#[derive(Clone, Copy)]
struct Marks {
    /// Those that moved.
    gone: Flags,
    /// Those that could not.
    stayed: Flags,
}

impl Marks {
    const NONE: Marks = Marks { gone: Flags::EMPTY, stayed: Flags::EMPTY };
}

/// What becomes of a batch's page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It moves to limbo, unless it is a hole.
    Gone,
    /// It could not.
    Stayed,
    /// It was copied to swap, or not, and is unlocked.
    Settled,
}

/// What a look at a page says.
enum Look<'a, L: PageLocks> {
    /// It can go.
    Victim(LockedPage<'a, L>),
    /// Nothing is mapped there.
    Hole(LockedPage<'a, L>),
    /// It stays, and is not locked.
    Stays,
}

impl<M: Mmu> AddressSpace<M> {
    /// Evicts what can go from the pages of one block.
    pub fn evict_range(&self, range: PageRange, who: Reclaimer, scratch: &mut Scratch) -> Evicted {
        let mut evicted = Evicted::default();
        let mut at = range.start;
        while at < range.end {
            let Some(vma) = self.find_vma(at) else {
                at = at.add(1);
                continue;
            };
            let part = vma.range.intersect(range);
            at = part.end.max(at.add(1));
            let prot = vma.attributes.prot;
            // What is written and executed can neither move nor be copied safely: it stays.
            let can_go = prot.is_movable() || !prot.is_writable();
            if vma.attributes.kind.is_anonymous() && can_go {
                evicted.add(self.evict_part(part, &vma, who, scratch));
            }
        }
        self.budget.count(who.steal(), evicted.unmapped + evicted.freed);
        evicted
    }

    fn evict_part(
        &self,
        part: PageRange,
        vma: &Vma,
        who: Reclaimer,
        scratch: &mut Scratch,
    ) -> Evicted {
        let mut evicted = Evicted::default();
        let unit = self.batch_unit(who);
        let may_move = vma.attributes.prot.is_movable();
        let mut batch = Batch::new(part.start);
        let mut clean = Batch::new(part.start);
        for page in part.pages() {
            let look = match self.look(page, who, may_move, batch.victims > 0) {
                Look::Victim(victim) if victim.has(Flags::CLEAN) => {
                    clean.push_victim(victim);
                    Look::Stays
                }
                look => look,
            };
            let protected = match &look {
                Look::Victim(victim) => victim.has(Flags::WRITE_PROTECTED),
                _ => batch.is_protected,
            };
            let is_alike = batch.victims == 0 || protected == batch.is_protected;
            let is_full = page.0.is_multiple_of(unit);
            if matches!(look, Look::Stays) || !is_alike || is_full {
                evicted.add(self.evict_batch(&batch, vma, scratch));
                batch.restart(page);
            }
            match look {
                Look::Victim(victim) => {
                    if batch.victims == 0 {
                        batch.restart(page);
                        batch.is_protected = protected;
                    }
                    batch.push_victim(victim);
                }
                // A batch starts and ends with a victim.
                Look::Hole(hole) if batch.victims > 0 => batch.push_hole(hole),
                Look::Hole(_) | Look::Stays => {}
            }
        }
        evicted.add(self.evict_batch(&batch, vma, scratch));
        evicted.add(self.drop_clean(&clean, vma, who));
        evicted
    }

    /// Drops locked pages that are as they are stored, however they lie, and unlocks them: there
    /// is nothing to move and nothing to store.
    fn drop_clean(&self, clean: &Batch, vma: &Vma, who: Reclaimer) -> Evicted {
        if clean.victims == 0 {
            return Evicted::default();
        }
        let victims = || clean.range.pages().filter_map(|page| clean.victim(self, page));
        if !self.vmas.is_current(vma) {
            victims().for_each(LockedPage::unlock);
            return Evicted::default();
        }
        let start = monotonic_ns();
        // A page that is not there was dropped by a bare system call of the program's, and is zeros
        // from then on (the next fault finds that out), or swapped out by the kernel itself.
        let mut is_there = [false; BLOCK_PAGES];
        self.mmu.look(clean.range, &mut is_there[..clean.range.len()]);
        let is_there = |page: PageNum| is_there[(page.0 - clean.range.start.0) as usize];
        let mut runs = Runs::default();
        let is_victim = |&page: &PageNum| clean.before(page).is_some() && is_there(page);
        clean.range.pages().filter(is_victim).for_each(|page| runs.push(page));
        let calls = if self.batch_unit(who) == 1 {
            let pages = runs.as_slice().iter().flat_map(|run| run.pages());
            pages.map(|page| self.mmu.unmap(PageRange::new(page, 1))).count()
        } else {
            self.mmu.unmap_all(runs.as_slice())
        };
        let freed = runs.as_slice().iter().map(|run| run.len()).sum();
        self.budget.count(Event::UnmapCalls, calls);
        self.budget.count(Event::UnmapNs, (monotonic_ns() - start) as usize);
        self.count_unmapped(clean.range.start, freed);
        self.budget.count(Event::UnmapPages, freed);
        let mut stored_pages = 0;
        for page in victims() {
            let stored = page.content().stored().filter(|_| is_there(page.page()));
            let Some(stored) = stored else { continue };
            match stored {
                // Its object has it: nothing of it is in swap.
                Stored::Nothing => self.budget.add_wanted(-1),
                Stored::Pool(_) => self.swap.forget_copy(),
                _ => {}
            }
            stored_pages += usize::from(stored != Stored::Nothing);
            page.store(stored);
        }
        self.budget.count(Event::Pswpout, stored_pages);
        self.budget.count(Event::PswpoutClean, stored_pages);
        self.swap.note_clean(stored_pages);
        self.budget.uncharge(freed);
        Evicted { freed, ..Evicted::default() }
    }

    /// Where a batch ends at the latest: at a multiple of so many pages.
    fn batch_unit(&self, who: Reclaimer) -> u64 {
        let control = self.budget.control();
        if control.no_batch_unmap.load(Ordering::Relaxed) != 0 {
            return 1;
        }
        // Who pages out by folios of a fixed order wants to see them go as such.
        match control.folio_order.load(Ordering::Relaxed) {
            order @ 0.. if who == Reclaimer::Advice => 1 << (order as u32).min(BLOCK_ORDER),
            _ => BLOCK_PAGES as u64,
        }
    }

    /// Looks whether a page can go, and locks it where it can (or, with `wants_holes`, where
    /// nothing is mapped).
    fn look(
        &self,
        page: PageNum,
        who: Reclaimer,
        may_move: bool,
        wants_holes: bool,
    ) -> Look<'_, Self> {
        let seen = self.snapshot(page);
        if seen.is_locked() {
            return Look::Stays;
        }
        if seen.state() != State::Mapped {
            let hole = wants_holes.then(|| self.try_lock_page(page)).flatten();
            let hole = hole.filter(|hole| hole.state() != State::Mapped);
            return hole.map_or(Look::Stays, Look::Hole);
        }
        self.budget.count(who.scan(), 1);
        if seen.has(Flags::MLOCKED) || (seen.has(Flags::PINNED) && !may_move) {
            return Look::Stays;
        }
        self.mmu.step();
        let Some(victim) = self.try_lock_page(page) else { return Look::Stays };
        if victim.state() != State::Mapped {
            return Look::Stays;
        }
        if who.spares(victim.content()) {
            victim.clear_flags(Flags::ACCESSED);
            return Look::Stays;
        }
        Look::Victim(victim)
    }

    /// Unmaps a batch and unlocks its pages.
    fn evict_batch(&self, batch: &Batch, vma: &Vma, scratch: &mut Scratch) -> Evicted {
        // Holes behind the last victim were only locked in the hope of one.
        let whole = batch.range;
        if batch.victims == 0 {
            self.unlock_range(whole);
            return Evicted::default();
        }
        let range = PageRange { start: whole.start, end: batch.last_victim.add(1) };
        self.unlock_range(PageRange { start: range.end, end: whole.end });
        if !self.vmas.is_current(vma) {
            self.unlock_range(range);
            return Evicted::default();
        }
        if vma.attributes.prot.is_movable() {
            self.evict_by_move(range, batch, Marks::NONE, Some(scratch))
        } else {
            self.evict_by_copy(range, batch, scratch)
        }
    }

    /// Moves a run of locked, mapped pages of one block to limbo and unlocks them. Sets `gone` on
    /// pages that went, `stayed` on those that could not.
    pub(crate) fn move_locked_to_limbo(
        &self,
        mut pages: LockedRange<'_, Self>,
        gone: Flags,
        stayed: Flags,
    ) {
        let range = pages.range();
        let mut batch = Batch::new(range.start);
        while let Some(page) = pages.take_first() {
            batch.is_protected |= page.has(Flags::WRITE_PROTECTED);
            batch.push_victim(page);
        }
        self.evict_by_move(range, &batch, Marks { gone, stayed }, None);
    }

    fn evict_by_move(
        &self,
        range: PageRange,
        batch: &Batch,
        marks: Marks,
        mut scratch: Option<&mut Scratch>,
    ) -> Evicted {
        let mut evicted = Evicted::default();
        let Some(frame) = self.take_holes(range.len()) else {
            if range.len() == 1 {
                self.unlock_range(range);
                return evicted;
            }
            // The pool is in fragments: smaller pieces may fit.
            let middle = range.start.add(range.len() / 2);
            for half in [PageRange { end: middle, ..range }, PageRange { start: middle, ..range }] {
                evicted.add(self.evict_by_move(half, batch, marks, scratch.as_deref_mut()));
            }
            return evicted;
        };
        let run = FrameRun { start: frame, len: range.len() };
        let mut at = range.start;
        // Up to here pages have been made our own.
        let mut owned_end = at;
        let mut fates = [Fate::Gone; BLOCK_PAGES];
        let start = monotonic_ns();
        while at < range.end {
            let rest = PageRange { start: at, end: range.end };
            let place = frame.add((at.0 - range.start.0) as usize);
            let done = self.mmu.move_out(rest, place, Holes::Skip);
            self.budget.count(Event::UnmapCalls, 1);
            at = at.add(done.pages);
            let Some(refusal) = done.refusal else { break };
            let rest = PageRange { start: at, end: range.end };
            let first = (at.0 - range.start.0) as usize;
            let sharing = match refusal {
                Refusal::Busy if at >= owned_end => self.sharing(rest, batch),
                _ => Sharing::Unknown,
            };
            let kept = match (sharing, &mut scratch) {
                (Sharing::Others(run), Some(scratch)) => {
                    evicted.add(self.evict_by_copy(run, batch, scratch));
                    fates[first..first + run.len()].fill(Fate::Settled);
                    at = run.end;
                    continue;
                }
                (Sharing::Others(run) | Sharing::Own(run), _) if self.make_own(run, batch) => {
                    owned_end = run.end;
                    continue;
                }
                // This page keeps what it has, and the rest is a batch of its own.
                _ if refusal == Refusal::Busy => 1,
                // The mapping itself is changing: all of the rest stays.
                _ => rest.len(),
            };
            fates[first..first + kept].fill(Fate::Stayed);
            self.budget.count(Event::UnmapRefused, kept);
            evicted.refused += kept;
            at = at.add(kept);
        }
        self.budget.count(Event::UnmapNs, (monotonic_ns() - start) as usize);
        let is_gone =
            |at: usize| fates[at] == Fate::Gone && batch.before(range.start.add(at)).is_some();
        let mut moved = 0;
        for (at, page) in range.pages().enumerate().filter(|&(at, _)| is_gone(at)) {
            self.frames.set_owner(frame.add(at), page);
            moved += 1;
        }
        evicted.unmapped += moved;
        self.frames.enter_limbo(run, is_gone);
        self.count_unmapped(range.start, moved);
        self.budget.count(Event::UnmapPages, moved);
        for (at, page) in range.pages().enumerate() {
            if fates[at] == Fate::Settled {
                // Unlocked long since.
                continue;
            }
            match batch.victim(self, page) {
                Some(victim) if is_gone(at) => victim.into_limbo(frame.add(at), marks.gone),
                Some(victim) => victim.set_flags(marks.stayed),
                None => self.unlock_page(page),
            }
        }
        evicted
    }

    /// Places of the pool for `pages` pages, giving free frames back where fragments of them have
    /// taken up all windows.
    fn take_holes(&self, pages: usize) -> Option<crate::mmu::FrameId> {
        self.frames.take_holes(pages).or_else(|| {
            self.release_free_frames(0);
            self.frames.take_holes(pages)
        })
    }
}
