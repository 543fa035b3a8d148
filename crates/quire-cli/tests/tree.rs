//! A tree of processes as its user sees it: `quire ps`, processes that are not managed, bounds on
//! processes, runs inside runs, and what bad input gets. With a stand-in for the preload library, which
//! joins the run and manages nothing.

mod fake;

use std::fs;
use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use fake::{Supervisor, eventually, kill, quire, status, stderr, stdout, temporary};

/// `quire` with these words.
fn ask(words: &[&str]) -> Output {
    quire().args(words).output().unwrap()
}

/// `quire run -m 64M --no-cgroup` with these words behind.
fn run(words: &[&str]) -> Output {
    quire().args(["run", "-m", "64M", "--no-cgroup"]).args(words).output().unwrap()
}

/// `quire ps --json` of the run that a process belongs to, once it has joined.
fn ps_json(pid: u32) -> String {
    let pid = pid.to_string();
    eventually("the join", || {
        let output = ask(&["ps", "--json", "-p", &pid]);
        (status(&output) == 0).then(|| stdout(&output))
    })
}

/// The first number behind `"name":`.
fn number(json: &str, name: &str) -> u64 {
    let key = format!("\"{name}\":");
    let at = json.find(&key).unwrap_or_else(|| panic!("no {name} in {json}"));
    let digits =
        json[at + key.len()..].trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("{name} is no number in {json}"))
}

#[test]
fn ps_lists_a_run_and_its_processes() {
    let supervisor = Supervisor::start(&["sleep", "1000"]);
    let pid = supervisor.program();
    let json = ps_json(pid);
    assert_eq!(number(&json, "pid"), u64::from(supervisor.pid()));
    assert_eq!(number(&json, "budget_bytes"), 64 << 20);
    let member = json.split("\"members\":[").nth(1).unwrap();
    assert_eq!(number(member, "pid"), u64::from(pid));
    assert!(member.contains("\"name\":\"sleep\",\"state\":\"sleeping\""), "{json}");
    assert!(json.contains("\"unmanaged\":[]"), "{json}");
    kill("STOP", pid);
    let stopped = || ps_json(pid).contains("\"state\":\"stopped\"").then_some(());
    eventually("the stop", stopped);
    kill("CONT", pid);
    // By the supervisor's own number, and among all.
    let text = stdout(&ask(&["ps", "-p", &supervisor.pid().to_string()]));
    assert!(text.starts_with(&format!("{} ", supervisor.pid())), "{text}");
    assert!(text.contains("budget 64 MiB, held "), "{text}");
    assert!(text.lines().any(|line| line.contains(&format!("{pid} sleep"))), "{text}");
    let all = ask(&["ps"]);
    assert_eq!(status(&all), 0);
    assert!(stdout(&all).contains(&text.lines().next().unwrap().to_owned()));
    let none = ask(&["ps", "-p", &std::process::id().to_string()]);
    assert_eq!(status(&none), 125);
    assert!(stderr(&none).contains("is not run by quire"));
}

/// A run whose stderr is read, of a script that is told to end by a file.
struct Watched {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    end: std::path::PathBuf,
}

impl Watched {
    /// `$END` names the file; `$WAIT` is a program that waits for it.
    fn start(name: &str, options: &[&str], script: &str) -> Watched {
        let end = temporary(name);
        let _ = fs::remove_file(&end);
        let mut command = quire();
        command.args(["run", "-m", "64M", "--no-cgroup"]).args(options);
        command.args(["--", "sh", "-c", script]).env("END", &end);
        command.env("WAIT", "until test -e \"$END\"; do sleep 0.05; done");
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Watched { child, lines, end }
    }

    /// The next line with this in it.
    fn line(&mut self, part: &str) -> String {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        lines.find(|line| line.contains(part)).unwrap_or_else(|| panic!("no line with {part}"))
    }

    /// Lets the script end; what was said from then on.
    fn finish(mut self) -> Vec<String> {
        fs::write(&self.end, "").unwrap();
        let lines = self.lines.by_ref().map(Result::unwrap).collect();
        assert!(self.child.wait().unwrap().success());
        fs::remove_file(&self.end).unwrap();
        lines
    }
}

