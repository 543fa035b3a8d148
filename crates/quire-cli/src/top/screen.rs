//! What `quire top` draws, and what its keys do.

use std::collections::VecDeque;

use clap::ValueEnum;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row as Cells, Table, TableState};

use super::sample::{HISTORY, Row, RunRow};

/// What rows are sorted by: by a size or a rate the largest first.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sort {
    Pid,
    Held,
    Wanted,
    Faults,
    Waits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pressed {
    GoOn,
    Quit,
}

pub(super) struct Screen {
    rows: Vec<RunRow>,
    sort: Sort,
    /// The supervisor of the run that is chosen: it stays so wherever its row comes to be.
    chosen: Option<u32>,
    filter: String,
    is_typing: bool,
    /// No colours, and ASCII alone.
    is_plain: bool,
}

/// The heads of the columns, and how wide each is; names have what is left.
const RUN_COLUMNS: [(&str, u16); 9] = [
    ("RUN", 7),
    ("HELD", 6),
    ("OF", 6),
    ("WANTED", 6),
    ("POOL", 6),
    ("RATIO", 5),
    ("FILE", 6),
    ("FLT/s", 6),
    ("WAITS", 6),
];
const PROCESS_COLUMNS: [(&str, u16); 9] = [
    ("PID", 7),
    ("STATE", 8),
    ("HELD", 6),
    ("WANTED", 6),
    ("POOL", 6),
    ("FILE", 6),
    ("FLT/s", 6),
    ("MAJ/s", 6),
    ("WAITS", 6),
];

impl Screen {
    pub(super) fn new(sort: Sort, is_plain: bool) -> Screen {
        let filter = String::new();
        Screen { rows: Vec::new(), sort, chosen: None, filter, is_typing: false, is_plain }
    }

