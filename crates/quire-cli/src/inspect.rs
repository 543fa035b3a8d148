//! Looks at the program before it starts: is it there, can it be executed, can it be managed.
//!
//! A preload library reaches a program through glibc's dynamic loader, and takes the calls that it
//! makes of the C library. What has no such loader (static programs, other architectures), what
//! makes its calls without a C library (Go), what brings a malloc that must not be replaced
//! (AddressSanitizer), and what the loader protects from preloading (setuid, file capabilities)
//! cannot be managed. Scripts are judged by their interpreter.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use elf::ElfStream;
use elf::abi;
use elf::endian::AnyEndian;
use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;

type Elf = ElfStream<AnyEndian, File>;

/// Interpreters of interpreters that the kernel follows.
const SCRIPT_DEPTH_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const SCRIPT_LINE_BYTES: usize = 256;

/// Why a program does not start.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No such file: exit status 127.
    NotFound(String),
    /// A file that cannot be executed: exit status 126.
    NotExecutable(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotFound(message) | Refusal::NotExecutable(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Refusal {}

/// A program that can be executed.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub path: PathBuf,
    /// Why it cannot be managed, where it cannot.
    pub unmanaged: Option<Unmanageable>,
}

/// A file that cannot be managed.
#[derive(Debug)]
pub(crate) struct Unmanageable {
    /// The file: the program, or its interpreter.
    pub file: PathBuf,
    pub reason: Reason,
}

/// What is in the way of managing a program, and what to do about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reason(&'static str, &'static str);

const STATIC: Reason =
    Reason("is statically linked, so no library can be loaded ahead of it", "link it dynamically");
const GO: Reason = Reason(
    "is a Go program, which takes its memory without the C library",
    "limit it with GOMEMLIMIT",
);
const OTHER_ARCHITECTURE: Reason = Reason("is not a 64-bit x86 program", "build it for x86-64");
const ADDRESS_SANITIZER: Reason = Reason(
    "is built with AddressSanitizer, which brings a malloc of its own",
    "build it without -fsanitize=address",
);
const OTHER_LIBC: Reason =
    Reason("is not linked against glibc, which the preload library needs", "use a build for glibc");
const PRIVILEGED: Reason = Reason(
    "is setuid, setgid or has file capabilities, so the loader ignores LD_PRELOAD",
    "run it as the user it would become",
);
const PROTECTED: Reason = Reason(
    "may be executed but not read, so quire cannot tell how it is linked",
    "make it readable",
);

impl Unmanageable {
    pub(crate) fn why(&self) -> String {
        format!("{} {}", self.file.display(), self.reason.0)
    }
}

impl fmt::Display for Unmanageable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (why, what_to_do) = (self.why(), self.reason.1);
        write!(f, "{why}; {what_to_do}, or run it unmanaged with --allow-unmanaged")
    }
}

/// Finds `program` as a shell would (through `path` where it has no slash) and judges it.
pub(crate) fn inspect(
    program: &OsStr,
    arguments: &[OsString],
    path: &OsStr,
) -> Result<Inspected, Refusal> {
    let file = resolve(program, path)?;
    let unmanaged = judge(&file, arguments, path, SCRIPT_DEPTH_MAX)?;
    Ok(Inspected { path: file, unmanaged })
}

/// What is in the way of managing the program that process `pid` executes, as far as its file tells.
/// An error where this user may not look at it.
pub(crate) fn inspect_running(pid: u32) -> std::io::Result<Option<Unmanageable>> {
    let link = format!("/proc/{pid}/exe");
    let file = std::fs::read_link(&link)?;
    if is_privileged(&file) {
        return Ok(Some(Unmanageable { file, reason: PRIVILEGED }));
    }
    // By the link: the file may be another one by now, or in another mount namespace.
    let elf = Elf::open_stream(File::open(&link)?).ok();
    let reason = elf.and_then(|elf| reason_against(&file, elf));
    Ok(reason.map(|reason| Unmanageable { file, reason }))
}

