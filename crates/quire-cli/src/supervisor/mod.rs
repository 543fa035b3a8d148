//! The supervisor: keeps the tree's account while its processes join and leave.
//!
//! Owns the control page, the swap file's descriptor, the listening socket and a connection per
//! member. One thread, one epoll: connections, signals and the program's end all come here, and
//! nothing blocks but the wait itself. Members never wait for the supervisor except to join, and for
//! pages that are [on a server](crate::far), which has threads of its own.
//!
//! # Order of events
//!
//! What is ready at once is handled in this order: fork's children join, then members that are
//! gone leave, then processes join after an exec. So a child inherits before its parent gives
//! anything back, and a process that executed a new program has left before it joins again.
//!
//! # Which processes may join
//!
//! An abstract socket has no file permissions and its name is no secret (/proc/net/unix), so every
//! peer is looked at: processes of this user and of root may join, and any descendant of the
//! program, whatever user it became. Any other connection is closed.
//!
//! # After its end
//!
//! Members go on without a supervisor that was killed: nothing in the way of a fault asks it, but for pages that
//! are on a server, which are lost. What a member held that ends from then on stays charged. A fork's child cannot
//! join, so fork fails with EPERM; a program that is executed runs unmanaged. Both say so.

mod account;
mod exit_log;
mod joining;
mod looker;
mod members;
mod pool;
mod program;
pub(crate) mod swapfile;
mod thrash;
pub(crate) mod unmanaged;
mod whole;
pub(crate) mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quire::control::{BUDGET_GROWTH_MAX, Control, Hello, MAGIC, SEGMENT_BYTES, VERSION};
use quire::units::PAGE_SIZE;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

pub(crate) use self::account::{Account, ByMember, FarAccount};
pub(crate) use self::exit_log::{End, Entry};
use self::exit_log::{ExitLog, Identity};
use self::joining::{Said, Turn, is_forks};
pub(crate) use self::looker::{Looker, Moment};
use self::members::Members;
pub(crate) use self::members::{Death, Sizes};
use self::pool::Pool;
use self::swapfile::SwapFile;
use self::thrash::Thrash;
use self::unmanaged::{Family, Unmanaged, Watch};
pub(crate) use self::whole::{InMemory, Whole};
use self::wire::is_closed;
use crate::cgroup::Growth;
use crate::cli::RunOptions;
use crate::far::{self, FarTier};
use crate::runs::counts::{Counts, Scope};
use crate::sys::control::ControlMap;
use crate::sys::peer::Peer;
use crate::{procfs, report};
pub(crate) use program::Program;

/// Epoll's tokens.
const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const FIRST_CONNECTION: u64 = 2;
/// How often the supervisor reads the sizes of which members keep no maximum.
const SAMPLE_PERIOD: Duration = Duration::from_millis(500);
/// How often the supervisor looks whether members have let go of memory that they share, which it
/// then gives back.
const COMMON_PERIOD: Duration = Duration::from_millis(20);

/// What the members of the tree share.
pub(crate) struct Resources {
    pub budget_pages: u64,
    /// Most pages that one member may hold; 0 where only the budget bounds it.
    pub member_pages_max: u64,
    /// Whether the budget can be raised later: not where it is a part of an outer run's.
    pub can_grow: bool,
    pub swap: Option<SwapFile>,
    /// What members swap to: the swap file, or what stands before a server.
    pub swap_descriptor: Option<OwnedFd>,
    pub uffd_device: Option<OwnedFd>,
}

struct Connection {
    socket: OwnedFd,
    peer: Peer,
    /// Its slot, once it has joined.
    slot: Option<u32>,
    /// Its process, once it is a member.
    identity: Option<Identity>,
}

/// What is reported at once.
pub(crate) enum News {
    /// A member could not go on.
    Death(Death, Box<Account>),
    /// A process was refused, the first of the run, because there are as many members as may be.
    Full { most: usize },
    /// A process is no member, and will be none.
    Unmanaged(Unmanaged),
    /// What is not managed leaves little of the budget.
    LittleLeft { unmanaged: InMemory, budget_bytes: u64, shared_by: Option<(String, u32, u64)> },
    /// The run does little but wait for memory; with so many bytes it would be at ease.
    Thrashing { ease_bytes: u64 },
}

