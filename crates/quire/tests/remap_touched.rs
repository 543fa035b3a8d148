//! A mapping that is moved to where another thread already reads: the new VMA is there before its pages
//! are, so faults come in between. The threads run by turns, in orders that seeds choose.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Tree, space};
use quire::mmu::Prot;
use quire::scratch::Scratch;
use quire::space::remap::Placement;
use quire::space::{Advice, VmSpace};
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::{Baton, Settings, Simulated};

const PAGES: usize = 8;
const PLACES: [PageNum; 2] = [PageNum(0), PageNum(100)];

fn pattern(page: usize) -> [u8; PAGE_SIZE] {
    [1 + page as u8; PAGE_SIZE]
}

/// Moves a mapping to and fro, and looks at its pages after each time.
fn move_to_and_fro(space: &VmSpace<Simulated>) {
    let mut range = PageRange::new(PLACES[0], PAGES);
    space.map_fixed(&mut space.lock(), range, Prot::READ_WRITE).unwrap();
    for (at, page) in range.pages().enumerate() {
        // SAFETY: mapped; this thread has the baton until its next call.
        unsafe { *space.mmu().access(page, true).unwrap() = pattern(at) };
    }
    for turn in 1..6 {
        if turn % 2 == 0 {
            space.advise(&mut space.lock(), range, Advice::PageOut).unwrap();
        }
        let place = Placement::At(PLACES[turn % 2]);
        let start = space.remap(&mut space.lock(), range, PAGES, place).unwrap();
        range = PageRange::new(start, PAGES);
        for (at, page) in range.pages().enumerate() {
            space.check_page(page);
            // SAFETY: as above.
            let bytes = unsafe { *space.mmu().access(page, false).unwrap() };
            assert!(bytes == pattern(at), "page {at} has lost its bytes in move {turn}");
        }
    }
}

fn run(seed: u64) {
    let baton = Arc::new(Baton::new(seed, 3, 2));
    let settings = Settings { seed, baton: Some(Arc::clone(&baton)), ..Settings::default() };
    let mmu = Simulated::new(2 * BLOCK_PAGES, 2 * BLOCK_PAGES, settings).unwrap();
    let (space, _file) = space(mmu, Tree::default(), 2 * BLOCK_PAGES, 2 * BLOCK_PAGES);
    let (is_moved, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let act = |index: usize, body: &dyn Fn()| {
        let acted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            baton.start(index);
            body();
        }));
        if acted.is_err() {
            baton.fail("an actor has failed".to_owned());
        }
        baton.end();
    };
    // Relaxed: the thread that has the baton sees what all others did.
    let is_so = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            act(0, &|| {
                move_to_and_fro(&space);
                is_moved.store(true, Ordering::Relaxed);
            });
        });
        scope.spawn(|| {
            act(1, &|| {
                while !is_so(&is_moved) {
                    for page in PLACES.iter().flat_map(|&it| PageRange::new(it, PAGES).pages()) {
                        // Where nothing is mapped it is refused.
                        let _ = space.mmu().access(page, false);
                    }
                    baton.relax();
                }
                is_over.store(true, Ordering::Relaxed);
            });
        });
        scope.spawn(|| {
            act(2, &|| {
                let mut scratch = Scratch::new().unwrap();
                while !is_so(&is_over) {
                    match space.mmu().try_next_fault() {
                        Some((page, access)) => {
                            space.handle_fault(page, access, &mut scratch);
                        }
                        None => baton.relax(),
                    }
                }
            });
        });
    });
    assert_eq!(baton.failure(), None, "seed {seed}");
    space.check();
}

#[test]
fn pages_keep_their_bytes_where_others_touch_the_place_that_they_move_to() {
    (0..40).for_each(run);
}
