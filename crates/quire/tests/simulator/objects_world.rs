//! The world of one seed: objects and their stores, the threads of the library as actors.

use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use quire::control::Event;
use quire::mmu::object::InspectObjects;
use quire::mmu::{Mmu, Prot};
use quire::object::{FaultAround, FlushError, IoBuffer, Keeper, MapRequest, ObjectId, Objects};
use quire::page::Flags;
use quire::reclaim::{Balance, Kswapd, OOM_ROUND_MS};
use quire::scratch::Scratch;
use quire::space::remap::Placement;
use quire::space::vma::Pattern;
use quire::sys::Errno;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PageRange};
use quire_simulated::{Baton, Generator, Planted, Settings, Simulated, Stopped, Wait};

use crate::common::{Speculation, Tree, space};
use crate::program::Program;
use crate::store::{Failures, SimStore};

/// Pages of the arena.
const ARENA_PAGES: usize = 12 * BLOCK_PAGES;
/// Rounds of reclaim without success after which the programs have starved.
const STARVED_ROUNDS_MAX: u32 = 3000;

/// What the programs of a seed do most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaning {
    Accesses,
    Mappings,
    Lengths,
    WriteBack,
    Caches,
    Copies,
}

/// What a seed chooses.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub budget_pages: usize,
    pub programs: usize,
    pub handlers: usize,
    pub workers: usize,
    /// Operations of each program.
    pub operations: usize,
    pub leaning: Leaning,
    /// Pages of the objects that all programs share, and how long they can become.
    pub pages: [usize; 2],
    pub pages_max: [usize; 2],
    /// Pages of anonymous memory of each program.
    pub anonymous_pages: usize,
    pub switch_one_in: u32,
    pub failures: Failures,
    /// The kernel swaps pages out by itself.
    pub has_swap: bool,
    pub speculation: Speculation,
    /// Memory goes bad.
    pub has_bad_memory: bool,
    pub planted: Option<Planted>,
    pub traces: bool,
}

impl Plan {
    pub fn from_seed(seed: u64) -> Plan {
        let mut generator = Generator::new(seed.wrapping_mul(0x9e37_79b9) ^ 0x0b1e);
        let mut pick = |from: &[u32]| from[generator.below(from.len())];
        let pages = [pick(&[20, 60, 200, 530, 600]) as usize, pick(&[1, 3, 40, 100]) as usize];
        Plan {
            seed,
            budget_pages: pick(&[128, 160, 200, 400]) as usize,
            programs: pick(&[1, 2, 2, 3, 3]) as usize,
            handlers: pick(&[1, 2, 2]) as usize,
            workers: pick(&[1, 2, 3]) as usize,
            operations: pick(&[40, 80, 160]) as usize,
            pages,
            pages_max: pages.map(|pages| pages + pick(&[0, 1, 30]) as usize),
            leaning: [
                Leaning::Accesses,
                Leaning::Mappings,
                Leaning::Lengths,
                Leaning::WriteBack,
                Leaning::Caches,
                Leaning::Copies,
            ][pick(&[0, 1, 2, 3, 4, 5, 5]) as usize],
            anonymous_pages: pick(&[0, 0, 20, 80]) as usize,
            switch_one_in: pick(&[2, 4, 10, 40]),
            failures: Failures {
                reads_one_in: pick(&[0, 0, 20, 6]),
                writes_one_in: pick(&[0, 0, 10, 3]),
                cuts_one_in: pick(&[0, 0, 4]),
                syncs_one_in: pick(&[0, 0, 4]),
                closes_one_in: pick(&[0, 0, 20]),
                stays_closed: pick(&[5, 60]) as usize,
            },
            has_swap: pick(&[0, 0, 1]) == 1,
            speculation: Speculation::from_number(pick(&[0, 0, 1, 2])),
            has_bad_memory: pick(&[0, 0, 1]) == 1,
            planted: None,
            traces: false,
        }
    }
}

/// What a run did, for the eye and for comparing two runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ran {
    pub steps: u64,
    pub faults: u64,
    pub read: u64,
    pub written: u64,
    pub stolen: u64,
    pub parked: u64,
}

impl std::ops::AddAssign for Ran {
    fn add_assign(&mut self, other: Ran) {
        self.steps += other.steps;
        self.faults += other.faults;
        self.read += other.read;
        self.written += other.written;
        self.stolen += other.stolen;
        self.parked += other.parked;
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} faults, {} of them parked, {} pages read, {} written, {} reclaimed",
            self.steps, self.faults, self.parked, self.read, self.written, self.stolen
        )
    }
}

