//! The world of one seed: the space, its threads, and the oracle.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use quire::control::Event;
use quire::mmu::Prot;
use quire::page::State;
use quire::reclaim::{Balance, NoCaches};
use quire::scratch::Scratch;
use quire::space::{Layout, VmSpace};
use quire::swap::SwapRead;
use quire::swap::compress::Strength;
use quire::swap::io::Faults;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::{Baton, Generator, Planted, Settings, Simulated, Stopped};

use crate::common::{Speculation, Tree, space};
use crate::program::Program;

/// Pages of the arena.
const ARENA_PAGES: usize = 8 * BLOCK_PAGES;
/// Pages that all programs share; they are mapped first.
pub const SHARED: PageRange = PageRange { start: PageNum(0), end: PageNum(48) };
/// Rounds of reclaim without success after which the programs have starved.
const STARVED_ROUNDS_MAX: u32 = 3000;

/// What a seed chooses.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub tree: Tree,
    pub programs: usize,
    pub handlers: usize,
    /// Operations of each program.
    pub operations: usize,
    /// Pages that a program fills with what does not pack, at most.
    pub noise_pages: usize,
    /// Most pages that a program maps.
    pub pages: usize,
    pub switch_one_in: u32,
    pub refuse_one_in: u32,
    pub failing_writes_one_in: u32,
    pub failing_reads_one_in: u32,
    pub damaged_reads_one_in: u32,
    pub speculation: Speculation,
    pub compress: Strength,
    pub planted: Option<Planted>,
    /// How many pages get their rights together; 0 where none stay when they are unmapped.
    pub rights_step_pages: usize,
    pub traces: bool,
}

impl Plan {
    pub fn from_seed(seed: u64) -> Plan {
        let mut generator = Generator::new(seed.wrapping_mul(0x9e37_79b9) ^ 0xabcd);
        let mut pick = |from: &[u32]| from[generator.below(from.len())];
        let has_file = pick(&[0, 1, 1]) == 1;
        Plan {
            seed,
            tree: Tree {
                budget_pages: pick(&[160, 200, 256, 400]) as usize,
                folio_order: pick(&[0, 1, 1, 1, 3, 5, 10]) as i32 - 1,
                is_batched: pick(&[0, 1, 1, 1]) == 1,
                segments: if has_file { pick(&[24, 64]) } else { 0 },
            },
            noise_pages: if has_file { pick(&[100, 1000]) } else { 8 } as usize,
            programs: pick(&[1, 2, 2, 3]) as usize,
            handlers: pick(&[1, 2, 2]) as usize,
            operations: pick(&[150, 300, 500]) as usize,
            pages: if has_file { pick(&[200, 400, 600]) } else { pick(&[100, 200, 400]) } as usize,
            switch_one_in: pick(&[2, 4, 10, 40]),
            refuse_one_in: pick(&[0, 200, 40]),
            failing_writes_one_in: if has_file { pick(&[0, 0, 4]) } else { 0 },
            failing_reads_one_in: if has_file { pick(&[0, 0, 20]) } else { 0 },
            damaged_reads_one_in: if has_file { pick(&[0, 0, 20]) } else { 0 },
            speculation: Speculation::from_number(pick(&[0, 0, 1, 2])),
            compress: Strength::from_number(pick(&[0, 0, 1, 2])),
            planted: None,
            rights_step_pages: [0, 1, 64, BLOCK_PAGES][(seed / 4 % 4) as usize],
            traces: false,
        }
    }

    /// Whether the content of a page may get lost.
    pub fn loses_pages(&self) -> bool {
        self.failing_reads_one_in + self.damaged_reads_one_in > 0
    }
}

/// What a run did, for the eye and for comparing two runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ran {
    pub steps: u64,
    pub faults: u64,
    pub unmapped: u64,
    pub packed: u64,
    /// Of these, by Zstandard.
    pub zstd: u64,
    pub written: u64,
    pub lost: u64,
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} faults, {} pages unmapped, {} packed ({} by zstd), {} written, {} lost",
            self.steps, self.faults, self.unmapped, self.packed, self.zstd, self.written, self.lost
        )
    }
}

/// What a page must hold.
#[derive(Clone, Default)]
pub struct Expected {
    /// `None` is zeros.
    pub bytes: Option<Box<[u8; PAGE_SIZE]>>,
    /// It may be zeros as well, from now until it is looked at.
    pub is_lazy: bool,
    /// Its content was lost to a failed read.
    pub is_lost: bool,
    /// Written since its writes were tracked; `None` where they are not.
    pub is_written: Option<bool>,
    pub prot: Prot,
}

