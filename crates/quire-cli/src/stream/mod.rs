//! `quire cat` and `quire sum`: files read from their beginning to their end through a mapping
//! that holds no more memory than it may.
//!
//! Owns the order of the reading, its errors and what is said of it; where the bytes go is a
//! [`Sink`]'s. Leaves the mapping to [`quire::library`].
//!
//! No byte of a mapping is touched by this program itself: the kernel copies or writes it, and
//! where it cannot, the same bytes are read with an error that says why. So a file that shrinks, or
//! a disk that fails, is a message and not a SIGBUS. What cannot be mapped (standard input, pipes,
//! files of /proc, which say that they are empty) is read.

mod progress;
mod sink;

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use quire::library::{AddressSpace, MapOptions, Object, OpenOptions, Pattern};
use quire_url::{OpenUrl as _, UrlCounts, UrlOptions};

use self::progress::Progress;
use self::sink::{Cat, Sink, Sum};
use crate::cli::StreamOptions;
use crate::print::say;
use crate::size::{Human, machine_memory_bytes};
use crate::sys::mapped::Mapped;

/// How much is taken at a time, and asked for ahead: the largest read that a store prefers.
const STEP_BYTES: usize = 2 << 20;
/// How much is read at a time where nothing is mapped, or can be.
const READ_BYTES: usize = 128 << 10;
/// More than any program can address.
const MEMORY_MAX: u64 = 1 << 40;
const SOME_FAILED: u8 = 1;

/// Writes files to standard output.
pub(crate) fn cat(options: &StreamOptions) -> Result<u8> {
    // The reader of a pipe may still hold pages of the mapping that were written to it.
    stream(options, &mut Cat::new()?)
}

/// Prints the checksums of files.
pub(crate) fn sum(options: &StreamOptions) -> Result<u8> {
    stream(options, &mut Sum::new())
}

/// Why a file was not read to its end.
enum Failure {
    /// The file's fault: others may be read.
    File(anyhow::Error),
    /// Standard output takes no more, or no file can be mapped.
    All(anyhow::Error),
}

impl Failure {
    fn of_output(error: io::Error) -> Failure {
        Failure::All(anyhow::Error::new(error).context("cannot write to standard output"))
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::File(error)
    }
}

impl From<quire::library::Error> for Failure {
    fn from(error: quire::library::Error) -> Failure {
        Failure::File(error.into())
    }
}

fn stream(options: &StreamOptions, sink: &mut impl Sink) -> Result<u8> {
    let started = Instant::now();
    let mut stream = Stream {
        options,
        space: OnceCell::new(),
        progress: Progress::new(&options.files),
        bytes: 0,
        buffer: vec![0; READ_BYTES],
    };
    let mut status = 0;
    for path in &options.files {
        let url = path.to_str().filter(|name| quire_url::is_url(name));
        let shown = url.map_or(path.as_path(), |url| Path::new(quire_url::shown(url)));
        let read = match url {
            Some(url) => stream.read_url(url, shown, sink),
            None => stream.read(path, sink),
        };
        stream.progress.line.clear();
        match read.and_then(|()| sink.end(shown).map_err(Failure::of_output)) {
            Ok(()) => {}
            Err(Failure::File(error)) => {
                sink.give_up();
                say(&format!("{error:#}"));
                status = SOME_FAILED;
            }
            Err(Failure::All(error)) => return Err(error),
        }
    }
    if options.stats {
        say(&stream.line(started.elapsed().as_secs_f64()));
    }
    Ok(status)
}

struct Stream<'a> {
    options: &'a StreamOptions,
    /// Made for the first file that is mapped.
    space: OnceCell<AddressSpace>,
    progress: Progress,
    bytes: u64,
    buffer: Vec<u8>,
}

