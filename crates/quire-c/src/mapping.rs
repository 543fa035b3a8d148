//! An object's bytes as memory.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use engine::library::{
    Error, FaultAround, MapOptions, Mapping as ReadMapping, MappingCopy, MappingMut, Pattern,
    RemapOptions, Unchanged,
};

use crate::failure::{Failure, number, pointer, status};
use crate::handle::{Handle, close, get, get_mut, hand_out};
use crate::object::{Object, QUIRE_TO_END};

/// quire_map: writable.
pub const QUIRE_MAP_WRITE: u32 = 1;
/// quire_map: reads and maps all of it before returning, as far as memory goes.
pub const QUIRE_MAP_POPULATE: u32 = 2;
/// quire_map: may reach behind the object's end, as far as it may grow. An access there is a SIGBUS
/// until it has grown.
pub const QUIRE_MAP_BEYOND_END: u32 = 4;

/// quire_map: a private copy, as of mmap's MAP_PRIVATE: what is written (with QUIRE_MAP_WRITE) is
/// seen in this mapping alone, and never reaches the file, which may be read-only. Later changes of
/// the file may be seen in it or not.
pub const QUIRE_MAP_PRIVATE: u32 = 8;

const FLAGS: u32 = QUIRE_MAP_WRITE | QUIRE_MAP_POPULATE | QUIRE_MAP_BEYOND_END | QUIRE_MAP_PRIVATE;

/// Fault-around: as many cached pages as the faults of the mapping suggest.
pub const QUIRE_FAULT_AROUND_AUTO: c_int = -1;
/// Fault-around: exactly the page.
pub const QUIRE_FAULT_AROUND_OFF: c_int = -2;

/// quire_advise: nothing in particular.
pub const QUIRE_NORMAL: c_int = 0;
/// quire_advise: in order.
pub const QUIRE_SEQUENTIAL: c_int = 1;
/// quire_advise: in no order.
pub const QUIRE_RANDOM: c_int = 2;
/// quire_advise: soon; begins to read it.
pub const QUIRE_WILLNEED: c_int = 3;
/// quire_advise: not soon; drops it from the cache, except for what is dirty.
pub const QUIRE_DONTNEED: c_int = 4;

/// quire_remap: it may go to another address.
pub const QUIRE_MAY_MOVE: u32 = 1;

/// A mapping, by its rights.
pub(crate) enum Rights {
    Read(ReadMapping),
    Write(MappingMut),
    Copy(MappingCopy),
}

/// A mapping: some of an object's bytes as memory.
pub struct Mapping {
    offset: u64,
    len: usize,
    /// Pins that refer to it.
    pins: AtomicUsize,
    pub(crate) rights: Rights,
}

/// One pin more of a mapping, which is neither closed nor changed while this exists.
pub(crate) struct Counted(&'static AtomicUsize);

impl Drop for Counted {
    fn drop(&mut self) {
        // Release pairs with the acquire in `must_be_unpinned`: what the pin did comes before.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Handle for Mapping {
    const IS_NULL: &'static str = "the mapping is NULL; give what quire_map returned";
}

/// A method that all kinds have.
macro_rules! either {
    ($mapping:expr, $map:ident => $result:expr) => {
        match $mapping.rights {
            Rights::Read(ref $map) => $result,
            Rights::Write(ref $map) => $result,
            Rights::Copy(ref $map) => $result,
        }
    };
}

impl Mapping {
    pub(crate) fn count_pin(&'static self) -> Counted {
        // Relaxed: to close the mapping before this call has returned breaks the caller's promise.
        self.pins.fetch_add(1, Ordering::Relaxed);
        Counted(&self.pins)
    }

    fn must_be_unpinned(&self) -> Result<(), Failure> {
        // Acquire: see `Counted`.
        if self.pins.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Failure::Pinned) }
    }

    /// A range of the mapping's bytes.
    pub(crate) fn range(&self, offset: usize, len: usize) -> Result<Range<usize>, Failure> {
        let outside = Failure::Argument(
            "offset and len reach over the mapping's end; give QUIRE_TO_END for all there is",
        );
        let Some(left) = self.len.checked_sub(offset) else { return Err(outside) };
        match len {
            QUIRE_TO_END => Ok(offset..self.len),
            len if len <= left => Ok(offset..offset + len),
            _ => Err(outside),
        }
    }
}

/// Maps `len` bytes of an object from `offset` on, any byte. `len` may be QUIRE_TO_END.
/// `fault_around` is how many pages a read fault maps, of those that are cached:
/// QUIRE_FAULT_AROUND_AUTO, QUIRE_FAULT_AROUND_OFF, or an order from 0 to 9 for the aligned block
/// of 2^order pages.
///
/// Returns NULL on error. An access to a page that cannot be read is a SIGBUS.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_map(
    object: *const Object,
    offset: u64,
    len: usize,
    flags: u32,
    fault_around: c_int,
) -> *mut Mapping {
    // SAFETY: the caller's promise.
    let object = unsafe { get(object) };
    pointer(object.and_then(|object| map(object, offset, len, flags, fault_around)))
}

