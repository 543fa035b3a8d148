//! An address space: all that Quire manages in one process.
//!
//! Owns the VMAs, the page words, the frames, the swap and the account, and leaves mapping to its
//! [`Mmu`]. One file per verb: [`map`](self), `unmap` (and `dying`), `protect`, `remap`, `advise`; the fault is
//! in [`crate::fault`], eviction in [`crate::reclaim`].
//!
//! # Locks
//!
//! A fault never waits for the space's lock (`layout_lock`). A change of the layout may sleep for a page lock,
//! and for the classic faults inside: a thread that holds one of these needs nothing that the change has.
//!
//! # Which lock settles what
//!
//! Each cell: what keeps the two operations apart on the same page. **P** page lock. **V** the VMA's count,
//! bumped first by the one, looked at under the page lock by the other. **S** space's lock. **G** gate. **F**
//! frame pool's mutex. **W** the WRITEBACK flag and the handle, compared under the page lock when the write has
//! ended. **C** the clock's mutex gives each a block of its own. A dash: they never meet, because a page that is
//! being mapped has no content yet.
//!
//! | | fault | read-in | evict | store | write-back | map | unmap, DONTNEED | protect | remap | fork |
//! |---|---|---|---|---|---|---|---|---|---|---|
//! | **fault** | P | P | P | P | P, W | V | V, P | V, P | V, P | G |
//! | **read-in** | | P | P | P | P, W | – | P | P | P | waits for reads |
//! | **evict** | | | P, C | P, F | P | – | V, P | V, P | V, P | G |
//! | **store** | | | | P, F | P | – | P | P | P | G |
//! | **write-back** | | | | | one thread | – | P, W | P | P, W | G |
//! | **map** | | | | | | S | S | S | S | S |
//! | **unmap** | | | | | | | S | S | S | S |
//! | **protect** | | | | | | | | S | S | S |
//! | **remap** | | | | | | | | | S | S |
//! | **fork** | | | | | | | | | | S |
//!
//! Unmap against map, unmap, protect, remap and fork: **S**, and a dying range is waited for. *Fault and remap*:
//! a move's VMA is there before its pages are. A fault at the target maps zeros until its page comes; the move
//! drops them under the target's page lock. *Fault and protect*: rights that are gained reach the kernel before
//! the VMA, rights that are lost after it; a fault that comes in between maps by copy, which works whatever the
//! rights. *Evict by copy and protect*: the page is write-protected while it is read, because the right to
//! write may come back in between.

mod advise;
mod attributes;
#[cfg(feature = "simulated")]
mod check;
mod clean;
mod dying;
mod fork;
pub(crate) mod layout_lock;
mod map;
mod object;
mod protect;
pub(crate) mod release;
pub mod remap;
mod rights;
#[cfg(test)]
mod rights_tests;
pub mod seqcount;
pub mod turnstile;
mod unmap;
pub mod vma;
#[cfg(test)]
mod vma_tests;
mod wait;

use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicUsize, Ordering,
};

pub use self::advise::Advice;
use self::dying::Dying;
pub use self::layout_lock::Layout;
use self::layout_lock::{Admission, LayoutLock, NumberOfThread, Unlocked};
use self::rights::Rights;
use self::vma::{Vma, VmaIndex};
use crate::budget::{Budget, Purpose};
use crate::control::watermarks::BOOST_MAX;
use crate::fault::{
    fault_list::Answer, fault_list::FaultList, neighbours::Neighbours, order::Streams, way::Costs,
};
use crate::frames::FramePool;
use crate::mmu::Mmu;
use crate::page::{Block, PageWord, Pages, Snapshot};
use crate::proxy::ProxyCalls;
use crate::reclaim::{AskedLast, Border, Clock};
use crate::scratch::Scratch;
use crate::swap::Swap;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::thread::ThreadId;
use crate::sys::{Errno, memory::Table};
use crate::units::{PageNum, PageRange};

