//! `[train]`, `[optimizer]`, `[schedule]`, `[memory]`, `[eval]`, `[checkpoint]` and `[log]`.

use toml::{Table, Value};

use super::compression::{set_distill, set_lowrank, set_prune, set_quantize};
use super::{Disturbance, GeneratedJob, MODELS, ModelAndData, Scale, TableExt, table_of_kind};
use crate::random::draw::Draw;

const OPTIMIZERS: [&str; 5] = ["adamw", "sgd", "lion", "adafactor", "adamw8bit"];

pub fn case(
    draw: &mut Draw,
    scale: Scale,
    seed: u64,
    parts: ModelAndData,
    trial: Option<Disturbance>,
) -> GeneratedJob {
    let ModelAndData { model, data, files, train_samples, classes, most_updates, batch_size } = parts;
    let mut job = Table::new();
    if draw.chance(0.8) {
        job.set("name", "random");
    }
    job.set("seed", draw.below(1 << 40) as i64);
    job.set("model", model).set("data", data);

    let accumulation = draw.pick(if most_updates > 2 { &[1, 1, 1, 2, 3, 5] } else { &[1, 1, 2] });
    let per_epoch = train_samples.div_ceil(batch_size * accumulation).max(1);
    // A kill needs an update before it and one after it.
    let updates = draw.within(2..=most_updates);
    let mut train = Table::new();
    train.number("batch_size", batch_size);
    if accumulation > 1 || draw.chance(0.2) {
        train.number("accumulation_steps", accumulation);
    }
    match draw.chance(0.4) && per_epoch <= most_updates {
        true => train.number("epochs", (updates / per_epoch).max(1)),
        false => train.number("steps", updates),
    };
    let precision = draw.pick(&["auto", "f32", "f32", "bf16", "f16"]);
    if precision != "auto" || draw.chance(0.5) {
        train.set("precision", precision);
    }
    if precision == "f32" && draw.chance(0.3) {
        train.set("tf32", draw.chance(0.5));
    }
    if draw.chance(0.5) {
        train.set("clip_norm", draw.pick(&[0.01, 0.5, 1.0, 10.0]));
    }
    if draw.chance(0.3) {
        train.set("ema", draw.pick(&[0.5, 0.9, 0.999]));
    }
    let begins_with_weights = draw.chance(0.05);
    if begins_with_weights {
        train.set("init", "weights.safetensors");
    }
    let mut apart = Draw::new(seed, "loss and stop");
    set_loss(&mut apart, &mut train, &job, classes);
    if begins_with_weights && apart.chance(0.7) {
        train.set("init_head", apart.pick(&["strict", "auto"]));
    }
    set_freeze(&mut Draw::new(seed, "freeze"), &mut train, &job);
    let steps = train.contains_key("steps");
    job.set("train", train);

    job.set("optimizer", optimizer(draw, OPTIMIZERS[((seed / MODELS.len() as u64 + seed) % 5) as usize]));
    if draw.chance(0.7) {
        job.set("schedule", schedule(draw, if steps { updates } else { 1 }));
    }
    let mut exponential = Draw::new(seed, "exponential schedule");
    if exponential.chance(0.1) {
        let mut schedule = table_of_kind("exponential");
        for (key, value) in [("initial_lr_ratio", 0.1), ("final_lr_ratio", 0.5)] {
            if exponential.chance(0.6) {
                schedule.set(key, value);
            }
        }
        job.set("schedule", schedule);
    }
    if draw.chance(0.6) {
        job.set("memory", memory(draw));
    }
    let (mut eval, _) = eval(draw, updates, classes);
    let measured = set_metrics(&mut Draw::new(seed, "metrics"), &mut eval, &job, classes);
    set_prompts(&mut Draw::new(seed, "prompts"), &mut eval, &job);
    job.set("eval", eval);
    job.set("checkpoint", checkpoint(draw, updates, &measured));
    if apart.chance(0.3) {
        job.set("stop", stop(&mut apart, &measured));
    }
    // The run that writes initial weights has one update, too few for a schedule.
    if !begins_with_weights {
        set_prune(&mut Draw::new(seed, "prune"), &mut job, steps.then_some(updates));
        set_distill(&mut Draw::new(seed, "distill"), &mut job, classes);
    }
    set_quantize(&mut Draw::new(seed, "quantize"), &mut job, steps.then_some(updates));
    set_lowrank(&mut Draw::new(seed, "lowrank"), &mut job, begins_with_weights);
    let mut log = Table::new();
    if draw.chance(0.9) {
        log.number("every_steps", draw.pick(&[1, 1, 1, 2]));
    }
    if draw.chance(0.7) {
        log.set("tensorboard", draw.chance(0.3));
    }
    let mut mlflow = Draw::new(seed, "mlflow");
    if mlflow.chance(0.05) {
        // No server listens on this port: the run warns, and nothing else changes.
        log.set("mlflow", "http://127.0.0.1:9");
    } else if mlflow.chance(0.05) {
        log.set("mlflow", "sqlite:///mlflow.db");
    }
    // Drawn apart, so that the jobs of all seeds stay the same.
    let mut reports = Draw::new(seed, "report");
    if reports.chance(0.5) {
        log.set("report", reports.chance(0.5));
    }
    let mut memory = Draw::new(seed, "log.memory");
    if memory.chance(0.3) {
        log.set("memory", memory.pick(&["summary", "detailed", "detailed"]));
    }
    let mut histograms = Draw::new(seed, "histograms");
    if histograms.chance(0.2) && log.get("tensorboard").and_then(Value::as_bool) != Some(false) {
        log.set("histograms", histograms.chance(0.7));
    }
    job.set("log", log);
    let threads = scale.either(draw.pick(&[1, 2, 2, 3, 4]), 2);
    let needs_teacher = job.contains_key("distill");
    GeneratedJob {
        seed,
        job,
        files,
        threads,
        needs_initial_weights: begins_with_weights,
        needs_teacher,
        disturbance: trial,
    }
}

