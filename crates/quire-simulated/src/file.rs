//! Files of a simulated machine, and what the engine's background thread does for them.

use std::thread;

use anyhow::{Context as _, Result, bail};
use quire::object::{IoBuffer, Keeper, ObjectId, Objects};
use quire::reclaim::{Kswapd, OOM_ROUND_MS};
use quire::scratch::Scratch;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum};
use quire_simulated::{Ones, Simulated};

use super::machine::Run;

/// Reads or writes a page as a thread does that serves its own faults.
pub(crate) fn access_inline(
    objects: &Objects<Simulated>,
    page: PageNum,
    is_write: bool,
    run: &Run<'_>,
) {
    let access = || objects.space.mmu().try_access(page, is_write).expect("it is mapped");
    while let Err(access) = access() {
        // As a fault's way to a handler is a step of the simulated MMU's.
        run.baton.work(run.machine.fault_ns);
        run.baton.step();
        objects.object_fault(page, access, Moment::now());
    }
}

/// Opens files of so many pages, all of which are cached.
pub(crate) fn open_cached(
    objects: &Objects<Simulated>,
    files: usize,
    pages: usize,
) -> Result<Vec<ObjectId>> {
    let bytes = (pages * PAGE_SIZE) as u64;
    let open = || objects.open(&Ones, bytes, bytes, Keeper::Store);
    let files = (0..files).map(|_| open()).collect::<Result<Vec<_>, _>>()?;
    fill(objects, &files, bytes)?;
    Ok(files)
}

/// Reads all of the files into the cache; no time passes meanwhile.
fn fill(objects: &Objects<Simulated>, files: &[ObjectId], bytes: u64) -> Result<()> {
    let (mut scratch, mut buffer) = (Scratch::new()?, IoBuffer::new()?);
    let mut served = IoBuffer::new()?;
    let mut into = vec![0; BLOCK_PAGES * PAGE_SIZE];
    thread::scope(|scope| {
        scope.spawn(|| objects.serve_requests(&mut served));
        let parts = files.iter().flat_map(|&file| {
            let offsets = (0..bytes).step_by(BLOCK_PAGES * PAGE_SIZE);
            offsets.map(move |offset| (objects.object(file), offset))
        });
        let read = parts.map(|(file, offset)| {
            objects.read_at(file, offset, &mut into, &mut scratch, &mut buffer)
        });
        let failed = read.into_iter().find_map(Result::err);
        objects.stop_workers();
        match failed {
            Some(error) => bail!("the file cannot be read: {error:?}"),
            None => Ok(()),
        }
    })
    .context("the cache cannot be filled")
}

/// Has faults try again whose pages were too crowded to be parked on.
pub(crate) fn tend(objects: &Objects<Simulated>, run: &Run<'_>) {
    let (space, mut kswapd) = (&objects.space, Kswapd::default());
    let mut scratch = Scratch::new().expect("there is memory for the background thread");
    loop {
        kswapd.begin(space);
        if run.is_over() {
            return;
        }
        objects.balance_dirty();
        let balance = space.balance(objects, &mut scratch);
        let idle_ms = objects.has_unparked().then_some(OOM_ROUND_MS);
        kswapd.sleep(space, balance, idle_ms);
    }
}
