//! What readers want comes back from the server.
//!
//! A reader that goes on in a segment gets more of it than it asked for, twice as much each time; and at the end of
//! it the beginning of the segment that left after it.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use quire::control::place::{CHUNK_BYTES, CHUNKS, Place};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::file::{Aligned, aligned};
use super::mover::{Inner, RETRY_AFTER_MAX};
use super::seal::sealed_range;
use super::server::{GROUPS, group_of, may_pass};

/// How long a fetch is tried.
const FETCHED_WITHIN: Duration = Duration::from_secs(30);
/// How long an attempt is given where the server has been away for longer.
const ASKED_FOR: Duration = Duration::from_millis(200);
/// What is waited between two attempts, at first.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// What is fetched of the next segment.
const FIRST_HALF: u8 = 0x0f;

/// Whether the servers answer: those of a cluster may be away one by one, or all at once.
#[derive(Default)]
pub(super) struct Health {
    /// By group of copies: when the first request began that was not answered, since one was.
    away_since: [Option<Instant>; GROUPS],
    /// The same of all groups.
    silent_since: Option<Instant>,
    /// When one was asked last that had been away for long.
    asked: Option<Instant>,
}

impl Health {
    fn note_answer(&mut self, group: usize) {
        (self.away_since[group], self.silent_since) = (None, None);
    }

    fn note_failure(&mut self, group: usize, began: Instant) {
        self.away_since[group].get_or_insert(began);
        self.silent_since.get_or_insert(began);
    }

    /// How long the next request may take. `None`: it would go to who has been away for long, and one was asked just
    /// now.
    fn patience(&mut self, group: usize) -> Option<Duration> {
        let sinces = [self.away_since[group], self.silent_since];
        let away =
            sinces.into_iter().flatten().map(|since| since.elapsed()).max().unwrap_or_default();
        let left = FETCHED_WITHIN.saturating_sub(away);
        if left > ASKED_FOR {
            return Some(left);
        }
        if self.asked.is_some_and(|asked| asked.elapsed() < RETRY_AFTER_MAX) {
            return None;
        }
        self.asked = Some(Instant::now());
        Some(ASKED_FOR)
    }
}

/// The chunks that are fetched for those that are wanted: the first one, and how many.
fn chunks_for(place: Place, wanted: u8) -> (usize, usize) {
    let first = wanted.trailing_zeros() as usize;
    let end = (u8::BITS - wanted.leading_zeros()) as usize;
    let before = (0..first).rev().take_while(|chunk| place.here() >> chunk & 1 != 0).count();
    (first, (end + before).min(CHUNKS) - first)
}

impl Inner {
    /// Fetches what is wanted of a segment, until nothing is.
    pub(super) fn begin_fetch(self: &Rc<Inner>, segment: u32) {
        if !self.state.borrow_mut().busy.insert(segment) {
            // Who is at it looks once more when it is done.
            return;
        }
        let inner = Rc::clone(self);
        spawn_local(async move {
            while let Some((place, wanted)) = inner.wanted(segment) {
                if let Err(error) = inner.fetch(segment, place, wanted).await {
                    let word = inner.far().place(segment);
                    let failed =
                        word.update(|now| now.is_same_turn(place).then(|| now.failed(wanted)));
                    if failed.is_some() && inner.is_live(segment) {
                        let name = inner.named(segment);
                        let line = format!(
                            "{name} cannot be had: {error:#}; who reads what was there gets SIGBUS"
                        );
                        inner.say("lost", line);
                    }
                }
                inner.far().wake_readers();
            }
            inner.state.borrow_mut().busy.remove(&segment);
        });
    }

    /// The chunks that a reader wants and the file does not have.
    fn wanted(&self, segment: u32) -> Option<(Place, u8)> {
        let word = self.far().place(segment);
        let place = word.load();
        let wanted = place.wanted() & !place.here();
        if !self.is_live(segment) {
            // Who wanted it is gone.
            word.change(place, place.failed(wanted));
            return None;
        }
        (wanted != 0).then_some((place, wanted))
    }

    /// Fetches what is wanted of a segment whose word was `place`.
    async fn fetch(&self, segment: u32, place: Place, wanted: u8) -> Result<()> {
        let copy = self.state.borrow().copies.of(segment).filter(|_| place.has(Place::FAR));
        let copy = copy.context("the server never had it")?;
        let (first, count) = chunks_for(place, wanted);
        let goes_on = count > wanted.count_ones() as usize;
        if goes_on && first + count == CHUNKS {
            self.want_next(segment);
        }
        let sealed = self.get(copy, sealed_range(first, count)).await?;
        let mut bytes = aligned(count * CHUNK_BYTES);
        let opened = self.seal.open(copy, first, &sealed, &mut bytes);
        if opened != 0 {
            self.move_in(segment, place, opened, first, bytes).await?;
        }
        if wanted & !opened != 0 {
            bail!("what came back is not what was written there");
        }
        Ok(())
    }

