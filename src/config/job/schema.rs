//! The JSON Schema of a job: generated from the job's types, and the single source of its checks, of editor
//! completion and of the reference page.
//!
//! Every definition is inlined (no `$ref`), so a reader only has to walk the tree. A table is either `properties` or
//! a `oneOf` of such, one per `kind`; keys common to all kinds are repeated in each. The kind in a table's `default`
//! may be omitted. `x-one-of` lists keys that exclude each other.

use std::borrow::Cow;

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::base::units::MemorySize;

/// The schema of a job.
pub fn schema() -> Value {
    let mut schema = schema_of::<super::Job>();
    schema["title"] = json!("A trainer job");
    schema["description"] = json!("What `trainer fit` trains: model, data, length of the run and memory.");
    schema
}

/// The schema of `T` in the form described above. Draft 7, which TOML editors know.
pub(super) fn schema_of<T: JsonSchema>() -> Value {
    let settings =
        SchemaSettings::draft07().with(|s| s.inline_subschemas = true).with_transform(SimplifySchema);
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

#[derive(Clone)]
struct SimplifySchema;

impl Transform for SimplifySchema {
    fn transform(&mut self, schema: &mut Schema) {
        if let Some(object) = schema.as_object_mut() {
            remove_null(object);
            spread_common_keys(object);
            forbid_exclusive_keys(object);
            make_default_kind_optional(object);
            if object.contains_key("properties") {
                object.insert("additionalProperties".into(), json!(false));
            }
        }
        transform_subschemas(self, schema);
    }
}

/// TOML has no null: an optional key is one that may be absent.
fn remove_null(object: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|t| t != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if object.get("default") == Some(&Value::Null) {
        object.remove("default");
    }
    // An optional enum or union: `anyOf` of itself and null.
    if let Some(Value::Array(options)) = object.get_mut("anyOf") {
        options.retain(|option| option["type"] != "null");
        if let [Value::Object(only)] = &options[..] {
            let only = only.clone();
            object.remove("anyOf");
            for (key, value) in only {
                object.entry(key).or_insert(value);
            }
        }
    }
}

/// Moves the `properties` beside a `oneOf` of tables into each of these.
fn spread_common_keys(object: &mut Map<String, Value>) {
    let tables = object.get("oneOf").and_then(Value::as_array);
    if !tables.is_some_and(|tables| tables.iter().all(|t| t["properties"].is_object())) {
        return;
    }
    let Some(Value::Object(common)) = object.shift_remove("properties") else { return };
    for table in object["oneOf"].as_array_mut().into_iter().flatten() {
        if let Some(own) = table["properties"].as_object_mut() {
            own.extend(common.clone());
        }
    }
}

/// Adds a standard constraint for `x-one-of`: no two of its keys may be present.
fn forbid_exclusive_keys(object: &mut Map<String, Value>) {
    let Some(group) = object.get("x-one-of").and_then(Value::as_array) else { return };
    let pairs = group.iter().enumerate().flat_map(|(i, a)| group[i + 1..].iter().map(move |b| (a, b)));
    let pairs: Vec<Value> = pairs.map(|(a, b)| json!({ "required": [a, b] })).collect();
    object.insert("not".into(), json!({ "anyOf": pairs }));
}

/// The default kind need not be named.
fn make_default_kind_optional(object: &mut Map<String, Value>) {
    let Some(default) = object.get("default").and_then(|table| table.get("kind")).cloned() else { return };
    for table in object.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten() {
        if table["properties"]["kind"]["const"] == default
            && let Some(required) = table["required"].as_array_mut()
        {
            required.retain(|key| key != "kind");
        }
    }
}

impl JsonSchema for MemorySize {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "size" })
    }
}

/// The names a string may be, when the schema lists them.
pub(super) fn choices(schema: &Value) -> Vec<&str> {
    if let Some(only) = schema["const"].as_str() {
        return vec![only];
    }
    let listed = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let described = schema["oneOf"].as_array().into_iter().flatten();
    listed.chain(described.filter(|s| s["type"] == "string").flat_map(choices)).collect()
}

/// The tables a table may be, one for each `kind`; the table itself when it has no `kind`.
pub(super) fn kinds(schema: &Value) -> &[Value] {
    match schema["oneOf"].as_array() {
        Some(kinds) if kinds.iter().all(|k| k["properties"].is_object()) => kinds,
        _ => std::slice::from_ref(schema),
    }
}

/// The `kind` of one of [`kinds`].
pub(super) fn kind(table: &Value) -> Option<&str> {
    table["properties"]["kind"]["const"].as_str()
}

/// Whether a key of `schema` holds a table.
pub(super) fn is_table(schema: &Value) -> bool {
    kinds(schema).iter().all(|k| k["properties"].is_object())
}

