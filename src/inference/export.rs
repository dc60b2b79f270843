//! Exports a trained model to the files of other tools.
//!
//! `hf` is a folder that transformers or torchvision opens, `safetensors` the weights beside a description, `gguf` a
//! file for llama.cpp, `onnx` a graph for ONNX Runtime, `tflite` one for LiteRT. Takes an [`ExportSource`], writes one
//! tensor at a time into a temporary folder and renames it when it is complete. [`read_back`] decodes what was written
//! to the parameters it stands for, so that the caller can evaluate it. Refuses kinds of models that a format cannot
//! represent.

mod block_sizes;
mod comparison;
mod description;
mod error;
mod folded;
mod folder;
mod gguf;
mod huggingface;
mod onnx;
mod options;
mod rounding;
mod safetensors_file;
mod shrink;
#[cfg(test)]
mod tests;
mod tflite;
mod tokenizer;
mod variant;
mod weights;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

pub use self::comparison::compare;
pub use self::error::ExportError;
pub use self::folder::ExportFolder;
pub use self::gguf::Quantization;
pub use self::options::{ExportFormat, ExportOptions, QuantizedType, Rounding};
pub use self::rounding::{BlockScales, RoundedWeights, round_matrices};
pub use self::shrink::{ShrunkModel, shrink};
pub use self::variant::write_variant;
pub use self::weights::WeightDtype;

use self::block_sizes::BlockSizes;
use self::folded::{FoldedNetwork, Op, Restored};
use self::safetensors_file::TensorHeader;
use self::tokenizer::ExportedTokenizer;
use self::weights::{SavedWeights, TensorFile, TensorMapping, Transform, all_specs, by_param, restore};
use super::trained_model::TrainedModel;
use crate::base::features::{Features, InputSpec};
use crate::data::preprocessing::Preprocessing;
use crate::job::{ImageFit, ModelConfig, Reductions, SourceConfig};
use crate::layers::Layer;
use crate::layers::norm::NormLayer;
use crate::models::{self, BuiltModel};
use crate::params::{ParamLayout, TensorSpec};
use crate::quantization::grid::BlockScale;
use crate::quantization::{ActivationPoints, ActivationQuantization, AffineQuantization, points};
use crate::train::checkpoint::PREPROCESSING;
use crate::train::datasets::images;

/// How text became tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Samples are not text, or their tokenizer is unknown.
    None,
    /// A token is a byte.
    Bytes,
    /// The `tokenizer.json` of the checkpoint.
    File(PathBuf),
}

/// How a decoded image becomes a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePreprocessing {
    /// Per channel: subtracted from values in 0 to 1, which are then divided by `std`.
    pub mean: Vec<f64>,
    pub std: Vec<f64>,
    pub fit: ImageFit,
    /// Sides of the center crop as a fraction of the largest crop.
    pub crop_fraction: f64,
}

/// A trained model.
#[derive(Clone, Debug)]
pub struct ExportSource<'a> {
    /// Name of the model: that of its run.
    pub name: &'a str,
    pub model: &'a ModelConfig,
    /// Low rank and pruned units, which make its layers smaller.
    pub reductions: Reductions,
    pub features: &'a Features,
    /// Safetensors with the weights under the names of the parameters.
    pub weights: &'a Path,
    /// Safetensors with the running statistics, which may be the same file.
    pub statistics: &'a Path,
    pub tokenizer: TokenizerSource,
    /// The Jinja template of chats.
    pub chat_template: Option<&'a str>,
    /// Absent if samples are not images.
    pub image: Option<ImagePreprocessing>,
    /// The resolved job.
    pub job: Value,
    /// How a raw input becomes a sample: columns, means, categories, image size.
    pub preprocessing: Value,
    /// The same as checkpoints keep it, so that the export can be used here too.
    pub checkpoint_preprocessing: Option<&'a Preprocessing>,
    /// The ranges of its activations, for an export in 8-bit integers.
    pub activations: Option<&'a ActivationQuantization>,
    /// The scales of matrices that are already rounded to the blocks of the format.
    pub scales: Option<&'a BlockScales>,
    /// Updates that the model was trained for.
    pub step: u64,
}

impl<'a> ExportSource<'a> {
    pub fn new(model: &'a TrainedModel) -> Self {
        let (job, preprocessing) = (&model.job, &model.preprocessing);
        let tokenizer = match model.tokenizer() {
            _ if model.tokens() == "bytes" => TokenizerSource::Bytes,
            Some(file) => TokenizerSource::File(file),
            None => TokenizerSource::None,
        };
        Self {
            name: &job.name,
            model: &job.model,
            reductions: Reductions::of_job(job),
            features: &preprocessing.features,
            weights: &model.weights,
            statistics: &model.statistics,
            tokenizer,
            chat_template: preprocessing.template.as_deref(),
            image: image_preprocessing(&job.data.source, &preprocessing.features),
            job: json!(job),
            preprocessing: json!({ "table": preprocessing.table, "data": job.data }),
            checkpoint_preprocessing: Some(preprocessing),
            activations: None,
            scales: None,
            step: model.step,
        }
    }

