//! The frame pool: frames that are not mapped in the program.
//!
//! The pool is address space in windows of 512 places. A place is a hole, a *free* frame (memory
//! whose content nobody needs), a frame in *limbo* (unmapped, its content still a page's), or
//! *taken* by a thread that fills or empties it. Frames enter by a move out of the program and
//! leave by a move in, or by being given back to the kernel; nothing here is ever copied.
//!
//! A window that opens for evicted pages is filled from its start on, then queued: limbo is first
//! in, first out by window. A page found in limbo by a fault leaves it again; that is the second
//! chance.
//!
//! Lock: one mutex over the bitmaps and the lists, held for bit operations only, under a page
//! lock or under nothing.

use rustix_futex_sync::{Mutex, MutexGuard};

use crate::mmu::{FrameId, FrameRun};
use crate::sys::{Errno, memory::Table};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PageNum};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

const WORDS: usize = BLOCK_PAGES / 64;
const NIL: u32 = u32::MAX;

/// What a window is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// All holes, on the stack of empty windows.
    #[default]
    Empty,
    /// Being filled with evicted pages.
    Open,
    /// In the limbo queue.
    Queued,
    /// Taken from the queue by [`FramePool::oldest_window`], whose caller brings it back.
    Draining,
    /// Left the queue; may still have free and taken frames.
    Spent,
}

#[derive(Clone, Copy, Default)]
struct Window {
    free: [u64; WORDS],
    limbo: [u64; WORDS],
    free_count: u32,
    limbo_count: u32,
    taken_count: u32,
    /// Places handed out since the window opened.
    cursor: u32,
    /// Next window in the list of its phase.
    next: u32,
    phase: Phase,
    /// Whether it is on the list of windows that had free frames.
    listed: bool,
    next_free: u32,
}

/// Where a window goes that still has pages in limbo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueEnd {
    /// Next in turn: work on it only stopped.
    Oldest,
    /// Behind all others: what is left in it cannot go now.
    Youngest,
}

/// A table entry behind the pool's mutex.
struct Slot(core::cell::UnsafeCell<Window>);
// SAFETY: only reached through `Lists`, which holds the pool's mutex.
unsafe impl Sync for Slot {}
// SAFETY: an empty window that is on no list is all zeros but for `next`, which `new` sets.
unsafe impl crate::sys::memory::Zeroed for Slot {}

struct Heads {
    empty: u32,
    open: u32,
    limbo_first: u32,
    limbo_last: u32,
    /// Windows in the limbo queue.
    queued: usize,
    free_first: u32,
}

impl Heads {
    const NEW: Heads = Heads {
        empty: NIL,
        open: NIL,
        limbo_first: NIL,
        limbo_last: NIL,
        queued: 0,
        free_first: NIL,
    };
}

/// The frame pool's books. The memory itself is the MMU's.
pub struct FramePool {
    windows: Table<Slot>,
    heads: Mutex<Heads>,
    /// Page whose content a frame in limbo holds.
    owners: Table<AtomicU64>,
    /// Pool handle with the same bytes (0 for none), and what else a page in limbo must keep.
    copies: Table<AtomicU32>,
    free: AtomicUsize,
    limbo: AtomicUsize,
}

/// The books while the mutex is held.
struct Lists<'a> {
    heads: MutexGuard<'a, Heads>,
    windows: &'a [Slot],
}