impl Expected {
    pub fn is_zero(content: &[u8; PAGE_SIZE]) -> bool {
        content.iter().all(|byte| *byte == 0)
    }

    pub fn matches(&self, content: &[u8; PAGE_SIZE]) -> bool {
        match &self.bytes {
            Some(bytes) => **bytes == *content || self.is_lazy && Expected::is_zero(content),
            None => Expected::is_zero(content),
        }
    }
}

/// All that the threads share.
pub struct World {
    pub plan: Plan,
    pub space: VmSpace<Simulated>,
    pub baton: Arc<Baton>,
    /// No thread gives the baton away while it is locked.
    pub oracle: Mutex<Vec<Expected>>,
    /// Pages that a thread was about to write and did not: they may count as written.
    pub disturbed: Mutex<BTreeSet<PageNum>>,
    /// Pages that a thread is about to write.
    pub writes: Mutex<Vec<PageNum>>,
    pub pins: AtomicUsize,
    /// The ranges that a thread unmaps just now.
    pub dying: Mutex<Vec<PageRange>>,
    /// Threads that change the layout.
    layout_changers: AtomicUsize,
    layout_changes: AtomicUsize,
    programs_left: AtomicUsize,
    handlers_left: AtomicUsize,
    readers_left: AtomicUsize,
    _file: Option<OwnedFd>,
}

/// Working memory is never unmapped, so it is used again.
static SCRATCHES: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());

fn with_scratch(act: impl FnOnce(&mut Scratch)) {
    let mut scratch = SCRATCHES.lock().unwrap().pop().unwrap_or_else(|| Scratch::new().unwrap());
    act(&mut scratch);
    SCRATCHES.lock().unwrap().push(scratch);
}

impl World {
    fn new(plan: &Plan) -> World {
        let actors = plan.programs + plan.handlers + 1 + plan.readers();
        let baton = Arc::new(Baton::new(plan.seed, actors, plan.switch_one_in));
        let settings = Settings {
            seed: plan.seed,
            refuse_one_in: plan.refuse_one_in,
            planted: plan.planted,
            baton: Some(baton.clone()),
            ..Settings::default()
        };
        let frames = 16 * BLOCK_PAGES;
        let mmu = Simulated::new(ARENA_PAGES, frames, settings).unwrap();
        let (space, file) = space(mmu, plan.tree, ARENA_PAGES, frames);
        // Planted faults are the readers' alone, so most reads are left to them.
        space.swap().set_turns(u32::from(plan.seed.is_multiple_of(4)));
        plan.speculation.begin(space.budget());
        space.budget().control().compress.store(plan.compress as u32, Ordering::Relaxed);
        space.keep_rights(plan.rights_step_pages);
        World {
            plan: plan.clone(),
            space,
            baton,
            oracle: Mutex::new(vec![Expected::default(); ARENA_PAGES]),
            disturbed: Mutex::new(BTreeSet::new()),
            writes: Mutex::new(Vec::new()),
            pins: AtomicUsize::new(0),
            dying: Mutex::new(Vec::new()),
            layout_changers: AtomicUsize::new(0),
            layout_changes: AtomicUsize::new(0),
            programs_left: AtomicUsize::new(plan.programs),
            handlers_left: AtomicUsize::new(plan.handlers),
            readers_left: AtomicUsize::new(plan.readers()),
            _file: file,
        }
    }

    pub fn mmu(&self) -> &Simulated {
        self.space.mmu()
    }

    /// Says what happens, where one seed alone is run.
    pub fn trace(&self, text: impl FnOnce() -> String) {
        if self.plan.traces {
            println!("{:>8} {}", self.baton.steps(), text());
        }
    }

