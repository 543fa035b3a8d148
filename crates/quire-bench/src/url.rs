//! `quire bench url`: an object of a server read in order through a mapping, beside what the client of servers gets
//! that Quire has, alone and by parallel ranges.
//!
//! The server is a thread of the bench's, which sends ranges of bytes that it has in memory, behind a [`Link`]; or it is
//! that of a URL.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use object_store::aws::AmazonS3Builder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt as _};
use quire::library::{AddressSpace, MapOptions, OpenOptions, Pattern};
use quire_cli::size::Human;
use quire_url::{OpenUrl as _, UrlOptions};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::harness::link::Link;
use super::harness::report::{Report, spread};
use super::harness::suite::{Figures, Head, Results, Shape, Sheet, Suite, figures, measure};
use super::work::Random;
use super::{UrlBench, sys};

const TITLE: &str = "in order";
const CLIENT: &str = "client alone";
const QUIRE: &str = "quire";
const FIGURE: &str = "MiB/s";
/// What the client asks for at a time, and how often at once: what Amazon advises.
const RANGE_BYTES: u64 = 8 << 20;
const RANGES: usize = 8;
/// What the bench's own server sends, over and over.
const CONTENT_BYTES: usize = 1 << 20;
/// Milliseconds of a round trip, and Mbit/s.
const LINKS: [(f64, f64); 5] =
    [(1.0, 1000.0), (10.0, 1000.0), (50.0, 1000.0), (10.0, 2500.0), (10.0, 5000.0)];

/// What a cell is measured by.
struct Plan {
    url: String,
    is_client: bool,
}

struct UrlSuite<'a> {
    options: &'a UrlBench,
    bytes: u64,
    memory: usize,
    /// What the rows are called, and where they read.
    rows: Vec<(String, String)>,
    runtime: Runtime,
    sum: Option<u64>,
}

/// Runs the bench.
pub(crate) fn report(options: &UrlBench) -> Result<Report> {
    let common = &options.common;
    let memory = common.size(32 << 20, 64 << 20, 64 << 20);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = Runtime::new()?;
    let (bytes, rows) = match &options.url {
        Some(url) => {
            let (store, path) = client(url)?;
            let found = runtime.block_on(store.head(&path)).context("the object is not there")?;
            (found.size, vec![(quire_url::shown(url).to_owned(), url.clone())])
        }
        None => {
            let bytes = common.size(64 << 20, 256 << 20, 1 << 30);
            (bytes, rows(serve(bytes)?)?)
        }
    };
    ensure!(bytes > 0, "the object is empty");
    measure(&mut UrlSuite { options, bytes, memory, rows, runtime, sum: None }, common)
}

/// A row for each link, and one without.
fn rows(port: u16) -> Result<Vec<(String, String)>> {
    let url_of = |port| format!("http://127.0.0.1:{port}/object");
    let mut rows = Vec::new();
    for (milliseconds, megabits) in LINKS {
        let link = Link {
            round_trip: Duration::from_secs_f64(milliseconds / 1e3),
            bytes_a_second: Some(megabits * 1e6 / 8.0),
        };
        let row = format!("{} Gbit/s, {milliseconds} ms", megabits / 1e3);
        rows.push((row, url_of(link.start(port)?)));
    }
    rows.push(("loopback".to_owned(), url_of(port)));
    Ok(rows)
}

/// Starts a web server of one object; it ends with the process.
fn serve(bytes: u64) -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let content: Arc<[u8]> = content().into();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let content = Arc::clone(&content);
            thread::spawn(move || answer(&connection, bytes, &content));
        }
    });
    Ok(port)
}

fn content() -> Vec<u8> {
    let mut random = Random::new(1);
    (0..CONTENT_BYTES / 8).flat_map(|_| random.next().to_ne_bytes()).collect()
}

/// Answers the requests of a connection.
fn answer(connection: &TcpStream, bytes: u64, content: &[u8]) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut lines = BufReader::new(connection).lines();
    let mut to = connection;
    while let Some(request) = lines.next().transpose()? {
        let mut range = 0..bytes;
        for line in lines.by_ref() {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some((from, last)) =
                line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-'))
                && let (Ok(from), Ok(last)) = (from.parse(), last.parse::<u64>())
            {
                range = from..bytes.min(last.saturating_add(1));
            }
        }
        write!(
            to,
            "HTTP/1.1 206 Partial Content\r\nETag: \"1\"\r\nContent-Length: {}\r\n\
             Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Range: bytes {}-{}/{bytes}\r\n\r\n",
            range.end - range.start,
            range.start,
            range.end - 1,
        )?;
        if request.starts_with("GET") {
            send(to, content, range)?;
        }
    }
    Ok(())
}

