//! Runs a program bare, under quire, or in a cgroup that swaps to zram, and says what it took.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::Hasher as _;
use std::io::Read;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::data;
use super::kernel_swap::Zram;
use super::memory_limit::MemoryLimit;
use super::sys;

/// A run that takes longer is taken to hang.
const RUN_MAX: Duration = Duration::from_secs(900);
/// Runs that the kernel's contestant gets where its OOM killer ends one, as it now and then does in
/// a memory cgroup whose pages are all in use, with plenty of swap left.
const KERNEL_TRIES: u32 = 4;
/// The exit status of a program that was killed.
const KILLED: i32 = 137;
/// Between looks at the signals while a program runs.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long a program may take to end once it was asked to.
const GRACE: Duration = Duration::from_secs(2);
/// Bytes of a program's output that are kept; the digest is of all of it.
const OUTPUT_KEPT_BYTES: usize = 64 << 10;

/// How a program is run.
#[derive(Clone, Debug)]
pub(crate) enum Contestant {
    /// As it is.
    Bare,
    /// Under `quire run`.
    Quire { budget_bytes: u64, options: Vec<OsString> },
    /// In a memory cgroup, with the kernel's swap on zram.
    Kernel { limit_bytes: u64 },
}

/// A program and what is known of its output.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub name: String,
    pub argv: Vec<OsString>,
    /// The output is the same every time.
    pub is_deterministic: bool,
}

/// The kernel's swap, set up. The cgroup goes first: it is empty when swap is taken away.
pub(crate) struct KernelSwap {
    pub limit: MemoryLimit,
    pub zram: Zram,
}

impl KernelSwap {
    pub(crate) fn create(swap_bytes: u64) -> Result<KernelSwap> {
        Ok(KernelSwap { limit: MemoryLimit::create()?, zram: Zram::create(swap_bytes, "lz4")? })
    }
}

/// What a run took.
pub(crate) struct Outcome {
    /// Wall time, from start to end.
    pub seconds: f64,
    /// Most resident memory of one process.
    pub peak_bytes: u64,
    /// What the program itself timed, in order.
    pub phases: Vec<(String, f64)>,
    /// What the program itself counted, in order.
    pub figures: Vec<(String, f64)>,
    /// What it and its children used of the CPUs.
    pub used: sys::Used,
    /// Of all that it printed.
    pub digest: u64,
    /// `quire run --stats`.
    pub stats: BTreeMap<String, f64>,
    /// Most that zram's store took.
    pub store_bytes: u64,
    /// Runs that the kernel's OOM killer ended before this one.
    pub oom_kills: u32,
}

/// A command that was run, before anything is made of it.
pub(crate) struct Launched {
    /// Wall time, from start to end.
    pub seconds: f64,
    /// How it ended; nothing where it was stopped because it took too long.
    pub ended: Option<sys::Ended>,
    pub phases: Vec<(String, f64)>,
    pub figures: Vec<(String, f64)>,
    /// Of all that it printed.
    pub digest: u64,
    /// `quire run --stats`.
    pub stats: BTreeMap<String, f64>,
}

impl Outcome {
    /// A counter of quire's; 0 where it is not there.
    pub(crate) fn stat(&self, name: &str) -> f64 {
        self.stats.get(name).copied().unwrap_or(0.0)
    }

    /// What the program itself counted under this name.
    pub(crate) fn figure(&self, name: &str) -> Result<f64> {
        let found = self.figures.iter().find(|(found, _)| found == name);
        found.map(|(_, value)| *value).with_context(|| format!("the program prints no {name}"))
    }
}

/// A folder for the bench's files; removed when dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Where programs are run.
pub(crate) struct Stage {
    /// The kernel's swap, or why it is not there. First, so that it is dropped first.
    pub kernel: Result<KernelSwap>,
    /// The quire that is measured.
    quire: PathBuf,
    /// This binary, which the bench's own programs are in.
    pub own: PathBuf,
    folder: Folder,
}

impl Stage {
    /// For a suite in which the kernel's swap takes no part.
    pub(crate) fn without_kernel(quire: Option<&Path>) -> Result<Stage> {
        Stage::new(quire, Err(anyhow::anyhow!("not a contestant")))
    }

    /// Measures `quire`, by default the one that lies near this binary.
    pub(crate) fn new(quire: Option<&Path>, kernel: Result<KernelSwap>) -> Result<Stage> {
        Stage::in_directory(&data::disk_directory(), quire, kernel)
    }

