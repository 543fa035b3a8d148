//! Reads runs from outside: `ps`, `stat`, `vmstat`, `trace` and `set` attach here.
//!
//! This file owns the search: over the descriptors of all processes that this user may look into, for
//! the control memfd that a supervisor has open. Nothing is asked of the supervisor, and nothing
//! changes for the run: its control page is mapped, by default to be read. [`counts`] and [`gauges`]
//! read what the page says, of a run or of one of its members; [`waiter`] waits until a process that
//! is looked at has ended.

pub(crate) mod counts;
pub(crate) mod gauges;
pub(crate) mod waiter;

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context as _, Result, bail};
use quire::control::VERSION;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use self::counts::{Scope, slot_of};
use crate::procfs;
pub(crate) use crate::sys::control::Access;
use crate::sys::control::{ControlMap, NotAttached};

/// The control memfd, as /proc shows it.
const CONTROL_LINK: &str = "/memfd:quire-control (deleted)";

pub(crate) struct Run {
    pub control: ControlMap,
    pub supervisor_pid: u32,
    /// Readable once the supervisor has ended.
    pub supervisor: OwnedFd,
}

/// A process that was asked for, and its run.
pub(crate) struct Attached {
    pub run: Run,
    /// A supervisor stands for its run.
    pub scope: Scope,
    /// Readable once the process has ended.
    pub process: OwnedFd,
}

/// What a search came upon.
#[derive(Default)]
pub(crate) struct Found {
    pub runs: Vec<Run>,
    /// Supervisors of another version, and which.
    pub others: Vec<(u32, u32)>,
}

/// The run of a process, which is one of its members, or its supervisor.
pub(crate) fn attach(pid: u32, access: Access) -> Result<Attached> {
    // Before the search: what is found is then found for this process, and not for a later one of
    // the same number.
    let process = open_process(pid)?;
    let found = find(access)?;
    for run in found.runs {
        let scope = if run.supervisor_pid == pid {
            Scope::Run
        } else if slot_of(&run.control, pid).is_some() && may_name(run.supervisor_pid, pid) {
            Scope::Member(pid)
        } else {
            continue;
        };
        return Ok(Attached { run, scope, process });
    }
    if procfs::stat(pid).is_none_or(|stat| stat.is_dead) {
        bail!("process {pid} has ended");
    }
    let version = ancestry(pid)
        .find_map(|pid| found.others.iter().find(|other| other.0 == pid).map(|other| other.1));
    if let Some(version) = version {
        bail!(
            "process {pid} is run by another version of quire: its control page has version \
             {version}, this quire knows {VERSION}; use the quire that runs it"
        );
    }
    match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!("process {pid} belongs to another user: quire may not look into it; try as root")
        }
        _ => bail!("process {pid} is not run by quire; `quire ps` lists what is"),
    }
}

/// All runs that this user may look into; an error where there is none.
pub(crate) fn all() -> Result<Vec<Run>> {
    let found = find(Access::Read)?;
    if found.runs.is_empty() {
        match found.others.first() {
            Some((pid, version)) => bail!(
                "process {pid} is another version of quire: its control page has version \
                 {version}, this quire knows {VERSION}; use the quire of process {pid}"
            ),
            None => {
                bail!("there is no run that this user may look into; start one with `quire run`")
            }
        }
    }
    Ok(found.runs)
}

fn open_process(pid: u32) -> Result<OwnedFd> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let opened = number.ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
    match opened {
        Ok(process) => Ok(process),
        Err(Errno::SRCH) => bail!("there is no process {pid}"),
        // The id of a thread.
        Err(Errno::INVAL | Errno::NOENT) => bail!("{pid} is a thread; give the id of its process"),
        Err(errno) => Err(errno).with_context(|| format!("cannot watch process {pid}")),
    }
}

/// All runs that this user may look into, in order of their supervisors' process ids, and the
/// supervisors of other versions. Processes that may not be looked into, and those that end
/// meanwhile, are passed over.
pub(crate) fn find(access: Access) -> Result<Found> {
    let mut found = Found::default();
    for entry in fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else { continue };
        for descriptor in descriptors.flatten() {
            let path = descriptor.path();
            if fs::read_link(&path).is_ok_and(|link| link.as_os_str() == CONTROL_LINK) {
                found.look_at(pid, &path, access);
            }
        }
    }
    found.runs.sort_by_key(|run| run.supervisor_pid);
    Ok(found)
}

impl Found {
    fn look_at(&mut self, pid: u32, path: &std::path::Path, access: Access) {
        let Ok(supervisor) = open_process(pid) else { return };
        let rights = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        // The number may be something else's since the link was read.
        let flags = rights | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let Ok(memfd) = rustix::fs::open(path, flags, Mode::empty()) else { return };
        match ControlMap::attach(memfd, access) {
            // Members may have the memfd open too; the page names the supervisor.
            Ok(control) if control.supervisor_pid.load(Relaxed) == pid => {
                self.runs.push(Run { control, supervisor_pid: pid, supervisor });
            }
            Err(NotAttached::OtherVersion(version)) => self.others.push((pid, version)),
            Ok(_) | Err(NotAttached::NotControl) => {}
        }
    }
}

/// Whether a supervisor is believed that a process is its member. Root finds the control pages of all
/// users, and one of them could name any process.
pub(crate) fn may_name(supervisor_pid: u32, pid: u32) -> bool {
    let users = [supervisor_pid, pid].map(procfs::user);
    is_believed(users) || ancestry(pid).any(|ancestor| ancestor == supervisor_pid)
}

/// The same by the users of both: root's supervisor has members of any user, another one of its own,
/// and its own descendants that became another user's.
fn is_believed([supervisor, member]: [Option<u32>; 2]) -> bool {
    const ROOT: u32 = 0;
    supervisor.is_some_and(|user| user == ROOT || member == Some(user))
}

/// A process, its parent, and so on.
fn ancestry(pid: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(pid), |&pid| {
        procfs::stat(pid).map(|stat| stat.parent_pid).filter(|&parent| parent > 0)
    })
}

/// Whether a process's descriptor says that it has ended.
pub(crate) fn has_ended(process: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())) == Ok(1)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn message(pid: u32) -> String {
        match attach(pid, Access::Read) {
            Ok(attached) => panic!("{pid} is run by quire: {:?}", attached.scope),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn what_is_no_member_is_named() {
        let parent = std::os::unix::process::parent_id();
        assert_eq!(
            message(parent),
            format!("process {parent} is not run by quire; `quire ps` lists what is")
        );
        assert_eq!(message(u32::MAX), "there is no process 4294967295");
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        // Ended, and not waited for.
        while !procfs::stat(pid).unwrap().is_dead {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(message(pid), format!("process {pid} has ended"));
        child.wait().unwrap();
    }

    #[test]
    fn a_strangers_page_may_not_name_somebody_elses_process() {
        assert!(is_believed([Some(1000), Some(1000)]) && is_believed([Some(0), Some(1000)]));
        assert!(!is_believed([Some(1000), Some(0)]) && !is_believed([Some(1000), Some(1001)]));
        assert!(!is_believed([None, None]) && !is_believed([Some(1000), None]));
        // Whatever user a descendant became: a supervisor is an ancestor of its own, as this process
        // is of its child.
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let is_ancestor = ancestry(child.id()).any(|ancestor| ancestor == std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_ancestor);
    }
}
