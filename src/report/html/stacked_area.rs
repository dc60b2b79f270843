//! A stacked area chart over time, as an SVG whose colours the stylesheet gives.

use plotters::prelude::*;

use super::{COLOURS, escape};
use crate::report::axes::{self, DrawError, SIZE, Unit};
use crate::report::text;

/// Values over time; each is drawn on top of those before it.
pub struct StackedArea {
    pub title: String,
    /// Seconds, in order.
    pub times: Vec<f64>,
    /// A name, and a value for each time.
    pub bands: Vec<(String, Vec<u64>)>,
}

impl StackedArea {
    /// The chart as a figure.
    pub fn html(&self) -> std::io::Result<String> {
        let at = |time: usize| self.bands.iter().map(move |(_, values)| values[time]);
        let total = |time: usize| at(time).sum::<u64>();
        let Some(highest) = (0..self.times.len()).max_by_key(|time| total(*time)) else {
            return Ok(String::new());
        };
        let (end, y1) = (self.times.last().copied().unwrap_or(0.0), 1.04 * (total(highest).max(1)) as f64);
        let mut svg = String::new();
        let draw = |svg: &mut String| -> Result<(), DrawError> {
            let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
            let (per_second, unit) = if end < 1e-3 {
                (1e6, "µs")
            } else if end < 1.0 {
                (1e3, "ms")
            } else {
                (1.0, "s")
            };
            let time = |x: f64| format!("{} {unit}", axes::short_number(x * per_second));
            let mut plot = axes::draw(&area, 0.0..end.max(1e-6), 0.0..y1, Unit::Bytes, &time)?;
            let scale = Unit::Bytes.scale(y1);
            let mut below = vec![0u64; self.times.len()];
            let mut labels = Vec::new();
            for (name, values) in &self.bands {
                let above: Vec<u64> = below.iter().zip(values).map(|(below, value)| below + value).collect();
                let upper = self.corners(&above).into_iter();
                let outline = upper.chain(self.corners(&below).into_iter().rev());
                let outline: Vec<_> = outline.map(|(time, bytes)| (time, bytes as f64 / scale)).collect();
                plot.draw_series([Polygon::new(outline, BLACK.filled())])?;
                labels.push((name.as_str(), (below[highest] + above[highest]) as f64 / 2.0));
                below = above;
            }
            axes::label_curves(&area, &labels, (0.0, y1))?;
            area.present()
        };
        draw(&mut svg).map_err(std::io::Error::other)?;
        let title = escape(&self.title);
        Ok(format!(
            "<figure class=stack><figcaption>{title}</figcaption>{}</figure>\n",
            self.with_classes(&svg, &title)
        ))
    }

    /// The corners of a line that keeps its value until the next time.
    fn corners(&self, values: &[u64]) -> Vec<(f64, u64)> {
        let mut corners: Vec<(f64, u64)> = Vec::new();
        for (time, value) in self.times.iter().zip(values) {
            match corners.last() {
                Some((_, last)) if last == value => {}
                Some((_, last)) => corners.extend([(*time, *last), (*time, *value)]),
                None => corners.push((*time, *value)),
            }
        }
        corners.extend(self.times.last().copied().zip(values.last().copied()));
        corners
    }

    /// Names the areas and their labels for the stylesheet.
    fn with_classes(&self, svg: &str, title: &str) -> String {
        let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
        let mut svg = svg.replacen(&size, &format!("role=img aria-label=\"{title}\" "), 1);
        let texts: Vec<usize> = svg.match_indices("<text ").map(|(at, _)| at).collect();
        // From the end, so that the positions before stay.
        for (band, at) in texts.iter().rev().take(self.bands.len()).enumerate() {
            let colour = (self.bands.len() - 1 - band) % COLOURS;
            svg.insert_str(at + "<text".len(), &format!(" class=\"label c{colour}\""));
        }
        for (band, (name, values)) in self.bands.iter().enumerate() {
            let most = text::bytes(values.iter().copied().max().unwrap_or(0));
            let title = format!("<title>{}, at most {most}</title></polygon>", escape(name));
            let Some(start) = svg.find("<polygon opacity") else { break };
            let Some(end) = svg[start..].find("/>").map(|end| start + end) else { break };
            svg.replace_range(end..end + 2, &format!(">{title}"));
            svg.insert_str(start + "<polygon".len(), &format!(" class=\"area c{}\"", band % COLOURS));
        }
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_band_has_an_area_and_a_label() {
        let area = StackedArea {
            title: "a <b>".into(),
            times: vec![0.0, 0.5, 1.0],
            bands: vec![("weights".into(), vec![8 << 20; 3]), ("batch".into(), vec![0, 4 << 20, 1 << 20])],
        };
        let html = area.html().unwrap();
        assert!(html.contains("class=\"area c0\"") && html.contains("class=\"area c1\""), "{html}");
        assert!(html.contains("<title>batch, at most 4.00 MiB</title></polygon>"), "{html}");
        assert_eq!(html.matches("class=\"label c").count(), 2);
        assert!(html.contains("a &lt;b&gt;") && html.contains("MiB"), "{html}");
        assert_eq!(area.corners(&[1, 1, 2]), [(0.0, 1), (1.0, 1), (1.0, 2), (1.0, 2)]);
    }
}
