//! The engine's threads in a managed process: handlers, the background thread, the readers of the swap file,
//! and the one that executes proxy calls.
//!
//! The first of them starts the others. It begins with a copy of the program's descriptor table and closes in
//! that copy all that is not the engine's; the others share it.
//!
//! They are raw clones with a TLS block of their own and every signal blocked. None may use libc, a
//! thread-local, an allocator, a panic that unwinds, or managed memory. So all signals stay the program's, and
//! setuid, exec, `pthread_exit` of the main thread and `close_range` do not reach them.
//!
//! # Handlers
//!
//! There is one for each CPU, four at most, pinned to it (`--handlers` and `--no-pinned-handlers` change that).
//! Each blocks in `read(2)` of the one userfaultfd. A fault wakes all that wait, so that the one on the
//! faulting CPU takes it by a plain switch of threads (docs/decisions/0007). More handlers, several messages a
//! read and several userfaultfds were measured and do not pay (0021), nor does a handler that follows a thread
//! that faults alone (0014). Handlers and kswapd ask the scheduler for its shortest slices, so that they run at
//! once on a busy CPU as well (0026).

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use super::Process;
use crate::budget::{For, Need};
use crate::control::Control;
use crate::control::shard::ENGINE_SHARDS;
use crate::mmu::userfaultfd::FaultMessage;
use crate::reclaim::{Kswapd, NoCaches, OOM_ROUND_MS, Sampler};
use crate::scratch::Scratch;
use crate::swap::SwapRead;
use crate::swap::io::Ring;
use crate::sys::Errno;
use crate::sys::clock::Moment;
use crate::sys::futex::{self, Reach};
use crate::sys::monotonic_ns;
use crate::sys::thread::{self, Files, Signal, ThreadMemory};

/// The most handlers by default: a fault wakes all of them.
pub const HANDLERS_AUTO_MAX: usize = 4;
/// The most handlers.
pub const HANDLERS_MAX: usize = ENGINE_SHARDS - BESIDE_HANDLERS;
/// Kswapd, the proxy calls, the readers.
const BESIDE_HANDLERS: usize = 2 + READERS;
/// Readers of the swap file.
const READERS: usize = 2;
/// Pages that are asked for where faults of this process find none.
const STARVED_PAGES: usize = 64;
/// Reads that a reader takes at a time.
const READ_BATCH: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// Serves faults, on this CPU or on any.
    Handler(Option<usize>),
    Kswapd,
    ProxyCalls,
    /// Reads the swap file.
    Reader,
}

impl Role {
    const fn name(self) -> &'static CStr {
        match self {
            Role::Handler(_) => c"quire-fault",
            Role::Kswapd => c"quire-kswapd",
            Role::ProxyCalls => c"quire-proxy",
            Role::Reader => c"quire-swapin",
        }
    }
}

/// The names of the engine's threads in a program.
pub const THREAD_NAMES: [&CStr; 4] =
    [Role::Handler(None).name(), Role::Kswapd.name(), Role::ProxyCalls.name(), Role::Reader.name()];

struct ThreadSeat {
    place: ThreadMemory,
    role: Role,
    scratch: UnsafeCell<Scratch>,
    process: *const Process,
}

// SAFETY: only the thread that runs on the seat uses its scratch.
unsafe impl Sync for ThreadSeat {}

// Each thread has a shard of the counters alone.
const SEATS_MAX: usize = ENGINE_SHARDS;

#[derive(Clone, Copy)]
pub(super) struct Handlers {
    count: usize,
    /// Whether each has a CPU of its own, as far as there are CPUs, or all run on any.
    is_pinned: bool,
}

impl Handlers {
    /// As the run's settings have it, on a machine with so many CPUs.
    pub fn new(control: &Control, cpus: usize) -> Handlers {
        // Relaxed, both: written before the first member joins.
        let is_pinned = control.no_pinned_handlers.load(Ordering::Relaxed) == 0;
        let count = Self::count(control.handlers.load(Ordering::Relaxed) as usize, cpus);
        Handlers { count, is_pinned }
    }

