//! An emulated network: a proxy on the loopback that holds bytes back.
//!
//! Each way has its own delay and bandwidth, for all connections together, and any number of requests may be on their
//! way. Losses, and what they do to a connection, are not emulated.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

/// What a network is like.
#[derive(Clone, Copy, Default)]
pub(crate) struct Link {
    pub round_trip: Duration,
    /// Each way; none is without a bound.
    pub bytes_a_second: Option<f64>,
}

/// One way of a link, which all connections share.
#[derive(Clone)]
struct Way {
    delay: Duration,
    bytes_a_second: Option<f64>,
    /// When what was sent before is through.
    free: Arc<Mutex<Instant>>,
}

impl Link {
    /// Puts the link before a port of this machine, and returns the port of its other end. It ends with the process.
    pub(crate) fn start(self, port: u16) -> Result<u16> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let own = listener.local_addr()?.port();
        let way = || Way {
            delay: self.round_trip / 2,
            bytes_a_second: self.bytes_a_second,
            free: Arc::new(Mutex::new(Instant::now())),
        };
        let (there, back) = (way(), way());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { continue };
                for stream in [&client, &server] {
                    let _ = stream.set_nodelay(true);
                }
                let (Ok(from_client), Ok(from_server)) = (client.try_clone(), server.try_clone())
                else {
                    continue;
                };
                there.pass_on(from_client, server);
                back.pass_on(from_server, client);
            }
        });
        Ok(own)
    }
}

impl Way {
    /// Passes on what comes, so much later, until the end of it.
    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
        let way = self.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 18];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                let through = way.through(length);
                if sender.send((through + way.delay, buffer[..length].to_vec())).is_err() {
                    break;
                }
                // Who sends more than passes is held back.
                thread::sleep(through.saturating_duration_since(Instant::now()));
            }
        });
        thread::spawn(move || {
            for (due, bytes) in receiver {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
    }

    /// When so many bytes are through that are sent now.
    fn through(&self, bytes: usize) -> Instant {
        let now = Instant::now();
        let Some(bytes_a_second) = self.bytes_a_second else { return now };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = now.max(*free) + Duration::from_secs_f64(bytes as f64 / bytes_a_second);
        *free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long it takes to send bytes through a link and have them back.
    fn there_and_back(link: Link, bytes: usize) -> Duration {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let echo = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = vec![0; bytes];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let port = link.start(port).unwrap();
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let sent: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let started = Instant::now();
        stream.write_all(&sent).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, sent);
        echo.join().unwrap();
        started.elapsed()
    }

    #[test]
    fn it_passes_all_on_later() {
        let round_trip = Duration::from_millis(40);
        assert!(there_and_back(Link { round_trip, ..Link::default() }, 5) >= round_trip);
    }

    #[test]
    fn it_passes_on_no_more_than_its_bandwidth() {
        let link = Link { bytes_a_second: Some(10e6), ..Link::default() };
        assert!(there_and_back(link, 1_000_000) >= Duration::from_millis(200));
    }
}
