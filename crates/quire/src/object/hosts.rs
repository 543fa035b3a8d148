//! Objects of one address space mapped in others of the process.
//!
//! The space that an object was opened in is its *owner*: the cache, its budget, its page locks and
//! who waits for them, workers and write-back are there. Another space that it is mapped in, a
//! *host*, gives what a mapping takes: pages of its arena, VMAs, windows, the MMU, and whoever
//! reads the faults there. To the host such an object is a *guest*.
//!
//! The owner knows a host's pages as away pages ([`crate::space::hosts`]) and works with them as
//! with its own: all of [`crate::object`] runs in the owner. The host only finds out whose a fault
//! is, and hands it over under the name that the owner has for the page. What reaches a window, a
//! VMA or an MMU asks for the page's host here; where that is the owner itself this is a branch.
//!
//! A private copy of a guest is the host's own memory, all but its first content. So its faults run
//! in the host ([`super::private`]), which asks the owner for the object's page; what the owner has
//! to read for it first comes back to the host under an away page's name.
//!
//! A guest is never in a large frame where it is mapped away: the moves that change what a window
//! shows are read about by the owner's own thread ([`super::show`]).
//!
//! # Who stays
//!
//! A mapping keeps both spaces (its holder sees to that), and who has the host's window locked, or
//! the page of a copy, and has seen the VMA unchanged, knows that the mapping is there. Beyond that
//! the owner pins the host for as long as it looks at it, and a host's thread the owner for as long as
//! it serves a fault there; [`Objects::part`] waits for both.
//!
//! Locks: who meets and parts, all of the process, have one mutex: outside of all others. Then the
//! host's own in the order of [`super`]: the space's lock is the host's, `i_mmap` and page locks are
//! the owner's. Nobody has the locks of two windows, of whatever spaces.

use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use rustix_futex_sync::Mutex;

use super::window::Mapped;
use super::{OBJECTS_MAX, ObjectId, Objects};
use crate::control::FaultKind;
use crate::fault::Outcome;
use crate::fault::speculative::{Doubt, Way};
use crate::mmu::Access;
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Done, Protection, Refusal};
use crate::scratch::Scratch;
use crate::space::hosts::{HOSTS_MAX, HostId, Pinned, local, local_range};
use crate::space::vma::{Backing, Kind, Vma};
use crate::sys::Errno;
use crate::sys::mutex::MutexGuard;
use crate::sys::rank;
use crate::units::{PageNum, PageRange};

/// Held by who meets or parts.
static MEETING: Mutex<()> = Mutex::new(());

/// In a VMA's [`Backing::object`]: the object's number takes so many bits, those above say whose it
/// is: 0 for the space's own.
const OBJECT_BITS: u32 = 16;
const _: () = assert!(OBJECTS_MAX <= 1 << OBJECT_BITS);

/// An owner of guests.
struct Owner<M: ObjectMmu> {
    objects: AtomicPtr<Objects<M>>,
    /// The name that it has for this space.
    name: AtomicU32,
    /// Threads of this space that serve faults there.
    pins: AtomicUsize,
}

/// The spaces that a space has to do with.
pub(super) struct Neighbours<M: ObjectMmu> {
    /// By the places of their names; good while they are pinned.
    hosts: [AtomicPtr<Objects<M>>; HOSTS_MAX],
    owners: [Owner<M>; HOSTS_MAX],
}

impl<M: ObjectMmu> Neighbours<M> {
    pub const fn new() -> Neighbours<M> {
        Neighbours {
            hosts: [const { AtomicPtr::new(core::ptr::null_mut()) }; HOSTS_MAX],
            owners: [const {
                Owner {
                    objects: AtomicPtr::new(core::ptr::null_mut()),
                    name: AtomicU32::new(0),
                    pins: AtomicUsize::new(0),
                }
            }; HOSTS_MAX],
        }
    }
}

/// The host of a page, which stays as long as this does.
pub struct Host<'a, M: ObjectMmu> {
    pub(super) objects: &'a Objects<M>,
    _pinned: Option<Pinned<'a, M>>,
}

impl<M: ObjectMmu> Host<'_, M> {
    /// Its MMU, and the page as that knows it.
    pub fn mmu(&self, page: PageNum) -> (&M, PageNum) {
        (self.objects.space.mmu(), local(page))
    }
}

