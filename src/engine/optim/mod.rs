//! Optimizers: updates over the flat parameter buffers, the learning rate schedule, and pruning.

pub mod grad_scaler;
pub mod offload;
pub mod prune;
pub mod schedule;

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use crate::base::Backend;
use crate::job::{AdafactorConfig, OptimizerConfig as Rule};
use crate::kernels::adafactor::{self, AdafactorKernel};
use crate::kernels::adamw8bit;
use crate::kernels::lion::LionKernel;
use crate::kernels::update::{AdamWKernel, SgdKernel, UpdateArgs};
use crate::param_store::ParamStore;
use crate::params::{FlatLayout, ParamGroup};

/// An optimizer rule and its state: named flat buffers.
pub struct Optimizer {
    pub rule: Rule,
    state: Vec<(&'static str, Tensor)>,
    /// The pinned memory behind the buffers, if the state is offloaded from a GPU.
    offloaded: Option<offload::OffloadedState>,
}

/// Inputs of one update.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerStep<'a> {
    pub lr: f64,
    /// Factor applied to the gradients first.
    pub grad_scale: f64,
    /// The same factor in GPU memory, used instead if present; see [`reads_device_grad_scale`].
    pub device_grad_scale: Option<&'a Tensor>,
    /// Updates so far, this one included.
    pub step_count: u64,
}

