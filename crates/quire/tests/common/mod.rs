//! What the tests of the engine share: a space over the simulated MMU, without threads. A fault
//! is served by the thread that made it. It also does the work of the readers of the swap file and,
//! where there is no memory, that of the background thread.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod real;

use std::cell::Cell;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use quire::budget::Budget;
use quire::control::Event;
use quire::failpoint::{self, Failpoint};
use quire::mmu::Prot;
use quire::page::{Flags, Snapshot, State};
use quire::reclaim::{Evicted, NoCaches, Reclaimer};
use quire::scratch::Scratch;
use quire::space::{Advice, VmSpace};
use quire::swap::SwapRead;
use quire::swap::io::Ring;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::tree::space_on;
pub use quire_simulated::tree::{Tree, control, space, swap_file};
use quire_simulated::{Settings, Simulated, Trap};

/// Whether faults of a run try without the space's lock first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Speculation {
    Always,
    Never,
    /// It changes while the programs run.
    Changing,
}

impl Speculation {
    pub fn from_number(number: u32) -> Speculation {
        [Speculation::Always, Speculation::Never, Speculation::Changing][number as usize]
    }

    pub fn begin(self, budget: &Budget) {
        let is_off = u32::from(self == Speculation::Never);
        budget.control().no_speculation.store(is_off, Ordering::Relaxed);
    }

    pub fn change(self, budget: &Budget) {
        if self == Speculation::Changing {
            budget.control().no_speculation.fetch_xor(1, Ordering::Relaxed);
        }
    }
}

/// A tree of so many members, in the slots from 0 on.
pub fn members<const COUNT: usize>(tree: Tree) -> [Budget; COUNT] {
    let control = control(tree);
    // SAFETY: the control page is never unmapped.
    let budgets = std::array::from_fn(|slot| unsafe { Budget::new(control.as_ptr(), slot as u32) });
    // SAFETY: as above.
    (1..COUNT).for_each(|slot| unsafe { control.as_ref() }.take_slot(slot, 1));
    budgets
}

/// A space on the simulated MMU and the one thread that does everything in it.
pub struct Machine {
    pub space: VmSpace<Simulated>,
    pub scratch: Mutex<Scratch>,
    ring: Option<Mutex<Ring>>,
    /// What [`Self::unmapped`] found when it was asked last.
    unmapped_before: Mutex<[u64; 2]>,
    /// The swap file.
    pub file: Option<OwnedFd>,
}

impl Machine {
    pub fn new(tree: Tree) -> Machine {
        Machine::with(tree, Settings::default())
    }

    pub fn with(tree: Tree, settings: Settings) -> Machine {
        // SAFETY: the control page is never unmapped.
        let budget = unsafe { Budget::new(control(tree).as_ptr(), 0) };
        Machine::on(budget, settings, (tree.segments > 0).then(swap_file))
    }

    /// A member of a tree, without a swap file.
    pub fn member(budget: Budget) -> Machine {
        Machine::on(budget, Settings::default(), None)
    }

    fn on(budget: Budget, settings: Settings, file: Option<OwnedFd>) -> Machine {
        let (pages, frames) = (16 * BLOCK_PAGES, 64 * BLOCK_PAGES);
        let mmu = Simulated::new(pages, frames, settings).unwrap();
        let (space, file) = space_on(budget, mmu, pages, frames, file);
        let ring = file.as_ref().map(|_| Mutex::new(space.swap().new_reader()));
        let scratch = Mutex::new(Scratch::new().unwrap());
        Machine { space, scratch, ring, unmapped_before: Mutex::new([0; 2]), file }
    }

    pub fn mmu(&self) -> &Simulated {
        self.space.mmu()
    }

    /// Maps pages at `at`, readable and writable.
    pub fn map(&self, at: u64, pages: usize) -> PageRange {
        let range = PageRange::new(PageNum(at), pages);
        self.space.map_fixed(&mut self.space.lock(), range, Prot::READ_WRITE).unwrap();
        range
    }

    pub fn protect(&self, range: PageRange, prot: Prot) {
        self.space.protect(&mut self.space.lock(), range, prot).unwrap();
    }

    pub fn advise(&self, range: PageRange, advice: Advice) {
        self.space.advise(&mut self.space.lock(), range, advice).unwrap();
    }

    /// Forks, as far as this side knows; the child is gone at once.
    pub fn fork(&self) {
        let mut layout = self.space.lock();
        let charged = self.space.prepare_fork(&mut layout).unwrap();
        self.space.budget().uncharge(charged);
    }

    /// Evicts what can go, as MADV_PAGEOUT does, but leaves it in limbo.
    pub fn evict(&self, range: PageRange) -> Evicted {
        let mut all = Evicted::default();
        for part in range.by_block() {
            let some =
                self.space.evict_range(part, Reclaimer::Advice, &mut self.scratch.lock().unwrap());
            all.unmapped += some.unmapped;
            all.freed += some.freed;
            all.refused += some.refused;
        }
        all
    }

