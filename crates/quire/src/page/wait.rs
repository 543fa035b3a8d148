//! Who waits for a page: a table of queues, hashed by the address of the page's word.
//!
//! Owns the queues, the sign `WAITERS` and the promise `HANDOFF` in the words, and how a lock goes
//! from one to the next. Leaves the lock's other bits to [`super::word`], sleeping to
//! [`Parking`], and faults that are parked on a word by its one bit to the caller.
//!
//! # Who waits
//!
//! Threads that want the lock, which are served one at a time in the order in which they came;
//! threads that wait for a [`Condition`], all of which are served when it is so; and callbacks,
//! which wait for a condition as well and are called by whoever unlocks. A wait may be killable: a
//! deadline or a token ends it ([`Kill`]). A page's content changes under its lock only, so every
//! change is followed by an unlock, and unlocks are all that wakes.
//!
//! # No wake-up is lost
//!
//! 1. Under the queue's lock and by a read-modify-write, a waiter either finds the word as he wants
//!    it or leaves `WAITERS` in it; then he is in the queue before that lock is free again.
//! 2. So each unlock that comes later in the word's order sees `WAITERS`, and goes to the queue.
//! 3. `WAITERS` is cleared under the queue's lock alone, and only where nobody is queued for the
//!    word. It may stay set without anybody (a cancelled waiter looks at a part of a long queue
//!    only); the next unlock clears it then.
//! 4. Who is woken for the lock is in the queue no more. He tries for it; where it is taken again
//!    he queues again. Where he gives up instead he passes the wake on, if the lock is free.
//!
//! An unlock without waiters is one atomic operation and touches nothing here.
//!
//! # Fairness
//!
//! A newcomer may take a free lock before the one who was woken for it: a hand-over to a thread
//! that sleeps would keep the page locked for as long as that takes to wake. Whoever lost the lock to a stealer
//! [`STEALS_MAX`] times has the lock promised (`HANDOFF`): nobody can take it then, and the unlock
//! hands it to the oldest waiter, who wakes as its owner. A wait for the lock to be free loses the lock to a stealer
//! in the same way, and served at the same promise.
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
use self::queue::{Batch, CLAIMED, HANDED, IDLE, LOOKS_MAX, WAITING, WOKEN, Which, address};
pub use self::queue::{Callback, List, Queue, QueueLock, Waiter};
use super::word::{PageWord, Word};
use super::{Condition, Interrupted, Kill, Parking, Snapshot};
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::sys::rank::{self, Rank};

/// Queues of the engine's table.
const QUEUES: usize = 256;
/// How often one who waits for a lock may find it taken by another when he was woken for it.
pub const STEALS_MAX: u32 = 4;

/// Whether faults were parked on a word when it was unlocked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "parked faults must be answered"]
pub enum Parked {
    /// None.
    No,
    /// The page's faults are to be answered.
    Yes,
}

/// The queues of all who wait for pages.
///
/// A word must stay a page's word for as long as anybody uses the table with it: who unlocks looks
/// at it once more after another may have locked it.
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
    /// A table in which nobody waits.
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new() -> Result<WaitTable, Errno> {
        Ok(WaitTable::with_queues(Table::new(QUEUES)?, STEALS_MAX))
    }

    /// In a fork's child, before any other thread runs there: nobody waits. Words may keep their
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

/// What became of a sleep.
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
struct Queued<'a, A: Word, L: QueueLock<List<A>>> {
    waiter: Waiter<A>,
    queue: &'a L,
    which: Which,
}

impl<'a, A: Word, L: QueueLock<List<A>>> Queued<'a, A, L> {
    fn new(queue: &'a L, which: Which) -> Self {
        Queued { waiter: Waiter::new(), queue, which }
    }

    /// Sleeps until somebody has taken the waiter out, or `kill` says so.
    fn sleep(&self, kill: Kill<'_, A>, parking: &impl Parking<A>) -> Slept {
        loop {
            // Acquire pairs with the release of whoever took it out.
            match self.waiter.state.load(Ordering::Acquire) {
                HANDED => return Slept::Handed,
                WAITING if kill.is_due() => return Slept::Killed,
                WAITING => parking.wait(&self.waiter.state, WAITING as u32, kill),
                _ => return Slept::Woken,
            }
        }
    }
}

