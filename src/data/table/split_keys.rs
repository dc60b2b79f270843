//! Which rows of a table belong to which set: by position, by the class in the target column, or by a group column.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::TableSettings;
use super::columns::{CellParser, Column, ColumnKind, suggest_column};
use super::dataset::{OpenFormat, OpenedTable};
use super::notation::Notation;
use crate::cache::CacheKey;
use crate::split::{KeyFile, SplitKeys, SplitMethod, SplitPlan, SplitSettings, key_of};
use crate::{DataError, DatasetContext};

/// What a split of the rows of a table depends on.
pub(super) struct RowSplit<'a> {
    pub paths: &'a [PathBuf],
    pub format: OpenFormat,
    /// The columns in use.
    pub columns: &'a [Column],
    pub parser: &'a CellParser,
    pub settings: &'a TableSettings,
    pub split: &'a SplitSettings,
}

impl OpenedTable {
    /// The split of the rows. By class or by group, it takes a pass over one column, whose keys are cached.
    pub(super) fn split_plan(
        &mut self,
        of: &RowSplit<'_>,
        ctx: &DatasetContext,
    ) -> Result<SplitPlan, DataError> {
        let RowSplit { paths, format, columns, parser, settings, split } = *of;
        let rows = self.reader().rows();
        let column = match &split.method {
            SplitMethod::Grouped(by) => Some(self.group_column(&paths[0], by)?),
            SplitMethod::Stratified => Some(class_column(&paths[0], columns)?),
            SplitMethod::Random | SplitMethod::Last => None,
        };
        let keys = match column.filter(|_| split.needs_keys()) {
            Some(column) => {
                self.measure_readers(std::slice::from_ref(&column), ctx)?;
                ctx.check_memory(&paths[0], self.reader().scan_bytes())?;
                let how = format!("{format:?} {column:?} {:?} {:?}", settings.missing, settings.trim);
                let cache_key = CacheKey::new(paths, &how)?;
                let path = ctx.cache.get_or_create("table-keys", cache_key, |out| {
                    self.write_keys(&paths[0], &column, parser, out, ctx)
                })?;
                Some(KeyFile { path, noun: "row" })
            }
            None => None,
        };
        SplitPlan::new(rows, split, keys.as_ref().map(|keys| keys as &dyn SplitKeys), ctx)
    }

    fn group_column(&self, file: &Path, by: &str) -> Result<Column, DataError> {
        let index = self.names.iter().position(|name| name == by).ok_or_else(|| DataError::Table {
            file: file.to_owned(),
            place: String::new(),
            problem: format!(
                "`group` names `{by}`, which is not a column{}",
                suggest_column(by, &self.names)
            ),
            hint: "use a column of the table; without a header they are called 0, 1, 2 and so on",
        })?;
        let (kind, notation) = (ColumnKind::Category, Notation::default());
        Ok(Column { name: by.to_owned(), index, kind, target: false, weight: false, notation, element: None })
    }

    /// Writes the key of each row in the order of the rows. A row that cannot be read, or that has no value, has the
    /// key of an empty text.
    fn write_keys(
        &self,
        file: &Path,
        column: &Column,
        parser: &CellParser,
        out: &mut impl Write,
        ctx: &DatasetContext,
    ) -> Result<(), DataError> {
        let (reader, activity) = (self.reader(), format!("reading `{}` of {}", column.name, file.display()));
        let (all, mut done, mut next) = (reader.bytes(), 0, 0);
        for part in 0..reader.partitions() {
            ctx.observer.report(&activity, done, all);
            reader.scan(part, std::slice::from_ref(column), &mut |row, cells| {
                debug_assert_eq!(row, next, "partitions are in the order of the rows");
                next += 1;
                let key = match cells {
                    Ok(cells) if !parser.is_missing(cells.cell(0)) => {
                        key_of(parser.category(cells.cell(0)).as_bytes())
                    }
                    _ => key_of(b""),
                };
                out.write_all(&key.to_le_bytes()).map_err(DataError::write(file))
            })?;
            done += reader.partition_bytes(part);
        }
        ctx.observer.report(&activity, all, all);
        Ok(())
    }
}

/// The target, which must be one column of classes.
fn class_column(file: &Path, columns: &[Column]) -> Result<Column, DataError> {
    let mut targets = columns.iter().filter(|column| column.target && !column.weight);
    let (first, more) = (targets.next(), targets.next().is_some());
    let (found, hint) = match first {
        Some(target) if target.kind == ColumnKind::Category && !more => return Ok(target.clone()),
        Some(target) if matches!(target.kind, ColumnKind::Labels | ColumnKind::Flag) => {
            ("labels, of which a row has any number", "use `split = \"random\"`")
        }
        _ => ("numbers", "set `task = \"classes\"` if the numbers are classes, or use `split = \"random\"`"),
    };
    Err(DataError::Table {
        file: file.to_owned(),
        place: String::new(),
        problem: format!("`split = \"stratified\"` needs a target of classes, and this one has {found}"),
        hint,
    })
}
