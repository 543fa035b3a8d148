use std::collections::HashMap;
use std::sync::Mutex as StdMutex;
use std::sync::atomic::AtomicUsize;
use std::vec::Vec;

use super::super::compress::{Compressed, Compressor, Strength, page_hash};
use super::*;
use crate::control::slabs::slots_for;
use crate::units::PAGE_SIZE;

/// An account with a limit.
pub(super) struct Purse {
    held: AtomicUsize,
    limit: usize,
}

impl Purse {
    pub fn with(limit: usize) -> Purse {
        Purse { held: AtomicUsize::new(0), limit }
    }

    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }
}

impl Payer for Purse {
    fn try_charge(&self, pages: usize) -> bool {
        self.held
            .fetch_update(Relaxed, Relaxed, |held| Some(held + pages).filter(|h| *h <= self.limit))
            .is_ok()
    }

    fn uncharge(&self, pages: usize) {
        assert!(self.held.fetch_sub(pages, Relaxed) >= pages, "uncharged more than was charged");
    }
}

/// The same numbers from the same seed, on every machine.
pub(super) struct Dice(pub u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }

    /// A page that packs to anything between a few bytes and not at all.
    pub fn page(&mut self) -> PageBytes {
        let random = self.roll(PAGE_SIZE * 5 / 4).min(PAGE_SIZE);
        self.page_with(random)
    }

    /// A page that begins with so many bytes that do not pack.
    pub fn page_with(&mut self, random: usize) -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = if at < random { self.roll(256) as u8 } else { (at % 7) as u8 };
        }
        page
    }
}

pub(super) struct Packer(Compressor);

impl Packer {
    pub fn new() -> Packer {
        Packer(Compressor::default())
    }

    pub fn pack<'a>(&'a mut self, page: &'a PageBytes) -> (Packing, &'a [u8]) {
        match self.0.compress(page, Strength::Lz4) {
            Compressed::Packed(packing, block) => (packing, block),
            Compressed::Raw => (Packing::Raw, page),
            Compressed::Same(_) => panic!("no page of these tests has a pattern"),
        }
    }

    pub fn store(
        &mut self,
        pool: &Zpool,
        owner: PageNum,
        page: &PageBytes,
        purse: &Purse,
    ) -> Result<Handle, Full> {
        let (kind, bytes) = self.pack(page);
        pool.store(owner, kind, bytes, page_hash(page), purse)
    }
}

pub(super) fn load(pool: &Zpool, handle: Handle, owner: PageNum) -> Result<PageBytes, Corrupt> {
    let mut out = [0; PAGE_SIZE];
    // SAFETY: one thread, or the caller holds the owner's lock.
    unsafe { pool.load(handle, owner, &mut out) }.map(|()| out)
}

pub(super) fn free(pool: &Zpool, handle: Handle, purse: &Purse) {
    // SAFETY: as in `load`.
    unsafe { pool.free_all(&[handle.get()], purse) };
}

/// What `step` checks the pool against.
struct Oracle {
    pages: HashMap<PageNum, (Handle, PageBytes)>,
    dice: Dice,
    packer: Packer,
}

impl Oracle {
    fn any(&mut self) -> Option<PageNum> {
        let mut owners: Vec<PageNum> = self.pages.keys().copied().collect();
        owners.sort();
        let count = owners.len();
        (count != 0).then(|| owners[self.dice.roll(count)])
    }

