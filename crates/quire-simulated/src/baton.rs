//! The baton: of all threads of a simulation one runs at a time, and a seed says which.
//!
//! Each actor is a thread of its own. It gives the baton away at [`Baton::step`], which the engine
//! calls between its steps, and where it has to wait. The same seed gives the same interleaving,
//! because nothing runs that the seed did not choose.
//!
//! What time it is goes by steps. As a rule there is one clock, as if one CPU ran all actors; a
//! machine ([`Baton::on_cpus`]) has a clock for each actor and each CPU, and the actor that is behind goes
//! first: that shows what runs beside what, and how long the whole takes. An actor runs when its CPU has
//! time for it; of several on a CPU the one with the highest number goes first. To look, and to wait, takes
//! no time of a CPU.
//!
//! An actor that waits for a certain thing is *blocked* until another unblocks it; one that has
//! nothing to do looks again now and then (*idle*). If all are blocked, or idle for too long, the
//! simulation is stuck, and that is a failure: it panics in every actor.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::generator::Generator;
use quire::sys::thread::ThreadId;
use quire::sys::turns::{self, Turns};

/// Looks of idle actors in a row, with no other able to run, before the simulation is stuck.
const IDLE_LOOKS_MAX: u32 = 20_000;

/// What time it is when a simulation begins: not 0, which stands for "never" where moments are kept.
const START_NS: u64 = 1_000_000_000;
/// How long a step takes.
const STEP_NS: u64 = 1_000;
/// How long it takes until idle actors look again, with no other able to run.
const IDLE_LOOK_NS: u64 = 1_000_000;
/// The same on a machine, and how long a step there takes unless it is said.
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

/// The panic of an actor that ends only because another one has failed.
pub struct Stopped;

struct Actors {
    generator: Generator,
    states: Vec<State>,
    /// The actor that has the baton.
    current: usize,
    steps: u64,
    /// The time that has come so far.
    now_ns: u64,
    /// The clocks of a machine.
    clocks: Option<Clocks>,
    idle_looks: u32,
    failure: Option<String>,
}

/// The time of a machine's actors and CPUs.
struct Clocks {
    actors: Vec<u64>,
    cpus: Vec<u64>,
    /// The CPU of each actor.
    cpu_of: Vec<usize>,
    /// How long a step takes that is no call of the kernel's.
    step_ns: u64,
}

impl Clocks {
    /// When an actor can run at the earliest.
    fn time_of(&self, index: usize) -> u64 {
        self.actors[index].max(self.cpus[self.cpu_of[index]])
    }

    fn pass(&mut self, index: usize, ns: u64) {
        let now = self.time_of(index) + ns;
        (self.actors[index], self.cpus[self.cpu_of[index]]) = (now, now);
    }
}

impl Actors {
    /// What time it is for an actor, or for a thread that is none.
    fn time_of(&self, actor: Option<usize>) -> u64 {
        let clocks = self.clocks.as_ref();
        clocks.zip(actor).map_or(self.now_ns, |(clocks, index)| clocks.time_of(index))
    }

    /// A step's time passes for the actor that has the baton.
    fn pass_step(&mut self, index: usize) {
        match &mut self.clocks {
            Some(clocks) => clocks.pass(index, clocks.step_ns),
            None => self.now_ns += STEP_NS,
        }
    }

    /// An idle actor's CPU looks again a little later than the others have come; where none of them can run
    /// it waits for time to pass.
    fn look_later(&mut self, index: usize) {
        let Some(clocks) = &self.clocks else { return };
        let states = self.states.iter().enumerate();
        let ready = states.filter(|(_, state)| **state == State::Ready);
        let others = ready.map(|(other, _)| clocks.time_of(other)).min();
        let own = clocks.actors[index];
        let later = others.map_or(own + IDLE_LOOK_NS, |others| own.max(others) + CPU_LOOK_NS);
        if let Some(clocks) = &mut self.clocks {
            clocks.actors[index] = later;
        }
    }

    /// An actor was woken by the one that has the baton: it is as late for both.
    fn catch_up(&mut self, index: usize) {
        let now = self.time_of(ACTOR.get());
        if let Some(clocks) = &mut self.clocks {
            clocks.actors[index] = clocks.actors[index].max(now);
        }
    }

