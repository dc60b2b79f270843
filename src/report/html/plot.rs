//! A chart of one evaluation: bars or points between two numeric axes, as an SVG with its exact numbers as JSON.

use plotters::prelude::*;

use super::escape;
use crate::report::axes::{LEFT, LINE, SIZE, TOP, short_number};

/// Room for labels and the name of the axis.
const BOTTOM: i32 = 84;
const RIGHT: i32 = 40;

/// An axis: its name and its range, which is not empty.
pub struct Axis {
    pub name: &'static str,
    pub range: (f64, f64),
}

/// From zero, over an interval of the horizontal axis.
pub struct Bar {
    pub from: f64,
    pub to: f64,
    pub height: f64,
}

pub struct Plot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub bars: Vec<Bar>,
    pub points: Vec<(f64, f64)>,
    /// Whether to draw where both axes are equal.
    pub diagonal: bool,
    /// Below the chart.
    pub note: String,
    /// Its numbers, as JSON.
    pub data: String,
}

impl Plot {
    /// The plot as a figure.
    pub fn html(&self) -> Result<String, std::io::Error> {
        let ((x0, x1), (y0, y1)) = (self.x.range, self.y.range);
        let mut svg = String::new();
        let draw = |svg: &mut String| -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
            let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
            let mut chart = ChartBuilder::on(&area)
                .margin_top(TOP)
                .margin_right(RIGHT)
                .x_label_area_size(BOTTOM)
                .y_label_area_size(LEFT)
                .build_cartesian_2d(x0..x1, y0..y1)?;
            chart
                .configure_mesh()
                .disable_x_mesh()
                .light_line_style(TRANSPARENT)
                .x_labels(6)
                .y_labels(5)
                .x_desc(self.x.name)
                .y_desc(self.y.name)
                .label_style(("sans-serif", LINE))
                .axis_desc_style(("sans-serif", LINE))
                .x_label_formatter(&|x| short_number(*x))
                .y_label_formatter(&|y| short_number(*y))
                .draw()?;
            let bar = |bar: &Bar| Rectangle::new([(bar.from, 0.0), (bar.to, bar.height)], BLACK.filled());
            chart.draw_series(self.bars.iter().map(bar))?;
            chart.draw_series(self.points.iter().map(|point| Circle::new(*point, 5, BLACK.filled())))?;
            if self.diagonal {
                let ends = [x0.max(y0), x1.min(y1)].map(|end| (end, end));
                chart.draw_series([PathElement::new(ends.to_vec(), BLACK)])?;
            }
            area.present()
        };
        draw(&mut svg).map_err(std::io::Error::other)?;
        if self.diagonal
            && let Some(at) = svg.rfind("<polyline ")
        {
            svg.insert_str(at + "<polyline".len(), " class=\"s limit\"");
        }
        let title = escape(&self.title);
        let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
        let svg = svg.replacen(&size, &format!("role=img aria-label=\"{title}\" "), 1);
        Ok(format!(
            "<figure class=plot><figcaption>{title}</figcaption>{}<p class=note>{}</p>\
             <script type=\"application/json\">{}</script></figure>\n",
            svg.trim_end(),
            escape(&self.note),
            self.data
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_its_bars_its_points_and_the_diagonal() {
        let plot = Plot {
            title: "a <plot>".into(),
            x: Axis { name: "confidence", range: (0.0, 1.0) },
            y: Axis { name: "accuracy", range: (0.0, 1.0) },
            bars: vec![Bar { from: 0.0, to: 0.5, height: 0.25 }, Bar { from: 0.5, to: 1.0, height: 0.75 }],
            points: vec![(0.1, 0.1), (0.9, 0.8), (0.5, 0.5)],
            diagonal: true,
            note: "so & so".into(),
            data: crate::report::html::json_text(&"</script>"),
        };
        let html = plot.html().unwrap();
        assert_eq!((html.matches("<rect ").count(), html.matches("<circle ").count()), (2, 3), "{html}");
        assert_eq!(html.matches("class=\"s limit\"").count(), 1);
        assert!(
            html.contains("a &lt;plot&gt;") && html.contains("so &amp; so") && html.contains("confidence")
        );
        assert_eq!(html.matches("</script>").count(), 1, "a text ends no script");
    }
}
