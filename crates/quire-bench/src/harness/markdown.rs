//! Tables as Markdown has them, with columns that stand under each other in plain text too.

use std::fmt;

/// A table: its head, then its rows.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Table {
        Table { rows: vec![head.into_iter().map(Into::into).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// A number in the line that has these first two cells, below a column's head; a cell that is empty is
    /// the one above.
    pub(crate) fn number(&self, [first, second]: [&str; 2], column: &str) -> Option<f64> {
        let at = self.rows.first()?.iter().position(|head| head == column)?;
        let mut last = "";
        for row in &self.rows {
            last = if row.first()?.is_empty() { last } else { row.first()? };
            if last == first && row.get(1)? == second {
                return row.get(at)?.replace(',', "").parse().ok();
            }
        }
        None
    }

    /// The head, then the rows.
    pub(crate) fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }
}

/// A bar ends a cell.
fn escape(cell: &str) -> String {
    cell.replace('|', r"\|").replace('\n', " ")
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(|cell| escape(cell)).collect()).collect();
        let columns = rows[0].len();
        let width_of = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width_of).collect();
        for (index, row) in rows.iter().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                write!(f, "| {:<width$} ", row.get(column).map_or("", String::as_str))?;
            }
            writeln!(f, "|")?;
            if index == 0 {
                for width in &widths {
                    write!(f, "|{}", "-".repeat(width + 2))?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_below_its_heads() {
        let mut table = Table::new(["", "figure", "off", "4"]);
        for row in [["1 thread", "faults", "4,096", "256"], ["", "seconds", "7.25", "5.5"]] {
            table.row(row.map(String::from).into());
        }
        assert_eq!(table.number(["1 thread", "faults"], "off"), Some(4096.0));
        assert_eq!(table.number(["1 thread", "seconds"], "4"), Some(5.5));
        assert_eq!(table.number(["8 threads", "seconds"], "4"), None);
        assert_eq!(table.number(["1 thread", "seconds"], "5"), None);
    }

    #[test]
    fn columns_stand_under_each_other_and_bars_are_text() {
        let mut table = Table::new(["a", "bcd"]);
        assert!(table.is_empty());
        table.row(vec!["x|y".into()]);
        let expected = "| a    | bcd |\n|------|-----|\n| x\\|y |     |\n";
        assert_eq!(table.to_string(), expected);
    }
}