    /// Of a machine, the actor whose clock is behind all others', of those that can run or look.
    fn first_behind(&self) -> Option<usize> {
        let clocks = self.clocks.as_ref()?;
        let runs = |index: &usize| matches!(self.states[*index], State::Ready | State::Idle);
        (0..self.states.len()).rev().filter(runs).min_by_key(|&index| clocks.time_of(index))
    }
}

/// Chooses which actor runs.
pub struct Baton {
    actors: Mutex<Actors>,
    /// One for each actor.
    handed_over: Vec<Condvar>,
    /// How often a step changes actors.
    switch_one_in: u32,
}

std::thread_local! {
    static ACTOR: Cell<Option<usize>> = const { Cell::new(None) };
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
            actors: Mutex::new(Actors {
                generator: Generator::new(seed),
                states: vec![State::NotStarted; actors],
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

    /// A baton for actors with a CPU each.
    #[must_use]
    pub fn with_cpus(seed: u64, actors: usize) -> Baton {
        Baton::on_cpus(seed, (0..actors).collect(), CPU_STEP_NS)
    }

    /// A baton for the actors of a machine, of which each runs on a CPU, and for which a step that is no call
    /// of the kernel's takes `step_ns`.
    #[must_use]
    pub fn on_cpus(seed: u64, cpu_of: Vec<usize>, step_ns: u64) -> Baton {
        let cpus = cpu_of.iter().max().map_or(0, |last| last + 1);
        let baton = Baton::new(seed, cpu_of.len(), 1);
        let (actors, cpus) = (vec![START_NS; cpu_of.len()], vec![START_NS; cpus]);
        baton.actors().clocks = Some(Clocks { actors, cpus, cpu_of, step_ns });
        baton
    }

    /// How long the simulation has taken: by the clock that is farthest.
    #[must_use]
    pub fn elapsed_ns(&self) -> u64 {
        let actors = self.actors();
        let farthest = actors.clocks.iter().flat_map(|clocks| &clocks.cpus).copied().max();
        farthest.unwrap_or(actors.now_ns) - START_NS
    }

    fn actors(&self) -> MutexGuard<'_, Actors> {
        // Poisoned by an actor that failed: the failure is what counts.
        self.actors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.actors().steps
    }

    /// What time it is in the simulation.
    pub fn now_ns(&self) -> u64 {
        self.actors().time_of(ACTOR.get())
    }

    /// Makes the calling thread actor `index`, and returns when it is its turn.
    pub fn start(self: &Arc<Self>, index: usize) {
        ACTOR.set(Some(index));
        turns::start(Arc::<Baton>::clone(self));
        let mut actors = self.actors();
        actors.states[index] = State::Ready;
        if actors.states.iter().all(|state| *state == State::Ready) {
            self.choose(&mut actors);
        }
        self.wait_for_turn(actors, index);
    }

    /// Ends the calling actor, which holds no lock any more, unless the simulation has failed.
    pub fn end(&self) {
        let Some(index) = ACTOR.take() else { return };
        if let Some(rank) = turns::end().filter(|_| self.failure().is_none()) {
            self.fail(format!("actor {index} has ended and holds {rank:?}"));
        }
        let mut actors = self.actors();
        actors.states[index] = State::Ended;
        self.choose(&mut actors);
    }

    /// Ends the simulation: every actor panics at its next step.
    pub fn fail(&self, why: String) {
        let mut actors = self.actors();
        self.fail_locked(&mut actors, why);
    }

    fn fail_locked(&self, actors: &mut Actors, why: String) {
        actors.failure.get_or_insert(why);
        self.handed_over.iter().for_each(Condvar::notify_all);
    }

    /// Why the simulation failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.actors().failure.clone()
    }

    /// A place where another actor may run.
    pub fn step(&self) {
        let Some(index) = ACTOR.get() else { return };
        let mut actors = self.actors();
        actors.steps += 1;
        actors.pass_step(index);
        actors.idle_looks = 0;
        if actors.generator.one_in(self.switch_one_in) {
            self.choose(&mut actors);
        }
        self.wait_for_turn(actors, index);
    }

    /// The calling actor's CPU works for so long, and those that are behind then go first; nothing where
    /// there is one clock.
    pub fn work(&self, ns: u64) {
        let Some(index) = ACTOR.get() else { return };
        let mut actors = self.actors();
        let Some(clocks) = &mut actors.clocks else { return };
        clocks.pass(index, ns);
        actors.idle_looks = 0;
        self.choose(&mut actors);
        self.wait_for_turn(actors, index);
    }

    /// Lets others run; comes back as soon as the seed says so.
    pub fn relax(&self) {
        let Some(index) = ACTOR.get() else { return };
        let mut actors = self.actors();
        actors.states[index] = State::Idle;
        actors.look_later(index);
        self.choose(&mut actors);
        self.wait_for_turn(actors, index);
    }

    /// Waits until `is_ready` says so, looking again now and then.
    pub fn idle_until(&self, mut is_ready: impl FnMut() -> bool) {
        while !is_ready() {
            self.relax();
        }
    }

    /// Waits until another actor [unblocks](Self::unblock) what this actor waits for.
    pub fn block(&self, wait: Wait) {
        let Some(index) = ACTOR.get() else { return };
        let mut actors = self.actors();
        actors.states[index] = State::Blocked(wait);
        self.choose(&mut actors);
        self.wait_for_turn(actors, index);
    }

    /// The actors that wait for this can run again.
    pub fn unblock(&self, wait: Wait) {
        let mut actors = self.actors();
        let mut woken = Vec::new();
        for (index, state) in actors.states.iter_mut().enumerate() {
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
        woken.into_iter().for_each(|index| actors.catch_up(index));
    }

    /// Up to `count` actors that wait for a futex as one of `classes` can run again; the seed says
    /// which.
    pub fn unblock_futex(&self, address: usize, count: u32, classes: u32) {
        let mut actors = self.actors();
        for _ in 0..count {
            let waits = |state: &State| {
                matches!(*state, State::Blocked(Wait::Futex(at, as_one_of))
                    if at == address && as_one_of & classes != 0)
            };
            let waiting: Vec<usize> =
                (0..actors.states.len()).filter(|&index| waits(&actors.states[index])).collect();
            if waiting.is_empty() {
                return;
            }
            let index = waiting[actors.generator.below(waiting.len())];
            actors.states[index] = State::Ready;
            actors.catch_up(index);
        }
    }

    /// Hands the baton to an actor that can run, mostly to one that is ready.
    fn choose(&self, actors: &mut Actors) {
        let is_any_ready = actors.states.contains(&State::Ready);
        if !is_any_ready {
            actors.idle_looks += 1;
            actors.now_ns += IDLE_LOOK_NS;
        }
        if let Some(index) = actors.first_behind() {
            return self.hand_to(actors, index);
        }
        let indices = |actors: &Actors, wanted: State| -> Vec<usize> {
            let states = actors.states.iter().enumerate();
            states.filter(|(_, state)| **state == wanted).map(|(index, _)| index).collect()
        };
        let ready = indices(actors, State::Ready);
        let idle = indices(actors, State::Idle);
        let looks = !idle.is_empty() && (ready.is_empty() || actors.generator.one_in(4));
        let candidates = if looks { idle } else { ready };
        if candidates.is_empty() || actors.idle_looks > IDLE_LOOKS_MAX {
            let is_over = actors.states.iter().all(|state| *state == State::Ended);
            if !is_over {
                let why = format!("no actor can go on: {:?}", actors.states);
                self.fail_locked(actors, why);
            }
            return;
        }
        let index = candidates[actors.generator.below(candidates.len())];
        self.hand_to(actors, index);
    }

    fn hand_to(&self, actors: &mut Actors, index: usize) {
        actors.states[index] = State::Ready;
        if index != actors.current {
            actors.current = index;
            self.handed_over[index].notify_one();
        }
    }

    fn wait_for_turn(&self, mut actors: MutexGuard<'_, Actors>, index: usize) {
        loop {
            if actors.failure.is_some() {
                drop(actors);
                if !std::thread::panicking() {
                    std::panic::resume_unwind(Box::new(Stopped));
                }
                return;
            }
            if actors.current == index {
                return;
            }
            actors = self.handed_over[index].wait(actors).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Turns for Baton {
    fn step(&self) {
        self.step();
    }

    fn relax(&self) {
        self.relax();
    }

    fn block_on_mutex(&self, address: usize) {
        self.block(Wait::Lock(address));
    }

    fn unblock_mutex(&self, address: usize) {
        self.unblock(Wait::Lock(address));
    }

    fn block_on_futex(&self, address: usize, classes: u32) {
        self.block(Wait::Futex(address, classes));
    }

    fn unblock_futex(&self, address: usize, count: u32, classes: u32) {
        self.unblock_futex(address, count, classes);
    }

    fn now_ns(&self) -> u64 {
        self.now_ns()
    }
}
