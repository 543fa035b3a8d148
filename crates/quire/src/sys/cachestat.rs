//! How much of a file the kernel has in its page cache.

use linux_raw_sys::general::{__NR_cachestat, cachestat, cachestat_range};
use rustix::fd::{AsRawFd, BorrowedFd};

use super::Errno;
use super::call::syscall;

/// Pages of `bytes` bytes from `offset` on that are in the page cache.
///
/// # Errors
/// `NOSYS` before Linux 6.5, `OPNOTSUPP` for hugetlbfs, `PERM` where a filter forbids it.
pub fn cached_pages(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<u64, Errno> {
    let range = cachestat_range { off: offset, len: bytes };
    // SAFETY: five integers, for which zero is valid.
    let mut found: cachestat = unsafe { core::mem::zeroed() };
    let arguments =
        [file.as_raw_fd() as usize, &raw const range as usize, &raw mut found as usize, 0, 0, 0];
    // SAFETY: the kernel reads `range` and writes `found`, both of the call's own types and alive
    // until it returns.
    unsafe { syscall(__NR_cachestat, arguments) }?;
    Ok(found.nr_cache)
}
