//! Waiting for pages: a table of queues, hashed by the address of the page's word.
//!
//! Owns the queues, the sign `WAITERS` and the promise `HANDOFF` in the words, and how a lock goes
//! from one thread to the next. Leaves the lock's other bits to [`super::word`], sleeping to
//! [`Parking`], and faults that are parked on a word by its one bit to the caller.
//!
//! Threads that want the lock are served one at a time, in the order in which they came. Threads that
//! wait for a [`Condition`] are all served when it is so, and so are callbacks, which the thread that
//! unlocks calls. A [`Kill`] may end a wait early. A page's content changes under its lock only, so
//! every change is followed by an unlock, and unlocks are all that wakes.
//!
//! # No wake-up is lost
//!
//! 1. Under the queue's lock and by a read-modify-write, a waiter either finds the word as it wants
//!    it or leaves `WAITERS` in it; then it is in the queue before that lock is free again.
//! 2. So each unlock that comes later in the word's order sees `WAITERS`, and goes to the queue.
//! 3. `WAITERS` is cleared under the queue's lock alone, and only where no waiter is queued for the
//!    word. It may stay set without one (a cancelled waiter looks at a part of a long queue only);
//!    the next unlock clears it then.
//! 4. A thread that is woken for the lock is in the queue no more. It tries for it; where it is taken
//!    again the thread queues again. Where it gives up instead it passes the wake on, if the lock is
//!    free.
//!
//! An unlock without waiters is one atomic operation and touches nothing here.
//!
//! # Fairness
//!
//! A newcomer may take a free lock before the thread that was woken for it: a hand-over to a thread
//! that sleeps would keep the page locked for as long as that takes to wake. A waiter that lost the
//! lock to a stealer [`STEALS_MAX`] times has it promised (`HANDOFF`): no newcomer can take it then,
//! and the unlock hands it to the oldest waiter, which wakes as its owner. A wait for the lock to be
//! free loses it to stealers in the same way, and is served at the same promise.
//!
//! # Locks
//!
//! A queue's lock is a leaf: nothing is called under it. Waiters are woken, and callbacks called,
//! in batches outside of it. How long it is held is bounded by a batch, and by the number of
//! threads that wait for the locks of *other* words in the same queue.
//!
//! All of it is generic over atomics, queue lock and parking: loom checks the very code.

mod counts;
mod queue;
#[cfg(test)]
mod tests;

use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use self::counts::Avoided;
pub use self::counts::Counts;
use self::queue::{CLAIMED, HANDED, IDLE, LOOKS_MAX, WAITING, WOKEN, WakeBatch, Which, address};
pub use self::queue::{Callback, Queue, QueueLock, WaitList, Waiter};
use super::word::{PageWord, Word};
use super::{Condition, Interrupted, Kill, Parking, Snapshot};
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::sys::rank::{self, Rank};

/// Queues of the engine's table.
const QUEUES: usize = 256;
/// How often a thread that was woken for a lock may find it taken by another.
pub const STEALS_MAX: u32 = 4;

/// Whether faults were parked on a word when it was unlocked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "parked faults must be answered"]
pub enum Parked {
    No,
    Yes,
}

/// The queues of all that waits for pages.
///
/// A word must stay a page's word for as long as the table is used with it: an unlock looks at it
/// once more after another thread may have locked it.
pub struct WaitTable<A = AtomicU64, L = Queue, Q = Table<L>> {
    queues: Q,
    /// Every unlock looks into its queue, for comparison.
    always_looks: AtomicBool,
    /// See [`STEALS_MAX`].
    steals_max: u32,
    avoided: Avoided,
    generics: PhantomData<fn(A, L)>,
}

impl WaitTable {
    pub fn new() -> Result<WaitTable, Errno> {
        Ok(WaitTable::with_queues(Table::new(QUEUES)?, STEALS_MAX))
    }

