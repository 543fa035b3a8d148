//! What an unmodified program meets: the preload library of `quire run`.
//!
//! The library is between the program and libc. It decides which calls concern managed memory, and
//! hands those to [`quire::process`].
//!
//! | module | what the program calls |
//! |---|---|
//! | [`heap`] | malloc, free and their kin: mimalloc on arena memory, large blocks mapped one by one |
//! | [`map`] | mmap, munmap, mremap, mprotect, madvise and their kin |
//! | [`lock`] | mlock and its kin |
//! | [`shared`] | shmat |
//! | [`fork`] | fork |
//! | [`by_number`] | syscall |
//!
//! C++'s operators `new` and `delete` are not defined here: those of libstdc++ and libc++ call malloc,
//! aligned_alloc and free through the dynamic linker, so they arrive at [`heap`] anyway, with the
//! program's new-handler still in force. To define them would save one jump a call, and would take
//! them away from programs that bring replacements of their own in a library.
//!
//! # Managed or not
//!
//! [`start`] joins the process to its tree at the first call of any entry point, which may come
//! from inside ld.so, before libc's and all other constructors. A process that cannot join runs
//! unmanaged: each entry point then does what the next library in line would have done.
//!
//! # What may not be used here
//!
//! The standard library is linked, but nothing in this crate allocates through it, prints or
//! panics on purpose: the program's allocator is this crate.

mod by_number;
#[cfg(feature = "failpoints")]
mod failpoints;
mod fork;
mod heap;
mod limit;
mod lock;
mod map;
mod next;
mod shared;
mod start;
mod sys;

/// Sets the calling thread's errno.
fn set_errno(errno: rustix::io::Errno) {
    // SAFETY: libc's pointer to the calling thread's errno is valid for the thread's life.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
}

/// errno as it was when this was made, restored when this is dropped: free may not change it.
struct ErrnoKept(i32);

impl ErrnoKept {
    fn new() -> ErrnoKept {
        // SAFETY: as in `set_errno`.
        ErrnoKept(unsafe { *libc::__errno_location() })
    }
}

impl Drop for ErrnoKept {
    fn drop(&mut self) {
        // SAFETY: as in `set_errno`.
        unsafe { *libc::__errno_location() = self.0 };
    }
}
