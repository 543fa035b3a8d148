//! `quire run --progress`: a line on the terminal that says what the run holds and how long it waits for memory.
//!
//! It is written over itself each second, and taken away when the run ends; what else is written goes over it. Nothing
//! is written where standard error is no terminal.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use quire::control::Control;
use quire::units::PAGE_SIZE;

use crate::runs::counts::{Counts, Scope};
use crate::size::Human;
use crate::supervisor::Moment;

/// From one line to the next.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// What is there to the end of the line goes. The cursor is left at the line's begin.
const ERASE: &str = "\x1b[K";

/// The line, and what it was about last.
pub(crate) struct Progress {
    looked: Instant,
    seen: Counts,
    is_shown: bool,
}

/// Whether there is a terminal for it.
pub(crate) fn can_be_seen() -> bool {
    std::io::stderr().is_terminal()
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { looked: Instant::now(), seen: Counts::default(), is_shown: false }
    }

    pub(crate) fn look(&mut self, control: &Control, moment: Moment) {
        match moment {
            Moment::Period => {
                let counts = Counts::read(control, Scope::Run).unwrap_or_default();
                let waited = counts.since(&self.seen).waited_seconds();
                let line = line(control, waited / self.looked.elapsed().as_secs_f64());
                (self.looked, self.seen, self.is_shown) = (Instant::now(), counts, true);
                let line: String = line.chars().take(columns() - 1).collect();
                write(&format!("{ERASE}{line}\r"));
            }
            Moment::End if self.is_shown => write(ERASE),
            Moment::End => {}
        }
    }
}

/// A terminal that is gone is no reason to end the run.
fn write(text: &str) {
    let mut terminal = std::io::stderr();
    let _ = terminal.write_all(text.as_bytes()).and_then(|()| terminal.flush());
}

/// As many as the terminal has; some say that they have none.
fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stderr());
    size.map(|size| usize::from(size.ws_col)).ok().filter(|&columns| columns > 1).unwrap_or(80)
}

fn line(control: &Control, waited_a_second: f64) -> String {
    let bytes = |pages: u64| Human(pages * PAGE_SIZE as u64);
    let (wanted, held) = (bytes(control.wanted()), bytes(control.held()));
    let budget = bytes(control.budget_pages.load(Relaxed));
    let beside = match control.unmanaged_pages.load(Relaxed) {
        0 => String::new(),
        pages => format!(" and {} unmanaged", bytes(pages)),
    };
    format!(
        "quire: wants {wanted}, holds {held}{beside} of {budget}, waits {waited_a_second:.2} s a second"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    #[test]
    fn the_line_says_what_is_held_and_how_long_is_waited() {
        let control = ControlMap::create().unwrap();
        control.budget_pages.store(1 << 15, Relaxed);
        control.take_slot(0, 1);
        control.seats[0].account.put_in(1 << 14);
        control.members[0].wanted_pages.store(1 << 16, Relaxed);
        let expected = "quire: wants 256 MiB, holds 64 MiB of 128 MiB, waits 0.25 s a second";
        assert_eq!(line(&control, 0.25), expected);
        control.unmanaged_pages.store(1 << 10, Relaxed);
        assert!(line(&control, 0.0).contains("holds 64 MiB and 4 MiB unmanaged of 128 MiB"));
    }
}
