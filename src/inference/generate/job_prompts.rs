//! The prompts that a job names in `eval.prompts`, continued by its trained model: the contents of `generated.json`.
//!
//! Generation plans its own memory. What prevents it is part of the result: the run is complete without it.

use std::error::Error;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::continuation::continue_prompts;
use super::language_model::{LanguageModel, LoadError, ModelText, context};
use super::sampler::Sampling;
use super::{FinishReason, GenerateError, GenerationOptions, PromptLimits};
use crate::base::regular_file;
use crate::data::DatasetContext;
use crate::inference::session::SessionOptions;
use crate::inference::trained_model::TrainedModel;
use crate::job::EvalConfig;
use crate::planner::generation::GenerationRequest;
use crate::train::Failure;
use crate::train::run_dir::write_atomic;

/// Upper bound on the size of the file.
const MAX_BYTES: u64 = 64 << 20;

/// The texts of one checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratedTexts {
    /// Updates of the checkpoint.
    pub step: u64,
    /// New tokens per prompt at most.
    pub max_tokens: usize,
    /// In the order of the job's prompts.
    pub texts: Vec<GeneratedText>,
    /// Why prompts, or all of them, have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratedText {
    pub prompt: String,
    /// What follows the prompt.
    pub text: String,
    pub finish: FinishReason,
}

#[derive(Debug, thiserror::Error)]
enum PromptError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Failure(#[from] Failure),
    #[error("the run has no tokenizer")]
    NoTokenizer,
    #[error("prompt {number}: {problem}")]
    Prompt { number: usize, problem: String },
}

impl GeneratedTexts {
    /// Continues the prompts of `eval`. They may be others than those of the checkpoint's job: a resumed run may change
    /// them.
    pub fn generate(
        model: &TrainedModel,
        eval: &EvalConfig,
        options: &SessionOptions,
        ctx: &DatasetContext,
    ) -> Self {
        let (step, max_tokens) = (model.step, eval.prompt_tokens);
        match texts(model, eval, options, ctx) {
            Ok((texts, refused)) => {
                let refused: Vec<String> = refused.iter().map(PromptError::to_string).collect();
                let error = (!refused.is_empty()).then(|| refused.join("; "));
                Self { step, max_tokens, texts, error }
            }
            Err(error) => {
                let causes = std::iter::successors(error.source(), |cause| (*cause).source());
                let error = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
                Self { step, max_tokens, texts: Vec::new(), error: Some(error) }
            }
        }
    }

    /// `None` if there is none that can be read.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&regular_file::read(path, MAX_BYTES).ok()?).ok()
    }

    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_vec_pretty(self).map_err(std::io::Error::from);
        write_atomic(path, &text.map_err(Failure::io("write", path))?)
    }

    /// Whether these are the texts of this step for the prompts of `eval`.
    pub fn are_of(&self, step: u64, eval: &EvalConfig) -> bool {
        let same = self.texts.iter().map(|text| &text.prompt).eq(&eval.prompts);
        same && (self.step, self.max_tokens) == (step, eval.prompt_tokens)
    }
}

fn texts(
    model: &TrainedModel,
    eval: &EvalConfig,
    options: &SessionOptions,
    ctx: &DatasetContext,
) -> Result<(Vec<GeneratedText>, Vec<PromptError>), PromptError> {
    let max_tokens = eval.prompt_tokens;
    let context = context(model)?;
    let text = ModelText::open(model, None, ctx)?.ok_or(PromptError::NoTokenizer)?;
    let limits = PromptLimits { context, max_tokens: 1, truncate: false };
    let tokens = |(i, prompt): (usize, &String)| {
        let refused = |problem| PromptError::Prompt { number: i + 1, problem };
        let encoded =
            text.encode(prompt).map_err(|problem| refused(format!("it cannot be encoded: {problem}")))?;
        let mut tokens = encoded.ok_or_else(|| refused("it is empty, and no token begins a text".into()))?;
        limits.fit(&mut tokens).map_err(|error| refused(error.to_string()))?;
        Ok(tokens)
    };
    let (mut prompts, mut encoded, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for (i, prompt) in eval.prompts.iter().enumerate() {
        match tokens((i, prompt)) {
            Ok(tokens) => {
                prompts.push(prompt);
                encoded.push(tokens);
            }
            Err(error) => refused.push(error),
        }
    }
    let tokens = encoded;
    if tokens.is_empty() {
        return Ok((Vec::new(), refused));
    }
    let longest = tokens.iter().map(Vec::len).max().unwrap_or(1);
    let request = GenerationRequest {
        sequences: tokens.len().min(options.max_micro_batch).max(1),
        longest_prompt: longest,
        longest_sequence: (longest + max_tokens).min(context),
    };
    let loaded = LanguageModel::load(model, request, options)?;
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let end_tokens = text.end_tokens.clone();
    let generation = GenerationOptions { sampling: greedy, max_tokens, end_tokens };
    let mut generator = loaded.generator()?;
    let done = continue_prompts(&mut generator, &tokens, &generation, &text, &[], &mut |_, _| true)?;
    let text = |(prompt, one): (&&String, super::Continuation)| GeneratedText {
        prompt: (*prompt).clone(),
        text: one.text,
        finish: one.generation.reason,
    };
    Ok((prompts.iter().zip(done).map(text).collect(), refused))
}
