//! advise: what the program says of its pages, and what it asks of them.

use core::sync::atomic::Ordering;

use super::vma::{Attributes, Kind, Pattern, Vma};
use super::{Layout, VmSpace};
use crate::mmu::{Access, Mmu, Prot, Protection};
use crate::page::{Flags, State};
use crate::reclaim::Reclaimer;
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

/// Advice, by madvise's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// MADV_NORMAL, MADV_SEQUENTIAL, MADV_RANDOM.
    Pattern(Pattern),
    /// MADV_WILLNEED: bring in what is swapped, as far as there is room.
    WillNeed,
    /// MADV_DONTNEED: zeros from now on.
    DontNeed,
    /// MADV_FREE: old bytes or zeros, as reclaim likes, until written.
    Free,
    /// MADV_COLD: first to go.
    Cold,
    /// MADV_PAGEOUT: go now.
    PageOut,
    /// MADV_POPULATE_READ and MADV_POPULATE_WRITE: bring in everything, where the access is allowed.
    Populate(Access),
    /// MADV_DONTFORK (true) and MADV_DOFORK.
    DontFork(bool),
}

impl<M: Mmu> VmSpace<M> {
    /// Takes advice on a range.
    ///
    /// # Errors
    /// `NOMEM` where part of the range is not mapped (the rest was advised), `INVAL` where what is to be
    /// populated does not allow the access, `FAULT` where a page cannot be populated.
    pub fn advise(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        advice: Advice,
    ) -> Result<(), Errno> {
        let covered = self.check_covered(layout, range);
        match advice {
            Advice::Pattern(pattern) => {
                self.change_vmas(layout, range, |old| Attributes { pattern, ..old })?;
            }
            Advice::DontFork(is_dontfork) => {
                self.change_vmas(layout, range, |old| Attributes { is_dontfork, ..old })?;
            }
            Advice::DontNeed => self.for_each_part(layout, range, |part, _| self.drop_pages(part)),
            Advice::Free => self.for_each_part(layout, range, |part, _| self.free_lazily(part)),
            Advice::Cold => self.clear_flags(layout, range, Flags::ACCESSED),
            Advice::PageOut => self.page_out(layout, range),
            Advice::WillNeed => self.will_need(layout, range),
            Advice::Populate(access) => {
                covered?;
                let wanted = if access == Access::Read { Prot::READ } else { Prot::WRITE };
                let has = |vma: Vma| vma.attributes.prot.0 & wanted.0 != 0;
                if !self.vmas_in(layout, range).all(has) {
                    return Err(Errno::INVAL);
                }
                if !self.populate(layout, range) {
                    return Err(Errno::FAULT);
                }
            }
        }
        covered
    }

