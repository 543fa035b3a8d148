//! `quire metrics`: what runs hold and count, as OpenMetrics: printed once, or scraped by Prometheus.
//!
//! Owns the names. Leaves to `runs` which runs there are; each scrape looks anew.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use quire::control::{Event, FaultKind};
use quire::units::PAGE_SIZE;
use tiny_http::{Header, Method, Request, Response, Server};

use crate::print::{print, say};
use crate::procfs;
use crate::runs::counts::{Counts, Scope};
use crate::runs::gauges::Gauges;
use crate::runs::{self, Access, Run};

/// What a scraper is told that it gets.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Where it is.
const PATH: &str = "/metrics";

const EXAMPLES: &str = "\
Examples:
  quire metrics                           print them once
  quire metrics --listen 127.0.0.1:9798   serve http://127.0.0.1:9798/metrics until ^C

All runs that this user may look into are in them, by the labels pid (of the quire run) and command:
whoever can reach the address reads their command lines.
grafana.json, among Quire's documents, is a dashboard for them.";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MetricsArgs {
    /// Serve them by HTTP at this address, until ^C
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<std::net::SocketAddr>,
}

pub(crate) fn metrics(args: &MetricsArgs) -> Result<u8> {
    let Some(address) = args.listen else {
        print(&page()?)?;
        return Ok(0);
    };
    let server = Server::http(address).map_err(|error| {
        anyhow!("cannot listen on {address}: {error}; name another address by --listen")
    })?;
    say(&format!("http://{}{PATH} has the metrics", server.server_addr()));
    for request in server.incoming_requests() {
        answer(request);
    }
    Ok(0)
}

/// A scraper that is gone before it has its answer asks again.
fn answer(request: Request) {
    let is_asked = request.url().split('?').next() == Some(PATH);
    let answered = match (request.method(), is_asked) {
        (Method::Get, true) => match page() {
            Ok(page) => {
                let kind = Header::from_bytes("Content-Type", CONTENT_TYPE);
                let kind = kind.expect("it is a header");
                request.respond(Response::from_string(page).with_header(kind))
            }
            Err(error) => {
                let text = format!("{error:#}\n");
                request.respond(Response::from_string(text).with_status_code(500))
            }
        },
        _ => {
            let text = format!("there is {PATH}\n");
            request.respond(Response::from_string(text).with_status_code(404))
        }
    };
    let _ = answered;
}

/// The metrics of all runs there are, which may be none.
fn page() -> Result<String> {
    let found = runs::find(Access::Read)?;
    encode(found.runs.iter().map(Sample::of).collect())
}

fn encode(samples: Vec<Sample>) -> Result<String> {
    let mut registry = Registry::with_prefix("quire");
    registry.register_collector(Box::new(Samples(samples)));
    let mut text = String::new();
    text::encode(&mut text, &registry).context("the metrics cannot be written")?;
    Ok(text)
}

/// A run as it is now.
#[derive(Debug)]
struct Sample {
    pid: u32,
    command: String,
    budget_pages: u64,
    gauges: Gauges,
    counts: Counts,
}

#[derive(Debug)]
struct Samples(Vec<Sample>);

/// A size, its help, and what it is of a run, in pages.
type Size = (&'static str, &'static str, fn(&Sample) -> u64);

const SIZES: [Size; 8] = [
    ("budget", "What the run may hold", |sample| sample.budget_pages),
    ("held", "What it holds of that", |sample| sample.gauges.held),
    ("unmanaged", "In memory beside, and not managed", |sample| sample.gauges.unmanaged),
    ("wanted", "Its data, wherever that rests", |sample| sample.gauges.wanted),
    ("managed", "Address space that is managed", |sample| sample.gauges.managed),
    ("pool", "What compressed pages hold of the budget", |sample| sample.gauges.pool),
    ("swap_file", "Swapped to the file", |sample| sample.gauges.swap_file),
    ("far", "Swapped to a server", |sample| sample.gauges.far),
];

