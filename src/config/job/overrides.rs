//! `--set key.path=value`: overrides a value of the parsed job before it is checked, so that a bad override is
//! reported like a bad line of the file.

use std::ops::Range;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::SpannedError;
use super::error::{ErrorCode, JobError};
use super::schema::{choices, kind, kinds};

/// Maximum parts of a key: no table is nested deeper, and recursion stays bounded.
const MAX_DEPTH: usize = 64;

/// Applies `set` to `job`; the first byte of `set` has the address `start`.
pub(super) fn apply<'a>(
    set: &'a str,
    start: usize,
    job: &mut Spanned<DeTable<'a>>,
    schema: &Value,
) -> Result<(), SpannedError> {
    let whole = start..start + set.len();
    let syntax_error = |span: Range<usize>, message: &str| {
        let error = JobError::new(ErrorCode::Syntax, message)
            .allowed("KEY.PATH=VALUE, such as `train.batch_size=32`");
        Err((span, error.into()))
    };
    let Some((path, text)) = set.split_once('=') else {
        return syntax_error(whole, "`--set` without `=`");
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
        return syntax_error(empty.span().start..empty.span().start + 1, "`--set` with an empty key");
    }
    if keys.len() > MAX_DEPTH {
        return syntax_error(whole, "`--set` key has more than 64 parts");
    }
    let mut root = Spanned::new(0..0, DeValue::Table(std::mem::take(job.get_mut())));
    let value = parse_value(text, at, schema_at(schema, root.get_ref(), &keys));
    let put = value.and_then(|value| insert_at(&mut root, &keys, value, Some(schema)));
    if let DeValue::Table(table) = root.into_inner() {
        *job.get_mut() = table;
    }
    put
}

/// The schema of the value at the path `keys` below `node`.
fn schema_at<'s>(schema: &'s Value, node: &DeValue, keys: &[Spanned<&str>]) -> Option<&'s Value> {
    let (mut schema, mut node) = (schema, Some(node));
    for key in keys {
        let name = *key.get_ref();
        schema = child_schema(schema, node, name)?;
        let below = node.and_then(|node| match node {
            DeValue::Table(table) => table.get(name),
            DeValue::Array(items) => name.parse::<usize>().ok().and_then(|i| items.get(i)),
            _ => None,
        });
        node = below.map(Spanned::get_ref);
    }
    Some(schema)
}

/// The schema of `key` in a table or a list: that of the table's kind, or of the first kind that has the key.
fn child_schema<'s>(schema: &'s Value, table: Option<&DeValue>, key: &str) -> Option<&'s Value> {
    if key.parse::<usize>().is_ok() && schema["items"].is_object() {
        return Some(&schema["items"]);
    }
    let named = match table {
        Some(DeValue::Table(table)) => table.get("kind").and_then(|kind| kind.get_ref().as_str()),
        _ => None,
    };
    let of_kind = kinds(schema).iter().filter(|table| named.is_some() && kind(table) == named);
    of_kind.chain(kinds(schema)).find_map(|table| table["properties"].get(key))
}

/// The value in `text`, which has the address `at`. A string needs no quotes, nor does a list of strings: `a,b` and
/// `[a, b]` are two.
fn parse_value<'a>(
    text: &'a str,
    at: usize,
    schema: Option<&Value>,
) -> Result<Spanned<DeValue<'a>>, SpannedError> {
    let at = at + (text.len() - text.trim_start().len());
    let text = text.trim();
    let bare = || Spanned::new(at..at + text.len(), DeValue::String(text.into()));
    let is_toml = text.starts_with(['"', '\'', '[', '{']);
    if !is_toml && schema.is_some_and(is_string) {
        return Ok(bare());
    }
    let list = schema.filter(|s| (s["type"] == "array" || s["type"].is_array()) && is_string(&s["items"]));
    if let Some(list) = list
        && let Some(words) = bare_list(text, at)
    {
        let one = !text.starts_with('[') && words.len() == 1 && list["type"].is_array();
        let words = DeValue::Array(words.into_iter().collect());
        return Ok(if one { bare() } else { Spanned::new(at..at + text.len(), words) });
    }
    match DeValue::parse(text) {
        Ok(value) => Ok(shift_spans(value, at)),
        Err(error) if is_toml => {
            let span = error.span().unwrap_or(0..text.len());
            Err((
                at + span.start..at + span.end,
                JobError::new(ErrorCode::Syntax, error.message().to_lowercase()).into(),
            ))
        }
        Err(_) => Ok(bare()),
    }
}

