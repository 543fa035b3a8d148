//! What `quire run` tells: its lines on stderr, and the counters as JSON.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use quire::control::{Event, OUT_OF_MEMORY_UNANSWERING_SHIFT, Obituary};
use quire::units::PAGE_SIZE;
use rustix::io::Errno;
use serde_json::Value;

use crate::run::BUDGET_MIN_BYTES;
use crate::size::Human;
use crate::supervisor::unmanaged::Unmanaged;
use crate::supervisor::{Account, ByMember, Death, End, Entry, FarAccount, InMemory};

/// Members that the closing lines name.
const NAMED_MAX: usize = 5;

pub(crate) struct Ended {
    pub account: Account,
    pub by_member: ByMember,
    pub cgroup_bytes_max: Option<u64>,
    pub cgroup_limit_bytes: Option<u64>,
    pub wall_seconds: f64,
    pub exit_status: u8,
}

impl Ended {
    fn event(&self, event: Event) -> u64 {
        self.account.counts.of(event)
    }

    pub(crate) fn line(&self) -> String {
        let account = &self.account;
        if account.processes == 0 {
            return "no process of the run was managed".into();
        }
        let mut line = format!(
            "wanted {} at most, held {} of {}",
            Human(account.wanted_bytes_max),
            Human(account.held_bytes_max),
            Human(account.budget_bytes),
        );
        if let Some(unmanaged) = account.unmanaged_memory_max {
            let _ = write!(line, ", beside {} that are not managed", Human(unmanaged.bytes));
        }
        let swapped = self.event(Event::Pswpout);
        if swapped == 0 {
            line.push_str("; nothing was swapped");
            return line;
        }
        let _ = write!(line, "; {} swapped out", Human(swapped * PAGE_SIZE as u64));
        let packed =
            [(Event::Zswpout, Event::ZswpoutBytes), (Event::ZswpoutZstd, Event::ZswpoutZstdBytes)];
        let [all, zstd] = packed.map(|(pages, bytes)| [self.event(pages), self.event(bytes)]);
        if let Some(ratio) = ratio_of(all) {
            let _ = write!(line, ", compressed {ratio:.1} to 1");
            let lz4 = ratio_of([all[0] - zstd[0], all[1] - zstd[1]]);
            if let (Some(lz4), Some(zstd)) = (lz4, ratio_of(zstd)) {
                let _ = write!(line, " (lz4 {lz4:.1}, zstd {zstd:.1})");
            }
        }
        let same_filled = self.event(Event::SwpoutZero);
        if same_filled * 20 >= swapped {
            let percent = same_filled * 100 / swapped;
            let _ = write!(line, ", {percent}% of one value");
        }
        if account.swap_file_bytes_max > 0 {
            let _ = write!(line, ", {} in the swap file", Human(account.swap_file_bytes_max));
        }
        if let Some(far) = account.far.as_ref().filter(|far| far.bytes_out > 0) {
            let [most, out, back] = [far.bytes_max, far.bytes_out, far.bytes_in].map(Human);
            let _ = write!(line, ", {most} on {} ({out} went there, {back} came back)", far.name);
        }
        line
    }

    /// The processes that held most, in one line, where there were several.
    pub(crate) fn members_line(&self) -> Option<String> {
        let mut members: Vec<&Entry> = self.by_member.members.iter().collect();
        if members.len() < 2 {
            return None;
        }
        members.sort_by_key(|entry| std::cmp::Reverse(entry.sizes.held_pages_max));
        let named = members.iter().take(NAMED_MAX).map(|entry| {
            let held = Human(entry.sizes.held_pages_max * PAGE_SIZE as u64);
            format!("{} ({}) {held}", entry.name, entry.pid)
        });
        let named = named.collect::<Vec<_>>().join(", ");
        Some(format!("{} processes; most held: {named}", self.account.processes))
    }

    /// What was not managed, in one line, where there was anything.
    pub(crate) fn unmanaged_line(&self) -> Option<String> {
        let account = &self.account;
        (account.unmanaged_processes > 0).then(|| {
            format!(
                "{} process(es) ran unmanaged, with {} in memory at most",
                account.unmanaged_processes,
                Human(account.unmanaged_bytes_max)
            )
        })
    }

