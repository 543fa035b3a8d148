//! What /proc tells about processes.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::str::FromStr;
use std::sync::atomic::Ordering::Relaxed;

use quire::control::Member;
use quire::process::THREAD_NAMES;
use quire::units::PAGE_SIZE;

use crate::supervisor::InMemory;

/// The fields of /proc/PID/stat that are needed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ProcessStat {
    pub parent_pid: u32,
    /// When the process started, in clock ticks since boot. No later process has both this and its id.
    pub start_ticks: u64,
    /// Whether it has ended and only waits for its parent.
    pub is_dead: bool,
    /// Whether a signal or a debugger has stopped it.
    pub is_stopped: bool,
    /// The scheduler's word for it: one of `/proc`'s letters.
    pub state: char,
}

/// All processes that there are, by their ids.
pub(crate) fn all() -> BTreeMap<u32, ProcessStat> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, stat(pid)?))).collect()
}

/// What process `pid` has in memory, and the most that it ever had since it executed its program, in
/// bytes.
pub(crate) fn resident_bytes(pid: u32) -> Option<[u64; 2]> {
    // The user's groups come before it, and may be many.
    parse_resident(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_resident(status: &str) -> Option<[u64; 2]> {
    let of = |name| field_of(status, name).map(|kib: u64| kib * 1024);
    Some([of("VmRSS:")?, of("VmHWM:")?])
}

/// What process `pid` has in memory that the kernel cannot drop: the page cache of files it can. Memory of
/// several processes is counted whole.
pub(crate) fn in_memory(pid: u32) -> Option<InMemory> {
    parse_in_memory(
        &std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?,
        ["RssAnon:", "RssShmem:"],
    )
}

/// The same, with its part of memory that it shares with other processes. The kernel walks its page tables
/// for that.
pub(crate) fn proportional(pid: u32) -> Option<InMemory> {
    let file = |name| std::fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
    parse_in_memory(&(file("smaps_rollup")? + &file("status")?), ["Pss_Anon:", "Pss_Shmem:"])
}

/// Shared memory that process `pid`, a member, has mapped beside the compressed pool.
pub(crate) fn shared_bytes(pid: u32, member: &Member) -> u64 {
    let pool_bytes = member.pool_pages.load(Relaxed) * PAGE_SIZE as u64;
    in_memory(pid).map_or(0, |memory| memory.shared_bytes.saturating_sub(pool_bytes))
}

fn parse_in_memory(text: &str, names: [&str; 2]) -> Option<InMemory> {
    let of = |name| field_of(text, name).map(|kib: u64| kib * 1024);
    let [own, shared_bytes, kernel_bytes] = [of(names[0])?, of(names[1])?, of("VmPTE:")?];
    Some(InMemory { bytes: own + shared_bytes + kernel_bytes, shared_bytes, kernel_bytes })
}

/// What programs could have of the machine's memory now, without anything being swapped out.
pub(crate) fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    field_of(&text, "MemAvailable:").map(|kib: u64| kib * 1024)
}

/// The words with which process `pid` was started.
pub(crate) fn command_line(pid: u32) -> Option<String> {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = String::from_utf8_lossy(&words);
    Some(words.trim_end_matches('\0').replace('\0', " ")).filter(|words| !words.is_empty())
}

/// The first page of a file of `/proc/PID`, by one call: a fork and its child wait for it.
fn read(pid: u32, file: &str) -> Option<String> {
    let mut bytes = [0; 4096];
    let count = std::fs::File::open(format!("/proc/{pid}/{file}")).ok()?.read(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

pub(crate) fn stat(pid: u32) -> Option<ProcessStat> {
    parse_stat(&read(pid, "stat")?)
}

/// The CPU time of process `pid`, without that of Quire's threads, and of those of its children that it
/// has waited for.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let all = parse_ticks(&read(pid, "stat")?, 4)?;
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    let ticks = all.saturating_sub(stats.filter_map(|stat| own_ticks(&stat)).sum());
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The clock ticks that a thread has run, if it is Quire's.
fn own_ticks(stat: &str) -> Option<u64> {
    let (name, _) = stat.split_once('(')?.1.rsplit_once(") ")?;
    let is_own = THREAD_NAMES.iter().any(|own| own.to_bytes() == name.as_bytes());
    if is_own { parse_ticks(stat, 2) } else { None }
}

/// The clock ticks that a thread has run, in the first two `fields`, or a process, and its children in the
/// next two.
fn parse_ticks(line: &str, fields: usize) -> Option<u64> {
    let (_, after_name) = line.rsplit_once(") ")?;
    // Fields 14 to 17 counted from 1, where the state is 3.
    let ticks = after_name.split_ascii_whitespace().skip(11).take(fields);
    ticks.map(|field| field.parse::<u64>().ok()).sum()
}

pub(crate) fn name(pid: u32) -> Option<String> {
    Some(read(pid, "comm")?.trim_end().to_owned())
}

/// The real user id of process `pid`, if there is one: it cannot choose it, and no dumpable flag hides
/// it.
pub(crate) fn user(pid: u32) -> Option<u32> {
    parse_user(&read(pid, "status")?)
}

fn parse_user(status: &str) -> Option<u32> {
    // Real, effective, saved, of the file system. The name, in a line before, has no line breaks.
    field_of(status, "Uid:")
}

/// The first number in a line of `/proc/PID/status`.
fn field_of<T: FromStr>(status: &str, name: &str) -> Option<T> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn parse_stat(line: &str) -> Option<ProcessStat> {
    // The name is in parentheses, and may itself contain any of them and spaces.
    let (_, fields) = line.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let parent_pid = fields.next()?.parse().ok()?;
    // Field 22 counted from 1, where the state is 3 and the parent 4.
    let start_ticks = fields.nth(17)?.parse().ok()?;
    let is_dead = matches!(state, "Z" | "X");
    let is_stopped = matches!(state, "T" | "t");
    Some(ProcessStat { parent_pid, start_ticks, is_dead, is_stopped, state: state.chars().next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_contain_anything() {
        let line = "42 (a) b) S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 99 1";
        let expected = ProcessStat {
            parent_pid: 7,
            start_ticks: 12345,
            is_dead: false,
            is_stopped: false,
            state: 'S',
        };
        assert_eq!(parse_stat(line), Some(expected));
        assert_eq!(parse_ticks(line, 4), Some(5 + 6 + 7 + 8));
        assert_eq!(own_ticks(line), None);
        assert_eq!(own_ticks(&line.replace("a) b", "quire-bench")), None);
        assert_eq!(own_ticks(&line.replace("a) b", "quire-fault")), Some(5 + 6));
        let stopped = parse_stat(&line.replace(" S ", " t ")).unwrap();
        assert!(stopped.is_stopped && !stopped.is_dead);
    }

    #[test]
    fn a_process_is_its_real_users() {
        let status = "Name:\tUid:\nUmask:\t0022\nUid:\t1000\t0\t0\t0\nGid:\t5\t5\t5\t5\n";
        assert_eq!(parse_user(status), Some(1000));
        assert_eq!(user(std::process::id()), Some(rustix::process::getuid().as_raw()));
        assert_eq!(user(u32::MAX), None);
    }

    #[test]
    fn what_cannot_be_dropped_is_counted_whole_or_in_part() {
        let status =
            "Name:\tx\nRssAnon:\t 8 kB\nRssFile:\t 64 kB\nRssShmem:\t 16 kB\nVmPTE:\t 4 kB\n";
        let of = |bytes, shared_bytes| InMemory { bytes, shared_bytes, kernel_bytes: 4096 };
        assert_eq!(
            parse_in_memory(status, ["RssAnon:", "RssShmem:"]),
            Some(of(28 << 10, 16 << 10))
        );
        let both = format!("Pss_Anon: 6 kB\nPss_Shmem: 2 kB\n{status}");
        assert_eq!(
            parse_in_memory(&both, ["Pss_Anon:", "Pss_Shmem:"]),
            Some(of(12 << 10, 2 << 10))
        );
        let own = in_memory(std::process::id()).unwrap();
        let part = proportional(std::process::id()).unwrap();
        assert!(part.bytes > 0 && part.shared_bytes <= own.shared_bytes, "{own:?} {part:?}");
    }

    #[test]
    fn what_a_process_has_in_memory_is_bytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        assert_eq!(parse_resident(status), Some([1 << 20, 2 << 20]));
        // A kernel thread, or one that has ended.
        assert_eq!(parse_resident("Name:\tx\n"), None);
        let [now, most] = resident_bytes(std::process::id()).unwrap();
        assert!(now > 0 && most >= now);
    }

    #[test]
    fn this_process_is_among_all() {
        let all = all();
        let here = all[&std::process::id()];
        assert_eq!(here.parent_pid, std::os::unix::process::parent_id());
        assert!(all.len() > 1 && command_line(std::process::id()).is_some());
    }

    #[test]
    fn this_process_has_a_parent_and_a_name() {
        let here = stat(std::process::id()).unwrap();
        assert_eq!(Some(here.parent_pid), Some(std::os::unix::process::parent_id()));
        assert!(here.start_ticks > 0 && !here.is_dead);
        assert!(name(std::process::id()).is_some() && cpu_seconds(std::process::id()).is_some());
        assert_eq!(stat(u32::MAX), None);
    }
}
