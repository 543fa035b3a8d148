//! The load for Redis: starts a server, fills it, then reads and writes keys by Zipf's law over several
//! connections, each command for itself, and checks every value that comes back.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::Zipf;

use super::resp::{Client, Reply};
use crate::work::say;

const VALUE_BYTES: usize = 1000;
/// Commands on their way while the server is filled.
const BATCH: usize = 500;
const ZIPF_EXPONENT: f64 = 0.99;
/// Keys that neighbours by rank are apart; prime.
const SCATTER: usize = 2_654_435_761;
const CONNECT_PAUSE: Duration = Duration::from_millis(20);

#[derive(Args, Debug)]
pub(crate) struct RedisArgs {
    #[arg(long)]
    socket: PathBuf,

    #[arg(long)]
    keys: usize,

    /// Commands after the load, of all connections together
    #[arg(long)]
    commands: usize,

    #[arg(long, default_value_t = 4)]
    connections: usize,

    /// The server's command line
    #[arg(last = true, required = true)]
    server: Vec<OsString>,
}

/// Runs the load. The status is the server's where it failed, 1 where a value was wrong.
pub(crate) fn load(args: &RedisArgs) -> Result<u8> {
    let mut command = Command::new(&args.server[0]);
    // What it logs is no output of the load.
    command.args(&args.server[1..]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut server = command.spawn().with_context(|| format!("{command:?}"))?;
    let loaded = load_server(args, &mut server);
    if loaded.is_err() {
        // It may be dead, or about to be; one that is not must not stay.
        thread::sleep(CONNECT_PAUSE);
        if let Some(status) = server.try_wait()? {
            eprintln!("redis-server ended while it was used");
            return Ok(status_of(status).max(1));
        }
        server.kill()?;
    }
    let status = server.wait()?;
    let wrong = loaded?;
    ensure!(wrong == 0, "{wrong} values are wrong");
    Ok(status_of(status))
}

/// The exit status, 128+N for signal N.
fn status_of(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// Loads the server and has it end; returns how many values were wrong.
fn load_server(args: &RedisArgs, server: &mut Child) -> Result<usize> {
    let mut client = connect(args, server)?;
    let started = Instant::now();
    fill(&mut client, args.keys)?;
    say("load", started);
    let mixed = Instant::now();
    let connections: Vec<Result<Mixed>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..args.connections)
            .map(|number| scope.spawn(move || mix(args, number as u64)))
            .collect();
        let failed = || bail!("a connection's thread failed");
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| failed())).collect()
    });
    say("mixed", mixed);
    say("measured", started);
    let (mut latencies_us, mut wrong) = (Vec::new(), 0);
    for mixed in connections {
        let mixed = mixed?;
        latencies_us.extend(mixed.latencies_us);
        wrong += mixed.wrong;
    }
    print_latencies(&mut latencies_us);
    client.queue(&[b"SHUTDOWN", b"NOSAVE"]);
    client.send()?;
    Ok(wrong)
}

/// Connects once the server listens.
fn connect(args: &RedisArgs, server: &mut Child) -> Result<Client> {
    loop {
        let connected = Client::connect(&args.socket).and_then(|mut client| {
            client.call(&[b"PING"])?;
            Ok(client)
        });
        if connected.is_ok() || server.try_wait()?.is_some() {
            return connected;
        }
        thread::sleep(CONNECT_PAUSE);
    }
}

fn key_of(number: usize) -> Vec<u8> {
    format!("key:{number}").into_bytes()
}

/// The key's number, text that repeats, and as much that does not.
fn value_of(number: usize) -> Vec<u8> {
    let mut value = format!("{number} ").into_bytes();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(number as u64);
    while value.len() < VALUE_BYTES / 2 {
        value.push(random.random());
    }
    let text = b"the quick brown fox jumps over the lazy dog ".iter().cycle();
    value.extend(text.take(VALUE_BYTES - VALUE_BYTES / 2));
    value
}

fn fill(client: &mut Client, keys: usize) -> Result<()> {
    for first in (0..keys).step_by(BATCH) {
        let batch = first..(first + BATCH).min(keys);
        for number in batch.clone() {
            client.queue(&[b"SET", &key_of(number), &value_of(number)]);
        }
        client.send()?;
        for _ in batch {
            client.reply()?;
        }
    }
    Ok(())
}

/// What a connection saw.
struct Mixed {
    latencies_us: Vec<f64>,
    wrong: usize,
}

/// Reads and writes, as often one as the other.
fn mix(args: &RedisArgs, seed: u64) -> Result<Mixed> {
    let mut client = Client::connect(&args.socket)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let zipf = Zipf::new(args.keys as f64, ZIPF_EXPONENT).map_err(anyhow::Error::msg)?;
    let commands = args.commands / args.connections;
    let mut mixed = Mixed { latencies_us: Vec::with_capacity(commands), wrong: 0 };
    for _ in 0..commands {
        let rank = random.sample(zipf) as usize - 1;
        let number = rank * SCATTER % args.keys;
        let (key, value, is_read) = (key_of(number), value_of(number), random.random::<bool>());
        let started = Instant::now();
        let reply = match is_read {
            true => client.call(&[b"GET", &key]),
            false => client.call(&[b"SET", &key, &value]),
        };
        mixed.latencies_us.push(started.elapsed().as_secs_f64() * 1e6);
        let reply = reply?;
        mixed.wrong += usize::from(is_read && reply != Reply::Value(value));
    }
    Ok(mixed)
}

fn print_latencies(latencies_us: &mut [f64]) {
    latencies_us.sort_unstable_by(f64::total_cmp);
    let Some(last) = latencies_us.len().checked_sub(1) else { return };
    for (name, parts) in [("p50", 0.5), ("p99", 0.99), ("longest", 1.0)] {
        let value = latencies_us[(last as f64 * parts) as usize];
        println!("{{\"figure\": \"{name} us\", \"value\": {value:.1}}}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_from_their_keys() {
        assert_eq!(value_of(7), value_of(7));
        assert_ne!(value_of(7), value_of(8));
        assert_eq!(value_of(123_456).len(), VALUE_BYTES);
    }

    #[test]
    fn a_server_that_does_not_start_is_no_endless_wait() {
        let args = RedisArgs {
            socket: "/nonexistent/socket".into(),
            keys: 1,
            commands: 1,
            connections: 1,
            server: ["sh", "-c", "exit 7"].map(OsString::from).into(),
        };
        assert_eq!(load(&args).unwrap(), 7);
    }
}
