//! What `quire top` sees at one look, and what happened since the one before.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::Result;
use quire::control::Event;
use quire::units::PAGE_SIZE;

use crate::procfs;
use crate::ps::state;
use crate::runs::counts::{Counts, Scope};
use crate::runs::gauges::Gauges;
use crate::runs::{self, Access, Run};

/// Looks that are remembered of a run.
pub(super) const HISTORY: usize = 6;

/// All runs at one moment.
pub(super) struct Look {
    at: Instant,
    runs: Vec<(Sight, Vec<Sight>)>,
}

/// A run, or a process of it, at one moment.
pub(super) struct Sight {
    pid: u32,
    name: String,
    state: &'static str,
    budget_pages: u64,
    gauges: Gauges,
    counts: Counts,
}

/// The same, and what happened from one look to the next, each second.
#[derive(Clone, Default, Debug)]
pub(super) struct Row {
    pub pid: u32,
    /// The program's command line, or the process's name.
    pub name: String,
    pub state: &'static str,
    pub budget_bytes: u64,
    pub held_bytes: u64,
    /// What a run has in memory that is not managed.
    pub unmanaged_bytes: u64,
    pub wanted_bytes: u64,
    pub pool_bytes: u64,
    pub file_bytes: u64,
    /// What a run has on a server.
    pub far_bytes: u64,
    /// How much smaller packing makes pages; none where nothing was packed.
    pub pack_ratio: Option<f64>,
    pub faults: f64,
    pub major: f64,
    /// Seconds that threads waited for memory.
    pub waits: f64,
    pub bytes_out: f64,
    pub bytes_in: f64,
    /// Waits at the looks so far, the latest last.
    pub history: VecDeque<f64>,
}

/// A run, and its processes.
#[derive(Clone, Default, Debug)]
pub(super) struct RunRow {
    pub run: Row,
    pub processes: Vec<Row>,
}

/// What was seen last, by process.
#[derive(Default)]
pub(super) struct Watch {
    last: HashMap<u32, (Instant, Counts)>,
    histories: HashMap<u32, VecDeque<f64>>,
}

impl Look {
    pub(super) fn now() -> Result<Look> {
        let found = runs::find(Access::Read)?;
        let at = Instant::now();
        Ok(Look { at, runs: found.runs.iter().map(Sight::of).collect() })
    }
}

impl Sight {
    /// A run, and its processes.
    fn of(run: &Run) -> (Sight, Vec<Sight>) {
        let control = &run.control;
        let budget_pages = control.budget_pages.load(Relaxed);
        let pid = run.supervisor_pid;
        let command = procfs::command_line(pid).unwrap_or_default();
        let members = control.inhabited().map(|(slot, member)| {
            let pid = member.pid.load(Relaxed);
            Sight {
                pid,
                name: procfs::name(pid).unwrap_or_default(),
                state: state(pid),
                budget_pages,
                gauges: Gauges::of_member(control, slot, member),
                counts: Counts::read(control, Scope::Member(pid)).unwrap_or_default(),
            }
        });
        let members = members.filter(|member| runs::may_name(pid, member.pid)).collect();
        let sight = Sight {
            pid,
            name: program_of(&command).to_owned(),
            state: "",
            budget_pages,
            gauges: Gauges::read(control, Scope::Run),
            counts: Counts::read(control, Scope::Run).unwrap_or_default(),
        };
        (sight, members)
    }
}

/// The program in a command line of `quire run`'s, without the folder that it lies in.
fn program_of(command: &str) -> &str {
    let program = command.split_once(" -- ").map_or(command, |(_, program)| program);
    let name = program.split(' ').next().unwrap_or_default();
    &program[name.rfind('/').map_or(0, |slash| slash + 1)..]
}

