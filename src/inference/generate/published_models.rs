//! Published models continue their prompts as NumPy does in f64: `capp-gpt2` (a `GPT2LMHeadModel`) and `stories260K`
//! (Llama, in the format of llama2.c), each with its `golden.json`, from `models` in the folder that `TRAINER_DATA`
//! names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::*;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::job::ModelConfig;
use crate::kernels::update::cast_into;
use crate::layers::gradcheck::{test_device, test_spec};
use crate::models::build;
use crate::planner::generation::{GenerationRequest, plan_generation};

fn folder(model: &str) -> PathBuf {
    let shared = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data");
    std::env::var_os("TRAINER_DATA").map_or_else(shared, PathBuf::from).join("models").join(model)
}

/// Whether the model is there; reports that it is not.
fn is_here(model: &str) -> bool {
    let here = folder(model).join("golden.json").exists();
    if !here {
        eprintln!("skipped: needs `models/{model}` in the folder TRAINER_DATA names");
    }
    here
}

fn golden(model: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder(model).join("golden.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The greedy continuation of `prompt`, prompt included, as long as `expected`.
fn check(model: &str, vocab: usize, weights: &BTreeMap<String, Tensor>, prompt: &[u32], expected: &[u32]) {
    let config: ModelConfig = toml::from_str(model).unwrap();
    let features = Features::new(InputSpec::Tokens { length: 1, vocab }, TargetSpec::Tokens);
    let layout = build(&config, &features).unwrap().layout;
    let dtype = DType::F32;
    let store = ParamStore::new(layout, 0, dtype, &test_device()).unwrap();
    for ((spec, _), view) in store.layout.params.in_declaration_order().zip(store.weight_views()) {
        let weight = &weights[&spec.name];
        assert_eq!(weight.dims(), spec.shape, "{}", spec.name);
        let weight = weight.to_device(&test_device()).unwrap().flatten_all().unwrap();
        cast_into(&weight, &view.flatten_all().unwrap()).unwrap();
    }
    let backend = test_spec(1, dtype).backend;
    let reductions = &crate::job::NO_REDUCTIONS;
    let inputs = GenerationInputs { model: &config, reductions, vocab, dtype, backend, weight_bytes: 0 };
    let request =
        GenerationRequest { sequences: 1, longest_prompt: prompt.len(), longest_sequence: expected.len() };
    let ledger = Ledger::new(1 << 30, None);
    let plan = plan_generation(&inputs, request, ledger.budget()).unwrap();
    let mut generator = Generator::new(inputs, plan, &store, &ledger).unwrap();
    let options = GenerationOptions {
        sampling: Sampling::greedy(),
        max_tokens: expected.len() - prompt.len(),
        end_tokens: Vec::new(),
    };
    let result = generator.generate(&[prompt.to_vec()], &options, &mut |_, _| true).unwrap().remove(0);
    assert_eq!([prompt, &result.tokens].concat(), expected);
}

#[test]
fn a_published_gpt2_continues_its_prompt() {
    if !is_here("capp-gpt2") {
        return;
    }
    let golden = golden("capp-gpt2");
    let file = folder("capp-gpt2").join("model.safetensors");
    let weights = candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect();
    let (all, prompt) = (ids(&golden["greedy_ids"]), golden["prompt"].as_array().unwrap().len());
    let model = "kind = 'gpt'\nlayers = 4\nheads = 4\nwidth = 64\ncontext = 512";
    check(model, 53, &weights, &all[..prompt], &all);
}

#[test]
fn a_published_llama_tells_its_story() {
    if !is_here("stories260K") {
        return;
    }
    const LAYERS: usize = 5;
    const WIDTH: usize = 64;
    const HIDDEN: usize = 172;
    const HEADS: usize = 8;
    const KV_HEADS: usize = 4;
    const VOCAB: usize = 512;
    const HEAD: usize = WIDTH / HEADS;
    let bytes = std::fs::read(folder("stories260K").join("stories260K.bin")).unwrap();
    let values: Vec<f32> = bytes[28..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let mut at = 0;
    let mut take = |rows: usize, columns: usize| {
        let part = values[at..at + rows * columns].to_vec();
        at += part.len();
        part
    };
    let mut weights = BTreeMap::new();
    let mut put = |name: String, rows: usize, values: Vec<f32>| {
        let columns = values.len() / rows;
        let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
        weights.insert(name, if rows == 1 { tensor.squeeze(0).unwrap() } else { tensor });
    };
    // llama2.c rotates values 2i and 2i + 1 of a head together; here they are i and i + head / 2.
    let to_halves = |rows: Vec<f32>| -> Vec<f32> {
        let row = |i: usize| {
            let (head, within) = (i / HEAD, i % HEAD);
            let from = head * HEAD + if within < HEAD / 2 { 2 * within } else { 2 * within + 1 - HEAD };
            rows[from * WIDTH..][..WIDTH].to_vec()
        };
        (0..rows.len() / WIDTH).flat_map(row).collect()
    };
    put("model.embed_tokens.weight".into(), VOCAB, take(VOCAB, WIDTH));
    let kv = KV_HEADS * HEAD;
    for (name, rows, columns) in [
        ("input_layernorm", 1, WIDTH),
        ("self_attn.q_proj", WIDTH, WIDTH),
        ("self_attn.k_proj", kv, WIDTH),
        ("self_attn.v_proj", kv, WIDTH),
        ("self_attn.o_proj", WIDTH, WIDTH),
        ("post_attention_layernorm", 1, WIDTH),
        ("mlp.gate_proj", HIDDEN, WIDTH),
        ("mlp.down_proj", WIDTH, HIDDEN),
        ("mlp.up_proj", HIDDEN, WIDTH),
    ] {
        for layer in 0..LAYERS {
            let part = take(rows, columns);
            let rotated = name.ends_with("q_proj") || name.ends_with("k_proj");
            let part = if rotated { to_halves(part) } else { part };
            put(format!("model.layers.{layer}.{name}.weight"), rows, part);
        }
    }
    put("model.norm.weight".into(), 1, take(1, WIDTH));
    let (golden, model) = (
        golden("stories260K"),
        "kind = 'llama'\nlayers = 5\nheads = 8\nkv_heads = 4\nwidth = 64\nhidden = 172\ncontext = 512\ntie = true",
    );
    check(model, VOCAB, &weights, &ids(&golden["start_ids"]), &ids(&golden["greedy_ids"]));
}
