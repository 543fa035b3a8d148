//! A store of the simulation: it takes its time, fails now and then, and knows what may reach it.
//!
//! What it checks by itself: two operations never meet in one page; nothing is written but what the
//! oracle had when the engine asked whether it may be; no write makes the store longer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use quire::object::BackingStore;
use quire::sys::Errno;
use quire::units::PAGE_SIZE;
use quire_simulated::{Baton, Generator};

/// What a store does wrong; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Failures {
    pub reads_one_in: u32,
    pub writes_one_in: u32,
    pub cuts_one_in: u32,
    pub syncs_one_in: u32,
    /// How often the barrier closes when it is asked, and for how many questions.
    pub closes_one_in: u32,
    pub stays_closed: usize,
}

/// What an object must hold, and what its store does.
pub struct Expected {
    /// As long as the object can become; zeros behind its end.
    pub bytes: Vec<u8>,
    /// The object's length.
    pub len: usize,
    /// Bytes from here on are in doubt: the length is being changed.
    pub doubt: Option<usize>,
    /// Bytes behind the end, in its page, were written: they count as nothing, and are zeros once the
    /// object is longer.
    pub is_scribbled: bool,
    /// Counts the writes to each page, and which of them has reached the store.
    pub versions: Vec<u64>,
    pub flushed: Vec<u64>,
    pub store: Vec<u8>,
    /// What each page was, from the first moment that a private copy may show on, and how much of
    /// it was the object's.
    moments: Vec<Vec<(Vec<u8>, usize)>>,
    /// Pages whose memory has gone bad.
    pub poisoned: BTreeSet<usize>,
    /// Pages of which a read has failed, or may have.
    pub unreadable: BTreeSet<usize>,
    /// Writes and syncs that failed.
    pub failures: u64,
    /// Syncs that failed.
    pub sync_failures: u64,
    pub refusals: u64,
    pub releases: u32,
    closed_for: usize,
    promised: BTreeMap<usize, (Vec<u8>, u64)>,
    reading: BTreeMap<usize, usize>,
    writing: BTreeSet<usize>,
    generator: Generator,
    pub plan: Failures,
}

impl Expected {
    fn new(len: usize, pages_max: usize, seed: u64, plan: Failures) -> Expected {
        let mut generator = Generator::new(seed);
        let mut bytes = vec![0; pages_max * PAGE_SIZE];
        // A few words a page: no page is like another, and a page is cheap to make.
        for at in (0..len).step_by(PAGE_SIZE / 4) {
            let end = (at + 8).min(len);
            bytes[at..end].copy_from_slice(&generator.next_u64().to_ne_bytes()[..end - at]);
        }
        let moment = |page: usize| {
            let inside = len.saturating_sub(page * PAGE_SIZE).min(PAGE_SIZE);
            vec![(bytes[page * PAGE_SIZE..][..PAGE_SIZE].to_vec(), inside)]
        };
        Expected {
            moments: (0..pages_max).map(moment).collect(),
            poisoned: BTreeSet::new(),
            store: bytes[..len].to_vec(),
            bytes,
            len,
            doubt: None,
            is_scribbled: false,
            versions: vec![0; pages_max],
            flushed: vec![0; pages_max],
            unreadable: BTreeSet::new(),
            failures: 0,
            sync_failures: 0,
            refusals: 0,
            releases: 0,
            closed_for: 0,
            promised: BTreeMap::new(),
            reading: BTreeMap::new(),
            writing: BTreeSet::new(),
            generator,
            plan,
        }
    }

    /// Bytes of a page that are certain: all of them, while the length is not changed.
    pub fn certain(&self, page: usize) -> usize {
        let doubt = self.doubt.unwrap_or(usize::MAX);
        doubt.saturating_sub(page * PAGE_SIZE).min(PAGE_SIZE)
    }

    /// Bytes of a page that are the object's, and certain.
    pub fn inside(&self, page: usize) -> usize {
        self.len.saturating_sub(page * PAGE_SIZE).min(self.certain(page))
    }

