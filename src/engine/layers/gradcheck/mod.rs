//! The checks that every layer must pass: gradients against central differences in f64 and against candle's autograd on
//! the kernel's reference, and `cost` against the memory that the passes hold. They apply to the CPU kernels,
//! with `TRAINER_TEST_DEVICE=cuda` to the CUDA kernels, and with `TRAINER_TEST_BACKEND=reference` to the reference
//! backend.

mod cost;

use candle_core::{DType, Device, Tensor, Var};

pub use self::cost::check_cost;
use super::loss::{Loss, PendingMetricSums};
use super::reference::ReferenceLayer;
use super::{Layer, Mode, PassContext};
use crate::base::random::{RngKey, stream_id};
use crate::base::{Backend, HOPPER, MicroBatchSpec};
use crate::kernels::reference::ReferenceScope;
use crate::kernels::update::cast_into;
use crate::kernels::{host, int8_weight};
use crate::param_store::ParamStore;
use crate::params::{ParamLayout, ParamRegistry, ParamRules};

/// Whether `TRAINER_TEST_BACKEND` is `reference`; the kernels of the device are tested otherwise.
pub fn is_reference_under_test() -> bool {
    std::env::var("TRAINER_TEST_BACKEND").is_ok_and(|backend| backend == "reference")
}

/// Set in the process that runs the tests of layers one by one, so that the allocator counts for one layer alone.
const MEASURE_COSTS: &str = "TRAINER_TEST_MEASURE_COSTS";

/// Whether this process runs the tests of layers for their costs alone.
fn measures_costs_only() -> bool {
    std::env::var_os(MEASURE_COSTS).is_some()
}

/// A layer on the backend under test. Its passes run within the scope.
fn on_test_backend(layer: Box<dyn Layer>, registry: &ParamRegistry) -> (Box<dyn Layer>, ReferenceScope) {
    let reference = is_reference_under_test();
    let on_reference = |layer| {
        let layout = registry.clone().into_layout().unwrap();
        Box::new(ReferenceLayer::new(layer, &layout.params))
    };
    let layer = if reference { on_reference(layer) } else { layer };
    (layer, ReferenceScope::enter(reference))
}

/// The device under test: the CPU, or the first GPU if `TRAINER_TEST_DEVICE` is `cuda`.
pub fn test_device() -> Device {
    #[cfg(feature = "cuda")]
    if std::env::var("TRAINER_TEST_DEVICE").is_ok_and(|device| device == "cuda") {
        static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        let open = || {
            let device = Device::new_cuda_with_stream(0).unwrap();
            if let Device::Cuda(gpu) = &device {
                // SAFETY: all tests use the single stream of this device, so stream order alone orders every use of a
                // tensor.
                unsafe { gpu.disable_event_tracking() };
            }
            device
        };
        return GPU.get_or_init(open).clone();
    }
    Device::Cpu
}

/// Values in [-1, 1) away from 0, where clamp activations have a kink.
pub fn random_tensor(shape: &[usize], key: u64) -> Tensor {
    // A prime, so that the rows of a large tensor differ: drawing them all would take most of a test's time.
    const DRAWN: usize = 65_521;
    let r = RngKey::new(key, stream_id("check"));
    let len = shape.iter().product::<usize>();
    let drawn = (0..len.min(DRAWN)).map(|i| {
        let v = 2.0 * r.f64(i as u64) - 1.0;
        v + 0.02f64.copysign(v)
    });
    let mut values = drawn.collect::<Vec<f64>>().repeat(len.div_ceil(DRAWN));
    values.truncate(len);
    Tensor::from_vec(values, shape, &test_device()).unwrap()
}

pub fn test_spec(batch: usize, dtype: DType) -> MicroBatchSpec {
    let backend = match test_device() {
        device if is_reference_under_test() => Backend::Reference { on_gpu: !device.is_cpu() },
        Device::Cpu => Backend::Cpu { threads: crate::kernels::cpu::threads() },
        _ => Backend::Cuda { capability: HOPPER },
    };
    MicroBatchSpec { batch, dtype, backend }
}

