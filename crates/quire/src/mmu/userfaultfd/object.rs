//! The kernel's side of objects: memfds, and what the arena shows of them.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use linux_raw_sys::general::{
    MADV_DONTDUMP, MADV_DONTFORK, MADV_DONTNEED, UFFDIO_REGISTER_MODE_MINOR,
    UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP,
};
use rustix::fd::{BorrowedFd, IntoRawFd};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::{Userfaultfd, done, settled};
use crate::mmu::object::{Alias, Memfd, ObjectMmu};
use crate::mmu::{Done, Prot, Protection};
use crate::sys::Errno;
use crate::sys::memory::{self, InitialProt};
use crate::sys::uffd::Uffd;
use crate::units::{ObjectPage, ObjectRange, PAGE_SHIFT, PageRange};

/// What is reported of mappings of objects.
const OBJECT_MODES: u32 =
    UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR | UFFDIO_REGISTER_MODE_WP;

/// From so many bytes on it takes less to fill an alias than to write to the memfd.
///
/// A write has the memfd's lock, for which it would wait for each hole that reclaim makes, and each other
/// write; UFFDIO_COPY does without. But what it has mapped in the alias must be unmapped again, which
/// interrupts the CPUs of other threads, once a call.
const FILL_BYTES_MIN: usize = 256 << 10;

/// Maps a memfd for [`ObjectMmu::memfd_fill`], aligned so that kernels from 6.14 on drop the page tables
/// of what was unmapped. A fork's child has it too, unused: its drop of an object must not unmap what else
/// it may have there.
fn map_alias(faults: &Uffd, memfd: i32, len: usize) -> Result<Alias, Errno> {
    let start = memory::reserve(len, InitialProt::None)?.as_ptr();
    let alias = Alias { start: start.addr(), len };
    let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range that was reserved above, which nothing touches.
    let mapped = unsafe {
        let memfd = BorrowedFd::borrow_raw(memfd);
        rustix::mm::mmap(start.cast(), len, ProtFlags::empty(), flags, memfd, 0)
            .and_then(|_| memory::advise(alias.start, len, MADV_DONTDUMP))
    };
    mapped
        .and_then(|()| faults.register(alias.start, len, UFFDIO_REGISTER_MODE_MISSING))
        .inspect_err(|_| unmap_alias(alias))?;
    Ok(alias)
}

fn unmap_alias(alias: Alias) {
    if let Some(start) = NonNull::new(alias.start as *mut u8) {
        // SAFETY: made by `map_alias`, and used by no other thread.
        unsafe { memory::release(start, alias.len) };
    }
}

fn descriptor(memfd: Memfd) -> BorrowedFd<'static> {
    // SAFETY: open from `memfd_open` to `memfd_close`, which is the memfd's life.
    unsafe { BorrowedFd::borrow_raw(memfd.number) }
}

impl ObjectMmu for Userfaultfd {
    fn memfd_open(&self, pages_max: usize) -> Result<Memfd, Errno> {
        let memfd = rustix::fs::memfd_create(c"quire-object", MemfdFlags::CLOEXEC)?;
        let number = memfd.into_raw_fd();
        let len = pages_max << PAGE_SHIFT;
        // Without one the memfd is written to: there may be no room for it, or for one more mapping.
        let alias = if len < FILL_BYTES_MIN {
            Alias::default()
        } else {
            map_alias(&self.faults, number, len).unwrap_or_default()
        };
        Ok(Memfd { number, alias })
    }

    fn memfd_close(&self, memfd: Memfd) {
        unmap_alias(memfd.alias);
        // SAFETY: the memfd's own descriptor, which no thread uses any more.
        unsafe { rustix::io::close(memfd.number) };
    }

    fn memfd_resize(&self, memfd: Memfd, pages: usize) -> Result<(), Errno> {
        rustix::fs::ftruncate(descriptor(memfd), (pages << PAGE_SHIFT) as u64)
    }

    fn memfd_write(&self, memfd: Memfd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(descriptor(memfd), &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn memfd_fill(&self, memfd: Memfd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let (at, len) = (offset as usize, bytes.len());
        let mut filled = 0;
        if len >= FILL_BYTES_MIN && at + len <= memfd.alias.len {
            let at = memfd.alias.start + at;
            filled = settled(|| self.faults.copy(at, bytes.as_ptr().addr(), len, false)).done;
            // SAFETY: a part of the alias, which nothing touches.
            let _ = unsafe { memory::advise(at, filled, MADV_DONTNEED) };
        }
        // It refuses what is there, for one.
        self.memfd_write(memfd, offset + filled as u64, &bytes[filled..])
    }

    fn memfd_read(&self, memfd: Memfd, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(descriptor(memfd), &mut into[done..], offset + done as u64) {
                Ok(0) => return Err(Errno::INVAL),
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn memfd_punch(&self, memfd: Memfd, pages: ObjectRange) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = (pages.len() << PAGE_SHIFT) as u64;
        loop {
            match rustix::fs::fallocate(descriptor(memfd), flags, pages.start.offset(), bytes) {
                Err(Errno::INTR) => {}
                other => return other,
            }
        }
    }

    fn map_object(
        &self,
        pages: PageRange,
        memfd: Memfd,
        first: ObjectPage,
        prot: Prot,
    ) -> Result<(), Errno> {
        let (start, len) = (self.address(pages.start), pages.len() << PAGE_SHIFT);
        let prot = ProtFlags::from_bits_retain(prot.0);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: a range of the arena that no VMA has.
        unsafe {
            rustix::mm::mmap(start as *mut _, len, prot, flags, descriptor(memfd), first.offset())?;
            memory::advise(start, len, MADV_DONTFORK)?;
        }
        self.faults.register(start, len, OBJECT_MODES)
    }

    fn is_inline(&self) -> bool {
        // Relaxed: set before any other thread knows the MMU.
        self.is_inline.load(Ordering::Relaxed)
    }

    fn map_cached(&self, pages: PageRange, protection: Protection) -> Done {
        let protect = protection == Protection::WriteProtected;
        let (start, len) = (self.address(pages.start), pages.len() << PAGE_SHIFT);
        let done = done(settled(|| self.faults.map_cached(start, len, protect)));
        self.answer_inline(pages);
        done
    }
}
