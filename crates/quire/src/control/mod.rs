//! The control page: what the supervisor and every managed process of a tree share.
//!
//! A memfd, made by the supervisor (`quire run`), mapped shared by every member. It holds the
//! settings, the tree's budget account, a slot per member with its counters, the swap file's segment
//! map, and a ring of traces per member. Most of it is holes: a page of the memfd costs memory from
//! the first look on, so who goes over the members goes over [`Control::present`]. Every update is a single atomic word, so a member that dies in the middle leaves
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

pub mod event;
pub mod fork;
pub mod histogram;
pub mod shard;
mod tally;
pub mod trace;

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

pub use self::event::Event;
pub use self::fork::{Child, ForkWord};
pub use self::histogram::{FAULT_BUCKETS, FaultKind};
use self::shard::ShardsUsed;
pub use self::shard::{SHARDS, Shard};
pub use self::tally::Tally;
pub use self::trace::{TRACES, Trace, TraceRing, Tracepoint};

/// Environment variable with the name of the supervisor's abstract socket (without the NUL).
pub const SOCKET_VARIABLE: &str = "QUIRE_SOCKET";

/// First word of the control page, of `Hello` and of `Welcome`.
pub const MAGIC: u32 = 0x5155_4952;
/// Changed with every change of a structure in this module.
pub const VERSION: u32 = 8;

/// Most processes of one tree that can be managed at a time.
pub const MEMBERS_MAX: usize = 256;

/// Bytes in a segment of the swap file: what one write carries.
pub const SEGMENT_BYTES: usize = 256 * 1024;
/// Most segments of a swap file (256 KiB each: 256 GiB).
pub const SEGMENTS_MAX: usize = 1 << 20;
/// Words of a member's segment bitmap.
pub const SEGMENT_WORDS: usize = SEGMENTS_MAX / 64;

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
    /// Whose is what was charged for the child of a fork.
    pub fork: ForkWord,
    /// Keeps the words below aligned.
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
    /// Which of the shards below were ever written.
    pub shards_used: ShardsUsed,
    /// The member's counters and histograms, in parts that are summed up: see [`shard`].
    pub shards: [Shard; SHARDS],
}

impl Member {
    /// What was counted of `event`.
    #[must_use]
    pub fn counted(&self, event: Event) -> u64 {
        // Relaxed: each shard's count is true by itself, the sum is of about one moment.
        let of = |shard: &Shard| shard.events[event as usize].load(Ordering::Relaxed);
        self.used_shards().map(of).sum()
    }

    /// How many faults of a kind took how long: bucket `i` has those of `2^i` to `2^(i+1)`
    /// nanoseconds, the first those below as well, the last those above.
    #[must_use]
    pub fn fault_times(&self, kind: FaultKind) -> [u64; FAULT_BUCKETS] {
        let mut sum = [0; FAULT_BUCKETS];
        for shard in self.used_shards() {
            for (sum, bucket) in sum.iter_mut().zip(&shard.fault_times[kind as usize]) {
                // Relaxed: as above.
                *sum += bucket.load(Ordering::Relaxed);
            }
        }
        sum
    }

    /// Forgets all that the slot's last member left in it. Nobody writes to it meanwhile.
    pub fn clear(&self) {
        // Relaxed, all of them: what orders one member's end before the next one's beginning is
        // the socket by which they leave and join.
        self.pid.store(0, Ordering::Relaxed);
        self.obituary.store(Obituary::None as u32, Ordering::Relaxed);
        self.fork.clear();
        for word in [
            &self.obituary_detail,
            &self.held_pages,
            &self.wanted_pages,
            &self.wanted_pages_max,
            &self.managed_pages,
            &self.managed_pages_max,
            &self.pool_pages,
            &self.file_pages,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.clear_shards();
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
    /// 1 where faults always go the classic way.
    pub no_speculation: AtomicU32,
    /// `--folio-order`: -1 for auto, else 0 to 9.
    pub folio_order: AtomicI32,
    /// `--handlers`: threads of a member that serve faults, 0 for auto. Read when it joins.
    pub handlers: AtomicU32,
    /// 1 where they run on any CPU (`--no-pinned-handlers`).
    pub no_pinned_handlers: AtomicU32,
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
    /// Which slots are taken, a bit each: whoever gives a slot away says so here.
    pub taken: [AtomicU64; MEMBERS_MAX / 64],
    /// The members.
    pub members: [Member; MEMBERS_MAX],
    /// Members that hold live data in each segment; 0 is a free segment.
    pub segment_refs: [AtomicU32; SEGMENTS_MAX],
    /// Per member: the segments in which it holds live data, a bit each.
    pub segment_maps: [[AtomicU64; SEGMENT_WORDS]; MEMBERS_MAX],
    /// Per member: what happened on the way of its faults, latest last.
    pub traces: [TraceRing; MEMBERS_MAX],
}

impl Control {
    /// The members that there are, with their slots. Others are not looked at.
    pub fn present(&self) -> impl Iterator<Item = (usize, &Member)> {
        // Relaxed: who came or went just now is in the sum or is not.
        let words = self.taken.iter().map(|word| word.load(Ordering::Relaxed));
        let slots = words.enumerate().flat_map(|(at, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| at * 64 + bit)
        });
        slots.map(|slot| (slot, &self.members[slot]))
    }

    /// Gives a free slot to a process, with nothing in it of whoever had it before.
    pub fn take_slot(&self, slot: usize, pid: u32) {
        self.members[slot].clear();
        self.traces[slot].clear();
        self.members[slot].pid.store(pid, Ordering::Relaxed);
        // Relaxed, here and below: who looks for members wants numbers, each true by itself.
        self.taken[slot / 64].fetch_or(1 << (slot % 64), Ordering::Relaxed);
    }

    /// Takes a slot back. What its member traced last can still be read, until it is another's.
    pub fn free_slot(&self, slot: usize) {
        self.taken[slot / 64].fetch_and(!(1 << (slot % 64)), Ordering::Relaxed);
        self.members[slot].clear();
    }
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
    /// The number of the fork that made this process, where one did ([`ForkWord`]).
    pub fork: u32,
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
