//! One budget, several members: which one gives to which, and which is passed over.

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Machine, Tree, members};
use quire::budget::{Budget, Donor, For, Need, Purpose};
use quire::control::{Event, Seat};
use quire::reclaim::{Balance, NoCaches};
use quire::units::PageRange;

const LIMIT: usize = 4096;

fn tree() -> Tree {
    Tree { budget_pages: LIMIT, ..Tree::default() }
}

/// Members that hold so many pages.
fn holding<const COUNT: usize>(pages: [usize; COUNT]) -> [Budget; COUNT] {
    let members = members(tree());
    for (member, pages) in members.iter().zip(pages) {
        member.charge_anyway(pages);
    }
    members
}

fn seat(member: &Budget) -> &Seat {
    &member.control().seats[member.slot() as usize]
}

/// Longer than any member is waited for.
fn wait_for_patience_to_end() {
    std::thread::sleep(Duration::from_millis(120));
}

#[test]
fn the_member_that_holds_most_is_made_to_give() {
    let [small, large, larger] = holding([300, 1000, 1500]);
    for member in [&small, &large] {
        assert_eq!(member.donor(Need::Balance), Donor::Member(2));
        assert_eq!(member.donor(Need::Starved), Donor::Member(2));
    }
    assert_eq!(larger.donor(Need::Balance), Donor::Home);
    assert_eq!(larger.donor(Need::Starved), Donor::Member(1), "it has looked at home");
}

