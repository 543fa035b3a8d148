//! The second half of `quire bench rmap`: jobs a minute on shared objects, as aim7 counts them.
//!
//! Workers do jobs on a few objects that all of them share, in a budget of a quarter of what the
//! objects hold, so that reclaim walks the reverse map all the time. `short mappings` maps a part of
//! an object, reads some of it, and unmaps it; now and then it drops a part from the cache or
//! shortens and lengthens an object's tail. `disk` writes to a part through a mapping and flushes
//! it. `walks` truncates pages that many mappings have, gives an object's pages new memory, or
//! reads some and drops them, so that whole objects are looked for in all their mappings. Each once with
//! walks that share the lock, once with walks that keep all others out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use quire::library::{AddressSpace, MapOptions, Mapping, Object};
use quire_test_stores::VecStore;

use super::sys;
use super::work::Random;

const PAGE_BYTES: usize = 4096;
const OBJECTS: usize = 4;
const OBJECT_BYTES: usize = 8 << 20;
/// No job reads an object's tail: it is what comes and goes.
const TAIL_BYTES: usize = 1 << 20;
const PART_BYTES: usize = 256 << 10;
/// Mappings of each object that are there all the time.
const STANDING: usize = 16;

/// A mix of jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mix {
    ShortMappings,
    Disk,
    Walks,
}

impl Mix {
    pub(crate) const ALL: [Mix; 3] = [Mix::ShortMappings, Mix::Disk, Mix::Walks];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Mix::ShortMappings => "short mappings",
            Mix::Disk => "disk",
            Mix::Walks => "walks",
        }
    }
}

/// An object that all workers share.
struct Shared {
    object: Object,
    standing: Vec<Mapping>,
}

impl Shared {
    fn new(space: &AddressSpace) -> Result<Shared> {
        let object = Object::with_store(space, VecStore::new(vec![1; OBJECT_BYTES]), None)?;
        let map = |_| sys::map_object(&MapOptions::new(), &object);
        let standing = (0..STANDING).map(map).collect::<Result<Vec<_>, _>>()?;
        Ok(Shared { object, standing })
    }

    fn truncate_tail(&self) -> Result<()> {
        self.object.set_len((OBJECT_BYTES - TAIL_BYTES) as u64)?;
        Ok(self.object.set_len(OBJECT_BYTES as u64)?)
    }
}

/// The objects, in a budget of a quarter of what they hold.
pub(crate) struct Jobs {
    space: AddressSpace,
    objects: Vec<Shared>,
}

impl Jobs {
    pub(crate) fn new() -> Result<Jobs> {
        let space = AddressSpace::builder().memory(OBJECTS * OBJECT_BYTES / 4).build()?;
        let objects = (0..OBJECTS).map(|_| Shared::new(&space)).collect::<Result<Vec<_>>>()?;
        Ok(Jobs { space, objects })
    }

    /// Jobs a minute.
    pub(crate) fn measure(
        &self,
        mix: Mix,
        workers: usize,
        are_exclusive: bool,
        length: Duration,
    ) -> Result<f64> {
        self.space.set_exclusive_rmap(are_exclusive);
        run(&self.objects, mix, workers, length)
    }
}

/// Jobs a minute of so many workers.
fn run(objects: &[Shared], mix: Mix, workers: usize, round: Duration) -> Result<f64> {
    let (is_over, jobs) = (AtomicBool::new(false), AtomicU64::new(0));
    let started = Instant::now();
    thread::scope(|scope| {
        let all: Vec<_> = (0..workers)
            .map(|worker| {
                let (is_over, jobs) = (&is_over, &jobs);
                scope.spawn(move || -> Result<()> {
                    let mut random = Random::new(worker as u64 + 1);
                    while !is_over.load(Ordering::Relaxed) {
                        job(objects, mix, &mut random)?;
                        jobs.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        thread::sleep(round);
        is_over.store(true, Ordering::Relaxed);
        all.into_iter().try_for_each(|one| one.join().expect("a job does not panic"))
    })?;
    Ok(jobs.into_inner() as f64 * 60.0 / started.elapsed().as_secs_f64())
}

/// One job, on a part of an object that others map as well.
fn job(objects: &[Shared], mix: Mix, random: &mut Random) -> Result<()> {
    let shared = &objects[random.below(objects.len())];
    let object = &shared.object;
    let parts = (OBJECT_BYTES - TAIL_BYTES) / PART_BYTES;
    let offset = random.below(parts) * PART_BYTES;
    let options = MapOptions::new().offset(offset as u64).len(PART_BYTES as u64);
    match mix {
        Mix::ShortMappings => {
            let mapping = sys::map_object(&options, object)?;
            read(&mapping)?;
            match random.below(16) {
                0 => drop(object.drop_cached(offset as u64..(offset + PART_BYTES) as u64)),
                1 => shared.truncate_tail()?,
                _ => {}
            }
        }
        Mix::Disk => {
            let mapping = sys::map_object_mut(&options, object)?;
            for page in 0..8 {
                sys::write_byte(&mapping, page * PAGE_BYTES * 8, 1);
            }
            mapping.flush()?;
        }
        Mix::Walks => match random.below(8) {
            0 => drop(object.migrate()?),
            1 => {
                for mapping in &shared.standing {
                    // Another worker may have shortened it just now.
                    let _ = mapping.populate(OBJECT_BYTES - TAIL_BYTES / 4..OBJECT_BYTES);
                }
                shared.truncate_tail()?;
            }
            standing => {
                let part = offset..offset + PART_BYTES;
                read(&shared.standing[standing][part.clone()])?;
                object.drop_cached(part.start as u64..part.end as u64);
            }
        },
    }
    Ok(())
}

/// Reads every fourth page.
fn read(bytes: &[u8]) -> Result<()> {
    let sum: u64 = bytes.iter().step_by(4 * PAGE_BYTES).map(|&byte| u64::from(byte)).sum();
    anyhow::ensure!(sum > 0, "wrong bytes were read");
    Ok(())
}
