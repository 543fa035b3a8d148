//! Objects come and go.
//!
//! An object lives as long as it has users: handles, mappings, what is under way for it. The last of
//! them writes what is dirty while its use still counts. An object without users never gets any again.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::i_mmap::IMmap;
use super::requests::IoBuffer;
use super::rmap::Wait;
use super::strides::Strides;
use super::{BackingStore, OBJECT_PAGES_MAX, ObjectId, Objects, VmObject, stall, sync};
use crate::fault::order::Streams;
use crate::mmu::object::ObjectMmu;
use crate::sys::Errno;
use crate::sys::memory::{self, InitialProt, Table};
use crate::sys::mutex::Mutex;
use crate::units::{BLOCK_PAGES, PAGE_SIZE};

/// What keeps the bytes of an object that are not cached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    Store,
    /// They are in swap, as those of anonymous memory.
    Engine,
}

impl<M: ObjectMmu> Objects<M> {
    /// Makes an object of `length` bytes, which may grow to `length_max`. They rest in `store`;
    /// where the engine keeps them they are zeros at first, and `store` is only told of changes of
    /// length, and of the end. The caller is its first user.
    ///
    /// # Errors
    /// `NOMEM`, `MFILE`, and `NFILE` where there are too many objects; `FBIG` where it is too
    /// long.
    pub fn open(
        &self,
        store: &'static dyn BackingStore,
        length: u64,
        length_max: u64,
        keeper: Keeper,
    ) -> Result<ObjectId, Errno> {
        let pages_max = length_max.max(length).div_ceil(PAGE_SIZE as u64) as usize;
        if pages_max > OBJECT_PAGES_MAX {
            return Err(Errno::FBIG);
        }
        let memfd = self.space.mmu().memfd_open(pages_max.max(1))?;
        let pages = length.div_ceil(PAGE_SIZE as u64) as usize;
        let made = self.space.mmu().memfd_resize(memfd, pages).and_then(|()| {
            VmObject::settle(VmObject {
                blocks: Table::new(pages_max.div_ceil(BLOCK_PAGES).max(1))?,
                pages_max: pages_max.max(1),
                memfd,
                store,
                is_memory: keeper == Keeper::Engine,
                id: ObjectId(0),
                i_mmap: IMmap::default(),
                length: AtomicU64::new(length),
                users: AtomicUsize::new(1),
                cached: AtomicUsize::new(0),
                dirty: AtomicUsize::new(0),
                writeback: AtomicU32::new(0),
                privates: AtomicUsize::new(0),
                resize: Mutex::new(()),
                cut: AtomicU64::new(u64::MAX),
                cuts: AtomicU32::new(0),
                streams: Streams::default(),
                strides: Strides::default(),
                write_error: AtomicI32::new(0),
                write_error_page: AtomicU64::new(0),
                write_errors: AtomicU32::new(0),
                stall: stall::Stall::default(),
                synced: sync::Synced::new(),
                pins: Table::new(pages_max.max(1))?,
                pinned: AtomicUsize::new(0),
                pinned_writable: AtomicUsize::new(0),
                read_error: AtomicI32::new(0),
                read_error_page: AtomicU64::new(0),
            })
        });
        let mut object = made.inspect_err(|_| self.space.mmu().memfd_close(memfd))?;
        let _registry = self.registry.lock();
        let free = self.slots.iter().position(|slot| slot.load(Ordering::Relaxed).is_null());
        let Some(slot) = free else {
            // SAFETY: made above, and known to no other thread.
            unsafe { VmObject::discard(object) };
            self.space.mmu().memfd_close(memfd);
            return Err(Errno::NFILE);
        };
        // SAFETY: made above, and known to no other thread.
        unsafe { object.as_mut() }.id = ObjectId(slot as u32);
        // Release publishes the object.
        self.slots[slot].store(object.as_ptr(), Ordering::Release);
        self.slots_used.fetch_max(slot + 1, Ordering::Relaxed);
        Ok(ObjectId(slot as u32))
    }

