//! Results as they come: in memory, and as JSON lines in a file that a later run goes on from.
//!
//! The first line says what the results are of. A line that the end of a run tore is dropped when the
//! next one goes on.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Turn;

/// A turn and what came of it.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) struct Record<R> {
    #[serde(flatten)]
    pub turn: Turn,
    /// With everything around it.
    pub took_seconds: f64,
    pub result: R,
}

/// What results are of: others cannot be mixed with them.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    pub suite: String,
    /// The sizes that programs run with.
    pub sizes: String,
    pub commit: String,
    pub kernel: String,
    pub processor: String,
}

/// All results so far, in the order in which they came.
pub(crate) struct Journal<R> {
    records: Vec<Record<R>>,
    file: Option<(PathBuf, File)>,
}

impl<R: Serialize + DeserializeOwned> Journal<R> {
    pub(crate) fn in_memory() -> Journal<R> {
        Journal { records: Vec::new(), file: None }
    }

    /// Goes on with the results that the file has, if there is one.
    pub(crate) fn resume(path: &Path, origin: &Origin) -> Result<Journal<R>> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("{}", path.display()))?,
        };
        let (found, records, whole_bytes) =
            parse(&text).with_context(|| format!("{}", path.display()))?;
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| format!("{}", path.display()))?;
        file.set_len(whole_bytes as u64)?;
        let mut journal = Journal { records, file: Some((path.to_owned(), file)) };
        match found {
            None => journal.append(origin)?,
            Some(found) => ensure!(
                found == *origin,
                "{} has results of something else ({found:?}, not {origin:?}); name another file",
                path.display()
            ),
        }
        Ok(journal)
    }

    pub(crate) fn records(&self) -> &[Record<R>] {
        &self.records
    }

    pub(crate) fn has(&self, turn: &Turn) -> bool {
        self.records.iter().any(|record| record.turn == *turn)
    }

    pub(crate) fn add(&mut self, record: Record<R>) -> Result<()> {
        self.append(&record)?;
        self.records.push(record);
        Ok(())
    }

    fn append(&mut self, value: &impl Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        file.write_all(&line).with_context(|| format!("{}", path.display()))
    }
}

/// Where results are from, the results, and the bytes of the lines that are whole.
type Parsed<R> = (Option<Origin>, Vec<Record<R>>, usize);

fn parse<R: DeserializeOwned>(text: &str) -> Result<Parsed<R>> {
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    let mut lines = whole.lines().enumerate();
    let Some((_, first)) = lines.next() else {
        ensure!(text.is_empty(), "this is no file of results");
        return Ok((None, Vec::new(), 0));
    };
    let origin = serde_json::from_str(first).context("this is no file of results")?;
    let mut records = Vec::new();
    for (index, line) in lines {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(error) => bail!("line {}: {error}", index + 1),
        }
    }
    Ok((Some(origin), records, whole.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(commit: &str) -> Origin {
        let [suite, sizes, kernel, processor] = ["s", "full", "6.18", "x"].map(String::from);
        Origin { suite, sizes, commit: commit.into(), kernel, processor }
    }

    fn record(round: u32) -> Record<f64> {
        let [row, part, column] = ["sort", "1/2", "quire"].map(String::from);
        let turn = Turn { row, part, column, round };
        Record { turn, took_seconds: 1.0, result: 0.5 }
    }

    #[test]
    fn a_run_goes_on_after_the_last_whole_line() {
        let path = crate::data::unused_path(&std::env::temp_dir());
        let _remove = crate::data::Remove(path.clone());
        let mut journal = Journal::resume(&path, &origin("a")).unwrap();
        journal.add(record(1)).unwrap();
        journal.add(record(2)).unwrap();
        drop(journal);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 5]).unwrap();
        let mut journal: Journal<f64> = Journal::resume(&path, &origin("a")).unwrap();
        assert!(journal.has(&record(1).turn) && !journal.has(&record(2).turn));
        journal.add(record(2)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn results_of_something_else_and_other_files_are_refused_and_left_alone() {
        let path = crate::data::unused_path(&std::env::temp_dir());
        let _remove = crate::data::Remove(path.clone());
        drop(Journal::<f64>::resume(&path, &origin("a")).unwrap());
        assert!(Journal::<f64>::resume(&path, &origin("b")).is_err());
        for text in ["a letter", "a letter\n", "{}\n"] {
            fs::write(&path, text).unwrap();
            assert!(Journal::<f64>::resume(&path, &origin("a")).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }
}
