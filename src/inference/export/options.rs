//! What to export to: formats, types of weights, and which of them go together.

use std::path::PathBuf;
use std::str::FromStr;

use super::error::ExportError;
use super::gguf::Quantization;
use super::weights::WeightDtype;
use crate::base::words::{UnknownWord, by_name};
pub(super) use crate::job::INT8_KINDS;
use crate::quantization::blocks::BlockBits;

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

    /// Whether the format can represent models of this kind.
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

impl FromStr for QuantizedType {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::all(), Self::name)
    }
}

/// How a weight becomes one of the values that the format has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// The nearest.
    #[default]
    Nearest,
    /// The one that changes the outputs of its layer least on samples of the training set.
    Gptq,
}

impl Rounding {
    pub const ALL: [Self; 2] = [Self::Nearest, Self::Gptq];

    pub fn name(self) -> &'static str {
        match self {
            Self::Nearest => "nearest",
            Self::Gptq => "gptq",
        }
    }
}

impl FromStr for Rounding {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::ALL, Self::name)
    }
}

/// What a model is quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedType {
    /// 8-bit weights with a scale per output, and activations whose ranges are calibrated; for models of attention
    /// 8-bit matrices in blocks, and activations in floats.
    Int8,
    /// 4-bit matrices in blocks, and activations in floats.
    Int4,
    /// The blocks of a GGUF file.
    Gguf(Quantization),
}

impl QuantizedType {
    pub fn all() -> Vec<Self> {
        [Self::Int8, Self::Int4].into_iter().chain(Quantization::ALL.map(Self::Gguf)).collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Gguf(quantization) => quantization.name(),
        }
    }

    /// The formats that support it.
    pub fn formats(self) -> &'static [ExportFormat] {
        match self {
            Self::Int8 => &[ExportFormat::Onnx, ExportFormat::Tflite],
            Self::Int4 => &[ExportFormat::Onnx],
            Self::Gguf(_) => &[ExportFormat::Gguf],
        }
    }

    /// Whether its formats support it for models of this kind.
    pub fn supports(self, kind: &str) -> bool {
        match self {
            Self::Int8 => INT8_KINDS.contains(&kind) || BLOCK_KINDS.contains(&kind),
            Self::Int4 => BLOCK_KINDS.contains(&kind),
            Self::Gguf(_) => true,
        }
    }

    /// Whether the activations of a model of this kind are quantized too.
    pub fn quantizes_activations(self, kind: &str) -> bool {
        self == Self::Int8 && INT8_KINDS.contains(&kind)
    }

    /// Whether matrices of a model of this kind can be rounded to it by GPTQ: it must know their values before they
    /// are encoded, and the scales of `q4_k` and its like are quantized too.
    pub fn supports_gptq(self, kind: &str) -> bool {
        let has_grid = match self {
            Self::Int8 | Self::Int4 => true,
            Self::Gguf(quantization) => quantization.has_grid(),
        };
        has_grid && GPTQ_KINDS.contains(&kind)
    }

    /// Those of a format.
    pub fn of_format(format: ExportFormat) -> impl Iterator<Item = Self> {
        Self::all().into_iter().filter(move |quantized| quantized.formats().contains(&format))
    }
}

/// Models whose matrices are quantized in blocks.
const BLOCK_KINDS: [&str; 4] = ["gpt", "llama", "bert", "vit"];

/// Models whose matrices GPTQ rounds.
pub(super) const GPTQ_KINDS: [&str; 2] = ["gpt", "llama"];

/// What to export to.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    pub format: ExportFormat,
    /// Without it, f16 for GGUF and f32 elsewhere.
    pub dtype: Option<WeightDtype>,
    pub quantize: Option<QuantizedType>,
    pub rounding: Rounding,
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
        self.quantize.map_or_else(|| self.dtype().name(), QuantizedType::name)
    }

    /// Refuses combinations that the format cannot represent, before anything is read.
    pub fn check(&self, kind: &'static str) -> Result<(), ExportError> {
        if !self.format.supports(kind) {
            return Err(ExportError::UnsupportedPair { kind, format: self.format });
        }
        let rounds = |quantized: QuantizedType| quantized.supports_gptq(kind);
        match (self.quantize, self.dtype) {
            _ if self.rounding == Rounding::Gptq && !self.quantize.is_some_and(rounds) => {
                Err(ExportError::Rounding { quantized: self.quantize, kind })
            }
            (Some(quantized), _) if !quantized.formats().contains(&self.format) => {
                Err(ExportError::QuantizationFormat { quantized, format: self.format })
            }
            (Some(quantized), _) if !quantized.supports(kind) => {
                Err(ExportError::QuantizationKind { quantized, kind })
            }
            (Some(quantized), Some(dtype)) => {
                Err(ExportError::TwoTypes { dtype: dtype.name(), quantization: quantized.name() })
            }
            (None, Some(dtype)) if !self.format.dtypes().contains(&dtype) => {
                Err(ExportError::UnsupportedDtype { dtype: dtype.name(), format: self.format })
            }
            _ => Ok(()),
        }
    }

    /// The blocks of a GGUF file, if they are asked for.
    pub(super) fn blocks(&self) -> Option<Quantization> {
        match self.quantize {
            Some(QuantizedType::Gguf(quantization)) => Some(quantization),
            _ => None,
        }
    }

    /// Whether the activations of a model of this kind are quantized.
    pub(super) fn quantizes_activations(&self, kind: &str) -> bool {
        self.quantize.is_some_and(|quantized| quantized.quantizes_activations(kind))
    }

    /// The bits of matrices in blocks, for a model of this kind.
    pub(super) fn block_bits(&self, kind: &str) -> Option<BlockBits> {
        match self.quantize {
            Some(QuantizedType::Int8) if BLOCK_KINDS.contains(&kind) => Some(BlockBits::Eight),
            Some(QuantizedType::Int4) => Some(BlockBits::Four),
            _ => None,
        }
    }
}
