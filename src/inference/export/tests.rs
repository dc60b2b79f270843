//! Exports of every kind of model with random weights. What is read back equals what was exported; the files
//! themselves are compared with other tools by `scripts/export-interop.py`, which reads what
//! `writes_what_other_tools_compare` leaves in `TRAINER_EXPORT_DIR`. What they gave is in
//! `tests/data/export-golden.json`.

mod case;
mod integers;
mod rounded;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::json;

use self::case::{BATCH, CASES, ExportCase};
use super::*;

#[test]
fn what_is_read_back_is_what_was_exported() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let case = ExportCase::new(case, root.path());
        let original = case.original();
        // A TFLite file has no batch norms: what is read back of it computes the same, and that is another test.
        let formats = ExportFormat::of_kind(case.model.kind());
        for format in formats.filter(|format| *format != ExportFormat::Tflite) {
            let (summary, tensors) =
                case.export(&case.options(format, Some(WeightDtype::F32), None)).unwrap();
            assert_eq!(tensors, original, "{} as {}", case.name, format.name());
            assert!(summary.bytes > 0 && summary.notes.iter().all(|note| note.contains("end-of-text")));
            for (dtype, precision) in [(WeightDtype::F16, 1e-3), (WeightDtype::Bf16, 8e-3)] {
                let (half, tensors) = case.export(&case.options(format, Some(dtype), None)).unwrap();
                // A graph has a node more for each weight that it converts.
                assert!(half.bytes < summary.bytes || summary.bytes < 100_000, "{}", case.name);
                for (name, values) in &original {
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= precision * b.abs() + 1e-6;
                    assert!(tensors[name].iter().zip(values).all(close), "{} {name}", case.name);
                }
            }
        }
    }
}

#[test]
fn quantized_blocks_are_candles() {
    use candle_core::quantized::{GgmlDType, QTensor, gguf_file::Content, gguf_file::Value};
    let root = tempfile::tempdir().unwrap();
    let case = CASES.into_iter().find(|case| case.0 == "llama-tied").unwrap();
    let case = ExportCase::new(case, root.path());
    let original = case.original();
    for quantization in Quantization::ALL {
        let options = case.options(ExportFormat::Gguf, None, Some(QuantizedType::Gguf(quantization)));
        let (summary, tensors) = case.export(&options).unwrap();
        assert_eq!(summary.dtype, quantization.name());
        let mut file = std::fs::File::open(options.folder.join(gguf::FILE)).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert!(matches!(&content.metadata["general.architecture"], Value::String(text) if text == "llama"));
        assert!(matches!(content.metadata["llama.attention.head_count_kv"], Value::U32(2)));
        assert!(matches!(&content.metadata["tokenizer.ggml.tokens"], Value::Array(all) if all.len() == 31));
        let down = &content.tensor_infos["blk.1.ffn_down.weight"];
        assert_ne!(down.ggml_dtype, GgmlDType::F32);
        let name = "model.layers.1.mlp.down_proj.weight";
        let values =
            Tensor::new(original[name].as_slice(), &Device::Cpu).unwrap().reshape((256, 256)).unwrap();
        let blocks = QTensor::quantize(&values, down.ggml_dtype).unwrap();
        let expected: Vec<f32> =
            blocks.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(tensors[name], expected, "{}", quantization.name());
        let written = content.tensor(&mut file, "blk.1.ffn_down.weight", &Device::Cpu).unwrap();
        assert_eq!(written.data().unwrap(), blocks.data().unwrap());
    }
}

/// Every value of `model.onnx` is defined before it is used, and once. Returns the names of its initializers.
fn check_onnx_order(name: &str, folder: &Path) -> BTreeSet<String> {
    let graph = onnx::parse(&std::fs::read(folder.join("model.onnx")).unwrap());
    let initializers: BTreeSet<String> = graph.initializers.iter().cloned().collect();
    assert_eq!(initializers.len(), graph.initializers.len(), "{name}");
    let mut known: BTreeSet<String> = graph.inputs.iter().chain(&graph.initializers).cloned().collect();
    for (inputs, outputs) in graph.nodes {
        for input in inputs {
            assert!(known.contains(&input), "{name}: `{input}` is not defined yet");
        }
        assert!(outputs.iter().all(|output| known.insert(output.clone())), "{name}");
    }
    assert!(graph.outputs.iter().all(|output| known.contains(output)));
    initializers
}

#[test]
fn an_onnx_file_is_a_graph_in_order() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let case = ExportCase::new(case, root.path());
        for dtype in [WeightDtype::F32, WeightDtype::F16] {
            let options = case.options(ExportFormat::Onnx, Some(dtype), None);
            let (_, tensors) = case.export(&options).unwrap();
            let initializers = check_onnx_order(case.name, &options.folder);
            assert!(tensors.keys().all(|name| initializers.contains(name)), "{}", case.name);
        }
    }
}

