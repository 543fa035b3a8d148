//! Files, by every way of reading and writing them.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;

use quire::store::{Cause, Direct, FileOptions, FileStore, Store};
use quire::sys::cachestat::cached_pages;

use super::{Buffer, Folder, PAGE, Random, pattern, ways};

#[test]
fn a_file_of_any_length_is_written_with_nothing_behind_its_end() {
    for (folder, options) in ways() {
        for bytes in [0, 1, 511, 512, 513, 4095, 4096, 4097, 12_287, (1 << 20) + 7] {
            let path = folder.path(&format!("{bytes}"));
            let content = pattern(bytes as u64, bytes);
            let store = FileStore::open(&path, options.clone()).unwrap();
            store.write(0, Buffer::of(&content).get()).unwrap();
            assert!(fs::read(&path).unwrap() == content, "{options:?} {bytes}");
            assert_eq!(store.len().unwrap(), bytes as u64);
            // What lies behind the end reads as zeros, and still does once it is inside.
            let whole = bytes.next_multiple_of(PAGE) + PAGE;
            let mut expected = content;
            expected.resize(whole, 0);
            for _ in 0..2 {
                let mut buffer = Buffer::aligned(whole);
                store.read(0, buffer.get()).unwrap();
                assert!(buffer.get() == expected, "{options:?} {bytes}");
                store.set_len(whole as u64).unwrap();
            }
            assert!(fs::read(&path).unwrap() == expected, "{options:?} {bytes}");
        }
    }
}

#[test]
fn the_last_page_can_be_written_again_at_its_true_length() {
    for (folder, options) in ways() {
        let bytes = 5 * PAGE + 1234;
        let path = folder.file("f", &pattern(1, bytes));
        let store = FileStore::open(&path, options).unwrap();
        for seed in 2..6 {
            let content = pattern(seed, bytes);
            let mut buffer = Buffer::of(&content);
            let (pages, last) = buffer.get().split_at(5 * PAGE);
            store.write(5 * PAGE as u64, last).unwrap();
            store.write(0, pages).unwrap();
            store.sync().unwrap();
            assert!(fs::read(&path).unwrap() == content);
        }
    }
}

#[test]
fn direct_io_leaves_nothing_in_the_kernels_cache_and_buffered_io_does() {
    let folder = Folder::on_disk();
    let bytes = 64 * PAGE;
    let path = folder.path("f");
    for (direct, is_cached) in [(Direct::On, false), (Direct::Off, true)] {
        let options = FileOptions::read_write().create().direct(direct);
        let store = FileStore::open(&path, options).unwrap();
        assert_eq!(store.is_direct(), direct == Direct::On);
        let file = File::open(&path).unwrap();
        store.write(0, Buffer::of(&pattern(3, bytes)).get()).unwrap();
        let mut buffer = Buffer::aligned(bytes);
        store.read(0, buffer.get()).unwrap();
        let (one, other) = buffer.get().split_at_mut(bytes / 2);
        store.read(0, one).unwrap();
        store.read(bytes as u64 / 2, other).unwrap();
        assert!(buffer.get() == pattern(3, bytes));
        match cached_pages(file.as_fd(), 0, bytes as u64) {
            Ok(pages) => assert_eq!(pages, if is_cached { 64 } else { 0 }, "{direct:?}"),
            Err(errno) => super::cannot_run(&format!("cachestat: {errno}")),
        }
    }
}

#[test]
fn auto_is_direct_where_the_file_is_not_cached() {
    let folder = Folder::on_disk();
    let path = folder.file("f", &pattern(4, 1 << 20));
    let open = || FileStore::open(&path, FileOptions::read_only()).unwrap();
    assert!(!open().is_direct(), "just written, so it is in the cache");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert!(open().is_direct());
    let memory = Folder::in_memory();
    let empty = FileStore::open(memory.path("f"), FileOptions::read_write().create()).unwrap();
    assert!(!empty.is_direct(), "it lives in the cache");
}

