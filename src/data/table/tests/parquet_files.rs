//! Parquet files written by the library.

use std::sync::Arc;

use ::parquet::basic::{Compression, Encoding};
use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type};
use ::parquet::file::properties::{WriterProperties, WriterVersion};
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;

use super::*;

const SCHEMA: &str = "message table {
    required int32 small; optional int64 large; required float half; optional double y; required boolean flag;
    optional binary colour (utf8); required int32 price (decimal(9, 2)); repeated int32 list; }";

fn properties(compression: Compression, dictionary: bool) -> WriterProperties {
    WriterProperties::builder()
        .set_compression(compression)
        .set_dictionary_enabled(dictionary)
        .set_data_page_row_count_limit(3)
        .set_write_batch_size(2)
        .build()
}

/// Row i: small = i, large = i (null if i % 3 is 1), half = i / 2, y = i + 0.25, flag = whether i is even, colour =
/// red, blue or null, price = i / 100.
fn group(mut group: SerializedRowGroupWriter<'_, &mut Vec<u8>>, rows: std::ops::Range<i32>) {
    let all: Vec<i32> = rows.collect();
    let present = |keep: fn(&i32) -> bool| all.iter().map(|i| i16::from(keep(i))).collect::<Vec<_>>();
    macro_rules! column {
        ($kind:ty, $values:expr, $levels:expr) => {{
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<$kind>().write_batch(&$values, $levels, None).unwrap();
            column.close().unwrap();
        }};
    }
    let some = |i: &&i32| **i % 3 != 1;
    column!(Int32Type, all, None);
    column!(
        Int64Type,
        all.iter().filter(some).map(|i| i64::from(*i)).collect::<Vec<_>>(),
        Some(&present(|i| i % 3 != 1))
    );
    column!(FloatType, all.iter().map(|i| *i as f32 / 2.0).collect::<Vec<_>>(), None);
    column!(
        DoubleType,
        all.iter().map(|i| f64::from(*i) + 0.25).collect::<Vec<_>>(),
        Some(&vec![1; all.len()])
    );
    column!(BoolType, all.iter().map(|i| i % 2 == 0).collect::<Vec<_>>(), None);
    let colour = |i: &i32| ByteArray::from(if i % 2 == 0 { "red" } else { "blue" });
    column!(
        ByteArrayType,
        all.iter().filter(some).map(colour).collect::<Vec<_>>(),
        Some(&present(|i| i % 3 != 1))
    );
    column!(Int32Type, all, None);
    let mut list = group.next_column().unwrap().unwrap();
    let (defined, repeated) = (vec![1; all.len()], vec![0; all.len()]);
    list.typed::<Int32Type>().write_batch(&all, Some(&defined), Some(&repeated)).unwrap();
    list.close().unwrap();
    group.close().unwrap();
}

fn file(groups: &[i32], properties: WriterProperties) -> Vec<u8> {
    let (mut bytes, mut first) = (Vec::new(), 0);
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
    for rows in groups {
        group(writer.next_row_group().unwrap(), first..first + rows);
        first += rows;
    }
    writer.close().unwrap();
    bytes
}

fn settings() -> TableSettings {
    TableSettings { ignore: vec!["list".into()], on_missing: MissingPolicy::Zero, ..target(&["y"]) }
}

/// The dataset, and the folder that must outlive it.
fn opened(bytes: &[u8], settings: &TableSettings) -> Result<(DatasetRef, TableFixture), DataError> {
    let fixture = TableFixture::new();
    let path = [fixture.file("a.parquet", bytes)];
    let (train, _) = fixture.open(&path, &path, TableFileFormat::Parquet, settings)?;
    Ok((train, fixture))
}

#[test]
fn types_nulls_and_row_groups_are_read_whatever_the_compression() {
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(Default::default())]
    {
        for dictionary in [false, true] {
            let (set, _place) =
                opened(&file(&[4, 5], properties(compression, dictionary)), &settings()).unwrap();
            assert_eq!((set.len(), shape(&set)), (9, 8));
            for i in (0..9).rev() {
                let x = i as f32;
                let lacks = i % 3 == 1;
                let colour = |even| f32::from(!lacks && (i % 2 == 0) == even);
                // small, large, half, flag, blue, red, none, price.
                let expected = vec![
                    x,
                    if lacks { 0.0 } else { x },
                    x / 2.0,
                    f32::from(i % 2 == 0),
                    colour(false),
                    colour(true),
                    f32::from(lacks),
                    (f64::from(i) * 0.01) as f32,
                ];
                assert_eq!(read(&set, i as u64).unwrap(), (expected, vec![x + 0.25]), "{compression} {i}");
            }
        }
    }
}

