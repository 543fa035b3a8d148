use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::vec::Vec;
use std::{println, thread};

use super::super::file::Location;
use super::*;
use crate::units::PageNum;

/// A file without a name, kept open until the tests end.
fn scratch_file() -> (&'static File, BorrowedFd<'static>) {
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let file: OwnedFd = rustix::fs::open(std::env::temp_dir(), flags, mode).unwrap();
    let file = std::boxed::Box::leak(std::boxed::Box::new(File::from(file)));
    // SAFETY: leaked, so it stays open.
    (file, unsafe { BorrowedFd::borrow_raw(file.as_raw_fd()) })
}

/// Every way there is to reach a file on this machine.
fn rings(file: BorrowedFd<'static>) -> Vec<Ring> {
    let ring = Ring::new(file);
    if !ring.has_uring() {
        println!("io_uring is not allowed here: pread and pwrite only");
    }
    std::vec![ring, Ring::without_uring(file), Ring::spinning(file)]
}

/// Bytes that differ from place to place.
fn pattern(offset: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (((offset + at) * 0x9e37_79b9) >> 13) as u8).collect()
}

#[test]
fn what_a_batch_wrote_a_batch_reads_also_when_it_is_longer_than_the_ring() {
    let (_, file) = scratch_file();
    for mut ring in rings(file) {
        let written: Vec<Vec<u8>> = (0..150).map(|n| pattern(n * 10_000, 10_000)).collect();
        let mut jobs: Vec<Job<'_>> =
            written.iter().zip(0..).map(|(bytes, n)| Job::write(n * 10_000, bytes)).collect();
        ring.run(&mut jobs);
        assert!(jobs.iter().all(|job| job.result.is_ok()));
        let mut read = std::vec![std::vec![0; 10_000]; 150];
        let mut jobs: Vec<Job<'_>> =
            read.iter_mut().zip(0..).map(|(bytes, n)| Job::read(n * 10_000, bytes)).collect();
        ring.run(&mut jobs);
        assert!(jobs.iter().all(|job| job.result.is_ok()));
        drop(jobs);
        assert!(read == written);
    }
}

#[test]
fn the_end_of_the_file_and_a_file_that_cannot_be_written_are_errors_of_their_job_alone() {
    let (writable, file) = scratch_file();
    writable.write_all_at(&pattern(0, 8192), 0).unwrap();
    for mut ring in rings(file) {
        let (mut inside, mut across, mut beyond) = ([0; 4096], [0; 4096], [0; 16]);
        let mut jobs = [
            Job::read(100, &mut inside),
            Job::read(6000, &mut across),
            Job::read(1 << 20, &mut beyond),
            Job::read(0, &mut []),
        ];
        ring.run(&mut jobs);
        let results = jobs.map(|job| job.result);
        assert_eq!(results, [Ok(()), Err(Errno::IO), Err(Errno::IO), Ok(())]);
        assert_eq!(inside[..], pattern(100, 4096));
    }
    let null = File::open("/dev/null").unwrap();
    let null = std::boxed::Box::leak(std::boxed::Box::new(null));
    // SAFETY: leaked, so it stays open.
    for mut ring in rings(unsafe { BorrowedFd::borrow_raw(null.as_raw_fd()) }) {
        let mut jobs = [Job::write(0, &[1])];
        ring.run(&mut jobs);
        assert_eq!(jobs[0].result, Err(Errno::BADF));
    }
}

#[test]
fn short_transfers_are_continued_and_planted_failures_hit_who_they_should() {
    let (_, file) = scratch_file();
    for mut ring in rings(file) {
        let bytes = pattern(5, 64 << 10);
        ring.plant(Faults { short_one_in: 1, fail_nth: 2, ..Faults::new(7) });
        let mut read = std::vec![0; 64 << 10];
        for (jobs, result) in [
            ([Job::write(0, &bytes)], Ok(())),
            ([Job::write(0, &[0; 4096])], Err(Errno::IO)),
            ([Job::read(0, &mut read)], Ok(())),
        ] {
            let mut jobs = jobs;
            ring.run(&mut jobs);
            assert_eq!(jobs[0].result, result);
        }
        assert!(read == bytes);
        ring.plant(Faults { corrupt_one_in: 1, ..Faults::new(7) });
        ring.run(&mut [Job::read(0, &mut read)]);
        let changed = read.iter().zip(&bytes).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 1);
    }
}

