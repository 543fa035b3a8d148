//! A queue of the wait table: the waiters for the words that hash to it.
//!
//! Owns the two chains of a queue: the waiters for a word's lock, oldest first, which are served one
//! at a time, and all others, which are served together. Leaves the word's bits and sleeping to
//! [`super::WaitTable`].
//!
//! A [`Waiter`] lies on its owner's stack or in a record of its owner's. It is *idle*, or *waiting*,
//! and then in a chain; the thread that serves it takes it out under the queue's lock and says
//! *woken* or *handed* (it owns the page now) there, and does not touch it again: by then its memory
//! may be something else. What is called outside of the lock is called with what was copied under it.
//!
//! Locks: everything here is done under the queue's lock, but for looking at a waiter's state.

use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use super::counts::Counts;
use crate::page::word::{PageWord, Word};
use crate::page::{Condition, Parking, Snapshot};
use crate::sys::memory::Zeroed;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::PageNum;

/// In no chain. Zero, so that a zeroed record is idle.
pub(super) const IDLE: u64 = 0;
/// In a chain; what sleepers sleep on.
pub(super) const WAITING: u64 = 1;
/// Unqueued out: what was waited for is so, or was.
pub(super) const WOKEN: u64 = 2;
/// Unqueued out as the owner of the lock.
pub(super) const HANDED: u64 = 3;
/// A record that is taken, and not in a chain yet.
pub(super) const CLAIMED: u64 = 4;

/// Waiters that are looked at while the queue's lock is held.
pub(super) const LOOKS_MAX: usize = 64;
/// Waiters that are taken out meanwhile.
const BATCH_MAX: usize = 16;

/// What the thread that unlocks the page does for a waiter that is no thread.
#[derive(Clone, Copy, Debug)]
pub struct Callback {
    run: Option<fn(u64)>,
    argument: u64,
}

impl Callback {
    /// Calls `run` with `argument`, holding no lock but what the unlocker still holds: it must not
    /// sleep.
    pub const fn run(run: fn(u64), argument: u64) -> Callback {
        Callback { run: Some(run), argument }
    }

    /// Answers the faults of a page.
    pub const fn answer(page: PageNum) -> Callback {
        Callback { run: None, argument: page.0 }
    }
}

/// A waiter: a thread, or a callback.
pub struct Waiter<A = AtomicU64> {
    pub(super) state: A,
    entry: UnsafeCell<WaitEntry<A>>,
}

/// Guarded by the queue's lock while the waiter is in a chain, and its owner's before.
struct WaitEntry<A> {
    next: Option<NonNull<Waiter<A>>>,
    previous: Option<NonNull<Waiter<A>>>,
    /// Address of the word; 0 for the mark of a walk.
    word: usize,
    condition: Condition,
    /// When it came; a waiter for the lock keeps it until it has the lock.
    ticket: u64,
    /// How often the lock was free for it, and another thread took it.
    steals: u32,
    is_callback: bool,
    callback: Callback,
}

// SAFETY: an idle waiter: integers, `None` and `false`, which are zero for these types (an
// `Option` of a function or of `NonNull` is null where it is `None`).
unsafe impl Zeroed for Waiter<AtomicU64> {}
// SAFETY: the entry is only touched under the queue's lock, or by the one owner before it is
// queued, which that lock orders.
unsafe impl<A: Sync> Sync for Waiter<A> {}

/// An idle waiter.
impl<A: Word> Default for Waiter<A> {
    fn default() -> Waiter<A> {
        Waiter {
            state: A::new(IDLE),
            entry: UnsafeCell::new(WaitEntry {
                next: None,
                previous: None,
                word: 0,
                condition: Condition::UNLOCKED,
                ticket: 0,
                steals: 0,
                is_callback: false,
                callback: Callback { run: None, argument: 0 },
            }),
        }
    }
}

/// The lock of a queue: a mutex, or loom's.
pub trait QueueLock<T> {
    /// Runs `act` under the lock.
    fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R;
}

/// A queue with its lock, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
pub struct Queue(pub(super) Mutex<rank::Waiters, WaitList<AtomicU64>>);

// SAFETY: an empty queue is all zeros (there is a test): a free lock, chains without a waiter, and
// integers. It owns nothing.
unsafe impl Zeroed for Queue {}

impl QueueLock<WaitList<AtomicU64>> for Queue {
    #[inline]
    fn with<R>(&self, act: impl FnOnce(&mut WaitList<AtomicU64>) -> R) -> R {
        act(&mut self.0.lock())
    }
}