    /// The scales of a parameter's blocks, (outputs, blocks), if it is already rounded.
    fn scales(&self, param: &str) -> Option<&'a [BlockScale]> {
        self.scales?.get(param).map(Vec::as_slice)
    }

    fn build(&self) -> Result<BuiltModel, ExportError> {
        Ok(models::build_reduced(self.model, self.features, &self.reductions)?)
    }

    /// As it is exported: with a point wherever its activations are quantized.
    fn build_for(&self, options: &ExportOptions) -> Result<BuiltModel, ExportError> {
        let mut built = self.build()?;
        if options.quantizes_activations(self.model.kind()) {
            let points = ActivationPoints::Quantize(Arc::new(self.activations.cloned().unwrap_or_default()));
            points::insert(&mut built.network, &self.features.input_shape(), &points)
                .map_err(|point| ExportError::Uncalibrated { point })?;
        }
        Ok(built)
    }
}

/// `None` if samples are not images from files.
fn image_preprocessing(source: &SourceConfig, features: &Features) -> Option<ImagePreprocessing> {
    let InputSpec::Floats { shape } = &features.input else { return None };
    let &[_, _, channels] = shape.as_slice() else { return None };
    let normalization = images::normalization(source)?;
    // One value stands for all channels.
    let per_channel = |values: &[f32]| -> Vec<f64> {
        (0..channels).filter_map(|c| values.get(c).or(values.first())).map(|v| f64::from(*v)).collect()
    };
    let (fit, crop_fraction) = match source {
        SourceConfig::Images(images) => (images.fit, images.crop_fraction),
        _ => (ImageFit::Stretch, 1.0),
    };
    let (mean, std) = (per_channel(&normalization.mean), per_channel(&normalization.std));
    Some(ImagePreprocessing { mean, std, fit, crop_fraction })
}

/// The epsilon of the model's norms over the last dimension, which all have the same.
fn norm_eps(built: &BuiltModel) -> Option<f64> {
    let eps = |layer: &&dyn Layer| {
        let layer: &dyn Any = *layer;
        layer.downcast_ref::<NormLayer>().map(|norm| norm.eps)
    };
    built.network.layers().iter().find_map(eps)
}

/// A file of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportedFile {
    pub name: String,
    pub bytes: u64,
}

/// A validation metric of the model, and of what was read back from its export.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricComparison {
    pub metric: String,
    pub before: f64,
    pub after: f64,
}

/// What an export wrote.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportSummary {
    pub format: &'static str,
    pub folder: PathBuf,
    /// The type of the weights.
    pub dtype: &'static str,
    pub files: Vec<ExportedFile>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes of the weights that were exported.
    pub source_bytes: u64,
    /// What differs from the request, such as tensors of another type.
    pub notes: Vec<String>,
    /// What [`compare`] gives; empty if the export was not evaluated.
    pub comparison: Vec<MetricComparison>,
}

impl fmt::Display for ExportSummary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let files: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        write!(f, "{} ({}) in `{}`: {}", self.format, self.dtype, self.folder.display(), files.join(", "))
    }
}

/// Observes an export.
pub trait ExportProgress {
    /// Bytes of all tensors, before the first is written.
    fn started(&mut self, bytes: u64);
    /// A tensor was written.
    fn tensor_written(&mut self, name: &str, bytes: u64);
}

/// For exports that nobody watches.
pub struct NoExportProgress;

impl ExportProgress for NoExportProgress {
    fn started(&mut self, _: u64) {}
    fn tensor_written(&mut self, _: &str, _: u64) {}
}

