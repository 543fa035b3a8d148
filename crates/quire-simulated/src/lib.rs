//! The simulated MMU: a page table in software.
//!
//! Physical pages are a plain buffer; a page table names one for each page of the arena, a list
//! one for each place of the frame pool. What the kernel would refuse is refused here, and what no
//! kernel call could make good is a panic: a frame used while it holds content, a hole read as a
//! frame, a move onto something. The clock is a counter.
//!
//! The program's side is [`Simulated::access`]: it faults as a thread would, and waits for its
//! answer. Messages come out of [`Simulated::next_fault`] in their order, each once. A message whose
//! fault was answered before it was read is gone, as the kernel has it.
//!
//! The calls of the waist are in `waist.rs`, those of objects in `object.rs`: a page of a memfd may be
//! mapped at any number of pages of the arena.
//!
//! With a [`Baton`] other actors may run at every call, and between the pages of one call, in the
//! order that a seed chooses. A seed also refuses moves now and then, as the kernel does for pinned
//! pages and changing layouts.

#![cfg(feature = "simulated")]

mod baton;
mod generator;
mod object;
mod ones;
pub mod tree;
mod waist;

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use quire::mmu::object::Shown;
use quire::mmu::{Access, Done, FrameId, Inspect, Mmu, PageMapping, Prot, Refusal};
use quire::sys::Errno;
use quire::sys::memory;
use quire::sys::thread::ThreadId;
use quire::units::{PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange};

pub use self::baton::{Baton, Stopped, Wait};
pub use self::generator::Generator;
use self::object::MemfdContent;
pub use self::ones::Ones;

/// What freed memory is overwritten with.
const FREED: u8 = 0xdb;
/// What a call costs on the virtual clock, and a page of it.
const CALL_CYCLES: u64 = 3000;
const PAGE_CYCLES: u64 = 200;

/// What the kernel's part costs on a simulated machine, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Costs {
    /// A call.
    pub call_ns: u64,
    /// Each page of it.
    pub page_ns: u64,
    /// A fault's way to a handler, and back.
    pub fault_ns: u64,
}

impl Default for Costs {
    fn default() -> Costs {
        Costs { call_ns: 1000, page_ns: 200, fault_ns: 2000 }
    }
}

/// Mistakes that can be planted, for tests that must find them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// `move_out` takes the bytes of a page before it takes the page away: a write in between is
    /// lost.
    LostWrite,
    /// `copy_in` forgets that it was asked for write protection.
    ForgottenProtection,
}

/// How a simulated MMU behaves.
#[derive(Clone, Default)]
pub struct Settings {
    /// Chooses the refusals.
    pub seed: u64,
    /// How often a page is refused that could have been moved; 0 for never.
    pub refuse_one_in: u32,
    /// A planted mistake.
    pub planted: Option<Planted>,
    /// Chooses which actor runs; without it threads run as they like.
    pub baton: Option<Arc<Baton>>,
    /// Of a machine.
    pub costs: Costs,
}

/// Why the program could not access a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// It has no right to.
    Segv,
    /// Its content is lost.
    Bus,
}

/// Number of a physical page; 0 is none.
type Physical = u32;

#[derive(Clone, Copy, Default)]
struct Entry {
    physical: Physical,
    prot: Prot,
    is_write_protected: bool,
    is_poisoned: bool,
    /// Another process has it as well, since a fork.
    is_shared: bool,
    /// What of an object is shown here; `physical` is the memfd's own page then, and write
    /// protection stays behind as a mark where none is mapped.
    shows: Option<Shown>,
}

struct Fault {
    number: u64,
    page: PageNum,
    access: Access,
    thread: ThreadId,
    is_read: bool,
}

struct State {
    entries: Vec<Entry>,
    places: Vec<Physical>,
    unused: Vec<Physical>,
    /// Physical pages that were never used start here.
    fresh: Physical,
    used: usize,
    /// Physical pages that the kernel holds, and how often.
    pins: BTreeMap<Physical, u32>,
    faults: VecDeque<Fault>,
    faults_so_far: u64,
    memfds: Vec<Option<MemfdContent>>,
    generator: Generator,
}

/// A page table in software.
pub struct Simulated {
    memory: core::ptr::NonNull<[u8; PAGE_SIZE]>,
    pages: usize,
    state: Mutex<State>,
    changed: Condvar,
    clock: AtomicU64,
    is_protection_refused: AtomicBool,
    settings: Settings,
}

// SAFETY: the buffer's address is constant; which thread may touch a page of it is the page locks'
// business, as with real memory.
unsafe impl Send for Simulated {}
// SAFETY: as above.
unsafe impl Sync for Simulated {}

