//! The control page: what the supervisor and every managed process of a tree share.
//!
//! A memfd, made by the supervisor (`quire run`), mapped shared by every member. It holds the
//! settings, the tree's budget account, a slot per member with its counters, and the swap file's
//! segment map. Every update is a single atomic word, so a member that dies in the middle leaves
//! nothing half done; what a dead member held is given back by the supervisor, which sees the
//! member's connection close.
//!
//! # Joining
//!
//! A process joins by connecting to the supervisor's abstract `SOCK_SEQPACKET` socket, whose name
//! is in the environment variable [`SOCKET_VARIABLE`]. It sends a [`Hello`] and receives a
//! [`Welcome`] with descriptors attached (`SCM_RIGHTS`), in this order: the control memfd, then
//! `/dev/userfaultfd` if [`WELCOME_UFFD_DEVICE`] is set, then the swap file if
//! [`WELCOME_SWAP_FILE`] is set. It keeps the connection open in its handlers' private
//! descriptor table: exec, exit and SIGKILL all close it.

mod tally;

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

pub use self::tally::Tally;

/// Environment variable with the name of the supervisor's abstract socket (without the NUL).
pub const SOCKET_VARIABLE: &str = "QUIRE_SOCKET";

/// First word of the control page, of `Hello` and of `Welcome`.
pub const MAGIC: u32 = 0x5155_4952;
/// Changed with every change of a structure in this module.
pub const VERSION: u32 = 6;

/// Most processes of one tree that can be managed at a time.
pub const MEMBERS_MAX: usize = 256;

/// Bytes in a segment of the swap file: what one write carries.
pub const SEGMENT_BYTES: usize = 256 * 1024;
/// Most segments of a swap file (256 KiB each: 256 GiB).
pub const SEGMENTS_MAX: usize = 1 << 20;
/// Words of a member's segment bitmap.
pub const SEGMENT_WORDS: usize = SEGMENTS_MAX / 64;

/// What is counted, by /proc/vmstat's names where it has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Event {
    /// Faults served.
    Pgfault,
    /// Faults that had to read the swap file.
    Pgmajfault,
    /// Pages read from the compressed pool, by a same-fill, or from the swap file.
    Pswpin,
    /// Pages that went to swap.
    Pswpout,
    /// Pages that came back from the compressed pool.
    Zswpin,
    /// Pages that went to the compressed pool.
    Zswpout,
    /// Pages written from the compressed pool to the swap file.
    Zswpwb,
    /// Same-filled pages that came back.
    SwpinZero,
    /// Same-filled pages that went out without data.
    SwpoutZero,
    /// Faults that found their page in the pool with its content ("limbo").
    PgactivateLimbo,
    /// Pages looked at by the background thread.
    PgscanKswapd,
    /// Pages looked at by faults that had to reclaim.
    PgscanDirect,
    /// Pages taken by the background thread.
    PgstealKswapd,
    /// Pages taken by faults that had to reclaim.
    PgstealDirect,
    /// Faults that had to reclaim.
    Allocstall,
    /// Pages that came back soon after they had gone.
    WorkingsetRefaultAnon,
    /// Calls that unmapped pages for reclaim.
    UnmapCalls,
    /// Pages unmapped by them.
    UnmapPages,
    /// Pages that a call refused to unmap (pinned by the kernel, or shared).
    UnmapRefused,
    /// Pages dropped because they were free to be (MADV_FREE).
    Pglazyfreed,
    /// Pages mapped by moving a frame.
    MapMove,
    /// Pages mapped by copying.
    MapCopy,
    /// Clean pages evicted without compressing again.
    PswpoutClean,
    /// Bytes written to the compressed pool.
    ZswpoutBytes,
    /// Faults parked until a lock, a frame or a read was ready.
    FaultParked,
    /// Pages poisoned because their content was lost.
    Pgpoison,
    /// Faults served under the space's lock.
    FaultClassic,
    /// Forks served.
    Fork,
    /// Nanoseconds that the calls which unmap took.
    UnmapNs,
    /// Nanoseconds that packing what was unmapped took.
    CompressNs,
    /// Pages of objects mapped from their cache.
    MapCached,
    /// Pages of objects read from their stores.
    Pgpgin,
    /// Pages of objects written to their stores.
    Pgpgout,
    /// Pages of objects read over what recycled memory held.
    Pgreuse,
    /// Pages of objects that live elsewhere now.
    PgmigrateSuccess,
    /// Pages of objects that should have gone to live elsewhere, and could not.
    PgmigrateFail,
    /// Faults served without the space's lock.
    SpeculativePgfault,
    /// Faults tried again, because their VMA changed.
    SpfVmaChanged,
    /// Faults tried again, because their VMA has no private copies yet.
    SpfVmaNoanon,
    /// Faults tried again, because their VMA is of a kind that needs the lock.
    SpfVmaNotsup,
    /// Faults tried again, because their VMA forbids the access.
    SpfVmaAccess,
    /// Faults tried again, because their block changed.
    SpfPmdChanged,
    /// Layout changes that are not managed.
    LayoutUnmanaged,
}