pub(crate) struct Supervisor {
    control: Arc<ControlMap>,
    members: Members,
    pool: Pool,
    resources: Resources,
    pub socket_name: String,
    listener: OwnedFd,
    epoll: OwnedFd,
    connections: BTreeMap<u64, Connection>,
    next_token: u64,
    /// Processes that found no free slot, to be answered in the next round.
    late: Vec<(u64, Hello)>,
    /// Most pages of the pool, and segments of the swap file, that a sample has shown.
    pool_pages_max: u64,
    segments_used_max: u32,
    exit_log: ExitLog,
    watch: Watch,
    /// Where what the swap file has no room for is on a server: what was prepared, and what is at work.
    prepared_far: Option<far::Prepared>,
    far: Option<FarTier>,
    /// Where the budget is for what is not managed, too.
    pub whole: Option<Whole>,
    thrash: Thrash,
    /// Processes that were refused because all slots were taken.
    refused: VecDeque<u32>,
    /// The folder of the program's cgroup: every process in it is taken for a descendant.
    pub cgroup: Option<PathBuf>,
    /// Looks up the parent of a process; tests, in which one process is all members, replace it.
    parent_of: fn(u32) -> Option<u32>,
    refused_full: u64,
    /// What is to be reported when the round has ended.
    news: Vec<News>,
    /// Is told how many members there are before one that joins is welcomed, of the budget before it is
    /// changed, and now and then how many bytes of data the members have.
    pub on_growth: Box<dyn FnMut(Growth)>,
}

/// A random number that cannot be guessed.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // The kernel's pool is ready long before anyone can log in.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

impl Supervisor {
    pub(crate) fn new(options: &RunOptions, resources: Resources) -> Result<Supervisor> {
        let control = Arc::new(ControlMap::create()?);
        let segments = resources.swap.as_ref().map_or(0, |swap| swap.segments);
        let growth = if resources.can_grow { BUDGET_GROWTH_MAX } else { 1 };
        let most_pages = (resources.budget_pages as usize).saturating_mul(growth);
        let pool = Pool::create(most_pages.saturating_mul(PAGE_SIZE))?;
        control.slots_max.store(pool.table.slots() as u32, Relaxed);
        control.supervisor_pid.store(std::process::id(), Relaxed);
        control.no_batch_unmap.store(options.no_batch_unmap.into(), Relaxed);
        control.no_speculation.store(options.no_speculative_faults.into(), Relaxed);
        control.folio_order.store(options.folio_order, Relaxed);
        control.compress.store(options.compress as u32, Relaxed);
        control.handlers.store(options.handlers, Relaxed);
        control.no_pinned_handlers.store(options.no_pinned_handlers.into(), Relaxed);
        control.budget_pages.store(resources.budget_pages, Relaxed);
        control.budget_pages_max.store(most_pages as u64, Relaxed);
        control.is_managed_only.store(options.managed_only.into(), Relaxed);
        control.member_pages_max.store(resources.member_pages_max, Relaxed);
        control.segments_max.store(segments, Relaxed);
        if options.swap_encrypt {
            let mut key = [0; 32];
            rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
                .context("the kernel gives no random key for the swap file")?;
            control.encrypt_swap(&key)?;
        }
        control.version.store(VERSION, Relaxed);
        control.magic.store(MAGIC, Relaxed);
        let socket_name = format!("quire-{}-{:016x}", std::process::id(), random());
        let listener = wire::listen(&socket_name).context("cannot listen for processes to join")?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot make an epoll")?;
        watch(&epoll, listener.as_fd(), LISTENER).context("cannot watch the socket")?;
        Ok(Supervisor {
            control,
            members: Members::new(options.members_max.into()),
            pool,
            resources,
            socket_name,
            listener,
            epoll,
            connections: BTreeMap::new(),
            next_token: FIRST_CONNECTION,
            late: Vec::new(),
            pool_pages_max: 0,
            segments_used_max: 0,
            exit_log: ExitLog::default(),
            watch: Watch::new(),
            prepared_far: None,
            far: None,
            whole: None,
            thrash: Thrash::default(),
            refused: VecDeque::new(),
            cgroup: None,
            parent_of: |pid| procfs::stat(pid).map(|stat| stat.parent_pid),
            refused_full: 0,
            news: Vec::new(),
            on_growth: Box::new(|_| ()),
        })
    }

    /// Lets members know of a tier on a server. Before any of them joins.
    pub(crate) fn set_far(&mut self, far: far::Prepared) {
        far.enter(&self.control);
        self.prepared_far = Some(far);
    }

    /// Starts its threads, which have the signal mask of the caller.
    pub(crate) fn start_far(&mut self) -> Result<()> {
        let Some(far) = self.prepared_far.take() else { return Ok(()) };
        self.far = Some(far.start(Arc::clone(&self.control))?);
        Ok(())
    }

