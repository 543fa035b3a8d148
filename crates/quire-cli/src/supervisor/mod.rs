//! The supervisor: keeps the tree's account while its processes join and leave.
//!
//! Owns the control page, the swap file's descriptor, the listening socket and a connection per
//! member. One thread, one epoll: connections, signals and the program's end all come here, and
//! nothing blocks but the wait itself. Members never wait for the supervisor except to join.
//!
//! # Order of events
//!
//! What is ready at once is handled in this order: fork's children join, then members that are
//! gone leave, then processes join after an exec. A child is so sure to inherit before its parent
//! gives back, and a process that executed a new program has left before it joins again.
//!
//! # Who may join
//!
//! An abstract socket has no file permissions and its name is no secret (/proc/net/unix), so every
//! peer is looked at: processes of this user and of root may join, and any descendant of the
//! program, whatever user it became. Whoever else connects is hung up on.

mod looker;
mod members;
mod program;
pub mod swapfile;

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context as _, Result};
use quire::control::{
    Child, Control, Event, Hello, MAGIC, SEGMENT_BYTES, VERSION, WELCOME_REFUSED,
    WELCOME_SWAP_FILE, WELCOME_UFFD_DEVICE, Welcome,
};
use quire::units::PAGE_SIZE;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

pub use self::looker::{Looker, Moment};
pub use self::members::Death;
use self::members::{Members, Refused};
use self::swapfile::SwapFile;
use crate::cli::{FolioOrder, Handlers};
use crate::procfs;
use crate::sys::control::ControlMap;
use crate::sys::peer::{self, Peer};
pub use program::Program;

/// Epoll's token of the listening socket.
const LISTENER: u64 = 0;
/// Epoll's token of the program's signals.
const SIGNALS: u64 = 1;
/// Epoll's token of the first connection.
const FIRST_CONNECTION: u64 = 2;
/// How often the sizes are read whose maxima the members do not keep.
const SAMPLE_MS: i64 = 500;
const BACKLOG: i32 = 128;

/// What the members of the tree are given.
pub struct Settings {
    /// The budget in pages.
    pub budget_pages: u64,
    /// How much a fault maps.
    pub folio_order: FolioOrder,
    /// How many threads of a member serve faults.
    pub handlers: Handlers,
    /// Whether they run on any CPU.
    pub no_pinned_handlers: bool,
    /// Whether reclaim unmaps page by page.
    pub no_batch_unmap: bool,
    /// Whether faults always go the classic way.
    pub no_speculation: bool,
    /// The swap file.
    pub swap: Option<SwapFile>,
    /// `/dev/userfaultfd`.
    pub uffd_device: Option<OwnedFd>,
}

struct Connection {
    socket: OwnedFd,
    peer: Peer,
    /// Its slot, once it has joined.
    slot: Option<u32>,
}

/// What a connection had to say.
enum Said {
    Hello(Hello),
    Nonsense,
    Nothing,
    Gone,
}

/// The maxima that are seen by looking now and then.
#[derive(Clone, Copy, Default)]
struct Samples {
    pool_pages_max: u64,
    segments_used_max: u32,
}

/// What became of the tree.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub budget_bytes: u64,
    pub held_bytes_max: u64,
    pub wanted_bytes_max: u64,
    pub managed_bytes_max: u64,
    pub pool_bytes_max: u64,
    pub swap_file_bytes_max: u64,
    pub swap_file_limit_bytes: u64,
    pub processes: u64,
    pub processes_left: u64,
    pub events: [u64; Event::ALL.len()],
}

impl Default for Account {
    fn default() -> Account {
        Account {
            budget_bytes: 0,
            held_bytes_max: 0,
            wanted_bytes_max: 0,
            managed_bytes_max: 0,
            pool_bytes_max: 0,
            swap_file_bytes_max: 0,
            swap_file_limit_bytes: 0,
            processes: 0,
            processes_left: 0,
            events: [0; Event::ALL.len()],
        }
    }
}

/// The supervisor of one run.
pub struct Supervisor {
    control: ControlMap,
    members: Members,
    swap: Option<SwapFile>,
    uffd_device: Option<OwnedFd>,
    socket_name: String,
    listener: OwnedFd,
    epoll: OwnedFd,
    connections: BTreeMap<u64, Connection>,
    next_token: u64,
    samples: Samples,
    /// The name of the program's cgroup, in which only descendants are.
    cgroup_name: Option<String>,
    /// Looks up a process; the tests, which are all members at once, have another.
    parent_of: fn(u32) -> Option<u32>,
    refused_full: u64,
}

