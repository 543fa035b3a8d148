//! The simulator: programs, handlers, reclaim and readers on the simulated MMU, in an order that a
//! seed chooses, with a plain map of bytes as oracle.
//!
//! `cargo test -p quire --test simulator` runs as many seeds as fit into half a minute
//! (`QUIRE_SIM_SECONDS` for another time). A seed that fails is printed as the command that
//! repeats it: `QUIRE_SIM_SEED=n` runs exactly that one, and prints what every program does.
//!
//! # What goes wrong in here
//! Moves are refused now and then, as pinned pages and changing layouts do. Pages are pinned and
//! written by the kernel while they are. Writes to the swap file fail, and then nothing is lost;
//! reads from it fail or bring damaged bytes, and then exactly the page that was read is lost: its
//! access is a SIGBUS until it is dropped. Rights, advice and locks change under running programs.
//!
//! # What is checked
//! Each read against the oracle, at the access itself. After each operation: some page's word
//! against the mapping, the physical pages in use against the account, the account against the
//! budget. At the end, with no thread inside: every invariant of `VmSpace::check`, all rights,
//! all bytes; then everything is unmapped, and nothing may be left.

mod common;
#[path = "simulator/program.rs"]
mod program;
#[path = "simulator/world.rs"]
mod world;

use std::time::{Duration, Instant};

use quire_simulated::Planted;
use world::{Plan, run};

fn command(seed: u64) -> String {
    format!(
        "QUIRE_SIM_SEED={seed} cargo test -p quire --test simulator the_programs -- --nocapture"
    )
}

fn seconds(name: &str, otherwise: u64) -> Duration {
    let given = std::env::var(name).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(given.unwrap_or(otherwise))
}

#[test]
fn the_programs_never_see_other_bytes_than_their_own() {
    if let Some(seed) = std::env::var("QUIRE_SIM_SEED").ok().and_then(|text| text.parse().ok()) {
        let plan = Plan { traces: true, ..Plan::from_seed(seed) };
        println!("{plan:?}");
        let ran = run(&plan).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        println!("seed {seed}: {ran}");
        return;
    }
    let end = Instant::now() + seconds("QUIRE_SIM_SECONDS", 25);
    let (mut seeds, mut steps) = (0, 0);
    // What must have been gone through: both ways to pack, and the file.
    let mut ways = [0; 3];
    while Instant::now() < end {
        match run(&Plan::from_seed(seeds)) {
            Ok(ran) => {
                steps += ran.steps;
                let by_lz4 = ran.packed - ran.zstd;
                let went = [by_lz4, ran.zstd, ran.written];
                ways.iter_mut().zip(went).for_each(|(way, pages)| *way += pages);
            }
            Err(why) => panic!("seed {seeds} failed: {why}\nrepeat it with: {}", command(seeds)),
        }
        seeds += 1;
    }
    assert!(ways.iter().all(|&pages| pages > 0), "one of the ways was not gone: {ways:?}");
    println!("{seeds} seeds, {steps} steps, {ways:?}");
}

/// Threads of runs that are meant to fail have names that begin so.
const PLANTED: &str = "planted-";

fn hide_planted_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            if !thread.name().is_some_and(|name| name.starts_with(PLANTED)) {
                hook(info);
            }
        }));
    });
}

/// The test of the test: with a mistake planted in the MMU some seed fails.
fn must_find(planted: Planted) {
    hide_planted_panics();
    let found = (1000..1100).find_map(|seed| {
        let plan = Plan { planted: Some(planted), ..Plan::from_seed(seed) };
        run(&plan).err().map(|why| (seed, why))
    });
    let (seed, why) = found.unwrap_or_else(|| panic!("{planted:?} was not found"));
    println!("{planted:?} was found by seed {seed}: {why}");
}

#[test]
fn a_seed_finds_a_write_that_is_lost_while_its_page_moves() {
    must_find(Planted::LostWrite);
}

#[test]
fn a_seed_finds_a_forgotten_write_protection() {
    must_find(Planted::ForgottenProtection);
}

#[test]
fn the_same_seed_runs_the_same_way() {
    let ran_twice = |seed| {
        let plan = Plan::from_seed(seed);
        let [once, again] = [(); 2].map(|()| run(&plan).unwrap());
        assert_eq!(once, again, "seed {seed}");
        once
    };
    let ran: Vec<_> = (7..12).map(ran_twice).collect();
    assert!(ran.windows(2).all(|pair| pair[0] != pair[1]), "{ran:?}");
}