    /// As [`Stage::new`], with the bench's files in `directory`.
    pub(crate) fn in_directory(
        directory: &Path,
        quire: Option<&Path>,
        kernel: Result<KernelSwap>,
    ) -> Result<Stage> {
        let own = std::env::current_exe().context("cannot find this program's own file")?;
        let quire = match quire {
            Some(quire) => quire.to_owned(),
            None => find_quire(&own)?,
        };
        let folder = directory.join(format!("quire-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        Ok(Stage { kernel, quire, own, folder: Folder(folder) })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder.0
    }

    /// Runs the program; an error where it fails.
    pub(crate) fn run(&self, workload: &Workload, contestant: &Contestant) -> Result<Outcome> {
        let tries = if matches!(contestant, Contestant::Kernel { .. }) { KERNEL_TRIES } else { 1 };
        for oom_kills in 0..tries {
            let (status, mut outcome) = self.run_once(workload, contestant)?;
            if status == 0 {
                outcome.oom_kills = oom_kills;
                return Ok(outcome);
            }
            if status != KILLED || tries == 1 {
                bail!("ended with {status}: {}", self.last_words());
            }
        }
        bail!("killed by the kernel's OOM killer {tries} times, with swap left")
    }

    fn errors(&self) -> PathBuf {
        self.folder().join("stderr")
    }

    fn run_once(&self, workload: &Workload, contestant: &Contestant) -> Result<(i32, Outcome)> {
        let command = self.command(workload, contestant)?;
        let kernel = match (contestant, &self.kernel) {
            (Contestant::Kernel { .. }, Ok(kernel)) => Some((kernel, kernel.zram.swap_on()?)),
            _ => None,
        };
        let launched = self.launch(command, RUN_MAX)?;
        let Some(ended) = launched.ended else { bail!("the program does not end") };
        let store_bytes = match &kernel {
            Some((kernel, _swap_on)) => kernel.zram.used_max_bytes()?,
            None => 0,
        };
        let outcome = Outcome {
            seconds: launched.seconds,
            peak_bytes: ended.peak_bytes,
            phases: launched.phases,
            figures: launched.figures,
            used: ended.used,
            digest: launched.digest,
            stats: launched.stats,
            store_bytes,
            oom_kills: 0,
        };
        Ok((ended.status, outcome))
    }

    /// Runs a command to its end, or ends it after `most`.
    pub(crate) fn launch(&self, mut command: Command, most: Duration) -> Result<Launched> {
        let stats = self.stats();
        let _ = fs::remove_file(&stats);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(self.errors())?);
        // A group of its own: a terminal's ^C reaches only the bench, which ends the group.
        command.env("LC_ALL", "C").process_group(0);
        // What a child holds at most begins with what this process has held at most: not more than it holds now.
        let _ = fs::write("/proc/self/clear_refs", "5");
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let output = child.stdout.take().context("the output is a pipe")?;
        let reader = thread::spawn(move || read_all(output));
        let awaited = wait(&child, most);
        let seconds = started.elapsed().as_secs_f64();
        let ended = awaited?;
        let (digest, text) = match reader.join() {
            Ok(read) => read?,
            Err(_) => bail!("the reader of the output failed"),
        };
        Ok(Launched {
            seconds,
            ended,
            phases: phases_of(&text),
            figures: named_numbers(&text, "figure"),
            digest,
            stats: numbers_of(&fs::read_to_string(&stats).unwrap_or_default()),
        })
    }

    /// The last line that the program that ran last had to say on stderr.
    pub(crate) fn last_words(&self) -> String {
        let said = fs::read_to_string(self.errors()).unwrap_or_default();
        said.trim().lines().last().unwrap_or("").to_owned()
    }

    /// Where `quire run` leaves its counters.
    fn stats(&self) -> PathBuf {
        self.folder().join("stats.json")
    }

    /// What runs the program as this contestant does.
    pub(crate) fn command(&self, workload: &Workload, contestant: &Contestant) -> Result<Command> {
        let mut command = match contestant {
            Contestant::Bare => {
                let mut command = Command::new(&workload.argv[0]);
                command.args(&workload.argv[1..]);
                return Ok(command);
            }
            Contestant::Quire { budget_bytes, options } => {
                let mut command = Command::new(&self.quire);
                // What is beside managed memory is measured, and given to the kernel's cgroup as well.
                command
                    .args(["run", "--quiet", "--managed-only", "--memory"])
                    .arg(budget_bytes.to_string());
                command.arg("--stats").arg(self.stats());
                command.args(options).arg("--");
                command
            }
            Contestant::Kernel { limit_bytes } => {
                let kernel = match &self.kernel {
                    Ok(kernel) => kernel,
                    Err(error) => bail!("no kernel swap: {error:#}"),
                };
                kernel.limit.set(*limit_bytes)?;
                kernel.limit.command()
            }
        };
        command.args(&workload.argv);
        Ok(command)
    }
}

/// The quire that lies beside the bench's binary `own`, or in `../bin` or `../../bin`.
fn find_quire(own: &Path) -> Result<PathBuf> {
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = ["", "../bin", "../../bin"].map(|place| folder.join(place).join("quire"));
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    found.with_context(|| {
        format!("there is no quire near {}; name one by --quire FILE", folder.display())
    })
}

/// Waits until the child has ended; ends it, and returns nothing, where that takes longer than `most`.
/// An error where the bench was told to end.
fn wait(child: &Child, most: Duration) -> Result<Option<sys::Ended>> {
    let raw = i32::try_from(child.id())?;
    let pid = Pid::from_raw(raw).context("a child has a process id")?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let started = Instant::now();
    loop {
        let mut ready = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
        // EINTR: the flag is looked at below.
        if rustix::event::poll(&mut ready, Some(&TICK)).unwrap_or(0) > 0 {
            return Ok(Some(sys::wait4(child.id())?));
        }
        let is_interrupted = sys::is_interrupted();
        if !is_interrupted && started.elapsed() <= most {
            continue;
        }
        let _ = rustix::process::kill_process_group(pid, Signal::TERM);
        let grace = Timespec { tv_sec: GRACE.as_secs().cast_signed(), tv_nsec: 0 };
        let _ = rustix::event::poll(&mut ready, Some(&grace));
        // Those that it started may live on without it, and hold its output open.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        sys::wait4(child.id())?;
        if is_interrupted {
            bail!("interrupted");
        }
        return Ok(None);
    }
}

/// The digest of all, and the beginning as text.
fn read_all(mut from: impl Read) -> Result<(u64, String)> {
    let (mut hasher, mut kept) = (DefaultHasher::new(), Vec::new());
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok((hasher.finish(), String::from_utf8_lossy(&kept).into_owned()));
        }
        hasher.write(&buffer[..count]);
        let room = OUTPUT_KEPT_BYTES - kept.len();
        kept.extend_from_slice(&buffer[..count.min(room)]);
    }
}

