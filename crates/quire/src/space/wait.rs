//! Page locks, and waiting for pages, by their numbers: the arena's and objects'.
//!
//! Owns how the space sleeps, wakes and answers for its [`Pages`](crate::page::Pages), which have the
//! words, the queues and the records of parked faults.

use core::sync::atomic::AtomicU64;

use super::VmSpace;
use crate::control::Event;
use crate::mmu::Mmu;
use crate::page::wait::Counts;
use crate::page::{
    Condition, Interrupted, Kill, KillToken, LockedPage, PageLocks, PageWord, Parked, Parking,
    Snapshot,
};
use crate::units::PageNum;

impl<M: Mmu> Parking<AtomicU64> for VmSpace<M> {
    fn wait(&self, word: &AtomicU64, expected: u32, kill: Kill<'_>) {
        self.budget.count(Event::PageWait, 1);
        self.mmu.sleep_on(word, expected, kill);
    }

    fn wake(&self, word: *const AtomicU64) {
        self.budget.count(Event::PageWake, 1);
        self.mmu.wake_sleepers(word);
    }

    fn answer(&self, page: PageNum) {
        VmSpace::answer(self, page);
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Locks a page, sleeping where it must.
    pub fn lock_page(&self, page: PageNum) -> LockedPage<'_, Self> {
        self.mmu.step();
        let content = self.pages.waits.lock(self.word(page), self);
        LockedPage::adopt(self, page, content)
    }

    #[inline]
    pub fn try_lock_page(&self, page: PageNum) -> Option<LockedPage<'_, Self>> {
        self.word(page).try_lock().map(|content| LockedPage::adopt(self, page, content))
    }

    /// Locks a page if it is free, and as its content should be.
    #[inline]
    pub(crate) fn try_lock_if(
        &self,
        page: PageNum,
        mut is_wanted: impl FnMut(Snapshot) -> bool,
    ) -> Option<LockedPage<'_, Self>> {
        let seen = self.word(page).load();
        if seen.is_locked() || !is_wanted(seen) {
            return None;
        }
        self.try_lock_page(page).filter(|page| is_wanted(page.content()))
    }

    /// Locks the page that a packed page names as its owner, if it is a page and free.
    pub(crate) fn try_lock_owner(&self, owner: PageNum) -> Option<LockedPage<'_, Self>> {
        let content = self.pages.get(owner)?.try_lock()?;
        Some(LockedPage::adopt(self, owner, content))
    }

    /// Locks a page, sleeping where it must, until `kill` ends it.
    ///
    /// # Errors
    /// [`Interrupted`]: the lock is not taken.
    pub fn lock_page_killable(
        &self,
        page: PageNum,
        kill: Kill<'_>,
    ) -> Result<LockedPage<'_, Self>, Interrupted> {
        self.mmu.step();
        let content = self.pages.waits.lock_killable(self.word(page), kill, self)?;
        Ok(LockedPage::adopt(self, page, content))
    }

    /// Takes over the lock of a page that was [left locked](LockedPage::leave_locked).
    pub(crate) fn adopt_page(&self, page: PageNum) -> LockedPage<'_, Self> {
        LockedPage::adopt(self, page, self.snapshot(page))
    }

    /// Unlocks a page that was locked by its word, unchanged.
    pub(crate) fn unlock_page(&self, page: PageNum) {
        let parked = self.pages.waits.unlock(self.word(page), self);
        self.answer_parked(page, parked);
    }

    fn answer_parked(&self, page: PageNum, parked: Parked) {
        if parked == Parked::Yes {
            debug_assert!(self.arena().contains(page), "a fault is parked on an object's {page:?}");
            self.answer(page);
        }
        self.mmu.step();
    }

    /// Waits until `condition` is so; see [`WaitTable::wait_on`](crate::page::WaitTable::wait_on).
    pub fn wait_on_page(&self, page: PageNum, condition: Condition) -> Snapshot {
        self.mmu.step();
        self.pages.waits.wait_on(self.word(page), condition, self)
    }

    /// The same, until `kill` ends it.
    ///
    /// # Errors
    /// [`Interrupted`]: it was not so yet.
    pub fn wait_on_page_killable(
        &self,
        page: PageNum,
        condition: Condition,
        kill: Kill<'_>,
    ) -> Result<Snapshot, Interrupted> {
        self.mmu.step();
        self.pages.waits.wait_on_killable(self.word(page), condition, kill, self)
    }

    /// Ends the waits that were given `token`.
    pub fn cancel(&self, token: &KillToken) {
        token.cancel(self);
    }

    /// Leaves the fault at `answer` unanswered until `page`, of an object, is unlocked, which
    /// answers it. `false` where it is not locked any more, or too many wait already: the caller
    /// answers the fault, which is tried again then.
    #[must_use]
    pub fn park_fault_on(&self, page: PageNum, answer: PageNum) -> bool {
        self.mmu.step();
        self.pages.park(page, answer)
    }

    /// Whether every unlock looks for waiters, as if no word could say that there are none; for
    /// comparison. May change at any time.
    pub fn set_unlocks_always_look(&self, always_look: bool) {
        self.pages.waits.set_always_looks(always_look);
    }

    /// How often unlocks woke a waiter, and how often they need not.
    pub fn wait_counts(&self) -> Counts {
        self.pages.waits.counts()
    }
}

impl<M: Mmu> PageLocks for VmSpace<M> {
    #[inline]
    fn word(&self, page: PageNum) -> &PageWord {
        VmSpace::word(self, page)
    }

    fn unlock_unchanged(&self, page: PageNum) {
        self.unlock_page(page);
    }

    fn unlock_changed(&self, page: PageNum, content: Snapshot) {
        let parked = self.pages.waits.unlock_with(self.word(page), content, self);
        self.answer_parked(page, parked);
    }
}
