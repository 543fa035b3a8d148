//! Processes of a run that are no members: found, named once, and their memory shown as what it is.
//!
//! A program that clears its environment, a static one, a setuid one: none of them joins, and none says
//! so. So the supervisor looks at the process tree at intervals, of a second at least, and spends a hundredth of
//! its time on that at most. A process that was seen twice and is no member is *unmanaged*; once is not enough,
//! as between its exec and its joining any process is no member. One that is stopped, or that still runs in
//! its parent's memory (vfork), is not judged. Each unmanaged process is named once, with what its file,
//! its environment or its network namespace says about the reason.
//!
//! This module owns what was seen. It leaves to `inspect` what is in a program's way, and what is below
//! the supervisor of a run inside to that supervisor. The supervisor is no subreaper: a program's
//! orphans have the parent that they would have without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use quire::control::{Member, SOCKET_VARIABLE};

use crate::inspect;
use crate::procfs::{self, ProcessStat};
use crate::sys::kcmp;

/// The least time from one look to the next.
const PERIOD: Duration = Duration::from_secs(1);
/// The time to the next look is at least so many times that of the look itself.
const PERIOD_PER_LOOK: u32 = 100;
/// Unmanaged processes that have ended and are remembered one by one.
const PAST_MAX: usize = 256;

/// A process of the run that is no member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Unmanaged {
    pub pid: u32,
    pub name: String,
    /// Why it is none, as far as can be told.
    pub why: String,
    /// What it has in memory by the kernel's count: shared libraries and files too.
    pub resident_bytes: u64,
    /// Most of it at any time.
    pub resident_bytes_max: u64,
}

pub(super) struct Seen {
    start_ticks: u64,
    /// Once it was seen twice.
    unmanaged: Option<Unmanaged>,
}

/// The processes that a run knows, to tell which others belong to it without being members.
#[derive(Clone, Copy)]
pub(crate) struct Family<'a> {
    pub supervisor_pid: u32,
    pub members: &'a BTreeSet<u32>,
    /// Supervisors of runs inside this one.
    pub inner: &'a BTreeSet<u32>,
    /// Processes that are known to be of the run, whatever their parents are.
    pub known: &'a BTreeSet<u32>,
}

impl Family<'_> {
    /// The processes that live and are no members.
    pub(crate) fn strangers(&self, all: &BTreeMap<u32, ProcessStat>) -> Vec<u32> {
        let is_stranger = |pid: u32, stat: &ProcessStat| {
            pid != self.supervisor_pid
                && !stat.is_dead
                && !self.members.contains(&pid)
                && !self.inner.contains(&pid)
                && self.has(pid, all)
        };
        all.iter().filter(|&(&pid, stat)| is_stranger(pid, stat)).map(|(&pid, _)| pid).collect()
    }

    /// Whether a process belongs to the run, and not to one inside: the first known process on the
    /// way up its ancestors decides.
    fn has(&self, pid: u32, all: &BTreeMap<u32, ProcessStat>) -> bool {
        let parent = |&pid: &u32| all.get(&pid).map(|stat| stat.parent_pid);
        let mut is_known = false;
        for above in std::iter::successors(Some(pid), parent) {
            if above != pid && self.inner.contains(&above) {
                return false;
            }
            is_known |= above == self.supervisor_pid
                || self.members.contains(&above)
                || self.known.contains(&above);
        }
        is_known
    }
}

/// The processes of these members, and the supervisors of the runs inside, to which the other slots
/// belong.
pub(crate) fn members_and_inner<'a>(
    members: impl Iterator<Item = &'a Member>,
) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (inner, own): (Vec<_>, Vec<_>) = members.partition(|member| member.is_a_reservation());
    let pids =
        |members: Vec<&Member>| members.iter().map(|member| member.pid.load(Relaxed)).collect();
    (pids(own), pids(inner))
}

