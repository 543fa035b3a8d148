//! Reclaim: which pages go, and when.
//!
//! A clock hand goes over the blocks of the arena in order of address. Pages that a fault asked
//! for since the hand last passed get a second chance; pages that came along around a fault go at
//! the first pass. What goes is unmapped whole runs at a time ([`evict`]) and stays in limbo,
//! where a fault finds it for the price of a move; limbo is emptied from its old end ([`store`]):
//! dropped, found clean, same-filled, or compressed. What the compressed pool has too much of is
//! written to the swap file ([`writeback`]).
//!
//! The background thread keeps free memory between two watermarks, unless it is cheaper for faults
//! to do so ([`place`]); a fault that finds no memory reclaims by itself in any case. Reclaim only
//! ever tries page locks.
//!
//! Locks: the clock's mutex for the hand's position alone; page locks, tried.
//!
//! # How much is kept
//!
//! The low watermark is a 32nd of the budget, the high one a 16th; limbo is kept at a 16th while memory is
//! short. Frames are recycled and not given back to the kernel, unless other members live on the same budget
//! and too little of it is uncharged, a fork wants room, or the compressed pool needs a slab. A futex in each
//! member's seat wakes its background thread.

mod copy;
mod evict;
mod give;
mod place;
mod store;
mod writeback;

use core::sync::atomic::Ordering;

pub use self::evict::Evicted;
pub(crate) use self::place::{Place, Places};
pub(crate) use self::store::Unstored;
use crate::control::{Event, OUT_OF_MEMORY_UNANSWERING_SHIFT, Obituary};
use crate::mmu::{FrameRun, Mmu};
use crate::scratch::Scratch;
use crate::space::AddressSpace;
use crate::swap::file::SwapSegments;
use crate::units::BLOCK_PAGES;

/// Pages that a fault reclaims by itself at a time.
const DIRECT_MAX: usize = 128;

/// Pages of a turn that a fault takes before there is need.
const FAULT_TURN: usize = 64;

/// How long whoever is hungry waits at a time.
pub const HUNGER_ROUND_MS: u64 = 10;
/// After so long nobody can be expected to give memory: without progress anywhere in the tree, and
/// with progress that is not ours. Time, not rounds: calls of others make those short.
const HUNGER_NS: u64 = 10_000_000_000;
const HUNGER_NS_MAX: u64 = 60_000_000_000;

/// Where the hands are.
#[derive(Default)]
pub struct Clock {
    /// The next block to evict from.
    evict: usize,
    /// The next block to write back from.
    pub(crate) write_back: usize,
}

/// Who reclaims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reclaimer {
    /// The background thread.
    Kswapd,
    /// A fault that found no memory.
    Direct,
    /// The program asked for it (MADV_PAGEOUT).
    Advice,
}

impl Reclaimer {
    pub(crate) const fn scan(self) -> Event {
        match self {
            Reclaimer::Kswapd => Event::PgscanKswapd,
            Reclaimer::Direct | Reclaimer::Advice => Event::PgscanDirect,
        }
    }

    pub(crate) const fn steal(self) -> Event {
        match self {
            Reclaimer::Kswapd => Event::PgstealKswapd,
            Reclaimer::Direct | Reclaimer::Advice => Event::PgstealDirect,
        }
    }
}

/// What the background thread should do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Balance {
    /// Enough is free: sleep until somebody calls.
    Enough,
    /// Some progress was made, and more is needed.
    Progress,
    /// Nothing could be freed, though it is needed.
    Stuck,
    /// Another member was asked to give: wait for it a moment.
    Elsewhere,
}

/// How long nobody has had memory for a fault, or a fork, of ours.
#[derive(Clone, Copy, Default, Debug)]
pub struct Hunger {
    /// When it began, and when the tree was last seen to swap out; 0 is not yet.
    since: u64,
    progress_at: u64,
    swapped_out: u64,
}

impl Hunger {
    /// How long it has lasted at `now`, both in nanoseconds.
    #[must_use]
    pub fn lasted_ns(&self, now: u64) -> u64 {
        if self.since == 0 { 0 } else { now - self.since }
    }