#[test]
fn pairs_without_a_form_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let case = |name| ExportCase::new(CASES.into_iter().find(|case| case.0 == name).unwrap(), root.path());
    let error = |case: &ExportCase, options: ExportOptions| case.export(&options).err().unwrap();
    let cnn = case("cnn");
    let refused = error(&cnn, cnn.options(ExportFormat::Gguf, None, None));
    assert_eq!(refused.to_string(), "`cnn` models cannot be exported as `gguf`");
    assert_eq!(
        refused.hint().unwrap(),
        "a `cnn` model exports with `--format safetensors`, `--format onnx`, `--format tflite`"
    );
    assert!(refused.is_usage());
    let refused = error(&cnn, cnn.options(ExportFormat::Tflite, Some(WeightDtype::F16), None));
    assert_eq!(refused.to_string(), "`--dtype f16` is not supported by `tflite`");
    assert_eq!(refused.hint().unwrap(), "its weights are f32");
    let mlp = case("mlp");
    let refused = error(&mlp, mlp.options(ExportFormat::Hf, None, None));
    assert_eq!(refused.to_string(), "`mlp` models cannot be exported as `hf`");
    let refused =
        error(&mlp, mlp.options(ExportFormat::Onnx, None, Some(QuantizedType::Gguf(Quantization::Q8_0))));
    assert_eq!(refused.to_string(), "`--quantize q8_0` is not supported by `onnx`");
    assert_eq!(refused.hint().unwrap(), "it has int8, int4; `q8_0` works with `--format gguf`");
    let gpt = case("gpt");
    let refused = error(&gpt, gpt.options(ExportFormat::Tflite, None, None));
    assert_eq!(refused.to_string(), "`gpt` models cannot be exported as `tflite`");
    assert!(refused.hint().unwrap().contains("`--format gguf`, `--format onnx`"));
    let refused = error(&gpt, gpt.options(ExportFormat::Gguf, None, Some(QuantizedType::Int8)));
    assert_eq!(refused.to_string(), "`--quantize int8` is not supported by `gguf`");
    assert_eq!(
        refused.hint().unwrap(),
        "it has q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, q4_k_m, q5_k_m; `int8` works with `--format onnx` and \
         `--format tflite`"
    );
    let refused = error(&gpt, gpt.options(ExportFormat::Hf, None, Some(QuantizedType::Int8)));
    assert_eq!(refused.to_string(), "`--quantize int8` is not supported by `hf`");
    assert!(
        refused.hint().unwrap().starts_with("`--dtype f16` or `--dtype bf16` halves its weights; `int8`")
    );
    let layers = case("layers");
    let refused = error(&layers, layers.options(ExportFormat::Onnx, None, Some(QuantizedType::Int8)));
    assert_eq!(refused.to_string(), "`--quantize int8` is not supported for `layers` models");
    assert!(refused.hint().unwrap().contains("mlp, cnn, resnet, mobilenet"));
    let refused = error(&cnn, cnn.options(ExportFormat::Onnx, None, Some(QuantizedType::Int4)));
    assert_eq!(refused.to_string(), "`--quantize int4` is not supported for `cnn` models");
    assert_eq!(refused.hint().unwrap(), "`--quantize int8` is supported for them");
    let refused = error(
        &gpt,
        gpt.options(
            ExportFormat::Gguf,
            Some(WeightDtype::F16),
            Some(QuantizedType::Gguf(Quantization::Q4_0)),
        ),
    );
    assert_eq!(refused.to_string(), "`--dtype f16` and `--quantize q4_0` exclude each other");
    let options = ExportOptions { force: false, ..gpt.options(ExportFormat::Safetensors, None, None) };
    gpt.export(&options).unwrap();
    assert!(matches!(error(&gpt, options), ExportError::FolderTaken(_)));
    assert_eq!(
        "q4_k_l".parse::<QuantizedType>().unwrap_err().to_string(),
        "`q4_k_l` is none of int8, int4, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, q4_k_m, q5_k_m"
    );
}

#[test]
fn a_tensor_beyond_the_budget_is_named() {
    let root = tempfile::tempdir().unwrap();
    let case = ExportCase::new(CASES.into_iter().find(|case| case.0 == "gpt").unwrap(), root.path());
    let options = ExportOptions { max_bytes: 1 << 16, ..case.options(ExportFormat::Onnx, None, None) };
    let error = case.export(&options).err().unwrap().to_string();
    assert_eq!(
        error,
        "converting `transformer.h.2.mlp.c_proj.weight` takes 192.00 KiB, and the budget is 64.00 KiB"
    );
    assert!(!options.folder.exists());
}

