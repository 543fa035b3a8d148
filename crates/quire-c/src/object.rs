//! Objects: files, and what is packed in archives.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use engine::library::{Object as EngineObject, OpenOptions};
use engine::store::Direct;
use quire_url::{CACHE_BYTES, OpenUrl as _, UrlOptions};

use crate::failure::{Failure, number, pointer, status};
use crate::handle::{Handle, close, get, hand_out, string};
use crate::space::Space;

/// quire_open: for writing as well.
pub const QUIRE_WRITE: u32 = 1;
/// quire_open: makes the file where there is none. Needs QUIRE_WRITE.
pub const QUIRE_CREATE: u32 = 2;
/// quire_open: reads and writes pass the kernel's page cache by, or the file is not opened. By
/// default they do where they can and little of the file is in it.
pub const QUIRE_DIRECT_ON: u32 = 4;
/// quire_open: reads and writes go through the kernel's page cache.
pub const QUIRE_DIRECT_OFF: u32 = 8;
/// quire_open: takes a file as it is even where its name ends in .zst.
pub const QUIRE_PLAIN: u32 = 16;

const FLAGS: u32 = QUIRE_WRITE | QUIRE_CREATE | QUIRE_DIRECT_ON | QUIRE_DIRECT_OFF | QUIRE_PLAIN;

/// cbindgen:ignore
pub const QUIRE_TO_END: usize = usize::MAX;

/// Says whether the `len` bytes at `offset` may be written to the file now: not 0 is yes.
pub type Barrier =
    Option<unsafe extern "C" fn(offset: u64, len: usize, user: *mut c_void) -> c_int>;

/// An object: a file, an object of a server, or what is packed in an archive, with its cached pages.
pub struct Object {
    pub(crate) object: EngineObject,
}

impl Handle for Object {
    const IS_NULL: &'static str = "the object is NULL; give what quire_open returned";
}

/// Opens a regular file or a block device. If its name ends in .zst, and it is opened for reading
/// without QUIRE_PLAIN, the object is the file that is packed in it.
///
/// `len_max` is how long the object may become by quire_set_len, in bytes; 0 stands for 64 GiB more
/// than it has. Returns NULL on error.
///
/// # Safety
/// `space` is NULL or a handle that is not closed; `path` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_open(
    space: *const Space,
    path: *const c_char,
    flags: u32,
    len_max: u64,
) -> *mut Object {
    // SAFETY: the caller's promise.
    pointer(unsafe { open(space, path, flags, len_max) }.and_then(hand_out))
}

/// # Safety
/// As for [`quire_open`].
unsafe fn open(
    space: *const Space,
    path: *const c_char,
    flags: u32,
    len_max: u64,
) -> Result<Object, Failure> {
    // SAFETY: the caller's promise.
    let (space, path) = unsafe { (&get(space)?.space, string(path)?) };
    let has = |flag| flags & flag != 0;
    if flags & !FLAGS != 0 {
        return Err(Failure::Argument("a flag is not known; give those of quire_open only"));
    }
    if has(QUIRE_CREATE) && !has(QUIRE_WRITE) {
        return Err(Failure::Argument("QUIRE_CREATE is for writing; add QUIRE_WRITE"));
    }
    let direct = match (has(QUIRE_DIRECT_ON), has(QUIRE_DIRECT_OFF)) {
        (true, true) => {
            return Err(Failure::Argument("QUIRE_DIRECT_ON and QUIRE_DIRECT_OFF; give one"));
        }
        (true, false) => Direct::On,
        (false, true) => Direct::Off,
        (false, false) => Direct::Auto,
    };
    let options = OpenOptions::new().write(has(QUIRE_WRITE)).create(has(QUIRE_CREATE));
    let mut options = options.direct(direct).plain(has(QUIRE_PLAIN));
    if len_max != 0 {
        options = options.len_max(len_max);
    }
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    Ok(Object { object: options.open(space, path)? })
}