    /// Whether it has lasted too long at `now` (in nanoseconds), when the tree has swapped out so
    /// many pages.
    #[must_use]
    pub fn is_hopeless(&mut self, now: u64, swapped_out: u64) -> bool {
        if self.since == 0 {
            self.since = now;
        }
        if self.progress_at == 0 || swapped_out != self.swapped_out {
            self.swapped_out = swapped_out;
            self.progress_at = now;
        }
        now - self.progress_at > HUNGER_NS || now - self.since > HUNGER_NS_MAX
    }
}

impl<M: Mmu> AddressSpace<M> {
    /// Below this many free pages the background thread works.
    pub(crate) fn low_watermark(&self) -> usize {
        (self.budget.limit() / 32).max(32)
    }

    /// Up to this many.
    pub(crate) fn high_watermark(&self) -> usize {
        (self.budget.limit() / 16).max(64)
    }

    /// Frames in limbo that are worth having while memory is short.
    fn limbo_target(&self) -> usize {
        self.budget.limit() / 16
    }

    /// Where little is free: has the background thread reclaim, or does so at once.
    fn check_low(&self, scratch: &mut Scratch) {
        if !self.is_low() || self.is_kswapd_awake() {
            return;
        }
        match self.places.begin_turn(self.mmu.cycles()) {
            // In a tree it may be another member's turn, which only the background thread waits for.
            Place::Fault if self.gives_itself() => {
                self.reclaim(FAULT_TURN, Reclaimer::Direct, scratch);
            }
            Place::Fault | Place::Background => self.budget.call_for_memory(),
        }
    }

    /// Where little is left, has the background thread reclaim.
    pub(crate) fn call_if_low(&self) {
        if self.is_low() && !self.is_kswapd_awake() {
            self.budget.call_for_memory();
        }
    }

    /// Whether little is free.
    pub fn is_low(&self) -> bool {
        self.available() < self.low_watermark()
    }

    /// Makes sure that a fault finds a page, and as a rule the `wanted` pages of its folio,
    /// reclaiming where it must. `false`: there is none.
    pub(crate) fn make_room(&self, wanted: usize, scratch: &mut Scratch) -> bool {
        self.check_low(scratch);
        let wanted = wanted.clamp(1, DIRECT_MAX);
        if self.available() >= wanted {
            return true;
        }
        self.budget.count(Event::Allocstall, 1);
        for _ in 0..4 {
            self.reclaim(wanted.max(32), Reclaimer::Direct, scratch);
            if self.available() > 0 {
                return true;
            }
        }
        false
    }

    /// Frees about `target` pages; returns how many became free.
    pub fn reclaim(&self, target: usize, who: Reclaimer, scratch: &mut Scratch) -> usize {
        let mut freed = 0;
        if self.frames.limbo() > self.limbo_target() {
            freed += self.shrink_limbo(target, scratch);
        }
        if freed < target {
            let evicted = self.evict_some(target.max(2 * BLOCK_PAGES / 8), who, scratch);
            freed += evicted.freed;
            // A fault that has nothing at all wants what is in limbo more than its second chance.
            let is_spent = who != Reclaimer::Kswapd && self.available() == 0;
            let keep = if is_spent { 0 } else { self.limbo_target() };
            if self.frames.limbo() > keep {
                freed += self.shrink_limbo(target.saturating_sub(freed).max(1), scratch);
            }
        }
        // What packing has not used again of the slabs that faults have emptied.
        freed += self.swap.zpool.trim(&self.budget);
        if freed == 0 {
            freed += self.shrink_limbo(target, scratch);
        }
        self.places.record(freed);
        freed
    }

    /// Lets the clock's hand go on until `target` pages are evicted, two rounds at most.
    fn evict_some(&self, target: usize, who: Reclaimer, scratch: &mut Scratch) -> Evicted {
        let mut all = Evicted::default();
        let blocks = self.pages.used_arena();
        for _ in 0..2 * blocks.len() {
            let block = {
                let mut clock = self.clock.lock();
                if clock.evict >= blocks.len() {
                    clock.evict = 0;
                }
                let block = clock.evict;
                clock.evict += 1;
                block
            };
            if blocks[block].mapped.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let range = self.pages.block_range(block);
            all.add(self.evict_range(range, who, scratch));
            if all.unmapped + all.freed >= target {
                break;
            }
        }
        all
    }

