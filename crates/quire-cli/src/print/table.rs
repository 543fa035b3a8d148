//! Tables of columns with fixed widths.

/// A column: on which side its text stands, and how wide it is.
#[derive(Clone, Copy)]
pub(crate) enum Column {
    Left(usize),
    Right(usize),
}

/// A line of a table, without its end; `between` stands between columns. Columns without a cell are
/// left out.
pub(crate) fn row<T: AsRef<str>>(columns: &[Column], between: &str, cells: &[T]) -> String {
    let cells = columns.iter().zip(cells).map(|(column, cell)| match *column {
        Column::Left(width) => format!("{:<width$}", cell.as_ref()),
        Column::Right(width) => format!("{:>width$}", cell.as_ref()),
    });
    cells.collect::<Vec<_>>().join(between)
}
