//! The command line: its options, their environment twins, its help pages.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, Parser, Subcommand};
use git_version::git_version;
use quire::control::MEMBERS_MAX;
use quire::library::FaultAround;
use quire::process::HANDLERS_MAX;
use quire::store::Direct;
use quire::swap::compress::Strength;

use crate::bench::BenchArgs;
use crate::doctor::DoctorArgs;
use crate::generate::GenerateArgs;
use crate::metrics::MetricsArgs;
use crate::print;
use crate::profile::ProfileArgs;
use crate::profile::touch::TouchArgs;
use crate::ps::PsArgs;
use crate::set::SetArgs;
use crate::setup::SetupArgs;
use crate::size::Size;
use crate::stat::StatArgs;
use crate::top::TopArgs;
use crate::trace::TraceArgs;
use crate::vmstat::VmstatArgs;

/// Run programs in less memory than they want.
#[derive(Parser, Debug)]
#[command(name = "quire", version = VERSION, about, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// The release, and the commit where it was built of one.
const VERSION: &str = git_version!(
    args = ["--always", "--dirty=-modified"],
    prefix = concat!(env!("CARGO_PKG_VERSION"), " ("),
    suffix = ")",
    fallback = env!("CARGO_PKG_VERSION")
);

const EXAMPLES: &str = "\
Examples:
  quire doctor                            what this machine lets quire do
  quire run --memory 512M -- ./program    run a program in 512 MiB
  quire sum --memory 16M huge.iso         sum a file of any length in 16 MiB
  quire run --help                        more examples";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a program, and all processes it starts, within a memory budget
    Run(RunOptions),
    /// Run a program, or look at one that runs, and print what quire counted, as perf stat does
    Stat(StatArgs),
    /// Run a program once, and say how long it would take with less memory
    Profile(ProfileArgs),
    /// List the runs there are, and the processes of each, with what they hold
    Ps(PsArgs),
    /// Watch the runs there are and their processes on a full screen, as top does
    Top(TopArgs),
    /// Print what the runs hold, swap and serve, a line at a time, as vmstat does
    Vmstat(VmstatArgs),
    /// Print events of a program's faults as they come
    Trace(TraceArgs),
    /// Print what runs hold and count as OpenMetrics, or serve it to Prometheus
    Metrics(MetricsArgs),
    /// Change a setting of a run while it goes on
    Set(SetArgs),
    /// Measure programs bare, under quire, and with the kernel's swap
    Bench(BenchArgs),
    /// Compress a file into an archive that can be mapped like the file
    Pack(PackArgs),
    /// Write files, and what is packed in .zst files, to standard output
    Cat(StreamOptions),
    /// Print the checksums of files, and of what is packed in .zst files
    ///
    /// The checksum is XXH3, 64 bits, seed 0: fast, and good against accidents, not against malice.
    /// A line is the checksum, two spaces and the file's name.
    Sum(StreamOptions),
    /// Say what this kernel and this user may do, and how to mend what is missing
    Doctor(DoctorArgs),
    /// Let users run quire without being root: a group, and a rule for udev
    Setup(SetupArgs),
    /// Write man pages and completions, as `make install` does
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// Touch memory, and leave how long it took in a file
    #[command(hide = true)]
    Touch(TouchArgs),
}

const RUN_EXAMPLES: &str = "\
Examples:
  quire run --memory 512M -- python3 train.py
  quire run --memory 50% --swap-file /var/tmp -- ./build.sh
  quire run --memory 2G --swap-file /scratch --swap-max 100G --stats run.json -- ./solver input
  quire run --memory 2G --memory-per-process 512M --members-max 64 -- make -j8
  QUIRE_MEMORY=1G quire run -- make -j4

Sizes are 1024-based: 512M, 2G, 1.5G; a bare number is bytes; 50% is of the machine's memory.

Exit status: the program's own; 128+N where signal N killed it; 125 where quire itself failed,
126 where the program cannot be executed, 127 where it was not found. A program that spent budget
and swap ends with 137, as one does that the kernel's OOM killer takes.

The run ends with the program. Processes it leaves behind live on with what they hold. A run inside
a run takes its whole budget out of the outer one's, for as long as it lasts.";

