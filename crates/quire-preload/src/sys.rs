//! The system calls of this crate that go to the kernel as they are, by an instruction of its own:
//! no library can interpose it, errno stays, and no thread-local is touched. So they may be made where
//! the program's memory must not be, and on a thread that libc does not know.

use core::arch::asm;
use core::sync::atomic::AtomicU32;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

/// Pages are 4 KiB on x86-64.
pub const PAGE: usize = 4096;

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
    /// The arguments fit the call, and what it does to memory is what the program asked for, or
    /// touches nothing of the program's.
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

/// Makes the call `number`; arguments that are not given are 0.
///
/// # Safety
///
/// As for [`Call::make`].
pub unsafe fn call<const N: usize>(
    number: libc::c_long,
    given: [usize; N],
) -> Result<usize, Errno> {
    let mut args = [0; 6];
    args[..N].copy_from_slice(&given);
    // SAFETY: the caller's promise.
    let result = unsafe { Call { number, args }.make() };
    if (-4095..0).contains(&result) {
        return Err(Errno::from_raw_os_error(-result as i32));
    }
    Ok(result as usize)
}

/// Sleeps while `word` is `expected`; may wake for no reason.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    // A wake, a changed word, a signal: the caller looks again in every case.
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// Wakes all threads that sleep on `word`.
pub fn futex_wake_all(word: &AtomicU32) {
    // It is no error that none does.
    let _ = futex::wake(word, Flags::PRIVATE, i32::MAX as u32);
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
    unsafe { call(libc::SYS_mmap, [0, bytes, prot as usize, flags as usize, usize::MAX]).ok() }
}
