//! Converts one record, a line of JSON, into token ids.

use std::collections::BTreeSet;

use serde_json::Value;

use super::super::DataError;
use super::super::text_memory::{TextError, check_bytes, json_bytes};
use super::super::tokenizer::Tokenizer;
use super::chat_formats::{self, ChatLayout};
use super::lines::LineContext;
use super::template::{ChatTemplate, RenderedChat};
use crate::bad_records::BadRecordPolicy;
use crate::base::units::counted;
use crate::split::key_of;

/// Which part of a record is the text.
pub enum RecordContent {
    /// The text in this field.
    Text { field: String },
    /// The messages, rendered by the template.
    Chat { format: ChatLayout, template: Box<ChatTemplate>, loss: ChatLossScope },
}

/// Which tokens of a chat contribute to the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatLossScope {
    Assistant,
    All,
}

/// What to do with a record that has more tokens than a sample can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlongPolicy {
    /// Drop the end.
    Truncate,
    /// Split it into several samples.
    Split,
    /// Treat it as a bad record.
    Reject,
}

/// Converts records into token ids.
pub struct RecordReader<'a> {
    pub content: &'a RecordContent,
    /// Field that holds the class of a record, or a list of its labels, for classification.
    pub label: Option<&'a str>,
    /// Field whose values group the records for a split.
    pub group: Option<&'a str>,
    pub tokenizer: &'a Tokenizer,
    /// Appended to each document.
    pub separator: Option<u32>,
    pub too_long: OverlongPolicy,
    /// Maximum ids of a sample, including its targets; unlimited if documents are packed.
    pub max_tokens: usize,
    /// Policy for bad records.
    pub on_bad: BadRecordPolicy,
}

/// What a record is labelled with.
#[derive(Debug, PartialEq, Eq)]
pub enum Label {
    Class(String),
    /// Any number of labels, each once.
    List(Vec<String>),
}

impl Label {
    fn held_bytes(&self) -> usize {
        match self {
            Self::Class(name) => name.capacity(),
            Self::List(names) => names.iter().map(|name| size_of::<String>() + name.capacity()).sum(),
        }
    }
}

/// A tokenized record.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Document {
    pub ids: Vec<u32>,
    /// Whether each id contributes to the loss; empty if all do.
    pub loss_mask: Vec<bool>,
    pub label: Option<Label>,
    /// Key of its group; that of an empty text if it has none.
    pub group: Option<u64>,
    /// Number of ids before truncation.
    pub full_len: u64,
}

impl Document {
    pub fn held_bytes(&self) -> u64 {
        let label = self.label.as_ref().map_or(0, Label::held_bytes);
        (size_of::<Self>() + size_of::<u32>() * self.ids.capacity() + self.loss_mask.capacity() + label)
            as u64
    }
}

