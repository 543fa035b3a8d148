//! Private mappings come and go, and follow their object.
//!
//! Leaves the copies themselves to [`super::private`], and to [`super::remap`] and
//! [`super::protect`] how a mapping changes. `self` is the space of the object; the mapping may be in
//! the arena of another ([`super::hosts`]).
//!
//! Locks: the host's space; pages' in its arena, one at a time, slept for.

use core::sync::atomic::Ordering;

use super::hosts::Guest;
use super::{Host, MapRequest, Object, ObjectId, Objects};
use crate::mmu::object::ObjectMmu;
use crate::space::hosts::{HostId, local_range};
use crate::space::vma::{Backing, Kind};
use crate::sys::Errno;
use crate::units::{ObjectRange, PageNum, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// Maps pages of an object that the caller keeps in use as a private copy; the mapping is a
    /// user of its own.
    ///
    /// # Errors
    /// As for [`Self::map`].
    pub fn map_private(&self, id: ObjectId, request: MapRequest) -> Result<PageRange, Errno> {
        self.map_private_at(self, &Guest::at_home(id), id, request)
    }

    /// The same in the arena of another space, whose memory the copies are. What is returned are
    /// away pages, as from [`Self::map_in`].
    ///
    /// # Errors
    /// As for [`Self::map_in`].
    ///
    /// # Safety
    /// As for [`Self::map_in`].
    pub unsafe fn map_private_in(
        &self,
        host: &Objects<M>,
        id: ObjectId,
        request: MapRequest,
    ) -> Result<PageRange, Errno> {
        if core::ptr::eq(self, host) {
            return self.map_private(id, request);
        }
        // SAFETY: the caller's promise.
        let guest = unsafe { self.meet(host, id) }?;
        self.map_private_at(host, &guest, id, request)
    }

    fn map_private_at(
        &self,
        host: &Objects<M>,
        guest: &Guest,
        id: ObjectId,
        request: MapRequest,
    ) -> Result<PageRange, Errno> {
        let (object, space) = (self.object(id), &host.space);
        let mut layout = space.lock();
        let (range, attributes) =
            self.place_mapping(space, &layout, guest, request, id, Kind::Private)?;
        if let Err(error) = space.install_with(&mut layout, range, attributes) {
            self.mappings.give_back(attributes.backing.mapping);
            return Err(error);
        }
        self.get(id);
        // SeqCst: before any fault in it looks at the length; see `follow_change`.
        object.privates.fetch_add(1, Ordering::SeqCst);
        Ok(guest.host.away_range(range))
    }

    /// Unmaps a whole private mapping of a host's.
    pub(super) fn unmap_private(&self, host: &Objects<M>, range: PageRange, backing: Backing) {
        let layout = host.space.lock();
        // While the range is nobody else's.
        host.forget_private_pins(range);
        let unmapped = host.space.unmap_and_unlock(layout, range);
        debug_assert!(unmapped.is_ok(), "whole VMAs go without a split");
        self.mappings.give_back(backing.mapping);
        self.object(ObjectId(backing.object)).privates.fetch_sub(1, Ordering::SeqCst);
        self.put(ObjectId(backing.object));
    }

    /// Pages of an object are others by now, because it has another length or bad ones were given
    /// up: of its private mappings, wherever they are, what could not be had can be asked for again,
    /// and what was not written goes. Waits for the lock of each space, with none in hand.
    pub(super) fn follow_change(&self, object: &Object, changed: ObjectRange) {
        // SeqCst: after the change of the length. Either the mapping is seen here, and with it the name
        // of its host, or its faults see the new length.
        if changed.is_empty() || object.privates.load(Ordering::SeqCst) == 0 {
            return;
        }
        for name in core::iter::once(HostId::HOME).chain(self.space.hosts.names()) {
            // Where it is gone so are the mappings in it.
            if let Some(host) = self.host_of(name.away(PageNum(0))) {
                self.follow_change_in(&host, name, object, changed);
            }
        }
    }

    /// The same in one host.
    fn follow_change_in(
        &self,
        host: &Host<'_, M>,
        name: HostId,
        object: &Object,
        changed: ObjectRange,
    ) {
        let space = &host.objects.space;
        let layout = space.lock();
        let mut at = PageNum(0);
        while let Some(vma) = space.next_vma(&layout, at) {
            at = vma.range.end;
            let seen = self.as_own(host, name, &vma);
            let Some(seen) = seen.filter(|seen| seen.attributes.kind == Kind::Private) else {
                continue;
            };
            let backing = seen.attributes.backing;
            if ObjectId(backing.object) != object.id() {
                continue;
            }
            let shown = ObjectRange::new(backing.object_page(seen.range.start), seen.range.len());
            let part = shown.intersect(changed);
            if !part.is_empty() {
                let start = PageNum(part.start.0.wrapping_sub(backing.delta));
                space.drop_unwritten(local_range(PageRange::new(start, part.len())));
            }
        }
    }
}
