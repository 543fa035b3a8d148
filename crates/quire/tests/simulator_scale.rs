//! How faults scale beside changes of the layout, on a simulated machine with a CPU for every
//! thread: the engine's own code, with a clock for each.
//!
//! Threads map 512 KiB, touch each page, and unmap it, as ebizzy does; as many handlers serve them.
//! Scaling is what so many threads do to what one does.
//! `cargo test -p quire --test simulator_scale -- --nocapture` prints the table. The times are
//! those of a model (a call of the kernel 1 us and 0.2 us a page, a fault's way 2 us, a step of the
//! engine's 50 ns), so it is the ratio that says something: what of the work goes on side by side,
//! and what waits.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Tree, space};
use quire::control::Event;
use quire::mmu::Prot;
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::sys::clock::Moment;
use quire::units::BLOCK_PAGES;
use quire_simulated::{Baton, Settings, Simulated};

/// Pages of a record: 512 KiB.
const RECORD_PAGES: usize = 128;
/// Records of each thread.
const RECORDS: usize = 4;

struct Ran {
    records_a_second: f64,
    faults: u64,
    speculative: u64,
}

fn run(threads: usize, is_speculative: bool) -> Ran {
    let baton = Arc::new(Baton::with_cpus(7, 2 * threads));
    let settings = Settings { baton: Some(baton.clone()), ..Settings::default() };
    let (pages, frames) = (4 * BLOCK_PAGES * threads, 16 * BLOCK_PAGES);
    let mmu = Simulated::new(pages, frames, settings).unwrap();
    // A page a fault, as the kernel maps anonymous memory.
    let tree = Tree { budget_pages: 16 << 10, folio_order: 0, ..Tree::default() };
    let (space, _) = space(mmu, tree, pages, frames);
    space.budget().control().no_speculation.store(u32::from(!is_speculative), Ordering::Relaxed);
    let left = AtomicUsize::new(threads);
    std::thread::scope(|scope| {
        for index in 0..2 * threads {
            let (space, left, baton) = (&space, &left, &baton);
            scope.spawn(move || {
                baton.start(index);
                if index < threads {
                    churn(space);
                    left.fetch_sub(1, Ordering::Relaxed);
                } else {
                    handle_faults(space, baton, left);
                }
                baton.end();
            });
        }
    });
    assert_eq!(baton.failure(), None);
    let budget = space.budget();
    Ran {
        records_a_second: (threads * RECORDS) as f64 / (baton.elapsed_ns() as f64 / 1e9),
        faults: budget.counted(Event::Pgfault),
        speculative: budget.counted(Event::SpeculativePgfault),
    }
}

fn churn(space: &VmSpace<Simulated>) {
    for _ in 0..RECORDS {
        let start = {
            let mut layout = space.lock();
            space.map(&mut layout, None, RECORD_PAGES, Prot::READ_WRITE).unwrap()
        };
        let range = quire::units::PageRange::new(start, RECORD_PAGES);
        for page in range.pages() {
            space.mmu().access(page, true).unwrap();
        }
        space.unmap_and_unlock(space.lock_over(&[range]), range).unwrap();
    }
}

fn handle_faults(space: &VmSpace<Simulated>, baton: &Baton, left: &AtomicUsize) {
    let mut scratch = Scratch::new().unwrap();
    loop {
        let mut next = None;
        baton.idle_until(|| {
            next = space.mmu().try_next_message();
            next.is_some() || left.load(Ordering::Relaxed) == 0
        });
        let Some((thread, page, access)) = next else { return };
        space.handle_fault_of(thread, page, access, Moment::now(), &mut scratch);
    }
}

#[test]
fn maps_faults_and_unmaps_of_many_threads_scale() {
    println!("threads   classic, records/s   speculative   ratio   scaling   faults served so");
    let mut alone = 0.0;
    let mut last = [0.0; 2];
    for threads in [1, 4, 16] {
        let [classic, speculative] =
            [false, true].map(|is_speculative| run(threads, is_speculative));
        if threads == 1 {
            alone = speculative.records_a_second;
        }
        last = [
            speculative.records_a_second / classic.records_a_second,
            speculative.records_a_second / alone,
        ];
        println!(
            "{threads:>7} {:>20.0} {:>13.0} {:>7.2} {:>9.2} {:>15.1} %",
            classic.records_a_second,
            speculative.records_a_second,
            last[0],
            last[1],
            100.0 * speculative.speculative as f64 / speculative.faults as f64
        );
    }
    // No clock of this machine's is in it: the same on each.
    let [ratio, scaling] = last;
    assert!(ratio > 1.3, "{ratio:.2} times the classic way's at 16 CPUs");
    assert!(scaling > 12.0, "{scaling:.2} times one thread's at 16 CPUs");
}
