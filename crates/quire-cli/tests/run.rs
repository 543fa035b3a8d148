//! `quire run`, `quire pack` and `quire doctor` as a user meets them: exit statuses, messages, signals.
//!
//! The programs run with a stand-in for the preload library, which joins the run and manages
//! nothing, so that what fails here is the supervisor's.

mod fake;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use quire::store::{Store as _, ZstdStore};

use fake::{Supervisor, eventually, kill, library, quire, status, stderr, stdout, temporary};

/// `quire run -m 64M` with these words behind.
fn run(words: &[&str]) -> Output {
    quire().args(["run", "-m", "64M"]).args(words).output().unwrap()
}

fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn the_exit_status_is_the_programs() {
    for (script, expected) in [("exit 0", 0), ("exit 7", 7), ("exit 255", 255)] {
        assert_eq!(status(&run(&["--", "sh", "-c", script])), expected);
    }
    for (signal, expected) in [("KILL", 137), ("TERM", 143), ("SEGV", 139)] {
        let output = run(&["--", "sh", "-c", &format!("kill -s {signal} $$")]);
        assert_eq!(status(&output), expected, "{signal}");
    }
}

#[test]
fn what_is_not_found_is_127_and_what_cannot_be_executed_126() {
    let output = run(&["--", "no-such-program"]);
    assert_eq!(status(&output), 127);
    assert_eq!(stderr(&output), "quire: no-such-program: not found in PATH\n");
    assert_eq!(status(&run(&["--", "/no/such/file"])), 127);
    assert_eq!(status(&run(&["--", "/"])), 126);
    let garbage = temporary("garbage");
    fs::write(&garbage, b"\x7fELF garbage").unwrap();
    fs::set_permissions(&garbage, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(status(&run(&["--", garbage.to_str().unwrap()])), 126, "no script of the shell's");
    fs::set_permissions(&garbage, fs::Permissions::from_mode(0o644)).unwrap();
    let output = run(&["--", garbage.to_str().unwrap()]);
    assert_eq!(status(&output), 126);
    assert!(stderr(&output).contains("permission denied"));
}

#[test]
fn what_quire_cannot_do_is_125_in_one_line() {
    let missing = temporary("no-such-folder");
    let missing = missing.to_str().unwrap();
    let cases: [(&[&str], &str); 9] = [
        (&["-m", "1M", "true"], "a budget of 1 MiB is too small; give 16 MiB at least"),
        (
            &["-m", "7M", "--managed-only", "true"],
            "a budget of 7 MiB is too small; give 8 MiB at least",
        ),
        (&["-m", "900T", "true"], "more than any program can address"),
        (&["-m", "64M", "--swap-file", missing, "true"], "cannot make a swap file in"),
        (&["-m", "64M", "--swap-file", "/proc", "true"], "cannot make a swap file in /proc"),
        (&["-m", "64M", "--stats", "/no/such/file", "true"], "cannot write /no/such/file"),
        (&["-m", "much", "true"], "not a size"),
        (&["true"], "--memory"),
        (&["-m", "64M", "--folio-order", "10", "true"], "from 0 (4 KiB) to 9 (2 MiB)"),
    ];
    for (words, message) in cases {
        let output = quire().arg("run").args(words).output().unwrap();
        assert_eq!(status(&output), 125, "{words:?}");
        assert!(stderr(&output).contains(message), "{words:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
    let output =
        quire().args(["run", "-m", "64M", "true"]).env("QUIRE_PRELOAD", missing).output().unwrap();
    assert_eq!(status(&output), 125);
    assert!(stderr(&output).starts_with("quire: QUIRE_PRELOAD names no file: "));
}

#[test]
fn every_flag_has_an_environment_twin() {
    let stats = temporary("twin.json");
    let output = quire()
        .args(["run", "sh", "-c", "exit 3"])
        .env("QUIRE_MEMORY", "10%")
        .env("QUIRE_QUIET", "true")
        .env("QUIRE_STATS", &stats)
        .env("QUIRE_NO_CGROUP", "1")
        .env("QUIRE_SWAP_FILE", env!("CARGO_TARGET_TMPDIR"))
        .env("QUIRE_SWAP_MAX", "16M")
        .env("QUIRE_FOLIO_ORDER", "4")
        .output()
        .unwrap();
    assert_eq!((status(&output), stderr(&output)), (3, String::new()));
    let json = fs::read_to_string(stats).unwrap();
    assert!(json.contains("\"exit_status\": 3,") && json.contains("\"pgfault\": 0,"), "{json}");
    assert!(json.contains("\"cgroup_bytes_max\": null,"), "{json}");
    assert!(json.contains("\"processes\": 1,"), "{json}");
}

#[test]
fn the_program_gets_its_arguments_and_its_own_descriptors() {
    let output =
        run(&["--", "sh", "-c", "echo $0; printf '%s\\n' \"$@\"", "zero", "a b", "-x", "--"]);
    assert_eq!(stdout(&output), "zero\na b\n-x\n--\n");
    let script = "QUIRE_SOCKET= ls /proc/self/fd; grep -E '^(SigBlk|SigIgn)' /proc/self/status; printenv LD_PRELOAD";
    let run = |command: &mut Command| stdout(&command.args(["sh", "-c", script]).output().unwrap());
    let mut bare = Command::new("env");
    bare.env("LD_PRELOAD", library()).stdin(Stdio::null());
    assert_eq!(run(quire().args(["run", "-m", "64M", "--"])), run(&mut bare));
    let mut preloaded = quire();
    preloaded.env("LD_PRELOAD", "libm.so.6").args(["run", "-m", "64M", "printenv", "LD_PRELOAD"]);
    let expected = format!("{}:libm.so.6\n", library().display());
    assert_eq!(stdout(&preloaded.output().unwrap()), expected);
}

#[test]
fn a_run_ends_with_one_line_unless_quiet() {
    let output = run(&["--no-cgroup", "true"]);
    assert_eq!(stderr(&output).lines().count(), 1);
    assert!(stderr(&output).starts_with("quire: wanted "), "{}", stderr(&output));
    assert_eq!(stderr(&run(&["--quiet", "true"])), "");
}

#[test]
fn an_exec_and_a_child_are_processes_of_their_own() {
    let stats = temporary("processes.json");
    let words = ["--stats", stats.to_str().unwrap(), "--", "sh", "-c", "/bin/true; exec /bin/true"];
    assert_eq!(status(&run(&words)), 0);
    let json = fs::read_to_string(stats).unwrap();
    assert!(json.contains("\"processes\": 3,"), "{json}");
}

#[test]
fn out_of_memory_is_said_and_the_status_stays_the_programs() {
    let output = quire()
        .args(["run", "-m", "64M", "--quiet", "sh", "-c", "sleep 0; exit 4"])
        .envs([("FAKE_OBITUARY", "1"), ("FAKE_VICTIM", "sleep")])
        .output()
        .unwrap();
    assert_eq!(status(&output), 4, "only a child died");
    let message = stderr(&output);
    let line = message.lines().find(|line| line.starts_with("quire: ")).unwrap();
    assert!(line.contains("ran out of memory: the budget of 64 MiB is full"), "{message}");
    assert!(line.contains("add --swap-file DIR, or give --memory "), "{message}");
    let output = quire()
        .args(["run", "-m", "64M", "--quiet", "sleep", "0"])
        .envs([("FAKE_OBITUARY", "1"), ("FAKE_VICTIM", "sleep")])
        .output()
        .unwrap();
    assert_eq!(status(&output), 137);
    assert!(stderr(&output).contains("ran out of memory"));
}

#[test]
fn static_programs_run_unmanaged_only_if_asked() {
    let source = temporary("static.c");
    let program = temporary("static");
    fs::write(&source, "int main(void) { return 5; }\n").unwrap();
    let cc = Command::new("cc").arg("-static").arg("-o").args([&program, &source]).output();
    if !cc.is_ok_and(|output| output.status.success()) {
        eprintln!("no static C library here: not tested");
        return;
    }
    let program = program.to_str().unwrap();
    let output = run(&["--", program]);
    assert_eq!(status(&output), 125);
    assert!(stderr(&output).contains("statically linked"), "{}", stderr(&output));
    assert!(stderr(&output).contains("--allow-unmanaged"));
    let output = run(&["--allow-unmanaged", "--", program]);
    assert_eq!(status(&output), 5);
    assert!(stderr(&output).contains("runs unmanaged"), "{}", stderr(&output));
}

#[test]
fn signals_to_the_supervisor_reach_the_program() {
    let supervisor = Supervisor::start(&["sleep", "60"]);
    supervisor.program();
    kill("TERM", supervisor.pid());
    assert_eq!(supervisor.wait(), 143);
    let ready = temporary("ready");
    let script = "trap 'exit 9' USR1; echo > \"$1\"; while :; do sleep 0.01; done";
    let supervisor = Supervisor::start(&["sh", "-c", script, "sh", ready.to_str().unwrap()]);
    eventually("the trap", || ready.exists().then_some(()));
    kill("USR1", supervisor.pid());
    assert_eq!(supervisor.wait(), 9);
}

#[test]
fn a_stop_is_followed_and_a_continue_passed_on() {
    let supervisor = Supervisor::start(&["sleep", "60"]);
    let program = supervisor.program();
    let is = |pid, letter| move || (state(pid) == Some(letter)).then_some(());
    kill("TSTP", supervisor.pid());
    eventually("the program's stop", is(program, 'T'));
    eventually("the supervisor's stop", is(supervisor.pid(), 'T'));
    kill("CONT", supervisor.pid());
    eventually("the program's awakening", is(program, 'S'));
    eventually("the supervisor's awakening", is(supervisor.pid(), 'S'));
    // A debugger's stop is the program's alone: members must be able to join.
    kill("STOP", program);
    eventually("the program's stop", is(program, 'T'));
    sleep(Duration::from_millis(50));
    assert_ne!(state(supervisor.pid()), Some('T'));
    kill("CONT", program);
    // Not INT, which a shell's background jobs ignore, and what they start.
    kill("TERM", supervisor.pid());
    assert_eq!(supervisor.wait(), 143);
}

#[test]
fn what_outlives_the_program_is_told_of() {
    let file = temporary("left-behind");
    let left = "echo $$ > \"$0\"; exec >&- 2>&-; exec sleep 60";
    let script = "sh -c \"$1\" \"$0\" & until test -s \"$0\"; do sleep 0.01; done; sleep 0.2";
    let output = run(&["--", "sh", "-c", script, file.to_str().unwrap(), left]);
    assert_eq!(status(&output), 0);
    kill("KILL", fs::read_to_string(file).unwrap().trim().parse().unwrap());
    let message = stderr(&output);
    assert!(message.contains("1 process(es) of the run live on"), "{message}");
}

/// The folder of the memory cgroup that process `pid` is in, where that is one of a run.
fn cgroup_of(pid: u32) -> Option<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = cgroups.lines().find(|line| line.contains("/quire-"))?.splitn(3, ':').nth(2)?;
    ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"]
        .map(|mount| Path::new(mount).join(path.trim_start_matches('/')))
        .into_iter()
        .find(|folder| folder.exists())
}

#[test]
fn the_cgroup_goes_with_the_run_and_a_killed_runs_with_the_next() {
    let supervisor = Supervisor::start(&["sleep", "60"]);
    let program = supervisor.program();
    let Some(cgroup) = cgroup_of(program) else {
        eprintln!("no right to make a memory cgroup here: not tested");
        return;
    };
    assert!(cgroup_of(supervisor.pid()).is_none_or(|its| its != cgroup));
    kill("TERM", supervisor.pid());
    assert_eq!(supervisor.wait(), 143);
    assert!(!cgroup.exists());
    let supervisor = Supervisor::start(&["sleep", "60"]);
    let program = supervisor.program();
    let cgroup = cgroup_of(program).expect("a cgroup, as before");
    supervisor.kill_alone();
    eventually("the program's sleep, without its supervisor", || {
        (state(program) == Some('S')).then_some(())
    });
    run(&["true"]);
    assert!(cgroup.exists(), "a process lives there");
    kill("KILL", program);
    eventually("the removal", || {
        run(&["true"]);
        (!cgroup.exists()).then_some(())
    });
}

#[test]
fn the_kernels_own_kill_in_the_cgroup_is_explained() {
    // Unmanaged memory far beyond the allowance: the stand-in manages nothing.
    let hog = "import sys; b = bytearray(400 << 20); b[::4096] = b'x' * len(b[::4096])";
    let output = run(&["--", "python3", "-c", hog]);
    if status(&output) != 137 {
        eprintln!("no memory cgroup or no python3 here: not tested");
        return;
    }
    assert!(stderr(&output).contains("the kernel killed 1 process(es)"), "{}", stderr(&output));
}

#[test]
fn without_the_right_to_userfaultfd_the_doctor_is_named() {
    let setpriv = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command
    };
    let quire = env!("CARGO_BIN_EXE_quire");
    let can_become_nobody = setpriv().args([quire, "--version"]).output();
    let is_forbidden = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|text| text.trim() == "0");
    if !is_forbidden || !can_become_nobody.is_ok_and(|output| output.status.success()) {
        eprintln!("cannot become a user without rights here: not tested");
        return;
    }
    let mut command = setpriv();
    command.args([quire, "run", "-m", "64M", "true"]).env("QUIRE_PRELOAD", library());
    let output = command.output().unwrap();
    assert_eq!(status(&output), 125);
    assert!(stderr(&output).contains("no right to userfaultfd"), "{}", stderr(&output));
    assert!(stderr(&output).contains("quire doctor"));
    let output =
        setpriv().args([quire, "doctor"]).env("QUIRE_PRELOAD", library()).output().unwrap();
    assert_eq!(status(&output), 1);
    assert!(stdout(&output).contains("MISSING  /dev/userfaultfd"), "{}", stdout(&output));
    assert!(stdout(&output).contains("sudo sysctl vm.unprivileged_userfaultfd=1"));
}

