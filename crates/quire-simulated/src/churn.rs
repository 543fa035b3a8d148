//! Threads that map, touch and unmap all the time, as ebizzy's do: faults beside changes of the layout.

use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::Args;
use quire::mmu::{Access, Prot};
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::sys::clock::Moment;
use quire::sys::thread::ThreadId;
use quire::units::{BLOCK_PAGES, PageNum, PageRange};
use quire_simulated::Simulated;
use quire_simulated::tree::{Tree, space};

use super::machine::{Figures, Machine, Program, Run};

/// Pages of a record: 512 KiB.
const RECORD_PAGES: usize = 128;

#[derive(Args, Debug)]
pub(crate) struct Churn {
    #[command(flatten)]
    machine: Machine,

    /// Records of 512 KiB that each thread maps, touches and unmaps
    #[arg(long)]
    records: usize,

    /// Every fault goes the classic way
    #[arg(long)]
    classic: bool,
}

struct Churning<'a> {
    options: &'a Churn,
    space: VmSpace<Simulated>,
}

pub(crate) fn simulate(options: &Churn) -> Result<Figures> {
    options.machine.run(options.machine.handlers(), |run| {
        let (pages, frames) = (4 * BLOCK_PAGES * options.machine.threads, 16 * BLOCK_PAGES);
        let mmu = Simulated::new(pages, frames, run.settings())?;
        // A page a fault, as the kernel maps anonymous memory.
        let tree = Tree { budget_pages: pages + frames, folio_order: 0, ..Tree::default() };
        let (space, _) = space(mmu, tree, pages, frames);
        let is_off = u32::from(options.classic);
        space.budget().control().no_speculation.store(is_off, Ordering::Relaxed);
        Ok(Churning { options, space })
    })
}

impl Program for Churning<'_> {
    fn space(&self) -> &VmSpace<Simulated> {
        &self.space
    }

    fn thread(&self, _: usize, run: &Run<'_>) {
        let space = &self.space;
        for _ in 0..self.options.records {
            let mapped = space.map(&mut space.lock(), None, RECORD_PAGES, Prot::READ_WRITE);
            let start = mapped.expect("there is room for a record of each thread");
            let range = PageRange::new(start, RECORD_PAGES);
            for page in range.pages() {
                space.mmu().access(page, true).expect("it is mapped");
                run.baton.work(run.machine.touch_ns);
            }
            let unmapped = space.unmap_and_unlock(space.lock_over(&[range]), range);
            unmapped.expect("a mapping goes as it came");
        }
    }

    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch) {
        self.space.handle_fault_of(thread, page, access, Moment::now(), scratch);
    }
}
