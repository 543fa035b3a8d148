//! Memory of the engine's own: sparse private mappings that no program code shares.

use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering,
};

use linux_raw_sys::general::{__NR_madvise, __NR_mincore, __NR_process_madvise, MADV_DONTNEED};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::call::syscall;
use super::{Errno, yard};
use crate::units::{BLOCK_PAGES, PAGE_SHIFT};

/// What RLIMIT_AS and RLIMIT_DATA let the process have, in bytes.
pub fn address_limit() -> Option<u64> {
    let limits = [Resource::As, Resource::Data].map(|limit| getrlimit(limit).current);
    limits.into_iter().flatten().min()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InitialProt {
    None,
    ReadWrite,
}

/// Reserves `bytes` of address space, aligned to 2 MiB, that cost memory only where touched.
///
/// # Errors
/// The kernel's, mostly `NOMEM` under RLIMIT_AS, RLIMIT_DATA or overcommit_memory=2.
pub fn reserve(bytes: usize, access: InitialProt) -> Result<NonNull<u8>, Errno> {
    reserve_aligned(bytes, 2 << 20, access)
}

/// As [`reserve`], at a multiple of `align`, a power of two of at least a page.
pub(super) fn reserve_aligned(
    bytes: usize,
    align: usize,
    access: InitialProt,
) -> Result<NonNull<u8>, Errno> {
    // What the kernel gives is aligned to a page.
    let spare = align - (1 << PAGE_SHIFT);
    let prot = match access {
        InitialProt::None => ProtFlags::empty(),
        InitialProt::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping where the kernel likes; nothing else knows the address.
    unsafe {
        let whole = rustix::mm::mmap_anonymous(core::ptr::null_mut(), bytes + spare, prot, flags)?;
        let start = whole as usize;
        let aligned = start.next_multiple_of(align);
        if aligned > start {
            rustix::mm::munmap(whole, aligned - start)?;
        }
        let tail = start + spare - aligned;
        if tail > 0 {
            rustix::mm::munmap((aligned + bytes) as *mut _, tail)?;
        }
        // 4 KiB pages: tables are sparse, and frames are moved one by one.
        let _ = rustix::mm::madvise(aligned as *mut _, bytes, Advice::LinuxNoHugepage);
        if access == InitialProt::ReadWrite && bytes > yard::YARD_BYTES {
            // A debugger that writes a core dump would read, and so make, page tables for all of it.
            let _ = rustix::mm::madvise(aligned as *mut _, bytes, Advice::LinuxDontDump);
        }
        Ok(NonNull::new_unchecked(aligned as *mut u8))
    }
}

/// Gives a reservation back.
///
/// # Safety
/// `start..start + bytes` came from [`reserve`], and nothing refers to it any more.
pub unsafe fn release(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise.
    let released = unsafe { rustix::mm::munmap(start.as_ptr().cast(), bytes) };
    if released.is_err() {
        // It lies between others, and there are as many mappings as there may be: the addresses stay.
        // SAFETY: as above.
        let _ = unsafe { advise(start.as_ptr() as usize, bytes, MADV_DONTNEED) };
    }
}

/// # Safety
/// The range belongs to the engine or to a managed arena.
pub unsafe fn protect(start: usize, bytes: usize, prot: u32) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mprotect(start as *mut _, bytes, MprotectFlags::from_bits_retain(prot)) }
}

