//! The lock order: every lock of the engine has a rank, and a thread only sleeps for a lock of a
//! higher rank than all that it holds.
//!
//! A lock that is only tried may have any rank, because no thread waits for it. Builds with debug assertions
//! record what each thread holds, and panic with both ranks where a thread sleeps out of order, whether or
//! not the lock was taken at that moment. In other builds every function here is empty.
//!
//! What a thread holds is found by its number and not by a thread-local: engine threads have none.

#![deny(unsafe_code)]

use core::fmt::Debug;

/// A rank as a type, for a mutex that is declared with it.
pub trait Ranked {
    const RANK: Rank;
}

macro_rules! ranks {
    ($($(#[$doc:meta])* $Name:ident,)*) => {
        /// What a lock guards, outermost first.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Rank {
            $($(#[$doc])* $Name,)*
        }

        impl Rank {
            /// All ranks, outermost first.
            pub const ALL: &[Rank] = &[$(Rank::$Name,)*];
        }

        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub enum $Name {}

            impl Ranked for $Name {
                const RANK: Rank = Rank::$Name;
            }
        )*
    };
}

// The gate of quire-preload's heap is outside of all of these; a fork closes it first.
ranks! {
    /// An object's changes of length.
    Resize,
    /// The turn of an object's syncs, held while the store works.
    SyncTurn,
    /// The stack of the engine's for calls of threads whose own is managed memory.
    CallStack,
    /// The space's lock, held alone: program threads, and the sender of a proxy call.
    Layout,
    /// The space's lock, shared by classic faults, which only try it; a changer waits until they have left.
    LayoutFaults,
    /// The engine's gate: a fork closes it, engine threads are inside. They enter it with nothing
    /// held.
    EngineGate,
    /// The writing side of the swap file (kswapd only).
    SwapWriting,
    /// The registry of objects: a thread that opens or closes an object holds it, and reclaim for
    /// one block at a time.
    Registry,
    /// Page locks. Handlers park at the first one, reclaim tries it, layout calls sleep for it. Any
    /// further ones are only tried, in any order; but a remap sleeps for two, because no other thread
    /// knows the target yet.
    Page,
    /// A buffer of a read in place, only ever tried.
    InPlaceBuffer,
    /// The reverse map of an object. Reclaim only tries it, faults never take it.
    IMmap,
    /// A window, one at a time. Under it page locks of objects are only tried.
    Window,
    /// The queue of requests to the store workers.
    Requests,
    /// Free numbers of mappings and private copies, and of nodes of the reverse maps.
    Numbers,
    /// How programs stride through objects.
    Strides,
    /// Pages that were refused the way out.
    Refused,
    /// Free blocks of words for objects' pages.
    PageBlocks,
    FramePool,
    /// A class of the compressed pool, one at a time.
    ZpoolClass,
    /// The positions of reclaim's hands.
    Clock,
    /// A context that unpacks.
    Unpacker,
    ReadQueue,
    /// What the userfaultfd is registered for.
    Modes,
    /// The spare mappings, held over the one call that they are given up for.
    Spares,
    /// A queue of waiters. They are woken and called outside of it.
    Waiters,
    FaultList,
}

/// The calling thread is going to sleep for a lock, if it is taken.
///
/// # Panics
/// With debug assertions, where the thread holds a lock that is not outside of this one.
#[inline]
pub(crate) fn sleeps_for(rank: Rank) {
    #[cfg(debug_assertions)]
    record::sleeps_for(rank);
    #[cfg(not(debug_assertions))]
    let _ = rank;
}

/// The calling thread has taken `count` locks of a rank, or was handed them.
#[inline]
pub(crate) fn taken(rank: Rank, count: usize) {
    #[cfg(debug_assertions)]
    record::change(rank, count as i32);
    #[cfg(not(debug_assertions))]
    let _ = (rank, count);
}

/// The calling thread has given back `count` locks of a rank, or handed them to another.
#[inline]
pub(crate) fn released(rank: Rank, count: usize) {
    #[cfg(debug_assertions)]
    record::change(rank, -(count as i32));
    #[cfg(not(debug_assertions))]
    let _ = (rank, count);
}

/// In a fork's child, before any other thread runs there: nothing is known of what is held.
pub(crate) fn after_fork_in_child() {
    #[cfg(debug_assertions)]
    record::forget_all();
}

/// Locks of a rank that the calling thread holds.
#[cfg(debug_assertions)]
pub(crate) fn held(rank: Rank) -> usize {
    record::held(rank)
}

/// Forgets what the calling thread holds, and returns the outermost of it: a thread that ends with
/// locks held, because it panics, leaves its number to another.
#[cfg(all(debug_assertions, feature = "simulated"))]
pub(super) fn forget() -> Option<Rank> {
    record::forget()
}

#[cfg(debug_assertions)]
mod record {
    use core::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

    use super::Rank;
    use crate::sys::thread::thread_id;

    /// Threads that can be recorded at a time; what more threads hold is not checked.
    const THREADS_MAX: usize = 1024;
    /// Records that are looked at for a thread.
    const TRIES: usize = 16;

    /// What a thread holds. All of it is relaxed: only that thread reads what it has written.
    struct ThreadLocks {
        /// 0 where the record is free.
        thread: AtomicU32,
        held: [AtomicI32; Rank::ALL.len()],
    }

    static RECORDS: [ThreadLocks; THREADS_MAX] = [const {
        ThreadLocks {
            thread: AtomicU32::new(0),
            held: [const { AtomicI32::new(0) }; Rank::ALL.len()],
        }
    }; THREADS_MAX];

    fn records(thread: u32) -> impl Iterator<Item = &'static ThreadLocks> {
        (0..TRIES).map(move |at| &RECORDS[(thread as usize + at) % THREADS_MAX])
    }

    fn find(thread: u32) -> Option<&'static ThreadLocks> {
        records(thread).find(|record| record.thread.load(Relaxed) == thread)
    }

    fn claim(thread: u32) -> Option<&'static ThreadLocks> {
        records(thread)
            .find(|record| record.thread.compare_exchange(0, thread, Relaxed, Relaxed).is_ok())
    }

    #[track_caller]
    pub fn sleeps_for(rank: Rank) {
        let Some(record) = find(thread_id()) else { return };
        for &outer in Rank::ALL {
            let is_held = record.held[outer as usize].load(Relaxed) > 0;
            let may = outer < rank || (outer, rank) == (Rank::Page, Rank::Page);
            assert!(!is_held || may, "a thread that holds {outer:?} sleeps for {rank:?}");
        }
    }

    pub fn change(rank: Rank, change: i32) {
        let thread = thread_id();
        let record = find(thread).or_else(|| (change > 0).then(|| claim(thread)).flatten());
        let Some(record) = record else { return };
        let held = &record.held[rank as usize];
        // A fork's child gives back what its parent had taken.
        held.store((held.load(Relaxed) + change).max(0), Relaxed);
        if record.held.iter().all(|held| held.load(Relaxed) == 0) {
            record.thread.store(0, Relaxed);
        }
    }

    pub fn held(rank: Rank) -> usize {
        find(thread_id()).map_or(0, |record| record.held[rank as usize].load(Relaxed) as usize)
    }

    fn clear(record: &ThreadLocks) {
        record.held.iter().for_each(|held| held.store(0, Relaxed));
        record.thread.store(0, Relaxed);
    }

    #[cfg(feature = "simulated")]
    pub fn forget() -> Option<Rank> {
        let record = find(thread_id())?;
        let outermost = |&&rank: &&Rank| record.held[rank as usize].load(Relaxed) > 0;
        let held = Rank::ALL.iter().find(outermost).copied();
        clear(record);
        held
    }

    pub fn forget_all() {
        RECORDS.iter().for_each(clear);
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::super::mutex::Mutex;
    use super::{Clock, Rank, Registry, held, released, sleeps_for, taken};

    #[test]
    #[should_panic(expected = "a thread that holds Clock sleeps for Registry")]
    fn to_sleep_for_an_outer_lock_with_an_inner_one_held_is_a_panic() {
        let (outer, inner) = (Mutex::<Registry, _>::new(()), Mutex::<Clock, _>::new(()));
        let _inner = inner.try_lock();
        let _outer = outer.lock();
    }

    #[test]
    #[should_panic(expected = "a thread that holds Window sleeps for Window")]
    fn to_sleep_for_a_second_lock_of_a_rank_is_a_panic() {
        taken(Rank::Window, 1);
        sleeps_for(Rank::Window);
    }

    #[test]
    fn locks_are_taken_in_order_and_tried_in_any() {
        let all = || [Rank::Registry, Rank::Page, Rank::Clock].map(held);
        let (registry, clock) = (Mutex::<Registry, _>::new(()), Mutex::<Clock, _>::new(()));
        let outer = registry.lock();
        for pages in 1..=2 {
            sleeps_for(Rank::Page);
            taken(Rank::Page, 1);
            assert_eq!(held(Rank::Page), pages);
        }
        let inner = clock.lock();
        assert_eq!(all(), [1, 2, 1]);
        drop(outer);
        assert_eq!(all(), [0, 2, 1]);
        assert!(registry.try_lock().is_some(), "it is tried, and no thread waits");
        released(Rank::Page, 2);
        drop(inner);
        assert_eq!(all(), [0; 3]);
    }
}
