//! Predictions of a trained model, one row out for each row in, in the order given.

mod writer;

use std::path::Path;
use std::sync::Arc;

use self::writer::RowWriter;
use super::evaluate::target_scales;
use super::session::{PassOutput, Session, SessionOptions};
use super::trained_model::TrainedModel;
use super::view_mean::ViewMean;
use crate::base::features::TargetSpec;
use crate::data::bad_records::BadRecord;
use crate::data::{DataError, Dataset, HostBatch};
use crate::metrics::task::TargetScale;
use crate::metrics::{argmax, sigmoid, softmax};
use crate::train::Failure;

pub use writer::{Cell, OutputColumn, OutputFormat};

/// What a row of the output has besides the prediction.
#[derive(Clone, Copy, Debug)]
pub struct PredictOptions {
    /// A column per class with its probability.
    pub probabilities: bool,
    /// Stop at the first bad row instead of writing its error.
    pub stop_at_bad_row: bool,
}

/// Rows of input that are written beside their predictions.
pub struct InputRows<'a> {
    pub names: Vec<String>,
    /// The next row, as text.
    pub next: &'a mut dyn FnMut() -> Result<Option<Vec<String>>, DataError>,
}

/// What was predicted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictSummary {
    pub rows: u64,
    /// Rows that could not be read, and the error of the first.
    pub bad_rows: u64,
    pub first_error: Option<String>,
    /// Per column: cells with a category that no training row had.
    pub unseen_categories: Vec<(String, u64)>,
}

/// The columns of a prediction.
enum PredictionColumns {
    Classification { names: Vec<String>, probabilities: bool },
    MultiLabel { names: Vec<String>, separator: String, probabilities: bool },
    Regression { targets: Vec<TargetScale> },
}

impl PredictionColumns {
    fn new(model: &TrainedModel, dataset: &dyn Dataset, options: PredictOptions) -> Result<Self, Failure> {
        match &model.features().target {
            TargetSpec::Class { names } | TargetSpec::MixedClass { names } => {
                Ok(Self::Classification { names: names.clone(), probabilities: options.probabilities })
            }
            TargetSpec::MultiLabel { names } => Ok(Self::MultiLabel {
                names: names.clone(),
                separator: model.job.data.source.label_separator().unwrap_or("|").to_owned(),
                probabilities: options.probabilities,
            }),
            TargetSpec::Values { len } => Ok(Self::Regression { targets: target_scales(model, *len) }),
            TargetSpec::Tokens => {
                let _ = dataset;
                Err(Failure::WrongTask {
                    what: "a language model predicts text, not rows",
                    instead: "`trainer generate` continues a prompt, `trainer eval` measures its loss",
                })
            }
        }
    }

    fn columns(&self) -> Vec<OutputColumn> {
        match self {
            PredictionColumns::Classification { names, probabilities } => {
                let mut columns = vec![OutputColumn::text("prediction"), OutputColumn::number("probability")];
                if *probabilities {
                    columns
                        .extend(names.iter().map(|name| OutputColumn::number(format!("probability_{name}"))));
                }
                columns
            }
            PredictionColumns::MultiLabel { names, probabilities, .. } => {
                let mut columns = vec![OutputColumn::text("prediction")];
                if *probabilities {
                    columns
                        .extend(names.iter().map(|name| OutputColumn::number(format!("probability_{name}"))));
                }
                columns
            }
            PredictionColumns::Regression { targets } => match &targets[..] {
                [_] => vec![OutputColumn::number("prediction")],
                several => several
                    .iter()
                    .map(|target| OutputColumn::number(format!("prediction_{}", target.name)))
                    .collect(),
            },
        }
    }

    fn cells(&self, outputs: &[f32], scratch: &mut Vec<f64>, into: &mut Vec<Cell>) {
        match self {
            PredictionColumns::Classification { names, probabilities } => {
                let class = argmax(outputs);
                softmax(outputs, scratch);
                into.push(Cell::Text(names[class].clone()));
                into.push(Cell::Number(scratch[class] as f32));
                if *probabilities {
                    into.extend(scratch.iter().map(|p| Cell::Number(*p as f32)));
                }
            }
            PredictionColumns::MultiLabel { names, separator, probabilities } => {
                let present = names.iter().zip(outputs).filter(|(_, logit)| **logit > 0.0);
                let present: Vec<&str> = present.map(|(name, _)| name.as_str()).collect();
                into.push(Cell::Text(present.join(separator)));
                if *probabilities {
                    into.extend(outputs.iter().map(|logit| Cell::Number(sigmoid(f64::from(*logit)) as f32)));
                }
            }
            PredictionColumns::Regression { targets } => into.extend(
                outputs
                    .iter()
                    .zip(targets)
                    .map(|(value, target)| Cell::Number(target.restore(*value) as f32)),
            ),
        }
    }
}