fn resolve(program: &OsStr, path: &OsStr) -> Result<PathBuf, Refusal> {
    let shown = program.display();
    if program.is_empty() {
        return Err(Refusal::NotFound("the program's name is empty".into()));
    }
    if program.as_bytes().contains(&b'/') {
        let file = PathBuf::from(program);
        return check_executable(&file).map(|()| file);
    }
    let mut refusal = None;
    for folder in std::env::split_paths(path) {
        // An empty part of PATH is the current directory.
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        let file = folder.join(program);
        match check_executable(&file) {
            Ok(()) => return Ok(file),
            Err(Refusal::NotFound(_)) => {}
            Err(not_executable) => refusal = refusal.or(Some(not_executable)),
        }
    }
    Err(refusal.unwrap_or_else(|| Refusal::NotFound(format!("{shown}: not found in PATH"))))
}

fn check_executable(file: &Path) -> Result<(), Refusal> {
    let shown = file.display();
    let refused = |why: &dyn fmt::Display| Refusal::NotExecutable(format!("{shown}: {why}"));
    let metadata = file.metadata().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            Refusal::NotFound(format!("{shown}: no such file"))
        }
        _ => refused(&error),
    })?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(refused(&"is a directory"));
    }
    if !kind.is_file() {
        return Err(refused(&"is not a file"));
    }
    match rustix::fs::accessat(CWD, file, Access::EXEC_OK, AtFlags::EACCESS) {
        Ok(()) => Ok(()),
        Err(Errno::ACCESS) => Err(refused(&"permission denied (try chmod +x)")),
        Err(errno) => Err(refused(&errno)),
    }
}

/// Whether `file` can be managed; follows scripts to their interpreters.
fn judge(
    file: &Path,
    arguments: &[OsString],
    path: &OsStr,
    depth: usize,
) -> Result<Option<Unmanageable>, Refusal> {
    let because = |reason| Unmanageable { file: file.into(), reason };
    if is_privileged(file) {
        return Ok(Some(because(PRIVILEGED)));
    }
    let Ok(mut opened) = File::open(file) else { return Ok(Some(because(PROTECTED))) };
    let mut head = Vec::new();
    // What cannot be read cannot be executed either; exec will say so.
    let _ = opened.by_ref().take(SCRIPT_LINE_BYTES as u64).read_to_end(&mut head);
    if head.starts_with(b"\x7fELF") {
        return Ok(judge_elf(file, opened)?.map(because));
    }
    if depth == 0 {
        return Err(Refusal::NotExecutable(format!(
            "{}: its interpreter is a script, and so on, further than the kernel follows",
            file.display()
        )));
    }
    let Some((interpreter, argument)) = script_interpreter(&head) else {
        // execvp hands a file of no known format to the shell.
        return judge(Path::new("/bin/sh"), &[], path, depth - 1);
    };
    check_executable(&interpreter).map_err(|refusal| {
        Refusal::NotExecutable(format!("{}: bad interpreter: {refusal}", file.display()))
    })?;
    // `#!/usr/bin/env python3`: env is only the way to the interpreter.
    if interpreter.file_name() == Some(OsStr::new("env"))
        && let Some(program) = program_of_env(argument.iter().chain(arguments))
        && let Ok(found) = resolve(&program, path)
    {
        return judge(&found, &[], path, depth - 1);
    }
    judge(&interpreter, arguments, path, depth - 1)
}

/// What `#!` names, with its one argument.
fn script_interpreter(head: &[u8]) -> Option<(PathBuf, Option<OsString>)> {
    let line = head.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let line = line.trim_ascii();
    let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(end);
    if interpreter.is_empty() {
        return None;
    }
    let argument = argument.trim_ascii();
    let argument = (!argument.is_empty()).then(|| OsString::from_vec(argument.to_vec()));
    Some((PathBuf::from(OsStr::from_bytes(interpreter)), argument))
}

