//! The compressed pool: packed pages in memory.
//!
//! Owns a reserved range of memory ([`home`]) and everything of ours in it. Like zsmalloc it keeps
//! blobs in slabs of one size each ([`slab`]): 64 bytes apart up to the longest packed page worth
//! keeping, and whole pages. A slab's pages are charged to the caller's [`Payer`] when it is taken
//! and uncharged when the kernel has its memory back. Charges change at no other time, except that the
//! supervisor moves them when a fork shares slabs, and when slabs are not shared any more ([`shared`]).
//!
//! # The owner of a blob
//!
//! A [`Handle`] belongs to the page that its header names as owner, and stands in that page's
//! word. **Only the thread that holds the owner's page lock may load or free it.** That is the premise
//! of the `unsafe` functions here, and the reason why they read without a lock of the pool.
//!
//! # Locks
//!
//! One mutex a class guards its lists and descriptors. It is not held together with another, with a
//! page lock being waited for, or across a call into the engine or the kernel. A blob's bytes are
//! written under the lock of its class and never change after. Free slots are taken without a lock.
//!
//! Compaction takes a slab out of its lists, so that no new blob enters it, copies each blob
//! under the lock of the class, then asks the engine with no lock held. The engine tries the
//! owner's page lock and swaps the word; only then does the old copy die. A free that came first
//! has changed the word, so the engine says no and the new copy dies instead; a load that came
//! first finishes on the old copy, because the engine cannot get the page's lock.

mod compact;
mod home;
mod mapping;
mod shared;
mod slab;
#[cfg(test)]
mod tests;

use core::num::NonZeroU32;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

use self::home::SlabHome;
use self::slab::{
    CLASS, CLASSES, ClassLists, Freed, GRANULE_BYTES, Keep, RAW_CLASS, SLOT_GRANULES, SLOT_PAGES,
    Slab, class_for,
};
use super::blob::{Blob, BlobHeader, HEADER_BYTES, Packing};
use super::compress::{Corrupt, PageBytes};
use crate::budget::{Budget, Purpose};
use crate::control::slabs::SLOT_BYTES;
use crate::steps::{Step, reach};
use crate::sys::memory::Table;
use crate::sys::mutex::Mutex;
use crate::sys::{Errno, rank};
use crate::units::PageNum;
use rustix::fd::BorrowedFd;

/// Larger classes that may take a blob when there is no memory for a slab of its own class.
const CLASSES_TO_SPARE: usize = 8;

/// Blobs that are dropped together at most.
pub const FREED_AT_ONCE: usize = 64;

/// Names a blob of the pool: its address in units of 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(NonZeroU32);

