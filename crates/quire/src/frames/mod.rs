//! The frame pool: frames that are not mapped in the program.
//!
//! The pool is address space in windows of 512 places. A place is a hole, a *free* frame (memory
//! whose content is not needed), a frame in *limbo* (unmapped, its content still a page's), or
//! *taken* by a thread that fills or empties it. Frames enter by a move out of the program and
//! leave by a move in, or by being given back to the kernel; nothing here is ever copied.
//!
//! A window that opens for evicted pages is filled from its start on, then queued: limbo is first
//! in, first out by window. A page found in limbo by a fault leaves it again; that is the second
//! chance.
//!
//! Lock: one mutex over the bitmaps and the lists, held for bit operations only, under a page
//! lock or under nothing.

#![deny(unsafe_code)]

mod bits;
mod limbo;

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use self::bits::{clear, longest_run, set};
pub use self::limbo::QueueEnd;
use crate::mmu::{FrameId, FrameRun};
use crate::sys::memory::{Table, zeroed};
use crate::sys::mutex::Mutex;
use crate::sys::{Errno, rank};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES};

const WORDS: usize = BLOCK_PAGES / 64;
const NIL: u32 = u32::MAX;

/// What a window is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// All holes: on the stack of empty windows, or untouched.
    #[default]
    Empty,
    /// Being filled with evicted pages.
    Open,
    Queued,
    /// Taken from the queue by [`FramePool::oldest_window`], whose caller brings it back.
    Draining,
    /// Left the queue; may still have free and taken frames.
    Spent,
}

