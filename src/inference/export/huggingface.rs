//! Folders that transformers opens as they are (`gpt`, `llama`, `bert`, `vit`), and torchvision state dicts (`resnet`,
//! `mobilenet`), each with a model card.

mod card;

use serde_json::{Map, Value, json};

use super::block_sizes::BlockSizes;
use super::description::classes;
use super::error::ExportError;
use super::folder::ExportFolder;
use super::tokenizer::ExportedTokenizer;
use super::weights::{TensorMapping, Transform, WeightDtype, all_specs};
use super::{ExportFormat, ExportSource, norm_eps};
use crate::base::features::{InputSpec, TargetSpec};
use crate::job::{BertConfig, GptConfig, ImageFit, LlamaConfig, ModelConfig, VitConfig};
use crate::models::BuiltModel;
use crate::params::{ParamLayout, TensorSpec};

/// The tensors under the names that the other library has.
pub(super) fn mappings(model: &ModelConfig, layout: &ParamLayout) -> Vec<TensorMapping> {
    match model {
        ModelConfig::Vit(_) => all_specs(layout).flat_map(vit_tensors).collect(),
        _ => all_specs(layout).map(TensorMapping::copy).collect(),
    }
}

/// transformers has one layer each for queries, keys and values; torchvision, whose names a `vit` has here, packs
/// them.
fn vit_tensors(spec: &TensorSpec) -> Vec<TensorMapping> {
    let name = spec.name.as_str();
    let one = |target: String| vec![TensorMapping::new(target, spec, Transform::Copy)];
    let outside = [
        ("class_token", "vit.embeddings.cls_token"),
        ("encoder.pos_embedding", "vit.embeddings.position_embeddings"),
        ("conv_proj.", "vit.embeddings.patch_embeddings.projection."),
        ("encoder.ln.", "vit.layernorm."),
        ("heads.head.", "classifier."),
    ];
    let in_layer = [
        ("ln_1.", "layernorm_before."),
        ("self_attention.out_proj.", "attention.output.dense."),
        ("ln_2.", "layernorm_after."),
        ("mlp.0.", "intermediate.dense."),
        ("mlp.3.", "output.dense."),
    ];
    let replace = |name: &str, table: &[(&str, &str)]| {
        table.iter().find_map(|(from, to)| name.strip_prefix(from).map(|rest| format!("{to}{rest}")))
    };
    let Some((layer, rest)) =
        name.strip_prefix("encoder.layers.encoder_layer_").and_then(|rest| rest.split_once('.'))
    else {
        return one(replace(name, &outside).unwrap_or_else(|| name.to_owned()));
    };
    let layer = format!("vit.encoder.layer.{layer}");
    match rest.strip_prefix("self_attention.in_proj_") {
        Some(part) => {
            let width = spec.shape[0] / 3;
            ["query", "key", "value"]
                .into_iter()
                .enumerate()
                .map(|(i, which)| {
                    let target = format!("{layer}.attention.attention.{which}.{part}");
                    TensorMapping::new(target, spec, Transform::Rows(i * width..(i + 1) * width))
                })
                .collect()
        }
        None => one(format!("{layer}.{}", replace(rest, &in_layer).unwrap_or_else(|| rest.to_owned()))),
    }
}

/// Writes everything but the weights. Returns notes.
pub(super) fn write_files(
    source: &ExportSource,
    built: &BuiltModel,
    dtype: WeightDtype,
    folder: &ExportFolder,
) -> Result<Vec<String>, ExportError> {
    let write_json = |name: &str, value: &Value| folder.write(name, format!("{value:#}\n").as_bytes());
    let tokenizer = ExportedTokenizer::load(source)?;
    let mut notes = Vec::new();
    let sizes = BlockSizes::of(source, built, ExportFormat::Hf)?;
    if let Some(config) = config(source, built, sizes, dtype, tokenizer.as_ref()) {
        write_json("config.json", &config)?;
    }
    if matches!(source.model, ModelConfig::Gpt(_) | ModelConfig::Llama(_)) {
        write_json("generation_config.json", &generation_config(source.model, tokenizer.as_ref()))?;
    }
    match &tokenizer {
        None if matches!(source.features.input, InputSpec::Tokens { .. }) => {
            notes.push("the run has no tokenizer: transformers takes and gives token ids".into());
        }
        _ => {}
    }
    if let (ModelConfig::Vit(_), InputSpec::Floats { shape }) = (source.model, &source.features.input) {
        write_json("preprocessor_config.json", &image_processor(source, shape))?;
    }
    folder.write("README.md", card::text(source, tokenizer.is_some()).as_bytes())?;
    Ok(notes)
}

