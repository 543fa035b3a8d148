//! Unpacked frames: a few are kept, and each is unpacked by one thread even where several want it.
//!
//! A frame is *filling* (one thread unpacks it, and others that want it sleep) or *ready*. The mutex
//! is never held while a frame is unpacked. The sleepers of all frames share one condition variable,
//! because they are few and frames are slow. A frame that failed is not kept: each thread that waited
//! for it tries by itself, so that a passing error is not another thread's.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::vec::Vec;

use super::super::workers::lock;

enum CachedFrame {
    Filling,
    Ready { bytes: Arc<Vec<u8>>, used: u64 },
}

#[derive(Default)]
struct Frames {
    by_number: HashMap<usize, CachedFrame>,
    /// Bytes of the frames that are ready.
    bytes: usize,
    /// Counts uses: the frame with the smallest `used` was used the longest ago.
    clock: u64,
    filled_count: u64,
}

pub(super) struct Cache {
    frames: Mutex<Frames>,
    changed: Condvar,
    bytes_max: usize,
}

/// Its drop removes a frame that was not filled in the end, and wakes the threads that wait for it,
/// also where the thread that fills it panics.
struct Filling<'a> {
    cache: &'a Cache,
    number: usize,
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let mut frames = lock(&self.cache.frames);
        if let Some(CachedFrame::Filling) = frames.by_number.get(&self.number) {
            frames.by_number.remove(&self.number);
        }
        drop(frames);
        self.cache.changed.notify_all();
    }
}

impl Cache {
    pub fn new(bytes_max: usize) -> Cache {
        Cache { frames: Mutex::default(), changed: Condvar::new(), bytes_max }
    }

    /// The frame's bytes, by `fill` where they are not kept.
    pub fn get<E>(
        &self,
        number: usize,
        fill: impl FnOnce() -> Result<Arc<Vec<u8>>, E>,
    ) -> Result<Arc<Vec<u8>>, E> {
        let mut frames = lock(&self.frames);
        loop {
            frames.clock += 1;
            let now = frames.clock;
            match frames.by_number.get_mut(&number) {
                Some(CachedFrame::Ready { bytes, used }) => {
                    *used = now;
                    return Ok(Arc::clone(bytes));
                }
                Some(CachedFrame::Filling) => {
                    frames = self.changed.wait(frames).unwrap_or_else(PoisonError::into_inner);
                }
                None => break,
            }
        }
        frames.by_number.insert(number, CachedFrame::Filling);
        drop(frames);
        let filling = Filling { cache: self, number };
        let bytes = fill()?;
        lock(&self.frames).keep(number, Arc::clone(&bytes), self.bytes_max);
        drop(filling);
        Ok(bytes)
    }

    pub fn filled_count(&self) -> u64 {
        lock(&self.frames).filled_count
    }

    pub fn kept_bytes(&self) -> usize {
        lock(&self.frames).bytes
    }
}

impl Frames {
    /// Makes a frame ready, and drops those for it that were used the longest ago.
    fn keep(&mut self, number: usize, bytes: Arc<Vec<u8>>, bytes_max: usize) {
        self.filled_count += 1;
        while self.bytes + bytes.len() > bytes_max {
            let ready = self.by_number.iter().filter_map(|(&number, frame)| match frame {
                CachedFrame::Ready { used, .. } => Some((*used, number)),
                CachedFrame::Filling => None,
            });
            let Some((_, oldest)) = ready.min() else { break };
            if let Some(CachedFrame::Ready { bytes, .. }) = self.by_number.remove(&oldest) {
                self.bytes -= bytes.len();
            }
        }
        self.bytes += bytes.len();
        self.by_number.insert(number, CachedFrame::Ready { bytes, used: self.clock });
    }
}
