//! A preview of a job's data: what it contains, and its first records as the model will see them.
//!
//! Reads a few records and takes the rest from what the dataset already knows; of a table, a bounded number of rows of
//! both sets are compared.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::base::features::IGNORE_INDEX;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::base::units::{counted, format_count};
use crate::data::warnings::{self, WARNING};
use crate::data::{BatchValues, DataError, Dataset, HostBatch, LengthStats, SampleKey};
use crate::kernels::pixel_lut;

/// Records shown.
const MAX_RECORDS: u64 = 3;
/// Values or tokens shown per record, and characters per text.
const MAX_VALUES: usize = 12;
const MAX_CHARS: usize = 120;
/// Classes listed individually.
const MAX_CLASSES: usize = 20;
/// Cells of the longest histogram bar.
const BAR_CELLS: u64 = 30;

/// Fields a record may have, in display order.
const RECORD_FIELDS: [&str; 10] =
    ["shape", "range", "mean", "row", "values", "tokens", "ids", "text", "target", "bad"];

/// Preview of a training and a validation set.
#[derive(Clone, Debug, Serialize)]
pub struct DataPreview {
    pub train_samples: u64,
    pub valid_samples: u64,
    /// Samples of the test set, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_samples: Option<u64>,
    pub input: String,
    pub target: String,
    /// What the dataset reports about its files.
    #[serde(serialize_with = "as_map", skip_serializing_if = "Vec::is_empty")]
    pub about: Vec<(String, String)>,
    /// Samples per class, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<Vec<(String, u64)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<LengthSummary>,
    /// What may make a run pointless without being an error.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The first records of the training set.
    pub first: Vec<Value>,
}

/// Sample lengths, in tokens.
#[derive(Clone, Debug, Serialize)]
pub struct LengthSummary {
    /// The longest sample before truncation, and its index.
    pub longest: u64,
    pub longest_sample: u64,
    /// (upper bound in tokens, number of samples).
    pub histogram: Vec<(u64, u64)>,
}

/// Previews the datasets. With `skip_bad`, a bad record is shown as such; otherwise it is an error.
pub fn preview(
    train: &dyn Dataset,
    valid: &dyn Dataset,
    seed: u64,
    skip_bad: bool,
) -> Result<DataPreview, DataError> {
    let features = train.features();
    let input = match &features.input {
        InputSpec::Floats { shape } if shape.iter().product::<usize>() == 1 => "1 number".into(),
        InputSpec::Floats { shape } => format!("{shape:?} numbers"),
        InputSpec::Tabular { num_numeric: numbers, cardinalities: categories } => {
            let (numbers, categories) = (*numbers as u64, categories.len() as u64);
            format!("{} and {} to embed", counted(numbers, "number"), counted(categories, "category"))
        }
        InputSpec::Tokens { length, vocab } => format!("{} of {vocab}", counted(*length as u64, "token")),
    };
    let target = match &features.target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } => {
            format!("{}: {}", counted(names.len() as u64, "class"), names.join(", "))
        }
        TargetSpec::MultiLabel { names } => {
            format!("any number of {}: {}", counted(names.len() as u64, "label"), names.join(", "))
        }
        TargetSpec::Values { len } => counted(*len as u64, "number"),
        TargetSpec::Tokens => "the next token".into(),
    };
    let mut first = Vec::new();
    for index in 0..train.len().min(MAX_RECORDS) {
        match record(train, features, index, seed) {
            Err(error) if skip_bad && error.is_bad_record() => {
                first.push(json!({ "sample": index, "bad": error.to_string() }));
            }
            record => first.push(record?),
        }
    }
    let name = |class: usize| features.target.names().get(class).cloned();
    let named = |(class, samples)| (name(class).unwrap_or_else(|| class.to_string()), samples);
    let length_summary = |lengths: LengthStats| LengthSummary {
        longest: lengths.longest.0,
        longest_sample: lengths.longest.1,
        histogram: lengths.histogram,
    };
    Ok(DataPreview {
        train_samples: train.len(),
        valid_samples: valid.len(),
        test_samples: None,
        input,
        target,
        about: train.describe().into_iter().filter(|(name, _)| name != WARNING).collect(),
        balance: train.class_counts().map(|classes| classes.into_iter().enumerate().map(named).collect()),
        lengths: train.length_stats().map(length_summary),
        warnings: warnings::warnings(train, valid, seed),
        first,
    })
}

