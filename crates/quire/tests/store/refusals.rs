//! Stores and archives that are refused or fail, and the messages.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::process::{Command, Output};

use quire::store::{Cause, Direct, FileOptions, FileStore, Operation, Store, StoreError};
use rustix::io::Errno;

use super::{Buffer, Folder, PAGE, cannot_run, pattern, ways};

/// Set for a test that runs in a process of its own, to the folder that it works in.
const CHILD: &str = "QUIRE_TEST_STORE_FOLDER";

#[test]
fn a_file_that_is_opened_for_reading_refuses_every_write_and_stays_what_it_is() {
    let folder = Folder::on_disk();
    let path = folder.file("f", b"content");
    for direct in [Direct::On, Direct::Off] {
        let store = FileStore::open(&path, FileOptions::read_only().direct(direct)).unwrap();
        assert!(store.is_read_only());
        let writes = [0, 4096].map(|offset| store.write(offset, b"other").unwrap_err());
        for error in writes.into_iter().chain([store.set_len(0).unwrap_err()]) {
            assert_eq!((error.cause(), error.errno()), (&Cause::ReadOnly, Errno::ROFS));
            assert!(error.to_string().ends_with("it is read-only; open it for writing"), "{error}");
        }
        store.sync().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"content");
    }
}

#[test]
fn only_files_and_block_devices_are_opened_and_no_one_waits_for_a_pipe() {
    let folder = Folder::on_disk();
    let fifo = folder.path("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for path in [fifo.as_path(), "/dev/null".as_ref(), folder.0.as_path()] {
        let error = FileStore::open(path, FileOptions::read_only()).err().unwrap();
        assert!(matches!(error.cause(), Cause::Unsupported(_)), "{error}");
        assert!(error.to_string().contains("give a regular file or a block device"), "{error}");
    }
    let missing = folder.path("missing");
    let error = FileStore::open(&missing, FileOptions::read_write()).err().unwrap();
    assert_eq!((error.errno(), error.operation()), (Errno::NOENT, Operation::Open));
    FileStore::open(&missing, FileOptions::read_write().create()).unwrap();
    assert_eq!(fs::read(missing).unwrap(), b"");
}

#[test]
fn a_file_that_is_open_already_is_taken_only_if_it_can_be_used() {
    let folder = Folder::on_disk();
    let path = folder.file("f", b"content");
    let read_only = || File::open(&path).unwrap();
    let open = |file, options| FileStore::from_file(file, "f", &options);
    let error = open(read_only(), FileOptions::read_write()).err().unwrap();
    assert_eq!(error.cause(), &Cause::ReadOnly);
    let append = OpenOptions::new().read(true).append(true).open(&path).unwrap();
    let write_only = OpenOptions::new().write(true).open(&path).unwrap();
    for file in [append, write_only] {
        let error = open(file, FileOptions::read_write()).err().unwrap();
        assert_eq!(error.errno(), Errno::OPNOTSUPP);
    }
    // Its own name is of no use: it may be gone.
    let file = read_only();
    fs::remove_file(&path).unwrap();
    let store = open(file, FileOptions::read_only().direct(Direct::On)).unwrap();
    let mut buffer = Buffer::aligned(PAGE);
    store.read(0, buffer.get()).unwrap();
    assert_eq!(&buffer.get()[..8], b"content\0");
}

#[test]
fn an_error_says_what_where_and_what_to_do() {
    let error = StoreError::new(Operation::Write, "/a/b", 8192, 4096, Cause::Os(Errno::NOSPC));
    let text = error.clone().to_string();
    assert!(text.starts_with("cannot write /a/b (4096 bytes at 8192): "), "{text}");
    assert!(text.ends_with("; free some space and write again"), "{text}");
    assert!(error.source().is_some_and(|source| source.is::<Errno>()));
    let unanswered = StoreError::new(Operation::Read, "/a/b", 0, 8, Cause::Unanswered);
    assert_eq!(unanswered.errno(), Errno::IO);
}

/// Runs a test of this file again, behind `shell` in a shell.
fn run_child(folder: &Folder, shell: &str, test: &str) -> Output {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{shell} exec \"$@\"")).arg("sh");
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("refusals::{test}"), "--nocapture"]);
    command.env(CHILD, &folder.0).output().unwrap()
}

fn assert_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
}

/// Writes pages until none fits any more. What was accepted is there.
fn fill(path: &std::path::Path, options: &FileOptions, expected: Errno) {
    let store = FileStore::open(path, options.clone()).unwrap();
    let mut pages = 0;
    let error = loop {
        match store.write(pages * PAGE as u64, Buffer::of(&pattern(pages, PAGE)).get()) {
            Ok(()) => pages += 1,
            Err(error) => break error,
        }
        assert!(pages < 10_000, "it must be full by now");
    };
    assert_eq!((error.errno(), error.operation()), (expected, Operation::Write), "{error}");
    assert!(pages > 0);
    let beyond = store.write((pages + 1000) * PAGE as u64, Buffer::of(&[1; PAGE]).get());
    assert_eq!(beyond.unwrap_err().errno(), expected);
    for page in 0..pages {
        let mut buffer = Buffer::aligned(PAGE);
        store.read(page * PAGE as u64, buffer.get()).unwrap();
        assert!(buffer.get() == pattern(page, PAGE), "{options:?} page {page}");
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn a_limit_of_file_sizes_is_an_error_of_the_write_that_meets_it() {
    if std::env::var_os(CHILD).is_some() {
        for (folder, options) in ways() {
            fill(&folder.path("limited"), &options, Errno::FBIG);
        }
        return;
    }
    let folder = Folder::on_disk();
    let shell = "trap '' XFSZ; ulimit -f 200;";
    let test = "a_limit_of_file_sizes_is_an_error_of_the_write_that_meets_it";
    assert_passed(&run_child(&folder, shell, test));
}

#[test]
fn a_full_file_system_is_an_error_of_the_write_that_meets_it() {
    if let Some(folder) = std::env::var_os(CHILD) {
        let path = std::path::PathBuf::from(folder).join("f");
        for direct in [Direct::Off, Direct::Auto] {
            let options = FileOptions::read_write().create().direct(direct);
            fill(&path, &options, Errno::NOSPC);
        }
        return;
    }
    let folder = Folder::on_disk();
    let unshare = "unshare --map-root-user --mount sh -c";
    let mount = "mount -t tmpfs -o size=256k none \"$QUIRE_TEST_STORE_FOLDER\"";
    let mut can = Command::new("sh");
    can.arg("-c").arg(format!("{unshare} '{mount}'")).env(CHILD, &folder.0);
    if !can.output().is_ok_and(|output| output.status.success()) {
        return cannot_run("no mount namespace may be made here");
    }
    let shell = format!("exec {unshare} '{mount} && exec \"$@\"' sh \"$@\";");
    let test = "a_full_file_system_is_an_error_of_the_write_that_meets_it";
    assert_passed(&run_child(&folder, &shell, test));
}