    pub fn page(&self, page: usize) -> &[u8] {
        &self.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]
    }

    /// The program writes a part of a page.
    pub fn write(&mut self, page: usize, within: usize, bytes: &[u8]) {
        let at = page * PAGE_SIZE + within;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.versions[page] += 1;
        self.note_moment(page);
    }

    /// The page's memory goes bad: what of it is not in the store may be lost.
    pub fn poison(&mut self, page: usize) {
        self.poisoned.insert(page);
        self.unreadable.insert(page);
        self.flushed[page] = self.versions[page];
    }

    /// Nothing of the page is on its way to the store: from now on it is what that has.
    pub fn unpoison(&mut self, page: usize) {
        if self.poisoned.remove(&page) {
            let at = page * PAGE_SIZE;
            let end = (at + PAGE_SIZE).min(self.len).max(at);
            self.bytes[at..at + PAGE_SIZE].fill(0);
            self.bytes[at..end].copy_from_slice(&self.store[at..end]);
            self.note_moment(page);
        }
    }

    fn note_moment(&mut self, page: usize) {
        let inside = self.len.saturating_sub(page * PAGE_SIZE).min(PAGE_SIZE);
        let now = (self.page(page).to_vec(), inside);
        if self.moments[page].last() != Some(&now) {
            self.moments[page].push(now);
        }
    }

    /// The number of a page's content now.
    pub fn moment(&self, page: usize) -> usize {
        self.moments[page].len() - 1
    }

    /// The first moment from `since` on at which a page was as `bytes` are, as far as it was the
    /// object's; while the length changes, as far as is certain.
    pub fn moment_of(&self, page: usize, since: usize, bytes: &[u8]) -> Option<usize> {
        let certain = self.certain(page);
        let was = |moment: &usize| {
            let (then, inside) = &self.moments[page][*moment];
            let compared = (*inside).min(certain);
            (*inside > 0 || certain < PAGE_SIZE) && bytes[..compared] == then[..compared]
        };
        (since..self.moments[page].len()).find(was)
    }

    /// The change of the length is over.
    pub fn resized(&mut self, len: usize) {
        if len < self.len {
            self.bytes[len..].fill(0);
            self.forget_from(len.div_ceil(PAGE_SIZE));
            self.poisoned.split_off(&len.div_ceil(PAGE_SIZE));
        }
        let changed = self.len.min(len) / PAGE_SIZE..self.len.max(len).div_ceil(PAGE_SIZE);
        self.len = len;
        self.doubt = None;
        self.is_scribbled = false;
        changed.for_each(|page| self.note_moment(page));
    }

    /// The change of the length has failed: nothing has changed, and every byte that was written
    /// must still reach the store.
    pub fn not_resized(&mut self) {
        self.doubt = None;
    }

    /// The store has grown by what another process wrote, and the object follows.
    pub fn followed(&mut self, len: usize) {
        let from = self.len;
        let (bytes, store) = (&mut self.bytes, &self.store);
        bytes[from..len].copy_from_slice(&store[from..len]);
        self.len = len;
        self.doubt = None;
        self.is_scribbled = false;
        (from / PAGE_SIZE..len.div_ceil(PAGE_SIZE)).for_each(|page| self.note_moment(page));
    }

    /// What was written to these pages is gone, and need not reach the store.
    fn forget_from(&mut self, page: usize) {
        for page in page..self.versions.len() {
            self.flushed[page] = self.versions[page];
        }
    }
}

/// The store, and the oracle of its object.
pub struct SimStore {
    baton: Arc<Baton>,
    /// No thread gives the baton away while it is locked.
    expected: Mutex<Expected>,
}

fn pages_of(offset: u64, bytes: usize) -> std::ops::Range<usize> {
    offset as usize / PAGE_SIZE..(offset as usize + bytes).div_ceil(PAGE_SIZE)
}

