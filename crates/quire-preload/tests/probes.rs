//! The probes in the library as it is installed: a tracer of a program under `quire run` looks
//! for them there.

use std::path::Path;
use std::process::Command;

#[test]
fn the_release_library_has_the_notes_of_all_probes() {
    let binary = std::env::current_exe().expect("a test has a path");
    let target = binary.ancestors().nth(3).expect("target/profile/deps/test");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--release", "-p", "quire-preload"]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", target);
    assert!(cargo.status().expect("cargo").success(), "the library does not build");
    let library = target.join("release/libquire_preload.so");
    let notes = notes_of(&library);
    for name in
        ["spf_vma_changed", "spf_vma_noanon", "spf_vma_notsup", "spf_vma_access", "spf_pmd_changed"]
    {
        let probe = format!("Provider: pagefault\n    Name: {name}\n");
        assert!(notes.contains(&probe), "{name} is not among\n{notes}");
    }
    for tool in ["perf", "bpftrace"] {
        if Command::new(tool).arg("--version").output().is_err() {
            eprintln!("NOT TESTED with {tool}, which is not there");
        }
    }
    see_with_perf(&library);
    see_with_bpftrace(&library);
}

fn notes_of(library: &Path) -> String {
    let output = Command::new("readelf").args(["-n", "-W"]).arg(library).output();
    String::from_utf8_lossy(&output.expect("readelf, of binutils").stdout).into_owned()
}

/// Where there is a perf it finds the probes.
fn see_with_perf(library: &Path) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("buildid");
    let perf = |arguments: &[&str]| {
        Command::new("perf").arg("--buildid-dir").arg(&folder).args(arguments).output()
    };
    let path = library.to_str().expect("a path of plain text");
    if !perf(&["buildid-cache", "--add", path]).is_ok_and(|output| output.status.success()) {
        return;
    }
    let listed = perf(&["list", "sdt"]).expect("perf, once more");
    let listed = String::from_utf8_lossy(&listed.stdout);
    assert!(listed.contains("sdt_pagefault:spf_vma_changed"), "perf sees only\n{listed}");
    let _ = std::fs::remove_dir_all(folder);
}

/// Where there is a bpftrace it finds the probes.
fn see_with_bpftrace(library: &Path) {
    let probes = format!("usdt:{}:*", library.display());
    let output = Command::new("bpftrace").args(["-l", &probes]).output();
    // It lists nothing for a user that may not trace.
    let Some(output) = output.ok().filter(|output| output.status.success()) else { return };
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(listed.contains("pagefault:spf_vma_changed"), "bpftrace sees only\n{listed}");
}
