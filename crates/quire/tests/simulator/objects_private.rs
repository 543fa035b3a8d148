//! What a program does with private copies of objects, which it alone accesses.
//!
//! The oracle of a copy: what was written there, byte by byte, however it was reclaimed meanwhile and
//! whatever became of the object; and else what the object was at some time, not before what the
//! copy has shown already. A page of the copy can be refused where the object has none, or could not
//! be read once.

use std::collections::BTreeMap;

use quire::mmu::Prot;
use quire::object::ReadError;
use quire::space::Advice;
use quire::units::{PAGE_SIZE, PageRange};
use quire_simulated::{Generator, Trap};

use crate::world::{Sim, View, World, with_buffer, with_scratch};

/// What is written to a copy stays, packed: it has no more pages than there is memory for.
pub const COPY_PAGES_MAX: usize = 60;

/// A private copy and its oracle.
pub struct Copied {
    pub view: View,
    /// Pages that were written, by their number in the object.
    written: BTreeMap<usize, Vec<u8>>,
    /// The oldest content of the object that a page may still show.
    since: BTreeMap<usize, usize>,
}

impl Copied {
    /// What a copy that is mapped after this can show at the earliest.
    pub fn before(sim: &Sim, first: usize, pages: usize) -> BTreeMap<usize, usize> {
        let expected = sim.store.expected();
        (first..(first + pages).min(sim.pages_max))
            .map(|page| (page, expected.moment(page)))
            .collect()
    }

    pub fn new(view: View, since: BTreeMap<usize, usize>) -> Copied {
        Copied { view, written: BTreeMap::new(), since }
    }

    /// Some pages of it.
    fn part(&self, generator: &mut Generator) -> std::ops::Range<usize> {
        let len = self.view.range.len();
        let near = if generator.below(3) == 0 { len } else { len.min(12) };
        let start = generator.below(near);
        start..start + 1 + generator.below((len - start).min(24))
    }

    fn range(&self, part: &std::ops::Range<usize>) -> PageRange {
        PageRange::new(self.view.range.start.add(part.start), part.len())
    }

    /// One operation.
    pub fn use_it(&mut self, world: &World, generator: &mut Generator) {
        let part = self.part(generator);
        let (view, range) = (self.view, self.range(&part));
        let trace = |verb: &str| {
            world.trace(|| format!("{verb} {part:?} of a copy of {} at {range:?}", view.object));
        };
        match generator.below(18) {
            0..5 => {
                trace("reads");
                part.for_each(|at| self.access(world, generator, at, false));
            }
            5..10 => {
                trace("writes");
                part.for_each(|at| self.access(world, generator, at, true));
            }
            10 | 11 => {
                trace("discards");
                world.objects.advise_private(range, Advice::DontNeed);
                part.for_each(|at| drop(self.written.remove(&(view.first + at))));
            }
            12 => {
                trace("pages out");
                world.objects.advise_private(range, Advice::PageOut);
            }
            13 => {
                trace("populates");
                self.populate(world, generator, range);
            }
            14 | 15 => {
                trace("reads without a fault");
                self.read(world, part.start);
            }
            _ => self.change(world, generator),
        }
    }

    /// Gives it other rights or another length. What is cut off is gone, and what comes is the
    /// object's as it is then.
    fn change(&mut self, world: &World, generator: &mut Generator) {
        let (first, sim) = (self.view.first, world.shared[self.view.object]);
        let before = Copied::before(&sim, first, COPY_PAGES_MAX);
        self.view = world.change(self.view, COPY_PAGES_MAX, generator);
        let end = first + self.view.range.len();
        self.written.retain(|&page, _| page < end);
        self.since.retain(|&page, _| page < end);
        for (page, moment) in before.into_iter().filter(|&(page, _)| page < end) {
            self.since.entry(page).or_insert(moment);
        }
    }

    fn access(&mut self, world: &World, generator: &mut Generator, at: usize, writes: bool) {
        let writes = writes && self.view.prot == Prot::READ_WRITE;
        let page = self.view.first + at;
        match world.mmu().access(self.view.range.start.add(at), writes) {
            Ok(bytes) => {
                // SAFETY: mapped; this thread has the baton until its next call.
                let bytes = unsafe { &mut *bytes };
                self.compare(world, page, bytes);
                if writes {
                    let within = generator.below(PAGE_SIZE - 8);
                    bytes[within..within + 8].copy_from_slice(&generator.next_u64().to_ne_bytes());
                    self.written.insert(page, bytes.to_vec());
                }
            }
            Err(Trap::Segv) => panic!("no right to page {page} of a copy"),
            Err(Trap::Bus) => self.refused(world, page),
        }
    }

    fn refused(&self, world: &World, page: usize) {
        assert!(!self.written.contains_key(&page), "what was written to page {page} is lost");
        let expected = world.shared[self.view.object].store.expected();
        let is_behind = expected.certain(page) == 0 || page * PAGE_SIZE >= expected.len;
        let may_be = is_behind || expected.unreadable.contains(&page);
        assert!(may_be, "page {page} of a copy of {} cannot be had", self.view.object);
    }

    fn compare(&mut self, world: &World, page: usize, bytes: &[u8]) {
        if let Some(written) = self.written.get(&page) {
            let wrong = (0..PAGE_SIZE).find(|&at| bytes[at] != written[at]);
            assert_eq!(wrong, None, "a byte that was written to page {page} of a copy");
            return;
        }
        let expected = world.shared[self.view.object].store.expected();
        let since = self.since[&page];
        let found = expected.moment_of(page, since, bytes);
        let now = expected.moment(page);
        let found = found.unwrap_or_else(|| {
            panic!(
                "page {page} of a copy of {} shows none of the moments {since} to {now}",
                self.view.object
            )
        });
        self.since.insert(page, found);
    }

    fn populate(&mut self, world: &World, generator: &mut Generator, range: PageRange) {
        if generator.below(2) == 0 {
            with_scratch(|scratch| world.objects.populate_private_cached(range, scratch));
            return;
        }
        let populated = with_scratch(|scratch| {
            with_buffer(|buffer| world.objects.populate_private(range, scratch, buffer))
        });
        if let Err(ReadError { offset, .. }) = populated {
            self.refused(world, offset as usize / PAGE_SIZE);
        }
    }

    fn read(&mut self, world: &World, at: usize) {
        let page = self.view.first + at;
        let mut bytes = [0; PAGE_SIZE];
        let read = with_scratch(|scratch| {
            with_buffer(|buffer| {
                let start = self.view.range.start;
                world.objects.read_private(start, at * PAGE_SIZE, &mut bytes, scratch, buffer)
            })
        });
        match read {
            Ok(PAGE_SIZE) => self.compare(world, page, &bytes),
            // The object ends there, or did a moment ago.
            Ok(_) => assert!(!self.written.contains_key(&page), "page {page} of a copy is short"),
            Err(ReadError { offset, .. }) => self.refused(world, offset as usize / PAGE_SIZE),
        }
    }
}
