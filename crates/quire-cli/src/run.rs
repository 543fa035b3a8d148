//! `quire run`: everything a run needs is made and checked before the program starts; then the
//! supervisor works until the program ends.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use quire::control::{Control, MANAGED_PAGES_MIN, SOCKET_VARIABLE};
use quire::units::PAGE_SIZE;
use rustix::process::{Resource, Rlimit};

use crate::cgroup::{Cgroup, Hierarchy};
use crate::cli::RunOptions;
use crate::inspect::{self, Inspected, Refusal};
use crate::print::{self, say};
use crate::progress::{self, Progress};
use crate::report::{self, Ended};
use crate::reservation::{self, Outer};
use crate::rights;
use crate::size::{Human, machine_memory_bytes};
use crate::supervisor::swapfile::SwapFile;
use crate::supervisor::{Looker, News, Program, Resources, Supervisor, Whole};
use crate::sys::signals::{self, Signals};
use crate::sys::spawn::{self, Spawned};
use crate::{far, installed, procfs};

/// The least that managed memory can do with.
pub(crate) const BUDGET_MIN_BYTES: u64 = MANAGED_PAGES_MIN * PAGE_SIZE as u64;
/// The least budget for all of a run: as much again for the code's data, stacks and page tables of a few small
/// processes, and of the engine.
const WHOLE_MIN_BYTES: u64 = 2 * BUDGET_MIN_BYTES;
/// The most: what 47 bits of address space can name.
const BUDGET_MAX_BYTES: u64 = 1 << 47;

/// Unmanaged processes that get a line.
const UNMANAGED_NAMED_MAX: u32 = 16;

/// What PATH is where there is none, as execvp has it.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

pub(crate) fn run(options: &RunOptions) -> Result<u8> {
    let mut progress = Progress::new();
    let mut look = |control: &Control, moment| progress.look(control, moment);
    let mut looker = Looker::new(Some(progress::PERIOD), &mut look);
    let is_shown = options.progress && progress::can_be_seen();
    let ended = run_watched(options, is_shown.then_some(&mut looker))?;
    let lines = [Some(ended.line()), ended.members_line(), ended.unmanaged_line()];
    lines.iter().flatten().for_each(|line| options.say(line));
    Ok(ended.exit_status)
}

/// Runs a program while `looker` looks on; says everything but the closing lines.
pub(crate) fn run_watched(options: &RunOptions, looker: Option<&mut Looker<'_>>) -> Result<Ended> {
    let (name, arguments) = options.program.split_first().context("no program is given")?;
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let inspected = inspect::inspect(name, arguments, &path)?;
    let mut command = Command::new(&inspected.path);
    command.arg0(name).args(arguments);
    if let Some(unmanaged) = &inspected.unmanaged {
        if !options.allow_unmanaged {
            bail!("{unmanaged}");
        }
        options.say(&format!("{} runs unmanaged: {}", name.display(), unmanaged.why()));
    }
    let stats = options.stats.as_deref().map(print::create).transpose()?;
    let mut run = PreparedRun::prepare(options, &mut command, inspected.unmanaged.is_none())?;
    let ended = run.start_and_wait(options, command, &inspected, looker)?;
    run.finish(options, &ended, stats.as_ref());
    Ok(ended)
}

struct PreparedRun {
    supervisor: Supervisor,
    cgroup: Option<Cgroup>,
    /// Its part of the outer run's budget, kept until this run has ended.
    _outer: Outer,
}

