//! Exports of every kind of model with random weights. What is read back equals what was exported; the files
//! themselves are compared with other tools by `scripts/export-interop.py`, which reads what
//! `writes_what_other_tools_compare` leaves in `TRAINER_EXPORT_DIR`. What they gave is in
//! `tests/data/export-golden.json`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::json;

use super::*;
use crate::base::features::{InputSpec, TargetSpec};
use crate::base::random::{RngKey, stream_id};
use crate::data::language::tokenizer::CharTokenizer;
use crate::graph::network::Executor;
use crate::layers::Mode;
use crate::layers::gradcheck::{TestContext, test_spec};
use crate::memory::Ledger;
use crate::params::TensorSpec;
use crate::train::tensor_files::load_views;

const BATCH: usize = 3;
const LETTERS: &str = "\n abcdefghijklmnopqrstuvwxyzéß€";

/// What the samples of a case are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Samples {
    Vectors,
    /// Two numeric columns, and categories of 3 and 5.
    Table,
    /// Height, width, channels.
    Images(usize, usize, usize),
    /// Images with two values as target.
    ImageValues,
    Tokens,
    /// Tokens with one class per sample.
    Text,
}

const CASES: [(&str, &str, Samples); 17] = [
    ("mlp", "kind = 'mlp'\nhidden = [24, 16]\nactivation = 'gelu'\ndropout = 0.1", Samples::Vectors),
    ("mlp-table", "kind = 'mlp'\nhidden = [24]\nactivation = 'silu'", Samples::Table),
    ("mlp-values", "kind = 'mlp'\nhidden = [8]", Samples::ImageValues),
    (
        "cnn",
        "kind = 'cnn'\nstages = [{ channels = 8, norm = 'batch' }, { channels = 12, norm = 'group', stride = 2 }, \
         { channels = 6, pool = 1, kernel = 5 }]\nhidden = [10]\nactivation = 'gelu_tanh'",
        Samples::Images(16, 20, 3),
    ),
    ("resnet-small", "kind = 'resnet'\ndepth = 18\nstem = 'small'", Samples::Images(16, 16, 1)),
    ("resnet50", "kind = 'resnet'\ndepth = 50", Samples::Images(64, 64, 3)),
    ("mobilenet", "kind = 'mobilenet'\nwidth = 0.35", Samples::Images(64, 64, 3)),
    ("mobilenet-small", "kind = 'mobilenet'\nwidth = 1.0\nstem = 'small'", Samples::Images(32, 32, 3)),
    ("vit", "kind = 'vit'\npatch = 4\nlayers = 2\nheads = 4\nwidth = 32", Samples::Images(16, 16, 3)),
    ("vit-wide", "kind = 'vit'\npatch = 4\nlayers = 1\nheads = 2\nwidth = 16", Samples::Images(8, 16, 1)),
    ("gpt", "kind = 'gpt'\nlayers = 3\nheads = 4\nwidth = 64\ncontext = 64", Samples::Tokens),
    (
        "gpt-untied",
        "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 48\ncontext = 64\ntie = false",
        Samples::Tokens,
    ),
    (
        "llama",
        "kind = 'llama'\nlayers = 3\nheads = 4\nkv_heads = 2\nwidth = 64\nhidden = 96\ncontext = 64\nrope_theta = 5000.0",
        Samples::Tokens,
    ),
    (
        "llama-tied",
        "kind = 'llama'\nlayers = 2\nheads = 2\nkv_heads = 2\nwidth = 256\nhidden = 256\ncontext = 64\ntie = true",
        Samples::Tokens,
    ),
    ("bert", "kind = 'bert'\nlayers = 2\nheads = 4\nwidth = 32\nhidden = 48\ncontext = 64", Samples::Text),
    (
        "layers",
        "kind = 'layers'\nlayers = [{ kind = 'conv', channels = 8, kernel = 3, padding = 2, dilation = 2 }, \
         { kind = 'relu6' }, { kind = 'avg_pool', size = 3, stride = 2, padding = 1 }, \
         { kind = 'squeeze_excite', ratio = 2 }, { kind = 'group_norm', groups = 4 }, { kind = 'silu' }, \
         { kind = 'residual', activation = 'relu', layers = [{ kind = 'conv', channels = 8, padding = 1, groups = 8 }, \
         { kind = 'batch_norm' }], shortcut = [{ kind = 'conv', channels = 8, kernel = 1, bias = false }] }, \
         { kind = 'max_pool', size = 3, stride = 2, padding = 1 }, { kind = 'flatten' }, \
         { kind = 'linear', outputs = 12, bias = false }, { kind = 'batch_norm' }, { kind = 'tanh' }, \
         { kind = 'group_norm', groups = 3 }]",
        Samples::Images(15, 13, 3),
    ),
    (
        "layers-pool",
        "kind = 'layers'\nlayers = [{ kind = 'conv', channels = 6 }, { kind = 'sigmoid' }, { kind = 'global_pool' }, \
         { kind = 'residual', layers = [{ kind = 'linear', outputs = 6 }, { kind = 'gelu' }] }]",
        Samples::Images(9, 9, 2),
    ),
];