/// What the supervisor has seen of unmanaged processes.
pub(crate) struct Watch {
    /// When the next look is due.
    pub(super) next: Instant,
    /// The processes that were seen: they belong to the run, whatever their parents are by now.
    pub(super) seen: BTreeMap<u32, Seen>,
    past: Vec<Unmanaged>,
    /// Processes that were seen twice, ever.
    pub(super) found: u64,
    /// Most that all of them had in memory at a time, as far as was seen.
    pub(super) resident_bytes_max: u64,
}

impl Watch {
    /// Takes its first look after a period from now.
    pub(crate) fn new() -> Watch {
        Watch {
            next: Instant::now() + PERIOD,
            seen: BTreeMap::new(),
            past: Vec::new(),
            found: 0,
            resident_bytes_max: 0,
        }
    }

    /// The processes that are unmanaged now.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        let unmanaged = self.seen.iter().filter(|(_, seen)| seen.unmanaged.is_some());
        unmanaged.map(|(&pid, _)| pid)
    }

    /// Those that there were and are, as they were seen last.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Unmanaged> {
        self.past.iter().chain(self.seen.values().filter_map(|seen| seen.unmanaged.as_ref()))
    }

    /// Looks at all processes there are; returns those that are newly unmanaged. `why` says what the
    /// supervisor itself knows of a process.
    pub(crate) fn look(
        &mut self,
        family: Family<'_>,
        why: impl Fn(u32) -> Option<String>,
    ) -> Vec<Unmanaged> {
        let began = Instant::now();
        let mut found = Vec::new();
        let all = procfs::all();
        let strangers = family.strangers(&all);
        self.forget_all_but(&strangers, &all);
        let mut sum = 0;
        for pid in strangers {
            let stat = &all[&pid];
            let Some(seen) = self.seen.get_mut(&pid) else {
                let seen = Seen { start_ticks: stat.start_ticks, unmanaged: None };
                self.seen.insert(pid, seen);
                continue;
            };
            if seen.unmanaged.is_none() && is_settled(pid, stat) {
                let unmanaged = describe(pid, why(pid));
                found.push(unmanaged.clone());
                seen.unmanaged = Some(unmanaged);
            }
            if let Some(unmanaged) = &mut seen.unmanaged {
                unmanaged.measure();
                sum += unmanaged.resident_bytes;
            }
        }
        self.resident_bytes_max = self.resident_bytes_max.max(sum);
        self.next = Instant::now() + PERIOD.max(began.elapsed() * PERIOD_PER_LOOK);
        self.found += found.len() as u64;
        found
    }

    /// Forgets processes that have ended or joined, and numbers that are another process now.
    fn forget_all_but(&mut self, strangers: &[u32], all: &BTreeMap<u32, ProcessStat>) {
        let past = &mut self.past;
        self.seen.retain(|pid, seen| {
            let stays =
                strangers.binary_search(pid).is_ok() && all[pid].start_ticks == seen.start_ticks;
            if !stays
                && let Some(unmanaged) = seen.unmanaged.take()
                && past.len() < PAST_MAX
            {
                past.push(unmanaged);
            }
            stays
        });
    }
}

/// Whether a process that is no member will not become one either. A process that is stopped may still
/// join; one in the memory of its parent is not looked at, but the parent is.
pub(crate) fn is_settled(pid: u32, stat: &ProcessStat) -> bool {
    !stat.is_stopped && !kcmp::have_same_memory(pid, stat.parent_pid)
}

/// An unmanaged process as it is now; `why` as far as it is known already.
pub(crate) fn describe(pid: u32, why: Option<String>) -> Unmanaged {
    let mut unmanaged = Unmanaged {
        pid,
        name: procfs::name(pid).unwrap_or_default(),
        why: why.unwrap_or_else(|| why_not(pid)),
        resident_bytes: 0,
        resident_bytes_max: 0,
    };
    unmanaged.measure();
    unmanaged
}

impl Unmanaged {
    fn measure(&mut self) {
        if let Some([now, most]) = procfs::resident_bytes(self.pid) {
            self.resident_bytes = now;
            self.resident_bytes_max = self.resident_bytes_max.max(most);
        }
    }
}