fn map(
    object: &Object,
    offset: u64,
    len: usize,
    flags: u32,
    fault_around: c_int,
) -> Result<*mut Mapping, Failure> {
    let object = &object.object;
    let has = |flag| flags & flag != 0;
    if flags & !FLAGS != 0 {
        return Err(Failure::Argument("a flag is not known; give those of quire_map only"));
    }
    let fault_around = match fault_around {
        QUIRE_FAULT_AROUND_AUTO => FaultAround::Auto,
        QUIRE_FAULT_AROUND_OFF => FaultAround::Off,
        0..=9 => FaultAround::Order(fault_around.unsigned_abs()),
        _ => return Err(Failure::Argument("fault_around is auto, off, or an order from 0 to 9")),
    };
    let mut options = MapOptions::new().offset(offset).fault_around(fault_around);
    options = options.populate(has(QUIRE_MAP_POPULATE)).beyond_end(has(QUIRE_MAP_BEYOND_END));
    // Computed here, and not by the engine: the object may grow meanwhile.
    let to_end = usize::try_from(object.len().saturating_sub(offset)).unwrap_or(usize::MAX);
    let len = if len == QUIRE_TO_END { to_end } else { len };
    options = options.len(len as u64);
    // SAFETY: no slice is made of the mapping, here or by C: its bytes are used by address.
    let rights = unsafe {
        match (has(QUIRE_MAP_PRIVATE), has(QUIRE_MAP_WRITE)) {
            (true, true) => Rights::Copy(options.map_copy(object)?),
            (true, false) => Rights::Read(options.map_copy_read_only(object)?),
            (false, true) => Rights::Write(options.map_mut(object)?),
            (false, false) => Rights::Read(options.map(object)?),
        }
    };
    hand_out(Mapping { offset, len, pins: AtomicUsize::new(0), rights })
}

/// Unmaps, and ends the handle. What was written reaches the file some time later; quire_sync waits
/// for it. Fails with EBUSY, and changes nothing, while a range of the mapping is pinned.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed; it and its memory are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_unmap(mapping: *mut Mapping) -> c_int {
    // SAFETY: the caller's promise.
    let unpinned = unsafe { get(mapping.cast_const()) }.and_then(Mapping::must_be_unpinned);
    // SAFETY: the caller's promise, and no pin refers to it.
    status(unpinned.and_then(|()| unsafe { close(mapping) }))
}

/// The address of a mapping's first byte; NULL on error.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_base(mapping: *const Mapping) -> *mut c_void {
    // SAFETY: the caller's promise.
    let mapping = unsafe { get(mapping) };
    pointer(mapping.map(|mapping| either!(mapping, map => map.as_ptr()).cast_mut().cast()))
}

/// How many bytes a mapping has; -1 on error.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_mapping_len(mapping: *const Mapping) -> i64 {
    // SAFETY: the caller's promise.
    number(unsafe { get(mapping) }.map(|mapping| mapping.len as u64))
}

/// Reads and maps a range of a mapping, as far as memory goes; fails where it cannot be read. Pages
/// that failed before can be accessed again if they can be read now. `len` may be QUIRE_TO_END, here
/// and below; `offset` is from the mapping's first byte.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_populate(
    mapping: *const Mapping,
    offset: usize,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let mapping = unsafe { get(mapping) };
    status(mapping.and_then(|mapping| {
        let range = mapping.range(offset, len)?;
        Ok(either!(mapping, map => map.populate(range))?)
    }))
}

/// Maps what is in memory already of a range, without waiting for anything. Returns how many pages
/// of it are mapped then; -1 on error.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_populate_cached(
    mapping: *const Mapping,
    offset: usize,
    len: usize,
) -> i64 {
    // SAFETY: the caller's promise.
    let mapping = unsafe { get(mapping) };
    number(mapping.and_then(|mapping| {
        let range = mapping.range(offset, len)?;
        Ok(either!(mapping, map => map.populate_cached(range)) as u64)
    }))
}

/// Says how a range of a mapping will be used: QUIRE_NORMAL, QUIRE_SEQUENTIAL, QUIRE_RANDOM,
/// QUIRE_WILLNEED or QUIRE_DONTNEED.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_advise(
    mapping: *const Mapping,
    offset: usize,
    len: usize,
    advice: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { get(mapping) }.and_then(|mapping| advise(mapping, offset, len, advice)))
}

