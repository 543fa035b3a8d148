//! The swap tier on a server (`--far`): the supervisor's side of `quire::control::far`.
//!
//! Owns a thread of its own, `quire-far`, with the connections and the [moves](mover) between swap file and server, and a
//! second one that sleeps until a member calls. Members wait for neither except for what they ask for.

mod copies;
mod fetch;
mod file;
mod mover;
mod seal;
mod server;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use quire::control::place::CHUNK_BYTES;
use quire::control::{Control, SEGMENT_BYTES, SEGMENTS_MAX};
use rustix::process::{Resource, getrlimit};
use rustix::thread::futex;
use tokio::sync::Notify;

use self::file::SegmentFile;
use self::mover::Mover;
use self::seal::Seal;
use self::server::Server;
use crate::size::{Human, Size};
use crate::supervisor::swapfile::SwapFile;
use crate::supervisor::{FarAccount, random};
use crate::sys::control::ControlMap;
use crate::sys::{memfd, signals};

/// Without `--far-max`.
const BYTES_MAX: u64 = 64 << 30;
/// What a run without a swap file keeps in memory, on its way to the server and back: a part of the budget, within
/// bounds.
const LOCAL_SHARE: u64 = 32;
const LOCAL_BYTES: std::ops::RangeInclusive<u64> = 2 << 20..=32 << 20;
/// Threads that read and write the file, and look up names.
const BLOCKING_THREADS: usize = 8;
/// How often the thread looks at the file when nobody calls.
const PERIOD: Duration = Duration::from_millis(200);
const PERIOD_OF_CALLS: futex::Timespec =
    futex::Timespec { tv_sec: 0, tv_nsec: PERIOD.as_nanos() as i64 };

/// A server that was found fit, and what is to be kept there.
pub(crate) struct Prepared {
    runtime: tokio::runtime::Runtime,
    server: Server,
    /// Segments that the file may hold, and that there may be in all.
    local: u32,
    pub segments: u32,
    file: SegmentFile,
    seal: Seal,
    /// Bytes of the budget that the file takes, where it is in memory.
    pub memory_bytes: u64,
}

/// The tier at work. It ends when this is dropped, and what the server has of the run is removed.
pub(crate) struct FarTier {
    shared: Arc<Shared>,
    name: String,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    control: Arc<ControlMap>,
    is_ending: AtomicBool,
    called: Notify,
}

/// Finds out whether `addresses` can be used; the swap file becomes what holds a part of the segments.
pub(crate) fn prepare(
    addresses: &str,
    far_max: Option<Size>,
    swap: Option<&SwapFile>,
    budget_bytes: u64,
) -> Result<Prepared> {
    // Its threads take no signal that is the supervisor's, and stay: where no more can be made, those there are do.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(|| signals::block(&signals::TAKEN))
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(Duration::from_secs(u32::MAX.into()))
        .build()
        .context("cannot start what speaks to the server")?;
    runtime
        .block_on(runtime.spawn_blocking(|| ()))
        .context("cannot start a thread for the server")?;
    let server = runtime.block_on(Server::connect(addresses, random()))?;
    let far_bytes = match far_max {
        Some(Size::Bytes(bytes)) => bytes,
        Some(_) => bail!("--far-max is no part of anything: give a size"),
        None => BYTES_MAX,
    };
    let local_bytes = (budget_bytes / LOCAL_SHARE).clamp(*LOCAL_BYTES.start(), *LOCAL_BYTES.end());
    let local =
        swap.as_ref().map_or(local_bytes / SEGMENT_BYTES as u64, |swap| swap.segments.into());
    let segments = local + far_bytes / SEGMENT_BYTES as u64;
    if segments == local || segments > SEGMENTS_MAX as u64 {
        let most = (SEGMENTS_MAX as u64 - local) * SEGMENT_BYTES as u64;
        bail!(
            "{} cannot be kept on a server; give --far-max from 256K to {}",
            Human(far_bytes),
            Human(most)
        );
    }
    // What is there has its place in the file too, and the user may have a limit for files.
    let limit =
        getrlimit(Resource::Fsize).current.map_or(segments, |limit| limit / SEGMENT_BYTES as u64);
    let segments = segments.min(limit);
    if segments <= local {
        bail!(
            "the limit for the size of a file leaves no place for what a server keeps; raise it (ulimit -f)"
        );
    }
    let [local, segments] = [local, segments].map(|number| number as u32);
    let (file, memory_bytes) = match swap {
        Some(swap) => {
            (SegmentFile::new(rustix::io::fcntl_dupfd_cloexec(&swap.descriptor, 0)?, false), 0)
        }
        None => {
            let bytes = segments as usize * SEGMENT_BYTES;
            (SegmentFile::new(memfd::create("swap", bytes)?, true), local_bytes)
        }
    };
    file.set_segments(segments).context("cannot make the swap file as large as it may become")?;
    file.punch(0).context(
        "the file system of the swap file cannot give back a part of a file; name another folder",
    )?;
    Ok(Prepared { runtime, server, local, segments, file, seal: Seal::new()?, memory_bytes })
}

impl Prepared {
    /// The descriptor that members read and write the file by.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.file.descriptor()?)
    }

    /// Tells the members' side of it. Before any member joins.
    pub(crate) fn enter(&self, control: &Control) {
        let far = &control.far;
        far.local_max.store(self.local, Relaxed);
        far.local_kept.store((self.local / 16).max(2), Relaxed);
        far.is_on.store(1, Relaxed);
        control.segments_max.store(self.segments, Relaxed);
        control.common_pages.fetch_add(self.memory_bytes / quire::units::PAGE_SIZE as u64, Relaxed);
    }

    pub(crate) fn start(self, control: Arc<ControlMap>) -> Result<FarTier> {
        let shared =
            Arc::new(Shared { control, is_ending: AtomicBool::new(false), called: Notify::new() });
        let listener = Arc::clone(&shared);
        let mover = Arc::clone(&shared);
        let name = self.server.name.clone();
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let Prepared { runtime, server, file, seal, .. } = self;
        let threads = vec![
            thread("quire-far-call").spawn(move || listener.listen())?,
            thread("quire-far").spawn(move || {
                let mover = Mover::new(mover, server, file, seal);
                let local = tokio::task::LocalSet::new();
                runtime.block_on(local.run_until(mover.run()));
                // What tasks would still send comes no more.
                drop(local);
                runtime.block_on(mover.forget());
            })?,
        ];
        Ok(FarTier { shared, name, threads })
    }
}

impl Shared {
    /// Passes members' calls on.
    fn listen(&self) {
        let far = &self.control.far;
        while !self.is_ending.load(Relaxed) {
            let calls = far.calls.load(std::sync::atomic::Ordering::Acquire);
            self.called.notify_one();
            // The wait ends by a call, or by time: who stops the tier calls as well.
            let _ = futex::wait(&far.calls, futex::Flags::empty(), calls, Some(&PERIOD_OF_CALLS));
        }
        self.called.notify_one();
    }
}

impl FarTier {
    pub(crate) fn account(&self) -> FarAccount {
        let far = &self.shared.control.far;
        let segments = |count: u64| count * SEGMENT_BYTES as u64;
        FarAccount {
            name: self.name.clone(),
            bytes_max: segments(far.segments_max.load(Relaxed).into()),
            bytes_out: segments(far.copied.load(Relaxed)),
            bytes_in: far.fetched.load(Relaxed) * CHUNK_BYTES as u64,
        }
    }
}

impl Drop for FarTier {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Relaxed);
        self.shared.control.far.call();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
