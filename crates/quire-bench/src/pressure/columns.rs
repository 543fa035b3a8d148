//! The columns: the ways in which a program is run.
//!
//! Quire gets the budget. The kernel's cgroup gets as much and what the program holds that Quire does
//! not manage: code's data, stacks, page tables and the kernel's own, all that the cgroup of Quire's run
//! holds beyond the budget but for the pages of files, which can be dropped and are cached by the bare
//! run before. Where compressed pages lie outside of the cgroup, its limit is lowered as they grow; the
//! kernel may be slow to do so, or refuse, and so what there is altogether is looked at as well.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use super::counters::{Counts, Disk};
use super::measured::{End, Measured};
use super::name_of;
use super::prepare::Prepared;
use super::swaps::{On, Swaps};
use crate::contestant::{Contestant, Launched, Stage};
use crate::harness::beside::{Look, beside};
use crate::memory_limit::MemoryLimit;

/// Between looks at what is held.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// The limit of a cgroup is not lowered below this, or half of what it was.
const LIMIT_MIN_BYTES: u64 = 16 << 20;
/// A limit that would change by less stays.
const LIMIT_STEP_BYTES: u64 = 64 << 10;
/// Memory and store that are this much over the limit do not fit.
const OVER: f64 = 1.05;
/// What a tree of processes wants is measured where everything fits.
const ROOMY_BYTES: u64 = 1 << 30;
/// What a program holds unmanaged is this at least.
const UNMANAGED_MIN_BYTES: u64 = 1 << 20;

/// A way in which programs are run.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Column {
    /// With all the memory there is
    Bare,
    /// Under `quire run`, with a swap file
    Quire,
    /// In a cgroup, with the kernel's swap on a file of the same disk
    Disk,
    /// In a cgroup, with the kernel's swap on zram by lz4, its store counted
    ZramLz4,
    /// The same by zstd
    ZramZstd,
    /// In a cgroup, with zswap before the swap file, its store counted
    Zswap,
}

impl Column {
    /// As the command line and the tables have it.
    pub(crate) fn name(self) -> String {
        name_of(&self)
    }
}

/// What runs programs in all columns.
pub(crate) struct Runner {
    /// First: it is to be undone before the folder goes that its file lies in.
    pub swaps: Swaps,
    pub stage: Stage,
    pub disk: Disk,
}

/// A run that is under way: what there was before, and the memory that was seen.
struct Around {
    before: Counts,
    /// Most that could not be dropped, with the store where there is one.
    most_bytes: AtomicU64,
    store_bytes: AtomicU64,
}

impl Runner {
    /// Runs the program as it is.
    pub(crate) fn bare(&self, program: &Prepared, most: Duration) -> Result<Measured> {
        let command = self.stage.command(&program.workload, &Contestant::Bare)?;
        let around = self.around();
        let launched = self.launch(program, command, most)?;
        let mut measured = self.measured(program, &launched, &around, None);
        measured.want_bytes = launched.ended.map_or(0, |ended| ended.peak_bytes);
        Ok(measured)
    }

    /// What all processes of a tree want at a time.
    pub(crate) fn want_of_tree(&self, program: &Prepared, most: Duration) -> Result<u64> {
        let command = self.stage.command(&program.workload, &quire(ROOMY_BYTES, &self.stage))?;
        let launched = self.launch(program, command, most)?;
        Ok(launched.stats.get("wanted_bytes_max").map_or(0, |bytes| *bytes as u64))
    }

    /// Runs the program under Quire.
    pub(crate) fn quire(
        &self,
        program: &Prepared,
        budget_bytes: u64,
        digest: u64,
        most: Duration,
    ) -> Result<Measured> {
        let inner = self.stage.command(&program.workload, &quire(budget_bytes, &self.stage))?;
        // Where there is none Quire is run all the same, and the kernel is not.
        let limit = MemoryLimit::create().ok();
        let command = match &limit {
            Some(limit) => enter(limit, &inner),
            None => inner,
        };
        let around = self.around();
        let look = || {
            let Some(limit) = &limit else { return };
            // Where Quire could make no cgroup, what is seen has its supervisor too.
            let run = limit.child("quire-").and_then(|run| run.undroppable_bytes());
            let bytes = run.or_else(|| limit.undroppable_bytes()).unwrap_or(0);
            around.most_bytes.fetch_max(bytes, Ordering::Relaxed);
        };
        let looks: Vec<Look<'_>> = vec![Box::new(look)];
        let launched = beside(LOOK_PAUSE, looks, || self.launch(program, command, most))?;
        let mut measured = self.measured(program, &launched, &around, Some(digest));
        let stat = |name: &str| launched.stats.get(name).map(|value| *value as u64);
        let held = stat("held_bytes_max").unwrap_or(budget_bytes);
        measured.unmanaged_bytes =
            measured.most_bytes.map(|most| most.saturating_sub(held).max(UNMANAGED_MIN_BYTES));
        measured.limit_bytes = budget_bytes;
        measured.page_ins = stat("pswpin").unwrap_or(0);
        measured.major_faults = stat("pgmajfault");
        Ok(measured)
    }

