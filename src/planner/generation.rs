//! The memory of generation: the key-value cache, and a pass over the prompts or over one new position per sequence.
//!
//! Passes are predicted by dry runs of the networks that generate, so the plan cannot diverge from them. The plan takes
//! as many sequences at once as requested, if they fit, and the largest chunk of a prompt per pass that fits.

use std::sync::Arc;

use candle_core::DType;

use super::estimate::{GEMM_WORKSPACE_BYTES, PROGRAM_HEAP_BYTES, SMALL_ALLOCATION_BYTES};
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::base::units::{Bytes, counted};
use crate::base::{Backend, MicroBatchSpec, Role};
use crate::graph::decoding::{DecodingError, DecodingNetwork};
use crate::graph::network::Executor;
use crate::job::{ModelConfig, Reductions};
use crate::kernels::rotary::Rotary;
use crate::memory::Ledger;
use crate::models::{self, BuiltModel, ModelError};
use crate::params::ParamLayout;

/// Positions of a prompt per pass at most. Longer chunks make GEMMs hardly faster and take more memory.
pub const MAX_CHUNK: usize = 512;

/// Shorter chunks than this make a prompt slower than a smaller batch does.
const MIN_CHUNK: usize = 16;

/// A model that generates, and where.
#[derive(Clone, Copy, Debug)]
pub struct GenerationInputs<'a> {
    pub model: &'a ModelConfig,
    /// The rank of each factorized layer.
    pub reductions: &'a Reductions,
    pub vocab: usize,
    /// Dtype of weights, activations and cache.
    pub dtype: DType,
    pub backend: Backend,
    /// Bytes of the weights, in the same memory.
    pub weight_bytes: u64,
}

/// What is to be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationRequest {
    /// Sequences at once, if they fit.
    pub sequences: usize,
    /// Tokens of the longest prompt.
    pub longest_prompt: usize,
    /// Tokens of the longest sequence, prompt included.
    pub longest_sequence: usize,
}

/// How generation runs, and what it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationPlan {
    /// Sequences at once.
    pub slots: usize,
    /// Positions per sequence that the cache holds.
    pub capacity: usize,
    /// Positions of a prompt per pass, a power of two.
    pub chunk: usize,
    pub memory: GenerationMemory,
}

/// The memory of generation, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerationMemory {
    pub weights: u64,
    pub cache: u64,
    /// The program, the buffers that GEMMs keep, and rotary tables.
    pub fixed: u64,
    /// The largest of a pass over a chunk of every prompt, a pass over one position of every sequence, and sampling.
    pub pass: u64,
}

impl GenerationMemory {
    pub fn total(&self) -> u64 {
        self.weights + self.cache + self.fixed + self.pass
    }
}

/// Why generation cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum GenerationPlanError {
    #[error("a model of kind `{kind}` does not generate text: {why}")]
    NoTextModel { kind: &'static str, why: String },
    #[error("{}: the model's context is {context}", counted(*tokens as u64, "token"))]
    Context { tokens: usize, context: usize },
    #[error(
        "generation needs {} and {} may be used: weights {}, key-value cache {}, passes {}, the rest {}",
        Bytes(memory.total()), Bytes(*budget), Bytes(memory.weights), Bytes(memory.cache), Bytes(memory.pass),
        Bytes(memory.fixed)
    )]
    DoesNotFit { memory: GenerationMemory, budget: u64 },
}