fn as_map<S: Serializer>(lines: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(lines.iter().map(|(name, value)| (name, value)))
}

/// A record as the model sees it.
fn record(source: &dyn Dataset, features: &Features, index: u64, seed: u64) -> Result<Value, DataError> {
    let batch = HostBatch::single(source, index, SampleKey { seed, epoch: 0, sample: index })?;
    let mut fields = Map::from_iter([("sample".to_owned(), json!(index))]);
    let values = match &batch.inputs {
        BatchValues::U8(bytes, palette) => pixel_lut::expand_bytes(palette, bytes),
        BatchValues::F32(values) => values.clone(),
        BatchValues::U32(_) => Vec::new(),
    };
    match &batch.inputs {
        BatchValues::U8(..) | BatchValues::F32(_) => {
            // Range and mean are meaningless if some values are category indices.
            if let InputSpec::Floats { shape } = &features.input {
                let finite = values.iter().map(|x| f64::from(*x));
                let (low, high) = finite
                    .clone()
                    .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
                let mean = finite.sum::<f64>() / values.len() as f64;
                fields.insert("shape".into(), json!(shape));
                fields.insert("range".into(), json!([round_to_four_digits(low), round_to_four_digits(high)]));
                fields.insert("mean".into(), json!(round_to_four_digits(mean)));
            }
            let columns = source.input_names();
            if columns.len() == values.len() {
                let numbers = if let InputSpec::Tabular { num_numeric: numbers, .. } = features.input {
                    numbers
                } else {
                    values.len()
                };
                let value = |(i, x): (usize, &f32)| match i < numbers {
                    true => json!(round_to_four_digits(f64::from(*x))),
                    false => json!(*x as u64),
                };
                let row = columns.into_iter().zip(values.iter().enumerate().map(value));
                fields.insert("row".into(), row.collect());
            } else if matches!(&features.input, InputSpec::Floats { shape } if shape.len() == 1) {
                let some = values.iter().take(MAX_VALUES).map(|x| round_to_four_digits(f64::from(*x)));
                fields.insert("values".into(), json!(some.collect::<Vec<_>>()));
            }
        }
        BatchValues::U32(tokens) => {
            let length = batch.lengths.first().map_or(tokens.len(), |len| *len as usize);
            let tokens = &tokens[..length.min(tokens.len())];
            fields.insert("tokens".into(), json!(tokens.len()));
            fields.insert("ids".into(), json!(&tokens[..tokens.len().min(MAX_VALUES)]));
            if let Some(text) = source.decode_tokens(tokens) {
                fields.insert("text".into(), json!(truncate_text(&text)));
            }
        }
    }
    let target = match (&features.target, &batch.targets) {
        (TargetSpec::Class { names }, BatchValues::U32(class)) => {
            class.first().map_or(Value::Null, |class| json!(names.get(*class as usize)))
        }
        (TargetSpec::MixedClass { names }, BatchValues::U32(mixed)) => {
            let class = |i: usize| mixed.get(i).and_then(|class| names.get(*class as usize));
            let fraction = f32::from_bits(mixed.get(2).copied().unwrap_or_default());
            json!([class(0), class(1), round_to_four_digits(f64::from(fraction))])
        }
        (TargetSpec::Tokens, BatchValues::U32(tokens)) => {
            let learned = tokens.iter().filter(|&&token| token != IGNORE_INDEX);
            json!(learned.take(MAX_VALUES).collect::<Vec<_>>())
        }
        (TargetSpec::MultiLabel { names }, BatchValues::F32(values)) => {
            let present = names.iter().zip(values).filter(|(_, value)| **value > 0.5);
            json!(present.map(|(name, _)| name).collect::<Vec<_>>())
        }
        (_, BatchValues::F32(values)) => {
            let values = &values[..features.unweighted_target_len().min(values.len())];
            json!(
                values
                    .iter()
                    .take(MAX_VALUES)
                    .map(|x| round_to_four_digits(f64::from(*x)))
                    .collect::<Vec<_>>()
            )
        }
        (_, BatchValues::U32(values)) => json!(&values[..values.len().min(MAX_VALUES)]),
        (_, BatchValues::U8(..)) => unreachable!("targets are classes, tokens or floats"),
    };
    fields.insert("target".into(), target);
    if features.weighted {
        let weight = match &batch.targets {
            BatchValues::F32(values) => values.last().copied(),
            BatchValues::U32(values) => values.last().map(|bits| f32::from_bits(*bits)),
            BatchValues::U8(..) => None,
        };
        fields.insert("weight".into(), json!(weight.map(|weight| round_to_four_digits(weight.into()))));
    }
    Ok(Value::Object(fields))
}

