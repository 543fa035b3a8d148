//! `quire stat`: what a program's memory management counted, as `perf stat` prints it.
//!
//! Owns what is counted from when to when: a program that is run here, once or several times, from
//! its start to its end; a process that is attached to (`runs`), from now on. Leaves to `events`
//! which counters, to `output` and `histogram` how they look, to `run` the running.
//!
//! Members are read at intervals, and do not know of it. Where one process was attached to, what it counted
//! between the last reading and its end is missing: at most what it counts in [`SAMPLE`]. The sum of a run
//! misses nothing.

mod histogram;
mod output;

use std::io::Write;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use quire::control::Control;

use self::output::{Format, Round};
use crate::cli::RunOptions;
use crate::events::{Selected, select_events};
use crate::runs::counts::{Counts, Scope};
use crate::runs::waiter::Waiter;
use crate::runs::{self, Access, Attached};
use crate::supervisor::{Looker, Moment};
use crate::{print, run};

/// How often a process that was attached to is read.
const SAMPLE: Duration = Duration::from_millis(50);

const EXAMPLES: &str = "\
Examples:
  quire stat -m 512M -- python3 train.py
  quire stat -e 'faults,spf,pagefault:*' -r 5 -m 512M -- ./program
  quire stat -e '*' -I 1000 -x, -o counters.csv -m 2G --swap-file /scratch -- ./solver input
  quire stat --histogram -m 1G -- make -j4
  quire stat -p 4711 sleep 10             what process 4711 does in the next ten seconds

Values are of all processes of the run. With -p they are of that process from now on, until it ends,
^C, or PROGRAM has ended, which runs as if without quire; the process id of a 'quire run' stands
for all its processes. What is printed goes to stderr.

Exit status: the program's own, as 'quire run' passes it on (the last run's with -r); 125 where
quire itself failed; with -p 0, or that of PROGRAM.";

#[derive(Args, Debug)]
#[command(
    after_help = EXAMPLES,
    mut_arg("memory", |memory| memory.required(false).required_unless_present("pid")),
    mut_arg("program", |program| program.required(false).required_unless_present("pid")),
)]
pub(crate) struct StatArgs {
    /// Show these: names, aliases and patterns such as 'pagefault:*', 'spf_*' or '*'
    #[arg(long = "event", short, value_name = "EVENT,...")]
    pub events: Vec<String>,

    /// Run the program N times; print means and their standard errors
    #[arg(
        long,
        short,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=100_000),
        conflicts_with = "pid"
    )]
    pub repeat: u32,

    /// Print fields with SEP between them, as perf stat -x
    #[arg(long, short = 'x', value_name = "SEP", conflicts_with = "json")]
    pub field_separator: Option<String>,

    /// Print a JSON object a line, as perf stat -j
    #[arg(long, short)]
    pub json: bool,

    /// Print to FILE
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Print what was counted every so many milliseconds, instead of a summary at the end
    #[arg(
        long,
        short = 'I',
        value_name = "MS",
        value_parser = clap::value_parser!(u64).range(10..=86_400_000)
    )]
    pub interval_print: Option<u64>,

    /// Print how long faults took, by kind, and how much left memory between a page and its next fault
    #[arg(long)]
    pub histogram: bool,

    /// Attach to processes that run under quire
    #[arg(long, short, value_name = "PID,...", value_delimiter = ',')]
    pub pid: Vec<u32>,

    #[command(flatten)]
    pub run: RunOptions,
}

pub(crate) fn stat(args: &StatArgs) -> Result<u8> {
    let mut printer = StatPrinter {
        selected: select_events(&args.events)?,
        format: match &args.field_separator {
            _ if args.json => Format::Json,
            Some(separator) => Format::Csv(separator.clone()),
            None => Format::Text,
        },
        period: args.interval_print.map(Duration::from_millis),
        has_histogram: args.histogram,
        output: print::output(args.output.as_deref())?,
        has_header: false,
    };
    if args.pid.is_empty() { printer.run(args) } else { printer.attach(args) }
}

struct StatPrinter {
    selected: Vec<Selected>,
    format: Format,
    period: Option<Duration>,
    has_histogram: bool,
    output: Box<dyn Write>,
    /// Whether the intervals' header was printed.
    has_header: bool,
}

/// Counters from one print to the next.
struct Intervals {
    started: Instant,
    last: Counts,
    last_at: Instant,
}

impl Intervals {
    fn start(now: Instant, counts: Counts) -> Intervals {
        Intervals { started: now, last: counts, last_at: now }
    }

    /// What was counted since the last time, and when that is, in seconds from the start.
    fn next(&mut self, counts: Counts) -> (Round, f64) {
        let now = Instant::now();
        let seconds = (now - self.last_at).as_secs_f64();
        let round = Round { counts: counts.since(&self.last), seconds };
        (self.last, self.last_at) = (counts, now);
        (round, (now - self.started).as_secs_f64())
    }
}

