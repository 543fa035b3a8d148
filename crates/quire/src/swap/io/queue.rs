//! The queue of reads that handlers must not wait for.
//!
//! A handler puts a request in and goes on; a thread that may sleep takes it out. The page stays
//! locked meanwhile, so a request needs no more than the page and its place in the file.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use super::super::file::Location;
use super::super::sparse::Sparse;
use crate::sys::mutex::Mutex;
use crate::sys::rank::{self, Rank};
use crate::units::PageNum;
use rustix::io::Errno;
use rustix::thread::futex;

/// A page that must be read from the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The page.
    pub page: PageNum,
    /// Where its blob lies.
    pub location: Location,
    /// When it was asked for, by the monotonic clock; 0 where nobody asks how long it takes.
    pub sent_ns: u64,
}

impl Request {
    /// Stands for none, where a buffer needs a first value.
    pub const NONE: Request = Request { page: PageNum(0), location: Location::FIRST, sent_ns: 0 };
}

struct State {
    /// Requests taken so far, and put so far: both only grow, and wrap.
    taken: u32,
    put: u32,
    /// Workers that sleep, or are about to.
    sleepers: u32,
    is_closed: bool,
}

/// A bounded first-in first-out queue for any number of threads on both sides.
pub struct IoQueue {
    /// Page, location and moment; guarded by `state`, so Relaxed throughout.
    places: Sparse<[AtomicU64; 3]>,
    state: Mutex<rank::ReadQueue, State>,
    /// The futex that workers sleep on: counts wake-ups, changed under `state`.
    wakeups: AtomicU32,
}

impl IoQueue {
    /// A queue for `capacity` requests (rounded up to a power of two).
    ///
    /// # Errors
    ///
    /// What mmap says; `EINVAL` for a capacity of more than 2^31.
    pub fn new(capacity: u32) -> Result<IoQueue, Errno> {
        let capacity = capacity.max(1).checked_next_power_of_two().ok_or(Errno::INVAL)?;
        Ok(IoQueue {
            places: Sparse::new(capacity as usize)?,
            state: Mutex::new(State { taken: 0, put: 0, sleepers: 0, is_closed: false }),
            wakeups: AtomicU32::new(0),
        })
    }

    /// Puts a request in. False if there is no room, or the queue is closed.
    #[must_use]
    pub fn submit(&self, request: Request) -> bool {
        let mut state = self.state.lock();
        if state.is_closed || state.put.wrapping_sub(state.taken) as usize == self.places.len() {
            return false;
        }
        let place = &self.places[state.put as usize & (self.places.len() - 1)];
        place[0].store(request.page.0, Relaxed);
        place[1].store(u64::from(request.location.get()), Relaxed);
        place[2].store(request.sent_ns, Relaxed);
        state.put = state.put.wrapping_add(1);
        let has_sleepers = state.sleepers != 0;
        if has_sleepers {
            self.wakeups.fetch_add(1, Relaxed);
        }
        drop(state);
        // The lock of the page goes with the request.
        rank::released(Rank::Page, 1);
        if has_sleepers {
            self.wake(1);
        }
        true
    }

    /// Takes requests, in order, as many as there are and `out` has room for; sleeps while there
    /// is none. 0 means that the queue is closed and empty.
    pub fn worker_take(&self, out: &mut [Request]) -> usize {
        if out.is_empty() {
            return 0;
        }
        loop {
            let mut state = self.state.lock();
            let count = self.take(&mut state, out);
            if count != 0 || state.is_closed {
                return count;
            }
            state.sleepers += 1;
            // Read under the lock: a request that comes after it changes the word, and the
            // futex then does not sleep.
            let seen = self.wakeups.load(Relaxed);
            drop(state);
            // Interrupted, or changed already: look again in every case.
            let _ = futex::wait(&self.wakeups, futex::Flags::PRIVATE, seen, None);
            self.state.lock().sleepers -= 1;
        }
    }

    /// Takes requests if there are any; never sleeps.
    pub fn try_take(&self, out: &mut [Request]) -> usize {
        self.take(&mut self.state.lock(), out)
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        let state = self.state.lock();
        state.put.wrapping_sub(state.taken) as usize
    }

    /// Whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// In a fork's child, before any other thread runs there: empty, and nobody waits. A worker of
    /// the parent may have held the lock at that moment.
    pub fn after_fork_in_child(&self) {
        if self.state.is_locked() {
            // SAFETY: the thread that held it does not exist in this process.
            unsafe { self.state.force_unlock() };
        }
        *self.state.lock() = State { taken: 0, put: 0, sleepers: 0, is_closed: false };
    }

    /// Nothing can be put in any more; workers take what is left and then get 0.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        self.wakeups.fetch_add(1, Relaxed);
        drop(state);
        self.wake(u32::MAX >> 1);
    }

    fn take(&self, state: &mut State, out: &mut [Request]) -> usize {
        let mut count = 0;
        while count < out.len() && state.taken != state.put {
            let place = &self.places[state.taken as usize & (self.places.len() - 1)];
            let [page, location, sent_ns] = [0, 1, 2].map(|at: usize| place[at].load(Relaxed));
            state.taken = state.taken.wrapping_add(1);
            if let Some(location) = Location::new(location as u32) {
                out[count] = Request { page: PageNum(page), location, sent_ns };
                count += 1;
            }
        }
        rank::taken(Rank::Page, count);
        count
    }

    fn wake(&self, sleepers: u32) {
        let woken = futex::wake(&self.wakeups, futex::Flags::PRIVATE, sleepers);
        debug_assert!(woken.is_ok(), "the futex is a word of our own");
    }
}
