//! Objects of servers: a read-only store for [`quire`], by the object's URL: `s3://BUCKET/KEY` at
//! Amazon's or any compatible service, `https://HOST/PATH` at any web server that sends ranges.
//!
//! The object is pinned when it is opened: each request asks for the object with that ETag (or, without
//! one, with that time of its last change), and what comes is checked against it, so that an object
//! that was replaced is [`Cause::Replaced`], and never a mix of two. Requests are tried again, after
//! waits that grow and differ, for half a minute.
//!
//! [`client`] speaks to the server, by the crate `object_store`; [`pieces`] has what was fetched, and
//! fetches ahead; [`disk`] keeps blocks on a disk. The requests run on threads of the store's own,
//! which end with it. A fork's child has none of them: it opens its own.
//!
//! It is a crate of its own so that programs of the engine that speak to no server are not built with
//! the client of one; the preload library is loaded into every process of a run.

mod client;
mod credentials;
mod disk;
mod pieces;

use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::Instant;

use bytes::Bytes;
use quire::library::{AddressSpace, Error, Object, OpenOptions};
use quire::store::{Cause, Operation, Store, StoreError};
use quire::sys::thread::SignalsBlocked;
use rustix::io::Errno;
use tokio::runtime::{self, Handle, Runtime};
use tokio::sync::Semaphore;

use self::client::{Client, Named, RETRIED_FOR};
use self::disk::Disk;
use self::pieces::{BLOCK_BYTES, Filler, Pieces};

/// Bytes of blocks on a disk where no bound is given: 4 GiB.
pub const CACHE_BYTES: u64 = 4 << 30;

/// What is kept of an object, or is on its way, beside the memory of the address space: a quarter as much as that, within
/// these bounds. Amazon advises to ask for 8 MiB at a time, several times at once.
const KEPT_BYTES: RangeInclusive<u64> = 16 << 20..=64 << 20;

/// Pieces that are fetched and stored at a time.
const FETCHES_MAX: usize = 16;

/// How an object is opened by its URL.
#[derive(Clone, Debug, Default)]
pub struct UrlOptions {
    cache: Option<(PathBuf, u64)>,
    /// Of the address space.
    memory: u64,
}

impl UrlOptions {
    /// Keeps nothing on a disk.
    #[must_use]
    pub fn new() -> UrlOptions {
        UrlOptions::default()
    }

    /// Keeps what was fetched in a folder, of which it takes `bytes_max` bytes at most (16 MiB at
    /// least), for whoever opens the object next. Processes of one user may share the folder.
    #[must_use]
    pub fn cache(mut self, dir: impl Into<PathBuf>, bytes_max: u64) -> UrlOptions {
        self.cache = Some((dir.into(), bytes_max));
        self
    }
}

/// Opens objects by their URLs.
pub trait OpenUrl {
    /// Opens an object of a server, read-only: `s3://BUCKET/KEY`, `https://HOST/PATH`. One whose name
    /// ends in `.zst` appears as a file does, unless these options are plain.
    ///
    /// # Errors
    /// [`Error::Store`] where the server has no such object, or does not send it in parts, and where
    /// these options ask for writing; [`Error::NoMemory`].
    fn open_url(
        &self,
        space: &AddressSpace,
        url: &str,
        options: &UrlOptions,
    ) -> Result<Object, Error>;
}

impl OpenUrl for OpenOptions {
    fn open_url(
        &self,
        space: &AddressSpace,
        url: &str,
        options: &UrlOptions,
    ) -> Result<Object, Error> {
        let memory = space.memory() as u64;
        self.open_read_only(space, UrlStore::open(url, &UrlOptions { memory, ..options.clone() })?)
    }
}

/// What all such stores of the process have asked for so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UrlCounts {
    /// Requests for a range; one that is tried again counts once.
    pub requests: u64,
    /// Bytes that came by them.
    pub fetched_bytes: u64,
    /// Bytes that were on a disk.
    pub cached_bytes: u64,
}

static REQUESTS: AtomicU64 = AtomicU64::new(0);
static FETCHED_BYTES: AtomicU64 = AtomicU64::new(0);
static CACHED_BYTES: AtomicU64 = AtomicU64::new(0);

/// What this process has asked servers for.
#[must_use]
pub fn counts() -> UrlCounts {
    // Relaxed: each number is one of a moment, and orders nothing.
    UrlCounts {
        requests: REQUESTS.load(Relaxed),
        fetched_bytes: FETCHED_BYTES.load(Relaxed),
        cached_bytes: CACHED_BYTES.load(Relaxed),
    }
}

