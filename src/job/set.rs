//! `--set key.path=value`: a job's value from the command line, put into the parsed job before it is
//! checked, so that a wrong one is told like a wrong line of the file.

use std::ops::Range;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::Found;
use super::error::{Code, Error};
use super::schema::{choices, kinds};

/// Parts of a key; no table lies deeper, and the depth of recursion stays bounded.
const MAX_DEPTH: usize = 64;

/// Puts `set` into `job`; the set's first byte has the address `start`.
pub(super) fn apply<'a>(
    set: &'a str,
    start: usize,
    job: &mut Spanned<DeTable<'a>>,
    schema: &Value,
) -> Result<(), Found> {
    let whole = start..start + set.len();
    let refuse = |span: Range<usize>, message: &str| {
        let error =
            Error::new(Code::Syntax, message).allowed("KEY.PATH=VALUE, such as `train.batch_size=32`");
        Err((span, error.into()))
    };
    let Some((path, text)) = set.split_once('=') else {
        return refuse(whole, "a `--set` without `=`");
    };
    let mut at = start;
    let mut keys = Vec::new();
    for key in path.split('.') {
        let trimmed = key.trim();
        let from = at + (key.len() - key.trim_start().len());
        keys.push(Spanned::new(from..from + trimmed.len(), trimmed));
        at += key.len() + 1;
    }
    if let Some(empty) = keys.iter().find(|key| key.get_ref().is_empty()) {
        return refuse(empty.span().start..empty.span().start + 1, "a `--set` with an empty key");
    }
    if keys.len() > MAX_DEPTH {
        return refuse(whole, "a `--set` with too many parts in its key");
    }
    let target = keys.iter().try_fold(schema, |table, key| child(table, key.get_ref()));
    let value = value(text, at, target)?;
    let mut root = Spanned::new(0..0, DeValue::Table(std::mem::take(job.get_mut())));
    let put = put(&mut root, &keys, value, Some(schema));
    if let DeValue::Table(table) = root.into_inner() {
        *job.get_mut() = table;
    }
    put
}

/// The schema of `key` in a table or a list, whatever the table's kind.
fn child<'s>(schema: &'s Value, key: &str) -> Option<&'s Value> {
    if key.parse::<usize>().is_ok() && schema["items"].is_object() {
        return Some(&schema["items"]);
    }
    kinds(schema).iter().find_map(|kind| kind["properties"].get(key))
}

/// The value in `text`, which has the address `at`. A string needs no quotes.
fn value<'a>(text: &'a str, at: usize, schema: Option<&Value>) -> Result<Spanned<DeValue<'a>>, Found> {
    let at = at + (text.len() - text.trim_start().len());
    let text = text.trim();
    let bare = || Spanned::new(at..at + text.len(), DeValue::String(text.into()));
    let written = text.starts_with(['"', '\'', '[', '{']);
    if !written && schema.is_some_and(|s| s["type"] == "string" || !choices(s).is_empty()) {
        return Ok(bare());
    }
    match DeValue::parse(text) {
        Ok(value) => Ok(shift(value, at)),
        Err(error) if written => {
            let span = error.span().unwrap_or(0..text.len());
            Err((
                at + span.start..at + span.end,
                Error::new(Code::Syntax, error.message().to_lowercase()).into(),
            ))
        }
        Err(_) => Ok(bare()),
    }
}

/// Moves every span in `value` up by `by`.
fn shift(value: Spanned<DeValue>, by: usize) -> Spanned<DeValue> {
    let moved = |span: Range<usize>| span.start + by..span.end + by;
    let span = moved(value.span());
    let value = match value.into_inner() {
        DeValue::Array(items) => DeValue::Array(items.into_iter().map(|item| shift(item, by)).collect()),
        DeValue::Table(table) => DeValue::Table(
            table
                .into_iter()
                .map(|(key, value)| (Spanned::new(moved(key.span()), key.into_inner()), shift(value, by)))
                .collect(),
        ),
        plain => plain,
    };
    Spanned::new(span, value)
}

/// Puts `value` at the end of `keys` below `node`, making tables on the way.
fn put<'a>(
    node: &mut Spanned<DeValue<'a>>,
    keys: &[Spanned<&'a str>],
    value: Spanned<DeValue<'a>>,
    schema: Option<&Value>,
) -> Result<(), Found> {
    let Some((key, rest)) = keys.split_first() else {
        *node = value;
        return Ok(());
    };
    let name = *key.get_ref();
    let below = schema.and_then(|schema| child(schema, name));
    match node.get_mut() {
        DeValue::Table(table) => {
            let group = schema.and_then(|s| s["x-one-of"].as_array()).into_iter().flatten();
            let group: Vec<&str> = group.filter_map(Value::as_str).collect();
            if group.contains(&name) {
                // The command line decides between keys that exclude each other.
                group.iter().filter(|other| **other != name).for_each(|other| drop(table.remove(*other)));
            }
            let entry = table
                .entry(Spanned::new(key.span(), name.into()))
                .or_insert_with(|| Spanned::new(key.span(), DeValue::Table(DeTable::new())));
            put(entry, rest, value, below)
        }
        DeValue::Array(items) => match name.parse::<usize>().ok().and_then(|i| items.get_mut(i)) {
            Some(item) => put(item, rest, value, below),
            None => {
                let error =
                    Error::new(Code::UnknownKey, format!("the list has no item `{}`", name.escape_debug()));
                Err((key.span(), error.allowed(format!("0 to {}", items.len().saturating_sub(1))).into()))
            }
        },
        _ => {
            let error = Error::new(
                Code::WrongType,
                format!("`{}` is below a value that is no table", name.escape_debug()),
            );
            Err((key.span(), error.into()))
        }
    }
}
