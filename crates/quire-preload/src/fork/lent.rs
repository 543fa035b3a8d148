//! Whether libc's note of a thread's number can be trusted.
//!
//! A child of vfork runs in its parent's memory and on its parent's thread-local storage, where libc
//! has noted the parent's number; so does a child of clone with CLONE_VM, and a thread that libc did
//! not make. The kernel reports the faults of such a child under a number of its own. If it changed the
//! layout under the parent's number, its own faults would be deferred until the change is over, which
//! waits for them. So while memory is *lent*, a thread that changes the layout gives no number, and no
//! fault is deferred.
//!
//! Owns the count of loans. vfork's parent takes its loan back when it goes on. A loan of clone's stays,
//! since nothing tells when such a child has ended.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Relaxed throughout: the kernel's clone orders the count before the borrower's own calls, and for
/// all other threads either answer is right.
static LOANS: AtomicU32 = AtomicU32::new(0);

/// Whether numbers cannot be trusted.
pub fn is_lent() -> bool {
    LOANS.load(Ordering::Relaxed) != 0
}

/// Counts a loan, before the calling thread's memory is lent.
pub extern "C" fn lend() {
    LOANS.fetch_add(1, Ordering::Relaxed);
}

/// Ends a loan: the borrower has ended, or executed a program.
pub extern "C" fn take_back() {
    LOANS.fetch_sub(1, Ordering::Relaxed);
}

/// In a fork's child, which shares its memory with no other process. Where the clone was libc's own,
/// libc has noted the number of its thread; `noted` reads that.
pub fn become_child(noted: impl FnOnce() -> u32) {
    LOANS.store(0, Ordering::Relaxed);
    if noted() != sys::thread_id() {
        lend();
    }
}