#[test]
fn memory_of_whoever_loses_least_without_it_goes_first() {
    let [busy, idle, asker] = holding([1500, 800, 100]);
    let look = || asker.donor(Need::Starved);
    assert_eq!(look(), Donor::Member(0));
    let lose = || busy.count(Event::Refault16thNs, 50_000_000);
    lose();
    // Until the next look is due.
    while look() == Donor::Member(0) {
        lose();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(look(), Donor::Member(1));
    assert_eq!(busy.donor(Need::Balance), Donor::Member(1), "it need not reclaim at home");
    assert_eq!(idle.donor(Need::Balance), Donor::Home);
    // Faults that a little more memory would not have spared are no loss.
    while look() == Donor::Member(1) {
        busy.count(Event::Pgfault, 5000);
        busy.count(Event::RefaultFar, 5000);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(look(), Donor::Member(0));
}

#[test]
fn no_member_is_made_to_give_what_is_below_the_floor() {
    let members: [Budget; 64] = members(tree());
    let floor = members[0].floor();
    assert_eq!(floor, LIMIT / 64 / 2, "half of an equal share");
    members[1].charge_anyway(floor);
    members[2].charge_anyway(1);
    assert_eq!(members[0].donor(Need::Starved), Donor::Nobody);
    assert_eq!(members[0].donor(Need::Balance), Donor::Home, "each for itself");
    members[1].charge_anyway(1);
    assert_eq!(members[0].donor(Need::Starved), Donor::Member(1));
    let [few, _] = holding([0, 0]);
    assert_eq!(few.floor(), 128, "and no more than this");
}

#[test]
fn a_member_that_does_not_move_is_passed_over_until_it_shows_life() {
    let [asker, stopped, other] = holding([10, 2000, 500]);
    asker.request_reclaim(1, 64);
    assert_eq!(stopped.demand(), 64);
    wait_for_patience_to_end();
    assert_eq!(asker.donor(Need::Starved), Donor::Member(2));
    assert_eq!(asker.unanswering(), 1);
    // Another member that does not know requests it again: it is no fresher for that.
    other.request_reclaim(1, 64);
    assert_eq!(asker.donor(Need::Starved), Donor::Member(2));
    asker.request_reclaim(2, 64);
    wait_for_patience_to_end();
    assert_eq!((asker.donor(Need::Starved), asker.unanswering()), (Donor::Nobody, 2));
    stopped.show_life();
    assert_eq!((asker.donor(Need::Starved), asker.unanswering()), (Donor::Member(1), 1));
    // From now on it has its time again.
    asker.request_reclaim(1, 64);
    wait_for_patience_to_end();
    assert_eq!(asker.donor(Need::Starved), Donor::Nobody);
}

#[test]
fn a_member_that_had_nothing_to_give_is_asked_again_when_it_holds_more() {
    let [asker, spent] = holding([10, 2000]);
    asker.request_reclaim(1, 64);
    let calls = asker.calls();
    spent.answer_spent();
    assert_eq!(spent.demand(), 0);
    assert_ne!(asker.calls(), calls, "the member that requested it is called");
    let seen = || asker.donor(Need::Starved);
    // Again and again: the mark grows old.
    while seen() != Donor::Nobody {
        spent.answer_spent();
    }
    spent.charge_anyway(40);
    assert_eq!(seen(), Donor::Member(1));
    while seen() != Donor::Nobody {
        spent.answer_spent();
    }
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(seen(), Donor::Member(1), "nothing stays as it is for ever");
}

#[test]
fn a_member_that_does_not_answer_for_its_memory_is_never_asked() {
    let [asker, silent, _] = holding([10, 3000, 200]);
    seat(&silent).is_silent.store(1, Ordering::Relaxed);
    assert_eq!(asker.donor(Need::Starved), Donor::Member(2));
    assert_eq!(asker.unanswering(), 0);
}

#[test]
fn a_demand_is_the_largest_of_all_and_answered_when_it_is_met() {
    let [one, other, giver] = holding([10, 10, 2000]);
    one.request_reclaim(2, 100);
    other.request_reclaim(2, 60);
    one.request_reclaim(2, 1 << 20);
    let calls = one.calls();
    assert_eq!(giver.demand(), 512, "so much at a time");
    giver.answer(500);
    assert_eq!((giver.demand(), one.calls()), (12, calls));
    giver.answer(30);
    assert_eq!((giver.demand(), one.calls()), (0, calls + 1));
    giver.answer(30);
    assert_eq!(one.calls(), calls + 1, "no member waits any more");
}

#[test]
fn no_member_charges_for_faults_while_one_asks_that_holds_less() {
    let [rich, poor, poorer] = holding([3000, 500, 20]);
    // Again and again: an ask grows old.
    let asked = |pages, check: &dyn Fn() -> bool| {
        while !check() {
            poor.ask(pages, For::Faults);
        }
    };
    asked(700, &|| rich.owed() == 700 && rich.chargeable() == 0);
    asked(700, &|| !rich.try_charge(1, Purpose::Fault));
    // Reclaim must go on: it is what feeds the other. So must the member that holds less.
    assert!(rich.try_charge(1, Purpose::Reclaim));
    assert!(poorer.try_charge(1, Purpose::Fault) && poorer.owed() == 0);
    assert!(poor.try_charge(1, Purpose::Fault) && poor.owed() == 0);
    let calls = rich.calls();
    rich.ask(1, For::Faults);
    poor.stop_asking();
    assert_eq!((rich.owed(), rich.calls()), (0, calls + 1), "the member that held back is called");
    assert!(rich.try_charge(1, Purpose::Fault));
}

#[test]
fn of_several_that_ask_the_smallest_is_fed_first() {
    let [large, small, smallest] = holding([1000, 500, 200]);
    let all_ask = || [&large, &small, &smallest].map(|member| member.ask(8, For::Faults));
    let until = |check: &dyn Fn() -> bool| {
        while !check() {
            all_ask();
        }
    };
    until(&|| large.yields() && small.yields());
    all_ask();
    assert!(!smallest.yields());
    smallest.stop_asking();
    until(&|| large.yields());
    assert!(!small.yields(), "smaller than all that ask");
    // Two that hold the same do not wait for each other.
    smallest.charge_anyway(300);
    until(&|| small.yields() != smallest.yields());
}

#[test]
fn to_a_fork_every_member_yields_that_holds_more_than_its_floor() {
    let [forking, small, tiny] = holding([3000, 500, 100]);
    while !small.yields() {
        forking.ask(2000, For::Fork);
    }
    assert!(!tiny.yields() && !forking.yields());
    while small.owed() != 2000 {
        forking.ask(2000, For::Fork);
    }
    while small.yields() {
        forking.ask(2000, For::Faults);
    }
}

#[test]
fn a_member_stopped_or_killed_after_it_asked_holds_no_other_up() {
    let [rich, poor] = holding([3000, 500]);
    poor.ask(700, For::Faults);
    std::thread::sleep(Duration::from_millis(550));
    assert!(!rich.yields() && rich.try_charge(1, Purpose::Fault));
    while !rich.yields() {
        poor.ask(700, For::Faults);
    }
    rich.control().free_slot(1);
    assert!(!rich.yields() && rich.owed() == 0);
}

#[test]
fn the_pools_of_others_are_counted() {
    let [rich, poor] = holding([3000, 500]);
    rich.member().pool_pages.store(100, Ordering::Relaxed);
    poor.member().pool_pages.store(7, Ordering::Relaxed);
    assert_eq!(rich.pool_pages_of_others(), 7);
    assert_eq!(poor.pool_pages_of_others(), 100);
}

/// Two members with spaces: the first has filled the budget as far as it goes.
fn full_and_empty() -> (Machine, Machine, PageRange) {
    let [rich, poor] = members(tree());
    let rich = Machine::member(rich);
    let range = rich.map(0, 3700);
    rich.fill_all(range);
    (rich, Machine::member(poor), range)
}

fn balance(machine: &Machine) -> Balance {
    machine.space.balance(&NoCaches, &mut machine.scratch.lock().unwrap())
}

#[test]
fn what_one_member_needs_another_gives_and_no_byte_is_lost() {
    let (rich, poor, range) = full_and_empty();
    let own = poor.map(0, 1500);
    for page in own.pages() {
        // As the background threads would, until there is room.
        while poor.space.is_low() {
            match balance(&poor) {
                Balance::Elsewhere => {
                    while rich.space.budget().demand() > 0 {
                        balance(&rich);
                    }
                }
                Balance::Enough => break,
                Balance::Progress | Balance::Stuck => {}
            }
        }
        poor.fill(page, page.0 + 1);
    }
    let held = [&rich, &poor].map(|machine| machine.space.budget().held());
    assert!(held[0] < 3300 && held[1] > 400, "{held:?} are held");
    assert_eq!(poor.counted(Event::PgstealDirect), 0, "nothing had to go at home");
    let control = rich.space.budget().control();
    assert!(control.held_pages_max.load(Ordering::Relaxed) as usize <= LIMIT);
    poor.expect_all(own);
    rich.expect_all(range);
    rich.space.check();
    poor.space.check();
}

#[test]
fn a_giver_keeps_its_floor_and_says_when_it_has_nothing_more() {
    let (rich, poor, range) = full_and_empty();
    let [giver, asker] = [rich.space.budget(), poor.space.budget()];
    let mut rounds = 0;
    while asker.donor(Need::Starved) == Donor::Member(0) {
        asker.ask(1 << 20, For::Faults);
        asker.request_reclaim(0, 512);
        while giver.demand() > 0 {
            asker.ask(1 << 20, For::Faults);
            balance(&rich);
        }
        rounds += 1;
        assert!(rounds < 1000, "it holds {} still", giver.held());
    }
    assert!(giver.held() >= giver.floor(), "it holds {}", giver.held());
    asker.stop_asking();
    rich.expect_all(range);
    rich.space.check();
}

#[test]
fn a_demand_that_came_too_late_costs_nothing() {
    let [rich, poor] = members(tree());
    let rich = Machine::member(rich);
    rich.fill_all(rich.map(0, 1000));
    poor.request_reclaim(0, 512);
    assert_eq!(balance(&rich), Balance::Enough);
    assert_eq!((rich.space.budget().demand(), rich.unmapped()), (0, (0, 0)));
}
