//! remap: content moves to other addresses, by page words and moves, never by copying what is
//! swapped.

use core::sync::atomic::Ordering;

use super::vma::Attributes;
use super::{Layout, VmSpace};
use crate::fault::Outcome;
use crate::mmu::{Access, FrameId, Mmu, Prot, Protection, Refusal};
use crate::page::{Flags, LockedPage, State};
use crate::swap::zpool::Handle;
use crate::sys::Errno;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// Where a remapped range may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    InPlace,
    Anywhere,
    /// Exactly there, over whatever is mapped.
    At(PageNum),
}

impl<M: Mmu> VmSpace<M> {
    /// Gives the mapping `old` a length of `pages`, moving it where it must.
    ///
    /// # Errors
    /// `FAULT` where `old` is not one mapping, `NOMEM` where there is no room or it is not managed, `INVAL`
    /// where the target overlaps, `AGAIN` where more would be locked in memory than may be.
    pub fn remap(
        &self,
        layout: &mut Layout<'_>,
        old: PageRange,
        pages: usize,
        placement: Placement,
    ) -> Result<PageNum, Errno> {
        let old = self.cut_for_remap(layout, old, pages, placement)?;
        let stays = pages == old.len() && !matches!(placement, Placement::At(_));
        let Some(vma) = self.next_vma(layout, old.start).filter(|_| !stays) else {
            return Ok(old.start);
        };
        let attributes = vma.attributes;
        if !attributes.kind.is_anonymous() {
            return Err(Errno::NOMEM);
        }
        if attributes.is_mlocked && !self.can_mlock(layout, PageRange::new(old.start, pages)) {
            return Err(Errno::AGAIN);
        }
        if let Placement::At(start) = placement {
            let target = PageRange::new(start, pages);
            self.unmap(layout, target)?;
            return self.move_mapping(layout, old, target, attributes);
        }
        let grown = PageRange { start: old.end, end: old.start.add(pages) };
        let next = self.vmas.next_from(old.end, &layout.locked);
        let is_free =
            grown.end <= self.arena().end && next.is_none_or(|next| next.range.start >= grown.end);
        if is_free {
            self.install(layout, grown, attributes.prot)?;
            let _ = self.vmas.change_attributes(grown, &layout.locked, |_| attributes);
            return Ok(old.start);
        }
        if placement == Placement::InPlace {
            return Err(Errno::NOMEM);
        }
        let start = self.find_room(layout, None, pages)?;
        self.move_mapping(layout, old, PageRange::new(start, pages), attributes)
    }

    /// Begins a remap: what is too much is unmapped, be it several mappings. What is left has to be one where it
    /// is to move or to grow.
    ///
    /// # Errors
    /// As for [`Self::remap`].
    pub(crate) fn cut_for_remap(
        &self,
        layout: &mut Layout<'_>,
        old: PageRange,
        pages: usize,
        placement: Placement,
    ) -> Result<PageRange, Errno> {
        let moves = matches!(placement, Placement::At(_));
        if let Placement::At(start) = placement
            && start < old.end
            && old.start < start.add(pages)
        {
            return Err(Errno::INVAL);
        }
        let vma = self.next_vma(layout, old.start).filter(|vma| vma.range.contains(old.start));
        let vma = vma.ok_or(Errno::FAULT)?;
        if old.is_empty() {
            // A second mapping of the same pages, which only shared ones can have.
            return Err(Errno::INVAL);
        }
        let kept = PageRange::new(old.start, old.len().min(pages));
        if (moves || pages > old.len()) && vma.range.end < kept.end {
            return Err(Errno::FAULT);
        }
        if kept.len() < old.len() {
            self.unmap(layout, PageRange { start: kept.end, ..old })?;
        }
        Ok(kept)
    }

    fn move_mapping(
        &self,
        layout: &mut Layout<'_>,
        old: PageRange,
        target: PageRange,
        attributes: Attributes,
    ) -> Result<PageNum, Errno> {
        // Pages move with both sides readable and writable; their own rights come back at the
        // end. An access to the source meanwhile races with an unmap; one to the target, by an old
        // address or from another thread, finds zeros where its page has not come yet.
        self.install(layout, target, Prot::READ_WRITE)?;
        self.vmas.change_attributes(target, &layout.locked, |_| Attributes {
            prot: Prot::READ_WRITE,
            ..attributes
        })?;
        if !attributes.prot.is_movable() {
            let _ = self.mmu.protect(old, Prot::READ_WRITE);
        }
        let kept = PageRange::new(old.start, old.len().min(target.len()));
        for part in self.used_parts(kept) {
            for page in part.pages() {
                let to = target.start.add((page.0 - old.start.0) as usize);
                while !self.try_move_page(page, to) {
                    self.bring_in(layout, page);
                }
            }
        }
        if !attributes.prot.is_movable() {
            let _ = self.mmu.protect(target, attributes.prot);
            self.vmas.change_attributes(target, &layout.locked, |_| attributes)?;
        }
        self.unmap(layout, old)?;
        Ok(target.start)
    }