/// The metrics that the job's task certainly has.
fn task_metrics(data: &Table, classes: bool) -> &'static [&'static str] {
    let text = |key: &str| data.get(key).and_then(Value::as_str).unwrap_or_default();
    let is_table = matches!(text("kind"), "csv" | "json" | "parquet");
    match text("task") {
        task if task == "labels" || data.contains_key("label_separator") => {
            &["accuracy", "f1_micro", "f1_macro", "average_precision"]
        }
        _ if is_table && !classes => &["rmse", "mae", "r2"],
        // Unless the job says so, the first rows decide whether numbers are classes.
        task if is_table && task != "classes" => &[],
        _ if classes => {
            &["accuracy", "top5", "precision", "recall", "f1", "roc_auc", "log_loss", "calibration_error"]
        }
        _ => &["accuracy", "top5", "perplexity", "bits_per_byte"],
    }
}

/// Drawn apart from the rest of a job, which stays as it is.
fn set_metrics(draw: &mut Draw, eval: &mut Table, job: &Table, classes: bool) -> Vec<&'static str> {
    let known = job["data"].as_table().map_or(&[][..], |data| task_metrics(data, classes));
    eval.remove("metrics");
    let measured = if known.is_empty() { Vec::new() } else { draw.subset(known) };
    if !known.is_empty() && draw.chance(0.6) {
        eval.set("metrics", Value::Array(measured.iter().map(|&name| Value::from(name)).collect()));
    }
    measured
}

/// Prompts of a language model whose tokens are text; a character that it does not know is a warning. Drawn apart from
/// the rest of a job, which stays as it is.
fn set_prompts(draw: &mut Draw, eval: &mut Table, job: &Table) {
    let kind = |table: &str| job[table].get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    let data = &job["data"];
    let has_text = match kind("data").as_str() {
        "text" => true,
        "jsonl" => data.get("label").is_none(),
        "tokens" => data.get("tokenizer").is_some(),
        _ => false,
    };
    if has_text && matches!(kind("model").as_str(), "gpt" | "llama") && draw.chance(0.3) {
        let prompts = draw.subset(&["a", "the ", "0 1"]);
        eval.set("prompts", Value::Array(prompts.into_iter().map(Value::from).collect()));
        if draw.chance(0.5) {
            eval.number("prompt_tokens", draw.within(1..=8));
        }
    }
}

