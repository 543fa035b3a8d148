//! The lock stepped by hand, in every order that a schedule of random steps makes; and counts of
//! who passes whom, with real threads.

use std::sync::atomic::AtomicUsize;
use std::vec::Vec;
use std::{thread, vec};

use proptest::prelude::*;

use super::super::word::{PHASE, TICKET};
use super::*;

/// Threads of a schedule.
const AGENTS: usize = 7;

/// What a thread of the schedule is about to do.
#[derive(Clone, Copy, Debug)]
enum Agent {
    Outside,
    Inside(Side),
    /// In line and awake.
    Waiting(InLine),
    /// Has looked at the word, and sleeps if it is still the same.
    FallingAsleep(InLine, u32),
    Asleep(InLine),
    /// Has left, and has this wake to make.
    Waking(Class),
}

fn side_of(place: InLine) -> Side {
    match place {
        InLine::Reader(_) => Side::Reader,
        InLine::Writer(_) => Side::Writer,
    }
}

#[derive(Clone, Copy, Debug)]
enum Wish {
    Lock(Side),
    TryLock(Side),
}

struct Schedule {
    lock: RwSem,
    agents: [Agent; AGENTS],
    /// Of an agent in line: how many turns of others it has seen, a writer as the first in line, a
    /// reader those of writers.
    passed: [u32; AGENTS],
}

impl Schedule {
    fn new() -> Schedule {
        Schedule { lock: <RwSem>::default(), agents: [Agent::Outside; AGENTS], passed: [0; AGENTS] }
    }

    /// What `agent` does next; `wish` is for those that are outside.
    fn next(&mut self, agent: usize, wish: Option<Wish>) -> Agent {
        match self.agents[agent] {
            Agent::Outside => match wish {
                None => Agent::Outside,
                Some(wish) => self.arrive(wish),
            },
            Agent::Inside(side) => self.lock.leave(side).map_or(Agent::Outside, Agent::Waking),
            Agent::Waiting(place) => {
                if self.lock.take_turn(place) {
                    Agent::Inside(side_of(place))
                } else {
                    Agent::FallingAsleep(place, self.lock.load().0)
                }
            }
            Agent::FallingAsleep(place, seen) if self.lock.load().0 == seen => Agent::Asleep(place),
            Agent::FallingAsleep(place, _) => Agent::Waiting(place),
            Agent::Asleep(place) => Agent::Asleep(place),
            Agent::Waking(class) => {
                for other in &mut self.agents {
                    if let Agent::Asleep(place) = *other
                        && place.class() == class
                    {
                        *other = Agent::Waiting(place);
                    }
                }
                Agent::Outside
            }
        }
    }

    fn arrive(&self, wish: Wish) -> Agent {
        match wish {
            Wish::TryLock(side) if self.lock.try_lock(side) => Agent::Inside(side),
            Wish::TryLock(_) => Agent::Outside,
            Wish::Lock(side) => match self.lock.arrive(side) {
                Arrival::Entered => Agent::Inside(side),
                Arrival::Queued(place) => Agent::Waiting(place),
                Arrival::Full => unreachable!("there are {AGENTS} agents"),
            },
        }
    }

    fn place(&self, agent: usize) -> Option<InLine> {
        match self.agents[agent] {
            Agent::Waiting(place) | Agent::FallingAsleep(place, _) | Agent::Asleep(place) => {
                Some(place)
            }
            _ => None,
        }
    }

    /// On which side an agent is inside, whether it knows it already or not.
    fn inside(&self) -> [Option<Side>; AGENTS] {
        let word = self.lock.load();
        core::array::from_fn(|agent| match self.agents[agent] {
            Agent::Inside(side) => Some(side),
            _ => self.place(agent).filter(|&place| word.is_admitted(place)).map(side_of),
        })
    }

