//! The supervisor with fake members: threads of the tests' own process, over the real socket.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;

use quire::control::slabs::{SlabTable, slots_for};
use quire::control::{
    BUDGET_GROWTH_MAX, CONTROL_BYTES, JoinRefusal, MEMBERS_MAX, NO_PARENT, Obituary, RESERVATION,
    WELCOME_POOL, WELCOME_REFUSED, WELCOME_SWAP_FILE, Welcome,
};
use rustix::net::RecvFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, SendFlags};

use clap::Parser as _;

use super::*;
use crate::cli::{Arguments, Command};
use crate::size::Size;

struct FakeMember {
    socket: OwnedFd,
}

struct Answer {
    flags: u32,
    slot: u32,
    refusal: Option<JoinRefusal>,
    detail: u64,
    descriptors: Vec<OwnedFd>,
}

impl FakeMember {
    fn connect(supervisor: &Supervisor) -> FakeMember {
        FakeMember { socket: wire::connect(&supervisor.socket_name).unwrap() }
    }

    fn say(&self, bytes: &[u8]) {
        rustix::net::send(&self.socket, bytes, SendFlags::empty()).unwrap();
    }

    fn hello(&self, parent_slot: u32, held_pages: u64, wanted_pages: u64) {
        self.hello_of_fork(0, parent_slot, held_pages, wanted_pages);
    }

    fn hello_of_fork(&self, fork: u32, parent_slot: u32, held_pages: u64, wanted_pages: u64) {
        let words = [MAGIC, VERSION, fork, parent_slot];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend([held_pages, wanted_pages].into_iter().flat_map(u64::to_ne_bytes));
        self.say(&bytes);
    }

    /// The supervisor's answer; `None` where it hung up or has said nothing.
    fn answer(&self) -> Option<Answer> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0u8; 64];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags).ok()?;
        let descriptors = ancillary
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
                _ => Vec::new(),
            })
            .collect();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        (received.bytes == size_of::<Welcome>() && word(0) == MAGIC).then(|| Answer {
            flags: word(4),
            slot: word(8),
            refusal: JoinRefusal::from_number(word(12)),
            detail: word(16).into(),
            descriptors,
        })
    }
}

