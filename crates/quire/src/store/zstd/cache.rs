//! Frames that are unpacked: a few of them, each unpacked by one thread though several want it.
//!
//! A frame is *filling* (somebody unpacks it, who wants it too sleeps) or *ready*. The mutex is
//! held for looking only, never while a frame is unpacked; the sleepers of all frames share one
//! condition variable, because they are few and frames are slow. A frame that failed is not kept:
//! each who waited tries for himself, so that an error of the moment is nobody else's.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::vec::Vec;

enum Slot {
    Filling,
    Ready { bytes: Arc<Vec<u8>>, used: u64 },
}

struct State {
    slots: HashMap<usize, Slot>,
    /// Bytes of the frames that are ready.
    bytes: usize,
    /// Counts uses: the frame with the smallest was used the longest ago.
    clock: u64,
    filled_count: u64,
}

pub(super) struct Cache {
    state: Mutex<State>,
    changed: Condvar,
    bytes_max: usize,
}

/// Takes the mark of a frame away that is not filled in the end, and wakes who waited for it; also
/// where the thread that was to fill it panics.
struct Filling<'a> {
    cache: &'a Cache,
    number: usize,
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        if let Some(Slot::Filling) = state.slots.get(&self.number) {
            state.slots.remove(&self.number);
        }
        drop(state);
        self.cache.changed.notify_all();
    }
}

impl Cache {
    pub fn new(bytes_max: usize) -> Cache {
        let state = State { slots: HashMap::new(), bytes: 0, clock: 0, filled_count: 0 };
        Cache { state: Mutex::new(state), changed: Condvar::new(), bytes_max }
    }

    /// The frame's bytes, by `fill` where nobody has them.
    pub fn get<E>(
        &self,
        number: usize,
        fill: impl FnOnce() -> Result<Arc<Vec<u8>>, E>,
    ) -> Result<Arc<Vec<u8>>, E> {
        let mut state = self.lock();
        loop {
            state.clock += 1;
            let now = state.clock;
            match state.slots.get_mut(&number) {
                Some(Slot::Ready { bytes, used }) => {
                    *used = now;
                    return Ok(Arc::clone(bytes));
                }
                Some(Slot::Filling) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                None => break,
            }
        }
        state.slots.insert(number, Slot::Filling);
        drop(state);
        let filling = Filling { cache: self, number };
        let bytes = fill()?;
        self.lock().keep(number, Arc::clone(&bytes), self.bytes_max);
        drop(filling);
        Ok(bytes)
    }

    /// Frames that were filled so far.
    pub fn filled_count(&self) -> u64 {
        self.lock().filled_count
    }

    /// Bytes of the frames that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under it is whole before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes a frame ready, and drops those that were used the longest ago for it.
    fn keep(&mut self, number: usize, bytes: Arc<Vec<u8>>, bytes_max: usize) {
        self.filled_count += 1;
        while self.bytes + bytes.len() > bytes_max {
            let ready = self.slots.iter().filter_map(|(&number, slot)| match slot {
                Slot::Ready { used, .. } => Some((*used, number)),
                Slot::Filling => None,
            });
            let Some((_, oldest)) = ready.min() else { break };
            if let Some(Slot::Ready { bytes, .. }) = self.slots.remove(&oldest) {
                self.bytes -= bytes.len();
            }
        }
        self.bytes += bytes.len();
        self.slots.insert(number, Slot::Ready { bytes, used: self.clock });
    }
}