    /// In a fork's child, before any other thread runs there: there are no waiters. Words may keep their
    /// `WAITERS`, which the next unlock clears.
    pub fn after_fork_in_child(&self) {
        for queue in self.queues.iter() {
            if queue.0.is_locked() {
                // SAFETY: the thread that held it does not exist in this process.
                unsafe { queue.0.force_unlock() };
            }
            queue.0.lock().forget();
        }
    }
}

enum Slept {
    Woken,
    Handed,
    Killed,
}

/// The lock of a word that was handed over to the calling thread.
fn handed<A: Word>(word: &PageWord<A>) -> Snapshot {
    rank::taken(Rank::Page, 1);
    word.load()
}

/// A waiter on the stack, taken out of its chain whatever happens.
struct Queued<'a, A: Word, L: QueueLock<WaitList<A>>> {
    waiter: Waiter<A>,
    queue: &'a L,
    which: Which,
}

impl<'a, A: Word, L: QueueLock<WaitList<A>>> Queued<'a, A, L> {
    fn new(queue: &'a L, which: Which) -> Self {
        Queued { waiter: Waiter::default(), queue, which }
    }

    /// Sleeps until the waiter was taken out, or `kill` says so.
    fn sleep(&self, kill: Kill<'_, A>, parking: &impl Parking<A>) -> Slept {
        loop {
            // Acquire pairs with the release of the thread that took it out.
            match self.waiter.state.load(Ordering::Acquire) {
                HANDED => return Slept::Handed,
                WAITING if kill.is_due() => return Slept::Killed,
                WAITING => parking.wait(&self.waiter.state, WAITING as u32, kill),
                _ => return Slept::Woken,
            }
        }
    }
}

impl<A: Word, L: QueueLock<WaitList<A>>> Drop for Queued<'_, A, L> {
    fn drop(&mut self) {
        // Only where a sleep or a callback has panicked. Relaxed: looked at again under the lock.
        if self.waiter.state.load(Ordering::Relaxed) == WAITING {
            // SAFETY: it was queued there if anywhere.
            let _ = self.queue.with(|list| unsafe { list.withdraw(self.which, &self.waiter) });
        }
    }
}

impl<A: Word, L: QueueLock<WaitList<A>>, Q: AsRef<[L]>> WaitTable<A, L, Q> {
    /// A table with these queues, which are empty and at least one, in which a waiter loses the lock to
    /// a stealer `steals_max` times at most.
    pub const fn with_queues(queues: Q, steals_max: u32) -> Self {
        WaitTable {
            queues,
            always_looks: AtomicBool::new(false),
            steals_max,
            avoided: Avoided::new(),
            generics: PhantomData,
        }
    }

    /// Whether every unlock looks into its queue, as if no word could say that there is no waiter. For
    /// comparison; may change at any time.
    pub fn set_always_looks(&self, always_looks: bool) {
        // Relaxed: either way is right.
        self.always_looks.store(always_looks, Ordering::Relaxed);
    }

    pub fn counts(&self) -> Counts {
        let mut counts = Counts { avoided: self.avoided.sum(), ..Counts::default() };
        self.queues.as_ref().iter().for_each(|queue| queue.with(|list| counts.add(&list.counts)));
        counts
    }

    /// Takes a word's lock, sleeping while another has it.
    #[inline]
    pub fn lock(&self, word: &PageWord<A>, parking: &impl Parking<A>) -> Snapshot {
        self.lock_killable(word, Kill::NEVER, parking)
            .unwrap_or_else(|Interrupted| unreachable!("nothing ends this wait"))
    }

    /// The same, until `kill` ends it: the lock is not taken then. One that is free is always taken.
    #[inline]
    pub fn lock_killable(
        &self,
        word: &PageWord<A>,
        kill: Kill<'_, A>,
        parking: &impl Parking<A>,
    ) -> Result<Snapshot, Interrupted> {
        rank::sleeps_for(Rank::Page);
        match word.try_lock() {
            Some(owned) => Ok(owned),
            None => self.lock_slow(word, kill, parking),
        }
    }

