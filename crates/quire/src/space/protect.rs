//! protect: other rights for a range.

use super::vma::Attributes;
use super::{Layout, VmSpace};
use crate::mmu::{Mmu, Prot};
use crate::page::{Flags, LockedRange, State};
use crate::sys::Errno;
use crate::units::PageRange;

impl<M: Mmu> VmSpace<M> {
    /// Gives a range other rights.
    ///
    /// Pages of ranges that lose the right to write go to limbo first: there the kernel would
    /// refuse to move them, and only a move can tell whether the kernel still holds a page
    /// (pinned). One that it holds, or that is locked in memory, stays, and is not evicted while it cannot
    /// be moved.
    ///
    /// # Errors
    /// `NOMEM` where part of the range is not mapped, or the kernel refuses.
    pub fn protect(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        self.check_covered(layout, range)?;
        let gains = prot.is_movable();
        if gains && self.mmu.protect(range, prot).refusal.is_some() {
            return Err(Errno::NOMEM);
        }
        let loses =
            !gains && self.vmas_in(layout, range).any(|vma| vma.attributes.prot.is_movable());
        self.change_vmas(layout, range, |old| Attributes { prot, ..old })?;
        if loses {
            for part in self.used_parts(range) {
                self.move_to_limbo(part, Flags::EMPTY, Flags::PINNED);
            }
        }
        if !gains && self.mmu.protect(range, prot).refusal.is_some() {
            return Err(Errno::NOMEM);
        }
        Ok(())
    }

    /// Moves what is mapped in a part of a block to limbo, but for what is locked in memory; sets `gone` on
    /// pages that went and `stayed` on the others. Sleeps for page locks.
    pub(super) fn move_to_limbo(&self, part: PageRange, gone: Flags, stayed: Flags) {
        let move_run = |run: Option<LockedRange<'_, Self>>| {
            let Some(mut run) = run else { return };
            self.lift_clean(&mut run);
            self.move_locked_to_limbo(run, gone, stayed);
        };
        let mut run: Option<LockedRange<'_, Self>> = None;
        for page in part.pages() {
            let page = self.lock_page(page);
            if page.state() != State::Mapped || page.has(Flags::MLOCKED) {
                match page.state() {
                    // Whether the kernel holds it is not known.
                    State::Mapped => page.set_flags(stayed),
                    _ => page.unlock(),
                }
                move_run(run.take());
                continue;
            }
            match &mut run {
                Some(run) => run.push(page),
                None => run = Some(LockedRange::of(page)),
            }
        }
        move_run(run);
    }
}
