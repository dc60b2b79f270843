//! A trained language model in memory, to generate with: planned first, then loaded. With its tokenizer and the tokens
//! that end a text.

use std::path::Path;

use candle_core::{DType, Device};

use super::{GenerateError, Generator};
use crate::base::features::InputSpec;
use crate::base::{Backend, Role, regular_file};
use crate::data::DatasetContext;
use crate::data::language::tokenizer::{
    CharTokenizer, MAX_TOKENIZER_BYTES, Separator, Tokenizer, TokenizerSpec,
};
use crate::graph::network::StepError;
use crate::inference::session::SessionOptions;
use crate::inference::trained_model::{Origin, TrainedModel};
use crate::job::{ModelConfig, NO_REDUCTIONS, Reductions, SourceConfig};
use crate::kernels::matmul;
use crate::memory::Reservation;
use crate::memory::process::{ProcessMemory, ThreadStacks};
use crate::param_store::ParamStore;
use crate::planner::generation::{
    GenerationInputs, GenerationPlan, GenerationPlanError, GenerationRequest, plan_generation,
};
use crate::train::Failure;
use crate::train::engine::Ledgers;
use crate::train::setup::activation_dtype;
use crate::train::tensor_files::load_views;

/// The text side of a model.
pub struct ModelText {
    pub tokenizer: Tokenizer,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// Whether a prompt begins with the special tokens that the tokenizer puts before a text, as published models
    /// expect. Those trained here saw windows of text.
    adds_leading_special_tokens: bool,
}

impl ModelText {
    /// Opens `file`, or the tokenizer that the checkpoint has; `None` if it has none.
    pub fn open(
        model: &TrainedModel,
        file: Option<&Path>,
        ctx: &DatasetContext,
    ) -> Result<Option<Self>, Failure> {
        let (source, units) = (&model.job.data.source, model.tokens());
        let (kept, spec) = (model.tokenizer(), |file| TokenizerSpec::File(file).load_within_memory(ctx));
        let tokenizer = match (file, kept) {
            (Some(file), _) => spec(file.to_owned())?,
            // An export has a file for them, for other tools.
            (None, _) if units == "bytes" => Some(Tokenizer::Bytes),
            (None, Some(kept)) if units == "characters" => match read_characters(&kept) {
                Some(characters) => Some(Tokenizer::Characters(characters)),
                None => spec(kept)?,
            },
            (None, Some(kept)) => spec(kept)?,
            (None, None) => None,
        };
        let Some(tokenizer) = tokenizer else { return Ok(None) };
        let separator = match source {
            SourceConfig::Text(s) => s.separator.as_str(),
            SourceConfig::Jsonl(s) => s.separator.as_str(),
            _ => "auto",
        };
        let requested = match separator {
            "auto" | "none" => Separator::Auto,
            token => Separator::Token(token.to_owned()),
        };
        // A tokenizer from the command line need not have the job's separator.
        let end = tokenizer.separator(&requested).or_else(|_| tokenizer.separator(&Separator::Auto))?;
        let adds_leading_special_tokens = model.origin == Origin::Published;
        let end_tokens = end.into_iter().collect();
        Ok(Some(Self { tokenizer, end_tokens, adds_leading_special_tokens }))
    }

    /// The tokens of a prompt. An empty one begins where a text ends; `None` if no token says so.
    pub fn encode(&self, text: &str) -> Result<Option<Vec<u32>>, String> {
        let mut tokens = Vec::new();
        if self.adds_leading_special_tokens {
            let (ids, after) = self.tokenizer.encode_with_special_tokens(text)?;
            tokens.extend_from_slice(&ids[..ids.len() - after]);
        } else {
            self.tokenizer.encode(text, &mut tokens)?;
        }
        if tokens.is_empty() {
            tokens.extend(self.end_tokens.first());
        }
        Ok((!tokens.is_empty()).then_some(tokens))
    }
}

fn read_characters(file: &Path) -> Option<CharTokenizer> {
    CharTokenizer::from_json(&regular_file::read(file, MAX_TOKENIZER_BYTES).ok()?)
}

/// Weights in memory.
pub struct LanguageModel {
    config: ModelConfig,
    reductions: Reductions,
    vocab: usize,
    dtype: DType,
    backend: Backend,
    plan: GenerationPlan,
    store: ParamStore,
    ledgers: Ledgers,
    _reserved: Vec<Reservation>,
}

