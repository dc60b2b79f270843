//! From the cells of a row to a sample: numbers standardised, categories one-hot or as their place behind all numbers,
//! classes as their number.
//!
//! A cell is first understood as one f64, its code: the number, the category's place in its list, or one of two
//! NaNs for what is missing and what cannot be understood. Text goes through both steps when it is read; columns
//! that were decoded ahead are kept as codes.

use std::collections::HashMap;
use std::path::Path;

use super::columns::{Column, Kind, Reading};
use super::statistics::{Counts, Moments, Seen, Statistics};
use super::{Cell, Cells, OnMissing, OnUnknown, Settings};
use crate::data::{DataError, Features, Input, Row, Target};

/// The code of a cell without a value.
pub const MISSING: f64 = f64::from_bits(0x7ff8_0000_0000_0001);
/// The code of a cell whose value is not one that the column can have.
pub const BAD: f64 = f64::from_bits(0x7ff8_0000_0000_0002);

/// Columns that are told one by one; more are told together.
const SHOWN: usize = 40;

/// How every row of a table becomes a sample.
pub struct Encoding {
    /// Inputs before targets.
    pub columns: Vec<Column>,
    hows: Vec<How>,
    reading: Reading,
    pub features: Features,
    /// Training samples of each class, where they were counted.
    pub balance: Option<Vec<u64>>,
    about: Vec<(String, String)>,
}

enum How {
    /// (x - mean) * scale at `at` of the input or the target. Missing is `fill`, and 1 at `flag`.
    Number { mean: f64, scale: f64, fill: Option<f64>, at: usize, flag: Option<usize> },
    /// 1 at `at` plus the place in the list. Missing has the place `missing`.
    OneHot { list: List, at: usize, missing: Option<usize>, unknown: OnUnknown },
    /// The place in the list at `at`; the one behind all places is what is unknown.
    Place { list: List, at: usize, missing: Option<usize>, unknown: OnUnknown },
    /// The place in the list.
    Class { list: List },
}

/// Categories in order.
struct List {
    places: HashMap<String, u32>,
}

