//! What a profile says: time and misses over memory, and where the knee is.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::miniature::{Played, REGION_PAGES};
use super::misses::{Costs, Misses};
use crate::print::table::row;
use crate::size::Human;

/// A run that is so little slower is at full speed.
const FULL_SPEED: f64 = 1.05;
/// One that is so much slower is slow.
const SLOW: f64 = 1.5;
/// A curve without a point that lies so far below its chord has no knee.
const KNEE_MIN: f64 = 0.1;
const WIDTHS: [isize; 7] = [10, 8, 10, 11, 11, 11, 11];

/// What was seen of a run.
pub(super) struct Profiled {
    pub command: String,
    /// As long as it took, and without what sampling took of that.
    pub wall_seconds: f64,
    pub seconds: f64,
    /// The most memory at a time, what is not managed included.
    pub need_bytes: u64,
    /// A packed page's length, as a part of a page.
    pub packed: f64,
    /// One group of pages in so many was sampled at the end.
    pub one_in: u64,
    /// Records that were written over before they were read.
    pub lost: u64,
    pub costs: Costs,
    /// By budget, from the smallest on.
    pub results: Vec<Played>,
}

/// A budget, and what is expected there.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub bytes: u64,
    pub misses: Misses,
    pub seconds: f64,
    pub fits: bool,
}

pub(super) struct Curve<'a> {
    pub profiled: &'a Profiled,
    /// From the smallest budget on; the last is the need.
    pub points: Vec<Point>,
}

