//! Whole networks: what layers do for each other on a gradient's way changes no gradient.

use candle_core::{DType, Tensor};

use super::{Batch, Block, Network, Node, Residual, Walk};
use crate::kernels::Activation;
use crate::layers::aside::Aside;
use crate::layers::check::{Subject, assert_slopes, at, device, differences, distance, flat, random};
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::linear::{Linear, Options};
use crate::layers::norm::Norm;
use crate::layers::{Layer, Mode};
use crate::memory::Ledger;
use crate::params::{Declared, Init};

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    length: usize,
    width: usize,
    inner: usize,
}

const SMALL: Sizes = Sizes { batch: 3, length: 5, width: 16, inner: 32 };
/// So large that products on a card do more than multiply, and their halves do not.
const LARGE: Sizes = Sizes { batch: 34, length: 256, width: 768, inner: 1024 };
const CLASSES: usize = 13;

fn linear(d: &mut Declared, name: &str, [length, inputs, outputs]: [usize; 3], act: Activation) -> Node {
    let options = Options { bias_init: Init::Normal(0.1), ..Options::torch(inputs, act) };
    Node::Layer(Box::new(Linear::new(d, name, &[length, inputs], outputs, options)))
}

/// `x + second(act(first(norm(x))))`.
fn residual(d: &mut Declared, sizes: Sizes, name: &str, centred: bool, act: Activation) -> Node {
    let Sizes { length, width, inner, .. } = sizes;
    let of = |part: &str| format!("{name}.{part}");
    let norm: Box<dyn Layer> = match centred {
        true => Box::new(Norm::layer(d, &of("norm"), &[length, width], 1e-5)),
        false => Box::new(Norm::rms(d, &of("norm"), &[length, width], 1e-6)),
    };
    let branch = vec![
        Node::Layer(norm),
        linear(d, &of("first"), [length, width, inner], act),
        linear(d, &of("second"), [length, inner, width], Activation::Identity),
    ];
    let (shortcut, output) = (Vec::new(), vec![length, width]);
    Node::Residual(Residual { name: name.into(), branch, shortcut, act: Activation::Identity, output })
}

/// Residual branches within and across blocks, after a map whose bias they may add to, and plain maps.
fn network(d: &mut Declared, sizes: Sizes) -> Network {
    let Sizes { length, width, .. } = sizes;
    let weight = d.param("head.weight", [CLASSES, width], Init::Normal(0.3));
    let nodes = [
        vec![linear(d, "in", [length, 7, width], Activation::Identity)],
        vec![
            residual(d, sizes, "a", true, Activation::GeluTanh),
            residual(d, sizes, "b", false, Activation::Silu),
            residual(d, sizes, "c", true, Activation::Relu),
        ],
        vec![residual(d, sizes, "d", true, Activation::Gelu)],
        vec![Node::Layer(Box::new(Norm::layer(d, "norm", &[length, width], 1e-5)))],
    ];
    let block = |(rank, nodes)| Block { name: format!("block {rank}"), nodes, rank };
    let loss = CrossEntropy {
        name: "head".into(),
        weight,
        tied: false,
        bias: None,
        positions: length,
        width,
        classes: CLASSES,
        smoothing: 0.0,
        class_weights: None,
    };
    Network { blocks: nodes.into_iter().enumerate().map(block).collect(), loss: Box::new(loss) }
}

fn batch(dtype: DType, Sizes { batch, length, .. }: Sizes) -> Batch {
    let inputs = random(&[batch, length, 7], 1).to_dtype(dtype).unwrap();
    let targets: Vec<u32> = (0..batch * length).map(|i| (i * 5 % CLASSES) as u32).collect();
    Batch { inputs, targets: Tensor::from_vec(targets, (batch, length), &device()).unwrap(), staged: None }
}

fn subject(dtype: DType, sizes: Sizes) -> (Network, Subject) {
    let mut declared = Declared::default();
    let network = network(&mut declared, sizes);
    (network, Subject::new(declared, dtype, sizes.batch))
}

