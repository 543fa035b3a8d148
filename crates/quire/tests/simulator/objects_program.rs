//! A program over objects: it reads and writes them through mappings, flushes, cuts, maps and drops,
//! comparing with the oracle as it goes.
//!
//! What all programs share is mapped as long as they run; each has mappings, anonymous memory and
//! short-lived objects of its own beside. While a thread changes an object's length, the bytes that
//! it is about are not compared, nor written.

use std::sync::atomic::Ordering;

use quire::mmu::Prot;
use quire::object::{FaultAround, FlushError, PinError, PinFor, ReadError};
use quire::space::vma::Pattern;
use quire::sys::Errno;
use quire::units::{ObjectPage, ObjectRange, PAGE_SIZE, PageRange};
use quire_simulated::{Generator, Trap};

use crate::private::{COPY_PAGES_MAX, Copied};
use crate::store::{Failures, SimStore};
use crate::world::{Known, Leaning, Sim, View, World, with_buffer, with_scratch};

/// Views that a program has of its own at most.
const VIEWS_MAX: usize = 3;
/// Private copies that it has at most.
const COPIES_MAX: usize = 2;

/// One program.
pub struct Program<'a> {
    world: &'a World,
    number: usize,
    generator: Generator,
    own: Vec<Known>,
    copies: Vec<Copied>,
    anonymous: Option<(PageRange, Vec<u64>)>,
    /// What it was told of errors, by object: the engine's count, and the store's.
    told: Vec<(u32, u64)>,
}

