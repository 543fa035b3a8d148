//! `quire stat`, `quire vmstat`, `quire trace` and `quire set` as a user meets them, over runs with a
//! stand-in for the preload library: shapes, exit statuses, messages. It counts nothing; what is
//! counted is the real tests' affair.

mod fake;

use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Output, Stdio};

use fake::{Supervisor, eventually, quire, status, stderr, stdout, temporary};
use quire::control::{Control, MAGIC, VERSION};
use rustix::fs::{MemfdFlags, SealFlags};

/// `quire` with these words.
fn ask(words: &[&str]) -> Output {
    quire().args(words).output().unwrap()
}

/// The process id of a run's member, once it has joined.
fn member(supervisor: &Supervisor) -> String {
    let pid = supervisor.program().to_string();
    eventually("the join", || ask(&["vmstat", "-s", &pid]).status.success().then_some(()));
    pid
}

/// Starts `quire` with these words, its output kept.
fn start(words: &[&str]) -> Child {
    let mut command = quire();
    command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_run_is_counted_and_its_status_passed_on() {
    let output =
        ask(&["stat", "-e", "faults,pagefault:*", "-m", "64M", "--", "sh", "-c", "exit 3"]);
    assert_eq!(status(&output), 3);
    let text = stderr(&output);
    assert!(text.starts_with("\n Performance counter stats for 'sh -c exit 3':\n\n"), "{text}");
    let lines: Vec<&str> = text.lines().skip(3).take_while(|line| !line.is_empty()).collect();
    let names: Vec<&str> =
        lines.iter().map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(names[..2], ["faults", "pagefault:spf_vma_changed"], "{text}");
    assert_eq!(names.len(), 6, "{text}");
    assert!(text.ends_with(" seconds time elapsed\n\n"), "{text}");
}

#[test]
fn machines_get_csv_and_json_in_a_file() {
    let file = temporary("stat.csv");
    let path = file.to_str().unwrap();
    let output =
        ask(&["stat", "-x;", "-e", "spf", "-r", "3", "-o", path, "-m", "64M", "--", "echo", "x"]);
    assert_eq!((status(&output), stdout(&output).as_str()), (0, "x\nx\nx\n"));
    assert_eq!(stderr(&output), "");
    let text = fs::read_to_string(&file).unwrap();
    let fields: Vec<&str> = text.trim_end().split(';').collect();
    assert_eq!(fields[..4], ["0", "", "spf", "0.00%"], "{text}");
    assert_eq!(fields.len(), 8, "{text}");
    let output = ask(&["stat", "-j", "-e", "spf", "-m", "64M", "--", "true"]);
    assert!(stderr(&output).starts_with("{\"counter-value\" : \"0.000000\", "), "{output:?}");
}

#[test]
fn intervals_come_while_the_program_runs() {
    let output =
        ask(&["stat", "-I", "20", "-x,", "-e", "faults", "-m", "64M", "--", "sleep", "0.3"]);
    let text = stderr(&output);
    let times: Vec<f64> =
        text.lines().map(|line| line.split(',').next().unwrap().trim().parse().unwrap()).collect();
    // Some may be late on a busy machine.
    assert!(times.len() >= 3, "{text}");
    assert!(times.is_sorted() && times[0] >= 0.02, "{text}");
}

#[test]
fn every_round_finds_the_signals_as_the_first_did() {
    let output =
        ask(&["stat", "-r", "2", "-m", "64M", "--", "grep", "SigBlk", "/proc/self/status"]);
    let text = stdout(&output);
    let masks: Vec<&str> = text.lines().collect();
    assert_eq!(masks.len(), 2, "{text}");
    assert_eq!(masks[0], masks[1]);
}

#[test]
fn unknown_events_are_answered_with_the_known() {
    let output = ask(&["stat", "-e", "faults,nosuch", "-m", "64M", "--", "echo", "started"]);
    assert_eq!((status(&output), stdout(&output).as_str()), (125, ""));
    let text = stderr(&output);
    assert!(text.starts_with("quire: there is no event 'nosuch'; there are:\n"), "{text}");
    assert!(text.contains(" speculative_pgfault"), "{text}");
    let output = ask(&["trace", "-e", "faults", "-m", "64M", "--", "echo", "started"]);
    assert_eq!((status(&output), stdout(&output).as_str()), (125, ""));
}

#[test]
fn a_program_needs_a_budget_and_a_process_none() {
    for command in ["stat", "trace"] {
        let output = ask(&[command, "--", "true"]);
        assert_eq!(status(&output), 125);
        assert!(stderr(&output).contains("--memory <SIZE>"), "{}", stderr(&output));
        let output = ask(&[command, "-m", "64M"]);
        assert_eq!(status(&output), 125);
        assert!(stderr(&output).contains("<PROGRAM>"), "{}", stderr(&output));
        let help = stdout(&ask(&[command, "--help"]));
        assert!(help.contains(&format!("  quire {command} -p 4711")), "{help}");
        assert!(!help.contains("quire run --memory 512M"), "{help}");
    }
}

#[test]
fn a_traced_program_passes_its_status_on() {
    let output = ask(&["trace", "-e", "spf_*", "-m", "64M", "--", "sh", "-c", "echo x; exit 5"]);
    assert_eq!((status(&output), stdout(&output).as_str()), (5, "x\n"));
    assert_eq!(stderr(&output), "", "nothing was traced");
}

#[test]
fn who_cannot_be_attached_to_is_told_why() {
    let own = std::process::id().to_string();
    let commands = [&["stat", "-p"][..], &["trace", "-p"], &["vmstat", "-s"], &["vmstat", "-p"]];
    let refused = |pid: &str, message: &str| {
        for command in commands {
            let output = ask(&[command, &[pid]].concat());
            assert_eq!((status(&output), stderr(&output).as_str()), (125, message), "{command:?}");
        }
    };
    refused(&own, &format!("quire: process {own} is not run by quire; `quire ps` lists what is\n"));
    refused("4194304", "quire: there is no process 4194304\n");
    // And this one holds what another version's supervisor would.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create("quire-control", flags).unwrap();
    let words = [MAGIC, VERSION + 1].map(u32::to_ne_bytes);
    rustix::io::write(&memfd, words.as_flattened()).unwrap();
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
    let message = format!(
        "quire: process {own} is run by another version of quire: its control page has version {}, \
         this quire knows {VERSION}; use the quire that runs it\n",
        VERSION + 1
    );
    refused(&own, &message);
}

#[test]
fn a_process_is_watched_until_a_program_ends() {
    let supervisor = Supervisor::start(&["sleep", "1000"]);
    for pid in [member(&supervisor), supervisor.pid().to_string()] {
        let output = ask(&["stat", "-p", &pid, "--", "sh", "-c", "exit 4"]);
        assert_eq!(status(&output), 4);
        let text = stderr(&output);
        let title =
            format!("\n Performance counter stats for process id '{pid}' in 'sh -c exit 4'");
        assert!(text.starts_with(&title), "{text}");
        assert_eq!(status(&ask(&["trace", "-p", &pid, "--", "sh", "-c", "exit 4"])), 4);
    }
}

#[test]
fn who_watches_ends_with_whom_it_watches_and_on_a_signal() {
    let supervisor = Supervisor::start(&["sleep", "1000"]);
    let pid = member(&supervisor);
    let watching: [&[&str]; 3] =
        [&["stat", "-p", &pid], &["trace", "-p", &pid], &["vmstat", "0.05", "-p", &pid]];
    let interrupted = start(watching[0]);
    // SIGINT is caught once the program is attached to: it has a signalfd then.
    let folder = format!("/proc/{}/fd", interrupted.id());
    eventually("the attachment", || {
        fs::read_dir(&folder).ok()?.flatten().find(|descriptor| {
            fs::read_link(descriptor.path())
                .is_ok_and(|link| link.to_string_lossy().ends_with("[signalfd]"))
        })
    });
    fake::kill("INT", interrupted.id());
    let output = interrupted.wait_with_output().unwrap();
    assert_eq!(status(&output), 0);
    assert!(stderr(&output).contains("seconds time elapsed"), "what was seen is printed");
    let started = watching.map(start);
    eventually("a line", || ask(&["vmstat", "-s", &pid]).status.success().then_some(()));
    fake::kill("KILL", pid.parse().unwrap());
    for child in started {
        let output = child.wait_with_output().unwrap();
        // One that came too late to it says so.
        let is_late = stderr(&output).starts_with("quire: ");
        assert!(status(&output) == 0 || (status(&output) == 125 && is_late), "{output:?}");
    }
}

#[test]
fn vmstat_has_a_header_and_as_many_lines_as_asked_for() {
    let supervisor = Supervisor::start(&["sleep", "1000"]);
    let pid = member(&supervisor);
    let text = stdout(&ask(&["vmstat", "-p", &pid, "0.02", "22"]));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 22 + 4, "a header every 20 lines: {text}");
    assert_eq!((lines[0], lines[1]), (lines[22], lines[23]));
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
    assert_eq!(stdout(&ask(&["vmstat", "-p", &pid])).lines().count(), 3);
    // Other tests have runs as well: the sum has one process at least.
    let text = stdout(&ask(&["vmstat", "-s"]));
    let processes = text.lines().next().unwrap().strip_prefix("processes ").unwrap();
    assert!(processes.parse::<u32>().unwrap() >= 1, "{text}");
    let text = stdout(&ask(&["vmstat", "-s", &supervisor.pid().to_string()]));
    assert!(text.starts_with("processes 1\n"), "{text}");
    assert!(text.contains("\nspeculative_pgfault 0\n"), "{text}");
}

