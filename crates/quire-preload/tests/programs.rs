//! The C and C++ programs of `tests/c`: each is run bare, where it is its own oracle; with the
//! preload library but without a supervisor; and, where the `quire` binary was built and a
//! process can get a userfaultfd, managed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{OnceLock, RwLock};

/// Where cargo puts what it builds: two above the test's own binary.
fn target() -> PathBuf {
    let binary = std::env::current_exe().expect("a test has a path");
    binary.ancestors().nth(2).expect("target/profile/deps/test").to_path_buf()
}

/// Builds the library and the `quire` binary as this test was built: cargo builds a cdylib for no
/// test, and one left over from yesterday would be tested in its place.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let target = target();
        let whole = target.parent().expect("a profile lies in a target folder");
        build(whole, &["-p", "quire-preload", "-p", "quire-cli"])
    })
}

/// The library with failpoints, which lies apart from the one that users get.
fn library_with_failpoints() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = target().join("failpoints");
        build(&folder, &["-p", "quire-preload", "--features", "failpoints"])
    })
}

/// Builds what `what` says into `folder` as this test was built; the library's path.
fn build(folder: &Path, what: &[&str]) -> PathBuf {
    let profile = target();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet"]).args(what);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", folder);
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo").success(), "the library does not build");
    folder.join(profile.file_name().expect("a profile's name")).join("libquire_preload.so")
}

/// Compiles `source` under a name of this call's own and gives it its name when it is whole: another
/// test may be compiling or running the same program.
fn compile(source: &str) -> PathBuf {
    let (compiler, standard) =
        if source.ends_with(".cpp") { ("c++", "-std=c++17") } else { ("cc", "-std=gnu11") };
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.replace('.', "_"));
    let thread = std::thread::current().id();
    let unfinished = program.with_extension(format!("{}.{thread:?}", std::process::id()));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
    let status = Command::new(compiler)
        // Without built-ins the compiler cannot leave calls of malloc out.
        .args([standard, "-O1", "-g", "-pthread", "-fno-builtin", "-w", "-o"])
        .arg(&unfinished)
        .arg(path)
        .arg("-ldl")
        .status()
        .expect("a C compiler");
    assert!(status.success(), "{source} does not compile");
    std::fs::rename(&unfinished, &program).expect("the program was just compiled");
    program
}

fn expect_ok(command: &mut Command) {
    let output = command.stderr(Stdio::inherit()).output().expect("the program can be started");
    assert!(output.status.success(), "{command:?}: {}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{command:?}");
}

/// A program that hangs is a failure, not a wait.
const SECONDS_MAX: &str = "240";

/// `program`, killed where it takes too long.
fn watched(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", SECONDS_MAX]).arg(program);
    command
}

/// The `quire` binary, where there is one and this machine lets it manage memory.
fn quire() -> Option<PathBuf> {
    let binary = target().join("quire");
    let is_allowed = std::fs::File::open("/dev/userfaultfd").is_ok();
    (binary.exists() && is_allowed).then_some(binary)
}

/// A program of as many processes as a run may have, which runs alone.
const CROWD: &str = "fork_full.c";
static CPUS: RwLock<()> = RwLock::new(());

fn check(source: &str, budgets: &[&str]) {
    check_with(source, budgets, &[]);
}

/// The same with more options of `quire run`.
fn check_with(source: &str, budgets: &[&str], options: &[&str]) {
    check_library(source, budgets, options, library());
}

/// The same with this build of the library.
fn check_library(source: &str, budgets: &[&str], options: &[&str], library: &Path) {
    let program = compile(source);
    expect_ok(&mut watched(&program));
    expect_ok(watched(&program).env("LD_PRELOAD", library).env_remove("QUIRE_SOCKET"));
    let Some(quire) = quire() else {
        let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!is_ci, "{source}: cannot run managed: no quire binary, or no /dev/userfaultfd");
        eprintln!("{source}: not run managed: no quire binary, or no /dev/userfaultfd");
        return;
    };
    for budget in budgets {
        let mut command = watched(&quire);
        // Not everything compresses: what does not goes to a swap file.
        let swap = env!("CARGO_TARGET_TMPDIR");
        command.env("QUIRE_PRELOAD", library).env("BUDGET", budget);
        command.args(["run", "--managed-only", "--memory", budget, "--swap-file", swap]);
        command.args(options).arg("--").stdin(Stdio::null());
        command.arg(&program);
        // A process that gets no memory for 10 s gives up, and 256 processes beside it may take the CPUs.
        if source == CROWD {
            let _alone = CPUS.write();
            expect_ok(&mut command);
        } else {
            let _beside = CPUS.read();
            expect_ok(&mut command);
        }
    }
}

