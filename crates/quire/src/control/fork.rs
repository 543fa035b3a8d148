//! One word of a member's slot, which says to whom the charge belongs that the member took for a child.
//!
//! Parent, child and supervisor may each be killed at any moment, and the parent must know for sure
//! whether the supervisor has moved the charge to the child: if it were given back twice, or never, the
//! account would be wrong for good. So the first to change the word decides.
//!
//! ```text
//! no fork      -- the parent begins -------------------------> UNDER_WAY
//! UNDER_WAY    -- the supervisor has the child's Hello -------> TAKEN
//! TAKEN        -- charge and segments are the child's --------> JOINED
//! UNDER_WAY    -- the child cannot join, and will end --------> REFUSED and an errno
//! UNDER_WAY    -- the parent sees it dead: keeps the charge --> no fork
//! ```
//!
//! Each fork has a number, in the word's upper part and in the child's `Hello`: the Hello of a child that
//! was given up finds another number, or no fork.
//!
//! # When one side is killed
//!
//! | which side is killed | at which step | what becomes of the others |
//! |---|---|---|
//! | parent | before the clone | there is no child; the supervisor takes back what the parent held, room for a child included |
//! | parent | after the clone, before the child's Hello is handled | a Hello that comes in the same round as the parent's end is handled first, and the child goes on; one that comes later finds no parent: the child ends with 125 and a message, and reads nothing |
//! | parent | later | the child has what is its own, and goes on |
//! | child | before its Hello is handled | the parent sees it dead within 20 ms, takes the charge back, and fork returns its id: the kill is seen by wait |
//! | child | between Hello and Welcome | either the parent gives up first, and the Hello is refused; or the supervisor is first, and gives back what it has moved when the connection closes |
//! | child | later | as any member |
//! | the child cannot join | no place, no supervisor, no userfaultfd | it says so in the word and ends; the parent reaps it, and fork is an error |
//! | supervisor | while it moves the charge | the child ends; the parent looks for 5 s and goes on |
//! | either is stopped | between clone and Hello | the parent's threads wait until it goes on: what they would write is being copied |

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};

/// The state's bits; above them is the fork's number.
const STATE: u32 = 0xfff;
const NUMBER_SHIFT: u32 = 12;

/// What a fork's three sides know of each other. See the module.
#[derive(Debug)]
#[repr(transparent)]
pub struct ForkWord(AtomicU32);

/// What has become of a fork's child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Child {
    None,
    /// It has not sent its Hello yet.
    UnderWay,
    /// The supervisor is moving to it what was charged for it.
    Taken,
    /// It has what was charged for it.
    Joined,
    /// It could not join, for the reason of this errno, and ends.
    Refused(u32),
}

impl Child {
    /// The state's number. Linux has fewer errnos than there is room for.
    fn number(self) -> u32 {
        match self {
            Child::None => 0,
            Child::UnderWay => 1,
            Child::Taken => 2,
            Child::Joined => 3,
            Child::Refused(errno) => 4 + errno.min(STATE - 4),
        }
    }

    fn of_number(number: u32) -> Child {
        match number {
            0 => Child::None,
            1 => Child::UnderWay,
            2 => Child::Taken,
            3 => Child::Joined,
            refused => Child::Refused(refused - 4),
        }
    }
}

impl ForkWord {
    /// A fork begins; returns its number. Only the member itself forks, one at a time.
    pub fn begin(&self) -> u32 {
        let number = (self.0.load(Ordering::Relaxed) >> NUMBER_SHIFT).wrapping_add(1);
        let number = number & (u32::MAX >> NUMBER_SHIFT);
        // Release pairs with the acquire of `take`: what was charged before is seen.
        self.0.store(word(number, Child::UnderWay), Ordering::Release);
        number
    }

    pub fn child(&self) -> Child {
        // Acquire pairs with `settle` and `refuse`.
        Child::of_number(self.0.load(Ordering::Acquire) & STATE)
    }

    /// Takes the charge from the parent, to be followed by [`Self::settle`]. `false` where the fork of
    /// this number is over. Only the supervisor calls this.
    pub fn take(&self, number: u32) -> bool {
        self.change(number, Child::UnderWay, Child::Taken)
    }

    /// Says that the child has what was charged for it. The supervisor calls this, after [`Self::take`].
    pub fn settle(&self, number: u32) {
        // Release pairs with the acquire of `child`: the parent goes on with its segments.
        self.0.store(word(number, Child::Joined), Ordering::Release);
        futex::wake(&self.0, u32::MAX, Reach::Tree);
    }

    /// Says that the child, which calls this, cannot join. Nothing happens where it has joined.
    pub fn refuse(&self, number: u32, errno: u32) {
        self.change(number, Child::UnderWay, Child::Refused(errno));
        futex::wake(&self.0, u32::MAX, Reach::Tree);
    }

    /// Says that the child is dead. `false` where the supervisor was quicker, and the charge is gone.
    /// Only the parent calls this.
    #[must_use]
    pub fn give_up(&self, number: u32) -> bool {
        self.change(number, Child::UnderWay, Child::None)
    }

    /// Ends the fork: no child of it is left that could ask to join. Only the parent calls this.
    pub fn end(&self, number: u32) {
        // Relaxed: a child that asks all the same finds this or what was before, and is refused.
        self.0.store(word(number, Child::None), Ordering::Relaxed);
    }

    /// Forgets all of it, for the slot's next member.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Sleeps while the fork of this number has a child known as `child`, at most `timeout_ms`; may
    /// return for no reason.
    pub fn wait(&self, number: u32, child: Child, timeout_ms: u64) {
        futex::wait(&self.0, word(number, child), Reach::Tree, Some(timeout_ms));
    }

    fn change(&self, number: u32, from: Child, to: Child) -> bool {
        let (from, to) = (word(number, from), word(number, to));
        // AcqRel: each change hands the charge on.
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

fn word(number: u32, child: Child) -> u32 {
    number << NUMBER_SHIFT | child.number()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRESH: fn() -> ForkWord = || ForkWord(AtomicU32::new(0));

    #[test]
    fn the_charge_is_the_childs_or_the_parents_and_never_both() {
        let fork = FRESH();
        let number = fork.begin();
        assert_eq!(fork.child(), Child::UnderWay);
        assert!(fork.take(number));
        assert_eq!(fork.child(), Child::Taken);
        assert!(!fork.give_up(number), "the supervisor has it");
        fork.refuse(number, 11);
        fork.settle(number);
        assert_eq!(fork.child(), Child::Joined);

        let number = fork.begin();
        assert!(fork.give_up(number));
        assert_eq!(fork.child(), Child::None);
        assert!(!fork.take(number), "the parent has it");
    }

    #[test]
    fn the_hello_of_a_child_that_was_given_up_finds_no_later_fork() {
        let fork = FRESH();
        let late = fork.begin();
        assert!(fork.give_up(late));
        let number = fork.begin();
        assert!(!fork.take(late));
        fork.refuse(late, 11);
        assert_eq!(fork.child(), Child::UnderWay);
        fork.refuse(number, 111);
        assert_eq!(fork.child(), Child::Refused(111));
        assert!(!fork.take(number), "it ends");
    }

    #[test]
    fn numbers_go_round() {
        let fork = FRESH();
        fork.end(u32::MAX >> NUMBER_SHIFT);
        assert_eq!(fork.begin(), 0);
        assert!(fork.take(0));
    }
}
