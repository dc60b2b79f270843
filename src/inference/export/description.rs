//! A JSON description of a model: its job, its classes, and how a raw input becomes a sample.

use serde_json::{Value, json};

use super::ExportSource;
use crate::base::features::{InputSpec, TargetSpec};

/// The description's file in a `safetensors` export.
pub(super) const FILE: &str = "model.json";

/// Class names, if the model classifies.
pub(super) fn classes<'a>(source: &'a ExportSource) -> Option<&'a [String]> {
    match &source.features.target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } | TargetSpec::MultiLabel { names } => {
            Some(names)
        }
        TargetSpec::Values { .. } | TargetSpec::Tokens => None,
    }
}

/// What a sample is, as the network takes it.
pub(super) fn input(source: &ExportSource) -> Value {
    match &source.features.input {
        InputSpec::Floats { shape } => match shape.as_slice() {
            &[height, width, channels] => {
                json!({ "kind": "image", "height": height, "width": width, "channels": channels })
            }
            shape => json!({ "kind": "floats", "shape": shape }),
        },
        InputSpec::Tabular { num_numeric, cardinalities } => json!({
            "kind": "table", "numeric_columns": num_numeric, "categories_per_column": cardinalities,
            "unknown_category": "an index equal to the number of categories",
        }),
        InputSpec::Tokens { length, vocab } => json!({ "kind": "tokens", "length": length, "vocab": vocab }),
    }
}

/// The target, as the network predicts it.
fn target(source: &ExportSource) -> Value {
    match &source.features.target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } => {
            json!({ "kind": "class", "classes": names })
        }
        TargetSpec::MultiLabel { names } => {
            json!({ "kind": "labels", "labels": names, "activation": "sigmoid" })
        }
        TargetSpec::Values { len } => json!({ "kind": "values", "len": len }),
        TargetSpec::Tokens => json!({ "kind": "next_token" }),
    }
}

pub(super) fn of(source: &ExportSource) -> Value {
    let normalization = source.image.as_ref().map(|image| json!({ "mean": image.mean, "std": image.std }));
    json!({
        "producer": concat!("trainer ", env!("CARGO_PKG_VERSION")),
        "name": source.name,
        "model": source.model.kind(),
        "step": source.step,
        "input": input(source),
        "target": target(source),
        "normalization": normalization,
        "preprocessing": source.preprocessing,
        "chat_template": source.chat_template,
        "job": source.job,
    })
}

/// As indented text, with the type that the model is quantized to.
pub(super) fn pretty(source: &ExportSource, quantize: Option<&str>) -> String {
    let mut description = of(source);
    description["quantize"] = json!(quantize);
    format!("{description:#}\n")
}
