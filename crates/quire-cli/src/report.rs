//! What a run tells: lines on stderr, and the counters as JSON.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};

use quire::control::{Event, OUT_OF_MEMORY_UNANSWERING_SHIFT, Obituary};
use quire::units::PAGE_SIZE;

use crate::size::Human;
use crate::supervisor::{Account, Death};

/// Writes a line to stderr, in one piece: the program writes there too. Its stderr may be gone or
/// full; that must not end the run.
pub fn say(line: &str) {
    let _ = io::stderr().write_all(format!("quire: {line}\n").as_bytes());
}

/// A run that has ended.
pub struct Ended {
    pub account: Account,
    pub cgroup_bytes_max: Option<u64>,
    pub cgroup_limit_bytes: Option<u64>,
    pub wall_seconds: f64,
    pub exit_status: u8,
}

impl Ended {
    fn event(&self, event: Event) -> u64 {
        self.account.events[event as usize]
    }

    /// The run in one line.
    pub fn line(&self) -> String {
        let account = &self.account;
        if account.processes == 0 {
            return "no process of the run was managed".into();
        }
        let mut line = format!(
            "wanted {} at most, held {} of {}",
            Human(account.wanted_bytes_max),
            Human(account.held_bytes_max),
            Human(account.budget_bytes),
        );
        let swapped = self.event(Event::Pswpout);
        if swapped == 0 {
            line.push_str("; nothing was swapped");
            return line;
        }
        let _ = write!(line, "; {} swapped out", Human(swapped * PAGE_SIZE as u64));
        let stored = self.event(Event::ZswpoutBytes);
        if stored > 0 {
            let compressed = self.event(Event::Zswpout) * PAGE_SIZE as u64;
            let _ = write!(line, ", compressed {:.1} to 1", compressed as f64 / stored as f64);
        }
        let same_filled = self.event(Event::SwpoutZero);
        if same_filled * 20 >= swapped {
            let percent = same_filled * 100 / swapped;
            let _ = write!(line, ", {percent}% of one value");
        }
        if account.swap_file_bytes_max > 0 {
            let _ = write!(line, ", {} in the swap file", Human(account.swap_file_bytes_max));
        }
        line
    }

    /// The run as a flat JSON object, one member a line.
    pub fn json(&self) -> String {
        let account = &self.account;
        let mut members = vec![
            ("exit_status", u64::from(self.exit_status).to_string()),
            ("wall_seconds", format!("{:.6}", self.wall_seconds)),
            ("budget_bytes", account.budget_bytes.to_string()),
            ("held_bytes_max", account.held_bytes_max.to_string()),
            ("wanted_bytes_max", account.wanted_bytes_max.to_string()),
            ("managed_bytes_max", account.managed_bytes_max.to_string()),
            ("pool_bytes_max", account.pool_bytes_max.to_string()),
            ("swap_file_bytes_max", account.swap_file_bytes_max.to_string()),
            ("cgroup_bytes_max", or_null(self.cgroup_bytes_max)),
            ("cgroup_limit_bytes", or_null(self.cgroup_limit_bytes)),
            ("processes", account.processes.to_string()),
        ];
        members.extend(Event::ALL.map(|event| (event.name(), self.event(event).to_string())));
        let lines: Vec<String> =
            members.iter().map(|(name, value)| format!("  \"{name}\": {value}")).collect();
        format!("{{\n{}\n}}\n", lines.join(",\n"))
    }

    /// Writes the JSON object to `file`.
    pub fn write_json(&self, mut file: &File) -> io::Result<()> {
        file.write_all(self.json().as_bytes())
    }
}

fn or_null(bytes: Option<u64>) -> String {
    bytes.map_or("null".into(), |bytes| bytes.to_string())
}

