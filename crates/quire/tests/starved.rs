//! Where memory runs out: faults that find none wait, and what could never go on is seen to wait.

mod common;

use std::sync::atomic::Ordering::Relaxed;

use common::{Machine, Tree, noise};
use quire::budget::Budget;
use quire::failpoint::Failpoint;
use quire::fault::Outcome;
use quire::reclaim::NoCaches;
use quire::units::{PAGE_SIZE, PageNum, PageRange};

/// One fault on a page that is not there, and a step of the background thread. `None`: the page is
/// there.
fn fault(machine: &Machine, page: PageNum, is_write: bool) -> Option<Outcome> {
    let access = machine.mmu().try_access(page, is_write).unwrap().err()?;
    let mut scratch = machine.scratch.lock().unwrap();
    let outcome = machine.space.handle_fault(page, access, &mut scratch);
    machine.space.balance(&NoCaches, &mut scratch);
    Some(outcome)
}

/// Writes noise to a page; `false` where there is no memory for it.
fn write_noise(machine: &Machine, page: PageNum) -> bool {
    for _ in 0..1000 {
        match fault(machine, page, true) {
            None => {
                machine.fill_with_noise(page);
                return true;
            }
            Some(Outcome::Parked) if machine.space.has_starved() => return false,
            Some(_) => {}
        }
    }
    panic!("{page:?} is asked for again and again");
}

#[test]
fn two_pages_that_one_instruction_needs_are_not_traded_for_each_other_for_ever() {
    for budget_pages in [256, 512, 1024] {
        let machine = Machine::new(Tree { budget_pages, folio_order: 0, ..Tree::default() });
        machine.space.set_kswapd_awake(true);
        let range = machine.map(0, 3072);
        // What packs, so that the pool has room for one page more or less.
        let packed = PageRange::new(range.start, 64);
        for page in packed.pages() {
            let mut bytes = noise(page);
            bytes[PAGE_SIZE / 2..].fill(0);
            machine.fill_bytes(page, &bytes);
        }
        let pair = [packed.start.add(31), packed.start.add(32)];
        let has_both = || pair.iter().all(|&page| fault(&machine, page, false).is_none());
        let has_starved = || machine.space.has_starved();
        for number in packed.len().. {
            let is_done = |_: &usize| has_both() || has_starved();
            let turns = (0..1000).find(is_done);
            assert!(turns.is_some(), "{number} pages in {budget_pages}, and no end");
            if has_starved() || !write_noise(&machine, range.start.add(number)) {
                break;
            }
        }
    }
}

#[test]
fn a_fault_whose_memory_came_in_time_does_not_count_as_one_that_waits() {
    let control = common::control(Tree { budget_pages: 512, ..Tree::default() });
    // SAFETY: the control page is never unmapped.
    let (budget, control) = unsafe { (Budget::new(control.as_ptr(), 0), control.as_ref()) };
    let machine = Machine::member(budget);
    machine.space.set_kswapd_awake(true);
    let range = machine.map(0, 1024);
    let last = range.pages().find(|&page| !write_noise(&machine, page));
    let page = last.expect("memory runs out");
    assert!(machine.space.has_starved());
    let grow = |_| control.budget_pages.store(1024, Relaxed);
    let access = machine.mmu().try_access(page, true).unwrap().unwrap_err();
    let outcome = common::passing(Failpoint::Starved, grow, || {
        machine.space.handle_fault(page, access, &mut machine.scratch.lock().unwrap())
    });
    assert_eq!(outcome, Outcome::Parked);
    assert!(!machine.space.has_starved());
    assert!(write_noise(&machine, page));
}
