//! Batches of reads and writes on a file.
//!
//! A batch is sorted by the description that each request goes through, and each part runs on
//! io_uring or on a few threads. Every request is completed by itself, so that one that fails, ends
//! early or is not aligned does not affect the others.

use std::vec::Vec;

use rustix::io::Errno;

use super::super::workers::{cpus, on_threads};
use super::super::{ReadRequest, Store, WriteRequest};
use super::{FileStore, IoMode};
use crate::swap::io::{Job, SharedRing};

/// Requests that threads keep in flight: enough to make use of a disk's queue.
const THREADS: usize = 4;

/// The outcome of a first attempt: the bytes transferred, and how it ended.
type Attempt = (usize, Result<(), Errno>);

pub(super) fn read_all(store: &FileStore, requests: &mut [ReadRequest<'_>]) {
    if requests.len() <= 1 {
        return requests.iter_mut().for_each(|request| read_one(store, request));
    }
    let Some(mut ring) = take_ring(store) else {
        return on_threads(threads(store), requests, |request| read_one(store, request));
    };
    let jobs = requests.iter_mut().map(|request| {
        let mode = store.mode(request.offset, request.into.as_ptr(), request.into.len());
        (mode, Job::read(request.offset, request.into))
    });
    let attempts = run(store, &mut ring, jobs.collect());
    ring.put_back();
    for (request, (done, attempt)) in requests.iter_mut().zip(attempts) {
        request.answer_by(|offset, into| store.finish_read(offset, into, done, attempt));
    }
}

pub(super) fn write_all(store: &FileStore, requests: &mut [WriteRequest<'_>]) {
    if requests.len() <= 1 || !store.is_writable {
        return requests.iter_mut().for_each(|request| write_one(store, request));
    }
    let Some(mut ring) = take_ring(store) else {
        return on_threads(threads(store), requests, |request| write_one(store, request));
    };
    let jobs = requests.iter().map(|request| {
        let head = &request.from[..store.head_bytes(request.offset, request.from)];
        let mode = store.mode(request.offset, head.as_ptr(), head.len());
        (mode, Job::write(request.offset, head))
    });
    let attempts = run(store, &mut ring, jobs.collect());
    ring.put_back();
    for (request, (done, attempt)) in requests.iter_mut().zip(attempts) {
        let result = store.finish_write(request.offset, request.from, done, attempt);
        request.answer(result);
    }
}

fn read_one(store: &FileStore, request: &mut ReadRequest<'_>) {
    request.answer_by(|offset, into| store.read(offset, into));
}

fn write_one(store: &FileStore, request: &mut WriteRequest<'_>) {
    request.answer(store.write(request.offset, request.from));
}

fn take_ring(store: &FileStore) -> Option<SharedRing> {
    if store.has_uring { SharedRing::take() } else { None }
}

/// Buffered I/O is mostly copying, for which more threads than CPUs bring nothing.
fn threads(store: &FileStore) -> usize {
    if store.is_direct() { THREADS } else { THREADS.min(cpus()) }
}

/// Runs jobs, each on its description; returns their attempts in the same order.
fn run(store: &FileStore, ring: &mut SharedRing, jobs: Vec<(IoMode, Job<'_>)>) -> Vec<Attempt> {
    let modes: Vec<IoMode> = jobs.iter().map(|(mode, _)| *mode).collect();
    let (direct, buffered): (Vec<_>, Vec<_>) =
        jobs.into_iter().partition(|(mode, _)| *mode == IoMode::Direct);
    let mut run_part = |mode, part: Vec<(IoMode, Job<'_>)>| {
        let mut jobs: Vec<Job<'_>> = part.into_iter().map(|(_, job)| job).collect();
        ring.run(store.description(mode), &mut jobs);
        jobs.into_iter().map(|job| (job.transferred(), job.result)).collect::<Vec<Attempt>>()
    };
    let mut direct = run_part(IoMode::Direct, direct).into_iter();
    let mut buffered = run_part(IoMode::Buffered, buffered).into_iter();
    let in_order = modes.iter().map(|mode| match mode {
        IoMode::Direct => direct.next(),
        IoMode::Buffered => buffered.next(),
    });
    in_order.map(|attempt| attempt.expect("every job has its attempt")).collect()
}