/// Parameters drawn at random for a layer or a loss (zeros and ones would hide errors).
pub struct TestContext {
    pub store: ParamStore,
    pub sample_ids: Vec<u64>,
}

impl TestContext {
    pub fn new(registry: ParamRegistry, dtype: DType, batch: usize) -> Self {
        Self::with_layout(registry.into_layout().unwrap(), dtype, batch)
    }

    pub fn with_layout(layout: ParamLayout, dtype: DType, batch: usize) -> Self {
        let layout = ParamLayout { params: layout.params.with_trained_at_zero(), ..layout };
        let store = ParamStore::new(layout, 7, dtype, &test_device()).unwrap();
        if store.layout.params.trained_len > 0 {
            let noise = random_tensor(&[store.layout.params.len], 11).affine(0.5, 0.1).unwrap();
            let trained = noise.narrow(0, 0, store.layout.params.trained_len).unwrap();
            cast_into(&trained, &store.master_weights).unwrap();
            store.sync_compute_weights().unwrap();
        }
        Self { store, sample_ids: (0..batch as u64).map(|i| i * 31 + 5).collect() }
    }

    pub fn pass(&self, mode: Mode) -> PassContext<'_> {
        PassContext { seed: 3, epoch: 2, ..PassContext::new(&self.store, mode, &self.sample_ids) }
    }
}

/// The same parameters with weights of 8-bit integers.
pub fn int8_copy(store: &ParamStore) -> ParamStore {
    let (dtype, device) = (store.compute_weights.dtype(), store.compute_weights.device());
    let copy = ParamStore::for_int8_inference(store.layout.clone(), dtype, device).unwrap();
    cast_into(&store.stats, &copy.stats).unwrap();
    for ((from, to), int8) in store.weight_views().iter().zip(copy.weight_views()).zip(copy.all_int8_scales())
    {
        let (from, to) = (from.flatten_all().unwrap(), to.flatten_all().unwrap());
        let Some(int8) = int8 else {
            cast_into(&from, &to).unwrap();
            continue;
        };
        let values: Vec<f32> = to_f64_vec(&from).into_iter().map(|value| value as f32).collect();
        let mut scales = vec![0.0; int8.grid.num_scales()];
        int8_weight::raise_largest(int8.grid, 0, &values, &mut scales);
        scales.iter_mut().for_each(|scale| *scale = int8_weight::scale(*scale));
        host::write(&int8.scales, |into: &mut [f32]| into.copy_from_slice(&scales)).unwrap();
        host::write(&to, |into: &mut [u8]| int8_weight::quantize(int8.grid, 0, &values, &scales, into))
            .unwrap();
    }
    copy
}

pub fn to_f64_vec(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 {
        return Vec::new(); // CUDA refuses zero-byte copies
    }
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference relative to the largest value.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale
}

/// A variable of the oracle: candle's autograd in f64 on the CPU, wherever the kernels under test run.
pub fn leaf(t: &Tensor) -> Var {
    Var::from_tensor(&t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()).unwrap()
}

/// Adds `delta` to one value of a contiguous buffer.
fn perturb(buffer: &Tensor, index: usize, delta: f64) {
    let mut values = to_f64_vec(buffer);
    values[index] += delta;
    let moved = Tensor::from_vec(values, buffer.elem_count(), buffer.device()).unwrap();
    cast_into(&moved, &buffer.flatten_all().unwrap()).unwrap();
}

/// Up to 24 indices, spread over the buffer.
fn probe_indices(len: usize) -> Vec<usize> {
    let n = len.min(24);
    (0..n).map(|i| i * len / n + (i * 7) % (len / n)).collect()
}

