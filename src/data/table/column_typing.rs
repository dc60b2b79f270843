//! Types columns by what their first rows show, or refuses them with the value and the key that decides.

use std::path::Path;

use super::columns::{Column, ColumnKind, ListElement};
use super::date_text::DatePart;
use super::dates::DateColumn;
use super::inference::ColumnInference;
use super::notation::{DecimalMark, Notation};
use super::{TableSettings, TableTask};
use crate::DataError;
use crate::labels::LabelLists;

/// Types columns by what the first rows show.
pub struct ColumnTyping<'a> {
    file: &'a Path,
    names: &'a [String],
    inferred: &'a [ColumnInference],
    settings: &'a TableSettings,
    /// The decimal mark that columns of the file require, if they agree.
    file_mark: Option<DecimalMark>,
}

impl<'a> ColumnTyping<'a> {
    pub fn new(
        file: &'a Path,
        names: &'a [String],
        inferred: &'a [ColumnInference],
        settings: &'a TableSettings,
    ) -> Self {
        let mut required = inferred.iter().filter_map(ColumnInference::required_mark);
        let first = required.next();
        let file_mark = first.filter(|first| required.all(|mark| mark == *first));
        Self { file, names, inferred, settings, file_mark }
    }

    fn wrong(&self, i: usize, problem: String, hint: &'static str) -> DataError {
        DataError::Table {
            file: self.file.to_owned(),
            place: format!("column `{}`", self.names[i]),
            problem,
            hint,
        }
    }

    pub fn column(&self, i: usize, kind: ColumnKind, target: bool) -> Result<Column, DataError> {
        let notation = match kind {
            ColumnKind::Category | ColumnKind::Labels | ColumnKind::Flag => Notation::Plain,
            ColumnKind::Number => self.inferred[i]
                .notation
                .notation(self.settings.decimal, self.file_mark)
                .map_err(|problem| {
                let (problem, hint) = self.inferred[i].describe_problem(problem);
                self.wrong(i, problem, hint)
            })?,
        };
        let name = self.names[i].clone();
        Ok(Column { name, index: i, kind, target, weight: false, notation, element: None })
    }

    /// A numeric column for each value of the lists of column `i`.
    pub fn list_elements(&self, i: usize, target: bool) -> impl Iterator<Item = Column> {
        let of = self.inferred[i].list.unwrap_or(0);
        (0..of).map(move |at| Column {
            name: format!("{}.{at}", self.names[i]),
            index: i,
            kind: ColumnKind::Number,
            target,
            weight: false,
            notation: Notation::Plain,
            element: Some(ListElement { at, of }),
        })
    }

    /// Whether column `i` holds dates or times and nothing else.
    pub fn is_date(&self, i: usize) -> bool {
        self.inferred[i].date_column(self.settings.dates).is_some()
    }

    /// A numeric column for each part of the dates of column `i`.
    pub fn date_parts(&self, i: usize) -> Result<Vec<Column>, DataError> {
        let seen = self.inferred[i].first_date.as_ref();
        let (line, value) = seen.map_or((0, ""), |place| (place.line, place.value.as_str()));
        match self.inferred[i].date_column(self.settings.dates) {
            Some(DateColumn::Parts { order, parts }) => {
                let column = |part| Column {
                    name: format!("{}.{}", self.names[i], DatePart::name(part)),
                    index: i,
                    kind: ColumnKind::Number,
                    target: false,
                    weight: false,
                    notation: Notation::Date { order, part },
                    element: None,
                };
                Ok(parts.into_iter().map(column).collect())
            }
            Some(DateColumn::Stamps(kind)) => {
                let column = |part: &DatePart| Column {
                    name: format!("{}.{}", self.names[i], part.name()),
                    index: i,
                    kind: ColumnKind::Number,
                    target: false,
                    weight: false,
                    notation: Notation::Stamp { part: *part },
                    element: None,
                };
                Ok(kind.parts().iter().map(column).collect())
            }
            Some(DateColumn::Ambiguous) => Err(self.wrong(
                i,
                format!(
                    "the first number of `{value}` in line {line} may be the day or the month, and no date of the \
                     first rows decides"
                ),
                "set `dates` to \"day_first\" or \"month_first\"",
            )),
            Some(DateColumn::Mixed) => Err(self.wrong(
                i,
                "some dates have a month beyond 12 if the day comes first, and others if the month does".into(),
                "write them alike, or add the column to `categorical` or `ignore`",
            )),
            None => Ok(Vec::new()),
        }
    }

