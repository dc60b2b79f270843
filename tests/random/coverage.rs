//! Schema coverage of the generator: every kind, every key, every choice of a key and both values of a switch.

use std::collections::BTreeSet;

use serde_json::Value;

/// Everything a job may say, as paths: `model.cnn.stages.norm=batch`.
pub fn schema_paths(schema: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        add_schema_paths(value, key, &mut found);
    }
    found
}

fn add_schema_paths(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    let tables: Vec<&Value> = match schema["oneOf"].as_array() {
        Some(kinds) if kinds.iter().all(|kind| kind["properties"].is_object()) => kinds.iter().collect(),
        _ if schema["properties"].is_object() => vec![schema],
        _ => Vec::new(),
    };
    for table in &tables {
        let path = match table["properties"]["kind"]["const"].as_str() {
            Some(kind) => format!("{path}.{kind}"),
            None => path.to_owned(),
        };
        found.insert(path.clone());
        let keys = table["properties"].as_object().into_iter().flatten();
        keys.filter(|(key, _)| *key != "kind")
            .for_each(|(key, value)| add_schema_paths(value, &format!("{path}.{key}"), found));
    }
    if tables.is_empty() {
        if schema["items"].is_object() {
            add_schema_paths(&schema["items"], path, found);
        }
        if schema["type"] == "boolean" {
            found.extend([format!("{path}=false"), format!("{path}=true")]);
        }
        let listed = schema["enum"].as_array().into_iter().flatten();
        let described = schema["oneOf"].as_array().into_iter().flatten().map(|choice| &choice["const"]);
        found.extend(
            listed.chain(described).filter_map(Value::as_str).map(|choice| format!("{path}={choice}")),
        );
        let described = schema["oneOf"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|c| c["enum"].as_array().into_iter().flatten());
        found.extend(described.filter_map(Value::as_str).map(|choice| format!("{path}={choice}")));
    }
}

/// What a job says, as the same paths.
pub fn job_paths(job: &toml::Table, schema: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (key, value) in job {
        add_job_paths(value, &schema["properties"][key.as_str()], key, &mut found);
    }
    found
}

fn add_job_paths(value: &toml::Value, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    match value {
        toml::Value::Table(table) => {
            // The default kind may be omitted.
            let kind =
                table.get("kind").and_then(|kind| kind.as_str()).or(schema["default"]["kind"].as_str());
            let path = kind.map_or(path.to_owned(), |kind| format!("{path}.{kind}"));
            found.insert(path.clone());
            let own = match schema["oneOf"].as_array() {
                Some(kinds) if kind.is_some() => {
                    kinds.iter().find(|k| k["properties"]["kind"]["const"].as_str() == kind).unwrap_or(schema)
                }
                _ => schema,
            };
            for (key, value) in table.iter().filter(|(key, _)| *key != "kind") {
                add_job_paths(value, &own["properties"][key.as_str()], &format!("{path}.{key}"), found);
            }
        }
        toml::Value::Array(values) => {
            values.iter().for_each(|value| add_job_paths(value, &schema["items"], path, found))
        }
        toml::Value::Boolean(value) => drop(found.insert(format!("{path}={value}"))),
        toml::Value::String(value) => drop(found.insert(format!("{path}={value}"))),
        _ => {}
    }
}
