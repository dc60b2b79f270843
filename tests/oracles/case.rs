//! A model with its weights, its batch and PyTorch's results for them.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use trainer::base::features::{Features, InputSpec, TargetSpec};
use trainer::base::{Backend, MicroBatchSpec};
use trainer::graph::network::{DeviceBatch, Executor};
use trainer::graph::offload::ActivationOffload;
use trainer::job::ModelConfig;
use trainer::kernels::cpu;
use trainer::kernels::update::{AdamWKernel, UpdateArgs, cast_into, clear};
use trainer::layers::{Mode, PassContext};
use trainer::memory::Ledger;
use trainer::models::{BuiltModel, build};
use trainer::param_store::ParamStore;
use trainer::params::{MemoryFormat, TensorSpec};

/// What `make.py` wrote.
#[derive(serde::Deserialize)]
struct Oracle {
    #[serde(default = "rate")]
    lr: f64,
    losses: Vec<f64>,
    grads: BTreeMap<String, GradSample>,
    /// Running statistics after the last step.
    #[serde(default)]
    stats: BTreeMap<String, RunningStat>,
}

fn rate() -> f64 {
    1e-3
}

#[derive(serde::Deserialize)]
struct RunningStat {
    norm: f64,
    first: f64,
}

#[derive(serde::Deserialize)]
struct GradSample {
    norm: f64,
    /// Indices of three values, in the shape other tools use.
    at: Vec<usize>,
    values: Vec<f64>,
}

/// Bound on gradients that are 0 up to rounding, as a fraction of all: a key's bias shifts all attention logits of a
/// row alike, and batch norm subtracts a shift before it again.
const ROUNDING: f64 = 1e-6;

pub struct OracleCase {
    name: &'static str,
    model: ModelConfig,
    features: Features,
    batch: DeviceBatch,
    /// Tokens per sample that are not padding, if some are padding.
    lengths: Option<Vec<u32>>,
    /// Compared in f64, as PyTorch computed it, and a hundred times as strictly.
    double: bool,
}

/// A model that predicts the next token.
pub fn language_model(
    name: &'static str,
    model: ModelConfig,
    batch: usize,
    length: usize,
    vocab: usize,
) -> OracleCase {
    let all = uniform_integers("tokens", vocab, batch * (length + 1));
    let part = |from: usize| {
        let rows = all.chunks(length + 1).flat_map(|row| row[from..from + length].to_vec());
        Tensor::from_vec(rows.collect::<Vec<u32>>(), (batch, length), &Device::Cpu).unwrap()
    };
    let features = Features::new(InputSpec::Tokens { length, vocab }, TargetSpec::Tokens);
    OracleCase::new(name, model, features, part(0), part(1))
}

/// A classifier of texts of many lengths.
pub fn text_classifier(
    name: &'static str,
    model: ModelConfig,
    (batch, length, vocab): (usize, usize, usize),
    classes: usize,
) -> OracleCase {
    let inputs =
        Tensor::from_vec(uniform_integers("tokens", vocab, batch * length), (batch, length), &Device::Cpu)
            .unwrap();
    let features = Features::new(InputSpec::Tokens { length, vocab }, named(classes));
    let lengths = uniform_integers("lengths", length, batch).iter().map(|n| n + 1).collect();
    OracleCase {
        lengths: Some(lengths),
        ..OracleCase::new(name, model, features, inputs, targets(batch, classes))
    }
}

/// A classifier of images (height, width, channels).
pub fn image_classifier(
    name: &'static str,
    model: ModelConfig,
    batch: usize,
    shape: [usize; 3],
    classes: usize,
) -> OracleCase {
    let [h, w, c] = shape;
    let pixels = bits("pictures", batch * h * w * c).map(|b| uniform(b) as f32).collect::<Vec<f32>>();
    let inputs = Tensor::from_vec(pixels, (batch, h, w, c), &Device::Cpu).unwrap();
    let features = Features::new(InputSpec::Floats { shape: shape.to_vec() }, named(classes));
    OracleCase::new(name, model, features, inputs, targets(batch, classes))
}

fn named(classes: usize) -> TargetSpec {
    TargetSpec::Class { names: (0..classes).map(|c| c.to_string()).collect() }
}