    fn step(&mut self, agent: usize, wish: Option<Wish>) {
        let (was_inside, word) = (self.inside(), self.lock.load());
        let was_in_line: [_; AGENTS] = core::array::from_fn(|at| self.place(at));
        self.agents[agent] = self.next(agent, wish);
        let inside = self.inside();
        let writers = inside.iter().filter(|side| **side == Some(Side::Writer)).count();
        let readers = inside.iter().filter(|side| **side == Some(Side::Reader)).count();
        assert!(writers <= 1 && (writers == 0 || readers == 0), "together: {inside:?}");
        let now = self.lock.load();
        assert_eq!((now.readers(), now.has_writer()), (readers as u32, writers == 1));
        let came =
            |side| (0..AGENTS).any(|at| was_inside[at].is_none() && inside[at] == Some(side));
        let (reader_came, writer_came) = (came(Side::Reader), came(Side::Writer));
        for at in 0..AGENTS {
            let Some(place) = was_in_line[at].filter(|_| was_inside[at].is_none()) else {
                continue;
            };
            if inside[at].is_some() {
                self.passed[at] = 0;
                continue;
            }
            match place {
                InLine::Reader(_) => {
                    assert!(!reader_came, "a reader passed a reader in line");
                    self.passed[at] += u32::from(writer_came);
                    assert!(self.passed[at] <= 1, "a reader in line saw a second writer");
                }
                InLine::Writer(_) if word.first_writer() == Some(place) => {
                    self.passed[at] += u32::from(reader_came || writer_came);
                    assert!(self.passed[at] <= STEALS_MAX + 1, "a writer in line is kept out");
                }
                InLine::Writer(_) => {}
            }
        }
    }

    /// Nobody comes any more: all get in and leave, in turns.
    fn drain(&mut self) {
        for _ in 0..AGENTS * AGENTS * 8 {
            for agent in 0..AGENTS {
                self.step(agent, None);
            }
        }
        for agent in self.agents {
            assert!(matches!(agent, Agent::Outside), "it sleeps for ever: {:?}", self.agents);
        }
        let idle = LockState(0)
            .set(PHASE, self.lock.load().get(PHASE))
            .set(TICKET, self.lock.load().get(TICKET));
        assert_eq!(self.lock.load(), idle);
    }
}

fn wish() -> impl Strategy<Value = Wish> {
    prop_oneof![
        3 => Just(Wish::Lock(Side::Reader)),
        3 => Just(Wish::Lock(Side::Writer)),
        1 => Just(Wish::TryLock(Side::Reader)),
        1 => Just(Wish::TryLock(Side::Writer)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn in_no_order_of_steps_is_anybody_kept_out_or_asleep_for_ever(
        steps in prop::collection::vec((0..AGENTS, wish()), 1..400),
    ) {
        let mut schedule = Schedule::new();
        for (agent, wish) in steps {
            schedule.step(agent, Some(wish));
        }
        schedule.drain();
    }

    /// An adversary: as often as not the same two threads run, while the others wait.
    #[test]
    fn two_greedy_threads_keep_nobody_out(
        steps in prop::collection::vec((prop_oneof![4 => 0..2usize, 1 => 2..AGENTS], wish()), 1..600),
    ) {
        let mut schedule = Schedule::new();
        for (agent, wish) in steps {
            schedule.step(agent, Some(wish));
        }
        schedule.drain();
    }
}

/// Waits until `is_so` of the word.
fn until(lock: &RwSem, is_so: impl Fn(LockState) -> bool) {
    while !is_so(lock.load()) {
        thread::yield_now();
    }
}

#[test]
fn readers_that_follow_each_other_without_a_gap_let_a_writer_in_after_a_few() {
    let lock = <RwSem>::default();
    lock.lock(Side::Reader, &Futex);
    let followers = thread::scope(|scope| {
        scope.spawn(|| {
            lock.lock(Side::Writer, &Futex);
            lock.unlock(Side::Writer, &Futex);
        });
        until(&lock, |word| word.in_line(Side::Writer) == 1);
        let mut followers = 0;
        // Each comes before the one in front of it leaves: the lock is never free.
        while followers <= STEALS_MAX && lock.try_lock(Side::Reader) {
            lock.unlock(Side::Reader, &Futex);
            followers += 1;
        }
        lock.unlock(Side::Reader, &Futex);
        followers
    });
    assert_eq!(followers, STEALS_MAX);
}

#[test]
fn a_writer_that_comes_again_at_once_lets_those_in_line_in_after_a_few() {
    let lock = <RwSem>::default();
    lock.lock(Side::Writer, &Futex);
    let steals = thread::scope(|scope| {
        scope.spawn(|| {
            lock.lock(Side::Writer, &Futex);
            lock.unlock(Side::Writer, &Futex);
        });
        until(&lock, |word| word.in_line(Side::Writer) == 1);
        for steals in 0..=STEALS_MAX {
            lock.unlock(Side::Writer, &Futex);
            // It is refused as well where the other has woken up meanwhile.
            if !lock.try_lock(Side::Writer) {
                return steals;
            }
            if lock.load().in_line(Side::Writer) == 0 {
                // The other was in and out again.
                lock.unlock(Side::Writer, &Futex);
                return steals;
            }
        }
        lock.unlock(Side::Writer, &Futex);
        STEALS_MAX + 1
    });
    assert!(steals <= STEALS_MAX, "the writer in line is kept out");
}

#[test]
fn a_writer_that_leaves_lets_the_readers_in_line_in_before_any_writer() {
    let lock = <RwSem>::default();
    lock.lock(Side::Writer, &Futex);
    let may_leave = AtomicU32::new(0);
    let (readers, has_passed) = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                lock.lock(Side::Reader, &Futex);
                while may_leave.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                lock.unlock(Side::Reader, &Futex);
            });
        }
        until(&lock, |word| word.in_line(Side::Reader) == 3);
        lock.unlock(Side::Writer, &Futex);
        let readers = lock.load().readers();
        let has_passed = lock.try_lock(Side::Writer);
        if has_passed {
            lock.unlock(Side::Writer, &Futex);
        }
        may_leave.store(1, Ordering::Relaxed);
        (readers, has_passed)
    });
    assert_eq!(readers, 3, "let in before they wake");
    assert!(!has_passed, "a writer passed readers in line");
    assert!(lock.try_lock(Side::Writer));
}

