//! `quire`: runs programs in less memory than they want.
//!
//! `cli.rs` has the commands. For `run` the managing itself is done in the programs' own processes, by the
//! preload library; what they share is [`quire::control`]. `cat` and `sum` read files through the engine's
//! library, in this process. The bench is a crate of its own, and shares what is public here.

#![deny(unsafe_code)]
#![warn(unreachable_pub)]

use std::process::ExitCode;

use clap::Parser as _;

pub use bench::PROGRAM_VARIABLE;
pub use sys::signals::end_with_reader;

mod bench;
pub mod cgroup;
mod cli;
mod container;
mod doctor;
mod events;
mod far;
mod generate;
mod inspect;
mod installed;
mod metrics;
mod pack;
pub mod print;
mod procfs;
mod profile;
mod progress;
mod ps;
mod report;
mod reservation;
mod rights;
mod run;
mod runs;
mod set;
mod setup;
pub mod size;
mod stat;
mod stream;
mod supervisor;
#[allow(
    unsafe_code,
    reason = "the one ring that may: system calls that rustix has no safe form of"
)]
mod sys;
mod top;
mod trace;
mod vmstat;

/// Exit status where quire itself failed.
pub const QUIRE_FAILED: u8 = 125;
/// Exit status where the program cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Exit status where the program was not found.
const NOT_FOUND: u8 = 127;

/// Runs the command that the command line names.
pub fn main() -> ExitCode {
    let arguments = match cli::Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { QUIRE_FAILED.into() } else { ExitCode::SUCCESS };
        }
    };
    // A supervisor goes on though its output has no reader.
    let is_supervisor = match &arguments.command {
        cli::Command::Run(_) | cli::Command::Profile(_) => true,
        cli::Command::Stat(args) => args.pid.is_empty(),
        cli::Command::Trace(args) => args.pid.is_none(),
        _ => false,
    };
    if !is_supervisor {
        end_with_reader();
    }
    // Each command returns the exit status.
    let result = match arguments.command {
        cli::Command::Run(options) => run::run(&options),
        cli::Command::Stat(args) => stat::stat(&args),
        cli::Command::Profile(args) => profile::profile(&args),
        cli::Command::Ps(args) => ps::ps(&args),
        cli::Command::Top(args) => top::top(&args),
        cli::Command::Vmstat(args) => vmstat::vmstat(&args),
        cli::Command::Trace(args) => trace::trace(&args),
        cli::Command::Metrics(args) => metrics::metrics(&args),
        cli::Command::Set(args) => set::set(&args),
        cli::Command::Bench(arguments) => bench::bench(&arguments),
        cli::Command::Pack(arguments) => pack::pack(&arguments),
        cli::Command::Cat(options) => stream::cat(&options),
        cli::Command::Sum(options) => stream::sum(&options),
        cli::Command::Generate(args) => generate::generate(&args),
        cli::Command::Touch(args) => profile::touch::touch(&args),
        cli::Command::Doctor(args) => Ok(if doctor::doctor(&args) { 0 } else { 1 }),
        cli::Command::Setup(args) => setup::setup(&args),
    };
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            print::say(&format!("{error:#}"));
            match error.downcast_ref() {
                Some(inspect::Refusal::NotFound(_)) => NOT_FOUND.into(),
                Some(inspect::Refusal::NotExecutable(_)) => NOT_EXECUTABLE.into(),
                None => QUIRE_FAILED.into(),
            }
        }
    }
}
