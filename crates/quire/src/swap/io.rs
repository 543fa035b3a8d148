//! Reading and writing the swap file.
//!
//! Owns the ring of one thread ([`Ring`]) and the queue through which handlers pass reads on to
//! the threads that may sleep ([`IoQueue`]). Leaves to its users what lies where in the file.
//! A ring takes a batch with one system call where io_uring is allowed; elsewhere (containers
//! commonly forbid it) it is a loop over pread and pwrite. No locks but the queue's own.

mod faults;
mod queue;
mod spin;
mod uring;

use core::ops::Range;

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::{Errno, pread, pwrite};

pub use self::faults::Faults;
pub use self::queue::{IoQueue, SwapRead};
use self::spin::Spin;
use self::uring::Uring;
use super::{FarTier, SwapCipher};

pub const BATCH_MAX: usize = 64;

/// How often a transfer that the kernel asks to try again is tried before the job fails.
const RETRIES_MAX: u32 = 1000;

/// The memory of a job, and so which way the bytes go.
enum JobBuffer<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

/// A read or a write, whole: done, or failed.
pub struct Job<'a> {
    /// What became of it. Until [`Ring::run`] returns, `EINPROGRESS`.
    pub result: Result<(), Errno>,
    offset: u64,
    buffer: JobBuffer<'a>,
    done: usize,
    retries: u32,
    /// Where this transfer must stop for a planted fault's sake.
    short: usize,
    /// Whether a planted fault changes a byte of what was read.
    corrupt: bool,
}

