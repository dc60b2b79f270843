//! One chart: an SVG that reads without a script, and its points as JSON for hovering, zooming and other axes.

use plotters::prelude::*;
use serde_json::json;

use super::escape;
use crate::history::Point;
use crate::report::axes::{self, DrawError, LINE, SIZE, Unit};

/// How a curve looks, with or without colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Of every update: a line that can be smoothed.
    Updates,
    /// Of evaluations: a line with a marker at each.
    Evaluations,
    /// As [`Evaluations`](Self::Evaluations), dotted.
    TrainEvaluations,
    /// A plan or a budget: dashed.
    Limit,
}

impl Style {
    fn class(self) -> &'static str {
        match self {
            Self::Updates => "updates",
            Self::Evaluations => "evals",
            Self::TrainEvaluations => "evals train",
            Self::Limit => "limit",
        }
    }
}

pub struct Series {
    /// Number of the run.
    pub run: usize,
    pub label: String,
    pub style: Style,
    pub points: Vec<Point>,
}

/// A marker on the step axis, with a tooltip.
pub struct Mark {
    pub run: usize,
    pub at: Point,
    pub symbol: &'static str,
    pub text: String,
}

pub struct Chart {
    pub title: String,
    pub unit: Unit,
    pub from_zero: bool,
    pub series: Vec<Series>,
    pub marks: Vec<Mark>,
    /// Below the chart.
    pub note: Option<String>,
}

impl Chart {
    /// The chart as a figure.
    pub fn html(&self) -> Result<String, std::io::Error> {
        let ((x0, x1), (y0, y1)) = self.ranges();
        let mut svg = String::new();
        let draw = |svg: &mut String| -> Result<(), DrawError> {
            let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
            let mut chart = axes::draw(&area, x0..x1, y0..y1, self.unit, &axes::short_number)?;
            let unit = self.unit.scale(y1);
            axes::label_curves(&area, &self.labels(y0), (y0, y1))?;
            for series in &self.series {
                let points = series.points.iter().map(|point| (point.step as f64, point.value / unit));
                chart.draw_series(LineSeries::new(points, BLACK.stroke_width(3)))?;
            }
            area.present()
        };
        draw(&mut svg).map_err(std::io::Error::other)?;
        let svg = self.with_classes(&svg);
        let title = escape(&self.title);
        let note = self.note.as_deref().map(|note| format!("<p class=note>{}</p>", escape(note)));
        Ok(format!(
            "<figure class=chart><figcaption>{title}</figcaption>{svg}{}\
             <script type=\"application/json\">{}</script></figure>\n",
            note.unwrap_or_default(),
            super::json_text(&self.json((x0, x1), (y0, y1)))
        ))
    }