impl Watch {
    /// What happened since the last look.
    pub(super) fn take(&mut self, look: Look) -> Vec<RunRow> {
        let mut last = HashMap::new();
        let mut histories = HashMap::new();
        let mut row = |sight: Sight| {
            let row = self.row(look.at, &sight);
            last.insert(sight.pid, (look.at, sight.counts));
            histories.insert(sight.pid, row.history.clone());
            row
        };
        let rows = look
            .runs
            .into_iter()
            .map(|(run, processes)| RunRow {
                run: row(run),
                processes: processes.into_iter().map(&mut row).collect(),
            })
            .collect();
        // What has ended is forgotten.
        (self.last, self.histories) = (last, histories);
        rows
    }

    fn row(&self, at: Instant, sight: &Sight) -> Row {
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        let (seconds, since) = match self.last.get(&sight.pid) {
            Some((then, counts)) => ((at - *then).as_secs_f64(), sight.counts.since(counts)),
            // Nothing is known of how long that took.
            None => (1.0, Counts::default()),
        };
        let a_second = |event| since.of(event) as f64 / seconds;
        let waits = since.waited_seconds() / seconds;
        let packed = sight.counts.of(Event::ZswpoutBytes);
        let mut history = self.histories.get(&sight.pid).cloned().unwrap_or_default();
        history.push_back(waits);
        while history.len() > HISTORY {
            history.pop_front();
        }
        Row {
            pid: sight.pid,
            name: sight.name.clone(),
            state: sight.state,
            budget_bytes: bytes(sight.budget_pages),
            held_bytes: bytes(sight.gauges.held),
            unmanaged_bytes: bytes(sight.gauges.unmanaged),
            wanted_bytes: bytes(sight.gauges.wanted),
            pool_bytes: bytes(sight.gauges.pool),
            file_bytes: bytes(sight.gauges.swap_file),
            far_bytes: bytes(sight.gauges.far),
            pack_ratio: (packed > 0)
                .then(|| bytes(sight.counts.of(Event::Zswpout)) as f64 / packed as f64),
            faults: a_second(Event::Pgfault),
            major: a_second(Event::Pgmajfault),
            waits,
            bytes_out: a_second(Event::Pswpout) * PAGE_SIZE as f64,
            bytes_in: a_second(Event::Pswpin) * PAGE_SIZE as f64,
            history,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use quire::control::FaultKind;

    use super::*;

    fn sight(faults: u64, waits: u64) -> Sight {
        let mut counts = Counts::of_events(&[
            (Event::Pgfault, faults),
            (Event::Zswpout, 100),
            (Event::ZswpoutBytes, 102_400),
        ]);
        // A bucket of about 1.6 seconds each.
        counts.set_fault_times(FaultKind::File, 30, waits);
        let gauges = Gauges { held: 256, ..Gauges::default() };
        Sight { pid: 7, name: "x".into(), state: "running", budget_pages: 512, gauges, counts }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks_and_what_has_ended_is_forgotten() {
        let mut watch = Watch::default();
        let start = Instant::now();
        let look = |after, sight| Look {
            at: start + Duration::from_secs(after),
            runs: vec![(sight, Vec::new())],
        };
        let first = &watch.take(look(0, sight(1000, 1)))[0].run;
        assert_eq!((first.faults, first.waits, first.held_bytes), (0.0, 0.0, 1 << 20));
        assert_eq!(first.pack_ratio, Some(4.0));
        let second = &watch.take(look(4, sight(1400, 3)))[0].run;
        assert_eq!(second.faults, 100.0);
        assert!((second.waits - 2.0 * 1.5 * (1u64 << 30) as f64 * 1e-9 / 4.0).abs() < 1e-9);
        assert_eq!(second.history.len(), 2);
        assert!(watch.take(Look { at: start, runs: Vec::new() }).is_empty());
        assert!(watch.last.is_empty() && watch.histories.is_empty());
    }

    #[test]
    fn a_run_is_known_by_its_program() {
        assert_eq!(program_of("quire run -m 32M -- /srv/build.sh -x /y"), "build.sh -x /y");
        assert_eq!(program_of("quire run -m 32M ls"), "quire run -m 32M ls");
    }
}
