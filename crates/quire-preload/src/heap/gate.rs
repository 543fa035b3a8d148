//! The heap's gate: at a fork no other thread is in the middle of a change of the heap.
//!
//! The child of a fork has one thread and a copy of everything. What another thread had under way (a
//! lock held, a bit of a bitmap just cleared, a page just taken) would never be completed there.
//! mimalloc has no handler for fork, and to take its locks would not be enough, for most of its state
//! is lock-free.
//!
//! So every thread has a slot: a word that is 1 while the thread is inside the heap (set and
//! cleared by heap.c, which has the fast path). To fork is to close the gate, to wait until every
//! other slot is 0, and to open it again, in the parent and in the child. The thread that forks may
//! allocate all the while: fork handlers do.
//!
//! A signal's handler may fork where it has interrupted the heap itself. Such a thread cannot leave
//! the heap before its fork is over, so a thread that has closed the gate and finds it waiting lets it
//! go first. Two such threads would wait for each other: the one that has the gate is refused its fork.
//!
//! Owns the slots, in pages of the kernel's that are never given back. Lock order: the gate is
//! closed before the engine's own gate, since a thread inside the heap may have to pass that one
//! (it maps memory, or waits for a page) before it leaves the heap.

use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering, fence};

use crate::sys;

/// A thread's place; a cache line of its own, since the thread writes it at every call.
#[repr(C, align(64))]
struct Slot {
    /// [`INSIDE`] while the thread is inside the heap. First: heap.c sees the slot as this word.
    inside: AtomicU32,
    /// The thread that has the slot, 0 for none.
    thread: AtomicU32,
}

/// The thread is inside the heap.
const INSIDE: u32 = 1;
/// It is inside, and a handler that interrupted it there waits for the gate, to fork.
const STUCK: u32 = 2;

/// What became of closing the gate.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Closing {
    /// It is closed, and no other thread is inside.
    Closed,
    /// Handlers of two threads have interrupted the heap, and each would wait for the other.
    Refused,
}

/// Slots in a page, beside the link.
const CHUNK_SLOTS: usize = sys::PAGE / size_of::<Slot>() - 1;

/// A page of slots.
#[repr(C, align(4096))]
struct Chunk {
    next: AtomicPtr<Chunk>,
    slots: [Slot; CHUNK_SLOTS],
}

const _: () = assert!(size_of::<Chunk>() == sys::PAGE);

/// The newest page of slots; pages are only ever added, in front.
static CHUNKS: AtomicPtr<Chunk> = AtomicPtr::new(core::ptr::null_mut());
/// The slot of the thread that closed it; its thread id would be another one in the child.
static CLOSER: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
/// How often the closer has closed it: a fork handler may fork. Written by the closer only.
static DEPTH: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    /// The calling thread's slot.
    safe fn quire_heap_gate_slot() -> *mut AtomicU32;
    /// 1 while the gate is closed; a futex.
    #[link_name = "quire_heap_gate_closed"]
    safe static CLOSED: AtomicU32;
}

fn chunks() -> impl Iterator<Item = &'static Chunk> {
    // Acquire: pairs with the release in `add_chunk`.
    let mut at = CHUNKS.load(Ordering::Acquire);
    core::iter::from_fn(move || {
        // SAFETY: null, or a page that `add_chunk` mapped and linked; such pages stay for ever.
        let chunk = unsafe { at.as_ref() }?;
        at = chunk.next.load(Ordering::Acquire);
        Some(chunk)
    })
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    chunks().flat_map(|chunk| chunk.slots.iter())
}

/// Maps the first page of slots while there is room for it: the program may lower its limits before
/// it allocates.
pub fn start() {
    add_chunk(0);
}

/// Maps a page of slots with the first one taken by `thread`, and links it.
fn add_chunk(thread: u32) -> &'static Slot {
    let Some(page) = sys::map_unmanaged(sys::PAGE) else {
        // Without a slot the thread cannot allocate safely, and no caller could be told.
        std::process::abort();
    };
    // SAFETY: a fresh page of zeros, which is a valid Chunk, and is never unmapped.
    let chunk: &'static Chunk = unsafe { &*(page as *const Chunk) };
    chunk.slots[0].thread.store(thread, Ordering::Relaxed);
    let mut head = CHUNKS.load(Ordering::Relaxed);
    loop {
        chunk.next.store(head, Ordering::Relaxed);
        let new = core::ptr::from_ref(chunk).cast_mut();
        // Release: pairs with the acquire in `chunks`.
        match CHUNKS.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return &chunk.slots[0],
            Err(now) => head = now,
        }
    }
}

/// Whether `thread` of this process has ended.
fn is_dead(thread: u32) -> bool {
    let process = rustix::process::getpid().as_raw_pid() as usize;
    // SAFETY: signal 0 only asks.
    let result = unsafe { sys::call(libc::SYS_tgkill, [process, thread as usize, 0]) };
    result == Err(rustix::io::Errno::SRCH)
}

