//! Frames in limbo: whose they are, and the queue of windows in which they wait.

use core::sync::atomic::Ordering;

use super::bits::{is_set, set};
use super::{FramePool, NIL, Phase, WORDS, window_of};
use crate::mmu::{FrameId, FrameRun};
use crate::units::PageNum;

/// Where a window goes that still has pages in limbo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueEnd {
    /// Next in turn: work on it only stopped.
    Oldest,
    /// Behind all others: what is left in it cannot go now.
    Youngest,
}

impl FramePool {
    /// Notes whose page a taken place holds now. [`Self::enter_limbo`] follows, before the owner is
    /// unlocked.
    pub fn set_owner(&self, frame: FrameId, owner: PageNum) {
        // Relaxed: read under the owner's page lock, which is held now.
        self.owners[frame.0 as usize].store(owner.0, Ordering::Relaxed);
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
}
