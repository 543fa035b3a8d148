use super::*;
use crate::sys::control::ControlMap;

fn control() -> ControlMap {
    let control = ControlMap::create().unwrap();
    control.segments_max.store(1000, Relaxed);
    control
}

fn hello(parent_slot: u32, held_pages: u64, wanted_pages: u64) -> Hello {
    let magic = quire::control::MAGIC;
    let version = quire::control::VERSION;
    Hello { magic, version, pid: 0, parent_slot, held_pages, wanted_pages }
}

fn executed() -> Hello {
    hello(u32::MAX, 0, 0)
}

/// Charges a member as it would itself.
fn charge(control: &Control, slot: u32, held_pages: u64, wanted_pages: u64) {
    control.held_pages.fetch_add(held_pages, Relaxed);
    control.wanted_pages.fetch_add(wanted_pages, Relaxed);
    let member = &control.members[slot as usize];
    member.held_pages.fetch_add(held_pages, Relaxed);
    member.wanted_pages.fetch_add(wanted_pages, Relaxed);
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
    let mut members = Members::new();
    let first = members.join(&control, &executed(), 100).unwrap();
    let second = members.join(&control, &executed(), 200).unwrap();
    assert_ne!(first, second);
    assert_eq!(members.pid_of(&control, second), Some(200));
    charge(&control, first, 10, 20);
    charge(&control, second, 5, 6);
    control.members[first as usize].count(Event::Pgfault, 7);
    control.members[second as usize].count(Event::Pgfault, 1);
    control.members[first as usize].managed_pages_max.store(99, Relaxed);
    assert_eq!(members.leave(&control, first), None);
    assert_eq!(members.leave(&control, first), None, "twice is once");
    assert_eq!(control.held_pages.load(Relaxed), 5);
    assert_eq!(control.wanted_pages.load(Relaxed), 6);
    assert_eq!(members.pid_of(&control, first), None);
    assert_eq!(members.event(&control, Event::Pgfault), 8, "the past counts");
    assert_eq!(members.managed_pages_max(&control), 99);
    assert_eq!((members.count(), members.joined()), (1, 2));
}

#[test]
fn a_forks_child_takes_over_its_charges_and_shares_the_segments() {
    let control = control();
    let mut members = Members::new();
    let parent = members.join(&control, &executed(), 100).unwrap();
    charge(&control, parent, 30, 40);
    for segment in [0, 63, 64, 999] {
        take_segment(&control, parent, segment);
    }
    let child = members.join(&control, &hello(parent, 10, 15), 101).unwrap();
    assert_eq!(control.held_pages.load(Relaxed), 30, "the tree holds what it held");
    assert_eq!(control.wanted_pages.load(Relaxed), 55, "both want what was one's");
    assert_eq!(control.wanted_pages_max.load(Relaxed), 55);
    assert_eq!(control.members[parent as usize].held_pages.load(Relaxed), 20);
    assert_eq!(control.members[parent as usize].wanted_pages.load(Relaxed), 40);
    assert_eq!(control.members[child as usize].held_pages.load(Relaxed), 10);
    assert_eq!(control.members[child as usize].wanted_pages.load(Relaxed), 15);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [2; 4]);
    assert_eq!(refs(&control, 1), 0);
    members.leave(&control, parent);
    assert_eq!(control.held_pages.load(Relaxed), 10);
    assert_eq!(control.wanted_pages.load(Relaxed), 15);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [1; 4]);
    assert_eq!(control.segments_used.load(Relaxed), 4, "the child needs them");
    members.leave(&control, child);
    assert_eq!([0, 63, 64, 999].map(|segment| refs(&control, segment)), [0; 4]);
    assert_eq!(control.segments_used.load(Relaxed), 0);
    assert_eq!(control.held_pages.load(Relaxed), 0);
}

#[test]
fn a_child_cannot_inherit_from_a_slot_that_was_given_back() {
    let control = control();
    let mut members = Members::new();
    let parent = members.join(&control, &executed(), 100).unwrap();
    members.leave(&control, parent);
    assert_eq!(members.join(&control, &hello(parent, 1, 1), 101), Err(Refused::NoParent));
    assert_eq!(members.join(&control, &hello(9999, 1, 1), 101), Err(Refused::NoParent));
}

#[test]
fn a_child_gets_no_more_than_its_parent_has() {
    let control = control();
    let mut members = Members::new();
    let parent = members.join(&control, &executed(), 100).unwrap();
    charge(&control, parent, 3, 3);
    let child = members.join(&control, &hello(parent, 10, 10), 101).unwrap();
    assert_eq!(control.members[parent as usize].held_pages.load(Relaxed), 0);
    assert_eq!(control.members[child as usize].held_pages.load(Relaxed), 3);
}

#[test]
fn slots_are_used_in_turn_and_run_out() {
    let control = control();
    let mut members = Members::new();
    let first = members.join(&control, &executed(), 1).unwrap();
    members.leave(&control, first);
    let second = members.join(&control, &executed(), 2).unwrap();
    assert_ne!(first, second, "a number rests before it is used again");
    for pid in 3..=MEMBERS_MAX as u32 + 1 {
        members.join(&control, &executed(), pid).unwrap();
    }
    assert_eq!(members.join(&control, &executed(), 9999), Err(Refused::Full));
    members.leave(&control, second);
    assert_eq!(members.join(&control, &executed(), 9999), Ok(second));
}

#[test]
fn an_obituary_outlives_its_slot() {
    let control = control();
    let mut members = Members::new();
    let slot = members.join(&control, &executed(), 42).unwrap();
    let member = &control.members[slot as usize];
    member.obituary_detail.store(12, Relaxed);
    member.obituary.store(Obituary::KernelRefused as u32, Relaxed);
    let death = Death { pid: 42, obituary: Obituary::KernelRefused, detail: 12 };
    assert_eq!(members.leave(&control, slot), Some(death));
    assert_eq!(member.obituary.load(Relaxed), 0);
}

#[test]
fn what_a_killed_process_lost_is_mended_when_nobody_is_left() {
    let control = control();
    let mut members = Members::new();
    let slots = [1, 2].map(|pid| members.join(&control, &executed(), pid).unwrap());
    charge(&control, slots[0], 10, 10);
    // Killed after the tree's account was charged and before its own.
    control.held_pages.fetch_add(64, Relaxed);
    // Killed after it had taken a segment and before its map said so; and when it had let one go, but
    // not counted that.
    take_segment(&control, slots[0], 70);
    control.segment_maps[slots[0] as usize][1].store(0, Relaxed);
    control.segments_used.fetch_add(1, Relaxed);
    members.leave(&control, slots[0]);
    assert_eq!(control.held_pages.load(Relaxed), 64);
    assert_eq!(refs(&control, 70), 1, "nobody can tell that from a segment that is being taken");
    // And one whose own account says more than the tree's: no account wraps around.
    control.members[slots[1] as usize].held_pages.store(1000, Relaxed);
    members.leave(&control, slots[1]);
    assert_eq!(control.held_pages.load(Relaxed), 0);
    assert_eq!((refs(&control, 70), control.segments_used.load(Relaxed)), (0, 0));
}
