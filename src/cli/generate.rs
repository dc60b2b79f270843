//! `trainer generate`: text of a trained language model, for a prompt, a file of prompts, or in a conversation.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::eval::{ModelArgs, opening, session_options};
use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::base::regular_file;
use crate::base::units::{Bytes, counted};
use crate::graph::network::StepError;
use crate::inference::generate::language_model::{LanguageModel, LoadError, ModelText, context};
use crate::inference::generate::sampler::Sampling;
use crate::inference::generate::{
    ChatError, Continuation, Conversation, GenerateError, GenerationOptions, Generator, PromptLimits,
    PromptTooLong, continuation,
};
use crate::inference::trained_model::TrainedModel;
use crate::planner::generation::{GenerationPlanError, GenerationRequest};

/// New tokens per prompt where nothing else is asked for.
const DEFAULT_MAX_TOKENS: usize = 256;

/// Bytes of a file of prompts at most; all of them are read at once.
const MAX_PROMPT_FILE_BYTES: u64 = 256 << 20;

/// Prompts per slot that are generated before their texts are written.
const PROMPTS_PER_SLOT: usize = 8;

/// Generate text with a trained language model
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer generate RUN --prompt \"Once upon a time\"
  trainer generate RUN --prompt \"Once\" --temperature 0            the most probable text
  trainer generate RUN --prompts prompts.txt --json > out.jsonl   a prompt per line, in batches
  trainer generate RUN --chat                                     a conversation")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub input: PromptArgs,
    #[command(flatten)]
    pub conversation: ChatArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// New tokens per prompt at most [default: 256, or what the context leaves]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// End the text before this string; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Keep the end of a prompt that is too long; a conversation forgets its oldest turns
    #[arg(long)]
    pub truncate_prompt: bool,
    /// The tokenizer of a model that was trained on token ids
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub tokenizer: Option<PathBuf>,
    /// Prompts at once at most; fewer if memory is short
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
}

/// What to continue.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false, args = ["prompt", "prompts", "chat"])]
pub struct PromptArgs {
    /// Text to continue; only what follows it is printed
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File of prompts: a line each, or with the extension .jsonl a JSON object with `prompt` each
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub prompts: Option<PathBuf>,
    /// Answer line by line, with the chat template of the run
    #[arg(long)]
    pub chat: bool,
}

/// How a conversation begins and is written.
#[derive(Clone, Debug, Args)]
pub struct ChatArgs {
    /// What the system message of the conversation says
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Chat template instead of the run's: chatml, llama2, llama3, gemma, plain, auto, or a Jinja template
    #[arg(long, value_name = "TEMPLATE", requires = "chat")]
    pub template: Option<String>,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Args)]
pub struct SamplingArgs {
    /// Randomness: 0 takes the most probable token, 1 draws from the model's distribution
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub temperature: f64,
    /// Draw from this many of the most probable tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw from the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Draw from tokens at least this probable, relative to the most probable
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f64,
    /// Make tokens that occurred less probable, above 1
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Seed of the draws: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        Self {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            seed: args.seed,
        }
    }
}

/// Tokens and seconds so far.
#[derive(Default)]
struct Throughput {
    tokens: usize,
    seconds: f64,
}