/// Opens an object of a server, read-only: `s3://BUCKET/KEY`, `https://HOST/PATH`. Of the flags
/// QUIRE_PLAIN has a meaning, and QUIRE_WRITE is an error. Where `cache` is a folder and not NULL, what
/// was fetched is kept in it, in `cache_max` bytes at most (0 stands for 4 GiB), for whoever opens the
/// object next. An object that is replaced on the server is ESTALE from then on.
///
/// Returns NULL on error.
///
/// # Safety
/// `space` is NULL or a handle that is not closed; `url` and `cache` are NULL or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_open_url(
    space: *const Space,
    url: *const c_char,
    flags: u32,
    cache: *const c_char,
    cache_max: u64,
) -> *mut Object {
    // SAFETY: the caller's promise.
    pointer(unsafe { open_url(space, url, flags, cache, cache_max) }.and_then(hand_out))
}

/// # Safety
/// As for [`quire_open_url`].
unsafe fn open_url(
    space: *const Space,
    url: *const c_char,
    flags: u32,
    cache: *const c_char,
    cache_max: u64,
) -> Result<Object, Failure> {
    // SAFETY: the caller's promise.
    let (space, url) = unsafe { (&get(space)?.space, string(url)?) };
    let url = url.to_str().map_err(|_| Failure::Argument("the URL is not UTF-8; escape it"))?;
    if flags & !(QUIRE_PLAIN | QUIRE_WRITE) != 0 {
        return Err(Failure::Argument("a flag has no meaning for a URL; give QUIRE_PLAIN or 0"));
    }
    let mut of_url = UrlOptions::new();
    if !cache.is_null() {
        // SAFETY: the caller's promise.
        let cache = OsStr::from_bytes(unsafe { string(cache) }?.to_bytes());
        of_url = of_url.cache(cache, if cache_max == 0 { CACHE_BYTES } else { cache_max });
    }
    let has = |flag| flags & flag != 0;
    let options = OpenOptions::new().write(has(QUIRE_WRITE)).plain(has(QUIRE_PLAIN));
    Ok(Object { object: options.open_url(space, url, &of_url)? })
}

/// Makes an object of `len` zeros that no file is behind. Its pages count against the memory of the
/// address space as any object's; what has to go is compressed, and goes to the swap file where the
/// address space has one. It can be written, and there is nothing to flush: quire_flush and
/// quire_sync succeed and do nothing. Its bytes end with it.
///
/// `len_max` is how long it may become by quire_set_len, in bytes; 0 stands for 64 GiB more than
/// `len`. Returns NULL on error.
///
/// # Safety
/// `space` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_open_memory(
    space: *const Space,
    len: u64,
    len_max: u64,
) -> *mut Object {
    // SAFETY: the caller's promise.
    pointer(unsafe { open_memory(space, len, len_max) }.and_then(hand_out))
}

/// # Safety
/// As for [`quire_open_memory`].
unsafe fn open_memory(space: *const Space, len: u64, len_max: u64) -> Result<Object, Failure> {
    // SAFETY: the caller's promise.
    let space = unsafe { &get(space)?.space };
    let mut options = OpenOptions::new();
    if len_max != 0 {
        options = options.len_max(len_max);
    }
    Ok(Object { object: options.memory(space, len)? })
}

/// Ends a handle. The object itself ends with the last of its handle and its mappings. What is dirty
/// is written then; to learn of an error, call quire_sync before.
///
/// # Safety
/// `object` is NULL or a handle that is not closed and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_close(object: *mut Object) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { close(object) })
}

/// How long an object is, in bytes; -1 on error.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_len(object: *const Object) -> i64 {
    // SAFETY: the caller's promise.
    number(unsafe { get(object) }.map(|object| object.object.len()))
}

/// Changes the length, the file's as well. Mappings stay; an access behind the end is a SIGBUS.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_set_len(object: *const Object, len: u64) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { get(object) }.and_then(|object| Ok(object.object.set_len(len)?)))
}

/// Follows a change of the file's length that another program made, and returns it; -1 on error.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_refresh(object: *const Object) -> i64 {
    // SAFETY: the caller's promise.
    number(unsafe { get(object) }.and_then(|object| Ok(object.object.refresh_len()?)))
}

