//! The budget account: what this process holds, charged to its tree.
//!
//! One word for the tree, one for the member; a charge takes both or neither. Every page that the
//! engine takes from the kernel is charged before it is taken and given back after it is gone:
//! mapped pages, frames of the pool, slabs of the compressed pool, tables.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::control::{Control, Event, FaultKind, Member, Obituary};
use crate::sys::futex::{self, Reach};
use crate::units::PAGE_SHIFT;

/// A process's side of the tree's account.
pub struct Budget {
    control: AtomicPtr<Control>,
    slot: AtomicU32,
}

/// Who asks for memory, and so how deep into it they may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A fault: leaves the reserve alone.
    Fault,
    /// Reclaim itself, which needs memory to free memory.
    Reclaim,
    /// The engine's own tables.
    Tables,
    /// A fork, for its child: not bounded by what one member may hold, for the child will be another.
    Fork,
}

impl Budget {
    /// The account in `control`, as member `slot`.
    ///
    /// # Safety
    /// `control` points to a control page that stays mapped as long as the budget lives.
    pub const unsafe fn new(control: *mut Control, slot: u32) -> Budget {
        Budget { control: AtomicPtr::new(control), slot: AtomicU32::new(slot) }
    }

    /// The control page.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: promised to `new`.
        unsafe { &*self.control.load(Ordering::Relaxed) }
    }

    /// This member's slot number.
    pub fn slot(&self) -> u32 {
        self.slot.load(Ordering::Relaxed)
    }

    /// Becomes another member (a fork's child).
    pub fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Ordering::Relaxed);
    }

    /// This member's account.
    #[inline]
    pub fn member(&self) -> &Member {
        &self.control().members[self.slot() as usize]
    }

    /// Pages of the budget.
    #[inline]
    pub fn tree_limit(&self) -> usize {
        self.control().budget_pages.load(Ordering::Relaxed) as usize
    }

    /// Pages that this member may hold.
    #[inline]
    pub fn limit(&self) -> usize {
        match self.control().member_pages_max.load(Ordering::Relaxed) as usize {
            0 => self.tree_limit(),
            own => own.min(self.tree_limit()),
        }
    }

    /// Pages kept for reclaim itself.
    pub fn reserve(&self) -> usize {
        (self.limit() / 64).clamp(32, 1024)
    }

    /// Pages that nobody has charged.
    #[inline]
    pub fn uncharged_by_tree(&self) -> usize {
        let held = self.control().held_pages.load(Ordering::Relaxed) as usize;
        self.tree_limit().saturating_sub(held)
    }

    /// Those of them that this member may have.
    #[inline]
    pub fn uncharged(&self) -> usize {
        let held = self.member().held_pages.load(Ordering::Relaxed) as usize;
        self.uncharged_by_tree().min(self.limit().saturating_sub(held))
    }

    /// Whether what nobody has charged is another member's: one that finds no memory at all, while
    /// this one holds more than its share.
    fn yields(&self) -> bool {
        self.wanted_by_hungry().is_some()
    }

    /// Pages that another member cannot do without, where this one holds more than its share.
    fn wanted_by_hungry(&self) -> Option<usize> {
        let hungry = self.control().hungry.load(Ordering::Relaxed);
        let is_other = hungry != 0 && hungry as u32 != self.slot() + 1;
        (is_other && self.is_beyond_share()).then_some((hungry >> 32) as usize)
    }

    /// Pages beyond the reserve that this member should see free for another's sake.
    pub fn owed(&self) -> usize {
        self.wanted_by_hungry().unwrap_or(0)
    }

    /// Whether this member holds more than it would if all of the tree held the same.
    fn is_beyond_share(&self) -> bool {
        let held = self.member().held_pages.load(Ordering::Relaxed) as usize;
        held > self.tree_limit() / self.members()
    }

    /// Pages that a fault of this member may charge.
    pub fn chargeable(&self) -> usize {
        if self.yields() { 0 } else { self.uncharged() }
    }

    /// Tells the tree whether this member finds no memory, and how many pages it cannot do
    /// without. One that holds more than its share is not heard: it has to find what it needs at
    /// home.
    pub fn set_hungry(&self, wanted: Option<usize>) {
        let hungry = &self.control().hungry;
        let own = self.slot() + 1;
        // Relaxed: a hint; of several that are hungry the last to say so is fed first.
        if let Some(pages) = wanted.filter(|_| !self.is_beyond_share()) {
            hungry.store((pages as u64) << 32 | u64::from(own), Ordering::Relaxed);
            return;
        }
        let seen = hungry.load(Ordering::Relaxed);
        if seen as u32 == own {
            let _ = hungry.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Stops yielding to whoever is hungry: it may be stopped, and take nothing for hours.
    pub fn forget_hungry(&self) {
        self.control().hungry.store(0, Ordering::Relaxed);
    }

    /// Pages that went to swap, or further, of all members.
    pub fn swapped_out_by_tree(&self) -> u64 {
        let moved =
            |member: &Member| member.counted(Event::Pswpout) + member.counted(Event::Zswpwb);
        self.control().present().map(|(_, member)| moved(member)).sum()
    }

    /// Whether `held` pages are more than one member may hold.
    fn passes_own_limit(&self, held: u64, purpose: Purpose) -> bool {
        let own = self.control().member_pages_max.load(Ordering::Relaxed);
        own != 0 && held > own && purpose != Purpose::Fork
    }

    /// Charges this member alone, unless another thread was quicker to take what it may hold.
    fn add_to_own(&self, pages: usize, purpose: Purpose) -> bool {
        let member = self.member();
        let held = member.held_pages.fetch_add(pages as u64, Ordering::Relaxed) + pages as u64;
        if self.passes_own_limit(held, purpose) {
            member.held_pages.fetch_sub(pages as u64, Ordering::Relaxed);
            return false;
        }
        // What is a child's is not what this one held.
        if purpose != Purpose::Fork {
            raise(&member.held_pages_max, held);
        }
        true
    }

    /// Charges `pages`, if they fit.
    pub fn try_charge(&self, pages: usize, purpose: Purpose) -> bool {
        let control = self.control();
        if purpose == Purpose::Fault && self.yields() {
            return false;
        }
        let kept = match purpose {
            Purpose::Fault => self.reserve(),
            Purpose::Reclaim | Purpose::Fork => self.reserve() / 4,
            Purpose::Tables => 0,
        };
        let own = self.member().held_pages.load(Ordering::Relaxed);
        if self.passes_own_limit(own + (pages + kept) as u64, purpose) {
            return false;
        }
        let limit = self.tree_limit().saturating_sub(kept) as u64;
        let mut held = control.held_pages.load(Ordering::Relaxed);
        loop {
            let new = held + pages as u64;
            if new > limit {
                return false;
            }
            // Relaxed: the account orders nothing else.
            match control.held_pages.compare_exchange_weak(
                held,
                new,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    raise(&control.held_pages_max, new);
                    if self.add_to_own(pages, purpose) {
                        return true;
                    }
                    control.held_pages.fetch_sub(pages as u64, Ordering::Relaxed);
                    return false;
                }
                Err(found) => held = found,
            }
        }
    }

    /// Charges `pages` that are there already, whether they fit or not.
    pub fn charge_anyway(&self, pages: usize) {
        let control = self.control();
        let held = control.held_pages.fetch_add(pages as u64, Ordering::Relaxed) + pages as u64;
        raise(&control.held_pages_max, held);
        let member = self.member();
        let own = member.held_pages.fetch_add(pages as u64, Ordering::Relaxed) + pages as u64;
        raise(&member.held_pages_max, own);
    }

    /// Gives `pages` back.
    pub fn uncharge(&self, pages: usize) {
        if pages > 0 {
            self.member().held_pages.fetch_sub(pages as u64, Ordering::Relaxed);
            self.control().held_pages.fetch_sub(pages as u64, Ordering::Relaxed);
        }
    }

    /// Processes that live on the budget.
    pub fn members(&self) -> usize {
        self.control().present().count().max(1)
    }

    /// Pages of the other members' compressed pools.
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
        let (member, control) = (self.member(), self.control());
        let delta = pages as i64 as u64;
        // Wrapping addition of a negative number.
        let own = member.wanted_pages.fetch_add(delta, Ordering::Relaxed).wrapping_add(delta);
        let all = control.wanted_pages.fetch_add(delta, Ordering::Relaxed).wrapping_add(delta);
        if pages > 0 {
            raise(&member.wanted_pages_max, own);
            raise(&control.wanted_pages_max, all);
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

    /// Counts an event.
    #[inline]
    pub fn count(&self, event: Event, times: usize) {
        if times > 0 {
            self.member().count(event, times as u64);
        }
    }

    /// Counts a fault of a kind that took `ns`.
    #[inline]
    pub fn count_fault_time(&self, kind: FaultKind, ns: u64) {
        self.member().count_fault_time(kind, ns);
    }

    /// What has been counted so far.
    pub fn counted(&self, event: Event) -> u64 {
        self.member().counted(event)
    }

    /// Calls for memory: every member's background thread looks at its pages.
    pub fn call_for_memory(&self) {
        let pressure = &self.control().pressure;
        pressure.fetch_add(1, Ordering::Relaxed);
        futex::wake(pressure, u32::MAX, Reach::Tree);
    }

    /// Leaves the reason of this process's end where the supervisor finds it.
    pub fn leave_obituary(&self, obituary: Obituary, detail: u64) {
        let member = self.member();
        member.obituary_detail.store(detail, Ordering::Relaxed);
        // Release publishes the detail; the supervisor reads it after the process has gone.
        member.obituary.store(obituary as u32, Ordering::Release);
    }

    /// Bytes of the budget.
    pub fn limit_bytes(&self) -> usize {
        self.limit() << PAGE_SHIFT
    }
}

impl crate::swap::Account for Budget {
    fn try_charge(&self, pages: usize) -> bool {
        Budget::try_charge(self, pages, Purpose::Reclaim)
    }

    fn uncharge(&self, pages: usize) {
        Budget::uncharge(self, pages);
    }
}

fn raise(max: &AtomicU64, value: u64) {
    if max.load(Ordering::Relaxed) < value {
        max.fetch_max(value, Ordering::Relaxed);
    }
}
