//! Joining: what a process that connects says, and what it is answered.
//!
//! # How a process joins
//!
//! 1. The supervisor has made the control memfd, the pool memfd, the swap file (O_TMPFILE), the cgroup and an
//!    abstract `SOCK_SEQPACKET` socket, has opened `/dev/userfaultfd` where it may, and has started the program
//!    with `LD_PRELOAD` and `QUIRE_SOCKET`.
//! 2. The first call into the preload library, often one of ld.so's before any constructor, connects and sends
//!    a [`Hello`]. The supervisor looks at the peer's credentials (see [`super`]).
//! 3. The supervisor answers with a [`Welcome`] and descriptors. Where it refuses (there are as many members as
//!    there may be, or the versions differ) the `Welcome` gives the reason; the process prints it and runs
//!    unmanaged. A process that finds no place is looked at a second time, after all members that have ended
//!    meanwhile have left.
//! 4. The process reserves arena and frame pool, opens two userfaultfds, registers them, starts the engine's
//!    threads, and closes the descriptors in the program's own table.
//! 5. The connection stays open in the engine threads' table. Exec, exit and SIGKILL all close it: the
//!    supervisor then takes back what the slot held, segments and slabs included. A process that executed
//!    another program joins anew.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use quire::control::{
    Child, Hello, JoinRefusal, MAGIC, NO_PARENT, RESERVATION, VERSION, WELCOME_POOL,
    WELCOME_REFUSED, WELCOME_SWAP_FILE, WELCOME_UFFD_DEVICE, Welcome,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};

use super::exit_log::Identity;
use super::members::Refused;
use super::{Connection, News, Supervisor, watch, wire};
use crate::procfs;
use crate::sys::peer::{self, Peer};

/// Refused processes that are remembered, with the reason.
const REFUSED_MAX: usize = 1024;

pub(super) enum Said {
    Hello(Hello),
    Nothing,
    /// The connection has ended, or what came on it is no hello: it is closed.
    Gone,
}

/// How often a process that asks to join has been looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// A member that has ended may still have a slot, until its leaving is handled.
    First,
    Second,
}

impl Supervisor {
    /// Takes all connections that wait; returns their tokens.
    pub(super) fn accept_all(&mut self) -> Vec<u64> {
        let mut accepted = Vec::new();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // A poll costs less than an accept that finds no connection, which makes a socket first.
        while self.has_waiting_connection()
            && let Ok(socket) = rustix::net::accept_with(&self.listener, flags)
        {
            let Some(peer) = peer::of(&socket) else { continue };
            if !self.may_join(peer) {
                continue;
            }
            let token = self.next_token;
            if watch(&self.epoll, socket.as_fd(), token).is_ok() {
                self.next_token += 1;
                self.connections
                    .insert(token, Connection { socket, peer, slot: None, identity: None });
                accepted.push(token);
            }
        }
        accepted
    }

    fn has_waiting_connection(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut listener = [PollFd::new(&self.listener, PollFlags::IN)];
        // Where poll fails, accept itself finds out.
        poll(&mut listener, Some(&now)).map_or(true, |ready| ready > 0)
    }

    /// Whether the peer belongs to the tree, or has the power to do as it likes with it anyway.
    pub(super) fn may_join(&self, peer: Peer) -> bool {
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
        self.cgroup.as_ref().and_then(|folder| folder.file_name()).is_some_and(|name| {
            std::fs::read_to_string(format!("/proc/{}/cgroup", peer.pid))
                .is_ok_and(|cgroups| cgroups.split(['/', '\n']).any(|part| part == name))
        })
    }

    pub(super) fn listen_to(&self, token: u64) -> Said {
        let Some(connection) = self.connections.get(&token) else { return Said::Nothing };
        let mut bytes = [0u8; size_of::<Hello>() + 1];
        match rustix::net::recv(&connection.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Said::Gone,
            Ok((count, _)) => match wire::decode(&bytes[..count]) {
                _ if connection.slot.is_some() => Said::Nothing,
                Some(hello) => Said::Hello(hello),
                None => Said::Gone,
            },
            Err(Errno::AGAIN | Errno::INTR) => Said::Nothing,
            Err(_) => Said::Gone,
        }
    }

