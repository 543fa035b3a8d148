//! The trap: from the prepare handler's end to the clone, every system call of the forking thread
//! raises SIGSYS and is made, or made differently, here.
//!
//! Owns a table of traps, one for each thread that is between the two. A trap is its thread's
//! alone once claimed. No signal handler of the program's runs while a trap is armed, except for
//! faults of the thread's own: the trap keeps the mask that the program sees, and the return from the
//! SIGSYS that made the clone restores it.
//!
//! The gate, the clone and the child's registration run on the trap's own stack: the caller's may
//! be managed memory (a coroutine's, or one given to pthread_attr_setstack), and managed memory must
//! not be touched while no fault is served.

use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

use quire::process::Process;
use quire::steps::{Step, reach};
use rustix::io::Errno;

use super::kernel::{self, ALLOW, BLOCK, Signals};
use super::request::{self, Request};
use super::{disposition, lent};
use crate::heap::gate::{self, Closing};
use crate::sys::{self, Call};

/// Threads that can be between prepare and clone at a time; any further one waits in prepare.
const TRAPS: usize = 8;
/// Bytes of a trap's stack: the engine's part of a fork, and what it calls.
const STACK_BYTES: usize = 64 * 1024;

/// Signals that say what the thread itself did wrong: blocked, they would end the process.
const OWN_FAULTS: Signals = kernel::signal(libc::SIGSEGV)
    | kernel::signal(libc::SIGBUS)
    | kernel::signal(libc::SIGFPE)
    | kernel::signal(libc::SIGILL)
    | kernel::signal(libc::SIGTRAP);
const SIGSYS: Signals = kernel::signal(libc::SIGSYS);

/// A thread that is about to fork.
pub struct Trap {
    /// Its thread pointer; 0 where the trap is free.
    thread: AtomicUsize,
    /// What the kernel does with the thread's calls: [`ALLOW`] or [`BLOCK`].
    selector: AtomicU8,
    /// Where the trap's stack ends; 0 until it has one.
    stack_top: AtomicUsize,
    own: Own,
}

/// What only the trap's thread touches.
struct Own {
    process: Cell<Option<&'static Process>>,
    /// Forks in progress: more than one where a handler of a fault forks inside a trap.
    depth: Cell<u32>,
    /// The signal mask that the program believes in.
    mask: Cell<Signals>,
    /// A SIGSYS that came from elsewhere while the program had it blocked.
    set_aside: Cell<Option<libc::siginfo_t>>,
    call: Cell<Call>,
    outcome: Cell<Outcome>,
    /// What libc's clone is to run in the child.
    child: Cell<Option<(ChildFunction, *mut c_void)>>,
}

/// What a program gives to libc's clone.
pub type ChildFunction = unsafe extern "C" fn(*mut c_void) -> c_int;

/// What became of the clone.
#[derive(Clone, Copy)]
enum Outcome {
    /// In the parent: the child's id, or an error.
    Parent(isize),
    /// In the child: where its stack starts, or 0 for where the parent's was.
    Child { stack_top: usize },
}

// SAFETY: `own` is used by the thread in `thread` only, or by a child's only thread.
unsafe impl Sync for Trap {}

impl Trap {
    const fn new() -> Trap {
        Trap {
            thread: AtomicUsize::new(0),
            selector: AtomicU8::new(ALLOW),
            stack_top: AtomicUsize::new(0),
            own: Own {
                process: Cell::new(None),
                depth: Cell::new(0),
                mask: Cell::new(0),
                set_aside: Cell::new(None),
                call: Cell::new(Call { number: 0, args: [0; 6] }),
                outcome: Cell::new(Outcome::Parent(0)),
                child: Cell::new(None),
            },
        }
    }

    /// Remembers what the child is to run; returns what libc's clone is to run instead.
    pub fn set_child_function(
        &'static self,
        function: ChildFunction,
        argument: *mut c_void,
    ) -> (Option<ChildFunction>, *mut c_void) {
        self.own.child.set(Some((function, argument)));
        (Some(run_child), core::ptr::from_ref(self).cast_mut().cast())
    }

