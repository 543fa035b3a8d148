//! The way of a fault, from the address to the mapping.
//!
//! [`VmSpace::serve`] finds the VMA, and [`VmSpace::try_fault`] serves a page of anonymous
//! memory from where its word says that its bytes are; [`speculative`] has what becomes of a fault
//! whose VMA has changed. A fault never sleeps here. Where it would have to wait it is *parked*: it is
//! left unanswered, with a sign for the thread that it waits for (the page's PARKED bit, or the list of
//! the starved), which answers it. The thread that faulted then faults again.
//!
//! Locks: page locks, in any order, because all but the first are only tried.

pub mod fault_list;
pub mod grant;
pub(crate) mod neighbours;
pub mod order;
pub(crate) mod private;
pub(crate) mod speculative;
mod swapin;
mod trace;
pub mod way;
mod window;

use self::order::{Guess, Through};
use self::speculative::{Doubt, Way};
use self::window::{FaultWindow, FillSource, Settled};
use crate::control::along::stream_order_max;
use crate::control::{Event, Tracepoint};
use crate::failpoint::{self, Failpoint};
use crate::mmu::{Access, FrameId, FrameRun, Mmu, Protection};
use crate::page::{Flags, Interrupted, Kill, LockedPage, LockedRange, Snapshot, State};
use crate::reclaim::{NoCaches, Room, Shrinker};
use crate::scratch::{STAGING_PAGES, Scratch};
use crate::space::VmSpace;
use crate::space::vma::{Kind, Pattern, Vma};
use crate::swap::SwapRead;
use crate::swap::compress::{Corrupt, PageBytes, fill_same};
use crate::swap::file::Location;
use crate::swap::zpool::Handle;
use crate::sys::clock::Moment;
use crate::sys::monotonic_ns;
use crate::sys::thread::ThreadId;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

/// Pages on their way into the program.
pub(crate) type Staging = [PageBytes; STAGING_PAGES];

/// What became of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The page is mapped.
    Served,
    /// It was already.
    Spurious,
    /// It waits, and will be answered.
    Parked,
    /// Nothing is managed there: the access is tried again, and is a SIGSEGV.
    NoVma,
    /// The content is lost: the access is a SIGBUS.
    Poisoned,
    /// The page of a private mapping has no content of its own: [`crate::object`] fills it.
    Unfilled,
}

impl<M: Mmu> VmSpace<M> {
    /// Serves a fault of a thread that is not known: it never waits for a change of the layout.
    pub fn handle_fault(&self, page: PageNum, access: Access, scratch: &mut Scratch) -> Outcome {
        self.handle_fault_of(ThreadId::UNKNOWN, page, access, Moment::now(), scratch)
    }

    /// Serves a fault of `thread` on `page` that came at `since`.
    pub fn handle_fault_of(
        &self,
        thread: ThreadId,
        page: PageNum,
        access: Access,
        since: Moment,
        scratch: &mut Scratch,
    ) -> Outcome {
        self.budget.count(Event::Pgfault, 1);
        let kind = self.kind_of_fault(page, access);
        let outcome = self.serve(thread, page, |found, way| match found {
            Some(vma) if vma.attributes.kind == Kind::Anonymous => {
                self.try_fault(page, access, &vma, way, &NoCaches, scratch)
            }
            found => self.try_unmanaged_fault(page, found, way),
        });
        self.note_fault(kind, outcome, since);
        outcome
    }

    /// Serves a fault on `page` for the thread that changes the layout. Outside of anonymous memory
    /// nothing is done.
    pub(crate) fn fault_as_owner(
        &self,
        page: PageNum,
        access: Access,
        scratch: &mut Scratch,
    ) -> Outcome {
        loop {
            let found = self.find_vma(page).filter(|vma| vma.attributes.kind.is_anonymous());
            let Some(vma) = found else { return Outcome::NoVma };
            if let Ok(outcome) = self.try_fault(page, access, &vma, Way::Exempt, &NoCaches, scratch)
            {
                return outcome;
            }
        }
    }