/// Partial derivatives of `f` with respect to some values of a buffer, by central differences.
pub fn finite_differences(buffer: &Tensor, f: &dyn Fn() -> f64) -> Vec<(usize, f64)> {
    const H: f64 = 1e-5;
    let slope = |i: usize| {
        perturb(buffer, i, H);
        let up = f();
        perturb(buffer, i, -2.0 * H);
        let down = f();
        perturb(buffer, i, H);
        (i, (up - down) / (2.0 * H))
    };
    probe_indices(buffer.elem_count()).into_iter().map(slope).collect()
}

/// Compares a gradient with such partial derivatives.
pub fn assert_gradient(what: &str, gradient: &Tensor, expected: Vec<(usize, f64)>) {
    let gradient = to_f64_vec(gradient);
    let scale = gradient.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (i, slope) in expected {
        assert!(
            (gradient[i] - slope).abs() <= 2e-6 * scale,
            "{what}: gradient {i} is {} and the difference quotient {slope} (largest {scale})",
            gradient[i]
        );
    }
}

/// Checks the gradients of every parameter, and of the input if it is f64, against finite differences in f64.
pub fn check_finite_differences(build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>, x: &Tensor) {
    if measures_costs_only() {
        return;
    }
    let mut registry = ParamRegistry::default();
    let layer = build(&mut registry);
    let (layer, _scope) = on_test_backend(layer, &registry);
    let subject = TestContext::new(registry, DType::F64, x.dim(0).unwrap());
    let pass = subject.pass(Mode::Train);
    let (y, saved) = layer.forward(x, &pass).unwrap();
    let expected: Vec<usize> = [&[x.dim(0).unwrap()], layer.output_shape().as_slice()].concat();
    assert_eq!(y.dims(), expected, "{}: `output_shape` is wrong", layer.name());
    let dy = random_tensor(y.dims(), 13);
    let differentiable = x.dtype() == DType::F64;
    let dx = layer.backward(saved, dy.copy().unwrap(), &pass, differentiable).unwrap();
    // `Recompute`: repeated forward passes must not update the running statistics.
    let recompute = subject.pass(Mode::Recompute);
    let value = || {
        to_f64_vec(&layer.forward(x, &recompute).unwrap().0)
            .iter()
            .zip(to_f64_vec(&dy))
            .map(|(y, d)| y * d)
            .sum::<f64>()
    };
    if subject.store.master_weights.elem_count() > 0 {
        assert_gradient(
            "parameters",
            &subject.store.grads,
            finite_differences(&subject.store.master_weights, &value),
        );
    }
    if let Some(dx) = dx.filter(|_| differentiable) {
        assert_gradient("input", &dx, finite_differences(x, &value));
    }
}

