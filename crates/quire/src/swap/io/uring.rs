//! io_uring by hand: one submission queue, one completion queue, no polling thread.
//!
//! Owns the ring's descriptor and its two mappings. Works in batches only: whatever is submitted
//! has completed before [`Uring::run`] returns, because the buffers are borrowed no longer.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringFeatureFlags, IoringOp,
    IoringSetupFlags, addr_or_splice_off_in_union, io_uring_cqe, io_uring_enter_arg,
    io_uring_getevents_arg, io_uring_params, io_uring_ptr, io_uring_setup, io_uring_sqe,
    io_uring_user_data, len_union, off_or_addr2_union,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::sched_yield;

use super::spin::Spin;
use super::{Beside, Job, JobBuffer};
use crate::sys::clock::Moment;

/// How long a thread sleeps at most that has something to do beside.
const LOOK_NS: i64 = 100_000;

/// What is tried, in order: newer kernels complete in our own call, without interrupting us. The
/// first is for the maker alone.
const SETUPS: [IoringSetupFlags; 3] = [
    IoringSetupFlags::SINGLE_ISSUER
        .union(IoringSetupFlags::DEFER_TASKRUN)
        .union(IoringSetupFlags::SUBMIT_ALL),
    IoringSetupFlags::COOP_TASKRUN.union(IoringSetupFlags::SUBMIT_ALL),
    IoringSetupFlags::empty(),
];

/// A mapping of the ring's descriptor.
struct RingMapping {
    base: NonNull<u8>,
    bytes: usize,
}