    /// The run as a JSON object: its counters one a line, then its processes one a line.
    pub(crate) fn json(&self) -> String {
        let account = &self.account;
        let far = |of: fn(&FarAccount) -> u64| account.far.as_ref().map_or(0, of).to_string();
        let mut members = vec![
            ("exit_status", self.exit_status.to_string()),
            ("wall_seconds", format!("{:.6}", self.wall_seconds)),
            ("budget_bytes", account.budget_bytes.to_string()),
            ("held_bytes_max", account.held_bytes_max.to_string()),
            ("wanted_bytes_max", account.wanted_bytes_max.to_string()),
            ("managed_bytes_max", account.managed_bytes_max.to_string()),
            ("pool_bytes_max", account.pool_bytes_max.to_string()),
            ("swap_file_bytes_max", account.swap_file_bytes_max.to_string()),
            ("far_bytes_max", far(|far| far.bytes_max)),
            ("far_bytes_out", far(|far| far.bytes_out)),
            ("far_bytes_in", far(|far| far.bytes_in)),
            ("cgroup_bytes_max", Value::from(self.cgroup_bytes_max).to_string()),
            ("cgroup_limit_bytes", Value::from(self.cgroup_limit_bytes).to_string()),
            ("processes", account.processes.to_string()),
            ("processes_left", account.processes_left.to_string()),
            ("processes_refused", account.processes_refused.to_string()),
            ("unmanaged_processes", account.unmanaged_processes.to_string()),
            ("unmanaged_bytes_max", account.unmanaged_bytes_max.to_string()),
        ];
        let beside = account.unmanaged_memory_max;
        members.extend(
            [
                ("unmanaged_memory_bytes_max", beside.map(|memory| memory.bytes)),
                ("unmanaged_shared_bytes_max", beside.map(|memory| memory.shared_bytes)),
                ("unmanaged_kernel_bytes_max", beside.map(|memory| memory.kernel_bytes)),
            ]
            .map(|(name, bytes)| (name, Value::from(bytes).to_string())),
        );
        members.extend(Event::ALL.map(|event| (event.name(), self.event(event).to_string())));
        members.push(("members_forgotten", self.by_member.forgotten.to_string()));
        members.push(("members", lines_of(self.by_member.members.iter().map(member_json))));
        members.push(("unmanaged", lines_of(self.by_member.unmanaged.iter().map(unmanaged_json))));
        let lines: Vec<String> =
            members.iter().map(|(name, value)| format!("  \"{name}\": {value}")).collect();
        format!("{{\n{}\n}}\n", lines.join(",\n"))
    }
}

/// To how much less pages were packed, if any were.
fn ratio_of([pages, bytes]: [u64; 2]) -> Option<f64> {
    (bytes > 0).then(|| pages as f64 * PAGE_SIZE as f64 / bytes as f64)
}

/// A JSON array, a value a line.
fn lines_of(values: impl Iterator<Item = Value>) -> String {
    let lines: Vec<String> = values.map(|value| format!("    {value}")).collect();
    if lines.is_empty() { "[]".into() } else { format!("[\n{}\n  ]", lines.join(",\n")) }
}

fn member_json(entry: &Entry) -> Value {
    let (end, status) = match entry.end {
        End::None => ("running", None),
        End::Unknown => ("unknown", None),
        End::Executed => ("executed", None),
        End::Exited(code) => ("exited", Some(code)),
        End::Killed(signal) => ("killed", Some(signal)),
    };
    let bytes = |pages: u64| Value::from(pages * PAGE_SIZE as u64);
    let sizes = &entry.sizes;
    Value::from_iter([
        ("pid", Value::from(entry.pid)),
        ("name", Value::from(entry.name.as_str())),
        ("end", Value::from(end)),
        ("end_number", Value::from(status.map(u64::from))),
        ("held_bytes_max", bytes(sizes.held_pages_max)),
        ("wanted_bytes_max", bytes(sizes.wanted_pages_max)),
        ("managed_bytes_max", bytes(sizes.managed_pages_max)),
        ("pgfault", Value::from(sizes.pgfault)),
        ("pgmajfault", Value::from(sizes.pgmajfault)),
        ("pswpin", Value::from(sizes.pswpin)),
        ("pswpout", Value::from(sizes.pswpout)),
    ])
}

