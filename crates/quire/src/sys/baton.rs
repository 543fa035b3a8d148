//! The baton: of all threads of a simulation one runs at a time, and a seed says which.
//!
//! Each actor is a thread of its own. It gives the baton away at [`Baton::step`], which the engine
//! calls between its steps, and where it has to wait. The same seed gives the same interleaving,
//! because nothing runs that the seed did not choose.
//!
//! What time it is goes by steps. As a rule there is one clock, as if one CPU ran all actors; a
//! machine ([`Baton::with_cpus`]) has a CPU and a clock for each, and whoever is behind goes first:
//! that shows what runs beside what, and how long the whole takes.
//!
//! An actor that waits for a certain thing is *blocked* until somebody unblocks it; one that has
//! nothing to do looks again now and then (*idle*). If all are blocked, or idle for too long, the
//! simulation is stuck, and that is a failure: it panics in every actor.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::cell::{Cell, RefCell};
use std::format;
use std::string::String;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::vec::Vec;

#[cfg(debug_assertions)]
use super::rank;
use super::thread::ThreadId;

/// Looks of idle actors in a row, with nobody else able to run, before the simulation is stuck.
const IDLE_LOOKS_MAX: u32 = 20_000;

/// What time it is when a simulation begins: not 0, which stands for "never" where moments are kept.
const START_NS: u64 = 1_000_000_000;
/// How long a step takes.
const STEP_NS: u64 = 1_000;
/// How long it takes until idle actors look again, with nobody else able to run.
const IDLE_LOOK_NS: u64 = 1_000_000;
/// Of a machine: the same, and how long a step takes that is none of the kernel's.
const CPU_LOOK_NS: u64 = 500;
const CPU_STEP_NS: u64 = 50;

/// What an actor waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// A word at this address.
    Word(usize),
    /// One of the words at these addresses.
    Either(usize, usize),
    /// A fault's answer, by its number.
    Fault(u64),
    /// A lock of the simulation's own, or a mutex at this address.
    Lock(usize),
    /// A futex at this address, as one of these classes.
    Futex(usize, u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    NotStarted,
    Ready,
    Idle,
    Blocked(Wait),
    Ended,
}

/// Panics with this are of actors that only end because another one failed.
pub struct Stopped;

struct Turns {
    generator: Generator,
    actors: Vec<State>,
    /// Who has the baton.
    current: usize,
    steps: u64,
    /// The time that has come so far.
    now_ns: u64,
    /// Likewise for each actor, where each has a CPU.
    clocks: Option<Vec<u64>>,
    idle_looks: u32,
    failure: Option<String>,
}

impl Turns {
    /// What time it is for an actor, or for whoever asks.
    fn time_of(&self, actor: Option<usize>) -> u64 {
        let clocks = self.clocks.as_deref();
        clocks.zip(actor).map_or(self.now_ns, |(clocks, index)| clocks[index])
    }

    /// Time passes for the actor that has the baton: a step, or `ns` of a machine.
    fn pass(&mut self, index: usize, ns: u64) {
        match &mut self.clocks {
            Some(clocks) => clocks[index] += ns,
            None => self.now_ns += STEP_NS,
        }
    }

    /// An idle actor's CPU looks again a little later than the others have come.
    fn look_later(&mut self, index: usize) {
        let is_ready = |(_, state): &(usize, &State)| **state == State::Ready;
        let ready: Vec<usize> =
            self.actors.iter().enumerate().filter(is_ready).map(|(index, _)| index).collect();
        if let Some(clocks) = &mut self.clocks {
            let others = ready.into_iter().map(|index| clocks[index]).min();
            clocks[index] = clocks[index].max(others.unwrap_or(0)) + CPU_LOOK_NS;
        }
    }

    /// An actor was woken by the one that has the baton: it is as late for both.
    fn catch_up(&mut self, index: usize) {
        let now = self.time_of(ACTOR.get());
        if let Some(clocks) = &mut self.clocks {
            clocks[index] = clocks[index].max(now);
        }
    }

    /// Of a machine, the actor whose clock is behind all others', of those that can run or look.
    fn first_behind(&self) -> Option<usize> {
        let clocks = self.clocks.as_deref()?;
        let runs = |index: &usize| matches!(self.actors[*index], State::Ready | State::Idle);
        (0..self.actors.len()).filter(runs).min_by_key(|&index| clocks[index])
    }
}

/// A small generator: the same numbers from the same seed, on every machine.
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// Starts from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Generator {
        Generator(seed)
    }

    /// The next number (splitmix64).
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `limit` (0 for a limit of 0).
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next_u64() % limit.max(1) as u64) as usize
    }

    /// True once in so many times; never for 0.
    pub fn one_in(&mut self, many: u32) -> bool {
        many != 0 && self.next_u64().is_multiple_of(u64::from(many))
    }
}

