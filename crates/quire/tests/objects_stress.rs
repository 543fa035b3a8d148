//! Many threads on objects at once, with an oracle for every byte.

#[path = "common/objects.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    Dir, PAGE, Probe, Stop, Watchdog, load, random, space, space_by, store, survive_sigbus,
    wait_until, word,
};
use quire::library::{AddressSpace, Delivery, FaultAround, MapOptions, Object, OpenOptions};
use quire_simulated::Generator;
use quire_test_stores::VecStore;

/// How long the long ones take.
fn duration() -> Duration {
    let seconds = std::env::var("QUIRE_OBJECT_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(5))
}

/// A mapping that threads share: all access is atomic.
#[derive(Clone, Copy)]
struct Start(*const u8);

// SAFETY: only a place; see `word`.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

#[test]
fn no_write_is_lost_in_the_gaps_of_flushes_reclaim_and_drops() {
    const PAGES: usize = 2048;
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(1 << 20) else { return };
    let inner = Arc::new(VecStore::new(vec![0; PAGES * PAGE]));
    let object = Object::with_store(&space, Arc::clone(&inner), Some(0)).unwrap();
    // SAFETY: accessed by atomic words only.
    let maps = [(); 2].map(|()| unsafe { MapOptions::new().map_mut(&object) }.unwrap());
    let starts = [Start(maps[0].as_ptr()), Start(maps[1].as_ptr())];
    let is_over = AtomicBool::new(false);
    let mut counts = vec![0u64; PAGES];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                object.sync().unwrap();
            }
        });
        scope.spawn(|| {
            let mut generator = Generator::new(2);
            while !is_over.load(Ordering::SeqCst) {
                let at = (generator.below(PAGES) * PAGE) as u64;
                object.drop_cached(at..at + 64 * PAGE as u64);
                object.write_range(at..at + 8 * PAGE as u64).unwrap();
            }
        });
        let _stop = Stop(&is_over);
        let mut generator = Generator::new(3);
        let until = Instant::now() + duration().min(Duration::from_secs(3));
        // A few pages again and again, so that their writes meet their write-back, and all of them
        // now and then.
        while Instant::now() < until {
            let all = if generator.below(4) == 0 { PAGES } else { 24 };
            for _ in 0..64 {
                let page = generator.below(all);
                let Start(start) = starts[generator.below(2)];
                let old = word(start, page * PAGE).fetch_add(1, Ordering::SeqCst);
                assert_eq!(old, counts[page], "page {page}");
                counts[page] += 1;
            }
        }
    });
    object.sync().unwrap();
    let bytes = inner.bytes();
    for (page, count) in counts.iter().enumerate() {
        let found = u64::from_le_bytes(bytes[page * PAGE..page * PAGE + 8].try_into().unwrap());
        assert_eq!(found, *count, "page {page}");
    }
    assert!(space.held().1 <= space.memory());
}

const WRITERS: usize = 8;

/// How much there is of everything.
#[derive(Clone, Copy)]
struct Size {
    memory: usize,
    /// Pages, of which each writer has a word in each.
    body: usize,
    /// As many of them are written, the first.
    written: usize,
    /// Pages behind them, which come and go.
    tail: usize,
    /// Threads that read all of it in order.
    scanners: usize,
}

/// One run of the stress: the object, where it is mapped, and when it is over.
struct Stress<'a> {
    space: &'a AddressSpace,
    object: &'a Object,
    start: Start,
    is_over: &'a AtomicBool,
    size: Size,
}

