//! The account: charges of several members at once never add up to more than the budget.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::{Tree, members};
use proptest::prelude::*;
use quire::budget::{Budget, Purpose};
use quire::control::Control;
use quire::control::account::Intent;

const PURPOSES: [Purpose; 3] = [Purpose::Fault, Purpose::Reclaim, Purpose::Tables];

fn tree(budget_pages: usize) -> Tree {
    Tree { budget_pages, ..Tree::default() }
}

/// What is left for a purpose when no member holds anything.
fn most(budget: &Budget, purpose: Purpose) -> usize {
    let kept = match purpose {
        Purpose::Fault => budget.reserve(),
        Purpose::Reclaim | Purpose::Fork => budget.reserve() / 4,
        Purpose::Tables => 0,
    };
    budget.limit() - kept
}

#[test]
fn threads_of_several_members_never_hold_more_than_the_budget() {
    for limit in [150, 700, 5000] {
        let members: [Budget; 3] = members(tree(limit));
        // What is sure to be charged: counted after the charge, no more before it goes.
        let used = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for (number, member) in members.iter().chain(&members).enumerate() {
                let used = &used;
                scope.spawn(move || {
                    let mut held = 0;
                    let mut random = number as u64 + 1;
                    let mut next = |below: usize| {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        random as usize % below
                    };
                    for _ in 0..200_000 {
                        let pages = [1, 2, 16, limit / 4][next(4)];
                        let purpose = PURPOSES[next(3)];
                        if next(2) == 0 && member.try_charge(pages, purpose) {
                            let now = used.fetch_add(pages, Ordering::SeqCst) + pages;
                            assert!(now <= limit, "{now} pages are held of {limit}");
                            held += pages;
                        } else if held > 0 {
                            let pages = 1 + next(held);
                            used.fetch_sub(pages, Ordering::SeqCst);
                            member.uncharge(pages);
                            held -= pages;
                        }
                    }
                    used.fetch_sub(held, Ordering::SeqCst);
                    member.uncharge(held);
                });
            }
        });
        let control = members[0].control();
        assert_eq!(control.held(), 0);
        members.iter().for_each(|member| {
            member.give_slack_back();
        });
        assert_eq!(members[0].uncharged(), limit, "no member has anything left");
        let most = control.held_pages_max.load(Ordering::Relaxed) as usize;
        assert!(most <= limit, "{most} pages were granted of {limit}");
    }
}