    /// Gives the trap a stack, with a guard page below. Whether it has one.
    fn reserve_stack(&self) -> bool {
        // Relaxed: written by the trap's holder, or before the first.
        if self.stack_top.load(Ordering::Relaxed) != 0 {
            return true;
        }
        let Some(start) = sys::map_unmanaged(STACK_BYTES + sys::PAGE) else { return false };
        let guard = [start, sys::PAGE, libc::PROT_NONE as usize];
        // SAFETY: a page of the new mapping. Where it fails the stack has no guard, and works.
        let _ = unsafe { sys::call(libc::SYS_mprotect, guard) };
        self.stack_top.store(start + sys::PAGE + STACK_BYTES, Ordering::Relaxed);
        true
    }
}

static TABLE: [Trap; TRAPS] = [const { Trap::new() }; TRAPS];
/// The futex of threads that wait for a free trap: counts releases.
static RELEASES: AtomicU32 = AtomicU32::new(0);

/// Makes sure that at least one thread can fork.
pub fn reserve() {
    if !TABLE[0].reserve_stack() {
        kernel::fail(
            "no memory for fork's stack; raise the address limit (ulimit -v)",
            Errno::NOMEM,
        );
    }
}

/// The calling thread's trap, if it is armed.
fn current() -> Option<&'static Trap> {
    let me = kernel::thread_pointer();
    // Relaxed: only this thread can have put its own pointer there.
    TABLE.iter().find(|trap| trap.thread.load(Ordering::Relaxed) == me)
}

/// A free trap with a stack, from now on the calling thread's.
fn claim() -> &'static Trap {
    let me = kernel::thread_pointer();
    loop {
        // Acquire: pairs with the release in `release`; a trap freed before is found free below.
        let releases = RELEASES.load(Ordering::Acquire);
        for trap in &TABLE {
            // Acquire: pairs with the release in `release`; its former thread is done with it.
            let claimed =
                trap.thread.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if claimed && trap.reserve_stack() {
                return trap;
            }
            if claimed {
                // There is no memory for another stack: the thread waits for a trap that has one.
                trap.thread.store(0, Ordering::Release);
            }
        }
        sys::futex_wait(&RELEASES, releases);
    }
}

fn release(trap: &Trap) {
    // Release: pairs with `claim`.
    trap.thread.store(0, Ordering::Release);
    RELEASES.fetch_add(1, Ordering::Release);
    sys::futex_wake_all(&RELEASES);
}

