//! Neither the fusion pass nor the backend changes a gradient, whatever the model.

use candle_core::{DType, Tensor};

use super::{LossOptions, build_with};
use crate::base::Backend;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::graph::network::{DeviceBatch, Executor};
use crate::job::{INT8_KINDS, ModelConfig};
use crate::kernels::fake_quantize::move_range;
use crate::kernels::update::clear;
use crate::layers::Mode;
use crate::layers::gradcheck::{
    TestContext, is_reference_under_test, random_tensor, test_device, test_spec, to_f64_vec,
};
use crate::memory::Ledger;
use crate::params::{FlatLayout, ParamRules};

pub(super) const BATCH: usize = 4;
const CLASSES: usize = 5;

/// Every kind of model, small.
const MODELS: [(&str, Input); 11] = [
    ("kind = 'mlp'\nhidden = [24, 16]\nactivation = 'gelu'", Input::Vector),
    ("kind = 'mlp'\nhidden = [24, 16]\nactivation = 'relu'", Input::Vector),
    (
        "kind = 'cnn'\nstages = [{ channels = 8, norm = 'batch' }, { channels = 12 }]\nnorm_group = 2",
        Input::Image,
    ),
    ("kind = 'resnet'\ndepth = 18\nstem = 'small'\nnorm_group = 2", Input::Image),
    ("kind = 'resnet'\ndepth = 50\nnorm_group = 4", Input::Image),
    ("kind = 'mobilenet'\nwidth = 0.25\nstem = 'small'\nnorm_group = 2", Input::Image),
    ("kind = 'vit'\npatch = 4\nlayers = 2\nheads = 2\nwidth = 16", Input::Image),
    ("kind = 'gpt'\nlayers = 3\nheads = 2\nwidth = 16\ncontext = 6", Input::Tokens),
    ("kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 6\ndropout = 0.2", Input::Tokens),
    ("kind = 'llama'\nlayers = 2\nheads = 4\nkv_heads = 2\nwidth = 16\ncontext = 6", Input::Tokens),
    ("kind = 'bert'\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 6", Input::Text),
];

/// Layers in orders that no model has: what ends and starts a branch, chains of recomputed outputs, clamps after sums.
const LAYER_LISTS: [(&[&str], Input); 7] = [
    (&["linear 12", "silu", "residual: linear 9, gelu, linear 12", "linear 8", "tanh"], Input::Vector),
    (&["linear 12", "gelu", "linear 12", "gelu_tanh", "linear 12", "silu", "linear 12"], Input::Vector),
    (&["residual: linear 10, gelu", "residual: gelu, linear 10", "residual: linear 10"], Input::Vector),
    (
        &[
            "conv 6",
            "batch_norm",
            "batch_norm",
            "conv 6",
            "silu",
            "residual: conv 6, batch_norm",
            "global_pool",
        ],
        Input::Image,
    ),
    (&["conv 6", "residual relu: conv 6, relu", "batch_norm", "relu", "flatten", "linear 4"], Input::Image),
    (&["residual: batch_norm, conv 3", "residual relu: batch_norm", "batch_norm", "flatten"], Input::Image),
    (
        &["residual relu: conv 3, batch_norm, relu, conv 3, batch_norm", "batch_norm", "max_pool", "flatten"],
        Input::Image,
    ),
];

/// One layer of [`LAYER_LISTS`] as TOML.
fn layer(text: &str) -> String {
    if let Some((residual, layers)) = text.split_once(": ") {
        let layers: Vec<String> = layers.split(", ").map(layer).collect();
        let act =
            residual.split_once(' ').map_or(String::new(), |(_, act)| format!(", activation = '{act}'"));
        return format!("{{ kind = 'residual'{act}, layers = [{}] }}", layers.join(", "));
    }
    match text.split_once(' ') {
        Some(("linear", outputs)) => format!("{{ kind = 'linear', outputs = {outputs} }}"),
        Some((kind, channels)) => format!("{{ kind = '{kind}', channels = {channels}, padding = 1 }}"),
        None if text == "batch_norm" => "{ kind = 'batch_norm', group = 2 }".into(),
        None => format!("{{ kind = '{text}' }}"),
    }
}

/// Every model and list of layers.
pub(super) fn models() -> Vec<(String, Input)> {
    let list = |(layers, input): (&[&str], Input)| {
        let layers: Vec<String> = layers.iter().map(|text| layer(text)).collect();
        (format!("kind = 'layers'\nlayers = [{}]", layers.join(", ")), input)
    };
    let declared = MODELS.into_iter().map(|(text, input)| (text.to_owned(), input));
    declared.chain(LAYER_LISTS.into_iter().map(list)).collect()
}

