//! Exports a trained model to the files of other tools.
//!
//! `hf` is a folder that transformers or torchvision opens, `safetensors` the weights beside a description, `gguf` a
//! file for llama.cpp, `onnx` a graph for ONNX Runtime. Takes an [`ExportSource`], writes one tensor at a time into a
//! temporary folder and renames it when it is complete. [`read_back`] decodes what was written to the parameters it
//! stands for, so that the caller can evaluate it. Refuses a kind of model that a format has no form for.

mod description;
mod error;
mod folder;
mod gguf;
mod huggingface;
mod onnx;
mod safetensors_file;
#[cfg(test)]
mod tests;
mod tokenizer;
mod weights;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;
use serde_json::Value;

pub use self::error::ExportError;
pub use self::gguf::Quantization;
pub use self::weights::{ReadBackTensor, WeightDtype};

use self::folder::ExportFolder;
use self::weights::{TensorFile, TensorMapping, all_specs, restore_all};
use crate::base::features::{Features, PixelLut};
use crate::job::ModelConfig;
use crate::layers::Layer;
use crate::layers::norm::NormLayer;
use crate::models::{self, BuiltModel};

/// The files to export to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    Hf,
    Safetensors,
    Gguf,
    Onnx,
}

impl ExportFormat {
    pub const ALL: [Self; 4] = [Self::Hf, Self::Safetensors, Self::Gguf, Self::Onnx];

    pub fn name(self) -> &'static str {
        match self {
            Self::Hf => "hf",
            Self::Safetensors => "safetensors",
            Self::Gguf => "gguf",
            Self::Onnx => "onnx",
        }
    }

    /// Whether models of this kind have a form in the format.
    pub fn supports(self, kind: &str) -> bool {
        match self {
            Self::Safetensors | Self::Onnx => true,
            Self::Hf => matches!(kind, "gpt" | "llama" | "bert" | "vit" | "resnet" | "mobilenet"),
            Self::Gguf => matches!(kind, "gpt" | "llama"),
        }
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
            _ => Ok(()),
        }
    }
}

/// How text became tokens.
#[derive(Clone, Copy, Debug)]
pub enum TokenizerSource<'a> {
    /// Samples are not text, or their tokenizer is unknown.
    None,
    /// A token is a byte.
    Bytes,
    /// The `tokenizer.json` of the checkpoint.
    File(&'a Path),
}

/// Per-channel normalization of images whose values are in 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageNormalization {
    pub mean: Vec<f64>,
    pub std: Vec<f64>,
}

impl ImageNormalization {
    /// What the tables of bytes do; `None` if they only scale to 0 to 1.
    pub fn from_lut(lut: &PixelLut) -> Option<Self> {
        // (byte / 255 - mean) / std, solved for both at the ends of each table.
        let std = |table: &[f32; 256]| 1.0 / (f64::from(table[255]) - f64::from(table[0]));
        let channel = |table: &[f32; 256]| (-f64::from(table[0]) * std(table), std(table));
        let (mean, std): (Vec<f64>, Vec<f64>) = lut.tables.iter().map(channel).unzip();
        let scales_only = mean.iter().all(|v| v.abs() < 1e-6) && std.iter().all(|v| (v - 1.0).abs() < 1e-6);
        (!scales_only).then_some(Self { mean, std })
    }
}

/// A trained model.
#[derive(Clone, Debug)]
pub struct ExportSource<'a> {
    /// What to call the model; the name of its run.
    pub name: &'a str,
    pub model: &'a ModelConfig,
    pub features: &'a Features,
    /// Safetensors with weights and running statistics under the names of the parameters.
    pub weights: &'a Path,
    pub tokenizer: TokenizerSource<'a>,
    /// The Jinja template of chats.
    pub chat_template: Option<&'a str>,
    /// Absent if images are scaled to 0 to 1 only, or samples are not images.
    pub normalization: Option<ImageNormalization>,
    /// The resolved job.
    pub job: Value,
    /// How a raw input becomes a sample: columns, means, categories, image size.
    pub preprocessing: Value,
    /// Updates that the model was trained for.
    pub step: u64,
}

impl ExportSource<'_> {
    fn build(&self) -> Result<BuiltModel, ExportError> {
        Ok(models::build(self.model, self.features)?)
    }
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
    /// Filled in by the caller that evaluates what [`read_back`] gives.
    pub comparison: Option<MetricComparison>,
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
    let folder = ExportFolder::create(&options.folder, options.force)?;
    let dtype = options.dtype();
    let notes = match options.format {
        ExportFormat::Safetensors => {
            let mappings = mappings(source, &built, options.format)?;
            start(&mappings, dtype, progress);
            safetensors_file::write(source, &folder, &mappings, dtype, progress)?;
            folder.write(description::FILE, description::pretty(source).as_bytes())?;
            Vec::new()
        }
        ExportFormat::Hf => {
            let mappings = mappings(source, &built, options.format)?;
            start(&mappings, dtype, progress);
            safetensors_file::write(source, &folder, &mappings, dtype, progress)?;
            huggingface::write_files(source, &built, dtype, &folder)?
        }
        ExportFormat::Gguf => gguf::write(source, &built, options, &folder, progress)?,
        ExportFormat::Onnx => onnx::write(source, &built, dtype, &folder, progress)?,
    };
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
        comparison: None,
    })
}

fn start(mappings: &[TensorMapping], dtype: WeightDtype, progress: &mut dyn ExportProgress) {
    progress.started(mappings.iter().map(|mapping| (mapping.len() * dtype.bytes()) as u64).sum());
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
    })
}

/// Gives `visit` every parameter and running statistic of an export, decoded to f32, one at a time.
pub fn read_back(
    source: &ExportSource,
    options: &ExportOptions,
    visit: &mut dyn FnMut(ReadBackTensor) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let built = source.build()?;
    let mappings = mappings(source, &built, options.format)?;
    match options.format {
        ExportFormat::Safetensors | ExportFormat::Hf => {
            let mut file = TensorFile::open(&options.folder.join(safetensors_file::MODEL))?;
            restore_all(&mappings, |mapping| file.read(&mapping.target, &mapping.shape), visit)
        }
        ExportFormat::Gguf => {
            let mut reader = gguf::Reader::open(&options.folder.join(gguf::FILE))?;
            restore_all(&mappings, |mapping| reader.read(mapping), visit)
        }
        ExportFormat::Onnx => {
            let mut reader = onnx::Reader::open(&options.folder)?;
            restore_all(&mappings, |mapping| reader.read(mapping), visit)
        }
    }
}
