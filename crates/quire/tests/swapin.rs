//! Pages that come back from the swap file: which thread reads, and what becomes of reads that fail.

mod common;

use common::{Machine, Tree, noise};
use quire::control::Event;
use quire::fault::Outcome;
use quire::page::State;
use quire::swap::SwapRead;
use quire::swap::file::Location;
use quire::units::{PageNum, PageRange};
use quire_simulated::Trap;

/// More noise than fits, so that most of it is in the file.
fn machine_with_noise() -> (Machine, PageRange) {
    let machine = Machine::new(Tree { budget_pages: 512, segments: 64, ..Tree::default() });
    let range = machine.map(0, 1024);
    range.pages().for_each(|page| machine.fill_with_noise(page));
    (machine, range)
}

fn first_in_file(machine: &Machine, range: PageRange) -> PageNum {
    range.pages().find(|&page| machine.state(page) == State::File).expect("some are in the file")
}

fn fault(machine: &Machine, page: PageNum) -> Outcome {
    let access = machine.mmu().try_access(page, false).unwrap().unwrap_err();
    machine.space.handle_fault(page, access, &mut machine.scratch.lock().unwrap())
}

fn take_requests(machine: &Machine) -> usize {
    machine.space.swap().try_take_requests(&mut [SwapRead::NONE; 4])
}

#[test]
fn a_handler_reads_by_itself_while_it_has_a_turn() {
    let (machine, range) = machine_with_noise();
    machine.space.swap().set_turns(1);
    let majors = machine.counted(Event::Pgmajfault);
    // The turn is given back each time.
    for _ in 0..8 {
        let page = first_in_file(&machine, range);
        assert_eq!(fault(&machine, page), Outcome::Served);
        assert_eq!(take_requests(&machine), 0);
        assert_eq!(machine.content(page).unwrap(), noise(page));
    }
    assert_eq!(machine.counted(Event::Pgmajfault), majors + 8);
    machine.space.check();
}

#[test]
fn without_a_turn_the_read_is_left_to_the_readers() {
    let (machine, range) = machine_with_noise();
    let page = first_in_file(&machine, range);
    assert_eq!(fault(&machine, page), Outcome::Parked);
    assert!(machine.word(page).is_locked());
    assert_eq!(take_requests(&machine), 1);
}

#[test]
fn all_comes_back_whatever_thread_reads() {
    for turns in [0, 1] {
        let (machine, range) = machine_with_noise();
        machine.space.swap().set_turns(turns);
        for page in range.pages().chain(range.pages().rev().step_by(7)) {
            assert_eq!(machine.content(page).unwrap(), noise(page), "{page:?}");
        }
        assert_eq!(machine.counted(Event::Pgpoison), 0);
        machine.space.check();
    }
}

/// Reads in order up to the first page that brings more than four others with it; on another
/// machine of the same kind the same page will.
fn page_that_brings_others(machine: &Machine, range: PageRange) -> PageNum {
    let brings_others = |page: &PageNum| {
        let before = machine.counted(Event::Pswpin);
        let was_in_file = machine.state(*page) == State::File;
        machine.content(*page).unwrap();
        was_in_file && machine.counted(Event::Pswpin) > before + 4
    };
    range.pages().find(brings_others).expect("a stream reads ahead")
}

/// A stream's read that fails with its neighbours succeeds alone.
#[test]
fn a_page_is_not_lost_to_its_neighbours_bad_place() {
    for turns in [0, 1] {
        let machines = [(); 2].map(|()| machine_with_noise());
        machines.iter().for_each(|(machine, _)| machine.space.swap().set_turns(turns));
        let [(first, range), (machine, _)] = machines;
        let page = page_that_brings_others(&first, range);
        PageRange { end: page, ..range }.pages().for_each(|page| {
            machine.content(page).unwrap();
        });
        // Everything behind this page is cut off.
        let plan = Location::new(machine.word(page).payload()).unwrap().plan();
        let end = plan.offset + plan.length as u64;
        rustix::fs::ftruncate(machine.file.as_ref().unwrap(), end).unwrap();
        let before = machine.counted(Event::Pswpin);
        assert_eq!(machine.content(page).unwrap(), noise(page));
        assert_eq!(machine.counted(Event::Pswpin), before + 1, "it came alone");
    }
}

#[test]
fn a_page_whose_place_is_gone_is_lost_alone() {
    for turns in [0, 1] {
        let (machine, range) = machine_with_noise();
        machine.space.swap().set_turns(turns);
        let page = first_in_file(&machine, range);
        rustix::fs::ftruncate(machine.file.as_ref().unwrap(), 0).unwrap();
        assert!(matches!(machine.content(page), Err(Trap::Bus)));
        assert_eq!(machine.counted(Event::Pgpoison), 1);
        let resident = range.pages().find(|&page| machine.state(page) == State::Mapped).unwrap();
        assert_eq!(machine.content(resident).unwrap(), noise(resident));
    }
}
