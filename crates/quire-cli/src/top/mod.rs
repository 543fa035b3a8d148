//! `quire top`: a full screen of the runs there are and of their processes, as top(1) has of a machine's.
//!
//! This file owns the loop: a look at all runs now and then, keys, and the terminal, which is as it was
//! whatever ends it. [`sample`] has what is seen at one look and what happened from one to the next, [`screen`]
//! what is drawn of that. Nothing is asked of a run, and nothing changes for it.

mod sample;
mod screen;

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use self::sample::{Look, Watch};
use self::screen::{Pressed, Screen, Sort};
use crate::sys::signals::{self, Signals};

/// How long a signal may wait for an answer.
const PATIENCE: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "\
Examples:
  quire top                               all runs that this user may look into
  quire top --delay 0.5 --sort waits      twice a second, those that wait most first

Keys:
  up, down     choose a run: its processes are below
  s            sort by the next column
  /            show only runs whose command has a text; Enter ends it, Esc forgets it
  q            quit

Above, behind the plus, is memory that quire does not manage, of the budget too: stacks, page tables, shared
memory.
Waits are seconds that threads waited for memory, of each second; a process with several threads can
have more than one. Without colours, and in ASCII, where NO_COLOR is set or the locale is not UTF-8.";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// Seconds from one look to the next
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = crate::vmstat::parse_delay)]
    pub delay: Duration,

    /// What is sorted by
    #[arg(long, short, value_enum, default_value_t = Sort::Pid)]
    pub sort: Sort,
}

pub(crate) fn top(args: &TopArgs) -> Result<u8> {
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        bail!("quire top needs a terminal; `quire ps` and `quire vmstat 1` print lines");
    }
    let signals = Signals::take(&signals::ENDS).context("cannot take signals over")?;
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let watched = watch(&mut terminal, args, &signals);
    ratatui::restore();
    watched?;
    Ok(0)
}

/// Draws until a key or a signal ends it.
fn watch(terminal: &mut DefaultTerminal, args: &TopArgs, signals: &Signals) -> Result<()> {
    let mut watch = Watch::default();
    let mut screen = Screen::new(args.sort, Screen::is_plain());
    let mut next = Instant::now();
    while signals.try_read().is_none() {
        if Instant::now() >= next {
            screen.show(watch.take(Look::now()?));
            next = Instant::now() + args.delay;
        }
        terminal.draw(|frame| screen.draw(frame)).context("the terminal cannot be drawn on")?;
        let left = next.saturating_duration_since(Instant::now()).min(PATIENCE);
        if !event::poll(left).context("the terminal cannot be read")? {
            continue;
        }
        let Event::Key(key) = event::read().context("the terminal cannot be read")? else {
            continue;
        };
        let is_ctrl_c =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        let is_pressed = key.kind != KeyEventKind::Release;
        if is_ctrl_c || is_pressed && screen.press(key.code) == Pressed::Quit {
            break;
        }
    }
    Ok(())
}