impl DataPreview {
    /// Lines for people: (name, value); a name may be empty.
    pub fn lines(&self) -> Vec<(String, String)> {
        let mut lines = vec![
            ("train samples".to_owned(), format_count(self.train_samples)),
            ("valid samples".into(), format_count(self.valid_samples)),
        ];
        lines.extend(self.test_samples.map(|samples| ("test samples".into(), format_count(samples))));
        lines.push(("input".into(), self.input.clone()));
        lines.push(("target".into(), self.target.clone()));
        lines.extend(self.about.iter().cloned());
        if let Some(classes) = &self.balance {
            lines.extend(balance_lines(classes));
        }
        if let Some(lengths) = &self.lengths {
            let LengthSummary { longest, longest_sample, histogram } = lengths;
            lines
                .push(("longest".into(), format!("{}, sample {longest_sample}", counted(*longest, "token"))));
            let largest = histogram.iter().map(|(_, samples)| *samples).max().unwrap_or(0).max(1);
            for (i, (up_to, samples)) in histogram.iter().enumerate() {
                let name = if i == 0 { "lengths" } else { "" };
                let bar = "▇".repeat((samples * BAR_CELLS).div_ceil(largest) as usize);
                let line = format!("up to {:>7}  {:>9}  {bar}", format_count(*up_to), format_count(*samples));
                lines.push((name.into(), line.trim_end().to_owned()));
            }
        }
        lines.extend(self.warnings.iter().map(|text| (WARNING.to_owned(), text.clone())));
        for record in &self.first {
            let fields = RECORD_FIELDS.into_iter().filter_map(|name| Some((name, record.get(name)?)));
            let text: Vec<String> =
                fields.map(|(name, value)| format!("{name} {}", format_value(value))).collect();
            lines.push((format!("sample {}", record["sample"]), text.join("  ")));
        }
        lines.into_iter().map(|(name, value)| (one_line(&name), one_line(&value))).collect()
    }
}

/// Samples per class; with many classes, only the rarest and the most frequent.
fn balance_lines(classes: &[(String, u64)]) -> Vec<(String, String)> {
    let all: u64 = classes.iter().map(|(_, samples)| samples).sum();
    let percent = |samples: u64| 100.0 * samples as f64 / all.max(1) as f64;
    let format_class = |(name, samples): &(String, u64)| {
        format!("{name} {} ({:.1} %)", format_count(*samples), percent(*samples))
    };
    if classes.len() <= MAX_CLASSES {
        let lines = classes.iter().map(format_class).collect::<Vec<_>>();
        return vec![("balance".into(), lines.join(", "))];
    }
    let rarest = classes.iter().min_by_key(|(_, samples)| *samples);
    let most_frequent = classes.iter().max_by_key(|(_, samples)| *samples);
    match (rarest, most_frequent) {
        (Some(rarest), Some(most_frequent)) => {
            vec![(
                "balance".into(),
                format!("from {} to {}", format_class(rarest), format_class(most_frequent)),
            )]
        }
        _ => Vec::new(),
    }
}

/// Four digits are enough to read, and the same on every machine.
fn round_to_four_digits(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let scale = 10f64.powi(3 - x.abs().log10().floor() as i32);
    (x * scale).round() / scale
}

/// Names of columns and classes come from files, with any characters.
fn one_line(text: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_debug().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}