/// The lock of a window, and its host.
pub(super) struct Window<'a, M: ObjectMmu> {
    // In this order: the lock is given back while the host is there.
    mapped: MutexGuard<'a, rank::Window, Mapped>,
    host: Host<'a, M>,
}

impl<M: ObjectMmu> Window<'_, M> {
    /// Whether a VMA of the window is as it was when it was copied.
    #[inline]
    pub fn is_current(&self, vma: &Vma) -> bool {
        self.host.objects.space.is_current(vma)
    }
}

impl<M: ObjectMmu> Deref for Window<'_, M> {
    type Target = Mapped;

    fn deref(&self) -> &Mapped {
        &self.mapped
    }
}

impl<M: ObjectMmu> DerefMut for Window<'_, M> {
    fn deref_mut(&mut self) -> &mut Mapped {
        &mut self.mapped
    }
}

/// The owner of what a VMA shows, which stays as long as this does; or the space itself, which is
/// there anyway.
pub(super) struct PinnedOwner<'a, M: ObjectMmu> {
    pub objects: &'a Objects<M>,
    /// What the space is called there.
    pub name: HostId,
    /// What is shown.
    pub id: ObjectId,
    pins: Option<&'a AtomicUsize>,
}

impl<M: ObjectMmu> Drop for PinnedOwner<'_, M> {
    #[inline]
    fn drop(&mut self) {
        if let Some(pins) = self.pins {
            // Release pairs with the look in `forget_host`: what was done there comes before.
            pins.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Whose object a VMA shows.
pub(super) enum Found {
    /// One of the space's own, wherever the page is.
    Own(Vma),
    /// A guest.
    Guest(Vma),
}

fn is_guest(backing: Backing) -> bool {
    backing.object >> OBJECT_BITS != 0
}

/// The place of a guest's owner, and the guest's number there.
fn owner_and_object(backing: Backing) -> (usize, u32) {
    let place = (backing.object >> OBJECT_BITS) as usize - 1;
    (place, backing.object & ((1 << OBJECT_BITS) - 1))
}

/// Meeting and parting.
impl<M: ObjectMmu> Objects<M> {
    /// Has a name for `host`, which knows of it, and says what an object is called there.
    ///
    /// # Errors
    /// `NFILE` where either has too many neighbours; `INVAL` where the host's arena is too large.
    ///
    /// # Safety
    /// Both stay where they are until [`Self::part`] has returned for one of them.
    pub(super) unsafe fn meet(&self, host: &Objects<M>, id: ObjectId) -> Result<Guest, Errno> {
        let _meeting = MEETING.lock();
        let owners = &host.neighbours.owners;
        let here = core::ptr::from_ref(self).cast_mut();
        // Relaxed, here and below: the mutex orders who meets and parts.
        let at_place = |place: usize| owners[place].objects.load(Ordering::Relaxed);
        let known = (0..HOSTS_MAX).find(|&place| at_place(place) == here);
        let place = match known {
            Some(place) => place,
            None => {
                let free = (0..HOSTS_MAX).find(|&place| at_place(place).is_null());
                let place = free.ok_or(Errno::NFILE)?;
                // SAFETY: the caller's promise; `part` removes it.
                let name = unsafe { self.space.hosts.add(&host.space) }?;
                let there = core::ptr::from_ref(host).cast_mut();
                // Nobody has a page of that name before this returns.
                self.neighbours.hosts[name.slot()].store(there, Ordering::Relaxed);
                owners[place].name.store(name.0, Ordering::Relaxed);
                // Release pairs with the acquire in `pin_owner`.
                owners[place].objects.store(here, Ordering::Release);
                place
            }
        };
        let host = HostId(owners[place].name.load(Ordering::Relaxed));
        Ok(Guest { host, object: id.0 | (place as u32 + 1) << OBJECT_BITS })
    }

    /// Ends the acquaintance with all others, and waits for their threads that are still here. Does
    /// nothing where it has met nobody.
    ///
    /// # Safety
    /// The space's own threads have ended; no object of it is mapped in another, nor another's in
    /// it, and none will be.
    pub unsafe fn part(&self) {
        let _meeting = MEETING.lock();
        for owner in &self.neighbours.owners {
            let objects = owner.objects.load(Ordering::Relaxed);
            // SAFETY: it is there until it parts, which the mutex orders.
            if let Some(objects) = unsafe { objects.as_ref() } {
                objects.forget_host(owner);
            }
        }
        let here = core::ptr::from_ref(self).cast_mut();
        for host in &self.neighbours.hosts {
            // SAFETY: as above.
            let Some(host) = (unsafe { host.load(Ordering::Relaxed).as_ref() }) else { continue };
            let is_here = |owner: &&Owner<M>| owner.objects.load(Ordering::Relaxed) == here;
            let owner = host.neighbours.owners.iter().find(is_here);
            self.forget_host(owner.expect("who is known to the one is known to the other"));
        }
    }

    /// Ends the acquaintance with the host that has `owner` for this space.
    fn forget_host(&self, owner: &Owner<M>) {
        // Acquire pairs with the release of who pins. Nobody begins to: no object is mapped there.
        while owner.pins.load(Ordering::Acquire) > 0 {
            self.space.mmu().relax();
        }
        owner.objects.store(core::ptr::null_mut(), Ordering::Relaxed);
        let name = HostId(owner.name.load(Ordering::Relaxed));
        self.space.hosts.remove(name, || self.space.mmu().relax());
        self.neighbours.hosts[name.slot()].store(core::ptr::null_mut(), Ordering::Relaxed);
    }
}

/// What an object is called where it is mapped, and that space where the object is.
pub(super) struct Guest {
    pub host: HostId,
    pub object: u32,
}

impl Guest {
    /// An object in its own space.
    pub const fn at_home(id: ObjectId) -> Guest {
        Guest { host: HostId::HOME, object: id.0 }
    }
}

/// Faults on guests.
impl<M: ObjectMmu> Objects<M> {
    /// The object's VMA at a page, its own or a guest's. At an away page a guest of this space, as
    /// one of its own.
    #[inline]
    pub(super) fn find_object_vma(&self, page: PageNum) -> Option<Found> {
        if !HostId::of(page).is_home() {
            let vma = self.find_away_vma(page)?;
            return (vma.attributes.kind == Kind::Object).then_some(Found::Own(vma));
        }
        let found = self.space.find_vma(page);
        let vma = found.filter(|vma| vma.attributes.kind == Kind::Object)?;
        Some(if is_guest(vma.attributes.backing) { Found::Guest(vma) } else { Found::Own(vma) })
    }

    #[cold]
    fn find_away_vma(&self, page: PageNum) -> Option<Vma> {
        let host = self.host_of(page)?;
        let vma = host.objects.space.find_vma(local(page))?;
        self.as_own(&host, HostId::of(page), &vma)
    }

    /// A VMA of a host as this space knows it, where it shows an object of this space, or a private
    /// copy of one.
    pub(super) fn as_own(&self, host: &Host<'_, M>, name: HostId, vma: &Vma) -> Option<Vma> {
        let backing = vma.attributes.backing;
        let has_object = matches!(vma.attributes.kind, Kind::Object | Kind::Private);
        if !has_object || is_guest(backing) == name.is_home() {
            return None;
        }
        if name.is_home() {
            return Some(*vma);
        }
        let (place, object) = owner_and_object(backing);
        // Relaxed: only compared. What has changed since is found under the window's lock.
        let owner = host.objects.neighbours.owners[place].objects.load(Ordering::Relaxed);
        core::ptr::eq(owner, self).then(|| name.away_vma(vma, object))
    }

    /// Hands a fault on a guest to its owner. The layout that it depends on is this space's.
    #[cold]
    #[inline(never)]
    pub(super) fn guest_fault(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        kind: &mut FaultKind,
        scratch: Option<&mut Scratch>,
    ) -> Result<Outcome, Doubt> {
        let owner = {
            let _window = self.windows.lock(page);
            if way != Way::Classic && !self.space.is_current(vma) {
                return Err(Doubt::changed(vma));
            }
            self.pin_owner(vma.attributes.backing)
        };
        let served =
            owner.objects.try_object_fault(owner.name.away(page), access, way, kind, scratch);
        served.map_err(|doubt| Doubt { range: local_range(doubt.range), ..doubt })
    }

    /// Whose object a VMA of this space shows, itself or its copies. The caller holds the lock of a
    /// window of it, or of a copy's page, and has seen the VMA unchanged.
    #[inline]
    pub(super) fn owner_of(&self, backing: Backing) -> PinnedOwner<'_, M> {
        if is_guest(backing) {
            return self.pin_owner(backing);
        }
        let id = ObjectId(backing.object);
        PinnedOwner { objects: self, name: HostId::HOME, id, pins: None }
    }

    /// Keeps the owner of a guest from going, as [`Self::owner_of`] does.
    #[cold]
    fn pin_owner(&self, backing: Backing) -> PinnedOwner<'_, M> {
        let (place, object) = owner_and_object(backing);
        let owner = &self.neighbours.owners[place];
        // Relaxed: who unmaps takes the lock that the caller holds after this, before anybody parts.
        owner.pins.fetch_add(1, Ordering::Relaxed);
        // Acquire pairs with the release in `meet`.
        let objects = owner.objects.load(Ordering::Acquire);
        // SAFETY: the mapping is there, and with it its owner, which waits for the pin later.
        let objects = unsafe { &*objects };
        let name = HostId(owner.name.load(Ordering::Relaxed));
        PinnedOwner { objects, name, id: ObjectId(object), pins: Some(&owner.pins) }
    }
}