impl RingMapping {
    fn new(ring: &OwnedFd, offset: u64, bytes: usize) -> Result<RingMapping, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            mmap(
                core::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                ring,
                offset,
            )?
        };
        Ok(RingMapping { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Where a field lies whose offset the kernel told us.
    fn at<T>(&self, offset: u32) -> NonNull<T> {
        debug_assert!(offset as usize + size_of::<T>() <= self.bytes);
        // SAFETY: the kernel's offsets lie inside the mapping whose size it told us (`Uring::new`
        // computes the size from the same offsets).
        unsafe { self.base.add(offset as usize).cast() }
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: an aligned word of the mapping, which the kernel and we change atomically.
        unsafe { self.at::<AtomicU32>(offset).as_ref() }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whole; nothing that refers to it outlives us.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

pub(super) struct Uring {
    ring: OwnedFd,
    params: io_uring_params,
    queues: RingMapping,
    entries: RingMapping,
}

// SAFETY: the mappings belong to the ring alone; which thread may submit is the kernel's check.
unsafe impl Send for Uring {}

impl Uring {
    /// Makes a ring of `depth` entries.
    ///
    /// # Errors
    ///
    /// What the kernel says (`EPERM`, `ENOSYS` where io_uring is forbidden), or `ENOSYS` where it
    /// is too old.
    pub fn new(depth: u32) -> Result<Uring, Errno> {
        let (ring, params) = setup(depth)?;
        let needed = IoringFeatureFlags::SINGLE_MMAP
            | IoringFeatureFlags::NODROP
            | IoringFeatureFlags::EXT_ARG;
        if !params.features.contains(needed) {
            return Err(Errno::NOSYS);
        }
        let submissions = params.sq_off.array as usize + params.sq_entries as usize * 4;
        let completions =
            params.cq_off.cqes as usize + params.cq_entries as usize * size_of::<io_uring_cqe>();
        let queues = RingMapping::new(&ring, IORING_OFF_SQ_RING, submissions.max(completions))?;
        let bytes = params.sq_entries as usize * size_of::<io_uring_sqe>();
        let entries = RingMapping::new(&ring, IORING_OFF_SQES, bytes)?;
        for index in 0..params.sq_entries {
            // Entry n always stands in place n.
            queues.word(params.sq_off.array + index * 4).store(index, Relaxed);
        }
        Ok(Uring { ring, params, queues, entries })
    }

    /// Does what it can of a batch, and waits awake with `spin`; where that is in vain and there is something
    /// to do `beside`, it sleeps for no longer than [`LOOK_NS`] at a time. Jobs that are still pending
    /// afterwards were refused by the ring, and no request of theirs is in flight.
    pub fn run(
        &mut self,
        file: RawFd,
        jobs: &mut [Job<'_>],
        mut spin: Option<&mut Spin>,
        mut beside: Beside<'_, '_>,
    ) {
        loop {
            let count = self.submit(file, jobs);
            if count == 0 {
                return;
            }
            if !self.complete(jobs, count, spin.as_deref_mut(), beside.as_deref_mut()) {
                return;
            }
        }
    }

    /// Unmaps an inherited ring and leaves its descriptor alone.
    pub fn abandon(self) {
        let _ = self.ring.into_raw_fd();
    }

    /// Puts what is pending into the submission queue, which is empty. Returns how many.
    fn submit(&self, file: RawFd, jobs: &mut [Job<'_>]) -> u32 {
        let tail = self.queues.word(self.params.sq_off.tail);
        // Relaxed: only we write it.
        let first = tail.load(Relaxed);
        let mut next = first;
        let pending = jobs.iter_mut().enumerate().filter(|(_, job)| job.is_pending());
        for (number, job) in pending.take(self.params.sq_entries as usize) {
            let place = next & (self.params.sq_entries - 1);
            let at = self.entries.at::<io_uring_sqe>(place * size_of::<io_uring_sqe>() as u32);
            // SAFETY: a place of the entries' mapping; the kernel has read what it held (the
            // queue was empty) and reads it again after `tail` moves past it.
            unsafe { at.write(entry(file, number as u64, job)) };
            next = next.wrapping_add(1);
        }
        // Release pairs with the kernel's acquire: it sees the entries.
        tail.store(next, Release);
        next.wrapping_sub(first)
    }

    /// Waits for `count` submitted jobs. `false` where the ring took fewer.
    fn complete(
        &self,
        jobs: &mut [Job<'_>],
        count: u32,
        mut spin: Option<&mut Spin>,
        mut beside: Beside<'_, '_>,
    ) -> bool {
        let head = self.queues.word(self.params.sq_off.head);
        let tail = self.queues.word(self.params.sq_off.tail);
        let mut completed = 0;
        let mut expected = count;
        let mut since = Moment::now();
        while completed < expected {
            // Acquire pairs with the kernel's release: it is done with the entries before.
            let waiting = tail.load(Relaxed).wrapping_sub(head.load(Acquire));
            let wanted = if spin.is_some() { 0 } else { expected - completed };
            let look = Timespec { tv_sec: 0, tv_nsec: LOOK_NS };
            let most = if beside.is_some() { Some(&look) } else { None };
            let entered = self.enter(waiting, wanted, most);
            completed += self.reap(jobs);
            match entered {
                Ok(_) | Err(Errno::INTR | Errno::TIME) => {}
                Err(Errno::AGAIN | Errno::BUSY) => sched_yield(),
                Err(_) => {
                    // The ring takes no more. Take back what it has not read, and wait for what
                    // it has: those buffers are the kernel's until then.
                    let refused = tail.load(Relaxed).wrapping_sub(head.load(Acquire));
                    tail.store(head.load(Acquire), Release);
                    expected -= refused;
                    sched_yield();
                }
            }
            if completed < expected {
                if beside.as_deref_mut().is_some_and(|beside| beside()) {
                    since = Moment::now();
                } else {
                    spin = spin.and_then(|spin| spin.goes_on(since).then_some(spin));
                }
            }
        }
        if let Some(spin) = spin {
            spin.has_paid();
        }
        expected == count
    }

    /// Submits what is waiting, and sleeps until so many have completed, or for so long at most.
    fn enter(&self, waiting: u32, wanted: u32, most: Option<&Timespec>) -> Result<u32, Errno> {
        let ts = io_uring_ptr::new(
            most.map_or(core::ptr::null_mut(), |most| core::ptr::from_ref(most).cast_mut().cast()),
        );
        let arg = io_uring_getevents_arg { ts, ..io_uring_getevents_arg::default() };
        let flags = IoringEnterFlags::GETEVENTS.union(IoringEnterFlags::EXT_ARG);
        // SAFETY: the entries name the jobs' buffers, which are borrowed until `run` returns, and it does
        // not return before all that was submitted has completed. The time lives longer than the call.
        unsafe { io_uring_enter_arg(self.ring.as_fd(), waiting, wanted, flags, Some(&arg)) }
    }

    /// Takes the completions there are. Returns how many.
    fn reap(&self, jobs: &mut [Job<'_>]) -> u32 {
        let head = self.queues.word(self.params.cq_off.head);
        // Relaxed: only we write it.
        let first = head.load(Relaxed);
        // Acquire pairs with the kernel's release: the completions are there.
        let end = self.queues.word(self.params.cq_off.tail).load(Acquire);
        let mut next = first;
        while next != end {
            let place = next & (self.params.cq_entries - 1);
            let bytes = size_of::<io_uring_cqe>() as u32;
            let at = self.queues.at::<io_uring_cqe>(self.params.cq_off.cqes + place * bytes);
            // SAFETY: a completion between head and tail: the kernel wrote it and leaves it
            // alone until head moves past it.
            let (number, result) = unsafe { (at.as_ref().user_data.u64_(), at.as_ref().res) };
            if let Some(job) = jobs.get_mut(number as usize) {
                job.advance(match u32::try_from(result) {
                    Ok(bytes) => Ok(bytes as usize),
                    Err(_) => Err(Errno::from_raw_os_error(result.saturating_neg())),
                });
            }
            next = next.wrapping_add(1);
        }
        // Release pairs with the kernel's acquire: we have read them.
        head.store(next, Release);
        next.wrapping_sub(first)
    }
}

/// Asks the kernel for a ring, of the best kind that it knows.
fn setup(depth: u32) -> Result<(OwnedFd, io_uring_params), Errno> {
    let mut refused = Errno::INVAL;
    for flags in SETUPS {
        let mut params = io_uring_params::default();
        params.flags = flags;
        // SAFETY: no flag that gives `wq_fd` a meaning is set.
        match unsafe { io_uring_setup(depth, &mut params) } {
            Ok(ring) => return Ok((ring, params)),
            // It does not know the flags.
            Err(Errno::INVAL) => {}
            Err(error) => {
                refused = error;
                break;
            }
        }
    }
    Err(refused)
}

/// The submission that continues a job.
fn entry(file: RawFd, number: u64, job: &mut Job<'_>) -> io_uring_sqe {
    let (offset, rest) = job.rest();
    let length = rest.len();
    let (opcode, at) = match &mut job.buffer {
        JobBuffer::Read(bytes) => (IoringOp::Read, bytes[rest].as_mut_ptr()),
        JobBuffer::Write(bytes) => (IoringOp::Write, bytes[rest].as_ptr().cast_mut()),
    };
    io_uring_sqe {
        opcode,
        fd: file,
        off_or_addr2: off_or_addr2_union { off: offset },
        addr_or_splice_off_in: addr_or_splice_off_in_union { addr: io_uring_ptr::new(at.cast()) },
        len: len_union { len: length as u32 },
        user_data: io_uring_user_data::from_u64(number),
        ..io_uring_sqe::default()
    }
}