/// Chooses who runs.
pub struct Baton {
    turns: Mutex<Turns>,
    /// One for each actor.
    handed_over: Vec<Condvar>,
    /// How often a step changes actors.
    switch_one_in: u32,
}

std::thread_local! {
    static ACTOR: Cell<Option<usize>> = const { Cell::new(None) };
    /// The baton that the actor waits for, for [`super::turns`].
    static BATON: RefCell<Option<Arc<Baton>>> = const { RefCell::new(None) };
}

/// Actors of this process. While there is none no thread-local is touched: an engine that serves a
/// program has threads to which libc gave none.
static ACTORS: AtomicUsize = AtomicUsize::new(0);

/// The baton of the calling thread, if it is an actor.
pub(super) fn current() -> Option<Arc<Baton>> {
    // Relaxed: an actor has counted itself.
    if ACTORS.load(Ordering::Relaxed) == 0 {
        return None;
    }
    BATON.with_borrow(Clone::clone)
}

/// The calling actor, as a thread; unknown where it is none.
pub(crate) fn actor() -> ThreadId {
    ACTOR.get().map_or(ThreadId::UNKNOWN, |index| ThreadId(index as u32 + 1))
}

impl Baton {
    /// A baton for `actors` actors, which begin once all of them have started.
    #[must_use]
    pub fn new(seed: u64, actors: usize, switch_one_in: u32) -> Baton {
        Baton {
            turns: Mutex::new(Turns {
                generator: Generator::new(seed),
                actors: std::vec![State::NotStarted; actors],
                current: usize::MAX,
                steps: 0,
                now_ns: START_NS,
                clocks: None,
                idle_looks: 0,
                failure: None,
            }),
            handed_over: (0..actors).map(|_| Condvar::new()).collect(),
            switch_one_in,
        }
    }

    /// A baton for actors with a CPU each, of which the one whose clock is behind goes first.
    #[must_use]
    pub fn with_cpus(seed: u64, actors: usize) -> Baton {
        let baton = Baton::new(seed, actors, 1);
        baton.turns().clocks = Some(std::vec![START_NS; actors]);
        baton
    }

    /// How long the simulation has taken: by the clock that is farthest.
    #[must_use]
    pub fn elapsed_ns(&self) -> u64 {
        let turns = self.turns();
        let farthest = turns.clocks.iter().flatten().copied().max();
        farthest.unwrap_or(turns.now_ns) - START_NS
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        // Poisoned by an actor that failed: the failure is what counts.
        self.turns.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.turns().steps
    }

    /// What time it is in the simulation.
    pub fn now_ns(&self) -> u64 {
        self.turns().time_of(ACTOR.get())
    }

    /// Makes the calling thread actor `index`, and returns when it is its turn.
    pub fn start(self: &Arc<Self>, index: usize) {
        ACTOR.set(Some(index));
        BATON.set(Some(Arc::clone(self)));
        ACTORS.fetch_add(1, Ordering::Relaxed);
        let mut turns = self.turns();
        turns.actors[index] = State::Ready;
        if turns.actors.iter().all(|state| *state == State::Ready) {
            self.choose(&mut turns);
        }
        self.wait_for_turn(turns, index);
    }

    /// Ends the calling actor, which holds no lock any more, unless the simulation has failed.
    pub fn end(&self) {
        let Some(index) = ACTOR.take() else { return };
        #[cfg(debug_assertions)]
        if let Some(rank) = rank::forget().filter(|_| self.failure().is_none()) {
            self.fail(format!("actor {index} has ended and holds {rank:?}"));
        }
        BATON.set(None);
        ACTORS.fetch_sub(1, Ordering::Relaxed);
        let mut turns = self.turns();
        turns.actors[index] = State::Ended;
        self.choose(&mut turns);
    }

    /// Ends the simulation: every actor panics at its next step.
    pub fn fail(&self, why: String) {
        let mut turns = self.turns();
        self.fail_locked(&mut turns, why);
    }

    fn fail_locked(&self, turns: &mut Turns, why: String) {
        turns.failure.get_or_insert(why);
        self.handed_over.iter().for_each(Condvar::notify_all);
    }

