//! What the tests of objects share: address spaces, files, stores that misbehave on demand, accesses
//! that survive a SIGBUS, and a watchdog.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use quire::library::{AddressSpace, Builder, Object};
use quire::store::{Cause, Operation, Store, StoreError};
use quire_simulated::Generator;
use quire_test_stores::VecStore;
use rustix::io::Errno;

pub const PAGE: usize = 4096;

/// A directory of the test's own.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("quire-objects-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut generator = Generator::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&generator.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// An address space; `None`, said loudly, where there is no right to a userfaultfd.
pub fn space(memory: usize) -> Option<AddressSpace> {
    space_by(&AddressSpace::builder().memory(memory))
}

/// The same, made as one likes.
pub fn space_by(builder: &Builder) -> Option<AddressSpace> {
    match builder.clone().build() {
        Ok(space) => Some(space),
        Err(error) => {
            let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
            assert!(!is_ci, "objects cannot be tested: {error}");
            eprintln!("NOT TESTED on the real MMU: {error}");
            None
        }
    }
}

/// Ends the process, with a message, where a test hangs.
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    pub fn new(seconds: u64) -> Watchdog {
        let (alive, ended) = channel::<()>();
        let name = std::thread::current().name().unwrap_or("a test").to_string();
        std::thread::spawn(move || {
            use std::sync::mpsc::RecvTimeoutError::Timeout;
            if ended.recv_timeout(Duration::from_secs(seconds)) == Err(Timeout) {
                end(&format!("{name} hangs: it has not ended within {seconds} s"));
            }
        });
        Watchdog { _alive: alive }
    }
}

/// Ends the process, with a message that also shows where a test's output is kept until it ends.
fn end(message: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "{message}");
    std::process::abort();
}

/// Ends the other threads of a scope, by a panic as well.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Waits until something is so; the watchdog says where it never is.
pub fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The word at a byte of a mapping, which outlives the use.
pub fn word(start: *const u8, at: usize) -> &'static AtomicU64 {
    // SAFETY: each caller names a word inside of a mapping that it keeps; all accesses to words
    // that threads share are atomic.
    unsafe { &*start.add(at).cast::<AtomicU64>() }
}

core::arch::global_asm!(
    ".globl quire_test_load, quire_test_store, quire_test_failed",
    "quire_test_load: movzx eax, byte ptr [rdi]",
    "ret",
    "quire_test_store: mov byte ptr [rdi], sil",
    "xor eax, eax",
    "ret",
    "quire_test_failed: mov eax, -1",
    "ret",
);

#[repr(C)]
struct SigAction {
    handler: usize,
    mask: [u64; 16],
    flags: i32,
    restorer: usize,
}

unsafe extern "C" {
    fn quire_test_load(at: *const u8) -> i32;
    fn quire_test_store(at: *mut u8, value: u8) -> i32;
    fn quire_test_failed();
    fn sigaction(signal: i32, new: *const SigAction, old: *mut SigAction) -> i32;
}

const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;
const SA_SIGINFO: i32 = 4;
/// Where a `ucontext_t` has the instruction pointer: behind flags, link and stack, register 16.
const RIP_AT: usize = 40 + 16 * 8;
/// Where a `siginfo_t` has the address.
const ADDRESS_AT: usize = 16;

/// Lets the accesses below fail instead of the process; any other is the end.
unsafe extern "C" fn on_sigbus(signal: i32, info: *const u8, context: *mut u8) {
    // SAFETY: the kernel's siginfo and ucontext, of x86-64.
    unsafe {
        let rip = context.add(RIP_AT).cast::<usize>();
        let is_ours = *rip == quire_test_load as *const () as usize
            || *rip == quire_test_store as *const () as usize;
        if !is_ours {
            let (code, address) =
                (*info.add(8).cast::<i32>(), *info.add(ADDRESS_AT).cast::<usize>());
            let thread = std::thread::current();
            end(&format!(
                "signal {signal}, code {code}, at {address:#x}, by {:#x} (on_sigbus is at {:#x}) in {:?}",
                *rip,
                on_sigbus as *const () as usize,
                thread.name()
            ));
        }
        *rip = quire_test_failed as *const () as usize;
    }
}

/// Has the accesses below say so where they are a SIGBUS. Before any address space is made that
/// takes SIGBUS over.
pub fn survive_sigbus() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| survive(SIGBUS));
}

