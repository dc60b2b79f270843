//! Whole networks: what layers do for each other on a gradient's way changes no gradient.

use candle_core::{DType, Tensor};

use super::{Batch, Block, Network, Node, Residual, Walk};
use crate::kernels::Activation;
use crate::layers::aside::Aside;
use crate::layers::check::{Subject, assert_slopes, at, device, differences, flat, random};
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::linear::{Linear, Options};
use crate::layers::norm::Norm;
use crate::layers::{Layer, Mode};
use crate::memory::Ledger;
use crate::params::{Declared, Init};

const BATCH: usize = 3;
const LENGTH: usize = 5;
const WIDTH: usize = 16;
const CLASSES: usize = 13;

fn linear(d: &mut Declared, name: &str, inputs: usize, outputs: usize, act: Activation) -> Node {
    let options = Options { bias_init: Init::Normal(0.1), ..Options::torch(inputs, act) };
    Node::Layer(Box::new(Linear::new(d, name, &[LENGTH, inputs], outputs, options)))
}

/// `x + second(act(first(norm(x))))`.
fn residual(d: &mut Declared, name: &str, centred: bool, act: Activation) -> Node {
    let of = |part: &str| format!("{name}.{part}");
    let norm: Box<dyn Layer> = match centred {
        true => Box::new(Norm::layer(d, &of("norm"), &[LENGTH, WIDTH], 1e-5)),
        false => Box::new(Norm::rms(d, &of("norm"), &[LENGTH, WIDTH], 1e-6)),
    };
    let branch = vec![
        Node::Layer(norm),
        linear(d, &of("first"), WIDTH, 2 * WIDTH, act),
        linear(d, &of("second"), 2 * WIDTH, WIDTH, Activation::Identity),
    ];
    let (shortcut, output) = (Vec::new(), vec![LENGTH, WIDTH]);
    Node::Residual(Residual { name: name.into(), branch, shortcut, act: Activation::Identity, output })
}

/// Residual branches within and across blocks, after a map whose bias they may add to, and plain maps.
fn network(d: &mut Declared) -> Network {
    let weight = d.param("head.weight", [CLASSES, WIDTH], Init::Normal(0.3));
    let nodes = [
        vec![linear(d, "in", 7, WIDTH, Activation::Identity)],
        vec![
            residual(d, "a", true, Activation::GeluTanh),
            residual(d, "b", false, Activation::Silu),
            residual(d, "c", true, Activation::Relu),
        ],
        vec![residual(d, "d", true, Activation::Gelu)],
        vec![Node::Layer(Box::new(Norm::layer(d, "norm", &[LENGTH, WIDTH], 1e-5)))],
    ];
    let block = |(rank, nodes)| Block { name: format!("block {rank}"), nodes, rank };
    let loss = CrossEntropy {
        name: "head".into(),
        weight,
        tied: false,
        bias: None,
        positions: LENGTH,
        width: WIDTH,
        classes: CLASSES,
        smoothing: 0.0,
        class_weights: None,
    };
    Network { blocks: nodes.into_iter().enumerate().map(block).collect(), loss: Box::new(loss) }
}

fn batch(dtype: DType) -> Batch {
    let inputs = random(&[BATCH, LENGTH, 7], 1).to_dtype(dtype).unwrap();
    let targets: Vec<u32> = (0..BATCH * LENGTH).map(|i| (i * 5 % CLASSES) as u32).collect();
    Batch { inputs, targets: Tensor::from_vec(targets, (BATCH, LENGTH), &device()).unwrap() }
}

fn subject(dtype: DType) -> (Network, Subject) {
    let mut declared = Declared::default();
    let network = network(&mut declared);
    (network, Subject::new(declared, dtype, BATCH))
}

/// The gradients, and the peak of what the ledger was asked for.
fn learned(dtype: DType, recompute: usize, away: bool) -> (Vec<f64>, u64) {
    let ((network, subject), ledger) = (subject(dtype), Ledger::planning());
    let aside = away.then(|| Aside::new(Ledger::planning(), &device()).unwrap());
    let (pass, aside) = (Some(subject.pass(Mode::Train)), aside.as_ref());
    let walk = Walk { pass, at: at(BATCH, dtype), ledger: &ledger, recompute, aside };
    network.learn(&walk, Some(&batch(dtype))).unwrap();
    (flat(&subject.store.grads), ledger.peak())
}

#[test]
fn every_gradient_is_a_slope() {
    let (network, subject) = subject(DType::F64);
    let (batch, ledger) = (batch(DType::F64), Ledger::planning());
    let walk = |mode| Walk {
        pass: Some(subject.pass(mode)),
        at: at(BATCH, DType::F64),
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
        let (network, planned) = (subject(dtype).0, Ledger::planning());
        let walk = Walk { pass: None, at: at(BATCH, dtype), ledger: &planned, recompute, aside: None };
        network.learn(&walk, None).unwrap();
        assert_eq!(planned.peak(), learned(dtype, recompute, false).1);
    }
}
