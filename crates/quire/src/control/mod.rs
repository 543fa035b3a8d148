//! The control page: what the supervisor and every managed process of a tree share.
//!
//! A memfd, made by the supervisor (`quire run`), mapped shared by every member. It holds the
//! settings, a slot per member with its account and its counters, the swap file's segment
//! map, and a ring of traces per member. Most of it is holes: a page of the memfd costs memory from
//! the first look on, so a walk over the members goes over [`Control::present`].
//!
//! # Joining
//!
//! A process joins by connecting to the supervisor's abstract `SOCK_SEQPACKET` socket, whose name
//! is in the environment variable [`SOCKET_VARIABLE`]. It sends a [`Hello`] and receives a
//! [`Welcome`] with descriptors attached (`SCM_RIGHTS`), in this order: the control memfd, then the
//! pool memfd ([`slabs`]) if [`WELCOME_POOL`] is set (a fork's child has it mapped), then
//! `/dev/userfaultfd` if [`WELCOME_UFFD_DEVICE`] is set, then the swap file if
//! [`WELCOME_SWAP_FILE`] is set. The command `quire` tells the rest (`supervisor/joining.rs`).

#![deny(unsafe_code)]

pub mod account;
pub mod along;
mod event;
mod far;
mod fork;
mod gains;
mod histogram;
pub mod place;
pub mod sampling;
mod seat;
pub mod shard;
#[allow(unsafe_code, reason = "the table lies in memory that others map as well")]
pub mod slabs;
mod tally;
pub mod trace;
pub mod watermarks;
mod word;

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

pub use self::account::Account;
pub use self::event::Event;
pub use self::far::Far;
pub use self::fork::{Child, ForkWord};
pub use self::gains::Gains;
pub use self::histogram::{FAULT_BUCKETS, FaultKind};
pub use self::sampling::Sampling;
pub use self::seat::Seat;
use self::shard::ShardsUsed;
pub use self::shard::{SHARDS, Shard};
pub use self::tally::{Tally, Totals};
pub use self::trace::{TRACES, TraceRing};
pub use self::word::AtomicWord;
use crate::sys::futex::{self, Reach};
use crate::sys::monotonic_ns;
pub use crate::sys::probe::{Trace, Tracepoint};
use crate::units::PAGE_SIZE;

/// Environment variable with the name of the supervisor's abstract socket (without the NUL).
pub const SOCKET_VARIABLE: &str = "QUIRE_SOCKET";

/// First word of the control page, of `Hello` and of `Welcome`.
pub const MAGIC: u32 = 0x5155_4952;
/// Changed with every change of a structure in this module.
pub const VERSION: u32 = 21;

/// Of a budget that is for what is not managed, too, a 64th is kept for what comes until that is counted the next
/// time; 16 MiB at most.
const AHEAD_PAGES_MAX: u64 = 4096;

/// How many times its budget a run can be given while it goes on: its tables have room for so much.
pub const BUDGET_GROWTH_MAX: usize = 2;

/// What managed memory keeps of a budget, whatever is in memory beside it: frames for the faults of a few
/// threads, page words, and a pool that is worth compressing into. 8 MiB.
pub const MANAGED_PAGES_MIN: u64 = 2048;

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
    /// Budget and swap were both spent; bit 0 of `detail` is 1 where the swap file is full, or
    /// there is none; above [`OUT_OF_MEMORY_UNANSWERING_SHIFT`] it has how many members held memory
    /// and did not answer.
    OutOfMemory = 1,
    /// A fork's child could not join the tree, so it must not run; `detail` has its process id in
    /// the low half, and the errno in the high one: `USERS` where there are as many members as
    /// there may be, `CONNREFUSED` where the supervisor cannot be reached.
    ChildNotManaged = 2,
    /// The kernel refused a call that cannot be refused; `detail` has the errno.
    KernelRefused = 3,
    /// A page could not be read from the swap file; `detail` is its place there, in units of 64
    /// bytes. The process may well live on: only that page is lost.
    SwapReadFailed = 4,
    /// A packed page in memory is not what was packed; `detail` is the page's address. Only that page is lost.
    PoolCorrupt = 5,
}

