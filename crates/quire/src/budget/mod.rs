//! The budget: what this process holds, charged to its tree.
//!
//! Every page that the engine takes from the kernel is charged before it is taken and given back
//! after it is gone: mapped pages, frames of the pool, slabs of the compressed pool, tables.
//!
//! A charge goes to the member's own word, or is taken from the tree ([`crate::control::account`] says how).
//! A fault takes a *step* more than it needs while an eighth of the budget is free; when memory is short, every
//! member takes what it needs and gives back at once. All slack together is at most a 64th of the budget.
//! [`market`] says which member gives to which, [`unmanaged`] what happens when memory that is not managed
//! takes of the budget.

mod market;
mod unmanaged;

use core::sync::atomic::{AtomicU32, Ordering};

pub(crate) use self::market::FLOOR_MIN;
pub use self::market::{ASK_AFTER_NS, Donor, For, Need};
use crate::control::account::Account;
use crate::control::watermarks::reserve;
use crate::control::{Control, Event, FaultKind, Member, Obituary, Seat, raise};
use crate::steps::{Step, reach};
use crate::sys::futex::{self, Reach};
use crate::sys::monotonic_ns;
use crate::units::PAGE_SIZE;

/// Most pages that are taken from the tree beyond what is needed.
const STEP_MAX: usize = 64;
/// How often an intent that ran into another member's is tried again.
const TRIES: u32 = 4;
/// Pages wanted are summed up over the tree once for so many that come.
const WANTED_STEP: u64 = 64;

/// A process's side of the tree's account.
pub struct Budget {
    control: &'static Control,
    slot: AtomicU32,
    /// Slack that is kept when pages are given back: a step, or none while memory is short.
    slack_max: AtomicU32,
}

/// What memory is charged for, and so how much must be left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A fault: leaves the reserve alone.
    Fault,
    /// Reclaim itself, which needs memory to free memory.
    Reclaim,
    /// The engine's own tables.
    Tables,
    /// A fork, for its child: what one member may hold is no bound, for the child will be another one.
    Fork,
}

impl Budget {
    /// The account in `control`, as member `slot`.
    ///
    /// # Safety
    /// `control` points to a control page that stays mapped as long as the budget lives.
    pub const unsafe fn new(control: *const Control, slot: u32) -> Budget {
        Budget {
            // SAFETY: the caller's promise.
            control: unsafe { &*control },
            slot: AtomicU32::new(slot),
            slack_max: AtomicU32::new(0),
        }
    }

