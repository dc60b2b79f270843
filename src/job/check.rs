//! Walks a parsed job along its schema and reports everything wrong with it, not just the first.
//!
//! What passes here deserializes. On the way, paths are made absolute and their variables filled in.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::error::{Code, Error, near_miss};
use super::schema::{allowed, choices, is_table, kind, kinds};
use crate::units::Size;

/// An error and the bytes it is about, in the address space of [`super::source::Sources`].
pub(super) type Found = (Range<usize>, Box<Error>);

/// Checks `table` against `schema`, both the whole job's.
pub(super) fn check(table: &mut Spanned<DeTable>, schema: &Value, base: &Path) -> Vec<Found> {
    let mut checker = Checker { schema, base, found: Vec::new() };
    checker.table(table.get_mut(), 0..0, schema, "");
    checker.found
}

struct Checker<'a> {
    schema: &'a Value,
    /// The folder that relative paths start from.
    base: &'a Path,
    found: Vec<Found>,
}

impl Checker<'_> {
    fn report(&mut self, span: Range<usize>, error: Error) {
        self.found.push((span, error.into()));
    }

    fn table(&mut self, table: &mut DeTable, span: Range<usize>, schema: &Value, path: &str) {
        let kinds = kinds(schema);
        let chosen = match kinds {
            [only] if kind(only).is_none() => Some(only),
            _ => self.chosen_kind(table, &span, kinds, path),
        };
        let known = |k: &&Value, key: &str| k["properties"].get(key).is_some();
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().as_ref();
            let at = join(path, name);
            match chosen {
                Some(chosen) => match chosen["properties"].get(name) {
                    // The kind itself was looked at when it was chosen.
                    Some(_) if name == "kind" && kind(chosen).is_some() => {}
                    Some(schema) => self.value(value, schema, &at),
                    None => self.unknown_key(key.span(), name, chosen, kinds, path),
                },
                // Without a kind, a key is wrong only when no kind has it.
                None if kinds.iter().any(|k| known(&k, name)) => {}
                None => self.unknown_key(key.span(), name, &kinds[0], &[], path),
            }
        }
        let Some(chosen) = chosen else { return };
        for key in chosen["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !table.contains_key(key) {
                self.missing_key(span.clone(), key, &chosen["properties"][key], path);
            }
        }
        self.exclusive_keys(table, span, chosen, path);
    }

    /// The one of `kinds` that the table's `kind` names.
    fn chosen_kind<'s>(
        &mut self,
        table: &DeTable,
        span: &Range<usize>,
        kinds: &'s [Value],
        path: &str,
    ) -> Option<&'s Value> {
        let names: Vec<&str> = kinds.iter().filter_map(kind).collect();
        let Some(value) = table.get("kind") else {
            let error = Error::new(Code::MissingKey, format!("missing key `kind`{}", section(path)));
            self.report(span.clone(), error.key(join(path, "kind")).allowed(quoted(&names)));
            return None;
        };
        let at = join(path, "kind");
        match value.get_ref() {
            DeValue::String(name) => {
                let chosen = kinds.iter().find(|k| kind(k) == Some(name));
                if chosen.is_none() {
                    self.not_a_choice(value.span(), name, &names, &at);
                }
                chosen
            }
            other => {
                self.wrong_type(value.span(), other, "a string", quoted(&names), &at);
                None
            }
        }
    }

    fn unknown_key(&mut self, span: Range<usize>, name: &str, table: &Value, kinds: &[Value], path: &str) {
        let keys = || table["properties"].as_object().into_iter().flatten().map(|(key, _)| key.as_str());
        let shown = name.escape_debug();
        let owners: Vec<&str> =
            kinds.iter().filter(|k| k["properties"].get(name).is_some()).filter_map(kind).collect();
        let error = if let (false, Some(this)) = (owners.is_empty(), kind(table)) {
            let message = format!("key `{shown}` does not belong to kind \"{this}\"{}", section(path));
            Error::new(Code::OtherKind, message)
                .hint(format!("`{shown}` is a key of kind {}", quoted(&owners)))
        } else {
            let mut tables = self.schema["properties"].as_object().into_iter().flatten();
            let owner = tables.find(|(_, table)| kinds_have(table, name));
            let elsewhere = owner.map(|(table, _)| format!("`{shown}` is a key of [{table}]"));
            Error::new(Code::UnknownKey, format!("unknown key `{shown}`{}", section(path)))
                .hint(near_miss(name, keys()).or(elsewhere))
        };
        let error = error.key(join(path, name)).allowed(keys().collect::<Vec<_>>().join(", "));
        self.report(span, error);
    }

    fn missing_key(&mut self, span: Range<usize>, key: &str, schema: &Value, path: &str) {
        let (code, at) = (Code::MissingKey, join(path, key));
        let error = if is_table(schema) {
            let names: Vec<&str> = kinds(schema).iter().filter_map(kind).collect();
            let hint = names.first().map(|kind| format!("add `[{at}]` with `kind = \"{kind}\"`"));
            Error::new(code, format!("missing table [{at}]")).hint(hint)
        } else {
            Error::new(code, format!("missing key `{key}`{}", section(path))).allowed(allowed(schema))
        };
        self.report(span, error.key(at));
    }

    /// Of the keys in `x-one-of` at most one stands; exactly one where the schema requires it.
    fn exclusive_keys(&mut self, table: &DeTable, span: Range<usize>, schema: &Value, path: &str) {
        let group: Vec<&str> =
            schema["x-one-of"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let present: Vec<&str> = group.iter().copied().filter(|key| table.contains_key(*key)).collect();
        let list = group.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(" or ");
        if let [first, .., last] = present[..] {
            let message = format!("both `{first}` and `{last}`{}", section(path));
            let span = table.get_key_value(last).map_or(span, |(key, _)| key.span());
            let error = Error::new(Code::Contradiction, message).key(join(path, last));
            self.report(span, error.allowed(format!("one of {list}")));
        } else if present.is_empty() && !group.is_empty() && schema["oneOf"].is_array() {
            let error = Error::new(
                Code::MissingKey,
                format!("neither {}{}", list.replace(" or ", " nor "), section(path)),
            );
            self.report(span, error.key(join(path, group[0])).hint(format!("add {list}")));
        }
    }

    fn value(&mut self, value: &mut Spanned<DeValue>, schema: &Value, path: &str) {
        let span = value.span();
        let names = choices(schema);
        match (schema["type"].as_str(), value.get_mut()) {
            (_, DeValue::Table(table)) if is_table(schema) => self.table(table, span, schema, path),
            (_, DeValue::String(text)) if !names.is_empty() => {
                if !names.contains(&text.as_ref()) {
                    self.not_a_choice(span, text, &names, path);
                }
            }
            (Some("string"), DeValue::String(text)) => match self.string(text, schema) {
                Ok(Some(resolved)) => *text = resolved.into(),
                Ok(None) => {}
                Err(error) => {
                    let error = error.key(path);
                    self.report(span, error);
                }
            },
            (Some("boolean"), DeValue::Boolean(_)) => {}
            (Some("integer" | "number"), DeValue::Integer(n)) => {
                // Beyond i64 a number is no longer TOML, and the resolved job could not hold it.
                let n = integer(n);
                self.range(
                    span,
                    n.map(|n| n as f64),
                    n.map_or("too large".into(), |n| n.to_string()),
                    schema,
                    path,
                );
            }
            (Some("number"), DeValue::Float(x)) => {
                let number = x.as_str().parse().ok().filter(|x: &f64| x.is_finite());
                self.range(span, number, x.to_string(), schema, path);
            }
            (Some("array"), DeValue::Array(items)) => {
                let len = items.len() as u64;
                let too_few = schema["minItems"].as_u64().is_some_and(|min| len < min);
                let too_many = schema["maxItems"].as_u64().is_some_and(|max| len > max);
                if too_few || too_many {
                    let error =
                        Error::new(Code::OutOfRange, format!("`{path}` has the wrong number of items"));
                    self.report(span, error.key(path).seen(format!("{len} items")).allowed(allowed(schema)));
                }
                let mut seen = BTreeSet::new();
                for (i, item) in items.iter_mut().enumerate() {
                    if schema["uniqueItems"] == true && !seen.insert(show(item.get_ref())) {
                        let error = Error::new(Code::NotAllowed, format!("`{path}` names an item twice"));
                        self.report(item.span(), error.key(path).seen(show(item.get_ref())));
                    }
                    self.value(item, &schema["items"], &format!("{path}[{i}]"));
                }
            }
            (_, other) => {
                let wanted = allowed(schema);
                let noun =
                    if names.is_empty() { wanted.split(',').next().unwrap_or_default() } else { "a string" };
                self.wrong_type(span, other, noun, wanted.clone(), path);
            }
        }
    }

    fn range(&mut self, span: Range<usize>, n: Option<f64>, seen: String, schema: &Value, path: &str) {
        let bound = |key: &str| schema[key].as_f64();
        let inside = n.is_some_and(|n| {
            bound("minimum").is_none_or(|low| n >= low)
                && bound("exclusiveMinimum").is_none_or(|low| n > low)
                && bound("maximum").is_none_or(|high| n <= high)
                && bound("exclusiveMaximum").is_none_or(|high| n < high)
        });
        if !inside {
            let error = Error::new(Code::OutOfRange, format!("`{path}` is out of range"));
            self.report(span, error.key(path).seen(seen).allowed(allowed(schema)));
        }
    }

    /// Checks a string by its `format`; a path comes back resolved.
    fn string(&self, text: &str, schema: &Value) -> Result<Option<String>, Box<Error>> {
        let refuse = |what: &str| -> Box<Error> {
            let shown = text.escape_debug();
            Error::new(Code::NotAllowed, format!("`{shown}` is not {what}")).allowed(allowed(schema)).into()
        };
        match schema["format"].as_str() {
            Some("size") => text.parse::<Size>().map(|_| None).map_err(|_| refuse("a size")),
            Some("share") => match text.parse::<Size>() {
                Ok(Size::Bytes(_) | Size::Percent(_)) => Ok(None),
                _ => Err(refuse("a size")),
            },
            Some("name") if is_name(text) => Ok(None),
            Some("name") => Err(refuse("a name").hint(format!("for example `{}`", name_from(text))).into()),
            Some("path") => {
                let expanded = expand(text, |name| std::env::var(name).ok())?;
                Ok(Some(self.base.join(expanded).to_string_lossy().into_owned()))
            }
            _ => Ok(None),
        }
    }

    fn not_a_choice(&mut self, span: Range<usize>, text: &str, names: &[&str], path: &str) {
        let error = Error::new(Code::NotAllowed, format!("`{path}` cannot be \"{}\"", text.escape_debug()));
        let hint = near_miss(text, names.iter().copied());
        self.report(span, error.key(path).allowed(quoted(names)).hint(hint));
    }

    fn wrong_type(&mut self, span: Range<usize>, value: &DeValue, noun: &str, allowed: String, path: &str) {
        let found = match value {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) | DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        let found = match (value, noun) {
            (DeValue::Float(_), "a whole number") => "a fraction",
            _ => found,
        };
        let unquoted = value.as_str().and_then(|text| Some((text, DeValue::parse(text).ok()?)));
        let hint = unquoted
            .filter(|_| noun.contains("number") || noun.contains("true"))
            .map(|(text, _)| format!("write it without quotes: {text}"));
        let error = Error::new(Code::WrongType, format!("`{path}` must be {noun}, not {found}"));
        self.report(span, error.key(path).seen(show(value)).allowed(allowed).hint(hint));
    }
}