/// Checks the optimized kernels in f32 against candle's autograd on the reference: output, input gradient and parameter
/// gradients. `reference` takes the input and the parameters in declaration order.
pub fn check_against_autograd(
    build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>,
    x: &Tensor,
    reference: &dyn Fn(&Tensor, &[Tensor]) -> candle_core::Result<Tensor>,
) {
    if measures_costs_only() {
        return;
    }
    let mut registry = ParamRegistry::default();
    let layer = build(&mut registry);
    let (layer, _scope) = on_test_backend(layer, &registry);
    let subject = TestContext::new(registry, DType::F32, x.dim(0).unwrap());
    let pass = subject.pass(Mode::Train);
    let differentiable = x.dtype() == DType::F64;
    let x = if differentiable { x.to_dtype(DType::F32).unwrap() } else { x.clone() };
    let (y, saved) = layer.forward(&x, &pass).unwrap();
    let dy = random_tensor(y.dims(), 17).to_dtype(DType::F32).unwrap();
    let dx = layer.backward(saved, dy.copy().unwrap(), &pass, differentiable).unwrap();

    let params: Vec<Var> = subject.store.weight_views().iter().map(leaf).collect();
    let input = differentiable.then(|| leaf(&x));
    let views: Vec<Tensor> = params.iter().map(|v| v.as_tensor().clone()).collect();
    let reference_input =
        input.as_ref().map_or_else(|| x.to_device(&Device::Cpu).unwrap(), |v| v.as_tensor().clone());
    let expected = reference(&reference_input, &views).unwrap();
    assert!(relative_error(&to_f64_vec(&y), &to_f64_vec(&expected)) < 1e-5, "{}: output", layer.name());
    let grads = (&expected * leaf(&dy).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    if let Some(input) = &input {
        assert!(
            relative_error(&to_f64_vec(&dx.unwrap()), &to_f64_vec(grads.get(input).unwrap())) < 2e-5,
            "{}: input gradient",
            layer.name()
        );
    }
    for (i, (ours, var)) in subject.store.grad_views().iter().zip(&params).enumerate() {
        let name = &subject.store.layout.params.spec(i).name;
        // A gradient may be a sum of terms of size 1 that cancel: it keeps their absolute rounding error, so the
        // relative error is scaled down for gradients below 0.1.
        let expected = to_f64_vec(grads.get(var).unwrap());
        let cancelled = expected.iter().fold(0f64, |m, v| m.max(v.abs())) / 0.1;
        let error = relative_error(&to_f64_vec(ours), &expected) * cancelled.min(1.0);
        assert!(error < 2e-5, "{name}: parameter gradient");
    }
}

/// A registry in which the parameters that match one of these patterns are frozen.
pub fn frozen_registry(patterns: &[&str]) -> ParamRegistry {
    let train: crate::job::TrainConfig =
        toml::from_str(&format!("epochs = 1\nfreeze = {patterns:?}")).unwrap();
    ParamRegistry::with_rules(ParamRules::new(&train))
}

/// Checks the gradients of a loss against finite differences in f64.
pub fn check_loss_finite_differences(
    build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Loss>,
    x: &Tensor,
    targets: &Tensor,
) {
    if measures_costs_only() {
        return;
    }
    let mut registry = ParamRegistry::default();
    let loss = build(&mut registry);
    let _scope = ReferenceScope::enter(is_reference_under_test());
    let subject = TestContext::new(registry, DType::F64, x.dim(0).unwrap());
    let pass = PassContext { loss_scale: 0.37, ..subject.pass(Mode::Train) };
    let (metrics, dx) = loss.forward_backward(x, targets, &pass, true).unwrap();
    let read = |pending: PendingMetricSums| pending.read().unwrap();
    let evaluate = || read(loss.evaluate(x, targets, &pass).unwrap());
    assert_eq!(read(metrics), evaluate(), "learning and judging count the same");
    let value = || 0.37 * evaluate().loss;
    assert_gradient("input", &dx.unwrap(), finite_differences(x, &value));
    if subject.store.master_weights.elem_count() > 0 {
        assert_gradient(
            "parameters",
            &subject.store.grads,
            finite_differences(&subject.store.master_weights, &value),
        );
    }
}

/// Maximum error of bf16 against f64, relative to the largest value: five roundings to its eight bits.
const BF16_TOLERANCE: f64 = 2e-2;

/// A context whose weights are representable in bf16, hence identical to the bit in every type.
fn bf16_exact_context(registry: ParamRegistry, dtype: DType, batch: usize) -> TestContext {
    let subject = TestContext::new(registry, dtype, batch);
    if subject.store.layout.params.len > 0 {
        cast_into(&round_to_bf16(&subject.store.master_weights, DType::F64), &subject.store.master_weights)
            .unwrap();
        subject.store.sync_compute_weights().unwrap();
    }
    subject
}

/// Rounds to the nearest bf16 values, returned as `dtype`.
fn round_to_bf16(t: &Tensor, dtype: DType) -> Tensor {
    let narrow = t.to_dtype(DType::F32).unwrap().to_dtype(DType::BF16).unwrap();
    narrow.to_dtype(dtype).unwrap()
}

fn assert_within_bf16_tolerance(what: &str, narrow: Vec<(String, Vec<f64>)>, wide: Vec<(String, Vec<f64>)>) {
    for ((name, narrow), (_, wide)) in narrow.iter().zip(&wide) {
        let error = relative_error(narrow, wide);
        assert!(error < BF16_TOLERANCE, "{what}: {name} in bf16 is {error} from f64");
    }
}

fn gradients(subject: &TestContext) -> impl Iterator<Item = (String, Vec<f64>)> + '_ {
    let name = |i: usize| subject.store.layout.params.spec(i).name.clone();
    subject.store.grad_views().into_iter().enumerate().map(move |(i, grad)| (name(i), to_f64_vec(grad)))
}

