use quire::control::Child;

use super::*;
use crate::runs::counts::{Counts, Scope};

use crate::sys::control::ControlMap;

fn control() -> ControlMap {
    let control = ControlMap::create().unwrap();
    control.segments_max.store(1000, Relaxed);
    control
}

fn hello(parent_slot: u32, held_pages: u64, wanted_pages: u64) -> Hello {
    let magic = quire::control::MAGIC;
    let version = quire::control::VERSION;
    Hello { magic, version, fork: 0, parent_slot, held_pages, wanted_pages }
}

/// The hello of a child that the member in `parent_slot` forks now.
fn forked(control: &Control, parent_slot: u32, held_pages: u64, wanted_pages: u64) -> Hello {
    let fork = control.members[parent_slot as usize].fork.begin();
    Hello { fork, ..hello(parent_slot, held_pages, wanted_pages) }
}

fn executed() -> Hello {
    hello(u32::MAX, 0, 0)
}

fn full(most: usize) -> Refused {
    Refused { refusal: JoinRefusal::Full, detail: most as u64 }
}

/// Charges a member as it would itself.
fn charge(control: &Control, slot: u32, held_pages: u64, wanted_pages: u64) {
    control.seats[slot as usize].account.put_in(held_pages as usize);
    let member = &control.members[slot as usize];
    member.wanted_pages.fetch_add(wanted_pages, Relaxed);
}

fn held(control: &Control, slot: u32) -> u32 {
    control.seats[slot as usize].account.get().held
}

/// Takes a free segment as a member would.
fn take_segment(control: &Control, slot: u32, segment: usize) {
    assert_eq!(control.segment_refs[segment].fetch_add(1, Relaxed), 0);
    control.segments_used.fetch_add(1, Relaxed);
    control.segment_maps[slot as usize][segment / 64].fetch_or(1 << (segment % 64), Relaxed);
}

fn refs(control: &Control, segment: usize) -> u32 {
    control.segment_refs[segment].load(Relaxed)
}

#[test]
fn who_leaves_gives_back_what_it_held() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let first = members.join(&control, &executed(), 100).unwrap();
    let second = members.join(&control, &executed(), 200).unwrap();
    assert_ne!(first, second);
    assert_eq!(members.pid_of(&control, second), Some(200));
    charge(&control, first, 10, 20);
    charge(&control, second, 5, 6);
    control.members[first as usize].count(Event::Pgfault, 7);
    control.members[second as usize].count(Event::Pgfault, 1);
    control.members[first as usize].managed_pages_max.store(99, Relaxed);
    assert_eq!(members.leave(&control, first).unwrap().death, None);
    assert_eq!(members.leave(&control, first), None, "twice is once");
    assert_eq!(control.held(), 5);
    assert_eq!(control.wanted(), 6);
    assert_eq!(members.pid_of(&control, first), None);
    assert_eq!(counted(&control), 8, "the past counts");
    assert_eq!(members.managed_pages_max(&control), 99);
    assert_eq!((members.count, members.joined), (1, 2));
}

#[test]
fn a_forks_child_takes_over_its_charges_and_shares_the_segments() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let parent = members.join(&control, &executed(), 100).unwrap();
    charge(&control, parent, 30, 40);
    for segment in [0, 63, 64, 999] {
        take_segment(&control, parent, segment);
    }
    let child = members.join(&control, &forked(&control, parent, 10, 15), 101).unwrap();
    assert_eq!(control.members[parent as usize].fork.child(), Child::Taken);
    assert_eq!(control.held(), 30, "the tree holds what it held");
    assert_eq!(control.wanted(), 55, "both want what was one's");
    assert_eq!(control.wanted_max(), 55);
    assert_eq!(held(&control, parent), 20);
    assert_eq!(control.members[parent as usize].wanted_pages.load(Relaxed), 40);
    assert_eq!(held(&control, child), 10);
    assert_eq!(control.members[child as usize].wanted_pages.load(Relaxed), 15);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [2; 4]);
    assert_eq!([parent, child].map(|slot| control.segments_of(slot as usize)), [4, 4]);
    assert_eq!(refs(&control, 1), 0);
    members.leave(&control, parent);
    assert_eq!(control.held(), 10);
    assert_eq!(control.wanted(), 15);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [1; 4]);
    assert_eq!(control.segments_used.load(Relaxed), 4, "the child needs them");
    members.leave(&control, child);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [0; 4]);
    assert_eq!(control.segments_used.load(Relaxed), 0);
    assert_eq!(control.held(), 0);
}

#[test]
fn a_child_cannot_inherit_from_a_slot_that_was_given_back() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let parent = members.join(&control, &executed(), 100).unwrap();
    members.leave(&control, parent);
    assert_eq!(
        members.join(&control, &hello(parent, 1, 1), 101),
        Err(Refused::plainly(JoinRefusal::NoParent))
    );
    assert_eq!(
        members.join(&control, &hello(9999, 1, 1), 101),
        Err(Refused::plainly(JoinRefusal::NoParent))
    );
}

/// Killed between its Hello and the answer: the parent sees it dead before we see the Hello.
#[test]
fn a_child_that_was_given_up_inherits_nothing() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let parent = members.join(&control, &executed(), 100).unwrap();
    charge(&control, parent, 30, 40);
    let late = forked(&control, parent, 10, 15);
    assert!(control.members[parent as usize].fork.give_up(late.fork));
    assert_eq!(members.join(&control, &late, 101), Err(Refused::plainly(JoinRefusal::NoParent)));
    // Nor does it get what is charged for the next one.
    let next = forked(&control, parent, 10, 15);
    assert_eq!(members.join(&control, &late, 101), Err(Refused::plainly(JoinRefusal::NoParent)));
    assert_eq!(held(&control, parent), 30);
    members.join(&control, &next, 102).unwrap();
    assert_eq!(held(&control, parent), 20);
    assert!(!control.members[parent as usize].fork.give_up(next.fork), "the charge has moved");
}

