//! The variants of a compressed model as a table, and as an SVG of quality over size.

use std::io;

use plotters::prelude::*;

use super::axes::{self, DrawError, SIZE, Unit};
use super::text;
use crate::inference::compress::{Frontier, Variant};

const CHOSEN: RGBColor = RGBColor(0xc1, 0x46, 0x00);
const FRONTIER: RGBColor = RGBColor(0x00, 0x67, 0xb0);
const OTHER: RGBColor = RGBColor(0xb0, 0xb8, 0xc0);

/// `rank 1/2, 80 % zero, int8`.
pub fn describe(variant: &Variant) -> String {
    let lowrank = variant.lowrank.map(|ratio| format!("low rank {ratio}"));
    let sparse = (variant.sparsity > 0.0).then(|| format!("{} zero", text::percent(variant.sparsity, 1.0)));
    let parts: Vec<String> = lowrank.into_iter().chain(sparse).chain([variant.dtype.to_owned()]).collect();
    parts.join(", ")
}

/// A row per variant, the smallest last.
pub fn lines(frontier: &Frontier) -> Vec<String> {
    let header = ["variant", "file", "gzipped", "smaller", frontier.metric, "lost", ""];
    let mut order: Vec<usize> = (0..frontier.variants.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(frontier.variants[index].gzipped_bytes), index));
    let row = |index: &usize| {
        let variant = &frontier.variants[*index];
        let mark = match (frontier.chosen == Some(*index), variant.on_frontier) {
            (true, _) => "chosen",
            (false, true) => "frontier",
            (false, false) => "",
        };
        vec![
            describe(variant),
            text::bytes(variant.bytes),
            text::bytes(variant.gzipped_bytes),
            format!("{:.2}x", variant.ratio),
            format!("{:.4}", variant.metric),
            format!("{:+.4}", variant.loss),
            mark.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> =
        std::iter::once(header.map(str::to_owned).to_vec()).chain(order.iter().map(row)).collect();
    text::table("lrrrrrl", 0, &rows)
}

/// The chart: the metric over the gzipped size, with a line along the frontier.
pub fn svg(frontier: &Frontier) -> io::Result<String> {
    let point = |variant: &Variant| (variant.gzipped_bytes as f64, variant.metric);
    let finite: Vec<&Variant> = frontier.variants.iter().filter(|one| one.metric.is_finite()).collect();
    let range = |of: fn(&Variant) -> f64| {
        let values = || finite.iter().map(|variant| of(variant));
        let (low, high) =
            (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let margin = if high > low { 0.05 * (high - low) } else { 1.0 };
        (low - margin, high + margin)
    };
    let ((x0, x1), (y0, y1)) = (range(|one| one.gzipped_bytes as f64), range(|one| one.metric));
    let mut best: Vec<(f64, f64)> =
        finite.iter().filter(|one| one.on_frontier).map(|one| point(one)).collect();
    best.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut svg = String::new();
    let draw = |svg: &mut String| -> Result<(), DrawError> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut plot =
            axes::draw(&area, x0.max(0.0)..x1, y0..y1, Unit::Number, &|x| text::bytes(x.max(0.0) as u64))?;
        plot.draw_series(LineSeries::new(best.iter().copied(), FRONTIER.stroke_width(3)))?;
        let dots = |of: &dyn Fn(usize, &Variant) -> bool, color: RGBColor, size: i32| {
            let found = frontier.variants.iter().enumerate().filter(|(i, one)| of(*i, one));
            let found: Vec<(f64, f64)> =
                found.map(|(_, one)| point(one)).filter(|p| p.1.is_finite()).collect();
            found.into_iter().map(move |at| Circle::new(at, size, color.filled()))
        };
        plot.draw_series(dots(&|_, one| !one.on_frontier, OTHER, 6))?;
        plot.draw_series(dots(&|_, one| one.on_frontier, FRONTIER, 7))?;
        plot.draw_series(dots(&|index, _| frontier.chosen == Some(index), CHOSEN, 9))?;
        let chosen = frontier.chosen.map(|index| ("chosen", frontier.variants[index].metric));
        axes::label_curves(&area, &chosen.into_iter().collect::<Vec<_>>(), (y0, y1))?;
        area.present()
    };
    draw(&mut svg).map_err(io::Error::other)?;
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frontier() -> Frontier {
        let variant = |dtype, sparsity, gzipped_bytes: u64, metric: f64, on_frontier| Variant {
            lowrank: (sparsity > 0.0).then(|| "2x".parse().unwrap()),
            sparsity,
            dtype,
            bytes: 2048,
            gzipped_bytes,
            ratio: 2000.0 / gzipped_bytes as f64,
            metric,
            loss: 0.99 - metric,
            on_frontier,
        };
        let variants = vec![
            variant("f32", 0.0, 2000, 0.99, true),
            variant("int8", 0.5, 250, 0.98, true),
            variant("f32", 0.8, 500, 0.5, false),
        ];
        Frontier { metric: "accuracy", variants, chosen: Some(1) }
    }

    #[test]
    fn the_table_is_ordered_by_size() {
        let lines = lines(&frontier());
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("variant") && lines[0].contains("accuracy"), "{}", lines[0]);
        assert!(lines[1].starts_with("f32") && lines[1].ends_with("frontier"), "{}", lines[1]);
        assert!(
            lines[2].contains("low rank 2x, 80.0 % zero, f32") && lines[2].contains("4.00x"),
            "{}",
            lines[2]
        );
        assert!(lines[3].contains("+0.0100") && lines[3].ends_with("chosen"), "{}", lines[3]);
    }

    #[test]
    fn the_chart_has_a_dot_per_variant() {
        let svg = svg(&frontier()).unwrap();
        // The chosen one has two.
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
        assert!(svg.contains("chosen"), "{svg}");
    }
}