/// An object and its store.
#[derive(Clone, Copy)]
pub struct Sim {
    pub id: ObjectId,
    pub store: &'static SimStore,
    pub pages_max: usize,
}

/// A mapping of an object, from a page of it on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    pub object: usize,
    pub range: PageRange,
    pub first: usize,
    pub prot: Prot,
}

/// A view that its owner may unmap; the number is its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    number: u64,
    pub view: View,
}

/// All that the threads share.
pub struct World {
    pub plan: Plan,
    pub objects: Objects<Simulated>,
    pub baton: Arc<Baton>,
    /// The objects that all programs share, and where.
    pub shared: Vec<Sim>,
    pub views: Vec<View>,
    /// Views that come and go, and how many there were.
    known: Mutex<(Vec<Known>, u64)>,
    /// Stores of objects that came and went.
    pub gone: Mutex<Vec<&'static SimStore>>,
    is_resizing: [AtomicBool; 2],
    /// Pins of an object that have begun, and that have ended: a cut through pinned pages is refused.
    pub pins: [[AtomicUsize; 2]; 2],
    programs_left: AtomicUsize,
    handlers_left: AtomicUsize,
    _file: Option<OwnedFd>,
}

/// Working memory is used again by later seeds.
static SCRATCHES: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());
static BUFFERS: Mutex<Vec<IoBuffer>> = Mutex::new(Vec::new());

pub fn with_scratch<R>(act: impl FnOnce(&mut Scratch) -> R) -> R {
    let scratch = SCRATCHES.lock().unwrap().pop();
    let mut scratch = scratch.unwrap_or_else(|| Scratch::new().unwrap());
    let result = act(&mut scratch);
    SCRATCHES.lock().unwrap().push(scratch);
    result
}

pub fn with_buffer<R>(act: impl FnOnce(&mut IoBuffer) -> R) -> R {
    let buffer = BUFFERS.lock().unwrap().pop();
    let mut buffer = buffer.unwrap_or_else(|| IoBuffer::new().unwrap());
    let result = act(&mut buffer);
    BUFFERS.lock().unwrap().push(buffer);
    result
}

impl World {
    fn new(plan: &Plan) -> World {
        let actors = plan.programs + plan.handlers + plan.workers + 1;
        let baton = Arc::new(Baton::new(plan.seed, actors, plan.switch_one_in));
        let settings = Settings {
            seed: plan.seed,
            refuse_one_in: 0,
            planted: plan.planted,
            baton: Some(baton.clone()),
            ..Settings::default()
        };
        let frames = 8 * BLOCK_PAGES;
        let mmu = Simulated::new(ARENA_PAGES, frames, settings).unwrap();
        let tree = Tree { budget_pages: plan.budget_pages, ..Tree::default() };
        let (space, file) = space(mmu, tree, ARENA_PAGES, frames);
        plan.speculation.begin(space.budget());
        // In half of the runs a handler reads by itself while another is left.
        if plan.seed.is_multiple_of(2) {
            space.swap().set_turns(plan.handlers as u32 - 1);
        }
        let objects = Objects::new(space).unwrap();
        objects.set_handlers_read(true);
        let mut world = World {
            plan: plan.clone(),
            objects,
            baton,
            shared: Vec::new(),
            views: Vec::new(),
            known: Mutex::new((Vec::new(), 0)),
            gone: Mutex::new(Vec::new()),
            is_resizing: Default::default(),
            pins: Default::default(),
            programs_left: AtomicUsize::new(plan.programs),
            handlers_left: AtomicUsize::new(plan.handlers),
            _file: file,
        };
        let mut generator = Generator::new(plan.seed ^ 0x5717);
        for (pages, pages_max) in plan.pages.into_iter().zip(plan.pages_max) {
            let tail = generator.below(4096);
            let len = (pages * 4096).saturating_sub([0, tail][generator.below(2)]);
            world.shared.push(world.open(len, pages_max, generator.next_u64(), plan.failures));
        }
        // Two whole views, one of which begins elsewhere, and one that cannot be written.
        for (object, skip, prot) in
            [(0, 0, Prot::READ_WRITE), (1, 0, Prot::READ_WRITE), (0, 3, Prot::READ)]
        {
            let view = world.map(&world.shared[object], object, skip, usize::MAX, prot).unwrap();
            world.views.push(view);
        }
        world
    }

