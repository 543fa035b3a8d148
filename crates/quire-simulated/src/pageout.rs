//! Threads that page out: each unmaps memory that it has written, folio by folio.

use anyhow::{Result, ensure};
use clap::Args;
use quire::mmu::{Access, Prot};
use quire::reclaim::Reclaimer;
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::{BLOCK_PAGES, PageNum, PageRange};
use quire_simulated::Simulated;
use quire_simulated::tree::{Tree, space};

use super::machine::{Figures, Machine, Program, Run};

#[derive(Args, Debug)]
pub(crate) struct Pageout {
    #[command(flatten)]
    machine: Machine,

    /// Page tables of memory that each thread pages out, of 512 pages each
    #[arg(long)]
    tables: usize,

    /// The order of folios
    #[arg(long)]
    order: i32,

    /// Every page is unmapped by a call of its own
    #[arg(long)]
    no_batch_unmap: bool,
}

struct PagingOut<'a> {
    options: &'a Pageout,
    space: VmSpace<Simulated>,
}

pub(crate) fn simulate(options: &Pageout) -> Result<Figures> {
    ensure!(options.tables > 0, "there is nothing to page out");
    options.machine.run(options.machine.handlers(), |run| {
        // What is unmapped stays in frames: what is done with it then is no part of this.
        let pages = options.tables * BLOCK_PAGES * options.machine.threads;
        let frames = pages + 16 * BLOCK_PAGES;
        let mmu = Simulated::new(pages, frames, run.settings())?;
        let tree = Tree {
            budget_pages: 2 * pages + frames,
            folio_order: options.order,
            is_batched: !options.no_batch_unmap,
            ..Tree::default()
        };
        Ok(PagingOut { options, space: space(mmu, tree, pages, frames).0 })
    })
}

impl Program for PagingOut<'_> {
    fn space(&self) -> &VmSpace<Simulated> {
        &self.space
    }

    fn thread(&self, _: usize, run: &Run<'_>) {
        let (space, pages) = (&self.space, self.options.tables * BLOCK_PAGES);
        let mapped = space.map(&mut space.lock(), None, pages, Prot::READ_WRITE);
        let range = PageRange::new(mapped.expect("there is room for each thread"), pages);
        for page in range.pages() {
            space.mmu().access(page, true).expect("it is mapped");
            run.baton.work(run.machine.touch_ns);
        }
        let mut scratch = Scratch::new().expect("there is memory for a thread");
        for block in range.by_block() {
            let evicted = space.evict_range(block, Reclaimer::Advice, &mut scratch);
            assert_eq!(evicted.unmapped, block.len(), "nothing keeps a page there");
        }
    }

    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch) {
        self.space.handle_fault_of(thread, page, access, Moment::now(), scratch);
    }
}