    /// Why the simulation failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.turns().failure.clone()
    }

    /// A place where another actor may come in between.
    pub fn step(&self) {
        let Some(index) = ACTOR.get() else { return };
        let mut turns = self.turns();
        turns.steps += 1;
        turns.pass(index, CPU_STEP_NS);
        turns.idle_looks = 0;
        if turns.generator.one_in(self.switch_one_in) {
            self.choose(&mut turns);
        }
        self.wait_for_turn(turns, index);
    }

    /// The calling actor's CPU works for so long; nothing where there is one clock.
    pub fn work(&self, ns: u64) {
        let Some(index) = ACTOR.get() else { return };
        let mut turns = self.turns();
        if turns.clocks.is_some() {
            turns.pass(index, ns);
        }
    }

    /// Lets others run; comes back as soon as the seed says so.
    pub fn relax(&self) {
        let Some(index) = ACTOR.get() else { return };
        let mut turns = self.turns();
        turns.actors[index] = State::Idle;
        turns.look_later(index);
        self.choose(&mut turns);
        self.wait_for_turn(turns, index);
    }

    /// Waits until `is_ready` says so, looking again now and then.
    pub fn idle_until(&self, mut is_ready: impl FnMut() -> bool) {
        while !is_ready() {
            self.relax();
        }
    }

    /// Waits until somebody [unblocks](Self::unblock) what this actor waits for.
    pub fn block(&self, wait: Wait) {
        let Some(index) = ACTOR.get() else { return };
        let mut turns = self.turns();
        turns.actors[index] = State::Blocked(wait);
        self.choose(&mut turns);
        self.wait_for_turn(turns, index);
    }

    /// Those who wait for this can run again.
    pub fn unblock(&self, wait: Wait) {
        let mut turns = self.turns();
        let mut woken = Vec::new();
        for (index, state) in turns.actors.iter_mut().enumerate() {
            let is_meant = match *state {
                State::Blocked(Wait::Either(one, other)) => {
                    wait == Wait::Word(one) || wait == Wait::Word(other)
                }
                State::Blocked(blocked) => blocked == wait,
                _ => false,
            };
            if is_meant {
                *state = State::Ready;
                woken.push(index);
            }
        }
        woken.into_iter().for_each(|index| turns.catch_up(index));
    }

    /// Up to `count` of those who wait for a futex as one of `classes` can run again; the seed says
    /// who.
    pub fn unblock_futex(&self, address: usize, count: u32, classes: u32) {
        let mut turns = self.turns();
        for _ in 0..count {
            let waits = |state: &State| {
                matches!(*state, State::Blocked(Wait::Futex(at, as_one_of))
                    if at == address && as_one_of & classes != 0)
            };
            let waiting: Vec<usize> =
                (0..turns.actors.len()).filter(|&index| waits(&turns.actors[index])).collect();
            if waiting.is_empty() {
                return;
            }
            let index = waiting[turns.generator.below(waiting.len())];
            turns.actors[index] = State::Ready;
            turns.catch_up(index);
        }
    }

    /// Hands the baton to somebody who can run: mostly one who is ready.
    fn choose(&self, turns: &mut Turns) {
        let indices = |turns: &Turns, wanted: State| -> Vec<usize> {
            let states = turns.actors.iter().enumerate();
            states.filter(|(_, state)| **state == wanted).map(|(index, _)| index).collect()
        };
        let ready = indices(turns, State::Ready);
        let idle = indices(turns, State::Idle);
        if ready.is_empty() {
            turns.idle_looks += 1;
            turns.now_ns += IDLE_LOOK_NS;
        }
        if let Some(index) = turns.first_behind() {
            return self.hand_to(turns, index);
        }
        let looks = !idle.is_empty() && (ready.is_empty() || turns.generator.one_in(4));
        let candidates = if looks { idle } else { ready };
        if candidates.is_empty() || turns.idle_looks > IDLE_LOOKS_MAX {
            let is_over = turns.actors.iter().all(|state| *state == State::Ended);
            if !is_over {
                let why = format!("nobody can go on: {:?}", turns.actors);
                self.fail_locked(turns, why);
            }
            return;
        }
        let index = candidates[turns.generator.below(candidates.len())];
        self.hand_to(turns, index);
    }

    fn hand_to(&self, turns: &mut Turns, index: usize) {
        turns.actors[index] = State::Ready;
        if index != turns.current {
            turns.current = index;
            self.handed_over[index].notify_one();
        }
    }

    fn wait_for_turn(&self, mut turns: MutexGuard<'_, Turns>, index: usize) {
        loop {
            if turns.failure.is_some() {
                drop(turns);
                if !std::thread::panicking() {
                    std::panic::resume_unwind(std::boxed::Box::new(Stopped));
                }
                return;
            }
            if turns.current == index {
                return;
            }
            turns = self.handed_over[index]
                .wait(turns)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}
