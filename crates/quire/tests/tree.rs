//! One budget, several members: who yields to whom.

mod common;

use std::sync::atomic::Ordering;

use common::{Tree, control};
use quire::budget::{Budget, Purpose};

const LIMIT: usize = 4096;

/// Two members: one with most of the budget, one with little.
fn rich_and_poor() -> (Budget, Budget) {
    let control = control(Tree { budget_pages: LIMIT, ..Tree::default() });
    // SAFETY: the control page is never unmapped.
    let members = [0, 1].map(|slot| unsafe { Budget::new(control.as_ptr(), slot) });
    let [rich, poor] = members;
    poor.control().take_slot(1, 1);
    assert!(rich.try_charge(3000, Purpose::Fault));
    assert!(poor.try_charge(500, Purpose::Fault));
    (rich, poor)
}

#[test]
fn who_holds_more_than_its_share_yields_to_who_is_hungry() {
    let (rich, poor) = rich_and_poor();
    poor.set_hungry(Some(700));
    assert_eq!(rich.owed(), 700);
    assert_eq!(rich.chargeable(), 0);
    assert!(!rich.try_charge(1, Purpose::Fault));
    // Reclaim must go on: it is what feeds the other.
    assert!(rich.try_charge(1, Purpose::Reclaim));
    assert_eq!(poor.owed(), 0);
    assert!(poor.try_charge(1, Purpose::Fault));
    poor.set_hungry(None);
    assert_eq!(rich.owed(), 0);
    assert!(rich.try_charge(1, Purpose::Fault));
}

#[test]
fn who_is_hungry_with_more_than_its_share_is_not_heard() {
    let (rich, poor) = rich_and_poor();
    rich.set_hungry(Some(1));
    assert_eq!(poor.owed(), 0);
    assert!(poor.try_charge(1, Purpose::Fault));
    // And does not silence who is.
    poor.set_hungry(Some(5));
    rich.set_hungry(None);
    assert_eq!(rich.owed(), 5);
}

#[test]
fn a_hungry_member_that_takes_nothing_is_forgotten() {
    let (rich, poor) = rich_and_poor();
    poor.set_hungry(Some(700));
    rich.forget_hungry();
    assert_eq!(rich.owed(), 0);
    assert!(rich.try_charge(1, Purpose::Fault));
}

#[test]
fn the_pools_of_others_are_counted() {
    let (rich, poor) = rich_and_poor();
    rich.member().pool_pages.store(100, Ordering::Relaxed);
    poor.member().pool_pages.store(7, Ordering::Relaxed);
    assert_eq!(rich.pool_pages_of_others(), 7);
    assert_eq!(poor.pool_pages_of_others(), 100);
}
