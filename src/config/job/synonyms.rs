//! Names that people bring from other tools, and what means the same here: keys, values of keys, commands.
//!
//! One name may stand for several keys: the first of them that the table with the unknown name has is meant.

mod choices;
mod keys;

use serde_json::Value;

use super::schema::kinds;
use choices::{CHOICES, FILE_KINDS};
use keys::{KEYS, NOT_STATED, TABLES};

/// (command, names).
const COMMANDS: &[(&str, &str)] = &[
    ("fit", "train run start finetune fine_tune pretrain launch"),
    ("fit JOB --resume", "resume continue restart"),
    ("check", "validate lint data"),
    ("eval", "evaluate test score"),
    ("predict", "infer inference apply"),
    ("generate", "sample chat complete prompt"),
    ("tune", "sweep search hpo optimize"),
    ("init", "new create template templates"),
    ("runs", "list ls history status"),
    ("compare", "diff"),
    ("export", "convert save"),
    ("compress", "shrink quantize quantise"),
    ("plan", "memory estimate dry_run"),
    ("probe", "info devices doctor env"),
    ("report", "plot html"),
    ("watch", "tail monitor"),
];

/// Names for `kind`, in tables that have one.
const KIND: &str = "type name class_name arch architecture format model_type optimizer_type";

fn normalize(name: &str) -> String {
    name.to_lowercase().replace(['-', ' '], "_")
}

/// Whether `name` is one of `names`.
fn listed(names: &str, name: &str) -> bool {
    names.split(' ').any(|other| other == name)
}

/// The first of `table` with this name.
fn find<'a>(table: &[(&'a str, &str)], name: &str) -> Option<&'a str> {
    let name = normalize(name);
    table.iter().find(|(_, names)| listed(names, &name)).map(|(meaning, _)| *meaning)
}

fn with_note(text: String, note: &str) -> String {
    if note.is_empty() { text } else { format!("{text}, {note}") }
}

/// Every dotted key that other tools call `name`, with a note.
fn keys_called(name: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let name = normalize(name);
    KEYS.iter().filter(move |(.., names)| listed(names, &name)).map(|(key, note, _)| (*key, *note))
}

/// What to write instead of `name` in the table `path`, which has the keys `known`: one of these.
pub(super) fn synonym_here(name: &str, path: &str, known: &[&str]) -> Option<String> {
    // An item of a list: `train.groups[0]`.
    let path = path.split('[').next().unwrap_or(path);
    let here = |key: &str| {
        let (table, key) = key.rsplit_once('.').unwrap_or(("", key));
        table == path && known.contains(&key)
    };
    if let Some((key, note)) = keys_called(name).find(|(key, _)| here(key)) {
        return Some(with_note(format!("here it is called `{key}`"), note));
    }
    let is_kind = known.contains(&"kind") && listed(KIND, &normalize(name));
    is_kind.then(|| "here it is called `kind`".to_owned())
}

