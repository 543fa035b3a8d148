//! How a call of the program's runs: with all signals blocked, and on nothing that is managed.
//!
//! A thread's stack may be managed memory (a coroutine's, or one that was given to `pthread_attr_setstack`), and
//! with it the thread's block at its end. Any page of it may be out at any instruction, and the handler that serves
//! the fault takes leaf locks, and waits while the VMA index changes: this must not be the very thread that has
//! such a lock. So the thread makes the whole call on a stack of the engine's, and the kernel writes nothing to its
//! block meanwhile ([`rseq`](crate::sys::rseq)). The engine reads the block (for counters, and for the thread's
//! number), but not under a leaf lock.
//!
//! A call owns all that it reads: what it borrowed would lie on the thread's own stack.
//!
//! Signals are blocked from before the change of stacks until after it, libc's own among them, whatever the stack:
//! a program's handler that maps or forks would wait for the thread that it interrupted, and one that jumps would
//! take the stack along. Only SIGSYS comes all the same, to a thread with a fork's trap armed, whose system calls
//! raise it: the stack has room for that frame, of up to 12 KiB.
//!
//! Locks: the stack's mutex, outside of the space's lock. No handler takes it, nor any other thread of the
//! engine's. A thread that waits for it holds nothing, and one that has it needs no more than any thread that
//! makes a call.

use super::Process;
use crate::sys::Errno;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::stack::Stack;
use crate::sys::thread::{self, SignalsBlocked};

/// The stack for calls of threads whose own is managed.
pub(super) struct CallStack(Mutex<rank::CallStack, Stack>);

impl CallStack {
    /// # Errors
    /// `NOMEM`.
    pub fn new() -> Result<CallStack, Errno> {
        // As an engine thread's, which runs the same code.
        Ok(CallStack(Mutex::new(Stack::new(thread::STACK_BYTES)?)))
    }

    /// In a fork's child: no thread there is on the stack.
    pub fn after_fork_in_child(&self) {
        if self.0.is_locked() {
            // SAFETY: by a thread of the parent's; the one that forks was in no call.
            unsafe { self.0.force_unlock() };
        }
    }
}

impl Process {
    /// Makes a call of the program's.
    pub(super) fn call<R: 'static>(&'static self, act: impl FnOnce() -> R + 'static) -> R {
        let _signals = SignalsBlocked::new();
        let arena = self.arena();
        let on_stack = 0u8;
        let is_managed = |address| arena.contains(&address);
        if !is_managed((&raw const on_stack).addr()) && !is_managed(thread::thread_pointer()) {
            return act();
        }
        let mut stack = self.call_stack.0.lock();
        let _rseq = self.rseq.unregister_in(&arena);
        stack.run(act)
    }
}
