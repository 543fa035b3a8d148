//! `quire cat` and `quire sum` as a user meets them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use quire::store::{PackOptions, pack};
use xxhash_rust::xxh3::xxh3_64;

/// A command that hangs is a failure, not a wait.
const SECONDS_MAX: &str = "60";

fn quire(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", SECONDS_MAX, env!("CARGO_BIN_EXE_quire")]).args(words);
    for name in ["QUIRE_MEMORY", "QUIRE_FAULT_AROUND", "QUIRE_DIRECT"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).output().expect("quire can be started")
}

/// Whether it could be tested at all; where not, that is said loudly.
fn has_right(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    if !said.contains("cannot open a userfaultfd") {
        return true;
    }
    let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!is_ci, "cannot be tested: {said}");
    eprintln!("NOT TESTED: {said}");
    false
}

/// A folder of the test's own with a file of eight times the memory, and an archive of it.
struct Files {
    folder: PathBuf,
    bytes: Vec<u8>,
}

impl Files {
    fn new(name: &str) -> Files {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut bytes: Vec<u8> = (0..2u64 << 20)
            .flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
            .collect();
        bytes.extend_from_slice(b"end");
        fs::write(folder.join("data"), &bytes).unwrap();
        pack(folder.join("data"), folder.join("data.zst"), &PackOptions::new(), |_| {}).unwrap();
        Files { folder, bytes }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().into()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_file_of_eight_times_the_memory_comes_out_whole_packed_or_not() {
    let files = Files::new("whole");
    for name in ["data", "data.zst"] {
        let path = files.path(name);
        let output = quire(&["cat", "-m", "2M", &path]);
        if !has_right(&output) {
            return;
        }
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(output.stdout == files.bytes, "{name}");
        for around in ["auto", "off", "4"] {
            let output = quire(&["sum", "-m", "2M", "--fault-around", around, "--stats", &path]);
            let line = format!("{:016x}  {path}\n", xxh3_64(&files.bytes));
            assert_eq!(String::from_utf8_lossy(&output.stdout), line);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("of 2 MiB; ") && said.contains(" pages read"), "{said}");
        }
    }
}

#[test]
fn a_file_that_cannot_be_read_is_a_message_and_the_others_are_read() {
    let files = Files::new("missing");
    let (data, missing) = (files.path("data"), files.path("missing"));
    let output = quire(&["sum", "-m", "2M", &missing, &data]);
    if !has_right(&output) {
        return;
    }
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&missing) && said.contains("No such file"), "{said}");
    let line = format!("{:016x}  {data}\n", xxh3_64(&files.bytes));
    assert_eq!(String::from_utf8_lossy(&output.stdout), line);
}

#[test]
fn what_cannot_be_mapped_is_read() {
    let output = quire(&["sum", "-", "/proc/self/mounts"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(lines.starts_with(&format!("{:016x}  -\n", xxh3_64(b""))), "{lines}");
    assert_eq!(lines.lines().count(), 2);
    assert!(!lines.contains(&format!("{:016x}  /proc", xxh3_64(b""))), "{lines}");
}
