//! Batched unmapping: whole runs of pages leave the program in one call each.
//!
//! A batch is a run of locked pages in one VMA and one block, all of them victims or holes, alike
//! in write protection. It is unmapped by one move to the frame pool; the kernel refuses the first
//! page that is not exclusively ours (shared since a fork, or pinned), everything before it has
//! moved, and the rest is a batch of its own. Clean pages are dropped before, those of a block in one
//! call, so that they are holes as well. After a batch went whole nothing looks at its pages
//! again. Pages that may not be written, and those that another process has since a fork, do not
//! move: they are copied to swap and dropped ([`super::copy`]).

use core::sync::atomic::Ordering;

use super::Reclaimer;
use super::copy::Sharers;
use crate::control::Event;
use crate::failpoint::{self, Failpoint};
use crate::mmu::{FrameRun, Holes, Mmu, Refusal};
use crate::page::{Flags, LockedPage, LockedRange, PageLocks, Snapshot, State, Stored};
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::space::vma::Vma;
use crate::sys::monotonic_ns;
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

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

/// A run of pages of one block that are left locked: victims, which are mapped, and holes between
/// them.
pub(super) struct UnmapBatch {
    range: PageRange,
    who: Reclaimer,
    /// What the pages' words say, by offset in the block.
    words: [Snapshot; BLOCK_PAGES],
}

impl UnmapBatch {
    fn new(start: PageNum, who: Reclaimer) -> UnmapBatch {
        UnmapBatch {
            range: PageRange { start, end: start },
            who,
            words: [Snapshot::new(State::None, 0); BLOCK_PAGES],
        }
    }

    fn restart(&mut self, start: PageNum) {
        self.range = PageRange { start, end: start };
    }

    /// What a victim's word says; `None` of a hole.
    pub(super) fn before(&self, page: PageNum) -> Option<Snapshot> {
        let word = self.words[page.index() % BLOCK_PAGES];
        (word.state() == State::Mapped).then_some(word)
    }

    fn is_write_protected(&self) -> bool {
        self.before(self.range.start).is_some_and(|word| word.has(Flags::WRITE_PROTECTED))
    }