impl StatPrinter {
    /// Runs the program as often as was asked for.
    fn run(&mut self, args: &StatArgs) -> Result<u8> {
        let mut rounds = Vec::new();
        let mut status = 0;
        let period = self.period;
        for _ in 0..args.repeat {
            let mut intervals = Intervals::start(Instant::now(), Counts::default());
            let mut counts = Counts::default();
            let mut printed = Ok(());
            let mut look = |control: &Control, moment: Moment| {
                counts = Counts::read(control, Scope::Run).unwrap_or_default();
                if period.is_some() && printed.is_ok() {
                    printed = self.print_interval(&mut intervals, counts, moment);
                }
            };
            let mut looker = Looker::new(period, &mut look);
            let ended = run::run_watched(&args.run, Some(&mut looker))?;
            printed?;
            rounds.push(Round { counts, seconds: ended.wall_seconds });
            status = ended.exit_status;
            // After ^C the rest of the rounds is not wanted.
            if i32::from(status) == 128 + libc::SIGINT {
                break;
            }
        }
        let title = format!("'{}'", args.run.command_line());
        self.print_end(&rounds, &title)?;
        Ok(status)
    }

    fn print_interval(
        &mut self,
        intervals: &mut Intervals,
        counts: Counts,
        moment: Moment,
    ) -> Result<()> {
        let (round, time) = intervals.next(counts);
        // What is left at the end may be too short for a line of its own, unless it has something.
        if moment == Moment::End && round.counts == Counts::default() {
            return Ok(());
        }
        let mut text = String::new();
        if !std::mem::replace(&mut self.has_header, true) && self.format == Format::Text {
            text += &output::interval_header();
        }
        text += &output::interval(&self.selected, &round, time, &self.format);
        self.write(&text)
    }

    fn attach(&mut self, args: &StatArgs) -> Result<u8> {
        let attached = args.pid.iter().map(|&pid| runs::attach(pid, Access::Read));
        let mut all: Vec<Watched> =
            attached.map(|attached| attached.map(Watched::new)).collect::<Result<_>>()?;
        let mut waiter = Waiter::start(&args.run.program)?;
        let started = Instant::now();
        let mut intervals = Intervals::start(started, Counts::default());
        let mut next_print = self.period.map(|period| started + period);
        let status = loop {
            let wake = Instant::now() + SAMPLE;
            let wake = next_print.map_or(wake, |next| next.min(wake));
            let watched: Vec<_> =
                all.iter().map(|watched| watched.attached.process.as_fd()).collect();
            let over = waiter.wait(wake, &watched)?;
            all.iter_mut().for_each(Watched::look);
            if let Some(status) = over {
                break status;
            }
            if let (Some(next), Some(period)) = (&mut next_print, self.period)
                && *next <= Instant::now()
            {
                self.print_interval(&mut intervals, sum(&all), Moment::Period)?;
                *next = Instant::now().max(*next + period);
            }
        };
        let round = Round { counts: sum(&all), seconds: started.elapsed().as_secs_f64() };
        if self.period.is_some() {
            self.print_interval(&mut intervals, round.counts, Moment::End)?;
        }
        let pids: Vec<String> = args.pid.iter().map(u32::to_string).collect();
        let mut title = format!("process id '{}'", pids.join(","));
        if !args.run.program.is_empty() {
            title += &format!(" in '{}'", args.run.command_line());
        }
        self.print_end(&[round], &title)?;
        Ok(status)
    }

    /// The summary, unless intervals were printed; the histogram in any case.
    fn print_end(&mut self, rounds: &[Round], title: &str) -> Result<()> {
        let mut text = String::new();
        if self.period.is_none() {
            text += &output::summary(&self.selected, rounds, title, &self.format);
        }
        if self.has_histogram {
            let all = Counts::sum(rounds.iter().map(|round| &round.counts));
            text += &histogram::print(&all, &self.format);
        }
        self.write(&text)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let written = self.output.write_all(text.as_bytes()).and_then(|()| self.output.flush());
        written.context("cannot write the counters")
    }
}

fn sum(all: &[Watched]) -> Counts {
    Counts::sum(all.iter().map(|watched| &watched.counted))
}

/// A process, what it was last seen with, and what it counted since it was first seen.
struct Watched {
    attached: Attached,
    last: Counts,
    counted: Counts,
}

impl Watched {
    fn new(attached: Attached) -> Watched {
        let last = read(&attached).unwrap_or_default();
        Watched { attached, last, counted: Counts::default() }
    }

    /// A member that has left keeps what it was last seen with.
    fn look(&mut self) {
        let Some(now) = read(&self.attached) else { return };
        // A process that has executed another program has joined again, and begun at zero.
        let new = if now.is_behind(&self.last) { now } else { now.since(&self.last) };
        self.counted.add(&new);
        self.last = now;
    }
}

fn read(attached: &Attached) -> Option<Counts> {
    Counts::read(&attached.run.control, attached.scope)
}
