//! Writes rows as csv, JSON lines or Parquet. A file appears under its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{ByteArray, ByteArrayType, FloatType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use serde_json::{Map, Value, json};

use crate::train::Failure;

/// Rows of a Parquet row group.
const ROW_GROUP_ROWS: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    Csv,
    JsonLines,
    Parquet,
}

impl OutputFormat {
    /// The format that the name of a file asks for.
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "csv" => Some(Self::Csv),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct OutputColumn {
    pub name: String,
    pub is_number: bool,
}

impl OutputColumn {
    pub fn text(name: impl ToString) -> Self {
        Self { name: name.to_string(), is_number: false }
    }

    pub fn number(name: impl ToString) -> Self {
        Self { name: name.to_string(), is_number: true }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Null,
    Text(String),
    Number(f32),
}

/// Writes rows of cells, one per column.
pub struct RowWriter {
    columns: Vec<OutputColumn>,
    sink: FileWriter,
    /// The final name and the temporary one; `None` for stdout.
    paths: Option<(PathBuf, PathBuf)>,
}

enum FileWriter {
    Csv(Box<dyn Write>),
    JsonLines(Box<dyn Write>),
    Parquet(Box<SerializedFileWriter<File>>, Vec<Vec<Cell>>),
}

impl RowWriter {
    /// Writes to `path`, or to stdout.
    pub fn create(
        path: Option<&Path>,
        format: OutputFormat,
        columns: Vec<OutputColumn>,
    ) -> Result<Self, Failure> {
        let paths = path.map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            (path.to_owned(), path.with_file_name(format!(".{name}.part")))
        });
        let create = || match &paths {
            Some((_, part)) => File::create(part).map_err(Failure::io("create", part)),
            None => Err(Failure::WrongTask {
                what: "Parquet cannot be written to stdout",
                instead: "name a file with `-o`",
            }),
        };
        let stream = || -> Result<Box<dyn Write>, Failure> {
            match &paths {
                Some(_) => Ok(Box::new(BufWriter::with_capacity(1 << 18, create()?))),
                None => Ok(Box::new(BufWriter::with_capacity(1 << 16, io::stdout()))),
            }
        };
        let mut writer = match format {
            OutputFormat::Csv => Self { sink: FileWriter::Csv(stream()?), columns, paths },
            OutputFormat::JsonLines => Self { sink: FileWriter::JsonLines(stream()?), columns, paths },
            OutputFormat::Parquet => {
                let file = create()?;
                let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
                let opened = schema(&columns).and_then(|schema| {
                    SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))
                });
                let opened = opened.map_err(io::Error::other).map_err(write_error(&paths))?;
                Self { sink: FileWriter::Parquet(Box::new(opened), Vec::new()), columns, paths }
            }
        };
        if let FileWriter::Csv(out) = &mut writer.sink {
            let names: Vec<&str> = writer.columns.iter().map(|column| column.name.as_str()).collect();
            write_csv(out, names.into_iter()).map_err(write_error(&writer.paths))?;
        }
        Ok(writer)
    }

    pub fn write(&mut self, row: Vec<Cell>) -> Result<(), Failure> {
        let written = match &mut self.sink {
            FileWriter::Csv(out) => {
                let text = |cell: &Cell| match cell {
                    Cell::Null => String::new(),
                    Cell::Text(text) => text.clone(),
                    Cell::Number(number) => number.to_string(),
                };
                let fields: Vec<String> = row.iter().map(text).collect();
                write_csv(out, fields.iter().map(String::as_str))
            }
            FileWriter::JsonLines(out) => {
                let field = |(column, cell): (&OutputColumn, Cell)| match cell {
                    Cell::Null => None,
                    Cell::Text(text) => Some((column.name.clone(), Value::String(text))),
                    Cell::Number(number) => Some((column.name.clone(), json!(number))),
                };
                let object: Map<String, Value> = self.columns.iter().zip(row).filter_map(field).collect();
                writeln!(out, "{}", Value::Object(object))
            }
            FileWriter::Parquet(out, rows) => {
                rows.push(row);
                match rows.len() == ROW_GROUP_ROWS {
                    true => write_row_group(out, &self.columns, rows).map_err(io::Error::other),
                    false => Ok(()),
                }
            }
        };
        written.map_err(write_error(&self.paths))
    }

    /// Completes the file and gives it its name.
    pub fn finish(mut self) -> Result<(), Failure> {
        let finished = match &mut self.sink {
            FileWriter::Csv(out) | FileWriter::JsonLines(out) => out.flush(),
            FileWriter::Parquet(out, rows) => {
                let last = if rows.is_empty() { Ok(()) } else { write_row_group(out, &self.columns, rows) };
                last.and_then(|()| out.finish().map(drop)).map_err(io::Error::other)
            }
        };
        finished.map_err(write_error(&self.paths))?;
        match self.paths.take() {
            Some((path, part)) => fs::rename(&part, &path).map_err(Failure::io("write", path)),
            None => Ok(()),
        }
    }
}

