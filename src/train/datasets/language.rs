//! Language datasets from files: text, token ids and JSONL records.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::setup::bad_record_policy;
use super::inference::{Samples, TrainedModelData, one_of};
use super::{Datasets, Failure, Source, context, file_inputs, split_settings};
use crate::base::features::TargetSpec;
use crate::base::regular_file;
use crate::data::fingerprint::FingerprintInput;
use crate::data::language::token_storage::TokenWidth;
use crate::data::language::token_windows::{WindowPlacement, WindowSets};
use crate::data::language::tokenizer::{Separator, TokenizerSpec, settings_beside};
use crate::data::language::{jsonl, text, token_files};
use crate::data::transforms::Augmentation;
use crate::data::{DataError, Dataset, DatasetContext};
use crate::job::{self, Job};

const TOKENIZER: &str = "data.tokenizer";

impl Source for job::TextConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let settings = text::TextSettings {
            train: self.files.train.clone(),
            valid: self.files.valid.clone(),
            test: self.files.test.clone(),
            split: split_settings(job, &self.files),
            tokenizer: units(&self.tokens),
            separator: separator(&self.separator),
            context: context(job)?,
            placement: placement(self.windows),
        };
        let WindowSets { train, valid, test } = text::open(&settings, opening)?;
        Ok(Datasets::new(train, valid, test))
    }

    fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        Ok([file_inputs(&self.files)?, tokens_inputs(&self.tokens)].concat())
    }

    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        _augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let mut source = self.clone();
        samples.replace_files(&mut source.files);
        trained.replace_tokenizer(&mut source.tokens);
        source.windows = job::WindowMode::Fixed;
        one_of(source.open(trained.job, opening)?, samples.set())
    }
}

impl Source for job::TokensConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let settings = token_files::TokenFileSettings {
            train: self.files.train.clone(),
            valid: self.files.valid.clone(),
            test: self.files.test.clone(),
            split: split_settings(job, &self.files),
            width: match self.dtype {
                job::TokenDtype::Auto => None,
                job::TokenDtype::U8 => Some(TokenWidth::U8),
                job::TokenDtype::U16 => Some(TokenWidth::U16),
                job::TokenDtype::U32 => Some(TokenWidth::U32),
                job::TokenDtype::U64 => Some(TokenWidth::U64),
            },
            vocab: self.vocab,
            tokenizer: self.tokenizer.clone(),
            context: context(job)?,
            placement: placement(self.windows),
        };
        let WindowSets { train, valid, test } = token_files::open(&settings, opening)?;
        Ok(Datasets::new(train, valid, test))
    }

    fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        let tokenizer = self.tokenizer.iter().flat_map(|file| tokenizer_inputs(TOKENIZER, file));
        Ok(file_inputs(&self.files)?.into_iter().chain(tokenizer).collect())
    }

    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        _augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let mut source = self.clone();
        samples.replace_files(&mut source.files);
        source.windows = job::WindowMode::Fixed;
        one_of(source.open(trained.job, opening)?, samples.set())
    }
}

impl Source for job::JsonlConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        open_jsonl(self, job, None, false, opening)
    }

    fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        let more = [tokens_inputs(&self.tokens), template_inputs(&self.template)];
        Ok([file_inputs(&self.files)?, more.concat()].concat())
    }

    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        _augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let mut source = self.clone();
        samples.replace_files(&mut source.files);
        trained.replace_tokenizer(&mut source.tokens);
        if let Some(template) = &trained.preprocessing.template {
            source.template.clone_from(template);
        }
        let (target, unlabelled) =
            (&trained.preprocessing.features.target, matches!(samples, Samples::Unlabelled(_)));
        one_of(open_jsonl(&source, trained.job, Some(target), unlabelled, opening)?, samples.set())
    }
}