    /// Serves a fault on a page of an anonymous or a private VMA, which was found just now, as far as
    /// the layout is sure to be what it is seen to be.
    pub(crate) fn try_fault(
        &self,
        page: PageNum,
        access: Access,
        vma: &Vma,
        way: Way,
        caches: &impl Shrinker,
        scratch: &mut Scratch,
    ) -> Result<Outcome, Doubt> {
        way.check_access(vma, access)?;
        if way == Way::Speculative && !self.is_block_used(page) {
            return Err(Doubt::of(vma, Tracepoint::SpfVmaNoanon));
        }
        loop {
            let seen = self.snapshot(page);
            // What is read from the swap file is guessed by what reads it.
            let guess = (seen.state() != State::File).then(|| self.guess(page, seen, vma));
            let needs_memory = takes_memory(seen) || seen.state() == State::File;
            if way == Way::Speculative && needs_memory && self.is_making_room_for_fork() {
                // The fork has the space's lock: this fault waits there, unless it is the fork's own.
                return Err(Doubt::of(vma, Tracepoint::SpfVmaNotsup));
            }
            let order = guess.map_or(0, |guess| guess.order);
            if !self.has_room_for(seen, order, caches, scratch) || !self.use_block(page) {
                return Ok(self.starve(page));
            }
            failpoint::hit(Failpoint::Prepared, page);
            let Some(locked) = self.lock_in_turns(page, vma, way)? else {
                self.budget.count(Event::FaultParked, 1);
                return Ok(Outcome::Parked);
            };
            way.check_current(&self.vmas, vma)?;
            if takes_memory(locked.content()) && !takes_memory(seen) {
                // It was in memory, and no room has been made for it.
                return Err(Doubt::of(vma, Tracepoint::SpfPmdChanged));
            }
            failpoint::hit(Failpoint::Checked, page);
            let guess = || guess.unwrap_or_else(|| self.guess(page, locked.content(), vma));
            match locked.state() {
                State::Mapped => return Ok(self.fault_on_mapped(locked, vma, access)),
                // Cached is for words of objects alone.
                State::Poisoned | State::Cached => return Ok(self.fault_on_poisoned(locked)),
                State::File => return Ok(self.fault_from_file(locked, access, way, scratch)),
                State::Limbo => {
                    let guess = guess();
                    self.fault_from_limbo(locked, vma, guess, access);
                    return Ok(Outcome::Served);
                }
                State::None if vma.attributes.kind == Kind::Private => {
                    return Ok(Outcome::Unfilled);
                }
                State::None | State::Same | State::Pool => {
                    let guess = guess();
                    if self.fault_from_memory(locked, vma, guess, access, scratch.staging) {
                        return Ok(Outcome::Served);
                    }
                }
            }
        }
    }

    /// Serves a fault where nothing is managed: outside of all VMAs, in a foreign one, or in one that
    /// is being unmapped.
    pub(crate) fn try_unmanaged_fault(
        &self,
        page: PageNum,
        found: Option<Vma>,
        way: Way,
    ) -> Result<Outcome, Doubt> {
        match found {
            // Only a fault that shares the space's lock can be certain of it.
            _ if way == Way::Speculative => {
                let range = found.map_or(PageRange::new(page, 0), |vma| vma.range);
                Err(Doubt { why: Tracepoint::SpfVmaNotsup, range })
            }
            Some(vma) if vma.attributes.kind == Kind::Dying => Ok(self.fault_on_dying(page)),
            Some(_) => {
                self.mmu.wake(PageRange::new(page, 1));
                Ok(Outcome::NoVma)
            }
            None => Ok(self.fault_outside(page)),
        }
    }

    /// Whether there is room for a page that was seen so, with what comes along; makes it.
    fn has_room_for(
        &self,
        seen: Snapshot,
        order: u32,
        caches: &impl Shrinker,
        scratch: &mut Scratch,
    ) -> bool {
        // What is in memory already needs none. To reclaim for it could evict the very page, again
        // and again where threads do so to each other. A page in the file has its room made by the
        // thread that reads it.
        !takes_memory(seen) || self.make_room(caches, Room::Frame, 1 << order, Some(scratch))
    }

