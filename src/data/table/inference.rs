//! What the first rows show about a column: numbers and how they are written, dates, text, or row numbers.

use std::collections::{BTreeSet, HashSet};

use super::coded_numbers::CodedNumbers;
use super::columns::CellParser;
use super::date_text::{DateOrder, compact_month};
use super::dates::{self, DateColumn, DateEvidence, StampKind};
use super::decimal::parse_decimal;
use super::index_evidence::IndexEvidence;
use super::notation::{DecimalMark, NotationEvidence, NotationProblem, parse_plain};
use super::quantity_forms::FormEvidence;
use super::target_copy::TargetCopy;
use super::units::{MANY_NUMBERS, UnitEvidence};
use super::{CellPlace, CellValue, hash};
use crate::labels::{self, LabelLists};

/// Rows that types are inferred from.
pub const SAMPLE_ROWS: usize = 1000;
/// An integer target is treated as classes if it has at most this many distinct values.
const MAX_INTEGER_CLASSES: usize = 20;
/// Texts among more than this fraction of numbers, or of dates, are taken for errors and not for categories.
const NEARLY_ALL: f64 = 0.9;
/// So are a few different texts among more than this fraction: marks of missing values.
const MOST: f64 = 0.5;
const FEW_TEXTS: u32 = 3;
/// Dates of eight digits, or months of six, from which on they are not a coincidence.
const MIN_COMPACT_DATES: usize = 3;
const MIN_YEAR_LAST_DATES: usize = 5;
/// Texts that stand for no value, in lower case. Those of the key `missing` are no texts here.
const NO_VALUE: [&str; 20] = [
    "unknown",
    "unk",
    "missing",
    "na",
    "n/a",
    "n.a.",
    "nan",
    "nil",
    "none",
    "null",
    "-",
    "--",
    "---",
    ".",
    "..",
    "*",
    "#n/a",
    "not available",
    "undefined",
    "tbd",
];

/// What the first rows show about one column.
#[derive(Clone, Debug, Default)]
pub struct ColumnInference {
    /// A value is not a number.
    pub has_text: bool,
    /// The file declares texts.
    declared_text: bool,
    has_fraction: bool,
    values: usize,
    numbers: usize,
    /// One bit per hash of a number, for an estimate of distinct numbers in eight bytes.
    number_hashes: u64,
    /// Whether distinct values are counted. Only the type of a target depends on them, and a table may have very many
    /// columns.
    counts_distinct: bool,
    distinct: BTreeSet<String>,
    /// Texts of a target, as far as they are watched.
    texts: BTreeSet<String>,
    /// Why its values cannot be used at all.
    pub unsupported: Option<&'static str>,
    /// The column holds lists of texts.
    pub text_list: bool,
    /// Values of a row, if the column holds lists.
    pub list: Option<usize>,
    /// What points in time its numbers are.
    pub stamp: Option<StampKind>,
    pub notation: NotationEvidence,
    dates: DateEvidence,
    /// Numbers that are dates of eight digits, and months of six.
    compact_dates: usize,
    compact_months: usize,
    /// The year of the first such month, and whether there are others. The months of one year are as good as numbers.
    month_year: Option<i16>,
    has_month_years: bool,
    /// Boxed: most of very many columns have none of these.
    units: Option<Box<UnitEvidence>>,
    forms: Option<Box<FormEvidence>>,
    /// Numbers of eight digits that end with a year, after a day and a month.
    year_last_dates: usize,
    /// Some text stands for no value.
    has_no_value: bool,
    /// Bits of hashes of texts that are no dates.
    text_hashes: u64,
    pub first_text: Option<Box<CellPlace>>,
    /// The first text that is no date.
    pub first_non_date: Option<Box<CellPlace>>,
    pub first_problem: Option<Box<CellPlace>>,
    pub first_date: Option<Box<CellPlace>>,
    /// Of a column without a name, or named as an index, as far as every row has a value.
    index: Option<Box<IndexEvidence>>,
    is_data_frame_index: bool,
    /// Hashes of whole numbers; `None` once one of them repeats, or if the column is not watched.
    whole_numbers: Option<HashSet<u64>>,
    /// Rows whose value is that of the target, and whether there is a row where it is not.
    same_as_target: usize,
    differs_from_target: bool,
    /// Boxed, and only of watched columns; `None` once it is no copy.
    target_copy: Option<Box<TargetCopy>>,
    coded: Option<Box<CodedNumbers>>,
}

/// Columns that are watched for identifiers: their values take memory.
pub const MAX_WATCHED_COLUMNS: usize = 1000;
/// Rows from which on a column without a value twice is taken for an identifier.
const MIN_IDENTIFIERS: usize = 100;

