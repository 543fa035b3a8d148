//! Moves segments between the swap file and the server.
//!
//! One thread runs all of it; what takes long (the server, the disk, the seal) is a task, and no segment has two of
//! them at a time.
//!
//! - *Copy*: half of the file is full, so segments are copied, the oldest first. What the server has acknowledged, and
//!   only that, may leave the file.
//! - *Give up*: the file is nearly full, so what has a copy, and was not read since it was looked at last, is given
//!   back.
//! - *Fetch*: a reader wants chunks. A reader that goes on in a segment gets more of it than it asked for.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quire::control::place::Place;
use quire::control::{Control, Far};
use rustix::thread::futex;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::copies::{Copies, Housekeeping};
use super::fetch::Health;
use super::file::SegmentFile;
use super::seal::Seal;
use super::server::Server;
use super::{PERIOD, Shared};
use crate::print::say;

/// Segments on their way to the server at a time.
const COPIES_MAX: usize = 4;
/// What is waited after a failure, at most.
pub(super) const RETRY_AFTER_MAX: Duration = Duration::from_secs(1);
/// How long the end waits for the server to forget the run.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(5);
/// Lines about one kind of failure come so much apart.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// What became of a segment that was to leave the file.
enum GivenUp {
    Yes,
    NotNow,
    /// There is nothing of it.
    NotThere,
}

pub(super) struct Mover(Rc<Inner>);

pub(super) struct Inner {
    shared: Arc<Shared>,
    pub(super) server: Server,
    pub(super) file: Arc<SegmentFile>,
    pub(super) seal: Arc<Seal>,
    /// Held by who is saying something.
    voice: Arc<()>,
    pub(super) state: RefCell<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) copies: Copies,
    /// Segments with a task.
    pub(super) busy: BTreeSet<u32>,
    copying: usize,
    /// Segments of the file, by age: those that are to be copied, and those that may go. Either may have some that
    /// are not there any more.
    fresh: Queue,
    pub(super) idle: Queue,
    pub(super) health: Health,
    /// After a failure nothing is copied until then.
    not_before: Option<Instant>,
    pub(super) house: Housekeeping,
    said: BTreeMap<&'static str, Instant>,
}

/// Segments in an order, each once.
#[derive(Default)]
pub(super) struct Queue {
    order: VecDeque<u32>,
    has: BTreeSet<u32>,
}

impl Queue {
    pub(super) fn push_back(&mut self, segment: u32) {
        if self.has.insert(segment) {
            self.order.push_back(segment);
        }
    }

    fn push_front(&mut self, segment: u32) {
        if self.has.insert(segment) {
            self.order.push_front(segment);
        }
    }