    /// Gives a word's lock back, the content unchanged, and serves its waiters.
    #[inline]
    pub fn unlock(&self, word: &PageWord<A>, parking: &impl Parking<A>) -> Parked {
        let old = word.release();
        if self.is_over(old) {
            return Parked::No;
        }
        let is_parked = old.has_parked() && word.take_parked();
        self.unlock_slow(word, old, is_parked, parking)
    }

    /// The same with a new content.
    #[inline]
    pub fn unlock_with(
        &self,
        word: &PageWord<A>,
        content: Snapshot,
        parking: &impl Parking<A>,
    ) -> Parked {
        let old = word.release_with(content);
        if self.is_over(old) {
            return Parked::No;
        }
        self.unlock_slow(word, old, old.has_parked(), parking)
    }

    /// Waits until `condition` is so. What is told of the content was so at the end; that the lock
    /// was free may be over by then, as always.
    pub fn wait_on(
        &self,
        word: &PageWord<A>,
        condition: Condition,
        parking: &impl Parking<A>,
    ) -> Snapshot {
        self.wait_on_killable(word, condition, Kill::NEVER, parking)
            .unwrap_or_else(|Interrupted| unreachable!("nothing ends this wait"))
    }

    /// The same, until `kill` ends it: the condition was not so yet then.
    pub fn wait_on_killable(
        &self,
        word: &PageWord<A>,
        condition: Condition,
        kill: Kill<'_, A>,
        parking: &impl Parking<A>,
    ) -> Result<Snapshot, Interrupted> {
        rank::sleeps_for(Rank::Page);
        let queue = self.queue(word);
        let queued = Queued::new(queue, Which::Others);
        loop {
            let now = word.load();
            if condition.holds(now) {
                return Ok(now);
            }
            // SAFETY: idle or woken, and `queued` takes it out before it is gone.
            if !unsafe { self.queue_other(word, &queued.waiter, condition, None) } {
                continue;
            }
            if matches!(queued.sleep(kill, parking), Slept::Killed)
                && self.withdraw(word, &queued.waiter, Which::Others).is_ok()
            {
                return Err(Interrupted);
            }
            // Content may be another again by now, so that is looked at anew. The lock was seen free
            // by the waker; to wait until this thread sees it so could take for ever.
            if condition.is_of_lock() {
                return Ok(word.load());
            }
        }
    }

    /// Queues a callback, to be called when `condition` is so; `false` where it is so already, and
    /// the callback is not queued.
    ///
    /// # Safety
    /// `record` is in no queue, and stays where it is until the callback is called or
    /// [`Self::take_back`] has returned. No other thread queues it meanwhile.
    pub unsafe fn queue_callback(
        &self,
        word: &PageWord<A>,
        record: &Waiter<A>,
        condition: Condition,
        callback: Callback,
    ) -> bool {
        // SAFETY: by the caller.
        unsafe { self.queue_other(word, record, condition, Some(callback)) }
    }

    /// Takes a callback back: `true` where it will not be called. Otherwise it was called, or is
    /// about to be; the record is free either way.
    ///
    /// # Safety
    /// `record` was queued on this `word`, in this table, and not queued anew since.
    pub unsafe fn take_back(&self, word: &PageWord<A>, record: &Waiter<A>) -> bool {
        self.withdraw(word, record, Which::Others).is_ok()
    }

    /// Makes the word of a page that is freed one that was never used: what a cancelled waiter left
    /// in it is gone. The caller holds its lock, which goes with it; there is no waiter, and none can
    /// come.
    pub fn clear_for_free(&self, word: &PageWord<A>) {
        self.queue(word).with(|list| {
            debug_assert!(word.load().is_locked(), "a freed page is its owner's");
            debug_assert!(!list.may_have(word, usize::MAX), "a freed page has waiters");
            word.reset();
        });
    }

    /// Whether a word has no waiter; its sign may still stand, after one that was cancelled.
    pub fn is_left(&self, word: &PageWord<A>) -> bool {
        self.queue(word).with(|list| !list.may_have(word, usize::MAX))
    }

