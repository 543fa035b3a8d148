//! The curve of a profile as SVG.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::curve::{Curve, Point};

const SIZE: (u32, u32) = (720, 520);
const FONT: &str = "sans-serif";

/// Time over memory above, pages that come back from swap below.
pub(super) fn draw(curve: &Curve<'_>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw_both(curve, &area).map_err(|error| anyhow!("cannot draw the curve: {error}"))?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn draw_both(curve: &Curve<'_>, area: &Area<'_>) -> Drawn {
    area.fill(&WHITE)?;
    let area = area.titled(&curve.profiled.command, (FONT, 16))?;
    let (above, below) = area.split_vertically(260);
    let time = |point: &Point| curve.slowdown(point);
    let pool = |point: &Point| point.misses.pool[0];
    let file = |point: &Point| point.misses.file[0];
    draw_one(curve, &above, "times as long", 1.0, &[("time", BLUE, &time)])?;
    let misses: [Line<'_>; 2] =
        [("from the pool", GREEN, &pool), ("from the swap file", RED, &file)];
    draw_one(curve, &below, "faults", 0.0, &misses)
}

/// A name, a colour, and the height of a point.
type Line<'a> = (&'a str, RGBColor, &'a dyn Fn(&Point) -> f64);

fn draw_one(
    curve: &Curve<'_>,
    area: &Area<'_>,
    what: &str,
    least: f64,
    lines: &[Line<'_>],
) -> Drawn {
    let points = &curve.points;
    // In MiB, so that the axis has round numbers.
    let x = |point: &Point| point.bytes as f64 / f64::from(1 << 20);
    let heights = lines.iter().flat_map(|(_, _, y)| points.iter().map(*y));
    let most = heights.fold(least + 1.0, f64::max);
    let right = x(&points[points.len() - 1]);
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(76)
        .build_cartesian_2d(x(&points[0]).min(right * 0.9)..right, least..most * 1.05)?;
    chart
        .configure_mesh()
        .x_labels(8)
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&|mib| format!("{mib:.0} MiB"))
        .y_label_formatter(&|height| short(*height))
        .y_desc(what)
        .label_style((FONT, 12))
        .draw()?;
    for (name, colour, y) in lines {
        let at = || points.iter().map(|point| (x(point), y(point)));
        let line = chart.draw_series(LineSeries::new(at(), *colour))?.label(*name);
        let colour = *colour;
        line.legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour));
        chart.draw_series(at().map(|place| Circle::new(place, 3, colour.filled())))?;
    }
    if let Some(knee) = curve.knee() {
        let (_, colour, y) = lines[0];
        let place = (x(knee), y(knee));
        chart.draw_series([Circle::new(place, 7, colour.stroke_width(2))])?;
    }
    if lines.len() == 1 {
        return Ok(());
    }
    chart.configure_series_labels().label_font((FONT, 12)).border_style(BLACK).draw()?;
    Ok(())
}

/// A number as it fits beside an axis.
fn short(number: f64) -> String {
    match number {
        1e6.. => format!("{}M", number / 1e6),
        1e4.. => format!("{}k", number / 1e3),
        _ => format!("{number}"),
    }
}
