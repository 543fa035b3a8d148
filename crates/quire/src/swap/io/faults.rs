//! Planted faults: what storage does on a bad day, chosen by a seed.

#![deny(unsafe_code)]

use rustix::io::Errno;

use super::{Job, JobBuffer};

/// Which jobs go wrong. Each field is "one in so many", 0 for never; the same seed and the same
/// jobs give the same faults.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub seed: u64,
    /// Jobs that fail with [`Faults::error`], not started.
    pub fail_one_in: u32,
    /// The job that fails whatever the seed says, counted from 1; 0 for none.
    pub fail_nth: u64,
    /// What a failed job reports.
    pub error: Errno,
    /// Reads that succeed with one byte changed.
    pub corrupt_one_in: u32,
    /// Transfers that the kernel cuts short, to be continued.
    pub short_one_in: u32,
    pub jobs: u64,
}

impl Faults {
    pub fn new(seed: u64) -> Faults {
        Faults {
            seed: seed | 1,
            fail_one_in: 0,
            fail_nth: 0,
            error: Errno::IO,
            corrupt_one_in: 0,
            short_one_in: 0,
            jobs: 0,
        }
    }

    pub(super) fn plant(&mut self, job: &mut Job<'_>) {
        self.jobs += 1;
        if self.hits(self.fail_one_in) || self.jobs == self.fail_nth {
            job.result = Err(self.error);
        }
        job.corrupt = self.hits(self.corrupt_one_in) && matches!(job.buffer, JobBuffer::Read(_));
        if self.hits(self.short_one_in) {
            // Direct I/O goes by sectors, also where it is cut short.
            job.short = (job.length() / 2).next_multiple_of(4096).min(job.length());
        }
    }

    fn hits(&mut self, one_in: u32) -> bool {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        one_in != 0 && (self.seed >> 20).is_multiple_of(u64::from(one_in))
    }
}
