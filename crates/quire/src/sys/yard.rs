//! A yard: address space where small tables and stacks lie side by side.
//!
//! A process has some thirty of them when it starts. A mapping for each (made, trimmed, advised, with
//! a page table of its own) would cost as much as all the rest of the start. What is taken is given back to the
//! kernel page by page, by [`memory::release`], and never taken again, so a yard only has to know where the
//! next goes. It has no locks.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::Errno;
use super::memory::{self, InitialProt};
use crate::units::PAGE_SIZE;

pub(super) const YARD_BYTES: usize = 8 << 20;
/// What is larger has a mapping of its own.
const TAKEN_BYTES_MAX: usize = YARD_BYTES / 8;

/// Where the next goes in the newest yard, which ends at the next multiple of its size.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Takes zeroed memory, in whole pages and at least one, that costs memory only where it is touched.
/// Inherited by fork like any private memory; to be given back by [`memory::release`].
pub fn take(bytes: usize) -> Result<NonNull<u8>, Errno> {
    let bytes = pages_of(bytes).ok_or(Errno::NOMEM)?;
    if bytes > TAKEN_BYTES_MAX {
        return memory::reserve_aligned(bytes, PAGE_SIZE, InitialProt::ReadWrite);
    }
    // Relaxed, all of them: the thread that gets the addresses is the first to touch them.
    loop {
        let next = NEXT.load(Ordering::Relaxed);
        let rest = next.next_multiple_of(YARD_BYTES) - next;
        if rest >= bytes {
            let taken =
                NEXT.compare_exchange(next, next + bytes, Ordering::Relaxed, Ordering::Relaxed);
            if taken.is_ok() {
                return NonNull::new(next as *mut u8).ok_or(Errno::NOMEM);
            }
            continue;
        }
        let Ok(yard) = memory::reserve_aligned(YARD_BYTES, YARD_BYTES, InitialProt::ReadWrite)
        else {
            // A limit may have room for what is asked.
            return memory::reserve_aligned(bytes, PAGE_SIZE, InitialProt::ReadWrite);
        };
        let start = yard.as_ptr() as usize;
        let opened =
            NEXT.compare_exchange(next, start + bytes, Ordering::Relaxed, Ordering::Relaxed);
        if opened.is_ok() {
            if let Some(next) = NonNull::new(next as *mut u8).filter(|_| rest > 0) {
                // SAFETY: the end of the yard before, of which no thread can take anything any more.
                unsafe { memory::release(next, rest) };
            }
            return Ok(yard);
        }
        // Another thread was quicker to open one.
        // SAFETY: no other thread knows of this one.
        unsafe { memory::release(yard, YARD_BYTES) };
    }
}

/// What [`take`] makes of a size: whole pages, at least one.
pub fn pages_of(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn what_is_taken_is_zero_and_nobody_elses() {
        let threads: Vec<_> = (0..4u8)
            .map(|thread| {
                std::thread::spawn(move || {
                    // Each more than one yard in all, and some too large for any.
                    let sizes =
                        (0..400).map(|at| 1 + at * 997 % 70_000).chain([TAKEN_BYTES_MAX + 1]);
                    let taken: Vec<_> = sizes
                        .map(|bytes| {
                            let start = take(bytes).unwrap();
                            // SAFETY: taken just now.
                            let all =
                                unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), bytes) };
                            assert!((start.as_ptr() as usize).is_multiple_of(PAGE_SIZE));
                            assert!(all.iter().all(|&byte| byte == 0));
                            all.fill(thread + 1);
                            all
                        })
                        .collect();
                    for all in taken {
                        assert!(all.iter().all(|&byte| byte == thread + 1));
                        let start = NonNull::from(&mut all[0]);
                        // SAFETY: of `take`; nothing refers to it any more.
                        unsafe { memory::release(start, pages_of(all.len()).unwrap()) };
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_size_that_no_address_space_holds_is_refused() {
        assert_eq!(take(usize::MAX), Err(Errno::NOMEM));
        assert_eq!(take(usize::MAX / 2), Err(Errno::NOMEM));
    }
}