/// `config.json`; torchvision's models have none.
fn config(
    source: &ExportSource,
    built: &BuiltModel,
    sizes: BlockSizes,
    dtype: WeightDtype,
    tokenizer: Option<&ExportedTokenizer>,
) -> Option<Value> {
    let eps = norm_eps(built);
    let (bos, eos) = special_ids(tokenizer);
    let vocab = match source.features.input {
        InputSpec::Tokens { vocab, .. } => vocab,
        _ => 0,
    };
    let mut config = match source.model {
        ModelConfig::Gpt(GptConfig { layers, heads, width, context, dropout, tie }) => json!({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab,
            "n_positions": context, "n_ctx": context, "n_embd": width, "n_layer": layers, "n_head": heads,
            "n_inner": sizes.hidden, "activation_function": "gelu_new", "layer_norm_epsilon": eps,
            "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout,
            "scale_attn_weights": true, "tie_word_embeddings": tie,
            "bos_token_id": bos.or(eos), "eos_token_id": eos,
        }),
        ModelConfig::Llama(LlamaConfig { layers, width, context, rope_theta, tie, .. }) => json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab,
            "hidden_size": width, "intermediate_size": sizes.hidden, "num_hidden_layers": layers,
            "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
            "max_position_embeddings": context, "hidden_act": "silu", "rms_norm_eps": eps,
            "rope_theta": rope_theta, "rope_scaling": null, "attention_bias": false, "mlp_bias": false,
            "attention_dropout": 0.0, "tie_word_embeddings": tie, "bos_token_id": bos, "eos_token_id": eos,
            "pad_token_id": null,
        }),
        ModelConfig::Bert(BertConfig { layers, heads, width, context, dropout, .. }) => json!({
            "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": vocab,
            "hidden_size": width, "intermediate_size": sizes.hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "max_position_embeddings": context, "type_vocab_size": 2,
            "hidden_act": "gelu", "layer_norm_eps": eps, "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout, "position_embedding_type": "absolute",
            "problem_type": "single_label_classification", "pad_token_id": pad_id(tokenizer),
        }),
        ModelConfig::Vit(VitConfig { patch, layers, heads, width, dropout, .. }) => {
            let InputSpec::Floats { shape } = &source.features.input else { return None };
            let &[height, image_width, channels] = shape.as_slice() else { return None };
            let size = if height == image_width { json!(height) } else { json!([height, image_width]) };
            json!({
                "architectures": ["ViTForImageClassification"], "model_type": "vit", "image_size": size,
                "patch_size": patch, "num_channels": channels, "hidden_size": width,
                "intermediate_size": sizes.hidden, "num_hidden_layers": layers,
                "num_attention_heads": heads, "hidden_act": "gelu", "layer_norm_eps": eps,
                "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "qkv_bias": true,
            })
        }
        _ => return None,
    };
    if let Some(names) = classes(source) {
        let by_id: Map<String, Value> =
            names.iter().enumerate().map(|(id, name)| (id.to_string(), json!(name))).collect();
        let by_name: Map<String, Value> =
            names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
        config["id2label"] = by_id.into();
        config["label2id"] = by_name.into();
        if let TargetSpec::MultiLabel { .. } = source.features.target {
            config["problem_type"] = "multi_label_classification".into();
        }
    }
    config["torch_dtype"] = torch_dtype(dtype).into();
    Some(config)
}

