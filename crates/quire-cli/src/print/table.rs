//! Tables of columns with fixed widths.

/// A line of a table, without its end; `between` stands between columns. The text of a column whose
/// width is negative stands on the left. Columns without a cell are left out.
pub(crate) fn row<T: AsRef<str>>(widths: &[isize], between: &str, cells: &[T]) -> String {
    let cells = widths.iter().zip(cells).map(|(&width, cell)| {
        let (cell, columns) = (cell.as_ref(), width.unsigned_abs());
        if width < 0 { format!("{cell:<columns$}") } else { format!("{cell:>columns$}") }
    });
    cells.collect::<Vec<_>>().join(between)
}
