//! `quire vmstat`: what runs hold, swap and serve, a line at a time, as vmstat(8) prints a machine's.
//!
//! Owns the columns, and what is counted from one line to the next. Leaves to `runs` which runs there
//! are: the one that `-p` names, else all that this user may look into, summed, as they are when it
//! starts; one that ends keeps its counters in the sum and holds nothing any more.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use quire::control::{Control, Event};
use quire::units::PAGE_SIZE;

use crate::print::print;
use crate::print::table;
use crate::procfs;
use crate::runs::counts::{Counts, Scope};
use crate::runs::gauges::Gauges;
use crate::runs::waiter::Waiter;
use crate::runs::{self, Access, Attached, Run};

/// Lines from one header to the next.
const HEADER_LINES: u64 = 20;
/// The kernel's clock ticks, as programs see them on x86-64.
const TICKS_PER_SECOND: f64 = 100.0;
const PAGE_KIB: u64 = PAGE_SIZE as u64 / 1024;

const EXAMPLES: &str = "\
Examples:
  quire vmstat                            one line: rates are averages since the run began
  quire vmstat 1                          a line a second, until the runs end, or ^C
  quire vmstat 1 10 -p 4711               ten of them, of the run that process 4711 belongs to
  quire vmstat -s 4711                    every counter of process 4711, a line each
  quire vmstat -s 4711 | grep speculative_pgfault

Columns:
  run               processes
  held wanted       memory they hold; data they have, wherever it rests (KiB)
  pool file         of that: held by compressed pages; in the swap file (KiB; -s has what is on
                    a server, too)
  in out            swapped in and out (kB/s)
  flt spf maj       faults; those served without a lock; those that read the swap file (1/s)
  stall             faults that had to reclaim memory themselves (1/s)
  rf                pages that came back soon after they had gone (1/s)

Without -p, all runs that this user may look into are summed. With -s, the process id of a
'quire run' stands for all its processes, those that have ended too.";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct VmstatArgs {
    /// Seconds from one line to the next
    #[arg(value_name = "DELAY", value_parser = parse_delay, conflicts_with = "stats")]
    pub delay: Option<Duration>,

    /// How many lines
    #[arg(value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// The run that this process belongs to
    #[arg(long, short, value_name = "PID")]
    pub pid: Option<u32>,

    /// Print every counter, of all runs or of PID
    #[arg(long, short, value_name = "PID", num_args = 0..=1, conflicts_with = "count")]
    pub stats: Option<Option<u32>>,
}

pub(crate) fn parse_delay(text: &str) -> Result<Duration, &'static str> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write seconds, 0.01 at least"),
    }
}

pub(crate) fn vmstat(args: &VmstatArgs) -> Result<u8> {
    let text = match (args.stats, args.pid) {
        (Some(stats), pid) => match stats.or(pid) {
            Some(pid) => {
                let Attached { run, scope, .. } = runs::attach(pid, Access::Read)?;
                let member = Stats::read(&run.control, scope);
                member.with_context(|| format!("process {pid} has ended"))?.text()
            }
            None => sum(&runs::all()?).text(),
        },
        (None, None) => return lines(runs::all()?, args),
        (None, Some(pid)) => return lines(vec![runs::attach(pid, Access::Read)?.run], args),
    };
    print(&text)?;
    Ok(0)
}

/// Prints lines until there are enough, or nothing is left to look at.
fn lines(runs: Vec<Run>, args: &VmstatArgs) -> Result<u8> {
    let mut waiter = Waiter::start(&[])?;
    let mut last = Stats::default();
    // The first line is about all the time that the oldest run has had.
    let mut seconds = runs.iter().filter_map(age_seconds).fold(0.0, f64::max);
    let count = args.count.unwrap_or(if args.delay.is_some() { u64::MAX } else { 1 });
    let mut looked = Instant::now();
    for number in 0..count {
        let now = sum(&runs);
        let mut text = if number % HEADER_LINES == 0 { header() } else { String::new() };
        text += &line(&now, &last.counts, seconds);
        print(&text)?;
        let Some(delay) = args.delay.filter(|_| number + 1 < count) else { break };
        last = now;
        let watched: Vec<BorrowedFd<'_>> = runs.iter().map(|run| run.supervisor.as_fd()).collect();
        let over = waiter.wait(looked + delay, &watched)?;
        seconds = looked.elapsed().as_secs_f64();
        looked = Instant::now();
        if over.is_some() {
            break;
        }
    }
    Ok(0)
}

/// How long a run has gone on.
fn age_seconds(run: &Run) -> Option<f64> {
    let started = procfs::stat(run.supervisor_pid)?.start_ticks as f64 / TICKS_PER_SECOND;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let now: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    Some((now - started).max(1.0 / TICKS_PER_SECOND))
}

fn sum(runs: &[Run]) -> Stats {
    let mut sum = Stats::default();
    for run in runs {
        let mut stats = Stats::read(&run.control, Scope::Run).unwrap_or_default();
        if runs::has_ended(&run.supervisor) {
            // What its page says last is still there, and means nothing.
            stats.gauges = Gauges::default();
        }
        sum.add(&stats);
    }
    sum
}

/// The state of a run, or of a process.
#[derive(Clone, Copy, Default)]
struct Stats {
    gauges: Gauges,
    counts: Counts,
}

