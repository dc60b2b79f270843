//! Language models as transformers saves them: `config.json`, `model.safetensors` and `tokenizer.json`, of model type
//! `gpt2` or `llama`. What the models here do not have, such as scaled rotary embeddings, is refused by the name of its
//! key.

use std::path::Path;

use serde_json::{Value, json};

use super::{CONFIG, read_json, unusable};
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::data::language::tokenizer::settings_beside;
use crate::data::preprocessing::Preprocessing;
use crate::inference::trained_model::{Origin, TrainedModel};
use crate::job::{GptConfig, Job, LlamaConfig, ModelConfig};
use crate::quantization::ActivationPoints;
use crate::train::Failure;
use crate::train::checkpoint::{MODEL, TOKENIZER};

pub(super) fn open(folder: &Path, sets: &[String]) -> Result<TrainedModel, Failure> {
    let unsupported = |problem| Failure::UnsupportedModel { folder: folder.to_owned(), problem };
    let config: Value = serde_json::from_slice(&read_json(folder, CONFIG)?)
        .map_err(|error| unusable(folder, format!("`{CONFIG}` is not JSON: {error}")))?;
    let config = Config(&config);
    let (model, vocab) =
        config.model().and_then(|model| Ok((model, config.size("vocab_size")?))).map_err(unsupported)?;
    let weights = folder.join(MODEL);
    if !weights.exists() {
        let problem = match folder.join("model.safetensors.index.json").exists() {
            true => format!("its weights are in shards; save them as one `{MODEL}`"),
            false => format!("it has no `{MODEL}`"),
        };
        return Err(unusable(folder, problem));
    }
    let tokenizer = folder.join(TOKENIZER);
    let length = model.context().unwrap_or(1);
    Ok(TrainedModel {
        job: job(folder, &model, config.precision(), sets).map_err(unsupported)?,
        preprocessing: Preprocessing::new(
            Features::new(InputSpec::Tokens { length, vocab }, TargetSpec::Tokens),
            settings_beside(&tokenizer)["chat_template"].as_str().map(str::to_owned),
        ),
        origin: Origin::Published,
        folder: folder.to_owned(),
        statistics: weights.clone(),
        weights,
        step: 0,
        is_best: false,
        uses_ema: false,
        points: ActivationPoints::None,
        converted: None,
    })
}

/// A job that has this model, and text by its tokenizer.
fn job(folder: &Path, model: &ModelConfig, precision: &str, sets: &[String]) -> Result<Job, String> {
    let tokenizer = folder.join(TOKENIZER);
    let data = match tokenizer.exists() {
        true => {
            let file = std::path::absolute(&tokenizer).unwrap_or(tokenizer);
            json!({ "kind": "text", "train": ["text.txt"], "tokens": file })
        }
        false => json!({ "kind": "tokens", "train": ["tokens.bin"] }),
    };
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || "_-".contains(*c)).collect();
    let job = json!({
        "name": format!("published_{name}"), "model": model, "data": data,
        "train": { "steps": 1, "precision": precision },
    });
    let job = toml::to_string(&job).map_err(|error| error.to_string())?;
    Job::parse(&job, folder, sets).map_err(|errors| errors.to_string())
}

/// A `config.json`.
struct Config<'a>(&'a Value);

impl Config<'_> {
    fn model(&self) -> Result<ModelConfig, String> {
        match self.0["model_type"].as_str() {
            Some("gpt2") => self.gpt2(),
            Some("llama") => self.llama(),
            Some(other) => Err(format!("its `model_type` is `{other}`")),
            None => Err(format!("its `{CONFIG}` has no `model_type`")),
        }
    }

    fn gpt2(&self) -> Result<ModelConfig, String> {
        let width = self.size("n_embd")?;
        self.expect_number("layer_norm_epsilon", 1e-5, 1e-5)?;
        self.expect_number("n_inner", 4.0 * width as f64, 4.0 * width as f64)?;
        self.expect("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
        self.expect_flag("scale_attn_weights", true)?;
        self.expect_flag("scale_attn_by_inverse_layer_idx", false)?;
        Ok(ModelConfig::Gpt(GptConfig {
            layers: self.size("n_layer")?,
            heads: self.size("n_head")?,
            width,
            context: self.size("n_positions")?,
            dropout: 0.0,
            tie: self.flag("tie_word_embeddings", true),
        }))
    }

    fn llama(&self) -> Result<ModelConfig, String> {
        let (width, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        self.expect_number("head_dim", (width / heads) as f64, (width / heads) as f64)?;
        self.expect("hidden_act", &["silu"])?;
        self.expect_flag("attention_bias", false)?;
        self.expect_flag("mlp_bias", false)?;
        // transformers 5 has the base of the wavelengths among the parameters of the embedding.
        let rope = if self.0["rope_parameters"].is_object() { "rope_parameters" } else { "rope_scaling" };
        let kind = self.0[rope]["rope_type"].as_str().or(self.0[rope]["type"].as_str());
        if let Some(kind) = kind.filter(|kind| *kind != "default") {
            return Err(format!("`{rope}` is of type `{kind}`"));
        }
        let theta = self.0["rope_theta"].as_f64().or(self.0[rope]["rope_theta"].as_f64());
        Ok(ModelConfig::Llama(LlamaConfig {
            layers: self.size("num_hidden_layers")?,
            heads,
            kv_heads: if self.0["num_key_value_heads"].is_null() {
                heads
            } else {
                self.size("num_key_value_heads")?
            },
            width,
            hidden: self.size("intermediate_size")?,
            context: self.size("max_position_embeddings")?,
            rope_theta: theta.unwrap_or(10_000.0),
            norm_eps: self.0["rms_norm_eps"].as_f64().unwrap_or(1e-6),
            tie: self.flag("tie_word_embeddings", false),
        }))
    }

    /// The number format that the weights were saved for.
    fn precision(&self) -> &'static str {
        let dtype = self.0["torch_dtype"].as_str().or(self.0["dtype"].as_str());
        match dtype {
            Some("bfloat16") => "bf16",
            Some("float16") => "f16",
            _ => "auto",
        }
    }

    fn size(&self, key: &str) -> Result<usize, String> {
        let size = self.0[key].as_u64().filter(|size| *size > 0).and_then(|size| size.try_into().ok());
        size.ok_or_else(|| format!("`{key}` is {}; expected a number from 1 on", self.0[key]))
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.0[key].as_bool().unwrap_or(default)
    }

    fn expect_flag(&self, key: &str, expected: bool) -> Result<(), String> {
        match self.flag(key, expected) == expected {
            true => Ok(()),
            false => Err(format!("`{key}` is {}", self.0[key])),
        }
    }

    fn expect(&self, key: &str, expected: &[&str]) -> Result<(), String> {
        match self.0[key].as_str().is_none_or(|word| expected.contains(&word)) {
            true => Ok(()),
            false => Err(format!("`{key}` is {}; expected {}", self.0[key], expected.join(" or "))),
        }
    }

    /// A number that the model has no choice of; `default` is what transformers takes if it is absent.
    fn expect_number(&self, key: &str, expected: f64, default: f64) -> Result<(), String> {
        let value = self.0[key].as_f64().unwrap_or(default);
        match value == expected {
            true => Ok(()),
            false => Err(format!("`{key}` is {value}; expected {expected}")),
        }
    }
}
