//! What a SIGBUS was about, on standard error, before it ends the process.
//!
//! An access whose bytes cannot be read is a SIGBUS, of which Python says "Bus error" and no more. Ranges
//! are listed for the signal's handler, which says the file and the offset, and goes on to the handler that was
//! there. It takes no lock and allocates nothing.

use std::ffi::{CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::PyResult;

/// A range of addresses and what it is of. Entries are never freed, but used again.
#[derive(Default)]
struct Entry {
    start: AtomicUsize,
    /// 0 where it is not in use.
    end: AtomicUsize,
    offset: AtomicUsize,
    name: AtomicPtr<i8>,
    next: AtomicPtr<Entry>,
}

static FIRST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
static UNUSED: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());
/// The handler that was there.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A range that a SIGBUS is reported of, as long as this exists.
pub struct Reported(&'static Entry);

impl Reported {
    /// `name` is what `len` bytes from `address` on are of, from `offset` on.
    pub fn new(name: &str, offset: u64, address: usize, len: usize) -> Reported {
        let name = CString::new(name).unwrap_or_default();
        let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let entry = unused.unwrap_or_else(|| {
            let entry: &'static Entry = Box::leak(Box::default());
            let place = std::ptr::from_ref(entry).cast_mut();
            let mut first = FIRST.load(Ordering::Relaxed);
            loop {
                entry.next.store(first, Ordering::Relaxed);
                // Release publishes the entry to the handler.
                match FIRST.compare_exchange(first, place, Ordering::Release, Ordering::Relaxed) {
                    Ok(_) => break entry,
                    Err(other) => first = other,
                }
            }
        });
        entry.start.store(address, Ordering::Relaxed);
        entry.offset.store(usize::try_from(offset).unwrap_or(usize::MAX), Ordering::Relaxed);
        entry.name.store(name.into_raw().cast(), Ordering::Relaxed);
        // Release: who sees the end sees the rest.
        entry.end.store(address + len, Ordering::Release);
        Reported(entry)
    }
}

impl Drop for Reported {
    fn drop(&mut self) {
        // Nobody accesses the range any more, so no handler looks at its name.
        self.0.end.store(0, Ordering::Release);
        let name = self.0.name.swap(null_mut(), Ordering::Relaxed);
        // SAFETY: from `into_raw`, and taken back once.
        drop(unsafe { CString::from_raw(name.cast()) });
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// Has the handler called for every SIGBUS from now on.
pub fn install() -> PyResult<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: zero is valid for all of its members.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = report as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: as above.
    let mut before: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the handler is of its type, and does what handlers may.
    let installed = unsafe {
        libc::sigaction(libc::SIGBUS, null_mut(), &raw mut before) == 0
            && BEFORE.set(before).is_ok()
            && libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) == 0
    };
    if installed { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

extern "C" fn report(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's, as it says for this signal.
    let address = unsafe { (*info).si_addr() } as usize;
    say(address);
    let Some(before) = BEFORE.get() else { return };
    let handler = before.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // Done again, the access ends the process.
        // SAFETY: it is the action that was there.
        unsafe { libc::sigaction(signal, before, null_mut()) };
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: a handler with this flag is of this type.
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: a handler without it is of this one.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

/// Writes what lies at an address, if it is of a listed range.
fn say(address: usize) {
    // Acquire pairs with the release of `new`, as below.
    let mut next = FIRST.load(Ordering::Acquire);
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        let end = entry.end.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if (start..end).contains(&address) {
            let offset = entry.offset.load(Ordering::Relaxed) + (address - start);
            let name = entry.name.load(Ordering::Relaxed);
            write(b"quire: ");
            // SAFETY: a string of the range, which is accessed just now, and so is still listed.
            write(unsafe { std::ffi::CStr::from_ptr(name.cast()) }.to_bytes());
            write(b": the page at offset ");
            write_number(offset);
            write(b" can be neither read nor written (SIGBUS); prefetch, try_read and pin raise an exception \
                    that says why\n");
            return;
        }
        next = entry.next.load(Ordering::Relaxed);
    }
}

fn write_number(mut number: usize) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    write(&digits[at..]);
}

fn write(text: &[u8]) {
    // SAFETY: the bytes are there; where it fails nothing can be done.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}
