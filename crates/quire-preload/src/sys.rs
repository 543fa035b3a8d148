//! The system calls of this crate that go to the kernel as they are.
//!
//! Owns nothing. `libc::syscall` is a thin wrapper that no allocator or preload library interposes;
//! its result is turned into a `Result` here, so that callers set errno in one place.

use rustix::io::Errno;

/// Pages are 4 KiB on x86-64.
pub const PAGE: usize = 4096;

/// Makes the call `number`.
///
/// # Safety
///
/// The arguments fit the call, and what it does to memory is what the caller's caller asked for.
pub unsafe fn call(number: libc::c_long, args: [usize; 6]) -> Result<usize, Errno> {
    let kept = crate::ErrnoKept::new();
    let [a, b, c, d, e, f] = args;
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 {
        // SAFETY: libc's pointer to the calling thread's errno.
        let errno = Errno::from_raw_os_error(unsafe { *libc::__errno_location() });
        drop(kept);
        return Err(errno);
    }
    Ok(result as usize)
}

/// Sleeps while `word` is `expected`; may wake for no reason.
pub fn futex_wait(word: &core::sync::atomic::AtomicU32, expected: u32) {
    let flags = rustix::thread::futex::Flags::PRIVATE;
    // A wake, a changed word, a signal: the caller looks again in every case.
    let _ = rustix::thread::futex::wait(word, flags, expected, None);
}

/// Wakes all who sleep on `word`.
pub fn futex_wake_all(word: &core::sync::atomic::AtomicU32) {
    let flags = rustix::thread::futex::Flags::PRIVATE;
    // Nobody waiting is no error.
    let _ = rustix::thread::futex::wake(word, flags, i32::MAX as u32);
}

/// The calling thread's id.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_pid() as u32
}

/// Memory of the kernel's, readable and writable, outside the arena: for this crate's own tables.
pub fn map_unmanaged(bytes: usize) -> Option<usize> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping touches no memory that is in use.
    unsafe { call(libc::SYS_mmap, [0, bytes, prot as usize, flags as usize, usize::MAX, 0]).ok() }
}