pub(crate) fn unmanaged_json(unmanaged: &Unmanaged) -> Value {
    Value::from_iter([
        ("pid", Value::from(unmanaged.pid)),
        ("name", Value::from(unmanaged.name.as_str())),
        ("why", Value::from(unmanaged.why.as_str())),
        ("resident_bytes", Value::from(unmanaged.resident_bytes)),
        ("resident_bytes_max", Value::from(unmanaged.resident_bytes_max)),
    ])
}

/// What is said of a process that is found not to be managed.
pub(crate) fn unmanaged_line(unmanaged: &Unmanaged) -> String {
    format!("process {} ({}) runs unmanaged: {}", unmanaged.pid, unmanaged.name, unmanaged.why)
}

/// What is said when a process is refused because there are as many as there may be.
pub(crate) fn full_line(most: usize) -> String {
    let bound = if most < quire::control::MEMBERS_MAX {
        "as many as --members-max allows"
    } else {
        "the most that quire can manage"
    };
    format!("the run has {most} processes, {bound}")
}

/// What memory that is not managed is, in words.
fn parts_of(unmanaged: InMemory, shared_by: Option<(String, u32, u64)>) -> String {
    let InMemory { bytes, shared_bytes, kernel_bytes } = unmanaged;
    let by = shared_by.map(|(name, pid, _)| format!(" (most of it in process {pid}, {name})"));
    format!(
        "{} of shared memory and files in memory{}, {} of page tables and other structures of the kernel's, {} \
         of stacks and data of programs and libraries",
        Human(shared_bytes),
        by.filter(|_| shared_bytes > 0).unwrap_or_default(),
        Human(kernel_bytes),
        Human(bytes.saturating_sub(shared_bytes + kernel_bytes))
    )
}

/// A size as options take it, in whole MiB, at least as large.
fn argument(bytes: u64) -> String {
    format!("{}M", bytes.div_ceil(1 << 20))
}

/// A budget in which so much that is not managed leaves something for what is.
fn ample_for(unmanaged_bytes: u64) -> String {
    argument(unmanaged_bytes + unmanaged_bytes / 8 + 2 * BUDGET_MIN_BYTES)
}

/// What is said when what is not managed leaves little of the budget.
pub(crate) fn little_left_line(
    unmanaged: InMemory,
    budget_bytes: u64,
    shared_by: Option<(String, u32, u64)>,
) -> String {
    format!(
        "what quire does not manage takes {} of the {} that --memory allows: {}; nothing of it can be swapped, so \
         give --memory {} or more",
        Human(unmanaged.bytes),
        Human(budget_bytes),
        parts_of(unmanaged, shared_by),
        ample_for(unmanaged.bytes)
    )
}

/// What is said when the kernel has killed processes because the cgroup was full.
pub(crate) fn killed_line(kills: u64, account: &Account, limit_bytes: Option<u64>) -> String {
    let limit_bytes = limit_bytes.unwrap_or_default();
    let killed = format!("the kernel killed {kills} process(es) of the run");
    match account.unmanaged_memory_max {
        Some(unmanaged) => format!(
            "{killed}: they came to {} before managed memory could give way; quire does not manage {}; give \
             --memory {} or more",
            Human(limit_bytes),
            parts_of(unmanaged, account.most_shared_by.clone()),
            ample_for(unmanaged.bytes.max(limit_bytes))
        ),
        None => format!(
            "{killed}: what quire does not manage (stacks, shared memory, files in memory, page tables) took more \
             than the {} beside the budget; run without --managed-only, or with --no-cgroup, or raise --memory",
            Human(limit_bytes.saturating_sub(account.budget_bytes))
        ),
    }
}

/// What is said of a run that thrashes.
pub(crate) fn thrashing_line(ease_bytes: u64) -> String {
    format!(
        "the run is thrashing: it does little but wait for pages that had to leave memory; --memory {0} would end \
         that, or quire set memory={0} while it goes on, as far as twice its budget",
        argument(ease_bytes)
    )
}

const LOST_PAGE: &str = "an access to that page is a SIGBUS, all other pages are as they were";