#[test]
fn a_setting_reaches_the_control_page() {
    let words = ["--no-speculative-faults", "--folio-order", "3", "sleep", "1000"];
    let supervisor = Supervisor::start(&words);
    let pid = member(&supervisor);
    let folder = format!("/proc/{}/fd", supervisor.pid());
    let control = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|descriptor| descriptor.path())
        .find(|path| {
            fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("quire-control"))
        })
        .map(|path| fs::File::open(path).unwrap())
        .unwrap();
    let word = |offset: usize| {
        let mut bytes = [0; 4];
        control.read_exact_at(&mut bytes, offset as u64).unwrap();
        i32::from_ne_bytes(bytes)
    };
    let settings =
        || (word(offset_of!(Control, no_speculation)), word(offset_of!(Control, folio_order)));
    assert_eq!(settings(), (1, 3));
    let output = ask(&["set", "-p", &pid, "speculative-faults=on", "folio-order=auto"]);
    assert_eq!((status(&output), stderr(&output).as_str()), (0, ""));
    assert_eq!(settings(), (0, -1));
    let output = ask(&["set", "-p", &pid, "speculative-faults=maybe"]);
    assert_eq!(status(&output), 125);
    assert_eq!(settings(), (0, -1));
}

#[test]
fn a_program_that_cannot_be_started_beside_a_process_is_named() {
    let supervisor = Supervisor::start(&["sleep", "1000"]);
    let pid = member(&supervisor);
    let output = ask(&["stat", "-p", &pid, "--", "/nonexistent"]);
    assert_eq!(status(&output), 125);
    assert!(stderr(&output).starts_with("quire: cannot run /nonexistent: "), "{output:?}");
}