fn advise(mapping: &Mapping, offset: usize, len: usize, advice: c_int) -> Result<(), Failure> {
    let range = mapping.range(offset, len)?;
    let pattern = match advice {
        QUIRE_NORMAL => Pattern::Normal,
        QUIRE_SEQUENTIAL => Pattern::Sequential,
        QUIRE_RANDOM => Pattern::Random,
        QUIRE_WILLNEED => {
            either!(mapping, map => map.will_need(range));
            return Ok(());
        }
        QUIRE_DONTNEED => {
            either!(mapping, map => map.dont_need(range));
            return Ok(());
        }
        _ => return Err(Failure::Argument("the advice is not known; quire_advise lists them")),
    };
    Ok(either!(mapping, map => map.advise(pattern, range))?)
}

/// Writes what is dirty in a range of a mapping to the file and makes it durable. Errors are those
/// of quire_flush. Does nothing for a private copy, of which nothing is ever written.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_flush_mapping(
    mapping: *const Mapping,
    offset: usize,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let mapping = unsafe { get(mapping) };
    status(mapping.and_then(|mapping| {
        let range = mapping.range(offset, len)?;
        if let Rights::Copy(_) = mapping.rights {
            return Ok(());
        }
        let bytes = mapping.offset + range.start as u64..mapping.offset + range.end as u64;
        Ok(either!(mapping, map => map.object().flush_range(bytes))?)
    }))
}

/// Makes a mapping `len` bytes long: in its place, or, with QUIRE_MAY_MOVE, at another address, which
/// quire_base returns. On error nothing has changed: EBUSY while a range of it is pinned.
///
/// # Safety
/// `mapping` is NULL or a handle that is not closed; no other thread uses it, or its memory,
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_remap(mapping: *mut Mapping, len: usize, flags: u32) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { changeable(mapping) }.and_then(|mapping| remap(mapping, len, flags)))
}

/// A mapping that is to be changed.
///
/// # Safety
/// As for [`get_mut`].
unsafe fn changeable<'a>(mapping: *mut Mapping) -> Result<&'a mut Mapping, Failure> {
    // SAFETY: the caller's promise; what refers to it otherwise is a pin.
    unsafe {
        get(mapping.cast_const()).and_then(Mapping::must_be_unpinned)?;
        get_mut(mapping)
    }
}

fn remap(mapping: &mut Mapping, len: usize, flags: u32) -> Result<(), Failure> {
    if flags & !QUIRE_MAY_MOVE != 0 {
        return Err(Failure::Argument("a flag is not known; give those of quire_remap only"));
    }
    let options = RemapOptions::new().may_move(flags & QUIRE_MAY_MOVE != 0);
    match &mut mapping.rights {
        Rights::Read(map) => map.remap(len, options)?,
        Rights::Write(map) => map.remap(len, options)?,
        Rights::Copy(map) => map.remap(len, options)?,
    }
    mapping.len = len;
    Ok(())
}

/// Makes a mapping writable, or read-only where `is_writable` is 0. A private copy stays one. On error
/// nothing has changed: EACCES where the object is read-only, EBUSY while a range is pinned.
///
/// # Safety
/// As for quire_remap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_protect(mapping: *mut Mapping, is_writable: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let mapping = match unsafe { changeable(mapping) } {
        Ok(mapping) => mapping,
        Err(failure) => return status(Err(failure)),
    };
    // SAFETY: written again below. A panic in between does not leave an `extern "C"` function: it
    // ends the process, so the value is never used twice.
    let before = unsafe { std::ptr::read(&raw const mapping.rights) };
    let (rights, result) = with_rights(before, is_writable != 0);
    // SAFETY: what was there has been read out above.
    unsafe { std::ptr::write(&raw mut mapping.rights, rights) };
    status(result.map_err(Failure::from))
}

fn with_rights(rights: Rights, is_writable: bool) -> (Rights, Result<(), Error>) {
    match (rights, is_writable) {
        // SAFETY: no slice is made of the mapping, as of any here.
        (Rights::Read(map), true) => settle(unsafe { map.make_mut() }, Rights::Write, Rights::Read),
        (Rights::Write(map), false) => settle(map.make_read_only(), Rights::Read, Rights::Write),
        (Rights::Copy(map), false) => settle(map.make_read_only(), Rights::Read, Rights::Copy),
        (rights, _) => (rights, Ok(())),
    }
}

/// What a mapping is after a change, or still is.
fn settle<A, B>(
    changed: Result<A, Unchanged<B>>,
    after: impl FnOnce(A) -> Rights,
    before: impl FnOnce(B) -> Rights,
) -> (Rights, Result<(), Error>) {
    match changed {
        Ok(map) => (after(map), Ok(())),
        Err(unchanged) => (before(unchanged.mapping), Err(unchanged.error)),
    }
}

/// Handles are used from several threads.
const _: () = {
    const fn is_sync<T: Send + Sync>() {}
    is_sync::<crate::space::Space>();
    is_sync::<Object>();
    is_sync::<Mapping>();
    is_sync::<crate::pin::Pin>();
    is_sync::<crate::cancel::Cancel>();
};