/// Gives advice by its number.
///
/// # Safety
/// The range belongs to the engine or to a managed arena, and the advice leaves no byte that is
/// still needed without its content.
pub unsafe fn advise(start: usize, bytes: usize, advice: u32) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall(__NR_madvise, [start, bytes, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Says which pages from `start` on are in memory.
///
/// # Errors
/// `NOMEM` where something is not mapped at all.
pub fn look(start: usize, is_present: &mut [bool]) -> Result<(), Errno> {
    let mut bytes = [0u8; BLOCK_PAGES];
    let pages = is_present.len().min(BLOCK_PAGES);
    let place = bytes.as_mut_ptr() as usize;
    // SAFETY: the kernel writes a byte a page, and there is room for as many.
    unsafe { syscall(__NR_mincore, [start, pages << PAGE_SHIFT, place, 0, 0, 0]) }?;
    for (is_present, byte) in is_present.iter_mut().zip(bytes) {
        *is_present = byte & 1 != 0;
    }
    Ok(())
}

/// The calling thread's process, as a descriptor.
pub const PIDFD_SELF_THREAD: isize = -10_000;

/// Drops the pages of several ranges (start and length in bytes) in one call.
///
/// # Errors
/// The kernel's; those before 6.13 cannot do it, and nothing or a part is done then.
///
/// # Safety
/// The ranges belong to the engine or to a managed arena, and no byte in them is needed.
pub(crate) unsafe fn discard_all(
    ranges: impl Iterator<Item = (usize, usize)>,
) -> Result<(), Errno> {
    const RANGES_MAX: usize = BLOCK_PAGES / 2;
    static IS_REFUSED: AtomicBool = AtomicBool::new(false);
    // Relaxed: a hint.
    if IS_REFUSED.load(Ordering::Relaxed) {
        return Err(Errno::NOSYS);
    }
    let mut vector = [[0usize; 2]; RANGES_MAX];
    let (mut count, mut bytes) = (0, 0);
    for (place, range) in vector.iter_mut().zip(ranges) {
        *place = [range.0, range.1];
        count += 1;
        bytes += range.1;
    }
    let place = vector.as_ptr() as usize;
    let pidfd = PIDFD_SELF_THREAD as usize;
    let advice = MADV_DONTNEED as usize;
    // SAFETY: the caller's promise; the kernel reads `count` pairs.
    match unsafe { syscall(__NR_process_madvise, [pidfd, place, count, advice, 0, 0]) } {
        Ok(done) if done == bytes => Ok(()),
        Ok(_) => Err(Errno::AGAIN),
        Err(error) => {
            IS_REFUSED.store(true, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// A sparse table of zero-initialised entries. Inherited by fork like any private memory.
pub struct Table<T> {
    entries: NonNull<[T]>,
}

// SAFETY: a table owns its entries, as a box does.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Table<T> {}

/// Types for which all bytes zero is a valid value that owns nothing.
///
/// # Safety
/// It is one.
pub unsafe trait Zeroed {}

macro_rules! zeroed_integers {
    ($($Integer:ty),*) => {
        $(
            // SAFETY: zero is a value of an integer, atomic or not.
            unsafe impl Zeroed for $Integer {}
        )*
    };
}

zeroed_integers!(u8, u32, u64, AtomicU8, AtomicU16, AtomicU32, AtomicU64);
// SAFETY: zero is a null pointer.
unsafe impl<T> Zeroed for AtomicPtr<T> {}
// SAFETY: zero stands for `false`.
unsafe impl Zeroed for bool {}
// SAFETY: an array of values that may be zero.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {}

/// Makes a struct [`Zeroed`] whose fields all are, or an enum of one byte by the variant that zero
/// stands for. The compiler checks it.
macro_rules! zeroed {
    ($Enum:ident = $Zero:ident) => {
        #[allow(unsafe_code, reason = "checked by the assertion")]
        const _: () = {
            // SAFETY: any enum of one byte without fields is a valid `u8`.
            assert!(unsafe { core::mem::transmute::<$Enum, u8>($Enum::$Zero) } == 0);
            // SAFETY: the assertion says so.
            unsafe impl $crate::sys::memory::Zeroed for $Enum {}
        };
    };
    ($Struct:ident { $($field:ident),* $(,)? }) => {
        const _: () = {
            fn is_zeroed<T: $crate::sys::memory::Zeroed>(_: &T) {}
            #[allow(dead_code, reason = "it is compiled, which is the check")]
            fn every_field_is($Struct { $($field),* }: &$Struct) {
                $(is_zeroed($field);)*
            }
            #[allow(unsafe_code, reason = "checked by `every_field_is`")]
            // SAFETY: `every_field_is` names all fields, and compiles for `Zeroed` ones only.
            unsafe impl $crate::sys::memory::Zeroed for $Struct {}
        };
    };
}
pub(crate) use zeroed;

impl<T: Zeroed> Table<T> {
    /// Reserves room for `count` entries.
    ///
    /// # Errors
    /// Those of [`reserve`], and `NOMEM` for a size that no address space holds.
    pub fn new(count: usize) -> Result<Table<T>, Errno> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(Errno::NOMEM)?;
        let start = yard::take(bytes)?;
        Ok(Table { entries: NonNull::slice_from_raw_parts(start.cast(), count) })
    }
}

impl<T> Deref for Table<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `new` took the memory, zeroed, aligned to a page and with room for the entries,
        // of which zero is a value; it lives until the table is dropped.
        unsafe { self.entries.as_ref() }
    }
}

impl<T> DerefMut for Table<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the table owns its entries, and is borrowed exclusively.
        unsafe { self.entries.as_mut() }
    }
}

impl<T> AsRef<[T]> for Table<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        if let Some(bytes) = yard::pages_of(size_of_val::<[T]>(self)) {
            // SAFETY: `new` took exactly this, and the borrow of self is the last one.
            unsafe { release(self.entries.cast(), bytes) };
        }
    }
}
