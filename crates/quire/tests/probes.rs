//! The probes of the tracepoints, as other tools see them: notes in the binary, and an instruction that
//! is executed as often as a tracepoint is.
//!
//! The tests look at their own binary, which has the engine in it like any other.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Machine, Tree};
use quire::control::{Event, Tracepoint};
use quire::sys::thread::ThreadId;
use quire::units::{PageNum, PageRange};

/// Set for a copy of this binary that only passes tracepoints.
const INSIDE: &str = "QUIRE_PROBES_INSIDE";
/// How often it passes each: the first so often, the next once more, and so on.
const PASSES: u64 = 5;

fn run(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A probe's own name: what comes behind the provider's.
fn name(tracepoint: Tracepoint) -> &'static str {
    tracepoint.name().strip_prefix("pagefault:").unwrap()
}

#[test]
fn a_note_tells_of_each_tracepoint_where_it_is_and_what_it_carries() {
    let binary = std::env::current_exe().unwrap();
    let notes = text(&run(Command::new("readelf").args(["-n", "-W"]).arg(binary)).unwrap());
    for tracepoint in Tracepoint::ALL {
        let at = notes.find(&format!("Name: {}\n", name(tracepoint))).expect("a note");
        assert!(notes[..at].trim_end().ends_with("Provider: pagefault"), "{}", tracepoint.name());
        let arguments =
            notes[at..].lines().find_map(|line| line.trim().strip_prefix("Arguments: "));
        assert_eq!(arguments, Some("8@%rdi 8@%rsi 8@%rdx 4@%ecx"), "{}", tracepoint.name());
    }
}

/// perf's own files, and the binary under a name of its own, so that no other test's is mixed up.
struct Perf {
    folder: PathBuf,
    binary: PathBuf,
    /// Probes that the kernel watches for us: others may have been there before.
    added: Vec<String>,
}

impl Perf {
    fn command(&self) -> Command {
        let mut command = Command::new("perf");
        command.arg("--buildid-dir").arg(self.folder.join("buildid"));
        command
    }

    /// Finds the probes in the binary and has the kernel watch them.
    fn new() -> Result<Perf, String> {
        run(Command::new("perf").arg("--version"))?;
        if !Path::new("/sys/bus/event_source/devices/uprobe").exists() {
            return Err("the kernel has no uprobes".into());
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probes");
        std::fs::create_dir_all(&folder).unwrap();
        let binary = folder.join(format!("watched-{}", std::process::id()));
        std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
        let mut perf = Perf { folder, binary, added: Vec::new() };
        run(perf.command().args(["buildid-cache", "--add"]).arg(&perf.binary))?;
        let listed = text(&run(perf.command().args(["list", "sdt"]))?);
        for tracepoint in Tracepoint::ALL {
            assert!(listed.contains(&format!("sdt_{}", tracepoint.name())), "{listed}");
        }
        for tracepoint in Tracepoint::ALL {
            let event = format!("%sdt_{}", tracepoint.name());
            run(perf.command().args(["probe", "-x"]).arg(&perf.binary).args(["-a", &event]))?;
            perf.added.push(format!("sdt_{}", tracepoint.name()));
        }
        Ok(perf)
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        for event in &self.added {
            let _ = run(self.command().args(["probe", "-d", event]));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_tracer_counts_each_pass() {
    if std::env::var_os(INSIDE).is_some() {
        return pass_all();
    }
    let perf = match Perf::new() {
        Ok(perf) => perf,
        Err(why) => {
            eprintln!("NOT TESTED with a tracer: {why}");
            return;
        }
    };
    let events = Tracepoint::ALL.map(|tracepoint| format!("sdt_{}", tracepoint.name())).join(",");
    let mut stat = perf.command();
    stat.args(["stat", "-x", ",", "-e", &events, "--"]).arg(&perf.binary);
    stat.args(["a_tracer_counts_each_pass", "--exact"]).env(INSIDE, "1");
    let counts = text(&run(&mut stat).unwrap());
    for (passes, tracepoint) in (PASSES..).zip(Tracepoint::ALL) {
        let event = format!(",sdt_{},", tracepoint.name());
        let line = counts.lines().find(|line| line.contains(&event)).expect(&counts);
        assert_eq!(line.split(',').next(), Some(passes.to_string().as_str()), "{counts}");
    }
}

fn pass_all() {
    let machine = Machine::new(Tree::default());
    for (passes, tracepoint) in (PASSES..).zip(Tracepoint::ALL) {
        for _ in 0..passes {
            let vma = PageRange::new(PageNum(16), 32);
            machine.space.trace(tracepoint, PageNum(20), vma, ThreadId(4711));
        }
        assert_eq!(machine.counted(tracepoint.event()), passes);
    }
    assert_eq!(machine.counted(Event::Pgfault), 0);
}