#[test]
fn a_file_truncated_by_another_reads_as_zeros_within_a_page_and_says_so_beyond() {
    for (folder, options) in ways() {
        let content = pattern(5, 10 * PAGE);
        let path = folder.file("f", &content);
        let store = FileStore::open(&path, options.clone()).unwrap();
        let left = 3 * PAGE + 100;
        OpenOptions::new().write(true).open(&path).unwrap().set_len(left as u64).unwrap();
        let mut expected = content[..left].to_vec();
        expected.resize(10 * PAGE, 0);
        let read = |from: usize, pages: usize, expected: &[u8]| {
            let mut buffer = Buffer::aligned(pages * PAGE);
            let result = store.read((from * PAGE) as u64, buffer.get());
            assert!(buffer.get() == &expected[from * PAGE..][..pages * PAGE], "{options:?}");
            result.map_err(|error| error.cause().clone())
        };
        assert_eq!(read(0, 4, &expected), Ok(()));
        let shrunk = Cause::Shrunk { len: left as u64 };
        assert_eq!(read(3, 3, &expected), Err(shrunk.clone()));
        assert_eq!(read(9, 1, &expected), Err(shrunk.clone()));
        let (mut inside, mut gone) = (Buffer::aligned(PAGE), Buffer::aligned(PAGE));
        store.read(0, inside.get()).unwrap();
        assert_eq!(store.read(5 * PAGE as u64, gone.get()).unwrap_err().cause(), &shrunk);
        // The thread that asked for the length knows, and so does the one that cut it.
        assert_eq!(store.len().unwrap(), left as u64);
        assert_eq!(read(3, 3, &expected), Ok(()));
        store.set_len(100).unwrap();
        expected[100..].fill(0);
        assert_eq!(read(0, 4, &expected), Ok(()));
        // What a write extends is there again for all.
        store.write(2 * PAGE as u64, &[1; PAGE]).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        expected.fill(0);
        assert_eq!(read(0, 3, &expected), Err(Cause::Shrunk { len: 0 }));
    }
}

#[test]
fn many_threads_read_and_write_their_own_parts_of_a_file() {
    const SHARE: usize = 96 * PAGE;
    const THREADS: usize = 4;
    for (folder, options) in ways() {
        let path = folder.file("f", &pattern(6, THREADS * SHARE));
        let plain = File::open(&path).unwrap();
        let store = FileStore::open(&path, options).unwrap();
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (store, plain) = (&store, &plain);
                scope.spawn(move || reads_and_writes(store, plain, (number * SHARE) as u64, SHARE));
            }
        });
    }
}

/// Reads and writes on `bytes` bytes from `base` on, which nothing else writes.
fn reads_and_writes(store: &FileStore, plain: &File, base: u64, bytes: usize) {
    let mut random = Random(base | 1);
    let pages = bytes / PAGE;
    for round in 0..12 {
        let count = 1 + random.below(100);
        let contents: Vec<_> =
            (0..pages).map(|page| pattern(base + page as u64 + round, PAGE)).collect();
        let mut buffers: Vec<_> =
            contents.iter().take(count).map(|bytes| Buffer::of(bytes)).collect();
        for (buffer, page) in buffers.iter_mut().zip(0..) {
            store.write(base + page * PAGE as u64, buffer.get()).unwrap();
        }
        let mut reads: Vec<(u64, Buffer)> = (0..count)
            .map(|_| {
                let first = random.below(pages);
                let length = (1 + random.below(4)).min(pages - first) * PAGE;
                let make = if random.below(5) == 0 { Buffer::misaligned } else { Buffer::aligned };
                (base + (first * PAGE) as u64, make(length))
            })
            .collect();
        for (at, buffer) in &mut reads {
            store.read(*at, buffer.get()).unwrap();
            let mut expected = vec![0; buffer.bytes];
            plain.read_exact_at(&mut expected, *at).unwrap();
            assert!(buffer.get() == expected, "round {round} at {at}");
        }
    }
}