impl Stats {
    /// `None` where the member has left.
    fn read(control: &Control, scope: Scope) -> Option<Stats> {
        let counts = Counts::read(control, scope)?;
        Some(Stats { gauges: Gauges::read(control, scope), counts })
    }

    fn add(&mut self, other: &Stats) {
        self.gauges.add(&other.gauges);
        self.counts.add(&other.counts);
    }

    /// A line for each: name, value.
    fn text(&self) -> String {
        let gauges = [
            ("processes", self.gauges.processes),
            ("held_pages", self.gauges.held),
            ("wanted_pages", self.gauges.wanted),
            ("wanted_pages_max", self.gauges.wanted_max),
            ("managed_pages", self.gauges.managed),
            ("pool_pages", self.gauges.pool),
            ("swap_file_pages", self.gauges.swap_file),
            ("far_pages", self.gauges.far),
        ];
        let events = Event::ALL.into_iter().map(|event| (event.name(), self.counts.of(event)));
        gauges.into_iter().chain(events).map(|(name, value)| format!("{name} {value}\n")).collect()
    }
}

const WIDTHS: [isize; 12] = [5, 10, 10, 10, 10, 7, 7, 8, 8, 7, 6, 6];
const TITLES: [&str; 12] =
    ["run", "held", "wanted", "pool", "file", "in", "out", "flt", "spf", "maj", "stall", "rf"];

fn header() -> String {
    format!(
        "procs {:-^43} {:-^15} {:-^39}\n{}\n",
        "memory-KiB",
        "swap-kB/s",
        "faults/s",
        table::row(&WIDTHS, " ", &TITLES)
    )
}

fn line(now: &Stats, last: &Counts, seconds: f64) -> String {
    let counts = now.counts.since(last);
    let rate = |event| {
        let count = counts.of(event) as f64;
        if seconds > 0.0 { (count / seconds).round() as u64 } else { 0 }
    };
    let swap_kb = |event| rate(event) * PAGE_SIZE as u64 / 1000;
    let values = [
        now.gauges.processes,
        now.gauges.held * PAGE_KIB,
        now.gauges.wanted * PAGE_KIB,
        now.gauges.pool * PAGE_KIB,
        now.gauges.swap_file * PAGE_KIB,
        swap_kb(Event::Pswpin),
        swap_kb(Event::Pswpout),
        rate(Event::Pgfault),
        rate(Event::SpeculativePgfault),
        rate(Event::Pgmajfault),
        rate(Event::Allocstall),
        rate(Event::WorkingsetRefaultAnon),
    ];
    table::row(&WIDTHS, " ", &values.map(|value| value.to_string())) + "\n"
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::sys::control::ControlMap;

    fn control() -> ControlMap {
        let control = ControlMap::create().unwrap();
        for (slot, pid) in [(0usize, 100), (1, 200)] {
            let member = &control.members[slot];
            control.take_slot(slot, pid);
            control.seats[slot].account.put_in(10 * (slot + 1));
            member.pool_pages.store(4, Relaxed);
            member.count(Event::Pgfault, 1000);
            control.tally.note_joined(slot);
        }
        control.common_pages.store(3, Relaxed);
        control.segments_used.store(2, Relaxed);
        control
    }

    #[test]
    fn every_counter_is_a_name_and_a_value() {
        let control = control();
        let tree = Stats::read(&control, Scope::Run).unwrap().text();
        assert!(tree.starts_with("processes 2\nheld_pages 33\nwanted_pages 0\n"), "{tree}");
        assert!(tree.contains("\npool_pages 11\nswap_file_pages 128\nfar_pages 0\npgfault 2000\n"));
        assert_eq!(tree.lines().count(), 8 + Event::ALL.len());
        assert!(tree.lines().any(|line| line == "speculative_pgfault 0"));
        let member = Stats::read(&control, Scope::Member(200)).unwrap().text();
        assert!(member.starts_with("processes 1\nheld_pages 20\n"), "{member}");
        assert!(member.contains("\nswap_file_pages 0\nfar_pages 0\npgfault 1000\n"), "{member}");
        assert!(Stats::read(&control, Scope::Member(300)).is_none());
    }

    #[test]
    fn a_line_has_what_is_there_and_what_came_since_the_last() {
        let now = Stats {
            gauges: Gauges {
                processes: 3,
                held: 65_536,
                wanted: 262_144,
                pool: 1000,
                swap_file: 128,
                ..Gauges::default()
            },
            counts: Counts::of_events(&[
                (Event::Pgfault, 3000),
                (Event::SpeculativePgfault, 2500),
                (Event::Pswpout, 1000),
                (Event::Pgmajfault, 7),
            ]),
        };
        let last = Counts::of_events(&[(Event::Pgfault, 1000), (Event::SpeculativePgfault, 500)]);
        assert_eq!(
            header() + &line(&now, &last, 2.0),
            "\
procs ----------------memory-KiB----------------- ---swap-kB/s--- ---------------faults/s----------------
  run       held     wanted       pool       file      in     out      flt      spf     maj  stall     rf
    3     262144    1048576       4000        512       0    2048     1000     1000       4      0      0
"
        );
    }

    #[test]
    fn delays_are_seconds() {
        assert_eq!(parse_delay("1"), Ok(Duration::from_secs(1)));
        assert_eq!(parse_delay("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "x", "nan", "inf", "1e9", ""] {
            assert!(parse_delay(text).is_err(), "{text}");
        }
    }
}