#[derive(Args, Clone, Debug)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunOptions {
    /// The budget: memory that the program and its children may have together, shared memory, stacks and page
    /// tables included
    // An option that is required: commands that can do without a program take that back.
    #[arg(long, short, env = "QUIRE_MEMORY", value_name = "SIZE", required = true)]
    pub memory: Option<Size>,

    /// The most of it that one process may hold
    #[arg(long, env = "QUIRE_MEMORY_PER_PROCESS", value_name = "SIZE")]
    pub memory_per_process: Option<Size>,

    /// Take the budget for managed memory alone: what quire does not manage may come on top
    #[arg(long, env = "QUIRE_MANAGED_ONLY", value_parser = FalseyValueParser::new())]
    pub managed_only: bool,

    /// The most processes at a time; a fork beyond fails, a program started beyond runs unmanaged
    #[arg(
        long,
        env = "QUIRE_MEMBERS_MAX",
        value_name = "N",
        default_value_t = MEMBERS_MAX as u16,
        value_parser = clap::value_parser!(u16).range(1..=MEMBERS_MAX as i64)
    )]
    pub members_max: u16,

    /// Make a swap file in DIR, for what does not fit compressed (removed when the run ends)
    #[arg(long, env = "QUIRE_SWAP_FILE", value_name = "DIR")]
    pub swap_file: Option<PathBuf>,

    /// The most that the swap file may hold; 30% is of DIR's free space [default: 50%, at most 64G]
    #[arg(long, env = "QUIRE_SWAP_MAX", value_name = "SIZE", requires = "swap_file")]
    pub swap_max: Option<Size>,

    /// Keep on a Redis or Valkey server, or a cluster, what the swap file has no room for: redis://HOST:PORT[,...]
    /// (rediss:// for TLS; the password is taken from REDISCLI_AUTH)
    #[arg(long, env = "QUIRE_FAR", value_name = "URL")]
    pub far: Option<String>,

    /// The most that may be kept there [default: 64G]
    #[arg(long, env = "QUIRE_FAR_MAX", value_name = "SIZE", requires = "far")]
    pub far_max: Option<Size>,

    /// Encrypt it, with a key of the run's that is never written
    #[arg(
        long,
        env = "QUIRE_SWAP_ENCRYPT",
        requires = "swap_file",
        value_parser = FalseyValueParser::new()
    )]
    pub swap_encrypt: bool,

    /// Pack pages by LZ4, by Zstandard, or by LZ4 first and what that leaves large by Zstandard
    #[arg(
        long,
        env = "QUIRE_COMPRESS",
        value_name = "auto|lz4|zstd",
        default_value = "auto",
        value_parser = parse_strength
    )]
    pub compress: Strength,

    /// Map 2^N pages a fault, or let the access pattern choose
    #[arg(
        long,
        env = "QUIRE_FOLIO_ORDER",
        value_name = "auto|0..9",
        default_value = "auto",
        value_parser = parse_folio_order
    )]
    pub folio_order: i32,

    /// Serve each process's faults by N threads [default: one for each CPU, four at most]
    #[arg(
        long,
        env = "QUIRE_HANDLERS",
        value_name = "auto|1..12",
        default_value = "auto",
        hide_default_value = true,
        value_parser = parse_handlers
    )]
    pub handlers: u32,

    /// Let those threads run on any CPU (to measure what a CPU for each of them brings)
    #[arg(long, env = "QUIRE_NO_PINNED_HANDLERS", value_parser = FalseyValueParser::new())]
    pub no_pinned_handlers: bool,

    /// Unmap page by page (slower; to measure what batches bring)
    #[arg(long, env = "QUIRE_NO_BATCH_UNMAP", value_parser = FalseyValueParser::new())]
    pub no_batch_unmap: bool,

    /// Serve every fault under the space's lock (slower; to measure what speculation brings)
    #[arg(long, env = "QUIRE_NO_SPECULATIVE_FAULTS", value_parser = FalseyValueParser::new())]
    pub no_speculative_faults: bool,

    /// Write the counters of the run and of each process to FILE, as JSON
    #[arg(long, env = "QUIRE_STATS", value_name = "FILE")]
    pub stats: Option<PathBuf>,

    /// Print errors only
    #[arg(long, short, env = "QUIRE_QUIET", value_parser = FalseyValueParser::new())]
    pub quiet: bool,

    /// On a terminal, show what the run holds and how long it waits for memory, a line that is written anew
    /// each second
    #[arg(long, env = "QUIRE_PROGRESS", value_parser = FalseyValueParser::new())]
    pub progress: bool,

    /// Run programs that cannot be managed (static, Go, 32-bit, setuid) as if without quire
    #[arg(long, env = "QUIRE_ALLOW_UNMANAGED", value_parser = FalseyValueParser::new())]
    pub allow_unmanaged: bool,

    /// Do not put the program into a memory cgroup
    #[arg(long, env = "QUIRE_NO_CGROUP", value_parser = FalseyValueParser::new())]
    pub no_cgroup: bool,

    /// The program and its arguments
    // Without hyphens in front: an option with its value in one word (-x, or -m1G) would be taken
    // for the program.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