#[derive(Clone, Copy, Default)]
struct FrameWindow {
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

zeroed!(Phase = Empty);
zeroed!(FrameWindow {
    free,
    limbo,
    free_count,
    limbo_count,
    taken_count,
    cursor,
    next,
    phase,
    listed,
    next_free,
});

struct Heads {
    /// Windows from here on are holes, whatever their entries say: none was used yet.
    untouched: u32,
    empty: u32,
    open: u32,
    limbo_first: u32,
    limbo_last: u32,
    queued: usize,
    free_first: u32,
}

impl Heads {
    const NEW: Heads = Heads {
        untouched: 0,
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
    books: Mutex<rank::FramePool, Books>,
    /// Page whose content a frame in limbo holds.
    owners: Table<AtomicU64>,
    free: AtomicUsize,
    limbo: AtomicUsize,
}

struct Books {
    windows: Table<FrameWindow>,
    heads: Heads,
}

impl Books {
    fn window(&mut self, index: u32) -> &mut FrameWindow {
        &mut self.windows[index as usize]
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
        for index in 0..self.heads.untouched {
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

    /// Puts the open window into the limbo queue, if there is one.
    fn queue_open(&mut self) {
        let index = core::mem::replace(&mut self.heads.open, NIL);
        if index != NIL {
            self.queue(index);
        }
    }

    /// Puts the open window into the limbo queue, if anything is in it.
    fn close_open(&mut self) -> bool {
        let open = self.heads.open;
        let has_any = open != NIL && self.window(open).limbo_count > 0;
        if has_any {
            self.queue_open();
        }
        has_any
    }

    /// Takes a window of holes: one that was used before, as long as there is one.
    fn take_empty(&mut self) -> Option<u32> {
        let index = self.heads.empty;
        if index != NIL {
            self.heads.empty = self.window(index).next;
            return Some(index);
        }
        let index = self.heads.untouched;
        if index as usize == self.windows.len() {
            return None;
        }
        self.heads.untouched += 1;
        *self.window(index) = FrameWindow::default();
        Some(index)
    }

    /// Puts a window back on the stack once nothing is in it and no thread fills it.
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

fn window_of(frame: FrameId) -> (u32, usize) {
    (frame.0 >> BLOCK_ORDER, frame.0 as usize % BLOCK_PAGES)
}

impl FramePool {
    /// Books for `frames` places (a multiple of 512).
    pub fn new(frames: usize) -> Result<FramePool, Errno> {
        let windows = Table::new(frames / BLOCK_PAGES)?;
        Ok(FramePool {
            books: Mutex::new(Books { windows, heads: Heads::NEW }),
            owners: Table::new(frames)?,
            free: AtomicUsize::new(0),
            limbo: AtomicUsize::new(0),
        })
    }

    /// Forgets all frames: every place is a hole. For a fork's child, which inherits the books
    /// but not the pool.
    pub fn reset(&self) {
        self.books.lock().heads = Heads::NEW;
        self.free.store(0, Ordering::Relaxed);
        self.limbo.store(0, Ordering::Relaxed);
    }

    pub fn free(&self) -> usize {
        // Relaxed: a hint; the bitmaps decide.
        self.free.load(Ordering::Relaxed)
    }

    /// Windows that were ever used: those that have a page table.
    pub(crate) fn windows_touched(&self) -> u64 {
        self.books.lock().heads.untouched.into()
    }

    pub fn limbo(&self) -> usize {
        self.limbo.load(Ordering::Relaxed)
    }

    pub fn take(&self, most: usize) -> Option<FrameRun> {
        if most == 0 || self.free() == 0 {
            return None;
        }
        let mut books = self.books.lock();
        loop {
            let index = books.heads.free_first;
            if index == NIL {
                return None;
            }
            let window = books.window(index);
            let (start, len) = longest_run(&window.free, most);
            if len > 0 {
                clear(&mut window.free, start, len);
                window.free_count -= len as u32;
                window.taken_count += len as u32;
                self.free.fetch_sub(len, Ordering::Relaxed);
                let start = FrameId((index << BLOCK_ORDER) + start as u32);
                return Some(FrameRun { start, len });
            }
            window.listed = false;
            books.heads.free_first = books.window(index).next_free;
            books.retire_if_empty(index);
        }
    }

    /// Gives taken frames back as free ones.
    pub fn put(&self, run: FrameRun) {
        if run.len == 0 {
            return;
        }
        let (index, start) = window_of(run.start);
        let mut books = self.books.lock();
        let window = books.window(index);
        debug_assert!(window.taken_count as usize >= run.len);
        set(&mut window.free, start, run.len);
        window.free_count += run.len as u32;
        window.taken_count -= run.len as u32;
        self.free.fetch_add(run.len, Ordering::Relaxed);
        books.list_free(index);
    }

    /// Says that taken frames have left: their places are holes.
    pub fn consume(&self, run: FrameRun) {
        if run.len == 0 {
            return;
        }
        let (index, _) = window_of(run.start);
        let mut books = self.books.lock();
        books.window(index).taken_count -= run.len as u32;
        books.retire_if_empty(index);
    }

    /// Takes `len` neighbouring holes (512 at most) for pages that are about to be evicted.
    pub fn take_holes(&self, len: usize) -> Option<FrameId> {
        debug_assert!(0 < len && len <= BLOCK_PAGES);
        let mut books = self.books.lock();
        let open = books.heads.open;
        if open != NIL && books.window(open).cursor as usize + len > BLOCK_PAGES {
            books.queue_open();
        }
        if books.heads.open == NIL {
            let Some(index) = books.take_empty() else {
                return books.holes_in_between(len);
            };
            let window = books.window(index);
            window.phase = Phase::Open;
            window.cursor = 0;
            books.heads.open = index;
        }
        let index = books.heads.open;
        let window = books.window(index);
        let start = window.cursor;
        window.cursor += len as u32;
        window.taken_count += len as u32;
        Some(FrameId((index << BLOCK_ORDER) + start))
    }

    /// Checks the books against themselves (I5: every place is in one state).
    #[cfg(any(test, debug_assertions))]
    pub fn check(&self) {
        let mut books = self.books.lock();
        let (mut free, mut limbo) = (0, 0);
        for index in 0..books.heads.untouched {
            let window = books.window(index);
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
        let mut at = books.heads.limbo_first;
        while at != NIL {
            assert_eq!(books.window(at).phase, Phase::Queued);
            assert!(books.window(at).next != NIL || books.heads.limbo_last == at);
            at = books.window(at).next;
            queued += 1;
            assert!(queued <= books.windows.len(), "the limbo queue has a loop");
        }
        assert_eq!(queued, books.heads.queued);
    }
}

#[cfg(test)]
mod tests;
