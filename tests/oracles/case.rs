//! A model with its weights, its batch and what PyTorch made of them.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use trainer::features::{Features, Input, Target};
use trainer::job::Model;
use trainer::kernels::cpu;
use trainer::kernels::update::{AdamW, Common, clear, round_into};
use trainer::layers::aside::Aside;
use trainer::layers::network::{Batch, Walk};
use trainer::layers::{Along, At, Mode, On, Pass};
use trainer::memory::Ledger;
use trainer::models::{Built, build};
use trainer::params::{Lies, Spec, Store};

/// What `make.py` wrote.
#[derive(serde::Deserialize)]
struct Oracle {
    #[serde(default = "rate")]
    lr: f64,
    losses: Vec<f64>,
    grads: BTreeMap<String, Grad>,
    /// Running statistics after the last step.
    #[serde(default)]
    stats: BTreeMap<String, Stat>,
}

fn rate() -> f64 {
    1e-3
}

#[derive(serde::Deserialize)]
struct Stat {
    norm: f64,
    first: f64,
}

#[derive(serde::Deserialize)]
struct Grad {
    norm: f64,
    /// Places of three values, in the shape other tools know.
    at: Vec<usize>,
    values: Vec<f64>,
}

/// What gradients that are 0 but for rounding may be, as a share of all: a key's bias moves all scores of
/// a row alike, a shift before a batch norm is taken off again.
const ROUNDING: f64 = 1e-6;

pub struct Case {
    name: &'static str,
    model: Model,
    features: Features,
    batch: Batch,
    /// Tokens of each sample that are not padding, where not all are.
    lengths: Option<Vec<u32>>,
    /// Compared in f64, as PyTorch was asked for it, and a hundred times as strictly.
    wide: bool,
}

/// A model that learns the next token.
pub fn language(name: &'static str, model: Model, batch: usize, length: usize, vocab: usize) -> Case {
    let all = numbers("tokens", vocab, batch * (length + 1));
    let part = |from: usize| {
        let rows = all.chunks(length + 1).flat_map(|row| row[from..from + length].to_vec());
        Tensor::from_vec(rows.collect::<Vec<u32>>(), (batch, length), &Device::Cpu).unwrap()
    };
    let features = Features::new(Input::Tokens { length, vocab }, Target::Tokens);
    Case::new(name, model, features, part(0), part(1))
}

/// A model that tells texts of many lengths apart.
pub fn texts(
    name: &'static str,
    model: Model,
    (batch, length, vocab): (usize, usize, usize),
    classes: usize,
) -> Case {
    let inputs =
        Tensor::from_vec(numbers("tokens", vocab, batch * length), (batch, length), &Device::Cpu).unwrap();
    let features = Features::new(Input::Tokens { length, vocab }, named(classes));
    let lengths = numbers("lengths", length, batch).iter().map(|n| n + 1).collect();
    Case { lengths: Some(lengths), ..Case::new(name, model, features, inputs, targets(batch, classes)) }
}

/// A model that tells pictures (height, width, channels) apart.
pub fn pictures(name: &'static str, model: Model, batch: usize, shape: [usize; 3], classes: usize) -> Case {
    let [h, w, c] = shape;
    let pixels = bits("pictures", batch * h * w * c).map(|b| uniform(b) as f32).collect::<Vec<f32>>();
    let inputs = Tensor::from_vec(pixels, (batch, h, w, c), &Device::Cpu).unwrap();
    let features = Features::new(Input::Floats { shape: shape.to_vec() }, named(classes));
    Case::new(name, model, features, inputs, targets(batch, classes))
}

fn named(classes: usize) -> Target {
    Target::Class { names: (0..classes).map(|c| c.to_string()).collect() }
}

fn targets(batch: usize, classes: usize) -> Tensor {
    Tensor::from_vec(numbers("classes", classes, batch), batch, &Device::Cpu).unwrap()
}

impl Case {
    fn new(name: &'static str, model: Model, features: Features, inputs: Tensor, targets: Tensor) -> Self {
        let (batch, lengths) = (Batch { inputs, targets, staged: None }, None);
        Self { name, model, features, batch, lengths, wide: false }
    }

    /// For networks of batch norms: many magnify the last digit of f32 to a hundredth, and Adam follows
    /// what rounding leaves of a gradient that is 0.
    pub fn wide(self) -> Self {
        Self { wide: true, ..self }
    }

    fn dtype(&self) -> DType {
        if self.wide { DType::F64 } else { DType::F32 }
    }