/// Where [`Obituary::OutOfMemory`] has the number of members that were asked for memory and did not
/// answer: they are stopped, traced or frozen.
pub const OUT_OF_MEMORY_UNANSWERING_SHIFT: u32 = 1;

/// A member's state and counters. The member writes them; the supervisor reads them, and clears
/// them when the member's connection closes.
#[repr(C, align(64))]
pub struct Member {
    /// Process id, or 0 where the slot is free.
    pub pid: AtomicU32,
    /// An [`Obituary`].
    pub obituary: AtomicU32,
    /// A number that goes with the obituary (an errno, an address).
    pub obituary_detail: AtomicU64,
    /// To whom the charge for the child of a fork belongs.
    pub fork: ForkWord,
    /// 1 where no process lives here: the slot keeps a part of the budget for a run inside this one, and
    /// `pid` is that run's supervisor. The supervisor writes it, before the slot is taken.
    pub is_reservation: AtomicU32,
    /// Most pages that it was granted at any time.
    pub held_pages_max: AtomicU64,
    /// Pages that hold the program's data, wherever it rests.
    pub wanted_pages: AtomicU64,
    /// Most of it at any time.
    pub wanted_pages_max: AtomicU64,
    /// Address space that is managed.
    pub managed_pages: AtomicU64,
    /// Most of it at any time.
    pub managed_pages_max: AtomicU64,
    /// Pages of the compressed pool that are its own, not common.
    pub pool_pages: AtomicU64,
    /// Which of the shards below were ever written.
    pub shards_used: ShardsUsed,
    /// The member's counters and histograms, in parts that are summed up: see [`shard`].
    pub shards: [Shard; SHARDS],
}

impl Member {
    /// What was counted of `event`.
    pub fn counted(&self, event: Event) -> u64 {
        // Relaxed: each shard's count is true by itself, the sum is of about one moment.
        let of = |shard: &Shard| shard.events[event as usize].load(Ordering::Relaxed);
        self.used_shards().map(of).sum()
    }

    /// How many faults of a kind took how long: bucket `i` has those of `2^i` to `2^(i+1)`
    /// nanoseconds, the first those below as well, the last those above.
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

    /// Whether no process lives in the slot: see [`Member::is_reservation`].
    pub fn is_a_reservation(&self) -> bool {
        self.is_reservation.load(Ordering::Relaxed) != 0
    }

