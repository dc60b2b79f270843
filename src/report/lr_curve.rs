//! The curve of a learning-rate range test as an SVG: the loss of every update and the smoothed loss over the rate,
//! with the suggested rate.

use std::io;

use plotters::prelude::*;

use super::axes::{self, DrawError, SIZE, Unit};
use crate::tune::lr_range::{LrPoint, Suggestion};

/// Losses above this multiple of the first smoothed one are left out: the last ones before a divergence would flatten
/// the rest.
const MAX_LOSS_RATIO: f64 = 1.5;

const SUGGESTED: RGBColor = RGBColor(0xc1, 0x46, 0x00);
const SMOOTHED: RGBColor = RGBColor(0x00, 0x67, 0xb0);
const EACH: RGBColor = RGBColor(0xb0, 0xb8, 0xc0);

/// The chart; `None` if no update has a finite loss.
pub fn svg(points: &[LrPoint], suggestion: Option<Suggestion>) -> io::Result<Option<String>> {
    let highest = points.first().map_or(f64::INFINITY, |first| MAX_LOSS_RATIO * first.smoothed);
    let series = |of: fn(&LrPoint) -> f64| -> Vec<(f64, f64)> {
        let points = points.iter().map(|point| (point.lr.log10(), of(point)));
        points.filter(|(_, loss)| *loss <= highest).collect()
    };
    let (each, smoothed) = (series(|point| point.loss), series(|point| point.smoothed));
    let range = |of: fn(&(f64, f64)) -> f64| {
        let values = || each.iter().chain(&smoothed).map(of);
        (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max))
    };
    let ((x0, x1), (y0, y1)) = (range(|point| point.0), range(|point| point.1));
    if !(x0.is_finite() && y0.is_finite()) {
        return Ok(None);
    }
    let (x1, y1) = (if x1 > x0 { x1 } else { x0 + 1.0 }, if y1 > y0 { y1 } else { y0 + 1.0 });
    let mut svg = String::new();
    let draw = |svg: &mut String| -> Result<(), DrawError> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut plot =
            axes::draw(&area, x0..x1, y0..y1, Unit::Number, &|x| format!("{:.0e}", 10f64.powf(x)))?;
        plot.draw_series(LineSeries::new(each.iter().copied(), EACH.stroke_width(2)))?;
        plot.draw_series(LineSeries::new(smoothed.iter().copied(), SMOOTHED.stroke_width(4)))?;
        let mut labels = vec![("smoothed", smoothed.last().map_or(y0, |last| last.1))];
        let name;
        if let Some(found) = suggestion {
            let x = found.lr.log10();
            plot.draw_series(LineSeries::new([(x, y0), (x, y1)], SUGGESTED.stroke_width(3)))?;
            name = format!("lr {:.1e}", found.lr);
            labels.push((&name, y1));
        }
        axes::label_curves(&area, &labels, (y0, y1))?;
        area.present()
    };
    draw(&mut svg).map_err(io::Error::other)?;
    Ok(Some(svg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_ends_before_the_divergence() {
        let point = |step: u64, lr: f64, loss: f64| LrPoint { step, lr, loss, smoothed: loss };
        let points = [point(1, 1e-4, 2.0), point(2, 1e-3, 1.0), point(3, 1e-2, 0.5), point(4, 1e-1, 900.0)];
        let suggestion = Suggestion { lr: 3e-3, lr_at_minimum: 1e-2, loss_at_minimum: 0.5 };
        let svg = svg(&points, Some(suggestion)).unwrap().unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("lr 3.0e-3") && svg.contains("1e-2"), "{svg}");
        assert!(!svg.contains("1e-1") && !svg.contains("900"), "{svg}");
        assert_eq!(super::svg(&[point(1, 1e-4, f64::NAN)], None).unwrap(), None);
    }
}
