//! What is reported about the columns of a table: one line each, and warnings about inputs that identify rows.

use super::TableSettings;
use super::column_encoder::ColumnEncoder;
use super::columns::Column;
use super::statistics::{ColumnStatistics, TableStatistics};
use crate::base::units::counted;

/// What is reported about a column.
pub fn describe_column(
    column: &Column,
    encoder: &ColumnEncoder,
    stats: Option<&ColumnStatistics>,
    settings: &TableSettings,
) -> String {
    let target = if column.target { "target: " } else { "" };
    let notation = column.notation.describe();
    let missing = |missing: u64| if missing > 0 { format!(", {missing} missing") } else { String::new() };
    match (encoder, stats) {
        (ColumnEncoder::Number { .. }, Some(ColumnStatistics::Number(moments))) => {
            let (mean, std) = (format_number(moments.mean), format_number(moments.std()));
            let how = match (settings.standardise, moments.std() > 0.0) {
                (false, _) => ", not standardized",
                (true, true) => "",
                (true, false) => ", constant: 0 after standardization",
            };
            format!("{target}number{notation}, mean {mean}, std {std}{}{how}", missing(moments.missing))
        }
        (ColumnEncoder::Number { .. }, _) => format!("{target}number{notation}, not standardized"),
        (ColumnEncoder::Class { list }, _) => format!("{target}{}", counted(list.len() as u64, "class")),
        (ColumnEncoder::Labels { list }, _) => {
            format!("{target}any number of {}", counted(list.len() as u64, "label"))
        }
        (ColumnEncoder::Flag { .. }, Some(ColumnStatistics::Category(counts))) => {
            let present = counts.values.get("1").copied().unwrap_or(0);
            format!("{target}label of {}", counted(present, "training row"))
        }
        (ColumnEncoder::Flag { .. }, _) => format!("{target}label"),
        (ColumnEncoder::Weight, Some(ColumnStatistics::Number(moments))) => {
            format!("sample weight, mean {}", format_number(moments.mean))
        }
        (ColumnEncoder::Weight, _) => "sample weight".into(),
        (ColumnEncoder::OneHot { list, .. } | ColumnEncoder::Ordinal { list, .. }, stats) => {
            let lacking =
                if let Some(ColumnStatistics::Category(counts)) = stats { counts.missing } else { 0 };
            let how = if settings.embed { ", embedded" } else { "" };
            {
                let values = counted(list.len() as u64, "value");
                format!("{target}category of {values}{}{how}", missing(lacking))
            }
        }
    }
}

/// Six significant digits are enough to recognize a column.
fn format_number(x: f64) -> String {
    if x != 0.0 && !(1e-3..1e7).contains(&x.abs()) {
        return format!("{x:.3e}");
    }
    let digits = 5usize.saturating_sub(x.abs().max(1.0).log10() as usize);
    format!("{x:.digits$}")
}

/// Categorical inputs with a category for each row, or nearly.
pub fn identifier_warnings(columns: &[Column], statistics: Option<&TableStatistics>) -> Vec<String> {
    const MIN_ROWS: u64 = 20;
    const MIN_VALUES: u64 = 32;
    let Some(statistics) = statistics.filter(|statistics| statistics.rows >= MIN_ROWS) else {
        return Vec::new();
    };
    let is_nearly_each = |values: u64| values >= MIN_VALUES && 4 * values >= statistics.rows;
    let each = columns.iter().zip(&statistics.columns).filter(|(column, _)| !column.target);
    each.filter_map(|(column, found)| match found {
        ColumnStatistics::Category(counts) if counts.values.len() as u64 == statistics.rows => Some(format!(
            "column `{}` has as many values as training rows, {}: no value is seen twice, add it to `ignore`",
            column.name, statistics.rows
        )),
        ColumnStatistics::Category(counts) if is_nearly_each(counts.values.len() as u64) => Some(format!(
            "column `{}` has {} different values in {} training rows, most of them seen a few times at most: if they \
             are quantities, write them as numbers; otherwise consider `ignore`",
            column.name,
            counts.values.len(),
            statistics.rows
        )),
        _ => None,
    })
    .collect()
}
