//! Generation with the cache against the full forward pass of the network that was trained.

use candle_core::{DType, Tensor};
use proptest::prelude::*;

use super::*;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::job::ModelConfig;
use crate::layers::gradcheck::{TestContext, is_reference_under_test, test_device, test_spec};
use crate::models::{BuiltModel, build};
use crate::planner::generation::{GenerationRequest, plan_generation};

const VOCAB: usize = 37;
const CONTEXT: usize = 24;

const GPT: &str = "kind = 'gpt'\nlayers = 3\nheads = 2\nwidth = 16\ncontext = 24\ndropout = 0.2";
const LLAMA: &str =
    "kind = 'llama'\nlayers = 2\nheads = 6\nkv_heads = 2\nwidth = 24\nhidden = 40\ncontext = 24\ntie = true";

struct Subject {
    model: ModelConfig,
    dtype: DType,
    weights: TestContext,
}

impl Subject {
    fn new(model: &str, dtype: DType) -> Self {
        let model: ModelConfig = toml::from_str(model).unwrap();
        let weights = TestContext::with_layout(Self::build(&model, CONTEXT).layout, dtype, 1);
        Self { model, dtype, weights }
    }

    fn build(model: &ModelConfig, length: usize) -> BuiltModel {
        let input = InputSpec::Tokens { length, vocab: VOCAB };
        build(model, &Features::new(input, TargetSpec::Tokens)).unwrap()
    }

    fn inputs(&self) -> GenerationInputs<'_> {
        let backend = test_spec(1, self.dtype).backend;
        let (reductions, dtype) = (&crate::job::NO_REDUCTIONS, self.dtype);
        GenerationInputs { model: &self.model, reductions, vocab: VOCAB, dtype, backend, weight_bytes: 0 }
    }

    /// The plan for these sizes, with the chunk shortened to `chunk`.
    fn plan(&self, slots: usize, capacity: usize, chunk: usize) -> GenerationPlan {
        let request =
            GenerationRequest { sequences: slots, longest_prompt: capacity, longest_sequence: capacity };
        let plan = plan_generation(&self.inputs(), request, u64::MAX).unwrap();
        GenerationPlan { chunk, ..plan }
    }

    /// Logits of every position of `tokens` by the network as evaluation runs it.
    fn full_logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let spec = test_spec(1, self.dtype);
        let built = Self::build(&self.model, tokens.len());
        let network = built.network.for_backend(spec, &built.layout.params);
        let ledger = Ledger::new(u64::MAX, None);
        let pass = Some(self.weights.pass(Mode::Eval));
        let exec = Executor::new(pass, spec, &ledger);
        let ids = Tensor::new(tokens, &test_device()).unwrap().unsqueeze(0).unwrap();
        let all: Vec<u32> = (0..tokens.len() as u32).collect();
        let logits = network.logits_at(&exec, Some(&ids), &all, VOCAB).unwrap();
        logits.chunks(VOCAB).map(<[f32]>::to_vec).collect()
    }

    /// Checks that each token is the most probable one after those before it, or within `tie` of it.
    fn check_greedy(&self, prompt: &[u32], generated: &[u32], tie: f32) {
        let all = [prompt, generated].concat();
        let logits = self.full_logits(&all[..all.len() - 1]);
        for (i, token) in generated.iter().enumerate() {
            let logits = &logits[prompt.len() - 1 + i];
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scale = logits.iter().fold(0f32, |m, l| m.max(l.abs()));
            let got = logits[*token as usize];
            assert!(top - got <= tie * scale, "token {i} of {}: {got} below {top}", generated.len());
        }
    }
}

fn greedy(max_tokens: usize) -> GenerationOptions {
    GenerationOptions { sampling: Sampling::greedy(), max_tokens, end_tokens: Vec::new() }
}

fn prompts(lengths: &[usize]) -> Vec<Vec<u32>> {
    let token = |i: usize, j: usize| ((i * 11 + j * j * 7 + j * 3 + 5) % VOCAB) as u32;
    lengths.iter().enumerate().map(|(i, n)| (0..*n).map(|j| token(i, j)).collect()).collect()
}

/// The dtypes of the backend under test, each with the fraction of the largest logit that counts as a tie.
fn dtypes() -> Vec<(DType, f32)> {
    match is_reference_under_test() {
        true => vec![(DType::F32, 1e-5)],
        false => vec![(DType::F32, 1e-5), (DType::BF16, 4e-2)],
    }
}

#[test]
fn greedy_generation_equals_the_full_forward_pass() {
    for model in [GPT, LLAMA] {
        for (dtype, tie) in dtypes() {
            let subject = Subject::new(model, dtype);
            for chunk in [1, 4, 16] {
                let prompts = prompts(&[5, 1, 14, 9, 2]);
                let ledger = Ledger::new(1 << 30, None);
                let plan = subject.plan(3, CONTEXT, chunk);
                let mut generator =
                    Generator::new(subject.inputs(), plan, &subject.weights.store, &ledger).unwrap();
                let results = generator.generate(&prompts, &greedy(9), &mut |_, _| true).unwrap();
                for (prompt, result) in prompts.iter().zip(&results) {
                    assert_eq!((result.tokens.len(), result.reason), (9, FinishReason::MaxTokens));
                    subject.check_greedy(prompt, &result.tokens, tie);
                }
                drop(generator);
                assert_eq!(ledger.reserved(), 0);
            }
        }
    }
}

