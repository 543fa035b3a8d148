//! A member's account: what it may hold and what it holds, in one word.
//!
//! The tree's account is the sum of these words; it has no word of its own. So a member that is
//! killed at any moment leaves an account that is right for what it held, and one zero that is written
//! takes it back.
//!
//! The word: pages granted (taken from the tree) in the high half, pages held (charged) in the low
//! half. What is granted and not held is the member's *slack*: the member charges it without a look at
//! other members. A member holds 16 TiB at most.
//!
//! # Taking more from the tree
//!
//! A thread that takes more first raises both halves (an *intent*, which is no slack, so that no other
//! thread of the member spends it). Then it sums up all words; where the sum is too large it takes the
//! intent back. Of two threads that do so at once the one that raised later sees the other's intent. So
//! what is confirmed never adds up to more than the limit; both may fail where only one had to.
//!
//! No locks; one compare-and-swap loop.

use core::sync::atomic::{AtomicU64, Ordering};

/// The word, alone on its cache line: every member that takes from the tree reads it.
#[repr(C, align(64))]
pub struct Account(AtomicU64);

/// What an account said at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccountState {
    /// Pages taken from the tree.
    pub granted: u32,
    /// Of them, pages charged.
    pub held: u32,
}

/// More pages taken from the tree than is known to be allowed: it is confirmed, or taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Intent {
    /// Pages that were charged.
    pages: u32,
    /// Of them, those that were no slack before.
    taken: u32,
}

impl AccountState {
    pub const fn slack(self) -> usize {
        (self.granted - self.held) as usize
    }

    const fn of(word: u64) -> AccountState {
        AccountState { granted: (word >> 32) as u32, held: word as u32 }
    }

    const fn word(self) -> u64 {
        (self.granted as u64) << 32 | self.held as u64
    }
}

impl Account {
    /// What it says now. Relaxed, so that it works where the page is mapped to be read only.
    pub fn get(&self) -> AccountState {
        AccountState::of(self.0.load(Ordering::Relaxed))
    }

    /// What is granted, for a thread that has raised an account and adds up all of them.
    pub(super) fn granted_in_order(&self) -> usize {
        // SeqCst, with the raise in `intend`: of two that raise and look, one sees the other.
        AccountState::of(self.0.load(Ordering::SeqCst)).granted as usize
    }

