//! A store of bytes in memory.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Mutex;

use quire::store::{Cause, Operation, Store, StoreError};

use super::lock;

/// A store of bytes that are gone with it.
pub struct VecStore {
    bytes: Mutex<Vec<u8>>,
    is_read_only: bool,
    reads: AtomicU64,
    writes: AtomicU64,
    syncs: AtomicU64,
}

impl VecStore {
    /// A store called "memory" with these bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> VecStore {
        VecStore {
            bytes: Mutex::new(bytes),
            is_read_only: false,
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
        }
    }

    /// One that refuses to be written.
    #[must_use]
    pub fn read_only(bytes: Vec<u8>) -> VecStore {
        VecStore { is_read_only: true, ..VecStore::new(bytes) }
    }

    /// What is in it.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }

    /// Reads so far, each of a batch by itself.
    #[must_use]
    pub fn reads(&self) -> u64 {
        // Relaxed, here and below: counts, which order nothing.
        self.reads.load(Relaxed)
    }

    /// Writes so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Relaxed)
    }

    /// Syncs so far.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Relaxed)
    }

    fn check(&self, operation: Operation, offset: u64, bytes: usize) -> Result<(), StoreError> {
        let cause = if self.is_read_only {
            Cause::ReadOnly
        } else if offset.checked_add(bytes as u64).is_none_or(|end| end > isize::MAX as u64) {
            Cause::Os(rustix::io::Errno::FBIG)
        } else {
            return Ok(());
        };
        Err(StoreError::new(operation, self.name(), offset, bytes as u64, cause))
    }
}

/// Reads from `bytes` at `offset`; behind their end there are zeros.
pub(super) fn read_from(bytes: &[u8], offset: u64, into: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
    let there = &bytes[start..][..into.len().min(bytes.len() - start)];
    into[..there.len()].copy_from_slice(there);
    into[there.len()..].fill(0);
}

/// Writes `from` at `offset`; a gap before it becomes zeros.
pub(super) fn write_to(bytes: &mut Vec<u8>, offset: u64, from: &[u8]) {
    if from.is_empty() {
        return;
    }
    let start = offset as usize;
    let end = start + from.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[start..end].copy_from_slice(from);
}

impl Store for VecStore {
    fn name(&self) -> &str {
        "memory"
    }

    fn len(&self) -> Result<u64, StoreError> {
        Ok(lock(&self.bytes).len() as u64)
    }

    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.reads.fetch_add(1, Relaxed);
        read_from(&lock(&self.bytes), offset, into);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.check(Operation::Write, offset, from.len())?;
        self.writes.fetch_add(1, Relaxed);
        write_to(&mut lock(&self.bytes), offset, from);
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.check(Operation::SetLen, bytes, 0)?;
        lock(&self.bytes).resize(bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.syncs.fetch_add(1, Relaxed);
        Ok(())
    }
}