impl RunOptions {
    /// The program and its arguments, for people to read.
    pub(crate) fn command_line(&self) -> String {
        let words: Vec<_> = self.program.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    /// Says what -q leaves out.
    pub(crate) fn say(&self, line: &str) {
        if !self.quiet {
            print::say(line);
        }
    }
}

const PACK_EXAMPLES: &str = "\
Examples:
  quire pack model.bin -o model.bin.zst
  quire pack table.csv -o table.csv.zst --frame-size 256K --level 9

The archive is an ordinary .zst file, which zstd -d unpacks as well. Of a frame, all is unpacked for
the first page that is wanted: larger frames pack better, smaller ones are quicker to get at.";

#[derive(Args, Debug)]
#[command(after_help = PACK_EXAMPLES)]
pub(crate) struct PackArgs {
    /// The file to compress
    #[arg(value_name = "FILE")]
    pub input: PathBuf,

    /// The archive to make; it appears when it is complete
    #[arg(long, short, value_name = "FILE.zst")]
    pub output: PathBuf,

    /// Bytes that are compressed together: whole pages, at most 64M
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub frame_size: Size,

    /// zstd's level: 1 is fast, 19 small
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true)]
    pub level: i32,

    /// Replace an archive that is there
    #[arg(long, short)]
    pub force: bool,

    /// Print errors only
    #[arg(long, short, env = "QUIRE_QUIET", value_parser = FalseyValueParser::new())]
    pub quiet: bool,
}

const STREAM_HELP: &str = "\
A file is mapped and never held as a whole; one whose name ends in .zst is the file that is packed
in it. Standard input, pipes and files of /proc are read and not mapped.

An object of a bucket (s3://BUCKET/KEY) or of a web server (https://HOST/PATH) is mapped as well, by
ranges; beside --memory some 40 MiB are for what is on its way. If it is replaced meanwhile, that is an
error. Credentials, region and endpoint are those of the AWS tools: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_PROFILE and its files; for a public bucket,
AWS_SKIP_SIGNATURE=true.

Exit status: 0; 1 where a file could not be read to its end; 125 where quire itself failed.";

#[derive(Args, Debug)]
#[command(after_help = STREAM_HELP)]
pub(crate) struct StreamOptions {
    /// Memory that may be held
    #[arg(long, short, env = "QUIRE_MEMORY", value_name = "SIZE", default_value = "64M")]
    pub memory: Size,

    /// Map 2^N cached pages around a fault, exactly its page, or let the access pattern choose
    #[arg(
        long,
        env = "QUIRE_FAULT_AROUND",
        value_name = "auto|off|0..9",
        default_value = "auto",
        value_parser = parse_fault_around
    )]
    pub fault_around: FaultAround,

    /// Whether reads pass the kernel's page cache by
    #[arg(
        long,
        env = "QUIRE_DIRECT",
        value_name = "auto|on|off",
        default_value = "auto",
        value_parser = parse_direct
    )]
    pub direct: Direct,

    /// Keep what servers sent in DIR, for the next time; processes may share it
    #[arg(long, env = "QUIRE_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,

    /// The most that this cache may have
    #[arg(
        long,
        env = "QUIRE_CACHE_MAX",
        value_name = "SIZE",
        default_value = "4G",
        value_parser = parse_bytes
    )]
    pub cache_max: u64,

    /// Say at the end what was read, and with how much memory
    #[arg(long)]
    pub stats: bool,

    /// The files, or URLs of objects; - is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    pub files: Vec<PathBuf>,
}

fn parse_bytes(text: &str) -> anyhow::Result<u64> {
    match text.parse()? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Percent(_) => anyhow::bail!("not a size; write 512M, 2G, or a number of bytes"),
    }
}

fn parse_fault_around(text: &str) -> Result<FaultAround, &'static str> {
    match text.parse::<u32>() {
        _ if text == "auto" => Ok(FaultAround::Auto),
        _ if text == "off" => Ok(FaultAround::Off),
        Ok(order @ 0..=9) => Ok(FaultAround::Order(order)),
        _ => Err("write auto, off, or an order from 0 (4 KiB) to 9 (2 MiB)"),
    }
}

fn parse_direct(text: &str) -> Result<Direct, &'static str> {
    match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("write auto, on or off"),
    }
}