/// Gives the calling thread a slot: a free one, or that of a thread which ended without giving it
/// back (it freed something after its last destructor), or a new one.
pub extern "C" fn register() -> *mut AtomicU32 {
    let me = sys::thread_id();
    // Acquire: pairs with the release in `release`: `inside` is 0.
    let take = |slot: &Slot, from: u32| {
        slot.thread.compare_exchange(from, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    let free = slots().find(|slot| slot.thread.load(Ordering::Relaxed) == 0 && take(slot, 0));
    let slot = free
        .or_else(|| {
            slots().find(|slot| {
                let thread = slot.thread.load(Ordering::Relaxed);
                thread != 0 && thread != me && is_dead(thread) && take(slot, thread)
            })
        })
        .unwrap_or_else(|| add_chunk(me));
    core::ptr::from_ref(&slot.inside).cast_mut()
}

/// Takes back the slot that `register` gave to the calling thread, which ends.
pub extern "C" fn release(slot: *mut AtomicU32) {
    // SAFETY: `inside` is the first field of a Slot, and slots are never unmapped.
    let slot = unsafe { &*slot.cast::<Slot>() };
    // Release: pairs with the acquire in `register`.
    slot.thread.store(0, Ordering::Release);
}

/// The calling thread found the gate closed right after it entered: it leaves, waits until the gate
/// is open, and enters again. The closer itself goes through.
pub extern "C" fn wait(slot: *mut AtomicU32) {
    // Acquire: a thread that is not the closer can only see another thread's slot or null here.
    if CLOSER.load(Ordering::Acquire) == slot {
        return;
    }
    // SAFETY: slots are never unmapped.
    let inside = unsafe { &*slot };
    let _kept = crate::ErrnoKept::new();
    loop {
        // Release: pairs with the acquire in `close`.
        inside.store(0, Ordering::Release);
        while CLOSED.load(Ordering::Acquire) != 0 {
            sys::futex_wait(&CLOSED, 1);
        }
        inside.store(INSIDE, Ordering::Relaxed);
        // Either we see the gate closed again below, or the closer sees our slot.
        fence(Ordering::SeqCst);
        if CLOSED.load(Ordering::Acquire) == 0 {
            return;
        }
    }
}

/// Closes the gate and waits until the calling thread is the only one inside the heap. To be
/// called before a fork, and before the engine stops for it, with every signal blocked.
pub fn close() -> Closing {
    let mine = quire_heap_gate_slot();
    // Relaxed: equal only if this very thread wrote it.
    if CLOSER.load(Ordering::Relaxed) == mine {
        DEPTH.fetch_add(1, Ordering::Relaxed);
        return Closing::Closed;
    }
    // SAFETY: slots are never unmapped.
    let inside = unsafe { &*mine };
    // Relaxed: only this thread writes it.
    let is_inside = inside.load(Ordering::Relaxed) != 0;
    loop {
        if is_inside {
            // Release: the thread that closed the gate lets us go first; its acquire is in `empty`.
            inside.store(STUCK, Ordering::Release);
        }
        // Acquire: pairs with the release in `open`; one closer at a time.
        while CLOSED.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            sys::futex_wait(&CLOSED, 1);
        }
        if is_inside {
            inside.store(INSIDE, Ordering::Release);
        }
        CLOSER.store(mine, Ordering::Release);
        barrier_in_all_threads();
        if empty(mine) {
            return Closing::Closed;
        }
        open();
        if is_inside {
            return Closing::Refused;
        }
        // Threads that cannot leave get the gate before we ask for it again.
        let is_stuck = |slot: &Slot| slot.inside.load(Ordering::Acquire) == STUCK;
        let mut turns = 0;
        while slots().any(is_stuck) {
            pause(&mut turns);
        }
    }
}

/// Waits until no thread is inside the heap but that of the slot `mine`. `false`: a thread cannot
/// leave before it has had the gate.
fn empty(mine: *const AtomicU32) -> bool {
    for slot in slots().filter(|slot| !core::ptr::eq(&slot.inside, mine)) {
        let mut turns = 0;
        loop {
            // Acquire: pairs with the release in heap.c's `gate_leave`, and in `close`.
            match slot.inside.load(Ordering::Acquire) {
                0 => break,
                STUCK => return false,
                _ => pause(&mut turns),
            }
        }
    }
    true
}

/// A thread that leaves makes no call, so it wakes none. A short stay is waited for by yielding, a page
/// that is read from swap by sleeping.
fn pause(turns: &mut u32) {
    *turns += 1;
    if *turns < 100 {
        rustix::thread::sched_yield();
    } else {
        let pause = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 100_000 };
        let _ = rustix::thread::nanosleep(&pause);
    }
}

/// Opens the gate: in the parent after a fork, or after one that failed.
pub fn open() {
    if DEPTH.load(Ordering::Relaxed) > 0 {
        DEPTH.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    CLOSER.store(core::ptr::null_mut(), Ordering::Release);
    // Release: pairs with the acquire loads of all threads that wait.
    CLOSED.store(0, Ordering::Release);
    sys::futex_wake_all(&CLOSED);
}

/// Opens the gate in the child of a fork: the other threads are not there any more.
pub fn open_in_child() {
    let mine = CLOSER.load(Ordering::Relaxed);
    if DEPTH.load(Ordering::Relaxed) == 0 {
        for slot in slots() {
            let is_mine = core::ptr::eq(&slot.inside, mine);
            // Relaxed: the child has one thread.
            slot.thread.store(if is_mine { sys::thread_id() } else { 0 }, Ordering::Relaxed);
            if !is_mine {
                slot.inside.store(0, Ordering::Relaxed);
            }
        }
    }
    open();
}

/// Makes every thread of the process execute a full barrier.
fn barrier_in_all_threads() {
    const PRIVATE_EXPEDITED: usize = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: usize = 1 << 4;
    // SAFETY: membarrier touches no memory.
    let membarrier = |command| unsafe { sys::call(libc::SYS_membarrier, [command]) };
    // The first call of a process has to say that it will use this.
    if membarrier(PRIVATE_EXPEDITED).is_ok()
        || membarrier(REGISTER_PRIVATE_EXPEDITED)
            .and_then(|_| membarrier(PRIVATE_EXPEDITED))
            .is_ok()
    {
        return;
    }
    // A sandbox refuses the call. A store leaves a CPU's store buffer in well under a microsecond.
    let pause = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let _ = rustix::thread::nanosleep(&pause);
}
