//! The memory of a pool: private, of which a fork's child inherits a copy, or a memfd's, which it
//! shares. It is never part of a huge page, and never lies in memory that Quire manages.

use core::ops::Range;
use core::ptr::NonNull;

use rustix::fd::BorrowedFd;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

use crate::sys::{Errno, memory, yard};
use crate::units::PAGE_SIZE;

/// A mapping of zeros, made of whole pages.
pub(super) struct PoolMapping {
    start: NonNull<u8>,
    bytes: usize,
    is_shared: bool,
}

// SAFETY: the mapping belongs to this value alone, which never looks into it.
unsafe impl Send for PoolMapping {}
// SAFETY: as above.
unsafe impl Sync for PoolMapping {}

impl PoolMapping {
    pub fn private(bytes: usize) -> Result<PoolMapping, Errno> {
        let bytes = yard::pages_of(bytes).ok_or(Errno::NOMEM)?;
        Ok(PoolMapping { start: yard::take(bytes)?, bytes, is_shared: false })
    }

    /// The memory that a memfd holds. The memfd has so many bytes, and can never shrink: else a touch
    /// would be a SIGBUS.
    pub fn shared(memfd: BorrowedFd<'_>, bytes: usize) -> Result<PoolMapping, Errno> {
        let bytes = yard::pages_of(bytes).ok_or(Errno::NOMEM)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists. A
        // kernel without THP refuses the first advice, and needs none. A core dump would take memory for
        // each page that was never touched.
        let start = unsafe {
            let start = mmap(core::ptr::null_mut(), bytes, rights, MapFlags::SHARED, memfd, 0)?;
            let _ = madvise(start, bytes, Advice::LinuxNoHugepage);
            let _ = madvise(start, bytes, Advice::LinuxDontDump);
            start
        };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(PoolMapping { start, bytes, is_shared: true })
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Whether a fork's child shares the memory.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Takes memory for whole pages now, where doing so later could fail by a signal: private
    /// memory needs none. `false` where there is none to be had.
    pub fn populate(&self, bytes: Range<usize>) -> bool {
        if !self.is_shared {
            return true;
        }
        // SAFETY: the advice leaves the content as it is.
        let result = unsafe { self.advise(bytes, Advice::LinuxPopulateWrite) };
        // A kernel that does not know the advice (before 5.14) takes the memory at the first write.
        matches!(result, Ok(()) | Err(Errno::INVAL))
    }

    /// Gives the memory of whole pages back to the kernel; they are zeros again.
    ///
    /// # Safety
    ///
    /// No thread has a plain (non-atomic) reference into the pages.
    pub unsafe fn discard(&self, bytes: Range<usize>) {
        let advice = if self.is_shared { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: atomics may become zero at any time, and the caller promises that no reference is
        // to anything else.
        let result = unsafe { self.advise(bytes, advice) };
        debug_assert!(result.is_ok(), "memory of our own can always be dropped: {result:?}");
    }

    /// # Safety
    ///
    /// What the advice does to the content of the range is allowed.
    unsafe fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Errno> {
        debug_assert!([range.start, range.end].iter().all(|at| at.is_multiple_of(PAGE_SIZE)));
        assert!(range.start <= range.end && range.end <= self.bytes);
        // SAFETY: the range is inside the mapping; the rest is the caller's promise.
        unsafe { madvise(self.start.add(range.start).as_ptr().cast(), range.len(), advice) }
    }
}

impl Drop for PoolMapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, to which no reference outlives the pool.
        unsafe { memory::release(self.start, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discarded_page_is_zero_again_and_its_neighbours_are_not() {
        let mapping = PoolMapping::private(3 * PAGE_SIZE).unwrap();
        // SAFETY: the pages are this test's, which has no references into them.
        let bytes = unsafe {
            mapping.start().write_bytes(7, 3 * PAGE_SIZE);
            mapping.discard(PAGE_SIZE..2 * PAGE_SIZE);
            [0, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 3 * PAGE_SIZE - 1]
                .map(|at| mapping.start().add(at).read())
        };
        assert_eq!(bytes, [7, 7, 0, 0, 7, 7]);
    }

    #[test]
    fn a_size_beyond_the_address_space_is_an_error() {
        assert!(PoolMapping::private(usize::MAX / 2).is_err());
    }
}
