//! Objects: what can be mapped that is not anonymous, each with a page cache of its own.
//!
//! An object's cached pages are in its *backing memfd*, at the object's own offsets; each page has a word
//! in the table of pages. Any number of mappings show the memfd; which of its pages a mapping has mapped is
//! known per 2 MiB of the arena, in a [`window`]. Where an object is mapped is in its interval tree
//! ([`i_mmap`]), which every walk over the mappings of a page shares ([`rmap`]).
//!
//! # Lifetime
//!
//! A fault uses an object only while it holds the lock of the window that it faults in, and has
//! seen its VMA unchanged under that lock; an unmap changes the VMA first and takes the windows'
//! locks afterwards. What was sent to the store workers is counted in the object. So when the last
//! mapping is gone and nothing is under way, no thread uses it.
//!
//! # What the kernel does
//!
//! It maps the memfd at each mapping, registered for missing, minor and write-protect faults. It may unmap
//! shared memory by itself, to swap it out: a fault on a page that its window has as mapped maps it again.
//!
//! A page that cannot be read is marked by UFFDIO_POISON in the mapping that asked, and
//! is a SIGBUS there; to map it (`populate`, or a neighbour's fault once it can be read) takes the mark away.
//!
//! # Locks
//!
//! Page locks are only tried where a window's lock is held.
//!
//! | operation | locks held | it may block |
//! |---|---|---|
//! | `map_pages` | the window's; page locks tried | no |
//! | `fault`, in a handler | the window's; the page's, tried | no: it parks the fault, or sends a request |
//! | `fill_at_once`, in a handler, of a memory object | the window's; page locks tried | no |
//! | `fill_locked`, in a worker | page locks of what is read | in the store |
//! | `read_in_place`, in the thread that serves itself | page locks of what is read; then as `answer_asker` | for the device |
//! | `pin`, `unpin` | one page's at a time, then the window's | in the store, for memory, for a cut |
//! | a private fault, `populate_private`, `pin_private` | one page's in the arena; then those of the object, tried | a fault no, the others as `populate` |
//! | `memory_failure`, `unpoison` | one page's; `i_mmap` (shared), windows' | for those |
//! | `protect` | the space's | for it |
//! | `remap` | the space's; `i_mmap` (exclusive); windows', one at a time | for those |
//! | `answer_asker`, in a worker | the window's; page locks tried | no |
//! | `read_at`, `populate` | one page's at a time, slept for; then as `fill_locked` | in the store, for memory |
//! | `refuse_writer`, `look_after_writers` | the window's; the list's | for that |
//! | reclaim, `scan` | the registry's, for one block at a time; page locks and `i_mmap` (shared), tried; windows' | for windows' locks |
//! | write-back, `write_back_locked` | page locks and `i_mmap` (shared) while pages are protected and copied; none while the store writes | in the store |
//! | `flush` | the same; sleeps for the first page lock of a run and for WRITEBACK | in the store |
//! | `set_len` | the object's `resize`; one page's at a time, none while the store works; `i_mmap` (shared), windows' | for reads and writes under way, in the store |
//! | `migrate` | page locks of a run, tried; `i_mmap` (shared), windows' | for memory |
//! | `map_private` and `unmap` of such, `follow_change` | the space's; one page's in the arena at a time | for those |
//! | `map`, `unmap` | the space's; windows', one at a time; `i_mmap` (exclusive) | for those |
//!
//! - The object's `resize` is outside of the space's lock, which a change of length takes under `resize` alone.
//! - The registry of objects, which keeps them from going, is outside of page locks; opening and closing
//!   an object hold it as well.

mod access;
#[cfg(feature = "simulated")]
mod check;
mod fault;
mod fault_around;
pub mod i_mmap;
mod map;
mod mappings;
mod memory_failure;
mod migrate;
mod numbers;
mod pages;
mod pin;
mod pin_private;
mod private;
mod private_access;
mod private_map;
mod protect;
mod read_in_place;
mod readahead;
mod reclaim;
mod registry;
mod remap;
mod requests;
mod rmap;
mod shmem;
mod stall;
mod strides;
mod swapin;
mod swapout;
mod sync;
mod truncate;
mod window;
mod writeback;

