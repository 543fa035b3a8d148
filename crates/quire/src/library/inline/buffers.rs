//! Buffers, and a stack, for faults that are served in a signal handler.
//!
//! One pool of [`FaultStack`]s serves all address spaces of the process. A thread takes one for one
//! fault and returns it before it waits for an answer; so a thread that finds none waits for threads
//! that need nothing of it. The pool grows by two mappings when more faults are served at once than
//! ever before, and does not shrink: a fault stack costs the memory that was touched of it.
//!
//! A fault that reclaims, or reads the swap file, takes some 40 KiB of stack, which a thread of the
//! program need not have.
//!
//! A slot is empty, free or taken. There are no locks: a slot belongs to the thread whose
//! compare-and-swap took it.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::scratch::Scratch;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::sys::stack::Stack;

/// The most faults with buffers that are served at once.
const SLOTS: usize = 32;
/// How many of them may read the swap file by themselves.
pub(in crate::library) const READS_MAX: u32 = SLOTS as u32 / 2;

/// The same as for the threads that serve faults elsewhere.
const STACK_BYTES: usize = 256 << 10;

const EMPTY: u32 = 0;
const FREE: u32 = 1;
const TAKEN: u32 = 2;

struct FaultStack {
    scratch: Scratch,
    stack: Stack,
}

impl FaultStack {
    fn new() -> Result<FaultStack, Errno> {
        let mut stack = Stack::new(STACK_BYTES)?;
        // Made on the new stack, for a compressor is moved by way of the stack.
        let scratch = stack.run(Scratch::new)?;
        Ok(FaultStack { scratch, stack })
    }
}

struct StackSlot {
    state: AtomicU32,
    /// Initialized unless the slot is empty.
    fault_stack: UnsafeCell<MaybeUninit<FaultStack>>,
}

// SAFETY: only the thread that has taken the slot touches the fault stack.
unsafe impl Sync for StackSlot {}

static POOL: [StackSlot; SLOTS] = [const {
    StackSlot { state: AtomicU32::new(EMPTY), fault_stack: UnsafeCell::new(MaybeUninit::uninit()) }
}; SLOTS];
/// Threads that wait for a slot, or are about to.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Counts slots that were returned while a thread waited; the waiters sleep on it.
static RETURNS: AtomicU32 = AtomicU32::new(0);

/// A fault stack of the pool, which the drop returns.
pub(super) struct Borrowed(&'static StackSlot);

/// Makes a fault stack where there is none at all, so that a thread that waits for one will get it.
pub(super) fn prepare() -> Result<(), Errno> {
    // Acquire, as in `take_free`; nothing is read here but the state.
    if POOL.iter().any(|slot| slot.state.load(Ordering::Acquire) != EMPTY) {
        return Ok(());
    }
    take_empty().map(drop)
}

/// Lends a fault stack; waits where all are in use.
pub(super) fn borrow() -> Borrowed {
    if let Some(borrowed) = try_borrow() {
        return borrowed;
    }
    // SeqCst, as in the drop: either the thread that returns a slot sees that this one waits, or the
    // second look finds the slot.
    WAITING.fetch_add(1, Ordering::SeqCst);
    let borrowed = loop {
        let seen = RETURNS.load(Ordering::SeqCst);
        if let Some(borrowed) = try_borrow() {
            break borrowed;
        }
        futex::wait(&RETURNS, seen, Reach::Process, None);
    };
    WAITING.fetch_sub(1, Ordering::SeqCst);
    borrowed
}

fn try_borrow() -> Option<Borrowed> {
    take_free().or_else(|| take_empty().ok())
}

fn take_free() -> Option<Borrowed> {
    let is_taken = |slot: &&'static StackSlot| {
        // SeqCst: it acquires what the drop releases; `borrow` has the rest.
        slot.state.compare_exchange(FREE, TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    };
    POOL.iter().find(is_taken).map(Borrowed)
}

/// Fills an empty slot.
fn take_empty() -> Result<Borrowed, Errno> {
    let is_taken = |slot: &&'static StackSlot| {
        // Relaxed: an empty slot publishes nothing.
        slot.state.compare_exchange(EMPTY, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let slot = POOL.iter().find(is_taken).ok_or(Errno::AGAIN)?;
    // Relaxed: nothing was written.
    let give_back = |_: &Errno| slot.state.store(EMPTY, Ordering::Relaxed);
    let fault_stack = FaultStack::new().inspect_err(give_back)?;
    // SAFETY: the slot is ours, and has no fault stack that this would forget.
    unsafe { (*slot.fault_stack.get()).write(fault_stack) };
    Ok(Borrowed(slot))
}

/// In a fork's child, before it serves a fault: empties the slots that threads of the parent had
/// taken. Their buffers are lost.
pub(super) fn forget_parents() {
    for slot in &POOL {
        // Relaxed: one thread does this, and publishes it with what it does next.
        let _ = slot.state.compare_exchange(TAKEN, EMPTY, Ordering::Relaxed, Ordering::Relaxed);
    }
    WAITING.store(0, Ordering::Relaxed);
}

impl Borrowed {
    /// Does `work` with the buffers, on the stack.
    pub fn run<R>(&mut self, work: impl FnOnce(&mut Scratch) -> R) -> R {
        // SAFETY: the slot is taken, was filled by `take_empty`, and `self` is borrowed exclusively.
        let FaultStack { scratch, stack } =
            unsafe { (*self.0.fault_stack.get()).assume_init_mut() };
        stack.run(|| work(scratch))
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // SeqCst: it releases to `take_free`; `borrow` has the rest.
        self.0.state.store(FREE, Ordering::SeqCst);
        if WAITING.load(Ordering::SeqCst) > 0 {
            RETURNS.fetch_add(1, Ordering::SeqCst);
            futex::wake(&RETURNS, 1, Reach::Process);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn a_thread_that_finds_no_fault_stack_waits_for_one_and_no_two_have_the_same() {
        prepare().unwrap();
        let mut held: Vec<Borrowed> = core::iter::repeat_with(borrow).take(SLOTS).collect();
        for (number, fault_stack) in held.iter_mut().enumerate() {
            fault_stack.run(|scratch| scratch.page.fill(number as u8));
        }
        for (number, fault_stack) in held.iter_mut().enumerate() {
            let is_its =
                fault_stack.run(|scratch| scratch.page.iter().all(|&byte| byte == number as u8));
            assert!(is_its, "fault_stack {number}");
        }
        let (done, ended) = channel();
        let waiter = std::thread::spawn(move || {
            let number = borrow().run(|scratch| scratch.page[0]);
            done.send(number).unwrap();
        });
        assert!(ended.recv_timeout(Duration::from_millis(50)).is_err(), "all are in use");
        drop(held.remove(5));
        assert_eq!(ended.recv_timeout(Duration::from_secs(10)), Ok(5));
        waiter.join().unwrap();
    }
}