impl SimStore {
    /// A store that lives as long as the process: the engine wants it so. What it holds goes by
    /// [`Self::clear`].
    pub fn new(
        baton: &Arc<Baton>,
        len: usize,
        pages_max: usize,
        seed: u64,
        plan: Failures,
    ) -> &'static SimStore {
        let expected = Mutex::new(Expected::new(len, pages_max, seed, plan));
        Box::leak(Box::new(SimStore { baton: Arc::clone(baton), expected }))
    }

    pub fn expected(&self) -> MutexGuard<'_, Expected> {
        self.expected.lock().unwrap()
    }

    /// Nothing fails from now on.
    pub fn mend(&self) {
        let mut expected = self.expected();
        expected.plan = Failures::default();
        expected.closed_for = 0;
    }

    pub fn clear(&self) {
        let mut expected = self.expected();
        expected.bytes = Vec::new();
        expected.store = Vec::new();
        expected.promised.clear();
        expected.moments = Vec::new();
    }

    /// Others come in, as often as the seed says.
    fn take_time(&self) {
        let rounds = self.expected().generator.below(6);
        for round in 0..rounds {
            if round % 2 == 0 { self.baton.relax() } else { self.baton.step() }
        }
    }

    /// Reads, and fails one time in so many.
    fn read_or_fail(&self, offset: u64, into: &mut [u8], one_in: u32) -> Result<(), Errno> {
        let pages = pages_of(offset, into.len());
        {
            let mut expected = self.expected();
            for page in pages.clone() {
                assert!(!expected.writing.contains(&page), "page {page} is read and written");
                *expected.reading.entry(page).or_insert(0) += 1;
            }
        }
        self.take_time();
        let mut expected = self.expected();
        for page in pages.clone() {
            let count = expected.reading.get_mut(&page).expect("being read");
            *count -= 1;
            if *count == 0 {
                expected.reading.remove(&page);
            }
        }
        if expected.generator.one_in(one_in) {
            expected.unreadable.extend(pages);
            return Err(Errno::IO);
        }
        let start = (offset as usize).min(expected.store.len());
        let there = (expected.store.len() - start).min(into.len());
        into[..there].copy_from_slice(&expected.store[start..start + there]);
        into[there..].fill(0);
        Ok(())
    }

    fn begin_write(&self, offset: u64, from: &[u8]) {
        let mut expected = self.expected();
        for (page, part) in pages_of(offset, from.len()).zip(from.chunks(PAGE_SIZE)) {
            let (promised, _) =
                expected.promised.get(&page).expect("the barrier was not asked whether it may");
            let certain = part.len().min(promised.len());
            assert!(part[..certain] == promised[..certain], "page {page} was never so");
            assert!(expected.writing.insert(page), "page {page} is written twice at a time");
            assert!(!expected.reading.contains_key(&page), "page {page} is read and written");
        }
    }

    fn end_write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        let mut expected = self.expected();
        let one_in = expected.plan.writes_one_in;
        let fails = expected.generator.one_in(one_in);
        // A part may be written.
        let bytes = if fails { expected.generator.below(from.len() + 1) } else { from.len() };
        let start = offset as usize;
        let length = expected.store.len();
        assert!(
            start + from.len() <= length,
            "a write at {start} makes the store longer: {length}"
        );
        expected.store[start..start + bytes].copy_from_slice(&from[..bytes]);
        for page in pages_of(offset, from.len()) {
            expected.writing.remove(&page);
            let (_, version) = expected.promised.remove(&page).expect("promised");
            if !fails {
                expected.flushed[page] = expected.flushed[page].max(version);
            }
        }
        expected.failures += u64::from(fails);
        if fails { Err(Errno::IO) } else { Ok(()) }
    }
}

impl BackingStore for SimStore {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        let one_in = self.expected().plan.reads_one_in;
        self.read_or_fail(offset, into, one_in)
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        // Now and then it is no error, and cannot be done here all the same.
        let is_refused = self.expected().generator.one_in(8);
        if is_refused {
            return false;
        }
        self.read_or_fail(offset, into, 0).is_ok()
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        self.begin_write(offset, from);
        self.take_time();
        self.end_write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.take_time();
        let mut expected = self.expected();
        let one_in = expected.plan.cuts_one_in;
        if expected.generator.one_in(one_in) {
            return Err(Errno::IO);
        }
        let behind = bytes.div_ceil(PAGE_SIZE as u64) as usize;
        let late = expected.writing.range(behind..).next();
        assert!(late.is_none(), "the store is cut at {bytes} while {late:?} is written");
        expected.store.resize(bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> Result<(), Errno> {
        self.take_time();
        let mut expected = self.expected();
        let one_in = expected.plan.syncs_one_in;
        let fails = expected.generator.one_in(one_in);
        expected.failures += u64::from(fails);
        expected.sync_failures += u64::from(fails);
        if fails { Err(Errno::IO) } else { Ok(()) }
    }

    fn release(&self) {
        let name = std::thread::current().name().unwrap_or("").to_string();
        assert!(!name.contains("handler"), "what a store does at its end may take long");
        self.expected().releases += 1;
    }

    fn may_write(&self, offset: u64, bytes: usize) -> bool {
        let mut expected = self.expected();
        let one_in = expected.plan.closes_one_in;
        if expected.closed_for == 0 && expected.generator.one_in(one_in) {
            expected.closed_for = expected.plan.stays_closed;
        }
        if expected.closed_for > 0 {
            expected.closed_for -= 1;
            expected.refusals += 1;
            return false;
        }
        for page in pages_of(offset, bytes) {
            let certain = expected.certain(page);
            let now = (expected.page(page)[..certain].to_vec(), expected.versions[page]);
            expected.promised.insert(page, now);
        }
        true
    }
}
