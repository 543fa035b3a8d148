//! Strides: streams of faults that go by a constant distance, and what they will want next.
//!
//! Here they are recognised. Streams that touch page after page are [`crate::fault::order`]'s.
//!
//! # States
//!
//! The pages that faults had to read are remembered for a while. Four of them in one mapping, each
//! as far from the next, in either direction, are a stream: fewer come together by chance. From
//! then on its pages are read ahead, `window` of them ahead of its last fault.
//! A fault that finds what was read for it makes the window twice as large, as does one that came
//! before it; one that passes over what was read, or finds it gone again, halves it. Only faults
//! count: what is mapped along with another page says nothing. A stream without faults ends by
//! being overwritten.
//!
//! Nothing is mapped around the faults of such a stream, so that they say how much of it is used.
//!
//! Locks: one mutex, a leaf, only ever tried: a fault that finds it taken is not noted.

use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::ObjectPage;

/// Streams of an object at once.
const STREAMS: usize = 8;
/// Faults that are remembered: so that as many streams in turn are found as there is room for.
const HISTORY: usize = 4 * STREAMS;
/// Faults at equal distances that make a stream.
const FAULTS_MIN: i64 = 4;
/// Longest distance, in pages: 8 MiB.
const DISTANCE_MAX: u64 = 2048;
/// First window of a stream.
const WINDOW_MIN: u32 = 2;
/// Largest window: so many reads are sent for a stream at most.
pub(super) const WINDOW_MAX: u32 = 32;

/// A fault: the object's page, in which mapping.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Touch {
    pub page: ObjectPage,
    pub mapping: u32,
}

/// Whether a fault found its page in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lookup {
    Hit,
    Miss,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ahead {
    first: ObjectPage,
    distance: i64,
    count: u32,
}

impl Ahead {
    /// They, as far as there are numbers for them.
    pub fn pages(self) -> impl Iterator<Item = ObjectPage> {
        let at =
            move |index: u32| self.first.0.checked_add_signed(self.distance * i64::from(index));
        (0..self.count).map_while(at).map(ObjectPage)
    }
}

#[derive(Clone, Copy, Default)]
struct Stride {
    last: Touch,
    /// Pages from one fault to the next; 0: no stream.
    distance: i64,
    /// How many pages are to be read ahead.
    window: u32,
    /// How many are, beyond the last fault.
    ahead: u32,
}

impl Stride {
    /// How many distances behind the last fault a page lies, where the stream may be there by now.
    fn steps_to(&self, touch: Touch) -> Option<u32> {
        if self.distance == 0 || self.last.mapping != touch.mapping {
            return None;
        }
        let way = touch.page.0.wrapping_sub(self.last.page.0).cast_signed();
        let steps = way.checked_div(self.distance)?;
        let is_on_it = steps * self.distance == way && steps >= 1;
        u32::try_from(steps).ok().filter(|&steps| is_on_it && steps <= self.ahead + 1)
    }

    /// The stream goes on here; returns what is to be read now.
    fn go_on(
        &mut self,
        touch: Touch,
        steps: u32,
        lookup: Lookup,
        window_max: u32,
    ) -> Option<Ahead> {
        let was_read = steps <= self.ahead;
        let is_wasted = steps > 1 || (was_read && lookup == Lookup::Miss);
        self.window = if is_wasted { self.window / 2 } else { self.window * 2 };
        self.window = self.window.clamp(1, window_max.max(1));
        self.ahead = self.ahead.saturating_sub(steps);
        self.last = touch;
        self.fill()
    }

    fn fill(&mut self) -> Option<Ahead> {
        let count = self.window.saturating_sub(self.ahead);
        let way = self.distance * i64::from(self.ahead + 1);
        let first = self.last.page.0.checked_add_signed(way)?;
        self.ahead += count;
        (count > 0).then_some(Ahead { first: ObjectPage(first), distance: self.distance, count })
    }
}

#[derive(Default)]
struct StrideTable {
    /// The last faults that had to be read, oldest overwritten.
    history: [Option<Touch>; HISTORY],
    newest: usize,
    streams: [Stride; STREAMS],
    hand: usize,
}

#[derive(Default)]
pub(super) struct Strides(Mutex<rank::Strides, StrideTable>);

impl Strides {
    pub fn expects(&self, touch: Touch) -> bool {
        let table = self.0.try_lock();
        table.is_some_and(|table| table.streams.iter().any(|one| one.steps_to(touch).is_some()))
    }

