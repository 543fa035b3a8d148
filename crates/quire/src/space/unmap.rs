//! unmap: ranges leave the program, and pages their content.

use super::release::Releases;
use super::vma::Kind;
use super::{Layout, VmSpace};
use crate::mmu::{Mmu, Prot};
use crate::page::{LockedPage, Snapshot, State};
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

/// What is mapped in a range that is to be unmapped.
#[derive(Clone, Copy, Default)]
pub(super) struct MappedPages {
    managed: usize,
    /// Of the managed pages, those that can be written.
    writable: usize,
    pub has_foreign: bool,
}

impl MappedPages {
    pub const fn is_nothing(self) -> bool {
        self.managed == 0 && !self.has_foreign
    }
}

/// Locked pages of one block that are dropped together.
struct Run {
    range: PageRange,
    mapped: usize,
    is_poisoned: bool,
    releases: Releases,
}

impl Run {
    fn at(page: PageNum) -> Run {
        let range = PageRange { start: page, end: page };
        Run { range, mapped: 0, is_poisoned: false, releases: Releases::NONE }
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Unmaps a range: its pages are gone, and an access is a SIGSEGV from now on. The kernel's rights
    /// may stay (see [`super::rights`]), so that neither this nor the next map changes its mappings.
    /// The space stays locked; [`Self::unmap_and_unlock`] is for a caller that needs it no more.
    ///
    /// # Errors
    /// `NOMEM` where a VMA would have to be split and the table is full; nothing has changed then.
    /// `BUSY` where an object is mapped shared.
    pub fn unmap(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        let found = self.look_over(layout, range)?;
        if found.is_nothing() {
            return Ok(());
        }
        if found.has_foreign {
            // Whatever the program mapped there goes, and our reservation comes back.
            for vma in self.vmas_in(layout, range) {
                if vma.attributes.kind == Kind::Foreign {
                    self.mmu.reserve_again(vma.range.intersect(range));
                }
            }
        }
        self.vmas.remove(range, &layout.locked)?;
        self.drop_pages(range);
        self.settle_unmapped(layout, range, found);
        Ok(())
    }

    pub(super) fn look_over(
        &self,
        layout: &Layout<'_>,
        range: PageRange,
    ) -> Result<MappedPages, Errno> {
        let mut found = MappedPages::default();
        for vma in self.vmas_in(layout, range) {
            let pages = vma.range.intersect(range).len();
            match vma.attributes.kind {
                Kind::Anonymous | Kind::Private => {
                    found.managed += pages;
                    if vma.attributes.prot == Prot::READ_WRITE {
                        found.writable += pages;
                    }
                }
                Kind::Foreign => found.has_foreign = true,
                // Objects know where they are mapped shared: `Objects::unmap` takes them out before.
                Kind::Object => return Err(Errno::BUSY),
                Kind::Dying => debug_assert!(false, "{range:?} was not locked over"),
            }
        }
        Ok(found)
    }

    /// A range has neither VMA nor pages any more.
    pub(super) fn settle_unmapped(
        &self,
        layout: &Layout<'_>,
        range: PageRange,
        found: MappedPages,
    ) {
        // Faults that are on their way find no VMA: it is sealed, and they are answered.
        self.leave_rights(layout, range, found.writable == range.len());
        self.budget.add_managed(-(found.managed as isize));
    }

    /// Drops the content of all pages of a range: they read as zeros. The VMAs stay.
    pub(super) fn drop_pages(&self, range: PageRange) {
        for part in self.used_parts(range) {
            let mut run = Run::at(part.start);
            for page in part.pages() {
                self.mmu.step();
                let locked = self.try_lock_page(page).unwrap_or_else(|| {
                    // A thread that sleeps has no other page: a reader that has this one may wait for
                    // memory, and several that drop pages could have locked all there is to take.
                    self.drop_run(core::mem::replace(&mut run, Run::at(page)));
                    self.lock_page(page)
                });
                run.mapped += usize::from(locked.state() == State::Mapped);
                run.is_poisoned |= locked.state() == State::Poisoned;
                self.add_backing(&mut run.releases, locked.content());
                run.range.end = locked.leave_locked().add(1);
            }
            self.drop_run(run);
        }
    }

    fn drop_run(&self, run: Run) {
        let Run { range, mapped, is_poisoned, releases } = run;
        self.release(releases);
        if mapped > 0 || is_poisoned {
            self.mmu.unmap(range);
            self.count_unmapped(range.start, mapped);
            self.budget.uncharge(mapped);
        }
        for page in range.pages() {
            self.adopt_page(page).drop_content();
        }
    }

    /// Drops the content of one page, which stays locked.
    pub(crate) fn drop_locked(&self, page: &mut LockedPage<'_, Self>) {
        self.release_backing(page.content());
        let is_mapped = page.state() == State::Mapped;
        if is_mapped || page.state() == State::Poisoned {
            self.mmu.unmap(PageRange::new(page.page(), 1));
        }
        if is_mapped {
            self.count_unmapped(page.page(), 1);
            self.budget.uncharge(1);
        }
        page.drop_content_locked();
    }

    /// Drops the content of a mapped page where the program has dropped it by a bare system call;
    /// returns it where not.
    pub(crate) fn drop_if_missing<'a>(
        &'a self,
        mut page: LockedPage<'a, Self>,
    ) -> Option<LockedPage<'a, Self>> {
        let mut is_missing = [true];
        self.mmu.find_missing(PageRange::new(page.page(), 1), &mut is_missing);
        if !is_missing[0] {
            return Some(page);
        }
        self.drop_locked(&mut page);
        None
    }

    /// Lets go of what a locked page has besides its mapping.
    pub(crate) fn release_backing(&self, before: Snapshot) {
        let mut releases = Releases::NONE;
        self.add_backing(&mut releases, before);
        self.release(releases);
    }
}