/// Two cells that the lock keeps equal.
struct Guarded {
    lock: RwSem,
    cells: [AtomicUsize; 2],
}

impl Guarded {
    fn new() -> Guarded {
        Guarded { lock: <RwSem>::default(), cells: [const { AtomicUsize::new(0) }; 2] }
    }

    /// Adds one as no two can at a time.
    fn write(&self) {
        self.lock.lock(Side::Writer, &Futex);
        for cell in &self.cells {
            cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        self.lock.unlock(Side::Writer, &Futex);
    }

    fn read(&self) {
        self.lock.lock(Side::Reader, &Futex);
        let [first, second] = self.cells.each_ref().map(|cell| cell.load(Ordering::Relaxed));
        self.lock.unlock(Side::Reader, &Futex);
        assert_eq!(first, second, "a reader was in beside a writer");
    }
}

#[test]
fn where_more_wait_than_there_is_room_for_in_line_all_get_in() {
    let guarded = Guarded::new();
    let (writers, readers) = (WRITERS_IN_LINE_MAX + 9, READERS_IN_LINE_MAX + 9);
    guarded.lock.lock(Side::Writer, &Futex);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for at in 0..writers + readers {
            let guarded = &guarded;
            let run = move || if at < writers { guarded.write() } else { guarded.read() };
            threads.push(thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, run));
        }
        until(&guarded.lock, |word| {
            word.in_line(Side::Writer) == WRITERS_IN_LINE_MAX
                && word.in_line(Side::Reader) == READERS_IN_LINE_MAX
        });
        guarded.lock.unlock(Side::Writer, &Futex);
        threads.into_iter().for_each(|thread| thread.unwrap().join().unwrap());
    });
    assert_eq!(guarded.cells[0].load(Ordering::Relaxed), writers as usize);
    assert!(guarded.lock.try_lock(Side::Writer));
}

#[test]
fn four_threads_that_read_and_write_lose_no_write_and_all_come_to_an_end() {
    let guarded = Guarded::new();
    thread::scope(|scope| {
        for at in 0..4 {
            let guarded = &guarded;
            scope.spawn(move || {
                for round in 0..20_000 {
                    if (round + at) % 4 == 0 { guarded.write() } else { guarded.read() }
                }
            });
        }
    });
    assert_eq!(guarded.cells[0].load(Ordering::Relaxed), 20_000);
}

#[test]
fn a_dump_of_the_word_says_who_is_inside_and_who_waits() {
    let lock = <RwSem>::default();
    assert!(lock.try_lock(Side::Reader) && lock.try_lock(Side::Reader));
    assert!(matches!(lock.arrive(Side::Writer), Arrival::Queued(_)));
    assert!(lock.try_lock(Side::Reader));
    let text = std::format!("{:?}", lock.load());
    let expected =
        vec!["inside: 3 readers, 0 writers", "in line: 0 readers, 1 writers", "1 steals"];
    for part in expected {
        assert!(text.contains(part), "{text}");
    }
}