    /// Notes a fault; returns what is to be read ahead for it, at most `window_max` pages.
    pub fn note(&self, touch: Touch, lookup: Lookup, window_max: u32) -> Option<Ahead> {
        let mut table = self.0.try_lock()?;
        for stream in &mut table.streams {
            if let Some(steps) = stream.steps_to(touch) {
                return stream.go_on(touch, steps, lookup, window_max);
            }
        }
        if lookup == Lookup::Hit {
            return None;
        }
        let distance = table.distance_to(touch);
        table.newest = (table.newest + 1) % HISTORY;
        let newest = table.newest;
        table.history[newest] = Some(touch);
        let mut stream = Stride {
            last: touch,
            distance: distance?,
            window: WINDOW_MIN.min(window_max.max(1)),
            ahead: 0,
        };
        let ahead = stream.fill();
        let hand = table.hand;
        table.streams[hand] = stream;
        table.hand = (hand + 1) % STREAMS;
        ahead
    }
}

impl StrideTable {
    /// The shortest distance at which enough faults lead here.
    fn distance_to(&self, touch: Touch) -> Option<i64> {
        let was_there = |distance: i64, steps: i64| {
            let page = touch.page.0.checked_add_signed(-distance * steps);
            let page = page.map(|page| Touch { page: ObjectPage(page), ..touch });
            page.is_some() && self.history.contains(&page)
        };
        let before = self.history.iter().flatten().filter(|other| other.mapping == touch.mapping);
        let distances = before.map(|other| touch.page.0.wrapping_sub(other.page.0).cast_signed());
        distances
            .filter(|&way| way != 0 && way.unsigned_abs() <= DISTANCE_MAX)
            .filter(|&way| (2..FAULTS_MIN).all(|steps| was_there(way, steps)))
            .min_by_key(|way| way.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const fn at(page: u64) -> Touch {
        Touch { page: ObjectPage(page), mapping: 7 }
    }

    fn pages(ahead: Option<Ahead>) -> Vec<u64> {
        ahead.map_or(Vec::new(), |ahead| ahead.pages().map(|page| page.0).collect())
    }

    #[test]
    fn four_faults_at_equal_distances_are_a_stream_in_either_direction() {
        for (first, distance) in [(0u64, 5i64), (1000, -16)] {
            let strides = Strides::default();
            let page = |step: i64| first.checked_add_signed(distance * step).unwrap();
            for step in 0..3 {
                assert_eq!(strides.note(at(page(step)), Lookup::Miss, 32), None);
            }
            let ahead = strides.note(at(page(3)), Lookup::Miss, 32);
            assert_eq!(pages(ahead), [page(4), page(5)]);
            // What was read is found: the window grows, and only what is missing is read.
            assert!(strides.expects(at(page(4))) && !strides.expects(at(page(4) + 1)));
            let ahead = strides.note(at(page(4)), Lookup::Hit, 32);
            assert_eq!(pages(ahead), [page(6), page(7), page(8)]);
        }
    }

    #[test]
    fn the_window_shrinks_where_what_was_read_is_passed_over_or_gone() {
        let strides = Strides::default();
        for step in 0..4 {
            strides.note(at(step * 9), Lookup::Miss, 32);
        }
        for step in 4..8 {
            strides.note(at(step * 9), Lookup::Hit, 32);
        }
        let window = || strides.0.lock().streams[0].window;
        assert_eq!(window(), 32);
        strides.note(at(10 * 9), Lookup::Hit, 32);
        assert_eq!(window(), 16);
        strides.note(at(11 * 9), Lookup::Miss, 32);
        assert_eq!(window(), 8);
    }

    #[test]
    fn streams_in_turn_are_found_each_by_itself() {
        let strides = Strides::default();
        let mut found = 0;
        for step in 0..5 {
            for stream in 0..STREAMS as u64 {
                let page = stream * 100_000 + step * (3 + stream);
                let there = if step < 4 { Lookup::Miss } else { Lookup::Hit };
                found += usize::from(strides.note(at(page), there, 32).is_some());
            }
        }
        assert_eq!(found, 2 * STREAMS);
    }

    #[test]
    fn a_stream_at_the_first_page_reads_nothing_before_it() {
        let strides = Strides::default();
        let mut last = Vec::new();
        for page in [15, 10, 5, 0] {
            last = pages(strides.note(at(page), Lookup::Miss, 32));
        }
        assert!(last.is_empty());
    }
}