    /// Runs the program in a cgroup with one of the kernel's swaps.
    pub(crate) fn kernel(
        &self,
        column: Column,
        program: &Prepared,
        limit_bytes: u64,
        digest: u64,
        most: Duration,
    ) -> Result<Measured> {
        let on = self.swaps.on(column)?;
        let limit = MemoryLimit::create()?;
        limit.set(limit_bytes)?;
        let inner = self.stage.command(&program.workload, &Contestant::Bare)?;
        let around = self.around();
        let looks: Vec<Look<'_>> = vec![
            Box::new(lower(&limit, &on, limit_bytes)),
            // By a thread of its own: to lower a limit may take the kernel seconds.
            Box::new(|| around.look(&limit, &on)),
        ];
        let command = enter(&limit, &inner);
        let launched = beside(LOOK_PAUSE, looks, || self.launch(program, command, most))?;
        let mut measured = self.measured(program, &launched, &around, Some(digest));
        if limit.oom_kills() > 0 {
            measured.end = End::Killed;
        }
        measured.limit_bytes = limit_bytes;
        measured.store_bytes = around.store_bytes.load(Ordering::Relaxed);
        measured.does_not_fit =
            measured.most_bytes.is_some_and(|most| most as f64 > limit_bytes as f64 * OVER);
        measured.major_faults = limit.major_faults();
        Ok(measured)
    }

    fn launch(&self, program: &Prepared, command: Command, most: Duration) -> Result<Launched> {
        let command = match program.driver.split_first() {
            None => command,
            Some((driver, arguments)) => {
                let mut driven = Command::new(driver);
                driven.args(arguments).arg(command.get_program()).args(command.get_args());
                driven
            }
        };
        self.stage.launch(command, most)
    }

    /// Begins to count. What was written before goes to the disk first.
    fn around(&self) -> Around {
        rustix::fs::sync();
        let [most_bytes, store_bytes] = [const { AtomicU64::new(0) }; 2];
        Around { before: self.disk.counts(), most_bytes, store_bytes }
    }

    /// What a run came to; its output is held against the digest.
    fn measured(
        &self,
        program: &Prepared,
        launched: &Launched,
        around: &Around,
        digest: Option<u64>,
    ) -> Measured {
        let counts = self.disk.counts().since(around.before);
        let is_other = program.workload.is_deterministic
            && digest.is_some_and(|digest| digest != launched.digest);
        let end = match &launched.ended {
            None => End::Stopped,
            Some(ended) if ended.status != 0 => {
                End::Failed(format!("ended with {}: {}", ended.status, self.stage.last_words()))
            }
            Some(_) if is_other => End::Failed("printed something else than bare".into()),
            Some(_) => End::Done,
        };
        let timed = launched.phases.iter().find(|(name, _)| name == "measured");
        let most = around.most_bytes.load(Ordering::Relaxed);
        Measured {
            end,
            seconds: timed.map_or(launched.seconds, |(_, seconds)| *seconds),
            wall_seconds: launched.seconds,
            most_bytes: (most > 0).then_some(most),
            page_ins: counts.page_ins,
            disk_bytes: counts.disk_bytes,
            figures: launched.figures.clone(),
            digest: launched.digest,
            ..Measured::default()
        }
    }
}

impl Around {
    /// Looks at memory and store together.
    fn look(&self, limit: &MemoryLimit, on: &On<'_>) {
        let store = on.store_bytes(limit);
        let all = limit.undroppable_bytes().unwrap_or(0) + store;
        // Relaxed: read once the looks have ended.
        self.most_bytes.fetch_max(all, Ordering::Relaxed);
        self.store_bytes.fetch_max(store, Ordering::Relaxed);
    }
}

fn quire(budget_bytes: u64, stage: &Stage) -> Contestant {
    let options = vec!["--swap-file".into(), stage.folder().into()];
    Contestant::Quire { budget_bytes, options }
}

/// The command, in the cgroup.
fn enter(limit: &MemoryLimit, inner: &Command) -> Command {
    let mut command = limit.command();
    command.arg(inner.get_program()).args(inner.get_args());
    command
}

/// Keeps the limit at what the store leaves of it.
fn lower<'a>(limit: &'a MemoryLimit, on: &'a On<'_>, limit_bytes: u64) -> impl FnMut() + Send + 'a {
    let mut set = limit_bytes;
    let least = LIMIT_MIN_BYTES.min(limit_bytes / 2);
    move || {
        let wanted = limit_bytes.saturating_sub(on.store_bytes(limit)).max(least);
        // The kernel may refuse while it finds nothing that could go.
        if wanted.abs_diff(set) >= LIMIT_STEP_BYTES && limit.set(wanted).is_ok() {
            set = wanted;
        }
    }
}