    /// Moves one page's content to another address; `false` where the page has to be brought in first.
    /// Runs of mapped pages would be fewer calls, but every page's word has to be looked at all the same.
    fn try_move_page(&self, from: PageNum, to: PageNum) -> bool {
        let mut from = self.lock_page(from);
        // The swap file names the old address in its header.
        if matches!(from.state(), State::None | State::File) {
            return from.state() == State::None;
        }
        if !self.use_block(to) {
            // One page of tables more than there is room for: the content must go somewhere.
            self.use_block_anyway(to);
        }
        let mut to = self.lock_page(to);
        if to.state() != State::None {
            // A fault has come before us, for an address that was not in use yet: its zeros go. They
            // would stay mapped under the word that the page brings, or not let it in at all.
            self.drop_locked(&mut to);
        }
        match from.state() {
            State::Mapped => {
                from = self.lift_clean_of(from);
                if !self.move_mapped(&from, to.page()) {
                    if let Some(mut lost) = self.drop_if_missing(from) {
                        // The mark of a memory error, which does not move.
                        self.drop_locked(&mut lost);
                        let _ = self.mmu.poison(to.page());
                        self.budget.add_wanted(1);
                        to.poison();
                    }
                    return true;
                }
            }
            State::Pool => {
                if let Some(handle) = Handle::new(from.content().payload()) {
                    let owner = (from.page(), to.page());
                    // SAFETY: both pages are locked, and the new handle takes the old one's place.
                    let moved = unsafe {
                        self.swap.zpool.set_owner(handle, owner.0, owner.1, &self.budget)
                    };
                    // It takes memory that may not be there.
                    let Ok(handle) = moved else { return false };
                    from.rename_locked(handle.get());
                }
            }
            State::Limbo => {
                self.frames.set_owner(FrameId(from.content().payload()), to.page());
            }
            State::Poisoned => {
                let _ = self.mmu.poison(to.page());
                self.mmu.unmap(PageRange::new(from.page(), 1));
            }
            _ => {}
        }
        from.move_to(to);
        true
    }

    /// Moves what is mapped; `false` where nothing is that can be moved.
    fn move_mapped(&self, page: &LockedPage<'_, Self>, to: PageNum) -> bool {
        let (from, before) = (page.page(), page.content());
        let one = PageRange::new(from, 1);
        // A protected page cannot be made exclusive: the kernel would send the fault to us, and
        // we hold the page. Without a fork it is so already.
        let has_forked = self.has_forked.load(Ordering::Relaxed);
        let mut may_own = has_forked && !before.has(Flags::WRITE_PROTECTED);
        loop {
            match self.mmu.move_within(one, to).refusal {
                None => break,
                Some(Refusal::Hole) => return false,
                Some(_) => {}
            }
            if core::mem::take(&mut may_own) && self.mmu.make_exclusive(one).refusal.is_none() {
                continue;
            }
            if self.copy_mapped(from, to) {
                self.mmu.unmap(one);
                break;
            }
            // The kernel's layout is changing just now; the content must not get lost.
            rustix::thread::sched_yield();
        }
        if before.has(Flags::WRITE_PROTECTED) {
            let _ = self.mmu.write_protect(PageRange::new(to, 1), Protection::WriteProtected);
        }
        self.count_unmapped(from, 1);
        self.count_mapped(to, 1);
        true
    }

    /// Copies a page that does not move, for it is pinned (or shared, and protected): its bytes go to the new
    /// address, the page itself stays with what holds it. `false` where it is to be tried again.
    fn copy_mapped(&self, from: PageNum, to: PageNum) -> bool {
        let mut bytes = [0u8; PAGE_SIZE];
        let target = PageRange::new(to, 1);
        let is_read = self.mmu.read(from, &mut bytes);
        // SAFETY: `bytes` is a page on our stack.
        let done = unsafe { self.mmu.copy_in(target, bytes.as_ptr(), Protection::Writable) };
        if done.pages > 0 && !is_read {
            // What was copied was not the page.
            self.mmu.unmap(target);
        }
        is_read && done.pages > 0
    }

    /// Makes a page resident, waiting for whatever it takes. For program threads.
    pub(super) fn bring_in(&self, layout: &mut Layout<'_>, page: PageNum) -> bool {
        loop {
            match self.snapshot(page).state() {
                State::Mapped => return true,
                State::Poisoned => return false,
                _ => {}
            }
            match self.fault_as_owner(page, Access::Read, &mut layout.scratch) {
                Outcome::Served | Outcome::Spurious => {}
                Outcome::NoVma | Outcome::Poisoned | Outcome::Unfilled => return false,
                Outcome::Parked => {
                    // The page is locked, or there is no memory: wait for the one, give the
                    // other time.
                    self.lock_page(page).unlock();
                    if self.has_starved() {
                        self.mmu.relax();
                    }
                }
            }
        }
    }
}