impl RecordReader<'_> {
    /// Reads and tokenizes a line.
    pub fn read(&self, line: &[u8], at: LineContext) -> Result<Document, DataError> {
        self.convert(line, at.limit).map_err(|error| at.error(error))
    }

    fn convert(&self, line: &[u8], limit: u64) -> Result<Document, TextError> {
        let bad = TextError::Invalid;
        let object = parse_object(line, limit / 4)?;
        if let Some(Err(problem)) = self.label.map(|name| field(&object, name)) {
            return Err(TextError::MissingField(problem));
        }
        let label = self.label.map(|field| label(&object, field)).transpose()?;
        let group_key = |field| key_of(class_name(&object, field).unwrap_or_default().as_bytes());
        let group = self.group.map(group_key);
        let (mut ids, mut loss_mask, mut trailing_special_tokens) = (Vec::new(), Vec::new(), 0);
        let talk = self.render(&object, limit / 4)?;
        drop(object);
        let answers = matches!(self.content, RecordContent::Chat { loss: ChatLossScope::Assistant, .. });
        self.tokenizer.check_memory(&talk.text, answers || self.label.is_some(), limit / 2)?;
        match (self.content, talk) {
            (RecordContent::Chat { loss: ChatLossScope::Assistant, .. }, talk) => {
                let mut offsets = Vec::new();
                self.tokenizer.encode_with_offsets(&talk.text, &mut offsets)?;
                // Answer spans are sorted and disjoint, so a binary search finds the candidate.
                let in_answer = |at: usize| {
                    let next = talk.answer_spans.partition_point(|answer| answer.end <= at);
                    talk.answer_spans.get(next).is_some_and(|answer| answer.contains(&at))
                };
                (ids, loss_mask) = offsets.into_iter().map(|(id, at)| (id, in_answer(at))).unzip();
                if !loss_mask.contains(&true) {
                    return Err(bad("it has no message of the assistant to learn".into()));
                }
            }
            (_, talk) if self.label.is_some() => {
                (ids, trailing_special_tokens) = self.tokenizer.encode_with_special_tokens(&talk.text)?;
            }
            (_, talk) => self.tokenizer.encode(&talk.text, &mut ids)?,
        }
        if let (None, Some(separator)) = (self.label, self.separator)
            && ids.last() != Some(&separator)
        {
            ids.push(separator);
            if !loss_mask.is_empty() {
                loss_mask.push(false);
            }
        }
        let full_len = ids.len() as u64;
        // Next-token prediction needs an input and a target; classification needs one token.
        let least = if self.label.is_some() { 1 } else { 2 };
        if ids.len() < least {
            return Err(bad(format!(
                "it has {}, and a sample needs at least {least}",
                counted(full_len, "token")
            )));
        }
        if ids.len() > self.max_tokens {
            match self.too_long {
                OverlongPolicy::Reject => {
                    let problem = format!(
                        "it has {}, and a sample has at most {}",
                        counted(full_len, "token"),
                        self.max_tokens
                    );
                    return Err(bad(problem));
                }
                // Keep the trailing special tokens, such as `[SEP]`.
                OverlongPolicy::Truncate => drop(ids.drain(
                    self.max_tokens.saturating_sub(trailing_special_tokens)
                        ..ids.len() - trailing_special_tokens.min(self.max_tokens),
                )),
                OverlongPolicy::Split => {}
            }
            loss_mask.truncate(ids.len());
            ids.shrink_to_fit();
            loss_mask.shrink_to_fit();
        }
        if !loss_mask.is_empty() && !loss_mask.contains(&true) {
            let problem = format!(
                "its first answer is beyond the {} of a sample",
                counted(self.max_tokens as u64, "token")
            );
            return Err(bad(problem));
        }
        Ok(Document { ids, loss_mask, label, group, full_len })
    }

    /// The text of a line, as it will be tokenized.
    pub fn text(&self, line: &[u8], at: LineContext) -> Result<String, DataError> {
        let object = parse_object(line, at.limit / 4);
        let talk = object.and_then(|object| self.render(&object, at.limit / 4));
        talk.map(|talk| talk.text).map_err(|error| at.error(error))
    }

    fn render(&self, object: &Value, limit: u64) -> Result<RenderedChat, TextError> {
        let talk = match self.content {
            RecordContent::Text { field } => {
                require(object, &[field.as_str()], None)?;
                RenderedChat { text: string(object, field)?.to_owned(), answer_spans: Vec::new() }
            }
            RecordContent::Chat { format, template, loss } => {
                require(object, &format.fields(), Some(format))?;
                let messages = chat_formats::messages(object, format)?;
                let excluded = messages.iter().any(|message| !message.learned);
                if excluded && *loss == ChatLossScope::All && self.label.is_none() {
                    let problem = "a message has a `weight` of 0 or `train` false, and `loss = \"all\"` learns every \
                                   message: set `loss = \"answers\"`";
                    return Err(TextError::Invalid(problem.into()));
                }
                template.render_chat(&messages, *loss == ChatLossScope::Assistant, limit)?
            }
        };
        match talk.text.is_empty() {
            true => Err(TextError::Invalid("its text is empty".into())),
            false => Ok(talk),
        }
    }
}