#[derive(Clone, Copy)]
pub(super) enum Input {
    Vector,
    Image,
    Tokens,
    /// Tokens with one class per sample.
    Text,
}

impl Input {
    pub(super) fn features(self) -> Features {
        let names = (0..CLASSES).map(|class| class.to_string()).collect();
        let floats = |shape: &[usize]| InputSpec::Floats { shape: shape.into() };
        match self {
            Self::Vector => Features::new(floats(&[10]), TargetSpec::Class { names }),
            Self::Image => Features::new(floats(&[16, 16, 3]), TargetSpec::Class { names }),
            Self::Tokens => {
                Features::new(InputSpec::Tokens { length: 6, vocab: CLASSES }, TargetSpec::Tokens)
            }
            Self::Text => {
                Features::new(InputSpec::Tokens { length: 6, vocab: CLASSES }, TargetSpec::Class { names })
            }
        }
    }

    pub(super) fn batch(self, dtype: DType) -> DeviceBatch {
        let classes = |shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|i: usize| (i * 3 % CLASSES) as u32).collect();
            Tensor::from_vec::<_, u32>(values, shape, &test_device()).unwrap()
        };
        let floats = |shape: &[usize]| random_tensor(shape, 1).to_dtype(dtype).unwrap();
        let (inputs, targets) = match self {
            Self::Vector => (floats(&[BATCH, 10]), classes(&[BATCH])),
            Self::Image => (floats(&[BATCH, 16, 16, 3]), classes(&[BATCH])),
            Self::Tokens => (classes(&[BATCH, 6]), classes(&[BATCH, 6])),
            Self::Text => (classes(&[BATCH, 6]), classes(&[BATCH])),
        };
        DeviceBatch { inputs, targets, sample_info: None }
    }
}

/// How a network runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NetworkForm {
    Plain,
    Fused,
    Reference,
}

/// Loss, gradients and running statistics after a pass over the batch, and the planned bytes.
fn pass(text: &str, input: Input, dtype: DType, execution: NetworkForm) -> (PassOutcome, u64) {
    pass_with(text, input, dtype, execution, &ParamRules::default())
}

/// As [`pass`]. If values are rounded, by the ranges of a pass in floats before it.
fn pass_with(
    text: &str,
    input: Input,
    dtype: DType,
    execution: NetworkForm,
    rules: &ParamRules,
) -> (PassOutcome, u64) {
    let model: ModelConfig = toml::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let built = build_with(&model, &input.features(), &LossOptions::default(), rules);
    let built = built.unwrap_or_else(|error| panic!("{text}: {error}"));
    let mut spec = test_spec(BATCH, dtype);
    let network = match execution {
        NetworkForm::Plain => built.network,
        NetworkForm::Fused => built.network.fuse(spec),
        NetworkForm::Reference => {
            spec.backend = Backend::Reference { on_gpu: !test_device().is_cpu() };
            built.network.on_reference(&built.layout.params)
        }
    };
    let (subject, ledger) = (TestContext::with_layout(built.layout, dtype, BATCH), Ledger::planning());
    let pass = Some(subject.pass(Mode::Train));
    let exec = Executor::new(pass, spec, &ledger);
    let forward_backward =
        || network.forward_backward(&exec, Some(&input.batch(dtype))).unwrap().read().unwrap();
    let ranges = subject.store.layout.stats.in_declaration_order().zip(subject.store.stat_views());
    let ranges = ranges.filter(|((spec, _), _)| spec.is_activation_range()).map(|(_, range)| range);
    let ranges: Vec<&Tensor> = ranges.collect();
    if !ranges.is_empty() {
        forward_backward();
        ranges.iter().for_each(|range| move_range(range, Some(1.0)).unwrap());
        clear(&subject.store.grads).unwrap();
        subject.store.set_rounding(true);
        subject.store.sync_compute_weights().unwrap();
    }
    let sums = forward_backward();
    let named = |flat: &FlatLayout, values: &Tensor| {
        let values = to_f64_vec(values);
        flat.iter().map(|(spec, at)| (spec.name.clone(), values[at].to_vec())).collect()
    };
    let (layout, store) = (&subject.store.layout, &subject.store);
    let loss = vec![("loss".to_owned(), vec![sums.loss])];
    let outcome = [loss, named(&layout.params, &store.grads), named(&layout.stats, &store.stats)];
    (outcome, ledger.peak())
}

/// The loss, the gradients of the parameters, and the running statistics, by name.
type PassOutcome = [Vec<(String, Vec<f64>)>; 3];

