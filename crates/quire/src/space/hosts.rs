//! Hosts: other address spaces of the process, in whose arenas objects of this one are mapped.
//!
//! Owns how a page of a host's arena is named here, and for how long the host can be reached by
//! that name. Leaves to [`crate::object`] what is mapped there, and whose it is.
//!
//! The page of a host is its number there with the host's name before it ([`HostId::away`]): an
//! *away* page. All that goes by pages of the arena and comes back to them later (the list of the
//! starved, parked faults, reverse maps, requests) takes away pages like its own, which have no
//! name: [`HostId::HOME`]. What calls an MMU, or looks at a VMA or a window, asks for the host first.
//!
//! # States
//!
//! A name is free, a host's, or gone for ever: the next host in its place has another. So what still
//! knows a page of a host that is gone finds nobody there. A host is *pinned* while it is looked at;
//! it goes after its name has, when nobody pins it any more.
//!
//! Locks: none. Who adds and removes hosts sees to it that nobody else does.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use super::AddressSpace;
use super::vma::{Backing, Vma};
use crate::fault::fault_list::Answer;
use crate::mmu::Mmu;
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

/// Most other address spaces that objects of one are mapped in.
pub(crate) const HOSTS_MAX: usize = 64;
/// An arena of a host has no more pages than two to this power.
const ARENA_ORDER: u32 = 32;

/// The name that a space has for a host, or for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HostId(pub u32);

impl HostId {
    /// The space itself.
    pub const HOME: HostId = HostId(0);

    /// Whose a page is.
    #[inline]
    pub const fn of(page: PageNum) -> HostId {
        HostId((page.0 >> ARENA_ORDER) as u32)
    }

    #[inline]
    pub const fn is_home(self) -> bool {
        self.0 == HostId::HOME.0
    }

    /// Its place in the table.
    pub const fn slot(self) -> usize {
        self.0 as usize % HOSTS_MAX
    }

    const fn base(self) -> u64 {
        (self.0 as u64) << ARENA_ORDER
    }

    /// What a page of the host's arena is called here.
    pub const fn away(self, page: PageNum) -> PageNum {
        PageNum(page.0 + self.base())
    }

    /// The same for several.
    pub const fn away_range(self, pages: PageRange) -> PageRange {
        PageRange { start: self.away(pages.start), end: self.away(pages.end) }
    }

    /// A VMA of the host as it is seen here, where what it shows is called `object`.
    pub fn away_vma(self, vma: &Vma, object: u32) -> Vma {
        let mut seen = *vma;
        let Backing { mapping, delta, .. } = vma.attributes.backing;
        seen.range = self.away_range(vma.range);
        seen.attributes.backing =
            Backing { object, mapping, delta: delta.wrapping_sub(self.base()) };
        seen
    }

    /// Such a VMA by the host's own pages again; what it shows is called as it is here.
    pub fn local_vma(self, seen: &Vma) -> Vma {
        let mut vma = *seen;
        vma.range = local_range(seen.range);
        let delta = seen.attributes.backing.delta;
        vma.attributes.backing.delta = delta.wrapping_add(self.base());
        vma
    }
}

/// What a page is called by its host.
#[inline]
pub(crate) const fn local(page: PageNum) -> PageNum {
    PageNum(page.0 - HostId::of(page).base())
}

/// The same for pages of one host.
#[inline]
pub(crate) const fn local_range(pages: PageRange) -> PageRange {
    let base = HostId::of(pages.start).base();
    PageRange { start: PageNum(pages.start.0 - base), end: PageNum(pages.end.0 - base) }
}

struct Slot<M: Mmu> {
    /// The host's name; 0 where there is none.
    name: AtomicU32,
    /// Who look at it, or are about to find that it is gone.
    pins: AtomicUsize,
    /// How many hosts there have been.
    generation: AtomicU32,
    space: AtomicPtr<AddressSpace<M>>,
}

/// The hosts of a space.
pub(crate) struct Hosts<M: Mmu> {
    slots: [Slot<M>; HOSTS_MAX],
}

/// A host that stays as long as this does; or the space itself, which is there anyway.
pub(crate) struct Pinned<'a, M: Mmu> {
    pub space: &'a AddressSpace<M>,
    pins: Option<&'a AtomicUsize>,
}