/// A test beside this one may be between a fork and its exec, with a copy of our end.
impl Drop for FakeMember {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

fn supervisor() -> Supervisor {
    supervisor_with(None)
}

fn supervisor_with(swap: Option<SwapFile>) -> Supervisor {
    let line = "quire run -m 4M --folio-order=4 --handlers=3 --no-pinned-handlers --no-batch-unmap \
                --no-speculative-faults true";
    let arguments = Arguments::try_parse_from(line.split_whitespace()).unwrap();
    let Command::Run(options) = arguments.command else { unreachable!("`run` was asked for") };
    let resources = Resources {
        budget_pages: 1000,
        member_pages_max: 0,
        can_grow: true,
        swap_descriptor: swap.as_ref().map(|swap| swap.descriptor.try_clone().unwrap()),
        swap,
        uffd_device: None,
    };
    let mut supervisor = Supervisor::new(&options, resources).unwrap();
    // Parent and child are both this process here.
    supervisor.parent_of = |_| Some(std::process::id());
    supervisor
}

/// A round, and one more where a process found no slot in it.
fn serve_all(supervisor: &mut Supervisor) -> Vec<News> {
    supervisor.serve(Duration::ZERO).unwrap();
    if !supervisor.late.is_empty() {
        supervisor.serve(Duration::ZERO).unwrap();
    }
    assert!(supervisor.late.is_empty());
    std::mem::take(&mut supervisor.news)
}

fn serve(supervisor: &mut Supervisor) -> Vec<Death> {
    let death_of = |news| match news {
        News::Death(death, _) => Some(death),
        News::Full { .. }
        | News::LittleLeft { .. }
        | News::Thrashing { .. }
        | News::Unmanaged(_) => None,
    };
    serve_all(supervisor).into_iter().filter_map(death_of).collect()
}

fn join(supervisor: &mut Supervisor, parent_slot: u32, held_pages: u64) -> (FakeMember, u32) {
    let member = FakeMember::connect(supervisor);
    let forks = |slot: u32| supervisor.control.members.get(slot as usize);
    let fork = forks(parent_slot).map_or(0, |parent| parent.fork.begin());
    member.hello_of_fork(fork, parent_slot, held_pages, held_pages);
    serve(supervisor);
    let answer = member.answer().expect("an answer");
    assert_eq!(answer.flags & WELCOME_REFUSED, 0);
    (member, answer.slot)
}

fn charge(supervisor: &Supervisor, slot: u32, pages: u64) {
    supervisor.control.seats[slot as usize].account.put_in(pages as usize);
}

#[test]
fn a_member_gets_the_control_page_and_the_swap_file() {
    let swap = SwapFile::create(&std::env::temp_dir(), Some(Size::Bytes(4 << 20))).unwrap();
    let mut supervisor = supervisor_with(Some(swap));
    let member = FakeMember::connect(&supervisor);
    member.hello(u32::MAX, 0, 0);
    serve(&mut supervisor);
    let answer = member.answer().unwrap();
    assert_eq!(answer.flags, WELCOME_POOL | WELCOME_SWAP_FILE);
    let sizes: Vec<u64> = answer
        .descriptors
        .iter()
        .map(|descriptor| rustix::fs::fstat(descriptor).unwrap().st_size.cast_unsigned())
        .collect();
    let pool_bytes = SlabTable::pool_bytes(slots_for(BUDGET_GROWTH_MAX * 1000 * PAGE_SIZE));
    assert_eq!(sizes, [CONTROL_BYTES as u64, pool_bytes as u64, 4 << 20]);
    for shared in &answer.descriptors[..2] {
        let shrunk = rustix::fs::ftruncate(shared, 0);
        assert_eq!(shrunk, Err(Errno::PERM), "no member takes its memory from the others");
    }
    let control = &supervisor.control;
    assert_eq!(control.members[answer.slot as usize].pid.load(Relaxed), std::process::id());
    assert_eq!(control.magic.load(Relaxed), MAGIC);
    assert_eq!(control.budget_pages.load(Relaxed), 1000);
    assert_eq!(control.folio_order.load(Relaxed), 4);
    assert_eq!(control.no_batch_unmap.load(Relaxed), 1);
    assert_eq!(control.no_speculation.load(Relaxed), 1);
    assert_eq!(control.segments_max.load(Relaxed), 16);
}

#[test]
fn a_closed_connection_gives_back_and_tells_why() {
    let mut supervisor = supervisor();
    let (member, slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, slot, 12);
    let (_other, other_slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, other_slot, 3);
    let obituary = &supervisor.control.members[slot as usize].obituary;
    obituary.store(Obituary::OutOfMemory as u32, Relaxed);
    drop(member);
    let deaths = serve(&mut supervisor);
    assert_eq!(deaths.len(), 1);
    assert_eq!(deaths[0].obituary, Obituary::OutOfMemory);
    assert_eq!(supervisor.control.held(), 3);
    assert_eq!(supervisor.account().processes_left, 1);
}

#[test]
fn a_child_joins_before_its_dead_parent_leaves() {
    let mut supervisor = supervisor();
    let (parent, parent_slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, parent_slot, 10);
    let control = &supervisor.control;
    control.segments_max.store(64, Relaxed);
    control.segment_refs[5].store(1, Relaxed);
    control.segments_used.store(1, Relaxed);
    control.segment_maps[parent_slot as usize][0].store(1 << 5, Relaxed);
    // Both are ready in the same round, the parent's end first.
    let fork = supervisor.control.members[parent_slot as usize].fork.begin();
    drop(parent);
    let child = FakeMember::connect(&supervisor);
    child.hello_of_fork(fork, parent_slot, 4, 4);
    serve(&mut supervisor);
    let answer = child.answer().unwrap();
    assert_eq!(answer.flags & WELCOME_REFUSED, 0);
    let control = &supervisor.control;
    assert_eq!(control.held(), 4, "what was the child's is the child's");
    assert_eq!(control.segment_refs[5].load(Relaxed), 1, "its data is still there");
    drop(child);
    serve(&mut supervisor);
    assert_eq!(supervisor.control.segment_refs[5].load(Relaxed), 0);
    assert_eq!(supervisor.control.segments_used.load(Relaxed), 0);
}

#[test]
fn a_stranger_inherits_nothing() {
    let mut supervisor = supervisor();
    let (_member, slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, slot, 10);
    // This process lives, and is not the parent of the process that asks.
    supervisor.parent_of = |_| Some(1);
    let stranger = FakeMember::connect(&supervisor);
    stranger.hello(slot, 4, 4);
    serve(&mut supervisor);
    assert_eq!(stranger.answer().unwrap().flags, WELCOME_REFUSED);
    assert_eq!(supervisor.control.seats[slot as usize].account.get().held, 10);
}

/// CLONE_PARENT: a member makes a process whose parent is its own.
#[test]
fn a_process_that_a_member_makes_for_its_parent_inherits() {
    let mut supervisor = supervisor();
    let (_member, slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, slot, 10);
    supervisor.parent_of = |_| Some(1);
    let (_made, made_slot) = join(&mut supervisor, slot, 4);
    let held = |slot: u32| supervisor.control.seats[slot as usize].account.get().held;
    assert_eq!((held(slot), held(made_slot)), (6, 4));
}

#[test]
fn after_an_exec_the_old_self_leaves_before_the_new_one_joins() {
    let mut supervisor = supervisor();
    let (old, old_slot) = join(&mut supervisor, u32::MAX, 0);
    charge(&supervisor, old_slot, 10);
    drop(old);
    // The supervisor is told of the new connection only: the old one's end is not waited for.
    let new = FakeMember::connect(&supervisor);
    new.hello(u32::MAX, 0, 0);
    let token = supervisor.accept_all()[0];
    let Said::Hello(hello) = supervisor.listen_to(token) else { panic!("no hello") };
    supervisor.remove_former_self(token);
    assert_eq!(supervisor.members.count, 0);
    assert_eq!(supervisor.control.held(), 0);
    supervisor.welcome(token, hello, Turn::First);
    assert_ne!(new.answer().unwrap().slot, old_slot);
    assert_eq!(supervisor.members.count, 1);
    assert_eq!(supervisor.account().processes, 2);
}

#[test]
fn a_living_member_is_no_former_self() {
    let mut supervisor = supervisor();
    let members = [(); 3].map(|()| join(&mut supervisor, u32::MAX, 0));
    assert_eq!(supervisor.members.count, 3);
    drop(members);
    serve(&mut supervisor);
    assert_eq!(supervisor.members.count, 0);
    assert!(supervisor.connections.is_empty());
}

#[test]
fn nonsense_is_hung_up_on_and_other_versions_are_refused() {
    let mut supervisor = supervisor();
    let nonsense = FakeMember::connect(&supervisor);
    nonsense.say(b"GET / HTTP/1.1");
    let newer = FakeMember::connect(&supervisor);
    newer.say(&[MAGIC, VERSION + 1, 7].map(u32::to_ne_bytes).concat());
    serve(&mut supervisor);
    assert!(nonsense.answer().is_none());
    assert!(is_closed(&nonsense.socket));
    assert_eq!(newer.answer().unwrap().flags, WELCOME_REFUSED);
    assert!(is_closed(&newer.socket));
    assert!(supervisor.connections.is_empty());
    assert_eq!(supervisor.account().processes_refused, 0);
}

#[test]
fn without_a_free_slot_a_process_is_refused() {
    let mut supervisor = supervisor();
    while supervisor.members.join(&supervisor.control, &Hello::OF_PROGRAM, 1).is_ok() {}
    let late = FakeMember::connect(&supervisor);
    late.hello(u32::MAX, 0, 0);
    serve(&mut supervisor);
    let answer = late.answer().unwrap();
    assert_eq!(answer.flags, WELCOME_REFUSED);
    assert_eq!((answer.refusal, answer.detail), (Some(JoinRefusal::Full), MEMBERS_MAX as u64));
    assert_eq!(supervisor.account().processes_refused, 1);
}

#[test]
fn other_users_must_be_descendants() {
    let mut supervisor = supervisor();
    let stranger = Peer { pid: 4_000_000, uid: 12345 };
    supervisor.parent_of = |_| None;
    assert!(!supervisor.may_join(stranger));
    assert!(supervisor.may_join(Peer { uid: 0, ..stranger }));
    assert!(supervisor.may_join(Peer { uid: rustix::process::geteuid().as_raw(), ..stranger }));
    supervisor.parent_of = |pid| match pid {
        4_000_000 => Some(3_999_999),
        _ => Some(std::process::id()),
    };
    assert!(supervisor.may_join(stranger), "a setuid() of the program's child is family");
    supervisor.parent_of = |_| Some(1);
    assert!(!supervisor.may_join(stranger));
    supervisor.cgroup = Some("/nonexistent/quire-1-1".into());
    assert!(!supervisor.may_join(Peer { pid: 1, uid: 12345 }), "init is in no cgroup of ours");
}

#[test]
fn the_first_process_beyond_the_most_is_news_and_the_others_are_counted() {
    let mut supervisor = supervisor();
    supervisor.members = Members::new(1);
    let (_member, slot) = join(&mut supervisor, NO_PARENT, 0);
    let mut told = Vec::new();
    for parent_slot in [NO_PARENT, slot, slot] {
        let late = FakeMember::connect(&supervisor);
        late.hello(parent_slot, 0, 0);
        told.extend(serve_all(&mut supervisor));
        let answer = late.answer().unwrap();
        assert_eq!((answer.refusal, answer.detail), (Some(JoinRefusal::Full), 1));
    }
    assert!(matches!(told[..], [News::Full { most: 1 }]));
    assert_eq!(supervisor.account().processes_refused, 3);
}

#[test]
fn a_run_inside_holds_its_whole_budget_until_its_connection_closes() {
    let mut supervisor = supervisor();
    let (_member, slot) = join(&mut supervisor, NO_PARENT, 0);
    charge(&supervisor, slot, 100);
    let (inner, _) = join(&mut supervisor, RESERVATION, 800);
    assert_eq!(supervisor.control.held(), 900);
    assert_eq!(
        unmanaged::members_and_inner(supervisor.members.present(&supervisor.control)).1.len(),
        1
    );
    // 1000 pages, of which reclaim keeps 32.
    let another = FakeMember::connect(&supervisor);
    another.hello(RESERVATION, 100, 0);
    serve(&mut supervisor);
    let answer = another.answer().unwrap();
    assert_eq!((answer.refusal, answer.detail), (Some(JoinRefusal::NoRoom), 68));
    assert_eq!(supervisor.control.held(), 900, "nothing is kept of a refusal");
    drop(inner);
    serve(&mut supervisor);
    assert_eq!(supervisor.control.held(), 100);
    let account = supervisor.account();
    assert_eq!((account.processes, account.processes_left), (1, 1), "it was none of them");
}

#[test]
fn nobody_inherits_from_a_reservation() {
    let mut supervisor = supervisor();
    let (_inner, slot) = join(&mut supervisor, RESERVATION, 800);
    let child = FakeMember::connect(&supervisor);
    child.hello(slot, 400, 0);
    serve(&mut supervisor);
    assert_eq!(child.answer().unwrap().refusal, Some(JoinRefusal::NoParent));
    let held = supervisor.control.seats[slot as usize].account.get().held;
    assert_eq!(held, 800);
}

#[test]
fn the_supervisor_that_asks_for_a_part_is_a_member_beside_it() {
    let mut supervisor = supervisor();
    let (member, _slot) = join(&mut supervisor, NO_PARENT, 0);
    let (inner, _) = join(&mut supervisor, RESERVATION, 10);
    // The same process executes: what it reserved is not its former self's.
    drop(member);
    let (_again, _) = join(&mut supervisor, NO_PARENT, 0);
    assert_eq!(supervisor.control.held(), 10);
    assert_eq!(supervisor.by_member().members.len(), 2);
    drop(inner);
    serve(&mut supervisor);
    assert_eq!(supervisor.control.held(), 0);
}

#[test]
fn a_member_that_leaves_is_in_the_log_and_one_that_executes_is_there_as_each_program() {
    let mut supervisor = supervisor();
    let (first, slot) = join(&mut supervisor, NO_PARENT, 0);
    supervisor.control.members[slot as usize].held_pages_max.store(77, Relaxed);
    drop(first);
    let (_second, _) = join(&mut supervisor, NO_PARENT, 0);
    let members = supervisor.by_member().members;
    assert_eq!(members.len(), 2);
    assert_eq!((members[0].end, members[0].sizes.held_pages_max), (End::Executed, 77));
    assert_eq!((members[1].end, members[1].pid), (End::None, std::process::id()));
    assert_eq!(members[0].name, crate::procfs::name(std::process::id()).unwrap());
}

/// A process that joins when another has just ended gets its slot, in whatever order the two are
/// heard of.
#[test]
fn a_place_that_has_just_become_free_is_found() {
    let mut supervisor = supervisor();
    supervisor.members = Members::new(1);
    let (member, slot) = join(&mut supervisor, NO_PARENT, 0);
    let next = FakeMember::connect(&supervisor);
    next.hello(NO_PARENT, 0, 0);
    let token = supervisor.accept_all()[0];
    let Said::Hello(hello) = supervisor.listen_to(token) else { panic!("no hello") };
    // After the round's events were read.
    drop(member);
    supervisor.welcome(token, hello, Turn::First);
    assert!(next.answer().is_none(), "not yet");
    serve(&mut supervisor);
    let answer = next.answer().unwrap();
    assert_eq!(answer.refusal, None);
    assert_ne!(answer.slot, slot);
    assert_eq!(supervisor.account().processes_refused, 0);
}
