//! The market: which member gives memory to which in a tree of processes.
//!
//! No member is in charge. A member's background thread that finds the tree short of memory compares
//! what all hold: where its own is the most worth giving it reclaims at home, else it *requests
//! reclaim* of the member whose memory is: it writes a demand on that member's seat and calls it.
//! That member reclaims, gives the charge back, and calls the one that requested it.
//!
//! What is held beyond the *floor* is weighed by what a little less of it would cost: by the time that its
//! member lost lately to faults on pages that left memory not long ago, and that a sixteenth of the budget more
//! would have kept. A member that takes new memory, or goes round over much more than it holds, loses nothing
//! by holding less, however much it faults.
//!
//! A member that finds nothing anywhere for a while, with faults or a fork that wait, *asks*. A member
//! that holds more than its floor, and more than the one that asks, then charges nothing new for faults;
//! to a fork every member yields that holds more than its floor. An ask is good for [`ASK_MS`] only: a
//! member that is stopped while it asks holds no other up.
//!
//! A member is passed over that has nothing to give (it is *spent*, until that changes), that is
//! *silent* (it has no thread that would answer), or that has not moved for [`ANSWER_MS`] since it was
//! asked to reclaim: it is stopped, traced or frozen, and is not asked again before it has shown life.
//!
//! Where no member can give, the member that asked ends as ARCHITECTURE.md says under OOM, with a
//! message that says what held the memory. A fork fails with ENOMEM.
//!
//! A process that joins is not refused for the floors' sake. With so many members that half of an equal
//! share is less than [`FLOOR_MIN`] pages, the last one to ask finds no member that gives.

use core::sync::atomic::Ordering::{Relaxed, Release};

use super::Budget;
use crate::control::{Event, Member, Seat};
use crate::steps::{Step, reach};
use crate::sys::monotonic_ns;

/// What no member gives, if it is not more than half of an equal share.
const FLOOR_MAX: usize = 128;
/// What a member needs to get on at all: pages that one instruction may touch, and their tables.
pub(crate) const FLOOR_MIN: usize = 16;
/// Pages requested at a time.
const DEMAND_MAX: usize = 512;
/// How long a member may take to answer a request before it is passed over.
const ANSWER_MS: u32 = 100;
/// How long a member that requests reclaim goes without before it asks: what is short for a moment only must
/// not stop the others.
pub const ASK_AFTER_NS: u64 = 50_000_000;
/// How long an ask is good for.
const ASK_MS: u32 = 500;
/// How long a member that had nothing to give is passed over, where it holds the same as then.
const SPENT_MS: u32 = 1000;
/// A difference in what it holds that makes it worth another try.
const SPENT_PAGES: u32 = 32;
/// How often it is looked at what members lose for want of memory, and the unit of that, about a fault.
const LOOK_MS: u32 = 100;
const LOST_NS: u64 = 1 << 16;
/// Memory of the member that loses most counts for 1 / 2^5 of that of one that loses nothing.
const LOST_SHIFT_MAX: u32 = 5;

/// Where memory is to come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Donor {
    Home,
    Member(usize),
    /// No member that could be asked has any.
    Nobody,
}

/// Why a donor is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// To have some free.
    Balance,
    /// There is nothing at home.
    Starved,
}

/// What a member asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    /// Faults: others yield that hold more.
    Faults,
    /// A fork, which needs as much again as the member holds: others yield however little they hold,
    /// beyond their floor.
    Fork,
}

/// In a seat's `asks`: it is for a fork.
const FORK: u32 = 1 << 31;

/// Milliseconds of the monotonic clock. Never 0, which stands for "not yet".
fn now_ms() -> u32 {
    ((monotonic_ns() / 1_000_000) as u32).max(1)
}

const fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