#[test]
fn integers_may_be_classes_and_errors_name_the_record() {
    let bytes = file(&[6, 60], properties(Compression::SNAPPY, true));
    let flag =
        TableSettings { task: TableTask::Classification, columns: vec!["small".into()], ..target(&["flag"]) };
    let (set, _place) = opened(&bytes, &flag).unwrap();
    assert_eq!(
        (classes(&set), read(&set, 7).unwrap()),
        (vec!["0".into(), "1".into()], (vec![7.0], vec![0.0]))
    );
    assert_eq!(set.class_counts(), Some(vec![33, 33]));
    let missing =
        TableSettings { columns: vec!["large".into()], on_missing: MissingPolicy::Error, ..target(&["y"]) };
    let (set, _place) = opened(&bytes, &missing).unwrap();
    let error = read(&set, 10).unwrap_err();
    assert!(error.is_bad_record() && error.to_string().contains("record 10, column `large`"), "{error}");
    let classes = TableSettings {
        classes: vec!["red".into(), "green".into()],
        columns: vec!["half".into()],
        ..target(&["colour"])
    };
    let (set, _place) = opened(&bytes, &classes).unwrap();
    let error = read(&set, 3).unwrap_err().to_string();
    assert!(error.contains("record 3, column `colour`: `blue` is not one of the 2 classes"), "{error}");
    let list = TableSettings { columns: vec!["list.list".into()], ..target(&["y"]) };
    let error = opened(&bytes, &list).err().unwrap().to_string();
    assert!(error.contains("`list.list`") && error.contains("`list`"), "{error}");
    let list = TableSettings { columns: vec!["list".into()], ..target(&["y"]) };
    let (set, _place) = opened(&bytes, &list).unwrap();
    assert_eq!((set.input_names(), read(&set, 7).unwrap().0), (vec!["list.0".to_owned()], vec![7.0]));
}

#[test]
fn delta_encoded_texts_are_read() {
    for encoding in [Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY] {
        let delta = |column: Encoding| {
            WriterProperties::builder()
                .set_writer_version(WriterVersion::PARQUET_2_0)
                .set_dictionary_enabled(false)
                .set_encoding(Encoding::PLAIN)
                .set_column_encoding("colour".into(), column)
                .build()
        };
        for rows in [9, 900] {
            let (plain, _a) = opened(&file(&[rows], delta(Encoding::PLAIN)), &settings()).unwrap();
            let (set, _b) = opened(&file(&[rows], delta(encoding)), &settings()).unwrap();
            assert_eq!(all(&set), all(&plain), "{encoding}");
        }
    }
}

#[test]
fn what_is_no_parquet_or_cannot_be_read_is_refused() {
    for bytes in [&b""[..], b"PAR1", b"not parquet at all, but text", b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1"] {
        let error = opened(bytes, &settings()).err().unwrap();
        assert!(error.hint().is_some() && !error.is_bad_record(), "{error}");
    }
    let empty = opened(&file(&[], properties(Compression::SNAPPY, true)), &settings()).err().unwrap();
    assert!(empty.to_string().contains("it has no rows"), "{empty}");
}

#[test]
fn several_files_are_one_table_and_a_fraction_is_split_off() {
    let fixture = TableFixture::new();
    let bytes = file(&[4, 5], properties(Compression::SNAPPY, true));
    fixture.file("1.parquet", &bytes);
    fixture.file("2.parquet", &bytes);
    let settings = TableSettings { standardise: true, ..settings() };
    let pattern = [fixture.0.path().join("*.parquet")];
    let (train, valid) = fixture.open(&pattern, &[], TableFileFormat::Parquet, &settings).unwrap();
    // A quarter of 18 is 4.5, which rounds to 5.
    assert_eq!((train.len(), valid.len()), (13, 5));
    let mean: f32 = all(&train).iter().map(|(input, _)| input[0]).sum::<f32>() / 13.0;
    assert!(mean.abs() < 1e-6, "{mean}");
}

/// The library recurses over the schema: this one would overflow the stack and abort the process.
#[test]
fn columns_too_deep_in_one_another_are_refused() {
    let deep = |levels: u32| {
        let mut footer = vec![0x15, 2, 0x19, 0xfc];
        let mut count = levels + 1;
        while count >= 128 {
            footer.push(count as u8 | 128);
            count >>= 7;
        }
        footer.push(count as u8);
        // Nested groups called `a` with one child each, and a numeric column innermost.
        (0..levels).for_each(|_| footer.extend([0x48, 1, b'a', 0x15, 2, 0]));
        footer.extend([0x15, 2, 0x25, 0, 0x18, 1, b'a', 0, 0]);
        let size = (footer.len() as u32).to_le_bytes();
        [&b"PAR1"[..], &footer, &size, b"PAR1"].concat()
    };
    let error = opened(&deep(200_000), &settings()).err().unwrap();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("more than 64 deep"), "{error}: {cause}");
    // At a lower depth the library itself reports what is wrong.
    assert!(opened(&deep(20), &settings()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Mutated files are read or refused, with bounded memory.
    #[test]
    fn mutated_files_are_read_or_refused(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        tail in prop::collection::vec((0usize..200, any::<u8>()), 0..2), cut in 0usize..60, packed in 0usize..3,
    ) {
        let compression = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(Default::default())];
        let mut bytes = file(&[3, 4], properties(compression[packed], packed == 1));
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        for (back, byte) in tail {
            let at = bytes.len().saturating_sub(1 + back);
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len() - cut.saturating_sub(50));
        if let Ok((set, _place)) = opened(&bytes, &settings()) {
            prop_assert!(set.resident_bytes() < 200_000_000);
            (0..set.len().min(20)).for_each(|i| drop(read(&set, i)));
        }
    }
}
