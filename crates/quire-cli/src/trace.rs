//! `quire trace`: prints what members trace as it comes, a line an event.
//!
//! Owns how far each member's ring was read, and the order of printing: by time within what
//! one look brings. Members do not wait for the reader: records that were overwritten before they were read
//! are counted as lost.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use quire::control::{Control, MEMBERS_MAX, TRACES, Trace, TraceRing, Tracepoint};

use crate::cli::RunOptions;
use crate::events::select_tracepoints;
use crate::print;
use crate::run;
use crate::runs::counts::Scope;
use crate::runs::waiter::Waiter;
use crate::runs::{self, Access};
use crate::supervisor::Looker;

/// How often the rings are read.
const PERIOD: Duration = Duration::from_millis(10);

const EXAMPLES: &str = "\
Examples:
  quire trace -m 512M -- python3 train.py
  quire trace -e 'pagefault:spf_vma_*' -o events -m 1G -- ./program
  quire trace -p 4711                     until process 4711 ends, or ^C
  quire trace -p 4711 sleep 10            for ten seconds

A line is the time (CLOCK_MONOTONIC, seconds), process/thread, event, address, and the VMA's bounds;
what is not known of them is 0. The process id of a 'quire run' stands for all its processes.
Lines go to stderr, or to FILE.

Exit status: the program's own, as 'quire run' passes it on; 125 where quire itself failed; with -p
0, or that of PROGRAM.";

#[derive(Args, Debug)]
#[command(
    after_help = EXAMPLES,
    mut_arg("memory", |memory| memory.required(false).required_unless_present("pid")),
    mut_arg("program", |program| program.required(false).required_unless_present("pid")),
)]
pub(crate) struct TraceArgs {
    /// Print these: names and patterns such as 'pagefault:*' [default: all]
    #[arg(long = "event", short, value_name = "EVENT,...")]
    pub events: Vec<String>,

    /// Attach to a process that runs under quire
    #[arg(long, short, value_name = "PID")]
    pub pid: Option<u32>,

    /// Print to FILE
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    #[command(flatten)]
    pub run: RunOptions,
}

pub(crate) fn trace(args: &TraceArgs) -> Result<u8> {
    let selected = select_tracepoints(&args.events)?;
    let mut printer =
        TracePrinter { selected, output: print::output(args.output.as_deref())?, lost: 0 };
    let status = match args.pid {
        None => printer.run(&args.run),
        Some(pid) => printer.attach(pid, &args.run),
    }?;
    if printer.lost > 0 {
        let lost = printer.lost;
        args.run.say(&format!("{lost} events were lost: they came faster than they were read"));
    }
    Ok(status)
}

struct TracePrinter {
    selected: Vec<Tracepoint>,
    output: Box<dyn Write>,
    lost: u64,
}

impl TracePrinter {
    /// Runs the program and prints what it traces from its start on.
    fn run(&mut self, options: &RunOptions) -> Result<u8> {
        let mut rings = Rings::new(Scope::Run);
        let mut printed = Ok(());
        let mut look = |control: &Control, _| {
            if printed.is_ok() {
                printed = self.print(rings.read(control));
            }
        };
        let mut looker = Looker::new(Some(PERIOD), &mut look);
        let ended = run::run_watched(options, Some(&mut looker))?;
        printed.context("cannot write the events")?;
        Ok(ended.exit_status)
    }

    /// Prints what a process traces from now on.
    fn attach(&mut self, pid: u32, options: &RunOptions) -> Result<u8> {
        let attached = runs::attach(pid, Access::Read)?;
        let control = &attached.run.control;
        let mut rings = Rings::new(attached.scope);
        rings.skip(control);
        let mut waiter = Waiter::start(&options.program)?;
        loop {
            let over = waiter.wait(Instant::now() + PERIOD, &[attached.process.as_fd()])?;
            self.print(rings.read(control)).context("cannot write the events")?;
            if let Some(status) = over {
                return Ok(status);
            }
        }
    }