#[test]
fn of_two_that_take_the_last_pages_again_and_again_one_gets_them() {
    let members: [Budget; 2] = members(tree(1000));
    let free = most(&members[0], Purpose::Tables);
    assert!(members[0].try_charge(free - 10, Purpose::Tables));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if members[1].try_charge(10, Purpose::Tables) {
                    members[1].uncharge(10);
                }
            }
        });
        let mut times = 0;
        while times < 1000 {
            if members[0].try_charge(10, Purpose::Tables) {
                members[0].uncharge(10);
                times += 1;
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(members[0].control().held() as usize, free - 10);
}

#[test]
fn what_faults_took_beyond_need_is_not_the_reserve_of_reclaim() {
    let members: [Budget; 4] = members(tree(4096));
    let charge_all = |purpose| {
        let mut any = true;
        while std::mem::take(&mut any) {
            for member in &members {
                any |= member.try_charge(1, purpose);
            }
        }
        members[0].control().held() as usize
    };
    // Small charges leave slack with every member; all that is there is held in the end all the same.
    assert_eq!(charge_all(Purpose::Fault), most(&members[0], Purpose::Fault));
    assert_eq!(charge_all(Purpose::Reclaim), most(&members[0], Purpose::Reclaim));
    assert_eq!(charge_all(Purpose::Tables), 4096);
    assert!(!members[0].try_charge(1, Purpose::Tables));
}

#[test]
fn memory_is_granted_ahead_while_it_is_plentiful_and_given_back_at_once_when_it_is_not() {
    let [one, other]: [Budget; 2] = members(tree(64 * 1024));
    assert!(one.try_charge(1, Purpose::Fault));
    let slack = one.slack();
    assert!(slack > 0, "the next faults look at no other member");
    assert!(one.try_charge(slack, Purpose::Fault) && one.slack() == 0);
    one.uncharge(slack);
    assert_eq!(one.slack(), slack, "kept, within a step");
    one.uncharge(1);
    assert_eq!((one.slack(), one.held()), (slack, 0));
    assert!(!one.try_charge(most(&one, Purpose::Fault) + 1, Purpose::Fault));
    assert!(one.try_charge(100, Purpose::Reclaim), "reclaim takes what it needs");
    assert_eq!(one.slack(), 0);
    // Memory runs short.
    assert!(other.try_charge(most(&other, Purpose::Fault) - 200, Purpose::Fault));
    assert!(one.try_charge(8, Purpose::Fault));
    assert_eq!(one.slack(), 0);
    one.uncharge(5);
    assert_eq!(one.slack(), 0);
    assert_eq!(one.uncharged() + one.held() + other.held(), one.limit());
}

#[test]
fn a_charge_of_nothing_is_possible_even_where_there_is_nothing() {
    let [only]: [Budget; 1] = members(tree(100));
    only.charge_anyway(120);
    assert!(only.try_charge(0, Purpose::Fault) && !only.try_charge(1, Purpose::Tables));
    assert_eq!((only.uncharged(), only.held()), (0, 120));
}

#[test]
fn what_is_common_is_the_trees_and_no_members() {
    let [one, other]: [Budget; 2] = members(tree(1000));
    one.control().common_pages.store(300, Ordering::Relaxed);
    assert_eq!(one.uncharged(), 700);
    assert!(!other.try_charge(701, Purpose::Tables) && other.try_charge(700, Purpose::Tables));
    assert_eq!((one.control().held(), one.held(), other.held()), (1000, 0, 700));
}

#[test]
fn what_a_member_had_is_free_when_its_slot_is() {
    let [one, other]: [Budget; 2] = members(tree(1000));
    assert!(other.try_charge(900, Purpose::Tables));
    assert!(!one.try_charge(200, Purpose::Tables));
    one.control().free_slot(1);
    assert_eq!(one.uncharged(), 1000);
    assert!(one.try_charge(200, Purpose::Tables));
}

proptest! {
    /// Against a plain number: one thread, so nothing may fail that would fit.
    #[test]
    fn an_account_is_as_good_as_one_number(
        limit in 100usize..3000,
        steps in prop::collection::vec((0usize..3, any::<bool>(), 1usize..400, 0usize..3), 1..200),
    ) {
        let members: [Budget; 3] = members(tree(limit));
        let mut held = [0; 3];
        for (who, is_charge, pages, purpose) in steps {
            let (member, purpose) = (&members[who], PURPOSES[purpose]);
            if is_charge {
                let slack: usize = members.iter().map(Budget::slack).sum();
                let all: usize = held.iter().sum();
                let is_charged = member.try_charge(pages, purpose);
                if all + slack + pages <= most(member, purpose) {
                    prop_assert!(is_charged);
                }
                if is_charged {
                    prop_assert!(all + pages <= limit);
                    held[who] += pages;
                }
            } else if held[who] > 0 {
                let pages = pages.min(held[who]);
                member.uncharge(pages);
                held[who] -= pages;
            }
            prop_assert_eq!(members[who].held(), held[who]);
            prop_assert_eq!(members[0].control().held() as usize, held.iter().sum::<usize>());
        }
    }
}

/// A member that takes pages from the tree, as [`Budget::try_charge`] does, one step at a time.
#[derive(Clone, Copy)]
struct Taker {
    slot: usize,
    pages: usize,
    /// Whether it gives back at once what it got.
    gives_back: bool,
    intent: Option<Intent>,
    /// The sum so far.
    sum: usize,
    step: usize,
    confirmed: usize,
}

impl Taker {
    /// Raise, a look at each account, confirm or take back, give back.
    const STEPS: usize = 1 + MODEL_SLOTS + 1 + 1;

    fn new(slot: usize, pages: usize, gives_back: bool) -> Taker {
        Taker { slot, pages, gives_back, intent: None, sum: 0, step: 0, confirmed: 0 }
    }

    fn go_on(&mut self, control: &Control) {
        let account = &control.seats[self.slot].account;
        match self.step {
            0 => self.intent = account.intend(self.pages),
            step @ 1..=MODEL_SLOTS => {
                self.sum += control.seats[step - 1].account.get().granted as usize;
            }
            step if step == MODEL_SLOTS + 1 => {
                if self.sum <= MODEL_LIMIT {
                    self.confirmed = self.pages;
                } else {
                    let _ = account.take_back(self.intent.unwrap(), self.pages);
                }
            }
            _ if self.gives_back && self.confirmed > 0 => {
                self.confirmed = 0;
                account.uncharge(self.pages, 0);
            }
            _ => {}
        }
        self.step += 1;
    }
}

const MODEL_LIMIT: usize = 10;
const MODEL_SLOTS: usize = 2;

/// Has the takers go on in the order of `schedule`, with the member in a slot killed before a step of
/// it.
fn replay(control: &Control, takers: &[Taker], schedule: &[usize], kill: Option<(usize, usize)>) {
    (0..MODEL_SLOTS).for_each(|slot| control.seats[slot].account.clear());
    let mut takers = takers.to_vec();
    let mut is_killed = false;
    let confirmed = |takers: &[Taker]| takers.iter().map(|taker| taker.confirmed).sum::<usize>();
    for (at, &who) in schedule.iter().enumerate() {
        if let Some((_, slot)) = kill.filter(|&(moment, _)| moment == at) {
            is_killed = true;
            control.seats[slot].account.clear();
            takers.iter_mut().filter(|taker| taker.slot == slot).for_each(|t| t.confirmed = 0);
        }
        let is_dead = is_killed && kill.is_some_and(|(_, slot)| takers[who].slot == slot);
        if !is_dead {
            takers[who].go_on(control);
        }
        let now = confirmed(&takers);
        assert!(now <= MODEL_LIMIT, "{now} pages in {schedule:?}, {kill:?}");
    }
    let granted: u32 = (0..MODEL_SLOTS).map(|slot| control.seats[slot].account.get().granted).sum();
    assert_eq!(granted as usize, confirmed(&takers), "{schedule:?}, {kill:?}");
}

/// Calls `act` with every order of the steps of so many takers.
fn every_schedule(left: &mut [usize], schedule: &mut Vec<usize>, act: &mut dyn FnMut(&[usize])) {
    if left.iter().all(|&steps| steps == 0) {
        return act(schedule);
    }
    for who in 0..left.len() {
        if left[who] > 0 {
            left[who] -= 1;
            schedule.push(who);
            every_schedule(left, schedule, act);
            schedule.pop();
            left[who] += 1;
        }
    }
}

#[test]
fn in_every_order_and_with_a_member_killed_at_every_step_the_sum_is_right() {
    let control = common::control(tree(MODEL_LIMIT));
    // SAFETY: never unmapped.
    let control = unsafe { control.as_ref() };
    for takers in [
        vec![Taker::new(0, 6, false), Taker::new(1, 6, false)],
        vec![Taker::new(0, 6, true), Taker::new(1, 6, true)],
        vec![Taker::new(0, 10, true), Taker::new(1, 1, false)],
        // Two threads of one member, beside another.
        vec![Taker::new(0, 6, true), Taker::new(0, 5, false), Taker::new(1, 5, true)],
    ] {
        let mut left = vec![Taker::STEPS; takers.len()];
        every_schedule(&mut left, &mut Vec::new(), &mut |schedule| {
            replay(control, &takers, schedule, None);
            if takers.len() == 2 {
                for moment in 0..schedule.len() {
                    (0..MODEL_SLOTS)
                        .for_each(|slot| replay(control, &takers, schedule, Some((moment, slot))));
                }
            }
        });
    }
}
