//! The background thread: its step, its sleep, and when it gives up.

use core::sync::atomic::Ordering;

use super::Reclaimer;
use super::shrinker::{Pool, Shrinker};
use crate::control::{OUT_OF_MEMORY_UNANSWERING_SHIFT, Obituary};
use crate::mmu::Mmu;
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::swap::file::SwapSegments;
use crate::units::BLOCK_PAGES;

/// How long the thread sleeps at most where memory is wanted and none was freed.
pub const OOM_ROUND_MS: u64 = 10;
/// After so long no memory can be expected: without progress anywhere in the tree, and with
/// progress that is not ours. Time, not rounds: calls of others make those short.
const OOM_NS: u64 = 10_000_000_000;
const OOM_NS_MAX: u64 = 60_000_000_000;

/// What the background thread should do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Balance {
    /// Enough is free: sleep until memory is called for.
    Enough,
    /// Some progress was made, and more is needed.
    Progress,
    /// Nothing could be freed, though it is needed.
    Stuck,
    /// Another member was asked to give: wait for it a moment.
    Elsewhere,
}

/// How long there has been no memory for a fault, or a fork, of ours.
#[derive(Clone, Copy, Default, Debug)]
pub struct OomWait {
    /// When it began, and when progress was last seen; 0 is not yet.
    since: u64,
    progress_at: u64,
    progress: u64,
}

impl OomWait {
    /// How long it has lasted at `now`, both in nanoseconds.
    #[must_use]
    pub fn lasted_ns(&self, now: u64) -> u64 {
        if self.since == 0 { 0 } else { now - self.since }
    }

    /// Whether it has lasted too long at `now` (in nanoseconds), when so many pages have been
    /// freed or swapped out where memory may come from.
    #[must_use]
    pub fn is_hopeless(&mut self, now: u64, progress: u64) -> bool {
        if self.since == 0 {
            self.since = now;
        }
        if self.progress_at == 0 || progress != self.progress {
            self.progress = progress;
            self.progress_at = now;
        }
        now - self.progress_at > OOM_NS || now - self.since > OOM_NS_MAX
    }
}

/// What the background thread knows from step to step.
#[derive(Default)]
pub struct Kswapd {
    calls_seen: u32,
    oom_wait: OomWait,
}

impl Kswapd {
    /// Before a step: what is asked for from now on ends the sleep after it.
    pub fn begin<M: Mmu>(&mut self, space: &VmSpace<M>) {
        self.calls_seen = space.budget().calls();
        space.set_kswapd_awake(true);
    }

    /// After a step: how long faults have waited and nothing was freed, if they do.
    pub fn oom_wait(&mut self, balance: Balance, has_starved: bool) -> Option<&mut OomWait> {
        if has_starved && matches!(balance, Balance::Stuck | Balance::Elsewhere) {
            return Some(&mut self.oom_wait);
        }
        self.oom_wait = OomWait::default();
        None
    }

    /// Sleeps after a step, until memory is called for: where enough is free for `idle_ms` at most.
    pub fn sleep<M: Mmu>(&self, space: &VmSpace<M>, balance: Balance, idle_ms: Option<u64>) {
        let timeout_ms = match balance {
            Balance::Progress => return,
            Balance::Enough => {
                space.set_kswapd_awake(false);
                // A fault that looked before has seen the thread awake: hence the second look.
                if space.is_low() { Some(OOM_ROUND_MS) } else { idle_ms }
            }
            Balance::Stuck | Balance::Elsewhere => Some(OOM_ROUND_MS),
        };
        space.budget().wait_for_call(self.calls_seen, timeout_ms);
    }
}

impl<M: Mmu> VmSpace<M> {
    /// One step of the background thread.
    pub fn balance(&self, caches: &impl Shrinker, scratch: &mut Scratch) -> Balance {
        // Before anything is looked for: it costs no fault.
        self.swap.zpool.trim(&self.budget);
        self.answer_starved();
        self.make_room_for_fork(scratch);
        let pool_pages = self.swap.zpool.own_pages() as u64;
        self.budget.member().pool_pages.store(pool_pages, Ordering::Relaxed);
        self.look_at_border();
        let pool = Pool(self);
        pool.scan(pool.count(), Reclaimer::Kswapd, Some(scratch));
        if self.budget.members() > 1 {
            return self.balance_in_tree(caches, scratch);
        }
        self.balance_alone(caches, scratch)
    }

    /// The rest of it, where what this member needs can only be its own.
    pub(super) fn balance_alone(&self, caches: &impl Shrinker, scratch: &mut Scratch) -> Balance {
        self.give_excess_back();
        if self.budget.excess() == 0 && self.available() >= self.high_watermark() {
            let less = self.boost.load(Ordering::Relaxed).saturating_sub(1);
            self.boost.store(less, Ordering::Relaxed);
            return Balance::Enough;
        }
        self.reclaim_at_home(caches, scratch)
    }

    /// Frees some of this member's own.
    pub(super) fn reclaim_at_home(&self, caches: &impl Shrinker, scratch: &mut Scratch) -> Balance {
        let freed = self.reclaim(caches, BLOCK_PAGES / 2, Reclaimer::Kswapd, Some(scratch));
        if self.budget.members() > 1 {
            self.share_free_frames(0);
        }
        self.answer_starved();
        if freed > 0 { Balance::Progress } else { self.last_resort(scratch) }
    }

    /// Reclaim got nowhere: what else there is.
    pub(super) fn last_resort(&self, scratch: &mut Scratch) -> Balance {
        if Pool(self).scan(1, Reclaimer::Kswapd, Some(scratch)) > 0 || self.compact() > 0 {
            return Balance::Progress;
        }
        Balance::Stuck
    }

    /// Whether a fault waits for memory that reclaim did not find.
    pub fn has_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Notes that this process ends because no memory can be had for it.
    pub fn note_out_of_memory(&self) {
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
    fn a_wait_is_hopeless_by_time_and_not_by_how_often_it_is_asked() {
        let mut wait = OomWait::default();
        for step in 0..100_000 {
            assert!(!wait.is_hopeless(SECOND + step, 7));
        }
        assert!(!wait.is_hopeless(11 * SECOND, 7));
        assert!(wait.is_hopeless(12 * SECOND, 7));
    }

    #[test]
    fn progress_in_the_tree_prolongs_hope_but_not_for_ever() {
        let mut wait = OomWait::default();
        for second in 1..=61 {
            assert!(!wait.is_hopeless(second * SECOND, second));
        }
        assert!(wait.is_hopeless(62 * SECOND, 62));
    }

    #[test]
    fn the_wait_begins_anew_once_something_is_freed_or_no_fault_waits() {
        let mut kswapd = Kswapd::default();
        for (balance, has_starved) in
            [(Balance::Progress, true), (Balance::Enough, true), (Balance::Stuck, false)]
        {
            let wait = kswapd.oom_wait(Balance::Stuck, true).expect("it waits");
            assert!(!wait.is_hopeless(SECOND, 0));
            let wait = kswapd.oom_wait(Balance::Elsewhere, true).expect("it waits still");
            assert_eq!(wait.lasted_ns(3 * SECOND), 2 * SECOND);
            assert!(kswapd.oom_wait(balance, has_starved).is_none());
            let wait = kswapd.oom_wait(Balance::Stuck, true).expect("it waits again");
            assert_eq!(wait.lasted_ns(3 * SECOND), 0);
            kswapd = Kswapd::default();
        }
    }
}
