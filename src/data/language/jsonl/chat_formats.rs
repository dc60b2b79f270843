//! Chats as datasets publish them, as messages with a role and a content.
//!
//! OpenAI's and Hugging Face's `role` and `content`, whose content may be a list of parts or null beside tool calls;
//! ShareGPT's `from` and `value`; Alpaca's `instruction`, `input` and `output`; `prompt` and `completion`.

use serde_json::Value;

use super::record::{field, json_type, lookup, string};
use super::template::{ChatMessage, REASONING_FIELDS};

/// Where the messages of a record are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatLayout {
    /// A list in this field, of messages with `role` and `content` or with `from` and `value`.
    Messages { field: String },
    /// `instruction`, `output`, and optionally `input`, `system` and `history`.
    Alpaca,
    /// `prompt` and `completion`: texts, or lists of messages.
    PromptCompletion,
}

impl ChatLayout {
    /// The fields that every record has.
    pub fn fields(&self) -> Vec<&str> {
        match self {
            Self::Messages { field } => vec![field.as_str()],
            Self::Alpaca => vec!["instruction", "output"],
            Self::PromptCompletion => vec!["prompt", "completion"],
        }
    }
}

/// Roles, and the names that datasets have for them.
const ROLES: [(&str, &[&str]); 5] = [
    ("system", &["system"]),
    ("developer", &["developer"]),
    ("user", &["user", "human"]),
    ("assistant", &["assistant", "gpt", "chatgpt", "model", "bot", "function_call", "function-call"]),
    ("tool", &["tool", "function", "observation", "function_response", "function-response"]),
];

/// The messages of a record.
pub fn messages(object: &Value, format: &ChatLayout) -> Result<Vec<ChatMessage>, String> {
    match format {
        ChatLayout::Messages { field: name } => message_list(field(object, name)?, name),
        ChatLayout::Alpaca => {
            let mut request = string(object, "instruction")?.to_owned();
            if let Some(input) = optional_text(object, "input")? {
                request = format!("{request}\n\n{input}");
            }
            let system = optional_text(object, "system")?.map(|text| ChatMessage::new("system", text));
            let turns = [("user", request), ("assistant", string(object, "output")?.to_owned())];
            let turns = turns.map(|(role, text)| ChatMessage::new(role, text));
            Ok(system.into_iter().chain(history(object)?).chain(turns).collect())
        }
        ChatLayout::PromptCompletion => {
            let mut all = Vec::new();
            for (name, role) in [("prompt", "user"), ("completion", "assistant")] {
                match field(object, name)? {
                    Value::String(text) => all.push(ChatMessage::new(role, text.clone())),
                    list @ Value::Array(_) => all.extend(message_list(list, name)?),
                    other => {
                        return Err(format!(
                            "`{name}` must be a string or a list of messages, not {}",
                            json_type(other)
                        ));
                    }
                }
            }
            Ok(all)
        }
    }
}

/// The format that a record without the fields of `format` seems to have, as the keys that declare it.
pub fn suggest(object: &Value, format: Option<&ChatLayout>) -> Option<&'static str> {
    let has = |name: &str| object.get(name).is_some();
    if has("conversations") {
        Some("`chat = \"sharegpt\"`")
    } else if has("messages") && !matches!(format, Some(ChatLayout::Messages { .. })) {
        Some("`chat = \"messages\"`")
    } else if has("instruction") && has("output") {
        Some("`chat = \"alpaca\"`")
    } else {
        (has("prompt") && has("completion")).then_some("`chat = \"prompt_completion\"`")
    }
}

/// Earlier turns of an Alpaca record: a list of pairs of a request and its answer.
fn history(object: &Value) -> Result<Vec<ChatMessage>, String> {
    let wrong = |found: &Value| {
        format!("`history` must be a list of pairs of a request and an answer, not {}", json_type(found))
    };
    let pairs = match lookup(object, "history") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(pairs)) => pairs,
        Some(other) => return Err(wrong(other)),
    };
    let mut turns = Vec::new();
    for pair in pairs {
        match pair.as_array().map(Vec::as_slice) {
            Some([Value::String(request), Value::String(answer)]) => {
                turns.push(ChatMessage::new("user", request.clone()));
                turns.push(ChatMessage::new("assistant", answer.clone()));
            }
            _ => return Err(wrong(pair)),
        }
    }
    Ok(turns)
}