    fn step(&mut self, pool: &Zpool, purse: &Purse) {
        match self.dice.roll(20) {
            0..9 => {
                let owner = PageNum(self.dice.roll(1 << 30) as u64);
                let page = self.dice.page();
                if self.pages.contains_key(&owner) {
                    return;
                }
                if let Ok(handle) = self.packer.store(pool, owner, &page, purse) {
                    self.pages.insert(owner, (handle, page));
                }
            }
            9..16 => {
                // One, or several of any sizes at once.
                let is_many = self.pages.len() > 300 && self.dice.roll(4) == 0;
                let count = if is_many { self.dice.roll(FREED_AT_ONCE + 1) } else { 1 };
                let mut handles = Vec::new();
                while handles.len() < count
                    && let Some(owner) = self.any()
                {
                    let (handle, page) = self.pages.remove(&owner).unwrap();
                    assert_eq!(load(pool, handle, owner), Ok(page));
                    handles.push(handle.get());
                }
                // SAFETY: one thread.
                unsafe { pool.free_all(&handles, purse) };
            }
            16..18 => {
                let Some(owner) = self.any() else { return };
                let (handle, page) = self.pages[&owner];
                assert_eq!(load(pool, handle, owner), Ok(page));
                assert_eq!(load(pool, handle, owner.add(1)), Err(Corrupt));
            }
            18 => {
                let Some(owner) = self.any() else { return };
                let to = PageNum(owner.0 + (1 << 40));
                let (handle, page) = self.pages.remove(&owner).unwrap();
                // SAFETY: one thread.
                assert_eq!(unsafe { pool.set_owner(handle, owner, to, purse) }, Ok(handle));
                if let Some((old, _)) = self.pages.insert(to, (handle, page)) {
                    free(pool, old, purse);
                }
            }
            _ => {
                let moves = 1 + self.dice.roll(200);
                let before = pool.pages();
                let (dice, pages) = (&mut self.dice, &mut self.pages);
                let given = pool.compact(
                    moves,
                    |owner, old, new| {
                        let entry = pages.get_mut(&owner).expect("only live blobs move");
                        assert_eq!(entry.0, old);
                        assert_eq!(load(pool, new, owner), Ok(entry.1));
                        let is_free = dice.roll(8) != 0;
                        if is_free {
                            entry.0 = new;
                        }
                        is_free
                    },
                    purse,
                );
                assert_eq!(pool.pages(), before - given);
            }
        }
        assert_eq!(pool.pages(), purse.held());
    }
}

#[test]
fn the_pool_behaves_like_a_map_and_gives_every_page_back() {
    for (seed, limit) in [(1, 4000), (0xfeed, 120), (77, 4000)] {
        let pool = Zpool::private(slots_for(limit * PAGE_SIZE)).unwrap();
        let purse = Purse::with(limit);
        let mut oracle = Oracle { pages: HashMap::new(), dice: Dice(seed), packer: Packer::new() };
        for _ in 0..6000 {
            oracle.step(&pool, &purse);
        }
        assert!(oracle.pages.len() > 50);
        for (owner, (handle, page)) in oracle.pages.drain() {
            assert_eq!(load(&pool, handle, owner), Ok(page), "seed {seed}");
            free(&pool, handle, &purse);
        }
        pool.compact(usize::MAX, |_, _, _| panic!("nothing is left to move"), &purse);
        assert_eq!((pool.pages(), purse.held()), (0, 0), "seed {seed}");
    }
}

#[test]
fn a_damaged_blob_is_never_handed_out_as_data() {
    let pool = Zpool::private(slots_for(1 << 20)).unwrap();
    let purse = Purse::with(256);
    let mut packer = Packer::new();
    let (owner, mut dice) = (PageNum(5), Dice(3));
    for random in [100, 1500, PAGE_SIZE] {
        let page = dice.page_with(random);
        let handle = packer.store(&pool, owner, &page, &purse).unwrap();
        let spot = pool.spot(handle).unwrap();
        let length = pool.header(spot).unwrap().length;
        let bytes = pool.bytes(spot, length).unwrap();
        let words = pool.header_words(spot);
        for at in 0..length {
            // SAFETY: inside the blob, and this is the only thread.
            unsafe { *bytes.add(at) ^= 0x40 };
            if let Ok(out) = load(&pool, handle, owner) {
                assert!(out == page, "byte {at} of {length}");
            }
            // SAFETY: as above.
            unsafe { *bytes.add(at) ^= 0x40 };
        }
        for bit in 0..128 {
            words[bit / 64].fetch_xor(1 << (bit % 64), Relaxed);
            assert_eq!(load(&pool, handle, owner), Err(Corrupt), "bit {bit} of the header");
            words[bit / 64].fetch_xor(1 << (bit % 64), Relaxed);
        }
        assert_eq!(load(&pool, handle, owner), Ok(page));
        free(&pool, handle, &purse);
        assert_eq!(load(&pool, handle, owner), Err(Corrupt));
    }
}

#[test]
fn no_number_makes_the_pool_read_outside_of_its_blobs() {
    let pool = Zpool::private(slots_for(1 << 20)).unwrap();
    let purse = Purse::with(256);
    let (mut packer, mut dice) = (Packer::new(), Dice(8));
    let live: Vec<Handle> = (0..40)
        .map(|owner| packer.store(&pool, PageNum(owner), &dice.page(), &purse).unwrap())
        .collect();
    let numbers = (1..1 << 16).chain((0..32).map(|bit| 1 << bit)).chain([u32::MAX]);
    for handle in numbers.filter_map(Handle::new) {
        assert_eq!(pool.spot(handle).is_some(), live.contains(&handle));
    }
}

