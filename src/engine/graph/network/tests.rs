//! Whole networks: fusion between layers, recompute and offload change no gradient.

use candle_core::{DType, Tensor};

use super::{DeviceBatch, Executor, FeatureMatch, LayerBlock, Network, Node, ResidualNode, TeacherNetwork};
use crate::graph::offload::ActivationOffload;
use crate::kernels::Activation;
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::gradcheck::{
    TestContext, assert_gradient, finite_differences, int8_copy, random_tensor, relative_error, test_device,
    test_spec, to_f64_vec,
};
use crate::layers::linear::{Linear, LinearOptions};
use crate::layers::norm::NormLayer;
use crate::layers::{Layer, Mode, PassContext};
use crate::memory::Ledger;
use crate::params::{Int8Layout, ParamInit, ParamRegistry};

#[derive(Clone, Copy)]
struct TestSizes {
    batch: usize,
    length: usize,
    width: usize,
    inner: usize,
}

const SMALL: TestSizes = TestSizes { batch: 3, length: 5, width: 16, inner: 32 };
/// Large enough that the GPU GEMMs of the whole batch use fused epilogues, while those of half the batch do not.
const LARGE: TestSizes = TestSizes { batch: 34, length: 256, width: 768, inner: 1024 };
const CLASSES: usize = 13;

fn linear(d: &mut ParamRegistry, name: &str, [length, inputs, outputs]: [usize; 3], act: Activation) -> Node {
    let options =
        LinearOptions { bias_init: ParamInit::Normal(0.1), ..LinearOptions::torch_default(inputs, act) };
    Node::Layer(Box::new(Linear::new(d, name, &[length, inputs], outputs, options)))
}

/// `x + second(act(first(norm(x))))`.
fn residual(d: &mut ParamRegistry, sizes: TestSizes, name: &str, centred: bool, act: Activation) -> Node {
    let TestSizes { length, width, inner, .. } = sizes;
    let path = |part: &str| format!("{name}.{part}");
    let norm: Box<dyn Layer> = match centred {
        true => Box::new(NormLayer::layer_norm(d, &path("norm"), &[length, width], 1e-5)),
        false => Box::new(NormLayer::rms_norm(d, &path("norm"), &[length, width], 1e-6)),
    };
    let branch = vec![
        Node::Layer(norm),
        linear(d, &path("first"), [length, width, inner], act),
        linear(d, &path("second"), [length, inner, width], Activation::Identity),
    ];
    let (shortcut, output) = (Vec::new(), vec![length, width]);
    Node::Residual(ResidualNode {
        name: name.into(),
        branch,
        shortcut,
        act: Activation::Identity,
        output_shape: output,
    })
}

/// Residual branches within and across blocks, after a linear layer whose bias gradient they may fuse, and plain linear
/// layers.
fn network(d: &mut ParamRegistry, sizes: TestSizes) -> Network {
    let TestSizes { length, width, .. } = sizes;
    let weight = d.param("head.weight", [CLASSES, width], ParamInit::Normal(0.3));
    let nodes = [
        vec![linear(d, "in", [length, 7, width], Activation::Identity)],
        vec![
            residual(d, sizes, "a", true, Activation::GeluTanh),
            residual(d, sizes, "b", false, Activation::Silu),
            residual(d, sizes, "c", true, Activation::Relu),
        ],
        vec![residual(d, sizes, "d", true, Activation::Gelu)],
        vec![Node::Layer(Box::new(NormLayer::layer_norm(d, "norm", &[length, width], 1e-5)))],
    ];
    let block = |(rank, nodes)| LayerBlock { name: format!("block {rank}"), nodes, recompute_rank: rank };
    let loss = CrossEntropy {
        name: "head".into(),
        weight,
        bias: None,
        positions: length,
        width,
        classes: CLASSES,
        smoothing: 0.0,
        focal_gamma: 0.0,
        class_weights: None,
    };
    Network {
        blocks: nodes.into_iter().enumerate().map(block).collect(),
        loss: Box::new(loss),
        teacher: None,
        features: Vec::new(),
    }
}

fn batch(dtype: DType, TestSizes { batch, length, .. }: TestSizes) -> DeviceBatch {
    let inputs = random_tensor(&[batch, length, 7], 1).to_dtype(dtype).unwrap();
    let targets: Vec<u32> = (0..batch * length).map(|i| (i * 5 % CLASSES) as u32).collect();
    DeviceBatch {
        inputs,
        targets: Tensor::from_vec(targets, (batch, length), &test_device()).unwrap(),
        sample_info: None,
    }
}

