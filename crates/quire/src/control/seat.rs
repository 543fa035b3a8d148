//! A member's seat: its account, and where it stands in the market (`budget/market.rs`).
//!
//! Beside the account every word is a hint: any member writes it with a single store, it is of use
//! where it is true, and the next look corrects it where it is not. A member that is killed leaves at worst a
//! demand that no member waits for, or an ask that grows old; its seat is cleared with its slot.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::account::Account;

/// A member's seat. Times are milliseconds of the monotonic clock, which wrap around.
#[repr(C, align(64))]
pub struct Seat {
    /// What it may hold, and what it holds.
    pub account: Account,
    /// The futex that its background thread sleeps on: counts calls.
    pub calls: AtomicU32,
    /// 1 where no thread answers for it: it is never asked for memory.
    pub is_silent: AtomicU32,
    /// Pages that it cannot do without and does not find, 0 where there are none; the highest bit says
    /// that they are for a fork.
    pub asks: AtomicU32,
    /// When it last said so.
    pub asked_ms: AtomicU32,
    /// Pages that it is to give.
    pub demand: AtomicU32,
    /// The slot of the member that demanded them, plus one.
    pub demanded_by: AtomicU32,
    /// When they were first demanded (in the high half), and its `life` then (in the low half).
    pub demanded: AtomicU64,
    /// Steps of its background thread: one that is stopped takes none.
    pub life: AtomicU32,
    /// When a member last looked at what this one loses for want of memory; 0 for never.
    pub looked_ms: AtomicU32,
    /// When it last had nothing to give (in the high half), and the pages that it held then plus
    /// one (in the low half); 0 for never.
    pub spent: AtomicU64,
    /// Time that it had lost at that look, in the market's units.
    pub lost_seen: AtomicU32,
    /// Time that it loses lately, between two looks.
    pub lost_lately: AtomicU32,
}

const _: () = assert!(size_of::<Seat>() == 128, "two cache lines");

impl Seat {
    /// Forgets all that the seat's last member left. No member has the seat meanwhile.
    pub(super) fn clear(&self) {
        self.account.clear();
        self.demanded.store(0, Ordering::Relaxed);
        self.spent.store(0, Ordering::Relaxed);
        // All but the calls: a thread that sleeps there sleeps on.
        for word in [
            &self.is_silent,
            &self.asks,
            &self.asked_ms,
            &self.demand,
            &self.demanded_by,
            &self.life,
            &self.looked_ms,
            &self.lost_seen,
            &self.lost_lately,
        ] {
            word.store(0, Ordering::Relaxed);
        }
    }
}
