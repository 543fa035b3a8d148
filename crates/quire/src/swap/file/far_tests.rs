//! The same small engine with a server behind its file: a thread plays the supervisor, and moves whatever it can. That a
//! read which meets a move is done again is too rare here to be relied on: `tests/place_loom.rs` has that.

use core::sync::atomic::AtomicBool;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::vec::Vec;

use rustix::fd::BorrowedFd;

use super::tests::{Aligned, Dice, Engine, Page, Word, control, is_idle, scratch_file};
use super::*;
use crate::control::place::{CHUNK_BYTES, CHUNKS, Place};
use crate::control::{Far, SEGMENT_BYTES};
use crate::sys::futex::{self, Reach};

const SEGMENTS: u32 = 40;
/// What is left in the file of a segment that went.
const JUNK: u8 = 0xEE;

struct Supervisor {
    control: &'static Control,
    file: BorrowedFd<'static>,
    /// What the server has, by segment.
    copies: HashMap<u32, Vec<u8>>,
    buffer: Aligned,
    dice: Dice,
    moves: [usize; 2],
}

impl Supervisor {
    fn far(&self) -> &'static Far {
        &self.control.far
    }

    fn run(mut self, is_ending: &AtomicBool) -> [usize; 2] {
        while !is_ending.load(Relaxed) {
            self.far().beat();
            let mut posted = Vec::new();
            self.far().take_posted(|segment| posted.push(segment));
            for segment in posted {
                self.bring(segment);
                self.copy(segment);
            }
            let segment = self.dice.roll(SEGMENTS as usize) as u32;
            self.copy(segment);
            self.let_go(segment);
            thread::yield_now();
        }
        self.moves
    }

    /// Copies what is written and has no copy.
    fn copy(&mut self, segment: u32) {
        let place = self.far().place(segment).load();
        if !place.has(Place::LOCAL | Place::WRITTEN) || place.has(Place::FAR) {
            return;
        }
        let whole = &mut self.buffer.bytes()[..SEGMENT_BYTES];
        let offset = u64::from(segment) * SEGMENT_BYTES as u64;
        assert_eq!(rustix::io::pread(self.file, &mut *whole, offset), Ok(SEGMENT_BYTES));
        let copy = whole.to_vec();
        if self.far().place(segment).note_copied(place) {
            self.copies.insert(segment, copy);
        }
    }

    fn let_go(&mut self, segment: u32) {
        let word = self.far().place(segment);
        let place = word.load();
        let is_live = self.control.segment_refs[segment as usize].load(Acquire) != 0;
        if !place.has(Place::LOCAL)
            || place.has(Place::USED)
            || is_live && !place.has(Place::FAR | Place::WRITTEN)
        {
            word.change(place, place.without(Place::USED));
            return;
        }
        if !word.begin_moving_out(place) {
            return;
        }
        self.write(segment, 0, &[JUNK; SEGMENT_BYTES]);
        word.end_moving_out(is_live, true);
        self.moves[0] += 1;
        self.far().local.fetch_sub(1, Relaxed);
        self.far().room.fetch_add(1, Relaxed);
        futex::wake(&self.far().room, u32::MAX, Reach::Tree);
    }

    /// Brings the chunks that are wanted, each by itself.
    fn bring(&mut self, segment: u32) {
        let word = self.far().place(segment);
        for chunk in 0..CHUNKS {
            let place = word.load();
            if place.wanted() & !place.here() & 1 << chunk == 0 {
                continue;
            }
            let Some(copy) = self.copies.get(&segment).filter(|_| place.has(Place::FAR)) else {
                word.update(|place| Some(place.failed(1 << chunk)));
                break;
            };
            let bytes = copy[chunk * CHUNK_BYTES..][..CHUNK_BYTES].to_vec();
            let Some(before) = word.begin_moving_in(place) else { continue };
            if !before.has(Place::LOCAL) {
                self.far().local.fetch_add(1, Relaxed);
            }
            self.write(segment, chunk, &bytes);
            word.end_moving_in(1 << chunk);
            self.moves[1] += 1;
        }
        self.far().wake_readers();
    }

    fn write(&mut self, segment: u32, chunk: usize, bytes: &[u8]) {
        let buffer = &mut self.buffer.bytes()[..bytes.len()];
        buffer.copy_from_slice(bytes);
        let offset = u64::from(segment) * SEGMENT_BYTES as u64 + (chunk * CHUNK_BYTES) as u64;
        assert_eq!(rustix::io::pwrite(self.file, buffer, offset), Ok(bytes.len()));
    }
}