    pub fn mmu(&self) -> &Simulated {
        self.objects.space.mmu()
    }

    pub fn open(&self, len: usize, pages_max: usize, seed: u64, failures: Failures) -> Sim {
        let store = SimStore::new(&self.baton, len, pages_max, seed, failures);
        let len_max = (pages_max * 4096) as u64;
        let id = self.objects.open(store, len as u64, len_max, Keeper::Store).unwrap();
        Sim { id, store, pages_max }
    }

    /// Maps pages of an object from `first` on, as many as it can ever have; `None` where the arena
    /// is full.
    pub fn map(
        &self,
        sim: &Sim,
        object: usize,
        first: usize,
        pages: usize,
        prot: Prot,
    ) -> Option<View> {
        self.map_by(Objects::map, sim, object, first, pages, prot)
    }

    /// The same, a private copy.
    pub fn map_private(
        &self,
        sim: &Sim,
        object: usize,
        first: usize,
        pages: usize,
        prot: Prot,
    ) -> Option<View> {
        self.map_by(Objects::map_private, sim, object, first, pages, prot)
    }

    fn map_by(
        &self,
        map: impl Fn(&Objects<Simulated>, ObjectId, MapRequest) -> Result<PageRange, Errno>,
        sim: &Sim,
        object: usize,
        first: usize,
        pages: usize,
        prot: Prot,
    ) -> Option<View> {
        let pages = pages.min(sim.pages_max - first);
        let request = MapRequest {
            pages: ObjectRange::new(ObjectPage(first as u64), pages),
            prot,
            pattern: Pattern::Normal,
            fault_around: FaultAround::Auto,
        };
        match map(&self.objects, sim.id, request) {
            Ok(range) => Some(View { object, range, first, prot }),
            Err(error) => {
                assert_eq!(error, Errno::NOMEM);
                None
            }
        }
    }

    /// Gives a mapping, shared or private, other rights or another length, of `pages_most` at most;
    /// returns how it is from now on.
    pub fn change(&self, view: View, pages_most: usize, generator: &mut Generator) -> View {
        let changed = if generator.below(2) == 0 {
            let is_writable = view.prot == Prot::READ_WRITE;
            let prot = if is_writable { Prot::READ } else { Prot::READ_WRITE };
            self.objects.protect(view.range, prot).map(|()| View { prot, ..view })
        } else {
            let most = self.shared[view.object].pages_max - view.first;
            let pages = 1 + generator.below(most.min(pages_most));
            let placement = [Placement::InPlace, Placement::Anywhere][generator.below(2)];
            let range = self.objects.remap(view.range, pages, placement);
            range.map(|range| View { range, ..view })
        };
        self.trace(|| format!("        {view:?} has become {changed:?}"));
        changed.unwrap_or_else(|error| {
            assert_eq!(error, Errno::NOMEM);
            view
        })
    }

    /// Tells the others of a view that will be unmapped some time.
    pub fn publish(&self, view: View) -> Known {
        let mut known = self.known.lock().unwrap();
        known.1 += 1;
        let it = Known { number: known.1, view };
        known.0.push(it);
        it
    }

    pub fn forget(&self, known: Known) {
        self.known.lock().unwrap().0.retain(|other| *other != known);
    }

    pub fn is_known(&self, known: Known) -> bool {
        self.known.lock().unwrap().0.contains(&known)
    }

    pub fn any_known(&self, generator: &mut Generator) -> Option<Known> {
        let known = self.known.lock().unwrap();
        known.0.get(generator.below(known.0.len())).copied()
    }

    /// Says what happens, where one seed alone is run.
    pub fn trace(&self, text: impl FnOnce() -> String) {
        if self.plan.traces {
            println!("{:>8} {}", self.baton.steps(), text());
        }
    }

    /// Alone in changing an object's length: the oracle follows one change at a time.
    pub fn resize_alone<R>(&self, object: usize, act: impl FnOnce() -> R) -> R {
        let lock = Wait::Lock(1 + object);
        self.baton.step();
        while self.is_resizing[object].swap(true, Ordering::Relaxed) {
            self.baton.block(lock);
        }
        let result = act();
        self.is_resizing[object].store(false, Ordering::Relaxed);
        self.baton.unblock(lock);
        result
    }