/// How hard pages are packed.
pub(crate) fn parse_strength(text: &str) -> Result<Strength, &'static str> {
    match text {
        "auto" => Ok(Strength::Auto),
        "lz4" => Ok(Strength::Lz4),
        "zstd" => Ok(Strength::Zstd),
        _ => Err("write auto, lz4 or zstd"),
    }
}

/// A folio order as the control page has it: -1 is auto.
pub(crate) fn parse_folio_order(text: &str) -> Result<i32, &'static str> {
    match text.parse() {
        _ if text == "auto" => Ok(-1),
        Ok(order @ 0..=9) => Ok(order),
        _ => Err("write auto, or an order from 0 (4 KiB) to 9 (2 MiB)"),
    }
}

/// A number of handlers as the control page has it: 0 is auto.
fn parse_handlers(text: &str) -> Result<u32, &'static str> {
    const { assert!(HANDLERS_MAX == 12, "the messages say how many there may be") };
    match text.parse() {
        _ if text == "auto" => Ok(0),
        Ok(count @ 1..=12) => Ok(count),
        _ => Err("write auto, or a number from 1 to 12"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn run_options(line: &str) -> Result<RunOptions, clap::Error> {
        let words = ["quire", "run"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| match arguments.command {
            Command::Run(options) => options,
            other => unreachable!("`run` was asked for: {other:?}"),
        })
    }

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn options_end_where_the_program_starts() {
        let options = run_options("--memory 512M --quiet ls --quiet -l -- x").unwrap();
        assert_eq!(options.program, ["ls", "--quiet", "-l", "--", "x"]);
        assert!(options.quiet);
        assert_eq!(options.memory, Some(Size::Bytes(512 << 20)));
        assert_eq!(options.folio_order, -1);
        let options = run_options("-m 1G -- -odd-name").unwrap();
        assert_eq!(options.program, ["-odd-name"]);
        let options = run_options("-m1G ls -m2G").unwrap();
        assert_eq!(options.memory, Some(Size::Bytes(1 << 30)), "an option's value may stick to it");
        assert_eq!(options.program, ["ls", "-m2G"]);
        assert!(run_options("-m 1G --no-such-option ls").is_err());
    }

    #[test]
    fn folio_orders_are_checked() {
        for (text, order) in [("auto", -1), ("0", 0), ("9", 9)] {
            let options = run_options(&format!("-m 1G --folio-order {text} true")).unwrap();
            assert_eq!(options.folio_order, order);
        }
        for text in ["10", "-1", "four"] {
            assert!(run_options(&format!("-m 1G --folio-order={text} true")).is_err());
        }
    }

    #[test]
    fn there_is_one_handler_at_least_and_twelve_at_most() {
        for (text, count) in [("auto", 0), ("1", 1), ("12", 12)] {
            let options = run_options(&format!("-m 1G --handlers {text} true")).unwrap();
            assert_eq!(options.handlers, count);
        }
        for text in ["0", "13", "-1", "four"] {
            assert!(run_options(&format!("-m 1G --handlers={text} true")).is_err());
        }
    }

    #[test]
    fn files_are_mapped_as_it_is_said() {
        let parse = |line: &str| {
            let words = ["quire", "sum"].into_iter().chain(line.split_whitespace());
            Arguments::try_parse_from(words).map(|arguments| match arguments.command {
                Command::Sum(options) => options,
                other => unreachable!("`sum` was asked for: {other:?}"),
            })
        };
        let options = parse("--fault-around off --direct on -m 8M a -").unwrap();
        assert_eq!(options.fault_around, FaultAround::Off);
        assert_eq!(options.direct, Direct::On);
        assert_eq!(options.memory, Size::Bytes(8 << 20));
        assert_eq!(options.files, [PathBuf::from("a"), PathBuf::from("-")]);
        let options = parse("").unwrap();
        assert_eq!((options.fault_around, options.direct), (FaultAround::Auto, Direct::Auto));
        assert_eq!(options.memory, Size::Bytes(64 << 20));
        assert_eq!(options.files, [PathBuf::from("-")]);
        assert_eq!(parse("--fault-around 9 x").unwrap().fault_around, FaultAround::Order(9));
        for line in ["--fault-around 10", "--fault-around on", "--direct maybe", "-m 0"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn what_is_missing_is_said() {
        for line in ["-- true", "-m 1G", "-m 0 true", "-m 1G --swap-max 1G true"] {
            assert!(run_options(line).is_err(), "{line}");
        }
    }
}
