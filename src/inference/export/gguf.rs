//! GGUF files, which llama.cpp runs: `gpt` models as its `gpt2` architecture and `llama` models as `llama`, with the
//! tokenizer and the chat template in the same file.

mod blocks;
mod container;
mod quantization;
mod vocabulary;

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;

pub(super) use self::blocks::{grid, quantize};
pub use self::quantization::Quantization;

use self::container::{GgufWriter, MetadataValue, TensorEntry};
use self::quantization::TypeRule;
use super::block_sizes::BlockSizes;
use super::error::ExportError;
use super::folder::ExportFolder;
use super::weights::{SavedWeights, TensorMapping, Transform};
use super::{ExportFormat, ExportOptions, ExportProgress, ExportSource, norm_eps};
use crate::base::features::InputSpec;
use crate::base::regular_file;
use crate::job::{GptConfig, LlamaConfig, ModelConfig};
use crate::models::BuiltModel;
use crate::params::ParamLayout;

pub(super) const FILE: &str = "model.gguf";

/// The version of GGUF's `general.quantization_version`: the block layouts of the quantized types.
const QUANTIZATION_VERSION: u32 = 2;

/// Writes `model.gguf` and returns notes on tensors of another type than the requested one.
pub(super) fn write(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
    folder: &ExportFolder,
    progress: &mut dyn ExportProgress,
) -> Result<Vec<String>, ExportError> {
    let mappings = mappings(source.model, &built.layout);
    let rule = type_rule(source.model, options, &mappings);
    let entries: Vec<TensorEntry> = mappings
        .iter()
        .map(|mapping| TensorEntry {
            name: mapping.target.clone(),
            shape: mapping.shape.clone(),
            dtype: rule.dtype(mapping),
        })
        .collect();
    let mut notes = rule.fallback_note(&mappings).into_iter().collect::<Vec<_>>();
    let (metadata, note) = metadata(source, built, options)?;
    notes.extend(note);
    progress.started(entries.iter().map(TensorEntry::bytes).sum());
    let mut writer = GgufWriter::start(folder.file(FILE)?, &metadata, &entries)?;
    let weights = SavedWeights::open(source.weights, source.statistics)?;
    for (mapping, entry) in mappings.iter().zip(&entries) {
        let values = mapping.read(&weights)?;
        match (source.scales(&mapping.param), grid(entry.dtype)) {
            (Some(scales), Some(grid)) => {
                writer.tensor(entry, &blocks::encode(&values, &mapping.reorder_outputs(scales), grid))?;
            }
            _ => {
                let blocks = quantize(&mapping.param, values, &entry.shape, entry.dtype)?;
                writer.tensor(entry, &blocks.data()?)?;
            }
        }
        progress.tensor_written(&entry.name, entry.bytes());
    }
    writer.finish()?;
    Ok(notes)
}

fn type_rule(model: &ModelConfig, options: &ExportOptions, mappings: &[TensorMapping]) -> TypeRule {
    TypeRule::new(options.blocks(), options.dtype(), layers(model), mappings)
}

/// The types of the tensors of a file.
pub(super) fn dtypes(
    model: &ModelConfig,
    options: &ExportOptions,
    mappings: &[TensorMapping],
) -> Vec<GgmlDType> {
    let rule = type_rule(model, options, mappings);
    mappings.iter().map(|mapping| rule.dtype(mapping)).collect()
}

fn layers(model: &ModelConfig) -> usize {
    match model {
        ModelConfig::Gpt(gpt) => gpt.layers,
        ModelConfig::Llama(llama) => llama.layers,
        _ => 0,
    }
}

/// The tensors in llama.cpp's names and layouts.
pub(super) fn mappings(model: &ModelConfig, layout: &ParamLayout) -> Vec<TensorMapping> {
    let rename = match model {
        ModelConfig::Gpt(_) => gpt_name,
        _ => llama_name,
    };
    layout
        .params
        .iter()
        .map(|(spec, _)| {
            let target = rename(&spec.name);
            let transform = match model {
                // GPT-2 stores its linear layers as (inputs, outputs), llama.cpp as (outputs, inputs).
                ModelConfig::Gpt(_)
                    if spec.shape.len() == 2 && target.starts_with("blk.") && target.ends_with("weight") =>
                {
                    Transform::Transpose
                }
                ModelConfig::Llama(llama)
                    if target.ends_with("attn_q.weight") || target.ends_with("attn_k.weight") =>
                {
                    Transform::InterleaveHalves { heads: spec.shape[0] / (llama.width / llama.heads) }
                }
                _ => Transform::Copy,
            };
            TensorMapping::new(target, spec, transform)
        })
        .collect()
}

/// llama.cpp's name of a tensor of transformers' GPT-2.
fn gpt_name(name: &str) -> String {
    rename(
        name.strip_prefix("transformer.").unwrap_or(name),
        "h.",
        &[
            ("wte.", "token_embd."),
            ("wpe.", "position_embd."),
            ("ln_f.", "output_norm."),
            ("lm_head.", "output."),
        ],
        &[
            ("ln_1.", "attn_norm."),
            ("attn.c_attn.", "attn_qkv."),
            ("attn.c_proj.", "attn_output."),
            ("ln_2.", "ffn_norm."),
            ("mlp.c_fc.", "ffn_up."),
            ("mlp.c_proj.", "ffn_down."),
        ],
    )
}

