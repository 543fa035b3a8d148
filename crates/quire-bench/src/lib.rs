//! `quire bench`: measures programs bare, under quire, and with the kernel's own swap; and files
//! read and written through the library's objects, beside mmap(2).
//!
//! Owns the contestants, the programs they run (some of them built into this binary as hidden
//! subcommands), and the figures. Leaves everything about managing memory to `quire run`, which it
//! starts as a user would, and to the library. All contestants take turns (ABC ABC ...), a ratio is
//! taken between runs of one turn, and what is reported is the median with the least and the most.
//!
//! What it sets up in the kernel (a zram device, memory cgroups, the sizes of huge pages, a device's
//! read-ahead) is undone when the value that stands for it is dropped; signals are noticed between
//! waits, so that the drops happen then too.

#![deny(unsafe_code)]
#![warn(unreachable_pub)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use quire_cli::print::say;
use quire_cli::size::Size;
use quire_cli::{QUIRE_FAILED, end_with_reader};

mod all;
mod around;
mod arrays;
mod contestant;
mod data;
mod far;
mod fit;
mod fork;
mod handlers;
mod harness;
mod jobs;
mod kernel_swap;
mod machine;
mod memory_limit;
mod objects;
mod pageout;
mod policies;
mod pressure;
mod programs;
mod rmap;
mod samples;
mod service;
mod simulate;
mod speculative;
#[allow(unsafe_code, reason = "the bench's own ring: waiting with usage, and raw mappings")]
mod sys;
mod tree;
mod url;
mod versus;
mod waiters;
mod work;

use harness::{Options, Report};

/// Measure programs bare, under quire, and with the kernel's swap
#[derive(Parser, Debug)]
#[command(name = "quire-bench", bin_name = "quire bench", max_term_width = 100)]
struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand, Debug)]
enum BenchCommand {
    /// All suites, one after the other, as one report
    All(all::AllBench),
    #[command(flatten)]
    Suite(SuiteCommand),
    /// What the kernel's part of a fault costs here, for simulations
    Calibrate(simulate::CalibrateBench),
    /// Which page goes: policies, played on the order in which programs ask for their pages
    Policies(policies::PoliciesBench),
    #[command(flatten)]
    Program(ProgramCommand),
}

/// What measures.
#[derive(Subcommand, Debug)]
enum SuiteCommand {
    /// Programs that fit their budget, and programs that want two and four times as much
    Run(RunBench),
    /// Programs in a part of the memory that they want, beside each of the kernel's swaps
    Pressure(pressure::PressureBench),
    /// What it costs to page out: batches against single pages, large folios against small
    Swap(SwapBench),
    /// What it takes to serve a fault, against the bare loop
    Fault(FaultBench),
    /// Reads through mappings of a file, by what is mapped around a fault
    FaultAround(AroundBench),
    /// Reads of a file that is four times as large as the memory for it
    Objects(ObjectsBench),
    /// What the reverse map's lock costs, and what walks gain that share it
    Rmap(RmapBench),
    /// What a page lock costs, free, contended, and in what is done with objects
    Waiters(WaitersBench),
    /// How many threads should serve faults, where, and from how many descriptors
    Handlers(HandlersBench),
    /// What it takes to start a program, by fork and by spawn
    Fork(ForkBench),
    /// Pages that are on a Redis server, by how far it is, beside the swap file
    Far(FarBench),
    /// An object of a server in order, beside the client of servers alone
    Url(UrlBench),
    /// numpy on arrays of files, by the Python package, numpy.memmap and plain memory
    Arrays(ArraysBench),
    /// Faults without the space's lock, against faults that share it, and the kernel's
    Speculative(SpeculativeBench),
}

