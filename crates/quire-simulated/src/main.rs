//! `quire-simulated`: reads through mappings of a file that is cached, by the engine itself on the simulated
//! machine.
//!
//! Each thread maps the whole file, and faults on its pages in an order; handlers on the same CPUs serve
//! it, or the thread itself does (inline). What the kernel does costs what the command line says; the
//! engine's own steps cost the same each. Prints a JSON line for each figure. Whoever runs it
//! (`quire bench fault-around --simulate`) scales the figures to files that are larger than what is run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use quire::control::Event;
use quire::mmu::Prot;
use quire::object::{BackingStore, FaultAround, IoBuffer, Keeper, MapRequest, ObjectId, Objects};
use quire::process::HANDLERS_AUTO_MAX;
use quire::reclaim::{Kswapd, OOM_ROUND_MS};
use quire::scratch::Scratch;
use quire::space::vma::Pattern;
use quire::sys::Errno;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SIZE, PageRange};
use quire_simulated::tree::{Tree, space};
use quire_simulated::{Baton, Costs, Generator, Settings, Simulated};

/// Reads through mappings of a cached file, simulated
#[derive(Parser, Debug)]
struct Simulation {
    #[arg(long)]
    threads: usize,

    #[arg(long)]
    cpus: usize,

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

    /// What a call of the kernel costs, nanoseconds
    #[arg(long)]
    call_ns: u64,

    /// What each page of such a call costs
    #[arg(long)]
    page_ns: u64,

    /// A fault's way to a handler and back; inline into the signal's handler and back
    #[arg(long)]
    fault_ns: u64,

    /// What a step of the engine costs, from one lock or word to the next
    #[arg(long)]
    step_ns: u64,

    /// What the program does with a page
    #[arg(long)]
    touch_ns: u64,
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

/// What all actors share.
struct World<'a> {
    options: &'a Simulation,
    baton: Arc<Baton>,
    objects: Objects<Simulated>,
    mappings: Vec<PageRange>,
    threads_left: AtomicUsize,
    /// What handlers were busy for.
    handling_ns: AtomicU64,
}

