//! Objects without a store: what is not cached of them is in swap, page by page, as anonymous
//! memory is.
//!
//! Owns where in swap a page of such an object lies, and the way there and back. Leaves to
//! [`crate::swap`] and [`crate::reclaim`] how a page is packed, moved to the swap file and read
//! from it, and to the rest of this folder all that has to do with the cache: a memory object's
//! pages are cached, mapped, found by fault-around and chosen by reclaim as any object's.
//!
//! A page's *place* is what the word says that goes with it beyond the arena
//! ([`crate::space::shmem`]): `None` has no content and reads as zeros, `Same`, `Pool` and `File`
//! are those of a page of the arena. 512 such words are taken when the first page of a block of the
//! object goes out, and given back when the object ends.
//!
//! | the object's word | its place |
//! |---|---|
//! | not cached | the content |
//! | cached, not DIRTY | the same content, or `None` and zeros: the page may be dropped (O5) |
//! | cached, DIRTY | stale, or `None` |
//!
//! A page that comes in keeps its place until it is written, as far as there is room for both
//! ([`crate::swap::Swap::may_keep_clean`]); IN_POOL says that the place is counted there, CLEAN that
//! it is kept uncounted. Without either the place is let go, and the page is DIRTY from the start.
//!
//! DIRTY pages are nobody's to write but reclaim's: they do not count against the limits of dirty
//! pages, and a flush has nothing to do.
//!
//! Where neither pool nor file has room, faults starve, and after ten seconds without anything freed the
//! process ends with a message.
//!
//! Locks: a place is used by whoever holds the page's lock in the object, and under its own lock,
//! which guards it against write-back, compaction and the swap file's cleaner. Who must not sleep
//! only tries that.

use core::sync::atomic::{AtomicU32, Ordering};

use super::{BackingStore, Object, ObjectId, Objects};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, PageWord, Snapshot, State};
use crate::space::shmem::ShmemBlock;
use crate::swap::compress::PageBytes;
use crate::swap::file::Location;
use crate::swap::io::Job;
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SIZE, PageNum};

/// Pages that all memory objects of a space may have in swap: 1 TiB.
pub(super) const SHMEM_PAGES_MAX: usize = 1 << 28;

/// What of a page's word says that it keeps its place.
pub(super) const KEPT: Flags = Flags::IN_POOL.or(Flags::CLEAN);

/// Where the pages of a memory object are in swap.
pub(super) struct Shmem {
    /// By block of the object: its block of words, plus one; 0 is none yet.
    blocks: Table<AtomicU32>,
}

/// A page with room for what holds any blob of the swap file, as direct I/O wants it.
#[repr(C, align(4096))]
struct ReadBuffer([u8; 2 * PAGE_SIZE]);

/// Whether a lock may be slept for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sleep {
    /// A store worker, or a thread of the program.
    Yes,
    /// A handler, or reclaim.
    No,
}

/// Why a page could not be had from its place at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotLoaded {
    /// Its lock is taken, or it is in the swap file: for somebody who may sleep.
    Busy,
    /// It cannot be read, or is not what was stored.
    Bad(Errno),
}

impl Shmem {
    fn block(&self, page: ObjectPage) -> Option<ShmemBlock> {
        // Acquire pairs with the release in `use_place`. What says the number is the page's lock,
        // as a rule; but not where another page of the block was the first to go.
        let block = self.blocks[page.block()].load(Ordering::Acquire);
        block.checked_sub(1).map(ShmemBlock)
    }
}

impl Object {
    /// Whether its bytes are in swap, where they are not cached, and not in a store.
    pub fn is_memory(&self) -> bool {
        self.shmem.is_some()
    }
}

/// A locked place.
pub(super) struct Place<'a> {
    pub owner: PageNum,
    pub word: &'a PageWord,
    pub old: Snapshot,
}

