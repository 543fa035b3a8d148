//! What needs to look into the table.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::*;
use crate::page::{Condition, Kill, PageWord, Parking};
use crate::units::PageNum;

#[test]
fn a_wait_for_a_free_lock_loses_it_to_stealers_no_more_often_than_one_for_the_lock() {
    let (table, word) = (WaitTable::new().unwrap(), PageWord(AtomicU64::new(0)));
    /// Counts answers and wakes.
    struct Thief(AtomicU32);
    impl Parking<AtomicU64> for Thief {
        fn wait(&self, _: &AtomicU64, _: u32, _: Kill<'_>) {}
        fn wake(&self, _: *const AtomicU64) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn answer(&self, _: PageNum) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let thief = Thief(AtomicU32::new(0));
    word.try_lock().unwrap();
    let record = Waiter::default();
    // SAFETY: the record outlives all unlocks of the word.
    assert!(unsafe {
        table.queue_callback(&word, &record, Condition::UNLOCKED, Callback::answer(PageNum(1)))
    });
    for _ in 0..STEALS_MAX {
        // An unlock that comes to the queue when the lock is taken again.
        assert!(!table.serve(&word, &thief));
        assert_eq!(thief.0.load(Ordering::Relaxed), 0);
    }
    assert!(word.load().has_handoff(), "the next unlock keeps the lock free until it has looked");
    assert_eq!(table.unlock(&word, &thief), Parked::No);
    assert_eq!(thief.0.load(Ordering::Relaxed), 1);
    assert_eq!(word.0.into_inner(), 0, "a sign was left");
}

#[test]
fn a_queue_of_zeros_is_free_and_empty() {
    let table = WaitTable::new().unwrap();
    for queue in table.queues.iter() {
        assert!(!queue.0.is_locked());
        assert!(queue.0.lock().is_empty());
    }
    assert_eq!(table.counts(), Counts::default());
}