    fn pop_front(&mut self) -> Option<u32> {
        let segment = self.order.pop_front()?;
        self.has.remove(&segment);
        Some(segment)
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

impl Mover {
    pub(super) fn new(shared: Arc<Shared>, server: Server, file: SegmentFile, seal: Seal) -> Mover {
        let (file, seal, state) = (Arc::new(file), Arc::new(seal), RefCell::default());
        Mover(Rc::new(Inner { shared, server, file, seal, voice: Arc::default(), state }))
    }

    pub(super) async fn run(&self) {
        let inner = &self.0;
        let sweeper = Rc::clone(inner);
        spawn_local(async move {
            // What others left is no reason not to run: it goes by itself later.
            let _ = sweeper.server.sweep().await;
        });
        while !inner.shared.is_ending.load(Relaxed) {
            let _ = timeout(PERIOD, inner.shared.called.notified()).await;
            inner.far().beat();
            inner.far().take_posted(|segment| inner.note(segment));
            inner.look();
            inner.keep_house();
        }
    }

    /// Removes what the server has of the run.
    pub(super) async fn forget(&self) {
        // What is left there goes by itself.
        let _ = timeout(FORGOTTEN_WITHIN, self.0.forget()).await;
    }
}

impl Inner {
    pub(super) fn control(&self) -> &Control {
        &self.shared.control
    }

    pub(super) fn far(&self) -> &Far {
        &self.control().far
    }

    /// Says something, but not the same kind of thing all the time. Who reads it may be slow: nobody waits for that.
    pub(super) fn say(&self, kind: &'static str, line: String) {
        let now = Instant::now();
        let said = &mut self.state.borrow_mut().said;
        if said.get(kind).is_some_and(|&last| now - last < SAID_EVERY)
            || Arc::strong_count(&self.voice) > 1
        {
            return;
        }
        said.insert(kind, now);
        let voice = Arc::clone(&self.voice);
        // Without a thread it stays unsaid.
        let _ = std::thread::Builder::new().name("quire-far-say".to_owned()).spawn(move || {
            say(&line);
            drop(voice);
        });
    }

    /// A segment as messages name it.
    pub(super) fn named(&self, segment: u32) -> String {
        let copy = self.state.borrow().copies.of(segment);
        copy.map_or_else(|| format!("segment {segment}"), |copy| self.server.named(copy))
    }

    /// A member points at a segment.
    fn note(self: &Rc<Inner>, segment: u32) {
        let place = self.far().place(segment).load();
        if place.has(Place::LOCAL | Place::WRITTEN) && !place.has(Place::FAR) {
            self.state.borrow_mut().fresh.push_back(segment);
        }
        if place.wanted() != 0 {
            self.begin_fetch(segment);
        }
    }

    /// Copies, and gives up, as the file fills.
    fn look(self: &Rc<Inner>) {
        let far = self.far();
        let [local, most, kept] =
            [&far.local, &far.local_max, &far.local_kept].map(|word| word.load(Relaxed));
        if local > most / 2 {
            self.begin_copies();
        }
        let wanted_free = kept + (most / 16).max(1);
        if local + wanted_free > most {
            self.give_up_some(local + wanted_free - most, false);
        }
    }

    fn begin_copies(self: &Rc<Inner>) {
        let is_too_soon =
            self.state.borrow().not_before.is_some_and(|moment| Instant::now() < moment);
        if is_too_soon {
            return;
        }
        while self.state.borrow().copying < COPIES_MAX {
            let Some(segment) = self.state.borrow_mut().fresh.pop_front() else { return };
            let place = self.far().place(segment).load();
            if !place.has(Place::WRITTEN | Place::LOCAL) || place.has(Place::FAR) {
                // It was taken for other data, and will be pointed at again.
                continue;
            }
            let mut state = self.state.borrow_mut();
            if !self.is_live(segment) {
                state.idle.push_back(segment);
                continue;
            }
            if !state.busy.insert(segment) {
                // It is fetched still for readers of its former life.
                state.fresh.push_back(segment);
                return;
            }
            state.copying += 1;
            let inner = Rc::clone(self);
            spawn_local(async move {
                let copied = inner.copy(segment, place).await;
                let mut state = inner.state.borrow_mut();
                state.busy.remove(&segment);
                state.copying -= 1;
                match &copied {
                    Ok(()) => state.idle.push_back(segment),
                    Err(_) => state.fresh.push_front(segment),
                }
                state.not_before = copied.is_err().then(|| Instant::now() + RETRY_AFTER_MAX);
                drop(state);
                if let Err(error) = copied {
                    let name = &inner.server.name;
                    inner.say(
                        "full",
                        format!("{name} takes no pages, which stay here until it does: {error:#}"),
                    );
                }
                // The next one, and room for who waits.
                inner.shared.called.notify_one();
            });
        }
    }

    /// Copies a segment to the server.
    async fn copy(&self, segment: u32, place: Place) -> Result<()> {
        let copy = self.state.borrow_mut().copies.begin(segment);
        let (file, seal) = (Arc::clone(&self.file), Arc::clone(&self.seal));
        let sealed = tokio::task::spawn_blocking(move || {
            let bytes = file.read(segment).context("the swap file cannot be read")?;
            seal.seal(copy, &bytes)
        });
        let put = match sealed.await? {
            Ok(sealed) => self.server.put(copy, &sealed).await,
            Err(error) => Err(error),
        };
        let is_there = put.is_ok() && self.far().place(segment).note_copied(place);
        if is_there {
            self.far().copied.fetch_add(1, Relaxed);
            self.note_segments(&self.state.borrow().copies);
        } else {
            self.state.borrow_mut().copies.drop_of(segment);
        }
        put
    }

    /// Gives back the room of so many segments of the file, as far as there are such that may go. Where that is
    /// urgent, those that were read lately go as well.
    pub(super) fn give_up_some(&self, mut wanted: u32, is_urgent: bool) -> bool {
        let rounds = if is_urgent { 2 } else { 1 };
        let mut left = rounds * self.state.borrow().idle.len();
        let mut has_room = false;
        while wanted > 0 && left > 0 {
            left -= 1;
            let Some(segment) = self.state.borrow_mut().idle.pop_front() else { break };
            match self.give_up(segment) {
                GivenUp::Yes => {
                    wanted -= 1;
                    has_room = true;
                }
                GivenUp::NotNow => self.state.borrow_mut().idle.push_back(segment),
                GivenUp::NotThere => {}
            }
        }
        if has_room {
            let far = self.far();
            far.room.fetch_add(1, Relaxed);
            let _ = futex::wake(&far.room, futex::Flags::empty(), u32::MAX);
        }
        has_room
    }

    fn give_up(&self, segment: u32) -> GivenUp {
        let place = self.far().place(segment).load();
        let is_live = self.is_live(segment);
        if !place.has(Place::LOCAL) || is_live && !place.has(Place::FAR | Place::WRITTEN) {
            return GivenUp::NotThere;
        }
        let is_wanted = is_live && place.wanted() & !place.here() != 0;
        if is_wanted || place.has(Place::MOVING) || self.state.borrow().busy.contains(&segment) {
            return GivenUp::NotNow;
        }
        let word = self.far().place(segment);
        if is_live && place.has(Place::USED) {
            word.change(place, place.without(Place::USED));
            return GivenUp::NotNow;
        }
        if !word.begin_moving_out(place) {
            return GivenUp::NotNow;
        }
        // Readers find out by the word that what they have read meanwhile is nothing.
        let is_given_back = self.file.punch(segment).is_ok();
        word.end_moving_out(is_live, is_given_back);
        if !is_given_back {
            return GivenUp::NotNow;
        }
        self.far().local.fetch_sub(1, Relaxed);
        GivenUp::Yes
    }
}