/// What a simulation came to, by name.
type Figures = [(&'static str, f64); 3];

fn main() -> Result<()> {
    for (name, value) in simulate(&Simulation::parse())? {
        println!("{{\"figure\": \"{name}\", \"value\": {value:.9}}}");
    }
    Ok(())
}

fn simulate(options: &Simulation) -> Result<Figures> {
    ensure!(
        options.threads > 0 && options.cpus > 0 && options.tables > 0,
        "there is nothing to do"
    );
    let handlers = if options.inline { 0 } else { options.cpus.min(HANDLERS_AUTO_MAX) };
    // The last one is the background thread.
    let numbers = (0..options.threads).chain(0..handlers).chain([0]);
    let cpu_of = numbers.map(|number| number % options.cpus);
    let baton = Arc::new(Baton::on_cpus(1, cpu_of.collect(), options.step_ns));
    let world = World::new(options, baton)?;
    thread::scope(|scope| {
        for index in 0..=options.threads + handlers {
            let world = &world;
            scope.spawn(move || {
                world.baton.start(index);
                match index.checked_sub(options.threads) {
                    None => world.read(index),
                    Some(handler) if handler < handlers => world.handle(),
                    Some(_) => world.answer_unparked(),
                }
                world.baton.end();
            });
        }
    });
    if let Some(failure) = world.baton.failure() {
        bail!("the simulation failed: {failure}");
    }
    Ok([
        ("seconds", world.baton.elapsed_ns() as f64 / 1e9),
        ("faults", world.objects.space.budget().counted(Event::Pgfault) as f64),
        ("handling_seconds", world.handling_ns.load(Ordering::Relaxed) as f64 / 1e9),
    ])
}

impl World<'_> {
    fn new(options: &Simulation, baton: Arc<Baton>) -> Result<World<'_>> {
        let pages = options.tables * BLOCK_PAGES;
        // A block more each: mappings begin at page tables.
        let arena_pages = (options.threads + 1) * (pages + BLOCK_PAGES);
        let frames = 16 * BLOCK_PAGES;
        let costs = Costs {
            call_ns: options.call_ns,
            page_ns: options.page_ns,
            fault_ns: options.fault_ns,
        };
        let settings = Settings { baton: Some(baton.clone()), costs, ..Settings::default() };
        let mmu = Simulated::new(arena_pages, frames, settings)?;
        let tree = Tree { budget_pages: 2 * pages + frames, ..Tree::default() };
        let objects = Objects::new(space(mmu, tree, arena_pages, frames).0)?;
        let bytes = (pages * PAGE_SIZE) as u64;
        let object = objects.open(&Ones, bytes, bytes, Keeper::Store)?;
        fill(&objects, object, bytes)?;
        let fault_around = options.order.map_or(FaultAround::Off, FaultAround::Order);
        let pages = ObjectRange::new(ObjectPage(0), pages);
        let request =
            MapRequest { pages, prot: Prot::READ, pattern: Pattern::Normal, fault_around };
        let mappings = (0..options.threads).map(|_| objects.map(object, request));
        let mappings = mappings.collect::<Result<Vec<_>, _>>()?;
        let threads_left = AtomicUsize::new(options.threads);
        let handling_ns = AtomicU64::new(0);
        Ok(World { options, baton, objects, mappings, threads_left, handling_ns })
    }

    /// A thread of the program.
    fn read(&self, index: usize) {
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
            self.touch(range, page);
            self.baton.work(self.options.touch_ns);
        }
        if self.threads_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.objects.space.budget().call_for_memory();
        }
    }

    fn is_over(&self) -> bool {
        self.threads_left.load(Ordering::Relaxed) == 0
    }

    fn touch(&self, range: PageRange, page: usize) {
        let (mmu, page) = (self.objects.space.mmu(), range.start.add(page));
        while let Ok(Err(access)) = mmu.try_access(page, false) {
            if self.options.inline {
                // As a fault's way to a handler is a step of the simulated MMU's.
                self.baton.work(self.options.fault_ns);
                self.baton.step();
                self.objects.object_fault(page, access, Moment::now());
            } else if mmu.access(page, false).is_err() {
                break;
            }
        }
    }

    /// A handler.
    fn handle(&self) {
        let mut scratch = Scratch::new().expect("there is memory for a handler");
        loop {
            let mut next = None;
            self.baton.idle_until(|| {
                next = self.objects.space.mmu().try_next_message();
                next.is_some() || self.is_over()
            });
            let Some((thread, page, access)) = next else { return };
            let begun = self.baton.now_ns();
            self.objects.handle_fault_of(thread, page, access, Moment::now(), &mut scratch);
            let busy = self.baton.now_ns() - begun;
            self.handling_ns.fetch_add(busy, Ordering::Relaxed);
        }
    }

    /// The background thread, which has faults try again whose pages were too crowded to be parked on.
    fn answer_unparked(&self) {
        let (space, mut kswapd) = (&self.objects.space, Kswapd::default());
        let mut scratch = Scratch::new().expect("there is memory for the background thread");
        loop {
            kswapd.begin(space);
            if self.is_over() {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(words: &str) -> [f64; 3] {
        let costs = "--call-ns 1000 --page-ns 100 --fault-ns 2000 --step-ns 0 --touch-ns 10";
        let line = format!("quire-simulated {words} {costs}");
        let options = Simulation::try_parse_from(line.split_whitespace()).unwrap();
        simulate(&options).unwrap().map(|(_, value)| value)
    }

    #[test]
    fn a_thread_alone_faults_once_for_each_window() {
        for by in ["", "--inline"] {
            for (order, windows) in [("", 1024.0), ("--order 4", 64.0), ("--order 9", 2.0)] {
                for pattern in ["in-order", "random"] {
                    let words =
                        format!("--threads 1 --cpus 2 --tables 2 --pattern {pattern} {order} {by}");
                    let [seconds, faults, handling] = figures(&words);
                    assert_eq!(faults, windows, "{words}");
                    let own_ns = windows * (2000.0 + 1000.0) + 1024.0 * (100.0 + 10.0);
                    let ns = seconds * 1e9;
                    assert!((own_ns..2.0 * own_ns).contains(&ns), "{words}: {ns}, not {own_ns}");
                    assert_eq!(handling > 0.0, by.is_empty(), "{words}");
                }
            }
            let sparse = format!("--threads 1 --cpus 1 --tables 7 --pattern sparse {by}");
            assert_eq!(figures(&sparse)[1], 7.0);
        }
    }

    #[test]
    fn threads_on_cpus_of_their_own_take_less_time_than_on_one() {
        let on = |cpus| {
            let [seconds, faults, _] =
                figures(&format!("--threads 4 --cpus {cpus} --tables 1 --pattern random --inline"));
            assert!(faults >= 4.0 * 512.0);
            seconds
        };
        let (one, four) = (on(1), on(4));
        assert!(one > 3.0 * four && one < 5.0 * four, "{one} on one CPU, {four} on four");
    }

    #[test]
    fn more_threads_on_a_page_than_can_be_parked_come_to_an_end() {
        let [seconds, faults, _] =
            figures("--threads 80 --cpus 80 --tables 1 --pattern sparse --order 9");
        assert!(faults >= 80.0 && seconds < 1.0, "{faults} faults, {seconds} s");
    }

    #[test]
    fn what_is_simulated_is_the_same_every_time() {
        let words = "--threads 3 --cpus 2 --tables 1 --pattern in-order --order 3";
        assert_eq!(figures(words), figures(words));
    }
}
