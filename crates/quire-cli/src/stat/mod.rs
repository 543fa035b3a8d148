//! `quire stat`: what a program's memory management counted, as `perf stat` prints it.
//!
//! Owns what is counted from when to when: a program that is run here, once or several times, from
//! its start to its end; a process that is attached to (`runs`), from now on. Leaves to `events`
//! which counters, to `output` and `histogram` how they look, to `run` the running.
//!
//! Members are read now and then and not told: what one counted in the last moments before it left
//! is missing where it alone was attached to, at most what [`SAMPLE`] holds. A tree's sum misses
//! nothing.

mod histogram;
mod output;

use std::io::{self, Write};
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

    /// Run the program N times; print means and how sure they are
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

    /// Print how long faults took, by kind
    #[arg(long)]
    pub histogram: bool,

    /// Attach to processes that run under quire
    #[arg(long, short, value_name = "PID,...", value_delimiter = ',')]
    pub pid: Vec<u32>,

    #[command(flatten)]
    pub run: RunOptions,
}

/// `quire stat`; returns its exit status.
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

/// What is printed, and where to.
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
            printed.context("cannot write the counters")?;
            rounds.push(Round { counts, seconds: ended.wall_seconds });
            status = ended.exit_status;
            // After ^C the rest of the rounds is not wanted.
            if i32::from(status) == 128 + libc::SIGINT {
                break;
            }
        }
        let title = format!("'{}'", args.run.command_line());
        self.print_end(&rounds, &title).context("cannot write the counters")?;
        Ok(status)
    }

    fn print_interval(
        &mut self,
        intervals: &mut Intervals,
        counts: Counts,
        moment: Moment,
    ) -> io::Result<()> {
        let (round, time) = intervals.next(counts);
        // What is left at the end may be too short for a line of its own, unless it has something.
        if moment == Moment::End && round.counts == Counts::default() {
            return Ok(());
        }
        if !self.has_header && self.format == Format::Text {
            self.output.write_all(output::interval_header().as_bytes())?;
            self.has_header = true;
        }
        let text = output::interval(&self.selected, &round, time, &self.format);
        self.output.write_all(text.as_bytes())
    }

    /// The summary, unless intervals were printed; the histogram in any case.
    fn print_end(&mut self, rounds: &[Round], title: &str) -> io::Result<()> {
        let mut text = String::new();
        if self.period.is_none() {
            text += &output::summary(&self.selected, rounds, title, &self.format);
        }
        if self.has_histogram {
            let mut all = Counts::default();
            rounds.iter().for_each(|round| all.add(&round.counts));
            text += &histogram::print(&all, &self.format);
        }
        self.output.write_all(text.as_bytes())?;
        self.output.flush()
    }

    fn attach(&mut self, args: &StatArgs) -> Result<u8> {
        let attached = args.pid.iter().map(|&pid| runs::attach(pid, Access::Read));
        let mut sum = WatchedProcesses::start(attached.collect::<Result<_>>()?);
        let mut waiter = Waiter::start(&args.run.program)?;
        let started = Instant::now();
        let mut intervals = Intervals::start(started, Counts::default());
        let mut next_print = self.period.map(|period| started + period);
        let status = loop {
            let wake = Instant::now() + SAMPLE;
            let wake = next_print.map_or(wake, |next| next.min(wake));
            let over = waiter.wait(wake, &sum.watched())?;
            sum.look();
            if let Some(status) = over {
                break status;
            }
            if let (Some(next), Some(period)) = (&mut next_print, self.period)
                && *next <= Instant::now()
            {
                self.print_interval(&mut intervals, sum.counts(), Moment::Period)
                    .context("cannot write the counters")?;
                *next = Instant::now().max(*next + period);
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        let mut write = |printer: &mut StatPrinter| {
            if printer.period.is_some() {
                printer.print_interval(&mut intervals, sum.counts(), Moment::End)?;
            }
            let title = match args.run.program.is_empty() {
                true => format!("process id '{}'", join(&args.pid)),
                false => {
                    format!("process id '{}' in '{}'", join(&args.pid), args.run.command_line())
                }
            };
            printer.print_end(&[Round { counts: sum.counts(), seconds }], &title)
        };
        write(self).context("cannot write the counters")?;
        Ok(status)
    }
}

fn join(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

impl Watched {
    fn note(&mut self, now: &Counts) {
        // A process that has executed another program has joined again, and begun at zero.
        let new = if now.is_behind(&self.last) { *now } else { now.since(&self.last) };
        self.counted.add(&new);
        self.last = *now;
    }
}

struct WatchedProcesses {
    all: Vec<Watched>,
}

/// A process, what it was last seen with, and what it counted since it was first seen.
struct Watched {
    attached: Attached,
    last: Counts,
    counted: Counts,
}

impl WatchedProcesses {
    fn start(attached: Vec<Attached>) -> WatchedProcesses {
        let all = attached.into_iter().map(|attached| {
            let last = read(&attached).unwrap_or_default();
            Watched { attached, last, counted: Counts::default() }
        });
        WatchedProcesses { all: all.collect() }
    }

    /// A member that has left keeps what it was last seen with.
    fn look(&mut self) {
        for watched in &mut self.all {
            let Some(now) = read(&watched.attached) else { continue };
            watched.note(&now);
        }
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.all.iter().for_each(|watched| counts.add(&watched.counted));
        counts
    }

    fn watched(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        self.all.iter().map(|watched| watched.attached.as_fd()).collect()
    }
}

fn read(attached: &Attached) -> Option<Counts> {
    Counts::read(&attached.run.control, attached.scope)
}