    /// Takes the lock of a page, trying for a while where another thread has it, for as long as the VMA
    /// stays what it is; leaves the fault to the unlock then (`None`).
    fn lock_in_turns(
        &self,
        page: PageNum,
        vma: &Vma,
        way: Way,
    ) -> Result<Option<LockedPage<'_, Self>>, Doubt> {
        for _ in 0..LOCK_TURNS {
            self.mmu.step();
            if let Some(locked) = self.try_lock_page(page) {
                return Ok(Some(locked));
            }
            way.check_current(&self.vmas, vma)?;
            core::hint::spin_loop();
        }
        let content = self.word(page).lock_or_park();
        Ok(content.map(|content| LockedPage::adopt(self, page, content)))
    }

    /// Leaves a fault to the background thread.
    pub(crate) fn starve(&self, page: PageNum) -> Outcome {
        self.budget.count(Event::FaultParked, 1);
        self.starved.push(page);
        self.budget.call_for_memory();
        failpoint::hit(Failpoint::Starved, page);
        if self.available() > 0 {
            // Memory came before the page was in the list. It leaves the list with the answer: what
            // stays there is taken for a fault that waits.
            self.mmu.relax();
            self.answer_starved();
        }
        Outcome::Parked
    }

    /// Waits until the background thread has freed something. For readers, which may sleep, and
    /// which a fork waits for: they are fed before the faults that it holds up; and for other threads
    /// that may sleep.
    pub(crate) fn wait_for_room(&self) {
        let _ = self.wait_for_room_killable(Kill::NEVER);
    }

    /// The same, until `kill` ends it.
    ///
    /// # Errors
    /// [`Interrupted`], whether there is room or not.
    pub(crate) fn wait_for_room_killable(&self, kill: Kill<'_>) -> Result<(), Interrupted> {
        self.starved.sleep(
            || self.budget.call_for_memory(),
            || self.available() > 0,
            |word, seen| self.mmu.sleep_on(word, seen as u32, kill),
        );
        if kill.is_due() { Err(Interrupted) } else { Ok(()) }
    }

    fn fault_on_mapped(&self, page: LockedPage<'_, Self>, vma: &Vma, access: Access) -> Outcome {
        if access == Access::WriteProtected {
            self.fault_on_protected(page, vma);
            return Outcome::Served;
        }
        if vma.attributes.kind == Kind::Private {
            return self.fault_on_mapped_private(page);
        }
        // Another fault may have mapped it since this one was sent; or the program has dropped
        // the page by a bare system call, and then zeros are right.
        // SAFETY: `zeros` is a block of pages, unmanaged.
        unsafe { self.replace_mapped(page, self.zeros.as_ptr().cast()) };
        Outcome::Spurious
    }

    /// Maps a page anew that the program has dropped by itself. Where it is there after all it
    /// stays as it is: the kernel says so.
    ///
    /// # Safety
    /// A page of bytes is at `source`, and it is not managed.
    pub(super) unsafe fn replace_mapped(&self, page: LockedPage<'_, Self>, source: *const u8) {
        let one = PageRange::new(page.page(), 1);
        // SAFETY: the caller's promise.
        let copied = unsafe { self.mmu.copy_in(one, source, Protection::Writable) };
        if copied.pages == 0 {
            page.unlock();
            self.mmu.wake(one);
        } else {
            self.release_stored(page.content());
            page.replace();
        }
    }

    /// The first write to a page that was mapped protected. Where a stream of writes comes by,
    /// the clean pages around it are made writable with it, and give up what they have in store.
    fn fault_on_protected(&self, locked: LockedPage<'_, Self>, vma: &Vma) {
        let (page, old) = (locked.page(), locked.content());
        let mut pages = LockedRange::of(locked);
        let mut guess = None;
        if old.has(Flags::CLEAN) {
            if !old.has(Flags::IN_OBJECT) {
                self.swap.note_unclean();
            }
            let now = self.guess(page, old, vma);
            self.lock_clean_around(&mut pages, now.folio(page, vma));
            guess = Some(now);
        }
        let range = pages.range();
        if self.mmu.write_protect(range, Protection::Writable).refusal.is_some() {
            // Something of the program's own lies beside it by now: the page alone, and its
            // thread is woken whatever becomes of it.
            let _ = self.mmu.write_protect(PageRange::new(page, 1), Protection::Writable);
            self.mmu.wake(PageRange::new(page, 1));
        }
        while let Some(other) = pages.take_first() {
            self.release_stored(other.content());
            if other.page() == page { other.write() } else { other.end_clean() }
        }
        if let Some(guess) = guess {
            self.streams.advance(guess, range);
        }
    }

    fn fault_on_poisoned(&self, locked: LockedPage<'_, Self>) -> Outcome {
        let page = locked.page();
        let _ = self.mmu.poison(page);
        locked.unlock();
        self.mmu.wake(PageRange::new(page, 1));
        Outcome::Poisoned
    }

    fn fault_from_file(
        &self,
        page: LockedPage<'_, Self>,
        access: Access,
        way: Way,
        scratch: &mut Scratch,
    ) -> Outcome {
        self.budget.count(Event::Pgmajfault, 1);
        let Some(location) = Location::new(page.content().payload()) else {
            self.poison_locked(page);
            return Outcome::Poisoned;
        };
        let is_write = access == Access::Write;
        let request = SwapRead { page: page.page(), location, is_write, sent_ns: monotonic_ns() };
        let Err(page) = self.read_at_once(page, request, scratch) else { return Outcome::Served };
        // The lock stays taken until the read is done; the reader answers this fault.
        page.park_fault();
        page.leave_locked();
        if self.swap.request_read(request) {
            self.count_finished(way);
        } else {
            self.adopt_page(request.page).unlock();
        }
        Outcome::Parked
    }

    /// Serves a page whose bytes are in memory, and those around it.
    fn fault_from_memory(
        &self,
        locked: LockedPage<'_, Self>,
        vma: &Vma,
        guess: Guess,
        access: Access,
        staging: &mut Staging,
    ) -> bool {
        let page = locked.page();
        let is_fresh = locked.state() == State::None;
        let joins = |other: Snapshot| match other.state() {
            State::None => is_fresh,
            State::Same | State::Pool => !is_fresh,
            _ => false,
        };
        let pages_max = self.window_pages_max(1 << guess.order);
        // A write ends the sharing of its own page, and of no neighbour.
        let is_alone = access != Access::Read && self.is_shared(locked.content());
        let window_max = if is_alone { 1 } else { pages_max };
        let mut window = self.open_window(locked, vma, access, guess, window_max, joins);
        if !is_fresh && self.may_keep_clean(&window) {
            window.is_clean = true;
        }
        let has_gaps = !is_fresh && window.range().len() < pages_max.min(1 << guess.order);
        if has_gaps {
            let pages_left = pages_max - window.range().len();
            self.fill_around(&window, vma, guess, pages_left, joins, staging);
        }
        let is_filled = self.fill_window(&mut window, FillSource::Stored, guess, staging);
        if is_filled && has_gaps {
            self.streams.advance(guess, guess.folio(page, vma));
        }
        is_filled
    }

    /// Pages that a fault that wants so many may take at most, so that it is not the only one to have memory.
    fn window_pages_max(&self, wanted: usize) -> usize {
        let most = (self.available() / 2).max(1);
        if most < wanted {
            self.boost_watermarks();
        }
        most
    }

    /// How many pages a fault on this one, which was seen so, should bring.
    pub(crate) fn guess(&self, page: PageNum, old: Snapshot, vma: &Vma) -> Guess {
        let pattern = vma.attributes.pattern;
        let is_fresh = old.state() == State::None && vma.attributes.kind == Kind::Anonymous;
        let order_max = stream_order_max(self.budget.limit());
        let through = match is_fresh {
            true => Through::Fresh,
            false if self.neighbours.are_used() => Through::Dense,
            false => Through::Swapped,
        };
        let would_fault = |page| {
            let now = self.snapshot(page);
            now.state().is_swapped() && !now.is_locked()
        };
        let mut guess = self.streams.guess(page, through, pattern, order_max, would_fault);
        if let Some(fixed) = self.fixed_order() {
            guess.order = fixed;
        } else if old.state().is_swapped() && pattern == Pattern::Normal {
            let is_swapped = |page| self.snapshot(page).state().is_swapped();
            guess.order = self.neighbours.order(page, guess.order, is_swapped).min(order_max);
        }
        guess
    }

    /// The order that all folios are to have, where the access is not to choose it.
    pub(crate) fn fixed_order(&self) -> Option<u32> {
        let order = self.budget.control().folio_order.load(core::sync::atomic::Ordering::Relaxed);
        u32::try_from(order).ok().map(|order| order.min(BLOCK_ORDER))
    }

    pub(crate) fn unlock_range(&self, range: PageRange) {
        for page in range.pages() {
            self.unlock_page(page);
        }
    }

    /// Writes the content of a page that is in memory into `into`.
    ///
    /// # Safety
    /// The caller holds the page's lock.
    pub(crate) unsafe fn load_content(
        &self,
        page: PageNum,
        before: Snapshot,
        into: &mut PageBytes,
    ) -> Result<(), Corrupt> {
        match before.state() {
            State::Same => fill_same(before.payload(), into),
            State::Pool => {
                let handle = Handle::new(before.payload()).ok_or(Corrupt)?;
                // SAFETY: the caller's promise.
                unsafe { self.swap.zpool.load(handle, page, into) }?;
            }
            _ => into.fill(0),
        }
        Ok(())
    }

    /// Serves a page that is still in the pool with its content, and its neighbours there.
    pub(crate) fn fault_from_limbo(
        &self,
        locked: LockedPage<'_, Self>,
        vma: &Vma,
        guess: Guess,
        access: Access,
    ) {
        let (page, first) = (locked.page(), locked.content().payload());
        let joins = |other: Snapshot| other.state() == State::Limbo;
        // Each page that is touched has to be seen where there is sampling.
        let pages_max = if self.budget.control().sampling.is_on() {
            self.note_touched(page);
            1
        } else {
            BLOCK_PAGES
        };
        let mut window = self.open_window(locked, vma, access, guess, pages_max, joins);
        cut_to_neighbouring_frames(&mut window, first);
        let range = window.range();
        let frame = FrameId(window.before(range.start).payload());
        let mapped = if window.can_move() {
            let done = self.mmu.move_in(range, frame);
            let run = FrameRun { start: frame, len: done.pages };
            self.frames.leave_limbo(run);
            self.frames.consume(run);
            self.budget.count(Event::MapMove, done.pages);
            done.pages
        } else {
            self.copy_from_limbo(&window)
        };
        self.settle_mapped(mapped, &mut window, Settled::Mapped);
        drop(window);
        if !PageRange::new(range.start, mapped).contains(page) {
            self.mmu.wake(PageRange::new(page, 1));
        }
        self.streams.advance(guess, range);
        self.budget.count(Event::PgactivateLimbo, 1);
    }

    /// Copies pages out of limbo to where moving is refused; each frame pays for its copy. One page is there
    /// twice at any time, and no fault waits for memory for that: the reserve has some.
    fn copy_from_limbo(&self, window: &FaultWindow<'_, M>) -> usize {
        if !self.charge_last() {
            self.budget.charge_anyway(1);
        }
        let mut mapped = 0;
        for page in window.range().pages() {
            let frame = FrameId(window.before(page).payload());
            let one = PageRange::new(page, 1);
            // SAFETY: the frame holds the page's content and is ours while the page is locked.
            let done =
                unsafe { self.mmu.copy_in(one, self.mmu.frame(frame).cast(), window.protection()) };
            if done.pages == 0 {
                break;
            }
            let run = FrameRun { start: frame, len: 1 };
            self.frames.leave_limbo(run);
            self.mmu.frames_release(run);
            self.frames.consume(run);
            self.budget.count(Event::MapCopy, 1);
            mapped += 1;
        }
        self.budget.uncharge(1);
        mapped
    }
}

