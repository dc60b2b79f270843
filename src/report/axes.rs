//! The axes of an SVG chart: its size, how values are written, and the labels of its curves.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::text;

pub type DrawError = DrawingAreaErrorKind<std::io::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type PlotContext<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Size in pixels. Pages show it at about half of that, so that whole pixels are fine enough.
pub const SIZE: (u32, u32) = (960, 520);
/// Room for the labels of the axes, and of the curves at the right.
pub const LEFT: i32 = 145;
const BOTTOM: i32 = 50;
const RIGHT: i32 = 170;
pub const TOP: i32 = 14;
/// Height of a line of text.
pub const LINE: i32 = 28;

/// What a value is, which decides how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Number,
    Percent,
    Bytes,
    PerSecond,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Percent => "percent",
            Self::Bytes => "bytes",
            Self::PerSecond => "rate",
        }
    }

    /// The unit that values up to `highest` are divided by to have round labels.
    pub fn scale(self, highest: f64) -> f64 {
        match self {
            Self::Bytes => 1024f64.powf((highest.max(1.0).log2() / 10.0).floor()),
            _ => 1.0,
        }
    }

    pub fn format(self, value: f64) -> String {
        match self {
            Self::Number => short_number(value),
            Self::Percent => format!("{} %", short_number(value)),
            Self::Bytes => text::bytes(value.max(0.0) as u64),
            Self::PerSecond => short_number(value),
        }
    }
}

/// Three significant digits.
pub fn short_number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        a if (1e-3..1e4).contains(&a) => {
            let digits = (2 - a.log10().floor() as i32).clamp(0, 5) as usize;
            let text = format!("{value:.digits$}");
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
                false => text,
            }
        }
        a if (1e4..1e15).contains(&a) => {
            let (unit, name) = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
                .into_iter()
                .find(|(unit, _)| a >= *unit)
                .unwrap_or((1.0, ""));
            format!("{}{name}", (value / unit * 10.0).round() / 10.0)
        }
        _ => format!("{value:.1e}"),
    }
}

/// The axes of these ranges. Values are drawn divided by the scale of their unit for the highest of them.
pub fn draw<'a, 'b>(
    area: &'a Area<'b>,
    x: Range<f64>,
    y: Range<f64>,
    unit: Unit,
    x_label: &dyn Fn(f64) -> String,
) -> Result<PlotContext<'a, 'b>, DrawError> {
    // Round labels of bytes are multiples of a binary unit.
    let scale = unit.scale(y.end);
    let mut plot = ChartBuilder::on(area)
        .margin_top(TOP)
        .margin_right(RIGHT)
        .x_label_area_size(BOTTOM)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(x, y.start / scale..y.end / scale)?;
    plot.configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(5)
        .y_labels(5)
        .label_style(("sans-serif", LINE))
        .x_label_formatter(&|x| x_label(*x))
        .y_label_formatter(&|y| unit.format(*y * scale))
        .draw()?;
    Ok(plot)
}

/// The rectangle of the curves: left, top, right, bottom.
pub fn rect() -> [i32; 4] {
    [LEFT, TOP, SIZE.0 as i32 - RIGHT, SIZE.1 as i32 - BOTTOM]
}

/// Each label at the right of its value, moved down where it would cover another.
pub fn label_curves(area: &Area, labels: &[(&str, f64)], (y0, y1): (f64, f64)) -> Result<(), DrawError> {
    let [_, top, right, bottom] = rect();
    let place = |value: f64| top + ((y1 - value) / (y1 - y0) * f64::from(bottom - top)) as i32;
    let wanted: Vec<i32> = labels.iter().map(|(_, value)| place(*value)).collect();
    let style = ("sans-serif", LINE).into_text_style(area).pos(Pos::new(HPos::Left, VPos::Center));
    for ((label, _), y) in labels.iter().zip(spread(&wanted, LINE, top, bottom)) {
        area.draw(&Text::new(*label, (right + 10, y), style.clone()))?;
    }
    Ok(())
}

/// Moves positions apart by at least `gap`, in their order, between `low` and `high`.
fn spread(wanted: &[i32], gap: i32, low: i32, high: i32) -> Vec<i32> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|at| (wanted[*at], *at));
    let mut placed = vec![0; wanted.len()];
    let mut next = low;
    for at in &order {
        placed[*at] = wanted[*at].max(next);
        next = placed[*at] + gap;
    }
    let mut limit = high;
    for at in order.iter().rev() {
        placed[*at] = placed[*at].min(limit);
        limit = placed[*at] - gap;
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_their_distance_and_stay_inside() {
        assert_eq!(spread(&[50, 10, 52], 20, 0, 100), [50, 10, 70]);
        assert_eq!(spread(&[95, 96, 97], 20, 0, 100), [60, 80, 100]);
        assert!(spread(&[], 20, 0, 100).is_empty());
    }

    #[test]
    fn axis_labels_are_short() {
        let shown = [0.0, 0.25, 1234.0, 12_000.0, 3_450_000.0, 3e-5, -2.5].map(short_number);
        assert_eq!(shown, ["0", "0.25", "1234", "12k", "3.5M", "3.0e-5", "-2.5"]);
        // The marks of an axis differ, however small its values are.
        assert_eq!([0.0, 0.002, 50.0].map(|x| Unit::Percent.format(x)), ["0 %", "0.002 %", "50 %"]);
    }
}
