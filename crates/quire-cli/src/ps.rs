//! `quire ps`: the runs there are, and the processes of each.
//!
//! Owns what is told of a run, as text and as JSON. Leaves to `runs` which of them this user may look
//! into and what they hold, and to `supervisor::unmanaged` which of their processes are no members.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use quire::control::{Control, Event, Member};
use quire::units::PAGE_SIZE;
use serde_json::Value;

use crate::print::table;
use crate::print::{print, say};
use crate::procfs::{self, ProcessStat};
use crate::report;
use crate::runs::counts::{Counts, Scope};
use crate::runs::gauges::Gauges;
use crate::runs::{self, Access, Run};
use crate::size::Human;
use crate::supervisor::unmanaged::{self, Family, Unmanaged};

/// Between its exec and its joining a process is no member yet: one that is no member is looked at again
/// after this time.
const SECOND_LOOK: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Examples:
  quire ps                                all runs that this user may look into
  quire ps -p 4711                        the run that process 4711 belongs to
  quire ps --json | jq '.[].held_bytes'

A run is a line, then a table of its processes:
  HELD WANTED       memory that it holds; data that it has, wherever it rests
  POOL FILE         held by compressed pages; segments of the swap file with its data, which a
                    fork shares
  SHARED            shared memory that it has mapped: not managed, a part of the run's budget
  FAULTS MAJOR      faults served; those that read the swap file
  STATE             running, sleeping, stopped; unmanaged: quire does not manage it, and HELD is what
                    it has in memory by the kernel's count; reserved: kept for a run inside";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsArgs {
    /// Only the run that this process belongs to
    #[arg(long, short, value_name = "PID")]
    pub pid: Option<u32>,

    /// Print a JSON array, an object for each run
    #[arg(long)]
    pub json: bool,
}

/// The widths of the table of a run's processes.
const WIDTHS: [isize; 10] = [10, -17, -10, 10, 10, 10, 10, 10, 11, 9];
const TITLES: [&str; 10] =
    ["PID", " NAME", "STATE", "HELD", "WANTED", "POOL", "FILE", "SHARED", "FAULTS", "MAJOR"];

/// A run as it is now.
struct Listing {
    pid: u32,
    command: String,
    budget_pages: u64,
    gauges: Gauges,
    counts: Counts,
    rows: Vec<Row>,
    unmanaged: Vec<Unmanaged>,
}

/// A process of it, or what is kept for a run inside.
struct Row {
    pid: u32,
    name: String,
    state: &'static str,
    gauges: Gauges,
    /// Shared memory that it has mapped, which is not managed; other processes may have the same.
    shared_bytes: u64,
    faults: u64,
    major: u64,
}

pub(crate) fn ps(args: &PsArgs) -> Result<u8> {
    let runs = match args.pid {
        Some(pid) => vec![runs::attach(pid, Access::Read)?.run],
        None => {
            let found = runs::find(Access::Read)?;
            for (pid, version) in found.others {
                say(&format!(
                    "process {pid} is another version of quire, so it is not listed: its control page \
                     has version {version}"
                ));
            }
            found.runs
        }
    };
    let mut strangers = strangers(&runs);
    if strangers.iter().any(|strangers| !strangers.is_empty()) {
        std::thread::sleep(SECOND_LOOK);
        let again = self::strangers(&runs);
        for (strangers, again) in strangers.iter_mut().zip(again) {
            strangers.retain(|stranger| again.contains(stranger));
        }
    }
    let listings: Vec<Listing> =
        runs.iter().zip(strangers).map(|(run, strangers)| Listing::read(run, &strangers)).collect();
    print(&if args.json {
        let json: Value = listings.iter().map(Listing::json).collect();
        format!("{json}\n")
    } else {
        let texts: Vec<String> = listings.iter().map(Listing::text).collect();
        texts.join("\n")
    })?;
    Ok(0)
}

/// For each run: its processes that are no members.
fn strangers(runs: &[Run]) -> Vec<Vec<u32>> {
    let all = procfs::all();
    let mut by_cgroup = processes_by_cgroup(&all);
    let of_run = |run: &Run| {
        let pid = run.supervisor_pid;
        let present = run.control.present().map(|(_, member)| member);
        let (mut members, inner) = unmanaged::members_and_inner(present);
        // What the page says is believed of the supervisor's own processes alone.
        members.retain(|&member| runs::may_name(pid, member));
        let start = all.get(&pid).map_or(0, |stat| stat.start_ticks);
        let known = by_cgroup.remove(&format!("quire-{pid}-{start}")).unwrap_or_default();
        let family =
            Family { supervisor_pid: pid, members: &members, inner: &inner, known: &known };
        let mut strangers = family.strangers(&all);
        strangers.retain(|pid| unmanaged::is_settled(*pid, &all[pid]));
        strangers
    };
    runs.iter().map(of_run).collect()
}

