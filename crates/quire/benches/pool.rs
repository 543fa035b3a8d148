//! The cost of storing a packed page and of loading it, in nanoseconds, in private memory and in a
//! memfd: `cargo bench -p quire --bench pool`. Slabs are fresh in the first round, and come back from
//! the kernel anew in the others (`given back`), or are used again as they are (`kept`).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use quire::control::slabs::{SlabTable, slots_for};
use quire::swap::Payer;
use quire::swap::compress::{Compressed, Compressor, PageBytes, Strength, page_hash};
use quire::swap::zpool::{FREED_AT_ONCE, Handle, Zpool};
use quire::units::{PAGE_SIZE, PageNum};

const PAGES: u64 = 16_384;
const ROUNDS: usize = 7;

struct Purse(AtomicUsize);

impl Payer for Purse {
    fn try_charge(&self, pages: usize) -> bool {
        self.0.fetch_add(pages, Relaxed);
        true
    }

    fn uncharge(&self, pages: usize) {
        self.0.fetch_sub(pages, Relaxed);
    }
}

/// A page of which a quarter does not pack.
fn page() -> PageBytes {
    let mut state = 88_172_645_463_325_252_u64;
    let mut page = [0; PAGE_SIZE];
    for byte in &mut page[..PAGE_SIZE / 4] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    page
}

/// Nanoseconds a page for storing, loading and freeing all pages, the median of the rounds.
fn measure(pool: &Zpool, gives_back: bool) -> [f64; 3] {
    let (purse, page) = (Purse(AtomicUsize::new(0)), page());
    let mut compressor = Compressor::default();
    let Compressed::Packed(packing, packed) = compressor.compress(&page, Strength::Lz4) else {
        unreachable!("it packs")
    };
    let hash = page_hash(&page);
    let mut rounds: Vec<[f64; 3]> = (0..ROUNDS)
        .map(|_| {
            let mut handles: Vec<Handle> = Vec::with_capacity(PAGES as usize);
            let store = time(|| {
                for owner in 0..PAGES {
                    let owner = PageNum(owner);
                    handles.push(pool.store(owner, packing, packed, hash, &purse).unwrap());
                }
            });
            let mut out = [0; PAGE_SIZE];
            let load = time(|| {
                for (owner, handle) in handles.iter().enumerate() {
                    // SAFETY: one thread.
                    unsafe { pool.load(*handle, PageNum(owner as u64), &mut out) }.unwrap();
                }
            });
            let free = time(|| {
                for some in handles.chunks(FREED_AT_ONCE) {
                    let some: Vec<u32> = some.iter().map(|handle| handle.get()).collect();
                    // SAFETY: one thread.
                    unsafe { pool.free_all(&some, &purse) };
                }
                if gives_back {
                    pool.trim(&purse);
                }
            });
            [store, load, free]
        })
        .collect();
    [0, 1, 2].map(|at| {
        rounds.sort_by(|a, b| a[at].total_cmp(&b[at]));
        rounds[ROUNDS / 2][at]
    })
}

fn time(act: impl FnOnce()) -> f64 {
    let start = Instant::now();
    act();
    start.elapsed().as_nanos() as f64 / PAGES as f64
}

fn main() {
    let slots = slots_for(64 << 20);
    let memfd = rustix::fs::memfd_create(c"pool", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, SlabTable::pool_bytes(slots) as u64).unwrap();
    let private = Zpool::private(slots).unwrap();
    // SAFETY: made for so many slots just now, and nothing shrinks it.
    let shared = unsafe { Zpool::shared(memfd.as_fd(), slots, 0) }.unwrap();
    println!("ns a page                  store    load    free");
    for (name, pool, gives_back) in [
        ("private", &private, true),
        ("memfd, given back", &shared, true),
        ("memfd, kept", &shared, false),
    ] {
        let [store, load, free] = measure(pool, gives_back);
        println!("{name:<24} {store:>7.0} {load:>7.0} {free:>7.0}");
    }
}
