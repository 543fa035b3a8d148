//! Workers that write to parts of files and flush them, for which the pages are write-protected in all mappings;
//! some give a file's pages new memory, for which they are unmapped. Workers serve their own faults.

use anyhow::{Result, ensure};
use clap::Args;
use quire::mmu::{Access, Prot};
use quire::object::{FaultAround, IoBuffer, MapRequest, ObjectId, Objects};
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

/// Files that all workers share, pages of each, those of a part, and those of it that are written.
const FILES: usize = 4;
const FILE_PAGES: usize = 64;
const PART_PAGES: usize = 16;
const WRITTEN_PAGES: usize = 4;
/// Of so many jobs one migrates.
const MIGRATES_ONE_IN: u32 = 16;

#[derive(Args, Debug)]
pub(crate) struct Walks {
    #[command(flatten)]
    machine: Machine,

    /// Jobs of each worker
    #[arg(long)]
    jobs: usize,

    /// Walks over a file's mappings keep all others out
    #[arg(long)]
    exclusive: bool,
}

/// The files, each with a mapping for each worker.
struct Walking<'a> {
    options: &'a Walks,
    objects: Objects<Simulated>,
    files: Vec<(ObjectId, Vec<PageRange>)>,
}

pub(crate) fn simulate(options: &Walks) -> Result<Figures> {
    let Machine { threads, cpus, .. } = options.machine;
    // On a simulated CPU nothing preempts a thread that waits awake, not even the one that it waits for.
    ensure!(cpus >= threads, "{threads} workers need as many CPUs");
    options.machine.run(0, |run| Walking::new(options, run))
}

impl<'a> Walking<'a> {
    fn new(options: &'a Walks, run: &Run<'_>) -> Result<Walking<'a>> {
        let workers = options.machine.threads;
        let arena_pages = (FILES * workers + 1) * BLOCK_PAGES;
        let frames = 16 * BLOCK_PAGES;
        let mmu = Simulated::new(arena_pages, frames, run.settings())?;
        let tree = Tree { budget_pages: 2 * FILES * FILE_PAGES + frames, ..Tree::default() };
        let objects = Objects::new(space(mmu, tree, arena_pages, frames).0)?;
        objects.i_mmaps.set_walks_exclusive(options.exclusive);
        let request = MapRequest {
            pages: ObjectRange::new(ObjectPage(0), FILE_PAGES),
            prot: Prot::READ_WRITE,
            pattern: Pattern::Normal,
            fault_around: FaultAround::Order(4),
        };
        let mut files = Vec::new();
        for file in file::open_cached(&objects, FILES, FILE_PAGES)? {
            let mappings = (0..workers).map(|_| objects.map(file, request));
            files.push((file, mappings.collect::<Result<Vec<_>, _>>()?));
        }
        Ok(Walking { options, objects, files })
    }
}

impl Program for Walking<'_> {
    fn space(&self) -> &VmSpace<Simulated> {
        &self.objects.space
    }

    fn thread(&self, index: usize, run: &Run<'_>) {
        let mut generator = Generator::new(index as u64 + 1);
        let mut scratch = Scratch::new().expect("there is memory for a worker");
        let mut buffer = IoBuffer::new().expect("there is memory for a worker");
        for _ in 0..self.options.jobs {
            let (file, mappings) = &self.files[generator.below(FILES)];
            let start = generator.below(FILE_PAGES / PART_PAGES) * PART_PAGES;
            let part = PageRange::new(mappings[index].start.add(start), PART_PAGES);
            for (at, page) in part.pages().enumerate() {
                file::access_inline(&self.objects, page, at < WRITTEN_PAGES, run);
                run.baton.work(run.machine.touch_ns);
            }
            let (object, start) = (self.objects.object(*file), ObjectPage(start as u64));
            if generator.one_in(MIGRATES_ONE_IN) {
                self.objects.migrate(object, &mut scratch, &mut buffer);
            } else {
                let written = ObjectRange::new(start, WRITTEN_PAGES);
                let flushed = self.objects.flush(object, written, false, &mut 0, &mut buffer);
                flushed.expect("the store takes all");
            }
        }
    }

    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch) {
        self.objects.handle_fault_of(thread, page, access, Moment::now(), scratch);
    }

    fn tend(&self, run: &Run<'_>) {
        file::tend(&self.objects, run);
    }
}