use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

pub use self::access::ReadError;
use self::i_mmap::{IMmap, IMmaps};
pub use self::map::MapRequest;
use self::mappings::Mappings;
pub use self::migrate::Migrated;
use self::pin::Pins;
pub use self::pin::{PinError, PinFor};
pub use self::registry::Keeper;
pub use self::requests::IoBuffer;
use self::requests::Requests;
use self::window::Windows;
pub use self::writeback::FlushError;
use crate::fault::fault_list::FaultList;
use crate::fault::order::Streams;
use crate::mmu::object::{Memfd, ObjectMmu};
use crate::space::VmSpace;
use crate::sys::Errno;
use crate::sys::memory::Table;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::{BLOCK_ORDER, ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE};

const OBJECTS_MAX: usize = 4096;
/// Longest object: 16 TiB.
const OBJECT_PAGES_MAX: usize = (16 << 40) >> PAGE_SHIFT;

/// Where an object's bytes rest, as the engine needs it. Called by store workers and by threads
/// of the program; by handlers only where it says [`Self::reads_in_place`].
pub trait BackingStore: Sync {
    /// Fills `into`, whole pages at a page's offset; what lies behind the end reads as zeros. After
    /// an error nothing in `into` counts.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Errno>;

    /// Whether [`Self::try_read_in_place`] is worth a call.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// Fills `into` as [`Self::read`] does, in a signal handler: it may wait for the device, but
    /// takes no lock and allocates nothing. `false` where it has not, for whatever reason; then
    /// another thread calls [`Self::read`], and nothing in `into` counts.
    fn try_read_in_place(&self, _offset: u64, _into: &mut [u8]) -> bool {
        false
    }

    /// Writes all of `from`. After an error a part may be written.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno>;

    /// Changes the length. After an error nothing has changed.
    fn set_len(&self, bytes: u64) -> Result<(), Errno>;

    /// Makes what was written durable.
    fn sync(&self) -> Result<(), Errno>;

    /// The object is gone; the store is not used any more.
    fn release(&self) {}

    /// Whether the pages may be written back now. A write-ahead log that is not on disk yet says
    /// no; the pages stay dirty, and are asked about again.
    fn may_write(&self, _offset: u64, _bytes: usize) -> bool {
        true
    }
}

pub struct VmObject {
    /// By 512 pages: the block of the table of pages that has their words, plus one; 0 is none yet.
    blocks: Table<AtomicU32>,
    /// Longest that it can become, in pages.
    pages_max: usize,
    memfd: Memfd,
    store: &'static dyn BackingStore,
    /// Whether its pages are in swap where they are not cached, and not in the store.
    is_memory: bool,
    id: ObjectId,
    pub(crate) i_mmap: IMmap,
    /// Bytes. Shrinks before pages go, grows after the memfd has.
    length: AtomicU64,
    /// Mappings, handles, and what is under way for it.
    users: AtomicUsize,
    cached: AtomicUsize,
    dirty: AtomicUsize,
    /// Pages under way to the store; the futex of the threads that wait for them.
    writeback: AtomicU32,
    privates: AtomicUsize,
    /// Held by a change of the length.
    resize: Mutex<rank::Resize, ()>,
    /// While the store is being asked to become shorter: the first page that it may lose. From here
    /// on nothing is written back. `u64::MAX` else.
    cut: AtomicU64,
    /// Counts beginnings and ends of such a time: odd during one. The futex of flushes, which wait
    /// for its end.
    cuts: AtomicU32,
    streams: Streams,
    strides: strides::Strides,
    /// The first error of a write since a flusher was last told, as an errno; 0 is none.
    write_error: AtomicI32,
    write_error_page: AtomicU64,
    /// Counts write errors: every flusher is told each once.
    write_errors: AtomicU32,
    stall: stall::Stall,
    synced: sync::Synced,
    /// How often each page is pinned; see [`pin`].
    pins: Table<AtomicU32>,
    pinned: AtomicUsize,
    pinned_writable: AtomicUsize,
    read_error: AtomicI32,
    read_error_page: AtomicU64,
}