impl Sample {
    fn of(run: &Run) -> Sample {
        let control = &run.control;
        Sample {
            pid: run.supervisor_pid,
            command: procfs::command_line(run.supervisor_pid).unwrap_or_default(),
            budget_pages: control.budget_pages.load(Relaxed),
            gauges: Gauges::read(control, Scope::Run),
            counts: Counts::read(control, Scope::Run).unwrap_or_default(),
        }
    }

    /// What all metrics of the run are known by, and one more label.
    fn labels(&self, more: Option<(&'static str, &'static str)>) -> Vec<(&'static str, String)> {
        let own = [("pid", self.pid.to_string()), ("command", self.command.clone())];
        own.into_iter().chain(more.map(|(name, value)| (name, value.to_owned()))).collect()
    }
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "processes",
            "Processes of the run",
            None,
            MetricType::Gauge,
        )?;
        for sample in &self.0 {
            let processes = sample.gauges.processes as i64;
            family.encode_family(&sample.labels(None))?.encode_gauge(&processes)?;
        }
        for (name, help, pages) in SIZES {
            let mut family =
                encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for sample in &self.0 {
                let bytes = (pages(sample) * PAGE_SIZE as u64) as i64;
                family.encode_family(&sample.labels(None))?.encode_gauge(&bytes)?;
            }
        }
        let help = "What happened, by the names of quire vmstat -s";
        let mut family = encoder.encode_descriptor("events", help, None, MetricType::Counter)?;
        for sample in &self.0 {
            for event in Event::ALL {
                let labels = sample.labels(Some(("event", event.name())));
                let count = sample.counts.of(event);
                family
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, _, u64>(&count, None)?;
            }
        }
        let help = "How long faults took, by what was done for them";
        let mut family = encoder.encode_descriptor(
            "fault",
            help,
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for sample in &self.0 {
            for kind in FaultKind::ALL {
                let labels = sample.labels(Some(("kind", kind.name())));
                let counts = sample.counts.fault_times(kind);
                let last = counts.len() - 1;
                // A bucket's upper end; the last one has none.
                let end = |bucket: usize| match bucket == last {
                    true => f64::MAX,
                    false => 2f64.powi(bucket as i32 + 1) * 1e-9,
                };
                let buckets: Vec<(f64, u64)> = counts
                    .iter()
                    .enumerate()
                    .map(|(bucket, &count)| (end(bucket), count))
                    .collect();
                family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                    sample.counts.fault_seconds(kind),
                    counts.iter().sum(),
                    &buckets,
                    None,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_events_count_and_labels_are_escaped() {
        let mut counts = Counts::of_events(&[(Event::Pgfault, 5)]);
        counts.set_fault_times(FaultKind::File, 10, 3);
        let sample = Sample {
            pid: 7,
            command: "quire run \"x\"".into(),
            budget_pages: 256,
            gauges: Gauges { processes: 2, held: 128, ..Gauges::default() },
            counts,
        };
        let text = encode(vec![sample]).unwrap();
        let labels = r#"pid="7",command="quire run \"x\"""#;
        for line in [
            format!("quire_budget_bytes{{{labels}}} 1048576"),
            format!("quire_held_bytes{{{labels}}} 524288"),
            format!("quire_processes{{{labels}}} 2"),
            format!("quire_events_total{{{labels},event=\"pgfault\"}} 5"),
            format!("quire_fault_seconds_count{{{labels},kind=\"file\"}} 3"),
            "# EOF".into(),
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
        assert!(encode(Vec::new()).unwrap().ends_with("# EOF\n"), "without runs it is valid");
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_exist() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana.json");
        let text = std::fs::read_to_string(folder).unwrap();
        let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        assert!(panels.len() >= 4);
        let known = encode(vec![Sample {
            pid: 1,
            command: String::new(),
            budget_pages: 1,
            gauges: Gauges::default(),
            counts: Counts::default(),
        }])
        .unwrap();
        for target in panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
            let asked = target["expr"].as_str().unwrap();
            let is_part = |byte: char| !byte.is_ascii_alphanumeric() && byte != '_';
            for name in asked.split(is_part).filter(|word| word.starts_with("quire_")) {
                assert!(known.contains(&format!("\n{name}{{")), "{name} of {asked}");
            }
        }
    }
}