/// Why a member could not go on, in one line.
pub(crate) fn obituary_line(death: Death, name: Option<&str>, account: &Account) -> String {
    let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
    let process = format!("process {}{name}", death.pid);
    match death.obituary {
        Obituary::OutOfMemory => {
            format!("{process} ran out of memory: {}", why_out_of_memory(death, account))
        }
        Obituary::ChildNotManaged => format!(
            "{process} forked process {}, which was ended: {}; it would have run unmanaged, and \
             read zeros in place of its data",
            death.detail as u32,
            why_child_not_managed((death.detail >> 32) as i32, account)
        ),
        Obituary::KernelRefused => {
            let errno = i32::try_from(death.detail).unwrap_or_default();
            format!(
                "{process} was ended: the kernel refused a call without which memory cannot be \
                 managed: {}; run quire doctor",
                io::Error::from_raw_os_error(errno)
            )
        }
        Obituary::SwapReadFailed => {
            if let Some(far) = &account.far {
                return format!("{process} lost a page that was on {}; {LOST_PAGE}", far.name);
            }
            let folder = account.swap_folder.as_deref().unwrap_or_else(|| Path::new("?"));
            format!(
                "{process} lost a page: the swap file in {} could not be read, or gave other bytes \
                 back, at byte {}; {LOST_PAGE}; check the disk",
                folder.display(),
                death.detail * 64
            )
        }
        Obituary::PoolCorrupt => format!(
            "{process} lost a page: its compressed bytes in memory are not those that were stored, \
             for the page at {:#x}; {LOST_PAGE}; check the machine's memory",
            death.detail
        ),
        Obituary::None => format!("{process} ended"),
    }
}

/// What was full, and what would help.
fn why_out_of_memory(death: Death, account: &Account) -> String {
    let [budget, own, swap] =
        [account.budget_bytes, account.member_bytes_max, account.swap_file_limit_bytes].map(Human);
    let [twice, twice_own, twice_swap] = [budget, own, swap].map(|size| argument(2 * size.0));
    // All data, with room for faults, and for what is not managed.
    let all = account.wanted_bytes_max.max(account.budget_bytes);
    let beside = account.unmanaged_memory_max.map_or(0, |memory| memory.bytes);
    let enough = argument(all + all / 16 + beside);
    let is_full = death.detail & 1 != 0;
    let unanswering = death.detail >> OUT_OF_MEMORY_UNANSWERING_SHIFT;
    if unanswering > 0 {
        return format!(
            "{unanswering} other process(es) hold much of the budget of {budget} and are stopped, \
             traced or frozen; let them go on, or give --memory {enough}"
        );
    }
    if let (true, Some(far)) = (is_full, &account.far) {
        let name = &far.name;
        return format!(
            "the budget of {budget} is full, and nothing more went to {name}: it takes no pages, or not as fast as they \
             come, or --far-max is reached; give --memory {enough}, which is all that was wanted until then"
        );
    }
    match (swap.0, is_at_own_limit(death, account)) {
        (0, true) => format!(
            "the {own} that one process may hold are full even after compression, and there is no \
             swap file; add --swap-file DIR, or give --memory-per-process {twice_own} or more"
        ),
        (0, false) => format!(
            "the budget of {budget} is full even after compression, and there is no swap file; add \
             --swap-file DIR, or give --memory {enough}, which is all that was wanted until then"
        ),
        (_, true) => format!(
            "what it needs at once does not fit into the {own} that one process may hold; give \
             --memory-per-process {twice_own} or more"
        ),
        (_, false) if is_full => format!(
            "the budget of {budget} and the swap file of {swap} are full; give --swap-max {twice_swap}, or --memory \
             {enough}, which is all that was wanted until then"
        ),
        (_, false) => format!(
            "what the processes need at once does not fit into the budget of {budget}; give --memory {twice} or more"
        ),
    }
}

/// Whether a member held all but a reserve of what one member may hold: then that limit was reached,
/// and not the budget.
fn is_at_own_limit(death: Death, account: &Account) -> bool {
    let held = death.held_pages * PAGE_SIZE as u64;
    let most = account.member_bytes_max;
    most != 0 && held >= most - most / 8 && account.budget_bytes > most
}