/// What to write instead of `name`, which no table has under this name, or this table does not.
pub(super) fn synonym_elsewhere(name: &str, path: &str, is_table: bool, schema: &Value) -> Option<String> {
    if path.is_empty()
        && is_table
        && let Some(table) = find(TABLES, name)
    {
        return Some(format!("here it is called `[{table}]`"));
    }
    if let Some(why) = find(NOT_STATED, name) {
        return Some(format!("a job does not state it: {why}"));
    }
    let (key, note) = keys_called(name).next()?;
    let (table, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    let text = match (table, leaf == normalize(name)) {
        ("", true) => format!("`{leaf}` stands at the top of the file, above the first table"),
        ("", false) => format!("here it is called `{leaf}`, at the top of the file, above the first table"),
        (table, true) => format!("`{leaf}` is a key of [{table}]"),
        (table, false) if table == path => {
            format!("here it is called `{key}`, a key of kind {}", owners(schema, table, leaf))
        }
        _ => format!("here it is called `{key}`"),
    };
    Some(with_note(text, note))
}

/// The kinds of a table that have a key.
fn owners(schema: &Value, table: &str, key: &str) -> String {
    let kinds = kinds(&schema["properties"][table]).iter();
    let owners = kinds.filter(|kind| kind["properties"].get(key).is_some()).filter_map(super::schema::kind);
    owners.map(|kind| format!("\"{kind}\"")).collect::<Vec<_>>().join(", ")
}

/// What to write instead of `text`, which is none of `choices`.
pub(super) fn synonym_choice(text: &str, choices: &[&str]) -> Option<String> {
    if let Some(kind) = find(FILE_KINDS, text).filter(|kind| choices.contains(kind)) {
        return Some(format!("`{kind}` is the kind of such files"));
    }
    let name = normalize(text);
    let called = |name: &str| {
        CHOICES.iter().find(|(choice, _, names)| choices.contains(choice) && listed(names, name))
    };
    if let Some((choice, note, _)) = called(&name) {
        return Some(with_note(format!("here it is called \"{choice}\""), note));
    }
    // A metric of the validation set: `val_loss` is `valid.loss`.
    let metric = ["validation_", "valid_", "val_", "eval_", "val/", "valid/", "eval/", "val.", "eval."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(&name);
    let of_valid = |metric: &str| choices.iter().find(|choice| choice.strip_prefix("valid.") == Some(metric));
    let (metric, note) = of_valid(metric).map(|metric| (metric, "")).or_else(|| {
        let mut names = CHOICES.iter().filter(|(.., names)| listed(names, metric));
        names.find_map(|(choice, note, _)| Some((of_valid(choice)?, *note)))
    })?;
    Some(with_note(format!("here it is called \"{metric}\""), note))
}

/// The key of a job that a command-line flag `name`, without its dashes, is meant to set.
pub fn flag_key(name: &str) -> Option<String> {
    if let Some((key, _)) = keys_called(name).next() {
        return Some(key.to_owned());
    }
    let (name, schema) = (normalize(name), super::schema());
    let tables = schema["properties"].as_object()?;
    let has_key = |table: &Value| kinds(table).iter().any(|kind| kind["properties"].get(&name).is_some());
    let mut owners = tables.iter().filter(|(_, table)| name != "kind" && has_key(table));
    // A key of several tables, such as `every_steps`, is none of them more than another.
    match (owners.next(), owners.next()) {
        (Some((table, _)), None) => Some(format!("{table}.{name}")),
        _ => None,
    }
}

/// Why no flag sets what `name`, without its dashes, means.
pub fn flag_note(name: &str) -> Option<&'static str> {
    find(NOT_STATED, name)
}

/// The command that other tools call `name`.
pub fn command_called(name: &str) -> Option<&'static str> {
    find(COMMANDS, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key, choice, table and kind that a hint names exists in the schema.
    #[test]
    fn synonyms_lead_to_what_exists() {
        let schema = crate::job::schema();
        for (key, ..) in KEYS {
            let step = |tables: Vec<&Value>, part: &str| -> Vec<Value> {
                let kinds = tables.into_iter().flat_map(kinds);
                let found = kinds.filter_map(|kind| kind["properties"].get(part));
                found.map(|found| found.get("items").unwrap_or(found).clone()).collect()
            };
            let found =
                key.split('.').fold(vec![schema.clone()], |found, part| step(found.iter().collect(), part));
            assert!(!found.is_empty(), "{key}");
        }
        let text = schema.to_string();
        for choice in CHOICES.iter().map(|row| row.0).chain(FILE_KINDS.iter().map(|row| row.0)) {
            assert!(text.contains(&format!("\"{choice}\"")), "{choice}");
        }
        for (table, _) in TABLES {
            assert!(schema["properties"].get(table).is_some(), "{table}");
        }
    }

    /// A name that is a key of the job's own cannot be unknown, and a name is listed once for a key.
    #[test]
    fn names_are_listed_once() {
        for (i, (key, _, names)) in KEYS.iter().enumerate() {
            for name in names.split(' ') {
                assert_eq!(name, normalize(name), "{key}");
                let again = KEYS[i + 1..].iter().any(|(other, _, names)| other == key && listed(names, name));
                assert!(!again, "{name} of {key}");
                assert!(find(NOT_STATED, name).is_none() || name == "vocab_size", "{name}");
            }
        }
        for names in CHOICES.iter().map(|row| row.2).chain(COMMANDS.iter().map(|row| row.1)) {
            assert!(names.split(' ').all(|name| !name.is_empty()), "{names}");
        }
    }

    /// The hint for `key` in a job with `table`, as TOML, and this line in it.
    fn hint(table: &str, line: &str) -> String {
        let header = table.rsplit_once('[').map_or("", |(_, header)| header);
        let name = header.split(']').next().unwrap_or_default();
        let name = if table.starts_with("[[") { format!("{name}[0]") } else { name.to_owned() };
        let text = format!("{table}\n{line}\n");
        let errors = crate::job::Job::parse(&text, std::path::Path::new("x.toml"), &[]).unwrap_err().0;
        let key = format!("{name}.{}", line.split_once(" =").unwrap().0);
        let error = errors.iter().find(|error| error.key.as_deref() == Some(key.trim_start_matches('.')));
        error.unwrap_or_else(|| panic!("no error of {key}")).hint.clone().unwrap_or_default()
    }

    #[test]
    fn a_hint_depends_on_the_table_and_its_kind() {
        for (table, name, key) in [
            ("[data]\nkind = 'text'", "tokenizer", "`data.tokens`"),
            ("[data]\nkind = 'csv'", "drop_columns", "`data.ignore`"),
            ("[data]\nkind = 'csv'", "drop", "`data.ignore`"),
            ("[data]\nkind = 'csv'", "index_col", "`data.ignore`"),
            ("[data]\nkind = 'csv'", "labels", "`data.target`"),
            ("[data]\nkind = 'csv'", "label_column", "`data.target`"),
            ("[data]\nkind = 'images'", "labels", "`data.label_column`"),
            ("[data]\nkind = 'jsonl'", "labels", "`data.label`"),
            ("[data]\nkind = 'csv'", "separator", "`data.delimiter`"),
            ("[data]\nkind = 'csv'", "sep", "`data.delimiter`"),
            ("[data]\nkind = 'csv'", "na_values", "`data.missing`"),
            ("[data]\nkind = 'csv'", "features", "`data.columns`"),
            ("[data]\nkind = 'csv'", "sample_weight", "`data.weight`"),
            ("[data]\nkind = 'csv'", "normalize", "`data.standardise`"),
            ("[data]\nkind = 'images'", "normalize", "`data.normalise`"),
            ("[data]\nkind = 'csv'", "dayfirst", "`dates = \"day_first\"`"),
            ("[data]\nkind = 'csv'", "val_set_size", "`data.valid_fraction`"),
            ("[data]\nkind = 'csv'", "validation", "`data.valid`"),
            ("[data]\nkind = 'csv'", "dataset", "`data.train`"),
            ("[data]\nkind = 'csv'", "path", "`data.train`"),
            ("[data]\nkind = 'idx'", "train", "`data.train_images`"),
            ("[data]\nkind = 'csv'", "class_weight", "`train.class_weights`"),
            ("[data]\nkind = 'csv'", "text_field", "kind \"jsonl\""),
            ("[data]\nkind = 'csv'", "format", "`kind`"),
            ("[model]", "type", "`kind`"),
            ("[model]\nkind = 'mlp'", "layers", "`model.hidden`"),
            ("[model]\nkind = 'mlp'", "hidden_size", "`model.hidden`"),
            ("[model]\nkind = 'gpt'", "hidden_size", "`model.width`"),
            ("[optimizer]", "name", "`kind`"),
            ("[optimizer]", "wd", "`optimizer.weight_decay`"),
            ("[train]", "lr", "`lr` is a key of [optimizer]"),
            ("[train]", "optimizer", "`optimizer.kind`"),
            ("[train]", "lr_scheduler", "`schedule.kind`"),
            ("[train]", "dtype", "`train.precision`"),
            ("[train]", "seed", "top of the file"),
            ("[train]", "random_state", "`seed`"),
            ("[train]", "early_stopping", "`stop.patience`"),
            ("[train]", "save_steps", "`checkpoint.every_steps`"),
            ("[train]", "eval_steps", "`eval.every_steps`"),
            ("[train]", "logging_steps", "`log.every_steps`"),
            ("[train]", "monitor", "`checkpoint.best`"),
            ("[stop]", "monitor", "`stop.metric`"),
            ("[train]", "save_top_k", "`checkpoint.keep`"),
            ("[train]", "gradient_checkpointing", "`recompute`"),
            ("[train]", "output_dir", "--run-dir"),
            ("[log]", "wandb", "`log.mlflow`"),
            ("[eval]", "metric", "did you mean `metrics`?"),
            ("[data]\nkind = 'images'\n[data.augment]", "hflip", "`data.augment.horizontal_flip`"),
            ("[data]\nkind = 'images'", "hflip", "`data.augment.horizontal_flip`"),
            ("[[train.groups]]", "lr", "`train.groups.lr_scale`"),
        ] {
            let hint = hint(table, &format!("{name} = 1"));
            assert!(hint.contains(key), "{name} in {table}: {hint}");
        }
    }

    #[test]
    fn values_of_other_tools_are_named() {
        for (table, line, choice) in [
            ("[data]\nkind = 'csv'", "task = 'regression'", "values"),
            ("[data]\nkind = 'csv'", "task = 'classification'", "classes"),
            ("[data]\nkind = 'csv'", "task = 'multilabel'", "labels"),
            ("[data]\nkind = 'csv'", "task = 'binary'", "classes"),
            ("[data]\nkind = 'csv'", "on_missing = 'drop'", "skip"),
            ("[data]\nkind = 'csv'", "on_unknown = 'ignore'", "zeros"),
            ("[data]\nkind = 'csv'", "encoding = 'cp1252'", "latin-1"),
            ("[data]\nkind = 'csv'", "encoding = 'ISO-8859-1'", "latin-1"),
            ("[data]\nkind = 'tokens'", "dtype = 'uint16'", "u16"),
            ("[train]", "loss = 'categorical_crossentropy'", "cross_entropy"),
            ("[train]", "loss = 'mean_squared_error'", "mse"),
            ("[train]", "loss = 'binary_crossentropy'", "bce"),
            ("[train]", "precision = 'bf16-mixed'", "bf16"),
            ("[model]\nkind = 'mlp'", "activation = 'swish'", "silu"),
            ("[optimizer]", "kind = 'adam'", "adamw"),
            ("[schedule]", "kind = 'constant_with_warmup'", "constant"),
            ("[model]", "kind = 'resnet50'", "resnet"),
            ("[checkpoint]", "best = 'val_loss'", "valid.loss"),
        ] {
            let hint = hint(table, line);
            assert!(hint.contains(&format!("\"{choice}\"")), "{line} in {table}: {hint}");
        }
        assert_eq!(synonym_choice("auc", &["accuracy", "roc_auc"]).unwrap(), "here it is called \"roc_auc\"");
        assert!(hint("", "model = 'mlp'").contains("`kind = \"mlp\"`"));
    }

    #[test]
    fn flags_are_keys_of_one_table() {
        for (flag, key) in [
            ("epochs", Some("train.epochs")),
            ("seed", Some("seed")),
            ("hidden", Some("model.hidden")),
            ("precision", Some("train.precision")),
            ("warmup-steps", Some("schedule.warmup_steps")),
            ("batch-size", Some("train.batch_size")),
            ("layers", Some("model.layers")),
            ("every-steps", None),
            ("kind", None),
            ("gpus", None),
        ] {
            assert_eq!(flag_key(flag).as_deref(), key, "{flag}");
        }
        assert!(flag_note("gpus").is_some_and(|note| note.contains("--device")));
    }

    #[test]
    fn metrics_of_other_tools_are_those_of_the_validation_set() {
        let choices = ["valid.loss", "valid.accuracy", "valid.roc_auc", "valid.rmse"];
        for (name, choice) in [
            ("val_loss", "valid.loss"),
            ("eval_loss", "valid.loss"),
            ("loss", "valid.loss"),
            ("val_acc", "valid.accuracy"),
            ("accuracy", "valid.accuracy"),
            ("val/auroc", "valid.roc_auc"),
            ("val_mse", "valid.rmse"),
        ] {
            let hint = synonym_choice(name, &choices).unwrap_or_default();
            assert!(hint.contains(&format!("\"{choice}\"")), "{name}: {hint}");
        }
        assert_eq!(synonym_choice("val_bleu", &choices), None);
    }
}
