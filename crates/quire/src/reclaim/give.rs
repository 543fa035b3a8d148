//! The background thread's step where the budget is shared: what others are to have of this member,
//! and where this member's own comes from.
//!
//! Owns the giving. Leaves to [`crate::budget`] which member is asked for what.

use super::{Balance, OomWait, Reclaimer, Shrinker};
use crate::budget::{ASK_AFTER_NS, Donor, For, Need};
use crate::mmu::Mmu;
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::sys::monotonic_ns;

impl<M: Mmu> VmSpace<M> {
    /// One step of the background thread of a member that is not alone.
    pub(super) fn balance_in_tree(&self, caches: &impl Shrinker, scratch: &mut Scratch) -> Balance {
        self.budget.show_life();
        self.budget.give_slack_back();
        self.share_free_frames(0);
        if self.budget.is_at_own_limit() && self.budget.demand() == 0 {
            return self.balance_alone(caches, scratch);
        }
        let wanted = self.high_watermark().max(self.budget.owed());
        if self.free_in_tree() >= wanted {
            self.budget.answer(usize::MAX);
            return Balance::Enough;
        }
        if self.budget.demand() > 0 {
            return self.give(caches, scratch);
        }
        match self.budget.donor(Need::Balance) {
            Donor::Member(slot) => {
                let missing = wanted.saturating_sub(self.free_in_tree());
                self.budget.request_reclaim(slot, missing);
                Balance::Elsewhere
            }
            Donor::Home | Donor::Nobody => self.reclaim_at_home(caches, scratch),
        }
    }

    /// Pages that a fault of any member could charge.
    fn free_in_tree(&self) -> usize {
        self.budget.uncharged_by_tree().saturating_sub(self.budget.reserve())
    }

    /// Gives what is demanded of this member, a step of it.
    fn give(&self, caches: &impl Shrinker, scratch: &mut Scratch) -> Balance {
        let demand = self.budget.demand();
        let excess = self.budget.held().saturating_sub(self.budget.floor());
        if excess == 0 {
            self.budget.answer_spent();
            return Balance::Progress;
        }
        let demand = demand.min(excess);
        let mut given = self.share_free_frames(demand);
        if given < demand {
            let freed = self.reclaim(caches, demand - given, Reclaimer::Kswapd, Some(scratch));
            self.share_free_frames(demand - given);
            given += freed;
        }
        if given > 0 {
            self.budget.answer(given);
            self.answer_starved();
            return Balance::Progress;
        }
        let balance = self.last_resort(scratch);
        if balance == Balance::Stuck {
            self.budget.answer_spent();
        }
        balance
    }

    /// Requests so many pages of the member whose turn it is; `false` where it is this one's turn, or
    /// no member has any. A member that has waited for long enough asks for them as well.
    pub(crate) fn request_reclaim_for(
        &self,
        whom: For,
        need: Need,
        pages: usize,
        wait: &OomWait,
    ) -> bool {
        if wait.lasted_ns(monotonic_ns()) >= ASK_AFTER_NS {
            self.budget.ask(pages, whom);
        }
        let Donor::Member(slot) = self.budget.donor(need) else { return false };
        self.budget.request_reclaim(slot, pages);
        true
    }

    /// Free frames of one member are of no use to another: gives them back, `demand` of them, or as
    /// many as the tree has too few of that nobody has charged. Returns how many.
    pub(super) fn share_free_frames(&self, demand: usize) -> usize {
        let wanted = self.high_watermark().max(self.budget.owed()) + self.budget.reserve();
        let missing = wanted.saturating_sub(self.budget.uncharged_by_tree()).max(demand);
        let excess = self.budget.excess();
        let keep = self.frames.free().saturating_sub(missing + excess);
        self.release_free_frames(keep.max(self.kept_of(excess)))
    }
}
