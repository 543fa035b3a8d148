//! Whether a thread's number can be known by what libc has noted of it.
//!
//! A child of vfork runs in its parent's memory and on its parent's thread-local storage, where libc
//! has the parent's number; so does one of clone with CLONE_VM, and a thread that no libc made. The
//! kernel reports the faults of such a child under a number of its own. If it changed the layout under
//! the parent's number, its own faults would be deferred until it is done, and it waits for them.
//! So while memory is *lent*, nobody who changes the layout gives a number: no fault is deferred then.
//!
//! Owns the count of those it is lent to. vfork's parent takes back what it lent when it goes on. What
//! clone lends stays lent: nobody says when such a child has ended.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Relaxed throughout: a borrower's own calls come after the loan was counted by the thread that
/// made it (the kernel's clone orders the two), and for all others either answer is right.
static LOANS: AtomicU32 = AtomicU32::new(0);

/// Whether numbers cannot be trusted.
pub fn is_lent() -> bool {
    LOANS.load(Ordering::Relaxed) != 0
}

/// Before the calling thread's memory is lent.
pub extern "C" fn lend() {
    LOANS.fetch_add(1, Ordering::Relaxed);
}

/// The borrower is gone: it has ended, or executed a program.
pub extern "C" fn take_back() {
    LOANS.fetch_sub(1, Ordering::Relaxed);
}

/// In a fork's child, whose memory is nobody else's. libc knows the number of its thread where the
/// clone was libc's own; `noted` is what it says.
pub fn become_child(noted: impl FnOnce() -> u32) {
    LOANS.store(0, Ordering::Relaxed);
    if noted() != sys::thread_id() {
        lend();
    }
}