impl Drop for RowWriter {
    fn drop(&mut self) {
        if let Some((_, part)) = &self.paths {
            // Best effort: an unfinished file is useless.
            let _ = fs::remove_file(part);
        }
    }
}

fn write_error(paths: &Option<(PathBuf, PathBuf)>) -> impl FnOnce(io::Error) -> Failure {
    let path = paths.as_ref().map_or_else(|| PathBuf::from("stdout"), |(path, _)| path.clone());
    move |source| Failure::Io { what: "write", path, source }
}

fn write_csv<'a>(out: &mut dyn Write, fields: impl Iterator<Item = &'a str>) -> io::Result<()> {
    for (i, field) in fields.enumerate() {
        if i > 0 {
            out.write_all(b",")?;
        }
        match field.contains(['"', ',', '\n', '\r']) {
            true => write!(out, "\"{}\"", field.replace('"', "\"\""))?,
            false => out.write_all(field.as_bytes())?,
        }
    }
    out.write_all(b"\n")
}

fn schema(columns: &[OutputColumn]) -> parquet::errors::Result<Type> {
    let column = |column: &OutputColumn| {
        let (physical, logical) = match column.is_number {
            true => (PhysicalType::FLOAT, None),
            false => (PhysicalType::BYTE_ARRAY, Some(LogicalType::String)),
        };
        let builder = Type::primitive_type_builder(&column.name, physical).with_logical_type(logical);
        builder.with_repetition(Repetition::OPTIONAL).build().map(Arc::new)
    };
    let fields = columns.iter().map(column).collect::<parquet::errors::Result<Vec<_>>>()?;
    Type::group_type_builder("predictions").with_fields(fields).build()
}

/// Writes the rows as one row group and clears them.
fn write_row_group(
    out: &mut SerializedFileWriter<File>,
    columns: &[OutputColumn],
    rows: &mut Vec<Vec<Cell>>,
) -> parquet::errors::Result<()> {
    let mut group = out.next_row_group()?;
    for (i, column) in columns.iter().enumerate() {
        let Some(mut writer) = group.next_column()? else { break };
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row[i] != Cell::Null)).collect();
        match column.is_number {
            true => {
                let number =
                    |row: &Vec<Cell>| if let Cell::Number(number) = row[i] { Some(number) } else { None };
                let values: Vec<f32> = rows.iter().filter_map(number).collect();
                writer.typed::<FloatType>().write_batch(&values, Some(&levels), None)?;
            }
            false => {
                let text = |row: &Vec<Cell>| match &row[i] {
                    Cell::Text(text) => Some(ByteArray::from(text.as_str())),
                    Cell::Null | Cell::Number(_) => None,
                };
                let values: Vec<ByteArray> = rows.iter().filter_map(text).collect();
                writer.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)?;
            }
        }
        writer.close()?;
    }
    group.close()?;
    rows.clear();
    Ok(())
}
