//! The space's lock: a thread that changes the layout has it alone, faults that go the classic way share it.
//!
//! Owns which threads may be in, and the list of the faults that were not let in. A fault never sleeps for
//! the lock: it only tries it, for a handler that slept here would be inside the gate that a fork
//! waits to be empty, with this very lock held. A fault that is *deferred* is answered when the lock is
//! given back, and faults again. Speculative faults do not come by here at all: this is one word that all
//! of them would write.
//!
//! # Which faults are never deferred
//!
//! The owner's own, for the owner would wait for itself: its block may lie in managed memory; and those of the
//! engine's threads, for which it may wait. So it leaves its thread's number here, the engine's threads leave
//! theirs, and a thread that is not known is let in as well. Where the owner itself is not known, all are:
//! any of them may be it. They need no lock: they are served like speculative faults, and tried again where
//! the layout changes under them.
//!
//! Locks: outside of it are the heap's gate and the [stack for calls](crate::process). `faults` is a leaf.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::turnstile::Turnstile;
use super::vma::SpaceLocked;
use crate::control::shard::ENGINE_SHARDS;
use crate::fault::fault_list::{Answer, FaultList};
use crate::scratch::Scratch;
use crate::sys::mutex::{Mutex, MutexGuard};
use crate::sys::rank::{self, Rank};
use crate::sys::thread::ThreadId;
use crate::units::PageNum;

/// Most threads of an engine: each counts in a shard of its own.
const ENGINE_THREADS_MAX: usize = ENGINE_SHARDS;

#[derive(Default)]
pub(super) struct NumberOfThread(AtomicUsize);

impl NumberOfThread {
    pub fn set(&self, number: fn() -> u32) {
        self.0.store(number as usize, Ordering::Release);
    }

    pub fn get(&self) -> Option<fn() -> u32> {
        let number = self.0.load(Ordering::Acquire);
        // SAFETY: 0, or what `set` was given.
        (number != 0).then(|| unsafe { core::mem::transmute::<usize, fn() -> u32>(number) })
    }
}

pub(super) struct LayoutLock {
    /// Taken to change the layout, with the working memory for that.
    changes: Mutex<rank::Layout, Scratch>,
    /// Lets faults in beside each other, and no change of the layout.
    faults: Turnstile,
    owner: AtomicU32,
    engine_threads: [AtomicU32; ENGINE_THREADS_MAX],
    deferred: FaultList,
}

/// What is to be done once the lock is free again.
pub(super) trait Unlocked {
    fn answer_deferred(&self);
    /// Looks after those that came where no VMA is.
    fn after_unlock(&self);
}

/// Calls [`Unlocked::after_unlock`]; the last field of the guard, so that it is dropped behind the
/// mutex.
struct AfterUnlock<'a>(&'a dyn Unlocked);

impl Drop for AfterUnlock<'_> {
    fn drop(&mut self) {
        self.0.after_unlock();
    }
}

/// The space's lock, held to change the layout, with the working memory for that.
pub struct Layout<'a> {
    pub(crate) scratch: MutexGuard<'a, rank::Layout, Scratch>,
    pub(crate) locked: SpaceLocked,
    lock: &'a LayoutLock,
    after: AfterUnlock<'a>,
}

/// The space's lock, shared by a fault.
pub(crate) struct Shared<'a>(&'a LayoutLock);

/// What became of a fault that wanted to share the lock.
pub(crate) enum Admission<'a> {
    /// The layout stays as it is.
    Shared(Shared<'a>),
    /// The thread that changes it may be waiting for this fault, or be the one that has it.
    Exempt,
    /// It is answered when the lock is given back.
    Deferred,
    /// The lock has been given back meanwhile.
    Again,
}

impl LayoutLock {
    pub(super) const fn new(scratch: Scratch) -> LayoutLock {
        LayoutLock {
            changes: Mutex::new(scratch),
            faults: Turnstile::new(AtomicU32::new(0)),
            owner: AtomicU32::new(0),
            engine_threads: [const { AtomicU32::new(0) }; ENGINE_THREADS_MAX],
            deferred: FaultList::new(),
        }
    }

