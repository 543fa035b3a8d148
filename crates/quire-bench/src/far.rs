//! `quire bench far`: pages that come back from a server, by how far it is, beside the swap file.
//!
//! A Redis server of this machine's, which is started for the bench, behind a [`Link`] that
//! delays what passes and no more: a network's bandwidth and its losses are not emulated.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use quire_cli::size::Human;

use super::contestant::{Contestant, Stage};
use super::harness::link::Link;
use super::harness::report::{Report, spread};
use super::harness::suite::{Along, Figures, Head, Results, Shape, Sheet, Suite, figures, measure};
use super::{FarBench, programs};

const TITLE: &str = "microseconds a page";
const FILE: &str = "swap file";
const FIGURE: &str = "us";
/// How a page's way is called, the pattern that asks for it, and by how many threads.
const ROWS: [(&str, &str, usize); 3] =
    [("at random", "uniform", 1), ("at random, 4 threads", "uniform", 4), ("in order", "loop", 1)];
/// About how long a cell may take.
const CELL: Duration = Duration::from_secs(5);
/// How long the server may take to start.
const STARTED_WITHIN: Duration = Duration::from_secs(20);
const PAGE_BYTES: u64 = 4096;

/// A server that ends with this.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start() -> Result<Server> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let process = command.spawn().context("redis-server cannot be run; install redis")?;
        let server = Server { process, port };
        let started = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            ensure!(started.elapsed() < STARTED_WITHIN, "redis-server does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a cell is measured by; without a delay it is the swap file.
struct Plan {
    pattern: &'static str,
    threads: usize,
    round_trip: Option<Duration>,
}

struct FarSuite<'a> {
    options: &'a FarBench,
    stage: Stage,
    server: Server,
    bytes: u64,
}

/// Runs the bench.
pub(crate) fn report(options: &FarBench) -> Result<Report> {
    let common = &options.common;
    let stage = Stage::without_kernel(common.quire.as_deref())?;
    let server = Server::start()?;
    let bytes = common.size(32 << 20, 64 << 20, 256 << 20);
    measure(&mut FarSuite { options, stage, server, bytes }, common)
}

fn column_of(round_trip: Duration) -> String {
    format!("{} ms", round_trip.as_secs_f64() * 1e3)
}

impl FarSuite<'_> {
    /// As many as take about the time of a cell.
    fn accesses(&self, plan: &Plan) -> u64 {
        let cell = if self.options.common.quick { CELL / 5 } else { CELL };
        // About: each second page at random is a fault, and one of many in order.
        let each =
            plan.round_trip.unwrap_or_default() / if plan.pattern == "loop" { 16 } else { 2 };
        let accesses = cell.as_micros() / (each + Duration::from_micros(50)).as_micros();
        (accesses as u64).clamp(100, self.bytes / PAGE_BYTES) * plan.threads as u64
    }
}

impl Suite for FarSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let shown = Human(self.bytes);
        Head {
            name: "far",
            question: "What does a page take that is on a server, by how far that is?",
            facts: vec![
                ("memory", format!("{shown} that do not pack, in half of that")),
                ("server", "redis-server on this machine, behind a proxy that delays".to_owned()),
            ],
            rounds: self.options.common.rounds(1, 3),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheet = Sheet::new(TITLE, Shape::Cells).base(FILE).plot(Along::Rows);
        for (row, pattern, threads) in ROWS {
            sheet.add(row, FILE, Plan { pattern, threads, round_trip: None });
            for &milliseconds in &self.options.round_trips {
                let round_trip = Duration::from_secs_f64(milliseconds / 1e3);
                sheet.add(
                    row,
                    column_of(round_trip),
                    Plan { pattern, threads, round_trip: Some(round_trip) },
                );
            }
        }
        vec![sheet]
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let accesses = self.accesses(plan);
        let line = format!(
            "touch --size {} --pattern {} --threads {} --accesses {accesses}",
            self.bytes, plan.pattern, plan.threads
        );
        let workload = programs::built_in(&self.stage.own, "touch", &line);
        let options = match plan.round_trip {
            None => vec!["--swap-file".into(), self.stage.folder().into()],
            Some(Duration::ZERO) => {
                vec!["--far".into(), format!("redis://127.0.0.1:{}", self.server.port).into()]
            }
            Some(round_trip) => {
                let port = Link { round_trip, bytes_a_second: None }.start(self.server.port)?;
                vec!["--far".into(), format!("redis://127.0.0.1:{port}").into()]
            }
        };
        let outcome = self
            .stage
            .run(&workload, &Contestant::Quire { budget_bytes: self.bytes / 2, options })?;
        Ok(figures([(FIGURE, outcome.figure("us an access")?)]))
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |(row, _, _): &(&str, &str, usize)| {
            let of_file = |&milliseconds: &f64| {
                let column = column_of(Duration::from_secs_f64(milliseconds / 1e3));
                let over = results.over(TITLE, row, [&column, FILE], FIGURE);
                format!("{} at {column}", spread(&over, "x"))
            };
            let all: Vec<String> = self.options.round_trips.iter().map(of_file).collect();
            format!("{row}: of what the swap file takes, {}.", all.join(", "))
        };
        ROWS.iter().map(sentence).collect()
    }
}