/// A random number that nobody can guess.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // The kernel's pool is ready long before anyone can log in.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

impl Supervisor {
    /// A supervisor that listens.
    pub fn new(settings: Settings) -> Result<Supervisor> {
        let control = ControlMap::create()?;
        let segments = settings.swap.as_ref().map_or(0, SwapFile::segments);
        control.supervisor_pid.store(std::process::id(), Relaxed);
        control.no_batch_unmap.store(settings.no_batch_unmap.into(), Relaxed);
        control.no_speculation.store(settings.no_speculation.into(), Relaxed);
        control.folio_order.store(settings.folio_order.in_control(), Relaxed);
        control.handlers.store(settings.handlers.in_control(), Relaxed);
        control.no_pinned_handlers.store(settings.no_pinned_handlers.into(), Relaxed);
        control.budget_pages.store(settings.budget_pages, Relaxed);
        control.segments_max.store(segments, Relaxed);
        control.version.store(VERSION, Relaxed);
        control.magic.store(MAGIC, Relaxed);
        let socket_name = format!("quire-{}-{:016x}", std::process::id(), random());
        let listener = listen(&socket_name).context("cannot listen for processes to join")?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot make an epoll")?;
        watch(&epoll, listener.as_fd(), LISTENER).context("cannot watch the socket")?;
        Ok(Supervisor {
            control,
            members: Members::new(),
            swap: settings.swap,
            uffd_device: settings.uffd_device,
            socket_name,
            listener,
            epoll,
            connections: BTreeMap::new(),
            next_token: FIRST_CONNECTION,
            samples: Samples::default(),
            cgroup_name: None,
            parent_of: |pid| procfs::stat(pid).map(|stat| stat.parent_pid),
            refused_full: 0,
        })
    }

    /// The name of the socket that members join at.
    pub fn socket_name(&self) -> &str {
        &self.socket_name
    }

    /// Takes whoever is in the cgroup of this name as a descendant of the program.
    pub fn trust_cgroup(&mut self, name: &str) {
        self.cgroup_name = Some(name.to_owned());
    }

    /// Serves until the program ends; returns its exit status as a shell would have it. `on_death`
    /// is told at once of members that could not go on; `looker` sees the tree now and then.
    pub fn run(
        &mut self,
        program: &mut Program,
        mut on_death: impl FnMut(Death, &Account),
        mut looker: Option<&mut Looker<'_>>,
    ) -> Result<u8> {
        watch(&self.epoll, program.signals(), SIGNALS).context("cannot watch for signals")?;
        loop {
            let timeout_ms = looker.as_ref().map_or(SAMPLE_MS, |looker| looker.timeout_ms());
            let has_signals = self.serve(timeout_ms, &mut on_death)?;
            if has_signals && let Some(status) = program.handle_signals() {
                // Connections close before a process can be waited for: what the program was
                // charged is given back before the account is read.
                self.serve(0, &mut on_death)?;
                if let Some(looker) = looker {
                    (looker.look)(&self.control, Moment::End);
                }
                return Ok(status);
            }
            if let Some(looker) = &mut looker {
                looker.look_if_due(&self.control);
            }
        }
    }

