//! `quire set`: changes a setting of a run while it goes on.
//!
//! Settings are words of the control page that members read at every use: a change is a store, and
//! holds for the whole tree from its next fault or reclaim on. The budget is the supervisor's to change, for the
//! kernel's limit goes with it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use quire::control::Control;
use quire::units::PAGE_SIZE;

use crate::cli::parse_folio_order;
use crate::run::budget_min_bytes;
use crate::runs::{self, Access};
use crate::size::{Human, Size, machine_memory_bytes};

/// How long the supervisor may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
/// How long no member may have given anything before it is said that none can.
const GIVES_WAY_WITHIN: Duration = Duration::from_secs(3);
const LOOK_PAUSE: Duration = Duration::from_millis(5);
/// What a run gets beyond what it cannot give: room for faults. 4 MiB.
const ROOM_PAGES: u64 = 1024;

const EXAMPLES: &str = "\
Examples:
  quire set -p 4711 speculative-faults=off
  quire set -p 4711 speculative-faults=on folio-order=auto
  quire set -p 4711 memory=1G

Settings:
  memory=SIZE                 the run's budget: less, or up to twice what the run began with
  speculative-faults=on|off   serve faults without their address space's lock where that can be
  folio-order=auto|0..9       map 2^N pages a fault, or let the access pattern choose

They hold for the whole run that the process belongs to, at once; a lower budget once the run has given way to it.";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SetArgs {
    /// A process of the run, or its 'quire run'
    #[arg(long, short, value_name = "PID")]
    pub pid: u32,

    /// What is changed
    #[arg(required = true, value_name = "NAME=VALUE", value_parser = Setting::parse)]
    pub settings: Vec<Setting>,
}

/// A setting that can be changed at any time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    SpeculativeFaults(bool),
    /// -1 is auto.
    FolioOrder(i32),
    Memory(Size),
}

impl Setting {
    fn parse(text: &str) -> Result<Setting, String> {
        let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
        match (name, value) {
            ("speculative-faults", "on") => Ok(Setting::SpeculativeFaults(true)),
            ("speculative-faults", "off") => Ok(Setting::SpeculativeFaults(false)),
            ("speculative-faults", _) => Err("write on or off".into()),
            ("folio-order", value) => Ok(Setting::FolioOrder(parse_folio_order(value)?)),
            ("memory", value) => {
                value.parse().map(Setting::Memory).map_err(|error| format!("{error:#}"))
            }
            _ => Err("the settings are memory, speculative-faults and folio-order".into()),
        }
    }

    fn apply(self, control: &Control) -> Result<()> {
        // Relaxed: members read them at every use, and no other data goes with them.
        match self {
            Setting::Memory(size) => {
                return set_budget(control, size.bytes_of(machine_memory_bytes()));
            }
            Setting::SpeculativeFaults(is_on) => {
                control.no_speculation.store((!is_on).into(), Relaxed);
            }
            Setting::FolioOrder(order) => control.folio_order.store(order, Relaxed),
        }
        Ok(())
    }
}

/// Has the run's supervisor change the budget, and waits until members hold no more than that.
fn set_budget(control: &Control, bytes: u64) -> Result<()> {
    let page = PAGE_SIZE as u64;
    let least = budget_min_bytes(control.is_managed_only.load(Relaxed) != 0);
    if bytes < least {
        bail!("a budget of {} is too small; give {} at least", Human(bytes), Human(least));
    }
    let most = control.budget_pages_max.load(Relaxed) * page;
    if bytes > most {
        bail!(
            "the budget of this run cannot be {}, for its tables were made for {} at most; end it and start it with \
             more, or give less",
            Human(bytes),
            Human(most)
        );
    }
    ask(control, bytes / page)?;
    let (mut least_excess, mut since) = (usize::MAX, Instant::now());
    loop {
        let excess = control.excess();
        if excess < least_excess {
            (least_excess, since) = (excess, Instant::now());
        }
        if excess == 0 {
            return Ok(());
        }
        if since.elapsed() > GIVES_WAY_WITHIN {
            let room = (control.budget_pages.load(Relaxed) + excess as u64 + ROOM_PAGES) * page;
            let possible = room.next_multiple_of(1 << 20).min(most);
            ask(control, possible / page)?;
            bail!(
                "the run cannot give way to {}: pages that are locked in memory, and memory that is not managed, \
                 stay; its budget is {} now",
                Human(bytes),
                Human(possible)
            );
        }
        std::thread::sleep(LOOK_PAUSE);
    }
}

/// Asks the supervisor for a budget, and waits until it is set.
fn ask(control: &Control, pages: u64) -> Result<()> {
    control.asked_budget_pages.store(pages, Relaxed);
    let asked = Instant::now();
    while control.budget_pages.load(Relaxed) != pages {
        if asked.elapsed() > ANSWERS_WITHIN {
            control.asked_budget_pages.store(0, Relaxed);
            bail!(
                "the run's supervisor does not answer: it has ended, or is stopped; the budget is as it was"
            );
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}

pub(crate) fn set(args: &SetArgs) -> Result<u8> {
    let attached = runs::attach(args.pid, Access::Write)?;
    args.settings.iter().try_for_each(|setting| setting.apply(&attached.run.control))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    #[test]
    fn settings_are_words_of_the_control_page() {
        let control = ControlMap::create().unwrap();
        let set = |text| Setting::parse(text).unwrap().apply(&control).unwrap();
        set("speculative-faults=off");
        set("folio-order=9");
        assert_eq!(control.no_speculation.load(Relaxed), 1);
        assert_eq!(control.folio_order.load(Relaxed), 9);
        set("speculative-faults=on");
        set("folio-order=auto");
        assert_eq!(control.no_speculation.load(Relaxed), 0);
        assert_eq!(control.folio_order.load(Relaxed), -1);
    }

    #[test]
    fn a_budget_is_set_by_the_supervisor_within_bounds() {
        let control = ControlMap::create().unwrap();
        control.budget_pages.store(8192, Relaxed);
        control.budget_pages_max.store(16384, Relaxed);
        let set =
            |text: &str| Setting::parse(text).unwrap().apply(&control).unwrap_err().to_string();
        assert!(set("memory=15M").contains("give 16 MiB at least"));
        assert!(set("memory=65M").contains("tables were made for 64 MiB at most"));
        assert!(set("memory=48M").contains("does not answer"), "there is no supervisor");
        assert_eq!(control.asked_budget_pages.load(Relaxed), 0);
    }

    #[test]
    fn what_is_no_setting_is_refused() {
        for text in [
            "speculative-faults",
            "speculative-faults=1",
            "folio-order=10",
            "memory=much",
            "=on",
            "",
        ] {
            assert!(Setting::parse(text).is_err(), "{text}");
        }
    }
}
