//! The malloc family of the next library in line: libc's, or another preloaded allocator's.
//!
//! Owns a table of its functions, found by `dlsym(RTLD_NEXT)` when they are first needed: in an
//! unmanaged process for every call, in a managed one for pointers that are not of our heap.
//!
//! dlsym itself may allocate, and that call arrives here again. While one thread looks the table
//! up, allocations are served from a small static area that is never given back. Another thread
//! that comes in between is served from it as well: if it waited for the first it could be a
//! deadlock, as the first waits for the loader's lock, which the second may hold.

use core::ffi::{CStr, c_int, c_void};
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix::io::Errno;

type Pointer = *mut c_void;

/// A function of another library, of the type `F`: its name, and its address once it was looked up.
pub struct Function<F> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    function: PhantomData<F>,
}

impl<F: Copy> Function<F> {
    /// # Safety
    ///
    /// `F` is a pointer to a function, of the type that every library's function `name` has.
    pub const unsafe fn new(name: &'static CStr) -> Function<F> {
        const { assert!(size_of::<F>() == size_of::<Pointer>()) };
        let address = AtomicPtr::new(core::ptr::null_mut());
        Function { name, address, function: PhantomData }
    }

    /// The function, or None where it was not looked up or not found.
    fn get(&self) -> Option<F> {
        // Relaxed: the value is the address of code that was mapped before this library ran.
        let address = self.address.load(Ordering::Relaxed);
        // SAFETY: an address of dlsym's, and `F` has its size, by `new`.
        (!address.is_null()).then(|| unsafe { core::mem::transmute_copy(&address) })
    }

    /// The function, looked up where it is not known; None where no library in `scope` has it. The
    /// first call must not come while a trap of [`crate::fork`] is armed.
    pub fn find(&self, scope: Pointer) -> Option<F> {
        self.get().or_else(|| {
            // SAFETY: the name is a C string, RTLD_NEXT and RTLD_DEFAULT are valid in any library.
            let address = unsafe { libc::dlsym(scope, self.name.as_ptr()) };
            // Relaxed: as in `get`.
            self.address.store(address, Ordering::Relaxed);
            self.get()
        })
    }
}

/// The table: a static for each function, with its type.
macro_rules! table {
    ($($function:ident: $name:literal, $type:ty;)*) => {
        $(
            // SAFETY: the type that the C standard or the manual gives to the function.
            static $function: Function<$type> = unsafe { Function::new($name) };
        )*

        fn look_all_up() {
            $($function.find(libc::RTLD_NEXT);)*
        }
    };
}

table! {
    MALLOC: c"malloc", unsafe extern "C" fn(usize) -> Pointer;
    CALLOC: c"calloc", unsafe extern "C" fn(usize, usize) -> Pointer;
    REALLOC: c"realloc", unsafe extern "C" fn(Pointer, usize) -> Pointer;
    FREE: c"free", unsafe extern "C" fn(Pointer);
    MEMALIGN: c"memalign", unsafe extern "C" fn(usize, usize) -> Pointer;
    USABLE_SIZE: c"malloc_usable_size", unsafe extern "C" fn(Pointer) -> usize;
    TRIM: c"malloc_trim", extern "C" fn(usize) -> c_int;
    MALLOPT: c"mallopt", extern "C" fn(c_int, c_int) -> c_int;
    MALLINFO: c"mallinfo", extern "C" fn() -> libc::mallinfo;
    MALLINFO2: c"mallinfo2", extern "C" fn() -> libc::mallinfo2;
}

/// Set once every function was looked up.
static FOUND: AtomicBool = AtomicBool::new(false);
/// Set while a thread looks them up.
static LOOKING: AtomicBool = AtomicBool::new(false);

/// Whether the table can be used; looks it up unless a thread does so already.
fn is_found() -> bool {
    // Acquire: pairs with the release below; the addresses are seen.
    if FOUND.load(Ordering::Acquire) {
        return true;
    }
    // AcqRel: one thread looks up; what it wrote is ordered by FOUND.
    if LOOKING.swap(true, Ordering::AcqRel) {
        return false;
    }
    let _kept = crate::ErrnoKept::new();
    look_all_up();
    FOUND.store(true, Ordering::Release);
    true
}

/// A function of the table; None while it cannot be used: a block comes from the static area then.
fn in_table<F: Copy>(function: &Function<F>) -> Option<F> {
    if is_found() { function.get() } else { None }
}

/// For calls that cannot be served from the static area: a thread that comes while another looks the
/// table up does so itself. Its own recursion ends in the static area.
fn found<F: Copy>(function: &Function<F>) -> Option<F> {
    if is_found() { function.get() } else { function.find(libc::RTLD_NEXT) }
}

/// Bytes of the static area: what the loader may ask for while it looks up ten symbols.
const EARLY_BYTES: usize = 64 * 1024;

#[repr(C, align(4096))]
struct Early(core::cell::UnsafeCell<[u8; EARLY_BYTES]>);

// SAFETY: pieces are handed out once each, by an atomic counter; nothing here reads or writes them.
unsafe impl Sync for Early {}

static EARLY: Early = Early(core::cell::UnsafeCell::new([0; EARLY_BYTES]));
static EARLY_USED: AtomicUsize = AtomicUsize::new(0);

