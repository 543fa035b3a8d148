//! What happened on the way of a fault, in a ring that another process may read.
//!
//! Owns a ring's protocol; what is traced is the fault's affair, and the supervisor and its tools read
//! it. No locks, and no thread waits.
//!
//! # Records
//!
//! A writer draws a position from `head`, and writes to the record `position % TRACES`, whose
//! sequence says what is there:
//!
//! | sequence | the record |
//! |---|---|
//! | 0 | was never written |
//! | 2p + 1 | is being written for position p |
//! | 2p + 2 | has the trace of position p |
//!
//! The sequence only ever grows. A writer takes the record by exchanging a sequence that is even,
//! and of an older position, for its own odd one. Where another writer is at the record (one of the two
//! was stopped while a thousand others traced) the trace is lost, so that no record is ever written
//! by two. A reader copies the record between two looks at the sequence, which must both say that the
//! record has the position that is asked for.
//!
//! A slot's next member goes on where the last member's positions ended: positions never come
//! again, so no reader takes a new record for an old one. `since` is the first position of the member
//! that has the slot now. A record that a killed writer left odd has a position below `since`, which
//! says that no writer is at it.

use core::sync::atomic::{AtomicU64, Ordering};

use super::AtomicWord;
use super::Event;
use crate::sys::probe::{Trace, Tracepoint};

/// Records of a ring.
pub const TRACES: usize = 1024;

impl Tracepoint {
    /// What it is counted as.
    pub const fn event(self) -> Event {
        match self {
            Tracepoint::SpfVmaChanged => Event::SpfVmaChanged,
            Tracepoint::SpfVmaNoanon => Event::SpfVmaNoanon,
            Tracepoint::SpfVmaNotsup => Event::SpfVmaNotsup,
            Tracepoint::SpfVmaAccess => Event::SpfVmaAccess,
            Tracepoint::SpfPmdChanged => Event::SpfPmdChanged,
        }
    }
}

/// Words of a record beside its sequence.
pub const WORDS: usize = 5;

/// A place for one trace, on a cache line of its own.
#[repr(C, align(64))]
pub struct TraceRecord<W = AtomicU64> {
    sequence: W,
    words: [W; WORDS],
}

/// The last [`TRACES`] traces of a member.
#[repr(C, align(64))]
pub struct TraceRing<W = AtomicU64, const LEN: usize = TRACES> {
    head: W,
    since: W,
    records: [TraceRecord<W>; LEN],
}

impl Trace {
    const fn to_words(self) -> [u64; WORDS] {
        let place = (self.tracepoint as u64) << 32 | self.thread as u64;
        [self.time_ns, place, self.address, self.vma_start, self.vma_end]
    }

    fn from_words([time_ns, place, address, vma_start, vma_end]: [u64; WORDS]) -> Option<Trace> {
        let tracepoint = *Tracepoint::ALL.get((place >> 32) as usize)?;
        Some(Trace { time_ns, tracepoint, thread: place as u32, address, vma_start, vma_end })
    }
}

impl<W: AtomicWord> TraceRecord<W> {
    /// Writes `words` for `position`, unless another writer is at the record, or was there for a
    /// later position. What is being written for a position below `since` never will be.
    fn write(&self, position: u64, since: u64, words: [u64; WORDS]) {
        let own = 2 * position + 1;
        // Relaxed: the exchange looks again.
        let seen = self.sequence.load(Ordering::Relaxed);
        let is_busy = !seen.is_multiple_of(2) && seen / 2 >= since;
        if is_busy || seen >= own {
            return;
        }
        // Acquire pairs with the release at the end of the last write here: ours comes after it.
        if self.sequence.compare_exchange(seen, own, Ordering::Acquire).is_err() {
            return;
        }
        // Pairs with the fence in `read`: a reader of one of our words sees the odd sequence.
        W::fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(words) {
            // Relaxed: the sequence says whether they belong together.
            word.store(value, Ordering::Relaxed);
        }
        // Release pairs with the acquire in `read`, and with that of the next writer.
        self.sequence.store(own + 1, Ordering::Release);
    }

    fn read(&self, position: u64) -> Option<[u64; WORDS]> {
        // Wrapping: a reader has its positions from a page that is another process's.
        let complete = position.wrapping_mul(2).wrapping_add(2);
        // Acquire pairs with the release of the writer that has finished.
        if self.sequence.load(Ordering::Acquire) != complete {
            return None;
        }
        let words = core::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
        // Pairs with the fence in `write`: a word of a later writer is followed by its sequence.
        W::fence(Ordering::Acquire);
        // Relaxed: the fence orders it behind the words.
        (self.sequence.load(Ordering::Relaxed) == complete).then_some(words)
    }
}

