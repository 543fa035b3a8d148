//! A thread's working memory: what a fault or reclaim needs beside its stack.

use core::mem::MaybeUninit;

use crate::swap::compress::{Compressor, PageBytes};
use crate::swap::io::Ring;
use crate::sys::zstd::PackerMemory;
use crate::sys::{Errno, memory, yard};

/// Pages of staging: what one copy carries at most.
pub const STAGING_PAGES: usize = 64;
/// Pages that a reader of the swap file has under way at most.
pub const READING_PAGES: usize = 256;

/// Buffers and a compressor in a mapping of their own.
pub struct Scratch {
    compressor: &'static mut MaybeUninit<Compressor>,
    /// Memory that the compressor takes when it is made.
    packer: Option<&'static mut PackerMemory>,
    /// Pages on their way into the program.
    pub staging: &'static mut [PageBytes; STAGING_PAGES],
    /// What was read from the swap file; only readers touch it.
    pub reading: &'static mut [PageBytes; READING_PAGES],
    /// One page on its way out.
    pub page: &'static mut PageBytes,
    /// A handler's own way to the swap file.
    pub reader: Option<Ring>,
}

#[repr(C, align(4096))]
struct ScratchMemory {
    staging: [PageBytes; STAGING_PAGES],
    reading: [PageBytes; READING_PAGES],
    page: PageBytes,
    compressor: MaybeUninit<Compressor>,
    packer: PackerMemory,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // `staging` is where the mapping begins.
        let start = core::ptr::NonNull::from(&mut *self.staging).cast();
        // SAFETY: mapped by `new`, and what refers to it ends with self.
        unsafe { memory::release(start, size_of::<ScratchMemory>()) };
    }
}

impl Scratch {
    /// Maps the buffers; they live as long as the scratch.
    pub fn new() -> Result<Scratch, Errno> {
        let place = yard::take(size_of::<ScratchMemory>())?;
        // SAFETY: fresh zeroed memory, aligned to a page as `ScratchMemory` wants it, of at least the size,
        // given back by `drop`, and not known elsewhere; zero is valid for arrays of numbers and MaybeUninit.
        let memory = unsafe { &mut *place.as_ptr().cast::<ScratchMemory>() };
        Ok(Scratch {
            compressor: &mut memory.compressor,
            packer: Some(&mut memory.packer),
            staging: &mut memory.staging,
            reading: &mut memory.reading,
            page: &mut memory.page,
            reader: None,
        })
    }

    /// The thread's compressor. It is made when it is first asked for: most threads pack nothing.
    pub fn compressor(&mut self) -> &mut Compressor {
        if let Some(packer) = self.packer.take() {
            self.compressor.write(Compressor::with_zstd(packer));
        }
        // SAFETY: initialised above, now or before.
        unsafe { self.compressor.assume_init_mut() }
    }
}
