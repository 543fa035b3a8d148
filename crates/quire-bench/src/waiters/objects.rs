//! The second half of `quire bench waiters`: what is done with objects, with the sign in the pages'
//! words and with unlocks that always look.
//!
//! *Write, delete*: as `dd` and `rm` do it, a new file is written as a whole through a mapping and a
//! quarter of its size, flushed, and deleted; flushed in sync, which makes it durable, or async, which
//! leaves that to the kernel. *Read*: a file of the kernel's cache through a quarter of its size, in
//! order, once and twice. *Touch*: of objects of 20 growing sizes that are cached as a whole, each is
//! mapped, and a byte of each page read, by a fault of its own.
//!
//! The share of unlock and wake is what the unlocks that were counted cost by themselves
//! ([`super::prices`]), of the process's CPU time, all threads together. Answers to faults that were
//! parked, which wake as well, are not in it.

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use quire::library::{
    AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions, WaitCounts,
};
use quire::store::Direct;
use quire_test_stores::VecStore;

use super::super::data::{self, Data, PAGE_BYTES, Pattern, Remove};
use super::super::output;
use super::super::sys;
use super::prices::Prices;
use crate::samples::Samples;
use serde_json::Value;

/// Sizes of objects that are touched.
const SIZES: usize = 20;
/// What files are written full of.
const BYTE: u8 = 0x5a;
/// Besides an object's pages: its words, and what is held back for reclaim.
const SPARE_BYTES: usize = 64 << 20;

/// What is done with an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Job {
    Write { is_durable: bool },
    Read { times: usize },
    Touch { bytes: usize },
}

/// What was used for a phase of a job.
struct JobUsage {
    seconds: f64,
    cpu_seconds: f64,
    counts: WaitCounts,
}

/// A phase, with the sign or without.
#[derive(Default)]
struct Side {
    seconds: Samples,
    /// Of a thousand unlocks.
    looks: Samples,
    wakes: Samples,
    unlocks: Samples,
    /// Of the CPU time, in percent.
    share: Samples,
}

/// A phase of a job.
pub(super) struct WaitersObjectRow {
    job: &'static str,
    phase: &'static str,
    bytes: usize,
    /// With the sign; every unlock looks.
    sides: [Side; 2],
}

/// Where files are, and how large.
struct FilePlace {
    data: Data,
    directory: PathBuf,
}

/// Measures all jobs, both ways in turn.
pub(super) fn measure(
    directory: PathBuf,
    bytes: usize,
    rounds: u32,
    prices: &Prices,
) -> Result<Vec<WaitersObjectRow>> {
    let place = FilePlace { data: Data::new(&directory, bytes)?, directory };
    let bytes = place.data.bytes;
    let mut jobs = vec![
        Job::Write { is_durable: true },
        Job::Write { is_durable: false },
        Job::Read { times: 1 },
        Job::Read { times: 2 },
    ];
    let step = (bytes / SIZES).next_multiple_of(PAGE_BYTES);
    jobs.extend((1..=SIZES).map(|size| Job::Touch { bytes: size * step }));
    let mut rows: Vec<Vec<WaitersObjectRow>> = jobs.iter().map(|job| job.rows(bytes)).collect();
    for _ in 0..rounds {
        for (job, rows) in jobs.iter().zip(&mut rows) {
            for (side, always_look) in [false, true].into_iter().enumerate() {
                ensure!(!sys::is_interrupted(), "interrupted");
                for (row, used) in rows.iter_mut().zip(job.run(&place, always_look)?) {
                    row.sides[side].push(&used, prices);
                }
            }
        }
    }
    Ok(rows.into_iter().flatten().collect())
}

impl Job {
    fn rows(self, bytes: usize) -> Vec<WaitersObjectRow> {
        let (job, phases): (_, &[&'static str]) = match self {
            Job::Write { is_durable: true } => ("dd, sync", &["write and flush", "delete"]),
            Job::Write { is_durable: false } => ("dd, async", &["write and flush", "delete"]),
            Job::Read { times: 1 } => ("read once", &["read"]),
            Job::Read { .. } => ("read twice", &["read"]),
            Job::Touch { .. } => ("map and touch", &["touch"]),
        };
        let bytes = if let Job::Touch { bytes } = self { bytes } else { bytes };
        let row = |&phase: &&'static str| WaitersObjectRow {
            job,
            phase,
            bytes,
            sides: Default::default(),
        };
        phases.iter().map(row).collect()
    }

