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
use super::super::harness::report::spread;
use super::super::harness::suite::{Along, Figures, Results, Shape, Sheet};
use super::super::sys;
use super::Plan;
use super::prices::Prices;
use crate::samples::Samples;

/// Sizes of objects that are touched.
const SIZES: usize = 20;
/// What files are written full of.
const BYTE: u8 = 0x5a;
/// Besides an object's pages: its words, and what is held back for reclaim.
const SPARE_BYTES: usize = 64 << 20;

/// The ways of unlocking, and the table of objects that are touched.
const SIGN: &str = "with the sign";
const LOOKS: &str = "always looks";
const TOUCHED: &str = "objects of growing sizes, mapped and touched";

/// What is done with an object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Job {
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

/// Where files are, and how large.
pub(super) struct FilePlace {
    data: Data,
    directory: PathBuf,
}

impl FilePlace {
    pub(super) fn new(directory: PathBuf, bytes: usize) -> Result<FilePlace> {
        Ok(FilePlace { data: Data::new(&directory, bytes)?, directory })
    }

    pub(super) fn bytes(&self) -> usize {
        self.data.bytes
    }
}

/// The tables, for files of so many bytes.
pub(super) fn sheets(bytes: usize) -> [Sheet<Plan>; 2] {
    let mut files = Sheet::new("files written, deleted and read", Shape::Figures).base(LOOKS);
    let jobs = [
        Job::Write { is_durable: true },
        Job::Write { is_durable: false },
        Job::Read { times: 1 },
        Job::Read { times: 2 },
    ];
    jobs.iter().for_each(|job| job.add(&mut files));
    let mut touched = Sheet::new(TOUCHED, Shape::Cells).base(LOOKS).plot(Along::Rows);
    let step = (bytes / SIZES).next_multiple_of(PAGE_BYTES);
    (1..=SIZES).for_each(|size| Job::Touch { bytes: size * step }.add(&mut touched));
    for sheet in [&mut files, &mut touched] {
        sheet.note = Some(
            "Looks: of 1000 unlocks. % CPU: what unlocks and wakes take of it, from their prices."
                .into(),
        );
    }
    [files, touched]
}

/// Does a job once; its figures, phase by phase.
pub(super) fn measure(
    job: Job,
    place: &FilePlace,
    always_look: bool,
    prices: &Prices,
) -> Result<Figures> {
    let mut figures = Figures::new();
    for (phase, used) in job.phases().iter().zip(job.run(place, always_look)?) {
        let of_phase = |(name, value): (&str, f64)| (format!("{phase}{name}"), value);
        figures.extend(used.figures(prices).into_iter().map(of_phase));
    }
    Ok(figures)
}

/// What the sign brings where pages are touched.
pub(super) fn words(results: Results<'_>) -> Option<String> {
    let turns = results.0.iter().filter(|record| record.turn.row == TOUCHED);
    let mut sizes: Vec<&str> = turns.map(|record| record.turn.part.as_str()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let ratio = |size: &&str| results.over(TOUCHED, size, [SIGN, LOOKS], "seconds").median();
    let ratios = sizes.iter().map(ratio).filter(|ratio| ratio.is_finite()).collect::<Samples>();
    (!ratios.is_empty()).then(|| {
        format!(
            "With the sign, objects are touched in {} of the time of unlocks that always look, over {} \
             sizes; in the authors' table it is 0.79 to 0.99, 0.96 in the middle.",
            spread(&ratios, ""),
            ratios.values().len()
        )
    })
}

impl Job {
    fn name(self) -> String {
        match self {
            Job::Write { is_durable: true } => "dd, sync".into(),
            Job::Write { is_durable: false } => "dd, async".into(),
            Job::Read { times: 1 } => "read once".into(),
            Job::Read { .. } => "read twice".into(),
            Job::Touch { bytes } => format!("{} KiB", bytes >> 10),
        }
    }

    /// What stands before the figures of each phase.
    fn phases(self) -> &'static [&'static str] {
        match self {
            Job::Write { .. } => &["write and flush: ", "delete: "],
            Job::Read { .. } | Job::Touch { .. } => &[""],
        }
    }

    fn add(self, sheet: &mut Sheet<Plan>) {
        for (way, always_look) in [(SIGN, false), (LOOKS, true)] {
            sheet.add(self.name(), way, Plan::Object { job: self, always_look });
        }
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

    fn figures(&self, prices: &Prices) -> Vec<(&'static str, f64)> {
        let unlocks = (self.counts.avoided + self.counts.looks) as f64;
        let mut figures = vec![("seconds", self.seconds)];
        // A phase may unlock nothing.
        if unlocks > 0.0 {
            figures.extend([
                ("unlocks", unlocks),
                ("looks", self.counts.looks as f64 * 1000.0 / unlocks),
                ("% CPU", prices.seconds(&self.counts) * 100.0 / self.cpu_seconds),
            ]);
        }
        figures
    }
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
    fn every_phase_that_is_used_has_a_name() {
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
                assert_eq!(used.len(), job.phases().len());
                let counts = used[0].counts;
                assert!(counts.avoided + counts.looks > 0);
                assert!(!always_look || counts.avoided == 0, "{counts:?}");
            }
        }
    }
}