/// Uniform in [-1, 1], a function of the name and the index.
fn noise(name: &str, len: usize) -> Vec<f32> {
    let key = RngKey::new(7, stream_id(name));
    (0..len as u64).map(|i| (2.0 * key.f64(i) - 1.0) as f32).collect()
}

/// Values of a trained model's size: activations neither vanish nor explode.
fn random_values(spec: &TensorSpec) -> Vec<f32> {
    let fan_in = match spec.shape.as_slice() {
        [_, rest @ ..] if !rest.is_empty() => rest.iter().product::<usize>(),
        _ => 1,
    };
    let (offset, scale) = match spec.name.rsplit('.').next() {
        Some("running_var") => (1.0, 0.5),
        Some("running_mean" | "bias" | "in_proj_bias") => (0.0, 0.2),
        Some("weight") if spec.shape.len() == 1 => (1.0, 0.3),
        _ => (0.0, 2.0 / (fan_in as f32).sqrt()),
    };
    noise(&spec.name, spec.len()).into_iter().map(|v| offset + scale * v).collect()
}

/// A model with random weights in a folder of its own.
struct Case {
    name: &'static str,
    model: ModelConfig,
    samples: Samples,
    features: Features,
    folder: PathBuf,
}

impl Case {
    fn new((name, text, samples): (&'static str, &str, Samples), root: &Path) -> Self {
        let model: ModelConfig = toml::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let classes = || TargetSpec::Class { names: ["cat", "dog", "eel", "fox"].map(str::to_owned).into() };
        let floats = |shape: &[usize]| InputSpec::Floats { shape: shape.into() };
        let tokens = || InputSpec::Tokens { length: 24, vocab: LETTERS.chars().count() };
        let features = match samples {
            Samples::Vectors => Features::new(floats(&[10]), classes()),
            Samples::Table => {
                Features::new(InputSpec::Tabular { num_numeric: 2, cardinalities: vec![3, 5] }, classes())
            }
            Samples::Images(h, w, c) => Features::new(floats(&[h, w, c]), classes()),
            Samples::ImageValues => Features::new(floats(&[4, 6, 2]), TargetSpec::Values { len: 2 }),
            Samples::Tokens => Features::new(tokens(), TargetSpec::Tokens),
            Samples::Text => Features::new(tokens(), classes()),
        };
        let case = Self { name, model, samples, features, folder: root.join(name) };
        std::fs::create_dir_all(&case.folder).unwrap();
        let built = models::build(&case.model, &case.features).unwrap();
        let tensors: HashMap<String, Tensor> = all_specs(&built.layout)
            .map(|spec| {
                let tensor = Tensor::from_vec(random_values(spec), spec.shape.as_slice(), &Device::Cpu);
                (spec.name.clone(), tensor.unwrap())
            })
            .collect();
        candle_core::safetensors::save(&tensors, case.weights()).unwrap();
        std::fs::write(case.tokenizer(), CharTokenizer::new(LETTERS.chars()).to_json()).unwrap();
        case
    }

    fn weights(&self) -> PathBuf {
        self.folder.join("weights.safetensors")
    }

    fn tokenizer(&self) -> PathBuf {
        self.folder.join("tokenizer.json")
    }

    /// Exports and reads back; gives the summary and the tensors.
    fn export(
        &self,
        options: &ExportOptions,
    ) -> Result<(ExportSummary, BTreeMap<String, Vec<f32>>), ExportError> {
        let (weights, tokenizer) = (self.weights(), self.tokenizer());
        let source = ExportSource {
            name: self.name,
            model: &self.model,
            features: &self.features,
            weights: &weights,
            statistics: &weights,
            tokenizer: match self.samples {
                Samples::Tokens | Samples::Text => TokenizerSource::File(tokenizer),
                _ => TokenizerSource::None,
            },
            chat_template: None,
            image: None,
            job: json!({ "model": self.model }),
            preprocessing: json!({ "columns": [] }),
            kept: None,
            step: 5,
        };
        let summary = export(&source, options, &mut NoExportProgress)?;
        let path = options.folder.with_added_extension("safetensors");
        read_back(&source, options, &path)?;
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
        let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1().unwrap();
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect();
        Ok((summary, tensors))
    }

    fn options(
        &self,
        format: ExportFormat,
        dtype: Option<WeightDtype>,
        quantize: Option<Quantization>,
    ) -> ExportOptions {
        let types = quantize.map(Quantization::name).or(dtype.map(WeightDtype::name)).unwrap_or("default");
        let folder = self.folder.join(format!("{}-{types}", format.name()));
        ExportOptions { format, dtype, quantize, folder, force: true, max_bytes: 1 << 30 }
    }

    /// An input of the network, the number of tokens of each sample, and its logits.
    fn logits(&self) -> (Tensor, Option<Vec<u32>>, Tensor) {
        let shape: &[usize] = match &self.features.input {
            InputSpec::Floats { shape } => shape,
            _ => &[self.features.input_len()],
        };
        let dims = [&[BATCH], shape].concat();
        let len = dims.iter().product();
        let floats = noise("input", len);
        let inputs = match self.samples {
            Samples::Tokens | Samples::Text => {
                let vocab = LETTERS.chars().count() as u32;
                let ids: Vec<u32> = (0..len as u32).map(|i| (i * 7 + i / 5) % vocab).collect();
                Tensor::from_vec(ids, dims, &Device::Cpu).unwrap()
            }
            // The last index of a column means an unknown category.
            Samples::Table => {
                let rows = (0..BATCH)
                    .flat_map(|i| [floats[2 * i], floats[2 * i + 1], (i + 1) as f32, (2 * i + 1) as f32]);
                Tensor::from_vec(rows.collect(), dims, &Device::Cpu).unwrap()
            }
            _ => Tensor::from_vec(floats, dims, &Device::Cpu).unwrap(),
        };
        let lengths = (self.samples == Samples::Text).then(|| vec![24, 9, 17]);
        let logits = self.forward(&self.weights(), &self.features, &inputs, lengths.as_deref());
        (inputs, lengths, logits)
    }

    /// The logits of a batch, by a file of weights.
    fn forward(
        &self,
        weights: &Path,
        features: &Features,
        inputs: &Tensor,
        lengths: Option<&[u32]>,
    ) -> Tensor {
        let built = models::build(&self.model, features).unwrap();
        let batch = inputs.dim(0).unwrap();
        let (network, context) = (built.network, TestContext::with_layout(built.layout, DType::F32, batch));
        let store = &context.store;
        load_views(weights, &store.layout.params, store.weight_views()).unwrap();
        load_views(weights, &store.layout.stats, store.stat_views()).unwrap();
        let mut pass = context.pass(Mode::Eval);
        pass.lengths = lengths;
        let ledger = Ledger::planning();
        let exec = Executor {
            pass: Some(pass),
            spec: test_spec(batch, DType::F32),
            ledger: &ledger,
            recompute_blocks: 0,
            offload: None,
        };
        network.logits(&exec, Some(inputs)).unwrap().unwrap()
    }

    /// The ids that follow `prompt` at temperature 0, without the id `never`; and, for each, how much better it was
    /// than the second best, relative to the largest logit.
    fn greedy(&self, weights: &Path, prompt: &[u32], tokens: usize, never: usize) -> Vec<(u32, f32)> {
        let vocab = LETTERS.chars().count();
        let length = prompt.len() + tokens;
        let features = Features::new(InputSpec::Tokens { length, vocab }, TargetSpec::Tokens);
        let mut ids = prompt.to_vec();
        let mut found = Vec::new();
        for at in prompt.len()..length {
            // A position sees only those before it.
            let padded: Vec<u32> = ids.iter().copied().chain(std::iter::repeat(0)).take(length).collect();
            let inputs = Tensor::from_vec(padded, (1, length), &Device::Cpu).unwrap();
            let logits = self.forward(weights, &features, &inputs, None);
            let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
            let row = &logits[(at - 1) * vocab..at * vocab];
            let largest = row.iter().fold(0f32, |most, v| most.max(v.abs()));
            let mut ranked: Vec<usize> = (0..vocab).filter(|&id| id != never).collect();
            ranked.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            ids.push(ranked[0] as u32);
            found.push((ranked[0] as u32, (row[ranked[0]] - row[ranked[1]]) / largest));
        }
        found
    }

    fn original(&self) -> BTreeMap<String, Vec<f32>> {
        let built = models::build(&self.model, &self.features).unwrap();
        all_specs(&built.layout).map(|spec| (spec.name.clone(), random_values(spec))).collect()
    }
}

#[test]
fn what_is_read_back_is_what_was_exported() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let case = Case::new(case, root.path());
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

/// What is read back has other parameters, and its logits differ by rounding.
#[test]
fn folded_batch_norms_compute_the_same() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES.into_iter().map(|case| Case::new(case, root.path())) {
        if !ExportFormat::Tflite.supports(case.model.kind()) {
            continue;
        }
        let options = case.options(ExportFormat::Tflite, None, None);
        let (summary, tensors) = case.export(&options).unwrap();
        assert_eq!((summary.dtype, tensors.len()), ("f32", case.original().len()));
        let (inputs, lengths, logits) = case.logits();
        let weights = options.folder.with_added_extension("safetensors");
        let read_back = case.forward(&weights, &case.features, &inputs, lengths.as_deref());
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (ours, folded) = (values(&logits), values(&read_back));
        let largest = ours.iter().fold(0f32, |most, value| most.max(value.abs()));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * largest;
        assert!(ours.iter().zip(&folded).all(close), "{}: {ours:?} {folded:?}", case.name);
        let folds = tensors
            .iter()
            .any(|(name, values)| name.ends_with("running_var") && values.iter().all(|value| *value == 1.0));
        assert_eq!(folds, matches!(case.name, "cnn") || case.model.kind().ends_with("net"), "{}", case.name);
    }
}