    /// Does it once; what each phase used.
    fn run(self, place: &FilePlace, always_look: bool) -> Result<Vec<JobUsage>> {
        let (memory, delivery) = match self {
            Job::Touch { bytes } => (bytes + bytes / 4 + SPARE_BYTES, Delivery::Inline),
            _ => (place.data.bytes / 4, Delivery::Handlers),
        };
        let space = AddressSpace::builder().memory(memory).delivery(delivery).build()?;
        space.set_unlocks_always_look(always_look);
        match self {
            Job::Write { is_durable } => write_and_delete(&space, place, is_durable),
            Job::Read { times } => Ok(vec![read(&space, &place.data, times)?]),
            Job::Touch { bytes } => Ok(vec![touch(&space, bytes)?]),
        }
    }
}

fn write_and_delete(
    space: &AddressSpace,
    place: &FilePlace,
    is_durable: bool,
) -> Result<Vec<JobUsage>> {
    let file = Remove(data::unused_path(&place.directory));
    let len = place.data.bytes as u64;
    let (object, written) = JobUsage::of(space, || {
        let options = OpenOptions::new().write(true).create(true).direct(Direct::Off);
        let object = options.open(space, &file.0)?;
        object.set_len(len)?;
        sys::map_object_mut(&MapOptions::new(), &object)?.fill(BYTE);
        if is_durable {
            object.flush_range(0..len)?
        } else {
            object.write_range(0..len)?
        }
        Ok(object)
    })?;
    check_written(&file, len)?;
    let ((), deleted) = JobUsage::of(space, || {
        drop(object);
        Ok(std::fs::remove_file(&file.0)?)
    })?;
    Ok(vec![written, deleted])
}

fn check_written(file: &Remove, len: u64) -> Result<()> {
    let mut file = File::open(&file.0)?;
    let (mut buffer, mut right) = (vec![0; 1 << 20], 0);
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        right += buffer[..count].iter().filter(|&&byte| byte == BYTE).count() as u64;
    }
    ensure!(right == len, "{right} of {len} bytes were written right");
    Ok(())
}

fn read(space: &AddressSpace, data: &Data, times: usize) -> Result<JobUsage> {
    data.warm()?;
    let object = OpenOptions::new().direct(Direct::Off).open(space, data.path())?;
    let ((), used) = JobUsage::of(space, || {
        let mapping = sys::map_object(&MapOptions::new(), &object)?;
        for _ in 0..times {
            let sum = Pattern::InOrder.read(sys::words_of(&mapping), &[]);
            data::check(sum, data.expected(Pattern::InOrder, &[]))?;
        }
        Ok(())
    })?;
    Ok(used)
}

fn touch(space: &AddressSpace, bytes: usize) -> Result<JobUsage> {
    let object = Object::with_store(space, VecStore::new(vec![1; bytes]), Some(0))?;
    let mut buffer = vec![0; data::BLOCK_BYTES];
    for offset in (0..bytes as u64).step_by(buffer.len()) {
        object.read_at(offset, &mut buffer)?;
    }
    ensure!(object.cached().0 == bytes, "the object is not cached as a whole");
    let ((), used) = JobUsage::of(space, || {
        let options = MapOptions::new().fault_around(FaultAround::Off);
        let mapping = sys::map_object(&options, &object)?;
        let touched = mapping.iter().step_by(PAGE_BYTES).map(|&byte| u64::from(byte)).sum();
        data::check(touched, (bytes / PAGE_BYTES) as u64)
    })?;
    Ok(used)
}

impl JobUsage {
    /// Does something, and says what was used for it.
    fn of<T>(space: &AddressSpace, act: impl FnOnce() -> Result<T>) -> Result<(T, JobUsage)> {
        let before = (space.wait_counts(), sys::cpu_seconds());
        let started = Instant::now();
        let done = act()?;
        let seconds = started.elapsed().as_secs_f64();
        let (after, cpu_seconds) = (space.wait_counts(), sys::cpu_seconds() - before.1);
        let counts = WaitCounts {
            // Threads that share a shard of it may undo each other's.
            avoided: after.avoided.saturating_sub(before.0.avoided),
            looks: after.looks - before.0.looks,
            wakes: after.wakes - before.0.wakes,
            ..WaitCounts::default()
        };
        Ok((done, JobUsage { seconds, cpu_seconds, counts }))
    }
}