    /// Answers a process that asks to join; where there is no place, after all that has ended until
    /// now has been handled.
    pub(super) fn welcome(&mut self, token: u64, hello: Hello, turn: Turn) {
        let Some(connection) = self.connections.get(&token) else { return };
        let peer = connection.peer;
        let joined = if hello.version != VERSION {
            Err(Refused { refusal: JoinRefusal::Version, detail: VERSION.into() })
        } else if !self.is_child_of_slot(peer, &hello) {
            Err(Refused::plainly(JoinRefusal::NoParent))
        } else {
            self.members.join(&self.control, &hello, peer.pid)
        };
        if joined.is_err_and(Refused::lacks_a_place) && turn == Turn::First {
            self.late.push((token, hello));
            return;
        }
        if let Ok(slot) = joined {
            self.note_growth();
            if is_forks(&hello) {
                self.pool.inherit(&self.control, hello.parent_slot, slot);
                // From here on the parent goes on: it writes where it shares nothing.
                self.control.members[hello.parent_slot as usize].fork.settle(hello.fork);
            }
        }
        let Some(mut connection) = self.connections.remove(&token) else { return };
        // Before the answer: once it has that, the process may end and be waited for at any time.
        if joined.is_ok() && hello.parent_slot != RESERVATION {
            connection.identity = Some(Identity::of_peer(peer.pid, connection.socket.as_fd()));
        }
        self.answer(&connection.socket, &hello, joined);
        match joined {
            Ok(slot) => {
                connection.slot = Some(slot);
                self.connections.insert(token, connection);
            }
            Err(Refused { refusal: JoinRefusal::Full, .. }) => self.note_refused(peer.pid),
            Err(_) => {}
        }
    }

    /// Sends a process its slot with the descriptors that it needs, or why it has none.
    fn answer(&self, socket: &OwnedFd, hello: &Hello, joined: Result<u32, Refused>) {
        let mut answer = Welcome { magic: MAGIC, flags: 0, slot: u32::MAX, refusal: 0, detail: 0 };
        let mut descriptors: Vec<BorrowedFd<'_>> = Vec::new();
        match joined {
            Ok(slot) if hello.parent_slot == RESERVATION => answer.slot = slot,
            Ok(slot) => {
                answer.slot = slot;
                descriptors.push(self.control.as_fd());
                if hello.parent_slot == NO_PARENT {
                    answer.flags |= WELCOME_POOL;
                    descriptors.push(self.pool.table.as_fd());
                }
                if let Some(device) = &self.resources.uffd_device {
                    answer.flags |= WELCOME_UFFD_DEVICE;
                    descriptors.push(device.as_fd());
                }
                if let Some(swap) = &self.resources.swap_descriptor {
                    answer.flags |= WELCOME_SWAP_FILE;
                    descriptors.push(swap.as_fd());
                }
            }
            Err(Refused { refusal, detail }) => {
                answer.flags = WELCOME_REFUSED;
                answer.refusal = refusal as u32;
                answer.detail = detail;
            }
        }
        // A peer that has died meanwhile cannot be told; its end is the connection's next event.
        let _ = wire::send(socket, &answer, &descriptors);
    }

    fn note_refused(&mut self, pid: u32) {
        if self.refused_full == 0 {
            self.news.push(News::Full { most: self.members.most });
        }
        self.refused_full += 1;
        if self.refused.len() == REFUSED_MAX {
            self.refused.pop_front();
        }
        self.refused.push_back(pid);
    }

    /// Whether the peer may inherit from the member in `slot`: slots are used again, and a child
    /// that was slow to connect must not inherit from a stranger.
    pub(super) fn is_child_of_slot(&self, peer: Peer, hello: &Hello) -> bool {
        if !is_forks(hello) {
            return true;
        }
        let slot = hello.parent_slot;
        let Some(member) = self.members.pid_of(&self.control, slot) else { return false };
        // A parent that died in its fork has left its slot only when its connection's end has been
        // handled, and that comes after this.
        let is_dead = || procfs::stat(member).is_none_or(|stat| stat.is_dead);
        let parent = (self.parent_of)(peer.pid);
        parent == Some(member) || is_dead() || self.is_made_by(parent, slot, member)
    }

    /// Whether a process of this `parent` may be one that the member made for another: for its own
    /// parent (CLONE_PARENT), or by a child in its memory (vfork). The member is in a fork then, and does
    /// not know yet what became of it.
    fn is_made_by(&self, parent: Option<u32>, slot: u32, member: u32) -> bool {
        let Some(parent) = parent else { return false };
        let is_related =
            || (self.parent_of)(member) == Some(parent) || (self.parent_of)(parent) == Some(member);
        self.control.members[slot as usize].fork.child() == Child::UnderWay && is_related()
    }
}

/// Whether a fork's child sent this hello.
pub(super) fn is_forks(hello: &Hello) -> bool {
    !matches!(hello.parent_slot, NO_PARENT | RESERVATION)
}