impl<W: AtomicWord, const LEN: usize> TraceRing<W, LEN> {
    /// An empty ring of these words, which are zero.
    pub fn of(word: impl Fn() -> W) -> TraceRing<W, LEN> {
        let record = |_| TraceRecord { sequence: word(), words: core::array::from_fn(|_| word()) };
        TraceRing { head: word(), since: word(), records: core::array::from_fn(record) }
    }

    /// Leaves a trace, over the oldest one.
    pub fn push(&self, trace: &Trace) {
        self.push_words(trace.to_words());
    }

    /// The same with what the words are known for elsewhere.
    pub(super) fn push_words(&self, words: [u64; WORDS]) {
        // Relaxed: positions need only be unique; the record's sequence orders the rest.
        let position = self.head.fetch_add(1, Ordering::Relaxed);
        let since = self.since.load(Ordering::Relaxed);
        self.records[position as usize % LEN].write(position, since, words);
    }

    /// The position that is drawn next: the last [`TRACES`] traces lie below. In a slot that other
    /// members had before, the first position is not 0.
    pub fn head(&self) -> u64 {
        // Relaxed: a hint of where to read; the record says what is there.
        self.head.load(Ordering::Relaxed)
    }

    /// The trace of a position; `None` where it was not written yet, is being written, was written
    /// over, or lost: a reader that has waited for it goes on to the next.
    pub fn read(&self, position: u64) -> Option<Trace> {
        self.read_words(position).and_then(Trace::from_words)
    }

    pub(super) fn read_words(&self, position: u64) -> Option<[u64; WORDS]> {
        // Relaxed: written while the slot had no member, before the one came that is read about.
        if position < self.since.load(Ordering::Relaxed) {
            return None;
        }
        self.records[position as usize % LEN].read(position)
    }

    /// Forgets all traces. No thread writes any more.
    pub fn clear(&self) {
        let head = self.head.load(Ordering::Relaxed);
        // A hole of the memfd that is only read stays as small as it can.
        if head != self.since.load(Ordering::Relaxed) {
            self.since.store(head, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(number: u64) -> Trace {
        let tracepoint = Tracepoint::SpfPmdChanged;
        Trace { time_ns: number, tracepoint, thread: 1, address: 2, vma_start: 3, vma_end: 4 }
    }

    #[test]
    fn a_record_that_a_killed_member_left_half_written_serves_the_next_one() {
        let ring: TraceRing<AtomicU64, 2> = TraceRing::of(|| AtomicU64::new(0));
        ring.push(&trace(1));
        // The second was being written when the member was killed.
        ring.head.store(2, Ordering::Relaxed);
        ring.records[1].sequence.store(3, Ordering::Relaxed);
        ring.push(&trace(3));
        ring.push(&trace(4));
        assert_eq!(ring.read(3), None, "a writer may be at the record still");
        ring.clear();
        ring.push(&trace(5));
        ring.push(&trace(6));
        assert_eq!([4, 5].map(|at| ring.read(at)), [5, 6].map(|number| Some(trace(number))));
    }

    #[test]
    fn a_writer_that_comes_late_does_not_write_over_a_later_trace() {
        let ring: TraceRing<AtomicU64, 1> = TraceRing::of(|| AtomicU64::new(0));
        ring.records[0].write(7, 0, trace(7).to_words());
        ring.records[0].write(3, 0, trace(3).to_words());
        assert_eq!(ring.read(7), Some(trace(7)));
        assert_eq!(ring.read(3), None);
    }

    #[test]
    fn a_record_has_a_cache_line_of_its_own() {
        assert_eq!(size_of::<TraceRecord>(), 64);
        assert_eq!(size_of::<TraceRing>(), 64 + TRACES * 64);
    }

    #[test]
    fn every_tracepoint_is_counted_by_the_name_it_is_traced_by() {
        for (at, tracepoint) in Tracepoint::ALL.into_iter().enumerate() {
            assert_eq!(tracepoint as usize, at);
            let name = tracepoint.name().strip_prefix("pagefault:");
            assert_eq!(name, Some(tracepoint.event().name()));
        }
    }
}