impl<A: Word, L: QueueLock<List<A>>> Drop for Queued<'_, A, L> {
    fn drop(&mut self) {
        // Only where a sleep or a callback has panicked. Relaxed: looked at again under the lock.
        if self.waiter.state.load(Ordering::Relaxed) == WAITING {
            // SAFETY: it was queued there if anywhere.
            let _ = self.queue.with(|list| unsafe { list.withdraw(self.which, &self.waiter) });
        }
    }
}

impl<A: Word, L: QueueLock<List<A>>, Q: AsRef<[L]>> WaitTable<A, L, Q> {
    /// A table with these queues, of which there is at least one, in which nobody waits, and who waits
    /// loses the lock to a stealer `steals_max` times at most.
    #[must_use]
    pub const fn with_queues(queues: Q, steals_max: u32) -> Self {
        WaitTable {
            queues,
            always_looks: AtomicBool::new(false),
            steals_max,
            avoided: Avoided::new(),
            generics: PhantomData,
        }
    }

    /// Whether every unlock looks into its queue, as if no word could say that nobody waits. For
    /// comparison; may change at any time.
    pub fn set_always_looks(&self, always_looks: bool) {
        // Relaxed: either way is right.
        self.always_looks.store(always_looks, Ordering::Relaxed);
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts { avoided: self.avoided.sum(), ..Counts::default() };
        self.queues.as_ref().iter().for_each(|queue| queue.with(|list| counts.add(&list.tally)));
        counts
    }

    /// Takes a word's lock, sleeping while another has it.
    #[inline]
    pub fn lock(&self, word: &PageWord<A>, parking: &impl Parking<A>) -> Snapshot {
        match self.lock_killable(word, Kill::NEVER, parking) {
            Ok(owned) => owned,
            Err(Interrupted) => unreachable!("nothing ends this wait"),
        }
    }

    /// The same, until `kill` ends it.
    ///
    /// # Errors
    /// [`Interrupted`]: the lock is not taken. A lock that is free is taken all the same.
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