/// The logits themselves, not only their order: every position, whatever the chunk and whoever else is in the batch.
#[test]
fn logits_with_the_cache_equal_those_of_the_full_forward_pass() {
    for model in [GPT, LLAMA] {
        for (dtype, tolerance) in dtypes() {
            let subject = Subject::new(model, dtype);
            let prompts = prompts(&[13, 7, 13]);
            for chunk in [1, 2, 8] {
                let ledger = Ledger::new(1 << 30, None);
                let plan = subject.plan(4, 16, chunk);
                let mut generator =
                    Generator::new(subject.inputs(), plan, &subject.weights.store, &ledger).unwrap();
                for first in (0..13).step_by(chunk) {
                    let part = |slot: usize| {
                        let tokens = prompts[slot].get(first..)?;
                        let tokens = &tokens[..chunk.min(tokens.len())];
                        (!tokens.is_empty()).then_some(PassRow { slot, tokens, wants_logits: slot != 2 })
                    };
                    let rows: Vec<PassRow> = [1, 2, 0].into_iter().filter_map(part).collect();
                    let logits = generator.run_pass(&rows).unwrap();
                    let wanted: Vec<&PassRow> = rows.iter().filter(|row| row.wants_logits).collect();
                    assert_eq!(logits.len(), wanted.len() * VOCAB);
                    for (row, logits) in wanted.iter().zip(logits.chunks(VOCAB)) {
                        let end = first + row.tokens.len();
                        let full = subject.full_logits(&prompts[row.slot][..end]);
                        let scale = full[end - 1].iter().fold(0f32, |m, l| m.max(l.abs()));
                        for (a, b) in logits.iter().zip(&full[end - 1]) {
                            assert!((a - b).abs() <= tolerance * scale, "{dtype:?}, chunk {chunk}: {a}, {b}");
                        }
                    }
                }
            }
        }
    }
}

/// More prompts than slots, ends at different times, and a cache that slots leave to their successors.
#[test]
fn a_sequence_does_not_depend_on_those_beside_it() {
    let subject = Subject::new(LLAMA, DType::F32);
    let prompts = prompts(&[3, 8, 1, 12, 6, 2, 9]);
    let sampling = Sampling { temperature: 1.5, top_k: Some(20), seed: 7, ..Sampling::default() };
    let options = GenerationOptions { sampling, max_tokens: 10, end_tokens: vec![3, 4] };
    let ledger = Ledger::new(1 << 30, None);
    let run = |slots: usize, prompts: &[Vec<u32>]| {
        let plan = subject.plan(slots, CONTEXT, 4);
        let mut generator = Generator::new(subject.inputs(), plan, &subject.weights.store, &ledger).unwrap();
        let mut seen = vec![Vec::new(); prompts.len()];
        let results = generator.generate(prompts, &options, &mut |prompt, token| {
            seen[prompt].push(token);
            // Ends one of them early.
            !(prompts.len() > 1 && prompt == 4)
        });
        let results = results.unwrap();
        assert!(results.iter().zip(&seen).all(|(result, seen)| result.tokens == *seen), "all were reported");
        results
    };
    let together = run(3, &prompts);
    assert_eq!((together[4].tokens.len(), together[4].reason), (1, FinishReason::Stopped));
    assert!(together.iter().any(|result| result.reason == FinishReason::EndToken), "{together:?}");
    for (i, prompt) in prompts.iter().enumerate() {
        let alone = run(1, std::slice::from_ref(prompt)).remove(0);
        match i {
            4 => assert_eq!(alone.tokens[..1], together[i].tokens),
            _ => assert_eq!(alone, together[i], "prompt {i}"),
        }
    }
    let one_slot = run(1, &prompts);
    assert_eq!(one_slot, together);
}

#[test]
fn a_prompt_continues_from_what_is_cached() {
    let subject = Subject::new(GPT, DType::F32);
    let ledger = Ledger::new(1 << 30, None);
    let new = || {
        Generator::new(subject.inputs(), subject.plan(1, CONTEXT, 4), &subject.weights.store, &ledger)
            .unwrap()
    };
    let mut chat = new();
    let mut talk = prompts(&[6]).remove(0);
    for turn in 0..3 {
        let answer = chat.generate(&[talk.clone()], &greedy(3), &mut |_, _| true).unwrap().remove(0);
        let fresh = new().generate(&[talk.clone()], &greedy(3), &mut |_, _| true).unwrap().remove(0);
        assert_eq!(answer, fresh, "turn {turn}");
        // The last token of an answer was never fed.
        assert_eq!(chat.cache.length(0), talk.len() + 2);
        talk.extend(&answer.tokens);
        talk.push(turn);
    }
    // Another beginning shares nothing with the cache.
    talk[0] = (talk[0] + 1) % VOCAB as u32;
    let answer = chat.generate(&[talk.clone()], &greedy(3), &mut |_, _| true).unwrap().remove(0);
    subject.check_greedy(&talk, &answer.tokens, 1e-5);
}