/// Writes every case in every format, with what is read back, inputs and logits beside them, if `TRAINER_EXPORT_DIR`
/// is set.
#[test]
fn writes_what_other_tools_compare() {
    let Some(root) = std::env::var_os("TRAINER_EXPORT_DIR") else { return };
    for case in CASES {
        let mut case = ExportCase::new(case, Path::new(&root));
        for format in ExportFormat::of_kind(case.model.kind()) {
            for dtype in format.dtypes() {
                case.export(&case.options(format, Some(*dtype), None)).unwrap();
            }
            if format == ExportFormat::Gguf {
                for quantization in Quantization::ALL {
                    case.export(&case.options(format, None, Some(QuantizedType::Gguf(quantization))))
                        .unwrap();
                }
            }
        }
        let quantized = integers::write(&mut case);
        let (inputs, lengths, logits) = case.logits();
        let image = inputs.rank() == 4;
        let inputs = if image { inputs.permute((0, 3, 1, 2)).unwrap() } else { inputs };
        let list = |tensor: &Tensor| -> Vec<f64> {
            tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let expected = json!({
            "kind": case.model.kind(), "tokens": inputs.dtype() == DType::U32,
            "input_shape": inputs.dims(), "input": list(&inputs), "lengths": lengths,
            "logits_shape": logits.dims(), "logits": list(&logits),
            "int8": quantized.map(|(logits, step)| json!({ "logits": list(&logits), "step": step })),
            "blocks": integers::write_blocks(&case).map(|all| all.map(|logits| list(&logits))),
        });
        std::fs::write(case.folder.join("expected.json"), expected.to_string()).unwrap();
    }
}

/// What other tools computed from exports: `scripts/export-interop.py --golden` writes it.
#[derive(serde::Deserialize)]
struct Golden {
    /// CRC-32 of each file that the tool read.
    files: BTreeMap<String, u32>,
    /// In f32, of the last position for a language model.
    #[serde(default)]
    logits: Vec<f32>,
    /// How llama.cpp continues a prompt, without the end of the text.
    #[serde(default)]
    prompt: Vec<u32>,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    end: usize,
}

/// The files are still those that the tools read, and the logits and tokens are ours.
#[test]
fn other_tools_compute_what_we_compute() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/export-golden.json");
    let golden: BTreeMap<String, BTreeMap<String, Golden>> =
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let mut case = ExportCase::new(case, root.path());
        let Some(formats) = golden.get(case.name) else {
            let hint = "scripts/export-interop.py does it, see docs/contributing.md";
            assert!(case.model.kind() == "mlp", "no other tool has read {}: {hint}", case.name);
            continue;
        };
        let logits = case.logits().2;
        let width = logits.dims()[logits.rank() - 1];
        let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        let rows_per_sample = logits.len() / width / BATCH;
        let last: Vec<f32> = logits
            .chunks(width)
            .skip(rows_per_sample - 1)
            .step_by(rows_per_sample)
            .flatten()
            .copied()
            .collect();
        let largest = logits.iter().fold(0f32, |most, v| most.max(v.abs()));
        for (form, golden) in formats {
            if let Some((format, bits)) = form.split_once("-int") {
                let quantized = format!("int{bits}").parse().unwrap();
                integers::check_golden(&mut case, format.parse().unwrap(), quantized, &golden.logits);
                continue;
            }
            let (format, dtype) = match form.as_str() {
                "hf" => (ExportFormat::Hf, WeightDtype::F32),
                "onnx" => (ExportFormat::Onnx, WeightDtype::F32),
                "tflite" => (ExportFormat::Tflite, WeightDtype::F32),
                _ => (ExportFormat::Gguf, WeightDtype::F16),
            };
            let options = case.options(format, Some(dtype), None);
            case.export(&options).unwrap();
            for (file, expected) in &golden.files {
                let mut crc = flate2::Crc::new();
                crc.update(&std::fs::read(options.folder.join(file)).unwrap());
                assert_eq!(crc.sum(), *expected, "{} {form}: {file} is another", case.name);
            }
            if form == "gguf" {
                let weights = options.folder.with_added_extension("safetensors");
                let ours = case.greedy(&weights, &golden.prompt, golden.tokens.len(), golden.end);
                let pairs = || ours.iter().zip(&golden.tokens);
                let same = pairs().take_while(|((id, _), theirs)| id == *theirs).count();
                let tie = ours.get(same).is_some_and(|(_, gap)| *gap < 1e-3);
                assert!(same == golden.tokens.len() || tie, "{}: {same} of the tokens", case.name);
            } else {
                assert_eq!(last.len(), golden.logits.len(), "{} {form}", case.name);
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * largest;
                assert!(last.iter().zip(&golden.logits).all(close), "{} {form}", case.name);
            }
        }
    }
}
