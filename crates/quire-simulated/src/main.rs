//! `quire-simulated`: the engine itself on a simulated machine, with virtual CPUs and a virtual clock.
//!
//! What the kernel does costs what the command line says; the engine's own steps cost the same each. Prints
//! a JSON line for each figure. Whoever runs it (`quire bench ... --simulate`) scales the figures to what is
//! larger than what is run.

mod around;
mod churn;
mod file;
mod machine;
mod pageout;
mod walks;

use anyhow::Result;
use clap::Parser;

use machine::Figures;

/// The engine on a simulated machine
#[derive(Parser, Debug)]
enum Simulation {
    /// Reads through mappings of a cached file
    Around(around::Around),
    /// Threads that map, touch and unmap
    Churn(churn::Churn),
    /// Threads that page out
    Pageout(pageout::Pageout),
    /// Workers that write to parts of files and flush them, or give files new memory
    Walks(walks::Walks),
}

fn main() -> Result<()> {
    for (name, value) in Simulation::parse().run()? {
        println!("{{\"figure\": \"{name}\", \"value\": {value:.9}}}");
    }
    Ok(())
}

impl Simulation {
    fn run(&self) -> Result<Figures> {
        match self {
            Simulation::Around(options) => around::simulate(options),
            Simulation::Churn(options) => churn::simulate(options),
            Simulation::Pageout(options) => pageout::simulate(options),
            Simulation::Walks(options) => walks::simulate(options),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_figures(words: &str) -> Figures {
        let costs = "--call-ns 1000 --page-ns 100 --fault-ns 2000 --step-ns 0 --touch-ns 10";
        let line = format!("quire-simulated {words} {costs}");
        let simulation = Simulation::try_parse_from(line.split_whitespace()).unwrap();
        simulation.run().unwrap()
    }

    /// Seconds, faults, those that were speculative, and seconds of handlers.
    fn figures(words: &str) -> [f64; 4] {
        let [seconds, faults, speculative, handling, ..] = all_figures(words);
        [seconds, faults, speculative, handling].map(|(_, value)| value)
    }

    fn figure(words: &str, name: &str) -> f64 {
        all_figures(words).into_iter().find(|(other, _)| *other == name).unwrap().1
    }

    #[test]
    fn a_thread_alone_faults_once_for_each_window() {
        for by in ["", "--inline"] {
            for (order, windows) in [("", 1024.0), ("--order 4", 64.0), ("--order 9", 2.0)] {
                for pattern in ["in-order", "random"] {
                    let words = format!(
                        "around --threads 1 --cpus 2 --tables 2 --pattern {pattern} {order} {by}"
                    );
                    let [seconds, faults, _, handling] = figures(&words);
                    assert_eq!(faults, windows, "{words}");
                    let own_ns = windows * (2000.0 + 1000.0) + 1024.0 * (100.0 + 10.0);
                    let ns = seconds * 1e9;
                    assert!((own_ns..2.0 * own_ns).contains(&ns), "{words}: {ns}, not {own_ns}");
                    assert_eq!(handling > 0.0, by.is_empty(), "{words}");
                }
            }
            let sparse = format!("around --threads 1 --cpus 1 --tables 7 --pattern sparse {by}");
            assert_eq!(figures(&sparse)[1], 7.0);
        }
    }

    #[test]
    fn threads_on_cpus_of_their_own_take_less_time_than_on_one() {
        let on = |cpus| {
            let [seconds, faults, ..] = figures(&format!(
                "around --threads 4 --cpus {cpus} --tables 1 --pattern random --inline"
            ));
            assert!(faults >= 4.0 * 512.0);
            seconds
        };
        let (one, four) = (on(1), on(4));
        assert!(one > 3.0 * four && one < 5.0 * four, "{one} on one CPU, {four} on four");
    }

    #[test]
    fn more_threads_on_one_page_than_can_be_parked_come_to_an_end() {
        let words = "around --threads 600 --cpus 600 --tables 1 --pattern sparse --order 9";
        let [seconds, faults, ..] = figures(words);
        // Those that are not parked try again after 20 ms.
        assert!(faults > 600.0 && (0.02..1.0).contains(&seconds), "{faults} faults, {seconds} s");
    }

    #[test]
    fn what_is_simulated_is_the_same_every_time() {
        let words = "around --threads 3 --cpus 2 --tables 1 --pattern in-order --order 3";
        assert_eq!(figures(words), figures(words));
    }

    #[test]
    fn speculation_brings_more_with_more_threads_and_costs_none_alone() {
        let records_a_second = |threads: usize, classic: &str| {
            let words = format!("churn --threads {threads} --cpus {threads} --records 4 {classic}");
            let [seconds, faults, speculative, _] = figures(&words);
            assert!(faults >= (threads * 4 * 128) as f64);
            assert_eq!(speculative > 0.9 * faults, classic.is_empty(), "{words}");
            (threads * 4) as f64 / seconds
        };
        let ratio =
            |threads| records_a_second(threads, "") / records_a_second(threads, "--classic");
        let (alone, together) = (ratio(1), ratio(8));
        assert!((0.95..1.05).contains(&alone), "{alone}");
        assert!(together > alone, "{together} with eight threads, {alone} alone");
    }

    #[test]
    fn a_folio_is_unmapped_in_one_call() {
        for (order, calls) in [(0, 1024.0), (4, 64.0), (9, 2.0)] {
            for threads in [1, 3] {
                let words =
                    format!("pageout --threads {threads} --cpus 4 --tables 2 --order {order}");
                let calls = calls * threads as f64;
                assert_eq!(figure(&words, "unmap_calls"), calls, "{words}");
                let own_ns = calls * 1000.0 + threads as f64 * 1024.0 * 100.0;
                let ns = figure(&words, "unmap_seconds") * 1e9;
                assert!((own_ns..1.2 * own_ns).contains(&ns), "{words}: {ns}, not {own_ns}");
            }
        }
        let single = "pageout --threads 1 --cpus 2 --tables 2 --order 4 --no-batch-unmap";
        assert_eq!(figure(single, "unmap_calls"), 1024.0);
    }

    #[test]
    fn walks_that_share_bring_more_with_more_workers_and_cost_none_alone() {
        let seconds = |workers: usize, exclusive: &str| {
            let words = format!("walks --threads {workers} --cpus {workers} --jobs 16 {exclusive}");
            figures(&words)[0]
        };
        let ratio = |workers| seconds(workers, "--exclusive") / seconds(workers, "");
        let (alone, together) = (ratio(1), ratio(32));
        assert_eq!(alone, 1.0);
        assert!(together > 1.03, "{together} with 32 workers");
    }
}
