use std::collections::HashMap;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::vec::Vec;

use rustix::fd::BorrowedFd;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::super::blob::{Blob, Packing};
use super::super::cipher::SwapCipher;
use super::super::compress::{Compressed, Compressor, Corrupt, PageBytes, Strength, page_hash};
use super::super::io::{Faults, Job, Ring};
use super::layout::blob_bytes;
use super::*;
use crate::control::{CONTROL_BYTES, SEGMENT_BYTES};
use crate::units::{PAGE_SIZE, PageNum};

/// A control page of its own for every test.
pub(super) fn control(segments_max: u32) -> &'static Control {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: a new mapping, never unmapped; zero is a value of every field.
    let control = unsafe {
        let base = mmap_anonymous(core::ptr::null_mut(), CONTROL_BYTES, protection, flags);
        &*base.unwrap().cast::<Control>()
    };
    control.segments_max.store(segments_max, Relaxed);
    control
}

/// An unnamed file, read past the kernel's cache where its file system allows.
pub(super) fn scratch_file() -> BorrowedFd<'static> {
    let open = |flags| {
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | flags;
        rustix::fs::open(std::env::temp_dir(), flags, rustix::fs::Mode::from_raw_mode(0o600))
    };
    let file: OwnedFd =
        open(rustix::fs::OFlags::DIRECT).or_else(|_| open(rustix::fs::OFlags::empty())).unwrap();
    // SAFETY: never closed.
    unsafe { BorrowedFd::borrow_raw(file.into_raw_fd()) }
}

pub(super) fn is_idle(control: &Control, slots: u32) -> bool {
    let maps = &control.segment_maps[..slots as usize];
    control.segments_used.load(Relaxed) == 0
        && control.segment_refs[..1000].iter().all(|refs| refs.load(Relaxed) == 0)
        && maps.iter().all(|map| map[..16].iter().all(|word| word.load(Relaxed) == 0))
}

/// Page-aligned memory, as direct I/O wants it.
pub(super) struct Aligned(Table<u8>);

impl Aligned {
    pub(super) fn new(bytes: usize) -> Aligned {
        Aligned(Table::new(bytes).unwrap())
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

fn read<'a>(ring: &mut Ring, plan: ReadPlan, buffer: &'a mut Aligned) -> Result<&'a [u8], Errno> {
    let buffer = &mut buffer.bytes()[..plan.length];
    let mut jobs = [Job::read(plan.offset, buffer)];
    ring.run(&mut jobs);
    let [job] = jobs;
    job.result.map(|()| &*buffer)
}

pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }

    fn page(&mut self) -> PageBytes {
        let random = self.roll(PAGE_SIZE * 5 / 4).min(PAGE_SIZE);
        core::array::from_fn(|at| if at < random { self.roll(256) as u8 } else { 9 })
    }
}

/// A page as the pool would hold it.
#[derive(Clone)]
struct Stored {
    kind: Packing,
    bytes: Vec<u8>,
    hash: u64,
}

impl Stored {
    fn new(page: &PageBytes) -> Stored {
        let (kind, bytes) = match Compressor::default().compress(page, Strength::Lz4) {
            Compressed::Packed(packing, block) => (packing, block.to_vec()),
            _ => (Packing::Raw, page.to_vec()),
        };
        Stored { kind, bytes, hash: page_hash(page) }
    }

    fn blob(&self, owner: PageNum) -> Blob<'_> {
        Blob { owner, kind: self.kind, hash: self.hash, bytes: &self.bytes }
    }
}

/// Where a page's word says its bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Word {
    /// In memory; the number tells one life from the next.
    Memory(u64),
    File(Location),
}

impl Word {
    fn tag(self) -> u64 {
        match self {
            Word::Memory(life) => life << 33,
            Word::File(location) => u64::from(location.get()) | 1 << 32,
        }
    }
}

pub(super) struct Page {
    pub(super) word: Word,
    content: PageBytes,
    stored: Stored,
}