impl Event {
    /// Every event, in the order of its counter.
    pub const ALL: [Event; 43] = [
        Event::Pgfault,
        Event::Pgmajfault,
        Event::Pswpin,
        Event::Pswpout,
        Event::Zswpin,
        Event::Zswpout,
        Event::Zswpwb,
        Event::SwpinZero,
        Event::SwpoutZero,
        Event::PgactivateLimbo,
        Event::PgscanKswapd,
        Event::PgscanDirect,
        Event::PgstealKswapd,
        Event::PgstealDirect,
        Event::Allocstall,
        Event::WorkingsetRefaultAnon,
        Event::UnmapCalls,
        Event::UnmapPages,
        Event::UnmapRefused,
        Event::Pglazyfreed,
        Event::MapMove,
        Event::MapCopy,
        Event::PswpoutClean,
        Event::ZswpoutBytes,
        Event::FaultParked,
        Event::Pgpoison,
        Event::FaultClassic,
        Event::Fork,
        Event::UnmapNs,
        Event::CompressNs,
        Event::MapCached,
        Event::Pgpgin,
        Event::Pgpgout,
        Event::Pgreuse,
        Event::PgmigrateSuccess,
        Event::PgmigrateFail,
        Event::SpeculativePgfault,
        Event::SpfVmaChanged,
        Event::SpfVmaNoanon,
        Event::SpfVmaNotsup,
        Event::SpfVmaAccess,
        Event::SpfPmdChanged,
        Event::LayoutUnmanaged,
    ];

    /// The counter's name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Event::Pgfault => "pgfault",
            Event::Pgmajfault => "pgmajfault",
            Event::Pswpin => "pswpin",
            Event::Pswpout => "pswpout",
            Event::Zswpin => "zswpin",
            Event::Zswpout => "zswpout",
            Event::Zswpwb => "zswpwb",
            Event::SwpinZero => "swpin_zero",
            Event::SwpoutZero => "swpout_zero",
            Event::PgactivateLimbo => "pgactivate_limbo",
            Event::PgscanKswapd => "pgscan_kswapd",
            Event::PgscanDirect => "pgscan_direct",
            Event::PgstealKswapd => "pgsteal_kswapd",
            Event::PgstealDirect => "pgsteal_direct",
            Event::Allocstall => "allocstall",
            Event::WorkingsetRefaultAnon => "workingset_refault_anon",
            Event::UnmapCalls => "unmap_calls",
            Event::UnmapPages => "unmap_pages",
            Event::UnmapRefused => "unmap_refused",
            Event::Pglazyfreed => "pglazyfreed",
            Event::MapMove => "map_move",
            Event::MapCopy => "map_copy",
            Event::PswpoutClean => "pswpout_clean",
            Event::ZswpoutBytes => "zswpout_bytes",
            Event::FaultParked => "fault_parked",
            Event::Pgpoison => "pgpoison",
            Event::FaultClassic => "fault_classic",
            Event::Fork => "fork",
            Event::UnmapNs => "unmap_ns",
            Event::CompressNs => "compress_ns",
            Event::MapCached => "map_cached",
            Event::Pgpgin => "pgpgin",
            Event::Pgpgout => "pgpgout",
            Event::Pgreuse => "pgreuse",
            Event::PgmigrateSuccess => "pgmigrate_success",
            Event::PgmigrateFail => "pgmigrate_fail",
            Event::SpeculativePgfault => "speculative_pgfault",
            Event::SpfVmaChanged => "spf_vma_changed",
            Event::SpfVmaNoanon => "spf_vma_noanon",
            Event::SpfVmaNotsup => "spf_vma_notsup",
            Event::SpfVmaAccess => "spf_vma_access",
            Event::SpfPmdChanged => "spf_pmd_changed",
            Event::LayoutUnmanaged => "layout_unmanaged",
        }
    }

    /// The event of this name, or of an alias that perf knows it by.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Event> {
        match name {
            "faults" | "page-faults" => Some(Event::Pgfault),
            "major-faults" => Some(Event::Pgmajfault),
            "spf" | "speculative-faults" => Some(Event::SpeculativePgfault),
            _ => {
                let name = name.strip_prefix("pagefault:spf").map_or(name, |_| &name[10..]);
                Event::ALL.into_iter().find(|event| event.name() == name)
            }
        }
    }
}