    /// Serves until the program ends; returns its exit status as a shell would have it. `on_news`
    /// is told at once of what goes wrong; `looker` sees the tree now and then.
    pub(crate) fn run(
        &mut self,
        program: &mut Program,
        mut on_news: impl FnMut(News),
        mut looker: Option<&mut Looker<'_>>,
    ) -> Result<u8> {
        watch(&self.epoll, program.signals.as_fd(), SIGNALS).context("cannot watch for signals")?;
        loop {
            let has_common = self.control.common_pages.load(Relaxed) != 0;
            let timeout = looker.as_ref().map_or(SAMPLE_PERIOD, |looker| looker.timeout());
            let timeout = if has_common { timeout.min(COMMON_PERIOD) } else { timeout };
            let timeout = if self.whole.is_some() { timeout.min(whole::PERIOD) } else { timeout };
            let has_signals = self.serve(timeout)?;
            if has_signals && let Some(status) = program.handle_signals() {
                // Connections close before a process can be waited for: what the program was
                // charged is given back before the account is read.
                self.serve(Duration::ZERO)?;
                self.news.drain(..).for_each(on_news);
                self.exit_log.look();
                if let Some(looker) = looker {
                    (looker.look)(&self.control, Moment::End);
                }
                return Ok(status);
            }
            if Instant::now() >= self.watch.next {
                self.look_for_unmanaged();
                self.exit_log.look();
            }
            let cpu_seconds = || {
                let members = self.members.present(&self.control);
                members.filter_map(|member| procfs::cpu_seconds(member.pid.load(Relaxed))).sum()
            };
            let ease_bytes = self.thrash.look(&self.control, cpu_seconds);
            self.news.extend(ease_bytes.map(|ease_bytes| News::Thrashing { ease_bytes }));
            self.news.drain(..).for_each(&mut on_news);
            if let Some(looker) = &mut looker {
                looker.look_if_due(&self.control);
            }
        }
    }

    /// Looks at the run's processes for those that have not joined.
    fn look_for_unmanaged(&mut self) {
        let (members, inner) = unmanaged::members_and_inner(self.members.present(&self.control));
        let known = self.watch.seen.keys().copied().chain(self.cgroup_pids()).collect();
        let supervisor_pid = std::process::id();
        let family = Family { supervisor_pid, members: &members, inner: &inner, known: &known };
        let (refused, most) = (&self.refused, self.members.most);
        let why = |pid| refused.contains(&pid).then(|| report::full_line(most));
        self.news.extend(self.watch.look(family, why).into_iter().map(News::Unmanaged));
    }

    /// Changes the budget where `quire set` asks for that.
    fn set_budget_if_asked(&mut self) {
        let asked = self.control.asked_budget_pages.swap(0, Relaxed);
        if asked == 0 || asked > self.control.budget_pages_max.load(Relaxed) {
            return;
        }
        // The kernel's limit first, which is never lowered: what is held gives way after this.
        self.note_growth_to(asked);
        self.control.budget_pages.store(asked, Relaxed);
        self.control.call_all();
    }

    /// Counts what is in memory beside managed memory, where the budget is for that too.
    fn count_unmanaged(&mut self) {
        let Some(whole) = &mut self.whole else { return };
        let (members, watch) = (self.members.present(&self.control), &self.watch);
        let processes =
            || unmanaged::members_and_inner(members).0.into_iter().chain(watch.pids()).collect();
        if let Some(unmanaged) = whole.look(&self.control, processes) {
            self.news.push(News::LittleLeft {
                unmanaged,
                budget_bytes: self.control.budget_pages.load(Relaxed) * PAGE_SIZE as u64,
                shared_by: whole.most_shared_by.clone(),
            });
        }
    }

