//! Room for a second process, made before a fork closes the gate.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Machine, Tree};
use quire::fault::Outcome;
use quire::mmu::Access;
use quire::reclaim::NoCaches;
use quire::scratch::Scratch;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::PAGE_SIZE;

const BUDGET_PAGES: usize = 512;
const FORKS: usize = 50;
/// The number of the thread that forks.
const FORKING: u32 = 77;

/// A pack takes its slab before it gives the frames back, and a fault that was let in before the fork
/// began takes what it needs: what the process holds passes the room that was just made for a second
/// one. That is no reason to refuse the fork, which has waited for nothing yet.
#[test]
fn a_fork_asks_again_where_its_process_has_grown_since_room_was_made() {
    let machine = Machine::new(Tree { budget_pages: BUDGET_PAGES, ..Tree::default() });
    let range = machine.map(0, BUDGET_PAGES);
    let (is_over, turn) = (AtomicBool::new(false), Mutex::new(()));
    let space = &machine.space;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut scratch = Scratch::new().unwrap();
            while !is_over.load(Ordering::Relaxed) {
                let background = turn.lock().unwrap();
                space.balance(&NoCaches, &mut scratch);
                // Just when the fork is told that it has room, what it holds grows for a moment, by
                // nearly all that is left.
                let grown = space.budget().uncharged().saturating_sub(space.budget().reserve() / 2);
                space.budget().charge_anyway(grown);
                for _ in 0..100 {
                    thread::yield_now();
                }
                space.budget().uncharge(grown);
                drop(background);
            }
        });
        let mut given = 0;
        for _ in 0..FORKS {
            let alone = turn.lock().unwrap();
            machine.fill_all(range);
            let layout = space.lock();
            space.begin_fork_demand(&layout);
            drop(alone);
            given += usize::from(space.wait_for_fork_room(&layout));
            space.end_fork_demand(&layout);
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(given, FORKS, "of {} MiB", (BUDGET_PAGES * PAGE_SIZE) >> 20);
    });
    machine.space.check();
}

/// The kernel writes to a thread's rseq area whenever it has been preempted, which may lie in managed memory:
/// the fork would wait for the fault, and the fault for the end of the fork.
#[test]
fn a_fault_of_the_forking_thread_is_served_while_others_wait_for_the_fork() {
    let machine = Machine::new(Tree { budget_pages: BUDGET_PAGES, ..Tree::default() });
    let range = machine.map(0, 2);
    let space = &machine.space;
    let mut scratch = Scratch::new().unwrap();
    let mut fault = |thread, page| {
        space.handle_fault_of(thread, page, Access::Write, Moment::now(), &mut scratch)
    };
    let (own, other) = (ThreadId(FORKING), ThreadId(FORKING + 1));
    space.set_thread_of_caller(|| FORKING);
    let layout = space.lock();
    space.begin_fork_demand(&layout);
    assert_eq!(fault(other, range.start), Outcome::Parked);
    assert_eq!(fault(own, range.start.add(1)), Outcome::Served);
    space.end_fork_demand(&layout);
    drop(layout);
    assert_ne!(fault(other, range.start), Outcome::Parked);
    machine.space.check();
}
