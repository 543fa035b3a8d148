//! The command line of the suite.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum as _};

use super::columns::Column;
use super::rows::Fraction;
use crate::harness::Options;

/// How long the core may take.
const CORE_MINUTES: u32 = 90;

#[derive(Args, Debug)]
pub(crate) struct PressureBench {
    #[command(flatten)]
    pub common: Options,

    /// Only rows, of the core or not, that have one of these in their name
    #[arg(long, value_name = "ROW,ROW", value_delimiter = ',')]
    pub only: Vec<String>,

    /// The parts of its want that a program gets [default: those of the row]
    #[arg(long, value_name = "1/2,1/4", value_delimiter = ',')]
    pub fraction: Vec<Fraction>,

    /// The columns; bare and quire are always there, the others are measured by them
    #[arg(long, value_name = "COLUMN,COLUMN", value_delimiter = ',')]
    pub column: Vec<Column>,

    /// Where swap files and the programs' input are made, on the disk that is to be measured [default:
    /// $TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

impl PressureBench {
    /// The columns in their order; without a choice all of them.
    pub(crate) fn columns(&self) -> Vec<Column> {
        let is_always = |column| matches!(column, Column::Bare | Column::Quire);
        let is_chosen = |column: &Column| {
            self.column.is_empty() || is_always(*column) || self.column.contains(column)
        };
        Column::value_variants().iter().copied().filter(is_chosen).collect()
    }

    /// After this nothing new begins; the core has a limit of its own.
    pub(crate) fn most(&self) -> Option<Duration> {
        let is_core = !self.common.full && self.only.is_empty();
        let core = is_core.then(|| Duration::from_secs(u64::from(CORE_MINUTES) * 60));
        self.common.most().or(core)
    }
}