    /// Takes the lock alone, as the thread that `thread` names; it is called under the lock.
    pub(super) fn lock<'a>(
        &'a self,
        thread: impl FnOnce() -> ThreadId,
        space: &'a dyn Unlocked,
    ) -> Layout<'a> {
        let scratch = self.changes.lock();
        // Relaxed: a fault of this very thread sees it, and no other thread has this number.
        self.owner.store(thread().0, Ordering::Relaxed);
        rank::sleeps_for(Rank::LayoutFaults);
        self.faults.lock();
        rank::taken(Rank::LayoutFaults, 1);
        Layout { scratch, locked: SpaceLocked(()), lock: self, after: AfterUnlock(space) }
    }

    /// Takes the lock against other changes of the layout, if it is free; classic faults stay inside.
    pub(super) fn try_lock_beside_faults(
        &self,
    ) -> Option<(MutexGuard<'_, rank::Layout, Scratch>, SpaceLocked)> {
        self.changes.try_lock().map(|guard| (guard, SpaceLocked(())))
    }

    /// Lets a fault in, of what `thread` says, beside others, or defers it.
    pub(crate) fn try_share(
        &self,
        page: PageNum,
        thread: impl FnOnce() -> ThreadId,
    ) -> Admission<'_> {
        if self.faults.try_enter() {
            rank::taken(Rank::LayoutFaults, 1);
            return Admission::Shared(Shared(self));
        }
        if self.is_exempt(thread()) {
            return Admission::Exempt;
        }
        self.deferred.push(page);
        // Else its entry stays in the list: a fault too many is answered, some day.
        if self.faults.try_sign() { Admission::Deferred } else { Admission::Again }
    }

    /// Whether the owner may be waiting for this thread, or be it.
    fn is_exempt(&self, thread: ThreadId) -> bool {
        // Relaxed: the owner's own faults see what it has stored, and a fault that sees an older value
        // is let in, which is right at any time.
        let owner = self.owner.load(Ordering::Relaxed);
        // An owner that is not known may be any thread: the only one of a program, that of a fork's
        // child, or one that has taken its number away and has yet to open the lock.
        [thread.0, owner].contains(&ThreadId::UNKNOWN.0)
            || owner == thread.0
            || self.engine_threads.iter().any(|known| known.load(Ordering::Relaxed) == thread.0)
    }

    pub(super) fn enlist(&self, thread: ThreadId) {
        // Relaxed, here and above: a thread's own faults come after it has said so.
        let is_taken = |place: &AtomicU32| {
            place.compare_exchange(0, thread.0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let is_listed = self.engine_threads.iter().any(is_taken);
        debug_assert!(is_listed, "more engine threads than places");
    }

    pub(super) fn answer_deferred(&self, answer: impl FnMut(Answer)) {
        self.deferred.answer_all(answer);
    }

    /// In a fork's child, whose one thread holds the lock, before any other runs there.
    pub(super) fn after_fork_in_child(&self, thread: ThreadId) {
        self.owner.store(thread.0, Ordering::Relaxed);
        self.faults.reset_locked();
        self.engine_threads.iter().for_each(|place| place.store(0, Ordering::Relaxed));
        self.deferred.after_fork_in_child();
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        rank::released(Rank::LayoutFaults, 1);
        self.0.faults.leave();
    }
}

impl Drop for Layout<'_> {
    fn drop(&mut self) {
        self.lock.owner.store(0, Ordering::Relaxed);
        rank::released(Rank::LayoutFaults, 1);
        if self.lock.faults.unlock() {
            self.after.0.answer_deferred();
        }
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    const PAGE: PageNum = PageNum(3);

    #[derive(Default)]
    struct Space {
        answers: Cell<u32>,
    }

    impl Unlocked for Space {
        fn answer_deferred(&self) {
            self.answers.set(self.answers.get() + 1);
        }
        fn after_unlock(&self) {}
    }

    fn is_exempt(lock: &LayoutLock, thread: u32) -> bool {
        match lock.try_share(PAGE, || ThreadId(thread)) {
            Admission::Exempt => true,
            Admission::Deferred => false,
            Admission::Shared(_) | Admission::Again => panic!("the lock is free"),
        }
    }

    #[test]
    fn others_than_the_owner_are_deferred_and_answered_at_its_end() {
        let (lock, space) = (LayoutLock::new(Scratch::new().unwrap()), Space::default());
        lock.enlist(ThreadId(20));
        let layout = lock.lock(|| ThreadId(10), &space);
        assert!(is_exempt(&lock, 10) && is_exempt(&lock, 20) && is_exempt(&lock, 0));
        assert_eq!((is_exempt(&lock, 11), space.answers.get()), (false, 0));
        drop(layout);
        assert_eq!(space.answers.get(), 1);
        assert!(matches!(lock.try_share(PAGE, || ThreadId(11)), Admission::Shared(_)));
    }

    /// The only thread of a program leaves no number, nor does that of a fork's child; and a
    /// thread that gives the lock back takes its number away first.
    #[test]
    fn an_owner_that_is_not_known_is_never_deferred() {
        let (lock, space) = (LayoutLock::new(Scratch::new().unwrap()), Space::default());
        let layout = lock.lock(|| ThreadId::UNKNOWN, &space);
        assert!(is_exempt(&lock, 10), "the only thread waits for itself");
        drop(layout);
        let layout = lock.lock(|| ThreadId(10), &space);
        lock.after_fork_in_child(ThreadId::UNKNOWN);
        assert!(is_exempt(&lock, 11), "the child's thread waits for itself");
        drop(layout);
        assert_eq!(space.answers.get(), 0);
    }
}
