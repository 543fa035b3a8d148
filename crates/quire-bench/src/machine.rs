//! The machine that the figures hold for.

use std::fs;

use git_version::git_version;
use quire_cli::size::{Human, machine_memory_bytes};

/// What figures depend on, by name.
pub(crate) fn facts() -> [(&'static str, String); 7] {
    let line = |file: &str| {
        fs::read_to_string(file).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
    };
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find(|line| line.starts_with("model name"));
    let model =
        model.and_then(|line| line.split_once(':')).map_or("unknown", |(_, model)| model.trim());
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    [
        ("quire", env!("CARGO_PKG_VERSION").into()),
        (
            "commit",
            git_version!(args = ["--always", "--dirty=-modified"], fallback = "unknown").into(),
        ),
        ("kernel", line("/proc/sys/kernel/osrelease")),
        ("processor", format!("{model}, {cpus} CPUs")),
        ("memory", Human(machine_memory_bytes()).to_string()),
        ("transparent huge pages", line("/sys/kernel/mm/transparent_hugepage/enabled")),
        ("page-cluster", line("/proc/sys/vm/page-cluster")),
    ]
}
