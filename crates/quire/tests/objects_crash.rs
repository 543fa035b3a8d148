//! The files that a crash leaves behind of objects that are written through mappings.

#[path = "common/objects.rs"]
mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Dir, PAGE, Watchdog, space, wait_until, word};
use quire::library::{MapOptions, Object, OpenOptions};
use quire_simulated::Generator;
use quire_test_stores::{CrashOptions, CrashStore, Sectors};

/// More than the smallest budget can hold.
const PAGES: usize = 320;
/// A page's words that are written: in its first and its last sector.
const WORDS: [usize; 2] = [0, PAGE - 8];

/// All that a word may hold after a crash: what it was when it was last flushed, and whatever was
/// written since.
fn word_of(image: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(image[at..at + 8].try_into().unwrap())
}

#[test]
fn after_any_crash_what_was_flushed_is_there_and_nothing_was_invented() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(1 << 20) else { return };
    for (seed, sectors) in [(1, Sectors::Whole), (2, Sectors::Torn)] {
        let crash = Arc::new(CrashStore::new(vec![0; PAGES * PAGE]));
        let object = Object::with_store(&space, Arc::clone(&crash), Some(0)).unwrap();
        // SAFETY: accessed by atomic words only.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let mut generator = Generator::new(seed);
        let mut now = vec![0u64; PAGES * 2];
        // By the number of syncs that had returned: what was flushed then.
        let mut flushed = vec![now.clone()];
        for value in 1..=600u64 {
            let which = generator.below(now.len());
            let at = which / 2 * PAGE + WORDS[which % 2];
            assert_eq!(word(map.as_ptr(), at).load(Ordering::Relaxed), now[which]);
            word(map.as_ptr(), at).store(value, Ordering::Relaxed);
            now[which] = value;
            if value % 60 == 0 {
                map.flush().unwrap();
                assert_eq!(crash.syncs(), flushed.len());
                flushed.push(now.clone());
            }
        }
        let mut written = vec![BTreeSet::from([0u64]); now.len()];
        let mut generator = Generator::new(seed);
        (1..=600u64).for_each(|value| {
            written[generator.below(now.len())].insert(value);
        });
        let options = CrashOptions { sectors, images_max: 40, seed };
        let mut images = 0;
        for image in crash.images(options) {
            images += 1;
            for (which, written) in written.iter().enumerate() {
                let at = which / 2 * PAGE + WORDS[which % 2];
                let found = word_of(&image.bytes, at);
                let least = flushed[image.syncs][which];
                assert!(found >= least, "word {which}: {found}, but {least} was flushed");
                assert!(written.contains(&found), "word {which}: {found} was never written");
            }
        }
        assert!(images > 100, "{images} images");
    }
}

const CHILD: &str = "QUIRE_OBJECT_CRASH_DIR";

/// Not a test of its own: what the next one kills.
#[test]
fn a_child_that_flushes_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let dir = std::path::PathBuf::from(dir);
    let space = space(1 << 20).unwrap();
    let object = OpenOptions::new().write(true).open(&space, dir.join("data")).unwrap();
    // SAFETY: accessed by atomic words only.
    let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
    let told = std::fs::File::create(dir.join("told")).unwrap();
    for round in 1u64.. {
        for page in 0..PAGES {
            word(map.as_ptr(), page * PAGE + 8).store(round, Ordering::Relaxed);
        }
        map.flush().unwrap();
        told.write_all_at(&round.to_le_bytes(), 0).unwrap();
    }
}

#[test]
fn what_was_flushed_is_in_the_file_when_the_process_is_killed() {
    let _watchdog = Watchdog::new(120);
    if space(1 << 20).is_none() {
        return;
    }
    for delay_ms in [5, 23, 61] {
        let dir = Dir::new();
        let path = dir.file("data", &vec![0; PAGES * PAGE]);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_child_that_flushes_until_it_is_killed"])
            .env(CHILD, &dir.0)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let told = || {
            let bytes = std::fs::read(dir.0.join("told")).unwrap_or_default();
            if bytes.len() < 8 { 0 } else { word_of(&bytes, 0) }
        };
        wait_until(|| told() >= 2 || child_has_ended(&child));
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        let flushed = told();
        assert!(flushed >= 2, "the child ended by itself");
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), PAGES * PAGE);
        for page in 0..PAGES {
            let found = word_of(&bytes, page * PAGE + 8);
            let may_be = flushed..=flushed + 2;
            assert!(may_be.contains(&found), "page {page}: {found}, flushed were {flushed}");
        }
    }
}

fn child_has_ended(child: &std::process::Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}