/// Predicts every sample of `dataset` and writes the rows to `output`, or to stdout. `progress` is called with the rows
/// done.
pub fn predict(
    model: &TrainedModel,
    dataset: &Arc<dyn Dataset>,
    mut inputs: Option<InputRows>,
    (output, format): (Option<&Path>, OutputFormat),
    (session, options): (&SessionOptions, PredictOptions),
    mut progress: impl FnMut(u64),
) -> Result<PredictSummary, Failure> {
    let task = PredictionColumns::new(model, dataset.as_ref(), options)?;
    let session = Session::load(model, dataset.as_ref(), PassOutput::Logits, session)?;
    let named = dataset.sample_name(0).is_some();
    let mut columns = Vec::new();
    columns.extend(named.then(|| OutputColumn::text("file")));
    columns.extend(inputs.iter().flat_map(|rows| rows.names.iter().map(OutputColumn::text)));
    let before = columns.len();
    columns.extend(task.columns());
    let predicted = columns.len() - before;
    columns.push(OutputColumn::text("error"));
    let mut writer = RowWriter::create(output, format, columns)?;
    let (mut summary, mut scratch, width) =
        (PredictSummary::default(), Vec::new(), session.outputs_per_sample());
    let (views, mut last_bad) = (dataset.views(), None);
    let mut mean = ViewMean::new(views, &model.features().target);
    session.for_each_batch(dataset.clone(), |batch| {
        let outputs = if batch.ids.is_empty() { Vec::new() } else { session.logits(batch)? };
        for row in rows_in_order(batch) {
            let (id, predicted_row) = match row {
                Row::Good(i) => {
                    let id = batch.ids[i];
                    match mean.push(id, &outputs[i * width..(i + 1) * width]) {
                        Some(outputs) => (id, Ok(outputs)),
                        None => continue,
                    }
                }
                Row::Bad(i) => {
                    let BadRecord { id, why, .. } = &batch.bad_records[i];
                    // An image is usually bad in all of its views; its row is written once.
                    if last_bad.replace(id / views) == Some(id / views) {
                        continue;
                    }
                    (*id, Err(why))
                }
            };
            let mut cells = Vec::with_capacity(before + predicted + 1);
            cells.extend(dataset.sample_name(id).map(Cell::Text).filter(|_| named));
            if let Some(rows) = &mut inputs {
                let row = (rows.next)()?.unwrap_or_else(|| vec![String::new(); rows.names.len()]);
                cells.extend(row.into_iter().map(Cell::Text));
                cells.resize(before, Cell::Null);
            }
            match predicted_row {
                Ok(outputs) => {
                    task.cells(outputs, &mut scratch, &mut cells);
                    cells.push(Cell::Null);
                }
                Err(why) => {
                    if options.stop_at_bad_row {
                        return Err(Failure::BadRow(why.clone()));
                    }
                    summary.bad_rows += 1;
                    summary.first_error.get_or_insert_with(|| why.clone());
                    cells.resize(before + predicted, Cell::Null);
                    cells.push(Cell::Text(why.clone()));
                }
            }
            writer.write(cells)?;
            summary.rows += 1;
        }
        progress(summary.rows);
        Ok(())
    })?;
    writer.finish()?;
    summary.unseen_categories = dataset.unseen_categories();
    Ok(summary)
}

/// A sample of a batch, by its index among those read or among those that could not be.
enum Row {
    Good(usize),
    Bad(usize),
}

/// The samples of a batch in the order of the dataset.
fn rows_in_order(batch: &HostBatch) -> Vec<Row> {
    let good = batch.ids.iter().enumerate().map(|(i, id)| (*id, Row::Good(i)));
    let bad = batch.bad_records.iter().enumerate().map(|(i, record)| (record.id, Row::Bad(i)));
    let mut rows: Vec<(u64, Row)> = good.chain(bad).collect();
    rows.sort_by_key(|(id, _)| *id);
    rows.into_iter().map(|(_, row)| row).collect()
}