/// A small engine around one swap file.
pub(super) struct Engine {
    pub(super) file: SwapSegments,
    pub(super) writer: Writer,
    ring: Ring,
    buffer: Aligned,
    pub(super) pages: HashMap<PageNum, Page>,
    pub(super) dice: Dice,
    lives: u64,
    pub(super) failures: usize,
}

impl Engine {
    fn new(control: &'static Control, seed: u64) -> Engine {
        Engine::with_file(control, seed, scratch_file())
    }

    pub(super) fn with_file(
        control: &'static Control,
        seed: u64,
        file: BorrowedFd<'static>,
    ) -> Engine {
        let ring =
            Ring::new(file).encrypted_by(SwapCipher::of(control)).backed_by(FarTier::of(control));
        Engine {
            file: SwapSegments::new(control, 0).unwrap(),
            writer: Writer::new().unwrap(),
            ring,
            buffer: Aligned::new(SEGMENT_BYTES),
            pages: HashMap::new(),
            dice: Dice(seed),
            lives: 0,
            failures: 0,
        }
    }

    pub(super) fn any(&mut self) -> Option<PageNum> {
        let mut owners: Vec<PageNum> = self.pages.keys().copied().collect();
        owners.sort();
        let count = owners.len();
        (count != 0).then(|| owners[self.dice.roll(count)])
    }

    pub(super) fn create(&mut self) {
        let owner = PageNum(self.dice.roll(1 << 20) as u64);
        if self.pages.contains_key(&owner) {
            return;
        }
        self.lives += 1;
        let content = self.dice.page();
        let stored = Stored::new(&content);
        self.pages.insert(owner, Page { word: Word::Memory(self.lives), content, stored });
        self.add(owner, SegmentPurpose::Reclaim);
    }

    fn add(&mut self, owner: PageNum, purpose: SegmentPurpose) {
        if self.writer.is_full() {
            self.write_out();
        }
        if self.writer.open(&self.file, purpose).is_ok() {
            let page = &self.pages[&owner];
            assert!(self.writer.add(&page.stored.blob(owner), page.word.tag()));
        }
    }

    fn write_out(&mut self) {
        let Ok(written) = self.writer.write_out(&self.file, &mut self.ring) else {
            self.failures += 1;
            return;
        };
        for Written { owner, tag, location } in written {
            match self.pages.get_mut(&owner).filter(|page| page.word.tag() == tag) {
                Some(page) => {
                    if let Word::File(old) = page.word {
                        self.file.free(old.segment(), 1);
                    }
                    page.word = Word::File(location);
                }
                None => self.file.free(location.segment(), 1),
            }
        }
    }

    pub(super) fn remove(&mut self, owner: PageNum) {
        let page = self.pages.remove(&owner).unwrap();
        if let Word::File(location) = page.word {
            self.file.free(location.segment(), 1);
        }
    }

    pub(super) fn check(&mut self, owner: PageNum) {
        let Word::File(location) = self.pages[&owner].word else {
            return;
        };
        let mut plan = location.plan();
        for page in self.pages.values() {
            if let Word::File(location) = page.word {
                plan = plan.with(location, 32 << 10).unwrap_or(plan);
            }
        }
        let Ok(bytes) = read(&mut self.ring, plan, &mut self.buffer) else {
            self.failures += 1;
            return;
        };
        let mut out = [0; PAGE_SIZE];
        assert_eq!(plan.unpack(bytes, location, owner.add(1), &mut out), Err(Corrupt));
        for (owner, page) in &self.pages {
            let Word::File(location) = page.word else { continue };
            let is_covered = plan.with(location, plan.length) == Some(plan);
            match plan.unpack(bytes, location, *owner, &mut out) {
                Ok(()) => assert!(out == page.content),
                Err(Corrupt) => assert!(!is_covered, "{owner:?} was read"),
            }
        }
    }

