//! Batches of reads and writes on a file.
//!
//! Owns nothing: sorts a batch by the description that each request goes through, runs each part
//! by io_uring or by threads, and finishes every request by itself, so that one that fails, ends
//! early or is not aligned does not touch the others.

use std::vec::Vec;

use rustix::io::Errno;

use super::super::workers::{cpus, on_threads};
use super::super::{ReadRequest, Store, WriteRequest};
use super::{FileStore, Way};
use crate::swap::io::{Job, SharedRing};

/// Requests that threads keep in flight: enough for a disk's queue to be worth its while.
const THREADS: usize = 4;

/// What a first attempt brought: the bytes transferred, and how it ended.
type Attempt = (usize, Result<(), Errno>);

pub(super) fn read_all(store: &FileStore, requests: &mut [ReadRequest<'_>]) {
    if requests.len() <= 1 {
        return requests.iter_mut().for_each(|request| read_one(store, request));
    }
    let Some(mut ring) = take_ring(store) else {
        return on_threads(threads(store), requests, |request| read_one(store, request));
    };
    let jobs = requests.iter_mut().map(|request| {
        let way = store.way(request.offset, request.into.as_ptr(), request.into.len());
        (way, Job::read(request.offset, request.into))
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
        let way = store.way(request.offset, head.as_ptr(), head.len());
        (way, Job::write(request.offset, head))
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

/// Buffered I/O is mostly copying, which more threads than CPUs do not speed up.
fn threads(store: &FileStore) -> usize {
    if store.is_direct() { THREADS } else { THREADS.min(cpus()) }
}

/// Runs jobs, each on its description; returns their attempts in the same order.
fn run(store: &FileStore, ring: &mut SharedRing, jobs: Vec<(Way, Job<'_>)>) -> Vec<Attempt> {
    let ways: Vec<Way> = jobs.iter().map(|(way, _)| *way).collect();
    let (mut direct, mut buffered) = (Vec::new(), Vec::new());
    for (way, job) in jobs {
        match way {
            Way::Direct => direct.push(job),
            Way::Buffered => buffered.push(job),
        }
    }
    ring.run(store.description(Way::Direct), &mut direct);
    ring.run(store.description(Way::Buffered), &mut buffered);
    let attempt = |job: Job<'_>| (job.transferred(), job.result);
    let (mut direct, mut buffered) =
        (direct.into_iter().map(attempt), buffered.into_iter().map(attempt));
    let in_order = ways.iter().map(|way| match way {
        Way::Direct => direct.next(),
        Way::Buffered => buffered.next(),
    });
    in_order.map(|attempt| attempt.expect("a job for each way")).collect()
}