/// The gradients, and the peak of what the ledger was asked for.
fn learned(dtype: DType, recompute: usize, away: bool) -> (Vec<f64>, u64) {
    let ((network, subject), ledger) = (subject(dtype, SMALL), Ledger::planning());
    let aside = away.then(|| Aside::new(Ledger::planning(), &device()).unwrap());
    let (pass, aside) = (Some(subject.pass(Mode::Train)), aside.as_ref());
    let walk = Walk { pass, at: at(SMALL.batch, dtype), ledger: &ledger, recompute, aside };
    network.learn(&walk, Some(&batch(dtype, SMALL))).unwrap();
    (flat(&subject.store.grads), ledger.peak())
}

#[test]
fn every_gradient_is_a_slope() {
    let (network, subject) = subject(DType::F64, SMALL);
    let (batch, ledger) = (batch(DType::F64, SMALL), Ledger::planning());
    let walk = |mode| Walk {
        pass: Some(subject.pass(mode)),
        at: at(SMALL.batch, DType::F64),
        ledger: &ledger,
        recompute: 0,
        aside: None,
    };
    network.learn(&walk(Mode::Train), Some(&batch)).unwrap();
    let loss = || network.judge(&walk(Mode::Eval), Some(&batch)).unwrap().read().unwrap().loss;
    for (i, (weight, grad)) in subject.store.weights().iter().zip(subject.store.grad_views()).enumerate() {
        assert_slopes(&subject.store.layout.params.spec(i).name, grad, differences(weight, &loss));
    }
}

#[test]
fn blocks_that_run_again_or_wait_elsewhere_change_no_bit() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let kept = learned(dtype, 0, false).0;
        assert!(kept.iter().any(|g| *g != 0.0) && kept.iter().all(|g| g.is_finite()));
        for away in [false, true] {
            assert_eq!(learned(dtype, 4, away).0, kept, "{dtype:?}, away: {away}");
        }
    }
}

#[test]
fn the_plan_asks_for_what_the_pass_does() {
    for (dtype, recompute) in [(DType::F32, 0), (DType::BF16, 0), (DType::BF16, 4)] {
        let (network, planned) = (subject(dtype, SMALL).0, Ledger::planning());
        let walk = Walk { pass: None, at: at(SMALL.batch, dtype), ledger: &planned, recompute, aside: None };
        network.learn(&walk, None).unwrap();
        assert_eq!(planned.peak(), learned(dtype, recompute, false).1);
    }
}

/// The last bits of bf16 come out differently, and nothing else.
#[test]
fn large_products_and_their_halves_give_the_same_gradients() {
    if device().is_cpu() {
        println!("skipped: no card to compute on (TRAINER_TEST_DEVICE=cuda)");
        return;
    }
    let gradients = |parts: usize| -> Vec<(String, Vec<f64>)> {
        let ((network, subject), ledger) = (subject(DType::BF16, LARGE), Ledger::planning());
        let (all, each) = (batch(DType::BF16, LARGE), LARGE.batch / parts);
        for part in 0..parts {
            let of = |t: &Tensor| t.narrow(0, part * each, each).unwrap().contiguous().unwrap();
            let batch = Batch { inputs: of(&all.inputs), targets: of(&all.targets), staged: None };
            let (pass, at) = (Some(subject.pass(Mode::Train)), at(each, DType::BF16));
            let walk = Walk { pass, at, ledger: &ledger, recompute: 0, aside: None };
            network.learn(&walk, Some(&batch)).unwrap();
        }
        let name = |i: usize| subject.store.layout.params.spec(i).name.clone();
        subject.store.grad_views().iter().enumerate().map(|(i, grad)| (name(i), flat(grad))).collect()
    };
    for ((name, whole), (_, halves)) in gradients(1).into_iter().zip(gradients(2)) {
        let far = distance(&whole, &halves);
        assert!(far < 0.02, "{name}: {far}");
    }
}
