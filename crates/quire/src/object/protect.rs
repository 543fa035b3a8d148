//! protect: a mapping gets other rights.
//!
//! The VMA first, then the rights themselves: the kernel holds them against what is mapped already,
//! and against what a fault maps that has seen the old ones. Nothing has to be unmapped, and O2 is not
//! touched: what a window has as writable is DIRTY, whatever the rights, and is protected by the next
//! write-back as ever.
//!
//! Locks: the space's.

use super::Objects;
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::Layout;
use crate::space::vma::{Attributes, Kind};
use crate::sys::Errno;
use crate::units::PageRange;

impl<M: ObjectMmu> Objects<M> {
    /// Gives a whole mapping, as [`Self::map`] and its like returned it, other rights.
    ///
    /// # Errors
    /// `NOMEM`, and nothing has changed.
    pub fn protect(&self, range: PageRange, prot: Prot) -> Result<(), Errno> {
        let space = &self.space;
        let mut layout = space.lock();
        let vma = space.next_vma(&layout, range.start).ok_or(Errno::NOMEM)?;
        let before = vma.attributes.prot;
        if before == prot {
            return Ok(());
        }
        if vma.attributes.kind == Kind::Private {
            return space.protect(&mut layout, range, prot);
        }
        let changed = self.set_rights(&mut layout, range, prot);
        if changed.is_err() {
            // Where it is refused as well the rights are those of the VMA all the same, or fewer.
            let _ = self.set_rights(&mut layout, range, before);
        }
        changed
    }

    fn set_rights(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        self.space.change_vmas(layout, range, |old| Attributes { prot, ..old })?;
        let done = self.space.mmu().protect(range, prot);
        if done.refusal.is_some() { Err(Errno::NOMEM) } else { Ok(()) }
    }
}
