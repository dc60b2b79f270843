//! Opens a folder that `trainer export` wrote, in any format, as a trained model; or a language model that
//! transformers saved.
//!
//! `model.json` has the job of an export and `preprocessing.json` what a checkpoint keeps. Weights that the file has
//! under the names here are used as they are; those of a `vit` for transformers, of a GGUF, an ONNX and a TFLite file
//! are decoded to a temporary file first.

mod published;

use std::path::Path;

use serde_json::Value;

use super::export::{
    ExportError, ExportFormat, ExportOptions, ExportSource, QuantizedType, Rounding, read_back,
    read_back_bytes,
};
use super::trained_model::{Origin, TrainedModel, with_sets};
use crate::base::regular_file;
use crate::base::units::Bytes;
use crate::data::preprocessing::Preprocessing;
use crate::job::ModelConfig;
use crate::memory::probe;
use crate::memory::process::{ProcessMemory, ThreadStacks};
use crate::planner::budget;
use crate::quantization::ActivationPoints;
use crate::train::Failure;
use crate::train::checkpoint::{MODEL, PREPROCESSING};
use crate::train::described_job::{DESCRIPTION, described_job};

/// The description of a model that transformers saved.
const CONFIG: &str = "config.json";

/// Upper bound on the size of each JSON file.
const MAX_JSON_BYTES: u64 = 1 << 30;

/// The model at `folder`; `None` if it is neither. `sets` override keys of its job.
pub fn open(folder: &Path, sets: &[String]) -> Result<Option<TrainedModel>, Failure> {
    let has = |name: &str| folder.join(name).exists();
    if has(DESCRIPTION) {
        return exported(folder, sets).map(Some);
    }
    if has(CONFIG) {
        return published::open(folder, sets).map(Some);
    }
    // The file of an export without the rest, or of another tool.
    match weight_file(folder) {
        Some((file, _)) => {
            Err(unusable(folder, format!("it has `{file}` without the `{DESCRIPTION}` of an export")))
        }
        None => Ok(None),
    }
}

fn unusable(folder: &Path, problem: String) -> Failure {
    Failure::UnusableExport { folder: folder.to_owned(), problem }
}

fn read_json(folder: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    regular_file::read(&folder.join(name), MAX_JSON_BYTES)
        .map_err(|error| unusable(folder, format!("`{name}` cannot be read: {error}")))
}

/// The file of the weights, and its format.
fn weight_file(folder: &Path) -> Option<(&'static str, ExportFormat)> {
    let safetensors = if folder.join(CONFIG).exists() { ExportFormat::Hf } else { ExportFormat::Safetensors };
    let others = [
        ("model.gguf", ExportFormat::Gguf),
        ("model.onnx", ExportFormat::Onnx),
        ("model.tflite", ExportFormat::Tflite),
    ];
    [(MODEL, safetensors)].into_iter().chain(others).find(|(file, _)| folder.join(file).exists())
}

fn exported(folder: &Path, sets: &[String]) -> Result<TrainedModel, Failure> {
    let unusable = |problem| unusable(folder, problem);
    let description: Value = serde_json::from_slice(&read_json(folder, DESCRIPTION)?)
        .map_err(|error| unusable(format!("`{DESCRIPTION}` is not JSON: {error}")))?;
    let job = described_job(&description, folder).map_err(unusable)?;
    let preprocessing = Preprocessing::from_json(&read_json(folder, PREPROCESSING)?)
        .map_err(|problem| unusable(format!("`{PREPROCESSING}`: {problem}")))?;
    let (file, format) = weight_file(folder).ok_or_else(|| {
        unusable(format!("it has none of `{MODEL}`, `model.gguf`, `model.onnx` and `model.tflite`"))
    })?;
    let weights = folder.join(file);
    let mut model = TrainedModel {
        job: with_sets(job, folder, sets)?,
        preprocessing,
        origin: Origin::Export,
        folder: folder.to_owned(),
        statistics: weights.clone(),
        weights,
        step: description["step"].as_u64().unwrap_or(0),
        is_best: false,
        uses_ema: false,
        points: ActivationPoints::None,
        converted: None,
    };
    let has_other_names = matches!((format, &model.job.model), (ExportFormat::Hf, ModelConfig::Vit(_)));
    if has_other_names || matches!(format, ExportFormat::Gguf | ExportFormat::Onnx | ExportFormat::Tflite) {
        let quantize = description["quantize"].as_str().and_then(|name| name.parse().ok());
        convert(&mut model, format, quantize)?;
    }
    Ok(model)
}

/// Decodes the weights to a temporary file that lives as long as the model, and takes the ranges of its activations
/// from an 8-bit export. Refuses an export whose largest tensor does not fit in the job's memory, before it is read.
fn convert(
    model: &mut TrainedModel,
    format: ExportFormat,
    quantize: Option<QuantizedType>,
) -> Result<(), Failure> {
    // Only this thread runs yet.
    let stacks = ThreadStacks { compute_threads: 1, kernel_bytes: 0, loader_threads: 0 };
    let process = ProcessMemory::measure(stacks, 0).non_heap;
    let ram = probe::host().map_or(u64::MAX, |host| budget::host(&model.job.memory, &host));
    let options = ExportOptions {
        format,
        dtype: None,
        quantize,
        rounding: Rounding::Nearest,
        folder: model.folder.clone(),
        force: false,
        max_bytes: ram,
    };
    let unreadable =
        |error: ExportError| unusable(&options.folder, format!("its weights cannot be read: {error}"));
    let source = ExportSource::new(model);
    let needs = process + read_back_bytes(&source, &options).map_err(unreadable)?;
    if needs > ram {
        let none = Bytes(0);
        return Err(Failure::SessionDoesNotFit {
            needs: Bytes(needs),
            ram: Bytes(ram),
            needs_vram: none,
            vram: none,
        });
    }
    let file = tempfile::Builder::new()
        .prefix("trainer-weights-")
        .tempfile()
        .map_err(Failure::io("create a temporary file in", std::env::temp_dir()))?
        .into_temp_path();
    let points = read_back(&source, &options, &file).map_err(unreadable)?;
    model.points = points;
    (model.weights, model.statistics) = (file.to_path_buf(), file.to_path_buf());
    model.converted = Some(file);
    Ok(())
}
