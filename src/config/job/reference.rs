//! Generates the reference page of the job, `docs/job.md`, from its schema.

use std::fmt::Write;

use serde_json::Value;

use super::schema::{allowed, is_table, kind, kinds, schema};

const INTRO: &str = "\
<!-- Written by `trainer schema --markdown > docs/job.md`; change the types in src/config/job instead. -->

# The job

A job is one TOML file. Unknown keys, wrong types, values out of range and keys that contradict each
other are errors, shown with file and line; `trainer check JOB` finds them all without training. Any key
can be overridden on the command line: `--set train.batch_size=32`. If two keys exclude each other, the one
from `--set` replaces the one in the file.

Sizes are written `\"8GiB\"`, `\"500MB\"`, `\"80%\"` or `\"auto\"`. Paths are relative to the job file and
may contain environment variables as `${NAME}`. `trainer schema` prints the same as a JSON Schema, which
editors use to complete and check a job.
";

/// The page, in Markdown.
pub fn job_markdown() -> String {
    let schema = schema();
    let mut page = String::from(INTRO);
    let required = |key: &str| schema["required"].as_array().is_some_and(|r| r.iter().any(|k| k == key));
    page.push_str("\n## Top level\n\n");
    write_keys(&mut page, &schema);
    for (name, table) in schema["properties"].as_object().into_iter().flatten() {
        if !is_table(table) {
            continue;
        }
        let need = if required(name) { "Required." } else { "Optional." };
        write_line(&mut page, format_args!("## [{name}]\n\n{} {need}\n", description(table)));
        for each in kinds(table) {
            if let Some(kind) = kind(each) {
                let default = if table["default"]["kind"] == kind {
                    " The default: `kind` may be omitted."
                } else {
                    ""
                };
                write_line(
                    &mut page,
                    format_args!("### kind = \"{kind}\"\n\n{}{default}\n", description(each)),
                );
            }
            write_keys(&mut page, each);
            write_nested_tables(&mut page, name, each);
        }
    }
    page.truncate(page.trim_end().len());
    page + "\n"
}

/// The keys of one table, without its tables.
fn write_keys(page: &mut String, table: &Value) {
    let keys = table["properties"].as_object().into_iter().flatten();
    let mut keys = keys.filter(|(key, s)| !is_table(s) && *key != "kind").peekable();
    if keys.peek().is_none() {
        return;
    }
    page.push_str("| key | allowed | default | meaning |\n|---|---|---|---|\n");
    let required = |key: &str| table["required"].as_array().is_some_and(|r| r.iter().any(|k| k == key));
    for (key, schema) in keys {
        let default = match schema.get("default") {
            Some(default) => format!("`{}`", toml_value(default)),
            None if required(key) => "required".into(),
            None => "".into(),
        };
        let meaning = format!("{}{}", description(schema), choice_descriptions(schema));
        write_line(
            page,
            format_args!("| `{key}` | {} | {default} | {meaning} |", allowed(schema).replace('|', "\\|")),
        );
    }
    page.push('\n');
}

/// The tables and lists of tables in a table, each with its own keys.
fn write_nested_tables(page: &mut String, name: &str, table: &Value) {
    for (key, schema) in table["properties"].as_object().into_iter().flatten() {
        let items = &schema["items"];
        if is_table(schema) {
            write_line(page, format_args!("#### [{name}.{key}]\n\n{}\n", description(schema)));
            write_keys(page, schema);
        }
        if !items.is_object() || !is_table(items) {
            continue;
        }
        write_line(page, format_args!("#### [[{name}.{key}]]\n\n{}\n", description(items)));
        for each in kinds(items) {
            if let Some(kind) = kind(each) {
                write_line(page, format_args!("##### kind = \"{kind}\"\n\n{}\n", description(each)));
            }
            write_keys(page, each);
        }
    }
}

fn write_line(page: &mut String, text: std::fmt::Arguments) {
    // Writing to a string cannot fail.
    let _ = writeln!(page, "{text}");
}

fn description(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().replace('\n', " ")
}

/// What each choice means, where the choices say so.
fn choice_descriptions(schema: &Value) -> String {
    let choices = schema["oneOf"].as_array().or(schema["items"]["oneOf"].as_array());
    let described = choices.into_iter().flatten().filter(|c| c["const"].is_string());
    described
        .map(|c| format!("<br>`{}`: {}", c["const"].as_str().unwrap_or_default(), description(c)))
        .collect()
}

/// A default as TOML.
fn toml_value(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(toml_value).collect::<Vec<_>>().join(", ")),
        Value::Object(table) => {
            let keys = table.iter().map(|(key, value)| format!("{key} = {}", toml_value(value)));
            format!("{{ {} }}", keys.collect::<Vec<_>>().join(", "))
        }
        plain => plain.to_string(),
    }
}