fn torch_dtype(dtype: WeightDtype) -> &'static str {
    match dtype {
        WeightDtype::F32 => "float32",
        WeightDtype::F16 => "float16",
        WeightDtype::Bf16 => "bfloat16",
    }
}

fn special_ids(tokenizer: Option<&ExportedTokenizer>) -> (Option<u32>, Option<u32>) {
    let id = |token: &Option<(String, u32)>| token.as_ref().map(|(_, id)| *id);
    tokenizer.map_or((None, None), |tokenizer| (id(&tokenizer.bos), id(&tokenizer.eos)))
}

fn pad_id(tokenizer: Option<&ExportedTokenizer>) -> Option<u64> {
    tokenizer.and_then(ExportedTokenizer::pad).map(|(_, id)| id)
}

fn generation_config(model: &ModelConfig, tokenizer: Option<&ExportedTokenizer>) -> Value {
    let (bos, eos) = special_ids(tokenizer);
    json!({ "bos_token_id": bos.or(eos), "eos_token_id": eos, "max_length": model.context() })
}

/// `preprocessor_config.json`: resize, scale to 0 to 1, normalize.
fn image_processor(source: &ExportSource, shape: &[usize]) -> Value {
    let (height, width) = (shape.first().copied().unwrap_or(1), shape.get(1).copied().unwrap_or(1));
    let channels = shape.last().copied().unwrap_or(1);
    let (mean, std) = match &source.image {
        Some(image) => (image.mean.clone(), image.std.clone()),
        None => (vec![0.0; channels], vec![1.0; channels]),
    };
    let mut config = json!({
        "image_processor_type": "ViTImageProcessor",
        "do_resize": true, "size": { "height": height, "width": width }, "resample": 2,
        "do_rescale": true, "rescale_factor": 1.0 / 255.0,
        "do_normalize": true, "image_mean": mean, "image_std": std,
    });
    // ViT's own processor only stretches. CLIP's crops, and transformers goes by the name in this file.
    if let Some(image) = source.image.as_ref().filter(|image| image.fit == ImageFit::Crop && height == width)
    {
        config["image_processor_type"] = "CLIPImageProcessor".into();
        config["size"] = json!({ "shortest_edge": (height as f64 / image.crop_fraction).round() as u64 });
        config["do_center_crop"] = true.into();
        config["crop_size"] = json!({ "height": height, "width": width });
        config["do_convert_rgb"] = (channels == 3).into();
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::features::{Features, TargetSpec};
    use crate::inference::export::{ImagePreprocessing, TokenizerSource};

    #[test]
    fn a_crop_is_resized_to_whole_pixels_first() {
        let features = Features::new(
            InputSpec::Floats { shape: vec![16, 16, 3] },
            TargetSpec::Class { names: vec!["a".into(), "b".into()] },
        );
        let model = ModelConfig::Vit(VitConfig::default());
        let image =
            |fit| ImagePreprocessing { mean: vec![0.5; 3], std: vec![0.25; 3], fit, crop_fraction: 0.875 };
        let config = |fit| {
            let source = ExportSource {
                name: "vit",
                model: &model,
                reductions: Default::default(),
                features: &features,
                weights: "".as_ref(),
                statistics: "".as_ref(),
                tokenizer: TokenizerSource::None,
                chat_template: None,
                image: Some(image(fit)),
                job: Value::Null,
                preprocessing: Value::Null,
                checkpoint_preprocessing: None,
                activations: None,
                scales: None,
                step: 0,
            };
            image_processor(&source, &[16, 16, 3])
        };
        // transformers refuses a float here.
        assert_eq!(config(ImageFit::Crop)["size"].to_string(), r#"{"shortest_edge":18}"#);
        assert_eq!(config(ImageFit::Crop)["image_processor_type"], "CLIPImageProcessor");
        assert_eq!(config(ImageFit::Stretch)["size"].to_string(), r#"{"height":16,"width":16}"#);
    }
}
