//! The folders of the engine are layers: no folder uses, over any number of steps, a folder that uses
//! it.
//!
//! A space, its faults and its reclaim are one layer in three folders; every other folder can be read,
//! changed and tested with the folders that it uses alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The folders that may name each other.
const ONE_LAYER: [&str; 3] = ["fault", "reclaim", "space"];

type Edges = BTreeMap<String, BTreeMap<String, String>>;

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if !path.file_stem().unwrap().to_str().unwrap().ends_with("tests") {
            into.push(path);
        }
    }
}

/// The folders that a file's lines name, each with the first such line. The unit tests, which end a
/// file, may name what they like.
fn named(text: &str) -> impl Iterator<Item = (String, &str)> {
    let lines = text.lines().take_while(|line| *line != "mod tests {");
    let code = lines.map(|line| line.split("//").next().unwrap());
    code.flat_map(|line| line.split("crate::").skip(1).map(move |rest| (rest, line))).map(
        |(rest, line)| {
            let is_word = |at: char| at.is_alphanumeric() || at == '_';
            (rest.chars().take_while(|&at| is_word(at)).collect(), line)
        },
    )
}

fn edges() -> Edges {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut edges = Edges::new();
    for file in files {
        let inside = file.strip_prefix(&root).unwrap().with_extension("");
        let folder = inside.iter().next().unwrap().to_str().unwrap().to_owned();
        for (other, line) in named(&fs::read_to_string(&file).unwrap()) {
            if other != folder {
                let place = format!("{}: {}", inside.display(), line.trim());
                edges.entry(folder.clone()).or_default().entry(other).or_insert(place);
            }
        }
    }
    edges
}

fn reached<'a>(edges: &'a Edges, from: &'a str) -> BTreeSet<&'a str> {
    let (mut all, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(folder) = next.pop() {
        let others = edges.get(folder).into_iter().flat_map(BTreeMap::keys);
        next.extend(others.map(String::as_str).filter(|&other| all.insert(other)));
    }
    all
}

#[test]
fn no_folder_is_named_by_what_it_names() {
    let edges = edges();
    assert!(edges["object"].contains_key("space"), "the sources are not where they were");
    let may = |one: &str, other: &str| ONE_LAYER.contains(&one) && ONE_LAYER.contains(&other);
    for (folder, others) in &edges {
        for (other, place) in others {
            let is_back = reached(&edges, other).contains(folder.as_str());
            assert!(
                !is_back || may(folder, other),
                "{folder} and {other} are in a circle: {place}"
            );
        }
    }
}