    /// The object of a number that the caller keeps in use.
    pub fn object(&self, id: ObjectId) -> &VmObject {
        // Acquire pairs with the release in `open`.
        let object = self.slots[id.0 as usize].load(Ordering::Acquire);
        // SAFETY: in use, so that it is not discarded.
        unsafe { &*object }
    }

    /// Takes part in using an object that is in use.
    pub fn get(&self, id: ObjectId) {
        // Relaxed: it is in use already.
        self.object(id).users.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes part in using an object that may be on its way out; `false`: it is. The caller holds
    /// the registry's lock, or the object could be gone.
    pub(super) fn try_get(object: &VmObject) -> bool {
        let more = |users: usize| (users > 0).then_some(users + 1);
        // Relaxed: the registry's lock orders it against the end.
        object.users.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Ends one use, where there are others.
    pub(super) fn put_if_not_last(&self, id: ObjectId) -> bool {
        let fewer = |users: usize| (users > 1).then(|| users - 1);
        // AcqRel, as in `put`: what was done comes before the end.
        let users = &self.object(id).users;
        users.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fewer).is_ok()
    }

    /// Ends one use; says whether it was the last one, and the object is gone. What is dirty is
    /// written first, while the use still counts; what cannot be written then is lost, unless the
    /// caller has flushed before and seen to it.
    pub fn put(&self, id: ObjectId) -> bool {
        let object = self.object(id);
        let mut is_tried = false;
        let mut users = object.users.load(Ordering::Acquire);
        loop {
            if users == 1 && !is_tried && object.dirty_pages() > 0 {
                if let Ok(mut buffer) = IoBuffer::new() {
                    self.write_back_runs(object, object.range(), Wait::Yes, &mut buffer);
                }
                is_tried = true;
                users = object.users.load(Ordering::Acquire);
                continue;
            }
            // AcqRel: what other users did comes before the end. No user comes after the last:
            // see `try_get`.
            let end = object.users.compare_exchange(
                users,
                users - 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match end {
                Ok(1) => break,
                Ok(_) => return false,
                Err(found) => users = found,
            }
        }
        let store = object.store;
        let gone = {
            // Rounds over all objects are kept out.
            let _registry = self.registry.lock();
            let gone = self.slots[id.0 as usize].swap(core::ptr::null_mut(), Ordering::AcqRel);
            let Some(gone) = NonNull::new(gone) else { return false };
            let cached = object.cached.load(Ordering::Relaxed);
            self.forget_pins(object);
            self.space.mmu().memfd_close(object.memfd);
            self.cached.fetch_sub(cached, Ordering::Relaxed);
            self.dirty.fetch_sub(object.dirty.load(Ordering::Relaxed), Ordering::Relaxed);
            self.space.budget().uncharge(cached);
            gone
        };
        self.release_words(object);
        // SAFETY: nothing uses it any more: no mapping, no handle, nothing under way, and no round
        // over all objects finds it.
        unsafe { VmObject::discard(gone) };
        // Without the registry's lock, for which handlers wait: what a store does at its end may
        // take long, or touch memory of ours.
        store.release();
        self.after_cleaning();
        true
    }
}

impl VmObject {
    /// Puts an object where it stays: nothing here allocates.
    fn settle(object: VmObject) -> Result<NonNull<VmObject>, Errno> {
        let bytes = size_of::<VmObject>().next_multiple_of(PAGE_SIZE);
        let place = memory::reserve(bytes, InitialProt::ReadWrite)?.cast::<VmObject>();
        // SAFETY: fresh memory, large and aligned enough.
        unsafe { place.write(object) };
        Ok(place)
    }

    /// Gives an object's memory back.
    ///
    /// # Safety
    /// `settle` made it, and no reference to it is left.
    unsafe fn discard(object: NonNull<VmObject>) {
        let bytes = size_of::<VmObject>().next_multiple_of(PAGE_SIZE);
        // SAFETY: the caller's promise.
        unsafe {
            core::ptr::drop_in_place(object.as_ptr());
            memory::release(object.cast(), bytes);
        }
    }
}
