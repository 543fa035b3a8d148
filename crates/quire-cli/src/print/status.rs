//! A line on a terminal that is drawn again and again: how far something is.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

const REDRAW: Duration = Duration::from_millis(100);
/// Back to the line's start, and clear it.
const LINE_START: &str = "\r\x1b[K";

/// The line on stderr, where that is a terminal.
pub(crate) struct StatusLine {
    is_shown: bool,
    is_drawn: bool,
    drawn: Instant,
}

impl StatusLine {
    pub(crate) fn new(is_wanted: bool) -> StatusLine {
        StatusLine {
            is_shown: is_wanted && io::stderr().is_terminal(),
            is_drawn: false,
            drawn: Instant::now(),
        }
    }

    /// Draws `line`, where it is time to.
    pub(crate) fn show(&mut self, line: impl FnOnce() -> String) {
        if self.is_shown && self.drawn.elapsed() >= REDRAW {
            (self.is_drawn, self.drawn) = (true, Instant::now());
            // The work goes on even where the terminal is closed.
            let _ = write!(io::stderr(), "{LINE_START}{}", line());
        }
    }

    /// Leaves an empty line for what is said next.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            let _ = write!(io::stderr(), "{LINE_START}");
        }
    }
}