impl GenerateArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let sampling = Sampling::from(self.sampling);
        sampling.check().map_err(|error| generate_error(error.into()))?;
        let model = self.model.open(common)?;
        start_threads()?;
        let context = context(&model).map_err(generate_error)?;
        let options = session_options(common, &model, self.batch_size)?;
        let text = ModelText::open(&model, self.tokenizer.as_deref(), &opening(common, &model, options.ram))?;
        let text = text.ok_or_else(no_tokenizer)?;
        let max_tokens = self.max_tokens.map_or(DEFAULT_MAX_TOKENS, |n| n as usize);
        let limits = PromptLimits {
            context,
            // Without a stated number, any prompt that leaves room for one token is accepted.
            max_tokens: self.max_tokens.map_or(1, |n| n as usize),
            truncate: self.truncate_prompt,
        };
        let end_tokens = text.end_tokens.clone();
        let generation = GenerationOptions { sampling, max_tokens, end_tokens };
        let prompts = self.prompts()?;
        let mut tokens = Vec::with_capacity(prompts.len());
        for (i, prompt) in prompts.iter().enumerate() {
            tokens
                .push(prompt_tokens(prompt, &text, &limits).map_err(|error| at_prompt(error, i, &prompts))?);
        }
        let longest = match self.input.chat {
            true => limits.most(),
            false => tokens.iter().map(Vec::len).max().unwrap_or(1),
        };
        let sequences =
            if self.input.prompts.is_some() { options.max_micro_batch.min(tokens.len()) } else { 1 };
        let request = GenerationRequest {
            sequences,
            longest_prompt: longest.max(1),
            longest_sequence: (longest + max_tokens).min(context),
        };
        let loaded = LanguageModel::load(&model, request, &options).map_err(load_error)?;
        if common.verbose {
            let (plan, memory) = (loaded.plan(), loaded.plan().memory);
            eprintln!(
                "memory {}: weights {}, key-value cache {} ({} x {} tokens), passes {}",
                Bytes(memory.total()),
                Bytes(memory.weights),
                Bytes(memory.cache),
                plan.slots,
                plan.capacity,
                Bytes(memory.pass)
            );
        }
        let mut generator = loaded.generator().map_err(generate_error)?;
        let mut throughput = Throughput::default();
        match (&self.input.prompts, self.input.chat) {
            (_, true) => self.chat(&model, &text, &generation, limits, &mut generator, &mut throughput)?,
            (Some(_), _) => {
                self.file(common, &text, &generation, (&prompts, &tokens), &mut generator, &mut throughput)?
            }
            (None, _) => {
                let show = |part: &str| common.json || print_part(part).is_ok();
                let one = continue_prompts(
                    &mut generator,
                    &tokens,
                    &generation,
                    &text,
                    &self.stop,
                    &mut |_, part| show(part),
                    &mut throughput,
                )?;
                match common.json {
                    true => print_json(0, &prompts, &one)?,
                    false => print_line("")?,
                }
            }
        }
        if !common.quiet && throughput.seconds > 0.0 {
            let Throughput { tokens, seconds } = throughput;
            let (count, rate) = (counted(tokens as u64, "token"), tokens as f64 / seconds);
            eprintln!("{count} in {seconds:.1} s, {rate:.1} tokens/s");
        }
        Ok(Exit::Done)
    }

    /// The prompts, in order; none for a conversation.
    fn prompts(&self) -> anyhow::Result<Vec<String>> {
        match (&self.input.prompt, &self.input.prompts) {
            (Some(prompt), _) => Ok(vec![prompt.clone()]),
            (None, Some(file)) => read_prompts(file),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Continues the prompts of a file, some at a time.
    fn file(
        &self,
        common: &CommonArgs,
        text: &ModelText,
        options: &GenerationOptions,
        (prompts, tokens): (&[String], &[Vec<u32>]),
        generator: &mut Generator,
        throughput: &mut Throughput,
    ) -> anyhow::Result<()> {
        let at_once = PROMPTS_PER_SLOT * generator.plan().slots;
        for (i, group) in tokens.chunks(at_once).enumerate() {
            let first = i * at_once;
            let done =
                continue_prompts(generator, group, options, text, &self.stop, &mut |_, _| true, throughput)?;
            if common.json {
                print_json(first, prompts, &done)?;
                continue;
            }
            for (prompt, one) in prompts[first..].iter().zip(&done) {
                print_line(format_args!("{prompt}{}\n---", one.text))?;
            }
        }
        Ok(())
    }

    /// Answers each line of stdin until it ends.
    fn chat(
        &self,
        model: &TrainedModel,
        text: &ModelText,
        options: &GenerationOptions,
        limits: PromptLimits,
        generator: &mut Generator,
        throughput: &mut Throughput,
    ) -> anyhow::Result<()> {
        let template = self.conversation.template.as_ref().or(model.preprocessing.template.as_ref());
        let template = template.ok_or_else(no_template)?;
        let system = self.conversation.system.as_deref();
        let new = || Conversation::new(template, &text.tokenizer, system, limits, MAX_PROMPT_FILE_BYTES);
        let mut talk = new().map_err(chat_error)?;
        let stops = [&self.stop[..], &talk.stop_strings()].concat();
        let interactive = io::stdin().is_terminal();
        if interactive {
            eprintln!("/reset begins a new conversation, Ctrl-D ends it");
        }
        let mut lines = io::stdin().lock().lines();
        loop {
            if interactive {
                eprint!("> ");
            }
            let Some(line) = lines.next().transpose()? else { return Ok(()) };
            match line.trim() {
                "" => continue,
                "/reset" => {
                    talk = new().map_err(chat_error)?;
                    continue;
                }
                _ => {}
            }
            let prompt = talk.ask(&line).map_err(chat_error)?;
            let mut show = |_, part: &str| print_part(part).is_ok();
            let answer =
                continue_prompts(generator, &[prompt], options, text, &stops, &mut show, throughput)?;
            print_line("")?;
            answer.iter().for_each(|answer| talk.answer(answer.text.trim()));
        }
    }
}

/// Continues prompts, passes on their text as it comes, and counts its tokens.
fn continue_prompts(
    generator: &mut Generator,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    text: &ModelText,
    stops: &[String],
    show: &mut (dyn FnMut(usize, &str) -> bool + Send),
    throughput: &mut Throughput,
) -> anyhow::Result<Vec<Continuation>> {
    let begun = Instant::now();
    let done = continuation::continue_prompts(generator, prompts, options, text, stops, show);
    let done = done.map_err(generate_error)?;
    throughput.tokens += done.iter().map(|one| one.generation.tokens.len()).sum::<usize>();
    throughput.seconds += begun.elapsed().as_secs_f64();
    Ok(done)
}

/// The tokens of a prompt, within the limits.
fn prompt_tokens(prompt: &str, text: &ModelText, limits: &PromptLimits) -> Result<Vec<u32>, CliError> {
    let tokens = text.encode(prompt).map_err(|problem| CliError {
        exit: Exit::Data,
        message: format!("the tokenizer cannot encode the prompt: {problem}"),
        hint: Some("a model of characters knows only those it was trained on".into()),
    })?;
    let mut tokens = tokens.ok_or_else(|| {
        CliError::usage(
            "the prompt is empty",
            "the tokenizer has no token that begins a text: give a first word",
        )
    })?;
    limits.fit(&mut tokens).map_err(too_long)?;
    Ok(tokens)
}

/// The error with the number of its prompt, if there are several.
fn at_prompt(error: CliError, index: usize, prompts: &[String]) -> CliError {
    match prompts.len() {
        1 => error,
        _ => CliError { message: format!("prompt {}: {}", index + 1, error.message), ..error },
    }
}

fn read_prompts(file: &Path) -> anyhow::Result<Vec<String>> {
    let unreadable = |problem: String| CliError {
        exit: Exit::Data,
        message: format!("cannot read the prompts in `{}`: {problem}", file.display()),
        hint: Some("expected UTF-8 text with a prompt per line, or .jsonl with a `prompt` per object".into()),
    };
    let text = regular_file::read_to_string(file, MAX_PROMPT_FILE_BYTES)
        .map_err(|error| unreadable(error.to_string()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let is_json = file.extension().is_some_and(|extension| extension == "jsonl");
    let prompt = |(i, line): (usize, &str)| match is_json {
        false => Ok(line.to_owned()),
        true => {
            let record: serde_json::Value =
                serde_json::from_str(line).map_err(|error| unreadable(format!("line {}: {error}", i + 1)))?;
            let prompt = record["prompt"].as_str().map(str::to_owned);
            prompt.ok_or_else(|| unreadable(format!("line {} has no text in `prompt`", i + 1)))
        }
    };
    let prompts: Vec<String> = lines.map(prompt).collect::<Result<_, _>>()?;
    match prompts.is_empty() {
        true => Err(unreadable("it has none".into()).into()),
        false => Ok(prompts),
    }
}

fn print_part(part: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(part.as_bytes())?;
    out.flush()
}

fn print_json(first: usize, prompts: &[String], done: &[Continuation]) -> io::Result<()> {
    for (i, one) in done.iter().enumerate() {
        print_line(json!({
            "index": first + i,
            "prompt": prompts[first + i],
            "text": one.text,
            "tokens": one.generation.tokens.len(),
            "finish": one.generation.reason,
        }))?;
    }
    Ok(())
}

fn no_tokenizer() -> CliError {
    CliError::usage(
        "the run has no tokenizer: it was trained on token ids",
        "give the one that made them with `--tokenizer FILE`",
    )
}

fn no_template() -> CliError {
    CliError::usage(
        "the run has no chat template",
        "choose one with `--template`: chatml, llama2, llama3, gemma, plain or auto",
    )
}

fn too_long(error: PromptTooLong) -> CliError {
    CliError::usage(error.to_string(), error.hint())
}

fn chat_error(error: ChatError) -> anyhow::Error {
    match error {
        ChatError::TooLong(error) => too_long(error).into(),
        ChatError::Template(error) => crate::train::Failure::from(error).into(),
        other => CliError { exit: Exit::Data, message: other.to_string(), hint: None }.into(),
    }
}

fn load_error(error: LoadError) -> anyhow::Error {
    match error {
        LoadError::Failure(failure) => failure.into(),
        LoadError::Generate(error) => generate_error(error),
    }
}

fn generate_error(error: GenerateError) -> anyhow::Error {
    let (exit, hint) = match &error {
        GenerateError::Sampling(_) => (Exit::Usage, None),
        GenerateError::Plan(GenerationPlanError::DoesNotFit { .. })
        | GenerateError::Step(StepError::Oom(_)) => (
            Exit::Memory,
            Some("raise `memory.ram` or `memory.vram` by `--set`, or generate fewer tokens (`--max-tokens`)"),
        ),
        GenerateError::Plan(GenerationPlanError::NoTextModel { .. }) => {
            (Exit::Usage, Some("`trainer predict` runs models of other kinds"))
        }
        GenerateError::Plan(GenerationPlanError::Context { .. }) => (Exit::Usage, None),
        GenerateError::UnknownToken { .. } => {
            (Exit::Data, Some("the tokenizer is not the one that the model was trained with"))
        }
        GenerateError::NotFinite { .. } => {
            (Exit::Diverged, Some("the weights are not finite, or too large for their dtype"))
        }
        GenerateError::Step(_)
        | GenerateError::Layout(_)
        | GenerateError::EmptyPrompt { .. }
        | GenerateError::Capacity { .. } => (Exit::Failure, None),
    };
    CliError { exit, message: error.to_string(), hint: hint.map(str::to_owned) }.into()
}