/// The sets of `s`, with the target of a trained model, if there is one. `unlabelled`: the records have no labels.
fn open_jsonl(
    s: &job::JsonlConfig,
    job: &Job,
    target: Option<&TargetSpec>,
    unlabelled: bool,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let list = |default: &str| {
        let field = s.messages.clone().unwrap_or_else(|| default.to_owned());
        jsonl::ChatLayout::Messages { field }
    };
    let format = match s.chat {
        Some(job::ChatFormat::Messages) => Some(list("messages")),
        Some(job::ChatFormat::Sharegpt) => Some(list("conversations")),
        Some(job::ChatFormat::Alpaca) => Some(jsonl::ChatLayout::Alpaca),
        Some(job::ChatFormat::PromptCompletion) => Some(jsonl::ChatLayout::PromptCompletion),
        None => s.messages.as_ref().map(|_| list("messages")),
    };
    let chat = format.map(|format| {
        Ok::<_, DataError>(jsonl::ChatSettings {
            format,
            template: template(&s.template)?,
            loss: match s.loss {
                job::ChatLoss::Answers => jsonl::ChatLossScope::Assistant,
                job::ChatLoss::All => jsonl::ChatLossScope::All,
            },
        })
    });
    let settings = jsonl::JsonlSettings {
        train: s.files.train.clone(),
        valid: s.files.valid.clone(),
        test: s.files.test.clone(),
        split: split_settings(job, &s.files),
        tokenizer: units(&s.tokens),
        separator: separator(&s.separator),
        field: s.field.clone(),
        chat: chat.transpose()?,
        label: s.label.clone(),
        target: target.cloned(),
        unlabelled,
        pack: s.pack,
        buckets: s.buckets.clone(),
        too_long: match s.too_long {
            job::TooLong::Cut => jsonl::OverlongPolicy::Truncate,
            job::TooLong::Split => jsonl::OverlongPolicy::Split,
            job::TooLong::Refuse => jsonl::OverlongPolicy::Reject,
        },
        context: context(job)?,
        on_bad: bad_record_policy(&job.data.loader),
    };
    Ok(jsonl::open(&settings, opening)?)
}

/// Fingerprint inputs of `data.tokens`: the tokenizer file, if it names one.
fn tokens_inputs(tokens: &str) -> Vec<FingerprintInput> {
    tokenizer_file(tokens).map_or_else(Vec::new, |file| tokenizer_inputs("data.tokens", &file))
}

/// A `tokenizer.json`, and the `tokenizer_config.json` published beside it.
fn tokenizer_inputs(key: &'static str, file: &Path) -> Vec<FingerprintInput> {
    let config = file.with_file_name("tokenizer_config.json");
    let config = config.exists().then_some(config);
    std::iter::once(file.to_owned()).chain(config).map(|file| FingerprintInput::file(key, file)).collect()
}

fn template_inputs(template: &str) -> Vec<FingerprintInput> {
    let file = (!is_template(template)).then(|| FingerprintInput::file("data.template", template));
    file.into_iter().collect()
}

/// Source of a template that is named, read from a file, or that of the tokenizer.
pub(super) fn template_source(s: &job::JsonlConfig) -> Result<Option<String>, DataError> {
    let text = template(&s.template)?;
    if let Some((_, source)) = jsonl::TEMPLATES.iter().find(|(name, _)| *name == text) {
        return Ok(Some((*source).to_owned()));
    }
    if text != "auto" {
        return Ok(Some(text));
    }
    let settings = settings_beside(Path::new(&s.tokens));
    Ok(settings["chat_template"].as_str().map(str::to_owned))
}

/// Whether `text` is a template or the name of one, rather than the path of a template file.
fn is_template(text: &str) -> bool {
    text == "auto" || text.contains('{') || jsonl::TEMPLATES.iter().any(|(name, _)| *name == text)
}

/// Resolves a template: its name or text is returned as it is; anything else is read as a file.
fn template(text: &str) -> Result<String, DataError> {
    if is_template(text) {
        return Ok(text.to_owned());
    }
    regular_file::read_to_string(Path::new(text), jsonl::TEMPLATE_BYTES)
        .map_err(|error| DataError::Template { template: text.to_owned(), problem: error.to_string() })
}

fn placement(windows: job::WindowMode) -> WindowPlacement {
    match windows {
        job::WindowMode::Fixed => WindowPlacement::Fixed,
        job::WindowMode::Random => WindowPlacement::Random,
    }
}

/// The `tokenizer.json` that `data.tokens` names, if it names one.
pub(super) fn tokenizer_file(tokens: &str) -> Option<PathBuf> {
    match units(tokens) {
        TokenizerSpec::File(file) => Some(file),
        TokenizerSpec::Characters | TokenizerSpec::Bytes => None,
    }
}

fn units(tokens: &str) -> TokenizerSpec {
    match tokens {
        "characters" => TokenizerSpec::Characters,
        "bytes" => TokenizerSpec::Bytes,
        file => TokenizerSpec::File(file.into()),
    }
}

fn separator(text: &str) -> Separator {
    match text {
        "auto" => Separator::Auto,
        "none" => Separator::None,
        token => Separator::Token(token.to_owned()),
    }
}