impl Stream<'_> {
    fn read(&mut self, path: &Path, sink: &mut impl Sink) -> Result<(), Failure> {
        if path == Path::new("-") {
            return self.read_plain(&mut io::stdin().lock(), path, sink);
        }
        let cannot_read = || format!("cannot read {}", path.display());
        let metadata = fs::metadata(path).with_context(cannot_read)?;
        let kind = metadata.file_type();
        if sink.is_output(metadata.dev(), metadata.ino()) {
            let name = path.display();
            return Err(anyhow!("{name} is standard output as well; write to another file").into());
        }
        if (kind.is_file() && metadata.len() > 0) || kind.is_block_device() {
            let options = OpenOptions::new().direct(self.options.direct);
            return self.read_mapped(|space| options.open(space, path), path, sink);
        }
        let mut file = File::open(path).with_context(cannot_read)?;
        self.read_plain(&mut file, path, sink)
    }

    fn read_url(&mut self, url: &str, shown: &Path, sink: &mut impl Sink) -> Result<(), Failure> {
        let mut options = UrlOptions::new();
        if let Some(dir) = &self.options.cache {
            options = options.cache(dir, self.options.cache_max);
        }
        self.read_mapped(|space| OpenOptions::new().open_url(space, url, &options), shown, sink)
    }

    fn read_plain(
        &mut self,
        file: &mut impl Read,
        path: &Path,
        sink: &mut impl Sink,
    ) -> Result<(), Failure> {
        let mut at = 0u64;
        loop {
            let count = match file.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let doing = format!("cannot read {} at {at}", path.display());
                    return Err(anyhow::Error::new(error).context(doing).into());
                }
            };
            sink.take(&self.buffer[..count]).map_err(Failure::of_output)?;
            at += count as u64;
            self.moved_on(count, path, None);
        }
    }

    fn read_mapped(
        &mut self,
        open: impl FnOnce(&AddressSpace) -> Result<Object, quire::library::Error>,
        path: &Path,
        sink: &mut impl Sink,
    ) -> Result<(), Failure> {
        let space = self.space().map_err(Failure::All)?.clone();
        let object = open(&space)?;
        if object.is_empty() {
            return Ok(());
        }
        let options = MapOptions::new().pattern(Pattern::Sequential);
        let mapped = Mapped::new(&object, &options.fault_around(self.options.fault_around))?;
        // What is read ahead must not push out what is being taken.
        let step = STEP_BYTES.min(space.memory() / 8);
        let len = mapped.len();
        let mut at = 0;
        let mut asked_to = 0;
        while at < len {
            let end = len.min(at + step);
            let ahead = len.min(end + step);
            mapped.map().will_need(asked_to.max(at)..ahead);
            asked_to = ahead;
            if !space.serves_system_calls() {
                mapped.map().populate(at..end)?;
            }
            while at < end {
                let count = match sink.take_mapped(&mapped, at..end) {
                    Ok(0) => self.take_checked(&mapped, at..end, sink)?,
                    Ok(count) => count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(Failure::of_output(error)),
                };
                if count == 0 {
                    return Err(ended(&object, at as u64, len as u64));
                }
                at += count;
                self.moved_on(count, path, Some((at, len)));
            }
        }
        is_whole(&object)
    }

    /// Takes bytes that the kernel could not read from the mapping: by a read that says why it
    /// fails, where it fails too.
    fn take_checked(
        &mut self,
        mapped: &Mapped,
        range: Range<usize>,
        sink: &mut impl Sink,
    ) -> Result<usize, Failure> {
        let len = range.len().min(READ_BYTES);
        let count = mapped.map().try_read(range.start, &mut self.buffer[..len])?;
        sink.take(&self.buffer[..count]).map_err(Failure::of_output)?;
        Ok(count)
    }

    fn space(&self) -> Result<&AddressSpace> {
        if let Some(space) = self.space.get() {
            return Ok(space);
        }
        let bytes = self.options.memory.bytes_of(machine_memory_bytes());
        if bytes > MEMORY_MAX {
            bail!("--memory {} is more than any program can address; give less", Human(bytes));
        }
        let space = AddressSpace::builder().memory(bytes as usize).build()?;
        Ok(self.space.get_or_init(|| space))
    }

    fn moved_on(&mut self, bytes: usize, path: &Path, part: Option<(usize, usize)>) {
        self.bytes += bytes as u64;
        self.progress.show(path, self.bytes, part);
    }

    /// What `--stats` says.
    fn line(&self, seconds: f64) -> String {
        let read = format!("{} in {seconds:.2} s", Human(self.bytes));
        let Some(space) = self.space.get() else { return format!("{read}; nothing was mapped") };
        let (_, held_max) = space.held();
        let UrlCounts { requests, fetched_bytes, cached_bytes } = quire_url::counts();
        let of_servers = if requests + cached_bytes > 0 {
            format!(
                "; {} of servers by {requests} requests, {} of the cache",
                Human(fetched_bytes),
                Human(cached_bytes)
            )
        } else {
            String::new()
        };
        format!(
            "{read}; held {} at most of {}; {} faults, {} pages read{of_servers}",
            Human(held_max as u64),
            Human(space.memory() as u64),
            space.counter("pgfault"),
            space.counter("pgpgin"),
        )
    }
}

/// A file that lost less than a page of its end was read with zeros in its place.
fn is_whole(object: &Object) -> Result<(), Failure> {
    let len = object.len();
    match object.refresh_len() {
        Ok(now) if now < len => Err(ended(object, now, len)),
        // It may have become longer: what was added later was not asked for.
        _ => Ok(()),
    }
}

fn ended(object: &Object, at: u64, len: u64) -> Failure {
    Failure::File(anyhow!(
        "{} ended at byte {at} of {len} while it was read; let no other program shorten it, and \
         read it again",
        object.name()
    ))
}
