//! Address spaces and their counters.

use std::ffi::{CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt as _;
use std::ptr::null;
use std::sync::OnceLock;

use engine::control::Event;
use engine::library::{AddressSpace, Delivery};

use crate::failure::{Failure, number, pointer, status};
use crate::handle::{Handle, close, get, hand_out, own_number, string};

/// Most memory that can be asked for: what a process can address for its mappings.
const MEMORY_MAX: usize = 1 << 40;
/// Most threads of a kind.
const THREADS_MAX: usize = 256;

/// An address space: a bound on memory, the threads that keep it, and the objects mapped under it.
pub struct Space {
    pub(crate) space: AddressSpace,
}

impl Handle for Space {
    const IS_NULL: &'static str = "the address space is NULL; give what quire_space_open returned";
}

/// How an address space is made. A member that is 0 stands for its default: zero the whole
/// structure, and set what matters.
#[repr(C)]
pub struct SpaceOptions {
    /// Bytes that may be held: cached pages, and the tables that go with them. 256 MiB by default,
    /// 1 MiB at least.
    pub memory: usize,
    /// Threads that serve faults. By default one per CPU, four at most.
    pub handlers: usize,
    /// Threads that read and write files, and so how many reads are in flight. Four by default.
    pub workers: usize,
    /// The folder in which a swap file without a name is made, for compressed pages of memory objects
    /// that take too much memory; NULL is no swap file.
    pub swap_folder: *const c_char,
    /// How long the swap file may become, in bytes: 256 KiB at least, where there is a folder.
    pub swap_bytes: u64,
    /// 1: a thread that faults serves itself, in a handler of SIGBUS. That is faster, but a system call
    /// that is given a page which is not mapped fails with EFAULT.
    pub is_inline: u32,
    /// For members to come: must be 0.
    pub reserved: [u32; 5],
}

/// Makes an address space and starts its threads. `options` may be NULL.
///
/// Returns NULL on error. errno is EPERM, EACCES or ENOSYS where the process cannot get a userfaultfd.
///
/// # Safety
/// `options` is NULL or points to options; their `swap_folder` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_space_open(options: *const SpaceOptions) -> *mut Space {
    // SAFETY: the caller's promise.
    pointer(unsafe { open(options.as_ref()) }.and_then(hand_out))
}

/// # Safety
/// As for [`quire_space_open`].
unsafe fn open(options: Option<&SpaceOptions>) -> Result<Space, Failure> {
    let mut builder = AddressSpace::builder();
    if let Some(&SpaceOptions {
        memory,
        handlers,
        workers,
        swap_folder,
        swap_bytes,
        is_inline,
        reserved,
    }) = options
    {
        if is_inline > 1 {
            return Err(Failure::Argument("is_inline is 0 or 1"));
        }
        if is_inline == 1 {
            builder = builder.delivery(Delivery::Inline);
        }
        if reserved != [0; 5] {
            let what = "reserved members must be 0; zero the structure before setting members";
            return Err(Failure::Argument(what));
        }
        if memory > MEMORY_MAX {
            return Err(Failure::Argument("memory is too much; ask for 1 TiB at most"));
        }
        if handlers > THREADS_MAX || workers > THREADS_MAX {
            return Err(Failure::Argument("too many threads; ask for 256 of a kind at most"));
        }
        if !swap_folder.is_null() {
            // SAFETY: the caller's promise.
            let folder = unsafe { string(swap_folder)? };
            builder = builder.swap(OsStr::from_bytes(folder.to_bytes()), swap_bytes);
        } else if swap_bytes != 0 {
            let what = "swap_bytes without a swap_folder; say where the swap file is to be";
            return Err(Failure::Argument(what));
        }
        if memory != 0 {
            builder = builder.memory(memory);
        }
        if handlers != 0 {
            builder = builder.handlers(handlers);
        }
        if workers != 0 {
            builder = builder.workers(workers);
        }
    }
    // The process has its number before the engine starts any thread.
    own_number()?;
    Ok(Space { space: builder.build()? })
}

/// Ends a handle. The address space itself ends with the last of its handle, its objects and its
/// mappings, in whatever order they are closed.
///
/// # Safety
/// `space` is NULL or a handle that is not closed and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_space_close(space: *mut Space) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { close(space) })
}

/// Returns 1 where faults that system calls take are served, or 0 where the process may serve its own
/// accesses only. A system call that is given a page which is not mapped fails with EFAULT then: call
/// quire_populate before. -1 on error.
///
/// # Safety
/// `space` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_serves_system_calls(space: *const Space) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { get(space) } {
        Ok(space) => c_int::from(space.space.serves_system_calls()),
        Err(failure) => status(Err(failure)),
    }
}

/// One counter, by its name; -1 on error, with ENOENT for a name that is not known.
///
/// Beside those that quire_counter_name lists there are memory_bytes, the bound; held_bytes, held
/// just now; and held_bytes_max, held at most so far.
///
/// # Safety
/// `space` is NULL or a handle that is not closed; `name` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quire_counter(space: *const Space, name: *const c_char) -> i64 {
    // SAFETY: the caller's promise.
    number(unsafe { counter(space, name) })
}

/// # Safety
/// As for [`quire_counter`].
unsafe fn counter(space: *const Space, name: *const c_char) -> Result<u64, Failure> {
    // SAFETY: the caller's promise.
    let (space, name) = unsafe { (&get(space)?.space, string(name)?) };
    let (held, held_max) = space.held();
    match name.to_bytes() {
        b"memory_bytes" => return Ok(space.memory() as u64),
        b"held_bytes" => return Ok(held as u64),
        b"held_bytes_max" => return Ok(held_max as u64),
        _ => {}
    }
    let known = Event::ALL.iter().find(|event| event.name().as_bytes() == name.to_bytes());
    let unknown = Failure::Unknown("no such counter; quire_counter_name lists them");
    known.map(|event| space.counter(event.name())).ok_or(unknown)
}

/// The name of the counter of a number, from 0 on; NULL behind the last one, which is no error.
#[unsafe(no_mangle)]
pub extern "C" fn quire_counter_name(index: usize) -> *const c_char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        Event::ALL.iter().filter_map(|event| CString::new(event.name()).ok()).collect()
    });
    names.get(index).map_or(null(), |name| name.as_ptr())
}
