//! The memory-management unit: the narrow waist between the engine and what maps pages.
//!
//! Its operations take runs of pages and frames, and each says how far it came and why it stopped.
//! Two implementations run one conformance suite: [`userfaultfd::Userfaultfd`], the real one, and that
//! of the crate `quire-simulated`.
//!
//! Locks: the MMU has none. The caller holds the page locks of all pages named. For [`Mmu::wake`] it
//! needs none, and for the operations on address space it holds the space's lock.

pub mod object;
pub mod userfaultfd;

use core::sync::atomic::AtomicU64;

use crate::page::{Futexes, Kill, Parking as _};
use crate::sys::Errno;
use crate::sys::thread::{ThreadId, thread_id};
pub use crate::units::FrameId;
use crate::units::{BLOCK_ORDER, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRun {
    pub start: FrameId,
    pub len: usize,
}

impl FrameRun {
    /// The first `count` frames, and the rest.
    #[must_use]
    pub const fn split(self, count: usize) -> (FrameRun, FrameRun) {
        let rest = FrameRun { start: self.start.add(count), len: self.len - count };
        (FrameRun { start: self.start, len: count }, rest)
    }

    /// Whether `frame` is the next one, in the same window: a window's frames have books of their own.
    pub(crate) const fn is_followed_by(self, frame: FrameId) -> bool {
        self.start.add(self.len).0 == frame.0
            && frame.0 >> BLOCK_ORDER == self.start.0 >> BLOCK_ORDER
    }
}

/// Rights of a mapping, as mmap's PROT_ bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prot(pub u32);

impl Prot {
    pub const NONE: Prot = Prot(0);
    pub const READ: Prot = Prot(1);
    pub const WRITE: Prot = Prot(2);
    pub const READ_WRITE: Prot = Prot(3);

    pub const fn is_readable(self) -> bool {
        // x86 has no write-only pages.
        self.0 != 0
    }

    /// Whether pages can be moved there: the kernel wants the same rights as the pool has.
    pub const fn is_movable(self) -> bool {
        self.0 == Prot::READ_WRITE.0
    }

    pub const fn is_writable(self) -> bool {
        self.0 & 2 != 0
    }
}

/// What the program tried to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read a missing page.
    Read,
    /// Write a missing page.
    Write,
    /// Write a page that is write-protected.
    WriteProtected,
}

/// Why an operation stopped early, at the first page that it did not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Something is mapped where nothing should be.
    Exists,
    /// Nothing is mapped where something should be.
    Hole,
    /// The kernel holds the page (pinned), or another process shares it since a fork.
    Busy,
    /// The mapping is not there, does not allow it, or ends inside the run.
    Unmapped,
    NoMemory,
}

/// How far an operation came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Done {
    /// Pages done, from the start of the run on.
    pub pages: usize,
    pub refusal: Option<Refusal>,
}

impl Done {
    pub const fn all(pages: usize) -> Done {
        Done { pages, refusal: None }
    }
}

/// Whether what is mapped faults at the first write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    Writable,
    WriteProtected,
}

/// Whether the source of a move may have holes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holes {
    /// A hole ends the move.
    Refuse,
    /// Holes are stepped over.
    Skip,
}

/// Whether another process has a page as well, since a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharer {
    /// Nothing is mapped.
    Missing,
    /// No other process, or none any more.
    None,
    /// Another process, which has it mapped now.
    Others,
}

/// Maps and unmaps pages.
pub trait Mmu: Sync {
    /// Maps `pages` by moving the frames there, and answers the faults that wait for them. The
    /// frames' places are holes afterwards.
    fn move_in(&self, pages: PageRange, frames: FrameId) -> Done;

    /// Unmaps `pages` by moving what is mapped to the pool, whose places are holes before.
    fn move_out(&self, pages: PageRange, frames: FrameId, holes: Holes) -> Done;

    /// Moves what is mapped at `from` to `to`, where nothing is mapped.
    fn move_within(&self, from: PageRange, to: PageNum) -> Done;

    /// Maps `pages` to new memory with the bytes at `source`, and answers the faults that wait
    /// for them. Works without the right to write as well, and over a poisoned page.
    ///
    /// # Safety
    /// `source` is valid for `pages.len()` pages, and is not managed memory.
    unsafe fn copy_in(&self, pages: PageRange, source: *const u8, protection: Protection) -> Done;