impl<M: Mmu> Drop for Pinned<'_, M> {
    #[inline]
    fn drop(&mut self) {
        if let Some(pins) = self.pins {
            // Release pairs with the look in `remove`: what was done to the host comes before.
            pins.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<M: Mmu> Hosts<M> {
    pub const fn new() -> Hosts<M> {
        Hosts {
            slots: [const {
                Slot {
                    name: AtomicU32::new(0),
                    pins: AtomicUsize::new(0),
                    generation: AtomicU32::new(0),
                    space: AtomicPtr::new(core::ptr::null_mut()),
                }
            }; HOSTS_MAX],
        }
    }

    /// Gives a space a name.
    ///
    /// # Errors
    /// `NFILE` where there are too many hosts, `INVAL` where its arena is too large.
    ///
    /// # Safety
    /// It stays where it is until [`Self::remove`] has returned.
    pub unsafe fn add(&self, space: &AddressSpace<M>) -> Result<HostId, Errno> {
        if space.arena().len() as u64 > 1 << ARENA_ORDER {
            return Err(Errno::INVAL);
        }
        let is_free = |slot: &Slot<M>| slot.name.load(Ordering::Relaxed) == 0;
        let at = self.slots.iter().position(is_free).ok_or(Errno::NFILE)?;
        let slot = &self.slots[at];
        // Relaxed, both: the name publishes the place, and nobody else adds.
        // Below the name that `NO_PAGE` would be of.
        let generations_max = u32::MAX / HOSTS_MAX as u32 - 1;
        let generation = slot.generation.load(Ordering::Relaxed) % generations_max + 1;
        slot.generation.store(generation, Ordering::Relaxed);
        slot.space.store(core::ptr::from_ref(space).cast_mut(), Ordering::Relaxed);
        let host = HostId(generation * HOSTS_MAX as u32 + at as u32);
        slot.name.store(host.0, Ordering::SeqCst);
        Ok(host)
    }

    /// Takes a name back, and waits for those who look at the host.
    pub fn remove(&self, host: HostId, relax: impl Fn()) {
        let slot = &self.slots[host.slot()];
        debug_assert_eq!(slot.name.load(Ordering::Relaxed), host.0, "a host is removed once");
        // SeqCst, both: either who pins sees that it is gone, or he is seen here. The look is an
        // acquire as well: see `Pinned`.
        slot.name.store(0, Ordering::SeqCst);
        while slot.pins.load(Ordering::SeqCst) > 0 {
            relax();
        }
    }

    /// Keeps a host from going; `None` where it is gone already.
    fn pin(&self, host: HostId) -> Option<Pinned<'_, M>> {
        let slot = &self.slots[host.slot()];
        // SeqCst, both: see `remove`. The load is an acquire too, for the place.
        slot.pins.fetch_add(1, Ordering::SeqCst);
        let space = slot.space.load(Ordering::Relaxed);
        if slot.name.load(Ordering::SeqCst) != host.0 {
            slot.pins.fetch_sub(1, Ordering::Release);
            return None;
        }
        // SAFETY: the name is the host's, so that it stays until `remove` has seen no pin, by the
        // promise made to `add`.
        let space = unsafe { &*space };
        Some(Pinned { space, pins: Some(&slot.pins) })
    }

    /// All of them.
    pub fn names(&self) -> impl Iterator<Item = HostId> {
        let named = |slot: &Slot<M>| HostId(slot.name.load(Ordering::Relaxed));
        self.slots.iter().map(named).filter(|host| !host.is_home())
    }
}

impl<M: Mmu> AddressSpace<M> {
    /// The space whose arena a page is of; `None` for one that is gone.
    #[inline]
    pub(crate) fn host_of(&self, page: PageNum) -> Option<Pinned<'_, M>> {
        let host = HostId::of(page);
        if host.is_home() {
            return Some(Pinned { space: self, pins: None });
        }
        self.hosts.pin(host)
    }

    /// Answers the faults of pages, wherever they are.
    #[inline]
    pub(crate) fn wake(&self, pages: PageRange) {
        // In a host that is gone nobody waits.
        if let Some(host) = self.host_of(pages.start) {
            host.space.mmu.wake(local_range(pages));
        }
    }

    /// Answers whom a list names.
    pub(crate) fn wake_for(&self, answer: Answer) {
        match answer {
            Answer::Page(page) => self.wake(PageRange::new(page, 1)),
            Answer::Everybody => {
                self.mmu.wake(self.arena());
                for host in self.hosts.names().filter_map(|host| self.hosts.pin(host)) {
                    host.space.mmu.wake(host.space.arena());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::userfaultfd::Userfaultfd;

    #[test]
    fn a_page_that_is_away_comes_home_under_its_own_number() {
        let host = HostId(3 * HOSTS_MAX as u32 + 5);
        let page = PageNum(1 << 28);
        let away = host.away(page);
        assert_eq!((HostId::of(away), local(away)), (host, page));
        assert_eq!(away.block() % 8, page.block() % 8, "windows lie as they do there");
        assert!(HostId::of(page).is_home() && local(page) == page);
        let all = PageRange { start: PageNum(0), end: PageNum(1 << ARENA_ORDER) };
        assert_eq!(local_range(host.away_range(all)), all);
    }

    #[test]
    fn a_name_that_is_gone_is_nobodys() {
        let hosts: Hosts<Userfaultfd> = Hosts::new();
        let slot = &hosts.slots[0];
        slot.name.store(HOSTS_MAX as u32, Ordering::SeqCst);
        assert_eq!(hosts.names().collect::<std::vec::Vec<_>>(), [HostId(HOSTS_MAX as u32)]);
        hosts.remove(HostId(HOSTS_MAX as u32), || panic!("nobody has pinned it"));
        assert!(hosts.pin(HostId(HOSTS_MAX as u32)).is_none());
        assert!(hosts.pin(HostId(2 * HOSTS_MAX as u32)).is_none());
        assert_eq!(slot.pins.load(Ordering::Relaxed), 0, "who finds nobody leaves no pin");
    }
}
