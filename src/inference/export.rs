//! Exports a trained model to the files of other tools.
//!
//! `hf` is a folder that transformers or torchvision opens, `safetensors` the weights beside a description, `gguf` a
//! file for llama.cpp, `onnx` a graph for ONNX Runtime, `tflite` one for LiteRT. Takes an [`ExportSource`], writes one tensor at a time into a
//! temporary folder and renames it when it is complete. [`read_back`] decodes what was written to the parameters it
//! stands for, so that the caller can evaluate it. Refuses a kind of model that a format has no form for.

mod comparison;
mod description;
mod error;
mod folded;
mod folder;
mod gguf;
mod huggingface;
mod onnx;
mod safetensors_file;
#[cfg(test)]
mod tests;
mod tflite;
mod tokenizer;
mod weights;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;
use serde_json::{Value, json};

pub use self::comparison::compare;
pub use self::error::ExportError;
pub use self::gguf::Quantization;
pub use self::weights::WeightDtype;

use self::folded::{FoldedNetwork, Restored};
use self::folder::ExportFolder;
use self::safetensors_file::TensorHeader;
use self::tokenizer::ExportedTokenizer;
use self::weights::{TensorFile, TensorMapping, WeightFiles, all_specs, by_param, restore};
use super::trained_model::TrainedModel;
use crate::base::features::{Features, InputSpec};
use crate::data::preprocessing::Preprocessing;
use crate::job::{ImageFit, ModelConfig, SourceConfig};
use crate::layers::Layer;
use crate::layers::norm::NormLayer;
use crate::models::{self, BuiltModel};
use crate::params::TensorSpec;
use crate::train::checkpoint::PREPROCESSING;
use crate::train::datasets::images;

/// The files to export to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    Hf,
    Safetensors,
    Gguf,
    Onnx,
    Tflite,
}

impl ExportFormat {
    pub const ALL: [Self; 5] = [Self::Hf, Self::Safetensors, Self::Gguf, Self::Onnx, Self::Tflite];

    pub fn name(self) -> &'static str {
        match self {
            Self::Hf => "hf",
            Self::Safetensors => "safetensors",
            Self::Gguf => "gguf",
            Self::Onnx => "onnx",
            Self::Tflite => "tflite",
        }
    }

    /// Whether models of this kind have a form in the format.
    pub fn supports(self, kind: &str) -> bool {
        match self {
            Self::Safetensors | Self::Onnx => true,
            Self::Hf => matches!(kind, "gpt" | "llama" | "bert" | "vit" | "resnet" | "mobilenet"),
            Self::Gguf => matches!(kind, "gpt" | "llama"),
            Self::Tflite => matches!(kind, "mlp" | "cnn" | "resnet" | "mobilenet"),
        }
    }

    /// The types that its weights may have.
    pub fn dtypes(self) -> &'static [WeightDtype] {
        if self == Self::Tflite { &[WeightDtype::F32] } else { &WeightDtype::ALL }
    }

    /// The formats for models of this kind.
    pub fn of_kind(kind: &str) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |format| format.supports(kind))
    }
}

/// A word that names no option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is none of {}", expected.join(", "))]
pub struct UnknownWord {
    word: String,
    expected: Vec<&'static str>,
}

/// The option called `word` among `all`.
fn by_name<T: Copy>(word: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<T, UnknownWord> {
    let unknown =
        || UnknownWord { word: word.to_owned(), expected: all.iter().map(|one| name(*one)).collect() };
    all.iter().copied().find(|one| name(*one) == word).ok_or_else(unknown)
}

impl FromStr for ExportFormat {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::ALL, Self::name)
    }
}

impl FromStr for WeightDtype {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::ALL, Self::name)
    }
}

impl FromStr for Quantization {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::ALL, Self::name)
    }
}

/// What to export to.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    pub format: ExportFormat,
    /// Without it, f16 for GGUF and f32 elsewhere.
    pub dtype: Option<WeightDtype>,
    pub quantize: Option<Quantization>,
    pub folder: PathBuf,
    /// Replace a folder that has content.
    pub force: bool,
    /// Memory that the conversion may take, in bytes.
    pub max_bytes: u64,
}

impl ExportOptions {
    /// The type of weights that are not quantized.
    pub fn dtype(&self) -> WeightDtype {
        self.dtype.unwrap_or(match self.format {
            ExportFormat::Gguf => WeightDtype::F16,
            _ => WeightDtype::F32,
        })
    }