    fn strictness(&self) -> f64 {
        if self.wide { 1e-2 } else { 1.0 }
    }

    /// The model with its first weights, computing in a type.
    fn network(&self, dtype: DType) -> Network<'_> {
        let built = build(&self.model, &self.features).unwrap();
        let store = Store::new(built.layout.clone(), 0, dtype, &Device::Cpu).unwrap();
        let network = Network { case: self, built, store, dtype };
        network.reset();
        network
    }

    /// Losses and gradients as PyTorch has them, the same for every split of the batch (whose sizes are
    /// given) and however many blocks are recomputed; nearly the same in the narrow types, where these are
    /// wide enough for the model.
    pub fn proven(&self, splits: &[&[usize]]) {
        let path = format!("{}/tests/oracles/{}.json", env!("CARGO_MANIFEST_DIR"), self.name);
        let oracle: Oracle = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let network = self.network(self.dtype());
        network.scores_are_what_is_judged();
        let whole = network.learns(splits);
        network.compare(&whole, &oracle);
        network.train(&oracle);
        network.compare_stats(&oracle);
        if self.wide {
            return;
        }
        for (dtype, near) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
            let network = self.network(dtype);
            network.learn(0, self.rows(), 0);
            let far = apart(&network.gradients(), &whole);
            assert!(far < near, "{}: in {dtype:?} the gradient is {far} away", self.name);
        }
    }

    /// The gradient of the batch is the sum over its parts, and the statistics end alike.
    pub fn same_in_parts(&self, splits: &[&[usize]]) {
        self.network(self.dtype()).learns(splits);
    }

    fn rows(&self) -> usize {
        self.batch.inputs.dim(0).unwrap()
    }

    /// Targets of the whole batch, over which the loss is a mean.
    fn targets(&self) -> f64 {
        self.batch.targets.elem_count() as f64
    }
}

struct Network<'a> {
    case: &'a Case,
    built: Built,
    store: Store,
    dtype: DType,
}

