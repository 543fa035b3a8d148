//! `quire doctor`: what this kernel and this user may do, found out by doing it, and the command
//! that mends what is missing.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};

use clap::Args;
use linux_raw_sys::general as raw;
use rustix::io::Errno;

use crate::cgroup::{Cgroup, Hierarchy};
use crate::container::Container;
use crate::installed;
use crate::rights::{FEATURES_NEEDED, Ways};
use crate::size::{Human, machine_memory_bytes};
use crate::sys::probe;
use crate::sys::uffd::{self, Faults};

/// How bad it is that something is missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// `quire run` does not work without.
    Needed,
    /// Something is slower or left out without.
    Wanted,
}

/// One thing that was looked at.
#[derive(Debug)]
struct Finding {
    name: String,
    is_there: bool,
    need: Need,
    note: String,
    /// The command, or the way, that mends it.
    mend: String,
}

impl Finding {
    fn new(name: &str, need: Need, is_there: bool, note: impl Into<String>) -> Finding {
        Finding { name: name.into(), is_there, need, note: note.into(), mend: String::new() }
    }

    fn mended_by(self, mend: &str) -> Finding {
        Finding { mend: mend.into(), ..self }
    }

    /// The command that mends what is missing, where it is one; what it is for comes before it.
    fn command(&self) -> Option<String> {
        let is_command = self.mend.starts_with("sudo ") || self.mend.starts_with("echo ");
        (!self.is_there && is_command)
            .then(|| format!("# {}: {}\n{}", self.name, self.note, self.mend))
    }

    fn is_fatal(&self) -> bool {
        !self.is_there && self.need == Need::Needed
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match (self.is_there, self.need) {
            (true, _) => "ok",
            (false, Need::Needed) => "MISSING",
            (false, Need::Wanted) => "missing",
        };
        write!(f, "  {mark:<8} {:<22} {}", self.name, self.note)?;
        if !self.is_there {
            write!(f, "\n  {:<8} {:<22} -> {}", "", "", self.mend)?;
        }
        Ok(())
    }
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print the commands that mend what is missing, and nothing else
    #[arg(long)]
    pub fix: bool,
}

/// Prints what was found, or the commands that mend it; returns whether `quire run` will work.
pub(crate) fn doctor(args: &DoctorArgs) -> bool {
    let ways = Ways::find();
    let container = Container::find();
    let sections = [
        ("The right to userfaultfd (one of the first two is needed)", rights(&ways, container)),
        ("What userfaultfd can do", features(&ways)),
        ("The rest of the kernel", kernel()),
        ("This installation", installation()),
    ];
    let all = || sections.iter().flat_map(|(_, findings)| findings);
    let is_well = !all().any(Finding::is_fatal);
    if args.fix {
        let commands = all().filter_map(Finding::command);
        let text: String = commands.map(|command| format!("{command}\n")).collect();
        let _ = io::stdout().write_all(text.as_bytes());
        return is_well;
    }
    let system = rustix::system::uname();
    let mut lines = vec![format!(
        "quire {} on {} {} {}, user {}, {} of memory{}",
        env!("CARGO_PKG_VERSION"),
        system.sysname().to_string_lossy(),
        system.release().to_string_lossy(),
        system.machine().to_string_lossy(),
        rustix::process::geteuid().as_raw(),
        Human(machine_memory_bytes()),
        container.map(|container| format!(", in {container}")).unwrap_or_default(),
    )];
    for (title, findings) in &sections {
        lines.push(format!("\n{title}"));
        lines.extend(findings.iter().map(|finding| finding.to_string().trim_end().to_owned()));
    }
    lines.push(match is_well {
        true => "\nquire run works here.\n".into(),
        false => "\nquire run does not work here: mend what is MISSING.\n".into(),
    });
    // A reader that has seen enough (`| head`) is no failure.
    let _ = io::stdout().write_all(lines.join("\n").as_bytes());
    is_well
}