impl<'a> Program<'a> {
    pub fn new(world: &'a World, number: usize) -> Program<'a> {
        let generator = Generator::new(world.plan.seed ^ (number as u64 + 1) << 32);
        let told = vec![(0, 0); world.shared.len()];
        Program {
            world,
            number,
            generator,
            own: Vec::new(),
            copies: Vec::new(),
            anonymous: None,
            told,
        }
    }

    pub fn run(mut self) {
        self.map_anonymous();
        for _ in 0..self.world.plan.operations {
            self.operate();
            self.world.look_around();
        }
        for known in std::mem::take(&mut self.own) {
            self.unmap(known);
        }
        for copied in std::mem::take(&mut self.copies) {
            self.world.objects.unmap(copied.view.range);
        }
    }

    /// Unmaps a view of its own, while others may just be accessing it.
    fn unmap(&self, known: Known) {
        self.say(|| format!("unmaps {known:?}"));
        self.world.forget(known);
        self.world.objects.unmap(known.view.range);
    }

    fn say(&self, text: impl FnOnce() -> String) {
        self.world.trace(|| format!("program {}: {}", self.number, text()));
    }

    fn operate(&mut self) {
        if self.generator.below(2) == 0 {
            return self.lean();
        }
        match self.generator.below(100) {
            0..4 => self.touch_what_may_go(),
            4..12 => self.use_copy(),
            12..14 => self.go_bad(),
            14..22 => self.touch(false),
            22..44 => self.touch(true),
            44..54 => self.sweep(),
            54..60 => self.flush(),
            60..67 => self.resize(),
            67..72 => self.drop_cached(),
            72..76 => self.read_at(),
            76..80 => self.fetch_ahead(),
            80..84 => self.map_or_unmap(),
            84..86 => self.change_view(),
            86..88 => self.advise(),
            88..95 => self.use_anonymous(),
            95..97 => self.use_short_lived_object(),
            97 => self.world.plan.speculation.change(self.world.objects.space.budget()),
            98 => self.pin(),
            _ => self.swap_out(),
        }
    }

    /// What this seed does more than others do: what is rare among many things is not among few.
    fn lean(&mut self) {
        match (self.world.plan.leaning, self.generator.below(4)) {
            (Leaning::Mappings, 0) => self.map_or_unmap(),
            (Leaning::Mappings, 1) => self.change_view(),
            (Leaning::Mappings, _) => self.touch_what_may_go(),
            (Leaning::Lengths, 0 | 1) => self.resize(),
            (Leaning::WriteBack, 0) => self.flush(),
            (Leaning::WriteBack, 1) => self.sweep(),
            (Leaning::Caches, 0) => self.drop_cached(),
            (Leaning::Caches, 1) => self.fetch_ahead(),
            (Leaning::Caches, 2) => self.pin(),
            (Leaning::Copies, 0..=2) => self.use_copy(),
            (_, at) => self.touch(at % 2 == 0),
        }
    }

    fn sim(&self, object: usize) -> Sim {
        self.world.shared[object]
    }

    fn any_view(&mut self) -> View {
        let views = self.world.views.len();
        let at = self.generator.below(views + self.own.len());
        if at < views { self.world.views[at] } else { self.own[at - views].view }
    }

    /// A view, and some pages of it: mostly those that others use as well.
    fn any_part(&mut self) -> (View, std::ops::Range<usize>) {
        let view = self.any_view();
        let len = view.range.len();
        let near = if self.generator.below(3) == 0 { len } else { len.min(12) };
        let start = match self.generator.below(4) {
            // Around the end, which moves.
            0 => {
                let end = self.sim(view.object).store.expected().len / PAGE_SIZE;
                (end + 1).saturating_sub(view.first + self.generator.below(4)).min(len - 1)
            }
            _ => self.generator.below(near),
        };
        let count = 1 + self.generator.below((len - start).min(24));
        (view, start..start + count)
    }

    fn any_pages(&mut self) -> (usize, ObjectRange) {
        let (view, part) = self.any_part();
        let first = ObjectPage((view.first + part.start) as u64);
        (view.object, ObjectRange::new(first, part.len()))
    }

    fn touch(&mut self, writes: bool) {
        for _ in 0..=self.generator.below(4) {
            let (view, part) = self.any_part();
            self.access(view, part.start, writes);
        }
    }

    /// Accesses a view of another program, which may unmap it meanwhile: then it is as for any thread
    /// that does so, and nothing is said about what it meets.
    fn touch_what_may_go(&mut self) {
        let Some(known) = self.world.any_known(&mut self.generator) else { return };
        let at = self.generator.below(known.view.range.len().min(40));
        let writes = self.generator.below(2) == 0;
        self.access_known(known.view, at, writes, || self.world.is_known(known));
    }

    fn sweep(&mut self) {
        let (view, part) = self.any_part();
        let writes = self.generator.below(3) == 0;
        for at in part {
            self.access(view, at, writes);
        }
    }

    fn access(&mut self, view: View, at: usize, writes: bool) {
        self.access_known(view, at, writes, || true);
    }

    /// Accesses a page of a view. No other thread runs between the access and what is done here.
    fn access_known(&mut self, view: View, at: usize, writes: bool, is_there: impl Fn() -> bool) {
        let writes = writes && view.prot == Prot::READ_WRITE;
        let (at, page) = (view.first + at, view.range.start.add(at));
        let verb = if writes { "writes" } else { "reads" };
        self.say(|| format!("{verb} {at} of {} at {page:?}", view.object));
        let result = self.world.mmu().access(page, writes);
        if !is_there() {
            return;
        }
        let store = self.sim(view.object).store;
        match result {
            // SAFETY: mapped; this thread has the baton until its next call.
            Ok(bytes) => self.compare(view.object, at, unsafe { &mut *bytes }, writes),
            Err(Trap::Segv) => panic!("no right to {page:?}"),
            Err(Trap::Bus) => {
                let expected = store.expected();
                let is_behind = expected.certain(at) == 0 || at * PAGE_SIZE >= expected.len;
                let may_be = is_behind || expected.unreadable.contains(&at);
                assert!(may_be, "page {at} of {} cannot be had", view.object);
            }
        }
    }

    fn compare(&mut self, object: usize, at: usize, bytes: &mut [u8; PAGE_SIZE], writes: bool) {
        let sim = self.sim(object);
        let mut expected = sim.store.expected();
        let certain = expected.certain(at);
        assert!(!expected.poisoned.contains(&at), "page {at} of {object} is read though it is bad");
        let is_behind = certain > 0 && at * PAGE_SIZE >= expected.len;
        assert!(!is_behind, "page {at} of {object} can be read behind the end");
        let inside = expected.inside(at);
        let compared = if expected.is_scribbled { inside } else { certain };
        let wrong = (0..compared).find(|&byte| bytes[byte] != expected.page(at)[byte]);
        if let Some(wrong) = wrong {
            let word = self
                .world
                .objects
                .snapshot(self.world.objects.object(sim.id), ObjectPage(at as u64));
            let (found, right) = (bytes[wrong], expected.page(at)[wrong]);
            panic!(
                "page {at} of {object} ({word:?}) has {found} for {right} at byte {wrong}, \
                 of {inside} inside"
            );
        }
        if writes && inside > 0 {
            let within = self.generator.below(inside);
            let value = self.generator.next_u64().to_ne_bytes();
            let len = value.len().min(inside - within);
            bytes[within..within + len].copy_from_slice(&value[..len]);
            expected.write(at, within, &value[..len]);
        }
        if writes && inside > 0 && inside < certain && self.generator.below(2) == 0 {
            // Behind the end, in the page that it lies in: no thread may see that once it is longer.
            bytes[inside..].fill(0xee);
            expected.is_scribbled = true;
        }
    }

    fn flush(&mut self) {
        let (object, mut pages) = self.any_pages();
        let sim = self.sim(object);
        if self.generator.below(3) == 0 {
            pages = ObjectRange::new(ObjectPage(0), sim.pages_max);
        }
        let is_durable = self.generator.below(2) == 0;
        self.say(|| format!("flushes {pages:?} of {object}"));
        let before = {
            let expected = sim.store.expected();
            (expected.versions.clone(), expected.refusals)
        };
        let mut seen = self.told[object].0;
        let engine = self.world.objects.object(sim.id);
        let result = with_buffer(|buffer| {
            self.world.objects.flush(engine, pages, is_durable, &mut seen, buffer)
        });
        let expected = sim.store.expected();
        match result {
            Ok(()) => {
                assert_eq!(seen, self.told[object].0, "an error was not told");
                for page in pages.pages().map(|page| page.index()) {
                    let is_flushed = expected.flushed[page] >= before.0[page];
                    let is_certain = expected.certain(page) == PAGE_SIZE;
                    assert!(is_flushed || !is_certain, "page {page} of {object} is not flushed");
                }
            }
            Err(FlushError::HeldBack { .. }) => {
                assert!(expected.refusals > before.1, "nothing was held back");
            }
            // What a sync has lost is told by all later ones.
            Err(FlushError::Sync(_)) if seen == self.told[object].0 => {
                assert!(expected.sync_failures > 0, "no sync has failed");
            }
            Err(FlushError::Write { .. } | FlushError::Sync(_)) => {
                assert!(expected.failures > self.told[object].1, "nothing has failed since");
                // Counted in the store first: what is not told yet is told at the next flush.
                self.told[object].1 += 1;
            }
        }
        self.told[object].0 = seen;
    }

    fn resize(&mut self) {
        let object = self.generator.below(2);
        let sim = self.sim(object);
        let pages = sim.pages_max;
        let near = self.generator.below(2) == 0;
        self.world.resize_alone(object, || {
            let before = sim.store.expected().len;
            let most = pages * PAGE_SIZE;
            let len = if near {
                let by = self.generator.below(3 * PAGE_SIZE);
                [before.saturating_sub(by), before + by][self.generator.below(2)].min(most)
            } else {
                self.generator.below(most + 1)
            };
            let len = if self.generator.below(3) == 0 { len / PAGE_SIZE * PAGE_SIZE } else { len };
            sim.store.expected().doubt = Some(before.min(len));
            self.say(|| format!("changes the length of {object} from {before} to {len}"));
            if len > before && self.generator.below(3) == 0 {
                self.follow(&sim, len);
                return;
            }
            let engine = self.world.objects.object(sim.id);
            let [begun, ended] = &self.world.pins[object];
            let ended_before = ended.load(Ordering::Relaxed);
            let result = self.world.objects.set_len(engine, len as u64);
            self.say(|| format!("has changed the length of {object}: {result:?}"));
            let mut expected = sim.store.expected();
            match result {
                Ok(()) => expected.resized(len),
                Err(error) => {
                    // One was under way at some moment of it.
                    let was_pinned = begun.load(Ordering::Relaxed) > ended_before;
                    let is_pinned = error == Errno::BUSY && was_pinned;
                    let can_fail = expected.plan.cuts_one_in > 0;
                    assert!(is_pinned || can_fail, "nothing can have failed: {error}");
                    expected.not_resized();
                }
            }
            assert_eq!(engine.len(), expected.len as u64, "length of {object}");
        });
    }

    /// Another process makes the file longer, and writes there.
    fn follow(&mut self, sim: &Sim, len: usize) {
        {
            let mut expected = sim.store.expected();
            let from = expected.store.len();
            expected.store.resize(len, 0);
            for at in (from..len).step_by(PAGE_SIZE / 2) {
                expected.store[at] = self.generator.next_u64() as u8 | 1;
            }
        }
        let engine = self.world.objects.object(sim.id);
        match self.world.objects.follow_len(engine, len as u64) {
            Ok(()) => sim.store.expected().followed(len),
            Err(error) => {
                let reads_fail = sim.store.expected().plan.reads_one_in > 0;
                assert!(reads_fail, "the length cannot be followed: {error}");
                // It was not so, then.
                let mut expected = sim.store.expected();
                let len = expected.len;
                expected.store.truncate(len);
                expected.doubt = None;
            }
        }
    }

    fn drop_cached(&mut self) {
        let (object, pages) = self.any_pages();
        let all = ObjectRange::new(ObjectPage(0), self.sim(object).pages_max);
        let pages = if self.generator.below(4) == 0 { all } else { pages };
        let engine = self.world.objects.object(self.sim(object).id);
        if self.generator.below(4) == 0 {
            self.say(|| format!("gives {object} new memory"));
            let objects = &self.world.objects;
            with_scratch(|scratch| with_buffer(|buffer| objects.migrate(engine, scratch, buffer)));
            return;
        }
        self.say(|| format!("drops {pages:?} of {object}"));
        self.world.objects.drop_cached(engine, pages);
    }

    /// Pins a part, uses it while other things happen, and lets it go: no access of it is a fault meanwhile.
    fn pin(&mut self) {
        let (view, part) = self.any_part();
        if self.world.plan.has_bad_memory {
            // What becomes of such pages while they are pinned has tests of its own.
            let world = self.world;
            return world.resize_alone(view.object, || self.pin_part(view, part));
        }
        self.pin_part(view, part);
    }

    fn pin_part(&mut self, view: View, part: std::ops::Range<usize>) {
        let writes = view.prot == Prot::READ_WRITE && self.generator.below(2) == 0;
        let what = if writes { PinFor::Writing } else { PinFor::Reading };
        let range = PageRange::new(view.range.start.add(part.start), part.len());
        self.say(|| format!("pins {range:?} of {} for {what:?}", view.object));
        let objects = &self.world.objects;
        let [begun, ended] = &self.world.pins[view.object];
        begun.fetch_add(1, Ordering::Relaxed);
        let pinned =
            with_scratch(|scratch| with_buffer(|buffer| objects.pin(range, what, scratch, buffer)));
        match pinned {
            Ok(()) => {
                for _ in 0..=self.generator.below(3) {
                    let at = part.start + self.generator.below(part.len());
                    let page = view.range.start.add(at);
                    match self.world.mmu().try_access(page, writes) {
                        Ok(Ok(bytes)) => {
                            // SAFETY: mapped; this thread has the baton until its next call.
                            let bytes = unsafe { &mut *bytes };
                            self.compare(view.object, view.first + at, bytes, writes);
                        }
                        // What the kernel has swapped out comes back with the next access.
                        Ok(Err(_)) if self.world.plan.has_swap => self.access(view, at, writes),
                        refused => panic!("{page:?} is pinned for {what:?}, and is {refused:?}"),
                    }
                    self.touch(true);
                }
                objects.unpin(range, what);
            }
            Err(PinError::BehindEnd(_) | PinError::TooMuch) => {}
            Err(PinError::Read(ReadError { offset, .. })) => {
                let page = offset as usize / PAGE_SIZE;
                let expected = self.sim(view.object).store.expected();
                assert!(expected.unreadable.contains(&page), "page {page} has not failed");
            }
            Err(error) => panic!("{range:?} cannot be pinned: {error:?}"),
        }
        ended.fetch_add(1, Ordering::Relaxed);
    }

    fn read_at(&mut self) {
        let (object, pages) = self.any_pages();
        let sim = self.sim(object);
        let engine = self.world.objects.object(sim.id);
        let page = pages.start.index();
        self.say(|| format!("reads {page} of {object} without a mapping"));
        let mut bytes = [0; PAGE_SIZE];
        let before = {
            let expected = sim.store.expected();
            (expected.versions[page], expected.len, expected.doubt)
        };
        let read = with_scratch(|scratch| {
            with_buffer(|buffer| {
                let offset = pages.start.offset();
                self.world.objects.read_at(engine, offset, &mut bytes, scratch, buffer)
            })
        });
        let expected = sim.store.expected();
        let after = (expected.versions[page], expected.len, expected.doubt);
        match read {
            Err(ReadError { offset, .. }) => {
                let page = offset as usize / PAGE_SIZE;
                assert!(
                    expected.unreadable.contains(&page),
                    "page {page} of {object} has not failed"
                );
            }
            // Written meanwhile, or cut: it may be either.
            Ok(_) if before != after || after.2.is_some() => {}
            Ok(count) => {
                let there = expected.len.saturating_sub(page * PAGE_SIZE).min(PAGE_SIZE);
                assert_eq!(count, there, "bytes of page {page} of {object}");
                assert!(bytes[..count] == expected.page(page)[..count], "page {page} of {object}");
            }
        }
    }

    fn fetch_ahead(&mut self) {
        let (view, part) = self.any_part();
        let sim = self.sim(view.object);
        let first = ObjectPage((view.first + part.start) as u64);
        let range = PageRange::new(view.range.start.add(part.start), part.len());
        self.say(|| format!("fetches {first:?} of {} at {range:?}", view.object));
        let objects = &self.world.objects;
        match self.generator.below(3) {
            0 => {
                objects.prefetch(sim.id, ObjectRange::new(first, part.len()));
            }
            1 => {
                objects.populate_cached(range);
            }
            _ => {
                let populated = with_scratch(|scratch| {
                    with_buffer(|buffer| objects.populate(range, scratch, buffer))
                });
                if let Err(ReadError { offset, .. }) = populated {
                    let page = offset as usize / PAGE_SIZE;
                    let expected = sim.store.expected();
                    assert!(expected.unreadable.contains(&page), "page {page} has not failed");
                }
            }
        }
    }

    fn map_or_unmap(&mut self) {
        let is_full = self.own.len() == VIEWS_MAX;
        if is_full || !self.own.is_empty() && self.generator.below(2) == 0 {
            let known = self.own.swap_remove(self.generator.below(self.own.len()));
            return self.unmap(known);
        }
        let object = self.generator.below(2);
        let sim = self.sim(object);
        let first = self.generator.below(sim.pages_max);
        let most = [sim.pages_max, sim.pages_max.min(8)][self.generator.below(2)];
        let pages = 1 + self.generator.below(most);
        let prot = [Prot::READ_WRITE, Prot::READ_WRITE, Prot::READ][self.generator.below(3)];
        let Some(view) = self.world.map(&sim, object, first, pages, prot) else { return };
        self.say(|| format!("maps {view:?}"));
        self.own.push(self.world.publish(view));
    }

    /// Gives a view of its own other rights, or another length, while others may be accessing it:
    /// nothing is said about what they meet, until it is told anew.
    fn change_view(&mut self) {
        if self.own.is_empty() {
            return self.map_or_unmap();
        }
        let known = self.own.swap_remove(self.generator.below(self.own.len()));
        self.say(|| format!("changes {known:?}"));
        self.world.forget(known);
        let view = self.world.change(known.view, usize::MAX, &mut self.generator);
        self.own.push(self.world.publish(view));
    }

    /// Makes private copies, uses them, and gives them up.
    fn use_copy(&mut self) {
        let is_full = self.copies.len() == COPIES_MAX;
        match self.generator.below(12) {
            0 if !self.copies.is_empty() => {
                let copied = self.copies.swap_remove(self.generator.below(self.copies.len()));
                self.say(|| format!("unmaps a copy: {:?}", copied.view));
                self.world.objects.unmap(copied.view.range);
            }
            at if at < 3 && !is_full || self.copies.is_empty() => self.map_copy(),
            _ => {
                let at = self.generator.below(self.copies.len());
                self.copies[at].use_it(self.world, &mut self.generator);
            }
        }
    }

    fn map_copy(&mut self) {
        let object = self.generator.below(2);
        let sim = self.sim(object);
        let first = self.generator.below(sim.pages_max);
        let pages = 1 + self.generator.below(COPY_PAGES_MAX);
        let prot = [Prot::READ_WRITE, Prot::READ_WRITE, Prot::READ][self.generator.below(3)];
        let before = Copied::before(&sim, first, pages);
        let Some(view) = self.world.map_private(&sim, object, first, pages, prot) else { return };
        self.say(|| format!("maps a copy: {view:?}"));
        self.copies.push(Copied::new(view, before));
    }

    /// A page's memory goes bad, or what the store has of bad ones will do.
    fn go_bad(&mut self) {
        if !self.world.plan.has_bad_memory {
            return self.touch(true);
        }
        let (object, pages) = self.any_pages();
        let sim = self.sim(object);
        let is_mended = self.generator.below(2) == 0;
        self.world.resize_alone(object, || {
            if is_mended {
                self.say(|| format!("unpoisons {pages:?} of {object}"));
                return self.world.unpoison(&sim, pages);
            }
            let page = pages.start;
            self.say(|| format!("poisons {page:?} of {object}"));
            {
                let mut expected = sim.store.expected();
                // A flush may tell it from now on, and what is written to it in between is lost.
                expected.failures += 1;
                expected.unreadable.insert(page.index());
            }
            let failed = self.world.objects.memory_failure(self.world.objects.object(sim.id), page);
            let mut expected = sim.store.expected();
            if failed == Ok(true) {
                expected.poison(page.index());
            }
        });
    }

    fn advise(&mut self) {
        let (view, part) = self.any_part();
        let fault_around = match self.generator.below(3) {
            0 => FaultAround::Auto,
            1 => FaultAround::Off,
            _ => FaultAround::Order(self.generator.below(10) as u32),
        };
        let objects = &self.world.objects;
        objects.set_fault_around(view.range.start, fault_around);
        let patterns = [Pattern::Normal, Pattern::Sequential, Pattern::Random];
        let pattern = patterns[self.generator.below(3)];
        let range = PageRange::new(view.range.start.add(part.start), part.len());
        self.say(|| format!("advises {fault_around:?}, {pattern:?} for {range:?}"));
        objects.advise_pattern(range, pattern).unwrap();
    }

    fn map_anonymous(&mut self) {
        let pages = self.world.plan.anonymous_pages;
        if pages == 0 {
            return;
        }
        let space = &self.world.objects.space;
        let start = space.map(&mut space.lock(), None, pages, Prot::READ_WRITE).unwrap();
        self.anonymous = Some((PageRange::new(start, pages), vec![0; pages]));
    }

    /// Memory of the other kind, which reclaim asks for its share.
    fn use_anonymous(&mut self) {
        let Some((range, mut values)) = self.anonymous.take() else { return };
        let first = self.generator.below(range.len());
        for at in (first..range.len()).take(1 + self.generator.below(20)) {
            let writes = self.generator.below(2) == 0;
            let bytes = self.world.mmu().access(range.start.add(at), writes).unwrap();
            // SAFETY: mapped; this thread has the baton until its next call.
            let word = unsafe { &mut *bytes.cast::<u64>() };
            assert_eq!(*word, values[at], "anonymous page {at}");
            if writes {
                *word = self.generator.next_u64();
                values[at] = *word;
            }
        }
        self.anonymous = Some((range, values));
    }

    /// An object comes, is written, and goes: its last user writes what is dirty.
    fn use_short_lived_object(&mut self) {
        let pages = 1 + self.generator.below(20);
        let seed = self.generator.next_u64();
        let sim = self.world.open(pages * PAGE_SIZE, pages, seed, Failures::default());
        let Some(view) = self.world.map(&sim, 0, 0, pages, Prot::READ_WRITE) else {
            self.world.gone.lock().unwrap().push(sim.store);
            self.world.objects.put(sim.id);
            return;
        };
        self.say(|| format!("opens {:?} and maps it at {:?}", sim.id, view.range));
        for at in 0..pages {
            let writes = self.generator.below(2) == 0;
            self.access_own(sim.store, view.range, at, writes);
        }
        self.world.gone.lock().unwrap().push(sim.store);
        // Either may be the last use, or what is under way.
        if self.generator.below(2) == 0 {
            self.world.objects.put(sim.id);
            self.world.objects.unmap(view.range);
        } else {
            self.world.objects.unmap(view.range);
            self.world.objects.put(sim.id);
        }
    }

    fn access_own(&mut self, store: &SimStore, range: PageRange, at: usize, writes: bool) {
        let bytes = self.world.mmu().access(range.start.add(at), writes).unwrap();
        // SAFETY: mapped; this thread has the baton until its next call.
        let bytes = unsafe { &mut *bytes };
        let mut expected = store.expected();
        assert!(bytes[..] == *expected.page(at), "page {at} of an object of one's own");
        if writes {
            let within = self.generator.below(PAGE_SIZE);
            bytes[within] = bytes[within].wrapping_add(1);
            expected.write(at, within, &[bytes[within]]);
        }
    }

    /// The kernel unmaps pages by itself.
    fn swap_out(&mut self) {
        if !self.world.plan.has_swap {
            return self.touch(false);
        }
        let (view, part) = self.any_part();
        for at in part {
            self.world.baton.step();
            let page = view.range.start.add(at);
            if self.world.mmu().swap_out(page) {
                self.say(|| format!("has {page:?} swapped out by the kernel"));
            }
        }
    }
}
