//! How files are written, and the keys that say so. Drawn apart from the rest of a job, which stays as it is.

use toml::{Table, Value};

use super::{ModelAndData, TableExt};
use crate::random::data::{ChatSpec, ColumnSpec, DataSpec, TableFormat, TableSpec, TokenFileSpec};
use crate::random::draw::Draw;

/// Turns the target of some tables and images into labels, of which a sample has any number, and adds sample weights.
pub fn choose_targets(draw: &mut Draw, parts: &mut ModelAndData) {
    let data = &mut parts.data;
    match &mut parts.files {
        DataSpec::Table(table) => {
            let target = data.get("target").cloned();
            let single = target.as_ref().is_some_and(Value::is_str);
            let name = |i: usize| if table.header { format!("column_{i}") } else { i.to_string() };
            if let Some(last) = table.columns.last_mut()
                && single
                && draw.chance(0.25)
                && let ColumnSpec::Class { classes, text: true } = *last
            {
                *last = ColumnSpec::Labels { labels: classes, separator: "+" };
                data.set("label_separator", "+");
                if data.get("split").and_then(Value::as_str) == Some("stratified") {
                    data.set("split", "random");
                }
                data.remove("task");
                if draw.chance(0.5) {
                    data.set("task", draw.pick(&["labels", "auto"]));
                }
            } else if !parts.classes && !single && draw.chance(0.4) {
                let is_target = |column: &ColumnSpec| matches!(column, ColumnSpec::Number { .. });
                let targets = target.as_ref().and_then(Value::as_array).map_or(0, Vec::len);
                let columns = table.columns.iter_mut().rev().take(targets);
                columns.filter(|column| is_target(column)).for_each(|column| *column = ColumnSpec::Flag);
                data.set("task", "labels");
            }
            if draw.chance(0.25) {
                data.set("weight", name(table.columns.len()));
                table.columns.push(ColumnSpec::Weight);
            }
        }
        DataSpec::Images(_) => {
            let augment = data.get("augment").and_then(Value::as_table);
            let mixes = augment.is_some_and(|keys| keys.contains_key("mixup") || keys.contains_key("cutmix"));
            if !mixes && draw.chance(0.15) {
                data.set("label_separator", "+");
            }
        }
        _ => {}
    }
}

pub fn choose(draw: &mut Draw, parts: &mut ModelAndData) {
    match &mut parts.files {
        DataSpec::Table(table) => choose_table(draw, &mut parts.data, table),
        DataSpec::Tokens(tokens) => choose_token_width(draw, &mut parts.data, tokens),
        DataSpec::Jsonl(records) => {
            if let Some(chats) = &mut records.chats {
                choose_chat(draw, &mut parts.data, chats);
            }
        }
        DataSpec::None | DataSpec::Images(_) | DataSpec::Idx(_) | DataSpec::Text(_) => {}
    }
}

fn choose_table(draw: &mut Draw, data: &mut Table, table: &mut TableSpec) {
    let TableFormat::Csv { delimiter, skip_lines, packing, style } = &mut table.format else { return };
    if table.header && *skip_lines == 0 && draw.chance(0.2) {
        for key in ["delimiter", "header", "skip_lines"] {
            data.remove(key);
        }
        data.set("kind", "json");
        for key in ["train", "valid", "test"] {
            for name in data.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten() {
                *name = Value::from(name.as_str().unwrap_or_default().replace(".csv", ".json"));
            }
        }
        table.format = TableFormat::Json { array: draw.chance(0.5), packing: *packing };
        return;
    }
    if !data.contains_key("delimiter") && draw.chance(0.3) {
        data.set("delimiter", "auto");
    }
    if draw.chance(0.3) {
        let quote = draw.pick(&["auto", "\"", "'"]);
        data.set("quote", quote);
        style.single_quotes = quote == "'";
    }
    if draw.chance(0.3) {
        let comment = draw.pick(&["auto", "none", "#", "%"]);
        data.set("comment", comment);
        style.comment = matches!(comment, "#" | "%").then_some(comment);
    }
    if draw.chance(0.3) {
        let encoding = draw.pick(&["auto", "utf-8", "latin-1", "utf-16"]);
        data.set("encoding", encoding);
        style.utf16 = encoding == "utf-16";
    }
    if draw.chance(0.3) {
        // A comma cannot be both.
        let decimal = draw.pick(if *delimiter == "," { &["auto", "."] } else { &["auto", ".", ","] });
        data.set("decimal", decimal);
        style.decimal_comma = decimal == ",";
    }
    if draw.chance(0.2) {
        data.set("dates", draw.pick(&["auto", "day_first", "month_first"]));
    }
}

fn choose_token_width(draw: &mut Draw, data: &mut Table, tokens: &mut TokenFileSpec) {
    if tokens.header || !draw.chance(0.3) {
        return;
    }
    let (name, bytes) = draw.pick(&[("u8", 1), ("u64", 8)]);
    if bytes == 8 || tokens.vocab <= 256 {
        data.set("dtype", name);
        tokens.id_bytes = Some(bytes);
    }
}

fn choose_chat(draw: &mut Draw, data: &mut Table, chats: &mut ChatSpec) {
    if !draw.chance(0.6) {
        return;
    }
    let format = draw.pick(&["messages", "sharegpt", "alpaca", "prompt_completion"]);
    data.set("chat", format);
    if matches!(format, "alpaca" | "prompt_completion") {
        data.remove("messages");
    }
    chats.format = format;
}