struct Chain<A> {
    first: Option<NonNull<Waiter<A>>>,
    last: Option<NonNull<Waiter<A>>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// The waiters for the lock.
    Lockers,
    Others,
}

pub struct WaitList<A> {
    lockers: Chain<A>,
    others: Chain<A>,
    /// Tickets given out.
    tickets: u64,
    pub(super) counts: Counts,
}

// SAFETY: the waiters in it may be touched by any thread that holds the queue's lock.
unsafe impl<A: Sync> Send for WaitList<A> {}

/// # Safety
/// `waiter` is in a chain of the queue whose lock the caller holds, or about to be put there by
/// its owner; the reference is not kept over a use of another one.
#[allow(clippy::mut_from_ref, reason = "the queue's lock is what makes it unique")]
unsafe fn entry<'a, A>(waiter: NonNull<Waiter<A>>) -> &'a mut WaitEntry<A> {
    // SAFETY: a waiter in a chain exists (it is taken out before its owner lets go of it), and the
    // lock keeps others out.
    unsafe { &mut *waiter.as_ref().entry.get() }
}

impl<A> Chain<A> {
    const EMPTY: Chain<A> = Chain { first: None, last: None };

    /// # Safety
    /// The caller holds the queue's lock; `waiter` is in no chain and stays where it is until it
    /// is taken out; `after` is in this chain.
    unsafe fn insert_after(
        &mut self,
        after: Option<NonNull<Waiter<A>>>,
        waiter: NonNull<Waiter<A>>,
    ) {
        // SAFETY: by the caller, for `waiter` and `after`; `next` is in this chain as well.
        unsafe {
            let next = match after {
                Some(after) => entry(after).next.replace(waiter),
                None => self.first.replace(waiter),
            };
            match next {
                Some(next) => entry(next).previous = Some(waiter),
                None => self.last = Some(waiter),
            }
            let entry = entry(waiter);
            (entry.previous, entry.next) = (after, next);
        }
    }

    /// # Safety
    /// The caller holds the queue's lock, and `waiter` is in this chain.
    unsafe fn remove(&mut self, waiter: NonNull<Waiter<A>>) {
        // SAFETY: by the caller; its neighbours are in this chain as well.
        unsafe {
            let WaitEntry { previous, next, .. } = *entry(waiter);
            match previous {
                Some(previous) => entry(previous).next = next,
                None => self.first = next,
            }
            match next {
                Some(next) => entry(next).previous = previous,
                None => self.last = previous,
            }
        }
    }
}

/// A waiter that was taken out of its chain under the queue's lock, and was not told yet.
pub(super) struct Unqueued<A>(NonNull<Waiter<A>>);

/// What an unlock has seen, and how far it has come with the waiters.
pub(super) struct Walk {
    word: usize,
    /// The word as it was under the queue's lock: a waiter that came before it waited through it.
    seen: Snapshot,
    /// The first ticket that came after it.
    limit: u64,
    /// A waiter stays.
    leaves: bool,
    /// How often a waiter that stays has found the lock taken by a stealer, at most.
    steals: u32,
}

/// Waiters that were taken out, to be woken without the queue's lock.
pub(super) struct WakeBatch<A> {
    sleepers: [*const A; BATCH_MAX],
    sleepers_len: usize,
    callbacks: [Callback; BATCH_MAX],
    callbacks_len: usize,
}

impl<A> WakeBatch<A> {
    pub fn new() -> WakeBatch<A> {
        WakeBatch {
            sleepers: [core::ptr::null(); BATCH_MAX],
            sleepers_len: 0,
            callbacks: [Callback { run: None, argument: 0 }; BATCH_MAX],
            callbacks_len: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.sleepers_len == BATCH_MAX || self.callbacks_len == BATCH_MAX
    }

    /// Wakes and calls, and is empty again.
    pub fn deliver(&mut self, parking: &impl Parking<A>) {
        for &sleeper in &self.sleepers[..core::mem::take(&mut self.sleepers_len)] {
            parking.wake(sleeper);
        }
        for callback in &self.callbacks[..core::mem::take(&mut self.callbacks_len)] {
            match callback.run {
                Some(run) => run(callback.argument),
                None => parking.answer(PageNum(callback.argument)),
            }
        }
    }
}

pub(super) fn address<A>(word: &PageWord<A>) -> usize {
    core::ptr::from_ref(word).addr()
}

impl<A> Default for WaitList<A> {
    fn default() -> WaitList<A> {
        let (lockers, others) = (Chain::EMPTY, Chain::EMPTY);
        WaitList { lockers, others, tickets: 0, counts: Counts::default() }
    }
}

impl<A> WaitList<A> {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lockers.first.is_none() && self.others.first.is_none()
    }

