//! What the rows run: command lines, and the files that they read.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail, ensure};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use super::name_of;
use super::rows::{Program, Row};
use crate::contestant::{Stage, Workload};
use crate::programs;
use crate::tree::Tree;

const COLLECTOR: &str = include_str!("collector.py");
const ARRAYS: &str = include_str!("arrays.py");
const DEMO_GENERATE: &str = include_str!("../../../../demo/generate.py");
const DEMO_LIBRARY: &str = include_str!("../../../../demo/library.py");
/// Collections of the CPython program.
const COLLECTIONS: usize = 3;
/// Jobs of a build at a time.
const BUILD_JOBS: usize = 2;
/// Accesses of a touching program for each of its pages.
const ACCESSES_PER_PAGE: u64 = 1;

/// A program that can be run.
pub(crate) struct Prepared {
    pub workload: Workload,
    /// What starts the program and uses it, beside the memory that the program may have.
    pub driver: Vec<OsString>,
    /// Many processes at a time: what one of them holds says little.
    pub is_tree: bool,
}

impl Prepared {
    fn of(workload: Workload) -> Prepared {
        Prepared { workload, driver: Vec::new(), is_tree: false }
    }
}

/// Makes what the row's program needs; an error where it cannot be run here.
pub(crate) fn prepare(row: &Row, stage: &Stage) -> Result<Prepared> {
    let folder = stage.folder();
    match &row.program {
        Program::Sort { bytes } => sort(folder, *bytes),
        Program::Compile { classes } => compile(folder, *classes),
        Program::Database { parts } => database(folder, *parts),
        Program::Redis { keys, commands } => redis(stage, *keys, *commands),
        Program::Collector { objects } => {
            let python = programs::python()?;
            let sizes = [objects.to_string(), COLLECTIONS.to_string()];
            script(&row.name, &python, COLLECTOR, sizes)
        }
        Program::Arrays { what, count } => {
            let python = programs::python()?;
            let import = Command::new(&python).args(["-c", "import numpy"]).output()?;
            ensure!(import.status.success(), "numpy is missing");
            script(&row.name, &python, ARRAYS, [(*what).to_owned(), count.to_string()])
        }
        Program::Build { is_quick } => {
            needs(["make", "cc"])?;
            let workload = Tree::of_zstd(folder, *is_quick)?.rebuild(BUILD_JOBS);
            Ok(Prepared { is_tree: true, ..Prepared::of(workload) })
        }
        Program::Touch { bytes, data, pattern, access, threads } => {
            let line = format!(
                "touch --size={bytes} --data={} --pattern={} --access={} --threads={threads} \
                 --accesses={}",
                name_of(data),
                name_of(pattern),
                name_of(access),
                bytes / 4096 * ACCESSES_PER_PAGE
            );
            Ok(Prepared::of(programs::built_in(&stage.own, row.name.clone(), &line)))
        }
    }
}

/// An error where one of the programs is not installed.
fn needs<const N: usize>(programs: [&str; N]) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |program: &&str| std::env::split_paths(&path).any(|at| at.join(program).is_file());
    match programs.iter().find(|program| !is_there(program)) {
        Some(missing) => bail!("{missing} is missing"),
        None => Ok(()),
    }
}

fn deterministic(name: &str, argv: Vec<OsString>) -> Workload {
    Workload { name: name.into(), argv, is_deterministic: true }
}

fn script<const N: usize>(
    name: &str,
    python: &Path,
    script: &str,
    arguments: [String; N],
) -> Result<Prepared> {
    let mut argv: Vec<OsString> = vec![python.into(), "-c".into(), script.into()];
    argv.extend(arguments.map(OsString::from));
    Ok(Prepared::of(deterministic(name, argv)))
}

/// GNU sort with all of a text in memory.
fn sort(folder: &Path, bytes: u64) -> Result<Prepared> {
    needs(["sort"])?;
    let text = folder.join(format!("text-{bytes}"));
    write_words(&text, bytes)?;
    Ok(Prepared::of(programs::sort_text(&text, 1)))
}

