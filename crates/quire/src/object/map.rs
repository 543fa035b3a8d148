//! Mappings of objects come and go.

use core::sync::atomic::Ordering;

use super::hosts::Guest;
use super::i_mmap::Mapping;
use super::large::LargeFrame;
use super::{FaultAround, ObjectId, Objects};
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::hosts::{HostId, local, local_range};
use crate::space::vma::{Attributes, Backing, Kind, Pattern};
use crate::space::{AddressSpace, Layout};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageNum, PageRange};

/// How an object is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapRequest {
    /// The object's pages.
    pub pages: ObjectRange,
    /// Rights.
    pub prot: Prot,
    /// How it will be used.
    pub pattern: Pattern,
    /// How much is mapped around a fault.
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
        self.map_at(self, &Guest::at_home(id), id, request)
    }

    /// The same in the arena of another space. What is returned are away pages, which are for this
    /// space to unmap, populate, and whatever else is done to a mapping.
    ///
    /// # Errors
    /// As for [`Self::map`]; `NFILE` where this space or that has too many neighbours.
    ///
    /// # Safety
    /// Both spaces stay where they are until [`Self::part`] has returned for one of them.
    pub unsafe fn map_in(
        &self,
        host: &Objects<M>,
        id: ObjectId,
        request: MapRequest,
    ) -> Result<PageRange, Errno> {
        if core::ptr::eq(self, host) {
            return self.map(id, request);
        }
        // SAFETY: the caller's promise.
        let guest = unsafe { self.meet(host, id) }?;
        self.map_at(host, &guest, id, request)
    }

    /// Maps an object where a host that has met this space calls it a guest, or at home.
    pub(super) fn map_at(
        &self,
        host: &Objects<M>,
        guest: &Guest,
        id: ObjectId,
        request: MapRequest,
    ) -> Result<PageRange, Errno> {
        let object = self.object(id);
        let away = usize::from(!guest.host.is_home());
        // Before any fault there; see `try_charge_run`.
        object.away.fetch_add(away, Ordering::Relaxed);
        self.map_counted(host, guest, id, request).inspect_err(|_| {
            object.away.fetch_sub(away, Ordering::Relaxed);
        })
    }

    fn map_counted(
        &self,
        host: &Objects<M>,
        guest: &Guest,
        id: ObjectId,
        request: MapRequest,
    ) -> Result<PageRange, Errno> {
        let object = self.object(id);
        let MapRequest { pages, prot, .. } = request;
        let space = &host.space;
        let mut layout = space.lock();
        let (range, attributes) =
            self.place_mapping(space, &layout, guest, request, id, Kind::Object)?;
        let mapping = attributes.backing.mapping;
        let made = space
            .mmu()
            .map_object(range, object.home, pages.start, prot)
            .and_then(|()| space.insert_vma(&mut layout, range, attributes));
        // A fault that maps something before it is in the tree does so in a window that nobody
        // walks yet: nobody knows the address before this returns.
        let seen = guest.host.away_range(range);
        let made = made.and_then(|()| {
            let mapping = Mapping { pages, arena_start: seen.start, prot, id: mapping };
            object.i_mmap.i_mmap_lock_write(&self.i_mmaps).insert(mapping).map(drop)
        });
        if let Err(error) = made {
            space.remove_vma(&mut layout, range);
            space.mmu().reserve_again(range);
            self.mappings.give_back(mapping);
            return Err(error);
        }
        self.get(id);
        space.budget().add_managed(range.len() as isize);
        Ok(seen)
    }

    /// Finds room for a mapping in the arena of `space`, whose lock the caller holds, and takes a
    /// number for it, which is given back with it.
    pub(super) fn place_mapping(
        &self,
        space: &AddressSpace<M>,
        layout: &Layout<'_>,
        guest: &Guest,
        request: MapRequest,
        id: ObjectId,
        kind: Kind,
    ) -> Result<(PageRange, Attributes), Errno> {
        let MapRequest { pages, prot, pattern, fault_around } = request;
        if pages.is_empty() || pages.end.index() > self.object(id).pages_max() {
            return Err(Errno::INVAL);
        }
        let range = space.find_room_like(layout, pages.len(), pages.start)?;
        let delta = pages.start.0.wrapping_sub(range.start.0);
        let mapping = self.mappings.take(fault_around)?;
        let backing = Backing { object: guest.object, mapping, delta };
        Ok((range, Attributes { kind, pattern, backing, ..Attributes::anonymous(prot) }))
    }

    /// Unmaps a whole mapping, as [`Self::map`] or [`Self::map_in`] returned it.
    pub fn unmap(&self, seen: PageRange) {
        let Some(host) = self.host_of(seen.start) else { return };
        let (space, range) = (&host.objects.space, local_range(seen));
        let mut layout = space.lock();
        let Some(vma) = space.next_vma(&layout, range.start) else { return };
        // Advice may have split it.
        debug_assert_eq!(vma.range.start, range.start);
        let Some(vma) = self.as_own(&host, HostId::of(seen.start), &vma) else { return };
        if vma.attributes.kind == Kind::Private {
            drop(layout);
            return self.unmap_private(host.objects, range, vma.attributes.backing);
        }
        let (id, backing) = (ObjectId(vma.attributes.backing.object), vma.attributes.backing);
        // The VMA first: a fault that holds a window's lock later sees that it is gone.
        space.remove_vma(&mut layout, range);
        for part in range.by_block() {
            let mut window = host.objects.windows.lock(part.start);
            if let Some(present) = window.present_of(part) {
                // Before it is forgotten: what can be written must be known to be so.
                space.mmu().unmap(present);
                window.clear(present);
            }
            // What shows a large frame, or is whole, is this mapping's alone, and of this space; it
            // is made anew below.
            self.large.set_shown(&mut window, LargeFrame::NONE);
            window.is_whole = false;
        }
        {
            let mut tree = self.object(id).i_mmap.i_mmap_lock_write(&self.i_mmaps);
            let pages = ObjectRange::new(backing.object_page(seen.start), seen.len());
            let node = tree.overlapping(pages).find(|(_, other)| other.id == backing.mapping);
            let removed = node.and_then(|(node, _)| tree.remove(node));
            debug_assert!(removed.is_some(), "every mapping is in its object's tree");
        }
        self.mappings.give_back(backing.mapping);
        space.mmu().reserve_again(range);
        space.budget().add_managed(-(range.len() as isize));
        drop(layout);
        if !HostId::of(seen.start).is_home() {
            self.object(id).away.fetch_sub(1, Ordering::Relaxed);
        }
        self.put(id);
    }

    /// Changes how much is mapped around the faults of the mapping at a page.
    pub fn set_fault_around(&self, page: PageNum, fault_around: FaultAround) {
        let Some(host) = self.host_of(page) else { return };
        if let Some(vma) = host
            .objects
            .space
            .find_vma(local(page))
            .filter(|vma| matches!(vma.attributes.kind, Kind::Object | Kind::Private))
        {
            self.mappings.set_fault_around(vma.attributes.backing.mapping, fault_around);
        }
    }

    /// How many pages of a range are mapped just now.
    pub fn present_pages(&self, range: PageRange) -> usize {
        let present = |part: PageRange| {
            let window = self.window(part.start);
            part.pages().filter(|&page| window.is_present(page)).count()
        };
        range.by_block().map(present).sum()
    }

    /// Says how a part of a mapping will be used.
    ///
    /// # Errors
    /// `NOMEM` where the VMA table is full.
    pub fn advise_pattern(&self, range: PageRange, pattern: Pattern) -> Result<(), Errno> {
        let Some(host) = self.host_of(range.start) else { return Ok(()) };
        let space = &host.objects.space;
        space.set_pattern(&mut space.lock(), local_range(range), pattern)
    }
}
