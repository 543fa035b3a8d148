//! How long faults took, and how soon pages were asked for again, as `quire stat --histogram` prints it.
//!
//! Buckets double, so a quantile is known by the bucket it falls into: its upper end is printed. The
//! mean is that of the buckets' middles.

use std::fmt::Write as _;

use quire::control::{Event, FAULT_BUCKETS, FaultKind};

use super::output::{Format, grouped};
use crate::runs::counts::Counts;

const BAR: usize = 40;

struct Times<'a> {
    buckets: &'a [u64; FAULT_BUCKETS],
    count: u64,
    mean_ns: f64,
}

impl Times<'_> {
    fn of(counts: &Counts, kind: FaultKind) -> Times<'_> {
        let buckets = counts.fault_times(kind);
        let count = buckets.iter().sum();
        Times { buckets, count, mean_ns: counts.fault_seconds(kind) * 1e9 / count as f64 }
    }

    /// The time that so many percent of the faults stayed below.
    fn below_ns(&self, percent: u64) -> f64 {
        let wanted = (self.count * percent).div_ceil(100);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|&count| {
            seen += count;
            seen >= wanted
        });
        start_ns(bucket.unwrap_or(FAULT_BUCKETS - 1) + 1)
    }
}

fn start_ns(bucket: usize) -> f64 {
    2f64.powi(bucket as i32)
}

fn human(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.2} us", ns / 1e3),
        ..1e9 => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.2} s", ns / 1e9),
    }
}

/// The service times of every kind of fault that came.
pub(super) fn print(counts: &Counts, format: &Format) -> String {
    let mut text = String::new();
    for kind in FaultKind::ALL {
        let times = Times::of(counts, kind);
        if times.count == 0 {
            continue;
        }
        let [p50, p90, p99] = [50, 90, 99].map(|percent| times.below_ns(percent));
        let (kind, count, mean) = (kind.name(), times.count, times.mean_ns);
        let _ = match format {
            Format::Text => {
                text += &block(kind, &times);
                Ok(())
            }
            Format::Csv(separator) => {
                let line =
                    format!("{count},,fault-times:{kind},{mean:.0},{p50:.0},{p90:.0},{p99:.0}");
                writeln!(text, "{}", line.replace(',', separator))
            }
            Format::Json => writeln!(
                text,
                "{{\"fault-times\" : \"{kind}\", \"count\" : {count}, \"mean-ns\" : {mean:.0}, \
                 \"p50-ns\" : {p50:.0}, \"p90-ns\" : {p90:.0}, \"p99-ns\" : {p99:.0}, \
                 \"log2-buckets\" : {:?}}}",
                times.buckets
            ),
        };
    }
    if text.is_empty() && *format == Format::Text {
        text.push_str(" No fault was served.\n\n");
    }
    if *format == Format::Text {
        text += &refaults(counts);
    }
    text
}

/// How much left memory between a page and the fault that asked for it again. For programs the counts are
/// events.
fn refaults(counts: &Counts) -> String {
    let count = counts.of(Event::WorkingsetRefaultAnon);
    if count == 0 {
        return String::new();
    }
    let distances = Event::REFAULTS.map(|event| counts.of(event));
    let mut text = format!(
        " Refault distances of {} pages: what left meanwhile, in parts of the budget\n\n",
        grouped(count as f64)
    );
    let most = distances.iter().max().copied().unwrap_or(1).max(1);
    for (to, count) in ["1/16", "1/8", "1/4", "1/2", "1", "2", "4"].into_iter().zip(distances) {
        text += &line(count, most, &format!("up to {to}"));
    }
    text += &line(distances[7], most, "more");
    text.push('\n');
    text
}

/// A bucket that is not empty has a bar.
fn line(count: u64, most: u64, range: &str) -> String {
    let bar = "@".repeat((count as usize * BAR).div_ceil(most as usize));
    let line = format!("{:>18}      {range:<25} {bar}", grouped(count as f64));
    format!("{}\n", line.trim_end())
}

