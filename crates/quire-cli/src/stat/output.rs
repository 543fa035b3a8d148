//! What `quire stat` prints, in the three formats of `perf stat`: for people, csv, JSON lines.

use std::fmt::Write as _;

use quire::control::Event;
use quire::units::PAGE_SIZE;

use crate::events::Selected;
use crate::runs::counts::Counts;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Text,
    Csv(String),
    Json,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub counts: Counts,
    pub seconds: f64,
}

/// An event over all rounds.
struct Figure<'a> {
    label: &'a str,
    value: f64,
    /// The standard error of the mean, in percent of it.
    noise_percent: f64,
    metric: Metric,
    runtime_ns: f64,
}

struct Metric {
    value: f64,
    unit: &'static str,
}

/// The mean of a value over all rounds.
struct Mean {
    value: f64,
    /// The standard error of the mean.
    error: f64,
}

impl Mean {
    fn over(rounds: &[Round], value_of: impl Fn(&Round) -> f64) -> Mean {
        let count = rounds.len() as f64;
        let value = rounds.iter().map(&value_of).sum::<f64>() / count;
        let squares: f64 = rounds.iter().map(|round| (value_of(round) - value).powi(2)).sum();
        let error = if rounds.len() < 2 { 0.0 } else { (squares / (count - 1.0) / count).sqrt() };
        Mean { value, error }
    }

    fn noise_percent(&self) -> f64 {
        percent(self.error, self.value)
    }
}

