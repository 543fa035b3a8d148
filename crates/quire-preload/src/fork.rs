//! fork: a child must be managed before anything in it touches managed memory.
//!
//! A child may inherit the arena, but never its registration: until it has a userfaultfd of its
//! own, **a page that is swapped out reads as zeros, silently**. An atfork handler comes too late:
//! in a program with threads, glibc's fork walks every open `FILE` (on the program's heap) in the
//! child before the first handler runs. So the system call itself is caught, with Syscall User
//! Dispatch:
//!
//! 1. The *prepare* handler, registered before everybody's so that it runs after everybody's, arms
//!    a [`trap`] on the forking thread. From here on its system calls raise SIGSYS.
//! 2. libc goes on to its clone. The SIGSYS handler closes the heap's gate and the engine's, makes
//!    the clone, registers the child, opens the gates, and returns to libc with the clone's result
//!    as if nothing had happened. The trap is gone then, in the parent and in the child.
//!
//! fork, daemon, forkpty and libc's inner callers of fork all come by the prepare handler. Three
//! functions do not, and are therefore doors of their own here, which arm the same trap: `_Fork`,
//! `clone` and `syscall`. What shares the parent's memory (threads, vfork, posix_spawn) needs
//! none of this; only that threads have other numbers there than libc believes ([`lent`]), for which
//! `vfork` has a door too. A program that makes the system call with an instruction of its own is not seen;
//! the engine keeps the arena out of its child, which faults at the first touch.
//!
//! | module | owns |
//! |---|---|
//! | [`trap`] | a trap per forking thread, what is done with each call that it catches |
//! | [`request`] | the clone as it is made: without writes by the kernel to managed memory |
//! | [`lent`] | whether libc's numbers of threads can be trusted |
//! | [`disposition`] | the action of SIGSYS, which the process has only one of |
//! | [`kernel`] | the instructions: raw system calls, the return from a signal, the stack switch |

mod disposition;
mod kernel;
pub mod lent;
mod request;
mod trap;

use core::arch::naked_asm;
use core::ffi::{CStr, c_int, c_long, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

/// Takes fork. Called once, when the process is managed; allocates nothing.
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

/// A function of libc's that a door here leads to.
struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Next {
        Next { name, address: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Its address; must not be asked for the first time while a trap is armed.
    fn get(&self) -> *const c_void {
        // Relaxed: an address of code that was mapped before this library ran.
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            // SAFETY: a C string; RTLD_NEXT is valid in any shared library.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.address.store(address, Ordering::Relaxed);
        }
        address
    }
}

static NEXT_FORK: Next = Next::new(c"_Fork");
static NEXT_CLONE: Next = Next::new(c"clone");

/// The C function: fork without handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> libc::pid_t {
    let next = NEXT_FORK.get();
    if next.is_null() {
        // libc before 2.34: nobody could call what is not there, other than by name.
        crate::set_errno(Errno::NOSYS);
        return -1;
    }
    arm_if_managed();
    // SAFETY: the address of libc's _Fork, which has this type.
    unsafe { core::mem::transmute::<*const c_void, extern "C" fn() -> libc::pid_t>(next)() }
}

/// The C function. It must leave no frame of its own behind (the child never comes back through
/// it), so it arms, and jumps on with every argument where it was or should be.
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

/// clone's arguments in registers, as the door pushed them.
#[repr(C)]
struct CloneArguments {
    tls: usize,
    parent_tid: usize,
    argument: *mut c_void,
    flags: c_int,
    stack: *mut c_void,
    function: Option<trap::ChildFunction>,
}

/// Arms where `clone` would make a process with memory of its own; returns libc's clone.
extern "C" fn before_clone(arguments: &mut CloneArguments) -> *const c_void {
    let next = NEXT_CLONE.get();
    if arguments.flags & libc::CLONE_VM != 0 {
        lent::lend();
        return next;
    }
    // Without a function or a stack libc refuses before it makes any call: nothing would disarm.
    if let Some(function) = arguments.function
        && !arguments.stack.is_null()
        && let Some(process) = quire::process::current()
    {
        let start = trap::arm(process).set_child_function(function, arguments.argument);
        (arguments.function, arguments.argument) = start;
    }
    next
}

/// The C function, with libc's own instructions for the call itself: a call that comes back twice,
/// or on another stack, behaves as it would there.
///
/// # Safety
///
/// As for the call `number`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        "cmp rdi, {clone}",
        "je 2f",
        "cmp rdi, {fork}",
        "je 2f",
        "cmp rdi, {clone3}",
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
        clone = const libc::SYS_clone,
        fork = const libc::SYS_fork,
        clone3 = const libc::SYS_clone3,
        before_raw_clone = sym before_raw_clone,
        refused = sym refused,
    )
}

/// Arms where the call would make a process with memory of its own.
extern "C" fn before_raw_clone(number: c_long, first: usize) {
    if request::shares_memory(number, first) {
        lent::lend();
    } else {
        arm_if_managed();
    }
}

/// The C function, with the call made here: the child comes back by the same frame as its parent
/// later, so nothing of it may be left on the stack.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn vfork() -> libc::pid_t {
    naked_asm!(
        "sub rsp, 8",
        "call {lend}",
        "add rsp, 8",
        // The kernel keeps rdi; what lies on the stack the child may overwrite.
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
extern "C" fn refused(result: c_long) -> c_long {
    crate::set_errno(Errno::from_raw_os_error(-result as i32));
    -1
}