impl Stress<'_> {
    fn goes_on(&self) -> bool {
        let (held, _) = self.space.held();
        assert!(held <= self.space.memory(), "{held} bytes are held");
        !self.is_over.load(Ordering::SeqCst)
    }

    /// Reads and writes words of its own; returns what they must be.
    fn write(&self, writer: usize) -> Vec<u64> {
        let mut generator = Generator::new(writer as u64 + 1);
        let mut mine = vec![0u64; self.size.written];
        let mut value = (writer as u64) << 56;
        while self.goes_on() {
            let first = generator.below(self.size.written);
            let is_stream = generator.below(3) == 0;
            for step in 0..64 {
                let page = if is_stream {
                    (first + step) % self.size.written
                } else {
                    generator.below(self.size.written)
                };
                let word = word(self.start.0, page * PAGE + writer * 8);
                assert_eq!(word.load(Ordering::Relaxed), mine[page], "{writer}, page {page}");
                if generator.below(3) == 0 {
                    value += 1;
                    word.store(value, Ordering::Relaxed);
                    mine[page] = value;
                }
            }
        }
        mine
    }

    /// Truncates and extends the tail; what comes back is zeros.
    fn resize(&self) {
        let mut generator = Generator::new(100);
        while self.goes_on() {
            let pages = generator.below(self.size.tail);
            let bytes = (self.size.body + pages) * PAGE + generator.below(PAGE);
            self.object.set_len(bytes as u64).unwrap();
            let longer = (self.size.body + self.size.tail) * PAGE;
            for page in 0..self.size.tail {
                let at = (self.size.body + page) * PAGE;
                assert_eq!(load(self.start.0, at).is_some(), at < bytes, "{page} of {bytes}");
            }
            self.object.set_len(longer as u64).unwrap();
            let places = [bytes, bytes.next_multiple_of(PAGE), longer - 1];
            let places = places.map(|at| at.min(longer - 1));
            for at in places {
                assert_eq!(load(self.start.0, at), Some(0), "byte {at} of {bytes}");
            }
            for at in places {
                assert!(store(self.start.0, at, 0x77));
            }
            self.object.set_len((self.size.body * PAGE) as u64).unwrap();
            self.object.set_len(longer as u64).unwrap();
        }
    }

    /// Maps further views, and looks whether each word is its writer's.
    fn view(&self) {
        let mut generator = Generator::new(200);
        while self.goes_on() {
            let first = generator.below(self.size.body - 600);
            let pages = 1 + generator.below(600);
            let options =
                MapOptions::new().offset((first * PAGE) as u64).len((pages * PAGE) as u64);
            // SAFETY: accessed by atomic words only.
            let map = unsafe { options.map(self.object) }.unwrap();
            for _ in 0..128 {
                let (page, writer) = (generator.below(pages), generator.below(WRITERS));
                let at = page * PAGE + writer * 8;
                let seen = word(map.as_ptr(), at).load(Ordering::Relaxed);
                assert!(seen == 0 || seen >> 56 == writer as u64, "{seen:x} of {writer}");
                // The same word, later, elsewhere.
                let later = word(self.start.0, first * PAGE + at).load(Ordering::Relaxed);
                assert!(later >= seen, "{later:x} after {seen:x}");
            }
        }
    }

    /// Reads all of it in order, through a mapping of its own.
    fn scan(&self) {
        // SAFETY: accessed by atomic words only.
        let map = unsafe { MapOptions::new().map(self.object) }.unwrap();
        let mut most = vec![0; self.size.body];
        while self.goes_on() {
            for (page, most) in most.iter_mut().enumerate() {
                let writer = page % WRITERS;
                let seen = word(map.as_ptr(), page * PAGE + writer * 8).load(Ordering::Relaxed);
                assert!(seen == 0 || seen >> 56 == writer as u64, "{seen:x} of {writer}");
                assert!(seen >= *most, "page {page}: {seen:x} after {most:x}");
                *most = seen;
            }
        }
    }

    fn flush(&self) {
        while self.goes_on() {
            self.object.sync().unwrap();
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

#[test]
fn under_stress_every_word_is_what_its_writer_wrote() {
    stress(Size { memory: 1 << 20, body: 2048, written: 2048, tail: 40, scanners: 0 });
}

#[test]
fn under_stress_and_in_new_memory_every_word_is_what_its_writer_wrote() {
    let (body, written) = (48 << 9, 4 << 9);
    stress(Size { memory: 64 << 20, body, written, tail: 700, scanners: 3 });
}

fn stress(size: Size) {
    let _watchdog = Watchdog::new(duration().as_secs() + 120);
    let Some(space) = space(size.memory) else { return };
    let inner = Arc::new(VecStore::new(vec![0; (size.body + size.tail) * PAGE]));
    {
        let object = Object::with_store(&space, Arc::clone(&inner), None).unwrap();
        // SAFETY: accessed by atomic words, and single bytes of the tail.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        let is_over = AtomicBool::new(false);
        let start = Start(map.as_ptr());
        let stress = Stress { space: &space, object: &object, start, is_over: &is_over, size };
        let mine: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let stress = &stress;
            for other in 0..3 {
                scope.spawn(move || {
                    let _stop = Stop(stress.is_over);
                    match other {
                        0 => stress.resize(),
                        1 => stress.view(),
                        _ => stress.flush(),
                    }
                });
            }
            for _ in 0..size.scanners {
                scope.spawn(move || {
                    let _stop = Stop(stress.is_over);
                    stress.scan();
                });
            }
            let map = &map;
            scope.spawn(move || {
                let _stop = Stop(stress.is_over);
                let mut generator = Generator::new(300);
                while stress.goes_on() {
                    let order = generator.below(10) as u32;
                    map.set_fault_around(match generator.below(3) {
                        0 => FaultAround::Auto,
                        1 => FaultAround::Off,
                        _ => FaultAround::Order(order),
                    });
                    if order == 0 && size.scanners > 0 {
                        stress.object.migrate().unwrap();
                    }
                    let first = generator.below(size.body) * PAGE;
                    map.dont_need(first..first + 100 * PAGE);
                    map.populate_cached(first..first + 50 * PAGE);
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    scope.spawn(move || {
                        let _stop = Stop(stress.is_over);
                        stress.write(writer)
                    })
                })
                .collect();
            let until = Instant::now() + duration();
            while Instant::now() < until && !is_over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(20));
            }
            is_over.store(true, Ordering::SeqCst);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        object.sync().unwrap();
        let bytes = inner.bytes();
        for (writer, words) in mine.iter().enumerate() {
            for (page, expected) in words.iter().enumerate() {
                let at = page * PAGE + writer * 8;
                let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                assert_eq!(found, *expected, "writer {writer}, page {page}");
            }
        }
    }
    let (_, most) = space.held();
    assert!(most <= space.memory(), "{most} bytes were held");
    wait_until(|| space.held().0 == 0);
    assert_eq!(space.counter("pgmigrate_success") > 0, size.scanners > 0);
}

#[test]
fn objects_and_mappings_come_and_go_while_others_fault() {
    let _watchdog = Watchdog::new(120);
    let Some(space) = space(2 << 20) else { return };
    let bytes = random(300 * PAGE, 1);
    let dir = Dir::new();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (space, bytes, dir) = (&space, &bytes, &dir);
            scope.spawn(move || {
                let mut generator = Generator::new(thread + 1);
                let path = dir.file(&format!("data-{thread}"), bytes);
                let mut expected = bytes.clone();
                for round in 0..25 {
                    let object = OpenOptions::new().write(true).open(space, &path).unwrap();
                    // SAFETY: the file is this thread's.
                    let mut map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
                    for _ in 0..60 {
                        let at = generator.below(expected.len());
                        assert_eq!(map[at], expected[at], "{thread}, round {round}, byte {at}");
                        map[at] = round;
                        expected[at] = round;
                    }
                    drop(map);
                    drop(object);
                    assert!(std::fs::read(&path).unwrap() == expected, "{thread}, round {round}");
                }
            });
        }
    });
    wait_until(|| space.held().0 == 0);
}