    /// Ranges of steps and of values, never empty.
    pub fn ranges(&self) -> ((f64, f64), (f64, f64)) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
            if low <= high { (low, high) } else { (0.0, 1.0) }
        };
        let (x0, x1) = range(&mut points().map(|point| point.step as f64));
        let (y0, y1) = range(&mut points().map(|point| point.value));
        let margin = if y1 > y0 { 0.04 * (y1 - y0) } else { (y1.abs() * 0.1).max(1e-12) };
        let y0 = if self.from_zero { 0.0 } else { y0 - margin };
        ((x0, if x1 > x0 { x1 } else { x0 + 1.0 }), (y0, y1 + margin))
    }

    /// The label of each curve, and its last value.
    fn labels(&self, lowest: f64) -> Vec<(&str, f64)> {
        let last = |series: &Series| series.points.last().map_or(lowest, |point| point.value);
        self.series.iter().map(|series| (series.label.as_str(), last(series))).collect()
    }

    /// Names the elements for the stylesheet and the script, and adds the marks.
    fn with_classes(&self, svg: &str) -> String {
        let count = self.series.len();
        let mut lines: Vec<usize> = svg.rmatch_indices("<polyline ").map(|(at, _)| at).take(count).collect();
        lines.reverse();
        let mut texts: Vec<usize> = svg.match_indices("<text ").map(|(at, _)| at).collect();
        let labels = texts.split_off(texts.len().saturating_sub(count));
        let mut insertions: Vec<(usize, String)> = Vec::new();
        // The curves of a single run have colours of their own; with several, each run has one.
        let is_single = self.series.iter().all(|series| series.run == 0);
        for (at, ((series, line), label)) in self.series.iter().zip(&lines).zip(&labels).enumerate() {
            let alone = if series.points.len() == 1 { " evals" } else { "" };
            let colour = if is_single { at } else { series.run };
            let class = format!("c{colour} {}{alone}", series.style.class());
            insertions.push((line + "<polyline".len(), format!(" class=\"s {class}\"")));
            insertions.push((label + "<text".len(), format!(" class=\"label c{colour}\"")));
        }
        insertions.sort_unstable_by_key(|(at, _)| *at);
        let (mut out, mut from) = (String::with_capacity(svg.len() + 4096), 0);
        for (at, text) in insertions {
            out += &svg[from..at];
            out += &text;
            from = at;
        }
        let rest = svg[from..].trim_end();
        out += rest.strip_suffix("</svg>").unwrap_or(rest);
        out += &self.marks_svg();
        out += "</svg>";
        let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
        out.replacen(&size, &format!("role=img aria-label=\"{}\" ", escape(&self.title)), 1)
    }

    fn marks_svg(&self) -> String {
        let ((x0, x1), _) = self.ranges();
        let [left, top, right, bottom] = axes::rect();
        let mark = |(number, mark): (usize, &Mark)| {
            // Symbols of one step stand one below the other.
            let above = self.marks[..number].iter().filter(|other| other.at.step == mark.at.step).count();
            let row = (above as i32).min((bottom - top) / LINE - 1);
            let fraction = ((mark.at.step as f64 - x0) / (x1 - x0)).clamp(0.0, 1.0);
            let x = f64::from(left) + fraction * f64::from(right - left);
            format!(
                "<g class=\"mark c{}\" transform=\"translate({x:.1},0)\"><title>{}</title>\
                 <line y1=\"{top}\" y2=\"{bottom}\"/><text y=\"{}\" text-anchor=\"middle\">{}</text></g>",
                mark.run,
                escape(&mark.text),
                top + LINE * (row + 1) - 4,
                mark.symbol
            )
        };
        self.marks.iter().enumerate().map(mark).collect()
    }

    fn json(&self, x: (f64, f64), y: (f64, f64)) -> serde_json::Value {
        let columns = |points: &[Point]| {
            let time = |point: &Point| (point.time * 1e3).round() / 1e3;
            json!({
                "step": points.iter().map(|point| point.step).collect::<Vec<_>>(),
                "samples": points.iter().map(|point| point.samples).collect::<Vec<_>>(),
                "time": points.iter().map(time).collect::<Vec<_>>(),
            })
        };
        let series = |series: &Series| {
            let mut columns = columns(&series.points);
            columns["run"] = json!(series.run);
            columns["label"] = json!(series.label);
            columns["smooth"] = json!(series.style == Style::Updates);
            columns["holds"] = json!(series.style == Style::Limit);
            columns["value"] = series.points.iter().map(|point| number(point.value)).collect();
            columns
        };
        let mark = |mark: &Mark| {
            let at = mark.at;
            json!({ "run": mark.run, "step": at.step, "samples": at.samples, "time": at.time, "text": mark.text })
        };
        json!({
            "unit": self.unit.name(),
            "zero": self.from_zero,
            "rect": axes::rect(),
            "x": [x.0, x.1],
            "y": [y.0, y.1],
            "series": self.series.iter().map(series).collect::<Vec<_>>(),
            "marks": self.marks.iter().map(mark).collect::<Vec<_>>(),
        })
    }
}

/// A value as short as it is exact.
fn number(value: f64) -> serde_json::Value {
    match value.fract() == 0.0 && value.abs() < 2f64.powi(53) {
        true => json!(value as i64),
        false => json!(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let point = |step: u64, value| Point { step, samples: 8 * step, time: step as f64 / 3.0, value };
        let series = |label: &str, style, points| Series { run: 0, label: label.into(), style, points };
        Chart {
            title: "a <loss>".into(),
            unit: Unit::Number,
            from_zero: false,
            series: vec![
                series("each", Style::Updates, vec![point(1, 0.1 + 0.2), point(2, 0.5), point(9, 4.0)]),
                series("valid", Style::Evaluations, vec![point(9, 0.25)]),
            ],
            marks: vec![Mark { run: 0, at: point(5, 0.0), symbol: "▼", text: "shrunk & so on".into() }],
            note: None,
        }
    }

    #[test]
    fn a_chart_is_a_figure_with_its_exact_points() {
        let html = chart().html().unwrap();
        assert!(
            html.contains("class=\"s c0 updates\"") && html.contains("class=\"s c1 evals evals\""),
            "{html}"
        );
        assert!(html.contains("<title>shrunk &amp; so on</title>") && html.contains("a &lt;loss&gt;"));
        assert_eq!(html.matches("class=\"label c").count(), 2);
        let json = html.split("application/json\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(data["series"][0]["value"], json!([0.1 + 0.2, 0.5, 4]));
        assert_eq!(data["series"][0]["step"], json!([1, 2, 9]));
        assert_eq!(data["x"], json!([1.0, 9.0]));
    }
}
