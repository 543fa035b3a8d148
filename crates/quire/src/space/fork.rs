//! fork: what both sides need so that each can go on alone.
//!
//! All engine threads stand still meanwhile, and the forking thread holds the space's lock. The
//! page words and the tables are private memory: the child inherits them like any other, and its
//! copies are as true as the parent's at that moment. The compressed pool is shared, and sealed. The
//! frame pool does not come along, so limbo is emptied first.

use core::sync::atomic::Ordering;

use super::vma::Attributes;
use super::{Layout, VmSpace};
use crate::budget::{For, Need, Purpose};
use crate::control::Event;
use crate::frames::QueueEnd;
use crate::mmu::{Access, FrameId, Mmu};
use crate::page::{Flags, State};
use crate::reclaim::{NoCaches, OOM_ROUND_MS, OomWait, Pool, Reclaimer, Shrinker};
use crate::scratch::Scratch;
use crate::sys::futex::{self, Reach};
use crate::sys::thread::ThreadId;
use crate::sys::{Errno, monotonic_ns, rank};

/// A fork that needs room compacts a pool of which more than one page in so many is fragments.
const FRAGMENTS_PART: usize = 32;

/// No fork is under way.
const NONE: u32 = 0;
/// A fork is under way: others' faults that need memory wait.
const UNDER_WAY: u32 = 1;
/// It waits for room.
const WANTED: u32 = 2;
/// Nothing gave it room for too long.
const HOPELESS: u32 = 3;

impl<M: Mmu> VmSpace<M> {
    /// From now on until [`Self::end_fork_demand`] faults that need memory want the space's lock, which
    /// the fork has: threads that go on writing would take every page that is freed for it.
    pub fn begin_fork_demand(&self, _: &Layout<'_>) {
        self.fork_demand.store(UNDER_WAY, Ordering::SeqCst);
    }

    /// Asks the background thread for room for a second process like this one, and waits until it
    /// is charged (`true`) or cannot be had. Before the gate is closed: only engine threads can
    /// write to the swap file. After the last read is done: a read needs memory, and two processes
    /// that keep room for their forks while their reads wait for each other's would wait for ever.
    pub fn wait_for_fork_room(&self, _: &Layout<'_>) -> bool {
        // Anew, where this process has grown since: a pack takes its slab before it gives frames back,
        // and a fault that was let in before the fork began takes what it needs.
        while !self.charge_fork_room() {
            self.fork_demand.store(WANTED, Ordering::SeqCst);
            self.budget.call_for_memory();
            while self.fork_demand.load(Ordering::SeqCst) == WANTED {
                futex::wait(&self.fork_demand, WANTED, Reach::Process, None);
            }
            if self.fork_demand.load(Ordering::SeqCst) == HOPELESS {
                return false;
            }
        }
        true
    }

    /// Gives the room back, for now: no process keeps memory while it waits for more.
    pub fn return_fork_room(&self, _: &Layout<'_>) {
        self.budget.uncharge(self.fork_room.swap(0, Ordering::Relaxed));
    }

    /// The fork has what it asked for, or does without: faults find memory again.
    pub fn end_fork_demand(&self, layout: &Layout<'_>) {
        self.return_fork_room(layout);
        self.fork_demand.store(NONE, Ordering::SeqCst);
    }

    /// Whether faults wait for a fork.
    pub(crate) fn is_making_room_for_fork(&self) -> bool {
        self.fork_demand.load(Ordering::SeqCst) != NONE
    }

    /// Pages that a child would hold as well: all but the compressed pool, which it shares, and what is
    /// charged for the child already.
    fn share_of_child(&self) -> usize {
        let room = self.fork_room.load(Ordering::Relaxed);
        self.swap.zpool.at_rest(|own| self.budget.held().saturating_sub(room + own))
    }

    /// Charges, for a child, its share without what this process need not hold. Ahead, before the
    /// gate closes: other processes would take room that is only seen.
    fn charge_fork_room(&self) -> bool {
        let wanted = self.share_of_child().saturating_sub(self.frames.free());
        let missing = wanted.saturating_sub(self.fork_room.load(Ordering::Relaxed));
        let fits = self.budget.uncharged_by_tree() >= missing + self.budget.reserve();
        let is_charged = missing == 0 || fits && self.budget.try_charge(missing, Purpose::Fork);
        if is_charged {
            // Relaxed: the forking thread and the background thread take turns by `fork_demand`.
            self.fork_room.fetch_add(missing, Ordering::Relaxed);
        }
        is_charged
    }