impl Handle {
    /// The handle with this number, as a page's word keeps it.
    pub fn new(number: u32) -> Option<Handle> {
        NonZeroU32::new(number).map(Handle)
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// The account that the pool's memory is charged to.
pub trait Payer {
    /// Takes pages from the budget, or says that they are not to be had. Must not block.
    fn try_charge(&self, pages: usize) -> bool;
    /// Gives them back.
    fn uncharge(&self, pages: usize);
}

impl Payer for Budget {
    fn try_charge(&self, pages: usize) -> bool {
        Budget::try_charge(self, pages, Purpose::Reclaim)
    }

    fn uncharge(&self, pages: usize) {
        Budget::uncharge(self, pages);
    }
}

/// The pool has no room for the blob, and the account none for a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// The headers of a slab of whole pages.
type RawHeaders = [[AtomicU64; 2]; SLOT_PAGES];

/// The lists of a class behind its lock, on cache lines of their own.
#[repr(align(64))]
struct ClassLock(Mutex<rank::ZpoolClass, ClassLists>);

pub struct Zpool {
    home: SlabHome,
    slabs: Table<Slab>,
    raw_headers: Table<RawHeaders>,
    classes: [ClassLock; CLASSES],
    /// Pages of all slabs that we use. A statistic: Relaxed, the account is what counts.
    pages: AtomicUsize,
    /// Those of them that are not sealed, and so on our account. Relaxed, as above.
    own_pages: AtomicUsize,
    /// The supervisor's moves that we have looked at (Relaxed: a hint).
    moves_seen: AtomicU32,
    /// Whether a thread compacts: one does at a time.
    compacting: AtomicBool,
    /// The class that the next step of compaction begins with (Relaxed: any will do).
    compact_next: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spot {
    slot: u32,
    class: usize,
    index: usize,
}

impl Spot {
    fn handle(self) -> Option<Handle> {
        let granule = self.index * CLASS[self.class].bytes / GRANULE_BYTES;
        Handle::new(self.slot * SLOT_GRANULES as u32 + granule as u32)
    }
}

impl Zpool {
    /// A pool of so many slots in private memory. Takes none yet.
    pub fn private(slots: usize) -> Result<Zpool, Errno> {
        Zpool::in_home(SlabHome::private(slots)?)
    }

    /// The pool of a tree, as `member` uses it.
    ///
    /// # Safety
    ///
    /// The memfd is a pool of so many slots ([`crate::control::slabs`]) and can never shrink.
    pub unsafe fn shared(memfd: BorrowedFd<'_>, slots: usize, member: u32) -> Result<Zpool, Errno> {
        // SAFETY: the caller's promise.
        Zpool::in_home(unsafe { SlabHome::shared(memfd, slots, member) }?)
    }

    fn in_home(home: SlabHome) -> Result<Zpool, Errno> {
        Ok(Zpool {
            slabs: Table::new(home.slots())?,
            raw_headers: Table::new(home.slots())?,
            home,
            classes: core::array::from_fn(|class| ClassLock(Mutex::new(ClassLists::new(class)))),
            pages: AtomicUsize::new(0),
            own_pages: AtomicUsize::new(0),
            moves_seen: AtomicU32::new(0),
            compacting: AtomicBool::new(false),
            compact_next: AtomicUsize::new(0),
        })
    }

    /// Pages of the slabs that this process uses, its own and common ones.
    pub fn pages(&self) -> usize {
        self.pages.load(Relaxed)
    }

    /// Pages of its own slabs, which is what the account is charged with.
    pub fn own_pages(&self) -> usize {
        self.own_pages.load(Relaxed)
    }

    #[cfg(feature = "simulated")]
    pub(crate) fn blobs(&self) -> usize {
        let ever_used = &self.slabs[..self.home.slots_end() as usize];
        ever_used.iter().filter(|slab| slab.class().is_some()).map(Slab::used).sum()
    }

    /// Keeps a packed page. `hash` is [`page_hash`] of the page that `bytes` unpack to.
    ///
    /// # Errors
    ///
    /// [`Full`] where neither a slab has room nor the account pages for a new one.
    pub fn store(
        &self,
        owner: PageNum,
        kind: Packing,
        bytes: &[u8],
        hash: u64,
        account: &impl Payer,
    ) -> Result<Handle, Full> {
        let blob = Blob { owner, kind, hash, bytes };
        let class = class_for(bytes.len()).ok_or(Full)?;
        if let Some(handle) = self.place(class, &blob) {
            return Ok(handle);
        }
        if self.unseal()
            && let Some(handle) = self.place(class, &blob)
        {
            return Ok(handle);
        }
        if let Some(slot) = self.take_slot(class, account) {
            let mut lists = self.classes[class].0.lock();
            lists.add(&self.slabs, slot);
            return self.place_locked(&mut lists, slot, &blob).ok_or(Full);
        }
        // Reclaim stores pages because memory is short: better to waste some of a larger place
        // than to fail for want of a slab.
        (class + 1..CLASSES.min(class + 1 + CLASSES_TO_SPARE))
            .find_map(|class| self.place(class, &blob))
            .ok_or(Full)
    }

    /// Unpacks a page.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] where the handle names no blob, another page's, or a damaged one; `out` then
    /// holds garbage.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the page in whose word `handle` stands.
    pub unsafe fn load(
        &self,
        handle: Handle,
        owner: PageNum,
        out: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        // SAFETY: the caller's promise is `blob`'s too, and the blob is used up before we return.
        unsafe { self.blob(handle) }?.unpack(owner, out)
    }

    /// The packed bytes with their header, for the swap file.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] where the handle names no blob. The bytes are not checked.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the page in whose word `handle` stands, for as long as it
    /// uses the blob.
    pub unsafe fn blob(&self, handle: Handle) -> Result<Blob<'_>, Corrupt> {
        let spot = self.spot(handle).ok_or(Corrupt)?;
        let header = self.header(spot).ok_or(Corrupt)?;
        let bytes = self.bytes(spot, header.length).ok_or(Corrupt)?;
        // SAFETY: `bytes` lies in the place of a live blob (`spot` and `bytes` check). Its bytes
        // were written before its handle reached the page's word, and do not change until it is
        // freed, which takes the page's lock that the caller holds.
        let bytes = unsafe { core::slice::from_raw_parts(bytes, header.length) };
        Ok(Blob { owner: header.owner, kind: header.kind, hash: header.hash, bytes })
    }

    /// Drops the blobs of these handles, [`FREED_AT_ONCE`] at most, those that follow each other in a class under
    /// one lock. One that names none is ignored.
    ///
    /// # Safety
    ///
    /// The caller holds the locks of the pages in whose words the handles stood, and no word has
    /// them any more.
    pub unsafe fn free_all(&self, handles: &[u32], account: &impl Payer) {
        let spot = |number: &u32| {
            let spot = Handle::new(*number).and_then(|handle| self.spot(handle));
            debug_assert!(spot.is_some(), "{number} names no blob");
            spot
        };
        let mut spots = handles.iter().filter_map(spot).peekable();
        while let Some(first) = spots.peek() {
            let class = first.class;
            let mut emptied = [0; FREED_AT_ONCE];
            let mut count = 0;
            let mut lists = self.classes[class].0.lock();
            while let Some(spot) = spots.next_if(|spot| spot.class == class) {
                if self.release_locked(&mut lists, spot) {
                    emptied[count] = spot.slot;
                    count += 1;
                }
            }
            drop(lists);
            for slot in &emptied[..count] {
                self.give_back(*slot, class, account);
            }
        }
    }

    /// A blob gets another owner, because the content moved to another address. Returns the handle
    /// that names it from now on: a sealed blob is not written to, but copied. A handle that names
    /// no blob of `from` is returned as it is, and loading it says so.
    ///
    /// # Errors
    ///
    /// [`Full`] where there is no room for the copy; nothing has changed then.
    ///
    /// # Safety
    ///
    /// The caller holds the locks of both pages, and `handle` stands in the word (or the frame) of
    /// `from`, which forgets it for the one that is returned.
    pub unsafe fn set_owner(
        &self,
        handle: Handle,
        from: PageNum,
        to: PageNum,
        account: &impl Payer,
    ) -> Result<Handle, Full> {
        let Some(spot) = self.spot(handle) else { return Ok(handle) };
        {
            // Compaction must not copy the header meanwhile.
            let _lists = self.classes[spot.class].0.lock();
            let header = self.header(spot).filter(|header| header.owner == from);
            let Some(header) = header else { return Ok(handle) };
            if spot.class == RAW_CLASS || !self.slabs[spot.slot as usize].is_sealed() {
                self.set_header(spot, BlobHeader { owner: to, ..header });
                return Ok(handle);
            }
        }
        // SAFETY: the caller's promise is `blob`'s too.
        let Ok(blob) = (unsafe { self.blob(handle) }) else { return Ok(handle) };
        let copy = self.store(to, blob.kind, blob.bytes, blob.hash, account)?;
        self.free_spot(spot, account);
        Ok(copy)
    }

    /// Drops the blob of a place, and gives its slab back if that was the last blob and this thread
    /// may do so. Returns the pages given back. The bytes stay: other members may read them.
    fn free_spot(&self, spot: Spot, account: &impl Payer) -> usize {
        // A statement of its own: the class's lock is dropped before the kernel is called.
        let is_emptied = self.release_locked(&mut self.classes[spot.class].0.lock(), spot);
        if is_emptied { self.give_back(spot.slot, spot.class, account) } else { 0 }
    }

    /// Drops a blob of the class whose `lists` these are; says whether its slab is to be given back.
    fn release_locked(&self, lists: &mut ClassLists, spot: Spot) -> bool {
        // Any thread may free, but only engine threads may give shared memory back.
        let keep = if self.home.is_shared() { Keep::All } else { Keep::One };
        let freed = lists.release(&self.slabs, spot.slot, spot.index, keep);
        if freed == Freed::Unsealed {
            self.let_go_locked(lists, spot.slot);
        }
        debug_assert!(freed != Freed::NotLive, "{spot:?} was free already");
        freed == Freed::Unlisted
    }

    /// Puts a blob into a slab of this class that has room.
    fn place(&self, class: usize, blob: &Blob<'_>) -> Option<Handle> {
        let mut lists = self.classes[class].0.lock();
        let slot = lists.with_room()?;
        self.place_locked(&mut lists, slot, blob)
    }

    /// Puts a blob into a slab of the class whose `lists` these are. The class's lock is held, so that
    /// compaction sees either no blob or all of it.
    fn place_locked(&self, lists: &mut ClassLists, slot: u32, blob: &Blob<'_>) -> Option<Handle> {
        let index = lists.take(&self.slabs, slot)?;
        let spot = Spot { slot, class: lists.class(), index };
        let to = self.bytes(spot, blob.bytes.len())?;
        // SAFETY: `to` has room for the bytes (`bytes` checks), and the place is ours alone: it
        // was free until `take`, and no other thread knows its handle yet.
        unsafe { to.copy_from_nonoverlapping(blob.bytes.as_ptr(), blob.bytes.len()) };
        self.set_header(spot, blob.header());
        spot.handle()
    }

    /// The place that a handle names, if a blob is in it.
    fn spot(&self, handle: Handle) -> Option<Spot> {
        let slot = handle.get() / SLOT_GRANULES as u32;
        let offset = handle.get() as usize % SLOT_GRANULES * GRANULE_BYTES;
        let slab = self.slabs.get(slot as usize)?;
        let class = slab.class()?;
        let index = offset / CLASS[class].bytes;
        let names_place = offset.is_multiple_of(CLASS[class].bytes) && index < CLASS[class].objects;
        (names_place && slab.is_live(index)).then_some(Spot { slot, class, index })
    }

    /// Where the header of a place lies: in front of the bytes, or apart for whole pages.
    fn header_words(&self, spot: Spot) -> &[AtomicU64; 2] {
        if spot.class == RAW_CLASS {
            return &self.raw_headers[spot.slot as usize][spot.index];
        }
        let at = spot.index * CLASS[spot.class].bytes;
        debug_assert!(at + HEADER_BYTES <= SLOT_BYTES);
        // SAFETY: inside the slot, whose memory is mapped as long as the pool lives, aligned to 64
        // bytes as all places are; any bytes are a value.
        unsafe { &*self.home.slot(spot.slot).add(at).cast::<[AtomicU64; 2]>() }
    }

    fn header(&self, spot: Spot) -> Option<BlobHeader> {
        // Relaxed: the page's lock, or the class's, orders these with `set_header`.
        let words = self.header_words(spot);
        BlobHeader::from_words([words[0].load(Relaxed), words[1].load(Relaxed)])
    }

    fn set_header(&self, spot: Spot, header: BlobHeader) {
        for (word, value) in self.header_words(spot).iter().zip(header.to_words()) {
            word.store(value, Relaxed);
        }
    }

    /// Where `length` bytes of a place lie; `None` where it is too small for them.
    fn bytes(&self, spot: Spot, length: usize) -> Option<*mut u8> {
        let class = &CLASS[spot.class];
        let header = if spot.class == RAW_CLASS { 0 } else { HEADER_BYTES };
        let at = spot.index * class.bytes + header;
        let fits = header + length <= class.bytes && at + length <= SLOT_BYTES;
        // SAFETY: `at` is inside the slot (checked, with the length).
        fits.then(|| unsafe { self.home.slot(spot.slot).add(at) })
    }

    /// A slot for a slab of this class, charged: an empty one of another class, or a new one.
    fn take_slot(&self, class: usize, account: &impl Payer) -> Option<u32> {
        let pages = CLASS[class].pages;
        let is_alike = |other: &usize| *other != class && CLASS[*other].pages == pages;
        let empty = (0..CLASSES)
            .filter(is_alike)
            .find_map(|other| self.classes[other].0.lock().take_empty(&self.slabs));
        if empty.is_some() {
            return empty;
        }
        if !account.try_charge(pages) {
            return None;
        }
        reach(Step::SlabCharged);
        let slot = self.home.take(pages);
        if slot.is_some() {
            reach(Step::SlabTaken);
            self.pages.fetch_add(pages, Relaxed);
            self.own_pages.fetch_add(pages, Relaxed);
        } else {
            account.uncharge(pages);
        }
        slot
    }

    /// Gives a slab of our own that is in no list back: first its memory, then its slot, then the
    /// charge. Returns the pages uncharged.
    fn give_back(&self, slot: u32, class: usize, account: &impl Payer) -> usize {
        let pages = CLASS[class].pages;
        self.slabs[slot as usize].clear();
        self.pages.fetch_sub(pages, Relaxed);
        self.own_pages.fetch_sub(pages, Relaxed);
        let uncharged = self.home.give_back(slot, pages);
        account.uncharge(uncharged);
        uncharged
    }
}
