//! The kernel's side of objects: memfds, and what the arena shows of them.

use core::sync::atomic::Ordering;

use linux_raw_sys::general::{
    MADV_DONTFORK, UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING,
    UFFDIO_REGISTER_MODE_WP,
};
use rustix::fd::{BorrowedFd, IntoRawFd};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::{Userfaultfd, done, settled};
use crate::mmu::object::{Memfd, ObjectMmu};
use crate::mmu::{Done, Prot, Protection};
use crate::sys::{Errno, memory};
use crate::units::{ObjectPage, ObjectRange, PAGE_SHIFT, PageRange};

/// What is reported of mappings of objects.
const OBJECT_MODES: u32 =
    UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR | UFFDIO_REGISTER_MODE_WP;

fn descriptor(memfd: Memfd) -> BorrowedFd<'static> {
    // SAFETY: open from `memfd_open` to `memfd_close`, which is the memfd's life.
    unsafe { BorrowedFd::borrow_raw(memfd.number) }
}

impl ObjectMmu for Userfaultfd {
    fn memfd_open(&self) -> Result<Memfd, Errno> {
        let memfd = rustix::fs::memfd_create(c"quire-object", MemfdFlags::CLOEXEC)?;
        Ok(Memfd { number: memfd.into_raw_fd() })
    }

    fn memfd_close(&self, memfd: Memfd) {
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