    /// Gives poisoned pages up, once what was on its way to the store when they went bad is there.
    pub fn unpoison(&self, sim: &Sim, pages: ObjectRange) {
        let object = self.objects.object(sim.id);
        let is_under_way = |page| self.objects.snapshot(object, page).has(Flags::WRITEBACK);
        for page in pages.pages() {
            if !sim.store.expected().poisoned.contains(&page.index()) {
                continue;
            }
            while is_under_way(page) {
                self.mmu().relax();
            }
            sim.store.expected().unpoison(page.index());
            self.objects.unpoison(object, ObjectRange::new(page, 1));
        }
    }

    /// The checks that hold at any moment.
    pub fn look_around(&self) {
        let control = self.objects.space.budget().control();
        let held = control.held() as usize;
        let limit = self.objects.space.budget().limit();
        assert!(held <= limit, "{held} pages are held of {limit}");
        let used = self.mmu().used();
        assert!(used <= held, "{used} pages are in use, {held} charged");
    }

    fn handle_faults(&self) {
        let is_over = || self.programs_left.load(Ordering::Relaxed) == 0;
        with_scratch(|scratch| {
            loop {
                let mut next = None;
                self.baton.idle_until(|| {
                    next = self.mmu().try_next_message();
                    next.is_some() || is_over()
                });
                let Some((thread, page, access)) = next else { break };
                let outcome =
                    self.objects.handle_fault_of(thread, page, access, Moment::now(), scratch);
                self.trace(|| format!("        fault {page:?} {access:?}: {outcome:?}"));
            }
        });
        if self.handlers_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.objects.space.budget().call_for_memory();
        }
    }

    /// What the library's background thread does, sleeping as it does.
    fn reclaim(&self) {
        let space = &self.objects.space;
        let (mut kswapd, mut starved_rounds) = (Kswapd::default(), 0);
        with_scratch(|scratch| {
            loop {
                kswapd.begin(space);
                if self.handlers_left.load(Ordering::Relaxed) == 0 {
                    break;
                }
                self.objects.balance_dirty();
                let balance = space.balance(&self.objects, scratch);
                self.trace(|| format!("        balance: {balance:?}"));
                let is_stuck = balance == Balance::Stuck && space.has_starved();
                starved_rounds = if is_stuck { starved_rounds + 1 } else { 0 };
                assert!(starved_rounds < STARVED_ROUNDS_MAX, "the programs starve");
                let waits = space.has_starved()
                    || self.objects.has_unclean()
                    || self.objects.must_look_again();
                kswapd.sleep(space, balance, waits.then_some(OOM_ROUND_MS));
            }
        });
        self.objects.stop_workers();
    }

    /// The end: no thread is inside any more.
    fn check_end(&self) {
        assert_eq!(self.objects.pinned_pages(), 0, "pages are left pinned");
        self.objects.check();
        let control = self.objects.space.budget().control();
        let most = control.held_pages_max.load(Ordering::Relaxed) as usize;
        assert!(most <= self.objects.space.budget().limit(), "{most} pages were held");
        for (index, sim) in self.shared.iter().enumerate() {
            sim.store.mend();
            let all = ObjectRange::new(ObjectPage(0), sim.pages_max);
            self.unpoison(sim, all);
            self.check_flush(index, sim);
        }
        for view in &self.views {
            self.objects.unmap(view.range);
        }
        self.objects.check();
        for sim in &self.shared {
            assert!(self.objects.put(sim.id), "an object is still in use");
            assert_eq!(sim.store.expected().releases, 1);
        }
        let arena = PageRange::new(quire::units::PageNum(0), ARENA_PAGES);
        let space = &self.objects.space;
        space.unmap(&mut space.lock(), arena).unwrap();
        self.objects.check();
        assert_eq!((self.objects.cached_pages(), self.objects.dirty_pages()), (0, 0));
        let left = (self.mmu().memfd_pages(), self.mmu().memfd_lengths());
        assert_eq!(left, (0, 0), "pages of memfds are left over");
        assert_eq!(self.mmu().used(), space.frames().free(), "memory is left over");
        for store in self.gone.lock().unwrap().drain(..) {
            {
                let expected = store.expected();
                assert_eq!(expected.releases, 1, "an object that was closed is still there");
                assert!(expected.store == expected.bytes[..expected.len], "its end is not written");
            }
            store.clear();
        }
    }

    /// Everything that is flushed is in the store, byte by byte, and all of it in the cache.
    fn check_flush(&self, index: usize, sim: &Sim) {
        let object = self.objects.object(sim.id);
        with_scratch(|scratch| {
            with_buffer(|buffer| {
                let all = ObjectRange::new(ObjectPage(0), sim.pages_max);
                let mut seen = self.objects.errors_seen(object);
                let flushed = self.objects.flush(object, all, true, &mut seen, buffer);
                // What a sync has lost is told by all later ones; all else is well by now.
                let may_be_lost = sim.store.expected().sync_failures > 0;
                let is_told = may_be_lost && matches!(flushed, Err(FlushError::Sync(_)));
                assert!(flushed.is_ok() || is_told, "object {index}: {flushed:?}");
                assert_eq!(object.dirty_pages(), 0, "dirty after a flush");
                let len = sim.store.expected().len;
                assert_eq!(object.len(), len as u64, "length of object {index}");
                let mut bytes = vec![0; len];
                let read = self.objects.read_at(object, 0, &mut bytes, scratch, buffer);
                assert_eq!(read, Ok(len));
                let expected = sim.store.expected();
                let differs = |other: &[u8]| {
                    let (one, other) = (expected.bytes[..len].chunks(4096), other.chunks(4096));
                    one.zip(other).position(|(one, other)| one != other)
                };
                assert_eq!(expected.store.len(), len, "length of store {index}");
                assert_eq!(differs(&expected.store), None, "page of store {index}");
                assert_eq!(differs(&bytes), None, "page of object {index}");
            });
        });
        sim.store.clear();
    }

    fn ran(&self) -> Ran {
        let counted = |event| self.objects.space.budget().counted(event);
        Ran {
            steps: self.baton.steps(),
            faults: counted(Event::Pgfault),
            read: counted(Event::Pgpgin),
            written: counted(Event::Pgpgout),
            stolen: counted(Event::PgstealKswapd) + counted(Event::PgstealDirect),
            parked: counted(Event::FaultParked),
        }
    }
}