    fn print(&mut self, batch: Batch) -> io::Result<()> {
        let mut text = String::new();
        for (pid, lost) in batch.lost {
            text += &format!("# {lost} events of process {pid} were lost\n");
            self.lost = self.lost.saturating_add(lost);
        }
        for (pid, trace) in batch.traces {
            if self.selected.contains(&trace.tracepoint) {
                text += &line(pid, &trace);
            }
        }
        self.output.write_all(text.as_bytes())?;
        self.output.flush()
    }
}

fn line(pid: u32, trace: &Trace) -> String {
    format!(
        "{:>6}.{:06} {:>7}/{:<7} {:<25} {:#014x} {:#x}-{:#x}\n",
        trace.time_ns / 1_000_000_000,
        trace.time_ns / 1000 % 1_000_000,
        pid,
        trace.thread,
        trace.tracepoint.name(),
        trace.address,
        trace.vma_start,
        trace.vma_end
    )
}

/// What a look at the rings brought.
#[derive(Default)]
struct Batch {
    /// Events in the order of their time, with their process.
    traces: Vec<(u32, Trace)>,
    /// Processes of which events were lost, and how many.
    lost: Vec<(u32, u64)>,
}

/// How far the rings of a tree's members were read.
struct Rings {
    scope: Scope,
    /// By slot.
    read: BTreeMap<usize, RingPosition>,
}

#[derive(Clone, Copy, Default)]
struct RingPosition {
    /// The member that the ring belongs to.
    pid: u32,
    /// The next record to read.
    next: u64,
    /// What the head was the last time.
    head: u64,
}

impl Rings {
    fn new(scope: Scope) -> Rings {
        Rings { scope, read: BTreeMap::new() }
    }

    /// Passes over all that is there.
    fn skip(&mut self, control: &Control) {
        self.note_members(control);
        for (&slot, ring) in &mut self.read {
            ring.next = control.traces[slot].head();
        }
    }

    /// Takes up members that have joined. A ring goes on when its slot has a new owner, so a member that
    /// joined and left between two looks is read all the same.
    fn note_members(&mut self, control: &Control) {
        if self.scope == Scope::Run {
            (0..control.tally.slots().min(MEMBERS_MAX)).for_each(|slot| {
                self.read.entry(slot).or_default();
            });
        }
        for (slot, member) in control.present() {
            let pid = member.pid.load(Relaxed);
            if matches!(self.scope, Scope::Run) || self.scope == Scope::Member(pid) {
                self.read.entry(slot).or_default().pid = pid;
            }
        }
    }

    /// Reads what is new, also of members that have left since.
    fn read(&mut self, control: &Control) -> Batch {
        let mut batch = Batch::default();
        // Before members are noted: what a ring has so far is its last owner's.
        for (&slot, ring) in &mut self.read {
            ring.read(&control.traces[slot], &mut batch);
        }
        self.note_members(control);
        for (&slot, ring) in &mut self.read {
            ring.read(&control.traces[slot], &mut batch);
        }
        batch.traces.sort_by_key(|(_, trace)| trace.time_ns);
        batch
    }
}