impl<M: ObjectMmu> Objects<M> {
    /// Makes an object of `length` zeros that has no store, and may grow to `length_max`. `store`
    /// is told of changes of length, and of the end. The caller is its first user.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_memory(
        &self,
        store: &'static dyn BackingStore,
        length: u64,
        length_max: u64,
    ) -> Result<ObjectId, Errno> {
        let pages_max = length_max.max(length).div_ceil(PAGE_SIZE as u64) as usize;
        let blocks = Table::new(pages_max.div_ceil(BLOCK_PAGES).max(1))?;
        self.open_as(store, length, length_max, Some(Shmem { blocks }))
    }

    /// The number and the word of a page's place, if its block has any.
    fn place_word(&self, object: &Object, page: ObjectPage) -> Option<(PageNum, &PageWord)> {
        let block = object.shmem.as_ref()?.block(page)?;
        let owner = self.space.shmem_pages(block).start.add(page.index() % BLOCK_PAGES);
        Some((owner, self.space.owner_word(owner)?))
    }

    /// What a page has in swap just now.
    pub(super) fn place(&self, object: &Object, page: ObjectPage) -> Snapshot {
        let none = Snapshot::new(State::None, 0);
        self.place_word(object, page).map_or(none, |(_, word)| word.load())
    }

    /// Locks the place of a locked page. `Ok(None)` has never been used.
    pub(super) fn lock_place(
        &self,
        object: &Object,
        page: ObjectPage,
        sleep: Sleep,
    ) -> Result<Option<Place<'_>>, NotLoaded> {
        let Some((owner, word)) = self.place_word(object, page) else { return Ok(None) };
        let old = match sleep {
            Sleep::Yes => self.space.lock_word(word),
            Sleep::No => word.try_lock().ok_or(NotLoaded::Busy)?,
        };
        Ok(Some(Place { owner, word, old }))
    }

    /// The same, of a page that is about to go out, whose block gets words now if it has none.
    pub(super) fn use_place(&self, object: &Object, page: ObjectPage) -> Option<Place<'_>> {
        let shmem = object.shmem.as_ref()?;
        if shmem.block(page).is_none() {
            let taken = self.space.take_shmem_block()?;
            let number = &shmem.blocks[page.block()];
            // Release publishes nothing but the number: the words of a free block are zero.
            let is_first =
                number.compare_exchange(0, taken.0 + 1, Ordering::Release, Ordering::Relaxed);
            if is_first.is_err() {
                self.space.release_shmem_block(taken);
            }
        }
        self.lock_place(object, page, Sleep::No).ok().flatten()
    }

    /// Reads a locked page's content from its place, which stays as it is.
    ///
    /// # Errors
    /// See [`NotLoaded`]; `into` holds garbage then.
    pub(super) fn load_place(
        &self,
        object: &Object,
        page: ObjectPage,
        sleep: Sleep,
        into: &mut PageBytes,
    ) -> Result<(), NotLoaded> {
        let Some(place) = self.lock_place(object, page, sleep)? else {
            into.fill(0);
            return Ok(());
        };
        // In the swap file: with its lock held, so that the cleaner does not move it meanwhile.
        let loaded = match (place.old.state(), sleep) {
            (State::File, Sleep::No) => Err(NotLoaded::Busy),
            (State::File, Sleep::Yes) => self.read_place(&place, into).map_err(NotLoaded::Bad),
            // SAFETY: the place is locked; no other has its handle.
            _ => unsafe { self.space.load_content(place.owner, place.old, into) }
                .map_err(|_| NotLoaded::Bad(Errno::IO)),
        };
        self.space.unlock_word(place.word);
        if loaded.is_ok() {
            self.count_swapin(place.old.state());
        }
        loaded
    }

    fn read_place(&self, place: &Place<'_>, into: &mut PageBytes) -> Result<(), Errno> {
        let location = Location::new(place.old.payload()).ok_or(Errno::IO)?;
        let plan = location.plan();
        let mut buffer = ReadBuffer([0; 2 * PAGE_SIZE]);
        let bytes = buffer.0.get_mut(..plan.length).ok_or(Errno::IO)?;
        let mut jobs = [Job::read(plan.offset, bytes)];
        self.space.swap().new_plain_reader().run(&mut jobs);
        jobs[0].result?;
        plan.unpack(&buffer.0[..plan.length], location, place.owner, into).map_err(|_| Errno::IO)
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

    /// Reads locked pages from swap: the store's part, for those who may sleep.
    ///
    /// # Errors
    /// `IO` where a page is lost.
    pub(super) fn read_places(
        &self,
        object: &Object,
        pages: ObjectRange,
        bytes: &mut [u8],
    ) -> Result<(), Errno> {
        for (page, into) in pages.pages().zip(bytes.as_chunks_mut::<PAGE_SIZE>().0) {
            match self.load_place(object, page, Sleep::Yes, into) {
                Ok(()) => {}
                Err(NotLoaded::Bad(error)) => return Err(error),
                Err(NotLoaded::Busy) => return Err(Errno::AGAIN),
            }
        }
        Ok(())
    }

    /// A locked page has come from its place into the cache: whether it keeps it, as flags of its
    /// word.
    pub(super) fn settle_place(&self, object: &Object, page: ObjectPage, sleep: Sleep) -> Flags {
        if !object.is_memory() {
            return Flags::EMPTY;
        }
        let place = match self.lock_place(object, page, sleep) {
            Ok(Some(place)) => place,
            Ok(None) => return Flags::EMPTY,
            // It is being moved, and stays.
            Err(_) => return Flags::CLEAN,
        };
        let is_packed = place.old.state() == State::Pool;
        let swap = self.space.swap();
        let (kept, after) = match place.old.state() {
            State::None => (Flags::EMPTY, place.old),
            _ if swap.may_keep_clean(usize::from(is_packed)) => {
                if is_packed {
                    swap.keep_copy();
                }
                (if is_packed { KEPT } else { Flags::CLEAN }, place.old)
            }
            _ => {
                self.space.free_place(place.old);
                (Flags::DIRTY, Snapshot::new(State::None, 0))
            }
        };
        self.space.unlock_word_with(place.word, after);
        kept
    }

    /// A locked page is about to be written: its word from now on, and its place let go.
    pub(super) fn dirty_place(&self, object: &Object, page: ObjectPage, old: Snapshot) -> Snapshot {
        let after = old.with(Flags::DIRTY).without(Flags::INCOMPRESSIBLE);
        let has_place = old.has(Flags::CLEAN);
        if !has_place {
            return after;
        }
        // Where it is busy it is stale from now on, and goes when the page is stored again.
        if self.try_forget_place(object, page) {
            self.forget_copy(old);
            return after.without(KEPT);
        }
        after
    }

    fn try_forget_place(&self, object: &Object, page: ObjectPage) -> bool {
        match self.lock_place(object, page, Sleep::No) {
            Ok(Some(place)) => {
                self.space.free_place(place.old);
                self.space.unlock_word_with(place.word, Snapshot::new(State::None, 0));
                true
            }
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// A page that goes from the cache keeps no copy beside it any more.
    pub(super) fn forget_copy(&self, old: Snapshot) {
        if old.has(Flags::IN_POOL) {
            self.space.swap().forget_copy();
        }
    }

    /// Lets go of what a locked page has in swap: it is behind its object's end. Sleeps.
    pub(super) fn drop_place(&self, object: &Object, page: ObjectPage) {
        if let Ok(Some(place)) = self.lock_place(object, page, Sleep::Yes) {
            self.space.free_place(place.old);
            self.space.unlock_word_with(place.word, Snapshot::new(State::None, 0));
        }
    }

    /// Gives back all that an object has in swap. Nobody else knows the object any more.
    pub(super) fn release_places(&self, object: &Object) {
        let Some(shmem) = &object.shmem else { return };
        let used = object.blocks.iter().zip(object.words.chunks(BLOCK_PAGES));
        for (_, words) in used.filter(|(block, _)| block.is_used.load(Ordering::Relaxed) != 0) {
            words.iter().for_each(|word| self.forget_copy(word.load()));
        }
        for number in shmem.blocks.iter() {
            // Acquire as in `block`.
            if let Some(block) = number.load(Ordering::Acquire).checked_sub(1) {
                self.space.release_shmem_block(ShmemBlock(block));
            }
        }
    }
}
