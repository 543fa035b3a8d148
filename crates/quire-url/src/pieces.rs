//! The pieces of an object that are in memory, or on their way.
//!
//! A piece is a run of blocks that one request brings. A read that continues a stream has the next
//! pieces asked for beforehand, each twice as large as the last up to a limit and several at a time,
//! so that the way to the server and back is hidden; a read at random asks for one block. Pieces
//! never overlap. What was read to its end goes first, for the page cache has it then.
//!
//! One lock, a leaf: it is not held while a piece is waited for or asked for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;

use quire::store::Cause;

use crate::lock;

/// The unit of all requests, and of the cache on disk.
pub(crate) const BLOCK_BYTES: u64 = 256 << 10;
/// Of the largest pieces, how many there is room for: one that is read, and those ahead of it.
const PIECES: u64 = 8;
/// What so many other reads did not want was asked for in vain, and a stream that read nothing meanwhile is at its end.
const ABANDONED: u64 = 1024;
/// Streams that are told apart.
const STREAMS: usize = 8;

/// What a piece came to, once it did.
type Slot = Arc<OnceLock<Result<Bytes, Cause>>>;

/// Fills a piece: also where the one that has it goes without a word.
pub(crate) struct Filler(Slot);

impl Filler {
    pub fn fill(self, result: Result<Bytes, Cause>) {
        let _ = self.0.set(result);
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = self.0.set(Err(Cause::Unanswered));
    }
}

/// Begins a request of blocks, which fills the piece from another thread.
pub(crate) type Ask = dyn Fn(Range<u64>, Filler) + Send + Sync;

pub(crate) struct Pieces {
    /// Of the object.
    bytes: u64,
    state: Mutex<State>,
    ask: Box<Ask>,
}

struct Piece {
    blocks: u64,
    slot: Slot,
    /// When it was read last; 0 once it was read to its end.
    used: u64,
}

/// A reader that goes forward.
#[derive(Clone, Copy, Default)]
struct Stream {
    /// The block that it reads next.
    next: u64,
    /// Up to which it was asked for.
    asked: u64,
    /// Blocks a request; 0 where nothing was read yet.
    run: u64,
    used: u64,
}

#[derive(Default)]
struct State {
    /// By their first blocks.
    pieces: BTreeMap<u64, Piece>,
    blocks: u64,
    /// As many as there may be, as far as none is waited for.
    kept_blocks: u64,
    clock: u64,
    streams: [Stream; STREAMS],
}

impl Pieces {
    pub fn new(bytes: u64, kept_bytes: u64, ask: Box<Ask>) -> Pieces {
        let kept_blocks = (kept_bytes / BLOCK_BYTES).max(PIECES);
        Pieces { bytes, state: Mutex::new(State { kept_blocks, ..State::default() }), ask }
    }

    /// Fills `into` from `offset` on; all of it lies in the object.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Cause> {
        let end = offset + into.len() as u64;
        let wanted = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let total = self.bytes.div_ceil(BLOCK_BYTES);
        let mut asked = Vec::new();
        let found = lock(&self.state).plan(wanted, total, &mut asked);
        for (blocks, filler) in asked {
            (self.ask)(blocks, filler);
        }
        for (first, blocks, slot) in found {
            let content = slot.wait().as_ref().map_err(Cause::clone)?;
            let piece_at = first * BLOCK_BYTES;
            let piece_end = ((first + blocks) * BLOCK_BYTES).min(self.bytes);
            let (from, to) = (offset.max(piece_at), end.min(piece_end));
            let part = &content[(from - piece_at) as usize..(to - piece_at) as usize];
            into[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            if to == piece_end
                && let Some(piece) = lock(&self.state).pieces.get_mut(&first)
            {
                piece.used = 0;
            }
        }
        Ok(())
    }
}