/// Whether the loss may include a message: OpenAI excludes one with `"weight": 0`, axolotl with `"train": false`.
fn is_learned(message: &Value) -> Result<bool, String> {
    let is = |name: &str| match message.get(name) {
        None | Some(Value::Null) => Ok(true),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::Number(number)) if number.as_f64() == Some(0.0) => Ok(false),
        Some(Value::Number(number)) if number.as_f64() == Some(1.0) => Ok(true),
        Some(other) => Err(format!("`{name}` of a message must be 0 or 1, false or true, not {other}")),
    };
    Ok(is("weight")? && is("train")?)
}

/// A text that may be absent, null or empty.
fn optional_text<'a>(object: &'a Value, name: &str) -> Result<Option<&'a str>, String> {
    match lookup(object, name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.trim().is_empty())),
        Some(other) => Err(format!("`{name}` must be a string, not {}", json_type(other))),
    }
}

fn message_list(value: &Value, name: &str) -> Result<Vec<ChatMessage>, String> {
    let list =
        value.as_array().ok_or_else(|| format!("`{name}` must be a list, not {}", json_type(value)))?;
    if list.is_empty() {
        return Err(format!("`{name}` is empty"));
    }
    list.iter().map(message).collect()
}

fn message(value: &Value) -> Result<ChatMessage, String> {
    if !value.is_object() {
        return Err(format!("a message must be an object, not {}", json_type(value)));
    }
    if value.get("role").is_none() && value.get("from").is_some() {
        let message = ChatMessage::new(role(string(value, "from")?)?, string(value, "value")?.to_owned());
        return Ok(ChatMessage { learned: is_learned(value)?, ..message });
    }
    let role = role(string(value, "role")?)?;
    let tool_calls =
        value.get("tool_calls").filter(|calls| calls.as_array().is_some_and(|list| !list.is_empty()));
    let content = match lookup(value, "content") {
        None | Some(Value::Null) if tool_calls.is_some() => None,
        None | Some(Value::Null) if role == "assistant" && value.get("function_call").is_some() => None,
        None => Some(string(value, "content")?.to_owned()),
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(parts)) => {
            Some(parts.iter().map(content_part).collect::<Result<String, String>>()?)
        }
        Some(other) => {
            return Err(format!(
                "`content` must be a string, a list of parts, or null beside `tool_calls`, not {}",
                json_type(other)
            ));
        }
    };
    let more = ["tool_calls", "function_call", "tool_call_id", "name"]
        .into_iter()
        .chain(REASONING_FIELDS)
        .filter_map(|name| Some((name, value.get(name)?)).filter(|(_, value)| !value.is_null()))
        .map(|(name, value)| (name, value.clone()));
    Ok(ChatMessage { role: role.to_owned(), content, more: more.collect(), learned: is_learned(value)? })
}

/// The text of a part of a content.
fn content_part(part: &Value) -> Result<&str, String> {
    match part {
        Value::String(text) => Ok(text),
        Value::Object(_) => match part.get("type").and_then(Value::as_str) {
            None | Some("text" | "input_text" | "output_text") => string(part, "text"),
            Some(other) => {
                Err(format!("a part of `content` has the type `{other}`; only texts can be trained on"))
            }
        },
        other => Err(format!("a part of `content` must be an object, not {}", json_type(other))),
    }
}