    /// How many there are where so many are asked for, with 0 for the default.
    fn count(asked: usize, cpus: usize) -> usize {
        let count = if asked == 0 { cpus.min(HANDLERS_AUTO_MAX) } else { asked };
        count.clamp(1, HANDLERS_MAX)
    }

    /// How many of them may sleep for a read at a time: one is left for other faults.
    pub fn turns(self) -> u32 {
        self.count as u32 - 1
    }

    fn roles(self) -> impl Iterator<Item = Role> {
        (0..self.count).map(move |number| Role::Handler(self.is_pinned.then_some(number)))
    }
}

/// All threads' seats, made once and used again by a fork's child.
pub(super) struct EngineThreads {
    seats: [Option<ThreadSeat>; SEATS_MAX],
    ready: Signal,
    /// What the threads but the first are to do, a futex: [`WAIT`], [`GO`] or [`LEAVE`].
    others: AtomicU32,
    /// Handlers that wait for a fault.
    idle: AtomicU32,
    /// What the first thread does before anything else, with an empty descriptor table.
    prepare: UnsafeCell<Option<*mut Prepare<'static>>>,
}

/// They wait until the first thread has prepared all. A thread that cannot be made is noticed before
/// the process joins, while the parent of a fork's child can still be told.
const WAIT: u32 = 0;
/// They run.
const GO: u32 = 1;
/// They end, for something failed.
const LEAVE: u32 = 2;

pub(super) type SpawnOthers<'a> = &'a dyn Fn() -> Result<(), Errno>;
/// Has the other threads made at any time before the process joins.
type Prepare<'a> = dyn FnMut(SpawnOthers<'_>) -> Result<(), Errno> + 'a;

// SAFETY: `prepare` is written before the first thread starts and read by it alone.
unsafe impl Sync for EngineThreads {}

impl EngineThreads {
    pub fn new(handlers: Handlers, has_swap_file: bool) -> Result<EngineThreads, Errno> {
        let mut threads = EngineThreads {
            seats: [const { None }; SEATS_MAX],
            ready: Signal::default(),
            others: AtomicU32::new(WAIT),
            idle: AtomicU32::new(0),
            prepare: UnsafeCell::new(None),
        };
        let readers = if has_swap_file { READERS } else { 0 };
        let roles = handlers
            .roles()
            .chain([Role::Kswapd, Role::ProxyCalls])
            .chain(core::iter::repeat_n(Role::Reader, readers));
        for (number, (seat, role)) in threads.seats.iter_mut().zip(roles).enumerate() {
            *seat = Some(ThreadSeat {
                place: ThreadMemory::new(number)?,
                role,
                scratch: UnsafeCell::new(Scratch::new()?),
                process: core::ptr::null(),
            });
        }
        Ok(threads)
    }

    pub fn seat_for(&mut self, process: *const Process) {
        for seat in self.seats.iter_mut().flatten() {
            seat.process = process;
        }
    }

    /// Starts all threads; the caller may close its own descriptors afterwards. The caller has
    /// blocked all signals.
    ///
    /// # Errors
    /// `AGAIN` under RLIMIT_NPROC, `NOMEM`.
    pub fn start(&self) -> Result<(), Errno> {
        let first = self.seats[0].as_ref().ok_or(Errno::NOMEM)?;
        // Relaxed: no thread runs yet. In a fork's child it still has the parent's value.
        self.others.store(WAIT, Ordering::Relaxed);
        self.idle.store(0, Ordering::Relaxed);
        let argument = core::ptr::from_ref(first) as usize;
        // SAFETY: nothing runs on the seats yet; seats live as long as the process.
        unsafe { first.place.spawn(Files::Private, first_main, argument) }?;
        match self.ready.wait() {
            1 => Ok(()),
            error => Err(Errno::from_raw_os_error(error as i32 - 1)),
        }
    }

