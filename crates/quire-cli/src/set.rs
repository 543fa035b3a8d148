//! `quire set`: changes a setting of a run while it goes on.
//!
//! Settings are words of the control page that members read at every use: a change is a store, and
//! holds for the whole tree from its next fault or reclaim on.

use std::sync::atomic::Ordering::Relaxed;

use anyhow::Result;
use clap::Args;
use quire::control::Control;

use crate::cli::parse_folio_order;
use crate::runs::{self, Access};

const EXAMPLES: &str = "\
Examples:
  quire set -p 4711 speculative-faults=off
  quire set -p 4711 speculative-faults=on folio-order=auto

Settings:
  speculative-faults=on|off   serve faults without their address space's lock where that can be
  folio-order=auto|0..9       map 2^N pages a fault, or let the access pattern choose

They hold for the whole run that the process belongs to, at once.";

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Setting {
    SpeculativeFaults(bool),
    /// -1 is auto.
    FolioOrder(i32),
}

impl Setting {
    fn parse(text: &str) -> Result<Setting, String> {
        let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
        match (name, value) {
            ("speculative-faults", "on") => Ok(Setting::SpeculativeFaults(true)),
            ("speculative-faults", "off") => Ok(Setting::SpeculativeFaults(false)),
            ("speculative-faults", _) => Err("write on or off".into()),
            ("folio-order", value) => Ok(Setting::FolioOrder(parse_folio_order(value)?)),
            _ => Err("the settings are speculative-faults and folio-order".into()),
        }
    }

    fn apply(self, control: &Control) {
        // Relaxed: members read them at every use, and no other data goes with them.
        match self {
            Setting::SpeculativeFaults(is_on) => {
                control.no_speculation.store((!is_on).into(), Relaxed);
            }
            Setting::FolioOrder(order) => control.folio_order.store(order, Relaxed),
        }
    }
}

pub(crate) fn set(args: &SetArgs) -> Result<u8> {
    let attached = runs::attach(args.pid, Access::Write)?;
    args.settings.iter().for_each(|setting| setting.apply(&attached.run.control));
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    #[test]
    fn settings_are_words_of_the_control_page() {
        let control = ControlMap::create().unwrap();
        let set = |text| Setting::parse(text).unwrap().apply(&control);
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
    fn what_is_no_setting_is_refused() {
        for text in
            ["speculative-faults", "speculative-faults=1", "folio-order=10", "memory=1G", "=on", ""]
        {
            assert!(Setting::parse(text).is_err(), "{text}");
        }
    }
}
