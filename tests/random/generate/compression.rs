//! `[prune]`, `[quantize]`, `[lowrank]` and `[distill]`.

use toml::{Table, Value};

use super::TableExt;
use crate::random::draw::Draw;

/// Pruning, of a model that has trained matrices. Drawn apart, like the loss.
pub fn set_prune(draw: &mut Draw, job: &mut Table, steps: Option<usize>) {
    let kind = job["model"].get("kind").and_then(Value::as_str).unwrap_or_default();
    let freezes = job["train"].get("freeze").is_some_and(|freeze| freeze.as_str() != Some("*.bias"));
    if freezes || !draw.chance(0.3) {
        return;
    }
    let mut table = Table::new();
    let last = steps.unwrap_or(4);
    let begin = draw.within(1..=last);
    if draw.chance(0.7) {
        table.number("begin_step", begin);
    }
    let begin = if table.contains_key("begin_step") { begin } else { 1 };
    table.set("final", draw.pick(&[0.3, 0.8, 0.95]));
    match draw.chance(0.7) {
        true => {
            table.number("end_step", draw.within(begin..=last));
            if draw.chance(0.5) {
                table.set("schedule", "polynomial");
            }
            if draw.chance(0.6) {
                table.set("initial", draw.pick(&[0.0, 0.3]));
            }
            if draw.chance(0.3) {
                table.set("power", draw.pick(&[1.0, 3.0]));
            }
            if draw.chance(0.8) {
                table.number("every_steps", draw.within(1..=3));
            }
        }
        false => drop(table.set("schedule", "constant")),
    }
    // Some of their layers have a multiple of four inputs, whatever the rest of the model.
    let has_fours = matches!(kind, "resnet" | "mobilenet");
    match has_fours && !table.contains_key("end_step") && draw.chance(0.6) {
        true => {
            table.remove("final");
            table.set("structure", "2:4");
        }
        false if draw.chance(0.3) => drop(table.set("structure", "weights")),
        false => {}
    }
    let structures = unit_structures(job);
    let has_units = !structures.is_empty() && table.contains_key("final") && draw.chance(0.3);
    if has_units {
        table.set("structure", draw.pick(&structures));
    }
    let is_heads = table.get("structure").and_then(Value::as_str) == Some("heads");
    if draw.chance(0.6) {
        table.set("scope", if is_heads { "tensor" } else { draw.pick(&["tensor", "global"]) });
    }
    if has_fours && draw.chance(0.2) {
        let (layer, units) = if kind == "resnet" { ("layer1.0.conv1", 64) } else { ("features.18.0", 1280) };
        let mut kept = Table::new();
        kept.number(layer, draw.within(1..=units));
        table.set("kept", kept);
    }
    if !has_units && draw.chance(0.3) {
        // Patterns that leave a matrix of every model of the kind.
        let skip = match kind {
            "resnet" => "conv1",
            "mobilenet" => "features.0",
            "vit" => "conv_proj",
            "gpt" | "llama" => "lm_head",
            _ => "*.bias",
        };
        table.set("skip", skip);
    }
    job.set("prune", table);
}

/// Rounding to 8-bit integers, of models that have a form in them. Drawn apart, like the loss.
pub fn set_quantize(draw: &mut Draw, job: &mut Table, steps: Option<usize>) {
    let kind = job["model"].get("kind").and_then(Value::as_str).unwrap_or_default();
    if !matches!(kind, "mlp" | "cnn" | "resnet" | "mobilenet") || !draw.chance(0.2) {
        return;
    }
    let mut table = Table::new();
    let training = draw.chance(0.9);
    table.set("training", training);
    if training && draw.chance(0.5) {
        table.number("begin_step", draw.within(1..=steps.unwrap_or(2)));
    }
    job.set("quantize", table);
}

/// The units that a model has more than one of in a layer, none of them frozen.
fn unit_structures(job: &Table) -> Vec<&'static str> {
    let (model, mut found) = (&job["model"], Vec::new());
    if job["train"].get("freeze").is_some() {
        return found;
    }
    let list = |key: &str| model.get(key).and_then(Value::as_array).cloned();
    let is_wide = |width: &Value| width.as_integer().is_some_and(|width| width > 1);
    let has_wide =
        |key: &str, by_default: bool| list(key).map_or(by_default, |widths| widths.iter().any(is_wide));
    let has_stages = list("stages").is_none_or(|stages| {
        let norm = |stage: &Value| stage.get("norm").and_then(Value::as_str).unwrap_or("group") != "group";
        stages.iter().any(|stage| norm(stage) && stage.get("channels").is_some_and(is_wide))
    });
    let has = match model.get("kind").and_then(Value::as_str).unwrap_or_default() {
        "mlp" => has_wide("hidden", true),
        "cnn" => has_stages || has_wide("hidden", false),
        kind => kind != "layers",
    };
    if has {
        found.push("channels");
    }
    if model.get("kv_heads").or(model.get("heads")).is_some_and(is_wide) {
        found.push("heads");
    }
    found
}