    pub(super) fn clean(&mut self) {
        for segment in self.file.victims().into_iter().flatten() {
            let mut whole = Aligned::new(SEGMENT_BYTES);
            match read(&mut self.ring, segment.plan(), &mut whole) {
                Ok(bytes) => {
                    let live: Vec<PageNum> = segment_blobs(bytes, segment)
                        .filter(|(location, blob)| {
                            let page = self.pages.get(&blob.owner);
                            page.is_some_and(|page| page.word == Word::File(*location))
                        })
                        .map(|(_, blob)| blob.owner)
                        .collect();
                    for owner in live {
                        self.add(owner, SegmentPurpose::Clean);
                    }
                }
                Err(_) => self.failures += 1,
            }
            self.file.unpin(segment);
        }
        self.write_out();
    }
}

#[test]
fn pages_survive_eviction_cleaning_and_failing_writes_and_the_file_ends_empty() {
    for (seed, fail_one_in, is_encrypted) in [(3, 0, 0), (4, 5, 0), (3, 0, 1), (4, 5, 1)] {
        let control = control(14);
        control.is_swap_encrypted.store(is_encrypted, Relaxed);
        let mut engine = Engine::new(control, seed);
        engine.ring.plant(Faults { fail_one_in, short_one_in: 4, ..Faults::new(seed) });
        for step in 0..4000 {
            match engine.dice.roll(10) {
                0..=4 if engine.pages.len() < 600 => engine.create(),
                5..=7 => {
                    if let Some(owner) = engine.any() {
                        engine.check(owner);
                    }
                }
                8 if step % 5 == 0 => engine.clean(),
                _ => {
                    if let Some(owner) = engine.any().filter(|_| engine.pages.len() > 400) {
                        engine.remove(owner);
                    }
                }
            }
            assert!(control.segments_used.load(Relaxed) <= 14);
        }
        assert_eq!(engine.failures == 0, fail_one_in == 0);
        let in_file = |page: &&Page| matches!(page.word, Word::File(_));
        assert!(engine.pages.values().filter(in_file).count() > 100);
        engine.writer.cancel(&engine.file);
        for owner in engine.pages.keys().copied().collect::<Vec<_>>() {
            engine.check(owner);
            engine.remove(owner);
        }
        assert!(is_idle(control, 1));
        assert_eq!(engine.file.segments_held(), 0);
    }
}

#[test]
fn a_full_file_whose_segments_each_keep_a_few_live_blobs_has_room_again_after_cleaning() {
    let control = control(6);
    let mut engine = Engine::new(control, 11);
    while engine.file.has_room() || !engine.writer.is_full() {
        engine.create();
    }
    engine.write_out();
    assert_eq!(engine.writer.open(&engine.file, SegmentPurpose::Reclaim), Err(SwapFull));
    let mut owners: Vec<PageNum> = engine.pages.keys().copied().collect();
    owners.sort();
    for owner in owners.iter().enumerate().filter(|(n, _)| n % 8 != 0).map(|(_, owner)| *owner) {
        engine.remove(owner);
    }
    assert!(!engine.file.has_room(), "every segment has live blobs");
    engine.clean();
    let used = control.segments_used.load(Relaxed);
    assert!(used <= 2, "{used} segments for an eighth of what filled five");
    for owner in engine.pages.keys().copied().collect::<Vec<_>>() {
        engine.check(owner);
        engine.remove(owner);
    }
    engine.writer.cancel(&engine.file);
    assert!(is_idle(control, 1));
}

#[test]
fn a_failed_write_gives_the_segment_back_and_lists_nothing() {
    let control = control(4);
    let mut engine = Engine::new(control, 5);
    engine.ring.plant(Faults { fail_nth: 1, error: Errno::NOSPC, ..Faults::new(1) });
    engine.create();
    let result = engine.writer.write_out(&engine.file, &mut engine.ring).map(|_| ());
    assert_eq!(result, Err(Errno::NOSPC));
    assert!(engine.writer.is_empty() && is_idle(control, 1));
    assert_eq!(engine.writer.write_out(&engine.file, &mut engine.ring).unwrap().count(), 0);
}

