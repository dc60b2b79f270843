//! Evaluates an export and the model it was made from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{ExportError, ExportOptions, ExportSource, MetricComparison, read_back};
use crate::data::Dataset;
use crate::inference::evaluate::evaluate;
use crate::inference::session::SessionOptions;
use crate::inference::trained_model::{Origin, TrainedModel};

/// A file that is removed when it is no longer needed.
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The metrics on `dataset` before and after the export: of `model`, or of the `whole` model it was shrunk from, and of
/// the weights read back from its export. `progress` gets the samples done, out of twice the dataset. `model` holds the
/// exported weights meanwhile and its own again at the end.
pub fn compare(
    whole: Option<&TrainedModel>,
    model: &mut TrainedModel,
    options: &ExportOptions,
    dataset: &Arc<dyn Dataset>,
    session: &SessionOptions,
    mut progress: impl FnMut(u64),
) -> Result<Vec<MetricComparison>, ExportError> {
    let exported = TemporaryFile(hidden_file(&options.folder));
    let points = read_back(&ExportSource::new(model), options, &exported.0)?;
    let before = evaluate(whole.unwrap_or(model), dataset, session, &mut progress)?.metrics;
    let own = (model.weights.clone(), model.statistics.clone(), model.points.clone(), model.origin);
    (model.weights, model.statistics, model.points, model.origin) =
        (exported.0.clone(), exported.0.clone(), points, Origin::Export);
    let after = evaluate(model, dataset, session, |done| progress(dataset.len() + done));
    (model.weights, model.statistics, model.points, model.origin) = own;
    let after = after?.metrics.values();
    // A metric that is undefined for one of them is left out.
    let pair = |(metric, before): (String, f64)| {
        let (_, after) = after.iter().find(|(name, _)| *name == metric)?;
        Some(MetricComparison { metric, before, after: *after })
    };
    Ok(before.values().into_iter().filter_map(pair).collect())
}

/// A file beside the export, where there is room for its weights.
fn hidden_file(folder: &Path) -> PathBuf {
    let name = folder.file_name().map_or_else(|| "export".into(), |name| name.to_string_lossy());
    folder.with_file_name(format!(".{name}.read-back"))
}
