//! The engine of a managed process, which the preload library starts and calls.
//!
//! A [`Process`] has the address space on its userfaultfd, the engine's threads, the connection to
//! the supervisor, and the gate that a fork closes. The program's calls are the methods in
//! [`layout`]; no signal handler of the program runs in the middle of one ([`call`]).

mod call;
mod fork;
#[cfg(feature = "failpoints")]
mod gaps;
mod gate;
mod join;
mod layout;
mod limit;
mod threads;

use core::fmt::Write;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, Ordering};

use rustix::fd::{AsFd, IntoRawFd};
use rustix::process::{Resource, getrlimit};

use self::call::CallStack;
pub use self::fork::ForkGuard;
use self::gate::Gate;
use self::join::{Joined, SocketName};
use self::limit::AddressLimit;
use self::threads::{EngineThreads, Handlers};
pub use self::threads::{HANDLERS_AUTO_MAX, HANDLERS_MAX, THREAD_NAMES};
use crate::budget::Budget;
use crate::control::Hello;
use crate::mmu::userfaultfd::Userfaultfd;
use crate::space::VmSpace;
use crate::swap::Swap;
use crate::sys::Errno;
use crate::sys::rseq::RseqAreas;
use crate::sys::thread::{self, SignalsBlocked};
use crate::sys::{memory, yard};
use crate::units::{BLOCK_PAGES, PAGE_SHIFT, PageNum, PageRange};

/// The arena's size without a limit: 1 TiB of addresses.
const ARENA_BYTES_MAX: usize = 1 << 40;
/// How much of the arena gets its rights at a time: 64 MiB.
const RIGHTS_STEP_PAGES: usize = 64 << 20 >> PAGE_SHIFT;
/// A smaller arena is of no use.
const ARENA_BYTES_MIN: usize = 256 << 20;

pub struct Process {
    pub(crate) space: VmSpace<Userfaultfd>,
    gate: Gate,
    threads: EngineThreads,
    address_limit: AddressLimit,
    call_stack: CallStack,
    rseq: RseqAreas,
    name: SocketName,
    /// Descriptors of the engine's threads: only their table has them.
    connection: AtomicI32,
    swap_file: AtomicI32,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(core::ptr::null_mut());

/// The engine of this process, once it has started.
#[inline]
pub fn current() -> Option<&'static Process> {
    // Acquire pairs with the release in `start`.
    let process = CURRENT.load(Ordering::Acquire);
    // SAFETY: set once, to an engine that lives for ever.
    unsafe { process.as_ref() }
}

/// Why the engine could not start, for a message.
struct StartError {
    step: &'static str,
    errno: Errno,
    /// What the errno means, where that is known.
    why: Option<&'static str>,
}

/// Starts the engine and joins the run whose supervisor is named in the environment. Returns `None`
/// where there is no supervisor, or the start failed, which one line on stderr says; the process then
/// runs unmanaged.
pub fn start() -> Option<&'static Process> {
    try_start().unwrap_or_else(|error| {
        let pid = thread::process_id();
        match error.why {
            Some(why) => say(format_args!("quire: process {pid} runs unmanaged: {why}")),
            None => say(format_args!(
                "quire: process {pid} runs unmanaged: cannot {} (errno {}); try `quire doctor`",
                error.step,
                error.errno.raw_os_error()
            )),
        }
        None
    })
}

fn try_start() -> Result<Option<&'static Process>, StartError> {
    let Some(name) = SocketName::from_environment() else { return Ok(None) };
    let _signals = SignalsBlocked::new();
    let failed = |step| move |errno| StartError { step, errno, why: None };
    let joined = name.connect().and_then(|connection| join::join(connection, &Hello::OF_PROGRAM));
    let mut joined = joined.map_err(|errno| StartError {
        why: name.why_not(errno),
        ..failed("join the run")(errno)
    })?;
    let control = joined.map_control().map_err(failed("map the control page"))?;
    // SAFETY: the mapping is never undone.
    let budget = unsafe { Budget::new(control.as_ptr(), joined.slot) };
    let budget_pages = budget.control().budget_pages.load(Ordering::Relaxed) as usize;
    let mmu = reserve_arena(budget_pages).map_err(failed("reserve address space"))?;
    // Mapped below, and then closed.
    let pool = joined.pool.take().ok_or(Errno::PROTO).map_err(failed("join the run"))?;
    let descriptors = Descriptors::take(joined);
    mmu.attach(descriptors.device, descriptors.memory).map_err(failed("open a userfaultfd"))?;
    let pages = mmu.arena_pages();
    let frames = mmu.pool_frames();
    mmu.register(PageRange::new(PageNum(0), pages)).map_err(failed("register the arena"))?;
    // SAFETY: the descriptor stays open in the readers' table.
    let swap = unsafe { Swap::new(descriptors.swap_file, Some(pool.as_fd()), &budget) }
        .map_err(failed("reserve the swap tables"))?;
    drop(pool);
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
    let has_file = swap.has_file();
    let handlers = Handlers::new(budget.control(), cpus);
    swap.set_turns(handlers.turns());
    let process = Process {
        space: VmSpace::new(mmu, budget, swap, pages, frames)
            .map_err(failed("reserve the page tables"))?,
        gate: Gate::default(),
        threads: EngineThreads::new(handlers, has_file)
            .map_err(failed("map the threads' stacks"))?,
        address_limit: AddressLimit::new(),
        call_stack: CallStack::new().map_err(failed("map a stack for calls"))?,
        rseq: RseqAreas::default(),
        name,
        connection: AtomicI32::new(descriptors.connection),
        swap_file: AtomicI32::new(descriptors.swap_file.unwrap_or(-1)),
    };
    // The first mapping need not ask for it then.
    process.address_limit.learn(|| getrlimit(Resource::As).current);
    // A limit on data counts all writable addresses, used or not.
    if getrlimit(Resource::Data).current.is_none() {
        process.space.keep_rights(RIGHTS_STEP_PAGES);
    }
    let process = settle(process).map_err(failed("map the engine"))?;
    process.threads.start().map_err(|errno| {
        // So the supervisor learns that this process is no member.
        close(descriptors.connection);
        failed("start the handler threads")(errno)
    })?;
    descriptors.close(process);
    // Release publishes the engine.
    CURRENT.store(core::ptr::from_ref(process).cast_mut(), Ordering::Release);
    Ok(Some(process))
}