#[test]
fn the_doctor_says_whether_a_run_works() {
    let output = quire().arg("doctor").output().unwrap();
    let says_works = stdout(&output).ends_with("quire run works here.\n");
    assert_eq!(status(&output), if says_works { 0 } else { 1 });
    assert_eq!(says_works, status(&run(&["true"])) == 0);
    assert!(stdout(&output).contains("Syscall User Dispatch"));
}

#[test]
fn pack_makes_an_archive_that_maps_like_the_file_and_spares_one_that_is_there() {
    let (input, output) = (temporary("content"), temporary("content.zst"));
    let content = "a line like many others\n".repeat(20_000).into_bytes();
    fs::write(&input, &content).unwrap();
    let _ = fs::remove_file(&output);
    let pack = |words: &[&str]| {
        quire().arg("pack").arg(&input).arg("-o").arg(&output).args(words).output().unwrap()
    };
    let told = pack(&["--frame-size", "64K", "--level", "1"]);
    assert_eq!((status(&told), stdout(&told)), (0, String::new()), "{}", stderr(&told));
    // No progress where there is no terminal.
    let told = stderr(&told);
    assert!(told.starts_with("quire: packed 468.8 KiB into ") && told.ends_with(", 8 frames\n"));
    let store = ZstdStore::open(&output).unwrap();
    let mut bytes = vec![0; content.len()];
    store.read(0, &mut bytes).unwrap();
    assert!(bytes == content && store.len().unwrap() == content.len() as u64);

    let refused = pack(&[]);
    assert_eq!(status(&refused), 125);
    assert!(stderr(&refused).starts_with("quire: pass --force to replace the archive: "));
    let replaced = pack(&["--force", "--quiet"]);
    assert_eq!((status(&replaced), stderr(&replaced)), (0, String::new()));
    assert_eq!(ZstdStore::open(&output).unwrap().frame_count(), 1);
    for (words, why) in [
        (["--frame-size", "5000"], "choose whole pages"),
        (["--frame-size", "50%"], "--frame-size takes a number of bytes"),
        (["--level", "77"], "choose one from"),
    ] {
        let refused = pack(&words);
        assert_eq!(status(&refused), 125);
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
    fs::remove_file(&input).unwrap();
    assert_eq!(status(&pack(&["--force"])), 125);
    assert_eq!(ZstdStore::open(&output).unwrap().frame_count(), 1, "what was there stays");
    fs::remove_file(output).unwrap();
}

#[test]
fn help_and_version_are_no_failures() {
    for words in [
        &["--help"] as &[&str],
        &["--version"],
        &["run", "--help"],
        &["pack", "-h"],
        &["doctor", "-h"],
    ] {
        let output = quire().args(words).output().unwrap();
        assert_eq!((status(&output), stderr(&output)), (0, String::new()), "{words:?}");
    }
    let help = stdout(&quire().args(["run", "--help"]).output().unwrap());
    assert!(help.contains("QUIRE_MEMORY") && help.contains("Examples:"));
    assert_eq!(status(&quire().arg("bogus").output().unwrap()), 125);
}