    fn cgroup_pids(&self) -> Vec<u32> {
        let file = self.cgroup.as_ref().map(|folder| folder.join("cgroup.procs"));
        let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Waits for something to happen, at most `timeout`, and handles all that did. Returns
    /// whether signals came.
    fn serve(&mut self, timeout: Duration) -> Result<bool> {
        let late = std::mem::take(&mut self.late);
        let timeout = if late.is_empty() { timeout } else { Duration::ZERO };
        let timeout = Timespec::try_from(timeout)?;
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))
        {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("cannot wait for events"),
        }
        self.sample();
        self.set_budget_if_asked();
        self.count_unmanaged();
        self.pool.settle_if_let_go(&self.control);
        let tokens: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
        let mut ready: Vec<u64> =
            tokens.iter().copied().filter(|&token| token >= FIRST_CONNECTION).collect();
        // Always, as a child's connection may have come after the wait and before its parent's end
        // is handled below.
        ready.extend(self.accept_all());
        let mut hellos = Vec::new();
        let mut gone = Vec::new();
        for token in ready {
            match self.listen_to(token) {
                Said::Hello(hello) => hellos.push((token, hello)),
                Said::Gone => gone.push(token),
                Said::Nothing => {}
            }
        }
        let (forked, executed): (Vec<_>, Vec<_>) =
            hellos.into_iter().partition(|(_, hello)| is_forks(hello));
        for (token, hello) in forked {
            self.welcome(token, hello, Turn::First);
        }
        for token in gone {
            self.remove_member(token);
        }
        for (token, hello) in executed {
            self.remove_former_self(token);
            self.welcome(token, hello, Turn::First);
        }
        for (token, hello) in late {
            self.welcome(token, hello, Turn::Second);
        }
        Ok(tokens.contains(&SIGNALS))
    }

    /// Takes back what a member held, after its connection has closed.
    fn remove_member(&mut self, token: u64) {
        self.sample();
        // Epoll forgets the connection with its end, as no other process has the descriptor.
        let Some(connection) = self.connections.remove(&token) else { return };
        let Some(slot) = connection.slot else { return };
        // The pool comes first, while its slabs are still on the member's account.
        self.pool.leave(&self.control, slot);
        let Some(left) = self.members.leave(&self.control, slot) else { return };
        if let Some(identity) = connection.identity {
            self.exit_log.push(identity, left.sizes);
        }
        if let Some(death) = left.death {
            let account = Box::new(self.account());
            self.news.push(News::Death(death, account));
        }
    }

    /// A process that executed a new program joins again: its old connection has closed, but that
    /// may not have come to our notice yet.
    fn remove_former_self(&mut self, token: u64) {
        let Some(connection) = self.connections.get(&token) else { return };
        let pid = connection.peer.pid;
        let former = self.connections.iter().filter(|(_, connection)| {
            connection.identity.is_some()
                && connection.peer.pid == pid
                && is_closed(&connection.socket)
        });
        let former: Vec<u64> = former.map(|(&token, _)| token).collect();
        former.into_iter().for_each(|token| self.remove_member(token));
        self.exit_log.note_executed(pid);
    }

    fn sample(&mut self) {
        self.pool_pages_max = self.pool_pages_max.max(self.members.pool_pages(&self.control));
        let segments = self.control.segments_in_file();
        self.segments_used_max = self.segments_used_max.max(segments);
        self.note_growth();
    }

    fn note_growth(&mut self) {
        self.note_growth_to(self.control.budget_pages.load(Relaxed));
    }

    fn note_growth_to(&mut self, budget_pages: u64) {
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        (self.on_growth)(Growth {
            budget_bytes: bytes(budget_pages),
            members: self.members.count,
            wanted_bytes: bytes(self.control.wanted()),
        });
    }

    pub(crate) fn account(&mut self) -> Account {
        self.sample();
        let control: &Control = &self.control;
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        let segments = u64::from(self.segments_used_max);
        let allocated = self.resources.swap.as_ref().map_or(0, SwapFile::allocated_bytes);
        Account {
            budget_bytes: bytes(control.budget_pages.load(Relaxed)),
            held_bytes_max: bytes(control.held_pages_max.load(Relaxed)),
            wanted_bytes_max: bytes(control.wanted_max()),
            managed_bytes_max: bytes(self.members.managed_pages_max(control)),
            pool_bytes_max: bytes(self.pool_pages_max),
            swap_file_bytes_max: (segments * SEGMENT_BYTES as u64).max(allocated),
            swap_file_limit_bytes: u64::from(control.segments_max.load(Relaxed))
                * SEGMENT_BYTES as u64,
            far: self.far.as_ref().map(FarTier::account),
            swap_folder: self.resources.swap.as_ref().map(|swap| swap.folder.clone()),
            member_bytes_max: bytes(control.member_pages_max.load(Relaxed)),
            members_max: self.members.most as u64,
            processes: self.members.joined,
            processes_left: self.members.count as u64,
            processes_refused: self.refused_full,
            unmanaged_processes: self.watch.found,
            unmanaged_bytes_max: self.watch.resident_bytes_max,
            unmanaged_memory_max: self.whole.as_ref().map(|whole| whole.most),
            most_shared_by: self.whole.as_ref().and_then(|whole| whole.most_shared_by.clone()),
            counts: Counts::read(control, Scope::Run).unwrap_or_default(),
        }
    }

    pub(crate) fn by_member(&self) -> ByMember {
        let present = self.connections.values().filter_map(|connection| {
            let (slot, identity) = (connection.slot?, connection.identity.as_ref()?);
            Some(Entry {
                pid: identity.pid,
                name: identity.name.clone(),
                end: End::None,
                sizes: Sizes::of(&self.control.members[slot as usize]),
            })
        });
        ByMember {
            members: self.exit_log.entries().cloned().chain(present).collect(),
            forgotten: self.exit_log.forgotten,
            unmanaged: self.watch.all().cloned().collect(),
        }
    }
}

fn watch(epoll: &OwnedFd, source: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
