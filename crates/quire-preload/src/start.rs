//! Joining the tree: once, at the first call of any entry point.
//!
//! Owns the process's state (unstarted, starting, managed, unmanaged) and the arena's bounds, kept
//! here for the fast paths. Leaves the joining itself to [`quire::process::start`] and the heap's
//! start to [`crate::heap`].
//!
//! The first call may come from ld.so, before any constructor and before libc is ready, or from
//! several threads at once; and the start's own calls must not wait for the start. So there is no
//! `std::sync::Once` here, but one word that is also a futex. The thread that takes it from `UNSTARTED`
//! to `STARTING` starts the process; others sleep until it changes. To the starter's own calls
//! meanwhile, as from a signal handler, the process is unmanaged.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use quire::process::{self, Process};

use crate::sys;

const UNSTARTED: u32 = 0;
const STARTING: u32 = 1;
const MANAGED: u32 = 2;
const UNMANAGED: u32 = 3;

/// One of the constants above.
static STATE: AtomicU32 = AtomicU32::new(UNSTARTED);
/// The starter's thread id while `STATE` is `STARTING`.
static STARTER: AtomicU32 = AtomicU32::new(0);
/// What `process::start` gave; null where unmanaged.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(core::ptr::null_mut());
/// The arena's first address and its length; both 0 until managed, so that no address is inside.
static ARENA_START: AtomicUsize = AtomicUsize::new(0);
static ARENA_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Whether this process is managed; starts it at the first call.
#[inline]
pub fn is_managed() -> bool {
    // Acquire: pairs with the release in `start_slow`; what the start wrote is seen.
    match STATE.load(Ordering::Acquire) {
        MANAGED => true,
        UNMANAGED => false,
        _ => start_slow(),
    }
}

/// The process as the engine sees it, where it is managed; starts it at the first call.
#[inline]
pub fn process() -> Option<&'static Process> {
    if !is_managed() {
        return None;
    }
    // Relaxed: written before STATE became MANAGED, which was loaded with acquire.
    let process = PROCESS.load(Ordering::Relaxed);
    // SAFETY: null, or the pointer made from a `&'static Process` in `start_slow`.
    unsafe { process.as_ref() }
}

/// Whether `addr` lies in the arena. Starts nothing: before the start no address does.
#[inline]
pub fn is_in_arena(addr: usize) -> bool {
    // Relaxed: a program that holds an address of the arena got it from a call that started.
    let start = ARENA_START.load(Ordering::Relaxed);
    addr.wrapping_sub(start) < ARENA_BYTES.load(Ordering::Relaxed)
}

#[cold]
fn start_slow() -> bool {
    let me = sys::thread_id();
    loop {
        // AcqRel: any other thread must see what the starter wrote before its release below.
        match STATE.compare_exchange(UNSTARTED, STARTING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(MANAGED) => return true,
            Err(UNMANAGED) => return false,
            // Relaxed: only the starter itself can read its own id here; it wrote it before.
            Err(_) if STARTER.load(Ordering::Relaxed) == me => return false,
            Err(_) => sys::futex_wait(&STATE, STARTING),
        }
    }
    // Relaxed: read for equality by this very thread only.
    STARTER.store(me, Ordering::Relaxed);
    let _kept = crate::ErrnoKept::new();
    let state = match process::start() {
        Some(process) => {
            process.watch_single_threaded(&IS_LOADING);
            let arena = process.arena();
            PROCESS.store(core::ptr::from_ref(process).cast_mut(), Ordering::Relaxed);
            crate::heap::start(process);
            // The length last: until then no address counts as the arena's.
            ARENA_START.store(arena.start, Ordering::Relaxed);
            ARENA_BYTES.store(arena.len(), Ordering::Release);
            MANAGED
        }
        None => UNMANAGED,
    };
    // Release: pairs with the acquire loads in `is_managed` and above.
    STATE.store(state, Ordering::Release);
    sys::futex_wake_all(&STATE);
    state == MANAGED
}

/// Runs when the loader has relocated everything and libc is up. The process starts now if no call
/// came before, and fork is taken over, which needs libc.
extern "C" fn constructor() {
    if let Some(process) = process() {
        crate::fork::install();
        tell_rseq(process);
        watch_threads(process);
    }
}

/// The calling thread's number as [`noted_number`] has it, or 0 where that may be another's.
fn thread_of_caller() -> u32 {
    if crate::fork::lent::is_lent() { 0 } else { noted_number() }
}

/// The calling thread's number, without a system call, which the program's filter may forbid: glibc
/// notes it in every mutex that the thread takes, at a place that is part of its ABI. One thread at a
/// time asks: under the space's lock, or as a process's only one.
pub fn noted_number() -> u32 {
    struct Asked(UnsafeCell<libc::pthread_mutex_t>);
    // SAFETY: a mutex is made for this.
    unsafe impl Sync for Asked {}
    static ASKED: Asked = Asked(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));
    /// `__data.__owner`, in units of its size.
    const OWNER: usize = 2;
    let mutex = ASKED.0.get();
    // SAFETY: a valid mutex, which this thread does not hold; the word is inside of it, and written
    // by this thread's own call.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        let owner = mutex.cast::<u32>().add(OWNER).read();
        libc::pthread_mutex_unlock(mutex);
        owner
    }
}

/// Tells the engine where the rseq areas of libc's threads are.
fn tell_rseq(process: &Process) {
    // SAFETY: the names are C strings.
    let [size, offset] = [c"__rseq_size", c"__rseq_offset"]
        .map(|name| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) });
    // SAFETY: null, or constants of libc's of these types.
    let (size, offset) = unsafe { (size.cast::<u32>().as_ref(), offset.cast::<isize>().as_ref()) };
    if let (Some(&size), Some(&offset)) = (size, offset) {
        process.set_rseq(offset, size);
    }
}

/// Tells the engine where libc says that the program has one thread, if it says so anywhere, and how
/// to get the number of the thread that calls.
fn watch_threads(process: &Process) {
    // Another libc has its own mutexes; with it the engine asks the kernel.
    if noted_number() == sys::thread_id() {
        process.set_thread_of_caller(thread_of_caller);
    }
    // SAFETY: the name is a C string.
    let flag = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    // SAFETY: null, or a char of libc's or the program's, which are never unloaded; it is written by
    // plain stores of a byte.
    let flag = unsafe { flag.cast::<AtomicU8>().as_ref() };
    process.watch_single_threaded(flag.unwrap_or(&MAY_HAVE_MANY));
}

/// The flag where libc does not say.
static MAY_HAVE_MANY: AtomicU8 = AtomicU8::new(0);
/// The flag until libc is up, while only the loader's thread runs.
static IS_LOADING: AtomicU8 = AtomicU8::new(1);

// Kept by `used`, called by the loader as any constructor.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;