    /// The type of the weights, for people.
    pub fn type_name(&self) -> &'static str {
        self.quantize.map_or_else(|| self.dtype().name(), Quantization::name)
    }

    /// Refuses what the format has no form for, before anything is read.
    pub fn check(&self, kind: &'static str) -> Result<(), ExportError> {
        if !self.format.supports(kind) {
            return Err(ExportError::UnsupportedPair { kind, format: self.format });
        }
        match (self.quantize.map(Quantization::name), self.dtype) {
            (Some(quantization), _) if self.format != ExportFormat::Gguf => {
                Err(ExportError::QuantizationNeedsGguf { quantization, format: self.format })
            }
            (Some(quantization), Some(dtype)) => {
                Err(ExportError::TwoTypes { dtype: dtype.name(), quantization })
            }
            (None, Some(dtype)) if !self.format.dtypes().contains(&dtype) => {
                Err(ExportError::UnsupportedDtype { dtype: dtype.name(), format: self.format })
            }
            _ => Ok(()),
        }
    }
}

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
    /// What to call the model; the name of its run.
    pub name: &'a str,
    pub model: &'a ModelConfig,
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
    pub kept: Option<&'a Preprocessing>,
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
            features: &preprocessing.features,
            weights: &model.weights,
            statistics: &model.statistics,
            tokenizer,
            chat_template: preprocessing.template.as_deref(),
            image: image_preprocessing(&job.data.source, &preprocessing.features),
            job: json!(job),
            preprocessing: json!({ "table": preprocessing.table, "data": job.data }),
            kept: Some(preprocessing),
            step: model.step,
        }
    }

    fn build(&self) -> Result<BuiltModel, ExportError> {
        Ok(models::build(self.model, self.features)?)
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
    /// What differs from what was asked, such as tensors of another type.
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
    let built = source.build()?;
    check_memory(source, &built, options)?;
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
        ExportFormat::Onnx => onnx::write(source, &built, dtype, &folder, progress)?,
        ExportFormat::Tflite => {
            tflite::write(source, &built, &folder, progress)?;
            Vec::new()
        }
    };
    write_description(source, &folder)?;
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
fn write_description(source: &ExportSource, folder: &ExportFolder) -> Result<(), ExportError> {
    folder.write(description::FILE, description::pretty(source).as_bytes())?;
    if let Some(kept) = source.kept {
        folder.write(PREPROCESSING, &kept.to_json())?;
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
    let Some(largest) = all_specs(&built.layout).max_by_key(|spec| spec.len()) else { return Ok(()) };
    let file = match options.format {
        ExportFormat::Tflite => tflite::file_bytes(source, built),
        _ => 0,
    };
    let (needed, max_bytes) = (file + BYTES_PER_VALUE * largest.len() as u64, options.max_bytes);
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
    let (mappings, dtype) = (mappings(source, built, options.format)?, options.dtype());
    let bytes = |mapping: &TensorMapping| (mapping.len() * dtype.bytes()) as u64;
    progress.started(mappings.iter().map(bytes).sum());
    let headers: Vec<TensorHeader> = mappings
        .iter()
        .map(|mapping| TensorHeader { name: &mapping.target, shape: &mapping.shape })
        .collect();
    let weights = WeightFiles::open(source.weights, source.statistics)?;
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
    format: ExportFormat,
) -> Result<Vec<TensorMapping>, ExportError> {
    Ok(match format {
        ExportFormat::Safetensors => all_specs(&built.layout).map(TensorMapping::copy).collect(),
        ExportFormat::Hf => huggingface::mappings(source.model, &built.layout),
        ExportFormat::Gguf => gguf::mappings(source.model, &built.layout),
        ExportFormat::Onnx => onnx::mappings(source, built)?,
        // Its weights are folded: see `read_back_folded`.
        ExportFormat::Tflite => Vec::new(),
    })
}

/// Decodes an export to f32 and writes it to `path` as safetensors under the names and shapes of the parameters, as in
/// a checkpoint: loading that file evaluates what was exported. One tensor is in memory at a time.
pub fn read_back(source: &ExportSource, options: &ExportOptions, path: &Path) -> Result<(), ExportError> {
    let built = source.build()?;
    if options.format == ExportFormat::Tflite {
        return read_back_folded(source, &built, options, path);
    }
    let mappings = mappings(source, &built, options.format)?;
    let params: Vec<&[TensorMapping]> = by_param(&mappings).collect();
    let headers: Vec<TensorHeader> = params
        .iter()
        .map(|parts| TensorHeader { name: &parts[0].param, shape: &parts[0].param_shape })
        .collect();
    let mut exported = ExportedTensors::open(options)?;
    let mut values = |index: usize| restore(params[index], |mapping| exported.read(mapping));
    safetensors_file::write(path, &headers, WeightDtype::F32, &mut values)
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
    let restored = network.restored(tflite::weight_transform);
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
    Gguf(gguf::Reader),
    Onnx(onnx::Reader),
    Tflite(tflite::Reader),
}

impl ExportedTensors {
    fn open(options: &ExportOptions) -> Result<Self, ExportError> {
        let folder = &options.folder;
        Ok(match options.format {
            ExportFormat::Safetensors | ExportFormat::Hf => {
                Self::Safetensors(TensorFile::open(&folder.join(safetensors_file::MODEL))?)
            }
            ExportFormat::Gguf => Self::Gguf(gguf::Reader::open(&folder.join(gguf::FILE))?),
            ExportFormat::Onnx => Self::Onnx(onnx::Reader::open(folder)?),
            ExportFormat::Tflite => Self::Tflite(tflite::Reader::open(&folder.join(tflite::FILE))?),
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
}
