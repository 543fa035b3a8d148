//! The simulator, over objects: programs, handlers, reclaim and store workers on the simulated MMU,
//! in an order that a seed chooses, with the bytes that each object must have as oracle.
//!
//! `cargo test -p quire --test simulator_objects` runs [`SEEDS`] seeds; with `QUIRE_SIM_SECONDS` as
//! many as fit into that time. A seed that fails is printed as the command that repeats it:
//! `QUIRE_SIM_SEED=n` runs exactly that one, and prints what every program does.
//!
//! # What goes wrong in here
//! Stores take their time. Reads fail, and then exactly the pages of such a read may be a SIGBUS;
//! writes fail with a part of them done, cuts and syncs fail, and then nothing is lost that was not
//! to go. A barrier holds write-back up for a while. The kernel swaps pages of memfds out by itself.
//! Files become longer by what another process writes to them. Memory of pages goes bad, until a thread
//! says that what the store has will do. Mappings get other rights and other lengths while others
//! access them.
//!
//! # What is checked
//! Each access against the oracle, at the access itself: the object's bytes, zeros behind its end, a
//! SIGBUS behind its last page and nowhere else; in a private copy what was written there, and else the
//! object as it was at some time, never going back. In the store: what is written is what the page held
//! when the barrier was asked, no page is under way twice, no write makes the store longer. After a
//! flush: each page that was written before it has reached the store, or an error was told. At the end,
//! with no thread inside: the invariants of `Objects::check`, all bytes in the store and in the cache;
//! then everything is unmapped and closed, and nothing may be left. A thread that cannot go on is a
//! failure as well.

mod common;
#[path = "simulator/objects_private.rs"]
mod private;
#[path = "simulator/objects_program.rs"]
mod program;
#[path = "simulator/store.rs"]
mod store;
#[path = "simulator/objects_world.rs"]
mod world;

use std::time::{Duration, Instant};

use quire_simulated::Planted;
use world::{Plan, Ran, run};

/// Seeds of an ordinary run.
const SEEDS: u64 = 300;

fn command(seed: u64) -> String {
    format!(
        "QUIRE_SIM_SEED={seed} cargo test -p quire --test simulator_objects the_objects -- --nocapture"
    )
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

#[test]
fn the_objects_never_show_other_bytes_than_what_was_written() {
    if let Some(seed) = number("QUIRE_SIM_SEED") {
        let plan = Plan { traces: true, ..Plan::from_seed(seed) };
        println!("{plan:?}");
        let ran = run(&plan).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        println!("seed {seed}: {ran}");
        return;
    }
    let end = number("QUIRE_SIM_SECONDS").map(|s| Instant::now() + Duration::from_secs(s));
    let goes_on = |seed| end.map_or(seed < SEEDS, |end| Instant::now() < end);
    let (mut seed, mut all) = (0, Ran::default());
    while goes_on(seed) {
        match run(&Plan::from_seed(seed)) {
            Ok(ran) => all += ran,
            Err(why) => panic!("seed {seed} failed: {why}\nrepeat it with: {}", command(seed)),
        }
        seed += 1;
    }
    println!("{seed} seeds, {all}");
}

/// Threads of runs that are meant to fail have names that begin so.
const PLANTED: &str = "planted-";

fn hide_planted_panics() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with(PLANTED)) {
            hook(info);
        }
    }));
}

/// The test of the test.
#[test]
fn a_seed_finds_pages_that_are_mapped_without_their_protection() {
    hide_planted_panics();
    let found = (1000..1100).find_map(|seed| {
        let planted = Some(Planted::ForgottenProtection);
        run(&Plan { planted, ..Plan::from_seed(seed) }).err().map(|why| (seed, why))
    });
    let (seed, why) = found.expect("a write that went unnoticed was not found");
    println!("found by seed {seed}: {why}");
}

#[test]
fn the_same_seed_runs_the_same_way() {
    let ran = [7, 7, 8].map(|seed| run(&Plan::from_seed(seed)).unwrap());
    assert_eq!(ran[0], ran[1]);
    assert_ne!(ran[0], ran[2]);
}
