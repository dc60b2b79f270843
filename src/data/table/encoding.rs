//! Encodes the cells of a row into a sample: standardized numbers; one-hot categories, or ordinal ids behind all
//! numbers for embeddings; class ids.
//!
//! A cell is first parsed into one f64, its code: the number, the category id, or one of two NaNs for a missing and
//! for an invalid value. Text goes through both steps when it is read; columns that are decoded ahead are stored as
//! codes.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::categories::{self, CategoryIndex};
use super::column_encoder::{ColumnEncoder, number_encoder};
use super::column_report::{describe_column, identifier_warnings};
use super::columns::{CellParser, Column, ColumnKind, ColumnRemarks};
use super::schema::TableSchema;
use super::statistics::{CategoryCounts, ColumnStatistics};
use super::{CellValue, RowCells, TableSettings, UnknownPolicy};
use crate::base::units::counted;
use crate::warnings::{self, WARNING};
use crate::{BatchRow, DataError, Features, InputSpec, SliceMut, TargetSpec};

/// Code of a cell without a value.
pub const MISSING: f64 = f64::from_bits(0x7ff8_0000_0000_0001);
/// Code of a value that the column cannot have.
pub const INVALID: f64 = f64::from_bits(0x7ff8_0000_0000_0002);

/// Code of a text that is not in the encoding of the file.
pub const UNREADABLE: f64 = f64::from_bits(0x7ff8_0000_0000_0003);

/// Labels whose presence one code holds.
const LABELS_PER_CODE: usize = 32;

/// Columns that are described individually; the rest is summarized.
const MAX_DESCRIBED_COLUMNS: usize = 40;

/// Encodes every row of a table into a sample.
pub struct RowEncoder {
    pub schema: TableSchema,
    column_encoders: Vec<ColumnEncoder>,
    parser: CellParser,
    /// Per column, cells with an unseen category.
    unseen: Vec<AtomicU64>,
    pub features: Features,
    /// Training samples per class, if counted.
    pub class_counts: Option<Vec<u64>>,
    /// The column of labels and its number of codes, if there is one: 32 labels each.
    labels: Option<(usize, usize)>,
    description: Vec<(String, String)>,
    /// Columns that are no inputs though nobody asked for it.
    left_out: Vec<(String, String)>,
    warnings: Vec<String>,
}