    /// Writes chunks to a segment's place in the file; where that has no room, once it has some.
    async fn move_in(
        &self,
        segment: u32,
        place: Place,
        chunks: u8,
        first: usize,
        bytes: Aligned,
    ) -> Result<()> {
        let (word, bytes, began) = (self.far().place(segment), Arc::new(bytes), Instant::now());
        loop {
            // Only this thread makes a segment leave the file, and not one with a task.
            let is_new = !word.load().has(Place::LOCAL);
            if is_new {
                self.make_sure_of_room().await?;
            }
            let Some(before) = word.begin_moving_in(place) else {
                // Nobody reads it any more: its place was taken for other data.
                self.far().local.fetch_sub(is_new.into(), Relaxed);
                return Ok(());
            };
            debug_assert_eq!(is_new, !before.has(Place::LOCAL));
            let written = self.file.write(segment, chunks, first, Arc::clone(&bytes)).await;
            let here = if written.is_ok() { chunks } else { 0 };
            word.end_moving_in(here);
            self.state.borrow_mut().idle.push_back(segment);
            self.far().fetched.fetch_add(here.count_ones().into(), Relaxed);
            match written {
                Ok(()) => return Ok(()),
                Err(error) if began.elapsed() > FETCHED_WITHIN => {
                    return Err(error).context("the swap file takes nothing");
                }
                // The disk may be full of what can go.
                Err(_) => self.give_up_some(1, true),
            };
            sleep(RETRY_AFTER).await;
        }
    }

    /// Has the beginning fetched of the segment that was copied after this one.
    fn want_next(&self, segment: u32) {
        let next = self.state.borrow().copies.next_after(segment);
        if let Some(next) = next.filter(|&next| self.is_live(next)) {
            self.far().want_ahead(next, FIRST_HALF);
        }
    }

    /// Asks the server until it answers, or too much time has passed.
    async fn get(&self, copy: u64, (start, length): (usize, usize)) -> Result<Vec<u8>> {
        let (mut pause, group) = (RETRY_AFTER, group_of(copy));
        loop {
            let patience = self.state.borrow_mut().health.patience(group);
            let patience = patience.context("the server has been away for long")?;
            let began = Instant::now();
            let failure = match timeout(patience, self.server.get(copy, start, length)).await {
                Ok(Ok(bytes)) => {
                    self.state.borrow_mut().health.note_answer(group);
                    return bytes.context("the server has lost it");
                }
                Ok(Err(error)) if !may_pass(&error) => return Err(error.into()),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it does not answer".to_owned(),
            };
            self.state.borrow_mut().health.note_failure(group, began);
            if patience <= ASKED_FOR {
                bail!("{failure}");
            }
            self.say("slow", format!("{} is asked again: {failure}", self.server.name));
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_AFTER_MAX);
        }
    }

    /// Counts a segment more in the file; waits until there is room for it.
    async fn make_sure_of_room(&self) -> Result<()> {
        let most = self.far().local_max.load(Relaxed);
        let began = Instant::now();
        while !self.far().count_local(most) {
            // What is nowhere else stays; only what has a copy goes, read or not.
            if !self.give_up_some(1, true) {
                if began.elapsed() > FETCHED_WITHIN {
                    bail!("there is no room for it in the swap file");
                }
                sleep(Duration::from_millis(2)).await;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_goes_on_gets_twice_as_much_each_time() {
        let fetched = |here: u8, wanted: u8| chunks_for(Place::default().with_here(here), wanted);
        assert_eq!(fetched(0, 0b1), (0, 1));
        assert_eq!(fetched(0, 0b1000), (3, 1));
        assert_eq!(fetched(0b1, 0b10), (1, 2));
        assert_eq!(fetched(0b111, 0b1000), (3, 4));
        assert_eq!(fetched(0b1111, 0b1_0000), (4, 4));
        assert_eq!(fetched(0b0100, 0b1001), (0, 4), "what lies between two comes with them");
        assert_eq!(fetched(0b0111_1111, 0b1000_0000), (7, 1));
    }

    #[test]
    fn a_server_that_is_away_for_long_is_asked_now_and_then() {
        let ago = |time| Instant::now().checked_sub(time).unwrap();
        let mut health = Health::default();
        assert_eq!(health.patience(3), Some(FETCHED_WITHIN));
        health.note_failure(3, ago(FETCHED_WITHIN / 2));
        assert!(health.patience(3).is_some_and(|left| left <= FETCHED_WITHIN / 2));
        assert!(
            health.patience(4).is_some_and(|left| left <= FETCHED_WITHIN / 2),
            "no other answers either"
        );
        health.note_answer(4);
        assert_eq!(health.patience(4), Some(FETCHED_WITHIN));
        assert!(
            health.patience(3).is_some_and(|left| left <= FETCHED_WITHIN / 2),
            "it is away by itself"
        );
        health = Health::default();
        health.note_failure(3, ago(FETCHED_WITHIN));
        assert_eq!(health.patience(4), Some(ASKED_FOR));
        assert_eq!(health.patience(3), None);
        health.note_answer(3);
        assert_eq!(health.patience(3), Some(FETCHED_WITHIN));
    }
}
