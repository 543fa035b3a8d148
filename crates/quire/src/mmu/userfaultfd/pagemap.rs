//! /proc/self/pagemap: what the kernel has at each page of this process.

use linux_raw_sys::general::__NR_pread64;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};

use crate::sys::{Errno, call};
use crate::units::PAGE_SHIFT;

/// A page is there.
pub const PRESENT: u64 = 1 << 63;
/// The kernel has swapped it out, or left a mark in its place.
pub const SWAPPED: u64 = 1 << 62;
/// No other process has it mapped.
pub const EXCLUSIVE: u64 = 1 << 56;

/// Opens it. That fails without /proc, as another user, and where there is no room for descriptors.
pub fn open() -> Result<OwnedFd, Errno> {
    rustix::fs::open(c"/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Reads the entries of the pages from an address on; `false` where that cannot be had.
pub fn read(pagemap: i32, start: usize, entries: &mut [u64]) -> bool {
    let bytes = size_of_val(entries);
    let offset = (start >> PAGE_SHIFT) * size_of::<u64>();
    let place = entries.as_mut_ptr() as usize;
    // SAFETY: the kernel writes at most so many entries, for which there is room.
    let read =
        unsafe { call::syscall(__NR_pread64, [pagemap as usize, place, bytes, offset, 0, 0]) };
    read == Ok(bytes)
}