impl ColumnInference {
    /// For a column whose type the file declares.
    pub fn declared(text: bool, unsupported: Option<&'static str>) -> Self {
        Self { declared_text: text, unsupported, ..Self::default() }
    }

    /// Whether its values are texts, not numbers. Texts that a file declares are numbers if all of them are, and too
    /// many to be codes.
    pub fn is_text(&self) -> bool {
        self.has_text || self.declared_text && self.number_hashes.count_ones() < MANY_NUMBERS
    }

    /// Also count distinct values.
    pub fn count_distinct(&mut self) {
        self.counts_distinct = true;
    }

    /// The column has no name, or one that names row numbers.
    pub fn watch_for_index(&mut self) {
        self.index = Some(Box::default());
    }

    /// The column is the index of a data frame, as its name says.
    pub fn mark_as_index(&mut self) {
        self.is_data_frame_index = true;
    }

    /// The column may hold identifiers, a copy of the target, or numbers that stand for something else.
    pub fn watch(&mut self) {
        self.whole_numbers = Some(HashSet::new());
        self.target_copy = Some(Box::default());
        self.coded = Some(Box::default());
    }

    /// Compares the value with that of the target in the same row.
    pub fn compare_with_target(&mut self, cell: CellValue<'_>, target: CellValue<'_>) {
        match cell == target {
            true => self.same_as_target += 1,
            false => self.differs_from_target = true,
        }
        if self.target_copy.as_mut().is_some_and(|copy| !copy.observe(cell, target)) {
            self.target_copy = None;
        }
    }

    /// Number of values, if each goes with one value of the target.
    pub fn copied_values(&self) -> Option<usize> {
        self.target_copy.as_ref()?.values()
    }

    /// What is suspicious about its numbers.
    pub fn number_warning(&self, name: &str) -> Option<String> {
        self.coded.as_ref().filter(|_| !self.has_text)?.warning(name)
    }

    /// Whether every value was that of the target.
    pub fn equals_target(&self) -> bool {
        self.same_as_target > 1 && !self.differs_from_target
    }

    /// Number of values, if all are whole numbers and no two are equal.
    pub fn identifiers(&self) -> Option<usize> {
        let whole = self.whole_numbers.is_some() && !self.has_text && !self.has_fraction;
        (whole && self.values >= MIN_IDENTIFIERS).then_some(self.values)
    }

    /// Adds the value at `line`.
    pub fn observe(&mut self, cell: CellValue<'_>, parser: &CellParser, line: u64) {
        if parser.is_missing(cell) {
            self.index = None;
            return;
        }
        self.values += 1;
        match cell {
            CellValue::Missing | CellValue::Texts(_) => {}
            CellValue::Number(x) => {
                self.numbers += 1;
                self.has_fraction |= x.fract() != 0.0;
                self.observe_coded(x);
                self.observe_compact(x);
                if let Some(index) = &mut self.index {
                    index.observe(&x.to_le_bytes(), Some(x));
                }
                self.observe_whole_number(hash(&x.to_le_bytes()));
            }
            CellValue::Text(text) => self.observe_text(text, line),
        }
        if self.counts_distinct && self.distinct.len() <= MAX_INTEGER_CLASSES {
            self.distinct.insert(parser.category(cell).into_owned());
        }
        if self.counts_distinct && self.has_text && self.texts.len() < SAMPLE_ROWS {
            self.texts.insert(parser.category(cell).into_owned());
        }
    }

    /// How the values show that each holds several labels.
    pub fn label_lists(&self) -> Option<LabelLists> {
        labels::detect(self.texts.iter().map(String::as_str))
    }

    /// The value with the most labels.
    pub fn example_list(&self) -> Option<String> {
        let separator = match self.label_lists()? {
            LabelLists::Separated(separator) => Some(separator),
            LabelLists::Bracketed => None,
        };
        let most = self.texts.iter().max_by_key(|text| labels::split(text, separator).len())?;
        Some(super::display_value(most.as_bytes()))
    }

    /// Adds a number that may be a date of eight digits or a month of six.
    fn observe_compact(&mut self, number: f64) {
        if let Some(month) = compact_month(number) {
            self.compact_months += 1;
            self.has_month_years |= self.month_year.is_some_and(|year| year != month.year());
            self.month_year = Some(month.year());
        } else {
            self.compact_dates += usize::from(dates::compact_date(number).is_some());
        }
    }

    fn observe_coded(&mut self, number: f64) {
        if let Some(coded) = &mut self.coded {
            coded.observe(number);
        }
    }

    /// Numbers that are dates.
    fn compact_count(&self) -> usize {
        self.compact_dates + if self.has_month_years { self.compact_months } else { 0 }
    }

