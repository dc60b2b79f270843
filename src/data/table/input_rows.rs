//! The cells of a table as text, row by row, to be written beside predictions.

use std::collections::VecDeque;
use std::path::PathBuf;

use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::Field;
use parquet::record::reader::RowIter;

use super::TableFileFormat;
use super::dataset::OpenFormat;
use super::dialect::{Dialect, RowFields};
use super::rows::{RowReader, open_rows};
use crate::DataError;
use crate::base::regular_file;

/// Reads the rows of files one after another, in the order of the dataset that they make.
pub struct TableRows {
    /// Column names of the first file.
    pub names: Vec<String>,
    format: OpenFormat,
    waiting: VecDeque<PathBuf>,
    open: Option<OpenRows>,
}

enum OpenRows {
    Text(Box<dyn RowReader>, Dialect),
    Parquet(PathBuf, RowIter<'static>),
}

impl TableRows {
    pub fn open(patterns: &[PathBuf], format: TableFileFormat) -> Result<Self, DataError> {
        let waiting: VecDeque<PathBuf> = format.resolve(patterns)?.into();
        let format = match waiting.front() {
            Some(first) => OpenFormat::detect(format, first)?,
            None => OpenFormat::Parquet,
        };
        let mut rows = Self { names: Vec::new(), format, waiting, open: None };
        rows.open_next()?;
        Ok(rows)
    }

    /// The next row; `None` after the last.
    pub fn next_row(&mut self) -> Result<Option<Vec<String>>, DataError> {
        loop {
            let row = match &mut self.open {
                None => return Ok(None),
                Some(OpenRows::Text(reader, dialect)) => reader.next()?.map(|(_, row)| {
                    let mut fields = RowFields::default();
                    fields.split(row, *dialect);
                    let text = |field: &[u8]| dialect.encoding.decode(field).unwrap_or_default().into_owned();
                    (0..fields.len()).map(|i| text(fields.get(row, i))).collect()
                }),
                Some(OpenRows::Parquet(path, rows)) => {
                    let row = rows.next().transpose().map_err(|error| parquet_error(path.clone(), &error))?;
                    row.map(|row| row.get_column_iter().map(|(_, field)| text(field)).collect())
                }
            };
            match row {
                Some(row) => return Ok(Some(row)),
                None => self.open_next()?,
            }
        }
    }

    fn open_next(&mut self) -> Result<(), DataError> {
        self.open = None;
        let Some(path) = self.waiting.pop_front() else { return Ok(()) };
        let (names, open) = match self.format {
            OpenFormat::Rows(dialect) => {
                let mut reader = open_rows(&path, dialect)?;
                (reader.read_names()?.names, OpenRows::Text(reader, dialect))
            }
            OpenFormat::Parquet => {
                let file = regular_file::open(&path).map_err(DataError::io(&path))?;
                let reader =
                    SerializedFileReader::new(file).map_err(|error| parquet_error(path.clone(), &error))?;
                let fields = reader.metadata().file_metadata().schema().get_fields().to_vec();
                let names = fields.iter().map(|field| field.name().to_owned()).collect();
                (names, OpenRows::Parquet(path, RowIter::from_file_into(Box::new(reader))))
            }
        };
        if self.names.is_empty() {
            self.names = names;
        }
        self.open = Some(open);
        Ok(())
    }
}

fn parquet_error(file: PathBuf, error: &parquet::errors::ParquetError) -> DataError {
    DataError::Table {
        file,
        place: String::new(),
        problem: error.to_string(),
        hint: "the file may be damaged, or written with a feature that is not supported",
    }
}

fn text(field: &Field) -> String {
    match field {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        other => other.to_string(),
    }
}