/// Lines as long as a log's, of words that come again, numbered out of order.
fn write_words(file: &Path, bytes: u64) -> Result<()> {
    const WORDS: usize = 4000;
    const LINE_WORDS: usize = 30;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut word = || {
        let letters = random.random_range(3..=11);
        (0..letters).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect::<String>()
    };
    let words: Vec<String> = (0..WORDS).map(|_| word()).collect();
    let mut out = BufWriter::new(File::create(file)?);
    let mut written = 0;
    while written < bytes {
        let mut line = String::with_capacity(LINE_WORDS * 12);
        for _ in 0..LINE_WORDS {
            line.push_str(&words[random.random_range(0..WORDS)]);
            line.push(' ');
        }
        let _ = writeln!(line, "{:x}", random.random_range(0..1_u64 << 40));
        out.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    out.flush()?;
    Ok(())
}

/// g++ over many templates.
fn compile(folder: &Path, classes: usize) -> Result<Prepared> {
    needs(["g++"])?;
    let source = folder.join(format!("templates-{classes}.cc"));
    fs::write(&source, templates(classes))?;
    let mut argv: Vec<OsString> = ["g++", "-O1", "-g", "-c"].map(OsString::from).into();
    argv.extend([source.into(), "-o".into(), folder.join("templates.o").into()]);
    Ok(Prepared::of(deterministic("g++", argv)))
}

/// C++ that makes the compiler keep a great many types and functions.
fn templates(classes: usize) -> String {
    let mut text: String = ["map", "string", "vector", "algorithm", "functional", "memory"]
        .map(|header| format!("#include <{header}>\n"))
        .concat();
    for i in 0..classes {
        let _ = write!(
            text,
            "struct K{i} {{ int a; double b; bool operator<(const K{i} &o) const {{ \
               return a + {i} < o.a || (a == o.a && b < o.b); }} }};\n\
             template <int N> struct C{i} {{ std::map<K{i}, std::vector<std::string>> m; \
               C{i}<N - 1> next; int sum(const K{i} &k) {{ m[k].push_back(\"x{i}\"); \
               return N + int(m.size()) + next.sum(k); }} }};\n\
             template <> struct C{i}<0> {{ int sum(const K{i} &k) {{ return k.a; }} }};\n\
             int f{i}(int n) {{ std::vector<K{i}> v(n); std::sort(v.begin(), v.end()); C{i}<3> c; \
               std::function<int(int)> g = [&](int x) {{ return x + c.sum(v[0]); }}; \
               return g(n); }}\n"
        );
    }
    text
}

/// The demo's database, and its input.
fn database(folder: &Path, parts: u32) -> Result<Prepared> {
    let python = programs::python()?;
    let import = Command::new(&python).args(["-c", "import sqlite3"]).output()?;
    ensure!(import.status.success(), "this python3 has no sqlite3");
    let [generate, library] = ["generate.py", "library.py"].map(|name| folder.join(name));
    fs::write(&generate, DEMO_GENERATE)?;
    fs::write(&library, DEMO_LIBRARY)?;
    let input = folder.join("library");
    let mut command = Command::new(&python);
    command.arg(&generate).arg(&input).arg(parts.to_string()).stdin(Stdio::null());
    let made = command.output()?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "its input: {}", said.lines().last().unwrap_or(""));
    let argv = vec![python.into(), library.into(), input.into()];
    Ok(Prepared::of(deterministic("the demo's database", argv)))
}

/// A server, and the load that starts and uses it.
fn redis(stage: &Stage, keys: usize, commands: usize) -> Result<Prepared> {
    needs(["redis-server"])?;
    let socket = stage.folder().join("redis.socket");
    let mut server: Vec<OsString> =
        ["redis-server", "--port", "0", "--save", "", "--unixsocket"].map(OsString::from).into();
    server.extend([socket.clone().into(), "--dir".into(), stage.folder().into()]);
    let mut driver: Vec<OsString> = vec![stage.own.clone().into(), "redis-load".into()];
    let option = |name: &str, value: PathBuf| [OsString::from(name), value.into()];
    driver.extend(option("--socket", socket));
    driver.extend(option("--keys", keys.to_string().into()));
    driver.extend(option("--commands", commands.to_string().into()));
    driver.push("--".into());
    let workload = Workload { name: "redis".into(), argv: server, is_deterministic: false };
    Ok(Prepared { workload, driver, is_tree: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = needs(["sh", "no-such-program"]).unwrap_err().to_string();
        assert_eq!(error, "no-such-program is missing");
    }

    #[test]
    fn words_are_lines_and_the_same_every_time() {
        let path = crate::data::unused_path(&std::env::temp_dir());
        let _remove = crate::data::Remove(path.clone());
        let mut found = Vec::new();
        for _ in 0..2 {
            write_words(&path, 10_000).unwrap();
            found.push(fs::read_to_string(&path).unwrap());
        }
        assert_eq!(found[0], found[1]);
        assert!(found[0].lines().all(|line| line.split(' ').count() == 31));
        assert!((10_000..10_500).contains(&found[0].len()));
    }

    #[test]
    fn every_class_has_its_templates() {
        let text = templates(2);
        assert_eq!(text.matches("template <int N> struct C").count(), 2);
        assert!(text.contains("int f1(int n)"));
    }
}
