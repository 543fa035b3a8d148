//! The library's threads: handlers, the background thread, store workers, readers of the swap file.
//!
//! They are libc's, with the program's signals blocked, and use the program's descriptor table, for an
//! application that uses the library does not close descriptors that are not its own. Store workers are
//! the only threads that call a store and may block in it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::vec::Vec;

use super::{Engine, Error, inline};
use crate::control::Event;
use crate::mmu::userfaultfd::FaultMessage;
use crate::mmu::{Mmu, Prot, Protection};
use crate::object::IoBuffer;
use crate::reclaim::{Kswapd, OOM_ROUND_MS};
use crate::scratch::Scratch;
use crate::store::workers::{lock, start};
use crate::swap::SwapRead;
use crate::sys::clock::Moment;
use crate::sys::monotonic_ns;
use crate::sys::thread::{SignalsBlocked, kill_process, never_preempt, pin_to_nth_cpu};
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// How long until what could not be written is tried again, or a page that was refused may be accessed.
const DIRTY_MS: u64 = 100;

/// Threads that read anonymous memory's pages from the swap file, where there is one.
const READERS: usize = 2;
/// Reads that such a thread takes at a time.
const READ_BATCH: usize = 16;

/// How the threads are told to end.
struct Exit {
    /// A handler that reads a fault of this page ends.
    page: PageNum,
    handlers: AtomicUsize,
    is_stopping: AtomicBool,
}

pub(super) struct Threads {
    handles: Mutex<Vec<JoinHandle<()>>>,
    exit: Arc<Exit>,
}

impl Threads {
    pub fn start(
        objects: &'static Engine,
        handlers: usize,
        workers: usize,
    ) -> Result<Threads, Error> {
        let failed = |errno| Error::NoMemory { doing: "start the threads", errno };
        let page = {
            // A handler of the program's that touches a mapping would wait for the lock of its own thread.
            let _signals = SignalsBlocked::of_others();
            let mut layout = objects.space.lock();
            objects.space.map(&mut layout, None, 1, Prot::READ_WRITE).map_err(failed)?
        };
        let (running, is_stopping) = (AtomicUsize::new(0), AtomicBool::new(false));
        let exit = Arc::new(Exit { page, handlers: running, is_stopping });
        let threads = Threads { handles: Mutex::new(Vec::new()), exit };
        let started = threads.start_all(objects, handlers, workers);
        started.inspect_err(|_| threads.stop(objects)).map(|()| threads)
    }

    fn start_all(
        &self,
        objects: &'static Engine,
        handlers: usize,
        workers: usize,
    ) -> Result<(), Error> {
        let no_memory = |errno| Error::NoMemory { doing: "map the threads' buffers", errno };
        for cpu in 0..handlers {
            let exit = Arc::clone(&self.exit);
            let mut scratch = Scratch::new().map_err(no_memory)?;
            self.spawn("quire-fault", move || {
                pin_to_nth_cpu(cpu);
                never_preempt();
                handle_faults(objects, &exit, &mut scratch);
            })?;
            self.exit.handlers.fetch_add(1, Ordering::SeqCst);
        }
        let exit = Arc::clone(&self.exit);
        let mut scratch = Scratch::new().map_err(no_memory)?;
        self.spawn("quire-kswapd", move || {
            never_preempt();
            reclaim(objects, &exit, &mut scratch);
        })?;
        let readers = if objects.space.swap().has_file() { READERS } else { 0 };
        // Handlers read by themselves; one is left for other faults. A thread that serves itself
        // keeps only its buffers from other threads.
        let turns = if handlers == 0 { inline::READS_MAX } else { handlers as u32 - 1 };
        objects.space.swap().set_turns(turns);
        for _ in 0..readers {
            let mut scratch = Scratch::new().map_err(no_memory)?;
            self.spawn("quire-swapin", move || read_swap(objects, &mut scratch))?;
        }
        for _ in 0..workers {
            let mut buffer = IoBuffer::new().map_err(no_memory)?;
            self.spawn("quire-store", move || objects.serve_requests(&mut buffer))?;
        }
        Ok(())
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let builder = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
        let handle = start(builder, work)
            .map_err(|errno| Error::NoMemory { doing: "start a thread", errno })?;
        lock(&self.handles).push(handle);
        Ok(())
    }