    /// Gives a word's lock back, the content unchanged, and sees to who waits.
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
        match self.wait_on_killable(word, condition, Kill::NEVER, parking) {
            Ok(now) => now,
            Err(Interrupted) => unreachable!("nothing ends this wait"),
        }
    }

    /// The same, until `kill` ends it.
    ///
    /// # Errors
    /// [`Interrupted`]: it was not so yet.
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
            // Content may be another again by now, so that is looked at anew. The lock was free
            // under the waker's eyes, and to see it so oneself could take for ever.
            if condition.is_of_lock() {
                return Ok(word.load());
            }
        }
    }

    /// Queues a callback, to be called when `condition` is so; `false` where it is so already, and
    /// the caller does himself what he wants done.
    ///
    /// # Safety
    /// `record` is in no queue, and stays where it is until the callback is called or
    /// [`Self::take_back`] has returned. Nobody else queues it meanwhile.
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
    /// in it is gone. The caller holds its lock, which goes with it, and nobody waits for it or can
    /// come to.
    pub fn clear_for_free(&self, word: &PageWord<A>) {
        self.queue(word).with(|list| {
            debug_assert!(word.load().is_locked(), "a freed page is its owner's");
            debug_assert!(!list.may_have(word, usize::MAX), "somebody waits for a freed page");
            word.reset();
        });
    }

    /// Whether nobody waits for a word; its sign may still say so, after one who was cancelled.
    pub fn is_left(&self, word: &PageWord<A>) -> bool {
        self.queue(word).with(|list| !list.may_have(word, usize::MAX))
    }

    fn queue(&self, word: &PageWord<A>) -> &L {
        // Words are eight bytes. The high bits of the product mix all of the address.
        let mixed = (address(word) as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let queues = self.queues.as_ref();
        &queues[(mixed >> 32) as usize % queues.len()]
    }

    /// Whether an unlock is over: nobody waits and no fault is parked.
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
                list.tally.steals += u64::from(steals > 0);
                list.tally.waits += 1;
                // SAFETY: as above.
                unsafe { list.push_locker(word, waiter, steals) };
            }
            owned
        })
    }

    /// Queues one who waits for anything else, unless it is so already.
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
                list.tally.waits += 1;
                // SAFETY: by the caller.
                unsafe { list.push_other(word, waiter, condition, callback) };
            }
            is_waiting
        })
    }

    /// Takes a waiter out that gives up, and leaves the word as it would be without him; `Err` says
    /// what was done for him before.
    fn withdraw(&self, word: &PageWord<A>, waiter: &Waiter<A>, which: Which) -> Result<(), u64> {
        self.queue(word).with(|list| {
            // SAFETY: the callers' waiters were queued here, in this chain, or by the contract of
            // `take_back`.
            unsafe { list.withdraw(which, waiter) }?;
            self.leave(list, word);
            Ok(())
        })
    }

    /// Passes on the wake of one who was woken for the lock and does not want it any more.
    fn pass_on(&self, word: &PageWord<A>, parking: &impl Parking<A>) {
        let mut batch = Batch::new();
        self.queue(word).with(|list| {
            // Taken or promised, there is another unlock under way that sees to who waits.
            if word.load().is_free() {
                if let Some(next) = list.take_locker(word) {
                    list.tally.passed_on += 1;
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
        mut is_parked: bool,
        parking: &impl Parking<A>,
    ) -> Parked {
        // Relaxed: see set_always_looks.
        if old.has_waiters() || self.always_looks.load(Ordering::Relaxed) {
            is_parked |= self.serve(word, parking);
        }
        if is_parked { Parked::Yes } else { Parked::No }
    }

    /// Serves who waits for a word that was unlocked; whether faults are to be answered as well.
    fn serve(&self, word: &PageWord<A>, parking: &impl Parking<A>) -> bool {
        let queue = self.queue(word);
        let mark = Queued::new(queue, Which::Others);
        let mut batch = Batch::new();
        let (mut walk, is_parked) = queue.with(|list| {
            list.tally.looks += 1;
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

    /// Gives a lock that is free to the oldest who waits for it: hands it over where it is promised,
    /// wakes him to try for it otherwise. Whether a promise to nobody was dropped, and faults that
    /// were parked on it are to be answered.
    fn serve_next_locker(
        &self,
        list: &mut List<A>,
        word: &PageWord<A>,
        seen: Snapshot,
        batch: &mut Batch<A>,
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
        // Promised and given back: only who holds the queue's lock changes that.
        let Some(owner) = list.take_locker(word) else { return word.drop_promise() };
        list.tally.handoffs += 1;
        let next = list.steals_of_next(word);
        word.hand_over(next.is_some_and(|steals| steals >= self.steals_max));
        // Told last: from then on he unlocks when he likes.
        list.tell(owner, HANDED, batch);
        false
    }

    /// After somebody has left the queue: takes back the promise if it was his, and the sign if nobody
    /// else is there.
    fn leave(&self, list: &List<A>, word: &PageWord<A>) {
        if !list.may_have(word, LOOKS_MAX) {
            word.clear_waiters();
        } else if list.steals_of_next(word).is_none_or(|steals| steals < self.steals_max) {
            word.unpromise();
        }
    }
}

/// Records for callbacks, taken and given back without a lock.
impl<A: Word> Waiter<A> {
    /// Takes an idle record for oneself.
    pub fn claim(&self) -> bool {
        // Acquire pairs with the release of whoever made it idle.
        self.state.compare_exchange(IDLE, CLAIMED, Ordering::Acquire).is_ok()
    }

    /// Gives back a record that was claimed, and is not queued.
    pub fn unclaim(&self) {
        // Release pairs with the next claim's acquire.
        self.state.store(IDLE, Ordering::Release);
    }
}