fn kinds_have(schema: &Value, key: &str) -> bool {
    kinds(schema).iter().any(|k| k["properties"].get(key).is_some())
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn section(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!(" in [{path}]") }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

fn integer(n: &DeInteger) -> Option<i64> {
    i64::from_str_radix(n.as_str(), n.radix()).ok()
}

/// A value as a person would write it, cut to a line.
fn show(value: &DeValue) -> String {
    let text = match value {
        DeValue::String(text) => format!("\"{}\"", text.escape_debug()),
        DeValue::Integer(n) => n.to_string(),
        DeValue::Float(x) => x.to_string(),
        DeValue::Boolean(b) => b.to_string(),
        DeValue::Datetime(date) => date.to_string(),
        DeValue::Array(items) => {
            format!("[{}]", items.iter().take(20).map(|i| show(i.get_ref())).collect::<Vec<_>>().join(", "))
        }
        DeValue::Table(_) => "a table".into(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("...".chars()).collect() } else { text }
}

fn name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Whether `text` may name a run: it becomes the name of a folder.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && !text.starts_with(['.', '-']) && text.chars().all(name_char)
}

/// The nearest name to `text`, such as a file's stem.
pub(super) fn name_from(text: &str) -> String {
    let name: String = text.chars().map(|c| if name_char(c) { c } else { '-' }).take(128).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "job".into() } else { name.into() }
}