    /// Forgets all that the slot's last member left in it. No thread writes to it meanwhile.
    pub fn clear(&self) {
        // Relaxed, all of them: what orders one member's end before the next one's beginning is
        // the socket by which they leave and join.
        self.pid.store(0, Ordering::Relaxed);
        self.obituary.store(Obituary::None as u32, Ordering::Relaxed);
        self.fork.clear();
        self.is_reservation.store(0, Ordering::Relaxed);
        for word in [
            &self.obituary_detail,
            &self.held_pages_max,
            &self.wanted_pages,
            &self.wanted_pages_max,
            &self.managed_pages,
            &self.managed_pages_max,
            &self.pool_pages,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.clear_shards();
    }
}

/// The head of the control memfd, followed in memory by the segment map.
#[repr(C, align(4096))]
pub struct Control {
    pub magic: AtomicU32,
    pub version: AtomicU32,
    pub supervisor_pid: AtomicU32,
    pub no_batch_unmap: AtomicU32,
    /// 1 where faults always go the classic way.
    pub no_speculation: AtomicU32,
    /// `--folio-order`: -1 for auto, else 0 to 9.
    pub folio_order: AtomicI32,
    /// `--handlers`: threads of a member that serve faults, 0 for auto. Read when it joins.
    pub handlers: AtomicU32,
    /// 1 where they run on any CPU (`--no-pinned-handlers`).
    pub no_pinned_handlers: AtomicU32,
    /// `--compress`: a `Strength` of packing.
    pub compress: AtomicU32,
    /// `--swap-encrypt`: 1 where the swap file is encrypted, by this key.
    pub is_swap_encrypted: AtomicU32,
    pub swap_key: [AtomicU64; 4],
    pub budget_pages: AtomicU64,
    /// Most that it can be raised to while the run goes on, and to what it shall be set, where that is asked for: the
    /// supervisor does it, and writes 0.
    pub budget_pages_max: AtomicU64,
    pub asked_budget_pages: AtomicU64,
    /// 1 where the budget is for managed memory alone (`--managed-only`).
    pub is_managed_only: AtomicU32,
    /// Pages in memory that are not managed, as the supervisor has counted them last: a part of the budget.
    pub unmanaged_pages: AtomicU64,
    /// Pages of shared memory that members have mapped and may be about to touch, faster than anyone counts.
    /// They are a part as well, until the supervisor has seen that they came, or that they do not.
    pub announced_pages: AtomicU64,
    /// When they were last counted, in milliseconds of the monotonic clock.
    pub counted_ms: AtomicU64,
    /// Most that one member may hold (`--memory-per-process`), 0 where only the budget bounds it.
    pub member_pages_max: AtomicU64,
    /// Most segments that the swap file may have (`--swap-max`), 0 without a swap file.
    pub segments_max: AtomicU32,
    pub segments_used: AtomicU32,
    /// Slots of the compressed pool: see [`slabs`].
    pub slots_max: AtomicU32,
    /// Pages held that are on no member's account: those of slabs that several members use since a
    /// fork. The supervisor alone changes it.
    pub common_pages: AtomicU64,
    /// Most that was granted at any time, members' slack included.
    pub held_pages_max: AtomicU64,
    /// Most data of all members together, as it was seen at times; see [`Control::wanted_max`].
    pub wanted_pages_max: AtomicU64,
    /// Which members find no memory, a bit each: `asks` of their seats says how much.
    pub asking: [AtomicU64; MEMBERS_MAX / 64],
    /// What members did that have left.
    pub tally: Tally,
    /// Which slots are taken, a bit each.
    pub taken: [AtomicU64; MEMBERS_MAX / 64],
    /// The members' accounts, and where they stand in the market.
    pub seats: [Seat; MEMBERS_MAX],
    pub members: [Member; MEMBERS_MAX],
    /// Members that hold live data in each segment; 0 is a free segment.
    pub segment_refs: [AtomicU32; SEGMENTS_MAX],
    /// Where each is, if there is a tier behind the file.
    pub far: Far,
    /// How often each was written, where the file is encrypted.
    pub segment_lives: [AtomicU32; SEGMENTS_MAX],
    /// Per member: the segments in which it holds live data, a bit each.
    pub segment_maps: [[AtomicU64; SEGMENT_WORDS]; MEMBERS_MAX],
    /// Per member: what happened on the way of its faults, latest last.
    pub traces: [TraceRing; MEMBERS_MAX],
    /// What `quire profile` wants to know, and is told.
    pub sampling: Sampling,
}

/// Pages of a budget that managed memory may have beside so many that are not managed, and so many that are
/// announced: [`Control::managed_limit`].
pub fn managed_part(budget: u64, unmanaged: u64, announced: u64) -> u64 {
    // What comes between two counts, and what the kernel charges ahead.
    let ahead = if unmanaged > 0 { (budget / 64).min(AHEAD_PAGES_MAX) } else { 0 };
    let left = budget.saturating_sub(unmanaged.saturating_add(announced) + ahead);
    left.max(MANAGED_PAGES_MIN.min(budget / 2))
}

/// The key is in the control page's first, which the supervisor keeps in memory.
const _: () = assert!(core::mem::offset_of!(Control, swap_key) + 32 <= PAGE_SIZE);

impl Control {
    /// The members that there are, with their slots. The memory of other slots is not touched.
    pub fn present(&self) -> impl Iterator<Item = (usize, &Member)> {
        slots_in(&self.taken).map(|slot| (slot, &self.members[slot]))
    }

    /// The members that find no memory, by slot.
    pub fn askers(&self) -> impl Iterator<Item = usize> {
        slots_in(&self.asking)
    }

    /// Pages charged, of all members and of none: mapped, in limbo, free frames, compressed pools,
    /// tables.
    pub fn held(&self) -> u64 {
        let held = |slot: usize| u64::from(self.seats[slot].account.get().held);
        slots_in(&self.taken).map(held).sum::<u64>() + self.common_pages.load(Ordering::Relaxed)
    }

    /// Pages of the budget that are given away: those held, and what members may charge without
    /// asking.
    pub fn granted(&self) -> usize {
        let granted = |slot: usize| self.seats[slot].account.granted_in_order();
        slots_in(&self.taken).map(granted).sum::<usize>()
            + self.common_pages.load(Ordering::SeqCst) as usize
    }