/// Leaves in the window only pages whose frames follow each other as the pages do.
fn cut_to_neighbouring_frames<M: Mmu>(window: &mut FaultWindow<'_, M>, first: u32) {
    let asked = window.asked;
    let fits = |page: PageNum| {
        let want = i64::from(first) + (page.0 as i64 - asked.0 as i64);
        let frame = window.before(page).payload();
        i64::from(frame) == want && frame >> BLOCK_ORDER == first >> BLOCK_ORDER
    };
    let whole = window.range();
    let mut kept = PageRange::new(asked, 1);
    while kept.end < whole.end && fits(kept.end) {
        kept.end = kept.end.add(1);
    }
    while kept.start > whole.start && fits(PageNum(kept.start.0 - 1)) {
        kept.start.0 -= 1;
    }
    window.pages.cut_to(kept);
}

/// Whether a page that is so is filled with memory that has to be taken.
fn takes_memory(content: Snapshot) -> bool {
    matches!(content.state(), State::None | State::Same | State::Pool)
}

/// How often a fault tries for a page's lock before it is parked, or for a window's before it sleeps: about as
/// long as another fault takes to map it.
pub(crate) const LOCK_TURNS: u32 = 16;

/// Bytes of the block of zeros that fresh pages are copied from.
pub(crate) const ZEROS_BYTES: usize = BLOCK_PAGES * PAGE_SIZE;
