//! What a run came to, and what several runs of a cell come to together.

use serde::{Deserialize, Serialize};

use super::columns::Column;
use crate::harness::Turn;
use crate::harness::journal::Record;
use crate::samples::Samples;

/// How a run ended.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Eq, Debug)]
pub(crate) enum End {
    #[default]
    Done,
    /// By the kernel's OOM killer.
    Killed,
    /// It took too long.
    Stopped,
    Failed(String),
}

/// What a run took. Sizes are 0 where they do not apply.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
pub(crate) struct Measured {
    pub end: End,
    /// Memory and store were over the limit.
    pub does_not_fit: bool,
    /// Of what the program itself says is to be measured, else of all of it.
    pub seconds: f64,
    pub wall_seconds: f64,
    /// Most that the program held bare.
    pub want_bytes: u64,
    /// Quire's budget, or the limit of the kernel's cgroup.
    pub limit_bytes: u64,
    /// What Quire's run held beyond its budget.
    pub unmanaged_bytes: Option<u64>,
    /// Most that was seen of memory that cannot be dropped, and the store.
    pub most_bytes: Option<u64>,
    /// Most that was seen of a store that the cgroup does not count.
    pub store_bytes: u64,
    pub page_ins: u64,
    pub major_faults: Option<u64>,
    /// What the disk read and wrote meanwhile.
    pub disk_bytes: Option<[u64; 2]>,
    /// What the program itself counted.
    pub figures: Vec<(String, f64)>,
    /// Of what it printed.
    pub digest: u64,
}

impl Measured {
    /// A run that did not come about.
    pub(crate) fn failed(why: String) -> Measured {
        Measured { end: End::Failed(why), ..Measured::default() }
    }
}

pub(crate) type Records<'a> = &'a [Record<Measured>];

/// The runs of a cell.
#[derive(Clone)]
pub(crate) struct Cell<'a> {
    runs: Vec<&'a Record<Measured>>,
}

impl<'a> Cell<'a> {
    /// The runs of a row in a part and a column.
    pub(crate) fn of(records: Records<'a>, row: &str, part: &str, column: Column) -> Cell<'a> {
        let part = if column == Column::Bare { "" } else { part };
        let [row, part] = [row, part].map(String::from);
        let column = column.name();
        let cell = Turn { row, part, column, round: 0 };
        Cell { runs: records.iter().filter(|record| record.turn.is_of_cell(&cell)).collect() }
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = &'a Measured> {
        self.runs.iter().map(|record| &record.result)
    }

    /// The runs that came to their end.
    pub(crate) fn done(&self) -> impl Iterator<Item = &'a Measured> {
        self.runs().filter(|run| run.end == End::Done)
    }

    pub(crate) fn has(&self, end: &End) -> bool {
        self.runs().any(|run| run.end == *end)
    }

    /// Why a run failed, where one did.
    pub(crate) fn failure(&self) -> Option<&'a str> {
        self.runs().find_map(|run| match &run.end {
            End::Failed(why) => Some(why.as_str()),
            _ => None,
        })
    }

    pub(crate) fn seconds(&self) -> Samples {
        self.samples(|run| Some(run.seconds))
    }

    /// A figure of the runs that came to their end.
    pub(crate) fn samples(&self, figure: impl Fn(&Measured) -> Option<f64>) -> Samples {
        self.done().filter_map(figure).collect()
    }

    /// Round by round, the seconds of this over those of `other`.
    pub(crate) fn over(&self, other: &Cell<'_>) -> Samples {
        let ratio = |record: &&Record<Measured>| {
            let same = other.runs.iter().find(|other| other.turn.round == record.turn.round)?;
            let are_done = record.result.end == End::Done && same.result.end == End::Done;
            are_done.then_some(record.result.seconds / same.result.seconds)
        };
        self.runs.iter().filter_map(ratio).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of a second or so.
    pub(crate) fn record(column: Column, round: u32, seconds: f64, end: End) -> Record<Measured> {
        let part = if column == Column::Bare { "" } else { "1/2" };
        let ([row, part], column) = (["sort", part].map(String::from), column.name());
        let result = Measured {
            end,
            does_not_fit: false,
            seconds,
            wall_seconds: seconds,
            want_bytes: 128 << 20,
            limit_bytes: 64 << 20,
            unmanaged_bytes: Some(4 << 20),
            most_bytes: Some(66 << 20),
            store_bytes: 0,
            page_ins: 2500,
            major_faults: Some(100),
            disk_bytes: Some([10 << 20, 20 << 20]),
            figures: vec![("p99 us".into(), 250.0)],
            digest: 1,
        };
        Record { turn: Turn { row, part, column, round }, took_seconds: seconds, result }
    }

    #[test]
    fn ratios_are_of_the_same_round_and_of_runs_that_ended() {
        let records = [
            record(Column::Quire, 1, 2.0, End::Done),
            record(Column::Disk, 1, 3.0, End::Done),
            record(Column::Quire, 2, 4.0, End::Done),
            record(Column::Disk, 2, 1.0, End::Killed),
            record(Column::Disk, 3, 8.0, End::Done),
            record(Column::Quire, 3, 4.0, End::Done),
        ];
        let cell = |column| Cell::of(&records, "sort", "1/2", column);
        let ratios = cell(Column::Disk).over(&cell(Column::Quire));
        assert_eq!(ratios.values(), [1.5, 2.0]);
        assert!(cell(Column::Disk).has(&End::Killed) && !cell(Column::Quire).has(&End::Killed));
        assert_eq!(cell(Column::Disk).seconds().values(), [3.0, 8.0]);
        assert_eq!(cell(Column::Bare).runs().count(), 0);
    }
}