#[test]
fn a_damaged_tflite_file_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let case = Case::new(CASES.into_iter().find(|case| case.0 == "cnn").unwrap(), root.path());
    let options = case.options(ExportFormat::Tflite, None, None);
    case.export(&options).unwrap();
    let path = options.folder.join(tflite::FILE);
    let file = std::fs::read(&path).unwrap();
    let name = "stages.0.weight";
    let built = models::build(&case.model, &case.features).unwrap();
    let spec = all_specs(&built.layout).find(|spec| spec.name == name).unwrap();
    let mapping = TensorMapping::new(name, spec, weights::Transform::Permute([0, 2, 3, 1]));
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        tflite::Reader::open(&path).and_then(|reader| reader.read(&mapping))
    };
    assert_eq!(read(&file).unwrap().len(), mapping.len());
    for length in (0..file.len()).step_by(97) {
        let _ = read(&file[..length]);
    }
    assert!(read(&file[..file.len() / 2]).is_err() && read(&[]).is_err());
    // Offsets that lead anywhere: never a panic.
    let key = RngKey::new(3, stream_id("damage"));
    for i in 0..400 {
        let mut damaged = file.clone();
        let at = (key.f64(2 * i) * file.len() as f64) as usize;
        damaged[at] ^= 1 << (key.f64(2 * i + 1) * 8.0) as u32;
        let _ = read(&damaged);
    }
}

