//! Tables: CSV in its dialects, and Parquet.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::FileCodec;
use crate::random::draw::Draw;

#[derive(Clone, Debug)]
pub struct TableSpec {
    pub format: TableFormat,
    pub columns: Vec<ColumnSpec>,
    /// Whether a CSV file names its columns.
    pub header: bool,
    pub rows: RowCounts,
}

/// Rows per file.
#[derive(Clone, Debug)]
pub struct RowCounts {
    pub train: Vec<usize>,
    pub valid: Vec<usize>,
}

#[derive(Clone, Debug)]
pub enum TableFormat {
    Csv {
        delimiter: &'static str,
        skip_lines: usize,
        packing: FileCodec,
        style: CsvStyle,
    },
    /// Objects, one per line or in an array.
    Json {
        array: bool,
        packing: FileCodec,
    },
    Parquet {
        compression: &'static str,
        dictionary: bool,
        group: usize,
    },
}

/// How a text table is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct CsvStyle {
    pub single_quotes: bool,
    /// What begins a comment; a file with it has one.
    pub comment: Option<&'static str>,
    /// UTF-16 with a byte order mark, otherwise ASCII.
    pub utf16: bool,
    pub decimal_comma: bool,
}

impl TableFormat {
    pub fn extension(&self) -> String {
        match self {
            TableFormat::Csv { packing, .. } => format!("csv{}", packing.extension()),
            TableFormat::Json { packing, .. } => format!("json{}", packing.extension()),
            TableFormat::Parquet { .. } => "parquet".into(),
        }
    }
}

#[derive(Clone, Debug)]
pub enum ColumnSpec {
    /// Missing with this probability.
    Number {
        missing: f64,
    },
    Category {
        values: usize,
        missing: f64,
    },
    /// The target: names or small numbers.
    Class {
        classes: usize,
        text: bool,
    },
    /// The target: any number of labels, with this between them.
    Labels {
        labels: usize,
        separator: &'static str,
    },
    /// The target: whether the row has a label.
    Flag,
    /// Sample weights.
    Weight,
}

/// A field of a row.
enum GeneratedCell {
    Number(f64),
    Text(String),
    Missing,
}

impl ColumnSpec {
    /// The name of a class.
    pub fn class(class: usize, text: bool) -> String {
        if text { format!("class-{class}") } else { class.to_string() }
    }

    fn cell(&self, draw: &mut Draw, row: usize) -> GeneratedCell {
        let missing = |draw: &mut Draw, chance: f64| row > 3 && draw.chance(chance);
        match *self {
            ColumnSpec::Number { missing: chance } if missing(draw, chance) => GeneratedCell::Missing,
            ColumnSpec::Number { .. } => GeneratedCell::Number(draw.float(-5.0, 5.0)),
            ColumnSpec::Category { missing: chance, .. } if missing(draw, chance) => GeneratedCell::Missing,
            // In turn, so that the training rows have every category.
            ColumnSpec::Category { values, .. } => {
                GeneratedCell::Text(format!("of.{}", (row + draw.below(2)) % values))
            }
            ColumnSpec::Class { classes, text } => {
                GeneratedCell::Text(Self::class((row + draw.below(2)) % classes, text))
            }
            ColumnSpec::Labels { labels, separator } => {
                // Every label in turn, sometimes a second one.
                let second = draw.below(labels);
                let count = if draw.chance(0.5) { 2 } else { 1 };
                let names: Vec<String> = [row % labels, second]
                    .iter()
                    .take(count)
                    .map(|label| Self::class(*label, true))
                    .collect();
                GeneratedCell::Text(names.join(separator))
            }
            ColumnSpec::Flag => GeneratedCell::Number(((row + draw.below(2)) % 2) as f64),
            ColumnSpec::Weight => GeneratedCell::Number(draw.float(0.0, 3.0)),
        }
    }
}