/// Arms a trap on the calling thread; the next clone that does not share memory springs it.
pub fn arm(process: &'static Process) -> &'static Trap {
    if let Some(trap) = current() {
        trap.own.depth.set(trap.own.depth.get() + 1);
        return trap;
    }
    let mask = kernel::set_signal_mask(Signals::MAX);
    let trap = claim();
    trap.own.process.set(Some(process));
    trap.own.depth.set(1);
    trap.own.mask.set(mask);
    trap.own.set_aside.set(None);
    disposition::take(on_sigsys);
    dispatch(trap);
    kernel::set_signal_mask((!OWN_FAULTS | mask) & !SIGSYS);
    // Release: nothing moves behind it. The thread's next call is caught.
    trap.selector.store(BLOCK, Ordering::Release);
    trap
}

/// What libc's clone runs in the child. When the program's function has returned libc would end the
/// calling thread only, and the engine's threads would keep the process alive: so all of it is ended.
unsafe extern "C" fn run_child(argument: *mut c_void) -> c_int {
    // SAFETY: `set_child_function` gives the trap; the child's copy is the child's alone, and is
    // read before the child can fork.
    let child = unsafe { &*argument.cast::<Trap>() }.own.child.take();
    // SAFETY: the program's own function and argument.
    let status = child.map_or(0, |(function, argument)| unsafe { function(argument) });
    kernel::exit_group(status)
}

/// Has the kernel look at the trap's selector, which allows calls until it is set.
fn dispatch(trap: &'static Trap) {
    trap.selector.store(ALLOW, Ordering::Release);
    if let Err(errno) = kernel::start_dispatch(&trap.selector) {
        // libc cannot be kept from forking here, and the child would have no arena.
        kernel::fail(
            "cannot fork: the kernel refuses to dispatch system calls; Linux 5.11 is needed, and a \
             sandbox that allows prctl",
            errno,
        );
    }
}

/// The action of SIGSYS: for calls that a trap caught, and for any other SIGSYS meanwhile.
unsafe extern "C" fn on_sigsys(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let trap = current();
    // SAFETY: the kernel's siginfo.
    let is_caught = unsafe { (*info).si_code } == kernel::SYS_USER_DISPATCH;
    match trap {
        Some(trap) if is_caught => {
            // From here on calls are allowed, the engine's among them.
            trap.selector.store(ALLOW, Ordering::Release);
            // SAFETY: the handler's own argument, the context that it returns to.
            on_call(trap, unsafe { &mut *context.cast::<libc::ucontext_t>() });
        }
        Some(trap) if trap.own.mask.get() & SIGSYS != 0 => {
            // SAFETY: the kernel's siginfo.
            trap.own.set_aside.set(Some(unsafe { *info }));
        }
        _ => {
            let before = trap.map(|trap| trap.selector.swap(ALLOW, Ordering::AcqRel));
            // SAFETY: the handler's own arguments.
            unsafe { disposition::pass_on(info, context) };
            if let (Some(trap), Some(before)) = (trap, before) {
                trap.selector.store(before, Ordering::Release);
            }
        }
    }
}

/// A register of the interrupted program.
fn register(context: &mut libc::ucontext_t, index: c_int) -> &mut i64 {
    &mut context.uc_mcontext.gregs[index as usize]
}

/// Does what the program's call asks for, and puts the result into the program's rax.
fn on_call(trap: &'static Trap, context: &mut libc::ucontext_t) {
    let number = *register(context, libc::REG_RAX);
    let args =
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9]
            .map(|index| *register(context, index) as usize);
    let call = Call { number, args };
    let result = match number {
        libc::SYS_rt_sigprocmask => change_mask(trap, &call),
        libc::SYS_rt_sigreturn => {
            // The end of a handler of a fault of the thread's own.
            trap.selector.store(BLOCK, Ordering::Release);
            let frame = *register(context, libc::REG_RSP) as usize;
            // SAFETY: the program made this call with its stack pointer there.
            unsafe { kernel::return_from_signal(frame) }
        }
        _ if !request::is_clone(number) => {
            // SAFETY: the program's own call, as it made it.
            unsafe { call.make() }
        }
        _ if request::shares_memory(number, args[0]) => {
            // A fork handler that another library registered earlier makes a thread, or spawns. That
            // cannot be done from inside a signal handler, so it is refused as if resources were short.
            -(Errno::AGAIN.raw_os_error() as isize)
        }
        _ => return spring(trap, call, context),
    };
    *register(context, libc::REG_RAX) = result as i64;
    trap.selector.store(BLOCK, Ordering::Release);
}

/// rt_sigprocmask on the mask that the program believes in: newer libcs block every signal around
/// their clone, and a caught call with SIGSYS blocked would end the process.
fn change_mask(trap: &Trap, call: &Call) -> isize {
    let [how, set, before, bytes, ..] = call.args;
    let invalid = -(Errno::INVAL.raw_os_error() as isize);
    if bytes != size_of::<Signals>() {
        return invalid;
    }
    let mask = trap.own.mask.get();
    if set != 0 {
        // SAFETY: the program gives a set of 8 bytes to read.
        let set = unsafe { (set as *const Signals).read_unaligned() };
        let changed = match how as c_int {
            libc::SIG_BLOCK => mask | set,
            libc::SIG_UNBLOCK => mask & !set,
            libc::SIG_SETMASK => set,
            _ => return invalid,
        };
        trap.own.mask.set(changed);
    }
    if before != 0 {
        // SAFETY: the program gives a set of 8 bytes to write.
        unsafe { (before as *mut Signals).write_unaligned(mask) };
    }
    0
}

