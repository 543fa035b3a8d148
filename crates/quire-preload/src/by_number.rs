//! The C function `syscall`: a program may make any call by its number.
//!
//! What this library has a function for is made by that function, or the engine would not know what the
//! program did to its memory. What makes a process arms the trap of [`fork`]. Every other call is made here,
//! with libc's own instructions: one that returns twice, or on another stack, behaves as it does in libc.

use core::arch::naked_asm;
use core::ffi::c_long;

use crate::{fork, limit, lock, map, shared};

/// What is to be done with a call.
const PLAIN: u8 = 0;
const BY_FUNCTION: u8 = 1;
const CLONE: u8 = 2;

macro_rules! by_function {
    (|$($argument:ident),*| $($number:ident => $call:expr,)*) => {
        /// The same for each number; those behind the last are plain.
        static KINDS: [u8; 512] = {
            let mut kinds = [PLAIN; 512];
            $(kinds[libc::$number as usize] = BY_FUNCTION;)*
            kinds[libc::SYS_clone as usize] = CLONE;
            kinds[libc::SYS_fork as usize] = CLONE;
            kinds[libc::SYS_clone3 as usize] = CLONE;
            kinds
        };

        extern "C" fn by_function(number: c_long, $($argument: usize),*) -> c_long {
            // SAFETY: the program's own calls.
            unsafe {
                match number {
                    $(libc::$number => $call as c_long,)*
                    _ => fork::refused(-c_long::from(libc::ENOSYS)),
                }
            }
        }
    };
}

by_function! { |a, b, c, d, e, f|
    SYS_mmap => map::mmap(a as _, b, c as _, d as _, e as _, f as _),
    SYS_munmap => map::munmap(a as _, b),
    SYS_mremap => map::mremap(a as _, b, c, d as _, e as _),
    SYS_mprotect => map::mprotect(a as _, b, c as _),
    SYS_pkey_mprotect => map::pkey_mprotect(a as _, b, c as _, d as _),
    SYS_madvise => map::madvise(a as _, b, c as _),
    SYS_msync => map::msync(a as _, b, c as _),
    SYS_mincore => map::mincore(a as _, b, c as _),
    SYS_mlock => lock::mlock(a as _, b),
    SYS_mlock2 => lock::mlock2(a as _, b, c as _),
    SYS_munlock => lock::munlock(a as _, b),
    SYS_mlockall => lock::mlockall(a as _),
    SYS_munlockall => lock::munlockall(),
    SYS_shmat => shared::shmat(a as _, b as _, c as _),
    SYS_setrlimit => limit::setrlimit(a as _, b as _),
    SYS_prlimit64 => limit::prlimit(a as _, b as _, c as _, d as _),
}

/// The C function.
///
/// # Safety
///
/// As for the call `number`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        "cmp rdi, {numbers}",
        "jae 1f",
        "lea rax, [rip + {kinds}]",
        "movzx eax, byte ptr [rax + rdi]",
        "cmp eax, {by_number}",
        // Its arguments are where they are to be.
        "je {by_function}",
        "cmp eax, {clone}",
        "je 2f",
        "1:",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "2:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {before_raw_clone}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp 1b",
        "3:",
        "mov rdi, rax",
        "jmp {refused}",
        numbers = const KINDS.len(),
        kinds = sym KINDS,
        by_number = const BY_FUNCTION,
        by_function = sym by_function,
        clone = const CLONE,
        before_raw_clone = sym fork::before_raw_clone,
        refused = sym fork::refused,
    )
}