impl State {
    /// Finds the pieces of the blocks that are wanted, and notes in `asked` those that are to be asked
    /// for, with what will be read next.
    fn plan(
        &mut self,
        wanted: Range<u64>,
        total: u64,
        asked: &mut Vec<(Range<u64>, Filler)>,
    ) -> Vec<(u64, u64, Slot)> {
        self.clock += 1;
        let stream = self.stream_of(&wanted);
        let run = self.streams[stream].run;
        let mut found = Vec::new();
        let mut at = wanted.start;
        while at < wanted.end {
            let first = match self.piece_at(at) {
                Some(first) => first,
                None => {
                    let blocks = run.max((wanted.end - at).min(self.kept_blocks / PIECES));
                    self.make_room(blocks, false);
                    self.add(at..(at + blocks).min(total), asked);
                    at
                }
            };
            let piece = self.pieces.get_mut(&first).expect("it was found or added");
            piece.used = self.clock;
            found.push((first, piece.blocks, Arc::clone(&piece.slot)));
            at = first + piece.blocks;
        }
        // One block read after another may be chance; from the second on it is a stream.
        if run > 1 {
            let Stream { next, asked: asked_to, .. } = self.streams[stream];
            let (mut from, to) = (asked_to.max(at), total.min(next + run * self.pieces_ahead()));
            while from < to {
                if let Some(first) = self.piece_at(from) {
                    from = first + self.pieces[&first].blocks;
                    continue;
                }
                let blocks = run.min(total - from);
                if !self.make_room(blocks, true) {
                    break;
                }
                from += self.add(from..from + blocks, asked);
            }
            self.streams[stream].asked = from;
        }
        found
    }

    /// How far each stream is ahead of its reader, so that there is room for all.
    fn pieces_ahead(&self) -> u64 {
        let is_read = |stream: &&Stream| stream.run > 1 && stream.used + ABANDONED > self.clock;
        let streams = self.streams.iter().filter(is_read).count() as u64;
        (PIECES / streams.max(1) - 1).max(1)
    }

    /// The stream that reads these blocks, which has moved on then; a new one where none does.
    fn stream_of(&mut self, wanted: &Range<u64>) -> usize {
        // Several threads read for one, and need not do so in order.
        let is_near =
            |stream: &Stream| stream.run > 0 && wanted.start.abs_diff(stream.next) <= stream.run;
        let found = self.streams.iter().position(is_near).unwrap_or_else(|| {
            let oldest = (0..STREAMS).min_by_key(|&at| self.streams[at].used).unwrap_or(0);
            let (next, asked) = (wanted.end, wanted.end);
            self.streams[oldest] = Stream { next, asked, run: 1, used: 0 };
            oldest
        });
        let stream = &mut self.streams[found];
        stream.used = self.clock;
        if wanted.end > stream.next {
            stream.next = wanted.end;
            stream.run = (stream.run * 2).min(self.kept_blocks / PIECES);
        }
        found
    }

    /// The first block of the piece that has a block; one that failed is forgotten.
    fn piece_at(&mut self, block: u64) -> Option<u64> {
        let (&first, piece) = self.pieces.range(..=block).next_back()?;
        if block >= first + piece.blocks {
            return None;
        }
        if matches!(piece.slot.get(), Some(Err(_))) {
            self.remove(first);
            return None;
        }
        Some(first)
    }

    /// Adds a piece as far as the next one; returns its length.
    fn add(&mut self, blocks: Range<u64>, asked: &mut Vec<(Range<u64>, Filler)>) -> u64 {
        let end = self.pieces.range(blocks.start..).next().map_or(blocks.end, |(&next, _)| next);
        let blocks = blocks.start..blocks.end.min(end);
        let (count, slot) = (blocks.end - blocks.start, Slot::default());
        let piece = Piece { blocks: count, slot: Arc::clone(&slot), used: self.clock };
        self.pieces.insert(blocks.start, piece);
        self.blocks += count;
        asked.push((blocks, Filler(slot)));
        count
    }

    /// Forgets pieces that have come, the oldest first, until there is room; says whether there is.
    /// For what is only expected to be read, none goes that was not read to its end.
    fn make_room(&mut self, blocks: u64, only_spent: bool) -> bool {
        while self.blocks + blocks > self.kept_blocks {
            let has_come = self.pieces.iter().filter(|(_, piece)| {
                let is_spent = piece.used == 0 || piece.used + ABANDONED < self.clock;
                piece.slot.get().is_some() && (is_spent || !only_spent)
            });
            let Some((&first, _)) = has_come.min_by_key(|(_, piece)| piece.used) else {
                return false;
            };
            self.remove(first);
        }
        true
    }

    fn remove(&mut self, first: u64) {
        if let Some(piece) = self.pieces.remove(&first) {
            self.blocks -= piece.blocks;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    const BYTES: u64 = 300 * BLOCK_BYTES + 77;
    const KEPT_BYTES: u64 = 16 << 20;

    fn content(range: Range<u64>) -> Bytes {
        (range.start * BLOCK_BYTES..BYTES.min(range.end * BLOCK_BYTES))
            .map(|at| (at % 251) as u8)
            .collect::<Vec<u8>>()
            .into()
    }

    /// Pieces that come at once, and the requests for them.
    fn pieces() -> (Pieces, Arc<Mutex<Vec<Range<u64>>>>) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&requests);
        let ask = move |blocks: Range<u64>, filler: Filler| {
            lock(&noted).push(blocks.clone());
            filler.fill(Ok(content(blocks)));
        };
        (Pieces::new(BYTES, KEPT_BYTES, Box::new(ask)), requests)
    }

