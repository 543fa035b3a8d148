//! What the tests of the binary have in common: a stand-in for the preload library, which joins the
//! run and manages nothing, and runs that are killed with their test.

#![allow(dead_code, reason = "each test program needs a part of it")]

use std::fs;
use std::mem::offset_of;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use quire::control::{CONTROL_BYTES, Control, MAGIC, Member, VERSION};

/// Compiles the stand-in library, once.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let library = temporary("libfake_preload.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/preload.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&library).arg(source);
        for (name, value) in [
            ("MAGIC", MAGIC as usize),
            ("VERSION", VERSION as usize),
            ("CONTROL_BYTES", CONTROL_BYTES),
            ("MEMBERS", offset_of!(Control, members)),
            ("MEMBER_BYTES", size_of::<Member>()),
            ("OBITUARY", offset_of!(Member, obituary)),
        ] {
            cc.arg(format!("-D{name}={value}u"));
        }
        assert!(cc.status().expect("a C compiler").success());
        library
    })
}

/// A file of this test process's own.
pub fn temporary(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(folder).unwrap();
    folder.join(format!("{}-{name}", std::process::id()))
}

pub fn quire() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| {
        name.to_str().is_some_and(|name| name.starts_with("QUIRE_") || name == "LD_PRELOAD")
    }) {
        command.env_remove(name);
    }
    command.env("QUIRE_PRELOAD", library()).stdin(Stdio::null());
    command
}

pub fn status(output: &Output) -> i32 {
    output.status.code().expect("quire itself is not killed")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Waits for something that is about to happen.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        sleep(Duration::from_millis(5));
    }
}

/// A running supervisor, ended with the test.
pub struct Supervisor(pub Child);

impl Supervisor {
    pub fn start(words: &[&str]) -> Supervisor {
        let mut command = quire();
        command.args(["run", "-m", "64M", "--quiet"]).args(words).stdout(Stdio::null());
        // A group of its own, as a shell would make.
        Supervisor(command.process_group(0).spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn program(&self) -> u32 {
        let pid = self.pid();
        eventually("the program's start", || {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
            let child = children.split_whitespace().next()?.parse().ok()?;
            // Before exec it is still quire.
            (name(child)? != "quire").then_some(child)
        })
    }

    pub fn wait(mut self) -> i32 {
        self.0.wait().unwrap().code().expect("quire itself is not killed")
    }
}

impl Supervisor {
    /// Kills it, and not its program.
    pub fn kill_alone(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Supervisor {
    /// Ends the program, so that the run ends as runs do, and leaves nothing behind.
    fn drop(&mut self) {
        let pid = self.pid();
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            for child in children.unwrap_or_default().split_whitespace() {
                let _ = Command::new("kill").args(["-s", "KILL", "--", child]).status();
            }
            sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn name(pid: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned())
}

pub fn kill(signal: &str, pid: u32) {
    let mut command = Command::new("kill");
    let status = command.args(["-s", signal, "--"]).arg(pid.to_string()).status();
    assert!(status.unwrap().success());
}