impl Encoding {
    /// `statistics` are of these `columns`; where none were needed, absent.
    pub fn new(
        file: &Path,
        columns: &[Column],
        reading: Reading,
        settings: &Settings,
        statistics: Option<&Statistics>,
    ) -> Result<Self, DataError> {
        let mut encoding = Self {
            columns: columns.to_vec(),
            hows: Vec::new(),
            reading,
            features: Features::new(Input::Floats { shape: vec![0] }, Target::Values { len: 0 }),
            balance: None,
            about: Vec::new(),
        };
        let (mut inputs, mut targets, mut classes) = (0, 0, None);
        let mut categories = Vec::new();
        for (i, column) in columns.iter().enumerate() {
            let seen = statistics.map(|statistics| &statistics.columns[i]);
            if statistics.is_some_and(|statistics| statistics.rows > 0) && seen.is_some_and(Seen::is_empty) {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: format!("column `{}` has no value in any training row", column.name),
                    hint: "put the column in `ignore`",
                });
            }
            let how = match (column.kind, seen) {
                (Kind::Number, seen) => {
                    let moments = if let Some(Seen::Number(moments)) = seen { Some(moments) } else { None };
                    let place = if column.target { &mut targets } else { &mut inputs };
                    number(column, moments, settings, place)
                }
                (Kind::Category, seen) => {
                    let none = Counts::default();
                    let counts = if let Some(Seen::Category(counts)) = seen { counts } else { &none };
                    if column.target {
                        let names = class_names(settings, counts);
                        let count = |name| counts.values.get(name).copied().unwrap_or(0);
                        encoding.balance = statistics.map(|_| names.iter().map(count).collect());
                        let list = List::of(&names);
                        classes = Some(names);
                        How::Class { list }
                    } else {
                        let names = ordered(counts);
                        let missing = (counts.missing > 0).then_some(names.len());
                        let (list, unknown) = (List::of(&names), settings.on_unknown);
                        let places = names.len() + usize::from(missing.is_some());
                        if settings.embed {
                            categories.push(places);
                            // Behind the numbers, once they are counted.
                            How::Place { list, at: categories.len() - 1, missing, unknown }
                        } else {
                            inputs += places;
                            How::OneHot { list, at: inputs - places, missing, unknown }
                        }
                    }
                }
            };
            if column.target || encoding.about.len() < SHOWN {
                encoding.about.push((column.name.clone(), about(column, &how, seen, settings)));
            }
            encoding.hows.push(how);
        }
        if let Some(left_out) = statistics.map(|statistics| statistics.left_out).filter(|n| *n > 0) {
            encoding.about.push(("left out".into(), format!("{left_out} training rows that cannot be used")));
        }
        let target = match classes {
            Some(names) if names.len() < 2 => {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: format!("the target has {} classes: {}", names.len(), names.join(", ")),
                    hint: "a classifier needs two; for numbers to predict set `task = \"values\"`",
                });
            }
            Some(names) => Target::Class { names },
            None => Target::Values { len: targets },
        };
        for how in &mut encoding.hows {
            if let How::Place { at, .. } = how {
                *at += inputs;
            }
        }
        let input = match &categories[..] {
            [] => Input::Floats { shape: vec![inputs] },
            _ => Input::Row { numbers: inputs, categories },
        };
        encoding.features = Features::new(input, target);
        Ok(encoding)
    }

    /// What a cell of column `i` is understood as.
    #[inline]
    pub fn code(&self, i: usize, cell: Cell<'_>) -> f64 {
        if self.reading.is_missing(cell) {
            return MISSING;
        }
        match &self.hows[i] {
            How::Number { .. } => self.reading.number(cell).unwrap_or(BAD),
            How::OneHot { list, .. } | How::Place { list, .. } | How::Class { list } => {
                list.places.get(self.reading.category(cell).as_ref()).map_or(BAD, |place| (*place).into())
            }
        }
    }

    /// Makes a sample of a row.
    pub fn write(&self, cells: &impl Cells, into: &mut Row<'_>) -> Result<(), DataError> {
        into.input.f32().fill(0.0);
        for i in 0..self.columns.len() {
            let code = self.code(i, cells.cell(i));
            self.put(i, code, into).map_err(|wanted| cells.fault(i, wanted))?;
        }
        Ok(())
    }

    /// What was wanted instead, where no sample can be made of a code.
    pub fn wrong(&self, i: usize, code: f64) -> Option<String> {
        let column = &self.columns[i];
        let is_missing = code.to_bits() == MISSING.to_bits();
        match &self.hows[i] {
            How::Number { fill: None, .. } | How::Class { .. } if is_missing => Some(super::present(column)),
            How::Number { .. } if is_missing => None,
            How::Number { mean, scale, .. } => {
                let value = ((code - mean) * scale) as f32;
                (!value.is_finite()).then(|| super::NUMBER.into())
            }
            How::Class { list } => code.is_nan().then(|| format!("one of the {} classes", list.places.len())),
            How::OneHot { missing: Some(_), .. } | How::Place { missing: Some(_), .. } if is_missing => None,
            How::OneHot { list, unknown, .. } | How::Place { list, unknown, .. } => (code.is_nan()
                && *unknown == OnUnknown::Error)
                .then(|| format!("one of the {} categories of the training rows", list.places.len())),
        }
    }

    /// Writes one column's part of a sample, whose input was zero before; or says what was wanted instead.
    #[inline]
    pub fn put(&self, i: usize, code: f64, into: &mut Row<'_>) -> Result<(), String> {
        // Nearly every cell is a number as it should be.
        if let How::Number { mean, scale, at, .. } = &self.hows[i] {
            let value = ((code - mean) * scale) as f32;
            if value.is_finite() {
                let row = if self.columns[i].target { &mut into.target } else { &mut into.input };
                row.f32()[*at] = value;
                return Ok(());
            }
        }
        if let Some(wanted) = self.wrong(i, code) {
            return Err(wanted);
        }
        match &self.hows[i] {
            How::Number { mean, scale, fill, at, flag } => {
                into.input.f32()[*at] = ((fill.unwrap_or_default() - mean) * scale) as f32;
                if let Some(flag) = flag {
                    into.input.f32()[*flag] = 1.0;
                }
            }
            How::OneHot { at, missing, .. } => {
                if let Some(place) = place(code, *missing) {
                    into.input.f32()[at + place] = 1.0;
                }
            }
            How::Place { list, at, missing, .. } => {
                let unknown = list.places.len() + usize::from(missing.is_some());
                into.input.f32()[*at] = place(code, *missing).unwrap_or(unknown) as f32;
            }
            How::Class { .. } => into.target.u32()[0] = code as u32,
        }
        Ok(())
    }

    /// The name of each value of the input: the column's, with the category where there are several.
    pub fn inputs(&self) -> Vec<String> {
        let mut names = vec![String::new(); self.features.input_len()];
        for (column, how) in self.columns.iter().zip(&self.hows).filter(|(column, _)| !column.target) {
            match how {
                How::Number { at, flag, .. } => {
                    names[*at].clone_from(&column.name);
                    flag.iter().for_each(|flag| names[*flag] = format!("{} is missing", column.name));
                }
                How::OneHot { list, at, missing, .. } => {
                    for (name, place) in &list.places {
                        names[at + *place as usize] = format!("{} = {name}", column.name);
                    }
                    missing
                        .iter()
                        .for_each(|place| names[at + place] = format!("{} is missing", column.name));
                }
                How::Place { at, .. } => names[*at].clone_from(&column.name),
                How::Class { .. } => {}
            }
        }
        names
    }

    /// A line for each column.
    pub fn about(&self) -> Vec<(String, String)> {
        let mut about = self.about.clone();
        let more = self.columns.len().saturating_sub(SHOWN);
        if more > 0 {
            // The targets come last and are always told.
            let inputs = SHOWN - 1;
            about.drain(inputs..SHOWN);
            about.insert(inputs, ("...".into(), format!("{more} more columns")));
        }
        about
    }

    /// Bytes it keeps, about.
    pub fn bytes(&self) -> u64 {
        let list = |how: &How| match how {
            How::OneHot { list, .. } | How::Place { list, .. } | How::Class { list } => {
                list.places.keys().map(|name| name.len() as u64 + 48).sum()
            }
            How::Number { .. } => 0,
        };
        self.hows.iter().map(|how| list(how) + size_of::<(How, Column)>() as u64).sum()
    }
}

