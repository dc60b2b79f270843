//! A line chart in characters, for terminals and text files.

/// Rows of a chart, with the highest and lowest value at its left and a label under each end. Of several points in a
/// column, their mean is drawn. Values that are not finite are left out.
pub fn lines(values: &[f64], ends: (&str, &str), columns: usize, rows: usize) -> Vec<String> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = (finite().fold(f64::INFINITY, f64::min), finite().fold(f64::NEG_INFINITY, f64::max));
    if low > high || columns == 0 || rows < 2 {
        return Vec::new();
    }
    let columns = columns.min(values.len());
    let mean = |column: usize| {
        let part = &values[column * values.len() / columns..(column + 1) * values.len() / columns];
        let part: Vec<f64> = part.iter().copied().filter(|value| value.is_finite()).collect();
        (!part.is_empty()).then(|| part.iter().sum::<f64>() / part.len() as f64)
    };
    let row_of = |value: f64| match high > low {
        true => ((high - value) / (high - low) * (rows - 1) as f64).round() as usize,
        false => rows - 1,
    };
    let drawn: Vec<Option<usize>> = (0..columns).map(|column| mean(column).map(row_of)).collect();
    let labels = [super::text::number(high), super::text::number(low)];
    let width = labels.iter().map(String::len).max().unwrap_or(0);
    let mut lines: Vec<String> = (0..rows)
        .map(|row| {
            let label = match row {
                0 => labels[0].as_str(),
                row if row == rows - 1 => labels[1].as_str(),
                _ => "",
            };
            let cells: String = drawn.iter().map(|at| if *at == Some(row) { '*' } else { ' ' }).collect();
            format!("{label:>width$} |{cells}").trim_end().to_owned()
        })
        .collect();
    lines.push(format!("{:>width$} +{}", "", "-".repeat(columns)));
    let gap = columns.saturating_sub(ends.0.len() + ends.1.len()).max(1);
    lines.push(format!("{:>width$}  {}{}{}", "", ends.0, " ".repeat(gap), ends.1));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_has_the_mean_of_its_points() {
        let chart = lines(&[4.0, 2.0, 2.0, 0.0, f64::NAN, 1.0], ("a", "b"), 3, 3);
        assert_eq!(chart, ["4.0000 |", "       |*", "0.0000 | **", "       +---", "        a b"]);
        assert!(lines(&[f64::NAN], ("a", "b"), 10, 4).is_empty());
        assert_eq!(lines(&[1.0, 1.0], ("", ""), 10, 2)[1], "1.0000 |**");
    }
}