impl<'a> Figure<'a> {
    fn new(selected: &'a Selected, rounds: &[Round]) -> Figure<'a> {
        let mean = |event| Mean::over(rounds, |round| round.counts.of(event) as f64);
        let count = mean(selected.event);
        let seconds = Mean::over(rounds, |round| round.seconds).value;
        Figure {
            label: &selected.label,
            value: count.value,
            noise_percent: count.noise_percent(),
            metric: metric(selected.event, count.value, seconds, |event| mean(event).value),
            runtime_ns: seconds * 1e9,
        }
    }
}

/// A part in percent; nothing of nothing is none.
fn percent(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { 100.0 * part / whole }
}

fn metric(event: Event, value: f64, seconds: f64, mean: impl Fn(Event) -> f64) -> Metric {
    let per_second = |value: f64| if seconds > 0.0 { value / seconds } else { 0.0 };
    let each_takes = |what| Metric { value: value / 1e3 / mean(what).max(1.0), unit: "us each" };
    match event {
        Event::Pgmajfault
        | Event::SpeculativePgfault
        | Event::SpfVmaChanged
        | Event::SpfVmaNoanon
        | Event::SpfVmaNotsup
        | Event::SpfVmaAccess
        | Event::SpfPmdChanged
        | Event::PgactivateLimbo
        | Event::Allocstall
        | Event::FaultParked
        | Event::FaultClassic => {
            Metric { value: percent(value, mean(Event::Pgfault)), unit: "% of faults" }
        }
        Event::Pswpin | Event::Pswpout | Event::Zswpin | Event::Zswpout | Event::Zswpwb => {
            Metric { value: per_second(value) * PAGE_SIZE as f64 / 1e6, unit: "MB/sec" }
        }
        Event::WorkingsetRefaultAnon => {
            Metric { value: percent(value, mean(Event::Pswpout)), unit: "% of what went out" }
        }
        Event::ZswpoutBytes => {
            let packed = mean(Event::Zswpout) * PAGE_SIZE as f64;
            Metric { value: if value == 0.0 { 0.0 } else { packed / value }, unit: "to 1" }
        }
        Event::UnmapNs | Event::CompressNs => {
            Metric { value: per_second(value) / 1e9, unit: "CPUs utilized" }
        }
        Event::AllocstallNs => each_takes(Event::Allocstall),
        Event::SwapReadNs => each_takes(Event::Pgmajfault),
        Event::Refault16thNs => each_takes(Event::Refault16th),
        _ => match per_second(value) {
            rate @ 1e9.. => Metric { value: rate / 1e9, unit: "G/sec" },
            rate @ 1e6.. => Metric { value: rate / 1e6, unit: "M/sec" },
            rate @ 1e3.. => Metric { value: rate / 1e3, unit: "K/sec" },
            rate => Metric { value: rate, unit: "/sec" },
        },
    }
}

/// A number as people read it: `1,234,567`.
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn line(figure: &Figure<'_>, format: &Format, interval: Option<f64>, rounds: usize) -> String {
    let Figure { label, value, noise_percent, metric, runtime_ns } = figure;
    match format {
        Format::Text => {
            let mut line = interval.map_or(String::new(), |time| format!("{time:>16.9} "));
            let _ = write!(
                line,
                "{:>18}      {label:<25} # {:>8.3} {:<18}",
                grouped(*value),
                metric.value,
                metric.unit
            );
            if *noise_percent != 0.0 {
                let _ = write!(line, "  ( +-{noise_percent:>6.2}% )");
            }
            line.truncate(line.trim_end().len());
            line
        }
        Format::Csv(separator) => {
            let time = interval.map(|time| format!("{time:>16.9}"));
            let noise = (rounds > 1).then(|| format!("{noise_percent:.2}%"));
            let mut fields: Vec<String> = time.into_iter().collect();
            fields.extend([format!("{value:.0}"), String::new(), (*label).to_owned()]);
            fields.extend(noise);
            fields.extend([format!("{runtime_ns:.0}"), "100.00".into()]);
            fields.extend([format!("{:.3}", metric.value), metric.unit.to_owned()]);
            fields.join(separator)
        }
        Format::Json => {
            let mut line = String::from("{");
            if let Some(time) = interval {
                let _ = write!(line, "\"interval\" : {time:.9}, ");
            }
            let _ = write!(
                line,
                "\"counter-value\" : \"{value:.6}\", \"unit\" : \"\", \"event\" : \"{label}\", "
            );
            if rounds > 1 {
                let _ = write!(line, "\"variance\" : {noise_percent:.2}, ");
            }
            let _ = write!(
                line,
                "\"event-runtime\" : {runtime_ns:.0}, \"pcnt-running\" : 100.00, \
                 \"metric-value\" : \"{:.6}\", \"metric-unit\" : \"{}\"}}",
                metric.value, metric.unit
            );
            line
        }
    }
}

/// What an interval came to, `time` seconds after the start.
pub(super) fn interval(selected: &[Selected], round: &Round, time: f64, format: &Format) -> String {
    let rounds = std::slice::from_ref(round);
    let lines = selected.iter().map(|selected| Figure::new(selected, rounds));
    lines.map(|figure| line(&figure, format, Some(time), 1) + "\n").collect()
}

/// What stands over the lines of intervals, for people.
pub(super) fn interval_header() -> String {
    format!("#{:>15} {:>18}      events\n", "time", "counts")
}

pub(super) fn summary(
    selected: &[Selected],
    rounds: &[Round],
    title: &str,
    format: &Format,
) -> String {
    let lines = selected.iter().map(|selected| Figure::new(selected, rounds));
    let lines: String =
        lines.map(|figure| line(&figure, format, None, rounds.len()) + "\n").collect();
    if *format != Format::Text {
        return lines;
    }
    let repeated = match rounds.len() {
        1 => String::new(),
        count => format!(" ({count} runs)"),
    };
    let seconds = Mean::over(rounds, |round| round.seconds);
    let elapsed = if rounds.len() == 1 {
        format!("{:>18.9} seconds time elapsed", seconds.value)
    } else {
        format!(
            "{:>18.6} +- {:.6} seconds time elapsed  ( +-{:>6.2}% )",
            seconds.value,
            seconds.error,
            seconds.noise_percent()
        )
    };
    format!("\n Performance counter stats for {title}{repeated}:\n\n{lines}\n{elapsed}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::select_events;

    fn selected() -> Vec<Selected> {
        select_events(&["faults,spf,pswpout,pagefault:spf_vma_changed,allocstall".into()]).unwrap()
    }

    fn round(faults: u64, seconds: f64) -> Round {
        let counts = Counts::of_events(&[
            (Event::Pgfault, faults),
            (Event::SpeculativePgfault, faults / 4 * 3),
            (Event::Pswpout, 2_500_000),
            (Event::SpfVmaChanged, 7),
        ]);
        Round { counts, seconds }
    }

    #[test]
    fn one_run_looks_as_perf_has_it() {
        let text = summary(&selected(), &[round(1_234_568, 2.0)], "'sort big'", &Format::Text);
        assert_eq!(
            text,
            "
 Performance counter stats for 'sort big':

         1,234,568      faults                    #  617.284 K/sec
           925,926      spf                       #   75.000 % of faults
         2,500,000      pswpout                   # 5120.000 MB/sec
                 7      pagefault:spf_vma_changed #    0.001 % of faults
                 0      allocstall                #    0.000 % of faults

       2.000000000 seconds time elapsed

"
        );
    }

    #[test]
    fn the_time_of_a_wait_is_told_by_waits() {
        let counts = |event| match event {
            Event::Pgmajfault => 4.0,
            Event::Allocstall => 2.0,
            _ => 0.0,
        };
        for (event, each) in [(Event::SwapReadNs, 75.0), (Event::AllocstallNs, 150.0)] {
            let metric = metric(event, 300_000.0, 1.0, counts);
            assert_eq!((metric.value, metric.unit), (each, "us each"), "{event:?}");
        }
    }

    #[test]
    fn repeated_runs_have_a_mean_and_say_how_sure_it_is() {
        let rounds = [round(100, 1.0), round(108, 1.5), round(104, 2.0)];
        let text = summary(&selected()[..3], &rounds, "'x'", &Format::Text);
        assert_eq!(
            text,
            "
 Performance counter stats for 'x' (3 runs):

               104      faults                    #   69.333 /sec                ( +-  2.22% )
                78      spf                       #   75.000 % of faults         ( +-  2.22% )
         2,500,000      pswpout                   # 6826.667 MB/sec

          1.500000 +- 0.288675 seconds time elapsed  ( +- 19.25% )

"
        );
    }

    #[test]
    fn csv_has_perfs_fields() {
        let format = Format::Csv(",".into());
        let selected = &selected()[..2];
        assert_eq!(
            summary(selected, &[round(2000, 2.0)], "'x'", &format),
            "2000,,faults,2000000000,100.00,1.000,K/sec\n\
             1500,,spf,2000000000,100.00,75.000,% of faults\n"
        );
        assert_eq!(
            summary(&selected[..1], &[round(90, 1.0), round(110, 1.0)], "'x'", &format),
            "100,,faults,10.00%,1000000000,100.00,100.000,/sec\n"
        );
        assert_eq!(
            interval(&selected[..1], &round(40, 0.5), 1.5, &Format::Csv(";".into())),
            "     1.500000000;40;;faults;500000000;100.00;80.000;/sec\n"
        );
    }

    #[test]
    fn json_is_an_object_a_line() {
        let selected = &selected()[..1];
        assert_eq!(
            summary(selected, &[round(90, 1.0), round(110, 1.0)], "'x'", &Format::Json),
            "{\"counter-value\" : \"100.000000\", \"unit\" : \"\", \"event\" : \"faults\", \
             \"variance\" : 10.00, \"event-runtime\" : 1000000000, \"pcnt-running\" : 100.00, \
             \"metric-value\" : \"100.000000\", \"metric-unit\" : \"/sec\"}\n"
        );
        assert_eq!(
            interval(selected, &round(40, 0.5), 1.5, &Format::Json),
            "{\"interval\" : 1.500000000, \"counter-value\" : \"40.000000\", \"unit\" : \"\", \
             \"event\" : \"faults\", \"event-runtime\" : 500000000, \"pcnt-running\" : 100.00, \
             \"metric-value\" : \"80.000000\", \"metric-unit\" : \"/sec\"}\n"
        );
    }

    #[test]
    fn intervals_have_their_time_in_front() {
        assert_eq!(
            interval_header() + &interval(&selected()[..1], &round(40, 0.5), 1.5, &Format::Text),
            "#           time             counts      events\n     \
             1.500000000                 40      faults                    #   80.000 /sec\n"
        );
    }

    #[test]
    fn every_event_has_a_metric_that_is_a_number() {
        for selected in select_events(&["*".into()]).unwrap() {
            for seconds in [0.0, 1.0] {
                let round = Round { counts: Counts::default(), seconds };
                let figure = Figure::new(&selected, &[round]);
                assert!(figure.metric.value.is_finite(), "{}", selected.label);
            }
        }
    }

    #[test]
    fn digits_are_grouped() {
        for (value, text) in
            [(0.0, "0"), (999.6, "1,000"), (123_456.0, "123,456"), (1e6, "1,000,000")]
        {
            assert_eq!(grouped(value), text);
        }
    }
}