/// Whether a name is the URL of an object, and no path.
#[must_use]
pub fn is_url(name: &str) -> bool {
    ["s3", "https", "http"].iter().any(|scheme| {
        name.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
            && name[scheme.len()..].starts_with("://")
    })
}

/// A URL without what may be secret in it: a signature is in the query.
#[must_use]
pub fn shown(url: &str) -> &str {
    let is_web = !url.get(..2).is_some_and(|start| start.eq_ignore_ascii_case("s3"));
    url.split(['?', '#']).next().filter(|_| is_web).unwrap_or(url)
}

/// What the tasks of a store share.
struct Source {
    client: Client,
    disk: Option<Disk>,
    /// Why the last request that ended failed, and when.
    failed: Mutex<Option<(Instant, Cause)>>,
    permits: Semaphore,
}

/// An object of a server.
pub struct UrlStore {
    name: String,
    bytes: u64,
    pieces: Pieces,
    _threads: Threads,
}

/// The threads that requests run on. They end with it, and what is on its way is not waited for: that
/// would be a panic where the one who drops it is a task itself.
struct Threads(Option<Runtime>);

impl UrlStore {
    /// Asks the server for the object. Credentials come from the environment and the files that the
    /// AWS tools use.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where it cannot be mapped, or [`Cause::Server`].
    pub fn open(url: &str, options: &UrlOptions) -> Result<UrlStore, StoreError> {
        let named = Named::parse(url).map_err(|cause| fail(Operation::Open, "the URL", cause))?;
        let named = Arc::new(named);
        let fail = |cause| fail(Operation::Open, &named.name, cause);
        let (threads, handle) = Threads::start().map_err(|errno| fail(Cause::Os(errno)))?;
        // Not by `block_on`, which panics where the caller is a task itself.
        let (sender, opened) = channel();
        let asked = Arc::clone(&named);
        handle.spawn(async move { sender.send(Client::open(&asked).await) });
        let opened = opened.recv().unwrap_or(Err(Cause::Unanswered));
        let client = opened.map_err(fail)?;
        let bytes = client.opened.size;
        let object = format!("{} {}", named.name, client.identity());
        let disk = options.cache.as_ref().map(|(dir, bytes)| Disk::open(dir, *bytes, &object));
        let source = Arc::new(Source {
            client,
            disk: disk.transpose().map_err(fail)?,
            failed: Mutex::default(),
            permits: Semaphore::new(FETCHES_MAX),
        });
        let ask = move |blocks, filler: Filler| {
            let source = Arc::clone(&source);
            handle.spawn(async move {
                // Held until it is on the disk: a disk that is slower than the server slows it down.
                let _permit = source.permits.acquire().await;
                let mut fetched = Vec::new();
                filler.fill(source.fetch(blocks, &mut fetched).await);
                if fetched.is_empty() {
                    return;
                }
                let this = Arc::clone(&source);
                let keep = move || fetched.iter().for_each(|(first, run)| this.keep(*first, run));
                let _ = tokio::task::spawn_blocking(keep).await;
            });
        };
        let kept = (options.memory / 4).clamp(*KEPT_BYTES.start(), *KEPT_BYTES.end());
        let pieces = Pieces::new(bytes, kept, Box::new(ask));
        Ok(UrlStore { name: named.name.clone(), bytes, pieces, _threads: threads })
    }
}

