//! The instructions under the trap: raw system calls, the return from a signal, a stack of one's
//! own.
//!
//! Owns nothing. Everything here runs while the program's memory must not be touched, possibly on
//! a thread without libc's consent: no errno, no thread-locals.

use core::arch::{asm, naked_asm};
use core::ffi::c_void;
use core::sync::atomic::AtomicU8;

use rustix::io::Errno;

/// A system call: its number and its arguments.
#[derive(Clone, Copy)]
pub struct Call {
    pub number: libc::c_long,
    pub args: [usize; 6],
}

impl Call {
    /// Makes the call; the kernel's answer as it is, errors being -4095 to -1.
    ///
    /// # Safety
    ///
    /// The arguments fit the call, and what it does to memory is what its maker wants.
    pub unsafe fn make(&self) -> isize {
        let [a, b, c, d, e, f] = self.args;
        let result: isize;
        // SAFETY: the caller's promise; the kernel changes rax, rcx and r11 only.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") self.number as isize => result,
                in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
                lateout("rcx") _, lateout("r11") _,
                options(nostack),
            );
        }
        result
    }
}

/// Makes a call of up to five arguments.
///
/// # Safety
///
/// As for [`Call::make`].
pub unsafe fn call(number: libc::c_long, args: [usize; 5]) -> Result<usize, Errno> {
    let [a, b, c, d, e] = args;
    // SAFETY: the caller's promise.
    let result = unsafe { Call { number, args: [a, b, c, d, e, 0] }.make() };
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(result as usize) }
}

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
        0,
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
        0,
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

/// From here on `selector` decides about the calling thread's system calls.
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
    let _ = unsafe { call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0]) };
}

/// The calling thread's thread pointer: no other thread of the process has the same, and it is
/// had without a call.
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
/// the selector is as the program shall find it.
#[unsafe(naked)]
pub unsafe extern "C" fn return_from_signal(frame: usize) -> ! {
    naked_asm!("mov rsp, rdi", "jmp {restorer}", restorer = sym restorer)
}

/// Calls `function(argument)` on the stack that ends at `top`.
///
/// # Safety
///
/// `top` is 16-aligned and ends a stack that nobody uses; `function` may be called.
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
    let mut used = 0;
    let mut put = |text: &[u8]| {
        let room = line.len() - used;
        let count = text.len().min(room);
        line[used..used + count].copy_from_slice(&text[..count]);
        used += count;
    };
    let code = errno.raw_os_error() as u32;
    let digit = |unit: u32| b'0' + (code / unit % 10) as u8;
    put(b"quire: ");
    put(message.as_bytes());
    put(b" (errno ");
    put(&[digit(100), digit(10), digit(1)]);
    put(b")\n");
    // SAFETY: the line lives through the call.
    let _ = unsafe { call(libc::SYS_write, [2, line.as_ptr() as usize, used, 0, 0]) };
    exit_group(125)
}

/// Ends the process with all its threads.
pub fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: does not come back.
        let _ = unsafe { call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0]) };
    }
}
