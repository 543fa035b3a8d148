//! Reports as one HTML file that needs nothing else: no network, no script.

use std::fmt::Write as _;

use super::markdown::Table;
use super::report::{Part, Report};
use crate::machine;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #667; --line: #d6dae0; --band: #f4f6f8;
  --c0: #1f5fbf; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #a16207; --c5: #be185d; --c6: #0e7490; --c7: #4b5563; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --faint: #9aa3ad; --line: #343a42;
  --band: #1c2127; --c0: #7ab0ff; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #facc15; --c5: #f472b6;
  --c6: #22d3ee; --c7: #cbd5e1; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
nav a { margin-right: 1rem; } a { color: var(--c0); }
.facts { color: var(--faint); font-size: .9rem; padding-left: 1.2rem; }
.question { font-size: 1.1rem; } .failed { color: var(--c1); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { background: var(--band); } figure { margin: 1rem 0; max-width: 44rem; } figcaption { color: var(--faint); }
details { margin: 1rem 0; } summary { cursor: pointer; }
.plot { width: 100%; height: auto; } .plot text { fill: var(--faint); font-size: 12px; }
@media (max-width: 40rem) { .plot text { font-size: 17px; } }
.plot .y { text-anchor: end; } .plot .x { text-anchor: middle; } .plot .grid { stroke: var(--line); }
.plot polyline { fill: none; stroke-width: 2; } .plot g line { stroke-width: 1; } .plot g { stroke: none; }
.keys span { margin-right: 1rem; white-space: nowrap; } .keys span::before { content: '\\25CF\\00A0'; }
";

/// Text, as it stands in a page.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
pub(crate) fn page(reports: &[Report]) -> String {
    let mut html =
        String::from("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    let _ =
        writeln!(html, "<title>quire bench</title>\n<style>{STYLE}{}</style>\n</head>", colours());
    html.push_str("<body>\n<h1>quire bench</h1>\n<ul class=\"facts\">\n");
    for (name, value) in machine::facts() {
        let _ = writeln!(html, "<li>{name}: {}</li>", escaped(&value));
    }
    html.push_str("</ul>\n");
    if reports.len() > 1 {
        let links = reports.iter().map(|report| format!("<a href=\"#{0}\">{0}</a>", report.name));
        let _ = writeln!(html, "<nav>{}</nav>", links.collect::<Vec<_>>().join("\n"));
    }
    reports.iter().for_each(|report| section(&mut html, report));
    html.push_str("</body>\n</html>\n");
    html
}

/// A rule for each colour of a plot's lines.
fn colours() -> String {
    let rule = |colour| {
        format!(
            ".plot .c{colour}, .plot .c{colour} line {{ stroke: var(--c{colour}); }} \
             .plot .c{colour} circle, .keys .c{colour} {{ fill: var(--c{colour}); color: var(--c{colour}); }}\n"
        )
    };
    (0..super::plot::COLOURS).map(rule).collect()
}

fn section(html: &mut String, report: &Report) {
    let _ = writeln!(html, "<section id=\"{0}\">\n<h2>{0}</h2>", report.name);
    if !report.question.is_empty() {
        let _ = writeln!(html, "<p class=\"question\">{}</p>", escaped(&report.question));
    }
    html.push_str("<ul class=\"facts\">\n");
    for remark in report.remarks() {
        let class = if remark.starts_with("not run") { " class=\"failed\"" } else { "" };
        let _ = writeln!(html, "<li{class}>{}</li>", escaped(&remark));
    }
    html.push_str("</ul>\n");
    if !report.words.is_empty() {
        html.push_str("<ul>\n");
        for sentence in &report.words {
            let _ = writeln!(html, "<li>{}</li>", escaped(sentence));
        }
        html.push_str("</ul>\n");
    }
    report.parts.iter().for_each(|part| self::part(html, part));
    if !report.published.is_empty() {
        html.push_str("<details><summary>As the design's authors measured it</summary>\n");
        report.published.iter().for_each(|part| self::part(html, part));
        html.push_str("</details>\n");
    }
    html.push_str("</section>\n");
}

fn part(html: &mut String, part: &Part) {
    let _ = writeln!(html, "<h3>{}</h3>", escaped(&part.title));
    match &part.plot {
        None => table(html, &part.table),
        // The figures behind it are often many.
        Some(plot) => {
            let _ = writeln!(html, "{plot}<details><summary>Figures</summary>");
            table(html, &part.table);
            html.push_str("</details>\n");
        }
    }
    if let Some(note) = &part.note {
        let _ = writeln!(html, "<p>{}</p>", escaped(note));
    }
}

fn table(html: &mut String, table: &Table) {
    html.push_str("<div class=\"wide\"><table>\n");
    for (index, row) in table.rows().iter().enumerate() {
        let (open, close, tag) = match index {
            0 => ("<thead>", "</thead>\n<tbody>", "th"),
            _ => ("", "", "td"),
        };
        let cells = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        let _ = writeln!(html, "{open}<tr>{}</tr>{close}", cells.collect::<String>());
    }
    html.push_str("</tbody></table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_needs_nothing_else_and_is_well_formed() {
        let mut report =
            Report { name: "swap".into(), question: "a < b?".into(), ..Report::default() };
        report.left_out.push("zram: no right".into());
        report.parts.push(Part::published("one & two", &[&["x", "y"], &["1", "<2>"]]));
        report.published.push(Part::published("theirs", &[&["x"], &["3"]]));
        let other = Report { name: "rmap".into(), ..Report::default() };
        let html = page(&[report, other]);
        for wanted in [
            "<p class=\"question\">a &lt; b?</p>",
            "<li class=\"failed\">not run: zram: no right</li>",
            "<td>&lt;2&gt;</td>",
            "<a href=\"#rmap\">rmap</a>",
            "<details>",
            "name=\"viewport\"",
        ] {
            assert!(html.contains(wanted), "{wanted} is missing");
        }
        for unwanted in ["<script", "http:", "https:", "url(", "@import"] {
            assert!(!html.contains(unwanted), "{unwanted} wants more than the file");
        }
        for tag in ["section", "table", "thead", "tbody", "details", "div", "ul", "nav"] {
            let count = |text: &str| html.matches(text).count();
            assert_eq!(count(&format!("<{tag}")), count(&format!("</{tag}>")), "{tag}");
        }
    }
}
