//! Models of every kind with random weights, their exports, and their logits.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::json;

use super::super::*;
use crate::base::features::{InputSpec, TargetSpec};
use crate::base::random::{RngKey, stream_id};
use crate::data::language::tokenizer::CharTokenizer;
use crate::graph::network::Executor;
use crate::layers::Mode;
use crate::layers::gradcheck::{TestContext, test_device, test_spec};
use crate::memory::Ledger;
use crate::params::TensorSpec;
use crate::train::tensor_files::load_views;

pub(super) const BATCH: usize = 3;
pub(super) const LETTERS: &str = "\n abcdefghijklmnopqrstuvwxyzéß€";

/// What the samples of a case are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SampleKind {
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

pub(super) const CASES: [(&str, &str, SampleKind); 17] = [
    ("mlp", "kind = 'mlp'\nhidden = [24, 16]\nactivation = 'gelu'\ndropout = 0.1", SampleKind::Vectors),
    ("mlp-table", "kind = 'mlp'\nhidden = [24]\nactivation = 'silu'", SampleKind::Table),
    ("mlp-values", "kind = 'mlp'\nhidden = [8]", SampleKind::ImageValues),
    (
        "cnn",
        "kind = 'cnn'\nstages = [{ channels = 8, norm = 'batch' }, { channels = 12, norm = 'group', stride = 2 }, \
         { channels = 6, pool = 1, kernel = 5 }]\nhidden = [10]\nactivation = 'gelu_tanh'",
        SampleKind::Images(16, 20, 3),
    ),
    ("resnet-small", "kind = 'resnet'\ndepth = 18\nstem = 'small'", SampleKind::Images(16, 16, 1)),
    ("resnet50", "kind = 'resnet'\ndepth = 50", SampleKind::Images(64, 64, 3)),
    ("mobilenet", "kind = 'mobilenet'\nwidth = 0.35", SampleKind::Images(64, 64, 3)),
    ("mobilenet-small", "kind = 'mobilenet'\nwidth = 1.0\nstem = 'small'", SampleKind::Images(32, 32, 3)),
    ("vit", "kind = 'vit'\npatch = 4\nlayers = 2\nheads = 4\nwidth = 32", SampleKind::Images(16, 16, 3)),
    ("vit-wide", "kind = 'vit'\npatch = 4\nlayers = 1\nheads = 2\nwidth = 16", SampleKind::Images(8, 16, 1)),
    ("gpt", "kind = 'gpt'\nlayers = 3\nheads = 4\nwidth = 64\ncontext = 64", SampleKind::Tokens),
    (
        "gpt-untied",
        "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 48\ncontext = 64\ntie = false",
        SampleKind::Tokens,
    ),
    (
        "llama",
        "kind = 'llama'\nlayers = 3\nheads = 4\nkv_heads = 2\nwidth = 64\nhidden = 96\ncontext = 64\nrope_theta = 5000.0",
        SampleKind::Tokens,
    ),
    (
        "llama-tied",
        "kind = 'llama'\nlayers = 2\nheads = 2\nkv_heads = 2\nwidth = 256\nhidden = 256\ncontext = 64\ntie = true",
        SampleKind::Tokens,
    ),
    ("bert", "kind = 'bert'\nlayers = 2\nheads = 4\nwidth = 32\nhidden = 48\ncontext = 64", SampleKind::Text),
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
        SampleKind::Images(15, 13, 3),
    ),
    (
        "layers-pool",
        "kind = 'layers'\nlayers = [{ kind = 'conv', channels = 6 }, { kind = 'sigmoid' }, { kind = 'global_pool' }, \
         { kind = 'residual', layers = [{ kind = 'linear', outputs = 6 }, { kind = 'gelu' }] }]",
        SampleKind::Images(9, 9, 2),
    ),
];

