//! Mappings of objects come and go.

use super::i_mmap::ObjectMapping;
use super::{FaultAround, ObjectId, Objects};
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::Layout;
use crate::space::vma::{Attributes, Backing, Kind, Pattern, Vma};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageNum, PageRange};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapRequest {
    pub pages: ObjectRange,
    pub prot: Prot,
    pub pattern: Pattern,
    pub fault_around: FaultAround,
}

impl<M: ObjectMmu> Objects<M> {
    /// Maps pages of an object that the caller keeps in use, where there is room; the mapping is
    /// a user of its own.
    ///
    /// # Errors
    /// `NOMEM` where the arena, the VMA table or the kernel has no room; `INVAL` for no page, or
    /// one that the object can never have.
    pub fn map(&self, id: ObjectId, request: MapRequest) -> Result<PageRange, Errno> {
        let object = self.object(id);
        let MapRequest { pages, prot, .. } = request;
        let space = &self.space;
        let mut layout = space.lock();
        let (range, attributes) = self.place_mapping(&layout, request, id, Kind::Object)?;
        let mapping = attributes.backing.mapping;
        let made = space
            .mmu()
            .map_object(range, object.memfd, pages.start, prot)
            .and_then(|()| space.insert_vma(&mut layout, range, attributes));
        // A fault that came before the mapping is in the tree would map in a window that no walk finds;
        // but no thread knows the address before this returns.
        let made = made.and_then(|()| {
            let mapping = ObjectMapping { pages, arena_start: range.start, id: mapping };
            object.i_mmap.i_mmap_lock_write(&self.i_mmaps).insert(mapping).map(drop)
        });
        if let Err(error) = made {
            space.remove_whole_vmas(&mut layout, range);
            space.mmu().reserve_again(range);
            self.mappings.numbers.give_back(mapping);
            return Err(error);
        }
        self.get(id);
        space.budget().add_managed(range.len() as isize);
        Ok(range)
    }

    /// Finds room for a mapping, and takes a number for it, which is given back with it.
    pub(super) fn place_mapping(
        &self,
        layout: &Layout<'_>,
        request: MapRequest,
        id: ObjectId,
        kind: Kind,
    ) -> Result<(PageRange, Attributes), Errno> {
        let MapRequest { pages, prot, pattern, fault_around } = request;
        if pages.is_empty() || pages.end.index() > self.object(id).pages_max {
            return Err(Errno::INVAL);
        }
        let range = self.space.find_room_like(layout, pages.len(), pages.start)?;
        let delta = pages.start.0.wrapping_sub(range.start.0);
        let mapping = self.mappings.take(fault_around)?;
        let backing = Backing { object: id.0, mapping, delta };
        Ok((range, Attributes { kind, pattern, backing, ..Attributes::anonymous(prot) }))
    }

    pub fn unmap(&self, range: PageRange) {
        let space = &self.space;
        let mut layout = space.lock();
        let Some(vma) = space.next_vma(&layout, range.start) else { return };
        // Advice may have split it.
        debug_assert_eq!(vma.range.start, range.start);
        if vma.attributes.kind == Kind::Private {
            drop(layout);
            return self.unmap_private(range, vma.attributes.backing);
        }
        let backing = vma.attributes.backing;
        let id = ObjectId(backing.object);
        // The VMA first: a fault that holds a window's lock later sees that it is gone.
        space.remove_whole_vmas(&mut layout, range);
        self.unmap_windows(range);
        {
            let mut tree = self.object(id).i_mmap.i_mmap_lock_write(&self.i_mmaps);
            let pages = backing.object_range(range);
            let node = tree.overlapping(pages).find(|(_, other)| other.id == backing.mapping);
            let removed = node.and_then(|(node, _)| tree.remove(node));
            debug_assert!(removed.is_some(), "every mapping is in its object's tree");
        }
        self.mappings.numbers.give_back(backing.mapping);
        space.mmu().reserve_again(range);
        space.budget().add_managed(-(range.len() as isize));
        drop(layout);
        self.put(id);
    }

    /// Unmaps what windows have of a range that no VMA has any more.
    pub(super) fn unmap_windows(&self, range: PageRange) {
        for part in range.by_block() {
            self.unmap_present(&mut self.windows.lock(part.start), part);
        }
    }

    /// Changes how much is mapped around the faults of the mapping at a page.
    pub fn set_fault_around(&self, page: PageNum, fault_around: FaultAround) {
        let Some(Vma { attributes, .. }) = self.space.find_vma(page) else { return };
        if matches!(attributes.kind, Kind::Object | Kind::Private) {
            self.mappings.set_fault_around(attributes.backing.mapping, fault_around);
        }
    }

    /// How many pages of a range are mapped just now.
    pub fn present_pages(&self, range: PageRange) -> usize {
        let present = |part: PageRange| {
            let window = self.windows.lock(part.start);
            part.pages().filter(|&page| window.is_present(page)).count()
        };
        range.by_block().map(present).sum()
    }

    /// Says how a part of a mapping will be used; `NOMEM` where the VMA table is full.
    pub fn advise_pattern(&self, range: PageRange, pattern: Pattern) -> Result<(), Errno> {
        let change = |old| Attributes { pattern, ..old };
        self.space.change_vmas(&mut self.space.lock(), range, change)
    }
}
