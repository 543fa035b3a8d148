//! `quire profile`: how much memory a program needs, from one run of it.
//!
//! The program runs in all the memory that there is, and its members tell which of a sample of their pages it
//! touches. [`reader`] reads that and steers it, [`world`] knows what there is, and each [`miniature`] plays what
//! reclaim would have done with it in a smaller budget; [`costs`] measures what a fault costs here; [`curve`] puts
//! all together and says it.

mod along;
mod border;
mod costs;
mod curve;
mod looks;
mod miniature;
mod misses;
mod picture;
mod reader;
mod region;
pub(crate) mod touch;
mod uses;
mod world;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use quire::control::Control;

use self::curve::Curve;
use self::reader::Reader;
use crate::cli::RunOptions;
use crate::size::Size;
use crate::supervisor::Looker;
use crate::{print, procfs, run};

const EXAMPLES: &str = "\
Examples:
  quire profile -- python3 train.py
  quire profile --swap-file /var/tmp --svg need.svg -- make -j4
  quire profile --json need.json -- ./solver input

The program runs once, in all the memory that is available, or in --memory. What is said of smaller budgets is for
runs with the same options: give --swap-file where such a run would have one. Memory that quire does not manage
counts, as in 'quire run'.

Exit status: the program's own; 125 where quire itself failed.";

#[derive(Args, Debug)]
#[command(
    after_help = EXAMPLES,
    mut_arg("memory", |memory| memory.required(false).help(
        "The budget in which the program is profiled [default: nine tenths of the memory that is available]"
    )),
)]
pub(crate) struct ProfileArgs {
    /// Draw the curve as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write the curve as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Print to FILE
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    #[command(flatten)]
    pub run: RunOptions,
}

pub(crate) fn profile(args: &ProfileArgs) -> Result<u8> {
    let output = args.output.as_deref().map(print::create).transpose()?;
    let json = args.json.as_deref().map(print::create).transpose()?;
    let svg = args.svg.as_deref().map(print::create).transpose()?;
    let mut options = args.run.clone();
    if options.memory.is_none() {
        let available = procfs::available_memory_bytes().context("cannot read /proc/meminfo")?;
        options.memory = Some(Size::Bytes(available / 10 * 9));
    }
    options.say("measuring what faults cost here, a few seconds");
    let costs = costs::measure(&options)?;
    let mut reader = Reader::new(costs, options.swap_file.is_some());
    let mut look = |control: &Control, moment| reader.look(control, moment);
    let mut looker = Looker::new(Some(Duration::from_millis(2)), &mut look);
    let ended = run::run_watched(&options, Some(&mut looker))?;
    let profiled = reader.end(ended.wall_seconds, options.command_line());
    let curve = Curve::of(&profiled);
    let write = |file: Option<std::fs::File>, text: &dyn Fn() -> Result<String>| -> Result<()> {
        let Some(mut file) = file else { return Ok(()) };
        std::io::Write::write_all(&mut file, text()?.as_bytes()).context("cannot write the profile")
    };
    write(json, &|| Ok(curve.json()))?;
    write(svg, &|| picture::draw(&curve))?;
    match output {
        None => curve.text().lines().for_each(print::say),
        some => write(some, &|| Ok(curve.text()))?,
    }
    Ok(ended.exit_status)
}