fn subject(dtype: DType, sizes: TestSizes) -> (Network, TestContext) {
    let mut registry = ParamRegistry::default();
    let network = network(&mut registry, sizes).fuse(test_spec(1, dtype));
    (network, TestContext::new(registry, dtype, sizes.batch))
}

/// Returns the gradients and the ledger's peak.
fn gradients_and_peak(dtype: DType, recompute: usize, offload_inputs: bool) -> (Vec<f64>, u64) {
    let ((network, subject), ledger) = (subject(dtype, SMALL), Ledger::planning());
    let offload = offload_inputs.then(|| ActivationOffload::new(Ledger::planning(), &test_device()).unwrap());
    let (pass, offload) = (Some(subject.pass(Mode::Train)), offload.as_ref());
    let plain = Executor::new(pass, test_spec(SMALL.batch, dtype), &ledger);
    let exec = Executor { recompute_blocks: recompute, offload, ..plain };
    network.forward_backward(&exec, Some(&batch(dtype, SMALL))).unwrap();
    (to_f64_vec(&subject.store.grads), ledger.peak())
}

#[test]
fn gradients_match_finite_differences() {
    let (network, subject) = subject(DType::F64, SMALL);
    let (batch, ledger) = (batch(DType::F64, SMALL), Ledger::planning());
    let spec = test_spec(SMALL.batch, DType::F64);
    let exec = |mode| Executor::new(Some(subject.pass(mode)), spec, &ledger);
    network.forward_backward(&exec(Mode::Train), Some(&batch)).unwrap();
    let loss = || network.evaluate(&exec(Mode::Eval), Some(&batch), false).unwrap().0.read().unwrap().loss;
    for (i, (weight, grad)) in subject.store.weight_views().iter().zip(subject.store.grad_views()).enumerate()
    {
        assert_gradient(&subject.store.layout.params.spec(i).name, grad, finite_differences(weight, &loss));
    }
}

/// A student with features of a wider teacher, two of them of one block, and the weights of both.
struct Taught {
    network: Network,
    student: TestContext,
    teacher: TestContext,
}

impl Taught {
    fn new(dtype: DType, teacher_dtype: DType) -> Self {
        let (mut theirs, mut ours) = (ParamRegistry::default(), ParamRegistry::default());
        let width = SMALL.width + 8;
        let teacher = network(&mut theirs, TestSizes { width, ..SMALL }).fuse(test_spec(1, teacher_dtype));
        let mut network = network(&mut ours, SMALL);
        let (rows, inputs) = (SMALL.length, SMALL.width);
        for (i, (student, teacher)) in [(1, 1), (1, 2), (3, 0)].into_iter().enumerate() {
            let name = format!("distill.features.{i}");
            let map = ours.table(format!("{name}.weight"), [width, inputs], ParamInit::Normal(0.1));
            let (target_rows, weight) = (rows, 0.5 + i as f64);
            network.features.push(FeatureMatch {
                name,
                student,
                teacher,
                map,
                inputs,
                outputs: width,
                rows,
                target_rows,
                weight,
            });
        }
        let float_inputs = 7 * SMALL.length;
        let teacher = TeacherNetwork {
            network: teacher,
            dtype: teacher_dtype,
            int8: None,
            float_inputs,
            every_step: true,
        };
        network.teacher = Some(Box::new(teacher));
        let network = network.fuse(test_spec(1, dtype));
        let student = TestContext::new(ours, dtype, SMALL.batch);
        Self { network, student, teacher: TestContext::new(theirs, teacher_dtype, SMALL.batch) }
    }

    /// With weights of 8-bit integers in the teacher.
    fn with_int8_teacher(mut self) -> Self {
        self.teacher.store = int8_copy(&self.teacher.store);
        let int8 = Int8Layout::new(&self.teacher.store.layout.params);
        self.network.teacher.as_mut().unwrap().int8 = Some(int8);
        self
    }

    fn run(&self, dtype: DType, recompute_blocks: usize, ledger: &Ledger) -> f64 {
        let pass = PassContext { teacher: Some(&self.teacher.store), ..self.student.pass(Mode::Train) };
        let spec = test_spec(SMALL.batch, dtype);
        let exec = Executor { recompute_blocks, ..Executor::new(Some(pass), spec, ledger) };
        self.network.forward_backward(&exec, Some(&batch(dtype, SMALL))).unwrap().read().unwrap().loss
    }
}

