//! Objects without a store: what is not cached of them is in swap, page by page, as anonymous
//! memory is.
//!
//! A page's one word says all, as that of an anonymous page does ([`crate::page::transitions`]):
//!
//! | word | its bytes |
//! |---|---|
//! | `None` | zeros |
//! | `Same`, `Pool`, `File` | in swap |
//! | `Cached`, CLEAN | in the cache, and the same in swap (IN_POOL, IN_FILE, or a pattern) |
//! | `Cached`, neither CLEAN nor DIRTY | in the cache, and zeros: nothing is in swap |
//! | `Cached`, DIRTY | in the cache alone |
//!
//! What is not DIRTY may be dropped (O5). A page that comes in keeps what it has in swap until it
//! is written, as far as there is room for both ([`crate::swap::Swap::may_keep_clean`]); otherwise
//! that is let go, and the page is DIRTY from the start.
//!
//! Reclaim alone writes DIRTY pages: they do not count against the limits of dirty pages, and a flush
//! has nothing to do. WRITEBACK is of a page in the pool, on its way to the swap file, as in the
//! arena. Where neither pool nor file has room, faults starve.

use super::pages::Locked;
use super::{Objects, VmObject};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::swap::compress::PageBytes;
use crate::swap::file::Location;
use crate::swap::io::Job;
use crate::sys::Errno;
use crate::units::{ObjectRange, PAGE_SIZE};

/// A page with room for what holds any blob of the swap file, as direct I/O wants it.
#[repr(C, align(4096))]
struct ReadBuffer([u8; 2 * PAGE_SIZE]);

impl<M: ObjectMmu> Objects<M> {
    /// Reads the content of a locked page that is not in the swap file; `false` where it is, or is
    /// lost.
    pub(super) fn load_packed(&self, page: &Locked<'_, M>, into: &mut PageBytes) -> bool {
        if page.state() == State::File {
            return false;
        }
        // SAFETY: the page is locked.
        unsafe { self.space.load_content(page.page(), page.content(), into) }.is_ok()
    }

    /// The same of one that may be there; waits for the read.
    fn load_content(&self, page: &Locked<'_, M>, into: &mut PageBytes) -> Result<(), Errno> {
        if page.state() != State::File {
            return self.load_packed(page, into).then_some(()).ok_or(Errno::IO);
        }
        let location = Location::new(page.content().payload()).ok_or(Errno::IO)?;
        let plan = location.plan();
        let mut buffer = ReadBuffer([0; 2 * PAGE_SIZE]);
        let bytes = buffer.0.get_mut(..plan.length).ok_or(Errno::IO)?;
        let mut jobs = [Job::read(plan.offset, bytes)];
        self.space.swap().new_plain_reader().run(&mut jobs);
        jobs[0].result?;
        plan.unpack(&buffer.0[..plan.length], location, page.page(), into).map_err(|_| Errno::IO)
    }

    /// Reads pages that were left locked from swap: the store's part, in a thread that may sleep.
    /// `IO` where a page is lost.
    pub(super) fn load_locked_pages(
        &self,
        object: &VmObject,
        pages: ObjectRange,
        bytes: &mut [u8],
    ) -> Result<(), Errno> {
        for (page, into) in pages.pages().zip(bytes.as_chunks_mut::<PAGE_SIZE>().0) {
            let page = self.adopt(object, page);
            let loaded = self.load_content(&page, into);
            page.leave_locked();
            loaded?;
        }
        Ok(())
    }

    /// The bytes of a locked page of a memory object have come into the cache: so its word says,
    /// and whether it keeps what it has in swap.
    pub(super) fn enter_from_swap(&self, page: &mut Locked<'_, M>) {
        let (before, swap) = (page.content(), self.space.swap());
        self.count_swapin(before.state());
        let is_packed = before.state() == State::Pool;
        if before.state() == State::None {
            page.cache();
        } else if swap.may_keep_clean(usize::from(is_packed), self.space.budget().limit()) {
            if is_packed {
                swap.keep_copies(1);
            }
            page.cache_clean();
        } else {
            self.space.release_stored(before);
            page.cache();
            page.dirty();
        }
    }

    fn count_swapin(&self, state: State) {
        let budget = self.space.budget();
        match state {
            State::Same => budget.count(Event::SwpinZero, 1),
            State::Pool => budget.count(Event::Zswpin, 1),
            State::File => {}
            _ => return,
        }
        budget.count(Event::Pswpin, 1);
    }

    /// A cached page of a memory object leaves the cache as it came into it.
    pub(super) fn note_uncached(&self, before: Snapshot) {
        if !before.has(Flags::CLEAN) {
            return;
        }
        if before.has(Flags::IN_POOL) {
            self.space.swap().forget_copies(1);
        }
        let budget = self.space.budget();
        budget.count(Event::Pswpout, 1);
        budget.count(Event::PswpoutClean, 1);
        self.space.swap().note_clean(1);
    }
}
