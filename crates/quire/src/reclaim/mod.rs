//! Reclaim: which pages go, and when.
//!
//! [`shrinker`] shares the work out to what holds memory; ARCHITECTURE.md follows it from there. [`kswapd`] works
//! in the background; a fault reclaims by itself only where it finds nothing. Reclaim only ever tries page locks.
//! Of its own it has the clock's mutex, for the positions of the hands alone.
//!
//! # Second chances
//!
//! A page with ACCESSED was asked for by a fault since the hand last came. It loses the flag and is
//! passed once ([`Reclaimer::spares`]). What becomes of its mapping differs. A page of the arena
//! stays mapped: the next time round it goes to limbo, where a fault finds it still. A page of an
//! object is unmapped and stays cached: this is its limbo, and a fault, a minor one, sets the flag
//! again. The few pages that were asked for last, while memory was short, stay ([`asked`]).
//!
//! # How much is kept
//!
//! The low watermark is a 128th of the budget, the high one a 64th. A window that finds too little free boosts
//! both, to a 32nd and a 16th, for a while: streams take much at once. In a tree they always are so. Limbo is kept
//! at a 16th while memory is short. Frames are recycled and not given back to the kernel, unless other members live
//! on the same budget and too little of it is uncharged, a fork wants room, the compressed pool needs a slab, or
//! what is not managed takes more of the budget. A futex in each member's seat wakes its background thread.

mod asked;
mod border;
mod copy;
mod evict;
mod give;
mod kswapd;
mod sample;
mod shrinker;
mod store;
mod writeback;

use core::sync::atomic::Ordering;

pub(crate) use self::asked::AskedLast;
pub(crate) use self::border::Border;
pub use self::evict::Evicted;
pub use self::kswapd::{Balance, Kswapd, OOM_ROUND_MS, OomWait};
pub use self::sample::Sampler;
use self::shrinker::Arena;
pub(crate) use self::shrinker::Pool;
pub use self::shrinker::{NoCaches, Shrinker};
pub(crate) use self::store::Unstored;
use crate::control::Event;
use crate::control::watermarks::{BOOST_MAX, watermarks};
use crate::mmu::{FrameRun, Mmu};
use crate::page::{Flags, Snapshot};
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::sys::monotonic_ns;
use crate::units::BLOCK_PAGES;

/// Pages that a fault reclaims by itself at a time, at least and at most.
const DIRECT_MIN: usize = 32;
const DIRECT_MAX: usize = 128;

#[derive(Default)]
pub struct Clock {
    evict: usize,
    pub(crate) write_back: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reclaimer {
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

    /// Whether a page gets its second chance.
    pub(crate) fn spares(self, page: Snapshot) -> bool {
        page.has(Flags::ACCESSED) && self != Reclaimer::Advice
    }
}

/// What a fault needs memory for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Room {
    /// A page of anonymous memory: a free frame will do.
    Frame,
    /// A page of an object's cache: it must be charged, and free frames are given back for that.
    Charge,
}

impl<M: Mmu> VmSpace<M> {
    /// Free pages below which the background thread works, up to the high watermark.
    pub(crate) fn low_watermark(&self) -> usize {
        self.watermarks()[0]
    }

    pub(crate) fn high_watermark(&self) -> usize {
        self.watermarks()[1]
    }

    fn watermarks(&self) -> [usize; 2] {
        let is_shared = self.budget.members() > 1;
        let boost = if is_shared { BOOST_MAX } else { self.boost.load(Ordering::Relaxed) };
        watermarks(self.budget.limit(), boost)
    }

    /// A window finds too little free.
    pub(crate) fn boost_watermarks(&self) {
        self.boost.store(BOOST_MAX, Ordering::Relaxed);
    }

    /// Frames in limbo that are worth having while memory is short.
    fn limbo_target(&self) -> usize {
        self.budget.limit() / 16
    }

    /// Where little is left, has the background thread reclaim.
    pub(crate) fn call_if_low(&self) {
        if self.is_low() && !self.is_kswapd_awake() {
            self.budget.call_for_memory();
        }
    }

    /// How many pages there is room for that nothing waits for yet.
    pub(crate) fn room_ahead(&self) -> usize {
        self.available().saturating_sub(self.low_watermark())
    }

    /// Whether there is room for so many pages that nothing waits for yet. The background thread is
    /// called before the last such room is taken: a stream must find some each time it looks ahead.
    pub(crate) fn has_room_ahead(&self, pages: usize) -> bool {
        let left = self.room_ahead();
        if left < 2 * pages {
            self.boost_watermarks();
            if !self.is_kswapd_awake() {
                self.budget.call_for_memory();
            }
        }
        left >= pages
    }

    pub fn is_low(&self) -> bool {
        self.available() < self.low_watermark()
    }

