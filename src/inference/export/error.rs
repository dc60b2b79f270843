//! Why an export is refused or fails.

use std::io;
use std::path::{Path, PathBuf};

use super::options::{ExportFormat, GPTQ_KINDS, INT8_KINDS, QuantizedType};
use crate::base::units::Bytes;
use crate::models::ModelError;
use crate::train::Failure;

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("`{kind}` models cannot be exported as `{}`", format.name())]
    UnsupportedPair { kind: &'static str, format: ExportFormat },
    #[error("`{layer}` is factorized by `[lowrank]`, which `{}` does not support", format.name())]
    Factorized { layer: String, format: ExportFormat },
    #[error("pruning made `{layer}` smaller, which `{}` does not support", format.name())]
    Shrunk { layer: String, format: ExportFormat },
    #[error(
        "`{}` has {} units and `{}` has {}, and `{}` states one number for all layers",
        sizes[0].0, sizes[0].1, sizes[1].0, sizes[1].1, format.name()
    )]
    Uneven { sizes: [(String, usize); 2], format: ExportFormat },
    #[error("`--quantize {}` is not supported by `{}`", quantized.name(), format.name())]
    QuantizationFormat { quantized: QuantizedType, format: ExportFormat },
    #[error("`--quantize {}` is not supported for `{kind}` models", quantized.name())]
    QuantizationKind { quantized: QuantizedType, kind: &'static str },
    #[error("`--rounding gptq` is not supported for {}", rounding_case(*quantized, kind))]
    Rounding { quantized: Option<QuantizedType>, kind: &'static str },
    #[error("the activations of `{point}` were not calibrated")]
    Uncalibrated { point: String },
    #[error("`--dtype {dtype}` and `--quantize {quantization}` exclude each other")]
    TwoTypes { dtype: &'static str, quantization: &'static str },
    #[error("`{}` exists and is not empty", .0.display())]
    FolderTaken(PathBuf),
    #[error("a file is in the place of the folder `{}`", .0.display())]
    NotAFolder(PathBuf),
    #[error("the tokenizer has {problem}, and llama.cpp needs {needs}")]
    Tokenizer { problem: String, needs: &'static str },
    #[error("the tokenizer has {tokens} tokens, and the model has embeddings for {vocab}")]
    VocabularySize { tokens: usize, vocab: usize },
    #[error("`{tensor}` has the value {value}, which {dtype} cannot hold")]
    Overflow { tensor: String, value: f32, dtype: &'static str },
    #[error("converting `{tensor}` takes {}, and the budget is {}", Bytes(*needed), Bytes(*max_bytes))]
    Memory { tensor: String, needed: u64, max_bytes: u64 },
    #[error("layer `{layer}` is not supported by this format")]
    UnsupportedLayer { layer: String },
    #[error("`--dtype {dtype}` is not supported by `{}`", format.name())]
    UnsupportedDtype { dtype: &'static str, format: ExportFormat },
    #[error("`{file}` would take {}, and the format has at most {}", Bytes(*bytes), Bytes(*most))]
    TooLarge { file: &'static str, bytes: u64, most: u64 },
    #[error("`{}` cannot be read as weights: {reason}", path.display())]
    Weights { path: PathBuf, reason: String },
    #[error("`{}` does not read back as exported: {reason}", path.display())]
    ReadBack { path: PathBuf, reason: String },
    #[error("cannot {what} `{}`", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Evaluation(#[from] Failure),
    #[error("the conversion failed")]
    Tensor(#[from] candle_core::Error),
}

fn rounding_case(quantized: Option<QuantizedType>, kind: &str) -> String {
    match quantized {
        None => "weights that are not quantized".into(),
        Some(quantized) => format!("`{kind}` models in `{}`", quantized.name()),
    }
}

impl ExportError {
    /// For `map_err`: what was attempted on which path.
    pub(in crate::inference) fn io(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }

    pub(super) fn read_back(path: &Path, reason: impl Into<String>) -> Self {
        Self::ReadBack { path: path.to_owned(), reason: reason.into() }
    }

    /// Whether the command line asked for something that cannot be done.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::UnsupportedPair { .. }
                | Self::Factorized { .. }
                | Self::Shrunk { .. }
                | Self::Uneven { .. }
                | Self::QuantizationFormat { .. }
                | Self::QuantizationKind { .. }
                | Self::Rounding { .. }
                | Self::TwoTypes { .. }
                | Self::UnsupportedLayer { .. }
                | Self::UnsupportedDtype { .. }
                | Self::TooLarge { .. }
                | Self::FolderTaken(_)
                | Self::NotAFolder(_)
                | Self::Tokenizer { .. }
                | Self::Overflow { .. }
        )
    }

    /// What to do instead.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::UnsupportedPair { kind, .. } => {
                let formats: Vec<String> = ExportFormat::of_kind(kind)
                    .map(|format| format!("`--format {}`", format.name()))
                    .collect();
                Some(format!("a `{kind}` model exports with {}", formats.join(", ")))
            }
            Self::Factorized { .. } => Some("`--format onnx` and `safetensors` keep the two layers".into()),
            Self::Shrunk { .. } => Some("`--format onnx` and `safetensors` take layers of any size".into()),
            Self::Uneven { .. } => Some(
                "prune all layers alike: `prune.scope = \"tensor\"`, and none of them alone in `prune.skip` or \
                 `train.freeze`; `--format onnx` and `safetensors` take layers of any size"
                    .into(),
            ),
            Self::QuantizationFormat { quantized, format } => {
                let formats: Vec<String> = quantized
                    .formats()
                    .iter()
                    .map(|format| format!("`--format {}`", format.name()))
                    .collect();
                let names: Vec<&str> = QuantizedType::of_format(*format).map(QuantizedType::name).collect();
                let own = match names.is_empty() {
                    true => "`--dtype f16` or `--dtype bf16` halves its weights".into(),
                    false => format!("it has {}", names.join(", ")),
                };
                Some(format!("{own}; `{}` works with {}", quantized.name(), formats.join(" and ")))
            }
            Self::QuantizationKind { kind, .. } => Some(match INT8_KINDS.contains(kind) {
                true => "`--quantize int8` is supported for them".into(),
                false => {
                    format!("`int8` works for {}; `--dtype f16` halves this model", INT8_KINDS.join(", "))
                }
            }),
            Self::Rounding { kind, .. } => {
                let names: Vec<&str> = QuantizedType::all()
                    .into_iter()
                    .filter(|quantized| quantized.supports_gptq(kind))
                    .map(QuantizedType::name)
                    .collect();
                Some(match names.is_empty() {
                    true => format!("it rounds {} models", GPTQ_KINDS.join(" and ")),
                    false => format!("it rounds a `{kind}` model with `--quantize` {}", names.join(", ")),
                })
            }
            Self::UnsupportedLayer { .. } | Self::TooLarge { .. } => {
                Some("`--format onnx` exports every model".into())
            }
            Self::UnsupportedDtype { format, .. } => {
                let names: Vec<&str> = format.dtypes().iter().map(|dtype| dtype.name()).collect();
                Some(format!("its weights are {}", names.join(", ")))
            }
            Self::TwoTypes { .. } => Some("leave one of them out".into()),
            Self::FolderTaken(_) => Some("choose another folder, or replace this one with `--force`".into()),
            Self::NotAFolder(_) => Some("choose another folder: `--force` replaces no file".into()),
            Self::Tokenizer { .. } => {
                Some("`--format hf` exports any tokenizer, and `--format onnx` needs none".into())
            }
            Self::Overflow { .. } => Some("export with `--dtype bf16` or `--dtype f32`".into()),
            Self::Memory { needed, .. } => {
                Some(format!("allow more with `--set memory.ram={}MiB`", needed.div_ceil(1 << 20)))
            }
            _ => None,
        }
    }
}
