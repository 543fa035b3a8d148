//! The steps of what members do together, at each of which a test may have one killed: a fork's, those of
//! the account, the pool, the swap file and the market.
//!
//! Without the feature `failpoints` a step costs no instruction. With it, a program arms one step ([`arm`]);
//! a fork's child inherits that.

#![deny(unsafe_code)]

/// Declares the steps and their names in tests.
macro_rules! steps {
    ($($(#[$doc:meta])* $step:ident = $name:literal,)*) => {
        /// First a fork's, in the order in which each side takes them: the parent's until the clone, then
        /// those after it, then the child's. Behind them the others.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        pub enum Step {
            $($(#[$doc])* $step,)*
        }

        /// The steps' names, by number.
        #[cfg(feature = "failpoints")]
        pub const NAMES: &[&core::ffi::CStr] = &[$($name,)*];
    };
}

steps! {
    /// The clone was caught, and nothing else has happened.
    Caught = c"parent: caught",
    /// No other thread is inside the heap.
    HeapClosed = c"parent: heap closed",
    /// The space's lock is taken.
    Locked = c"parent: locked",
    /// Room for the child is charged ahead, as far as it is known.
    RoomMade = c"parent: room made",
    /// The engine's threads stand still.
    GateClosed = c"parent: gate closed",
    /// Limbo is empty, and the child's share is charged.
    Charged = c"parent: charged",
    /// A child would inherit arena and pool.
    Inheritable = c"parent: inheritable",
    Cloned = c"parent: cloned",
    /// Another child would not inherit.
    Closed = c"parent: closed",
    /// The child has joined, or is dead.
    ChildKnown = c"parent: child known",
    GateOpened = c"parent: gate opened",
    /// The heap is open, and thread ids are written.
    ParentDone = c"parent: done",
    /// The child has one thread and no engine.
    Born = c"child: born",
    /// The engine's first thread runs, without descriptors.
    FirstThread = c"child: first thread",
    HelloSent = c"child: hello sent",
    Welcomed = c"child: welcomed",
    /// It has userfaultfds.
    Attached = c"child: attached",
    Registered = c"child: registered",
    /// Another child would not inherit.
    Disinherited = c"child: disinherited",
    /// The state that is the parent's alone is forgotten.
    Ready = c"child: ready",
    /// All engine threads run.
    Started = c"child: started",
    /// The heap is open, and thread ids are written: the program goes on.
    ChildDone = c"child: done",
    /// Pages are charged that may be more than there are.
    Intended = c"charge: intended",
    /// A slab of packed pages is charged, and has no place.
    SlabCharged = c"pool: slab charged",
    /// It has one.
    SlabTaken = c"pool: slab taken",
    /// A page is packed, and its word does not say so.
    Packed = c"pool: page packed",
    SegmentTaken = c"swap file: segment taken",
    SegmentWritten = c"swap file: segment written",
    /// What was written counts, and no page's word says so.
    SegmentLive = c"swap file: segment live",
    /// This member has requested that another give memory.
    Requested = c"market: requested",
    /// It has given what was requested, and the one that did so does not know.
    Answering = c"market: answering",
}

#[cfg(not(feature = "failpoints"))]
#[inline(always)]
#[allow(clippy::inline_always, reason = "nothing is left of it")]
pub fn reach(_: Step) {}

/// In the parent: notes what the clone returned.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
#[allow(clippy::inline_always, reason = "nothing is left of it")]
pub(crate) fn note_child(_: isize) {}

#[cfg(feature = "failpoints")]
pub(crate) use self::armed::note_child;
#[cfg(feature = "failpoints")]
pub use self::armed::{arm, reach};

#[cfg(feature = "failpoints")]
mod armed {
    use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

    use rustix::process::{Pid, Signal, getpid, getppid, kill_process};

    use super::Step;

    /// Kills the process that reaches the step.
    const SELF: u32 = 0;
    /// Kills the other side, and goes on at once. With any other number it waits for `A_WHILE` first.
    const OTHER: u32 = 1;

    /// After this time the end of the other side has been seen.
    const A_WHILE: rustix::thread::Timespec =
        rustix::thread::Timespec { tv_sec: 0, tv_nsec: 60_000_000 };

    // Relaxed, all: the thread that forks has armed the step before.
    /// The step's number plus one; 0 where nothing is armed.
    static STEP: AtomicU32 = AtomicU32::new(0);
    static WHOM: AtomicU32 = AtomicU32::new(SELF);
    static CHILD: AtomicI32 = AtomicI32::new(0);

    /// Has a process killed at the step of this number, the next time: with `whom` 0 the one that
    /// reaches it, 1 the other side of the fork, 2 the other side, and then the step waits for a while.
    /// No step has the number `u32::MAX`.
    pub fn arm(step: u32, whom: u32) {
        CHILD.store(0, Ordering::Relaxed);
        WHOM.store(whom, Ordering::Relaxed);
        STEP.store(step.wrapping_add(1), Ordering::Relaxed);
    }

    pub(crate) fn note_child(pid: isize) {
        CHILD.store(pid.max(0) as i32, Ordering::Relaxed);
    }

    /// Marks that a step is reached, and kills where it is armed.
    pub fn reach(step: Step) {
        if STEP.load(Ordering::Relaxed) != step as u32 + 1 {
            return;
        }
        STEP.store(0, Ordering::Relaxed);
        let is_parents = (step as u32) < Step::Born as u32;
        let other =
            if is_parents { Pid::from_raw(CHILD.load(Ordering::Relaxed)) } else { getppid() };
        let whom = if WHOM.load(Ordering::Relaxed) == SELF { Some(getpid()) } else { other };
        let Some(whom) = whom else { return };
        let _ = kill_process(whom, Signal::KILL);
        if WHOM.load(Ordering::Relaxed) != OTHER {
            // Where this process kills itself, it ends at the return from the call at the latest.
            let _ = rustix::thread::nanosleep(&A_WHILE);
        }
    }
}