fn send(mut to: &TcpStream, content: &[u8], mut range: Range<u64>) -> std::io::Result<()> {
    while range.start < range.end {
        let part = &content[range.start as usize % content.len()..];
        let length = part.len().min((range.end - range.start) as usize);
        to.write_all(&part[..length])?;
        range.start += length as u64;
    }
    Ok(())
}

/// The client that Quire has, as it is without Quire.
fn client(url: &str) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let cannot = || format!("{} is no URL of an object", quire_url::shown(url));
    let (scheme, rest) = url.split_once("://").with_context(cannot)?;
    let (host, path) = rest.split_once('/').with_context(cannot)?;
    if scheme == "s3" {
        let store = AmazonS3Builder::from_env().with_bucket_name(host).with_allow_http(true);
        return Ok((Arc::new(store.build()?), Path::parse(path)?));
    }
    let options = ClientOptions::new().with_allow_http(true);
    let store = HttpBuilder::new().with_url(url).with_client_options(options).build()?;
    Ok((Arc::new(store), Path::default()))
}

/// The sum of the words, so that all bytes are looked at.
fn sum_of(bytes: &[u8]) -> u64 {
    let word = |word: &[u8]| u64::from_ne_bytes(word.try_into().expect("a word has eight bytes"));
    bytes.chunks_exact(8).map(word).fold(0, u64::wrapping_add)
}

/// Reads all of it by the client.
async fn read_by_client(url: &str, bytes: u64) -> Result<u64> {
    let (store, path) = client(url)?;
    let mut on_their_way = JoinSet::new();
    let mut sum = 0u64;
    for start in (0..bytes).step_by(RANGE_BYTES as usize) {
        if on_their_way.len() == RANGES {
            sum = sum.wrapping_add(on_their_way.join_next().await.expect("there are some")??);
        }
        let (store, path) = (Arc::clone(&store), path.clone());
        on_their_way.spawn(async move {
            let range = start..bytes.min(start + RANGE_BYTES);
            store.get_range(&path, range).await.map(|content| sum_of(&content))
        });
    }
    while let Some(one) = on_their_way.join_next().await {
        sum = sum.wrapping_add(one??);
    }
    Ok(sum)
}

impl UrlSuite<'_> {
    fn read_by_quire(&self, url: &str) -> Result<u64> {
        let space = AddressSpace::builder().memory(self.memory).build()?;
        let object = OpenOptions::new().open_url(&space, url, &UrlOptions::new())?;
        let options = MapOptions::new().pattern(Pattern::Sequential);
        Ok(sum_of(&sys::map_object(&options, &object)?))
    }
}

impl Suite for UrlSuite<'_> {
    type Plan = Plan;

    fn head(&self) -> Head {
        let (bytes, memory) = (Human(self.bytes), Human(self.memory as u64));
        let server = match self.options.url {
            Some(_) => "that of the URL",
            None => "a thread of this process, behind a proxy that delays and bounds",
        };
        Head {
            name: "url",
            question: "How fast is an object of a server read in order through a mapping?",
            facts: vec![
                ("object", format!("{bytes}, through {memory}")),
                ("client alone", format!("{RANGES} ranges of {} at once", Human(RANGE_BYTES))),
                ("server", server.to_owned()),
            ],
            rounds: self.options.common.rounds(1, 3),
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Plan>> {
        let mut sheet = Sheet::new(TITLE, Shape::Cells).base(CLIENT);
        for (row, url) in &self.rows {
            for (column, is_client) in [(CLIENT, true), (QUIRE, false)] {
                sheet.add(row, column, Plan { url: url.clone(), is_client });
            }
        }
        vec![sheet]
    }

    fn take(&mut self, plan: &Plan, _: &Results<'_>) -> Result<Figures> {
        let started = Instant::now();
        let sum = if plan.is_client {
            self.runtime.block_on(read_by_client(&plan.url, self.bytes))?
        } else {
            self.read_by_quire(&plan.url)?
        };
        let seconds = started.elapsed().as_secs_f64();
        ensure!(*self.sum.get_or_insert(sum) == sum, "other bytes were read than before");
        Ok(figures([(FIGURE, self.bytes as f64 / f64::from(1 << 20) / seconds)]))
    }

    fn words(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |(row, _): &(String, String)| {
            let over = results.over(TITLE, row, [QUIRE, CLIENT], FIGURE);
            format!("{row}: quire reads {} as fast as the client alone.", spread(&over, "x"))
        };
        self.rows.iter().map(sentence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_read_the_same() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let bytes = (20 << 20) + 8;
        let url = format!("http://127.0.0.1:{}/object", serve(bytes).unwrap());
        let content = content();
        let whole = sum_of(&content).wrapping_mul(20).wrapping_add(sum_of(&content[..8]));
        let sum = Runtime::new().unwrap().block_on(read_by_client(&url, bytes)).unwrap();
        assert_eq!(sum, whole);
    }
}