    fn push<L: PageLocks>(&mut self, page: LockedPage<'_, L>) {
        self.words[page.page().index() % BLOCK_PAGES] = page.content();
        self.range.end = page.leave_locked().add(1);
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

impl<M: Mmu> VmSpace<M> {
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
        let unit = self.batch_unit(who);
        let may_move = vma.attributes.prot.is_movable();
        // First those that only have to be dropped: one call for all of them, and holes for the others' moves.
        let mut clean = UnmapBatch::new(part.start, who);
        let is_clean = |page: &PageNum| self.snapshot(*page).has(Flags::CLEAN);
        for page in part.pages().filter(is_clean) {
            let victim = self.lock_to_evict(page, who, may_move, true);
            victim.into_iter().for_each(|page| clean.push(page));
        }
        let mut evicted = self.drop_clean(&clean, vma);
        let mut batch = UnmapBatch::new(part.start, who);
        let is_victim = |page: &mut LockedPage<'_, Self>| page.state() == State::Mapped;
        for page in part.pages() {
            let hole = (!batch.range.is_empty()).then(|| self.lock_hole(page)).flatten();
            let mut found = hole.or_else(|| self.lock_to_evict(page, who, may_move, false));
            let fits = found.as_mut().is_some_and(|found| {
                let is_alike = batch.range.is_empty()
                    || found.has(Flags::WRITE_PROTECTED) == batch.is_write_protected();
                (is_alike || !is_victim(found)) && !page.0.is_multiple_of(unit)
            });
            if !fits {
                evicted.add(self.evict_batch(&batch, vma, scratch));
                batch.restart(page);
            }
            let Some(mut found) = found else { continue };
            // A batch starts with a victim.
            if is_victim(&mut found) && batch.range.is_empty() {
                batch.restart(page);
            }
            if is_victim(&mut found) || !batch.range.is_empty() {
                batch.push(found);
            }
        }
        evicted.add(self.evict_batch(&batch, vma, scratch));
        evicted
    }

    /// Drops the clean pages of a block that the pool has as well: without the protection that tells
    /// their writes they could not stay clean.
    pub(crate) fn drop_packed(&self, block: PageRange) {
        let is_packed = |seen: Snapshot| seen.has(Flags::CLEAN) && seen.has(Flags::IN_POOL);
        let mut at = block.start;
        while at < block.end {
            let Some(vma) = self.find_vma(at) else {
                at = at.add(1);
                continue;
            };
            let part = vma.range.intersect(block);
            at = part.end.max(at.add(1));
            let mut packed = UnmapBatch::new(part.start, Reclaimer::Kswapd);
            let locked = part.pages().filter_map(|page| self.try_lock_if(page, is_packed));
            locked.for_each(|page| packed.push(page));
            self.drop_clean(&packed, &vma);
        }
    }

    /// Drops locked pages that are as they are stored, however they lie, and unlocks them: there
    /// is nothing to move and nothing to store.
    fn drop_clean(&self, clean: &UnmapBatch, vma: &Vma) -> Evicted {
        if clean.range.is_empty() {
            return Evicted::default();
        }
        let victims = || clean.range.pages().filter_map(|page| clean.victim(self, page));
        if !self.vmas.is_current(vma) {
            victims().for_each(LockedPage::unlock);
            return Evicted::default();
        }
        let start = monotonic_ns();
        // What the program has dropped by a bare system call is as it was stored no more.
        let mut is_missing = [false; BLOCK_PAGES];
        for (is_missing, page) in is_missing.iter_mut().zip(clean.range.pages()) {
            *is_missing = clean.before(page).is_some();
        }
        self.mmu.find_missing(clean.range, &mut is_missing[..clean.range.len()]);
        let is_missing = |page: PageNum| is_missing[(page.0 - clean.range.start.0) as usize];
        let mut runs = Runs::default();
        let is_victim = |&page: &PageNum| clean.before(page).is_some() && !is_missing(page);
        clean.range.pages().filter(is_victim).for_each(|page| runs.push(page));
        let calls = if self.batch_unit(clean.who) == 1 {
            let pages = runs.as_slice().iter().flat_map(|run| run.pages());
            pages.map(|page| self.mmu.unmap(PageRange::new(page, 1))).count()
        } else {
            self.mmu.unmap_all(runs.as_slice())
        };
        let freed = runs.as_slice().iter().map(|run| run.len()).sum();
        self.budget.count(Event::UnmapCalls, calls);
        let ns = monotonic_ns() - start;
        self.border.note_unmapped(true, freed, ns);
        self.budget.count(Event::UnmapNs, ns as usize);
        self.count_unmapped(clean.range.start, freed);
        self.budget.count(Event::UnmapPages, freed);
        let (mut stored_pages, mut copies, mut dropped) = (0, 0, 0);
        for mut page in victims() {
            if is_missing(page.page()) {
                self.drop_locked(&mut page);
                dropped += 1;
                continue;
            }
            let Some(stored) = page.content().stored() else { continue };
            match stored {
                // Its object has it: nothing of it is in swap.
                Stored::Nothing => self.budget.add_wanted(-1),
                Stored::Pool(_) => copies += 1,
                _ => {}
            }
            if stored != Stored::Nothing {
                self.note_evicted(page.page());
                stored_pages += 1;
            }
            page.store(stored);
        }
        self.swap.forget_copies(copies);
        self.budget.count(Event::Pswpout, stored_pages);
        self.budget.count(Event::PswpoutClean, stored_pages);
        self.swap.note_clean(stored_pages);
        self.budget.uncharge(freed);
        Evicted { freed: freed + dropped, ..Evicted::default() }
    }

    /// Where a batch ends at the latest: at a multiple of so many pages.
    fn batch_unit(&self, who: Reclaimer) -> u64 {
        if self.budget.control().no_batch_unmap.load(Ordering::Relaxed) != 0 {
            return 1;
        }
        // A program that pages out by folios of a fixed order wants to see them go as such.
        match self.fixed_order() {
            Some(order) if who == Reclaimer::Advice => 1 << order,
            _ => BLOCK_PAGES as u64,
        }
    }

    /// Locks a page where nothing is mapped.
    fn lock_hole(&self, page: PageNum) -> Option<LockedPage<'_, Self>> {
        // The kernel moves nothing over what marks a lost page.
        let is_hole = |seen: Snapshot| !matches!(seen.state(), State::Mapped | State::Poisoned);
        self.try_lock_if(page, is_hole)
    }

