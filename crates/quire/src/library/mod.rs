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
//! The library makes the engine ([`crate::object`], which manages the memory) and its threads:
//! handlers, which serve faults; the background thread; and store workers, which call the
//! [`Store`](crate::store::Store) and block on it. Another thread does so only for a few pages, where
//! the store can be read in a signal handler
//! ([`try_read_in_place`](crate::store::Store::try_read_in_place)).
//!
//! - A fork's child has none of the mappings: an access is a SIGSEGV. It may make an address space of
//!   its own.
//! - Calls wait for stores without a limit, unless [`Patience::during`] sets one.
//! - Where the process may not serve faults that the kernel takes on its behalf
//!   ([`AddressSpace::serves_system_calls`]), a system call that is given a page that is not mapped
//!   fails with EFAULT: [`Mapping::populate`] the page before, or [`Mapping::pin`] it.

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
use std::sync::{Arc, Mutex};
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
use self::swap_file::SwapPlace;
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
use crate::store::workers::{cpus, lock};
use crate::swap::Swap;
use crate::sys::memory::{self, InitialProt};
use crate::sys::thread::SignalsBlocked;
use crate::units::{BLOCK_PAGES, PAGE_SHIFT, PageNum, PageRange};

/// Addresses for mappings: 1 TiB.
const ARENA_BYTES: usize = 1 << 40;
/// The least memory that an address space can work with.
const MEMORY_MIN: usize = 1 << 20;
/// More memory than there are addresses for it would be of no use.
const MEMORY_MAX: usize = ARENA_BYTES;

/// The engine under the library.
type Engine = Objects<Userfaultfd>;

/// What an address space has counted, by the names of /proc/vmstat where it has one.
pub type Counters = Vec<(&'static str, u64)>;
/// How long faults took, by kind: the `i`-th number counts those of `2^i` to `2^(i+1)` nanoseconds.
pub type FaultTimes = Vec<(&'static str, [u64; FAULT_BUCKETS])>;

struct RunningEngine {
    objects: &'static Engine,
    threads: Threads,
    serves_calls: bool,
    /// How long objects wait for their stores.
    store_deadline: Option<Duration>,
    /// Buffers for callers that read or flush.
    buffers: Mutex<Vec<(Scratch, IoBuffer)>>,
    _control: ControlPage,
    _files: [Option<std::fs::File>; 3],
}

/// An address space: a bound on memory, and the objects that are mapped under it. Clones are the
/// same address space; it ends with the last clone, object and mapping.
#[derive(Clone)]
pub struct AddressSpace {
    engine: Arc<RunningEngine>,
}

/// Makes an address space.
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

/// Which thread serves a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Delivery {
    /// A thread of the address space. Faults that the kernel takes inside of a system call are
    /// served as well, where the process has the right.
    #[default]
    Handlers,
    /// The thread that faults, in a signal handler: this is faster, and needs no other thread. Only
    /// faults taken in user mode are served: a system call that is given a page that is not mapped
    /// fails with EFAULT (populate the page before). The first such address space takes over the
    /// process's SIGBUS; signals that are not for the library go on to the handler that was there. A
    /// fault takes some 3 KiB of its thread's stack, beside what the kernel puts there for a signal; a
    /// fault on a private copy ([`MapOptions::map_copy`]) takes less, for it is served on another
    /// stack. A fork's child has none of this; it may make such address spaces of its own.
    Inline,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            memory: 256 << 20,
            handlers: cpus().min(4),
            workers: 4,
            delivery: Delivery::Handlers,
            swap: None,
            store_deadline: None,
            writer_deadline: None,
        }
    }
}

impl Builder {
    /// Bytes that may be held, in cached pages and their tables: 256 MiB by default, 1 MiB at least.
    #[must_use]
    pub fn memory(mut self, bytes: usize) -> Builder {
        self.memory = bytes;
        self
    }

    /// Threads that serve faults: by default one per CPU, four at most.
    #[must_use]
    pub fn handlers(mut self, threads: usize) -> Builder {
        self.handlers = threads.max(1);
        self
    }

    /// Threads that read and write stores, and so how many reads are in flight: four by default.
    #[must_use]
    pub fn workers(mut self, threads: usize) -> Builder {
        self.workers = threads.max(1);
        self
    }

    /// Which threads serve faults.
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Builder {
        self.delivery = delivery;
        self
    }

    /// Makes a swap file without a name in `folder`, of `bytes_max` at most. Pages of memory objects
    /// and private copies ([`MapOptions::map_copy`]) are compressed in memory, and go to the file
    /// where that would take too much memory, or where they cannot be compressed. Without a swap file
    /// these pages must fit into memory compressed: beyond that the process runs out of memory, and is
    /// ended.
    #[must_use]
    pub fn swap(mut self, folder: impl Into<std::path::PathBuf>, bytes_max: u64) -> Builder {
        self.swap = Some(SwapPlace { folder: folder.into(), bytes_max });
        self
    }

