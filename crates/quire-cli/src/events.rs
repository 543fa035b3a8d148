//! Which events and tracepoints are shown: lists of names, aliases and patterns, as `-e` takes them.

use std::fmt::Write as _;

use anyhow::{Result, bail};
use quire::control::{Event, Tracepoint};

/// Names that events go by beside their own; [`Event::by_name`] knows them too.
const ALIASES: [&str; 5] = ["faults", "page-faults", "major-faults", "spf", "speculative-faults"];

/// What is shown where nothing is asked for.
const DEFAULT: [&str; 9] = [
    "faults",
    "spf",
    "major-faults",
    "pswpin",
    "pswpout",
    "zswpout",
    "workingset_refault_anon",
    "pgactivate_limbo",
    "allocstall",
];

/// An event, by the name that was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selected {
    pub label: String,
    pub event: Event,
}

/// The events of several comma lists, in their order, each name once.
pub(crate) fn select_events(lists: &[String]) -> Result<Vec<Selected>> {
    let mut selected: Vec<Selected> = Vec::new();
    let mut add = |label: &str, event| {
        if selected.iter().all(|selected| selected.label != label) {
            selected.push(Selected { label: label.to_owned(), event });
        }
    };
    let names =
        if lists.is_empty() { DEFAULT.to_vec() } else { names_in(lists).collect::<Vec<_>>() };
    for name in names {
        let matches = match Event::by_name(name) {
            Some(event) => vec![(name, event)],
            None => matching(name),
        };
        if matches.is_empty() {
            bail!("there is no event '{name}'; there are:{}", all_names());
        }
        matches.into_iter().for_each(|(name, event)| add(name, event));
    }
    Ok(selected)
}

/// The tracepoints that lists of names and patterns mean; all where nothing is asked for.
pub(crate) fn select_tracepoints(lists: &[String]) -> Result<Vec<Tracepoint>> {
    if lists.is_empty() {
        return Ok(Tracepoint::ALL.to_vec());
    }
    let mut selected = Vec::new();
    for name in names_in(lists) {
        let is_meant = |point: &Tracepoint| {
            let (_, short) = point.name().split_once(':').unwrap_or_default();
            glob(name, point.name()) || glob(name, short)
        };
        let before = selected.len();
        selected.extend(Tracepoint::ALL.into_iter().filter(is_meant));
        if selected.len() == before {
            let names = Tracepoint::ALL.map(|point| format!("\n  {}", point.name())).concat();
            bail!("there is no tracepoint '{name}'; there are:{names}");
        }
    }
    Ok(selected)
}

/// The names in several comma lists.
fn names_in(lists: &[String]) -> impl Iterator<Item = &str> {
    lists.iter().flat_map(|list| list.split(',')).map(str::trim)
}

/// The events that a pattern means. One with a colon is for tracepoints, whose events have names
/// without one as well: none is shown twice.
fn matching(pattern: &str) -> Vec<(&'static str, Event)> {
    if !pattern.contains(['*', '?']) {
        return Vec::new();
    }
    let own = Event::ALL.map(|event| (event.name(), event));
    let traced = Tracepoint::ALL.map(|point| (point.name(), point.event()));
    let all = if pattern.contains(':') { traced.to_vec() } else { own.to_vec() };
    all.into_iter().filter(|(name, _)| glob(pattern, name)).collect()
}

/// All names, a few a line.
fn all_names() -> String {
    const WIDTH: usize = 96;
    let own = Event::ALL.iter().map(|event| event.name());
    let traced = Tracepoint::ALL.iter().map(|point| point.name());
    let mut text = String::new();
    let mut column = WIDTH;
    for name in ALIASES.into_iter().chain(own).chain(traced) {
        if column + name.len() + 1 > WIDTH {
            text.push_str("\n ");
            column = 1;
        }
        let _ = write!(text, " {name}");
        column += name.len() + 1;
    }
    text
}