/// Why a member could not go on; the supervisor turns it into one line on stderr.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Obituary {
    /// Nothing to report.
    None = 0,
    /// Budget and swap were both spent; `detail` is 1 where the swap file is full, or there is
    /// none.
    OutOfMemory = 1,
    /// A fork's child could not join the tree, so it must not run.
    ChildNotManaged = 2,
    /// The kernel refused a call that cannot be refused; `detail` has the errno.
    KernelRefused = 3,
    /// A page could not be read from the swap file; `detail` is its place there, in units of 64
    /// bytes. The process may well live on: only that page is lost.
    SwapReadFailed = 4,
}

/// A member's account. The member writes it; the supervisor reads it, and clears it when the
/// member's connection closes.
#[repr(C, align(64))]
pub struct Member {
    /// Process id, or 0 where the slot is free.
    pub pid: AtomicU32,
    /// An [`Obituary`].
    pub obituary: AtomicU32,
    /// A number that goes with the obituary (an errno, an address).
    pub obituary_detail: AtomicU64,
    /// Set by the child of a fork once the supervisor knows it; the futex its parent waits on.
    pub fork_joined: AtomicU32,
    /// Keeps the counters below aligned.
    pub reserved: AtomicU32,
    /// Pages charged: mapped, in limbo, free frames, compressed pool, tables.
    pub held_pages: AtomicU64,
    /// Pages that hold the program's data, wherever it rests.
    pub wanted_pages: AtomicU64,
    /// Most of it at any time.
    pub wanted_pages_max: AtomicU64,
    /// Address space that is managed.
    pub managed_pages: AtomicU64,
    /// Most of it at any time.
    pub managed_pages_max: AtomicU64,
    /// Pages of the compressed pool.
    pub pool_pages: AtomicU64,
    /// Pages in the swap file.
    pub file_pages: AtomicU64,
    /// One counter for every [`Event`].
    pub events: [AtomicU64; Event::ALL.len()],
    /// A histogram for every [`FaultKind`].
    pub times: [[AtomicU64; FAULT_BUCKETS]; FaultKind::ALL.len()],
}

impl Member {
    /// How often `event` was counted.
    #[must_use]
    pub fn counted(&self, event: Event) -> u64 {
        // Relaxed: a statistic.
        self.events[event as usize].load(Ordering::Relaxed)
    }

    /// How many faults took [2^i, 2^(i+1)) ns.
    #[must_use]
    pub fn fault_times(&self, kind: FaultKind) -> [u64; FAULT_BUCKETS] {
        // Relaxed: a statistic.
        core::array::from_fn(|i| self.times[kind as usize][i].load(Ordering::Relaxed))
    }
}

/// Buckets of a histogram of service times.
pub const FAULT_BUCKETS: usize = 32;

/// What a fault found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum FaultKind {
    /// No content.
    Fresh,
    /// A page in limbo.
    Limbo,
    /// A page in the compressed pool.
    Memory,
    /// A page in the swap file.
    File,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [FaultKind; 4] =
        [FaultKind::Fresh, FaultKind::Limbo, FaultKind::Memory, FaultKind::File];

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::Fresh => "fresh",
            FaultKind::Limbo => "limbo",
            FaultKind::Memory => "memory",
            FaultKind::File => "file",
        }
    }
}

/// What is traced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Tracepoint {
    /// [`Event::SpfVmaChanged`].
    SpfVmaChanged,
    /// [`Event::SpfVmaNoanon`].
    SpfVmaNoanon,
    /// [`Event::SpfVmaNotsup`].
    SpfVmaNotsup,
    /// [`Event::SpfVmaAccess`].
    SpfVmaAccess,
    /// [`Event::SpfPmdChanged`].
    SpfPmdChanged,
}

impl Tracepoint {
    /// Every tracepoint.
    pub const ALL: [Tracepoint; 5] = [
        Tracepoint::SpfVmaChanged,
        Tracepoint::SpfVmaNoanon,
        Tracepoint::SpfVmaNotsup,
        Tracepoint::SpfVmaAccess,
        Tracepoint::SpfPmdChanged,
    ];

    /// Its name, as perf lists tracepoints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Tracepoint::SpfVmaChanged => "pagefault:spf_vma_changed",
            Tracepoint::SpfVmaNoanon => "pagefault:spf_vma_noanon",
            Tracepoint::SpfVmaNotsup => "pagefault:spf_vma_notsup",
            Tracepoint::SpfVmaAccess => "pagefault:spf_vma_access",
            Tracepoint::SpfPmdChanged => "pagefault:spf_pmd_changed",
        }
    }
}