/// Factorized layers, of models that are wide enough. Drawn apart, like the loss.
pub fn set_lowrank(draw: &mut Draw, job: &mut Table, has_weights: bool) {
    let kind = job["model"].get("kind").and_then(Value::as_str).unwrap_or_default();
    let layer = match kind {
        "resnet" => "layer1.0.conv1",
        "mobilenet" => "features.2.conv.0.0",
        "vit" => "*.out_proj",
        "gpt" => "*.c_proj",
        "llama" => "*.down_proj",
        "bert" => "*.output.dense",
        _ => return,
    };
    let prune = |key: &str| job.get("prune").and_then(|prune| prune.get(key));
    let structure = prune("structure").and_then(Value::as_str);
    // A factorized layer has no units to keep.
    if matches!(structure, Some("channels" | "heads")) || prune("kept").is_some() {
        return;
    }
    let is_large = matches!(kind, "resnet" | "mobilenet");
    // Factors of narrow layers are not smaller.
    let width = job["model"].get("width").and_then(Value::as_integer).unwrap_or(0);
    if !draw.chance(if has_weights { 0.8 } else { 0.15 }) || !is_large && width < 12 {
        return;
    }
    let mut table = Table::new();
    match draw.below(if has_weights { 4 } else { 2 }) {
        0 if is_large => {
            let mut ranks = Table::new();
            ranks.number(layer, draw.within(1..=4));
            table.set("ranks", ranks);
        }
        2 if is_large => drop(table.set("target", draw.pick(&["1.2x", "2x"]))),
        2 | 3 => drop(table.set("energy", draw.pick(&[0.1, 0.3]))),
        _ => drop(table.number("rank", draw.within(1..=2))),
    }
    if !table.contains_key("target") && draw.chance(0.4) {
        table.set("layers", layer);
    }
    job.set("lowrank", table);
}

/// A teacher, where targets are classes or tokens. Drawn apart, like the loss.
pub fn set_distill(draw: &mut Draw, job: &mut Table, classes: bool) {
    let data = job["data"].as_table().cloned().unwrap_or_default();
    let text = |key: &str| data.get(key).and_then(Value::as_str).unwrap_or_default();
    let is_table = matches!(text("kind"), "csv" | "json" | "parquet");
    let several = data.contains_key("label_separator") || text("task") == "labels";
    // Unless the job says so, the first rows of a table decide whether numbers are classes.
    if several || is_table && (!classes || text("task") != "classes") || !draw.chance(0.15) {
        return;
    }
    let mut table = Table::new();
    table.set("teacher", "teacher");
    if draw.chance(0.7) {
        table.set("temperature", draw.pick(&[1.0, 4.0]));
    }
    if draw.chance(0.7) {
        table.set("weight", draw.pick(&[0.0, 0.5, 1.0]));
    }
    if draw.chance(0.5) {
        table.set("teacher_precision", draw.pick(&["same", "f32", "bf16", "int8"]));
    }
    // Inputs that change from epoch to epoch have no logits to store.
    let changes = data.contains_key("augment")
        || matches!(text("kind"), "text" | "tokens") && text("windows") != "fixed";
    match draw.below(3) {
        0 if !changes => {
            table.set("logits", "stored");
            if draw.chance(0.7) {
                table.number("top_k", draw.pick(&[1, 3, 8]));
            }
        }
        1 => drop(table.set("logits", "every_step")),
        _ => {}
    }
    // The teacher is a model of the same job, and so has the same blocks.
    let block = match job["model"]["kind"].as_str().unwrap_or_default() {
        "cnn" => "stages.0",
        "gpt" => "transformer.h.0",
        "llama" => "model.layers.0",
        "bert" => "bert.encoder.layer.0",
        "vit" => "encoder.layers.encoder_layer_0",
        "resnet" => "layer1.0",
        "mobilenet" => "features.1",
        _ => "",
    };
    if !block.is_empty() && table.get("logits").and_then(Value::as_str) != Some("stored") && draw.chance(0.4)
    {
        let mut feature = Table::new();
        feature.set("student", block).set("teacher", block);
        if draw.chance(0.7) {
            feature.set("weight", draw.pick(&[0.0, 0.1, 1.0]));
        }
        table.set("features", Value::Array(vec![Value::Table(feature)]));
    }
    job.set("distill", table);
}