    /// Refuses a target whose cells are lists of labels, unless the job says whether each text is one class.
    pub fn check_labels(&self, i: usize) -> Result<(), DataError> {
        if self.settings.label_separator.is_some()
            || !self.settings.classes.is_empty()
            || self.inferred[i].text_list
        {
            return Ok(());
        }
        let (how, hint) = match self.inferred[i].label_lists() {
            None => return Ok(()),
            Some(LabelLists::Bracketed) if self.settings.task == TableTask::MultiLabel => return Ok(()),
            Some(LabelLists::Bracketed) => (
                "written in brackets".to_owned(),
                "set `task = \"labels\"` for several labels per row, or `task = \"classes\"` if each text is one class",
            ),
            Some(LabelLists::Separated(separator)) => (
                format!("separated by `{separator}`"),
                "set `label_separator` for several labels per row, or `task = \"classes\"` if each text is one class",
            ),
        };
        let example = self.inferred[i].example_list().unwrap_or_default();
        Err(self.wrong(i, format!("its values look like lists of labels, {how}, as in `{example}`"), hint))
    }

    /// Refuses a text among numbers or dates, bounds among numbers, and numbers with units, unless the column is
    /// declared.
    pub fn check_text(&self, i: usize) -> Result<(), DataError> {
        let inferred = &self.inferred[i];
        if let Some(place) = inferred.bound() {
            return Err(self.wrong(
                i,
                format!(
                    "`{}` in line {} is a bound among numbers, and not a number",
                    place.value, place.line
                ),
                "write the number that stands for such a value, or add them to `missing`, or the column to \
                 `categorical` or `ignore`",
            ));
        }
        if let Some((what, place)) = inferred.quantities() {
            return Err(self.wrong(
                i,
                format!("its values look like {what}, as `{}` in line {}", place.value, place.line),
                "write each as a number, or as several columns, or add the column to `categorical` or `ignore`",
            ));
        }
        if inferred.has_year_last_dates() && inferred.date_column(self.settings.dates).is_none() {
            return Err(self.wrong(
                i,
                "its numbers of eight digits look like dates, day, month and year without separators".into(),
                "write them as year-month-day, or add the column to `numeric`, `categorical` or `ignore`",
            ));
        }
        let is_skipped = self.settings.skip_bad && inferred.is_mostly_numbers();
        let (what, place) = if inferred.has_stray_text() && !is_skipped {
            (
                if inferred.is_mostly_numbers() {
                    "most values are numbers"
                } else {
                    "some values are numbers"
                },
                &inferred.first_text,
            )
        } else if inferred.has_stray_date() {
            ("most values are dates", &inferred.first_non_date)
        } else if let Some(place) = inferred.with_unit() {
            return Err(self.wrong(
                i,
                format!(
                    "its values look like numbers with a unit, as `{}` in line {}",
                    place.value, place.line
                ),
                "write the numbers alone, or add the column to `categorical` or `ignore`",
            ));
        } else {
            return Ok(());
        };
        let other = match place {
            Some(place) => format!("`{}` in line {} is not", place.value, place.line),
            None => "not all: some numbers of as many digits are no date".into(),
        };
        Err(self.wrong(
            i,
            format!("{what}, but {other}"),
            "add the text to `missing`, or the column to `categorical` or `ignore`, or correct the value",
        ))
    }

    /// Refuses a target whose texts cannot be classes.
    pub fn check_classes(&self, i: usize) -> Result<(), DataError> {
        let inferred = &self.inferred[i];
        if self.is_date(i) {
            return Err(self.wrong(
                i,
                "the target has dates, which are neither classes nor numbers".into(),
                "name another target, or set `task = \"classes\"` if each date is a class",
            ));
        }
        match inferred.is_all_distinct_text() {
            true => Err(self.wrong(
                i,
                "every row of the target has a text of its own: there is nothing to learn".into(),
                "check `target`, or set `task = \"classes\"` if each text is a class",
            )),
            false => Ok(()),
        }
    }
}