impl<'a> Job<'a> {
    /// Reads all of `buffer` from `offset` on. The end of the file is an error (`EIO`).
    pub fn read(offset: u64, buffer: &'a mut [u8]) -> Job<'a> {
        Job::new(offset, JobBuffer::Read(buffer))
    }

    pub fn write(offset: u64, buffer: &'a [u8]) -> Job<'a> {
        Job::new(offset, JobBuffer::Write(buffer))
    }

    fn new(offset: u64, buffer: JobBuffer<'a>) -> Job<'a> {
        let result = Err(Errno::INPROGRESS);
        let mut job = Job { result, offset, buffer, done: 0, retries: 0, short: 0, corrupt: false };
        job.short = job.length();
        job
    }

    fn length(&self) -> usize {
        match &self.buffer {
            JobBuffer::Read(bytes) => bytes.len(),
            JobBuffer::Write(bytes) => bytes.len(),
        }
    }

    /// Does it without a ring; returns the bytes transferred, also where it failed, and how it ended.
    #[cfg(feature = "library")]
    pub(crate) fn run_alone(mut self, file: BorrowedFd<'_>) -> (usize, Result<(), Errno>) {
        run_batch(None, None, file, core::slice::from_mut(&mut self), None);
        (self.done, self.result)
    }

    fn is_pending(&self) -> bool {
        self.result == Err(Errno::INPROGRESS)
    }

    /// What is left to transfer: where in the file, and which bytes of the buffer.
    fn rest(&self) -> (u64, Range<usize>) {
        let end = if self.done < self.short { self.short } else { self.length() };
        // A single transfer of more than 2 GiB is cut short by the kernel anyway.
        (self.offset + self.done as u64, self.done..end.min(self.done + (1 << 30)))
    }

    fn advance(&mut self, transferred: Result<usize, Errno>) {
        match transferred {
            Ok(0) => self.result = Err(Errno::IO),
            Ok(bytes) => {
                self.done = (self.done + bytes).min(self.length());
                self.retries = 0;
            }
            Err(Errno::INTR | Errno::AGAIN) if self.retries < RETRIES_MAX => self.retries += 1,
            Err(error) => self.result = Err(error),
        }
        self.settle();
    }

    fn settle(&mut self) {
        if self.is_pending() && self.done == self.length() {
            self.result = Ok(());
            if let (true, JobBuffer::Read(bytes)) = (self.corrupt, &mut self.buffer)
                && let Some(byte) = bytes.get_mut(self.done / 2)
            {
                *byte ^= 0x20;
            }
        }
    }

    fn transfer(&mut self, file: BorrowedFd<'_>) {
        let (offset, rest) = self.rest();
        let transferred = match &mut self.buffer {
            JobBuffer::Read(bytes) => pread(file, &mut bytes[rest], offset),
            JobBuffer::Write(bytes) => pwrite(file, &bytes[rest], offset),
        };
        self.advance(transferred);
    }
}

/// What a thread does between two looks at what it waits for; `true` where there was anything.
pub(crate) type Beside<'a, 'b> = Option<&'a mut (dyn FnMut() -> bool + 'b)>;

/// One thread's way to the swap file.
pub struct Ring {
    file: BorrowedFd<'static>,
    uring: Option<Uring>,
    /// Where jobs are waited for awake.
    spin: Option<Spin>,
    faults: Option<Faults>,
    cipher: Option<SwapCipher>,
    /// Where the file may miss what was written to it.
    far: Option<FarTier>,
}

impl Ring {
    /// Makes a ring for `file`. Only the thread that makes it may use it: the kernel is told so, and
    /// refuses other threads.
    pub fn new(file: BorrowedFd<'static>) -> Ring {
        Ring { uring: Uring::new(BATCH_MAX as u32).ok(), ..Ring::without_uring(file) }
    }

    /// A ring whose jobs are waited for awake, as long as that pays ([`Spin`]). It costs nothing until it is
    /// used; the thread that uses it first must be the only one.
    pub fn spinning(file: BorrowedFd<'static>) -> Ring {
        Ring { spin: Some(Spin::default()), ..Ring::without_uring(file) }
    }

    /// A ring without io_uring, as where it is forbidden.
    pub fn without_uring(file: BorrowedFd<'static>) -> Ring {
        Ring { file, uring: None, spin: None, faults: None, cipher: None, far: None }
    }

    /// The same for a file that is encrypted: what is read is decrypted. A [writer](super::file::Writer) encrypts by
    /// itself, for it knows when a segment's life begins.
    #[must_use]
    pub fn encrypted_by(self, cipher: Option<SwapCipher>) -> Ring {
        Ring { cipher, ..self }
    }

    /// The same for a file with a tier behind it: what is missing is waited for.
    #[must_use]
    pub fn backed_by(self, far: Option<FarTier>) -> Ring {
        Ring { far, ..self }
    }

    /// The same for a thread that must not sleep: what is missing fails with `EAGAIN`, and is on its way.
    #[must_use]
    pub fn at_hand_only(self) -> Ring {
        Ring { far: self.far.map(FarTier::at_hand_only), ..self }
    }

    pub(super) fn cipher(&self) -> Option<SwapCipher> {
        self.cipher
    }

    /// From now on jobs go wrong as `faults` says. For the simulator and for tests.
    pub fn plant(&mut self, faults: Faults) {
        self.faults = Some(faults);
    }

    pub fn has_uring(&self) -> bool {
        self.uring.is_some()
    }

    /// Does all jobs and returns when every one is done or has failed; their `result` says which.
    pub fn run(&mut self, jobs: &mut [Job<'_>]) {
        self.run_beside(jobs, None);
    }

    /// Whether the next job is waited for awake, so that its thread can do something beside.
    pub(crate) fn waits_awake(&self) -> bool {
        self.has_uring() && self.spin.as_ref().is_some_and(Spin::pays)
    }

    /// The same, with something to do beside where it [waits awake](Self::waits_awake).
    pub(crate) fn run_beside(&mut self, jobs: &mut [Job<'_>], mut beside: Beside<'_, '_>) {
        if self.spin.is_some() && self.uring.is_none() {
            self.uring = Uring::new(BATCH_MAX as u32).ok();
            // Where io_uring is forbidden it is not asked for again.
            self.spin = self.spin.take().filter(|_| self.uring.is_some());
        }
        for batch in jobs.chunks_mut(BATCH_MAX) {
            for job in batch.iter_mut() {
                if let Some(faults) = &mut self.faults {
                    faults.plant(job);
                }
            }
            let beside = beside.as_deref_mut();
            match self.far {
                Some(far) => self.run_far(far, batch, beside),
                None => {
                    run_batch(self.uring.as_mut(), self.spin.as_mut(), self.file, batch, beside)
                }
            }
            let Some(cipher) = self.cipher else { continue };
            for job in batch {
                if let (Ok(()), JobBuffer::Read(bytes)) = (job.result, &mut job.buffer) {
                    cipher.apply(job.offset, bytes);
                }
            }
        }
    }

    /// Does jobs on a file that may miss what they read: all is asked for at once, and each is done when its part
    /// has come. The supervisor may have moved it away again meanwhile: what was read then is nothing.
    fn run_far(&mut self, far: FarTier, batch: &mut [Job<'_>], mut beside: Beside<'_, '_>) {
        let read_length =
            |job: &Job<'_>| matches!(job.buffer, JobBuffer::Read(_)).then(|| job.length());
        for job in &*batch {
            if let Some(length) = read_length(job) {
                far.bring(job.offset, length);
            }
        }
        for job in batch {
            let length = read_length(job);
            loop {
                let seen = length.map(|length| far.wait_for(job.offset, length)).transpose();
                let seen = match seen {
                    Ok(seen) => seen,
                    Err(errno) => {
                        job.result = Err(errno);
                        break;
                    }
                };
                let (alone, beside) = (core::slice::from_mut(job), beside.as_deref_mut());
                run_batch(self.uring.as_mut(), self.spin.as_mut(), self.file, alone, beside);
                let is_still = |(length, seen)| far.is_still(job.offset, length, seen);
                if length.zip(seen).is_none_or(is_still) {
                    break;
                }
                (job.result, job.done, job.retries) = (Err(Errno::INPROGRESS), 0, 0);
            }
        }
    }

    /// Lets go of a ring that a fork's child inherited. The child must not close its descriptor: in
    /// the child's table the number may stand for another file.
    pub fn abandon(self) {
        if let Some(uring) = self.uring {
            uring.abandon();
        }
    }
}

/// Does all jobs of a batch.
fn run_batch(
    uring: Option<&mut Uring>,
    spin: Option<&mut Spin>,
    file: BorrowedFd<'_>,
    batch: &mut [Job<'_>],
    beside: Beside<'_, '_>,
) {
    batch.iter_mut().for_each(Job::settle);
    let spin = spin.and_then(|spin| spin.is_due().then_some(spin));
    // A transfer alone gains nothing by the ring but to be waited for awake, and may cost a kernel thread's turn.
    if let Some(uring) = uring.filter(|_| batch.len() > 1 || spin.is_some()) {
        let beside = beside.filter(|_| spin.is_some());
        uring.run(file.as_raw_fd(), batch, spin, beside);
    }
    // One, all of them where there is no io_uring, and what it refused.
    for job in batch {
        while job.is_pending() {
            job.transfer(file);
        }
    }
}

#[cfg(test)]
mod tests;
