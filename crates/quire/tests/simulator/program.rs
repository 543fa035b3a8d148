//! A program: reads, writes, and changes its layout, comparing with the oracle as it goes.
//!
//! Only its owner unmaps, drops or moves a range; everything else any program does to any range,
//! as threads of one process would. What is read while the owner changes the layout is not
//! compared, because the oracle follows when the change is over.

use std::sync::atomic::Ordering;

use quire::mmu::{Access, Prot};
use quire::page::State;
use quire::space::Advice;
use quire::space::remap::Placement;
use quire::space::vma::{Kind, Pattern};
use quire::units::{PAGE_SIZE, PageNum, PageRange};
use quire_simulated::{Generator, Pin, Trap};

use crate::world::{Expected, SHARED, World};

/// Pages that a program keeps locked at most.
const LOCKED_MAX: usize = 6;

/// One program, with mappings of its own.
pub struct Program<'a> {
    world: &'a World,
    number: usize,
    generator: Generator,
    regions: Vec<PageRange>,
    pins: Vec<Pin>,
    locked: Option<PageRange>,
    noise_left: usize,
}

impl<'a> Program<'a> {
    pub fn new(world: &'a World, number: usize) -> Program<'a> {
        let seed = world.plan.seed ^ (number as u64 + 1) << 32;
        Program {
            world,
            number,
            generator: Generator::new(seed),
            regions: Vec::new(),
            pins: Vec::new(),
            locked: None,
            noise_left: world.plan.noise_pages,
        }
    }

    /// Maps what all programs use, before any of them runs.
    pub fn map_shared(world: &World) {
        let mut layout = world.space.lock();
        world.space.map_fixed(&mut layout, SHARED, Prot::READ_WRITE).unwrap();
        let mut oracle = world.oracle.lock().unwrap();
        for page in SHARED.pages() {
            oracle[page.index()].prot = Prot::READ_WRITE;
        }
    }

    pub fn run(mut self) {
        self.map();
        for _ in 0..self.world.plan.operations {
            self.operate();
            let page = self.any_page();
            self.world.look_around(page);
        }
        self.unpin_all();
        if let Some(range) = self.locked.take() {
            let _ =
                self.world.with_layout(&[range], |layout| self.world.space.munlock(layout, range));
        }
    }

    fn say(&self, text: impl FnOnce() -> String) {
        self.world.trace(|| format!("program {}: {}", self.number, text()));
    }

    fn operate(&mut self) {
        match self.generator.below(100) {
            0..30 => self.write_some(),
            30..60 => {
                let page = self.any_page();
                self.read(page);
            }
            60..66 => self.sweep(),
            66..70 => self.fill(),
            70..72 => self.map(),
            72..74 => self.unmap(),
            74..78 => self.protect(),
            78..81 => self.drop_content(),
            81..90 => self.give_advice(),
            90..92 => self.remap(),
            92..94 => self.lock(),
            94..96 => self.pin(),
            96 => self.stray(),
            97 | 98 if self.generator.below(2) == 0 => self.track(),
            97 => self.world.plan.speculation.change(self.world.space.budget()),
            98 => self.track(),
            _ if self.generator.below(2) == 0 => self.stand_still(),
            _ if self.generator.below(2) == 0 => self.take_of_the_budget(),
            _ => self.unpin_all(),
        }
    }

    /// Memory that is not managed comes and goes.
    fn take_of_the_budget(&mut self) {
        let control = self.world.space.budget().control();
        // Programs that lock and pin as these do cannot go on with less than about the smallest budget.
        let most = self.world.plan.tree.budget_pages - 160;
        let pages = self.generator.below(most + 1);
        self.say(|| format!("{pages} pages are not managed"));
        control.unmanaged_pages.store(pages as u64, Ordering::Relaxed);
        control.call_all();
    }

    fn own_region(&mut self) -> Option<(usize, PageRange)> {
        let index = self.generator.below(self.regions.len());
        self.regions.get(index).map(|region| (index, *region))
    }

    fn part_of(&mut self, region: PageRange) -> PageRange {
        let start = self.generator.below(region.len());
        let len = 1 + self.generator.below((region.len() - start).min(70));
        PageRange::new(region.start.add(start), len)
    }

    fn own_part(&mut self) -> Option<PageRange> {
        let (_, region) = self.own_region()?;
        Some(self.part_of(region))
    }

    fn any_part(&mut self) -> PageRange {
        // A range that a thread is just unmapping is the best place to meet it.
        let dying = self.world.dying.lock().unwrap().first().copied();
        if let Some(range) = dying.filter(|_| self.generator.below(2) == 0) {
            return self.part_of(range);
        }
        match self.generator.below(8) {
            0 => self.part_of(SHARED),
            1..3 => self.foreign_part(),
            _ => self.own_part().unwrap_or(SHARED),
        }
    }

    /// Pages that a thread has mapped.
    fn foreign_part(&mut self) -> PageRange {
        let start = self.generator.below(1500);
        let most = self.generator.below(70);
        let oracle = self.world.oracle.lock().unwrap();
        let mapped = |at: &usize| oracle[*at].prot.is_readable();
        let Some(first) = (start..oracle.len()).find(mapped) else { return SHARED };
        let last = (first..first + most).take_while(mapped).last().unwrap_or(first);
        PageRange::new(PageNum(first as u64), last - first + 1)
    }

    /// Whether the oracle may be wrong about a page just now.
    fn is_in_doubt(&self, page: PageNum) -> bool {
        let is_own = SHARED.contains(page) || self.regions.iter().any(|own| own.contains(page));
        !is_own && self.world.layout_is_taken()
    }

    fn any_page(&mut self) -> PageNum {
        self.any_part().start
    }

    /// Accesses a page and, while no other thread can run, does `act` to its bytes and the oracle's.
    fn access(
        &mut self,
        page: PageNum,
        is_write: bool,
        act: impl FnOnce(&mut Generator, &mut [u8; PAGE_SIZE]),
    ) {
        let result = self.touch(page, is_write);
        let is_in_doubt = self.is_in_doubt(page);
        if is_write && (is_in_doubt || result.is_err()) {
            self.world.disturbed.lock().unwrap().insert(page);
        }
        match result {
            _ if is_in_doubt => {}
            // SAFETY: mapped; this thread has the baton until its next call.
            Ok(bytes) => self.compare(page, unsafe { &mut *bytes }, is_write, act),
            Err(trap) => self.expect_trap(page, is_write, trap),
        }
    }

    fn touch(&self, page: PageNum, is_write: bool) -> Result<*mut [u8; PAGE_SIZE], Trap> {
        if is_write {
            self.world.writes.lock().unwrap().push(page);
        }
        let result = self.world.mmu().access(page, is_write);
        if is_write {
            let mut writes = self.world.writes.lock().unwrap();
            let at = writes.iter().position(|other| *other == page).unwrap();
            writes.swap_remove(at);
        }
        result
    }

    fn compare(
        &mut self,
        page: PageNum,
        bytes: &mut [u8; PAGE_SIZE],
        is_write: bool,
        act: impl FnOnce(&mut Generator, &mut [u8; PAGE_SIZE]),
    ) {
        let mut oracle = self.world.oracle.lock().unwrap();
        let expected = &mut oracle[page.index()];
        assert!(!expected.is_lost, "{page:?} was lost and is there again");
        if !expected.matches(bytes) {
            let word = self.world.space.snapshot(page);
            let at = (0..PAGE_SIZE)
                .find(|&at| bytes[at] != expected.bytes.as_ref().map_or(0, |bytes| bytes[at]));
            panic!("{page:?} ({word:?}) has other bytes from {at:?} on");
        }
        expected.is_lazy = false;
        act(&mut self.generator, bytes);
        expected.bytes = (!Expected::is_zero(bytes)).then(|| Box::new(*bytes));
        if is_write && expected.is_written.is_some() {
            expected.is_written = Some(true);
        }
    }

    fn expect_trap(&self, page: PageNum, is_write: bool, trap: Trap) {
        let mut oracle = self.world.oracle.lock().unwrap();
        let expected = &mut oracle[page.index()];
        match trap {
            Trap::Segv => {
                let prot = expected.prot;
                let has_right = if is_write { prot.is_writable() } else { prot.is_readable() };
                // Rights are as they were promised, but while they change.
                assert!(!has_right || self.world.layout_is_taken(), "no right to {page:?}");
            }
            Trap::Bus => {
                assert!(self.world.plan.loses_pages(), "{page:?} is lost, but no read failed");
                let word = self.world.space.snapshot(page);
                // Locked: it is being poisoned just now.
                assert!(word.is_locked() || word.state() == State::Poisoned, "{page:?} {word:?}");
                expected.is_lost = true;
            }
        }
    }

    fn read(&mut self, page: PageNum) {
        self.say(|| format!("reads {page:?}"));
        self.access(page, false, |_, _| {});
    }

    fn write(&mut self, page: PageNum) {
        self.say(|| format!("writes {page:?}"));
        self.access(page, true, |generator, bytes| {
            let at = generator.below(PAGE_SIZE / 8) * 8;
            bytes[at..at + 8].copy_from_slice(&generator.next_u64().to_ne_bytes());
        });
    }

    /// Goes where nothing may be mapped, or another program's mapping is just coming to. Where none
    /// is there must be no memory, whatever was there before, and however often it is tried.
    fn stray(&mut self) {
        let first = PageNum(self.generator.below(1000) as u64);
        self.say(|| format!("strays to {first:?}"));
        let world = self.world;
        let is_mapped =
            |page: PageNum| world.oracle.lock().unwrap()[page.index()].prot.is_readable();
        for page in PageRange::new(first, 12).pages() {
            let is_write = !is_mapped(page) && self.generator.one_in(2);
            let before = world.layout_changes();
            let has_come = self.touch(page, is_write).is_ok();
            if has_come && is_write {
                world.disturbed.lock().unwrap().insert(page);
            }
            let has_changed = world.layout_is_taken() || before != world.layout_changes();
            assert!(!has_come || has_changed || is_mapped(page), "{page:?} is in no mapping");
        }
    }

    fn write_some(&mut self) {
        let page = self.any_page();
        for _ in 0..=self.generator.below(3) {
            self.write(page);
        }
    }

    fn sweep(&mut self) {
        let part = self.any_part();
        let writes = self.generator.below(2) == 0;
        for page in part.pages() {
            if writes { self.write(page) } else { self.read(page) }
        }
    }

    /// Overwrites whole pages: with one pattern, or with noise that does not pack.
    fn fill(&mut self) {
        let part = self.any_part();
        let most = self.generator.below(part.len().min(30));
        for page in part.pages().take(1 + most) {
            self.fill_page(page);
        }
    }

    fn fill_page(&mut self, page: PageNum) {
        let is_noise = self.noise_left > 0 && self.generator.below(2) == 0;
        self.noise_left -= usize::from(is_noise);
        self.say(|| format!("fills {page:?}{}", if is_noise { " with noise" } else { "" }));
        self.access(page, true, |generator, bytes| {
            let pattern = generator.next_u64() as u32;
            for word in bytes.chunks_exact_mut(4) {
                let value = if is_noise { generator.next_u64() as u32 } else { pattern };
                word.copy_from_slice(&value.to_ne_bytes());
            }
        });
    }

    /// Has the space to itself, as a fork does.
    fn stand_still(&mut self) {
        self.say(|| "stands still".to_owned());
        let space = &self.world.space;
        self.world.with_layout(&[space.arena()], |layout| {
            let mut at = PageNum(0);
            while let Some(vma) = space.next_vma(layout, at) {
                assert_ne!(vma.attributes.kind, Kind::Dying, "{vma:?} has an owner");
                at = vma.range.end;
            }
        });
    }

    /// The oracle's side of a change of a range.
    fn expect(&self, range: PageRange, change: impl Fn(&mut Expected)) {
        let mut oracle = self.world.oracle.lock().unwrap();
        for page in range.pages() {
            change(&mut oracle[page.index()]);
        }
    }

    fn map(&mut self) {
        let have: usize = self.regions.iter().map(|region| region.len()).sum();
        let pages = 1 + self.generator.below(self.world.plan.pages / 2);
        if have + pages > self.world.plan.pages {
            return;
        }
        let start = self.world.with_layout(&[], |layout| {
            let start = self.world.space.map(layout, None, pages, Prot::READ_WRITE).unwrap();
            self.expect(PageRange::new(start, pages), |page| {
                *page = Expected { prot: Prot::READ_WRITE, ..Expected::default() };
            });
            start
        });
        self.say(|| format!("maps {pages} pages at {start:?}"));
        self.regions.push(PageRange::new(start, pages));
    }

    fn unmap(&mut self) {
        let Some((index, region)) = self.own_region() else { return };
        let part = self.part_of(region);
        self.say(|| format!("unmaps {part:?}"));
        self.regions.swap_remove(index);
        let head = PageRange { start: region.start, end: part.start };
        let tail = PageRange { start: part.end, end: region.end };
        self.regions.extend([head, tail].into_iter().filter(|range| !range.is_empty()));
        self.forget_lock_in(part);
        self.world.unmap(part, || self.expect(part, |page| *page = Expected::default()));
    }

    fn protect(&mut self) {
        let part = self.any_part();
        let prots = [Prot::READ_WRITE, Prot::READ_WRITE, Prot::READ, Prot::READ, Prot::NONE];
        let prot = prots[self.generator.below(prots.len())];
        self.set_rights(part, prot);
        if prot != Prot::READ_WRITE && self.generator.below(5) > 0 {
            // Not for long: most of what happens needs rights. What was mapped meanwhile may be on
            // its way out just when it is written.
            for page in part.pages() {
                self.read(page);
            }
            self.set_rights(part, Prot::READ_WRITE);
            for page in part.pages() {
                self.write(page);
            }
        }
    }

    fn set_rights(&self, part: PageRange, prot: Prot) {
        self.say(|| format!("protects {part:?} {prot:?}"));
        self.world.with_layout(&[part], |layout| {
            // Another thread's range may have gone meanwhile.
            if self.world.space.protect(layout, part, prot).is_ok() {
                self.expect(part, |page| page.prot = prot);
            }
        });
    }

    fn drop_content(&mut self) {
        let Some(part) = self.own_part() else { return };
        let is_lazy = self.generator.below(2) == 0;
        self.say(|| format!("{} {part:?}", if is_lazy { "frees" } else { "drops" }));
        self.world.with_layout(&[part], |layout| {
            if is_lazy {
                self.world.space.advise(layout, part, Advice::Free).unwrap();
                self.expect(part, |page| {
                    page.is_lazy = true;
                    page.is_written = None;
                });
            } else {
                self.world.space.advise(layout, part, Advice::DontNeed).unwrap();
                self.expect(part, |page| {
                    *page = Expected { prot: page.prot, ..Expected::default() };
                });
            }
        });
    }

    fn give_advice(&mut self) {
        let part = self.any_part();
        let advices = [
            Advice::Cold,
            Advice::PageOut,
            Advice::PageOut,
            Advice::PageOut,
            Advice::WillNeed,
            Advice::Populate(Access::Read),
            Advice::Pattern(Pattern::Sequential),
            Advice::Pattern(Pattern::Random),
            Advice::Pattern(Pattern::Normal),
        ];
        if self.generator.below(20) == 0 {
            self.say(|| "advises the whole arena out".to_owned());
            let all = PageRange { start: SHARED.start, end: SHARED.end.add(1000) };
            let world = self.world;
            let _ = world
                .with_layout(&[all], |layout| world.space.advise(layout, all, Advice::PageOut));
        }
        let advice = advices[self.generator.below(advices.len())];
        self.say(|| format!("advises {advice:?} for {part:?}"));
        // Part of it may have another kind; what it holds does not change.
        let _ =
            self.world.with_layout(&[part], |layout| self.world.space.advise(layout, part, advice));
    }

    fn remap(&mut self) {
        let Some((index, region)) = self.own_region() else { return };
        let pages = 1 + self.generator.below(region.len() + 20);
        self.forget_lock_in(region);
        let world = self.world;
        let target = world.with_layout(&[region], |layout| {
            // One mapping only: rights may have split the region.
            let whole = world.space.next_vma(layout, region.start);
            let fits = whole
                .is_some_and(|vma| vma.range.contains(region.start) && region.end <= vma.range.end);
            if !fits {
                return None;
            }
            let start = world.space.remap(layout, region, pages, Placement::Anywhere).unwrap();
            let mut oracle = world.oracle.lock().unwrap();
            let prot = oracle[region.start.index()].prot;
            let old: Vec<_> =
                region.pages().map(|page| std::mem::take(&mut oracle[page.index()])).collect();
            let target = PageRange::new(start, pages);
            let fresh = Expected { prot, ..Expected::default() };
            for (at, page) in target.pages().enumerate() {
                let mut expected = old.get(at).cloned().unwrap_or(fresh.clone());
                // A thread may have been about to write the page where it was.
                expected.is_written = expected.is_written.filter(|is_written| *is_written);
                oracle[page.index()] = expected;
            }
            Some(target)
        });
        let Some(target) = target else { return };
        self.say(|| format!("remaps {region:?} to {target:?}"));
        self.regions[index] = target;
    }

    fn forget_lock_in(&mut self, range: PageRange) {
        if self.locked.is_some_and(|locked| !locked.intersect(range).is_empty()) {
            self.locked = None;
        }
    }

    fn lock(&mut self) {
        if let Some(range) = self.locked.take() {
            self.say(|| format!("unlocks {range:?}"));
            let _ =
                self.world.with_layout(&[range], |layout| self.world.space.munlock(layout, range));
            return;
        }
        let Some(part) = self.own_part() else { return };
        let part = PageRange::new(part.start, part.len().min(LOCKED_MAX));
        self.say(|| format!("locks {part:?}"));
        // Without rights, or with a page that is lost, it fails, and some of it is locked.
        let _ = self.world.with_layout(&[part], |layout| self.world.space.mlock(layout, part));
        self.locked = Some(part);
    }

    /// The kernel takes hold of a page that the program has just written, and writes there.
    fn pin(&mut self) {
        if self.pins.len() >= 2 {
            self.write_pinned_pages_that_lost_their_rights();
            return self.unpin_all();
        }
        let Some(page) = self.own_part().map(|part| part.start) else { return };
        self.write(page);
        // No step in between: the page is still there, or it could not be written at all.
        let is_writable = self.world.mmu().try_access(page, true).is_ok_and(|found| found.is_ok());
        if !is_writable {
            return;
        }
        if let Some(pin) = self.world.mmu().pin(page) {
            self.say(|| format!("pins {page:?}"));
            self.world.pins.fetch_add(1, Ordering::Relaxed);
            self.pins.push(pin);
        }
    }

    fn write_pinned_pages_that_lost_their_rights(&mut self) {
        let pages: Vec<_> =
            self.pins.iter().filter_map(|pin| self.world.mmu().page_of(pin)).collect();
        let is_read_only = self.generator.below(2) == 0;
        if is_read_only {
            for page in &pages {
                self.set_rights(PageRange::new(*page, 1), Prot::READ);
            }
            let part = self.any_part();
            let world = self.world;
            let all = pages.iter().map(|page| PageRange::new(*page, 1)).chain([part]);
            for range in all {
                let _ = world.with_layout(&[range], |layout| {
                    world.space.advise(layout, range, Advice::PageOut)
                });
            }
        }
        self.write_pinned();
        for page in pages {
            if is_read_only {
                self.set_rights(PageRange::new(page, 1), Prot::READ_WRITE);
            }
            self.read(page);
        }
    }

    fn write_pinned(&mut self) {
        for pin in &self.pins {
            let at = self.generator.below(PAGE_SIZE);
            let value = self.generator.next_u64() as u8;
            self.world.baton.step();
            // SAFETY: this thread has the baton until its next call.
            unsafe { (*self.world.mmu().pinned_bytes(pin))[at] = value };
            // Elsewhere by now, or dropped: then the program does not see it.
            let Some(page) = self.world.mmu().page_of(pin) else { continue };
            let mut oracle = self.world.oracle.lock().unwrap();
            let expected = &mut oracle[page.index()];
            // SAFETY: as above.
            expected.bytes = Some(Box::new(unsafe { *self.world.mmu().pinned_bytes(pin) }));
            expected.is_lazy = false;
            drop(oracle);
            self.say(|| format!("has the kernel write {page:?}"));
        }
    }

    fn unpin_all(&mut self) {
        for pin in std::mem::take(&mut self.pins) {
            self.world.mmu().unpin(pin);
            self.world.pins.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Checks which pages were written since their writes were tracked, and tracks others.
    fn track(&mut self) {
        for region in self.regions.clone() {
            for page in region.pages() {
                self.world.baton.step();
                let known = self.world.oracle.lock().unwrap()[page.index()].is_written;
                let Some(expected) = known else { continue };
                let is_in_flight = self.world.disturbed.lock().unwrap().contains(&page)
                    || self.world.writes.lock().unwrap().contains(&page);
                if is_in_flight && !expected {
                    continue;
                }
                let word = self.world.space.snapshot(page);
                if word.is_locked() || word.state() == State::Poisoned {
                    continue;
                }
                let is_written = self.world.space.is_written(page);
                assert_eq!(is_written, expected, "{page:?} ({word:?}) is written?");
            }
        }
        let Some(part) = self.own_part() else { return };
        self.say(|| format!("tracks the writes of {part:?}"));
        self.world.with_layout(&[part], |layout| {
            let mut disturbed = self.world.disturbed.lock().unwrap();
            part.pages().for_each(|page| {
                disturbed.remove(&page);
            });
            drop(disturbed);
            // As they are before: a page without content is left alone when its turn comes, and may
            // get some from a read of another program before the others have had theirs.
            let states = part.pages().map(|page| self.world.space.snapshot(page).state());
            let states: Vec<State> = states.collect();
            self.world.space.track_writes(layout, part).unwrap();
            let mut oracle = self.world.oracle.lock().unwrap();
            for (page, state) in part.pages().zip(states) {
                let expected = &mut oracle[page.index()];
                // What may turn into zeros by itself says nothing.
                let is_tracked =
                    !matches!(state, State::None | State::Poisoned) && !expected.is_lazy;
                expected.is_written = is_tracked.then_some(false);
            }
        });
    }
}
