//! What the first rows show about a column: numbers and how they are written, dates, text, or row numbers.

use std::collections::{BTreeSet, HashSet};

use super::CellValue;
use super::columns::CellParser;
use super::dates::{DateColumn, DateEvidence, DateOrder, StampKind};
use super::decimal::parse_decimal;
use super::notation::{DecimalMark, NotationEvidence, NotationProblem, parse_plain};
use crate::data::labels::{self, LabelLists};

/// Rows that types are inferred from.
pub const SAMPLE_ROWS: usize = 1000;
/// An integer target is treated as classes if it has at most this many distinct values.
const MAX_INTEGER_CLASSES: usize = 20;
/// Texts among more than this fraction of numbers, or of dates, are taken for errors and not for categories.
const NEARLY_ALL: f64 = 0.9;
/// So are a few different texts among more than this fraction: marks of missing values.
const MOST: f64 = 0.5;
const FEW_TEXTS: u32 = 3;
/// Distinct numbers from which on a column is taken for measurements and not for codes.
const MANY_NUMBERS: u32 = 32;

/// A value and its line, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellPlace {
    pub line: u64,
    pub value: String,
}

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
    /// Numbers with a unit that is not understood, and bits of hashes of them.
    with_unit: usize,
    unit_hashes: u64,
    /// Bits of hashes of texts that are no dates.
    text_hashes: u64,
    /// Boxed: most of very many columns have none of these.
    pub first_text: Option<Box<CellPlace>>,
    pub first_with_unit: Option<Box<CellPlace>>,
    /// The first text that is no date.
    pub first_non_date: Option<Box<CellPlace>>,
    pub first_problem: Option<Box<CellPlace>>,
    pub first_date: Option<Box<CellPlace>>,
    /// Values of a column without a name; `None` once one of them repeats.
    index: Option<HashSet<Vec<u8>>>,
    is_data_frame_index: bool,
    /// Row numbers of a column without a name, as far as its values are some.
    row_numbers: Option<RowNumbers>,
    /// Hashes of whole numbers; `None` once one of them repeats, or if the column is not watched.
    whole_numbers: Option<HashSet<u64>>,
    /// Rows whose value is that of the target, and whether there is a row where it is not.
    same_as_target: usize,
    differs_from_target: bool,
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

    /// The column has no name: it may hold row numbers.
    pub fn watch_for_index(&mut self) {
        (self.index, self.row_numbers) = (Some(HashSet::new()), Some(RowNumbers::default()));
    }

    /// The column is the index of a data frame, as its name says.
    pub fn mark_as_index(&mut self) {
        self.is_data_frame_index = true;
    }

    /// The column may hold identifiers.
    pub fn watch_for_identifiers(&mut self) {
        self.whole_numbers = Some(HashSet::new());
    }

    /// Compares the value with that of the target in the same row.
    pub fn compare_with_target(&mut self, cell: CellValue<'_>, target: CellValue<'_>) {
        match cell == target {
            true => self.same_as_target += 1,
            false => self.differs_from_target = true,
        }
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
            (self.index, self.row_numbers) = (None, None);
            return;
        }
        self.values += 1;
        match cell {
            CellValue::Missing | CellValue::Texts(_) => {}
            CellValue::Number(x) => {
                self.numbers += 1;
                self.has_fraction |= x.fract() != 0.0;
                self.row_numbers = self.row_numbers.and_then(|rows| rows.next(x));
                if let Some(seen) = &mut self.index
                    && !seen.insert(x.to_le_bytes().to_vec())
                {
                    self.index = None;
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

    fn observe_whole_number(&mut self, hash: u64) {
        if let Some(seen) = &mut self.whole_numbers
            && (self.has_fraction || !seen.insert(hash))
        {
            self.whole_numbers = None;
        }
    }

    fn observe_text(&mut self, text: &[u8], line: u64) {
        let place = || Some(Box::new(CellPlace { line, value: super::display_value(text) }));
        if let Some(seen) = &mut self.index
            && !seen.insert(text.to_vec())
        {
            self.index = None;
        }
        let plain = parse_decimal(text).or_else(|| parse_plain(text)).is_some();
        let was_open = self.notation.conflict().is_none() && !self.notation.is_ambiguous();
        if plain {
            self.notation.observe_plain(text);
        } else if !self.notation.observe(text) {
            self.has_text = true;
            self.row_numbers = None;
            let was_open = self.dates.is_ambiguous();
            let is_date = self.dates.observe(text);
            if self.dates.is_ambiguous() && !was_open {
                self.first_date = place();
            }
            if !is_date {
                self.text_hashes |= 1 << (hash(text) & 63);
                self.first_non_date = self.first_non_date.take().or_else(place);
            }
            if has_unit(text) {
                self.with_unit += 1;
                self.unit_hashes |= 1 << (hash(text) & 63);
                if self.first_with_unit.is_none() {
                    self.first_with_unit = place();
                }
            }
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
        if let Some(rows) = self.row_numbers {
            self.row_numbers = value.or_else(|| parse_decimal(text)).and_then(|x| rows.next(x));
        }
        self.observe_whole_number(hash);
        if was_open && (self.notation.conflict().is_some() || self.notation.is_ambiguous()) {
            self.first_problem = place();
        }
    }

    /// How the column is read if it has dates or times and nothing else.
    pub fn date_column(&self, stated: Option<DateOrder>) -> Option<DateColumn> {
        match self.stamp {
            Some(kind) => Some(DateColumn::Stamps(kind)),
            None => self.dates.column(self.values, stated),
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

    /// Whether most values, but not all, are dates.
    pub fn is_mostly_dates(&self) -> bool {
        self.dates.count < self.values && self.dates.count > 1 && self.is_most(self.dates.count)
    }

    /// Whether most values are numbers with a unit, too many to be codes.
    pub fn has_units(&self) -> bool {
        let hashes = self.number_hashes | self.unit_hashes;
        self.with_unit > 0
            && hashes.count_ones() >= MANY_NUMBERS
            && (self.with_unit + self.numbers) as f64 >= NEARLY_ALL * self.values as f64
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
        // Distinct fractions are measurements that lack a name.
        let distinct = self.index.is_some() && (self.has_text || !self.has_fraction);
        self.is_data_frame_index || self.values > 1 && (distinct || self.row_numbers.is_some())
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

/// Whether this is the name that pandas gives to an index without one.
pub fn is_index_name(name: &str) -> bool {
    name.strip_prefix("__index_level_")
        .and_then(|rest| rest.strip_suffix("__"))
        .is_some_and(|level| !level.is_empty() && level.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Row numbers: each value is one more than the last, or the first again, as where files were joined.
#[derive(Clone, Copy, Debug, Default)]
struct RowNumbers {
    first_and_last: Option<(f64, f64)>,
}

impl RowNumbers {
    /// `None` if `x` is no row number after these.
    fn next(self, x: f64) -> Option<Self> {
        let first_and_last = match self.first_and_last {
            None if x == 0.0 || x == 1.0 => (x, x),
            Some((first, last)) if x == last + 1.0 || x == first && last > first => (first, x),
            _ => return None,
        };
        Some(Self { first_and_last: Some(first_and_last) })
    }
}

/// Whether a text is a number with a unit or a sign that no notation understands: `5 kg`, `1.5k`, `<0.5`, `USD 5`.
fn has_unit(text: &[u8]) -> bool {
    const MAX_UNIT: usize = 4;
    let Ok(text) = str::from_utf8(text) else { return false };
    let text = text.trim();
    if text.len() > 24 {
        return false;
    }
    let (body, unit) = match text.find(|c: char| c.is_ascii_digit()) {
        // `USD 5`, `< 0.5`: a code of three capitals, or a sign.
        Some(at) if at > 0 => {
            let unit = text[..at].trim().trim_end_matches(['-', '+']);
            let is_code = unit.len() == 3 && unit.bytes().all(|byte| byte.is_ascii_uppercase());
            let is_sign = matches!(unit, "<" | ">" | "<=" | ">=" | "~" | "≤" | "≥" | "R$" | "kr");
            match is_code && text[..at].ends_with(' ') || is_sign {
                true => (&text[at..], ""),
                false => return false,
            }
        }
        Some(_) => {
            let end = text.rfind(|c: char| c.is_ascii_digit()).map_or(0, |at| at + 1);
            (&text[..end], text[end..].trim())
        }
        None => return false,
    };
    let is_unit =
        unit.chars().count() <= MAX_UNIT && unit.chars().all(|c| c.is_alphabetic() || "°²³/µ‰".contains(c));
    is_unit && (body.len() < text.len()) && NotationEvidence::default().observe(body.as_bytes())
}

fn hash(text: &[u8]) -> u64 {
    twox_hash::XxHash3_128::oneshot(text) as u64
}
