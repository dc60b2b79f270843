//! How weights follow gradients: updates over the flat buffers, and the learning rate over time.

pub mod away;
pub mod scaling;
pub mod schedule;

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use crate::job::Optimizer as Rule;
use crate::kernels::adafactor::{self, Adafactor};
use crate::kernels::adamw8bit;
use crate::kernels::lion::Lion;
use crate::kernels::update::{AdamW, Common, Sgd};
use crate::layers::On;
use crate::params::{Flat, Store};

/// An update rule and its state: named flat buffers.
pub struct Optimizer {
    rule: Rule,
    state: Vec<(&'static str, Tensor)>,
    /// The buffers' memory, where they wait on the host of a card.
    #[cfg(feature = "cuda")]
    away: Option<away::Away>,
}

/// What one update is given.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    pub lr: f64,
    /// The gradient is multiplied with this first.
    pub grad_scale: f64,
    /// Where a card has that number instead; see [`judged_there`].
    pub judged: Option<&'a Tensor>,
    /// Updates made, this one included.
    pub number: u64,
}

/// A buffer of state: its name, the bytes of a value (4 stands for the master's type) and its length.
type Buffer = (&'static str, DType, usize);

fn buffers(rule: &Rule, params: &Flat) -> Vec<Buffer> {
    let (n, wide) = (params.len, DType::F32);
    match rule {
        Rule::Adamw(_) => vec![("m", wide, n), ("v", wide, n)],
        Rule::Sgd(sgd) if sgd.momentum > 0.0 => vec![("momentum", wide, n)],
        Rule::Sgd(_) => Vec::new(),
        Rule::Lion(_) => vec![("momentum", wide, n)],
        Rule::Adafactor(_) => vec![("factors", wide, adafactor::state_len(params))],
        Rule::Adamw8bit(_) => {
            let scales = n.div_ceil(adamw8bit::BLOCK);
            let byte = DType::U8;
            vec![("m", byte, n), ("v", byte, n), ("m_scale", wide, scales), ("v_scale", wide, scales)]
        }
    }
}

/// Whether a rule reads what gradients are multiplied with where a card has left it: then nobody waits for it.
pub fn judged_there(rule: &Rule) -> bool {
    matches!(rule, Rule::Adamw(_) | Rule::Sgd(_) | Rule::Lion(_))
}

/// Bytes of the state of a rule over these parameters.
pub fn state_bytes(rule: &Rule, params: &Flat) -> u64 {
    buffers(rule, params).iter().map(|(_, dtype, len)| (dtype.size_in_bytes() * len) as u64).sum()
}

/// Bytes an update takes for as long as it runs.
pub fn workspace_bytes(rule: &Rule, params: &Flat, on: On) -> u64 {
    match (rule, on) {
        (Rule::Adafactor(_), On::Cpu { .. }) => 4 * adafactor::workspace_len(params) as u64,
        (Rule::Adafactor(_), On::Cuda { .. }) => adafactor::card_bytes(params, DType::F32),
        _ => 0,
    }
}

/// Bytes of a card through which the state of a rule passes that waits in host memory.
pub fn window_bytes(rule: &Rule, params: &Flat) -> u64 {
    if away::can(rule) { away::window_bytes(state_bytes(rule, params), params.len) } else { 0 }
}

impl Optimizer {
    /// `is_away`: the state waits in host memory, where the rule allows it and the weights are on a card.
    pub fn new(rule: &Rule, store: &Store, is_away: bool) -> Result<Self> {
        let (buffers, master) = (buffers(rule, &store.layout.params), &store.master);
        #[cfg(feature = "cuda")]
        if let (true, Some(device)) = (is_away && away::can(rule), crate::kernels::cuda::of(master)) {
            let away = away::Away::new(device, master.dtype(), buffers.len(), store.layout.params.len)?;
            let state = buffers.iter().map(|(name, ..)| *name).zip(away.tensors()).collect();
            return Ok(Self { rule: rule.clone(), state, away: Some(away) });
        }
        let _ = is_away;
        let make = |(name, dtype, len): Buffer| {
            let dtype = if dtype == DType::F32 { master.dtype() } else { dtype };
            Ok((name, Tensor::zeros(len, dtype, master.device())?))
        };
        Ok(Self {
            rule: rule.clone(),
            state: buffers.into_iter().map(make).collect::<Result<_>>()?,
            #[cfg(feature = "cuda")]
            away: None,
        })
    }

    /// The buffers by name, for checkpoints: as the last update left them.
    pub fn state(&self) -> Result<&[(&'static str, Tensor)]> {
        #[cfg(feature = "cuda")]
        self.away.as_ref().map_or(Ok(()), away::Away::settle)?;
        Ok(&self.state)
    }

    /// Moves the weights and clears the gradients, in one pass.
    pub fn update(&mut self, store: &Store, step: Step) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(away) = &mut self.away {
            return away.each(|range, state| apply(&self.rule, store, step, range, state));
        }
        let state: Vec<Tensor> = self.state.iter().map(|(_, tensor)| tensor.clone()).collect();
        apply(&self.rule, store, step, 0..store.layout.params.len, &state)
    }
}

/// Moves the weights of a range, of which this is the state; all of them where the rule is one that must see all.
fn apply(rule: &Rule, store: &Store, step: Step, range: Range<usize>, state: &[Tensor]) -> Result<()> {
    let params = &store.layout.params;
    let common = |weight_decay| Common {
        lr: step.lr,
        grad_scale: step.grad_scale,
        judged: step.judged,
        weight_decay,
        decayed: params.decayed.saturating_sub(range.start).min(range.len()),
    };
    let adam = |rule: &crate::job::Adamw| {
        let [beta1, beta2] = rule.betas;
        AdamW { beta1, beta2, eps: rule.eps, step: step.number }
    };
    let part = |all: &Tensor| match range.len() == params.len {
        true => Ok(all.clone()),
        false => all.narrow(0, range.start, range.len()),
    };
    let (weights, grads) = (&part(&store.master)?, &part(&store.grads)?);
    let other = store.compute.dtype() != weights.dtype();
    let copy = other.then(|| part(&store.compute)).transpose()?;
    let copy = copy.as_ref();
    match rule {
        Rule::Adamw(rule) => {
            adam(rule).apply(&common(rule.weight_decay), weights, grads, (&state[0], &state[1]), copy)
        }
        Rule::Adamw8bit(rule) => {
            let buffer = |i: usize| state[i].clone();
            let state =
                adamw8bit::State { m: buffer(0), v: buffer(1), m_scale: buffer(2), v_scale: buffer(3) };
            adam(rule).apply_8bit(&common(rule.weight_decay), weights, grads, &state, copy)
        }
        Rule::Sgd(rule) => {
            let sgd = Sgd { momentum: rule.momentum, nesterov: rule.nesterov, first: step.number == 1 };
            sgd.apply(&common(rule.weight_decay), weights, grads, state.first(), copy)
        }
        Rule::Lion(rule) => {
            let [beta1, beta2] = rule.betas;
            Lion { beta1, beta2 }.apply(&common(rule.weight_decay), weights, grads, &state[0], copy)
        }
        Rule::Adafactor(rule) => {
            let factor = Adafactor { decay: rule.decay, eps: rule.eps, clip: rule.clip, step: step.number };
            factor.apply(&common(rule.weight_decay), params, weights, grads, &state[0], copy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::update::round_into;
    use crate::layers::check::device;
    use crate::params::{Declared, Init};

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
        let mut declared = Declared::default();
        declared.param("w", [2, 2], Init::Constant(0.0));
        declared.param("b", [2], Init::Constant(0.0));
        let store = Store::new(declared.layout().unwrap(), 0, dtype, &device()).unwrap();
        let set = |t: &Tensor, values: Vec<f64>| {
            let values = Tensor::from_vec(values, 6, &device()).unwrap();
            round_into(&values, t).unwrap();
        };
        set(&store.master, vec![0.1, -0.2, 0.3, -0.4, 0.5, -0.6]);
        let mut optimizer = Optimizer::new(&toml::from_str(rule).unwrap(), &store, false).unwrap();
        for number in 1..=10u64 {
            // Twice the gradient and half the scale: the scale is part of what is tested.
            set(&store.grads, (0..6).map(|i| 2.0 * ((3 * i + number) as f64).sin()).collect());
            optimizer.update(&store, Step { lr: 0.01, grad_scale: 0.5, judged: None, number }).unwrap();
        }
        let grads = store.grads.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(grads, [0.0; 6], "gradients are cleared");
        store.master.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
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
            let mut declared = Declared::default();
            declared.param("w", [30, 20], Init::Normal(0.1));
            declared.param("b", [7], Init::Constant(0.0));
            let store = Store::new(declared.layout().unwrap(), 0, DType::F32, &device()).unwrap();
            let rule: Rule = toml::from_str(&format!("kind = '{rule}'")).unwrap();
            let mut optimizer = Optimizer::new(&rule, &store, false).unwrap();
            let bytes = |t: &Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
            let held: u64 = optimizer.state().unwrap().iter().map(|(_, tensor)| bytes(tensor)).sum();
            assert_eq!(held, state_bytes(&rule, &store.layout.params), "{rule:?}");
            let before = store.master.to_vec1::<f32>().unwrap();
            round_into(&store.master, &store.grads).unwrap();
            optimizer.update(&store, Step { lr: 0.01, grad_scale: 1.0, judged: None, number: 1 }).unwrap();
            assert_ne!(before, store.master.to_vec1::<f32>().unwrap(), "{rule:?} moves the weights");
        }
    }

    /// Weights, their copy and the state after three updates of 50,000 values in bf16: at once, in chunks, and with the
    /// state away from the card where there is one.
    #[test]
    fn chunks_and_state_that_is_away_change_no_bit() {
        for kind in ["kind = 'adamw'", "kind = 'lion'", "kind = 'sgd'\nmomentum = 0.9\nweight_decay = 0.1"] {
            let rule: Rule = toml::from_str(kind).unwrap();
            let run = |update: &dyn Fn(&Store, &mut Optimizer, Step), is_away: bool| {
                let mut declared = Declared::default();
                declared.param("w", [300, 161], Init::Normal(0.1));
                declared.param("b", [1701], Init::Constant(0.5));
                let store = Store::new(declared.layout().unwrap(), 3, DType::BF16, &device()).unwrap();
                let mut optimizer = Optimizer::new(&rule, &store, is_away).unwrap();
                for number in 1..=3 {
                    let noise: Vec<f64> = (0..50_001u64).map(|i| ((i * number) as f64).sin()).collect();
                    let noise = Tensor::from_vec(noise, 50_001, &device()).unwrap();
                    round_into(&noise, &store.grads).unwrap();
                    update(&store, &mut optimizer, Step { lr: 0.01, grad_scale: 0.5, judged: None, number });
                }
                let state = optimizer.state().unwrap().iter().map(|(_, tensor)| tensor);
                let all = [&store.master, &store.compute, &store.grads].into_iter().chain(state);
                let bits = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
                all.map(bits).collect::<Vec<_>>()
            };
            let whole = run(&|store, optimizer, step| optimizer.update(store, step).unwrap(), false);
            let chunks = |store: &Store, optimizer: &mut Optimizer, step: Step| {
                for range in away::chunks(50_001) {
                    let part = |(_, all): &(_, Tensor)| all.narrow(0, range.start, range.len()).unwrap();
                    let state: Vec<Tensor> = optimizer.state.iter().map(part).collect();
                    apply(&rule, store, step, range, &state).unwrap();
                }
            };
            assert!(away::chunks(50_001).count() > 10);
            assert!(run(&chunks, false) == whole, "{kind} in chunks");
            let away = run(&|store, optimizer, step| optimizer.update(store, step).unwrap(), true);
            assert!(away == whole, "{kind} away");
        }
    }

    const ADAMW: [f64; 6] = [0.062678, -0.159772, 0.257215, -0.355058, 0.458077, -0.557953];
    const SGD_NESTEROV: [f64; 6] = [0.015941, -0.106094, 0.19794, -0.291548, 0.408515, -0.51047];
    const SGD: [f64; 6] = [0.08499, -0.182138, 0.279605, -0.377419, 0.480486, -0.580062];
}