    fn queue(&self, word: &PageWord<A>) -> &L {
        // Words are eight bytes. The high bits of the product mix all of the address.
        let mixed = (address(word) as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let queues = self.queues.as_ref();
        &queues[(mixed >> 32) as usize % queues.len()]
    }

    /// Whether an unlock is over: there is no waiter, and no fault is parked.
    #[inline]
    fn is_over(&self, old: Snapshot) -> bool {
        // Relaxed: see set_always_looks.
        let is_over =
            !old.has_waiters() && !old.has_parked() && !self.always_looks.load(Ordering::Relaxed);
        if is_over {
            self.avoided.count();
        }
        is_over
    }

    #[cold]
    fn lock_slow(
        &self,
        word: &PageWord<A>,
        kill: Kill<'_, A>,
        parking: &impl Parking<A>,
    ) -> Result<Snapshot, Interrupted> {
        let queued = Queued::new(self.queue(word), Which::Lockers);
        loop {
            // SAFETY: idle or woken, and `queued` takes it out before it is gone.
            if let Some(owned) = unsafe { self.lock_or_queue(word, &queued.waiter) } {
                return Ok(owned);
            }
            match queued.sleep(kill, parking) {
                Slept::Handed => return Ok(handed(word)),
                Slept::Woken if !kill.is_due() => {
                    if let Some(owned) = word.try_lock() {
                        return Ok(owned);
                    }
                }
                Slept::Woken | Slept::Killed => {
                    return match self.withdraw(word, &queued.waiter, Which::Lockers) {
                        // It came with the kill, and cannot be refused.
                        Err(HANDED) => Ok(handed(word)),
                        Err(_) => {
                            self.pass_on(word, parking);
                            Err(Interrupted)
                        }
                        Ok(()) => Err(Interrupted),
                    };
                }
            }
        }
    }

    /// Takes the lock, or queues for it.
    ///
    /// # Safety
    /// `waiter` is idle or was woken, is the caller's own, and stays where it is until it is taken
    /// out.
    unsafe fn lock_or_queue(&self, word: &PageWord<A>, waiter: &Waiter<A>) -> Option<Snapshot> {
        self.queue(word).with(|list| {
            // SAFETY: by the caller, for this and for `push_locker`.
            let steals = unsafe { list.steals_of(waiter) };
            let owned = if steals < self.steals_max {
                word.lock_or_wait()
            } else {
                word.lock_or_be_handed()
            };
            if owned.is_none() {
                list.counts.steals += u64::from(steals > 0);
                list.counts.waits += 1;
                // SAFETY: as above.
                unsafe { list.push_locker(word, waiter, steals) };
            }
            owned
        })
    }

    /// Queues a waiter for anything else, unless it is so already.
    ///
    /// # Safety
    /// As for [`Self::lock_or_queue`].
    unsafe fn queue_other(
        &self,
        word: &PageWord<A>,
        waiter: &Waiter<A>,
        condition: Condition,
        callback: Option<Callback>,
    ) -> bool {
        self.queue(word).with(|list| {
            let is_waiting = word.wait_unless(condition);
            if is_waiting {
                list.counts.waits += 1;
                // SAFETY: by the caller.
                unsafe { list.push_other(word, waiter, condition, callback) };
            }
            is_waiting
        })
    }

    /// Takes a waiter out that gives up, and leaves the word as it would be without it; `Err` says
    /// what was done for it before.
    fn withdraw(&self, word: &PageWord<A>, waiter: &Waiter<A>, which: Which) -> Result<(), u64> {
        self.queue(word).with(|list| {
            // SAFETY: the callers' waiters were queued here, in this chain, or by the contract of
            // `take_back`.
            unsafe { list.withdraw(which, waiter) }?;
            self.leave(list, word);
            Ok(())
        })
    }

    /// Passes on the wake of a thread that was woken for the lock and does not want it any more.
    fn pass_on(&self, word: &PageWord<A>, parking: &impl Parking<A>) {
        let mut batch = WakeBatch::new();
        self.queue(word).with(|list| {
            // Taken or promised, there is another unlock under way, which serves the waiters.
            if word.load().is_free() {
                if let Some(next) = list.take_locker(word) {
                    list.counts.passed_on += 1;
                    list.tell(next, WOKEN, &mut batch);
                }
                self.leave(list, word);
            }
        });
        batch.deliver(parking);
    }

    #[cold]
    fn unlock_slow(
        &self,
        word: &PageWord<A>,
        old: Snapshot,
        is_parked: bool,
        parking: &impl Parking<A>,
    ) -> Parked {
        // Relaxed: see set_always_looks.
        let looks = old.has_waiters() || self.always_looks.load(Ordering::Relaxed);
        if (looks && self.serve(word, parking)) || is_parked { Parked::Yes } else { Parked::No }
    }

    /// Serves the waiters of a word that was unlocked; whether faults are to be answered as well.
    fn serve(&self, word: &PageWord<A>, parking: &impl Parking<A>) -> bool {
        let queue = self.queue(word);
        let mark = Queued::new(queue, Which::Others);
        let mut batch = WakeBatch::new();
        let (mut walk, is_parked) = queue.with(|list| {
            list.counts.looks += 1;
            let seen = word.load();
            let walk = list.begin_walk(word, seen);
            (walk, self.serve_next_locker(list, word, seen, &mut batch))
        });
        loop {
            let has_more = queue.with(|list| {
                // SAFETY: `mark` is this walk's own, and takes itself out before it is gone.
                let has_more = unsafe { list.walk(&mut walk, &mark.waiter, &mut batch) };
                if !has_more && list.owes(&walk, self.steals_max) {
                    word.promise();
                } else if !has_more && list.is_left_empty(&walk) {
                    word.clear_waiters();
                }
                has_more
            });
            batch.deliver(parking);
            if !has_more {
                return is_parked;
            }
        }
    }

    /// Gives a lock that is free to the oldest thread that waits for it: hands it over where it is
    /// promised, wakes the thread to try for it otherwise. Whether a promise without a waiter was
    /// dropped, and faults that were parked on it are to be answered.
    fn serve_next_locker(
        &self,
        list: &mut WaitList<A>,
        word: &PageWord<A>,
        seen: Snapshot,
        batch: &mut WakeBatch<A>,
    ) -> bool {
        if seen.is_locked() {
            return false;
        }
        if !seen.has_handoff() {
            if let Some(next) = list.take_locker(word) {
                list.tell(next, WOKEN, batch);
            }
            return false;
        }
        // Promised and given back: it is changed under the queue's lock only.
        let Some(owner) = list.take_locker(word) else { return word.drop_promise() };
        list.counts.handoffs += 1;
        let next = list.steals_of_next(word);
        word.hand_over(next.is_some_and(|steals| steals >= self.steals_max));
        // Told last: from then on the new owner may unlock at any moment.
        list.tell(owner, HANDED, batch);
        false
    }

    /// After a waiter has left the queue: takes back the promise if it was this waiter's, and the sign
    /// if there is no other waiter.
    fn leave(&self, list: &WaitList<A>, word: &PageWord<A>) {
        if !list.may_have(word, LOOKS_MAX) {
            word.clear_waiters();
        } else if list.steals_of_next(word).is_none_or(|steals| steals < self.steals_max) {
            word.unpromise();
        }
    }
}

/// Records for callbacks, taken and given back without a lock.
impl<A: Word> Waiter<A> {
    /// Takes an idle record.
    pub fn claim(&self) -> bool {
        // Acquire pairs with the release that made it idle.
        self.state.compare_exchange(IDLE, CLAIMED, Ordering::Acquire).is_ok()
    }

    /// Whether the record is claimed or queued.
    pub fn is_in_use(&self) -> bool {
        // Relaxed: only a thread that is alone asks.
        self.state.load(Ordering::Relaxed) != IDLE
    }

    /// Gives back a record that was claimed, and is not queued.
    pub fn unclaim(&self) {
        // Release pairs with the next claim's acquire.
        self.state.store(IDLE, Ordering::Release);
    }
}
