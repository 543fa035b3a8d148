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
use crate::reclaim::{Balance, Hunger};
use crate::scratch::Scratch;
use crate::store::workers::{lock, start};
use crate::swap::Request;
use crate::sys::clock::Moment;
use crate::sys::monotonic_ns;
use crate::sys::thread::{kill_process, never_preempt, pin_to_nth_cpu};
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// How long the background thread waits where nothing can be freed.
const STUCK_MS: u64 = 10;
/// How long until what could not be written is tried again.
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

/// All threads of an engine.
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
            let mut layout = objects.space.lock();
            objects.space.map(&mut layout, None, 1, Prot::READ_WRITE).map_err(failed)?
        };
        let (handlers_running, is_stopping) = (AtomicUsize::new(0), AtomicBool::new(false));
        let exit = Arc::new(Exit { page, handlers: handlers_running, is_stopping });
        let threads = Threads { handles: Mutex::new(Vec::new()), exit };
        let started = threads.start_all(objects, handlers, workers);
        if let Err(error) = started {
            threads.stop(objects);
            return Err(error);
        }
        Ok(threads)
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

/// Whether nobody waits for what the background thread does.
fn is_content(objects: &Engine) -> bool {
    let space = &objects.space;
    let waits = space.has_starved() || objects.has_unclean() || objects.has_unparked();
    !space.is_low() && !waits
}

fn read_swap(objects: &'static Engine, scratch: &mut Scratch) {
    let space = &objects.space;
    let mut reader = space.swap().new_reader();
    let mut requests = [Request::NONE; READ_BATCH];
    loop {
        let count = space.swap().take_requests(&mut requests);
        if count == 0 {
            return;
        }
        space.complete_reads(&requests[..count], &mut reader, scratch);
    }
}

/// How long faults have found no memory, while nothing was freed.
#[derive(Default)]
struct Starving {
    hunger: Hunger,
    freed: u64,
}

impl Starving {
    /// Whether nobody can be expected to give memory any more. What keeps cached pages back, but
    /// for what cannot be swapped, is a store that fails, which may recover.
    fn is_hopeless(&mut self, objects: &Engine) -> bool {
        let budget = objects.space.budget();
        let freed = budget.counted(Event::PgstealKswapd) + budget.counted(Event::PgstealDirect);
        let is_stuck = objects.space.has_starved() && freed == self.freed;
        self.freed = freed;
        if !is_stuck || objects.dirty_pages() > 0 {
            self.hunger = Hunger::default();
            return false;
        }
        self.hunger.is_hopeless(monotonic_ns(), budget.swapped_out_by_tree())
    }
}

/// Ends the process as an OOM kill would, with a message: its faults cannot be served.
fn die_of_hunger(objects: &Engine) -> ! {
    let space = &objects.space;
    space.die_of_hunger();
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
    let mut starving = Starving::default();
    let budget = space.budget();
    loop {
        // What was asked for before the call must be seen below, the end among it.
        let seen = budget.calls();
        if exit.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        space.set_kswapd_awake(true);
        let balance = objects.balance(scratch);
        if starving.is_hopeless(objects) {
            die_of_hunger(objects);
        }
        if balance == Balance::Enough {
            space.set_kswapd_awake(false);
        }
        match balance {
            Balance::Progress => {}
            Balance::Enough if is_content(objects) => {
                let timeout_ms = objects.has_excess_dirty().then_some(DIRTY_MS);
                budget.wait_for_call(seen, timeout_ms);
            }
            // Dirty pages that are on their way, or memory that somebody is about to give back.
            _ => budget.wait_for_call(seen, Some(STUCK_MS)),
        }
    }
}