fn block(name: &str, times: &Times<'_>) -> String {
    let mut text = format!(
        " Service times of {} {name} faults: mean about {}, p50 < {}, p90 < {}, p99 < {}\n\n",
        grouped(times.count as f64),
        human(times.mean_ns),
        human(times.below_ns(50)),
        human(times.below_ns(90)),
        human(times.below_ns(99))
    );
    let is_used = |&bucket: &usize| times.buckets[bucket] != 0;
    let first = (0..FAULT_BUCKETS).find(is_used).unwrap_or(0);
    let last = (0..FAULT_BUCKETS).rfind(is_used).unwrap_or(0);
    let most = times.buckets.iter().max().copied().unwrap_or(1);
    for bucket in first..=last {
        let range = format!("[{}, {})", human(start_ns(bucket)), human(start_ns(bucket + 1)));
        text += &line(times.buckets[bucket], most, &range);
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        let mut counts = Counts::default();
        counts.set_fault_times(FaultKind::Fresh, 9, 10);
        counts.set_fault_times(FaultKind::Fresh, 10, 80);
        counts.set_fault_times(FaultKind::Fresh, 12, 9);
        counts.set_fault_times(FaultKind::Fresh, 20, 1);
        counts
    }

    #[test]
    fn a_kind_is_a_block() {
        let mut few = Counts::default();
        few.set_fault_times(FaultKind::File, 9, 1);
        few.set_fault_times(FaultKind::File, 11, 3);
        assert_eq!(
            print(&few, &Format::Text),
            " Service times of 4 file faults: mean about 2.50 us, p50 < 4.10 us, p90 < 4.10 us, \
             p99 < 4.10 us

                 1      [512 ns, 1.02 us)         @@@@@@@@@@@@@@
                 0      [1.02 us, 2.05 us)
                 3      [2.05 us, 4.10 us)        @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@

"
        );
        assert_eq!(print(&Counts::default(), &Format::Text), " No fault was served.\n\n");
    }

    #[test]
    fn distances_are_told_in_parts_of_the_budget() {
        let counts = Counts::of_events(&[
            (Event::WorkingsetRefaultAnon, 50),
            (Event::Refault16th, 10),
            (Event::RefaultTwice, 40),
        ]);
        let text = refaults(&counts);
        assert!(text.starts_with(" Refault distances of 50 pages: "), "{text}");
        assert!(text.contains("10      up to 1/16                @@@@@@@@@@\n"), "{text}");
        let full = format!("40      up to 2                   {}\n", "@".repeat(BAR));
        assert!(text.contains(&full), "{text}");
        assert!(text.ends_with("0      more\n\n"), "{text}");
        assert_eq!(refaults(&Counts::default()), "");
    }

    #[test]
    fn quantiles_are_the_ends_of_their_buckets() {
        let counts = counts();
        let times = Times::of(&counts, FaultKind::Fresh);
        assert_eq!(times.count, 100);
        for (percent, bucket) in
            [(1, 9), (10, 9), (11, 10), (90, 10), (91, 12), (99, 12), (100, 20)]
        {
            assert_eq!(times.below_ns(percent), start_ns(bucket + 1), "{percent}");
        }
        let mean = 1.5 * (512.0 * 10.0 + 1024.0 * 80.0 + 4096.0 * 9.0 + 1_048_576.0) / 100.0;
        assert!((times.mean_ns - mean).abs() < 1e-6);
    }

    #[test]
    fn machines_get_nanoseconds() {
        assert_eq!(
            print(&counts(), &Format::Csv(",".into())),
            "100,,fault-times:fresh,17587,2048,2048,8192\n"
        );
        let json = print(&counts(), &Format::Json);
        assert!(json.starts_with(
            "{\"fault-times\" : \"fresh\", \"count\" : 100, \"mean-ns\" : 17587, \"p50-ns\" : 2048, "
        ));
        assert!(json.contains("\"log2-buckets\" : [0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 80, 0, 9, 0, "));
        assert!(json.ends_with("0]}\n"));
    }

    #[test]
    fn times_are_read_by_people() {
        for (ns, text) in
            [(512.0, "512 ns"), (1024.0, "1.02 us"), (4_194_304.0, "4.19 ms"), (2e9, "2.00 s")]
        {
            assert_eq!(human(ns), text);
        }
    }
}