impl PreparedRun {
    fn prepare(
        options: &RunOptions,
        command: &mut Command,
        is_managed: bool,
    ) -> Result<PreparedRun> {
        let budget_bytes = budget_bytes(options)?;
        let budget_pages = budget_bytes / PAGE_SIZE as u64;
        let member_pages_max = member_bytes_max(options, budget_bytes)? / PAGE_SIZE as u64;
        let mut resources = Resources {
            budget_pages,
            member_pages_max,
            can_grow: true,
            swap: None,
            swap_descriptor: None,
            uffd_device: None,
        };
        if !is_managed {
            let supervisor = Supervisor::new(options, resources)?;
            return Ok(PreparedRun { supervisor, cgroup: None, _outer: Outer::None });
        }
        let outer = reservation::reserve(budget_pages)?;
        resources.can_grow = matches!(outer, Outer::None);
        if matches!(outer, Outer::Ended) {
            options.say(
                "the supervisor of the outer run has ended, so this run's budget is not counted in that \
                 run's",
            );
        }
        let library = installed::find_library()?;
        resources.uffd_device = rights::for_run()?;
        if let Some(folder) = &options.swap_file {
            let swap = SwapFile::create(folder, options.swap_max)?;
            swap.warning.iter().for_each(|warning| options.say(warning));
            resources.swap = Some(swap);
        }
        let far = options.far.as_deref().map(|addresses| {
            far::prepare(addresses, options.far_max, resources.swap.as_ref(), budget_bytes)
        });
        let far = far.transpose()?;
        resources.swap_descriptor = match (&far, &resources.swap) {
            (Some(far), _) => Some(far.descriptor()?),
            (None, Some(swap)) => Some(swap.descriptor.try_clone()?),
            (None, None) => None,
        };
        let mut supervisor = Supervisor::new(options, resources)?;
        if let Some(far) = far {
            supervisor.set_far(far);
        }
        let present = std::env::var_os("LD_PRELOAD");
        command.env("LD_PRELOAD", installed::prepend(&library, present.as_deref()));
        command.env(SOCKET_VARIABLE, &supervisor.socket_name);
        let cgroup = if options.no_cgroup { None } else { make_cgroup(options, budget_bytes) };
        if let Some(cgroup) = &cgroup {
            supervisor.cgroup = Some(cgroup.folder.clone());
            supervisor.on_growth =
                Box::new(cgroup.limit_follower(budget_bytes, options.managed_only));
        }
        if !options.managed_only {
            supervisor.whole = Some(Whole::new(cgroup.as_ref().map(Cgroup::meter)));
        }
        Ok(PreparedRun { supervisor, cgroup, _outer: outer })
    }

    fn start_and_wait(
        &mut self,
        options: &RunOptions,
        command: Command,
        inspected: &Inspected,
        looker: Option<&mut Looker<'_>>,
    ) -> Result<Ended> {
        let signals = Signals::take(&signals::TAKEN).context("cannot take signals over")?;
        self.supervisor.start_far()?;
        let procs = self.cgroup.as_ref().map(Cgroup::procs).transpose()?;
        let started = Instant::now();
        let Spawned { child, cgroup_error } = spawn::spawn(command, signals.inherited(), procs)
            .map_err(|error| refusal(inspected, &error))?;
        if let Some(error) = cgroup_error {
            say_no_cgroup(options, &error.to_string());
            self.cgroup = None;
            self.supervisor.whole = self.supervisor.whole.take().map(|_| Whole::new(None));
        }
        allow_many_connections();
        let mut program = Program::new(child, signals);
        // That the program itself is unmanaged was said at the start.
        let is_unmanaged = inspected.unmanaged.is_some();
        let mut named = 0;
        let on_news = |news: News| match news {
            News::Death(death, account) => {
                say(&report::obituary_line(death, procfs::name(death.pid).as_deref(), &account));
            }
            News::Full { most } => {
                options.say(&format!("{}: no other can join", report::full_line(most)));
            }
            News::Unmanaged(unmanaged) if !is_unmanaged => {
                named += 1;
                if named <= UNMANAGED_NAMED_MAX {
                    options.say(&report::unmanaged_line(&unmanaged));
                }
                if named == UNMANAGED_NAMED_MAX {
                    options.say("other processes that run unmanaged are not named here; quire ps lists them");
                }
            }
            News::Unmanaged(_) => {}
            News::LittleLeft { unmanaged, budget_bytes, shared_by } => {
                options.say(&report::little_left_line(unmanaged, budget_bytes, shared_by));
            }
            News::Thrashing { ease_bytes } => options.say(&report::thrashing_line(ease_bytes)),
        };
        let exit_status = self.supervisor.run(&mut program, on_news, looker)?;
        Ok(Ended {
            account: self.supervisor.account(),
            by_member: self.supervisor.by_member(),
            cgroup_bytes_max: self.cgroup.as_ref().and_then(Cgroup::bytes_max),
            cgroup_limit_bytes: self.cgroup.as_ref().and_then(Cgroup::limit_bytes),
            wall_seconds: started.elapsed().as_secs_f64(),
            exit_status,
        })
    }