    /// Whether the environment wants no colours, or knows ASCII alone.
    pub(super) fn is_plain() -> bool {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(variable);
        let is_utf8 = locale.is_some_and(|locale| {
            let locale = locale.to_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        variable("NO_COLOR").is_some() || !is_utf8
    }

    /// Has new rows.
    pub(super) fn show(&mut self, rows: Vec<RunRow>) {
        self.rows = rows;
        self.put_in_order();
    }

    fn put_in_order(&mut self) {
        let sort = self.sort;
        let key = |row: &Row| match sort {
            Sort::Pid => 0.0,
            Sort::Held => row.held_bytes as f64,
            Sort::Wanted => row.wanted_bytes as f64,
            Sort::Faults => row.faults,
            Sort::Waits => row.waits,
        };
        let order =
            |one: &Row, other: &Row| key(other).total_cmp(&key(one)).then(one.pid.cmp(&other.pid));
        self.rows.sort_by(|one, other| order(&one.run, &other.run));
        self.rows.iter_mut().for_each(|row| row.processes.sort_by(order));
    }

    /// The runs that the filter lets through.
    fn shown(&self) -> Vec<&RunRow> {
        let filter = self.filter.to_lowercase();
        let rows = self.rows.iter();
        rows.filter(|row| row.run.name.to_lowercase().contains(&filter)).collect()
    }

    /// Which of them is chosen.
    fn place(&self, shown: &[&RunRow]) -> usize {
        shown.iter().position(|row| Some(row.run.pid) == self.chosen).unwrap_or(0)
    }

    pub(super) fn press(&mut self, key: KeyCode) -> Pressed {
        if self.is_typing {
            self.type_filter(key);
            return Pressed::GoOn;
        }
        match key {
            KeyCode::Char('q') => return Pressed::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('s') => {
                let all = Sort::value_variants();
                let at = all.iter().position(|sort| *sort == self.sort).unwrap_or(0);
                self.sort = all[(at + 1) % all.len()];
                self.put_in_order();
            }
            KeyCode::Up | KeyCode::Char('k') => self.choose(|place| place.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.choose(|place| place + 1),
            _ => {}
        }
        Pressed::GoOn
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_typing = false;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
    }

    fn choose(&mut self, other: impl FnOnce(usize) -> usize) {
        let shown = self.shown();
        let place = other(self.place(&shown)).min(shown.len().saturating_sub(1));
        self.chosen = shown.get(place).map(|row| row.run.pid);
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let shown = self.shown();
        // Half of the screen is the chosen run's.
        let runs = (shown.len() as u16 + 1).min(frame.area().height.saturating_sub(3) / 2);
        let [head, runs, _, processes, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(runs),
            Constraint::Length(1),
            Constraint::Fill(1),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.head(&shown)), head);
        let place = self.place(&shown);
        let cells = shown.iter().map(|row| self.run_cells(&row.run)).collect();
        self.draw_table(frame, runs, &RUN_COLUMNS, "COMMAND", cells, Some(place));
        let of_chosen = shown.get(place).map_or(&[][..], |row| &row.processes);
        let cells = of_chosen.iter().map(process_cells).collect();
        self.draw_table(frame, processes, &PROCESS_COLUMNS, "NAME", cells, None);
        frame.render_widget(Paragraph::new(self.foot()), foot);
    }

    fn head(&self, shown: &[&RunRow]) -> String {
        if shown.is_empty() {
            return match self.filter.is_empty() {
                true => "no run that this user may look into; start one with `quire run`".into(),
                false => format!("no run whose command has \"{}\"", self.filter),
            };
        }
        let sum = |of: fn(&Row) -> f64| shown.iter().map(|row| of(&row.run)).sum::<f64>();
        let far = sum(|row| row.far_bytes as f64);
        let far = if far > 0.0 { format!(", {} on servers", short(far)) } else { String::new() };
        let processes: usize = shown.iter().map(|row| row.processes.len()).sum();
        format!(
            "{} runs, {processes} processes: hold {}+{} of {}, want {}{far}; {}/s out, {}/s in",
            shown.len(),
            short(sum(|row| row.held_bytes as f64)),
            short(sum(|row| row.unmanaged_bytes as f64)),
            short(sum(|row| row.budget_bytes as f64)),
            short(sum(|row| row.wanted_bytes as f64)),
            short(sum(|row| row.bytes_out)),
            short(sum(|row| row.bytes_in)),
        )
    }

    fn foot(&self) -> String {
        if self.is_typing {
            return format!("/{}_  Enter: done, Esc: all", self.filter);
        }
        let sort = self.sort.to_possible_value().map(|value| value.get_name().to_owned());
        let sort = sort.unwrap_or_default();
        let filter = match self.filter.as_str() {
            "" => String::new(),
            filter => format!(", only \"{filter}\" (Esc: all)"),
        };
        format!("q quit  s sort ({sort})  / filter{filter}  up, down: a run's processes")
    }

    fn draw_table(
        &self,
        frame: &mut Frame<'_>,
        area: Rect,
        columns: &[(&str, u16)],
        name: &str,
        cells: Vec<Vec<String>>,
        chosen: Option<usize>,
    ) {
        let widths = columns.iter().map(|(_, width)| Constraint::Length(*width));
        let heads = columns.iter().map(|(head, width)| right(head, *width)).chain([name.into()]);
        let bold = Style::default().add_modifier(Modifier::BOLD);
        let style = if self.is_plain { bold } else { bold.fg(Color::Cyan) };
        let rows = cells.into_iter().map(|cells| {
            let widths = columns.iter().map(|(_, width)| Some(*width)).chain([None]);
            let aligned = cells.into_iter().zip(widths).map(|(cell, width)| match width {
                Some(width) => Line::from(right(&cell, width)),
                None => Line::from(cell),
            });
            Cells::new(aligned.collect::<Vec<_>>())
        });
        let table = Table::new(rows, widths.chain([Constraint::Fill(1)]))
            .column_spacing(1)
            .header(Cells::new(heads.collect::<Vec<_>>()).style(style))
            .row_highlight_style(Style::default().add_modifier(Modifier::REVERSED));
        let mut state = TableState::default().with_selected(chosen);
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn run_cells(&self, row: &Row) -> Vec<String> {
        vec![
            row.pid.to_string(),
            short(row.held_bytes as f64),
            short(row.budget_bytes as f64),
            short(row.wanted_bytes as f64),
            short(row.pool_bytes as f64),
            row.pack_ratio.map_or("-".into(), |ratio| format!("{ratio:.1}")),
            short(row.file_bytes as f64),
            format!("{:.0}", row.faults),
            format!("{:.2}", row.waits),
            format!("{} {}", self.spark(&row.history), row.name),
        ]
    }

    /// Waits over time, as small columns; a full one is a second a second.
    fn spark(&self, history: &VecDeque<f64>) -> String {
        let steps: &[char] = match self.is_plain {
            true => &['_', '.', '-', '=', '#'],
            false => &['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'],
        };
        let step = |waits: &f64| {
            let most = steps.len() - 1;
            steps[((waits * most as f64).ceil() as usize).min(most)]
        };
        let drawn: String = history.iter().map(step).collect();
        format!("{drawn:>HISTORY$}")
    }
}

fn process_cells(row: &Row) -> Vec<String> {
    vec![
        row.pid.to_string(),
        row.state.to_owned(),
        short(row.held_bytes as f64),
        short(row.wanted_bytes as f64),
        short(row.pool_bytes as f64),
        short(row.file_bytes as f64),
        format!("{:.0}", row.faults),
        format!("{:.0}", row.major),
        format!("{:.2}", row.waits),
        row.name.clone(),
    ]
}

fn right(text: &str, width: u16) -> String {
    format!("{text:>width$}", width = usize::from(width))
}

/// Bytes in five letters at most: `1023B`, `29.5M`, `512M`, `1.3G`.
fn short(bytes: f64) -> String {
    const UNITS: [char; 6] = ['B', 'K', 'M', 'G', 'T', 'P'];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = usize::from(unit > 0 && value < 99.95 && value.fract() >= 0.05);
    format!("{value:.digits$}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn row(pid: u32, name: &str, held: u64, waits: f64) -> Row {
        Row {
            pid,
            name: name.into(),
            state: "sleeping",
            budget_bytes: 32 << 20,
            held_bytes: held << 20,
            unmanaged_bytes: 3 << 20,
            wanted_bytes: 109 << 20,
            pool_bytes: 17_500_000,
            file_bytes: 84 << 20,
            far_bytes: 0,
            pack_ratio: Some(3.1),
            faults: 1234.4,
            major: 77.0,
            waits,
            bytes_out: 3e6,
            bytes_in: 2e6,
            history: [0.0, 0.1, 0.5, waits].into(),
        }
    }

    fn screen(is_plain: bool) -> Screen {
        let mut screen = Screen::new(Sort::Pid, is_plain);
        screen.show(vec![
            RunRow {
                run: row(24573, "build.sh --all", 29, 0.93),
                processes: vec![row(24589, "python3", 23, 0.8), row(24575, "build.sh", 0, 0.0)],
            },
            RunRow {
                run: row(31000, "redis-server", 31, 0.02),
                processes: vec![row(31001, "redis-server", 31, 0.02)],
            },
        ]);
        screen
    }

    /// What is drawn, without what is blank at the ends of lines.
    fn drawn(screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content.chunks(80).map(|line| {
            let line: String = line.iter().map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned()
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_screen_of_80_by_24_has_all_runs_and_the_processes_of_one() {
        let expected = include_str!("expected.txt");
        assert_eq!(drawn(&screen(true)), expected.trim_end_matches('\n'));
    }

    #[test]
    fn keys_choose_sort_and_filter() {
        let mut screen = screen(false);
        assert!(drawn(&screen).contains("build.sh\n") && drawn(&screen).contains("▁"));
        assert_eq!(screen.press(KeyCode::Down), Pressed::GoOn);
        assert!(!drawn(&screen).contains("python3"));
        screen.press(KeyCode::Up);
        assert!(drawn(&screen).contains("python3"));
        screen.press(KeyCode::Char('s'));
        let text = drawn(&screen);
        assert!(text.contains("sort (held)"));
        assert!(text.find("31000") < text.find("24573"), "{text}");
        for key in ['/', 'R', 'e', 'd'] {
            screen.press(KeyCode::Char(key));
        }
        assert!(!drawn(&screen).contains("24573"), "{}", drawn(&screen));
        screen.press(KeyCode::Char('q'));
        assert!(drawn(&screen).contains("no run whose command has \"Redq\""));
        screen.press(KeyCode::Backspace);
        screen.press(KeyCode::Enter);
        assert!(drawn(&screen).contains("only \"Red\""));
        screen.press(KeyCode::Esc);
        assert!(drawn(&screen).contains("24573"));
        assert_eq!(screen.press(KeyCode::Char('q')), Pressed::Quit);
    }

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in [
            (0.0, "0B"),
            (1023.0, "1023B"),
            (1024.0, "1K"),
            (30_932_992.0, "29.5M"),
            (536_870_912.0, "512M"),
            (1_395_864_371.0, "1.3G"),
            (107_374_182_400.0, "100G"),
        ] {
            assert_eq!(short(bytes), text);
        }
    }
}
