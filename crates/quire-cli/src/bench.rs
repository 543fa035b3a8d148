//! `quire bench`: runs the bench, which is a program of its own, in place of this process.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::installed;

/// The environment variable that tells the bench which quire runs it, and so is measured.
pub const PROGRAM_VARIABLE: &str = "QUIRE_PROGRAM";

#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct BenchArgs {
    /// The suite and its options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "SUITE")]
    arguments: Vec<OsString>,
}

/// `quire bench`; returns only where the bench cannot be run.
pub(crate) fn bench(args: &BenchArgs) -> Result<u8> {
    let program = installed::find_bench()?;
    let mut command = Command::new(&program);
    command.args(&args.arguments);
    command.env(PROGRAM_VARIABLE, std::env::current_exe().context("cannot find quire itself")?);
    Err(command.exec()).with_context(|| format!("cannot run {}", program.display()))
}