/// Refuses a record that lacks one of the fields `names`, with the chat format that it seems to have instead of
/// `format`.
fn require(object: &Value, names: &[&str], format: Option<&ChatLayout>) -> Result<(), TextError> {
    let Some(missing) = names.iter().find(|name| lookup(object, name).is_none()) else { return Ok(()) };
    let problem = field(object, missing).err().unwrap_or_default();
    Err(TextError::MissingField(match chat_formats::suggest(object, format) {
        Some(keys) => format!("{problem}; it looks like a chat: set {keys}"),
        None => problem,
    }))
}

fn parse_object(line: &[u8], limit: u64) -> Result<Value, TextError> {
    check_bytes("its JSON", json_bytes(line), limit)?;
    let value: Value = serde_json::from_slice(line).map_err(|error| format!("it is no JSON: {error}"))?;
    match value {
        Value::Object(_) => Ok(value),
        other => Err(format!("expected an object, got {}", json_type(&other)).into()),
    }
}

pub(super) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The field of that name or, if there is none, at that path of nested objects: `a.b`.
pub(super) fn lookup<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object.get(name).or_else(|| {
        let (first, rest) = name.split_once('.')?;
        lookup(object.get(first)?, rest)
    })
}

pub(super) fn field<'a>(object: &'a Value, name: &str) -> Result<&'a Value, String> {
    let names = || {
        let known = object.as_object().into_iter().flatten().map(|(name, _)| format!("`{name}`"));
        known.take(8).collect::<Vec<_>>().join(", ")
    };
    lookup(object, name).ok_or_else(|| format!("no field `{name}`; the fields are {}", names()))
}

pub(super) fn string<'a>(object: &'a Value, name: &str) -> Result<&'a str, String> {
    let value = field(object, name)?;
    value.as_str().ok_or_else(|| format!("`{name}` must be a string, not {}", json_type(value)))
}

/// Class name of a record; integers and booleans are valid names.
fn class_name(object: &Value, name: &str) -> Result<String, String> {
    class_text(field(object, name)?, name)
}

/// A class, or a list of labels; a label that is listed twice counts once.
fn label(object: &Value, name: &str) -> Result<Label, String> {
    match field(object, name)? {
        Value::Array(labels) => {
            let labels: Result<BTreeSet<_>, _> = labels.iter().map(|label| class_text(label, name)).collect();
            Ok(Label::List(labels?.into_iter().collect()))
        }
        class => class_text(class, name).map(Label::Class),
    }
}

