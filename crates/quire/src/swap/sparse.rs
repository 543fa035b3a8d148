//! Tables in memory of our own: zeroed, taken from the kernel page by page as they are touched.
//!
//! Owns a table's memory: private, from the [yard](crate::sys::yard), which a fork's child inherits
//! like any other (copy-on-write), or a mapping of a memfd, which it shares. A table is never part of
//! a huge page (a table that is touched in one place must cost one page), and never lies in memory
//! that Quire manages.

use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::sys::yard;
use crate::units::PAGE_SIZE;

/// Types whose value may be all zero bytes, and which any number of threads may share.
///
/// # Safety
///
/// All-zero memory is a valid value, the type needs no drop, and it is `Sync`.
pub unsafe trait Zeroed: Sync {}

// SAFETY: integers; zero is a value of them.
unsafe impl Zeroed for AtomicU8 {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicU64 {}
// SAFETY: an array of values that may be zero.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {}

/// A table of `len` entries, all zero at first.
pub struct Sparse<T> {
    base: NonNull<T>,
    len: usize,
    home: Home,
}

/// Where a table lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Home {
    Private,
    Memfd,
}

// SAFETY: `Zeroed` demands `Sync` of the entries, and the mapping belongs to the table alone.
unsafe impl<T: Zeroed> Send for Sparse<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroed> Sync for Sparse<T> {}

impl<T: Zeroed> Sparse<T> {
    /// Reserves a table.
    ///
    /// # Errors
    ///
    /// What the kernel says, and `ENOMEM` for a size that no address space holds.
    pub fn new(len: usize) -> Result<Sparse<T>, Errno> {
        let bytes = bytes_of::<T>(len).ok_or(Errno::NOMEM)?;
        Ok(Sparse { base: yard::take(bytes)?.cast(), len, home: Home::Private })
    }

    /// The table that a memfd holds, shared with whoever else maps it.
    ///
    /// # Errors
    ///
    /// What mmap says, and `ENOMEM` for a size that no address space holds.
    ///
    /// # Safety
    ///
    /// The memfd has room for `len` entries, and can never shrink.
    pub unsafe fn shared(memfd: BorrowedFd<'_>, len: usize) -> Result<Sparse<T>, Errno> {
        let bytes = bytes_of::<T>(len).ok_or(Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            mmap(core::ptr::null_mut(), bytes, rights, MapFlags::SHARED, memfd, 0)?
        };
        // SAFETY: the range is the mapping. A kernel without THP refuses the advice, and then it
        // holds anyway.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
        let base = NonNull::new(base.cast::<T>()).ok_or(Errno::NOMEM)?;
        Ok(Sparse { base, len, home: Home::Memfd })
    }

    /// Whether a fork's child shares the table.
    pub fn is_shared(&self) -> bool {
        self.home == Home::Memfd
    }

    /// Takes memory for whole pages now, where doing so later could fail by a signal: private
    /// memory needs none. `false` where there is none to be had.
    pub fn populate(&self, bytes: Range<usize>) -> bool {
        if self.home == Home::Private {
            return true;
        }
        debug_assert!(bytes_of::<T>(self.len).is_some_and(|all| bytes.end <= all));
        // SAFETY: inside the mapping (asserted); the content stays as it is.
        let result = unsafe {
            let start = self.base.as_ptr().cast::<u8>().add(bytes.start);
            madvise(start.cast(), bytes.len(), Advice::LinuxPopulateWrite)
        };
        // A kernel that does not know the advice (before 5.14) takes it at the first write.
        matches!(result, Ok(()) | Err(Errno::INVAL))
    }

    /// Gives the memory of whole pages back to the kernel; their entries are zero again.
    ///
    /// # Safety
    ///
    /// No one holds a plain (non-atomic) reference into the pages.
    pub unsafe fn discard(&self, bytes: Range<usize>) {
        debug_assert!([bytes.start, bytes.end].iter().all(|at| at.is_multiple_of(PAGE_SIZE)));
        debug_assert!(bytes_of::<T>(self.len).is_some_and(|all| bytes.end <= all));
        // SAFETY: inside the mapping (asserted); entries may become zero at any time for anyone
        // who holds only atomics, and the caller promises that no one holds more.
        let result = unsafe {
            let start = self.base.as_ptr().cast::<u8>().add(bytes.start);
            let advice = match self.home {
                Home::Private => Advice::LinuxDontNeed,
                Home::Memfd => Advice::LinuxRemove,
            };
            madvise(start.cast(), bytes.len(), advice)
        };
        debug_assert!(result.is_ok(), "memory of our own can always be dropped: {result:?}");
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.base.cast()
    }

    /// The first byte, for tables that are used as plain memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr().cast()
    }
}

impl<T: Zeroed> Deref for Sparse<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping has room for `len` entries (`new`), lives as long as `self`, and
        // every byte pattern it can start with is a value (`Zeroed`).
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> Drop for Sparse<T> {
    fn drop(&mut self) {
        if let Some(bytes) = bytes_of::<T>(self.len) {
            // SAFETY: the mapping of `new`, whole, and no reference outlives `self`.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), bytes) };
        }
    }
}

/// Bytes of a table of `len` entries, in whole pages and at least one.
fn bytes_of<T>(len: usize) -> Option<usize> {
    yard::pages_of(len.checked_mul(size_of::<T>())?)
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn a_discarded_page_is_zero_again_and_its_neighbours_are_not() {
        let table = Sparse::<AtomicU64>::new(3 * PAGE_SIZE / 8).unwrap();
        for entry in table.iter() {
            entry.store(7, Relaxed);
        }
        // SAFETY: only atomics refer to it.
        unsafe { table.discard(PAGE_SIZE..2 * PAGE_SIZE) };
        assert_eq!(table[511].load(Relaxed), 7);
        assert!(table[512..1024].iter().all(|entry| entry.load(Relaxed) == 0));
        assert_eq!(table[1024].load(Relaxed), 7);
    }

    #[test]
    fn a_size_beyond_the_address_space_is_an_error() {
        assert!(Sparse::<AtomicU64>::new(usize::MAX / 2).is_err());
    }
}