/// A state buffer: name, dtype (f32 stands for the master dtype) and length.
type StateBuffer = (&'static str, DType, usize);

fn state_buffers(rule: &Rule, params: &FlatLayout) -> Vec<StateBuffer> {
    let (n, master_dtype) = (params.trained_len, DType::F32);
    match rule {
        Rule::Adamw(_) => vec![("m", master_dtype, n), ("v", master_dtype, n)],
        Rule::Sgd(sgd) if sgd.momentum > 0.0 => vec![("momentum", master_dtype, n)],
        Rule::Sgd(_) => Vec::new(),
        Rule::Lion(_) => vec![("momentum", master_dtype, n)],
        Rule::Adafactor(_) => vec![("factors", master_dtype, adafactor::state_len(params))],
        Rule::Adamw8bit(_) => {
            let scales = params.groups.iter().map(|group| adamw8bit::blocks(group.range.len())).sum();
            let byte = DType::U8;
            vec![
                ("m", byte, n),
                ("v", byte, n),
                ("m_scale", master_dtype, scales),
                ("v_scale", master_dtype, scales),
            ]
        }
    }
}

/// Whether a rule can read the gradient factor from GPU memory, so that the host need not synchronize for it.
pub fn reads_device_grad_scale(rule: &Rule) -> bool {
    matches!(rule, Rule::Adamw(_) | Rule::Sgd(_) | Rule::Lion(_))
}

/// Bytes of a rule's state for these parameters.
pub fn state_bytes(rule: &Rule, params: &FlatLayout) -> u64 {
    state_buffers(rule, params).iter().map(|(_, dtype, len)| (dtype.size_in_bytes() * len) as u64).sum()
}

/// Temporaries of an update in candle's operations, at most, in copies of the parameters.
const REFERENCE_COPIES: u64 = 10;

/// Bytes of temporaries during an update.
pub fn workspace_bytes(rule: &Rule, params: &FlatLayout, backend: Backend) -> u64 {
    match (rule, backend) {
        (_, Backend::Reference { .. }) => REFERENCE_COPIES * 4 * params.trained_len as u64,
        (Rule::Adafactor(_), Backend::Cpu { .. }) => 4 * adafactor::workspace_len(params) as u64,
        (Rule::Adafactor(_), Backend::Cuda { .. }) => adafactor::cuda_workspace(params, DType::F32),
        _ => 0,
    }
}

/// Device bytes of the staging buffers for a rule's offloaded state.
pub fn staging_bytes(rule: &Rule, params: &FlatLayout) -> u64 {
    if offload::is_supported(rule) {
        offload::staging_bytes(state_bytes(rule, params), params.trained_len)
    } else {
        0
    }
}

impl Optimizer {
    /// `offload_state`: keeps the state in host memory, if the rule supports it and the weights are on a GPU.
    pub fn new(rule: &Rule, store: &ParamStore, offload_state: bool) -> Result<Self> {
        let (buffers, master) = (state_buffers(rule, &store.layout.params), &store.master_weights);
        if let (true, Some(device)) =
            (offload_state && offload::is_supported(rule), crate::kernels::cuda::device_of(master))
        {
            let len = store.layout.params.trained_len;
            let offloaded = offload::OffloadedState::new(device, master.dtype(), buffers.len(), len)?;
            let state = buffers.iter().map(|(name, ..)| *name).zip(offloaded.host_tensors()).collect();
            return Ok(Self { rule: rule.clone(), state, offloaded: Some(offloaded) });
        }
        let make = |(name, dtype, len): StateBuffer| {
            let dtype = if dtype == DType::F32 { master.dtype() } else { dtype };
            Ok((name, Tensor::zeros(len, dtype, master.device())?))
        };
        Ok(Self {
            rule: rule.clone(),
            state: buffers.into_iter().map(make).collect::<Result<_>>()?,
            offloaded: None,
        })
    }

    /// The state buffers by name, for checkpoints. Waits until the last update has written them.
    pub fn state(&self) -> Result<&[(&'static str, Tensor)]> {
        self.offloaded.as_ref().map_or(Ok(()), offload::OffloadedState::synchronize)?;
        Ok(&self.state)
    }

    /// Updates the weights and zeroes the gradients, in one pass.
    pub fn update(&mut self, store: &ParamStore, step: OptimizerStep) -> Result<()> {
        if let Some(offloaded) = &mut self.offloaded {
            return offloaded.update_chunks(|range, state| apply(&self.rule, store, step, range, state));
        }
        let state: Vec<Tensor> = self.state.iter().map(|(_, tensor)| tensor.clone()).collect();
        apply(&self.rule, store, step, 0..store.layout.params.trained_len, &state)
    }
}

/// Updates the weights in `range`, given their state, group by group; a rule that needs whole parameters is given all.
fn apply(
    rule: &Rule,
    store: &ParamStore,
    step: OptimizerStep,
    range: Range<usize>,
    state: &[Tensor],
) -> Result<()> {
    let params = &store.layout.params;
    if let Rule::Adafactor(adafactor) = rule {
        let AdafactorConfig { decay, eps, clip, weight_decay, .. } = *adafactor;
        let factor = AdafactorKernel { decay, eps, clip, step: step.step_count };
        let common = step.args(weight_decay, params.trained_len);
        let compute_weights = trained_compute_weights(store)?;
        let (weights, grads) = (&store.master_weights, &store.grads);
        return factor.apply(&common, params, weights, grads, &state[0], compute_weights.as_ref());
    }
    let mut first_scale = 0;
    for group in &params.groups {
        let part = group.range.start.max(range.start)..group.range.end.min(range.end);
        let scales = first_scale..first_scale + adamw8bit::blocks(group.range.len());
        first_scale = scales.end;
        if !part.is_empty() {
            apply_group(rule, store, step, group, part.clone(), |buffer, is_scale| match is_scale {
                true => slice(&state[buffer], scales.clone()),
                false => slice(&state[buffer], part.start - range.start..part.end - range.start),
            })?;
        }
    }
    Ok(())
}

impl<'a> OptimizerStep<'a> {
    fn args(&self, weight_decay: f64, decayed_len: usize) -> UpdateArgs<'a> {
        let OptimizerStep { lr, grad_scale, device_grad_scale, .. } = *self;
        UpdateArgs { lr, grad_scale, device_grad_scale, weight_decay, decayed_len }
    }
}

/// A range of a flat buffer: the buffer itself if that is all of it.
fn slice(all: &Tensor, range: Range<usize>) -> Result<Tensor> {
    if range.len() == all.elem_count() { Ok(all.clone()) } else { all.narrow(0, range.start, range.len()) }
}

/// The copy of the master weights in the compute dtype, unless that is theirs.
fn trained_compute_weights(store: &ParamStore) -> Result<Option<Tensor>> {
    let has_copy = store.compute_weights.dtype() != store.master_weights.dtype();
    has_copy.then(|| slice(&store.compute_weights, 0..store.layout.params.trained_len)).transpose()
}

/// Updates the weights in `range`, a part of `group`. `state` gives their part of a state buffer, of values or of the
/// scales of blocks.
fn apply_group(
    rule: &Rule,
    store: &ParamStore,
    step: OptimizerStep,
    group: &ParamGroup,
    range: Range<usize>,
    state: impl Fn(usize, bool) -> Result<Tensor>,
) -> Result<()> {
    let step = OptimizerStep { lr: step.lr * group.lr_scale, ..step };
    let decay_end = group.range.start + group.decayed_len;
    let common = |weight_decay: f64| {
        let decayed_len = decay_end.saturating_sub(range.start).min(range.len());
        step.args(group.weight_decay.unwrap_or(weight_decay), decayed_len)
    };
    let adam = |rule: &crate::job::AdamwConfig| {
        let [beta1, beta2] = rule.betas;
        AdamWKernel { beta1, beta2, eps: rule.eps, step: step.step_count }
    };
    let weights = &slice(&store.master_weights, range.clone())?;
    let grads = &slice(&store.grads, range.clone())?;
    let compute_weights =
        trained_compute_weights(store)?.map(|all| slice(&all, range.clone())).transpose()?;
    let compute_weights = compute_weights.as_ref();
    let values = |buffer: usize| state(buffer, false);
    match rule {
        Rule::Adamw(rule) => {
            let moments = (&values(0)?, &values(1)?);
            adam(rule).apply(&common(rule.weight_decay), weights, grads, moments, compute_weights)
        }
        Rule::Adamw8bit(rule) => {
            let state = adamw8bit::AdamW8bitState {
                m: values(0)?,
                v: values(1)?,
                m_scale: state(2, true)?,
                v_scale: state(3, true)?,
            };
            adam(rule).apply_8bit(&common(rule.weight_decay), weights, grads, &state, compute_weights)
        }
        Rule::Sgd(rule) => {
            let sgd =
                SgdKernel { momentum: rule.momentum, nesterov: rule.nesterov, first: step.step_count == 1 };
            let momentum = (rule.momentum > 0.0).then(|| values(0)).transpose()?;
            sgd.apply(&common(rule.weight_decay), weights, grads, momentum.as_ref(), compute_weights)
        }
        Rule::Lion(rule) => {
            let [beta1, beta2] = rule.betas;
            let lion = LionKernel { beta1, beta2 };
            lion.apply(&common(rule.weight_decay), weights, grads, &values(0)?, compute_weights)
        }
        Rule::Adafactor(_) => candle_core::bail!("adafactor updates whole parameters"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::update::cast_into;
    use crate::layers::gradcheck::test_device;
    use crate::params::{ParamInit, ParamRegistry};

    /// Ten updates of a 2 x 2 matrix and a vector of 2 with gradients `sin(3 i + step)`, against PyTorch:
    ///
    /// ```python
    /// import torch, math
    /// def run(make):
    ///     w = torch.nn.Parameter(torch.tensor([[.1, -.2], [.3, -.4]]))
    ///     b = torch.nn.Parameter(torch.tensor([.5, -.6]))
    ///     opt = make([{"params": [w]}, {"params": [b], "weight_decay": 0.}])
    ///     for s in range(1, 11):
    ///         g = torch.tensor([math.sin(3 * i + s) for i in range(6)])
    ///         w.grad, b.grad = g[:4].reshape(2, 2), g[4:]
    ///         opt.step()
    ///     print([round(x, 6) for x in w.flatten().tolist() + b.tolist()])
    /// run(lambda p: torch.optim.AdamW(p, lr=.01, betas=(.9, .99), eps=1e-8, weight_decay=.1))
    /// run(lambda p: torch.optim.SGD(p, lr=.01, momentum=.9, nesterov=True, weight_decay=.1))
    /// run(lambda p: torch.optim.SGD(p, lr=.01, weight_decay=.1))
    /// ```
    fn ten_updates(rule: &str, dtype: DType) -> Vec<f64> {
        let mut registry = ParamRegistry::default();
        registry.param("w", [2, 2], ParamInit::Constant(0.0));
        registry.param("b", [2], ParamInit::Constant(0.0));
        let store = ParamStore::new(registry.into_layout().unwrap(), 0, dtype, &test_device()).unwrap();
        let set = |t: &Tensor, values: Vec<f64>| {
            let values = Tensor::from_vec(values, 6, &test_device()).unwrap();
            cast_into(&values, t).unwrap();
        };
        set(&store.master_weights, vec![0.1, -0.2, 0.3, -0.4, 0.5, -0.6]);
        let mut optimizer = Optimizer::new(&toml::from_str(rule).unwrap(), &store, false).unwrap();
        for step_count in 1..=10u64 {
            // Twice the gradient and half the scale, so that the test covers the scale.
            set(&store.grads, (0..6).map(|i| 2.0 * ((3 * i + step_count) as f64).sin()).collect());
            optimizer
                .update(
                    &store,
                    OptimizerStep { lr: 0.01, grad_scale: 0.5, device_grad_scale: None, step_count },
                )
                .unwrap();
        }
        let grads = store.grads.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(grads, [0.0; 6], "gradients are cleared");
        store.master_weights.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    fn assert_near(found: &[f64], wanted: &[f64]) {
        let worst = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 2e-6, "{found:?} against {wanted:?}");
    }

    #[test]
    fn updates_equal_pytorchs() {
        for dtype in [DType::F32, DType::F64] {
            let adamw = ten_updates("kind = 'adamw'\nbetas = [0.9, 0.99]\nweight_decay = 0.1", dtype);
            assert_near(&adamw, &ADAMW);
            let sgd = ten_updates("kind = 'sgd'\nmomentum = 0.9\nnesterov = true\nweight_decay = 0.1", dtype);
            assert_near(&sgd, &SGD_NESTEROV);
            assert_near(&ten_updates("kind = 'sgd'\nweight_decay = 0.1", dtype), &SGD);
        }
    }

    #[test]
    fn the_state_is_as_large_as_it_says() {
        for rule in ["adamw", "sgd", "lion", "adafactor", "adamw8bit"] {
            let mut registry = ParamRegistry::default();
            registry.param("w", [30, 20], ParamInit::Normal(0.1));
            registry.param("b", [7], ParamInit::Constant(0.0));
            let store =
                ParamStore::new(registry.into_layout().unwrap(), 0, DType::F32, &test_device()).unwrap();
            let rule: Rule = toml::from_str(&format!("kind = '{rule}'")).unwrap();
            let mut optimizer = Optimizer::new(&rule, &store, false).unwrap();
            let bytes = |t: &Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
            let allocated: u64 = optimizer.state().unwrap().iter().map(|(_, tensor)| bytes(tensor)).sum();
            assert_eq!(allocated, state_bytes(&rule, &store.layout.params), "{rule:?}");
            let before = store.master_weights.to_vec1::<f32>().unwrap();
            cast_into(&store.master_weights, &store.grads).unwrap();
            optimizer
                .update(
                    &store,
                    OptimizerStep { lr: 0.01, grad_scale: 1.0, device_grad_scale: None, step_count: 1 },
                )
                .unwrap();
            assert_ne!(before, store.master_weights.to_vec1::<f32>().unwrap(), "{rule:?} moves the weights");
        }
    }

    /// Weights, their compute copy and the state after three updates of 50,000 values in bf16 are the same at once, in
    /// chunks and, on a GPU, with the state offloaded.
    #[test]
    fn chunked_and_offloaded_updates_are_bit_exact() {
        for kind in ["kind = 'adamw'", "kind = 'lion'", "kind = 'sgd'\nmomentum = 0.9\nweight_decay = 0.1"] {
            let rule: Rule = toml::from_str(kind).unwrap();
            let run = |update: &dyn Fn(&ParamStore, &mut Optimizer, OptimizerStep), offload_state: bool| {
                let mut registry = ParamRegistry::default();
                registry.param("w", [300, 161], ParamInit::Normal(0.1));
                registry.param("b", [1701], ParamInit::Constant(0.5));
                let store =
                    ParamStore::new(registry.into_layout().unwrap(), 3, DType::BF16, &test_device()).unwrap();
                let mut optimizer = Optimizer::new(&rule, &store, offload_state).unwrap();
                for step_count in 1..=3 {
                    let noise: Vec<f64> = (0..50_001u64).map(|i| ((i * step_count) as f64).sin()).collect();
                    let noise = Tensor::from_vec(noise, 50_001, &test_device()).unwrap();
                    cast_into(&noise, &store.grads).unwrap();
                    update(
                        &store,
                        &mut optimizer,
                        OptimizerStep { lr: 0.01, grad_scale: 0.5, device_grad_scale: None, step_count },
                    );
                }
                let state = optimizer.state().unwrap().iter().map(|(_, tensor)| tensor);
                let all =
                    [&store.master_weights, &store.compute_weights, &store.grads].into_iter().chain(state);
                let bits = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
                all.map(bits).collect::<Vec<_>>()
            };
            let whole = run(&|store, optimizer, step| optimizer.update(store, step).unwrap(), false);
            let chunks = |store: &ParamStore, optimizer: &mut Optimizer, step: OptimizerStep| {
                for range in offload::chunk_ranges(50_001) {
                    let part = |(_, all): &(_, Tensor)| all.narrow(0, range.start, range.len()).unwrap();
                    let state: Vec<Tensor> = optimizer.state.iter().map(part).collect();
                    apply(&rule, store, step, range, &state).unwrap();
                }
            };
            assert!(offload::chunk_ranges(50_001).count() > 10);
            assert!(run(&chunks, false) == whole, "{kind} in chunks");
            let offloaded = run(&|store, optimizer, step| optimizer.update(store, step).unwrap(), true);
            assert!(offloaded == whole, "{kind} offloaded");
        }
    }

    /// Groups are updated as parameters of their own with their rate and weight decay would be; frozen ones are not.
    #[test]
    fn groups_have_their_own_rate_and_weight_decay() {
        let store = |train: &str| {
            let train: crate::job::TrainConfig = toml::from_str(&format!("epochs = 1\n{train}")).unwrap();
            let mut registry = ParamRegistry::with_rules(crate::params::ParamRules::new(&train));
            registry.param("a.weight", [40, 30], ParamInit::Normal(0.1));
            registry.param("a.bias", [40], ParamInit::Normal(0.1));
            registry.param("b.weight", [50, 11], ParamInit::Normal(0.1));
            registry.param("c.weight", [20, 9], ParamInit::Normal(0.1));
            let layout = registry.into_layout().unwrap();
            ParamStore::new(layout, 5, DType::F32, &test_device()).unwrap()
        };
        let run = |train: &str, kind: &str, lr: f64, weight_decay: f64| {
            let store = store(train);
            let rule: Rule =
                toml::from_str(&format!("kind = '{kind}'\nlr = 0.01\nweight_decay = {weight_decay}"))
                    .unwrap();
            let mut optimizer = Optimizer::new(&rule, &store, false).unwrap();
            for step_count in 1..=4 {
                for (i, name) in ["a.weight", "a.bias", "b.weight", "c.weight"].into_iter().enumerate() {
                    let found = store.layout.params.trained().find(|(spec, _)| spec.name == name);
                    let Some((_, at)) = found else { continue };
                    let grad = (0..at.len() as u64).map(|v| ((v * 7 + i as u64 + step_count) as f64).sin());
                    let grad = Tensor::from_vec(grad.collect::<Vec<_>>(), at.len(), &test_device()).unwrap();
                    cast_into(&grad, &store.grads.narrow(0, at.start, at.len()).unwrap()).unwrap();
                }
                let step = OptimizerStep { lr, grad_scale: 0.5, device_grad_scale: None, step_count };
                optimizer.update(&store, step).unwrap();
            }
            let params = store.layout.params.in_declaration_order().zip(store.weight_views());
            let values = |view: &Tensor| view.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            params.map(|((spec, _), view)| (spec.name.clone(), values(view))).collect::<Vec<_>>()
        };
        let initial = store("");
        for kind in ["adamw", "sgd", "lion", "adafactor", "adamw8bit"] {
            let rules = "freeze = 'c'\n[[groups]]\nparams = 'b'\nlr_scale = 0.25\nweight_decay = 0.5";
            let (found, all) = (run(rules, kind, 0.01, 0.1), run("", kind, 0.01, 0.1));
            // The blocks of 8-bit state start with the group: as if the others were not there.
            let alone = run("freeze = ['*', '!b']", kind, 0.0025, 0.5);
            let others = run("freeze = ['*', '!a']", kind, 0.01, 0.1);
            for (i, name) in ["a.weight", "a.bias", "b.weight", "c.weight"].into_iter().enumerate() {
                let expected = match name {
                    "b.weight" => &alone[i].1,
                    "c.weight" => &initial.weight_views()[i].flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                    _ => &others[i].1,
                };
                assert_eq!(found[i].1, *expected, "{kind}: {name}");
                assert_ne!(
                    all[i].1,
                    initial.weight_views()[i].flatten_all().unwrap().to_vec1::<f32>().unwrap()
                );
            }
        }
    }

    const ADAMW: [f64; 6] = [0.062678, -0.159772, 0.257215, -0.355058, 0.458077, -0.557953];
    const SGD_NESTEROV: [f64; 6] = [0.015941, -0.106094, 0.19794, -0.291548, 0.408515, -0.51047];
    const SGD: [f64; 6] = [0.08499, -0.182138, 0.279605, -0.377419, 0.480486, -0.580062];
}
