//! What tools publish beside a `tokenizer.json`: which tokens begin and end a text, and the chat template.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::base::regular_file;

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";

/// The files, as they are called. Checkpoints keep those that the tokenizer came with.
pub const SETTINGS_FILES: [&str; 3] = [CONFIG, SPECIAL_TOKENS, TEMPLATE];

/// Upper bound on the size of each.
pub const MAX_SETTINGS_BYTES: u64 = 16 << 20;

/// The files beside `tokenizer` that exist.
pub fn settings_files(tokenizer: &Path) -> impl Iterator<Item = PathBuf> {
    SETTINGS_FILES.into_iter().map(|name| tokenizer.with_file_name(name)).filter(|file| file.is_file())
}

/// All that they say, under the keys of `tokenizer_config.json`, which comes first; null if there are none. A file that
/// cannot be read is treated as absent.
pub fn settings_beside(tokenizer: &Path) -> Value {
    let read = |name: &str| regular_file::read(&tokenizer.with_file_name(name), MAX_SETTINGS_BYTES).ok();
    let object = |name: &str| match serde_json::from_slice(&read(name)?).ok()? {
        Value::Object(object) => Some(object),
        _ => None,
    };
    let template = read(TEMPLATE).and_then(|text| String::from_utf8(text).ok());
    let mut settings = object(CONFIG).unwrap_or_default();
    for (key, value) in object(SPECIAL_TOKENS).into_iter().flatten() {
        settings.entry(key).or_insert(value);
    }
    if let Some(template) = template {
        settings.entry("chat_template").or_insert(template.into());
    }
    if settings.is_empty() { Value::Null } else { settings.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_read_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = folder.path().join("tokenizer.json");
        assert_eq!((settings_beside(&tokenizer), settings_files(&tokenizer).count()), (Value::Null, 0));
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(SPECIAL_TOKENS, r#"{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}"#);
        write(TEMPLATE, "{{ messages }}");
        write(CONFIG, r#"{"eos_token": "<|end|>"}"#);
        let settings = settings_beside(&tokenizer);
        assert_eq!(settings["eos_token"], "<|end|>");
        assert_eq!(
            (&settings["bos_token"], &settings["chat_template"]),
            (&"<s>".into(), &"{{ messages }}".into())
        );
        write(CONFIG, "no JSON");
        assert_eq!(settings_beside(&tokenizer)["eos_token"]["content"], "</s>");
        assert_eq!(settings_files(&tokenizer).count(), 3);
    }
}
