//! remap: a mapping gets another length, in its place or elsewhere.
//!
//! What is shorter is unmapped at its end, as [`super::map`] does it. What is longer grows where
//! nothing is behind it; else there is a new mapping, and the old one goes: nothing is moved, the
//! cache has the bytes, and faults map them anew. A private mapping's own pages are moved by the
//! space, and the object's pages that it stands for are counted from its new place.

use super::i_mmap::ObjectMapping;
use super::{FaultAround, MapRequest, ObjectId, Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::space::Layout;
use crate::space::remap::Placement;
use crate::space::vma::{Attributes, Backing, Kind, Pattern, Vma};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageNum, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// Gives a whole mapping a length of `pages`, not 0; returns where it is from now on.
    ///
    /// # Errors
    /// `NOMEM` where there is no room, in its place or at all; `INVAL` where the object can never
    /// have so many pages. The mapping is as it was then.
    pub fn remap(
        &self,
        range: PageRange,
        pages: usize,
        placement: Placement,
    ) -> Result<PageRange, Errno> {
        let space = &self.space;
        let mut layout = space.lock();
        let vma = space.next_vma(&layout, range.start).ok_or(Errno::INVAL)?;
        let backing = vma.attributes.backing;
        let object = self.object(ObjectId(backing.object));
        let end = backing.object_page(range.start).index() + pages;
        if pages == 0 || end > object.pages_max {
            return Err(Errno::INVAL);
        }
        if vma.attributes.kind == Kind::Private {
            return self.remap_private(&mut layout, range, pages, placement, &vma);
        }
        let target = PageRange::new(range.start, pages);
        if pages <= range.len() {
            self.shrink_mapping(&mut layout, object, range, pages)?;
            return Ok(target);
        }
        match self.grow_mapping(&mut layout, object, range, pages) {
            Ok(()) => Ok(target),
            Err(error) if placement == Placement::InPlace => Err(error),
            Err(_) => {
                drop(layout);
                self.map_elsewhere(range, pages, &vma)
            }
        }
    }

    /// Takes the end of a shared mapping away.
    fn shrink_mapping(
        &self,
        layout: &mut Layout<'_>,
        object: &VmObject,
        range: PageRange,
        pages: usize,
    ) -> Result<(), Errno> {
        let space = &self.space;
        let tail = PageRange { start: range.start.add(pages), end: range.end };
        let Some(vma) = space.next_vma(layout, tail.start).filter(|_| !tail.is_empty()) else {
            return Ok(());
        };
        // The VMA first: a fault that holds a window's lock later sees that it is gone.
        space.vmas.remove(tail, &layout.locked)?;
        self.unmap_windows(tail);
        self.resize_mapping(object, range, vma.attributes.backing, pages);
        space.mmu().reserve_again(tail);
        space.budget().add_managed(-(tail.len() as isize));
        Ok(())
    }

    /// Makes a shared mapping longer where it is.
    fn grow_mapping(
        &self,
        layout: &mut Layout<'_>,
        object: &VmObject,
        range: PageRange,
        pages: usize,
    ) -> Result<(), Errno> {
        let space = &self.space;
        let grown = PageRange { start: range.end, end: range.start.add(pages) };
        let is_free = grown.end <= space.arena().end && !space.is_mapped(layout, grown);
        // It goes on as its end does, of which advice may have made a VMA of its own.
        let last = space.next_vma(layout, PageNum(range.end.0 - 1)).filter(|_| is_free);
        let last = last.ok_or(Errno::NOMEM)?;
        let attributes = last.attributes;
        let set_pages = |pages| self.resize_mapping(object, range, attributes.backing, pages);
        // Before anything can be mapped there.
        set_pages(pages);
        let first = attributes.backing.object_page(grown.start);
        let made = space.mmu().map_object(grown, object.memfd, first, attributes.prot);
        let made = made.and_then(|()| space.insert_vma(layout, grown, attributes));
        if made.is_err() {
            space.mmu().reserve_again(grown);
            set_pages(range.len());
            return made;
        }
        space.budget().add_managed(grown.len() as isize);
        Ok(())
    }

    /// Changes how many pages the reverse map has of the mapping at `range`.
    fn resize_mapping(&self, object: &VmObject, range: PageRange, backing: Backing, pages: usize) {
        let mut tree = object.i_mmap.i_mmap_lock_write(&self.i_mmaps);
        let shown = backing.object_range(range);
        let found = tree.overlapping(shown).find(|(_, other)| other.id == backing.mapping);
        let resized = found.and_then(|(node, mapping)| {
            let pages = ObjectRange::new(mapping.pages.start, pages);
            tree.change(node, ObjectMapping { pages, ..mapping })
        });
        debug_assert!(resized.is_some(), "every mapping is in its object's tree");
    }

    /// Maps what `range` shows, and what follows it, at another place, and unmaps it there.
    fn map_elsewhere(&self, range: PageRange, pages: usize, vma: &Vma) -> Result<PageRange, Errno> {
        let Attributes { backing, prot, .. } = vma.attributes;
        let order = self.mappings.order_around(backing.mapping);
        let request = MapRequest {
            pages: ObjectRange::new(backing.object_page(range.start), pages),
            prot,
            pattern: Pattern::Normal,
            fault_around: order.map_or(FaultAround::Auto, FaultAround::Order),
        };
        let target = self.map(ObjectId(backing.object), request)?;
        let space = &self.space;
        let mut at = range.start;
        while at < range.end {
            let Some(part) = space.next_vma(&space.lock(), at) else { break };
            at = part.range.end;
            let moved = target.start.add((part.range.start.0 - range.start.0) as usize);
            let there = PageRange::new(moved, part.range.len());
            // Advice is no more than that.
            let _ = self.advise_pattern(there, part.attributes.pattern);
        }
        self.unmap(range);
        Ok(target)
    }

    /// The same for a private mapping.
    fn remap_private(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        pages: usize,
        placement: Placement,
        vma: &Vma,
    ) -> Result<PageRange, Errno> {
        let attributes = vma.attributes;
        // One VMA again: advice may have split it.
        let pattern = attributes.pattern;
        self.space.change_vmas(layout, range, |old| Attributes { pattern, ..old })?;
        let start = self.space.remap(layout, range, pages, placement)?;
        let target = PageRange::new(start, pages);
        self.move_private_pins(range, target);
        if start != range.start {
            let backing = attributes.backing;
            let delta = backing.delta.wrapping_add(range.start.0).wrapping_sub(start.0);
            let backing = Backing { delta, ..backing };
            let moved = self.space.change_vmas(layout, target, |old| Attributes { backing, ..old });
            debug_assert!(moved.is_ok(), "no split, and the move has done the same just before");
        }
        Ok(target)
    }
}
