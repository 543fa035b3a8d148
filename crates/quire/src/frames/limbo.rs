//! Frames in limbo: the pages that they belong to, and the queue of windows in which they wait.

use core::sync::atomic::Ordering;

use super::bits::{clear, is_set, set};
use super::{FramePool, NIL, Phase, window_of};
use crate::mmu::{FrameId, FrameRun};
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PageNum};

/// Which end of the queue a window goes to that still has pages in limbo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueEnd {
    /// It is the next in turn: the work on it was only interrupted.
    Oldest,
    /// It comes behind all others: what is left in it cannot go now.
    Youngest,
}

impl FramePool {
    /// Notes which page's content a taken place has now. [`Self::enter_limbo`] follows, before the owner is
    /// unlocked.
    pub fn set_owner(&self, frame: FrameId, owner: PageNum) {
        // Relaxed: read under the owner's page lock, which is held now.
        self.owners[frame.0 as usize].store(owner.0, Ordering::Relaxed);
    }

    /// Ends a move out of the program: those of the taken places that `is_filled` names are in limbo,
    /// the others are holes again.
    pub fn enter_limbo(&self, run: FrameRun, is_filled: impl Fn(usize) -> bool) {
        let (index, start) = window_of(run.start);
        let mut books = self.books.lock();
        let window = books.window(index);
        let mut filled = 0;
        for at in (0..run.len).filter(|&at| is_filled(at)) {
            set(&mut window.limbo, start + at, 1);
            filled += 1;
        }
        window.limbo_count += filled as u32;
        window.taken_count -= run.len as u32;
        let is_unlisted = window.phase == Phase::Spent && filled > 0;
        self.limbo.fetch_add(filled, Ordering::Relaxed);
        if is_unlisted {
            // The queue had done with the window before these pages came.
            books.queue(index);
        }
        books.retire_if_empty(index);
    }

    /// Takes frames out of limbo; the caller holds their owners' page locks.
    pub fn leave_limbo(&self, run: FrameRun) {
        let (index, start) = window_of(run.start);
        let mut books = self.books.lock();
        let window = books.window(index);
        debug_assert!((start..start + run.len).all(|at| is_set(&window.limbo, at)));
        clear(&mut window.limbo, start, run.len);
        window.limbo_count -= run.len as u32;
        window.taken_count += run.len as u32;
        self.limbo.fetch_sub(run.len, Ordering::Relaxed);
    }

    /// The page whose content a frame in limbo holds (or held: check under its lock).
    pub fn owner_of(&self, frame: FrameId) -> PageNum {
        PageNum(self.owners[frame.0 as usize].load(Ordering::Relaxed))
    }

    /// The oldest window in limbo, taken from the queue. Where only the open window is left,
    /// it is that one.
    pub fn oldest_window(&self) -> Option<u32> {
        let mut books = self.books.lock();
        if books.heads.limbo_first == NIL && !books.close_open() {
            return None;
        }
        let index = books.heads.limbo_first;
        let next = books.window(index).next;
        books.heads.limbo_first = next;
        if next == NIL {
            books.heads.limbo_last = NIL;
        }
        books.window(index).phase = Phase::Draining;
        books.heads.queued -= 1;
        Some(index)
    }

    /// Puts those windows of the queue back on the stack that faults have emptied: where memory is not short
    /// nothing else comes by.
    pub fn retire_emptied(&self) {
        for _ in 0..self.queued_windows() {
            let Some(window) = self.oldest_window() else { return };
            self.return_window(window, QueueEnd::Youngest);
        }
    }

    pub fn queued_windows(&self) -> usize {
        self.books.lock().heads.queued
    }

    /// Queues the window that is being filled, if anything is in it.
    pub fn close_window(&self) -> bool {
        self.books.lock().close_open()
    }

    /// Ends work on a window that [`Self::oldest_window`] gave: what is still in limbo there is
    /// queued again, at `end`.
    pub fn return_window(&self, index: u32, end: QueueEnd) {
        let mut books = self.books.lock();
        debug_assert_eq!(books.window(index).phase, Phase::Draining);
        if books.window(index).limbo_count == 0 {
            books.window(index).phase = Phase::Spent;
            books.retire_if_empty(index);
            return;
        }
        match end {
            QueueEnd::Oldest => {
                books.heads.queued += 1;
                let first = core::mem::replace(&mut books.heads.limbo_first, index);
                let window = books.window(index);
                window.phase = Phase::Queued;
                window.next = first;
                if first == NIL {
                    books.heads.limbo_last = index;
                }
            }
            QueueEnd::Youngest => books.queue(index),
        }
    }

    /// The frames of a window that were in limbo when this was called.
    pub fn limbo_frames(&self, index: u32) -> impl Iterator<Item = FrameId> + use<> {
        let bits = self.books.lock().window(index).limbo;
        let in_limbo = (0..BLOCK_PAGES).filter(move |&at| is_set(&bits, at));
        in_limbo.map(move |at| FrameId((index << BLOCK_ORDER) + at as u32))
    }
}