    /// Pages of the budget that managed memory may have: all but what is not managed, and
    /// [`MANAGED_PAGES_MIN`] at least, or half where that is less.
    pub fn managed_limit(&self) -> usize {
        // Relaxed: numbers, each true by itself.
        let [budget, unmanaged, announced] =
            [&self.budget_pages, &self.unmanaged_pages, &self.announced_pages]
                .map(|pages| pages.load(Ordering::Relaxed));
        managed_part(budget, unmanaged, announced) as usize
    }

    /// Pages that members hold, or may, beyond what the budget has for them.
    pub fn excess(&self) -> usize {
        self.granted().saturating_sub(self.managed_limit())
    }

    /// Notes that what is not managed is counted.
    pub fn note_counted(&self) {
        self.counted_ms.store(monotonic_ns() / 1_000_000, Ordering::Relaxed);
    }

    /// Has all background threads look at their pages.
    pub fn call_all(&self) {
        self.inhabited().for_each(|(slot, _)| self.call(slot));
    }

    /// Pages that hold the members' data, wherever it rests.
    pub fn wanted(&self) -> u64 {
        self.present().map(|(_, member)| member.wanted_pages.load(Ordering::Relaxed)).sum()
    }

    /// Most of it at any time: exact for a single member, else as it was seen at times.
    pub fn wanted_max(&self) -> u64 {
        let of = |(_, member): (usize, &Member)| member.wanted_pages_max.load(Ordering::Relaxed);
        let one = self.present().map(of).max().unwrap_or(0);
        one.max(self.wanted()).max(self.wanted_pages_max.load(Ordering::Relaxed))
    }

    /// Notes what is wanted now, where it is the most.
    pub fn note_wanted(&self) {
        raise(&self.wanted_pages_max, self.wanted_max());
    }

    /// Wakes the background threads of members that find no memory: some may be free now.
    pub fn wake_askers(&self) {
        self.askers().for_each(|slot| self.call(slot));
    }

    /// Has a member's background thread look at its pages, and at what is demanded of it.
    pub fn call(&self, slot: usize) {
        let calls = &self.seats[slot].calls;
        // Release pairs with the sleeper's acquire: what is called for was written before.
        calls.fetch_add(1, Ordering::Release);
        futex::wake(calls, u32::MAX, Reach::Tree);
    }

    /// The members that are processes, and no reservations.
    pub fn inhabited(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.present().filter(|(_, member)| !member.is_a_reservation())
    }

    /// Segments of the swap file in which the member in `slot` has live data; a fork's child shares
    /// its parent's.
    pub fn segments_of(&self, slot: usize) -> u64 {
        // Relaxed: as above. Without a segment in use the map is all holes, and stays so.
        if self.segments_used.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let words = (self.segments_max.load(Ordering::Relaxed) as usize).div_ceil(64);
        let map = &self.segment_maps[slot][..words.min(SEGMENT_WORDS)];
        map.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Gives a free slot to a process, with nothing left in it of the member before.
    pub fn take_slot(&self, slot: usize, pid: u32) {
        self.seats[slot].clear();
        self.members[slot].clear();
        self.traces[slot].clear();
        self.occupy(slot, pid);
    }

    /// Gives a free slot to a reservation of `pages`, for the run of the supervisor `pid`.
    pub fn reserve_slot(&self, slot: usize, pid: u32, pages: u64) {
        let member = &self.members[slot];
        let seat = &self.seats[slot];
        member.clear();
        seat.clear();
        member.is_reservation.store(1, Ordering::Relaxed);
        seat.is_silent.store(1, Ordering::Relaxed);
        seat.account.put_in(usize::try_from(pages).unwrap_or(usize::MAX));
        member.held_pages_max.store(pages, Ordering::Relaxed);
        self.occupy(slot, pid);
    }

    fn occupy(&self, slot: usize, pid: u32) {
        self.members[slot].pid.store(pid, Ordering::Relaxed);
        // Relaxed, here and below: a walk over the members wants numbers, each true by itself.
        self.taken[slot / 64].fetch_or(1 << (slot % 64), Ordering::Relaxed);
    }

    /// Segments that hold data and lie in the swap file.
    pub fn segments_in_file(&self) -> u32 {
        let used = self.segments_used.load(Ordering::Relaxed);
        if self.far.is_on() { used.min(self.far.local.load(Ordering::Relaxed)) } else { used }
    }

    /// Takes a slot back. What its member traced last can still be read, until it is another's.
    pub fn free_slot(&self, slot: usize) {
        let others = !(1 << (slot % 64));
        self.asking[slot / 64].fetch_and(others, Ordering::Relaxed);
        self.taken[slot / 64].fetch_and(others, Ordering::Relaxed);
        self.seats[slot].clear();
        self.members[slot].clear();
    }
}

fn slots_in(words: &[AtomicU64; MEMBERS_MAX / 64]) -> impl Iterator<Item = usize> {
    // Relaxed: a member that came or went just now is seen or is not.
    words.iter().enumerate().flat_map(|(at, word)| numbers_of(at, word.load(Ordering::Relaxed)))
}

/// The numbers whose bits are set in a word of a bitmap of 64-bit words.
pub fn numbers_of(word: usize, mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (bit < u64::BITS).then_some(word * 64 + bit as usize)
    })
}

