//! The library: objects mapped under a bound on memory, for an application that manages its own.
//!
//! ```no_run
//! # fn main() -> Result<(), quire::library::Error> {
//! use quire::library::{AddressSpace, MapOptions};
//!
//! let space = AddressSpace::builder().memory(64 << 20).build()?;
//! let object = space.open("data.bin")?;
//! // SAFETY: nobody writes the file meanwhile.
//! let map = unsafe { MapOptions::new().map(&object)? };
//! println!("{} bytes, the first is {}", map.len(), map[0]);
//! # Ok(())
//! # }
//! ```
//!
//! Owns the threads and what the engine needs around it: handlers, which serve faults; the
//! background thread; store workers, which call the [`Store`](crate::store::Store) and block on it;
//! others do so only for a few pages, and where the store can do that in a signal handler
//! ([`try_read_in_place`](crate::store::Store::try_read_in_place)). Leaves all memory management to [`crate::object`].
//!
//! # After a fork
//!
//! A child has none of the mappings: an access is a SIGSEGV. It may open an address space of its
//! own.
//!
//! # Waiting
//!
//! Calls wait for stores, as long as it takes unless [`Patience::during`] says otherwise.
//!
//! # Rights
//!
//! Where the process may not serve faults that the kernel takes on its behalf
//! ([`AddressSpace::serves_system_calls`]), a system call that is handed a page that is not mapped
//! fails with EFAULT: [`Mapping::populate`] it before, or [`Mapping::pin`] it, and it stays.

mod adapter;
mod cancel;
mod change;
mod error;
mod inline;
mod map_options;
mod mapping;
mod object;
mod open_options;
mod pinned;
mod swap_file;
mod threads;

use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, PoisonError};
use std::vec::Vec;

use core::sync::atomic::Ordering;
use core::time::Duration;

pub use self::cancel::{CancelToken, Patience};
pub use self::change::{RemapOptions, Unchanged};
pub use self::error::Error;
pub use self::map_options::MapOptions;
pub use self::mapping::{Mapping, MappingCopy, MappingMut};
pub use self::object::Object;
pub use self::open_options::OpenOptions;
pub use self::pinned::{Pinned, PinnedMut};
use self::swap_file::{SwapFile, SwapPlace};
use self::threads::Threads;
use crate::budget::Budget;
use crate::control::{CONTROL_BYTES, Control, Event, FAULT_BUCKETS, FaultKind, MAGIC, VERSION};
use crate::mmu::userfaultfd::Userfaultfd;
pub use crate::object::FaultAround;
use crate::object::{IoBuffer, Objects};
use crate::page::Kill;
pub use crate::page::wait::Counts as WaitCounts;
use crate::scratch::Scratch;
use crate::space;
pub use crate::space::vma::Pattern;
use crate::swap::Swap;
use crate::sys::memory::{self, InitialProt};
use crate::sys::thread::SignalsBlocked;
use crate::units::{BLOCK_PAGES, PAGE_SHIFT, PageNum, PageRange};

/// Addresses for mappings: 1 TiB, as a rule.
const ARENA_BYTES: usize = 1 << 40;
/// Least memory that an address space can do with.
const MEMORY_MIN: usize = 1 << 20;
/// More would be more than there are addresses for.
const MEMORY_MAX: usize = ARENA_BYTES;