    /// Ends all of them. No mapping is left.
    pub fn stop(&self, objects: &'static Engine) {
        self.exit.is_stopping.store(true, Ordering::SeqCst);
        objects.stop_workers();
        objects.space.swap().close_requests();
        objects.space.budget().call_for_memory();
        if self.exit.handlers.load(Ordering::SeqCst) > 0 {
            let address = objects.space.mmu().address(self.exit.page) as *const u8;
            // SAFETY: mapped for this; the last handler fills it.
            unsafe { address.read_volatile() };
        }
        for handle in lock(&self.handles).drain(..) {
            let _ = handle.join();
        }
    }
}

fn handle_faults(objects: &'static Engine, exit: &Exit, scratch: &mut Scratch) {
    let mmu = objects.space.mmu();
    loop {
        let Some(FaultMessage { page, access, thread }) = mmu.read_fault() else { continue };
        let since = Moment::now();
        if page == exit.page {
            let one = PageRange::new(page, 1);
            if exit.handlers.fetch_sub(1, Ordering::SeqCst) == 1 {
                let zeros = [0u8; PAGE_SIZE];
                // SAFETY: the bytes are a page, which is not managed.
                let _ = unsafe { mmu.copy_in(one, zeros.as_ptr(), Protection::Writable) };
            } else {
                // The next handler reads it again.
                mmu.wake(one);
            }
            return;
        }
        objects.handle_fault_of(thread, page, access, since, scratch);
    }
}

fn read_swap(objects: &'static Engine, scratch: &mut Scratch) {
    let space = &objects.space;
    let mut reader = space.swap().new_reader();
    let mut requests = [SwapRead::NONE; READ_BATCH];
    loop {
        let count = space.swap().take_requests(&mut requests);
        if count == 0 {
            return;
        }
        space.complete_reads(&requests[..count], &mut reader, scratch);
    }
}

/// Ends the process as an OOM kill would, with a message: its faults cannot be served.
fn die_out_of_memory(objects: &Engine) -> ! {
    let space = &objects.space;
    space.note_out_of_memory();
    let room = match space.swap().file() {
        Some(file) if file.has_room() => "",
        Some(_) => ", and the swap file is full",
        None => ", and there is no swap file",
    };
    std::eprintln!(
        "quire: out of memory: nothing of the {} bytes that an address space may hold can be \
         freed{room}; give it more memory, or a larger swap file",
        space.budget().limit_bytes()
    );
    kill_process()
}

fn reclaim(objects: &'static Engine, exit: &Exit, scratch: &mut Scratch) {
    let space = &objects.space;
    let budget = space.budget();
    let mut kswapd = Kswapd::default();
    loop {
        // What was asked for before the step must be seen in it, the end among it.
        kswapd.begin(space);
        if exit.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        objects.balance_dirty();
        let balance = space.balance(objects, scratch);
        let has_starved = space.has_starved();
        // What keeps cached pages back, but for what cannot be swapped, is a store that fails, which
        // may recover.
        let is_stuck = has_starved && objects.dirty_pages() == 0;
        if let Some(wait) = kswapd.oom_wait(balance, is_stuck) {
            // Faults free some themselves.
            let freed =
                [Event::PgstealKswapd, Event::PgstealDirect].map(|event| budget.counted(event));
            let progress = freed[0] + freed[1] + budget.swap_progress();
            if wait.is_hopeless(monotonic_ns(), progress) {
                die_out_of_memory(objects);
            }
        }
        let idle_ms = if has_starved || objects.has_unclean() || objects.has_unparked() {
            Some(OOM_ROUND_MS)
        } else {
            objects.must_look_again().then_some(DIRTY_MS)
        };
        kswapd.sleep(space, balance, idle_ms);
    }
}