/// Makes the clone, and takes the trap away in both processes.
fn spring(trap: &'static Trap, call: Call, context: &mut libc::ucontext_t) {
    trap.own.call.set(call);
    let argument = core::ptr::from_ref(trap).cast_mut().cast();
    // SAFETY: the stack is the trap's; its thread is here, and not on it.
    unsafe { kernel::call_on_stack(trap.stack_top.load(Ordering::Relaxed), fork, argument) };
    // From here on this runs in the child as well, where faults on its copy of the stack are served.
    let outcome = trap.own.outcome.get();
    let depth = trap.own.depth.get() - 1;
    trap.own.depth.set(depth);
    let (result, stack_top) = match outcome {
        Outcome::Parent(result) => (result, 0),
        Outcome::Child { stack_top } => (0, stack_top),
    };
    if let Outcome::Child { .. } = outcome {
        // No other thread is in the child, and dispatch ended with the clone.
        TABLE.iter().filter(|other| !core::ptr::eq(*other, trap)).for_each(|other| {
            other.thread.store(0, Ordering::Relaxed);
        });
        disposition::become_child(on_sigsys, depth.min(1));
        trap.own.set_aside.set(None);
    }
    *register(context, libc::REG_RAX) = result as i64;
    if stack_top != 0 {
        *register(context, libc::REG_RSP) = stack_top as i64;
    }
    if depth > 0 {
        // Another fork of this thread is still on its way to its clone.
        dispatch(trap);
        trap.selector.store(BLOCK, Ordering::Release);
        return;
    }
    kernel::stop_dispatch();
    let mask = &raw mut context.uc_sigmask;
    // SAFETY: the kernel's part of the mask is its first 8 bytes; the rest is not there.
    unsafe { mask.cast::<Signals>().write_unaligned(trap.own.mask.get()) };
    if let Some(info) = trap.own.set_aside.take() {
        // SAFETY: a copy of the kernel's. The signal waits until the program takes it.
        unsafe { disposition::queue(&raw const info) };
    }
    if let Outcome::Parent(_) = outcome {
        disposition::give_back(on_sigsys);
    }
    release(trap);
}

/// Closes the gates, makes the clone, opens the gates in both processes: on the trap's own stack.
unsafe extern "C" fn fork(argument: *mut c_void) {
    // SAFETY: `spring` gives the trap, which lives for ever.
    let trap: &'static Trap = unsafe { &*argument.cast::<Trap>() };
    let mut request = Request::new(&trap.own.call.get());
    reach(Step::Caught);
    let Some(process) = trap.own.process.get() else { return };
    // The heap's gate first: a thread inside the heap may need the engine to get out of it.
    let refused = |errno: Errno| Outcome::Parent(-(errno.raw_os_error() as isize));
    if gate::close() == Closing::Refused {
        return trap.own.outcome.set(refused(Errno::AGAIN));
    }
    reach(Step::HeapClosed);
    let guard = match process.fork_begin() {
        Ok(guard) => guard,
        Err(errno) => {
            gate::open();
            return trap.own.outcome.set(refused(errno));
        }
    };
    let result = request.make();
    if result != 0 {
        let result = guard.in_parent(result);
        gate::open();
        request.finish_parent(result);
        reach(Step::ParentDone);
        trap.own.outcome.set(Outcome::Parent(result));
        return;
    }
    if let Err(errno) = guard.in_child() {
        kernel::fail(
            "a fork's child cannot be managed, so it ends before it runs, and fork fails",
            errno,
        );
    }
    reach(Step::Started);
    gate::open_in_child();
    request.finish_child();
    reach(Step::ChildDone);
    lent::become_child(crate::start::noted_number);
    trap.own.outcome.set(Outcome::Child { stack_top: request.stack_top });
}
