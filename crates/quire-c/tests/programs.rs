//! The C programs of `tests/c`, and the example, built against the library by the C compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use engine::store::{PackOptions, pack};

/// The exit status of a program of `tests/c` that cannot get a userfaultfd.
const EXIT_NO_RIGHT: i32 = 77;
/// A program that hangs is a failure, not a wait.
const SECONDS_MAX: &str = "240";

/// Where cargo puts what it builds: two above the test's own binary.
fn target() -> PathBuf {
    let binary = std::env::current_exe().expect("a test has a path");
    binary.ancestors().nth(2).expect("target/profile/deps/test").to_path_buf()
}

/// Builds the library as this test was built, once: cargo builds neither a cdylib nor a staticlib
/// for a test, and one that an earlier build left behind would be tested in its place.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let target = target();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "quire-c"]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        cargo.env("CARGO_TARGET_DIR", target.parent().expect("a profile lies in a target folder"));
        if target.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo").success(), "the library does not build");
        target
    })
}

fn in_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// How a program is linked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Linked {
    Shared,
    Static,
}

fn compile(source: &str, linked: Linked) -> PathBuf {
    let source = in_crate(source);
    let name = source.file_stem().expect("a source has a name").to_str().expect("ASCII");
    let suffix = if linked == Linked::Static { "-static" } else { "" };
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}{suffix}"));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-I"]);
    cc.arg(in_crate("include")).arg(&source).arg("-o").arg(&program);
    match linked {
        Linked::Shared => {
            cc.arg("-L").arg(library()).arg("-lquire");
            cc.arg(format!("-Wl,-rpath,{}", library().display()));
        }
        // What Rust's standard library needs of the system.
        Linked::Static => {
            cc.arg(library().join("libquire.a")).args(["-lgcc_s", "-lm", "-ldl"]);
        }
    }
    assert!(cc.status().expect("a C compiler").success(), "{} does not compile", source.display());
    program
}

/// A folder of the test's own, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for the test");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(program: &Path, arguments: &[&Path]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", SECONDS_MAX]).arg(program).args(arguments);
    command.output().expect("the program can be started")
}

/// Whether a program could be tested at all; where not, that is said loudly.
fn has_right(program: &Path, output: &Output, is_without: bool) -> bool {
    if !is_without {
        return true;
    }
    let why = String::from_utf8_lossy(&output.stderr);
    let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!is_ci, "{} cannot be tested: {why}", program.display());
    eprintln!("NOT TESTED: {}: {why}", program.display());
    false
}

fn check(name: &str, linked: Linked) {
    let program = compile(&format!("tests/c/{name}.c"), linked);
    let folder = Folder::new(&format!("{name}-{}", linked == Linked::Static));
    let output = run(&program, &[&folder.0]);
    if !has_right(&program, &output, output.status.code() == Some(EXIT_NO_RIGHT)) {
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{name}");
}

#[test]
fn every_wrong_call_is_an_error_that_says_what_to_do() {
    check("errors", Linked::Shared);
}

#[test]
fn what_is_written_is_in_the_file_once_it_is_flushed() {
    check("write", Linked::Shared);
}

#[test]
fn what_is_written_to_a_private_copy_never_reaches_the_file() {
    check("private", Linked::Shared);
}

#[test]
fn what_is_written_to_memory_objects_is_there_with_and_without_a_swap_file() {
    check("memory", Linked::Shared);
}

#[test]
fn what_is_pinned_can_be_written_by_the_kernel_and_a_mapping_can_change() {
    check("pin", Linked::Shared);
}

#[test]
fn a_thread_serves_itself() {
    check("inline", Linked::Shared);
}

#[test]
fn threads_share_handles_and_have_errors_of_their_own() {
    check("threads", Linked::Shared);
}

#[test]
fn a_child_has_no_mapping_and_no_use_for_what_it_inherited() {
    check("fork", Linked::Shared);
}

#[test]
fn a_program_can_be_linked_to_the_archive() {
    check("write", Linked::Static);
}

/// The example's sum, by a plain read.
fn sum(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| {
        (sum ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME)
    });
    rest.iter().fold(sum, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(PRIME))
}

#[test]
fn the_example_sums_a_file_of_eight_times_its_memory_packed_or_not() {
    let folder = Folder::new("scan");
    let plain = folder.0.join("data");
    let archive = folder.0.join("data.zst");
    // Neither all alike nor without any pattern, and not of whole pages.
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity((32 << 20) + 8);
    while bytes.len() < (32 << 20) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&(state >> 40).to_le_bytes());
    }
    bytes.extend_from_slice(b"end");
    fs::write(&plain, &bytes).unwrap();
    pack(&plain, &archive, &PackOptions::new(), |_| {}).unwrap();
    let program = compile("../../examples/c/scan.c", Linked::Shared);
    let memory = Path::new("4");
    for path in [&plain, &archive] {
        let output = run(&program, &[path, memory]);
        let said = String::from_utf8_lossy(&output.stderr);
        let is_without = !output.status.success() && said.contains("userfaultfd");
        if !has_right(&program, &output, is_without) {
            return;
        }
        assert!(output.status.success(), "{}: {said}", output.status);
        let lines = String::from_utf8_lossy(&output.stdout);
        let expected = format!("{:016x}  {}", sum(&bytes), path.display());
        assert_eq!(lines.lines().next(), Some(expected.as_str()));
        let held = lines.lines().find_map(|line| line.strip_prefix("held at most ")).unwrap();
        let held: u64 = held.split(' ').next().unwrap().parse().unwrap();
        assert!(held > 0 && held <= 4 << 20, "{lines}");
        assert!(lines.contains("\npgpgin "), "{lines}");
    }
    let output = run(&program, &[&folder.0.join("missing"), memory]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("missing") && said.contains("check the path"), "{said}");
}