fn targets(batch: usize, classes: usize) -> Tensor {
    Tensor::from_vec(uniform_integers("classes", classes, batch), batch, &Device::Cpu).unwrap()
}

impl OracleCase {
    fn new(
        name: &'static str,
        model: ModelConfig,
        features: Features,
        inputs: Tensor,
        targets: Tensor,
    ) -> Self {
        let (batch, lengths) = (DeviceBatch { inputs, targets, sample_info: None }, None);
        Self { name, model, features, batch, lengths, double: false }
    }

    /// For networks with batch norm: many layers amplify the last digit of f32 to a hundredth, and Adam follows what
    /// rounding leaves of a gradient that is 0.
    pub fn in_double(self) -> Self {
        Self { double: true, ..self }
    }

    fn dtype(&self) -> DType {
        if self.double { DType::F64 } else { DType::F32 }
    }

    fn strictness(&self) -> f64 {
        if self.double { 1e-2 } else { 1.0 }
    }

    /// The model with its initial weights, computing in `dtype`.
    fn network(&self, dtype: DType) -> TestNetwork<'_> {
        let mut built = build(&self.model, &self.features).unwrap();
        let backend = Backend::Cpu { threads: cpu::threads() };
        built.network = built.network.fuse(MicroBatchSpec { batch: 1, dtype, backend });
        let store = ParamStore::new(built.layout.clone(), 0, dtype, &Device::Cpu).unwrap();
        let network = TestNetwork { case: self, built, store, dtype };
        network.reset();
        network
    }

    /// Losses and gradients equal PyTorch's, for every split of the batch (given by sizes) and any number of
    /// recomputed blocks; nearly equal in narrow dtypes, if these are wide enough for the model.
    pub fn check_against_pytorch(&self, splits: &[&[usize]]) {
        let path = format!("{}/tests/oracles/{}.json", env!("CARGO_MANIFEST_DIR"), self.name);
        let oracle: Oracle = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let network = self.network(self.dtype());
        network.check_logits_match_eval_loss();
        let whole = network.check_gradients(splits);
        network.compare(&whole, &oracle);
        network.train(&oracle);
        network.compare_stats(&oracle);
        if self.double {
            return;
        }
        for (dtype, near) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
            let network = self.network(dtype);
            network.forward_backward(0, self.rows(), 0);
            let far = relative_l2_distance(&network.gradients(), &whole);
            assert!(far < near, "{}: in {dtype:?} the gradient is {far} away", self.name);
        }
    }

    /// The gradient of the batch is the sum over its micro-batches, and the running statistics agree.
    pub fn check_splits(&self, splits: &[&[usize]]) {
        self.network(self.dtype()).check_gradients(splits);
    }

    fn rows(&self) -> usize {
        self.batch.inputs.dim(0).unwrap()
    }

    /// Targets in the whole batch; the loss is the mean over them.
    fn targets(&self) -> f64 {
        self.batch.targets.elem_count() as f64
    }
}

struct TestNetwork<'a> {
    case: &'a OracleCase,
    built: BuiltModel,
    store: ParamStore,
    dtype: DType,
}

