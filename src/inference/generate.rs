//! Generates tokens with a key-value cache: prompts in chunks, then one position of every sequence per pass.
//!
//! Takes prompts as tokens, gives tokens as they are chosen. Sequences share passes: as many at once as the plan has
//! slots, and a sequence that ends makes place for the next prompt. A prompt that begins like what a slot has cached
//! (the next turn of a chat) continues from there. The text of a sequence depends on its prompt and the seed, not on
//! the sequences beside it, except for the rounding of sums.

mod chat;
pub mod continuation;
pub mod job_prompts;
pub mod language_model;
mod prompt;
#[cfg(test)]
mod published_models;
pub mod sampler;
mod sequence;
#[cfg(test)]
mod tests;
pub mod text_stream;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::base::{MicroBatchSpec, Role};
use crate::graph::network::{Executor, Network, StepError};
use crate::kernels::attention::CacheRows;
use crate::kernels::rotary::Rotary;
use crate::layers::kv_cache::{CachePass, KvCache};
use crate::layers::{Mode, PassContext};
use crate::memory::{Ledger, Reservation};
use crate::param_store::ParamStore;
use crate::params::ParamLayout;
use crate::planner::generation::{GenerationInputs, GenerationPlan, GenerationPlanError, token_bytes};
use sampler::{Sampling, SamplingError};
use sequence::Sequence;

pub use chat::{ChatError, Conversation};
pub use continuation::Continuation;
pub use prompt::{PromptLimits, PromptTooLong};
pub use sequence::{FinishReason, Generation};

/// When generation ends, and how it chooses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOptions {
    pub sampling: Sampling,
    /// New tokens per prompt at most. The context ends a sequence too.
    pub max_tokens: usize,
    /// Tokens that end a sequence, such as the end-of-text token. They are not part of it.
    pub end_tokens: Vec<u32>,
}

/// Why generation failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(transparent)]
    Plan(#[from] GenerationPlanError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("the weights are not those of this model: {0}")]
    Layout(String),
    #[error("prompt {prompt} has no tokens")]
    EmptyPrompt { prompt: usize },
    #[error("prompt {prompt} has {tokens} tokens, and the key-value cache was planned for {capacity}")]
    Capacity { prompt: usize, tokens: usize, capacity: usize },
    #[error("token {token} of prompt {prompt} is not in the vocabulary, which has {vocab}")]
    UnknownToken { prompt: usize, token: u32, vocab: usize },
    #[error("the logits of prompt {prompt} are not finite after {position} tokens")]
    NotFinite { prompt: usize, position: usize },
}

impl From<candle_core::Error> for GenerateError {
    fn from(error: candle_core::Error) -> Self {
        Self::Step(error.into())
    }
}

impl From<crate::memory::Oom> for GenerateError {
    fn from(error: crate::memory::Oom) -> Self {
        Self::Step(error.into())
    }
}

/// Checks that the weights are those that the network reads, by name, shape and order.
fn check_layout(expected: &ParamLayout, got: &ParamLayout) -> Result<(), GenerateError> {
    let params = |layout: &ParamLayout| -> Vec<String> {
        let specs = layout.params.in_declaration_order();
        specs.map(|(spec, _)| format!("`{}` {:?}", spec.name, spec.shape)).collect()
    };
    let (expected, got) = (params(expected), params(got));
    let longest = expected.len().max(got.len());
    match (0..longest).find(|i| expected.get(*i) != got.get(*i)) {
        None => Ok(()),
        Some(i) => {
            let name = |of: &[String]| of.get(i).map_or("none".to_owned(), String::clone);
            Err(GenerateError::Layout(format!("expected {}, got {}", name(&expected), name(&got))))
        }
    }
}

/// New tokens of one sequence in a pass.
struct PassRow<'t> {
    slot: usize,
    tokens: &'t [u32],
    /// Whether the logits after the last of them are wanted.
    wants_logits: bool,
}

/// Generates with one model under one plan.
pub struct Generator<'a> {
    inputs: GenerationInputs<'a>,
    plan: GenerationPlan,
    store: &'a ParamStore,
    ledger: &'a Ledger,
    cache: KvCache,
    /// Networks by new positions per pass.
    networks: BTreeMap<usize, Network>,
    /// Rotary tables of all of them.
    tables: Option<Arc<Rotary>>,
    /// The tokens whose keys and values each slot has.
    cached: Vec<Vec<u32>>,
    _reservation: Reservation,
}

