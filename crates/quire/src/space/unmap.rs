//! unmap: ranges leave the program, and pages their content.

use super::vma::Kind;
use super::{AddressSpace, Layout};
use crate::mmu::{FrameId, FrameRun, Mmu, Prot};
use crate::page::{Snapshot, State};
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

impl<M: Mmu> AddressSpace<M> {
    /// Unmaps a range: its pages are gone, and an access is a SIGSEGV from now on. The kernel's rights
    /// may stay (see [`super::rights`]), so that neither this nor the next map changes its mappings.
    ///
    /// # Errors
    /// `NOMEM` where a VMA would have to be split and the table is full; nothing has changed then.
    pub fn unmap(&self, layout: &mut Layout<'_>, range: PageRange) -> Result<(), Errno> {
        let mut managed = 0;
        let mut at = range.start;
        let mut had_any = false;
        let mut writable = 0;
        while at < range.end {
            let next = self.vmas.next_from(at, &layout.locked);
            let Some(vma) = next.filter(|vma| vma.range.start < range.end) else { break };
            let part = vma.range.intersect(range);
            had_any = true;
            at = part.end;
            match vma.attributes.kind {
                Kind::Anonymous | Kind::Private => {
                    managed += part.len();
                    if vma.attributes.prot == Prot::READ_WRITE {
                        writable += part.len();
                    }
                }
                // Whatever the program mapped there goes, and our reservation comes back.
                Kind::Foreign => self.mmu.reserve_again(part),
                // Objects know where they are mapped shared: `Objects::unmap` takes them out before.
                Kind::Object => return Err(Errno::BUSY),
            }
        }
        if !had_any {
            return Ok(());
        }
        self.vmas.remove(range, &layout.locked)?;
        self.drop_pages(range);
        // Faults that are on their way find no VMA: it is sealed, and they are answered.
        self.leave_rights(layout, range, writable == range.len());
        self.budget.add_managed(-(managed as isize));
        Ok(())
    }

    /// Drops the content of all pages of a range: they read as zeros. The VMAs stay.
    pub(super) fn drop_pages(&self, range: PageRange) {
        for part in self.used_parts(range) {
            let mut mapped = 0;
            let mut is_poisoned = false;
            for page in part.pages() {
                // Sleeps: whoever holds a page lock needs nothing that we hold.
                let before = self.lock_page(page);
                mapped += usize::from(before.state() == State::Mapped);
                is_poisoned |= before.state() == State::Poisoned;
                self.release_backing(before);
            }
            if mapped > 0 || is_poisoned {
                self.mmu.unmap(part);
                self.count_unmapped(part.start, mapped);
                self.budget.uncharge(mapped);
            }
            for page in part.pages() {
                self.unlock_page_with(page, Snapshot::new(State::None, 0));
            }
        }
    }

    /// Drops the content of one locked page, which was `before`; its word is the caller's to set.
    pub(super) fn drop_locked(&self, page: PageNum, before: Snapshot) {
        self.release_backing(before);
        let is_mapped = before.state() == State::Mapped;
        if is_mapped || before.state() == State::Poisoned {
            self.mmu.unmap(PageRange::new(page, 1));
        }
        if is_mapped {
            self.count_unmapped(page, 1);
            self.budget.uncharge(1);
        }
    }

    /// Lets go of what a locked page has besides its mapping.
    pub(crate) fn release_backing(&self, before: Snapshot) {
        let free_blob = |number: u32| {
            // SAFETY: the page is locked, and its word is about to forget the handle.
            unsafe { self.swap.free_blob(number, &self.budget) };
        };
        match before.state() {
            State::None => return,
            State::Mapped => self.release_kept(before),
            State::Limbo => {
                let frame = FrameId(before.payload());
                let copy = self.frames.copy_of(frame);
                if copy != 0 {
                    self.swap.forget_copy();
                    free_blob(copy);
                }
                let run = FrameRun { start: frame, len: 1 };
                self.frames.leave_limbo(run);
                self.frames.put(run);
            }
            State::Pool => free_blob(before.payload()),
            State::File => self.swap.free_location(before.payload()),
            _ => {}
        }
        self.budget.add_wanted(-1);
    }
}