    fn observe_whole_number(&mut self, hash: u64) {
        if let Some(seen) = &mut self.whole_numbers
            && (self.has_fraction || !seen.insert(hash))
        {
            self.whole_numbers = None;
        }
    }

    fn observe_text(&mut self, text: &[u8], line: u64) {
        let place = || Some(Box::new(CellPlace { line, value: super::display_value(text) }));
        let plain = parse_decimal(text).or_else(|| parse_plain(text));
        if let Some(index) = &mut self.index {
            index.observe(text, plain);
        }
        let was_open = self.notation.conflict().is_none() && !self.notation.is_ambiguous();
        if let Some(number) = plain {
            self.observe_coded(number);
            // `202103.0` is a number.
            if matches!(text.len(), 6 | 8) && text.iter().all(u8::is_ascii_digit) {
                self.observe_compact(number);
            }
            self.year_last_dates += usize::from(text.len() == 8 && dates::is_year_last_date(number));
            self.notation.observe_plain(text);
        } else if !self.notation.observe(text) {
            self.has_text = true;
            let was_open = self.dates.is_ambiguous();
            let is_date = self.dates.observe(text);
            if self.dates.is_ambiguous() && !was_open {
                self.first_date = place();
            }
            if !is_date {
                self.text_hashes |= 1 << (hash(text) & 63);
                self.first_non_date = self.first_non_date.take().or_else(place);
            }
            let place_of = || CellPlace { line, value: super::display_value(text) };
            UnitEvidence::observe(&mut self.units, text, place_of);
            FormEvidence::observe(&mut self.forms, text, place_of);
            self.has_no_value |= is_no_value(text);
            if self.first_text.is_none() {
                self.first_text = place();
            }
            return;
        }
        self.numbers += 1;
        let hash = hash(text);
        self.number_hashes |= 1 << (hash & 63);
        // pandas writes whole numbers as `1.0` if some are missing.
        let whole = text.iter().all(|b| b.is_ascii_digit() || b"+-".contains(b));
        let value = if whole { None } else { parse_decimal(text).or_else(|| parse_plain(text)) };
        self.has_fraction |= !whole && value.is_none_or(|x| x.fract() != 0.0);
        self.observe_whole_number(hash);
        if was_open && (self.notation.conflict().is_some() || self.notation.is_ambiguous()) {
            self.first_problem = place();
        }
    }

    /// How the column is read if it has dates or times and nothing else.
    pub fn date_column(&self, stated: Option<DateOrder>) -> Option<DateColumn> {
        match self.stamp {
            Some(kind) => Some(DateColumn::Stamps(kind)),
            None if self.compact_count() == 0 => self.dates.column(self.values, stated),
            None => {
                let enough = self.compact_count() + self.dates.count >= MIN_COMPACT_DATES;
                let is_whole = self.compact_count() + self.dates.count == self.values;
                self.dates
                    .with_compact(self.compact_count())
                    .column(self.values, stated)
                    .filter(|_| enough && is_whole)
            }
        }
    }

    /// The decimal mark that the values require, if all of them are numbers.
    pub fn required_mark(&self) -> Option<DecimalMark> {
        self.notation.required_mark().filter(|_| !self.has_text)
    }

    /// Whether it looks like class labels: text, or a few repeated integers.
    pub fn looks_categorical(&self) -> bool {
        let few = self.distinct.len() <= MAX_INTEGER_CLASSES && 2 * self.distinct.len() <= self.values;
        self.is_text() || (!self.has_fraction && few)
    }

    /// Whether most values are numbers, too many to be codes.
    pub fn is_mostly_numbers(&self) -> bool {
        self.has_text && self.number_hashes.count_ones() >= MANY_NUMBERS && self.is_most(self.numbers)
    }

    /// Whether some texts stand among numbers for what has none: most values are numbers, or a few texts are not
    /// and the numbers are measurements, or one of the texts says so.
    pub fn has_stray_text(&self) -> bool {
        let few = self.text_hashes.count_ones() <= FEW_TEXTS && self.dates.count == 0;
        let measured = self.has_fraction || self.number_hashes.count_ones() >= MANY_NUMBERS;
        let among_numbers = self.has_text && self.number_hashes.count_ones() > 1;
        self.is_mostly_numbers() || among_numbers && few && (measured || self.has_no_value)
    }

    /// Whether some values, but not all, are dates: most, or all but a few texts.
    pub fn has_stray_date(&self) -> bool {
        let dates = self.dates.count + self.compact_count();
        let is_most = |least: f64| dates as f64 >= least * self.values as f64;
        // Numbers of eight or six digits are dates only if they are nearly all.
        let enough = if self.compact_count() > 0 {
            dates >= MIN_COMPACT_DATES && is_most(NEARLY_ALL)
        } else {
            dates > 1
        };
        let others_are_few = self.text_hashes.count_ones() <= FEW_TEXTS && self.numbers == 0;
        dates < self.values && enough && (others_are_few || is_most(NEARLY_ALL))
    }