/// What a member left word of, in one line.
pub fn obituary_line(death: Death, name: Option<&str>, account: &Account) -> String {
    let who = match name {
        Some(name) => format!("process {} ({name})", death.pid),
        None => format!("process {}", death.pid),
    };
    match death.obituary {
        Obituary::OutOfMemory => {
            let budget = Human(account.budget_bytes);
            let is_full = death.detail & 1 != 0;
            let unanswering = death.detail >> OUT_OF_MEMORY_UNANSWERING_SHIFT;
            if unanswering > 0 {
                return format!(
                    "{who} ran out of memory: {unanswering} other process(es) hold much of the \
                     budget of {budget} and are stopped, traced or frozen; let them go on, or raise \
                     --memory"
                );
            }
            match account.swap_file_limit_bytes {
                0 => format!(
                    "{who} ran out of memory: the budget of {budget} is full, compressed as it \
                     is, and there is no swap file; add --swap-file DIR or raise --memory"
                ),
                _ if !is_full => format!(
                    "{who} ran out of memory: what the processes need at once does not fit into \
                     the budget of {budget}; raise --memory"
                ),
                limit => format!(
                    "{who} ran out of memory: the budget of {budget} and the swap file of {} are \
                     full; raise --swap-max or --memory",
                    Human(limit)
                ),
            }
        }
        Obituary::ChildNotManaged => format!(
            "{who} forked process {}, which was ended: it could not join the run ({} processes at \
             most), and unmanaged it would have read zeros for its data",
            death.detail,
            quire::control::MEMBERS_MAX
        ),
        Obituary::KernelRefused => {
            let errno = i32::try_from(death.detail).unwrap_or_default();
            format!(
                "{who} was ended: the kernel refused a call that memory cannot be managed \
                 without: {}; see quire doctor",
                io::Error::from_raw_os_error(errno)
            )
        }
        Obituary::SwapReadFailed => format!(
            "{who} lost a page: the swap file could not be read, or gave other bytes back, at \
             offset {}; an access to that page is SIGBUS, the rest lives on; check the disk",
            Human(death.detail * 64)
        ),
        Obituary::None => format!("{who} ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended() -> Ended {
        let mut account = Account {
            budget_bytes: 256 << 20,
            held_bytes_max: 255 << 20,
            wanted_bytes_max: 1 << 30,
            processes: 1,
            ..Account::default()
        };
        account.events[Event::Pswpout as usize] = 262_144;
        account.events[Event::Zswpout as usize] = 131_072;
        account.events[Event::ZswpoutBytes as usize] = 128 << 20;
        account.events[Event::SwpoutZero as usize] = 131_072;
        Ended {
            account,
            cgroup_bytes_max: None,
            cgroup_limit_bytes: None,
            wall_seconds: 1.5,
            exit_status: 3,
        }
    }

    #[test]
    fn a_run_is_one_line() {
        assert_eq!(
            ended().line(),
            "wanted 1 GiB at most, held 255 MiB of 256 MiB; 1 GiB swapped out, compressed 4.0 to \
             1, 50% of one value"
        );
        let mut unused = ended();
        unused.account.events = [0; Event::ALL.len()];
        assert!(unused.line().ends_with("; nothing was swapped"));
        unused.account.processes = 0;
        assert_eq!(unused.line(), "no process of the run was managed");
    }

    #[test]
    fn the_json_has_every_counter_once() {
        let json = ended().json();
        for event in Event::ALL {
            assert_eq!(json.matches(&format!("\"{}\": ", event.name())).count(), 1, "{event:?}");
        }
        assert!(json.starts_with("{\n  \"exit_status\": 3,\n  \"wall_seconds\": 1.500000,\n"));
        assert!(json.contains("\"cgroup_bytes_max\": null,"));
        let last = Event::ALL[Event::ALL.len() - 1].name();
        assert!(json.ends_with(&format!("\"{last}\": 0\n}}\n")));
    }

    #[test]
    fn an_obituary_says_what_to_do() {
        let death = |obituary, detail| Death { pid: 7, obituary, detail };
        let mut account = ended().account;
        let line = obituary_line(death(Obituary::OutOfMemory, 0), Some("sh"), &account);
        assert!(line.starts_with("process 7 (sh) ran out of memory: the budget of 256 MiB"));
        assert!(line.ends_with("add --swap-file DIR or raise --memory"));
        account.swap_file_limit_bytes = 1 << 30;
        let line = obituary_line(death(Obituary::OutOfMemory, 0), None, &account);
        assert!(
            line.ends_with("does not fit into the budget of 256 MiB; raise --memory"),
            "{line}"
        );
        let line = obituary_line(death(Obituary::OutOfMemory, 1), None, &account);
        assert!(line.contains("swap file of 1 GiB are full; raise --swap-max"), "{line}");
        let stopped = 2 << OUT_OF_MEMORY_UNANSWERING_SHIFT;
        let line = obituary_line(death(Obituary::OutOfMemory, stopped), None, &account);
        assert!(line.contains("2 other process(es) hold"), "{line}");
        let line = obituary_line(death(Obituary::KernelRefused, 12), None, &account);
        assert!(line.contains("Cannot allocate memory"), "{line}");
        let line = obituary_line(death(Obituary::ChildNotManaged, 8), None, &account);
        assert!(line.starts_with("process 7 forked process 8, which was ended"), "{line}");
        let line = obituary_line(death(Obituary::SwapReadFailed, 16), None, &account);
        assert!(line.contains("offset 1 KiB;"), "{line}");
    }
}