impl Curve<'_> {
    pub(super) fn of(profiled: &Profiled) -> Curve<'_> {
        let point = |played: &Played| Point {
            bytes: played.budget_bytes,
            misses: played.misses,
            seconds: profiled.seconds + played.misses.seconds(&profiled.costs),
            fits: played.fits,
        };
        let whole =
            Played { budget_bytes: profiled.need_bytes, misses: Misses::default(), fits: true };
        let mut points: Vec<Point> = profiled.results.iter().chain([&whole]).map(point).collect();
        // More memory does not make it slower: what says so is chance.
        for at in (0..points.len() - 1).rev() {
            points[at].seconds = points[at].seconds.max(points[at + 1].seconds);
        }
        Curve { profiled, points }
    }

    pub(super) fn slowdown(&self, point: &Point) -> f64 {
        point.seconds / self.profiled.seconds
    }

    /// The least budget with which the program is at full speed.
    fn full_speed(&self) -> &Point {
        let at_full_speed = |point: &&Point| point.fits && self.slowdown(point) <= FULL_SPEED;
        self.points.iter().find(at_full_speed).unwrap_or(&self.points[self.points.len() - 1])
    }

    /// Where the curve of what fits bends most: the point that lies farthest below the chord from one end to the other, the
    /// time as powers.
    pub(super) fn knee(&self) -> Option<&Point> {
        let points: Vec<&Point> = self.points.iter().filter(|point| point.fits).collect();
        let [first, last] = [*points.first()?, *points.last()?];
        let depth = |point: &Point| {
            let across = (point.bytes - first.bytes) as f64 / (last.bytes - first.bytes) as f64;
            let fallen = (first.seconds / point.seconds).ln() / (first.seconds / last.seconds).ln();
            fallen - across
        };
        let inner = points[1..].split_last()?.1;
        let knee = *inner.iter().max_by(|one, other| depth(one).total_cmp(&depth(other)))?;
        (first.seconds > last.seconds * FULL_SPEED && depth(knee) > KNEE_MIN).then_some(knee)
    }

    /// What full speed takes, where it gets slow, and the knee, in words.
    fn words(&self) -> String {
        let full = self.full_speed();
        let need = self.profiled.need_bytes;
        let mut words = format!("{} needs {} at most", self.profiled.command, Human(need));
        let times = |point: &Point| format!("{:.1} times as long", self.slowdown(point));
        if self.points.len() == 1 {
            return words + ", about the least budget that there is";
        }
        if full.bytes < need {
            let _ = write!(words, "; with {} it is within 5 % of full speed", Human(full.bytes));
        }
        let mut below = self.points.iter().rev().filter(|point| point.fits);
        let slow = below.find(|point| self.slowdown(point) >= SLOW);
        if let Some(point) = slow {
            let _ = write!(words, "; with {} it takes {}", Human(point.bytes), times(point));
        }
        if let Some(knee) = self.knee() {
            let _ = write!(words, "; the knee is at {}: {}", Human(knee.bytes), times(knee));
        }
        if let Some(least) = self.points.iter().find(|point| point.fits)
            && least.bytes > self.points[0].bytes
        {
            let _ = write!(words, "; below {} it needs a swap file", Human(least.bytes));
        }
        words
    }

    pub(super) fn text(&self) -> String {
        let Profiled { wall_seconds, seconds, packed, one_in, lost, .. } = self.profiled;
        let heads = ["memory", "time", "seconds", "from pool", "from file", "from limbo", "pages"];
        let mut text = row(&WIDTHS, "  ", &heads) + "\n";
        for point in &self.points {
            let pages = |pages: f64| format!("{pages:.0}");
            let cells = [
                Human(point.bytes).to_string(),
                if point.fits { format!("{:.2}x", self.slowdown(point)) } else { "no room".into() },
                format!("{:.2}", point.seconds),
                pages(point.misses.pool[0]),
                pages(point.misses.file[0]),
                pages(point.misses.limbo),
                pages(point.misses.swapped_in()),
            ];
            text += &(row(&WIDTHS, "  ", &cells) + "\n");
        }
        let _ = writeln!(text, "{}", self.words());
        let _ = writeln!(
            text,
            "expected, in pages of 4 KiB and seconds, from a run of {wall_seconds:.2} s of which sampling took \
             {:.2} s; pages pack to {:.0} %; one region of {REGION_PAGES} pages in {one_in} was sampled",
            wall_seconds - seconds,
            packed * 100.0
        );
        if *lost > 0 {
            let _ = writeln!(
                text,
                "{lost} records were lost, as the machine was busy, or a process was killed: the curve shows fewer misses than there are"
            );
        }
        text
    }

    pub(super) fn json(&self) -> String {
        let Profiled {
            command,
            wall_seconds,
            seconds,
            need_bytes,
            packed,
            one_in,
            lost,
            costs,
            ..
        } = self.profiled;
        let point = |point: &Point| {
            json!({
                "memory_bytes": point.bytes,
                "fits": point.fits,
                "seconds": point.seconds,
                "slowdown": self.slowdown(point),
                "faults_from_pool": point.misses.pool[0],
                "faults_from_file": point.misses.file[0],
                "faults_from_limbo": point.misses.limbo,
                "pages_swapped_in": point.misses.swapped_in(),
            })
        };
        let value = json!({
            "command": command,
            "need_bytes": need_bytes,
            "wall_seconds": wall_seconds,
            "seconds": seconds,
            "packed_part": packed,
            "sampled_one_in": one_in,
            "records_lost": lost,
            "costs_ns": {
                "limbo": costs.limbo,
                "pool": costs.pool[0],
                "page_along_from_pool": costs.pool[1],
                "file": costs.file[0],
                "page_along_from_file": costs.file[1],
                "unpack": costs.unpack,
            },
            "full_speed_bytes": self.full_speed().bytes,
            "knee_bytes": self.knee().map(|knee| knee.bytes),
            "curve": self.points.iter().map(point).collect::<Vec<Value>>(),
        });
        format!("{value:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const COSTS: Costs = Costs {
        limbo: 10_000.0,
        pool: [50_000.0, 5_000.0],
        file: [200_000.0, 10_000.0],
        unpack: 1_000.0,
    };

    /// A run of ten seconds that needs 100 MiB, with so many faults on the pool at each budget.
    fn profiled(faults: &[(u64, f64)]) -> Profiled {
        let played = |&(mib, faults): &(u64, f64)| Played {
            budget_bytes: mib * MIB,
            misses: Misses { pool: [faults, 0.0], ..Misses::default() },
            fits: true,
        };
        Profiled {
            command: "job".into(),
            wall_seconds: 12.0,
            seconds: 10.0,
            need_bytes: 100 * MIB,
            packed: 0.33,
            one_in: 4,
            lost: 0,
            costs: COSTS,
            results: faults.iter().map(played).collect(),
        }
    }

    #[test]
    fn the_words_name_full_speed_where_it_gets_slow_and_the_knee() {
        let knee = [(30, 1e6), (50, 8e5), (60, 6e4), (80, 5e3)];
        let profiled = profiled(&knee);
        let curve = Curve::of(&profiled);
        assert_eq!(
            curve.words(),
            "job needs 100 MiB at most; with 80 MiB it is within 5 % of full speed; with 50 MiB it takes 5.0 \
             times as long; the knee is at 60 MiB: 1.3 times as long"
        );
        let json: Value = serde_json::from_str(&curve.json()).unwrap();
        assert_eq!(json["knee_bytes"], 60 * MIB);
        assert_eq!(json["curve"][0]["seconds"], 60.0);
        assert_eq!(json["curve"][4]["slowdown"], 1.0);
        assert!(
            curve.text().contains("60 MiB     1.30x       13.00        60000"),
            "{}",
            curve.text()
        );
    }

    #[test]
    fn a_straight_curve_has_no_knee_and_a_small_program_no_curve() {
        let straight = [(40, 2e6), (60, 9e5), (80, 3e5)];
        assert!(Curve::of(&profiled(&straight)).knee().is_none());
        let small = profiled(&[]);
        let curve = Curve::of(&small);
        assert!(curve.knee().is_none());
        assert_eq!(
            curve.words(),
            "job needs 100 MiB at most, about the least budget that there is"
        );
    }

    #[test]
    fn more_memory_is_never_slower_and_what_does_not_fit_is_said() {
        let mut profiled = profiled(&[(30, 1e4), (50, 2e5), (60, 3e5)]);
        profiled.results[0].fits = false;
        let curve = Curve::of(&profiled);
        assert!(curve.points.is_sorted_by(|one, other| one.seconds >= other.seconds));
        assert!(curve.words().ends_with("below 50 MiB it needs a swap file"), "{}", curve.words());
        assert!(curve.text().contains("no room"));
    }
}