impl Side {
    fn push(&mut self, used: &JobUsage, prices: &Prices) {
        let unlocks = used.counts.avoided + used.counts.looks;
        // A phase may unlock nothing.
        let of_thousand = |count: u64| count as f64 * 1000.0 / unlocks.max(1) as f64;
        self.seconds.push(used.seconds);
        self.unlocks.push(unlocks as f64);
        self.looks.push(of_thousand(used.counts.looks));
        self.wakes.push(of_thousand(used.counts.wakes));
        self.share.push(prices.seconds(&used.counts) * 100.0 / used.cpu_seconds);
    }

    fn json(&self) -> Value {
        Value::from_iter([
            ("seconds", Value::from(&self.seconds)),
            ("unlocks", Value::from(&self.unlocks)),
            ("looks_per_mille", Value::from(&self.looks)),
            ("wakes_per_mille", Value::from(&self.wakes)),
            ("unlock_and_wake_percent", Value::from(&self.share)),
        ])
    }
}

/// Prints the rows.
pub(super) fn print(rows: &[WaitersObjectRow]) {
    println!(
        "\n  {:38}{:>9}{:>9}{:>26}{:>9}{:>7}{:>7}{:>8}",
        "objects",
        "seconds",
        "always",
        "always / with the sign",
        "unlocks",
        "looks",
        "% CPU",
        "always"
    );
    for row in rows {
        let [sign, always] = &row.sides;
        println!(
            "  {:38}{:>9.4}{:>9.4}{:>26}{:>9}{:>7.1}{:>7.2}{:>8.2}",
            format!("{}: {}, {} KiB", row.job, row.phase, row.bytes >> 10),
            sign.seconds.median(),
            always.seconds.median(),
            output::ratio(&always.seconds.over(&sign.seconds)),
            sign.unlocks.median(),
            sign.looks.median(),
            sign.share.median(),
            always.share.median(),
        );
    }
    println!(
        "  (looks: of 1000 unlocks; % CPU: what unlocks and wakes take of it, from their prices)"
    );
}

/// The rows as JSON.
pub(super) fn json(rows: &[WaitersObjectRow]) -> Value {
    rows.iter()
        .map(|row| {
            let [sign, always] = &row.sides;
            Value::from_iter([
                ("job", Value::from(row.job)),
                ("phase", Value::from(row.phase)),
                ("bytes", Value::from(row.bytes)),
                ("sign", sign.json()),
                ("always_looks", always.json()),
                ("always_looks_over_sign", Value::from(&always.seconds.over(&sign.seconds))),
            ])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_one_other_byte_or_too_short_was_not_written_right() {
        let file = Remove(data::unused_path(&std::env::temp_dir()));
        let mut bytes = vec![BYTE; 5000];
        std::fs::write(&file.0, &bytes).unwrap();
        assert!(check_written(&file, 5000).is_ok());
        assert!(check_written(&file, 5001).is_err());
        bytes[4999] = 0;
        std::fs::write(&file.0, &bytes).unwrap();
        assert!(check_written(&file, 5000).is_err());
    }

    #[test]
    fn every_phase_that_is_used_has_a_row() {
        let place = FilePlace {
            data: Data::new(&std::env::temp_dir(), 8 << 20).unwrap(),
            directory: std::env::temp_dir(),
        };
        for job in [
            Job::Write { is_durable: true },
            Job::Write { is_durable: false },
            Job::Read { times: 2 },
            Job::Touch { bytes: 12 * PAGE_BYTES },
        ] {
            for always_look in [false, true] {
                let used = job.run(&place, always_look).unwrap();
                assert_eq!(used.len(), job.rows(place.data.bytes).len());
                let counts = used[0].counts;
                assert!(counts.avoided + counts.looks > 0);
                assert!(!always_look || counts.avoided == 0, "{counts:?}");
            }
        }
    }
}
