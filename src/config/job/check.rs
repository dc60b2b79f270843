//! Walks a parsed job along its schema and reports every error, not just the first.
//!
//! What passes here deserializes. Also expands variables in paths and makes the paths absolute.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

use super::error::{ErrorCode, JobError, did_you_mean};
use super::renamed::renamed;
use super::schema::{allowed, alternative, choices, is_table, keywords, kind, kinds};
use super::source_map::WHOLE_FILE;
use super::synonyms::{synonym_choice, synonym_elsewhere, synonym_here};
use crate::base::units::MemorySize;

/// An error and the bytes it is about, in the address space of [`super::source_map::SourceMap`].
pub(super) type SpannedError = (Range<usize>, Box<JobError>);

/// Checks `table` against `schema`, both the whole job's.
pub(super) fn check(table: &mut Spanned<DeTable>, schema: &Value, base: &Path) -> Vec<SpannedError> {
    let mut checker = Checker { schema, base, errors: Vec::new() };
    checker.check_table(table.get_mut(), WHOLE_FILE, schema, "");
    checker.errors
}

struct Checker<'a> {
    schema: &'a Value,
    /// The folder that relative paths start from.
    base: &'a Path,
    errors: Vec<SpannedError>,
}

impl Checker<'_> {
    fn add_error(&mut self, span: Range<usize>, error: JobError) {
        self.errors.push((span, error.into()));
    }

    fn check_table(&mut self, table: &mut DeTable, span: Range<usize>, schema: &Value, path: &str) {
        let kinds = kinds(schema);
        let chosen = match kinds {
            [only] if kind(only).is_none() => Some(only),
            _ => self.chosen_kind(table, &span, schema, path),
        };
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().as_ref();
            match (chosen, chosen.and_then(|chosen| chosen["properties"].get(name))) {
                // `chosen_kind` already checked it.
                (Some(chosen), Some(_)) if name == "kind" && kind(chosen).is_some() => {}
                (_, Some(schema)) => self.check_value(value, schema, &join(path, name)),
                // Without a kind, report a key only if no kind has it.
                (None, _) if has_key(kinds, name) => {}
                _ => self.unknown_key(key, value.get_ref().is_table(), chosen, kinds, path),
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

    /// The table of the schema that `kind` names; a default kind is written into the job.
    fn chosen_kind<'s>(
        &mut self,
        table: &mut DeTable,
        span: &Range<usize>,
        schema: &'s Value,
        path: &str,
    ) -> Option<&'s Value> {
        let kinds = kinds(schema);
        let names: Vec<&str> = kinds.iter().filter_map(kind).collect();
        if let (Some(default), false) = (schema["default"]["kind"].as_str(), table.contains_key("kind")) {
            let kind = Spanned::new(span.clone(), DeValue::String(default.to_owned().into()));
            table.insert(Spanned::new(span.clone(), "kind".into()), kind);
        }
        let Some(value) = table.get("kind") else {
            let error = JobError::new(ErrorCode::MissingKey, format!("missing key `kind`{}", section(path)));
            self.add_error(span.clone(), error.key(join(path, "kind")).allowed(quoted(&names)));
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

    fn unknown_key(
        &mut self,
        key: &Spanned<DeString>,
        table: bool,
        chosen: Option<&Value>,
        kinds: &[Value],
        path: &str,
    ) {
        let (name, shown) = (key.get_ref().as_ref(), key.get_ref().escape_debug());
        let tables = chosen.map_or(kinds, std::slice::from_ref);
        let keys = tables.iter().flat_map(|t| t["properties"].as_object().into_iter().flatten());
        let mut known: Vec<&str> = Vec::new();
        for (key, _) in keys {
            if !known.contains(&key.as_str()) {
                known.push(key);
            }
        }
        let owners = kinds.iter().filter(|k| has_key(std::slice::from_ref(k), name)).filter_map(kind);
        let owners: Vec<&str> = owners.collect();
        let now = renamed(&join(path, name)).and_then(|key| key.rsplit('.').next());
        let hint = now.map(|new| format!("`{shown}` is now called `{new}`"));
        // What other tools call a key of this table is no key of another kind, whatever that kind calls so.
        let hint = hint.or_else(|| synonym_here(name, path, &known));
        let error = match chosen.and_then(kind) {
            Some(this) if !owners.is_empty() => {
                let message = format!("key `{shown}` does not belong to kind \"{this}\"{}", section(path));
                let hint = hint.unwrap_or_else(|| format!("`{shown}` is a key of kind {}", quoted(&owners)));
                JobError::new(ErrorCode::OtherKind, message).hint(hint)
            }
            _ => {
                let mut tables = self.schema["properties"].as_object().into_iter().flatten();
                let owner = tables.find(|(_, table)| has_key(super::schema::kinds(table), name));
                let elsewhere = owner.map(|(table, _)| format!("`{shown}` is a key of [{table}]"));
                let what = if table && path.is_empty() {
                    format!("unknown table [{shown}]")
                } else {
                    format!("unknown key `{shown}`{}", section(path))
                };
                // A name of other tools, then a key here that is spelled almost so, then a key of another table.
                let hint = hint.or_else(|| synonym_elsewhere(name, path, table, self.schema));
                let hint = hint.or_else(|| did_you_mean(name, known.iter().copied())).or(elsewhere);
                JobError::new(ErrorCode::UnknownKey, what).hint(hint)
            }
        };
        self.add_error(key.span(), error.key(join(path, name)).allowed(known.join(", ")));
    }

    fn missing_key(&mut self, span: Range<usize>, key: &str, schema: &Value, path: &str) {
        let (code, at) = (ErrorCode::MissingKey, join(path, key));
        let error = if is_table(schema) {
            let names: Vec<&str> = kinds(schema).iter().filter_map(kind).collect();
            let hint = names.first().map(|kind| format!("add `[{at}]` with `kind = \"{kind}\"`"));
            JobError::new(code, format!("missing table [{at}]")).hint(hint)
        } else {
            JobError::new(code, format!("missing key `{key}`{}", section(path))).allowed(allowed(schema))
        };
        self.add_error(span, error.key(at));
    }

    /// At most one of the keys in `x-one-of` may be present; exactly one if the schema requires it.
    fn exclusive_keys(&mut self, table: &DeTable, span: Range<usize>, schema: &Value, path: &str) {
        let group: Vec<&str> =
            schema["x-one-of"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let present: Vec<&str> = group.iter().copied().filter(|key| table.contains_key(*key)).collect();
        let list = group.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(" or ");
        if let [first, .., last] = present[..] {
            let message = format!("`{first}` and `{last}` exclude each other{}", section(path));
            let span = table.get_key_value(last).map_or(span, |(key, _)| key.span());
            let error = JobError::new(ErrorCode::Contradiction, message).key(join(path, last));
            self.add_error(span, error.allowed(format!("one of {list}")));
        } else if present.is_empty() && !group.is_empty() && schema["oneOf"].is_array() {
            let error = JobError::new(
                ErrorCode::MissingKey,
                format!("neither {}{}", list.replace(" or ", " nor "), section(path)),
            );
            self.add_error(span, error.key(join(path, group[0])).hint(format!("add {list}")));
        }
    }

    fn check_value(&mut self, value: &mut Spanned<DeValue>, schema: &Value, path: &str) {
        let span = value.span();
        let schema = alternative(schema, matches!(value.get_ref(), DeValue::Table(_)));
        let names = choices(schema);
        // The key takes a list or a single value; check a single value against the list's item schema.
        let value_or_list = schema["type"].is_array();
        if value_or_list && !matches!(value.get_ref(), DeValue::Array(_)) {
            return self.check_value(value, &schema["items"], path);
        }
        match (if value_or_list { Some("array") } else { schema["type"].as_str() }, value.get_mut()) {
            (Some("object"), DeValue::Table(table)) if schema["additionalProperties"].is_object() => {
                for (key, value) in table.iter_mut() {
                    self.check_value(value, &schema["additionalProperties"], &join(path, key.get_ref()));
                }
            }
            (_, DeValue::Table(table)) if is_table(schema) => self.check_table(table, span, schema, path),
            (_, DeValue::String(text)) if !names.is_empty() => {
                if !names.contains(&text.as_ref()) {
                    self.not_a_choice(span, text, &names, path);
                }
            }
            (Some("string"), DeValue::String(text)) => match self.check_string(text, schema, path) {
                Ok(Some(resolved)) => *text = resolved.into(),
                Ok(None) => {}
                Err(error) => self.add_error(span, error.key(path).value(format!("\"{text}\""))),
            },
            // A column without a name is called by its number, and a mark of missing values may be one.
            (Some("string"), number @ (DeValue::Integer(_) | DeValue::Float(_)))
                if path.starts_with("data.") && schema["format"].is_null() =>
            {
                *number = DeValue::String(format_value(number).into());
            }
            (Some("boolean"), DeValue::Boolean(_)) => {}
            (Some("integer" | "number"), DeValue::Integer(n)) => {
                // TOML integers have 64 bits; the resolved job could not represent a larger one.
                let number = parse_integer(n).map(|n| n as f64);
                self.check_range(span, number, n.to_string(), schema, path);
            }
            (Some("number"), DeValue::Float(x)) => {
                let number = x.as_str().parse().ok().filter(|x: &f64| x.is_finite());
                self.check_range(span, number, x.to_string(), schema, path);
            }
            (Some("array"), DeValue::Array(items)) => {
                let len = items.len() as u64;
                let too_few = schema["minItems"].as_u64().is_some_and(|min| len < min);
                let too_many = schema["maxItems"].as_u64().is_some_and(|max| len > max);
                if too_few || too_many {
                    let shown = format!("{len} item{}", if len == 1 { "" } else { "s" });
                    let error = JobError::new(ErrorCode::OutOfRange, format!("`{path}` cannot have {shown}"));
                    self.add_error(span, error.key(path).value(shown).allowed(allowed(schema)));
                }
                let mut seen = BTreeSet::new();
                for (i, item) in items.iter_mut().enumerate() {
                    let shown = format_value(item.get_ref());
                    if schema["uniqueItems"] == true && !seen.insert(shown.clone()) {
                        let error =
                            JobError::new(ErrorCode::NotAllowed, format!("`{path}` names {shown} twice"));
                        self.add_error(item.span(), error.key(path).value(shown));
                    }
                    self.check_value(item, &schema["items"], &format!("{path}[{i}]"));
                }
            }
            (kind, other) => {
                let noun = match kind {
                    _ if is_table(schema) => "a table",
                    Some("integer") => "a whole number",
                    Some("number") => "a number",
                    Some("boolean") => "true or false",
                    Some("array") => "a list",
                    _ => "a string",
                };
                self.wrong_type(span, other, noun, allowed(schema), path);
            }
        }
    }

    /// Reports `n` unless it is within the schema's bounds; `None` is a number that does not fit its type.
    fn check_range(&mut self, span: Range<usize>, n: Option<f64>, shown: String, schema: &Value, path: &str) {
        let bound = |key: &str| schema[key].as_f64();
        let inside = n.is_some_and(|n| {
            bound("minimum").is_none_or(|low| n >= low)
                && bound("exclusiveMinimum").is_none_or(|low| n > low)
                && bound("maximum").is_none_or(|high| n <= high)
                && bound("exclusiveMaximum").is_none_or(|high| n < high)
                && schema["enum"].as_array().is_none_or(|listed| listed.iter().any(|v| v.as_f64() == Some(n)))
        });
        if !inside {
            let error = JobError::new(ErrorCode::OutOfRange, format!("`{path}` cannot be {shown}"));
            self.add_error(span, error.key(path).value(shown).allowed(allowed(schema)));
        }
    }

    /// Checks a string by its `format`; a path comes back resolved.
    fn check_string(&self, text: &str, schema: &Value, path: &str) -> Result<Option<String>, Box<JobError>> {
        let fits = match schema["format"].as_str() {
            Some("size") => text.parse::<MemorySize>().is_ok(),
            Some("bytes") => matches!(text.parse(), Ok(MemorySize::Bytes(_))),
            Some("size-or-percent") => {
                matches!(text.parse(), Ok(MemorySize::Bytes(_) | MemorySize::Percent(_)))
            }
            Some("name") => is_name(text),
            Some("ratio") => text.parse::<super::SizeRatio>().is_ok(),
            Some("fold") => text.parse::<super::Fold>().is_ok(),
            // A keyword that the key accepts in place of a path.
            Some("path") if keywords(schema).any(|word| word == text) => true,
            // Inline text in place of a path, recognized by a marker that every such text contains.
            Some("path") if schema["x-text"].as_str().is_some_and(|marker| text.contains(marker)) => true,
            Some("path") => {
                let expanded = expand(text, |name| std::env::var(name).ok())?;
                return Ok(Some(self.base.join(expanded).to_string_lossy().into_owned()));
            }
            _ => true,
        };
        if fits {
            return Ok(None);
        }
        let error =
            JobError::new(ErrorCode::NotAllowed, format!("`{path}` cannot be \"{}\"", text.escape_debug()));
        Err(error.allowed(allowed(schema)).into())
    }

    fn not_a_choice(&mut self, span: Range<usize>, text: &str, names: &[&str], path: &str) {
        let shown = format!("\"{}\"", text.escape_debug());
        let error = JobError::new(ErrorCode::NotAllowed, format!("`{path}` cannot be {shown}"));
        let hint = synonym_choice(text, names).or_else(|| did_you_mean(text, names.iter().copied()));
        self.add_error(span, error.key(path).value(shown).allowed(quoted(names)).hint(hint));
    }

    fn wrong_type(&mut self, span: Range<usize>, value: &DeValue, noun: &str, allowed: String, path: &str) {
        let shown = format_value(value);
        let found = match value {
            DeValue::String(_) => format!("the string {shown}"),
            DeValue::Integer(_) | DeValue::Float(_) => format!("the number {shown}"),
            DeValue::Boolean(_) => shown.clone(),
            DeValue::Datetime(_) => format!("the date {shown}"),
            DeValue::Array(_) => "a list".into(),
            DeValue::Table(_) => "a table".into(),
        };
        let unquoted =
            value.as_str().filter(|text| match DeValue::parse(text).as_ref().map(Spanned::get_ref) {
                Ok(DeValue::Integer(_)) => noun.contains("number"),
                Ok(DeValue::Float(_)) => noun == "a number",
                Ok(DeValue::Boolean(_)) => noun == "true or false",
                _ => false,
            });
        let hint = unquoted.map(|text| format!("write it without quotes: {text}")).or_else(|| {
            let has_kinds = kinds(&self.schema["properties"][path]).iter().any(|table| kind(table).is_some());
            let name = value.as_str().filter(|_| has_kinds)?;
            Some(format!("write `[{path}]`, and below it `kind = \"{}\"`", name.escape_debug()))
        });
        let error = JobError::new(ErrorCode::WrongType, format!("`{path}` must be {noun}, not {found}"));
        self.add_error(span, error.key(path).value(shown).allowed(allowed).hint(hint));
    }
}

fn has_key(kinds: &[Value], key: &str) -> bool {
    kinds.iter().any(|kind| kind["properties"].get(key).is_some())
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn section(path: &str) -> String {
    match path {
        "" => String::new(),
        item if item.ends_with(']') => format!(" in `{item}`"),
        table => format!(" in [{table}]"),
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

fn parse_integer(n: &DeInteger) -> Option<i64> {
    i64::from_str_radix(n.as_str(), n.radix()).ok()
}

/// A value as TOML, truncated to a line.
fn format_value(value: &DeValue) -> String {
    let text = match value {
        DeValue::String(text) => format!("\"{}\"", text.escape_debug()),
        DeValue::Integer(n) => n.to_string(),
        DeValue::Float(x) => x.to_string(),
        DeValue::Boolean(b) => b.to_string(),
        DeValue::Datetime(date) => date.to_string(),
        DeValue::Array(items) => {
            format!(
                "[{}]",
                items.iter().take(20).map(|i| format_value(i.get_ref())).collect::<Vec<_>>().join(", ")
            )
        }
        DeValue::Table(_) => "a table".into(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("...".chars()).collect() } else { text }
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Whether `text` may name a run: it becomes the name of a folder.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && !text.starts_with(['.', '-']) && text.chars().all(is_name_char)
}

/// A valid name derived from `text`, such as a file's stem.
pub(super) fn to_name(text: &str) -> String {
    let name: String = text.chars().map(|c| if is_name_char(c) { c } else { '-' }).take(128).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "job".into() } else { name.into() }
}

/// Expands every `${NAME}`.
fn expand(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, Box<JobError>> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) = after.split_once('}').ok_or_else(|| {
            JobError::new(ErrorCode::NotAllowed, "`${` without a closing `}`")
                .hint("write `${NAME}`".to_owned())
        })?;
        let value = variable(name).ok_or_else(|| {
            let message = format!("the environment variable `{}` is not set", name.escape_debug());
            JobError::new(ErrorCode::UnsetVariable, message)
                .hint(format!("set it, as in `{name}=... trainer ...`"))
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

    fn resolved(text: &str) -> Result<String, Box<JobError>> {
        let schema = super::super::schema::schema_of::<WithPath>();
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
        assert_eq!(error.code, ErrorCode::UnsetVariable);
        assert_eq!(resolved("train = '${HOME'").unwrap_err().code, ErrorCode::NotAllowed);
        let set = |name: &str| (name == "DATA").then(|| "/data".to_owned());
        assert_eq!(expand("${DATA}/x/${DATA}", set).unwrap(), "/data/x//data");
    }

    #[test]
    fn a_file_name_gives_a_name() {
        for (stem, name) in [("quick start", "quick-start"), ("..", "job"), (".x", "x"), ("a.b_1", "a.b_1")] {
            assert_eq!(to_name(stem), name);
            assert!(is_name(&to_name(stem)));
        }
        assert!(!is_name("../up") && !is_name("") && !is_name("a b"));
    }
}