/// A piece of the static area, zeroed, never given back. Its size stands in the 16 bytes before.
fn early_alloc(size: usize, alignment: usize) -> Pointer {
    let alignment = alignment.max(16);
    let start = |used: usize| (used + 16).next_multiple_of(alignment);
    let end = |used| {
        let end = start(used) + size.next_multiple_of(16);
        (end <= EARLY_BYTES).then_some(end)
    };
    let is_small = size <= EARLY_BYTES && alignment <= 4096;
    // Relaxed: the counter alone gives each caller bytes of its own; their content is constant zero.
    match is_small.then(|| EARLY_USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end)) {
        // SAFETY: from 16 before the start up to the end lies in the area, and is this call's alone.
        Some(Ok(used)) => unsafe {
            let piece = EARLY.0.get().cast::<u8>().add(start(used));
            piece.sub(16).cast::<usize>().write(size);
            piece.cast()
        },
        _ => no_memory(),
    }
}

/// Null, and errno.
fn no_memory() -> Pointer {
    crate::set_errno(Errno::NOMEM);
    core::ptr::null_mut()
}

/// The size of a piece of the static area; None for any other pointer.
fn early_size(pointer: Pointer) -> Option<usize> {
    let offset = (pointer as usize).wrapping_sub(EARLY.0.get() as usize);
    if offset >= EARLY_BYTES {
        return None;
    }
    // SAFETY: pieces have their size in the 16 bytes before, written by `early_alloc`.
    Some(unsafe { pointer.cast::<u8>().sub(16).cast::<usize>().read() })
}

/// malloc of the next library.
///
/// # Safety (of this and all functions below)
///
/// As for the C functions: a pointer given is one that this family gave, and not yet freed.
pub unsafe fn malloc(size: usize) -> Pointer {
    // SAFETY: the caller's promise.
    in_table(&MALLOC).map_or_else(|| early_alloc(size, 16), |malloc| unsafe { malloc(size) })
}

/// calloc of the next library.
pub unsafe fn calloc(count: usize, size: usize) -> Pointer {
    match in_table(&CALLOC) {
        // SAFETY: the caller's promise.
        Some(calloc) => unsafe { calloc(count, size) },
        None => early_alloc(count.saturating_mul(size), 16),
    }
}

/// memalign of the next library.
pub unsafe fn memalign(alignment: usize, size: usize) -> Pointer {
    match in_table(&MEMALIGN) {
        // SAFETY: the caller's promise.
        Some(memalign) => unsafe { memalign(alignment, size) },
        None => early_alloc(size, alignment),
    }
}

/// realloc of the next library.
pub unsafe fn realloc(pointer: Pointer, size: usize) -> Pointer {
    if let Some(old_size) = early_size(pointer) {
        // SAFETY: a new block of `size` bytes, an old one of `old_size`; they do not overlap.
        return unsafe {
            let moved = malloc(size);
            if !moved.is_null() {
                let bytes = size.min(old_size);
                core::ptr::copy_nonoverlapping::<u8>(pointer.cast(), moved.cast(), bytes);
            }
            moved
        };
    }
    if pointer.is_null() {
        // SAFETY: realloc(NULL, size) is malloc(size), which can be served early.
        return unsafe { malloc(size) };
    }
    // SAFETY: the caller's promise.
    found(&REALLOC).map_or_else(no_memory, |realloc| unsafe { realloc(pointer, size) })
}

/// free of the next library.
pub unsafe fn free(pointer: Pointer) {
    if pointer.is_null() || early_size(pointer).is_some() {
        return;
    }
    if let Some(free) = found(&FREE) {
        // SAFETY: the caller's promise.
        unsafe { free(pointer) }
    }
}

/// malloc_usable_size of the next library.
pub unsafe fn usable_size(pointer: Pointer) -> usize {
    if pointer.is_null() {
        return 0;
    }
    early_size(pointer).unwrap_or_else(|| {
        // SAFETY: the caller's promise.
        found(&USABLE_SIZE).map_or(0, |usable_size| unsafe { usable_size(pointer) })
    })
}

/// The realloc and free that the program's own calls reach: ours, unless the program brings its
/// own allocator. Such an allocator seldom has the newer functions, which glibc builds on these two.
/// So ours are built on the program's two: a block of its allocator is not one of ours, though its
/// memory may well be the arena's.
// SAFETY: realloc's type.
static PROGRAM_REALLOC: Function<unsafe extern "C" fn(Pointer, usize) -> Pointer> =
    unsafe { Function::new(c"realloc") };
// SAFETY: free's type.
static PROGRAM_FREE: Function<unsafe extern "C" fn(Pointer)> = unsafe { Function::new(c"free") };

/// realloc as the program itself would call it.
pub unsafe fn program_realloc(pointer: Pointer, size: usize) -> Pointer {
    let realloc = PROGRAM_REALLOC.find(libc::RTLD_DEFAULT);
    // SAFETY: the caller's promise.
    realloc.map_or_else(no_memory, |realloc| unsafe { realloc(pointer, size) })
}

/// free as the program itself would call it.
pub unsafe fn program_free(pointer: Pointer) {
    if let Some(free) = PROGRAM_FREE.find(libc::RTLD_DEFAULT) {
        // SAFETY: the caller's promise.
        unsafe { free(pointer) }
    }
}

/// malloc_trim of the next library: whether it gave memory back.
pub fn trim(pad: usize) -> c_int {
    found(&TRIM).map_or(0, |trim| trim(pad))
}

/// mallopt of the next library: 1 where it took the setting.
pub fn mallopt(parameter: c_int, value: c_int) -> c_int {
    found(&MALLOPT).map_or(0, |mallopt| mallopt(parameter, value))
}

/// mallinfo of the next library, where it has one.
pub fn mallinfo() -> Option<libc::mallinfo> {
    found(&MALLINFO).map(|mallinfo| mallinfo())
}

/// mallinfo2 of the next library, where it has one (glibc 2.33).
pub fn mallinfo2() -> Option<libc::mallinfo2> {
    found(&MALLINFO2).map(|mallinfo2| mallinfo2())
}