    /// Takes the space's lock, to change the layout of ranges.
    pub fn with_layout<R>(
        &self,
        ranges: &[PageRange],
        act: impl FnOnce(&mut Layout<'_>) -> R,
    ) -> R {
        self.baton.step();
        self.change_layout(self.space.lock_over(ranges), |mut layout| act(&mut layout))
    }

    /// Unmaps a range; `forget` has the oracle forget it. The oracle is first: as soon as the range is
    /// free another thread may have it.
    pub fn unmap(&self, range: PageRange, forget: impl FnOnce()) {
        self.baton.step();
        self.change_layout(self.space.lock_over(&[range]), |layout| {
            forget();
            self.dying.lock().unwrap().push(range);
            self.space.unmap_and_unlock(layout, range).unwrap();
            self.dying.lock().unwrap().retain(|other| *other != range);
        });
    }

    fn change_layout<'a, R>(&self, layout: Layout<'a>, act: impl FnOnce(Layout<'a>) -> R) -> R {
        self.layout_changers.fetch_add(1, Ordering::Relaxed);
        let result = act(layout);
        self.layout_changers.fetch_sub(1, Ordering::Relaxed);
        self.layout_changes.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// The checks that hold at any moment.
    pub fn look_around(&self, page: PageNum) {
        self.space.check_page(page);
        let control = self.space.budget().control();
        let held = control.held() as usize;
        // Until it has given way to what is not managed the space may hold more than its part.
        let limit = self.plan.tree.budget_pages;
        assert!(held <= limit, "{held} pages are held of {limit}");
        // What the kernel holds of dropped pages is its own.
        if self.pins.load(Ordering::Relaxed) == 0 {
            let used = self.mmu().used();
            assert!(used <= held, "{used} pages are in use, {held} charged");
        }
    }

    /// Whether a thread changes the layout just now.
    pub fn layout_is_taken(&self) -> bool {
        self.layout_changers.load(Ordering::Relaxed) > 0
    }

    /// How often it was changed.
    pub fn layout_changes(&self) -> usize {
        self.layout_changes.load(Ordering::Relaxed)
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
                    self.space.handle_fault_of(thread, page, access, Moment::now(), scratch);
                self.trace(|| format!("        fault {page:?} {access:?}: {outcome:?}"));
            }
        });
        self.handlers_left.fetch_sub(1, Ordering::Relaxed);
    }

    fn read_swap(&self) {
        let mut ring = self.space.swap().new_reader();
        ring.plant(Faults {
            fail_one_in: self.plan.failing_reads_one_in,
            corrupt_one_in: self.plan.damaged_reads_one_in,
            short_one_in: 10,
            ..Faults::new(self.plan.seed ^ 0x77)
        });
        with_scratch(|scratch| {
            let mut requests = [SwapRead::NONE; 16];
            loop {
                let mut count = 0;
                self.baton.idle_until(|| {
                    count = self.space.swap().try_take_requests(&mut requests);
                    count > 0 || self.handlers_left.load(Ordering::Relaxed) == 0
                });
                if count == 0 {
                    break;
                }
                self.trace(|| format!("        read {:?}", &requests[..count]));
                self.space.complete_reads(&requests[..count], &mut ring, scratch);
            }
        });
        self.readers_left.fetch_sub(1, Ordering::Relaxed);
    }

    /// What is held, and by what.
    fn books(&self) -> String {
        let mut states = std::collections::BTreeMap::new();
        for page in 0..ARENA_PAGES {
            let word = self.space.snapshot(PageNum(page as u64));
            let prot = self.oracle.lock().unwrap()[page].prot.0;
            // Without the payload.
            let text = format!("{word:?}");
            let flags = text.split(')').nth(1).unwrap_or_default();
            let state = (format!("{:?}{flags}", word.state()), prot);
            *states.entry(state).or_insert(0) += 1;
        }
        let held = self.space.budget().control().held();
        let frames = self.space.frames();
        let zpool = self.space.swap().zpool.pages();
        let (free, limbo) = (frames.free(), frames.limbo());
        format!("{held} held, {free} free, {limbo} in limbo, {zpool} packed; pages: {states:?}")
    }

    fn plant_write_faults(&self) {
        let Some((_, mut writing)) = self.space.swap().writing() else { return };
        if let Some((_, ring)) = writing.parts() {
            ring.plant(Faults {
                fail_one_in: self.plan.failing_writes_one_in,
                short_one_in: 10,
                ..Faults::new(self.plan.seed ^ 0x99)
            });
        }
    }

    fn reclaim(&self) {
        self.plant_write_faults();
        let calls = || self.space.budget().calls();
        let is_over = || {
            self.handlers_left.load(Ordering::Relaxed) == 0
                && self.readers_left.load(Ordering::Relaxed) == 0
        };
        let mut starved_rounds = 0;
        with_scratch(|scratch| {
            while !is_over() {
                let seen = calls();
                self.space.set_kswapd_awake(true);
                let balance = self.space.balance(&NoCaches, scratch);
                self.trace(|| format!("        balance: {balance:?}"));
                match balance {
                    Balance::Progress => starved_rounds = 0,
                    Balance::Enough => {
                        starved_rounds = 0;
                        self.space.set_kswapd_awake(false);
                        if self.space.is_low() {
                            self.baton.relax();
                        } else {
                            self.baton.idle_until(|| calls() != seen || is_over());
                        }
                    }
                    Balance::Stuck | Balance::Elsewhere => {
                        starved_rounds += u32::from(self.space.has_starved());
                        assert!(
                            starved_rounds < STARVED_ROUNDS_MAX,
                            "the programs starve: {}",
                            self.books()
                        );
                        self.baton.relax();
                    }
                }
            }
        });
    }

    /// The end: no thread is inside any more.
    fn check_end(&self) {
        self.space.check();
        let control = self.space.budget().control();
        let most = control.held_pages_max.load(Ordering::Relaxed) as usize;
        assert!(most <= self.plan.tree.budget_pages, "{most} pages were held");
        with_scratch(|scratch| self.check_content(scratch));
        let arena = PageRange::new(PageNum(0), ARENA_PAGES);
        self.space.unmap(&mut self.space.lock(), arena).unwrap();
        self.space.check();
        assert_eq!(self.mmu().used(), self.space.frames().free(), "memory is left over");
    }

    fn check_content(&self, scratch: &mut Scratch) {
        use quire::mmu::Inspect;
        let mut ring = (self.plan.readers() > 0).then(|| self.space.swap().new_reader());
        for at in 0..ARENA_PAGES {
            let page = PageNum(at as u64);
            let expected = self.oracle.lock().unwrap()[at].clone();
            let is_mapped = self.space.is_mapped(&self.space.lock(), PageRange::new(page, 1));
            if !is_mapped {
                // What rights the kernel keeps there is the space's own check.
                assert_eq!(expected.prot, Prot::NONE, "{page:?} is in no VMA");
                let access = self.mmu().try_access(page, false);
                assert!(!matches!(access, Ok(Ok(_))), "{page:?} is in no VMA, and there");
                continue;
            }
            assert_eq!(self.mmu().mapping(page).prot, Some(expected.prot), "rights of {page:?}");
            let mut is_settled = false;
            for _ in 0..1000 {
                match self.mmu().try_access(page, false) {
                    Ok(Ok(bytes)) => {
                        // SAFETY: mapped just now, and no other thread runs.
                        assert!(expected.matches(unsafe { &*bytes }), "{page:?} has other bytes");
                    }
                    Ok(Err(access)) => {
                        self.space.handle_fault(page, access, scratch);
                        let mut requests = [SwapRead::NONE; 16];
                        // A reader may wait for memory, and no other thread runs that would free any.
                        // What is taken below has locks that no write-back may be waited for with.
                        let reads = if self.space.swap().is_reading() { requests.len() } else { 0 };
                        for _ in 0..reads * 100 {
                            if self.space.balance(&NoCaches, scratch) != Balance::Progress {
                                break;
                            }
                        }
                        let count = self.space.swap().try_take_requests(&mut requests);
                        if let Some(ring) = &mut ring {
                            self.space.complete_reads(&requests[..count], ring, scratch);
                        }
                        if self.space.has_starved() {
                            self.space.balance(&NoCaches, scratch);
                        }
                        continue;
                    }
                    Err(_) if !expected.prot.is_readable() => {}
                    Err(trap) => {
                        let is_lost = self.space.snapshot(page).state() == State::Poisoned;
                        let may_be = expected.is_lost || self.plan.loses_pages();
                        assert!(is_lost && may_be, "{page:?} is a {trap:?}");
                    }
                }
                is_settled = true;
                break;
            }
            assert!(is_settled, "{page:?} cannot be had: {}", self.books());
        }
    }

    fn ran(&self) -> Ran {
        let counted = |event| self.space.budget().counted(event);
        Ran {
            steps: self.baton.steps(),
            faults: counted(Event::Pgfault),
            unmapped: counted(Event::UnmapPages),
            packed: counted(Event::Zswpout),
            zstd: counted(Event::ZswpoutZstd),
            written: counted(Event::Zswpwb),
            lost: counted(Event::Pgpoison),
        }
    }
}

impl Plan {
    fn readers(&self) -> usize {
        usize::from(self.tree.segments > 0)
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
    Program::map_shared(&world);
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
        for _ in 0..plan.readers() {
            actors.start("reader", || world.read_swap());
        }
    });
    if let Some(why) = world.baton.failure() {
        // A thread that failed may have held anything: the space is not looked at any more.
        std::mem::forget(world);
        return Err(why);
    }
    let ran = world.ran();
    let checked = std::panic::catch_unwind(AssertUnwindSafe(|| world.check_end()));
    checked.map_err(|payload| text_of(&payload))?;
    Ok(ran)
}
