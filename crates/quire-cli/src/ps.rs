//! `quire ps`: the runs there are, and the processes of each.
//!
//! Owns the table and its JSON. Leaves to `attach` which runs this user may look into, and to
//! `supervisor::unmanaged` which of their processes are no members. Nothing is asked of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use quire::control::{Control, Event, Member, SEGMENT_BYTES};
use quire::units::PAGE_SIZE;

use crate::attach::{self, Access, Tree};
use crate::counts::{Counts, Scope};
use crate::json::Json;
use crate::procfs::{self, Stat};
use crate::report::{self, say};
use crate::size::Human;
use crate::supervisor::unmanaged::{self, Unmanaged};

/// Between its exec and its joining a process is no member: who is none is looked at again after
/// this.
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
  FAULTS MAJOR      faults served; those that read the swap file
  STATE             running, sleeping, stopped; unmanaged: quire has no hand in it, and HELD is what
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

/// A run as it is now. Sizes are bytes.
struct Run {
    pid: u32,
    command: String,
    budget: u64,
    held: u64,
    held_max: u64,
    wanted: u64,
    pool: u64,
    swap_file: u64,
    counts: Counts,
    rows: Vec<Row>,
    unmanaged: Vec<Unmanaged>,
}

/// A process of it, or what is kept for a run inside.
struct Row {
    pid: u32,
    name: String,
    state: &'static str,
    held: u64,
    held_max: u64,
    wanted: u64,
    pool: u64,
    file: u64,
    faults: u64,
    major: u64,
}

/// `quire ps`; returns its exit status.
pub(crate) fn ps(args: &PsArgs) -> Result<u8> {
    let trees = match args.pid {
        Some(pid) => vec![attach::attach(pid, Access::Read)?.tree],
        None => {
            let found = attach::find()?;
            for (pid, version) in found.others {
                say(&format!(
                    "process {pid} is another version of quire (its control page has version \
                     {version}): not listed"
                ));
            }
            found.trees
        }
    };
    let mut strangers = strangers(&trees);
    if strangers.iter().any(|strangers| !strangers.is_empty()) {
        std::thread::sleep(SECOND_LOOK);
        let again = self::strangers(&trees);
        for (strangers, again) in strangers.iter_mut().zip(again) {
            strangers.retain(|stranger| again.contains(stranger));
        }
    }
    let runs: Vec<Run> =
        trees.iter().zip(strangers).map(|(tree, strangers)| Run::read(tree, &strangers)).collect();
    let text = if args.json {
        let rows: Json = runs.iter().map(Run::json).collect();
        format!("{rows}\n")
    } else {
        let texts: Vec<String> = runs.iter().map(Run::text).collect();
        texts.join("\n")
    };
    io::stdout().write_all(text.as_bytes()).context("cannot print")?;
    Ok(0)
}

/// For each run: its processes that are no members.
fn strangers(trees: &[Tree]) -> Vec<Vec<u32>> {
    let all = procfs::all();
    let mut by_cgroup = processes_by_cgroup(&all);
    let of_tree = |tree: &Tree| {
        let pid = tree.supervisor_pid();
        let control = tree.control();
        let pids = |is_reservation: bool| -> BTreeSet<u32> {
            let present = control.present().map(|(_, member)| member);
            let chosen = present.filter(|member| member.is_a_reservation() == is_reservation);
            chosen.map(|member| member.pid.load(Relaxed)).collect()
        };
        let (members, inner) = (pids(false), pids(true));
        // What the page says is believed of the supervisor's own processes alone.
        let members = members.into_iter().filter(|&member| attach::may_name(pid, member)).collect();
        let start = all.get(&pid).map_or(0, |stat| stat.start_ticks);
        let known = by_cgroup.remove(&format!("quire-{pid}-{start}")).unwrap_or_default();
        let tree = unmanaged::Tree {
            supervisor_pid: pid,
            members: &members,
            inner: &inner,
            known: &known,
        };
        let mut strangers = tree.strangers(&all);
        strangers.retain(|pid| unmanaged::is_settled(*pid, &all[pid]));
        strangers
    };
    trees.iter().map(of_tree).collect()
}