/// Runs one actor; what it panics with ends the simulation.
fn act(world: &World, index: usize, body: impl FnOnce()) {
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
        world.baton.start(index);
        body();
    }));
    if let Err(payload) = result
        && !payload.is::<Stopped>()
    {
        world.baton.fail(text_of(&payload));
    }
    world.baton.end();
}

fn text_of(payload: &Box<dyn std::any::Any + Send>) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without a text".to_owned())
}

/// Starts actors, each on a thread of its own.
struct Actors<'scope, 'env> {
    scope: &'scope std::thread::Scope<'scope, 'env>,
    world: &'scope World,
    count: usize,
}

impl<'scope> Actors<'scope, '_> {
    fn start(&mut self, role: &str, body: impl FnOnce() + Send + 'scope) {
        let (world, index) = (self.world, self.count);
        self.count += 1;
        // The name tells the panic hook which failures were asked for.
        let kind = if world.plan.planted.is_some() { crate::PLANTED } else { "" };
        let builder = std::thread::Builder::new().name(format!("{kind}{role}-{index}"));
        builder.spawn_scoped(self.scope, move || act(world, index, body)).unwrap();
    }
}

/// Runs a plan.
pub fn run(plan: &Plan) -> Result<Ran, String> {
    let world = World::new(plan);
    std::thread::scope(|scope| {
        let world = &world;
        let mut actors = Actors { scope, world, count: 0 };
        for number in 0..plan.programs {
            actors.start("program", move || {
                Program::new(world, number).run();
                world.programs_left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        for _ in 0..plan.handlers {
            actors.start("handler", || world.handle_faults());
        }
        actors.start("kswapd", || world.reclaim());
        for _ in 0..plan.workers {
            actors.start("store", || with_buffer(|buffer| world.objects.serve_requests(buffer)));
        }
    });
    if let Some(why) = world.baton.failure() {
        // A thread that failed may have held anything: the objects are not looked at any more.
        std::mem::forget(world);
        return Err(why);
    }
    let ran = world.ran();
    let checked = std::panic::catch_unwind(AssertUnwindSafe(|| world.check_end()));
    checked.map_err(|payload| text_of(&payload))?;
    Ok(ran)
}