    /// Waits for something to happen, at most `timeout_ms`, and handles all that did. Returns
    /// whether signals came.
    fn serve(
        &mut self,
        timeout_ms: i64,
        on_death: &mut dyn FnMut(Death, &Account),
    ) -> Result<bool> {
        let timeout =
            Timespec { tv_sec: timeout_ms / 1000, tv_nsec: timeout_ms % 1000 * 1_000_000 };
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))
        {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("cannot wait for events"),
        }
        self.sample();
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
                Said::Nonsense => self.hang_up(token),
                Said::Nothing => {}
            }
        }
        let (forked, executed): (Vec<_>, Vec<_>) =
            hellos.into_iter().partition(|(_, hello)| hello.parent_slot != u32::MAX);
        for (token, hello) in forked {
            self.welcome(token, &hello);
        }
        for token in gone {
            self.bury(token, on_death);
        }
        for (token, hello) in executed {
            self.bury_former_self(token, on_death);
            self.welcome(token, &hello);
        }
        Ok(tokens.contains(&SIGNALS))
    }

    /// Takes all connections that wait; returns their tokens.
    fn accept_all(&mut self) -> Vec<u64> {
        let mut accepted = Vec::new();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, flags) {
            let Some(peer) = peer::of(&socket) else { continue };
            if !self.may_join(peer) {
                continue;
            }
            let token = self.next_token;
            if watch(&self.epoll, socket.as_fd(), token).is_ok() {
                self.next_token += 1;
                self.connections.insert(token, Connection { socket, peer, slot: None });
                accepted.push(token);
            }
        }
        accepted
    }

    /// Whether the peer belongs to the tree, or has the power to do as it likes with it anyway.
    fn may_join(&self, peer: Peer) -> bool {
        let own = rustix::process::geteuid().as_raw();
        if peer.uid == own || peer.uid == 0 {
            return true;
        }
        // A descendant that became another user.
        let mut pid = peer.pid;
        while pid > 1 {
            if pid == std::process::id() {
                return true;
            }
            let Some(parent) = (self.parent_of)(pid) else { break };
            pid = parent;
        }
        // A descendant whose ancestors are gone is init's child, but still in the cgroup.
        self.cgroup_name.as_ref().is_some_and(|name| {
            std::fs::read_to_string(format!("/proc/{}/cgroup", peer.pid))
                .is_ok_and(|cgroups| cgroups.split(['/', '\n']).any(|part| part == name))
        })
    }

    /// Reads what a connection says.
    fn listen_to(&self, token: u64) -> Said {
        let Some(connection) = self.connections.get(&token) else { return Said::Nothing };
        let mut bytes = [0u8; size_of::<Hello>() + 1];
        match rustix::net::recv(&connection.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Said::Gone,
            Ok((count, _)) => match decode(&bytes[..count]) {
                _ if connection.slot.is_some() => Said::Nothing,
                Some(hello) => Said::Hello(hello),
                None => Said::Nonsense,
            },
            Err(Errno::AGAIN | Errno::INTR) => Said::Nothing,
            Err(_) => Said::Gone,
        }
    }

    /// Answers a process that asks to join.
    fn welcome(&mut self, token: u64, hello: &Hello) {
        let Some(connection) = self.connections.get(&token) else { return };
        let peer = connection.peer;
        let slot = if hello.version != VERSION || !self.is_child_of_slot(peer, hello.parent_slot) {
            Err(Refused::NoParent)
        } else {
            self.members.join(&self.control, hello, peer.pid)
        };
        let mut answer = Welcome { magic: MAGIC, flags: 0, slot: u32::MAX, reserved: 0 };
        let mut descriptors: Vec<BorrowedFd<'_>> = Vec::new();
        match slot {
            Ok(slot) => {
                answer.slot = slot;
                descriptors.push(self.control.as_fd());
                if let Some(device) = &self.uffd_device {
                    answer.flags |= WELCOME_UFFD_DEVICE;
                    descriptors.push(device.as_fd());
                }
                if let Some(swap) = &self.swap {
                    answer.flags |= WELCOME_SWAP_FILE;
                    descriptors.push(swap.as_fd());
                }
            }
            Err(refused) => {
                answer.flags = WELCOME_REFUSED;
                self.refused_full += u64::from(refused == Refused::Full);
            }
        }
        // A peer that died since is told nothing; its end is the connection's next event.
        let _ = send(&connection.socket, &encode(&answer), &descriptors);
        match slot {
            Ok(slot) => {
                if let Some(connection) = self.connections.get_mut(&token) {
                    connection.slot = Some(slot);
                }
            }
            Err(_) => self.hang_up(token),
        }
    }

    /// Whether the peer may inherit from the member in `slot`: slots are used again, and a child
    /// that was slow to connect must not inherit from a stranger.
    fn is_child_of_slot(&self, peer: Peer, slot: u32) -> bool {
        if slot == u32::MAX {
            return true;
        }
        let Some(member) = self.members.pid_of(&self.control, slot) else { return false };
        // A parent that died in its fork has left its slot only when its connection's end has been
        // handled, and that comes after this.
        let is_dead = || procfs::stat(member).is_none_or(|stat| stat.is_dead);
        let parent = (self.parent_of)(peer.pid);
        parent == Some(member) || is_dead() || self.is_made_by(parent, slot, member)
    }

    /// Whether a process of this `parent` may be one that the member made for another: for its own
    /// parent (CLONE_PARENT), or by a child in its memory (vfork). The member is in a fork then, of
    /// which it has not heard.
    fn is_made_by(&self, parent: Option<u32>, slot: u32, member: u32) -> bool {
        let Some(parent) = parent else { return false };
        let is_related =
            || (self.parent_of)(member) == Some(parent) || (self.parent_of)(parent) == Some(member);
        self.control.members[slot as usize].fork.child() == Child::UnderWay && is_related()
    }

    /// Takes back what a member held whose connection has closed.
    fn bury(&mut self, token: u64, on_death: &mut dyn FnMut(Death, &Account)) {
        if let Some(slot) = self.connections.get(&token).and_then(|connection| connection.slot) {
            self.sample();
            if let Some(death) = self.members.leave(&self.control, slot) {
                let account = self.account();
                on_death(death, &account);
            }
        }
        self.hang_up(token);
    }

    /// A process that executed a new program joins again: its old connection has closed, but that
    /// may not have come to our notice yet.
    fn bury_former_self(&mut self, token: u64, on_death: &mut dyn FnMut(Death, &Account)) {
        let Some(pid) = self.connections.get(&token).map(|connection| connection.peer.pid) else {
            return;
        };
        let is_former = |connection: &Connection| {
            connection.slot.is_some() && connection.peer.pid == pid && is_closed(&connection.socket)
        };
        let former: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| is_former(connection))
            .map(|(&token, _)| token)
            .collect();
        for token in former {
            self.bury(token, on_death);
        }
    }

    /// Closes a connection; epoll forgets it with that, as nobody else has the descriptor.
    fn hang_up(&mut self, token: u64) {
        self.connections.remove(&token);
    }

    fn sample(&mut self) {
        let samples = &mut self.samples;
        let pool_pages = self.members.pool_pages(&self.control);
        samples.pool_pages_max = samples.pool_pages_max.max(pool_pages);
        let segments = self.control.segments_used.load(Relaxed);
        samples.segments_used_max = samples.segments_used_max.max(segments);
    }

    /// What became of the tree so far.
    pub fn account(&mut self) -> Account {
        self.sample();
        let control: &Control = &self.control;
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        let segments = u64::from(self.samples.segments_used_max);
        let allocated = self.swap.as_ref().map_or(0, SwapFile::allocated_bytes);
        Account {
            budget_bytes: bytes(control.budget_pages.load(Relaxed)),
            held_bytes_max: bytes(control.held_pages_max.load(Relaxed)),
            wanted_bytes_max: bytes(control.wanted_pages_max.load(Relaxed)),
            managed_bytes_max: bytes(self.members.managed_pages_max(control)),
            pool_bytes_max: bytes(self.samples.pool_pages_max),
            swap_file_bytes_max: (segments * SEGMENT_BYTES as u64).max(allocated),
            swap_file_limit_bytes: u64::from(control.segments_max.load(Relaxed))
                * SEGMENT_BYTES as u64,
            processes: self.members.joined(),
            processes_left: self.members.count() as u64,
            events: Event::ALL.map(|event| self.members.event(control, event)),
        }
    }

    /// Processes that asked to join when all slots were taken.
    pub fn refused_full(&self) -> u64 {
        self.refused_full
    }
}

fn listen(name: &str) -> rustix::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn watch(epoll: &OwnedFd, source: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
}

/// Whether the peer has closed the connection and nothing is left to read.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut byte = [0u8; 1];
    let peeked = rustix::net::recv(socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
    !matches!(peeked, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags).map(drop)
}

/// A `Hello` from its bytes, which are its fields in the machine's own order.
fn decode(bytes: &[u8]) -> Option<Hello> {
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (magic, version) = (word(0)?, word(4)?);
    if magic != MAGIC || (version == VERSION && bytes.len() != size_of::<Hello>()) {
        return None;
    }
    // Another version's fields mean something else, but it is owed an answer.
    let is_ours = version == VERSION;
    Some(Hello {
        magic,
        version,
        fork: if is_ours { word(8)? } else { 0 },
        parent_slot: if is_ours { word(12)? } else { u32::MAX },
        held_pages: if is_ours { long(16)? } else { 0 },
        wanted_pages: if is_ours { long(24)? } else { 0 },
    })
}

fn encode(welcome: &Welcome) -> [u8; size_of::<Welcome>()] {
    let words = [welcome.magic, welcome.flags, welcome.slot, welcome.reserved];
    let mut bytes = [0; size_of::<Welcome>()];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