#[test]
fn a_child_gets_no_more_than_its_parent_has() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let parent = members.join(&control, &executed(), 100).unwrap();
    charge(&control, parent, 3, 3);
    let child = members.join(&control, &forked(&control, parent, 10, 10), 101).unwrap();
    assert_eq!(held(&control, parent), 0);
    assert_eq!(held(&control, child), 3);
}

#[test]
fn slots_are_used_in_turn_and_run_out() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let first = members.join(&control, &executed(), 1).unwrap();
    members.leave(&control, first);
    let second = members.join(&control, &executed(), 2).unwrap();
    assert_ne!(first, second, "a number rests before it is used again");
    for pid in 3..=MEMBERS_MAX as u32 + 1 {
        members.join(&control, &executed(), pid).unwrap();
    }
    assert_eq!(members.join(&control, &executed(), 9999), Err(full(MEMBERS_MAX)));
    members.leave(&control, second);
    assert_eq!(members.join(&control, &executed(), 9999), Ok(second));
}

#[test]
fn an_obituary_outlives_its_slot() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let slot = members.join(&control, &executed(), 42).unwrap();
    let member = &control.members[slot as usize];
    member.obituary_detail.store(12, Relaxed);
    member.obituary.store(Obituary::KernelRefused as u32, Relaxed);
    let death = Death { pid: 42, obituary: Obituary::KernelRefused, detail: 12, held_pages: 0 };
    assert_eq!(members.leave(&control, slot).unwrap().death, Some(death));
    assert_eq!(member.obituary.load(Relaxed), 0);
}

#[test]
fn a_member_killed_while_it_took_or_gave_leaves_the_account_of_the_others() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let slots = [1, 2].map(|pid| members.join(&control, &executed(), pid).unwrap());
    charge(&control, slots[1], 10, 10);
    let seat = &control.seats[slots[0] as usize];
    // With an intent that is neither confirmed nor taken back, and slack.
    let _ = seat.account.intend(100);
    seat.account.uncharge(30, 20);
    control.asking[0].fetch_or(1 << slots[0], Relaxed);
    seat.demand.store(7, Relaxed);
    members.leave(&control, slots[0]);
    assert_eq!((control.held(), control.askers().count()), (10, 0));
    assert_eq!(seat.demand.load(Relaxed), 0);
    members.leave(&control, slots[1]);
    assert_eq!((control.held(), control.wanted()), (0, 0));
}

/// A segment is taken and left by several words.
#[test]
fn segments_that_a_killed_member_lost_are_free_when_nobody_is_left() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let slots = [1, 2].map(|pid| members.join(&control, &executed(), pid).unwrap());
    // Killed after it had taken a segment and before its map said so; and when it had let one go, but
    // not counted that.
    take_segment(&control, slots[0], 70);
    control.segment_maps[slots[0] as usize][1].store(0, Relaxed);
    control.segments_used.fetch_add(1, Relaxed);
    members.leave(&control, slots[0]);
    assert_eq!(refs(&control, 70), 1, "that cannot be told from a segment that is being taken");
    members.leave(&control, slots[1]);
    assert_eq!((refs(&control, 70), control.segments_used.load(Relaxed)), (0, 0));
}

#[test]
fn most_that_was_wanted_is_remembered_of_members_that_left() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let slots = [1, 2].map(|pid| members.join(&control, &executed(), pid).unwrap());
    for slot in slots {
        charge(&control, slot, 0, 30);
    }
    members.leave(&control, slots[0]);
    assert_eq!((control.wanted(), control.wanted_max()), (30, 60));
}

#[test]
fn there_are_no_more_members_than_there_may_be() {
    let control = control();
    let mut members = Members::new(2);
    let parent = members.join(&control, &executed(), 1).unwrap();
    let second = members.join(&control, &executed(), 2).unwrap();
    charge(&control, parent, 10, 10);
    assert_eq!(members.join(&control, &executed(), 3), Err(full(2)));
    assert_eq!(members.join(&control, &hello(parent, 4, 4), 3), Err(full(2)), "nor a fork's child");
    let held = control.seats[parent as usize].account.get().held;
    assert_eq!(held, 10, "which takes nothing");
    // A run inside is none of them.
    control.budget_pages.store(1000, Relaxed);
    let inner = members.join(&control, &hello(RESERVATION, 100, 0), 4).unwrap();
    assert_eq!((members.count, members.joined), (2, 2));
    members.leave(&control, second);
    assert!(members.join(&control, &executed(), 3).is_ok());
    assert_eq!(members.leave(&control, inner), None, "no member has left");
    assert_eq!(control.held(), 10);
}

#[test]
fn who_leaves_says_what_it_needed() {
    let control = control();
    let mut members = Members::new(MEMBERS_MAX);
    let slot = members.join(&control, &executed(), 1).unwrap();
    let member = &control.members[slot as usize];
    member.held_pages_max.store(5, Relaxed);
    member.wanted_pages_max.store(6, Relaxed);
    member.count(Event::Pswpout, 7);
    let expected = Sizes { held_pages_max: 5, wanted_pages_max: 6, pswpout: 7, ..Sizes::default() };
    assert_eq!(Sizes::of(&control.members[slot as usize]), expected);
    assert_eq!(members.leave(&control, slot).unwrap().sizes, expected);
}

/// Faults of all members, of those that have left too.
fn counted(control: &Control) -> u64 {
    Counts::read(control, Scope::Run).unwrap().of(Event::Pgfault)
}
