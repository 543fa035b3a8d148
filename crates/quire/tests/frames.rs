//! The frame pool against a plain list of its places.

use proptest::prelude::*;
use quire::frames::{FramePool, QueueEnd};
use quire::mmu::{FrameId, FrameRun};
use quire::units::{BLOCK_PAGES, PageNum};

const WINDOWS: usize = 3;

/// What a place is, in the oracle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Hole,
    Free,
    Limbo,
    Taken,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    /// Evict so many pages; every n-th is refused.
    Evict(usize, usize),
    /// A fault takes a page of limbo back: the n-th.
    Refault(usize),
    /// Store up to so many pages of the oldest window.
    Drain(usize, bool),
    /// Faults use up to so many free frames.
    Use(usize),
    /// Takes frames and gives them back unused.
    Return(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (1..=BLOCK_PAGES, 2..40usize).prop_map(|(len, nth)| Operation::Evict(len, nth)),
        3 => any::<prop::sample::Index>().prop_map(|at| Operation::Refault(at.index(10_000))),
        3 => (0..600usize, any::<bool>()).prop_map(|(pages, old)| Operation::Drain(pages, old)),
        2 => (1..600usize).prop_map(Operation::Use),
        1 => (1..600usize).prop_map(Operation::Return),
    ]
}

struct Books {
    pool: FramePool,
    places: Vec<Place>,
}

impl Books {
    fn change(&mut self, run: FrameRun, from: Place, to: Place) {
        for at in 0..run.len {
            let place = &mut self.places[run.start.add(at).0 as usize];
            assert_eq!(*place, from, "{:?}", run.start.add(at));
            *place = to;
        }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Evict(len, nth) => {
                let Some(start) = self.pool.take_holes(len) else {
                    let windows = self.places.chunks(BLOCK_PAGES);
                    let runs = windows.flat_map(|w| w.split(|place| *place != Place::Hole));
                    assert!(runs.map(<[Place]>::len).max() < Some(len), "there was room");
                    return;
                };
                let run = FrameRun { start, len };
                self.change(run, Place::Hole, Place::Taken);
                for at in 0..len {
                    let one = FrameRun { start: start.add(at), len: 1 };
                    let stays = at % nth == 1;
                    self.change(one, Place::Taken, if stays { Place::Hole } else { Place::Limbo });
                    self.pool.set_owner(one.start, PageNum(at as u64));
                }
                self.pool.enter_limbo(run, |at| at % nth != 1);
            }
            Operation::Refault(nth) => {
                let limbo: Vec<_> =
                    (0..self.places.len()).filter(|&at| self.places[at] == Place::Limbo).collect();
                if limbo.is_empty() {
                    return;
                }
                let start = FrameId(limbo[nth % limbo.len()] as u32);
                let run = FrameRun { start, len: 1 };
                self.pool.leave_limbo(run);
                self.pool.consume(run);
                self.change(run, Place::Limbo, Place::Hole);
            }
            Operation::Drain(pages, is_old) => self.drain(pages, is_old),
            Operation::Use(pages) => {
                while let Some(run) = self.pool.take(pages) {
                    assert!(run.len <= pages);
                    self.change(run, Place::Free, Place::Taken);
                    self.pool.consume(run);
                    self.change(run, Place::Taken, Place::Hole);
                    if run.len == pages {
                        break;
                    }
                }
            }
            Operation::Return(pages) => {
                if let Some(run) = self.pool.take(pages) {
                    self.change(run, Place::Free, Place::Taken);
                    self.pool.put(run);
                    self.change(run, Place::Taken, Place::Free);
                }
            }
        }
    }

    fn drain(&mut self, pages: usize, is_old: bool) {
        let Some(window) = self.pool.oldest_window() else {
            assert!(self.places.iter().all(|place| *place != Place::Limbo), "limbo is hidden");
            return;
        };
        let in_limbo: Vec<FrameId> = self.pool.limbo_frames(window).collect();
        let first = window as usize * BLOCK_PAGES;
        let mut left = pages;
        for at in 0..BLOCK_PAGES {
            let is_limbo = in_limbo.contains(&FrameId((first + at) as u32));
            assert_eq!(is_limbo, self.places[first + at] == Place::Limbo);
            if is_limbo && left > 0 {
                left -= 1;
                let run = FrameRun { start: FrameId((first + at) as u32), len: 1 };
                self.pool.leave_limbo(run);
                self.change(run, Place::Limbo, Place::Taken);
                self.pool.put(run);
                self.change(run, Place::Taken, Place::Free);
            }
        }
        self.pool.return_window(window, if is_old { QueueEnd::Oldest } else { QueueEnd::Youngest });
    }

    fn check(&self) {
        self.pool.check();
        let count = |kind| self.places.iter().filter(|place| **place == kind).count();
        assert_eq!(self.pool.free(), count(Place::Free));
        assert_eq!(self.pool.limbo(), count(Place::Limbo));
        assert_eq!(count(Place::Taken), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_books_agree_with_a_list_of_places(
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let frames = WINDOWS * BLOCK_PAGES;
        let mut books =
            Books { pool: FramePool::new(frames).unwrap(), places: vec![Place::Hole; frames] };
        for operation in operations {
            books.apply(operation);
            books.check();
        }
        // All that is in limbo can be had again, and all free frames be used. Windows that faults
        // have emptied leave the queue when their turn comes.
        for _ in 0..2 * WINDOWS {
            books.apply(Operation::Drain(BLOCK_PAGES, false));
        }
        books.apply(Operation::Use(frames));
        books.check();
        prop_assert_eq!(books.pool.free(), 0);
        for _ in 0..WINDOWS {
            prop_assert!(books.pool.take_holes(BLOCK_PAGES).is_some(), "a window is lost");
        }
    }
}
