//! How the values of one column become numbers of a sample.

use super::categories::CategoryIndex;
use super::columns::Column;
use super::statistics::Moments;
use super::{MissingPolicy, TableSettings, UnknownPolicy};

pub enum ColumnEncoder {
    /// (x - mean) * scale at index `at` of the input or target. A missing value becomes `fill`, with 1 at index
    /// `flag`.
    Number { mean: f64, scale: f64, fill: Option<f64>, at: usize, flag: Option<usize> },
    /// 1 at index `at` plus the category id. Missing has the id `missing`.
    OneHot { list: CategoryIndex, at: usize, missing: Option<usize>, unknown: UnknownPolicy },
    /// The category id at index `at`; the id after the last one stands for unknown categories.
    Ordinal { list: CategoryIndex, at: usize, missing: Option<usize>, unknown: UnknownPolicy },
    /// The class id.
    Class { list: CategoryIndex },
    /// 1 for the labels that the cell has, 0 for the others.
    Labels { list: CategoryIndex },
    /// 1 or 0 at index `at` of the target.
    Flag { at: usize },
    /// The weight of the sample, behind its target.
    Weight,
}

/// The encoder of a numeric column, whose place in its vector is `next`.
pub fn number_encoder(
    column: &Column,
    moments: Option<&Moments>,
    settings: &TableSettings,
    next: &mut usize,
) -> ColumnEncoder {
    let average = moments.map_or(0.0, |moments| moments.mean);
    let std = moments.map_or(0.0, Moments::std);
    let (mean, scale) = match settings.standardise {
        // A constant column becomes 0.
        true => (average, if std > 0.0 { 1.0 / std } else { 1.0 }),
        false => (0.0, 1.0),
    };
    let fill = match settings.on_missing {
        _ if column.target => None,
        MissingPolicy::Error => None,
        MissingPolicy::Mean => Some(average),
        MissingPolicy::Zero => Some(0.0),
    };
    let at = *next;
    *next += 1;
    let lacks = moments.is_some_and(|moments| moments.missing > 0);
    let flag = (settings.missing_flags && lacks && !column.target).then(|| {
        *next += 1;
        at + 1
    });
    ColumnEncoder::Number { mean, scale, fill, at, flag }
}