impl Simulated {
    /// An arena of `pages` without any rights, and `frames` places.
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new(pages: usize, frames: usize, settings: Settings) -> Result<Simulated, Errno> {
        let physical = pages + frames + 1;
        let memory = memory::reserve(physical << PAGE_SHIFT, memory::InitialProt::ReadWrite)?;
        Ok(Simulated {
            memory: memory.cast(),
            pages: physical,
            state: Mutex::new(State {
                entries: vec![Entry::default(); pages],
                places: vec![0; frames],
                unused: Vec::new(),
                fresh: 1,
                used: 0,
                pins: BTreeMap::new(),
                faults: VecDeque::new(),
                faults_so_far: 0,
                memfds: Vec::new(),
                generator: Generator::new(settings.seed ^ 0x5155_4952),
            }),
            changed: Condvar::new(),
            clock: AtomicU64::new(1),
            is_protection_refused: AtomicBool::new(false),
            settings,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self, physical: Physical) -> *mut [u8; PAGE_SIZE] {
        assert!(physical != 0 && (physical as usize) < self.pages);
        // SAFETY: inside the buffer (asserted).
        unsafe { self.memory.as_ptr().add(physical as usize) }
    }

    fn allocate(&self, state: &mut State) -> Physical {
        state.used += 1;
        let physical = state.unused.pop().unwrap_or_else(|| {
            state.fresh += 1;
            state.fresh - 1
        });
        // SAFETY: no thread has the page.
        unsafe { (*self.bytes(physical)).fill(0) };
        physical
    }

    fn free(&self, state: &mut State, physical: Physical) {
        if state.pins.contains_key(&physical) {
            // The kernel still holds it; the last unpin frees it.
            return;
        }
        // SAFETY: no thread has the page any more.
        unsafe { (*self.bytes(physical)).fill(FREED) };
        state.used -= 1;
        state.unused.push(physical);
    }

    /// Physical pages in use.
    pub fn used(&self) -> usize {
        self.state().used
    }

    /// Charges the virtual clock for a call, and lets others run.
    fn enter(&self) {
        // Relaxed: a clock.
        self.clock.fetch_add(CALL_CYCLES, Ordering::Relaxed);
        self.work(self.settings.costs.call_ns);
        self.step();
    }

    /// The same between two pages of a call: not each time, or nothing would ever end.
    fn next_page(&self) {
        self.clock.fetch_add(PAGE_CYCLES, Ordering::Relaxed);
        self.work(self.settings.costs.page_ns);
        self.step();
    }

    /// What a machine's CPU does meanwhile.
    fn work(&self, ns: u64) {
        if let Some(baton) = &self.settings.baton {
            baton.work(ns);
        }
    }

    fn is_refused(&self, state: &mut State) -> bool {
        state.generator.one_in(self.settings.refuse_one_in)
    }

    /// Answers faults: the threads that wait in `pages` try again.
    fn answer(&self, state: &mut State, pages: PageRange) {
        state.faults.retain(|fault| {
            let is_answered = pages.contains(fault.page);
            if is_answered && let Some(baton) = &self.settings.baton {
                baton.unblock(Wait::Fault(fault.number));
            }
            !is_answered
        });
        self.changed.notify_all();
    }

    /// What an access would meet: the memory, a fault, or a trap.
    ///
    /// # Errors
    /// The trap.
    pub fn try_access(
        &self,
        page: PageNum,
        is_write: bool,
    ) -> Result<Result<*mut [u8; PAGE_SIZE], Access>, Trap> {
        let state = self.state();
        let entry = state.entries[page.index()];
        let is_allowed = if is_write { entry.prot.is_writable() } else { entry.prot.is_readable() };
        if !is_allowed {
            return Err(Trap::Segv);
        }
        if entry.is_poisoned || entry.shows.is_some_and(|shown| state.is_behind_end(shown)) {
            return Err(Trap::Bus);
        }
        if entry.physical == 0 {
            return Ok(Err(if is_write { Access::Write } else { Access::Read }));
        }
        if is_write && entry.is_write_protected {
            return Ok(Err(Access::WriteProtected));
        }
        Ok(Ok(self.bytes(entry.physical)))
    }

    /// Accesses a page as the program does, waiting for its faults. What is done through the
    /// pointer before the thread's next call happens at once with the access.
    ///
    /// # Errors
    /// The trap.
    pub fn access(&self, page: PageNum, is_write: bool) -> Result<*mut [u8; PAGE_SIZE], Trap> {
        loop {
            self.step();
            match self.try_access(page, is_write)? {
                Ok(bytes) => return Ok(bytes),
                Err(access) => self.fault(page, access),
            }
        }
    }

    /// Sends a fault and waits for its answer.
    fn fault(&self, page: PageNum, access: Access) {
        self.work(self.settings.costs.fault_ns);
        let mut state = self.state();
        let number = state.faults_so_far;
        state.faults_so_far += 1;
        state.faults.push_back(Fault {
            number,
            page,
            access,
            thread: baton::actor(),
            is_read: false,
        });
        self.changed.notify_all();
        let waits = |state: &State| state.faults.iter().any(|fault| fault.number == number);
        match &self.settings.baton {
            Some(baton) => {
                drop(state);
                while waits(&self.state()) {
                    baton.block(Wait::Fault(number));
                }
            }
            None => {
                while waits(&state) {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// The next fault that was not read yet, if there is one.
    pub fn try_next_fault(&self) -> Option<(PageNum, Access)> {
        self.try_next_message().map(|(_, page, access)| (page, access))
    }

    /// The same, with the thread that takes it.
    pub fn try_next_message(&self) -> Option<(ThreadId, PageNum, Access)> {
        let mut state = self.state();
        let fault = state.faults.iter_mut().find(|fault| !fault.is_read)?;
        fault.is_read = true;
        Some((fault.thread, fault.page, fault.access))
    }

    /// The next fault, waiting for it.
    pub fn next_fault(&self) -> (PageNum, Access) {
        loop {
            if let Some(fault) = self.try_next_fault() {
                return fault;
            }
            let state = self.state();
            let _ = self.changed.wait_timeout(state, core::time::Duration::from_millis(10));
        }
    }

    /// From now on no page can be mapped write-protected: there is no memory for it.
    pub fn refuse_protection(&self) {
        self.is_protection_refused.store(true, Ordering::Relaxed);
    }

    /// The kernel takes hold of a mapped page, as for direct I/O; what it writes goes to the
    /// returned memory, whatever is mapped at `page` by then.
    pub fn pin(&self, page: PageNum) -> Option<Pin> {
        let mut state = self.state();
        let physical = state.entries[page.index()].physical;
        if physical == 0 {
            return None;
        }
        *state.pins.entry(physical).or_insert(0) += 1;
        Some(Pin { physical })
    }

    /// Where the pinned memory is mapped, if it is.
    pub fn page_of(&self, pin: &Pin) -> Option<PageNum> {
        let state = self.state();
        let at = state.entries.iter().position(|entry| entry.physical == pin.physical)?;
        Some(PageNum(at as u64))
    }

    /// The bytes that the kernel holds.
    pub fn pinned_bytes(&self, pin: &Pin) -> *mut [u8; PAGE_SIZE] {
        self.bytes(pin.physical)
    }

    /// The kernel lets go.
    pub fn unpin(&self, pin: Pin) {
        let mut state = self.state();
        let count = state.pins.get_mut(&pin.physical).expect("pinned");
        *count -= 1;
        if *count == 0 {
            state.pins.remove(&pin.physical);
            let is_used = state.entries.iter().any(|entry| entry.physical == pin.physical)
                || state.places.contains(&pin.physical);
            if !is_used {
                self.free(&mut state, pin.physical);
            }
        }
    }

    /// Another process has the page as well, as after a fork.
    pub fn share(&self, page: PageNum) {
        self.state().entries[page.index()].is_shared = true;
    }

    /// Whether all of a range can be moved from or to.
    fn is_movable(&self, state: &State, pages: PageRange) -> bool {
        pages.end.index() <= state.entries.len()
            && pages.pages().all(|page| {
                let entry = state.entries[page.index()];
                entry.prot.is_movable() && entry.shows.is_none()
            })
    }

    /// Runs `act` for each page, until one is refused.
    fn each(
        &self,
        pages: PageRange,
        mut act: impl FnMut(&mut State, PageNum, usize) -> Option<Refusal>,
    ) -> Done {
        for (at, page) in pages.pages().enumerate() {
            let refusal = act(&mut self.state(), page, at);
            if refusal.is_some() {
                return Done { pages: at, refusal };
            }
            self.next_page();
        }
        Done::all(pages.len())
    }

    /// For [`Planted::LostWrite`]: the pages' bytes as they are too early.
    fn plant_lost_write(&self, pages: PageRange) -> Vec<Option<[u8; PAGE_SIZE]>> {
        if self.settings.planted != Some(Planted::LostWrite) {
            return Vec::new();
        }
        let state = self.state();
        let entries = pages.pages().map(|page| state.entries[page.index()].physical);
        // SAFETY: pages of the buffer.
        let read = |physical| (physical != 0).then(|| unsafe { *self.bytes(physical) });
        let bytes = entries.map(read).collect();
        drop(state);
        self.step();
        bytes
    }

    /// Why a page cannot be moved away, if it cannot.
    fn why_busy(&self, state: &mut State, entry: Entry) -> Option<Refusal> {
        let is_busy =
            entry.is_shared || state.pins.contains_key(&entry.physical) || self.is_refused(state);
        is_busy.then_some(Refusal::Busy)
    }
}

/// A page that the kernel holds.
#[derive(Debug)]
pub struct Pin {
    physical: Physical,
}

impl Drop for Simulated {
    fn drop(&mut self) {
        // SAFETY: reserved in `new`; nothing refers to it any more.
        unsafe { memory::release(self.memory.cast(), self.pages << PAGE_SHIFT) };
    }
}

impl Inspect for Simulated {
    fn mapping(&self, page: PageNum) -> PageMapping {
        let entry = self.state().entries[page.index()];
        PageMapping {
            is_present: entry.physical != 0,
            is_write_protected: entry.is_write_protected,
            is_poisoned: Some(entry.is_poisoned),
            prot: Some(entry.prot),
        }
    }

    fn has_memory(&self, frame: FrameId) -> bool {
        self.state().places[frame.0 as usize] != 0
    }
}
