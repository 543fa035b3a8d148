//! The swap as the engine sees it: the compressed pool, and behind it the swap file.
//!
//! Owns both tiers, the queue of reads, and the rule about clean pages: a page that is read back
//! may keep what it has in swap, so that it need not be stored again if it goes out unchanged. How
//! many pages do follows how often that came true.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize};

use super::file::{ReadPlan, Segment, SwapSegments, Writer};
use super::io::{IoQueue, Ring, SwapRead};
use super::zpool::Zpool;
use super::{FarTier, SwapCipher};
use crate::budget::Budget;
use crate::control::slabs::slots_for;
use crate::sys::Errno;
use crate::sys::futex::{self, Reach};
use crate::sys::mutex::{Mutex, MutexGuard};
use crate::sys::rank;
use rustix::fd::BorrowedFd;

/// Reads that may wait at a time; each is a locked page.
const QUEUE_LEN: u32 = 1024;
/// Of this many recent clean pages...
const CLEAN_HISTORY: u32 = 64;
/// ...at least so many must have gone unchanged, or no page is kept clean for a while.
const CLEAN_HITS_MIN: u32 = 16;
/// One page in so many is kept clean all the same, to learn whether things have changed.
const CLEAN_PROBE: u32 = 16;
/// A fault at the first write to a page that was kept clean costs about as much as so many pages
/// that need not be stored again.
const UNCLEAN_COST: i32 = 2;

struct FileTier {
    file: SwapSegments,
    queue: IoQueue,
    /// Requests submitted and not yet completed.
    reading: AtomicU32,
    writing: Mutex<rank::SwapWriting, Writing>,
}

/// Permission for a handler to read by itself.
pub struct Turn<'a>(&'a AtomicU32);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// What the thread that writes the swap file uses.
pub struct Writing {
    pub writer: Writer,
    /// The way to the file; made by the thread that uses it.
    ring: Option<Ring>,
}

impl Writing {
    pub fn parts(&mut self) -> Option<(&mut Writer, &mut Ring)> {
        Some((&mut self.writer, self.ring.as_mut()?))
    }
}

pub struct Swap {
    pub zpool: Zpool,
    file: Option<FileTier>,
    cipher: Option<SwapCipher>,
    far: Option<FarTier>,
    descriptor: AtomicI32,
    /// Packed pages that are kept beside a page in memory.
    kept: AtomicUsize,
    clean_hits: AtomicU32,
    clean_turn: AtomicU32,
    /// Handlers that may yet read by themselves, the swap file or the store of an object.
    turns: AtomicU32,
}

impl Swap {
    /// A pool, in the tree's `pool` memfd or else in private memory, and the file behind `descriptor`
    /// where there is one.
    ///
    /// # Safety
    /// The descriptor stays open in the table of every thread that reads or writes the file. `pool`
    /// is the pool memfd that goes with the budget's control page.
    pub unsafe fn new(
        descriptor: Option<i32>,
        pool: Option<BorrowedFd<'_>>,
        budget: &Budget,
    ) -> Result<Swap, Errno> {
        let control = budget.control();
        let file = match descriptor {
            Some(_) => Some(FileTier {
                file: SwapSegments::new(control, budget.slot())?,
                queue: IoQueue::new(QUEUE_LEN)?,
                reading: AtomicU32::new(0),
                // Now, while there is address space: the program may set a limit later.
                writing: Mutex::new(Writing { writer: Writer::new()?, ring: None }),
            }),
            None => None,
        };
        let zpool = match pool {
            Some(pool) => {
                let slots = control.slots_max.load(Relaxed) as usize;
                // SAFETY: the caller's promise: the supervisor made it for so many.
                unsafe { Zpool::shared(pool, slots, budget.slot()) }?
            }
            None => Zpool::private(slots_for(budget.limit_bytes()))?,
        };
        Ok(Swap {
            zpool,
            file,
            cipher: SwapCipher::of(control),
            far: FarTier::of(control),
            descriptor: AtomicI32::new(descriptor.unwrap_or(-1)),
            kept: AtomicUsize::new(0),
            clean_hits: AtomicU32::new(CLEAN_HISTORY / 2),
            clean_turn: AtomicU32::new(0),
            turns: AtomicU32::new(0),
        })
    }

    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    pub fn file(&self) -> Option<&SwapSegments> {
        self.file.as_ref().map(|tier| &tier.file)
    }

