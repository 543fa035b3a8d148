//! Zstandard, a page at a time, in memory that is there already: nothing is allocated.
//!
//! Owns the contexts that unpack, which all threads share, and the calls of the C library. Frames have
//! neither magic number, size nor checksum: what lies around them in swap has all three.

use core::ffi::c_int;
use core::ptr::NonNull;

use zstd_sys::{
    ZSTD_CCtx, ZSTD_CCtx_setParameter, ZSTD_DCtx_setParameter, ZSTD_cParameter, ZSTD_compress2,
    ZSTD_dParameter, ZSTD_decompressDCtx, ZSTD_initStaticCCtx, ZSTD_initStaticDCtx, ZSTD_isError,
};

use super::mutex::Mutex;
use super::rank;
use crate::units::PAGE_SIZE;

/// What zstd 1.5 needs for pages at this level is 74 KB, and to unpack 96 KB; tests see that it fits.
pub const PACKER_WORDS: usize = 96 * 1024 / 8;
const UNPACKER_WORDS: usize = 96 * 1024 / 8;
/// The fastest level that codes by the frequency of bytes, which is what LZ4 lacks.
const LEVEL: c_int = 1;
/// ZSTD_c_format and ZSTD_d_format, whose values are ZSTD_f_zstd1_magicless.
const PACK_FORMAT: ZSTD_cParameter = ZSTD_cParameter::ZSTD_c_experimentalParam2;
const UNPACK_FORMAT: ZSTD_dParameter = ZSTD_dParameter::ZSTD_d_experimentalParam1;
const MAGICLESS: c_int = 1;
/// Contexts that unpack, and so threads that do at once.
const UNPACKERS_MAX: usize = 4;

/// Memory for a [`Packer`].
pub type PackerMemory = [u64; PACKER_WORDS];

/// One thread's context that packs.
pub struct Packer(NonNull<ZSTD_CCtx>);

// SAFETY: the context is used through `&mut self` only, and is bound to no thread.
unsafe impl Send for Packer {}

impl Packer {
    /// A context in `memory`, which it has for good. `None` where zstd does not find it enough.
    #[must_use]
    pub fn new(memory: &'static mut PackerMemory) -> Option<Packer> {
        // SAFETY: the memory is aligned to 8 bytes, writable, and lives as long as the process.
        let context =
            unsafe { ZSTD_initStaticCCtx(memory.as_mut_ptr().cast(), size_of_val(memory)) };
        let packer = Packer(NonNull::new(context)?);
        let parameters = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, LEVEL),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (PACK_FORMAT, MAGICLESS),
        ];
        let is_set = parameters.into_iter().all(|(parameter, value)| {
            // SAFETY: a live context of ours.
            let code = unsafe { ZSTD_CCtx_setParameter(context, parameter, value) };
            length(code).is_some()
        });
        is_set.then_some(packer)
    }

    /// Packs a page into `out`; returns the length, or `None` where it does not fit.
    pub fn pack(&mut self, page: &[u8; PAGE_SIZE], out: &mut [u8]) -> Option<usize> {
        let (to, from) = (out.as_mut_ptr().cast(), page.as_ptr().cast());
        // SAFETY: a live context of ours; both buffers are as long as is said.
        length(unsafe { ZSTD_compress2(self.0.as_ptr(), to, out.len(), from, PAGE_SIZE) })
    }
}

/// Memory of the contexts that unpack. They keep nothing from one page to the next.
static UNPACKERS: [Mutex<rank::Unpacker, [u64; UNPACKER_WORDS]>; UNPACKERS_MAX] =
    [const { Mutex::new([0; UNPACKER_WORDS]) }; UNPACKERS_MAX];

/// Unpacks a block into `out`; returns the length, or `None` where it is none that [`Packer`] made
/// of a page.
pub fn unpack(block: &[u8], out: &mut [u8; PAGE_SIZE]) -> Option<usize> {
    let free = UNPACKERS.iter().find_map(Mutex::try_lock);
    let mut memory = free.unwrap_or_else(|| UNPACKERS[0].lock());
    let bytes = size_of_val(&*memory);
    // SAFETY: the memory is aligned to 8 bytes, and this thread's alone while it holds the lock.
    let context = unsafe { ZSTD_initStaticDCtx(memory.as_mut_ptr().cast(), bytes) };
    NonNull::new(context)?;
    let (to, from) = (out.as_mut_ptr().cast(), block.as_ptr().cast());
    // SAFETY: the context was made above; both buffers are as long as is said.
    unsafe {
        length(ZSTD_DCtx_setParameter(context, UNPACK_FORMAT, MAGICLESS))?;
        length(ZSTD_decompressDCtx(context, to, PAGE_SIZE, from, block.len()))
    }
}

/// What a call returned, unless it is the code of an error.
fn length(code: usize) -> Option<usize> {
    // SAFETY: a look at a number.
    (unsafe { ZSTD_isError(code) } == 0).then_some(code)
}