#[test]
fn gradients_of_features_match_finite_differences() {
    let (taught, ledger) = (Taught::new(DType::F64, DType::F64), Ledger::planning());
    let loss = || taught.run(DType::F64, 0, &ledger);
    loss();
    let store = &taught.student.store;
    let grads: Vec<Tensor> = store.grad_views().iter().map(|grad| grad.copy().unwrap()).collect();
    // Before, in and after the blocks with features.
    let checked = ["distill.", "in.", "c.second.", "d.norm.", "norm."];
    for (i, (weight, grad)) in store.weight_views().iter().zip(&grads).enumerate() {
        let name = &store.layout.params.spec(i).name;
        if checked.iter().any(|start| name.starts_with(start)) {
            assert_gradient(name, grad, finite_differences(weight, &loss));
        }
    }
}

/// Recomputed blocks change no bit of it, and the plan has all of it, with a teacher of another type too.
#[test]
fn features_are_recomputed_and_planned() {
    for (dtype, teacher_dtype, int8) in [
        (DType::F32, DType::F32, false),
        (DType::F32, DType::BF16, false),
        (DType::BF16, DType::BF16, false),
        (DType::F32, DType::F32, true),
        (DType::BF16, DType::BF16, true),
    ] {
        let taught = || match Taught::new(dtype, teacher_dtype) {
            taught if int8 => taught.with_int8_teacher(),
            taught => taught,
        };
        let run = |recompute| {
            let (taught, ledger) = (taught(), Ledger::planning());
            let loss = taught.run(dtype, recompute, &ledger);
            (loss, to_f64_vec(&taught.student.store.grads), ledger.peak())
        };
        let (kept, recomputed) = (run(0), run(4));
        assert!(kept.1.iter().all(|g| g.is_finite()) && kept.0 > 0.0);
        assert_eq!((kept.0, &kept.1), (recomputed.0, &recomputed.1));
        for (recompute, peak) in [(0, kept.2), (4, recomputed.2)] {
            let (taught, ledger) = (taught(), Ledger::planning());
            let spec = test_spec(SMALL.batch, dtype);
            let exec = Executor { recompute_blocks: recompute, ..Executor::new(None, spec, &ledger) };
            taught.network.forward_backward(&exec, None).unwrap();
            assert_eq!(ledger.peak(), peak);
        }
    }
}

#[test]
fn recomputed_and_offloaded_blocks_are_bit_exact() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let kept = gradients_and_peak(dtype, 0, false).0;
        assert!(kept.iter().any(|g| *g != 0.0) && kept.iter().all(|g| g.is_finite()));
        for offload_inputs in [false, true] {
            assert_eq!(
                gradients_and_peak(dtype, 4, offload_inputs).0,
                kept,
                "{dtype:?}, offload: {offload_inputs}"
            );
        }
    }
}

#[test]
fn plan_reserves_what_the_pass_reserves() {
    for (dtype, recompute) in [(DType::F32, 0), (DType::BF16, 0), (DType::BF16, 4)] {
        let (network, planned) = (subject(dtype, SMALL).0, Ledger::planning());
        let plain = Executor::new(None, test_spec(SMALL.batch, dtype), &planned);
        let exec = Executor { recompute_blocks: recompute, ..plain };
        network.forward_backward(&exec, None).unwrap();
        assert_eq!(planned.peak(), gradients_and_peak(dtype, recompute, false).1);
    }
}

/// Only the last bits of bf16 differ.
#[test]
fn gradients_of_large_gemms_match_their_halves() {
    if test_device().is_cpu() {
        println!("skipped: needs a GPU (TRAINER_TEST_DEVICE=cuda)");
        return;
    }
    let gradients = |parts: usize| -> Vec<(String, Vec<f64>)> {
        let ((network, subject), ledger) = (subject(DType::BF16, LARGE), Ledger::planning());
        let (all, each) = (batch(DType::BF16, LARGE), LARGE.batch / parts);
        for part in 0..parts {
            let of = |t: &Tensor| t.narrow(0, part * each, each).unwrap().contiguous().unwrap();
            let batch = DeviceBatch { inputs: of(&all.inputs), targets: of(&all.targets), sample_info: None };
            let (pass, at) = (Some(subject.pass(Mode::Train)), test_spec(each, DType::BF16));
            let exec = Executor::new(pass, at, &ledger);
            network.forward_backward(&exec, Some(&batch)).unwrap();
        }
        let name = |i: usize| subject.store.layout.params.spec(i).name.clone();
        subject.store.grad_views().iter().enumerate().map(|(i, grad)| (name(i), to_f64_vec(grad))).collect()
    };
    for ((name, whole), (_, halves)) in gradients(1).into_iter().zip(gradients(2)) {
        let error = relative_error(&whole, &halves);
        assert!(error < 0.02, "{name}: {error}");
    }
}