/// Exports a model. The folder appears when it is complete; a failure leaves nothing behind.
pub fn export(
    source: &ExportSource,
    options: &ExportOptions,
    progress: &mut dyn ExportProgress,
) -> Result<ExportSummary, ExportError> {
    options.check(source.model.kind())?;
    if let (Some((layer, _)), ExportFormat::Hf | ExportFormat::Gguf) =
        (source.reductions.ranks.first_key_value(), options.format)
    {
        return Err(ExportError::Factorized { layer: layer.clone(), format: options.format });
    }
    let built = source.build_for(options)?;
    check_memory(source, &built, options)?;
    if let ExportFormat::Hf | ExportFormat::Gguf = options.format {
        BlockSizes::of(source, &built, options.format)?;
    }
    let folder = ExportFolder::create(&options.folder, options.force)?;
    let dtype = options.dtype();
    let notes = match options.format {
        ExportFormat::Safetensors => {
            write_safetensors(source, &built, options, &folder, progress)?;
            Vec::new()
        }
        ExportFormat::Hf => {
            write_safetensors(source, &built, options, &folder, progress)?;
            huggingface::write_files(source, &built, dtype, &folder)?
        }
        ExportFormat::Gguf => gguf::write(source, &built, options, &folder, progress)?,
        ExportFormat::Onnx => onnx::write(source, &built, options, &folder, progress)?,
        ExportFormat::Tflite => {
            tflite::write(source, &built, &folder, progress)?;
            Vec::new()
        }
    };
    write_description(source, options, &folder)?;
    let files = folder.commit()?;
    Ok(ExportSummary {
        format: options.format.name(),
        folder: options.folder.clone(),
        dtype: options.type_name(),
        bytes: files.iter().map(|file| file.bytes).sum(),
        files,
        source_bytes: std::fs::metadata(source.weights)
            .map_err(ExportError::io("read", source.weights))?
            .len(),
        notes,
        comparison: Vec::new(),
    })
}

/// Writes what the commands here need to open the export, whatever its format.
fn write_description(
    source: &ExportSource,
    options: &ExportOptions,
    folder: &ExportFolder,
) -> Result<(), ExportError> {
    let quantize = options.quantize.map(QuantizedType::name);
    folder.write(description::FILE, description::pretty(source, quantize).as_bytes())?;
    if let Some(preprocessing) = source.checkpoint_preprocessing {
        folder.write(PREPROCESSING, &preprocessing.to_json())?;
    }
    if let Some(tokenizer) = ExportedTokenizer::load(source)? {
        tokenizer.write(source, folder)?;
    }
    Ok(())
}

/// Bytes of a tensor's copies that are alive together, per value: as read, transformed, and encoded.
const BYTES_PER_VALUE: u64 = 12;

/// The largest tensor must fit, in every form it takes, beside the file if that is in memory as a whole.
fn check_memory(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
) -> Result<(), ExportError> {
    let file = match options.format {
        ExportFormat::Tflite => tflite::file_bytes(source, built),
        _ => 0,
    };
    check_largest(&built.layout, file, options.max_bytes)
}

/// The largest tensor must fit beside `others` bytes.
fn check_largest(layout: &ParamLayout, others: u64, max_bytes: u64) -> Result<(), ExportError> {
    let Some(largest) = all_specs(layout).max_by_key(|spec| spec.len()) else { return Ok(()) };
    let needed = others + BYTES_PER_VALUE * largest.len() as u64;
    match needed <= max_bytes {
        true => Ok(()),
        false => Err(ExportError::Memory { tensor: largest.name.clone(), needed, max_bytes }),
    }
}

/// Writes `model.safetensors` under the names of the format.
fn write_safetensors(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
    folder: &ExportFolder,
    progress: &mut dyn ExportProgress,
) -> Result<(), ExportError> {
    let (mappings, dtype) = (mappings(source, built, options)?, options.dtype());
    let bytes = |mapping: &TensorMapping| (mapping.len() * dtype.bytes()) as u64;
    progress.started(mappings.iter().map(bytes).sum());
    let headers: Vec<TensorHeader> = mappings
        .iter()
        .map(|mapping| TensorHeader { name: &mapping.target, shape: &mapping.shape })
        .collect();
    let weights = SavedWeights::open(source.weights, source.statistics)?;
    let mut values = |index: usize| {
        let values = mappings[index].read(&weights)?;
        progress.tensor_written(&mappings[index].target, bytes(&mappings[index]));
        Ok(values)
    };
    safetensors_file::write(&folder.path().join(safetensors_file::MODEL), &headers, dtype, &mut values)
}

/// The tensors of an export.
fn mappings(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
) -> Result<Vec<TensorMapping>, ExportError> {
    Ok(match options.format {
        ExportFormat::Safetensors => all_specs(&built.layout).map(TensorMapping::copy).collect(),
        ExportFormat::Hf => huggingface::mappings(source.model, &built.layout),
        ExportFormat::Gguf => gguf::mappings(source.model, &built.layout),
        ExportFormat::Onnx => onnx::mappings(source, built, options)?,
        // Its weights are folded: see `read_back_folded`.
        ExportFormat::Tflite => Vec::new(),
    })
}

/// Host bytes that [`read_back`] takes at most: the largest tensor in every form, beside the file if that is in memory
/// as a whole.
pub fn read_back_bytes(source: &ExportSource, options: &ExportOptions) -> Result<u64, ExportError> {
    let built = source.build()?;
    let largest = all_specs(&built.layout).map(TensorSpec::len).max().unwrap_or(0);
    let file = match options.format {
        ExportFormat::Tflite => {
            let path = options.folder.join(tflite::FILE);
            std::fs::metadata(&path).map_err(ExportError::io("read", &path))?.len()
        }
        _ => 0,
    };
    Ok(file + BYTES_PER_VALUE * largest as u64)
}

