//! Model checking: the word of a segment's place, with members and the supervisor at it, on loom's atomics.

mod loom_page;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use quire::control::AtomicWord;
use quire::control::place::{Place, PlaceWord};
use quire::page::word::Word as _;

use self::loom_page::{LoomWord, Unfenced, check, must_fail};

const HOLE: u64 = 0;
const DATA: u64 = 1;
const NEW: u64 = 2;
/// The chunk that all of this is about.
const CHUNK: u8 = 1;

/// A segment: its word, and what the file has of it.
struct Segment<W = LoomWord> {
    word: PlaceWord<W>,
    file: AtomicU64,
    /// Members that have data there.
    refs: AtomicU64,
}

impl<W: AtomicWord> Segment<W> {
    /// Written, copied, and in the file.
    fn copied(word: W) -> Segment<W> {
        let word = PlaceWord(word);
        word.take(word.load());
        word.note_written();
        word.note_copied(word.load());
        Segment { word, file: AtomicU64::new(DATA), refs: AtomicU64::new(1) }
    }

    /// Reads the chunk as a member does, if it is there.
    fn read(&self) -> Option<u64> {
        let seen = self.word.load();
        if seen.here() & CHUNK == 0 {
            return None;
        }
        let read = self.file.load(Relaxed);
        self.word.is_still(CHUNK, seen).then_some(read)
    }

    /// Lets go of what the file has, as the supervisor does.
    fn move_out(&self) -> bool {
        let seen = self.word.load();
        let is_live = self.refs.load(Acquire) != 0;
        let has_begun = (!is_live || seen.has(Place::FAR)) && self.word.begin_moving_out(seen);
        if has_begun {
            self.file.store(HOLE, Relaxed);
            self.word.end_moving_out(is_live, true);
        }
        has_begun
    }

    /// Takes a free segment, and writes it.
    fn take_and_write(&self) -> bool {
        self.refs.store(1, Release);
        let is_taken = self.word.take(self.word.load());
        if is_taken {
            self.file.store(NEW, Relaxed);
            self.word.note_written();
        } else {
            self.refs.store(0, Release);
        }
        is_taken
    }

    /// Brings the chunk back that the server has; `false` where that is over.
    fn move_in(&self, seen: Place) -> bool {
        let has_begun = self.word.begin_moving_in(seen).is_some();
        if has_begun {
            self.file.store(DATA, Relaxed);
            self.word.end_moving_in(CHUNK);
        }
        has_begun
    }
}

fn segment() -> Arc<Segment> {
    Arc::new(Segment::copied(LoomWord::new(0)))
}

#[test]
fn a_reader_never_has_a_hole_for_data() {
    check(2, || {
        let segment = segment();
        let other = Arc::clone(&segment);
        let mover = thread::spawn(move || {
            other.move_out();
            other.move_in(other.word.load());
        });
        for _ in 0..2 {
            assert!(segment.read().is_none_or(|read| read == DATA));
        }
        mover.join().unwrap();
        assert_eq!(segment.read(), Some(DATA));
    });
}

#[test]
fn without_the_fences_it_has() {
    must_fail("without_the_fences_it_has", "assertion failed", || {
        check(2, || {
            let segment = Arc::new(Segment::copied(Unfenced(LoomWord::new(0))));
            let other = Arc::clone(&segment);
            let mover = thread::spawn(move || other.move_out());
            assert!(segment.read().is_none_or(|read| read == DATA));
            mover.join().unwrap();
        });
    });
}

#[test]
fn what_comes_back_for_a_life_that_is_over_harms_no_new_data() {
    check(2, || {
        let segment = segment();
        segment.move_out();
        let wanted = segment.word.load();
        let other = Arc::clone(&segment);
        // Its last reader let go of it: the supervisor may have read what it wanted already.
        let mover = thread::spawn(move || other.move_in(wanted));
        let is_taken = segment.take_and_write();
        mover.join().unwrap();
        if is_taken {
            assert_eq!(segment.read(), Some(NEW));
        }
    });
}

#[test]
fn a_taker_and_the_supervisor_are_never_both_at_the_file() {
    check(2, || {
        let segment = segment();
        segment.refs.store(0, Release);
        let other = Arc::clone(&segment);
        let mover = thread::spawn(move || other.move_out());
        let is_taken = segment.take_and_write();
        let is_moved = mover.join().unwrap();
        let word = segment.word.load();
        assert!(is_taken || is_moved, "one of them was first");
        if is_taken {
            assert_eq!(segment.read(), Some(NEW));
            assert!(!word.has(Place::FAR), "the copy is of the life before");
        } else {
            assert!(!word.has(Place::LOCAL) && word.here() == 0);
        }
    });
}

#[test]
fn a_copy_counts_only_for_the_life_that_it_is_of() {
    check(2, || {
        let segment = Arc::new(Segment {
            word: PlaceWord(LoomWord::new(0)),
            file: AtomicU64::new(HOLE),
            refs: AtomicU64::new(1),
        });
        segment.word.take(segment.word.load());
        segment.word.note_written();
        let seen = segment.word.load();
        let other = Arc::clone(&segment);
        let copier = thread::spawn(move || other.word.note_copied(seen));
        assert!(
            std::iter::repeat_with(|| segment.word.take(segment.word.load()))
                .take(3)
                .any(|is_taken| is_taken)
        );
        copier.join().unwrap();
        assert!(!segment.word.load().has(Place::FAR));
    });
}