/// The processes in runs' cgroups, by the innermost one's name.
fn processes_by_cgroup(all: &BTreeMap<u32, ProcessStat>) -> BTreeMap<String, BTreeSet<u32>> {
    let mut found: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for &pid in all.keys() {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let mut names = text.lines().filter_map(|line| line.rsplit('/').next());
        if let Some(name) = names.find(|name| name.starts_with("quire-")) {
            found.entry(name.to_owned()).or_default().insert(pid);
        }
    }
    found
}

fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}

impl Listing {
    fn read(run: &Run, strangers: &[u32]) -> Listing {
        let control: &Control = &run.control;
        let pid = run.supervisor_pid;
        let mut rows: Vec<Row> = control
            .present()
            .map(|(slot, member)| Row::of(control, slot, member))
            .filter(|row| runs::may_name(pid, row.pid))
            .collect();
        rows.sort_by_key(|row| row.pid);
        Listing {
            pid,
            command: procfs::command_line(pid).unwrap_or_default(),
            budget_pages: control.budget_pages.load(Relaxed),
            gauges: Gauges::read(control, Scope::Run),
            counts: Counts::read(control, Scope::Run).unwrap_or_default(),
            rows,
            unmanaged: strangers.iter().map(|&pid| unmanaged::describe(pid, None)).collect(),
        }
    }

    fn text(&self) -> String {
        let human = |pages| Human(bytes(pages));
        let mut text = format!(
            "{} {}\n  budget {}, held {}, unmanaged {}, wanted {}; pool {}, swap file {}{}; {} swapped out; \
             {} faults, {} major\n{}\n",
            self.pid,
            self.command,
            human(self.budget_pages),
            human(self.gauges.held),
            human(self.gauges.unmanaged),
            human(self.gauges.wanted),
            human(self.gauges.pool),
            human(self.gauges.swap_file),
            if self.gauges.far > 0 {
                format!(", server {}", human(self.gauges.far))
            } else {
                String::new()
            },
            human(self.counts.of(Event::Pswpout)),
            self.counts.of(Event::Pgfault),
            self.counts.of(Event::Pgmajfault),
            table::row(&WIDTHS, "", &TITLES),
        );
        self.rows.iter().for_each(|row| text.push_str(&row.text()));
        for unmanaged in &self.unmanaged {
            let cells = [
                unmanaged.pid.to_string(),
                format!(" {}", unmanaged.name),
                "unmanaged".into(),
                Human(unmanaged.resident_bytes).to_string(),
            ];
            let _ = writeln!(text, "{}  {}", table::row(&WIDTHS, "", &cells), unmanaged.why);
        }
        text
    }

    fn json(&self) -> Value {
        Value::from_iter([
            ("pid", Value::from(self.pid)),
            ("command", Value::from(self.command.as_str())),
            ("budget_bytes", Value::from(bytes(self.budget_pages))),
            ("held_bytes", Value::from(bytes(self.gauges.held))),
            ("held_bytes_max", Value::from(bytes(self.gauges.held_max))),
            ("unmanaged_memory_bytes", Value::from(bytes(self.gauges.unmanaged))),
            ("wanted_bytes", Value::from(bytes(self.gauges.wanted))),
            ("pool_bytes", Value::from(bytes(self.gauges.pool))),
            ("swap_file_bytes", Value::from(bytes(self.gauges.swap_file))),
            ("far_bytes", Value::from(bytes(self.gauges.far))),
            ("pswpin", Value::from(self.counts.of(Event::Pswpin))),
            ("pswpout", Value::from(self.counts.of(Event::Pswpout))),
            ("pgfault", Value::from(self.counts.of(Event::Pgfault))),
            ("pgmajfault", Value::from(self.counts.of(Event::Pgmajfault))),
            ("members", self.rows.iter().map(Row::json).collect()),
            ("unmanaged", self.unmanaged.iter().map(report::unmanaged_json).collect()),
        ])
    }
}

