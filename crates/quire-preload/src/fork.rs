//! fork: a child must be managed before anything in it touches managed memory.
//!
//! A child may inherit the arena, but never its registration: until it has a userfaultfd of its
//! own, **a page that is swapped out reads as zeros, silently**. An atfork handler comes too late:
//! in a program with threads, glibc's fork walks every open `FILE` (on the program's heap) in the
//! child before the first handler runs. So the system call itself is caught, with Syscall User
//! Dispatch:
//!
//! 1. The *prepare* handler, registered before all others so that it runs after them, arms a [`trap`]
//!    on the forking thread. From here on its system calls raise SIGSYS.
//! 2. libc goes on to its clone. The SIGSYS handler closes the heap's gate and the engine's, makes
//!    the clone, registers the child, opens the gates, and returns to libc with the clone's result
//!    as if nothing had happened. The trap is gone then, in the parent and in the child.
//!
//! fork, daemon, forkpty and libc's inner callers of fork all run the prepare handler. `_Fork`, `clone`
//! and [`syscall`](crate::by_number) do not, and are therefore functions of this library, which arm the same
//! trap. What shares the parent's memory (threads, vfork, posix_spawn) needs none of this. But threads have other
//! numbers there than libc has noted ([`lent`]), so `vfork` is here too. A program that makes the
//! system call by an instruction of its own is not noticed; the engine keeps the arena out of its
//! child, which faults at the first touch.
//!
//! | module | owns |
//! |---|---|
//! | [`trap`] | a trap per forking thread, what is done with each call that it catches |
//! | [`request`] | the clone as it is made: without writes by the kernel to managed memory |
//! | [`lent`] | whether libc's numbers of threads can be trusted |
//! | [`disposition`] | the action of SIGSYS, of which the process has only one |
//! | [`kernel`] | signals, dispatch, and the instructions: return from a signal, change of stack |

mod disposition;
mod kernel;
pub mod lent;
mod request;
mod trap;

use core::arch::naked_asm;
use core::ffi::{c_int, c_long, c_void};

use rustix::io::Errno;

use crate::next::Function;

/// Takes fork over. Called once, when the process is managed; allocates nothing.
pub fn install() {
    trap::reserve();
    // Registered once and never taken back. libc keeps the first 48 handlers without allocating,
    // and this is among the very first.
    // SAFETY: a handler without arguments that lives as long as this library.
    unsafe { libc::pthread_atfork(Some(prepare), None, None) };
}

extern "C" fn prepare() {
    arm_if_managed();
}

fn arm_if_managed() {
    if let Some(process) = quire::process::current() {
        trap::arm(process);
    }
}

type ForkFunction = extern "C" fn() -> libc::pid_t;
/// As [`clone`] jumps to it; its arguments are in their registers.
type CloneFunction = unsafe extern "C" fn();

// SAFETY: the type of libc's _Fork.
static NEXT_FORK: Function<ForkFunction> = unsafe { Function::new(c"_Fork") };
// SAFETY: a function, which is never called by this type.
static NEXT_CLONE: Function<CloneFunction> = unsafe { Function::new(c"clone") };

/// The C function: fork without handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> libc::pid_t {
    let Some(next) = NEXT_FORK.find(libc::RTLD_NEXT) else {
        // libc before 2.34 has none.
        crate::set_errno(Errno::NOSYS);
        return -1;
    };
    arm_if_managed();
    next()
}

/// The C function. The child never returns through it, so it must leave no frame of its own behind:
/// it arms the trap, and jumps on with every argument in its register.
///
/// # Safety
///
/// As for clone(2).
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn clone(
    function: *const c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
) -> c_int {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "lea rdi, [rsp + 8]",
        "call {before_clone}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        before_clone = sym before_clone,
    )
}

/// clone's arguments in registers, as `clone` pushed them.
#[repr(C)]
struct CloneArguments {
    tls: usize,
    parent_tid: usize,
    argument: *mut c_void,
    flags: c_int,
    stack: *mut c_void,
    function: Option<trap::ChildFunction>,
}

/// Arms the trap where `clone` would make a process with memory of its own; returns libc's clone.
extern "C" fn before_clone(arguments: &mut CloneArguments) -> Option<CloneFunction> {
    let next = NEXT_CLONE.find(libc::RTLD_NEXT);
    if arguments.flags & libc::CLONE_VM != 0 {
        lent::lend();
        return next;
    }
    // Without a function or a stack libc refuses before it makes a call that would disarm the trap.
    if let Some(function) = arguments.function
        && !arguments.stack.is_null()
        && let Some(process) = quire::process::current()
    {
        let start = trap::arm(process).set_child_function(function, arguments.argument);
        (arguments.function, arguments.argument) = start;
    }
    next
}

/// Arms the trap where the call would make a process with memory of its own.
pub extern "C" fn before_raw_clone(number: c_long, first: usize) {
    if request::shares_memory(number, first) {
        lent::lend();
    } else {
        arm_if_managed();
    }
}

/// The C function, with the call made here: the child returns by the same frame as its parent does
/// later, so nothing of this function may be left on the stack.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn vfork() -> libc::pid_t {
    naked_asm!(
        "sub rsp, 8",
        "call {lend}",
        "add rsp, 8",
        // The kernel keeps rdi; the child may overwrite what lies on the stack.
        "pop rdi",
        "mov eax, {vfork}",
        "syscall",
        "push rdi",
        "test rax, rax",
        "jnz 2f",
        "ret",
        "2:",
        "push rax",
        "call {take_back}",
        "pop rax",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "3:",
        "mov rdi, rax",
        "jmp {refused}",
        lend = sym lent::lend,
        take_back = sym lent::take_back,
        vfork = const libc::SYS_vfork,
        refused = sym refused,
    )
}

/// errno for the kernel's refusal `result`.
pub extern "C" fn refused(result: c_long) -> c_long {
    crate::set_errno(Errno::from_raw_os_error(-result as i32));
    -1
}