#[test]
fn a_process_whose_environment_was_cleared_is_named_once_and_its_memory_told() {
    let stats = temporary("cleared.json");
    let options = ["--stats", stats.to_str().unwrap()];
    let script = "env -i END=\"$END\" sh -c \"$WAIT\" & wait";
    let mut watched = Watched::start("cleared", &options, script);
    let line = watched.line("runs unmanaged");
    assert!(line.contains("(sh) runs unmanaged: LD_PRELOAD is missing"), "{line}");
    let json = ps_json(watched.child.id());
    let unmanaged = json.split("\"unmanaged\":[").nth(1).unwrap();
    assert!(unmanaged.contains("\"name\":\"sh\""), "{json}");
    assert!(number(unmanaged, "resident_bytes") > 0, "{json}");
    let text = stdout(&ask(&["ps", "-p", &watched.child.id().to_string()]));
    assert!(text.contains("unmanaged"), "{text}");
    let pid = number(unmanaged, "pid");
    let said = watched.finish();
    let again = format!("process {pid} ");
    assert!(!said.iter().any(|line| line.contains(&again)), "{said:?}");
    let summary = "process(es) ran unmanaged, with ";
    assert!(said.iter().any(|line| line.contains(summary)), "{said:?}");
    let json = fs::read_to_string(stats).unwrap();
    assert!(number(&json, "unmanaged_processes") >= 1, "{json}");
    assert!(number(&json, "unmanaged_bytes_max") > 0, "{json}");
    assert!(json.contains(&format!("\"pid\":{pid},\"name\":\"sh\",\"why\":")), "{json}");
}

#[test]
fn a_static_program_that_the_program_starts_is_named_as_one() {
    let [source, program] = [temporary("waits.c"), temporary("waits")];
    let text = "#include <stdlib.h>\n#include <unistd.h>\n\
                int main(void) { while (access(getenv(\"END\"), F_OK)) usleep(20000); return 0; }\n";
    fs::write(&source, text).unwrap();
    let cc = Command::new("cc").arg("-static").arg("-o").args([&program, &source]).output();
    if !cc.is_ok_and(|output| output.status.success()) {
        eprintln!("no static C library here: not tested");
        return;
    }
    let script = format!("{} & wait", program.display());
    let mut watched = Watched::start("static-end", &[], &script);
    let line = watched.line("runs unmanaged");
    assert!(line.contains(&format!("{} is statically linked", program.display())), "{line}");
    watched.finish();
}

#[test]
fn a_program_beyond_the_most_runs_unmanaged_and_is_told_of() {
    let words = ["--members-max", "1", "--", "sh", "-c", "/bin/true; /bin/true; exit 3"];
    let output = run(&words);
    assert_eq!(status(&output), 3);
    let text = stderr(&output);
    let line =
        "quire: the run has 1 processes, as many as --members-max allows: no other can join\n";
    assert_eq!(text.matches(line).count(), 1, "{text}");
    assert!(
        text.contains("2 process(es) could not join the run, which may have 1 at a time"),
        "{text}"
    );
    for words in [["--members-max", "0"], ["--members-max", "257"], ["--memory-per-process", "1M"]]
    {
        let output = run(&[&words[..], &["true"]].concat());
        assert_eq!(status(&output), 125, "{words:?}");
    }
}

#[test]
fn each_process_has_a_line_in_the_counters_with_its_end() {
    let stats = temporary("ends.json");
    let script = "sh -c 'exit 3'; sh -c 'kill -s KILL $$'; exec sleep 0";
    let output = run(&["--stats", stats.to_str().unwrap(), "--", "sh", "-c", script]);
    assert_eq!(status(&output), 0);
    assert!(stderr(&output).contains("quire: 4 processes; most held: "), "{}", stderr(&output));
    let json = fs::read_to_string(stats).unwrap();
    assert_eq!(json.matches("\"end\":").count(), 4, "{json}");
    assert!(json.contains("\"name\":\"sh\",\"end\":\"executed\",\"end_number\":null"), "{json}");
    if json.contains("\"end\":\"unknown\"") {
        eprintln!("this kernel does not keep exit statuses: not tested");
        return;
    }
    assert!(json.contains("\"name\":\"sh\",\"end\":\"exited\",\"end_number\":3"), "{json}");
    assert!(json.contains("\"name\":\"sh\",\"end\":\"killed\",\"end_number\":9"), "{json}");
    assert!(json.contains("\"name\":\"sleep\",\"end\":\"exited\",\"end_number\":0"), "{json}");
}