/// The largest error of `a` against `b` and the name it has, relative to the largest value of its kind: where the true
/// gradient is zero, only rounding is left.
fn largest_error<'a>(a: &'a PassOutcome, b: &PassOutcome) -> (f64, &'a str) {
    let mut worst = (0.0, "");
    for (a, b) in a.iter().zip(b) {
        let largest = b.iter().flat_map(|(_, values)| values).fold(1e-9f64, |m, v| m.max(v.abs()));
        for ((name, a), (_, b)) in a.iter().zip(b) {
            let errors = a.iter().zip(b).map(|(a, b)| (a - b).abs() / largest);
            assert!(errors.clone().all(f64::is_finite), "{name} is not finite");
            let error = errors.fold(0.0, f64::max);
            worst = if error > worst.0 { (error, name.as_str()) } else { worst };
        }
    }
    worst
}

fn assert_equal(model: &str, a: &PassOutcome, b: &PassOutcome, tolerance: f64) {
    let (error, name) = largest_error(a, b);
    assert!(error <= tolerance, "{model} {name}: {error}, more than {tolerance}");
}

#[test]
fn kernels_compute_what_candle_computes() {
    if is_reference_under_test() {
        return; // No kernels are under test.
    }
    for (text, input) in &models() {
        // Of equal values, candle gives the gradient of the maximum to each, and our kernel to the first.
        if text.contains("'max_pool'") {
            continue;
        }
        // Batch norm over few samples amplifies rounding.
        for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 5e-3)] {
            let tolerance: f64 = if test_device().is_cpu() { tolerance } else { tolerance.max(2e-5) };
            let (kernels, _) = pass(text, *input, dtype, NetworkForm::Fused);
            let (candle, _) = pass(text, *input, dtype, NetworkForm::Reference);
            assert_equal(&format!("{text}\n{dtype:?}"), &kernels, &candle, tolerance);
        }
    }
}

#[test]
fn fusing_changes_no_gradient_and_saves_memory() {
    if is_reference_under_test() {
        return; // It fuses nothing.
    }
    for (text, input) in &models() {
        // A GPU sums in f32 whatever the dtype, and rounds what it recomputes to the dtype.
        for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 2e-4), (DType::BF16, 5e-2)] {
            let tolerance: f64 = if test_device().is_cpu() { tolerance } else { tolerance.max(2e-5) };
            let ((fused, fused_bytes), (plain, plain_bytes)) = (
                pass(text, *input, dtype, NetworkForm::Fused),
                pass(text, *input, dtype, NetworkForm::Plain),
            );
            // On a GPU, both round to bf16 at places of their own, which batch norm over few samples amplifies: the
            // fused one may be no further from the exact result.
            if dtype == DType::BF16 && !test_device().is_cpu() {
                let (exact, _) = pass(text, *input, DType::F64, NetworkForm::Plain);
                let tolerance = tolerance.max(1.5 * largest_error(&plain, &exact).0);
                assert_equal(&format!("{text}\n{dtype:?}"), &fused, &exact, tolerance);
            } else {
                assert_equal(&format!("{text}\n{dtype:?}"), &fused, &plain, tolerance);
            }
            assert!(fused_bytes <= plain_bytes, "{text}\n{dtype:?}: {fused_bytes} > {plain_bytes} bytes");
        }
    }
}

/// The straight-through gradients of a network whose values are rounded to 8 bits are those of candle's autograd, and
/// fusing changes none of them.
#[test]
fn rounded_networks_compute_what_candle_computes() {
    if is_reference_under_test() || !test_device().is_cpu() {
        return; // Other sums round to other neighbours.
    }
    let rules = ParamRules::default().quantized(true);
    let has_form = |text: &str| INT8_KINDS.iter().any(|kind| text.starts_with(&format!("kind = '{kind}'")));
    for (text, input) in MODELS.iter().filter(|(text, _)| has_form(text)) {
        // Of equal values, which rounding makes, candle gives the gradient of the maximum to each.
        let text = text.replace("channels", "pool = 1, channels").replace("50", "50\nstem = 'small'");
        let text = &text;
        let rounded = |execution| pass_with(text, *input, DType::F64, execution, &rules);
        let ((fused, fused_bytes), (plain, plain_bytes)) =
            (rounded(NetworkForm::Fused), rounded(NetworkForm::Plain));
        assert_equal(text, &fused, &plain, 1e-9);
        assert!(fused_bytes <= plain_bytes, "{text}: {fused_bytes} > {plain_bytes} bytes");
        assert_equal(text, &fused, &rounded(NetworkForm::Reference).0, 1e-6);
        let (floats, _) = pass(text, *input, DType::F64, NetworkForm::Fused);
        let loss = |outcome: &PassOutcome| outcome[0][0].1[0];
        let difference = (loss(&fused) - loss(&floats)).abs() / loss(&floats);
        // It adds up over the layers: a mobilenet with random weights and groups of two samples has half a hundred.
        assert!(difference > 1e-9 && difference < 1.0, "{text}: rounding changes the loss by {difference}");
    }
}