/// Whether `name` is as `pattern` says: `*` is any text, `?` any character.
fn glob(pattern: &str, name: &str) -> bool {
    fn matches(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern, name) {
            ([], _) => name.is_empty(),
            // A star after a star adds nothing.
            ([b'*', rest @ ..], _) if rest.first() == Some(&b'*') => matches(rest, name),
            ([b'*', rest @ ..], _) => (0..=name.len()).any(|taken| matches(rest, &name[taken..])),
            ([sign, rest @ ..], [first, others @ ..]) => {
                (*sign == b'?' || sign == first) && matches(rest, others)
            }
            (_, []) => false,
        }
    }
    matches(pattern.as_bytes(), name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(lists: &[&str]) -> Vec<String> {
        let lists: Vec<String> = lists.iter().map(|&list| list.to_owned()).collect();
        select_events(&lists).unwrap().into_iter().map(|selected| selected.label).collect()
    }

    #[test]
    fn lists_keep_their_order_and_every_name_once() {
        assert_eq!(
            labels(&["pswpout,faults", "pgfault,faults, spf"]),
            ["pswpout", "faults", "pgfault", "spf"],
            "an alias is a name of its own"
        );
        assert_eq!(labels(&[]), DEFAULT);
        let selected =
            select_events(&["speculative-faults,pagefault:spf_vma_changed".into()]).unwrap();
        assert_eq!(selected[0].event, Event::SpeculativePgfault);
        assert_eq!(selected[1].event, Event::SpfVmaChanged);
    }

    #[test]
    fn patterns_mean_all_that_match() {
        let traced: Vec<&str> = Tracepoint::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(labels(&["pagefault:*"]), traced);
        assert_eq!(labels(&["spf_*"]), traced.iter().map(|name| &name[10..]).collect::<Vec<_>>());
        assert_eq!(labels(&["*"]).len(), Event::ALL.len(), "no event twice");
        assert_eq!(labels(&["pswp?n,pgmajfaul?"]), ["pswpin", "pgmajfault"]);
    }

    #[test]
    fn an_unknown_event_is_answered_with_those_that_exist() {
        for list in ["bogus", "faults,bogus", "bogus*", "nosuch:*", "", "faults,,spf"] {
            let error = select_events(&[list.to_owned()]).unwrap_err().to_string();
            assert!(error.starts_with("there is no event '"), "{error}");
            for name in ALIASES.into_iter().chain(Event::ALL.iter().map(|event| event.name())) {
                assert!(error.split_whitespace().any(|word| word == name), "{name}: {error}");
            }
            assert!(error.contains(" pagefault:spf_pmd_changed"), "{error}");
            assert!(error.lines().all(|line| line.len() <= 100), "{error}");
        }
    }

    #[test]
    fn every_alias_is_an_event() {
        for name in ALIASES.into_iter().chain(DEFAULT) {
            assert!(Event::by_name(name).is_some(), "{name}");
        }
    }

    #[test]
    fn stars_take_as_much_as_they_must() {
        for (pattern, name) in [
            ("*", ""),
            ("**", "x"),
            ("a*c", "abcbc"),
            ("a*b*c", "aXbYbZc"),
            ("?", "x"),
            ("a*", "a"),
        ] {
            assert!(glob(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a*c", "abcb"), ("?", ""), ("a", "ab"), ("", "a"), ("a?", "a")] {
            assert!(!glob(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn tracepoints_are_chosen_by_name_and_pattern() {
        let select = |list: &str| select_tracepoints(&[list.to_owned()]);
        assert_eq!(select("pagefault:*").unwrap(), Tracepoint::ALL);
        assert_eq!(
            select("spf_vma_changed,pagefault:spf_pmd_changed").unwrap(),
            [Tracepoint::SpfVmaChanged, Tracepoint::SpfPmdChanged]
        );
        assert_eq!(select_tracepoints(&[]).unwrap(), Tracepoint::ALL);
        let error = select("faults").unwrap_err().to_string();
        assert!(error.starts_with("there is no tracepoint 'faults'; there are:\n  pagefault:"));
    }
}
