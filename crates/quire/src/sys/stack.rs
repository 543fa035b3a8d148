//! A stack of the engine's own, for work that may take more than is left of its thread's.
//!
//! Owns the mapping. Its lowest page cannot be touched: an overflow is a crash, and overwrites nothing.

use core::arch::asm;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ptr::NonNull;

use super::{Errno, memory, yard};
use crate::units::PAGE_SIZE;

/// A stack, which one thread at a time may run on.
pub struct Stack {
    lowest: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory without a thread of its own; only a thread that has it alone runs on it.
unsafe impl Send for Stack {}

/// What is called on another stack, and what it returned; it lies on the stack of the caller.
struct StackCall<F, R> {
    work: ManuallyDrop<F>,
    result: MaybeUninit<R>,
}

impl Stack {
    /// Maps a stack of so many bytes, in whole pages, the lowest of which guards its end.
    pub fn new(bytes: usize) -> Result<Stack, Errno> {
        let lowest = yard::take(bytes)?;
        let stack = Stack { lowest, bytes };
        // SAFETY: the lowest page of a mapping of our own.
        unsafe { memory::protect(lowest.as_ptr() as usize, PAGE_SIZE, 0) }?;
        Ok(stack)
    }

    /// Does `work` on this stack. A panic there ends the process.
    ///
    /// The caller's stack is read once, before `work` begins, and written once, after its end: it may be memory
    /// that must not be touched meanwhile.
    pub fn run<F: FnOnce() -> R, R>(&mut self, work: F) -> R {
        extern "C" fn call<F: FnOnce() -> R, R>(call: *mut StackCall<F, R>) {
            // Volatile, both: else the compiler may use the places there for its own.
            // SAFETY: `run` passes its own, and waits; it does not use `work` again.
            unsafe {
                let work = (&raw const (*call).work).read_volatile();
                let result = ManuallyDrop::into_inner(work)();
                (&raw mut (*call).result).write_volatile(MaybeUninit::new(result));
            }
        }
        let mut made =
            StackCall { work: ManuallyDrop::new(work), result: MaybeUninit::<R>::uninit() };
        let top = self.lowest.as_ptr() as usize + self.bytes;
        // SAFETY: the stack is ours alone, as self is, and its end is aligned to a page; R12 is kept
        // by what is called, by its ABI, and has the old stack meanwhile, of which nothing is
        // touched, not even below its pointer. `call` does not unwind: it is of a C ABI.
        unsafe {
            asm!(
                "mov r12, rsp",
                "mov rsp, {top}",
                "call {call}",
                "mov rsp, r12",
                top = in(reg) top,
                call = in(reg) call::<F, R> as extern "C" fn(*mut StackCall<F, R>),
                in("rdi") &raw mut made,
                out("r12") _,
                clobber_abi("C"),
            );
        }
        // SAFETY: the call has returned.
        unsafe { made.result.assume_init() }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; no thread runs there, for self is ours.
        unsafe { memory::release(self.lowest, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_there_and_what_it_uses_and_returns_comes_through() {
        let mut stack = Stack::new(64 << 10).unwrap();
        let range = stack.lowest.as_ptr() as usize..stack.lowest.as_ptr() as usize + (64 << 10);
        let mut steps = [0u64; 4];
        let (place, sum) = stack.run(|| {
            let local = core::hint::black_box([7u64; 512]);
            steps.iter_mut().zip(1..).for_each(|(step, number)| *step = number);
            (local.as_ptr() as usize, local.iter().sum::<u64>())
        });
        assert!(range.contains(&place));
        assert_eq!((sum, steps), (7 * 512, [1, 2, 3, 4]));
        assert!(!range.contains(&(core::ptr::from_ref(&sum) as usize)), "back on its own");
    }
}
