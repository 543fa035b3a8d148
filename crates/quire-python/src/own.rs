//! What belongs to the process that made it.
//!
//! A fork's child has the objects of its parent, but none of its threads, and the locks in any state: it
//! must neither use nor drop what the engine made. The child has its own of one thing only: a file that was
//! mapped to be read is mapped again, by the kernel, at the same address.

use std::collections::BTreeMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::failure::Error;

/// How many forks there are between this process and the one that loaded the library.
static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_fork() {
    // Relaxed: a child begins with one thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has forks counted from now on.
pub fn count_forks() -> PyResult<()> {
    // SAFETY: the handler only counts.
    match unsafe { libc::pthread_atfork(None, None, Some(count_fork)) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno).into()),
    }
}

fn forks() -> u64 {
    // Relaxed: see `count_fork`.
    FORKS.load(Ordering::Relaxed)
}

/// A value of the process that made it, which no fork's child uses or drops.
pub struct Own<T> {
    value: ManuallyDrop<T>,
    forks: u64,
}

impl<T> Own<T> {
    pub fn new(value: T) -> Own<T> {
        Own { value: ManuallyDrop::new(value), forks: forks() }
    }

    /// Whether a fork lies between the process that made it and this one.
    pub fn is_inherited(&self) -> bool {
        self.forks != forks()
    }

    pub fn get(&self) -> PyResult<&T> {
        if self.is_inherited() {
            return Err(Error::new_err(
                "this was made before a fork, and belongs to the parent process; make one in this \
                 process, open the file read-only (mode \"r\"), which children inherit, or start \
                 processes by the methods \"forkserver\" or \"spawn\"",
            ));
        }
        Ok(&self.value)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.is_inherited() {
            // SAFETY: it is dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A file as a fork's child maps it: whole pages of it, at the parent's address.
pub struct Inheritance {
    pub file: File,
    /// Of the first page, in the file and in memory.
    pub offset: u64,
    pub address: usize,
    /// Up to the mapping's last byte.
    pub len: usize,
}

/// What there is for children to map, by its number.
struct Bequeathed {
    /// Of the process that has it mapped by the engine.
    forks: u64,
    /// Whether this process is a child of that one, and has mapped it.
    is_mapped: bool,
    inheritance: Inheritance,
}

/// It is locked by threads that have the interpreter's lock only, as the one that forks has: so a
/// child finds it unlocked.
static BEQUEATHED: Mutex<BTreeMap<u64, Bequeathed>> = Mutex::new(BTreeMap::new());

fn bequeathed(_py: Python<'_>) -> MutexGuard<'static, BTreeMap<u64, Bequeathed>> {
    BEQUEATHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps an inheritance for children, until it is [withdrawn](Self::withdraw).
pub struct Bequest(u64);

impl Bequest {
    pub fn new(py: Python<'_>, inheritance: Inheritance) -> Bequest {
        let mut all = bequeathed(py);
        let number = all.last_key_value().map_or(0, |(last, _)| last + 1);
        all.insert(number, Bequeathed { forks: forks(), is_mapped: false, inheritance });
        Bequest(number)
    }

    /// Whether this process is a child, and has the file's bytes at the parent's address.
    pub fn is_mapped_by_kernel(&self, py: Python<'_>) -> bool {
        bequeathed(py).get(&self.0).is_some_and(|kept| kept.is_mapped)
    }

    /// Children of now on do not inherit it. What a child has mapped stays: nobody counts its views there.
    pub fn withdraw(&self, py: Python<'_>) {
        let mut all = bequeathed(py);
        if all.get(&self.0).is_some_and(|kept| kept.forks == forks()) {
            all.remove(&self.0);
        }
    }
}

/// Maps what a fork's child inherits. The package has the interpreter call it in every child.
#[pyfunction]
pub fn after_fork_in_child(py: Python<'_>) {
    for kept in bequeathed(py).values_mut() {
        let Inheritance { file, offset, address, len } = &kept.inheritance;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing is mapped there, or the call fails: the parent's mapping is not inherited.
        let mapped =
            unsafe { mmap(*address as *mut _, *len, ProtFlags::READ, flags, file, *offset) };
        // What an ancestor has mapped so is inherited as it is.
        kept.is_mapped |= mapped.is_ok_and(|at| at as usize == *address);
    }
}
