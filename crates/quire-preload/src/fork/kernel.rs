//! What the trap asks of the kernel, and its instructions: the return from a signal, the change to
//! another stack. It all runs while the program's memory must not be touched, possibly on a thread
//! that libc does not know: no errno, no thread-locals.

use core::arch::{asm, naked_asm};
use core::ffi::c_void;
use core::sync::atomic::AtomicU8;
use std::io::Write as _;

use rustix::io::Errno;

use crate::sys::call;

/// A set of signals as the kernel has it: bit n-1 is signal n.
pub type Signals = u64;

/// The set of one signal.
pub const fn signal(number: i32) -> Signals {
    1 << (number - 1)
}

/// Makes `mask` the calling thread's signal mask and returns what it was.
pub fn set_signal_mask(mask: Signals) -> Signals {
    let mut before: Signals = 0;
    let args = [
        libc::SIG_SETMASK as usize,
        &raw const mask as usize,
        &raw mut before as usize,
        size_of::<Signals>(),
    ];
    // SAFETY: both sets live through the call, which cannot fail with such arguments.
    let _ = unsafe { call(libc::SYS_rt_sigprocmask, args) };
    before
}

/// What the kernel keeps for a signal.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    pub mask: Signals,
}

impl Action {
    pub const DEFAULT: Action = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
}

/// The kernel's flag for an action that brings its own way back.
pub const SA_RESTORER: u64 = 0x0400_0000;

/// Makes `action` SIGSYS's and returns what it was.
pub fn set_sigsys_action(action: &Action) -> Action {
    let mut before = Action::DEFAULT;
    let args = [
        libc::SIGSYS as usize,
        core::ptr::from_ref(action) as usize,
        &raw mut before as usize,
        size_of::<Signals>(),
    ];
    // SAFETY: both actions live through the call; a handler in `action` is the caller's business.
    let _ = unsafe { call(libc::SYS_rt_sigaction, args) };
    before
}

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
/// A selector's value: calls go to the kernel.
pub const ALLOW: u8 = 0;
/// A selector's value: calls raise SIGSYS.
pub const BLOCK: u8 = 1;
/// `si_code` of a SIGSYS that a blocked call raised.
pub const SYS_USER_DISPATCH: i32 = 2;

/// Bytes of [`restorer`] in which a call may be made whatever the selector says; the kernel
/// compares the address behind the `syscall` instruction.
const RESTORER_BYTES: usize = 11;

/// From here on `selector` says whether the calling thread's system calls raise SIGSYS.
pub fn start_dispatch(selector: &'static AtomicU8) -> Result<(), Errno> {
    let args = [
        PR_SET_SYSCALL_USER_DISPATCH,
        1,
        restorer as *const () as usize,
        RESTORER_BYTES,
        selector.as_ptr() as usize,
    ];
    // SAFETY: the selector lives for ever, and the kernel only reads it.
    unsafe { call(libc::SYS_prctl, args) }.map(drop)
}

/// The calling thread's system calls go to the kernel again.
pub fn stop_dispatch() {
    // SAFETY: no memory is involved.
    let _ = unsafe { call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH]) };
}

/// The calling thread's thread pointer: it is no other thread's, and needs no system call.
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: the ABI puts the thread pointer at its own address, for every thread of libc's.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags)) };
    pointer
}

/// Returns from a signal handler: the one place that may make a call while the selector blocks.
/// (Debuggers know the way back from a signal by exactly these bytes.)
#[unsafe(naked)]
pub extern "C" fn restorer() {
    naked_asm!("mov rax, 15", "syscall", "ud2")
}

/// Returns from the signal whose frame is at `frame`, instead of from the current one.
///
/// # Safety
///
/// `frame` is where the stack pointer stood when the program was about to return from a signal;
/// the selector is as the program is to find it.
#[unsafe(naked)]
pub unsafe extern "C" fn return_from_signal(frame: usize) -> ! {
    naked_asm!("mov rsp, rdi", "jmp {restorer}", restorer = sym restorer)
}

/// Calls `function(argument)` on the stack that ends at `top`.
///
/// # Safety
///
/// `top` is 16-aligned and ends a stack that is not in use; `function` may be called.
#[unsafe(naked)]
pub unsafe extern "C" fn call_on_stack(
    top: usize,
    function: unsafe extern "C" fn(*mut c_void),
    argument: *mut c_void,
) {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        "ret",
    )
}

/// Writes `message` to stderr and ends the process with 125, Quire's own failure.
pub fn fail(message: &str, errno: Errno) -> ! {
    let mut line = [0u8; 160];
    let mut rest = &mut line[..];
    // A message that is too long is cut off.
    let _ = writeln!(rest, "quire: {message} (errno {})", errno.raw_os_error());
    let used = 160 - rest.len();
    // SAFETY: the line lives through the call.
    let _ = unsafe { call(libc::SYS_write, [2, line.as_ptr() as usize, used]) };
    exit_group(125)
}

/// Ends the process with all its threads.
pub fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: does not come back.
        let _ = unsafe { call(libc::SYS_exit_group, [status as usize]) };
    }
}
