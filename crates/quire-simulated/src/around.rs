//! Reads through mappings of a file that is cached: each thread maps the whole file, and faults on its pages
//! in an order; handlers serve it, or the thread itself does (inline).

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use quire::mmu::{Access, Prot};
use quire::object::{FaultAround, MapRequest, Objects};
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::space::vma::Pattern;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PageNum, PageRange};
use quire_simulated::tree::{Tree, space};
use quire_simulated::{Generator, Simulated};

use super::file;
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
        let object = file::open_cached(&objects, 1, pages)?[0];
        let fault_around = options.order.map_or(FaultAround::Off, FaultAround::Order);
        let pages = ObjectRange::new(ObjectPage(0), pages);
        let request =
            MapRequest { pages, prot: Prot::READ, pattern: Pattern::Normal, fault_around };
        let mappings = (0..threads).map(|_| objects.map(object, request));
        let mappings = mappings.collect::<Result<Vec<_>, _>>()?;
        Ok(Reading { options, objects, mappings })
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
            let page = range.start.add(page);
            if self.options.inline {
                file::access_inline(&self.objects, page, false, run);
            } else {
                let read = self.space().mmu().access(page, false);
                read.expect("it is mapped");
            }
            run.baton.work(run.machine.touch_ns);
        }
    }

    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch) {
        self.objects.handle_fault_of(thread, page, access, Moment::now(), scratch);
    }

    fn tend(&self, run: &Run<'_>) {
        file::tend(&self.objects, run);
    }
}
