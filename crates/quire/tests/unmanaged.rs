//! What is not managed takes of the budget, and managed memory gives way to it.

mod common;

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::{Machine, Tree, members};
use quire::budget::{Budget, Purpose};
use quire::control::Control;
use quire::reclaim::{Balance, NoCaches};

const LIMIT: usize = 4096;
/// What is kept for what comes next.
const AHEAD: usize = LIMIT / 64;

fn tree() -> Tree {
    Tree { budget_pages: LIMIT, ..Tree::default() }
}

/// Steps of each member's background thread until all find enough.
fn settle(machines: &[&Machine]) {
    let step =
        |machine: &&Machine| machine.space.balance(&NoCaches, &mut machine.scratch.lock().unwrap());
    for _ in 0..10_000 {
        if machines.iter().map(step).filter(|&balance| balance == Balance::Enough).count()
            == machines.len()
        {
            return;
        }
    }
    panic!("they find no end");
}

fn control(machine: &Machine) -> &'static Control {
    machine.space.budget().control()
}

#[test]
fn members_may_hold_what_is_left_and_half_at_least() {
    let [one, other]: [Budget; 2] = members(tree());
    let control = one.control();
    assert!(other.try_charge(1000, Purpose::Tables));
    control.unmanaged_pages.store(500, Relaxed);
    control.announced_pages.store(100, Relaxed);
    let left = LIMIT - 600 - AHEAD;
    assert_eq!((one.tree_limit(), one.uncharged()), (left, left - 1000));
    assert!(!one.try_charge(left - 999, Purpose::Tables));
    assert!(one.try_charge(left - 1000, Purpose::Tables));
    assert_eq!(one.excess(), 0);
    control.unmanaged_pages.store(550, Relaxed);
    assert_eq!((one.excess(), one.uncharged()), (50, 0));
    control.unmanaged_pages.store(LIMIT as u64, Relaxed);
    assert_eq!(one.tree_limit(), LIMIT / 2);
}

#[test]
fn a_member_alone_gives_its_excess_back_to_the_kernel() {
    let machine = Machine::new(tree());
    let range = machine.map(0, 3500);
    machine.fill_all(range);
    control(&machine).unmanaged_pages.store(1500, Relaxed);
    settle(&[&machine]);
    let held = machine.space.budget().held();
    assert!(held <= LIMIT - 1500 && held > LIMIT / 2, "{held} pages are held");
    assert!(machine.mmu().used() <= held, "the kernel has the frames");
    // It comes and goes, and no byte is lost.
    for unmanaged in [0, 2000, 700, 2048, 0] {
        control(&machine).unmanaged_pages.store(unmanaged, Relaxed);
        settle(&[&machine]);
        machine.expect_all(range);
        assert!(
            machine.space.budget().held()
                <= LIMIT - unmanaged as usize + machine.space.budget().excess()
        );
    }
    settle(&[&machine]);
    machine.space.check();
}

#[test]
fn members_of_a_tree_give_together() {
    let [one, other] = members(tree()).map(Machine::member);
    let ranges = [one.map(0, 1700), other.map(0, 1700)];
    one.fill_all(ranges[0]);
    other.fill_all(ranges[1]);
    control(&one).unmanaged_pages.store(2000, Relaxed);
    settle(&[&one, &other]);
    assert!(control(&one).held() <= LIMIT as u64 - 2000, "{} are held", control(&one).held());
    one.expect_all(ranges[0]);
    other.expect_all(ranges[1]);
    one.space.check();
    other.space.check();
}

#[test]
fn what_is_announced_waits_until_members_have_given_way_or_give_no_more() {
    let [one]: [Budget; 1] = members(tree());
    assert!(one.try_charge(3000, Purpose::Tables));
    one.control().announced_pages.store(70, Relaxed);
    one.announce(500);
    assert_eq!(one.control().announced_pages.load(Relaxed), 0, "no supervisor counts");
    one.control().note_counted();
    one.announce(LIMIT + 1);
    assert_eq!(one.control().announced_pages.load(Relaxed), 0, "a sparse mapping");
    one.announce(500);
    assert_eq!((one.excess(), one.control().announced_pages.load(Relaxed)), (0, 500));
    let began = Instant::now();
    std::thread::scope(|scope| {
        let gives = scope.spawn(|| {
            for _ in 0..10 {
                std::thread::sleep(Duration::from_millis(20));
                one.uncharge(50);
            }
        });
        one.announce(1000);
        assert_eq!(one.excess(), 0, "it has waited");
        gives.join().unwrap();
    });
    assert!(began.elapsed() >= Duration::from_millis(150));
    // Nobody gives anything: it goes on, with what it has announced.
    one.announce(800);
    assert!(one.excess() > 0);
    one.control().is_managed_only.store(1, Relaxed);
    one.announce(100);
    assert_eq!(one.control().announced_pages.load(Relaxed), 2300);
}