fn role(name: &str) -> Result<&'static str, String> {
    let known = ROLES.iter().find(|(_, names)| names.contains(&name));
    known.map(|(role, _)| *role).ok_or_else(|| {
        let names: Vec<&str> = ROLES.iter().map(|(role, _)| *role).collect();
        format!(
            "unknown role `{name}` of a message; expected one of {}, or ShareGPT's human and gpt",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(line: &str, format: ChatLayout) -> Result<Vec<(String, Option<String>)>, String> {
        let object: Value = serde_json::from_str(line).unwrap();
        Ok(messages(&object, &format)?.into_iter().map(|m| (m.role, m.content)).collect())
    }

    fn of(turns: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
        turns.iter().map(|(role, text)| (role.to_string(), Some(text.to_string()))).collect()
    }

    #[test]
    fn published_formats_are_the_same_chat() {
        let expected = of(&[("user", "Hi"), ("assistant", "Yo")]);
        let list = |field: &str| ChatLayout::Messages { field: field.into() };
        for (line, format) in [
            (
                r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}"#,
                list("messages"),
            ),
            (
                r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}"#,
                list("conversations"),
            ),
            (
                r#"{"data": {"chat": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, {"role": "assistant", "content": "Yo"}]}}"#,
                list("data.chat"),
            ),
            (r#"{"instruction": "Hi", "input": "", "output": "Yo"}"#, ChatLayout::Alpaca),
            (r#"{"prompt": "Hi", "completion": "Yo"}"#, ChatLayout::PromptCompletion),
            (
                r#"{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yo"}]}"#,
                ChatLayout::PromptCompletion,
            ),
        ] {
            assert_eq!(turns(line, format).unwrap(), expected, "{line}");
        }
        let alpaca = r#"{"system": "Be brief.", "instruction": "Add", "input": "1, 2", "output": "3"}"#;
        let expected = of(&[("system", "Be brief."), ("user", "Add\n\n1, 2"), ("assistant", "3")]);
        assert_eq!(turns(alpaca, ChatLayout::Alpaca).unwrap(), expected);
        let alpaca = r#"{"instruction": "Bye", "output": "Ciao", "history": [["Hi", "Yo"]]}"#;
        let expected = of(&[("user", "Hi"), ("assistant", "Yo"), ("user", "Bye"), ("assistant", "Ciao")]);
        assert_eq!(turns(alpaca, ChatLayout::Alpaca).unwrap(), expected);
        let wrong = turns(&alpaca.replace("[[\"Hi\", \"Yo\"]]", "[\"Hi\"]"), ChatLayout::Alpaca).unwrap_err();
        assert_eq!(wrong, "`history` must be a list of pairs of a request and an answer, not a string");
    }

    #[test]
    fn messages_can_be_excluded_from_the_loss() {
        for (fields, learned) in [
            ("", Some(true)),
            (", \"weight\": 1", Some(true)),
            (", \"weight\": 0", Some(false)),
            (", \"train\": true, \"weight\": null", Some(true)),
            (", \"train\": false", Some(false)),
            (", \"weight\": 0.5", None),
        ] {
            for text in [r#""role": "assistant", "content": "x""#, r#""from": "gpt", "value": "x""#] {
                let line = format!("{{\"messages\": [{{{text}{fields}}}]}}");
                let object: Value = serde_json::from_str(&line).unwrap();
                let found = messages(&object, &ChatLayout::Messages { field: "messages".into() });
                assert_eq!(found.ok().map(|messages| messages[0].learned), learned, "{line}");
            }
        }
    }

    #[test]
    fn tool_calls_may_lack_a_content_and_nothing_else_may() {
        let list = || ChatLayout::Messages { field: "messages".into() };
        let call = r#"{"messages": [{"role": "developer", "content": "x"}, {"role": "assistant", "content": null,
            "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, {"role": "tool", "content": "3"}]}"#;
        let found = turns(call, list()).unwrap();
        assert_eq!(found[1], ("assistant".into(), None));
        assert_eq!((&*found[0].0, &*found[2].0), ("developer", "tool"));
        for (line, expected) in [
            (r#"{"messages": [{"role": "user", "content": null}]}"#, "beside `tool_calls`, not null"),
            (r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "type `image_url`"),
            (r#"{"messages": ["x"]}"#, "a message must be an object, not a string"),
            (r#"{"messages": [{"from": "alien", "value": "x"}]}"#, "unknown role `alien`"),
        ] {
            let error = turns(line, list()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