/// Why a process that runs has not joined, as far as it can be seen from outside.
fn why_not(pid: u32) -> String {
    let environment = match inspect::inspect_running(pid) {
        Ok(Some(unmanaged)) => return unmanaged.why(),
        Ok(None) => std::fs::read(format!("/proc/{pid}/environ")),
        Err(error) => Err(error),
    };
    let Ok(environment) = environment else {
        return "it belongs to another user, and quire may not look at it".into();
    };
    for variable in ["LD_PRELOAD", SOCKET_VARIABLE] {
        let is_it = |word: &[u8]| {
            word.strip_prefix(variable.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
        };
        if !environment.split(|&byte| byte == 0).any(is_it) {
            return format!("{variable} is missing in its environment");
        }
    }
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    if namespace(&pid.to_string()) != namespace("self") {
        return "it executed its program in another network namespace".into();
    }
    "it could not join; its own message on stderr says why".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(parent_pid: u32) -> ProcessStat {
        ProcessStat { parent_pid, start_ticks: 1, is_dead: false, is_stopped: false, state: 'S' }
    }

    fn strangers(processes: &[(u32, u32)], members: &[u32], inner: &[u32]) -> Vec<u32> {
        let all = processes.iter().map(|&(pid, parent)| (pid, stat(parent))).collect();
        let [members, inner] = [members, inner].map(|pids| pids.iter().copied().collect());
        let known = BTreeSet::from([50]);
        let family = Family { supervisor_pid: 10, members: &members, inner: &inner, known: &known };
        family.strangers(&all)
    }

    #[test]
    fn a_process_below_the_supervisor_that_is_no_member_is_a_stranger() {
        let processes = [(10, 1), (11, 10), (12, 11), (13, 12), (20, 1), (21, 20)];
        assert_eq!(strangers(&processes, &[11], &[]), [12, 13]);
        assert_eq!(strangers(&processes, &[11, 12, 13], &[]), [0; 0]);
    }

    #[test]
    fn orphans_are_known_by_what_was_above_them() {
        // 11 is a member and no process's child any more; 50 was seen before.
        let processes = [(10, 1), (11, 1), (12, 11), (50, 1), (51, 50), (60, 1)];
        assert_eq!(strangers(&processes, &[11], &[]), [12, 50, 51]);
    }

    #[test]
    fn a_run_inside_is_its_own_supervisors_affair() {
        let processes = [(10, 1), (11, 10), (30, 11), (31, 30), (32, 31), (40, 11)];
        assert_eq!(strangers(&processes, &[11, 30], &[30]), [40]);
        // Also where the inner supervisor itself is no member.
        assert_eq!(strangers(&processes, &[11], &[30]), [40]);
    }

    #[test]
    fn a_process_is_found_at_the_second_look_once_and_remembered() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let members = BTreeSet::new();
        let inner = BTreeSet::new();
        let known = BTreeSet::from([child.id()]);
        // No process is below this one.
        let family =
            Family { supervisor_pid: u32::MAX, members: &members, inner: &inner, known: &known };
        let mut watch = Watch::new();
        let mut found = Vec::new();
        for _ in 0..3 {
            found.extend(watch.look(family, |_| None));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, found[0].name.as_str()), (child.id(), "sleep"));
        assert_eq!(found[0].why, "LD_PRELOAD is missing in its environment");
        assert!(watch.resident_bytes_max > 0);
        assert_eq!(watch.look(family, |_| None), [], "no process is left");
        let past: Vec<&Unmanaged> = watch.all().collect();
        assert_eq!((past.len(), past[0].pid, watch.found), (1, child.id(), 1));
        assert!(past[0].resident_bytes_max > 0);
    }

    #[test]
    fn a_process_that_joins_meanwhile_is_no_stranger() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let [inner, none] = [BTreeSet::new(), BTreeSet::new()];
        let child_alone = BTreeSet::from([child.id()]);
        let mut watch = Watch::new();
        let family = |members| Family {
            supervisor_pid: u32::MAX,
            members,
            inner: &inner,
            known: &child_alone,
        };
        assert_eq!(watch.look(family(&none), |_| None), [], "it was seen once");
        assert_eq!(watch.look(family(&child_alone), |_| None), [], "it is a member");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(watch.found, 0);
    }
}