    fn read(pieces: &Pieces, at: u64, bytes: usize) {
        let mut into = vec![0; bytes];
        pieces.read(at, &mut into).unwrap();
        for (byte, at) in into.iter().zip(at..) {
            assert_eq!(*byte, (at % 251) as u8, "at {at}");
        }
    }

    #[test]
    fn a_stream_has_each_block_asked_for_once_and_ever_more_at_a_time() {
        let (pieces, requests) = pieces();
        let step = 100_000;
        for at in (0..BYTES).step_by(step) {
            read(&pieces, at, step.min((BYTES - at) as usize));
            assert!(lock(&pieces.state).blocks * BLOCK_BYTES <= KEPT_BYTES);
        }
        let mut requests = core::mem::take(&mut *lock(&requests));
        requests.sort_by_key(|blocks| blocks.start);
        let mut next = 0;
        for blocks in &requests {
            assert_eq!(blocks.start, next);
            next = blocks.end;
        }
        assert_eq!(next, 301);
        assert!(requests.len() < 50, "{requests:?}");
    }

    #[test]
    fn streams_beside_each_other_have_no_block_asked_for_in_vain() {
        let (pieces, requests) = pieces();
        let (step, middle) = (BLOCK_BYTES / 2, 150 * BLOCK_BYTES);
        for at in (0..middle + step).step_by(step as usize) {
            if at < middle {
                read(&pieces, at, step as usize);
            }
            if middle + at < BYTES {
                read(&pieces, middle + at, step.min(BYTES - middle - at) as usize);
            }
        }
        // The first one is ahead, at its end, by what the second one has read.
        let requests = lock(&requests);
        let blocks: u64 = requests.iter().map(|blocks| blocks.end - blocks.start).sum();
        assert!((301..=301 + 32).contains(&blocks), "{blocks} blocks");
        assert!(requests.len() < 60, "{requests:?}");
    }

    #[test]
    fn what_is_read_at_random_is_asked_for_by_the_block() {
        let (pieces, requests) = pieces();
        for number in 0..200u64 {
            read(&pieces, number * 7919 % 290 * BLOCK_BYTES + 5, 4096);
            assert!(lock(&pieces.state).blocks * BLOCK_BYTES <= KEPT_BYTES);
        }
        let requests = lock(&requests);
        let blocks: u64 = requests.iter().map(|blocks| blocks.end - blocks.start).sum();
        assert!(blocks <= 220, "{blocks} blocks for 200 reads");
    }

    #[test]
    fn a_read_over_several_pieces_is_whole() {
        let (pieces, _) = pieces();
        read(&pieces, 3 * BLOCK_BYTES + 9, 4096);
        read(&pieces, 5 * BLOCK_BYTES + 9, 4096);
        read(&pieces, 2 * BLOCK_BYTES - 3, 5 << 20);
        read(&pieces, BYTES - 10, 10);
    }

    #[test]
    fn what_failed_is_asked_for_again() {
        let (sender, fillers) = channel();
        let pieces = Pieces::new(
            BYTES,
            KEPT_BYTES,
            Box::new(move |blocks, filler| sender.send((blocks, filler)).unwrap()),
        );
        let read_once = |answer: &dyn Fn(Range<u64>, Filler)| {
            thread::scope(|scope| {
                let reader = scope.spawn(|| pieces.read(10 * BLOCK_BYTES, &mut [0; 100]));
                let (blocks, filler) = fillers.recv().unwrap();
                answer(blocks, filler);
                reader.join().unwrap()
            })
        };
        let fails = |_, filler: Filler| filler.fill(Err(Cause::ReadOnly));
        assert_eq!(read_once(&fails), Err(Cause::ReadOnly));
        // One that is dropped without a word is an error, not a wait for ever.
        assert_eq!(read_once(&|_, filler| drop(filler)), Err(Cause::Unanswered));
        assert_eq!(read_once(&|blocks, filler| filler.fill(Ok(content(blocks)))), Ok(()));
        read(&pieces, 10 * BLOCK_BYTES, 100);
    }
}
