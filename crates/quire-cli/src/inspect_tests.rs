use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use super::*;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let name = format!("quire-inspect-{:016x}", crate::supervisor::random());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// A program that says nothing, if there is a C compiler.
    fn compiled(&self, name: &str, options: &[&str]) -> Option<PathBuf> {
        let source = self.file("empty.c", b"int main(void) { return 0; }\n", 0o644);
        let program = self.0.join(name);
        let mut cc = Command::new("cc");
        let status = cc.args(options).arg("-o").arg(&program).arg(source).output().ok()?.status;
        status.success().then_some(program)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn inspect_file(file: &Path) -> Result<Inspected, Refusal> {
    inspect(file.as_os_str(), &[], OsStr::new("/usr/bin:/bin"))
}

fn reason(file: &Path) -> Option<Reason> {
    inspect_file(file).unwrap().unmanaged.map(|unmanaged| unmanaged.reason)
}

#[test]
fn a_dynamic_program_is_found_in_path_and_can_be_managed() {
    let path = OsStr::new("/no/such/folder:/usr/bin:/bin");
    let inspected = inspect(OsStr::new("true"), &[], path).unwrap();
    assert!(inspected.path.ends_with("bin/true"));
    assert!(inspected.unmanaged.is_none(), "{:?}", inspected.unmanaged);
    assert_eq!(reason(Path::new("/bin/sh")), None);
}

#[test]
fn what_is_not_there_is_127_and_what_cannot_be_executed_126() {
    let folder = Folder::new();
    let plain = folder.file("plain", b"text", 0o644);
    let path = OsStr::new("/usr/bin");
    for missing in ["no-such-program", "/no/such/program", "/etc/passwd/x", ""] {
        let result = inspect(OsStr::new(missing), &[], path);
        assert!(matches!(result, Err(Refusal::NotFound(_))), "{missing}: {result:?}");
    }
    for refused in [&plain, Path::new("/"), Path::new("/dev/null")] {
        let result = inspect_file(refused);
        assert!(matches!(result, Err(Refusal::NotExecutable(_))), "{refused:?}: {result:?}");
    }
    let damaged = folder.file("damaged", b"\x7fELF and no more", 0o755);
    assert!(matches!(inspect_file(&damaged), Err(Refusal::NotExecutable(_))));
    // A file without x bits does not hide the program further on in PATH, but is named in the end.
    let search = std::env::join_paths([&folder.0, Path::new("/usr/bin")]).unwrap();
    folder.file("true", b"", 0o644);
    assert_eq!(inspect(OsStr::new("true"), &[], &search).unwrap().path, Path::new("/usr/bin/true"));
    let result = inspect(OsStr::new("plain"), &[], &search);
    assert!(matches!(result, Err(Refusal::NotExecutable(_))));
}

#[test]
fn scripts_are_judged_by_their_interpreter() {
    let folder = Folder::new();
    let judged = |name, content: &str| {
        let file = folder.file(name, content.as_bytes(), 0o755);
        inspect_file(&file).map(|inspected| inspected.unmanaged.map(|unmanaged| unmanaged.reason))
    };
    assert_eq!(judged("sh", "#!/bin/sh\nexit 0\n").unwrap(), None);
    assert_eq!(judged("blank", "#! /bin/sh -e\n").unwrap(), None);
    assert_eq!(judged("env", "#!/usr/bin/env sh\n").unwrap(), None);
    assert_eq!(judged("bare", "exit 0\n").unwrap(), None, "the shell's");
    let bad = judged("bad", "#!/no/such/interpreter\n").unwrap_err();
    assert!(matches!(&bad, Refusal::NotExecutable(text) if text.contains("bad interpreter")));
    let own = folder.0.join("loop");
    let looping = judged("loop", &format!("#!{}\n", own.display()));
    assert!(matches!(looping, Err(Refusal::NotExecutable(_))));
    if let Some(program) = folder.compiled("static", &["-static"]) {
        let script = format!("#!{} -x\n", program.display());
        assert_eq!(judged("to-static", &script).unwrap(), Some(STATIC));
        let script = format!("#!/usr/bin/env -S A=1 {} -x\n", program.display());
        assert_eq!(judged("env-static", &script).unwrap(), Some(STATIC));
    }
}

#[test]
fn what_cannot_be_managed_is_told_apart() {
    let folder = Folder::new();
    let cases: [(&str, &[&str], Option<Reason>); 5] = [
        ("dynamic", &[], None),
        ("stripped", &["-s"], None),
        ("static", &["-static"], Some(STATIC)),
        ("static-pie", &["-static-pie"], Some(STATIC)),
        ("asan", &["-fsanitize=address"], Some(ADDRESS_SANITIZER)),
    ];
    for (name, options, expected) in cases {
        match folder.compiled(name, options) {
            Some(program) => assert_eq!(reason(&program), expected, "{name}"),
            None => eprintln!("no C compiler for {name}: not tested"),
        }
    }
    // The head of a program for 32-bit ARM.
    let mut other = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x28\0\x01\0\0\0".to_vec();
    other.resize(52, 0);
    assert_eq!(reason(&folder.file("arm", &other, 0o755)), Some(OTHER_ARCHITECTURE));
    let message = inspect_file(&folder.file("arm", &other, 0o755)).unwrap().unmanaged.unwrap();
    assert!(message.to_string().contains("--allow-unmanaged"), "{message}");
}

#[test]
fn go_programs_are_known_by_their_build_id() {
    // The compiler is one itself.
    match Command::new("go").args(["env", "GOROOT"]).output() {
        Ok(output) if output.status.success() => {
            let root = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
            assert_eq!(reason(&root.join("bin/go")), Some(GO));
        }
        _ => eprintln!("no Go here: not tested"),
    }
}

#[test]
fn setuid_matters_only_where_it_changes_the_user() {
    let folder = Folder::new();
    let program = folder.file("setuid", &fs::read("/bin/true").unwrap(), 0o755);
    let is_root = rustix::process::geteuid().is_root();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(reason(&program), None, "setuid to our own user");
    if is_root {
        std::os::unix::fs::chown(&program, Some(12345), Some(12345)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(reason(&program), Some(PRIVILEGED));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o2755)).unwrap();
        assert_eq!(reason(&program), Some(PRIVILEGED));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o2745)).unwrap();
        assert_eq!(reason(&program), None, "no group x bit, no setgid");
    }
}

#[test]
fn a_script_names_its_interpreter_and_one_argument() {
    let split = |line: &str| script_interpreter(line.as_bytes());
    let path = PathBuf::from("/bin/x");
    assert_eq!(split("#!/bin/x\nrest"), Some((path.clone(), None)));
    assert_eq!(split("#! \t/bin/x -a  b \n"), Some((path, Some("-a  b".into()))));
    assert_eq!(split("#!\n"), None);
    assert_eq!(split("text"), None);
}