pub struct VmSpace<M: Mmu> {
    pub(crate) mmu: M,
    pub(crate) budget: Budget,
    /// The words of its pages, and of what is swapped but is no page of the arena.
    pub(crate) pages: Pages,
    pub(crate) vmas: VmaIndex,
    /// What the kernel lets the program touch outside of them.
    rights: Rights,
    pub(crate) frames: FramePool,
    pub(crate) swap: Swap,
    pub(crate) streams: Streams,
    pub(crate) neighbours: Neighbours,
    pub(crate) costs: Costs,
    /// Of the watermarks, up to [`BOOST_MAX`].
    pub(crate) boost: AtomicUsize,
    pub(crate) border: Border,
    /// The number of the last look at the pages that are sampled.
    pub(crate) look: AtomicU16,
    pub(crate) asked: AskedLast,
    pub(crate) clock: Mutex<rank::Clock, Clock>,
    pub(crate) starved: FaultList,
    /// Faults that a program's thread has found parked, for an engine thread to answer.
    unanswered: FaultList,
    /// Likewise faults that were deferred while the layout changed.
    should_answer_deferred: AtomicBool,
    pub(crate) proxy_calls: ProxyCalls,
    /// What a fork waits for (see `fork`); the futex that it waits on.
    pub(crate) fork_demand: AtomicU32,
    /// Pages charged ahead for a fork's child.
    pub(crate) fork_room: AtomicUsize,
    /// Whether pages may be shared with another process since a fork.
    pub(crate) has_forked: AtomicBool,
    /// Whether the background thread need not be called.
    kswapd_is_awake: AtomicBool,
    /// MCL_FUTURE: new mappings are locked in memory.
    pub(crate) locks_future: AtomicBool,
    /// A page of pages that are never written: zeros to copy from.
    pub(crate) zeros: Table<core::sync::atomic::AtomicU8>,
    /// Says, while it is not 0, that the program has one thread.
    single_threaded: AtomicPtr<AtomicU8>,
    thread_of_caller: NumberOfThread,
    layout: LayoutLock,
    dying: Dying,
}

impl<M: Mmu> VmSpace<M> {
    /// Pages that are there and are to be charged, counted one by one: mapped, frames, slabs, words.
    #[cfg(feature = "failpoints")]
    pub(crate) fn pages_there(&self) -> usize {
        // Relaxed, all: true while no other thread is in the space.
        let in_block = |block: &Block| {
            block.mapped.load(Ordering::Relaxed) as usize
                + usize::from(block.is_used.load(Ordering::Relaxed) != 0)
        };
        self.pages.used_arena().iter().map(in_block).sum::<usize>()
            + self.frames.free()
            + self.frames.limbo()
            // Slabs that the supervisor has given back to this member are noticed first.
            + self.swap.zpool.at_rest(|own| own)
    }

    /// An empty space over `pages` pages of arena and `frames` places of pool.
    ///
    /// # Errors
    /// `NOMEM` where the tables cannot be reserved.
    pub fn new(
        mmu: M,
        budget: Budget,
        swap: Swap,
        pages: usize,
        frames: usize,
    ) -> Result<VmSpace<M>, Errno> {
        Ok(VmSpace {
            mmu,
            pages: Pages::new(pages, 0)?,
            vmas: VmaIndex::new()?,
            rights: Rights::new()?,
            frames: FramePool::new(frames)?,
            swap,
            streams: Streams::default(),
            neighbours: Neighbours::default(),
            costs: Costs::new(),
            boost: AtomicUsize::new(BOOST_MAX),
            border: Border::new(budget.limit()),
            look: AtomicU16::new(0),
            asked: AskedLast::default(),
            clock: Mutex::new(Clock::default()),
            starved: FaultList::new(),
            unanswered: FaultList::new(),
            should_answer_deferred: AtomicBool::new(false),
            proxy_calls: ProxyCalls::default(),
            fork_demand: AtomicU32::new(0),
            fork_room: AtomicUsize::new(0),
            has_forked: AtomicBool::new(false),
            kswapd_is_awake: AtomicBool::new(false),
            locks_future: AtomicBool::new(false),
            zeros: Table::new(crate::fault::ZEROS_BYTES)?,
            single_threaded: AtomicPtr::new(null_mut()),
            thread_of_caller: NumberOfThread::default(),
            layout: LayoutLock::new(Scratch::new()?),
            dying: Dying::new(),
            budget,
        })
    }