/// The loss and what belongs to it. Drawn apart from the rest of a job, which stays as it is.
fn set_loss(draw: &mut Draw, train: &mut Table, job: &Table, classes: bool) {
    let data = job["data"].as_table().cloned().unwrap_or_default();
    let kind = data.get("kind").and_then(Value::as_str).unwrap_or_default();
    let is_table = matches!(kind, "csv" | "json" | "parquet");
    let multi =
        data.contains_key("label_separator") || data.get("task").and_then(Value::as_str) == Some("labels");
    if multi {
        if draw.chance(0.6) {
            train.set("loss", draw.pick(&["auto", "bce", "focal"]));
        }
        if draw.chance(0.3) {
            train.set("focal_gamma", draw.pick(&[0.0, 1.0, 2.0]));
        }
        if draw.chance(0.3) {
            train.set("label_smoothing", 0.1);
        }
        if is_table && !data.contains_key("classes") && draw.chance(0.3) {
            train.set("class_weights", "balanced");
        }
        return;
    }
    if is_table && !classes {
        if draw.chance(0.6) {
            let loss = draw.pick(&["auto", "mse", "mae", "huber"]);
            train.set("loss", loss);
            if loss == "huber" && draw.chance(0.5) {
                train.set("huber_delta", 0.5);
            }
        }
        return;
    }
    // Unless the job says so, the first rows of a table decide whether numbers are classes.
    if is_table && data.get("task").and_then(Value::as_str) != Some("classes") {
        return;
    }
    if draw.chance(0.3) {
        train.set("loss", draw.pick(&["auto", "cross_entropy"]));
    }
    if draw.chance(0.2) {
        train.set("label_smoothing", draw.pick(&[0.0, 0.1]));
    }
    // Where every class of the training set is counted.
    if classes && is_table && !data.contains_key("classes") && draw.chance(0.4) {
        train.set("class_weights", "balanced");
    }
}

/// Patterns that match some, and not all, of the parameters of every model of this kind.
fn patterns(kind: &str) -> &'static [&'static [&'static str]] {
    match kind {
        "resnet" => &[&["*", "!fc"], &["conv1"], &["*.bn1"], &["layer?.0.*"]],
        "mobilenet" => &[&["*", "!classifier"], &["features.0"], &["*.weight"]],
        "vit" => &[&["*", "!heads"], &["conv_proj"], &["encoder.layers.*.ln_1"]],
        "gpt" => &[&["*", "!transformer.ln_f"], &["transformer.h.0"], &["*.bias"], &["lm_head"]],
        "llama" => &[&["*", "!model.norm"], &["model.layers.0"], &["*_proj.weight"], &["lm_head"]],
        "bert" => &[&["*", "!classifier"], &["bert.embeddings"], &["*.bias"]],
        // The last layer of these has a weight and a bias.
        _ => &[&["*", "!*.bias"], &["*.bias"], &["*.weight"]],
    }
}

/// Frozen parameters and groups of them. Drawn apart, like the loss.
fn set_freeze(draw: &mut Draw, train: &mut Table, job: &Table) {
    let kind = job["model"].get("kind").and_then(Value::as_str).unwrap_or_default();
    let list = |patterns: &[&str]| match patterns {
        [one] => Value::from(*one),
        many => Value::Array(many.iter().map(|pattern| Value::from(*pattern)).collect()),
    };
    if draw.chance(0.25) {
        train.set("freeze", list(draw.pick(patterns(kind))));
    }
    if draw.chance(0.2) {
        let group = |draw: &mut Draw| {
            let mut group = Table::new();
            let params: Vec<&str> =
                draw.pick(patterns(kind)).iter().filter(|text| !text.starts_with('!')).copied().collect();
            group.set("params", list(&params));
            if draw.chance(0.8) {
                group.set("lr_scale", draw.pick(&[0.1, 0.5, 2.0]));
            }
            if draw.chance(0.5) {
                group.set("weight_decay", draw.pick(&[0.0, 0.05]));
            }
            Value::Table(group)
        };
        let groups = (0..draw.within(1..=3)).map(|_| group(draw)).collect();
        train.set("groups", Value::Array(groups));
    }
}

/// Conditions that no run meets, so that it has all of its updates.
fn stop(draw: &mut Draw, measured: &[&str]) -> Table {
    let mut table = Table::new();
    let metric = draw.pick(&[&["loss"], measured].concat());
    table.set("metric", format!("valid.{metric}"));
    if draw.chance(0.5) {
        table.number("patience", 1000).set("min_delta", 0.001);
    }
    if draw.chance(0.5) {
        table.set("target", if metric == "loss" { -1.0 } else { 2.0 });
    }
    if draw.chance(0.5) {
        table.set("max_minutes", 600.0);
    }
    table
}

