//! A file beside a plain vector of bytes: whatever operations come, they stay equal.

use std::fs;

use proptest::prelude::*;
use quire::store::{FileStore, Store};
use quire_test_stores::VecStore;

use super::{Buffer, PAGE, pattern, ways};

const PAGES: usize = 40;

#[derive(Clone, Debug)]
enum Step {
    Read { page: usize, pages: usize, is_aligned: bool },
    Write { page: usize, bytes: usize, seed: u64, is_aligned: bool },
    ReadAll { pages: Vec<usize> },
    WriteAll { pages: Vec<usize>, last_bytes: usize, seed: u64 },
    SetLen(usize),
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    let some_pages = proptest::collection::vec(page.clone(), 1..80);
    // Lengths of whole pages as often as others.
    let bytes = prop_oneof![1..5 * PAGE, (1..5_usize).prop_map(|pages| pages * PAGE)];
    prop_oneof![
        4 => (page.clone(), 1..6_usize, any::<bool>())
            .prop_map(|(page, pages, is_aligned)| Step::Read { page, pages, is_aligned }),
        4 => (page, bytes.clone(), any::<u64>(), any::<bool>()).prop_map(
            |(page, bytes, seed, is_aligned)| Step::Write { page, bytes, seed, is_aligned }
        ),
        2 => some_pages.clone().prop_map(|pages| Step::ReadAll { pages }),
        2 => (some_pages, 1..=PAGE, any::<u64>()).prop_map(|(mut pages, last_bytes, seed)| {
            pages.sort_unstable();
            pages.dedup();
            Step::WriteAll { pages, last_bytes, seed }
        }),
        2 => (0..PAGES * PAGE).prop_map(Step::SetLen),
        1 => Just(Step::Sync),
    ]
}

fn buffer(bytes: usize, is_aligned: bool) -> Buffer {
    if is_aligned { Buffer::aligned(bytes) } else { Buffer::misaligned(bytes) }
}

fn offset(page: usize) -> u64 {
    (page * PAGE) as u64
}

/// Does a step; returns what was read.
fn take(store: &dyn Store, step: &Step) -> Vec<u8> {
    match step {
        Step::Read { page, pages, is_aligned } => {
            let mut buffer = buffer(pages * PAGE, *is_aligned);
            store.read(offset(*page), buffer.get()).unwrap();
            return buffer.get().into();
        }
        Step::Write { page, bytes, seed, is_aligned } => {
            let mut buffer = buffer(*bytes, *is_aligned);
            buffer.get().copy_from_slice(&pattern(*seed, *bytes));
            store.write(offset(*page), buffer.get()).unwrap();
        }
        Step::ReadAll { pages } => {
            let mut buffers: Vec<_> = pages.iter().map(|_| Buffer::aligned(PAGE)).collect();
            for (buffer, page) in buffers.iter_mut().zip(pages) {
                store.read(offset(*page), buffer.get()).unwrap();
            }
            return buffers.iter_mut().flat_map(|buffer| buffer.get().to_vec()).collect();
        }
        Step::WriteAll { pages, last_bytes, seed } => {
            let lengths =
                (1..=pages.len()).map(|n| if n == pages.len() { *last_bytes } else { PAGE });
            let mut buffers: Vec<_> = lengths
                .zip(*seed % 1000..)
                .map(|(bytes, seed)| Buffer::of(&pattern(seed, bytes)))
                .collect();
            for (buffer, page) in buffers.iter_mut().zip(pages) {
                store.write(offset(*page), buffer.get()).unwrap();
            }
        }
        Step::SetLen(bytes) => store.set_len(*bytes as u64).unwrap(),
        Step::Sync => store.sync().unwrap(),
    }
    store.len().unwrap().to_le_bytes().into()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn a_file_is_what_a_vector_of_bytes_is(steps in proptest::collection::vec(step(), 1..60)) {
        for (folder, options) in ways() {
            let path = folder.path("f");
            let store = FileStore::open(&path, options.clone()).unwrap();
            let oracle = VecStore::new(Vec::new());
            for step in &steps {
                let (found, expected) = (take(&store, step), take(&oracle, step));
                prop_assert!(found == expected, "{:?} {:?}", options, step);
            }
            prop_assert!(fs::read(&path).unwrap() == oracle.bytes(), "{:?}", options);
        }
    }
}