    /// Names the file's descriptor anew.
    ///
    /// # Safety
    /// As for [`Self::new`].
    pub unsafe fn set_descriptor(&self, descriptor: Option<i32>) {
        self.descriptor.store(descriptor.unwrap_or(-1), Relaxed);
    }

    /// A ring of the calling thread's own.
    pub fn new_reader(&self) -> Ring {
        self.equip(Ring::new(self.borrow_file()))
    }

    /// The same for a thread that serves faults: each of its reads is waited for, and it waits only for the file.
    pub fn new_handlers_reader(&self) -> Ring {
        self.equip(Ring::spinning(self.borrow_file())).at_hand_only()
    }

    /// The same without io_uring, for a read now and then: costs nothing to make.
    pub fn new_plain_reader(&self) -> Ring {
        self.equip(Ring::without_uring(self.borrow_file()))
    }

    fn equip(&self, ring: Ring) -> Ring {
        ring.encrypted_by(self.cipher).backed_by(self.far)
    }

    /// Whether the file has what is to be read. What it does not have is on its way from now on.
    pub fn bring(&self, plan: ReadPlan) -> bool {
        self.far.is_none_or(|far| far.bring(plan.offset, plan.length))
    }

    /// What has what the file does not have.
    pub fn far(&self) -> Option<FarTier> {
        self.far
    }