const fn word_of(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

// Relaxed, here and below, where nothing else is said: hints, each of use by itself. What a thread
// is called for is ordered by the call.
impl Budget {
    /// Pages that this member keeps, whichever member asks. No more than half of an equal share, so that
    /// the floors of all fit, unless there are so many members that each would have too little to get
    /// on with.
    pub fn floor(&self) -> usize {
        let half = self.tree_limit() / self.members() / 2;
        half.clamp(FLOOR_MIN, FLOOR_MAX)
    }

    /// Says that this member cannot do without so many pages, and does not find them. To be said
    /// again as long as it is true.
    pub fn ask(&self, pages: usize, whom: For) {
        let seat = self.seat();
        let pages = pages.clamp(1, FORK as usize - 1) as u32;
        seat.asked_ms.store(now_ms(), Relaxed);
        seat.asks.store(if whom == For::Fork { pages | FORK } else { pages }, Relaxed);
        let (word, bit) = self.asking_bit();
        // Release, so that a thread that sees the bit sees how much.
        self.control().asking[word].fetch_or(bit, Release);
    }

    /// Says that it has them, or does without.
    pub fn stop_asking(&self) {
        let (word, bit) = self.asking_bit();
        let asking = &self.control().asking[word];
        if asking.load(Relaxed) & bit != 0 {
            asking.fetch_and(!bit, Relaxed);
            self.seat().asks.store(0, Relaxed);
            // Those that held back for this one may go on.
            self.control().wake_askers();
        }
    }

    fn asking_bit(&self) -> (usize, u64) {
        (self.slot() as usize / 64, 1 << (self.slot() % 64))
    }

    /// Whether what is free is another member's: one that asks.
    pub fn yields(&self) -> bool {
        // As a rule no member asks: a line that is hardly ever written.
        self.control().askers().any(|slot| slot != self.slot() as usize && self.yields_to(slot))
    }

    fn yields_to(&self, asker: usize) -> bool {
        let control = self.control();
        let seat = &control.seats[asker];
        let is_fresh = now_ms().wrapping_sub(seat.asked_ms.load(Relaxed)) < ASK_MS;
        if !is_fresh {
            return false;
        }
        let (own, others) = (self.account().get().granted, seat.account.get().granted);
        // Two that hold the same go by their slots: of two that ask one gets on.
        let is_after = (own, self.slot() as usize) > (others, asker);
        let is_fork = seat.asks.load(Relaxed) & FORK != 0;
        own as usize > self.floor() && (is_after || is_fork)
    }

    /// The most that a member asks for that this one yields to.
    pub fn owed(&self) -> usize {
        let control = self.control();
        let owed = |slot: usize| (control.seats[slot].asks.load(Relaxed) & !FORK) as usize;
        let is_owed = |&slot: &usize| slot != self.slot() as usize && self.yields_to(slot);
        control.askers().filter(is_owed).map(owed).max().unwrap_or(0)
    }

    /// Pages that this member is to give, as far as it has them beyond its floor.
    pub fn demand(&self) -> usize {
        self.seat().demand.load(Relaxed) as usize
    }

    /// Notes a step of the background thread: this member is not stopped.
    pub fn show_life(&self) {
        self.seat().life.fetch_add(1, Relaxed);
    }

    /// Notes that this member has given so many pages; the member that requested it is called once that
    /// is all.
    pub fn answer(&self, pages: usize) {
        let seat = self.seat();
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        let before = seat.demand.fetch_update(Relaxed, Relaxed, |demand| {
            (demand > 0).then(|| demand.saturating_sub(pages))
        });
        if before.is_ok_and(|before| before <= pages) {
            reach(Step::Answering);
            let by = seat.demanded_by.swap(0, Relaxed) as usize;
            if by > 0 {
                self.control().call(by - 1);
            }
            self.control().wake_askers();
        }
    }

    /// Notes that this member has nothing to give.
    pub fn answer_spent(&self) {
        let held = self.account().get().held;
        self.seat().spent.store(word_of(now_ms(), held.saturating_add(1)), Relaxed);
        self.answer(usize::MAX);
    }

    /// Requests that the member in `slot` give so many pages, or as many as are requested at a time.
    pub fn request_reclaim(&self, slot: usize, pages: usize) {
        let seat = &self.control().seats[slot];
        let life = seat.life.load(Relaxed);
        let (_, life_then) = halves(seat.demanded.load(Relaxed));
        if seat.demand.load(Relaxed) == 0 || life != life_then {
            // First: a thread that finds a demand finds when it was made.
            seat.demanded.store(word_of(now_ms(), life), Relaxed);
        }
        seat.demanded_by.store(self.slot() + 1, Relaxed);
        seat.demand.fetch_max(pages.min(DEMAND_MAX) as u32, Release);
        reach(Step::Requested);
        self.control().call(slot);
    }

    /// Where memory should come from: what is worth most is given first.
    pub fn donor(&self, need: Need) -> Donor {
        let control = self.control();
        let (own, now, floor) = (self.slot() as usize, now_ms(), self.floor());
        let mut best = (0, Donor::Nobody);
        for (slot, member) in control.present() {
            let seat = &control.seats[slot];
            let is_askable = if slot == own {
                need == Need::Balance
            } else {
                seat.is_silent.load(Relaxed) == 0 && !is_spent(seat, now) && !is_deaf(seat, now)
            };
            if !is_askable {
                continue;
            }
            let excess = (seat.account.get().granted as usize).saturating_sub(floor);
            // In parts of pages, so that a few pages of a member that loses much still count.
            let worth = (excess << LOST_SHIFT_MAX) >> lost_shift(seat, member, now);
            // At home, where two are worth the same: no thread is woken.
            if worth > best.0 || worth == best.0 && worth > 0 && slot == own {
                best = (worth, if slot == own { Donor::Home } else { Donor::Member(slot) });
            }
        }
        match best.1 {
            // No member has more than its floor: each reclaims at home.
            Donor::Nobody if need == Need::Balance => Donor::Home,
            donor => donor,
        }
    }

    /// Members that hold more than their floor and do not answer: stopped, traced or frozen.
    pub fn unanswering(&self) -> usize {
        let (control, now, floor) = (self.control(), now_ms(), self.floor());
        let is_unanswering = |&(slot, _): &(usize, _)| {
            let seat = &control.seats[slot];
            let held = seat.account.get().granted as usize;
            slot != self.slot() as usize && held > floor && is_deaf(seat, now)
        };
        control.present().filter(is_unanswering).count()
    }
}

/// Whether it had nothing to give, and nothing has changed.
fn is_spent(seat: &Seat, now: u32) -> bool {
    let (at, held) = halves(seat.spent.load(Relaxed));
    let held_now = seat.account.get().held.saturating_add(1);
    held > 0 && now.wrapping_sub(at) < SPENT_MS && held_now.abs_diff(held) < SPENT_PAGES
}

/// Whether it was asked to reclaim, and has not moved since.
fn is_deaf(seat: &Seat, now: u32) -> bool {
    let (at, life_then) = halves(seat.demanded.load(Relaxed));
    seat.demand.load(Relaxed) > 0
        && now.wrapping_sub(at) >= ANSWER_MS
        && seat.life.load(Relaxed) == life_then
}

/// By how many bits a member's memory is less worth giving for what the member loses lately: half of those of
/// the time. The first look after a while counts it.
fn lost_shift(seat: &Seat, member: &Member, now: u32) -> u32 {
    let looked = seat.looked_ms.load(Relaxed);
    let periods = now.wrapping_sub(looked) / LOOK_MS;
    let is_due = looked == 0 || periods > 0;
    if is_due && seat.looked_ms.compare_exchange(looked, now, Relaxed, Relaxed).is_ok() {
        let lost = (member.counted(Event::Refault16thNs) / LOST_NS) as u32;
        let new = lost.wrapping_sub(seat.lost_seen.swap(lost, Relaxed));
        // A member that has just come has lost all of it lately.
        let periods = if looked == 0 { 1 } else { periods };
        let kept = seat.lost_lately.load(Relaxed).checked_shr(periods).unwrap_or(0);
        seat.lost_lately.store(kept.saturating_add(new / periods), Relaxed);
    }
    let bits = u32::BITS - seat.lost_lately.load(Relaxed).leading_zeros();
    (bits / 2).min(LOST_SHIFT_MAX)
}
