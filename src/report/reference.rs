//! Generates `docs/events.md` from the definition of [`EventRecord`].

use std::collections::BTreeSet;
use std::fmt::Write;

use schemars::schema_for;
use serde_json::{Map, Value};

use crate::events::event::EventRecord;

const INTRO: &str = "\
# Events

`events.jsonl` in a run's folder is the complete record of the run: one JSON object per line, in
chronological order. `trainer fit --json` streams the same lines to stdout. Progress, `metrics.jsonl`,
TensorBoard and the summary are rendered from it.

Every line has `t`, the seconds since the Unix epoch, and `event`, its kind, which determines the
other fields. A killed run may leave a last line without its newline: skip it. After `resumed`, updates
beyond its `step` are repeated and reported again; the later report is the valid one.

A step is one update of the weights. This page is generated from `src/events/event.rs`.
";

/// The reference page of `events.jsonl`.
pub fn events_markdown() -> String {
    let schema = schema_for!(EventRecord).to_value();
    let mut page = INTRO.to_owned();
    let mut type_names = BTreeSet::new();
    for kind in schema["oneOf"].as_array().into_iter().flatten() {
        let title = kind["properties"]["event"]["const"].as_str().unwrap_or_default();
        write_section(&mut page, &format!("## `{title}`"), kind, &mut type_names);
    }
    // Types of events refer to further types: repeat until none is new.
    page += "\n## Types\n";
    let mut done = Vec::new();
    while let Some(name) = type_names.iter().find(|name| !done.contains(*name)).cloned() {
        write_section(&mut page, &format!("### {name}"), &schema["$defs"][&name], &mut type_names);
        done.push(name);
    }
    page
}

/// A heading, the description, and a table of fields or a list of allowed values.
fn write_section(page: &mut String, title: &str, schema: &Value, named: &mut BTreeSet<String>) {
    // Writing to a string cannot fail.
    let _ = write!(page, "\n{title}\n");
    if let Some(text) = schema["description"].as_str() {
        let _ = write!(page, "\n{}\n", one_line(text));
    }
    let none = Map::new();
    let fields = schema["properties"].as_object().unwrap_or(&none);
    if fields.keys().any(|name| name != "event") {
        *page += "\n| field | type | meaning |\n|---|---|---|\n";
    }
    for (name, field) in fields.iter().filter(|(name, _)| *name != "event") {
        let meaning = one_line(field["description"].as_str().unwrap_or_default());
        let _ = writeln!(page, "| `{name}` | {} | {meaning} |", type_text(field, named));
    }
    for word in schema["enum"].as_array().into_iter().flatten() {
        let _ = write!(page, "\n- `{}`", word.as_str().unwrap_or_default());
    }
    if schema["enum"].is_array() {
        *page += "\n";
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The type of a field in words, with a link if the page documents it.
fn type_text(field: &Value, named: &mut BTreeSet<String>) -> String {
    if let Some(name) = field["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        named.insert(name.to_owned());
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(choices) = field["anyOf"].as_array() {
        let choices: Vec<String> = choices.iter().map(|choice| type_text(choice, named)).collect();
        return choices.join(" or ");
    }
    let words: Vec<&str> = match &field["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect(),
    };
    let words = words.into_iter().map(|word| match word {
        "array" => format!("list of {}", type_text(&field["items"], named)),
        "object" => format!("map of {}", type_text(&field["additionalProperties"], named)),
        word => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_events_page_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/events.md");
        if std::env::var_os("TRAINER_UPDATE_DOCS").is_some_and(|v| v == "1") {
            std::fs::write(path, events_markdown()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == events_markdown(),
            "docs/events.md is stale; TRAINER_UPDATE_DOCS=1 cargo test events_page writes it"
        );
    }

    #[test]
    fn every_event_and_type_has_its_section() {
        let page = events_markdown();
        for title in
            ["## `step`\n", "## `finished`\n", "### MemoryPlan\n", "### Role\n", "- `optimizer_state`\n"]
        {
            assert!(page.contains(title), "{title}");
        }
        assert!(
            page.contains("| `measured_peak_bytes` | [MemoryBytes](#memorybytes) | The measured peak: "),
            "{page}"
        );
        assert!(page.contains("| `loss` | number or null | Mean training loss"), "{page}");
    }
}
