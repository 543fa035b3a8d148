//! In which process of a line of forks this is.
//!
//! A process id is not enough: it is used again, and a container within a container has the same ids
//! as the outer. So each process gets a number of its own, kept in a page that the kernel
//! wipes in a child (MADV_WIPEONFORK). A child that shares its parent's memory (vfork) shares the
//! number, and the mappings, with it.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const PAGE_BYTES: usize = 4096;

/// The page, once there is one; it is never unmapped.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
/// The last number that was given out. It is inherited, so a child's number is larger than those of
/// all its ancestors.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The number of this process; 0 where it has none yet, and so no handle of its own.
pub fn process_number() -> u64 {
    // Acquire pairs with the release in `page`: the page is mapped, and wiped on a fork.
    NonNull::new(PAGE.load(Ordering::Acquire)).map_or(0, |page| {
        // SAFETY: published by `page`, never unmapped.
        // Relaxed: the number says all there is to say.
        unsafe { page.as_ref() }.load(Ordering::Relaxed)
    })
}

/// The number of this process, given to it now where it has none.
pub fn number_process() -> Result<u64, Errno> {
    let word = page()?;
    let number = word.load(Ordering::Relaxed);
    if number != 0 {
        return Ok(number);
    }
    // Relaxed, all of it: numbers must differ between processes, which share neither word.
    let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    match word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Ok(next),
        Err(number) => Ok(number),
    }
}

fn page() -> Result<&'static AtomicU64, Errno> {
    // Acquire: as in `process_number`.
    if let Some(page) = NonNull::new(PAGE.load(Ordering::Acquire)) {
        // SAFETY: as in `process_number`.
        return Ok(unsafe { page.as_ref() });
    }
    // SAFETY: at no address in particular.
    let fresh = unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        mmap_anonymous(null_mut(), PAGE_BYTES, rights, MapFlags::PRIVATE)?
    };
    // SAFETY: the page just mapped, which no other thread knows.
    let wiped = unsafe { madvise(fresh, PAGE_BYTES, Advice::LinuxWipeOnFork) };
    let published = wiped.map(|()| {
        // Release publishes the page; Acquire is for the page of a thread that came first.
        PAGE.compare_exchange(null_mut(), fresh.cast(), Ordering::Release, Ordering::Acquire)
    });
    let page = match published {
        Ok(Ok(_)) => fresh.cast(),
        other => {
            // SAFETY: mapped above, and not published.
            let _ = unsafe { munmap(fresh, PAGE_BYTES) };
            other?.unwrap_or_else(|first| first)
        }
    };
    // SAFETY: a mapped page, zeroed or in use by atomics only, and never unmapped.
    Ok(unsafe { &*page })
}
