//! ARCHITECTURE.md and the tour are true: every file that they link to exists, and has the name in the
//! link.

use std::fs;
use std::path::{Path, PathBuf};

/// `[text](target)`, in the order of a document. Pictures count as well.
fn links(document: &str) -> Vec<(&str, &str)> {
    let mut links = Vec::new();
    for (middle, _) in document.match_indices("](") {
        let text = &document[document[..middle].rfind('[').map_or(middle, |at| at + 1)..middle];
        let rest = &document[middle + 2..];
        links.push((text, &rest[..rest.find(')').expect("a link ends")]));
    }
    links
}

/// The name that a link's text is: one word of code.
fn name_of(text: &str) -> Option<&str> {
    let name = text.strip_prefix('`')?.strip_suffix('`')?;
    let is_name = name.chars().all(|each| each.is_alphanumeric() || each == '_');
    is_name.then_some(name)
}

/// Whether a file defines a function, a type or a constant of this name.
fn defines(source: &str, name: &str) -> bool {
    let is_part = |each: char| each.is_alphanumeric() || each == '_';
    let keywords = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod"];
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.into_iter().any(|line| {
        let words: Vec<_> =
            line.split(|each| !is_part(each)).filter(|each| !each.is_empty()).collect();
        words.windows(2).any(|pair| keywords.contains(&pair[0]) && pair[1] == name)
    })
}

/// What a document names that is not there.
fn missing(root: &Path, document: &str) -> Vec<String> {
    let path = root.join(document);
    let text = fs::read_to_string(&path).expect("the document can be read");
    let here = path.parent().expect("a document lies in a folder");
    let mut missing = Vec::new();
    for (text, target) in links(&text) {
        let file = target.split('#').next().unwrap_or_default();
        if file.is_empty() || target.contains("://") {
            continue;
        }
        if !here.join(file).exists() {
            missing.push(format!("{document}: {file} is not there"));
        } else if let Some(name) = name_of(text) {
            let source = fs::read_to_string(here.join(file)).unwrap_or_default();
            if !defines(&source, name) {
                missing.push(format!("{document}: {file} has no {name}"));
            }
        }
    }
    missing
}

#[test]
fn the_map_and_the_tour_name_what_is_there() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let documents = ["ARCHITECTURE.md", "docs/tour.md"];
    let missing: Vec<_> = documents.into_iter().flat_map(|each| missing(&root, each)).collect();
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}