fn class_text(value: &Value, name: &str) -> Result<String, String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Ok(number.to_string()),
        Value::Bool(flag) => Ok(flag.to_string()),
        other => {
            let found = match other {
                Value::Number(number) => number.to_string(),
                Value::String(_) => "an empty string".into(),
                other => json_type(other).into(),
            };
            Err(format!("`{name}` must be a non-empty string, a whole number, true or false, not {found}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::super::template::BUILTIN_TEMPLATES;
    use super::*;

    fn line_7() -> LineContext<'static> {
        LineContext { file: Path::new("a.jsonl"), unit: "line", number: 7, limit: u64::MAX }
    }

    fn text() -> RecordContent {
        RecordContent::Text { field: "text".into() }
    }

    fn chat(loss: ChatLossScope) -> RecordContent {
        let plain = BUILTIN_TEMPLATES.iter().find(|(name, _)| *name == "plain").unwrap().1;
        let template = Box::new(ChatTemplate::new(plain, String::new(), String::new()).unwrap());
        RecordContent::Chat { format: ChatLayout::Messages { field: "messages".into() }, template, loss }
    }

    fn read(
        content: &RecordContent,
        label: Option<&str>,
        max_tokens: usize,
        too_long: OverlongPolicy,
        line: &str,
    ) -> Result<Document, String> {
        let reader = RecordReader {
            content,
            label,
            group: None,
            tokenizer: &Tokenizer::Bytes,
            separator: None,
            too_long,
            max_tokens,
            on_bad: BadRecordPolicy::Fail,
        };
        reader.read(line.as_bytes(), line_7()).map_err(|error| {
            assert!(error.is_bad_record());
            error.to_string()
        })
    }

    fn decoded(ids: &[u32]) -> String {
        Tokenizer::Bytes.decode(ids)
    }

    #[test]
    fn a_text_is_its_ids_and_a_class_its_name() {
        let document = read(&text(), None, 99, OverlongPolicy::Truncate, r#"{"text": "héllo"}"#).unwrap();
        assert_eq!((decoded(&document.ids), document.full_len), ("héllo".into(), 6));
        for (label, name) in [(r#""spam""#, "spam"), ("3", "3"), ("true", "true")] {
            let line = format!(r#"{{"text": "x", "label": {label}}}"#);
            let document = read(&text(), Some("label"), 99, OverlongPolicy::Truncate, &line).unwrap();
            assert_eq!((document.label, document.ids.len()), (Some(Label::Class(name.into())), 1));
        }
    }

    #[test]
    fn nested_fields_are_named_by_their_path() {
        let content = RecordContent::Text { field: "a.b".into() };
        for line in [r#"{"a": {"b": "hello"}}"#, r#"{"a.b": "hello", "a": {"b": "other"}}"#] {
            let document = read(&content, None, 99, OverlongPolicy::Truncate, line).unwrap();
            assert_eq!(decoded(&document.ids), "hello", "{line}");
        }
        let chat = r#"{"conversations": [{"from": "human", "value": "x"}]}"#;
        let error = read(&text(), None, 99, OverlongPolicy::Truncate, chat).unwrap_err();
        assert!(error.contains("it looks like a chat: set `chat = \"sharegpt\"`"), "{error}");
    }

    #[test]
    fn only_answers_are_learned() {
        let line =
            r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}"#;
        let document =
            read(&chat(ChatLossScope::Assistant), None, 99, OverlongPolicy::Truncate, line).unwrap();
        assert_eq!(decoded(&document.ids), "user: Hi\nassistant: Yo\n");
        let learned: Vec<u32> =
            document.ids.iter().zip(&document.loss_mask).filter(|(_, l)| **l).map(|(id, _)| *id).collect();
        assert_eq!(decoded(&learned), " Yo");
        assert!(
            read(&chat(ChatLossScope::All), None, 99, OverlongPolicy::Truncate, line)
                .unwrap()
                .loss_mask
                .is_empty()
        );
        let two = r#"{"messages": [{"role": "assistant", "content": "No", "weight": 0},
            {"role": "assistant", "content": "Yes"}]}"#;
        let document =
            read(&chat(ChatLossScope::Assistant), None, 99, OverlongPolicy::Truncate, two).unwrap();
        let learned = document.ids.iter().zip(&document.loss_mask).filter(|(_, l)| **l).map(|(id, _)| *id);
        assert_eq!(decoded(&learned.collect::<Vec<_>>()), " Yes");
        let error = read(&chat(ChatLossScope::All), None, 99, OverlongPolicy::Truncate, two).unwrap_err();
        assert!(error.contains("set `loss = \"answers\"`"), "{error}");
        let error =
            read(&chat(ChatLossScope::Assistant), None, 10, OverlongPolicy::Truncate, line).unwrap_err();
        assert!(error.contains("its first answer is beyond the 10 tokens"), "{error}");
    }

    #[test]
    fn what_is_too_long_is_cut_kept_or_refused() {
        let line = r#"{"text": "abcdefgh"}"#;
        let cut = read(&text(), None, 5, OverlongPolicy::Truncate, line).unwrap();
        assert_eq!((decoded(&cut.ids), cut.full_len), ("abcde".into(), 8));
        assert_eq!(read(&text(), None, 5, OverlongPolicy::Split, line).unwrap().ids.len(), 8);
        let refused = read(&text(), None, 5, OverlongPolicy::Reject, line).unwrap_err();
        assert!(refused.contains("line 7: it has 8 tokens, and a sample has at most 5"), "{refused}");
    }

    #[test]
    fn bad_records_say_what_is_wrong() {
        let wrong = |content: &RecordContent, label, line: &str| {
            read(content, label, 99, OverlongPolicy::Truncate, line).unwrap_err()
        };
        let cases = [
            (wrong(&text(), None, "{"), "`a.jsonl`, line 7: it is no JSON: EOF"),
            (wrong(&text(), None, "[1]"), "expected an object, got a list"),
            (wrong(&text(), None, r#"{"a": 1, "b": 2}"#), "no field `text`; the fields are `a`, `b`"),
            (wrong(&text(), None, r#"{"text": 3}"#), "`text` must be a string, not a number"),
            (wrong(&text(), None, r#"{"text": ""}"#), "its text is empty"),
            (wrong(&text(), None, r#"{"text": "x"}"#), "it has 1 token, and a sample needs at least 2"),
            (
                wrong(&text(), Some("y"), r#"{"text": "x", "y": 0.5}"#),
                "a whole number, true or false, not 0.5",
            ),
            (
                wrong(&text(), Some("y"), r#"{"text": "x", "y": ""}"#),
                "`y` must be a non-empty string, a whole number, true or false, not an empty string",
            ),
            (wrong(&text(), Some("y"), r#"{"text": "x", "y": null}"#), "true or false, not null"),
            (wrong(&chat(ChatLossScope::All), None, r#"{"messages": []}"#), "`messages` is empty"),
            (
                wrong(&chat(ChatLossScope::All), None, r#"{"messages": [{"role": "pope", "content": "x"}]}"#),
                "unknown role `pope`",
            ),
            (
                wrong(
                    &chat(ChatLossScope::Assistant),
                    None,
                    r#"{"messages": [{"role": "user", "content": "x"}]}"#,
                ),
                "no message of the assistant",
            ),
            (
                wrong(&chat(ChatLossScope::All), None, r#"{"messages": [{"role": "user"}]}"#),
                "no field `content`",
            ),
        ];
        for (found, expected) in cases {
            assert!(found.contains(expected), "{found}");
        }
        let reader = RecordReader {
            content: &text(),
            label: None,
            group: None,
            tokenizer: &Tokenizer::Bytes,
            separator: None,
            too_long: OverlongPolicy::Truncate,
            max_tokens: 9,
            on_bad: BadRecordPolicy::Fail,
        };
        let error = reader.read(b"{\"text\": \"a\xffb\"}", line_7()).unwrap_err().to_string();
        assert!(error.contains("line 7: it is no JSON: invalid unicode"), "{error}");
    }

    proptest! {
        /// Any line is read or refused, without a panic.
        #[test]
        fn any_line_is_read_or_refused(
            at in 0usize..100,
            bytes in prop::collection::vec(any::<u8>(), 0..4),
            deep in 0usize..300,
        ) {
            let line = concat!(
                r#"{"text": "ab\u00e9", "label": 1, "messages": [{"role": "user", "content": "Hi"}, "#,
                r#"{"role": "assistant", "content": "Yo"}]}"#
            );
            let mut line = line.as_bytes().to_vec();
            line.splice(at..(at + 2).min(line.len()), bytes);
            line.extend(std::iter::repeat_n(b'[', deep));
            for (content, label) in [(text(), None), (text(), Some("label")), (chat(ChatLossScope::Assistant), None)] {
                let reader = RecordReader {
                    content: &content,
                    label,
                    group: None,
                    tokenizer: &Tokenizer::Bytes,
                    separator: Some(10),
                    too_long: OverlongPolicy::Truncate,
                    max_tokens: 30,
                    on_bad: BadRecordPolicy::Fail,
                };
                if let Ok(document) = reader.read(&line, line_7()) {
                    prop_assert!(document.ids.len() <= 30 && document.full_len >= document.ids.len() as u64);
                    prop_assert!(document.loss_mask.is_empty() || document.loss_mask.len() == document.ids.len());
                }
            }
        }
    }
}