/// The processes in runs' cgroups, by the innermost one's name.
fn processes_by_cgroup(all: &BTreeMap<u32, Stat>) -> BTreeMap<String, BTreeSet<u32>> {
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

impl Run {
    fn read(tree: &Tree, strangers: &[u32]) -> Run {
        let control: &Control = tree.control();
        let pid = tree.supervisor_pid();
        let is_ours = |pid_of: u32| attach::may_name(pid, pid_of);
        let mut rows: Vec<Row> = control
            .present()
            .map(|(slot, member)| Row::of(control, slot, member))
            .filter(|row| is_ours(row.pid))
            .collect();
        rows.sort_by_key(|row| row.pid);
        let segments = u64::from(control.segments_used.load(Relaxed));
        Run {
            pid,
            command: procfs::command_line(pid).unwrap_or_default(),
            budget: bytes(control.budget_pages.load(Relaxed)),
            held: bytes(control.held()),
            held_max: bytes(control.held_pages_max.load(Relaxed)),
            wanted: bytes(control.wanted()),
            pool: rows.iter().map(|row| row.pool).sum::<u64>()
                + bytes(control.common_pages.load(Relaxed)),
            swap_file: segments * SEGMENT_BYTES as u64,
            counts: Counts::read(control, Scope::Tree).unwrap_or_default(),
            rows,
            unmanaged: strangers.iter().map(|&pid| unmanaged::describe(pid, None)).collect(),
        }
    }

    fn swapped_out(&self) -> u64 {
        bytes(self.counts.of(Event::Pswpout))
    }

    fn text(&self) -> String {
        let mut text = format!(
            "{} {}\n  budget {}, held {}, wanted {}; pool {}, swap file {}; {} swapped out; {} \
             faults, {} major\n",
            self.pid,
            self.command,
            Human(self.budget),
            Human(self.held),
            Human(self.wanted),
            Human(self.pool),
            Human(self.swap_file),
            Human(self.swapped_out()),
            self.counts.of(Event::Pgfault),
            self.counts.of(Event::Pgmajfault),
        );
        let _ = writeln!(
            text,
            "  {:>8} {:<16}{:<10}{:>10}{:>10}{:>10}{:>10}{:>11}{:>9}",
            "PID", "NAME", "STATE", "HELD", "WANTED", "POOL", "FILE", "FAULTS", "MAJOR"
        );
        self.rows.iter().for_each(|row| text.push_str(&row.text()));
        for unmanaged in &self.unmanaged {
            let _ = writeln!(
                text,
                "  {:>8} {:<16}{:<10}{:>10}  {}",
                unmanaged.pid,
                unmanaged.name,
                "unmanaged",
                Human(unmanaged.resident_bytes).to_string(),
                unmanaged.why
            );
        }
        text
    }

    fn json(&self) -> Json {
        Json::object([
            ("pid", Json::count(self.pid.into())),
            ("command", Json::text(&self.command)),
            ("budget_bytes", Json::count(self.budget)),
            ("held_bytes", Json::count(self.held)),
            ("held_bytes_max", Json::count(self.held_max)),
            ("wanted_bytes", Json::count(self.wanted)),
            ("pool_bytes", Json::count(self.pool)),
            ("swap_file_bytes", Json::count(self.swap_file)),
            ("pswpin", Json::count(self.counts.of(Event::Pswpin))),
            ("pswpout", Json::count(self.counts.of(Event::Pswpout))),
            ("pgfault", Json::count(self.counts.of(Event::Pgfault))),
            ("pgmajfault", Json::count(self.counts.of(Event::Pgmajfault))),
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
            held: bytes(control.seats[slot].account.get().held.into()),
            held_max: bytes(member.held_pages_max.load(Relaxed)),
            wanted: bytes(member.wanted_pages.load(Relaxed)),
            pool: bytes(member.pool_pages.load(Relaxed)),
            file: control.segments_of(slot) * SEGMENT_BYTES as u64,
            faults: member.counted(Event::Pgfault),
            major: member.counted(Event::Pgmajfault),
        }
    }

    fn text(&self) -> String {
        let [held, wanted, pool, file] =
            [self.held, self.wanted, self.pool, self.file].map(|bytes| Human(bytes).to_string());
        format!(
            "  {:>8} {:<16}{:<10}{held:>10}{wanted:>10}{pool:>10}{file:>10}{:>11}{:>9}\n",
            self.pid, self.name, self.state, self.faults, self.major
        )
    }

    fn json(&self) -> Json {
        Json::object([
            ("pid", Json::count(self.pid.into())),
            ("name", Json::text(&self.name)),
            ("state", Json::text(self.state)),
            ("held_bytes", Json::count(self.held)),
            ("held_bytes_max", Json::count(self.held_max)),
            ("wanted_bytes", Json::count(self.wanted)),
            ("pool_bytes", Json::count(self.pool)),
            ("file_bytes", Json::count(self.file)),
            ("pgfault", Json::count(self.faults)),
            ("pgmajfault", Json::count(self.major)),
        ])
    }
}

/// What a process does, in a word.
fn state(pid: u32) -> &'static str {
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

    fn run() -> Run {
        let row = |pid, state| Row {
            pid,
            name: "cc1plus".into(),
            state,
            held: 3 << 20,
            held_max: 4 << 20,
            wanted: 5 << 20,
            pool: 1 << 20,
            file: 0,
            faults: 12,
            major: 1,
        };
        Run {
            pid: 4711,
            command: "quire run -m 1G make".into(),
            budget: 1 << 30,
            held: 6 << 20,
            held_max: 8 << 20,
            wanted: 10 << 20,
            pool: 2 << 20,
            swap_file: 256 << 10,
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
            "  budget 1 GiB, held 6 MiB, wanted 10 MiB; pool 2 MiB, swap file 256 KiB; 2 MiB \
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
        assert!(json.starts_with("{\"pid\": 4711, \"command\": \"quire run -m 1G make\", "));
        assert!(json.contains("\"members\": [{\"pid\": 4712, "), "{json}");
        assert!(json.contains("\"unmanaged\": [{\"pid\": 4714, "), "{json}");
        assert!(json.contains("\"held_bytes\": 6291456"), "{json}");
    }
}