    /// The one loop that changes the word. `None` leaves it alone. Returns what it was, where it was changed.
    fn change(
        &self,
        mut change: impl FnMut(AccountState) -> Option<AccountState>,
    ) -> Option<AccountState> {
        // SeqCst: the intents of all members are in one order with the sums; see above.
        let before = self.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |word| {
            let new = change(AccountState::of(word))?;
            debug_assert!(new.held <= new.granted, "{new:?}");
            Some(new.word())
        });
        before.ok().map(AccountState::of)
    }

    /// Charges pages out of the slack; `false` where it is too little.
    #[must_use]
    pub fn charge_slack(&self, pages: usize) -> bool {
        self.change(|now| {
            (pages <= now.slack()).then(|| AccountState { held: now.held + pages as u32, ..now })
        })
        .is_some()
    }

    /// Charges pages whether they are granted or not: slack first, the rest taken from the tree.
    /// `None` where the account would overflow.
    pub fn intend(&self, pages: usize) -> Option<Intent> {
        let pages = u32::try_from(pages).ok()?;
        let before = self.change(|now| {
            let held = now.held.checked_add(pages)?;
            Some(AccountState { granted: now.granted.max(held), held })
        })?;
        Some(Intent { pages, taken: pages.saturating_sub(before.slack() as u32) })
    }

    /// Takes an intent back, or a part of it: so many `pages` are neither held nor, as far as they
    /// were taken for it, granted. Returns what is left of the intent.
    pub fn take_back(&self, intent: Intent, pages: usize) -> Intent {
        let pages = pages.min(intent.pages as usize) as u32;
        let taken = pages.min(intent.taken);
        let _ = self.change(|now| {
            let held = now.held.saturating_sub(pages);
            Some(AccountState { granted: (now.granted - taken).max(held), held })
        });
        Intent { pages: intent.pages - pages, taken: intent.taken - taken }
    }

    /// Turns so many pages of a confirmed intent into slack.
    pub fn leave_as_slack(&self, pages: usize) {
        self.uncharge(pages, usize::MAX);
    }

    /// Gives pages back that were charged; slack beyond `slack_max` goes back to the tree.
    pub fn uncharge(&self, pages: usize, slack_max: usize) {
        let _ = self.change(|now| {
            debug_assert!(pages <= now.held as usize, "{pages} are given back of {now:?}");
            let held = now.held.saturating_sub(pages as u32);
            let slack = ((now.granted - held) as usize).min(slack_max);
            Some(AccountState { granted: held + slack as u32, held })
        });
    }

    /// Gives the slack back to the tree; returns how much that was.
    pub fn give_slack_back(&self) -> usize {
        let gave = self.change(|now| {
            (now.slack() > 0).then_some(AccountState { granted: now.held, held: now.held })
        });
        gave.map_or(0, AccountState::slack)
    }

    /// Charges pages that were another account's, whether they fit or not.
    pub fn put_in(&self, pages: usize) {
        let _ = self.intend(pages);
    }

    /// Takes up to so many held pages out of the account, for another one; returns how many there
    /// were. Only the supervisor calls this, with the other account raised first: what is counted
    /// twice for a moment is safe, what is not counted is not.
    pub fn take_out(&self, pages: usize) -> usize {
        let before = self.change(|now| {
            let held = now.held.saturating_sub(u32::try_from(pages).unwrap_or(u32::MAX));
            Some(AccountState { granted: now.granted - (now.held - held), held })
        });
        before.map_or(0, |before| pages.min(before.held as usize))
    }

    /// Empties the account: its member is gone, or has not come yet.
    pub fn clear(&self) {
        // Relaxed: what orders one member's end before the next one's beginning is the socket by
        // which they leave and join.
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account(AtomicU64::new(0))
    }

    fn pages(granted: u32, held: u32) -> AccountState {
        AccountState { granted, held }
    }

    #[test]
    fn an_intent_is_no_slack_and_goes_as_it_came() {
        let account = account();
        let first = account.intend(10).unwrap();
        assert_eq!(account.get(), pages(10, 10));
        assert!(!account.charge_slack(1), "another thread would spend what is not granted");
        // Another thread frees three pages meanwhile, and they stay with the member.
        account.uncharge(3, 8);
        assert_eq!(account.get(), pages(10, 7));
        // A second intent uses that slack first.
        let second = account.intend(5).unwrap();
        assert_eq!(account.get(), pages(12, 12));
        let _ = account.take_back(second, 5);
        assert_eq!(account.get(), pages(10, 7));
        let _ = account.take_back(first, 4);
        assert_eq!(account.get(), pages(6, 3));
    }

    #[test]
    fn what_is_too_much_of_an_intent_goes_before_the_rest() {
        let account = account();
        let intent = account.intend(64 + 3).unwrap();
        let rest = account.take_back(intent, 64);
        assert_eq!(account.get(), pages(3, 3));
        let _ = account.take_back(rest, 3);
        assert_eq!(account.get(), pages(0, 0));
    }

    #[test]
    fn slack_is_charged_kept_and_given_back() {
        let account = account();
        let _ = account.intend(20).unwrap();
        account.leave_as_slack(16);
        assert_eq!(account.get(), pages(20, 4));
        assert!(account.charge_slack(16) && !account.charge_slack(1));
        account.uncharge(10, 4);
        assert_eq!(account.get(), pages(14, 10));
        account.uncharge(1, 0);
        assert_eq!(account.get(), pages(9, 9));
        account.uncharge(2, 2);
        assert_eq!((account.give_slack_back(), account.give_slack_back()), (2, 0));
        assert_eq!(account.get(), pages(7, 7));
    }

    #[test]
    fn no_more_is_taken_out_than_is_there() {
        let account = account();
        let _ = account.intend(9).unwrap();
        account.uncharge(2, 2);
        assert_eq!(account.take_out(3), 3);
        assert_eq!(account.get(), pages(6, 4));
        assert_eq!(account.take_out(usize::MAX), 4);
        assert_eq!(account.get(), pages(2, 0));
    }

    #[test]
    fn an_account_does_not_overflow() {
        let account = account();
        let _ = account.intend(u32::MAX as usize).unwrap();
        assert_eq!(account.intend(1), None);
        assert_eq!(account.intend(1 << 32), None);
        assert_eq!(account.get(), pages(u32::MAX, u32::MAX));
    }
}