/// A record of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trace {
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// What happened.
    pub tracepoint: Tracepoint,
    /// Who faulted, 0 where unknown.
    pub thread: u32,
    /// Where.
    pub address: u64,
    /// The VMA.
    pub vma_start: u64,
    /// Its end.
    pub vma_end: u64,
}

/// The last records of a member. This one has a single writer.
#[repr(C)]
pub struct TraceRing {
    head: AtomicU64,
    records: [[AtomicU64; 8]; 1024],
}

impl TraceRing {
    /// Records ever written.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Appends a record.
    pub fn push(&self, trace: &Trace) {
        let position = self.head.load(Ordering::Relaxed);
        let words = [
            trace.time_ns,
            u64::from(trace.tracepoint as u32) << 32 | u64::from(trace.thread),
            trace.address,
            trace.vma_start,
            trace.vma_end,
            position + 1,
        ];
        for (to, word) in self.records[position as usize % 1024].iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.head.store(position + 1, Ordering::Release);
    }

    /// The record at a position, unless it is gone, or not there yet.
    #[must_use]
    pub fn read(&self, position: u64) -> Option<Trace> {
        let words = self.records[position as usize % 1024]
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        (words[5] == position + 1).then(|| Trace {
            time_ns: words[0],
            tracepoint: Tracepoint::ALL[(words[1] >> 32) as usize],
            thread: words[1] as u32,
            address: words[2],
            vma_start: words[3],
            vma_end: words[4],
        })
    }
}

/// The head of the control memfd, followed in memory by the segment map.
#[repr(C, align(4096))]
pub struct Control {
    /// [`MAGIC`].
    pub magic: AtomicU32,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The supervisor's process id.
    pub supervisor_pid: AtomicU32,
    /// 1 where batched unmapping is off (`--no-batch-unmap`).
    pub no_batch_unmap: AtomicU32,
    /// `--folio-order`: -1 for auto, else 0 to 9.
    pub folio_order: AtomicI32,
    /// 1 where faults always go the classic way.
    pub no_speculation: AtomicU32,
    /// The futex that the members' background threads sleep on: counts calls for memory.
    pub pressure: AtomicU32,
    /// The budget.
    pub budget_pages: AtomicU64,
    /// Most segments that the swap file may have (`--swap-max`), 0 without a swap file.
    pub segments_max: AtomicU32,
    /// Segments in use.
    pub segments_used: AtomicU32,
    /// All that the members hold together.
    pub held_pages: AtomicU64,
    /// Most of it at any time.
    pub held_pages_max: AtomicU64,
    /// All data of all members together.
    pub wanted_pages: AtomicU64,
    /// Most of it at any time.
    pub wanted_pages_max: AtomicU64,
    /// A member with faults that find no memory, or a fork (slot + 1 in the low half), and the
    /// pages that it cannot do without (in the high half); 0 where there is none. Members that
    /// hold more than their share charge nothing new meanwhile, and free that much.
    pub hungry: AtomicU64,
    /// What members did that have left.
    pub tally: Tally,
    /// The members.
    pub members: [Member; MEMBERS_MAX],
    /// Members that hold live data in each segment; 0 is a free segment.
    pub segment_refs: [AtomicU32; SEGMENTS_MAX],
    /// Per member: the segments in which it holds live data, a bit each.
    pub segment_maps: [[AtomicU64; SEGMENT_WORDS]; MEMBERS_MAX],
    /// Per member: what it traced last.
    pub traces: [TraceRing; MEMBERS_MAX],
}

/// Bytes of the control memfd (sparse).
pub const CONTROL_BYTES: usize = size_of::<Control>();

/// A process asks to join.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Process id.
    pub pid: u32,
    /// The slot of the process that forked this one, or `u32::MAX` after an exec.
    pub parent_slot: u32,
    /// Pages that the parent had charged for this child: they move to the child's slot.
    pub held_pages: u64,
    /// Pages of data that the child inherits.
    pub wanted_pages: u64,
}

/// `Welcome::flags`: `/dev/userfaultfd` is attached.
pub const WELCOME_UFFD_DEVICE: u32 = 1;
/// `Welcome::flags`: the swap file is attached.
pub const WELCOME_SWAP_FILE: u32 = 2;
/// `Welcome::flags`: no slot is free (or the version differs); the process runs unmanaged.
pub const WELCOME_REFUSED: u32 = 4;

/// The supervisor's answer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u32,
    /// `WELCOME_*`.
    pub flags: u32,
    /// The member's slot.
    pub slot: u32,
    /// Zero.
    pub reserved: u32,
}