/// What the process has: threads, mappings of ours, descriptors.
fn possessions() -> [usize; 3] {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    let is_ours = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(entry.unwrap().path().join("comm"));
        name.unwrap_or_default().starts_with("quire-")
    };
    let threads = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|entry| is_ours(entry).then_some(()))
        .count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    [threads, maps, entries("/proc/self/fd")]
}

const ALONE: &str = "QUIRE_OBJECT_ALONE";

/// In a process of its own, where nothing else opens and maps anything.
#[test]
fn of_an_address_space_that_is_dropped_nothing_is_left() {
    let _watchdog = Watchdog::new(120);
    if std::env::var_os(ALONE).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "of_an_address_space_that_is_dropped_nothing_is_left", "--nocapture"])
            .env(ALONE, "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let dir = Dir::new();
    let path = dir.file("data", &random(100 * PAGE, 1));
    let round = || {
        let Some(space) = space(2 << 20) else { return };
        let objects: Vec<_> =
            (0..4).map(|_| OpenOptions::new().write(true).open(&space, &path).unwrap()).collect();
        std::thread::scope(|scope| {
            for object in &objects {
                scope.spawn(|| {
                    // SAFETY: accessed by single bytes only.
                    let map = unsafe { MapOptions::new().map_mut(object) }.unwrap();
                    (0..100).for_each(|page| assert!(load(map.as_ptr(), page * PAGE).is_some()));
                });
            }
        });
        objects[0].prefetch(0..100 * PAGE as u64);
    };
    // Once for what libc keeps for later threads, and what is set up once.
    (0..3).for_each(|_| round());
    let before = possessions();
    assert_eq!(before[0], 0, "no thread of ours");
    (0..20).for_each(|_| round());
    let after = possessions();
    assert_eq!((after[0], after[2]), (0, before[2]), "threads, descriptors");
    // libc's arenas come and go by one or two; a leak would be twenty times as much.
    assert!(after[1] < before[1] + 10, "{} mappings, {} before", after[1], before[1]);
}

/// More than a list of waiting faults has room for: then all are answered.
#[test]
fn writers_that_are_too_many_to_be_listed_go_on_once_the_store_does() {
    const WRITERS: usize = 200;
    let _watchdog = Watchdog::new(60);
    // Before any address space takes SIGBUS over.
    survive_sigbus();
    for delivery in [Delivery::Handlers, Delivery::Inline] {
        let builder = AddressSpace::builder().memory(1 << 20).handlers(2).delivery(delivery);
        let Some(space) = space_by(&builder) else { return };
        let probe = Probe::new(vec![0; WRITERS * PAGE]);
        let object = Object::with_store(&space, Arc::clone(&probe), Some(0)).unwrap();
        let is_open = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&is_open);
        probe.on_write(move |_, _| {
            while !gate.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // SAFETY: written by single stores.
        let map = unsafe { MapOptions::new().map_mut(&object) }.unwrap();
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let start = Start(map.as_ptr());
                scope.spawn(move || {
                    let Start(start) = { start };
                    word(start, writer * PAGE).store(writer as u64 + 1, Ordering::SeqCst);
                });
            }
            // By now those that can wait do.
            let until = Instant::now() + Duration::from_secs(20);
            while space.counter("fault_parked") < 100 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50));
            is_open.store(true, Ordering::SeqCst);
        });
        object.sync().unwrap();
        let bytes = probe.inner.bytes();
        for writer in 0..WRITERS {
            assert_eq!(bytes[writer * PAGE], (writer + 1) as u8, "{writer}");
        }
    }
}