/// Learning rates at which no model here diverges within a few updates.
fn optimizer(draw: &mut Draw, name: &str) -> Table {
    // The default kind may be omitted.
    let mut table = if name == "adamw" && draw.chance(0.2) { Table::new() } else { table_of_kind(name) };
    let rate = match name {
        "lion" => draw.pick(&[0.00001, 0.0001]),
        "adafactor" => draw.pick(&[0.001, 0.01]),
        _ => draw.pick(&[0.00001, 0.0003, 0.001]),
    };
    table.set("lr", rate);
    if draw.chance(0.4) {
        table.set("weight_decay", draw.pick(&[0.0, 0.01, 0.1]));
    }
    match name {
        "sgd" => {
            if draw.chance(0.6) {
                table.set("momentum", draw.pick(&[0.5, 0.9]));
                if draw.chance(0.5) {
                    table.set("nesterov", draw.chance(0.5));
                }
            }
        }
        "adafactor" => {
            for (key, value) in [("decay", -0.5), ("eps", 0.01), ("clip", 0.5)] {
                if draw.chance(0.2) {
                    table.set(key, value);
                }
            }
        }
        _ => {
            if draw.chance(0.3) {
                table.set("betas", vec![draw.pick(&[0.0, 0.5, 0.95]), draw.pick(&[0.9, 0.99])]);
            }
            if name != "lion" && draw.chance(0.2) {
                table.set("eps", 0.000001);
            }
        }
    }
    table
}

fn schedule(draw: &mut Draw, updates: usize) -> Table {
    let name = draw.pick(&["constant", "linear", "cosine", "step", "onecycle"]);
    let mut table = if name == "constant" && draw.chance(0.3) { Table::new() } else { table_of_kind(name) };
    if name == "onecycle" {
        for (key, value) in [("warmup_fraction", 0.5), ("div", 4.0), ("final_div", 100.0)] {
            if draw.chance(0.4) {
                table.set(key, value);
            }
        }
        return table;
    }
    if draw.chance(0.5) {
        table.number("warmup_steps", draw.below(updates));
    }
    match name {
        "step" => {
            table.number("every_steps", draw.within(1..=3));
            if draw.chance(0.5) {
                table.set("gamma", 0.5);
            }
        }
        "linear" | "cosine" if draw.chance(0.5) => {
            table.set("final_lr_ratio", draw.pick(&[0.0, 0.1, 1.0]));
        }
        _ => {}
    }
    table
}

fn memory(draw: &mut Draw) -> Table {
    let mut table = Table::new();
    if draw.chance(0.3) {
        table.set("ram", draw.pick(&["auto", "4GiB", "60%"]));
    }
    if draw.chance(0.1) {
        table.set("vram", "auto");
    }
    if draw.chance(0.3) {
        table.set("headroom", draw.pick(&["0%", "2%", "1MiB"]));
    }
    if draw.chance(0.4) {
        let rungs = draw.subset(&["shrink", "recompute", "offload", "optimizer-8bit"]);
        table.set("on_oom", Value::Array(rungs.into_iter().map(Value::from).collect()));
    }
    if draw.chance(0.2) {
        table.number("max_retries", draw.within(0..=4));
    }
    if draw.chance(0.2) {
        table.set("graphs", draw.chance(0.5));
    }
    if draw.chance(0.2) {
        table.set("supervise", draw.chance(0.5));
    }
    table
}

fn eval(draw: &mut Draw, updates: usize, classes: bool) -> (Table, Vec<&'static str>) {
    let mut table = Table::new();
    match draw.below(3) {
        0 => table.number("every_steps", draw.within(1..=updates)),
        1 => table.number("every_epochs", draw.within(1..=2)),
        _ => &mut table,
    };
    if draw.chance(0.4) {
        table.number("batch_size", draw.log_uniform(1..=64));
    }
    if draw.chance(0.2) {
        table.set("at_start", draw.chance(0.8));
    }
    let mut measured = vec!["accuracy"];
    if draw.chance(0.4) {
        measured = if classes { draw.subset(&["accuracy", "top5"]) } else { draw.subset(&["accuracy"]) };
        table.set("metrics", Value::Array(measured.iter().map(|&name| Value::from(name)).collect()));
    }
    (table, measured)
}

fn checkpoint(draw: &mut Draw, updates: usize, measured: &[&str]) -> Table {
    let mut table = Table::new();
    match draw.below(6) {
        0..=2 => table.number("every_steps", draw.within(1..=updates.min(3))),
        3 => table.number("every_epochs", 1),
        4 => table.number("every_minutes", 1),
        _ => &mut table,
    };
    if draw.chance(0.5) {
        table.number("keep", draw.within(1..=3));
    }
    if draw.chance(0.4) {
        let names: Vec<String> =
            ["loss"].iter().chain(measured).map(|name| format!("valid.{name}")).collect();
        table.set("best", draw.pick(&names));
    }
    table
}
