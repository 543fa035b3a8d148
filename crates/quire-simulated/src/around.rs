//! Reads through mappings of a file that is cached: each thread maps the whole file, and faults on its pages
//! in an order; handlers serve it, or the thread itself does (inline).

use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use quire::mmu::{Access, Prot};
use quire::object::{BackingStore, FaultAround, IoBuffer, Keeper, MapRequest, ObjectId, Objects};
use quire::reclaim::{Kswapd, OOM_ROUND_MS};
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::space::vma::Pattern;
use quire::sys::Errno;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::tree::{Tree, space};
use quire_simulated::{Generator, Simulated};

use super::machine::{Figures, Machine, Program, Run};

#[derive(Args, Debug)]
pub(crate) struct Around {
    #[command(flatten)]
    machine: Machine,

    /// Page tables of the file, of 512 pages each
    #[arg(long)]
    tables: usize,

    /// The order in which pages are read
    #[arg(long, value_enum)]
    pattern: ReadOrder,

    /// What is mapped around a fault, by its order; nothing else than the page where there is none
    #[arg(long)]
    order: Option<u32>,

    /// Each thread serves its own faults
    #[arg(long)]
    inline: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum ReadOrder {
    InOrder,
    Random,
    /// One page of each page table.
    Sparse,
}

/// A store that is read once, to fill the cache.
struct Ones;

impl BackingStore for Ones {
    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), Errno> {
        into.fill(1);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn sync(&self) -> Result<(), Errno> {
        Ok(())
    }
}

/// The file, and where each thread has mapped it.
struct Reading<'a> {
    options: &'a Around,
    objects: Objects<Simulated>,
    mappings: Vec<PageRange>,
}

pub(crate) fn simulate(options: &Around) -> Result<Figures> {
    ensure!(options.tables > 0, "there is nothing to read");
    let handlers = if options.inline { 0 } else { options.machine.handlers() };
    options.machine.run(handlers, |run| Reading::new(options, run))
}

impl<'a> Reading<'a> {
    fn new(options: &'a Around, run: &Run<'_>) -> Result<Reading<'a>> {
        let threads = options.machine.threads;
        let pages = options.tables * BLOCK_PAGES;
        // A block more each: mappings begin at page tables.
        let arena_pages = (threads + 1) * (pages + BLOCK_PAGES);
        let frames = 16 * BLOCK_PAGES;
        let mmu = Simulated::new(arena_pages, frames, run.settings())?;
        let tree = Tree { budget_pages: 2 * pages + frames, ..Tree::default() };
        let objects = Objects::new(space(mmu, tree, arena_pages, frames).0)?;
        let bytes = (pages * PAGE_SIZE) as u64;
        let object = objects.open(&Ones, bytes, bytes, Keeper::Store)?;
        fill(&objects, object, bytes)?;
        let fault_around = options.order.map_or(FaultAround::Off, FaultAround::Order);
        let pages = ObjectRange::new(ObjectPage(0), pages);
        let request =
            MapRequest { pages, prot: Prot::READ, pattern: Pattern::Normal, fault_around };
        let mappings = (0..threads).map(|_| objects.map(object, request));
        let mappings = mappings.collect::<Result<Vec<_>, _>>()?;
        Ok(Reading { options, objects, mappings })
    }

    fn touch(&self, page: PageNum, run: &Run<'_>) {
        let mmu = self.space().mmu();
        while let Ok(Err(access)) = mmu.try_access(page, false) {
            if self.options.inline {
                // As a fault's way to a handler is a step of the simulated MMU's.
                run.baton.work(run.machine.fault_ns);
                run.baton.step();
                self.objects.object_fault(page, access, Moment::now());
            } else if mmu.access(page, false).is_err() {
                break;
            }
        }
    }
}

impl Program for Reading<'_> {
    fn space(&self) -> &VmSpace<Simulated> {
        &self.objects.space
    }

    fn thread(&self, index: usize, run: &Run<'_>) {
        let range = self.mappings[index];
        let mut pages: Vec<usize> = (0..range.len()).collect();
        match self.options.pattern {
            ReadOrder::InOrder => {}
            ReadOrder::Random => {
                let mut generator = Generator::new(index as u64 + 1);
                for at in (1..pages.len()).rev() {
                    pages.swap(at, generator.below(at + 1));
                }
            }
            ReadOrder::Sparse => pages.retain(|page| page % BLOCK_PAGES == 0),
        }
        for page in pages {
            self.touch(range.start.add(page), run);
            run.baton.work(run.machine.touch_ns);
        }
    }

    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch) {
        self.objects.handle_fault_of(thread, page, access, Moment::now(), scratch);
    }

    /// Has faults try again whose pages were too crowded to be parked on.
    fn tend(&self, run: &Run<'_>) {
        let (space, mut kswapd) = (self.space(), Kswapd::default());
        let mut scratch = Scratch::new().expect("there is memory for the background thread");
        loop {
            kswapd.begin(space);
            if run.is_over() {
                return;
            }
            self.objects.balance_dirty();
            let balance = space.balance(&self.objects, &mut scratch);
            let idle_ms = self.objects.has_unparked().then_some(OOM_ROUND_MS);
            kswapd.sleep(space, balance, idle_ms);
        }
    }
}

/// Reads all of the object into its cache; no time passes meanwhile.
fn fill(objects: &Objects<Simulated>, object: ObjectId, bytes: u64) -> Result<()> {
    let (mut scratch, mut buffer) = (Scratch::new()?, IoBuffer::new()?);
    let mut served = IoBuffer::new()?;
    let mut into = vec![0; BLOCK_PAGES * PAGE_SIZE];
    thread::scope(|scope| {
        scope.spawn(|| objects.serve_requests(&mut served));
        let offsets = (0..bytes).step_by(into.len());
        let read = offsets.map(|offset| {
            objects.read_at(objects.object(object), offset, &mut into, &mut scratch, &mut buffer)
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