impl Lists<'_> {
    #[allow(clippy::mut_from_ref, reason = "the mutex in `heads` makes the borrow unique")]
    fn window(&mut self, index: u32) -> &mut Window {
        // SAFETY: `heads` is the pool's mutex, and `&mut self` keeps windows from aliasing.
        unsafe { &mut *self.windows[index as usize].0.get() }
    }

    fn list_free(&mut self, index: u32) {
        let first = self.heads.free_first;
        let window = self.window(index);
        if !window.listed {
            window.listed = true;
            window.next_free = first;
            self.heads.free_first = index;
        }
    }

    /// Takes `len` neighbouring holes of a window that is in use: pages that cannot go may have
    /// settled in every one. Where holes are taken their places are not known, so only windows in
    /// which none is are looked at.
    fn holes_in_between(&mut self, len: usize) -> Option<FrameId> {
        for index in 0..self.windows.len() as u32 {
            let window = self.window(index);
            if !matches!(window.phase, Phase::Queued | Phase::Spent) || window.taken_count > 0 {
                continue;
            }
            let holes = core::array::from_fn(|at| !(window.free[at] | window.limbo[at]));
            let (start, found) = longest_run(&holes, len);
            if found == len {
                window.taken_count += len as u32;
                return Some(FrameId((index << BLOCK_ORDER) + start as u32));
            }
        }
        None
    }

    /// Puts a window at the young end of the limbo queue.
    fn queue(&mut self, index: u32) {
        let window = self.window(index);
        window.phase = Phase::Queued;
        window.next = NIL;
        self.heads.queued += 1;
        let last = core::mem::replace(&mut self.heads.limbo_last, index);
        if last == NIL {
            self.heads.limbo_first = index;
        } else {
            self.window(last).next = index;
        }
    }

    /// Puts a window back on the stack once nothing is in it and nobody fills it.
    fn retire_if_empty(&mut self, index: u32) {
        let empty = self.heads.empty;
        let window = self.window(index);
        if window.phase == Phase::Spent
            && window.free_count + window.limbo_count + window.taken_count == 0
        {
            window.phase = Phase::Empty;
            window.cursor = 0;
            window.next = empty;
            self.heads.empty = index;
        }
    }
}

fn set(bits: &mut [u64; WORDS], at: usize, len: usize, value: bool) {
    for bit in at..at + len {
        let mask = 1u64 << (bit % 64);
        if value {
            bits[bit / 64] |= mask;
        } else {
            bits[bit / 64] &= !mask;
        }
    }
}

fn is_set(bits: &[u64; WORDS], at: usize) -> bool {
    bits[at / 64] >> (at % 64) & 1 != 0
}

/// The first run of up to `most` set bits that is the longest, or long enough.
fn longest_run(bits: &[u64; WORDS], most: usize) -> (usize, usize) {
    let mut best = (0, 0);
    let mut at = 0;
    while at < BLOCK_PAGES {
        if bits[at / 64] >> (at % 64) == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        if !is_set(bits, at) {
            at += 1;
            continue;
        }
        let start = at;
        while at < BLOCK_PAGES && at - start < most && is_set(bits, at) {
            at += 1;
        }
        if at - start > best.1 {
            best = (start, at - start);
            if best.1 == most {
                break;
            }
        }
    }
    best
}

fn window_of(frame: FrameId) -> (u32, usize) {
    (frame.0 >> BLOCK_ORDER, frame.0 as usize % BLOCK_PAGES)
}

impl FramePool {
    /// Books for `frames` places (a multiple of 512).
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new(frames: usize) -> Result<FramePool, Errno> {
        let pool = FramePool {
            windows: Table::new(frames / BLOCK_PAGES)?,
            heads: Mutex::new(Heads::NEW),
            owners: Table::new(frames)?,
            copies: Table::new(frames)?,
            free: AtomicUsize::new(0),
            limbo: AtomicUsize::new(0),
        };
        pool.reset();
        Ok(pool)
    }

    /// Forgets all frames: every place is a hole. For a fork's child, which inherits the books
    /// but not the pool.
    pub fn reset(&self) {
        let mut lists = self.lists();
        *lists.heads = Heads::NEW;
        for index in (0..self.windows.len() as u32).rev() {
            let next = lists.heads.empty;
            *lists.window(index) = Window { next, ..Window::default() };
            lists.heads.empty = index;
        }
        self.free.store(0, Ordering::Relaxed);
        self.limbo.store(0, Ordering::Relaxed);
    }