impl GenerationInputs<'_> {
    /// Positions that the model was built for; `None` if it is no language model.
    pub fn context(&self) -> Option<usize> {
        match self.model {
            ModelConfig::Gpt(gpt) => Some(gpt.context),
            ModelConfig::Llama(llama) => Some(llama.context),
            _ => None,
        }
    }

    fn refuse(&self, why: String) -> GenerationPlanError {
        GenerationPlanError::NoTextModel { kind: self.model.kind(), why }
    }

    fn build(&self, length: usize) -> Result<BuiltModel, GenerationPlanError> {
        if self.context().is_none() {
            return Err(self.refuse("it needs a model of kind `gpt` or `llama`".into()));
        }
        let input = InputSpec::Tokens { length, vocab: self.vocab };
        models::build_reduced(self.model, &Features::new(input, TargetSpec::Tokens), self.reductions)
            .map_err(|error: ModelError| self.refuse(error.to_string()))
    }

    /// The layout of the parameters, which is that of training.
    pub fn layout(&self) -> Result<ParamLayout, GenerationPlanError> {
        Ok(self.build(1)?.layout)
    }

    /// The network for `length` new positions per sequence, over a cache of `slots` sequences of `capacity` positions.
    /// Shares the tables of another.
    pub fn network(
        &self,
        length: usize,
        slots: usize,
        capacity: usize,
        tables: Option<&Arc<Rotary>>,
    ) -> Result<DecodingNetwork, GenerationPlanError> {
        let BuiltModel { network, layout } = self.build(length)?;
        let decoding = network.for_decoding(slots, capacity, tables);
        let decoding = decoding.map_err(|error: DecodingError| self.refuse(error.to_string()))?;
        let spec = MicroBatchSpec { batch: 1, dtype: self.dtype, backend: self.backend };
        let network = decoding.network.for_backend(spec, &layout.params);
        Ok(DecodingNetwork { network, ..decoding })
    }

    /// Peak bytes of a pass over `length` new positions of every slot, with the logits of one position each.
    fn pass_bytes(&self, decoding: &DecodingNetwork, length: usize) -> u64 {
        let (ledger, batch) = (Ledger::planning(), decoding.cache.slots);
        let spec = MicroBatchSpec { batch, dtype: self.dtype, backend: self.backend };
        // A planning ledger has no limit, so this cannot fail.
        let _tokens = ledger.reserve(Role::Batch, "tokens", token_bytes(batch, length)).ok();
        let exec = Executor::new(None, spec, &ledger);
        let positions: Vec<u32> = (0..batch).map(|row| (row * length) as u32).collect();
        drop(decoding.network.logits_at(&exec, None, &positions, self.vocab));
        ledger.peak()
    }

    /// Host bytes for sampling: the logits of `rows` sequences and the candidates that are drawn from. 0 on a GPU,
    /// whose plan does not count host memory.
    pub fn sampling_bytes(&self, rows: usize) -> u64 {
        let threads = match self.backend {
            Backend::Cpu { threads } => threads.min(rows),
            Backend::Reference { on_gpu: false } => rows,
            Backend::Cuda { .. } | Backend::Reference { on_gpu: true } => return 0,
        };
        let (logits, candidates) = (rows * size_of::<f32>(), threads * size_of::<(u32, f32)>());
        (self.vocab * (logits + candidates)) as u64
    }

    /// What generation with these sizes takes.
    pub fn memory(
        &self,
        slots: usize,
        capacity: usize,
        chunk: usize,
    ) -> Result<GenerationMemory, GenerationPlanError> {
        let decode = self.network(1, slots, capacity, None)?;
        let prefill = self.network(chunk, slots, capacity, None)?;
        let gemm = match self.backend {
            Backend::Cpu { .. } | Backend::Reference { on_gpu: false } => 0,
            Backend::Cuda { .. } | Backend::Reference { on_gpu: true } => {
                GEMM_WORKSPACE_BYTES + SMALL_ALLOCATION_BYTES
            }
        };
        let program = if self.backend.on_gpu() { 0 } else { PROGRAM_HEAP_BYTES };
        Ok(GenerationMemory {
            weights: self.weight_bytes,
            cache: decode.cache.bytes(self.dtype),
            fixed: gemm + program + decode.table_bytes(),
            pass: self
                .pass_bytes(&decode, 1)
                .max(self.pass_bytes(&prefill, chunk))
                .max(self.sampling_bytes(slots)),
        })
    }
}

/// Bytes of the tokens of a pass.
pub fn token_bytes(batch: usize, length: usize) -> u64 {
    (batch * length * size_of::<u32>()) as u64
}