impl<'a> Generator<'a> {
    /// Reserves and allocates the cache. The weights are in `store`, in the compute dtype of `inputs`; the caller has
    /// reserved them and the fixed part of the plan.
    pub fn new(
        inputs: GenerationInputs<'a>,
        plan: GenerationPlan,
        store: &'a ParamStore,
        ledger: &'a Ledger,
    ) -> Result<Self, GenerateError> {
        check_layout(&inputs.layout()?, &store.layout)?;
        let decode = inputs.network(1, plan.slots, plan.capacity, None)?;
        let reservation =
            ledger.reserve(Role::Activations, "key-value cache", decode.cache.bytes(inputs.dtype))?;
        Ok(Self {
            cache: KvCache::new(decode.cache, inputs.dtype, store.compute_weights.device())?,
            networks: [(1, decode.network)].into(),
            tables: decode.tables,
            cached: vec![Vec::new(); plan.slots],
            _reservation: reservation,
            inputs,
            plan,
            store,
            ledger,
        })
    }

    pub fn plan(&self) -> &GenerationPlan {
        &self.plan
    }

    /// Continues every prompt. `on_token` gets the prompt's index and each token as it is chosen, and says whether the
    /// sequence goes on. Results are in the order of the prompts.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerationOptions,
        on_token: &mut dyn FnMut(usize, u32) -> bool,
    ) -> Result<Vec<Generation>, GenerateError> {
        options.sampling.check()?;
        self.check_prompts(prompts)?;
        let mut results: Vec<Generation> = prompts.iter().map(|_| Generation::default()).collect();
        let mut waiting = prompts.iter().enumerate();
        // One per slot.
        let mut active: Vec<Option<Sequence>> = (0..self.plan.slots).map(|_| None).collect();
        loop {
            while active.iter().any(Option::is_none)
                && let Some((index, prompt)) = waiting.next()
            {
                if options.max_tokens > 0 {
                    let slot = self.place(prompt, &active);
                    active[slot] = Some(Sequence::new(index, prompt, self.cache.length(slot)));
                }
            }
            if active.iter().all(Option::is_none) {
                return Ok(results);
            }
            for (slot, chosen) in self.step(&active, &options.sampling)? {
                let Some(sequence) = &mut active[slot] else { continue };
                sequence.cached = self.cache.length(slot);
                let Some(token) = chosen else { continue };
                let reason = match token {
                    _ if options.end_tokens.contains(&token) => Some(FinishReason::EndToken),
                    token => sequence.push(token, options.max_tokens, self.plan.capacity, on_token),
                };
                if let Some(reason) = reason
                    && let Some(sequence) = active[slot].take()
                {
                    let index = sequence.index;
                    results[index] = sequence.into_generation(reason);
                }
            }
        }
    }

    fn check_prompts(&self, prompts: &[Vec<u32>]) -> Result<(), GenerateError> {
        let (vocab, capacity) = (self.inputs.vocab, self.plan.capacity);
        for (prompt, tokens) in prompts.iter().enumerate() {
            if tokens.is_empty() {
                return Err(GenerateError::EmptyPrompt { prompt });
            }
            if tokens.len() > capacity {
                return Err(GenerateError::Capacity { prompt, tokens: tokens.len(), capacity });
            }
            if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) {
                return Err(GenerateError::UnknownToken { prompt, token, vocab });
            }
        }
        Ok(())
    }

    /// Chooses the free slot that has cached the longest beginning of the prompt, and cuts it back to that. At least
    /// one token remains to be fed, because its logits are wanted.
    fn place(&mut self, prompt: &[u32], active: &[Option<Sequence>]) -> usize {
        let shared = |slot: usize| {
            let same = self.cached[slot].iter().zip(prompt).take_while(|(a, b)| a == b).count();
            same.min(prompt.len() - 1)
        };
        let free = (0..active.len()).filter(|slot| active[*slot].is_none());
        let (slot, length) = free
            .map(|slot| (slot, shared(slot)))
            .max_by_key(|(slot, n)| (*n, usize::MAX - slot))
            .unwrap_or((0, 0));
        self.cache.rewind(slot, length);
        self.cached[slot].truncate(length);
        slot
    }

    /// Runs one pass: over the prompts that are not in the cache yet if there are any, else over the last token of
    /// every sequence. Returns the slots that took part, with the tokens chosen where a prompt is complete.
    fn step(
        &mut self,
        active: &[Option<Sequence>],
        sampling: &Sampling,
    ) -> Result<Vec<(usize, Option<u32>)>, GenerateError> {
        let sequences = || active.iter().enumerate().filter_map(|(slot, seq)| Some((slot, seq.as_ref()?)));
        let prefill = sequences().any(|(_, sequence)| sequence.uncached() > 1);
        loop {
            let chunk = if prefill { self.plan.chunk } else { 1 };
            let rows: Vec<PassRow> = sequences()
                .filter(|(_, sequence)| !prefill || !sequence.is_decoding())
                .map(|(slot, sequence)| {
                    let tokens = sequence.next_tokens(chunk);
                    PassRow { slot, tokens, wants_logits: tokens.len() == sequence.uncached() }
                })
                .collect();
            let mut logits = match self.run_pass(&rows) {
                Ok(logits) => logits,
                // A failed pass has advanced no sequence: repeat the same positions in smaller chunks.
                Err(StepError::Oom(_)) if prefill && self.plan.chunk > 1 => {
                    self.plan.chunk /= 2;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let wanting: Vec<usize> =
                rows.iter().filter(|row| row.wants_logits).map(|row| row.slot).collect();
            let bytes = self.inputs.sampling_bytes(wanting.len());
            let _sampling = self.ledger.reserve(Role::Workspace, "sampling", bytes)?;
            let choose = |(slot, logits): (&usize, &mut [f32])| {
                let sequence = active[*slot].as_ref()?;
                let position = sequence.tokens.len();
                let token = sampling.choose(logits, &sequence.tokens, sampling.draw(position));
                Some((*slot, token.ok_or(GenerateError::NotFinite { prompt: sequence.index, position })))
            };
            let mut chosen: BTreeMap<usize, Result<u32, GenerateError>> =
                wanting.par_iter().zip(logits.par_chunks_mut(self.inputs.vocab)).filter_map(choose).collect();
            return rows.iter().map(|row| Ok((row.slot, chosen.remove(&row.slot).transpose()?))).collect();
        }
    }

    /// Runs the network on the new tokens, appends them to the cache, and returns the logits that rows want, in order.
    fn run_pass(&mut self, rows: &[PassRow]) -> Result<Vec<f32>, StepError> {
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
        // Few lengths, so that few networks are built.
        let length = longest.next_power_of_two().min(self.plan.chunk).max(longest);
        if !self.networks.contains_key(&length) {
            let (slots, capacity) = (self.plan.slots, self.plan.capacity);
            let built = self.inputs.network(length, slots, capacity, self.tables.as_ref());
            let built = built.map_err(|error| candle_core::Error::Msg(error.to_string()))?;
            self.networks.insert(length, built.network);
        }
        let Some(network) = self.networks.get(&length) else {
            return Err(candle_core::Error::Msg(format!("no network for {length} positions")).into());
        };
        let slots: Vec<usize> = rows.iter().map(|row| row.slot).collect();
        let starts: Vec<usize> = slots.iter().map(|slot| self.cache.length(*slot)).collect();
        let counts: Vec<usize> = rows.iter().map(|row| row.tokens.len()).collect();
        let cache_rows = CacheRows { slots: &slots, starts: &starts, counts: &counts };
        let _tokens = self.ledger.reserve(Role::Batch, "tokens", token_bytes(rows.len(), length))?;
        let mut ids = vec![0u32; rows.len() * length];
        ids.chunks_exact_mut(length)
            .zip(rows)
            .for_each(|(ids, row)| ids[..row.tokens.len()].copy_from_slice(row.tokens));
        let ids = Tensor::from_vec(ids, (rows.len(), length), self.device())?;
        let sample_ids: Vec<u64> = slots.iter().map(|slot| *slot as u64).collect();
        let pass = PassContext {
            cache: Some(CachePass { cache: &self.cache, rows: cache_rows }),
            ..PassContext::new(self.store, Mode::Eval, &sample_ids)
        };
        let spec =
            MicroBatchSpec { batch: rows.len(), dtype: self.inputs.dtype, backend: self.inputs.backend };
        let exec = Executor::new(Some(pass), spec, self.ledger);
        let last = |(i, row): (usize, &PassRow)| (i * length + row.tokens.len() - 1) as u32;
        let positions: Vec<u32> =
            rows.iter().enumerate().filter(|(_, row)| row.wants_logits).map(last).collect();
        let logits = network.logits_at(&exec, Some(&ids), &positions, self.inputs.vocab)?;
        self.cache.advance(&cache_rows);
        rows.iter().for_each(|row| self.cached[row.slot].extend_from_slice(row.tokens));
        Ok(logits)
    }

    fn device(&self) -> &'a Device {
        self.store.compute_weights.device()
    }
}