#[test]
fn damage_in_the_file_is_an_error_and_never_data() {
    let mut engine = Engine::new(control(4), 5);
    for _ in 0..40 {
        engine.create();
    }
    engine.write_out();
    let mut out = [0; PAGE_SIZE];
    for (owner, page) in &engine.pages {
        let Word::File(location) = page.word else { panic!("{owner:?} was not written") };
        let plan = location.plan();
        assert!(plan.offset % PAGE_SIZE as u64 == 0 && plan.length % PAGE_SIZE == 0);
        let bytes = read(&mut engine.ring, plan, &mut engine.buffer).unwrap();
        let start = location.get() as usize % (PAGE_SIZE / 64) * 64;
        let length = blob_bytes(page.stored.bytes.len());
        let mut damaged = bytes.to_vec();
        for at in (start..start + length).step_by(7) {
            damaged[at] ^= 1;
            if plan.unpack(&damaged, location, *owner, &mut out).is_ok() {
                assert!(out == page.content, "byte {at}");
            }
            damaged[at] ^= 1;
        }
        for cut in [0, start, start + 15, start + 16, start + length / 2] {
            assert_eq!(plan.unpack(&bytes[..cut], location, *owner, &mut out), Err(Corrupt));
        }
        let noise: Vec<u8> = (0..plan.length).map(|_| engine.dice.roll(256) as u8).collect();
        assert_eq!(plan.unpack(&noise, location, *owner, &mut out), Err(Corrupt));
        assert_eq!(segment_blobs(&noise, location.segment()).count(), 0);
    }
}

#[test]
fn what_the_supervisor_has_dropped_for_a_dying_member_is_not_dropped_again() {
    let control = control(8);
    let mut dying = Engine::new(control, 11);
    for _ in 0..30 {
        dying.create();
    }
    dying.write_out();
    // The supervisor's part, while a thread of the process still runs.
    for word in control.segment_maps[0].iter().take(16) {
        let bits = word.swap(0, Relaxed);
        for bit in (0..64).filter(|bit| bits & 1 << bit != 0) {
            assert_eq!(control.segment_refs[bit].fetch_sub(1, Relaxed), 1);
            control.segments_used.fetch_sub(1, Relaxed);
        }
    }
    assert!(is_idle(control, 2));
    for owner in dying.pages.keys().copied().collect::<Vec<_>>() {
        dying.remove(owner);
    }
    dying.writer.cancel(&dying.file);
    assert!(is_idle(control, 2));
}

#[test]
fn a_segment_that_a_fork_shares_is_free_when_both_have_let_go() {
    let control = control(8);
    let mut parent = Engine::new(control, 9);
    for _ in 0..30 {
        parent.create();
    }
    parent.write_out();
    for _ in 0..10 {
        parent.create();
    }
    let open = parent.writer.len();
    assert!(open > 0);

    // What the supervisor does for slot 1, and what fork does with the private memory.
    for (to, from) in control.segment_maps[1].iter().zip(&control.segment_maps[0]).take(16) {
        to.store(from.load(Relaxed), Relaxed);
        for bit in (0..64).filter(|bit| from.load(Relaxed) & 1 << bit != 0) {
            control.segment_refs[bit].fetch_add(1, Relaxed);
        }
    }
    let child = SwapSegments::new(control, 0).unwrap();
    for (to, from) in child.counts.iter().zip(parent.file.counts.iter()).take(1000) {
        to.store(from.load(Relaxed), Relaxed);
    }
    child.held.store(parent.file.segments_held(), Relaxed);
    child.after_fork_in_child(1);
    child.let_go(parent.writer.segment().unwrap());
    assert_eq!(control.segments_used.load(Relaxed), 2);
    assert!(child.victims().iter().all(Option::is_none), "shared: cleaning would free nothing");

    let words: Vec<Word> = parent.pages.values().map(|page| page.word).collect();
    for owner in parent.pages.keys().copied().collect::<Vec<_>>() {
        parent.check(owner);
        parent.remove(owner);
    }
    parent.writer.cancel(&parent.file);
    assert_eq!(control.segments_used.load(Relaxed), 1, "the child still needs the first");
    for word in words {
        if let Word::File(location) = word {
            child.free(location.segment(), 1);
        }
    }
    assert!(is_idle(control, 2));
}