#[test]
fn every_entry_point_of_malloc_does_what_glibc_does() {
    check("malloc_family.c", &["1G", "96M"]);
}

#[test]
fn every_entry_point_of_mmap_does_what_the_kernel_does() {
    check("mmap_family.c", &["1G", "32M"]);
}

#[test]
fn every_new_and_delete_of_cxx_works() {
    check("cxx_new.cpp", &["1G", "64M"]);
}

#[test]
fn a_child_of_threads_that_allocate_can_allocate() {
    check("fork_heap.c", &["2G"]);
}

#[test]
fn every_way_to_fork_keeps_memory_what_it_was() {
    check("fork_paths.c", &["1G", "64M"]);
}

#[test]
fn a_handler_may_fork_in_the_middle_of_malloc_while_others_fork() {
    check("fork_in_handler.c", &["1G", "16M"]);
}

#[test]
fn a_child_in_its_parents_memory_may_change_the_layout_on_a_managed_stack() {
    check("vfork_layout.c", &["1G", "16M"]);
    check_with("vfork_layout.c", &["64M"], &["--no-speculative-faults"]);
}

#[test]
fn a_thread_whose_stack_and_block_are_managed_may_change_the_layout_while_they_are_out() {
    check("stack_layout.c", &["1G", "12M"]);
    check_with("stack_layout.c", &["12M"], &["--no-speculative-faults"]);
}

#[test]
fn clone_with_any_flag_keeps_memory_what_it_was_or_is_refused() {
    check("fork_flags.c", &["1G", "16M"]);
}

#[test]
fn a_fork_that_finds_no_place_in_the_run_fails_with_eagain() {
    check(CROWD, &["1G"]);
}

#[test]
fn what_makes_processes_inside_libc_keeps_memory_what_it_was() {
    check("fork_ways.c", &["1G", "24M"]);
}

/// No member needs CAP_SYS_PTRACE to fork: a child has a userfaultfd of its own by the device, which
/// the supervisor opened. Where the supervisor cannot open one either, the run is refused before the program starts.
#[test]
fn without_cap_sys_ptrace_a_fork_is_right_and_without_any_right_the_run_is_refused() {
    let program = compile("fork_shared.c");
    let library = library();
    let Some(quire) = quire() else { return };
    let run = |rights: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(rights).args(["timeout", "--kill-after=10", SECONDS_MAX]).arg(&quire);
        command.args(["run", "--managed-only", "--memory", "16M"]);
        command.args(["--swap-file", env!("CARGO_TARGET_TMPDIR")]);
        command.arg("--").arg(&program).env("QUIRE_PRELOAD", library).stdin(Stdio::null());
        command
    };
    let is_root = rustix::process::geteuid().is_root();
    let setpriv = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status();
    if !is_root || !setpriv.is_ok_and(|status| status.success()) {
        let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!is_ci, "only root's setpriv takes rights away");
        return;
    }
    expect_ok(&mut run(&["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]));
    let is_for_all = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|value| value.trim() == "1");
    if !is_for_all {
        // Another user, that may not open the device either, and must be able to run the binary.
        let nobody = ["--reuid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"];
        let output = run(&nobody).output().expect("setpriv");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
        assert!(said.contains("quire doctor") || said.contains("Permission denied"), "{said}");
    }
}

/// A step of a fork, or of what members do together to the account, the pool, the swap file and the market. Nothing
/// waits for ever, and the tree's accounts are its members' sums.
#[test]
fn a_process_killed_at_any_step_leaves_the_others_right() {
    // The `quire` binary as well.
    library();
    check_library("fork_killed.c", &["1G", "24M"], &[], library_with_failpoints());
}

#[test]
fn what_members_share_since_a_fork_is_evicted_by_all_and_right_in_all() {
    check("fork_shared.c", &["1G", "16M"]);
}

#[test]
fn an_unnoticed_clone_never_reads_zeros() {
    check("fork_unseen.c", &["64M"]);
}

#[test]
fn what_is_beside_a_file_that_was_mapped_unnoticed_stays_right() {
    check("bare_map.c", &["1G", "12M"]);
}

#[test]
fn what_is_unmapped_is_out_of_reach_and_what_comes_there_is_zeros() {
    check("unmapped.c", &["1G", "48M"]);
}