#[test]
fn pages_survive_a_server_that_takes_segments_and_gives_them_back() {
    for seed in [3, 9] {
        let control = control(SEGMENTS);
        control.far.local_max.store(10, Relaxed);
        control.far.local_kept.store(2, Relaxed);
        control.far.is_on.store(1, Relaxed);
        let file = scratch_file();
        let supervisor = Supervisor {
            control,
            file,
            copies: HashMap::new(),
            buffer: Aligned::new(SEGMENT_BYTES),
            dice: Dice(seed + 1),
            moves: [0; 2],
        };
        let is_ending = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_ending);
        let thread = thread::spawn(move || supervisor.run(&ends));
        // Who reads ahead of what it saw some time ago: any segment, whatever has become of it.
        let ends = Arc::clone(&is_ending);
        let ahead = thread::spawn(move || {
            let (far, mut dice) = (FarTier::of(control).unwrap(), Dice(seed + 2));
            while !ends.load(Relaxed) {
                let offset = (dice.roll(SEGMENTS as usize * CHUNKS) * CHUNK_BYTES) as u64;
                far.bring_ahead(core::iter::once(ReadPlan { offset, length: CHUNK_BYTES }));
                thread::sleep(core::time::Duration::from_micros(200));
            }
        });
        let mut engine = Engine::with_file(control, seed, file);
        for step in 0..6000 {
            match engine.dice.roll(10) {
                0..=4 if engine.pages.len() < 1500 => engine.create(),
                5..=7 => engine.any().into_iter().for_each(|owner| engine.check(owner)),
                8 if step % 50 == 0 => engine.clean(),
                _ => {
                    if let Some(owner) = engine.any().filter(|_| engine.pages.len() > 1000) {
                        engine.remove(owner);
                    }
                }
            }
        }
        assert_eq!(engine.failures, 0);
        let in_file = |page: &&Page| matches!(page.word, Word::File(_));
        assert!(engine.pages.values().filter(in_file).count() > 500);
        engine.writer.cancel(&engine.file);
        for owner in engine.pages.keys().copied().collect::<Vec<_>>() {
            engine.check(owner);
            engine.remove(owner);
        }
        assert_eq!(engine.failures, 0);
        is_ending.store(true, Relaxed);
        ahead.join().unwrap();
        let [out, back] = thread.join().unwrap();
        assert!(out > 100 && back > 100, "{out} went and {back} chunks came back");
        assert!(is_idle(control, 1));
    }
}

#[test]
fn what_lies_ahead_of_a_stream_is_wanted_as_far_as_a_quarter_of_the_file() {
    let control = control(SEGMENTS);
    control.far.local_max.store(16, Relaxed);
    control.far.is_on.store(1, Relaxed);
    // The server has all of them but one.
    for segment in [0, 1, 3, 4, 5] {
        let place = control.far.place(segment);
        assert!(place.note_copied(place.load()));
    }
    let chunk = |at: u64| ReadPlan { offset: at * CHUNK_BYTES as u64, length: CHUNK_BYTES };
    let per_segment = CHUNKS as u64;
    // All of one segment, one chunk of the next, two that do not lie side by side, and so on.
    let ahead = (0..per_segment).chain([per_segment, 2 * per_segment, 2 * per_segment + 3]);
    let ahead = ahead.chain((3..20).map(|segment| segment * per_segment));
    FarTier::of(control).unwrap().bring_ahead(ahead.map(chunk));
    let wanted = |segment| control.far.place(segment).load().wanted();
    assert_eq!([0, 1, 2, 3, 4, 5].map(wanted), [0xff, 0x01, 0, 0x01, 0, 0]);
    let mut posted = Vec::new();
    control.far.take_posted(|segment| posted.push(segment));
    assert_eq!(posted, [0, 1, 3]);
}