/// Positions of the model; an error that names what would work if it is no language model.
pub fn context(model: &TrainedModel) -> Result<usize, GenerateError> {
    let input = GenerationInputs {
        model: &model.job.model,
        reductions: &NO_REDUCTIONS,
        vocab: 0,
        dtype: DType::F32,
        backend: Backend::Cpu { threads: 1 },
        weight_bytes: 0,
    };
    let kind = model.job.model.kind();
    let why = "it needs a model of kind `gpt` or `llama`".to_owned();
    Ok(input.context().ok_or(GenerationPlanError::NoTextModel { kind, why })?)
}

impl LanguageModel {
    /// Plans, then loads the weights of `model`. Takes as many sequences at once as fit, up to those requested.
    pub fn load(
        model: &TrainedModel,
        request: GenerationRequest,
        options: &SessionOptions,
    ) -> Result<Self, LoadError> {
        let backend = match &options.gpu {
            gpu if options.reference => Backend::Reference { on_gpu: gpu.is_some() },
            Some(gpu) => Backend::Cuda { capability: gpu.capability },
            None => Backend::Cpu { threads: rayon::current_num_threads() },
        };
        let dtype = activation_dtype(model.job.train.precision, backend);
        let (config, reductions) = (model.job.model.clone(), Reductions::of_job(&model.job));
        let InputSpec::Tokens { vocab, .. } = model.features().input else {
            let (kind, why) = (config.kind(), "its inputs are not tokens".to_owned());
            return Err(GenerateError::from(GenerationPlanError::NoTextModel { kind, why }).into());
        };
        let inputs = GenerationInputs {
            model: &config,
            reductions: &reductions,
            vocab,
            dtype,
            backend,
            weight_bytes: 0,
        };
        let layout = inputs.layout().map_err(GenerateError::from)?;
        let weight_bytes = (layout.params.len * dtype.size_in_bytes()) as u64;
        let stacks = ThreadStacks {
            compute_threads: rayon::current_num_threads(),
            kernel_bytes: matmul::thread_stack_bytes(),
            loader_threads: 0,
        };
        let process = ProcessMemory::measure(stacks, 0).non_heap;
        let budget = match &options.gpu {
            Some(gpu) => gpu.limit,
            None => options.ram.saturating_sub(process),
        };
        let inputs = GenerationInputs { weight_bytes, ..inputs };
        let plan = plan_generation(&inputs, request, budget).map_err(GenerateError::from)?;
        // Weights are loaded one by one before there is a cache: as read, and as a tensor.
        let largest = layout.params.iter().map(|(spec, _)| spec.len()).max().unwrap_or(0);
        let loading = (2 * largest * size_of::<f32>()) as u64;
        let memory = plan.memory;
        if memory.weights + memory.fixed + loading > budget {
            let memory = crate::planner::generation::GenerationMemory { cache: 0, pass: loading, ..memory };
            return Err(GenerateError::from(GenerationPlanError::DoesNotFit { memory, budget }).into());
        }
        let ledgers = Ledgers::on(options.gpu.as_deref(), options.ram, None);
        let reserved = vec![
            ledgers.host.reserve(Role::Process, "process", process),
            ledgers.tensors.reserve(Role::Reserve, "program", memory.fixed),
            ledgers.tensors.reserve(Role::Weights, "weights", weight_bytes),
        ];
        let reserved = reserved
            .into_iter()
            .collect::<Result<_, _>>()
            .map_err(|oom| GenerateError::from(StepError::Oom(oom)))?;
        let device = options.gpu.as_ref().map_or(Device::Cpu, |gpu| gpu.device.clone());
        let store = ParamStore::for_inference(layout, dtype, &device).map_err(GenerateError::from)?;
        load_views(&model.weights, &store.layout.params, store.weight_views())?;
        Ok(Self { config, reductions, vocab, dtype, backend, plan, store, ledgers, _reserved: reserved })
    }

    pub fn plan(&self) -> &GenerationPlan {
        &self.plan
    }

    /// Allocates the cache.
    pub fn generator(&self) -> Result<Generator<'_>, GenerateError> {
        let inputs = GenerationInputs {
            model: &self.config,
            reductions: &self.reductions,
            vocab: self.vocab,
            dtype: self.dtype,
            backend: self.backend,
            weight_bytes: self.plan.memory.weights,
        };
        Generator::new(inputs, self.plan, &self.store, &self.ledgers.tensors)
    }
}

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Failure(#[from] Failure),
}