    pub(super) fn check_covered(&self, layout: &Layout<'_>, range: PageRange) -> Result<(), Errno> {
        if self.vmas.covers(range, &layout.locked) { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// The managed parts of a range that were ever used, block by block.
    fn for_each_part(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        mut act: impl FnMut(PageRange, &mut Layout<'_>),
    ) {
        let mut at = range.start;
        while let Some(vma) = self.next_vma(layout, at).filter(|vma| vma.range.start < range.end) {
            at = vma.range.end;
            if vma.attributes.kind.is_anonymous() {
                for part in self.used_parts(vma.range.intersect(range)) {
                    act(part, layout);
                }
            }
        }
    }

    /// Mapped pages go to limbo, marked as free to be dropped: an access before reclaim comes
    /// gets the old bytes back and ends it, one afterwards gets zeros. What is swapped is dropped
    /// at once.
    fn free_lazily(&self, part: PageRange) {
        for page in part.pages() {
            let seen = self.snapshot(page).state();
            if matches!(seen, State::None | State::Mapped | State::Poisoned) {
                continue;
            }
            let page = self.lock_page(page);
            match page.state() {
                state if state.is_swapped() => {
                    self.release_backing(page.content());
                    page.drop_content();
                }
                State::Limbo => page.set_flags(Flags::LAZYFREE),
                _ => page.unlock(),
            }
        }
        let vma = self.find_vma(part.start);
        if vma.is_some_and(|vma| vma.attributes.prot.is_movable()) {
            self.move_to_limbo(part, Flags::LAZYFREE, Flags::EMPTY);
        }
    }

    fn clear_flags(&self, layout: &mut Layout<'_>, range: PageRange, flags: Flags) {
        self.for_each_part(layout, range, |part, _| {
            for page in part.pages().filter(|&page| self.snapshot(page).has(flags)) {
                self.lock_page(page).clear_flags(flags);
            }
        });
    }

    fn page_out(&self, layout: &mut Layout<'_>, range: PageRange) {
        self.for_each_part(layout, range, |part, layout| {
            self.evict_range(part, Reclaimer::Advice, &mut layout.scratch);
        });
        // What was evicted is among the youngest in limbo: all of it has to go.
        self.clear_limbo(&mut layout.scratch);
    }

    fn will_need(&self, layout: &mut Layout<'_>, range: PageRange) {
        self.for_each_part(layout, range, |part, layout| {
            for page in part.pages() {
                let is_swapped = self.snapshot(page).state().is_swapped();
                if is_swapped && self.available() > self.low_watermark() {
                    self.bring_in(layout, page);
                }
            }
        });
    }

    /// Makes every page of a range that is mapped resident; `false` where one could not be.
    fn populate(&self, layout: &mut Layout<'_>, range: PageRange) -> bool {
        let mut at = range.start;
        while let Some(vma) = self.next_vma(layout, at).filter(|vma| vma.range.start < range.end) {
            at = vma.range.end;
            let Attributes { kind, prot, .. } = vma.attributes;
            let mut pages = vma.range.intersect(range).pages();
            let is_resident = kind == Kind::Foreign
                || prot.is_readable() && pages.all(|page| self.bring_in(layout, page));
            if !is_resident {
                return false;
            }
        }
        true
    }

    /// Whether a range can be locked in memory: all that may be locked together is no more than half of the
    /// budget, for the program has to find room for the rest.
    pub(super) fn can_mlock(&self, layout: &Layout<'_>, range: PageRange) -> bool {
        let locked = self.vmas_in(layout, self.arena()).filter(|vma| vma.attributes.is_mlocked);
        let others = locked.map(|vma| vma.range.len() - vma.range.intersect(range).len());
        others.sum::<usize>() + range.len() <= self.budget.limit() / 2
    }

    /// Locks a range in memory: its pages come in and stay.
    ///
    /// # Errors
    /// `NOMEM` where part of it is not mapped, or where more than half of the budget would be
    /// locked.
    pub fn mlock(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        self.check_covered(layout, range)?;
        if !self.can_mlock(layout, range) {
            return Err(Errno::NOMEM);
        }
        self.change_vmas(layout, range, |old| Attributes { is_mlocked: true, ..old })?;
        if !self.populate(layout, range) {
            return Err(Errno::NOMEM);
        }
        range.pages().try_for_each(|page| self.mlock_page(layout, page))
    }

    /// The same for what is in the program's memory now; the rest stays as soon as it comes.
    ///
    /// # Errors
    /// As for [`Self::mlock`].
    pub fn mlock_on_fault(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        if !self.can_mlock(layout, range) {
            return Err(Errno::NOMEM);
        }
        self.change_vmas(layout, range, |old| Attributes { is_mlocked: true, ..old })?;
        self.for_each_part(layout, range, |part, _| {
            for page in part.pages() {
                let locked = self.lock_page(page);
                match locked.state() {
                    State::Mapped => locked.set_flags(Flags::MLOCKED),
                    _ => locked.unlock(),
                }
            }
        });
        Ok(())
    }

    fn mlock_page(&self, layout: &mut Layout<'_>, page: PageNum) -> Result<(), Errno> {
        // It may go again as soon as it has come: bring it back until the flag is on it.
        loop {
            let locked = self.lock_page(page);
            if locked.state() == State::Mapped {
                locked.set_flags(Flags::MLOCKED);
                return Ok(());
            }
            locked.unlock();
            if !self.bring_in(layout, page) {
                return Err(Errno::NOMEM);
            }
        }
    }

    /// Locks all pages that hold data now; where all of today's mappings are no more than half of the budget, the
    /// others as they are touched. An allocator maps far more than it uses: what was never touched is not brought in.
    ///
    /// # Errors
    /// `NOMEM` where it would be more than half of the budget.
    pub fn mlock_current(&self, layout: &mut Layout<'_>) -> Result<(), Errno> {
        let wanted = self.budget.member().wanted_pages.load(Ordering::Relaxed);
        if wanted as usize > self.budget.limit() / 2 {
            return Err(Errno::NOMEM);
        }
        let all = self.arena();
        if self.budget.member().managed_pages.load(Ordering::Relaxed) as usize
            <= self.budget.limit() / 2
        {
            self.change_vmas(layout, all, |old| Attributes { is_mlocked: true, ..old })?;
        }
        let mut result = Ok(());
        self.for_each_part(layout, all, |part, layout| {
            let has_data = |page: &PageNum| self.snapshot(*page).state() != State::None;
            if result.is_ok() {
                let mut pages = part.pages().filter(has_data);
                result = pages.try_for_each(|page| self.mlock_page(layout, page));
            }
        });
        result
    }

    /// # Errors
    /// `NOMEM` where part of the range is not mapped.
    pub fn munlock(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        self.change_vmas(layout, range, |old| Attributes { is_mlocked: false, ..old })?;
        self.clear_flags(layout, range, Flags::MLOCKED);
        self.check_covered(layout, range)
    }

    /// Sets or ends MCL_FUTURE: pages of later mappings are locked as they are touched, as far as they can be.
    pub fn lock_future(&self, is_on: bool) {
        self.locks_future.store(is_on, Ordering::Relaxed);
    }

    /// Whether a page is in memory, as mincore means it.
    pub fn is_resident(&self, page: PageNum) -> bool {
        matches!(self.snapshot(page).state(), State::Mapped | State::Limbo)
    }

    /// Makes the next write to each mapped page of a range fault first; [`Self::is_written`] says
    /// afterwards which pages were written. The mark survives eviction.
    ///
    /// # Errors
    /// `NOMEM` where part of the range is not mapped.
    pub fn track_writes(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        self.check_covered(layout, range)?;
        self.for_each_part(layout, range, |part, _| {
            for page in part.pages() {
                let locked = self.lock_page(page);
                if locked.state() == State::Mapped {
                    let one = PageRange::new(page, 1);
                    let _ = self.mmu.write_protect(one, Protection::WriteProtected);
                }
                if !matches!(locked.state(), State::None | State::Poisoned) {
                    locked.track_writes();
                }
            }
        });
        Ok(())
    }

    /// Whether a page was written since [`Self::track_writes`].
    pub fn is_written(&self, page: PageNum) -> bool {
        let seen = self.snapshot(page);
        seen.state() != State::None && !seen.has(Flags::WRITE_PROTECTED)
    }
}