/// What is measured.
#[derive(Subcommand, Debug)]
enum ProgramCommand {
    /// Threads that look up records, as ebizzy's do
    #[command(hide = true)]
    Ebizzy(speculative::EbizzyArgs),
    /// Threads that fault
    #[command(hide = true)]
    Load(speculative::LoadArgs),
    /// Threads that touch pages, served in one of many ways
    #[command(hide = true)]
    Faults(handlers::FaultsArgs),
    /// A program that starts others
    #[command(hide = true)]
    Forks(fork::ForksArgs),
    /// A load for Redis, which it starts
    #[command(hide = true)]
    RedisLoad(pressure::RedisArgs),
    /// Threads that touch pages in many orders
    #[command(hide = true)]
    Touch(pressure::TouchArgs),
    /// A program that is measured
    #[command(hide = true)]
    Work(work::WorkArgs),
    /// A file read through mmap, measured
    #[command(hide = true)]
    Mmap(objects::MmapArgs),
}

impl SuiteCommand {
    fn options(&self) -> &Options {
        match self {
            SuiteCommand::Run(options) => &options.common,
            SuiteCommand::Pressure(options) => &options.common,
            SuiteCommand::Swap(options) => &options.common,
            SuiteCommand::Fault(options) => &options.common,
            SuiteCommand::FaultAround(options) => &options.common,
            SuiteCommand::Objects(options) => &options.common,
            SuiteCommand::Rmap(options) => &options.common,
            SuiteCommand::Waiters(options) => &options.common,
            SuiteCommand::Handlers(options) => &options.common,
            SuiteCommand::Fork(options) => &options.common,
            SuiteCommand::Far(options) => &options.common,
            SuiteCommand::Url(options) => &options.common,
            SuiteCommand::Arrays(options) => &options.common,
            SuiteCommand::Speculative(options) => &options.common,
        }
    }

    fn report(&self) -> Result<Report> {
        match self {
            SuiteCommand::Run(options) => versus::report(options),
            SuiteCommand::Pressure(options) => pressure::report(options),
            SuiteCommand::Swap(options) if options.simulation.simulate => {
                simulate::pageout::report(options)
            }
            SuiteCommand::Swap(options) => pageout::report(options),
            SuiteCommand::Fault(options) => service::report(options),
            SuiteCommand::FaultAround(options) if options.simulation.simulate => {
                simulate::around::report(options)
            }
            SuiteCommand::FaultAround(options) => around::report(options),
            SuiteCommand::Objects(options) => objects::report(options),
            SuiteCommand::Rmap(options) if options.simulation.simulate => {
                simulate::rmap::report(options)
            }
            SuiteCommand::Rmap(options) => rmap::report(options),
            SuiteCommand::Waiters(options) => waiters::report(options),
            SuiteCommand::Handlers(options) => handlers::report(options),
            SuiteCommand::Fork(options) => fork::report(options),
            SuiteCommand::Far(options) => far::report(options),
            SuiteCommand::Url(options) => url::report(options),
            SuiteCommand::Arrays(options) => arrays::report(options),
            SuiteCommand::Speculative(options) if options.simulation.simulate => {
                simulate::speculative::report(options)
            }
            SuiteCommand::Speculative(options) => speculative::report(options),
        }
    }
}

impl ProgramCommand {
    fn run(&self) -> Result<u8> {
        match self {
            ProgramCommand::Ebizzy(ebizzy) => speculative::ebizzy(ebizzy),
            ProgramCommand::Load(load) => speculative::load(load),
            ProgramCommand::Faults(faults) => handlers::faults(faults),
            ProgramCommand::Forks(forks) => fork::forks(forks),
            ProgramCommand::RedisLoad(load) => pressure::redis_load(load),
            ProgramCommand::Touch(touch) => pressure::touch(touch),
            ProgramCommand::Work(work) => work::main(work),
            ProgramCommand::Mmap(mmap) => objects::read_by_mmap(mmap),
        }
    }
}

#[derive(Args, Debug)]
struct RunBench {
    #[command(flatten)]
    common: Options,

    /// Numbers of threads that the programs run with
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,