    /// Makes sure that a fault finds a page, and as a rule the `wanted` ones, reclaiming where it
    /// must. Without a scratch the fault has little stack, and nothing can be packed. `false`:
    /// there is none.
    pub(crate) fn make_room(
        &self,
        caches: &impl Shrinker,
        room: Room,
        wanted: usize,
        mut scratch: Option<&mut Scratch>,
    ) -> bool {
        self.call_if_low();
        let wanted = wanted.clamp(1, DIRECT_MAX);
        if self.has_room(room, wanted) {
            return true;
        }
        self.budget.count(Event::Allocstall, 1);
        self.boost_watermarks();
        let start = monotonic_ns();
        let target = wanted.max(DIRECT_MIN);
        let is_made = (0..4).any(|_| {
            self.reclaim(caches, target, Reclaimer::Direct, scratch.as_deref_mut());
            self.has_room(room, 1)
        });
        self.budget.count(Event::AllocstallNs, (monotonic_ns() - start) as usize);
        is_made
    }

    fn has_room(&self, room: Room, wanted: usize) -> bool {
        if room == Room::Frame {
            return self.available() >= wanted;
        }
        let chargeable = || {
            self.budget.chargeable().saturating_sub(self.budget.reserve()).max(self.budget.slack())
        };
        let missing = wanted.saturating_sub(chargeable());
        if missing > 0 {
            self.release_free_frames(self.frames.free().saturating_sub(missing));
        }
        chargeable() >= wanted
    }

    /// Frees about `target` pages; returns how many became free.
    pub(crate) fn reclaim(
        &self,
        caches: &impl Shrinker,
        target: usize,
        who: Reclaimer,
        scratch: Option<&mut Scratch>,
    ) -> usize {
        let arena = Arena::beside(self, caches);
        shrinker::share_out(&[caches, &arena], target, who, scratch)
    }

    /// Frees about `target` pages of anonymous memory; returns how many became free. Never inlined:
    /// it takes much of a stack, and a fault without a scratch has little.
    #[inline(never)]
    fn shrink_arena(&self, target: usize, who: Reclaimer, scratch: &mut Scratch) -> usize {
        let mut freed = 0;
        if self.frames.limbo() > self.limbo_target() {
            freed += self.shrink_limbo(target, who, scratch);
        }
        if freed < target {
            let evicted = self.evict_some(target.max(BLOCK_PAGES / 4), who, scratch);
            freed += evicted.freed;
            // A fault that has nothing at all wants what is in limbo more than its second chance.
            let is_spent = who != Reclaimer::Kswapd && self.available() == 0;
            let keep = if is_spent { 0 } else { self.limbo_target() };
            if self.frames.limbo() > keep {
                freed += self.shrink_limbo(target.saturating_sub(freed).max(1), who, scratch);
            }
        }
        // What packing has not used again of the slabs that faults have emptied.
        freed += self.swap.zpool.trim(&self.budget);
        if freed == 0 {
            freed += self.shrink_limbo(target, who, scratch);
        }
        freed
    }

    /// Lets the clock's hand go on until `target` pages are evicted, two rounds at most.
    fn evict_some(&self, target: usize, who: Reclaimer, scratch: &mut Scratch) -> Evicted {
        let mut all = Evicted::default();
        let blocks = self.pages.used_arena();
        for _ in 0..2 * blocks.len() {
            let block = {
                let mut clock = self.clock.lock();
                let block = if clock.evict < blocks.len() { clock.evict } else { 0 };
                clock.evict = block + 1;
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

    /// Answers faults that waited for a frame, if there is one.
    pub(crate) fn answer_starved(&self) {
        if self.starved.is_empty() {
            return;
        }
        if self.available() > 0 {
            self.starved.wake_sleepers(|word| self.mmu.wake_sleepers(word));
            self.starved.answer_all(|answer| self.wake_for(answer));
        }
    }

    /// Gives free frames beyond `keep` back to the kernel, for other members of the tree.
    pub fn release_free_frames(&self, keep: usize) -> usize {
        let mut released = 0;
        // Others take frames meanwhile: what is too much is asked anew, and once, for every run.
        while let Some(excess) = self.frames.free().checked_sub(keep) {
            let Some(run) = self.frames.take(excess) else { break };
            self.release_frames(run);
            self.budget.uncharge(run.len);
            released += run.len;
        }
        released
    }

    /// Gives free frames back to the kernel as far as members hold more than the budget has for them.
    pub(super) fn give_excess_back(&self) {
        let excess = self.budget.excess();
        let keep = self.frames.free().saturating_sub(excess);
        self.release_free_frames(keep.max(self.kept_of(excess)));
    }

    /// Free frames that stay while there is an excess: nothing can be charged then, and what packing needs
    /// takes the charge of a frame. All members together keep a reserve.
    fn kept_of(&self, excess: usize) -> usize {
        if excess > 0 { self.budget.reserve() / self.budget.members() } else { 0 }
    }

    /// Gives so many free frames back to the kernel and keeps their charges for something else; none of them
    /// where fewer than `left` would be left.
    pub(crate) fn take_charges_of_frames(&self, pages: usize, left: usize) -> bool {
        if self.frames.free() < pages + left {
            return false;
        }
        let mut charges = 0;
        while charges < pages {
            let Some(run) = self.frames.take(pages - charges) else { break };
            self.release_frames(run);
            charges += run.len;
        }
        // Other threads were quicker.
        if charges < pages {
            self.budget.uncharge(charges);
        }
        charges >= pages
    }

    fn release_frames(&self, run: FrameRun) {
        self.mmu.frames_release(run);
        self.frames.consume(run);
    }
}