#[test]
fn a_full_account_uses_up_the_room_there_is_before_it_fails() {
    let pool = Zpool::private(slots_for(64 * PAGE_SIZE)).unwrap();
    let purse = Purse::with(64);
    let (mut packer, mut dice) = (Packer::new(), Dice(21));
    let mut handles = Vec::new();
    let mut failures = 0;
    while failures < 200 {
        match packer.store(&pool, PageNum(1), &dice.page(), &purse) {
            Ok(handle) => handles.push(handle),
            Err(Full) => failures += 1,
        }
    }
    assert!(purse.held() > 56 && purse.held() <= 64);
    for handle in handles {
        free(&pool, handle, &purse);
    }
    pool.compact(usize::MAX, |_, _, _| false, &purse);
    assert_eq!(purse.held(), 0);
}

#[test]
fn compaction_gets_back_most_of_what_scattered_frees_left() {
    let pool = Zpool::private(slots_for(64 << 20)).unwrap();
    let purse = Purse::with(16 << 10);
    let (mut packer, mut dice) = (Packer::new(), Dice(99));
    let mut words: HashMap<PageNum, Handle> = (0..4000)
        .map(PageNum)
        .map(|owner| (owner, packer.store(&pool, owner, &dice.page(), &purse).unwrap()))
        .collect();
    let before = purse.held();
    // A slab of each class may be half empty.
    assert!(pool.fragments() * 8 < before, "{} of {before} pages", pool.fragments());
    for owner in (0..4000).filter(|owner| owner % 4 != 0).map(PageNum) {
        free(&pool, words.remove(&owner).unwrap(), &purse);
    }
    let sparse = purse.held();
    assert!(pool.fragments() * 2 > sparse, "{} of {sparse} pages", pool.fragments());
    let replace = |owner: PageNum, old, new| words.insert(owner, new) == Some(old);
    let given = pool.compact(usize::MAX, replace, &purse);
    assert_eq!(purse.held(), sparse - given);
    assert!(pool.fragments() * 4 < purse.held(), "{} left", pool.fragments());
    assert!(purse.held() < before * 3 / 8, "{before} pages, {sparse} sparse, {given} given back");
}

/// Two threads use the pool while a third compacts; each page has a lock, as in the engine.
#[test]
fn blobs_move_safely_while_others_are_stored_loaded_and_freed() {
    const PAGES: usize = 500;
    type Page = StdMutex<Option<(Handle, PageBytes)>>;
    let pool = Zpool::private(slots_for(64 << 20)).unwrap();
    let purse = Purse::with(16 << 10);
    let words: Vec<Page> = (0..PAGES).map(|_| StdMutex::new(None)).collect();
    let running = AtomicUsize::new(2);
    let user = |seed| {
        let (mut packer, mut dice) = (Packer::new(), Dice(seed));
        for _ in 0..8000 {
            let number = dice.roll(PAGES);
            let owner = PageNum(number as u64);
            let mut word = words[number].lock().unwrap();
            match word.take() {
                Some((handle, page)) => {
                    assert_eq!(load(&pool, handle, owner), Ok(page));
                    free(&pool, handle, &purse);
                }
                None => {
                    // Few classes, so that there is always something to move.
                    let random = 700 * (1 + dice.roll(2));
                    let page = dice.page_with(random);
                    let handle = packer.store(&pool, owner, &page, &purse).unwrap();
                    *word = Some((handle, page));
                }
            }
        }
        running.fetch_sub(1, Relaxed);
    };
    let mut moved = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| user(11));
        scope.spawn(|| user(12));
        while running.load(Relaxed) != 0 {
            pool.compact(
                1000,
                |owner, old, new| {
                    let Ok(mut word) = words[owner.index()].try_lock() else {
                        return false;
                    };
                    let is_same = word.as_ref().is_some_and(|(handle, _)| *handle == old);
                    if let Some((handle, _)) = word.as_mut().filter(|_| is_same) {
                        *handle = new;
                        moved += 1;
                    }
                    is_same
                },
                &purse,
            );
        }
    });
    assert!(moved > 0);
    for (number, word) in words.into_iter().enumerate() {
        if let Some((handle, page)) = word.into_inner().unwrap() {
            assert_eq!(load(&pool, handle, PageNum(number as u64)), Ok(page));
            free(&pool, handle, &purse);
        }
    }
    pool.compact(usize::MAX, |_, _, _| panic!("nothing is left to move"), &purse);
    assert_eq!((pool.pages(), purse.held()), (0, 0));
}