/// The same for what is not mapped any more.
pub fn survive_sigsegv() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| survive(SIGSEGV));
}

fn survive(signal: i32) {
    let handler = on_sigbus as *const () as usize;
    let action = SigAction { handler, mask: [0; 16], flags: SA_SIGINFO, restorer: 0 };
    // SAFETY: libc's structure, and a handler that only changes the context.
    assert_eq!(unsafe { sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}

/// A byte of a mapping; `None` is a signal that is survived.
pub fn load(start: *const u8, at: usize) -> Option<u8> {
    survive_sigbus();
    // SAFETY: inside of a mapping that the caller keeps.
    u8::try_from(unsafe { quire_test_load(start.add(at)) }).ok()
}

/// Writes a byte of a mapping; `false` is a SIGBUS.
pub fn store(start: *const u8, at: usize, value: u8) -> bool {
    survive_sigbus();
    // SAFETY: inside of a writable mapping that the caller keeps.
    unsafe { quire_test_store(start.add(at).cast_mut(), value) == 0 }
}

/// Looks at every write: where, and what.
type OnWrite = dyn Fn(u64, &[u8]) + Send + Sync;

/// A store in memory whose pages can be made bad.
pub struct Probe {
    pub inner: VecStore,
    bad: Mutex<BTreeSet<u64>>,
    write_error: Mutex<Option<Errno>>,
    on_write: Mutex<Option<Box<OnWrite>>>,
}

impl Probe {
    pub fn new(bytes: Vec<u8>) -> Arc<Probe> {
        Arc::new(Probe {
            inner: VecStore::new(bytes),
            bad: Mutex::new(BTreeSet::new()),
            write_error: Mutex::new(None),
            on_write: Mutex::new(None),
        })
    }

    /// A page that cannot be read from now on, or can again.
    pub fn set_bad(&self, page: u64, is_bad: bool) {
        let mut bad = self.bad.lock().unwrap();
        if is_bad {
            bad.insert(page)
        } else {
            bad.remove(&page)
        };
    }

    /// What writes fail with from now on.
    pub fn fail_writes(&self, errno: Option<Errno>) {
        *self.write_error.lock().unwrap() = errno;
    }

    pub fn on_write(&self, look: impl Fn(u64, &[u8]) + Send + Sync + 'static) {
        *self.on_write.lock().unwrap() = Some(Box::new(look));
    }

    fn error(operation: Operation, offset: u64, bytes: usize, errno: Errno) -> StoreError {
        StoreError::new(operation, "a probe", offset, bytes as u64, Cause::Os(errno))
    }
}

impl Store for Probe {
    fn name(&self) -> &str {
        "a probe"
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.inner.len()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let pages = offset / PAGE as u64..(offset + into.len() as u64).div_ceil(PAGE as u64);
        if self.bad.lock().unwrap().range(pages).next().is_some() {
            return Err(Probe::error(Operation::Read, offset, into.len(), Errno::IO));
        }
        self.inner.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        if let Some(errno) = *self.write_error.lock().unwrap() {
            return Err(Probe::error(Operation::Write, offset, from.len(), errno));
        }
        if let Some(look) = &*self.on_write.lock().unwrap() {
            look(offset, from);
        }
        self.inner.write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.inner.set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.inner.sync()
    }
}

/// Drops so many pages of a range from the cache; a page is busy for a moment after its fault.
pub fn drop_pages(object: &Object, bytes: std::ops::Range<u64>, pages: usize) {
    let mut dropped = 0;
    while dropped < pages * PAGE {
        dropped += object.drop_cached(bytes.clone());
    }
    assert_eq!(dropped, pages * PAGE);
}

/// Drops all of a clean object from the cache. Reclaim, where memory is short, drops pages of it too.
pub fn drop_all(object: &Object) {
    while object.cached().0 > 0 {
        object.drop_cached(0..object.len());
    }
}

/// Reads all of another object through its cache, so that everything else is reclaimed that can be.
pub fn press(space: &AddressSpace) {
    let len = 2 * space.memory();
    let other = Object::with_store(space, VecStore::new(vec![0; len]), Some(0)).unwrap();
    let mut bytes = vec![0; 1 << 16];
    for at in (0..len).step_by(bytes.len()) {
        other.read_at(at as u64, &mut bytes).unwrap();
    }
}