#[test]
fn quantized_blocks_are_candles() {
    use candle_core::quantized::{GgmlDType, QTensor, gguf_file::Content, gguf_file::Value};
    let root = tempfile::tempdir().unwrap();
    let case = CASES.into_iter().find(|case| case.0 == "llama-tied").unwrap();
    let case = Case::new(case, root.path());
    let original = case.original();
    for quantization in Quantization::ALL {
        let options = case.options(ExportFormat::Gguf, None, Some(quantization));
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

#[test]
fn an_onnx_file_is_a_graph_in_order() {
    use std::collections::BTreeSet;
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let case = Case::new(case, root.path());
        for dtype in [WeightDtype::F32, WeightDtype::F16] {
            let options = case.options(ExportFormat::Onnx, Some(dtype), None);
            let (_, tensors) = case.export(&options).unwrap();
            let file = std::fs::read(options.folder.join("model.onnx")).unwrap();
            let graph = onnx::parse(&file);
            let mut known: BTreeSet<String> =
                graph.inputs.iter().chain(&graph.initializers).cloned().collect();
            assert!(tensors.keys().all(|name| known.contains(name)), "{}", case.name);
            for (inputs, outputs) in graph.nodes {
                for input in inputs {
                    assert!(known.contains(&input), "{}: `{input}` is not defined yet", case.name);
                }
                assert!(outputs.iter().all(|output| known.insert(output.clone())), "{}", case.name);
            }
            assert!(graph.outputs.iter().all(|output| known.contains(output)));
        }
    }
}

#[test]
fn pairs_without_a_form_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let case = |name| Case::new(CASES.into_iter().find(|case| case.0 == name).unwrap(), root.path());
    let error = |case: &Case, options: ExportOptions| case.export(&options).err().unwrap();
    let cnn = case("cnn");
    let refused = error(&cnn, cnn.options(ExportFormat::Gguf, None, None));
    assert_eq!(refused.to_string(), "a `cnn` model has no `gguf` form");
    assert_eq!(
        refused.hint().unwrap(),
        "a `cnn` model exports with `--format safetensors`, `--format onnx`, `--format tflite`"
    );
    assert!(refused.is_usage());
    let refused = error(&cnn, cnn.options(ExportFormat::Tflite, Some(WeightDtype::F16), None));
    assert_eq!(refused.to_string(), "`--dtype f16` has no form in `tflite`");
    assert_eq!(refused.hint().unwrap(), "its weights are f32");
    let mlp = case("mlp");
    let refused = error(&mlp, mlp.options(ExportFormat::Hf, None, None));
    assert_eq!(refused.to_string(), "a `mlp` model has no `hf` form");
    let refused = error(&mlp, mlp.options(ExportFormat::Onnx, None, Some(Quantization::Q8_0)));
    assert_eq!(refused.to_string(), "`--quantize q8_0` needs `--format gguf`, and the format is `onnx`");
    let gpt = case("gpt");
    let refused = error(&gpt, gpt.options(ExportFormat::Tflite, None, None));
    assert_eq!(refused.to_string(), "a `gpt` model has no `tflite` form");
    assert!(refused.hint().unwrap().contains("`--format gguf`, `--format onnx`"));
    let refused =
        error(&gpt, gpt.options(ExportFormat::Gguf, Some(WeightDtype::F16), Some(Quantization::Q4_0)));
    assert_eq!(refused.to_string(), "`--dtype f16` and `--quantize q4_0` exclude each other");
    let options = ExportOptions { force: false, ..gpt.options(ExportFormat::Safetensors, None, None) };
    gpt.export(&options).unwrap();
    assert!(matches!(error(&gpt, options), ExportError::FolderTaken(_)));
    assert_eq!(
        "q4_k_l".parse::<Quantization>().unwrap_err().to_string(),
        "`q4_k_l` is none of q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, q4_k_m, q5_k_m"
    );
}