    /// What to measure
    #[arg(long, value_name = "PART", value_delimiter = ',', default_values = ["fits", "memory", "real", "build", "orders"])]
    only: Vec<Part>,

    /// What the memory program wants
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    size: Size,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Programs that fit their budget
    Fits,
    /// Scans and random access to more than fits
    Memory,
    /// CPython and GNU sort with less than they want
    Real,
    /// zstd built by make -j2: all processes together where they fit, and in half of what they want
    Build,
    /// Builds and a mass of short processes, by the order of folios
    Orders,
}

#[derive(Args, Debug)]
struct SwapBench {
    #[command(flatten)]
    common: Options,

    #[command(flatten)]
    simulation: simulate::Simulation,
}

#[derive(Args, Debug)]
struct FaultBench {
    #[command(flatten)]
    common: Options,

    /// Numbers of threads that fault
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
}

#[derive(Args, Debug)]
struct AroundBench {
    #[command(flatten)]
    common: Options,

    /// Numbers of threads that read, each through a mapping of its own [default: 1,2,4,8; simulated
    /// 1,8,32,60,120]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    threads: Vec<usize>,

    /// What is mapped around a fault: off, auto, an order from 0 to 9
    #[arg(long, value_name = "WHAT,WHAT", value_delimiter = ',', value_parser = around::Around::parse,
          default_value = "off,1,3,4,5,7,9,auto")]
    around: Vec<around::Around>,

    /// How large the file is; three times as much memory is used [default: 256M; simulated 16G, which
    /// takes no memory]
    #[arg(long, value_name = "SIZE")]
    size: Option<Size>,

    /// Where the file is made, on the disk that is to be measured [default: the directory for
    /// temporary files]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,

    #[command(flatten)]
    simulation: simulate::Simulation,
}

#[derive(Args, Debug)]
struct ObjectsBench {
    #[command(flatten)]
    common: Options,

    /// What to measure
    #[arg(long, value_name = "PART", value_delimiter = ',',
          default_values = ["cached", "in-order", "random"])]
    only: Vec<objects::ObjectsPart>,

    /// How large the file is; a quarter of it is the memory [default: 512M]
    #[arg(long, value_name = "SIZE")]
    size: Option<Size>,

    /// Pages that are read at random
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..))]
    reads: Option<u32>,

    /// What the file's device reads ahead, for mmap; set for the time of a read, by root
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',', default_value = "128K,8M")]
    read_ahead: Vec<Size>,

    /// Where the file is made, on the disk that is to be measured [default: $TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct RmapBench {
    #[command(flatten)]
    common: Options,

    /// Numbers of threads that walk
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2, 4])]
    threads: Vec<usize>,

    /// Numbers of workers that do jobs [default: 1,2,4,8; simulated 1,4,16,32,60]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    workers: Vec<usize>,

    #[command(flatten)]
    simulation: simulate::Simulation,
}

#[derive(Args, Debug)]
struct WaitersBench {
    #[command(flatten)]
    common: Options,

    /// Numbers of threads that want one lock
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [2, 4, 8])]
    threads: Vec<usize>,

    /// What to measure
    #[arg(long, value_name = "PART", value_delimiter = ',', default_values = ["locks", "objects"])]
    only: Vec<waiters::WaitersPart>,

    /// How large the files are, and the largest object that is touched [default: 128M]
    #[arg(long, value_name = "SIZE")]
    size: Option<Size>,

    /// Where the files are made [default: $TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct HandlersBench {
    #[command(flatten)]
    common: Options,

    /// What to measure
    #[arg(long, value_name = "PART", value_delimiter = ',', default_values = ["engine", "objects", "raw"])]
    only: Vec<handlers::HandlersPart>,

    /// Numbers of threads that fault
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    threads: Vec<usize>,

    /// Faults of all threads together, each time
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pages: usize,

    /// Microseconds that a thread computes between its faults
    #[arg(long, value_name = "US", default_value_t = 0)]
    think_us: u64,

    /// Microseconds that a raw handler computes for a fault, beside the copy
    #[arg(long, value_name = "US", default_value_t = 2)]
    work_us: u64,
}