fn rights(ways: &Ways, container: Option<Container>) -> Vec<Finding> {
    let (device, call) = (&ways.device, &ways.call);
    // One is enough: each is needed only as long as the other is missing.
    let need = |other: &Result<_, _>| if other.is_ok() { Need::Wanted } else { Need::Needed };
    let note =
        |way: &Result<_, Errno>| way.as_ref().err().map(Errno::to_string).unwrap_or_default();
    let device_mend = match (container, device) {
        // There it cannot be mended from within.
        (Some(container @ Container::Podman { is_rootless: true }), _) => container.with_device(),
        (Some(container), Err(Errno::NOENT)) => container.with_device(),
        (None, Err(Errno::NOENT)) => "needs Linux 6.1",
        _ => "sudo quire setup",
    };
    let call_mend = match call {
        Err(Errno::NOSYS) => "needs a kernel with CONFIG_USERFAULTFD",
        _ => "sudo sysctl vm.unprivileged_userfaultfd=1",
    };
    let user_mode = uffd::from_call(Faults::UserModeOnly).map(drop);
    vec![
        Finding::new("/dev/userfaultfd", need(call), device.is_ok(), note(device))
            .mended_by(device_mend),
        Finding::new("system call", need(device), call.is_ok(), note(call)).mended_by(call_mend),
        Finding::new(
            "user mode only",
            Need::Wanted,
            user_mode.is_ok(),
            "not enough for run: misses the faults of system calls",
        )
        .mended_by("needs Linux 5.11, and a sandbox that lets the call through"),
    ]
}

/// userfaultfd's features: name, bit, since which Linux, what for.
const FEATURES: [(&str, u32, &str, &str); 7] = [
    ("MOVE", raw::UFFD_FEATURE_MOVE, "6.8", "pages move instead of being copied"),
    ("POISON", raw::UFFD_FEATURE_POISON, "6.6", "lost pages are SIGBUS, not zeros"),
    ("SIGBUS", raw::UFFD_FEATURE_SIGBUS, "4.14", "a fault in quire's own frames does not hang"),
    ("WP", raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP, "5.7", "pages are written back while mapped"),
    ("WP_ASYNC", raw::UFFD_FEATURE_WP_ASYNC, "6.7", "clean pages are known"),
    ("MINOR_SHMEM", raw::UFFD_FEATURE_MINOR_SHMEM, "5.14", "shared mappings"),
    ("THREAD_ID", raw::UFFD_FEATURE_THREAD_ID, "4.14", "the thread that faults is known"),
];

fn features(ways: &Ways) -> Vec<Finding> {
    let offered = match ways.features() {
        Ok(offered) => offered,
        // The features are those of the kernel, and every user may open one for user mode.
        Err(_) => uffd::from_call(Faults::UserModeOnly)
            .and_then(|uffd| uffd::handshake(&uffd, 0))
            .unwrap_or(0),
    };
    let missing = ways.open().and_then(|uffd| probe::serve_missing_page(&uffd));
    let mut findings = vec![
        Finding::new(
            "MISSING",
            Need::Needed,
            missing.is_ok(),
            missing.map_or_else(|errno| errno.to_string(), |()| "a page was moved in".into()),
        )
        .mended_by("get the right to userfaultfd (above), and Linux 6.8"),
    ];
    findings.extend(FEATURES.iter().map(|&(name, bit, since, what_for)| {
        let bit = u64::from(bit);
        let need = if FEATURES_NEEDED & bit != 0 { Need::Needed } else { Need::Wanted };
        Finding::new(name, need, offered & bit != 0, what_for)
            .mended_by(&format!("needs Linux {since}"))
    }));
    findings
}

