//! A plot as SVG: a line for each of several ways, over what they were measured at.
//!
//! It needs no script: the browser itself shows the value of a point that the pointer rests on, and
//! the colours are those of the page.

use std::fmt::{self, Write as _};

use super::html::escaped;
use super::report::number;

/// Lines that the colours of the page tell apart.
pub(crate) const COLOURS: usize = 8;
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 34.0;
/// Above this ratio of the largest to the smallest the vertical axis is one of powers.
const LOGARITHMIC_FROM: f64 = 30.0;

/// Median, least and most.
type Point = Option<[f64; 3]>;

pub(crate) struct Plot {
    /// What is measured.
    pub y: String,
    /// At what, from left to right.
    pub x: Vec<String>,
    pub lines: Vec<(String, Vec<Point>)>,
}

/// A vertical axis.
struct Axis {
    low: f64,
    high: f64,
    is_logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Axis {
        let high = values.clone().fold(0.0, f64::max);
        let low = values.filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
        if low.is_finite() && high / low > LOGARITHMIC_FROM {
            let power = |value: f64| 10f64.powf(value);
            let (low, high) = (power(low.log10().floor()), power(high.log10().ceil()));
            return Axis { low, high, is_logarithmic: true };
        }
        Axis { low: 0.0, high: if high > 0.0 { high * 1.05 } else { 1.0 }, is_logarithmic: false }
    }

    fn at(&self, value: f64) -> f64 {
        let part = match self.is_logarithmic {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => value / self.high,
        };
        HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            let powers = (self.high / self.low).log10().round() as i32;
            return (0..=powers).map(|power| self.low * 10f64.powi(power)).collect();
        }
        let rough = self.high / 4.0;
        let unit = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * unit);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let ticks = (0..=10).map(|tick| f64::from(tick) * step);
        ticks.take_while(|tick| *tick <= self.high).collect()
    }
}

impl Plot {
    fn x_at(&self, index: usize) -> f64 {
        let width = WIDTH - LEFT - RIGHT;
        match self.x.len() {
            0 | 1 => LEFT + width / 2.0,
            count => LEFT + 10.0 + (width - 20.0) * index as f64 / (count - 1) as f64,
        }
    }

    fn line(&self, axis: &Axis, index: usize, svg: &mut String) {
        let (name, points) = &self.lines[index];
        let colour = index % COLOURS;
        let found = points.iter().enumerate().filter_map(|(at, point)| Some((at, (*point)?)));
        let found: Vec<(usize, [f64; 3])> = found.collect();
        let path = found
            .iter()
            .map(|(at, [median, ..])| format!("{:.1},{:.1}", self.x_at(*at), axis.at(*median)));
        let path: Vec<String> = path.collect();
        let _ = writeln!(svg, r#"<polyline class="c{colour}" points="{}"/>"#, path.join(" "));
        for (at, [median, min, max]) in found {
            let x = self.x_at(at);
            let [low, middle, high] = [min, median, max].map(|value| axis.at(value));
            let _ = writeln!(
                svg,
                r#"<g class="c{colour}"><line x1="{x:.1}" x2="{x:.1}" y1="{low:.1}" y2="{high:.1}"/><circle cx="{x:.1}" cy="{middle:.1}" r="4"/><title>{}, {}: {} ({} to {})</title></g>"#,
                escaped(name),
                escaped(&self.x[at]),
                number(median),
                number(min),
                number(max)
            );
        }
    }
}

impl fmt::Display for Plot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.lines.iter().flat_map(|(_, points)| points.iter().flatten().flatten());
        let axis = Axis::of(values.copied());
        let mut svg = format!(
            r#"<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">"#,
            escaped(&self.y)
        );
        svg.push('\n');
        for tick in axis.ticks() {
            let y = axis.at(tick);
            let _ = writeln!(
                svg,
                r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}"/><text class="y" x="{:.1}" y="{:.1}">{}</text>"#,
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
                number(tick)
            );
        }
        for (index, name) in self.x.iter().enumerate() {
            let _ = writeln!(
                svg,
                r#"<text class="x" x="{:.1}" y="{:.1}">{}</text>"#,
                self.x_at(index),
                HEIGHT - BOTTOM + 20.0,
                escaped(name)
            );
        }
        (0..self.lines.len()).for_each(|index| self.line(&axis, index, &mut svg));
        svg.push_str("</svg>\n");
        let keys = self.lines.iter().enumerate().map(|(index, (name, _))| {
            format!(r#"<span class="c{}">{}</span>"#, index % COLOURS, escaped(name))
        });
        let keys: Vec<String> = keys.collect();
        write!(
            f,
            "<figure><figcaption>{}{}</figcaption>\n{svg}<p class=\"keys\">{}</p></figure>\n",
            escaped(&self.y),
            if axis.is_logarithmic { ", by powers of ten" } else { "" },
            keys.join(" ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<Point>) -> String {
        let x = (0..points.len()).map(|at| at.to_string()).collect();
        Plot { y: "seconds".into(), x, lines: vec![("a<b".into(), points)] }.to_string()
    }

    #[test]
    fn a_point_says_what_it_is_and_a_hole_is_left_out() {
        let svg = plot(vec![Some([2.0, 1.0, 3.0]), None, Some([4.0, 4.0, 4.0])]);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("<title>a&lt;b, 0: 2 (1 to 3)</title>"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn small_and_large_values_stand_on_an_axis_of_powers() {
        let svg = plot(vec![Some([0.5; 3]), Some([5000.0; 3])]);
        assert!(svg.contains("by powers of ten") && svg.contains(">10.0k<"));
        let low = Axis::of([0.5, 5000.0].into_iter());
        assert!(low.at(0.5) > low.at(5.0) && low.at(5000.0) >= TOP);
    }

    #[test]
    fn nothing_and_zeros_are_drawn_without_complaint() {
        for points in [vec![], vec![None], vec![Some([0.0; 3])]] {
            let svg = plot(points);
            assert!(svg.contains("</svg>") && !svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        let ticks = Axis::of([7.3].into_iter()).ticks();
        assert_eq!(ticks, [0.0, 2.0, 4.0, 6.0]);
    }
}
