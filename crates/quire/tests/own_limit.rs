//! The limit of one member, beside that of the tree.

mod common;

use std::sync::atomic::Ordering::Relaxed;

use common::{Tree, control};
use quire::budget::{Budget, Purpose};

const LIMIT: usize = 4096;
const OWN: usize = 1000;

/// Two members of a tree whose members may hold OWN pages each.
fn two() -> [Budget; 2] {
    let control = control(Tree { budget_pages: LIMIT, ..Tree::default() });
    // SAFETY: the control page is never unmapped.
    let members = [0, 1].map(|slot| unsafe { Budget::new(control.as_ptr(), slot) });
    members[1].control().take_slot(1, 1);
    members[0].control().member_pages_max.store(OWN as u64, Relaxed);
    members
}

#[test]
fn a_member_is_refused_what_it_may_not_hold_and_the_others_are_not() {
    let [first, second] = two();
    let reserve = first.reserve();
    assert!(first.try_charge(OWN - reserve, Purpose::Fault));
    assert_eq!(first.uncharged(), reserve);
    assert!(!first.try_charge(1, Purpose::Fault), "the reserve is reclaim's");
    assert!(first.try_charge(1, Purpose::Reclaim));
    assert!(first.try_charge(reserve - 1, Purpose::Tables));
    assert!(!first.try_charge(1, Purpose::Tables), "and no more, whatever it is for");
    assert_eq!(first.uncharged(), 0);
    assert_eq!(first.uncharged_by_tree(), LIMIT - OWN);
    assert!(second.try_charge(500, Purpose::Fault));
    first.uncharge(100);
    assert!(first.try_charge(60, Purpose::Fault));
    assert_eq!(first.control().held() as usize, OWN - 40 + 500);
}

#[test]
fn a_forks_child_is_no_part_of_what_its_parent_may_hold() {
    let [parent, _] = two();
    assert!(parent.try_charge(OWN - parent.reserve(), Purpose::Fault));
    assert!(parent.try_charge(OWN, Purpose::Fork));
    assert!(!parent.try_charge(1, Purpose::Tables), "until the child has taken its part over");
    assert!(parent.member().held_pages_max.load(Relaxed) as usize <= OWN);
    parent.uncharge(OWN);
    assert!(parent.try_charge(1, Purpose::Tables));
}

#[test]
fn without_a_bound_of_its_own_a_member_may_hold_the_budget() {
    let [first, _] = two();
    first.control().member_pages_max.store(0, Relaxed);
    assert_eq!(first.limit(), LIMIT);
    assert!(first.try_charge(LIMIT, Purpose::Tables));
    assert_eq!(first.member().held_pages_max.load(Relaxed) as usize, LIMIT);
}

#[test]
fn threads_that_charge_at_once_never_pass_it_together() {
    let [first, _] = two();
    std::thread::scope(|scope| {
        for seed in 1..=8usize {
            let first = &first;
            scope.spawn(move || {
                let mut random = seed * 0x9e37;
                let mut charged = Vec::new();
                for _ in 0..20_000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let pages = (random >> 40) % 64 + 1;
                    if first.try_charge(pages, Purpose::Tables) {
                        charged.push(pages);
                    } else if let Some(pages) = charged.pop() {
                        first.uncharge(pages);
                    }
                }
                charged.into_iter().for_each(|pages| first.uncharge(pages));
            });
        }
    });
    assert!(first.member().held_pages_max.load(Relaxed) as usize <= OWN);
    assert_eq!(first.held(), 0);
    assert_eq!(first.control().held(), 0);
}