/// Why a fork's child could not join, by the errno that it left.
fn why_child_not_managed(errno: i32, account: &Account) -> String {
    match Errno::from_raw_os_error(errno) {
        Errno::USERS => full_line(account.members_max as usize),
        Errno::CONNREFUSED => {
            "the run's supervisor cannot be reached from its network namespace".into()
        }
        Errno::AGAIN => "the kernel gave it no thread; look for a limit on processes".into(),
        errno => format!("it could not join the run: {}", io::Error::from(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::counts::Counts;
    use crate::supervisor::Sizes;

    fn ended() -> Ended {
        let account = Account {
            budget_bytes: 256 << 20,
            held_bytes_max: 255 << 20,
            wanted_bytes_max: 1 << 30,
            processes: 1,
            counts: Counts::of_events(&[
                (Event::Pswpout, 262_144),
                (Event::Zswpout, 131_072),
                (Event::ZswpoutBytes, 128 << 20),
                (Event::SwpoutZero, 131_072),
            ]),
            ..Account::default()
        };
        Ended {
            account,
            by_member: ByMember::default(),
            cgroup_bytes_max: None,
            cgroup_limit_bytes: None,
            wall_seconds: 1.5,
            exit_status: 3,
        }
    }

    #[test]
    fn a_run_is_one_line() {
        assert_eq!(
            ended().line(),
            "wanted 1 GiB at most, held 255 MiB of 256 MiB; 1 GiB swapped out, compressed 4.0 to \
             1, 50% of one value"
        );
        let mut unused = ended();
        unused.account.counts = Counts::default();
        assert!(unused.line().ends_with("; nothing was swapped"));
        unused.account.processes = 0;
        assert_eq!(unused.line(), "no process of the run was managed");
    }

    #[test]
    fn what_is_on_a_server_is_said_with_its_name() {
        let mut run = ended();
        let [bytes_max, bytes_out, bytes_in] = [3 << 20, 5 << 20, 7 << 20];
        run.account.far =
            Some(FarAccount { name: "pages:6379".into(), bytes_max, bytes_out, bytes_in });
        let line = run.line();
        assert!(
            line.ends_with(", 3 MiB on pages:6379 (5 MiB went there, 7 MiB came back)"),
            "{line}"
        );
        assert!(run.json().contains("\"far_bytes_max\": 3145728,\n  \"far_bytes_out\": 5242880"));
        let death = |obituary, detail| Death { pid: 7, obituary, detail, held_pages: 0 };
        let full = obituary_line(death(Obituary::OutOfMemory, 1), None, &run.account);
        assert!(full.contains("nothing more went to pages:6379"), "{full}");
        let lost = obituary_line(death(Obituary::SwapReadFailed, 9), None, &run.account);
        assert!(lost.contains("lost a page that was on pages:6379"), "{lost}");
    }

    #[test]
    fn the_json_has_every_counter_once() {
        let json = ended().json();
        for event in Event::ALL {
            assert_eq!(json.matches(&format!("\"{}\": ", event.name())).count(), 1, "{event:?}");
        }
        assert!(json.starts_with("{\n  \"exit_status\": 3,\n  \"wall_seconds\": 1.500000,\n"));
        assert!(json.contains("\"cgroup_bytes_max\": null,"));
        let end = "  \"members_forgotten\": 0,\n  \"members\": [],\n  \"unmanaged\": []\n}\n";
        assert!(json.ends_with(end), "{json}");
    }

    #[test]
    fn an_obituary_says_what_to_do() {
        let death = |obituary, detail| Death { pid: 7, obituary, detail, held_pages: 0 };
        let mut account = ended().account;
        let line = obituary_line(death(Obituary::OutOfMemory, 0), Some("sh"), &account);
        assert!(line.starts_with("process 7 (sh) ran out of memory: the budget of 256 MiB"));
        assert!(line.ends_with(
            "add --swap-file DIR, or give --memory 1088M, which is all that was wanted until then"
        ));
        account.swap_file_limit_bytes = 1 << 30;
        let line = obituary_line(death(Obituary::OutOfMemory, 0), None, &account);
        assert!(
            line.ends_with("does not fit into the budget of 256 MiB; give --memory 512M or more"),
            "{line}"
        );
        let line = obituary_line(death(Obituary::OutOfMemory, 1), None, &account);
        assert!(
            line.contains("swap file of 1 GiB are full; give --swap-max 2048M, or --memory 1088M"),
            "{line}"
        );
        let stopped = 2 << OUT_OF_MEMORY_UNANSWERING_SHIFT;
        let line = obituary_line(death(Obituary::OutOfMemory, stopped), None, &account);
        assert!(line.contains("2 other process(es) hold"), "{line}");
        let line = obituary_line(death(Obituary::KernelRefused, 12), None, &account);
        assert!(line.contains("Cannot allocate memory"), "{line}");
        account.swap_folder = Some("/scratch".into());
        let line = obituary_line(death(Obituary::SwapReadFailed, 16), None, &account);
        assert!(line.contains("swap file in /scratch"), "{line}");
        assert!(line.contains("at byte 1024; an access"), "{line}");
        let line = obituary_line(death(Obituary::PoolCorrupt, 0x7000), None, &account);
        assert!(line.contains("for the page at 0x7000; an access"), "{line}");
    }

    #[test]
    fn a_child_that_could_not_join_is_told_the_real_cause() {
        let mut account = ended().account;
        account.members_max = 8;
        let line = |errno: Errno, account: &Account| {
            let detail = (errno.raw_os_error() as u64) << 32 | 8;
            let obituary = Obituary::ChildNotManaged;
            obituary_line(Death { pid: 7, obituary, detail, held_pages: 0 }, None, account)
        };
        let full = line(Errno::USERS, &account);
        assert!(full.starts_with("process 7 forked process 8, which was ended: "), "{full}");
        assert!(
            full.contains("the run has 8 processes, as many as --members-max allows;"),
            "{full}"
        );
        account.members_max = 256;
        let full = line(Errno::USERS, &account);
        assert!(full.contains("256 processes, the most that quire can manage;"), "{full}");
        let away = line(Errno::CONNREFUSED, &account);
        assert!(away.contains("network namespace") && !away.contains("256"), "{away}");
        assert!(line(Errno::AGAIN, &account).contains("no thread"));
        assert!(line(Errno::MFILE, &account).contains("Too many open files"));
    }

    #[test]
    fn a_process_at_its_own_bound_is_told_of_that_one() {
        let mut account = ended().account;
        account.member_bytes_max = 16 << 20;
        let death =
            |held_pages| Death { pid: 7, obituary: Obituary::OutOfMemory, detail: 1, held_pages };
        let line = obituary_line(death(4000), None, &account);
        assert!(line.contains("the 16 MiB that one process may hold"), "{line}");
        assert!(line.ends_with("or give --memory-per-process 32M or more"), "{line}");
        let line = obituary_line(death(400), None, &account);
        assert!(line.contains("the budget of 256 MiB is full"), "{line}");
    }

    #[test]
    fn several_members_are_named_by_what_they_held() {
        let mut ended = ended();
        assert_eq!((ended.members_line(), ended.unmanaged_line()), (None, None));
        for pid in 1..=7 {
            let sizes = Sizes { held_pages_max: 256 * u64::from(pid), ..Sizes::default() };
            let end = if pid == 7 { End::Killed(9) } else { End::Exited(2) };
            ended.by_member.members.push(Entry { pid, name: "\"cc\"".into(), end, sizes });
        }
        ended.account.processes = 9;
        let line = ended.members_line().unwrap();
        assert!(line.starts_with("9 processes; most held: \"cc\" (7) 7 MiB, "), "{line}");
        assert_eq!(line.matches("MiB").count(), NAMED_MAX);
        let json = ended.json();
        let row = "{\"pid\":7,\"name\":\"\\\"cc\\\"\",\"end\":\"killed\",\"end_number\":9,";
        assert!(json.contains(row), "{json}");
        ended.account.unmanaged_processes = 2;
        ended.account.unmanaged_bytes_max = 3 << 20;
        let line = ended.unmanaged_line().unwrap();
        assert!(line.starts_with("2 process(es) ran unmanaged, with 3 MiB in memory"), "{line}");
    }
}