    /// Locks a page that can go: a clean one, or another.
    fn lock_to_evict(
        &self,
        page: PageNum,
        who: Reclaimer,
        may_move: bool,
        is_clean: bool,
    ) -> Option<LockedPage<'_, Self>> {
        let seen = self.snapshot(page);
        if seen.is_locked() || seen.state() != State::Mapped || seen.has(Flags::CLEAN) != is_clean {
            return None;
        }
        self.budget.count(who.scan(), 1);
        let can_go = |word: Snapshot| {
            word.state() == State::Mapped
                && word.has(Flags::CLEAN) == is_clean
                && !word.has(Flags::MLOCKED)
                && (may_move || !word.has(Flags::PINNED))
        };
        if !can_go(seen) || (who != Reclaimer::Advice && self.asked.has(page)) {
            return None;
        }
        failpoint::hit(Failpoint::Evicting, page);
        self.mmu.step();
        let victim = self.try_lock_page(page).filter(|page| can_go(page.content()))?;
        if who.spares(victim.content()) {
            victim.clear_flags(Flags::ACCESSED);
            return None;
        }
        Some(victim)
    }

    fn evict_batch(&self, batch: &UnmapBatch, vma: &Vma, scratch: &mut Scratch) -> Evicted {
        let whole = batch.range;
        let last = whole.pages().rfind(|&page| batch.before(page).is_some());
        let Some(last) = last else { return Evicted::default() };
        // Holes behind the last victim were only locked in the hope of one.
        let range = PageRange { start: whole.start, end: last.add(1) };
        self.unlock_range(PageRange { start: range.end, end: whole.end });
        if !self.vmas.is_current(vma) {
            self.unlock_range(range);
            return Evicted::default();
        }
        if vma.attributes.prot.is_movable() {
            self.evict_by_move(range, batch, Flags::EMPTY, Flags::EMPTY, Some(scratch))
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
        let mut batch = UnmapBatch::new(range.start, Reclaimer::Advice);
        while let Some(page) = pages.take_first() {
            batch.push(page);
        }
        self.evict_by_move(range, &batch, gone, stayed, None);
    }

    fn evict_by_move(
        &self,
        range: PageRange,
        batch: &UnmapBatch,
        gone: Flags,
        stayed: Flags,
        mut scratch: Option<&mut Scratch>,
    ) -> Evicted {
        let mut evicted = Evicted::default();
        // Fragments of free frames may have taken up all windows of the pool.
        let frame = self.frames.take_holes(range.len()).or_else(|| {
            self.release_free_frames(0);
            self.frames.take_holes(range.len())
        });
        let Some(frame) = frame else {
            if range.len() == 1 {
                self.unlock_range(range);
                return evicted;
            }
            // The pool is in fragments: smaller pieces may fit.
            let middle = range.start.add(range.len() / 2);
            for half in [PageRange { end: middle, ..range }, PageRange { start: middle, ..range }] {
                let scratch = scratch.as_deref_mut();
                evicted.add(self.evict_by_move(half, batch, gone, stayed, scratch));
            }
            return evicted;
        };
        let run = FrameRun { start: frame, len: range.len() };
        let mut at = range.start;
        // Up to here pages have been made our own.
        let mut owned_end = at;
        let mut is_unlocked = [false; BLOCK_PAGES];
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
                _ => Sharers::Unknown,
            };
            let kept = match (sharing, &mut scratch) {
                (Sharers::Others(run), Some(scratch)) => {
                    evicted.add(self.evict_by_copy(run, batch, scratch));
                    is_unlocked[first..first + run.len()].fill(true);
                    at = run.end;
                    continue;
                }
                // A handler may do this: they are left to others.
                (Sharers::Own(run), _) if batch.who == Reclaimer::Direct => run.len(),
                (Sharers::Others(run) | Sharers::Own(run), _) if self.make_own(run, batch) => {
                    owned_end = run.end;
                    continue;
                }
                // This page keeps what it has, and the rest is a batch of its own.
                _ if refusal == Refusal::Busy => 1,
                // The mapping itself is changing: all of the rest stays.
                _ => rest.len(),
            };
            is_unlocked[first..first + kept].fill(true);
            for page in PageRange::new(at, kept).pages() {
                match batch.victim(self, page) {
                    Some(victim) => victim.set_flags(stayed),
                    None => self.unlock_page(page),
                }
            }
            self.budget.count(Event::UnmapRefused, kept);
            evicted.refused += kept;
            at = at.add(kept);
        }
        // What the program has dropped by a bare system call has left nothing to move.
        let mut is_empty = [false; BLOCK_PAGES];
        for (at, page) in range.pages().enumerate() {
            is_empty[at] = !is_unlocked[at] && batch.before(page).is_some();
        }
        self.mmu.find_empty(run, &mut is_empty[..run.len]);
        let ns = monotonic_ns() - start;
        self.budget.count(Event::UnmapNs, ns as usize);
        let is_gone = |at: usize| {
            !is_unlocked[at] && !is_empty[at] && batch.before(range.start.add(at)).is_some()
        };
        let mut moved = 0;
        for (at, page) in range.pages().enumerate().filter(|&(at, _)| is_gone(at)) {
            self.frames.set_owner(frame.add(at), page);
            moved += 1;
        }
        // Time in which others were copied, or refused, says nothing of what moving takes.
        if !is_unlocked.contains(&true) {
            self.border.note_unmapped(false, moved, ns);
        }
        evicted.unmapped += moved;
        self.frames.enter_limbo(run, is_gone);
        self.count_unmapped(range.start, moved);
        self.budget.count(Event::UnmapPages, moved);
        for (at, page) in range.pages().enumerate().filter(|&(at, _)| !is_unlocked[at]) {
            match batch.victim(self, page) {
                Some(victim) if !is_empty[at] => victim.into_limbo(frame.add(at), gone),
                Some(mut dropped) => {
                    self.drop_locked(&mut dropped);
                    evicted.freed += 1;
                }
                None => self.unlock_page(page),
            }
        }
        evicted
    }
}
