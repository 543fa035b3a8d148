//! The socket by which processes join: what is said on it, and how it is written.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use quire::control::{Hello, MAGIC, VERSION, Welcome};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

const BACKLOG: i32 = 128;

/// A socket that processes can join at.
pub(crate) fn listen(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
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
    let words = words_of(bytes);
    match words[..] {
        // Another version's fields mean something else, but it is owed an answer.
        [MAGIC, version, ..] if version != VERSION => Some(Hello { version, ..Hello::OF_PROGRAM }),
        [MAGIC, VERSION, fork, parent_slot, ..] if bytes.len() == size_of::<Hello>() => {
            let (held_pages, wanted_pages) = (long(&words[4..]), long(&words[6..]));
            Some(Hello { fork, parent_slot, held_pages, wanted_pages, ..Hello::OF_PROGRAM })
        }
        _ => None,
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect()
}

/// A number of 64 bits, low word first.
fn long(words: &[u32]) -> u64 {
    u64::from(words[0]) | u64::from(words[1]) << 32
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
    let words = [welcome.magic, welcome.flags, welcome.slot, welcome.refusal];
    let bytes = encode(words, &[welcome.detail]);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags).map(drop)
}

fn encode(words: [u32; 4], longs: &[u64]) -> Vec<u8> {
    let mut bytes = words.map(u32::to_ne_bytes).concat();
    bytes.extend(longs.iter().flat_map(|long| long.to_ne_bytes()));
    bytes
}

pub(crate) fn connect(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Says hello, and waits for the answer; whatever descriptors come with it are closed.
pub(crate) fn ask(socket: &OwnedFd, hello: &Hello) -> rustix::io::Result<Welcome> {
    let words = [hello.magic, hello.version, hello.fork, hello.parent_slot];
    let bytes = encode(words, &[hello.held_pages, hello.wanted_pages]);
    rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL)?;
    let mut answer = [0u8; size_of::<Welcome>()];
    let (count, _) = rustix::net::recv(socket, &mut answer, RecvFlags::empty())?;
    if count != answer.len() {
        return Err(if count == 0 { Errno::CONNRESET } else { Errno::PROTO });
    }
    match words_of(&answer)[..] {
        [MAGIC, flags, slot, refusal, ref detail @ ..] => {
            Ok(Welcome { magic: MAGIC, flags, slot, refusal, detail: long(detail) })
        }
        _ => Err(Errno::PROTO),
    }
}
