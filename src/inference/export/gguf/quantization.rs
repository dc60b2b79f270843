//! The type of each tensor of a GGUF file. The mixes are those of llama.cpp's `llama-quantize`: matrices have the type
//! that was asked for, except those where a few more bits cost little and help most.

use std::collections::BTreeMap;

use candle_core::quantized::GgmlDType;

use super::super::weights::{TensorMapping, WeightDtype};

/// How the matrices of a GGUF file are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    /// Q4_K, with Q6_K for half of the value and down projections.
    Q4KM,
    /// Q5_K, with Q6_K for half of the value and down projections.
    Q5KM,
}

impl Quantization {
    pub const ALL: [Self; 10] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q4KM,
        Self::Q5KM,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Q4KM => "q4_k_m",
            Self::Q5KM => "q5_k_m",
        }
    }

    /// The type of most matrices.
    fn base(self) -> GgmlDType {
        match self {
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q5_0 => GgmlDType::Q5_0,
            Self::Q5_1 => GgmlDType::Q5_1,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4K | Self::Q4KM => GgmlDType::Q4K,
            Self::Q5K | Self::Q5KM => GgmlDType::Q5K,
            Self::Q6K => GgmlDType::Q6K,
        }
    }

    /// Whether a value of its blocks is a scale times an integer, plus a minimum.
    pub fn has_grid(self) -> bool {
        super::grid(self.base()).is_some()
    }

    fn is_mixed(self) -> bool {
        matches!(self, Self::Q4KM | Self::Q5KM)
    }

    /// The code in `general.file_type`; `q4_k` and `q5_k` are closest to the small mixes.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
            Self::Q5_0 => 8,
            Self::Q5_1 => 9,
            Self::Q4K => 14,
            Self::Q4KM => 15,
            Self::Q5K => 16,
            Self::Q5KM => 17,
            Self::Q6K => 18,
        }
    }
}

/// The code in `general.file_type` of a file that is not quantized.
pub(super) fn file_type(dtype: WeightDtype) -> u32 {
    match dtype {
        WeightDtype::F32 => 0,
        WeightDtype::F16 => 1,
        WeightDtype::Bf16 => 32,
    }
}

/// The name of a type of blocks, as `--quantize` has it.
pub(super) fn block_name(dtype: GgmlDType) -> &'static str {
    let found = Quantization::ALL.iter().find(|quantization| quantization.base() == dtype);
    found.map_or("its block", |quantization| quantization.name())
}

/// Chooses the types of a file's tensors.
pub(super) struct TypeRule {
    quantization: Option<Quantization>,
    dtype: WeightDtype,
    layers: usize,
    /// The output layer has weights of its own; otherwise those of the token embedding serve as output too.
    has_output: bool,
}

impl TypeRule {
    pub(super) fn new(
        quantization: Option<Quantization>,
        dtype: WeightDtype,
        layers: usize,
        mappings: &[TensorMapping],
    ) -> Self {
        let has_output = mappings.iter().any(|mapping| mapping.target == "output.weight");
        Self { quantization, dtype, layers, has_output }
    }

    /// The type of a tensor: vectors and position embeddings stay in f32, as llama.cpp requires.
    pub(super) fn dtype(&self, mapping: &TensorMapping) -> GgmlDType {
        let Some(wanted) = self.wanted(mapping) else { return GgmlDType::F32 };
        fit(wanted, mapping.shape.last().copied().unwrap_or(1))
    }

    /// The type without regard to the length of a row; `None` for what is never converted.
    fn wanted(&self, mapping: &TensorMapping) -> Option<GgmlDType> {
        let name = mapping.target.as_str();
        if mapping.shape.len() < 2 || name == "position_embd.weight" {
            return None;
        }
        let Some(quantization) = self.quantization else {
            return Some(match self.dtype {
                WeightDtype::F32 => GgmlDType::F32,
                WeightDtype::F16 => GgmlDType::F16,
                WeightDtype::Bf16 => GgmlDType::BF16,
            });
        };
        let base = quantization.base();
        let is_output = name == if self.has_output { "output.weight" } else { "token_embd.weight" };
        if is_output && quantization != Quantization::Q8_0 {
            // Every logit depends on it, so it gets six bits or more.
            let whole_blocks =
                mapping.shape.last().is_some_and(|row| row.is_multiple_of(GgmlDType::Q6K.block_size()));
            return Some(if whole_blocks { GgmlDType::Q6K } else { GgmlDType::Q8_0 });
        }
        if !quantization.is_mixed() {
            return Some(base);
        }
        let Some((layer, part)) = name
            .strip_prefix("blk.")
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(layer, part)| Some((layer.parse::<usize>().ok()?, part)))
        else {
            return Some(base);
        };
        Some(match part {
            "attn_v.weight" | "ffn_down.weight" if self.is_sensitive(layer) => GgmlDType::Q6K,
            "attn_qkv.weight" if base == GgmlDType::Q4K => GgmlDType::Q5K,
            "attn_qkv.weight" => GgmlDType::Q6K,
            _ => base,
        })
    }

    /// The first and the last eighth of the layers, and every third between them.
    fn is_sensitive(&self, layer: usize) -> bool {
        let eighth = self.layers / 8;
        layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2
    }

    /// How many matrices have another type because of the length of their rows.
    pub(super) fn fallback_note(&self, mappings: &[TensorMapping]) -> Option<String> {
        let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
        for mapping in mappings {
            let (Some(wanted), got) = (self.wanted(mapping), self.dtype(mapping)) else { continue };
            if wanted != got {
                *counts.entry((format!("{wanted:?}"), format!("{got:?}"))).or_default() += 1;
            }
        }
        if counts.is_empty() {
            return None;
        }
        let parts: Vec<String> = counts
            .iter()
            .map(|((wanted, got), count)| format!("{count} matrices are {got} in place of {wanted}"))
            .collect();
        Some(format!("{}: the length of their rows is no multiple of a block", parts.join(", ")))
    }
}