impl Threads {
    fn start() -> Result<(Threads, Handle), Errno> {
        // No signal handler of the program runs on them.
        let _signals = SignalsBlocked::of_others();
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(available_parallelism().map_or(1, |cpus| cpus.get().min(4)))
            .thread_name("quire-url")
            .enable_all()
            .build()
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        let handle = runtime.handle().clone();
        Ok((Threads(Some(runtime)), handle))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Locks a mutex, also after a panic: what is under these is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(operation: Operation, name: &str, cause: Cause) -> StoreError {
    StoreError::new(operation, name, 0, 0, cause)
}

impl Source {
    /// The bytes of a run of blocks, which is not empty, and those of them that came from the server.
    async fn fetch(
        self: &Arc<Source>,
        blocks: Range<u64>,
        unkept: &mut Vec<(u64, Bytes)>,
    ) -> Result<Bytes, Cause> {
        if self.disk.is_none() {
            return self.get(&blocks).await;
        }
        let (this, wanted) = (Arc::clone(self), blocks.clone());
        let load = move || wanted.map(|block| this.load(block)).collect::<Vec<_>>();
        let loaded = tokio::task::spawn_blocking(load).await.map_err(|_| Cause::Unanswered)?;
        let mut content = Vec::with_capacity(((blocks.end - blocks.start) * BLOCK_BYTES) as usize);
        let mut block = blocks.start;
        for run in loaded.chunk_by(|one, next| one.is_some() == next.is_some()) {
            let end = block + run.len() as u64;
            if run[0].is_some() {
                run.iter().flatten().for_each(|body| content.extend_from_slice(body));
            } else {
                let fetched = self.get(&(block..end)).await?;
                content.extend_from_slice(&fetched);
                unkept.push((block, fetched));
            }
            block = end;
        }
        Ok(content.into())
    }

    /// Asks the server. It fails at once where the object is another one, and for as long as a request
    /// is tried again after one was given up: readers of many pages do not wait for each of them.
    async fn get(&self, blocks: &Range<u64>) -> Result<Bytes, Cause> {
        if let Some((since, cause)) = &*lock(&self.failed)
            && (matches!(cause, Cause::Replaced(_)) || since.elapsed() < RETRIED_FOR)
        {
            return Err(cause.clone());
        }
        let result = self.try_get(blocks).await;
        let mut failed = lock(&self.failed);
        // An answer that was on its way does not bring back an object that is another one.
        if !matches!(&*failed, Some((_, Cause::Replaced(_)))) {
            *failed = result.as_ref().err().map(|cause| (Instant::now(), cause.clone()));
        }
        drop(failed);
        result
    }

    async fn try_get(&self, blocks: &Range<u64>) -> Result<Bytes, Cause> {
        let end = (blocks.end * BLOCK_BYTES).min(self.client.opened.size);
        let bytes = self.client.get(blocks.start * BLOCK_BYTES..end).await?;
        REQUESTS.fetch_add(1, Relaxed);
        FETCHED_BYTES.fetch_add(bytes.len() as u64, Relaxed);
        Ok(bytes)
    }

    /// A block from the disk, if that has all of it.
    fn load(&self, block: u64) -> Option<Vec<u8>> {
        let body = self.disk.as_ref()?.load(block)?;
        let bytes = (self.client.opened.size - block * BLOCK_BYTES).min(BLOCK_BYTES);
        if body.len() as u64 != bytes {
            return None;
        }
        CACHED_BYTES.fetch_add(bytes, Relaxed);
        Some(body)
    }

    /// Keeps blocks on the disk, as far as it takes them.
    fn keep(&self, first: u64, content: &[u8]) {
        let Some(disk) = &self.disk else { return };
        let mut blocks = (first..).zip(content.chunks(BLOCK_BYTES as usize));
        let _ = blocks.try_for_each(|(block, body)| disk.store(block, body));
    }
}

impl Store for UrlStore {
    fn name(&self) -> &str {
        &self.name
    }

    /// As long as the object is that was opened.
    fn len(&self) -> Result<u64, StoreError> {
        Ok(self.bytes)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let there = self.bytes.saturating_sub(offset).min(into.len() as u64) as usize;
        let (there, behind) = into.split_at_mut(there);
        behind.fill(0);
        if there.is_empty() {
            return Ok(());
        }
        let bytes = there.len() as u64;
        let fail = |cause| StoreError::new(Operation::Read, &self.name, offset, bytes, cause);
        self.pieces.read(offset, there).map_err(fail)
    }

    fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn it_may_be_opened_in_a_task_and_says_that_there_is_no_such_object() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/object?secret", listener.local_addr().unwrap());
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let mut connection = connection;
                let _ = connection.read(&mut [0; 4096]);
                let _ = connection.write_all(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                );
            }
        });
        let runtime = runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let opened = runtime.block_on(async { UrlStore::open(&url, &UrlOptions::new()) });
        let error = opened.err().unwrap();
        assert_eq!(error.errno(), Errno::NOENT);
        assert_eq!(error.store(), shown(&url));
        assert!(error.store().ends_with("/object"));
    }

    #[test]
    fn what_names_no_object_is_an_error_that_shows_no_password() {
        for url in ["ftp://host/path", "https://host", "s3://bucket/", "https://me:word@host/path"]
        {
            let error = UrlStore::open(url, &UrlOptions::new()).err().unwrap();
            assert!(matches!(error.cause(), Cause::Unsupported(_)), "{error}");
            assert!(!format!("{error}").contains("word@"));
        }
        assert!(is_url("S3://b/k") && is_url("https://h") && !is_url("s3:/b") && !is_url("file"));
    }
}
