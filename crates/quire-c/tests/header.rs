//! The header in the tree is the one that the code makes.

use std::path::Path;

/// In the order in which the header has them.
const SOURCES: [&str; 6] =
    ["failure.rs", "space.rs", "object.rs", "mapping.rs", "pin.rs", "cancel.rs"];

/// The header that the code makes.
fn header() -> String {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_dir.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(crate_dir.join("src").join(source));
    }
    let mut bytes = Vec::new();
    builder.generate().unwrap().write(&mut bytes);
    // Sections on safety are for callers in Rust.
    let text = String::from_utf8(bytes).unwrap();
    let mut lines: Vec<&str> = Vec::new();
    let mut is_safety = false;
    for line in text.lines() {
        is_safety = line.starts_with("// # Safety") || (is_safety && line.starts_with("//"));
        if is_safety {
            continue;
        }
        if !line.starts_with("//") && lines.last() == Some(&"//") {
            lines.pop();
        }
        lines.push(line);
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_header_in_the_tree_is_the_one_that_the_code_makes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/quire.h");
    let made = header();
    if std::env::var_os("QUIRE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(
        kept == made,
        "{} is not up to date: QUIRE_WRITE_HEADER=1 cargo test -p quire-c --test header",
        path.display()
    );
}

#[test]
fn every_exported_function_is_declared() {
    let sources = SOURCES.map(|source| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(source);
        std::fs::read_to_string(path).unwrap()
    });
    let made = header();
    let mut functions = 0;
    for rest in sources.iter().flat_map(|source| source.split("extern \"C\" fn quire_").skip(1)) {
        let name = rest.split('(').next().unwrap();
        assert!(made.contains(&format!("quire_{name}(")), "quire_{name}");
        functions += 1;
    }
    assert!(functions > 20, "only {functions} functions were found");
}