/// Keywords that a path key accepts in place of a path.
pub(super) fn keywords(schema: &Value) -> impl Iterator<Item = &str> {
    schema["x-words"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The one of the alternatives of `schema` that a value is meant as: a table, or anything else.
pub(super) fn alternative(schema: &Value, is_table_value: bool) -> &Value {
    let Some(options) = schema["anyOf"].as_array() else { return schema };
    let fits = |option: &&Value| (option["type"] == "object") == is_table_value;
    options.iter().find(fits).or(options.first()).unwrap_or(schema)
}

/// What `schema` allows, in words: `a whole number, at least 1`.
pub(super) fn allowed(schema: &Value) -> String {
    let choices = choices(schema);
    if !choices.is_empty() {
        return choices.iter().map(|c| format!("\"{c}\"")).collect::<Vec<_>>().join(", ");
    }
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().map(allowed).collect::<Vec<_>>().join(", or ");
    }
    if schema["additionalProperties"].is_object() {
        return format!("a table of names, each {}", allowed(&schema["additionalProperties"]));
    }
    if is_table(schema) {
        return "a table".into();
    }
    if schema["type"].is_array() {
        let count = match (schema["minItems"].as_u64(), schema["maxItems"].as_u64()) {
            (Some(min), Some(max)) if min == max => format!("{min} of these"),
            _ => "these".into(),
        };
        return format!("{}, or a list of {count}", allowed(&schema["items"]));
    }
    match (schema["type"].as_str(), schema["format"].as_str()) {
        (Some("integer"), _) if schema["enum"].is_array() => number_choices(schema),
        (Some("integer"), _) => format!("a whole number{}", range(schema)),
        (Some("number"), _) => format!("a number{}", range(schema)),
        (Some("boolean"), _) => "true or false".into(),
        (Some("array"), _) => {
            let length = match (schema["minItems"].as_u64(), schema["maxItems"].as_u64()) {
                (Some(min), Some(max)) if min == max => format!(" of {min}"),
                (Some(min), _) => format!(" of at least {min}"),
                _ => String::new(),
            };
            format!("a list{length}, each {}", allowed(&schema["items"]))
        }
        (_, Some("size")) => "\"auto\", a size such as \"8GiB\" or a percentage such as \"80%\"".into(),
        (_, Some("bytes")) => "a size such as \"512MiB\"".into(),
        (_, Some("size-or-percent")) => "a size such as \"512MiB\" or a percentage such as \"5%\"".into(),
        (_, Some("ratio")) => "a factor above 1, such as \"2x\"".into(),
        (_, Some("fold")) => "a fold of at least two, such as \"2/5\" for the second of five".into(),
        (_, Some("name")) => "letters, digits, `-`, `_` and `.`, not starting with `.` or `-`".into(),
        (_, Some("path")) if keywords(schema).next().is_some() => {
            let named = keywords(schema).map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
            format!("{named}, or a path, relative to the job file")
        }
        (_, Some("path")) => "a path, relative to the job file; `${NAME}` is an environment variable".into(),
        _ => "a string".into(),
    }
}

/// Numbers listed one by one.
fn number_choices(schema: &Value) -> String {
    let listed = schema["enum"].as_array().into_iter().flatten();
    listed.map(Value::to_string).collect::<Vec<_>>().join(", ")
}

fn range(schema: &Value) -> String {
    let bound = |key: &str| {
        let whole = schema[key].as_i64().map(|n| n.to_string());
        whole.or(schema[key].as_f64().map(|x| x.to_string()))
    };
    let low = bound("minimum").map(|n| format!("at least {n}"));
    let above = bound("exclusiveMinimum").map(|n| format!("above {n}"));
    let high = bound("maximum").map(|n| format!("at most {n}"));
    let below = bound("exclusiveMaximum").map(|n| format!("below {n}"));
    match (above.or(low), below.or(high)) {
        (Some(low), Some(high)) => format!(", {low} and {high}"),
        (Some(one), None) | (None, Some(one)) => format!(", {one}"),
        (None, None) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_keys_stand_in_every_kind_and_nothing_is_referred_to() {
        let schema = schema();
        assert!(!schema.to_string().contains("$ref"), "{schema:#}");
        let types = schema
            .to_string()
            .split(r#""type":"#)
            .map(|t| t[..t.len().min(40)].to_owned())
            .collect::<Vec<_>>();
        assert!(
            !types[1..].iter().any(|t| t.split(':').next().is_some_and(|t| t.contains("null"))),
            "{schema:#}"
        );
        for source in kinds(&schema["properties"]["data"]) {
            for key in ["kind", "shuffle", "workers", "prefetch"] {
                assert!(source["properties"].get(key).is_some(), "{key} in {source:#}");
            }
            assert_eq!(source["additionalProperties"], false);
        }
    }

    #[test]
    fn every_key_is_described() {
        fn walk(path: &str, schema: &Value) {
            for table in kinds(schema) {
                for (key, value) in table["properties"].as_object().into_iter().flatten() {
                    let path = format!("{path}.{key}");
                    assert!(value["description"].is_string() || key == "kind", "{path} has no description");
                    walk(&path, value);
                    walk(&path, &value["items"]);
                }
            }
        }
        walk("", &schema());
    }

    #[test]
    fn ranges_read_as_sentences() {
        let batch = &schema()["properties"]["train"]["properties"]["batch_size"];
        assert_eq!(allowed(batch), "a whole number, at least 1 and at most 1048576");
        let kinds_of_model = schema();
        let mlp = &kinds(&kinds_of_model["properties"]["model"])[0]["properties"];
        assert_eq!(allowed(&mlp["dropout"]), "a number, at least 0 and below 1");
        assert_eq!(allowed(&mlp["activation"]), r#""relu", "gelu", "gelu_tanh", "silu""#);
    }
}
