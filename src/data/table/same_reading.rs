//! Whether two tables are read the same way, so that a model trained on one accepts the samples of the other.

use super::TableSettings;
use super::categories::sorted_names;
use super::column_encoder::{ColumnEncoder, number_encoder};
use super::columns::{Column, ColumnKind};
use super::schema::TableSchema;
use super::statistics::{CategoryCounts, ColumnStatistics, Moments};

/// How much two means may differ, in standard deviations, and two standard deviations, relatively: by rounding. More
/// columns in a file change its partitions, and so the order in which the same numbers are summed.
const ROUNDING: f64 = 1e-9;

/// A column, its statistics and the settings that it is read with.
struct ReadColumn<'a> {
    column: &'a Column,
    statistics: Option<&'a ColumnStatistics>,
    settings: &'a TableSettings,
}

impl TableSchema {
    /// Whether this schema and these settings turn rows into the same inputs and targets as another. Sample weights,
    /// the order of columns in the file, and statistics that no sample depends on are ignored.
    pub fn reads_like(&self, settings: &TableSettings, other: &Self, of_other: &TableSettings) -> bool {
        let (here, there) = (self.read_columns(settings), other.read_columns(of_other));
        here.len() == there.len() && here.iter().zip(&there).all(|(one, other)| one.is_like(other))
    }

    fn read_columns<'a>(&'a self, settings: &'a TableSettings) -> Vec<ReadColumn<'a>> {
        let read = |(i, column): (usize, &'a Column)| {
            let statistics = self.statistics.as_ref().and_then(|statistics| statistics.columns.get(i));
            ReadColumn { column, statistics, settings }
        };
        self.columns.iter().enumerate().filter(|(_, column)| !column.weight).map(read).collect()
    }
}

impl ReadColumn<'_> {
    fn is_like(&self, other: &ReadColumn<'_>) -> bool {
        let without_place = |column: &Column| Column { index: 0, ..column.clone() };
        without_place(self.column) == without_place(other.column)
            && match self.column.kind {
                ColumnKind::Number => self.has_numbers_of(other),
                ColumnKind::Category if !self.column.target => self.has_categories_of(other),
                // The names of classes and labels are those of the features.
                ColumnKind::Category | ColumnKind::Labels | ColumnKind::Flag => true,
            }
    }

    fn has_numbers_of(&self, other: &ReadColumn<'_>) -> bool {
        let encoder = |one: &ReadColumn<'_>| number_encoder(one.column, one.moments(), one.settings, &mut 0);
        let (
            ColumnEncoder::Number { mean, scale, fill, flag, .. },
            ColumnEncoder::Number {
                mean: other_mean,
                scale: other_scale,
                fill: other_fill,
                flag: other_flag,
                ..
            },
        ) = (encoder(self), encoder(other))
        else {
            return false;
        };
        let spread = self.moments().map_or(0.0, Moments::std);
        let is_close = |a: f64, b: f64| a == b || (a - b).abs() <= ROUNDING * (spread + a.abs());
        // A column without missing values is never filled.
        let has_missing =
            [self, other].iter().any(|one| one.moments().is_some_and(|moments| moments.missing > 0));
        let fills_alike = match (fill, other_fill) {
            (Some(fill), Some(other_fill)) if has_missing => is_close(fill, other_fill),
            _ => true,
        };
        is_close(mean, other_mean)
            && (scale - other_scale).abs() <= ROUNDING * scale
            && fills_alike
            && flag.is_some() == other_flag.is_some()
    }

    fn has_categories_of(&self, other: &ReadColumn<'_>) -> bool {
        let categories = |one: &ReadColumn<'_>| {
            let none = CategoryCounts::default();
            let counts =
                if let Some(ColumnStatistics::Category(counts)) = one.statistics { counts } else { &none };
            (sorted_names(counts), counts.missing > 0, one.settings.embed)
        };
        categories(self) == categories(other)
    }

    fn moments(&self) -> Option<&Moments> {
        match self.statistics {
            Some(ColumnStatistics::Number(moments)) => Some(moments),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::table::MissingPolicy;
    use crate::table::notation::Notation;
    use crate::table::statistics::TableStatistics;

    fn column(name: &str, index: usize, kind: ColumnKind) -> Column {
        let (target, weight) = (name == "y", false);
        Column { name: name.into(), index, kind, target, weight, notation: Notation::Plain, element: None }
    }

    fn moments(mean: f64, missing: u64) -> ColumnStatistics {
        let moments = json!({ "count": 9, "missing": missing, "mean": mean, "m2": 36.0 });
        ColumnStatistics::Number(serde_json::from_value(moments).unwrap())
    }

    fn categories(names: &[&str]) -> ColumnStatistics {
        let values = names.iter().map(|name| (name.to_string(), 3)).collect();
        ColumnStatistics::Category(CategoryCounts { missing: 0, values })
    }

    /// A table of a number, a category and a target, with what was counted of the inputs.
    fn table(first: usize, number: ColumnStatistics, category: ColumnStatistics) -> TableSchema {
        let columns = vec![
            column("x", first, ColumnKind::Number),
            column("color", first + 1, ColumnKind::Category),
            column("y", first + 2, ColumnKind::Category),
        ];
        let names: Vec<String> = (0..first + 3).map(|i| i.to_string()).collect();
        let statistics = vec![number, category, categories(&["no", "yes"])];
        let statistics =
            TableStatistics { rows: first as u64, columns: statistics, ..TableStatistics::default() };
        TableSchema::new(columns, &names, Some(statistics))
    }

    #[test]
    fn only_what_samples_depend_on_is_compared() {
        let colors = ["blue", "red"];
        let standard = TableSettings::default();
        let raw = TableSettings { standardise: false, ..TableSettings::default() };
        let filled = TableSettings { on_missing: MissingPolicy::Mean, ..raw.clone() };
        let whole = table(0, moments(1.0, 0), categories(&colors));
        // Other places, other counts and the rounding of a sum.
        let moved = table(4, moments(1.0 + 1e-12, 0), categories(&colors));
        let shifted = table(0, moments(1.5, 0), categories(&colors));
        let lacking = table(0, moments(1.5, 2), categories(&colors));
        let other_colors = table(0, moments(1.0, 0), categories(&["blue", "green"]));
        for (one, settings, other, of_other, is_same) in [
            (&whole, &standard, &moved, &standard, true),
            (&whole, &standard, &shifted, &standard, false),
            (&whole, &raw, &shifted, &raw, true),
            (&whole, &raw, &shifted, &filled, true),
            (&whole, &filled, &lacking, &filled, false),
            (&whole, &raw, &whole, &standard, false),
            (&whole, &raw, &other_colors, &raw, false),
        ] {
            let found = one.reads_like(settings, other, of_other);
            assert_eq!(found, is_same, "{one:?} {settings:?}\n{other:?} {of_other:?}");
        }
    }
}