/// The lines `{"phase": "scan", "seconds": 0.5}`.
pub(crate) fn phases_of(text: &str) -> Vec<(String, f64)> {
    named_numbers(text, "phase")
}

/// The lines `{"label": "name", "...": 0.5}`.
fn named_numbers(text: &str, label: &str) -> Vec<(String, f64)> {
    let head = format!("{{\"{label}\": \"");
    let parse = |line: &str| {
        let (name, rest) = line.strip_prefix(&head)?.split_once('"')?;
        let seconds = rest.rsplit_once(": ")?.1.trim_end_matches('}').parse().ok()?;
        Some((name.to_owned(), seconds))
    };
    text.lines().filter_map(parse).collect()
}

/// The numbers of a flat JSON object with a member a line.
fn numbers_of(text: &str) -> BTreeMap<String, f64> {
    let parse = |line: &str| {
        let (name, value) = line.trim().strip_prefix('"')?.split_once("\": ")?;
        Some((name.to_owned(), value.trim_end_matches(',').parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_and_figures_are_read_from_json_lines() {
        let text = "hello\n{\"phase\": \"scan\", \"seconds\": 0.250000}\n\
                    {\"figure\": \"pages\", \"value\": 7}\n";
        assert_eq!(phases_of(text), [("scan".to_owned(), 0.25)]);
        assert_eq!(named_numbers(text, "figure"), [("pages".to_owned(), 7.0)]);
    }

    #[test]
    fn counters_are_read_from_a_flat_object() {
        let numbers =
            numbers_of("{\n  \"pgfault\": 12,\n  \"cgroup\": null,\n  \"last\": 0.5\n}\n");
        assert_eq!(numbers.len(), 2);
        assert_eq!((numbers["pgfault"], numbers["last"]), (12.0, 0.5));
    }

    #[test]
    fn the_digest_does_not_depend_on_how_the_output_arrives() {
        let whole = read_all(&b"abcdefghij"[..]).unwrap();
        let parts = read_all((&b"abc"[..]).chain(&b"defghij"[..])).unwrap();
        assert_eq!(whole, parts);
        assert_eq!(whole.1, "abcdefghij");
    }
}