#[test]
fn the_same_seed_plants_the_same_faults() {
    let (_, file) = scratch_file();
    let outcomes = |seed| -> Vec<bool> {
        let mut ring = Ring::new(file);
        ring.plant(Faults { fail_one_in: 3, ..Faults::new(seed) });
        let mut jobs: Vec<Job<'_>> = (0..100).map(|n| Job::write(n * 512, &[1; 512])).collect();
        ring.run(&mut jobs);
        jobs.iter().map(|job| job.result.is_ok()).collect()
    };
    assert_eq!(outcomes(5), outcomes(5));
    assert_ne!(outcomes(5), outcomes(6));
    let failed = outcomes(5).iter().filter(|ok| !**ok).count();
    assert!((15..60).contains(&failed), "{failed} of 100");
}

fn request(number: u32) -> SwapRead {
    let location = Location::new(number).unwrap();
    SwapRead {
        page: PageNum(u64::from(number)),
        location,
        is_write: number % 2 == 1,
        sent_ns: u64::from(number) + 7,
    }
}

const NONE: SwapRead = SwapRead::NONE;

#[test]
fn the_queue_is_bounded_and_in_order_and_drains_after_it_is_closed() {
    let queue = IoQueue::new(5).unwrap();
    for number in 1..=8 {
        assert!(queue.submit(request(number)));
    }
    assert!(!queue.submit(request(9)), "eight places");
    let mut out = [NONE; 3];
    assert_eq!(queue.worker_take(&mut out), 3);
    assert_eq!(out, [1, 2, 3].map(request));
    assert!(queue.submit(request(9)));
    queue.close();
    assert!(!queue.submit(request(10)));
    let mut out = [NONE; 64];
    assert_eq!(queue.worker_take(&mut out), 6);
    assert_eq!(out[5], request(9));
    assert!(queue.is_empty());
    assert_eq!(queue.worker_take(&mut out), 0);
    assert_eq!(queue.try_take(&mut out), 0);
}

#[test]
fn every_request_reaches_one_worker_and_no_worker_oversleeps() {
    const REQUESTS: u32 = 20_000;
    let queue = IoQueue::new(16).unwrap();
    let (sum, count) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        let mut out = [NONE; 7];
        loop {
            let taken = queue.worker_take(&mut out);
            if taken == 0 {
                return;
            }
            count.fetch_add(taken as u64, Ordering::Relaxed);
            let pages = out[..taken].iter().map(|request| request.page.0).sum();
            sum.fetch_add(pages, Ordering::Relaxed);
        }
    };
    let submit = |first: u32| {
        for number in (first..=2 * REQUESTS).step_by(2) {
            // Numbers at a segment's start are no locations.
            let mut request = request(1);
            request.page = PageNum(u64::from(number));
            while !queue.submit(request) {
                thread::yield_now();
            }
        }
    };
    thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        thread::scope(|scope| {
            scope.spawn(|| submit(1));
            scope.spawn(|| submit(2));
        });
        queue.close();
        for worker in workers {
            worker.join().unwrap();
        }
    });
    let all = u64::from(2 * REQUESTS);
    assert_eq!(count.into_inner(), all);
    assert_eq!(sum.into_inner(), all * (all + 1) / 2);
}

/// The file is a pipe into which only what is done beside writes: at once, and when to wait awake was in vain.
#[test]
fn a_thread_has_other_things_to_do_until_its_read_is_done() {
    for patience in [Duration::ZERO, Duration::from_millis(5)] {
        let (end, writer) = rustix::pipe::pipe().unwrap();
        // SAFETY: kept open until the ring is gone.
        let file = unsafe { BorrowedFd::borrow_raw(end.as_raw_fd()) };
        if !Ring::new(file).has_uring() {
            println!("io_uring is not allowed here: a read is slept for");
            return;
        }
        let mut ring = Ring::spinning(file);
        assert!(!ring.waits_awake(), "before it is known that io_uring is allowed");
        let (bytes, mut read) = (pattern(0, 4096), [0; 4096]);
        let mut jobs = [Job::read(0, &mut read)];
        let (since, mut looks, mut is_written) = (Instant::now(), 0, false);
        let mut beside = || {
            looks += 1;
            let is_time = !is_written && since.elapsed() >= patience;
            if is_time {
                assert_eq!(rustix::io::write(&writer, &bytes), Ok(bytes.len()));
                is_written = true;
            }
            is_time
        };
        ring.run_beside(&mut jobs, Some(&mut beside));
        assert_eq!(jobs[0].result, Ok(()));
        assert!(read[..] == bytes[..] && looks > 0, "{looks} looks");
        assert_eq!(ring.waits_awake(), patience.is_zero(), "whether it paid");
    }
}