    /// The background thread's side of [`Self::wait_for_fork_room`].
    pub(crate) fn make_room_for_fork(&self, scratch: &mut Scratch) {
        if self.fork_demand.load(Ordering::SeqCst) != WANTED {
            return;
        }
        let mut wait = OomWait::default();
        let (mut is_stuck, mut outcome) = (false, UNDER_WAY);
        while !self.charge_fork_room() {
            self.budget.show_life();
            let seen = self.budget.calls();
            let need = if is_stuck { Need::Starved } else { Need::Balance };
            let is_requested =
                self.request_reclaim_for(For::Fork, need, self.share_of_child(), &wait);
            if is_requested || is_stuck {
                if wait.is_hopeless(monotonic_ns(), self.budget.swap_progress()) {
                    outcome = HOPELESS;
                    break;
                }
                // The others of the tree may have something to give; they need a moment.
                self.budget.wait_for_call(seen, Some(OOM_ROUND_MS));
                if !is_stuck {
                    continue;
                }
            }
            // The fork seals the slabs: what is fragments then stays so for all that share them.
            let zpool = &self.swap.zpool;
            let has_fragments = zpool.fragments() * FRAGMENTS_PART > zpool.own_pages();
            let mut freed = if has_fragments { self.compact() } else { 0 };
            if freed == 0 {
                freed = self.reclaim(&NoCaches, 512, Reclaimer::Kswapd, Some(scratch));
            }
            freed += self.clear_limbo(scratch);
            self.release_free_frames(0);
            // A read that came in between waits for memory, and the fork for the read.
            self.answer_starved();
            if !self.charge_fork_room() && self.swap.zpool.pages() > 0 {
                freed += Pool(self).scan(1, Reclaimer::Kswapd, Some(scratch));
            }
            is_stuck = freed == 0;
            // Others may want of it as well.
            if is_stuck { self.budget.answer_spent() } else { self.budget.answer(freed) }
        }
        self.budget.stop_asking();
        self.fork_demand.store(outcome, Ordering::SeqCst);
        futex::wake(&self.fork_demand, u32::MAX, Reach::Process);
    }

    /// Makes the space ready to be inherited and charges the child's share: all that this process
    /// holds but the compressed pool, once more, because what either side copies on write is not
    /// seen. Returns the pages charged.
    ///
    /// # Errors
    /// `NOMEM` where the budget cannot hold both.
    pub fn prepare_fork(&self, layout: &mut Layout<'_>) -> Result<usize, Errno> {
        loop {
            self.empty_limbo();
            self.clear_limbo(&mut layout.scratch);
            if self.frames.limbo() > 0 {
                // It would not come along, and the child would read zeros for it.
                return Err(Errno::NOMEM);
            }
            self.release_free_frames(0);
            self.swap.zpool.trim(&self.budget);
            let held = self.share_of_child();
            let room = self.fork_room.load(Ordering::Relaxed);
            let missing = held.saturating_sub(room);
            if self.budget.try_charge(missing, Purpose::Fork) {
                self.fork_room.store(0, Ordering::Relaxed);
                self.budget.uncharge(room.saturating_sub(held));
                self.has_forked.store(true, Ordering::Relaxed);
                self.swap.zpool.seal(&self.budget);
                self.budget.count(Event::Fork, 1);
                return Ok(held);
            }
            let target = (held / 8).max(64);
            self.reclaim(&NoCaches, target, Reclaimer::Direct, Some(&mut layout.scratch));
            self.clear_limbo(&mut layout.scratch);
            self.release_free_frames(0);
            if self.share_of_child() >= held {
                return Err(Errno::NOMEM);
            }
        }
    }

    /// Puts everything in limbo back into the program, as far as the kernel lets it.
    fn empty_limbo(&self) {
        for _ in 0..2 * self.frames.limbo() {
            let Some(window) = self.frames.oldest_window() else { return };
            let frames = self.frames.limbo_frames(window);
            frames.for_each(|frame| self.leave_limbo_for_fork(frame));
            self.frames.return_window(window, QueueEnd::Youngest);
        }
    }

    fn leave_limbo_for_fork(&self, frame: FrameId) {
        let page = self.frames.owner_of(frame);
        let locked = self.lock_page(page);
        if locked.state() != State::Limbo || locked.content().payload() != frame.0 {
            // Its neighbour's move took it along.
            return;
        }
        match self.find_vma(page) {
            Some(vma) if !locked.has(Flags::LAZYFREE) => {
                let guess = self.guess(page, locked.content(), &vma);
                self.fault_from_limbo(locked, &vma, guess, Access::Read);
            }
            _ => {
                self.release_backing(locked.content());
                locked.drop_content();
            }
        }
    }

    /// In the child: the frame pool is empty, the account another member's.
    pub fn after_fork_in_child(&self, layout: &Layout<'_>, slot: u32) {
        rank::after_fork_in_child();
        self.frames.reset();
        self.budget.set_slot(slot);
        self.swap.after_fork_in_child(slot);
        self.starved.after_fork_in_child();
        self.unanswered.after_fork_in_child();
        self.should_answer_deferred.store(false, Ordering::Relaxed);
        self.layout.after_fork_in_child(ThreadId::UNKNOWN);
        self.dying.after_fork_in_child();
        self.rights.after_fork_in_child();
        self.pages.after_fork_in_child();
        self.fork_demand.store(NONE, Ordering::SeqCst);
        self.lock_future(false);
        let unlocked = |old| Attributes { is_mlocked: false, ..old };
        // No VMA is split, so there is room.
        let _ = self.vmas.change_attributes(self.arena(), &layout.locked, unlocked);
        self.forget_clean_and_locked();
    }
}