pub(crate) fn raise(max: &AtomicU64, value: u64) {
    if max.load(Ordering::Relaxed) < value {
        max.fetch_max(value, Ordering::Relaxed);
    }
}

/// Bytes of the control memfd (sparse).
pub const CONTROL_BYTES: usize = size_of::<Control>();

/// `Hello::parent_slot` of a process that executed a program.
pub const NO_PARENT: u32 = u32::MAX;
/// `Hello::parent_slot` of a supervisor that asks for `held_pages` of the budget, for a run of its
/// own inside this one. It has them as long as its connection is open.
pub const RESERVATION: u32 = u32::MAX - 1;

/// A process asks to join.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Hello {
    pub magic: u32,
    pub version: u32,
    /// The number of the fork that made this process, where one did ([`ForkWord`]).
    pub fork: u32,
    /// The slot of the process that forked this one, or [`NO_PARENT`], or [`RESERVATION`].
    pub parent_slot: u32,
    /// Pages that the parent had charged for this child: they move to the child's slot. Of a
    /// reservation: pages that are asked for.
    pub held_pages: u64,
    /// Pages of data that the child inherits.
    pub wanted_pages: u64,
}

impl Hello {
    /// What a program that has just begun says.
    pub const OF_PROGRAM: Hello = Hello {
        magic: MAGIC,
        version: VERSION,
        fork: 0,
        parent_slot: NO_PARENT,
        held_pages: 0,
        wanted_pages: 0,
    };
}

/// `Welcome::flags`: `/dev/userfaultfd` is attached.
pub const WELCOME_UFFD_DEVICE: u32 = 1;
/// `Welcome::flags`: the swap file is attached.
pub const WELCOME_SWAP_FILE: u32 = 2;
/// `Welcome::flags`: the pool memfd is attached.
pub const WELCOME_POOL: u32 = 8;
/// `Welcome::flags`: refused, for the reason in `refusal`; the process runs unmanaged.
pub const WELCOME_REFUSED: u32 = 4;

/// Why a process may not join.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum JoinRefusal {
    /// There are as many members as there may be: `Welcome::detail`.
    Full = 1,
    /// The supervisor is another version's: `Welcome::detail`.
    Version = 2,
    /// A fork's child whose parent is not a member any more.
    NoParent = 3,
    /// The budget has not as much left as is to be reserved: it has `Welcome::detail` pages.
    NoRoom = 4,
}

impl JoinRefusal {
    pub fn from_number(number: u32) -> Option<JoinRefusal> {
        let all =
            [JoinRefusal::Full, JoinRefusal::Version, JoinRefusal::NoParent, JoinRefusal::NoRoom];
        all.into_iter().find(|&refusal| refusal as u32 == number)
    }
}

/// The supervisor's answer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Welcome {
    pub magic: u32,
    /// `WELCOME_*`.
    pub flags: u32,
    pub slot: u32,
    /// A [`JoinRefusal`], or 0.
    pub refusal: u32,
    /// A number that goes with it.
    pub detail: u64,
}