    /// Writes the counters, says what did not go as it should, and removes the run's cgroup.
    fn finish(&mut self, options: &RunOptions, ended: &Ended, stats: Option<&File>) {
        let kills = self.cgroup.take().map_or(0, |cgroup| cgroup.oom_kills());
        if kills > 0 {
            say(&report::killed_line(kills, &ended.account, ended.cgroup_limit_bytes));
        }
        if let Some(file) = stats
            && let Err(error) = { file }.write_all(ended.json().as_bytes())
        {
            say(&format!("cannot write the counters: {error}"));
        }
        let refused = ended.account.processes_refused;
        if refused > 0 {
            let most = ended.account.members_max;
            options.say(&format!(
                "{refused} process(es) could not join the run, which may have {most} at a time: forks \
                 failed, and programs ran unmanaged"
            ));
        }
        let left = ended.account.processes_left;
        if left > 0 {
            options.say(&format!("{left} process(es) of the run live on without a supervisor"));
        }
    }
}

/// The least budget, for managed memory alone or for the whole.
pub(crate) fn budget_min_bytes(is_managed_only: bool) -> u64 {
    if is_managed_only { BUDGET_MIN_BYTES } else { WHOLE_MIN_BYTES }
}

fn budget_bytes(options: &RunOptions) -> Result<u64> {
    // clap sees to it that there is one.
    let memory = options.memory.context("no budget is given")?;
    let bytes = memory.bytes_of(machine_memory_bytes());
    let least = budget_min_bytes(options.managed_only);
    if bytes < least {
        bail!("a budget of {} is too small; give {} at least", Human(bytes), Human(least));
    }
    if bytes > BUDGET_MAX_BYTES {
        let [given, most] = [bytes, BUDGET_MAX_BYTES].map(Human);
        bail!("a budget of {given} is more than any program can address; give {most} at most");
    }
    Ok(bytes)
}

/// Most that one process may hold; 0 where only the budget bounds it.
fn member_bytes_max(options: &RunOptions, budget_bytes: u64) -> Result<u64> {
    let Some(most) = options.memory_per_process else { return Ok(0) };
    let bytes = most.bytes_of(budget_bytes);
    let [given, least] = [bytes, BUDGET_MIN_BYTES].map(Human);
    if bytes < BUDGET_MIN_BYTES {
        bail!("{given} are too little for a process; give {least} at least");
    }
    Ok(bytes.min(budget_bytes))
}

fn make_cgroup(options: &RunOptions, budget_bytes: u64) -> Option<Cgroup> {
    let made = Hierarchy::find().and_then(|hierarchy| Cgroup::create(&hierarchy, budget_bytes));
    made.inspect_err(|error| say_no_cgroup(options, &format!("{error:#}"))).ok()
}

fn say_no_cgroup(options: &RunOptions, why: &str) {
    options.say(&format!(
        "no memory cgroup, so the kernel does not check the budget: {why}; quire doctor says how to have one, and \
         --no-cgroup that none is wanted"
    ));
}

/// Why exec failed, which the inspection could not foresee.
fn refusal(inspected: &Inspected, error: &std::io::Error) -> anyhow::Error {
    let message = format!("{}: {error}", inspected.path.display());
    match error.kind() {
        std::io::ErrorKind::NotFound => Refusal::NotFound(message).into(),
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::OutOfMemory => {
            anyhow::anyhow!("cannot fork: {error}")
        }
        _ => Refusal::NotExecutable(message).into(),
    }
}

/// Raises the limit of descriptors, as each member has a connection. The program was started before, with
/// the limit that it was meant to have.
fn allow_many_connections() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}