    /// In a fork's child: the threads that waited are not there.
    pub(super) fn forget(&mut self) {
        (self.lockers, self.others) = (Chain::EMPTY, Chain::EMPTY);
    }
}

impl<A: Word> WaitList<A> {
    fn chain(&mut self, which: Which) -> &mut Chain<A> {
        match which {
            Which::Lockers => &mut self.lockers,
            Which::Others => &mut self.others,
        }
    }

    /// Queues a waiter for the lock, behind those that came before it. One that was woken and has
    /// found the lock taken comes again, with its old ticket.
    ///
    /// # Safety
    /// `waiter` is idle or was woken, and stays where it is until it is taken out.
    pub(super) unsafe fn push_locker(
        &mut self,
        word: &PageWord<A>,
        waiter: &Waiter<A>,
        steals: u32,
    ) {
        let waiter_at = NonNull::from(waiter);
        let (mut after, mut ticket) = (self.lockers.last, self.tickets);
        // SAFETY: the caller's own, and those in the chain, one at a time.
        unsafe {
            if steals == 0 {
                self.tickets += 1;
            } else {
                ticket = entry(waiter_at).ticket;
                while let Some(other) = after.filter(|&other| entry(other).ticket > ticket) {
                    after = entry(other).previous;
                }
            }
            let entry = entry(waiter_at);
            (entry.word, entry.ticket, entry.steals) = (address(word), ticket, steals);
            self.lockers.insert_after(after, waiter_at);
        }
        // Relaxed: only its owner reads it without this lock.
        waiter.state.store(WAITING, Ordering::Relaxed);
    }

    /// How often a waiter that queues again lost the lock to a stealer by now.
    ///
    /// # Safety
    /// `waiter` is the caller's own, and in no chain.
    pub(super) unsafe fn steals_of(&self, waiter: &Waiter<A>) -> u32 {
        // Relaxed: only its owner makes it wait again.
        let was_woken = waiter.state.load(Ordering::Relaxed) == WOKEN;
        // SAFETY: by the caller.
        unsafe { entry(NonNull::from(waiter)).steals + u32::from(was_woken) }
    }

    /// Queues a waiter for anything else.
    ///
    /// # Safety
    /// As for [`Self::push_locker`].
    pub(super) unsafe fn push_other(
        &mut self,
        word: &PageWord<A>,
        waiter: &Waiter<A>,
        condition: Condition,
        callback: Option<Callback>,
    ) {
        let waiter_at = NonNull::from(waiter);
        // SAFETY: the caller's own.
        unsafe {
            let entry = entry(waiter_at);
            (entry.word, entry.condition, entry.steals) = (address(word), condition, 0);
            entry.ticket = self.tickets;
            entry.is_callback = callback.is_some();
            entry.callback = callback.unwrap_or(entry.callback);
            self.tickets += 1;
            self.others.insert_after(self.others.last, waiter_at);
        }
        // Relaxed: as in push_locker.
        waiter.state.store(WAITING, Ordering::Relaxed);
    }

    /// Takes a waiter out, if it waits still. Otherwise says what was done for it.
    ///
    /// # Safety
    /// `waiter` was queued here, in this chain.
    pub(super) unsafe fn withdraw(&mut self, which: Which, waiter: &Waiter<A>) -> Result<(), u64> {
        // Relaxed: it was changed under this lock.
        let state = waiter.state.load(Ordering::Relaxed);
        if state != WAITING {
            return Err(state);
        }
        // SAFETY: by the caller, and it waits: it is in that chain.
        unsafe { self.chain(which).remove(NonNull::from(waiter)) };
        waiter.state.store(IDLE, Ordering::Relaxed);
        Ok(())
    }

    fn next_locker(&self, word: usize) -> Option<NonNull<Waiter<A>>> {
        let mut at = self.lockers.first;
        // SAFETY: each is in the chain.
        while let Some(waiter) = at.filter(|&waiter| unsafe { entry(waiter).word } != word) {
            // SAFETY: as above.
            at = unsafe { entry(waiter).next };
        }
        at
    }

    /// How often the next one to have the lock of a word lost it to a stealer; `None` if there is none.
    pub(super) fn steals_of_next(&self, word: &PageWord<A>) -> Option<u32> {
        // SAFETY: it is in the chain.
        self.next_locker(address(word)).map(|waiter| unsafe { entry(waiter).steals })
    }