impl VmObject {
    /// Bytes.
    pub fn len(&self) -> u64 {
        // Acquire pairs with the release of a change: a thread that sees a longer object sees a
        // longer memfd.
        self.length.load(Ordering::Acquire)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages, the last of which may be partial.
    pub fn pages(&self) -> usize {
        self.len().div_ceil(PAGE_SIZE as u64) as usize
    }

    pub fn cached_pages(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// Pages that were written and are not yet on their way to the store.
    pub fn dirty_pages(&self) -> usize {
        self.dirty.load(Ordering::Relaxed)
    }

    fn range(&self) -> ObjectRange {
        ObjectRange::new(ObjectPage(0), self.pages())
    }
}

/// How much is mapped around a read fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FaultAround {
    /// What the faults of the mapping suggest.
    #[default]
    Auto,
    /// Exactly the page.
    Off,
    /// The aligned block of 2^order pages, 9 at most.
    Order(u32),
}

/// An address space that can map objects, and the objects.
pub struct Objects<M: ObjectMmu> {
    pub space: VmSpace<M>,
    pub i_mmaps: IMmaps,
    /// By number; null is a free place.
    slots: Table<AtomicPtr<VmObject>>,
    /// One past the highest slot that was ever used.
    slots_used: AtomicUsize,
    /// Serialises opening and closing against reclaim's and write-back's round.
    registry: Mutex<rank::Registry, Hands>,
    windows: Windows,
    mappings: Mappings,
    pins: Pins,
    requests: Requests,
    buffers: read_in_place::InPlaceBuffers,
    /// Faults that wait until less is dirty.
    unclean: FaultList,
    stalls: stall::Stalls,
    /// Dirty, or under way to a store: what writers are stopped by.
    dirty: AtomicUsize,
    /// The background thread was called because too much is dirty, and has not seen yet that it is not.
    is_excess_told: AtomicBool,
    cached: AtomicUsize,
}

/// Where the rounds over all objects are.
#[derive(Default)]
struct Hands {
    reclaim: Hand,
    write_back: Hand,
}

/// The next block to be looked at: its object's slot, and its number in the object.
#[derive(Default)]
struct Hand {
    slot: usize,
    block: usize,
}

/// The number of an object in its space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectId(pub u32);

impl<M: ObjectMmu> Objects<M> {
    pub fn new(mut space: VmSpace<M>) -> Result<Objects<M>, Errno> {
        space.reserve_beyond(OBJECT_PAGES_MAX)?;
        let arena_pages = space.arena().len();
        Ok(Objects {
            space,
            i_mmaps: IMmaps::new()?,
            slots: Table::new(OBJECTS_MAX)?,
            slots_used: AtomicUsize::new(0),
            registry: Mutex::new(Hands::default()),
            windows: Windows::new(arena_pages >> BLOCK_ORDER)?,
            mappings: Mappings::new()?,
            pins: Pins::new(arena_pages)?,
            requests: Requests::new(),
            buffers: read_in_place::InPlaceBuffers::new()?,
            unclean: FaultList::new(),
            stalls: stall::Stalls::new(),
            dirty: AtomicUsize::new(0),
            is_excess_told: AtomicBool::new(false),
            cached: AtomicUsize::new(0),
        })
    }

    pub fn cached_pages(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// Pages of all objects that are dirty, or under way to their stores.
    pub fn dirty_pages(&self) -> usize {
        self.dirty.load(Ordering::Relaxed)
    }
}