    #[inline]
    pub fn control(&self) -> &'static Control {
        self.control
    }

    pub fn slot(&self) -> u32 {
        self.slot.load(Ordering::Relaxed)
    }

    /// Becomes another member (a fork's child).
    pub fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Ordering::Relaxed);
        self.slack_max.store(0, Ordering::Relaxed);
    }

    #[inline]
    pub fn member(&self) -> &Member {
        &self.control().members[self.slot() as usize]
    }

    #[inline]
    fn seat(&self) -> &Seat {
        &self.control().seats[self.slot() as usize]
    }

    #[inline]
    fn account(&self) -> &Account {
        &self.seat().account
    }

    #[inline]
    pub fn held(&self) -> usize {
        self.account().get().held as usize
    }

    /// Pages that this member may charge whatever other members do.
    #[inline]
    pub fn slack(&self) -> usize {
        self.account().get().slack()
    }

    /// Pages that all members may hold: what the budget has for managed memory.
    #[inline]
    pub fn tree_limit(&self) -> usize {
        self.control().managed_limit()
    }

    /// Pages that this member may hold.
    #[inline]
    pub fn limit(&self) -> usize {
        self.own_limit().unwrap_or(usize::MAX).min(self.tree_limit())
    }

    /// The bound on what one member may hold, where there is one.
    fn own_limit(&self) -> Option<usize> {
        let own = self.control().member_pages_max.load(Ordering::Relaxed) as usize;
        (own != 0).then_some(own)
    }

    /// Whether `held` pages are more than one member may hold.
    fn passes_own_limit(&self, held: usize, purpose: Purpose) -> bool {
        purpose != Purpose::Fork && self.own_limit().is_some_and(|own| held > own)
    }

    /// Pages kept for reclaim itself, which needs memory to free memory; faults leave them alone, free
    /// frames included.
    pub fn reserve(&self) -> usize {
        reserve(self.limit())
    }

    /// Pages that are granted to no member.
    pub fn uncharged_by_tree(&self) -> usize {
        self.tree_limit().saturating_sub(self.control().granted())
    }

    /// Those of them that this member may have.
    pub fn uncharged(&self) -> usize {
        self.uncharged_by_tree().min(self.limit().saturating_sub(self.held()))
    }

    /// Whether this member has to reclaim what it needs from itself, for it holds about as much as one
    /// member may.
    pub fn is_at_own_limit(&self) -> bool {
        let own_left = || self.limit().saturating_sub(self.held());
        self.own_limit().is_some() && own_left() < self.uncharged_by_tree()
    }

    /// Pages that a fault of this member may charge, the reserve included.
    pub fn chargeable(&self) -> usize {
        if self.yields() { self.slack() } else { self.uncharged() + self.slack() }
    }

    /// What changes as long as memory may come from swap: the pages that went there, or further, of all
    /// members; where the swap file waits for a server, time itself, for the server may be back.
    pub fn swap_progress(&self) -> u64 {
        if self.control().far.is_full() {
            return monotonic_ns();
        }
        let moved =
            |member: &Member| member.counted(Event::Pswpout) + member.counted(Event::Zswpwb);
        self.control().present().map(|(_, member)| moved(member)).sum()
    }

    /// Charges `pages`, if they fit.
    #[inline]
    pub fn try_charge(&self, pages: usize, purpose: Purpose) -> bool {
        self.account().charge_slack(pages) || self.try_charge_from_tree(pages, purpose)
    }

    #[cold]
    fn try_charge_from_tree(&self, pages: usize, purpose: Purpose) -> bool {
        if purpose == Purpose::Fault && self.yields() {
            return false;
        }
        let kept = match purpose {
            Purpose::Fault => self.reserve(),
            Purpose::Reclaim | Purpose::Fork => self.reserve() / 4,
            Purpose::Tables => 0,
        };
        if self.passes_own_limit(self.held() + pages + kept, purpose) {
            return false;
        }
        let most = self.tree_limit().saturating_sub(kept);
        for _ in 0..TRIES {
            // A look before: an intent that is too large keeps others from what is there.
            let granted = self.control().granted() + pages.saturating_sub(self.slack());
            if granted > most {
                break;
            }
            let step = self.step_at(granted);
            let beyond = if purpose == Purpose::Fault { step } else { 0 };
            if self.charge_up_to(most, pages, beyond, purpose) {
                self.keep_slack(step);
                return true;
            }
        }
        self.keep_slack(0);
        false
    }

    /// Keeps so much slack from now on, where pages are given back.
    fn keep_slack(&self, pages: usize) {
        // Relaxed: how much is kept, no more. Every charge reads this line, so it is written only
        // where that changes.
        if self.slack_max.load(Ordering::Relaxed) != pages as u32 {
            self.slack_max.store(pages as u32, Ordering::Relaxed);
        }
    }

    /// Takes pages from the tree, and `beyond` more as slack where they fit, unless all members
    /// together would have more than `most` then.
    fn charge_up_to(&self, most: usize, pages: usize, beyond: usize, purpose: Purpose) -> bool {
        let account = self.account();
        let Some(mut intent) = account.intend(pages + beyond) else { return false };
        reach(Step::Intended);
        let mut granted = self.control().granted();
        if granted > most && beyond > 0 {
            intent = account.take_back(intent, beyond);
            granted = self.control().granted();
        } else if beyond > 0 {
            account.leave_as_slack(beyond);
        }
        // Another thread may have been quicker to take what this member may hold.
        let own = account.get();
        if granted > most || self.passes_own_limit(own.held as usize, purpose) {
            let _ = account.take_back(intent, pages);
            return false;
        }
        raise(&self.control().held_pages_max, granted as u64);
        // What is charged for a child is not what this member held.
        if purpose != Purpose::Fork {
            raise(&self.member().held_pages_max, own.granted.into());
        }
        true
    }

    /// How much more than it needs a member may take when so many pages are granted: all slack
    /// together is no more than a part of the budget like the reserve.
    fn step_at(&self, granted: usize) -> usize {
        let limit = self.tree_limit();
        // Where there is a bound on one member, it is counted to the page.
        if self.own_limit().is_some() || granted > limit - limit / 8 {
            return 0;
        }
        (limit / 64 / self.members()).min(STEP_MAX)
    }

    /// Charges `pages` that are there already, whether they fit or not.
    pub fn charge_anyway(&self, pages: usize) {
        self.account().put_in(pages);
        let control = self.control();
        raise(&control.held_pages_max, control.granted() as u64);
        raise(&self.member().held_pages_max, self.account().get().granted.into());
    }

    #[inline]
    pub fn uncharge(&self, pages: usize) {
        if pages > 0 {
            let slack_max = self.slack_max.load(Ordering::Relaxed) as usize;
            self.account().uncharge(pages, slack_max);
        }
    }

    /// Gives back what was taken beyond need, until memory is plentiful again; returns how much
    /// that was.
    pub fn give_slack_back(&self) -> usize {
        self.keep_slack(0);
        self.account().give_slack_back()
    }

    /// Processes that live on the budget.
    pub fn members(&self) -> usize {
        self.control().present().count().max(1)
    }

    pub fn pool_pages_of_others(&self) -> usize {
        let pages = |member: &Member| member.pool_pages.load(Ordering::Relaxed);
        let all: u64 = self.control().present().map(|(_, member)| pages(member)).sum();
        (all - self.member().pool_pages.load(Ordering::Relaxed).min(all)) as usize
    }

    /// Counts pages of data that have come (or gone, where negative).
    pub fn add_wanted(&self, pages: isize) {
        if pages == 0 {
            return;
        }
        let member = self.member();
        let delta = pages as i64 as u64;
        // Wrapping addition of a negative number.
        let own = member.wanted_pages.fetch_add(delta, Ordering::Relaxed).wrapping_add(delta);
        if pages > 0 {
            raise(&member.wanted_pages_max, own);
            let before = own.wrapping_sub(delta);
            if own / WANTED_STEP != before / WANTED_STEP && self.members() > 1 {
                self.control().note_wanted();
            }
        }
    }

    /// Counts pages of address space that have come or gone.
    pub fn add_managed(&self, pages: isize) {
        let member = self.member();
        let delta = pages as i64 as u64;
        let all = member.managed_pages.fetch_add(delta, Ordering::Relaxed).wrapping_add(delta);
        if pages > 0 {
            raise(&member.managed_pages_max, all);
        }
    }

    #[inline]
    pub fn count(&self, event: Event, times: usize) {
        if times > 0 {
            self.member().count(event, times as u64);
        }
    }

    #[inline]
    pub fn count_fault_time(&self, kind: FaultKind, ns: u64) {
        self.member().count_fault_time(kind, ns);
    }

    pub fn counted(&self, event: Event) -> u64 {
        self.member().counted(event)
    }

    /// Calls for memory: this member's background thread looks at its pages.
    pub fn call_for_memory(&self) {
        self.control().call(self.slot() as usize);
    }

    /// How often this member's background thread was called.
    pub fn calls(&self) -> u32 {
        // Acquire pairs with the release in `Control::call`.
        self.seat().calls.load(Ordering::Acquire)
    }

    /// Sleeps until this member is called, where it was called `seen` times so far.
    pub fn wait_for_call(&self, seen: u32, timeout_ms: Option<u64>) {
        futex::wait(&self.seat().calls, seen, Reach::Tree, timeout_ms);
    }

    pub fn limit_bytes(&self) -> usize {
        self.limit() * PAGE_SIZE
    }

    /// Leaves the reason of this process's end where the supervisor finds it.
    pub fn leave_obituary(&self, obituary: Obituary, detail: u64) {
        let member = self.member();
        member.obituary_detail.store(detail, Ordering::Relaxed);
        // Release publishes the detail; the supervisor reads it after the process has gone.
        member.obituary.store(obituary as u32, Ordering::Release);
    }
}