/// llama.cpp's name of a tensor of transformers' Llama.
fn llama_name(name: &str) -> String {
    rename(
        name.strip_prefix("model.").unwrap_or(name),
        "layers.",
        &[("embed_tokens.", "token_embd."), ("norm.", "output_norm."), ("lm_head.", "output.")],
        &[
            ("input_layernorm.", "attn_norm."),
            ("self_attn.q_proj.", "attn_q."),
            ("self_attn.k_proj.", "attn_k."),
            ("self_attn.v_proj.", "attn_v."),
            ("self_attn.o_proj.", "attn_output."),
            ("post_attention_layernorm.", "ffn_norm."),
            ("mlp.gate_proj.", "ffn_gate."),
            ("mlp.up_proj.", "ffn_up."),
            ("mlp.down_proj.", "ffn_down."),
        ],
    )
}

/// Replaces the prefix of a name: `BLOCKS N.` becomes `blk.N.`, followed by what `in_block` says; others as `outside`
/// says.
fn rename(name: &str, blocks: &str, outside: &[(&str, &str)], in_block: &[(&str, &str)]) -> String {
    let replace = |name: &str, table: &[(&str, &str)]| {
        let renamed =
            table.iter().find_map(|(from, to)| name.strip_prefix(from).map(|rest| format!("{to}{rest}")));
        renamed.unwrap_or_else(|| name.to_owned())
    };
    match name.strip_prefix(blocks).and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => format!("blk.{layer}.{}", replace(rest, in_block)),
        None => replace(name, outside),
    }
}

type Metadata = Vec<(String, MetadataValue)>;

/// The metadata, and a note if the model comes without its tokenizer.
fn metadata(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
) -> Result<(Metadata, Option<String>), ExportError> {
    let eps = norm_eps(built).unwrap_or(1e-5) as f32;
    let mut entries: Metadata = Vec::new();
    let mut push = |key: &str, value: MetadataValue| entries.push((key.to_owned(), value));
    let architecture = if matches!(source.model, ModelConfig::Gpt(_)) { "gpt2" } else { "llama" };
    push("general.architecture", architecture.into());
    push("general.name", source.name.into());
    let file_type =
        options.blocks().map_or_else(|| quantization::file_type(options.dtype()), Quantization::file_type);
    push("general.file_type", MetadataValue::U32(file_type));
    if options.blocks().is_some() {
        push("general.quantization_version", MetadataValue::U32(QUANTIZATION_VERSION));
    }
    let mut push = |key: &str, value: MetadataValue| push(&format!("{architecture}.{key}"), value);
    let u32_value = |value: usize| MetadataValue::U32(value as u32);
    let sizes = BlockSizes::of(source, built, ExportFormat::Gguf)?;
    match source.model {
        ModelConfig::Gpt(GptConfig { layers, width, context, .. }) => {
            push("block_count", u32_value(*layers));
            push("context_length", u32_value(*context));
            push("embedding_length", u32_value(*width));
            push("feed_forward_length", u32_value(sizes.hidden));
            push("attention.head_count", u32_value(sizes.heads));
            push("attention.layer_norm_epsilon", MetadataValue::F32(eps));
        }
        ModelConfig::Llama(LlamaConfig { layers, width, context, rope_theta, .. }) => {
            push("block_count", u32_value(*layers));
            push("context_length", u32_value(*context));
            push("embedding_length", u32_value(*width));
            push("feed_forward_length", u32_value(sizes.hidden));
            push("attention.head_count", u32_value(sizes.heads));
            push("attention.head_count_kv", u32_value(sizes.kv_heads));
            push("attention.layer_norm_rms_epsilon", MetadataValue::F32(eps));
            push("rope.dimension_count", u32_value(sizes.head_dim));
            // llama.cpp divides the width by the heads unless a file says otherwise.
            if sizes.heads * sizes.head_dim != *width {
                push("attention.key_length", u32_value(sizes.head_dim));
                push("attention.value_length", u32_value(sizes.head_dim));
            }
            push("rope.freq_base", MetadataValue::F32(*rope_theta as f32));
        }
        _ => {}
    }
    let vocab = match source.features.input {
        InputSpec::Tokens { vocab, .. } => vocab,
        _ => 0,
    };
    push("vocab_size", u32_value(vocab));
    let (tokenizer, note) = vocabulary::metadata(source, vocab)?;
    entries.extend(tokenizer);
    Ok((entries, note))
}

/// A written file, whose tensors are decoded one at a time.
pub(super) struct GgufReader {
    path: PathBuf,
    file: File,
    content: Content,
}

impl GgufReader {
    pub(super) fn open(path: &Path) -> Result<Self, ExportError> {
        let mut file = regular_file::open(path).map_err(ExportError::io("open", path))?;
        let content =
            Content::read(&mut file).map_err(|error| ExportError::read_back(path, error.to_string()))?;
        Ok(Self { path: path.to_owned(), file, content })
    }

    pub(super) fn read(&mut self, mapping: &TensorMapping) -> Result<Vec<f32>, ExportError> {
        let tensor = self
            .content
            .tensor(&mut self.file, &mapping.target, &Device::Cpu)
            .map_err(|error| ExportError::read_back(&self.path, error.to_string()))?;
        if tensor.shape().dims() != mapping.shape {
            let reason = format!("`{}` has shape {:?}", mapping.target, tensor.shape().dims());
            return Err(ExportError::read_back(&self.path, reason));
        }
        Ok(tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_llama_cpps() {
        assert_eq!(gpt_name("transformer.h.11.attn.c_attn.bias"), "blk.11.attn_qkv.bias");
        assert_eq!(gpt_name("transformer.wpe.weight"), "position_embd.weight");
        assert_eq!(gpt_name("lm_head.weight"), "output.weight");
        assert_eq!(llama_name("model.layers.0.mlp.down_proj.weight"), "blk.0.ffn_down.weight");
        assert_eq!(llama_name("model.norm.weight"), "output_norm.weight");
        assert_eq!(llama_name("lm_head.weight"), "output.weight");
    }
}