#[test]
fn a_run_inside_a_run_takes_its_budget_out_of_the_outer_one() {
    let inner = env!("CARGO_BIN_EXE_quire");
    let words = ["--", inner, "run", "-m", "32M", "--no-cgroup", "--", inner, "ps", "--json"];
    let output = run(&words);
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let json = stdout(&output);
    let reserved = json.split('{').find(|row| row.contains("\"state\":\"reserved\"")).unwrap();
    assert_eq!(number(reserved, "held_bytes"), 32 << 20, "{json}");
    assert!(json.contains("\"budget_bytes\":33554432"), "the inner run is listed too: {json}");
    // Its processes are its own affair. (Other tests have runs of their own meanwhile.)
    let both = json.split("\"command\":").filter(|run| run.contains(" run -m 32M "));
    for run in both {
        assert!(!run.contains("\"why\":"), "{json}");
    }
}

#[test]
fn a_run_inside_that_does_not_fit_is_refused_and_what_it_had_comes_back() {
    let inner = env!("CARGO_BIN_EXE_quire");
    let words =
        ["--managed-only", "--", inner, "run", "-m", "64M", "--no-cgroup", "echo", "started"];
    let refused = run(&words);
    assert_eq!((status(&refused), stdout(&refused).as_str()), (125, ""));
    let text = stderr(&refused);
    assert!(
        text.contains("this run is inside another one, which has 63 MiB of its budget"),
        "{text}"
    );
    assert!(text.contains("64 MiB do not fit; lower --memory"), "{text}");
    // Once after its end, once after it was killed, with a program that lives on.
    let script = "set -e; r='run -m 48M --no-cgroup -q --'; \"$0\" $r true; \"$0\" $r true
                  \"$0\" $r sh -c 'kill -s KILL $PPID; sleep 0.1' || test $? = 137
                  \"$0\" $r echo right";
    let output = run(&["--", "sh", "-c", script, inner]);
    assert_eq!((status(&output), stdout(&output).as_str()), (0, "right\n"), "{}", stderr(&output));
}

#[test]
fn a_program_that_executes_itself_a_thousand_times_leaves_nothing() {
    let script = "n=$1; test \"$n\" -gt 0 && exec sh \"$0\" $((n - 1)); exec sleep 1000";
    let file = temporary("itself.sh");
    fs::write(&file, script).unwrap();
    let supervisor = Supervisor::start(&["sh", file.to_str().unwrap(), "1000"]);
    let pid = supervisor.program();
    eventually("the last program", || (fake::name(pid)? == "sleep").then_some(()));
    let json = eventually("its join", || {
        let json = ps_json(pid);
        json.contains("\"name\":\"sleep\"").then_some(json)
    });
    assert_eq!(json.matches("\"state\":").count(), 1, "{json}");
    assert_eq!((number(&json, "held_bytes"), number(&json, "wanted_bytes")), (0, 0), "{json}");
    let descriptors = fs::read_dir(format!("/proc/{}/fd", supervisor.pid())).unwrap().count();
    assert!(descriptors < 30, "{descriptors} descriptors");
    fs::remove_file(file).unwrap();
}

#[test]
fn ps_of_nothing_is_nothing() {
    // Other tests have runs: a process namespace of its own has none.
    let quire = env!("CARGO_BIN_EXE_quire");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--mount", quire, "ps", "--json"]);
    match command.output() {
        Ok(output) if output.status.success() => assert_eq!(stdout(&output), "[]\n"),
        _ => eprintln!("no right to a process namespace here: not tested"),
    }
}