    /// Takes out the next one to have the lock of a word; [`Self::tell`] tells it.
    pub(super) fn take_locker(&mut self, word: &PageWord<A>) -> Option<Unqueued<A>> {
        let waiter = self.next_locker(address(word))?;
        // SAFETY: it is in the chain.
        unsafe { self.lockers.remove(waiter) };
        Some(Unqueued(waiter))
    }

    /// Tells a waiter that was taken out why; from then on it is its owner's again.
    pub(super) fn tell(&mut self, taken: Unqueued<A>, state: u64, batch: &mut WakeBatch<A>) {
        let Unqueued(waiter) = taken;
        // SAFETY: its owner leaves it where it is until it is told, which is below.
        unsafe {
            let WaitEntry { is_callback, callback, .. } = *entry(waiter);
            let told = &waiter.as_ref().state;
            if is_callback {
                batch.callbacks[batch.callbacks_len] = callback;
                batch.callbacks_len += 1;
                self.counts.callbacks += 1;
                // Release pairs with the acquire of the next claim of the record.
                told.store(IDLE, Ordering::Release);
            } else {
                batch.sleepers[batch.sleepers_len] = &raw const *told;
                batch.sleepers_len += 1;
                self.counts.wakes += 1;
                // Release pairs with the sleeper's acquire: it sees what the unlock published.
                told.store(state, Ordering::Release);
            }
        }
    }

    /// Begins to serve the waiters that do not wait for the lock.
    pub(super) fn begin_walk(&self, word: &PageWord<A>, seen: Snapshot) -> Walk {
        let limit = self.tickets;
        Walk { word: address(word), seen, limit, leaves: false, steals: 0 }
    }

    /// Takes out some whose condition was so, from where `mark` stands; `true` while there may be
    /// more: `mark` is in the chain then. A waiter that came after the walk began is left alone: what it
    /// waits for was not so then, and the unlock that makes it so comes here as well.
    ///
    /// # Safety
    /// `mark` is this walk's own, and stays where it is while it is in the chain.
    pub(super) unsafe fn walk(
        &mut self,
        walk: &mut Walk,
        mark: &Waiter<A>,
        batch: &mut WakeBatch<A>,
    ) -> bool {
        // SAFETY: the caller's mark, in this chain where it waits.
        let mut at = match unsafe { self.withdraw(Which::Others, mark) } {
            // SAFETY: as above; no other thread has it.
            Ok(()) => unsafe { entry(NonNull::from(mark)).next },
            Err(_) => self.others.first,
        };
        for _ in 0..LOOKS_MAX {
            let Some(waiter) = at else { return false };
            // SAFETY: it is in the chain.
            let entry = unsafe { entry(waiter) };
            if entry.ticket >= walk.limit {
                return false;
            }
            if batch.is_full() {
                break;
            }
            at = entry.next;
            if entry.word != walk.word {
                continue;
            }
            if entry.condition.holds(walk.seen) {
                // SAFETY: it is in the chain.
                unsafe { self.others.remove(waiter) };
                self.tell(Unqueued(waiter), WOKEN, batch);
                continue;
            }
            walk.leaves = true;
            if entry.condition.is_of_lock() {
                entry.steals += 1;
                self.counts.steals += 1;
                walk.steals = walk.steals.max(entry.steals);
            }
        }
        let Some(waiter) = at else { return false };
        // SAFETY: `waiter` is in the chain; the mark is not, and stays in place (the caller).
        unsafe {
            let before = entry(waiter).previous;
            entry(NonNull::from(mark)).ticket = 0;
            self.others.insert_after(before, NonNull::from(mark));
        }
        mark.state.store(WAITING, Ordering::Relaxed);
        true
    }

    /// Whether a walk that is over has left no waiter for its word.
    pub(super) fn is_left_empty(&self, walk: &Walk) -> bool {
        !walk.leaves && self.tickets == walk.limit && self.next_locker(walk.word).is_none()
    }

    /// Whether a walk has met a waiter for which the lock must be kept free.
    pub(super) fn owes(&self, walk: &Walk, steals_max: u32) -> bool {
        walk.steals > 0 && walk.steals >= steals_max
    }

    /// Whether a word may have a waiter; looks at `looks_max` of the others.
    pub(super) fn may_have(&self, word: &PageWord<A>, looks_max: usize) -> bool {
        let word = address(word);
        let mut at = self.others.first;
        for looks in 0.. {
            let Some(waiter) = at else { break };
            // SAFETY: it is in the chain.
            let entry = unsafe { entry(waiter) };
            if entry.word == word || looks == looks_max {
                return true;
            }
            at = entry.next;
        }
        self.next_locker(word).is_some()
    }
}
