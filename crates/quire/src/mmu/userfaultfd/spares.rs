//! Spare mappings, held back for the moment when the kernel gives no more.
//!
//! A process has `vm.max_map_count` mappings, and its application may use up all of them. What must
//! be done all the same is to take away, not to add: a window shows its home again, a range is
//! reserved again. In between that takes a few mappings more than it leaves. So a few are kept,
//! given up for that one call, and taken again after it.
//!
//! Owns those mappings. In an application that maps at that very moment it may get them: then the
//! call is tried again a few times, and they are taken back when there are some again.
//!
//! Locks: one mutex, held over the call that the spares are for, so that no two share them.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::{Errno, memory};
use crate::units::{PAGE_SHIFT, PAGE_SIZE};
use linux_raw_sys::general::MADV_DONTFORK;
use rustix::mm::{MapFlags, ProtFlags};

/// Mappings that are held back. A move over a part of a mapping wants four to be free (the kernel
/// refuses it below that), the one that is moved, and two for what is left of the other; once more
/// as many, where the application has more than it may have by one.
const SPARES: usize = 16;
/// How often a call is tried with the spares given up: others may take them.
const TRIES: usize = 64;

/// Spare mappings.
pub(super) struct Spares {
    /// Where they lie; 0 where there are none.
    place: Mutex<rank::Spares, usize>,
    /// Whether there are any, for who does not want the lock.
    are_held: AtomicBool,
}

impl Spares {
    /// None yet.
    pub const fn new() -> Spares {
        Spares { place: Mutex::new(0), are_held: AtomicBool::new(false) }
    }

    /// Takes the spares where they are not held; where the kernel has none they are taken later.
    pub fn hold(&self) {
        // Relaxed: a hint, looked at again under the lock.
        if !self.are_held.load(Ordering::Relaxed) {
            self.take(&mut self.place.lock());
        }
    }

    fn take(&self, place: &mut usize) {
        if *place == 0 {
            *place = map_apart().unwrap_or(0);
            // Relaxed: as above.
            self.are_held.store(*place != 0, Ordering::Relaxed);
        }
    }

    fn give_up(&self, place: &mut usize) {
        // Relaxed: as above.
        self.are_held.store(false, Ordering::Relaxed);
        release(core::mem::take(place));
    }

    /// Makes a call that leaves no more mappings than there were, with the spares where it is refused
    /// without.
    ///
    /// # Errors
    /// The call's.
    pub fn with(&self, mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
        let mut result = call();
        for _ in 0..TRIES {
            if result != Err(Errno::NOMEM) {
                break;
            }
            let mut place = self.place.lock();
            self.give_up(&mut place);
            result = call();
            self.take(&mut place);
        }
        result
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        self.give_up(&mut self.place.lock());
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
        // SAFETY: just mapped, and nobody knows of it.
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
