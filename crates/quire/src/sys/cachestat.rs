//! How much of a file the kernel has in its page cache, and what a thread has read from devices.

use linux_raw_sys::general::{
    __NR_cachestat, __NR_getrusage, RUSAGE_THREAD, cachestat, cachestat_range, rusage,
};
use rustix::fd::{AsRawFd, BorrowedFd};

use super::Errno;
use super::call::syscall;

/// Pages of `bytes` bytes from `offset` on that are in the page cache.
///
/// # Errors
/// `OPNOTSUPP` for hugetlbfs; `PERM` where a filter forbids it, and, from Linux 6.14 on, for a file that the caller
/// neither owns nor may write.
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

/// Bytes that the calling thread has had read from devices.
pub fn bytes_read() -> u64 {
    // SAFETY: integers, for which zero is valid.
    let mut used: rusage = unsafe { core::mem::zeroed() };
    let arguments = [RUSAGE_THREAD as usize, &raw mut used as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes `used`, which is of the call's own type and alive until it returns.
    let _ = unsafe { syscall(__NR_getrusage, arguments) };
    // Counted in blocks of 512 bytes.
    used.ru_inblock as u64 * 512
}
