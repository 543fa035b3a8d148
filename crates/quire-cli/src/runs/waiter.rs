//! Waits until the processes that a command looks at have ended, or the program that bounds the time has.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command};
use std::time::Instant;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{has_ended, open_process};
use crate::sys::signals::{self, Signals};
use crate::sys::spawn;

/// Waits, as long as there is something to look at.
pub(crate) struct Waiter {
    signals: Signals,
    program: Option<(Child, OwnedFd)>,
}

impl Waiter {
    /// Starts a program of these words, where there are any: its end then ends the wait, as a signal does.
    pub(crate) fn start(program: &[OsString]) -> Result<Waiter> {
        let signals = Signals::take(&signals::ENDS).context("cannot take signals over")?;
        let program = program.split_first().map(|(name, arguments)| {
            let mut command = Command::new(name);
            command.args(arguments);
            let child = spawn::spawn(command, signals.inherited(), None)
                .with_context(|| format!("cannot run {}", name.display()))?
                .child;
            let process = open_process(child.id())?;
            anyhow::Ok((child, process))
        });
        Ok(Waiter { signals, program: program.transpose()? })
    }

    /// Waits until `until`. Where there is nothing more to wait for, it returns the exit status for the
    /// command that waits: that of the program which bounds the time, else 0. The end of the processes
    /// that are looked at ends the wait only where there is no such program.
    pub(crate) fn wait(
        &mut self,
        until: Instant,
        watched: &[BorrowedFd<'_>],
    ) -> Result<Option<u8>> {
        loop {
            let mut alive: Vec<BorrowedFd<'_>> = vec![self.signals.as_fd()];
            match &self.program {
                Some((_, process)) => alive.push(process.as_fd()),
                None => alive.extend(watched.iter().filter(|process| !has_ended(process))),
            }
            if alive.len() == 1 {
                return Ok(Some(0));
            }
            let mut polled: Vec<PollFd<'_>> =
                alive.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            let left = until.saturating_duration_since(Instant::now());
            match poll(&mut polled, Some(&Timespec::try_from(left)?)) {
                Ok(0) => return Ok(None),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("cannot wait for events"),
            }
            if self.signals.try_read().is_some() {
                return Ok(Some(0));
            }
            if let Some((child, process)) = &mut self.program
                && has_ended(process)
            {
                let status = child.wait().context("cannot wait for the program")?;
                let killed = || 128 + status.signal().unwrap_or_default();
                return Ok(Some(status.code().unwrap_or_else(killed) as u8));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_wait_ends_with_its_program() {
        let program = ["sh", "-c", "exit 7"].map(OsString::from);
        let mut waiter = Waiter::start(&program).unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(waiter.wait(far, &[]).unwrap(), Some(7));
    }

    #[test]
    fn a_wait_ends_with_the_last_of_those_it_watches() {
        let mut child = Command::new("sleep").arg("0.05").spawn().unwrap();
        let process = open_process(child.id()).unwrap();
        let mut waiter = Waiter::start(&[]).unwrap();
        assert_eq!(waiter.wait(Instant::now(), &[process.as_fd()]).unwrap(), None);
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(waiter.wait(far, &[process.as_fd()]).unwrap(), Some(0));
        child.wait().unwrap();
    }
}
