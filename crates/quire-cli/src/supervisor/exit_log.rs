//! The exit log: which processes were members, and how each of them ended.
//!
//! Owns what is known of the members that have left, the latest of them one by one. Leaves to
//! `members` what they held, and to the tally what all of them counted.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use super::members::Sizes;
use crate::procfs;
use crate::sys::{peer, pidfd};

/// Most members that are remembered one by one.
const LENGTH_MAX: usize = 256;

/// The process behind a member, as of when it joined.
pub(super) struct Identity {
    pub pid: u32,
    /// The program's name, where it could be read.
    pub name: String,
    /// Tells how it ended.
    process: Option<OwnedFd>,
}

impl Identity {
    /// Of the process `pid` at the other end of a socket.
    pub(super) fn of_peer(pid: u32, socket: BorrowedFd<'_>) -> Identity {
        let name = procfs::name(pid).unwrap_or_default();
        Identity { pid, name, process: peer::pidfd_of(socket) }
    }
}

/// How a member came to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Its parent has not waited for it yet, or the kernel does not say.
    Unknown,
    /// It executed another program, and may have joined again.
    Executed,
    Exited(u8),
    Killed(u8),
    /// It is still there.
    None,
}

impl End {
    pub(crate) fn of_status(status: ExitStatus) -> End {
        match (status.code(), status.signal()) {
            (Some(code), _) => End::Exited(code as u8),
            (None, Some(signal)) => End::Killed(signal as u8),
            (None, None) => End::Unknown,
        }
    }
}

/// A member's line in the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub pid: u32,
    pub name: String,
    pub end: End,
    pub sizes: Sizes,
}

/// The members that have left, oldest first.
#[derive(Default)]
pub(super) struct ExitLog {
    entries: VecDeque<(Entry, Option<OwnedFd>)>,
    /// Members that were forgotten for later ones.
    pub(super) forgotten: u64,
}

impl ExitLog {
    pub(super) fn push(&mut self, identity: Identity, sizes: Sizes) {
        if self.entries.len() == LENGTH_MAX {
            self.entries.pop_front();
            self.forgotten += 1;
        }
        let Identity { pid, name, process } = identity;
        self.entries.push_back((Entry { pid, name, end: End::Unknown, sizes }, process));
    }

    /// Process `pid` has executed a program: its former self did not end.
    pub(super) fn note_executed(&mut self, pid: u32) {
        let mut latest = self.entries.iter_mut().rev();
        if let Some((entry, process)) =
            latest.find(|(entry, _)| entry.pid == pid && entry.end == End::Unknown)
            // Else it is a later process of the same number.
            && process.as_ref().is_none_or(|process| !crate::runs::has_ended(process))
        {
            entry.end = End::Executed;
            *process = None;
        }
    }

    /// Looks up how members ended, where that is not known yet.
    pub(super) fn look(&mut self) {
        for (entry, process) in &mut self.entries {
            let status = process.as_ref().and_then(|process| pidfd::wait_status(process.as_fd()));
            if let Some(status) = status {
                entry.end = End::of_status(ExitStatus::from_raw(status));
                *process = None;
            }
        }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().map(|(entry, _)| entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(pid: u32) -> Identity {
        Identity { pid, name: format!("p{pid}"), process: None }
    }

    #[test]
    fn the_latest_are_remembered_and_the_others_counted() {
        let mut exit_log = ExitLog::default();
        for pid in 0..LENGTH_MAX as u32 + 10 {
            exit_log.push(identity(pid), Sizes { pgfault: pid.into(), ..Sizes::default() });
        }
        assert_eq!(exit_log.forgotten, 10);
        let first = exit_log.entries().next().unwrap();
        assert_eq!((first.pid, first.name.as_str(), first.sizes.pgfault), (10, "p10", 10));
        assert_eq!(exit_log.entries().count(), LENGTH_MAX);
    }

    #[test]
    fn of_a_process_that_executes_again_and_again_each_program_has_a_line() {
        let mut exit_log = ExitLog::default();
        for _ in 0..3 {
            exit_log.push(identity(7), Sizes::default());
            exit_log.note_executed(7);
        }
        exit_log.push(identity(7), Sizes::default());
        let ends: Vec<End> = exit_log.entries().map(|entry| entry.end).collect();
        assert_eq!(ends, [End::Executed, End::Executed, End::Executed, End::Unknown]);
    }

    #[test]
    fn an_end_is_told_as_wait_has_it() {
        let end = |status| End::of_status(ExitStatus::from_raw(status));
        assert_eq!((end(3 << 8), end(9)), (End::Exited(3), End::Killed(9)));
        // With a core dump.
        assert_eq!(end(11 | 0x80), End::Killed(11));
    }
}
