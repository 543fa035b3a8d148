//! protect: a mapping gets other rights.
//!
//! The VMA first, then the rights themselves: the kernel checks them for what is mapped already, and for
//! what a fault maps that has seen the old ones. So nothing has to be unmapped.

use super::Objects;
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::vma::{Attributes, Kind};
use crate::sys::Errno;
use crate::units::PageRange;

impl<M: ObjectMmu> Objects<M> {
    /// Gives a whole mapping, as [`Self::map`] and its like returned it, other rights. After an error,
    /// `NOMEM`, nothing has changed.
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
        let mut set_rights = |prot| {
            space.change_vmas(&mut layout, range, |old| Attributes { prot, ..old })?;
            let done = space.mmu().protect(range, prot);
            if done.refusal.is_some() { Err(Errno::NOMEM) } else { Ok(()) }
        };
        let changed = set_rights(prot);
        if changed.is_err() {
            // Where it is refused as well the rights are those of the VMA all the same, or fewer.
            let _ = set_rights(before);
        }
        changed
    }
}