    /// The descriptor of the file that there is.
    fn borrow_file(&self) -> BorrowedFd<'static> {
        // SAFETY: promised to `new` and `set_descriptor`.
        unsafe { BorrowedFd::borrow_raw(self.descriptor.load(Relaxed)) }
    }

    /// Lets so many handlers read by themselves at a time; one should be left for other faults.
    pub fn set_turns(&self, turns: u32) {
        self.turns.store(turns, Relaxed);
    }

    /// Permission for a handler to read by itself, if another is left for other faults.
    pub fn take_turn(&self) -> Option<Turn<'_>> {
        let turns = &self.turns;
        // Relaxed: only a number.
        turns.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).ok()?;
        Some(Turn(turns))
    }

    /// Drops so many blobs of a segment that pages' words named.
    pub fn free_locations(&self, segment: Segment, count: u32) {
        if let Some(tier) = &self.file {
            tier.file.free(segment, count);
        }
    }

    /// Whether pages that are about to be read, so many of them from the pool, may be mapped
    /// write-protected, to keep what they have in store as long as they are not written. Packed copies
    /// take at most an eighth of a budget of `budget_pages` (a packed page is about a third of a page).
    pub fn may_keep_clean(&self, pool_pages: usize, budget_pages: usize) -> bool {
        self.kept.load(Relaxed) + pool_pages <= budget_pages * 3 / 8
            && self.file.as_ref().is_none_or(|tier| tier.file.has_ample_room())
            && self.is_clean_useful()
    }

    /// Whether what was kept of late was of use; now and then it is tried all the same.
    fn is_clean_useful(&self) -> bool {
        self.clean_hits.load(Relaxed) >= CLEAN_HITS_MIN
            || self.clean_turn.fetch_add(1, Relaxed).is_multiple_of(CLEAN_PROBE)
    }

    /// So many pages in memory keep their packed copies.
    pub fn keep_copies(&self, count: usize) {
        self.kept.fetch_add(count, Relaxed);
    }

    /// So many kept copies are used or dropped.
    pub fn forget_copies(&self, count: usize) {
        self.kept.fetch_sub(count, Relaxed);
    }

    /// Notes that pages went out as they had come, and so were worth their protection.
    pub fn note_clean(&self, pages: usize) {
        self.note(pages as i32);
    }

    /// Notes that a page was written that had come write-protected: a fault for nothing.
    pub fn note_unclean(&self) {
        self.note(-UNCLEAN_COST);
    }

    /// Two threads that note at once may lose one of the notes.
    fn note(&self, change: i32) {
        let hits = self.clean_hits.load(Relaxed).saturating_add_signed(change);
        self.clean_hits.store(hits.min(CLEAN_HISTORY), Relaxed);
    }

    /// Hands a read to the threads that may sleep. `false` where the queue is full.
    pub fn request_read(&self, request: SwapRead) -> bool {
        let Some(tier) = &self.file else { return false };
        tier.reading.fetch_add(1, Relaxed);
        let is_queued = tier.queue.submit(request);
        if !is_queued {
            self.read_completed(1);
        }
        is_queued
    }

    /// Takes requests; sleeps until there are any. 0 says that none will come
    /// ([`Self::close_requests`]), or that there is no file.
    pub fn take_requests(&self, out: &mut [SwapRead]) -> usize {
        self.file.as_ref().map_or(0, |tier| tier.queue.worker_take(out))
    }

    /// Closes the queue of requests: threads that take them end, once they have taken all.
    pub fn close_requests(&self) {
        if let Some(tier) = &self.file {
            tier.queue.close();
        }
    }

    /// Takes requests if there are any; never sleeps.
    pub fn try_take_requests(&self, out: &mut [SwapRead]) -> usize {
        self.file.as_ref().map_or(0, |tier| tier.queue.try_take(out))
    }

    /// Packed pages that are kept beside their page in memory.
    #[cfg(feature = "simulated")]
    pub(crate) fn kept_copies(&self) -> usize {
        self.kept.load(Relaxed)
    }

    /// Requests are completed: their pages are unlocked.
    pub fn read_completed(&self, count: usize) {
        if let Some(tier) = &self.file {
            // Release pairs with the acquire in `is_reading` and `wait_for_reads`: a thread that finds no
            // read left sees all that they did.
            let left = tier.reading.fetch_sub(count as u32, Release);
            if left == count as u32 {
                futex::wake(&tier.reading, u32::MAX, Reach::Process);
            }
        }
    }

    pub fn is_reading(&self) -> bool {
        // Acquire: see `read_completed`.
        self.file.as_ref().is_some_and(|tier| tier.reading.load(Acquire) != 0)
    }

    pub fn wait_for_reads(&self) {
        let Some(tier) = &self.file else { return };
        loop {
            let reading = tier.reading.load(Acquire);
            if reading == 0 {
                return;
            }
            futex::wait(&tier.reading, reading, Reach::Process, None);
        }
    }

    /// The writing side, for the background thread, whose ring it makes at the first use.
    pub fn writing(&self) -> Option<(&SwapSegments, MutexGuard<'_, rank::SwapWriting, Writing>)> {
        let tier = self.file.as_ref()?;
        let mut writing = tier.writing.lock();
        if writing.ring.is_none() {
            writing.ring = Some(self.new_reader().at_hand_only());
        }
        Some((&tier.file, writing))
    }

    /// In a fork's child, before any other thread runs there.
    pub fn after_fork_in_child(&self, slot: u32) {
        self.zpool.after_fork_in_child(slot);
        if let Some(tier) = &self.file {
            tier.file.after_fork_in_child(slot);
            tier.queue.after_fork_in_child();
            tier.reading.store(0, Relaxed);
            let mut writing = tier.writing.lock();
            // The segment that was being filled is the parent's to write, and the ring is the parent's.
            writing.writer.cancel(&tier.file);
            if let Some(ring) = writing.ring.take() {
                ring.abandon();
            }
        }
    }
}