/// Fills in every `${NAME}`.
fn expand(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, Box<Error>> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) = after.split_once('}').ok_or_else(|| {
            Error::new(Code::NotAllowed, "`${` without its `}`").hint("write `${NAME}`".to_owned())
        })?;
        let value = variable(name).ok_or_else(|| {
            let message = format!("the environment variable `{}` is not set", name.escape_debug());
            Error::new(Code::UnsetVariable, message).hint(format!("set it, as in `{name}=... trainer ...`"))
        })?;
        out.extend([before, &value]);
        rest = after;
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(schemars::JsonSchema)]
    #[allow(dead_code, reason = "only its schema is used")]
    struct WithPath {
        /// A file.
        #[schemars(extend("format" = "path"))]
        train: std::path::PathBuf,
    }

    fn resolved(text: &str) -> Result<String, Box<Error>> {
        let schema = super::super::schema::of::<WithPath>();
        let mut tree = DeTable::parse(text).unwrap();
        match check(&mut tree, &schema, Path::new("/jobs")).pop() {
            Some((_, error)) => Err(error),
            None => Ok(tree.get_ref()["train"].get_ref().as_str().unwrap().to_owned()),
        }
    }

    #[test]
    fn paths_start_at_the_job_file_and_variables_are_filled_in() {
        assert_eq!(resolved("train = 'a/b.csv'").unwrap(), "/jobs/a/b.csv");
        assert_eq!(resolved("train = '/a/b.csv'").unwrap(), "/a/b.csv");
        let error = resolved("train = '${TRAINER_TEST_UNSET}/b.csv'").unwrap_err();
        assert_eq!(error.code, Code::UnsetVariable);
        assert_eq!(resolved("train = '${HOME'").unwrap_err().code, Code::NotAllowed);
        let set = |name: &str| (name == "DATA").then(|| "/data".to_owned());
        assert_eq!(expand("${DATA}/x/${DATA}", set).unwrap(), "/data/x//data");
    }

    #[test]
    fn a_file_name_gives_a_name() {
        for (stem, name) in [("quick start", "quick-start"), ("..", "job"), (".x", "x"), ("a.b_1", "a.b_1")] {
            assert_eq!(name_from(stem), name);
            assert!(is_name(&name_from(stem)));
        }
        assert!(!is_name("../up") && !is_name("") && !is_name("a b"));
    }
}
