//! The queue of reads that handlers must not wait for.
//!
//! A handler puts a request in and goes on; a thread that may sleep takes it out. The page stays
//! locked meanwhile, so a request needs no more than the page and its place in the file.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::super::file::Location;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::sys::memory::Table;
use crate::sys::mutex::Mutex;
use crate::sys::rank::{self, Rank};
use crate::units::PageNum;

/// A page that must be read from the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapRead {
    pub page: PageNum,
    pub location: Location,
    /// Whether it was asked for by a write.
    pub is_write: bool,
    /// When it was asked for, by the monotonic clock; 0 where its time is not measured.
    pub sent_ns: u64,
}

impl SwapRead {
    /// Stands for none, where a buffer needs a first value.
    pub const NONE: SwapRead =
        SwapRead { page: PageNum(0), location: Location::FIRST, is_write: false, sent_ns: 0 };
    const WRITE_SHIFT: u32 = 32;
}

struct QueueState {
    /// Page, location with the sign of a write, and moment of each request.
    places: Table<[u64; 3]>,
    /// Requests taken so far, and put so far: both only grow, and wrap.
    taken: u32,
    put: u32,
    /// Workers that sleep, or are about to.
    sleepers: u32,
    is_closed: bool,
}

/// A bounded first-in first-out queue for any number of threads on both sides.
pub struct IoQueue {
    state: Mutex<rank::ReadQueue, QueueState>,
    /// The futex that workers sleep on: counts wake-ups, changed under `state`.
    wakeups: AtomicU32,
}

impl IoQueue {
    /// A queue for `capacity` requests (rounded up to a power of two).
    pub fn new(capacity: u32) -> Result<IoQueue, Errno> {
        let capacity = capacity.max(1).checked_next_power_of_two().ok_or(Errno::INVAL)?;
        let places = Table::new(capacity as usize)?;
        let state = QueueState { places, taken: 0, put: 0, sleepers: 0, is_closed: false };
        Ok(IoQueue { state: Mutex::new(state), wakeups: AtomicU32::new(0) })
    }

    /// Puts a request in. `false` where there is no room, or the queue is closed.
    #[must_use]
    pub fn submit(&self, request: SwapRead) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.is_closed || state.put.wrapping_sub(state.taken) as usize == state.places.len() {
            return false;
        }
        let place = state.put as usize & (state.places.len() - 1);
        let is_write = u64::from(request.is_write) << SwapRead::WRITE_SHIFT;
        let location = u64::from(request.location.get()) | is_write;
        state.places[place] = [request.page.0, location, request.sent_ns];
        state.put = state.put.wrapping_add(1);
        let has_sleepers = state.sleepers != 0;
        if has_sleepers {
            self.wakeups.fetch_add(1, Relaxed);
        }
        drop(guard);
        // The lock of the page goes with the request.
        rank::released(Rank::Page, 1);
        if has_sleepers {
            futex::wake(&self.wakeups, 1, Reach::Process);
        }
        true
    }

    /// Takes requests, in order, as many as there are and `out` has room for; sleeps while there
    /// is none. 0 means that the queue is closed and empty.
    pub fn worker_take(&self, out: &mut [SwapRead]) -> usize {
        if out.is_empty() {
            return 0;
        }
        loop {
            let mut state = self.state.lock();
            let count = state.take(out);
            if count != 0 || state.is_closed {
                return count;
            }
            state.sleepers += 1;
            // Read under the lock: a request that comes after it changes the word, and the
            // futex then does not sleep.
            let seen = self.wakeups.load(Relaxed);
            drop(state);
            futex::wait(&self.wakeups, seen, Reach::Process, None);
            self.state.lock().sleepers -= 1;
        }
    }

    /// Takes requests if there are any; never sleeps.
    pub fn try_take(&self, out: &mut [SwapRead]) -> usize {
        self.state.lock().take(out)
    }

    /// Whether no request waits.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.put == state.taken
    }

    /// In a fork's child, before any other thread runs there: the queue is empty, and no worker
    /// waits. A worker of the parent may have held the lock at the moment of the fork.
    pub fn after_fork_in_child(&self) {
        if self.state.is_locked() {
            // SAFETY: the thread that held it does not exist in this process.
            unsafe { self.state.force_unlock() };
        }
        let mut state = self.state.lock();
        (state.taken, state.put, state.sleepers, state.is_closed) = (0, 0, 0, false);
    }

    /// Closes the queue to further requests; workers take what is left, and get 0 then.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        self.wakeups.fetch_add(1, Relaxed);
        drop(state);
        futex::wake(&self.wakeups, u32::MAX, Reach::Process);
    }
}

impl QueueState {
    fn take(&mut self, out: &mut [SwapRead]) -> usize {
        let mut count = 0;
        while count < out.len() && self.taken != self.put {
            let [page, place, sent_ns] = self.places[self.taken as usize & (self.places.len() - 1)];
            self.taken = self.taken.wrapping_add(1);
            if let Some(location) = Location::new(place as u32) {
                let is_write = place >> SwapRead::WRITE_SHIFT != 0;
                out[count] = SwapRead { page: PageNum(page), location, is_write, sent_ns };
                count += 1;
            }
        }
        rank::taken(Rank::Page, count);
        count
    }
}
