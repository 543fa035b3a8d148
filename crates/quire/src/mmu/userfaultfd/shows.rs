//! What a stretch of the arena shows is changed under a running program.
//!
//! A mapping that replaces another is not registered, and until it is an access would go by us: it
//! would find a page of zeros, or one that was somebody else's. So the new mapping is made and
//! registered elsewhere, and moved over the old one in one step. Such a move is an event, and who
//! makes it waits until somebody has read that: [`Userfaultfd::serve_shows`], by a thread that does
//! nothing else and takes no lock, since the others may wait for a lock that the mover holds.
//!
//! What is cached whole, and cannot be written, needs no registration as long as it stays so, and
//! is moved without an event.
//!
//! # Where the kernel has no mapping more
//!
//! The kernel makes one mapping of neighbours that look alike, and to take a part of one away it
//! needs one or two more. So what shows anything else than its home stays apart ([`Merges`]): to
//! conceal it takes no mapping, and to have it show its home again leaves no more than before, for
//! which [`super::spares`] are held back.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use linux_raw_sys::general::{
    MADV_DONTFORK, MADV_POPULATE_READ, MADV_RANDOM, UFFD_EVENT_PAGEFAULT,
};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use super::Userfaultfd;
use super::object::{OBJECT_MODES, memfd};
use crate::mmu::object::Home;
use crate::sys::futex::{self, Reach};
use crate::sys::{Errno, memory};
use crate::units::{ObjectPage, PAGE_SHIFT, PAGE_SIZE, PageRange};

/// The moves that are under way.
pub(super) struct Shows {
    /// Counts them as they begin; what their reader sleeps on.
    begun: AtomicU32,
    ended: AtomicU32,
    is_stopping: AtomicBool,
}

impl Shows {
    pub const fn new() -> Shows {
        Shows {
            begun: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            is_stopping: AtomicBool::new(false),
        }
    }
}

/// Whether a mapping may become one with those beside it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Merges {
    Yes,
    /// Every other block of the arena is told to be read at random, which means nothing for shared
    /// memory; but the kernel does not merge what was told different things.
    No,
}

/// Maps a home where the kernel likes; children do not get it.
pub(super) fn map_anywhere(
    home: Home,
    first: ObjectPage,
    bytes: usize,
    prot: ProtFlags,
) -> Result<usize, Errno> {
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    let anywhere = core::ptr::null_mut();
    // SAFETY: a new mapping, of which nobody knows.
    let start =
        unsafe { rustix::mm::mmap(anywhere, bytes, prot, flags, memfd(home), first.offset()) }?;
    let start = start as usize;
    // SAFETY: just mapped.
    unsafe { memory::advise(start, bytes, MADV_DONTFORK) }.inspect_err(|_| unmap(start, bytes))?;
    Ok(start)
}

fn unmap(start: usize, bytes: usize) {
    // SAFETY: called for mappings of `map_anywhere` alone, which nobody else has seen.
    let _ = unsafe { rustix::mm::munmap(start as *mut _, bytes) };
}

/// Keeps a mapping that is to go to `pages`, a block, from becoming one with its neighbours there.
fn keep_apart(start: usize, pages: PageRange) -> Result<(), Errno> {
    if pages.start.block().is_multiple_of(2) {
        return Ok(());
    }
    // SAFETY: made by `map_anywhere`, and nothing is lost by it.
    unsafe { memory::advise(start, pages.len() << PAGE_SHIFT, MADV_RANDOM) }
}

impl Userfaultfd {
    pub(super) fn show_in_place(
        &self,
        pages: PageRange,
        home: Home,
        first: ObjectPage,
        prot: ProtFlags,
        merges: Merges,
    ) -> Result<(), Errno> {
        let bytes = pages.len() << PAGE_SHIFT;
        let made = map_anywhere(home, first, bytes, prot)?;
        if merges == Merges::No {
            keep_apart(made, pages).inspect_err(|_| unmap(made, bytes))?;
        }
        self.faults.register(made, bytes, OBJECT_MODES).inspect_err(|_| unmap(made, bytes))?;
        self.move_registered(made, bytes, self.address(pages.start))
    }

