//! Ranges of mappings that stay in memory and mapped.

use std::ffi::c_int;

use engine::library::{Pinned, PinnedMut};

use crate::failure::{Failure, pointer, status};
use crate::handle::{Handle, close, get, hand_out};
use crate::mapping::{Counted, Mapping, Rights};

/// quire_pin: for bytes that may be written at any time, for example by the kernel.
pub const QUIRE_PIN_WRITE: u32 = 1;

/// What keeps a range pinned.
enum Kept {
    Reading(#[expect(dead_code, reason = "kept until it is dropped")] Pinned<'static>),
    Writing(#[expect(dead_code, reason = "kept until it is dropped")] PinnedMut<'static>),
}

/// A range of a mapping that stays in memory and mapped.
pub struct Pin {
    _kept: Kept,
    /// Dropped last: the mapping may be closed from then on.
    _counted: Counted,
}

impl Handle for Pin {
    const IS_NULL: &'static str = "the pin is NULL; give what quire_pin returned";
}

/// Reads and maps a range of a mapping, and keeps it so until quire_unpin, whatever else needs memory:
/// a system call can be given these bytes, and the kernel may hold them so long, as for direct I/O,
/// vmsplice or io_uring. With QUIRE_PIN_WRITE, for a writable mapping, the kernel may also write them
/// at any time. Until quire_unpin they count as dirty then, and a flush writes what it finds there.
/// Pins nest. `len` may be QUIRE_TO_END.
///
/// Returns NULL on error. ENOMEM: more than half of the memory would be pinned. quire_set_len fails
/// with EBUSY where a pinned page would go or be cut into; so do quire_unmap, quire_remap and
/// quire_protect of the mapping.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_pin(
    mapping: *const Mapping,
    offset: usize,
    len: usize,
    flags: u32,
) -> *mut Pin {
    // SAFETY: the caller's promise.
    let mapping = unsafe { get(mapping) };
    pointer(mapping.and_then(|mapping| pin(mapping, offset, len, flags)).and_then(hand_out))
}

fn pin(mapping: &'static Mapping, offset: usize, len: usize, flags: u32) -> Result<Pin, Failure> {
    let range = mapping.range(offset, len)?;
    let kept = match (flags, &mapping.rights) {
        (0, Rights::Read(map)) => Kept::Reading(map.pin(range)?),
        (0, Rights::Write(map)) => Kept::Reading(map.pin(range)?),
        (0, Rights::Copy(map)) => Kept::Reading(map.pin(range)?),
        (QUIRE_PIN_WRITE, Rights::Write(map)) => Kept::Writing(map.pin_write(range)?),
        (QUIRE_PIN_WRITE, Rights::Copy(map)) => Kept::Writing(map.pin_write(range)?),
        (QUIRE_PIN_WRITE, Rights::Read(_)) => {
            return Err(Failure::Argument(
                "the mapping cannot be written; map it with QUIRE_MAP_WRITE, or pin it without \
                 QUIRE_PIN_WRITE",
            ));
        }
        _ => return Err(Failure::Argument("a flag is not known; give those of quire_pin only")),
    };
    Ok(Pin { _kept: kept, _counted: mapping.count_pin() })
}

/// Unpins the range, and ends the handle.
///
/// # Safety
/// `pin` is NULL or a handle that is not closed and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_unpin(pin: *mut Pin) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { close(pin) })
}