/// Uniform in [-1, 1], a function of the name and the index.
pub(super) fn noise(name: &str, len: usize) -> Vec<f32> {
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
pub(super) struct ExportCase {
    pub name: &'static str,
    pub model: ModelConfig,
    pub samples: SampleKind,
    pub features: Features,
    pub folder: PathBuf,
    /// If it was calibrated.
    pub activations: Option<ActivationQuantization>,
    /// If its weights are values of the format already.
    pub scales: Option<BlockScales>,
}

impl ExportCase {
    pub(super) fn new((name, text, samples): (&'static str, &str, SampleKind), root: &Path) -> Self {
        let model: ModelConfig = toml::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let classes = || TargetSpec::Class { names: ["cat", "dog", "eel", "fox"].map(str::to_owned).into() };
        let floats = |shape: &[usize]| InputSpec::Floats { shape: shape.into() };
        let tokens = || InputSpec::Tokens { length: 24, vocab: LETTERS.chars().count() };
        let features = match samples {
            SampleKind::Vectors => Features::new(floats(&[10]), classes()),
            SampleKind::Table => {
                Features::new(InputSpec::Tabular { num_numeric: 2, cardinalities: vec![3, 5] }, classes())
            }
            SampleKind::Images(h, w, c) => Features::new(floats(&[h, w, c]), classes()),
            SampleKind::ImageValues => Features::new(floats(&[4, 6, 2]), TargetSpec::Values { len: 2 }),
            SampleKind::Tokens => Features::new(tokens(), TargetSpec::Tokens),
            SampleKind::Text => Features::new(tokens(), classes()),
        };
        let case =
            Self { name, model, samples, features, folder: root.join(name), activations: None, scales: None };
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

    pub(super) fn weights(&self) -> PathBuf {
        self.folder.join("weights.safetensors")
    }

    fn tokenizer(&self) -> PathBuf {
        self.folder.join("tokenizer.json")
    }

    /// Exports and reads back; gives the summary and the tensors.
    pub(super) fn export(
        &self,
        options: &ExportOptions,
    ) -> Result<(ExportSummary, BTreeMap<String, Vec<f32>>), ExportError> {
        let (weights, tokenizer) = (self.weights(), self.tokenizer());
        let source = ExportSource {
            name: self.name,
            model: &self.model,
            reductions: Default::default(),
            features: &self.features,
            weights: &weights,
            statistics: &weights,
            tokenizer: match self.samples {
                SampleKind::Tokens | SampleKind::Text => TokenizerSource::File(tokenizer),
                _ => TokenizerSource::None,
            },
            chat_template: None,
            image: None,
            job: json!({ "model": self.model }),
            preprocessing: json!({ "columns": [] }),
            checkpoint_preprocessing: None,
            activations: self.activations.as_ref(),
            scales: self.scales.as_ref(),
            step: 5,
        };
        let summary = export(&source, options, &mut NoExportProgress)?;
        let path = options.folder.with_added_extension("safetensors");
        let points = read_back(&source, options, &path)?;
        assert_eq!(
            matches!(points, ActivationPoints::Quantize(_)),
            options.quantizes_activations(self.model.kind())
        );
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
        let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1().unwrap();
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect();
        Ok((summary, tensors))
    }

    pub(super) fn options(
        &self,
        format: ExportFormat,
        dtype: Option<WeightDtype>,
        quantize: Option<QuantizedType>,
    ) -> ExportOptions {
        let types = quantize.map(QuantizedType::name).or(dtype.map(WeightDtype::name)).unwrap_or("default");
        let folder = self.folder.join(format!("{}-{types}", format.name()));
        let rounding = Rounding::Nearest;
        ExportOptions { format, dtype, quantize, rounding, folder, force: true, max_bytes: 1 << 30 }
    }

    /// An input of the network, the number of tokens of each sample, and its logits.
    pub(super) fn logits(&self) -> (Tensor, Option<Vec<u32>>, Tensor) {
        let shape: &[usize] = match &self.features.input {
            InputSpec::Floats { shape } => shape,
            _ => &[self.features.input_len()],
        };
        let dims = [&[BATCH], shape].concat();
        let len = dims.iter().product();
        let floats = noise("input", len);
        let inputs = match self.samples {
            SampleKind::Tokens | SampleKind::Text => {
                let vocab = LETTERS.chars().count() as u32;
                let ids: Vec<u32> = (0..len as u32).map(|i| (i * 7 + i / 5) % vocab).collect();
                Tensor::from_vec(ids, dims, &Device::Cpu).unwrap()
            }
            // The last index of a column means an unknown category.
            SampleKind::Table => {
                let rows = (0..BATCH)
                    .flat_map(|i| [floats[2 * i], floats[2 * i + 1], (i + 1) as f32, (2 * i + 1) as f32]);
                Tensor::from_vec(rows.collect(), dims, &Device::Cpu).unwrap()
            }
            _ => Tensor::from_vec(floats, dims, &Device::Cpu).unwrap(),
        };
        let lengths = (self.samples == SampleKind::Text).then(|| vec![24, 9, 17]);
        let logits = self.forward(&self.weights(), &self.features, &inputs, lengths.as_deref());
        (inputs, lengths, logits)
    }

    /// The logits of a batch, by a file of weights.
    pub(super) fn forward(
        &self,
        weights: &Path,
        features: &Features,
        inputs: &Tensor,
        lengths: Option<&[u32]>,
    ) -> Tensor {
        self.forward_with(weights, features, inputs, lengths, &ActivationPoints::None)
    }

    /// The same with its activations observed or quantized.
    pub(super) fn forward_with(
        &self,
        weights: &Path,
        features: &Features,
        inputs: &Tensor,
        lengths: Option<&[u32]>,
        points: &ActivationPoints,
    ) -> Tensor {
        let mut built = models::build(&self.model, features).unwrap();
        if !matches!(points, ActivationPoints::None) {
            points::insert(&mut built.network, &features.input_shape(), points).unwrap();
        }
        let batch = inputs.dim(0).unwrap();
        let (network, context) = (built.network, TestContext::with_layout(built.layout, DType::F32, batch));
        let store = &context.store;
        load_views(weights, &store.layout.params, store.weight_views()).unwrap();
        load_views(weights, &store.layout.stats, store.stat_views()).unwrap();
        let mut pass = context.pass(Mode::Eval);
        pass.lengths = lengths;
        let ledger = Ledger::planning();
        let exec = Executor::new(Some(pass), test_spec(batch, DType::F32), &ledger);
        let inputs = inputs.to_device(&test_device()).unwrap();
        let logits = network.logits(&exec, Some(&inputs)).unwrap().unwrap().to_device(&Device::Cpu).unwrap();
        // As a session does.
        let values = || logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        match points {
            ActivationPoints::None | ActivationPoints::Inputs(_) => logits,
            ActivationPoints::Observe(observers) => {
                observers.add(network.loss.name(), &values()).unwrap();
                logits
            }
            ActivationPoints::Quantize(all) => {
                let rounded: Vec<f32> =
                    values().into_iter().map(|value| all[network.loss.name()].rounded(value)).collect();
                Tensor::from_vec(rounded, logits.shape(), &Device::Cpu).unwrap()
            }
        }
    }

    /// The ids that follow `prompt` at temperature 0, without the id `never`; and, for each, how much better it was
    /// than the second best, relative to the largest logit.
    pub(super) fn greedy(
        &self,
        weights: &Path,
        prompt: &[u32],
        tokens: usize,
        never: usize,
    ) -> Vec<(u32, f32)> {
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

    pub(super) fn original(&self) -> BTreeMap<String, Vec<f32>> {
        let built = models::build(&self.model, &self.features).unwrap();
        all_specs(&built.layout).map(|spec| (spec.name.clone(), random_values(spec))).collect()
    }
}