impl RingPosition {
    fn read(&mut self, ring: &TraceRing, batch: &mut Batch) {
        let head = ring.head();
        if head < self.next {
            // The ring was cleared.
            *self = RingPosition { pid: self.pid, ..RingPosition::default() };
        }
        // Older records were overwritten: a look is at most a ring long, whatever the head says.
        let first = self.next.max(head.saturating_sub(TRACES as u64));
        let mut lost = 0;
        let mut gaps = first - self.next;
        let mut next = self.next;
        for position in first..head {
            match ring.read(position) {
                Some(trace) => {
                    batch.traces.push((self.pid, trace));
                    lost += std::mem::take(&mut gaps);
                    next = position + 1;
                }
                // Overwritten, or still being written where it is one of the newest.
                None => gaps += 1,
            }
        }
        // The newest get another look: a thread that has not ended its record by then never will.
        if next < self.head {
            lost += self.head - next;
            next = self.head;
        }
        (self.next, self.head) = (next, head);
        if lost > 0 {
            batch.lost.push((self.pid, lost));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    fn trace(time_ns: u64) -> Trace {
        Trace {
            time_ns,
            tracepoint: Tracepoint::SpfVmaChanged,
            thread: 4713,
            address: 0x7f00_1234_5000,
            vma_start: 0x7f00_0000_0000,
            vma_end: 0x7f01_0000_0000,
        }
    }

    fn join(control: &Control, slot: usize, pid: u32) {
        control.take_slot(slot, pid);
        control.tally.note_joined(slot);
    }

    fn times(batch: &Batch) -> Vec<(u32, u64)> {
        batch.traces.iter().map(|(pid, trace)| (*pid, trace.time_ns)).collect()
    }

    #[test]
    fn an_event_is_a_line() {
        assert_eq!(
            line(4711, &trace(12_345_678_901)),
            "    12.345678    4711/4713    pagefault:spf_vma_changed 0x7f0012345000 \
             0x7f0000000000-0x7f0100000000\n"
        );
    }

    #[test]
    fn the_events_of_a_tree_come_in_the_order_of_their_time() {
        let control = ControlMap::create().unwrap();
        let mut rings = Rings::new(Scope::Run);
        join(&control, 0, 100);
        control.traces[0].push(&trace(1));
        control.traces[0].push(&trace(4));
        join(&control, 1, 200);
        control.traces[1].push(&trace(3));
        let batch = rings.read(&control);
        assert_eq!(times(&batch), [(100, 1), (200, 3), (100, 4)]);
        assert!(batch.lost.is_empty());
        assert_eq!(times(&rings.read(&control)), [], "none comes twice");
        // A member leaves, and another takes its slot, before the reader looks.
        control.traces[0].push(&trace(5));
        control.free_slot(0);
        assert_eq!(times(&rings.read(&control)), [(100, 5)]);
        join(&control, 0, 300);
        rings.read(&control);
        control.traces[0].push(&trace(6));
        assert_eq!(times(&rings.read(&control)), [(300, 6)]);
        // A member that joined and left between two looks.
        control.traces[2].push(&trace(7));
        control.tally.note_joined(2);
        assert_eq!(times(&rings.read(&control)), [(0, 7)]);
    }

    #[test]
    fn a_member_that_is_attached_to_is_read_alone_and_from_now_on() {
        let control = ControlMap::create().unwrap();
        for (slot, pid) in [(0, 100), (1, 200)] {
            join(&control, slot, pid);
            control.traces[slot].push(&trace(1));
        }
        let mut rings = Rings::new(Scope::Member(200));
        rings.skip(&control);
        control.traces[0].push(&trace(2));
        control.traces[1].push(&trace(3));
        assert_eq!(times(&rings.read(&control)), [(200, 3)]);
    }

    #[test]
    fn what_was_overwritten_is_counted() {
        let control = ControlMap::create().unwrap();
        let mut rings = Rings::new(Scope::Run);
        join(&control, 0, 100);
        (0..5000).for_each(|time| control.traces[0].push(&trace(time)));
        let batch = rings.read(&control);
        let [(100, lost)] = batch.lost[..] else { panic!("{:?}", batch.lost) };
        assert!(lost > 0 && !batch.traces.is_empty());
        assert_eq!(lost + batch.traces.len() as u64, 5000, "none is forgotten");
        assert_eq!(times(&batch).last(), Some(&(100, 4999)));
    }

    /// The user of another run may have written anything to its page.
    #[test]
    fn a_ring_that_lies_about_its_length_is_read_once_round() {
        let control = ControlMap::create().unwrap();
        let mut rings = Rings::new(Scope::Run);
        join(&control, 0, 100);
        control.traces[0].push(&trace(1));
        rings.read(&control);
        let head = std::mem::offset_of!(Control, traces) as u64;
        rustix::io::pwrite(&control, &u64::MAX.to_ne_bytes(), head).unwrap();
        assert_eq!(control.traces[0].head(), u64::MAX);
        assert_eq!(rings.read(&control).lost, [(100, u64::MAX - 1)]);
        assert!(rings.read(&control).lost.is_empty());
    }
}