impl Network<'_> {
    /// The first weights, no gradients, no statistics.
    fn reset(&self) {
        let mut weights = vec![0f64; self.store.layout.params.len];
        for (spec, range) in self.store.layout.params.iter() {
            let values = &mut weights[range];
            let spread = (3.0 * spec.shape[0] as f64 / spec.len() as f64).sqrt();
            let shift = if spec.name.ends_with("weight") { 1.0 } else { 0.0 };
            for (i, b) in bits(&spec.name, spec.len()).enumerate() {
                // Rounded as `make.py` rounds: once to f32, and once after each operation.
                let v = uniform(b) as f32;
                let v = if spec.shape.len() < 2 { v * 0.1 + shift } else { v * spread as f32 };
                values[stored(spec, i)] = v as f64;
            }
        }
        let mut stats = vec![0f64; self.store.layout.stats.len];
        for (spec, range) in self.store.layout.stats.iter() {
            stats[range].fill(if spec.name.ends_with("var") { 1.0 } else { 0.0 });
        }
        let set = |to: &Tensor, from: Vec<f64>| {
            round_into(&Tensor::new(from, &Device::Cpu).unwrap(), to).unwrap();
        };
        set(&self.store.master, weights);
        set(&self.store.stats, stats);
        if self.store.compute.dtype() != self.store.master.dtype() {
            round_into(&self.store.master, &self.store.compute).unwrap();
        }
        clear(&self.store.grads).unwrap();
    }

    /// A micro-batch of rows of the batch, as the network takes it.
    fn part(&self, from: usize, rows: usize) -> Batch {
        let part = |t: &Tensor| t.narrow(0, from, rows).unwrap();
        let batch = Batch {
            inputs: part(&self.case.batch.inputs),
            targets: part(&self.case.batch.targets),
            staged: None,
        };
        match batch.inputs.dtype() {
            DType::F32 => Batch { inputs: batch.inputs.to_dtype(self.dtype).unwrap(), ..batch },
            _ => batch,
        }
    }

    fn walk<'a>(&'a self, ids: &'a [u64], mode: Mode, ledger: &'a Ledger, recompute: usize) -> Walk<'a> {
        let (from, rows) = (ids[0] as usize, ids.len());
        let pass = Pass {
            store: &self.store,
            mode,
            seed: 0,
            epoch: 0,
            ids,
            lengths: self.case.lengths.as_ref().map(|l| &l[from..from + rows]),
            staged: None,
            scale: 1.0 / self.case.targets(),
            along: Along::default(),
        };
        let at = At { batch: rows, dtype: self.dtype, on: On::Cpu { threads: cpu::threads() } };
        Walk { pass: Some(pass), at, ledger, recompute, aside: None }
    }

    /// Adds the gradients of rows of the batch; gives their summed loss, and what the ledger says it took.
    fn learn(&self, from: usize, rows: usize, recompute: usize) -> (f64, u64) {
        self.learn_with(from, rows, recompute, None)
    }

    /// As [`Self::learn`]; inputs of blocks may wait elsewhere, which the host is asked for.
    fn learn_with(&self, from: usize, rows: usize, recompute: usize, aside: Option<&Aside>) -> (f64, u64) {
        let ids: Vec<u64> = (from..from + rows).map(|i| i as u64).collect();
        let (ledger, planned) = (Ledger::new(u64::MAX, None), Ledger::planning());
        let walk = Walk { aside, ..self.walk(&ids, Mode::Train, &ledger, recompute) };
        let loss =
            self.built.network.learn(&walk, Some(&self.part(from, rows))).unwrap().read().unwrap().loss;
        let plan = Walk { pass: None, at: walk.at, ledger: &planned, recompute, aside };
        self.built.network.learn(&plan, None).unwrap();
        assert_eq!(
            (ledger.peak(), ledger.held()),
            (planned.peak(), 0),
            "{}: the plan is the walk",
            self.case.name
        );
        (loss, ledger.peak())
    }

    /// The cross-entropy of the scores, made whole, is the loss that is judged without.
    fn scores_are_what_is_judged(&self) {
        let (rows, ledger) = (self.case.rows(), Ledger::new(u64::MAX, None));
        let ids: Vec<u64> = (0..rows as u64).collect();
        let (walk, batch) = (self.walk(&ids, Mode::Eval, &ledger, 0), self.part(0, rows));
        let scores = self.built.network.scores(&walk, &batch.inputs).unwrap();
        let classes = scores.dims()[scores.rank() - 1];
        assert_eq!(scores.elem_count(), batch.targets.elem_count() * classes, "{}", self.case.name);
        let targets = batch.targets.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let surprise = |(row, target): (&[f64], &u32)| {
            row.iter().map(|v| v.exp()).sum::<f64>().ln() - row[*target as usize]
        };
        let loss: f64 =
            flat(&scores.flatten_all().unwrap()).chunks(classes).zip(&targets).map(surprise).sum();
        let judged = self.built.network.judge(&walk, Some(&batch)).unwrap().read().unwrap().loss;
        assert!((loss - judged).abs() < 1e-5 * judged, "{}: {loss} and {judged}", self.case.name);
        assert_eq!(ledger.held(), 0, "{}", self.case.name);
    }

    fn gradients(&self) -> Vec<f64> {
        flat(&self.store.grads)
    }

    /// The gradient of the whole batch, however it is made.
    fn learns(&self, splits: &[&[usize]]) -> Vec<f64> {
        let (name, rows) = (self.case.name, self.case.rows());
        let (_, peak) = self.learn(0, rows, 0);
        let (whole, stats) = (self.gradients(), flat(&self.store.stats));
        let blocks = self.built.network.blocks.len();
        let mut lowest = u64::MAX;
        for recompute in [1, blocks / 2, blocks] {
            self.reset();
            lowest = lowest.min(self.learn(0, rows, recompute).1);
            assert_eq!(self.gradients(), whole, "{name}: {recompute} blocks run forward twice");
            assert_eq!(flat(&self.store.stats), stats, "{name}: statistics move once");
        }
        self.reset();
        let host = Ledger::new(u64::MAX, None);
        let near = self.learn_with(0, rows, blocks, Some(&Aside::planned(host.clone()))).1;
        assert_eq!(self.gradients(), whole, "{name}: inputs of blocks wait on the host");
        assert_eq!((host.peak() > 0, host.held()), (blocks > 1, 0), "{name}: the host is asked");
        assert!(blocks < 8 || near <= lowest, "{name}: away they take {near} bytes instead of {lowest}");
        // A network of a few blocks may be mostly one, which then is held twice: its gradient, and it again.
        assert!(blocks < 8 || lowest < peak, "{name}: recomputing takes {lowest} bytes instead of {peak}");
        for split in splits {
            self.reset();
            let mut from = 0;
            for rows in *split {
                self.learn(from, *rows, 0);
                from += rows;
            }
            assert_eq!(from, rows, "a split of the whole batch");
            let far = distance(&self.gradients(), &whole).max(distance(&flat(&self.store.stats), &stats));
            // Smaller products take other kernels than larger ones, and AMX makes those of f32 from parts in bf16: ResNet-18,
            // whose batch norms carry each difference on, is 1.8e-5 away with it and below 1e-5 without.
            assert!(far < 4e-5 * self.case.strictness(), "{name}: split {split:?} is {far} away");
        }
        self.reset();
        whole
    }

    fn compare_stats(&self, oracle: &Oracle) {
        let (name, stats) = (self.case.name, flat(&self.store.stats));
        assert_eq!(self.store.layout.stats.iter().count(), oracle.stats.len(), "{name}: statistics");
        for (spec, range) in self.store.layout.stats.iter() {
            let (ours, wanted) = (&stats[range], &oracle.stats[&spec.name]);
            let norm = ours.iter().map(|v| v * v).sum::<f64>().sqrt();
            let near = |a: f64, b: f64| (a - b).abs() <= (1e-3 * wanted.norm + 1e-7) * self.case.strictness();
            assert!(
                near(norm, wanted.norm) && near(ours[0], wanted.first),
                "{name}: `{}` is {norm} long and begins with {}, and should be {} and {}",
                spec.name,
                ours[0],
                wanted.norm,
                wanted.first
            );
        }
    }

    fn compare(&self, gradients: &[f64], oracle: &Oracle) {
        let all = oracle.grads.values().map(|g| g.norm * g.norm).sum::<f64>().sqrt();
        let strictness = self.case.strictness();
        let (near, rounding) = (1e-3 * strictness, ROUNDING * strictness * all);
        let mut names: Vec<&str> = oracle.grads.keys().map(String::as_str).collect();
        for (spec, range) in self.store.layout.params.iter() {
            let Some(wanted) = oracle.grads.get(&spec.name) else {
                panic!("{}: PyTorch knows no `{}`, but {names:?}", self.case.name, spec.name)
            };
            names.retain(|name| *name != spec.name);
            let found = &gradients[range];
            let norm = found.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert!(
                (norm - wanted.norm).abs() <= near * wanted.norm + rounding,
                "{}: the gradient of `{}` is {norm} long and should be {}",
                self.case.name,
                spec.name,
                wanted.norm
            );
            let usual = wanted.norm / (found.len() as f64).sqrt();
            for (at, value) in wanted.at.iter().zip(&wanted.values) {
                let ours = found[stored(spec, *at)];
                assert!(
                    (ours - value).abs() <= near * value.abs().max(usual) + rounding,
                    "{}: gradient {at} of `{}` is {ours} and should be {value}",
                    self.case.name,
                    spec.name
                );
            }
        }
        assert!(names.is_empty(), "{}: PyTorch has parameters we have not: {names:?}", self.case.name);
    }

    fn train(&self, oracle: &Oracle) {
        let zeros = || self.store.grads.zeros_like().unwrap();
        let (m, v) = (zeros(), zeros());
        let decayed = self.store.layout.params.decayed;
        let common = Common { lr: oracle.lr, grad_scale: 1.0, judged: None, weight_decay: 0.1, decayed };
        for (step, wanted) in oracle.losses.iter().enumerate() {
            let loss = self.learn(0, self.case.rows(), 0).0 / self.case.targets();
            assert!(
                (loss - wanted).abs() <= 1e-4 * self.case.strictness() * wanted,
                "{}: loss {step} is {loss} and should be {wanted}",
                self.case.name
            );
            let adam = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, step: step as u64 + 1 };
            adam.apply(&common, &self.store.master, &self.store.grads, (&m, &v), None).unwrap();
        }
    }
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Largest difference relative to the largest value.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let scale = b.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale
}

/// The length of the difference relative to that of `b`.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Where value `i` of the shape other tools know lies in ours.
fn stored(spec: &Spec, i: usize) -> usize {
    match (spec.lies, spec.shape.as_slice()) {
        (Lies::ChannelsLast, &[_, c, h, w]) => {
            let (out, inner) = (i / (c * h * w), i % (c * h * w));
            let (channel, pixel) = (inner / (h * w), inner % (h * w));
            (out * h * w + pixel) * c + channel
        }
        _ => i,
    }
}

/// As in `make.py`.
fn bits(name: &str, n: usize) -> impl Iterator<Item = u64> {
    let start = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |h, byte| (h ^ byte as u64).wrapping_mul(0x100_0000_01B3));
    (0..n as u64).map(move |i| {
        let x = start.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}

fn uniform(bits: u64) -> f64 {
    (bits >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

fn numbers(name: &str, below: usize, n: usize) -> Vec<u32> {
    bits(name, n).map(|b| (b % below as u64) as u32).collect()
}