    fn lists(&self) -> Lists<'_> {
        Lists { heads: self.heads.lock(), windows: &self.windows }
    }

    /// Free frames.
    #[must_use]
    pub fn free(&self) -> usize {
        // Relaxed: a hint; the bitmaps decide.
        self.free.load(Ordering::Relaxed)
    }

    /// Frames in limbo.
    #[must_use]
    pub fn limbo(&self) -> usize {
        self.limbo.load(Ordering::Relaxed)
    }

    /// Takes up to `most` neighbouring free frames.
    pub fn take(&self, most: usize) -> Option<FrameRun> {
        if most == 0 || self.free() == 0 {
            return None;
        }
        let mut lists = self.lists();
        loop {
            let index = lists.heads.free_first;
            if index == NIL {
                return None;
            }
            let window = lists.window(index);
            let (start, len) = longest_run(&window.free, most);
            if len > 0 {
                set(&mut window.free, start, len, false);
                window.free_count -= len as u32;
                window.taken_count += len as u32;
                self.free.fetch_sub(len, Ordering::Relaxed);
                let start = FrameId((index << BLOCK_ORDER) + start as u32);
                return Some(FrameRun { start, len });
            }
            window.listed = false;
            lists.heads.free_first = lists.window(index).next_free;
            lists.retire_if_empty(index);
        }
    }

    /// Gives taken frames back as free ones.
    pub fn put(&self, run: FrameRun) {
        if run.len == 0 {
            return;
        }
        let (index, start) = window_of(run.start);
        let mut lists = self.lists();
        let window = lists.window(index);
        debug_assert!(window.taken_count as usize >= run.len);
        set(&mut window.free, start, run.len, true);
        window.free_count += run.len as u32;
        window.taken_count -= run.len as u32;
        self.free.fetch_add(run.len, Ordering::Relaxed);
        lists.list_free(index);
    }

    /// Says that taken frames have left: their places are holes.
    pub fn consume(&self, run: FrameRun) {
        if run.len == 0 {
            return;
        }
        let (index, _) = window_of(run.start);
        let mut lists = self.lists();
        lists.window(index).taken_count -= run.len as u32;
        lists.retire_if_empty(index);
    }

    /// Takes `len` neighbouring holes (512 at most) for pages that are about to be evicted.
    pub fn take_holes(&self, len: usize) -> Option<FrameId> {
        debug_assert!(0 < len && len <= BLOCK_PAGES);
        let mut lists = self.lists();
        let open = lists.heads.open;
        if open != NIL && lists.window(open).cursor as usize + len > BLOCK_PAGES {
            Self::queue_open(&mut lists);
        }
        if lists.heads.open == NIL {
            let index = lists.heads.empty;
            if index == NIL {
                return lists.holes_in_between(len);
            }
            lists.heads.empty = lists.window(index).next;
            let window = lists.window(index);
            window.phase = Phase::Open;
            window.cursor = 0;
            lists.heads.open = index;
        }
        let index = lists.heads.open;
        let window = lists.window(index);
        let start = window.cursor;
        window.cursor += len as u32;
        window.taken_count += len as u32;
        Some(FrameId((index << BLOCK_ORDER) + start))
    }

    fn queue_open(lists: &mut Lists<'_>) {
        let index = core::mem::replace(&mut lists.heads.open, NIL);
        if index == NIL {
            return;
        }
        lists.queue(index);
    }

    /// Notes whose page a taken place holds now, and the pool copy that came with it (0: none).
    /// [`Self::enter_limbo`] follows, before the owner is unlocked.
    pub fn set_owner(&self, frame: FrameId, owner: PageNum, copy: u32) {
        // Relaxed: read under the owner's page lock, which is held now.
        self.owners[frame.0 as usize].store(owner.0, Ordering::Relaxed);
        self.copies[frame.0 as usize].store(copy, Ordering::Relaxed);
    }

    /// Says what became of taken places after a move out: those for which `is_filled` says so are
    /// in limbo, the others are holes again.
    pub fn enter_limbo(&self, run: FrameRun, is_filled: impl Fn(usize) -> bool) {
        let (index, start) = window_of(run.start);
        let mut lists = self.lists();
        let window = lists.window(index);
        let mut filled = 0;
        for at in (0..run.len).filter(|&at| is_filled(at)) {
            set(&mut window.limbo, start + at, 1, true);
            filled += 1;
        }
        window.limbo_count += filled as u32;
        window.taken_count -= run.len as u32;
        let is_unlisted = window.phase == Phase::Spent && filled > 0;
        self.limbo.fetch_add(filled, Ordering::Relaxed);
        if is_unlisted {
            // The queue had done with the window before these pages came.
            lists.queue(index);
        }
        lists.retire_if_empty(index);
    }

    /// Takes frames out of limbo; the caller holds their owners' page locks.
    pub fn leave_limbo(&self, run: FrameRun) {
        let (index, start) = window_of(run.start);
        let mut lists = self.lists();
        let window = lists.window(index);
        debug_assert!((start..start + run.len).all(|at| is_set(&window.limbo, at)));
        set(&mut window.limbo, start, run.len, false);
        window.limbo_count -= run.len as u32;
        window.taken_count += run.len as u32;
        self.limbo.fetch_sub(run.len, Ordering::Relaxed);
    }

    /// The pool copy that a page in limbo brought along, 0 for none.
    pub fn copy_of(&self, frame: FrameId) -> u32 {
        self.copies[frame.0 as usize].load(Ordering::Relaxed)
    }

    /// The page whose content a frame in limbo holds (or held: check under its lock).
    pub fn owner_of(&self, frame: FrameId) -> PageNum {
        PageNum(self.owners[frame.0 as usize].load(Ordering::Relaxed))
    }

    /// The oldest window in limbo, taken from the queue. Where only the open window is left, that.
    pub fn oldest_window(&self) -> Option<u32> {
        let mut lists = self.lists();
        if lists.heads.limbo_first == NIL {
            let open = lists.heads.open;
            if open == NIL || lists.window(open).limbo_count == 0 {
                return None;
            }
            Self::queue_open(&mut lists);
        }
        let index = lists.heads.limbo_first;
        let next = lists.window(index).next;
        lists.heads.limbo_first = next;
        if next == NIL {
            lists.heads.limbo_last = NIL;
        }
        lists.window(index).phase = Phase::Draining;
        lists.heads.queued -= 1;
        Some(index)
    }

    /// Windows in the queue.
    pub fn queued_windows(&self) -> usize {
        self.lists().heads.queued
    }

    /// Queues the window that is being filled, if anything is in it.
    pub fn close_window(&self) -> bool {
        let mut lists = self.lists();
        let open = lists.heads.open;
        let has_any = open != NIL && lists.window(open).limbo_count > 0;
        if has_any {
            Self::queue_open(&mut lists);
        }
        has_any
    }

    /// Ends work on a window that [`Self::oldest_window`] gave: what is still in limbo there is
    /// queued again, at `end`.
    pub fn return_window(&self, index: u32, end: QueueEnd) {
        let mut lists = self.lists();
        debug_assert_eq!(lists.window(index).phase, Phase::Draining);
        if lists.window(index).limbo_count == 0 {
            lists.window(index).phase = Phase::Spent;
            lists.retire_if_empty(index);
            return;
        }
        match end {
            QueueEnd::Oldest => {
                lists.heads.queued += 1;
                let first = core::mem::replace(&mut lists.heads.limbo_first, index);
                let window = lists.window(index);
                window.phase = Phase::Queued;
                window.next = first;
                if first == NIL {
                    lists.heads.limbo_last = index;
                }
            }
            QueueEnd::Youngest => lists.queue(index),
        }
    }

    /// The frames of a window that are in limbo just now, as bits.
    pub fn limbo_bits(&self, index: u32) -> [u64; WORDS] {
        self.lists().window(index).limbo
    }

    /// Checks the books against themselves (I5: every place is in one state).
    #[cfg(any(test, debug_assertions))]
    pub fn check(&self) {
        let mut lists = self.lists();
        let (mut free, mut limbo) = (0, 0);
        for index in 0..lists.windows.len() as u32 {
            let window = lists.window(index);
            for word in 0..WORDS {
                assert_eq!(window.free[word] & window.limbo[word], 0);
            }
            let count = |bits: &[u64; WORDS]| bits.iter().map(|w| w.count_ones()).sum::<u32>();
            assert_eq!(window.free_count, count(&window.free));
            assert_eq!(window.limbo_count, count(&window.limbo));
            if window.phase == Phase::Empty {
                assert_eq!(window.free_count + window.limbo_count + window.taken_count, 0);
            }
            assert!(window.phase != Phase::Spent || window.limbo_count == 0, "limbo out of reach");
            free += window.free_count as usize;
            limbo += window.limbo_count as usize;
        }
        assert_eq!((free, limbo), (self.free(), self.limbo()));
        let mut queued = 0;
        let mut at = lists.heads.limbo_first;
        while at != NIL {
            assert_eq!(lists.window(at).phase, Phase::Queued);
            assert!(lists.window(at).next != NIL || lists.heads.limbo_last == at);
            at = lists.window(at).next;
            queued += 1;
            assert!(queued <= lists.windows.len(), "the limbo queue has a loop");
        }
        assert_eq!(queued, lists.heads.queued);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evict(pool: &FramePool, len: usize) -> FrameId {
        let frame = pool.take_holes(len).unwrap();
        for at in 0..len {
            pool.set_owner(frame.add(at), PageNum(at as u64), 0);
        }
        pool.enter_limbo(FrameRun { start: frame, len }, |_| true);
        frame
    }

    #[test]
    fn limbo_is_first_in_first_out_by_window() {
        let pool = FramePool::new(4 * BLOCK_PAGES).unwrap();
        let first = evict(&pool, 512);
        evict(&pool, 512);
        let window = pool.oldest_window().unwrap();
        assert_eq!(window, first.0 >> BLOCK_ORDER);
        pool.leave_limbo(FrameRun { start: first, len: 512 });
        pool.put(FrameRun { start: first, len: 512 });
        pool.return_window(window, QueueEnd::Youngest);
        assert_eq!((pool.free(), pool.limbo()), (512, 512));
        pool.check();
    }

    #[test]
    fn a_window_whose_frames_have_left_is_used_again() {
        let pool = FramePool::new(2 * BLOCK_PAGES).unwrap();
        for _ in 0..10 {
            let frame = evict(&pool, 300);
            let window = pool.oldest_window().unwrap();
            pool.leave_limbo(FrameRun { start: frame, len: 300 });
            pool.put(FrameRun { start: frame, len: 300 });
            pool.return_window(window, QueueEnd::Youngest);
            let mut left = 300;
            while left > 0 {
                let run = pool.take(left).unwrap();
                pool.consume(run);
                left -= run.len;
            }
            pool.check();
        }
        assert!(pool.take(1).is_none());
    }

    #[test]
    fn a_window_that_empties_while_it_is_drained_is_not_opened_until_it_comes_back() {
        let pool = FramePool::new(2 * BLOCK_PAGES).unwrap();
        let frame = evict(&pool, 10);
        let window = pool.oldest_window().unwrap();
        let run = FrameRun { start: frame, len: 10 };
        // Faults take every page of it back meanwhile.
        pool.leave_limbo(run);
        pool.consume(run);
        assert_ne!(evict(&pool, 10).0 >> BLOCK_ORDER, window);
        pool.return_window(window, QueueEnd::Youngest);
        pool.check();
    }

    #[test]
    fn pages_that_enter_limbo_after_their_window_left_the_queue_are_queued() {
        let pool = FramePool::new(4 * BLOCK_PAGES).unwrap();
        let late = pool.take_holes(10).unwrap();
        evict(&pool, 512);
        let window = pool.oldest_window().unwrap();
        assert_eq!(window, late.0 >> BLOCK_ORDER);
        pool.return_window(window, QueueEnd::Youngest);
        pool.enter_limbo(FrameRun { start: late, len: 10 }, |_| true);
        pool.check();
    }

    #[test]
    fn nothing_is_taken_where_nothing_is_wanted() {
        let pool = FramePool::new(BLOCK_PAGES).unwrap();
        let start = evict(&pool, 10);
        let run = FrameRun { start, len: 10 };
        pool.leave_limbo(run);
        pool.put(run);
        assert!(pool.take(0).is_none());
        assert_eq!(pool.free(), 10);
    }

    #[test]
    fn the_longest_run_is_found_across_words() {
        let mut bits = [0; WORDS];
        set(&mut bits, 3, 5, true);
        set(&mut bits, 60, 70, true);
        assert_eq!(longest_run(&bits, 512), (60, 70));
        assert_eq!(longest_run(&bits, 4), (3, 4));
    }
}
