//! Spare mappings, held back for the moment when the kernel gives no more.
//!
//! A process has `vm.max_map_count` mappings, and its application may use up all of them. To unmap a
//! range and reserve it again must work all the same. In between it takes a few mappings more than it
//! leaves. So this module owns a few, gives them up for that one call, and takes them again after it.
//! Where the application maps at that very moment it may get them: then the call is tried again, and
//! they are taken back when the kernel has some.
//!
//! Locks: one mutex, held over the call that the spares are for, so that no two share them.

use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::{Errno, memory};
use crate::units::{PAGE_SHIFT, PAGE_SIZE};
use linux_raw_sys::general::MADV_DONTFORK;
use rustix::mm::{MapFlags, ProtFlags};

/// Mappings that are held back. To map over a part of a mapping takes two more, for what is left of
/// it on both sides, and advice on the new one may take as many again; the rest is for other threads, which may
/// take some in between.
const SPARES: usize = 16;
/// How often a call is tried with the spares given up: others may take them.
const TRIES: usize = 64;

#[derive(Default)]
pub(super) struct Spares {
    /// Where they lie; 0 where there are none.
    place: Mutex<rank::Spares, usize>,
}

impl Spares {
    /// Takes the spares where they are not held; where the kernel has none they are taken later.
    pub fn hold(&self) {
        take(&mut self.place.lock());
    }

    /// Makes a call that leaves no more mappings than there were, with the spares where it is refused
    /// without.
    pub fn with(&self, mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
        let mut result = call();
        for _ in 0..TRIES {
            if result != Err(Errno::NOMEM) {
                break;
            }
            let mut place = self.place.lock();
            release(core::mem::take(&mut *place));
            result = call();
            take(&mut place);
        }
        result
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        release(core::mem::take(&mut *self.place.lock()));
    }
}

fn take(place: &mut usize) {
    if *place == 0 {
        *place = map_apart().unwrap_or(0);
    }
}

/// Maps as many stretches as there are spares, beside each other and each with other rights than the
/// next, so that the kernel counts them all.
fn map_apart() -> Result<usize, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let bytes = SPARES << PAGE_SHIFT;
    // SAFETY: a new mapping where the kernel likes.
    let start = unsafe {
        rustix::mm::mmap_anonymous(core::ptr::null_mut(), bytes, ProtFlags::empty(), flags)
    }? as usize;
    let split = || -> Result<(), Errno> {
        // SAFETY: just mapped, and no other thread knows of it.
        unsafe { memory::advise(start, bytes, MADV_DONTFORK) }?;
        for at in (1..SPARES).step_by(2) {
            // SAFETY: as above.
            unsafe { memory::protect(start + (at << PAGE_SHIFT), PAGE_SIZE, 1) }?;
        }
        Ok(())
    };
    split().inspect_err(|_| release(start))?;
    Ok(start)
}

fn release(start: usize) {
    if start != 0 {
        // SAFETY: mapped by `map_apart`, and never touched.
        let _ = unsafe { rustix::mm::munmap(start as *mut _, SPARES << PAGE_SHIFT) };
    }
}