/// What is done to pages wherever they are.
impl<M: ObjectMmu> Objects<M> {
    /// The space whose arena a page is of; `None` for one that is gone.
    #[inline]
    pub fn host_of(&self, page: PageNum) -> Option<Host<'_, M>> {
        if HostId::of(page).is_home() {
            return Some(Host { objects: self, _pinned: None });
        }
        self.pin_host(page)
    }

    #[cold]
    fn pin_host(&self, page: PageNum) -> Option<Host<'_, M>> {
        let pinned = self.space.host_of(page)?;
        // Relaxed: it was there before its name was, which the pin has seen.
        let place = &self.neighbours.hosts[HostId::of(page).slot()];
        // SAFETY: pinned.
        let objects = unsafe { &*place.load(Ordering::Relaxed) };
        debug_assert!(core::ptr::eq(&raw const objects.space, pinned.space));
        Some(Host { objects, _pinned: Some(pinned) })
    }

    /// Takes the lock of the window that holds a page of a mapping that is there.
    #[inline]
    pub(super) fn window(&self, page: PageNum) -> Window<'_, M> {
        self.window_if_there(page).expect("a mapping keeps its host")
    }

    /// The same for one that may have gone, and its host with it: `None` then.
    #[inline]
    pub(super) fn window_if_there(&self, page: PageNum) -> Option<Window<'_, M>> {
        let host = self.host_of(page)?;
        Some(Window { mapped: host.objects.windows.lock(local(page)), host })
    }

    /// [`ObjectMmu::map_cached`] of the pages' host.
    #[inline]
    pub(super) fn map_cached(&self, pages: PageRange, protection: Protection) -> Done {
        match self.host_of(pages.start) {
            Some(host) => host.objects.space.mmu().map_cached(local_range(pages), protection),
            None => GONE,
        }
    }

    /// [`crate::mmu::Mmu::write_protect`] of the pages' host.
    #[inline]
    pub(super) fn write_protect(&self, pages: PageRange, protection: Protection) -> Done {
        match self.host_of(pages.start) {
            Some(host) => host.objects.space.mmu().write_protect(local_range(pages), protection),
            None => GONE,
        }
    }

    /// [`crate::mmu::Mmu::unmap`] of the pages' host.
    #[inline]
    pub(super) fn unmap_pages(&self, pages: PageRange) {
        if let Some(host) = self.host_of(pages.start) {
            host.objects.space.mmu().unmap(local_range(pages));
        }
    }

    /// [`crate::mmu::Mmu::poison`] of the page's host.
    pub(super) fn poison_page(&self, page: PageNum) -> Done {
        let host = self.host_of(page);
        host.map_or(GONE, |host| host.objects.space.mmu().poison(local(page)))
    }

    /// Whether threads that fault on a page serve themselves.
    #[inline]
    pub(super) fn is_inline_at(&self, page: PageNum) -> bool {
        self.host_of(page).is_some_and(|host| host.objects.space.mmu().is_inline())
    }
}

/// What an operation says of a host that is gone: nothing is mapped there.
const GONE: Done = Done { pages: 0, refusal: Some(Refusal::Unmapped) };