impl TestNetwork<'_> {
    /// Sets the initial weights and clears gradients and statistics.
    fn reset(&self) {
        let mut weights = vec![0f64; self.store.layout.params.len];
        for (spec, range) in self.store.layout.params.iter() {
            let values = &mut weights[range];
            let spread = (3.0 * spec.shape[0] as f64 / spec.len() as f64).sqrt();
            let shift = if spec.name.ends_with("weight") { 1.0 } else { 0.0 };
            for (i, b) in bits(&spec.name, spec.len()).enumerate() {
                // Rounds as `make.py` does: once to f32, and once after each operation.
                let v = uniform(b) as f32;
                let v = if spec.shape.len() < 2 { v * 0.1 + shift } else { v * spread as f32 };
                values[storage_index(spec, i)] = v as f64;
            }
        }
        let mut stats = vec![0f64; self.store.layout.stats.len];
        for (spec, range) in self.store.layout.stats.iter() {
            stats[range].fill(if spec.name.ends_with("var") { 1.0 } else { 0.0 });
        }
        let set = |to: &Tensor, from: Vec<f64>| {
            cast_into(&Tensor::new(from, &Device::Cpu).unwrap(), to).unwrap();
        };
        set(&self.store.master_weights, weights);
        set(&self.store.stats, stats);
        if self.store.compute_weights.dtype() != self.store.master_weights.dtype() {
            cast_into(&self.store.master_weights, &self.store.compute_weights).unwrap();
        }
        clear(&self.store.grads).unwrap();
    }

    /// A micro-batch of rows of the batch, in the form the network takes.
    fn micro_batch(&self, from: usize, rows: usize) -> DeviceBatch {
        let part = |t: &Tensor| t.narrow(0, from, rows).unwrap();
        let batch = DeviceBatch {
            inputs: part(&self.case.batch.inputs),
            targets: part(&self.case.batch.targets),
            sample_info: None,
        };
        match batch.inputs.dtype() {
            DType::F32 => DeviceBatch { inputs: batch.inputs.to_dtype(self.dtype).unwrap(), ..batch },
            _ => batch,
        }
    }

    fn walk<'a>(&'a self, ids: &'a [u64], mode: Mode, ledger: &'a Ledger, recompute: usize) -> Executor<'a> {
        let (from, rows) = (ids[0] as usize, ids.len());
        let pass = PassContext {
            store: &self.store,
            mode,
            seed: 0,
            epoch: 0,
            sample_ids: ids,
            lengths: self.case.lengths.as_ref().map(|l| &l[from..from + rows]),
            sample_info: None,
            loss_scale: 1.0 / self.case.targets(),
            copies: None,
            cache: None,
            teacher: None,
            teacher_logits: None,
        };
        let at = MicroBatchSpec {
            batch: rows,
            dtype: self.dtype,
            backend: Backend::Cpu { threads: cpu::threads() },
        };
        Executor { recompute_blocks: recompute, ..Executor::new(Some(pass), at, ledger) }
    }

    /// Accumulates the gradients of rows of the batch. Returns their summed loss and the peak of the ledger.
    fn forward_backward(&self, from: usize, rows: usize, recompute: usize) -> (f64, u64) {
        self.forward_backward_offloading(from, rows, recompute, None)
    }

    /// As [`Self::forward_backward`]; may offload the inputs of blocks, which reserves host memory.
    fn forward_backward_offloading(
        &self,
        from: usize,
        rows: usize,
        recompute: usize,
        aside: Option<&ActivationOffload>,
    ) -> (f64, u64) {
        let ids: Vec<u64> = (from..from + rows).map(|i| i as u64).collect();
        let (ledger, planned) = (Ledger::new(u64::MAX, None), Ledger::planning());
        let walk = Executor { offload: aside, ..self.walk(&ids, Mode::Train, &ledger, recompute) };
        let loss = self
            .built
            .network
            .forward_backward(&walk, Some(&self.micro_batch(from, rows)))
            .unwrap()
            .read()
            .unwrap()
            .loss;
        let plain = Executor::new(None, walk.spec, &planned);
        let plan = Executor { recompute_blocks: recompute, offload: aside, ..plain };
        self.built.network.forward_backward(&plan, None).unwrap();
        assert_eq!(
            (ledger.peak(), ledger.reserved()),
            (planned.peak(), 0),
            "{}: the plan is the walk",
            self.case.name
        );
        (loss, ledger.peak())
    }

    /// The cross-entropy of materialized logits equals the evaluation loss, which never materializes them.
    fn check_logits_match_eval_loss(&self) {
        let (rows, ledger) = (self.case.rows(), Ledger::new(u64::MAX, None));
        let ids: Vec<u64> = (0..rows as u64).collect();
        let (walk, batch) = (self.walk(&ids, Mode::Eval, &ledger, 0), self.micro_batch(0, rows));
        let logits = self.built.network.logits(&walk, Some(&batch.inputs)).unwrap().unwrap();
        let classes = logits.dims()[logits.rank() - 1];
        assert_eq!(logits.elem_count(), batch.targets.elem_count() * classes, "{}", self.case.name);
        let targets = batch.targets.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let negative_log_likelihood = |(row, target): (&[f64], &u32)| {
            row.iter().map(|v| v.exp()).sum::<f64>().ln() - row[*target as usize]
        };
        let loss: f64 = flat(&logits.flatten_all().unwrap())
            .chunks(classes)
            .zip(&targets)
            .map(negative_log_likelihood)
            .sum();
        let eval_loss =
            self.built.network.evaluate(&walk, Some(&batch), false).unwrap().0.read().unwrap().loss;
        assert!((loss - eval_loss).abs() < 1e-5 * eval_loss, "{}: {loss} and {eval_loss}", self.case.name);
        assert_eq!(ledger.reserved(), 0, "{}", self.case.name);
    }

    fn gradients(&self) -> Vec<f64> {
        flat(&self.store.grads)
    }

    /// The gradient of the whole batch, checked to be the same however it is computed.
    fn check_gradients(&self, splits: &[&[usize]]) -> Vec<f64> {
        let (name, rows) = (self.case.name, self.case.rows());
        let (_, peak) = self.forward_backward(0, rows, 0);
        let (whole, stats) = (self.gradients(), flat(&self.store.stats));
        let blocks = self.built.network.blocks.len();
        let mut lowest = u64::MAX;
        for recompute in [1, blocks / 2, blocks] {
            self.reset();
            lowest = lowest.min(self.forward_backward(0, rows, recompute).1);
            assert_eq!(self.gradients(), whole, "{name}: {recompute} blocks run forward twice");
            assert_eq!(flat(&self.store.stats), stats, "{name}: statistics move once");
        }
        self.reset();
        let host = Ledger::new(u64::MAX, None);
        let offloaded_peak = self
            .forward_backward_offloading(
                0,
                rows,
                blocks,
                Some(&ActivationOffload::accounting_only(host.clone())),
            )
            .1;
        assert_eq!(self.gradients(), whole, "{name}: with offloaded block inputs");
        assert_eq!((host.peak() > 0, host.reserved()), (blocks > 1, 0), "{name}: host memory");
        assert!(
            blocks < 8 || offloaded_peak <= lowest,
            "{name}: offloading takes {offloaded_peak} bytes, not {lowest}"
        );
        // In a network of few blocks one may dominate, and recomputing holds it twice: its gradients, and its
        // activations.
        assert!(blocks < 8 || lowest < peak, "{name}: recomputing takes {lowest} bytes instead of {peak}");
        for split in splits {
            self.reset();
            let mut from = 0;
            for rows in *split {
                self.forward_backward(from, *rows, 0);
                from += rows;
            }
            assert_eq!(from, rows, "a split of the whole batch");
            let far = relative_max_difference(&self.gradients(), &whole)
                .max(relative_max_difference(&flat(&self.store.stats), &stats));
            // Smaller GEMMs take other kernels than larger ones, and AMX computes f32 GEMMs from bf16 parts.
            // ResNet-18, whose batch norms propagate each difference, is 1.8e-5 away with AMX and below 1e-5 without.
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
                let ours = found[storage_index(spec, *at)];
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
        let decayed = self.store.layout.params.groups[0].decayed_len;
        let common = UpdateArgs {
            lr: oracle.lr,
            grad_scale: 1.0,
            device_grad_scale: None,
            weight_decay: 0.1,
            decayed_len: decayed,
        };
        for (step, wanted) in oracle.losses.iter().enumerate() {
            let loss = self.forward_backward(0, self.case.rows(), 0).0 / self.case.targets();
            assert!(
                (loss - wanted).abs() <= 1e-4 * self.case.strictness() * wanted,
                "{}: loss {step} is {loss} and should be {wanted}",
                self.case.name
            );
            let adam = AdamWKernel { beta1: 0.9, beta2: 0.95, eps: 1e-8, step: step as u64 + 1 };
            adam.apply(&common, &self.store.master_weights, &self.store.grads, (&m, &v), None).unwrap();
        }
    }
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Largest difference relative to the largest value.
fn relative_max_difference(a: &[f64], b: &[f64]) -> f64 {
    let scale = b.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale
}

/// L2 norm of the difference relative to that of `b`.
fn relative_l2_distance(a: &[f64], b: &[f64]) -> f64 {
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Storage index of value `i` of the shape other tools use.
fn storage_index(spec: &TensorSpec, i: usize) -> usize {
    match (spec.memory_format, spec.shape.as_slice()) {
        (MemoryFormat::ChannelsLast, &[_, c, h, w]) => {
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

fn uniform_integers(name: &str, below: usize, n: usize) -> Vec<u32> {
    bits(name, n).map(|b| (b % below as u64) as u32).collect()
}