impl TableSpec {
    pub fn write(&self, folder: &Path, draw: &mut Draw) -> io::Result<()> {
        for (set, rows) in [("train", &self.rows.train), ("valid", &self.rows.valid)] {
            for (i, &rows) in rows.iter().enumerate() {
                let path = folder.join(format!("{set}-{i}.{}", self.format.extension()));
                let table: Vec<Vec<GeneratedCell>> =
                    (0..rows).map(|row| self.columns.iter().map(|c| c.cell(draw, row)).collect()).collect();
                match self.format {
                    TableFormat::Csv { delimiter, skip_lines, packing, style } => {
                        let text = self.csv(&table, delimiter, skip_lines, style);
                        let bytes = match style.utf16 {
                            true => text.encode_utf16().fold(vec![0xff, 0xfe], |mut bytes, unit| {
                                bytes.extend(unit.to_le_bytes());
                                bytes
                            }),
                            false => text.into_bytes(),
                        };
                        packing.write(&path, &bytes)?;
                    }
                    TableFormat::Json { array, packing } => {
                        packing.write(&path, self.json(&table, array).as_bytes())?;
                    }
                    TableFormat::Parquet { compression, dictionary, group } => {
                        self.parquet(&path, &table, compression, dictionary, group)
                            .map_err(io::Error::other)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn json(&self, table: &[Vec<GeneratedCell>], array: bool) -> String {
        let record = |row: &Vec<GeneratedCell>| {
            let fields = row.iter().enumerate().map(|(i, cell)| {
                let value = match cell {
                    GeneratedCell::Number(value) => (*value).into(),
                    GeneratedCell::Text(value) => value.clone().into(),
                    GeneratedCell::Missing => serde_json::Value::Null,
                };
                (format!("column_{i}"), value)
            });
            serde_json::Value::Object(fields.collect()).to_string()
        };
        let records: Vec<String> = table.iter().map(record).collect();
        if array { format!("[{}]", records.join(",\n")) } else { records.join("\n") + "\n" }
    }

    fn csv(
        &self,
        table: &[Vec<GeneratedCell>],
        delimiter: &str,
        skip_lines: usize,
        style: CsvStyle,
    ) -> String {
        let separator = match delimiter {
            "tab" => "\t",
            "space" => "  ",
            other => other,
        };
        let mut text = "what comes before the table\n".repeat(skip_lines);
        if self.header {
            let quote = if style.single_quotes { '\'' } else { '"' };
            let names: Vec<String> =
                (0..self.columns.len()).map(|i| format!("{quote}column_{i}{quote}")).collect();
            text += &(names.join(separator) + "\n");
        }
        if let Some(comment) = style.comment {
            text += &format!("{comment} what no row says\n");
        }
        for row in table {
            let fields: Vec<String> = row
                .iter()
                .map(|cell| match cell {
                    GeneratedCell::Number(value) if style.decimal_comma => {
                        value.to_string().replace('.', ",")
                    }
                    GeneratedCell::Number(value) => value.to_string(),
                    GeneratedCell::Text(value) => value.clone(),
                    GeneratedCell::Missing => "NA".into(),
                })
                .collect();
            text += &(fields.join(separator) + "\n");
        }
        text
    }

    fn parquet(
        &self,
        path: &Path,
        table: &[Vec<GeneratedCell>],
        compression: &str,
        dictionary: bool,
        group: usize,
    ) -> parquet::errors::Result<()> {
        let fields: Vec<String> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, column)| match column {
                ColumnSpec::Number { .. } | ColumnSpec::Flag | ColumnSpec::Weight => {
                    format!("optional double column_{i};")
                }
                ColumnSpec::Category { .. }
                | ColumnSpec::Class { text: true, .. }
                | ColumnSpec::Labels { .. } => {
                    format!("optional binary column_{i} (utf8);")
                }
                ColumnSpec::Class { .. } => format!("required int32 column_{i};"),
            })
            .collect();
        let schema = parse_message_type(&format!("message table {{ {} }}", fields.join(" ")))?;
        let compression = match compression {
            "snappy" => Compression::SNAPPY,
            "gzip" => Compression::GZIP(GzipLevel::default()),
            "lz4" => Compression::LZ4_RAW,
            "zstd" => Compression::ZSTD(ZstdLevel::default()),
            _ => Compression::UNCOMPRESSED,
        };
        let properties = WriterProperties::builder()
            .set_compression(compression)
            .set_dictionary_enabled(dictionary)
            .set_data_page_row_count_limit(16)
            .build();
        let mut writer =
            SerializedFileWriter::new(File::create(path)?, Arc::new(schema), Arc::new(properties))?;
        for rows in table.chunks(group) {
            let mut group = writer.next_row_group()?;
            for (i, column) in self.columns.iter().enumerate() {
                let cells = || rows.iter().map(|row| &row[i]);
                let present: Vec<i16> =
                    cells().map(|cell| i16::from(!matches!(cell, GeneratedCell::Missing))).collect();
                let texts = cells().filter_map(|cell| match cell {
                    GeneratedCell::Text(text) => Some(text.as_str()),
                    _ => None,
                });
                let Some(mut writer) = group.next_column()? else { break };
                match column {
                    ColumnSpec::Number { .. } | ColumnSpec::Flag | ColumnSpec::Weight => {
                        let values: Vec<f64> = cells()
                            .filter_map(|cell| {
                                if let GeneratedCell::Number(value) = cell { Some(*value) } else { None }
                            })
                            .collect();
                        writer.typed::<DoubleType>().write_batch(&values, Some(&present), None)?;
                    }
                    ColumnSpec::Class { text: false, .. } => {
                        let values: Vec<i32> = texts.filter_map(|text| text.parse().ok()).collect();
                        writer.typed::<Int32Type>().write_batch(&values, None, None)?;
                    }
                    _ => {
                        let values: Vec<ByteArray> = texts.map(ByteArray::from).collect();
                        writer.typed::<ByteArrayType>().write_batch(&values, Some(&present), None)?;
                    }
                }
                writer.close()?;
            }
            group.close()?;
        }
        writer.close().map(drop)
    }
}