    /// Puts a [`DeadlineStore`](crate::store::DeadlineStore) around the store of every object: a call
    /// of a store is waited for no longer than this. The default is to wait for ever, as the kernel
    /// does: a slow store is not a bad one, and an access whose read has failed is a SIGBUS. After the
    /// deadline `read_at`, `populate` and flushes fail with
    /// [`Cause::Silent`](crate::store::Cause::Silent), and what was written stays dirty. An object,
    /// and the address space, can be closed while the store owes an answer.
    #[must_use]
    pub fn store_deadline(mut self, deadline: Duration) -> Builder {
        self.store_deadline = Some(deadline);
        self
    }

    /// How long a write to a mapping waits where no more pages may become dirty, and the store's last
    /// write failed, or was held back by the barrier. After that the write is a SIGBUS, which leaves
    /// the page as it was, and so is every access to that page in that mapping until the store has
    /// taken something. The default is 30 s. Dirty pages stay dirty, and writing them is tried again.
    #[must_use]
    pub fn writer_deadline(mut self, deadline: Duration) -> Builder {
        self.writer_deadline = Some(deadline);
        self
    }

    /// Makes the address space and starts its threads.
    ///
    /// # Errors
    /// [`Error::NoUserfaultfd`] without the right to one; [`Error::TooLittleMemory`],
    /// [`Error::TooMuchMemory`]; [`Error::NoSwapFile`]; [`Error::NoMemory`].
    pub fn build(self) -> Result<AddressSpace, Error> {
        if self.memory < MEMORY_MIN {
            return Err(Error::TooLittleMemory { bytes: self.memory, least: MEMORY_MIN });
        }
        if self.memory > MEMORY_MAX {
            return Err(Error::TooMuchMemory { bytes: self.memory, most: MEMORY_MAX });
        }
        Ok(AddressSpace { engine: Arc::new(RunningEngine::start(&self)?) })
    }
}

impl AddressSpace {
    /// The options of a new address space.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Opens a file, read-only; [`OpenOptions`] opens it in other ways.
    ///
    /// # Errors
    /// As for [`OpenOptions::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Object, Error> {
        OpenOptions::new().open(self, path)
    }

    /// Makes an object of `len` zeros without a file: see [`OpenOptions::memory`].
    ///
    /// # Errors
    /// As for [`OpenOptions::memory`].
    pub fn create_memory(&self, len: u64) -> Result<Object, Error> {
        OpenOptions::new().memory(self, len)
    }

    /// Whether faults inside of system calls are served; otherwise such a call fails with EFAULT.
    #[must_use]
    pub fn serves_system_calls(&self) -> bool {
        self.engine.serves_calls
    }

    /// Bytes that may be held.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.engine.objects.space.budget().limit_bytes()
    }

    /// Bytes held now, and the most held so far.
    #[must_use]
    pub fn held(&self) -> (usize, usize) {
        let control = self.engine.objects.space.budget().control();
        let bytes = |pages: u64| (pages as usize) << PAGE_SHIFT;
        (bytes(control.held()), bytes(control.held_pages_max.load(Ordering::Relaxed)))
    }

    /// Bytes that compressed pages take in memory, and segments of 256 KiB that are used of the swap
    /// file.
    #[must_use]
    pub fn swap_usage(&self) -> (usize, u32) {
        let swap = self.engine.objects.space.swap();
        let segments = swap.file().map_or(0, |file| file.segments_held());
        (swap.zpool.pages() << PAGE_SHIFT, segments)
    }

    /// Packed pages in memory, counted one by one.
    #[cfg(feature = "simulated")]
    #[must_use]
    pub fn packed_pages(&self) -> usize {
        self.engine.objects.space.swap().zpool.blobs()
    }

    /// Bytes that are pinned now, and that may be pinned at once.
    #[must_use]
    pub fn pinned(&self) -> (usize, usize) {
        let objects = self.engine.objects;
        (objects.pinned_pages() << PAGE_SHIFT, objects.pins_max() << PAGE_SHIFT)
    }

    /// The counters' values now.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let budget = self.engine.objects.space.budget();
        Event::ALL.iter().map(|&event| (event.name(), budget.counted(event))).collect()
    }

    /// How long faults took so far, from the moment that a fault was read (or its signal came) to
    /// its answer.
    #[must_use]
    pub fn fault_times(&self) -> FaultTimes {
        let member = self.engine.objects.space.budget().member();
        FaultKind::ALL.iter().map(|&kind| (kind.name(), member.fault_times(kind))).collect()
    }

    /// One of [`Self::counters`]; 0 for an unknown name.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        let found = self.counters().into_iter().find(|(known, _)| *known == name);
        found.map_or(0, |(_, value)| value)
    }

    /// Has every walk over an object's mappings exclude all others, or share again; for comparison.
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

    /// How often unlocks of pages woke a waiter, and how often they need not.
    #[must_use]
    pub fn wait_counts(&self) -> WaitCounts {
        self.objects().space.wait_counts()
    }

    /// The engine, for a call that may take its locks.
    fn objects(&self) -> Entered {
        Entered { objects: self.engine.objects, _signals: SignalsBlocked::of_others() }
    }
}

