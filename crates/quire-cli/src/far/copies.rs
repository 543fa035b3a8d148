//! What the server has of the run.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;
use quire::control::place::Place;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::mover::{Inner, RETRY_AFTER_MAX};
use super::server::LEASE;

/// How often copies are looked for that nobody needs any more.
const STALE_EVERY: Duration = Duration::from_secs(1);

/// Copies by their numbers. No number is used twice, and a copy is what its key names: a request that takes effect
/// late, after its answer was given up, says nothing about another copy.
#[derive(Default)]
pub(super) struct Copies {
    of_segments: BTreeMap<u32, u64>,
    segments: BTreeMap<u64, u32>,
    /// Those that nobody needs, and that the server may have.
    stale: BTreeSet<u64>,
    last: u64,
}

impl Copies {
    /// A copy of a segment begins: its number. The server may have it from now on.
    pub(super) fn begin(&mut self, segment: u32) -> u64 {
        self.drop_of(segment);
        self.last += 1;
        self.of_segments.insert(segment, self.last);
        self.segments.insert(self.last, segment);
        self.last
    }

    pub(super) fn of(&self, segment: u32) -> Option<u64> {
        self.of_segments.get(&segment).copied()
    }

    /// The segment that was copied next after this one: it left memory next, too.
    pub(super) fn next_after(&self, segment: u32) -> Option<u32> {
        let copy = self.of(segment)?;
        self.segments.range(copy + 1..).next().map(|(_, &segment)| segment)
    }

    /// Nobody needs what the server has of a segment.
    pub(super) fn drop_of(&mut self, segment: u32) {
        if let Some(copy) = self.of_segments.remove(&segment) {
            self.segments.remove(&copy);
            self.stale.insert(copy);
        }
    }

    /// All that the server has, or may have, lie from the first of these to before the second.
    fn bounds(&self) -> (u64, u64) {
        let lowest = [self.segments.keys().next(), self.stale.first()].into_iter().flatten().min();
        (lowest.copied().unwrap_or(self.last + 1), self.last + 1)
    }

    fn all(&self) -> Vec<u64> {
        self.segments.keys().chain(&self.stale).copied().collect()
    }
}

/// When what is done now and then is due.
#[derive(Default)]
pub(super) struct Housekeeping {
    renewed: Option<Instant>,
    looked: Option<Instant>,
    is_removing: bool,
    /// Copies are below this, as the server was told.
    end_known: u64,
}

fn is_due(last: &mut Option<Instant>, every: Duration) -> bool {
    let now = Instant::now();
    let is_due = last.is_none_or(|last| now - last >= every);
    if is_due {
        *last = Some(now);
    }
    is_due
}

impl Inner {
    /// Has the server forget what nobody needs, and keep the rest.
    pub(super) fn keep_house(self: &Rc<Inner>) {
        if is_due(&mut self.state.borrow_mut().house.looked, STALE_EVERY) {
            self.note_dead();
            self.note_stale();
            self.remove_stale();
        }
        self.renew_if_due();
    }

    /// Looks for what the file has of segments that nobody has data in, as a member leaves that is killed.
    fn note_dead(&self) {
        let is_dead = |&segment: &u32| {
            self.far().place(segment).load().has(Place::LOCAL) && !self.is_live(segment)
        };
        let dead = (0..self.far().end.load(Relaxed)).filter(is_dead);
        let idle = &mut self.state.borrow_mut().idle;
        dead.for_each(|segment| idle.push_back(segment));
    }

    /// Looks for copies of segments that nobody has data in.
    fn note_stale(&self) {
        let mut state = self.state.borrow_mut();
        let segments = state.copies.of_segments.keys().copied();
        let segments: Vec<u32> = segments.filter(|segment| !state.busy.contains(segment)).collect();
        for segment in segments {
            if !self.is_live(segment) {
                // A taker that comes first clears the mark itself.
                let word = self.far().place(segment);
                let place = word.load();
                word.change(place, place.without(Place::FAR));
            }
            if !self.far().place(segment).load().has(Place::FAR) {
                state.copies.drop_of(segment);
            }
        }
        self.note_segments(&state.copies);
    }

    pub(super) fn note_segments(&self, copies: &Copies) {
        let segments = copies.of_segments.len() as u32;
        self.far().segments.store(segments, Relaxed);
        self.far().segments_max.fetch_max(segments, Relaxed);
    }

    /// Whether any member has data there.
    pub(super) fn is_live(&self, segment: u32) -> bool {
        self.control().segment_refs[segment as usize].load(Acquire) != 0
    }

    fn remove_stale(self: &Rc<Inner>) {
        let mut state = self.state.borrow_mut();
        let stale = state.copies.stale.clone();
        if state.house.is_removing || stale.is_empty() {
            return;
        }
        state.house.is_removing = true;
        let inner = Rc::clone(self);
        spawn_local(async move {
            let removed = inner.server.remove(&stale.iter().copied().collect::<Vec<_>>()).await;
            let mut state = inner.state.borrow_mut();
            state.house.is_removing = false;
            // What could not be removed is tried again, and goes by itself at last.
            if removed.is_ok() {
                state.copies.stale.retain(|copy| !stale.contains(copy));
            }
        });
    }

    /// Tells the server that the run lives, and which copies are to be kept.
    fn renew_if_due(self: &Rc<Inner>) {
        let mut state = self.state.borrow_mut();
        let (low, end) = state.copies.bounds();
        if !is_due(&mut state.house.renewed, LEASE / 4) && end <= state.house.end_known {
            return;
        }
        // Not with each copy anew.
        let end = end.next_power_of_two().max(256);
        state.house.end_known = end;
        let copies: Vec<u64> = state.copies.segments.keys().copied().collect();
        let inner = Rc::clone(self);
        spawn_local(async move {
            inner.server.look_for_replicas().await;
            let renewed = inner.server.renew(low, end).await;
            let kept = inner.server.keep(&copies).await;
            if renewed.is_err() || kept.is_err() {
                sleep(RETRY_AFTER_MAX).await;
                inner.state.borrow_mut().house.renewed = None;
            }
        });
    }

    /// Removes all that the server has of the run.
    pub(super) async fn forget(&self) -> Result<()> {
        let copies = self.state.borrow().copies.all();
        self.server.remove(&copies).await?;
        Ok(self.server.leave().await?)
    }
}
