//! The time zones of Parquet columns. The format stores points in time in UTC; Arrow's schema and the metadata of
//! pandas, kept in the footer, have the zone in which a column was written.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::tz::TimeZone;
use parquet::file::metadata::FileMetaData;
use serde_json::Value;

use super::dates::StampKind;
use super::flatbuffer::Table;
use super::{parquet_values, time_zone};
use crate::DataError;

/// The number of the type of time stamps in Arrow's schema.
const TIMESTAMP: u8 = 10;

/// Zones by leaf, for columns that have one.
pub type LeafZones = BTreeMap<usize, TimeZone>;

/// Finds the zones of the columns of a file.
pub fn find_zones(path: &Path, about: &FileMetaData) -> Result<LeafZones, DataError> {
    let pairs = about.key_value_metadata().map_or(&[][..], Vec::as_slice);
    let text = |key: &str| pairs.iter().find(|pair| pair.key == key)?.value.as_deref();
    let mut names = text("ARROW:schema").map(arrow_zones).unwrap_or_default();
    if names.is_empty() {
        names = text("pandas").map(pandas_zones).unwrap_or_default();
    }
    let mut zones = LeafZones::new();
    for (leaf, column) in about.schema_descr().columns().iter().enumerate().filter(|_| !names.is_empty()) {
        let Some(name) = names.get(column.path().string().as_str()) else { continue };
        if parquet_values::stamp_kind(column) != Some(StampKind::DateTime) {
            continue;
        }
        let zone = time_zone::find(name).ok_or_else(|| DataError::Table {
            file: path.to_owned(),
            place: format!("column `{}`", column.path().string()),
            problem: format!("its time zone `{}` is not known", super::display_value(name.as_bytes())),
            hint: time_zone::UNKNOWN_HINT,
        })?;
        zones.insert(leaf, zone);
    }
    Ok(zones)
}

/// The zone names of the columns in Arrow's schema, a message of its stream format in base64.
fn arrow_zones(base64: &str) -> BTreeMap<String, String> {
    let zones = || {
        let message = decode_base64(base64)?;
        let body = message.strip_prefix(&[0xff; 4]).unwrap_or(&message).get(4..)?;
        let schema = Table::root(body)?.table(2)?;
        let zone = |field: &Table<'_>| {
            let zone = field.table(3).filter(|_| field.u8(2) == TIMESTAMP)?.text(1)?;
            Some((field.text(0)?.to_owned(), zone.to_owned()))
        };
        Some(schema.tables(1).iter().filter_map(zone).filter(|(_, zone)| !zone.is_empty()).collect())
    };
    zones().unwrap_or_default()
}

/// The zone names of the columns in the metadata of pandas.
fn pandas_zones(json: &str) -> BTreeMap<String, String> {
    let about: Value = serde_json::from_str(json).unwrap_or_default();
    let columns = about["columns"].as_array().map_or(&[][..], Vec::as_slice);
    let zone = |column: &Value| {
        let zone = column["metadata"]["timezone"].as_str()?;
        Some((column["field_name"].as_str().or(column["name"].as_str())?.to_owned(), zone.to_owned()))
    };
    columns.iter().filter_map(zone).collect()
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut word, mut bits) = (0u32, 0);
    for letter in text.trim_end_matches('=').bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (word, bits) = (word << 6 | u32::from(value), bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_in_the_metadata() {
        let pandas = r#"{"columns": [{"name": "t", "field_name": "t", "metadata": {"timezone": "Europe/Berlin"}},
                         {"name": "x", "field_name": "x", "metadata": null}]}"#;
        assert_eq!(
            pandas_zones(pandas).into_iter().collect::<Vec<_>>(),
            [("t".into(), "Europe/Berlin".to_owned())]
        );
        assert!(pandas_zones("no json").is_empty() && arrow_zones("no base64!").is_empty());
        assert_eq!(decode_base64("aGVsbG8gd29ybGQ=").unwrap(), b"hello world");
    }
}