/// What an address space has counted, by the names of /proc/vmstat where it has one.
pub type Counters = Vec<(&'static str, u64)>;
/// How long faults took, by kind: the `i`-th number counts those of `2^i` to `2^(i+1)` nanoseconds.
pub type FaultTimes = Vec<(&'static str, [u64; FAULT_BUCKETS])>;

/// The engine with what keeps it alive.
struct Engine {
    objects: &'static Objects<Userfaultfd>,
    threads: Threads,
    serves_calls: bool,
    /// How long objects wait for their stores.
    store_deadline: Option<Duration>,
    /// Buffers for callers that read or flush.
    buffers: Mutex<Vec<(Scratch, IoBuffer)>>,
    _control: ControlPage,
    _files: [Option<std::fs::File>; 3],
}

// SAFETY: the control page is atomics.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

/// An address space: a bound on memory, and the objects that are mapped under it. Clones are the
/// same address space; it ends with the last clone, object and mapping.
#[derive(Clone)]
pub struct AddressSpace {
    engine: Arc<Engine>,
}

/// How an address space is made.
#[derive(Clone, Debug)]
pub struct Builder {
    memory: usize,
    handlers: usize,
    workers: usize,
    delivery: Delivery,
    swap: Option<SwapPlace>,
    store_deadline: Option<Duration>,
    writer_deadline: Option<Duration>,
}

/// Who serves a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Delivery {
    /// Threads of the address space; faults that the kernel takes inside of a system call are
    /// served as well, where the process may.
    #[default]
    Handlers,
    /// The thread that faults, in a signal handler: sooner, and without another thread. Only faults
    /// taken in user mode: a system call that is handed a page that is not mapped fails with EFAULT
    /// (populate it before). The process's SIGBUS is taken over when the first such address space
    /// is made; what is not ours goes on to the handler that was there. A fault takes some 3 KiB of
    /// the stack of its thread, beside what the kernel puts there for a signal; where it is one on a
    /// private copy ([`MapOptions::map_copy`]), less, for it is served on another stack. After a
    /// fork all is the parent's: the child may make such address spaces of its own.
    Inline,
}

impl Default for Builder {
    fn default() -> Builder {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Builder {
            memory: 256 << 20,
            handlers: cpus.min(4),
            workers: 4,
            delivery: Delivery::Handlers,
            swap: None,
            store_deadline: None,
            writer_deadline: None,
        }
    }
}

impl Builder {
    /// Bytes that may be held: cached pages and the tables that go with them. 256 MiB unless said
    /// otherwise, 1 MiB at least.
    #[must_use]
    pub fn memory(mut self, bytes: usize) -> Builder {
        self.memory = bytes;
        self
    }

    /// Threads that serve faults: one per CPU, four at most, unless said otherwise.
    #[must_use]
    pub fn handlers(mut self, threads: usize) -> Builder {
        self.handlers = threads.max(1);
        self
    }

    /// Threads that read and write stores: how many reads are in flight. Four unless said
    /// otherwise.
    #[must_use]
    pub fn workers(mut self, threads: usize) -> Builder {
        self.workers = threads.max(1);
        self
    }

    /// Who serves faults.
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Builder {
        self.delivery = delivery;
        self
    }

    /// A swap file without a name in `folder`, of `bytes_max` at most: what is compressed of memory
    /// objects and private copies ([`MapOptions::map_copy`]) goes there where it would take too
    /// much memory, and what cannot be compressed with it. Without one they can hold no more than
    /// what of them, compressed, has room in memory: beyond that the process runs out of memory,
    /// and is ended.
    #[must_use]
    pub fn swap(mut self, folder: impl Into<std::path::PathBuf>, bytes_max: u64) -> Builder {
        self.swap = Some(SwapPlace { folder: folder.into(), bytes_max });
        self
    }

    /// Puts a [`DeadlineStore`](crate::store::DeadlineStore) around the store of every object: no
    /// call of a store is waited for longer. For ever unless said otherwise, as the kernel does: a
    /// store that takes its time is not a bad one, and an access whose read has failed is a SIGBUS.
    /// After it, `read_at`, `populate` and flushes say
    /// [`Cause::Silent`](crate::store::Cause::Silent), and what was written stays dirty. An object,
    /// and the address space, can be closed while the store owes an answer.
    #[must_use]
    pub fn store_deadline(mut self, deadline: Duration) -> Builder {
        self.store_deadline = Some(deadline);
        self
    }

    /// How long a write to a mapping waits where as much is dirty as may be, the store takes nothing
    /// and its last write failed, or was held back by the barrier: then it is a SIGBUS, which leaves
    /// the page as it was; accesses to that page in that mapping are one until the store has taken
    /// something. 30 s unless said otherwise. What is dirty stays so, and is tried on.
    #[must_use]
    pub fn writer_deadline(mut self, deadline: Duration) -> Builder {
        self.writer_deadline = Some(deadline);
        self
    }

    /// Makes the address space and starts its threads.
    ///
    /// # Errors
    /// [`Error::NoUserfaultfd`] without the right to one; [`Error::NoSwapFile`];
    /// [`Error::NoMemory`].
    pub fn build(self) -> Result<AddressSpace, Error> {
        if self.memory < MEMORY_MIN {
            return Err(Error::TooLittleMemory { bytes: self.memory, least: MEMORY_MIN });
        }
        if self.memory > MEMORY_MAX {
            return Err(Error::TooMuchMemory { bytes: self.memory, most: MEMORY_MAX });
        }
        let engine = Engine::start(&self)?;
        Ok(AddressSpace { engine: Arc::new(engine) })
    }
}

impl AddressSpace {
    /// How one is made.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Opens a file, read-only. [`OpenOptions`] has everything else.
    ///
    /// # Errors
    /// As for [`OpenOptions::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Object, Error> {
        OpenOptions::new().open(self, path)
    }

    /// Makes an object of `len` zeros that no file is behind: see [`OpenOptions::memory`].
    ///
    /// # Errors
    /// As for [`OpenOptions::memory`].
    pub fn create_memory(&self, len: u64) -> Result<Object, Error> {
        OpenOptions::new().memory(self, len)
    }

    /// Whether faults inside of system calls are served; where not, such a call fails with EFAULT.
    #[must_use]
    pub fn serves_system_calls(&self) -> bool {
        self.engine.serves_calls
    }

    /// Bytes that may be held.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.engine.objects.space.budget().limit_bytes()
    }

    /// Bytes held just now, and at most so far.
    #[must_use]
    pub fn held(&self) -> (usize, usize) {
        let control = self.engine.objects.space.budget().control();
        let bytes = |pages: u64| (pages as usize) << PAGE_SHIFT;
        (bytes(control.held()), bytes(control.held_pages_max.load(Ordering::Relaxed)))
    }

    /// Bytes that compressed pages take in memory, and segments of 256 KiB in use of the swap file.
    #[must_use]
    pub fn swap_usage(&self) -> (usize, u32) {
        let swap = self.engine.objects.space.swap();
        let segments = swap.file().map_or(0, |file| file.segments_held());
        (swap.zpool.pages() << PAGE_SHIFT, segments)
    }

    /// Packed pages in memory, counted one by one: for tests.
    #[cfg(feature = "simulated")]
    #[must_use]
    pub fn packed_pages(&self) -> usize {
        self.engine.objects.space.swap().zpool.blobs()
    }

    /// Bytes that are pinned just now, and that may be at once.
    #[must_use]
    pub fn pinned(&self) -> (usize, usize) {
        let objects = self.engine.objects;
        (objects.pinned_pages() << PAGE_SHIFT, objects.pins_max() << PAGE_SHIFT)
    }

    /// What was counted so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let budget = self.engine.objects.space.budget();
        Event::ALL.iter().map(|&event| (event.name(), budget.counted(event))).collect()
    }

    /// How long faults took so far, from the moment that one was read (or its signal came) to its
    /// answer.
    #[must_use]
    pub fn fault_times(&self) -> FaultTimes {
        let member = self.engine.objects.space.budget().member();
        FaultKind::ALL.iter().map(|&kind| (kind.name(), member.fault_times(kind))).collect()
    }

    /// One of [`Self::counters`]; 0 for a name that is not known.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        let found = self.counters().into_iter().find(|(known, _)| *known == name);
        found.map_or(0, |(_, value)| value)
    }

    /// Makes every walk over an object's mappings exclude all others, or share again; for
    /// comparison.
    #[cfg(feature = "bench")]
    pub fn set_exclusive_rmap(&self, is_exclusive: bool) {
        self.objects().i_mmaps.set_walks_exclusive(is_exclusive);
    }

    /// Whether every unlock of a page looks for waiters, as it must where a word cannot say that
    /// there are none; for comparison. May change at any time.
    #[cfg(feature = "bench")]
    pub fn set_unlocks_always_look(&self, always_look: bool) {
        self.objects().space.set_unlocks_always_look(always_look);
    }

    /// How often unlocks of pages woke somebody, and how often they need not.
    #[must_use]
    pub fn wait_counts(&self) -> WaitCounts {
        self.objects().space.wait_counts()
    }

    /// The engine, for a call that may take its locks.
    fn objects(&self) -> Entered {
        Entered { objects: self.engine.objects, _signals: SignalsBlocked::of_others() }
    }
}