#[test]
fn an_encrypted_file_shows_nothing_of_a_page_and_not_that_the_same_was_written_twice() {
    let control = control(1 + 4);
    control.is_swap_encrypted.store(1, Relaxed);
    control.swap_key[1].store(0x5eed, Relaxed);
    let file = scratch_file();
    let swap = SwapSegments::new(control, 0).unwrap();
    let (mut writer, content) = (Writer::new().unwrap(), Dice(3).page());
    let stored = Stored::new(&content);
    let mut reader = Ring::new(file).encrypted_by(SwapCipher::of(control));
    let mut buffer = Aligned::new(SEGMENT_BYTES);
    let mut seen: Vec<Vec<u8>> = Vec::new();
    for _ in 0..3 {
        writer.open(&swap, SegmentPurpose::Reclaim).unwrap();
        let owner = PageNum(7);
        assert!(writer.add(&stored.blob(owner), 0));
        let location = writer.write_out(&swap, &mut reader).unwrap().next().unwrap().location;
        assert_eq!(location, Location::FIRST, "the same place again");
        let plan = location.plan();
        let mut out = [0; PAGE_SIZE];
        let bytes = read(&mut reader, plan, &mut buffer).unwrap();
        assert_eq!(plan.unpack(bytes, location, owner, &mut out), Ok(()));
        assert_eq!(out, content);
        // A part of a segment from its middle on.
        let middle = ReadPlan { offset: 3 * PAGE_SIZE as u64, length: PAGE_SIZE };
        assert!(read(&mut reader, middle, &mut buffer).unwrap().iter().all(|&byte| byte == 0));
        let mut plain = Ring::new(file);
        let raw = read(&mut plain, location.segment().plan(), &mut buffer).unwrap().to_vec();
        assert_eq!(plan.unpack(&raw, location, owner, &mut out), Err(Corrupt));
        let needle = &stored.blob(owner).bytes[..16];
        assert!(!raw.windows(needle.len()).any(|part| part == needle));
        assert!(
            seen.iter().all(
                |other| other.iter().zip(&raw).filter(|(a, b)| a == b).count() < raw.len() / 64
            )
        );
        seen.push(raw);
        swap.free(location.segment(), 1);
    }
}

#[test]
fn a_pinned_segment_outlives_its_last_blob() {
    let control = control(4);
    let mut engine = Engine::new(control, 2);
    engine.create();
    engine.write_out();
    let owner = engine.any().unwrap();
    let Word::File(location) = engine.pages[&owner].word else { panic!("not written") };
    assert!(engine.file.pin(location.segment()));
    engine.remove(owner);
    assert!(!is_idle(control, 1));
    engine.file.unpin(location.segment());
    assert!(is_idle(control, 1));
    assert!(!engine.file.pin(location.segment()));
}

#[test]
fn members_that_take_and_free_at_once_never_share_a_segment() {
    let control = control(40);
    let file = scratch_file();
    let member = |slot: u32| {
        let swap = SwapSegments::new(control, slot).unwrap();
        let (mut writer, mut dice) = (Writer::new().unwrap(), Dice(u64::from(slot) + 5));
        let mut ring = Ring::new(file);
        let mut buffer = Aligned::new(2 * PAGE_SIZE);
        let content = dice.page();
        let stored = Stored::new(&content);
        for round in 0..60 {
            writer.open(&swap, SegmentPurpose::Reclaim).unwrap();
            for page in 0..3 {
                let owner = PageNum(u64::from(slot) << 32 | round << 8 | page);
                assert!(writer.add(&stored.blob(owner), 0));
            }
            for Written { owner, location, .. } in writer.write_out(&swap, &mut ring).unwrap() {
                let plan = location.plan();
                let bytes = read(&mut ring, plan, &mut buffer).unwrap();
                let mut out = [0; PAGE_SIZE];
                assert_eq!(plan.unpack(bytes, location, owner, &mut out), Ok(()));
                swap.free(location.segment(), 1);
            }
        }
    };
    std::thread::scope(|scope| {
        for slot in 0..3 {
            scope.spawn(move || member(slot));
        }
    });
    assert!(is_idle(control, 3));
}