/// Plans generation within `budget` bytes: the most sequences at once up to those requested, each halving tried, and
/// the largest chunk of a prompt that fits beside them.
pub fn plan_generation(
    inputs: &GenerationInputs,
    request: GenerationRequest,
    budget: u64,
) -> Result<GenerationPlan, GenerationPlanError> {
    let capacity = request.longest_sequence.max(request.longest_prompt).max(1);
    if let Some(context) = inputs.context().filter(|context| capacity > *context) {
        return Err(GenerationPlanError::Context { tokens: capacity, context });
    }
    let largest = request.longest_prompt.clamp(1, MAX_CHUNK).next_power_of_two().min(capacity);
    // A power of two, and no longer than the model's context.
    let largest = if largest.is_power_of_two() { largest } else { largest.next_power_of_two() / 2 };
    let mut slots = request.sequences.max(1);
    loop {
        let least = if slots == 1 { 1 } else { MIN_CHUNK.min(largest) };
        let mut chunk = largest;
        loop {
            let memory = inputs.memory(slots, capacity, chunk)?;
            if memory.total() <= budget {
                return Ok(GenerationPlan { slots, capacity, chunk, memory });
            }
            if chunk <= least {
                if slots == 1 {
                    return Err(GenerationPlanError::DoesNotFit { memory, budget });
                }
                break;
            }
            chunk /= 2;
        }
        slots = slots.div_ceil(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(model: &ModelConfig) -> GenerationInputs<'_> {
        let backend = Backend::Cpu { threads: 2 };
        let reductions = &crate::job::NO_REDUCTIONS;
        GenerationInputs { model, reductions, vocab: 300, dtype: DType::BF16, backend, weight_bytes: 1000 }
    }

    fn model() -> ModelConfig {
        toml::from_str("kind = 'llama'\nlayers = 3\nheads = 4\nkv_heads = 2\nwidth = 64\ncontext = 256")
            .unwrap()
    }

    const REQUEST: GenerationRequest =
        GenerationRequest { sequences: 8, longest_prompt: 200, longest_sequence: 250 };

    #[test]
    fn the_cache_is_counted_to_the_byte() {
        let memory = inputs(&model()).memory(8, 250, 128).unwrap();
        // layers, keys and values, slots, key heads, positions, values per head, bytes
        assert_eq!(memory.cache, 3 * 2 * 8 * 2 * 250 * 16 * 2);
        assert_eq!(memory.weights, 1000);
    }

    /// Less memory takes shorter chunks first, then fewer sequences, and then ends in an error that names the parts.
    #[test]
    fn the_plan_shrinks_with_the_budget() {
        let model = model();
        let inputs = inputs(&model);
        let ample = plan_generation(&inputs, REQUEST, u64::MAX).unwrap();
        assert_eq!((ample.slots, ample.capacity, ample.chunk), (8, 250, 128));
        let mut last = ample;
        let mut seen = vec![(ample.slots, ample.chunk)];
        loop {
            match plan_generation(&inputs, REQUEST, last.memory.total() - 1) {
                Ok(plan) => {
                    assert!(plan.memory.total() < last.memory.total());
                    assert!(plan.slots <= last.slots, "{plan:?} after {last:?}");
                    assert!(plan.slots < last.slots || plan.chunk < last.chunk, "{plan:?} after {last:?}");
                    seen.push((plan.slots, plan.chunk));
                    last = plan;
                }
                Err(GenerationPlanError::DoesNotFit { memory, budget }) => {
                    assert_eq!(memory, last.memory);
                    assert_eq!(budget, last.memory.total() - 1);
                    break;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(seen.contains(&(8, 64)) && seen.last() == Some(&(1, 1)), "{seen:?}");
    }

    #[test]
    fn what_cannot_generate_is_refused() {
        let mlp: ModelConfig = toml::from_str("kind = 'mlp'\nhidden = [8]").unwrap();
        let text = plan_generation(&inputs(&mlp), REQUEST, u64::MAX).unwrap_err().to_string();
        assert_eq!(
            text,
            "a model of kind `mlp` does not generate text: it needs a model of kind `gpt` or `llama`"
        );
        let long = GenerationRequest { longest_sequence: 257, ..REQUEST };
        let text = plan_generation(&inputs(&model()), long, u64::MAX).unwrap_err().to_string();
        assert_eq!(text, "257 tokens: the model's context is 256");
    }
}