/// The engine while a thread of the program is in it, with the signals of others blocked: a handler
/// of the program's that touches a mapping would wait for locks that its own thread holds.
struct Entered {
    objects: &'static Objects<Userfaultfd>,
    _signals: SignalsBlocked,
}

impl core::ops::Deref for Entered {
    type Target = Objects<Userfaultfd>;

    fn deref(&self) -> &Objects<Userfaultfd> {
        self.objects
    }
}

impl core::fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (held, _) = self.held();
        f.debug_struct("AddressSpace").field("memory", &self.memory()).field("held", &held).finish()
    }
}

impl Engine {
    fn start(builder: &Builder) -> Result<Engine, Error> {
        let open = |path: &str| std::fs::File::options().read(true).write(true).open(path).ok();
        let (device_file, mem_file) = (open("/dev/userfaultfd"), open("/proc/self/mem"));
        let [device, mem] =
            [&device_file, &mem_file].map(|file| file.as_ref().map(AsRawFd::as_raw_fd));
        let no_memory = |errno| Error::NoMemory { doing: "reserve address space", errno };
        let budget_pages = builder.memory >> PAGE_SHIFT;
        let frames = (budget_pages * 4).next_multiple_of(BLOCK_PAGES) + 64 * BLOCK_PAGES;
        let pages = ARENA_BYTES >> PAGE_SHIFT;
        let mmu = Userfaultfd::reserve(pages, frames).map_err(no_memory)?;
        let serves_calls = mmu
            .attach_shared(device, mem, builder.delivery == Delivery::Inline)
            .map_err(|errno| Error::NoUserfaultfd { errno })?;
        let arena = PageRange::new(PageNum(0), pages);
        mmu.register(arena).map_err(no_memory)?;
        let control = ControlPage::new(budget_pages).map_err(no_memory)?;
        // SAFETY: kept beside the objects, and dropped after them.
        let budget = unsafe { Budget::new(control.0.as_ptr(), 0) };
        let swap_file = builder.swap.as_ref().map(SwapFile::create).transpose()?;
        if let Some(swap_file) = &swap_file {
            budget.control().segments_max.store(swap_file.segments, Ordering::Relaxed);
        }
        let swap_file = swap_file.map(|swap_file| swap_file.file);
        // SAFETY: the file is kept beside the objects, and closed after them.
        let swap = unsafe { Swap::new(swap_file.as_ref().map(AsRawFd::as_raw_fd), None, &budget) }
            .map_err(no_memory)?;
        let space =
            space::AddressSpace::new(mmu, budget, swap, pages, frames).map_err(no_memory)?;
        let objects = Objects::new(space).map_err(no_memory)?;
        if let Some(deadline) = builder.writer_deadline {
            objects.set_writer_patience(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        }
        let objects: &'static Objects<Userfaultfd> =
            std::boxed::Box::leak(std::boxed::Box::new(objects));
        let (handlers, is_added) = match builder.delivery {
            Delivery::Handlers => (builder.handlers, Ok(())),
            Delivery::Inline => (0, inline::add(objects)),
        };
        let started = is_added.and_then(|()| Threads::start(objects, handlers, builder.workers));
        match started {
            Ok(threads) => {
                let buffers = Mutex::new(Vec::new());
                Ok(Engine {
                    objects,
                    threads,
                    serves_calls,
                    store_deadline: builder.store_deadline,
                    buffers,
                    _control: control,
                    _files: [device_file, mem_file, swap_file],
                })
            }
            Err(error) => {
                // SAFETY: no thread runs, and nobody else knows them.
                unsafe { discard(objects) };
                Err(error)
            }
        }
    }

    /// Lends buffers to a caller, whose patience goes with them.
    fn with_buffers<T>(
        &self,
        work: impl FnOnce(&mut Scratch, &mut IoBuffer) -> T,
    ) -> Result<T, Error> {
        let no_memory = |errno| Error::NoMemory { doing: "map a buffer", errno };
        let lock = || self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = lock().pop();
        let mut buffers = match kept {
            Some(buffers) => buffers,
            None => (Scratch::new().map_err(no_memory)?, IoBuffer::new().map_err(no_memory)?),
        };
        let patience = Patience::current();
        if let Some(patience) = &patience {
            // SAFETY: taken out again below, before `patience` goes; where `work` panics nobody
            // uses the buffer any more.
            buffers.1.set_kill(unsafe { patience.kill_for_a_call() });
        }
        let result = work(&mut buffers.0, &mut buffers.1);
        buffers.1.set_kill(Kill::NEVER);
        lock().push(buffers);
        Ok(result)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.threads.stop(self.objects);
        // SAFETY: no thread, object or mapping is left that refers to them.
        unsafe { discard(self.objects) };
    }
}

/// Ends an engine without threads.
///
/// # Safety
/// `Engine::start` made it, and nobody refers to it any more.
unsafe fn discard(objects: &'static Objects<Userfaultfd>) {
    inline::remove(objects);
    // SAFETY: made by `leak`; the caller's promise.
    drop(unsafe { std::boxed::Box::from_raw(core::ptr::from_ref(objects).cast_mut()) });
}

/// A control page of one's own: the account of a tree of one.
struct ControlPage(NonNull<Control>);

impl ControlPage {
    fn new(budget_pages: usize) -> Result<ControlPage, crate::sys::Errno> {
        let place = memory::reserve(CONTROL_BYTES, InitialProt::ReadWrite)?.cast::<Control>();
        // SAFETY: zeroed memory of its size; zero is valid for all of it.
        let control = unsafe { place.as_ref() };
        control.magic.store(MAGIC, Ordering::Relaxed);
        control.version.store(VERSION, Ordering::Relaxed);
        control.budget_pages.store(budget_pages as u64, Ordering::Relaxed);
        control.folio_order.store(-1, Ordering::Relaxed);
        control.take_slot(0, std::process::id());
        Ok(ControlPage(place))
    }
}

impl Drop for ControlPage {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`; the budget that refers to it has gone before.
        unsafe { memory::release(self.0.cast(), CONTROL_BYTES) };
    }
}

/// What an error of the engine is called.
fn describe(errno: crate::sys::Errno) -> String {
    std::io::Error::from_raw_os_error(errno.raw_os_error()).to_string()
}