impl Seen {
    fn is_empty(&self) -> bool {
        match self {
            Seen::Number(moments) => moments.count == 0,
            Seen::Category(counts) => counts.values.is_empty(),
        }
    }
}

impl List {
    fn of(names: &[String]) -> Self {
        Self { places: names.iter().cloned().zip(0..).collect() }
    }
}

fn number(column: &Column, moments: Option<&Moments>, settings: &Settings, next: &mut usize) -> How {
    let average = moments.map_or(0.0, |moments| moments.mean);
    let std = moments.map_or(0.0, Moments::std);
    let (mean, scale) = match settings.standardise {
        // A column of one value becomes 0.
        true => (average, if std > 0.0 { 1.0 / std } else { 1.0 }),
        false => (0.0, 1.0),
    };
    let fill = match settings.on_missing {
        _ if column.target => None,
        OnMissing::Error => None,
        OnMissing::Mean => Some(average),
        OnMissing::Zero => Some(0.0),
    };
    let at = *next;
    *next += 1;
    let lacks = moments.is_some_and(|moments| moments.missing > 0);
    let flag = (settings.missing_flags && lacks && !column.target).then(|| {
        *next += 1;
        at + 1
    });
    How::Number { mean, scale, fill, at, flag }
}

/// The place of a category by its code, where it has one.
fn place(code: f64, missing: Option<usize>) -> Option<usize> {
    if code.to_bits() == MISSING.to_bits() { missing } else { (!code.is_nan()).then_some(code as usize) }
}

/// The classes as declared; otherwise as found, ordered.
fn class_names(settings: &Settings, counts: &Counts) -> Vec<String> {
    if settings.classes.is_empty() { ordered(counts) } else { settings.classes.clone() }
}

/// As numbers where all are numbers, otherwise as text.
fn ordered(counts: &Counts) -> Vec<String> {
    let mut names: Vec<String> = counts.values.keys().cloned().collect();
    let numbers: Option<Vec<f64>> = names.iter().map(|name| name.parse().ok()).collect();
    if numbers.is_some_and(|numbers| numbers.iter().all(|x| x.is_finite())) {
        // Names that are the same number keep their order as text.
        let value = |name: &String| name.parse().unwrap_or(0.0f64);
        names.sort_by(|a, b| value(a).total_cmp(&value(b)));
    }
    names
}

fn about(column: &Column, how: &How, seen: Option<&Seen>, settings: &Settings) -> String {
    let target = if column.target { "target: " } else { "" };
    let missing = |missing: u64| if missing > 0 { format!(", {missing} missing") } else { String::new() };
    match (how, seen) {
        (How::Number { .. }, Some(Seen::Number(moments))) => {
            let (mean, std) = (short(moments.mean), short(moments.std()));
            let how = match (settings.standardise, moments.std() > 0.0) {
                (false, _) => ", as it is",
                (true, true) => "",
                (true, false) => ", always the same: 0 after standardising",
            };
            format!("{target}number, mean {mean}, deviation {std}{}{how}", missing(moments.missing))
        }
        (How::Number { .. }, _) => format!("{target}number, as it is"),
        (How::Class { list }, _) => format!("{target}{} classes", list.places.len()),
        (How::OneHot { list, .. } | How::Place { list, .. }, seen) => {
            let lacking = if let Some(Seen::Category(counts)) = seen { counts.missing } else { 0 };
            let how = if settings.embed { ", embedded" } else { "" };
            format!("{target}category of {} values{}{how}", list.places.len(), missing(lacking))
        }
    }
}

/// Six digits are enough to know a column by.
fn short(x: f64) -> String {
    if x != 0.0 && !(1e-3..1e7).contains(&x.abs()) {
        return format!("{x:.3e}");
    }
    let digits = 5usize.saturating_sub(x.abs().max(1.0).log10() as usize);
    format!("{x:.digits$}")
}