fn is_string(schema: &Value) -> bool {
    schema["type"] == "string" || !choices(schema).is_empty()
}

/// The words of a list without quotes, with or without brackets; `None` if it is none.
fn bare_list(text: &str, at: usize) -> Option<Vec<Spanned<DeValue<'_>>>> {
    let (inner, mut start) = match text.strip_prefix('[') {
        Some(rest) => (rest.strip_suffix(']')?, at + 1),
        None => (text, at),
    };
    if inner.contains(['"', '\'', '[', ']', '{', '}']) {
        return None;
    }
    let word = |item: &str| {
        let from = start + (item.len() - item.trim_start().len());
        start += item.len() + 1;
        let word = item.trim();
        (!word.is_empty())
            .then(|| Spanned::new(from..from + word.len(), DeValue::String(word.to_owned().into())))
    };
    inner.split(',').map(word).collect()
}

/// Shifts every span in `value` by `by` bytes.
fn shift_spans(value: Spanned<DeValue>, by: usize) -> Spanned<DeValue> {
    let moved = |span: Range<usize>| span.start + by..span.end + by;
    let span = moved(value.span());
    let value = match value.into_inner() {
        DeValue::Array(items) => {
            DeValue::Array(items.into_iter().map(|item| shift_spans(item, by)).collect())
        }
        DeValue::Table(table) => DeValue::Table(
            table
                .into_iter()
                .map(|(key, value)| {
                    (Spanned::new(moved(key.span()), key.into_inner()), shift_spans(value, by))
                })
                .collect(),
        ),
        plain => plain,
    };
    Spanned::new(span, value)
}

/// Inserts `value` at the path `keys` below `node`, creating tables as needed.
fn insert_at<'a>(
    node: &mut Spanned<DeValue<'a>>,
    keys: &[Spanned<&'a str>],
    value: Spanned<DeValue<'a>>,
    schema: Option<&Value>,
) -> Result<(), SpannedError> {
    let Some((key, rest)) = keys.split_first() else {
        *node = value;
        return Ok(());
    };
    let name = *key.get_ref();
    let below = schema.and_then(|schema| child_schema(schema, Some(node.get_ref()), name));
    match node.get_mut() {
        DeValue::Table(table) => {
            let group = schema.and_then(|s| s["x-one-of"].as_array()).into_iter().flatten();
            let group: Vec<&str> = group.filter_map(Value::as_str).collect();
            if group.contains(&name) {
                // An override wins over a key of the file that excludes it.
                group.iter().filter(|other| **other != name).for_each(|other| drop(table.remove(*other)));
            }
            let entry = table
                .entry(Spanned::new(key.span(), name.into()))
                .or_insert_with(|| Spanned::new(key.span(), DeValue::Table(DeTable::new())));
            insert_at(entry, rest, value, below)
        }
        DeValue::Array(items) => match name.parse::<usize>().ok().and_then(|i| items.get_mut(i)) {
            Some(item) => insert_at(item, rest, value, below),
            None => {
                let error = JobError::new(
                    ErrorCode::UnknownKey,
                    format!("the list has no index `{}`", name.escape_debug()),
                );
                Err((key.span(), error.allowed(format!("0 to {}", items.len().saturating_sub(1))).into()))
            }
        },
        _ => {
            let error = JobError::new(
                ErrorCode::WrongType,
                format!("`{}` is a key of a value that is not a table", name.escape_debug()),
            );
            Err((key.span(), error.into()))
        }
    }
}
