//! The action of SIGSYS: a process has one, and the program may want it too.
//!
//! Owns the action that was there before the first armed trap and puts it back after the last one.
//! A SIGSYS that no trap of ours raised, on any thread meanwhile, goes to that action.
//!
//! Lock: [`SAVED`], held for one or two system calls with every signal blocked. A fork's child may
//! find it held by a thread that it does not have, and opens it.

use core::ffi::{c_int, c_void};

use rustix_futex_sync::Mutex;

use super::kernel::{self, Action};
use crate::sys;

/// What the lock guards.
struct Saved {
    /// Armed traps.
    users: u32,
    /// The action that was there before the first of them.
    action: Action,
}

static SAVED: Mutex<Saved> = Mutex::new(Saved { users: 0, action: Action::DEFAULT });

/// The handler's type.
pub type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

fn ours(handler: Handler) -> Action {
    Action {
        handler: handler as usize,
        flags: libc::SA_SIGINFO as u64 | kernel::SA_RESTORER,
        restorer: kernel::restorer as *const () as usize,
        mask: 0,
    }
}

/// Counts a trap more: SIGSYS goes to `handler`.
pub fn take(handler: Handler) {
    let mut saved = SAVED.lock();
    saved.users += 1;
    if saved.users == 1 {
        let before = kernel::set_sigsys_action(&ours(handler));
        // The program may have asked for the action while it was ours, and set it again.
        let is_ours = before.handler == handler as usize;
        saved.action = if is_ours { Action::DEFAULT } else { before };
    }
}

/// Counts a trap fewer.
pub fn give_back(handler: Handler) {
    let mut saved = SAVED.lock();
    saved.users -= 1;
    if saved.users == 0 {
        put_back(&saved, handler);
    }
}

/// In a fork's child: its only thread has `users` traps, and those of all other threads are gone.
pub fn become_child(handler: Handler, users: u32) {
    if SAVED.is_locked() {
        // SAFETY: the thread that held it is not in this process.
        unsafe { SAVED.force_unlock() };
    }
    let mut saved = SAVED.lock();
    saved.users = users;
    if users == 0 {
        put_back(&saved, handler);
    }
}

fn put_back(saved: &Saved, handler: Handler) {
    let current = kernel::set_sigsys_action(&saved.action);
    if current.handler != handler as usize {
        // The program has set another one meanwhile: that is the one it wants.
        kernel::set_sigsys_action(&current);
    }
}

/// Does with a SIGSYS that no trap raised what would have been done with it.
///
/// # Safety
///
/// The arguments are those of a SIGSYS handler.
pub unsafe fn pass_on(info: *mut libc::siginfo_t, context: *mut c_void) {
    let action = SAVED.lock().action;
    // SAFETY: the kernel's siginfo. Codes above 0 are the kernel's own: the thread made a call
    // that a filter forbids.
    let is_forced = unsafe { (*info).si_code } > 0;
    match action.handler {
        libc::SIG_IGN if !is_forced => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            kernel::set_sigsys_action(&Action::DEFAULT);
            // The signal comes again when this handler returns, and ends the process.
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
        let process = sys::call(libc::SYS_getpid, []).unwrap_or(0);
        let thread = sys::call(libc::SYS_gettid, []).unwrap_or(0);
        let args = [process, thread, libc::SIGSYS as usize, info as usize];
        let _ = sys::call(libc::SYS_rt_tgsigqueueinfo, args);
    }
}