/// The type, or the one that llama.cpp takes in its place if a row is no multiple of its block.
fn fit(wanted: GgmlDType, row: usize) -> GgmlDType {
    if row.is_multiple_of(wanted.block_size()) {
        return wanted;
    }
    let smaller_blocks = match wanted {
        GgmlDType::Q4K => GgmlDType::Q5_0,
        GgmlDType::Q5K => GgmlDType::Q5_1,
        GgmlDType::Q6K => GgmlDType::Q8_0,
        _ => GgmlDType::F16,
    };
    if row.is_multiple_of(smaller_blocks.block_size()) { smaller_blocks } else { GgmlDType::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::export::weights::Transform;
    use crate::params::{MemoryFormat, ParamInit, TensorSpec, TensorUse};

    fn mapping(name: &str, shape: &[usize]) -> TensorMapping {
        let spec = TensorSpec {
            usage: TensorUse::Weight,
            name: name.into(),
            shape: shape.into(),
            init: ParamInit::Constant(0.0),
            memory_format: MemoryFormat::Contiguous,
        };
        TensorMapping::new(name, &spec, Transform::Copy)
    }

    #[test]
    fn q4_k_m_mixes_as_llama_cpp_does() {
        let all = [mapping("output.weight", &[512, 256])];
        let rule = TypeRule::new(Some(Quantization::Q4KM), WeightDtype::F16, 16, &all);
        let dtype = |name: &str| rule.dtype(&mapping(name, &[256, 256]));
        assert_eq!(dtype("output.weight"), GgmlDType::Q6K);
        assert_eq!(dtype("token_embd.weight"), GgmlDType::Q4K);
        assert_eq!(dtype("blk.3.attn_q.weight"), GgmlDType::Q4K);
        assert_eq!(dtype("blk.3.attn_qkv.weight"), GgmlDType::Q5K);
        let sensitive: Vec<usize> =
            (0..16).filter(|n| dtype(&format!("blk.{n}.ffn_down.weight")) == GgmlDType::Q6K).collect();
        assert_eq!(sensitive, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!(rule.dtype(&mapping("blk.0.attn_norm.weight", &[256])), GgmlDType::F32);
        assert_eq!(rule.dtype(&mapping("position_embd.weight", &[64, 256])), GgmlDType::F32);
    }

    #[test]
    fn a_tied_embedding_has_the_type_of_the_output() {
        let all = [mapping("token_embd.weight", &[512, 256])];
        let dtype =
            |quantization| TypeRule::new(Some(quantization), WeightDtype::F16, 2, &all).dtype(&all[0]);
        assert_eq!(dtype(Quantization::Q4_0), GgmlDType::Q6K);
        assert_eq!(dtype(Quantization::Q8_0), GgmlDType::Q8_0);
    }

    #[test]
    fn rows_that_are_no_multiple_of_a_block_fall_back_and_are_reported() {
        let all = [mapping("blk.0.ffn_up.weight", &[96, 96]), mapping("blk.0.attn_q.weight", &[48, 48])];
        let rule = TypeRule::new(Some(Quantization::Q4K), WeightDtype::F16, 2, &all);
        assert_eq!(all.each_ref().map(|m| rule.dtype(m)), [GgmlDType::Q5_0, GgmlDType::F16]);
        let note = rule.fallback_note(&all).unwrap();
        assert!(note.starts_with("1 matrices are F16 in place of Q4K, 1 matrices are Q5_0"), "{note}");
    }
}
