//! The action of SIGSYS: a process has one, and the program may want it too.
//!
//! Owns the action that was there before the first armed trap and puts it back after the last one.
//! A SIGSYS that no trap of ours raised, on any thread meanwhile, goes to that action.
//!
//! Lock: [`ACTION`], held for one or two system calls with every signal blocked. A child of fork
//! finds it in any state (another thread may have held it) and makes it new.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use super::kernel::{self, Action};
use crate::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
const HELD_WITH_WAITERS: u32 = 2;

/// What the lock guards.
struct Saved {
    /// Armed traps.
    users: u32,
    /// The action that was there before the first of them.
    action: Action,
}

struct Disposition {
    lock: AtomicU32,
    saved: UnsafeCell<Saved>,
}

// SAFETY: `saved` is reached under the lock only, or by a child's only thread.
unsafe impl Sync for Disposition {}

static ACTION: Disposition = Disposition {
    lock: AtomicU32::new(FREE),
    saved: UnsafeCell::new(Saved { users: 0, action: Action::DEFAULT }),
};

/// The handler's type.
pub type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Runs `f` under the lock.
fn with_saved<R>(f: impl FnOnce(&mut Saved) -> R) -> R {
    let lock = &ACTION.lock;
    // Acquire: pairs with the release below.
    if lock.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
        while lock.swap(HELD_WITH_WAITERS, Ordering::Acquire) != FREE {
            sys::futex_wait(lock, HELD_WITH_WAITERS);
        }
    }
    // SAFETY: under the lock, and `f` does not come back here.
    let result = f(unsafe { &mut *ACTION.saved.get() });
    // Release: the next holder sees what was written.
    if lock.swap(FREE, Ordering::Release) == HELD_WITH_WAITERS {
        sys::futex_wake_all(lock);
    }
    result
}

fn ours(handler: Handler) -> Action {
    Action {
        handler: handler as usize,
        flags: libc::SA_SIGINFO as u64 | kernel::SA_RESTORER,
        restorer: kernel::restorer as *const () as usize,
        mask: 0,
    }
}

/// One trap more: SIGSYS goes to `handler`.
pub fn take(handler: Handler) {
    with_saved(|saved| {
        saved.users += 1;
        if saved.users == 1 {
            let before = kernel::set_sigsys_action(&ours(handler));
            // The program may have asked for the action while it was ours, and set it again.
            let is_ours = before.handler == handler as usize;
            saved.action = if is_ours { Action::DEFAULT } else { before };
        }
    });
}

/// One trap fewer.
pub fn give_back(handler: Handler) {
    with_saved(|saved| {
        saved.users -= 1;
        if saved.users == 0 {
            put_back(saved, handler);
        }
    });
}

/// In a fork's child: its only thread has `users` traps, everybody else's are gone.
pub fn become_child(handler: Handler, users: u32) {
    ACTION.lock.store(FREE, Ordering::Relaxed);
    with_saved(|saved| {
        saved.users = users;
        if users == 0 {
            put_back(saved, handler);
        }
    });
}

fn put_back(saved: &Saved, handler: Handler) {
    let current = kernel::set_sigsys_action(&saved.action);
    if current.handler != handler as usize {
        // The program has set another one meanwhile: that is the one it wants.
        kernel::set_sigsys_action(&current);
    }
}

/// A SIGSYS that no trap raised goes where it would have gone.
///
/// # Safety
///
/// The arguments are those of a SIGSYS handler.
pub unsafe fn pass_on(info: *mut libc::siginfo_t, context: *mut c_void) {
    let action = with_saved(|saved| saved.action);
    // SAFETY: the kernel's siginfo. Codes above 0 are the kernel's own: the thread made a call
    // that a filter forbids.
    let is_forced = unsafe { (*info).si_code } > 0;
    match action.handler {
        libc::SIG_IGN if !is_forced => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            kernel::set_sigsys_action(&Action::DEFAULT);
            // Comes again when this handler returns, and ends the process.
            // SAFETY: as above.
            unsafe { queue(info) };
        }
        handler if action.flags & libc::SA_SIGINFO as u64 != 0 => {
            // SAFETY: the program gave this address as a handler of this type.
            unsafe {
                core::mem::transmute::<usize, Handler>(handler)(libc::SIGSYS, info, context);
            }
        }
        handler => {
            // SAFETY: the program gave this address as a handler of this type.
            unsafe {
                core::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(handler)(libc::SIGSYS);
            }
        }
    }
}

/// Sends the SIGSYS that `info` describes to the calling thread.
///
/// # Safety
///
/// `info` is the kernel's or a copy of it.
pub unsafe fn queue(info: *const libc::siginfo_t) {
    // SAFETY: calls without memory, and one that reads the caller's siginfo.
    unsafe {
        let process = kernel::call(libc::SYS_getpid, [0; 5]).unwrap_or(0);
        let thread = kernel::call(libc::SYS_gettid, [0; 5]).unwrap_or(0);
        let args = [process, thread, libc::SIGSYS as usize, info as usize, 0];
        let _ = kernel::call(libc::SYS_rt_tgsigqueueinfo, args);
    }
}