    /// The first value that is a number with a unit, if nearly all are numbers with and without.
    pub fn with_unit(&self) -> Option<&CellPlace> {
        let units = self.units.as_ref().filter(|units| units.are_measurements(self.number_hashes))?;
        let numbers = units.with_unit + units.bounds + self.numbers;
        units.first_with_unit.as_ref().filter(|_| self.is_nearly_all(numbers))
    }

    /// The first value that is a bound, as `<0.5`, if nearly all are numbers or bounds.
    pub fn bound(&self) -> Option<&CellPlace> {
        const MIN_NUMBERS: u32 = 3;
        let units = self.units.as_ref()?;
        // `<18` and `>=18` alone are two classes.
        let many = units.bounds >= MANY_NUMBERS as usize && self.text_hashes.count_ones() >= MANY_NUMBERS
            || self.number_hashes.count_ones() >= MIN_NUMBERS;
        let numbers = units.with_unit + units.bounds + self.numbers;
        units.first_bound.as_ref().filter(|_| many && self.is_nearly_all(numbers))
    }

    /// What nearly all texts are that stand for quantities, and the first of them.
    pub fn quantities(&self) -> Option<(&'static str, &CellPlace)> {
        self.forms.as_ref()?.found(NEARLY_ALL * self.values as f64)
    }

    /// Whether all numbers are dates of eight digits with the year at the end.
    pub fn has_year_last_dates(&self) -> bool {
        self.year_last_dates == self.values && self.values >= MIN_YEAR_LAST_DATES
    }

    fn is_nearly_all(&self, count: usize) -> bool {
        count as f64 >= NEARLY_ALL * self.values as f64
    }

    fn is_most(&self, count: usize) -> bool {
        let others_are_few = self.text_hashes.count_ones() <= FEW_TEXTS;
        count as f64 >= if others_are_few { MOST } else { NEARLY_ALL } * self.values as f64
    }

    /// Whether every value of a target is a text of its own.
    pub fn is_all_distinct_text(&self) -> bool {
        const MIN_ROWS: usize = 50;
        self.has_text && self.values >= MIN_ROWS && self.texts.len() == self.values
    }

    /// Whether a target has 0 and 1 and nothing else.
    pub fn is_binary(&self) -> bool {
        self.distinct.len() == 2
            && ["0", "1", "0.0", "1.0"].iter().filter(|x| self.distinct.contains(**x)).count() == 2
    }

    /// Whether the column has no name and holds row numbers or row names, as pandas and R write them.
    pub fn is_index(&self) -> bool {
        let has_fraction = self.has_fraction && !self.has_text;
        self.is_data_frame_index || self.index.as_ref().is_some_and(|index| index.is_index(has_fraction))
    }

    /// Whether the values are row numbers, though the column has a name.
    pub fn has_row_numbers(&self) -> bool {
        self.index.as_ref().is_some_and(|index| index.are_row_numbers())
    }

    /// What speaks against reading it as numbers, with the value that shows it.
    pub fn describe_problem(&self, problem: NotationProblem) -> (String, &'static str) {
        let (line, value) = self.first_problem.as_ref().map_or((0, ""), |place| (place.line, &place.value));
        let place = format!("`{value}` in line {line}");
        match problem {
            NotationProblem::AmbiguousComma => (
                format!(
                    "{place} may have a decimal comma or a group of three digits, and no value of the first \
                     rows decides"
                ),
                "set `decimal = \",\"` if the comma starts the fraction, or `decimal = \".\"` if it groups digits",
            ),
            NotationProblem::MixedMarks => (
                format!("{place} has another decimal mark than the values above it"),
                "correct the value, or set `decimal` to \".\" or \",\": values with the other mark are then \
                 bad records",
            ),
            NotationProblem::MixedPercent => (
                format!("{place}: some values have a percent sign and others do not"),
                "write them alike, or add the column to `categorical` or `ignore`",
            ),
            NotationProblem::MixedCurrencies => (
                format!("{place} has another currency than the values above it"),
                "convert them to one currency, or add the column to `categorical` or `ignore`",
            ),
        }
    }
}

fn is_no_value(text: &[u8]) -> bool {
    const MAX_BYTES: usize = 16;
    text.len() <= MAX_BYTES
        && NO_VALUE.iter().any(|known| known.as_bytes().eq_ignore_ascii_case(text.trim_ascii()))
}
