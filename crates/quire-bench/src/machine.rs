//! The machine that the figures hold for.

use std::fs;

use quire_cli::print::json::Json;
use quire_cli::size::{Human, machine_memory_bytes};

/// What figures depend on.
pub(crate) struct Machine {
    pub facts: Vec<(&'static str, String)>,
}

impl Machine {
    pub(crate) fn read() -> Machine {
        let line = |file: &str| fs::read_to_string(file).map(|text| text.trim().to_owned());
        let field = |file: &str, name: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let unknown = || "unknown".to_owned();
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let model = field("/proc/cpuinfo", "model name").unwrap_or_else(unknown);
        let memory = Human(machine_memory_bytes());
        let huge =
            line("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_else(|_| unknown());
        let cluster = line("/proc/sys/vm/page-cluster").unwrap_or_else(|_| unknown());
        Machine {
            facts: vec![
                ("quire", env!("CARGO_PKG_VERSION").into()),
                ("kernel", line("/proc/sys/kernel/osrelease").unwrap_or_else(|_| unknown())),
                ("processor", format!("{model}, {cpus} CPUs")),
                ("memory", memory.to_string()),
                ("transparent huge pages", huge),
                ("page-cluster", cluster),
            ],
        }
    }
}

impl From<&Machine> for Json {
    fn from(machine: &Machine) -> Json {
        let member = |(name, value): &(&str, String)| ((*name).to_owned(), Json::text(value));
        Json::Object(machine.facts.iter().map(member).collect())
    }
}
