//! What was written to a store becomes durable, or is written again.
//!
//! A sync that fails says that what was written since the last good one may be lost, and nothing about
//! which part; and the next sync that succeeds does not speak of it. A kernel that marks such pages
//! clean then reports success over lost bytes to a program that syncs again "until it works". Here
//! the bytes are still there as a rule: a sync that fails makes every page dirty that was written
//! since the last good one and is still cached, and the next flush writes them anew before it syncs.
//!
//! A page that was dropped from the cache in between cannot be written again. Then the object says
//! at every later sync that bytes may be lost, until it is closed: only the application knows what was
//! in it and can write it anew.
//!
//! Syncs are numbered. A page that was written keeps in its word's payload the number of the first
//! sync that covers the write (0: not written since it was read). Numbers go round; a page whose
//! write is two thousand million syncs old is taken for a new one and written for nothing.
//!
//! Locks: `turn`, one sync of an object at a time; under it the store's, and page locks, one at a
//! time. Two at once would not do: a store tells an error to one of them.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::writeback::FlushError;
use super::{Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::sys::Errno;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::{ObjectPage, ObjectRange};

/// What a store has made durable.
pub(super) struct Synced {
    turn: Mutex<rank::SyncTurn, ()>,
    next: AtomicU32,
    /// The last that succeeded.
    last: AtomicU32,
    /// The newest number of a page that was dropped from the cache; 0 is none.
    dropped: AtomicU32,
    /// Why bytes may be lost that cannot be written again; 0: they are not.
    lost: AtomicI32,
}

impl Synced {
    pub const fn new() -> Synced {
        Synced {
            turn: Mutex::new(()),
            next: AtomicU32::new(1),
            last: AtomicU32::new(0),
            dropped: AtomicU32::new(0),
            lost: AtomicI32::new(0),
        }
    }

    /// The number for a page whose write has returned.
    pub fn number_of_write(&self) -> u32 {
        // Acquire: loaded after the write has returned, so a sync with this number, or a later one,
        // begins after that. SeqCst there orders the count before the store's call.
        self.next.load(Ordering::Acquire)
    }

    /// A page with this word, which is locked, leaves the cache.
    pub fn note_dropped(&self, word: Snapshot) {
        let number = word.payload();
        if !self.is_newer(number) {
            return;
        }
        let newer = |old: u32| {
            let is_newer = old == 0 || number.wrapping_sub(old).cast_signed() > 0;
            is_newer.then_some(number)
        };
        // Relaxed: the page's lock is between this and any look at it that must see it; one that
        // comes too early finds the page in the cache.
        let _ = self.dropped.fetch_update(Ordering::Relaxed, Ordering::Relaxed, newer);
    }

    /// Whether a write with this number is not durable for sure.
    fn is_newer(&self, number: u32) -> bool {
        // Acquire pairs with the release of the sync that succeeded.
        let age = number.wrapping_sub(self.last.load(Ordering::Acquire));
        number != 0 && age.cast_signed() > 0
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Makes durable what was written. `at` is what an error is told for; `seen` as for
    /// [`Objects::flush`].
    ///
    /// # Errors
    /// The store's, or that a sync of another failed while this one waited for its turn. What was
    /// written since the last good one is dirty again, or the object says so for ever.
    pub(super) fn sync_store(
        &self,
        object: &VmObject,
        at: ObjectPage,
        seen: &mut u32,
    ) -> Result<(), FlushError> {
        let synced = &object.synced;
        let _turn = synced.turn.lock();
        self.tell_write_error(object, seen)?;
        // Relaxed: written under the turn only.
        let lost = synced.lost.load(Ordering::Relaxed);
        if lost != 0 {
            return Err(FlushError::Sync(Errno::from_raw_os_error(lost)));
        }
        let number = synced.next.load(Ordering::Relaxed);
        // Before the store is called: what is written from now on waits for the next one.
        synced.next.store(number.wrapping_add(1).max(1), Ordering::SeqCst);
        let Err(error) = object.store.sync() else {
            // Release: see `is_newer`.
            synced.last.store(number, Ordering::Release);
            return Ok(());
        };
        self.make_dirty_again(object);
        // After it: a page that was dropped meanwhile is among the dropped, or was found.
        if synced.is_newer(synced.dropped.load(Ordering::Relaxed)) {
            synced.lost.store(error.raw_os_error(), Ordering::Relaxed);
        }
        // What others have written is in doubt as well, and a store tells it once.
        object.note_write_error(at, error);
        *seen = object.write_errors.load(Ordering::Acquire);
        Err(FlushError::Sync(error))
    }

    /// Makes dirty whatever was written since the last good sync, or is being written.
    fn make_dirty_again(&self, object: &VmObject) {
        let is_doubtful = |word: Snapshot| {
            let is_written = object.synced.is_newer(word.payload()) || word.has(Flags::WRITEBACK);
            word.state() == State::Cached && is_written && !word.has(Flags::DIRTY)
        };
        // What was written has words.
        for at in object.used_parts(object.range()).flat_map(ObjectRange::pages) {
            let seen = self.snapshot(object, at);
            if is_doubtful(seen) || seen.is_locked() {
                let mut locked = self.lock(object, at);
                if is_doubtful(locked.content()) {
                    self.mark_dirty(object, at, &mut locked);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_durable_once_a_sync_that_began_after_it_has_succeeded() {
        let synced = Synced::new();
        let number = synced.number_of_write();
        assert!(synced.is_newer(number));
        assert!(!synced.is_newer(0), "never written");
        synced.last.store(number, Ordering::Relaxed);
        assert!(!synced.is_newer(number));
        assert!(synced.is_newer(number + 1));
        // Numbers go round.
        synced.last.store(u32::MAX, Ordering::Relaxed);
        assert!(synced.is_newer(1) && !synced.is_newer(u32::MAX - 1));
    }
}
