//! rseq: what the kernel writes to a thread's memory of its own accord.
//!
//! Before a thread goes on that was preempted the kernel writes the CPU's number to the thread's rseq area, which
//! libc has registered inside the thread's block. Where that block is managed memory the write is a fault, at any
//! instruction of the thread's. A thread that must not fault has no area meanwhile.
//!
//! Owns where libc's areas are. One that the program has registered itself, in place of libc's, is not known.

use core::ops::Range;
use core::sync::atomic::{AtomicIsize, AtomicU32, Ordering};

use linux_raw_sys::general::__NR_rseq;

use super::call::syscall;
use super::thread;

const UNREGISTER: usize = 1;
/// What stands before every place where a restartable sequence is given up: glibc's for x86-64.
const SIGNATURE: usize = 0x5305_3053;
/// The kernel's first version of the area; libc says how much of it is in use, and registers no less.
const BYTES_MIN: u32 = 32;

/// Where libc's threads have their areas.
#[derive(Default)]
pub(crate) struct RseqAreas {
    /// From the thread pointer.
    offset: AtomicIsize,
    /// 0: there are none.
    bytes: AtomicU32,
}

/// The calling thread has no area, until this is dropped.
#[must_use]
pub(crate) struct RseqUnregistered {
    area: usize,
    bytes: usize,
}

impl RseqAreas {
    /// What libc says: `__rseq_offset` and `__rseq_size`.
    pub fn set(&self, offset: isize, size: u32) {
        self.offset.store(offset, Ordering::Relaxed);
        // Release publishes the offset.
        self.bytes.store(if size == 0 { 0 } else { size.max(BYTES_MIN) }, Ordering::Release);
    }

    /// Unregisters the calling thread's area, if it has one and that lies in `managed`.
    pub fn unregister_in(&self, managed: &Range<usize>) -> Option<RseqUnregistered> {
        let bytes = self.bytes.load(Ordering::Acquire) as usize;
        let area =
            thread::thread_pointer().wrapping_add_signed(self.offset.load(Ordering::Relaxed));
        if bytes == 0 || !managed.contains(&area) {
            return None;
        }
        // A child of vfork, on its parent's block, has none: the kernel says so, and nothing has changed.
        // SAFETY: the kernel writes to an area that it has written to before.
        let is_done = unsafe { syscall(__NR_rseq, [area, bytes, UNREGISTER, SIGNATURE, 0, 0]) };
        is_done.ok().map(|_| RseqUnregistered { area, bytes })
    }
}

impl Drop for RseqUnregistered {
    fn drop(&mut self) {
        // Where it is refused the thread goes on without: libc and others ask the kernel for the CPU then.
        // SAFETY: as libc has registered it; the block lives as long as its thread, which is the caller.
        let _ = unsafe { syscall(__NR_rseq, [self.area, self.bytes, 0, SIGNATURE, 0, 0]) };
    }
}