fn truncate_text(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.escape_debug().to_string(),
        Value::Object(row) => {
            let shown = row.iter().take(MAX_VALUES).map(|(name, value)| format!("{name} = {value}"));
            let more = row.len().saturating_sub(MAX_VALUES);
            let more = (more > 0).then(|| format!("and {more} more"));
            shown.chain(more).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::shapes::ShapesDataset;
    use crate::data::split::DatasetSplit;
    use crate::data::{BatchRow, sequences};

    /// A class or a column may be named by anything that a file holds.
    #[test]
    fn a_line_break_in_a_name_stays_on_its_line() {
        let set = |part| ShapesDataset::new(16, 5, 1, part).unwrap();
        let mut shown = preview(&set(DatasetSplit::Train), &set(DatasetSplit::Valid), 1, false).unwrap();
        shown.target = "2 classes: a\nb, c".into();
        shown.about.push(("x\ty".into(), "category of 2 values".into()));
        let lines = shown.lines();
        assert!(lines.contains(&("target".into(), "2 classes: a\\nb, c".into())), "{lines:?}");
        assert!(lines.contains(&("x\\ty".into(), "category of 2 values".into())), "{lines:?}");
    }

    #[test]
    fn images_and_tokens_are_previewed_as_the_model_sees_them() {
        let set = |part| ShapesDataset::new(16, 5, 1, part).unwrap();
        let shown = preview(&set(DatasetSplit::Train), &set(DatasetSplit::Valid), 1, false).unwrap();
        assert_eq!((shown.train_samples, shown.first.len()), (5, 3));
        let first = &shown.first[0];
        assert_eq!(first["shape"], json!([16, 16, 1]));
        let range = first["range"].as_array().unwrap();
        assert!(range[0].as_f64() < range[1].as_f64(), "{first}");
        assert!(shown.target.contains(first["target"].as_str().unwrap()));
        let lines = shown.lines();
        assert_eq!(lines[0], ("train samples".to_owned(), "5".to_owned()));
        assert!(
            lines.last().unwrap().0 == "sample 2" && lines.last().unwrap().1.contains("mean "),
            "{lines:?}"
        );
        let set = |part| sequences::SequenceDataset::new(2, 32, 16, 0, 5, part);
        let shown = preview(&set(DatasetSplit::Train), &set(DatasetSplit::Valid), 1, false).unwrap();
        assert_eq!(shown.first.len(), 2);
        assert_eq!(shown.first[0]["ids"].as_array().unwrap().len(), MAX_VALUES);
        assert_eq!(shown.first[0]["ids"][1], shown.first[0]["target"][0]);
    }

    /// A table whose second record is bad, and which reports every optional statistic.
    struct TableWithBadRecord(Features);

    impl Dataset for TableWithBadRecord {
        fn len(&self) -> u64 {
            2
        }
        fn features(&self) -> &Features {
            &self.0
        }
        fn read(&self, index: u64, _: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
            if index == 1 {
                let (file, value) = ("t.csv".into(), "x".into());
                let column = Some("age".into());
                return Err(DataError::Value { file, record: 1, column, value, expected: "a number".into() });
            }
            into.input.as_f32_mut().copy_from_slice(&[1.0 / 3.0, -2e-9]);
            into.target.as_u32_mut()[0] = 1;
            Ok(())
        }
        fn input_names(&self) -> Vec<String> {
            vec!["age".into(), "height".into()]
        }
        fn class_counts(&self) -> Option<Vec<u64>> {
            Some(vec![1, 3])
        }
        fn length_stats(&self) -> Option<LengthStats> {
            Some(LengthStats { longest: (900, 1), histogram: vec![(10, 1), (1000, 60)] })
        }
        fn describe(&self) -> Vec<(String, String)> {
            vec![("missing_values".into(), "mean".into())]
        }
    }

    #[test]
    fn a_table_is_shown_by_column_and_a_bad_record_as_such() {
        let names = vec!["no".into(), "yes".into()];
        let set = TableWithBadRecord(Features::new(
            InputSpec::Floats { shape: vec![2] },
            TargetSpec::Class { names },
        ));
        assert!(preview(&set, &set, 1, false).unwrap_err().is_bad_record());
        let shown = preview(&set, &set, 1, true).unwrap();
        assert_eq!(shown.first[0]["row"], json!({ "age": 0.3333, "height": -2e-9 }));
        assert_eq!(shown.first[0]["target"], "yes");
        let text: String =
            shown.lines().into_iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        for expected in [
            "missing_values: mean\n",
            "balance: no 1 (25.0 %), yes 3 (75.0 %)\n",
            "longest: 900 tokens, sample 1\n",
            "lengths: up to      10          1  ▇\n",
            "age = 0.3333, height = -2e-9",
            "sample 1: bad `t.csv`, record 1, column `age`: `x` is not a number\n",
        ] {
            assert!(text.contains(expected), "{expected:?} is not in\n{text}");
        }
        assert_eq!(serde_json::to_value(&shown).unwrap()["lengths"]["longest_sample"], 1);
    }
}