    fn bytes(&self, page: PageNum, is_write: bool) -> Result<*mut [u8; PAGE_SIZE], Trap> {
        for _ in 0..1000 {
            match self.mmu().try_access(page, is_write)? {
                Ok(bytes) => return Ok(bytes),
                Err(access) => {
                    let mut scratch = self.scratch.lock().unwrap();
                    self.space.handle_fault(page, access, &mut scratch);
                    self.read_swap(&mut scratch);
                    if self.space.is_low() {
                        self.space.balance(&NoCaches, &mut scratch);
                    }
                }
            }
        }
        panic!("{page:?} cannot be had: {:?}", self.space.snapshot(page));
    }

    /// Does what the readers of the swap file would.
    fn read_swap(&self, scratch: &mut Scratch) {
        let Some(ring) = &self.ring else { return };
        let mut requests = [SwapRead::NONE; 16];
        let count = self.space.swap().try_take_requests(&mut requests);
        self.space.complete_reads(&requests[..count], &mut ring.lock().unwrap(), scratch);
    }

    /// Fills a page with a pattern that packs, different for each value.
    pub fn fill(&self, page: PageNum, value: u64) {
        self.fill_bytes(page, &pattern(value));
    }

    /// Fills a page with noise that does not pack.
    pub fn fill_with_noise(&self, page: PageNum) {
        self.fill_bytes(page, &noise(page));
    }

    pub fn fill_bytes(&self, page: PageNum, content: &[u8; PAGE_SIZE]) {
        let bytes = self.bytes(page, true).unwrap();
        // SAFETY: mapped just now; no other thread runs.
        unsafe { *bytes = *content };
    }

    pub fn fill_all(&self, range: PageRange) {
        range.pages().for_each(|page| self.fill(page, page.0 + 1));
    }

    pub fn content(&self, page: PageNum) -> Result<[u8; PAGE_SIZE], Trap> {
        // SAFETY: mapped just now; no other thread runs.
        self.bytes(page, false).map(|bytes| unsafe { *bytes })
    }

    /// Checks that a page has what [`Self::fill`] gave it.
    pub fn expect(&self, page: PageNum, value: u64) {
        let content = self.content(page).unwrap();
        assert!(content == pattern(value), "{page:?} has other bytes");
    }

    pub fn expect_all(&self, range: PageRange) {
        range.pages().for_each(|page| self.expect(page, page.0 + 1));
    }

    pub fn counted(&self, event: Event) -> u64 {
        self.space.budget().counted(event)
    }

    /// Calls and pages of unmapping since the last question.
    pub fn unmapped(&self) -> (u64, u64) {
        let now = [Event::UnmapCalls, Event::UnmapPages].map(|event| self.counted(event));
        let before = std::mem::replace(&mut *self.unmapped_before.lock().unwrap(), now);
        (now[0] - before[0], now[1] - before[1])
    }

    pub fn state(&self, page: PageNum) -> State {
        self.word(page).state()
    }

    pub fn word(&self, page: PageNum) -> Snapshot {
        self.space.snapshot(page)
    }

    pub fn states(&self, range: PageRange) -> Vec<State> {
        range.pages().map(|page| self.state(page)).collect()
    }

    pub fn is_protected(&self, page: PageNum) -> bool {
        self.word(page).has(Flags::WRITE_PROTECTED)
    }
}

/// Does `work`, with `hook` called whenever this thread, and none of another test's, passes `place`.
pub fn passing<R>(place: Failpoint, hook: impl Fn(PageNum), work: impl FnOnce() -> R) -> R {
    type Hook<'a> = &'a dyn Fn(PageNum);
    thread_local! {
        static HOOK: Cell<Option<Hook<'static>>> = const { Cell::new(None) };
    }
    let hook: Hook<'_> = &hook;
    // SAFETY: only the lifetime changes; it is taken away below.
    HOOK.set(Some(unsafe { mem::transmute::<Hook<'_>, Hook<'static>>(hook) }));
    let call = |page| HOOK.get().into_iter().for_each(|hook| hook(page));
    failpoint::set(place, Some(Box::new(call)));
    let done = work();
    failpoint::set(place, None);
    HOOK.set(None);
    done
}

/// What [`Machine::fill_with_noise`] gives a page.
pub fn noise(page: PageNum) -> [u8; PAGE_SIZE] {
    let mut bytes = [0u8; PAGE_SIZE];
    let mut x = page.0 + 0x9e37_79b9_7f4a_7c15;
    for word in bytes.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_ne_bytes());
    }
    bytes
}

/// A page that packs, and that no other value has.
pub fn pattern(value: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0u8; PAGE_SIZE];
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(value.wrapping_mul(0x9e37) + at as u64 % 7).to_ne_bytes());
    }
    page
}