/// Checks a layer in bf16 against itself in f64, with equal weights and inputs: output and all gradients.
pub fn check_bf16(build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>, x: &Tensor) {
    // Candle multiplies no matrices in bf16 on the CPU.
    if measures_costs_only() || is_reference_under_test() {
        return;
    }
    let run = |dtype: DType| {
        let mut registry = ParamRegistry::default();
        let layer = build(&mut registry);
        let (layer, _scope) = on_test_backend(layer, &registry);
        let subject = bf16_exact_context(registry, dtype, x.dim(0).unwrap());
        let pass = subject.pass(Mode::Train);
        let differentiable = x.dtype() == DType::F64;
        let x = if differentiable { round_to_bf16(x, dtype) } else { x.clone() };
        let (y, saved) = layer.forward(&x, &pass).unwrap();
        let dy = round_to_bf16(&random_tensor(y.dims(), 19), dtype);
        let dx = layer.backward(saved, dy, &pass, differentiable).unwrap();
        let mut results = vec![("output".to_string(), to_f64_vec(&y))];
        results.extend(dx.map(|dx| ("input gradient".into(), to_f64_vec(&dx))));
        results.extend(gradients(&subject));
        results
    };
    assert_within_bf16_tolerance("layer", run(DType::BF16), run(DType::F64));
}

/// Checks a loss in bf16 against itself in f64, with equal weights and inputs: its value and all gradients.
pub fn check_loss_bf16(build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Loss>, x: &Tensor, targets: &Tensor) {
    // Candle multiplies no matrices in bf16 on the CPU.
    if measures_costs_only() || is_reference_under_test() {
        return;
    }
    let run = |dtype: DType| {
        let mut registry = ParamRegistry::default();
        let loss = build(&mut registry);
        let _scope = ReferenceScope::enter(is_reference_under_test());
        let subject = bf16_exact_context(registry, dtype, x.dim(0).unwrap());
        let (x, pass) = (round_to_bf16(x, dtype), subject.pass(Mode::Train));
        let (metrics, dx) = loss.forward_backward(&x, targets, &pass, true).unwrap();
        let mut results = vec![
            ("loss".to_string(), vec![metrics.read().unwrap().loss]),
            ("input gradient".into(), to_f64_vec(&dx.unwrap())),
        ];
        results.extend(gradients(&subject));
        results
    };
    assert_within_bf16_tolerance("loss", run(DType::BF16), run(DType::F64));
}

/// `cost` against the allocator: runs the tests of all layers again, one by one, in a process of their own.
#[test]
fn costs_are_what_the_allocator_counts() {
    use crate::kernels::dispatch::{Dispatch, dispatch};

    if is_reference_under_test() || test_device().is_cuda() || dispatch() == Dispatch::Portable {
        // Not comparable here: the buffers of candle have only a bound, and GPU memory is checked by the random jobs.
        // The portable kernels allocate what those of AVX2 do, and take three times as long.
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args(["layers::", "--test-threads=1", "--nocapture", "--skip=costs_are_what"]);
    let done = child.env(MEASURE_COSTS, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}\n{}", String::from_utf8_lossy(&done.stderr));
    assert!(said.matches("cost ").count() > 100, "too few layers were measured:\n{said}");
}