/// The engine while a thread of the program is in it, with the program's signals blocked: a signal
/// handler that touches a mapping would wait for locks that its own thread holds.
struct Entered {
    objects: &'static Engine,
    _signals: SignalsBlocked,
}

impl core::ops::Deref for Entered {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.objects
    }
}

impl core::fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (held, _) = self.held();
        f.debug_struct("AddressSpace").field("memory", &self.memory()).field("held", &held).finish()
    }
}

impl RunningEngine {
    fn start(builder: &Builder) -> Result<RunningEngine, Error> {
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
        // SAFETY: the page is kept beside the objects, and dropped after them.
        let budget = unsafe { Budget::new(control.0.as_ptr(), 0) };
        let swap_file = builder.swap.as_ref().map(SwapPlace::create).transpose()?;
        let swap_file = swap_file.map(|(file, segments)| {
            budget.control().segments_max.store(segments, Ordering::Relaxed);
            file
        });
        // SAFETY: the file is kept beside the objects, and closed after them.
        let swap = unsafe { Swap::new(swap_file.as_ref().map(AsRawFd::as_raw_fd), None, &budget) }
            .map_err(no_memory)?;
        let space = space::VmSpace::new(mmu, budget, swap, pages, frames).map_err(no_memory)?;
        let objects = Objects::new(space).map_err(no_memory)?;
        if let Some(deadline) = builder.writer_deadline {
            objects.set_writer_patience(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        }
        let objects: &'static Engine = std::boxed::Box::leak(std::boxed::Box::new(objects));
        let (handlers, is_added) = match builder.delivery {
            Delivery::Handlers => (builder.handlers, Ok(())),
            Delivery::Inline => (0, inline::add(objects)),
        };
        let started = is_added.and_then(|()| Threads::start(objects, handlers, builder.workers));
        // SAFETY: no thread runs, and no other reference was given away.
        let threads = started.inspect_err(|_| unsafe { discard(objects) })?;
        Ok(RunningEngine {
            objects,
            threads,
            serves_calls,
            store_deadline: builder.store_deadline,
            buffers: Mutex::new(Vec::new()),
            _control: control,
            _files: [device_file, mem_file, swap_file],
        })
    }

    /// Lends buffers to a caller, together with its patience.
    fn with_buffers<T>(
        &self,
        work: impl FnOnce(&mut Scratch, &mut IoBuffer) -> T,
    ) -> Result<T, Error> {
        let no_memory = |errno| Error::NoMemory { doing: "map a buffer", errno };
        let kept = lock(&self.buffers).pop();
        let (mut scratch, mut buffer) = match kept {
            Some(buffers) => buffers,
            None => (Scratch::new().map_err(no_memory)?, IoBuffer::new().map_err(no_memory)?),
        };
        let patience = Patience::current();
        if let Some(patience) = &patience {
            // SAFETY: it is taken out again below, before `patience` goes; where `work` panics the
            // buffer is dropped.
            buffer.set_kill(unsafe { patience.kill_for_a_call() });
        }
        let result = work(&mut scratch, &mut buffer);
        buffer.set_kill(Kill::NEVER);
        lock(&self.buffers).push((scratch, buffer));
        Ok(result)
    }
}

impl Drop for RunningEngine {
    fn drop(&mut self) {
        self.threads.stop(self.objects);
        // SAFETY: no thread, object or mapping is left that refers to them.
        unsafe { discard(self.objects) };
    }
}

/// Ends an engine without threads.
///
/// # Safety
/// `RunningEngine::start` made it, and no other reference to it is used any more.
unsafe fn discard(objects: &'static Engine) {
    inline::remove(objects);
    // SAFETY: made by `leak`; the rest is the caller's promise.
    drop(unsafe { std::boxed::Box::from_raw(core::ptr::from_ref(objects).cast_mut()) });
}

/// A control page of this address space alone: the account of a run of one member.
struct ControlPage(NonNull<Control>);

// SAFETY: the page has atomics only.
unsafe impl Send for ControlPage {}
// SAFETY: as above.
unsafe impl Sync for ControlPage {}

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
        // SAFETY: reserved by `new`; the budget that refers to it was dropped before.
        unsafe { memory::release(self.0.cast(), CONTROL_BYTES) };
    }
}
