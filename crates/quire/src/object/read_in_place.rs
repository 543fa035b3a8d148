//! Reads by the thread that serves the fault, in place of a store worker.
//!
//! A worker costs two more switches between threads, a good part of what a fast device needs for a
//! page. So where little is to be read, the store can do it in a signal handler
//! ([`BackingStore::reads_in_place`](super::BackingStore::reads_in_place)), and another handler is
//! left for other faults, the thread that faults reads, or a handler where those may
//! ([`Objects::set_handlers_read`]). Where that fails, by an error or at the end of a file, a worker,
//! which may allocate, reads the same again, and says what it was.

use core::sync::atomic::{AtomicBool, Ordering};

use super::requests::Asker;
use super::{ObjectId, Objects, VmObject};
use crate::control::Event;
use crate::fault::Outcome;
use crate::mmu::object::ObjectMmu;
use crate::sys::memory::{Table, zeroed};
use crate::sys::mutex::{Mutex, MutexGuard};
use crate::sys::{Errno, rank};
use crate::units::{ObjectRange, PAGE_SHIFT, PAGE_SIZE};

/// Most of such a read. What is longer takes its time on the device, beside which a switch of
/// threads is nothing.
pub(super) const IN_PLACE_ORDER: u32 = 4;
const BUFFER_BYTES: usize = PAGE_SIZE << IN_PLACE_ORDER;
/// So many such reads are under way at a time.
const BUFFERS: usize = 64;

/// A read that the thread that serves the fault does once it has given the window's lock back: its
/// pages are locked and charged, and its object is in use for it.
#[derive(Clone, Copy)]
pub(super) struct InPlace {
    pub pages: ObjectRange,
    pub asker: Asker,
}

#[repr(C, align(4096))]
struct InPlaceBytes {
    bytes: [u8; BUFFER_BYTES],
}

zeroed!(InPlaceBytes { bytes });

/// The buffers. They cost memory from when they are first used: as many as there ever were at once.
pub(super) struct InPlaceBuffers {
    /// Locks that are only ever tried.
    buffers: Table<Mutex<rank::InPlaceBuffer, InPlaceBytes>>,
    by_handlers: AtomicBool,
}

impl InPlaceBuffers {
    pub fn new() -> Result<InPlaceBuffers, Errno> {
        Ok(InPlaceBuffers { buffers: Table::new(BUFFERS)?, by_handlers: AtomicBool::new(false) })
    }

    /// Lends the first that is there.
    fn take(&self) -> Option<MutexGuard<'_, rank::InPlaceBuffer, InPlaceBytes>> {
        self.buffers.iter().find_map(Mutex::try_lock)
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// Whether handlers read in place as well, and not only threads that serve themselves. Not so
    /// unless said: a handler that runs as a batch job is not preferred when its read has ended,
    /// and waits for a whole time slice of the thread that keeps its CPU busy; a worker does not.
    pub fn set_handlers_read(&self, by_handlers: bool) {
        self.buffers.by_handlers.store(by_handlers, Ordering::Relaxed);
    }

    /// Whether a short read for a fault should be tried in place.
    pub(super) fn may_read_in_place(&self, object: &VmObject) -> bool {
        // Relaxed: a choice that is made before there are objects.
        let may = self.space.mmu().is_inline() || self.buffers.by_handlers.load(Ordering::Relaxed);
        may && !object.is_memory && object.store.reads_in_place()
    }

    /// Reads for a fault and maps; the window's lock is not held. Where that cannot be a worker
    /// does it.
    pub(super) fn read_in_place(&self, read: &InPlace) -> Outcome {
        let InPlace { pages, asker } = *read;
        let id = ObjectId(asker.vma.attributes.backing.object);
        let object = self.object(id);
        let outcome = if self.try_fill_in_place(object, pages) {
            if self.answer_asker(object, &asker, false) {
                Outcome::Served
            } else {
                Outcome::Spurious
            }
        } else if self.request_read(object, pages, Some(asker)) {
            Outcome::Parked
        } else {
            self.wait_for_queue(asker.page)
        };
        self.put_in_handler(id);
        outcome
    }

    /// Reads locked, charged pages into the cache and unlocks them; `false`: nothing has changed.
    fn try_fill_in_place(&self, object: &VmObject, pages: ObjectRange) -> bool {
        // No other fault waits for a thread that serves itself.
        let turn = (!self.space.mmu().is_inline()).then(|| self.space.swap().take_turn());
        if matches!(turn, Some(None)) {
            return false;
        }
        let Some(mut buffer) = self.buffers.take() else { return false };
        let bytes = &mut buffer.bytes[..pages.len() << PAGE_SHIFT];
        let is_filled = object.store.try_read_in_place(pages.start.offset(), bytes)
            && self.enter_run(object, pages, bytes).is_ok();
        if is_filled {
            self.space.budget().count(Event::Pgpgin, pages.len());
        }
        is_filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_lent_to_one_at_a_time_and_all_of_them_can_be() {
        let buffers = InPlaceBuffers::new().unwrap();
        let mut all: std::vec::Vec<_> = (0..BUFFERS).map(|_| buffers.take().unwrap()).collect();
        assert!(buffers.take().is_none());
        for (index, lent) in all.iter_mut().enumerate() {
            lent.bytes.fill(index as u8);
        }
        for (index, lent) in all.iter_mut().enumerate() {
            assert!(lent.bytes.iter().all(|&byte| byte == index as u8));
        }
        let given = all.remove(5);
        let place = given.bytes.as_ptr();
        drop(given);
        assert_eq!(buffers.take().map(|lent| lent.bytes.as_ptr()), Some(place));
    }
}