/// Decodes an export to f32 and writes it to `path` as safetensors under the names and shapes of the parameters, as in
/// a checkpoint: loading that file evaluates what was exported. One tensor is in memory at a time. Returns what
/// happens to the activations of that model.
pub fn read_back(
    source: &ExportSource,
    options: &ExportOptions,
    path: &Path,
) -> Result<ActivationPoints, ExportError> {
    let mut built = source.build()?;
    let quantizes = options.quantizes_activations(source.model.kind());
    if options.format == ExportFormat::Tflite || quantizes {
        read_back_folded(source, &built, options, path)?;
        if !quantizes {
            return Ok(ActivationPoints::None);
        }
        let mut exported = ExportedTensors::open(options)?;
        let names = points::insert(&mut built.network, &[], &ActivationPoints::None).unwrap_or_default();
        let read = |name: String| exported.activation(&name).map(|quantization| (name, quantization));
        let all: ActivationQuantization = names.into_iter().map(read).collect::<Result<_, _>>()?;
        return Ok(ActivationPoints::Quantize(Arc::new(all)));
    }
    let mappings = mappings(source, &built, options)?;
    let params: Vec<&[TensorMapping]> = by_param(&mappings).collect();
    let headers: Vec<TensorHeader> = params
        .iter()
        .map(|parts| TensorHeader { name: &parts[0].param, shape: &parts[0].param_shape })
        .collect();
    let mut exported = ExportedTensors::open(options)?;
    let mut values = |index: usize| restore(params[index], |mapping| exported.read(mapping));
    safetensors_file::write(path, &headers, WeightDtype::F32, &mut values)?;
    Ok(ActivationPoints::None)
}

/// [`read_back`] of a file whose batch norms are folded: parameters that compute the same.
fn read_back_folded(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
    path: &Path,
) -> Result<(), ExportError> {
    let mut exported = ExportedTensors::open(options)?;
    let network = FoldedNetwork::new(source, &built.layout, &built.network)?;
    let restored = network.restored(match options.format {
        ExportFormat::Tflite => tflite::weight_transform,
        _ => |_: &Op| Transform::Copy,
    });
    let specs: Vec<&TensorSpec> = all_specs(&built.layout).collect();
    let headers: Vec<TensorHeader> =
        specs.iter().map(|spec| TensorHeader { name: &spec.name, shape: &spec.shape }).collect();
    let mut values = |index: usize| match restored.get(&specs[index].name) {
        Some(Restored::Tensor(mapping)) => Ok(mapping.restore(exported.read(mapping)?)),
        Some(Restored::Constant(value)) => Ok(vec![*value; specs[index].len()]),
        None => Err(ExportError::read_back(&options.folder, format!("it has no `{}`", specs[index].name))),
    };
    safetensors_file::write(path, &headers, WeightDtype::F32, &mut values)
}

/// The tensors of a written export.
enum ExportedTensors {
    Safetensors(TensorFile),
    Gguf(gguf::GgufReader),
    Onnx(onnx::OnnxReader),
    Tflite(tflite::TfliteReader),
}

impl ExportedTensors {
    fn open(options: &ExportOptions) -> Result<Self, ExportError> {
        let folder = &options.folder;
        Ok(match options.format {
            ExportFormat::Safetensors | ExportFormat::Hf => {
                Self::Safetensors(TensorFile::open(&folder.join(safetensors_file::MODEL))?)
            }
            ExportFormat::Gguf => Self::Gguf(gguf::GgufReader::open(&folder.join(gguf::FILE))?),
            ExportFormat::Onnx => Self::Onnx(onnx::OnnxReader::open(folder)?),
            ExportFormat::Tflite => Self::Tflite(tflite::TfliteReader::open(&folder.join(tflite::FILE))?),
        })
    }

    fn read(&mut self, mapping: &TensorMapping) -> Result<Vec<f32>, ExportError> {
        match self {
            Self::Safetensors(file) => file.read(&mapping.target, &mapping.shape),
            Self::Gguf(reader) => reader.read(mapping),
            Self::Onnx(reader) => reader.read(mapping),
            Self::Tflite(reader) => reader.read(mapping),
        }
    }

    fn activation(&mut self, point: &str) -> Result<AffineQuantization, ExportError> {
        match self {
            Self::Onnx(reader) => reader.activation(point),
            Self::Tflite(reader) => reader.activation(point),
            Self::Safetensors(_) | Self::Gguf(_) => Err(ExportError::Uncalibrated { point: point.into() }),
        }
    }
}