#[test]
fn the_context_ends_a_sequence() {
    let subject = Subject::new(LLAMA, DType::F32);
    let ledger = Ledger::new(1 << 30, None);
    let mut generator =
        Generator::new(subject.inputs(), subject.plan(2, CONTEXT, 8), &subject.weights.store, &ledger)
            .unwrap();
    let prompts = prompts(&[CONTEXT, CONTEXT - 3]);
    let results = generator.generate(&prompts, &greedy(100), &mut |_, _| true).unwrap();
    let ends: Vec<_> = results.iter().map(|result| (result.tokens.len(), result.reason)).collect();
    assert_eq!(ends, [(1, FinishReason::Context), (4, FinishReason::Context)]);
    subject.check_greedy(&prompts[1], &results[1].tokens, 1e-5);
    let none = generator.generate(&prompts, &greedy(0), &mut |_, _| true).unwrap();
    assert!(none.iter().all(|result| result.tokens.is_empty()));
}

#[test]
fn prompts_that_cannot_run_are_refused_before_anything_does() {
    let subject = Subject::new(GPT, DType::F32);
    let ledger = Ledger::new(1 << 30, None);
    let mut generator =
        Generator::new(subject.inputs(), subject.plan(2, 8, 8), &subject.weights.store, &ledger).unwrap();
    let mut error = |prompts: &[Vec<u32>]| {
        let result = generator.generate(prompts, &greedy(1), &mut |_, _| panic!("nothing is generated"));
        result.unwrap_err().to_string()
    };
    assert_eq!(error(&[vec![1], vec![]]), "prompt 1 has no tokens");
    assert_eq!(error(&[vec![1; 9]]), "prompt 0 has 9 tokens, and the key-value cache was planned for 8");
    assert_eq!(error(&[vec![99]]), "token 99 of prompt 0 is not in the vocabulary, which has 37");
}

#[test]
fn weights_of_another_model_are_refused() {
    let (gpt, llama) = (Subject::new(GPT, DType::F32), Subject::new(LLAMA, DType::F32));
    let ledger = Ledger::new(1 << 30, None);
    let error = Generator::new(gpt.inputs(), gpt.plan(1, 8, 8), &llama.weights.store, &ledger).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("`transformer.wte.weight` [37, 16]"), "{text}");
    let longer = Subject::new(&GPT.replace("context = 24", "context = 25"), DType::F32);
    let error =
        Generator::new(gpt.inputs(), gpt.plan(1, 8, 8), &longer.weights.store, &ledger).err().unwrap();
    assert!(error.to_string().contains("`transformer.wpe.weight` [24, 16]"), "{error}");
}

/// The planned bytes are what the ledger sees, for any sizes: with that budget generation succeeds, and its peak is it.
#[test]
fn generation_holds_what_its_plan_says() {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
    let sizes = (1usize..4, 1usize..12, 1usize..8, any::<bool>());
    runner
        .run(&sizes, |(sequences, prompt, new, gpt)| {
            let subject = Subject::new(if gpt { GPT } else { LLAMA }, DType::F32);
            let request =
                GenerationRequest { sequences, longest_prompt: prompt, longest_sequence: prompt + new };
            let plan = plan_generation(&subject.inputs(), request, u64::MAX).unwrap();
            let memory = plan.memory;
            let ledger = Ledger::new(memory.total(), None);
            let _fixed = ledger.reserve(Role::Reserve, "program", memory.fixed).unwrap();
            let mut generator =
                Generator::new(subject.inputs(), plan, &subject.weights.store, &ledger).unwrap();
            generator.generate(&prompts(&vec![prompt; sequences]), &greedy(new), &mut |_, _| true).unwrap();
            let used = ledger.peak();
            prop_assert!(used <= memory.total());
            // The chunk may be longer than what is left of a prompt.
            prop_assert!(prompt < plan.chunk || used == memory.total(), "{used} of {}", memory.total());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_chunk_that_does_not_fit_runs_in_smaller_ones() {
    let subject = Subject::new(LLAMA, DType::F32);
    let prompts = prompts(&[16, 11]);
    let unlimited = Ledger::new(1 << 30, None);
    let run = |plan: GenerationPlan, ledger: &Ledger| {
        let mut generator = Generator::new(subject.inputs(), plan, &subject.weights.store, ledger).unwrap();
        let results = generator.generate(&prompts, &greedy(4), &mut |_, _| true).unwrap();
        (results, generator.plan().chunk)
    };
    let plan = subject.plan(2, CONTEXT, 16);
    let (expected, _) = run(plan, &unlimited);
    let small = subject.inputs().memory(2, CONTEXT, 4).unwrap();
    let tight = Ledger::new(small.cache + small.pass + (8 << 10), None);
    let (results, chunk) = run(plan, &tight);
    assert!(chunk < 16, "{chunk}");
    assert_eq!(results, expected);
}