    /// One step of the background thread.
    pub fn balance(&self, scratch: &mut Scratch) -> Balance {
        // Before anything is looked for: it costs nobody a fault.
        self.swap.zpool.trim(&self.budget);
        self.answer_starved();
        self.make_room_for_fork(scratch);
        let pool_pages = self.swap.zpool.own_pages() as u64;
        self.budget.member().pool_pages.store(pool_pages, Ordering::Relaxed);
        self.write_back_excess(scratch);
        // Free frames of one member are of no use to another.
        if self.budget.members() > 1 {
            return self.balance_in_tree(scratch);
        }
        self.balance_alone(scratch)
    }

    /// The rest of it, where what this member needs can only be its own.
    fn balance_alone(&self, scratch: &mut Scratch) -> Balance {
        if self.available() >= self.high_watermark() {
            return Balance::Enough;
        }
        let freed = self.reclaim(BLOCK_PAGES / 2, Reclaimer::Kswapd, scratch);
        self.answer_starved();
        if freed > 0 { Balance::Progress } else { self.last_resort(scratch) }
    }

    /// Reclaim got nowhere: what else there is.
    fn last_resort(&self, scratch: &mut Scratch) -> Balance {
        if self.write_back(scratch) > 0 || self.compact() > 0 {
            return Balance::Progress;
        }
        Balance::Stuck
    }

    /// Answers faults that waited for a frame, if there is one.
    pub(crate) fn answer_starved(&self) {
        if self.starved.is_empty() {
            return;
        }
        if self.available() > 0 {
            self.starved.wake_sleepers(|word| self.mmu.wake_sleepers(word));
        }
        if self.can_answer_starved() {
            self.starved.answer_all(|answer| self.wake_for(answer));
        }
    }

    /// Whether a fault that waited for a frame would find one now.
    pub(crate) fn can_answer_starved(&self) -> bool {
        self.available() > 0 && !self.is_making_room_for_fork()
    }

    /// Gives free frames beyond `keep` back to the kernel, for other members of the tree.
    pub fn release_free_frames(&self, keep: usize) -> usize {
        let mut released = 0;
        // Others take frames meanwhile: what is too much is asked anew, and once, for every run.
        while let Some(excess) = self.frames.free().checked_sub(keep) {
            let Some(run) = self.frames.take(excess) else { break };
            self.release_frames(run);
            released += run.len;
        }
        released
    }

    /// Gives one free frame back to the kernel and keeps its charge for something else.
    pub(crate) fn take_charge_of_a_frame(&self) -> bool {
        let Some(run) = self.frames.take(1) else { return false };
        self.mmu.frames_release(run);
        self.frames.consume(run);
        true
    }

    fn release_frames(&self, run: FrameRun) {
        self.mmu.frames_release(run);
        self.frames.consume(run);
        self.budget.uncharge(run.len);
    }

    /// Whether somebody waits for memory that reclaim did not find.
    pub fn has_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Notes that this process ends because no memory can be had for it.
    pub fn die_of_hunger(&self) {
        let has_room = self.swap.file().is_some_and(SwapSegments::has_room);
        let unanswering = self.budget.unanswering() as u64;
        let detail = u64::from(!has_room) | unanswering << OUT_OF_MEMORY_UNANSWERING_SHIFT;
        self.budget.leave_obituary(Obituary::OutOfMemory, detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn hunger_is_hopeless_by_time_and_not_by_how_often_it_is_asked() {
        let mut hunger = Hunger::default();
        for step in 0..100_000 {
            assert!(!hunger.is_hopeless(SECOND + step, 7));
        }
        assert!(!hunger.is_hopeless(11 * SECOND, 7));
        assert!(hunger.is_hopeless(12 * SECOND, 7));
    }

    #[test]
    fn progress_in_the_tree_prolongs_hope_but_not_for_ever() {
        let mut hunger = Hunger::default();
        for second in 1..=61 {
            assert!(!hunger.is_hopeless(second * SECOND, second));
        }
        assert!(hunger.is_hopeless(62 * SECOND, 62));
    }
}
