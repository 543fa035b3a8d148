//! A thread's working memory: what a fault or reclaim needs beside its stack.

use core::mem::MaybeUninit;

use linux_raw_sys::general::MADV_DONTNEED;

use crate::swap::compress::{Compressor, PageBytes};
use crate::swap::io::Ring;
use crate::sys::zstd::PackerMemory;
use crate::sys::{Errno, memory, yard};

/// Pages of staging: what one copy carries at most. Each thread has as many for good once it has
/// brought a long window, and more make a window hardly cheaper.
pub const STAGING_PAGES: usize = 16;
/// Pages that one read brings at most.
pub const READ_PAGES: usize = 64;
/// Pages that a reader of the swap file has under way at most.
pub const READING_PAGES: usize = 4 * READ_PAGES;
/// Of what a read brings at most, the pages that keep their memory where no long read has come for a while.
const READ_PAGES_KEPT: usize = 8;
/// Short reads after which the others' memory is given back.
const SHORT_READS: u32 = 64;

/// Buffers and a compressor in a mapping of their own.
pub struct Scratch {
    compressor: &'static mut MaybeUninit<Compressor>,
    /// Memory that the compressor takes when it is made.
    packer: Option<&'static mut PackerMemory>,
    /// Pages on their way into the program.
    pub staging: &'static mut [PageBytes; STAGING_PAGES],
    /// What was read from the swap file, and empty while a read is under way; a handler that copies out of an
    /// object borrows it.
    pub reading: &'static mut [PageBytes],
    /// One page on its way out.
    pub page: &'static mut PageBytes,
    /// A handler's own way to the swap file.
    pub reader: Option<Ring>,
    /// What a handler does while it waits for its read: it serves a fault that has come, where there is one and
    /// no other handler waits for it, and says so. It has all of the scratch but for `reading`.
    pub beside: Option<fn(&mut Scratch) -> bool>,
    /// Short reads until the memory for long ones is given back; 0 where it has been.
    short_reads_left: u32,
}

/// Gives the memory of pages back whose content is not needed.
fn discard(pages: &mut [PageBytes]) {
    // SAFETY: memory of a scratch's own mapping, borrowed exclusively; zeros are as good as what it holds.
    let _ =
        unsafe { memory::advise(pages.as_mut_ptr() as usize, size_of_val(pages), MADV_DONTNEED) };
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
            beside: None,
            short_reads_left: 0,
        })
    }

    /// Notes that so many pages at most were read into a place of `reading`, whose content is used up.
    pub fn note_read(&mut self, pages: usize) {
        if pages > READ_PAGES_KEPT {
            self.short_reads_left = SHORT_READS;
        } else if self.short_reads_left > 0 {
            self.short_reads_left -= 1;
            if self.short_reads_left == 0 {
                self.reading
                    .chunks_exact_mut(READ_PAGES)
                    .for_each(|pages| discard(&mut pages[READ_PAGES_KEPT..]));
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_for_long_reads_goes_after_many_short_ones() {
        let mut scratch = Scratch::new().unwrap();
        let filled = |scratch: &Scratch| scratch.reading.iter().filter(|page| page[0] != 0).count();
        scratch.reading.iter_mut().for_each(|page| page[0] = 1);
        scratch.note_read(READ_PAGES);
        for _ in 1..SHORT_READS {
            scratch.note_read(1);
        }
        assert_eq!(filled(&scratch), READING_PAGES);
        scratch.note_read(1);
        assert_eq!(filled(&scratch), READING_PAGES / READ_PAGES * READ_PAGES_KEPT);
    }
}