    /// Moves a registered mapping, and waits until that has been read.
    fn move_registered(&self, from: usize, bytes: usize, to: usize) -> Result<(), Errno> {
        // Release pairs with the reader's acquire: it reads for every move that has begun.
        self.shows.begun.fetch_add(1, Ordering::Release);
        futex::wake(&self.shows.begun, 1, Reach::Process);
        let moved = move_over(from, bytes, to);
        self.shows.ended.fetch_add(1, Ordering::Release);
        moved.inspect_err(|_| unmap(from, bytes))
    }

    pub(super) fn show_whole_in_place(
        &self,
        pages: PageRange,
        home: Home,
        first: ObjectPage,
        prot: ProtFlags,
    ) -> Result<(), Errno> {
        let bytes = pages.len() << PAGE_SHIFT;
        let start = self.address(pages.start);
        let made = map_anywhere(home, first, bytes, prot)?;
        keep_apart(made, pages).inspect_err(|_| unmap(made, bytes))?;
        move_over(made, bytes, start).inspect_err(|_| unmap(made, bytes))?;
        // Where it is refused the kernel maps them one by one, as they are asked for.
        // SAFETY: a stretch of the arena that shows a home; nothing is lost by it.
        let _ = unsafe { memory::advise(start, bytes, MADV_POPULATE_READ) };
        self.answer_inline(pages);
        self.faults.wake(start, bytes);
        Ok(())
    }

    /// Reads the events of moves until [`Self::stop_serving_shows`].
    pub fn serve_shows(&self) {
        loop {
            let begun = self.shows.begun.load(Ordering::Acquire);
            if begun == self.shows.ended.load(Ordering::Acquire) {
                futex::wait(&self.shows.begun, begun, Reach::Process, None);
                continue;
            }
            let Ok(message) = self.faults.read() else { continue };
            if u32::from(message.event) == UFFD_EVENT_PAGEFAULT {
                // A handler's: it is sent again.
                // SAFETY: the event was looked at.
                let address = unsafe { message.arg.pagefault.address } as usize;
                self.faults.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
            } else if self.shows.is_stopping.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Ends [`Self::serve_shows`], where it runs; nobody else reads any more.
    ///
    /// # Errors
    /// The kernel's; it goes on then.
    pub fn stop_serving_shows(&self, home: Home) -> Result<(), Errno> {
        self.spares.with(|| self.try_to_stop_serving_shows(home))
    }

    fn try_to_stop_serving_shows(&self, home: Home) -> Result<(), Errno> {
        let prot = ProtFlags::READ;
        let from = map_anywhere(home, ObjectPage(0), PAGE_SIZE, prot)?;
        let to = map_anywhere(home, ObjectPage(0), PAGE_SIZE, prot)
            .inspect_err(|_| unmap(from, PAGE_SIZE))?;
        self.shows.is_stopping.store(true, Ordering::Release);
        let moved = self
            .faults
            .register(from, PAGE_SIZE, OBJECT_MODES)
            .inspect_err(|_| unmap(from, PAGE_SIZE))
            .and_then(|()| self.move_registered(from, PAGE_SIZE, to));
        unmap(to, PAGE_SIZE);
        moved
    }
}

/// Puts a mapping in another's place, in one step.
fn move_over(from: usize, bytes: usize, to: usize) -> Result<(), Errno> {
    // SAFETY: `from` is ours alone, and `to` a stretch of the arena whose window's lock the caller
    // holds, or one of our own.
    unsafe {
        rustix::mm::mremap_fixed(from as *mut _, bytes, bytes, MremapFlags::MAYMOVE, to as *mut _)
    }
    .map(drop)
}