#[derive(Args, Debug)]
struct ForkBench {
    #[command(flatten)]
    common: Options,

    /// What the parent holds
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',', default_value = "1M,64M,200M")]
    size: Vec<Size>,

    /// Programs that are started each time, each way
    #[arg(long, value_name = "N", default_value_t = 40)]
    processes: usize,
}

#[derive(Args, Debug)]
struct ArraysBench {
    #[command(flatten)]
    common: Options,

    /// The Python that has the package: by default python3
    #[arg(long, value_name = "FILE")]
    python: Option<std::path::PathBuf>,
}

#[derive(Args, Debug)]
struct FarBench {
    #[command(flatten)]
    common: Options,

    /// How long an answer takes, in milliseconds; 0 is without a proxy
    #[arg(long, value_name = "MS,MS", value_delimiter = ',', value_parser = parse_milliseconds,
          default_value = "0,0.2,1,10,50")]
    round_trips: Vec<f64>,
}

fn parse_milliseconds(text: &str) -> Result<f64, &'static str> {
    let milliseconds =
        text.parse().ok().filter(|milliseconds| (0.0..=1000.0).contains(milliseconds));
    milliseconds.ok_or("write milliseconds, from 0 to 1000")
}

#[derive(Args, Debug)]
struct UrlBench {
    #[command(flatten)]
    common: Options,

    /// An object to read instead of the bench's own: s3://BUCKET/KEY (credentials and endpoint from the
    /// environment), https://HOST/PATH
    #[arg(long)]
    url: Option<String>,
}

#[derive(Args, Debug)]
struct SpeculativeBench {
    #[command(flatten)]
    common: Options,

    /// What to measure
    #[arg(long, value_name = "PART", value_delimiter = ',',
          default_values = ["ebizzy", "scaler", "contention", "kernbench"])]
    only: Vec<speculative::SpeculativePart>,

    /// Numbers of threads that fault; of those that do so beside one that changes the layout, 8 at most
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    threads: Vec<usize>,

    /// Seconds that ebizzy and the scaler's programs run each time
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,

    /// Runs of ebizzy, each way [default: as many as rounds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: Option<u32>,

    /// Builds of the tree, each way [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    builds: Option<u32>,

    /// A tree to build, with a Makefile that knows `clean` [default: zstd, from cargo's registry]
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,

    /// Memory of each thread that faults; less where the machine is small
    #[arg(long, value_name = "SIZE", default_value = "128M")]
    area: Size,

    /// Memory that another thread maps and unmaps beside the faults; the first rows have no such thread
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',', default_value = "64M,256M")]
    mapped: Vec<Size>,

    /// How it changes the layout. An unmap drops its pages outside of the space's lock; a protect holds
    /// that lock until it is done
    #[arg(long, value_name = "CHANGE", value_delimiter = ',', default_values = ["unmap", "protect"])]
    beside: Vec<speculative::Change>,

    #[command(flatten)]
    simulation: simulate::Simulation,
}

/// Runs the bench that the command line names.
pub fn main() -> ExitCode {
    let args = match BenchArgs::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { QUIRE_FAILED.into() } else { ExitCode::SUCCESS };
        }
    };
    end_with_reader();
    let result = match &args.command {
        BenchCommand::All(options) => all::main(options),
        BenchCommand::Suite(suite) => harness::main(suite.options(), || suite.report()),
        BenchCommand::Calibrate(options) => simulate::calibrate(options),
        BenchCommand::Policies(options) => policies::main(options),
        BenchCommand::Program(program) => program.run(),
    };
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            say(&format!("{error:#}"));
            QUIRE_FAILED.into()
        }
    }
}