/// The program that `env` is going to execute.
fn program_of_env<'a>(words: impl Iterator<Item = &'a OsString>) -> Option<OsString> {
    words
        // `#!/usr/bin/env -S python3 -u` is one argument.
        .flat_map(|word| word.as_bytes().split(|&byte| byte == b' '))
        .find(|word| !word.is_empty() && !word.starts_with(b"-") && !word.contains(&b'='))
        .map(|word| OsString::from_vec(word.to_vec()))
}

/// Whether executing `file` would change rights, so that the loader ignores LD_PRELOAD.
fn is_privileged(file: &Path) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    if let Ok(filesystem) = rustix::fs::statvfs(file)
        && filesystem.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID)
    {
        return false;
    }
    let user = rustix::process::geteuid();
    let group = rustix::process::getegid();
    let mode = metadata.mode();
    let is_setuid = mode & 0o4000 != 0 && metadata.uid() != user.as_raw();
    // setgid without the group's x bit meant mandatory locking once, and changes nothing.
    let is_setgid = mode & 0o2010 == 0o2010 && metadata.gid() != group.as_raw();
    // Capabilities add nothing to a real root.
    let has_capabilities = !rustix::process::getuid().is_root()
        && rustix::fs::getxattr(file, "security.capability", &mut [0u8; 64]).is_ok();
    is_setuid || is_setgid || has_capabilities
}

fn judge_elf(file: &Path, opened: File) -> Result<Option<Reason>, Refusal> {
    // exec would refuse these too, but then execvp would have the shell read them as a script.
    let refusal = |what| Refusal::NotExecutable(format!("{}: {what}", file.display()));
    let elf = Elf::open_stream(opened).map_err(|_| refusal("a damaged program"))?;
    if !matches!(elf.ehdr.e_type, abi::ET_EXEC | abi::ET_DYN) {
        return Err(refusal("an object file or a core file, and no program"));
    }
    Ok(reason_against(file, elf))
}

fn reason_against(file: &Path, mut elf: Elf) -> Option<Reason> {
    if elf.ehdr.class != elf::file::Class::ELF64 || elf.ehdr.e_machine != abi::EM_X86_64 {
        return Some(OTHER_ARCHITECTURE);
    }
    if is_go(&mut elf) {
        return Some(GO);
    }
    let interpreter = elf.segments().iter().find(|segment| segment.p_type == abi::PT_INTERP);
    let Some(interpreter) = interpreter.copied() else {
        // The loader itself, called by hand with a program to load, does preload.
        let name = file.file_name().unwrap_or_default().as_bytes();
        return (!name.starts_with(b"ld-linux")).then_some(STATIC);
    };
    if let Ok(name) = elf.segment_data(&interpreter)
        && !name.windows(8).any(|part| part == b"ld-linux")
    {
        return Some(OTHER_LIBC);
    }
    uses_asan(&mut elf).then_some(ADDRESS_SANITIZER)
}

fn is_go(elf: &mut Elf) -> bool {
    let has = |section| matches!(elf.section_header_by_name(section), Ok(Some(_)));
    if [".go.buildinfo", ".note.go.buildid"].into_iter().any(has) {
        return true;
    }
    // The build id's note outlives `strip --strip-section-headers`.
    let notes: Vec<_> =
        elf.segments().iter().filter(|segment| segment.p_type == abi::PT_NOTE).copied().collect();
    notes.iter().any(|segment| {
        elf.segment_data(segment).is_ok_and(|data| data.get(12..16) == Some(b"Go\0\0"))
    })
}

fn uses_asan(elf: &mut Elf) -> bool {
    let Ok(Some((symbols, names))) = elf.dynamic_symbol_table() else { return false };
    symbols.iter().any(|symbol| matches!(names.get(symbol.st_name as usize), Ok("__asan_init")))
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