/// Writes what is dirty in a range to the file and makes it durable. `len` may be QUIRE_TO_END.
///
/// On error what could not be written is still dirty. EAGAIN: the barrier holds pages back, and all
/// others are written.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_flush(object: *const Object, offset: u64, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    let object = unsafe { get(object) };
    status(object.and_then(|object| Ok(object.object.flush_range(range(offset, len)?)?)))
}

/// Writes everything dirty to the file and makes it durable. Errors are those of quire_flush.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_sync(object: *const Object) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { get(object) }.and_then(|object| Ok(object.object.sync()?)))
}

/// Reads bytes through the cache, with an error instead of a SIGBUS. Returns how many there were
/// before the object's end; -1 on error. `into` must not be memory that the address space has
/// mapped.
///
/// # Safety
/// `object` is NULL or a handle that is not closed; `into` is NULL, or `len` bytes that nothing
/// else uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_read_at(
    object: *const Object,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> i64 {
    // SAFETY: the caller's promise.
    number(unsafe { read_at(object, offset, into, len) })
}

/// # Safety
/// As for [`quire_read_at`].
unsafe fn read_at(
    object: *const Object,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> Result<u64, Failure> {
    // SAFETY: the caller's promise.
    let object = unsafe { &get(object)?.object };
    if len == 0 {
        return Ok(0);
    }
    if into.is_null() {
        return Err(Failure::Argument("the buffer is NULL; give one of len bytes"));
    }
    if isize::try_from(len).is_err() || offset.checked_add(len as u64).is_none() {
        return Err(Failure::Argument("len is more than any buffer has; give the buffer's"));
    }
    // SAFETY: not null, and no longer than a buffer can be; the caller's promise for the rest.
    // What is not initialised there is not read, but only written.
    let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
    Ok(object.read_at(offset, into)? as u64)
}

/// Begins to read a range into the cache. `len` may be QUIRE_TO_END. Returns how many bytes are
/// under way; -1 on error.
///
/// # Safety
/// `object` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_prefetch(object: *const Object, offset: u64, len: usize) -> i64 {
    // SAFETY: the caller's promise.
    let object = unsafe { get(object) };
    number(object.and_then(|object| Ok(object.object.prefetch(range(offset, len)?) as u64)))
}

/// Sets the write barrier: no page is written to the file, by any way, unless `may_write` says yes for
/// its bytes. A page that it holds back stays dirty, and is asked about again. NULL takes the barrier
/// away.
///
/// `may_write` is called from any thread, from several at once, and with pages locked: it must
/// neither touch a mapping of the address space nor call this library. A barrier that was replaced
/// is not called any more when this returns; one that was not is called until the object's handle
/// and its mappings are closed.
///
/// # Safety
/// `object` is NULL or a handle that is not closed; `may_write` can be called as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_set_barrier(
    object: *const Object,
    may_write: Barrier,
    user: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let object = unsafe { get(object) };
    status(object.map(|object| match may_write {
        Some(may_write) => {
            let user = User(user);
            object.object.set_barrier(move |offset, len| {
                // SAFETY: the caller's promise.
                unsafe { may_write(offset, len, user.pointer()) != 0 }
            });
        }
        None => object.object.set_barrier(|_, _| true),
    }))
}

/// The pointer that a barrier is called with.
struct User(*mut c_void);

// SAFETY: only handed to the barrier, of which `quire_set_barrier` says from where it is called.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// A method, so that a closure takes the whole of it and not the pointer alone.
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// A range of an object's bytes.
fn range(offset: u64, len: usize) -> Result<Range<u64>, Failure> {
    if len == QUIRE_TO_END {
        return Ok(offset..u64::MAX);
    }
    let end = offset.checked_add(len as u64);
    end.map(|end| offset..end).ok_or(Failure::Argument(
        "offset and len reach over every object's end; give QUIRE_TO_END for all there is",
    ))
}