    /// Takes the space's lock, to change the layout: of what no other thread can be unmapping just now.
    /// [`Self::lock_over`] is for a range that comes from the program.
    pub fn lock(&self) -> Layout<'_> {
        self.layout.lock(|| self.owner(), self)
    }

    /// The calling thread, as far as its faults could be deferred.
    fn owner(&self) -> ThreadId {
        if self.is_single_threaded() {
            // All faults are its own.
            return ThreadId::UNKNOWN;
        }
        self.thread_of_caller.get().map_or_else(|| self.mmu.thread(), |number| ThreadId(number()))
    }

    /// Has the calling thread's number asked of `number` where the layout is changed, and not of
    /// the kernel: a program's filter of system calls may not expect that.
    pub fn set_thread_of_caller(&self, number: fn() -> u32) {
        self.thread_of_caller.set(number);
    }

    /// Has the program have one thread for as long as `flag` is not 0, as glibc's
    /// `__libc_single_threaded` is.
    pub fn watch_single_threaded(&self, flag: &'static AtomicU8) {
        self.single_threaded.store(core::ptr::from_ref(flag).cast_mut(), Ordering::Release);
    }

    /// Whether all faults are of one thread.
    pub(crate) fn is_single_threaded(&self) -> bool {
        // SAFETY: null, or a reference that lives for ever.
        let flag = unsafe { self.single_threaded.load(Ordering::Acquire).as_ref() };
        // Relaxed: it is about cost. Either way of a fault is right with any number of threads.
        flag.is_some_and(|flag| flag.load(Ordering::Relaxed) != 0)
    }

    /// Shares the space's lock with other faults, for one of `thread` on `page`.
    pub(crate) fn share_layout(&self, page: PageNum, thread: ThreadId) -> Admission<'_> {
        self.layout.try_share(page, || self.known(thread))
    }

    /// The number of a thread that may be the caller.
    pub(crate) fn known(&self, thread: ThreadId) -> ThreadId {
        if thread == ThreadId::CALLER { self.mmu.thread() } else { thread }
    }

    /// Says that the calling thread is one of the engine's: its faults never wait for a change of
    /// the layout, which may wait for it.
    pub fn enlist_engine_thread(&self) {
        self.layout.enlist(self.mmu.thread());
    }

    /// The first VMA that ends behind `page`.
    pub fn next_vma(&self, layout: &Layout<'_>, page: PageNum) -> Option<Vma> {
        self.vmas.next_from(page, &layout.locked)
    }

    pub(crate) fn vmas_in(
        &self,
        layout: &Layout<'_>,
        range: PageRange,
    ) -> impl Iterator<Item = Vma> {
        let mut at = range.start;
        core::iter::from_fn(move || {
            // Of an empty range, too: it has pages of none.
            let next = (at < range.end).then(|| self.next_vma(layout, at)).flatten();
            let vma = next.filter(|vma| vma.range.start < range.end)?;
            at = vma.range.end;
            Some(vma)
        })
    }

    pub fn is_mapped(&self, layout: &Layout<'_>, range: PageRange) -> bool {
        self.vmas_in(layout, range).next().is_some()
    }

    pub fn has_foreign(&self, layout: &Layout<'_>, range: PageRange) -> bool {
        self.vmas_in(layout, range).any(|vma| vma.attributes.kind == vma::Kind::Foreign)
    }

    /// The stretches of the arena in which nothing foreign is mapped.
    pub fn managed_stretches(&self, layout: &Layout<'_>) -> impl Iterator<Item = PageRange> {
        let arena = self.arena();
        let foreign = self.vmas_in(layout, arena);
        let foreign = foreign.filter(|vma| vma.attributes.kind == vma::Kind::Foreign);
        let mut at = arena.start;
        foreign
            .map(|vma| vma.range)
            .chain([PageRange { start: arena.end, end: arena.end }])
            .map(move |foreign| {
                let start = core::mem::replace(&mut at, foreign.end);
                PageRange { start, end: foreign.start }
            })
            .filter(|stretch| !stretch.is_empty())
    }

    pub fn mmu(&self) -> &M {
        &self.mmu
    }

    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    pub fn frames(&self) -> &FramePool {
        &self.frames
    }

    pub fn swap(&self) -> &Swap {
        &self.swap
    }

    pub fn arena(&self) -> PageRange {
        self.pages.arena()
    }

    /// Says whether the background thread works; while it does, faults do not call it.
    pub fn set_kswapd_awake(&self, is_awake: bool) {
        // SeqCst: with the look at free memory that follows, on both sides.
        self.kswapd_is_awake.store(is_awake, Ordering::SeqCst);
    }

    pub(crate) fn is_kswapd_awake(&self) -> bool {
        self.kswapd_is_awake.load(Ordering::SeqCst)
    }

    pub fn snapshot(&self, page: PageNum) -> Snapshot {
        self.word(page).load()
    }

    #[inline]
    pub(crate) fn word(&self, page: PageNum) -> &PageWord {
        self.pages.word(page)
    }

    #[inline]
    pub(crate) fn block(&self, page: PageNum) -> &Block {
        self.pages.block(page)
    }

    /// Notes that pages of a block are about to be used, and charges their words; `false` where
    /// there is no memory for them. It comes before the last look at the VMA (see `vma.rs`).
    #[must_use]
    pub(crate) fn use_block(&self, page: PageNum) -> bool {
        let block = self.block(page);
        if block.is_used.load(Ordering::SeqCst) != 0 {
            return true;
        }
        if !self.charge_last() {
            return false;
        }
        if block.is_used.swap(1, Ordering::SeqCst) != 0 {
            self.budget.uncharge(1);
        }
        self.pages.note_used(page);
        true
    }

    /// Charges a page, and be it the last of the reserve, or a free frame.
    #[must_use]
    pub(crate) fn charge_last(&self) -> bool {
        self.budget.try_charge(1, Purpose::Tables) || self.take_charges_of_frames(1, 0)
    }

    pub(crate) fn is_block_used(&self, page: PageNum) -> bool {
        self.block(page).is_used.load(Ordering::Relaxed) != 0
    }

    /// Does what [`Self::use_block`] does, whether there is room or not.
    pub(crate) fn use_block_anyway(&self, page: PageNum) {
        if self.block(page).is_used.swap(1, Ordering::SeqCst) == 0 {
            self.budget.charge_anyway(1);
        }
        self.pages.note_used(page);
    }

    /// The parts of `range` that lie in blocks that were ever used, cut at blocks.
    pub(crate) fn used_parts(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        range.by_block().filter(|part| self.block(part.start).is_used.load(Ordering::SeqCst) != 0)
    }

    /// Finds the VMA of a page without a lock; spins over changes, of a few hundred nanoseconds.
    pub(crate) fn find_vma(&self, page: PageNum) -> Option<Vma> {
        loop {
            for _ in 0..64 {
                if let Ok(found) = self.vmas.lookup(page) {
                    return found;
                }
                core::hint::spin_loop();
            }
            self.mmu.relax();
        }
    }

    /// Answers the faults of a page, or has an engine thread do it.
    pub(crate) fn answer(&self, page: PageNum) {
        self.answer_listed(Answer::Page(page));
    }

    fn answer_listed(&self, answer: Answer) {
        if self.mmu.is_reachable() {
            self.wake_for(answer);
            return;
        }
        self.unanswered.push_answer(answer);
        self.proxy_calls.call();
    }

    pub(crate) fn wake_for(&self, answer: Answer) {
        match answer {
            Answer::Page(page) => self.mmu.wake(PageRange::new(page, 1)),
            Answer::All => self.mmu.wake(self.arena()),
        }
    }

    /// Answers what program threads could not.
    pub(crate) fn answer_for_others(&self) {
        self.unanswered.answer_all(|answer| self.wake_for(answer));
        if self.should_answer_deferred.swap(false, Ordering::Acquire) {
            self.answer_deferred();
        }
    }

    pub(crate) fn count_mapped(&self, page: PageNum, pages: usize) {
        // Relaxed: tells reclaim where to look.
        self.block(page).mapped.fetch_add(pages as u32, Ordering::Relaxed);
    }

    pub(crate) fn count_unmapped(&self, page: PageNum, pages: usize) {
        self.block(page).mapped.fetch_sub(pages as u32, Ordering::Relaxed);
    }
}

impl<M: Mmu> Unlocked for VmSpace<M> {
    fn after_unlock(&self) {
        self.seal_strays();
    }

    fn answer_deferred(&self) {
        if self.mmu.is_reachable() {
            self.layout.answer_deferred(|answer| self.wake_for(answer));
            return;
        }
        // Release publishes that the lock is free.
        self.should_answer_deferred.store(true, Ordering::Release);
        self.proxy_calls.call();
    }
}