impl RowEncoder {
    /// `remarks` are reported with the columns.
    pub fn new(
        file: &Path,
        schema: TableSchema,
        remarks: &ColumnRemarks,
        parser: CellParser,
        settings: &TableSettings,
    ) -> Result<Self, DataError> {
        let mut row_encoder = Self {
            schema: schema.clone(),
            column_encoders: Vec::new(),
            parser,
            unseen: schema.columns.iter().map(|_| AtomicU64::new(0)).collect(),
            features: Features::new(InputSpec::Floats { shape: vec![0] }, TargetSpec::Values { len: 0 }),
            class_counts: None,
            labels: None,
            description: Vec::new(),
            left_out: Vec::new(),
            warnings: Vec::new(),
        };
        let (columns, statistics) = (&schema.columns, schema.statistics.as_ref());
        let (mut inputs, mut targets, mut classes, mut labels) = (0, 0, None, Vec::new());
        let mut categories = Vec::new();
        for (i, column) in columns.iter().enumerate() {
            let stats = statistics.map(|statistics| &statistics.columns[i]);
            if statistics.is_some_and(|statistics| statistics.rows > 0)
                && stats.is_some_and(ColumnStatistics::is_empty)
            {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: format!("column `{}` is missing in every training row", column.name),
                    hint: "add the column to `ignore`",
                });
            }
            let encoder = match (column.kind, stats) {
                _ if column.weight => ColumnEncoder::Weight,
                (ColumnKind::Flag, _) => {
                    labels.push(column.name.clone());
                    ColumnEncoder::Flag { at: labels.len() - 1 }
                }
                (ColumnKind::Labels, stats) => {
                    let none = CategoryCounts::default();
                    let counts =
                        if let Some(ColumnStatistics::Category(counts)) = stats { counts } else { &none };
                    labels = categories::class_names(settings, counts);
                    row_encoder.labels = Some((i, labels.len().div_ceil(LABELS_PER_CODE).max(1)));
                    ColumnEncoder::Labels { list: CategoryIndex::of(&labels) }
                }
                (ColumnKind::Number, stats) => {
                    let moments = if let Some(ColumnStatistics::Number(moments)) = stats {
                        Some(moments)
                    } else {
                        None
                    };
                    let place = if column.target { &mut targets } else { &mut inputs };
                    number_encoder(column, moments, settings, place)
                }
                (ColumnKind::Category, stats) => {
                    let none = CategoryCounts::default();
                    let counts =
                        if let Some(ColumnStatistics::Category(counts)) = stats { counts } else { &none };
                    if column.target {
                        let names = categories::class_names(settings, counts);
                        let list = CategoryIndex::of(&names);
                        row_encoder.class_counts = statistics.map(|_| list.counts(counts));
                        row_encoder.warnings.extend(categories::case_warning(&names));
                        classes = Some(names);
                        ColumnEncoder::Class { list }
                    } else {
                        let names = categories::sorted_names(counts);
                        let missing = (counts.missing > 0).then_some(names.len());
                        let (list, unknown) = (CategoryIndex::of(&names), settings.on_unknown);
                        let places = names.len() + usize::from(missing.is_some());
                        if settings.embed {
                            categories.push(places);
                            // Relative to the end of the numbers; the offset is added below, once they are counted.
                            ColumnEncoder::Ordinal { list, at: categories.len() - 1, missing, unknown }
                        } else {
                            inputs += places;
                            ColumnEncoder::OneHot { list, at: inputs - places, missing, unknown }
                        }
                    }
                }
            };
            if column.target || row_encoder.description.len() < MAX_DESCRIBED_COLUMNS {
                row_encoder
                    .description
                    .push((column.name.clone(), describe_column(column, &encoder, stats, settings)));
            }
            row_encoder.column_encoders.push(encoder);
        }
        row_encoder.left_out.clone_from(&remarks.left_out);
        row_encoder.warnings.splice(0..0, remarks.warnings.iter().cloned());
        row_encoder.warnings.extend(identifier_warnings(columns, statistics));
        if !labels.is_empty() {
            row_encoder.class_counts = schema.class_counts(&labels);
        }
        let names = classes.as_ref().or_else(|| (!labels.is_empty()).then_some(&labels));
        if let (Some(names), Some(counts)) = (names, &row_encoder.class_counts) {
            row_encoder.warnings.extend(warnings::class_warnings(names, counts));
        }
        if let Some(statistics) = statistics.filter(|statistics| statistics.skipped_rows > 0) {
            let first = statistics.first_skipped.iter().map(|why| format!("; the first: {why}"));
            let skipped = counted(statistics.skipped_rows, "bad training row") + &first.collect::<String>();
            row_encoder.description.push(("skipped".into(), skipped));
        }
        let target = match classes {
            Some(names) if names.len() < 2 => {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: format!(
                        "the target has {}: {}",
                        counted(names.len() as u64, "class"),
                        names.join(", ")
                    ),
                    hint: "a classifier needs at least two; for regression set `task = \"values\"`",
                });
            }
            Some(names) => TargetSpec::Class { names },
            None if labels.is_empty() => TargetSpec::Values { len: targets },
            None => TargetSpec::MultiLabel { names: labels },
        };
        for how in &mut row_encoder.column_encoders {
            if let ColumnEncoder::Ordinal { at, .. } = how {
                *at += inputs;
            }
        }
        let input = match &categories[..] {
            [] => InputSpec::Floats { shape: vec![inputs] },
            _ => InputSpec::Tabular { num_numeric: inputs, cardinalities: categories },
        };
        let weighted = columns.iter().any(|column| column.weight);
        row_encoder.features = Features { weighted, ..Features::new(input, target) };
        Ok(row_encoder)
    }

    /// Codes per row: one per column, and more for a column of many labels.
    pub fn codes(&self) -> usize {
        self.schema.columns.len() + self.labels.map_or(0, |(_, codes)| codes - 1)
    }

    /// The column of a code, and which of the column's codes it is.
    #[inline]
    pub fn column_of(&self, code: usize) -> (usize, usize) {
        match self.labels {
            Some((column, codes)) if code >= column => match code < column + codes {
                true => (column, code - column),
                false => (code + 1 - codes, 0),
            },
            _ => (code, 0),
        }
    }

    /// Labels of a cell as a set: bit i for label 32 `part` + i.
    fn encode_labels(&self, list: &CategoryIndex, part: usize, cell: CellValue<'_>) -> f64 {
        if !self.parser.is_readable(cell) {
            return UNREADABLE;
        }
        let Some(labels) = self.parser.labels(cell) else { return MISSING };
        let mut set = 0u32;
        for label in labels {
            match list.id(&label) {
                None => return INVALID,
                Some(id) if id as usize / LABELS_PER_CODE == part => {
                    set |= 1 << (id % LABELS_PER_CODE as u32)
                }
                Some(_) => {}
            }
        }
        set.into()
    }

    /// Parses a cell into its code of this number.
    #[inline]
    pub fn encode_cell(&self, code: usize, cell: CellValue<'_>) -> f64 {
        let (i, part) = self.column_of(code);
        if let ColumnEncoder::Labels { list } = &self.column_encoders[i] {
            return self.encode_labels(list, part, cell);
        }
        if self.parser.is_missing(cell) {
            return MISSING;
        }
        match &self.column_encoders[i] {
            ColumnEncoder::Flag { .. } => self.parser.flag(cell).map_or(INVALID, f64::from),
            ColumnEncoder::Weight => {
                let weight = self.parser.number(cell, self.schema.columns[i].notation);
                weight.filter(|weight| *weight >= 0.0).unwrap_or(INVALID)
            }
            ColumnEncoder::Number { fill, .. } => {
                let notation = self.schema.columns[i].notation;
                match self.parser.number(cell, notation) {
                    Some(number) => number,
                    None if fill.is_some() && self.parser.is_not_finite(cell, notation) => MISSING,
                    None => INVALID,
                }
            }
            _ if !self.parser.is_readable(cell) => UNREADABLE,
            ColumnEncoder::OneHot { list, .. }
            | ColumnEncoder::Ordinal { list, .. }
            | ColumnEncoder::Class { list }
            | ColumnEncoder::Labels { list } => {
                list.id(&self.parser.category(cell)).map_or(INVALID, f64::from)
            }
        }
    }

    /// Encodes a row into a sample.
    pub fn encode_row(&self, cells: &impl RowCells, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        into.input.as_f32_mut().fill(0.0);
        for number in 0..self.codes() {
            let (i, _) = self.column_of(number);
            let code = self.encode_cell(number, cells.cell(i));
            self.write_cell(number, code, into).map_err(|expected| cells.cell_error(i, expected))?;
        }
        Ok(())
    }

    /// What was expected, if the code cannot be encoded.
    pub fn expected_instead(&self, number: usize, code: f64) -> Option<String> {
        let (i, _) = self.column_of(number);
        let column = &self.schema.columns[i];
        let is_missing = code.to_bits() == MISSING.to_bits();
        match &self.column_encoders[i] {
            ColumnEncoder::Number { fill: None, .. }
            | ColumnEncoder::Class { .. }
            | ColumnEncoder::Labels { .. }
            | ColumnEncoder::Flag { .. }
            | ColumnEncoder::Weight
                if is_missing =>
            {
                Some(super::expected_present(column))
            }
            ColumnEncoder::Number { .. } if is_missing => None,
            ColumnEncoder::Number { mean, scale, .. } => {
                let value = ((code - mean) * scale) as f32;
                let expected =
                    if code.is_nan() { column.notation.expected() } else { super::EXPECTED_IN_RANGE };
                (!value.is_finite()).then(|| expected.into())
            }
            ColumnEncoder::Weight if code.is_nan() => Some(super::EXPECTED_WEIGHT.into()),
            ColumnEncoder::Weight => (!(code as f32).is_finite()).then(|| super::EXPECTED_IN_RANGE.into()),
            ColumnEncoder::Flag { .. } => code.is_nan().then(|| super::EXPECTED_FLAG.into()),
            _ if code.to_bits() == UNREADABLE.to_bits() => Some(super::EXPECTED_UTF8.into()),
            ColumnEncoder::Labels { list } => {
                code.is_nan().then(|| format!("some of the {} labels", list.len()))
            }
            ColumnEncoder::Class { list } => {
                code.is_nan().then(|| format!("one of the {} classes", list.len()))
            }
            ColumnEncoder::OneHot { missing: Some(_), .. }
            | ColumnEncoder::Ordinal { missing: Some(_), .. }
                if is_missing =>
            {
                None
            }
            ColumnEncoder::OneHot { list, unknown, .. } | ColumnEncoder::Ordinal { list, unknown, .. } => {
                (code.is_nan() && *unknown == UnknownPolicy::Error)
                    .then(|| format!("one of the {} categories of the training rows", list.len()))
            }
        }
    }

    /// Writes what a code stands for into a sample, whose input must be zeroed, or returns what was expected.
    #[inline]
    pub fn write_cell(&self, number: usize, code: f64, into: &mut BatchRow<'_>) -> Result<(), String> {
        let (i, part) = self.column_of(number);
        // Fast path: nearly every cell is a valid number.
        if let ColumnEncoder::Number { mean, scale, at, .. } = &self.column_encoders[i] {
            let value = ((code - mean) * scale) as f32;
            if value.is_finite() {
                let row = if self.schema.columns[i].target { &mut into.target } else { &mut into.input };
                row.as_f32_mut()[*at] = value;
                return Ok(());
            }
        }
        if let Some(expected) = self.expected_instead(number, code) {
            return Err(expected);
        }
        if code.to_bits() == INVALID.to_bits() {
            self.unseen[i].fetch_add(1, Ordering::Relaxed);
        }
        match &self.column_encoders[i] {
            ColumnEncoder::Number { mean, scale, fill, at, flag } => {
                into.input.as_f32_mut()[*at] = ((fill.unwrap_or_default() - mean) * scale) as f32;
                if let Some(flag) = flag {
                    into.input.as_f32_mut()[*flag] = 1.0;
                }
            }
            ColumnEncoder::OneHot { at, missing, .. } => {
                if let Some(place) = category_id(code, *missing) {
                    into.input.as_f32_mut()[at + place] = 1.0;
                }
            }
            ColumnEncoder::Ordinal { list, at, missing, .. } => {
                let unknown = list.len() + usize::from(missing.is_some());
                into.input.as_f32_mut()[*at] = category_id(code, *missing).unwrap_or(unknown) as f32;
            }
            ColumnEncoder::Class { .. } => into.target.as_u32_mut()[0] = code as u32,
            ColumnEncoder::Labels { list } => {
                let (labels, set) = (&mut into.target.as_f32_mut()[..list.len()], code as u32);
                let labels = labels.iter_mut().skip(part * LABELS_PER_CODE).take(LABELS_PER_CODE);
                labels.enumerate().for_each(|(bit, value)| *value = (set >> bit & 1) as f32);
            }
            ColumnEncoder::Flag { at } => into.target.as_f32_mut()[*at] = code as f32,
            ColumnEncoder::Weight => match &mut into.target {
                SliceMut::F32(target) => target.last_mut().into_iter().for_each(|slot| *slot = code as f32),
                SliceMut::U32(target) => {
                    target.last_mut().into_iter().for_each(|slot| *slot = (code as f32).to_bits());
                }
                SliceMut::U8(_) => {}
            },
        }
        Ok(())
    }

    /// Per column, the cells encoded so far whose category no training row had.
    pub fn unseen_categories(&self) -> Vec<(String, u64)> {
        let counts = self.unseen.iter().map(|count| count.load(Ordering::Relaxed));
        let named = self.schema.columns.iter().map(|column| column.name.clone()).zip(counts);
        named.filter(|(_, count)| *count > 0).collect()
    }

    /// Name of each input value: the column name, with the category if the column is one-hot.
    pub fn input_names(&self) -> Vec<String> {
        let mut names = vec![String::new(); self.features.input_len()];
        for (column, how) in
            self.schema.columns.iter().zip(&self.column_encoders).filter(|(column, _)| !column.target)
        {
            match how {
                ColumnEncoder::Number { at, flag, .. } => {
                    names[*at].clone_from(&column.name);
                    flag.iter().for_each(|flag| names[*flag] = format!("{} is missing", column.name));
                }
                ColumnEncoder::OneHot { list, at, missing, .. } => {
                    for (place, name) in list.names().iter().enumerate() {
                        names[at + place] = format!("{} = {name}", column.name);
                    }
                    missing
                        .iter()
                        .for_each(|place| names[at + place] = format!("{} is missing", column.name));
                }
                ColumnEncoder::Ordinal { at, .. } => names[*at].clone_from(&column.name),
                ColumnEncoder::Class { .. }
                | ColumnEncoder::Labels { .. }
                | ColumnEncoder::Flag { .. }
                | ColumnEncoder::Weight => {}
            }
        }
        names
    }

    /// One line per column.
    pub fn describe(&self) -> Vec<(String, String)> {
        let mut about = self.description.clone();
        let more = self.schema.columns.len().saturating_sub(MAX_DESCRIBED_COLUMNS);
        if more > 0 {
            // Targets come last and are always listed.
            let inputs = MAX_DESCRIBED_COLUMNS - 1;
            about.drain(inputs..MAX_DESCRIBED_COLUMNS);
            about.insert(inputs, ("...".into(), counted(more as u64, "more column")));
        }
        let left_out = self.left_out.iter().take(MAX_DESCRIBED_COLUMNS).cloned();
        about.splice(0..0, left_out);
        let warnings = self.warnings.iter().take(MAX_DESCRIBED_COLUMNS);
        about.extend(warnings.map(|text| (WARNING.to_owned(), text.clone())));
        about
    }

    /// Approximate bytes in memory.
    pub fn resident_bytes(&self) -> u64 {
        let list = |how: &ColumnEncoder| match how {
            ColumnEncoder::OneHot { list, .. }
            | ColumnEncoder::Ordinal { list, .. }
            | ColumnEncoder::Class { list }
            | ColumnEncoder::Labels { list } => list.resident_bytes(),
            ColumnEncoder::Number { .. } | ColumnEncoder::Flag { .. } | ColumnEncoder::Weight => 0,
        };
        let encoders = self.column_encoders.iter().map(|how| list(how) + size_of::<ColumnEncoder>() as u64);
        let columns = self.schema.columns.iter().map(|column| size_of::<Column>() + column.name.capacity());
        let texts = self.description.iter().flat_map(|(name, text)| [name, text]);
        encoders.sum::<u64>() + columns.sum::<usize>() as u64 + super::strings_bytes(texts)
    }
}

impl ColumnStatistics {
    fn is_empty(&self) -> bool {
        match self {
            ColumnStatistics::Number(moments) => moments.count == 0,
            ColumnStatistics::Category(counts) => counts.values.is_empty(),
        }
    }
}

/// Category id of a code, if it has one.
fn category_id(code: f64, missing: Option<usize>) -> Option<usize> {
    if code.to_bits() == MISSING.to_bits() { missing } else { (!code.is_nan()).then_some(code as usize) }
}