/// Writes a line to stderr, from a program's thread.
fn say(text: core::fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 200], len: 0 };
    let _ = writeln!(line, "{text}");
    // SAFETY: stderr is the program's, which may have closed it.
    let stderr = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line.bytes[..line.len]);
}

/// A line of text, made without an allocator.
struct Line {
    bytes: [u8; 200],
    len: usize,
}

impl core::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let taken = text.len().min(room.len());
        room[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        Ok(())
    }
}

/// Moves the engine to the place where it stays.
fn settle(process: Process) -> Result<&'static Process, Errno> {
    let place = yard::take(size_of::<Process>())?.cast::<Process>();
    // SAFETY: fresh memory, large and aligned enough, never unmapped.
    unsafe {
        place.write(process);
        let process = &mut *place.as_ptr();
        let address = core::ptr::from_ref(process);
        process.threads.seat_for(address);
        Ok(process)
    }
}

/// Reserves as large an arena as limits allow, and a pool with room for several times the budget, which may be
/// raised (windows that are nearly empty cost addresses only).
fn reserve_arena(budget_pages: usize) -> Result<Userfaultfd, Errno> {
    let frames = (budget_pages * 4).next_multiple_of(BLOCK_PAGES) + 64 * BLOCK_PAGES;
    // Under a limit most of the addresses are left to the program and to the engine's tables, which
    // grow with the arena, and count as data.
    let limit = memory::address_limit();
    let mut bytes = ARENA_BYTES_MAX;
    while bytes > ARENA_BYTES_MIN && limit.is_some_and(|limit| bytes as u64 > limit / 4) {
        bytes /= 2;
    }
    loop {
        match Userfaultfd::reserve(bytes >> PAGE_SHIFT, frames) {
            Err(Errno::NOMEM) if bytes > ARENA_BYTES_MIN => bytes /= 2,
            other => return other,
        }
    }
}

/// The descriptors of a start, in the table of the thread that starts the engine.
struct Descriptors {
    connection: i32,
    control: Option<i32>,
    device: Option<i32>,
    swap_file: Option<i32>,
    /// /proc/self/mem, where this process may open it (not after a setuid).
    memory: Option<i32>,
}

impl Descriptors {
    fn take(joined: Joined) -> Descriptors {
        Descriptors {
            connection: joined.connection.into_raw_fd(),
            control: Some(joined.control.into_raw_fd()),
            device: joined.device.map(IntoRawFd::into_raw_fd),
            swap_file: joined.swap_file.map(IntoRawFd::into_raw_fd),
            memory: join::open_memory().ok().map(IntoRawFd::into_raw_fd),
        }
    }

    /// Closes all of them in the program's table: the engine's threads have their own.
    fn close(&self, process: &Process) {
        let [faults, pool, _] = process.space.mmu().descriptors();
        let optional = [self.control, self.memory, self.device, self.swap_file];
        let own = [self.connection, faults, pool];
        own.into_iter().chain(optional.into_iter().flatten()).for_each(close);
    }
}

fn close(descriptor: i32) {
    thread::close_range(descriptor as u32, descriptor as u32);
}

impl Process {
    /// Has `number` asked for the calling thread's number, instead of the kernel.
    pub fn set_thread_of_caller(&self, number: fn() -> u32) {
        self.space.set_thread_of_caller(number);
    }

    /// Has faults served without speculation while `flag`, glibc's `__libc_single_threaded`, is not 0.
    pub fn watch_single_threaded(&self, flag: &'static AtomicU8) {
        self.space.watch_single_threaded(flag);
    }

    /// Says where libc's threads have their rseq areas: `__rseq_offset` and `__rseq_size`.
    pub fn set_rseq(&self, offset: isize, size: u32) {
        self.rseq.set(offset, size);
    }

    /// Closes all descriptors in the engine threads' private table that are not theirs: a copy of a
    /// pipe of the program would keep it open for ever.
    fn close_foreign_descriptors(&self) {
        let [faults, pool, memory] = self.space.mmu().descriptors();
        let connection = self.connection.load(Ordering::Relaxed);
        let swap_file = self.swap_file.load(Ordering::Relaxed);
        let mut kept = [faults, pool, memory, connection, swap_file];
        kept.sort_unstable();
        let mut first = 0;
        for descriptor in kept.into_iter().filter(|&descriptor| descriptor >= 0) {
            let descriptor = descriptor as u32;
            if descriptor > first {
                thread::close_range(first, descriptor - 1);
            }
            first = descriptor + 1;
        }
        thread::close_range(first, u32::MAX);
    }
}