fn kernel() -> Vec<Finding> {
    let dispatch = probe::syscall_user_dispatch();
    let ring = probe::io_uring();
    let pidfd = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    );
    let pages = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let pages = pages.unwrap_or_else(|_| "not in this kernel [never]".into());
    let overcommit = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    vec![
        Finding::new("Syscall User Dispatch", Need::Wanted, dispatch.is_ok(), "programs that fork")
            .mended_by("needs Linux 5.11 on x86-64 with CONFIG_GENERIC_ENTRY"),
        Finding::new("pidfd", Need::Wanted, pidfd.is_ok(), "").mended_by("needs Linux 5.3"),
        Finding::new("io_uring", Need::Wanted, ring.is_ok(), "the swap file without waiting")
            .mended_by(
                "sudo sysctl kernel.io_uring_disabled=0 # in a container: its seccomp profile",
            ),
        Finding::new(
            "process_madvise",
            Need::Wanted,
            probe::process_madvise().is_ok(),
            "runs of pages leave in one call, not one by one",
        )
        .mended_by("needs Linux 6.13, and in a container a seccomp profile that lets it through"),
        Finding::new(
            "process_vm_readv",
            Need::Wanted,
            probe::process_vm_readv().is_ok(),
            "pages are read where they lie, not through /proc/self/mem",
        )
        .mended_by("in a container: a seccomp profile that lets it through"),
        Finding::new(
            "huge pages (THP)",
            Need::Wanted,
            !pages.contains("[never]"),
            pages.trim_end(),
        )
        .mended_by("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        Finding::new(
            "overcommit",
            Need::Wanted,
            overcommit.trim() != "2",
            "reserved memory is free",
        )
        .mended_by("sudo sysctl vm.overcommit_memory=0"),
        memory_cgroup(),
        Finding::new(
            "zram",
            Need::Wanted,
            fs::exists("/sys/class/zram-control").unwrap_or(false)
                || fs::exists("/sys/block/zram0").unwrap_or(false),
            "the kernel's own compressed swap, to compare with",
        )
        .mended_by("sudo modprobe zram"),
    ]
}

/// Makes one, as a run would.
fn memory_cgroup() -> Finding {
    let hierarchy = Hierarchy::find();
    let made = hierarchy.and_then(|hierarchy| {
        drop(Cgroup::create(&hierarchy, 1 << 30)?);
        Ok(hierarchy.version)
    });
    let text = match &made {
        Ok(version) => format!("{version}: the kernel checks the budget"),
        Err(error) => format!("{error:#}"),
    };
    Finding::new("memory cgroup", Need::Wanted, made.is_ok(), text).mended_by(
        "run as root, or in a delegated scope: systemd-run --user --scope -p Delegate=yes",
    )
}

fn installation() -> Vec<Finding> {
    let library = installed::find_library();
    let text = match &library {
        Ok(path) => path.display().to_string(),
        Err(error) => format!("{error:#}"),
    };
    vec![
        Finding::new("preload library", Need::Needed, library.is_ok(), text)
            .mended_by("build it with cargo build --release, or set QUIRE_PRELOAD"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_needed_is_fatal() {
        let finding = |need, is_there| Finding::new("x", need, is_there, "y").mended_by("do z");
        assert!(finding(Need::Needed, false).is_fatal());
        assert!(!finding(Need::Needed, true).is_fatal());
        assert!(!finding(Need::Wanted, false).is_fatal());
        assert!(finding(Need::Wanted, false).to_string().ends_with("-> do z"));
        assert!(!finding(Need::Wanted, true).to_string().contains("do z"));
        assert_eq!(finding(Need::Wanted, false).command(), None, "words are no command");
        let mended = finding(Need::Wanted, false).mended_by("sudo z");
        assert_eq!(mended.command().as_deref(), Some("# x: y\nsudo z"));
    }

    #[test]
    fn either_way_to_userfaultfd_is_enough() {
        let descriptor = || std::fs::File::open("/dev/null").unwrap().into();
        let is_fatal =
            |device, call| rights(&Ways { device, call }, None).iter().any(Finding::is_fatal);
        assert!(is_fatal(Err(Errno::ACCESS), Err(Errno::PERM)));
        assert!(!is_fatal(Ok(descriptor()), Err(Errno::PERM)));
        assert!(!is_fatal(Err(Errno::NOENT), Ok(descriptor())));
    }

    #[test]
    fn in_a_container_the_flag_that_is_missing_is_named() {
        let ways = Ways { device: Err(Errno::NOENT), call: Err(Errno::PERM) };
        let [device, ..] = &rights(&ways, Some(Container::Docker))[..] else { panic!() };
        assert!(device.to_string().ends_with("-> docker run --device /dev/userfaultfd ..."));
        let [device, ..] = &rights(&ways, None)[..] else { panic!() };
        assert!(device.to_string().ends_with("-> needs Linux 6.1"));
    }
}
