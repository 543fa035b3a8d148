//! Private mappings come and go, and follow their object.

use core::sync::atomic::Ordering;

use super::{MapRequest, ObjectId, Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::space::vma::{Backing, Kind};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageNum, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// Maps pages of an object that the caller keeps in use as a private copy; the mapping is a
    /// user of its own. Errors are as for [`Self::map`].
    pub fn map_private(&self, id: ObjectId, request: MapRequest) -> Result<PageRange, Errno> {
        let (object, space) = (self.object(id), &self.space);
        let mut layout = space.lock();
        let (range, attributes) = self.place_mapping(&layout, request, id, Kind::Private)?;
        if let Err(error) = space.install_with(&mut layout, range, attributes) {
            self.mappings.numbers.give_back(attributes.backing.mapping);
            return Err(error);
        }
        self.get(id);
        // SeqCst: before any fault in it looks at the length; see `follow_change`.
        object.privates.fetch_add(1, Ordering::SeqCst);
        Ok(range)
    }

    pub(super) fn unmap_private(&self, range: PageRange, backing: Backing) {
        let layout = self.space.lock();
        // Before another mapping can have the range.
        self.forget_private_pins(range);
        let unmapped = self.space.unmap_and_unlock(layout, range);
        debug_assert!(unmapped.is_ok(), "whole VMAs go without a split");
        self.mappings.numbers.give_back(backing.mapping);
        self.object(ObjectId(backing.object)).privates.fetch_sub(1, Ordering::SeqCst);
        self.put(ObjectId(backing.object));
    }

    /// Pages of an object are others by now, because it has another length or bad ones were given
    /// up: of its private mappings what could not be had can be asked for again, and what was not
    /// written goes. Waits for the space's lock, with none in hand.
    pub(super) fn follow_change(&self, object: &VmObject, changed: ObjectRange) {
        // SeqCst: after the change of the length. Either the mapping is seen here, or its faults see the new length.
        if changed.is_empty() || object.privates.load(Ordering::SeqCst) == 0 {
            return;
        }
        let space = &self.space;
        let layout = space.lock();
        let mut at = PageNum(0);
        while let Some(vma) = space.next_vma(&layout, at) {
            at = vma.range.end;
            let backing = vma.attributes.backing;
            let is_private = vma.attributes.kind == Kind::Private;
            if !is_private || ObjectId(backing.object) != object.id {
                continue;
            }
            let shown = backing.object_range(vma.range);
            let part = shown.intersect(changed);
            if !part.is_empty() {
                let start = PageNum(part.start.0.wrapping_sub(backing.delta));
                space.drop_unwritten(PageRange::new(start, part.len()));
            }
        }
    }
}