    /// Starts all threads, the first of which runs `prepare` in a descriptor table that is its own
    /// and empty: it opens there what the engine needs, whatever the program's table has room for. An
    /// error of `prepare` comes back.
    pub fn start_by(&self, prepare: &mut Prepare<'_>) -> Result<(), Errno> {
        let prepare = core::ptr::from_mut(prepare);
        // SAFETY: only the lifetime changes; `start` returns when the first thread is done with
        // it. No thread runs yet, so no other thread uses the cell.
        unsafe {
            let prepare = core::mem::transmute::<*mut Prepare<'_>, *mut Prepare<'static>>(prepare);
            *self.prepare.get() = Some(prepare);
        }
        self.start()
    }

    /// The first thread's part of [`Self::start`]: the others share its descriptor table.
    fn spawn_others(&self) -> Result<(), Errno> {
        for other in self.seats.iter().flatten().skip(1) {
            let argument = core::ptr::from_ref(other) as usize;
            // SAFETY: nothing runs on this seat yet.
            unsafe { other.place.spawn(Files::Shared, other_main, argument) }?;
        }
        Ok(())
    }

    /// The first thread's part of both starts.
    fn run_prepare(&self, process: &Process) -> Result<(), Errno> {
        // SAFETY: see `start_by`.
        match unsafe { (*self.prepare.get()).take() } {
            None => {
                self.spawn_others()?;
                process.close_foreign_descriptors();
                Ok(())
            }
            Some(prepare) => {
                thread::close_range(0, u32::MAX);
                // SAFETY: the caller of `start_by` waits, and uses nothing of the closure's.
                unsafe { (*prepare)(&|| self.spawn_others()) }
            }
        }
    }
}

fn seat(argument: usize) -> &'static ThreadSeat {
    // SAFETY: `start` and `spawn_others` pass the address of a seat, which lives for ever.
    unsafe { &*(argument as *const ThreadSeat) }
}

impl ThreadSeat {
    fn process(&self) -> &'static Process {
        // SAFETY: `seat_for` was called before the thread started, and the engine lives for ever.
        unsafe { &*self.process }
    }
}

extern "C" fn first_main(argument: usize) -> ! {
    let seat = seat(argument);
    let process = seat.process();
    let threads = &process.threads;
    let outcome = threads.run_prepare(process);
    // Release publishes what was prepared.
    threads.others.store(if outcome.is_ok() { GO } else { LEAVE }, Ordering::Release);
    futex::wake(&threads.others, u32::MAX, Reach::Process);
    if let Err(error) = outcome {
        threads.ready.set(error.raw_os_error() as u32 + 1);
        thread::exit_thread();
    }
    threads.ready.set(1);
    run(seat)
}

extern "C" fn other_main(argument: usize) -> ! {
    let seat = seat(argument);
    let others = &seat.process().threads.others;
    loop {
        // Acquire pairs with the release in `first_main`.
        match others.load(Ordering::Acquire) {
            WAIT => futex::wait(others, WAIT, Reach::Process, None),
            GO => run(seat),
            _ => thread::exit_thread(),
        }
    }
}

fn run(seat: &'static ThreadSeat) -> ! {
    let process = seat.process();
    process.space.enlist_engine_thread();
    // SAFETY: this thread is the only one that runs on the seat.
    let scratch = unsafe { &mut *seat.scratch.get() };
    thread::set_name(seat.role.name());
    match seat.role {
        Role::Handler(cpu) => {
            if let Some(cpu) = cpu {
                thread::pin_to_nth_cpu(cpu);
            }
            thread::run_soon();
            handle_faults(process, scratch)
        }
        Role::Kswapd => {
            thread::run_soon();
            reclaim(process, scratch)
        }
        Role::ProxyCalls => run_proxy_calls(process),
        Role::Reader => read_swap(process, scratch),
    }
}

