//! The socket by which processes join: what is said on it, and how it is written.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use quire::control::{Hello, MAGIC, NO_PARENT, VERSION, Welcome};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

const BACKLOG: i32 = 128;

/// A socket that processes can join at.
pub(crate) fn listen(name: &str) -> rustix::io::Result<OwnedFd> {
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

/// Whether the peer has closed the connection and nothing is left to read.
pub(crate) fn is_closed(socket: &OwnedFd) -> bool {
    let mut byte = [0u8; 1];
    let peeked = rustix::net::recv(socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
    !matches!(peeked, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
}

/// A `Hello` from its bytes, which are its fields in the machine's own order.
pub(crate) fn decode(bytes: &[u8]) -> Option<Hello> {
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
        parent_slot: if is_ours { word(12)? } else { NO_PARENT },
        held_pages: if is_ours { long(16)? } else { 0 },
        wanted_pages: if is_ours { long(24)? } else { 0 },
    })
}

pub(crate) fn send(
    socket: &OwnedFd,
    welcome: &Welcome,
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&encode(welcome))], &mut ancillary, flags).map(drop)
}

fn encode(welcome: &Welcome) -> [u8; size_of::<Welcome>()] {
    let words = [welcome.magic, welcome.flags, welcome.slot, welcome.refusal];
    let mut bytes = [0; size_of::<Welcome>()];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes[16..].copy_from_slice(&welcome.detail.to_ne_bytes());
    bytes
}

/// A connection to the socket of this name.
pub(crate) fn connect(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Says hello, and waits for the answer; whatever descriptors come with it are closed.
pub(crate) fn ask(socket: &OwnedFd, hello: &Hello) -> rustix::io::Result<Welcome> {
    let words = [hello.magic, hello.version, hello.fork, hello.parent_slot];
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend([hello.held_pages, hello.wanted_pages].into_iter().flat_map(u64::to_ne_bytes));
    rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL)?;
    let mut answer = [0u8; size_of::<Welcome>()];
    let (count, _) = rustix::net::recv(socket, &mut answer, RecvFlags::empty())?;
    if count != answer.len() {
        return Err(if count == 0 { Errno::CONNRESET } else { Errno::PROTO });
    }
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| answer[at + byte]));
    let detail = u64::from(word(16)) | u64::from(word(20)) << 32;
    let welcome =
        Welcome { magic: word(0), flags: word(4), slot: word(8), refusal: word(12), detail };
    if welcome.magic == MAGIC { Ok(welcome) } else { Err(Errno::PROTO) }
}
