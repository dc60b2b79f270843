//! Sets of text and tokens in files.

use std::path::Path;

use super::super::setup::on_bad;
use super::{Failure, Sets};
use crate::data::fingerprint::Input;
use crate::data::language::tokenizer::{Separator, Units};
use crate::data::language::tokens::Width;
use crate::data::language::windows::Placement;
use crate::data::language::{bins, jsonl, text};
use crate::data::{DataError, Opening};
use crate::job;
use crate::regular;

pub(super) fn text(s: &job::Text, context: usize, opening: &Opening) -> Result<Sets, Failure> {
    let settings = text::Settings {
        train: s.files.train.clone(),
        valid: s.files.valid.clone(),
        valid_share: s.files.valid_share,
        units: units(&s.tokens),
        separator: separator(&s.separator),
        context,
        placement: placement(s.windows),
    };
    let (train, valid) = text::open(&settings, opening)?;
    Ok(Sets::of(train, valid))
}

pub(super) fn tokens(s: &job::Tokens, context: usize, opening: &Opening) -> Result<Sets, Failure> {
    let settings = bins::Settings {
        train: s.files.train.clone(),
        valid: s.files.valid.clone(),
        valid_share: s.files.valid_share,
        width: match s.dtype {
            job::TokenType::Auto => None,
            job::TokenType::U16 => Some(Width::U16),
            job::TokenType::U32 => Some(Width::U32),
        },
        vocab: s.vocab,
        tokenizer: s.tokenizer.clone(),
        context,
        placement: placement(s.windows),
    };
    let (train, valid) = bins::open(&settings, opening)?;
    Ok(Sets::of(train, valid))
}

pub(super) fn jsonl(
    s: &job::Jsonl,
    loading: &job::Loading,
    context: usize,
    opening: &Opening,
) -> Result<Sets, Failure> {
    let chat = s.messages.as_ref().map(|field| {
        Ok::<_, DataError>(jsonl::Chat {
            field: field.clone(),
            template: template(&s.template)?,
            loss: match s.loss {
                job::ChatLoss::Answers => jsonl::Loss::Answers,
                job::ChatLoss::All => jsonl::Loss::All,
            },
        })
    });
    let settings = jsonl::Settings {
        train: s.files.train.clone(),
        valid: s.files.valid.clone(),
        valid_share: s.files.valid_share,
        units: units(&s.tokens),
        separator: separator(&s.separator),
        field: s.field.clone(),
        chat: chat.transpose()?,
        label: s.label.clone(),
        pack: s.pack,
        buckets: s.buckets.clone(),
        too_long: match s.too_long {
            job::TooLong::Cut => jsonl::TooLong::Cut,
            job::TooLong::Split => jsonl::TooLong::Split,
            job::TooLong::Refuse => jsonl::TooLong::Refuse,
        },
        context,
        on_bad: on_bad(loading),
    };
    let (train, valid) = jsonl::open(&settings, opening)?;
    Ok(Sets { train, valid })
}

/// What says what a token is, where that is a file.
pub(super) fn tokens_inputs(tokens: &str) -> Vec<Input> {
    match units(tokens) {
        Units::File(file) => tokenizer_inputs("data.tokens", &file),
        Units::Characters | Units::Bytes => Vec::new(),
    }
}

/// A `tokenizer.json`, and the settings published beside it.
pub(super) fn tokenizer_inputs(key: &'static str, file: &Path) -> Vec<Input> {
    let beside = file.with_file_name("tokenizer_config.json");
    let beside = beside.exists().then_some(beside);
    std::iter::once(file.to_owned()).chain(beside).map(|file| Input::file(key, file)).collect()
}

pub(super) fn template_inputs(template: &str) -> Vec<Input> {
    let file = (!is_template(template)).then(|| Input::file("data.template", template));
    file.into_iter().collect()
}

/// Whether this is a template's name or text, and not a file that holds one.
fn is_template(text: &str) -> bool {
    text == "auto" || text.contains('{') || jsonl::TEMPLATES.iter().any(|(name, _)| *name == text)
}

/// A template's name or text; what is neither is a file that holds the text.
fn template(text: &str) -> Result<String, DataError> {
    if is_template(text) {
        return Ok(text.to_owned());
    }
    regular::read_to_string(Path::new(text), jsonl::TEMPLATE_BYTES)
        .map_err(|error| DataError::Template { template: text.to_owned(), problem: error.to_string() })
}

fn placement(windows: job::Windows) -> Placement {
    match windows {
        job::Windows::Fixed => Placement::Fixed,
        job::Windows::Random => Placement::Random,
    }
}

fn units(tokens: &str) -> Units {
    match tokens {
        "characters" => Units::Characters,
        "bytes" => Units::Bytes,
        file => Units::File(file.into()),
    }
}

fn separator(text: &str) -> Separator {
    match text {
        "auto" => Separator::Auto,
        "none" => Separator::None,
        token => Separator::Token(token.to_owned()),
    }
}