fn handle_faults(process: &'static Process, scratch: &mut Scratch) -> ! {
    let mmu = process.space.mmu();
    let swap = process.space.swap();
    let reader = swap.has_file().then(|| swap.new_handlers_reader());
    // In a fork's child there is the parent's.
    let inherited = core::mem::replace(&mut scratch.reader, reader);
    inherited.into_iter().for_each(Ring::abandon);
    scratch.beside = Some(serve_beside);
    // Relaxed, here and below: only a hint.
    let idle = &process.threads.idle;
    loop {
        idle.fetch_add(1, Ordering::Relaxed);
        let message = mmu.read_fault();
        idle.fetch_sub(1, Ordering::Relaxed);
        let Some(FaultMessage { page, access, thread }) = message else { continue };
        let since = Moment::now();
        process.gate.enter();
        process.space.handle_fault_of(thread, page, access, since, scratch);
        process.gate.leave();
    }
}

/// Serves a fault for which no handler is left, on one that waits for its read; `true` where there was one. It
/// is inside the gate, which stays closed to a fork until the read is done.
fn serve_beside(scratch: &mut Scratch) -> bool {
    let Some(process) = super::current() else { return false };
    if process.threads.idle.load(Ordering::Relaxed) > 0 {
        return false;
    }
    let since = Moment::now();
    match process.space.mmu().read_fault_if_there() {
        Ok(Some(FaultMessage { page, access, thread })) => {
            process.space.handle_fault_of(thread, page, access, since, scratch);
            true
        }
        Ok(None) | Err(Errno::AGAIN | Errno::INTR) => false,
        Err(_) => {
            // The kernel cannot say whether there is one: from now on one handler is left to wait for it.
            scratch.beside = None;
            false
        }
    }
}

fn reclaim(process: &'static Process, scratch: &mut Scratch) -> ! {
    let space = &process.space;
    let budget = space.budget();
    let mut kswapd = Kswapd::default();
    let mut sampler = Sampler::default();
    loop {
        kswapd.begin(space);
        process.gate.enter();
        let balance = space.balance(&NoCaches, scratch);
        // Inside: it takes a lock, which a fork must not catch.
        let has_starved = space.has_starved();
        let sampled_in_ms = space.sample(&mut sampler, scratch);
        process.gate.leave();
        if !has_starved {
            budget.stop_asking();
        }
        if let Some(wait) = kswapd.oom_wait(balance, has_starved) {
            let is_requested = !budget.is_at_own_limit()
                && space.request_reclaim_for(For::Faults, Need::Starved, STARVED_PAGES, wait);
            // Where another member could give, it decides whether there is hope.
            if wait.is_hopeless(monotonic_ns(), budget.swap_progress()) && !is_requested {
                space.note_out_of_memory();
                thread::kill_process();
            }
        }
        // Where faults wait although enough is free, that is another's, or a fork's, just now.
        kswapd.sleep(space, balance, has_starved.then_some(OOM_ROUND_MS).or(sampled_in_ms));
    }
}

fn run_proxy_calls(process: &'static Process) -> ! {
    let proxy_calls = &process.space.proxy_calls;
    loop {
        let seen = proxy_calls.calls();
        process.space.answer_for_others();
        proxy_calls.run_one();
        proxy_calls.wait(seen);
    }
}

fn read_swap(process: &'static Process, scratch: &mut Scratch) -> ! {
    let mut reader = process.space.swap().new_reader();
    let mut requests = [SwapRead::NONE; READ_BATCH];
    loop {
        let count = process.space.swap().take_requests(&mut requests);
        process.space.complete_reads(&requests[..count], &mut reader, scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_handler_for_each_cpu_up_to_four_unless_another_number_is_asked_for() {
        for (asked, cpus, count) in
            [(0, 0, 1), (0, 1, 1), (0, 3, 3), (0, 64, 4), (1, 64, 1), (12, 2, 12), (99, 2, 12)]
        {
            assert_eq!(Handlers::count(asked, cpus), count, "{asked} asked for, {cpus} CPUs");
        }
    }

    #[test]
    fn handlers_have_a_cpu_each_or_none_of_their_own() {
        let roles = |is_pinned| Handlers { count: 2, is_pinned }.roles();
        assert!(roles(true).eq([Role::Handler(Some(0)), Role::Handler(Some(1))]));
        assert!(roles(false).eq([Role::Handler(None), Role::Handler(None)]));
    }
}