#[test]
fn a_tensor_beyond_the_budget_is_named() {
    let root = tempfile::tempdir().unwrap();
    let case = Case::new(CASES.into_iter().find(|case| case.0 == "gpt").unwrap(), root.path());
    let options = ExportOptions { max_bytes: 1 << 16, ..case.options(ExportFormat::Onnx, None, None) };
    let error = case.export(&options).err().unwrap().to_string();
    assert_eq!(
        error,
        "converting `transformer.h.2.mlp.c_proj.weight` takes 192.00 KiB, and the budget is 64.00 KiB"
    );
    assert!(!options.folder.exists());
}

/// Writes every case in every format, with what is read back, inputs and logits beside them, if `TRAINER_EXPORT_DIR` is
/// set.
#[test]
fn writes_what_other_tools_compare() {
    let Some(root) = std::env::var_os("TRAINER_EXPORT_DIR") else { return };
    for case in CASES {
        let case = Case::new(case, Path::new(&root));
        for format in ExportFormat::of_kind(case.model.kind()) {
            for dtype in format.dtypes() {
                case.export(&case.options(format, Some(*dtype), None)).unwrap();
            }
            if format == ExportFormat::Gguf {
                for quantization in Quantization::ALL {
                    case.export(&case.options(format, None, Some(quantization))).unwrap();
                }
            }
        }
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
        let case = Case::new(case, root.path());
        let Some(formats) = golden.get(case.name) else {
            assert!(case.model.kind() == "mlp", "no other tool has read {}", case.name);
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