    /// Drops what is mapped.
    fn unmap(&self, pages: PageRange);

    /// Drops what is mapped at each of several runs, as one where it can; returns how many calls
    /// it took.
    fn unmap_all(&self, runs: &[PageRange]) -> usize {
        runs.iter().for_each(|&run| self.unmap(run));
        runs.len()
    }

    /// Says which pages are mapped.
    fn look(&self, pages: PageRange, is_mapped: &mut [bool]);

    /// Of the pages that `is_missing` names, which are mapped as far as the engine knows, leaves those
    /// that are not: the program has dropped them by a bare system call. None where that cannot be told.
    fn find_missing(&self, pages: PageRange, is_missing: &mut [bool]);

    /// The same of frames that pages were moved to: there was nothing to move.
    fn find_empty(&self, frames: FrameRun, is_empty: &mut [bool]);

    /// Says which of `pages` are shared since a fork; `false` where that cannot be told.
    fn look_at_sharers(&self, pages: PageRange, sharers: &mut [Sharer]) -> bool;

    /// Makes the mapped `pages` this process's own again after a fork, so that they can move. Those that
    /// the program has dropped by a bare system call are zeros then. Not on a handler, nor while the handlers
    /// stand still: one of them serves that.
    fn make_exclusive(&self, pages: PageRange) -> Done;

    fn write_protect(&self, pages: PageRange, protection: Protection) -> Done;

    /// Makes any access to missing `page` a SIGBUS.
    fn poison(&self, page: PageNum) -> Done;

    /// Answers the faults that wait for `pages`: they are tried again.
    fn wake(&self, pages: PageRange);

    /// Before something that is not ours is mapped into the arena; on an engine thread. After an
    /// error, which is the kernel's, it must not be mapped.
    fn expect_foreign(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Whether the calling thread can call [`Self::wake`] and the operations that map and move: a
    /// program's thread does not have the descriptors for it.
    fn is_reachable(&self) -> bool {
        true
    }

    /// Reads a mapped page whatever its rights; `false` where it cannot be read.
    fn read(&self, page: PageNum, into: &mut [u8; PAGE_SIZE]) -> bool;

    /// Gives the program `prot` on the range.
    fn protect(&self, pages: PageRange, prot: Prot) -> Done;

    /// Takes a range back over which the program had mapped something else: a reservation
    /// without rights again.
    fn reserve_again(&self, pages: PageRange);

    /// Gives the memory of frames back; their places become holes.
    fn frames_release(&self, frames: FrameRun);

    /// The program's address of a page's first byte.
    fn address_of(&self, page: PageNum) -> usize {
        page.index() << PAGE_SHIFT
    }

    /// A clock for comparing what calls cost, in cycles.
    fn cycles(&self) -> u64;

    /// The bytes of a frame.
    fn frame(&self, frame: FrameId) -> *mut [u8; PAGE_SIZE];

    /// A place between two steps of the engine. The simulated MMU lets another thread run here.
    #[inline]
    fn step(&self) {}

    /// The calling thread, as the messages of its faults call it.
    fn thread(&self) -> ThreadId {
        ThreadId(thread_id())
    }

    /// Lets other threads run, where this one waits for what they do.
    fn relax(&self) {
        rustix::thread::sched_yield();
    }

    /// Sleeps while the low half of `word` is `expected` and nothing of `kill` has come; may return
    /// for no reason.
    fn sleep_on(&self, word: &AtomicU64, expected: u32, kill: Kill<'_>) {
        Futexes.wait(word, expected, kill);
    }

    /// Wakes all that sleep on `word`, which may not exist any more.
    fn wake_sleepers(&self, word: *const AtomicU64) {
        Futexes.wake(word);
    }
}

/// What an MMU has mapped at a page.
#[cfg(feature = "simulated")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageMapping {
    pub is_present: bool,
    /// The next write to it faults.
    pub is_write_protected: bool,
    /// An access is a SIGBUS; `None` where that cannot be told.
    pub is_poisoned: Option<bool>,
    /// The program's rights; `None` where they cannot be told.
    pub prot: Option<Prot>,
}

/// An MMU that tests can look into.
#[cfg(feature = "simulated")]
pub trait Inspect: Mmu {
    fn mapping(&self, page: PageNum) -> PageMapping;
    /// Whether a place of the pool has memory.
    fn has_memory(&self, frame: FrameId) -> bool;
}
