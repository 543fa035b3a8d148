//! The program: its end, its stops, and the signals that pass through the supervisor.
//!
//! The supervisor stays in the program's process group, so a terminal's signals reach both; what
//! others send to the supervisor alone is passed on. A terminal's stop is followed once the
//! program has really stopped, so that a shell's job control sees one job; a debugger's stop of
//! the program is not, as members must be able to join and leave then.

use std::process::Child;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::sys::signals::{Arrived, Signals, send};

pub(crate) struct Program {
    child: Child,
    /// Readable when [`Program::handle_signals`] has something to do.
    pub(super) signals: Signals,
    /// Whether a signal of the terminal, or one sent by hand, asked the supervisor to stop.
    is_stop_wanted: bool,
    is_stopped: bool,
}

impl Program {
    pub(crate) fn new(child: Child, signals: Signals) -> Program {
        Program { child, signals, is_stop_wanted: false, is_stopped: false }
    }

    /// Acts on the signals that came; returns the program's status when it has ended: its exit
    /// status, or 128 and the signal that killed it.
    pub(crate) fn handle_signals(&mut self) -> Option<u8> {
        while let Some(arrived) = self.signals.try_read() {
            if arrived.signal != libc::SIGCHLD {
                self.pass_on(arrived);
            }
        }
        let ended = self.look_at_child();
        if ended.is_none() && self.is_stop_wanted && self.is_stopped {
            self.is_stop_wanted = false;
            // Comes back with SIGCONT, which is passed on.
            send(std::process::id(), libc::SIGSTOP);
        }
        ended
    }

    fn pass_on(&mut self, arrived: Arrived) {
        match arrived.signal {
            libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => self.is_stop_wanted = true,
            libc::SIGCONT => self.is_stop_wanted = false,
            _ => {}
        }
        let is_with_us = || {
            let pid = Pid::from_child(&self.child);
            rustix::process::getpgid(Some(pid)).ok() == Some(rustix::process::getpgrp())
        };
        // A terminal signals the whole group: the program has it already.
        if !(arrived.is_from_kernel && is_with_us()) {
            send(self.child.id(), arrived.signal);
        }
    }

    fn look_at_child(&mut self) -> Option<u8> {
        let options = WaitIdOptions::EXITED
            | WaitIdOptions::STOPPED
            | WaitIdOptions::CONTINUED
            | WaitIdOptions::NOHANG;
        let id = || WaitId::Pid(Pid::from_child(&self.child));
        loop {
            let status = match rustix::process::waitid(id(), options) {
                Ok(Some(status)) => status,
                Ok(None) | Err(Errno::INTR) => return None,
                // Another thread waited for it: it has ended, and its status is lost.
                Err(_) => return Some(crate::QUIRE_FAILED),
            };
            if let Some(status) = status.exit_status() {
                return Some(status as u8);
            }
            if let Some(signal) = status.terminating_signal() {
                return Some(128 + signal as u8);
            }
            self.is_stopped = status.stopped();
        }
    }
}