impl Row {
    fn of(control: &Control, slot: usize, member: &Member) -> Row {
        let pid = member.pid.load(Relaxed);
        Row {
            pid,
            name: procfs::name(pid).unwrap_or_default(),
            state: if member.is_a_reservation() { "reserved" } else { state(pid) },
            gauges: Gauges::of_member(control, slot, member),
            shared_bytes: procfs::shared_bytes(pid, member),
            faults: member.counted(Event::Pgfault),
            major: member.counted(Event::Pgmajfault),
        }
    }

    fn text(&self) -> String {
        let human = |pages| Human(bytes(pages)).to_string();
        let cells = [
            self.pid.to_string(),
            format!(" {}", self.name),
            self.state.to_owned(),
            human(self.gauges.held),
            human(self.gauges.wanted),
            human(self.gauges.pool),
            human(self.gauges.swap_file),
            Human(self.shared_bytes).to_string(),
            self.faults.to_string(),
            self.major.to_string(),
        ];
        table::row(&WIDTHS, "", &cells) + "\n"
    }

    fn json(&self) -> Value {
        Value::from_iter([
            ("pid", Value::from(self.pid)),
            ("name", Value::from(self.name.as_str())),
            ("state", Value::from(self.state)),
            ("held_bytes", Value::from(bytes(self.gauges.held))),
            ("held_bytes_max", Value::from(bytes(self.gauges.held_max))),
            ("wanted_bytes", Value::from(bytes(self.gauges.wanted))),
            ("pool_bytes", Value::from(bytes(self.gauges.pool))),
            ("file_bytes", Value::from(bytes(self.gauges.swap_file))),
            ("shared_bytes", Value::from(self.shared_bytes)),
            ("pgfault", Value::from(self.faults)),
            ("pgmajfault", Value::from(self.major)),
        ])
    }
}

/// What a process does, in a word.
pub(crate) fn state(pid: u32) -> &'static str {
    match procfs::stat(pid).map(|stat| stat.state) {
        Some('R') => "running",
        Some('T' | 't') => "stopped",
        Some('Z' | 'X') | None => "ended",
        Some(_) => "sleeping",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Listing {
        let gauges = |held, held_max, wanted, pool, swap_file| Gauges {
            held,
            held_max,
            wanted,
            pool,
            swap_file,
            far: 64,
            ..Gauges::default()
        };
        let row = |pid, state| Row {
            pid,
            name: "cc1plus".into(),
            state,
            gauges: gauges(768, 1024, 1280, 256, 0),
            shared_bytes: 3 << 20,
            faults: 12,
            major: 1,
        };
        Listing {
            pid: 4711,
            command: "quire run -m 1G make".into(),
            budget_pages: 1 << 18,
            gauges: Gauges { unmanaged: 1024, ..gauges(1536, 2048, 2560, 512, 64) },
            counts: Counts::of_events(&[(Event::Pgfault, 24), (Event::Pswpout, 512)]),
            rows: vec![row(4712, "running"), row(4713, "stopped")],
            unmanaged: vec![Unmanaged {
                pid: 4714,
                name: "go".into(),
                why: "/bin/go is a Go program".into(),
                resident_bytes: 7 << 20,
                resident_bytes_max: 9 << 20,
            }],
        }
    }

    #[test]
    fn a_run_is_two_lines_and_a_table() {
        let text = run().text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "4711 quire run -m 1G make");
        assert_eq!(
            lines[1],
            "  budget 1 GiB, held 6 MiB, unmanaged 4 MiB, wanted 10 MiB; pool 2 MiB, swap file 256 KiB, server 256 KiB; 2 MiB \
             swapped out; 24 faults, 0 major"
        );
        assert_eq!(lines.len(), 6, "{text}");
        assert_eq!(lines[2].len(), lines[3].len(), "{text}");
        assert!(lines[4].contains("4713 cc1plus         stopped"), "{text}");
        assert!(lines[5].ends_with("7 MiB  /bin/go is a Go program"), "{text}");
    }

    #[test]
    fn machines_get_bytes() {
        let json = run().json().to_string();
        assert!(json.starts_with("{\"pid\":4711,\"command\":\"quire run -m 1G make\","));
        assert!(json.contains("\"members\":[{\"pid\":4712,"), "{json}");
        assert!(json.contains("\"unmanaged\":[{\"pid\":4714,"), "{json}");
        assert!(json.contains("\"held_bytes\":6291456"), "{json}");
    }
}
